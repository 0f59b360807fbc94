"""Draw the course's plan, ``book/chapters.yml``: its chapters and routes.

``<!-- chapters -->`` in a page becomes the table of chapters, ``<!-- routes -->`` the
routes as cards with their hours, ``<!-- route: name -->`` the lessons of one of them,
``<!-- leak -->`` what a check found in a library and ``<!-- leak table -->`` the record
of it, ``<!-- count -->`` the number of ✓, ``<!-- seconds -->`` how long notebooks took,
and ``<!-- tour -->`` the minutes of the first lesson. Hours are estimates, and one rule
makes them: a chapter takes the time to read its words and its code plus the minutes of
its exercises. Run as a program, this file rewrites the table in README.md.
"""

from __future__ import annotations

import csv
import html
import json
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import yaml

from course import NUMBER, Notebook, measure, notebooks

CHAPTERS = "<!-- chapters -->"
ROUTES = "<!-- routes -->"
COUNT = "<!-- count -->"
README_TABLE = re.compile(r"(<!-- chapters -->\n).*?(<!-- /chapters -->)", re.S)
ROUTE = re.compile(r"<!-- route: (\w+) -->")
LEAK = "<!-- leak -->"
LEAK_TABLE = "<!-- leak table -->"
SECONDS = "<!-- seconds -->"
TOUR = "<!-- tour -->"
TOUR_PAGE = "nbs/00_tour"  # behind the first page; the routes stand between them
TENSORS = "A0_tensors"  # what a reader without PyTorch reads before all others


# before the page is drawn, so that nothing moves when the line of the way appears
SHOWN = """<script>
try {
  document.querySelectorAll("nav.tf-way").forEach((line) => {
    line.hidden = line.dataset.way !== localStorage.getItem("tformer-way");
  });
} catch {}
</script>
"""


@dataclass(frozen=True)
class Route:
    "A way through the course."

    flag: str  # the lessons that have it in the plan are on the route
    title: str
    purpose: str


ROUTES_BY_NAME = {
    "understand": Route(
        "understand",
        "Understand it",
        "How text becomes numbers, what attention computes, how the parts become a GPT,"
        " and how it writes.",
    ),
    "build": Route(
        "gpt",
        "Build one",
        "The core of the course: from one dot product to a decoder of today that you"
        " have trained and checked.",
    ),
    "today": Route(
        "today",
        "You know a GPT",
        "What models of today do differently: caches, batches, shared and latent keys,"
        " windows and sparse attention.",
    ),
    "check": Route(
        "check",
        "Check your own model",
        "Find the mistakes that raise no error, in any model that turns ids into"
        " logits.",
    ),
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


def on_route(root: Path, name: str) -> list[Notebook]:
    """The notebooks of the book on a route, in the order of the course.

    Tensors come first.  A book of a few pages has the few that are in it.
    """
    found = {nb.name: nb for nb in notebooks(root)}
    flag = ROUTES_BY_NAME[name].flag
    on = [ch["nb"] for part in plan(root) for ch in part["chapters"] if ch.get(flag)]
    on = sorted(on, key=lambda nb: nb != TENSORS)
    return [found[nb] for nb in on if nb in found]


def skimmed(root: Path, name: str) -> set[str]:
    "The notebooks on a route that its readers may know already."
    flag = ROUTES_BY_NAME[name].flag
    return {
        ch["nb"]
        for part in plan(root)
        for ch in part["chapters"]
        if ch.get(flag) == "skim"
    }


def hours(root: Path, name: str) -> int:
    "About how many hours a route takes, without what may be skimmed."
    known = skimmed(root, name)
    read = [nb for nb in on_route(root, name) if nb.name not in known]
    return math.ceil(sum(map(minutes, read)) / 60)


def routes(root: Path, folder: str) -> str:
    "The routes as cards: title, purpose and hours. Each leads to its own page."
    out = ["`````{grid} 1 2 2 2", ":gutter: 3", ""]
    for name, route in ROUTES_BY_NAME.items():
        pages = " ".join(f"nbs/{nb.name}" for nb in on_route(root, name))
        out += [
            "````{grid-item-card} " + route.title,
            f":link: routes/{name}",
            ":link-type: doc",
            "",
            route.purpose,
            "",
            f"**About {hours(root, name)} hours** "
            f'<span class="tf-progress" data-pages="{pages}"></span>',
            "````",
            "",
        ]
    return "\n".join([*out, "`````"])


def duration(some: float) -> str:
    "Minutes in words: 40 min, 1 h, 1 h 20 min."
    whole = 5 * max(1, round(some / 5))
    full, rest = divmod(whole, 60)
    return " ".join([f"{full} h"] * (full > 0) + [f"{rest} min"] * (rest > 0))


def full_title(nb: Notebook) -> str:
    "Number and title of a notebook, for HTML."
    head = number(nb.name)
    return html.escape(f"{head}{'.' * bool(head)} {nb.title or nb.name}".strip())


def ways(root: Path, page: str) -> str:
    """Where a lesson stands on each route that it is on, as lines that are hidden.

    The script shows the one of the route that its reader has taken.
    """
    lines = ""
    up = "../" * page.count("/")
    for name, route in ROUTES_BY_NAME.items():
        on = on_route(root, name)
        at = [f"nbs/{nb.name}" for nb in on]
        if page not in at:
            continue
        i = at.index(page)
        then = "the last on this way"
        if i + 1 < len(on):
            then = (
                f'next on this way: <a href="{up}{at[i + 1]}.html">'
                f"{full_title(on[i + 1])}</a>"
            )
        lines += (
            f'<nav class="tf-way" data-way="{name}" aria-label="The way you have taken"'
            f' hidden><a href="{up}book/routes/{name}.html">{route.title}</a>,'
            f" {i + 1} of {len(on)} · {then}"
            ' <button type="button">Leave this way</button></nav>'
        )
    return lines


def at_its_end(lines: str) -> str:
    "The same lines for the foot of a page; two landmarks need two names."
    return lines.replace("you have taken", "you have taken, once more")


def route_page(root: Path, name: str, way: str) -> str:
    "The lessons of a route as a list, each with a box for a tick."
    known = skimmed(root, name)
    builds = {ch["nb"]: ch["builds"] for part in plan(root) for ch in part["chapters"]}
    on = on_route(root, name)
    items = ""
    for nb in on:
        title = full_title(nb)
        items += (
            f'<li><label><input type="checkbox" data-page="nbs/{nb.name}" hidden>'
            f'<a href="{way}nbs/{nb.name}.html">{title}</a></label>'
            f"<em>{'skim if you know it, else ' * (nb.name in known)}"
            f"{duration(minutes(nb))}</em>"
            f"<span>{html.escape(builds[nb.name])}</span></li>"
        )
    pages = " ".join(f"nbs/{nb.name}" for nb in on)
    more = ", and more where lessons marked “skim” are new to you" * bool(known)
    return (
        f"About {hours(root, name)} hours{more}.\n\n```{{raw}} html\n"
        f'<p><a class="tf-start sd-btn sd-btn-primary" data-begin '
        f'href="{way}nbs/{on[0].name}.html">Begin: {full_title(on[0])}</a></p>'
        f'<ul class="tf-route" data-way="{name}">{items}</ul>'
        f'<p class="tf-progress" data-pages="{pages}" aria-live="polite"></p>\n```'
    )


def leak_record(root: Path) -> list[dict]:
    "What `check.causal` said of models of a library: a row for each and its version."
    path = Path(root) / "tformer" / "records" / "public_leak.csv"
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def leak(root: Path, folder: str) -> str:
    "What `check.causal` found in a library, from the record of that run."
    rows = leak_record(root)
    old, new = sorted({row["transformers"] for row in rows})
    found = [row for row in rows if row["found"] == "True"]
    if {row["transformers"] for row in found} != {old}:
        raise ValueError(f"public_leak.csv: only {old} should have a leak")
    others = sum(row["transformers"] == old for row in rows) - len(found)
    return (
        f"in version {old} it finds all {len(found)} and names the layer, and passes"
        f" the {others} sound models of the same kind that were tried beside them. In"
        f" version {new}, where they are mended, it passes all {len(found) + others}"
    )


def leak_table(root: Path, folder: str) -> str:
    "The record of that run as a table, and where it is computed."
    rows = leak_record(root)
    versions = sorted({row["transformers"] for row in rows})
    said = {(row["model"], row["transformers"]): row for row in rows}
    out = [f"| model | {' | '.join(versions)} |", "|:--|" + ":--|" * len(versions)]
    for model in dict.fromkeys(row["model"] for row in rows):
        verdicts = (
            f"reads ahead, from `{said[model, version]['module']}` on"
            if said[model, version]["found"] == "True"
            else "passes"
            for version in versions
        )
        out.append(f"| {model} | {' | '.join(verdicts)} |")
    return "\n".join(
        [
            *out,
            "",
            "Small random models of each architecture, in two versions of"
            " `transformers`, by `experiments/public_leak.py`; the record is"
            " `tformer/records/public_leak.csv`.",
        ]
    )


def seconds(root: Path, folder: str) -> str:
    "How long the notebooks took in the run of the status page."
    text = (Path(root) / "book" / "status.json").read_text(encoding="utf-8")
    took = sorted(one["seconds"] for one in json.loads(text)["notebooks"].values())
    quick = sum(one < 60 for one in took)
    return (
        f"With one thread each, {quick} of the {len(took)} notebooks took less than a"
        f" minute, and the slowest {took[-1]:.0f} seconds ([status](status.md))."
    )


def tour(root: Path, folder: str) -> str:
    "How long the first lesson takes."
    (first,) = (nb for nb in notebooks(root) if nb.name == "00_tour")
    return duration(minutes(first))


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
        (LEAK, leak),
        (LEAK_TABLE, leak_table),
        (SECONDS, seconds),
        (TOUR, tour),
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
    way = "../" * docname.count("/")
    content[0] = ROUTE.sub(lambda m: route_page(root, m[1], way), content[0])


def on_page(app, page, template, context, doctree):
    "Show where a lesson stands on its routes, and let a route lead to its lessons."
    root = Path(app.srcdir)
    uri = app.builder.get_relative_uri
    first = app.config.root_doc
    if page.startswith("book/routes/"):
        lesson = on_route(root, page.rpartition("/")[2])[0]
        context["prev"] = {"link": uri(page, first), "title": "The first page"}
        context["next"] = {
            "link": uri(page, f"nbs/{lesson.name}"),
            "title": full_title(lesson),
        }
    elif page in {first, TOUR_PAGE}:
        side, other = ("next", TOUR_PAGE) if page == first else ("prev", first)
        if other in app.env.titles:  # a book of a few pages may be without the tour
            title = app.env.titles[other].astext()
            context[side] = {"link": uri(page, other), "title": title}
    lines = ways(root, page) if page.startswith("nbs/") else ""
    if lines:
        context["body"] = lines + SHOWN + context["body"] + at_its_end(lines)


def setup(app):
    app.connect("source-read", on_source_read)
    app.connect("html-page-context", on_page, priority=860)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    here = Path(__file__).resolve().parents[2]
    (here / "README.md").write_text(in_readme(here), encoding="utf-8")
