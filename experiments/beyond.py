"""Ask a small model to read positions that it was never trained on.

    python experiments/beyond.py          three seeds of each kind, recorded
    python experiments/beyond.py --steps 2 --seeds 1 --out some.csv

A model of two blocks is trained on windows of 64 bytes of the tour's stories, once
with a learned table of positions and once with sinusoids. Then it reads windows of
128 bytes. A *clamped* model counts every later position as 63, the last trained one.

The rows go to tformer/records/beyond.csv, which travels with the package. A row is
the loss in nats per byte, averaged over eight positions, with the lowest and the
highest seed.
"""

import argparse
import statistics
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import common
from tformer.corpora import stories
from tformer.models.mini_gpt import MiniBlock, encode_bytes, random_windows, train
from tformer.nn.embedding import (
    Embedding,
    LearnedPositionEmbedding,
    SinusoidalPositionEmbedding,
)

OUT = common.RECORDS / "beyond.csv"
WIDTH = 64
TRAINED = 64
TESTED = 128
BLOCK = 8
KINDS = {
    "learned": (LearnedPositionEmbedding, 1.0),
    "sinusoids": (SinusoidalPositionEmbedding, WIDTH**0.5),
}


class Model(nn.Module):
    "The tour's blocks behind embeddings with one kind of positions."

    def __init__(self, kind):
        super().__init__()
        positions, scale = KINDS[kind]
        self.embed = Embedding(256, WIDTH, scale=scale)
        self.positions = positions(TESTED, WIDTH)
        self.blocks = nn.Sequential(MiniBlock(WIDTH, 4), MiniBlock(WIDTH, 4))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, 256)

    def forward(self, ids, positions=None):
        if positions is None:
            positions = torch.arange(ids.shape[1])[None]
        x = self.embed(ids) + self.positions(positions)
        return self.lm_head(self.norm(self.blocks(x)))


@torch.no_grad()
def losses(model, rows, clamped):
    "The mean loss in each block of positions."
    positions = torch.arange(TESTED)[None]
    if clamped:
        positions = positions.clamp(max=TRAINED - 1)
    logits = model(rows[:, :-1], positions)
    loss = F.cross_entropy(logits.mT, rows[:, 1:], reduction="none")
    return loss.mean(0).view(-1, BLOCK).mean(1).tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    text = encode_bytes(stories.story_corpus(200_000, seed=0))
    held_out = encode_bytes(stories.story_corpus(20_000, seed=1))
    size = TESTED + 1
    held_rows = held_out[: len(held_out) // size * size].view(-1, size)
    found = {}
    for kind in KINDS:
        for seed in range(args.seeds):
            torch.manual_seed(seed)
            model = Model(kind)
            train(model, random_windows(text, TRAINED), steps=args.steps)
            for clamped in (False, True):
                name = f"{kind}, clamped" if clamped else kind
                found.setdefault(name, []).append(losses(model, held_rows, clamped))
                print(name, seed, *(f"{x:.2f}" for x in found[name][-1]), flush=True)
    rows = [
        {
            "positions": name,
            "first": i * BLOCK,
            "last": (i + 1) * BLOCK - 1,
            "loss": f"{statistics.mean(block):.3f}",
            "lowest": f"{min(block):.3f}",
            "highest": f"{max(block):.3f}",
            "steps": args.steps,
            "seeds": args.seeds,
            **common.about(),
        }
        for name, runs in found.items()
        for i, block in enumerate(zip(*runs, strict=True))
    ]
    common.write(rows, args.out)


if __name__ == "__main__":
    main()
