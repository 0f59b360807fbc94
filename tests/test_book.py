"""The built pages: read as files, and opened in a browser."""

import http.server
import io
import re
import threading
import zipfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from posixpath import dirname, join, normpath
from urllib.parse import quote, unquote, urlsplit

import pytest

import addresses
import built_pages
import course  # book/_ext, where the conftest of the root looks
import course_map
from built_pages import place, read, with_class
from conftest import PATIENCE, ROOT
from helpers import by_day
from site_address import read_owner

# these stand for all pages where every page would take too long
CHAPTER = Path("nbs/07_multi_head_attention.html")
OLD_FORM = Path("nbs/12_gpt.html")
PARTS = Path("nbs/parts_of_a_lesson.html")
FIRST = Path("nbs/01_attention_by_hand.html")


def pages(book):
    found = course.page_paths(book)
    assert found
    return found


def notebook_pages(book):
    "The pages of notebooks, by the names of the documents."
    found = {
        path.relative_to(book / "nbs").with_suffix("").as_posix(): path
        for path in pages(book)
        if path.is_relative_to(book / "nbs")
    }
    assert found
    return found


def site(book):
    "Every page there is: the index, the sources and the search too."
    found = built_pages.site(book)
    assert {
        book / name for name in ("index.html", "search.html", "_modules/index.html")
    } <= {*found}
    return found


def unpaired_notebooks(book, root):
    "Notebooks of the sources without a page, and pages without a notebook."
    return {*notebook_pages(book)} ^ {*course.document_names(root)}


def test_every_notebook_has_a_page(book):
    assert not unpaired_notebooks(book, ROOT)
    assert (book / "index.html").exists()


def test_a_chapter_has_the_number_of_its_file(book):
    for name, page in notebook_pages(book).items():
        number = course_map.number(name)
        if name[0].isdigit() and number != "0":
            heading = f'<h1><span class="section-number">{number}. </span>'
            assert heading in page.read_text(encoding="utf-8"), name
    assert course_map.number("06b_feed_forward") == "6b"


def test_pages_show_no_machinery(book):
    marks = re.compile(
        r"Traceback \(most recent|#\s*\|\s*(export|hide|"
        r"default_exp|echo|code-|verified|output|"
        r"setup|eval)"
    )
    for page in site(book):
        if page == book / "index.html":  # leads to the first page
            continue
        reading = read(page)
        found = marks.search(reading.shown)
        # these two explain the directives
        assert not found or place(book, page) in {
            "book/maintain.html",
            "nbs/parts_of_a_lesson.html",
        }, f"{page.name}: {reading.shown[found.start() - 60 : found.end() + 60]}"
        assert b"<h1" in reading.source


def undocumented_modules(book, root):
    "Exported modules of which the page of the package draws no name."
    ids = read(book / "book" / "api.html").ids
    return [
        name
        for name in course.module_names(root)
        if not any(one.startswith(f"tformer.{name}.") for one in ids)
    ]


# comments of the sources that are replaced by what an extension draws
DRAWN = {
    "api",
    "status",
    "gpu",
    "claims",
    "takeaways",
    "chapters",
    "routes",
    "route: build",
    "leak",
    "machine",
    "count",
    "one line each",
    "trained",
    "wheel",
    "storyteller",
}


def test_drawn_pages_are_drawn(book):
    for page in pages(book):
        assert not DRAWN & {*read(page).comments}, page.name
    assert not undocumented_modules(book, ROOT)
    for name, words in (
        ("takeaways", "Questions you can now answer"),
        ("chapters", "Attention by hand"),
    ):
        assert words in read(book / "book" / f"{name}.html").shown


def test_the_site_carries_the_package(book):
    "The wheel that the first page names has the modules of the project."
    (link,) = [one for one in read(book / "book/intro.html").links if ".whl" in one]
    path = book / target_of("book/intro.html", link)
    with zipfile.ZipFile(path) as wheel:
        names = {*wheel.namelist()}
        assert (
            wheel.read("tformer/bundle.py") == (ROOT / "tformer/bundle.py").read_bytes()
        )
    modules = {path.relative_to(ROOT).as_posix() for path in course.module_paths(ROOT)}
    assert modules <= names and "tformer/weights/stories/model.safetensors" in names
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def target_of(where, link):
    "The address in the site of what the page at the address `where` links to."
    path = unquote(urlsplit(link).path)
    return normpath(join(dirname(where), path)) if path else where


def broken_links(book):
    "Links of pages to files and places of the site that are not there."
    parsed = {place(book, page): read(page) for page in site(book)}
    broken = []
    for where, reading in parsed.items():
        for link in reading.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link == "#":
                continue
            target = target_of(where, link)
            if target not in parsed and not (book / target).exists():
                broken.append(f"{where}: {link}")
            elif (
                parts.fragment
                and target.endswith(".html")
                and unquote(parts.fragment) not in parsed[target].ids
            ):
                broken.append(f"{where}: {link} (no such place)")
    return broken


def test_internal_links_lead_somewhere(book):
    broken = broken_links(book)
    assert not broken, (len(broken), broken[:10])


def repeated_ids(book):
    "Ids that several elements of a page have."
    return [
        f"{place(book, page)}: {name}"
        for page in site(book)
        for name, count in read(page).ids.items()
        if count > 1
    ]


def test_ids_stand_once_on_a_page(book):
    twice = repeated_ids(book)
    assert not twice, (len(twice), twice[:10])


def missing_buttons(book, owner):
    """What a notebook's page lacks of buttons that name this very notebook.

    Without an owner there is a button to download it, and no other.
    """
    missing = []
    for name, page in notebook_pages(book).items():
        links = {*read(page).links}
        file = f"nbs/{name}.ipynb"
        buttons = {
            "Colab": f"https://colab.research.google.com/github/{owner}/tformer"
            f"/blob/main/{file}",
            "Binder": f"https://mybinder.org/v2/gh/{owner}/tformer/main"
            f"?urlpath=lab/tree/{file}",
            "edit": f"https://github.com/{owner}/tformer/edit/main/{file}",
        }
        missing += [
            f"{name}: {button}"
            for button, address in buttons.items()
            if owner and address not in links
        ]
        if not any(link.endswith(f"_sources/{file}") for link in links):
            missing.append(f"{name}: download")
    return missing


def test_pages_can_be_shared_and_opened_elsewhere(book):
    assert not missing_buttons(book, read_owner(ROOT))
    for name, page in notebook_pages(book).items():
        reading = read(page)
        assert reading.meta.get("description"), name
        assert with_class(reading, "right-next"), name


def missing_from_sidebar(book):
    """Pages to which the sidebar of another page, or their own, does not lead.

    To the notebooks of a room of the package, the page of the room leads.
    """
    every = {place(book, page) for page in pages(book)}
    rooms = {
        where: {target_of(where, link) for link in read(book / where).links}
        for where in every
        if where.startswith("book/rooms/")
    }
    missing = []
    for page in pages(book):
        where = place(book, page)
        # the page itself is linked with "#"
        led = {target_of(where, link) for link in read(page).sidebar}
        led |= {
            other
            for room in led & {*rooms}
            for other in rooms[room]
            if other.startswith("nbs/package/")
        }
        missing += [f"{where}: {other}" for other in sorted(every - led)]
    return missing


def test_the_sidebar_leads_to_every_page(book):
    missing = missing_from_sidebar(book)
    assert not missing, (len(missing), missing[:10])


def test_every_public_notebook_exercise_is_solved(book):
    for name, page in notebook_pages(book).items():
        if name.startswith("package/"):  # these set no exercises
            continue
        reading = read(page)
        made = with_class(reading, "exercise", "admonition")
        solved = with_class(reading, "solution", "dropdown")
        solved += reading.labels.count("More: Solution")
        assert made == solved >= 3, f"{page.name}: {made}, {solved}"


@contextmanager
def watch(page):
    "Yield a list of console errors and requests to other hosts, while it grows."
    seen = []
    hear = {
        "console": lambda m: seen.append(m.text) if m.type == "error" else None,
        "pageerror": lambda error: seen.append(str(error)),
        "request": lambda r: (
            seen.append(r.url)
            if not r.url.startswith(("file:", "data:", "blob:"))
            else None
        ),
    }
    for event, listener in hear.items():
        page.on(event, listener)
    yield seen
    for event, listener in hear.items():
        page.remove_listener(event, listener)


KINDS = [("light", 1280, "light"), ("dark", 1280, "dark"), ("phone", 390, "light")]


# text that need not be seen, each with the reason
UNSEEN = {
    # read aloud or not at all: it repeats or adorns what is told elsewhere
    "[aria-hidden=true]",
    "script",
    "style",
    "noscript",
    "title",
    "desc",
    # a control that is at rest for now: WCAG asks for no contrast of it
    "button:disabled",
    # formulas have the color of the text around them, and hold no text
    "mjx-container",
}

FAINT_TEXT = """unseen => {
    // Text whose contrast with its ground is under 4.5 : 1, or under 3 : 1
    // where it is large, as WCAG counts it; folded boxes are opened for it.
    const article = document.querySelector("article");
    const folds = [...article.querySelectorAll("details:not([open])")];
    const toggles = [...article.querySelectorAll(".toggle-hidden")];
    folds.forEach(fold => { fold.open = true; });
    toggles.forEach(box => box.classList.remove("toggle-hidden"));
    // a change of colors ends at once, and so does one that it starts further in
    for (let changes; (changes = document.getAnimations()).length;)
        changes.forEach(change => change.cancel());

    const pixel = new OffscreenCanvas(1, 1).getContext(
        "2d", {willReadFrequently: true});
    const colors = new Map(), looks = new Map(), drawn = new Map();
    const color = css => {          // any CSS color as r, g, b, alpha
        if (!colors.has(css)) {
            pixel.clearRect(0, 0, 1, 1);
            pixel.fillStyle = css;
            pixel.fillRect(0, 0, 1, 1);
            const [r, g, b, a] = pixel.getImageData(0, 0, 1, 1).data;
            colors.set(css, [r / 255, g / 255, b / 255, a / 255]);
        }
        return colors.get(css);
    };
    const look = element => {
        if (!looks.has(element)) {
            const style = getComputedStyle(element);
            const invert = /invert\\(([\\d.]+)\\)/.exec(style.filter);
            looks.set(element, {
                ground: color(style.backgroundColor),
                opacity: parseFloat(style.opacity),
                invert: invert ? parseFloat(invert[1]) : 0, style});
        }
        return looks.get(element);
    };
    const over = (top, under) => {
        const alpha = top[3] + under[3] * (1 - top[3]);
        return alpha === 0 ? [0, 0, 0, 0] : [0, 1, 2].map(i => (top[i] *
            top[3] + under[i] * under[3] * (1 - top[3])) / alpha)
            .concat(alpha);
    };
    const faded = (paint, part) => [...paint.slice(0, 3), paint[3] * part];
    const inverted = (paint, part) => paint.map((c, i) =>
        i === 3 ? c : c * (1 - part) + (1 - c) * part);

    const shapes = svg => {         // what a drawing paints
        if (!drawn.has(svg)) drawn.set(svg, [...svg.querySelectorAll(
            "rect, circle, ellipse, path, polygon, line, polyline")].filter(
            shape => shape.checkVisibility({visibilityProperty: true})
                && !shape.closest("defs, clipPath, mask, marker, symbol"))
            .map(shape => ({shape, box: shape.getBoundingClientRect()})));
        return drawn.get(svg);
    };
    const painted = (svg, text, x, y, size) => {    // below a text at x, y
        let ground = [0, 0, 0, 0];
        for (const {shape, box} of shapes(svg)) {
            if (x < box.left - size || x > box.right + size ||
                y < box.top - size || y > box.bottom + size ||
                !(shape.compareDocumentPosition(text) & 4)) continue;
            const style = look(shape).style, matrix = shape.getScreenCTM();
            const at = new DOMPoint(x, y).matrixTransform(matrix.inverse());
            let paint = [0, 0, 0, 0];
            if (!/none|url/.test(style.fill) && shape.isPointInFill(at))
                paint = faded(color(style.fill),
                              parseFloat(style.fillOpacity));
            if (!/none|url/.test(style.stroke) && shape.isPointInStroke(at)
                && parseFloat(style.strokeWidth) * Math.hypot(
                    matrix.a, matrix.b) > size)
                paint = over(faded(color(style.stroke),
                    parseFloat(style.strokeOpacity)), paint);
            for (let e = shape; e !== svg; e = e.parentElement)
                paint = faded(paint, look(e).opacity);
            ground = over(paint, ground);
        }
        return ground;
    };
    const light = paint => paint.slice(0, 3).map(c => c <= 0.04045 ?
        c / 12.92 : ((c + 0.055) / 1.055) ** 2.4).reduce(
        (sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);

    const paper = color(document.documentElement.dataset.theme ===
        "dark" ? "black" : "white");
    const plain = element => {      // what changes no color in it
        const {ground, opacity, invert} = look(element);
        return ground[3] === 0 && opacity === 1 && !invert;
    };
    const told = new Map();         // by what stands below a text, and by its ink
    const compare = (own, svg, ink, box, size) => {
        let ground = [0, 0, 0, 0];
        for (let e = own; e; e = e.parentElement) {
            const {ground: below, opacity, invert} = look(e);
            if (e === svg) {
                const paint = painted(svg, own, (box.left + box.right) / 2,
                    (box.top + box.bottom) / 2, size);
                ink = over(ink, paint);
                ground = over(ground, paint);
            }
            if (!(e instanceof SVGElement) || e.tagName === "svg") {
                ink = over(ink, below);
                ground = over(ground, below);
            }
            if (invert) {
                ink = inverted(ink, invert);
                ground = inverted(ground, invert);
            }
            ink = faded(ink, opacity);
            ground = faded(ground, opacity);
        }
        const [low, high] = [over(ink, paper), over(ground, paper)]
            .map(light).sort((a, b) => a - b);
        const hex = paint => "#" + over(paint, paper).slice(0, 3).map(c =>
            Math.round(c * 255).toString(16).padStart(2, "0")).join("");
        return [(high + 0.05) / (low + 0.05), `${hex(ink)} on ${hex(ground)}`];
    };

    const found = [], walker = document.createTreeWalker(article, 5, node =>
        node.nodeType === 1 ? node.matches(unseen) ? 2 : 3
                            : node.data.trim() ? 1 : 3);
    const range = document.createRange();
    while (walker.nextNode()) {
        const node = walker.currentNode, own = node.parentElement;
        if (!own.checkVisibility({visibilityProperty: true,
                                  opacityProperty: true})) continue;
        range.selectNodeContents(node);
        const box = range.getBoundingClientRect(), style = look(own).style;
        const room = own.getBoundingClientRect();   // 1 px: to be read aloud
        if (Math.min(box.width, box.height, room.width, room.height) <= 1)
            continue;
        const svg = own.closest("svg"), text = own instanceof SVGElement;
        if (text && /none|url/.test(style.fill)) continue;
        let ink = text ? faded(color(style.fill), parseFloat(
            style.fillOpacity)) : color(style.color);
        const matrix = text && own.getScreenCTM();
        const size = parseFloat(style.fontSize) * (
            text ? Math.hypot(matrix.a, matrix.b) : 1);
        let below = own;
        while (!svg && below.parentElement && plain(below))
            below = below.parentElement;
        if (!told.has(below)) told.set(below, new Map());
        const known = told.get(below), key = style.color;
        if (svg || !known.has(key))
            known.set(key, compare(svg ? own : below, svg, ink, box, size));
        const [ratio, colors] = known.get(key);
        const large = size >= 24 || size >= 18.66 && style.fontWeight >= 700;
        if (ratio < (large ? 3 : 4.5) - 0.01) found.push([
            ratio.toFixed(2), node.data.trim().slice(0, 40), colors]);
    }
    folds.forEach(fold => { fold.open = false; });
    toggles.forEach(box => box.classList.add("toggle-hidden"));
    return found; }"""


def faint_text(page):
    "Text of an open page that is hard to tell from its ground."
    return [
        f"{ratio} : 1, {words!r}, {colors}"
        for ratio, words, colors in page.evaluate(FAINT_TEXT, ", ".join(sorted(UNSEEN)))
    ]


# Words that cells of these notebooks write on strong colors: to mend them,
# the notebooks have to be run again. This list only shrinks.
FAINT = {
    "nbs/01_attention_by_hand.html": {"#d5dce4 on #795291"},
    "nbs/17_training.html": {
        "#d5dce4 on #d9761a",
        "#d5dce4 on #3470d6",
        "#1d2430 on #3470d6",
    },
    "nbs/18_translation.html": {
        "#d5dce4 on #d9761a",
        "#d5dce4 on #3470d6",
        "#d5dce4 on #bd78dd",
        "#1d2430 on #3470d6",
        "#ffffff on #1fa37c",
    },
    "nbs/23_in_flight_batching.html": {"#d5dce4 on #1d8769", "#d5dce4 on #b2631b"},
    "nn/kv_cache.html": {"#ffffff on #1fa37c"},
}


# formulas are set, and so are those that stand in a folded box; a model runs
SET = """() => {
    document.querySelectorAll(".tf-start-model").forEach(button => button.click());
    if (document.querySelector("[data-storyteller]:not(.tf-awake)")) return false;
    return !document.querySelector(".math") || MathJax.startup.promise.then(
        () => document.querySelector("mjx-container") !== null);
}"""
TURNED = """async theme => {    // and drawn
    for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame);
    return document.documentElement.dataset.theme === theme}"""
ASLEEP = """() => [...document.querySelectorAll("figure[data-live]:not(.tf-awake)")]
    .map(figure => figure.dataset.live)"""


SIDEWAYS = """async () => {
    // Drawings that scroll, drawings with letters under 9 px, and what else scrolls
    // but cannot be reached with the keys; folds are opened for it.
    const folds = [...document.querySelectorAll("article details:not([open])")];
    folds.forEach(fold => { fold.open = true; });
    for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame);
    const found = [];
    for (const box of document.querySelectorAll("article *")) {
        const scrolls = box.scrollWidth > box.clientWidth + 1 && box.clientWidth &&
            /auto|scroll/.test(getComputedStyle(box).overflowX);
        const named = box.tabIndex >= 0 && (box.matches("pre") ||
            box.matches("[role=region][aria-label]"));
        const what = `${box.localName}.${box.className}: ` +
            box.textContent.slice(0, 30);
        if (scrolls && !named) found.push(`no key scrolls ${what}`);
        if (!scrolls && box.matches("[role=region]") && box.checkVisibility())
            found.push(`does not scroll: ${what}`);
    }
    for (const drawing of document.querySelectorAll(".tf-panel > svg")) {
        const box = drawing.parentElement, name = drawing.querySelector("title");
        const room = box.clientWidth;
        if (!drawing.checkVisibility() || !room) continue;
        if (box.scrollWidth > room || drawing.clientWidth > room + 1) found.push(
            `${name.textContent}: ${drawing.clientWidth} px wide in ${room}`);
        const scale = drawing.clientWidth / drawing.viewBox.baseVal.width;
        const sizes = [...drawing.querySelectorAll("text")].map(text => Math.max(
            ...[text, ...text.querySelectorAll("tspan")].map(part =>
                parseFloat(part.style.fontSize) || 0))).filter(size => size);
        const least = scale * Math.min(...sizes);
        if (least < 8.95) found.push(
            `${name.textContent}: letters of ${least.toFixed(2)} px`);
    }
    folds.forEach(fold => { fold.open = false; });
    return found; }"""


def turn(page, width, scheme):
    "Give a page another width and other colors."
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=scheme)


def page_faults(page, path, kinds, known=None):
    """What is wrong with a page, opened as the first of kinds, then turned.

    Faint text is looked for if `known` lists the colors of what is known, which
    must be there, and where the page is seen in light or in dark.
    """
    faults = []
    pale = set()
    name = f"{path.parent.name}/{path.name}"
    with watch(page) as seen:
        turn(page, *kinds[0][1:])
        page.goto(path.as_uri(), wait_until="load")
        page.wait_for_function(SET)
        faults += [f"{name}: {figure} is asleep" for figure in page.evaluate(ASLEEP)]
        for kind, width, scheme in kinds:
            where = f"{name}, {kind}"
            turn(page, width, scheme)
            page.wait_for_function(TURNED, arg=scheme)
            wide = page.evaluate("document.documentElement.scrollWidth")
            if wide > width:
                faults.append(f"{where}: {wide} px wide at {width}")
            if known is not None and kind in ("light", "dark"):
                for said in faint_text(page):
                    colors = said.rpartition(", ")[2]
                    pale.add(colors)
                    if colors not in known:
                        faults.append(f"{where}: {said}")
            if kind == "phone":
                faults += [f"{where}: {said}" for said in page.evaluate(SIDEWAYS)]
            faults += [f"{where}: {said}" for said in seen[:3]]
            seen.clear()
    return faults + [
        f"{name}: mended, take it off the list: {colors}"
        for colors in sorted({*(known or ())} - pale)
    ]


def browser_faults(chromium, paths, kinds, faint=None):
    """What is wrong with pages in a window of their own.

    Faint text is looked for where pages are seen in light and in dark. What `faint`
    lists for a page is known; there it must be.
    """
    faint = faint or {}
    looks = {"light", "dark"} <= {kind for kind, *_ in kinds}
    page = chromium.new_page()
    page.set_default_timeout(PATIENCE)
    faults = []
    for path in paths:
        known = faint.get(f"{path.parent.name}/{path.name}", set()) if looks else None
        faults += page_faults(page, path, kinds, known)
    page.close()
    return faults


# the pages that are opened by day; all others are opened at night alone
DAY = {
    "book/intro.html": "the first page",
    "nbs/26_sliding_window.html": "a lesson in the open form, with a live figure",
    "nbs/12_gpt.html": "a lesson in the old form",
    "nbs/package/base/files.html": "a notebook of the package",
    "book/api.html": "signatures of all kinds, and the largest page",
    "book/status.html": "wide tables",
    "book/glossary.html": "definitions",
    "nbs/parts_of_a_lesson.html": "every part that a lesson can have",
}


def test_pages_in_the_browser(book, open_page):
    """One page of each sort is opened in light, in dark and on a phone.

    None writes to the console, asks another host or is wider than the window, each
    live figure is awake, and on a phone no drawing scrolls sideways or has letters
    under 9 px, and what scrolls can be reached with the keys.
    """
    page = open_page("about:blank")
    faults = [fault for name in DAY for fault in page_faults(page, book / name, KINDS)]
    assert not faults, "\n".join([f"{len(faults)} faults", *faults[:40]])


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(3), ids=[kind for kind, *_ in KINDS])
def test_pages_in_the_browser_in_all_kinds(book, chromium, first):
    "Every page is turned into all kinds, and its text is seen on its ground."
    faults = browser_faults(
        chromium, pages(book)[first::3], KINDS[first:] + KINDS[:first], FAINT
    )
    assert not faults, "\n".join([f"{len(faults)} faults", *faults[:40]])


INK = """<!DOCTYPE html><html data-theme="light"><body style="background: white">
<article style="background: rgba(0, 0, 0, .5)">{}</article></body></html>"""


@pytest.mark.parametrize(
    "text, ratio",
    [
        ('<p style="color: black">seen</p>', None),  # on half a gray
        ('<p style="color: #555">faint</p>', "1.86"),
        ('<p style="color: #555; background: white">seen</p>', None),
        ('<p style="color: #333; font-size: 24px">large</p>', None),
        ('<p style="color: #333; font-size: 23px">small</p>', "3.16"),
        ('<p style="opacity: .3; background: white; color: black">pale</p>', "2.86"),
        (
            '<details><summary style="color: black">a</summary>'
            '<p style="color: #777">folded</p></details>',
            "1.12",
        ),
        ('<p hidden style="color: #777">gone</p>', None),
        ('<p aria-hidden="true" style="color: #777">adorns</p>', None),
        (
            '<svg width="90" height="40"><rect width="40" height="40"/>'
            '<text x="5" y="20" fill="white">on</text></svg>',
            None,
        ),
        (
            '<svg width="90" height="40"><rect width="40" height="40"/>'
            '<text x="50" y="20" fill="white">off</text></svg>',
            "4.00",
        ),
        (
            '<svg width="90" height="40"><text x="5" y="20" fill="white">under'
            '</text><rect width="80" height="40" fill="none"/></svg>',
            "4.00",
        ),
        (
            '<div style="filter: invert(1); background: black">'
            '<p style="color: #aaa">turned</p></div>',
            None,
        ),
    ],
)
def test_faint_text_is_told(open_page, tmp_path, text, ratio):
    path = tmp_path / "ink.html"
    path.write_text(INK.format(text), encoding="utf-8")
    found = faint_text(open_page(path))
    assert [one.split()[0] for one in found] == ([ratio] if ratio else [])


def test_figures_take_the_colour_of_the_text(book, open_page):
    colors = []
    for scheme in ("light", "dark"):
        page = open_page(book / FIRST, color_scheme=scheme, look=True)
        page.wait_for_function(TURNED, arg=scheme)
        # of a text in a figure, and of what is below all
        colors.append(
            page.evaluate("""() => {
            document.getAnimations().forEach(change => change.finish());
            const t = document.querySelector('svg[role=img] text');
            return [getComputedStyle(t).fill,
                    getComputedStyle(document.body).backgroundColor]}""")
        )
    (ink1, ground1), (ink2, ground2) = colors
    assert ink1 != ink2 and ground1 != ground2


def test_copied_code_is_clean(book, open_page):
    page = open_page(book / FIRST, look=True)
    assert page.locator("div.cell_output button.copybtn").count() == 0
    codes = page.evaluate("""() => [...document.querySelectorAll(
        "div.cell_input button.copybtn")].map(button =>
        document.querySelector(button.dataset.clipboardTarget).innerText)""")
    assert len(codes) > 5
    for code in codes:
        assert not re.search(r"^\s*(#\s*\||>>>|In \[)", code, re.M)


def test_unfinished_words_do_not_stand_on_pages():
    for path in [
        *(ROOT / "book").glob("*.md"),
        ROOT / "README.md",
        *course.notebook_paths(ROOT),
    ]:
        text = Path(path).read_text(encoding="utf-8")
        assert not re.search(r"\bTODO\b|\bFIXME\b|\bXXX\b|lorem ipsum", text), path.name


# --- what every page inherits, read


def shifted_sources(book, root):
    "Modules whose definitions stand elsewhere on their source pages."
    shifted = []
    for module in course.module_paths(root):
        page = (book / "_modules" / module.relative_to(root)).with_suffix(".html")
        text = page.read_text(encoding="utf-8")
        body = re.search(r"<pre>(.*)</pre>", text, re.S)[1]
        body = re.sub(
            r'<div class="viewcode-block"[^>]*>\n'
            r'<a class="viewcode-back".*?</a>\n|</div>\n',
            "",
            body,
        )
        shown = re.sub(r"<[^>]+>", "", body).lstrip("\n").split("\n")
        lines = module.read_text(encoding="utf-8").split("\n")
        for word in ("def ", "class "):
            if [i for i, s in enumerate(shown) if s.startswith(word)] != [
                i for i, s in enumerate(lines) if s.startswith(word)
            ]:
                shifted.append(f"{module.relative_to(root)}: {word}")
    return shifted


def test_source_pages_keep_every_line_where_it_is(book):
    assert not shifted_sources(book, ROOT)
    # there are lines that could be cut, which the pages leave blank
    assert any(
        re.search(r"^#\|", module.read_text(encoding="utf-8"), re.M)
        for module in course.module_paths(ROOT)
    )


def test_roles_and_lists_are_what_they_say(book):
    for page in site(book):
        reading = read(page)
        assert b"Toggle hidden content" not in reading.source, page.name
        assert b"doc-biblioentry" not in reading.source, page.name
        # a browser would end the signature where a list begins in it
        for signature in re.findall(rb'<dt class="sig .*?</dt>', reading.source, re.S):
            assert not re.search(rb"<d[ld]", signature), signature[:200]
        for heading in reading.headings:
            assert not re.search(r"\b[A-Z]_[A-Z]\b", heading), heading


def test_a_page_leads_only_to_the_owner_and_to_cited_works(book):
    owner = read_owner(ROOT)
    foreign = addresses.foreign_addresses(book, owner)
    assert not foreign, (len(foreign), foreign[:10])
    wrong = addresses.own_address_faults(book, owner)
    assert not wrong, (len(wrong), wrong[:10])
    if owner:
        assert not addresses.misleading_addresses(book, ROOT, owner)


def test_pages_load_what_they_use(book):
    for page in site(book):
        source = read(page).source
        assert b"fontawesome.js" not in source and b"thebe" not in source
        assert b"searchtools.js" not in source
        assert (b"search-titles.js" in source) == (page.name == "search.html")
        assert (b"tex-chtml.js" in source) == (b'class="math ' in source), page.name
    for gone in ("fontawesome.js", "searchtools.js", "searchindex.js"):
        assert not list(book.rglob(gone))


def test_no_head_of_a_table_is_empty(book):
    empty = re.compile(rb"<th\b[^>]*>(?:\s|</?p>)*</th>")
    assert empty.search(b'<th class="head"><p></p></th>')
    for page in site(book):
        assert not empty.search(read(page).source), place(book, page)


def test_no_image_hides_links(book):
    "What is inside an image is not told to those who listen."
    drawing = re.compile(rb"<svg\b([^>]*)>(.*?)</svg>", re.S)
    seen = 0
    for page in site(book):
        for head, body in drawing.findall(read(page).source):
            if b"<a " in body:
                seen += 1
                assert b'role="group"' in head, place(book, page)
    assert seen > 10


# --- what every page inherits, in the browser


@contextmanager
def serve(folder, lost):
    "A folder over HTTP; `lost` is the page for addresses that lead nowhere."

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def send_error(self, code, *args):
            if code != 404:
                return super().send_error(code, *args)
            page = lost.read_bytes()
            self.send_response(404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(page)

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=str(folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@pytest.fixture(scope="module")
def address(book):
    "The site over HTTP, as readers get it."
    with serve(book, book / "404.html") as address:
        yield address


def chapters(book):
    return [
        page for name, page in notebook_pages(book).items() if re.match(r"0\d_", name)
    ]


@pytest.mark.parametrize("width", by_day([1280, 390], 390))
def test_formulas_are_text(book, open_page, width):
    seen = 0
    for path in (*chapters(book)[1:8:6], book / "book" / "notation.html"):
        page = open_page(path, width)
        page.wait_for_function(SET)
        page.wait_for_function(TURNED, arg="light")
        seen += page.locator("mjx-container").count()
        assert (
            page.evaluate("""() => [
            ...document.querySelectorAll("mjx-container")].filter(
            m => m.tabIndex >= 0 && m.scrollWidth <= m.clientWidth).length""")
            == 0
        ), path.name
        # an inline formula scrolls where it is wider than its line only
        assert (
            page.evaluate("""() => [...document.querySelectorAll(
            "mjx-container:not([display])")].filter(m => {
            const style = getComputedStyle(m);
            return style.overflowX !== "visible" && style.overflowX !==
            "clip" && m.scrollWidth <= m.clientWidth + 1 &&
            m.offsetParent !== null}).length""")
            == 0
        ), path.name
        # what follows it stays on its line
        assert (
            page.evaluate("""() => [...document.querySelectorAll(
            "span.math")].filter(m => m.nextSibling &&
            /^[,.;:!?)]/.test(m.nextSibling.textContent) &&
            getComputedStyle(m.parentElement).whiteSpace !== "nowrap" &&
            !m.querySelector(".tf-wide")).length""")
            == 0
        ), path.name
    assert seen > 50


def contrast(a, b):
    "Of two CSS colors, as WCAG counts it."

    def light(color):
        part = [float(c) / 255 for c in re.findall(r"[\d.]+", color)[:3]]
        part = [
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in part
        ]
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


@pytest.mark.parametrize("name", by_day([PARTS, CHAPTER], PARTS), ids=str)
@pytest.mark.parametrize("scheme", by_day(["light", "dark"], "dark"))
def test_focus_is_seen_on_every_control(book, open_page, name, scheme):
    page = open_page(book / name, color_scheme=scheme)
    names = set()
    for _key in range(200):
        page.keyboard.press("Tab")
        at = page.evaluate(FOCUS)
        if at["name"].startswith("BODY"):
            break
        names.add(at["name"])
        assert at["line"] not in ("none", "auto") and at["wide"] >= 2, at
        assert contrast(at["color"], at["ground"]) >= 3, at
        assert at["seen"] and at["opacity"] == "1", at
    every = " ".join(names)
    for kind in (
        "theme-switch-button",
        "dropdown-toggle",
        "primary-toggle",
        "search-button",
        "SUMMARY",
        "copybtn",
        "A.",
    ):
        assert kind in every, (kind, sorted(names))


def test_paper_is_light_and_without_the_frame(book, open_page):
    page = open_page(book / OLD_FORM, color_scheme="dark", look=True)
    page.wait_for_function(TURNED, arg="dark")
    lines = "div.cell details.hide > summary:visible"
    claims = page.locator(f"{lines}:has-text('✓')").count()
    assert page.locator(lines).count() > claims > 0
    screen = page.evaluate("getComputedStyle(document.body).color")
    page.emulate_media(media="print", color_scheme="dark")
    page.wait_for_function("document.documentElement.dataset.theme === 'light'")
    ink, ground, pale = page.evaluate("""() => {
        const of = (s, p) => getComputedStyle(document.querySelector(s))[p];
        const ground = of("body", "backgroundColor");
        return [of("article section > p", "color"), ground,
            of("pre span.k", "color")]}""")
    assert ink != screen and contrast(ink, ground) > 10
    assert contrast(pale, ground) > 4.5
    title = page.locator("article h1").first
    assert title.is_visible() and title.inner_text().startswith("12.")
    assert page.locator("h1:visible").count() == 1
    for frame in (
        ".bd-sidebar-primary",
        ".bd-header-article",
        ".prev-next-footer",
        ".bd-footer-content",
        ".copybtn",
        ".headerlink",
        ".toggle-button",
        "#pst-back-to-top",
    ):
        assert page.locator(f"{frame}:visible").count() == 0, frame
    # of the cells that are folded, the claims alone have a line
    assert page.locator(lines).count() == claims
    # boxes break between pages, and what is folded stays folded
    assert (
        page.evaluate("""() => [...document.querySelectorAll(
        "pre, div.cell_input, div.output, div.solution, div.highlight, " +
        "details.hide, " +
        "div[class*=highlight-]")].filter(e => {
        const s = getComputedStyle(e);
        return s.breakInside !== "auto" || s.overflowX !== "visible" ||
            s.display === "flex"}
        ).length""")
        == 0
    )
    assert page.locator("div.solution > section:visible").count() == 0
    assert page.locator("div.solution > .admonition-title:visible").count()
    page.emulate_media(media="screen", color_scheme="dark")
    page.wait_for_function(
        "ink => getComputedStyle(document.body).color === ink", arg=screen
    )


def test_paper_is_light_without_the_script(book, open_page):
    source = (book / CHAPTER).read_text(encoding="utf-8")
    dark = book / "nbs" / "_dark.html"
    dark.write_text(
        re.sub(r'data-theme="\w+"', 'data-theme="dark"', source, count=1),
        encoding="utf-8",
    )
    try:
        page = open_page(dark, color_scheme="dark", java_script_enabled=False)
        page.emulate_media(media="print")
        ink, ground = page.evaluate("""() => ["color", "backgroundColor"]
            .map(p => getComputedStyle(document.body)[p])""")
    finally:
        dark.unlink()
    assert contrast(ink, ground) > 10 and contrast(ground, "0,0,0") > 20


def test_headings_and_code_are_set_in_order(book, open_page):
    path = next(path for path in chapters(book) if b"<h3>" in read(path).source)
    page = open_page(path, look=True)
    weights, sizes = zip(
        *page.evaluate("""() => ["h1", "h2", "h3"].map(h => {
        const s = getComputedStyle(document.querySelector("article " + h));
        return [+s.fontWeight, parseFloat(s.fontSize)]})"""),
        strict=False,
    )
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
    page = open_page(
        book / OLD_FORM, 390, color_scheme=scheme, is_mobile=True, has_touch=True
    )
    page.add_style_tag(content=".copybtn { display: none !important }")
    wide, short = page.evaluate("""() => {
        const all = [...document.querySelectorAll("div.cell_input pre")];
        all.forEach((e, i) => { e.dataset.i = i });
        const seen = all.filter(e => e.checkVisibility()), room = e =>
            e.scrollWidth - e.clientWidth;
        return [seen.filter(e => room(e) > 40), seen.filter(e => room(e) <=
            0)].map(l => l.map(e => `pre[data-i="${e.dataset.i}"]`))}""")
    assert len(wide) > 3 and short
    wide = page.locator(wide[0])
    short = page.locator(short[0])
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
    page.wait_for_function(
        """() => {
        const buttons = [...document.querySelectorAll("button.copybtn")];
        return buttons.length && buttons.every(
            button => getComputedStyle(button).opacity === "1")}""",
        timeout=5_000,
    )


def test_icons_are_drawn(book, open_page):
    page = open_page(book / CHAPTER, look=True)
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
    assert (
        page.evaluate("""() => [...document.querySelectorAll(
        "button, summary")].filter(b => b.offsetParent && !["aria-label",
        "title", "data-bs-original-title"].some(n => b.getAttribute(n)) &&
        !b.textContent.trim()).map(b => b.outerHTML)""")
        == []
    )


# What people look for, and what they want to read: a part of the title of the section,
# or of its page, that has to stand first or second.
WANTED = {
    "GQA": "Shared keys and values",
    "MQA": "Shared keys and values",
    "MLA": "Latent attention",
    "DSA": "Sparse attention",
    "SWA": "Sliding window",
    "ring buffer": "Sliding window",
    "rolling buffer cache": "Sliding window",
    "chunked prefill": "In-flight batching",
    "RoPE scaling": "Rotary positions",
    "YaRN": "Rotary positions",
    "top-p": "Sampling",
    "nucleus": "Sampling",
    "LayerNorm vs RMSNorm": "Keeping numbers alive",
    "causal mask": "Attention by hand",
    "teacher forcing": "encoder–decoder",
    "tied embeddings": "GPT",
    "BPE merges": "Bytes and byte pairs",
    "KV cache memory": "The KV cache",
    "speculative decoding": "peculative decoding",
    "Muon": "Objectives and optimizers",
    "label smoothing": "Translation",
    "373.58": "A tokenizer people use",
    "√d": "Why divide by √d",
    "weight tying": "GPT",
    "continuous batching": "In-flight batching",
    "PagedAttention": "In-flight batching",
    "attention sink": "Sliding window",
    "weight absorption": "Latent attention",
    "causal_mask": "causal_mask",
    "RotaryEmbedding": "RotaryEmbedding",
    # other names, and other ways to write one
    "TTFT": "A long prompt beside short texts",
    "NSA": "What is a candidate",
    "MLE": "What a model is paid for",
    "Chinchilla": "How large, how long",
    "overfitting": "Texts that it must not have read",
    "beam search": "Six texts that can be counted",
    "prenorm": "Where the norm stands",
    "flash attention": "The kernel, and what it must be told",
    "attention mask": "Who may attend to whom",
    "stop sequence": "Stop strings",
    "JSON mode": "Only what the grammar allows",
    # questions and symptoms
    "why divide by sqrt d": "Why divide by √d",
    "why does my model repeat itself": "Penalties against loops",
    "loss is nan": "A number that is none",
    "resume training after a crash": "Killed",
    "context length extension": "Longer than the training",
    # a term among other words
    "mixed precision bf16": "What a step keeps in memory",
    "relative position bias T5": "Biases on the distance",
    "BERT 80 10 10 masking": "The rule of 15 percent",
    # words that hardly any section has all of
    "beam width BLEU drop": "What a wider beam finds",
    # names of other libraries, a number, papers
    "is_causal": "Masks: True means blocked",
    "key_padding_mask": "Masks: True means blocked",
    "ignore_index": "From a name to a batch",
    "num_key_value_heads": "Shared keys and values",
    "KV heads": "Shared keys and values",
    "top_p": "Top-k and top-p",
    "131,072": "The KV cache",
    "attention is all you need": "Attention is all you need",
    "Mistral 7B": "Mistral 7B",
    # what people call it, and the book does not
    "6ND": "What training costs",
    "6N": "What a token costs",
    "6P": "What a token costs",
    "6NT": "What training costs",
    "124M": "GPT-2",
    "124 million": "GPT-2",
    "ppl": "Honesty is cheapest",
    "MoE": "Costs from a configuration",
    "8 bit weights": "Weights of one byte",
    "quantization": "Weights of one byte",
    "quantized": "Weights of one byte",
    "what does a head do": "What heads learn",
    "induction head": "What heads learn",
    "how does it learn": "A dozen lines that train anything",
    "why divide by square root": "Why divide by √d",
    "residual stream": "The residual stream",
    "ChatGPT": "The Verified Transformer",
    "softmax": "Softmax turns scores into shares",
    "perplexity vs bits per byte": "Honesty is cheapest",
}
# what has to stand first: a lesson before the glossary, a whole name before its parts
FIRST_OF_ALL = {
    "softmax overflow": "Softmax turns scores into shares",
    "num_heads": "What every argument means",
    "kv cache": "21. The KV cache",  # the lesson, and then the section of lesson 7
    "sampling": "20. Sampling",
    "train a model": "17. Training",  # in plain words a lesson, no page of the package
}
COMPLETE = "html[data-search=complete]"  # the texts have been read


def results(page, words):
    "Titles with the pages they stand on, as the search lists them."
    page.fill(".bd-search-container input", words)
    page.wait_for_url(lambda url: url.endswith(f"?q={quote(words, safe='')}"))
    return page.evaluate("""() => [...document.querySelectorAll(".tf-results li")]
        .map(li => [...li.querySelectorAll("a, .tf-where")]
            .map(part => part.textContent).join(" | "))""")


def test_search_finds_what_people_look_for(book, open_page):
    page = open_page(f"{(book / 'search.html').as_uri()}?q=first")
    page.wait_for_selector(COMPLETE)
    # all in one call, by the form: a query that is typed waits for the next letter
    found = page.evaluate(
        """all => Object.fromEntries(all.map(words => {
        const box = document.querySelector(".bd-search-container");
        box.querySelector("input").value = words;
        box.querySelector("form").dispatchEvent(new Event("submit"));
        return [words, [...box.querySelectorAll(".tf-results li")].slice(0, 2)
            .map(li => [...li.querySelectorAll("a, .tf-where")]
                .map(part => part.textContent).join(" | "))]}))""",
        [*WANTED, *FIRST_OF_ALL],
    )
    missed = {
        words: found[words]
        for number, table in ((2, WANTED), (1, FIRST_OF_ALL))
        for words, wanted in table.items()
        if not any(wanted.lower() in title.lower() for title in found[words][:number])
    }
    assert not missed


def test_search_fetches_nothing_and_answers_while_one_types(book, address, open_page):
    page = open_page(f"{address}/search.html?q=rotary")
    page.wait_for_selector(COMPLETE)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.fill(".bd-search-container input", "kv cache memory")
    page.wait_for_function(
        "() => /KV cache/.test(document.querySelector('.tf-results li').textContent)"
    )
    assert page.url.endswith("?q=kv%20cache%20memory") and not asked
    marks = page.locator(".tf-results li").first.locator("p mark")
    assert marks.count() > 0
    page.fill(".bd-search-container input", "qzxwvk")
    page.wait_for_function("""() => document.querySelector(".search-summary")
        .textContent === "No section has “qzxwvk”." """)
    assert page.locator(".tf-results li").count() == 0


def test_titles_are_found_before_the_texts_have_come(address, open_page):
    page = open_page("about:blank")
    page.route("**/search-texts.js", lambda route: route.fulfill(body=""))
    page.goto(f"{address}/search.html?q=rotary")
    page.wait_for_selector(".tf-results li")
    assert "Rotary positions" in page.inner_text(".tf-results li >> nth=0")
    assert page.inner_text(".search-summary") == "Reading the book …"
    page.unroute_all()


def test_what_the_search_loads_is_small(book):
    "Titles are read first; both scripts held 2.4 MB when they were one."
    bytes_of = {
        name: (book / "_static" / f"search-{name}.js").stat().st_size
        for name in ("titles", "texts")
    }
    assert bytes_of["titles"] < 300_000 and bytes_of["texts"] < 850_000, bytes_of


def test_search_says_what_some_sections_lack_and_shows_more(book, open_page):
    page = open_page(f"{(book / 'search.html').as_uri()}?q=attention")
    page.wait_for_selector(COMPLETE)
    items, more = page.locator(".tf-results li"), page.locator(".tf-more-results")
    assert items.count() == 30 and more.inner_text() == "Show 30 more"
    more.click()
    assert items.count() == 60
    assert page.evaluate("""() => document.activeElement ===
        document.querySelectorAll(".tf-results a")[30]""")
    results(page, "zebra perplexity giraffe")
    page.wait_for_function("""() => /^No section has all of these words; these have/
        .test(document.querySelector(".search-summary").textContent)""")
    assert items.count() > 0


def test_no_wrong_option_and_no_broken_formula_is_quoted(book, open_page):
    page = open_page(f"{(book / 'search.html').as_uri()}?q=typical+clearly+best")
    page.wait_for_selector(COMPLETE)
    for words in ("Typical is clearly the best of them", "softmax exponentials sum"):
        results(page, words)
        for text in page.locator(".tf-results li p").all_inner_texts():
            assert not re.search(r"clearly the best|\\?frac|_j?sum|\\[a-z]{3,}\{", text)


def test_the_dialogue_shows_results_while_one_types(book, address, open_page):
    page = open_page(f"{address}/nbs/06_norms.html")
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.keyboard.press("Control+k")
    page.wait_for_selector(COMPLETE)
    assert len(asked) == 4 and all(url.startswith(address) for url in asked), asked
    page.keyboard.type("induction head")
    items = page.locator("#pst-search-dialog .tf-results li")
    page.wait_for_function("""() => /What heads learn/.test(document.querySelector(
        "#pst-search-dialog .tf-results")?.textContent)""")
    assert items.count() == 6
    # the sign beside the words, not on them; and one ring of focus
    sign, field, room, rings = page.evaluate("""() => {
        const form = document.querySelector("#pst-search-dialog form");
        const input = form.querySelector("input"), style = getComputedStyle(input);
        return [form.querySelector("i").getBoundingClientRect().right,
            input.getBoundingClientRect().left, parseFloat(style.paddingLeft),
            [form, input].filter(box => {
                const s = getComputedStyle(box);
                return s.boxShadow !== "none" || s.outlineStyle !== "none" ||
                    !/, 0\\)|transparent/.test(s.borderTopColor) &&
                    parseFloat(s.borderTopWidth) > 0}).length]}""")
    assert field + room > sign + 4 and rings == 1, (field, room, sign, rings)
    href = page.locator("#pst-search-dialog .tf-all-results").get_attribute("href")
    assert href == f"{address}/search.html?q=induction%20head"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector("mark.tf-found")
    assert page.inner_text("mark.tf-found").lower() == "induction head"


def test_a_result_near_a_heading_opens_at_the_heading(book, open_page):
    words = "find=stiffness+negative+can+score&phrase=no+such"
    page = open_page(
        f"{(book / FIRST).as_uri()}?{words}#softmax-turns-scores-into-shares"
    )
    page.wait_for_selector("mark.tf-found")
    mark, head = page.evaluate("""() => ["mark.tf-found",
        "#softmax-turns-scores-into-shares > h2"].map(name =>
            document.querySelector(name).getBoundingClientRect().top)""")
    assert 0 <= head < 200 and head < mark < 900
    assert page.inner_text("mark.tf-found") == "stiffness"  # the rarest, said first


def test_search_reads_the_article_alone(book, open_page):
    page = open_page(f"{(book / 'search.html').as_uri()}?q=first")
    page.wait_for_selector(COMPLETE)
    for words in ("Binder", "Colab", "tf-machine"):
        results(page, words)
        texts = page.locator(".tf-results li p").all_inner_texts()
        assert not any("Launch" in text for text in texts)


def test_a_result_leads_to_the_words_in_their_fold(book, open_page):
    words = quote("variance of ReLU forty layers a millionth is left")
    page = open_page(f"{(book / 'search.html').as_uri()}?q={words}")
    page.wait_for_selector(COMPLETE)
    page.locator(".tf-results a").first.click()
    page.wait_for_selector("mark.tf-found")
    assert page.evaluate("""() => {
        const mark = document.querySelector("mark.tf-found");
        const box = mark.getBoundingClientRect();
        return !mark.closest("details:not([open])") && box.height > 0 &&
            box.top >= 0 && box.bottom <= innerHeight && !location.search}""")


def test_the_sidebar_folds_and_shows_where_one_is(book, address, open_page):
    page = open_page(f"{address}/nbs/01_attention_by_hand.html")
    assert page.locator(".bd-links details.tf-part").count() == 3
    assert page.locator(".bd-links details.tf-part[open]").count() == 0
    for name in ("26_sliding_window", "package/serving/engine"):
        page.goto(f"{address}/nbs/{name}.html", wait_until="load")
        assert page.evaluate("""() => {
            const box = document.querySelector(".bd-links li.current > a")
                .getBoundingClientRect();
            return box.height > 0 && box.top >= 0 && box.bottom <= innerHeight}""")
    assert page.locator(".bd-links details.tf-part[open]").count() == 1


SHIFTS = """() => { window.shift = 0; window.shifted = [];
    new PerformanceObserver(list => list.getEntries().forEach(entry => {
        if (entry.hadRecentInput) return;
        window.shift += entry.value;
        window.shifted.push([entry.value, ...entry.sources.map(source =>
            source.node && (source.node.className || source.node.nodeName))]);
    })).observe({type: "layout-shift", buffered: true}); }"""


@pytest.mark.parametrize("width", [1280, 390])
def test_a_lesson_stands_still_while_its_fonts_come(address, chromium, width):
    "Cumulative layout shift under 0.1, each font being half a second late."

    def late(route):
        page.wait_for_timeout(500)
        route.continue_()

    page = chromium.new_page(viewport={"width": width, "height": 900})
    page.set_default_timeout(PATIENCE)
    page.add_init_script(f"({SHIFTS})()")
    page.route("**/fonts/*.woff2", late)
    page.goto(f"{address}/{FIRST.as_posix()}", wait_until="load")
    page.evaluate("document.fonts.ready.then(() => true)")
    page.wait_for_timeout(300)
    shift, shifted = page.evaluate("[window.shift, window.shifted]")
    page.unroute_all(behavior="ignoreErrors")
    page.close()
    assert shift < 0.1, (shift, shifted)


def test_the_fonts_of_text_and_headings_are_asked_for_first(book):
    for path in (book / "book" / "intro.html", book / FIRST):
        targets = re.findall(rb'"([^"]+-latin-wght-normal\.woff2)"', read(path).source)
        assert len(targets) == 2
        for target in targets:
            assert (book / target_of(place(book, path), target.decode())).exists()


def test_the_fonts_are_asked_for_before_they_are_used(address, open_page, book):
    asked = "[...document.querySelectorAll('link[rel=preload][as=font]')].length"
    assert open_page(f"{address}/{FIRST.as_posix()}").evaluate(asked) == 2
    file = (book / FIRST).as_uri()
    assert open_page(file).evaluate(asked) == 0  # a file may not be asked so


def test_the_way_that_was_taken_is_shown_and_can_be_left(address, open_page):
    page = open_page(f"{address}/nbs/02_bytes_and_bpe.html")
    lines = page.locator("nav.tf-way:visible")
    assert lines.count() == 0
    page.goto(f"{address}/book/routes/understand.html", wait_until="load")
    begin = page.locator("a[data-begin]")
    first = begin.inner_text()
    assert first.startswith("Begin: ")
    page.locator(".tf-route input").first.check()
    assert begin.inner_text().startswith("Go on: 1. Attention")
    assert page.locator(".bd-links a.tf-was-read").count() == 1
    page.locator(".tf-route a", has_text="Bytes and byte pairs").click()
    two = "document.querySelectorAll('nav.tf-way:not([hidden])').length === 2"
    page.wait_for_function(two)  # at the head and at the foot
    assert lines.count() == 2
    said = lines.first.inner_text()
    assert "Understand it, 3 of " in said and "4. Absolute positions" in said
    lines.first.locator("button").click()
    assert lines.count() == 0
    page.reload(wait_until="load")
    assert lines.count() == 0


@pytest.mark.parametrize("name", course_map.ROUTES_BY_NAME)
def test_each_way_begins_with_what_was_not_read(name, address, open_page):
    "Also a page of the package is ticked; scripts raise no error."
    page = open_page(f"{address}/book/routes/{name}.html")
    faults = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.reload(wait_until="load")
    boxes = page.locator(".tf-route input")
    begin = page.locator("a[data-begin]")
    titles = page.locator(".tf-route li a").all_inner_texts()
    assert begin.inner_text() == f"Begin: {titles[0]}"
    for i in range(len(titles) - 1):
        boxes.nth(i).check()
        assert begin.inner_text() == f"Go on: {titles[i + 1]}"
    assert not faults


def test_a_route_leads_to_its_first_lesson(book):
    for name in course_map.ROUTES_BY_NAME:
        source = read(book / "book" / "routes" / f"{name}.html").source.decode()
        lesson = course_map.on_route(ROOT, name)[0].name
        (link,) = re.findall(r'class="right-next"\s+href="([^"]+)"', source)
        assert link == f"../../nbs/{lesson}.html", name
    sidebar = [urlsplit(link).path for link in read(book / FIRST).sidebar]
    ways = [link for link in sidebar if "/routes/" in link]
    assert sidebar[1:5] == ways and len(ways) == 4


def test_the_claims_of_a_lesson_open_their_own_fold(address, open_page):
    page = open_page(f"{address}/nbs/06_norms.html")
    page.locator(".tf-head a", has_text="proved here").click()
    page.wait_for_selector("#claims-06-norms[open]")
    assert page.locator("details.tf-closer[open]").count() == 1
    top = page.locator("#claims-06-norms").bounding_box()["y"]
    assert 0 <= top < 900


def test_the_title_of_a_page_is_its_first_heading(book, open_page):
    page = open_page(book / FIRST, look=True)
    levels = page.evaluate("""() => [...document.querySelectorAll(
        "h1, h2, h3, h4, [role=heading]")].map(head => head.localName)""")
    assert levels[0] == "h1" and levels.count("h1") == 1 and "p" not in levels


def test_the_search_stays_in_view_beside_a_late_lesson(address, open_page):
    page = open_page(f"{address}/nbs/26_sliding_window.html", height=700)
    tops = page.evaluate("""() => [".navbar-brand", ".search-button-field",
        ".bd-links li.current > a"].map(name => document.querySelector(
        `.bd-sidebar-primary ${name}`).getBoundingClientRect())
        .map(box => [box.top, box.bottom])""")
    assert tops[0][0] >= -2 and tops[0][1] <= tops[1][0] + 2
    assert tops[1][1] <= tops[2][0] and tops[2][1] <= 700, tops


def test_every_page_has_a_title_said_once_and_a_description(book):
    name = "The Verified Transformer"
    for path in pages(book):
        reading = read(path)
        assert len(reading.meta.get("description", "")) > 40, place(book, path)
        assert reading.source.count(f"{name}</title>".encode()) == 1
        assert f"{name} &#8212; {name}</title>".encode() not in reading.source


def test_an_address_that_leads_nowhere(address, open_page):
    page = open_page(f"{address}/some/where/else.html")
    assert "Nothing stands at this address" in page.inner_text("article h1")
    face = page.evaluate(
        "getComputedStyle(document.querySelector('article h1')).fontFamily"
    )
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
    for _box in runs:  # one opens the next
        page.wait_for_function(TURNED, arg="light")
    assert [i for i, box in enumerate(page.evaluate(opened)) if box] == [
        *range(first, first + runs[several])
    ]


def test_a_choice_says_whether_it_is_right(book, open_page):
    for choice, key in ((1, None), (0, "Enter")):
        page = open_page(book / PARTS)
        buttons = page.locator(".tf-ask ul.tf-options button")
        assert buttons.count() == 3
        assert not page.locator(".tf-ask details.tf-reveal").get_attribute("open")
        if key:
            buttons.nth(choice).focus()
            page.keyboard.press(key)
        else:
            buttons.nth(choice).click()
        verdict = page.locator(".tf-verdict[role=status]").inner_text()
        right = "They stay as they are."
        assert buttons.nth(0).text_content() == f"{right} (the right answer)"
        assert page.get_by_role("group", name="If 10 is added").count() == 1
        assert verdict == ("Right." if choice == 0 else f"No. The answer is: {right}")
        assert page.locator(".tf-ask details.tf-reveal[open]").count() == 1
        assert "tf-right" in buttons.nth(0).get_attribute("class")
        assert buttons.nth(choice).get_attribute("aria-pressed") == "true"
        buttons.nth(2).click(force=True)  # a second choice changes nothing
        assert page.locator(".tf-verdict").inner_text() == verdict


def test_on_paper_the_folds_are_open(book, open_page):
    page = open_page(book / PARTS, look=True)
    opened = """() => [...document.querySelectorAll(
        ".bd-article details.tf-fold, .tag_setup details")].map(f => f.open)"""
    assert len(page.evaluate(opened)) > 5 and not any(page.evaluate(opened))
    page.emulate_media(media="print")
    page.wait_for_function(f"({opened})().every(Boolean)")
    # the setup is printed, without its imports
    ink, code = page.evaluate("""() => [".cell_input", "pre"].map((kind, i) => {
        const part = document.querySelector(`.tag_setup ${kind}`);
        return i ? part.innerText : getComputedStyle(part).opacity})""")
    assert ink == "1" and code.strip() and "import" not in code
    page.emulate_media(media="screen")
    page.wait_for_function(f"!({opened})().some(Boolean)")
    assert "import" in page.locator(".tag_setup pre").text_content()


def test_pages_of_paper_are_numbered(address, open_page):
    page = open_page(f"{address}/{PARTS.as_posix()}")
    rules = page.evaluate("""() => [...document.styleSheets].flatMap(sheet =>
        [...sheet.cssRules]).filter(rule => rule.conditionText === "print").flatMap(
        rule => [...rule.cssRules].map(inner => inner.cssText)).join("")""")
    assert "counter(page)" in rules and '"The Verified Transformer"' in rules


def test_a_finger_that_scrolls_does_not_move_a_slider(book, open_page):
    page = open_page(book / PARTS)
    slider = page.get_by_role("slider", name="divide the scores by")
    slider.dispatch_event("pointerdown")
    slider.evaluate("""s => { s.value = 3;
        s.dispatchEvent(new Event("input", {bubbles: true})); }""")
    assert slider.get_attribute("aria-valuetext").startswith("8")
    slider.dispatch_event("pointercancel")
    assert slider.get_attribute("aria-valuetext") == "1"


def test_the_skip_link_leads_to_the_text(book, open_page):
    page = open_page(book / PARTS)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate(
        "document.activeElement.closest('article.bd-article') !== null"
    )


def test_one_fold_holds_output_and_answer(book, open_page):
    page = open_page(book / PARTS, look=True)
    assert page.locator("details.tf-answer").count() == 0
    reveal = page.locator(".tf-ask details.tf-reveal")
    assert reveal.locator(".cell_output").count() == 1
    assert "Every exponential" in reveal.text_content()
    code = page.locator("div.cell", has_text="raised = shares").first
    assert code.is_visible() and not reveal.locator(".cell_output").is_visible()
    assert code.bounding_box()["y"] < page.locator(".tf-ask").bounding_box()["y"]


def test_without_the_script_options_are_a_list(book, open_page):
    page = open_page(book / PARTS, java_script_enabled=False)
    assert page.locator(".tf-ask ul.tf-options > li").count() == 3
    assert page.locator(".tf-ask button").count() == 0
    page.locator(".tf-ask details.tf-reveal > summary").click()
    assert page.locator(".tf-ask .cell_output").is_visible()


def test_the_strip_is_one_low_line(book, open_page):
    page = open_page(book / PARTS, look=True)
    strip = page.locator("nav.tf-strip")
    assert strip.bounding_box()["height"] <= 90
    assert page.locator(".tf-machine").count() == 0
    assert strip.locator(".tf-lit").all_inner_texts() == ["attention"]
    narrow = open_page(book / PARTS, width=390, look=True)
    assert narrow.locator("nav.tf-strip").bounding_box()["height"] <= 140


def test_text_outputs_wrap_on_a_phone(book, open_page):
    page = open_page(book / PARTS, width=390, look=True)
    wide = page.evaluate("""() => [...document.querySelectorAll(
        ".bd-article .cell_output pre")].filter(
        pre => pre.scrollWidth > pre.clientWidth + 1).length""")
    assert wide == 0


def test_exercises_say_their_title_once(book):
    text = read(book / PARTS).source.decode()
    titles = re.findall(r'<p class="admonition-title">(.*?)</p>', text)
    build = [re.sub("<[^>]+>", "", t) for t in titles if "Build" in t]
    assert len(build) == 1 and re.fullmatch(
        r"Exercise \d+ Build: shares of large scores 5 minutes", build[0]
    ), build
    old = read(book / OLD_FORM).source.decode()
    solutions = re.findall(r'<p class="admonition-title">Solution to.*?</p>', old)
    assert solutions and all(
        re.fullmatch(r"Solution to Exercise 12\.\d", re.sub("<[^>]+>", "", s))
        for s in solutions
    )


def test_every_live_figure_is_awake(book, open_page):
    """On each page that has one, with the data of its cell.

    The pages that are opened by day in all kinds are asked for it there.
    """
    live = {
        place(book, page)
        for page in notebook_pages(book).values()
        if re.search(rb'<figure[^>]*\bdata-live="', read(page).source)
    }
    # lesson 1, the page of figures and that for authors
    assert len(live) >= 3 and live & {*DAY}
    for name in sorted(live - {*DAY}):
        page = open_page("about:blank")
        page.route("**/tex-chtml.js*", lambda route: route.fulfill(body=""))
        with watch(page) as seen:
            page.goto((book / name).as_uri(), wait_until="load")
            figures = page.locator("figure[data-live]").count()
            assert figures and not page.evaluate(ASLEEP) and not seen, (name, seen)
        page.unroute_all()
