"""A small Llama on a sample of TinyStories, and on as much of our own stories.

    python experiments/tinystories.py path/to/sample.txt     in five minutes
    python experiments/tinystories.py some.txt --steps 2 --out some.csv

The sample is a text file of TinyStories (Eldan and Li, 2023), in which
<|endoftext|> stands between two stories; nothing of it is kept. Its last story
is left out, because it may be cut off. The grammar of the course tells stories
of level 1 until they have as many bytes. Each corpus is split by document, 5 %
held out; a byte-pair tokenizer of at most 2,000 ids is trained on the rest, and
the stories are packed into rows of 256 tokens, 8 rows a step. The model, the
number of its steps and of the tokens in each are the same for both.

Losses in nats per token depend on the tokenizer. So the loss on the held-out
stories is divided by their bytes as well, where the end of a story counts as a
byte: bits per byte can be compared. There is one run for each corpus.

The rows go to tformer/records/tinystories.csv: one for each corpus and moment
(`row` is "look"), and one for each corpus that says what it is ("summary").
`train_nats` is the mean over the steps since the last look. Without a path the
script says so and ends.
"""

import math
import time
import warnings
from pathlib import Path

import torch

import common
from tformer.corpora import stories
from tformer.corpora.documents import load_documents
from tformer.models.llama import Llama, LlamaConfig
from tformer.text.tokenizer import Tokenizer
from tformer.training.data import PackedLoader, PaddedLoader, split_documents
from tformer.training.optimizers import AdamW
from tformer.training.schedules import warmup_cosine
from tformer.training.trainer import Trainer, next_token_loss

END = "<|endoftext|>"
CORPORA = ("tinystories", "grammar")
STEPS = 500
LOOKS = 10
HELD_OUT = 0.05
VOCAB = 2000
LENGTH = 256
BATCH = 8
LR = 4e-3
WARMUP = 30
SHAPE = dict(
    d_model=128,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    max_len=LENGTH,
    tie_word_embeddings=True,
)
SEED = 0


def sample(path):
    "The stories of a file, without the last."
    texts = [text.strip() for text in load_documents(path, separator=END)][:-1]
    if len(texts) < 2:
        raise SystemExit(
            f"{path}: expected stories with {END} between them, found "
            f"{len(texts)} before the last"
        )
    return texts


def grammar(num_bytes):
    "Stories of the course, as many as have so many bytes."
    texts = []
    for text in stories.generate_stories(None, SEED, level=1):
        if num_bytes <= 0:
            return texts
        texts.append(text.strip())
        num_bytes -= len(texts[-1].encode())


def rows_of(tokenizer, texts):
    "Each text as ids, between two ids of the end."
    end = tokenizer.token_to_id(END)
    return [[end, *ids, end] for ids in tokenizer.encode_batch(texts)]


def pieces_of(rows):
    "Rows cut so that a model can read them; each id is a target once."
    return [
        row[i : i + LENGTH + 1] for row in rows for i in range(0, len(row) - 1, LENGTH)
    ]


@torch.no_grad()
def held_out_nats(model, pieces):
    "The sum of the losses on all pieces, and how many tokens they are."
    batches = PaddedLoader(pieces, batch_size=16)
    total = count = 0
    for k in range(len(batches.groups)):
        batch = batches.get_batch(k)
        total += next_token_loss(model, batch).item() * batch.num_targets
        count += batch.num_targets
    return total, count


def train(name, texts, steps):
    "The rows of one corpus."
    read, held_out = split_documents(texts, HELD_OUT, SEED)
    with warnings.catch_warnings(action="ignore"):  # no pair may be left
        tokenizer = Tokenizer.train(read, VOCAB, special_tokens=[END])
    rows = rows_of(tokenizer, read)
    pieces = pieces_of(rows_of(tokenizer, held_out))
    num_bytes = sum(len(text.encode()) + 1 for text in held_out)
    torch.manual_seed(SEED)
    model = Llama(LlamaConfig(vocab_size=VOCAB, **SHAPE))
    looking = common.Stopwatch()

    def look(model):
        with looking:
            total, count = held_out_nats(model, pieces)
        return {"nats": total / count, "bits": total / math.log(2) / num_bytes}

    began = time.process_time()
    history = Trainer(
        model,
        PackedLoader(rows, LENGTH, BATCH, SEED),
        max_steps=steps,
        optimizer=AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1),
        lr_schedule=warmup_cosine(steps, min(WARMUP, steps), min_lr_ratio=0.05),
        eval_fn=look,
        eval_every=max(1, steps // LOOKS),
    ).fit()
    spent = time.process_time() - began - looking.seconds
    ids = sum(len(row) - 1 for row in rows)
    told = sum(len(text.encode()) + 1 for text in read)
    summary = row_of(
        name,
        steps,
        row="summary",
        documents=len(texts),
        held_out=len(held_out),
        bytes=sum(len(text.encode()) for text in texts),
        vocabulary=len(tokenizer),
        tokens=ids,
        bytes_per_token=f"{told / ids:.3f}",
        tokens_a_step=LENGTH * BATCH,
        parameters=sum(p.numel() for p in model.parameters()),
        seconds=round(spent),
    )
    return [*looks(name, steps, history), summary]


def looks(name, steps, history):
    "A row for each look, with the mean training loss since the one before."
    since = []
    rows = []
    for row in history:
        if row["step"]:
            since.append(row["loss"])
        if "eval_bits" in row:
            mean = f"{sum(since) / len(since):.4f}" if since else ""
            rows.append(
                row_of(
                    name,
                    steps,
                    row="look",
                    step=row["step"],
                    train_nats=mean,
                    held_out_nats=f"{row['eval_nats']:.4f}",
                    bits_per_byte=f"{row['eval_bits']:.4f}",
                )
            )
            since = []
    return rows


COLUMNS = (
    "step",
    "train_nats",
    "held_out_nats",
    "bits_per_byte",
    "documents",
    "held_out",
    "bytes",
    "vocabulary",
    "tokens",
    "bytes_per_token",
    "tokens_a_step",
    "parameters",
    "seconds",
)


def row_of(name, steps, row, **known):
    "A row of the record; what is not known stays empty."
    return {
        "corpus": name,
        "row": row,
        "seed": str(SEED),
        "steps": str(steps),
        **{key: str(known.get(key, "")) for key in COLUMNS},
        **common.about(),
    }


def main():
    made = common.parser(__doc__, "tinystories.csv", seeds=None)
    made.add_argument("sample", type=Path, nargs="?")
    made.add_argument("--steps", type=int, default=STEPS)
    args = made.parse_args()
    common.skip_without(args.sample, "a text file of TinyStories")
    torch.set_num_threads(1)
    rows = common.kept(args.out, args.again, steps=args.steps)
    real = sample(args.sample)
    size = sum(len(text.encode()) for text in real)
    for name in CORPORA:
        if not any(row["corpus"] == name for row in rows):
            texts = real if name == "tinystories" else grammar(size)
            rows += train(name, texts, args.steps)
            print(
                name,
                rows[-2]["bits_per_byte"],
                "bits per byte,",
                rows[-1]["seconds"],
                "s",
                flush=True,
            )
            common.write(rows, args.out)


if __name__ == "__main__":
    main()
