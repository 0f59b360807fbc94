"""Six trainings that go wrong, and healthy ones: the curves of chapter 17.

    python experiments/wrong.py              all, three seeds, two minutes
    python experiments/wrong.py --steps 2 --seeds 1 --out some.csv

A small modern decoder is trained for 200 steps on stories as tokens. Once all is
well (`healthy`). In each of the other cases one thing is changed: `A` reads the same
three batches over and over, `B` has targets that are not shifted, `C` a learning rate
that is fifty times too high, `D` a mask in which every token sees itself alone, `E`
data that are sorted, with Python's documentation after three fifths of the steps, and
`F` four batches of random tokens after half of the steps. All of them clip the
gradient to a norm of 1.

Two more cases never clip: `unclipped` is healthy otherwise, and `F unclipped` reads the
batches of `F`. What the random batches cost without clipping is the difference of
these two.

The rows go to tformer/records/wrong.csv, which travels with the package: one for
each case and seed. `losses` are those of all steps, in nats per token; `fresh`
are the losses on new stories after every 25 steps. A run that was stopped goes
on where it was.
"""

import functools
import math

import torch

import common
from tformer.corpora import stories
from tformer.corpora.documents import load_documents
from tformer.models.llama import Llama, LlamaConfig
from tformer.text.tokenizer import Tokenizer
from tformer.training.data import Batch, RandomWindowLoader
from tformer.training.optimizers import AdamW, clip_grad_norm_
from tformer.training.schedules import scale_lr, warmup_cosine
from tformer.training.trainer import mean_loss, next_token_loss

STEPS = 200
WARMUP = 20
LR = 8e-3
LOOK = 25
VOCAB = 512
WIDTH = 48
LAYERS = 2
LENGTH = 64
BATCH = 8
# characters
TRAIN = 1_000_000
READ = 300_000
HELD_OUT = 40_000


@functools.cache
def texts():
    "Ids of stories, of new stories, and of Python's documentation."
    text = stories.story_corpus(TRAIN, seed=0, level=1)
    tokenizer = Tokenizer.train([text[:READ]], VOCAB)
    return [
        torch.tensor(tokenizer.encode(t))
        for t in (
            text,
            stories.story_corpus(HELD_OUT, seed=1, level=1),
            "\n".join(load_documents("pydocs", 40)),
        )
    ]


def some(ids, n, seed=0):
    "The first so many batches of windows."
    batches = RandomWindowLoader(ids, LENGTH, seed=seed)
    return [b for _, b in zip(range(n), batches, strict=False)]


def blind(batches):
    "Every token sees itself alone."
    alone = torch.eye(LENGTH, dtype=torch.bool)[None, None]
    return [b._replace(mask=alone) for b in batches]


def unshifted_loss(model, batch):
    "The targets are the tokens that the model reads."
    return next_token_loss(model, batch._replace(targets=batch.ids))


def ways(seed, steps):
    "Of each case: its batches, new stories, and how it is trained."
    ids, held, docs = texts()
    batches = some(ids, steps, seed)
    news = some(held, 8, seed=1)
    draw = torch.Generator().manual_seed(seed)
    rubbish = [
        Batch(*torch.randint(VOCAB, (2, BATCH, LENGTH), generator=draw))
        for _ in range(4)
    ]
    early = steps * 3 // 5
    half = steps // 2
    sorted_ = batches[:early] + some(docs, steps - early, seed)
    spoiled = batches[:half] + rubbish + batches[half + 4 :]
    return {
        "healthy": (batches, news, {}),
        "A": (batches[:3], news, {}),
        "B": (batches, news, {"loss": unshifted_loss}),
        "C": (batches, news, {"lr": 50 * LR}),
        "D": (blind(batches), blind(news), {}),
        "E": (sorted_, news, {}),
        "F": (spoiled, news, {}),
        "unclipped": (batches, news, {"clip": math.inf}),
        "F unclipped": (spoiled, news, {"clip": math.inf}),
    }


def curves(batches, news, seed, steps, *, lr=LR, clip=1.0, loss=next_token_loss):
    "Losses of all steps, and those on new stories on the way."
    torch.manual_seed(seed)
    model = Llama(
        LlamaConfig(
            vocab_size=VOCAB,
            d_model=WIDTH,
            n_layers=LAYERS,
            n_heads=4,
            max_len=256,
            tie_word_embeddings=True,
        )
    )
    optimizer = AdamW(model.parameters(), lr, betas=(0.9, 0.95))
    schedule = warmup_cosine(steps, min(WARMUP, steps))
    found = []
    fresh = []
    for step in range(1, steps + 1):
        scale_lr(optimizer, schedule(step))
        mean = loss(model, batches[(step - 1) % len(batches)])
        model.zero_grad()
        mean.backward()
        clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        found.append(mean.item())
        if step % LOOK == 0 or step == steps:
            fresh.append(mean_loss(model, news, loss))
    return found, fresh


def train(case, seed, steps):
    "One row."
    batches, news, how = ways(seed, steps)[case]
    found, fresh = curves(batches, news, seed, steps, **how)
    return {
        "losses": " ".join(f"{x:.3f}" for x in found),
        "fresh": " ".join(f"{x:.3f}" for x in fresh),
    }


CASES = [{"case": name} for name in ("healthy", *"ABCDEF", "unclipped", "F unclipped")]


def main():
    torch.set_num_threads(1)
    common.run(CASES, train, common.arguments(__doc__, STEPS, "wrong.csv"))


if __name__ == "__main__":
    main()
