"""What the recorded experiments share: rows that survive being stopped."""
import argparse
import csv
import datetime
import platform
from pathlib import Path

import torch

from tformer import expect

RECORDS = Path(__file__).parents[1] / "tformer" / "records"


def about():
    "The last columns of every row: where and when it was made."
    threads = torch.get_num_threads()
    return {"torch": torch.__version__, "python": platform.python_version(),
            "machine": f"{threads} thread{'s' * (threads > 1)}, "
                       f"{platform.machine()}",
            "date": datetime.date.today().isoformat()}


def read(out):
    "The rows that are there."
    if not out.exists():
        return []
    with out.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def write(rows, out):
    "All rows; never half a file."
    def put(path):
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    expect.write_files({out: put})


def arguments(doc, steps, out):
    "The command line of an experiment."
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--again", action="store_true",
                        help="train those too that the file has")
    parser.add_argument("--out", type=Path, default=RECORDS / out)
    return parser.parse_args()


def run(cases, train, args):
    """Train each case with each seed, and write the row after each.

    A case is a dict of columns; ``train(steps=…, seed=…, **case)``
    returns further columns. Rows that the file has are not made again.
    """
    rows = [] if args.again else [
        row for row in read(args.out) if row["steps"] == str(args.steps)]
    jobs = [case | {"seed": seed, "steps": args.steps}
            for case in cases for seed in range(args.seeds)]
    keys = [tuple(str(v) for v in job.values()) for job in jobs]

    def key(row):
        return tuple(row[name] for name in jobs[0])
    for job, wanted in zip(jobs, keys):
        if wanted not in map(key, rows):
            row = {k: str(v) for k, v in job.items()} | train(**job)
            print(*row.values(), flush=True)
            rows.append(row | about())
            rows = [r for k in keys for r in rows if key(r) == k]
            write(rows, args.out)
