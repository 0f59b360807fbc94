"""Processor time of a story on the command line, beyond that of import torch.

Every run is a process of its own. The two take turns, and the time is what the
system has counted for the process: in its own code and for it.
"""

import os
import subprocess
import sys
from statistics import median, quantiles

import timing
from timing import AT_MOST

BEYOND = 1.5  # seconds of one thread
ROUNDS = 7
COMMANDS = {
    "import torch": ["-c", "import torch"],
    "a story": ["-m", "tformer", "Once upon a time", "--seed", "1"],
    "--help": ["-m", "tformer", "--help"],
}


def processor_time(arguments, threads):
    "Seconds of the processor for one run of Python, user and system."
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return used.ru_utime + used.ru_stime


def measure(threads):
    "Seconds of each command, run in turn, the first round not counted."
    seconds = {name: [] for name in COMMANDS}
    for i in range(1 if timing.quick else ROUNDS + 1):
        for name, arguments in COMMANDS.items():
            took = processor_time(arguments, threads)
            if i or timing.quick:
                seconds[name].append(took)
    return seconds


def main():
    timing.begin(__doc__)
    for threads in (1, 2):
        timing.head(f"Processor seconds, OMP_NUM_THREADS={threads}")
        seconds = measure(threads)
        for name, took in seconds.items():
            low, _, high = quantiles(took, n=4) if len(took) > 1 else took * 3
            print(
                f"{name:<20}{median(took):6.2f} s, half of the runs from {low:.2f} "
                f"to {high:.2f}, all from {min(took):.2f} to {max(took):.2f}"
            )
        beyond = [
            a - b
            for a, b in zip(seconds["a story"], seconds["import torch"], strict=True)
        ]
        timing.row(
            "a story beyond import torch / 1.5 s",
            median(beyond) / BEYOND,
            (AT_MOST, 1) if threads == 1 else None,
            f"{median(beyond):.2f} s, from {min(beyond):.2f} to {max(beyond):.2f}",
        )


if __name__ == "__main__":
    main()
