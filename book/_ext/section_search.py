"""Search the book by its sections, in the browser and from a file.

While a page is written, its sections are read from the finished HTML: their titles, the
words that a reader sees, and what cells print. Code, drawings and buttons are left out.
At the end they all go into ``_static/search-sections.js``, which the search page loads,
so that no result needs another page. ``search.js`` ranks them with MiniSearch. The
glossary says which sections explain a term, and these stand first when somebody looks
for the term or for another name of it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import dirname, normpath

from lxml.html import fromstring

# what no reader reads as text
SKIPPED_TAGS = {"svg", "script", "style", "button", "select", "noscript"}
SKIPPED = {"headerlink", "cell_input", "linenos", "tf-machine", "toctree-wrapper"}
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
TEX = (
    (re.compile(r"\\[()\[\]]|\\(?:left|right|displaystyle)|\\[,;!]"), ""),
    (re.compile(r"\\(?:begin|end)\{\w+\*?\}|\\\\|&"), " "),
    (re.compile(r"\\sqrt"), "√"),
    (re.compile(r"\\(?:le|leq)\b"), "≤"),
    (re.compile(r"\\(?:ge|geq)\b"), "≥"),
    (re.compile(r"\\(?:cdot|times)\b"), "·"),
    (re.compile(r"\\[lr]floor\b"), ""),
    (re.compile(r"\\(?:mathrm|mathbf|operatorname|text|hat|tilde|bar)\b"), ""),
    (re.compile(r"\\([A-Za-z]+)"), r"\1 "),
    (re.compile(r"[{}$]"), ""),
)
KINDS = (
    ("lesson", re.compile(r"nbs/\d")),
    ("appendix", re.compile(r"nbs/[^/]+$")),
    ("package", re.compile(r"nbs/package/|book/rooms")),
    ("name", re.compile(r"book/api$")),
    ("list", re.compile(r"book/(bibliography|errata|sources|status)$")),
)
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
    "Return the letters and numbers of a formula."
    for pattern, text in TEX:
        tex = pattern.sub(text, tex)
    return f" {tex} "


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

    def __init__(self):
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
        if tag in SKIPPED_TAGS or classes & SKIPPED:
            return
        if tag == "dl" and classes & {"glossary", "py"}:
            self.read_names(element, into)
            return
        if tag in HEADS and self.around and not self.around[-1].titles:
            self.around[-1].titles.append(text_of(element))
            return
        if "math" in classes and self.around:
            getattr(self.around[-1], into).append(spoken(element.text_content()))
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
    reader = Reader()
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


def resolve(sections: list[dict]) -> None:
    "Let terms name the sections that explain them, in place of labels inside."
    home = {}
    for entry in sections:
        page = entry["url"].partition("#")[0]
        for anchor in (entry["url"], *(f"{page}#{a}" for a in entry.pop("anchors"))):
            home[anchor] = entry["url"]
    for entry in sections:
        if "explained" in entry:
            entry["explained"] = [home[u] for u in entry["explained"] if u in home]


def write_sections(app, exception):
    "Write the sections of all pages into one script."
    if exception is not None or app.builder.format != "html":
        return
    sections = []
    for page in sorted(app.env.found_docs):
        path = folder(app) / f"{page}.json"
        if path.exists():
            sections += json.loads(path.read_text(encoding="utf-8"))
    resolve(sections)
    text = json.dumps(sections, ensure_ascii=False, separators=(",", ":"))
    out = Path(app.outdir) / "_static" / "search-sections.js"
    out.write_text(f"window.SEARCH_SECTIONS={text};\n", encoding="utf-8")


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
