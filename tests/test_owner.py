"""The owner of the repository: one setting, which every address follows.

No page leads to an address that nobody has. The project's own book is asked for
that as it is, a small one with an owner in test_subfolders.py, and the whole book
with an owner at night, in a browser.
"""

import json
import re
import runpy
import subprocess
import sys
import time
from types import SimpleNamespace
from urllib.parse import unquote, urldefrag

import pytest
import setuptools

import course  # book/_ext, where the conftest of the root looks
import site_address
import test_book
from addresses import foreign_addresses, misleading_addresses, own_address_faults
from conftest import ROOT, build_book, run
from site_address import book_url, read_owner, repository_url
from test_project import load

NOBODY = "nobody-yet"
OTHER = NOBODY[::-1]  # in no file
SECONDS = 170  # that a browser may take to follow every link


# --- the setting, and the files that follow from it


def owner_of(copy, *args):
    "Run the program that writes the owner, in a copy of the tree."
    return run(sys.executable, ".ci/owner.py", *args, cwd=copy)


@pytest.fixture(scope="module")
def copy(tmp_path_factory, copy_tree):
    "A copy of the project under git."
    copy = copy_tree(tmp_path_factory.mktemp("owner")).resolve()
    run("git", "init", "-q", cwd=copy)
    return copy


def contents(copy):
    return {
        path.relative_to(copy).as_posix(): path.read_bytes()
        for path in sorted(copy.rglob("*"))
        if path.is_file()
        and not {".git", "__pycache__"} & {*path.relative_to(copy).parts}
    }


def test_all_agrees_with_the_setting():
    script = load(ROOT / ".ci" / "owner.py")
    found = [*script.disagreements(read_owner(ROOT))]
    assert not found, found[:10]


def test_an_owner_can_be_set_and_unset(copy):
    before = contents(copy)
    first = read_owner(copy)
    owner_of(copy, "--set", "")
    unset = contents(copy)
    run("make", "owner", f"NAME={OTHER}", cwd=copy)
    middle = contents(copy)
    owner_of(copy, "--check")
    run("make", "owner", f"NAME={NOBODY}", cwd=copy)
    owner_of(copy, "--check")
    after = contents(copy)
    assert {
        name: text.replace(OTHER.encode(), NOBODY.encode())
        for name, text in middle.items()
    } == after
    run("make", "owner", "NAME=", cwd=copy)
    assert contents(copy) == unset
    owner_of(copy, "--set", first)
    assert contents(copy) == before

    changed = {name for name, text in after.items() if text != unset[name]}
    assert {
        "settings.ini",
        "tformer/_modidx.py",
        "CITATION.cff",
        "nbs/00_tour.ipynb",
    } <= changed
    for name in changed:
        assert b"example.org" not in after[name], name
        assert b'%pip install -q \\"tformer' in after[name] or not name.endswith(
            ".ipynb"
        ), name
        assert NOBODY.encode() in after[name], name
        assert NOBODY.encode() not in unset[name], name


def test_of_a_notebook_only_its_cell_for_colab_changes(copy):
    script = load(copy / ".ci" / "owner.py")
    count = 0
    for path in course.notebook_paths(copy):
        text = path.read_text(encoding="utf-8")
        old = json.loads(text)
        new = json.loads(script.write_notebook(text, NOBODY))
        differ = [
            (a, b) for a, b in zip(old["cells"], new["cells"], strict=True) if a != b
        ]
        for a, b in differ:
            assert script.COLAB in "".join(a["source"])
            assert {**a, "source": 0} == {**b, "source": 0}
        assert len(differ) <= 1
        count += len(differ)
    assert count >= 40


@pytest.mark.parametrize(
    "path", course.notebook_paths(ROOT), ids=course.document_names(ROOT)
)
def test_every_notebook_has_a_cell_for_colab(path):
    "Without it the button that opens the notebook there leads to an import error."
    text = path.read_text(encoding="utf-8")
    assert text.count('"if \\"google.colab\\" in sys.modules:\\n"') == 1


def test_a_cell_for_colab_installs_the_package_and_what_else_it_needs():
    script = load(ROOT / ".ci" / "owner.py")
    head = '#| hide\nimport sys\n\nif "google.colab" in sys.modules:\n'
    line = '    %pip install -q "tformer{} @ git+https://github.com/{}/tformer"'
    more = "    %pip install -q transformers"
    told = (
        '    print("Copy a clone of the repository here, and run:")\n'
        "    print('%pip install \"./tformer{}\"')"
    )
    for old, extra, end in (
        (line.format("[plot]", "OWNER"), "[plot]", ""),
        (line.format("", "a-b") + " transformers", "", f"\n{more}"),
        (line.format("", "a-b") + f"\n{more}", "", f"\n{more}"),
        (told.format("[plot]"), "[plot]", ""),
    ):
        unset = script.write_install(head + old, "")
        assert unset == head + told.format(extra) + end
        assert (
            script.write_install(unset, NOBODY)
            == head + line.format(extra, NOBODY) + end
        )
        compile(unset.replace("    %pip", "    # %pip"), "cell", "exec")
    for wrong in (
        "    %pip install tformer",
        f"{line}\n{line}".format("", "a", "", "b"),
    ):
        with pytest.raises(script.NoPlaceError, match=r"package (0|2) times"):
            script.write_install(head + wrong, "")


@pytest.mark.parametrize(
    "name, old, new, told",
    [
        (
            "README.md",
            "\n## ",
            "\nhttps://github.com/{0}/tformer\n\n## ",
            "github.com/{0}/tformer",
        ),
        (
            "book/glossary.md",
            "\n\n",
            "\n\nhttps://{0}.github.io/tformer/\n\n",
            "{0}.github.io/tformer",
        ),
        ("README.md", "<!-- owner: read -->", "<!-- owner: read -->somewhere", None),
        (
            "README.md",
            "<!-- owner: read -->",
            "<!-- owner: typo -->",
            "no passage is called typo",
        ),
        (
            "CITATION.cff",
            "# owner: addresses\n",
            "# owner: addresses\nurl: https://a.b\n",
            None,
        ),
        ("tformer/_modidx.py", "'git_url': '", "'git_url': 'x", None),
        ("settings.ini", "\ndoc_host = ", "\ndoc_host = x", None),
        (
            "settings.ini",
            "\ndoc_host = ",
            "\ndoc_hosts = ",
            "doc_host .* occurs 0 times",
        ),
        (
            "nbs/01_attention_by_hand.ipynb",
            "Copy a clone of",
            "Take",
            "package 0 times",
        ),
        (
            "nbs/01_attention_by_hand.ipynb",
            '"id": ',
            '"x": "gh/{0}/tformer", "id": ',
            "gh/{0}/tformer",
        ),
    ],
)
@pytest.mark.parametrize("owner", ["", NOBODY])
def test_what_does_not_agree_is_told(monkeypatch, owner, name, old, new, told):
    script = load(ROOT / ".ci" / "owner.py")
    text = (ROOT / name).read_text(encoding="utf-8")
    if script.writer(name):
        text = script.writer(name)(text, owner)
    if owner and old.startswith("Copy"):
        old = "%pip install -q"
    assert old in text
    for who in {"another", owner or "another"}:
        wrong = text.replace(old, new.format(who), 1)
        monkeypatch.setattr(script, "files", lambda wrong=wrong: [(name, wrong)])
        found = [*script.disagreements(owner)]
        assert len(found) == 1 and re.fullmatch(
            rf"{name}:\d+: .*(?:{(told or 'agree').format(who)}).*", found[0]
        ), found
    monkeypatch.setattr(script, "files", lambda: [(name, text)])
    assert not [*script.disagreements(owner)]


def test_only_a_login_is_taken(copy):
    before = contents(copy)
    for args in (["NAME=not a login"], ["NAME=a/b"], ["NAME=a."], []):
        done = subprocess.run(
            ["make", "owner", *args], cwd=copy, text=True, capture_output=True
        )
        assert done.returncode == 2, done
        assert "login was expected" in done.stderr or not args
    assert contents(copy) == before


@pytest.mark.parametrize("owner", ["", NOBODY])
def test_the_package_states_addresses_only_of_an_owner(tmp_path, monkeypatch, owner):
    script = load(ROOT / ".ci" / "owner.py")
    for name in ("setup.py", "README.md", "settings.ini"):
        text = (ROOT / name).read_text(encoding="utf-8")
        if name == "settings.ini":
            text = script.write_settings(text, owner)
        (tmp_path / name).write_text(text, encoding="utf-8")
    told = {}
    monkeypatch.setattr(setuptools, "setup", lambda **kwargs: told.update(kwargs))
    monkeypatch.chdir(tmp_path)
    runpy.run_path("setup.py")
    assert told.pop("name") == "tformer" and told.pop("long_description")
    assert "example.org" not in repr(told)
    asked = {key: told.get(key) for key in ("url", "project_urls", "author_email")}
    assert asked == (
        {
            "url": repository_url(owner),
            "project_urls": {
                "Book": book_url(owner).rstrip("/"),
                "Source": repository_url(owner),
            },
            "author_email": f"{owner}@users.noreply.github.com",
        }
        if owner
        else dict.fromkeys(asked)
    )


# --- the addresses of a built site


def site_of(folder, **texts):
    "A site of pages that are nearly empty, except one, and of other files."
    page = (
        '<html><head><link rel="icon" href="data:,">{}</head>'
        '<body><h1 id="a">A</h1>{}</body></html>'
    )
    for name in ("index", "search", "404", "_modules/index", "book/intro"):
        path = folder / f"{name}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        head, _, body = texts.get(name.rpartition("/")[2], "|").partition("|")
        path.write_text(page.format(head, body), encoding="utf-8")
    if "map" in texts:
        (folder / "sitemap.xml").write_text(
            f"<urlset><url><loc>{texts['map']}</loc></url></urlset>", encoding="utf-8"
        )
    if "searchindex" in texts:
        (folder / "searchindex.js").write_text(texts["searchindex"], encoding="utf-8")
    return folder


def link(address):
    return f'|<a href="{address}">x</a>'


@pytest.mark.parametrize(
    "texts, fault",
    [
        ({"intro": link("https://arxiv.org/abs/1706.03762")}, None),
        ({"intro": link("https://github.com/OWNER" + "/tformer")}, "OWNER/tformer"),
        ({"intro": link("https://github.com/some-body" + "/tformer")}, "some-body"),
        ({"intro": link("https://github.com/rhysd/other")}, "rhysd/other"),
        ({"intro": link("https://github.com/a/b/issues/3")}, None),
        ({"intro": link("https://github.com/a/b/issues/new")}, "issues/new"),
        ({"intro": link("https://mybinder.org/v2/gh/a" + "/tformer/main")}, "mybinder"),
        ({"intro": link("//colab.research.google.com/x")}, "colab"),
        ({"intro": '|<img src="https://elsewhere.net/a.png"/>'}, "elsewhere"),
        (
            {"intro": '<meta property="og:image" content="https://elsewhere.net/a"/>|'},
            "elsewhere",
        ),
        ({"intro": "|<p>git+https://example.org/tformer</p>"}, "example.org"),
        ({"search": link("http://127.0.0.1/a")}, "127.0.0.1"),
        ({"map": "https://example.org/a.html"}, "sitemap.xml: https://example.org"),
        ({"searchindex": "x:'https://example.org/a'"}, "searchindex.js: example.org"),
    ],
)
def test_an_address_that_nobody_has_is_told(tmp_path, texts, fault):
    found = foreign_addresses(site_of(tmp_path, **texts), "")
    assert not found if fault is None else fault in found[0], found


def test_addresses_of_a_page_itself_are_told(tmp_path):
    address = book_url(NOBODY) + "book/intro.html"
    head = (
        f'<link rel="canonical" href="{address}"/>'
        f'<meta property="og:url" content="{address}"/>'
        f'<meta property="og:image" content="{book_url(NOBODY)}_static/card.png"/>'
        '<meta property="og:site_name" content="The Verified Transformer"/>'
        '<meta name="twitter:card" content="summary_large_image"/>'
    )
    book = site_of(tmp_path, intro=f"{head}|", map=address)
    assert not own_address_faults(book, NOBODY)
    assert len(own_address_faults(book, "")) == 7
    assert len(own_address_faults(book, "some-body")) == 4
    book = site_of(tmp_path / "bare", map=book_url(NOBODY))
    assert len(own_address_faults(book, NOBODY)) == 6


@pytest.mark.parametrize(
    "address, good",
    [
        ("{repo}", True),
        ("{repo}/edit/main/book/intro.md", True),
        ("{repo}/edit/main/intro.md", False),
        ("{repo}/blob/main/book", False),
        ("{repo}/blob/master/README.md", False),
        ("{repo}/wiki", False),
        ("{repo}/issues/new?title=Issue%20on%20page%20%2Fbook/intro.html&body=x", True),
        ("{repo}/issues/new?title=Issue%20on%20page%20%2Fbook/gone.html", False),
        (
            "https://colab.research.google.com/github/{o}/tformer/blob/main/"
            "nbs/00_tour.ipynb",
            True,
        ),
        (
            "https://colab.research.google.com/github/{o}/tformer/blob/main/"
            "00_tour.ipynb",
            False,
        ),
        (
            "https://mybinder.org/v2/gh/{o}/tformer/main?urlpath=lab/tree/"
            "nbs/00_tour.ipynb",
            True,
        ),
        ("https://mybinder.org/v2/gh/{o}/tformer/main?urlpath=lab/tree/x.ipynb", False),
        ("{book}book/intro.html", True),
        ("{book}intro.html", False),
    ],
)
def test_an_address_that_misleads_is_told(tmp_path, address, good):
    address = address.format(
        o=NOBODY, repo=repository_url(NOBODY), book=book_url(NOBODY)
    )
    book = site_of(tmp_path, intro=link(address))
    assert not foreign_addresses(book, NOBODY)
    assert misleading_addresses(book, ROOT, NOBODY) == (
        [] if good else [f"book/intro.html: {address}"]
    )


@pytest.mark.parametrize("owner", ["", NOBODY])
def test_the_extension_asks_for_addresses_only_with_an_owner(tmp_path, owner):
    (tmp_path / "settings.ini").write_text(f"[DEFAULT]\nowner = {owner}\n")
    loaded = []
    hooks = {}
    app = SimpleNamespace(
        srcdir=tmp_path,
        outdir=tmp_path,
        setup_extension=loaded.append,
        connect=lambda event, hook, **_: hooks.update({event: hook}),
    )
    site_address.setup(app)
    assert loaded == [*site_address.EXTENSIONS] * bool(owner)
    old = tmp_path / "sitemap.xml"
    old.touch()
    if not owner:
        assert [*hooks] == ["build-finished"]
        hooks["build-finished"](app, None)
        assert not old.exists()
        return
    config = SimpleNamespace(html_theme_options={"logo": 1}, project="A book")
    hooks["config-inited"](app, config)
    assert config.html_theme_options["logo"] == 1
    assert config.html_theme_options["repository_url"] == repository_url(owner)
    assert config.html_baseurl == config.ogp_site_url == book_url(owner)


# --- the whole book with an owner, served where it will be read


class Crawl:
    "Opens pages, and whatever can be reached from them by links."

    def __init__(self, chromium, root):
        self.root = root
        self.page = chromium.new_page()
        self.faults = []
        self.seen = set()  # the addresses that were visited
        self.ids = {}  # of each page, by its address
        self.links = {}  # of each page, those within the site
        self.now = None
        self.page.on(
            "console",
            lambda m: self.tell(m.text) if m.type in {"error", "warning"} else None,
        )
        self.page.on("pageerror", lambda e: self.tell(e))
        self.page.on(
            "request",
            lambda r: (
                self.tell(f"asks for {r.url}")
                if not r.url.startswith((root, "data:", "blob:"))
                else None
            ),
        )
        self.page.on(
            "response",
            lambda r: self.tell(f"{r.status} {r.url}") if r.status >= 400 else None,
        )

    def tell(self, what):
        self.faults.append(f"{self.now.removeprefix(self.root)}: {what}")

    def visit(self, address):
        self.now = address
        if not address.endswith(".html"):
            answer = self.page.request.get(address)
            if answer.status != 200:
                self.tell(answer.status)
            return []
        answer = self.page.goto(address, wait_until="load")
        if answer.status != 200:
            self.tell(answer.status)
        self.ids[address], hrefs = self.page.evaluate("""() => [
            [...document.querySelectorAll("[id]")].map(e => e.id),
            [...document.querySelectorAll("a[href], area[href]")].map(
                a => new URL(a.getAttribute("href") || "", document.baseURI).href)]""")
        host = self.root.split("/tformer/")[0]
        self.links[address] = {href for href in hrefs if href.startswith(host)}
        return [urldefrag(href)[0] for href in sorted(self.links[address])]

    def follow(self, *waiting):
        "Visit these, and all that they lead to."
        waiting = [*waiting]
        while waiting:
            address = waiting.pop()
            if address in self.seen:
                continue
            self.seen.add(address)
            if address.startswith(self.root):
                waiting += self.visit(address)
            else:
                self.tell(f"leads out of the site: {address}")

    def look_up_places(self):
        "Tell of each link to a place that its page does not have."
        for page, links in self.links.items():
            self.now = page
            for href in sorted(links):
                address, place = urldefrag(href)
                if place and unquote(place) not in self.ids.get(address, [place]):
                    self.tell(f"{href.removeprefix(self.root)} (no such place)")


def follow_links(chromium, folder):
    """What a browser finds in a site that is served at /tformer/: faults, and pages
    to which no link leads from the first one."""
    book = folder / "tformer"
    with test_book.serve(folder, book / "404.html") as address:
        crawl = Crawl(chromium, f"{address}/tformer/")
        crawl.follow(f"{crawl.root}book/intro.html")
        # the index leads on by itself
        other = {
            crawl.root + test_book.place(book, page) for page in test_book.site(book)
        } - {*crawl.seen, f"{crawl.root}index.html"}
        crawl.follow(*sorted(other))
        crawl.look_up_places()
        crawl.page.close()
    return crawl.faults, {one.removeprefix(crawl.root) for one in other}


def test_a_browser_sees_what_leads_nowhere(tmp_path, chromium):
    body = (
        '|<a href="../search.html#a">x</a><a href="#b">x</a>'
        '<a href="gone.html">x</a><a href="../_sources/x.ipynb">x</a>'
        '<a href="/intro.html">x</a><script>console.error("oh")</script>'
        '<img src="https://elsewhere.invalid/a.png">'
    )
    site_of(tmp_path / "tformer", intro=body)
    faults, other = follow_links(chromium, tmp_path)
    shown = re.sub(r"http://127.0.0.1:\d+", "", "\n".join(faults))
    for fault in (
        "book/intro.html: book/intro.html#b (no such place)",
        "book/gone.html: 404",
        "_sources/x.ipynb: 404",
        "leads out of the site: /intro.html",
        "book/intro.html: oh",
        "asks for https://elsewhere.invalid/a.png",
    ):
        assert fault in shown, shown
    assert "search.html: " not in shown
    assert other == {"404.html", "_modules/index.html"}


@pytest.fixture(scope="module")
def published(copy, tmp_path_factory):
    "A folder whose `tformer` is the whole book, built with an owner."
    first = read_owner(copy)
    owner_of(copy, "--set", NOBODY)
    html = build_book(tmp_path_factory.mktemp("published"), copy)
    owner_of(copy, "--set", first)
    folder = tmp_path_factory.mktemp("host")
    html.rename(folder / "tformer")
    return folder


@pytest.mark.nightly
def test_addresses_of_the_published_book(published, copy):
    book = published / "tformer"
    for faults in (
        foreign_addresses(book, NOBODY),
        own_address_faults(book, NOBODY),
        misleading_addresses(book, copy, NOBODY),
        test_book.missing_buttons(book, NOBODY),
    ):
        assert not faults, (len(faults), faults[:10])
    text = (book / "book" / "intro.html").read_text(encoding="utf-8")
    assert f"git+{repository_url(NOBODY)}" in text


@pytest.mark.nightly
def test_every_link_of_the_published_book_is_followed(published, chromium):
    began = time.perf_counter()
    faults, other = follow_links(chromium, published)
    assert not faults, (len(faults), faults[:10])
    # the theme leads to these by itself, or nothing does
    assert other == {
        "404.html",
        "_modules/index.html",
        "genindex.html",
        "py-modindex.html",
        "search.html",
    }
    assert time.perf_counter() - began < SECONDS


@pytest.mark.nightly
def test_a_wrong_address_of_the_published_book_leads_back(published, chromium):
    with test_book.serve(published, published / "tformer" / "404.html") as address:
        page = chromium.new_page()
        page.goto(f"{address}/tformer/some/where/else.html")
        page.click("article a >> text=The beginning")
        page.wait_for_load_state()
        assert page.url == f"{address}/tformer/book/intro.html"
        page.goto(f"{address}/tformer/")
        page.wait_for_url("**/book/intro.html")
        page.close()
