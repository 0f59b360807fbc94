"""How fast is a checkpoint written? python tests/bench/bench_checkpoints.py

A model and its AdamW, about 200 MB, are written by `write_checkpoint`, and in
turn as many bytes by one plain `write` of memory that is there already, both
forced onto the disk. The ratio of the two speeds is the median over rounds of
wall-clock time; the target is at least 0.5. Elsewhere processor time is
compared; here waiting for the disk is what counts.

--quick           2 MB, one round: that everything runs, not how fast
--folder PATH     where to write; a disk, no tmpfs
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

import timing
from tformer.base.runtime import get_rng_state
from tformer.models.llama import Llama, LlamaConfig
from tformer.training.checkpoints import write_checkpoint
from tformer.training.optimizers import AdamW

TARGET = 0.5


def trained(width, layers):
    "A model and its optimizer after one step."
    model = Llama(
        LlamaConfig(
            vocab_size=4096, d_model=width, n_heads=8, n_layers=layers, max_len=64
        )
    )
    optimizer = AdamW(model.parameters(), 1e-3)
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    optimizer.step()
    return model, optimizer


def plain(folder, data):
    "The same bytes, as plainly as can be."
    folder.mkdir()
    with open(folder / "bytes", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    timing.quick = args.quick
    torch.set_num_threads(1)
    model, optimizer = trained(*((32, 1) if args.quick else (512, 5)))
    state = {"optimizer": optimizer.state_dict(), "rng_state": get_rng_state()}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        ours = Path(name) / "ours"
        theirs = Path(name) / "plain"
        write_checkpoint(ours, model, state)
        size = sum(path.stat().st_size for path in ours.iterdir())
        data = memoryview(torch.rand(size // 4 + 1).numpy()).cast("B")[:size]
        times = {"ours": [], "plain": []}
        for i in range(1 if args.quick else 9):
            for which in ("ours", "plain")[:: 1 if i % 2 else -1]:
                shutil.rmtree(ours, ignore_errors=True)
                shutil.rmtree(theirs, ignore_errors=True)
                os.sync()
                began = time.perf_counter()
                if which == "ours":
                    write_checkpoint(ours, model, state)
                else:
                    plain(theirs, data)
                times[which].append(time.perf_counter() - began)
    ratio = median(times["plain"]) / median(times["ours"])
    speeds = [size / median(t) / 1e6 for t in times.values()]
    print(
        f"{size / 1e6:.0f} MB: a checkpoint {speeds[0]:.0f} MB/s, plain "
        f"{speeds[1]:.0f} MB/s, ratio {ratio:.2f} (target {TARGET})"
    )
    return 0 if args.quick or ratio >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
