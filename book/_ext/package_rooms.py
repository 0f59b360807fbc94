"""Draw the house of the package: its rooms, and which of them imports which.

```` ```{package-room} nn ```` becomes a drawing in which that room stands out, and a
list of its modules, each with its notebook. Without a name the list is that of the
rooms. Run as a program, this file writes the drawing and the list of CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import html
import json
import re
from functools import cache
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

from course import (
    exported_from,
    module_name,
    module_paths,
    notebook_path,
)

FONT = 14  # px
LETTER = 0.61 * FONT  # the width of a letter of the monospaced font
BOX = 30  # height of a box
FLOOR = 66  # from one floor to the next below it
WIDTH = 640  # of the house
PICTURE = "book/_static/rooms.svg"
LIST = re.compile(r"(<!-- rooms -->\n).*?(<!-- /rooms -->)", re.S)  # in CONTRIBUTING.md
# what stands on top, in no folder
TOP = {
    "__main__": "The command: `python -m tformer` writes a story, or translates.",
    "bundle": "Trained models, those of the package and yours: loaded, called, saved.",
    "costs": "Parameters, FLOPs, bytes and seconds of a model, from its configuration.",
    "plot": "The figures of the course.",
}
# names that tformer/__init__.py hands on
ELSEWHERE = {"load": "bundle"}


# --- what the code says


def room_of(module: str) -> str:
    "Return the room of a module: its folder, or itself where it stands in none."
    return module.partition(".")[0]


def imported_rooms(code: str, module: str) -> set[str]:
    "Return the rooms from which a module imports something, without its own."
    here = ["tformer", *module.split(".")]
    found = set()
    for node in ast.walk(ast.parse(code)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: -node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            names = [".".join([*base, alias.name]) for alias in node.names]
        elif isinstance(node, ast.Attribute):  # tformer.load
            names = [ast.unparse(node)]
        found |= {
            ELSEWHERE.get(parts[1], parts[1])
            for parts in (name.split(".") for name in names)
            if parts[0] == "tformer" and len(parts) > 1
        }
    return found - {room_of(module)}


@cache
def house(root: Path) -> dict[str, frozenset[str]]:
    "Return for each room those that it imports."
    found = {}
    for path in module_paths(root):
        module = module_name(root, path)
        rooms = imported_rooms(path.read_text("utf-8"), module)
        found[room_of(module)] = found.get(room_of(module), set()) | rooms
    return {room: frozenset(rooms & {*found}) for room, rooms in sorted(found.items())}


def floors(uses: dict[str, frozenset[str]]) -> list[list[str]]:
    """Return the rooms floor by floor, the highest first.

    A room stands one floor above the highest of those that it imports.
    ``ValueError`` if some of them import each other in a circle.
    """
    height = {}
    while len(height) < len(uses):
        placed = {
            room: 1 + max((height[other] for other in others), default=-1)
            for room, others in uses.items()
            if room not in height and others <= {*height}
        }
        if not placed:
            raise ValueError(f"a circle of imports: {sorted({*uses} - {*height})}")
        height |= placed
    return [
        sorted(room for room in uses if height[room] == at)
        for at in range(max(height.values()), -1, -1)
    ]


def direct(uses: dict[str, frozenset[str]]) -> list[tuple[str, str]]:
    "Return the imports that do not follow from others: the arrows of the house."

    def reach(room):
        return uses[room].union(*(reach(other) for other in uses[room]))

    return [
        (room, other)
        for room, others in uses.items()
        for other in sorted(others)
        if not any(other in reach(third) for third in others - {other})
    ]


def docstring(path: Path) -> str:
    "Return the first paragraph of a module's docstring as one line."
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def sentence(root: Path, room: str) -> str:
    "Return what the package says of a room."
    if room in TOP:
        return TOP[room]
    return summary(docstring(Path(root, "tformer", room, "__init__.py")))


def summary(text: str) -> str:
    "Return what a docstring says behind the name of its module, as a sentence."
    if text.startswith("Module `"):
        text = text.partition(": ")[2]
    return text[:1].upper() + text[1:].rstrip(".") + "."


# --- the drawing


def places(rows: list[list[str]], arrows: list[tuple[str, str]]) -> dict:
    "Return (x, y, width) of each box; on a floor they stand above what they import."
    place = {}
    for at in range(len(rows) - 1, -1, -1):
        below = {
            room: [place[b][0] + place[b][2] / 2 for a, b in arrows if a == room]
            for room in rows[at]
        }
        center = {r: sum(x) / len(x) if x else WIDTH / 2 for r, x in below.items()}
        names = sorted(rows[at], key=lambda room: (center[room], room))
        widths = [len(name) * LETTER + 24 for name in names]
        gap = (WIDTH - sum(widths)) / (len(names) + 1)
        x = gap
        for name, width in zip(names, widths, strict=True):
            place[name] = x, 6 + at * FLOOR, width
            x += width + gap
    return place


def draw(uses: dict[str, frozenset[str]], lit: str = "", links=None) -> str:
    "Return the house as SVG; `links` is {room: address}, and `lit` is drawn bold."
    rows = floors(uses)
    arrows = direct(uses)
    place = places(rows, arrows)
    height = 12 + (len(rows) - 1) * FLOOR + BOX
    lines = []
    for room, other in arrows:
        x, y, width = place[room]
        x2, y2, width2 = place[other]
        strong = lit in (room, other)
        lines.append(
            f'<path d="M{x + width / 2:.0f} {y + BOX:.0f} '
            f"C{x + width / 2:.0f} {y + BOX + 22:.0f} "
            f"{x2 + width2 / 2:.0f} {y2 - 28:.0f} "
            f'{x2 + width2 / 2:.0f} {y2 - 7:.0f}" fill="none" stroke="currentColor" '
            f'stroke-opacity="{0.9 if strong else 0.35}" marker-end="url(#tf-to)"/>'
        )
    boxes = []
    for room, (x, y, width) in place.items():
        frame = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{BOX}" rx="5"'
        box = (
            f'<rect {frame} class="tf-room-ground"/>'
            f'<rect {frame} fill="currentColor" fill-opacity="{0.2 * (room == lit)}" '
            f'stroke="currentColor" stroke-opacity="{1 if room == lit else 0.5}"/>'
            f'<text x="{x + width / 2:.0f}" y="{y + BOX / 2 + FONT / 3:.1f}" '
            f'text-anchor="middle" fill="currentColor">{html.escape(room)}</text>'
        )
        address = (links or {}).get(room)
        boxes.append(f'<a href="{address}">{box}</a>' if address else box)
    says = "; ".join(
        f"{room} imports {', '.join(sorted(others))}"
        for room, others in sorted(uses.items())
        if others
    )
    role = "group" if links else "img"  # an image would hide its links
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="{role}" '
        f'viewBox="0 0 {WIDTH} {height}" style="display:block;margin:0 auto;width:100%;'
        f"height:auto;max-width:{WIDTH}px;min-width:{WIDTH * 10 / FONT:.0f}px;"
        f'font:{FONT}px var(--pst-font-family-monospace, monospace)">'
        "<title>The rooms of tformer</title>"
        f"<desc>{html.escape(says)}</desc>"
        '<defs><marker id="tf-to" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="currentColor"/>'
        f"</marker></defs>{''.join(lines)}{''.join(boxes)}</svg>"
    )


def picture(root: Path) -> str:
    "Return the house as a file of its own, which follows light and dark."
    style = (
        "<style>svg{color:#24292f}.tf-room-ground{fill:#fff}"
        "@media (prefers-color-scheme:dark){svg{color:#e6edf3}"
        ".tf-room-ground{fill:#0d1117}}</style>"
    )
    return draw(house(root)).replace("<defs>", style + "<defs>", 1) + "\n"


def figure(root: Path, lit: str, links: dict[str, str]) -> str:
    "Return the house as a figure of a page."
    caption = (
        "The rooms of <code>tformer</code>, drawn from its imports. An arrow leads "
        "from a room to one that it imports; an import that other arrows show is not "
        "drawn again."
    )
    return (
        '<figure class="tf-plate tf-rooms" style="margin:1em 0">'
        f'<div style="overflow-x:auto">{draw(house(root), lit, links)}</div>'
        f'<figcaption class="tf-caption">{caption}</figcaption></figure>'
    )


# --- the lists


def has_page(root: Path, room: str) -> bool:
    "Whether a room is a folder; one that is a single module has no page."
    return Path(root, "tformer", room).is_dir()


def room_list(root: Path, folder: str) -> list[str]:
    "Return Markdown lines: each room and what it is for, the highest floor first."
    lines = []
    for room in (room for row in floors(house(root)) for room in row):
        page = f"{folder}{room}.md"
        name = f"[`{room}`]({page})" if has_page(root, room) else f"`{room}`"
        lines.append(f"- {name}: {sentence(root, room)}")
    return lines


def in_contributing(root: Path) -> str:
    "Return CONTRIBUTING.md with its list of rooms written again."
    text = Path(root, "CONTRIBUTING.md").read_text("utf-8")
    lines = "\n".join(room_list(root, "book/rooms/"))
    return LIST.sub(lambda m: f"{m[1]}{lines}\n{m[2]}", text)


def module_list(root: Path, room: str, to_nbs: str) -> list[str]:
    "Return Markdown lines: each module of a room, and the notebook that builds it."
    lines = []
    for path in module_paths(root):
        module = module_name(root, path)
        if room_of(module) != room:
            continue
        notebook = exported_from(path.read_text("utf-8"))
        title = heading(notebook_path(root, notebook)) if notebook else module
        where = f": [{title}]({to_nbs}{notebook}.ipynb)" if notebook else ""
        lines.append(f"- `{module}`{where}. {summary(docstring(path))}")
    return lines


@cache
def heading(path: Path) -> str:
    "Return the title of a notebook."
    cells = json.loads(path.read_text("utf-8"))["cells"]
    text = "".join(next(c["source"] for c in cells if c["cell_type"] == "markdown"))
    return next(ln[2:].strip() for ln in text.splitlines() if ln.startswith("# "))


class PackageRoom(Directive):
    "The drawing of the house, and the list of a room or of all rooms."

    optional_arguments = 1

    def run(self):
        env = self.state.document.settings.env
        root = Path(env.srcdir)
        room = self.arguments[0] if self.arguments else ""
        rooms = house(root)
        if room and room not in rooms:
            raise self.error(f"there is no room tformer.{room}")
        for path in module_paths(root):
            env.note_dependency(str(path))
        folder = "rooms/" if not room else ""
        links = {name: f"{folder}{name}.html" for name in rooms if has_page(root, name)}
        drawing = figure(root, room, links)
        to_nbs = "../../nbs/" if room else "../nbs/"
        lines = module_list(root, room, to_nbs) if room else room_list(root, folder)
        box = nodes.container()
        self.state.nested_parse(StringList(lines), 0, box)
        return [nodes.raw("", drawing, format="html"), *box.children]


def setup(app):
    app.add_directive("package-room", PackageRoom)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    ROOT = Path(__file__).resolve().parents[2]
    (ROOT / PICTURE).write_text(picture(ROOT), "utf-8")
    (ROOT / "CONTRIBUTING.md").write_text(in_contributing(ROOT), "utf-8")
