"""Multi-head attention and its cache, against PyTorch and by their laws."""
import itertools
import math
import os

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tformer import attention
from tformer.attend import attend, causal_mask, padding_mask
from tformer.attention import (
    Cache, LayerCache, MultiHeadAttention, combined_mask, explicit_attend,
    fused_attend, merge_heads, next_positions, online_attend, online_step,
    repeat_heads, split_heads)
from tformer.rotary import ALiBi, Rotary, T5Bias

quick = settings(max_examples=30, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
both_types = pytest.mark.parametrize("dtype",
                                     [torch.float32, torch.bfloat16])
both_paths = pytest.mark.parametrize("fused", [True, False])


def randn(*shape, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def some_mask(*shape, seed=0, dead=None):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(*shape, generator=g) < 0.6
    mask[..., 0] |= True
    if dead is not None:
        mask[..., dead, :] = False
    return mask


@torch.no_grad()
def spread(module, std=0.1):
    "Weights of standard deviation 0.1, biases away from 0."
    for i, p in enumerate(module.parameters()):
        p.copy_(std * randn(*p.shape, seed=100 + i))
    return module.eval()


def layer(d_model=16, n_heads=4, std=0.1, **options):
    return spread(MultiHeadAttention(d_model, n_heads, **options), std)


def close(ours, reference, tolerance=1e-5):
    "The parity of the course: relative to the largest number, at least 1."
    assert ours.shape == reference.shape and ours.dtype == reference.dtype
    worst = (ours - reference).abs().max().item()
    assert worst <= tolerance * max(1, reference.abs().max().item())


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
        assert torch.equal(heads[:, i], x[..., 4 * i:4 * i + 4])
    assert torch.equal(merge_heads(heads), x)
    assert torch.equal(merge_heads(heads),
                       torch.cat(heads.unbind(1), -1))


@pytest.mark.parametrize("kv, n", [(1, 4), (2, 3), (3, 1), (2, 2)])
def test_repeated_heads_are_consecutive(kv, n):
    x = randn(2, kv, 5, 4)
    ours = repeat_heads(x, n)
    assert torch.equal(ours, x.repeat_interleave(n, 1))
    for i in range(kv * n):
        assert torch.equal(ours[:, i], x[:, i // n])


# the explicit path, the fused path, the loop over blocks

HOWS = {
    "plain": {}, "causal": dict(causal=True), "scale": dict(scale=0.3),
    "mask": dict(mask=some_mask(2, 1, 6, 6, dead=2)),
    "mask per head": dict(mask=some_mask(2, 4, 6, 6, seed=1, dead=0)),
    "mask of two axes": dict(mask=some_mask(6, 6, dead=5)),
    "mask of one axis": dict(mask=some_mask(6)),
    "mask of keys": dict(mask=some_mask(2, 1, 1, 6)),
    "mask of queries": dict(mask=some_mask(1, 1, 6, 1, seed=3, dead=1)),
    "mask of all": dict(mask=torch.zeros(1, 1, 1, 1).bool()),
    "mask, causal": dict(mask=some_mask(6, 6, seed=2, dead=3),
                         causal=True),
    "bias": dict(bias=randn(4, 6, 6, seed=9)),
    "bias of one axis": dict(bias=randn(6, seed=9)),
    "bias, float64": dict(bias=randn(1, 1, 6, 6, dtype=torch.float64)),
    "bias, dead": dict(bias=torch.zeros(6, 6).index_fill(
        0, torch.tensor([4]), -math.inf)),
    "bias, mask, causal": dict(bias=randn(2, 4, 6, 6, seed=8), causal=True,
                               mask=some_mask(2, 1, 6, 6, dead=1)),
}


def qkv(t=6, s=6, d=8, d_v=8, kv=4, seed=0, dtype=torch.float32):
    return [randn(2, *size, seed=seed + i, dtype=dtype).requires_grad_()
            for i, size in enumerate(((4, t, d), (kv, s, d), (kv, s, d_v)))]


@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
@pytest.mark.parametrize("kv, d_v", [(4, 8), (4, 5), (2, 8), (1, 3)])
@both_types
def test_both_paths_agree(how, kv, d_v, dtype):
    x = qkv(kv=kv, d_v=d_v, dtype=dtype)
    out, weights = explicit_attend(*x, **how)
    fused = fused_attend(*x, **how)
    assert weights.dtype == torch.float32 and fused.dtype == dtype
    near(fused, out)
    dead = (weights == 0).all(-1)
    assert (fused[dead] == 0).all() and (out[dead] == 0).all()
    for a, b in zip(pull(fused, x), pull(out, x)):
        assert a.isfinite().all()
        near(a, b)
    assert (pull(fused, x[:1])[0][dead] == 0).all()


def test_explicit_is_attend_head_by_head():
    q, k, v = qkv(t=5, s=7, d_v=3, kv=2)
    mask, bias = some_mask(2, 4, 5, 7, dead=2), randn(2, 4, 5, 7, seed=5)
    out, weights = explicit_attend(q, k, v, mask, bias, 0.4)
    for i in range(4):
        o, w = attend(q[:, i], k[:, i // 2], v[:, i // 2], mask[:, i],
                      bias[:, i], 0.4)
        assert torch.equal(out[:, i], o) and torch.equal(weights[:, i], w)


def test_causal_is_the_causal_mask():
    x, at = qkv(), torch.arange(6)[None]
    out, weights = explicit_attend(*x, mask=causal_mask(at, at))
    for path in (explicit_attend, fused_attend):
        y = path(*x, causal=True)
        close(y if path is fused_attend else y[0], out)
    assert (weights.triu(1) == 0).all() and (
        weights.diagonal(dim1=-2, dim2=-1) > 0).all()


@pytest.mark.parametrize("path", [explicit_attend, fused_attend])
def test_dropout_keeps_the_mean(path):
    torch.manual_seed(0)
    q, k, v = (x.detach().expand(500, -1, -1, -1) for x in
               (y[:1] for y in qkv()))
    exact = explicit_attend(q[:1], k[:1], v[:1])[0]
    y = path(q, k, v, dropout=0.25)
    y = y[0] if path is explicit_attend else y
    assert not torch.allclose(y[0], y[1])
    assert (y.mean(0) - exact[0]).abs().max() < 0.2
    assert torch.equal(*(path(q, k, v, dropout=0.0)[0] for _ in range(2)))


def test_weights_come_before_dropout():
    torch.manual_seed(0)
    _, weights = explicit_attend(*qkv(), dropout=0.5)
    close(weights.sum(-1), torch.ones(2, 4, 6))


def test_autocast_does_not_reach_the_explicit_path():
    x = qkv(64, 64, 16, 16)
    plain, exact = explicit_attend(*x)
    with torch.autocast("cpu", torch.bfloat16):
        out, weights = explicit_attend(*x)
        m = layer(32, 4, causal=True, std=0.3)
        y, w = m(randn(2, 33, 32), need_weights=True)
    assert torch.equal(weights, exact) and torch.equal(out, plain)
    assert w.dtype == torch.float32
    assert (w.sum(-1) - 1).abs().max() < 1e-6
    near(y.bfloat16(), m(randn(2, 33, 32)).bfloat16())


def test_the_meta_device_works():
    m = MultiHeadAttention(16, 4, causal=True).to("meta")
    x = torch.empty(2, 5, 16, device="meta")
    assert m(x).shape == (2, 5, 16)
    assert m(x, need_weights=True)[1].shape == (2, 4, 5, 5)


@quick
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 12), seeds,
       st.booleans())
def test_online_equals_attend(t, s, block, seed, masked):
    q, k, v = qkv(t, s, d_v=3, seed=seed)
    mask = some_mask(2, 1, t, s, seed=seed) if masked else None
    if mask is not None:
        mask[:, :, 0] = False
    out = online_attend(30 * q, k, v, mask, block)
    expected, _ = attend(30 * q, k, v, mask)
    close(out, expected)
    for a, b in zip(pull(out, [q, k, v]), pull(expected, [q, k, v])):
        assert a.isfinite().all()
        close(a, b)


@pytest.mark.parametrize("mask", [None, some_mask(7), some_mask(5, 1)],
                         ids=["none", "keys", "queries"])
@both_types
def test_online_shapes_and_types(mask, dtype):
    q, k, v = (x[0, 0] for x in qkv(5, 7, d_v=3, dtype=dtype))
    ours = online_attend(q, k, v, mask, 2)
    assert ours.dtype == dtype
    near(ours, attend(q, k, v, mask)[0])


def test_no_keys_at_all():
    q, k, v = qkv(3, 0, d_v=5)
    for out in (online_attend(q, k, v), explicit_attend(q, k, v)[0],
                fused_attend(q, k, v)):
        assert out.shape == (2, 4, 3, 5) and (out == 0).all()


def test_an_online_step_keeps_peak_total_and_mean():
    scores, values = randn(3, 9), randn(9, 4, seed=1)
    state = (torch.full((3, 1), -math.inf), torch.zeros(3, 1),
             torch.zeros(3, 4))
    for part in (slice(0, 2), slice(2, 3), slice(3, 9)):
        state = online_step(state, scores[:, part], values[part])
        seen = slice(0, part.stop)
        peak, total, mixed = state
        assert torch.equal(peak[:, 0], scores[:, seen].amax(-1))
        close(total[:, 0], (scores[:, seen] - peak).exp().sum(-1))
        close(mixed / total, scores[:, seen].softmax(-1) @ values[seen])


# masks from positions

@quick
@given(st.integers(1, 5), st.integers(1, 5), st.booleans(), seeds)
def test_combined_masks_equal_loops(t, s, causal, seed):
    g = torch.Generator().manual_seed(seed)
    pos = torch.randint(-2, 6, (2, t), generator=g)
    k_pos = torch.randint(-2, 6, (2, s), generator=g)
    mask = torch.rand(2, 3, t, s, generator=g) < 0.7
    ours = combined_mask(pos if causal else None, k_pos, mask,
                         (2, 3, t, s))
    for b, h, i, j in itertools.product(*map(range, (2, 3, t, s))):
        asked = k_pos[b, j]
        assert ours[b, h, i, j] == (mask[b, h, i, j] and asked >= 0 and (
            not causal or asked <= pos[b, i]))


# the layer against nn.MultiheadAttention

def pair(memory=None, packed=False, bias=True, batch=2, **options):
    "Our layer and PyTorch's, with equal weights."
    peer = spread(nn.MultiheadAttention(
        16, 4, bias=bias, kdim=memory, vdim=memory, batch_first=True))
    ours = layer(packed=packed, d_memory=memory, bias=bias, **options)
    with torch.no_grad():
        parts = (peer.q_proj_weight, peer.k_proj_weight,
                 peer.v_proj_weight)
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
                    getattr(ours, name).bias.copy_(
                        peer.in_proj_bias.chunk(3)[i])
    ours.o_proj.load_state_dict(peer.out_proj.state_dict())
    return ours, peer


def parameters(ours, peer):
    "Matching parameters: ours in parts, theirs as functions to parts."
    found = [(ours.o_proj.weight, peer.out_proj.weight, slice(None))]
    for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
        rows = slice(16 * i, 16 * i + 16)
        p = getattr(ours, name, None)
        if p is None:
            return found + [(ours.qkv_proj.weight, peer.in_proj_weight,
                             slice(None))]
        if peer.in_proj_weight is None:
            found.append((p.weight, getattr(peer, f"{name}_weight"),
                          slice(None)))
        else:
            found.append((p.weight, peer.in_proj_weight, rows))
        if p.bias is not None:
            found.append((p.bias, peer.in_proj_bias, rows))
    return found


def to_attn_mask(mask, batch, n_heads):
    "The adapter of the page Notation."
    return ~mask.expand(batch, n_heads, -1, -1).flatten(0, 1)


def equal_to_torch(ours, peer, x, source=None, live=None, attn_mask=None,
                   ignored=None, **how):
    y = ours(x, **how)
    source = x if source is None else source
    expected, weights = peer(x, source, source, attn_mask=attn_mask,
                             key_padding_mask=ignored)
    again, w = ours(x, **how, need_weights=True)
    live = torch.ones_like(y[..., :1]) if live is None else live
    close(again * live, expected * live)
    close(y * live, expected * live)
    close(w.mean(1) * live, weights * live)
    match = parameters(ours, peer)
    inputs = list({x, source})
    a = pull(y * live, [*inputs, *(p for p, _, _ in match)])
    b = pull(expected * live, [*inputs, *(p for _, p, _ in match)])
    for i, (one, other) in enumerate(zip(a, b)):
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
    equal_to_torch(ours, peer, randn(2, 6, 16).requires_grad_(),
                   attn_mask=to_attn_mask(causal_mask(at, at), 2, 4)
                   if causal else None)


@both_paths
@pytest.mark.parametrize("width", [None, 16, 10, 24])
@pytest.mark.parametrize("padded", [False, True])
def test_cross_attention_equals_torch(fused, width, padded):
    ours, peer = pair(width, fused=fused)
    memory = randn(2, 9, width or 16, seed=3).requires_grad_()
    k_pos = torch.arange(9).repeat(2, 1)
    k_pos[0, 3:] = k_pos[1, 4] = -1
    equal_to_torch(ours, peer, randn(2, 5, 16).requires_grad_(), memory,
                   ignored=k_pos < 0 if padded else None, memory=memory,
                   memory_pos=k_pos if padded else None)


@both_paths
def test_masks_through_the_adapters(fused):
    ours, peer = pair(fused=fused, causal=True)
    pos = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, -1, -1]])
    mask = some_mask(2, 4, 6, 6) & causal_mask(pos, pos)
    mask = mask | (pos < 0)[:, None, :, None]  # else their rows are NaN
    live = (pos >= 0)[..., None].float()
    equal_to_torch(ours, peer, randn(2, 6, 16).requires_grad_(),
                   live=live, pos=pos, mask=some_mask(2, 4, 6, 6),
                   attn_mask=to_attn_mask(mask, 2, 4), ignored=pos < 0)


@both_paths
def test_keys_and_values_of_different_widths(fused):
    "kdim and vdim are one memory in which each looks at its own part."
    peer = spread(nn.MultiheadAttention(16, 4, kdim=10, vdim=6,
                                        batch_first=True))
    ours = layer(d_memory=16, fused=fused)
    with torch.no_grad():
        for p in (ours.k_proj, ours.v_proj):
            p.weight.zero_()
        ours.q_proj.weight.copy_(peer.q_proj_weight)
        ours.k_proj.weight[:, :10] = peer.k_proj_weight
        ours.v_proj.weight[:, 10:] = peer.v_proj_weight
        for p, b in zip((ours.q_proj, ours.k_proj, ours.v_proj),
                        peer.in_proj_bias.chunk(3)):
            p.bias.copy_(b)
    ours.o_proj.load_state_dict(peer.out_proj.state_dict())
    x, keys = randn(2, 5, 16).requires_grad_(), randn(2, 7, 10, seed=1)
    values = randn(2, 7, 6, seed=2).requires_grad_()
    y = ours(x, memory=torch.cat([keys, values], -1))
    expected, _ = peer(x, keys, values)
    close(y, expected)
    mine = [x, values, ours.v_proj.weight, ours.k_proj.weight]
    theirs = [x, values, peer.v_proj_weight, peer.k_proj_weight]
    a, b = pull(y, mine), pull(expected, theirs)
    for one, other in zip((*a[:2], a[2][:, 10:], a[3][:, :10]), b):
        close(one, other)


def by_hand(m, x, memory=None, turn=None, bias=None, mask=None):
    "The equations: one head after the other, what each writes added."
    source, total = x if memory is None else memory, m.o_proj.bias
    d, d_v = (w // m.n_heads for w in (m.widths[0], m.widths[2]))
    for i in range(m.n_heads):
        rows, rows_v = (slice(w * i, w * i + w) for w in (d, d_v))
        q = F.linear(x, m.q_proj.weight[rows], m.q_proj.bias[rows])
        k = F.linear(source, m.k_proj.weight[rows], m.k_proj.bias[rows])
        v = F.linear(source, m.v_proj.weight[rows_v],
                     m.v_proj.bias[rows_v])
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
@pytest.mark.parametrize("options", [
    dict(d_head=6), dict(d_v=3), dict(d_head=2, d_v=9), dict(n_heads=5,
                                                             d_head=3)])
def test_widths_of_heads(fused, options):
    m = layer(**options, fused=fused)
    x = randn(2, 5, 16).requires_grad_()
    y, expected = m(x), by_hand(m, x)
    close(y, expected)
    weights = [x, m.q_proj.weight, m.v_proj.weight, m.o_proj.weight]
    for a, b in zip(pull(y, weights), pull(expected, weights)):
        close(a, b)


@both_paths
def test_rotary_gets_positions(fused):
    rotary, pos = Rotary(4), torch.tensor([[3, 4, 5, 9, 11]])
    m = layer(rotary=rotary, causal=True, fused=fused, std=0.3)
    x = randn(2, 5, 16)
    close(m(x, pos=pos), by_hand(
        m, x, turn=lambda q, k: rotary(q, k, pos=pos),
        mask=causal_mask(pos, pos)[:, 0]))
    near(m(x, pos=pos + 50), m(x, pos=pos))
    assert not torch.allclose(m(x), m(x, pos=pos), atol=1e-3)
    at = torch.arange(5)[None]
    close(m(x), m(x, pos=at))


@both_paths
@pytest.mark.parametrize("causal", [False, True])
def test_score_bias_gets_positions(fused, causal):
    table = T5Bias(4, causal=causal)
    m = spread(MultiHeadAttention(16, 4, score_bias=table, causal=causal,
                                  fused=fused), 0.3)
    x, at = randn(2, 5, 16), torch.arange(5)[None]
    expected = by_hand(m, x, bias=table(at, at),
                       mask=causal_mask(at, at)[:, 0] if causal else None)
    close(m(x), expected)
    for a, b in zip(pull(m(x), list(table.parameters())),
                    pull(expected, list(table.parameters()))):
        close(a, b)


def test_names_of_parameters():
    names = [f"{p}_proj.{kind}" for p in "qkvo"
             for kind in ("weight", "bias")]
    assert list(layer().state_dict()) == names
    assert list(layer(bias=False).state_dict()) == names[::2]
    assert list(layer(packed=True).state_dict()) == [
        "qkv_proj.weight", "qkv_proj.bias", "o_proj.weight", "o_proj.bias"]
    assert layer(d_memory=7).v_proj.weight.shape == (16, 7)


@both_paths
def test_packed_is_the_three_side_by_side(fused):
    apart = layer(d_v=5, fused=fused, causal=True)
    one = layer(d_v=5, fused=fused, causal=True, packed=True)
    with torch.no_grad():
        for kind in ("weight", "bias"):
            getattr(one.qkv_proj, kind).copy_(torch.cat([
                getattr(p, kind) for p in (apart.q_proj, apart.k_proj,
                                           apart.v_proj)]))
    one.o_proj.load_state_dict(apart.o_proj.state_dict())
    close(one(randn(2, 5, 16)), apart(randn(2, 5, 16)))


def test_a_view_of_packed_projections_leaks_the_future():
    "The mistake in ATT-11: which outputs move when a token changes."
    x = randn(1, 6, 16)
    m = layer(packed=True, causal=True, std=0.3)

    def moved(token, split):
        other = x.clone()
        other[:, token] += 1.0
        a, b = (fused_attend(*split(m.qkv_proj(y)), causal=True)
                for y in (x, other))
        change = (a - b).abs().amax((0, 1, 3))
        return (change > 1e-6).nonzero()[:, 0].tolist()

    def view(y):
        return y.view(3, 1, 6, 4, 4).transpose(2, 3)

    def right(y):
        return y.view(1, 6, 3, 4, 4).permute(2, 0, 3, 1, 4)

    assert moved(5, view) == [3, 4, 5] and moved(5, right) == [5]
    assert moved(4, view) == [0, 1, 2, 3, 4, 5]


def test_the_bias_of_the_keys_does_nothing():
    m, x = layer(causal=True, std=0.3), randn(2, 6, 16)
    grads = dict(zip("qkvo", pull(m(x), [
        getattr(m, f"{n}_proj").bias for n in "qkvo"])))
    assert grads["k"].abs().max() < 1e-6 < 1e-3 < grads["q"].abs().max()


# dropout

@both_paths
def test_dropout_acts_in_training_only(fused):
    m, x = layer(dropout=0.5, fused=fused), randn(2, 6, 16)
    plain = layer(fused=fused)
    assert torch.equal(m(x), plain(x))
    m.train()
    torch.manual_seed(0)
    assert not torch.allclose(m(x), m(x), atol=1e-4)
    assert not torch.allclose(m(x), plain(x), atol=1e-4)
    _, weights = m(x, need_weights=True)
    close(weights, plain(x, need_weights=True)[1])
    assert torch.equal(m.eval()(x), plain(x))


# causality and padding

KINDS = {"plain": {}, "packed": dict(packed=True),
         "rotary": dict(rotary=Rotary(4)), "alibi": dict(score_bias=ALiBi(4)),
         "widths": dict(d_head=6, d_v=3)}
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
        a, b = m(x), m(other)
        assert a.dtype == dtype
        if not fused:
            assert torch.equal(a[:, :cut], b[:, :cut])
        near(a[:, :cut], b[:, :cut])
        assert ((a - b)[:, cut:].abs().amax((0, 2)) > 1e-3).all()


PADDED = [[-1, -1, 0, 1, 2, 3], [0, 1, 2, 3, -1, -1], [0, -1, 1, 2, -7, 3]]


@every_kind
@both_paths
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("places", PADDED, ids=["left", "right", "within"])
@pytest.mark.parametrize("noise", [1.0, 1e4])
def test_padded_equals_unpadded(options, fused, causal, places, noise):
    m = layer(causal=causal, fused=fused, std=0.3, **options)
    x, pos = noise * randn(2, 6, 16, seed=1), torch.tensor([places])
    x[:, pos[0] >= 0] = randn(2, 4, 16)
    near(m(x, pos=pos)[:, pos[0] >= 0], m(randn(2, 4, 16)))


@both_paths
@both_types
@pytest.mark.parametrize("asks", [False, True])
def test_dead_rows_are_the_bias_of_the_output(fused, dtype, asks):
    m = layer(causal=True, fused=fused).to(dtype)
    x = randn(2, 5, 16, dtype=dtype).requires_grad_()
    pos = torch.tensor([[-1, -1, 0, 1, 2], [-1] * 5])
    y = m(x, pos=pos, need_weights=asks)
    y = y[0] if asks else y
    for dead in (y[0, :2], y[1]):
        assert torch.equal(dead, m.o_proj.bias.expand_as(dead))
    params = [x, *m.parameters()]
    grads = pull(y, params)
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][0, :2] == 0).all() and (grads[0][1] == 0).all()
    alone = pull(y[1], params[1:5])
    assert all((g == 0).all() for g in alone)  # before o_proj: exactly 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@both_paths
@both_types
def test_on_a_gpu(fused, dtype):
    m = layer(64, 4, causal=True, fused=fused).to(dtype)
    x, pos = randn(2, 9, 64, dtype=dtype), torch.arange(-2, 7)[None]
    expected = m(x, pos=pos)
    m = m.cuda()
    y = m(x.cuda().requires_grad_(), pos=pos.cuda())
    near(y.cpu(), expected)
    y.float().pow(2).sum().backward()
    assert all(p.grad.isfinite().all() for p in m.parameters())
    cache = Cache(1)
    parts = [m(part, cache=cache.layers[0])
             for part in x.cuda().split((4, 1, 4), 1)]
    near(torch.cat(parts, 1), m(x.cuda()))


def test_the_causal_flag_is_used_only_where_it_is_right(monkeypatch):
    seen, kernel = [], F.scaled_dot_product_attention

    def spy(q, k, v, mask=None, p=0.0, causal=False, **rest):
        seen.append((mask is None, causal))
        return kernel(q, k, v, mask, p, causal, **rest)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", spy)
    m, x, cache = layer(causal=True), randn(2, 4, 16), LayerCache()
    at = torch.arange(4)[None]
    m(x), m(x, cache=cache), layer()(x)
    assert seen == [(True, True), (True, True), (True, False)]
    seen.clear()
    m(x, pos=at), m(x, mask=torch.ones(4, 4).bool()), m(x, cache=cache)
    layer()(x, pos=at), layer(causal=True, score_bias=ALiBi(4))(x)
    assert seen == [(False, False)] * 5
    seen.clear()
    layer()(x, memory=x), layer()(x, memory=x, memory_pos=at)
    assert seen == [(True, False), (False, False)]


# the cache

def stack(layers, x, cache=None, pos=None, mask=None):
    for i, m in enumerate(layers):
        part = None if cache is None else cache.layers[i]
        x = x + m(x, pos=pos, cache=part, mask=mask)
    return x


def two_layers(**options):
    return [layer(causal=True, std=0.2, **options) for _ in range(2)]


def chunkings(n):
    for cuts in itertools.product((False, True), repeat=n - 1):
        ends = [i for i, cut in enumerate(cuts, start=1) if cut] + [n]
        yield [b - a for a, b in zip([0, *ends], ends)]


@every_kind
@both_paths
def test_cached_equals_uncached_for_every_chunking(options, fused):
    layers, x = two_layers(fused=fused, **options), randn(2, 5, 16)
    whole = stack(layers, x)
    assert len(list(chunkings(5))) == 16
    for sizes in chunkings(5):
        cache = Cache(2)
        parts = [stack(layers, part, cache) for part in x.split(sizes, 1)]
        close(torch.cat(parts, 1), whole)
        assert cache.n_seen.tolist() == [5, 5]


@both_types
def test_cached_in_both_types(dtype):
    layers = [m.to(dtype) for m in two_layers(rotary=Rotary(4))]
    x, cache = randn(2, 6, 16, dtype=dtype), Cache(2)
    parts = [stack(layers, part, cache) for part in x.split((3, 1, 2), 1)]
    near(torch.cat(parts, 1), stack(layers, x))
    assert all(t.dtype == dtype for t in cache.layers[0].past[:2])


def test_gradients_flow_through_the_cache():
    layers, x = two_layers(), randn(2, 5, 16).requires_grad_()
    cache = Cache(2)
    y = torch.cat([stack(layers, p, cache) for p in x.split((2, 3), 1)], 1)
    close(*(pull(out, [x])[0] for out in (y, stack(layers, x))))


@quick
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3),
       st.integers(1, 4), st.integers(0, 3), st.booleans(), seeds)
def test_ragged_batches_equal_each_text_alone(lengths, more, chunk, left,
                                              seed):
    "Prefill with padding on either side, then continue token by token."
    layers = two_layers(rotary=Rotary(4))
    n, b = max(lengths), len(lengths)
    texts = [randn(1, k + more, 16, seed=seed + i)
             for i, k in enumerate(lengths)]
    x, pos = randn(b, n, 16, seed=seed + 9), torch.full((b, n), -1)
    for i, k in enumerate(lengths):
        place = slice(n - k, n) if left else slice(0, k)
        x[i, place], pos[i, place] = texts[i][0, :k], torch.arange(k)
    cache, size = Cache(2), chunk or n
    first = torch.cat([stack(layers, part, cache, at) for part, at in
                       zip(x.split(size, 1), pos.split(size, 1))], 1)
    assert cache.n_seen.tolist() == lengths
    later = []
    for step in range(more):
        new = torch.cat([t[:, k + step:k + step + 1]
                         for t, k in zip(texts, lengths)])
        later.append(stack(layers, new, cache))
    later = torch.cat(later, 1)
    for i, k in enumerate(lengths):
        alone = stack(layers, texts[i])
        close(first[i:i + 1, pos[i] >= 0], alone[:, :k])
        close(later[i:i + 1], alone[:, k:])


@pytest.mark.parametrize("rows", [[1, 0], [1, 1, 0], [0], [2, 2, 2, 2]])
@pytest.mark.parametrize("ragged", [False, True])
def test_select_reorders_every_row(rows, ragged):
    layers, x = two_layers(rotary=Rotary(4)), randn(3, 6, 16)
    pos = torch.tensor([[0, 1, 2, 3], [-1, 0, 1, 2], [-1, -1, 0, 1]])
    if not ragged:
        pos = pos[:1]
    cache = Cache(2)
    stack(layers, x[:, :4], cache, pos)
    both = Cache(2)
    stack(layers, x[rows, :4], both, pos[rows] if ragged else pos)
    cache.select(torch.tensor(rows))
    assert cache.n_seen.tolist() == both.n_seen.tolist()
    for a, b in zip(cache.layers, both.layers):
        for one, other in zip(a.past, b.past):
            close(one, other) if one.is_floating_point() else (
                torch.testing.assert_close(one, other))
    new = x[rows, 4:]
    close(stack(layers, new, cache), stack(layers, new, both))


@pytest.mark.parametrize("n", range(7))
def test_crop_forgets_from_n_on(n):
    layers, x, cache = two_layers(rotary=Rotary(4)), randn(2, 8, 16), Cache(2)
    stack(layers, x[:, :5], cache)
    cache.crop(n)
    kept = min(n, 5)
    assert cache.n_seen.tolist() == [kept, kept]
    assert cache.empty == (kept == 0)
    assert cache.layers[0].past[0].shape[-2] == kept
    assert next_positions(cache, 2).expand(2, 2).tolist() == [
        [kept, kept + 1]] * 2
    whole = stack(layers, torch.cat([x[:, :kept], x[:, 5:]], 1))
    close(stack(layers, x[:, 5:], cache), whole[:, kept:])


def test_crop_counts_positions_in_ragged_rows():
    layers, x, cache = two_layers(), randn(2, 7, 16), Cache(2)
    pos = torch.tensor([[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]])
    stack(layers, x[:, :5], cache, pos)
    cache.crop(2)
    assert cache.n_seen.tolist() == [2, 2]
    y = stack(layers, x[:, 5:], cache)
    for i, start in ((0, 0), (1, 2)):
        text = torch.cat([x[i:i + 1, start:start + 2], x[i:i + 1, 5:]], 1)
        close(y[i:i + 1], stack(layers, text)[:, 2:])


def test_nbytes_is_what_is_stored():
    layers, cache = two_layers(d_head=6, d_v=3), Cache(2)
    assert cache.nbytes == 0
    stack(layers, randn(2, 5, 16), cache)
    assert cache.nbytes == 2 * (2 * 4 * 5 * (6 + 3)) * 4
    packed, cache = layer(causal=True, packed=True), LayerCache()
    packed(randn(2, 5, 16), cache=cache)
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in cache.past[:2]}
    assert sum(held.values()) == cache.nbytes  # nothing else kept alive
    cache.keep(randn(2, 4, 3, 4), randn(2, 4, 3, 2), pos=torch.zeros(
        1, 3).long())
    assert cache.nbytes == (2 * 4 * 5 * 8 + 2 * 4 * 3 * 6) * 4


def test_nothing_is_stored_on_the_module():
    m, x = layer(causal=True), randn(2, 4, 16)
    before = {k: id(v) for k, v in vars(m).items()}
    m(x, cache=LayerCache())
    assert before == {k: id(v) for k, v in vars(m).items()}
    assert torch.equal(m(x), m(x, cache=LayerCache()))


def test_an_update_leaves_what_it_returned_alone():
    cache, at = LayerCache(), torch.arange(3)[None]
    k, v, k_pos = cache.update(randn(2, 4, 3, 4), randn(2, 4, 3, 5), pos=at)
    copies = [x.clone() for x in (k, v, k_pos)]
    *_, later = cache.update(randn(2, 4, 1, 4), randn(2, 4, 1, 5),
                             pos=torch.tensor([[3]]))
    cache.crop(1), cache.select(torch.tensor([1]))
    assert later.tolist() == [[0, 1, 2, 3]]
    assert all(torch.equal(a, b) for a, b in zip((k, v, k_pos), copies))


def test_a_cache_keeps_any_tensors_and_any_layer():
    "Time is axis -2 whatever the number of axes; positions may differ."
    cache = Cache(3, make=LayerCache)
    one = cache.layers[1]
    one.update(randn(2, 3, 7), pos=torch.tensor([[0, 1, 2]]))
    latent, k_pos = one.update(randn(2, 1, 7, seed=1),
                               pos=torch.tensor([[3], [-1]]))
    assert latent.shape == (2, 4, 7)
    assert k_pos.tolist() == [[0, 1, 2, 3], [0, 1, 2, -1]]
    assert one.n_seen.tolist() == [4, 3]
    assert cache.layers[0].n_seen.tolist() == [0] and cache.empty


def test_next_positions():
    assert next_positions(None, 3).tolist() == [[0, 1, 2]]
    cache = LayerCache()
    assert next_positions(cache, 2).tolist() == [[0, 1]]
    cache.update(randn(2, 3, 4), pos=torch.tensor([[0, 1, 2], [-1, -1, 0]]))
    assert next_positions(cache, 2).tolist() == [[3, 4], [1, 2]]


@both_paths
@pytest.mark.parametrize("padded", [False, True])
def test_memory_is_kept_follows_select_and_ignores_crop(fused, padded):
    m, cache = layer(d_memory=10, fused=fused), LayerCache()
    x, memory = randn(2, 3, 16), randn(2, 5, 10)
    at = torch.tensor([[0, 1, 2, -1, -1], [0, 1, 2, 3, 4]])
    how = dict(memory_pos=at) if padded else {}
    expected = m(x, memory=memory, **how)
    close(m(x, memory=memory, cache=cache, **how), expected)
    assert cache.past is None and len(cache.memory) == 3
    noise = randn(2, 5, 10, seed=7)
    close(m(x, memory=noise, cache=cache), expected)
    cache.crop(0)
    cache.select(torch.tensor([1, 0, 0]))
    close(m(x[[1, 0, 0]], memory=noise, cache=cache), expected[[1, 0, 0]])
    assert cache.memory[0].shape == (3, 4, 5, 4)


def test_self_and_cross_attention_share_a_layer_cache():
    own, cross, cache = layer(causal=True), layer(), LayerCache()
    x, memory = randn(2, 4, 16), randn(2, 3, 16, seed=1)

    def block(x, cache=None):
        return cross(own(x, cache=cache), memory=memory, cache=cache)

    parts = [block(p, cache) for p in x.split((2, 1, 1), 1)]
    close(torch.cat(parts, 1), block(x))
    assert cache.n_seen.tolist() == [4, 4]


def test_a_mask_meets_all_keys():
    "With a cache, the mask of the caller covers earlier keys too."
    layers, x, cache = two_layers(), randn(2, 6, 16), Cache(2)
    document = torch.tensor([[0, 0, 0, 1, 1, 1]])
    mask = (document[:, :, None] == document[:, None])[:, None]
    whole = stack(layers, x, mask=mask)
    a = stack(layers, x[:, :4], cache, mask=mask[:, :, :4, :4])
    b = stack(layers, x[:, 4:], cache, mask=mask[:, :, 4:])
    close(torch.cat([a, b], 1), whole)
    close(whole[:, 3:], stack(layers, x[:, 3:]))


# compiled

@pytest.mark.skipif("TFORMER_SHAPES" in os.environ,
                    reason="a checked signature cannot be compiled")
@pytest.mark.parametrize("options", [
    {}, dict(need_weights=True), dict(pos=torch.tensor([[-1, 0, 1, 2]])),
    dict(mask=torch.ones(4, 4).bool()), dict(cached=True),
    dict(memory=randn(2, 5, 16))], ids=lambda o: "-".join(o) or "plain")
def test_the_graph_does_not_break(options):
    m = layer(causal="memory" not in options)
    how = {k: v for k, v in options.items() if k != "cached"}

    def run(x):
        if "cached" not in options:
            y = m(x, **how)
            return y[0] if isinstance(y, tuple) else y
        cache = LayerCache()
        return torch.cat([m(p, cache=cache) for p in x.split(2, 1)], 1)

    x = randn(2, 4, 16)
    close(torch.compile(run, backend="eager", fullgraph=True)(x), run(x))


@pytest.mark.skipif("TFORMER_SHAPES" in os.environ,
                    reason="a checked signature cannot be compiled")
def test_one_graph_serves_every_length():
    m, x = layer(causal=True), randn(2, 9, 16)
    torch._dynamo.reset()  # it limits the graphs of one function
    fast = torch.compile(m, backend="aot_eager", fullgraph=True)
    for t in (4, 6, 9, 1):  # from the second on, the length is a symbol
        close(fast(x[:, :t]), m(x[:, :t]))
    cache = LayerCache()
    parts = [fast(part, cache=cache) for part in x.split([4, 1, 1, 3], 1)]
    close(torch.cat(parts, 1), m(x))


# mistakes are named

@pytest.mark.parametrize("call, says", [
    (lambda: MultiHeadAttention(10, 4), "d_model 10.*n_heads 4"),
    (lambda: MultiHeadAttention(8, 0), "8.*n_heads 0"),
    (lambda: MultiHeadAttention(8, 2, d_head=0), "d_head 0"),
    (lambda: MultiHeadAttention(8, 2, d_v=-1), "d_v -1"),
    (lambda: MultiHeadAttention(8, 2, dropout=1.0), r"\[0, 1\), got 1.0"),
    (lambda: MultiHeadAttention(8, 2, dropout=-0.1), r"got -0.1"),
    (lambda: MultiHeadAttention(8, 2, packed=True, d_memory=5), "5"),
    (lambda: MultiHeadAttention(8, 2, d_memory=0), "d_memory.*got 0"),
    (lambda: split_heads(randn(1, 2, 10), 4), "10.*4 heads"),
    (lambda: repeat_heads(randn(1, 2, 3, 4), 0), "0 times"),
    (lambda: layer()(randn(2, 3, 8)), r"16.*\(2, 3, 8\)"),
    (lambda: layer()(randn(3, 16)), r"\(3, 16\)"),
    (lambda: layer()(randn(2, 3, 16), pos=torch.arange(4)[None]),
     r"pos of shape \(1, 4\).*3 tokens"),
    (lambda: layer()(randn(2, 3, 16), pos=torch.zeros(3, 3).long()),
     r"\(3, 3\).*2 rows"),
    (lambda: layer()(randn(2, 3, 16), pos=torch.arange(3)),
     r"pos.*shape \(3,\)"),
    (lambda: layer()(randn(2, 3, 16), pos=torch.zeros(1, 3)), "float32"),
    (lambda: layer()(randn(2, 3, 16), memory_pos=torch.arange(3)[None]),
     "without"),
    (lambda: layer()(randn(2, 3, 16), mask=torch.ones(3, 4).bool()),
     r"mask of shape \(3, 4\).*\(2, 4, 3, 3\)"),
    (lambda: layer()(randn(2, 3, 16), mask=torch.ones(3, 3)),
     "mask is boolean.*float32"),
    (lambda: layer(n_heads=2)(randn(2, 3, 16),
                              mask=torch.ones(2, 3, 3).bool()),
     "two things"),
    (lambda: layer()(randn(2, 3, 16), memory=randn(3, 3, 16)),
     "batch of 2 meets a memory of 3"),
    (lambda: layer(d_memory=8)(randn(2, 3, 16), memory=randn(2, 3, 16)),
     r"8\), got \(2, 3, 16\)"),
    (lambda: layer(causal=True)(randn(2, 3, 16), memory=randn(2, 3, 16)),
     "causal=False"),
    (lambda: layer(packed=True)(randn(2, 3, 16), memory=randn(2, 3, 16)),
     "packed=False"),
    (lambda: layer(rotary=Rotary(4))(randn(2, 3, 16),
                                     memory=randn(2, 3, 16)), "rotary"),
    (lambda: layer()(randn(2, 3, 16), cache=LayerCache()), "causal=True"),
    (lambda: Cache(0), "1 layer or more.*0"),
    (lambda: LayerCache().crop(-1), "-1"),
    (lambda: fused_attend(*qkv(t=3, s=5), causal=True), "3 queries.*5 keys"),
    (lambda: explicit_attend(*qkv(t=3, s=5), causal=True), "3 queries.*5"),
    (lambda: fused_attend(*qkv(kv=3)), "4 query heads.*3 key heads"),
    (lambda: fused_attend(*qkv(), mask=torch.ones(6, 6)), "boolean"),
    (lambda: fused_attend(*qkv(), mask=torch.ones(6, 5).bool()),
     r"\(6, 5\)"),
    (lambda: fused_attend(*qkv(), bias=torch.ones(6, 6).bool()), "bias"),
    (lambda: online_attend(*qkv(), mask=torch.ones(6, 5).bool()),
     r"\(6, 5\)"),
    (lambda: online_attend(randn(2, 3), randn(4, 5), randn(4, 5)),
     "width 3.*width 5"),
])
def test_wrong_arguments_are_named(call, says):
    with pytest.raises(ValueError, match=f"(?s){says}"):
        call()


@pytest.mark.parametrize("new, pos, says", [
    ((randn(3, 4, 1, 4),), torch.tensor([[3]]), "batch of 3.*of 2"),
    ((randn(2, 4, 1, 5),), torch.tensor([[3]]), r"\(2, 4, 1, 5\)"),
    ((randn(2, 4, 1, 4),) * 2, torch.tensor([[3]]), "continue"),
    ((randn(2, 4, 1, 4),), torch.tensor([[3, 4]]), r"\(1, 2\)"),
    ((randn(2, 4, 1, 4),), torch.tensor([[3]] * 3), r"\(3, 1\)"),
    ((randn(2, 4, 1, 4),), torch.tensor([[3.0]]), "int64"),
])
def test_wrong_updates_are_named(new, pos, says):
    cache = LayerCache()
    cache.update(randn(2, 4, 3, 4), pos=torch.arange(3)[None])
    with pytest.raises(ValueError, match=f"(?s){says}"):
        cache.update(*new, pos=pos)
    assert cache.n_seen.tolist() == [3, 3]


def test_wrong_pieces_of_one_update():
    with pytest.raises(ValueError, match=r"agree.*\(2, 3, 4\).*\(2, 2, 4\)"):
        LayerCache().update(randn(2, 3, 4), randn(2, 2, 4),
                            pos=torch.arange(3)[None])


def test_a_cache_meets_another_batch_or_memory():
    m, cache = layer(causal=True), LayerCache()
    m(randn(2, 3, 16), cache=cache)
    with pytest.raises(ValueError, match="batch of 3 meets a cache of 2"):
        m(randn(3, 1, 16), cache=cache)
    cross, cache = layer(), LayerCache()
    cross(randn(2, 3, 16), memory=randn(2, 5, 16), cache=cache)
    with pytest.raises(ValueError, match="memory of 5 tokens.*of 6"):
        cross(randn(2, 3, 16), memory=randn(2, 6, 16), cache=cache)
    with pytest.raises(ValueError, match="batch of 3 meets a memory of 2"):
        cross(randn(3, 3, 16), memory=randn(3, 5, 16), cache=cache)


def test_the_inputs_are_left_alone():
    m, x = layer(causal=True, rotary=Rotary(4)), randn(2, 4, 16)
    pos, mask = torch.tensor([[-1, 0, 1, 2]]), some_mask(4, 4)
    before = [y.clone() for y in (x, pos, mask)]
    m(x, pos=pos, mask=mask, cache=LayerCache())
    assert all(torch.equal(a, b) for a, b in zip((x, pos, mask), before))


def test_a_mask_without_queries_is_the_padding_mask():
    "A layer that is not causal needs no positions of queries."
    k_pos = torch.tensor([[0, -1, 1]])
    assert torch.equal(combined_mask(None, k_pos), padding_mask(k_pos))


# the cache that knows its positions without looking

@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("where", [dict(rotary=Rotary(4)),
                                   dict(score_bias=ALiBi(4)), {}])
def test_counted_positions_equal_given_ones(where, fused):
    part = layer(causal=True, fused=fused, **where)
    x = randn(2, 7, 16)
    told, counted = LayerCache(), LayerCache()
    for first, last in ((0, 3), (3, 4), (4, 5), (5, 7)):
        pos = torch.arange(first, last)[None].expand(2, -1)
        a = part(x[:, first:last], pos=pos, cache=told)
        b = part(x[:, first:last], cache=counted)
        close(b, a)
        assert counted.n_plain == last and told.n_plain is None
        assert torch.equal(counted.past[-1].expand(2, -1), told.past[-1])
    counted.crop(4)
    counted.select(torch.tensor([1]))
    assert counted.n_plain == 4 and counted.n_seen.tolist() == [4]
    close(part(x[1:, 4:5], cache=counted), part(x[1:, :5])[:, -1:])


@pytest.mark.parametrize("fused", [True, False])
def test_padding_once_told_is_never_forgotten(fused):
    part = layer(causal=True, fused=fused, rotary=Rotary(4))
    x = randn(2, 6, 16)
    pos = torch.tensor([[0, 1, 2, 3], [-1, -1, 0, 1]])
    cache = Cache(1)
    part(x[:, :4], pos=pos, cache=cache.layers[0])
    assert cache.n_plain is None
    for i in (4, 5):            # positions are counted on in each row
        out = part(x[:, i:i + 1], cache=cache.layers[0])
        assert cache.n_plain is None
        close(out[1], part(x[1:, 2:i + 1])[0, -1:])
    assert cache.n_seen.tolist() == [6, 4]
