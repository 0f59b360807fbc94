"""See every ✓ of the book turn red: python book/verify.py [NAME …]

A ✓ counts only if a change of the package, made on purpose, makes that very
cell fail. ``book/verified/<document name>.yml`` names the change for each
claim of a notebook; a NAME is its document name, the last part of that, or its
number::

    - claim: equal to PyTorch in value and gradient
      module: attend
      old: "scores.masked_fill(~mask, -math.inf)"
      new: "scores.masked_fill(mask, -math.inf)"

This program makes one change at a time in a copy of the package, and in the
cells from which it is exported, runs the cells of the notebook in order, and writes to ``book/verified.json`` which
cell failed, and how. The record of a claim holds as long as neither its cell
nor its change is edited; the tests ask for it.
"""
from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book" / "_ext"))

from course import (  # noqa: E402
    code_cells, notebook_path, read_notebook, select)

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
    return sorted(path.relative_to(CHANGES).with_suffix("").as_posix()
                  for path in CHANGES.rglob("*.yml"))


def changes(name: str) -> list[dict]:
    "What was noted for one notebook."
    path = CHANGES / f"{name}.yml"
    return yaml.safe_load(path.read_text("utf-8")) if path.exists() else []


def cells_of(name: str):
    path = notebook_path(ROOT, name)
    return code_cells(json.loads(path.read_text("utf-8"))["cells"])


def key(cells: list, claim: str, change: dict) -> str:
    """Of a claim's cell, what it builds on, and its change.

    Another key, and the record is void. It builds on all cells before it
    but other claims, drawings and hidden cells.
    """
    at = next(i for i, c in enumerate(cells) if c.claim == claim)
    before = [c.source for c in cells[:at]
              if c.shown != "removed" and not c.claim]
    parts = [*before, cells[at].source, change["module"], change["old"],
             change["new"]]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def changed(cell, change: dict | None, module: str) -> str:
    "A cell that is itself exported to the module carries the change."
    if change and change["module"] == module and (
            {"export", "exporti"} & {*cell.directives}):
        return cell.source.replace(change["old"], change["new"])
    return cell.source


def first_failure(stem: str, change: dict | None):
    "Index and error of the first cell that fails with this change."
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "tformer", Path(folder) / "tformer",
                        ignore=shutil.ignore_patterns("__pycache__"))
        if change:
            path = Path(folder) / "tformer" / f"{change['module']}.py"
            text = path.read_text("utf-8")
            if text.count(change["old"]) != 1:
                raise ValueError(f"{stem}: {change['old']!r} stands "
                                 f"{text.count(change['old'])} times in "
                                 f"tformer/{path.name}, expected once")
            path.write_text(text.replace(change["old"], change["new"]),
                            "utf-8")
        module = read_notebook(ROOT / "nbs" / f"{stem}.ipynb").module
        cells = [(c.index, changed(c, change, module))
                 for c in cells_of(stem)
                 if "%pip" not in c.source and c.source]
        given, got = Path(folder) / "cells.json", Path(folder) / "got.json"
        given.write_text(json.dumps(cells), "utf-8")
        subprocess.run(
            [sys.executable, "-c", RUN, str(given), str(got)], cwd=folder,
            env={**os.environ, "PYTHONPATH": folder}, check=True,
            timeout=1200, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL)
        return json.loads(got.read_text("utf-8")) if got.exists() else None


def replay(name: str, claims: set[str] | None = None) -> list[dict]:
    "What each change of a notebook did: ``red`` if its own cell failed."
    every = cells_of(name)
    out = []
    for change in changes(name):
        if claims is not None and change["claim"] not in claims:
            continue
        cell = next(c for c in every if c.claim == change["claim"])
        seen = first_failure(name, change)
        out.append({"claim": change["claim"],
                    "key": key(every, cell.claim, change),
                    "red": bool(seen) and seen[0] == cell.index,
                    "failed": seen})
    return out


def main(wanted: list[str]) -> int:
    names = noted()
    try:
        chosen = select(names, wanted)
    except ValueError as error:
        print(f"book/verified/: {error}", file=sys.stderr)
        return 2
    record = json.loads(RECORD.read_text("utf-8")) \
        if RECORD.exists() else {}
    record = {name: seen for name, seen in record.items() if name in names}
    bad = 0
    for name in chosen:
        kept = {}
        for seen in replay(name):
            word = "red  " if seen["red"] else "NOT RED"
            print(word, name, seen["claim"], seen["failed"] or "", flush=True)
            bad += not seen["red"]
            if seen["red"]:
                kept[seen["claim"]] = {"key": seen["key"],
                                       "error": seen["failed"][1]}
        record[name] = kept
    text = json.dumps(record, indent=1, ensure_ascii=False, sort_keys=True)
    RECORD.write_text(text + "\n", "utf-8")
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
