"""What stands on the pages of a built site, of which each is read once."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache

from lxml import etree, html

WHOLE = re.compile(r"\s*(https?:)?//", re.I)  # an address with its host


def xpath(path):
    "Return a function that finds plain strings, or elements, in a page."
    return etree.XPath(path, smart_strings=False)


IDS = xpath("//@id[. != '']")
CLASSES = xpath("//@class")
LINKS = xpath("//*[not(self::base)]/@*[name() = 'href' or name() = 'src'][. != '']")
# the address of a namespace names no page
ADDRESSES = xpath("//@*[contains(., '//') and not(starts-with(name(), 'xmlns'))]")
SIDEBAR = xpath("//nav[contains(concat(' ', @class, ' '), ' bd-links ')]//@href")
HEADINGS = xpath(
    "//*[self::h1 or self::h2 or self::h3 or self::h4 or self::h5"
    " or self::h6 or self::nav[starts-with(@id, 'pst-page-toc')]]"
)
PROSE = xpath(".//text()[not(ancestor::code)]")
LABELS = xpath("//summary")


@dataclass(frozen=True)
class Reading:
    "What one page says, and what it leads to."

    source: bytes
    shown: str  # all text, except that of scripts
    headings: list[str]  # and the list of them beside the text, all without code
    comments: list[str]
    ids: Counter[str]
    classes: Counter[str]  # whole values of the attribute
    links: list[str]  # except where the site's root is
    addresses: list[str]  # with a host, of all attributes
    meta: dict[str, str]  # what it tells to machines
    sidebar: list[str]  # its links
    labels: list[str]  # of what can be unfolded


def read_source(source):
    "Return the reading of a page that is given as bytes."
    parser = html.HTMLParser(encoding="utf-8", huge_tree=True)
    tree = html.document_fromstring(source, parser=parser)
    meta = {
        element.get("property") or element.get("name"): element.get("content")
        for element in tree.iter("meta")
    }
    for element in tree.iter("link"):
        if element.get("rel") == "canonical":
            meta["canonical"] = element.get("href")
    found = {
        "headings": ["".join(PROSE(heading)) for heading in HEADINGS(tree)],
        "comments": [comment.text.strip() for comment in tree.iter(etree.Comment)],
        "ids": Counter(IDS(tree)),
        "classes": Counter(CLASSES(tree)),
        "links": LINKS(tree),
        "addresses": [value.strip() for value in ADDRESSES(tree) if WHOLE.match(value)],
        "sidebar": SIDEBAR(tree),
        "labels": [label.text_content().strip() for label in LABELS(tree)],
    }
    etree.strip_elements(tree, "script", with_tail=False)
    shown = etree.tostring(tree, method="text", encoding="unicode")
    return Reading(source=source, shown=shown, meta=meta, **found)


@cache
def _read_version(path, time):
    return read_source(path.read_bytes())


def read(path):
    "Return the reading of a page, which is made anew when its file has changed."
    return _read_version(path, path.stat().st_mtime_ns)


def site(book):
    "Return the paths of all pages: those of the index, the sources and the search too."
    return sorted(book.rglob("*.html"))


def place(book, page):
    "Return the address of a page in the site."
    return page.relative_to(book).as_posix()


def with_class(reading, *words):
    "Count the elements of a page that have all these classes."
    return sum(
        count
        for value, count in reading.classes.items()
        if {*words} <= {*value.split()}
    )
