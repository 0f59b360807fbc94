"""Compare ways to tell a transformer where its tokens stand.

    python experiments/positions.py          all runs, five seeds, recorded
    python experiments/positions.py --steps 2 --seeds 1 --out some.csv

One causal layer is trained on sequences of 32 random tokens and tested on
sequences of 128, on two tasks in which order is all that counts:

back    name the token four places back (of 16; guessing gives 1/16);
latest  a token is a key and a value (four of each); name the value that came
        with the same key last time (guessing gives 1/4).

The rows go to tformer/records/positions.csv, which travels with the package. A
row is the accuracy over seeds in one block of sixteen positions, with the
lowest and the highest seed; positions 0 to 31 were trained on, the rest not.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import common
from tformer.nn.attention import SelfAttention
from tformer.nn.embedding import (
    Embedding,
    LearnedPositionEmbedding,
    SinusoidalPositionEmbedding,
)
from tformer.nn.feed_forward import FeedForward
from tformer.nn.layers import Linear, PreNorm
from tformer.nn.norms import LayerNorm
from tformer.nn.relative_bias import ALiBi, T5RelativeBias
from tformer.nn.rotary import RotaryEmbedding

OUT = common.RECORDS / "positions.csv"
D_MODEL = 64
N_HEADS = 4
VOCAB = 16
BATCH = 32
TRAINED = 32
TESTED = 128
BLOCK = 16
TEST_BATCH = 256
BACK = 4
VALUES = 4
NOTHING = -100  # no answer is asked for here

ABSOLUTE = {
    "sinusoid": lambda: SinusoidalPositionEmbedding(TESTED, D_MODEL),
    "learned": lambda: LearnedPositionEmbedding(TESTED, D_MODEL),
}
BIAS = {
    "T5 bias": lambda: T5RelativeBias(N_HEADS, causal=True),
    "ALiBi": lambda: ALiBi(N_HEADS),
}
ROTARY = {"RoPE": lambda: RotaryEmbedding(D_MODEL // N_HEADS)}
METHODS = ["none", *ABSOLUTE, *BIAS, *ROTARY]


class Model(nn.Module):
    "One causal layer that learns of positions by one method."

    def __init__(self, method):
        super().__init__()
        bias = BIAS.get(method)
        rotary = ROTARY.get(method)
        self.embed = Embedding(VOCAB, D_MODEL, scale=D_MODEL**0.5)
        self.positions = ABSOLUTE.get(method, lambda: None)()
        self.blocks = nn.Sequential(
            PreNorm(
                LayerNorm(D_MODEL),
                SelfAttention(
                    D_MODEL,
                    N_HEADS,
                    causal=True,
                    fused_qkv=True,
                    rotary=rotary and rotary(),
                    score_bias=bias and bias(),
                ),
            ),
            PreNorm(
                LayerNorm(D_MODEL), FeedForward(D_MODEL, 2 * D_MODEL, activation="gelu")
            ),
        )
        self.norm = LayerNorm(D_MODEL)
        self.lm_head = Linear(D_MODEL, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1])[None])
        return self.lm_head(self.norm(self.blocks(x)))


def back(ids):
    "The token a few places back; nothing at the start."
    answer = torch.full_like(ids, NOTHING)
    answer[:, BACK:] = ids[:, :-BACK]
    return answer


def latest(ids):
    "The value that came last with the same key; nothing for a new key."
    key = ids // VALUES
    value = ids % VALUES
    n = ids.shape[1]
    same = (key[:, :, None] == key[:, None, :]) & torch.ones(
        n, n, dtype=torch.bool
    ).tril(-1)
    last = torch.where(same, torch.arange(n), -1).amax(-1)
    return torch.where(last >= 0, value.gather(1, last.clamp(min=0)), NOTHING)


TASKS = {"back": back, "latest": latest}


def train(model, task, steps, seed):
    "Random tokens, new at every step."
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for _ in range(steps):
        ids = torch.randint(VOCAB, (BATCH, TRAINED), generator=draw)
        loss = F.cross_entropy(
            model(ids).flatten(0, 1), TASKS[task](ids).flatten(), ignore_index=NOTHING
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


@torch.no_grad()
def test(model, task):
    "Accuracy in each block of positions."
    draw = torch.Generator().manual_seed(10_000)
    ids = torch.randint(VOCAB, (TEST_BATCH, TESTED), generator=draw)
    answer = TASKS[task](ids)
    right = model(ids).argmax(-1) == answer
    asked = answer != NOTHING
    per_block = [x.sum(0).view(-1, BLOCK).sum(-1) for x in (right, asked)]
    return (per_block[0] / per_block[1]).tolist()


def rows_of(task, method, seeds, steps):
    "The lines of one method on one task."
    began = time.perf_counter()
    results = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = Model(method)
        train(model, task, steps, seed)
        results.append(test(model, task))
    took = time.perf_counter() - began
    print(
        f"{task:>6} {method:>8}",
        *(f"{statistics.mean(r):.2f}" for r in zip(*results, strict=False)),
        f" {took:.0f} s",
        flush=True,
    )
    for i, block in enumerate(zip(*results, strict=False)):
        yield {
            "task": task,
            "method": method,
            "first": i * BLOCK,
            "last": (i + 1) * BLOCK - 1,
            "accuracy": f"{statistics.mean(block):.3f}",
            "lowest": f"{min(block):.3f}",
            "highest": f"{max(block):.3f}",
            "spread": f"{max(block) - min(block):.3f}",
            "steps": steps,
            "seeds": seeds,
            **common.about(),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    rows = [
        row
        for task in TASKS
        for method in METHODS
        for row in rows_of(task, method, args.seeds, args.steps)
    ]
    common.write(rows, args.out)


if __name__ == "__main__":
    main()
