"""Run a command as another processor would compute it.

    python tests/processors.py                                which switch changes what
    python tests/processors.py run COMMAND …                  COMMAND under a switch
    python tests/processors.py run --switch "MKL_CBWR=AVX2" COMMAND …

PyTorch and the libraries below it choose their code by the processor that they find:
with AVX-512 instructions, with AVX2, or without. The same sum is then added in another
order and rounded otherwise. A switch is a set of environment variables that makes them
choose as they would elsewhere, so that one machine can show what others will see.

A switch that changes no number here would test nothing. So a few products, sums and
softmaxes are hashed with and without it; `run` takes the first of `SWITCHES` that
changes something and is not what the machine does anyway, and refuses a switch that
changes nothing.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile

# The ones that change most come first. Where PyTorch does without AVX-512, oneDNN has
# to as well: PyTorch asks oneDNN whether half-precision attention may pack its keys for
# AVX-512, and has no code for that without it.
SWITCHES = [
    "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41",
    "MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=2",
    "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2",
    "MKL_CBWR=COMPATIBLE",
    "MKL_CBWR=AVX2",
    "ONEDNN_MAX_CPU_ISA=SSE41",
    "OMP_NUM_THREADS=2",
    "OMP_NUM_THREADS=4",
    "ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=AVX2",
    "ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 "
    "OMP_NUM_THREADS=2",
]
VARIABLES = sorted(
    {pair.split("=")[0] for switch in SWITCHES for pair in switch.split()}
)
HASHES = """
import hashlib, torch
from torch.nn import functional as F
values = (1 / torch.arange(1, 100_001)) * torch.tensor([3, -1]).repeat(50_000)
a, b = values[:18_432].view(2, 96, 96) * 99
x = values[:8_192].view(2, 4, 32, 32) * 99
results = {
    "product": a @ b, "batched product": x @ x.mT,
    "float64 product": a.double() @ b.double(),
    "sum": values.sum(), "softmax": a.softmax(-1), "exp": values.exp(),
    "GELU": F.gelu(a), "LayerNorm": F.layer_norm(a, (96,)),
    "convolution": F.conv1d(x[0], a[:8].view(8, 32, 3)),
    "attention": F.scaled_dot_product_attention(x, x, x, is_causal=True)}
for name, value in results.items():
    print(f"{name}={hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()}")
"""


def variables(switch):
    "Return the environment variables of a switch as a dict."
    pairs = [pair.partition("=") for pair in switch.split()]
    for name, equals, value in pairs:
        if not (equals and value and name in VARIABLES):
            sys.exit(
                f"a switch is VARIABLE=value, for one or several of "
                f"{', '.join(VARIABLES)}; got {name + equals + value!r}"
            )
    return {name: value for name, _, value in pairs}


def hashes(switch=""):
    """Return the hash of each result, as computed under a switch.

    A result that two processes compute differently tells nothing and is left out.
    """
    first, second = (_hash_once(switch) for _ in range(2))
    return {name: value for name, value in first.items() if second[name] == value}


def _hash_once(switch):
    done = subprocess.run(
        [sys.executable, "-c", HASHES],
        text=True,
        check=True,
        stdout=subprocess.PIPE,
        env=os.environ | variables(switch),
    )
    return dict(line.split("=") for line in done.stdout.splitlines())


def changed(switch, own):
    "Return the names of the results that a switch changes on this machine."
    return [
        name for name, value in hashes(switch).items() if value != own.get(name, value)
    ]


def choose(switch=None):
    """Return a switch that changes something here, and what it changes.

    Without an argument it is the first of `SWITCHES`. SystemExit if there is none.
    """
    candidates = [switch] if switch else SWITCHES
    for candidate in candidates:
        variables(candidate)  # refuse a bad one before anything runs
    own = hashes()
    for candidate in candidates:
        if names := changed(candidate, own):
            return candidate, names
    sys.exit(
        f"{switch or 'no switch'} changes none of {', '.join(own)} on this "
        "machine, so a run under it would test nothing"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="action")
    run = commands.add_parser("run", help="run a command under a switch")
    run.add_argument(
        "--switch",
        help="environment variables; default: the first of "
        "the list that changes something",
    )
    run.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if args.action is None:
        own = hashes()
        for switch in SWITCHES:
            print(f"{switch}\n    {', '.join(changed(switch, own)) or 'nothing'}")
        return
    switch, names = choose(args.switch)
    print(f"{switch} changes {', '.join(names)}:", shlex.join(args.command), flush=True)
    env = os.environ | variables(switch)
    # pytest starts as many processes as leave a core for each of their threads
    threads = int(env.get("OMP_NUM_THREADS", 1))
    env.setdefault(
        "PYTEST_XDIST_AUTO_NUM_WORKERS", str(max(1, (os.cpu_count() or 1) // threads))
    )
    with tempfile.TemporaryDirectory() as cache:
        # what was compiled for the machine's own processor is found again under a
        # switch, and computes other numbers there
        env["TORCHINDUCTOR_CACHE_DIR"] = cache
        done = subprocess.run(args.command, env=env, check=False)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
