"""What the extensions and the tests know of the course: its contents, and
what stands in each notebook. No Sphinx here; standard library and PyYAML."""
from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator

import yaml

HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*\s*$")
FENCE = re.compile(r"^\s*(`{3,}|~{3,}|:{3,})")
LABEL = re.compile(r"^\(([\w.:-]+)\)=\s*$")
DEFAULT_EXP = re.compile(r"^#\s*\|\s*default_exp\s+(\S+)\s*$", re.MULTILINE)
MINUTES = re.compile(r"\{exercise(?:-start)?\}[^\n]*?\((\d+) min")
DIRECTIVE = re.compile(
    r"^\s*#\s*\|\s*(?P<name>[\w-]+)\s*:?\s*(?P<arg>.*?)\s*$")
GATE = re.compile(r"\{(solution|closer)-(start|end)\}")
OFF = {"false", "no", "off"}
DRAWN = re.compile(r'class="tf-(?:plate|stepper)\b')
CUT = re.compile(          # of markdown: what is not read as words
    r"^\s*(?:`{3,}|:{3,}).*$|^\([\w.:-]+\)=$|^:\w+:.*$|\]\([^)\s]*\)",
    re.MULTILINE)


@dataclass
class Notebook:
    "One chapter as it lies on disk."
    path: Path
    title: str = ""
    summary: str = ""
    module: str = ""
    text: str = ""                       # all markdown cells
    code: str = ""                       # all code cells
    labels: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.path.stem


@dataclass
class Cell:
    "One code cell: what it says of itself, and how a page shows it."
    source: str                 # without the directives
    directives: dict[str, str]
    outputs: list
    place: str                  # "", "solution" or "closer": which box
    index: int                  # among all cells of the notebook

    def has(self, name: str) -> bool:
        return self.directives.get(name, "false").lower() not in OFF

    @property
    def claim(self) -> str:
        "What a ✓ says, or nothing."
        return self.directives.get("verified", "")

    @property
    def shown(self) -> str:
        "removed, solution, verified, folded or visible: the code."
        said = self.directives
        if {"hide", "default_exp", "hide_input"} & {*said} or (
                said.get("echo", "").lower() in OFF) or not self.source:
            return "removed"
        if self.place == "solution" or self.claim:
            return self.place or "verified"
        private = "exporti" in said and (
            said.get("code-fold", "").lower() not in OFF
            or "code-fold" not in said)
        folded = private or self.has("code-fold") or self.place
        return "folded" if folded else "visible"

    @property
    def lines(self) -> int:
        return len([line for line in self.source.splitlines()
                    if line.strip()])

    @property
    def html(self) -> str:
        "What it shows as HTML."
        found = [out.get("data", {}).get("text/html", "")
                 for out in self.outputs]
        return "".join(x if isinstance(x, str) else "".join(x)
                       for x in found)


def directives(text: str) -> tuple[dict[str, str], str]:
    "The ``#|`` lines at the head of a cell, and what follows them."
    lines, said = text.splitlines(keepends=True), {}
    for line in lines:
        found = DIRECTIVE.match(line)
        if not found:
            break
        said[found["name"]] = found["arg"] or "true"
    return said, "".join(lines[len(said):]).strip("\n")


def code_cells(cells: list[dict]) -> list[Cell]:
    "The code cells of a notebook, each with the box in which it stands."
    out, boxes = [], []
    for index, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            said, rest = directives(source(cell))
            place = "solution" if "solution" in boxes else "".join(
                boxes[-1:])
            out.append(Cell(rest, said, cell.get("outputs", []), place,
                            index))
            continue
        for name, side in GATE.findall(source(cell)):
            if side == "start":
                boxes.append(name)
            elif name in boxes:
                boxes.remove(name)
    return out


@dataclass
class Measure:
    "How much a chapter asks of its reader."
    words: int
    visible: int                # lines of code
    folded: int
    figures: int                # steppers included
    claims: list[str]           # one for each ✓
    exercises: int              # minutes

    @property
    def minutes(self) -> float:
        return self.words / WORDS + self.visible / LINES


WORDS, LINES = 150, 12           # read in a minute: prose, code


def measure(path: Path, text: str | None = None) -> Measure:
    "Words, lines, figures and ✓ of one notebook."
    cells = json.loads(
        Path(path).read_text(encoding="utf-8") if text is None
        else text)["cells"]
    prose = "\n\n".join(source(c) for c in cells
                        if c["cell_type"] == "markdown")
    code = code_cells(cells)
    lines = {kind: sum(c.lines for c in code if c.shown == kind)
             for kind in ("visible", "folded")}
    return Measure(
        words=len(re.findall(r"\S*\w\S*", CUT.sub(" ", prose))), **lines,
        figures=sum(len(DRAWN.findall(c.html)) for c in code),
        claims=[c.claim for c in code if c.claim],
        exercises=sum(map(int, MINUTES.findall(prose))))


def files_in(toc: dict) -> Iterator[str]:
    "Documents of a jb-book table of contents, in order of reading."
    if "root" in toc:
        yield toc["root"]
    if "file" in toc:
        yield toc["file"]
    for key in ("parts", "chapters", "sections"):
        for item in toc.get(key, ()):
            yield from files_in(item)


def source(cell: dict) -> str:
    text = cell["source"]
    return text if isinstance(text, str) else "".join(text)


def lines_outside_fences(text: str) -> Iterator[tuple[str, bool]]:
    "Each line, and whether it is text (not code, not inside a directive)."
    fence = None
    for line in text.splitlines():
        m = FENCE.match(line)
        if fence is None and m:
            fence = m[1]
            yield line, False
        elif fence is not None:
            closes = m and line.strip() == m[1] and m[1][0] == fence[0]
            if closes and len(m[1]) >= len(fence):
                fence = None
            yield line, False
        else:
            yield line, True


def read_notebook(path: Path, text: str | None = None) -> Notebook:
    "Title, summary, module, text, code and labels of one notebook."
    path = Path(path)
    nb = json.loads(path.read_text(encoding="utf-8") if text is None else text)
    cells = nb["cells"]
    md = "\n\n".join(source(c) for c in cells if c["cell_type"] == "markdown")
    code = "\n\n".join(source(c) for c in cells if c["cell_type"] == "code")
    found = Notebook(path=path, text=md, code=code)
    for line, is_text in lines_outside_fences(md):
        head, label = HEADING.match(line), LABEL.match(line)
        if not is_text:
            continue
        if label:
            found.labels.append(label[1])
        elif head and len(head[1]) == 1 and not found.title:
            found.title = head[2]
        elif line.startswith("> ") and found.title and not found.summary:
            found.summary = line[2:].strip()
    module = DEFAULT_EXP.search(code)
    found.module = module[1] if module else ""
    return found


def notebooks(root: Path) -> list[Notebook]:
    "The notebooks of the table of contents, in order of reading."
    toc = yaml.safe_load((Path(root) / "_toc.yml").read_text(encoding="utf-8"))
    paths = [Path(root) / f"{doc}.ipynb" for doc in files_in(toc)]
    return [read_notebook(p) for p in paths if p.exists()]


def section(text: str, title: str) -> str:
    "Body of the first section of that title, its labels left out."
    body, depth = [], None
    for line, is_text in lines_outside_fences(text):
        head = HEADING.match(line) if is_text else None
        if head and depth is not None and len(head[1]) <= depth:
            break
        if head and depth is None and head[2].lower() == title.lower():
            depth = len(head[1])
        elif depth is not None and not (is_text and LABEL.match(line)):
            body.append(line)
    return "\n".join(body).strip()


def plain(text: str) -> str:
    "Markdown of one line as plain text, for attributes and descriptions."
    text = re.sub(r"\{[\w:]+\}`([^`<]*?)(?:\s*<[^>]*>)?`", r"\1", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[`*$\\]", "", text).strip()


def as_rst(comment: str) -> str:
    "A comment of the code as reStructuredText: code as code, no markup."
    parts = re.split(r"(`[^`]*`)", " ".join(comment.split()))
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([\\|*])|_(?!\w)", r"\\\g<0>", parts[i])
    return "".join(parts)
