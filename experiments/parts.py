"""What is each part of the tour's model worth? Leave it out, and train.

    python experiments/parts.py              all runs, three seeds, recorded
    python experiments/parts.py --steps 2 --seeds 1 --out some.csv

The model of chapter 0 is trained as it is there, then again without one of its
parts, with the same stories, windows and steps. Nothing is put in the place of
what was left out, so a model without a part is also a smaller one (`parameters`
says how small). For the model without the residual stream the tour's step size
is too large (after 300 steps 3.0 nats per byte, with a third of it 2.4); it
gets a third.

The rows go to tformer/records/parts.csv, which travels with the package: one
for each variant and seed, with the loss on held-out stories, and `curve`, the
loss on the first third of them at 19 moments of the training: at its beginning
and after each 18th part of the steps. Rows are written as they come; a run that
was stopped goes on where it was.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import common
from common import BATCH, HELD_OUT, TRAIN
from tformer.corpora import stories
from tformer.models.mini_gpt import (
    MiniBlock,
    MiniGPT,
    encode_bytes,
    mean_loss,
    random_windows,
    train,
)

OUT = common.RECORDS / "parts.csv"
STEPS = 1800
LR = 6e-3
LOOKS = 18
LOOKED_AT = 10_000  # bytes of stories


class Replacing(MiniBlock):
    "Each part replaces the vector instead of adding to it."

    def forward(self, x):
        return self.mlp(self.mlp_norm(self.attention(self.attention_norm(x))))


class OnlyAttention(MiniBlock):
    "Looks and does not think."

    def __init__(self, *args):
        super().__init__(*args)
        del self.mlp, self.mlp_norm

    def forward(self, x):
        return x + self.attention(self.attention_norm(x))


class OnlyFeedForward(MiniBlock):
    "Thinks and does not look."

    def __init__(self, *args):
        super().__init__(*args)
        del self.attention, self.attention_norm

    def forward(self, x):
        return x + self.mlp(self.mlp_norm(x))


class Plain(MiniBlock):
    "Nothing is normalized."

    def __init__(self, *args):
        super().__init__(*args)
        self.attention_norm = nn.Identity()
        self.mlp_norm = nn.Identity()


class Without(MiniGPT):
    "The tour's model of blocks that lack a part."

    def __init__(self, block, **size):
        super().__init__(**size)
        attention = self.blocks[0].attention
        d_model = attention.o_proj.in_features
        self.blocks = nn.Sequential(
            *(block(d_model, attention.n_heads, attention.causal) for _ in self.blocks)
        )
        if block is Plain:
            self.norm = nn.Identity()


VARIANTS = {  # how it is made, its step size
    "all parts": (MiniGPT, LR),
    "no residual": (partial(Without, Replacing), LR / 3),
    "no norms": (partial(Without, Plain), LR),
    "no feed-forward": (partial(Without, OnlyAttention), LR),
    "no attention": (partial(Without, OnlyFeedForward), LR),
}


def looking(batches, model, steps, held_out, curve):
    "The batches, with a look at the held-out loss before some of them."
    moments = {round(i * steps / LOOKS) for i in range(LOOKS)}
    for step, batch in enumerate(batches):
        if step in moments:
            curve.append(mean_loss(model, held_out))
        yield batch


def train_one(name, seed, steps, ids, held_out):
    "One line of the table."
    began = time.perf_counter()
    curve = []
    make, lr = VARIANTS[name]
    torch.manual_seed(seed)
    model = make()
    batches = random_windows(ids, model.max_len, BATCH, seed)
    some = held_out[:LOOKED_AT]
    train(model, looking(batches, model, steps, some, curve), steps, lr=lr)
    curve.append(mean_loss(model, some))
    loss = mean_loss(model, held_out)
    took = time.perf_counter() - began
    print(f"{name}, seed {seed}: {loss:.3f} nats per byte, {took:.0f} s", flush=True)
    return {
        "variant": name,
        "seed": str(seed),
        "nats_per_byte": f"{loss:.3f}",
        "parameters": str(sum(p.numel() for p in model.parameters())),
        "lr": f"{lr:g}",
        "steps": str(steps),
        "curve": " ".join(f"{loss:.3f}" for loss in curve),
        **common.about(),
    }


def write(rows, out):
    "All rows so far, in the order of the variants."
    common.write(common.sort_by(rows, VARIANTS), out)


def kept_rows(out, steps, again):
    "What an earlier run of as many steps has left."
    return [
        row
        for row in common.kept(out, again, steps=steps)
        if row["variant"] in VARIANTS
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--again", action="store_true", help="train those too that the file has"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    ids = encode_bytes(stories.story_corpus(TRAIN, seed=0, level=1))
    held_out = encode_bytes(stories.story_corpus(HELD_OUT, seed=1, level=1))
    rows = kept_rows(args.out, args.steps, args.again)
    done = {(row["variant"], int(row["seed"])) for row in rows}
    for seed in range(args.seeds):
        for name in VARIANTS:
            if (name, seed) not in done:
                rows.append(train_one(name, seed, args.steps, ids, held_out))
                write(rows, args.out)


if __name__ == "__main__":
    main()
