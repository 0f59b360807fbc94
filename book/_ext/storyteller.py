"""Let the storyteller of the package run in pages of the book.

A page shows it by

    ```{storyteller} heads
    :text: Once there was
    :head: 1.2
    ```

where the kind is ``story``, ``heads`` or ``sampling``; ``storyteller.js`` says what
each shows. What the page holds until the model is loaded, on paper and without
scripts is drawn here, by the same model in PyTorch.

The model is the bundled one, with weights of one byte as ``Int8Linear`` keeps them. It
comes as a script, because a page that is opened from a file may load nothing else.
"""

from __future__ import annotations

import base64
import copy
import html
import json
from functools import lru_cache
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

NAME = "stories"
FOLDER = "storyteller"
FILES = ("engine.js", "storyteller.js", "storyteller.css")
KINDS = {
    "story": "A language model that runs in this page",
    "heads": "The heads of the storyteller, which can be switched off",
    "sampling": "What the settings of sampling do to the storyteller's next token",
}
TRAINED = "<!-- trained -->"
QUALITY = "<!-- storyteller -->"
NUMBERS = "d_model n_layers n_heads n_kv_heads vocab_size max_len rope_theta eps"
BARS = {"story": 8, "heads": 8, "sampling": 12}  # likeliest tokens that are shown
KNOWN = "It knows the words of its stories, such as girl, boy, kite, ball, park."
BUTTONS = "Write", "One token", "Take one back"
SHADES = 4  # of a picture of a head
# what stands over the parts: on the screen, and (tf-paper) where nothing can be pressed
LABELS = {
    "text": 'The text in <a href="{root}nbs/02_bytes_and_bpe.html">tokens</a>.'
    '<span class="tf-runs"> Press one to see what the head looks at from there.</span>'
    '<span class="tf-paper"> The framed one looks back: the darker a token, the more of'
    " its weight the framed head has there.</span>",
    "maps": "Each square is a "
    '<a href="{root}nbs/07_multi_head_attention.html">head</a>: a row'
    " is the token that looks, a column one that is looked at."
    '<span class="tf-runs"> The line marks the token that you pressed.</span>',
    "texts": "Three texts, each with its own random numbers",
}
NEXT = {
    "story": 'What may come next.<span class="tf-runs"> Press one to choose it.</span>',
    "heads": "The next token after “{last}”.",
    "sampling": "The next token after “{last}”.",
}


# ---- the model as a script


def matrices_in_order(model):
    "Yield the modules that hold the weights of a `Llama`, in the order of the file."
    yield model.embed
    for block in model.blocks:
        attention, feed_forward = block.attention, block.feed_forward
        yield attention.norm
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield getattr(attention.sublayer, name)
        yield feed_forward.norm
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield getattr(feed_forward.sublayer, name)
    yield model.norm


def pack(weight) -> bytes:
    "Return a matrix as scales and bytes, or a vector as float32, little-endian."
    from tformer.nn.quantized import Int8Linear

    weight = weight.detach().float()
    if weight.ndim == 1:
        return weight.numpy().astype("<f4").tobytes()
    layer = Int8Linear(weight)
    scale = layer.scale.numpy().astype("<f4").tobytes()
    return scale + layer.int8_weight.numpy().tobytes()


def config_of(bundle) -> dict:
    "Return what the engine has to know besides the weights."
    from tformer.bundle import ENDOFTEXT
    from tformer.text.tokenizer_files import vocabulary_to_dict

    model, tokenizer = bundle.model, bundle.tokenizer
    words = vocabulary_to_dict(tokenizer.vocab)
    # what JavaScript calls white space is another set than that of Unicode
    pattern = words["pattern"].replace(r"\s", r"\p{White_Space}")
    return {
        **{name: getattr(model.config, name) for name in NUMBERS.split()},
        "d_ff": model.blocks[0].feed_forward.sublayer.up_proj.weight.shape[0],
        "end": tokenizer.token_to_id(ENDOFTEXT),
        "merges": words["merges"],
        "pattern": pattern.replace(r"\S", r"\P{White_Space}"),
    }


@lru_cache(maxsize=1)
def size_of_script() -> str:
    "How much a reader has to load, in megabytes."
    return f"{len(script_of(loaded()[0])) / 1e6:.1f} MB"


def script_of(bundle) -> str:
    "Return the script that hands a bundled model to ``storyteller.js``."
    weights = b"".join(pack(m.weight) for m in matrices_in_order(bundle.model))
    text = base64.b64encode(weights).decode()
    config = json.dumps(config_of(bundle), separators=(",", ":"))
    return f'tformerStoryteller.receive({config},"{text}");\n'


def as_in_the_page(bundle):
    "Return the model with the weights that its bytes stand for, in float32."
    from tformer.nn.quantized import Int8Linear

    model = copy.deepcopy(bundle.model).float().eval()
    for module in matrices_in_order(model):
        if module.weight.ndim == 2:
            module.weight.data.copy_(Int8Linear(module.weight).dequantize())
    return model


@lru_cache(maxsize=1)
def loaded():
    "The bundled model, its tokenizer, and the model as it is in the page."
    import tformer

    bundle = tformer.load(NAME)
    return bundle, as_in_the_page(bundle)


# ---- the still


def attention_weights(model, ids):
    "Return the weights of all heads, (layers * heads, tokens, tokens)."
    import torch

    x, weights = model.embed(ids), []
    for block in model.blocks:
        attention = block.attention
        out, w = attention.sublayer(attention.norm(x), need_weights=True)
        weights.append(w[0])
        x = block.feed_forward(x + out)
    return torch.cat(weights)


def read(text: str, bars: int = 8):
    """Return what the model makes of a text: pieces, weights of all heads, likeliest.

    The last are pairs of a piece and its probability, after the last token.
    """
    import torch

    bundle, model = loaded()
    tokenizer = bundle.tokenizer
    ids = [config_of(bundle)["end"], *tokenizer.encode(text)]
    with torch.no_grad():
        row = torch.tensor([ids])
        weights = attention_weights(model, row)
        p, likeliest = model(row)[0, -1].softmax(-1).topk(bars)
    pieces = [tokenizer.decode([i]) for i in ids]
    names = [
        "the end" if i == ids[0] else tokenizer.decode([i]).strip() or "a space"
        for i in likeliest.tolist()
    ]
    return pieces, weights, list(zip(names, p.tolist(), strict=True))


def percent(p: float) -> str:
    "A probability in percent, as ``storyteller.js`` says it."
    if 0.9995 < p < 1:
        return "> 99.9 %"
    return "< 0.1 %" if 0 < p < 0.0005 else f"{100 * p:.1f} %"


def draw_head(weights) -> str:
    "Return the picture of a head: a row for each token, dark where it looks."
    levels = (weights.sqrt() * SHADES).round().int().tolist()
    size = 8 * -(-(len(levels) + 1) // 8)
    paths = ""
    for level in range(1, SHADES + 1):
        squares = "".join(
            f"M{x} {y}h1v1h-1z"
            for y, row in enumerate(levels)
            for x, value in enumerate(row[: y + 1])
            if value == level
        )
        if squares:
            ink = f"rgba(var(--tf-ink), {level / SHADES})"
            paths += f'<path d="{squares}" style="fill: {ink}"/>'
    top = 100 * (len(levels) - 1) / size
    return (
        f'<svg viewBox="0 0 {size} {size}" aria-hidden="true">{paths}</svg>'
        f'<b style="top: {top:.1f}%"></b>'
    )


def draw_tokens(pieces, weights) -> str:
    spans = [
        f'<span class="tf-given" style="--tf-weight: {weight:.3f}">'
        f"{html.escape(piece)}</span>"
        for piece, weight in zip(pieces[1:], weights[1:], strict=True)
    ]
    spans[-1] = spans[-1].replace("tf-given", "tf-given tf-chosen", 1)
    return f'<div class="tf-tokens">{"".join(spans)}</div>'


def draw_heads(weights, n_heads: int, chosen: int) -> str:
    cells = "<i></i>" + "".join(
        f"<i>{'head ' * (i == 0)}{i + 1}</i>" for i in range(n_heads)
    )
    for i, head in enumerate(weights):
        if i % n_heads == 0:
            cells += f"<i>{'layer ' * (i == 0)}{i // n_heads + 1}</i>"
        mark = ' class="tf-chosen"' * (i == chosen)
        cells += f"<span{mark}>{draw_head(head)}</span>"
    style = f"--tf-columns: {n_heads}"
    return f'<div class="tf-heads" style="{style}" aria-hidden="true">{cells}</div>'


def draw_next(likeliest) -> str:
    return '<ol class="tf-next">{}</ol>'.format(
        "".join(
            f"<li><div><b>{html.escape(name)}</b>"
            f'<span><i style="width: {100 * p:.1f}%"></i></span>'
            f"<em>{percent(p)}</em></div></li>"
            for name, p in likeliest
        )
    )


def say_seen(pieces, likeliest, weights=None, head=0, n_heads=1) -> str:
    "What a still shows, in one or two sentences."
    last = html.escape(pieces[-1].strip())
    name, p = likeliest[0]
    said = (
        f"After “{last}”, the likeliest next token is “{html.escape(name)}” with"
        f" {percent(p)}."
    )
    if weights is not None:
        most = int(weights.argmax())
        where = html.escape(pieces[most].strip())
        where = "the start of the text" if most == 0 else f"“{where}”"
        layer, i = divmod(head, n_heads)
        said += (
            f" From “{last}”, head {i + 1} of layer {layer + 1} puts"
            f" {100 * weights[most]:.0f} % of its weight on {where}."
        )
    return f'<p class="tf-sentence">{said}</p>'


def room(tag: str, kind: str, inside: str) -> str:
    "What is there only while the model runs: on the screen its room is kept."
    return f'<{tag} class="{kind} tf-room">{inside}</{tag}>'


def idle(*words: str) -> str:
    return "".join(f"<button disabled>{html.escape(word)}</button>" for word in words)


def sliders(*names: str, start: str = "") -> str:
    rows = "".join(
        f'<span class="tf-setting"><span>{name}</span><output>all tokens</output>'
        '<input type="range" disabled></span>'
        for name in names
    )
    return room("div", "tf-settings", rows + start)


def draw_still(
    kind: str, text: str, head: int, beginnings: tuple = (), root: str = ""
) -> str:
    "Return what is shown before the model is loaded, as high as what comes then."
    pieces, weights, likeliest = read(text, BARS[kind])
    n_heads = loaded()[1].config.n_heads
    start = (
        '<button type="button" class="tf-start-model" disabled>Run the model in this'
        f" page ({size_of_script()})</button>"
    )

    def label(key):
        said = LABELS[key].format(root=root)
        return f'<p class="tf-label" data-label="{key}">{said}</p>'

    after = NEXT[kind].format(last=html.escape(pieces[-1].strip()))
    first = f'<div><p class="tf-label">{after}</p>{draw_next(likeliest)}</div>'
    if kind == "sampling":
        written = '<p class="tf-written"></p>' * 3
        return (
            f'<p class="tf-written tf-given">{html.escape(text)} …</p>'
            + sliders("temperature", "top-k", "top-p", "min-p", start=start)
            + f'<div class="tf-columns tf-even">{first}<div class="tf-room">'
            + f"{label('texts')}{written}{idle('Other random numbers')}</div></div>"
            + say_seen(pieces, likeliest)
        )
    seen = weights[head, -1]
    hint = f"Switch the marked head off and watch “{html.escape(likeliest[0][0])}”."
    top, start = (start, "") if kind == "story" else ("", start)
    side = (
        f'<div class="tf-side">{label("maps")}{draw_heads(weights, n_heads, head)}'
        + room("p", "tf-label tf-hint", hint)
        + room("div", "tf-bar", idle("Switch off head 1 of layer 1") + start)
        + "</div>"
    )
    said = say_seen(pieces, likeliest, seen, head, n_heads)
    tokens = draw_tokens(pieces, seen.tolist())
    if kind == "heads":
        return f'{tokens}<div class="tf-columns">{first}{side}{said}</div>'
    field = '<input type="text" disabled>'
    return (
        room("div", "tf-bar", field + idle(*BUTTONS) + top)
        + room("p", "tf-label tf-notice", KNOWN)
        + room("div", "tf-bar tf-chips", idle(*beginnings, "First text"))
        + f'{label("text")}{tokens}<div class="tf-columns">{first}{side}{said}'
        + f"{sliders('temperature', 'top-k')}</div>"
    )


# ---- what its card says


def card(root: Path) -> dict:
    path = Path(root) / "tformer" / "weights" / NAME / "card.json"
    return json.loads(path.read_text(encoding="utf-8"))


def say_training(root: Path) -> str:
    "How long its training took."
    return f"{card(root)['seconds'] / 60:.1f} minutes".replace(".0 ", " ")


def say_quality(root: Path) -> str:
    "How large it is, and how good."
    said = card(root)
    right, flawless = (f"{100 * said[key]:.0f} %" for key in ("right", "flawless"))
    return (
        f"{said['parameters']:,} weights of one byte each, and no server. A test"
        " compares its tokens, logits and attention with those of PyTorch. Before its"
        f" weights were rounded to bytes it told {said['samples']} stories that it"
        f" began itself: {right} of their sentences were right, and {flawless} of the"
        " stories had no mistake. What others begin may be stranger to it. About half"
        " of the faults are about *who*: a friend who was never introduced, or a girl"
        " who is her own friend. [Trained models](../nbs/A8_trained.ipynb) counts them,"
        " and measures what its heads do."
    )


def on_source_read(app, docname, content):
    for mark, say in ((TRAINED, say_training), (QUALITY, say_quality)):
        if mark in content[0]:
            content[0] = content[0].replace(mark, say(Path(app.srcdir)))


# ---- the directive, and what a page with it loads


def head_index(argument: str) -> int:
    "Return the index of a head that is given as layer.head, counted from 1."
    config = loaded()[1].config
    layer, head = (int(part) for part in argument.split("."))
    if not (1 <= layer <= config.n_layers and 1 <= head <= config.n_heads):
        raise ValueError(
            f"there is no head {head} of layer {layer}: the model has"
            f" {config.n_layers} layers of {config.n_heads} heads"
        )
    return (layer - 1) * config.n_heads + head - 1


def figure(kind: str, text: str, head: int = 0, beginnings: str = "", root: str = ""):
    "Return the HTML of a figure before its caption, and behind it."
    data = {
        "storyteller": kind,
        "text": text,
        "head": head,
        "root": root,
        "beginnings": json.dumps([b for b in beginnings.split(" | ") if b]),
    }
    still = draw_still(kind, text, head, json.loads(data["beginnings"]), root)
    attributes = "".join(
        f' data-{name}="{html.escape(str(value))}"' for name, value in data.items()
    )
    return (
        f'<figure class="tf-storyteller"{attributes}>'
        f'<div class="tf-stage" role="group" aria-label="{KINDS[kind]}" hidden></div>'
        f'<div class="tf-still">{still}</div><figcaption>',
        "</figcaption></figure>",
    )


class Storyteller(SphinxDirective):
    "``{storyteller} kind``: a figure in which the model runs. Its body is the caption."

    required_arguments = 1
    has_content = True
    option_spec = {
        "text": directives.unchanged_required,
        "head": head_index,
        "beginnings": directives.unchanged,
    }

    def run(self):
        kind = directives.choice(self.arguments[0], [*KINDS])
        text, head = self.options["text"], self.options.get("head", 0)
        beginnings = self.options.get("beginnings", "")
        root = "../" * self.env.docname.count("/")
        start, end = figure(kind, text, head, beginnings, root)
        caption = nodes.paragraph()
        self.state.nested_parse(self.content, self.content_offset, caption)
        return [
            nodes.raw("", start, format="html"),
            *caption.children,
            nodes.raw("", end, format="html"),
        ]


def add_files(app, page, template, context, doctree):
    "Load the scripts on pages with a figure; ``lean_pages`` comes later (900)."
    if 'data-storyteller="' not in (context.get("body") or ""):
        return
    for name in FILES:
        if name.endswith(".css"):
            app.add_css_file(f"{FOLDER}/{name}")
        else:
            app.add_js_file(f"{FOLDER}/{name}", loading_method="defer")


def write_model(app, exception):
    "Write the script with the weights beside the others."
    if exception is None and app.builder.format == "html":
        out = Path(app.outdir) / "_static" / FOLDER
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{NAME}.js").write_text(script_of(loaded()[0]), encoding="utf-8")


def setup(app):
    app.add_directive("storyteller", Storyteller)
    app.connect("source-read", on_source_read)
    app.connect("html-page-context", add_files, priority=600)
    app.connect("build-finished", write_model)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
