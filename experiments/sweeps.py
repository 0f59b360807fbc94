"""Which step size is best, and does it depend on the width?

    python experiments/sweeps.py             all runs, three seeds, recorded
    python experiments/sweeps.py --steps 2 --seeds 1 --out some.csv

The models of `scaling.py` in three widths, trained for 400 steps with each of
seven step sizes, a factor of two apart, on the same tokens; warm-up, cosine
and clipping as there. The rows go to tformer/records/sweeps.csv, which travels
with the package: one for each width, step size and seed, with the loss on
held-out stories. A run that was stopped goes on where it was.
"""

import torch

from common import Stopwatch, about, kept, write
from common import parser as command_line
from scaling import TRAIN, evaluate, fit, make, texts

WIDTHS = (16, 32, 64)
STEPS = 400
RATES = 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128


def train(width, lr, seed, steps, data):
    "One line of the table."
    ids, held_out, _ = data
    torch.manual_seed(seed)
    model = make(width)
    with Stopwatch() as watch:
        fit(model, ids, steps, seed, lr)
    loss = evaluate(model, held_out)
    print(
        f"width {width}, lr {lr:g}, seed {seed}: {loss:.3f} nats per "
        f"token, {watch.seconds:.0f} s",
        flush=True,
    )
    return {
        "width": str(width),
        "lr": f"{lr:g}",
        "seed": str(seed),
        "nats_per_token": f"{loss:.4f}",
        "steps": str(steps),
        "seconds": f"{watch.seconds:.1f}",
        **about(),
    }


def place(row):
    return int(row["width"]), float(row["lr"]), int(row["seed"])


def main():
    parser = command_line(__doc__, "sweeps.csv")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--steps", type=int, default=STEPS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = texts(min(TRAIN, max(50_000, 2000 * args.steps)))
    rows = kept(args.out, args.again, steps=args.steps)
    done = {place(row) for row in rows}
    for seed in range(args.seeds):
        for width in args.widths:
            for lr in RATES:
                if (width, lr, seed) not in done:
                    rows.append(train(width, lr, seed, args.steps, data))
                    write(sorted(rows, key=place), args.out)


if __name__ == "__main__":
    main()
