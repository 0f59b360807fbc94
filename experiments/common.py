"""What the recorded experiments share: who ran it, rows kept, files whole.

A record is a CSV in tformer/records/, which travels with the package. A script
writes it after every row, and the next run goes on after the rows it finds.
"""

import argparse
import copy
import csv
import datetime
import platform
import time
from collections import deque
from pathlib import Path

import torch

RECORDS = Path(__file__).parents[1] / "tformer" / "records"
# characters of the tour's stories
TRAIN = 300_000
HELD_OUT = 30_000
BATCH = 8  # windows in a step of the tour
# its model
VOCAB = 256
D_MODEL = 96
N_LAYERS = 2
N_HEADS = 4
MAX_LEN = 128


def about():
    "The last columns of every row: versions, machine and date."
    threads = torch.get_num_threads()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{threads} thread{'s' * (threads > 1)}, {platform.machine()}",
        "date": datetime.date.today().isoformat(),
    }


def processor():
    "The name that the system gives the processor."
    path = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (path.read_text("utf-8").splitlines() if path.exists() else [])
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()


def speed_arguments(doc, *, longest, out):
    """What a script that measures speed is asked for on its command line.

    It runs on one thread from then on.
    """
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--longest", type=int, default=longest)
    parser.add_argument("--out", type=Path, default=out)
    torch.set_num_threads(1)
    return parser.parse_args()


def read(out):
    "The rows of a record, as text; none where there is no file."
    if not out.exists():
        return []
    with out.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def kept(out, again=False, **same):
    "The rows that an earlier run has left and whose columns are `same`."
    return (
        []
        if again
        else [
            row
            for row in read(out)
            if all(row.get(key) == str(value) for key, value in same.items())
        ]
    )


def write(rows, out):
    "All rows so far; the file before stays whole until this one is."
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_suffix(".part")
    with beside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    beside.replace(out)


def sort_by(rows, order, name="variant"):
    "Rows in the order of their variants, and of the seeds in each."
    order = list(order)
    return sorted(rows, key=lambda r: (order.index(r[name]), int(r["seed"])))


def parser(doc, out, seeds=3):
    "What the command lines of experiments share; a script adds its own."
    made = argparse.ArgumentParser(description=doc.split("\n")[0])
    if seeds is not None:  # None: there is one run of each
        made.add_argument("--seeds", type=int, default=seeds)
    made.add_argument(
        "--again", action="store_true", help="train those too that the file has"
    )
    made.add_argument("--out", type=Path, default=RECORDS / out)
    return made


def skip_without(path, what):
    """End without an error where no path is given, and say what is missing.

    `make records` runs all scripts, also those that need a file of somebody else.
    """
    if path is None:
        print(f"skipped: it needs {what}, whose path is its argument")
        raise SystemExit


def arguments(doc, steps, out, seeds=3):
    "The command line of an experiment of so many steps."
    made = parser(doc, out, seeds)
    made.add_argument("--steps", type=int, default=steps)
    return made.parse_args()


def run(cases, train, args):
    """Train each case with each seed, and write the row after each.

    A case is a dict of columns; ``train(steps=…, seed=…, **case)``
    returns further columns. A case with ``steps`` of its own takes no more
    than these. Rows that the file has are not made again.
    """
    rows = kept(args.out, args.again)
    jobs = [
        {key: x for key, x in case.items() if key != "steps"}
        | {"seed": seed, "steps": min(args.steps, case.get("steps", args.steps))}
        for case in cases
        for seed in range(args.seeds)
    ]
    keys = [tuple(str(v) for v in job.values()) for job in jobs]

    def key(row):
        return tuple(row[name] for name in jobs[0])

    for job, wanted in zip(jobs, keys, strict=True):
        if wanted not in map(key, rows):
            row = {k: str(v) for k, v in job.items()} | train(**job)
            print(*row.values(), flush=True)
            rows.append(row | about())
            rows = [r for k in keys for r in rows if key(r) == k]
            write(rows, args.out)


class Stopwatch:
    "CPU seconds of this process while it runs: `with watch: …` adds them."

    seconds = 0.0

    def __enter__(self):
        self.began = time.process_time()
        return self

    def __exit__(self, *problem):
        self.seconds += time.process_time() - self.began


class Kept:
    "The last n models that a training has shown; ``looking`` took so long."

    def __init__(self, n):
        self.models = deque(maxlen=n)
        self.looking = Stopwatch()

    def __call__(self, model):
        with self.looking:
            self.models.append(copy.deepcopy(model))
            return 0.0
