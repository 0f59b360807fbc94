"""Let nbval check the notebooks as nbdev keeps them, and time them."""

import datetime
import functools
import gc
import json
import os
import platform
import re
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT / "book" / "_ext"), str(ROOT / "tests")]

import pytest  # noqa: E402

import kernels  # noqa: E402
from course import document_name  # noqa: E402

# seconds of one notebook on a quiet machine, and of all notebooks together
NOTEBOOK_BUDGET = 90
TOTAL_BUDGET = 900
# how many times as long a processor without AVX-512 may take
SLOWER = 3
# seconds of each test file and notebook in the tiers "test" and "nightly"
SECONDS = ROOT / "tests" / "seconds.json"
USUAL = 15  # seconds of a file that is not on record
NO_TIME = "there was no time left to begin them"

EVAL_FALSE = re.compile(r"^\s*#\s*\|\s*eval\s*:\s*false\s*$", re.M | re.I)
# a line of a cell, as JSON has it
TORCH_IN_A_CELL = re.compile(r'^\s*"\s*(import|from) torch\b', re.M)
SVG = re.compile(r"<svg\b.*?</svg>", re.S)
LOOKS = re.compile(r"<(style|script)\b.*?</\1>", re.S)
KEPT = re.compile(r"<(title|desc)\b[^>]*>(.*?)</\1>", re.S)

# environment variables by which PyTorch and its libraries choose other code than
# that of the machine's processor (tests/processors.py)
SWITCHES = ["ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "OMP_NUM_THREADS"]
# with this, torch.compile writes C++ that PyTorch's own header files refuse, so
# cells that are tagged "compiles" are left out
NO_COMPILER = os.environ.get("ATEN_CPU_CAPABILITY") == "default"

try:
    from jupyter_client.provisioning import local_provisioner
    from nbval.kernel import RunningKernel
    from nbval.plugin import IPyNbCell
except ImportError:
    RunningKernel = IPyNbCell = None


def reduce_svg(text):
    "Every drawing of `text` as its title and description, without looks."

    def kept(m):
        found = " | ".join(v.strip() for _, v in KEPT.findall(m[0]))
        return f"<svg>{found}</svg>"

    return SVG.sub(kept, LOOKS.sub("", text))


def _execute(self, source, allow_stdin=None):
    # nbval sends store_history=False, and IPython then cannot see a
    # closing «;»
    return self.kc.execute(
        source, store_history=True, allow_stdin=allow_stdin, stop_on_error=False
    )


def _launch(command, **kwargs):
    "Start a kernel: from the kernel server, where there is one."
    if kernels.ADDRESS in os.environ:
        return kernels.launch(command, **kwargs)
    return _launch_kernel(command, **kwargs)


if RunningKernel is not None:
    _launch_kernel = local_provisioner.launch_kernel
    local_provisioner.launch_kernel = _launch
    RunningKernel.execute_cell_input = _execute
    if not hasattr(IPyNbCell, "sanitize_text"):  # tests load this file once more
        IPyNbCell.sanitize_text = IPyNbCell.sanitize

    def sanitize(self, s):
        return self.sanitize_text(reduce_svg(s) if isinstance(s, str) else s)

    IPyNbCell.sanitize = sanitize


def pytest_addoption(parser):
    parser.addoption(
        "--record",
        metavar="FILE",
        help="write what each "
        "notebook did (passed, seconds, versions) as JSON, and on a GPU "
        "how many tests marked gpu passed; what is on record of the same "
        "machine and day, and was not run, is kept",
    )
    parser.addoption(
        "--seconds",
        metavar="FILE",
        help="write the seconds "
        "that each file took, by tier, as JSON; files and tiers "
        "that were not run keep what is on record",
    )
    parser.addoption(
        "--until",
        metavar="TIME",
        type=float,
        help="begin no test after this time, in seconds since 1970; those left are "
        "skipped, and their number is said",
    )


@pytest.hookimpl(tryfirst=True)  # before a kernel or a fixture is started
def pytest_runtest_setup(item):
    "From the time that ``--until`` names, begin no further test."
    until = item.config.getoption("--until")
    if until is not None and time.time() >= until:
        pytest.skip(NO_TIME)


def known_as(path):
    "A notebook's document name; of another file its name."
    if path.suffix == ".ipynb" and path.is_relative_to(ROOT / "nbs"):
        return document_name(ROOT, path)
    return path.stem


def read_seconds(path=SECONDS):
    """Return the record of seconds; an empty one where there is no file.

    ``machines`` is {tier: the processor on which it was timed}, and ``files`` is
    {path of a file: {tier: seconds}}.
    """
    if not path.exists():
        return {"machines": {}, "files": {}}
    return json.loads(path.read_text(encoding="utf-8"))


def longest_first(items, tiers=("test", "nightly"), record=SECONDS):
    """Sort items by the recorded seconds of their files in the tiers that run.

    A file stays together. The last files to begin should be short: with two
    processes, one may have nothing left to do while the other is at work on
    the last file.
    """
    seconds = {
        name: sum(took.get(tier, 0) for tier in tiers)
        for name, took in read_seconds(record)["files"].items()
    }
    items.sort(key=lambda item: -seconds.get(path_of(item.nodeid), USUAL))


def path_of(nodeid):
    "Return the path of the file in which a test stands."
    return nodeid.split("::")[0]


def tiers_run(expression):
    "Return the tiers that the option -m lets through."
    return {"nightly": ["nightly"], "not nightly": ["test"]}.get(
        expression, ["test", "nightly"]
    )


@pytest.hookimpl(tryfirst=True)  # before -m chooses by markers
def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):  # in an xdist worker
        longest_first(items, tiers_run(config.option.markexpr))
    for item in items:
        cell = getattr(item, "cell", None)  # nbval's IPyNbCell
        if cell is None:
            continue
        if imports_torch(item.path):
            item.add_marker("processor")
        if cell.get("cell_type") != "code":
            continue
        if NO_COMPILER and "compiles" in cell.metadata.get("tags", ()):
            item.options["skip"] = True
        if cell.execution_count is None:
            # nbdev_clean blanks it, and nbval reads that as «never run»
            cell.execution_count = 0
        if EVAL_FALSE.search(cell.source):
            item.options["skip"] = True


@functools.cache
def imports_torch(path):
    "Whether a notebook computes with floats, which processors round differently."
    return TORCH_IN_A_CELL.search(path.read_text(encoding="utf-8")) is not None


def pytest_collection_finish():
    # what is imported by now stays: to collect garbage, among a million
    # objects, need not look at it each time
    gc.freeze()


class Clock:
    """Adds up the seconds of each file by tier, and what each notebook did.

    ``files`` is {path of a file: {tier: seconds}}; ``gpu_tests`` is {test marked
    gpu: "passed", "failed" or "skipped"}.
    """

    def __init__(self):
        self.books = defaultdict(lambda: {"passed": True, "cells": 0, "seconds": 0.0})
        self.files = defaultdict(lambda: defaultdict(float))
        self.gpu_tests = {}

    def pytest_runtest_logreport(self, report):
        path = path_of(report.nodeid)
        tier = "nightly" if "nightly" in report.keywords else "test"
        self.files[path][tier] += report.duration
        if "gpu" in report.keywords and (
            report.when == "call" or report.outcome != "passed"
        ):
            self.gpu_tests[report.nodeid] = report.outcome
        if not path.endswith(".ipynb"):
            return
        book = self.books[known_as(ROOT / path)]
        book["seconds"] += report.duration
        book["cells"] += report.when == "call"
        book["passed"] &= not report.failed

    def over_budget(self, total=TOTAL_BUDGET):
        "What to say when the notebooks took too long together, else None."
        took = sum(b["seconds"] for b in self.books.values())
        if took > total:
            return (
                f"the notebooks took {took:.0f} s together; their budget is {total} s"
            )

    def as_record(self, before=None):
        """Return what a record says of this run.

        On a GPU it says how the tests that need one ended, too. What this run did
        not do is taken from the record ``before``, if that is of the same machine
        and day.
        """
        record = {"date": datetime.date.today().isoformat(), **describe_machine()}
        if before and record == {name: before.get(name) for name in record}:
            record = before
        if self.books:
            record["notebooks"] = {
                k: {**b, "seconds": round(b["seconds"], 1)}
                for k, b in sorted(self.books.items())
            }
        if self.gpu_tests and record["device"] != "CPU":
            outcomes = [*self.gpu_tests.values()]
            record["gpu_tests"] = {
                outcome: outcomes.count(outcome)
                for outcome in ("passed", "failed", "skipped")
            }
        return record

    def merged(self, record, machine):
        """Return a record of seconds with those of this run put in.

        ``machine`` is the processor of this run. What is on record of the same tiers
        from another processor is dropped, and so are files that no longer exist.
        """
        tiers = {tier for took in self.files.values() for tier in took}
        old = {tier for tier in tiers if record["machines"].get(tier) != machine}
        files = {}
        for name in sorted({*record["files"], *self.files}):
            took = record["files"].get(name, {})
            took = {tier: n for tier, n in took.items() if tier not in old}
            took |= {tier: round(n, 1) for tier, n in self.files.get(name, {}).items()}
            if took and (ROOT / name).exists():
                files[name] = dict(sorted(took.items()))
        machines = record["machines"] | dict.fromkeys(tiers, machine)
        return {"machines": dict(sorted(machines.items())), "files": files}


def describe_processor():
    """Return the processor's name, and how PyTorch computes on it.

    The second says which vector instructions PyTorch uses, and which variables tell
    it or its libraries to use others.
    """
    import torch

    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M)
        name = found[1] if found else name
    set_here = [f"{v}={os.environ[v]}" for v in SWITCHES if v in os.environ]
    return name, ", ".join([torch.backends.cpu.get_cpu_capability(), *set_here])


def processor_line():
    "Return on one line what `describe_processor` tells."
    return "{} ({})".format(*describe_processor())


def pytest_report_header(config):
    "Say on which processor the notebooks and tests run."
    if getattr(config.option, "nbval", False):
        return f"processor: {processor_line()}"
    return None


def describe_machine():
    from importlib.metadata import version
    from importlib.util import find_spec

    import torch

    processor, instructions = describe_processor()
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else "CPU",
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": processor,
        "instructions": instructions,
        "cores": os.cpu_count(),
        "versions": {
            p: version(p)
            for p in ("torch", "numpy", "matplotlib", "jupyter-book")
            if find_spec(p.replace("-", "_"))
        },
    }


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "processor: notebooks, and tests that sum "
        "floats: run by `make processors` as well",
    )
    heed_ctrl_c()
    if not hasattr(config, "workerinput"):  # not in an xdist worker
        config.clock = Clock()
        config.pluginmanager.register(config.clock, "notebook-clock")
        if needs_kernels(config):
            server = kernels.KernelServer()
            config.add_cleanup(server.close)
            os.environ[kernels.ADDRESS] = server.address


def heed_ctrl_c():
    "Also where a shell that starts jobs in the background has it ignored."
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def needs_kernels(config):
    "Whether this run starts kernels, and there is no server for them yet."
    option = config.option
    notebooks = any(
        Path(arg.split("::")[0]).is_dir() or ".ipynb" in arg for arg in config.args
    )
    return (
        getattr(option, "nbval", False)
        and notebooks
        and not option.collectonly
        and hasattr(os, "fork")
        and kernels.ADDRESS not in os.environ
    )


def write_json(path, content):
    "Write a file, and leave the old one where the process ends before that."
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def pytest_sessionfinish(session):
    clock = getattr(session.config, "clock", None)
    if clock is None:
        return
    if target := session.config.getoption("--seconds"):
        path = Path(target)
        record = read_seconds(path if path.exists() else SECONDS)
        write_json(path, clock.merged(record, processor_line()))
    target = session.config.getoption("--record")
    if target and (clock.books or clock.gpu_tests):
        path = Path(target)
        before = json.loads(path.read_text("utf-8")) if path.exists() else None
        write_json(path, clock.as_record(before))
    if not clock.books:
        return
    # said, but no failure: a machine may be slow, or work on something else meanwhile.
    # What must keep to the budget is the record of the book.
    session.config.clock_message = clock.over_budget()


def pytest_terminal_summary(terminalreporter, config):
    skipped = terminalreporter.getreports("skipped")
    if left := sum(NO_TIME in report.longreprtext for report in skipped):
        terminalreporter.line(f"{left} tests were left out: {NO_TIME}", yellow=True)
    clock = getattr(config, "clock", None)
    if clock is None or not clock.books:
        return
    terminalreporter.section("notebooks, seconds")
    for name, book in sorted(clock.books.items()):
        terminalreporter.line(f"{book['seconds']:7.1f}  {name}")
    if message := getattr(config, "clock_message", None):
        terminalreporter.line(message, yellow=True)
