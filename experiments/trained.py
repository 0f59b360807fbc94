"""Train the models that travel with the package, and measure them.

    python experiments/trained.py                   all of them, in half an hour
    python experiments/trained.py --only stories    one of them
    python experiments/trained.py --check           again, and compare
    python experiments/trained.py --steps 2 --out some/folder

They go to tformer/weights/NAME/: weights in bfloat16, configuration, tokenizer,
and card.json, which says how a model was made and how good it is. `stories` is
a Llama whose tokens are words; it tells one story a text. `stories_mha` is the
same with eight heads, each with keys and values of its own; lesson 24 converts
it. `tour` is the model
of chapter 0, trained as it is there, and `tour_no_mask` the same without its
mask. `translator` is the Transformer of 2017, its norms moved, trained on pairs
of the parallel grammar by the recipe of 2017; it is tried on combinations of
noun, adjective and construction that it never read. `bert` is a masked language
model whose tokens are words; after a beginning with 30 % of blanks its batches
are masked in turn by BERT's rule and at every rate, so that it can both fill a
blank and write out of nothing. What is measured is measured on weights rounded
as in the file; `seconds` are those of the processor, of training alone.
`--check` trains again, writes nothing, and fails if what comes out is not,
within bands, what the cards say.
"""

import argparse
import copy
import math
import sys
import time
from collections import deque
from pathlib import Path

import torch

from common import Stopwatch, about
from tformer.bundle import (
    ENDOFTEXT,
    MiniGPTConfig,
    ModelBundle,
    SavableMiniGPT,
    fraction_copied,
    fraction_correct,
    load_bundle,
    read_verified_card,
    save_bundle,
    tell,
)
from tformer.corpora import bilingual, stories
from tformer.models.bert import BertConfig, BertMaskedLM
from tformer.models.llama import Llama, LlamaConfig
from tformer.models.mini_gpt import (
    decode_bytes,
    encode_bytes,
    generate,
    mean_loss,
    random_windows,
    train,
)
from tformer.models.seq2seq import PreNormSeq2Seq, Seq2SeqConfig
from tformer.nn.layers import init_weights
from tformer.tasks import translation
from tformer.tasks.masked_lm import (
    BERT_SPECIAL_TOKENS,
    STORY_WORDS,
    MaskedTextLoader,
    NeighborBaseline,
    SpecialTokenIds,
    batch_cross_entropy,
    collate_texts,
    encode_texts,
    generate_by_unmasking,
    recoverable_words,
)
from tformer.text.tokenizer import Tokenizer
from tformer.text.vocabulary import Vocabulary
from tformer.training.data import PaddedLoader
from tformer.training.optimizers import AdamW, Muon, hidden_matrices
from tformer.training.schedules import inverse_sqrt, warmup_cosine
from tformer.training.trainer import Trainer, next_token_loss

OUT = Path(__file__).parents[1] / "tformer" / "weights"
# of the stories; NEW: never trained on
SEED = 0
NEW_SEED = 1
LEVEL = 1
STEPS = {
    "stories": 800,
    "stories_mha": 800,
    "tour": 1800,
    "tour_no_mask": 1800,
    "translator": 4000,
    "bert": 3400,
}
SHAPE = dict(d_model=128, n_layers=4, max_len=256, tie_word_embeddings=True)
HEADS = {
    "stories": dict(n_heads=4, n_kv_heads=2),
    "stories_mha": dict(n_heads=8, n_kv_heads=8),
}
BATCH = 32
WARMUP = 40
LR = 0.02
TABLE_LR = 5e-3
# no pair is left beyond; stories that it is from
VOCAB = 632
READ = 4000
LOOKS = 10
SAMPLES = 200
NEW = 500
RUNS = (2, 4, 8, 16, 32)  # words
BERT = dict(d_model=96, n_layers=3, n_heads=4, max_len=128, dropout=0.0)
# of blanks; None: every rate
FIRST = (0.3,)
RATES = (0.15, None)
BEGINNING = 0.3  # of the steps, with the first rate
PASSES = (1, 2, 4, 8, 16, 32, 64)  # when it writes
SIDES = {
    "alone": (0, 0),
    "left": (1, 0),
    "two left": (2, 0),
    "both sides": (1, 1),
    "two on both sides": (2, 2),
}
FLOOR = 0.074  # nats per byte: entropy of level 1, appendix A2
# of the translator
TRANSLATOR = dict(d_model=128, n_layers=2, n_heads=4, d_ff=512, max_len=64, dropout=0.0)
PAIRS = 100_000
PAIRS_A_STEP = 64
TRIED = 2000
PIECES = 1500
# the learning rate, and steps until it is reached
PEAK = 3e-3
UP = 400
# steps between checkpoints; how many are averaged
EVERY = 100
LAST = 5
BANDS = {
    "loss": 0.01,
    "right": 0.04,
    "copied": 0.05,
    "exact": 0.03,
    "filled": 0.02,
    "blank_loss": 0.03,
}


def told(n, seed):
    return [text.strip() for text in stories.generate_stories(n, seed, LEVEL)]


def rows(tokenizer, texts):
    "Each text as ids, between two ``ENDOFTEXT``."
    end = tokenizer.token_to_id(ENDOFTEXT)
    return [[end, *ids, end] for ids in tokenizer.encode_batch(texts)]


@torch.no_grad()
def nats_per_byte(trained, texts):
    "The loss on whole texts, each with the token that ends it."
    batches = PaddedLoader(rows(trained.tokenizer, texts), batch_size=50)
    total = sum(
        next_token_loss(trained.model, batch).item() * batch.num_targets
        for _, batch in zip(range(math.ceil(len(texts) / 50)), batches, strict=False)
    )
    return total / sum(len(text.encode()) + 1 for text in texts)


def optimizers(model):
    "Muon for the matrices of the blocks, AdamW for the rest."
    matrices = hidden_matrices(model)
    known = {id(p) for p in matrices}
    return [
        Muon(matrices, lr=LR, weight_decay=0.01),
        AdamW(
            [p for p in model.parameters() if id(p) not in known],
            lr=TABLE_LR,
            betas=(0.9, 0.95),
            weight_decay=0.0,
        ),
    ]


def tell_of(row):
    if "eval_loss" in row:
        print({key: round(x, 3) for key, x in row.items()}, flush=True)


def train_stories(steps, name="stories"):
    "The storyteller, or the one without shared heads, rounded, and its card."
    n = min(SAMPLES, 10 * steps)
    read = told(max(READ, steps * BATCH), SEED)
    new = told(min(NEW, 10 * steps), NEW_SEED)
    tokenizer = Tokenizer.train(read[:READ], VOCAB, special_tokens=[ENDOFTEXT])
    torch.manual_seed(SEED)
    model = Llama(LlamaConfig(vocab_size=len(tokenizer), **SHAPE, **HEADS[name]))
    trained = ModelBundle(model, tokenizer, {})
    looking = Stopwatch()

    def look(model):
        spent = time.process_time() - began - looking.seconds
        with looking:
            return {
                "loss": nats_per_byte(trained, new[:200]),
                "right": fraction_correct(tell(trained, n // 2)),
                "seconds": spent,
            }

    batches = PaddedLoader(
        rows(tokenizer, read[: steps * BATCH]), batch_size=BATCH, seed=SEED
    )
    began = time.process_time()
    history = Trainer(
        model,
        batches,
        max_steps=steps,
        optimizer=optimizers(model),
        lr_schedule=warmup_cosine(steps, min(WARMUP, steps), min_lr_ratio=0.05),
        eval_fn=look,
        eval_every=max(1, steps // LOOKS),
        log_fn=tell_of,
    ).fit()
    spent = time.process_time() - began - looking.seconds
    curve = [
        {
            "step": row["step"],
            "seconds": round(row["eval_seconds"]),
            "loss": round(row["eval_loss"], 4),
            "right": round(row["eval_right"], 4),
        }
        for row in history
        if "eval_loss" in row
    ]
    model.eval()
    exact = nats_per_byte(trained, new)
    round_weights(model)
    wrote = {t: tell(trained, n, temperature=t) for t in (1.0, 0.7)}
    warm, cool = wrote.values()
    read = read[: steps * BATCH]
    shared = "" if name == "stories" else "; no two heads share keys"
    card = dict(
        about=f"tells stories of level {LEVEL}, one a text{shared}",
        steps=steps,
        seconds=round(spent),
        read=len(read),
        samples=n,
        loss_float32=round(exact, 5),
        loss=round(nats_per_byte(trained, new), 5),
        floor=FLOOR,
        right=round(fraction_correct(warm), 4),
        flawless=round(fraction_correct(warm, per_story=True), 4),
        copied=round(fraction_copied(warm, read), 4),
        at_temperature_0_7=dict(
            right=round(fraction_correct(cool), 4),
            flawless=round(fraction_correct(cool, per_story=True), 4),
            copied=round(fraction_copied(cool, read), 4),
        ),
        curve=curve,
        runs=[
            {
                "words": words,
                "told": round(fraction_copied(warm, read, words), 4),
                "new": round(fraction_copied(new[:n], read, words), 4),
            }
            for words in RUNS
        ],
    )
    return trained._replace(card=card)


@torch.no_grad()
def nats_per_target_byte(trained, pairs):
    "The loss on translations, each with the token that ends it."
    batches = translation.PairLoader(pairs, trained.tokenizer).iter_once()
    total = sum(
        translation.translation_loss(trained.model, batch, label_smoothing=0).item()
        * batch.num_targets
        for batch in batches
    )
    return total / sum(len(pair.target.encode()) + 1 for pair in pairs)


def translated(trained, pairs):
    "What it makes of the sources, greedily; the exact matches."
    wrote = translation.translate(
        trained.model, trained.tokenizer, [pair.source for pair in pairs]
    )
    return wrote, translation.exact_match_by_phenomenon(wrote, pairs)


def train_translator(steps):
    "The translator: the mean of its last checkpoints, rounded; its card."
    read = bilingual.generate_pairs(min(PAIRS, 100 * steps), SEED)
    n = min(TRIED, 10 * steps)
    new = bilingual.generate_pairs(n, NEW_SEED, held_out_only=True)
    tokenizer = Tokenizer.train(
        [text for pair in read[:20_000] for text in pair[:2]],
        PIECES,
        special_tokens=translation.TRANSLATION_SPECIAL_TOKENS,
    )
    torch.manual_seed(SEED)
    model = PreNormSeq2Seq(Seq2SeqConfig(vocab_size=len(tokenizer), **TRANSLATOR))
    trained = ModelBundle(model, tokenizer, {})
    last = deque(maxlen=LAST)
    looking = Stopwatch()

    def look(model):
        spent = time.process_time() - began - looking.seconds
        with looking:
            last.append(copy.deepcopy(model))
            return {
                "loss": nats_per_target_byte(trained, new[:100]),
                "exact": translated(trained, new[:100])[1]["all"].accuracy,
                "seconds": spent,
            }

    batches = translation.PairLoader(read, tokenizer, PAIRS_A_STEP, seed=SEED)
    began = time.process_time()
    history = Trainer(
        model,
        batches,
        max_steps=steps,
        loss_fn=translation.translation_loss,
        optimizer=AdamW(
            model.parameters(), lr=PEAK, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0
        ),
        lr_schedule=inverse_sqrt(min(UP, steps)),
        eval_fn=look,
        eval_every=min(EVERY, steps),
        log_fn=tell_of,
    ).fit()
    spent = time.process_time() - began - looking.seconds
    alone = translated(trained, new)[1]["all"].accuracy
    trained = trained._replace(model=translation.average_weights(last).eval())
    exact = nats_per_target_byte(trained, new)
    round_weights(trained.model)
    return trained._replace(
        card=dict(
            about="translates the English of the parallel grammar into French",
            steps=steps,
            seconds=round(spent),
            read=len(read),
            tried=n,
            loss_float32=round(exact, 5),
            exact_without_averaging=round(alone, 4),
            **measure_translator(trained, read, new),
            curve=[
                {
                    "step": row["step"],
                    "seconds": round(row["eval_seconds"]),
                    "loss": round(row["eval_loss"], 4),
                    "exact": round(row["eval_exact"], 4),
                }
                for row in history
                if "eval_loss" in row
            ],
        )
    )


def measure_translator(trained, read, new):
    """What is measured on the weights of the file.

    ``exact_in_combinations_read``: new sentences, nothing else new.
    """
    known = sorted({*bilingual.generate_pairs(len(new), NEW_SEED)} - {*read})
    wrote, found = translated(trained, new)
    base = [bilingual.translate_word_for_word(pair.source) for pair in new]
    right = [pair.target for pair in new]
    ours, theirs = (translation.bleu_and_chrf(texts, right) for texts in (wrote, base))
    share = {name: round(x.accuracy, 4) for name, x in found.items()}
    every = {name: share[name] for name in bilingual.PHENOMENA if name in share}
    low = min(every, key=every.get)
    return dict(
        loss=round(nats_per_target_byte(trained, new), 5),
        exact=share["all"],
        exact_by_phenomenon=every,
        exact_in_combinations_read=round(
            translated(trained, known)[1]["all"].accuracy, 4
        ),
        bleu=round(ours.bleu, 2),
        chrf=round(ours.chrf, 2),
        word_for_word=dict(
            exact=round(
                translation.exact_match_by_phenomenon(base, new)["all"].accuracy, 4
            ),
            bleu=round(theirs.bleu, 2),
            chrf=round(theirs.chrf, 2),
        ),
        signature=ours.signature,
        measured={
            "exact": f"{share['all']:.1%} of {len(new):,} sentences with "
            f"combinations never read; {low}: {every[low]:.1%}",
            "BLEU": f"{ours.bleu:.1f}, chrF {ours.chrf:.1f}; word for word "
            f"{theirs.bleu:.1f}, chrF {theirs.chrf:.1f}",
            "by": f"sacrebleu {ours.signature}",
        },
    )


def train_tour(steps, causal):
    "The model of chapter 0, as it is trained there; or without its mask."
    ids = encode_bytes(stories.story_corpus(300_000, seed=SEED, level=LEVEL))
    held_out = encode_bytes(stories.story_corpus(30_000, seed=NEW_SEED, level=LEVEL))
    torch.manual_seed(SEED)
    model = SavableMiniGPT(MiniGPTConfig(causal=causal))
    with Stopwatch() as training:
        train(model, random_windows(ids, model.max_len, seed=SEED), steps)
    exact = mean_loss(model, held_out)
    round_weights(model.eval())
    wrote = decode_bytes(
        generate(model, encode_bytes("Once there was"), min(600, 10 * steps))
    )
    mask = "" if causal else ", without its mask: it sees what it guesses"
    card = dict(
        about=f"the model of chapter 0{mask}",
        steps=steps,
        seconds=round(training.seconds),
        loss_float32=round(exact, 5),
        loss=round(mean_loss(model, held_out), 5),
        grade=round(stories.grade_stories(wrote).score, 3),
    )
    return ModelBundle(model, Tokenizer(Vocabulary([])), card)


@torch.no_grad()
def fill_told(trained, texts, counts):
    """The share of told blanks that is filled rightly, by kind.

    One blank a text and kind, the last of its kind; who fills it knows the
    kind, and so does who counts.
    """
    model, tokenizer, _ = trained
    known = {
        kind: {
            i
            for word in words
            for text in (word, f" {word}")
            for i in tokenizer.encode(text)[:1]
            if len(tokenizer.encode(text)) == 1
        }
        for kind, words in STORY_WORDS.items()
    }
    found = {kind: {name: [] for name in ("model", *counts)} for kind in STORY_WORDS}
    mask = SpecialTokenIds.from_tokenizer(tokenizer).mask
    for row in encode_texts(tokenizer, texts):
        words = [tokenizer.decode([i]) for i in row]
        last = {kind: i for i, kind in recoverable_words(words)}
        if not last:
            continue
        shown = [[*row[:i], mask, *row[i + 1 :]] for i in last.values()]
        batch = collate_texts(shown, tokenizer)
        logits = model(batch.ids, positions=batch.positions)
        for n, (kind, i) in enumerate(last.items()):
            among = torch.tensor(sorted(known[kind]))
            guess = among[logits[n, i][among].argmax()].item()
            found[kind]["model"].append(guess == row[i])
            for name, count in counts.items():
                found[kind][name].append(count.guess(row, i, known[kind]) == row[i])
    return {
        kind: {name: round(sum(x) / max(1, len(x)), 4) for name, x in by.items()}
        | {"blanks": len(by["model"])}
        for kind, by in found.items()
    }


@torch.no_grad()
def nats_per_blank(trained, texts, rate=0.15):
    "The loss at blanks by the rule, on whole texts."
    rows = encode_texts(trained.tokenizer, texts)
    batches = MaskedTextLoader(
        rows, trained.tokenizer, mlm_probabilities=(rate,), batch_size=50, seed=SEED
    )
    some = [batches.get_batch(k) for k in range(len(batches.groups))]
    return sum(
        batch_cross_entropy(trained.model, b).item() * b.num_targets for b in some
    ) / sum(b.num_targets for b in some)


def train_bert(steps):
    "The masked language model, rounded, and its card."
    n = min(SAMPLES, 10 * steps)
    read = told(max(READ, min(20_000, steps * BATCH)), SEED)
    new = told(min(NEW, 10 * steps), NEW_SEED)
    tokenizer = Tokenizer.train(
        read[:READ], VOCAB + 3, special_tokens=BERT_SPECIAL_TOKENS
    )
    torch.manual_seed(SEED)
    model = BertMaskedLM(BertConfig(vocab_size=len(tokenizer), **BERT))
    init_weights(model, std=0.1)  # larger than BERT's, for a short run
    trained = ModelBundle(model, tokenizer, {})
    looking = Stopwatch()
    lengths = [len(ids) for ids in tokenizer.encode_batch(new[:n])]

    def look(model):
        spent = time.process_time() - began - looking.seconds
        with looking:
            return {
                "loss": nats_per_blank(trained, new[:200]),
                "right": fraction_correct(
                    generate_by_unmasking(trained, lengths[: n // 2], steps=32)
                ),
                "seconds": spent,
            }

    rows = encode_texts(tokenizer, read)
    began = time.process_time()
    history = []
    first = round(BEGINNING * steps)
    for rates, part in ((FIRST, first), (RATES, steps - first)):
        batches = MaskedTextLoader(
            rows, tokenizer, mlm_probabilities=rates, batch_size=BATCH, seed=SEED
        )
        past = Trainer(
            model,
            batches,
            max_steps=part,
            loss_fn=batch_cross_entropy,
            optimizer=optimizers(model),
            lr_schedule=warmup_cosine(part, min(WARMUP, part), min_lr_ratio=0.05),
            eval_fn=look,
            eval_every=max(1, steps // LOOKS),
            log_fn=tell_of,
        ).fit()
        history += [
            row | {"step": row["step"] + first * (rates == RATES)} for row in past
        ]
    spent = time.process_time() - began - looking.seconds
    curve = [
        {
            "step": row["step"],
            "seconds": round(row["eval_seconds"]),
            "blank_loss": round(row["eval_loss"], 4),
            "right": round(row["eval_right"], 4),
        }
        for row in history
        if "eval_loss" in row
    ]
    exact = nats_per_blank(trained, new)
    round_weights(model.eval())
    counts = {name: NeighborBaseline(rows, *sides) for name, sides in SIDES.items()}
    kinds = fill_told(trained, new, counts)
    total = sum(by["blanks"] for by in kinds.values())
    share = {
        name: round(sum(by[name] * by["blanks"] for by in kinds.values()) / total, 4)
        for name in ("model", *counts)
    }
    writes = []
    for name, order in (
        ("confident", "confidence"),
        ("random", "random"),
        ("left", "left"),
    ):
        for passes in PASSES:
            texts = generate_by_unmasking(trained, lengths, steps=passes, order=order)
            writes.append(
                {
                    "order": name,
                    "passes": passes,
                    "right": round(fraction_correct(texts), 4),
                    "flawless": round(fraction_correct(texts, per_story=True), 4),
                    "different": len(set(texts)),
                    "copied": round(fraction_copied(texts, read), 4),
                }
            )
    best = max(writes, key=lambda row: row["right"])
    loss = round(nats_per_blank(trained, new), 4)
    return trained._replace(
        card=dict(
            about="fills blanks in stories of level 1, and writes them",
            steps=steps,
            seconds=round(spent),
            read=len(read),
            samples=n,
            blank_loss_float32=round(exact, 4),
            blank_loss=loss,
            filled=share["model"],
            measured={
                "loss": f"{loss:.3f} nats per blank of 15 %",
                "blanks": f"{share['model']:.1%} of {total} that the story "
                "decides; counting neighbors at best "
                f"{max(p for n, p in share.items() if n != 'model'):.1%}",
                "writes": f"{best['right']:.1%} of the sentences right, "
                f"{best['passes']} passes, {best['order']}",
            },
            kinds=kinds,
            share=share,
            writes=writes,
            curve=curve,
        )
    )


@torch.no_grad()
def round_weights(model):
    "To what bfloat16 can hold; the type stays float32."
    for p in model.parameters():
        p.copy_(p.to(torch.bfloat16))


def train_one(name, steps):
    "One of the models with its card, in bfloat16."
    kinds = {
        "stories": train_stories,
        "translator": train_translator,
        "stories_mha": lambda steps: train_stories(steps, name),
        "bert": train_bert,
    }
    trained = (
        kinds[name](steps)
        if name in kinds
        else train_tour(steps, causal=name == "tour")
    )
    trained.model.to(torch.bfloat16)
    return trained._replace(
        card=dict(
            name=name,
            script="experiments/trained.py",
            seed=SEED,
            **trained.card,
            **about(),
        )
    )


def differences(card, kept):
    "What is not, within its band, what the kept card says."
    return [
        f"{card['name']}: {key} {card[key]}, was {kept[key]}"
        for key, band in BANDS.items()
        if key in kept and abs(card[key] - kept[key]) > band
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=STEPS, action="append")
    parser.add_argument("--steps", type=int, help="instead of each one's own")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; compare with the cards"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    found = []
    for name in args.only or STEPS:
        trained = train_one(name, args.steps or STEPS[name])
        if args.check:
            found += differences(trained.card, read_verified_card(args.out / name))
        else:
            save_bundle(trained, args.out / name)
            print(load_bundle(args.out / name), flush=True)
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
