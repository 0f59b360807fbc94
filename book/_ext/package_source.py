"""Show code of the package on a page, taken from its modules when the book is built.

```` ```{package-source} nn.norms.RMSNorm ```` draws the source of that class as a code
cell. A name is that of a module below `tformer`, followed by that of a function, a
class, a method or a constant in it. Several names, separated by spaces or lines, are
drawn one after the other. Decorators and the comment lines directly above belong to
the code; a method is drawn without its indentation. More than `OPEN` lines are folded
like a cell that says `code-fold: true`. A sentence under the code links to the notebook
in which the module is written.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.util.docutils import SphinxDirective

from api_page import COMMENT
from code_changes import ChangeError, definitions, split_where
from course import exported_from, module_name

OPEN = 20  # lines


def find_module(root: Path, where: str) -> tuple[Path, str]:
    """Return the file of the module that begins a dotted name, and the rest of it.

    Raises ``ValueError`` if no module begins the name, or if nothing follows it.
    """
    try:
        path, name = split_where(where, Path(root) / "tformer")
    except ChangeError:
        raise ValueError(
            f"no module of tformer begins the name {where!r}, expected "
            "module.Name or room.module.Name"
        ) from None
    if not name:
        raise ValueError(
            f"{where!r} is a module, expected a name in it, such as {where}.Name"
        )
    return path, name


def find_definitions(tree: ast.Module, module: str, name: str) -> list[ast.stmt]:
    """Return the statements that define a name such as ``Class.method``.

    There are several if it is defined more than once, as a property and its setter
    are. Raises ``ValueError`` with the names that are defined if it is not.
    """
    scopes: list[ast.AST] = [tree]
    place = f"tformer.{module}"
    for part in name.split("."):
        known = [
            found
            for scope in scopes
            for found in definitions(getattr(scope, "body", []))
        ]
        scopes = [node for other, node in known if other == part]
        if not scopes:
            names = ", ".join(dict.fromkeys(other for other, _ in known))
            raise ValueError(
                f"{place} does not define {part!r}, expected one of: "
                f"{names or '(it defines no names)'}"
            )
        place += f".{part}"
    return scopes


def code_of(lines: Sequence[str], node: ast.stmt) -> str:
    """Return the lines of a definition, unchanged.

    Its decorators and the comments directly above belong to it, but not the marks of
    cells and the directives that nbdev writes into a module.
    """
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    line = lines[first - 1]
    indent = line[: len(line) - len(line.lstrip())]
    while (
        first > 1
        and lines[first - 2].startswith(f"{indent}#")
        and COMMENT.match(lines[first - 2][len(indent) :])
    ):
        first -= 1
    return "\n".join(lines[first - 1 : node.end_lineno])


def dedented(code: str) -> str:
    "Return a method's code as a function's stands: its first line is not indented."
    indent = code[: len(code) - len(code.lstrip(" "))]
    lines = code.split("\n")
    if not all(line.startswith(indent) for line in lines if line.strip()):
        return code  # a text in it goes back to the margin
    return "\n".join(line.removeprefix(indent) for line in lines)


def listed(names: Sequence[str]) -> str:
    "Return the names as words: A, B and C."
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def origin(module: str, notebook: str) -> nodes.paragraph:
    "Return the sentence that names a module and links to its notebook, if it has one."
    name = f"tformer.{module}"
    said = nodes.paragraph(
        "",
        "",
        nodes.Text("This is code of "),
        nodes.literal(name, name),
        classes=["tf-origin"],
    )
    if notebook:
        link = addnodes.pending_xref(
            "",
            nodes.inline("", notebook),
            refdomain="std",
            reftype="doc",
            reftarget=f"/nbs/{notebook}",
            refexplicit=False,
            refwarn=True,
        )
        said += [nodes.Text(", which is written in "), link]
    said += nodes.Text(".")
    return said


def code_cell(code: str, names: Sequence[str]) -> nodes.container:
    """Return the code as MyST-NB draws a cell, folded if it is long.

    The cell is folded by MyST-NB itself, which knows it by its attributes.
    """
    shown = nodes.container(nb_element="cell_code_source", classes=["cell_input"])
    shown += nodes.literal_block(code, code, language="python")
    cell = nodes.container("", shown, nb_element="cell_code", classes=["cell"])
    count = code.count("\n") + 1
    if count > OPEN:
        label = f"the code of {listed(names)}, {count} lines"
        cell["hide_mode"] = "all"
        cell["prompt_show"] = label
        cell["prompt_hide"] = label
    return cell


class PackageSource(SphinxDirective):
    "The code of the names that are the arguments and the lines."

    has_content = True
    optional_arguments = 1
    final_argument_whitespace = True

    def run(self):
        wanted = " ".join([*self.arguments, *self.content]).split()
        if not wanted:
            raise self.error(
                "package-source has no name, expected module.Name or room.module.Name"
            )
        root = Path(self.env.srcdir)
        pieces = []
        names = []
        origins = {}
        for where in wanted:
            try:
                path, name = find_module(root, where)
                self.env.note_dependency(str(path))
                text = path.read_text("utf-8")
                module = module_name(root, path)
                found = find_definitions(ast.parse(text), module, name)
            except ValueError as error:
                raise self.error(f"package-source: {error}") from None
            # not splitlines: a form feed in a text ends no line
            lines = text.split("\n")
            pieces += [dedented(code_of(lines, node)) for node in found]
            names.append(name)
            origins[module] = exported_from(text)
        cell = code_cell("\n\n".join(pieces), names)
        cell += [origin(*one) for one in origins.items()]
        return [cell]


def setup(app):
    app.add_directive("package-source", PackageSource)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
