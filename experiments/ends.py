"""Where do the tour's model and its relatives end, after the tour's training?

    python experiments/ends.py               all rows, three seeds, recorded
    python experiments/ends.py --steps 5 --seeds 1 --out some.csv

Each model is trained as the tour's is, for 1,800 steps. From chapter 4 on a row
keeps what the row before it has, and replaces one part more. The rows go to
tformer/records/ends.csv, which travels with the package. A row is the mean over
seeds of the loss on held-out stories; `spread` is the largest less the smallest.
A run that was stopped goes on after the last whole row.
"""

import statistics

import torch

import common
from common import BATCH, D_MODEL, HELD_OUT, MAX_LEN, N_HEADS, N_LAYERS, TRAIN
from ladder import Grown
from tformer.corpora import stories
from tformer.models.gpt import GPT, GPTConfig
from tformer.models.mini_gpt import (
    MiniGPT,
    encode_bytes,
    mean_loss,
    random_windows,
    train,
)
from tformer.text.bpe import BPE

# of the row in tokens
VOCAB = 512
TOKEN_CONTEXT = 64


def row_bytes(text, held_out):
    "Chapter 0: bytes."
    return dict(
        chapter=0,
        model="tour, bytes",
        steps=1800,
        new=lambda: MiniGPT(),
        ids=encode_bytes(text),
        held_out=encode_bytes(held_out),
        size=len(held_out.encode()),
    )


def row_tokens(text, held_out):
    "Chapter 2: the same model on tokens."
    bpe = BPE.train(text, VOCAB)
    return dict(
        chapter=2,
        model="tour, tokens",
        steps=1800,
        new=lambda: MiniGPT(len(bpe), max_len=TOKEN_CONTEXT),
        ids=torch.tensor(bpe.encode(text)),
        held_out=torch.tensor(bpe.encode(held_out)),
        size=len(held_out.encode()),
    )


def grown(chapter, name):
    "Chapters 4 to 7: one part more is replaced."

    def row(text, held_out):
        return {
            **row_bytes(text, held_out),
            "chapter": chapter,
            "model": name,
            "new": lambda: Grown(chapter, vocab_size=256),
        }

    return row


def row_gpt(text, held_out):
    "Chapter 12: GPT-2 in the tour's size."
    config = GPTConfig(
        vocab_size=256,
        d_model=D_MODEL,
        n_layers=N_LAYERS,
        n_heads=N_HEADS,
        max_len=MAX_LEN,
        dropout=0.0,
    )
    return {
        **row_bytes(text, held_out),
        "chapter": 12,
        "model": "GPT",
        "new": lambda: GPT(config),
    }


ROWS = {
    0: row_bytes,
    2: row_tokens,
    4: grown(4, "… with sinusoids"),
    5: grown(5, "… with rotary positions"),
    6: grown(6, "… with RMSNorm, SwiGLU"),
    7: grown(7, "… with fused attention"),
    12: row_gpt,
}


def train_row(row, seeds, steps=None):
    "One line of the table."
    steps = steps or row["steps"]
    per_token = row["size"] / len(row["held_out"])
    losses = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = row["new"]()
        train(model, random_windows(row["ids"], model.max_len, BATCH, seed), steps)
        losses.append(mean_loss(model, row["held_out"]) / per_token)
        print(
            f"{row['model']}, seed {seed}: {losses[-1]:.3f} nats per byte", flush=True
        )
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "chapter": row["chapter"],
        "model": row["model"],
        "nats_per_byte": f"{statistics.mean(losses):.3f}",
        "spread": f"{max(losses) - min(losses):.3f}",
        "bytes_per_token": f"{per_token:.2f}",
        "context_bytes": f"{model.max_len * per_token:.0f}",
        "megabytes": f"{size / 1e6:.2f}",
        "steps": steps,
        "seeds": seeds,
        **common.about(),
    }


def main():
    parser = common.parser(__doc__, "ends.csv")
    parser.add_argument("--steps", type=int, help="instead of each row's own")
    args = parser.parse_args()
    text = stories.story_corpus(TRAIN, seed=0, level=1)
    held_out = stories.story_corpus(HELD_OUT, seed=1, level=1)
    made = {chapter: row(text, held_out) for chapter, row in ROWS.items()}
    rows = common.kept(args.out, args.again, seeds=args.seeds, steps=args.steps or 1800)
    for chapter in made.keys() - {int(row["chapter"]) for row in rows}:
        rows.append(train_row(made[chapter], args.seeds, args.steps))
        common.write(sorted(rows, key=lambda r: int(r["chapter"])), args.out)


if __name__ == "__main__":
    main()
