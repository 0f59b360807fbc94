"""What does each change from GPT-2 to Llama buy, one at a time?

    python experiments/modern.py             all runs, five seeds, recorded
    python experiments/modern.py --steps 2 --seeds 1 --out some.csv

The model of chapter 12 is trained on the stories of the tour, byte by byte;
then again with one part replaced, and once with all of Llama's parts. Every
variant has nearly the same number of parameters: the width of its feed-forward
layers is chosen so (within 1 %; `parameters` says how many there are).

The rows go to tformer/records/modern.csv, which travels with the package: one
for each variant and seed, with the loss on held-out stories. They are written
as they come; a run that was stopped goes on where it was.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import nn

import common
from common import BATCH, D_MODEL, HELD_OUT, MAX_LEN, N_HEADS, N_LAYERS, TRAIN, VOCAB
from tformer.corpora import stories
from tformer.models.mini_gpt import encode_bytes, mean_loss, random_windows, train
from tformer.nn.attention import SelfAttention
from tformer.nn.embedding import Embedding, LearnedPositionEmbedding
from tformer.nn.feed_forward import FeedForward, GatedFeedForward
from tformer.nn.layers import Linear, PreNorm, init_weights
from tformer.nn.norms import LayerNorm, RMSNorm
from tformer.nn.rotary import RotaryEmbedding

OUT = common.RECORDS / "modern.csv"
STEPS = 600
D_HEAD = D_MODEL // N_HEADS
D_FF = 4 * D_MODEL
EPS = 1e-5
KV_HEADS = 2

LLAMA = "RoPE", "RMSNorm", "SwiGLU", "no biases", "grouped heads", "untied"
VARIANTS = (
    {"GPT": ()}
    | {name: (name,) for name in LLAMA}
    | {"QK-norm": ("QK-norm",), "Llama": LLAMA, "Llama, tied": LLAMA[:-1]}
)


class Mixed(nn.Module):
    "GPT-2 with some of its parts replaced by those of Llama."

    def __init__(self, changes=(), d_ff=D_FF):
        super().__init__()
        self.changes = changes
        self.max_len = MAX_LEN
        self.bias = "no biases" not in changes
        self.embed = Embedding(VOCAB, D_MODEL)
        self.embed_positions = (
            None if "RoPE" in changes else LearnedPositionEmbedding(MAX_LEN, D_MODEL)
        )
        self.blocks = nn.Sequential(
            *(
                PreNorm(self.norm_layer(), part)
                for _ in range(N_LAYERS)
                for part in (self.attention(), self.feed_forward(d_ff))
            )
        )
        self.norm = self.norm_layer()
        self.lm_head = Linear(D_MODEL, VOCAB, bias=False)
        if "untied" not in changes:
            self.lm_head.weight = self.embed.weight
        init_weights(self, n_layers=N_LAYERS)

    def norm_layer(self):
        if "RMSNorm" in self.changes:
            return RMSNorm(D_MODEL, eps=EPS)
        return LayerNorm(D_MODEL, eps=EPS, bias=self.bias)

    def attention(self):
        norms = {
            name: RMSNorm(D_HEAD, eps=EPS)
            for name in ("q_norm", "k_norm")
            if "QK-norm" in self.changes
        }
        return SelfAttention(
            D_MODEL,
            N_HEADS,
            bias=self.bias,
            causal=True,
            **norms,
            n_kv_heads=KV_HEADS if "grouped heads" in self.changes else None,
            rotary=RotaryEmbedding(D_HEAD) if "RoPE" in self.changes else None,
        )

    def feed_forward(self, d_ff):
        if "SwiGLU" in self.changes:
            return GatedFeedForward(D_MODEL, d_ff, bias=self.bias)
        return FeedForward(D_MODEL, d_ff, activation="gelu_tanh", bias=self.bias)

    def forward(self, ids):
        x = self.embed(ids)
        if self.embed_positions is not None:
            x = x + self.embed_positions(torch.arange(ids.shape[1])[None])
        return self.lm_head(self.norm(self.blocks(x)))


def count(changes, d_ff):
    "Parameters of a variant; a tied one counts once."
    with torch.device("meta"):
        return sum(p.numel() for p in Mixed(changes, d_ff).parameters())


def equal_width(changes):
    "The d_ff that brings a variant nearest to the parameters of GPT-2."
    goal = count((), D_FF)
    one = count(changes, 1)
    return max(1, 1 + round((goal - one) / (count(changes, 2) - one)))


def train_one(name, seed, steps, ids, held_out):
    "One line of the table."
    began = time.perf_counter()
    d_ff = equal_width(VARIANTS[name])
    torch.manual_seed(seed)
    model = Mixed(VARIANTS[name], d_ff)
    train(model, random_windows(ids, MAX_LEN, BATCH, seed), steps)
    loss = mean_loss(model, held_out)
    took = time.perf_counter() - began
    print(f"{name}, seed {seed}: {loss:.4f} nats per byte, {took:.0f} s", flush=True)
    return {
        "variant": name,
        "seed": str(seed),
        "nats_per_byte": f"{loss:.4f}",
        "parameters": str(count(VARIANTS[name], d_ff)),
        "d_ff": str(d_ff),
        "steps": str(steps),
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
    parser.add_argument("--seeds", type=int, default=5)
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
