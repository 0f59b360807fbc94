"""See every ✓ of the book turn red: python book/verify.py [--check [--nouns]] [NAME …]

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
own cell red.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book" / "_ext"))

from code_changes import ChangeError, CodeChange, apply, split_where  # noqa: E402
from course import (  # noqa: E402
    code_cells,
    notebook_path,
    read_notebook,
    select,
)

RECORD = ROOT / "book" / "verified.json"
CHANGES = ROOT / "book" / "verified"
RUN = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for index, text in json.load(open(sys.argv[1])):
    done = shell.run_cell(text, store_history=False)
    if not done.success:
        error = done.error_in_exec or done.error_before_exec
        json.dump([index, type(error).__name__], open(sys.argv[2], "w"))
        break
"""


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
    noted = yaml.safe_load(path.read_text("utf-8")) if path.exists() else []
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


def first_failure(name: str, entry: dict | None):
    "Index and error of the first cell that fails with this change."
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "tformer"
        shutil.copytree(
            ROOT / "tformer", package, ignore=shutil.ignore_patterns("__pycache__")
        )
        change = None
        module = ""
        qualname = ""
        if entry:
            change = code_change(entry)
            path, qualname = split_where(change.where, package)
            module = ".".join(path.relative_to(package).with_suffix("").parts)
            path.write_text(apply(path.read_text("utf-8"), qualname, change), "utf-8")
        own = read_notebook(notebook_path(ROOT, name)).module
        cells = [
            (c.index, changed(c, change if own == module else None, own, qualname))
            for c in cells_of(name)
            if "%pip" not in c.source and c.source
        ]
        given = Path(folder) / "cells.json"
        got = Path(folder) / "got.json"
        given.write_text(json.dumps(cells), "utf-8")
        subprocess.run(
            [sys.executable, "-c", RUN, str(given), str(got)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1"},
            check=True,
            timeout=1200,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return json.loads(got.read_text("utf-8")) if got.exists() else None


def replay_one(name: str, change: dict) -> dict:
    "What one change did: ``red`` if the claim's own cell failed, and failed first."
    every = cells_of(name)
    cell = next(c for c in every if c.claim == change["claim"])
    seen = first_failure(name, change)
    return {
        "claim": change["claim"],
        "noun": change.get("noun"),
        "key": key(every, cell.claim, change),
        "red": bool(seen) and seen[0] == cell.index,
        "failed": seen,
    }


def replay(name: str, claims: set[str] | None = None) -> list[dict]:
    "What each change of a notebook did."
    return [
        replay_one(name, change)
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


def replay_all(names: list[str], nouns: bool | None = None) -> dict[str, list[dict]]:
    "What the changes of these notebooks did, as many at a time as processors."
    jobs = [(name, change) for name in names for change in changes(name, nouns)]
    jobs.sort(key=lambda job: -seconds().get(job[0], 0))  # the longest first
    out = {name: [] for name in names}

    def work(job):
        seen = replay_one(*job)
        print(
            "red    " if seen["red"] else "NOT RED",
            job[0],
            seen["claim"],
            *([f"({seen['noun']})"] if seen["noun"] else []),
            seen["failed"] or "",
            flush=True,
        )
        return job[0], seen

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, seen in pool.map(work, jobs):
            out[name].append(seen)
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
    parser.add_argument("names", nargs="*", help="notebooks; all if there is none")
    options = parser.parse_args(arguments)
    if options.nouns and not options.check:
        parser.error("--nouns goes with --check; without it all changes are made")
    names = noted()
    try:
        chosen = select(names, options.names)
    except ValueError as error:
        print(f"book/verified/: {error}", file=sys.stderr)
        return 2
    record = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    record = {name: seen for name, seen in record.items() if name in names}
    found = replay_all(chosen, options.nouns if options.check else None)
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
