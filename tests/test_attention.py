"""Multi-head attention and its cache, against PyTorch and by their laws."""

import copy
import csv
import itertools
import math
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

import helpers
from conftest import ROOT, run
from helpers import close, generator, plain_only, spread
from tformer.models.mini_gpt import load_record
from tformer.nn import attention, attention_backends
from tformer.nn.attention import (
    CrossAttention,
    MultiHeadAttention,
    SelfAttention,
    build_mask,
    mask_kwargs,
    merge_heads,
    split_heads,
)
from tformer.nn.attention_backends import (
    eager_attend,
    fused_attend,
    online_softmax_attend,
    online_softmax_update,
    repeat_kv,
)
from tformer.nn.functional import attend, causal_mask, padding_mask
from tformer.nn.kv_cache import (
    CrossAttentionCache,
    DynamicLayerCache,
    KVCache,
    LayerCacheBase,
)
from tformer.nn.norms import RMSNorm
from tformer.nn.positions import AttentionContext, Positions
from tformer.nn.relative_bias import ALiBi, T5RelativeBias
from tformer.nn.rotary import RotaryEmbedding

quick = settings(max_examples=30, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
both_types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
both_paths = pytest.mark.parametrize("fused", [True, False])


def randn(*shape, seed=0, dtype=torch.float32):
    return helpers.randn(*shape, seed=seed).to(dtype)


def some_mask(*shape, seed=0, empty=None):
    mask = torch.rand(*shape, generator=generator(seed)) < 0.6
    mask[..., 0] |= True
    if empty is not None:
        mask[..., empty, :] = False
    return mask


def layer(d_model=16, n_heads=4, std=0.1, **options):
    return spread(SelfAttention(d_model, n_heads, **options), std)


def cross(d_model=16, n_heads=4, std=0.1, **options):
    return spread(CrossAttention(d_model, n_heads, **options), std)


def new_cache(n=1):
    return KVCache([DynamicLayerCache() for _ in range(n)])


def near(ours, reference):
    "Equal within the rounding of the type."
    close(ours, reference, 1e-5 if ours.dtype == torch.float32 else 2e-2)


def pull(y, inputs):
    "Gradients of a sum in which no two outputs count alike."
    tilt = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
    return torch.autograd.grad((y * tilt).sum(), inputs, retain_graph=True)


# heads


def test_heads_are_runs_of_consecutive_features():
    x = randn(2, 5, 12)
    heads = split_heads(x, 3)
    assert heads.shape == (2, 3, 5, 4)
    for i in range(3):
        assert torch.equal(heads[:, i], x[..., 4 * i : 4 * i + 4])
    assert torch.equal(merge_heads(heads), x)
    assert torch.equal(merge_heads(heads), torch.cat(heads.unbind(1), -1))


@pytest.mark.parametrize("kv, n", [(1, 4), (2, 3), (3, 1), (2, 2)])
def test_repeated_heads_are_consecutive(kv, n):
    x = randn(2, kv, 5, 4)
    ours = repeat_kv(x, n)
    assert torch.equal(ours, x.repeat_interleave(n, 1))
    for i in range(kv * n):
        assert torch.equal(ours[:, i], x[:, i // n])


class Largest(TorchDispatchMode):
    "Keeps the size of the largest tensor that an operation returns."

    size = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.size = max(self.size, out.numel())
        return out


@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_shared_keys_are_not_copied(t, masked):
    "Nor are values: no tensor has as many numbers as they would repeated."
    q = randn(2, 8, t, 4)
    k, v = (randn(2, 2, 50, 4, seed=seed) for seed in (1, 2))
    mask = some_mask(2, 1, t, 50, seed=3, empty=0) if masked else None
    with torch.no_grad(), Largest() as seen:
        out = fused_attend(q, k, v, mask)
    assert seen.size < 2 * 8 * 50 * 4
    expected, _ = attend(q, repeat_kv(k, 4), repeat_kv(v, 4), mask)
    close(out, expected)


# the explicit path, the fused path, the loop over blocks

HOWS = {
    "plain": {},
    "causal": dict(causal=True),
    "scale": dict(scale=0.3),
    "mask": dict(mask=some_mask(2, 1, 6, 6, empty=2)),
    "mask per head": dict(mask=some_mask(2, 4, 6, 6, seed=1, empty=0)),
    "mask of all axes": dict(mask=some_mask(1, 1, 6, 6, empty=5)),
    "mask of one axis": dict(mask=some_mask(6)),
    "mask of keys": dict(mask=some_mask(2, 1, 1, 6)),
    "mask of queries": dict(mask=some_mask(1, 1, 6, 1, seed=3, empty=1)),
    "mask of all": dict(mask=torch.zeros(1, 1, 1, 1).bool()),
    "mask, causal": dict(mask=some_mask(1, 1, 6, 6, seed=2, empty=3), causal=True),
    "mask, scale": dict(mask=some_mask(2, 1, 6, 6, seed=4, empty=2), scale=0.9),
    "bias, causal": dict(bias=randn(4, 6, 6, seed=7), causal=True),
    "bias, mask, scale": dict(
        bias=randn(4, 6, 6, seed=6),
        scale=0.6,
        mask=some_mask(2, 4, 6, 6, seed=5, empty=0),
    ),
    "bias": dict(bias=randn(4, 6, 6, seed=9)),
    "bias of one axis": dict(bias=randn(6, seed=9)),
    "bias, float64": dict(bias=randn(1, 1, 6, 6, dtype=torch.float64)),
    "bias, empty rows": dict(
        bias=torch.zeros(6, 6).index_fill(0, torch.tensor([4]), -math.inf)
    ),
    "bias, mask, causal": dict(
        bias=randn(2, 4, 6, 6, seed=8), causal=True, mask=some_mask(2, 1, 6, 6, empty=1)
    ),
}


def qkv(t=6, s=6, d=8, d_v=8, kv=4, seed=0, dtype=torch.float32):
    return [
        randn(2, *size, seed=seed + i, dtype=dtype).requires_grad_()
        for i, size in enumerate(((4, t, d), (kv, s, d), (kv, s, d_v)))
    ]


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
@pytest.mark.parametrize("kv, d_v", [(4, 8), (4, 5), (2, 8), (1, 3)])
@both_types
def test_both_paths_agree(how, kv, d_v, dtype):
    x = qkv(kv=kv, d_v=d_v, dtype=dtype)
    out, weights = eager_attend(*x, **how)
    fused = fused_attend(*x, **how)
    assert weights.dtype == torch.float32 and fused.dtype == dtype
    near(fused, out)
    empty = (weights == 0).all(-1)
    assert (fused[empty] == 0).all() and (out[empty] == 0).all()
    for a, b in zip(pull(fused, x), pull(out, x), strict=True):
        assert a.isfinite().all()
        near(a, b)
    assert (pull(fused, x[:1])[0][empty] == 0).all()


def test_eager_attend_is_attend_head_by_head():
    q, k, v = qkv(t=5, s=7, d_v=3, kv=2)
    mask = some_mask(2, 4, 5, 7, empty=2)
    bias = randn(2, 4, 5, 7, seed=5)
    out, weights = eager_attend(q, k, v, mask, bias, 0.4)
    for i in range(4):
        o, w = attend(q[:, i], k[:, i // 2], v[:, i // 2], mask[:, i], bias[:, i], 0.4)
        assert torch.equal(out[:, i], o) and torch.equal(weights[:, i], w)


def test_causal_is_the_causal_mask():
    x = qkv()
    at = torch.arange(6)[None]
    out, weights = eager_attend(*x, mask=causal_mask(at, at))
    for path in (eager_attend, fused_attend):
        y = path(*x, causal=True)
        close(y if path is fused_attend else y[0], out)
    assert (weights.triu(1) == 0).all() and (
        weights.diagonal(dim1=-2, dim2=-1) > 0
    ).all()


DROPPED = {
    "plain": {},
    "causal": dict(causal=True),
    "mask, scale": dict(mask=some_mask(1, 1, 6, 6, empty=2), scale=2.0),
    "bias, mask, causal": dict(
        bias=randn(4, 6, 6, seed=8), causal=True, mask=some_mask(1, 4, 6, 6, empty=1)
    ),
}


@pytest.mark.parametrize("how", DROPPED.values(), ids=DROPPED)
@pytest.mark.parametrize("path", [eager_attend, fused_attend])
def test_dropout_keeps_the_mean(path, how):
    torch.manual_seed(0)
    q, k, v = (x.detach()[:1] for x in qkv())
    many = [x.expand(800, -1, -1, -1) for x in (q, k, v)]
    exact, weights = eager_attend(q, k, v, **how)
    y = path(*many, dropout=0.25, **how)
    y = y[0] if path is eager_attend else y
    assert not torch.allclose(y[0], y[1])
    assert (y.mean(0) - exact[0]).abs().max() < 0.15
    empty = (weights == 0).all(-1)[0]
    assert (y[:, empty] == 0).all()
    assert torch.equal(*(path(*many, dropout=0.0, **how)[0] for _ in range(2)))
    for left_out in how:  # what does not act would not be noticed here
        rest = {k: v for k, v in how.items() if k != left_out}
        other, _ = eager_attend(q, k, v, **rest)
        assert (other - exact).abs().max() > 0.3


@pytest.mark.parametrize("how", DROPPED.values(), ids=DROPPED)
def test_eager_dropout_under_autocast_is_in_float32(how):
    "The same draws, the same numbers: no product was made narrow."
    results = []
    for on in (False, True):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            results.append(eager_attend(*qkv(), dropout=0.4, **how))
    (plain, exact), (out, weights) = results
    assert out.dtype == weights.dtype == torch.float32
    assert torch.equal(out, plain) and torch.equal(weights, exact)
    assert not torch.allclose(out, eager_attend(*qkv(), **how)[0])


def test_weights_come_before_dropout():
    torch.manual_seed(0)
    _, weights = eager_attend(*qkv(), dropout=0.5)
    close(weights.sum(-1), torch.ones(2, 4, 6))


def test_autocast_does_not_reach_eager_attend():
    x = qkv(64, 64, 16, 16)
    plain, exact = eager_attend(*x)
    with torch.autocast("cpu", torch.bfloat16):
        out, weights = eager_attend(*x)
        m = layer(32, 4, causal=True, std=0.3)
        y, w = m(randn(2, 33, 32), need_weights=True)
    assert torch.equal(weights, exact) and torch.equal(out, plain)
    assert w.dtype == torch.float32
    assert (w.sum(-1) - 1).abs().max() < 1e-6
    near(y.bfloat16(), m(randn(2, 33, 32)).bfloat16())


def test_the_meta_device_works():
    m = SelfAttention(16, 4, causal=True, rotary=RotaryEmbedding(4)).to("meta")
    x = torch.empty(2, 5, 16, device="meta")
    cache = DynamicLayerCache()
    assert m(x).shape == (2, 5, 16)
    assert m(x, need_weights=True)[1].shape == (2, 4, 5, 5)
    positions = torch.empty(2, 5, dtype=torch.int64, device="meta")
    assert m(x, positions=positions, cache=cache).shape == (2, 5, 16)
    assert m(x, cache=cache).shape == (2, 5, 16)
    assert Positions(positions).end is None
    over = CrossAttention(16, 4).to("meta")
    assert over(x, encoder_hidden_states=x, encoder_positions=positions).shape == (
        2,
        5,
        16,
    )


@quick
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 12), seeds, st.booleans())
def test_online_equals_attend(t, s, block, seed, masked):
    q, k, v = qkv(t, s, d_v=3, seed=seed)
    mask = some_mask(2, 1, t, s, seed=seed) if masked else None
    if mask is not None:
        mask[:, :, 0] = False
    out = online_softmax_attend(30 * q, k, v, mask, block)
    expected, _ = attend(30 * q, k, v, mask)
    close(out, expected)
    for a, b in zip(pull(out, [q, k, v]), pull(expected, [q, k, v]), strict=True):
        assert a.isfinite().all()
        close(a, b)


@pytest.mark.parametrize(
    "mask", [None, some_mask(7), some_mask(5, 1)], ids=["none", "keys", "queries"]
)
@both_types
def test_online_shapes_and_types(mask, dtype):
    q, k, v = (x[0, 0] for x in qkv(5, 7, d_v=3, dtype=dtype))
    ours = online_softmax_attend(q, k, v, mask, 2)
    assert ours.dtype == dtype
    near(ours, attend(q, k, v, mask)[0])


def test_no_keys_at_all():
    q, k, v = qkv(3, 0, d_v=5)
    for out in (
        online_softmax_attend(q, k, v),
        eager_attend(q, k, v)[0],
        fused_attend(q, k, v),
    ):
        assert out.shape == (2, 4, 3, 5) and (out == 0).all()


def test_an_online_update_keeps_maximum_sum_and_mean():
    scores = randn(3, 9)
    values = randn(9, 4, seed=1)
    state = (torch.full((3, 1), -math.inf), torch.zeros(3, 1), torch.zeros(3, 4))
    for part in (slice(0, 2), slice(2, 3), slice(3, 9)):
        state = online_softmax_update(state, scores[:, part], values[part])
        seen = slice(0, part.stop)
        peak, total, mixed = state
        assert torch.equal(peak[:, 0], scores[:, seen].amax(-1))
        close(total[:, 0], (scores[:, seen] - peak).exp().sum(-1))
        close(mixed / total, scores[:, seen].softmax(-1) @ values[seen])


# masks from positions


@quick
@given(st.integers(1, 5), st.integers(1, 5), st.booleans(), seeds)
def test_built_masks_equal_loops(t, s, causal, seed):
    g = torch.Generator().manual_seed(seed)
    positions = torch.randint(-2, 6, (2, t), generator=g)
    key_positions = torch.randint(-2, 6, (2, s), generator=g)
    mask = torch.rand(2, 3, t, s, generator=g) < 0.7
    ours = build_mask(positions if causal else None, key_positions, mask, (2, 3, t, s))
    for b, h, i, j in itertools.product(*map(range, (2, 3, t, s))):
        asked = key_positions[b, j]
        assert ours[b, h, i, j] == (
            mask[b, h, i, j] and asked >= 0 and (not causal or asked <= positions[b, i])
        )


# the layer against nn.MultiheadAttention


def pair(d_encoder=None, packed=False, bias=True, over=False, **options):
    "Our layer and PyTorch's, with equal weights."
    peer = spread(
        nn.MultiheadAttention(
            16, 4, bias=bias, kdim=d_encoder, vdim=d_encoder, batch_first=True
        )
    )
    ours = (
        cross(d_encoder=d_encoder, bias=bias, **options)
        if over
        else layer(fused_qkv=packed, bias=bias, **options)
    )
    with torch.no_grad():
        parts = (peer.q_proj_weight, peer.k_proj_weight, peer.v_proj_weight)
        if peer.in_proj_weight is not None:
            parts = peer.in_proj_weight.chunk(3)
        if packed:
            ours.qkv_proj.weight.copy_(peer.in_proj_weight)
            if bias:
                ours.qkv_proj.bias.copy_(peer.in_proj_bias)
        else:
            for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
                getattr(ours, name).weight.copy_(parts[i])
                if bias:
                    getattr(ours, name).bias.copy_(peer.in_proj_bias.chunk(3)[i])
    ours.o_proj.load_state_dict(peer.out_proj.state_dict())
    return ours, peer


def parameters(ours, peer):
    "Matching parameters: ours in parts, theirs as functions to parts."
    found = [(ours.o_proj.weight, peer.out_proj.weight, slice(None))]
    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
        rows = slice(16 * i, 16 * i + 16)
        p = getattr(ours, name, None)
        if p is None:
            return [*found, (ours.qkv_proj.weight, peer.in_proj_weight, slice(None))]
        if peer.in_proj_weight is None:
            found.append((p.weight, getattr(peer, f"{name}_weight"), slice(None)))
        else:
            found.append((p.weight, peer.in_proj_weight, rows))
        if p.bias is not None:
            found.append((p.bias, peer.in_proj_bias, rows))
    return found


def to_attn_mask(mask, batch, n_heads):
    "The adapter of the page Notation."
    return ~mask.expand(batch, n_heads, -1, -1).flatten(0, 1)


def equal_to_torch(
    ours, peer, x, source=None, live=None, attn_mask=None, ignored=None, **how
):
    y = ours(x, **how)
    source = x if source is None else source
    expected, weights = peer(
        x, source, source, attn_mask=attn_mask, key_padding_mask=ignored
    )
    again, w = ours(x, **how, need_weights=True)
    live = torch.ones_like(y[..., :1]) if live is None else live
    close(again * live, expected * live)
    close(y * live, expected * live)
    close(w.mean(1) * live, weights * live)
    match = parameters(ours, peer)
    inputs = list({x, source})
    a = pull(y * live, [*inputs, *(p for p, _, _ in match)])
    b = pull(expected * live, [*inputs, *(p for _, p, _ in match)])
    for i, (one, other) in enumerate(zip(a, b, strict=True)):
        if i >= len(inputs):
            other = other[match[i - len(inputs)][2]]
        close(one, other)


@both_paths
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_equals_torch(fused, packed, bias, causal):
    ours, peer = pair(packed=packed, bias=bias, fused=fused, causal=causal)
    at = torch.arange(6)[None]
    equal_to_torch(
        ours,
        peer,
        randn(2, 6, 16).requires_grad_(),
        attn_mask=to_attn_mask(causal_mask(at, at), 2, 4) if causal else None,
    )


@both_paths
@pytest.mark.parametrize("width", [None, 16, 10, 24])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_cross_attention_equals_torch(fused, width, padded, bias):
    ours, peer = pair(width, fused=fused, over=True, bias=bias)
    memory = randn(2, 9, width or 16, seed=3).requires_grad_()
    key_positions = torch.arange(9).repeat(2, 1)
    key_positions[0, 3:] = -1
    key_positions[1, 4] = -1
    equal_to_torch(
        ours,
        peer,
        randn(2, 5, 16).requires_grad_(),
        memory,
        ignored=key_positions < 0 if padded else None,
        encoder_hidden_states=memory,
        encoder_positions=key_positions if padded else None,
    )


@both_paths
def test_masks_through_the_adapters(fused):
    ours, peer = pair(fused=fused, causal=True)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, -1, -1]])
    mask = some_mask(2, 4, 6, 6) & causal_mask(positions, positions)
    mask = mask | (positions < 0)[:, None, :, None]  # else their rows are NaN
    live = (positions >= 0)[..., None].float()
    equal_to_torch(
        ours,
        peer,
        randn(2, 6, 16).requires_grad_(),
        live=live,
        positions=positions,
        mask=some_mask(2, 4, 6, 6),
        attn_mask=to_attn_mask(mask, 2, 4),
        ignored=positions < 0,
    )


@both_paths
def test_keys_and_values_of_different_widths(fused):
    "kdim and vdim are one memory in which each looks at its own part."
    peer = spread(nn.MultiheadAttention(16, 4, kdim=10, vdim=6, batch_first=True))
    ours = cross(d_encoder=16, fused=fused)
    with torch.no_grad():
        for p in (ours.k_proj, ours.v_proj):
            p.weight.zero_()
        ours.q_proj.weight.copy_(peer.q_proj_weight)
        ours.k_proj.weight[:, :10] = peer.k_proj_weight
        ours.v_proj.weight[:, 10:] = peer.v_proj_weight
        for p, b in zip(
            (ours.q_proj, ours.k_proj, ours.v_proj),
            peer.in_proj_bias.chunk(3),
            strict=True,
        ):
            p.bias.copy_(b)
    ours.o_proj.load_state_dict(peer.out_proj.state_dict())
    x = randn(2, 5, 16).requires_grad_()
    keys = randn(2, 7, 10, seed=1)
    values = randn(2, 7, 6, seed=2).requires_grad_()
    y = ours(x, encoder_hidden_states=torch.cat([keys, values], -1))
    expected, _ = peer(x, keys, values)
    close(y, expected)
    mine = [x, values, ours.v_proj.weight, ours.k_proj.weight]
    theirs = [x, values, peer.v_proj_weight, peer.k_proj_weight]
    a = pull(y, mine)
    b = pull(expected, theirs)
    for one, other in zip((*a[:2], a[2][:, 10:], a[3][:, :10]), b, strict=True):
        close(one, other)


def by_hand(m, x, encoder_hidden_states=None, turn=None, bias=None, mask=None):
    "The equations: one head after the other, what each writes added."
    source = x if encoder_hidden_states is None else encoder_hidden_states
    total = m.o_proj.bias
    d, d_v = (len(p.weight) // m.n_heads for p in (m.q_proj, m.v_proj))
    for i in range(m.n_heads):
        rows, rows_v = (slice(w * i, w * i + w) for w in (d, d_v))
        q = F.linear(x, m.q_proj.weight[rows], m.q_proj.bias[rows])
        k = F.linear(source, m.k_proj.weight[rows], m.k_proj.bias[rows])
        v = F.linear(source, m.v_proj.weight[rows_v], m.v_proj.bias[rows_v])
        if turn is not None:
            q, k = (y[:, 0] for y in turn(q[:, None], k[:, None]))
        scores = q @ k.mT / math.sqrt(d)
        if bias is not None:
            scores = scores + bias[:, i]
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        head = scores.softmax(-1) @ v
        total = total + head @ m.o_proj.weight[:, rows_v].T
    return total


@both_paths
@pytest.mark.parametrize(
    "options",
    [dict(d_head=6), dict(d_v=3), dict(d_head=2, d_v=9), dict(n_heads=5, d_head=3)],
)
def test_widths_of_heads(fused, options):
    m = layer(**options, fused=fused)
    x = randn(2, 5, 16).requires_grad_()
    y = m(x)
    expected = by_hand(m, x)
    close(y, expected)
    weights = [x, m.q_proj.weight, m.v_proj.weight, m.o_proj.weight]
    for a, b in zip(pull(y, weights), pull(expected, weights), strict=True):
        close(a, b)


@both_paths
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(d_head=6),
        dict(d_v=3),
        dict(d_head=2, d_v=9),
        dict(d_encoder=10),
        dict(d_encoder=7, d_head=3, d_v=5, n_heads=5),
    ],
)
def test_widths_of_heads_across(fused, options):
    m = cross(**options, fused=fused)
    x = randn(2, 5, 16).requires_grad_()
    memory = randn(2, 7, options.get("d_encoder", 16), seed=1)
    y = m(x, encoder_hidden_states=memory.requires_grad_())
    expected = by_hand(m, x, memory)
    close(y, expected)
    for a, b in zip(
        *(pull(z, [x, memory, *m.parameters()]) for z in (y, expected)), strict=False
    ):
        close(a, b)


@both_paths
@pytest.mark.parametrize("kv", [1, 2, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_shared_key_heads_equal_copies_of_them(fused, kv, packed):
    "A layer of few key heads is one in which rows of weights repeat."
    few = layer(
        n_kv_heads=kv, d_v=3, causal=True, fused_qkv=packed, fused=fused, std=0.3
    )
    full = layer(d_v=3, causal=True, fused=fused)
    with torch.no_grad():
        for kind in ("weight", "bias"):
            parts = (
                [getattr(p, kind) for p in (few.q_proj, few.k_proj, few.v_proj)]
                if not packed
                else getattr(few.qkv_proj, kind).split(few.proj_sizes)
            )
            for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
                if name != "q_proj":
                    part = (
                        part.unflatten(0, (kv, -1))
                        .repeat_interleave(4 // kv, 0)
                        .flatten(0, 1)
                    )
                getattr(getattr(full, name), kind).copy_(part)
    full.o_proj.load_state_dict(few.o_proj.state_dict())
    x = randn(2, 5, 16)
    cache = few.new_cache(2)
    close(few(x), full(x))
    close(few(x, need_weights=True)[1], full(x, need_weights=True)[1])
    parts = [few(part, cache=cache) for part in x.split((3, 1, 1), 1)]
    close(torch.cat(parts, 1), full(x))
    assert cache.tensors[0].shape == (2, kv, 5, 4)


@both_paths
@pytest.mark.parametrize("packed", [False, True])
def test_norms_act_on_heads_before_they_turn(fused, packed):
    "Qwen3's order: norm, then rotary; each head by itself."
    rotary = RotaryEmbedding(4)
    norms = [spread(RMSNorm(4), 0.4) for _ in "qk"]
    m = spread(
        SelfAttention(
            16,
            4,
            causal=True,
            rotary=rotary,
            q_norm=norms[0],
            k_norm=norms[1],
            fused_qkv=packed,
            fused=fused,
        ),
        0.3,
    )
    assert not torch.equal(m.q_norm.weight, m.k_norm.weight)
    x = randn(2, 5, 16)
    positions = torch.arange(5)[None]
    q, k, v = (
        (m.qkv_proj(x).chunk(3, -1))
        if packed
        else (m.q_proj(x), m.k_proj(x), m.v_proj(x))
    )
    q, k, v = (split_heads(y, 4) for y in (q, k, v))
    q, k = rotary(norms[0](q), norms[1](k), positions=positions)
    out = attend(q, k, v, causal_mask(positions, positions))[0]
    close(m(x), m.o_proj(merge_heads(out)))


@both_paths
def test_rotary_gets_positions(fused):
    rotary = RotaryEmbedding(4)
    positions = torch.tensor([[3, 4, 5, 9, 11]])
    m = layer(rotary=rotary, causal=True, fused=fused, std=0.3)
    x = randn(2, 5, 16)
    close(
        m(x, positions=positions),
        by_hand(
            m,
            x,
            turn=lambda q, k: rotary(q, k, positions=positions),
            mask=causal_mask(positions, positions)[:, 0],
        ),
    )
    near(m(x, positions=positions + 50), m(x, positions=positions))
    assert not torch.allclose(m(x), m(x, positions=positions), atol=1e-3)
    at = torch.arange(5)[None]
    close(m(x), m(x, positions=at))


@both_paths
@pytest.mark.parametrize("order", [[4, 3, 2, 1, 0], [2, 0, 4, 1, 3]])
@pytest.mark.parametrize(
    "options", [dict(rotary=RotaryEmbedding(4)), dict(score_bias=ALiBi(4)), {}]
)
def test_queries_may_come_out_of_order(fused, order, options):
    "Who may look where is a matter of positions, not of places."
    m = layer(causal=True, fused=fused, std=0.3, **options)
    x = randn(2, 5, 16)
    p = torch.tensor(order)
    whole = m(x)
    close(m(x[:, p], positions=p[None]), whole[:, p])
    close(m(x[:, p], positions=p.expand(2, -1)), whole[:, p])
    close(m(x[:, p], positions=Positions(p[None])), whole[:, p])
    rows = torch.stack([p, p.flip(0)])
    mixed = torch.stack([x[i, rows[i]] for i in (0, 1)])
    close(m(mixed, positions=rows), torch.stack([whole[i, rows[i]] for i in (0, 1)]))


@both_paths
@pytest.mark.parametrize("causal", [False, True])
def test_score_bias_gets_positions(fused, causal):
    table = T5RelativeBias(4, causal=causal)
    m = spread(SelfAttention(16, 4, score_bias=table, causal=causal, fused=fused), 0.3)
    x = randn(2, 5, 16)
    at = torch.arange(5)[None]
    expected = by_hand(
        m, x, bias=table(at, at), mask=causal_mask(at, at)[:, 0] if causal else None
    )
    close(m(x), expected)
    allowed = some_mask(1, 1, 5, 5, seed=2)
    lower = causal_mask(at, at) & allowed if causal else allowed
    close(m(x, mask=allowed), by_hand(m, x, bias=table(at, at), mask=lower[:, 0]))
    for a, b in zip(
        pull(m(x), list(table.parameters())),
        pull(expected, list(table.parameters())),
        strict=True,
    ):
        close(a, b)


def test_names_of_parameters():
    names = [f"{p}_proj.{kind}" for p in "qkvo" for kind in ("weight", "bias")]
    assert list(layer().state_dict()) == names
    assert list(layer(bias=False).state_dict()) == names[::2]
    assert list(layer(fused_qkv=True).state_dict()) == [
        "qkv_proj.weight",
        "qkv_proj.bias",
        "o_proj.weight",
        "o_proj.bias",
    ]
    assert list(cross().state_dict()) == names
    assert list(cross(bias=False).state_dict()) == names[::2]
    over = cross(d_encoder=7)
    assert over.v_proj.weight.shape == over.k_proj.weight.shape == (16, 7)
    assert over.q_proj.weight.shape == (16, 16)
    normed = layer(q_norm=RMSNorm(4), k_norm=RMSNorm(4))
    assert set(normed.state_dict()) - set(names) == {"q_norm.weight", "k_norm.weight"}


def test_print_shows_what_the_weights_do_not():
    m = layer(n_kv_heads=2, causal=True, dropout=0.25, rotary=RotaryEmbedding(4))
    assert all(
        said in repr(m)
        for said in (
            "n_heads=4",
            "causal=True",
            "dropout=0.25",
            "proj_sizes=[16, 8, 8]",
            "RotaryEmbedding",
        )
    )
    assert "n_heads=4" in repr(cross(dropout=0.5))
    assert "dropout=0.5" in repr(cross(dropout=0.5))


@both_paths
def test_packed_is_the_three_side_by_side(fused):
    apart = layer(d_v=5, fused=fused, causal=True)
    one = layer(d_v=5, fused=fused, causal=True, fused_qkv=True)
    with torch.no_grad():
        for kind in ("weight", "bias"):
            getattr(one.qkv_proj, kind).copy_(
                torch.cat(
                    [
                        getattr(p, kind)
                        for p in (apart.q_proj, apart.k_proj, apart.v_proj)
                    ]
                )
            )
    one.o_proj.load_state_dict(apart.o_proj.state_dict())
    close(one(randn(2, 5, 16)), apart(randn(2, 5, 16)))


def test_a_view_of_packed_projections_leaks_the_future():
    "The mistake in ATT-11: which outputs move when a token changes."
    x = randn(1, 6, 16)
    m = layer(fused_qkv=True, causal=True, std=0.3)

    def moved(token, split):
        other = x.clone()
        other[:, token] += 1.0
        a, b = (fused_attend(*split(m.qkv_proj(y)), causal=True) for y in (x, other))
        change = (a - b).abs().amax((0, 1, 3))
        return (change > 1e-6).nonzero()[:, 0].tolist()

    def view(y):
        return y.view(3, 1, 6, 4, 4).transpose(2, 3)

    def right(y):
        return y.view(1, 6, 3, 4, 4).permute(2, 0, 3, 1, 4)

    assert moved(5, view) == [3, 4, 5] and moved(5, right) == [5]
    assert moved(4, view) == [0, 1, 2, 3, 4, 5]


def test_the_bias_of_the_keys_does_nothing():
    m = layer(causal=True, std=0.3)
    x = randn(2, 6, 16)
    grads = dict(
        zip(
            "qkvo",
            pull(m(x), [getattr(m, f"{n}_proj").bias for n in "qkvo"]),
            strict=True,
        )
    )
    assert grads["k"].abs().max() < 1e-6 < 1e-3 < grads["q"].abs().max()


# dropout


@both_paths
@pytest.mark.parametrize("over", [False, True])
def test_dropout_acts_in_training_only(fused, over):
    make = cross if over else layer
    x = randn(2, 6, 16)
    m = make(dropout=0.5, fused=fused)
    plain = make(fused=fused)
    how = dict(encoder_hidden_states=randn(2, 5, 16, seed=1)) if over else {}
    assert torch.equal(m(x, **how), plain(x, **how))
    m.train()
    torch.manual_seed(0)
    assert not torch.allclose(m(x, **how), m(x, **how), atol=1e-4)
    assert not torch.allclose(m(x, **how), plain(x, **how), atol=1e-4)
    _, weights = m(x, need_weights=True, **how)
    close(weights, plain(x, need_weights=True, **how)[1])
    assert torch.equal(m.eval()(x, **how), plain(x, **how))


# causality and padding

KINDS = {
    "plain": {},
    "packed": dict(fused_qkv=True),
    "rotary": dict(rotary=RotaryEmbedding(4)),
    "alibi": dict(score_bias=ALiBi(4)),
    "widths": dict(d_head=6, d_v=3),
    "shared": dict(n_kv_heads=2, rotary=RotaryEmbedding(4)),
    "normed": dict(q_norm=RMSNorm(4), k_norm=RMSNorm(4), rotary=RotaryEmbedding(4)),
}
every_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


@every_kind
@both_paths
@both_types
def test_the_future_does_not_move_the_past(options, fused, dtype):
    m = layer(causal=True, fused=fused, std=0.3, **options).to(dtype)
    x = randn(2, 7, 16, dtype=dtype)
    for cut in (1, 4, 6):
        other = x.clone()
        other[:, cut:] = 5 * randn(2, 7 - cut, 16, seed=1, dtype=dtype)
        a = m(x)
        b = m(other)
        assert a.dtype == dtype
        if not fused:
            assert torch.equal(a[:, :cut], b[:, :cut])
        near(a[:, :cut], b[:, :cut])
        assert ((a - b)[:, cut:].abs().amax((0, 2)) > 1e-3).all()


PADDED = [[-1, -1, 0, 1, 2, 3], [0, 1, 2, 3, -1, -1], [0, -1, 1, 2, -7, 3]]


@every_kind
@both_paths
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", PADDED, ids=["left", "right", "within"])
@pytest.mark.parametrize("noise", [1.0, 1e4])
def test_padded_equals_unpadded(options, fused, causal, padded, noise):
    m = layer(causal=causal, fused=fused, std=0.3, **options)
    x = noise * randn(2, 6, 16, seed=1)
    positions = torch.tensor([padded])
    x[:, positions[0] >= 0] = randn(2, 4, 16)
    near(m(x, positions=positions)[:, positions[0] >= 0], m(randn(2, 4, 16)))


@both_paths
@both_types
@pytest.mark.parametrize("asks", [False, True])
def test_empty_rows_are_the_bias_of_the_output(fused, dtype, asks):
    m = layer(causal=True, fused=fused).to(dtype)
    x = randn(2, 5, 16, dtype=dtype).requires_grad_()
    positions = torch.tensor([[-1, -1, 0, 1, 2], [-1] * 5])
    y = m(x, positions=positions, need_weights=asks)
    y = y[0] if asks else y
    for empty in (y[0, :2], y[1]):
        assert torch.equal(empty, m.o_proj.bias.expand_as(empty))
    params = [x, *m.parameters()]
    grads = pull(y, params)
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][0, :2] == 0).all() and (grads[0][1] == 0).all()
    alone = pull(y[1], params[1:5])
    assert all((g == 0).all() for g in alone)  # before o_proj: exactly 0


@pytest.mark.gpu
@both_paths
@both_types
def test_on_a_gpu(fused, dtype):
    m = layer(64, 4, causal=True, fused=fused).to(dtype)
    x = randn(2, 9, 64, dtype=dtype)
    positions = torch.arange(-2, 7)[None]
    expected = m(x, positions=positions)
    m = m.cuda()
    y = m(x.cuda().requires_grad_(), positions=positions.cuda())
    near(y.cpu(), expected)
    y.float().pow(2).sum().backward()
    assert all(p.grad.isfinite().all() for p in m.parameters())
    for grad in (True, False):
        cache = DynamicLayerCache()
        with torch.set_grad_enabled(grad):
            parts = [m(part, cache=cache) for part in x.cuda().split((4, 1, 4), 1)]
        near(torch.cat(parts, 1), m(x.cuda()))
        assert cache.key_positions.next(2).tensor.tolist() == [[9, 10]]
        assert cache.lengths.tolist() == [9, 9]
    told = Positions(positions.cuda()).next(2)
    assert told.tensor.is_cuda and told.tensor.tolist() == [[7, 8]]


@pytest.fixture
def taken(monkeypatch):
    "What the kernel is called with: a list of (mask?, causal flag)."
    seen = []
    kernel = F.scaled_dot_product_attention

    def spy(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **rest):
        seen.append((attn_mask is not None, is_causal))
        return kernel(query, key, value, attn_mask, dropout_p, is_causal, **rest)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen


NEITHER = (False, False)
FLAG = (False, True)
MASK = (True, False)


def test_the_causal_flag_is_used_only_where_it_is_right(taken):
    m = layer(causal=True)
    x = randn(2, 4, 16)
    cache = DynamicLayerCache()
    at = torch.arange(4)[None]
    m(x), m(x, cache=cache), layer()(x)
    assert taken == [FLAG, FLAG, NEITHER]
    taken.clear()
    m(x[:, :1]), m(x[:, :1], cache=cache), m(x[:, :1], cache=cache)
    assert taken == [NEITHER] * 3  # one token sees all that is kept
    taken.clear()
    m(x[:, :2], cache=cache), m(x, positions=at), layer()(x, positions=at)
    m(x, mask=torch.ones(1, 1, 4, 4).bool())
    layer(causal=True, score_bias=ALiBi(4))(x)
    assert taken == [MASK] * 5
    taken.clear()
    over = cross()
    (
        over(x, encoder_hidden_states=x),
        over(x, encoder_hidden_states=x[:, :3]),
        over(
            x, encoder_hidden_states=x, encoder_positions=Positions(start=0, length=4)
        ),
    )
    assert taken == [NEITHER] * 3
    taken.clear()
    (
        over(x, encoder_hidden_states=x, encoder_positions=at),
        over(x, encoder_hidden_states=x, mask=torch.ones(1, 1, 1, 4).bool()),
    )
    assert taken == [MASK] * 2


def test_what_is_taken_where_positions_were_given_once(taken):
    m = layer(causal=True)
    x = randn(2, 6, 16)
    cache = DynamicLayerCache()
    m(x[:, :3], positions=torch.arange(3)[None], cache=cache)
    m(x[:, 3:4], cache=cache), m(x[:, 4:], cache=cache)
    assert taken == [MASK] * 3  # nobody knows that there is no padding
    taken.clear()
    (
        m(x, positions=Positions(start=5, length=6)),
        m(x[:, :1], positions=Positions(start=3, length=1)),
    )
    assert taken == [FLAG, NEITHER]
    taken.clear()
    cache = DynamicLayerCache()
    m(x[:, :4], cache=cache), cache.crop(2), m(x[:, 4:], cache=cache)
    cache.crop(0), m(x, cache=cache)
    assert taken == [FLAG, MASK, FLAG]


@pytest.mark.parametrize(
    "start, t", [(0, 4), (3, 1), (3, 2), (4, 1), (2, 1), (2, 2), (5, 3), (0, 1)]
)
@pytest.mark.parametrize("k_start, s", [(0, 4), (0, 5), (1, 4), (0, 1)])
def test_rules_allow_what_the_mask_allows(start, t, k_start, s):
    "Whether a mask, a flag or none: the same keys for every query."
    positions = Positions(start=start, length=t)
    key_positions = Positions(start=k_start, length=s)
    how = mask_kwargs(positions, key_positions, (1, 1, t, s))
    assert not how.keys() - {"mask", "causal"}
    got = how.get("mask", torch.ones(1, 1, t, s).bool())
    if how.get("causal"):
        assert t == s
        got = torch.ones(1, 1, t, s).bool().tril()
    told = mask_kwargs(
        Positions(positions.tensor), Positions(key_positions.tensor), (1, 1, t, s)
    )
    expected = build_mask(positions.tensor, key_positions.tensor)
    assert torch.equal(got, expected)
    assert torch.equal(told["mask"], expected)
    assert mask_kwargs(positions, key_positions, (1, 1, t, s), causal=False) == {}
    seen = expected.all()
    assert ("mask" in how) == (not seen and not how.get("causal"))


# the cache


def stack(layers, x, cache=None, positions=None, mask=None):
    for i, m in enumerate(layers):
        part = None if cache is None else cache.layers[i]
        x = x + m(x, positions=positions, cache=part, mask=mask)
    return x


def two_layers(**options):
    return [layer(causal=True, std=0.2, **options) for _ in range(2)]


def chunkings(n):
    for cuts in itertools.product((False, True), repeat=n - 1):
        ends = [i for i, cut in enumerate(cuts, start=1) if cut] + [n]
        yield [b - a for a, b in zip([0, *ends], ends, strict=False)]


@every_kind
@both_paths
def test_cached_equals_uncached_for_every_chunking(options, fused):
    layers = two_layers(fused=fused, **options)
    x = randn(2, 5, 16)
    whole = stack(layers, x)
    assert len(list(chunkings(5))) == 16
    for sizes in chunkings(5):
        cache = new_cache(2)
        parts = [stack(layers, part, cache) for part in x.split(sizes, 1)]
        close(torch.cat(parts, 1), whole)
        assert cache.lengths.tolist() == [5, 5]


@both_types
def test_cached_in_both_types(dtype):
    layers = [m.to(dtype) for m in two_layers(rotary=RotaryEmbedding(4))]
    x = randn(2, 6, 16, dtype=dtype)
    cache = new_cache(2)
    parts = [stack(layers, part, cache) for part in x.split((3, 1, 2), 1)]
    near(torch.cat(parts, 1), stack(layers, x))
    assert all(t.dtype == dtype for t in cache.layers[0].tensors)


def test_gradients_flow_through_the_cache():
    layers = two_layers()
    x = randn(2, 5, 16).requires_grad_()
    cache = new_cache(2)
    y = torch.cat([stack(layers, p, cache) for p in x.split((2, 3), 1)], 1)
    close(*(pull(out, [x])[0] for out in (y, stack(layers, x))))


@quick
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 3),
    st.booleans(),
    seeds,
)
def test_ragged_batches_equal_each_text_alone(lengths, more, chunk, left, seed):
    "Prefill with padding on either side, then continue token by token."
    layers = two_layers(rotary=RotaryEmbedding(4))
    n = max(lengths)
    b = len(lengths)
    texts = [randn(1, k + more, 16, seed=seed + i) for i, k in enumerate(lengths)]
    x = randn(b, n, 16, seed=seed + 9)
    positions = torch.full((b, n), -1)
    for i, k in enumerate(lengths):
        place = slice(n - k, n) if left else slice(0, k)
        x[i, place] = texts[i][0, :k]
        positions[i, place] = torch.arange(k)
    cache = new_cache(2)
    size = chunk or n
    first = torch.cat(
        [
            stack(layers, part, cache, at)
            for part, at in zip(x.split(size, 1), positions.split(size, 1), strict=True)
        ],
        1,
    )
    assert cache.lengths.tolist() == lengths
    later = []
    for step in range(more):
        new = torch.cat(
            [t[:, k + step : k + step + 1] for t, k in zip(texts, lengths, strict=True)]
        )
        later.append(stack(layers, new, cache))
    later = torch.cat(later, 1)
    for i, k in enumerate(lengths):
        alone = stack(layers, texts[i])
        close(first[i : i + 1, positions[i] >= 0], alone[:, :k])
        close(later[i : i + 1], alone[:, k:])


@pytest.mark.parametrize("rows", [[1, 0], [1, 1, 0], [0], [2, 2, 2, 2]])
@pytest.mark.parametrize("ragged", [False, True])
def test_select_reorders_every_row(rows, ragged):
    layers = two_layers(rotary=RotaryEmbedding(4))
    x = randn(3, 6, 16)
    positions = torch.tensor([[0, 1, 2, 3], [-1, 0, 1, 2], [-1, -1, 0, 1]])
    if not ragged:
        positions = positions[:1]
    cache = new_cache(2)
    stack(layers, x[:, :4], cache, positions)
    both = new_cache(2)
    stack(layers, x[rows, :4], both, positions[rows] if ragged else positions)
    cache.select(torch.tensor(rows))
    assert cache.lengths.tolist() == both.lengths.tolist()
    for a, b in zip(cache.layers, both.layers, strict=True):
        for one, other in zip(a.tensors, b.tensors, strict=True):
            close(one, other)
        assert torch.equal(
            a.key_positions.tensor.expand(len(rows), -1),
            b.key_positions.tensor.expand(len(rows), -1),
        )
    new = x[rows, 4:]
    close(stack(layers, new, cache), stack(layers, new, both))


@pytest.mark.parametrize("n", range(7))
def test_crop_forgets_from_n_on(n):
    layers = two_layers(rotary=RotaryEmbedding(4))
    x = randn(2, 8, 16)
    cache = new_cache(2)
    stack(layers, x[:, :5], cache)
    cache.crop(n)
    kept = min(n, 5)
    assert cache.lengths.tolist() == [kept, kept]
    assert cache.is_empty == (kept == 0)
    assert cache.layers[0].tensors[0].shape[-2] == kept
    assert cache.key_positions.next(2).tensor.tolist() == [[kept, kept + 1]]
    assert cache.key_positions.end == kept
    whole = stack(layers, torch.cat([x[:, :kept], x[:, 5:]], 1))
    close(stack(layers, x[:, 5:], cache), whole[:, kept:])


def test_crop_counts_positions_in_ragged_rows():
    layers = two_layers()
    x = randn(2, 7, 16)
    cache = new_cache(2)
    positions = torch.tensor([[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]])
    stack(layers, x[:, :5], cache, positions)
    cache.crop(2)
    assert cache.lengths.tolist() == [2, 2]
    y = stack(layers, x[:, 5:], cache)
    for i, start in ((0, 0), (1, 2)):
        text = torch.cat([x[i : i + 1, start : start + 2], x[i : i + 1, 5:]], 1)
        close(y[i : i + 1], stack(layers, text)[:, 2:])


def test_nbytes_is_what_is_stored():
    layers = two_layers(d_head=6, d_v=3)
    cache = new_cache(2)
    assert cache.nbytes == 0
    for grad in (True, False):  # without: there is room, not counted
        with torch.set_grad_enabled(grad):
            stack(layers, randn(2, 5, 16), cache)
    assert cache.nbytes == 2 * (2 * 4 * 10 * (6 + 3)) * 4
    cache.crop(4), cache.select(torch.tensor([1]))
    assert cache.nbytes == 2 * (1 * 4 * 4 * (6 + 3)) * 4
    packed = layer(causal=True, fused_qkv=True)
    cache = DynamicLayerCache()
    packed(randn(2, 5, 16), cache=cache)
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in cache.tensors
    }
    assert sum(held.values()) == cache.nbytes  # nothing else kept alive
    both = KVCache([cache, CrossAttentionCache()])
    both.layers[1].get_or_compute(
        randn(2, 3, 16),
        None,
        lambda encoder_hidden_states: (randn(2, 4, 3, 4), randn(2, 4, 3, 2)),
    )
    assert both.nbytes == (2 * 4 * 5 * 8 + 2 * 4 * 3 * 6) * 4


def test_nothing_is_stored_on_the_module():
    m = layer(causal=True)
    x = randn(2, 4, 16)
    before = {k: id(v) for k, v in vars(m).items()}
    m(x, cache=DynamicLayerCache())
    assert before == {k: id(v) for k, v in vars(m).items()}
    assert torch.equal(m(x), m(x, cache=DynamicLayerCache()))


@pytest.mark.parametrize("grad", [True, False])
def test_an_update_leaves_what_it_returned_alone(grad):
    with torch.set_grad_enabled(grad):
        cache = DynamicLayerCache()
        at = torch.arange(3)[None]
        given = cache.update(randn(2, 4, 3, 4), randn(2, 4, 3, 5), positions=at)
        returned = [given]
        for i in (3, 4, 5):
            returned.append(
                cache.update(
                    randn(2, 4, 1, 4, seed=i),
                    randn(2, 4, 1, 5, seed=i),
                    positions=Positions(torch.tensor([[i]])),
                )
            )
        copies = [
            [k.clone(), v.clone(), positions.tensor.clone()]
            for k, v, positions in returned
        ]
        cache.update(
            randn(2, 4, 2, 4), randn(2, 4, 2, 5), positions=torch.tensor([[6, 7]])
        )
        cache.crop(2)
        cache.update(
            randn(2, 4, 2, 4, seed=9),
            randn(2, 4, 2, 5, seed=9),
            positions=torch.tensor([[2, 3]]),
        )
        cache.select(torch.tensor([1]))
        cache.update(
            randn(1, 4, 1, 4), randn(1, 4, 1, 5), positions=torch.tensor([[4]])
        )
    assert returned[-1][2].tensor.tolist() == [[0, 1, 2, 3, 4, 5]]
    for (k, v, positions), copied in zip(returned, copies, strict=True):
        assert all(
            torch.equal(a, b)
            for a, b in zip((k, v, positions.tensor), copied, strict=True)
        )


def test_a_cache_keeps_any_tensors_and_any_layer():
    "Time is axis -2 whatever the number of axes; positions may differ."
    cache = new_cache(3)
    one = cache.layers[1]
    one.update(randn(2, 3, 7), positions=torch.tensor([[0, 1, 2]]))
    latent, key_positions = one.update(
        randn(2, 1, 7, seed=1), positions=torch.tensor([[3], [-1]])
    )
    assert latent.shape == (2, 4, 7)
    assert key_positions.tensor.tolist() == [[0, 1, 2, 3], [0, 1, 2, -1]]
    assert one.lengths.tolist() == [4, 3]
    assert cache.layers[0].lengths.tolist() == [0] and cache.is_empty
    assert cache.key_positions is None and not one.is_empty


def test_every_layer_says_what_it_keeps():
    assert isinstance(layer().new_cache(2), DynamicLayerCache)
    assert isinstance(layer().new_cache(2, 10), DynamicLayerCache)
    assert isinstance(cross().new_cache(2), CrossAttentionCache)
    assert isinstance(cross().new_cache(2, max_len=10), CrossAttentionCache)
    assert issubclass(SelfAttention, MultiHeadAttention)
    assert issubclass(CrossAttention, MultiHeadAttention)


# what is kept of a memory


@both_paths
@pytest.mark.parametrize("padded", [False, True])
def test_memory_is_kept_follows_select_and_ignores_crop(fused, padded):
    m = cross(d_encoder=10, fused=fused)
    cache = CrossAttentionCache()
    x = randn(2, 3, 16)
    memory = randn(2, 5, 10)
    at = torch.tensor([[0, 1, 2, -1, -1], [0, 1, 2, 3, 4]])
    how = dict(encoder_positions=at) if padded else {}
    expected = m(x, encoder_hidden_states=memory, **how)
    close(m(x, encoder_hidden_states=memory, cache=cache, **how), expected)
    assert len(cache.tensors) == 2
    kept = [id(y) for y in cache.tensors]
    for step in range(3):  # None answers from what is kept
        close(m(x[:, step : step + 1], cache=cache), expected[:, step : step + 1])
    close(m(x, encoder_hidden_states=memory, cache=cache, **how), expected)
    assert [id(y) for y in cache.tensors] == kept
    cache.crop(0), cache.crop(torch.tensor([0, 1]))
    close(m(x, cache=cache), expected)
    cache.select(torch.tensor([1, 0, 0]))
    close(m(x[[1, 0, 0]], cache=cache), expected[[1, 0, 0]])
    assert cache.tensors[0].shape == (3, 4, 5, 4)


@both_paths
def test_another_memory_is_another_answer(fused):
    "Of equal shape, with other padding, or shorter: never the old rows."
    m = cross(fused=fused)
    cache = CrossAttentionCache()
    x = randn(2, 3, 16)
    at = torch.tensor([[0, 1, 2, -1, -1], [0, 1, 2, 3, 4]])
    one = randn(2, 5, 16, seed=1)
    other = randn(2, 5, 16, seed=2)
    m(x, encoder_hidden_states=one, encoder_positions=at, cache=cache)
    close(
        m(x, encoder_hidden_states=other, cache=cache),
        m(x, encoder_hidden_states=other),
    )
    close(m(x, cache=cache), m(x, encoder_hidden_states=other))
    close(
        m(x, encoder_hidden_states=other, encoder_positions=at, cache=cache),
        m(x, encoder_hidden_states=other, encoder_positions=at),
    )
    close(
        m(x, encoder_hidden_states=one[:, :4], cache=cache),
        m(x, encoder_hidden_states=one[:, :4]),
    )
    close(m(x, encoder_hidden_states=one, cache=cache), m(x, encoder_hidden_states=one))
    assert not torch.allclose(
        m(x, encoder_hidden_states=one), m(x, encoder_hidden_states=other), atol=1e-4
    )


def test_after_select_the_old_memory_is_another_one():
    m = cross()
    cache = CrossAttentionCache()
    x = randn(2, 3, 16)
    memory = randn(2, 5, 16)
    rows = torch.tensor([1, 0])
    expected = m(x, encoder_hidden_states=memory, cache=cache)
    cache.select(rows)
    close(m(x[rows], cache=cache), expected[rows])
    close(m(x, encoder_hidden_states=memory, cache=cache), expected)
    cache.select(rows)
    moved = memory[rows]
    close(
        m(x, encoder_hidden_states=moved, cache=cache),
        m(x, encoder_hidden_states=moved),
    )


def test_an_encoder_output_is_projected_once():
    m = cross()
    cache = CrossAttentionCache()
    memory = randn(2, 5, 16)
    calls = []
    m.k_proj.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(4):
        m(randn(2, 1, 16), encoder_hidden_states=memory, cache=cache)
    m(randn(2, 1, 16), cache=cache)
    assert len(calls) == 1


def test_an_empty_memory_cache():
    cache = CrossAttentionCache()
    cache.crop(3), cache.select(torch.tensor([0]))
    assert cache.nbytes == 0 and cache.key_positions is None
    with pytest.raises(
        ValueError,
        match=r"no encoder_hidden_states yet.*"
        r"pass encoder_hidden_states=",
    ):
        cross()(randn(2, 3, 16), cache=cache)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("given", ["encoder_positions", "mask"])
def test_a_mask_that_is_changed_in_place_counts_from_the_next_call_on(fused, given):
    "A cache keeps what was made of a memory, and not who may see it."
    over = cross(fused=fused)
    cache = over.new_cache(2)
    memory = randn(2, 5, 16, seed=1)
    x = randn(2, 3, 16)
    kept = {
        "encoder_positions": torch.arange(5).expand(2, 5).clone(),
        "mask": torch.ones(2, 1, 1, 5).bool(),
    }[given]
    options = dict(encoder_hidden_states=memory)
    before = over(x, cache=cache, **options, **{given: kept})
    kept[1, ..., 3:] = -1 if given == "encoder_positions" else False
    after = over(x, cache=cache, **options, **{given: kept})
    close(after, over(x, **options, **{given: kept.clone()}))
    close(after[1], over(x[1:], encoder_hidden_states=memory[1:, :3])[0])
    close(after[0], before[0])
    assert (after[1] - before[1]).abs().max() > 1e-3


def test_self_and_cross_attention_have_one_cache_in_two_parts():
    own = layer(causal=True)
    over = cross()
    memory = randn(2, 3, 16, seed=1)
    x = randn(2, 4, 16)

    def block(x, cache=None):
        a, b = cache.layers if cache else (None, None)
        return over(own(x, cache=a), encoder_hidden_states=memory, cache=b)

    cache = KVCache([own.new_cache(2), over.new_cache(2)])
    assert cache.is_empty
    parts = [block(p, cache) for p in x.split((2, 1, 1), 1)]
    close(torch.cat(parts, 1), block(x))
    assert cache.lengths.tolist() == [4, 4] and not cache.is_empty
    cache.crop(2)
    assert cache.layers[1].tensors[0].shape == (2, 4, 3, 4)
    close(block(x[:, 2:], cache), block(x)[:, 2:])


def test_a_mask_meets_all_keys():
    "With a cache, the mask of the caller covers earlier keys too."
    layers = two_layers()
    x = randn(2, 6, 16)
    cache = new_cache(2)
    document = torch.tensor([[0, 0, 0, 1, 1, 1]])
    mask = (document[:, :, None] == document[:, None])[:, None]
    whole = stack(layers, x, mask=mask)
    a = stack(layers, x[:, :4], cache, mask=mask[:, :, :4, :4])
    b = stack(layers, x[:, 4:], cache, mask=mask[:, :, 4:])
    close(torch.cat([a, b], 1), whole)
    close(whole[:, 3:], stack(layers, x[:, 3:]))


# compiled

COMPILED = {
    "plain": {},
    "need_weights": dict(need_weights=True),
    "positions": dict(positions=torch.tensor([[-1, 0, 1, 2]])),
    "mask": dict(mask=torch.ones(1, 1, 4, 4).bool()),
    "cached": dict(cached=True),
    "rotary": dict(rotary=RotaryEmbedding(4)),
    "encoder_hidden_states": dict(encoder_hidden_states=randn(2, 5, 16)),
    "memory, padded": dict(
        encoder_hidden_states=randn(2, 5, 16),
        encoder_positions=torch.arange(-2, 3)[None],
    ),
}


@pytest.mark.nightly
@plain_only
@pytest.mark.parametrize("options", COMPILED.values(), ids=COMPILED)
def test_the_graph_does_not_break(options):
    how = dict(options)
    cached = how.pop("cached", False)
    rotary = how.pop("rotary", None)
    m = cross() if "encoder_hidden_states" in how else layer(causal=True, rotary=rotary)

    def run(x):
        if not cached:
            y = m(x, **how)
            return y[0] if isinstance(y, tuple) else y
        cache = DynamicLayerCache()
        return torch.cat([m(p, cache=cache) for p in x.split(2, 1)], 1)

    torch._dynamo.reset()
    x = randn(2, 4, 16)
    close(torch.compile(run, backend="eager", fullgraph=True)(x), run(x))


@pytest.mark.nightly
@plain_only
def test_one_graph_serves_every_length():
    m = layer(causal=True)
    x = randn(2, 9, 16)
    torch._dynamo.reset()  # it limits the graphs of one function
    fast = torch.compile(m, backend="aot_eager", fullgraph=True)
    for t in (4, 6, 9, 1):  # from the second on, the length is a symbol
        close(fast(x[:, :t]), m(x[:, :t]))
    cache = DynamicLayerCache()
    parts = [fast(part, cache=cache) for part in x.split([4, 1, 1, 3], 1)]
    close(torch.cat(parts, 1), m(x))


@pytest.mark.nightly
@plain_only
@pytest.mark.parametrize("ragged", [False, True])
def test_a_few_graphs_serve_all_steps(ragged):
    "Prefill, a first step, and one for all others."
    layers = two_layers(rotary=RotaryEmbedding(4))
    x = randn(2, 16, 16)
    positions = torch.tensor([[0, 1, 2, 3], [-1, -1, 0, 1]]) if ragged else None
    torch._dynamo.reset()
    counter = CompileCounter()
    graphs = []
    fast = torch.compile(stack, backend=counter, fullgraph=True)
    cache = new_cache(2)
    same = new_cache(2)
    with torch.no_grad():
        close(
            fast(layers, x[:, :4], cache, positions),
            stack(layers, x[:, :4], same, positions),
        )
        for i in range(4, 16):
            close(
                fast(layers, x[:, i : i + 1], cache),
                stack(layers, x[:, i : i + 1], same),
            )
            graphs.append(counter.frame_count)
    assert graphs[-1] <= 5 and graphs[-1] == graphs[3]
    assert cache.lengths.tolist() == [16, 14 if ragged else 16]


@pytest.mark.nightly
@plain_only
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")),
    reason="no C++ compiler on this machine",
)
def test_machine_code_of_a_cached_step_equals_eager():
    m = layer(causal=True, rotary=RotaryEmbedding(4))
    x = randn(2, 5, 16)
    cache = DynamicLayerCache()
    torch._dynamo.reset()
    plain = {"cpp.simdlen": 1}  # plain C++: quickly compiled, and no probing
    fast = torch.compile(m, backend="inductor", fullgraph=True, options=plain)
    with torch.no_grad():
        parts = [m(x[:, :3], cache=cache), fast(x[:, 3:], cache=cache)]
        close(torch.cat(parts, 1), m(x))


# mistakes are named


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: SelfAttention(10, 4), "d_model 10.*n_heads 4"),
        (lambda: SelfAttention(8, 0), "n_heads must be.*at least 1, got 0"),
        (lambda: SelfAttention(8, 2, d_head=0), "d_head must be.*got 0"),
        (lambda: SelfAttention(8, 2, d_v=-1), "d_v must be.*got -1"),
        (lambda: SelfAttention(8, 2.0), "n_heads must be.*got 2.0"),
        (lambda: SelfAttention(8, 4, n_kv_heads=3), "4 query heads.*3 key heads"),
        (lambda: SelfAttention(8, 4, n_kv_heads=0), "n_kv_heads must be.*got 0"),
        (lambda: SelfAttention(8, 2, dropout=1.0), "below 1, got 1.0"),
        (lambda: SelfAttention(8, 2, dropout=-0.1), "at least 0.*got -0.1"),
        (lambda: CrossAttention(10, 4), "d_model 10.*n_heads 4"),
        (lambda: CrossAttention(8, 2, d_encoder=0), "d_encoder must be.*got 0"),
        (lambda: CrossAttention(8, 2, d_v=0), "d_v must be.*got 0"),
        (lambda: CrossAttention(8, 2, dropout=1), "dropout.*got 1"),
        (lambda: split_heads(randn(1, 2, 10), 4), "10.*n_heads 4"),
        (lambda: repeat_kv(randn(1, 2, 3, 4), 0), "n must be.*got 0"),
        (lambda: layer()(randn(3, 16)), r"x must be.*got \(3, 16\)"),
        (lambda: layer()(randn(2, 2, 3, 16)), r"x .*\(2, 2, 3, 16\)"),
        (lambda: layer()(randn(16)), r"x must be.*got \(16,\)"),
        (
            lambda: layer()(randn(2, 3, 16), positions=torch.arange(4)[None]),
            r"positions of shape \(1, 4\).*x \(2, 3, 16\)",
        ),
        (
            lambda: layer()(randn(2, 3, 16), positions=Positions(start=0, length=4)),
            r"positions of shape \(1, 4\).*x \(2, 3, 16\)",
        ),
        (
            lambda: layer()(randn(2, 3, 16), positions=torch.zeros(3, 3).long()),
            r"positions of shape \(3, 3\).*x \(2, 3, 16\)",
        ),
        (
            lambda: layer()(randn(2, 3, 16), positions=torch.arange(3)),
            r"positions must be int64.*shape \(3,\)",
        ),
        (lambda: layer()(randn(2, 3, 16), positions=torch.zeros(1, 3)), "float32"),
        (
            lambda: layer()(randn(2, 3, 16), mask=torch.ones(1, 1, 3, 4).bool()),
            r"mask of shape \(1, 1, 3, 4\) does not.*\(2, 4, 3, 3\)",
        ),
        (
            lambda: layer()(randn(2, 3, 16), mask=torch.ones(1, 1, 3, 3)),
            "mask is boolean.*float32.*bias",
        ),
        (
            lambda: layer(n_heads=2)(randn(2, 3, 16), mask=torch.ones(2, 3, 3).bool()),
            r"two things.*mask\[:, None\] for all heads",
        ),
        (
            lambda: layer()(randn(2, 3, 16), mask=torch.ones(3, 3).bool()),
            r"two things.*\[:, None, None\].*\[None, None\]",
        ),
        (
            lambda: cross()(
                randn(2, 3, 16),
                encoder_hidden_states=randn(2, 3, 16),
                mask=torch.ones(2, 3).bool(),
            ),
            "two things",
        ),
        (
            lambda: cross()(
                randn(2, 3, 16),
                encoder_hidden_states=randn(2, 5, 16),
                mask=torch.ones(2, 1, 3, 4).bool(),
            ),
            r"\(2, 1, 3, 4\) does not.*\(2, 4, 3, 5\)",
        ),
        (
            lambda: cross()(randn(2, 3, 16), encoder_hidden_states=randn(3, 3, 16)),
            r"encoder_hidden_states must be.*\(2, s, m\).*got \(3, 3, 16\)",
        ),
        (
            lambda: cross()(randn(2, 3, 16), encoder_hidden_states=randn(3, 16)),
            r"encoder_hidden_states must be.*got \(3, 16\)",
        ),
        (
            lambda: cross()(randn(3, 16), encoder_hidden_states=randn(2, 3, 16)),
            r"x must be.*got \(3, 16\)",
        ),
        (lambda: cross()(randn(2, 3, 16)), "pass encoder_hidden_states="),
        (
            lambda: cross()(randn(2, 3, 16), encoder_positions=torch.arange(3)[None]),
            "pass encoder_hidden_states=",
        ),
        (
            lambda: cross()(
                randn(2, 3, 16),
                encoder_hidden_states=randn(2, 5, 16),
                encoder_positions=torch.arange(4)[None],
            ),
            r"positions of shape \(1, 4\).*x \(2, 5, 16\)",
        ),
        (
            lambda: cross()(
                randn(2, 3, 16),
                encoder_hidden_states=randn(2, 5, 16),
                encoder_positions=torch.zeros(3, 5).long(),
            ),
            r"positions of shape \(3, 5\).*x \(2, 5, 16\)",
        ),
        (lambda: layer()(randn(2, 3, 16), cache=DynamicLayerCache()), "causal=True"),
        (lambda: KVCache([]), "1 layer or more.*0"),
        (lambda: DynamicLayerCache().crop(-1), "-1"),
        (lambda: new_cache().crop(-1), "-1"),
        (
            lambda: build_mask(
                None, torch.arange(3)[None], torch.ones(3, 3).bool(), (1, 1, 3, 3)
            ),
            "two things",
        ),
        (
            lambda: build_mask(
                None, torch.arange(3)[None], torch.ones(1, 1, 3, 4).bool(), (1, 1, 3, 3)
            ),
            r"\(1, 1, 3, 4\) does not",
        ),
        (lambda: fused_attend(*qkv(t=3, s=5), causal=True), "3 queries.*5 keys"),
        (lambda: eager_attend(*qkv(t=3, s=5), causal=True), "3 queries.*5"),
        (lambda: fused_attend(*qkv(kv=3)), "4 query heads.*3 key heads"),
        (lambda: eager_attend(*qkv(kv=3)), "4 query heads.*3 key heads"),
        (lambda: fused_attend(*qkv(), mask=torch.ones(1, 1, 6, 6)), "boolean"),
        (lambda: fused_attend(*qkv(), mask=torch.ones(6, 6).bool()), "two things"),
        (
            lambda: fused_attend(*qkv(), mask=torch.ones(1, 1, 6, 5).bool()),
            r"\(1, 1, 6, 5\) does not",
        ),
        (lambda: fused_attend(*qkv(), bias=torch.ones(6, 6).bool()), "bias"),
        (
            lambda: online_softmax_attend(*qkv(), mask=torch.ones(1, 1, 6, 5).bool()),
            r"\(1, 1, 6, 5\) does not",
        ),
        (
            lambda: online_softmax_attend(randn(2, 3), randn(4, 5), randn(4, 5)),
            r"k must be.*\(s, 3\).*q \(2, 3\), got \(4, 5\)",
        ),
        (
            lambda: online_softmax_attend(*qkv(), chunk_size=0),
            "chunk_size must be.*got 0",
        ),
        (
            lambda: online_softmax_attend(*qkv(), chunk_size=-1),
            "chunk_size must be.*got -1",
        ),
    ],
)
def test_wrong_arguments_are_named(call, says):
    with pytest.raises(ValueError, match=f"(?s){says}"):
        call()


@pytest.mark.parametrize(
    "how",
    [
        dict(rotary=RotaryEmbedding(4)),
        dict(fused_qkv=True),
        dict(causal=True),
        dict(score_bias=None),
    ],
)
def test_cross_attention_has_no_options_of_self_attention(how):
    "A memory has no place in the order of the queries."
    with pytest.raises(TypeError, match=next(iter(how))):
        CrossAttention(16, 4, **how)
    with pytest.raises(TypeError, match="encoder_hidden_states"):
        layer()(randn(2, 3, 16), encoder_hidden_states=randn(2, 3, 16))


@pytest.mark.parametrize(
    "new, positions, says",
    [
        ((randn(3, 4, 1, 4),), torch.tensor([[3]]), "batch of 3.*of 2"),
        ((randn(2, 4, 1, 5),), torch.tensor([[3]]), r"\(2, 4, 1, 5\)"),
        ((randn(2, 3, 1, 4),), torch.tensor([[3]]), r"\(2, 3, 1, 4\)"),
        ((randn(2, 4, 1, 4),) * 2, torch.tensor([[3]]), "only time"),
        ((randn(2, 4, 1, 4),), torch.tensor([[3, 4]]), r"agree.*\(1, 2\)"),
        ((randn(2, 4, 1, 4),), torch.tensor([[3]] * 3), r"agree.*\(3, 1\)"),
        ((randn(2, 4, 1, 4),), torch.tensor([[3.0]]), "int64"),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_wrong_updates_are_named(new, positions, says, grad):
    cache = DynamicLayerCache()
    with torch.set_grad_enabled(grad):
        cache.update(randn(2, 4, 3, 4), positions=torch.arange(3)[None])
        with pytest.raises(ValueError, match=f"(?s){says}"):
            cache.update(*new, positions=positions)
    assert cache.lengths.tolist() == [3, 3]
    assert cache.tensors[0].shape == (2, 4, 3, 4)


def test_wrong_pieces_of_one_update():
    with pytest.raises(ValueError, match=r"agree.*\(2, 3, 4\).*\(2, 2, 4\)"):
        DynamicLayerCache().update(
            randn(2, 3, 4), randn(2, 2, 4), positions=torch.arange(3)[None]
        )


def test_a_cache_meets_another_batch_or_encoder_output():
    m = layer(causal=True)
    cache = DynamicLayerCache()
    m(randn(2, 3, 16), cache=cache)
    with pytest.raises(ValueError, match="batch of 3 meets a cache of 2"):
        m(randn(3, 1, 16), cache=cache)
    over = cross()
    cache = CrossAttentionCache()
    over(randn(2, 3, 16), encoder_hidden_states=randn(2, 5, 16), cache=cache)
    with pytest.raises(ValueError, match=r"\(3, .*got \(2, 4, 5, 4\)"):
        over(randn(3, 3, 16), cache=cache)


def test_the_inputs_are_left_alone():
    m = layer(causal=True, rotary=RotaryEmbedding(4))
    x = randn(2, 4, 16)
    positions = torch.tensor([[-1, 0, 1, 2]])
    mask = some_mask(1, 1, 4, 4)
    before = [y.clone() for y in (x, positions, mask)]
    m(x, positions=positions, mask=mask, cache=DynamicLayerCache())
    assert all(
        torch.equal(a, b) for a, b in zip((x, positions, mask), before, strict=True)
    )


def test_a_mask_without_queries_is_the_padding_mask():
    "A layer that is not causal needs no positions of queries."
    key_positions = torch.tensor([[0, -1, 1]])
    assert torch.equal(build_mask(None, key_positions), padding_mask(key_positions))


# positions, and what is known of them without looking


def test_positions_count_on():
    x = randn(2, 3, 4)
    assert Positions.of(None, x).tensor.tolist() == [[0, 1, 2]]
    cache = DynamicLayerCache()
    assert Positions.of(None, x, cache).tensor.tolist() == [[0, 1, 2]]
    cache.update(x, positions=torch.tensor([[0, 1, 2], [-1, -1, 0]]))
    after = Positions.of(None, x[:, :2], cache)
    assert after.tensor.tolist() == [[3, 4], [1, 2]] and after.end == 5
    assert cache.key_positions.next(2).tensor.tolist() == [[3, 4], [1, 2]]
    nobody = Positions(torch.full((1, 3), -1))
    assert nobody.next(2).tensor.tolist() == [[0, 1]] and nobody.end == 0


@pytest.mark.parametrize("start, n, more", [(0, 3, 2), (4, 1, 1), (0, 0, 3)])
def test_known_positions_equal_those_of_a_tensor(start, n, more):
    known = Positions(start=start, length=n)
    told = Positions(torch.arange(start, start + n)[None])
    assert (known.start, known.length, known.batch_size) == (start, n, 1)
    assert (told.start, told.length, told.batch_size) == (None, n, 1)
    assert torch.equal(known.tensor, told.tensor) and known.tensor is known.tensor
    assert known.tensor.dtype == torch.int64
    assert known.end == start + n
    if n:
        assert told.end == known.end
        a = known.next(more)
        b = told.next(more)
        assert torch.equal(a.tensor, b.tensor) and a.end == b.end
        assert a.start == start + n and b.start is None


@both_paths
def test_known_positions_may_begin_with_padding(fused):
    "Negative is padding, whether or not a tensor says so."
    m = layer(causal=True, fused=fused)
    over = cross(fused=fused)
    x = randn(2, 6, 16)
    positions = Positions(start=-2, length=6)
    close(m(x, positions=positions), m(x, positions=positions.tensor))
    close(m(x, positions=positions)[:, 2:], m(x[:, 2:]))
    close(
        over(x, encoder_hidden_states=x, encoder_positions=positions),
        over(x, encoder_hidden_states=x[:, 2:]),
    )
    cache = DynamicLayerCache()
    m(x[:, :5], positions=Positions(start=-2, length=5), cache=cache)
    close(m(x[:, 5:], cache=cache), m(x[:, 2:])[:, 3:])


def test_positions_of_what_is_given():
    x = randn(2, 3, 4)
    at = torch.tensor([[5, -1, 6]])
    given = Positions.of(at, x)
    assert torch.equal(given.tensor, at) and given.start is None and given.end == 7
    assert Positions.of(given, x) is given and Positions.of(given) is given
    rows = Positions.of(at.expand(2, -1), x)
    assert (rows.batch_size, rows.length) == (2, 3)
    for wrong in (at[:, :2], at.expand(3, -1), at[0], at.float(), at.int()):
        with pytest.raises(ValueError):
            Positions.of(wrong, x)


def test_once_is_once_for_each_key():
    positions = AttentionContext(Positions(start=0, length=2))
    calls = []
    a = object()
    b = object()

    def ask(*key):
        return positions.memoize(key, lambda: calls.append(key) or object())

    first = ask(a)
    assert ask(a) is first and len(calls) == 1
    others = [ask(b), ask(a, b), ask(b, a), ask(), ask(a, None)]
    assert len({id(x) for x in [first, *others]}) == 6 and len(calls) == 6
    assert [ask(b), ask(a, b), ask(b, a), ask(), ask(a, None)] == others
    assert ask(a) is first and len(calls) == 6
    assert AttentionContext(positions).memoize((a,), object) is not first
    # equal, and not the same
    one = torch.ones(2)
    same = torch.ones(2)
    assert ask(one) is not ask(same) and ask(one) is ask(one)


@pytest.fixture
def looks(monkeypatch):
    "Counts how often a number is taken out of a tensor."
    seen = []
    for name in (
        "item",
        "tolist",
        "__int__",
        "__bool__",
        "__float__",
        "__index__",
        "nonzero",
        "max",
    ):
        plain = getattr(torch.Tensor, name)

        def spy(self, *args, _plain=plain, _name=name, **rest):
            seen.append(_name)
            return _plain(self, *args, **rest)

        monkeypatch.setattr(torch.Tensor, name, spy)
    return seen


def test_a_tensor_of_positions_is_looked_at_once(looks):
    positions = Positions(torch.tensor([[0, 1, 2], [-1, 0, 1]]))
    assert not looks
    assert [positions.end for _ in range(3)] == [3] * 3
    assert looks.count("item") == looks.count("max") == 1
    assert positions.next(2).end == 5 and len(looks) == 2
    assert Positions(torch.tensor([[0, 1]]), end=2).end == 2
    assert Positions(start=3, length=2).end == 5 and len(looks) == 2


@both_paths
@pytest.mark.parametrize(
    "options", [dict(rotary=RotaryEmbedding(4)), dict(score_bias=ALiBi(4))]
)
def test_a_step_reads_no_value(looks, fused, options, monkeypatch):
    "A device would have to be waited for; ``end`` travels in the cache."
    if fused:  # on the CPU the kernel's wrapper may ask for empty rows
        monkeypatch.setattr(
            attention_backends,
            "_zero_empty_rows",
            lambda out, empty: out.masked_fill(empty, 0.0),
        )
    layers = two_layers(fused=fused, **options)
    x = randn(2, 8, 16)
    positions = Positions(torch.tensor([[0, 1, 2, 3], [-1, 0, 1, 2]]))
    for known in (None, positions):
        cache = new_cache(2)
        end = None if known is None else known.end
        looks.clear()
        with torch.no_grad():
            stack(layers, x[:, :4], cache, known)
            for i in range(4, 8):
                where = Positions.of(None, x[:, i : i + 1], cache)
                assert where.end == i + 1
                stack(layers, x[:, i : i + 1], cache, where)
        assert not looks, (end, looks)
        assert cache.key_positions.end == 8 and not cache.is_empty and not looks


# what follows from positions is derived once


@pytest.fixture
def derived(monkeypatch):
    "Counts angles and masks as they are made."
    seen = []

    def count(owner, name):
        plain = getattr(owner, name)

        def spy(*args, **rest):
            seen.append(name)
            return plain(*args, **rest)

        monkeypatch.setattr(owner, name, spy)

    count(RotaryEmbedding, "cos_sin")
    count(attention, "build_mask")
    return seen


RAGGED = [[0, 1, 2, 3], [-1, -1, 0, 1], [0, 1, 2, -1]]


@both_paths
@pytest.mark.parametrize("ragged", [False, True])
def test_layers_share_what_follows_from_positions(derived, fused, ragged):
    rotary = RotaryEmbedding(4)
    layers = [layer(causal=True, rotary=rotary, fused=fused, std=0.2) for _ in range(3)]
    x = randn(3, 7, 16)
    positions = torch.tensor(RAGGED) if ragged else torch.arange(4)[None]
    masks = ["build_mask", "cos_sin"]

    def made(part, positions, cache=None, mask=None):
        derived.clear()
        y = stack(layers, part, cache, positions, mask)
        return y, sorted(derived)

    told = AttentionContext(Positions(positions))
    whole, once = made(x[:, :4], told)
    assert once == masks
    assert made(x[:, :4], told)[1] == []
    allowed = torch.ones(1, 1, 4, 4).bool()
    assert made(x[:, :4], told, mask=allowed)[1] == masks[:1]
    assert made(x[:, :4], told, mask=allowed)[1] == []
    cache = new_cache(3)
    first, once = made(x[:, :4], AttentionContext(Positions(positions)), cache)
    assert once == masks
    close(first, whole)
    for i in (4, 5, 6):
        part = x[:, i : i + 1]
        _, once = made(part, context_of(part, cache), cache)
        assert once == masks
        layers_pos = {id(kept.key_positions) for kept in cache.layers}
        assert len(layers_pos) == 1
    cache.select(torch.tensor([2, 0])), cache.crop(torch.tensor([4, 2]))
    assert len({id(kept.key_positions) for kept in cache.layers}) == 1
    part = x[[2, 0], 4:6]
    assert made(part, context_of(part, cache), cache)[1] == masks


def context_of(x, cache):
    "What a model makes for one call."
    return AttentionContext(Positions.of(None, x, cache))


def test_without_padding_no_mask_is_made(derived):
    layers = two_layers()
    x = randn(2, 7, 16)
    cache = new_cache(2)
    for part in x[:, :6].split((4, 1, 1), 1):
        stack(layers, part, cache, context_of(part, cache))
    assert derived == []
    part = x[:, :2]
    stack(layers, part, cache, context_of(part, cache))
    assert derived == ["build_mask"]


def test_layers_of_other_rules_do_not_share():
    "The same positions, but not causal, or another mask, or other keys."
    x = randn(3, 4, 16)
    positions = AttentionContext(Positions(torch.tensor(RAGGED)))
    rotaries = RotaryEmbedding(4), RotaryEmbedding(4, base=100.0)
    masks = None, some_mask(1, 1, 4, 4, seed=1), some_mask(1, 1, 4, 4, seed=2)
    for _ in range(2):
        for rotary in rotaries:
            for causal in (True, False):
                for mask in masks:
                    m = layer(causal=causal, rotary=rotary, std=0.3)
                    close(
                        m(x, positions=positions, mask=mask),
                        m(x, positions=positions.tensor, mask=mask),
                    )
    m = layer(causal=True, std=0.3)
    over = cross()
    cache = DynamicLayerCache()
    m(x, positions=positions, cache=cache)
    m(x, positions=positions)
    a = m(x, positions=positions, cache=copy.copy(cache))
    cache.crop(2)
    b = m(x, positions=positions, cache=cache)
    assert not torch.allclose(a, b, atol=1e-4)
    close(
        over(x, encoder_hidden_states=x, encoder_positions=positions),
        over(x, encoder_hidden_states=x, encoder_positions=positions.tensor),
    )


def test_positions_let_go_of_their_masks():
    "No ring of references: a mask must not wait for the collector."
    import gc
    import weakref

    m = layer(causal=True, rotary=RotaryEmbedding(4))
    x = randn(3, 4, 16)
    gc.collect()
    gc.disable()
    try:
        for cache in (None, DynamicLayerCache()):
            positions = AttentionContext(Positions(torch.tensor(RAGGED)))
            with torch.no_grad():
                m(x, positions=positions, cache=cache)
            ghost = weakref.ref(positions)
            del positions
            assert ghost() is None
    finally:
        gc.enable()


# the cache that knows its positions without looking


@both_paths
@pytest.mark.parametrize(
    "where", [dict(rotary=RotaryEmbedding(4)), dict(score_bias=ALiBi(4)), {}]
)
def test_counted_positions_equal_given_ones(where, fused):
    part = layer(causal=True, fused=fused, **where)
    x = randn(2, 7, 16)
    told = DynamicLayerCache()
    counted = DynamicLayerCache()
    for first, last in ((0, 3), (3, 4), (4, 5), (5, 7)):
        positions = torch.arange(first, last)[None].expand(2, -1)
        a = part(x[:, first:last], positions=positions, cache=told)
        b = part(x[:, first:last], cache=counted)
        close(b, a)
        assert counted.key_positions.start == 0 and told.key_positions.start is None
        assert counted.key_positions.length == counted.key_positions.end == last
        assert told.key_positions.end == last
        assert torch.equal(
            counted.key_positions.tensor.expand(2, -1), told.key_positions.tensor
        )
    counted.crop(4)
    counted.select(torch.tensor([1]))
    assert (counted.key_positions.start, counted.key_positions.length) == (0, 4)
    assert counted.lengths.tolist() == [4]
    close(part(x[1:, 4:5], cache=counted), part(x[1:, :5])[:, -1:])


@both_paths
def test_padding_once_told_is_never_forgotten(fused):
    part = layer(causal=True, fused=fused, rotary=RotaryEmbedding(4))
    x = randn(2, 6, 16)
    positions = torch.tensor([[0, 1, 2, 3], [-1, -1, 0, 1]])
    cache = new_cache(1)
    part(x[:, :4], positions=positions, cache=cache.layers[0])
    assert cache.key_positions.start is None
    for i in (4, 5):  # positions are counted on in each row
        out = part(x[:, i : i + 1], cache=cache.layers[0])
        assert cache.key_positions.start is None
        close(out[1], part(x[1:, 2 : i + 1])[0, -1:])
    assert cache.lengths.tolist() == [6, 4]


def test_positions_that_do_not_follow_are_kept_as_they_are():
    "After a gap nothing is known; the keys are told by their positions."
    m = layer(causal=True, rotary=RotaryEmbedding(4))
    x = randn(2, 5, 16)
    cache = DynamicLayerCache()
    m(x[:, :3], cache=cache)
    y = m(x[:, 3:], positions=Positions(start=7, length=2), cache=cache)
    assert cache.key_positions.start is None and cache.key_positions.end == 9
    at = torch.tensor([[0, 1, 2, 7, 8]])
    assert torch.equal(cache.key_positions.tensor, at)
    close(y, m(x, positions=at)[:, 3:])
    assert cache.key_positions.next(1).tensor.tolist() == [[9]]
    cache = DynamicLayerCache()
    m(x[:, :3], positions=Positions(start=7, length=3), cache=cache)
    assert cache.key_positions.start == 7
    y = m(x[:, 3:], positions=Positions(start=0, length=2), cache=cache)
    close(y, m(x, positions=torch.tensor([[7, 8, 9, 0, 1]]))[:, 3:])


# room to grow


def ways():
    return {
        "grad": torch.enable_grad,
        "no grad": torch.no_grad,
        "inference": torch.inference_mode,
    }


each_way = pytest.mark.parametrize("way", ways().values(), ids=ways())


@each_way
@pytest.mark.parametrize("ragged", [False, True])
@both_types
def test_with_and_without_gradients_the_cache_is_equal(way, ragged, dtype):
    layers = [m.to(dtype) for m in two_layers(rotary=RotaryEmbedding(4))]
    x = randn(3, 20, 16, dtype=dtype)
    positions = torch.tensor(RAGGED) if ragged else None

    def run(mode):
        cache = new_cache(2)
        parts = []
        with mode():
            for i, part in enumerate(x.split((4, *[1] * 9, 3, 4), 1)):
                parts.append(stack(layers, part, cache, None if i else positions))
        return torch.cat([p.clone() for p in parts], 1), cache

    a, plain = run(torch.enable_grad)
    b, other = run(way)
    assert torch.equal(a, b)
    for one, same in zip(plain.layers, other.layers, strict=True):
        assert all(
            torch.equal(s, t) for s, t in zip(one.tensors, same.tensors, strict=True)
        )
        assert torch.equal(one.key_positions.tensor, same.key_positions.tensor)
    assert plain.nbytes == other.nbytes


def test_growing_copies_seldom():
    "Without gradients, what is kept stays where it is for many steps."
    cache = DynamicLayerCache()
    addresses = []
    with torch.no_grad():
        for i in range(200):
            k, _ = cache.update(
                randn(1, 2, 1, 4), positions=Positions(start=i, length=1)
            )
            addresses.append(k.untyped_storage().data_ptr())
    moves = sum(a != b for a, b in itertools.pairwise(addresses))
    assert moves <= 10


def fill(cache, n, seed, start=None):
    start = (
        start
        if start is not None
        else (0 if cache.is_empty else cache.key_positions.length)
    )
    return [
        cache.update(
            randn(2, 3, 1, 4, seed=seed + i),
            randn(2, 3, 1, 5, seed=seed - i),
            positions=Positions(start=start + i, length=1),
        )
        for i in range(n)
    ][-1]


def bits(cache):
    return [x.clone() for x in cache.tensors]


def same_bits(cache, copies):
    return all(torch.equal(a, b) for a, b in zip(cache.tensors, copies, strict=True))


@each_way
def test_branches_of_a_copied_cache_do_not_overwrite_each_other(way):
    with way():
        first = DynamicLayerCache()
        fill(first, 5, seed=0)
        copies = [copy.copy(first) for _ in range(3)]
        held = []
        for i, branch in enumerate(copies):
            fill(branch, 3, seed=100 * (i + 1))
            held.append(bits(branch))
        before = bits(first)
        for branch, bits_then in zip(copies, held, strict=True):
            assert same_bits(branch, bits_then)
            assert branch.key_positions.length == 8
        assert same_bits(first, before) and first.key_positions.length == 5
        for i, branch in enumerate(copies):  # and go on, in turn
            fill(branch, 1, seed=700 + i)
        fill(first, 4, seed=900)
        for branch, bits_then in zip(copies, held, strict=True):
            assert branch.key_positions.length == 9
            assert all(
                torch.equal(a[..., :8, :], b)
                for a, b in zip(branch.tensors, bits_then, strict=True)
            )
        assert all(
            torch.equal(a[..., :5, :], b)
            for a, b in zip(first.tensors, before, strict=True)
        )


@each_way
@pytest.mark.parametrize("change", ["crop", "crop rows", "select"])
def test_branches_after_crop_and_select(way, change):
    def changed(cache):
        if change == "select":
            cache.select(torch.tensor([1, 0]))
        else:
            cache.crop(3 if change == "crop" else torch.tensor([3, 3]))

    with way():
        cache = DynamicLayerCache()
        fill(cache, 6, seed=0)
        branch = copy.copy(cache)
        kept = bits(cache)
        changed(branch)
        expected = [x[[1, 0]] if change == "select" else x[..., :3, :] for x in kept]
        assert same_bits(branch, expected)
        n = branch.key_positions.length
        fill(branch, 2, seed=50, start=n)
        written = bits(branch)
        assert same_bits(cache, kept)
        fill(cache, 2, seed=80)
        assert same_bits(branch, written)
        assert all(
            torch.equal(a[..., :6, :], b)
            for a, b in zip(cache.tensors, kept, strict=True)
        )
        assert all(
            torch.equal(a[..., :n, :], b)
            for a, b in zip(branch.tensors, expected, strict=True)
        )
        other = copy.copy(branch)
        changed(branch), fill(branch, 1, seed=60, start=branch.key_positions.length)
        assert same_bits(other, written)


def test_a_cache_of_inference_goes_on_outside_of_it():
    layers = two_layers(rotary=RotaryEmbedding(4))
    x = randn(2, 8, 16)
    cache = new_cache(2)
    whole = stack(layers, x)
    with torch.inference_mode():
        parts = [stack(layers, p, cache) for p in x[:, :4].split(2, 1)]
    with torch.no_grad():
        parts += [stack(layers, p, cache) for p in x[:, 4:6].split(1, 1)]
    with torch.inference_mode():
        parts.append(stack(layers, x[:, 6:7], cache))
    kept = [x for part in cache.layers for x in part.tensors]
    copies = [x.clone() for x in kept]
    with torch.no_grad():
        parts.append(stack(layers, x[:, 7:], cache))
    close(torch.cat([p.clone() for p in parts], 1), whole)
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_gradients_after_a_prefill_without():
    "What was kept without gradients is constant, and is not written to."
    layers = two_layers()
    x = randn(2, 6, 16)
    cache = new_cache(2)
    other = new_cache(2)
    with torch.no_grad():
        for part in x[:, :4].split((2, 1, 1), 1):
            stack(layers, part, cache)
    stack(layers, x[:, :4], other)
    for part in other.layers:
        part.tensors = [y.detach() for y in part.tensors]
    grads = []
    for kept in (cache, other):
        new = x[:, 4:].clone().requires_grad_()
        a = stack(layers, new[:, :1], kept)
        with torch.no_grad():  # a look ahead, in a branch
            ahead = KVCache([copy.copy(part) for part in kept.layers])
            stack(layers, 3 * new[:, 1:], ahead)
        b = stack(layers, new[:, 1:], kept)
        grads.append(pull(torch.cat([a, b], 1), [new])[0])
    close(*grads)


def test_tensors_of_another_type_are_joined_not_written():
    cache = DynamicLayerCache()
    with torch.no_grad():
        fill(cache, 3, seed=0)
        kept = bits(cache)
        wide = [randn(2, 3, 1, d).double() / 3 for d in (4, 5)]
        k, v, _ = cache.update(*wide, positions=Positions(start=3, length=1))
    assert k.dtype == v.dtype == torch.float64
    assert torch.equal(k[..., -1:, :], wide[0])
    assert torch.equal(v[..., :3, :], kept[1].double())


# crop, alone and in a stack


@each_way
def test_crop_with_one_number_for_each_row(way):
    layers = two_layers(rotary=RotaryEmbedding(4))
    x = randn(3, 9, 16)
    cache = new_cache(2)
    n = torch.tensor([1, 3, 4])
    with way():
        stack(layers, x[:, :5], cache)
        cache.crop(n)
        assert cache.lengths.tolist() == [1, 3, 4]
        assert cache.key_positions.next(1).tensor.tolist() == [[1], [3], [4]]
        assert cache.layers[0].tensors[0].shape[-2] == 4
        later = [stack(layers, part, cache) for part in x[:, 5:].split((1, 2, 1), 1)]
        y = torch.cat([part.clone() for part in later], 1)
    for i, k in enumerate(n.tolist()):
        text = torch.cat([x[i : i + 1, :k], x[i : i + 1, 5:]], 1)
        close(y[i : i + 1], stack(layers, text).detach()[:, k:])
    cache.crop(torch.tensor([0, 0, 0]))
    assert cache.lengths.tolist() == [0, 0, 0] and cache.is_empty
    assert cache.key_positions.length == 0
    assert cache.key_positions.next(2).tensor.tolist() == [[0, 1]]
    with way():  # and it begins again
        parts = [stack(layers, part, cache) for part in x.split((4, 5), 1)]
        close(torch.cat(parts, 1), stack(layers, x))


@pytest.mark.parametrize("n", range(6))
def test_one_number_is_that_number_for_each_row(n):
    for positions in (None, torch.tensor([[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]])):
        one = DynamicLayerCache()
        rows = DynamicLayerCache()
        for cache in (one, rows):
            layer(causal=True)(randn(2, 5, 16), positions=positions, cache=cache)
        one.crop(n), rows.crop(torch.tensor([n, n]))
        assert one.lengths.tolist() == rows.lengths.tolist()
        a, b = (
            [
                k.masked_fill((c.key_positions.tensor < 0)[:, None, :, None], 0)
                for k in c.tensors
            ]
            for c in (one, rows)
        )
        assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))
        assert torch.equal(
            one.key_positions.tensor.expand(2, -1),
            rows.key_positions.tensor.expand(2, -1),
        )


class Refuses(LayerCacheBase):
    "A layer that keeps a state from which nothing can be forgotten."

    def crop(self, n):
        raise ValueError("a state cannot be cropped")


@pytest.mark.parametrize("n", [2, torch.tensor([2, 1])])
@pytest.mark.parametrize("nested", [False, True])
def test_crop_is_all_or_nothing(n, nested):
    layers = two_layers()
    x = randn(2, 6, 16)
    cache = new_cache(2)
    with torch.no_grad():
        stack(layers, x[:, :3], cache), stack(layers, x[:, 3:4], cache)
    kept = [bits(part) for part in cache.layers]
    inner = KVCache(cache.layers) if nested else None
    every = KVCache([inner, Refuses()] if nested else [*cache.layers, Refuses()])
    with pytest.raises(ValueError, match="cannot be cropped"):
        every.crop(n)
    for part, copies in zip(cache.layers, kept, strict=True):
        assert same_bits(part, copies) and part.key_positions.length == 4
        assert part.key_positions.tensor.tolist() == [[0, 1, 2, 3]]
    assert every.lengths.tolist() == [4, 4]
    close(stack(layers, x[:, 4:], cache), stack(layers, x)[:, 4:])


def test_a_nested_cache():
    "A layer of several attentions: own keys, and those of a memory."
    own = [layer(causal=True, std=0.2) for _ in range(2)]
    over = [cross(std=0.2) for _ in range(2)]
    x = randn(2, 6, 16)
    memory = randn(2, 4, 16, seed=3)

    def run(x, encoder_hidden_states, cache=None):
        for i, (a, b) in enumerate(zip(own, over, strict=True)):
            one, two = cache.layers[i].layers if cache else (None, None)
            x = x + a(x, cache=one)
            x = x + b(x, encoder_hidden_states=encoder_hidden_states, cache=two)
        return x

    cache = KVCache(
        [
            KVCache([a.new_cache(2), b.new_cache(2)])
            for a, b in zip(own, over, strict=True)
        ]
    )
    assert cache.is_empty and cache.key_positions is None and cache.nbytes == 0
    whole = run(x, memory)
    parts = [run(p, memory, cache) for p in x[:, :5].split((3, 1, 1), 1)]
    close(torch.cat(parts, 1), whole[:, :5])
    assert cache.lengths.tolist() == [5, 5] and cache.key_positions.end == 5
    assert cache.nbytes == 2 * 2 * (2 * 4 * (5 + 4) * 4) * 4
    cache.crop(4)
    rows = torch.tensor([1, 1, 0])
    cache.select(rows)
    y = run(x[rows, 4:], None, cache)
    close(y, whole[rows, 4:])
    assert cache.nbytes == 2 * 2 * (3 * 4 * (6 + 4) * 4) * 4


# a cache of one's own


class Window:
    "Keeps the last ``size`` tokens; positions are a plain tensor."

    def __init__(self, size):
        self.size = size
        self.key_positions = None
        self.tensors = []

    @property
    def nbytes(self):
        return sum(x.nbytes for x in self.tensors)

    def update(self, *tensors, positions):
        at = Positions.of(positions).tensor.expand(len(tensors[0]), -1)
        if self.key_positions is not None:
            at = torch.cat([self.key_positions, at], -1)
            tensors = [
                torch.cat(p, -2) for p in zip(self.tensors, tensors, strict=True)
            ]
        self.key_positions = at[:, -self.size :]
        self.tensors = [x[..., -self.size :, :] for x in tensors]
        return *tensors, at

    def select(self, rows):
        self.tensors = [x[rows] for x in self.tensors]
        self.key_positions = self.key_positions[rows]

    def crop(self, n):
        keep = (self.key_positions[0] < n).nonzero()[:, 0]
        self.tensors = [x[..., keep, :] for x in self.tensors]
        self.key_positions = self.key_positions[:, keep]

    @property
    def lengths(self):
        at = self.key_positions
        return torch.zeros(1).long() if at is None else (at >= 0).sum(-1)

    def set_rows(self, rows, source):
        self.key_positions[rows] = source.key_positions
        for x, y in zip(self.tensors, source.tensors, strict=True):
            x[rows] = y


@both_paths
@pytest.mark.parametrize(
    "options", [dict(rotary=RotaryEmbedding(4)), dict(score_bias=ALiBi(4))]
)
def test_a_cache_of_another_class(fused, options):
    m = layer(causal=True, fused=fused, std=0.3, **options)
    x = randn(2, 8, 16)
    whole = Window(8)
    cache = KVCache([whole])
    assert cache.is_empty and cache.nbytes == 0
    parts = [m(p, cache=whole) for p in x[:, :6].split((3, 1, 2), 1)]
    close(torch.cat(parts, 1), m(x[:, :6]))
    assert not cache.is_empty and cache.nbytes > 0
    assert torch.equal(cache.key_positions.tensor, whole.key_positions)
    assert cache.key_positions.end == 6
    assert cache.key_positions.next(1).tensor.tolist() == [[6], [6]]
    cache.crop(4), cache.select(torch.tensor([1, 0]))
    close(m(x[[1, 0], 4:6], cache=whole), m(x[[1, 0], :6])[:, 4:])
    short = Window(3)
    at = torch.arange(8)
    y = torch.cat([m(p, cache=short) for p in x.split(1, 1)], 1)
    near_by = (at[:, None] - at < 4)[None, None]
    close(y, m(x, mask=near_by))


def test_any_cache_with_an_update_will_do():
    "A layer asks a cache for ``key_positions`` and ``update``, nothing else."
    m = layer(causal=True)
    x = randn(2, 3, 16)
    at = torch.arange(3)[None]
    plain = SimpleNamespace(
        key_positions=None, update=lambda k, v, positions: (k, v, at)
    )
    close(m(x, cache=plain), m(x))


def test_padding_of_a_cached_encoder_output_may_be_named_without_it():
    layer = spread(CrossAttention(16, 4))
    x = randn(2, 3, 16)
    memory = randn(2, 5, 16, seed=1)
    cache = layer.new_cache(2)
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]])
    layer(x, encoder_hidden_states=memory, cache=cache)
    close(
        layer(x, encoder_positions=positions, cache=cache),
        layer(x, encoder_hidden_states=memory, encoder_positions=positions),
    )
    with pytest.raises(ValueError, match=r"\(2, 4\) do not fit"):
        layer(x, encoder_positions=positions[:, :4], cache=cache)


def test_layers_share_the_mask_of_a_padded_memory(monkeypatch):
    made = []
    real = attention.build_mask
    monkeypatch.setattr(
        attention, "build_mask", lambda *a: (made.append(1), real(*a))[1]
    )
    layers = [spread(CrossAttention(16, 4)) for _ in range(3)]
    x = randn(2, 3, 16)
    memory = randn(2, 5, 16, seed=1)
    positions = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, -1, -1]])
    shared = AttentionContext(Positions(positions))
    for layer in layers:
        close(
            layer(x, encoder_hidden_states=memory, encoder_positions=shared)[1:],
            layer(x[1:], encoder_hidden_states=memory[1:, :3]),
        )
    assert len(made) == 1


@torch.no_grad()
def test_the_bias_of_the_values_is_one_of_the_output():
    one, other = (layer(causal=True, std=0.3) for _ in range(2))
    other.load_state_dict(one.state_dict())
    other.o_proj.bias += one.o_proj.weight @ one.v_proj.bias
    other.v_proj.bias.zero_()
    other.k_proj.bias += 7.0
    x = randn(2, 6, 16)
    assert torch.allclose(one(x), other(x), atol=1e-5)
    other.q_proj.bias += 7.0
    assert not torch.allclose(one(x), other(x), atol=1e-3)


# the record of the heads that copying needs


def test_the_record_of_heads_is_whole_and_made_by_its_script(tmp_path):
    out = tmp_path / "heads.csv"
    run(
        sys.executable,
        ROOT / "experiments" / "heads.py",
        "--steps",
        "1",
        "--seeds",
        "1",
        "--out",
        out,
    )
    with out.open(encoding="utf-8", newline="") as lines:
        (new,) = csv.DictReader(lines)
    kept = load_record("heads")
    assert [row["seed"] for row in kept] == [str(seed) for seed in range(10)]
    assert {row["steps"] for row in kept} == {"400"}
    assert all(set(row) == set(new) for row in kept)
    for row in (*kept, new):
        assert all(len(row[name].split()) == 4 for name in ("without_1", "without_2"))
    assert all(float(row["right"]) > 0.99 for row in kept) and float(new["right"]) < 0.2
