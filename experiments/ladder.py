"""Train each model of the table that grows through the book.

    python experiments/ladder.py             all rows, three seeds, recorded
    python experiments/ladder.py --steps 5 --seeds 1 --out some.csv

The rows go to tformer/records/ladder.csv, which travels with the package, so
that a chapter shows them wherever it runs. A row is the mean over seeds of the
loss on held-out stories; `spread` is the largest less the smallest.
"""
import argparse
import csv
import datetime
import platform
import statistics
import time
from pathlib import Path

import torch

from tformer import stories
from tformer.bpe import BPE
from tformer.minimal import MiniGPT, evaluate, fit, to_ids, windows

OUT = Path(__file__).parents[1] / "tformer" / "records" / "ladder.csv"
BATCH = 8
TRAIN, HELD_OUT = 300_000, 30_000       # characters of stories
VOCAB, TOKEN_CONTEXT = 512, 64          # of the row in tokens


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


ROWS = [row_bytes, row_tokens]


def train_row(row, seeds, steps=None):
    "One line of the table."
    steps = steps or row["steps"]
    per_token = row["size"] / len(row["held_out"])
    losses, speeds = [], []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = row["new"]()
        began = time.perf_counter()
        fit(model, windows(row["ids"], model.max_len, BATCH, seed), steps)
        speeds.append(steps * BATCH * model.max_len
                      / (time.perf_counter() - began))
        losses.append(evaluate(model, row["held_out"]) / per_token)
        print(f"{row['model']}, seed {seed}: {losses[-1]:.3f} nats per "
              f"byte, {speeds[-1]:,.0f} tokens/s", flush=True)
    threads = torch.get_num_threads()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "chapter": row["chapter"], "model": row["model"],
        "nats_per_byte": f"{statistics.mean(losses):.3f}",
        "spread": f"{max(losses) - min(losses):.3f}",
        "bytes_per_token": f"{per_token:.2f}",
        "context_bytes": f"{model.max_len * per_token:.0f}",
        "tokens_per_s": f"{round(statistics.median(speeds), -3):.0f}",
        "megabytes": f"{size / 1e6:.2f}",
        "steps": steps, "seeds": seeds, "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{threads} thread{'s' * (threads > 1)}, "
                   f"{platform.machine()}",
        "date": datetime.date.today().isoformat(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, help="instead of each row's own")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    text = stories.corpus(TRAIN, seed=0, level=1)
    held_out = stories.corpus(HELD_OUT, seed=1, level=1)
    rows = [train_row(make(text, held_out), args.seeds, args.steps)
            for make in ROWS]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    beside = args.out.with_suffix(".part")
    with beside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    beside.replace(args.out)


if __name__ == "__main__":
    main()
