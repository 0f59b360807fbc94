"""The figures of ``tformer.plot``: their text, and what a browser makes of it."""

import base64
import doctest
import io
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from conftest import ROOT
from tformer import plot

LIGHT = "rgb(29, 36, 48)"
DARK = "rgb(213, 220, 228)"


def curve(title="A curve", height=1.0):
    fig, ax = plot.figure(4, 2)
    ax.plot([0, 1, 2], [0, height, 0])
    ax.set(xlabel="step", title="a < b & c")
    return plot.show(fig, title, "It rises & falls.")


def triangle(n):
    a = np.full((4, 4), np.nan)
    for i in range(min(n, 4)):
        a[i, : i + 1] = 1 / (i + 1)
    fig, ax = plot.figure(3.6, 2.4)
    plot.heatmap(ax, a, list("abcd"), list("abcd"), ".2f", vmin=0, vmax=1)
    return fig


def steps(title="Steps", n=4, **kw):
    return plot.stepper(
        [(triangle(i + 1), f"row {i} <is> drawn") for i in range(n)], title, **kw
    )


def ids(text):
    return re.findall(r'\sid="([^"]+)"', text)


# ---- the text of a figure ----


def test_examples_in_docstrings_do_what_they_show():
    failed, attempted = doctest.testmod(plot)
    assert attempted >= 11 and not failed


def test_same_figure_same_bytes():
    assert curve().svg == curve().svg
    assert steps()._repr_html_() == steps()._repr_html_()


def test_drawing_order_leaves_no_trace():
    alone = curve("second").svg
    curve("first", 3.0)
    assert curve("second").svg == alone


def test_ids_are_unique_on_a_page():
    page = (
        curve("one").svg
        + curve("two").svg
        + curve("two", 2.0).svg
        + steps()._repr_html_()
        + steps("Others")._repr_html_()
    )
    found = ids(page)
    assert len(found) == len(set(found))
    wanted = re.findall(r'(?:url\(|href=")#([^")]+)', page)
    assert wanted and set(wanted) <= set(found)


def test_equal_frames_keep_their_ids_apart():
    same = plot.stepper([(triangle(2), "same")] * 3, "Same")._repr_html_()
    assert len(ids(same)) == len(set(ids(same)))


def test_an_element_not_a_document():
    svg = curve().svg
    assert svg.startswith("<svg ") and svg.endswith("</svg>")
    for bad in ("<?xml", "<!DOCTYPE", "<metadata", "<style", "<!--", "<script"):
        assert bad not in svg
    assert not re.search(r"\d{4}-\d\d-\d\d|[Mm]atplotlib", svg)
    assert not re.search(r"https?://(?!www\.w3\.org/)", svg)


def test_ink_is_the_pages():
    svg = curve().svg
    assert "currentColor" in svg
    assert plot.TEXT_COLOR not in svg and "#000000" not in svg
    assert plot.PAGE_COLOR not in svg
    assert "#ffffff" not in svg.replace(plot.BLUE, "")  # no white ground


def test_ink_reaches_text_written_after_the_style_changed():
    import matplotlib

    fig, ax = plot.figure(3, 2)
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        ax.text(0.5, 0.5, "late", color="black")
        ax.plot([0, 1], [0, 1], color="black")
        svg = plot.show(fig, "t", "d").svg
    assert "#000000" not in svg and ">late</text>" in svg


def test_title_and_description_are_read_aloud_and_escaped():
    svg = curve('<b>"bold"</b> & more').svg
    tree = ElementTree.fromstring(svg)
    title, desc = list(tree)[:2]
    assert tree.get("role") == "img"
    assert tree.get("aria-labelledby").split() == [title.get("id"), desc.get("id")]
    assert title.text == '<b>"bold"</b> & more' and desc.text == "It rises & falls."
    assert "<b>" not in svg


def test_text_stays_text():
    tree = ElementTree.fromstring(curve().svg)
    texts = ["".join(e.itertext()) for e in tree.iter() if e.tag.endswith("}text")]
    assert "step" in texts and "a < b & c" in texts and "DejaVu" not in curve().svg


def test_only_html_and_plain_words():
    from IPython.core.formatters import DisplayFormatter

    for made in (curve(), steps()):
        assert set(DisplayFormatter().format(made)[0]) == {"text/html", "text/plain"}


@pytest.mark.parametrize(
    "title, desc", [("", "d"), (None, "d"), ("t", ""), ("t", "  ")]
)
def test_words_are_required(title, desc):
    with pytest.raises(
        ValueError, match=f"a figure needs a {'desc' if title else 'title'}"
    ):
        plot.show(plot.figure()[0], title, desc)


def test_size_limit_names_both_numbers():
    fig, ax = plot.figure()
    ax.plot(np.random.default_rng(0).normal(size=(4000, 4)))
    with pytest.raises(ValueError, match=r"takes \d{6} bytes, at most 150000"):
        plot.show(fig, "t", "d")


def test_stepper_errors():
    with pytest.raises(ValueError, match="got 1"):
        steps(n=1)
    with pytest.raises(ValueError, match=r"key_frames must .* 0 to 3, got \[9\]"):
        steps(key_frames=[9])
    fig, ax = plot.figure()
    ax.plot(np.random.default_rng(0).normal(size=(4500, 2)))
    with pytest.raises(ValueError, match=r"takes \d+ bytes, at most 400000"):
        plot.stepper([(fig, "c")] * 4, "t")


def test_a_stepper_of_many_frames_prints_four():
    assert steps(n=9)._repr_html_().count("tf-frame tf-key") == 4


# ---- tables ----


def test_a_table_sets_names_left_and_numbers_right():
    drawn = plot.table(["step", "loss"], [["1", "0.3"], ["2", "12"]])
    sides = re.findall(r"<t[hd] style=\"text-align:(\w+)", drawn._repr_html_())
    assert sides == ["left", "right"] * 3
    words = re.findall(r">([^<>]+)</t[hd]>", drawn._repr_html_())
    assert words == ["step", "loss", "1", "0.3", "2", "12"]
    left = plot.table(["a", "b"], [], side="left")._repr_html_()
    assert re.findall(r"align:(\w+)", left) == ["left"] * 2


def test_rows_of_a_table_are_as_wide_as_its_head():
    with pytest.raises(ValueError, match="row 1 has 3 cells, and the head has 2"):
        plot.table(["a", "b"], [["1", "2"], ["1", "2", "3"]])
    with pytest.raises(ValueError, match="side must be one of 'right', 'left'"):
        plot.table(["a", "b"], [], side="up")


# ---- heat maps ----


def test_labels_must_fit():
    with pytest.raises(ValueError, match="3 row labels for 2 rows"):
        plot.heatmap(plot.figure()[1], np.eye(2), rows="abc")
    with pytest.raises(ValueError, match="1 column labels for 2 columns"):
        plot.heatmap(plot.figure()[1], np.eye(2), cols="a")
    with pytest.raises(ValueError, match="2 axes, got 3"):
        plot.heatmap(plot.figure()[1], np.zeros((2, 2, 2)))


def test_numbers_are_readable_on_every_cell():
    for low, high in ((0, 1), (-1, 1)):
        fig, ax = plot.figure(7, 5)
        plot.heatmap(ax, np.linspace(low, high, 60).reshape(6, 10), fmt=".2f")
        svg = plot.show(fig, "t", "d").svg
        cells = re.findall(r'<path[^>]*"fill: (#\w{6})', svg)
        inks = re.findall(r"fill: (#\w{6})[^>]*>[-−]?\d\.\d\d<", svg)
        assert len(cells) == len(inks) == 60
        assert min(map(plot.contrast, cells, inks)) >= 4.5


def test_cells_hold_the_values():
    fig, ax = plot.figure(4, 3)
    values = np.array([[0.0, 0.25], [np.nan, 1.0]])
    art = plot.heatmap(ax, values, fmt=".2f")
    svg = plot.show(fig, "t", "d").svg
    assert re.findall(r">(\d\.\d\d)<", svg) == ["0.00", "0.25", "1.00"]
    want = [plot.SEQUENTIAL_CMAP(art.norm(v)) for v in (0.0, 0.25, 1.0)]
    want = [
        "#{:02x}{:02x}{:02x}".format(*tuple(round(255 * x) for x in c[:3]))
        for c in want
    ]
    assert re.findall(r'<path[^>]*"fill: (#\w{6})', svg) == want


def test_a_large_map_is_a_small_image():
    fig, ax = plot.figure()
    plot.heatmap(ax, np.random.default_rng(0).random((128, 512)))
    svg = plot.show(fig, "t", "d").svg  # noise: the worst case
    assert "image/png" in svg and len(svg) < plot.MAX_FIGURE_BYTES


def test_the_image_holds_the_values():
    import base64
    import io

    from PIL import Image

    values = np.arange(900.0).reshape(30, 30) / 899
    values[3, 4] = np.nan
    fig, ax = plot.figure()
    art = plot.heatmap(ax, values)
    svg = plot.show(fig, "t", "d").svg
    data = re.search(r"base64,([\w+/=]+)", svg)[1]
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA"))
    want = art.cmap(art.norm(np.ma.masked_invalid(values)), bytes=True)
    if "scale(1 -1)" in svg or "-" in re.search(r"matrix\(([^)]*)\)", svg)[1]:
        pixels = pixels[::-1]
    visible = np.isfinite(values)
    assert (pixels[..., 3] > 0).tolist() == visible.tolist()
    assert np.abs(pixels.astype(int) - want.astype(int))[visible].max() <= 2


def test_palette():
    for colour in plot.PALETTE:
        assert plot.contrast(colour, "#ffffff") >= 3
        assert plot.contrast(colour, "#14181e") >= 3
    assert len({*plot.PALETTE}) == 6


def test_zero_is_in_the_middle_where_signs_differ():
    _, ax = plot.figure()
    both = plot.heatmap(ax, [[-1.0, 0.0], [2.0, 3.0]])
    assert (both.norm.vmin, both.norm.vmax) == (-3, 3)
    assert both.cmap == plot.DIVERGING_CMAP
    one = plot.heatmap(ax, [[1.0, 2.0]])
    assert (one.norm.vmin, one.norm.vmax) == (1, 2)
    assert one.cmap == plot.SEQUENTIAL_CMAP


@pytest.mark.parametrize("colours", [20, 600])
def test_pictures_keep_their_colours(colours):
    rgb = np.random.default_rng(0).integers(0, 256, (colours, 3), np.uint8)
    fig, ax = plot.figure()
    ax.imshow(np.resize(rgb, (20, 30, 3)))
    svg = plot.show(fig, "dots", "Dots.").svg
    data = base64.b64decode(re.search(r'base64,([^"]+)"', svg)[1])
    shown = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"))
    drawn = {tuple(c) for c in shown[..., :3].reshape(-1, 3).tolist()}
    assert {tuple(c) for c in rgb.tolist()} <= drawn


# ---- the browser ----

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Figures</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
:root{color-scheme:light;--pst-color-background:#fff}
body{margin:0;padding:0 16px;background:var(--pst-color-background);
color:#1d2430;max-width:740px}
@media (prefers-color-scheme:dark){
:root:not([data-theme]){color-scheme:dark;--pst-color-background:#14181e}
:root:not([data-theme]) body{color:#d5dce4}}
[data-theme=dark]{color-scheme:dark;--pst-color-background:#14181e}
[data-theme=dark] body{color:#d5dce4}
LOOKS</style><body class="bd-article">%s</body></html>"""
LOOKS = (ROOT / "book/_static/course.css").read_text(encoding="utf-8")
LOOKS = LOOKS[LOOKS.index("/* ---- figures ---- */") : LOOKS.index("/* ---- exercises")]
PAGE = PAGE.replace("LOOKS", LOOKS.replace("%", "%%"))


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    parts = [
        curve("one"),
        steps("First"),
        curve("two", 2.0),
        steps("Second", key_frames=[0, 3]),
    ]
    wide, ax = plot.figure(7, 3)
    plot.heatmap(ax, np.random.default_rng(0).random((24, 60)), xlabel="key")
    parts.append(plot.show(wide, "wide", "noise"))
    parts.append(panels())
    file = tmp_path_factory.mktemp("figures") / "page.html"
    file.write_text(
        PAGE % "\n".join(f"<div>{p._repr_html_()}</div>" for p in parts),
        encoding="utf-8",
    )
    return file


@pytest.fixture
def opened(chromium, page_file):
    made = []
    heard = []

    def go(**kw):
        context = chromium.new_context(**kw)
        made.append(context)
        page = context.new_page()
        page.on(
            "console",
            lambda m: heard.append(m.text) if m.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda e: heard.append(str(e)))
        page.on(
            "request",
            lambda r: (
                heard.append(r.url)
                if not r.url.startswith(("file:", "data:"))
                else None
            ),
        )
        page.goto(page_file.as_uri())
        return page

    yield go
    for context in made:
        context.close()
    assert heard == []


def state(page, k):
    return page.evaluate(
        """k => {const box = document.querySelectorAll('.tf-stepper')[k];
      const frames = [...box.querySelectorAll('.tf-frame')];
      const seen = frames.map((f, i) => { const s = getComputedStyle(f);
        return s.display !== 'none' && s.visibility === 'visible' &&
          f.offsetHeight > 0 ? i : -1; }).filter(i => i >= 0);
      return {seen, value: +box.querySelector('input').value,
        count: box.querySelector('.tf-count').textContent,
        said: box.querySelector('[aria-live]').textContent,
        off: [...box.querySelectorAll('button')].map(b => b.disabled)}; }""",
        k,
    )


def test_keyboard_slider_and_buttons(opened):
    page = opened(viewport={"width": 1000, "height": 800})
    assert state(page, 0) == {
        "seen": [0],
        "value": 0,
        "count": "1 / 4",
        "said": "",
        "off": [True, False],
    }
    height = page.evaluate("document.body.scrollHeight")
    tops = page.evaluate(
        "[...document.querySelectorAll('.tf-stepper')].map(s => new Set("
        "[...s.querySelectorAll('svg')].map(e => e.getBoundingClientRect().top)).size)"
    )
    assert tops == [1, 1]  # the frames lie on one another
    first, second = page.locator(".tf-stepper").all()
    first.locator("button").nth(1).click()
    assert state(page, 0) == {
        "seen": [1],
        "value": 1,
        "count": "2 / 4",
        "said": "row 1 <is> drawn",
        "off": [False, False],
    }
    first.locator("input").focus()
    page.keyboard.press("ArrowRight")
    assert state(page, 0)["seen"] == [2]
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")  # stays at the end
    assert state(page, 0)["seen"] == [3] and state(page, 0)["off"] == [False, True]
    page.keyboard.press("ArrowLeft")
    assert (
        state(page, 0)["seen"] == [2] and state(page, 0)["said"] == "row 2 <is> drawn"
    )
    assert first.locator("input").get_attribute("aria-valuetext") == "3 of 4"
    page.keyboard.press("Home")
    assert state(page, 0)["seen"] == [0]
    first.locator("input").fill("2")  # dragging
    assert state(page, 0)["seen"] == [2]
    first.locator("button").first.click()
    assert state(page, 0)["seen"] == [1]
    page.keyboard.press("ArrowRight")  # a button has the focus
    assert state(page, 0)["seen"] == [2]
    assert state(page, 1)["seen"] == [0]  # the other did not move
    second.locator("input").focus()
    page.keyboard.press("ArrowRight")
    assert (state(page, 0)["seen"], state(page, 1)["seen"]) == ([2], [1])
    assert page.evaluate("document.body.scrollHeight") == height  # nothing jumped


def test_arrows_elsewhere_are_left_alone(opened):
    page = opened()
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("ArrowRight")
    assert state(page, 0)["seen"] == state(page, 1)["seen"] == [0]


def test_script_twice_wakes_once(opened):
    page = opened()
    page.locator(".tf-stepper button").nth(1).click()
    page.evaluate(
        "() => {const s = document.createElement('script');"
        "s.textContent = document.querySelector('script').textContent;"
        "document.body.append(s);}"
    )
    assert state(page, 0)["seen"] == [1]  # it did not start again
    page.locator(".tf-stepper button").nth(1).click()
    page.keyboard.press("ArrowLeft")  # and listens once
    assert state(page, 0)["seen"] == [1]


INKS = """() => [
  'text', '.tf-figure > g path[style*="stroke: currentColor"]'].map(s => {
  const e = document.querySelector('.tf-figure ' + s.replace('.tf-figure > ', ''));
  const c = getComputedStyle(e);
  return s === 'text' ? c.fill : c.stroke; })"""


@pytest.mark.parametrize(
    "scheme, theme, ink",
    [
        ("light", None, LIGHT),
        ("dark", None, DARK),
        ("light", "dark", DARK),
        ("dark", "light", LIGHT),
    ],
)
def test_ink_follows_the_page(opened, scheme, theme, ink):
    page = opened(color_scheme=scheme)
    if theme:
        page.evaluate("t => document.documentElement.dataset.theme = t", theme)
    assert page.evaluate(INKS) == [ink, ink]
    line = page.evaluate(
        f"""getComputedStyle(document.querySelector(
          '.tf-figure path[style*="{plot.BLUE}"]')).stroke"""
    )
    assert line == f"rgb{tuple(bytes.fromhex(plot.BLUE[1:]))}"


def test_narrow_screen(opened):
    page = opened(viewport={"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    widths = page.evaluate(
        "[...document.querySelectorAll('svg')]"
        ".map(s => s.getBoundingClientRect().width)"
    )
    assert sorted(widths)[-2] <= 358 and min(widths) > 200
    wide = page.locator(".tf-panel").nth(
        len(widths) - 3
    )  # of 7 inches: it scrolls in its box
    assert (
        wide.evaluate("e => [e.scrollWidth, e.clientWidth]")
        == [max(widths), 358]
        == [432, 358]
    )
    assert smallest(page) >= 9


def smallest(page):
    """Height in px of the smallest text of the figures that are seen.

    Indices and exponents are left out.
    """
    return round(
        1e-3
        + page.evaluate("""Math.min(...[
          ...document.querySelectorAll('.tf-figure text')]
      .filter(t => t.getClientRects().length)
      .map(t => { const m = t.getScreenCTM();
        const s = [t, ...t.querySelectorAll('tspan')].filter(e =>
          [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()))
          .map(e => parseFloat(getComputedStyle(e).fontSize));
        return Math.max(...s) * Math.hypot(m.a, m.b); }))"""),
        2,
    )


def test_all_figures_of_the_appendix_can_be_read_on_a_telephone(chromium, tmp_path):
    nb = json.loads((ROOT / "nbs/A1_figures.ipynb").read_text(encoding="utf-8"))
    shown = [
        "".join(o["data"]["text/html"])
        for c in nb["cells"]
        if c["cell_type"] == "code"
        for o in c["outputs"]
        if "text/html" in o.get("data", {})
    ]
    assert len(shown) >= 8
    (tmp_path / "a1.html").write_text(PAGE % "\n".join(shown), encoding="utf-8")
    page = chromium.new_page(viewport={"width": 390, "height": 844})
    page.goto((tmp_path / "a1.html").as_uri())
    low = smallest(page)
    wide = page.evaluate("document.documentElement.scrollWidth")
    page.close()
    assert low >= 9 and wide == 390


PIXELS = """async png => {
  const i = new Image(); i.src = 'data:image/png;base64,' + png; await i.decode();
  const c = document.createElement('canvas'); c.width = i.width; c.height = i.height;
  const g = c.getContext('2d'); g.drawImage(i, 0, 0);
  const at = g.getImageData(i.width >> 1, i.height >> 1, 1, 1);
  return [...at.data].slice(0, 3); }"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_zero_recedes_and_large_values_stand_out(chromium, tmp_path, theme):
    """Cells, and the same as an image, as the browser paints them.

    They run from the ground to the far end.
    """
    # an image of 441 equal cells
    parts = []
    n = 21
    for value in (-1.0, 0.0, 1.0, 2.0):
        signed = value < 1.5
        cmap = plot.DIVERGING_CMAP if signed else plot.SEQUENTIAL_CMAP
        scale = (-1, 1) if signed else (0, 2)
        for shape in ((1, 1), (n, n)):
            fig, ax = plot.figure(1, 1)
            plot.heatmap(
                ax, np.full(shape, value), vmin=scale[0], vmax=scale[1], cmap=cmap
            )
            parts.append(plot.show(fig, "t", "d"))
    file = tmp_path / "maps.html"
    file.write_text(PAGE % "".join(p._repr_html_() for p in parts), encoding="utf-8")
    page = chromium.new_page()
    page.goto(file.as_uri())
    page.evaluate("t => document.documentElement.dataset.theme = t", theme)
    shots = [
        base64.b64encode(s.screenshot()).decode() for s in page.locator("svg").all()
    ]
    seen = np.array([page.evaluate(PIXELS, s) for s in shots]).reshape(4, 2, 3)
    page.emulate_media(media="print")
    paper = page.evaluate(
        PIXELS, base64.b64encode(page.locator("svg").nth(2).screenshot()).decode()
    )
    page.close()
    assert np.abs(seen[:, 0] - seen[:, 1]).max() <= 3  # cells and image agree
    ground = "#14181e" if theme == "dark" else "#ffffff"
    low, zero, high, most = (plot.contrast(c / 255, ground) for c in seen[:, 0])
    assert zero < 1.3 and min(low, high, most) > 6
    assert paper == [239, 236, 230]  # always the light map


def test_numbers_are_readable_at_night():
    for cmap in (plot.SEQUENTIAL_CMAP, plot.DIVERGING_CMAP):
        fig, ax = plot.figure(7, 5)
        plot.heatmap(ax, np.linspace(0, 1, 120).reshape(10, 12), fmt=".2f", cmap=cmap)
        svg = plot.show(fig, "t", "d").svg
        cells = re.findall(r"<path[^>]*light-dark\(#\w{6},(#\w{6})\)", svg)
        inks = re.findall(r"light-dark\(#\w{3},(#\w{3})\)[^>]*>\d\.\d\d<", svg)
        assert len(cells) == len(inks) == 120 and {*inks} == {"#000", "#fff"}
        ground = cmap(0.5 if cmap is plot.DIVERGING_CMAP else 0.0)
        assert plot.luminance(plot.dark_mode_color(ground)) < 0.03
        assert min(map(plot.contrast, cells, inks)) >= 4.5


def test_curves_in_a_color_of_a_map_stay():
    assert "light-dark" not in curve().svg and plot.BLUE in curve().svg


# ---- captions and panels ----


def panels(desc=("It rises.", "It falls."), **kw):
    figs = []
    for end in (1, -1):
        fig, ax = plot.figure(2.8, 2)
        ax.plot([0, end])
        ax.set(xlabel="step")
        figs.append(fig)
    return plot.show(figs, "Up & down", desc, **kw)


def test_every_figure_has_a_caption():
    page = ElementTree.fromstring(curve("a < b")._repr_html_())
    assert (page.tag, page.get("class"), page[-1].tag, page[-1].get("class")) == (
        "figure",
        "tf-plate",
        "figcaption",
        "tf-caption",
    )
    assert page[-1].text == "a < b"
    assert (
        '<figcaption class="tf-caption">See &amp; hear</figcaption>'
        in panels(caption="See & hear")._repr_html_()
    )
    assert steps("A < b")._repr_html_().count('<p class="tf-caption">A &lt; b</p>') == 1


def test_panels_are_told_apart():
    made = panels()
    words = [[e.text for e in ElementTree.fromstring(s)[:2]] for s in made.svgs]
    assert words == [
        ["Up & down, panel 1 of 2", "It rises."],
        ["Up & down, panel 2 of 2", "It falls."],
    ]
    assert made._repr_html_().count("<figcaption") == 1
    assert len(ids(made.svg)) == len(set(ids(made.svg)))
    assert [ElementTree.fromstring(s)[1].text for s in panels("Both.").svgs] == [
        "Both.",
        "Described with panel 1.",
    ]
    with pytest.raises(ValueError, match="1 descriptions for 2 panels"):
        panels(["only one"])
    with pytest.raises(ValueError, match="needs a title"):
        plot.show([plot.figure()[0]] * 2, "", "d")


def test_panels_share_the_size_limit():
    figs = []
    for seed in (0, 1):
        fig, ax = plot.figure()
        ax.plot(np.random.default_rng(seed).normal(size=(2000, 3)))
        figs.append(fig)
    for fig in figs:
        plot.show(fig, "t", "d")
    with pytest.raises(ValueError, match="at most 150000"):
        plot.show(figs, "t", "d")


@pytest.mark.parametrize("wide, level", [(1000, True), (390, False)])
def test_panels_stack_on_a_telephone(opened, wide, level):
    page = opened(viewport={"width": wide, "height": 800})
    left, right = page.locator(".tf-panel").all()[-2:]
    left = left.bounding_box()
    right = right.bounding_box()
    assert (left["y"] == right["y"]) is level
    assert left["width"] == right["width"] == pytest.approx(302, abs=1)
    side = left["x"] - 16  # centered on the text
    edge = right if level else left
    body = page.evaluate("document.body.clientWidth")
    assert body - 16 - (edge["x"] + edge["width"]) == pytest.approx(side, abs=1)


def test_the_last_button_keeps_the_keyboard(opened):
    page = opened()
    on = page.locator(".tf-stepper button").nth(1)
    for _ in range(3):
        on.click()
    assert page.evaluate("document.activeElement.tagName") == "INPUT"
    page.keyboard.press("ArrowLeft")
    assert state(page, 0)["seen"] == [2]


def test_wide_screen_does_not_blow_figures_up(opened):
    page = opened(viewport={"width": 1600, "height": 900})
    page.add_style_tag(content="body{max-width:none}")
    assert page.evaluate(
        "document.querySelector('svg').getBoundingClientRect().width"
    ) == pytest.approx(432, abs=1)


def test_paper_shows_the_key_frames(opened):
    page = opened(viewport={"width": 1000, "height": 800})
    page.locator(".tf-stepper button").nth(1).click()
    page.emulate_media(media="print")
    assert state(page, 0)["seen"] == [0, 1, 2, 3] and state(page, 1)["seen"] == [0, 3]
    assert not page.locator(".tf-bar").first.is_visible()
    tops = page.evaluate("""[...document.querySelectorAll('.tf-stepper')[1]
      .querySelectorAll('.tf-key')]
      .map(f => f.getBoundingClientRect()).map(r => [r.top, r.bottom])""")
    assert tops[0][1] <= tops[1][0]  # one under another
    assert page.locator(".tf-stepper figcaption").nth(4).is_visible()


def test_without_javascript(opened):
    page = opened(java_script_enabled=False)
    seen = [
        [f.is_visible() for f in box.locator(".tf-frame").all()]
        for box in page.locator(".tf-stepper").all()
    ]
    assert seen == [[True] * 4, [True, False, False, True]]
    assert not page.locator(".tf-bar").first.is_visible()


def test_names_and_roles(opened):
    page = opened()
    assert page.get_by_role("img", name="one").count() >= 1
    assert page.get_by_role("group", name="First").count() == 1
    assert page.get_by_role("slider", name="step").count() == 2
    assert page.get_by_role("button", name="next step").count() == 2
    # hidden frames are not read out
    assert page.get_by_role("img", name="First, step").count() == 1


def test_clip_paths_are_each_figures_own(opened):
    page = opened()
    assert page.evaluate("""() => [
        ...document.querySelectorAll('svg [clip-path]')].every(e => {
      const id = e.getAttribute('clip-path').slice(5, -1);
      return document.getElementById(id).closest('svg') === e.closest('svg'); })""")


# ---- block diagrams and the machine ----


def branch(lit=(), links=None):
    d = plot.Diagram(300, 100, lit, links)
    d.box("norm", 90, 70, w=56)
    d.box("ffn", 200, 70, "feed-forward", w=90, role=plot.GREEN)
    d.plus("sum", 270, 20)
    d.residual_stream([(10, 20), (290, 20)])
    d.arrow((30, 20), "norm.left")
    d.arrow("norm", "ffn", "(b, t, d)")
    d.arrow("ffn.right", "sum.bottom")
    return d


def test_ways_are_right_angled_and_end_at_sides():
    at = plot.Layout(
        a=plot.Rect(10, 10, 8, 4),
        b=plot.Rect(40, 30, 8, 4),
        c=plot.Rect(12, 60, 8, 4),
    )
    assert at.path("a", "b") == [(14, 10), (25, 10), (25, 30), (36, 30)]
    assert at.path("a.bottom", "b.left") == [(10, 12), (10, 30), (36, 30)]
    assert at.path("a", "c") == [(10, 12), (10, 35), (12, 35), (12, 58)]
    assert at.path("c.top", "a.bottom", [(0, 0)]) == [(12, 58), (0, 0), (10, 12)]
    assert at.path((40, 0), "b") == [(40, 0), (40, 28)]
    assert at.path((0, 0), "b.left") == [(0, 0), (0, 30), (36, 30)]
    assert at.bounding_box(["a", "b"], 3) == plot.Rect(25, 20, 44, 30)
    with pytest.raises(
        ValueError, match="target must be one of 'a', 'b', 'c', got 'd'"
    ):
        at.path("a", "d.left")


def test_lit_parts_stand_out_and_others_stay_readable():
    plain, lit = (
        ElementTree.fromstring(branch(x).show("t", "d").svg) for x in ((), ("ffn",))
    )
    words = [
        {
            "".join(e.itertext()): e.get("style")
            for e in tree.iter()
            if e.tag.endswith("}text")
        }
        for tree in (plain, lit)
    ]
    assert "opacity" not in "".join(words[0].values()) and "700" not in "".join(
        words[0].values()
    )
    assert (
        "font-weight: 700" in words[1]["feed-forward"]
        and "#ffffff" in words[1]["feed-forward"]
    )
    assert "opacity: 0.8" in words[1]["norm"] and "Mono" not in words[1]["norm"]
    assert "monospace" in words[1]["(b, t, d)"]
    assert plot.contrast("#ffffff", plot.BLUE) >= 4.5
    for ink, ground in (("#1d2430", "#ffffff"), ("#d5dce4", "#14181e")):
        ink, ground = (
            np.array(list(bytes.fromhex(c[1:]))) / 255 for c in (ink, ground)
        )
        grey = np.array(list(bytes.fromhex(plot.GREY[1:]))) / 255
        under = 0.94 * ground + 0.06 * grey
        assert plot.contrast(0.8 * ink + 0.2 * under, under) >= 4.5


def test_links_are_named_once():
    svg = branch(links={"ffn": "x.html?a=1&b=2#s", "norm": "y.html"}).show("t", "d").svg
    tree = ElementTree.fromstring(svg)
    links = [e for e in tree.iter() if e.tag.endswith("}a")]
    assert [(a.get("href"), a.get("aria-label")) for a in links] == [
        ("y.html", "norm"),
        ("x.html?a=1&b=2#s", "ffn"),
    ]
    assert tree.get("role") == "group" and "_blank" not in svg
    assert ElementTree.fromstring(branch().show("t", "d").svg).get("role") == "img"


def test_every_part_can_be_lit_and_looks_its_own_way():
    def pictures(*lit):
        made = plot.machine_diagram(lit)
        assert ("You are here" in made.caption) is bool(lit)
        return tuple(re.sub("f[0-9a-f]{10}-", "", svg) for svg in made.svgs)

    plain = pictures()
    seen = {part: pictures(part) for part in plot.MACHINE_PARTS}
    for form in (0, 1):
        assert (
            len({plain[form], *(svgs[form] for svgs in seen.values())})
            == len(plot.MACHINE_PARTS) + 1
        )
    for part, svgs in seen.items():  # what concerns the whole dims nothing
        assert all(
            ("opacity: 0.8" in svg) is (part not in ("check", "costs")) for svg in svgs
        ), part
    assert plot.machine_diagram("feedforward").caption == "You are here: feed-forward."


def test_the_machine_refuses_and_stays_small():
    links = {
        p: f"https://example.org/nbs/{p}_and_a_long_name.html"
        for p in plot.MACHINE_PARTS
    }
    made = plot.machine_diagram(["attention", "training"], links)
    assert len(made._repr_html_().encode()) <= 46_000
    assert (
        len(
            plot.machine_diagram("norm", {p: f"{p}.html" for p in plot.MACHINE_PARTS})
            ._repr_html_()
            .encode()
        )
        <= 40_000
    )
    for bad in (
        dict(highlight=["norms"]),
        dict(links={"Norm": "x"}),
        dict(highlight="all"),
    ):
        with pytest.raises(ValueError, match=r"part must be one of 'text', .*, got"):
            plot.machine_diagram(**bad)


OVER = """() => { const out = [];
  for (const svg of document.querySelectorAll('svg')) {
    const all = svg.getBoundingClientRect();
    if (!all.width) continue;
    const boxes = [...svg.querySelectorAll('path')]
      .filter(p => !p.closest('a') && !/fill: none/.test(p.getAttribute('style')))
      .map(p => p.getBoundingClientRect())
      .filter(b => b.width > 20 && b.height > 18 && b.width < 0.4 * all.width);
    for (const t of svg.querySelectorAll('text')) { const r = t.getBoundingClientRect();
      const inside = b => r.left >= b.left && r.right <= b.right &&
        r.top >= b.top - 1 && r.bottom <= b.bottom + 1;
      const apart = b => r.right <= b.left || r.left >= b.right ||
        r.bottom - 3 <= b.top || r.top + 3 >= b.bottom;
      if (!inside(all) || !boxes.every(b => inside(b) || apart(b)))
        out.push(t.textContent); } }
  return out; }"""


@pytest.mark.parametrize(
    "wide, shown, hidden",
    [
        (752, "tf-wide", "tf-tall"),
        (390, "tf-tall", "tf-wide"),
        (382, "tf-tall", "tf-wide"),
    ],
)
def test_the_machine_in_the_browser(chromium, tmp_path, wide, shown, hidden):
    links = {p: f"{p}.html" for p in plot.MACHINE_PARTS if p not in ("check", "costs")}
    parts = [plot.machine_diagram(), plot.machine_diagram(plot.MACHINE_PARTS, links)]
    file = tmp_path / "machine.html"
    file.write_text(PAGE % "".join(p._repr_html_() for p in parts), encoding="utf-8")
    file.with_name("tokenizer.html").write_text("here", encoding="utf-8")
    page = chromium.new_page(viewport={"width": wide, "height": 900})
    page.goto(file.as_uri())
    try:
        assert page.evaluate("document.documentElement.scrollWidth") == wide
        assert (
            page.locator(f".{shown}").first.is_visible()
            and not page.locator(f".{hidden}").first.is_visible()
        )
        assert page.evaluate(
            """[...document.querySelectorAll('.tf-panel')]
              .every(p => p.scrollWidth <= p.clientWidth)"""
        )
        assert smallest(page) >= 9
        assert page.evaluate(OVER) == []
        if wide > 700:
            assert page.locator("svg").first.bounding_box()["height"] <= 420
        for part in links:
            assert page.get_by_role("link", name=part, exact=True).count() == 1
        page.keyboard.press("Tab")
        first = page.evaluate("document.activeElement.getAttribute('href')")
        line = page.evaluate(
            "getComputedStyle(document.activeElement.querySelector('path')).strokeWidth"
        )
        assert first in {*links.values()} and line == "2.6px"
        page.locator(f".{shown} a[aria-label=tokenizer]").click()
        assert page.url.endswith("/tokenizer.html")
    finally:
        page.close()


def test_reduced_for_comparison_wrapper_and_words_stay():
    import importlib.util

    spec = importlib.util.spec_from_file_location("rules", ROOT / "conftest.py")
    rules = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rules)
    for made in (panels(), plot.machine_diagram(["norm"], {"norm": "x.html"}), steps()):
        text = rules.reduce_svg(made._repr_html_())
        assert (
            "<path" not in text
            and "<style" not in text
            and "<script" not in text
            and "viewBox" not in text
        )
        assert text.count("tf-caption") == 1
        assert text.count("<svg>") == made._repr_html_().count("<svg ")
    assert "<svg>Up &amp; down, panel 2 of 2 | It falls.</svg>" in rules.reduce_svg(
        panels()._repr_html_()
    )
    other = rules.reduce_svg(panels(caption="Other")._repr_html_())
    assert other != rules.reduce_svg(panels()._repr_html_())


# before and after


def rung(part="a part", verdict="gained", **other):
    "A row as a record has it."
    numbers = {
        f"{at}{end}": str(x)
        for at, x in (("before", 300.0), ("after", 100.0))
        for end in ("", "_low", "_high")
    }
    return (
        dict(
            chapter="2",
            part=part,
            purpose="steps to somewhere",
            was="without",
            now="with",
            verdict=verdict,
            **numbers,
        )
        | other
    )


def test_a_row_is_drawn_with_its_words():
    drawn = plot.render_ablations(
        [rung(), rung("more", "nothing shown"), rung("less", "lost", after="400.0")]
    )
    for words in (
        "a part: steps to somewhere",
        "without",
        "3 × less",
        "nothing shown",
        "lost: 1.33 × more",
    ):
        assert f">{words}</text>" in drawn.svg, words
    assert all(color in drawn.svg for color in plot.VERDICT_COLORS.values())


def test_rows_of_one_purpose_share_their_scale():
    rows = [
        rung(purpose="steps"),
        rung(purpose="steps", before_high="2000.0"),
        rung(purpose="seconds"),
    ]
    first, second, third = (ax.get_xlim() for ax in plot.plot_before_after(rows).axes)
    assert first == second != third
    assert first[1] > 2000 > third[1]


def test_rows_of_several_chapters_become_ratios():
    drawn = plot.render_ablations([rung(), rung("late", chapter="17")])
    assert ">× 0.33</text>" in drawn.svg and "2 to 17" in drawn.title


@pytest.mark.parametrize(
    "draw",
    [
        plot.plot_before_after,
        plot.plot_ratios,
        lambda rows: plot.plot_steps_to_loss(rows, 3),
    ],
)
def test_no_rows_are_no_figure(draw):
    with pytest.raises(ValueError, match="no rows"):
        draw([])


def test_a_verdict_is_one_of_three():
    with pytest.raises(ValueError, match="great"):
        plot.plot_before_after([rung(verdict="great")])
