"""See every ✓ of the book turn red.

    python book/verify.py [--check [--nouns] [--until TIME]] [NAME …]

A ✓ counts only if a change of the package, made on purpose, makes that very
cell fail. ``book/verified/<document name>.yml`` names the change for each
claim of a notebook; a NAME is its document name, the last part of that, or its
number::

    - claim: equal to PyTorch in value and gradient
      where: attend.attend
      old: ~$mask
      new: $mask

A claim that says several things has further entries, which follow its first one and
break one of them each; ``noun: gradient`` names the word of the claim that they break.
How ``where``, ``old`` and ``new`` are read is said in ``book/_ext/code_changes.py``.
This program makes one change at a time in a copy of the package, and in the cells from
which it is exported, runs the cells of the notebook in order, and writes to
``book/verified.json`` which cell failed, and how. As many changes run at the same time
as there are processors. The record of a claim holds as long as neither its cell nor its
change is edited, layout and comments apart; the tests ask for it. With ``--check``
nothing is written: the first change of each claim is made again, with ``--check
--nouns`` its further ones, and the exit status is 1 if one of them no longer turns its
own cell red. With ``--until`` no change is begun after that time, and what is left is
said: each day another third of the changes comes first, so that three days see them all
where a third fits into the time.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import date
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book" / "_ext"))

from code_changes import (  # noqa: E402
    ChangeError,
    CodeChange,
    apply,
    read_rows,
    split_where,
)
from course import (  # noqa: E402
    code_cells,
    notebook_path,
    read_notebook,
    select,
)

RECORD = ROOT / "book" / "verified.json"
CHANGES = ROOT / "book" / "verified"
RUNNER = ROOT / "book" / "_ext" / "forked_cells.py"
LIMIT = 1200  # seconds for the cells of one notebook


def noted() -> list[str]:
    "The document names of the notebooks for which changes are noted."
    return sorted(
        path.relative_to(CHANGES).with_suffix("").as_posix()
        for path in CHANGES.rglob("*.yml")
    )


def changes(name: str, nouns: bool | None = None) -> list[dict]:
    """What was noted for one notebook.

    With `nouns` only what breaks a noun of a claim, or only each claim's first change.
    """
    path = CHANGES / f"{name}.yml"
    noted = read_rows(path) if path.exists() else []
    return [change for change in noted if nouns is None or ("noun" in change) == nouns]


def cells_of(name: str):
    path = notebook_path(ROOT, name)
    return code_cells(json.loads(path.read_text("utf-8"))["cells"])


def as_parsed(source: str) -> str:
    "Code without its layout and comments; as it stands where it is no Python."
    try:
        return ast.unparse(ast.parse(source))
    except SyntaxError:
        return source


def key(cells: list, claim: str, change: dict) -> str:
    """Of a claim's cell, what it builds on, and its change.

    Another key, and the record is void. It builds on all cells before it
    but other claims, drawings and hidden cells. Layout and comments do not count.
    """
    at = next(i for i, c in enumerate(cells) if c.claim == claim)
    before = [c.source for c in cells[:at] if c.shown != "removed" and not c.claim]
    code = [as_parsed(source) for source in (*before, cells[at].source)]
    parts = [*code, change["where"], change["old"], change["new"]]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def code_change(entry: dict) -> CodeChange:
    return CodeChange(entry["where"], entry["old"], entry["new"])


def changed(cell, change: CodeChange | None, module: str, qualname: str) -> str:
    """Return a cell's source, with the change if the cell defines its place.

    `module` is the notebook's own; only cells that are exported to it can carry the
    change.
    """
    exported = {"export", "exporti"} & {*cell.directives}
    if change is None or not exported or not change.where.startswith(module):
        return cell.source
    try:
        return apply(cell.source, qualname, change)
    except (ChangeError, SyntaxError):  # it stands in another cell
        return cell.source


class Runner:
    """Runs the cells of notebooks in forks of a process that has imported PyTorch.

    The process is started by the first cells. It ends with the context.
    """

    def __init__(self):
        self.process = None

    def _start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(RUNNER)],
            text=True,
            encoding="utf-8",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def first_failure(self, folder: str, cells: list) -> list | None:
        "Index and error of the first cell that fails with the package in `folder`."
        if self.process is None:
            self._start()
        task = {"folder": folder, "cells": cells, "limit": LIMIT}
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline() or '{"died": "its runner"}')
        if "died" in answer:
            raise RuntimeError(f"the cells did not run to an end: {answer['died']}")
        return answer["failed"] if answer["failed"][1] else None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
            self.process.stdout.close()


def first_failure(name: str, entry: dict | None, runner: Runner):
    "Index and error of the first cell that fails with this change."
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "tformer"
        shutil.copytree(ROOT / "tformer", package)  # with what is compiled already
        change = None
        module = ""
        qualname = ""
        if entry:
            change = code_change(entry)
            path, qualname = split_where(change.where, package)
            module = ".".join(path.relative_to(package).with_suffix("").parts)
            path.write_text(apply(path.read_text("utf-8"), qualname, change), "utf-8")
            for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
                compiled.unlink()
        own = read_notebook(notebook_path(ROOT, name)).module
        cells = [
            (c.index, changed(c, change if own == module else None, own, qualname))
            for c in cells_of(name)
            if "%pip" not in c.source and c.source
        ]
        return runner.first_failure(folder, cells)


def replay_one(name: str, change: dict, runner: Runner) -> dict:
    "What one change did: ``red`` if the claim's own cell failed, and failed first."
    every = cells_of(name)
    cell = next(c for c in every if c.claim == change["claim"])
    seen = first_failure(name, change, runner)
    return {
        "claim": change["claim"],
        "noun": change.get("noun"),
        "key": key(every, cell.claim, change),
        "red": bool(seen) and seen[0] == cell.index,
        "failed": seen,
    }


def replay(name: str, claims: set[str] | None = None) -> list[dict]:
    "What each change of a notebook did."
    with Runner() as runner:
        return [
            replay_one(name, change, runner)
            for change in changes(name)
            if claims is None or change["claim"] in claims
        ]


@cache
def seconds() -> dict[str, float]:
    "Seconds of each notebook, as the status page has them."
    path = ROOT / "book" / "status.json"
    books = json.loads(path.read_text("utf-8"))["notebooks"]
    return {name: book["seconds"] for name, book in books.items()}


def records(seen: list[dict]) -> dict[str, dict]:
    "What is kept of the changes that turned their own cell red, for each claim."
    kept = {}
    for one in seen:
        if one["red"]:
            claim = kept.setdefault(one["claim"], {})
            if one["noun"]:
                claim = claim.setdefault("nouns", {}).setdefault(one["noun"], {})
            claim |= {"key": one["key"], "error": one["failed"][1]}
    return kept


TURNS = 3  # days after which each change has come first


def days_until_turn(name: str, change: dict, today: date) -> int:
    "In how many days a change is among those that come first: 0, 1 or 2."
    said = f"{name} {change['claim']} {change.get('noun')}"
    turn = int(hashlib.sha256(said.encode()).hexdigest(), 16)
    return (turn - today.toordinal()) % TURNS


def replay_all(
    names: list[str], nouns: bool | None = None, until: float = math.inf
) -> dict[str, list[dict]]:
    """What the changes of these notebooks did, as many at a time as processors.

    None is begun after the time `until`, in seconds since 1970. With such a time the
    third of the changes whose turn is today comes first; else the longest come first.
    """
    jobs = [(name, change) for name in names for change in changes(name, nouns)]
    for _, change in jobs:
        if "where" in change:  # what fits nothing is found before the first run
            path, qualname = split_where(change["where"], ROOT / "tformer")
            apply(path.read_text("utf-8"), qualname, code_change(change))
    jobs.sort(key=lambda job: -seconds().get(job[0], 0))
    if until < math.inf:
        today = date.today()
        jobs.sort(key=lambda job: days_until_turn(*job, today))
    out = {name: [] for name in names}
    runners = queue.SimpleQueue()

    def work(job):
        if time.time() >= until:
            return job[0], None
        runner = runners.get()
        try:
            seen = replay_one(*job, runner)
        finally:
            runners.put(runner)
        print(
            "red    " if seen["red"] else "NOT RED",
            job[0],
            seen["claim"],
            *([f"({seen['noun']})"] if seen["noun"] else []),
            seen["failed"] or "",
            flush=True,
        )
        return job[0], seen

    with ExitStack() as stack:
        for _ in range(os.cpu_count()):
            runners.put(stack.enter_context(Runner()))
        pool = stack.enter_context(ThreadPoolExecutor(os.cpu_count()))
        done = [*pool.map(work, jobs)]
    for name, seen in done:
        if seen is not None:
            out[name].append(seen)
    if left := sum(seen is None for _, seen in done):
        print(f"{left} changes were left out: there was no time left to begin them")
    return out


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail if a change is not seen",
    )
    parser.add_argument(
        "--nouns",
        action="store_true",
        help="with --check: the further changes of the claims",
    )
    parser.add_argument(
        "--until",
        metavar="TIME",
        type=float,
        default=math.inf,
        help="with --check: begin no change after this time, in seconds since 1970",
    )
    parser.add_argument("names", nargs="*", help="notebooks; all if there is none")
    options = parser.parse_args(arguments)
    if options.nouns and not options.check:
        parser.error("--nouns goes with --check; without it all changes are made")
    if options.until < math.inf and not options.check:
        parser.error("--until goes with --check; without it all changes are made")
    names = noted()
    try:
        chosen = select(names, options.names)
    except ValueError as error:
        print(f"book/verified/: {error}", file=sys.stderr)
        return 2
    record = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    record = {name: seen for name, seen in record.items() if name in names}
    found = replay_all(chosen, options.nouns if options.check else None, options.until)
    bad = 0
    for name, every in found.items():
        bad += sum(not seen["red"] for seen in every)
        record[name] = records(every)
    number = sum(map(len, found.values()))
    print(f"{number - bad} passed, {bad} failed")
    if not options.check:
        text = json.dumps(record, indent=1, ensure_ascii=False, sort_keys=True)
        beside = RECORD.with_suffix(".part")
        beside.write_text(text + "\n", "utf-8")
        beside.replace(RECORD)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
