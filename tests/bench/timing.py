"""Fair times: things that run in turn in one process, and their medians."""

import argparse
import ctypes
import resource
import time
from statistics import median

AT_MOST = -1
AT_LEAST = 1
quick = False  # small sizes, one round: that everything runs


def keep_memory():
    """Let glibc keep what is freed, instead of handing it back and forth.

    Otherwise a row pays for page faults, or does not, by chance.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    trim = -1
    top_pad = -2
    mmap = -3
    for which, size in ((trim, 2**31 - 1), (top_pad, 2**28), (mmap, 2**25)):
        mallopt(which, size)


def begin(told, **options):
    "What the command line says: --quick, and options of argparse by name."
    import torch

    global quick
    parser = argparse.ArgumentParser(description=told.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    for name, how in options.items():
        parser.add_argument(f"--{name}", **how)
    args = parser.parse_args()
    quick = args.quick
    torch.set_num_threads(1)
    keep_memory()
    return args


def cpu():
    "Processor seconds of this process, its threads and its children."
    return sum(
        sum(resource.getrusage(who)[:2])
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def once(function, clock=cpu):
    "Seconds of one call, and its result."
    start = clock()
    result = function()
    return clock() - start, result


def rounds_of(functions, rounds, clock=cpu):
    "Times of several functions, called in turn, every other round backwards."
    times = {name: [] for name in functions}
    for i in range(1 if quick else rounds):
        for name in list(functions)[:: 1 if i % 2 == 0 else -1]:
            times[name].append(once(functions[name], clock)[0])
    return times


def in_turn(functions, rounds, clock=cpu):
    "Medians of several functions that are called in turn."
    return {name: median(t) for name, t in rounds_of(functions, rounds, clock).items()}


def fastest(ways):
    "The name of the way that takes least processor time: two tries each."
    return min(
        ways, key=lambda k: min(once(ways[k])[0] for _ in range(1 if quick else 2))
    )


def repeated(function, seconds, clock=time.process_time):
    "The function called so often that it takes this long; how often."
    function()
    n = 1
    while not quick:
        took = once(lambda: [function() for _ in range(n)] and None, clock)[0]
        if took >= seconds:
            break
        n = max(n + 1, int(1.1 * n * seconds / max(took, seconds / 100)))

    def often():
        for _ in range(n):
            function()

    return often, n


def row(name, value, target, detail):
    met = (
        ""
        if quick or target is None
        else "met"
        if value * target[0] >= target[1] * target[0]
        else "NOT met"
    )
    goal = "" if target is None else f"{'>=' if target[0] > 0 else '<='} {target[1]:g}"
    print(f"{name:<48}{value:>7.2f} x  {goal:<10}{met:<9}{detail}", flush=True)


def head(title):
    print(f"\n{title}\n{'-' * len(title)}")
