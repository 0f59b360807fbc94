"""Blanks at several rates; and what an encoder trained on them is worth.

    python experiments/mlm.py                three seeds, twenty minutes
    python experiments/mlm.py --seeds 1 --steps 2 --out some.csv

`rate`: a small BERT is trained on stories with 15 %, with 40 % and with all
rates of blanks. `loss` is in nats per blank of 15 %, in new stories,
`filled` the share of right answers where earlier sentences decide (see
experiments/trained.py), `right` the share of right sentences in stories that it
writes in 16 passes.

`labels`: a tagger on top of the package's `bert` has to say of each name in a
story whether it is the hero's, the first to be named, or a friend's. Any name can
be both, so no word tells. The whole is tuned, or the head alone (frozen), or the
whole with an encoder that was never trained. `right` is the share of the names in
200 new stories that are tagged rightly, by number of stories with tags.
"""
import common
import torch
from trained import fill_told, nats_per_blank, optimizers, told

import tformer
from tformer.bert import BertConfig, BertMaskedLM, BertTagger
from tformer.layers import init_weights
from tformer.mlm import (
    SPECIAL, Blanks, Texts, encode_rows, encoded, label_loss, on_top, write)
from tformer.optim import AdamW, warmup_cosine
from tformer.tokenizer import Tokenizer
from tformer.train import Trainer
from tformer.trained import Trained, share_right
from tformer.wordpiece import tag_story

STEPS, TUNE_STEPS = 400, 90
SHAPE = dict(d_model=64, n_layers=2, n_heads=4, max_len=128, dropout=0.0)
READ, NEW, WRITTEN = 4000, 200, 60
RATES = {"15 %": (0.15,), "40 %": (0.4,), "all rates": (None,)}
LABELS = (4, 12, 36, 108, 324)      # stories with tags
METHODS = ("tuned", "frozen", "untrained")


def train_rate(variant, seed, steps):
    "A small BERT on stories, and what it can do."
    read, new = told(READ, seed=seed), told(NEW, seed=99)
    tokenizer = Tokenizer.train(told(READ, 0), 635, special_tokens=SPECIAL)
    torch.manual_seed(seed)
    model = BertMaskedLM(BertConfig(vocab_size=len(tokenizer), **SHAPE))
    init_weights(model, std=0.1)
    batches = Blanks(encode_rows(tokenizer, read), tokenizer, seed=seed,
                     rates=RATES[variant])
    Trainer(model, batches, steps=steps, loss=label_loss,
            optimizer=optimizers(model),
            schedule=warmup_cosine(steps, min(40, steps), floor=0.05)).fit()
    trained = Trained(model.eval(), tokenizer, {})
    lengths = [len(ids) for ids in tokenizer.encode_batch(new[:WRITTEN])]
    kinds = fill_told(trained, new, {})
    blanks = sum(by["blanks"] for by in kinds.values())
    texts = write(trained, lengths, steps=16, seed=seed)
    return {
        "loss": f"{nats_per_blank(trained, new):.3f}",
        "filled": format(sum(by["model"] * by["blanks"] for by in
                             kinds.values()) / blanks, ".3f"),
        "right": f"{share_right(texts):.3f}"}


def named(tokenizer, texts):
    "Rows, and labels at the names: 0 the hero's, 1 a friend's."
    labels = []
    for text in texts:
        words, spans = tag_story(text, tokenizer.vocab.pattern)
        marks = [-100] * (len(words) + 2)
        for span in spans:
            if span.kind in ("HERO", "FRIEND"):
                marks[span.start + 1] = int(span.kind == "FRIEND")
        labels.append(marks)
    return encode_rows(tokenizer, texts), labels


@torch.no_grad()
def share_named(model, tokenizer, rows, labels):
    "The share of the names that are tagged rightly."
    batch = encoded(rows, tokenizer, labels)
    guess = model(batch.ids, pos=batch.pos).argmax(-1)
    asked = batch.labels != -100
    return (guess == batch.labels)[asked].float().mean().item()


def tune(variant, seed, steps, labels):
    "A tagger that has seen so many stories with tags."
    bert, tokenizer, _ = tformer.load("bert")
    torch.manual_seed(seed)
    if variant == "untrained":
        init_weights(bert, std=0.1)
    model = on_top(BertTagger, bert, n_labels=2)
    if variant == "frozen":
        model.bert.requires_grad_(False)
    rows, marks = named(tokenizer, told(labels, 10 + seed))
    Trainer(model, Texts(rows, tokenizer, marks, batch=8, seed=seed),
            steps=steps, loss=label_loss,
            optimizer=AdamW([p for p in model.parameters()
                             if p.requires_grad],
                            lr=1e-2 if variant == "frozen" else 2e-3),
            schedule=warmup_cosine(steps, min(10, steps))).fit()
    return {"right": format(share_named(
        model.eval(), tokenizer, *named(tokenizer, told(NEW, 99))), ".3f")}


def train(part, variant, labels, seed, steps):
    "One row."
    row = dict.fromkeys(("loss", "filled", "right"), "")
    return row | (train_rate(variant, seed, steps) if part == "rate" else
                  tune(variant, seed, min(steps, TUNE_STEPS), labels))


CASES = [*(dict(part="rate", variant=name, labels=0)
           for name in RATES),
         *(dict(part="labels", variant=name, labels=n)
           for name in METHODS for n in LABELS)]


def main():
    common.run(CASES, train, common.arguments(__doc__, STEPS, "mlm.csv"))


if __name__ == "__main__":
    main()
