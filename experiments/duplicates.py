"""What do near-duplicates in the held-out texts do to the held-out loss?

    python experiments/duplicates.py         both splits, three seeds, recorded
    python experiments/duplicates.py --steps 2 --seeds 1 --out some.csv

A corpus as one finds it: documents of Python's documentation, each of them
three times, in versions of which every twentieth word or so was replaced by
another word of the document. Two splits of it: document by document
(`by document`), and with versions kept on one side (`by family`). A small model
is trained on what each split gives it to train on, and its loss is measured, in
nats per token, on those texts, on the split's held-out texts, and on originals
of which no version is in the corpus: what the model is for.

The rows go to tformer/records/duplicates.csv: one for each split, seed and
moment. A run that was stopped goes on where it was.
"""

import random

import numpy as np
import torch
from torch.nn import functional as F

import common
from tformer.corpora.documents import find_near_duplicates, load_documents
from tformer.models.mini_gpt import MiniGPT
from tformer.text.tokenizer import Tokenizer
from tformer.training.data import (
    RandomWindowLoader,
    sequential_windows,
    split_documents,
)

STEPS = 800
LOOKS = 16
LENGTH = 64
BATCH = 8
LR = 3e-3
ORIGINALS = 100
NEW = 60
VERSIONS = 3
VOCAB = 600
SPLITS = {"by document": None, "by family": 0.3}  # how alike stay together


def version(text, dice):
    "The text with every twentieth word replaced by another of its words."
    words = text.split(" ")
    for i in dice.sample(range(len(words)), max(1, len(words) // 20)):
        words[i] = dice.choice(words)
    return " ".join(words)


def corpora(seed):
    "The corpus with its versions, and the originals that are not in it."
    some = [text for text in load_documents("pydocs") if 300 < len(text) < 1200]
    known = {i for pair in find_near_duplicates(some, 0.1) for i in pair[:2]}
    some = [text for i, text in enumerate(some) if i not in known]
    dice = random.Random(seed)
    dice.shuffle(some)
    new = some[:NEW]
    some = some[NEW : NEW + ORIGINALS]
    every = [
        text if n == 0 else version(text, dice)
        for text in some
        for n in range(VERSIONS)
    ]
    dice.shuffle(every)
    return every, new


@torch.no_grad()
def loss_on(model, ids):
    "Mean loss in nats per token."
    total = count = 0
    for batch in sequential_windows(ids, LENGTH, 32):
        logits = model(batch.ids)
        total += F.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), reduction="sum"
        )
        count += batch.num_targets
    return float(total / count)


def train(name, seed, steps):
    "The rows of one training: a moment each."
    every, new = corpora(seed)
    texts, held_out = split_documents(every, 0.2, seed, SPLITS[name])
    tokenizer = Tokenizer.train(texts, VOCAB)
    sets = {
        key: np.concatenate(tokenizer.encode_batch(some))
        for key, some in (("train", texts[:60]), ("held_out", held_out), ("new", new))
    }
    torch.manual_seed(seed)
    model = MiniGPT(VOCAB, d_model=96, max_len=LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), LR)
    batches = iter(
        RandomWindowLoader(
            np.concatenate(tokenizer.encode_batch(texts)), LENGTH, BATCH, seed
        )
    )
    moments = {round(i * steps / LOOKS) for i in range(LOOKS + 1)}
    for step in range(steps + 1):
        if step in moments:
            found = {key: loss_on(model, ids) for key, ids in sets.items()}
            yield row_of(name, seed, steps, step, found)
        batch = next(batches)
        loss = F.cross_entropy(model(batch.ids).flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(name, seed, {key: round(x, 2) for key, x in found.items()}, flush=True)


def row_of(name, seed, steps, step, found):
    return {
        "split": name,
        "seed": str(seed),
        "steps": str(steps),
        "step": str(step),
        **{key: f"{loss:.3f}" for key, loss in found.items()},
        **common.about(),
    }


def main():
    options = common.arguments(__doc__, STEPS, "duplicates.csv")
    torch.set_num_threads(1)
    rows = common.kept(options.out, options.again, steps=options.steps)
    for seed in range(options.seeds):
        for name in SPLITS:
            if any((row["split"], int(row["seed"])) == (name, seed) for row in rows):
                continue
            rows += train(name, seed, options.steps)
            common.write(rows, options.out)


if __name__ == "__main__":
    main()
