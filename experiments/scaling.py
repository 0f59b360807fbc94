"""Loss against compute: seven models, each trained on twenty tokens a weight.

    python experiments/scaling.py            all runs, three seeds, recorded
    python experiments/scaling.py --sizes 12 --tokens 0.1 --seeds 1 --out x.csv

Small models of chapter 13 learn stories of level 2 as tokens (a vocabulary of
512). A model of N parameters reads T = 20 N tokens, nearly all of them new to
it, and N counts the embedding once, since it is the head as well. So compute
is 6 N T floating-point operations (attention's scores, under 2 % here, are
left out). The step size falls with the root of the width.

The rows go to tformer/records/scaling.csv, which travels with the package: one
for each size and seed, with the loss on held-out stories in nats per token and
per byte, and the CPU seconds. The chapter fits a line to the six smaller sizes
and asks it for the seventh. A run that was stopped goes on where it was.
"""

import math

import torch
from torch.nn import functional as F

from common import Stopwatch, about, kept, write
from common import parser as command_line
from tformer.corpora import stories
from tformer.models.llama import Llama, LlamaConfig
from tformer.models.mini_gpt import random_windows
from tformer.text.tokenizer import Tokenizer

WIDTHS = 12, 16, 24, 32, 40, 48, 64
VOCAB = 512
LAYERS = 2
HEADS = 2
LENGTH = 64
BATCH = 8
LEVEL = 2
PER_WEIGHT = 20
LR = 0.01
WARMUP = 0.1
FLOOR = 0.1
# characters
TRAIN = 7_000_000
HELD_OUT = 100_000


def make(width):
    "A small modern decoder whose head is its embedding."
    return Llama(
        LlamaConfig(
            vocab_size=VOCAB,
            d_model=width,
            n_layers=LAYERS,
            n_heads=HEADS,
            d_ff=4 * round(2 * width / 3),
            max_len=LENGTH,
            tie_word_embeddings=True,
        )
    )


def factor(step, steps):
    "Of the step size: up in a tenth of the steps, then half a cosine."
    part = max(0.0, (step / steps - WARMUP) / (1 - WARMUP))
    return min(
        step / (WARMUP * steps),
        FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * part)) / 2,
    )


def loss_of(model, window):
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def fit(model, ids, steps, seed, lr):
    "Train a model with this largest step size."
    optimizer = torch.optim.AdamW(
        model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    for step, window in zip(
        range(1, steps + 1), random_windows(ids, LENGTH, BATCH, seed), strict=False
    ):
        for group in optimizer.param_groups:
            group["lr"] = lr * factor(step, steps)
        loss = loss_of(model, window)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def evaluate(model, ids):
    rows = ids[: len(ids) // (LENGTH + 1) * (LENGTH + 1)]
    parts = rows.view(-1, LENGTH + 1).split(64)
    return sum(loss_of(model, p).item() * len(p) for p in parts) / sum(map(len, parts))


def texts(train):
    "Ids to learn from, ids held out, and bytes for each of these."
    text = stories.story_corpus(train, seed=0, level=LEVEL)
    held_out = stories.story_corpus(HELD_OUT, seed=1, level=LEVEL)
    tokenizer = Tokenizer.train([text[:400_000]], VOCAB)
    ids, held = (torch.tensor(tokenizer.encode(t)) for t in (text, held_out))
    return ids, held, len(held_out.encode()) / len(held)


def train(width, seed, share, data):
    "One line of the table."
    ids, held_out, bytes_a_token = data
    torch.manual_seed(seed)
    model = make(width)
    n = sum(p.numel() for p in model.parameters())
    steps = max(2, round(share * PER_WEIGHT * n / (BATCH * LENGTH)))
    tokens = steps * BATCH * LENGTH
    with Stopwatch() as watch:
        fit(model, ids, steps, seed, LR * (48 / width) ** 0.5)
    loss = evaluate(model, held_out)
    print(
        f"width {width}, seed {seed}: {loss:.4f} nats per token, {watch.seconds:.0f} s",
        flush=True,
    )
    return {
        "width": str(width),
        "seed": str(seed),
        "parameters": str(n),
        "tokens": str(tokens),
        "steps": str(steps),
        "flops": f"{6 * n * tokens:.4g}",
        "nats_per_token": f"{loss:.4f}",
        "nats_per_byte": f"{loss / bytes_a_token:.4f}",
        "seconds": f"{watch.seconds:.1f}",
        "share": f"{share:g}",
        **about(),
    }


def main():
    parser = command_line(__doc__, "scaling.csv")
    parser.add_argument("--sizes", type=int, nargs="+", default=WIDTHS)
    parser.add_argument(
        "--tokens",
        type=float,
        default=1.0,
        help="a share of the twenty tokens a weight",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = texts(round(TRAIN * min(1.0, args.tokens)))
    rows = kept(args.out, args.again, share=f"{args.tokens:g}")
    done = {(int(row["width"]), int(row["seed"])) for row in rows}
    for seed in range(args.seeds):
        for width in args.sizes:
            if (width, seed) not in done:
                rows.append(train(width, seed, args.tokens, data))
                rows.sort(key=lambda r: (int(r["width"]), int(r["seed"])))
                write(rows, args.out)


if __name__ == "__main__":
    main()
