"""Live figures: what ``plot.live`` writes, and what their scripts make of it."""

import dataclasses
import json
import math
import random
import re
from contextlib import contextmanager
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch
import yaml
from sphinx.errors import ExtensionError

import lean_pages
import live_figures
import tformer
from conftest import ROOT
from helpers import by_day
from tformer import costs, plot
from tformer.models.llama import Llama, LlamaConfig
from tformer.nn.attention import SelfAttention
from tformer.nn.feed_forward import FeedForward
from tformer.nn.functional import softmax
from tformer.nn.norms import rms_norm
from tformer.nn.positions import Positions
from tformer.nn.rotary import RotaryEmbedding, rope_frequencies
from tformer.variants.mla import LatentAttention
from tformer.variants.sliding_window import (
    SlidingWindowAttention,
    make_window_factory,
)
from tformer.variants.sparse import (
    LightningIndexer,
    SparseAttention,
    make_sparse_factory,
)

STATIC = ROOT / "book" / "_static"
SCRIPTS = sorted((STATIC / "live").glob("*"))
DIVISORS = [1, 2, 4, 8, 16, 32]


def draw_scores(seed=3):
    "The data of the figure softmax, with scores that grow with the width."
    draw = random.Random(seed).gauss
    widths = [4, 16, 64, 256, 1024]
    return {
        "words": "a cup fell off the table and broke".split(),
        "widths": widths,
        "scores": {
            str(d): [round(draw(0, d**0.5), 3) for _ in range(8)] for d in widths
        },
    }


def still(title="Weights <of> words", desc='Bars & "numbers".'):
    fig, ax = plot.figure(3, 2)
    ax.barh(["a", "b"], [0.3, 0.7])
    return plot.show(fig, title, desc, "Two bars < three.")


def html_of(name="softmax", data=None, **kw):
    "The HTML of one live figure."
    data = draw_scores() if data is None else data
    return plot.live(name, data, still(), **kw)._repr_html_()


def data_in(html):
    "The data that a browser reads from a figure."
    text = re.search(
        r'<script type="application/json" class="tf-data">'
        r"(.*?)</script>",
        html,
        re.S,
    )[1]
    return json.loads(text)


# ---- what the function writes ----


def test_a_figure_is_data_a_stage_and_a_still():
    data = draw_scores()
    html = html_of(data=data)
    assert re.fullmatch(
        r'<figure class="tf-plate tf-interactive" data-live="softmax" '
        r'data-desc="Bars &amp; &quot;numbers&quot;\." style="margin:1em 0">'
        r'<script type="application/json" class="tf-data">[^<]*</script>'
        r'<div class="tf-stage" role="group" '
        r'aria-label="Weights &lt;of&gt; words" hidden></div>'
        r'<div class="tf-still"><div class="tf-panels".*</svg></div></div></div>'
        r'<figcaption class="tf-caption">Two bars &lt; three\.</figcaption>'
        r"</figure>",
        html,
        re.S,
    )
    assert data_in(html) == data
    assert still().svg in html and html.count("<script") == 1
    assert repr(plot.live("softmax", data, still())) == (
        "LiveFigure: Weights <of> words, drawn by softmax.js"
    )


def test_words_of_its_own_replace_those_of_the_still():
    html = html_of(desc="Move <it>.", caption="Yours & mine.")
    assert 'data-desc="Move &lt;it&gt;."' in html
    assert '<figcaption class="tf-caption">Yours &amp; mine.<' in html


def test_descriptions_of_panels_are_joined():
    panels = plot.show(
        [plot.figure(2, 2)[0], plot.figure(2, 2)[0]], "Two", ["Left.", "Right."]
    )
    figure = plot.live("two", {}, panels)
    assert figure.desc == "Left. Right." and panels.svg.count("<svg") == 2
    assert figure._repr_html_().count('class="tf-panel"') == 2


def test_data_cannot_close_its_script():
    data = {"</script><b>": ["<!--<script>", "</SCRIPT>", "√ \\u003c &amp;"]}
    html = html_of(data=data)
    assert re.findall("</script", html, re.I) == ["</script"]
    assert data_in(html) == data


LOOP = {}
LOOP["again"] = LOOP


@pytest.mark.parametrize(
    "wrong, message",
    [
        *[
            (
                {"name": name},
                "lower-case letters, digits and hyphens only, got "
                + re.escape(repr(name)),
            )
            for name in ("", "Softmax", "a b", "../a", "a\n", 3)
        ],
        ({"data": [1]}, "data must be dict, got list"),
        ({"data": {"x": float("nan")}}, "cannot be written as JSON: Out of range"),
        ({"data": {"x": torch.ones(1)}}, "cannot be written as JSON: .*Tensor"),
        ({"data": {(1, 2): 3}}, "cannot be written as JSON: keys must be"),
        ({"data": LOOP}, "cannot be written as JSON: Circular"),
        ({"fallback": "<svg>"}, "fallback must be Figure, got str"),
        ({"desc": " "}, "a live figure needs a desc"),
        ({"data": {"x": "y" * 150_000}}, r"takes 15\d{4} bytes, at most 150000 are"),
    ],
)
def test_what_cannot_be_shown_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        plot.live(**{"name": "a-1", "data": {}, "fallback": still()} | wrong)


# ---- the scripts, and the pages that load them ----


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_short_and_ask_nobody(path):
    text = path.read_text(encoding="utf-8")
    assert re.fullmatch(r"[a-z0-9-]+\.js", path.name)
    assert f'tformerLive.register("{path.stem}", ' in text
    assert len(text.splitlines()) <= 100
    assert not re.search(
        r"\b(import|require|fetch|XMLHttpRequest|WebSocket|"
        r"EventSource|sendBeacon|eval)\b|https?:|//\w+\.",
        text,
    )


def load(body):
    "The files that the extension adds to a page, as (file, loading method)."
    added = []
    app = SimpleNamespace(
        add_css_file=lambda file: added.append((file, "css")),
        add_js_file=lambda file, loading_method: added.append((file, loading_method)),
    )
    live_figures.add_scripts(app, "nbs/some", "page.html", {"body": body}, None)
    return added


def test_only_pages_with_live_figures_load_scripts():
    html = html_of()
    assert load(html + html) == [
        ("live.css", "css"),
        ("live.js", "defer"),
        ("live/softmax.js", "defer"),
    ]
    shown = html.replace("<", "&lt;").replace('"', "&quot;")
    for body in (
        "",
        "<p>data-live=&quot;softmax&quot;</p>",
        shown,
        '&lt;figure data-live="softmax"',
        None,
    ):
        assert load(body) == []


def test_a_missing_script_stops_the_build():
    with pytest.raises(ExtensionError, match=r"nbs/some: .*live/no-such\.js"):
        load(html_of("no-such"))


def test_scripts_are_added_before_their_list_is_replaced():
    priorities = {}
    for module in (live_figures, lean_pages):
        module.setup(
            SimpleNamespace(
                connect=lambda event, f, priority=500: priorities.setdefault(
                    (event, f.__name__), priority
                )
            )
        )
    assert (
        priorities["html-page-context", "add_scripts"]
        < (priorities["html-page-context", "drop"])
    )
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    assert config["sphinx"]["local_extensions"]["live_figures"] == "book/_ext"


# ---- in a browser ----

# a figure with the controls that softmax has not, one that fails, one too many
PROBE = """
tformerLive.register("probe", {
  controls: () => [
    {key: "x", label: "a number", min: 0.1, max: 0.5, step: 0.1, start: 0.1},
    {key: "kind", label: "kind", choices: ["one", "two"], start: "two",
     format: (kind, settings) => `kind ${kind}`}],
  compute: (data, settings) => ({sum: data.plus + settings.x}),
  draw(svg, numbers, data, settings, kit) {
    ["blue", "orange", "green", "purple", "red", "gray"].forEach((color, i) =>
      kit.el("text", {x: 0, y: 20 + 20 * i, fill: kit.color(color)}, color));
    return 130;
  },
  say: (numbers, data, settings) => `${settings.kind}: ${numbers.sum}`,
});
tformerLive.register("broken", {
  controls: () => [{key: "x", label: "x", values: [1, 2], start: 3}],
  compute: () => ({}), draw: () => 10, say: () => "broken"});
"""
PAGE = """<!doctype html><html lang="en" data-theme="light"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>live</title><style>%s
body { margin: 0 16px; background: var(--pst-color-background, #fff);
color: var(--pst-color-text-base); }
[data-theme="dark"] { color-scheme: dark; }</style>
<script>%s</script><body class="bd-article">%s<script>%s</script></body></html>"""


def read(name):
    return (STATIC / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    "A page with four live figures: softmax, probe, broken, nobody."
    looks = re.sub(r"@font-face \{[^}]*\}", "", read("course.css"))
    figures = [
        html_of(),
        html_of("probe", {"plus": 1}),
        html_of("broken", {}),
        html_of("nobody", {}),
    ]
    file = tmp_path_factory.mktemp("live") / "page.html"
    file.write_text(
        PAGE
        % (
            looks + read("live.css"),
            read("live.js"),
            "\n".join(figures),
            read("live/softmax.js") + PROBE,
        ),
        encoding="utf-8",
    )
    return file


@pytest.fixture
def opened(chromium, page_file):
    made = []
    heard = []

    def go(clock=False, **kw):
        context = chromium.new_context(**kw)
        made.append(context)
        page = context.new_page()
        page.on("console", lambda m: heard.append(m.text))
        page.on("pageerror", lambda e: heard.append(str(e)))
        if clock:
            page.clock.install(time=0)
        page.goto(page_file.as_uri())
        return page

    yield go
    for context in made:
        context.close()
    # the figure that fails says so, and nothing else does
    assert all("the setting x cannot be 3" in text for text in heard), heard


def figure(page, name="softmax"):
    return page.locator(f'[data-live="{name}"]')


def visible(page):
    "For each figure whether its stage and its still are seen."
    return [
        tuple(
            figure(page, name).locator(part).is_visible()
            for part in (".tf-stage", ".tf-still")
        )
        for name in ("softmax", "probe", "broken", "nobody")
    ]


SET = """(figure, settings) => { figure.tformer.set(settings);
  const all = name => [...figure.querySelectorAll(`.tf-stage ${name}`)];
  return [figure.tformer.numbers, all("rect").map(e => +e.getAttribute("width")),
    all("text").map(e => e.textContent), all(".tf-sentence")[0].textContent]; }"""


def test_the_script_computes_what_the_package_computes(opened):
    page = opened()
    rng = random.Random(0)
    scores = draw_scores()["scores"]
    for _ in range(10):
        d = rng.choice([4, 16, 64, 256, 1024])
        divisor = rng.choice(DIVISORS)
        numbers, drawn, shown, said = figure(page).evaluate(
            SET, {"d": d, "divisor": divisor}
        )
        divided = torch.tensor(scores[str(d)], dtype=torch.float64) / divisor
        weights = softmax(divided)
        torch.testing.assert_close(weights, torch.softmax(divided, 0))
        found = torch.tensor(numbers["weights"], dtype=torch.float64)
        assert (found - weights).abs().max() < 1e-6
        assert abs(numbers["largest"] - weights.max()) < 1e-6
        room = max(drawn) / numbers["largest"]
        assert drawn == pytest.approx([room * w for w in numbers["weights"]])
        assert shown[1::2] == [f"{w:.2f}" for w in numbers["weights"]]
        assert shown[::2] == draw_scores()["words"]
        largest = numbers["largest"]
        words = (
            "picks one word"
            if largest > 0.9
            else "leans on one word"
            if largest > 0.5
            else "mixes several words"
        )
        by = f"{divisor} = √d" if divisor**2 == d else divisor
        assert said == (
            f"With d = {d} and scores divided by {by}, the largest weight is "
            f"{largest:.2f}: the softmax {words}."
        )


def test_large_scores_do_not_overflow(opened):
    numbers = figure(opened()).evaluate("""f => f.tformer.definition.compute(
        {scores: {4: [9000, 8999, -9000]}}, {d: 4, divisor: 1})""")
    assert numbers["weights"] == pytest.approx(
        torch.softmax(torch.tensor([1.0, 0.0, -9e3]), 0).tolist()
    )


def test_the_keyboard_moves_a_slider(opened):
    page = opened()
    slider = page.get_by_role("slider", name="divide the scores by")
    sentence = figure(page).locator(".tf-sentence")
    first = sentence.text_content()
    slider.focus()
    for key, divisor, reads in (
        ("ArrowRight", 2, "2"),
        ("End", 32, "32"),
        ("Home", 1, "1"),
    ):
        page.keyboard.press(key)
        settings = figure(page).evaluate("f => f.tformer.settings")
        assert settings == {"d": 64, "divisor": divisor}
        assert slider.get_attribute("aria-valuetext") == reads
        assert f"divided by {reads}," in sentence.text_content()
    figure(page).evaluate("f => f.tformer.set({d: 16, divisor: 4})")
    assert slider.get_attribute("aria-valuetext") == "4 = √d"
    assert figure(page).locator("output").all_text_contents() == ["16", "4 = √d"]
    assert slider.input_value() == "2"
    said = sentence.text_content()
    assert said != first and "divided by 4 = √d" in said
    assert page.get_by_role("img", name=said).count() == 1
    assert sentence.get_attribute("aria-hidden") == "true"


def test_a_dragged_slider_is_spoken_once(opened):
    page = opened(clock=True)
    page.clock.pause_at(600)  # a slow machine must not move it
    spoken = figure(page).locator('[aria-live="polite"]')
    assert figure(page).locator("output").first.get_attribute("aria-live") == "off"
    page.clock.run_for(1000)
    assert spoken.text_content() == ""  # nobody has moved anything
    slider = page.get_by_role("slider", name="width of the vectors")
    slider.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
        page.clock.run_for(250)
        assert spoken.text_content() == ""
    page.clock.run_for(100)
    said = figure(page).locator(".tf-sentence").text_content()
    assert spoken.text_content() == said and "d = 1024" in said


def test_radio_buttons_and_steps(opened):
    page = opened()
    probe = figure(page, "probe")
    group = page.get_by_role("group", name="kind", exact=True)
    assert group.get_by_role("radio").count() == 2
    assert group.get_by_role("radio", name="kind two").is_checked()
    group.get_by_text("kind one").click()
    page.get_by_role("slider", name="a number").press("ArrowRight")
    page.get_by_role("slider", name="a number").press("ArrowRight")
    now = probe.evaluate("f => [f.tformer.settings, f.tformer.numbers]")
    assert now == [{"x": 0.3, "kind": "one"}, {"sum": 1.3}]  # 0.1 + 2 × 0.1
    assert probe.locator(".tf-sentence").text_content() == "one: 1.3"
    assert probe.locator(".tf-stage desc").text_content() == 'Bars & "numbers".'
    probe.evaluate("f => f.tformer.set({kind: 'two'})")
    assert group.get_by_role("radio", name="kind two").is_checked()
    for wrong in ({"x": 0.35}, {"y": 1}):
        said = probe.evaluate(
            """(f, s) => { try { f.tformer.set(s); }
            catch (error) { return error.message; } }""",
            wrong,
        )
        name, value = next(iter(wrong.items()))
        assert said == f"the setting {name} cannot be {value}"
    assert probe.evaluate("f => f.tformer.settings.x") == 0.3
    ids = page.locator("[id]").evaluate_all("all => all.map(e => e.id)")
    made = [i for i in ids if i.startswith("tf-control")]
    assert len(made) == len({*made}) == 3


def test_stage_on_screen_and_still_on_paper(opened):
    page = opened()
    assert visible(page) == [(True, False)] * 2 + [(False, True)] * 2
    assert page.locator('[data-live="broken"] .tf-stage > *').count() == 0
    page.emulate_media(media="print")
    assert visible(page) == [(False, True)] * 4
    page.emulate_media(media="screen")
    assert visible(page)[0] == (True, False)
    assert figure(page).locator(".tf-stage rect").first.is_visible()


def test_without_javascript_the_still_is_seen(opened):
    assert visible(opened(java_script_enabled=False)) == [(False, True)] * 4


SIZES = """figure => [...figure.querySelectorAll(
    ".tf-stage text, .tf-stage p:not(.tf-spoken), label, output, legend")].map(e => {
  const scale = e.getScreenCTM ? e.getScreenCTM().a : 1;
  return parseFloat(getComputedStyle(e).fontSize) * scale; })"""
BOX = "e => { const b = e.getBoundingClientRect(); return [b.left, b.right]; }"


def test_a_telephone_shows_all_of_it(opened):
    page = opened(viewport={"width": 390, "height": 844})
    figure(page).evaluate("f => f.tformer.set({d: 1024, divisor: 1})")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for name in ("softmax", "probe"):
        sizes = figure(page, name).evaluate(SIZES)
        assert len(sizes) > 8 and min(sizes) >= 11
        for part in figure(page, name).locator(".tf-stage :is(input, text)").all():
            left, right = part.evaluate(BOX)
            assert left >= 16 and right <= 374
    heights = page.locator("input[type=range], .tf-choices label").evaluate_all(
        "all => all.map(e => e.offsetHeight)"
    )
    assert len(heights) == 5 and min(heights) >= 44
    page.set_viewport_size({"width": 1000, "height": 800})
    page.wait_for_function("""() => document.querySelector(".tf-stage svg")
        .viewBox.baseVal.width > 500""")
    assert min(figure(page).evaluate(SIZES)) >= 11


@pytest.mark.nightly
def test_a_hidden_figure_is_drawn_when_it_appears(opened):
    page = opened()
    page.evaluate("""() => { const fold = document.createElement("div");
        const figure = document.querySelector("[data-live]");
        fold.id = "fold";
        fold.hidden = true;
        figure.classList.remove("tf-awake");
        figure.querySelector(".tf-stage").replaceChildren();
        figure.before(fold);
        fold.append(figure);
        tformerLive.register("softmax", figure.tformer.definition); }""")
    assert figure(page).locator(".tf-stage rect").count() == 0
    page.evaluate("document.getElementById('fold').hidden = false")
    page.wait_for_function("document.querySelectorAll('.tf-stage rect').length === 8")


INKS = """figure => [getComputedStyle(document.body).backgroundColor,
  [...figure.querySelectorAll(".tf-stage :is(text, p, label, output, legend), " +
    "figcaption")].map(e => getComputedStyle(e)[e.matches("text") ? "fill" : "color"]),
  [...figure.querySelectorAll(".tf-stage rect")].map(e => getComputedStyle(e).fill)]"""


def rgb(text):
    return [int(n) / 255 for n in re.findall(r"\d+", text)[:3]]


@pytest.mark.parametrize("look", by_day(["light", "dark", "forced"], "dark"))
def test_all_inks_are_readable(opened, look):
    page = opened(forced_colors="active" if look == "forced" else "none")
    if look == "dark":
        page.evaluate("document.documentElement.dataset.theme = 'dark'")
    for name in ("softmax", "probe"):
        ground, texts, bars = figure(page, name).evaluate(INKS)
        assert (plot.luminance(rgb(ground)) < 0.5) == (look == "dark")
        assert len(texts) > 8 and len(bars) == (8 if name == "softmax" else 0)
        for ink in texts:
            assert plot.contrast(rgb(ink), rgb(ground)) >= 4.5, (name, ink)
        for ink in bars:
            assert plot.contrast(rgb(ink), rgb(ground)) >= 3, ink


@pytest.mark.nightly
def test_paper_is_light_at_night(opened):
    page = opened()
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    blue = "f => getComputedStyle(f).getPropertyValue('--tf-live-blue')"
    assert figure(page).evaluate(blue) == "#8fb5f5"
    page.emulate_media(media="print")
    assert figure(page).evaluate(blue) == "#2056b3"


# ---- the figure of lesson 6: sizes through forty layers ----

FACTORS = [0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.4, 2, 4]


def sizes_of_layers(factor, norm, depth=40):
    "The sizes of vectors at the start and after each layer, in float64."
    draw = torch.Generator().manual_seed(6)

    def randn(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    h = randn(64, 32)
    sizes = [h.square().mean().sqrt().item()]
    for _ in range(depth):
        h = (rms_norm(h, eps=0.0) if norm else h) @ (factor * randn(32, 32) / 32**0.5)
        sizes.append(h.square().mean().sqrt().item())
    return sizes


def sizes_sentence(factor, norm, sizes):
    "What the figure says, and the first layer that float16 cannot hold, or -1."
    out = next((i for i, s in enumerate(sizes) if not 2**-24 <= s <= 65504), -1)
    last = sizes[-1]
    if 0.001 <= last < 9999.5:
        number = f"{last:.0f}" if last >= 100 else f"{float(f'{last:.2g}'):g}"
    else:
        digits, power = f"{last:.1e}".split("e")
        raised = f"{int(power)}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        number = f"{digits} · 10{raised}"
    said = f"With weights × {factor}{' and norms' * norm}, the numbers have the size "
    said += f"{number} after 40 layers. "
    if out < 0:
        return said + "float16 can hold that.", out
    how = "large" if last > 1 else "small"
    return said + f"From layer {out} on, that is too {how} for float16.", out


LINES = """figure => [...figure.querySelectorAll(".tf-stage path")].filter(
  e => e.getAttribute("stroke") !== "currentColor").map(e => [
    e.getAttribute("stroke").slice(14, -1),
    e.getAttribute("d").slice(1).split("L").map(p => p.split(",").map(Number))])"""


def assert_sizes_shown(page, factor, norm):
    "Compare all that the figure shows with vectors that went through the layers."
    live = figure(page, "layer-sizes")
    sizes = sizes_of_layers(factor, norm)
    said, out = sizes_sentence(factor, norm, sizes)
    numbers = live.evaluate("f => f.tformer.numbers")
    assert numbers == {"sizes": pytest.approx(sizes, rel=1e-4), "out": out}
    assert live.locator(".tf-sentence").text_content() == said
    lines = live.evaluate(LINES)
    assert [color for color, _ in lines] == (["blue"] if out < 0 else ["blue", "red"])
    points = [point for _, line in lines for point in line]
    if out >= 0:
        assert points[out] == points.pop(out + 1)  # where the color changes
    left, top, right, low = live.evaluate("""f => {
        const [, ...n] = /M(.*),(.*)V(.*)H(.*)/.exec(f.querySelector(
          '.tf-stage path[stroke="currentColor"]').getAttribute("d"));
        return [+n[0], +n[1], +n[3], +n[2]]; }""")
    for i, ((x, y), size) in enumerate(zip(points, sizes, strict=True)):
        assert x == pytest.approx(left + (right - left) * i / 40, abs=0.01)
        share = 0.5 - math.log10(size) / 50
        assert y == pytest.approx(top + (low - top) * share, abs=0.01)
        assert top < y < low
    band = live.locator(".tf-stage rect").evaluate(
        "e => ['y', 'height'].map(name => +e.getAttribute(name))"
    )
    ends = [0.5 - math.log10(size) / 50 for size in (65504, 2**-24)]
    upper, lower = (top + (low - top) * share for share in ends)
    assert band == pytest.approx([upper, lower - upper], abs=0.01)
    texts = live.locator(".tf-stage text").all_text_contents()
    powers = ["10−20", "10−10", "1", "1010", "1020"]
    steps = ["0", "10", "20", "30", "40"]
    assert texts == ["what float16 can hold", *powers, *steps, "layer"]
    assert min(live.evaluate(SIZES)) >= 12
    for text in live.locator(".tf-stage text").all():
        start, end = text.evaluate(BOX)
        assert start >= 16 and end <= 374
    return said


def test_sizes_are_those_of_vectors_that_went_through_the_layers(chromium, tmp_path):
    data = {"factors": FACTORS, "start": 2, "plain": sizes_of_layers(1, False)}
    with telephone(chromium, tmp_path, "layer-sizes", data) as page:
        live = figure(page, "layer-sizes")
        assert live.evaluate("f => f.tformer.settings") == {"factor": 2}
        assert page.get_by_role("radio").count() == 0
        said = {assert_sizes_shown(page, 2, False)}
        slider = page.get_by_role("slider", name="all weights are multiplied by")
        for key, factor in (("Home", 0.25), ("ArrowRight", 0.5), ("End", 4)):
            slider.press(key)
            assert slider.get_attribute("aria-valuetext") == str(factor)
            said.add(assert_sizes_shown(page, factor, False))
        for factor in FACTORS:
            live.evaluate("(f, factor) => f.tformer.set({factor})", factor)
            said.add(assert_sizes_shown(page, factor, False))
        for words in ("can hold", "too large", "too small", " · 10⁻"):
            assert any(words in sentence for sentence in said), words


def test_sizes_are_level_with_norms(chromium, tmp_path):
    data = {"factors": FACTORS, "start": 2, "plain": sizes_of_layers(1, False)}
    data["normed"] = sizes_of_layers(1, True)
    with telephone(chromium, tmp_path, "layer-sizes", data) as page:
        live = figure(page, "layer-sizes")
        assert live.evaluate("f => f.tformer.settings") == {"factor": 2, "norm": "yes"}
        for factor in FACTORS:
            live.evaluate("(f, factor) => f.tformer.set({factor})", factor)
            assert "can hold" in assert_sizes_shown(page, factor, True)
        page.locator(".tf-choices label", has_text=re.compile("^no$")).tap()
        assert "too large" in assert_sizes_shown(page, 4, False)
        page.keyboard.press("ArrowRight")
        assert_sizes_shown(page, 4, True)
        page.emulate_media(media="print")
        assert live.locator(".tf-still").is_visible()
        assert not live.locator(".tf-stage").is_visible()


# ---- the figure of lesson 5: hands at a distance ----

HANDS = """figure => [...figure.querySelectorAll(".tf-hand")].map(e => [
  e.getAttribute("stroke").slice(14, -1),
  ...e.getAttribute("d").match(/-?[0-9.e-]+/g).map(Number)])"""


def hands_at(distance, rule):
    "The vectors of ones that rotary positions turn, and which angles are new."
    plain = rope_frequencies(24)
    freqs = plain / 8 if rule == "linear" else plain
    ones = torch.cat([torch.ones(12), torch.zeros(12)])[None, None, None]
    turned = RotaryEmbedding(24, freqs=freqs)(
        ones, positions=torch.tensor([[distance]])
    )
    x, y = turned[0].flatten().view(2, 12)
    seen = torch.arange(0, 128, 0.25)[:, None] * plain
    gap = (torch.stack([x, y]) - torch.stack([seen.cos(), seen.sin()], 1)).norm(dim=1)
    return x.tolist(), y.tolist(), (gap.amin(0) > 0.26 * plain).tolist()


def test_hands_stand_where_rotary_positions_turn_them(chromium, tmp_path):
    rates = rope_frequencies(24).tolist()
    data = {
        "trained": 128,
        "distances": [1, 64, 200, 384, 1000],
        "start": 200,
        "speeds": {"as trained": rates, "linear": [rate / 8 for rate in rates]},
    }
    with telephone(chromium, tmp_path, "hands", data) as page:
        live = figure(page, "hands")
        assert live.evaluate("f => f.tformer.settings") == {
            "distance": 200,
            "rule": "as trained",
        }
        colors = set()
        for distance, rule in product(data["distances"], data["speeds"]):
            live.evaluate(
                "(f, [distance, rule]) => f.tformer.set({distance, rule})",
                [distance, rule],
            )
            xs, ys, new = hands_at(distance, rule)
            numbers = live.evaluate("f => f.tformer.numbers")
            assert numbers["unseen"] == new, (distance, rule)
            for (color, x0, y0, x1, y1), x, y, red in zip(
                live.evaluate(HANDS), xs, ys, new, strict=True
            ):
                length = math.hypot(x1 - x0, y1 - y0)
                assert (x1 - x0) / length == pytest.approx(x, abs=1e-3)
                assert (y0 - y1) / length == pytest.approx(y, abs=1e-3)
                assert color == ("red" if red else "blue")
                colors.add(color)
            n = sum(new)
            said = "none" if n == 0 else str(n)
            assert f", {said}" in live.locator(".tf-sentence").text_content()
        assert colors == {"red", "blue"}
        assert min(live.evaluate(SIZES)) >= 12
        slider = page.get_by_role("slider", name="distance of the two tokens")
        slider.press("End")
        assert slider.get_attribute("aria-valuetext") == "1,000"


# ---- the figure of lesson 24: what a step reads ----


def specs_of_models():
    "Three decoders, of which two have projections of different sizes."
    sizes = dict(
        vocab_size=1000,
        gated_ffn=True,
        biases=(),
        norm_vectors=1,
        tie_word_embeddings=False,
    )
    return [
        costs.ModelSpec(
            **sizes,
            name="small",
            d_model=256,
            n_layers=3,
            n_heads=8,
            n_kv_heads=2,
            d_ff=700,
        ),
        costs.ModelSpec(
            **sizes,
            name="wide",
            d_model=4096,
            n_layers=32,
            n_heads=32,
            n_kv_heads=8,
            d_ff=14_336,
        ),
        costs.ModelSpec(
            **sizes,
            name="long heads",
            d_model=512,
            n_layers=4,
            n_heads=4,
            n_kv_heads=4,
            d_head=256,
            d_ff=100,
        ),
    ]


def what_a_step_reads(specs):
    "The data of the figure, as lesson 24 makes them."
    models = []
    for spec in specs:
        total = sum(costs.parameters_by_component(spec).values())
        kv_head = 2 * spec.n_layers * spec.d_model * spec.d_head
        models.append(
            {
                "name": spec.name,
                "heads": spec.n_heads,
                "kv": spec.n_kv_heads,
                "weights": 2 * (total - spec.n_kv_heads * kv_head),
                "weightsPerHead": 2 * kv_head,
                "cachePerHead": 4 * spec.n_layers * spec.d_head,
            }
        )
    return {"models": models, "bandwidth": 3.35e12, "memory": 80e9}


def test_a_step_reads_what_the_package_counts(chromium, tmp_path):
    specs = specs_of_models()
    html = html_of("shared-keys", what_a_step_reads(specs))
    file = tmp_path / "page.html"
    file.write_text(
        PAGE % (read("live.css"), read("live.js"), html, read("live/shared-keys.js")),
        encoding="utf-8",
    )
    page = chromium.new_page()
    page.goto(file.as_uri())
    rng = random.Random(1)
    seen = set()
    for _ in range(10):
        index = rng.randrange(3)
        settings = {
            "model": index,
            "kv": rng.choice([1, 2, 4, 8, 16, 32]),
            "tokens": rng.choice([128, 512, 2048, 8192, 32768, 131072]),
            "batch": rng.choice([1, 4, 16, 64, 256]),
        }
        numbers, drawn, _, said = figure(page, "shared-keys").evaluate(SET, settings)
        found = []
        for kv in (specs[index].n_heads, min(settings["kv"], specs[index].n_heads)):
            spec = dataclasses.replace(specs[index], n_kv_heads=kv)
            found.append(
                (
                    costs.weight_bytes(spec),
                    costs.kv_cache_bytes(spec, settings["tokens"], settings["batch"]),
                )
            )
        for shown, (weights, cache) in zip(
            (numbers["all"], numbers["shared"]), found, strict=True
        ):
            assert shown["weights"] == weights and shown["cache"] == cache
        totals = [sum(pair) for pair in found]
        assert numbers["ratio"] == pytest.approx(totals[0] / totals[1])
        assert numbers["ms"] == pytest.approx(totals[1] / 3.35e9)
        assert drawn[0] + drawn[1] == pytest.approx(
            (drawn[2] + drawn[3]) * totals[0] / totals[1]
        )
        name = specs[index].name
        time = (
            f"A step of {name} takes {numbers['ms']:.1f} ms or more on an H100"
            if totals[1] <= 80e9
            else f"{name} and these texts do not fit into the 80 GB of one H100; "
            f"reading them takes {numbers['ms']:.1f} ms or more"
        )
        saved = (
            "nothing is shared"
            if settings["kv"] >= specs[index].n_heads
            else f"it reads {numbers['ratio']:.1f} times fewer bytes than with "
            "a key head for each query head"
        )
        assert said == f"{time}, and {saved}."
        seen.add((totals[1] <= 80e9, settings["kv"] >= specs[index].n_heads))
    assert len(seen) > 2, "the settings show too few of the sentences"
    page.close()


# ---- the figure of lesson 25: what a latent keeps, and what it loses ----


def latent_spectra(seed=5):
    """Keys and values of four random layers, and the data of the figure.

    A layer's keys and values are a tensor of (tokens, heads, numbers). From one
    layer to the next, the variance spreads over more directions.
    """
    draw = torch.Generator().manual_seed(seed)
    layers = []
    for layer in range(4):
        sizes = torch.exp(-torch.arange(128) / (9 + 12 * layer)).double()
        states = sizes * torch.randn(300, 128, generator=draw).double()
        kv = states @ torch.randn(128, 8 * 32, generator=draw).double()
        layers.append((kv - kv.mean(0)).view(300, 8, 32))
    squares = [
        [torch.linalg.svdvals(kv[:, :h].flatten(1))[:128] ** 2 for h in range(1, 9)]
        for kv in layers
    ]
    shares = [[(s / s.sum()).tolist() for s in layer] for layer in squares]
    return layers, {"d_head": 16, "d_rope": 8, "bytes": 2, "layers": shares}


def lost_by_rank(kv, rank):
    "The share of the variance that the best projection to this rank loses."
    directions = torch.linalg.eigh(kv.T @ kv).eigenvectors[:, -rank:]
    left = kv - kv @ directions @ directions.T
    return (left.square().sum() / kv.square().sum()).item()


BARS = """figure => [...figure.querySelectorAll(".tf-stage rect")].slice(3).map(e =>
    [e.getAttribute("fill").slice(14, -1), +e.getAttribute("height")])"""


def test_a_latent_loses_what_the_best_projection_loses(chromium, tmp_path):
    layers, data = latent_spectra()
    file = tmp_path / "page.html"
    file.write_text(
        PAGE
        % (
            read("live.css"),
            read("live.js"),
            html_of("latent-rank", data),
            read("live/latent-rank.js"),
        ),
        encoding="utf-8",
    )
    page = chromium.new_page(viewport={"width": 390, "height": 844})
    page.goto(file.as_uri())
    live = figure(page, "latent-rank")
    assert live.evaluate("f => f.tformer.settings") == {
        "layer": 0,
        "heads": 8,
        "rank": 32,
    }
    rng = random.Random(8)
    seen = set()
    for _ in range(10):
        layer = rng.randrange(4)
        heads = rng.choice([1, 2, 4, 8])
        rank = rng.choice([4, 8, 16, 32, 48, 64, 96, 128])
        numbers, drawn, shown, said = live.evaluate(
            SET, {"layer": layer, "heads": heads, "rank": rank}
        )
        kv = layers[layer][:, :heads].flatten(1)
        lost = lost_by_rank(kv, rank)
        ratio = kv.shape[1] / (rank + 8)
        assert numbers == {
            "separate": kv.shape[1],
            "latent": rank + 8,
            "ratio": pytest.approx(ratio),
            "lost": pytest.approx(lost, abs=1e-9),
        }
        unit = drawn[0] / kv.shape[1]
        assert unit * 256 == pytest.approx(390 - 2 * 16 - 2)
        assert drawn[1:3] == pytest.approx([unit * rank, unit * 8])
        count = min(kv.shape[1], 128)
        kept = min(rank, count)
        bars = live.evaluate(BARS)
        assert [color for color, _ in bars] == (
            ["blue"] * kept + ["gray"] * (count - kept)
        )
        spread = torch.linalg.svdvals(kv)[:count]
        assert [height for _, height in bars] == pytest.approx(
            (bars[0][1] * spread / spread[0]).tolist()
        )
        assert shown == [
            f"keys and values: {32 * heads} numbers, {64 * heads} bytes",
            f"latent and rotary key: {rank} + 8 numbers, {2 * rank + 16} bytes",
            "directions of keys and values, by size",
            f"{kept} of {count} kept; heights on a square-root scale",
        ]
        keeps = (
            f"{ratio:.1f} times fewer numbers"
            if ratio > 1
            else "no fewer numbers than separate keys and values do"
        )
        loses = (
            "nothing"
            if rank >= count
            else "less than 0.1 %"
            if lost < 0.001
            else f"{100 * lost:.1f} %"
        )
        said_heads = "1 head" if heads == 1 else f"{heads} heads"
        assert said == (
            f"With {said_heads}, a latent of {rank} keeps {keeps}, and loses {loses} "
            f"of what the keys and values of layer {layer + 1} say."
        )
        assert min(live.evaluate(SIZES)) >= 12
        for text in live.locator(".tf-stage text").all():
            left, right = text.evaluate(BOX)
            assert left >= 16 and right <= 374
        seen.add(re.sub(r"\d+(\.\d)?", "N", said))
    assert len(seen) > 3, "the settings show too few of the sentences"
    # rounded shares add up to a little less or more than 1
    assert live.evaluate("""f => [[0.6, 0.39], [0.6, 0.41, 0]].map(shares =>
        f.tformer.definition.compute({layers: [[shares]]},
            {layer: 0, heads: 1, rank: 2}).lost)""") == [0, 0]
    page.close()


# ---- the figure of lesson 26: what reaches the last output through windows ----

LEO = (
    "Leo was a happy boy. One day, he was in the bedroom with a green boat. Leo "
    "put the boat under the bed. Then he went to the garden. Soon he went back to "
    "the"
)


@torch.no_grad()
def told_through_windows():
    "The storyteller, the tokens of a story, and the data as lesson 26 makes them."
    model, tokenizer, _ = tformer.load("stories")
    ids = [tokenizer.token_to_id("<|endoftext|>"), *tokenizer.encode(LEO)]
    read = [tokenizer.decode([i]).strip() for i in range(model.config.vocab_size)]
    guesses = []
    for w in range(1, len(ids) + 1):
        windowed = Llama(model.config, make_window_factory(model.config, w))
        windowed.load_state_dict(model.state_dict())
        best = windowed.eval()(torch.tensor([ids]))[0, -1].softmax(-1).topk(3)
        guesses.append(
            [
                [read[i], round(p, 4)]
                for i, p in zip(
                    best.indices.tolist(), best.values.tolist(), strict=True
                )
            ]
        )
    data = {
        "layers": 4,
        "words": [read[i] for i in ids],
        "next": "bedroom",
        "guesses": guesses,
    }
    return model, ids, read, data


def fewest_layers(n, w, layers):
    "Through how many layers a gradient reaches each token from the last, or None."
    fewest = [None] * (n - 1) + [0]
    for count in range(1, layers + 1):
        torch.manual_seed(count)
        config = LlamaConfig(
            vocab_size=5, d_model=8, n_layers=count, n_heads=2, n_kv_heads=1, max_len=64
        )
        model = Llama(config, make_window_factory(config, w)).double().eval()
        found = []
        model.embed.register_forward_hook(
            lambda module, given, out: (
                found.append(out.detach().requires_grad_()) or found[0]
            )
        )
        model(torch.zeros(1, n, dtype=torch.long))[0, -1, 0].backward()
        for i, slope in enumerate(found[0].grad[0].abs().sum(-1).tolist()):
            if slope and fewest[i] is None:
                fewest[i] = count
    return fewest


@torch.no_grad()
def masked_guesses(model, ids, w):
    "The three likeliest tokens with their probabilities, by a mask."
    i = torch.arange(len(ids))
    near = i[:, None] - i < w
    weights = softmax(model(torch.tensor([ids]), mask=near[None, None])[0, -1].double())
    first = weights.argsort(descending=True)[:3].tolist()
    return [(i, weights[i].item()) for i in first]


CHIPS = """figure => [...figure.querySelectorAll(".tf-stage g")].map(g => {
  const [box, word, number] = g.querySelectorAll("rect, text");
  const {left, right, top, bottom} = box.getBoundingClientRect();
  const fits = [word, number].every(e => { const at = e.getBoundingClientRect();
    return at.left >= left && at.right <= right && at.top >= top - 1 &&
      at.bottom <= bottom + 1; });
  return {kind: g.getAttribute("class"), title: g.querySelector("title").textContent,
    word: word.textContent, number: number.textContent, fits,
    struck: getComputedStyle(word).textDecorationLine === "line-through",
    dashed: getComputedStyle(box).strokeDasharray !== "none",
    filled: getComputedStyle(box).fill !== "none",
    tint: +getComputedStyle(box).fillOpacity, left, right, top, bottom,
    inks: [word, number].map(e => getComputedStyle(e).fill),
    ground: getComputedStyle(box).fill}; })"""
ROWS = """figure => { const svg = figure.querySelector(".tf-stage svg");
  const all = name => [...svg.children].filter(e => e.localName === name);
  return [all("text").map(e => e.textContent), all("rect").map(
    e => [e.getAttribute("fill").slice(14, -1), +e.getAttribute("width")]),
    svg.getAttribute("aria-label"), svg.viewBox.baseVal.height,
    Math.max(...all("rect").map(e => +e.getAttribute("y") + 12))]; }"""


def as_share(p):
    return (
        "less than 0.1 %"
        if p < 0.0005
        else "more than 99.9 %"
        if p >= 0.9995
        else f"{100 * p:.1f} %"
    )


def window_sentence(w, steps, guess, p):
    "What the figure says of the 41 tokens and four layers."
    n = len(steps)
    if w == n:
        said = f"all {n} tokens in each layer"
    else:
        lost = steps.count(None)
        said = f"{w} token{'s' * (w > 1)} in each layer, and through four layers "
        said += "no more" if w == 1 else f"{n - lost}" if lost else f"all {n}"
        if lost:
            said += f"; the first {lost} of the {n} cannot reach it"
    how = "as in the story" if guess == "bedroom" else "but the story says “bedroom”"
    return (
        f"With a window of {w}, the last token reads {said}. Next, the model would "
        f"write “{guess}” ({as_share(p)}), {how}."
    )


def assert_window_shown(page, w, model, ids, read, data):
    "Compare all that the figure shows with gradients and with a masked model."
    live = figure(page, "window-reach")
    steps = fewest_layers(len(ids), w, 4)
    lost = steps.count(None)
    assert live.evaluate("f => [f.tformer.settings, f.tformer.numbers]") == [
        {"w": w},
        {"steps": steps, "lost": lost, "reached": len(ids) - lost},
    ]
    slider = page.get_by_role("slider", name="window w")
    assert slider.get_attribute("aria-valuetext") == (
        "41, the whole text" if w == 41 else str(w)
    )

    chips = live.evaluate(CHIPS)
    assert [c["word"] for c in chips] == data["words"]
    assert chips == sorted(chips, key=lambda c: (c["top"], c["left"]))
    for a, b in pairwise(chips):
        assert b["left"] > a["right"] or b["top"] > a["bottom"], "boxes overlap"
    for chip, step in zip(chips, steps, strict=True):
        gone = step is None
        assert chip["kind"] == ("tf-lost" if gone else "tf-reached")
        assert chip["number"] == ("–" if gone else str(step))
        assert chip["title"] == f"{chip['word']}: " + (
            "cannot reach the last output"
            if gone
            else f"reaches the last output, layers needed: {step}"
        )
        assert chip["struck"] == chip["dashed"] == gone != chip["filled"]
        assert chip["left"] >= 16 and chip["right"] <= 374 and chip["fits"]
        if not gone:
            assert chip["tint"] == pytest.approx(0.4 - 0.08 * step, abs=1e-5)

    texts, bars, label, height, lowest = live.evaluate(ROWS)
    expected = masked_guesses(model, ids, w)
    assert texts[:3] == [
        "below each word: the fewest layers to the last",
        "output; struck, with a dash: it cannot reach it",
        "what the model would write next",
    ]
    for shown, (color, width), (i, p) in zip(texts[3:], bars, expected, strict=True):
        real = read[i] == "bedroom"
        name, share = shown.split(": ")
        assert name == read[i] + " (as in the story)" * real
        assert color == ("green" if real else "orange")
        assert width == pytest.approx(356 * p, abs=0.05)
        if share[0].isdigit():
            assert float(share[:-2]) == pytest.approx(100 * p, abs=0.06)
        else:
            assert share == as_share(p)
    assert lowest < height < lowest + 20
    said = live.locator(".tf-sentence").text_content()
    guess, p = data["guesses"][w - 1][0]
    assert said == label == window_sentence(w, steps, guess, p)
    assert min(live.evaluate(SIZES)) >= 12
    for text in live.locator(".tf-stage svg > text").all():
        left, right = text.evaluate(BOX)
        assert left >= 16 and right <= 374
    return guess


def test_windows_show_what_gradients_and_masks_find(chromium, tmp_path):
    told = told_through_windows()
    _, ids, _, data = told
    looks = re.sub(r"@font-face \{[^}]*\}", "", read("course.css"))
    file = tmp_path / "page.html"
    file.write_text(
        PAGE
        % (
            looks + read("live.css"),
            read("live.js"),
            html_of("window-reach", data),
            read("live/window-reach.js"),
        ),
        encoding="utf-8",
    )
    page = chromium.new_page(viewport={"width": 390, "height": 1000})
    heard = []
    page.on("console", lambda m: heard.append(m.text))
    page.on("pageerror", lambda e: heard.append(str(e)))
    page.goto(file.as_uri())
    live = figure(page, "window-reach")
    assert live.locator(".tf-stage").is_visible(), heard
    slider = page.get_by_role("slider", name="window w")
    guessed = {8: assert_window_shown(page, 8, *told)}
    slider.focus()
    box = slider.bounding_box()
    y = box["y"] + box["height"] / 2
    middle = box["x"] + box["width"] / 2

    def press(key, times=1):
        for _ in range(times):
            page.keyboard.press(key)

    def drag():
        page.mouse.move(middle, y)
        page.mouse.down()
        page.mouse.move(middle + 60, y, steps=3)
        page.mouse.move(box["x"] + box["width"] - 1, y, steps=3)
        page.mouse.up()

    for w, act in (
        (1, lambda: press("Home")),
        (2, lambda: press("ArrowRight")),
        (3, lambda: press("ArrowRight")),
        (10, lambda: press("ArrowRight", 7)),
        (11, lambda: press("ArrowRight")),
        (21, lambda: page.mouse.click(middle, y)),
        (26, lambda: press("ArrowRight", 5)),
        (27, lambda: press("ArrowUp")),
        (41, drag),
        (40, lambda: press("ArrowLeft")),
        (41, lambda: press("End")),
    ):
        act()
        guessed[w] = assert_window_shown(page, w, *told)
    # a window of 27 is the first that reaches from the last token to "bedroom"
    assert len(ids) - data["words"].index("bedroom") == 27
    first = [best[0][0] for best in data["guesses"]]
    assert [word == "bedroom" for word in first] == [w >= 27 for w in range(1, 42)]
    assert {*first[17:26]} == {"garden"} and {*guessed} > {8, 21, 26, 27}
    assert all(first[w - 1] == guess for w, guess in guessed.items())

    live.evaluate("f => f.tformer.set({w: 8})")
    for look in ("light", "dark"):
        page.evaluate("t => { document.documentElement.dataset.theme = t; }", look)
        ground, inks, _ = live.evaluate(INKS)
        assert (plot.luminance(rgb(ground)) < 0.5) == (look == "dark")
        assert min(plot.contrast(rgb(ink), rgb(ground)) for ink in inks) >= 4.5
        for chip in live.evaluate(CHIPS):
            under = rgb(ground)
            if chip["filled"]:
                under = [
                    chip["tint"] * a + (1 - chip["tint"]) * b
                    for a, b in zip(rgb(chip["ground"]), under, strict=True)
                ]
            assert min(plot.contrast(rgb(i), under) for i in chip["inks"]) >= 4.5
    page.set_viewport_size({"width": 900, "height": 1000})
    page.wait_for_function("""() => document.querySelector(".tf-stage svg")
        .viewBox.baseVal.width > 500""")
    assert len({chip["top"] for chip in live.evaluate(CHIPS)}) < 5
    assert not heard
    page.close()


# ---- the figure of lesson 6b: a curve followed by bends ----


def told_of_kinks():
    "The data of the figure kinks, for a parabola and up to nine hidden features."
    x = torch.linspace(0, 1, 51).double()[:, None]
    curve = 4 * x * (1 - x) - 0.3
    weights = []
    for n in range(1, 10):
        hidden = (x - torch.arange(n) / n).relu()
        best = torch.linalg.lstsq(hidden, curve).solution.flatten()
        weights.append([round(w, 5) for w in best.tolist()])
    return {
        "curve": [round(y, 5) for y in curve.flatten().tolist()],
        "weights": weights,
    }


def test_kinks_are_what_a_feed_forward_layer_computes(chromium, tmp_path):
    data = told_of_kinks()
    x = torch.linspace(0, 1, 51).double()[:, None]
    curve = torch.tensor(data["curve"], dtype=torch.float64)
    with telephone(chromium, tmp_path, "kinks", data) as page:
        live = figure(page, "kinks")
        assert live.locator(".tf-stage").is_visible()
        slider = page.get_by_role("slider", name="hidden features")
        slider.focus()
        for key, n in (("End", 9), ("Home", 1), ("ArrowRight", 2), ("ArrowRight", 3)):
            page.keyboard.press(key)
            layer = FeedForward(1, n).double()
            layer.up_proj.weight.data[:] = 1.0
            layer.up_proj.bias.data = -torch.arange(n).double() / n
            down = torch.tensor([data["weights"][n - 1]], dtype=torch.float64)
            layer.down_proj.weight.data = down
            layer.down_proj.bias.data[:] = 0.0
            expected = layer(x).detach().flatten()
            numbers = live.evaluate("f => f.tformer.numbers")
            values = torch.tensor(numbers["values"], dtype=torch.float64)
            torch.testing.assert_close(values, expected)
            at = torch.tensor(numbers["bends"], dtype=torch.float64)
            assert at[:, 0].tolist() == pytest.approx([i / n for i in range(n)])
            torch.testing.assert_close(layer(at[:, :1])[:, 0].detach(), at[:, 1])
            error = (expected - curve).abs().max().item()
            assert numbers["error"] == pytest.approx(error, abs=1e-6)
            assert page.locator(".tf-sentence").inner_text() == (
                "With "
                + (
                    "one hidden feature, one bend"
                    if n == 1
                    else f"{n} hidden features, {n} bends"
                )
                + f": the blue line is off the gray curve by at most {error:.3f}."
            )
            assert live.locator("circle").count() == n


# ---- the figure of lesson 27: which tokens an indexer picks ----

LUCY = (
    "Lucy was a happy girl. One cold day, she played in the bedroom with a green "
    "ball. Lucy put the ball in the box. Then she went to the garden. Later, she "
    "came back to the bedroom."
)


@torch.no_grad()
def told_by_indexers():
    """The layers of a sparse storyteller, what each reads, and the figure's data.

    What the indexers pick is nothing to this test, so they are not trained. The data
    are made as in lesson 27.
    """
    model, tokenizer, _ = tformer.load("stories")
    torch.manual_seed(4)
    sparse = Llama(
        model.config,
        make_sparse_factory(
            model.config, None, d_index=16, n_index_heads=4, d_index_rope=8
        ),
    )
    sparse.load_state_dict(model.state_dict(), strict=False)
    layers = [block.attention.sublayer for block in sparse.eval().blocks]
    inputs = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, given: inputs.append(given[0]))
        for layer in layers
    ]
    ids = [tokenizer.token_to_id("<|endoftext|>"), *tokenizer.encode(LUCY)]
    sparse(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()
    data = []
    for layer, x in zip(layers, inputs, strict=True):
        places = Positions.of(None, x)
        scores = layer.indexer.score(
            *layer.indexer.project_queries(x, x, places),
            layer.indexer.project_keys(x, places),
        )[0, 0]
        order = []
        for i, row in enumerate(scores):
            best = row[: i + 1].flip(0).sort(descending=True, stable=True).indices
            order.append((i - best[:16]).tolist())
        weights = (1e4 * layer(x, need_weights=True)[1][0].mean(0)).round().int()
        data.append(
            {
                "order": order,
                "weights": [row[: i + 1].tolist() for i, row in enumerate(weights)],
            }
        )
    words = [tokenizer.decode([i]).strip() for i in ids]
    return (
        layers,
        inputs,
        {"words": words, "layer": 1, "query": len(ids) - 1, "layers": data},
    )


@torch.no_grad()
def what_is_read(attention, x, k):
    """What each query reads, its weights where it reads all, and the share of these.

    Each is a list, or a tensor, with an item for each query.
    """
    attention.set_top_k(k)
    read = attention(x, need_weights=True)[1][0].sum(0) > 0
    attention.set_top_k(None)
    dense = attention(x, need_weights=True)[1][0].double().mean(0)
    i = torch.arange(len(read))
    near = (i[:, None] - i >= 0) & (i[:, None] - i < k)
    shares = {
        "indexer": (dense * read).sum(1),
        "last": (dense * near).sum(1),
        "heaviest": dense.topk(k).values.sum(1),
    }
    return (
        [row.nonzero()[:, 0].tolist() for row in read],
        dense,
        [{by: share[q].item() for by, share in shares.items()} for q in i],
    )


CELLS = """figure => [...figure.querySelectorAll(".tf-stage g")].map(g => {
  const [box, bar] = g.querySelectorAll("rect");
  const word = g.querySelector("text");
  const {left, right, top, bottom} = box.getBoundingClientRect();
  const fits = [word, bar].every(e => { const at = e.getBoundingClientRect();
    return at.left >= left && at.right <= right && at.top >= top - 1 &&
      at.bottom <= bottom + 1; });
  const of = e => getComputedStyle(e);
  return {kind: g.classList[0], title: g.querySelector("title").textContent,
    word: word.textContent, fits, bold: of(word).fontWeight === "600",
    boxed: of(box).stroke !== "none", thick: of(box).strokeWidth === "2.5px",
    tint: +of(box).fillOpacity, tall: +bar.getAttribute("height"),
    color: bar.getAttribute("fill").slice(14, -1), left, right, top,
    bottom, ink: of(word).fill, ground: of(box).fill, bar: of(bar).fill,
    edge: of(box).stroke}; })"""


def part(share, n, q):
    "How the figure writes a share."
    return (
        "100 %"
        if n == q + 1
        else "under 1 %"
        if share < 0.005
        else "over 99 %"
        if share >= 0.995
        else f"{int(100 * share + 0.5)} %"
    )


def assert_picks_shown(page, settings, layers, inputs, data):
    "Compare all that the figure shows with what the layer reads and weighs."
    live = figure(page, "sparse-picks")
    layer, by, k, q = (settings[name] for name in ("layer", "by", "k", "q"))
    found = what_is_read(layers[layer], inputs[layer], k)
    read, dense, shares = (of[q] for of in found)
    n = min(k, q + 1)
    assert len(read) == n
    shown, numbers = live.evaluate("f => [f.tformer.settings, f.tformer.numbers]")
    assert shown == settings
    assert sorted(numbers["read"]["indexer"]) == read
    assert numbers["shares"] == pytest.approx(shares, abs=2e-3)
    assert (numbers["n"], numbers["seen"]) == (n, q + 1)
    chosen = {
        "indexer": read,
        "last": range(q, q - n, -1),
        "heaviest": numbers["read"]["heaviest"],
    }[by]
    assert len(set(chosen)) == n
    if by == "heaviest":
        assert dense[chosen].sum().item() == pytest.approx(shares[by], abs=2e-3)

    cells = live.evaluate(CELLS)
    assert [c["word"] for c in cells] == data["words"]
    assert sum(c["kind"] == "tf-read" for c in cells) == n
    for a, b in pairwise(cells):
        assert b["left"] > a["right"] or b["top"] > a["bottom"], "boxes overlap"
    for i, cell in enumerate(cells):
        kind = "later" if i > q else "read" if i in chosen else "left"
        assert cell["kind"] == f"tf-{kind}", (i, settings)
        assert cell["boxed"] == (kind == "read" or i == q)
        assert cell["thick"] == cell["bold"] == (i == q)
        assert (cell["tint"] > 0) == (kind == "read")
        assert (
            cell["color"] == {"read": "blue", "left": "orange", "later": "gray"}[kind]
        )
        assert cell["left"] >= 16 and cell["right"] <= 374 and cell["fits"]
        assert cell["right"] - cell["left"] >= 20  # and a gap of 4, for a finger
        said = (
            "comes later"
            if i > q
            else f"{float(dense[i]) * 100:.1f} %" + ", read" * (kind == "read")
        )
        if i > q or abs(float(dense[i]) * 1000 % 1 - 0.5) > 0.1:  # rounded twice
            assert cell["title"] == f"{cell['word']}: {said}"
        assert cell["tall"] == pytest.approx(
            0 if i > q else 15 * float(dense[i] / dense.max()), abs=0.05
        )

    word = f"“{data['words'][q]}”"
    name = {
        w: ("indexer’s" if w == "indexer" else w) + (f" {n}" if n > 1 else " one")
        for w in shares
    }
    texts = live.locator(".tf-stage svg > text").all_text_contents()
    seen = {w: part(share, n, q) for w, share in numbers["shares"].items()}
    assert texts[2:] == [
        t for w in ("indexer", "heaviest", "last") for t in (name[w], seen[w])
    ]
    bars = live.locator(".tf-stage svg > rect").evaluate_all(
        "all => all.map(e => +e.getAttribute('width'))"
    )
    assert bars == pytest.approx(
        [172 * numbers["shares"][w] for w in ("indexer", "heaviest", "last")]
    )
    other = "indexer" if by == "heaviest" else "heaviest"
    hold = "hold" if n > 1 else "holds"
    said = live.locator(".tf-sentence").text_content()
    assert said == f"In layer {layer + 1}, " + (
        f"{word} may read only itself."
        if q == 0
        else f"{word} may read {n} tokens, and with k = {k} it reads them all."
        if n == q + 1
        else f"the {name[by]} of {q + 1} tokens {hold} {seen[by]} of the attention of "
        f"{word}; the {name[other]} {hold} {seen[other]}."
    )
    assert live.locator(".tf-stage svg").get_attribute("aria-label") == said
    assert (
        page.get_by_role("slider", name="query").get_attribute("aria-valuetext")
        == f"{word}, token {q + 1}"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert min(live.evaluate(SIZES)) >= 12
    for text in live.locator(".tf-stage svg > text").all():
        left, right = text.evaluate(BOX)
        assert left >= 16 and right <= 374


@contextmanager
def telephone(chromium, tmp_path, name, data):
    "A page of 390 pixels with one figure, on which nothing may go wrong."
    looks = re.sub(r"@font-face \{[^}]*\}", "", read("course.css"))
    file = tmp_path / "page.html"
    file.write_text(
        PAGE
        % (
            looks + read("live.css"),
            read("live.js"),
            html_of(name, data),
            read(f"live/{name}.js"),
        ),
        encoding="utf-8",
    )
    context = chromium.new_context(
        viewport={"width": 390, "height": 1000}, has_touch=True
    )
    page = context.new_page()
    heard = []
    page.on("console", lambda m: heard.append(m.text))
    page.on("pageerror", lambda e: heard.append(str(e)))
    page.goto(file.as_uri())
    yield page
    context.close()
    assert not heard


@pytest.fixture
def picks_page(chromium, tmp_path):
    "A telephone with the figure, and what it is drawn from."
    told = told_by_indexers()
    with telephone(chromium, tmp_path, "sparse-picks", told[-1]) as page:
        yield page, told


def test_a_pressed_word_shows_what_its_layer_reads(picks_page):
    page, told = picks_page
    live = figure(page, "sparse-picks")
    now = {"layer": 1, "by": "indexer", "k": 8, "q": len(told[-1]["words"]) - 1}
    assert_picks_shown(page, now, *told)

    def word(i):
        return live.locator(".tf-stage g").nth(i)

    def press(key):
        page.keyboard.press(key)

    def choose(name):
        page.locator(".tf-choices label", has_text=re.compile(f"^{name}$")).click()

    k = page.get_by_role("slider", name="how many")
    for change, act in (
        ({"q": 33}, lambda: word(33).click()),
        # a press leaves the keyboard with the query
        ({"q": 34}, lambda: press("ArrowRight")),
        ({"q": 33}, lambda: press("ArrowLeft")),
        ({"q": 24}, lambda: word(24).tap()),
        ({"q": 25}, lambda: press("ArrowUp")),
        ({"k": 1}, lambda: k.press("Home")),
        ({"by": "heaviest"}, lambda: choose("heaviest")),
        ({"by": "last"}, lambda: press("ArrowRight")),
        ({"k": 16}, lambda: k.press("End")),
        ({"by": "indexer"}, lambda: choose("indexer")),
        ({"layer": 3}, lambda: choose("4")),
        ({"layer": 2}, lambda: press("ArrowLeft")),
        ({"k": 15}, lambda: k.press("ArrowLeft")),
        # fewer tokens than k: a later one is pressed, then earlier ones
        ({"q": 44}, lambda: word(44).click()),
        ({"q": 14}, lambda: word(14).click()),
        ({"q": 0}, lambda: press("Home")),
    ):
        act()
        now.update(change)
        assert_picks_shown(page, now, *told)
    # a press that ends on another word is none
    word(5).hover()
    page.mouse.down()
    word(9).hover()
    page.mouse.up()
    assert live.evaluate("f => f.tformer.settings.q") == 0


def test_every_query_of_every_layer_has_the_picks_of_the_package(picks_page):
    page, (layers, inputs, data) = picks_page
    live = figure(page, "sparse-picks")
    queries = len(data["words"])
    for layer, k in product(range(4), (1, 4, 16)):
        found = live.evaluate(
            """(f, [layer, k, n]) => [...Array(n).keys()].map(
            q => f.tformer.definition.compute(f.tformer.data, {layer, k, q}))""",
            [layer, k, queries],
        )
        read, _, shares = what_is_read(layers[layer], inputs[layer], k)
        assert [sorted(numbers["read"]["indexer"]) for numbers in found] == read
        for numbers, share in zip(found, shares, strict=True):
            assert numbers["shares"] == pytest.approx(share, abs=2e-3)
            assert numbers["shares"]["heaviest"] >= numbers["shares"]["indexer"]
    # of equal weights, the nearer one is heavier
    assert live.evaluate("""f => f.tformer.definition.compute(
        {layers: [{order: [[0, 2, 1]], weights: [[5, 5, 5]]}]},
        {layer: 0, k: 2, q: 0}).read.heaviest""") == [0, -1]


def test_picks_are_readable_by_day_and_night(picks_page):
    page, _ = picks_page
    live = figure(page, "sparse-picks")
    live.evaluate("f => f.tformer.set({q: 33, layer: 0})")
    for look in ("light", "dark"):
        page.evaluate("t => { document.documentElement.dataset.theme = t; }", look)
        ground, inks, _ = live.evaluate(INKS)
        assert (plot.luminance(rgb(ground)) < 0.5) == (look == "dark")
        assert min(plot.contrast(rgb(ink), rgb(ground)) for ink in inks) >= 4.5
        for cell in live.evaluate(CELLS):
            under = [
                cell["tint"] * a + (1 - cell["tint"]) * b
                for a, b in zip(rgb(cell["ground"]), rgb(ground), strict=True)
            ]
            assert plot.contrast(rgb(cell["ink"]), under) >= 4.5
            assert plot.contrast(rgb(cell["bar"]), under) >= 3
            if cell["boxed"]:
                assert plot.contrast(rgb(cell["edge"]), rgb(ground)) >= 3
    page.emulate_media(forced_colors="active")
    boxed = [cell["word"] for cell in live.evaluate(CELLS) if cell["boxed"]]
    assert len(boxed) in (8, 9)  # the query is among its picks, or not
    page.emulate_media(media="print")
    assert live.locator(".tf-still").is_visible()
    assert not live.locator(".tf-stage").is_visible()
    page.emulate_media(media="screen", forced_colors="none")
    page.set_viewport_size({"width": 900, "height": 1000})
    page.wait_for_function("""() => document.querySelector(".tf-stage svg")
        .viewBox.baseVal.width > 500""")
    assert len({cell["top"] for cell in live.evaluate(CELLS)}) < 5


# ---- the figure of lesson 28: what seven kinds of attention cost ----

LLAMA_8B = costs.ModelSpec(
    vocab_size=128_256,
    d_model=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    d_ff=14_336,
    gated_ffn=True,
    biases=(),
    norm_vectors=1,
    tie_word_embeddings=False,
)
CARDS = [costs.ACCELERATORS[name] for name in ("RTX 4090", "A100 80GB", "H100", "H200")]
KINDS = {
    "MHA, 32 key heads": "MHA",
    "GQA, 8 key heads": "GQA",
    "MQA, 1 key head": "MQA",
    "MLA, latent of 512": "MLA",
    "sliding window": "the sliding window",
    "alternating": "alternating attention",
    "sparse": "sparse attention",
}
WINDOWS = {"sliding window": 32, "alternating": 16}  # layers that have one


def cache_part(numbers, products, n_layers, kept=None, read=None):
    return {
        "bytes": 2 * n_layers * numbers,
        "flops": 2 * n_layers * products,
        "kept": kept,
        "read": kept or read,
    }


def kinds_of_parts(n, d, groups, latent, window, index, k):
    """The parts of the seven kinds, as lesson 28 makes them.

    ``n``, ``d`` and ``groups`` are the query heads, their numbers and the key heads of
    GQA; ``latent`` holds the numbers of a latent and of a rotary key, ``index`` those
    of an index key and of its heads. There are as many layers as query heads.
    """

    def key_heads(count, n_layers=n, **limits):
        return cache_part(2 * count * d, 2 * n * d, n_layers, **limits)

    return [
        [key_heads(n)],
        [key_heads(groups)],
        [key_heads(1)],
        [cache_part(sum(latent), n * (sum(latent) + latent[0]), n)],
        [key_heads(groups, kept=window)],
        [key_heads(groups, n // 2, kept=window), key_heads(groups, n // 2)],
        [cache_part(index[0], index[0] * index[1], n), key_heads(groups, read=k)],
    ]


def what_kinds_cost():
    "The data of the figure, as lesson 28 makes them."
    weights = costs.weight_bytes(LLAMA_8B)
    parts = kinds_of_parts(32, 128, 8, (512, 64), 4096, (128, 32), 2048)
    return {
        "tokens": [2**i for i in range(8, 18)],
        "texts": [2**i for i in range(9)],
        "start": {"tokens": 65_536, "texts": 4, "card": 2},
        "cards": [
            {
                "name": card.name,
                "memory": card.memory_bytes,
                "bandwidth": card.bandwidth,
                "flops": card.flops,
            }
            for card in CARDS
        ],
        "weights": weights,
        "flops": weights,
        "variants": [
            {"name": name, "said": said, "parts": p}
            for (name, said), p in zip(KINDS.items(), parts, strict=True)
        ],
    }


def cache_and_work(kind, tokens, texts):
    "Bytes that the cache holds, those that a step reads, and FLOPs of the attention."
    n_kv = {"MHA": 32, "MQA": 1}.get(kind[:3], 8)
    spec = dataclasses.replace(
        LLAMA_8B,
        n_kv_heads=n_kv,
        n_sliding_layers=WINDOWS.get(kind, 0),
        sliding_window=4096 if kind in WINDOWS else None,
    )

    def of_heads(tokens):
        return costs.kv_cache_bytes(spec, tokens, texts), costs.flops_by_component(
            spec, 1, texts, past_tokens=tokens - 1, skip_masked=True
        )["pairs"]

    layers = 32 * texts * tokens
    if kind.startswith("MLA"):
        return (layers * 576 * 2,) * 2 + (layers * 32 * (2 * 576 + 2 * 512),)
    stored, flops = of_heads(tokens)
    if kind != "sparse":
        return stored, stored, flops
    read, flops = of_heads(min(tokens, 2048))
    keys = layers * 128 * 2
    return stored + keys, read + keys, flops + layers * 32 * 2 * 128


def cost_of(kind, tokens, texts, card):
    "What the figure computes for a kind of attention."
    weights = costs.weight_bytes(LLAMA_8B)
    stored, read, flops = cache_and_work(kind, tokens, texts)
    work = costs.Work(texts * weights + flops, weights + read)
    seconds = card.min_seconds(work)
    return {
        "said": KINDS[kind],
        "read": read,
        "total": weights + stored,
        "over": max(0, weights + stored - card.memory_bytes),
        "most": (card.memory_bytes - weights) // (stored // texts),
        "ms": pytest.approx(1000 * seconds),
        "rate": pytest.approx(texts / seconds),
        "slow": card.bottleneck(work) == "compute",
    }


def as_size(n):
    return (
        f"{n / 1e9:.1f} GB"
        if n < 99.95e9
        else f"{n / 1e9:.0f} GB"
        if n < 999.5e9
        else f"{n / 1e12:.1f} TB"
    )


def joined(rows):
    *names, last = [row["said"] for row in rows]
    return f"{', '.join(names)} and {last}" if names else last


def cost_sentence(rows, card):
    "What the figure says of rows of numbers."
    fit = sorted((row for row in rows if not row["over"]), key=lambda row: row["ms"])
    if not fit:
        over = min(row["over"] for row in rows)
        least = [row for row in rows if row["over"] == over]
        return (
            f"One {card.name} has room for none: with {joined(least)}, "
            f"{as_size(over)} are missing."
        )
    inside = [row for row in rows if not row["over"]]
    said = f"One {card.name} has "
    if len(fit) == 7:
        said += "room for all;"
    elif len(fit) < 4:
        said += f"room for {joined(inside)} only;"
    else:
        large = [row for row in rows if row["over"]]
        said += f"no room for {joined(large)}; with the others,"
    low, high = ([row for row in inside if row["ms"] == fit[i]["ms"]] for i in (0, -1))
    first, last = (f"{row['ms']:.1f} ms" for row in (fit[0], fit[-1]))
    said += f" a step takes {first}"
    if first != last:
        most = max(row["total"] for row in fit)
        big = [row for row in inside if row["total"] == most]
        more = [row for row in big if row in high]
        said += f" ({joined(low)}) to {last} ({joined(high)}"
        said += ")" if more else f", although {joined(big)} keeps more)"
    slow = [row for row in inside if row["slow"]]
    rest = [row for row in inside if not row["slow"]]
    if not slow:
        alone = costs.weight_bytes(LLAMA_8B) > 4 * high[0]["read"]
        return said + (
            " and mostly reads the weights." if alone else ", limited by reading."
        )
    if not rest:
        return said + ", limited by arithmetic."
    few, by, other = (
        (rest, "reading", "arithmetic")
        if len(slow) > len(rest)
        else (slow, "arithmetic", "reading")
    )
    return said + f", limited by {by} with {joined(few)}, by {other} with the others."


DRAWN = """figure => { const svg = figure.querySelector(".tf-stage svg");
  const all = name => [...svg.querySelectorAll(name)];
  const edge = svg.getBoundingClientRect();
  const of = (e, ...names) => names.map(name => +e.getAttribute(name));
  return {label: svg.getAttribute("aria-label"), high: svg.viewBox.baseVal.height,
    texts: all("text").map(e => [e.textContent, e.getAttribute("fill") || ""]),
    bars: all("rect").map(e => [e.getAttribute("fill").slice(14, -1),
      ...of(e, "fill-opacity", "x", "y", "width", "height")]),
    out: Math.max(...all("text").map(e => e.getBoundingClientRect()).map(
      box => Math.max(box.right - edge.right, edge.left - box.left))),
    paths: all("path").map(e => e.getAttribute("d"))}; }"""
LOOKS = [("gray", 1), ("blue", 1), ("blue", 0.3), ("red", 1)]


def assert_costs_shown(page, settings):
    "Compare all that the figure shows with what the package computes."
    live = figure(page, "variant-costs")
    card = CARDS[settings["card"]]
    room = card.memory_bytes
    shown, rows = live.evaluate("f => [f.tformer.settings, f.tformer.numbers]")
    assert shown == settings
    assert rows == [
        cost_of(kind, settings["tokens"], settings["texts"], card) for kind in KINDS
    ]
    drawn = live.evaluate(DRAWN)
    width = live.locator(".tf-stage svg").evaluate("e => e.viewBox.baseVal.width")
    texts = drawn["texts"]
    assert [text for text, _ in texts[:12]] == [
        "memory",
        "texts",
        "one step",
        "tokens/s",
        "needed",
        "at most",
        "at least",
        "at most",
        "weights",
        "cache that a step reads",
        "cache not read",
        "does not fit",
    ]
    assert texts[-1][0] == f"the card has {room / 1e9:.0f} GB"
    assert [tuple(bar[:2]) for bar in drawn["bars"][:4]] == LOOKS
    cells = iter(texts[12:-1])
    bars = iter(drawn["bars"][4:])
    unit = (width if width < 500 else width - 246 - 138) / 1.5 / room
    left = 0 if width < 500 else 138
    weights = costs.weight_bytes(LLAMA_8B)
    for kind, row in zip(KINDS, rows, strict=True):
        red = "var(--tf-live-red)" if row["over"] else ""
        purple = "var(--tf-live-purple)" if row["slow"] else ""
        assert next(cells) == [kind, ""]
        assert next(cells) == [as_size(row["total"]), red]
        assert next(cells) == [f"{row['most']:,}", ""]
        if row["over"]:
            assert next(cells) == [f"{as_size(row['over'])} too much", red]
        else:
            assert next(cells) == [f"{row['ms']:.1f} ms", purple]
            assert next(cells) == [f"{int(row['rate'] + 0.5):,}", ""]
        ends = [0, weights, weights + row["read"], row["total"]]
        ends = [min(end, room) for end in ends] + [min(row["total"], 1.5 * room)]
        for look, (begin, end) in zip(LOOKS, pairwise(ends), strict=True):
            if end > begin:
                color, opacity, x, _, wide, _ = next(bars)
                assert (color, opacity) == look
                assert x == pytest.approx(left + unit * begin)
                assert wide == pytest.approx(unit * (end - begin))
    assert next(cells, None) is next(bars, None) is None
    lines = [float(d[1:].split(",")[0]) for d in drawn["paths"] if "l" not in d]
    assert lines == [pytest.approx(left + unit * room)] * 7
    assert len(drawn["paths"]) - 7 == sum(row["total"] > 1.5 * room for row in rows)
    said = live.locator(".tf-sentence").text_content()
    assert said == drawn["label"] == cost_sentence(rows, card)
    assert drawn["out"] <= 0.5 and min(live.evaluate(SIZES)) >= 12
    return said


@pytest.fixture
def costs_page(chromium, tmp_path):
    "A telephone with the figure."
    with telephone(chromium, tmp_path, "variant-costs", what_kinds_cost()) as page:
        yield page


def test_kinds_cost_what_the_package_counts(costs_page):
    live = figure(costs_page, "variant-costs")
    data = what_kinds_cost()
    said = {assert_costs_shown(costs_page, data["start"])}
    draw = random.Random(28)
    chosen = [
        {
            "tokens": draw.choice(data["tokens"]),
            "card": draw.randrange(4),
            "texts": draw.choice(data["texts"]),
        }
        for _ in range(10)
    ]
    # arithmetic limits all, most, some; one fits, none; several are equal; one bar
    for tokens, texts, card in (
        (512, 256, 0),
        (256, 256, 1),
        (1024, 256, 1),
        (2048, 256, 1),
        (2048, 128, 0),
        (131_072, 256, 0),
        (32_768, 16, 0),
        (4096, 64, 2),
        (256, 1, 2),
    ):
        chosen.append({"tokens": tokens, "texts": texts, "card": card})
    for settings in chosen:
        live.evaluate("(f, s) => f.tformer.set(s)", settings)
        said.add(assert_costs_shown(costs_page, settings))
    assert costs_page.evaluate("document.documentElement.scrollWidth") <= 390
    for words in (
        "room for all; a",
        "no room for MHA; with",
        "MQA only; a step",
        "room for none",
        "although",
        "by arithmetic.",
        "by reading with",
        "limited by arithmetic with",
        "limited by reading.",
        "mostly reads",
    ):
        assert any(words in sentence for sentence in said), words
    costs_page.set_viewport_size({"width": 900, "height": 1000})
    costs_page.wait_for_function("""() => document.querySelector(".tf-stage svg")
        .viewBox.baseVal.width > 500""")
    for settings in (data["start"], *chosen[-4:]):
        live.evaluate("(f, s) => f.tformer.set(s)", settings)
        assert_costs_shown(costs_page, settings)
    assert live.evaluate(DRAWN)["high"] < 240


@torch.no_grad()
def test_kinds_keep_what_caches_of_layers_hold(costs_page):
    heads = dict(d_model=32, n_heads=8)
    layers = [[SelfAttention(**heads, n_kv_heads=n, causal=True)] for n in (8, 2, 1)]
    layers.append([LatentAttention(**heads, kv_rank=12, d_nope=4, d_rope=2)])
    # between two steps, a rolling cache holds a token less than its window
    window = SlidingWindowAttention(**heads, n_kv_heads=2, window=301)
    layers += [[window], [window, layers[1][0]]]
    layers.append(
        [
            SparseAttention(
                **heads, n_kv_heads=2, top_k=300, indexer=LightningIndexer(32, 2, 6)
            )
        ]
    )
    parts = kinds_of_parts(8, 4, 2, (12, 2), 300, (6, 2), 300)
    data = what_kinds_cost() | {"variants": [{"parts": p} for p in parts]}
    for tokens in (256, 512):
        rows = figure(costs_page, "variant-costs").evaluate(
            "(f, [data, s]) => f.tformer.definition.compute(data, s)",
            [data, {"tokens": tokens, "texts": 2, "card": 0}],
        )
        held = []
        for kinds in layers:
            held.append(0)
            for layer in kinds:
                cache = layer.new_cache(batch_size=2)
                for x in torch.randn(2, tokens, 32).split(256, 1):
                    layer(x, cache=cache)
                held[-1] += cache.nbytes // 2 * 8 // len(kinds)  # from float32
        assert [row["total"] - data["weights"] for row in rows] == held


def test_costs_can_be_changed_by_hand(costs_page):
    page = costs_page
    live = figure(page, "variant-costs")
    now = {"tokens": 65_536, "texts": 4, "card": 2}
    length = page.get_by_role("slider", name="length of each text")
    batch = page.get_by_role("slider", name="batch")

    def choose(name):
        page.locator(".tf-choices label", has_text=re.compile(f"^{name}$")).tap()

    def click_end():
        box = batch.bounding_box()
        page.mouse.click(box["x"] + box["width"] - 9, box["y"] + box["height"] / 2)

    for change, act in (
        ({"tokens": 131_072}, lambda: length.press("ArrowRight")),
        ({"tokens": 256}, lambda: length.press("Home")),
        ({"texts": 1}, lambda: batch.press("Home")),
        ({"card": 0}, lambda: choose("RTX 4090")),
        ({"card": 1}, lambda: page.keyboard.press("ArrowRight")),
        ({"texts": 256}, click_end),
        ({"card": 3}, lambda: choose("H200")),
    ):
        act()
        now.update(change)
        assert_costs_shown(page, now)
    assert length.get_attribute("aria-valuetext") == "256 tokens"
    assert batch.get_attribute("aria-valuetext") == "256 texts at once"
    batch.press("Home")
    assert batch.get_attribute("aria-valuetext") == "1 text"
    heights = page.locator("input[type=range], .tf-choices label").evaluate_all(
        "all => all.map(e => e.offsetHeight)"
    )
    assert len(heights) == 6 and min(heights) >= 44

    live.evaluate("f => f.tformer.set({tokens: 1024, texts: 256, card: 1})")
    for look in ("light", "dark", "forced"):
        page.emulate_media(forced_colors="active" if look == "forced" else "none")
        page.evaluate("t => { document.documentElement.dataset.theme = t; }", look)
        ground, inks, bars = live.evaluate(INKS)
        assert (plot.luminance(rgb(ground)) < 0.5) == (look == "dark")
        assert min(plot.contrast(rgb(ink), rgb(ground)) for ink in inks) >= 4.5
        assert min(plot.contrast(rgb(bar), rgb(ground)) for bar in bars) >= 3
    page.emulate_media(media="print", forced_colors="none")
    assert live.locator(".tf-still").is_visible()
    assert not live.locator(".tf-stage").is_visible()
