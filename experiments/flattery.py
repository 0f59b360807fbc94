"""How much a test of sentences that were read in training flatters a translator.

    python experiments/flattery.py                    eight seeds, ten minutes
    python experiments/flattery.py --seeds 1 --steps 2 --out some.csv

The small model of chapter 18 is trained as it is there: 500 steps of 40 short pairs,
and the mean of the last five checkpoints. Then it translates three groups of 600 short
sentences: some of those that it has read (`trained_on`), new ones made of combinations
that it has read (`known`), and new ones with combinations that no training sentence has
(`unseen`). A second model is trained from the same seed on all pairs but the 600 of the
first group (`read` is "no"). It has read none of the three groups, so it tells whether
one of them is easier than the others.

A row of tformer/records/flattery.csv holds the shares of sentences that are right to
the letter.
"""

import functools

import torch

from common import Kept, arguments, run
from tformer.corpora import bilingual
from tformer.models.seq2seq import Seq2Seq, Seq2SeqConfig
from tformer.tasks.translation import (
    TRANSLATION_SPECIAL_TOKENS,
    PairLoader,
    TranslationTokenizer,
    average_weights,
    exact_match_by_phenomenon,
    translate,
    translation_loss,
)
from tformer.text.tokenizer import Tokenizer
from tformer.training.optimizers import AdamW
from tformer.training.schedules import inverse_sqrt
from tformer.training.trainer import LossMonitor, Trainer

STEPS = 500
READ = 30_000
NEW = 10_000
TRIED = 600
PIECES = 1000
LONGEST = 5  # English words
BATCH = 40
# steps between checkpoints; how many are averaged
EVERY = 20
LAST = 5


def short(pairs):
    return [p for p in pairs if len(p.source.split()) <= LONGEST]


@functools.cache
def data():
    "Pairs to train on, the three groups of the test, and the tokenizer."
    pairs = short(bilingual.generate_pairs(READ))
    sources = {p.source for p in pairs}
    known = [
        p
        for p in short(bilingual.generate_pairs(NEW, seed=2))
        if p.source not in sources
    ]
    unseen = short(bilingual.generate_pairs(NEW, seed=1, held_out_only=True))
    groups = {
        "trained_on": pairs[:TRIED],
        "known": known[:TRIED],
        "unseen": unseen[:TRIED],
    }
    assert {len(group) for group in groups.values()} == {TRIED}
    tokenizer = Tokenizer.train(
        [p[i] for i in (0, 1) for p in pairs],
        PIECES,
        special_tokens=TRANSLATION_SPECIAL_TOKENS,
    )
    return pairs, groups, TranslationTokenizer(tokenizer)


def train(read, seed, steps):
    "The columns of one row."
    pairs, groups, tokenizer = data()
    loader = PairLoader(
        pairs if read == "yes" else pairs[TRIED:], tokenizer, BATCH, seed=seed
    )
    torch.manual_seed(seed)
    model = Seq2Seq(
        Seq2SeqConfig(
            vocab_size=len(tokenizer),
            d_model=64,
            n_layers=1,
            n_heads=4,
            d_ff=256,
            max_len=64,
            dropout=0.0,
        )
    )
    keep = Kept(LAST)
    Trainer(
        model,
        loader,
        max_steps=steps,
        loss_fn=translation_loss,
        lr_schedule=inverse_sqrt(80),
        loss_monitor=LossMonitor(None),
        optimizer=AdamW(model.parameters(), 5e-3, betas=(0.9, 0.98)),
        eval_fn=keep,
        eval_every=min(EVERY, steps),
    ).fit()
    model = average_weights(keep.models).eval()
    wrote = {
        name: translate(model, tokenizer, [p.source for p in group])
        for name, group in groups.items()
    }
    return {
        name: round(exact_match_by_phenomenon(wrote[name], group)["all"].accuracy, 4)
        for name, group in groups.items()
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(
        [{"read": read} for read in ("yes", "no")],
        train,
        arguments(__doc__, STEPS, "flattery.csv", seeds=8),
    )
