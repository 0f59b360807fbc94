"""Compare ways to tell a transformer where its tokens stand.

    python experiments/positions.py          all runs, five seeds, recorded
    python experiments/positions.py --again  those too that the record has
    python experiments/positions.py --steps 2 --seeds 1 --out some.csv

One causal layer is trained on sequences of 32 random tokens and tested on
sequences of 128, on two tasks in which order is all that counts:

back    name the token four places back (of 16; guessing gives 1/16);
latest  a token is a key and a value (four of each); name the value that came
        with the same key last time (guessing gives 1/4).

The rows go to tformer/records/positions.csv, which travels with the package. A
row is the accuracy over seeds in one block of sixteen positions, with the
lowest and the highest seed; positions 0 to 31 were trained on, the rest not.

Two methods are tested again, trained as they are, with a change:

window   no query sees farther back than the training did;
clamped  T5's numbers for farther distances, which were never trained, become that
         of the farthest distance that was.

The numbers that T5's bias has learned go to position_buckets.csv beside it: the
mean over seeds and heads for each bucket, with the lowest and the highest.
"""

import copy
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

import common
from tformer.nn.attention import SelfAttention, merge_heads
from tformer.nn.embedding import (
    Embedding,
    LearnedPositionEmbedding,
    SinusoidalPositionEmbedding,
)
from tformer.nn.feed_forward import FeedForward
from tformer.nn.functional import attend, causal_mask
from tformer.nn.layers import Linear, PreNorm
from tformer.nn.norms import LayerNorm
from tformer.nn.relative_bias import (
    ALiBi,
    ShawRelativePositions,
    T5RelativeBias,
    t5_bucket,
)
from tformer.nn.rotary import RotaryEmbedding

OUT = common.RECORDS / "positions.csv"
BUCKETS = common.RECORDS / "position_buckets.csv"
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
# beyond this distance all share a row, and whether values have vectors, too: as in the
# paper, with a row for each distance, and with vectors for the keys alone
SHAW = {
    "Shaw": {"max_distance": 16},
    "Shaw unclipped": {"max_distance": TESTED - 1},
    "Shaw, keys only": {"max_distance": 16, "values": False},
}
ROTARY = {"RoPE": lambda: RotaryEmbedding(D_MODEL // N_HEADS)}
METHODS = ["none", *ABSOLUTE, *SHAW, *BIAS, *ROTARY]
CHANGES = {"T5 bias": ("window", "clamped"), "RoPE": ("window",)}


class ShawAttention(SelfAttention):
    "Attention in which keys and values learn a vector for each distance."

    def __init__(self, *sizes, max_distance, values=True, **options):
        super().__init__(*sizes, **options)
        self.distances = ShawRelativePositions(D_MODEL // N_HEADS, max_distance)
        self.values = values

    def forward(self, x, mask=None):
        q, k, v = self.project_qkv(x)
        at = torch.arange(x.shape[1])[None]
        bias = self.distances.score_bias(q, at, at)
        output, weights = attend(q, k, v, causal_mask(at, at), bias)
        if self.values:
            output = output + self.distances.value_offset(weights, at, at)
        return self.o_proj(merge_heads(output))


def make_attention(method):
    "Return causal attention that learns of positions by a method, or not at all."
    sizes = dict(d_model=D_MODEL, n_heads=N_HEADS, causal=True, fused_qkv=True)
    if method in SHAW:
        return ShawAttention(**sizes, **SHAW[method])
    bias, rotary = BIAS.get(method), ROTARY.get(method)
    return SelfAttention(
        **sizes, rotary=rotary and rotary(), score_bias=bias and bias()
    )


class Model(nn.Module):
    "One causal layer that learns of positions by one method."

    def __init__(self, method):
        super().__init__()
        self.embed = Embedding(VOCAB, D_MODEL, scale=D_MODEL**0.5)
        self.positions = ABSOLUTE.get(method, lambda: None)()
        self.blocks = nn.Sequential(
            PreNorm(
                LayerNorm(D_MODEL),
                make_attention(method),
            ),
            PreNorm(
                LayerNorm(D_MODEL), FeedForward(D_MODEL, 2 * D_MODEL, activation="gelu")
            ),
        )
        self.norm = LayerNorm(D_MODEL)
        self.lm_head = Linear(D_MODEL, VOCAB)

    def forward(self, ids, mask=None):
        x = self.embed(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1])[None])
        attention, feed_forward = self.blocks
        return self.lm_head(self.norm(feed_forward(attention(x, mask=mask))))


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
def test(model, task, mask=None):
    "Accuracy in each block of positions."
    draw = torch.Generator().manual_seed(10_000)
    ids = torch.randint(VOCAB, (TEST_BATCH, TESTED), generator=draw)
    answer = TASKS[task](ids)
    right = model(ids, mask).argmax(-1) == answer
    asked = answer != NOTHING
    per_block = [x.sum(0).view(-1, BLOCK).sum(-1) for x in (right, asked)]
    return (per_block[0] / per_block[1]).tolist()


def test_changed(model, task, change):
    "Accuracy of a trained model with one of the changes."
    if change == "window":
        at = torch.arange(TESTED)
        near = at[:, None] - at < TRAINED
        return test(model, task, near[None, None])
    changed = copy.deepcopy(model)
    bias = changed.blocks[0].sublayer.score_bias
    farthest = t5_bucket(torch.tensor([1 - TRAINED]), **bias.sizes).item()
    bias.weight.data[farthest + 1 :] = bias.weight.data[farthest]
    return test(changed, task)


def rows_of(task, method, seeds, steps):
    "The lines of one method on one task, and the numbers that T5 has learned."
    began = time.perf_counter()
    results = {method: []}
    learned = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = Model(method)
        train(model, task, steps, seed)
        results[method].append(test(model, task))
        for change in CHANGES.get(method, ()):
            found = results.setdefault(f"{method} + {change}", [])
            found.append(test_changed(model, task, change))
        if method == "T5 bias":
            learned += [*model.blocks[0].sublayer.score_bias.weight.detach().T]
    took = time.perf_counter() - began
    for name, found in results.items():
        print(
            f"{task:>6} {name:>17}",
            *(f"{statistics.mean(r):.2f}" for r in zip(*found, strict=True)),
            f" {took:.0f} s",
            flush=True,
        )
    about = {"steps": steps, "seeds": seeds, **common.about()}
    rows = [
        {
            "task": task,
            "method": name,
            "first": i * BLOCK,
            "last": (i + 1) * BLOCK - 1,
            "accuracy": f"{statistics.mean(block):.3f}",
            "lowest": f"{min(block):.3f}",
            "highest": f"{max(block):.3f}",
            "spread": f"{max(block) - min(block):.3f}",
            **about,
        }
        for name, found in results.items()
        for i, block in enumerate(zip(*found, strict=True))
    ]
    buckets = [
        {
            "task": task,
            "bucket": i,
            "mean": f"{x.mean():.3f}",
            "lowest": f"{x.min():.3f}",
            "highest": f"{x.max():.3f}",
            **about,
        }
        for i, x in enumerate(zip(*learned, strict=True))
        for x in [torch.stack(x)]
    ]
    return rows, buckets


def main():
    args = common.arguments(__doc__, 800, OUT.name, seeds=5)
    beside = args.out.with_name(BUCKETS.name)
    same = {"steps": args.steps, "seeds": args.seeds}
    kept = common.kept(args.out, args.again, **same)
    rows, buckets = [], []
    for task in TASKS:
        for method in METHODS:
            names = [method, *(f"{method} + {how}" for how in CHANGES.get(method, ()))]
            found = [r for r in kept if r["task"] == task and r["method"] in names]
            learned = []
            if method == "T5 bias":
                learned = common.kept(beside, args.again, task=task, **same)
            if len(found) < len(names) * TESTED // BLOCK:
                found, learned = rows_of(task, method, args.seeds, args.steps)
            rows += found
            buckets += learned
    common.write(rows, args.out)
    common.write(buckets, beside)


if __name__ == "__main__":
    main()
