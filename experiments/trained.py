"""Train the models that travel with the package, and measure them.

    python experiments/trained.py                   all three, in ten minutes
    python experiments/trained.py --only stories    one of them
    python experiments/trained.py --steps 2 --out some/folder

They go to tformer/weights/NAME/: weights in bfloat16, configuration, tokenizer,
and card.json, which says how a model was made and how good it is. `stories` is
a Llama of whole-word tokens that tells one story a text; `tour` is the model of
chapter 0, trained as it is there, and `tour_no_mask` the same without its mask.
What is measured is measured on the weights as they are written, rounded.
`--check` compares with the cards that are there, within bands, and writes
nothing.
"""
import argparse
import datetime
import platform
import time
from pathlib import Path

import torch
from torch.nn import functional as F

from tformer import stories
from tformer.llama import Llama, LlamaConfig
from tformer.minimal import evaluate, fit, sample, to_ids, to_text, windows
from tformer.tokenizer import Tokenizer, Vocabulary
from tformer.trained import (
    END, Tour, TourConfig, Trained, load, save_trained, share_copied,
    share_right, tell)

OUT = Path(__file__).parents[1] / "tformer" / "weights"
SCRIPT, SEED, LEVEL = "experiments/trained.py", 0, 1
STEPS = {"stories": 1000, "tour": 1800, "tour_no_mask": 1800}
BATCH, LOOKS, SAMPLES, RUNS = 32, 10, 200, (2, 4, 8, 16, 32)
SHAPE = dict(d_model=128, n_layers=4, n_heads=4, n_kv_heads=2, max_len=256,
             tied=True)
BANDS = {"loss": 0.01, "right": 0.04, "copied": 0.05}   # a retraining's


def rows(tokenizer, texts):
    "Each text as ids, between two ``END``."
    end = tokenizer.token_to_id(END)
    return [[end, *ids, end] for ids in tokenizer.encode_batch(texts)]


def padded(texts):
    "Texts of one batch side by side: ids, and targets, -100 = not counted."
    longest = max(map(len, texts)) - 1
    ids = torch.zeros(len(texts), longest, dtype=torch.long)
    targets = torch.full_like(ids, -100)
    for row, text in enumerate(texts):
        ids[row, :len(text) - 1] = torch.tensor(text[:-1])
        targets[row, :len(text) - 1] = torch.tensor(text[1:])
    return ids, targets


def batches(texts, seed):
    "Each text once, beside others of its length."
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(texts), generator=draw).tolist()
    for i in range(0, len(order), 1024):
        near = sorted(order[i:i + 1024], key=lambda j: len(texts[j]))
        parts = [near[k:k + BATCH] for k in range(0, len(near), BATCH)]
        for k in torch.randperm(len(parts), generator=draw).tolist():
            yield padded([texts[j] for j in parts[k]])


def loss_of(model, batch, reduction="mean"):
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(),
                           reduction=reduction)


@torch.no_grad()
def nats_per_byte(model, texts, size):
    "The loss on whole texts that are ``size`` bytes, separators included."
    return sum(loss_of(model, padded(texts[i:i + 64]), "sum").item()
               for i in range(0, len(texts), 64)) / size


def train_stories(steps):
    "The storyteller, and what its card says."
    texts = list(stories.generate(500 * BATCH, SEED, LEVEL))
    texts = [text.rstrip("\n") for text in texts]
    new = [text.rstrip("\n") for text in stories.generate(500, 1, LEVEL)]
    size = sum(len(text.encode()) + 1 for text in new)
    tokenizer = Tokenizer.train(texts[:4000], 632, special_tokens=[END])
    asked = rows(tokenizer, new)
    torch.manual_seed(SEED)
    model = Llama(LlamaConfig(vocab_size=len(tokenizer), **SHAPE))
    curve, began, spent = [], time.perf_counter(), 0.0
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters()
              if not any(p is m for m in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=0.02, momentum=0.95,
                                   weight_decay=0.01),
                  torch.optim.AdamW(others, lr=5e-3, betas=(0.9, 0.95),
                                    weight_decay=0.0)]
    schedules = [torch.optim.lr_scheduler.LambdaLR(
        o, lambda k: min((k + 1) / 40, 1) * (0.525 + 0.475 * torch.cos(
            torch.tensor(torch.pi * k / steps)).item())) for o in optimizers]

    def look(step):
        told = tell(Trained(model.eval(), tokenizer, {}), SAMPLES // 2)
        curve.append({"step": step, "seconds": round(spent), "right":
                      round(share_right(told), 4), "loss": round(
                          nats_per_byte(model, asked[:200], sum(
                              len(t.encode()) + 1 for t in new[:200])), 4)})
        print(curve[-1], flush=True)
        model.train()

    look(0)
    for step, batch in zip(range(1, steps + 1),
                           batches(rows(tokenizer, texts), SEED)):
        began = time.perf_counter()
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o, s in zip(optimizers, schedules):
            o.step(), s.step(), o.zero_grad()
        spent += time.perf_counter() - began
        if step * LOOKS // steps > (step - 1) * LOOKS // steps:
            look(step)
    exact = nats_per_byte(model.eval(), asked, size)
    model.to(torch.bfloat16)
    card = dict(
        name="stories", about=f"tells small stories, one a text (level "
        f"{LEVEL} of tformer.stories)", script=SCRIPT, seed=SEED,
        steps=steps, seconds=round(spent), texts=steps * BATCH,
        samples=SAMPLES, loss_float32=round(exact, 5), curve=curve)
    return Trained(model, tokenizer, card), dict(asked=asked, size=size, new=new, texts=texts)


def measure_stories(trained, asked, size, new, texts):
    rounded = Trained(Llama(trained.model.config).eval(), trained.tokenizer, {})
    rounded.model.load_state_dict(trained.model.float().state_dict())
    trained.model.to(torch.bfloat16)
    told = tell(rounded, SAMPLES)
    cool = tell(rounded, SAMPLES, temperature=0.7)
    return dict(
        loss=round(nats_per_byte(rounded.model, asked, size), 5),
        right=round(share_right(told), 4),
        right_cool=round(share_right(cool), 4),
        copied=round(share_copied(told, texts), 4),
        copied_cool=round(share_copied(cool, texts), 4),
        runs=[{"words": n, "told": round(share_copied(told, texts, n), 4),
               "new": round(share_copied(new[:SAMPLES], texts, n), 4)}
              for n in RUNS])


if __name__ == "__main__":
    import sys
    t, how = train_stories(int(sys.argv[1]))
    t.card.update(measure_stories(t, **how))
    save_trained(t, sys.argv[2])
    print(t)
