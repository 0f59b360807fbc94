"""Draw the status page from the committed record ``book/status.json``.

The record is written by ``make status``, which runs every notebook as a test
and writes down what happened::

    {"date": "2026-11-21", "device": "cpu", "python": "3.11.7",
     "platform": "Linux x86_64", "versions": {"torch": "2.13.0"},
     "notebooks": {"00_tour": {"passed": true, "cells": 31, "seconds": 70.2}}}

A notebook that the record lacks is shown as not recorded; a record without a
run is said to be one.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from code_changes import CodeChange, preview, split_where
from course import Notebook, measure, notebooks

MARK = "<!-- status -->"
CLAIMS = "<!-- claims -->"
GPU = "<!-- gpu -->"
EMPTY = "No run has been recorded yet: `make status` records one."
NOT_RUN = (
    "Not run: no run on a GPU has been recorded. On a machine with one, "
    "`make gpu` records it."
)


def load(path: Path) -> dict:
    "The record, or an empty one where there is none."
    if not path.exists():
        return {}
    return json.loads(path.read_text(encoding="utf-8"))


def row(nb: Notebook, seen: dict | None) -> str:
    "One line of the table."
    link = f"[{nb.title or nb.name}](../nbs/{nb.name}.ipynb)"
    if seen is None:
        return f"| {link} | not recorded | – | – |"
    word = "passed" if seen.get("passed") else "**failed**"
    cells = seen.get("cells", "–")
    seconds = seen.get("seconds")
    took = "–" if seconds is None else f"{seconds:.1f}"
    return f"| {link} | {word} | {cells} | {took} |"


def summary(record: dict, names: list[str]) -> str:
    "How many of the notebooks passed, in how long, on what."
    seen = record.get("notebooks", {})
    ours = [seen[n] for n in names if n in seen]
    passed = sum(bool(s.get("passed")) for s in ours)
    total = sum(s.get("seconds") or 0 for s in ours)
    device = record.get("device", "an unknown device")
    device = "the CPU" if device.lower() == "cpu" else device
    return (
        f"{passed} of {len(names)} notebooks passed on "
        f"{record.get('date', 'an unknown date')}, on "
        f"{device}, in {total:.0f} seconds together."
    )


def status(record: dict, found: list[Notebook]) -> str:
    "Markdown of the page's body."
    if not record.get("notebooks"):
        return EMPTY
    seen = record["notebooks"]
    table = [
        "| notebook | result | cells | seconds |",
        "|:---|:---|---:|---:|",
        *(row(nb, seen.get(nb.name)) for nb in found),
    ]
    machine = [
        ("device", record.get("device")),
        ("Python", record.get("python")),
        ("platform", record.get("platform")),
        *sorted(record.get("versions", {}).items()),
    ]
    versions = [
        "| what | version |",
        "|:---|:---|",
        *(f"| {name} | {text} |" for name, text in machine if text),
    ]
    return "\n\n".join(
        [
            summary(record, [nb.name for nb in found]),
            "\n".join(table),
            "## The machine and the versions",
            "\n".join(versions),
        ]
    )


def claims(root: Path, found: list[Notebook]) -> str:
    "How many ✓ there are, and for each chapter which change turned it red."
    counts = {nb.name: measure(nb.path).claims for nb in found}
    some = [nb for nb in found if counts[nb.name]]
    total = sum(map(len, counts.values()))
    out = [f"{total} claims in {len(some)} notebooks carry a ✓."]
    for nb in some:
        path = root / "book" / "verified" / f"{nb.name}.yml"
        changes = yaml.safe_load(path.read_text(encoding="utf-8"))
        rows = "\n".join(change_row(change, root / "tformer") for change in changes)
        out.append(
            f":::::{{closer}} {nb.title}: ✓ {len(counts[nb.name])}\n"
            f":name: claims-{nb.name.replace('/', '-').lower()}\n\n{rows}\n:::::"
        )
    return "\n\n".join(out)


def change_row(change: dict, package: Path) -> str:
    "One claim, and the change of the package that makes its cell fail."
    path, qualname = split_where(change["where"], package)
    seen = CodeChange(change["where"], change["old"], change["new"])
    old, new = (
        " ".join(code.split()) or "(nothing)"
        for code in preview(path.read_text(encoding="utf-8"), qualname, seen)
    )
    start = (
        f"    - For *{change['noun']}*: red when"
        if "noun" in change
        else f"- **{change['claim']}**. Red when"
    )
    return (
        f"{start}, in `tformer.{change['where']}`, ``` {old} ``` becomes ``` {new} ```."
    )


def gpu(record: dict, names: list[str], pages: dict | None = None) -> str:
    """One paragraph on the recorded run on a GPU, or that there is none.

    `pages` is the record of the CPU, with whose outputs it was compared.
    """
    if not record.get("notebooks") and not record.get("gpu_tests"):
        return NOT_RUN
    return " ".join([*gpu_notebooks(record, names, pages or {}), *gpu_tests(record)])


def gpu_notebooks(record: dict, names: list[str], pages: dict) -> list[str]:
    "What the notebooks did there, in one to three sentences."
    seen = record.get("notebooks", {})
    if not seen:
        return ["The notebooks were not run there."]
    failed = [name for name in names if not seen.get(name, {}).get("passed")]
    if not failed:
        return [
            summary(record, names),
            "No notebook's outputs differ from those of the CPU.",
        ]
    there = versions_of(record)
    here = versions_of(pages)
    return [
        summary(record, names),
        "Notebooks that were not run there, or whose outputs differ from those "
        f"of the CPU: {', '.join(failed)}.",
        *(
            [
                f"There was {there}, and the CPU's outputs are those of {here}: a "
                "difference need not come from the GPU."
            ]
            if pages and there != here
            else []
        ),
    ]


def versions_of(record: dict) -> str:
    torch = record.get("versions", {}).get("torch", "unknown")
    return f"Python {record.get('python', 'unknown')} with PyTorch {torch}"


def gpu_tests(record: dict) -> list[str]:
    "How the tests ended that need a GPU, and on which, in two sentences or one."
    counts = record.get("gpu_tests")
    if not counts:
        return ["The tests that need a GPU were not run."]
    torch = record.get("versions", {}).get("torch", "unknown")
    return [
        f"Of the {sum(counts.values())} tests that need a GPU, "
        f"{counts['passed']} passed, {counts['failed']} failed and "
        f"{counts['skipped']} were skipped, on "
        f"{record.get('date', 'an unknown date')}, on "
        f"{record.get('device', 'an unknown device')}, with PyTorch {torch}."
    ]


def on_source_read(app, docname, content):
    root = Path(app.srcdir)
    if GPU in content[0]:
        records = [root / "book" / name for name in ("status_gpu.json", "status.json")]
        for path in records:
            app.env.note_dependency(str(path))
        names = [nb.name for nb in notebooks(root)]
        there, here = map(load, records)
        content[0] = content[0].replace(GPU, gpu(there, names, here))
    if CLAIMS in content[0]:
        for path in (root / "book" / "verified").rglob("*.yml"):
            app.env.note_dependency(str(path))
        content[0] = content[0].replace(CLAIMS, claims(root, notebooks(root)))
    if MARK not in content[0]:
        return
    found = notebooks(root)
    for path in (
        root / "book" / "status.json",
        root / "_toc.yml",
        *(nb.path for nb in found),
    ):
        app.env.note_dependency(str(path))
    record = load(root / "book" / "status.json")
    content[0] = content[0].replace(MARK, status(record, found))


def setup(app):
    app.connect("source-read", on_source_read)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
