"""Train each model of the table that grows through the book.

    python experiments/ladder.py             all rows, three seeds, recorded
    python experiments/ladder.py --chapter 5 --chapter 6     only their rows
    python experiments/ladder.py --speed     only the speeds, of all rows
    python experiments/ladder.py --steps 5 --seeds 1 --out some.csv

The rows go to tformer/records/ladder.csv, which travels with the package, so
that a chapter shows them wherever it runs. A row is the mean over seeds of the
loss on held-out stories; `spread` is the largest less the smallest. Speed is
that of training, the median over rounds in which the models take turns. From
chapter 4 on each row keeps what the row before it has, and replaces one part
more of the tour's model; from chapter 12 on the rows are the book's models.
"""
import argparse
import csv
import datetime
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import nn

from tformer import stories
from tformer.attention import SelfAttention
from tformer.bpe import BPE
from tformer.gpt import GPT, GPTConfig
from tformer.layers import (
    FeedForward, GatedFeedForward, LayerNorm, Linear, PreNorm, RMSNorm,
    swiglu_width)
from tformer.minimal import MiniGPT, evaluate, fit, to_ids, windows
from tformer.position import Embedding, SinusoidalPositions
from tformer.rotary import Rotary

OUT = Path(__file__).parents[1] / "tformer" / "records" / "ladder.csv"
BATCH = 8
TRAIN, HELD_OUT = 300_000, 30_000       # characters of stories
VOCAB, TOKEN_CONTEXT = 512, 64          # of the row in tokens
D_MODEL, N_LAYERS, N_HEADS, MAX_LEN = 96, 2, 4, 128     # the tour's own


class Grown(nn.Module):
    "The tour's model, with the parts of the chapters up to `chapter`."

    def __init__(self, chapter, vocab_size=256):
        super().__init__()
        self.max_len = MAX_LEN
        self.embed = Embedding(vocab_size, D_MODEL, scale=D_MODEL ** 0.5)
        self.positions = (SinusoidalPositions(MAX_LEN, D_MODEL)
                          if chapter < 5 else None)
        self.blocks = nn.Sequential(*(
            part for _ in range(N_LAYERS) for part in self.block(chapter)))
        self.norm = self.new_norm(chapter)
        self.lm_head = Linear(D_MODEL, vocab_size)

    @staticmethod
    def new_norm(chapter):
        return (LayerNorm if chapter < 6 else RMSNorm)(D_MODEL)

    def block(self, chapter):
        rotary = Rotary(D_MODEL // N_HEADS) if chapter >= 5 else None
        yield PreNorm(self.new_norm(chapter), SelfAttention(
            D_MODEL, N_HEADS, causal=True, packed=True, rotary=rotary,
            fused=chapter >= 7))
        yield PreNorm(self.new_norm(chapter), GatedFeedForward(
            D_MODEL, swiglu_width(D_MODEL)) if chapter >= 6 else FeedForward(
            D_MODEL, 4 * D_MODEL, activation="gelu"))

    def forward(self, ids):
        x = self.embed(ids)
        if self.positions is not None:
            pos = torch.arange(ids.shape[1], device=ids.device)[None]
            x = x + self.positions(pos)
        return self.lm_head(self.norm(self.blocks(x)))


def row_bytes(text, held_out):
    "Chapter 0: bytes."
    return dict(chapter=0, model="tour, bytes", steps=1800,
                new=lambda: MiniGPT(), ids=to_ids(text),
                held_out=to_ids(held_out), size=len(held_out.encode()))


def row_tokens(text, held_out):
    "Chapter 2: the same model on tokens."
    bpe = BPE.train(text, VOCAB)
    return dict(chapter=2, model="tour, tokens", steps=1800,
                new=lambda: MiniGPT(len(bpe), max_len=TOKEN_CONTEXT),
                ids=torch.tensor(bpe.encode(text)),
                held_out=torch.tensor(bpe.encode(held_out)),
                size=len(held_out.encode()))


def grown(chapter, name):
    "Chapters 4 to 7: one part more is replaced."
    def row(text, held_out):
        return {**row_bytes(text, held_out), "chapter": chapter,
                "model": name, "new": lambda: Grown(chapter)}
    return row


def row_gpt(text, held_out):
    "Chapter 12: GPT-2 in the tour's size."
    config = GPTConfig(vocab_size=256, d_model=D_MODEL, n_layers=N_LAYERS,
                       n_heads=N_HEADS, max_len=MAX_LEN, dropout=0.0)
    return {**row_bytes(text, held_out), "chapter": 12, "model": "GPT",
            "new": lambda: GPT(config)}


ROWS = {0: row_bytes, 2: row_tokens, 4: grown(4, "… with sinusoids"),
        5: grown(5, "… with rotary positions"),
        6: grown(6, "… with RMSNorm, SwiGLU"),
        7: grown(7, "… with fused attention"), 12: row_gpt}


def train_row(row, seeds, steps=None):
    "One line of the table."
    steps = steps or row["steps"]
    per_token = row["size"] / len(row["held_out"])
    losses = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = row["new"]()
        fit(model, windows(row["ids"], model.max_len, BATCH, seed), steps)
        losses.append(evaluate(model, row["held_out"]) / per_token)
        print(f"{row['model']}, seed {seed}: {losses[-1]:.3f} nats per byte",
              flush=True)
    threads = torch.get_num_threads()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "chapter": row["chapter"], "model": row["model"],
        "nats_per_byte": f"{statistics.mean(losses):.3f}",
        "spread": f"{max(losses) - min(losses):.3f}",
        "bytes_per_token": f"{per_token:.2f}",
        "context_bytes": f"{model.max_len * per_token:.0f}",
        "tokens_per_s": "",
        "megabytes": f"{size / 1e6:.2f}",
        "steps": steps, "seeds": seeds, "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{threads} thread{'s' * (threads > 1)}, "
                   f"{platform.machine()}",
        "date": datetime.date.today().isoformat(),
    }


def measure_speeds(rows, kept, steps, rounds):
    "Fill in tokens/s: every model trains a few steps, in turn."
    models = {c: row["new"]() for c, row in rows.items()}
    speeds = {c: [] for c in rows}
    for _ in range(rounds):
        for c, model in models.items():
            batches = windows(rows[c]["ids"], model.max_len, BATCH)
            began = time.perf_counter()
            fit(model, batches, steps)
            speeds[c].append(steps * BATCH * model.max_len
                             / (time.perf_counter() - began))
    for c in kept.keys() & rows.keys():
        middle = round(statistics.median(speeds[c]), -3)
        kept[c]["tokens_per_s"] = f"{middle:.0f}"
        print(f"{kept[c]['model']}: {middle:,.0f} tokens/s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, help="instead of each row's own")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--chapter", type=int, choices=ROWS, action="append",
                        help="only this row; the others stay as recorded")
    parser.add_argument("--speed", action="store_true",
                        help="train nothing, measure the speeds again")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    text = stories.corpus(TRAIN, seed=0, level=1)
    held_out = stories.corpus(HELD_OUT, seed=1, level=1)
    made = {chapter: row(text, held_out) for chapter, row in ROWS.items()}
    kept = {}
    if (args.chapter or args.speed) and args.out.exists():
        with args.out.open(encoding="utf-8", newline="") as lines:
            kept = {int(row["chapter"]): row for row in csv.DictReader(lines)}
    for chapter in () if args.speed else args.chapter or ROWS:
        kept[chapter] = train_row(made[chapter], args.seeds, args.steps)
    measure_speeds(made, kept, steps=min(20, args.steps or 20),
                   rounds=5 if args.steps is None else 1)
    rows = [kept[chapter] for chapter in sorted(kept)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    beside = args.out.with_suffix(".part")
    with beside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    beside.replace(args.out)


if __name__ == "__main__":
    main()
