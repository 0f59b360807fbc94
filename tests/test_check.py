"""The checks: silent on healthy models, and each mistake named."""

import contextlib
import copy
import functools
import os
import pickle
import random
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from conftest import ROOT, load_experiment
from helpers import by_day
from tformer import check
from tformer.check.adapter import extract_logits, find_modules, preserve_state
from tformer.check.causality import (
    diagnose_leak,
    format_influence_map,
    long_text_len,
    single_token_variants,
)
from tformer.check.report import max_difference
from tformer.check.trial import CheckRun
from tformer.models.llama import Llama, LlamaConfig
from tformer.models.mini_gpt import MiniGPT, load_record
from tformer.nn.attention import merge_heads, split_heads
from tformer.nn.attention_backends import repeat_kv
from tformer.nn.embedding import Embedding, LearnedPositionEmbedding
from tformer.nn.feed_forward import FeedForward, GatedFeedForward
from tformer.nn.functional import attend, causal_mask, padding_mask
from tformer.nn.kv_cache import DynamicLayerCache, KVCache
from tformer.nn.layers import Linear
from tformer.nn.norms import LayerNorm, RMSNorm
from tformer.nn.rotary import RotaryEmbedding, convert_rotary_layout
from tformer.variants import mla

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers as hf

hf.logging.set_verbosity_error()
quick = settings(max_examples=30, deadline=None, derandomize=True)
VOCAB = 60
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)


def shaken(model, std=0.1, seed=0):
    "All weights random: no gain is 1, no bias is 0."
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = std * torch.randn(p.shape, generator=draw)
            p.copy_(noise if p.ndim > 1 else noise + p)
    return model.eval()


def llama(kv=2, std=0.05):
    return shaken(
        hf.LlamaForCausalLM(
            hf.LlamaConfig(**SIZES, num_key_value_heads=kv, rms_norm_eps=1e-6)
        ),
        std,
    )


HEALTHY = {
    "tour": lambda: MiniGPT(VOCAB, d_model=16, n_heads=2, max_len=32),
    "ours": lambda: Decoder(),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ),
    "llama": lambda: llama(4),
    "llama, grouped": lambda: llama(2),
    "mistral": lambda: hf.MistralForCausalLM(
        hf.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=5)
    ),
    "qwen3": lambda: hf.Qwen3ForCausalLM(
        hf.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8)
    ),
    "neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
        )
    ),
    "bloom": lambda: hf.BloomForCausalLM(
        hf.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4)
    ),
}
ENCODERS = {
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES)),
    "roberta": lambda: hf.RobertaForMaskedLM(
        hf.RobertaConfig(**{**SIZES, "pad_token_id": 1})
    ),
}


@functools.cache
def healthy(name, dtype=torch.float32):
    torch.manual_seed(0)
    make = {**HEALTHY, **ENCODERS}[name]
    return shaken(make()).to(dtype)


def t5():
    return shaken(
        hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4
            )
        )
    )


# a decoder of this course's parts, whose every step can be replaced


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.n_heads = 4
        self.n_kv_heads = 2
        self.scale = 8**-0.5
        self.q_proj = Linear(32, 32, bias=False)
        self.k_proj = Linear(32, 16, bias=False)
        self.v_proj = Linear(32, 16, bias=False)
        self.o_proj = Linear(32, 32, bias=False)
        self.rotary = RotaryEmbedding(8)

    def allowed(self, positions, key_positions):
        return causal_mask(positions, key_positions) & padding_mask(key_positions)

    def share(self, x):
        return repeat_kv(x, 2)

    def remember(self, k, v, positions, layer):
        if layer is None:
            return k, v, positions
        k, v, key_positions = layer.update(k, v, positions=positions)
        return k, v, key_positions.tensor

    def turned(self, q, k, positions):
        return self.rotary(q, k, positions=positions)

    def join(self, out):
        return self.o_proj(merge_heads(out))

    def forward(self, x, positions, layer=None):
        q = split_heads(self.q_proj(x), 4)
        k, v = (split_heads(p(x), 2) for p in (self.k_proj, self.v_proj))
        q, k = self.turned(q, k, positions)
        k, v, key_positions = self.remember(k, v, positions, layer)
        out, _ = attend(
            q,
            self.share(k),
            self.share(v),
            self.allowed(positions, key_positions),
            scale=self.scale,
        )
        return self.join(out)


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention_norm = RMSNorm(32)
        self.attention = attention()
        self.mlp_norm = RMSNorm(32)
        self.mlp = GatedFeedForward(32, 48)

    def forward(self, x, positions, layer=None):
        x = x + self.attention(self.attention_norm(x), positions, layer)
        return x + self.mlp(self.mlp_norm(x))


def next_positions(cache, t, device=None):
    "As many as each row has seen, and counted on."
    at = torch.arange(t, device=device)[None]
    return at if cache is None or cache.is_empty else cache.lengths[:, None] + at


class Decoder(nn.Module):
    def __init__(self, attention=Attention, block=Block, layers=2):
        super().__init__()
        self.max_len = 64
        self.embed = Embedding(VOCAB, 32)
        self.blocks = nn.ModuleList(block(attention) for _ in range(layers))
        self.norm = RMSNorm(32)
        self.lm_head = Linear(32, VOCAB, bias=False)

    def new_cache(self, batch, max_len=None):
        return KVCache([DynamicLayerCache() for _ in self.blocks])

    def positions(self, cache, t, device):
        return next_positions(cache, t, device)

    def start(self, ids, positions):
        return self.embed(ids)

    def logits(self, x):
        return self.lm_head(self.norm(x))

    def forward(self, ids, *, cache=None, positions=None, mask=None):
        if positions is None:
            positions = self.positions(cache, ids.shape[1], ids.device)
        x = self.start(ids, positions)
        for i, block in enumerate(self.blocks):
            x = block(x, positions, cache and cache.layers[i])
        return self.logits(x)


NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.": "self_attn.",
    "blocks": "layers",
    "embed.": "embed_tokens.",
}


def filled(model, judge=None):
    "The weights of the reference, by name."
    theirs = (judge or reference()).state_dict()
    own = model.state_dict()

    def their(name):
        for here, there in NAMES.items():
            name = name.replace(here, there)
        return name if name.startswith("lm_head") else f"model.{name}"

    model.load_state_dict({n: theirs.get(their(n), w) for n, w in own.items()})
    return model


@functools.cache
def reference():
    torch.manual_seed(0)
    return llama()


BREAKS = {}  # name: (how to make it, {check: what its message says})


def broken(name, **found):
    def keep(make):
        BREAKS[name] = make, found
        return make

    return keep


def attention(name, method, **found):
    "A break that replaces one method of the attention."

    def keep(function):
        kind = type("Broken", (Attention,), {method: function})
        BREAKS[name] = lambda: filled(Decoder(kind)), found
        return function

    return keep


def decoder(name, method, **found):
    "A break that replaces one method of the model."

    def keep(function):
        kind = type("Broken", (Decoder,), {method: function})
        BREAKS[name] = lambda: filled(kind()), found
        return function

    return keep


def numbers(name, **values):
    "A break that changes numbers on modules."

    def make():
        model = filled(Decoder())
        for m in model.modules():
            for key in values.keys() & vars(m).keys():
                setattr(m, key, values[key])
        return model

    BREAKS[name] = (
        make,
        dict(
            same="input differs already.*output 0"
            if "eps" not in values
            else "eps=1e-05"
        ),
    )


@attention(
    "mask inverted",
    "allowed",
    causal="mask is inverted",
    cache="not causal",
    same="o_proj",
)
def _(self, positions, key_positions):
    return ~causal_mask(positions, key_positions) & padding_mask(key_positions)


@attention("mask inverted, last row even", "allowed", causal="mask is inverted")
def _(self, positions, key_positions):
    later = ~causal_mask(positions, key_positions)
    return later | ~later.any(-1, keepdim=True)


@attention(
    "mask off by one",
    "allowed",
    causal="mask is off by 1",
    cache="not causal",
    same="o_proj",
)
def _(self, positions, key_positions):
    return causal_mask(positions + 1, key_positions) & padding_mask(key_positions)


@attention("no mask", "allowed", causal="no causal mask", same="o_proj")
def _(self, positions, key_positions):
    return padding_mask(key_positions)


@attention(
    "heads joined by reshape",
    "join",
    causal="irregular.*o_proj is the first",
    same="right numbers in another order",
)
def _(self, out):
    return self.o_proj(out.reshape(len(out), out.shape[2], -1))


@attention(
    "view mixes q, k and v",
    "forward",
    causal="irregular|rows of a",
    shapes="rows of a batch",
)
def _(self, x, positions, layer=None):
    b, t, _ = x.shape
    qkv = torch.cat(
        [
            self.q_proj(x),
            self.share(self.k_proj(x)[:, None]).reshape(b, t, -1),
            self.q_proj(x),
        ],
        -1,
    )
    q, k, v = qkv.view(3, b, 4, t, 8)  # should be split, then transposed
    return self.join(attend(q, k, v, self.allowed(positions, positions))[0])


@attention(
    "attention over the batch",
    "forward",
    causal="batch and time",
    shapes="batch and time",
    padding="batch and time",
    same="another order",
)
def _(self, x, positions, layer=None):
    right = Attention.forward
    return right(
        self, x.transpose(0, 1), positions.new_tensor(range(len(x)))[None]
    ).transpose(0, 1)


@attention("NaN in an empty row", "forward", causal="single token, alone, gives NaN")
def _(self, x, positions, layer=None):
    q = split_heads(self.q_proj(x), 4)
    scores = (q @ q.mT).masked_fill(causal_mask(positions, positions), -torch.inf)
    return self.join(scores.softmax(-1) @ q)


@attention(
    "dropout in eval",
    "join",
    shapes="F.dropout without",
    causal="F.dropout without",
    padding="F.dropout without",
    cache="F.dropout without",
    gradients="F.dropout without",
    same="F.dropout without",
)
def _(self, out):
    return F.dropout(Attention.join(self, out), 0.1)


@attention(
    "output projection forgotten",
    "join",
    gradients="never ran: blocks.0.attention.o_proj",
    same="leaves one out",
)
def _(self, out):
    return merge_heads(out)


@attention(
    "detached",
    "join",
    gradients="8 of 21.*ran, and get no grad",
    same="the gradient of embed.weight",
)
def _(self, out):
    return Attention.join(self, out.detach())


@attention("heads tiled", "share", same="first.*o_proj.*how heads are")
def _(self, x):
    return x.repeat(1, 2, 1, 1)


@attention(
    "padding attended to",
    "allowed",
    padding="is attended to",
    cache="padded on the left",
)
def _(self, positions, key_positions):
    return causal_mask(positions, key_positions)


@attention("mask of rows on heads", "allowed", padding="needs an axis for the heads")
def _(self, positions, key_positions):
    mask = Attention.allowed(self, positions, key_positions)
    return mask.transpose(0, 1) if len(mask) == 4 else mask


@attention("padding zeroed, not masked", "forward", padding="how much")
def _(self, x, positions, layer=None):
    x = x * (positions >= 0)[..., None]
    return Attention.forward(self, x, positions.clamp(min=0), layer)


@attention("cache slot empty", "remember", cache=r"tokens \[3\].*empty")
def _(self, k, v, positions, layer):
    if not layer:
        return k, v, positions
    k, v, key_positions = layer.update(k, v, positions=positions)
    hole = (key_positions.tensor == 3)[:, None, :, None]
    return k.masked_fill(hole, 0), v.masked_fill(hole, 0), key_positions.tensor


@attention("newest slot empty", "remember", cache="newest token is not yet")
def _(self, k, v, positions, layer):
    if not layer:
        return k, v, positions
    k, v, key_positions = layer.update(k, v, positions=positions)
    return (
        *(torch.cat([x[:, :, :-1], 0 * x[:, :, -1:]], 2) for x in (k, v)),
        key_positions.tensor,
    )


@attention("cache never read", "remember", cache="cached is lost")
def _(self, k, v, positions, layer):
    if layer:
        layer.update(k, v, positions=positions)
    return k, v, positions


@attention("new tokens unmasked", "allowed", cache="not masked from each")
def _(self, positions, key_positions):
    if positions.shape[1] == key_positions.shape[1]:
        return Attention.allowed(self, positions, key_positions)
    return padding_mask(key_positions).expand(-1, -1, positions.shape[1], -1)


@attention("mask at the top left", "allowed", cache="top left corner")
def _(self, positions, key_positions):
    t = positions.shape[1]
    s = key_positions.shape[1]
    if t in (1, s):
        return Attention.allowed(self, positions, key_positions)
    whole = torch.ones(t, s, device=positions.device)
    return whole.tril().bool() & padding_mask(key_positions)


@attention("keys rotated twice", "remember", cache="rotated twice")
def _(self, k, v, positions, layer):
    if not layer:
        return k, v, positions
    k, v, key_positions = layer.update(k, v, positions=positions)
    return self.rotary(k, positions=key_positions)[0], v, key_positions.tensor


@decoder("positions restart", "positions", cache="restart at 0")
def _(self, cache, t, device):
    return torch.arange(t, device=device)[None]


@decoder("positions shifted by one", "positions", cache="one.*too far")
def _(self, cache, t, device):
    late = cache is not None and not cache.is_empty
    return next_positions(cache, t, device) + int(late)


@decoder("positions too early", "positions", cache="one.*too early")
def _(self, cache, t, device):
    late = cache is not None and not cache.is_empty
    return next_positions(cache, t, device) - int(late)


@decoder("positions begin at 1", "positions", cache="begin at 0")
def _(self, cache, t, device):
    return next_positions(cache, t, device) + 1


KEPT = {}


@decoder("cache shared", "new_cache", cache="second cache is not new")
def _(self, batch, max_len=None):
    return KEPT.setdefault(
        id(self), KVCache([DynamicLayerCache(), DynamicLayerCache()])
    )


@decoder(
    "remembers calls",
    "logits",
    shapes="remembers earlier calls",
    causal="remembers earlier calls",
)
def _(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    return Decoder.logits(self, x) + self.calls


@decoder("softmax at the end", "logits", shapes="probabilities", same="up to lm_head")
def _(self, x):
    return Decoder.logits(self, x).softmax(-1)


@decoder(
    "one column too few", "logits", shapes="width 59", gradients="59", same="shape"
)
def _(self, x):
    return Decoder.logits(self, x)[..., :-1]


@decoder("time first", "logits", shapes="batch_first", causal="batch_first")
def _(self, x):
    return Decoder.logits(self, x).transpose(0, 1)


@decoder("last output only", "logits", shapes="only the last output")
def _(self, x):
    return Decoder.logits(self, x)[:, -1]


@decoder("constant logits", "logits", causal="nothing was tested")
def _(self, x):
    return Decoder.logits(self, 0 * x + 1)


@decoder("ids shifted by one", "start", causal="own token")
def _(self, ids, positions):
    return self.embed(torch.cat([ids[:, :1] * 0, ids[:, :-1]], 1))


@decoder(
    "positions from the end",
    "start",
    causal="depends on the length",
    same="input differs already",
)
def _(self, ids, positions):
    back = positions.amax() - positions
    return self.embed(ids) + 0.1 * back[..., None]


@decoder(
    "mean over the batch",
    "start",
    shapes="rows of a batch",
    causal="rows of a batch",
    padding="rows of a batch",
)
def _(self, ids, positions):
    x = self.embed(ids)
    return x - x.mean(0, keepdim=True)


@broken("post-norm for pre-norm", same="different kinds of layer")
def _():
    class Post(Block):
        def forward(self, x, positions, layer=None):
            x = self.attention_norm(x + self.attention(x, positions, layer))
            return self.mlp_norm(x + self.mlp(x))

    return filled(Decoder(block=Post))


@broken("GELU for SiLU", same="down_proj.*activation")
def _():
    class Gelu(Block):
        def __init__(self, attention):
            super().__init__(attention)
            self.mlp = GatedFeedForward(32, 48, activation="gelu")

    return filled(Decoder(block=Gelu))


@broken("mask off by one, one layer", causal="mask is off by 1")
def _():
    class Wide(Attention):
        def allowed(self, positions, key_positions):
            return causal_mask(positions + 1, key_positions) & padding_mask(
                key_positions
            )

    return filled(Decoder(Wide, layers=1))


@broken(
    "one weight not copied",
    same="other weights .weight.*k_proj|k_proj.*other weights .weight",
)
def _():
    model = filled(Decoder())
    with torch.no_grad():
        model.blocks[1].attention.k_proj.weight[3, 4] += 0.5
    return model


@broken("rotary weights in the other layout", same="q_proj.*rotary")
def _():
    model = filled(Decoder())
    for block in model.blocks:
        w = block.attention.q_proj.weight
        w.data = convert_rotary_layout(w.data, 8, to="interleaved")
    return model


@broken(
    "projection of zeros",
    causal="nothing was tested",
    cache="nothing was tested",
    padding="nothing was tested",
    gradients="nearly 0",
)
def _():
    model = filled(Decoder())
    for block in model.blocks:
        nn.init.zeros_(block.attention.o_proj.weight)
    return model


@broken("frozen", gradients="frozen: embed.weight")
def _():
    model = filled(Decoder())
    model.embed.weight.requires_grad_(False)
    return model


numbers("eps 1e-6 to 1e-5", eps=1e-5)
numbers("scale dropped", scale=1.0)
numbers("rotary layout swapped", layout="interleaved")
CHECKS = {
    "shapes": lambda m: check.shapes(m, VOCAB),
    "causal": lambda m: check.causal(m, VOCAB),
    "padding": lambda m: check.padding(m, VOCAB),
    "cache": lambda m: check.cache(m, VOCAB),
    "gradients": lambda m: check.gradients(m, VOCAB),
    "same": lambda m: check.same(m, reference()),
}
VALUE_ONLY = [
    "scale dropped",
    "eps 1e-6 to 1e-5",
    "rotary layout swapped",
    "heads tiled",
    "post-norm for pre-norm",
    "GELU for SiLU",
]


def finds(judge, model):
    try:
        judge(model)
    except check.CheckFailed:
        return True
    return False


def caught(judge, *args, **kwargs):
    with pytest.raises(check.CheckFailed) as error:
        judge(*args, **kwargs)
    report = error.value.report
    assert not report and str(error.value) == str(report)
    assert all(len(line) <= 80 for line in str(report).splitlines())
    return " ".join(str(report).split())


def snapshot(model):
    "Everything of a model that a check might change."
    return (
        [m.training for m in model.modules()],
        [set(vars(m)) for m in model.modules()],
        {k: v.clone() for k, v in model.state_dict().items()},
        [b.clone() for b in model.buffers()],
        [
            (p.requires_grad, None if p.grad is None else p.grad.clone())
            for p in model.parameters()
        ],
        torch.get_rng_state(),
        torch.is_grad_enabled(),
    )


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return a == b


# healthy models pass


@pytest.mark.parametrize(
    "dtype", by_day([torch.float32, torch.bfloat16], torch.float32)
)
@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_pass(name, dtype):
    model = healthy(name, dtype)
    for judge in ("shapes", "causal", "padding", "gradients"):
        assert CHECKS[judge](model)
    if name != "tour":
        assert check.cache(model, VOCAB)


@pytest.mark.parametrize("name", ["gpt2", "llama, grouped", "bloom"])
def test_healthy_models_pass_with_their_own_first_weights(name):
    torch.manual_seed(1)
    assert check.run_all(HEALTHY[name](), VOCAB)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(name):
    model = healthy(name)
    assert check.padding(model, VOCAB) and check.gradients(model)
    assert check.shapes(model, VOCAB, max_len=60)
    assert "no causal mask" in caught(check.causal, model, VOCAB)
    assert "attended to" in caught(check.padding, lambda x: model(x).logits, VOCAB)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bloom"])
def test_the_same_as_its_copy(name):
    model = healthy(name)
    report = check.same(copy.deepcopy(model), model)
    assert report.measurements["logits"] == 0
    assert "untested" not in dict(report.notes)


def test_the_course_equals_transformers():
    report = check.same(filled(Decoder()), reference())
    lines = dict(report.notes)
    assert lines["gradients"].startswith("agree for 21 of 21")
    assert lines["weights"] == "19,360 here, 19,360 there"
    assert check.run_all(filled(Decoder()), VOCAB)


# broken models fail, and the message says how


@pytest.mark.parametrize(
    "name,judge",
    [(name, judge) for name, (_, found) in BREAKS.items() for judge in found],
)
def test_mistakes_are_named(name, judge):
    make, found = BREAKS[name]
    text = caught(CHECKS[judge], make())
    assert re.search(found[judge], text), text


# at least one mistake for each check
TRIED_BY_DAY = [
    "mask off by one, one layer",
    "mask inverted, last row even",
    "no positions, one layer",
    "padding zeroed, not masked",
    "cache never read",
    "last output only",
    "frozen",
    "scale dropped",
]


def rounded_by_row(model):
    """Let linear layers round each row of a batch in its own way.

    Matrix kernels do the same: they divide the rows among threads and registers, so
    equal rows of one batch may differ in the last bit.
    """

    def hook(module, args, out):
        if out.ndim == 3:
            row = torch.arange(len(out), dtype=out.dtype)[:, None, None]
            return out * (1 + row % 3 * 2**-23)

    for module in model.modules():
        if isinstance(module, Linear | nn.Linear):
            module.register_forward_hook(hook)
    return model


@pytest.mark.parametrize(
    "name,judge",
    [
        pytest.param(
            name, judge, marks=[] if name in TRIED_BY_DAY else pytest.mark.nightly
        )
        for name, (_, found) in BREAKS.items()
        for judge in found
    ],
)
def test_verdicts_do_not_rest_on_the_rounding_of_rows(name, judge):
    make, found = BREAKS[name]
    text = caught(CHECKS[judge], rounded_by_row(make()))
    assert re.search(found[judge], text), text


def test_a_model_passes_whatever_the_rounding_of_its_rows():
    model = rounded_by_row(filled(Decoder()))
    rows = model(torch.full((3, 5), 7))
    assert not torch.equal(rows[1], rows[0])  # the rounding is there
    assert check.run_all(model, VOCAB)
    for block in model.blocks:
        nn.init.zeros_(block.attention.o_proj.weight)
    for judge in (check.causal, check.padding, check.cache):
        assert "nothing was tested" in caught(judge, model, VOCAB)


@pytest.mark.parametrize("name", VALUE_ONLY)
def test_mistakes_of_value_need_a_reference(name):
    make, found = BREAKS[name]
    assert set(found) == {"same"} and check.run_all(make(), VOCAB)


def test_every_names_all_that_failed():
    text = caught(check.run_all, BREAKS["no mask"][0](), VOCAB)
    assert "2 of 5 checks failed" in text and "shapes passed" in text
    assert check.run_all(healthy("bert"), VOCAB, skip=("causal",))


def test_exact_and_tanh_gelu():
    "GPT-2 has the tanh form; the exact one is named."
    right = healthy("gpt2")
    wrong = copy.deepcopy(healthy("gpt2"))
    for block in wrong.transformer.h:
        block.mlp.act = nn.GELU(approximate="tanh")
    assert check.same(wrong, right)
    wrong.transformer.h[1].mlp.act = nn.GELU()
    text = caught(check.same, wrong, right)
    assert "transformer.h.1.mlp.act" in text and "approximate=none" in text


def test_the_ids_are_those_of_a_decoder_with_its_own_vocabulary():
    class Written(nn.Module):
        config = SimpleNamespace(vocab_size=VOCAB + 40, decoder_vocab_size=VOCAB)

        def __init__(self):
            super().__init__()
            self.inner = copy.deepcopy(healthy("tour"))

        def forward(self, ids):
            return self.inner(ids)

    assert check.gradients(Written())
    assert check.same(Written(), healthy("tour"))
    assert check.same(healthy("tour"), Written())


class Learned(nn.Module):
    "Post-norm blocks, learned positions and biases: another family."

    def __init__(self, shift=0):
        super().__init__()
        self.embed = Embedding(VOCAB, 32)
        self.shift = shift
        self.embed_positions = LearnedPositionEmbedding(20, 32)
        self.mlp = FeedForward(32, 48)
        self.norm = LayerNorm(32)
        self.lm_head = Linear(32, VOCAB)

    def forward(self, ids, *, cache=None, positions=None, mask=None):
        if positions is None:
            positions = torch.arange(ids.shape[1])[None] + self.shift
        x = self.embed(ids) + self.embed_positions(positions)
        x = x.tanh().cumsum(1) / (1 + positions.clamp(min=0))[..., None]
        return self.lm_head(self.norm(x + self.mlp(x)))


def test_positions_shifted_by_one_in_the_default():
    assert check.causal(shaken(Learned()), VOCAB)
    text = caught(check.padding, shaken(Learned(1)), VOCAB)
    assert "begin at 1" in text
    text = caught(check.same, shaken(Learned(1)), shaken(Learned()))
    assert "embed_positions" in text


def test_the_edges_are_tried():
    "The last id, the last position, a vocabulary of two."
    torch.manual_seed(0)
    short = MiniGPT(5000, d_model=8, n_layers=1, n_heads=2, max_len=40)
    assert check.shapes(short, 5000)
    short.embed = nn.Embedding(4999, 8)
    assert "ids or positions" in caught(check.shapes, short, 5000)
    short = MiniGPT(5000, d_model=8, n_layers=1, n_heads=2, max_len=40)
    short.embed_positions = nn.Embedding(39, 8)
    assert "(1, 40)" in caught(check.shapes, short, 5000)
    trial = CheckRun(MiniGPT(2), 2)
    ids = trial.random_ids(8)
    assert torch.equal(trial.replacement_ids(ids), 1 - ids)


def test_sessions_that_take_turns():
    "A cache on the module, emptied whenever a new session begins."

    class Kept(Decoder):
        def new_cache(self, batch, max_len=None):
            self.kept = KVCache([DynamicLayerCache(), DynamicLayerCache()])
            return self.kept

        def forward(self, ids, *, cache=None, positions=None, mask=None):
            return super().forward(ids, cache=cache and self.kept, positions=positions)

    assert "sessions that take turns" in caught(check.cache, filled(Kept()), VOCAB)


# a report


def test_a_report_prints_and_pickles():
    report = check.causal(healthy("ours"), VOCAB)
    assert report and str(report).startswith("check.causal passed: Decoder")
    assert (
        report.measurements["depends"].tolist()
        == torch.ones(12, 12).tril().bool().tolist()
    )
    with pytest.raises(AssertionError) as error:
        report.fail("a problem", "a mistake", "a map")
    assert not report
    again = pickle.loads(pickle.dumps(error.value))
    assert str(again) == str(error.value)
    for part in ("FAILED", "a problem", "likely", "a mistake", "a map"):
        assert part in str(again)


@quick
@given(st.integers(4, 14), st.data())
def test_patterns_are_told_apart(t, data):
    full = torch.ones(t, t)
    reach = data.draw(st.integers(1, t - 2))
    for table, says in (
        (full.tril(), ""),
        (full.triu(), "inverted"),
        (full.tril(reach), f"off by {reach}"),
        (full, "no causal mask"),
        (full.tril(-1), ""),
        (full.triu(1), "inverted"),
    ):
        got = diagnose_leak(table > 0, table)
        assert says in got and bool(says) == bool(got)
    hole = full.tril()
    hole[0, t - 1] = 1
    assert "irregular" in diagnose_leak(hole > 0, hole)
    picture = format_influence_map(hole > 0).splitlines()
    assert len(picture) == t + 1 and picture[1].count("■") == 2


@quick
@given(st.integers(2, 9), st.integers(0, 2**31))
def test_variants_replace_one_token_each(t, seed):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(9, (1, t), generator=draw)
    rows = single_token_variants(ids, ids + 1)
    assert torch.equal(rows[0], ids[0])
    assert torch.equal(rows[1:] - ids, torch.eye(t).long())


# any callable


def test_plain_functions():
    model = healthy("llama")
    assert check.causal(lambda ids: model(ids).logits, VOCAB)
    assert check.causal(functools.partial(model, use_cache=False), VOCAB)
    assert check.causal(model.forward, VOCAB)
    assert check.causal(lambda x: (model(x).logits, 1), VOCAB)
    assert check.causal(lambda x: {"logits": model(x).logits}, VOCAB)
    table = shaken(nn.Embedding(VOCAB, VOCAB))
    place = torch.arange(1, 100)[:, None]

    def running_mean(ids):  # no module called: a weight is used
        x = F.embedding(ids, table.weight) * place[: ids.shape[1]].cos()
        return x.cumsum(1) / place[: ids.shape[1]]

    assert check.causal(running_mean, VOCAB)
    assert "no causal mask" in caught(
        check.causal,
        lambda ids: running_mean(ids.flip(1)).flip(1) + running_mean(ids),
        VOCAB,
    )


def test_what_is_no_logits_is_refused():
    for out in (None, torch.arange(3), [], "text"):
        with pytest.raises(ValueError, match="logits"):
            extract_logits(out)


def test_a_model_without_cache_is_refused():
    with pytest.raises(ValueError, match="no cache"):
        check.cache(healthy("tour"), VOCAB)
    with pytest.raises(ValueError, match="no parameters"):
        check.gradients(lambda x: F.one_hot(x, VOCAB).float(), VOCAB)
    with pytest.raises(ValueError, match="1 ids"):
        check.causal(healthy("tour"), 1)


@pytest.mark.parametrize(
    "name, more, says",
    [
        ("causal", dict(seq_len=0), "seq_len must be .* 1, got 0"),
        ("causal", dict(seq_len=4.0), "seq_len must be .* got 4.0"),
        ("causal", dict(seq_len=3), "4 tokens, got .* 3 tokens"),
        ("causal", dict(num_trials=0), "num_trials must be .* 1, got 0"),
        ("padding", dict(sides=("rihgt",)), "sides are .* got .'rihgt'"),
        ("padding", dict(sides=()), r"at least one; got \(\)"),
        ("run_all", dict(skip=("casual",)), "causal.* got .'casual'"),
    ],
)
def test_what_would_test_nothing_is_refused(name, more, says):
    with pytest.raises(ValueError, match=says):
        getattr(check, name)(healthy("tour"), VOCAB, **more)
    for vocab_size in (VOCAB * 1.0, True, 0):
        with pytest.raises(ValueError, match="vocab_size must be"):
            getattr(check, name)(healthy("tour"), vocab_size)


def test_own_cache_by_a_step_function():
    model = healthy("tour")

    def reread(ids, seen):
        seen = ids if seen is None else torch.cat([seen, ids], 1)
        return model(seen)[:, -ids.shape[1] :], seen

    assert check.cache(model, VOCAB, step_fn=reread)
    assert "cached is lost" in caught(
        check.cache, model, VOCAB, step_fn=lambda ids, state: (model(ids), 0)
    )
    assert "only the last output" in caught(
        check.cache,
        model,
        VOCAB,
        step_fn=lambda *a: (reread(*a)[0][:, -1:], reread(*a)[1]),
    )


def test_own_padding_by_a_function():
    bert = healthy("bert")

    def logits(ids, mask=None):
        return bert(ids, attention_mask=mask).logits

    assert check.padding(
        lambda x: logits(x),
        VOCAB,
        padded_fn=lambda x, keep: (
            bert(
                x,
                attention_mask=keep.long(),
                position_ids=(keep.long().cumsum(1) - 1).clamp(min=0),
            ).logits
        ),
    )
    text = caught(
        check.padding,
        lambda x: logits(x),
        VOCAB,
        padded_fn=lambda x, keep: logits(x, keep.long()),
    )
    assert "padded on the left" in text and "positions count it" in text


def test_positions_that_count_the_padding_are_named():
    gpt2 = healthy("gpt2")

    class Forgets(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = gpt2

        def forward(self, ids, attention_mask=None, position_ids=None):
            if attention_mask is not None and not attention_mask.all():
                position_ids = None
            return self.inner(
                ids, attention_mask=attention_mask, position_ids=position_ids
            )

    assert "positions count the padding" in caught(check.padding, Forgets(), VOCAB)


def test_an_inverted_padding_mask_is_named():
    gpt2 = healthy("gpt2")

    def forward(ids, attention_mask=None):
        mask = None if attention_mask is None else 1 - attention_mask
        return gpt2(ids, attention_mask=mask)

    assert check.causal(forward, VOCAB)
    assert "mask is inverted" in caught(check.padding, forward, VOCAB)
    wrong = copy.deepcopy(gpt2)
    wrong.forward = functools.wraps(gpt2.forward)(
        lambda ids, attention_mask=None, **more: gpt2(
            ids,
            attention_mask=None if attention_mask is None else 1 - attention_mask,
            **more,
        )
    )
    assert "mask is inverted" in caught(check.padding, wrong, VOCAB)


def test_one_padding_id():
    model = healthy("bert")

    def by_id(ids):  # finds its padding by itself
        keep = (ids != 0).long()
        return model(
            ids, attention_mask=keep, position_ids=(keep.cumsum(1) - 1).clamp(min=0)
        ).logits

    by_id.pad_token_id = 0
    assert check.padding(by_id, VOCAB, pad_token_id=0)


def test_encoder_decoder():
    model = t5()
    src = torch.tensor([[7, 8, 9, 1]])
    decoder = check.FixedSourceModel(model, src)
    assert check.causal(decoder, VOCAB) and check.cache(decoder, VOCAB)
    assert check.padding(decoder, VOCAB) and check.shapes(decoder, VOCAB)

    class Ours(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = filled(Decoder())

        def encode(self, src, mask=None):
            return self.inner.embed(src).mean(1, keepdim=True)

        def new_cache(self, batch, max_len=None):
            return self.inner.new_cache(batch)

        def forward(self, ids, *, encoder_hidden_states, cache=None, positions=None):
            logits = self.inner(ids, cache=cache, positions=positions)
            return logits + self.inner.lm_head(encoder_hidden_states)

    decoder = check.FixedSourceModel(Ours(), src)
    assert check.causal(decoder, VOCAB) and check.cache(decoder, VOCAB)
    assert check.padding(decoder, VOCAB)
    with pytest.raises(ValueError, match="lambda ids"):
        check.FixedSourceModel(healthy("tour"), src)


@pytest.mark.nightly
@pytest.mark.skipif(
    "TFORMER_SHAPES" in os.environ, reason="executed signatures cannot be compiled"
)
def test_compiled_models():
    "What is checked is the compiled model; its modules are the plain one's."
    torch.manual_seed(0)
    model = MiniGPT(VOCAB, d_model=8, n_layers=1, n_heads=2).train()
    fast = torch.compile(model, backend="eager")
    before = snapshot(model)
    assert check.causal(fast, VOCAB, seq_len=5, num_trials=1)
    assert equal(snapshot(model), before)
    model.blocks[0].attention.causal = False
    assert "attention.o_proj is the first" in caught(
        check.causal, fast, VOCAB, seq_len=5
    )
    assert check.gradients(fast, VOCAB, seq_len=5)
    with pytest.raises(ValueError, match="with itself"):
        check.same(fast, model, VOCAB)


def test_inside_inference_mode_and_autocast():
    ours = filled(Decoder())
    theirs = reference()
    healthy("llama"), healthy("gpt2")
    with torch.inference_mode():
        assert check.gradients(healthy("llama"))
        assert check.causal(healthy("llama"), VOCAB)
        assert check.same(ours, theirs)
    with torch.autocast("cpu", torch.bfloat16):
        assert check.causal(healthy("gpt2"), VOCAB)
        assert check.cache(healthy("gpt2"), VOCAB)


# nothing is changed


@pytest.mark.parametrize(
    "name", ["right", "no mask", "remembers calls", "frozen", "projection of zeros"]
)
def test_nothing_is_changed(name):
    model = BREAKS[name][0]() if name in BREAKS else filled(Decoder())
    model.train()
    model.blocks[0].mlp.eval()
    model.blocks[1].mlp_norm.weight.requires_grad_(False)
    model.norm.weight.grad = torch.ones(32)
    model.register_buffer("table", torch.ones(3))
    before = snapshot(model)
    theirs = snapshot(reference())
    for judge in CHECKS.values():
        with contextlib.suppress(check.CheckFailed):
            judge(model)
        assert equal(snapshot(model), before)
    assert equal(snapshot(reference()), theirs)


def test_at_rest_restores_after_an_error():
    model = filled(Decoder()).train()
    model.register_buffer("table", torch.ones(3))
    seen = [1]
    known = {"a": 1}
    model.seen = seen
    model.known = known
    before = snapshot(model)
    with pytest.raises(KeyError), preserve_state(model):
        assert not any(m.training for m in model.modules())
        model.table += 1
        model.register_buffer("other", torch.ones(1))
        model.calls = 1
        model.norm.weight.requires_grad_(False)
        model.norm.weight.grad = torch.ones(32)
        torch.rand(3)
        model.seen.append(2)
        model.known |= {"a": 2, "b": 3}
        model.seen = []
        raise KeyError
    assert equal(snapshot(model), before)
    assert model.seen is seen == [1] and model.known is known == {"a": 1}


def test_dropout_of_a_model_in_training_is_no_mistake():
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            resid_pdrop=0.5,
            embd_pdrop=0.5,
            attn_pdrop=0.5,
        )
    ).train()
    assert check.run_all(model, VOCAB)
    assert check.causal(lambda ids: model(ids).logits, VOCAB)
    assert model.training


# same


class InTraining(nn.Module):
    "A causal model with something more between its embedding and its head."

    def __init__(self, between):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.between = between
        self.lm_head = nn.Linear(16, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        x = self.between(self, ids, self.rnn(x)[0])
        return self.lm_head(x)


def batch_norm(model, ids, x):
    return model.norm(x.mT).mT


def dropped(model, ids, x):
    return F.dropout(x, 0.5, model.training)


def dropped_by_python(model, ids, x):
    return x * random.random() if model.training else x


def dropped_where_ids_are_even(model, ids, x):
    "Draws as many numbers as there are even ids, and leaves others alone."
    if model.training:
        x = x.clone()
        even = ids % 2 == 0
        x[even] = x[even] * torch.rand(int(even.sum()), 1)
    return x


def no_training(model, ids, x):
    if model.training:
        raise RuntimeError("for use only")
    return x


def batch_norm_and_dropout(model, ids, x):
    return dropped(model, ids, batch_norm(model, ids, x))


@pytest.mark.parametrize("between", [batch_norm, batch_norm_and_dropout])
def test_statistics_of_a_batch_look_ahead_in_training_only(between):
    torch.manual_seed(0)
    model = InTraining(between)
    model.norm = nn.BatchNorm1d(16)
    model.eval()
    before = copy.deepcopy(model.state_dict())
    chance = torch.get_rng_state()
    with pytest.raises(check.CheckFailed, match="BatchNorm") as caught:
        check.causal(model, VOCAB)
    assert re.match(r"in training mode: output \d+ moved", caught.value.report.problem)
    assert not any(m.training for m in model.modules())
    assert all(torch.equal(x, before[k]) for k, x in model.state_dict().items())
    assert torch.equal(chance, torch.get_rng_state())
    model.norm = nn.Identity()
    assert check.causal(model, VOCAB)


@pytest.mark.parametrize(
    "between", [dropped, dropped_by_python, dropped_where_ids_are_even, no_training]
)
@pytest.mark.parametrize("seed", by_day(range(4), 0))
def test_chance_in_training_is_no_leak(between, seed):
    torch.manual_seed(seed)
    model = InTraining(between)
    assert check.causal(model, VOCAB, seed=seed)
    assert all(m.training for m in model.modules())


def test_a_comparison_with_itself_is_refused():
    model = healthy("llama")
    twin = copy.deepcopy(model)
    twin.lm_head.weight = model.lm_head.weight

    def plain(ids):
        return F.one_hot(ids, VOCAB).float()

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, ids):
            return self.inner(ids)

    class NoWeights(nn.Module):
        def forward(self, ids):
            return F.one_hot(ids, VOCAB).float().cumsum(1)

    bare = NoWeights()
    with pytest.raises(ValueError, match="same module"):
        check.same(lambda x: bare(x), bare, VOCAB)
    view = copy.deepcopy(model)
    view.lm_head.weight = nn.Parameter(model.lm_head.weight.detach()[:])
    for other in (
        model,
        twin,
        Wrapper(),
        lambda x: model(x),
        view,
        model.forward,
        functools.partial(model),
    ):
        with pytest.raises(ValueError, match=r"same module|share"):
            check.same(other, model, VOCAB)
        with pytest.raises(ValueError, match=r"same module|share"):
            check.same(model, other, VOCAB)
    with pytest.raises(ValueError, match="same module"):
        check.same(plain, plain, VOCAB)


def test_weights_that_hide_mistakes_are_reported():
    torch.manual_seed(0)
    fresh = hf.LlamaForCausalLM(reference().config)
    report = check.same(filled(Decoder(), fresh), fresh)
    assert len(report.measurements["constant"]) == 5
    assert "untested" in dict(report.notes)


def test_a_constant_reference_tests_nothing():
    assert "nothing was tested" in caught(
        check.same,
        lambda x: torch.zeros(*x.shape, VOCAB),
        lambda x: torch.zeros(*x.shape, VOCAB),
        VOCAB,
    )


def test_same_by_names_and_own_ids():
    names = {**NAMES, "attention.": "self_attn.", "blocks": "model.layers"}
    names["mlp."] = "mlp."
    text = caught(check.same, BREAKS["heads tiled"][0](), reference(), name_map=names)
    assert "first module that differs is blocks.0.attention.o_proj" in text
    ids = torch.arange(5)[None]
    assert check.same(filled(Decoder()), reference(), ids=ids)
    assert check.same(filled(Decoder()), reference(), check_gradients=False)


def test_same_takes_functions():
    ours = filled(Decoder())
    theirs = reference()
    assert check.same(lambda x: ours(x), lambda x: theirs(x), VOCAB)
    wrong = BREAKS["scale dropped"][0]()
    assert "o_proj" in caught(check.same, lambda x: wrong(x), theirs)


def test_transposed_and_packed_weights_find_their_twins():
    "GPT-2 keeps its matrices transposed; the tour packs q, k and v."
    theirs = healthy("gpt2")
    ours = MiniGPT(VOCAB, d_model=32, n_layers=2, n_heads=4, max_len=64)
    pairs = dict(embed="wte", embed_positions="wpe", norm="ln_f")
    state = {}
    for name in ours.state_dict():
        part, _, rest = name.partition(".")
        there = pairs.get(part, part) + "." + rest
        for a, b in (
            ("blocks", "h"),
            ("attention_norm", "ln_1"),
            ("mlp_norm", "ln_2"),
            ("attention.qkv_proj", "attn.c_attn"),
            ("attention.o_proj", "attn.c_proj"),
            ("mlp.0", "mlp.c_fc"),
            ("mlp.2", "mlp.c_proj"),
        ):
            there = there.replace(a, b)
        if part == "lm_head":
            state[name] = (
                theirs.lm_head.weight if rest == "weight" else torch.zeros(VOCAB)
            )
        else:
            value = theirs.transformer.state_dict()[there]
            state[name] = value.T if "c_" in there and value.ndim == 2 else value
    ours.load_state_dict(state)
    text = caught(check.same, ours, theirs)  # exact GELU here, tanh there
    assert "blocks.0.mlp.1 (there transformer.h.0.mlp.act)" in text
    for block in ours.blocks:
        block.mlp[1].approximate = "tanh"
    lines = dict(check.same(ours, theirs).notes)
    assert lines["gradients"].startswith("agree for 29 of 30")


# gradients


def test_parameters_that_may_be_frozen():
    model = BREAKS["frozen"][0]()
    assert check.gradients(model, frozen=("embed*",))


def test_biases_of_keys_are_silent():
    for name, part in (("bert", "key.bias"), ("opt", "k_proj.bias")):
        silent = check.gradients(healthy(name)).measurements["no_effect"]
        assert len(silent) == 2 and all(part in n for n in silent)


def test_embedding_rows_that_no_id_asked_for_are_fine():
    model = MiniGPT(5000, d_model=16, n_heads=2, max_len=500)
    assert check.gradients(model)


class Deep(nn.Module):
    def __init__(self, gain, residual=False, n=8):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 32)
        self.residual = residual
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(n))
        for block in self.blocks:
            nn.init.normal_(block.weight, std=gain * 32**-0.5)
        self.lm_head = nn.Linear(32, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) + (x if self.residual else 0)
        return self.lm_head(x)


def test_depth():
    assert "vanish" in caught(check.gradients, Deep(0.2))
    assert check.gradients(Deep(0.2, residual=True))
    assert check.gradients(Deep(1.0))

    class Explodes(Deep):
        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = torch.sin(8 * block(x))
            return self.lm_head(x)

    assert "explode" in caught(check.gradients, Explodes(1.0))


@pytest.mark.parametrize("make", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_whose_output_counts_for_nothing(make):
    class Normed(nn.Module):
        def __init__(self, factor):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(VOCAB, 32)
            self.norm = make(32)
            self.lm_head = nn.Linear(32, VOCAB)
            self.factor = factor

        def forward(self, ids):
            x = self.embed(ids)
            return self.lm_head(x + self.factor * self.norm(x))

    text = caught(check.gradients, Normed(0.0))
    names = ", ".join(f"norm.{name}" for name, _ in make(32).named_parameters())
    assert f"get a gradient of exactly or nearly 0: {names}" in text
    assert check.gradients(Normed(1.0))


def test_a_graph_that_is_cut_or_not_finite():
    class Cut(Deep):
        def forward(self, ids):
            with torch.no_grad():
                return super().forward(ids)

    class Root(Deep):
        def forward(self, ids):
            x = super().forward(ids)
            return x + (x - x.detach()).abs().sqrt()

    assert "ran, and get no gradient" in caught(check.gradients, Cut(1.0, True))
    assert "not finite" in caught(check.gradients, Root(1.0, True))


# tolerance


@quick
@given(st.floats(1e-3, 1e3), st.sampled_from([torch.float32, torch.float64]))
def test_tolerance_is_that_of_the_course(size, dtype):
    got = check.tolerance(torch.tensor([size, -size / 2], dtype=dtype))
    part = 1e-5 if dtype == torch.float32 else 1e-9
    assert got == pytest.approx(part * max(1, size), rel=1e-5)


def test_tolerance_follows_the_coarsest_type():
    x = torch.full((3,), 0.5)
    assert check.tolerance(x, torch.bfloat16) == pytest.approx(0.015)
    with torch.autocast("cpu", torch.bfloat16):
        assert check.tolerance(x) == pytest.approx(0.015)
    assert max_difference(x, x + torch.tensor([0, 0.25, 0])) == 0.25
    assert max_difference(x, x * torch.nan) == torch.inf
    assert max_difference(x / 0, x / 0) == 0
    with pytest.raises(ValueError, match="shapes"):
        max_difference(x, x[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype):
    for name in HEALTHY:
        model = copy.deepcopy(healthy(name)).to("cuda", dtype)
        for judge in ("shapes", "causal", "padding", "gradients"):
            assert CHECKS[judge](model)
        if name != "tour":
            assert check.cache(model, VOCAB)
    there = copy.deepcopy(reference()).cuda()
    ours = filled(Decoder()).cuda()
    assert check.same(ours, there) and check.same(ours, reference())
    missed = [
        (name, judge)
        for name, (make, found) in BREAKS.items()
        for judge in found
        if not finds(CHECKS[judge], make().cuda())
    ]
    assert not missed


# models as people write them


class Own(nn.Module):
    "A class with habits of its own; `habit` says which."

    def __init__(self, habit="", table=64):
        super().__init__()
        torch.manual_seed(0)
        self.habit = habit
        self.seen = []
        self.embed = nn.Embedding(VOCAB, 16)
        self.positions = nn.Embedding(table, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.lm_head = nn.Linear(16, VOCAB)
        self.drop = nn.Dropout(0.5)
        shaken(self, 0.3).train()

    def forward(self, ids, past_key_values=None):
        n = past_key_values[0][0].shape[1] if past_key_values else 0
        t = ids.shape[1]
        start = 0 if self.habit == "restart" else n
        self.seen.append(t)
        x = self.embed(ids) + self.positions(torch.arange(start, start + t))
        x = self.drop(x if self.habit == "no norm" else self.norm(x))
        q, k, v = self.qkv(x).chunk(3, -1)
        if n:
            k = torch.cat([past_key_values[0][0], k], 1)
            v = torch.cat([past_key_values[0][1], v], 1)
        mask = torch.ones(t, n + t).tril(n) == 0
        axis = 1 if self.habit == "softmax over queries" else 2
        share = (q @ k.mT).masked_fill(mask, -torch.inf).softmax(axis)
        logits = self.lm_head(x + self.out(share @ v))
        if self.habit == "loss first":
            return logits.mean(), logits
        return (logits, None, ((k, v),))


class Convolution(nn.Module):
    def __init__(self, left, right):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 16)
        self.pad = (left, right)
        self.conv = nn.Conv1d(16, VOCAB, left + right + 1)

    def forward(self, ids):
        return self.conv(F.pad(self.embed(ids).mT, self.pad)).mT


def test_a_class_that_returns_tuples_and_keeps_a_list():
    model = Own()
    assert check.run_all(model, VOCAB) and check.cache(model, VOCAB)
    assert model.seen == [] and model.training
    assert check.causal(Own("loss first"), VOCAB)
    assert "positions restart" in caught(check.cache, Own("restart"), VOCAB)
    assert "softmax" in caught(check.causal, Own("softmax over queries"), VOCAB)


def test_a_model_that_returns_nothing_to_go_on_from():
    model = Own("loss first")
    with pytest.raises(ValueError, match="to go on from"):
        check.cache(lambda ids, past_key_values=None: model(ids)[1], VOCAB)
    text = caught(check.run_all, Own("loss first"), VOCAB)
    assert "1 of 5" in text and "could not be run; ValueError" in text


def test_a_cache_of_another_kind_is_not_passed_over():
    model = Own()
    lines = check.run_all(lambda ids, kv_cache=None: model(ids), VOCAB).notes
    assert "not tested" in dict(lines)["cache"]


def test_modules_are_found_in_comprehensions_and_owners():
    model = Own()

    class Trainer:
        def __init__(self):
            self.net = model

        def predict(self, ids):
            return self.net(ids)

    def rows(ids):
        return torch.cat([model(row[None])[0] for row in ids])

    assert check.causal(Trainer().predict, VOCAB) and check.causal(rows, VOCAB)
    held = {"net": model}
    assert "no module was found" in caught(
        check.causal, lambda ids: held["net"](ids), VOCAB
    )
    exec(
        "def late(ids):\n return torch.cat([net(r[None])[0] for r in ids])",
        space := dict(net=model, torch=torch),
    )
    assert find_modules(space["late"]) == [model]


def test_convolutions():
    assert check.causal(Convolution(2, 0), VOCAB)
    assert "both sides" in caught(check.causal, Convolution(1, 1), VOCAB)


@pytest.mark.parametrize(
    "model,says",
    [
        (lambda ids, targets: 0, "takes more than ids"),
        (lambda ids: ids.shape[0].size, "AttributeError"),
        (lambda ids: (lambda t: t)(*ids.unbind(0)[0].shape, 1), "raised"),
        (lambda ids: F.one_hot(ids, VOCAB).float().mean(), "a loss"),
        (lambda ids: F.one_hot(ids[0], VOCAB).float(), "batch is lost"),
        (lambda ids: F.embedding(ids, torch.zeros(9, 9)), "vocab_size right"),
        (lambda ids: ids, "must return logits"),
    ],
)
def test_misuse_is_explained(model, says):
    assert says in caught(check.causal, model, VOCAB)


def test_one_row_without_a_batch():
    def one(ids):
        (_t,) = ids.shape
        return F.one_hot(ids, VOCAB).float().cumsum(0)

    assert "axis of the batch" in caught(check.causal, one, VOCAB)


def test_a_text_that_is_too_long():
    def short(ids):
        if ids.shape[1] > 8:
            raise ValueError(f"block size is 8, got {ids.shape[1]}")
        return Own()(ids)

    assert "pass seq_len=" in caught(check.causal, short, VOCAB)


@pytest.mark.parametrize(
    "args,says",
    [
        (("gpt2", VOCAB), "got str"),
        ((Own, VOCAB), "the class Own"),
        ((Own(), "60"), "vocab_size must be .* got '60'"),
        ((VOCAB, Own()), "got int"),
    ],
)
def test_what_is_no_model_is_refused(args, says):
    for judge in (check.causal, check.run_all):
        with pytest.raises(ValueError, match=says):
            judge(*args)


def test_padding_on_one_side_only():
    model = healthy("bert")

    def no_positions(ids, attention_mask=None):
        return model(ids, attention_mask=attention_mask)

    assert "sides=" in caught(check.padding, no_positions, VOCAB)
    assert check.padding(no_positions, VOCAB, sides=("right",))


class Rereads(nn.Module):
    """A model whose cache is nothing but what was read: it can do nothing else.

    With ``leaks``, a call that goes on from it takes padding for a token.
    """

    def __init__(self, leaks):
        super().__init__()
        self.model = healthy("ours")
        self.leaks = leaks

    def forward(self, ids, attention_mask=None, past_key_values=None):
        past = past_key_values
        keep = torch.ones_like(ids) if attention_mask is None else attention_mask
        if past is not None:
            ids = torch.cat([past.ids, ids], 1)
            if keep.shape != ids.shape:
                keep = torch.cat([past.keep, keep], 1)
        unseen = 0 if self.leaks and past is not None else -1
        positions = (keep.cumsum(1) - 1).masked_fill(keep == 0, unseen)
        logits = self.model(ids, positions=positions)
        start = 0 if past is None else past.ids.shape[1]
        return SimpleNamespace(
            logits=logits[:, start:],
            past_key_values=SimpleNamespace(ids=ids, keep=keep),
        )


def test_a_cache_that_can_only_go_on_is_tried_on_padded_prompts():
    lines = dict(check.cache(Rereads(leaks=False), VOCAB).notes)
    assert "as each alone" in lines["padded"]
    text = caught(check.cache, Rereads(leaks=True), VOCAB)
    assert "in a batch padded on the left" in text
    assert "the padding of the prompt is attended to by later tokens" in text


def test_same_names_what_is_left_out():
    right = Own()
    wrong = Own("no norm")
    text = caught(check.same, wrong, right, VOCAB)
    assert "nothing like norm runs" in text
    short = filled(Decoder(layers=1))
    text = caught(check.same, short, reference())
    assert "weights are those of model.norm" in text and "left out" in text


def test_same_tells_of_weights_that_are_tied_on_one_side():
    theirs = healthy("gpt2")
    apart = copy.deepcopy(theirs)
    apart.lm_head.weight = nn.Parameter(theirs.lm_head.weight.detach().clone())
    report = check.same(apart, theirs)
    assert "lm_head.weight" in report.measurements["tied"]
    assert "training will part them here" in dict(report.notes)["tied"]
    assert "tied" not in check.same(copy.deepcopy(theirs), theirs).measurements


def test_every_says_the_same_mistake_once():
    text = caught(check.run_all, BREAKS["dropout in eval"][0](), VOCAB)
    assert text.count("F.dropout without") == 1
    assert text.count("likely mistake is the same") == 4


@pytest.mark.parametrize("judge", ["shapes", "causal", "padding", "cache", "gradients"])
def test_chance_is_found_whatever_was_drawn_before(judge):
    "Also where the generator stands as after ``manual_seed(0)``, as on a fresh GPU."
    model = BREAKS["dropout in eval"][0]()
    torch.manual_seed(0)
    caught(CHECKS[judge], model)


def test_same_tells_of_a_square_matrix_on_its_side():
    "Nothing raises, as the shapes agree; biased or not, two layouts."

    def pair(bias):
        return (
            nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8, bias), nn.Linear(8, 20))
            for _ in range(2)
        )

    for bias in (True, False):
        ours, theirs = map(shaken, pair(bias))
        ours.load_state_dict(theirs.state_dict())
        assert check.same(ours, theirs)
        with torch.no_grad():
            ours[1].weight.copy_(theirs[1].weight.T)
        with pytest.raises(check.CheckFailed, match=r"weight\s+lies\s+on\s+its\s+side"):
            check.same(ours, theirs)
    ours, theirs = map(shaken, pair(True))  # another formula is none
    ours.load_state_dict(theirs.state_dict())
    twice = ours[1]
    twice.forward = lambda x: 2 * F.linear(x, twice.weight, twice.bias)
    with pytest.raises(check.CheckFailed, match=r"formula\s+differs"):
        check.same(ours, theirs)


def test_nested_tensors_inside_a_model_are_passed_over():
    "PyTorch's encoder makes some of a padded batch, where it runs fast."
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    stack = nn.TransformerEncoder(layer, 2)
    embed = nn.Embedding(VOCAB, 16)

    class Open(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = embed
            self.stack = stack

        def forward(self, ids):
            pad = torch.zeros(ids.shape, dtype=torch.bool)
            return self.stack(self.embed(ids), src_key_padding_mask=pad)

    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        assert "no causal mask" in caught(check.causal, Open(), VOCAB)


@pytest.mark.parametrize("seed", by_day(range(5), 0))
@pytest.mark.parametrize("std", (0.05, 0.2))
def test_missing_positions_are_seen_in_one_layer_and_not_deeper(seed, std):
    "One layer sees a bag, up to rounding; deeper, the mask leaks order."

    class Bag(Attention):
        def turned(self, q, k, positions):
            return q, k

    def drawn(layers):
        torch.manual_seed(seed)
        made = Decoder(Bag, layers=layers)
        with torch.no_grad():
            for p in made.parameters():
                p.copy_(std * torch.randn_like(p) + (p.ndim == 1))
        return made

    report = check.causal(drawn(1), VOCAB)
    assert "the same for any order" in dict(report.notes)["order"]
    assert "causal passed; the last output is the same for any order" in " ".join(
        str(check.run_all(drawn(1), VOCAB, skip=("gradients",))).split()
    )
    assert "order" not in dict(check.causal(drawn(2), VOCAB).notes)


def test_a_model_without_order_that_is_meant_so_is_told_in_a_note():
    "A sum over the earlier tokens is causal, and sees no order."
    torch.manual_seed(0)
    table = torch.randn(VOCAB, VOCAB)
    report = check.causal(lambda ids: table[ids].cumsum(1), VOCAB)
    assert report and "That is causal" in dict(report.notes)["order"]
    weights = torch.arange(1.0, 13.0)[:, None]
    report = check.causal(
        lambda ids: (table[ids] * weights[: ids.shape[1]]).cumsum(1), VOCAB
    )
    assert "order" not in dict(report.notes)


# --- long texts


@pytest.fixture
def latent(monkeypatch):
    "A decoder with latent attention, which drops its mask where it is told to."
    attend = mla.LatentAttention._attend
    config = LlamaConfig(
        vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_len=160
    )

    def make(drops_mask):
        def leaky(self, q, k, v, need_weights, kwargs):
            kwargs = {} if drops_mask(q.shape[2], k.shape[2]) else kwargs
            return attend(self, q, k, v, need_weights, kwargs)

        monkeypatch.setattr(mla.LatentAttention, "_attend", leaky)
        torch.manual_seed(0)
        factory = mla.make_mla_factory(config, kv_rank=16, d_nope=8, d_rope=4, d_v=4)
        return Llama(config, factory).eval()

    return make


def test_a_future_that_only_long_texts_see_is_seen(latent):
    "As where many queries are computed by other code, which forgets the mask."
    model = latent(lambda t, s: t >= 128)
    said = caught(check.causal, model, VOCAB)
    assert "in a text of 160 tokens, output" in said
    assert "where blocks.0.attention" in said
    assert "in a text of 160 tokens, output" in caught(check.cache, model, VOCAB)
    report = check.causal(model, VOCAB, max_len=127)
    assert "1 × 127 tokens" in str(report)
    healthy = latent(lambda t, s: False)
    for judge in (check.causal, check.cache, check.shapes, check.padding):
        assert "160 tokens" in " ".join(str(judge(healthy, VOCAB)).split())


def test_only_the_last_token_may_leak(monkeypatch):
    "One place of a long text sees one token that comes after it."

    class Peeks(MiniGPT):
        def forward(self, ids):
            logits = super().forward(ids)
            if ids.shape[1] == 100:
                logits[:, self.place] += self.embed(ids)[:, -1].sum(-1, keepdim=True)
            return logits

    model = Peeks(VOCAB, d_model=16, n_layers=1, n_heads=2, max_len=100)
    for place in (0, 49, 50, 98):
        model.place = place
        said = caught(check.causal, model, VOCAB)
        assert f"output {place} moved by" in said
        assert "the last token" in said
    model.place = 99
    assert check.causal(model, VOCAB)


def test_a_long_text_may_leak_by_little_for_each_token():
    "Half of the text together moves an output that one token hardly moves."

    class Mean(MiniGPT):
        def forward(self, ids):
            logits = super().forward(ids)
            if ids.shape[1] > 500:
                logits = (
                    logits + self.weak * self.embed(ids).mean((1, 2))[:, None, None]
                )
            return logits

    torch.manual_seed(0)
    model = Mean(VOCAB, d_model=16, n_layers=1, n_heads=2, max_len=600)
    model.weak = 0.02
    assert "the tokens from 300 on" in caught(check.causal, model, VOCAB)


def test_a_cache_that_fails_on_long_texts_is_seen(latent):
    "Alone, a long text is right; behind a cache it is not."
    model = latent(lambda t, s: s > t >= 40)
    assert check.causal(model, VOCAB)
    said = caught(check.cache, model, VOCAB)
    assert "fed as 80 + 1 + 78 + 1 tokens, output 81 differs" in said
    assert check.cache(model, VOCAB, max_len=40)
    drops = latent(lambda t, s: t == 1 and s > 100)  # only one mask less
    assert check.cache(drops, VOCAB)


def test_a_cache_that_forgets_in_long_texts_is_seen(monkeypatch):
    model = Llama(
        LlamaConfig(vocab_size=VOCAB, d_model=32, n_layers=1, n_heads=4, max_len=90)
    ).eval()
    update = DynamicLayerCache.update

    def forgets(self, *args, **kwargs):
        k, v, positions = update(self, *args, **kwargs)
        if k.shape[2] > 64:
            k = torch.cat([torch.zeros_like(k[:, :, :8]), k[:, :, 8:]], 2)
        return k, v, positions

    monkeypatch.setattr(DynamicLayerCache, "update", forgets)
    assert "fed as 45 + 1 + 43 + 1 tokens" in caught(check.cache, model, VOCAB)
    assert check.cache(model, VOCAB, max_len=60)


def test_a_cache_may_refuse_long_texts(latent):
    model = latent(lambda t, s: False)
    step = check.adapter.Adapter(model).step

    def short(ids, state):
        if state and state.lengths.max() + ids.shape[1] > 50:
            raise IndexError("no slot is left")
        return step(ids, state)

    said = " ".join(str(check.cache(model, VOCAB, step_fn=short)).split())
    assert "long not tested: 160 tokens: IndexError: no slot is left" in said


def test_rows_of_long_texts_do_not_meet():
    class Meets(MiniGPT):
        def forward(self, ids):
            logits = super().forward(ids)
            return logits + logits.mean(0) * (ids.shape[1] > 50)

    model = Meets(VOCAB, d_model=16, n_layers=1, n_heads=2, max_len=70)
    said = caught(check.shapes, model, VOCAB)
    assert "a row of 70 tokens alone differs" in said
    assert check.shapes(model, VOCAB, max_len=50)


def test_padding_of_long_texts_is_masked(latent):
    "Whoever drops the mask of causality drops that of padding as well."
    only = latent(lambda t, s: False)
    kept = mla.LatentAttention._attend

    def deaf(self, q, k, v, need_weights, kwargs):
        if q.shape[2] >= 128:
            t = torch.arange(q.shape[2])
            kwargs = dict(mask=(t <= t[:, None])[None, None])
        return kept(self, q, k, v, need_weights, kwargs)

    mla.LatentAttention._attend = deaf
    assert check.causal(only, VOCAB)
    said = caught(check.padding, only, VOCAB)
    assert "of 160 tokens, padded on the left, moved" in said
    assert check.padding(only, VOCAB, max_len=120)


def test_how_long_a_long_text_is():
    def length(n_parameters, vocab_size, max_len):
        return long_text_len(
            [torch.empty(n_parameters, device="meta")], vocab_size, max_len
        )

    assert length(10**6, 1000, 4096) == 1024
    assert length(10**6, 1000, 700) == 700
    assert length(2**25, 1000, 4096) == 512  # a pass must not take minutes
    assert length(2**40, 1000, 4096) == 256
    assert length(10**6, 2**15, 4096) == 512  # nor logits fill the memory
    assert length(10**6, 2**20, 4096) == 256
    assert length(2**40, 2**20, 30) == 30
    assert length(10**6, 1000, None) == 0


def test_a_report_says_how_long_its_texts_were():
    class Counts(MiniGPT):
        def forward(self, ids):
            given.append(tuple(ids.shape))
            return super().forward(ids)

    given = []
    model = Counts(VOCAB, d_model=8, n_layers=1, n_heads=2, max_len=1100)
    model.max_len = 1100
    assert "1 × 1024 tokens" in str(check.causal(model, VOCAB))
    assert given.count((1, 1024)) == 3
    assert "long" not in dict(check.causal(model, VOCAB, seq_len=12).notes)
    assert "1 × 90 tokens" in str(check.causal(model, VOCAB, seq_len=12, max_len=90))
    for judge in (check.causal, check.shapes, check.padding):
        said = " ".join(str(judge(lambda ids: model(ids), VOCAB)).split())
        assert "long none: pass max_len=" in said
    small = MiniGPT(VOCAB, d_model=8, n_layers=1, n_heads=2, max_len=12)
    small.max_len = 12
    assert "longer" not in str(check.causal(small, VOCAB))


def test_a_leak_of_a_library_is_seen_and_the_record_is_kept(monkeypatch):
    "The pinned version is sound, as the record says; without the mask it is not."
    hf = pytest.importorskip("transformers")
    from transformers.models.roformer import modeling_roformer

    leak = load_experiment("public_leak")
    kept = {
        row["model"]: row["found"]
        for row in load_record("public_leak")
        if row["transformers"] == hf.__version__
    }
    sound = {"found": False, "module": ""}
    for name, options in (leak.LEAKED | leak.SOUND).items():
        assert leak.judge(name, options) == sound and kept[name] == "False"
    monkeypatch.setattr(
        modeling_roformer,
        "create_causal_mask",
        modeling_roformer.create_bidirectional_mask,
    )
    name = "RoFormerForCausalLM"
    assert leak.judge(name, leak.LEAKED[name]) == {
        "found": True,
        "module": "roformer.encoder.layer.0.attention.self",
    }


def test_the_page_of_the_route_shows_true_reports(capsys):
    "Its code, run in order, prints what stands below it."
    text = (ROOT / "book" / "routes" / "check.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", text, re.M | re.S)
    assert [kind for kind, _ in blocks] == ["python", "text"] * 2
    names = {}
    for (_, code), (_, shown) in zip(blocks[::2], blocks[1::2], strict=True):
        exec(code, names)
        assert capsys.readouterr().out == shown
