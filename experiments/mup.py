"""One learning rate for all widths? Standard and maximal-update parametrization.

    python experiments/mup.py              all runs, three seeds, recorded
    python experiments/mup.py --steps 2 --seeds 1 --out some.csv

The tour's model with two layers and heads 16 wide, at three widths, is trained
with AdamW at six learning rates. In the standard way all parameters get the
same one. In the other (Yang et al., 2021, table 3) matrices get it times
32 / width, and the head begins smaller by the root of that. At width 32 both
are the same run.

The rows go to tformer/records/mup.csv: mean loss on held-out stories, in nats
per byte. A loss that is not finite is written as inf.
"""

import math

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
from tformer.training.optimizers import AdamW, clip_grad_norm_, mup_groups
from tformer.training.schedules import scale_lr, warmup_cosine

BASE = 32
WIDTHS = [32, 80, 160]
RATES = [2.0**-i for i in range(9, 3, -1)]
STEPS = 80
BATCH = 4
LENGTH = 64
CASES = [
    {"way": way, "width": width, "lr": lr}
    for width in WIDTHS
    for way in ("standard", "mup")
    for lr in RATES
    if way == "standard" or width > BASE
]
TRAIN = encode_bytes(stories.story_corpus(300_000, seed=0, level=1))
HELD_OUT = encode_bytes(stories.story_corpus(5_000, seed=1, level=1))


def train(way, width, lr, seed, steps):
    "The loss that one line of the record holds."
    torch.manual_seed(seed)
    model = MiniGPT(d_model=width, n_layers=2, n_heads=width // 16, max_len=LENGTH)
    base = BASE if way == "mup" else width
    with torch.no_grad():
        model.lm_head.weight.mul_((base / width) ** 0.5)
    optimizer = AdamW(
        mup_groups(model, lr, width=width, base_width=base), weight_decay=0.0
    )
    schedule = warmup_cosine(steps, steps // 10)
    batches = random_windows(TRAIN, LENGTH, BATCH, seed)
    for step, batch in zip(range(1, steps + 1), batches, strict=False):
        scale_lr(optimizer, schedule(step))
        optimizer.zero_grad()
        next_token_loss(model, batch).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    loss = mean_loss(model, HELD_OUT)
    return {"nats_per_byte": f"{loss if math.isfinite(loss) else math.inf:.3f}"}


if __name__ == "__main__":
    common.run(CASES, train, common.arguments(__doc__, STEPS, "mup.csv"))
