"""Search the book by its sections, in the browser and from a file.

While a page is written, its sections are read from the finished HTML: their titles, the
words that a reader sees, and what cells print. Code, drawings, buttons, formulas with
fractions or sums, and the options of a question are left out, for most options are
wrong. At the end they go into two scripts: ``_static/search-titles.js`` has what a
result says of itself, ``_static/search-texts.js`` what is searched besides, compressed.
``search.js`` ranks them with MiniSearch. The glossary says which sections explain a
term, and these stand first when somebody looks for the term or for another name of it;
``ASKED`` does the same for what is no term.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import dirname, normpath

from lxml.html import fromstring

# what no reader reads as text
SKIPPED_TAGS = {"svg", "script", "style", "button", "select", "noscript"}
SKIPPED = {
    "headerlink",
    "cell_input",
    "linenos",
    "tf-machine",
    "toctree-wrapper",
    "tf-options",
    "tf-route",
    "tf-start",
    "tf-way",
    "tf-letters",
}
SKIPPED_ON = {"book/status": frozenset({"tf-closer"})}  # the claims of the lessons
HEADS = {"h1", "h2", "h3", "h4", "h5", "h6"}
BLOCKS = {
    "p",
    "li",
    "dd",
    "dt",
    "td",
    "th",
    "tr",
    "pre",
    "div",
    "summary",
    "figcaption",
}
# of formulas: signs that are letters, and what changes nothing that is read
LETTERS = dict(
    zip(
        "alpha beta gamma delta epsilon eta theta lambda mu pi rho sigma tau phi omega"
        " Delta Sigma ell sqrt le leq ge geq cdot times approx neq pm in to infty"
        " top".split(),
        "αβγδεηθλμπρστφωΔΣℓ√≤≤≥≥··≈≠±∈→∞T",
        strict=True,
    )
)
TEX = (
    (re.compile(r"\\[()\[\],;!]|\\(?:left|right|displaystyle)(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:mathrm|mathbf|mathbb|operatorname|text)\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\(log|exp|max|min|cos|sin|tanh)(?![A-Za-z])"), r"\1 "),
    (re.compile(r"\\([A-Za-z]+)"), lambda m: LETTERS.get(m[1], m[0])),
    (re.compile(r"([_^])\{([A-Za-z0-9,+−-]+)\}"), r"\1\2"),
    (re.compile(r"√\{(\w+)\}"), r"√\1"),
)
UNREAD = re.compile(r"[\\{}&]")  # what a reader of plain text cannot read
LEFT_OUT = "…"  # a formula
LONGEST_NAME = 240  # letters of what is said of a name of the package
KINDS = (
    ("lesson", re.compile(r"nbs/\d")),
    ("appendix", re.compile(r"nbs/[^/]+$")),
    ("package", re.compile(r"nbs/package/|book/rooms")),
    ("name", re.compile(r"book/api$")),
    ("list", re.compile(r"book/(bibliography|errata|sources|status)$")),
)
# What somebody looks for under a name that the book does not use, and the labels of
# the sections that answer it: they stand first.
ASKED = {
    "ch14-training": "6ND, 6PT, 6NT, 6 N D, 6N FLOPs per token, training FLOPs",
    "ch14-forward": "6N, 6P, 2N, 2P, FLOPs per token",
    "ch12-count": "124M, 124 million, GPT-2 small, number of parameters",
    "ch16-units": "ppl, perplexity vs bits per byte",
    "nbs/package/nn/quantized": "8 bit weights, int8, int8 weights, 4 bit weights",
    "ch07-heads-learn": "what does a head do, what do heads do, attention heads",
    "ch00-fit": "how does it learn, how does a model learn, how does training work",
    "ch01-why-scale": "why divide by square root, square root of d, divide by sqrt dk",
    "book/intro": "ChatGPT, chat GPT, LLM, large language model",
    "nbs/package/costs": "MoE, mixture of experts",
}
# pages of other pages' sentences, and pages without any
NO_TEXT = re.compile(
    r"_modules/|(?:^|/)(?:chapters|takeaways|genindex|py-modindex|search|404)$"
)


@dataclass
class Section:
    "A part of a page that has an address: a section, a name or a term."

    id: str
    titles: list[str] = field(default_factory=list)
    kind: str = ""  # if it is not that of its page
    words: list[str] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    anchors: list[str] = field(default_factory=list)  # labels that stand in it


def spoken(tex: str) -> str:
    "Return a formula as plain text, or a sign where that cannot be read."
    for pattern, text in TEX:
        tex = pattern.sub(text, tex)
    return f" {LEFT_OUT if UNREAD.search(tex) else tex} "


def text_of(element) -> str:
    "Return the words of a heading or a term, without the sign that links to it."
    texts = [element.text or ""]
    for child in element:
        if "headerlink" not in child.get("class", ""):
            texts.append(child.text_content())
        texts.append(child.tail or "")
    return " ".join("".join(texts).split())


def title_of_work(citation) -> str:
    "Return the title of a work: what follows its authors, up to the next full stop."
    text = " ".join(citation.find("p").text_content().split())
    # no author ends with a single letter; a title may end with a question mark
    found = re.search(r"(?<![ .-][^\W\d_])\. (.+?[.?!])(?= (?:[A-Z(\d]|$))", text)
    return found[1].rstrip(".") if found else text


class Reader:
    """Collect the sections of a page.

    What stands in a section belongs to it alone and not to the section around it. In a
    list of names, terms or works, each of them with what is said of it is a section.
    """

    def __init__(self, skipped: frozenset[str] = frozenset()):
        self.skipped = SKIPPED | skipped
        self.sections: list[Section] = []
        self.around: list[Section] = []

    def begin(self, name: str, titles: list[str], kind: str = "") -> None:
        self.sections.append(Section(name, titles, kind))
        self.around.append(self.sections[-1])

    def read(self, element, into: str = "words") -> None:
        "Read an element and what follows it in its parent."
        if isinstance(element.tag, str):
            self.read_inside(element, into)
        if element.tail and self.around:
            getattr(self.around[-1], into).append(element.tail)

    def read_inside(self, element, into: str) -> None:
        tag, classes = element.tag, set(element.get("class", "").split())
        if tag in SKIPPED_TAGS or classes & self.skipped:
            return
        if tag == "dl" and classes & {"glossary", "py"}:
            self.read_names(element, into)
            return
        if tag in HEADS and self.around and not self.around[-1].titles:
            self.around[-1].titles.append(text_of(element))
            return
        if "math" in classes and self.around:
            tex = " ".join(element.xpath("text()"))  # without the number beside it
            getattr(self.around[-1], into).append(spoken(tex))
            return
        opened = (
            element.get("id") if tag == "section" or "citation" in classes else None
        )
        if opened and "citation" in classes:
            self.begin(opened, [title_of_work(element)], "work")
        elif opened:
            self.begin(opened, [])
        elif element.get("id") and self.around:
            self.around[-1].anchors.append(element.get("id"))
        if tag == "a" and "internal" in classes and self.around:
            self.around[-1].links.append(element.get("href", ""))
        if "cell_output" in classes:
            into = "printed"
        self.read_children(element, into)
        if opened:
            self.around.pop()
        elif tag in BLOCKS and self.around:
            getattr(self.around[-1], into).append(" ")

    def read_children(self, element, into: str) -> None:
        if element.text and self.around:
            getattr(self.around[-1], into).append(element.text)
        for child in element:
            self.read(child, into)

    def read_names(self, names, into: str) -> None:
        "Read a list in which each name is followed by what is said of it."
        heads = []
        for child in names:
            if child.tag == "dt":
                heads.append(child)
                continue
            named = [head for head in heads if head.get("id")]
            if named:
                is_term = named[0].get("id").startswith("term-")
                titles = [text_of(h) if is_term else h.get("id") for h in named]
                self.begin(named[0].get("id"), titles)
            self.read_children(child, into)
            if named:
                self.around.pop()
            heads = []


def spaced(texts: list[str]) -> str:
    return " ".join("".join(texts).split())


def kind_of(page: str) -> str:
    "Return the kind of a page, by which it is ranked."
    return next((kind for kind, name in KINDS if name.match(page)), "page")


def read_sections(page: str, body: str) -> list[dict]:
    "Return what the search knows of the sections of a page, in their order."
    reader = Reader(SKIPPED_ON.get(page, frozenset()))
    reader.read(fromstring(f"<div>{body}</div>"))
    found = []
    for section in reader.sections:
        titles = section.titles
        if not titles:
            continue
        entry = {
            "url": f"{page}.html#{section.id}",
            "title": titles[0],
            "text": spaced(section.words),
            "printed": spaced(section.printed),
            "kind": section.kind or kind_of(page),
            "anchors": section.anchors,
        }
        if section.id.startswith("term-"):
            entry["kind"] = "term"
            entry["names"] = titles
            entry["explained"] = [
                normpath(f"{dirname(page)}/{link}")
                for link in section.links
                if "#" in link and not link.startswith("#")
            ]
        if entry["kind"] == "name" and len(entry["text"]) > LONGEST_NAME:
            entry["text"] = entry["text"][:LONGEST_NAME].rsplit(" ", 1)[0] + " …"
        found.append(entry)
    for entry in found:
        entry["page"] = found[0]["title"]
    return found


def folder(app) -> Path:
    "Return where the sections of each page wait until all are written."
    return Path(app.doctreedir).parent / ".search"


def on_page(app, page, template, context, doctree):
    "Read the finished text of a page."
    body = context.get("body")
    if body and not NO_TEXT.search(page):
        path = folder(app) / f"{page}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(read_sections(page, body), ensure_ascii=False)
        path.write_text(text, encoding="utf-8")


def resolve(sections: list[dict]) -> dict[str, list[str]]:
    """Let terms name the sections that explain them, in place of labels inside.

    Return the sections that answer what is asked under other names.
    """
    home, labels = {}, {}
    for entry in sections:
        page = entry["url"].partition("#")[0]
        labels.setdefault(page.removesuffix(".html"), entry["url"])
        for anchor in (entry["url"].partition("#")[2], *entry.pop("anchors")):
            home[f"{page}#{anchor}"] = entry["url"]
            labels.setdefault(anchor, entry["url"])
    for entry in sections:
        if "explained" in entry:
            entry["explained"] = [home[u] for u in entry["explained"] if u in home]
    asked: dict[str, list[str]] = {}
    for label, names in ASKED.items():
        for name in names.split(", "):
            if label in labels:
                asked.setdefault(name, []).append(labels[label])
    return asked


def titles(sections: list[dict], asked: dict[str, list[str]]) -> str:
    "Return a script with what a result says of itself, each page named once."
    pages: dict[str, int] = {}
    rows = []
    number = {entry["url"]: i for i, entry in enumerate(sections)}
    for entry in sections:
        address, _, anchor = entry["url"].partition("#")
        page = pages.setdefault(f"{address}|{entry['page']}", len(pages))
        row = [page, anchor, entry["title"], entry["kind"]]
        if "names" in entry:
            explained = [number[url] for url in entry["explained"]]
            row += [entry["names"], explained]
        rows.append(row)
    data = {
        "pages": [page.split("|", 1) for page in pages],
        "sections": rows,
        "asked": {name: [number[u] for u in urls] for name, urls in asked.items()},
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"window.SEARCH_TITLES={text};\n"


def texts(sections: list[dict]) -> str:
    "Return a script with the texts, compressed, in letters that a script can hold."
    rows = [[entry["text"], entry["printed"]] for entry in sections]
    text = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
    packed = base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
    return f'window.SEARCH_TEXTS="{packed}";dispatchEvent(new Event("search-texts"));\n'


def write_scripts(sections: list[dict], asked: dict, static: Path) -> None:
    "Write both scripts into the folder of the site's own files."
    for name, text in (
        ("titles", titles(sections, asked)),
        ("texts", texts(sections)),
    ):
        (static / f"search-{name}.js").write_text(text, encoding="utf-8")


def write_sections(app, exception):
    "Write the sections of all pages into the scripts of the search."
    if exception is not None or app.builder.format != "html":
        return
    sections = []
    for page in sorted(app.env.found_docs):
        path = folder(app) / f"{page}.json"
        if path.exists():
            sections += json.loads(path.read_text(encoding="utf-8"))
    write_scripts(sections, resolve(sections), Path(app.outdir) / "_static")


def leave_sphinx_out(app):
    "Build no index of words: nothing reads it."
    app.builder.search = False


def search_page(app):
    yield "search", {"title": "Search"}, "search.html"


def setup(app):
    app.connect("builder-inited", leave_sphinx_out)
    app.connect("html-collect-pages", search_page)
    app.connect("html-page-context", on_page, priority=950)
    app.connect("build-finished", write_sections)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
