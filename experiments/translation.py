"""What each part of the recipe of 2017 is worth to a small translator.

    python experiments/translation.py                 in a quarter of an hour
    python experiments/translation.py --seeds 1 --steps 20 --out some.csv

One model reads pairs of the parallel grammar by the whole recipe; the others
leave one part of it out: label smoothing, the warm-up (the rate starts at its
peak and falls as it would), the average over the last checkpoints, the shared
vocabulary (two smaller ones, in one table). Each is tried on pairs with
combinations that are held out. The loss is in nats per byte of the translation,
without smoothing, so that vocabularies compare.
"""

from functools import partial

import torch

from common import Kept, Stopwatch, arguments, run
from tformer.corpora import bilingual
from tformer.models.seq2seq import PreNormSeq2Seq, Seq2SeqConfig
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
from tformer.training.trainer import Trainer

READ = 20_000
NEW = 300
PIECES = 1200
SHAPE = dict(d_model=64, n_layers=2, n_heads=4, d_ff=256, max_len=64, dropout=0.0)
STEPS = 400
BATCH = 48
PEAK = 4e-3
UP = 100
# steps between checkpoints; how many are averaged
EVERY = 20
LAST = 5
VARIANTS = {
    "whole": {},
    "no smoothing": dict(label_smoothing=0.0),
    "no warm-up": dict(up=1),
    "no averaging": dict(last=1),
    "two vocabularies": dict(shared=False),
}


def sides_of(pairs, shared):
    "One vocabulary for both languages, or two smaller ones."
    if shared:
        return TranslationTokenizer.wrap(
            Tokenizer.train(
                [text for pair in pairs for text in pair[:2]],
                PIECES,
                special_tokens=TRANSLATION_SPECIAL_TOKENS,
            )
        )
    return TranslationTokenizer(
        *(
            Tokenizer.train(
                [pair[side] for pair in pairs],
                PIECES // 2 + 130,
                special_tokens=TRANSLATION_SPECIAL_TOKENS,
            )
            for side in (0, 1)
        )
    )


def rate(up, step):
    "The factor of the learning rate: warm-up or not, the same decay."
    if up > 1:
        return inverse_sqrt(up)(step)
    return min(1.0, (UP / max(step, 1)) ** 0.5)


def train(variant, seed, steps):
    "The columns of one row."
    whole = dict(label_smoothing=0.1, up=UP, last=LAST, shared=True)
    how = whole | VARIANTS[variant]
    read = bilingual.generate_pairs(READ if steps >= STEPS else 500, seed)
    new = bilingual.generate_pairs(
        NEW if steps >= STEPS else 20, 100, held_out_only=True
    )
    sides = sides_of(read[:10_000], how["shared"])
    torch.manual_seed(seed)
    model = PreNormSeq2Seq(Seq2SeqConfig(vocab_size=len(sides), **SHAPE))
    keep = Kept(how["last"])
    with Stopwatch() as watch:
        Trainer(
            model,
            PairLoader(read, sides, BATCH, seed=seed),
            max_steps=steps,
            loss_fn=partial(translation_loss, label_smoothing=how["label_smoothing"]),
            optimizer=AdamW(
                model.parameters(),
                lr=PEAK,
                betas=(0.9, 0.98),
                eps=1e-9,
                weight_decay=0.0,
            ),
            lr_schedule=partial(rate, min(how["up"], steps)),
            eval_fn=keep,
            eval_every=min(EVERY, steps),
        ).fit()
    model = average_weights(keep.models).eval()
    with torch.no_grad():
        nats = sum(
            translation_loss(model, batch, label_smoothing=0).item() * batch.num_targets
            for batch in PairLoader(new, sides).iter_once()
        )
    bytes_ = sum(len(pair.target.encode()) + 1 for pair in new)
    wrote = translate(model, sides, [pair.source for pair in new])
    return {
        "loss": round(nats / bytes_, 5),
        "exact": round(exact_match_by_phenomenon(wrote, new)["all"].accuracy, 4),
        "vocab_size": len(sides),
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(watch.seconds - keep.looking.seconds),
    }


if __name__ == "__main__":
    run(
        [{"variant": name} for name in VARIANTS],
        train,
        arguments(__doc__, STEPS, "translation.csv"),
    )
