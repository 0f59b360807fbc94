"""Let nbval check the notebooks as nbdev keeps them, and time them."""
import datetime
import gc
import json
import os
import platform
import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "book" / "_ext"))

from course import document_name  # noqa: E402

# seconds: one notebook on a quiet machine, and all of them together
# seconds: of one notebook; of all, which take 15 minutes two at a time
NOTEBOOK_BUDGET, TOTAL_BUDGET = 120, 2 * 15 * 60

# seconds of the longest test files, and of one that is not named; those of
# the notebooks are on record
LONG = {"test_shapes": 190, "test_book": 150, "test_mutations": 150}
USUAL = 15
RECORD = ROOT / "book" / "status.json"

EVAL_FALSE = re.compile(r"^\s*#\s*\|\s*eval\s*:\s*false\s*$", re.M | re.I)
SVG = re.compile(r"<svg\b.*?</svg>", re.S)
LOOKS = re.compile(r"<(style|script)\b.*?</\1>", re.S)
KEPT = re.compile(r"<(title|desc)\b[^>]*>(.*?)</\1>", re.S)

try:
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
    return self.kc.execute(source, store_history=True,
                           allow_stdin=allow_stdin, stop_on_error=False)


if RunningKernel is not None:
    RunningKernel.execute_cell_input = _execute
    _sanitize = IPyNbCell.sanitize

    def sanitize(self, s):
        return _sanitize(self, reduce_svg(s) if isinstance(s, str) else s)

    IPyNbCell.sanitize = sanitize


def pytest_addoption(parser):
    parser.addoption("--record", metavar="FILE", help="write what each "
                     "notebook did (passed, seconds, versions) as JSON")


def known_as(path):
    "A notebook's document name; of another file its name."
    if path.suffix == ".ipynb" and path.is_relative_to(ROOT / "nbs"):
        return document_name(ROOT, path)
    return path.stem


def longest_first(items, record=RECORD):
    """Sort by the seconds of an item's file, which stays together.

    The last files to begin should be short: with two processes, one may
    have nothing left to do while the other is at work on the last one.
    """
    books = json.loads(record.read_text(encoding="utf-8"))["notebooks"] \
        if record.exists() else {}
    seconds = {name: book["seconds"] for name, book in books.items()}
    seconds |= LONG
    items.sort(key=lambda item: -seconds.get(known_as(item.path), USUAL))


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):          # in an xdist worker
        longest_first(items)
    for item in items:
        cell = getattr(item, "cell", None)          # nbval's IPyNbCell
        if cell is None or cell.get("cell_type") != "code":
            continue
        if cell.execution_count is None:
            # nbdev_clean blanks it, and nbval reads that as «never run»
            cell.execution_count = 0
        if EVAL_FALSE.search(cell.source):
            item.options["skip"] = True


def pytest_collection_finish():
    # what is imported by now stays: to collect garbage, among a million
    # objects, need not look at it each time
    gc.freeze()


class Clock:
    "Adds up the seconds and outcomes of each notebook's cells."

    def __init__(self):
        self.books = defaultdict(
            lambda: {"passed": True, "cells": 0, "seconds": 0.0})

    def pytest_runtest_logreport(self, report):
        path = report.nodeid.split("::")[0]
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
            return (f"the notebooks took {took:.0f} s together; their "
                    f"budget is {total} s")

    def as_record(self):
        return {"date": datetime.date.today().isoformat(),
                **describe_machine(),
                "notebooks": {k: {**b, "seconds": round(b["seconds"], 1)}
                              for k, b in sorted(self.books.items())}}


def describe_machine():
    import torch
    from importlib.metadata import version
    gpu = torch.cuda.is_available()
    return {"device": torch.cuda.get_device_name() if gpu else "CPU",
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.machine()}",
            "cores": os.cpu_count(),
            "versions": {p: version(p) for p in
                         ("torch", "numpy", "matplotlib", "jupyter-book")}}


def pytest_configure(config):
    if not hasattr(config, "workerinput"):      # not in an xdist worker
        config.clock = Clock()
        config.pluginmanager.register(config.clock, "notebook-clock")


def pytest_sessionfinish(session):
    clock = getattr(session.config, "clock", None)
    if clock is None or not clock.books:
        return
    if target := session.config.getoption("--record"):
        path = Path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(clock.as_record(), indent=1) + "\n"
        beside = path.with_suffix(".part")
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    if message := clock.over_budget():
        session.config.clock_message = message
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter, config):
    clock = getattr(config, "clock", None)
    if clock is None or not clock.books:
        return
    terminalreporter.section("notebooks, seconds")
    for name, book in sorted(clock.books.items()):
        terminalreporter.line(f"{book['seconds']:7.1f}  {name}")
    if message := getattr(config, "clock_message", None):
        terminalreporter.line(message, red=True)
