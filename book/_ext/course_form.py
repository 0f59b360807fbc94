"""The parts of a chapter that are neither prose nor code.

Boxes: ``{predict}`` asks; ``{answer}``, ``{question} …``, ``{closer} …`` and
``{more} …`` unfold. Cells between ``{more-start} …`` and ``{more-end}`` become one
such box, and so do those of ``closer``. A ``{predict}`` that ends with a list and
says ``:answer: 2`` shows the items of the list as buttons; what comes out and the
``{answer}`` then stand in one fold below them.

The head: under the title of a chapter stands what it takes and what it proves, and
before its first section the drawing of the whole model with the chapter's part lit
(``lit`` in ``book/chapters.yml``). A lesson whose entry there says ``form: open`` has
a strip of the parts in place of the drawing. Figures are numbered where they are
drawn: Figure 7.3 is the third of chapter 7.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from functools import cache
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective

from course import (
    LABEL,
    code_cells,
    document_name,
    lines_outside_fences,
    measure,
    notebook_path,
    relink,
    source,
    way_to_root,
)
from course_map import number, plan

MACHINE = "<!-- machine -->"
REVEAL = "See what comes out"
MIN_OPTIONS = 2
MAX_OPTIONS = 4
# the parts of the model in the strip, and what they are called there; those of the
# second line are shown only where a lesson is about them
STRIP = {
    "text": "text",
    "tokenizer": "tokenizer",
    "embedding": "embedding",
    "positions": "positions",
    "norm": "norm",
    "attention": "attention",
    "heads": "heads",
    "cache": "cache",
    "feedforward": "feed-forward",
    "lm_head": "logits",
    "sampling": "choosing a token",
}
BESIDE = {
    "residual": "residual stream",
    "block": "block",
    "encoder": "encoder",
    "loss": "loss",
    "training": "training",
    "check": "checks",
    "costs": "costs",
}
ANSWERED = re.compile(r"^:answer:", re.M)
CAPTION = re.compile(r'<(figcaption|p) class="tf-caption">')


class Fold(nodes.General, nodes.Element):
    "A box whose title is seen, and the rest when it is opened."


class FoldTitle(nodes.Part, nodes.TextElement):
    "The first child of a ``Fold``."


class Gate(nodes.Invisible, nodes.Element):
    "Where a box of cells begins (``summary``) or ends (none)."


def open_fold(self, node):
    kind = "tf-fold"  # starttag adds the node's classes and ids
    self.body.append(self.starttag(node, "details", CLASS=kind))


def open_title(self, node):
    self.body.append("<summary>")


def close_title(self, node):
    self.body.append('</summary>\n<div class="tf-fold-body">\n')


def close_fold(self, node):
    self.body.append("</div>\n</details>\n")


class Box(SphinxDirective):
    "A box that unfolds; its title is the argument, or the kind's own."

    has_content = True
    final_argument_whitespace = True
    optional_arguments = 1
    option_spec = {"name": directives.unchanged}
    titles = {"answer": "Answer"}
    before = {"closer": "Closer look: ", "more": "More: "}

    def summary(self):
        "The title as a node of its own, with its markup."
        said = self.arguments[0] if self.arguments else (self.titles.get(self.kind))
        if not said:
            raise self.error(f"{self.name} needs a title")
        inline, _notes = (
            self.parse_inline(said)
            if hasattr(self, "parse_inline")
            else self.state.inline_text(said, self.lineno)
        )
        before = self.before.get(self.kind)
        return FoldTitle(
            "", "", *([nodes.strong(before, before)] if before else []), *inline
        )

    @property
    def kind(self):
        return self.name.removesuffix("-start")

    def run(self):
        self.assert_has_content()
        box = Fold("", self.summary(), classes=[f"tf-{self.kind}"])
        self.set_source_info(box)
        self.add_name(box)
        self.state.nested_parse(self.content, self.content_offset, box)
        return [box]


class Start(Box):
    has_content = False

    def run(self):
        return [Gate(summary=self.summary(), kind=self.kind)]


class End(SphinxDirective):
    def run(self):
        return [Gate(summary=None, kind=self.name.removesuffix("-end"))]


class Predict(SphinxDirective):
    "A question before an output, perhaps with options to choose from."

    has_content = True
    option_spec = {"name": directives.unchanged, "answer": directives.positive_int}

    def run(self):
        self.assert_has_content()
        box = nodes.admonition(classes=["tf-predict"])
        box += nodes.title("", "Predict")
        self.set_source_info(box)
        self.add_name(box)
        self.state.nested_parse(self.content, self.content_offset, box)
        if "answer" in self.options:
            self.mark_options(box, self.options["answer"])
        return [box]

    def mark_options(self, box, answer):
        "Let the script know the options, and which of them is right."
        options = box.children[-1]
        question = f"the prediction {box.children[1].astext()[:60]!r}"
        if not isinstance(options, nodes.bullet_list):
            raise self.error(
                f"{question} has an :answer:, so it has to end with the "
                "list of its options"
            )
        if not MIN_OPTIONS <= len(options) <= MAX_OPTIONS:
            raise self.error(
                f"{question} has {len(options)} options; from "
                f"{MIN_OPTIONS} to {MAX_OPTIONS} are allowed"
            )
        if answer > len(options):
            raise self.error(
                f"{question} says :answer: {answer} and has {len(options)} options"
            )
        box["classes"].append("tf-ask")
        options["classes"] += ["tf-options", f"tf-right-{answer}"]


class CloseGates(SphinxTransform):
    "Put what stands between two gates into one box."

    default_priority = 12

    def apply(self):
        for start in [*self.document.findall(Gate)]:
            if start["summary"] is None or start.parent is None:
                continue
            parent = start.parent
            at = start.parent.index(start)
            ends = [
                i
                for i, x in enumerate(parent.children)
                if i > at and isinstance(x, Gate)
            ]
            if not ends or parent[ends[0]]["summary"] is not None:
                raise ExtensionError(
                    f"{self.env.docname}: {start['kind']}-start without "
                    f"its end in the same section: "
                    f"{start['summary'].astext()!r}"
                )
            box = Fold("", start["summary"], classes=[f"tf-{start['kind']}"])
            box.extend(parent.children[at + 1 : ends[0]])
            parent.children[at : ends[0] + 1] = [box]
            box.parent = parent
        for left in self.document.findall(Gate):
            raise ExtensionError(
                f"{self.env.docname}: {left['kind']}-end without its start"
            )


class Reveal(SphinxTransform):
    "Fold what a cell between a question and its answer shows."

    default_priority = 400

    def apply(self):
        for cell in [*self.document.findall(nodes.container)]:
            if "tag_reveal" in cell.get("classes", ()) and cell.children:
                out = cell.children[-1]
                if out.get("nb_element") == "cell_code_output":
                    box = Fold("", FoldTitle("", REVEAL), classes=["tf-reveal"])
                    cell.replace(out, box)
                    box.append(out)


class Ask(SphinxTransform):
    "Gather what follows a question with options in one fold of its box."

    default_priority = 399  # before ``Reveal``, for which nothing is left

    def apply(self):
        for box in [*self.document.findall(nodes.admonition)]:
            if "tf-ask" in box.get("classes", ()):
                self.gather(box)

    def gather(self, box):
        "Move outputs and answer into the box, and visible code before it."
        parent = box.parent
        at = parent.index(box)
        end = next(
            (
                i
                for i in range(at + 1, len(parent))
                if "tf-answer" in parent[i].get("classes", ())
            ),
            None,
        )
        if end is None:
            raise ExtensionError(
                f"{self.env.docname}: a prediction with options has no {{answer}} "
                f"in its section: {box.children[1].astext()!r}"
            )
        reveal = Fold("", FoldTitle("", REVEAL), classes=["tf-reveal"])
        code = []
        for node in parent.children[at + 1 : end]:
            output = output_of(node)
            if output is not None and len(node) > 1:
                shell = node.copy()  # without its children
                shell["ids"] = []
                node.remove(output)
                shell += output
                code.append(node)
                reveal += shell
            elif output is None and node.get("nb_element") == "cell_code":
                code.append(node)
            else:
                reveal += node
        reveal.extend(parent[end].children[1:])  # without the title "Answer"
        box += reveal
        parent.children[at : end + 1] = [*code, box]
        for node in (*code, box):
            node.parent = parent


def output_of(cell):
    "Return the output of a code cell, or None."
    if (
        cell.get("nb_element") == "cell_code"
        and cell.children
        and (cell.children[-1].get("nb_element") == "cell_code_output")
    ):
        return cell.children[-1]
    return None


# ---- the head of a chapter


def entry(root: Path, name: str) -> dict | None:
    "What the plan says of one chapter."
    for part in plan(root):
        for chapter in part["chapters"]:
            if chapter["nb"] == name:
                return chapter
    return None


def is_open(planned: dict | None) -> bool:
    "Whether a lesson has the open form: its open cells need nothing but the setup."
    form = (planned or {}).get("form")
    if form not in (None, "open"):
        raise ExtensionError(
            f"{planned['nb']} has the form {form!r} in "
            "book/chapters.yml; the only one is open"
        )
    return form == "open"


def head(root: Path, path: Path, text: str) -> str:
    "One line: minutes, what is needed, how much is proved."
    found = measure(path, text)
    name = document_name(root, path)
    planned = entry(root, name) or {}
    parts = [f"{max(5, round(found.minutes / 5) * 5)} minutes to read"]
    if found.exercises:
        parts.append(f"{found.exercises} for the exercises")
    if planned.get("needs"):
        # the plan's links are relative to nbs/
        parts.append("needs " + relink(planned["needs"], way_to_root(name)))
    if found.claims:
        n = len(found.claims)
        parts.append(
            f"[✓ {n} {'claim' if n == 1 else 'claims'} proved here]"
            f"(#claims-{name.replace('/', '-').lower()})"
        )
    return " · ".join(parts)


@cache
def drawing(
    lit: tuple[str, ...], links: tuple[tuple[str, str], ...], caption: str | None = None
) -> str:
    "The machine as HTML, these parts lit."
    from tformer import plot

    return plot.machine_diagram(lit, dict(links), caption)._repr_html_()


def strip(lit: list[str], links: tuple[tuple[str, str], ...]) -> str:
    "Return the parts of the model as one line of HTML, with those of a lesson lit."
    unknown = sorted({*lit} - {*STRIP} - {*BESIDE})
    if unknown:
        raise ExtensionError(
            f"lit in book/chapters.yml names {', '.join(unknown)}; "
            "the parts of the model are "
            f"{', '.join([*STRIP, *BESIDE])}"
        )
    names = STRIP | {part: name for part, name in BESIDE.items() if part in lit}
    addresses = dict(links)
    items = []
    for part, name in names.items():
        word = html.escape(name)
        if part in lit:
            word = f"<strong>{word}</strong>"
        if part in addresses:
            word = f'<a href="{html.escape(addresses[part])}">{word}</a>'
        items.append(f"<li{' class=tf-lit' * (part in lit)}>{word}</li>")
    here = ", ".join(names[part] for part in lit)
    return (
        '<nav class="tf-strip" aria-label="Where this lesson is in the model">'
        f"<p>You are here: {html.escape(here)}</p>"
        f"<ol>{''.join(items)}</ol></nav>"
    )


def links(root: Path, folder: str = "") -> tuple[tuple[str, str], ...]:
    "For each part of the machine, the page of the chapter that builds it."
    out = {}
    for part in plan(root):
        for chapter in part["chapters"]:
            there = notebook_path(root, chapter["nb"]).exists()
            for name in chapter.get("builds_parts", ()) if there else ():
                out.setdefault(name, f"{folder}{chapter['nb']}.html")
    return tuple(out.items())


def section_at(text: str) -> int | None:
    "Where the first section begins, its label included."
    at = 0
    label = None
    for line, is_text in lines_outside_fences(text):
        if is_text and line.startswith("## "):
            return at if label is None else label
        label = at if is_text and LABEL.match(line) else None
        at += len(line) + 1
    return None


def folded(cell: dict) -> bool:
    "A code cell of which the page shows at most a label."
    return (
        cell["cell_type"] == "code"
        and code_cells([cell])[0].shown in ("folded", "removed")
        and not cell.get("outputs")
    )


def markdown(text: str) -> dict:
    return {
        "cell_type": "markdown",
        "metadata": {},
        "source": text,
        "id": hashlib.sha256(text.encode()).hexdigest()[:8],
    }


def raw(text: str) -> str:
    return f"````{{raw}} html\n{text}\n````"


def picture(planned: dict, links: tuple[tuple[str, str], ...]) -> str:
    "Return the strip of a lesson of the open form, and the drawing of any other."
    if is_open(planned):
        return strip(planned["lit"], links)
    return drawing(tuple(planned["lit"]), links, planned.get("caption"))


def with_head(root: Path, path: Path, text: str) -> str:
    "The notebook's JSON with its head line and the machine."
    nb = json.loads(text)
    cells = nb["cells"]
    name = document_name(root, path)
    planned = entry(root, name)
    first = next((c for c in cells if c["cell_type"] == "markdown"), None)
    if first is None or planned is None:
        return text
    lines = source(first).split("\n")
    at = next((i for i, line in enumerate(lines) if line.startswith("> ")), 0)
    while at + 1 < len(lines) and lines[at + 1].startswith(">"):
        at += 1
    line = f"\n```{{container}} tf-head\n{head(root, path, text)}\n```\n"
    lines.insert(at + 1, line)
    first["source"] = "\n".join(lines)
    if planned.get("lit"):
        machine = picture(planned, links(root, way_to_root(name)))
        for i, cell in enumerate(cells):
            at = cell["cell_type"] == "markdown" and section_at(source(cell))
            if at is not None and at is not False:
                text = source(cell)
                before = text[:at]
                after = text[at:]
                cell["source"] = after
                drawn = raw(f'<div class="tf-here">{machine}</div>')
                while i and not before.strip() and folded(cells[i - 1]):
                    i -= 1  # imports come after the drawing
                cells[i:i] = [markdown(x) for x in (before, drawn) if x.strip()]
                break
    fold_predictions(cells)
    return json.dumps(nb)


def fold_predictions(cells: list[dict]) -> None:
    "What comes out between a question and its answer waits for a click."
    asked = False
    for cell in cells:
        if cell["cell_type"] == "markdown":
            text = source(cell).split("{answer}")[-1]
            # a question with options gathers its outputs itself (``Ask``)
            asked = "{predict}" in text and not ANSWERED.search(text)
        elif asked and cell.get("outputs"):
            cell["metadata"].setdefault("tags", []).append("reveal")


def on_source_read(app, docname, content):
    path = Path(app.env.doc2path(docname))
    if MACHINE in content[0]:
        for name in ("book/chapters.yml", "tformer/plot.py"):
            app.env.note_dependency(str(Path(app.srcdir) / name))
        drawn = drawing(
            (), links(Path(app.srcdir), "../nbs/"), "A language model. Choose a part."
        )
        content[0] = content[0].replace(MACHINE, raw(drawn))
    if path.suffix == ".ipynb":
        root = Path(app.srcdir)
        for name in ("book/chapters.yml", "tformer/plot.py"):
            app.env.note_dependency(str(root / name))
        content[0] = with_head(root, path, content[0])


def numbered(body: str, chapter: str) -> str:
    "Figures and steppers of a page with their numbers."
    seen = iter(range(1, 1000))

    def write(m):
        at = ".".join(filter(None, (chapter, str(next(seen)))))
        return (
            f'{m[0]}<span class="tf-number" id="fig-'
            f'{at.replace(".", "-")}">Figure {html.escape(at)}.'
            "</span> "
        )

    return CAPTION.sub(write, body)


def on_page(app, page, template, context, doctree):
    if page.startswith("nbs/") and context.get("body"):
        context["body"] = numbered(context["body"], number(page[4:]))


def setup(app):
    app.add_node(Fold, html=(open_fold, close_fold))
    app.add_node(FoldTitle, html=(open_title, close_title))
    app.add_node(Gate, html=(lambda *_: None, lambda *_: None))
    for name in ("answer", "question", "closer", "more"):
        app.add_directive(name, Box)
    for name in ("closer", "more"):
        app.add_directive(f"{name}-start", Start)
        app.add_directive(f"{name}-end", End)
    app.add_directive("predict", Predict)
    app.add_transform(CloseGates)
    app.add_transform(Ask)
    app.add_transform(Reveal)
    app.connect("source-read", on_source_read, priority=300)
    app.connect("html-page-context", on_page, priority=410)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
