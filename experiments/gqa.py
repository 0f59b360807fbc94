"""What a trained model loses when its heads come to share keys and values.

    python experiments/gqa.py                       three seeds, an hour
    python experiments/gqa.py --steps 2 --seeds 1 --out some.csv

A storyteller with eight heads, each with keys and values of its own, is trained
with each seed; it is the `stories_mha` of experiments/trained.py. Then it is
converted to four, two and one key heads by each method of lesson 24, and trained
for 40 more steps, 5 % of the first training, at two learning rates, on stories
that it has not read. The same is done with the model that was not converted.
Models that have had four, two or one key heads from the beginning are trained
for comparison.

The rows go to tformer/records/gqa.csv. `converted` is the loss right after the
conversion, `after_10` and `after_20` those on the way and `loss` the one at the
end, in nats per byte of 300 new stories; `right` is the share of right sentences
in 100 stories that the model tells. A run that was stopped goes on where it was.
"""

import copy
import functools

import torch

import common
from tformer.bundle import ENDOFTEXT, ModelBundle, fraction_correct, tell
from tformer.models.llama import Llama, LlamaConfig
from tformer.text.tokenizer import Tokenizer
from tformer.training.data import PaddedLoader
from tformer.training.optimizers import AdamW
from tformer.training.schedules import warmup_cosine
from tformer.training.trainer import Trainer
from tformer.variants.gqa import convert_to_gqa
from trained import (
    BATCH,
    HEADS,
    NEW_SEED,
    READ,
    SEED,
    SHAPE,
    STEPS,
    VOCAB,
    WARMUP,
    nats_per_byte,
    optimizers,
    rows,
    told,
)

N_HEADS = HEADS["stories_mha"]["n_heads"]
KV_HEADS = (4, 2, 1)
METHODS = ("aligned", "mean", "first", "random")
LEARNING_RATES = (1e-3, 3e-3)
FULL = STEPS["stories_mha"]
MORE = FULL // 20  # steps after the conversion: 5 %
MORE_WARMUP = 4
MORE_SEED = 2  # of the stories that are read then
NEW = 300  # stories that the loss is measured on
CALIBRATION = 64  # stories that the aligned conversion looks at
TOLD = 100


@functools.cache
def read_stories():
    "The stories of the training, and the tokenizer made from them."
    read = told(max(READ, FULL * BATCH), SEED)
    tokenizer = Tokenizer.train(read[:READ], VOCAB, special_tokens=[ENDOFTEXT])
    return read, tokenizer


@functools.cache
def new_stories():
    return told(NEW, NEW_SEED)


def loss_of(model):
    "Nats per byte of new stories."
    bundle = ModelBundle(model, read_stories()[1], {})
    return nats_per_byte(bundle, new_stories())


def right_of(model):
    "The share of right sentences among those that the model tells."
    bundle = ModelBundle(model.eval(), read_stories()[1], {})
    return f"{fraction_correct(tell(bundle, TOLD)):.4f}"


def calibration_ids():
    "The beginnings of some stories of the training, of equal length."
    read, tokenizer = read_stories()
    ids = rows(tokenizer, read[:CALIBRATION])
    shortest = min(map(len, ids))
    return torch.tensor([row[:shortest] for row in ids])


@functools.cache
def trained_model(seed, n_kv_heads, steps):
    "A storyteller that has had so many key heads from the beginning."
    read, tokenizer = read_stories()
    torch.manual_seed(seed)
    model = Llama(
        LlamaConfig(
            vocab_size=len(tokenizer), **SHAPE, n_heads=N_HEADS, n_kv_heads=n_kv_heads
        )
    )
    Trainer(
        model,
        PaddedLoader(
            rows(tokenizer, read[: steps * BATCH]), batch_size=BATCH, seed=seed
        ),
        max_steps=steps,
        optimizer=optimizers(model),
        lr_schedule=warmup_cosine(steps, min(WARMUP, steps), min_lr_ratio=0.05),
    ).fit()
    return model.eval()


def train_more(model, lr, steps, seed):
    "Train on stories that are new to the model; return the losses on the way."
    ids = rows(read_stories()[1], told(MORE * BATCH, MORE_SEED))
    history = Trainer(
        model,
        PaddedLoader(ids, batch_size=BATCH, seed=seed),
        max_steps=steps,
        eval_fn=loss_of,
        eval_every=max(1, steps // 4),
        optimizer=AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
        lr_schedule=warmup_cosine(steps, min(MORE_WARMUP, steps), min_lr_ratio=0.05),
    ).fit()
    losses = [row["eval_loss"] for row in history if "eval_loss" in row]
    return {
        name: f"{losses[min(i, len(losses) - 1)]:.4f}"
        for name, i in (("after_10", 0), ("after_20", 1), ("loss", -1))
    }


def train(n_kv_heads, method, lr, steps, seed):
    "One row: a model that is trained so, or converted and trained for longer."
    if method == "trained":
        model = trained_model(seed, n_kv_heads, steps)
        return {
            "converted": "",
            "after_10": "",
            "after_20": "",
            "loss": f"{loss_of(model):.4f}",
            "right": right_of(model),
        }
    full = FULL if steps == MORE else steps
    base = trained_model(seed, N_HEADS, full)
    if method == "none":
        model = copy.deepcopy(base)
    else:
        model = convert_to_gqa(
            base,
            n_kv_heads,
            method=method,
            calibration_ids=calibration_ids(),
            generator=torch.Generator().manual_seed(seed),
        )
    at_once = loss_of(model)
    found = train_more(model, lr, steps, seed)
    return {"converted": f"{at_once:.4f}", **found, "right": right_of(model)}


def cases():
    "What is trained: first the model that is converted."
    yield dict(n_kv_heads=N_HEADS, method="trained", lr=0.02, steps=FULL)
    for lr in LEARNING_RATES:
        yield dict(n_kv_heads=N_HEADS, method="none", lr=lr, steps=MORE)
        for n in KV_HEADS:
            for method in METHODS:
                yield dict(n_kv_heads=n, method=method, lr=lr, steps=MORE)
    for n in KV_HEADS:
        yield dict(n_kv_heads=n, method="trained", lr=0.02, steps=FULL)


def main():
    args = common.arguments(__doc__, FULL, "gqa.csv")
    common.run(list(cases()), train, args)


if __name__ == "__main__":
    main()
