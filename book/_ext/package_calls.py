"""Draw who calls whom in a module of the package, from its code.

```` ```{package-calls} nn.layers ```` becomes a drawing of the module's functions and
classes, callers to the left of what they call. Public names lead to the API page.
"""

from __future__ import annotations

import ast
import html
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive

from course import module_path, way_to_root

FONT = 13  # px
LETTER = 0.61 * FONT  # the width of a letter of the monospaced font
BOX = 26  # height of a box
ROW = 36  # from one box to the next below it
GAP = 40  # between two columns


FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def calls(text: str) -> dict[str, list[str]]:
    """Return for each function and class of a module those that it uses.

    In the order of the module. A class uses what its methods use; annotations are not
    counted.
    """
    defined = [
        node
        for node in ast.parse(text).body
        if isinstance(node, FUNCTIONS | ast.ClassDef)
    ]
    names = [node.name for node in defined]
    uses = {}
    for node in defined:
        found = {*loaded(node, frozenset())} - {node.name}
        uses[node.name] = [name for name in names if name in found]
    return uses


def loaded(node: ast.AST, hidden: frozenset[str]) -> Iterator[str]:
    "Yield the names that a node reads, but the parameters and variables of functions."
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load) and node.id not in hidden:
            yield node.id
        return
    if isinstance(node, FUNCTIONS | ast.Lambda):
        hidden |= {n.arg for n in ast.walk(node.args) if isinstance(n, ast.arg)}
        hidden |= {
            n.id
            for n in ast.walk(node)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from loaded(child, hidden)


def columns(uses: dict[str, list[str]]) -> list[list[str]]:
    """Return the names in columns, each to the right of all that call it.

    What neither calls nor is called stands in the last column, below an empty place.
    Two that call each other stand one above the other.
    """
    called = {name for found in uses.values() for name in found}
    alone = [name for name in uses if not uses[name] and name not in called]
    column = {name: 0 for name in uses if name not in alone}
    for _ in column:
        for name in column:
            for other in uses[name]:
                if column[other] <= column[name] < len(column) - 1 and (
                    name not in uses[other]
                ):
                    column[other] = column[name] + 1
    kept = sorted({*column.values()})
    found = [[name for name in column if column[name] == at] for at in kept]
    if found and alone:
        found[-1] += ["", *alone]
    return found or [alone]


def public_names(text: str) -> set[str]:
    "Return the names that a module exports: those in its `__all__`."
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {*ast.literal_eval(node.value)}
    return set()


def draw(module: str, uses: dict[str, list[str]], api: str, public: set[str]) -> str:
    """Return the drawing as HTML; `api` is the address of the API page.

    The names in `public` lead there.
    """
    place = {}
    left = 1.0
    for names in columns(uses):
        width = max(map(len, names)) * LETTER + 18
        for row, name in enumerate(names):
            if name:
                place[name] = left, 4 + row * ROW, width
        left += width + GAP
    right = left - GAP + 1
    bottom = max(y for _, y, _ in place.values()) + BOX + 4
    lines = []
    for name, others in uses.items():
        x, y, width = place[name]
        for other in others:
            x2, y2, _ = place[other]
            bend = GAP / 2
            lines.append(
                f'<path d="M{x + width:.0f} {y + BOX / 2:.0f} '
                f"C{x + width + bend:.0f} {y + BOX / 2:.0f} "
                f'{x2 - bend:.0f} {y2 + BOX / 2:.0f} {x2:.0f} {y2 + BOX / 2:.0f}" '
                'fill="none" stroke="currentColor" stroke-opacity=".35"/>'
            )
    boxes = []
    for name, (x, y, width) in place.items():
        is_public = name in public
        opacity = 0.08 if is_public else 0
        frame = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{BOX}" rx="5"'
        dashes = "" if is_public else ' stroke-dasharray="4 3"'
        box = (
            f'<rect {frame} fill="var(--pst-color-background)"/>'
            f'<rect {frame} fill="currentColor" fill-opacity="{opacity}" '
            f'stroke="currentColor" stroke-opacity=".45"{dashes}/>'
            f'<text x="{x + 9:.0f}" y="{y + BOX / 2 + FONT / 3:.1f}" '
            f'fill="currentColor">{html.escape(name)}</text>'
        )
        boxes.append(
            f'<a href="{api}#tformer.{module}.{name}">{box}</a>' if is_public else box
        )
    says = "; ".join(
        f"{name} calls {', '.join(found)}" for name, found in uses.items() if found
    )
    # an image would hide its links
    role = "group" if any("<a " in box for box in boxes) else "img"
    return (
        '<figure class="tf-plate" style="margin:1em 0"><div style="overflow-x:auto">'
        f'<svg role="{role}" viewBox="0 0 {right:.0f} {bottom:.0f}" '
        f'style="display:block;margin:0 auto;width:100%;height:auto;'
        f"max-width:{right:.0f}px;min-width:{right * 10 / FONT:.0f}px;"
        f'font:{FONT}px var(--pst-font-family-monospace, monospace)">'
        f"<title>Who calls whom in tformer.{module}</title>"
        f"<desc>{html.escape(says or 'No function calls another.')}</desc>"
        f"{''.join(lines)}{''.join(boxes)}</svg></div>"
        '<figcaption class="tf-caption">Who calls whom in '
        f"<code>tformer.{module}</code>, drawn from its code: each function stands to "
        "the left of those that it calls. Dashed: private.</figcaption></figure>"
    )


class PackageCalls(Directive):
    "The drawing of a module, whose dotted name is the argument."

    required_arguments = 1

    def run(self):
        env = self.state.document.settings.env
        module = self.arguments[0]
        path = module_path(Path(env.srcdir), module)
        if not path.exists():
            raise self.error(f"there is no module tformer.{module}")
        text = path.read_text("utf-8")
        uses = calls(text)
        if not uses:
            raise self.error(f"tformer.{module} has no function and no class to draw")
        env.note_dependency(str(path))
        # the document is nbs/…, and the API page stands in book/
        api = "../" + way_to_root(env.docname.removeprefix("nbs/")) + "book/api.html"
        drawing = draw(module, uses, api, public_names(text))
        return [nodes.raw("", drawing, format="html")]


def setup(app):
    app.add_directive("package-calls", PackageCalls)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
