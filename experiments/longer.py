"""What does a model with rotary positions lose beyond the length of its training?

    python experiments/longer.py             all runs, three seeds, recorded
    python experiments/longer.py --steps 2 --seeds 1 --out some.csv

The model of experiments/modern.py called "RoPE" is trained on windows of 128 bytes
of the tour's stories, for 300 and for 1,800 steps, and then reads windows of 1,024
bytes of held-out stories. The model of 1,800 steps also reads them with stretched
frequencies: by each rule, at once and after 50 further steps on windows of 1,024.
And it reads them, as it was trained, in six ways that ask what the loss comes from:
with the six or seven slowest pairs held still; with a window (no query looks farther
back than 127 bytes); and with distances that are clipped (what stands farther back
is looked at as if it stood 127 bytes back), for all pairs, for the eight slow ones,
which did not come round in training, or for the four fast ones only.

The rows go to tformer/records/longer.csv, which travels with the package: one for
each case and seed. A column such as `nats_128` is the mean loss, in nats per byte,
from that position up to the next column's.
"""

import functools
import math

import torch
from torch.nn import functional as F

import common
from common import BATCH, MAX_LEN, TRAIN
from modern import D_HEAD, VARIANTS, Mixed, equal_width
from tformer.corpora import stories
from tformer.models.mini_gpt import encode_bytes, random_windows, train
from tformer.nn.attention import SelfAttention
from tformer.nn.rope_scaling import (
    linear_scaling,
    llama3_scaling,
    ntk_scaled_base,
    yarn_scaling,
)
from tformer.nn.rotary import RotaryEmbedding, rope_frequencies

STEPS = 1_800
FURTHER = 50  # steps at the new length
FURTHER_LR = 1e-3
LENGTH = 1_024
ROWS = 32  # windows of held-out stories
BASE = 10_000.0
FIRST = 0, 32, 64, 96, 128, 160, 192, 224, 256, 384, 512, 768  # of each band
RULES = "linear", "NTK", "Llama 3", "YaRN"
AS_TRAINED = "as trained"
HELD = {"six held": 6, "seven held": 7}  # so many of the slowest pairs
WINDOW = "window"
SLOW = D_HEAD // 2 - 8  # the first pair that did not come round
CLIPPED = {  # these pairs
    "clipped": slice(0, None),
    "slow clipped": slice(SLOW, None),
    "fast clipped": slice(0, SLOW),
}

CASES = (
    [{"rule": AS_TRAINED, "factor": 1, "further": 0, "steps": 300}]
    + [{"rule": AS_TRAINED, "factor": 1, "further": n} for n in (0, FURTHER)]
    + [
        {"rule": rule, "factor": factor, "further": further}
        for factor, further in ((2, 0), (8, 0), (8, FURTHER))
        for rule in RULES
    ]
    + [{"rule": rule, "factor": 1, "further": 0} for rule in (*HELD, WINDOW, *CLIPPED)]
)


def rotary_by(rule, factor):
    "Rotary positions of a model that was trained on `MAX_LEN` bytes, stretched."
    freqs = rope_frequencies(D_HEAD, BASE)
    if rule in HELD:
        freqs[-HELD[rule] :] = 0
        return RotaryEmbedding(D_HEAD, freqs=freqs)
    if rule == "linear":
        return RotaryEmbedding(D_HEAD, freqs=linear_scaling(freqs, factor))
    if rule == "NTK":
        return RotaryEmbedding(D_HEAD, base=ntk_scaled_base(BASE, factor, D_HEAD))
    if rule == "Llama 3":
        slowed = llama3_scaling(
            freqs,
            factor=factor,
            low_freq_factor=1,
            high_freq_factor=4,
            original_max_len=MAX_LEN,
        )
        return RotaryEmbedding(D_HEAD, freqs=slowed)
    if rule == "YaRN":
        slowed, attention = yarn_scaling(
            D_HEAD, BASE, factor=factor, original_max_len=MAX_LEN
        )
        return RotaryEmbedding(D_HEAD, freqs=slowed, attention_factor=attention)
    return RotaryEmbedding(D_HEAD)


def only_near(positions, key_positions):
    "A bias that hides all keys at a distance that did not occur in training."
    far = positions[:, None, :, None] - key_positions[:, None, None] >= MAX_LEN
    return torch.zeros(far.shape).masked_fill(far, -math.inf)


def clipped_attention(part, pairs, x):
    "What `part` computes if distances beyond the training turn `pairs` no further."
    at = torch.arange(x.shape[1])
    q, k, v = part.project_qkv(x)
    near_q, near_k = part.rotary(q, k, positions=at[None])
    (far_q,) = part.rotary(q, positions=torch.full_like(at, MAX_LEN - 1)[None])
    clip = torch.zeros(2, D_HEAD // 2)
    clip[:, pairs] = 1
    clip = clip.flatten()
    near = near_q @ near_k.mT
    far = ((1 - clip) * near_q) @ near_k.mT + (clip * far_q) @ k.mT
    distance = at[:, None] - at
    scores = torch.where(distance < MAX_LEN, near, far)
    scores = (scores / D_HEAD**0.5).masked_fill(distance < 0, -math.inf)
    return part.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@functools.cache
def texts():
    "The ids to train on, and windows of held-out stories."
    ids = encode_bytes(stories.story_corpus(TRAIN, seed=0, level=1))
    n = ROWS * (LENGTH + 1)
    held_out = encode_bytes(stories.story_corpus(n + 1_000, seed=1, level=1))
    return ids, held_out[:n].view(ROWS, LENGTH + 1)


def new_model():
    return Mixed(VARIANTS["RoPE"], equal_width(VARIANTS["RoPE"]))


@functools.cache
def trained(steps, seed):
    "The weights after so many steps on windows of `MAX_LEN` bytes."
    torch.manual_seed(seed)
    model = new_model()
    train(model, random_windows(texts()[0], MAX_LEN, BATCH, seed), steps)
    return model.state_dict()


@torch.no_grad()
def loss_by_band(model):
    "Nats per byte in each band of positions."
    losses = []
    for windows in texts()[1].split(8):
        logits = model(windows[:, :-1])
        losses.append(F.cross_entropy(logits.mT, windows[:, 1:], reduction="none"))
    each = torch.cat(losses).double().mean(0)
    bands = zip(FIRST, (*FIRST[1:], LENGTH), strict=True)
    return {f"nats_{a}": f"{each[a:b].mean():.4f}" for a, b in bands}


def one(rule, factor, further, steps, seed):
    "The columns of one row."
    model = new_model()
    model.load_state_dict(trained(steps, seed))
    for part in model.modules():
        if isinstance(part, SelfAttention):
            part.rotary = rotary_by(rule, factor)
            if rule == WINDOW:
                part.score_bias = only_near
            if rule in CLIPPED:
                part.forward = functools.partial(clipped_attention, part, CLIPPED[rule])
    if further:
        windows = random_windows(texts()[0], LENGTH, 1, seed + 100)
        train(model, windows, min(further, steps), lr=FURTHER_LR)
    return loss_by_band(model)


def main():
    args = common.arguments(__doc__, STEPS, "longer.csv")
    # a short run is no shorter than the others
    cases = [case for case in CASES if case.get("steps", 0) < args.steps]
    common.run(cases, one, args)


if __name__ == "__main__":
    main()
