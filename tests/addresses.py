"""The whole addresses on a built site: whose they are, and where they lead."""

import re
from urllib.parse import parse_qs, unquote, urldefrag, urlsplit
from xml.etree import ElementTree

import yaml

import course  # book/_ext, where the conftest of the root looks
from built_pages import place, read, site
from conftest import ROOT
from site_address import book_url, repository_url

# hosts beside those of the bibliography and of intersphinx, with what is there
HOSTS = {
    "docs.python.org": "types of the standard library",
    "numpy.org": "types of NumPy",
    "docs.astral.sh": "ruff",
    "www.tensorflow.org": "how WordPiece is taught there",
    "ssydasheng.github.io": "a document from which the course grew",
}
# on GitHub, beside works of the bibliography: a tool, and reports of others' mistakes
ON_GITHUB = re.compile(r"/rhysd/actionlint|/[\w-]+/[\w.-]+/(issues|pull)/\d+")
# what only an address that somebody made up contains, by a word of it
MADE_UP = {
    "example.": re.compile(r"example\.(?:org|com)\b"),
    "OWNER": re.compile(r"\bOWNER(?:/|\.github|@)"),
}
# and where the repository has no owner
OF_NO_OWNER = {
    ".github.io/tformer": re.compile(r"\.github\.io/tformer"),
    "github.com/": re.compile(r"github\.com/[\w-]+/tformer\b"),
}


def map_addresses(book):
    "The addresses on the map of the site; none where there is no map."
    path = book / "sitemap.xml"
    return (
        [e.text for e in ElementTree.parse(path).iter() if e.tag.endswith("loc")]
        if path.exists()
        else []
    )


def own_prefixes(owner):
    "How the addresses begin that are the owner's."
    if not owner:
        return ()
    return (
        book_url(owner),
        repository_url(owner),
        f"https://colab.research.google.com/github/{owner}/tformer/",
        f"https://mybinder.org/v2/gh/{owner}/tformer/",
    )


def cited():
    "Hosts and whole addresses that are the works' that the book cites."
    works = re.findall(
        r"https?://[^\s{},]+",
        (ROOT / "book" / "references.bib").read_text(encoding="utf-8"),
    )
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    libraries = config["sphinx"]["config"]["intersphinx_mapping"].values()
    hosts = {
        urlsplit(address).netloc
        for address in [*works, *(address for address, _ in libraries)]
    }
    return (hosts - {"github.com"}) | {*HOSTS}, {*works}


def foreign_addresses(book, owner):
    "Whole addresses that are neither the owner's nor those of a cited work."
    hosts, works = cited()
    own = own_prefixes(owner)
    listed = [("sitemap.xml", address) for address in map_addresses(book)]
    for page in site(book):
        listed += [(place(book, page), address) for address in read(page).addresses]
    faults = []
    for where, address in listed:
        parts = urlsplit(address)
        if not (
            address.startswith(own)
            or parts.netloc in hosts
            or urldefrag(address)[0] in works
            or (parts.netloc == "github.com" and ON_GITHUB.fullmatch(parts.path))
        ):
            faults.append(f"{where}: {address}")
    # what is no link: text, downloads, the words of the search
    made_up = MADE_UP if owner else MADE_UP | OF_NO_OWNER
    for path in sorted(book.rglob("*")):
        if (
            path.suffix not in {".html", ".js", ".xml", ".ipynb", ".md"}
            or "_static" in path.relative_to(book).parts
        ):
            continue
        text = path.read_text(encoding="utf-8")
        faults += [
            f"{place(book, path)}: {found[0]}"
            for word, pattern in made_up.items()
            if word in text  # which is quickly seen
            for found in pattern.finditer(text)
        ]
    return faults


def own_address_faults(book, owner):
    "Pages whose own address, tags for sharing or line on the map are wrong."
    faults = []
    for page in course.page_paths(book):
        where = place(book, page)
        meta = read(page).meta
        own = {
            key: value
            for key, value in meta.items()
            if key and key.startswith(("og:", "twitter:", "canonical"))
        }
        if not owner:
            faults += [f"{where}: {key}" for key in own]
            continue
        wanted = {
            "canonical": book_url(owner) + where,
            "og:url": book_url(owner) + where,
            "og:site_name": "The Verified Transformer",
            "og:image": f"{book_url(owner)}_static/card.png",
            "twitter:card": "summary_large_image",
        }
        faults += [
            f"{where}: {key} {own.get(key)}"
            for key, value in wanted.items()
            if own.get(key) != value
        ]
        if "og:description" not in own and where.startswith("nbs/"):
            faults.append(f"{where}: og:description")
    on_map = map_addresses(book)
    listed = (
        {book_url(owner) + place(book, page) for page in course.page_paths(book)}
        if owner
        else set()
    )
    faults += [
        f"sitemap.xml: {address}"
        for address in sorted(listed - {*on_map} if owner else on_map)
    ]
    if (book / "sitemap.xml").exists() != bool(owner):
        faults.append("sitemap.xml")
    return faults


def misleading_addresses(book, root, owner):
    "Addresses of the owner that name no page of the site, or no file of the tree."
    faults = []
    listed = {(address, "sitemap.xml") for address in map_addresses(book)}
    for page in site(book):
        listed |= {(address, place(book, page)) for address in read(page).addresses}
    for address, where in sorted(listed):
        if not address.startswith(own_prefixes(owner)):
            continue
        parts = urlsplit(address)
        query = parse_qs(parts.query)
        path = unquote(parts.path)
        if address.startswith(book_url(owner)):
            target = book / unquote(address.removeprefix(book_url(owner)))
        elif "urlpath" in query:  # Binder
            target = root / query["urlpath"][0].removeprefix("lab/tree/")
        elif path.endswith("/issues/new"):
            named = re.fullmatch(r"Issue on page /(\S+\.html)", query["title"][0])
            target = book / named[1] if named else None
        elif found := re.search("/tformer/(?:blob|edit)/main/(.+)", path):
            target = root / found[1]
        else:
            target = root if address == repository_url(owner) else None
        if target is None or not (target.is_file() or target == root):
            faults.append(f"{where}: {address}")
    return faults
