"""Warm-up, bias correction, decoupled decay, clipping: leave one out, and train.

    python experiments/leave_out.py        all runs, three seeds, recorded
    python experiments/leave_out.py --steps 2 --seeds 1 --out some.csv

The tour's model, 64 wide, with two layers and a context of 64 bytes, is trained
with AdamW on stories: 300 steps of 8 windows, warm-up over the first tenth and
then a cosine, decay 0.01, clipping at 1. One of the four habits is left out, in
two settings each. The settings were looked for: one in which it matters, one in
which it might not.

The rows go to tformer/records/leave_out.csv: mean loss on held-out stories, in
nats per byte, with the habit (kept = yes) and without it.
"""

import functools

import torch

import common
from tformer.corpora import stories
from tformer.models.mini_gpt import (
    MiniGPT,
    encode_bytes,
    mean_loss,
    next_token_loss,
    random_windows,
)
from tformer.training.optimizers import AdamW, clip_grad_norm_, param_groups
from tformer.training.schedules import scale_lr, warmup_cosine

STEPS = 300
BATCH = 8
LENGTH = 64
SETTINGS = {
    "warm-up": {"lr 0.002": {"lr": 2e-3}, "lr 0.02": {"lr": 2e-2}},
    "bias correction": {"lr 0.003": {"lr": 3e-3}, "lr 0.006": {}},
    "decoupling": {"decay 0.0001": {"decay": 1e-4}, "decay 0.01": {}},
    "clipping": {"lr 0.006": {}, "lr 0.02": {"lr": 2e-2}},
}
CASES = [
    {"part": part, "setting": setting, "kept": kept}
    for part, settings in SETTINGS.items()
    for setting in settings
    for kept in ("yes", "no")
]
TRAIN = encode_bytes(stories.story_corpus(300_000, seed=0, level=1))
HELD_OUT = encode_bytes(stories.story_corpus(10_000, seed=1, level=1))


@functools.cache  # with all habits, some settings are one and the same
def loss_of(without, seed, steps, lr=6e-3, decay=0.01):
    "Train without one of the habits (None: with all)."
    torch.manual_seed(seed)
    model = MiniGPT(d_model=64, n_layers=2, max_len=LENGTH)
    optimizer = AdamW(
        param_groups(model, decay),
        lr,
        decoupled_weight_decay=without != "decoupling",
        bias_correction=without != "bias correction",
    )
    schedule = warmup_cosine(steps, 0 if without == "warm-up" else steps // 10)
    batches = random_windows(TRAIN, LENGTH, BATCH, seed)
    for step, batch in zip(range(1, steps + 1), batches, strict=False):
        scale_lr(optimizer, schedule(step))
        optimizer.zero_grad()
        next_token_loss(model, batch).backward()
        if without != "clipping":
            clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return mean_loss(model, HELD_OUT)


def train(part, setting, kept, seed, steps):
    "The loss that one line of the record holds."
    loss = loss_of(
        part if kept == "no" else None, seed, steps, **SETTINGS[part][setting]
    )
    return {"nats_per_byte": f"{loss:.3f}"}


if __name__ == "__main__":
    common.run(CASES, train, common.arguments(__doc__, STEPS, "leave_out.csv"))
