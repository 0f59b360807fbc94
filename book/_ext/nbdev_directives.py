"""Render nbdev notebooks without their ``#|`` directive lines.

Runs on Sphinx's ``source-read`` event, so the notebook on disk (the one thing
that nbdev exports and nbval tests) is never copied or changed. A directive
becomes the MyST-NB tag that draws what it means. An exported cell gets the
class ``tag_exported`` and, in the HTML, ``data-module="tformer.nn.functional"``, from
which the style sheet draws its badge. The summary below the title (``> …``)
becomes the page's description.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

from course import DIRECTIVE, plain, read_notebook, source
from course import OFF as FALSE

EXPORTED_CELL = re.compile(r'<div class="cell [^"]*\btag_exported\b[^"]*"')
CELL_INPUT = re.compile(r'<div class="cell_input\b[^"]*"')


TAGS = {
    "hide": ["remove-cell"],
    "default_exp": ["remove-cell"],
    "export": ["exported"],
    "exports": ["exported"],
    "exporti": ["exported", "hide-input"],
    "hide_input": ["remove-input"],
    "hide_output": ["remove-output"],
    "verified": ["verified", "hide-cell"],
    "setup": ["setup", "hide-input"],
}
# directives whose words are the label of a fold, and what stands before them
LABELS = {"code-summary": "", "verified": "✓ ", "setup": "Setup: "}
# these are said with true or false
SWITCHES = {
    ("echo", False): ["remove-input"],
    ("output", False): ["remove-output"],
    ("code-fold", True): ["hide-input"],
}


def tags_for(name: str, arg: str) -> list[str]:
    "MyST-NB tags that draw what an nbdev directive means."
    return TAGS.get(name) or SWITCHES.get((name, arg.lower() not in FALSE), [])


def strip_cell(cell: dict) -> None:
    "Take the directives off one code cell and set the tags they mean."
    lines = source(cell).splitlines(keepends=True)
    tags = cell["metadata"].setdefault("tags", [])
    head = 0
    for line in lines:
        m = DIRECTIVE.match(line)
        if not m:
            break
        if m["name"] == "code-fold" and m["arg"].lower() in FALSE:
            tags[:] = [t for t in tags if t != "hide-input"]
        if m["name"] in LABELS:
            cell["metadata"]["mystnb"] = {
                f"code_prompt_{state}": LABELS[m["name"]] + m["arg"]
                for state in ("show", "hide")
            }
        new = tags_for(m["name"], m["arg"])
        tags += [t for t in new if t not in tags]
        head += 1
    cell["source"] = "".join(lines[head:]).lstrip("\n")
    if head and not cell["source"].strip() and "remove-cell" not in tags:
        tags.append("remove-cell")


def strip(text: str) -> str:
    "Turn the JSON of a notebook into the JSON to render."
    nb = json.loads(text)
    for cell in nb["cells"]:
        if cell["cell_type"] == "code":
            strip_cell(cell)
    return json.dumps(nb)


def mark_module(body: str, module: str) -> str:
    "Write the module's name on every exported cell and on its input."
    attribute = f' data-module="{html.escape(module, quote=True)}"'
    out = []
    at = 0
    for cell in EXPORTED_CELL.finditer(body):
        out += [body[at : cell.end()], attribute]
        at = cell.end()
        inner = CELL_INPUT.search(body, at)
        if inner:
            out += [body[at : inner.end()], attribute]
            at = inner.end()
    return "".join(out) + body[at:]


def on_source_read(app, docname, content):
    path = Path(app.env.doc2path(docname))
    if path.suffix != ".ipynb":
        return
    found = read_notebook(path, content[0])
    app.env.metadata[docname].update(
        course_module=found.module, course_summary=plain(found.summary)
    )
    content[0] = strip(content[0])


def on_page(app, page, template, context, doctree):
    meta = app.env.metadata.get(page, {})
    if meta.get("course_module"):
        module = "tformer." + meta["course_module"]
        context["body"] = mark_module(context["body"], module)
    if meta.get("course_summary"):
        summary = html.escape(meta["course_summary"], quote=True)
        context["meta"] = {**(context.get("meta") or {}), "og:description": summary}
        context["metatags"] = (
            f'<meta name="description" content="{summary}" />\n'
            + context.get("metatags", "")
        )


def setup(app):
    app.connect("source-read", on_source_read)
    app.connect("html-page-context", on_page, priority=400)
    return {"version": "2", "parallel_read_safe": True, "parallel_write_safe": True}
