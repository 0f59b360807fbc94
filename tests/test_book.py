"""The built pages: read as files, and opened in a browser."""
import http.server
import io
import re
import threading
from collections import Counter
from functools import cache, partial
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

import pytest
import yaml

from conftest import ROOT
from helpers import by_day

# one chapter stands for all where every page would take too long
CHAPTER = Path("nbs/07_multi_head_attention.html")


def pages(book):
    found = sorted([*book.glob("book/*.html"), *book.glob("nbs/*.html")])
    assert found
    return found


def site(book):
    "Every page there is: the index, the sources and the search too."
    found = sorted(book.rglob("*.html"))
    assert len(found) > len(pages(book)) + 20
    return found


class Links(HTMLParser):
    "Collects what a page links to, and what it can be linked at."

    def __init__(self):
        super().__init__()
        self.links, self.ids = [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if attrs.get("id"):
            self.ids.append(attrs["id"])
        if tag == "base":                   # where the site's root is
            return
        for key in ("href", "src"):
            if attrs.get(key):
                self.links.append(attrs[key])


@cache
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
                       r"default_exp|echo|code-|verified|landing|output|"
                       r"eval)")
    for page in site(book):
        if page == book / "index.html":     # leads to the first page
            continue
        text = re.sub(r"<script.*?</script>", "",
                      page.read_text(encoding="utf-8"), flags=re.S)
        shown = re.sub(r"<[^>]+>", "", text)
        found = marks.search(shown)
        # the maintainers' page explains the directives
        assert not found or page.stem in {"maintain"}, \
            f"{page.name}: {shown[found.start() - 60:found.end() + 60]}"
        assert "<h1" in text


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
    parsed = {p: parse(p) for p in site(book)}
    broken = []
    for page in parsed:
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
    assert not broken, (len(broken), broken[:10])


def test_ids_stand_once_on_a_page(book):
    twice = [f"{p.relative_to(book)}: {name}" for p in site(book)
             for name, n in Counter(parse(p).ids).items() if n > 1]
    assert not twice, (len(twice), twice[:10])


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


KINDS = [("light", 1280, "light"), ("dark", 1280, "dark"),
         ("phone", 390, "light")]


def look_at(book, chromium, turn, kinds):
    """Open every third page in the first of these kinds; turn it into the others.

    A page must ask no other host for anything, report no error, and be no wider
    than the window.
    """
    _, width, scheme = kinds[0]
    context = chromium.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme)
    for path in pages(book)[turn::3]:
        page = context.new_page()
        seen = watch(page)
        page.goto(path.as_uri(), wait_until="load")
        if page.query_selector(".math"):
            # set, if not in sight: the first may stand in a folded box
            page.wait_for_selector("mjx-container", state="attached",
                                   timeout=15_000)
        for kind, width, scheme in kinds:
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            page.wait_for_function("theme => document.documentElement."
                                   "dataset.theme === theme", arg=scheme)
            page.wait_for_timeout(100)
            assert not seen, f"{path.name}, {kind}: {seen[:3]}"
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, \
                f"{path.name} is {wide} px wide at {width}"
        page.close()
    context.close()


by_turn = pytest.mark.parametrize("turn", range(3),
                                  ids=[kind for kind, *_ in KINDS])


@by_turn
def test_pages_in_the_browser(book, chromium, turn):
    "Every page is opened once, in a kind that changes from page to page."
    look_at(book, chromium, turn, KINDS[turn:turn + 1])


@pytest.mark.nightly
@by_turn
def test_pages_in_the_browser_in_all_kinds(book, chromium, turn):
    "Every page is opened in one kind and turned into the others."
    look_at(book, chromium, turn, KINDS[turn:] + KINDS[:turn])


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


# --- what every page inherits, read

def test_source_pages_keep_every_line_where_it_is(book):
    for module in (ROOT / "tformer").glob("[a-z]*.py"):
        page = book / "_modules" / "tformer" / f"{module.stem}.html"
        text = page.read_text(encoding="utf-8")
        body = re.search(r"<pre>(.*)</pre>", text, re.S)[1]
        body = re.sub(r'<div class="viewcode-block"[^>]*>\n'
                      r'<a class="viewcode-back".*?</a>\n|</div>\n', "",
                      body)
        shown = re.sub(r"<[^>]+>", "", body).lstrip("\n").split("\n")
        lines = module.read_text(encoding="utf-8").split("\n")
        assert any(line.startswith("#|") for line in lines)
        for word in ("def ", "class "):
            assert [i for i, s in enumerate(shown) if s.startswith(word)] \
                == [i for i, s in enumerate(lines) if s.startswith(word)], \
                module.stem


def test_roles_and_lists_are_what_they_say(book):
    for page in site(book):
        text = page.read_text(encoding="utf-8")
        assert "Toggle hidden content" not in text, page.name
        assert "doc-biblioentry" not in text, page.name
        for sig in re.findall(r'<dt class="sig .*?</dt>', text, re.S):
            assert "<dl" not in sig and "<dd" not in sig, sig[:200]
        heads = re.findall(r"<h[1-6]\b.*?</h[1-6]>|<nav id=\"pst-page-toc"
                           r".*?</nav>", text, re.S)
        for head in heads:
            plain = re.sub(r"<code.*?</code>|<[^>]*>", "", head, flags=re.S)
            assert not re.search(r"\b[A-Z]_[A-Z]\b", plain), plain


def test_addresses_are_whole(book):
    config = yaml.safe_load((ROOT / "_config.yml").read_text())
    root = config["html"]["baseurl"]
    listed = [e.text for e in ElementTree.parse(book / "sitemap.xml").iter()
              if e.tag.endswith("loc")]
    assert len(listed) >= len(pages(book))
    for address in listed:
        assert address.startswith(root)
        assert (book / address.removeprefix(root)).is_file(), address
    for page in pages(book):
        tags = dict(re.findall(r'<meta (?:property|name)="([\w:]+)" '
                               r'content="([^"]*)"',
                               page.read_text(encoding="utf-8")))
        assert tags["og:url"] == root + page.relative_to(book).as_posix()
        assert tags["og:site_name"] == config["title"]
        assert tags["twitter:card"] == "summary_large_image"
        assert tags["og:image"].startswith(root)


def test_pages_load_what_they_use(book):
    for page in site(book):
        text = page.read_text(encoding="utf-8")
        assert "fontawesome.js" not in text and "thebe" not in text
        assert ("searchindex.js" in text) == (page.name == "search.html")
        assert ("tex-chtml.js" in text) == ('class="math ' in text), \
            page.name
    assert not list(book.rglob("fontawesome.js"))


# --- what every page inherits, in the browser

@pytest.fixture(scope="module")
def address(book):
    "The site over HTTP, as readers get it."
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def send_error(self, code, *args):
            if code != 404:
                return super().send_error(code, *args)
            page = (book / "404.html").read_bytes()
            self.send_response(404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(page)

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=str(book)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@pytest.fixture
def open_page(chromium):
    "Opens a page in a window of its own kind; closes all in the end."
    contexts = []

    def visit(path, width=1280, formulas=False, **kind):
        contexts.append(chromium.new_context(
            viewport={"width": width, "height": 900}, **kind))
        page = contexts[-1].new_page()
        page.goto(path if isinstance(path, str) else path.as_uri(),
                  wait_until="load")
        if formulas:
            page.wait_for_function("MathJax.startup.promise.then(() => true)")
            page.wait_for_timeout(100)
        return page

    yield visit
    for context in contexts:
        context.close()


def chapters(book):
    return sorted(book.glob("nbs/0[0-9]*.html"))


@pytest.mark.parametrize("width", by_day([1280, 390], 390))
def test_formulas_are_text(book, open_page, width):
    seen = 0
    for path in (*chapters(book)[1:8:6], book / "book" / "notation.html"):
        page = open_page(path, width, formulas=True)
        seen += page.locator("mjx-container").count()
        assert page.evaluate("""() => [
            ...document.querySelectorAll("mjx-container")].filter(
            m => m.tabIndex >= 0).length""") == 0, path.name
        # an inline formula scrolls where it is wider than its line only
        assert page.evaluate("""() => [...document.querySelectorAll(
            "mjx-container:not([display])")].filter(m => {
            const style = getComputedStyle(m);
            return style.overflowX !== "visible" && style.overflowX !==
            "clip" && m.scrollWidth <= m.clientWidth + 1 &&
            m.offsetParent !== null}).length""") == 0, path.name
        # what follows it stays on its line
        assert page.evaluate("""() => [...document.querySelectorAll(
            "span.math")].filter(m => m.nextSibling &&
            /^[,.;:!?)]/.test(m.nextSibling.textContent) &&
            getComputedStyle(m.parentElement).whiteSpace !== "nowrap" &&
            !m.querySelector(".tf-wide")).length""") == 0, path.name
    assert seen > 50


def contrast(a, b):
    "Of two CSS colors, as WCAG counts it."
    def light(color):
        part = [float(c) / 255 for c in re.findall(r"[\d.]+", color)[:3]]
        part = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
                for c in part]
        return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2]
    high, low = sorted((light(a), light(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


FOCUS = """() => {
    const at = document.activeElement, style = getComputedStyle(at);
    let under = at, ground = "";
    while (under && (!ground || /, 0\\)$|transparent/.test(ground))) {
        under = under.parentElement;
        ground = under && getComputedStyle(under).backgroundColor; }
    const box = at.getBoundingClientRect();
    return {name: at.tagName + "." + at.className, line: style.outlineStyle,
        wide: parseFloat(style.outlineWidth), color: style.outlineColor,
        ground: ground || "rgb(255, 255, 255)", opacity: style.opacity,
        seen: box.width > 0 && box.height > 0}}"""


@pytest.mark.parametrize("scheme", by_day(["light", "dark"], "dark"))
def test_focus_is_seen_on_every_control(book, open_page, scheme):
    page = open_page(book / CHAPTER, color_scheme=scheme)
    names = set()
    for key in range(140):
        page.keyboard.press("Tab")
        at = page.evaluate(FOCUS)
        if at["name"].startswith("BODY"):
            break
        names.add(at["name"])
        assert at["line"] not in ("none", "auto") and at["wide"] >= 2, at
        assert contrast(at["color"], at["ground"]) >= 3, at
        assert at["seen"] and at["opacity"] == "1", at
    every = " ".join(names)
    for kind in ("theme-switch-button", "dropdown-toggle", "primary-toggle",
                 "search-button", "SUMMARY", "copybtn", "A."):
        assert kind in every, (kind, sorted(names))


def test_paper_is_light_and_without_the_frame(book, open_page):
    page = open_page(book / CHAPTER, color_scheme="dark")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    screen = page.evaluate("getComputedStyle(document.body).color")
    page.emulate_media(media="print", color_scheme="dark")
    page.wait_for_function(
        "document.documentElement.dataset.theme === 'light'")
    ink, ground, pale = page.evaluate("""() => {
        const of = (s, p) => getComputedStyle(document.querySelector(s))[p];
        const ground = of("body", "backgroundColor");
        return [of("article section > p", "color"), ground,
            of("pre span.k", "color")]}""")
    assert ink != screen and contrast(ink, ground) > 10
    assert contrast(pale, ground) > 4.5
    title = page.locator("article h1").first
    assert title.is_visible() and title.inner_text().startswith("7.")
    assert page.locator("h1:visible").count() == 1
    for frame in (".bd-sidebar-primary", ".bd-header-article",
                  ".prev-next-footer", ".bd-footer-content", ".copybtn",
                  ".headerlink", ".toggle-button", "#pst-back-to-top"):
        assert page.locator(f"{frame}:visible").count() == 0, frame
    # boxes break between pages, and what is folded stays folded
    assert page.evaluate("""() => [...document.querySelectorAll(
        "pre, div.cell_input, div.output, div.solution, div.highlight, " +
        "div[class*=highlight-]")].filter(e => {
        const s = getComputedStyle(e);
        return s.breakInside !== "auto" || s.overflowX !== "visible" ||
            s.display === "flex"}
        ).length""") == 0
    assert page.locator("div.solution > section:visible").count() == 0
    assert page.locator("div.solution > .admonition-title:visible").count()
    page.emulate_media(media="screen", color_scheme="dark")
    page.wait_for_function(
        "ink => getComputedStyle(document.body).color === ink", arg=screen)


def test_paper_is_light_without_the_script(book, chromium):
    context = chromium.new_context(color_scheme="dark",
                                   java_script_enabled=False)
    page = context.new_page()
    source = (book / CHAPTER).read_text(encoding="utf-8")
    dark = book / "nbs" / "_dark.html"
    dark.write_text(re.sub(r'data-theme="\w+"', 'data-theme="dark"', source,
                           count=1), encoding="utf-8")
    try:
        page.goto(dark.as_uri())
        page.emulate_media(media="print")
        ink, ground = page.evaluate("""() => ["color", "backgroundColor"]
            .map(p => getComputedStyle(document.body)[p])""")
    finally:
        dark.unlink()
        context.close()
    assert contrast(ink, ground) > 10 and contrast(ground, "0,0,0") > 20


def test_headings_and_code_are_set_in_order(book, open_page):
    page = open_page(book / CHAPTER)
    weights, sizes = zip(*page.evaluate("""() => ["h1", "h2", "h3"].map(h => {
        const s = getComputedStyle(document.querySelector("article " + h));
        return [+s.fontWeight, parseFloat(s.fontSize)]})"""))
    assert weights[0] > weights[1] > weights[2]
    assert sizes[0] > sizes[1] > sizes[2]
    for ratio in page.evaluate("""() => [...document.querySelectorAll(
            "article pre")].map(p => parseFloat(getComputedStyle(p).lineHeight)
            / parseFloat(getComputedStyle(p).fontSize))"""):
        assert ratio == pytest.approx(1.5)


def edges(png):
    "Darkest and lightest column of an image near its right edge."
    from PIL import Image
    image = Image.open(io.BytesIO(png)).convert("L")
    box = image.crop((image.width - 14, 2, image.width - 2, 10))
    return box.getextrema()


@pytest.mark.parametrize("scheme", by_day(["light", "dark"], "light"))
def test_code_on_a_phone_says_that_it_scrolls(book, open_page, scheme):
    page = open_page(book / CHAPTER, 390, color_scheme=scheme,
                     is_mobile=True, has_touch=True)
    page.add_style_tag(content=".copybtn { display: none !important }")
    wide, short = page.evaluate("""() => {
        const all = [...document.querySelectorAll("div.cell_input pre")];
        all.forEach((e, i) => { e.dataset.i = i });
        const seen = all.filter(e => e.checkVisibility()), room = e =>
            e.scrollWidth - e.clientWidth;
        return [seen.filter(e => room(e) > 40), seen.filter(e => room(e) <=
            0)].map(l => l.map(e => `pre[data-i="${e.dataset.i}"]`))}""")
    assert len(wide) > 3 and short
    wide, short = page.locator(wide[0]), page.locator(short[0])
    # the first rows of pixels hold no text, only the ground and its shade
    low, high = edges(wide.screenshot())
    assert high - low > 20, (low, high)
    low, high = edges(short.screenshot())
    assert high - low < 6, (low, high)
    wide.evaluate("e => { e.scrollLeft = e.scrollWidth }")
    low, high = edges(wide.screenshot())
    assert high - low < 6, (low, high)


def test_copy_buttons_are_seen_on_touch(book, open_page):
    page = open_page(book / CHAPTER, 390, is_mobile=True, has_touch=True)
    page.wait_for_selector("button.copybtn", state="attached")
    page.wait_for_timeout(400)
    assert set(page.evaluate("""() => [...document.querySelectorAll(
        "button.copybtn")].map(b => getComputedStyle(b).opacity)""")) == {"1"}


def test_icons_are_drawn(book, open_page):
    page = open_page(book / CHAPTER)
    page.evaluate("document.fonts.ready.then(() => true)")
    icons = page.evaluate("""() => [...document.querySelectorAll(
        "i[class*='fa-'], span[class*='fa-']")].map(i => [i.className,
        getComputedStyle(i, "::before").content,
        i.getAttribute("aria-hidden")])""")
    assert len(icons) > 8
    for name, content, hidden in icons:
        assert content not in ("none", '""') and hidden == "true", name
    assert page.evaluate("""() => document.fonts.check(
        '900 16px "Font Awesome 6 Free"', String.fromCharCode(0xf002))""")
    assert page.evaluate("""() => [...document.querySelectorAll(
        "button, summary")].filter(b => b.offsetParent && !["aria-label",
        "title", "data-bs-original-title"].some(n => b.getAttribute(n)) &&
        !b.textContent.trim()).map(b => b.outerHTML)""") == []


def hits(page, address, words):
    page.goto(f"{address}/search.html?q={words}")
    page.wait_for_function("""() => /finished|did not match/.test(
        document.querySelector(".search-summary")?.textContent)""")
    page.wait_for_timeout(300)
    return page.locator("ul.search li").all_inner_texts()


def test_search_reads_the_article_alone(address, open_page):
    page = open_page(f"{address}/search.html")
    found = hits(page, address, "rotary")
    assert "Relative and rotary positions" in found[0], found[:3]
    found = hits(page, address, "√d")
    assert 0 < len(found) < 60, len(found)
    assert not any("Binder" in f or "Colab" in f for f in found)
    assert any(len(f) > 120 for f in found)         # with excerpts


def test_an_address_that_leads_nowhere(address, open_page):
    page = open_page(f"{address}/some/where/else.html")
    assert "Nothing stands at this address" in page.inner_text("article h1")
    face = page.evaluate("getComputedStyle(document.querySelector('article "
                         "h1')).fontFamily")
    assert "Source Sans 3" in face
    page.click("article a >> text=The beginning")
    page.wait_for_load_state()
    assert page.url == f"{address}/book/intro.html"


def test_one_click_shows_all_that_comes_out(book, open_page):
    page = open_page(book / "nbs" / "18_translation.html")
    opened = """() => [...document.querySelectorAll(
        "details.tf-reveal")].map(box => box.open)"""
    runs = page.evaluate("""() => {
        const found = [[]];
        document.querySelectorAll("details.tf-reveal, .tf-predict").forEach(
            box => box.matches(".tf-reveal") ? found.at(-1).push(1)
            : found.push([]));
        return found.map(run => run.length).filter(n => n)}""")
    several = max(range(len(runs)), key=runs.__getitem__)
    first = sum(runs[:several])
    assert runs[several] > 1 and not any(page.evaluate(opened))
    page.locator("details.tf-reveal > summary").nth(first).click()
    page.wait_for_timeout(100)
    assert [i for i, box in enumerate(page.evaluate(opened)) if box] == [
        *range(first, first + runs[several])]
