"""Draw the course's plan, ``book/chapters.yml``: its chapters and routes.

``<!-- chapters -->`` in a page becomes the table of chapters, ``<!-- routes
-->`` the routes as cards with their hours, ``<!-- before and after -->`` what
the tour's model writes before and after training (the outputs of its cells
that say ``#| landing: before`` and ``#| landing: after``), ``<!-- count -->``
the number of ✓. Hours are estimates, and one rule makes them: a chapter takes
the time to read its words and its code plus the minutes of its exercises. Run
as a program, this file rewrites the table in README.md.
"""

from __future__ import annotations

import html
import json
import math
import re
from functools import lru_cache
from pathlib import Path

import yaml

from course import NUMBER, Notebook, code_cells, measure, notebook_path, notebooks

CHAPTERS = "<!-- chapters -->"
ROUTES = "<!-- routes -->"
SAMPLES = "<!-- before and after -->"
COUNT = "<!-- count -->"
README_TABLE = re.compile(r"(<!-- chapters -->\n).*?(<!-- /chapters -->)", re.S)
NAMES = {
    "gpt": (
        "Build a GPT",
        "The core: from one dot product to a trained decoder that writes.",
    ),
    "serve": (
        "Serve it",
        "For those who have a model and want it fast: caches,"
        " batching, costs, and the attention of today's models.",
    ),
    "all": ("All of it", "Every chapter and appendix, in order."),
}


@lru_cache(maxsize=1)
def parsed(text: str) -> list[dict]:
    "The plan, which every page asks for; no one may change it."
    return yaml.safe_load(text)


def plan(root: Path) -> list[dict]:
    text = (Path(root) / "book" / "chapters.yml").read_text(encoding="utf-8")
    return parsed(text)


def minutes(nb: Notebook) -> float:
    "Time to read a chapter and do its exercises, estimated."
    found = measure(nb.path)
    return found.minutes + found.exercises


def number(name: str) -> str:
    "The number of a document: 7 of 07_…, 6b of 06b_…, A1 of A1_…, or none."
    head = name.rpartition("/")[2].partition("_")[0]
    if not NUMBER.fullmatch(head):
        return ""
    return head.lstrip("0") or "0"


def chapters(root: Path, folder: str) -> str:
    "Markdown table of all chapters."
    found = {nb.name: nb for nb in notebooks(root)}
    rows = ["| number | chapter | what it builds |", "|---:|:---|:---|"]
    for part in plan(root):
        rows.append(f"| | **{part['part']}** | |")
        for ch in part["chapters"]:
            nb = found[ch["nb"]]
            star = " ★" if ch.get("gpt") else ""
            rows.append(
                f"| {number(nb.name)} | [{nb.title or ch['title']}]"
                f"({folder}/{nb.name}.ipynb){star} | {ch['builds']} |"
            )
    return "\n".join(rows)


def routes(root: Path, folder: str) -> str:
    "The routes as cards: purpose, hours, first chapter, what is on them."
    found = {nb.name: nb for nb in notebooks(root)}
    every = [ch for part in plan(root) for ch in part["chapters"]]
    out = ["`````{grid} 1 1 3 3", ":gutter: 3", ""]
    for key, (name, purpose) in NAMES.items():
        on = [ch for ch in every if key == "all" or ch.get(key)]
        hours = math.ceil(sum(minutes(found[ch["nb"]]) for ch in on) / 60)
        links = [
            f"[{number(ch['nb']) or ch['title']}]({folder}/{ch['nb']}.ipynb)"
            for ch in on
        ]
        path = (
            f"{len(on)} chapters and appendices"
            if key == "all"
            else ("Chapters " + ", ".join(links))
        )
        out += [
            f"````{{grid-item-card}} {name}",
            purpose,
            "",
            f"**About {hours} hours.** {path}.",
            "````",
            "",
        ]
    return "\n".join([*out, "`````"])


def said(root: Path, which: str) -> str:
    "What the tour's cell that is marked so has printed."
    path = notebook_path(root, "00_tour")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for cell in code_cells(cells):
        if cell.directives.get("landing") == which:
            return "".join("".join(out.get("text", "")) for out in cell.outputs)
    raise ValueError(f"no cell of {path.name} says #| landing: {which}")


def before_and_after(root: Path, folder: str) -> str:
    "Two boxes of text: the same model, untrained and trained."
    boxes = []
    for which, title in (
        ("before", "Before training"),
        ("after", "After a minute or two of it"),
    ):
        text = "".join(
            c if c.isprintable() or c == "\n" else "\ufffd" for c in said(root, which)
        )
        lines = [" ".join(part.split()) for part in text.split("\n\n")]
        shown = "\n\n".join(lines)[:400].rpartition(" ")[0] + " …"
        boxes.append(
            f"<figure><figcaption>{title}</figcaption><pre>"
            f"{html.escape(shown)}</pre></figure>"
        )
    return (
        '```{raw} html\n<div class="tf-samples">'
        + "".join(boxes).replace("\n\n", "\n&#8203;\n")
        + "</div>\n```"
    )


def count(root: Path, folder: str) -> str:
    "How many claims carry a ✓."
    claims = [len(measure(nb.path).claims) for nb in notebooks(root)]
    everywhere = ", and no notebook is without one" * all(claims)
    return f"There are {sum(claims)} of them{everywhere}"


def in_readme(root: Path) -> str:
    "README.md with its table of chapters drawn again."
    text = (Path(root) / "README.md").read_text(encoding="utf-8")
    table = chapters(root, "nbs")
    return README_TABLE.sub(lambda m: f"{m[1]}{table}\n{m[2]}", text)


def on_source_read(app, docname, content):
    root = Path(app.srcdir)
    for mark, draw in (
        (CHAPTERS, chapters),
        (ROUTES, routes),
        (SAMPLES, before_and_after),
        (COUNT, count),
    ):
        if mark in content[0]:
            for path in (
                root / "_toc.yml",
                root / "book" / "chapters.yml",
                *(nb.path for nb in notebooks(root)),
            ):
                app.env.note_dependency(str(path))
            content[0] = content[0].replace(mark, draw(root, "../nbs"))


def setup(app):
    app.connect("source-read", on_source_read)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    here = Path(__file__).resolve().parents[2]
    (here / "README.md").write_text(in_readme(here), encoding="utf-8")
