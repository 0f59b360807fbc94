"""Compare the parts with their peers: python tests/bench/bench_parts.py

The peers are PyTorch's and transformers' own layers and functions.
Every row is a ratio of two things that hold equal weights and run in turn in
this process: the median, over the rounds, of our processor time divided by
the peer's. A sample repeats its call until it takes 20 ms. Before anything is
timed, both must have computed the same numbers, gradients included: a row
whose two sides differ stops the program. "forward" runs without gradients
and in eval mode, as in use; "and backward" runs forward and backward in
training mode with a dropout of 0. Where it can be, both sides read the very
same tensors, and freed memory is kept for both. Rows without a target are
there to be known. One thread, unless --threads tells otherwise.

--quick           small sizes, one round: that everything runs, not how fast
--only WORD       only the rows whose section holds the word
--threads N       threads of PyTorch (then the processor time of all of them)
"""

import argparse
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import DynamicCache, GPT2Config, LlamaConfig, T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.marian.modeling_marian import (
    MarianSinusoidalPositionalEmbedding,
)
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.wav2vec2_bert.modeling_wav2vec2_bert import (
    _apply_relative_key_position_encoding as wav2vec2_bert_bias,
)

sys.path.insert(0, str(Path(__file__).parent))
import timing
from tformer.nn import feed_forward, layers, norms
from tformer.nn.attention import CrossAttention, SelfAttention
from tformer.nn.attention_backends import fused_attend
from tformer.nn.embedding import (
    Embedding,
    LearnedPositionEmbedding,
    SinusoidalPositionEmbedding,
)
from tformer.nn.functional import attend, softmax
from tformer.nn.kv_cache import DynamicLayerCache
from tformer.nn.positions import Positions
from tformer.nn.relative_bias import ALiBi, ShawRelativePositions, T5RelativeBias
from tformer.nn.rotary import RotaryEmbedding

TARGET = 1.05
SAMPLE = 0.02  # seconds of processor time in one sample
BUDGET = 1.2  # seconds of all samples of a row, if seven fit into it


@dataclass
class Size:
    "One shape that everything is measured at."

    b: int  # rows
    t: int  # tokens in a row
    d: int  # d_model
    h: int  # heads

    def __str__(self):
        return f"{self.b} x {self.t} x {self.d}"


SIZES = [Size(8, 128, 256, 8), Size(4, 512, 512, 8)]
SMALL = [Size(2, 16, 32, 4)]


def same(ours):
    return ours


@dataclass
class Case:
    "Two functions of the same inputs that should compute the same."

    name: str
    ours: Callable
    peer: Callable
    inputs: tuple = ()
    modules: tuple = ()  # whose mode is switched: ours and the peer's
    leaves: tuple = ((), ())  # parameters, ours and the peer's, that match
    align: Callable = same  # our [output, *gradients] as the peer's are
    target: float | None = TARGET
    forward: bool = True
    backward: bool = True
    seed: int | None = None  # for what draws random numbers
    finely: bool = False  # many short samples, for what is short
    within: float = 1e-5  # how far the two sides may differ
    note: str = ""


# both sides


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def fill(module, std=0.1):
    "Weights of this standard deviation, norms away from 1."
    for i, (name, p) in enumerate(sorted(module.named_parameters())):
        norm = p.ndim == 1 and name.endswith("weight")
        p.copy_(std * randn(*p.shape, seed=i) + (1 if norm else 0))
    return module


def share(ours, peer, pairs=None):
    """Fill ours, give the peer the same tensors, and the case its fields.

    The very same, as where a table lies in memory decides how fast it is
    read. ``pairs`` are matching names; None: in the order of definition.
    """
    a = dict(fill(ours).named_parameters())
    b = dict(peer.named_parameters())
    pairs = list(zip(a, b, strict=True)) if pairs is None else pairs
    assert len(pairs) == len(a) == len(b), (list(a), list(b))
    for x, y in pairs:
        assert a[x].shape == b[y].shape, (x, y)
        owner, _, name = y.rpartition(".")
        setattr(peer.get_submodule(owner), name, a[x])
    leaves = tuple(a[x] for x, _ in pairs)
    return dict(modules=(ours, peer), leaves=(leaves, leaves))


def floats(tensors):
    return [x.requires_grad_() for x in tensors if x.is_floating_point()]


def with_seed(case, function):
    def run(*inputs):
        torch.manual_seed(case.seed)
        return function(*inputs)

    return run if case.seed is not None else function


def forward(function, inputs):
    def run():
        with torch.no_grad():
            return function(*inputs)

    return run


def both_ways(function, inputs, leaves):
    leaves = [*floats(inputs), *leaves]
    upstream = []

    def run():
        y = as_list(function(*inputs))
        if not upstream:
            upstream.extend(randn(*x.shape, seed=9).to(x) for x in y)
        return [*y, *torch.autograd.grad(y, leaves, upstream)]

    return run


def as_list(result):
    return list(result) if isinstance(result, (list, tuple)) else [result]


def apart(ours, peers):
    "The largest difference, relative to the largest number, at least 1."
    worst = 0.0
    for a, b in zip(ours, peers, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{tuple(a.shape)} {a.dtype}, {tuple(b.shape)} {b.dtype}"
        b = b.detach()
        worst = max(
            worst, ((a.detach() - b).abs().max() / b.abs().max().clamp(min=1)).item()
        )
    return worst


def ratio(ours, peer, finely=False):
    "The median of our time / the peer's, and the medians of both, per call."
    sample, most = (SAMPLE / 4, 150) if finely else (SAMPLE, 25)
    ways = {
        name: timing.repeated(f, sample) for name, f in (("ours", ours), ("peer", peer))
    }
    first = sum(timing.once(f, time.process_time)[0] for f, _ in ways.values())
    rounds = max(7, min(most, int(BUDGET / first)))
    gc.collect()
    gc.disable()
    try:
        times = timing.rounds_of(
            {k: f for k, (f, _) in ways.items()}, rounds, time.process_time
        )
    finally:
        gc.enable()
    each = {k: [t / ways[k][1] for t in v] for k, v in times.items()}
    return (
        median(a / b for a, b in zip(each["ours"], each["peer"], strict=True)),
        median(each["ours"]),
        median(each["peer"]),
    )


FAILED = []


def compare(case, label, ours, peer, aligned):
    difference = apart(aligned(as_list(ours())), as_list(peer()))
    if not (isinstance(difference, float) and difference <= case.within):
        raise AssertionError(
            f"{case.name}, {label}: the two sides differ: {difference}"
        )
    value, a, b = ratio(ours, peer, case.finely)
    name = f"{case.name}, {label}"
    timing.row(
        name,
        value,
        case.target and (timing.AT_MOST, case.target),
        f"{1e6 * a:,.1f} / {1e6 * b:,.1f} µs; "
        f"values within {difference:.0e}" + (f"; {case.note}" if case.note else ""),
    )
    if case.target is not None and not timing.quick and value > case.target:
        FAILED.append((name, value))


def measure(case):
    ours = with_seed(case, case.ours)
    peer = with_seed(case, case.peer)
    for module in case.modules:
        module.eval()
    if case.forward:
        compare(
            case,
            "forward",
            forward(ours, case.inputs),
            forward(peer, case.inputs),
            case.align,
        )
    if case.backward:
        for module in case.modules:
            module.train()
        compare(
            case,
            "and backward",
            both_ways(ours, case.inputs, case.leaves[0]),
            both_ways(peer, case.inputs, case.leaves[1]),
            case.align,
        )


# what is compared


def ids_of(size, vocab):
    return torch.randint(
        vocab, (size.b, size.t), generator=torch.Generator().manual_seed(3)
    )


def positions(size):
    return torch.arange(size.t)[None].expand(size.b, -1).contiguous()


def stream(size, seed=1):
    return randn(size.b, size.t, size.d, seed=seed)


def bench_embedding(size):
    vocab = 100 if timing.quick else 8192
    ours = Embedding(vocab, size.d)
    peer = nn.Embedding(vocab, size.d)
    yield Case(
        "Embedding / nn.Embedding",
        ours,
        peer,
        (ids_of(size, vocab),),
        **share(ours, peer),
    )


def bench_positions(size):
    pos = positions(size)
    n = 2 * size.t
    marian = MarianSinusoidalPositionalEmbedding(n, size.d)
    with torch.no_grad():
        marian.weight.copy_(marian.create_weight())
    yield Case(
        "SinusoidalPositionEmbedding / Marian",
        SinusoidalPositionEmbedding(n, size.d),
        lambda pos: marian(None, position_ids=pos),
        (pos,),
        align=lambda r: [torch.cat([r[0][..., ::2], r[0][..., 1::2]], -1)],
        backward=False,
    )
    ours = LearnedPositionEmbedding(n, size.d)
    peer = nn.Embedding(n, size.d)
    yield Case(
        "LearnedPositionEmbedding / nn.Embedding",
        ours,
        peer,
        (pos,),
        **share(ours, peer),
    )


def heads(size, n, t=None, seed=0):
    return [
        randn(size.b, size.h, t or size.t, size.d // size.h, seed=seed + i)
        for i in range(n)
    ]


def llama_config(size, **options):
    config = LlamaConfig(
        hidden_size=size.d,
        num_attention_heads=size.h,
        num_key_value_heads=size.h,
        head_dim=size.d // size.h,
        num_hidden_layers=1,
        max_position_embeddings=2048,
        intermediate_size=4 * size.d,
        **options,
    )
    config._attn_implementation = "sdpa"
    return config


def bench_rotary(size):
    pos = positions(size)
    ours = RotaryEmbedding(size.d // size.h)
    rope = LlamaRotaryEmbedding(llama_config(size))
    q, k = heads(size, 2)

    yield Case(
        "RotaryEmbedding of q and k / Llama",
        lambda q, k: ours(q, k, positions=pos),
        lambda q, k: apply_rotary_pos_emb(q, k, *rope(q, pos)),
        (q, k),
    )
    q = q.bfloat16()
    k = k.bfloat16()
    exact, _ = ours(q.double(), k.double(), positions=pos)
    off = [
        (y.double() - exact).abs().max().item()
        for y in (
            ours(q, positions=pos)[0],
            apply_rotary_pos_emb(q, k, *rope(q, pos))[0],
        )
    ]
    yield Case(
        "RotaryEmbedding, bfloat16 / Llama",
        lambda q, k: ours(q, k, positions=pos),
        lambda q, k: apply_rotary_pos_emb(q, k, *rope(q, pos)),
        (q, k),
        target=1.0,
        within=2**-5,
        note=f"off by {off[0]:.3f} / {off[1]:.3f}",
    )


class ShawPeer(nn.Module):
    "What the function of transformers reads of its layer."

    def __init__(self, d_head, far):
        super().__init__()
        self.distance_embedding = nn.Embedding(2 * far + 1, d_head)
        self.left_max_position_embeddings = far
        self.right_max_position_embeddings = far
        self.scaling = d_head**-0.5


def bench_shaw(size):
    # as in Shaw et al. (2018)
    pos = torch.arange(size.t)[None]
    far = 16
    q, k = heads(size, 2)
    ours = ShawRelativePositions(size.d // size.h, far)
    ours.value_table.requires_grad_(False)
    peer = ShawPeer(size.d // size.h, far)
    table = fill(ours).key_table
    peer.distance_embedding.weight = table
    yield Case(
        "ShawRelativePositions.score_bias / Wav2Vec2-BERT",
        lambda q: ours.score_bias(q, pos, pos),
        lambda q: wav2vec2_bert_bias(peer, q, k)[1],
        (q,),
        leaves=((table,), (table,)),
    )


def bench_biases(size):
    config = T5Config(d_model=size.d, num_heads=size.h, d_kv=size.d // size.h)
    pos = torch.arange(size.t)[None]
    for causal in (False, True):
        config.is_decoder = causal
        t5 = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
        ours = T5RelativeBias(size.h, causal=causal)
        fields = share(ours, t5.relative_attention_bias)
        yield Case(
            f"T5RelativeBias{', causal' if causal else ''} / T5",
            lambda m=ours: m(pos, pos),
            lambda m=t5: m.compute_bias(size.t, size.t),
            **fields,
        )
    n = size.t
    yield Case(
        "ALiBi, one query / BLOOM",
        ALiBi(size.h),
        lambda pos, key_pos: build_alibi_tensor(
            torch.ones(key_pos.shape, dtype=torch.long), size.h, torch.float32
        ),
        (torch.full((size.b, 1), n - 1), positions(Size(size.b, n, 0, 0))),
        # BLOOM's is the same up to a constant in every row
        align=lambda r: [r[0].flatten(0, 1) - r[0].flatten(0, 1)[..., :1]],
        backward=False,
    )


def bench_layers(size):
    x = stream(size)
    for bias in (True, False):
        ours = layers.Linear(size.d, size.d, bias=bias)
        peer = nn.Linear(size.d, size.d, bias=bias)
        yield Case(
            f"Linear{'' if bias else ', no bias'} / nn.Linear",
            ours,
            peer,
            (x,),
            **share(ours, peer),
        )
    for name, peer in (
        ("LayerNorm / nn.LayerNorm", nn.LayerNorm(size.d)),
        ("RMSNorm / nn.RMSNorm", nn.RMSNorm(size.d, eps=1e-6)),
        ("RMSNorm / LlamaRMSNorm", LlamaRMSNorm(size.d)),
    ):
        ours = getattr(norms, name.split()[0])(size.d)
        yield Case(name, ours, peer, (x,), **share(ours, peer))
    ours = layers.Dropout(0.1)
    peer = nn.Dropout(0.1)
    yield Case(
        "Dropout / nn.Dropout", ours, peer, (x,), (ours, peer), seed=0, forward=False
    )


def bench_written_out(size):
    x = stream(size)
    w = randn(size.d)
    b = randn(size.d)
    note = "the form that is read"
    for name, ours, peer in (
        (
            "layer_norm / F.layer_norm",
            lambda x: norms.layer_norm(x, w, b),
            lambda x: F.layer_norm(x, w.shape, w, b),
        ),
        (
            "rms_norm / F.rms_norm",
            lambda x: norms.rms_norm(x, w),
            lambda x: F.rms_norm(x, w.shape, w, 1e-6),
        ),
        ("relu / F.relu", feed_forward.relu, F.relu),
        ("gelu / F.gelu", feed_forward.gelu, F.gelu),
        (
            "gelu_tanh / F.gelu, tanh",
            feed_forward.gelu_tanh,
            lambda x: F.gelu(x, approximate="tanh"),
        ),
        ("silu / F.silu", feed_forward.silu, F.silu),
        ("softmax / torch.softmax", softmax, lambda x: torch.softmax(x, -1)),
    ):
        yield Case(name, ours, peer, (x,), target=None, note=note)


def bench_activations(size):
    x = stream(size)
    for name, peer in (
        ("relu", nn.ReLU()),
        ("gelu", nn.GELU()),
        ("gelu_tanh", nn.GELU(approximate="tanh")),
        ("silu", nn.SiLU()),
    ):
        yield Case(
            f"ACTIVATIONS, {name} / nn", feed_forward.ACTIVATIONS[name], peer, (x,)
        )


@torch.no_grad()
def turn_weights(gpt2):
    for layer in (gpt2.c_fc, gpt2.c_proj):
        layer.weight = nn.Parameter(layer.weight.mT.contiguous())


def bench_feedforward(size):
    x = stream(size)
    d_ff = 4 * size.d
    ours = feed_forward.FeedForward(size.d, d_ff)
    peer = nn.Sequential(nn.Linear(size.d, d_ff), nn.ReLU(), nn.Linear(d_ff, size.d))
    yield Case(
        "FeedForward, relu / nn.Sequential", ours, peer, (x,), **share(ours, peer)
    )
    ours = feed_forward.FeedForward(size.d, d_ff, activation="gelu_tanh")
    gpt2 = GPT2MLP(d_ff, GPT2Config(n_embd=size.d, resid_pdrop=0.0))
    turn_weights(gpt2)  # GPT-2 keeps them the other way round
    fields = share(ours, gpt2)
    turn_weights(gpt2)
    fields["leaves"] = (fields["leaves"][0], tuple(gpt2.parameters()))
    fields["align"] = lambda r: [x.mT if i in (2, 4) else x for i, x in enumerate(r)]
    yield Case("FeedForward, gelu_tanh / GPT2MLP", ours, gpt2, (x,), **fields)
    ours = feed_forward.GatedFeedForward(size.d, d_ff)
    peer = LlamaMLP(llama_config(size))
    yield Case("GatedFeedForward / LlamaMLP", ours, peer, (x,), **share(ours, peer))


def attention_pairs(ours, peer):
    """Fill our attention, copy it into PyTorch's: the case's fields.

    PyTorch packs q, k and v into one matrix where their widths agree.
    """
    fill(ours)
    a = dict(ours.named_parameters())
    b = dict(peer.named_parameters())
    with torch.no_grad():
        for kind in ("weight", "bias"):
            whole = (
                a[f"qkv_proj.{kind}"]
                if f"qkv_proj.{kind}" in a
                else torch.cat([a[f"{n}_proj.{kind}"] for n in "qkv"])
            )
            b[f"in_proj_{kind}"].copy_(whole)
            b[f"out_proj.{kind}"].copy_(a[f"o_proj.{kind}"])
    names = [
        n for n in ("qkv_proj", "q_proj", "k_proj", "v_proj") if f"{n}.weight" in a
    ]

    def align(result):
        "[y, gradients of inputs…, weights…, biases…, of o_proj two]."
        n = len(names)
        start = len(result) - 2 * len(names) - 2
        if len(result) == 1:
            return result
        return [
            *result[:start],
            torch.cat(result[start : start + n]),
            torch.cat(result[start + n : start + 2 * n]),
            *result[-2:],
        ]

    ours_leaves = [a[f"{n}.{kind}"] for kind in ("weight", "bias") for n in names]
    ours_leaves += [a["o_proj.weight"], a["o_proj.bias"]]
    return dict(
        modules=(ours, peer),
        align=align,
        leaves=(
            tuple(ours_leaves),
            tuple(
                b[n]
                for n in (
                    "in_proj_weight",
                    "in_proj_bias",
                    "out_proj.weight",
                    "out_proj.bias",
                )
            ),
        ),
    )


def padded(size):
    "Positions whose rows end in padding, and True where padding is."
    pos = positions(size)
    length = size.t - size.t // 8 * torch.arange(size.b) % (size.t // 2)
    return torch.where(pos < length[:, None], pos, -1), pos >= length[:, None]


def bench_attention(size):
    x = stream(size)
    memory = stream(size, 2)
    future = torch.ones(size.t, size.t, dtype=torch.bool).triu(1)
    pos, padding = padded(size)
    for fused in (False, True):
        how = "fused" if fused else "apart"

        def pair(cls=SelfAttention, **options):
            if cls is SelfAttention:
                options["fused_qkv"] = fused
            ours = cls(size.d, size.h, **options)
            peer = nn.MultiheadAttention(size.d, size.h, batch_first=True)
            return ours, peer, attention_pairs(ours, peer)

        ours, peer, fields = pair()
        yield Case(
            f"attention, {how} / nn.Multihead…",
            ours,
            lambda x, m=peer: m(x, x, x, need_weights=False)[0],
            (x,),
            **fields,
        )
        ours, peer, fields = pair(causal=True)
        yield Case(
            f"attention, {how}, causal / nn.…",
            ours,
            lambda x, m=peer: m(
                x, x, x, attn_mask=future, is_causal=True, need_weights=False
            )[0],
            (x,),
            **fields,
        )
        ours, peer, fields = pair()
        keep = ~padding[..., None]

        def run(x, m=ours):
            return m(x, positions=pos) * keep

        def peers(x, m=peer):
            return m(x, x, x, key_padding_mask=padding, need_weights=False)[0] * keep

        yield Case(f"attention, {how}, padded / nn.…", run, peers, (x,), **fields)
        if not fused:
            ours, peer, fields = pair(CrossAttention)
            yield Case(
                f"attention, {how}, cross / nn.…",
                lambda x, y, m=ours: m(x, encoder_hidden_states=y),
                lambda x, y, m=peer: m(x, y, y, need_weights=False)[0],
                (x, memory),
                **fields,
            )
    ours = SelfAttention(size.d, size.h)
    peer = nn.MultiheadAttention(size.d, size.h, batch_first=True)
    yield Case(
        "attention and weights / nn.…",
        lambda x, m=ours: m(x, need_weights=True)[0],
        lambda x, m=peer: m(x, x, x, average_attn_weights=False)[0],
        (x,),
        target=None,
        note="the explicit path",
        **attention_pairs(ours, peer),
    )


def bench_llama_attention(size):
    x = stream(size)
    pos = positions(size)
    config = llama_config(size)
    rope = LlamaRotaryEmbedding(config)
    peer = LlamaAttention(config, 0)
    ours = SelfAttention(
        size.d,
        size.h,
        bias=False,
        causal=True,
        rotary=RotaryEmbedding(size.d // size.h),
    )
    fields = share(ours, peer)
    yield Case(
        "attention, rotary / LlamaAttention",
        ours,
        lambda x: peer(x, rope(x, pos))[0],
        (x,),
        **fields,
    )


def bench_kernels(size):
    q, k, v = heads(size, 3)
    mask = padded(size)[0][:, None, None, :] >= 0
    for name, ours, peer in (
        ("fused_attend / SDPA", fused_attend, F.scaled_dot_product_attention),
        (
            "fused_attend, causal / SDPA",
            lambda q, k, v: fused_attend(q, k, v, causal=True),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ),
        (
            "fused_attend, mask / SDPA",
            lambda q, k, v: fused_attend(q, k, v, mask=mask),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        ),
    ):
        yield Case(name, ours, peer, (q, k, v))
    few_k, few_v = (x[:, ::4].contiguous() for x in (k, v))
    yield Case(
        "fused_attend, mask, grouped / SDPA of repeated keys",
        lambda q, k, v: fused_attend(q, k, v, mask=mask),
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1), attn_mask=mask
        ),
        (q, few_k, few_v),
    )
    yield Case(
        "attend / SDPA",
        lambda q, k, v: attend(q, k, v)[0],
        F.scaled_dot_product_attention,
        (q, k, v),
        target=None,
        note="the form that is read",
    )


class Block(nn.Module):
    "A layer of a Transformer from our parts, in PyTorch's order."

    def __init__(self, size, wrap, activation):
        super().__init__()
        self.attention = wrap(
            norms.LayerNorm(size.d), SelfAttention(size.d, size.h, fused_qkv=True)
        )
        self.feed = wrap(
            norms.LayerNorm(size.d),
            feed_forward.FeedForward(size.d, 4 * size.d, activation=activation),
        )

    def forward(self, x):
        return self.feed(self.attention(x))


def bench_blocks(size):
    x = stream(size)
    for wrap, first in ((layers.PreNorm, True), (layers.PostNorm, False)):
        ours = Block(size, wrap, "gelu")
        peer = nn.TransformerEncoderLayer(
            size.d,
            size.h,
            4 * size.d,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=first,
        )
        pairs = [
            (f"{ours_name}.{kind}", peer_name + kind)
            for ours_name, peer_name in (
                ("attention.norm", "norm1."),
                ("attention.sublayer.qkv_proj", "self_attn.in_proj_"),
                ("attention.sublayer.o_proj", "self_attn.out_proj."),
                ("feed.norm", "norm2."),
                ("feed.sublayer.up_proj", "linear1."),
                ("feed.sublayer.down_proj", "linear2."),
            )
            for kind in ("weight", "bias")
        ]
        yield Case(
            f"{wrap.__name__} block / nn.…EncoderLayer",
            ours,
            peer,
            (x,),
            **share(ours, peer, pairs),
        )


# the cache: a sample is many tokens, each added to what was kept


def updates(make, update, old, new):
    "Fill a new cache with `old`, then add the tokens of `new` one by one."

    def run():
        with torch.no_grad():
            cache = make()
            update(cache, *old)
            for token in new:
                result = update(cache, *token)
        return list(result)

    return run


def bench_cache(size):
    n = 4 if timing.quick else 32
    b = 1
    s = size.t
    k, v = heads(Size(b, s, size.d, size.h), 2)
    tokens = [(*heads(Size(b, 1, size.d, size.h), 2, seed=i), s + i) for i in range(n)]
    old = (k, v, 0)

    def ours_update(cache, k, v, start):
        positions = Positions(start=start, length=k.shape[-2])
        return cache.update(k, v, positions=positions)[:2]

    def peer_update(cache, k, v, start):
        return cache.update(k, v, 0)

    note = f"the first {s} tokens at once, then {n} one by one; one row"
    update = updates(DynamicLayerCache, ours_update, old, tokens)
    case = Case(
        "DynamicLayerCache.update / DynamicCache", None, None, target=None, note=note
    )
    compare(
        case,
        "of k and v",
        update,
        updates(DynamicCache, peer_update, old, tokens),
        same,
    )

    config = llama_config(size)
    rope = LlamaRotaryEmbedding(config)
    peer = LlamaAttention(config, 0).eval()
    ours = SelfAttention(
        size.d,
        size.h,
        bias=False,
        causal=True,
        rotary=RotaryEmbedding(size.d // size.h),
    ).eval()
    share(ours, peer)
    x = 0.5 * randn(b, s + n, size.d, seed=5)
    pieces = [(x[:, s + i : s + i + 1], torch.full((b, 1), s + i)) for i in range(n)]

    def our_step(cache, x, positions):
        return [ours(x, cache=cache)]

    def peer_step(cache, x, positions):
        return [peer(x, rope(x, positions), past_key_values=cache)[0]]

    first = (x[:, :s], torch.arange(s)[None])
    step = updates(DynamicLayerCache, our_step, first, pieces)
    case = Case("cached decoding / LlamaAttention", None, None, target=None, note=note)
    compare(
        case, "a layer", step, updates(DynamicCache, peer_step, first, pieces), same
    )
    alone = updates(DynamicLayerCache, our_step, first, [pieces[0]])
    few = updates(DynamicLayerCache, ours_update, old, tokens[:1])
    times = {
        name: timing.repeated(f, SAMPLE)
        for name, f in (
            ("step", step),
            ("update", update),
            ("one", alone),
            ("few", few),
        )
    }
    t = timing.in_turn({k: f for k, (f, _) in times.items()}, 15, time.process_time)
    t = {k: v / times[k][1] for k, v in t.items()}
    a = (t["update"] - t["few"]) / (n - 1)
    b = (t["step"] - t["one"]) / (n - 1)
    timing.row(
        "DynamicLayerCache.update / a decoding step",
        a / b,
        None,
        f"{1e6 * a:,.1f} µs of {1e6 * b:,.1f} µs per token, about "
        f"{s + n // 2} tokens kept",
    )


BENCHES = [
    bench_embedding,
    bench_positions,
    bench_rotary,
    bench_shaw,
    bench_biases,
    bench_layers,
    bench_activations,
    bench_feedforward,
    bench_blocks,
    bench_attention,
    bench_llama_attention,
    bench_kernels,
    bench_cache,
    bench_written_out,
]


def run(doc, benches, sizes, title, each):
    "Read the options, and measure `each` of what every bench makes."
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    timing.quick = options.quick
    timing.keep_memory()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    print(
        f"processor time, ours / peer, in float32; {options.threads} "
        f"thread of {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
        f"torch {torch.__version__}, transformers "
        f"{transformers.__version__}, Python {sys.version.split()[0]}"
    )
    start = time.perf_counter()
    for size in SMALL if options.quick else sizes:
        timing.head(title(size))
        for bench in benches:
            if options.only in bench.__name__:
                for made in bench(size) or ():
                    each(made)
    print(
        f"\n{time.perf_counter() - start:.0f} s; rows that miss their "
        f"target: {len(FAILED)}"
    )
    for name, value in FAILED:
        print(f"  {value:.2f} x  {name}")


def main():
    run(
        __doc__,
        BENCHES,
        SIZES,
        lambda size: f"{size} (rows, tokens, d_model), {size.h} heads",
        measure,
    )


if __name__ == "__main__":
    main()
