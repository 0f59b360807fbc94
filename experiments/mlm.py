"""Blanks at several rates; what an encoder trained on them is worth; writing.

    python experiments/mlm.py                three seeds, half an hour
    python experiments/mlm.py --seeds 1 --steps 2 --out some.csv

`rate`: a small BERT is trained on stories with 15 %, with 40 % and with all
rates of blanks. `loss` is in nats per token chosen by the rule at 15 %, in new
stories, `at_blanks` the same at [MASK] only, `filled` the share of right answers
where earlier sentences decide (see experiments/trained.py), `right` the share
of right sentences in stories that it writes in 16 passes.

`labels`: a tagger on top of the package's `bert` has to say of each name in a
story whether it is the hero's, the first to be named, or a friend's. Any name can
be both, so no word tells. The whole is tuned, or the head alone (frozen), or the
whole with an encoder that was never trained. `right` is the share of the names in
200 new stories that are tagged rightly, by number of stories with tags. It is
looked at 100 further stories every 90 steps; what counts is the model at the best
look, `best`, of `steps` at most: 90 where all is tuned, 900 for the controls,
which end after four looks without a better one.

`writes`: the package's `bert` writes 60 texts in 64 passes, in three orders and
at three temperatures. `right` and `flawless` are shares of sentences and of
texts, `distinct` is the share of different ones among all runs of four words.
"""

import copy

import torch

import common
import tformer
from tformer.bundle import ModelBundle, fraction_correct
from tformer.corpora.stories import tag_story
from tformer.models.bert import BertConfig, BertMaskedLM, BertTagger
from tformer.nn.layers import init_weights
from tformer.tasks.masked_lm import (
    BERT_SPECIAL_TOKENS,
    MaskedTextLoader,
    TextLoader,
    batch_cross_entropy,
    collate_texts,
    encode_texts,
    generate_by_unmasking,
    with_new_head,
)
from tformer.text.tokenizer import Tokenizer
from tformer.training.optimizers import AdamW
from tformer.training.schedules import warmup_cosine
from tformer.training.trainer import Trainer, train_step
from trained import fill_told, nats_per_blank, optimizers, told

STEPS = 900
RATE_STEPS = 400
SHAPE = dict(d_model=64, n_layers=2, n_heads=4, max_len=128, dropout=0.0)
READ = 4000
NEW = 200
WRITTEN = 60
RATES = {"15 %": (0.15,), "40 %": (0.4,), "all rates": (None,)}
LABELS = (4, 12, 36, 108, 324)  # stories with tags
METHODS = {"tuned": 90, "frozen": 900, "untrained": 900}  # steps at most
LOOK = 90
PATIENCE = 4
CHOSEN_ON = 100
ORDERS = {"confident": "confidence", "left": "left", "random": "random"}
TEMPERATURES = (1, 0.5, 0.3)
PASSES = 64
COLUMNS = ("best", "loss", "at_blanks", "filled", "right", "flawless", "distinct")


def train_rate(variant, seed, steps):
    "A small BERT on stories, and what it can do."
    read = told(READ, seed=seed)
    new = told(NEW, seed=99)
    tokenizer = Tokenizer.train(told(READ, 0), 635, special_tokens=BERT_SPECIAL_TOKENS)
    torch.manual_seed(seed)
    model = BertMaskedLM(BertConfig(vocab_size=len(tokenizer), **SHAPE))
    init_weights(model, std=0.1)
    batches = MaskedTextLoader(
        encode_texts(tokenizer, read),
        tokenizer,
        seed=seed,
        mlm_probabilities=RATES[variant],
    )
    Trainer(
        model,
        batches,
        max_steps=steps,
        loss_fn=batch_cross_entropy,
        optimizer=optimizers(model),
        lr_schedule=warmup_cosine(steps, min(40, steps), min_lr_ratio=0.05),
    ).fit()
    trained = ModelBundle(model.eval(), tokenizer, {})
    lengths = [len(ids) for ids in tokenizer.encode_batch(new[:WRITTEN])]
    kinds = fill_told(trained, new, {})
    blanks = sum(by["blanks"] for by in kinds.values())
    texts = generate_by_unmasking(trained, lengths, steps=16, seed=seed)
    return {
        "loss": f"{nats_per_blank(trained, new):.3f}",
        "at_blanks": f"{nats_at_blanks(trained, new):.3f}",
        "filled": format(
            sum(by["model"] * by["blanks"] for by in kinds.values()) / blanks, ".3f"
        ),
        "right": f"{fraction_correct(texts):.3f}",
    }


@torch.no_grad()
def nats_at_blanks(trained, texts):
    "The loss where [MASK] stands, of the tokens that the rule chose."
    batch = MaskedTextLoader(
        encode_texts(trained.tokenizer, texts), trained.tokenizer, batch_size=len(texts)
    ).get_batch(0)
    mask = trained.tokenizer.token_to_id("[MASK]")
    return batch_cross_entropy(
        trained.model,
        batch._replace(targets=batch.targets.where(batch.ids == mask, -100)),
    ).item()


def named(tokenizer, texts):
    "Rows, and labels at the names: 0 the hero's, 1 a friend's."
    labels = []
    for text in texts:
        words, spans = tag_story(text, tokenizer.vocab.pattern)
        marks = [-100] * (len(words) + 2)
        for span in spans:
            if span.label in ("HERO", "FRIEND"):
                marks[span.start + 1] = int(span.label == "FRIEND")
        labels.append(marks)
    return encode_texts(tokenizer, texts), labels


@torch.no_grad()
def share_named(model, tokenizer, rows, labels):
    "The share of the names that are tagged rightly."
    batch = collate_texts(rows, tokenizer, labels)
    guess = model(batch.ids, positions=batch.positions).argmax(-1)
    asked = batch.targets != -100
    return (guess == batch.targets)[asked].float().mean().item()


class Head(torch.nn.Module):
    "The head of a tagger on vectors that do not change, made once."

    def __init__(self, tagger):
        super().__init__()
        self.tagger = tagger
        self.known = {}

    def forward(self, ids, **how):
        key = ids.numpy().tobytes()
        if key not in self.known:
            with torch.no_grad():
                self.known[key] = self.tagger.bert(ids, **how)
        return self.tagger.classifier(self.known[key])


def tune(variant, seed, steps, labels):
    "A tagger that has seen so many stories with tags."
    bert, tokenizer, _ = tformer.load("bert")
    torch.manual_seed(seed)
    if variant == "untrained":
        init_weights(bert, std=0.1)
    model = with_new_head(BertTagger, bert, n_labels=2)
    if variant == "frozen":
        model.bert.requires_grad_(False)
    rows, marks = named(tokenizer, told(labels, 10 + seed))
    batches = TextLoader(rows, tokenizer, marks, batch_size=8, seed=seed)
    quiz, new = (named(tokenizer, told(n, s)) for n, s in ((CHOSEN_ON, 98), (NEW, 99)))
    optimizer = AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=1e-2 if variant == "frozen" else 2e-3,
    )
    schedule = warmup_cosine(steps, min(10, steps))
    run = Head(model) if variant == "frozen" else model
    best = (-1.0, 0, None)
    for step, batch in zip(range(1, steps + 1), batches, strict=False):
        train_step(
            run,
            [optimizer],
            [batch],
            step,
            loss_fn=batch_cross_entropy,
            lr_schedule=schedule,
            max_grad_norm=1.0,
        )
        if step % LOOK == 0 or step == steps:
            found = share_named(model.eval(), tokenizer, *quiz)
            model.train()
            if found > best[0]:
                best = found, step, copy.deepcopy(model.state_dict())
            if step - best[1] >= PATIENCE * LOOK:
                break
    model.load_state_dict(best[2])
    return {
        "best": best[1],
        "right": format(share_named(model.eval(), tokenizer, *new), ".3f"),
    }


def distinct(texts, n=4):
    "The share of different ones among all runs of n words."
    runs = [
        tuple(words[i : i + n])
        for words in map(str.split, texts)
        for i in range(len(words) - n + 1)
    ]
    return len({*runs}) / max(1, len(runs))


def written(variant, seed, steps):
    "How good, and how different, what the package's bert writes is."
    order, temperature = variant.split(" at ")
    trained = tformer.load("bert")
    lengths = [len(ids) for ids in trained.tokenizer.encode_batch(told(WRITTEN, 1))]
    texts = generate_by_unmasking(
        trained,
        lengths,
        steps=steps,
        order=ORDERS[order],
        temperature=float(temperature),
        seed=seed,
    )
    return {
        "right": f"{fraction_correct(texts):.3f}",
        "flawless": f"{fraction_correct(texts, per_story=True):.3f}",
        "distinct": f"{distinct(texts):.3f}",
    }


def train(part, variant, labels, seed, steps):
    "One row."
    return dict.fromkeys(COLUMNS, "") | (
        train_rate(variant, seed, steps)
        if part == "rate"
        else tune(variant, seed, steps, labels)
        if part == "labels"
        else written(variant, seed, steps)
    )


CASES = [
    *(dict(part="rate", variant=name, labels=0, steps=RATE_STEPS) for name in RATES),
    *(
        dict(part="labels", variant=name, labels=n, steps=most)
        for name, most in METHODS.items()
        for n in LABELS
    ),
    *(
        dict(part="writes", variant=f"{order} at {temperature}", labels=0, steps=PASSES)
        for order in ORDERS
        for temperature in TEMPERATURES
    ),
]


def main():
    common.run(CASES, train, common.arguments(__doc__, STEPS, "mlm.csv"))


if __name__ == "__main__":
    main()
