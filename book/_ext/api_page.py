"""Draw the API page: every public name of every exported module.

``<!-- api -->`` becomes one section per module that nbdev has exported, in
the order of the chapters, listing what the module's ``__all__`` lists. Kinds,
comments and origins are read from the source without importing it; autodoc
then draws the names.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent

from course import Notebook, as_rst, exported_from, module_name, module_paths, notebooks

MARK = "<!-- api -->"
COMMENT = re.compile(r"^#(?!\s*(?:%%|\|))\s?(.*)$")
LONG = 60  # a value longer is not shown


@dataclass
class Name:
    name: str
    kind: str  # function, class or data
    comment: str = ""
    value: str = ""


@dataclass
class Module:
    name: str
    doc: str
    notebook: str  # its document name
    names: list[Name] = field(default_factory=list)


def comment_at(lines: list[str], node: ast.stmt) -> str:
    "The comment behind an assignment, else the one directly above it."
    tail = lines[node.end_lineno - 1][node.end_col_offset :].strip()
    if tail.startswith("#"):
        return tail.lstrip("#: ").strip()
    above = []
    at = node.lineno - 2
    while at >= 0 and (m := COMMENT.match(lines[at])):
        above.insert(0, m[1].strip(": "))
        at -= 1
    return " ".join(above)


def targets(node: ast.stmt) -> list[str]:
    "Names that a statement assigns."
    if isinstance(node, ast.AnnAssign):
        aims = [node.target]
    else:
        aims = node.targets if isinstance(node, ast.Assign) else []
    aims = [e for a in aims for e in getattr(a, "elts", [a])]
    return [a.id for a in aims if isinstance(a, ast.Name)]


def read_module(path: Path, name: str) -> Module:
    "What an exported module of this dotted name makes public."
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    tree = ast.parse(text)
    known = {}
    public = []
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            known[node.name] = Name(node.name, "function")
        elif isinstance(node, ast.ClassDef):
            known[node.name] = Name(node.name, "class")
        for target in targets(node):
            if target == "__all__":
                public = ast.literal_eval(node.value)
            elif node.value is not None:
                value = ast.get_source_segment(text, node.value) or ""
                known[target] = Name(target, "data", comment_at(lines, node), value)
    missing = [n for n in public if n not in known]
    if missing:
        raise ValueError(f"{path}: __all__ lists what is not there: {missing}")
    return Module(
        f"tformer.{name}",
        ast.get_docstring(tree) or "",
        exported_from(text),
        [known[n] for n in public],
    )


def modules(root: Path, found: list[Notebook]) -> list[Module]:
    "All exported modules, in the order of the chapters."
    order = {nb.name: i for i, nb in enumerate(found)}
    every = [read_module(path, module_name(root, path)) for path in module_paths(root)]
    return sorted(every, key=lambda m: (order.get(m.notebook, len(order)), m.name))


def directive(module: str, name: Name) -> str:
    "The autodoc directive that draws one name."
    out = [f".. auto{name.kind}:: {module}.{name.name}"]
    if name.kind == "class":
        out += ["   :members:"]
    if name.kind == "data" and not tells(name.value):
        out += ["   :no-value:"]
    if name.comment:
        out += ["", f"   {as_rst(name.comment)}"]
    return "\n".join(out)


def tells(value: str) -> bool:
    "Whether a constant's source is short and all there is to its value."
    try:
        return len(value) <= LONG and bool(ast.literal_eval(value))
    except (ValueError, SyntaxError):
        return False


def rst(module: Module) -> str:
    "reStructuredText of one module: an overview, then every name."
    rows = "\n".join(f"   {n.name}" for n in module.names if n.kind != "data")
    overview = (
        (".. container:: tf-overview\n\n   .. autosummary::\n\n" + indent(rows, "   "))
        if rows
        else ""
    )
    # the module's anchor is handed to the container: a table drops it
    return "\n\n".join(
        [
            f".. py:module:: {module.name}",
            overview,
            *(directive(module.name, n) for n in module.names),
        ]
    )


def page(every: list[Module], found: list[Notebook]) -> str:
    "Markdown of the page's body."
    titles = {nb.name: nb.title for nb in found}
    out = []
    for m in every:
        link = ""
        if m.notebook in titles:
            link = f"Written in [{titles[m.notebook]}](../nbs/{m.notebook}.ipynb)."
        out += [
            f"## {m.name}",
            m.doc.strip(),
            link,
            f"````{{eval-rst}}\n{rst(m)}\n````",
        ]
    return "\n\n".join(o for o in out if o) or "No module is exported yet."


def on_source_read(app, docname, content):
    if MARK not in content[0]:
        return
    root = Path(app.srcdir)
    found = notebooks(root)
    for path in module_paths(root):
        app.env.note_dependency(str(path))
    content[0] = content[0].replace(MARK, page(modules(root, found), found))


def setup(app):
    app.connect("source-read", on_source_read)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
