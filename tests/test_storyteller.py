"""The storyteller in a page: its numbers are the package's, and it can be used."""

import random

import pytest
import torch

import storyteller  # book/_ext, where the conftest of the root looks
from conftest import ROOT
from tformer.bundle import tell
from tformer.corpora import stories
from tformer.inference.generation import generate
from tformer.inference.logits import (
    apply_min_p,
    apply_temperature,
    apply_top_k,
    apply_top_p,
)

STATIC = ROOT / "book" / "_static" / "storyteller"
KITE = (
    "Once there was a kind girl named Mia. One day, she took a red kite to the park."
    " The wind took the"
)
PLACE = "Once there was a happy boy named Ben. One day,"
COPY_HEAD = 1  # head 2 of layer 1
PAGE = """<!DOCTYPE html><html lang="en" data-theme="light"><head><meta charset="utf-8">
<title>t</title><style>body {{ max-width: 750px; margin: 0 auto }}</style>
<link rel="stylesheet" href="storyteller.css"></head>
<body>{}<script defer src="engine.js"></script>
<script defer src="storyteller.js"></script></body></html>"""


@pytest.fixture(scope="module")
def bundle():
    return storyteller.loaded()[0]


@pytest.fixture(scope="module")
def model():
    "The model with the weights that the page has."
    return storyteller.loaded()[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory, bundle):
    "A folder with a page for each kind of figure."
    out = tmp_path_factory.mktemp("storyteller")
    for name in storyteller.FILES:
        (out / name).write_bytes((STATIC / name).read_bytes())
    (out / "stories.js").write_text(storyteller.script_of(bundle), encoding="utf-8")
    for kind in storyteller.KINDS:
        start, end = storyteller.figure(kind, KITE, COPY_HEAD, "Tom | Ben was sad.")
        page = PAGE.format(f"{start}A caption.{end}")
        (out / f"{kind}.html").write_text(page, encoding="utf-8")
    return out


@pytest.fixture
def opened(open_page, site):
    "Open the page of a kind, and wait until its model runs."

    def visit(kind, **options):
        page = open_page(site / f"{kind}.html", **options)
        page.locator(".tf-start-model").evaluate("button => button.click()")
        page.wait_for_selector(".tf-awake")
        return page

    return visit


STATE = "document.querySelector('figure').storyteller"


def sentence(page):
    return page.locator(".tf-sentence").text_content().replace("\u00a0", " ")


def written(page):
    return page.locator(".tf-stage .tf-tokens").text_content()


# ---- numbers


def texts():
    "Stories, and texts that nobody would write."
    rng = random.Random(0)
    letters = [*"aé漢🙂 \t\n'\"!.,07-_", "\uff17", "\u00a0", "\u2028", "\u0085", "'ll"]
    letters += ["\ufeff", "\x1c", "s"]
    odd = ["".join(rng.choices(letters, k=rng.randint(1, 30))) for _ in range(100)]
    corpus = stories.story_corpus(60_000, seed=3).split("\n\n")
    return [*corpus[:96], *odd, "", "<|endoftext|>", "don't we'll THEY'VE", "x" * 300]


def test_tokens_are_those_of_the_package(opened, bundle):
    page = opened("story")
    some = texts()
    assert len(some) >= 200
    found = page.evaluate(
        f"texts => texts.map(text => {STATE}.text.model.tokenizer.encode(text))", some
    )
    assert found == [
        bundle.tokenizer.encode(text, disallowed_special=()) for text in some
    ]
    told = page.evaluate(
        f"rows => rows.map(ids => {STATE}.text.model.tokenizer.decode(ids))", found
    )
    assert told == [text.removeprefix("\ufeff") for text in some]


# what the model makes of texts: logits and the weights of all heads, token by token
READ = f"""([texts, off]) => {{
    const {{text}} = {STATE};
    off.forEach((head) => text.model.off.add(head));
    const all = texts.map((words) => {{
        text.crop(0);
        text.read(words);
        return [[...text.ids], text.logits.map((row) => [...row]),
                text.seen.map((heads) => heads.map((row) => [...row]))];
    }});
    off.forEach((head) => text.model.off.delete(head));
    return all;
}}"""
READING = [KITE, PLACE, "zebra quantum 42! 🙂", ""]


def worst_difference(page, model, off=()):
    "The largest differences of logits and of weights, on some texts."
    logits, weights = 0.0, 0.0
    for ids, rows, seen in page.evaluate(READ, [READING, [*off]]):
        row = torch.tensor([ids])
        with torch.no_grad():
            expected = model(row)[0]
            heads = storyteller.attention_weights(model, row)
        assert len(rows) == len(ids)
        logits = max(logits, (torch.tensor(rows) - expected).abs().max().item())
        for t, found in enumerate(seen):
            difference = torch.tensor(found) - heads[:, t, : t + 1]
            weights = max(weights, difference.abs().max().item())
    return logits, weights


def test_logits_and_weights_are_those_of_the_package(opened, model):
    logits, weights = worst_difference(opened("story"), model)
    assert logits < 1e-4 and weights < 1e-5, (logits, weights)


def without_head(model, head):
    "A copy in which a head gives nothing."
    changed = storyteller.copy.deepcopy(model)
    n_heads, width = model.config.n_heads, model.config.d_model // model.config.n_heads
    layer, i = divmod(head, n_heads)
    o_proj = changed.blocks[layer].attention.sublayer.o_proj
    o_proj.weight.data[:, i * width : (i + 1) * width] = 0
    return changed


@pytest.mark.parametrize("head", [COPY_HEAD, 10])
def test_a_head_that_is_off_gives_nothing(opened, model, head):
    page = opened("story")
    logits, _ = worst_difference(page, without_head(model, head), [head])
    assert logits < 1e-4
    assert worst_difference(page, model, [head])[0] > 0.1


def test_a_greedy_text_is_that_of_the_package(opened, bundle, model):
    page = opened("story")
    ids = page.evaluate(
        f"""words => {{
        const {{text}} = {STATE};
        text.read(words);
        while (!text.isFull()) text.feed(tformerEngine.draw(tformerEngine.distribution(
            text.logits.at(-1), {{temperature: 0}}), 0.5));
        return text.ids; }}""",
        "Once there was",
    )
    end = storyteller.config_of(bundle)["end"]
    prompt = [end, *bundle.tokenizer.encode("Once there was")]
    (expected,) = generate(
        model,
        [torch.tensor(prompt)],
        max_new_tokens=model.config.max_len - len(prompt),
        stop_token_ids=[end],
    )
    assert ids[-1] == end and len(ids) > 40
    assert [i for i in ids[len(prompt) :] if i != end] == [
        i for i in expected.ids if i != end
    ]


SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"topK": 1},
    {"topK": 12},
    {"topP": 0.9},
    {"topP": 0.3},
    {"minP": 0.05},
    {"temperature": 1.5, "topK": 20, "topP": 0.95, "minP": 0.02},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_leave_what_the_filters_of_the_package_leave(opened, settings):
    logits = 3 * torch.randn(3, 632, generator=torch.Generator().manual_seed(1))
    logits[2, :4] = 20.0  # a tie
    found = opened("story").evaluate(
        "([rows, s]) => rows.map(row => [...tformerEngine.distribution(row, s)])",
        [logits.tolist(), settings],
    )
    z = apply_temperature(logits.double(), settings.get("temperature", 1.0))
    if "topK" in settings:
        z = apply_top_k(z, settings["topK"])
    if "topP" in settings:
        z = apply_top_p(z, settings["topP"])
    if "minP" in settings:
        z = apply_min_p(z, settings["minP"])
    expected = z.softmax(-1)
    found = torch.tensor(found, dtype=torch.float64)
    assert torch.equal(found == 0, expected == 0)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_a_temperature_of_zero_takes_the_first_of_the_likeliest(opened):
    found = opened("story").evaluate(
        "() => [...tformerEngine.distribution([1, 4, 4, 2], {temperature: 0})]"
    )
    assert found == [0, 1, 0, 0]


def test_a_number_falls_into_the_piece_of_its_token(opened):
    p = [0.0, 0.25, 0.0, 0.5, 0.25, 0.0]
    numbers = [0.0, 0.24, 0.25, 0.74, 0.75, 0.99, 1.0]
    found = opened("story").evaluate(
        "([p, us]) => us.map(u => tformerEngine.draw(p, u))", [p, numbers]
    )
    assert found == [1, 1, 3, 3, 4, 4, 4]


# ---- what a reader does


def test_a_head_is_switched_off_and_on(opened):
    page = opened("story")
    assert "likeliest next token is “kite” with 99.9 %" in sentence(page)
    assert "Head 2 of layer 1 has 97 % of its weight on “kite”" in sentence(page)
    page.get_by_role("button", name="Switch off head 2 of layer 1").click()
    assert "next token is “ball”" in sentence(page)
    assert sentence(page).endswith("Switched off: head 2 of layer 1.")
    page.get_by_role("radio", name="head 3 of layer 1").click()
    page.get_by_role("button", name="Switch off head 3 of layer 1").click()
    assert "head 2 of layer 1, head 3 of layer 1" in sentence(page)
    page.get_by_role("button", name="All on").click()
    assert "“kite” with 99.9 %" in sentence(page)
    assert page.get_by_role("button", name="All on").count() == 0


def test_a_text_is_typed_written_and_taken_back(opened):
    page = opened("story")
    field = page.get_by_role("textbox", name="the beginning of a story")
    assert field.input_value() == KITE == written(page)
    field.fill("Tom saw a zebra.")
    assert written(page) == "Tom saw a zebra."
    n = page.locator(".tf-stage .tf-tokens span").count()
    page.get_by_role("button", name="One token").click()
    assert page.locator(".tf-stage .tf-tokens span").count() == n + 1
    page.get_by_role("button", name="Take one back").click()
    assert written(page) == "Tom saw a zebra."
    page.get_by_role("button", name="Ben was sad.").click()
    assert written(page) == field.input_value() == "Ben was sad."
    field.fill("Once there was")
    page.get_by_role("button", name="Write").click()
    page.wait_for_function(f"{STATE}.text.ids.length > 20")
    page.get_by_role("button", name="Stop").click()
    said = written(page)
    page.wait_for_timeout(300)
    assert written(page) == said and said.startswith("Once there was")
    assert page.get_by_role("button", name="Write").count() == 1


def test_a_story_ends(opened):
    page = opened("story")
    page.evaluate(f"{STATE}.settings.temperature = 0")
    page.get_by_role("textbox").fill("Once there was")
    page.get_by_role("button", name="Write").click()
    page.wait_for_function(f"{STATE}.text.isFull()")
    page.wait_for_selector("button:text-is('Write')")
    assert written(page).endswith(" ∎")
    assert sentence(page).startswith("The story ends here.")
    page.get_by_role("button", name="One token").click()  # which does nothing
    assert written(page).endswith(" ∎")


def test_an_empty_text_and_one_that_is_too_long(opened):
    page = opened("story")
    page.get_by_role("textbox").fill("")
    assert written(page) == "" and sentence(page).startswith("The text is empty.")
    page.get_by_role("textbox").fill("漢" * 200)  # three tokens each
    assert page.evaluate(f"{STATE}.text.ids.length") == 160
    page.get_by_role("button", name="Write").click()
    page.wait_for_function(f"{STATE}.text.isFull()")
    assert page.evaluate(f"{STATE}.text.ids.length") <= 256


def test_a_token_is_chosen_in_place_of_the_likeliest(opened):
    page = opened("story")
    rows = page.locator(".tf-stage .tf-next button")
    word = rows.nth(2).locator("b").text_content()
    rows.nth(2).click()
    assert written(page) == f"{KITE} {word}"
    tokens = page.locator(".tf-stage .tf-tokens span")
    tokens.nth(3).click()  # "Once there was a"
    page.locator(".tf-stage .tf-next button").first.click()
    assert written(page).startswith("Once there was a ") and tokens.count() == 5


def test_the_keyboard_moves_through_tokens_and_heads(opened):
    page = opened("story")
    page.locator(".tf-stage .tf-tokens [aria-checked=true]").focus()
    page.keyboard.press("ArrowLeft")
    assert sentence(page).startswith("After “took”")
    page.keyboard.press("Home")
    assert sentence(page).startswith("After “Once”")
    assert page.evaluate("document.activeElement.textContent") == "Once"
    page.locator(".tf-stage .tf-heads [aria-checked=true]").focus()
    for key, name in (
        ("ArrowDown", "Head 2 of layer 2"),
        ("ArrowRight", "Head 3 of layer 2"),
        ("End", "Head 4 of layer 4"),
        ("ArrowUp", "Head 4 of layer 3"),
    ):
        page.keyboard.press(key)
        assert name in sentence(page)
    # one stop for the tab key in each group
    for group in ("tokens", "heads"):
        stops = page.locator(f".tf-stage .tf-{group} [role=radio][tabindex='0']")
        assert stops.count() == 1


def test_pictures_of_heads_show_their_weights(opened):
    page = opened("story")
    dark = page.evaluate(
        f"""() => {{
        const canvas = document.querySelectorAll(".tf-stage canvas")[{COPY_HEAD}];
        const {{seen}} = {STATE}.text;
        return seen.map((row, t) => row[{COPY_HEAD}].findIndex((w, j) => w > 0.5 &&
            canvas.getContext("2d").getImageData(j, t, 1, 1).data[3] < 150)); }}"""
    )
    assert {*dark} == {-1}  # what has more than half of the weight is dark
    kite = page.locator(".tf-stage .tf-tokens span:text-is('kite')")
    weight = kite.evaluate("span => span.style.getPropertyValue('--tf-weight')")
    assert float(weight) == pytest.approx(0.974, abs=0.01)


def test_what_is_seen_is_spoken_once_it_rests(opened):
    page = opened("story")
    spoken = page.locator(".tf-stage [aria-live=polite]")
    assert spoken.text_content() == ""
    page.get_by_role("button", name="Ben was sad.").click()
    page.wait_for_function(
        "document.querySelector('.tf-stage [aria-live=polite]').textContent"
    )
    assert spoken.text_content() == page.locator(".tf-sentence").text_content()


def test_settings_cut_tokens_and_change_three_texts(opened):
    page = opened("sampling")
    assert sentence(page).startswith("632 tokens are left")
    page.get_by_role("slider", name="top-k").focus()
    page.keyboard.press("Home")
    assert sentence(page) == "One token is left."
    assert page.locator(".tf-next .tf-cut").count() == 11
    page.wait_for_function(
        "new Set([...document.querySelectorAll('.tf-columns .tf-written')].map("
        "p => p.textContent)).size === 1"
    )
    texts = page.locator(".tf-columns .tf-written").all_text_contents()
    assert len(texts) == 3 and texts[0].startswith("… kite")
    page.keyboard.press("End")
    page.wait_for_function(
        "new Set([...document.querySelectorAll('.tf-columns .tf-written')].map("
        "p => p.textContent)).size > 1"
    )
    before = page.locator(".tf-columns .tf-written").all_text_contents()
    page.get_by_role("button", name="Other random numbers").click()
    page.wait_for_function(
        "before => before !== "
        "document.querySelector('.tf-columns .tf-written').textContent",
        arg=before[0],
    )


def test_the_lesson_on_heads_asks_about_one_text(opened):
    page = opened("heads")
    page.get_by_role("button", name="Switch off head 2 of layer 1").click()
    assert "“ball”" in sentence(page)
    assert page.get_by_role("textbox").count() == 0


def test_the_first_page_says_what_goes_wrong(bundle):
    "Many mistakes are about who: somebody unknown, or the same child twice."
    problems = [
        problem
        for story in tell(bundle, 60, seed=1)
        for _, found in stories.grade_sentences(story)
        for problem in found
    ]
    who = [p for p in problems if "never introduced" in p or "comes in twice" in p]
    assert len(problems) > 10 and len(who) > len(problems) / 3, problems
    said = storyteller.say_quality(ROOT)
    assert "200 stories" in said and "95 % of their sentences" in said
    assert storyteller.say_training(ROOT) == "4.4 minutes"


# ---- where it cannot run, and how it looks


@pytest.mark.parametrize("kind", storyteller.KINDS)
@pytest.mark.parametrize("width, scheme", [(390, "light"), (1280, "dark")])
def test_no_figure_is_wider_than_its_page(opened, kind, width, scheme):
    page = opened(kind, width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    inner = """() => [...document.querySelectorAll(".tf-stage *")].filter(
        (e) => e.getBoundingClientRect().right > innerWidth).length"""
    assert page.evaluate(inner) == 0


def test_without_scripts_and_on_paper_the_still_is_shown(open_page, opened, site):
    page = open_page(site / "story.html", java_script_enabled=False)
    still = page.locator(".tf-still")
    assert still.is_visible() and not page.locator(".tf-stage").is_visible()
    assert not page.get_by_role("button").is_visible()
    bars = still.locator(".tf-next em").all_text_contents()
    page = opened("story")
    assert not page.locator(".tf-still").is_visible()
    assert (
        page.locator(".tf-stage .tf-next em")
        .first.text_content()
        .replace("\u00a0", " ")
        == (bars[0])
    )
    page.emulate_media(media="print")
    assert page.locator(".tf-still").is_visible()
    assert not page.locator(".tf-stage").is_visible()


def test_the_model_is_asked_for_once_and_only_near_the_window(chromium, site):
    page = chromium.new_page()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "story.html").as_uri())
    page.wait_for_selector(".tf-awake")
    page.locator(".tf-start-model").evaluate("button => button.click()")
    models = [url for url in asked if url.endswith("stories.js")]
    assert len(models) == 1 and all(url.startswith("file:") for url in asked)
    far = site / "far.html"
    text = (site / "story.html").read_text(encoding="utf-8")
    far.write_text(
        text.replace("<figure", '<div style="height: 9000px"></div><figure', 1),
        encoding="utf-8",
    )
    asked.clear()
    page.goto(far.as_uri())
    page.wait_for_timeout(1000)
    assert not [url for url in asked if url.endswith("stories.js")]
    page.locator("figure").scroll_into_view_if_needed()
    page.wait_for_selector(".tf-awake")
    page.close()


def test_weights_that_do_not_fit_are_told(opened):
    page = opened("story")
    said = page.evaluate(
        f"""() => {{ try {{
            tformerEngine.load({STATE}.text.model.config, new Uint8Array(1e6));
        }} catch (error) {{ return error.message; }} }}"""
    )
    assert "bytes too many" in said


@pytest.mark.parametrize("head", ["0.1", "5.1", "1.5", "1", "a.b", "1.2.3"])
def test_a_head_that_is_not_there_is_refused(head):
    with pytest.raises(ValueError):
        storyteller.head_index(head)
    assert storyteller.head_index("1.2") == COPY_HEAD
    assert storyteller.head_index("4.4") == 15
