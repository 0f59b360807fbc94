"""How far does counting come? Tables with back-off, against the tour's model.

    python experiments/counting.py           all guessers, five seeds, recorded
    python experiments/counting.py --letters 300 --seeds 1 --out some.csv

Each guesser by counts knows which letters followed each run of up to so many
letters in the stories of chapter 0, and mixes its guesses with those of shorter
runs as Witten and Bell do. The model is that of the tour, from its bundle. All
guess the same held-out stories: `nats_per_byte` is the mean loss on the bytes
that `mean_loss` asks for, `second_half` that on the second half of each window,
where the model has seen at least 64 bytes. The tables see as many letters as
they know, also where a window begins.

Then each writes so many letters in one piece with each seed, at temperature
0.7, as `generate` does: begun with the end of a line, every letter drawn from
p ** (1 / 0.7). The grammar that told the stories grades what was written:
`grade` and the shares of the six rules.

The rows go to tformer/records/counting.csv, which travels with the package.
Rows are written as they come; a run that was stopped goes on where it was.
"""

import math
import random
from collections import Counter, defaultdict
from functools import lru_cache

import torch
from torch.nn import functional as F

import common
from common import HELD_OUT, TRAIN
from tformer.bundle import load_bundle
from tformer.corpora import stories
from tformer.models.mini_gpt import decode_bytes, encode_bytes, generate

OUT = "counting.csv"
ORDERS = (3, 8, 12, 20)
LETTERS = 10_000
TEMPERATURE = 0.7
WINDOW = 129


def count(text, known):
    "Which letters follow each run of `known` letters, and how often."
    follows = defaultdict(Counter)
    for i in range(known, len(text)):
        follows[text[i - known : i]][text[i]] += 1
    return dict(follows)


@lru_cache(1)
def tables():
    "Counts after runs of 0, 1, 2 … letters."
    text = stories.story_corpus(TRAIN, seed=0, level=1)
    return [count(text, known) for known in range(max(ORDERS) + 1)]


@lru_cache(1)
def held_out():
    return stories.story_corpus(HELD_OUT, seed=1, level=1)


def followers(before, order):
    "What followed the ends of `before`, from the empty one to the longest known."
    for known, follows in enumerate(tables()[: min(order, len(before)) + 1]):
        seen = follows.get(before[len(before) - known :])
        if seen is None:
            return
        yield seen


def guess(before, letter, order):
    "The probability that `letter` comes after `before`."
    p = 1 / 256
    for seen in followers(before, order):
        p = (seen[letter] + len(seen) * p) / (seen.total() + len(seen))
    return p


def guesses(before, order):
    "The probability of every letter that was ever read, and it alone."
    p = dict.fromkeys(tables()[0][""], 1 / 256)
    for seen in followers(before, order):
        total = seen.total() + len(seen)
        p = {letter: (seen[letter] + len(seen) * q) / total for letter, q in p.items()}
    return p


def costs_by_counts(order):
    "The loss of each byte of the held-out stories but the first."
    text = held_out()
    return torch.tensor(
        [
            -math.log(guess(text[max(0, i - order) : i], text[i], order))
            for i in range(1, len(text))
        ]
    )


def in_windows(costs):
    "Rows of the costs of bytes 1 … 128 of each window."
    n = (len(costs) + 1) // WINDOW
    rows = torch.cat([torch.zeros(1), costs])[: n * WINDOW].view(n, WINDOW)
    return rows[:, 1:]


@torch.no_grad()
def costs_of_model(model):
    ids = encode_bytes(held_out())
    rows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")


def write(order, letters, seed):
    "So many letters from the tables, at the temperature of the tour."
    draw = random.Random(seed)
    text = "\n"
    for _ in range(letters):
        p = guesses(text[-order:], order)
        weights = [q ** (1 / TEMPERATURE) for q in p.values()]
        text += draw.choices([*p], weights)[0]
    return text


@lru_cache(1)
def costs_of(guesser):
    "The costs of all windows: of the model, or of the tables of an order."
    if guesser == "model":
        return costs_of_model(load_bundle("tour").model.eval())
    return in_windows(costs_by_counts(int(guesser)))


def measure(guesser, seed, letters):
    "The further columns of a row."
    if guesser == "model":
        model = load_bundle("tour").model.eval()
        ids = generate(model, encode_bytes("\n"), letters, TEMPERATURE, seed)
        written = decode_bytes(ids)
    else:
        written = write(int(guesser), letters, seed)
    costs = costs_of(guesser)
    grade = stories.grade_stories(written)
    return {
        "nats_per_byte": f"{costs.mean():.4f}",
        "second_half": f"{costs[:, WINDOW // 2 :].mean():.4f}",
        "grade": f"{grade.score:.3f}",
        **{rule: f"{getattr(grade, rule):.3f}" for rule in stories.GRADING_RULES},
        "flawless": str(grade.flawless),
        "stories": str(grade.stories),
    }


def main():
    parser = common.parser(__doc__, OUT, seeds=5)
    parser.add_argument("--letters", type=int, default=LETTERS)
    args = parser.parse_args()
    jobs = [
        {"guesser": str(guesser), "seed": str(seed), "letters": str(args.letters)}
        for guesser in (*ORDERS, "model")
        for seed in range(args.seeds)
    ]
    rows = common.kept(args.out, args.again, letters=args.letters)
    rows = [row for row in rows if {k: row[k] for k in jobs[0]} in jobs]
    for job in jobs:
        if any(job.items() <= row.items() for row in rows):
            continue
        row = job | measure(job["guesser"], int(job["seed"]), args.letters)
        print(*row.values(), flush=True)
        rows.append(row | common.about())
        common.write(rows, args.out)


if __name__ == "__main__":
    main()
