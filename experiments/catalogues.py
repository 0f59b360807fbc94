"""A real corpus: what nine programs say, in English and in French.

    pip download --no-deps -d wheels gramps pretix weblate plone.app.locales \\
        django-oscar wagtail sphinx django-allauth Django
    for w in wheels/*.whl; do unzip -q $w -d texts/$(basename $w .whl); done
    python experiments/catalogues.py texts            in a quarter of an hour
    python experiments/catalogues.py texts --seeds 1 --steps 20 --out some.csv

Programs carry catalogues of their messages, translated by people. No text of
theirs is kept: each folder is a program, and the record holds scores alone. The
translator of the package, with a vocabulary of its own, reads so many pairs and
is tried on 500 messages of one program, ``gramps`` where it is there. Once it
reads other messages of that program among the rest, once none. Beside it a
translation memory: the French of the English that shares most words.
"""

import gettext
import random
from pathlib import Path

import torch

from common import Kept, Stopwatch, parser, run, skip_without
from tformer.corpora.bilingual import SentencePair
from tformer.models.seq2seq import PreNormSeq2Seq, Seq2SeqConfig
from tformer.tasks.translation import (
    TRANSLATION_SPECIAL_TOKENS,
    PairLoader,
    TranslationTokenizer,
    average_weights,
    bleu_and_chrf,
    exact_match_by_phenomenon,
    translate,
    translation_loss,
)
from tformer.text.tokenizer import Tokenizer
from tformer.training.optimizers import AdamW
from tformer.training.schedules import inverse_sqrt
from tformer.training.trainer import Trainer

SHAPE = dict(d_model=128, n_layers=2, n_heads=4, d_ff=512, max_len=64, dropout=0.1)
STEPS = 1500
BATCH = 64
PIECES = 3000
WORDS = 12
NEW = 500
PEAK = 3e-3
UP = 400
EVERY = 100
LAST = 5
SPLITS = ("known program", "new program")


def messages(folder):
    "The pairs of a program: one line, a few words, two languages."
    found = {}
    for path in sorted(folder.rglob("fr/LC_MESSAGES/*.mo")):
        with path.open("rb") as file:
            catalogue = gettext.GNUTranslations(file)
        for key in catalogue._catalog:
            english = (key[0] if isinstance(key, tuple) else key).split("\4")[-1]
            french = catalogue._catalog[key]
            sides = english.strip(), french.strip()
            if (
                all(sides)
                and sides[0] != sides[1]
                and all(
                    "\n" not in side and len(side) <= 80 and len(side.split()) <= WORDS
                    for side in sides
                )
            ):
                found.setdefault(sides[0], sides[1])
    return [SentencePair(*sides) for sides in sorted(found.items())]


def programs(folder):
    "Pairs by program; no English sentence twice."
    seen = set()
    found = {}
    for sub in sorted(p for p in folder.iterdir() if p.is_dir()):
        pairs = [p for p in messages(sub) if p.source not in seen]
        seen |= {p.source for p in pairs}
        if pairs:
            found[sub.name.split("-")[0]] = pairs
    if len(found) < 2:
        raise SystemExit(
            f"{folder}: expected folders of at least two "
            f"programs with French catalogues, found "
            f"{[*found] or 'none'}"
        )
    return found


def split(found, which, seed):
    "What is read, as many pairs either way, and the messages to try."
    dice = random.Random(seed)
    asked = "gramps" if "gramps" in found else [*found][-1]
    own = dice.sample(found[asked], len(found[asked]))
    n = min(NEW, len(own) // 2)
    others = [p for name, pairs in found.items() if name != asked for p in pairs]
    read = (
        others if which == "new program" else dice.sample(others + own[n:], len(others))
    )
    return dice.sample(read, len(read)), own[:n]


def memory(read, new):
    "The French of the pair whose English shares most words."
    known = [(frozenset(p.source.lower().split()), p.target) for p in read]

    def nearest(text):
        words = frozenset(text.lower().split())
        return max(known, key=lambda k: len(k[0] & words) / len(k[0] | words))[1]

    return [nearest(p.source) for p in new]


def trainer_of(found):
    "The function that trains one case on what these programs say."

    def train(split_of, seed, steps):
        read, new = split(found, split_of, seed)
        sides = TranslationTokenizer.wrap(
            Tokenizer.train(
                [text for pair in read for text in pair[:2]],
                PIECES,
                special_tokens=TRANSLATION_SPECIAL_TOKENS,
            )
        )

        def fit(pairs):
            rows = zip(
                sides.encode_sources([p.source for p in pairs]),
                sides.encode_targets([p.target for p in pairs]),
                strict=True,
            )
            return [
                p
                for p, (a, b) in zip(pairs, rows, strict=True)
                if max(len(a), len(b)) < SHAPE["max_len"] - 2
            ]

        read = fit(read)
        new = fit(new)
        torch.manual_seed(seed)
        model = PreNormSeq2Seq(Seq2SeqConfig(vocab_size=len(sides), **SHAPE))
        keep = Kept(LAST)
        with Stopwatch() as watch:
            Trainer(
                model,
                PairLoader(read, sides, BATCH, seed=seed),
                max_steps=steps,
                loss_fn=translation_loss,
                optimizer=AdamW(
                    model.parameters(),
                    lr=PEAK,
                    betas=(0.9, 0.98),
                    eps=1e-9,
                    weight_decay=0.0,
                ),
                lr_schedule=inverse_sqrt(min(UP, steps)),
                eval_fn=keep,
                eval_every=min(EVERY, steps),
            ).fit()
        model = average_weights(keep.models).eval()
        wrote = translate(model, sides, [p.source for p in new])
        right = [p.target for p in new]
        row = {"read": len(read), "new": len(new)}
        for name, texts in (("", wrote), ("memory_", memory(read, new))):
            marks = bleu_and_chrf(texts, right)
            exact = exact_match_by_phenomenon(texts, new)["all"].accuracy
            row |= {
                f"{name}bleu": round(marks.bleu, 2),
                f"{name}chrf": round(marks.chrf, 2),
                f"{name}exact": round(exact, 4),
            }
        return row | {
            "parameters": sum(p.numel() for p in model.parameters()),
            "seconds": round(watch.seconds - keep.looking.seconds),
        }

    return train


if __name__ == "__main__":
    made = parser(__doc__, "catalogues.csv", seeds=2)
    made.add_argument("folder", type=Path, nargs="?")
    made.add_argument("--steps", type=int, default=STEPS)
    args = made.parse_args()
    skip_without(args.folder, "a folder of programs with French catalogues")
    train = trainer_of(programs(args.folder))
    run(
        [{"split": name} for name in SPLITS],
        lambda split, seed, steps: train(split, seed, steps),
        args,
    )
