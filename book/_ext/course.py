"""What the extensions, the tests and make know of the course: where its
notebooks, pages and modules are, and what stands in each notebook.

A notebook is known by its document name, which is its path below ``nbs/``
without the suffix: ``00_tour``, ``package/nn/attention``. A module is known by
its dotted name below the package: ``functional``, ``nn.attention``. No Sphinx here;
standard library, and PyYAML for the table of contents. As a program::

    python book/_ext/course.py notebooks [NAME …]   prints paths of notebooks
    python book/_ext/course.py modules              prints names of modules

A NAME is a document name, its last part, or the number at its beginning.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

HEADING = re.compile(r"^(#{1,6})\s+(.*?)\s*#*\s*$")
FENCE = re.compile(r"^\s*(`{3,}|~{3,}|:{3,})")
LABEL = re.compile(r"^\(([\w.:-]+)\)=\s*$")
DEFAULT_EXP = re.compile(r"^#\s*\|\s*default_exp\s+(\S+)\s*$", re.MULTILINE)
MINUTES = re.compile(r"\{exercise(?:-start)?\}[^\n]*?\((\d+) min")
DIRECTIVE = re.compile(r"^\s*#\s*\|\s*(?P<name>[\w-]+)\s*:?\s*(?P<arg>.*?)\s*$")
# a line for IPython or the shell, which is no Python
MAGIC = re.compile(r"^(\s*)[%!](?=[A-Za-z%]).*$", re.MULTILINE)
GATE = re.compile(r"\{(solution|closer|more)-(start|end)\}")
OFF = {"false", "no", "off"}
DRAWN = re.compile(r'class="tf-(?:plate|stepper)\b')
LINK = re.compile(r"\]\((?!#|[a-z]+:|/)([^)\s]+)\)")  # a relative one
CUT = re.compile(  # of markdown: what is not read as words
    r"^\s*(?:`{3,}|:{3,}).*$|^\([\w.:-]+\)=$|^:\w+:.*$|\]\([^)\s]*\)", re.MULTILINE
)


# of a module, the notebook from which nbdev exported it
EXPORTED_FROM = re.compile(r"File to edit: (?:\.\./)+nbs/(\S+)\.ipynb")
NUMBER = re.compile(r"[A-Z]?\d+[a-z]?")  # of a lesson or an appendix


# --- where notebooks, pages and modules are


def notebook_paths(root: Path) -> list[Path]:
    "Every notebook below ``nbs/``, in every folder."
    return sorted(
        path
        for path in (Path(root) / "nbs").rglob("*.ipynb")
        if ".ipynb_checkpoints" not in path.parts
    )


def document_name(root: Path, path: Path) -> str:
    "The path of a notebook below ``nbs/``, without its suffix."
    below = Path(path).relative_to(Path(root) / "nbs")
    return below.with_suffix("").as_posix()


def document_names(root: Path) -> list[str]:
    "Those of every notebook."
    return [document_name(root, path) for path in notebook_paths(root)]


def notebook_path(root: Path, name: str) -> Path:
    "Where the notebook of this document name is, or would be."
    return Path(root) / "nbs" / f"{name}.ipynb"


def page_paths(html: Path) -> list[Path]:
    "The pages that were built from the book's own texts and notebooks."
    return sorted(
        path
        for folder in ("book", "nbs")
        for path in (Path(html) / folder).rglob("*.html")
    )


def module_paths(root: Path) -> list[Path]:
    "Every exported module of the package, in every folder."
    return sorted(
        path
        for path in (Path(root) / "tformer").rglob("*.py")
        if path.name not in ("__init__.py", "_modidx.py")
    )


def module_name(root: Path, path: Path) -> str:
    "The dotted name of a module below the package."
    below = Path(path).relative_to(Path(root) / "tformer")
    return ".".join(below.with_suffix("").parts)


def module_names(root: Path) -> list[str]:
    "Those of every exported module."
    return [module_name(root, path) for path in module_paths(root)]


def module_path(root: Path, name: str) -> Path:
    "Where the module of this dotted name is, or would be."
    return Path(root, "tformer", *name.split(".")).with_suffix(".py")


def exported_from(text: str) -> str:
    "The document name of the notebook that a module's text names, or nothing."
    found = EXPORTED_FROM.search(text)
    return found[1] if found else ""


def find(documents: list[str], name: str) -> list[str]:
    "The document of that name, else those with that last part or number."
    if name in documents:
        return [name]
    last = {document: document.rpartition("/")[2] for document in documents}
    found = [document for document in documents if last[document] == name]
    if not found and NUMBER.fullmatch(name):
        found = [
            document
            for document in documents
            if last[document].partition("_")[0] == name
        ]
    if not found:
        raise ValueError(f"no notebook has the name {name!r}")
    return found


def select(documents: list[str], names: list[str]) -> list[str]:
    "The documents that are named, all where no name is given."
    chosen = {document for name in names for document in find(documents, name)}
    return [document for document in documents if document in chosen or not names]


def relink(text: str, folder: str) -> str:
    "Markdown whose links were relative to a folder, which is named from here."
    return LINK.sub(
        lambda m: "](" + posixpath.normpath(posixpath.join(folder, m[1])) + ")", text
    )


def way_to_root(document: str) -> str:
    "From the folder of a document to ``nbs/``: nothing, or ``../../``."
    return "../" * document.count("/")


# --- what stands in a notebook


@dataclass
class Notebook:
    "One notebook as it lies on disk."

    path: Path
    name: str = ""  # of the document: package/nn/attention
    title: str = ""
    summary: str = ""
    module: str = ""
    text: str = ""  # all markdown cells
    code: str = ""  # all code cells
    labels: list[str] = field(default_factory=list)

    @property
    def folder(self) -> str:
        "The folder of its document, from the root of the book."
        return posixpath.dirname(f"nbs/{self.name}")


@dataclass
class Cell:
    "One code cell: what it says of itself, and how a page shows it."

    source: str  # without the directives
    directives: dict[str, str]
    outputs: list
    place: str  # "", "solution", "closer" or "more": which box
    index: int  # among all cells of the notebook

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
        if (
            {"hide", "default_exp", "hide_input"} & {*said}
            or (said.get("echo", "").lower() in OFF)
            or not self.source
        ):
            return "removed"
        if self.place == "solution" or self.claim:
            return self.place or "verified"
        private = "exporti" in said and (
            said.get("code-fold", "").lower() not in OFF or "code-fold" not in said
        )
        folded = private or self.has("code-fold") or self.has("setup") or self.place
        return "folded" if folded else "visible"

    @property
    def lines(self) -> int:
        return len([line for line in self.source.splitlines() if line.strip()])

    @property
    def html(self) -> str:
        "What it shows as HTML."
        found = [out.get("data", {}).get("text/html", "") for out in self.outputs]
        return "".join(x if isinstance(x, str) else "".join(x) for x in found)


def directives(text: str) -> tuple[dict[str, str], str]:
    "The ``#|`` lines at the head of a cell, and what follows them."
    lines = text.splitlines(keepends=True)
    said = {}
    for line in lines:
        found = DIRECTIVE.match(line)
        if not found:
            break
        said[found["name"]] = found["arg"] or "true"
    return said, "".join(lines[len(said) :]).strip("\n")


def code_cells(cells: list[dict]) -> list[Cell]:
    "The code cells of a notebook, each with the box in which it stands."
    out = []
    boxes = []
    for index, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            said, rest = directives(source(cell))
            place = "solution" if "solution" in boxes else "".join(boxes[-1:])
            out.append(Cell(rest, said, cell.get("outputs", []), place, index))
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
    visible: int  # lines of code
    folded: int
    figures: int  # steppers included
    claims: list[str]  # one for each ✓
    exercises: int  # minutes

    @property
    def minutes(self) -> float:
        return self.words / WORDS + self.visible / LINES


# read in a minute: prose, code
WORDS = 150
LINES = 15


def measure(path: Path, text: str | None = None) -> Measure:
    "Words, lines, figures and ✓ of one notebook."
    cells = json.loads(
        Path(path).read_text(encoding="utf-8") if text is None else text
    )["cells"]
    prose = "\n\n".join(source(c) for c in cells if c["cell_type"] == "markdown")
    code = code_cells(cells)
    lines = {
        kind: sum(c.lines for c in code if c.shown == kind)
        for kind in ("visible", "folded")
    }
    return Measure(
        words=len(re.findall(r"\S*\w\S*", CUT.sub(" ", prose))),
        **lines,
        figures=sum(len(DRAWN.findall(c.html)) for c in code),
        claims=[c.claim for c in code if c.claim],
        exercises=sum(map(int, MINUTES.findall(prose))),
    )


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


def read_notebook(path: Path, text: str | None = None, name: str = "") -> Notebook:
    "Title, summary, module, text, code and labels of one notebook."
    path = Path(path)
    nb = json.loads(path.read_text(encoding="utf-8") if text is None else text)
    cells = nb["cells"]
    md = "\n\n".join(source(c) for c in cells if c["cell_type"] == "markdown")
    code = "\n\n".join(source(c) for c in cells if c["cell_type"] == "code")
    found = Notebook(path=path, name=name, text=md, code=code)
    for line, is_text in lines_outside_fences(md):
        head = HEADING.match(line)
        label = LABEL.match(line)
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
    return [
        read_notebook(notebook_path(root, name), name=name)
        for name in names_in_toc(root)
        if notebook_path(root, name).exists()
    ]


def names_in_toc(root: Path) -> list[str]:
    "Document names of the table of contents, in order of reading."
    import yaml  # what only lists files, as make does, needs no package

    toc = yaml.safe_load((Path(root) / "_toc.yml").read_text(encoding="utf-8"))
    return [
        file.removeprefix("nbs/").removesuffix(".ipynb")
        for file in files_in(toc)
        if file.startswith("nbs/")
    ]


def section(text: str, title: str) -> str:
    "Body of the first section of that title, its labels left out."
    body = []
    depth = None
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


def main(root: Path, said: list[str]) -> int:
    "Print the paths of notebooks, or the names of modules."
    if said == ["modules"]:
        print("\n".join(module_names(root)))
        return 0
    if said[:1] != ["notebooks"]:
        print("course.py notebooks [NAME …], or course.py modules", file=sys.stderr)
        return 2
    try:
        chosen = select(document_names(root), said[1:])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for name in chosen:
        print(notebook_path(root, name).relative_to(root).as_posix())
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[2], sys.argv[1:]))
