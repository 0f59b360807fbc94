"""How many heads copying needs: the count of lesson 7, on ten seeds.

    python experiments/heads.py              ten seeds, four minutes
    python experiments/heads.py --steps 2 --seeds 1 --out some.csv

Two layers of causal attention with four heads each learn to copy: a row is a
block of random letters, over and over. Then they are trained for 400 more steps
with a price on every head, the square root of the norm of its W_V W_O.
Afterwards each head is switched off in turn.

The rows go to tformer/records/heads.csv, one for each seed. `right` is the share
of letters in the second half of new rows that are guessed right, `without_1` and
`without_2` those shares without each head of the two layers, and `before` and
`after` the largest weight that a head of layer 1 has on the token before, and one
of layer 2 on what came after an earlier occurrence. A run that was stopped goes on
where it was.
"""

import copy
import itertools

import torch
from torch import nn
from torch.nn import functional as F

import common
from tformer.models.mini_gpt import train as train_model
from tformer.nn.attention import merge_heads, split_heads
from tformer.nn.embedding import Embedding
from tformer.nn.functional import attend, causal_mask
from tformer.nn.layers import Linear, init_weights
from tformer.nn.norms import RMSNorm
from tformer.nn.rotary import RotaryEmbedding

LETTERS = 24
SHORT = 6  # the length of the shortest block
LONG = 16  # and of the longest
N_HEADS = 4
WIDTH = 64
STEPS = 250  # without a price
PRICED = 400  # with it
PRICE = 0.2


class CausalAttention(nn.Module):
    "Multi-head attention with rotary positions; returns the weights, too."

    def __init__(self):
        super().__init__()
        self.q_proj = Linear(WIDTH, WIDTH)
        self.k_proj = Linear(WIDTH, WIDTH)
        self.v_proj = Linear(WIDTH, WIDTH)
        self.o_proj = Linear(WIDTH, WIDTH)
        self.rotary = RotaryEmbedding(WIDTH // N_HEADS)

    def forward(self, x):
        q, k, v = (
            split_heads(proj(x), N_HEADS)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        positions = torch.arange(x.shape[1])[None]
        q, k = self.rotary(q, k, positions=positions)
        output, weights = attend(q, k, v, causal_mask(positions, positions))
        return self.o_proj(merge_heads(output)), weights


class AttentionOnly(nn.Module):
    "Ids to logits, by two layers of causal attention and nothing else."

    def __init__(self):
        super().__init__()
        self.embed = Embedding(LETTERS, WIDTH)
        self.norms = nn.ModuleList(RMSNorm(WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(CausalAttention() for _ in range(2))
        self.norm = RMSNorm(WIDTH)
        self.lm_head = Linear(WIDTH, LETTERS, bias=False)
        init_weights(self)

    def forward(self, ids):
        return self.run(ids)[0]

    def run(self, ids):
        "Return the logits, and the weights of each layer."
        stream = self.embed(ids)
        seen = []
        for norm, layer in zip(self.norms, self.layers, strict=True):
            out, weights = layer(norm(stream))
            stream = stream + out
            seen.append(weights)
        return self.lm_head(self.norm(stream)), seen


def copying_rows(batch, seed):
    "Yield rows of 2 LONG + 1 tokens that repeat their block, without end."
    generator = torch.Generator().manual_seed(seed)
    place = torch.arange(2 * LONG + 1)
    while True:
        block = torch.rand(batch, LETTERS, generator=generator).argsort(-1)
        length = torch.randint(SHORT, LONG + 1, (batch, 1), generator=generator)
        yield block.gather(1, place % length)


def copy_loss(model, rows):
    "Return the mean loss per token of the second half of each row."
    logits = model(rows[:, :-1])[:, LONG:]
    return F.cross_entropy(logits.flatten(0, 1), rows[:, LONG + 1 :].flatten())


def head_sizes(model):
    "Return the norm of each head's W_V W_O, of shape (layers, heads)."
    return torch.stack(
        [
            (
                layer.o_proj.weight.unflatten(1, (N_HEADS, -1)).transpose(0, 1)
                @ layer.v_proj.weight.unflatten(0, (N_HEADS, -1))
            )
            .flatten(1)
            .norm(dim=-1)
            for layer in model.layers
        ]
    )


def priced_loss(model, rows):
    "Return the loss, with the price of all heads added."
    price = (head_sizes(model) + 1e-3).sqrt().sum()  # a finite slope at 0
    return copy_loss(model, rows) + PRICE * price


@torch.no_grad()
def share_right(model, rows):
    "Return the share of letters in the second halves that are guessed right."
    guess = model(rows[:, :-1])[:, LONG:].argmax(-1)
    return (guess == rows[:, LONG + 1 :]).double().mean().item()


def without_head(model, layer, head):
    "Return a copy of the model in which one head writes nothing."
    model = copy.deepcopy(model)
    with torch.no_grad():
        columns = model.layers[layer].o_proj.weight
        columns.unflatten(1, (N_HEADS, -1))[:, head] = 0.0
    return model


@torch.no_grad()
def job_scores(model, rows):
    "Return two tables (layers, heads): weight on what is before, and after."
    ids = rows[:, :-1]
    seen = torch.stack(model.run(ids)[1])
    earlier = (ids[:, :, None] == ids[:, None, :]).tril(-1)
    after = earlier.roll(1, dims=-1)  # the key one place further
    on_after = (seen * after[:, None]).sum(-1)[..., LONG:]
    return seen.diagonal(-1, -2, -1).mean((1, 3)), on_after.mean((1, 3))


def train(seed, steps):
    "Return one row."
    unseen = next(copying_rows(250, seed=999))
    torch.manual_seed(seed)
    model = AttentionOnly()
    train_model(
        model, copying_rows(32, seed=100 * seed + 1), min(steps, STEPS), copy_loss
    )
    train_model(model, copying_rows(32, seed=100 * seed + 2), steps, priced_loss)
    without = [
        share_right(without_head(model, *which), unseen)
        for which in itertools.product(range(2), range(N_HEADS))
    ]
    before, after = job_scores(model, unseen)
    return {
        "right": f"{share_right(model, unseen):.3f}",
        "without_1": " ".join(f"{x:.3f}" for x in without[:N_HEADS]),
        "without_2": " ".join(f"{x:.3f}" for x in without[N_HEADS:]),
        "before": f"{before[0].max().item():.3f}",
        "after": f"{after[1].max().item():.3f}",
    }


CASES = [{}]


def main():
    torch.set_num_threads(1)
    common.run(CASES, train, common.arguments(__doc__, PRICED, "heads.csv", seeds=10))


if __name__ == "__main__":
    main()
