"""The built pages: read as files, and opened in a browser."""
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from conftest import ROOT

SCRIPTS = {"genindex.html", "search.html", "py-modindex.html"}


def pages(book):
    found = sorted([*book.glob("book/*.html"), *book.glob("nbs/*.html")])
    assert found
    return found


class Links(HTMLParser):
    "Collects what a page links to, and what it can be linked at."

    def __init__(self):
        super().__init__()
        self.links, self.ids = [], set()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs.get("id"), attrs.get("name")}
        for key in ("href", "src"):
            if attrs.get(key):
                self.links.append(attrs[key])


def parse(path):
    parser = Links()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser


def test_every_notebook_has_a_page(book):
    built = {p.stem for p in book.glob("nbs/*.html")}
    assert built == {p.stem for p in (ROOT / "nbs").glob("*.ipynb")}
    assert (book / "index.html").exists()
    assert (book / "sitemap.xml").exists()


def test_pages_show_no_machinery(book):
    marks = re.compile(r"Traceback \(most recent|#\s*\|\s*(export|hide|"
                       r"default_exp|echo|code-fold)")
    for page in pages(book):
        text = re.sub(r"<script.*?</script>", "",
                      page.read_text(encoding="utf-8"), flags=re.S)
        shown = re.sub(r"<[^>]+>", "", text)
        found = marks.search(shown)
        # the maintainers' page explains the directives
        assert not found or page.stem in {"maintain"}, \
            f"{page.name}: {shown[found.start() - 60:found.end() + 60]}"
        assert "<h1>" in text


def test_drawn_pages_are_drawn(book):
    for page in pages(book):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<!-- (api|status|claims|takeaways|chapters|"
                             r"routes|machine|count|one line each|"
                             r"before and after) -->", text), page.name
    text = (book / "book" / "api.html").read_text(encoding="utf-8")
    for module in (ROOT / "tformer").glob("[a-z]*.py"):
        assert f'id="tformer.{module.stem}.' in text, module.stem
    for name, words in (("takeaways", "Questions you can now answer"),
                        ("chapters", "Attention by hand")):
        page = book / "book" / f"{name}.html"
        assert words in page.read_text(encoding="utf-8")


def test_internal_links_lead_somewhere(book):
    parsed = {p: parse(p) for p in book.rglob("*.html")}
    broken = []
    for page in pages(book):
        for link in parsed[page].links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link == "#":
                continue
            target = (page.parent / unquote(parts.path)).resolve() \
                if parts.path else page
            if not target.exists():
                broken.append(f"{page.name}: {link}")
            elif parts.fragment and target.suffix == ".html" and \
                    unquote(parts.fragment) not in parsed[target].ids:
                broken.append(f"{page.name}: {link} (no such place)")
    assert not broken, broken[:10]


def test_pages_can_be_shared_and_opened_elsewhere(book):
    for page in book.glob("nbs/*.html"):
        text = page.read_text(encoding="utf-8")
        assert 'property="og:description"' in text
        name = f"{page.stem}.ipynb"
        colab = rf"colab\.research\.google\.com/github/[\w-]+/tformer/blob/main/nbs/{name}"
        assert re.search(colab, text), f"{name}: no Colab button"
        assert "mybinder.org" in text
        assert 'class="next-page"' in text or "right-next" in text


def test_every_public_notebook_exercise_is_solved(book):
    for page in book.glob("nbs/*.html"):
        text = page.read_text(encoding="utf-8")
        made = len(re.findall(r'class="[^"]*\bexercise\b[^"]*admonition|'
                              r'class="[^"]*admonition[^"]*\bexercise\b',
                              text))
        solved = len(re.findall(r'class="[^"]*\bsolution\b[^"]*dropdown',
                                text))
        assert made == solved >= 3, f"{page.name}: {made}, {solved}"


def watch(page):
    "Collects console errors and requests to other hosts."
    seen = []
    page.on("console", lambda m: seen.append(m.text)
            if m.type == "error" else None)
    page.on("pageerror", lambda e: seen.append(str(e)))
    page.on("request", lambda r: seen.append(r.url)
            if not r.url.startswith(("file:", "data:", "blob:")) else None)
    return seen


@pytest.mark.parametrize("kind,width,scheme", [
    ("light", 1280, "light"), ("dark", 1280, "dark"),
    ("phone", 390, "light")])
def test_pages_in_the_browser(book, chromium, kind, width, scheme):
    context = chromium.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme)
    for path in pages(book):
        page = context.new_page()
        seen = watch(page)
        page.goto(path.as_uri(), wait_until="load")
        if page.query_selector(".math"):
            # set, if not in sight: the first may stand in a folded box
            page.wait_for_selector("mjx-container", state="attached",
                                   timeout=15_000)
        page.wait_for_timeout(100)
        assert not seen, f"{path.name}, {kind}: {seen[:3]}"
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{path.name} is {wide} px wide at {width}"
        page.close()
    context.close()


def test_figures_take_the_colour_of_the_text(book, chromium):
    path = book / "nbs" / "01_attention_by_hand.html"
    grounds = []
    for scheme in ("light", "dark"):
        page = chromium.new_page(color_scheme=scheme)
        page.goto(path.as_uri())
        grounds.append(page.evaluate("""() => {
            const t = document.querySelector('svg[role=img] text');
            return [getComputedStyle(t).fill,
                    getComputedStyle(document.body).backgroundColor]}"""))
        page.close()
    (ink1, ground1), (ink2, ground2) = grounds
    assert ink1 != ink2 and ground1 != ground2


def test_search_finds_words_and_names(book, chromium):
    index = (book / "searchindex.js").read_text(encoding="utf-8")
    for word in ("softmax", "causal_mask", "pretoken"):
        assert word in index
    page = chromium.new_page()
    page.goto((book / "search.html").as_uri() + "?q=causal_mask")
    page.wait_for_selector("ul.search li", timeout=15_000)
    page.close()


def test_copied_code_is_clean(book, chromium):
    page = chromium.new_page()
    page.goto((book / "nbs" / "01_attention_by_hand.html").as_uri())
    buttons = page.locator("div.cell_input button.copybtn")
    outputs = page.locator("div.cell_output button.copybtn")
    assert buttons.count() > 5 and outputs.count() == 0
    for button in buttons.all():
        code = page.locator(button.get_attribute("data-clipboard-target"))
        assert not re.search(r"^\s*(#\s*\||>>>|In \[)", code.inner_text(),
                             re.M)
    page.close()


def test_unfinished_words_do_not_stand_on_pages():
    for path in [*(ROOT / "book").glob("*.md"), ROOT / "README.md",
                 *(ROOT / "nbs").glob("*.ipynb")]:
        text = Path(path).read_text(encoding="utf-8")
        assert not re.search(r"\bTODO\b|\bFIXME\b|\bXXX\b|lorem ipsum",
                             text), path.name
