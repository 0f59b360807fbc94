"""Attention against PyTorch, against exact decimals, and by its properties."""

import itertools
import math
import re
from decimal import Decimal, localcontext
from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import helpers
from helpers import close, generator
from tformer.nn.functional import attend, causal_mask, padding_mask, softmax

quick = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
sizes = st.integers(1, 6)


def randn(*shape, seed=0, dtype=torch.float32):
    return helpers.randn(*shape, seed=seed).to(dtype)


def qkv(t, s, d=4, d_v=3, lead=(2, 3), seed=0, dtype=torch.float32):
    return [
        randn(*lead, *size, seed=seed + i, dtype=dtype)
        for i, size in enumerate(((t, d), (s, d), (s, d_v)))
    ]


def some_mask(*shape, seed=0, empty=None):
    mask = torch.rand(*shape, generator=generator(seed)) < 0.6
    mask[..., 0] |= True
    if empty is not None:
        mask[..., empty, :] = False
    return mask


def exact_shares(scores):
    with localcontext() as context:
        context.prec = 60
        e = [Decimal(s).exp() for s in scores]
        return [a / sum(e) for a in e]


# softmax


@quick
@given(st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=6))
def test_softmax_equals_exact_decimals(row):
    exact = [float(p) for p in exact_shares(row)]
    ours = softmax(torch.tensor(row, dtype=torch.float64)).tolist()
    assert all(
        math.isclose(a, b, rel_tol=1e-12) for a, b in zip(ours, exact, strict=True)
    )


@pytest.mark.parametrize("dim", [0, 1, -1, -3])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_softmax_equals_torch(dim, dtype):
    x = 5 * randn(3, 4, 5, dtype=torch.float64)
    ours = softmax(x.to(dtype), dim)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, torch.softmax(x.to(dtype), dim))


def test_softmax_gradients():
    x = randn(3, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(softmax, (x, -1))
    assert torch.autograd.gradgradcheck(softmax, (x, 0))


@quick
@given(seeds, st.integers(-(10**6), 10**6))
def test_softmax_does_not_see_a_shift(seed, c):
    x = randn(2, 5, seed=seed).mul(64).round() / 64  # so that x + c is exact
    x, shifted = x.double(), x.double() + c
    assert torch.equal(softmax(x), softmax(shifted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_neither_overflows_nor_vanishes(dtype):
    top = torch.finfo(dtype).max
    for row in ([1000.0, 0.0], [-1000.0, -2000.0], [top, 0.0], [-top, -top]):
        w = softmax(torch.tensor(row, dtype=dtype))
        assert w.isfinite().all() and w.sum() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_of_nothing(dtype):
    x = torch.tensor([[-math.inf] * 3, [0.0, -math.inf, 1.0]], dtype=dtype)
    x.requires_grad_()
    w = softmax(x)
    w.float().pow(2).sum().backward()
    assert w[0].tolist() == [0, 0, 0] and w[1, 1] == 0
    assert x.grad.isfinite().all() and (x.grad[0] == 0).all()
    assert softmax(torch.empty(2, 0)).shape == (2, 0)


def test_softmax_of_integers_is_refused():
    "Cast back to integers, all shares would be 0."
    with pytest.raises(ValueError, match=r"floating type.*int64"):
        softmax(torch.arange(3))


# masks


@quick
@given(st.integers(1, 3), st.integers(1, 3), sizes, sizes, st.data())
def test_masks_equal_loops(b, copies, t, s, data):
    position = st.integers(-2, 7)
    positions, key_positions = (
        torch.tensor(
            data.draw(
                st.lists(
                    st.lists(position, min_size=n, max_size=n), min_size=b, max_size=b
                )
            )
        )
        for n in (t, s)
    )
    causal = causal_mask(positions, key_positions)
    padding = padding_mask(key_positions)
    assert causal.shape == (b, 1, t, s) and padding.shape == (b, 1, 1, s)
    assert causal.dtype == padding.dtype == torch.bool
    for r, i, j in itertools.product(range(b), range(t), range(s)):
        asks = positions[r, i].item()
        asked = key_positions[r, j].item()
        assert causal[r, 0, i, j] == (asked <= asks)
        assert padding[r, 0, 0, j] == (asked >= 0)
        both = causal & padding
        assert both[r, 0, i, j] == (0 <= asked <= asks)


def test_a_leading_one_broadcasts():
    one = torch.arange(4)[None]
    two = torch.tensor([[0, 1, 2], [2, 3, 4]])
    assert causal_mask(one, two).shape == (2, 1, 4, 3)
    assert causal_mask(two, one).shape == (2, 1, 3, 4)
    assert causal_mask(one, one).shape == (1, 1, 4, 4)


def test_causal_alone_lets_padding_in_and_a_padded_query_is_empty():
    positions = torch.tensor([[-1, 0, 1]])
    causal = causal_mask(positions, positions)
    padding = padding_mask(positions)
    assert causal[0, 0, 1, 0] and causal[0, 0, 0, 0]
    assert not (causal & padding)[0, 0, :, 0].any()
    assert not (causal & padding)[0, 0, 0].any()


@pytest.mark.parametrize("where", ["left", "right", "middle"])
def test_a_padded_row_equals_the_row_alone(where):
    at = {"left": [2, 3, 4, 5], "right": [0, 1, 2, 3], "middle": [0, 2, 3, 5]}[where]
    q, k, v = qkv(6, 6, lead=(1, 2))
    positions = torch.full((1, 6), -1)
    positions[0, at] = torch.arange(4)
    out, w = attend(
        q, k, v, causal_mask(positions, positions) & padding_mask(positions)
    )
    alone = torch.arange(4)[None]
    short, _ = attend(*(x[..., at, :] for x in (q, k, v)), causal_mask(alone, alone))
    close(out[..., at, :], short)
    pads = (positions[0] < 0).nonzero()[:, 0]
    assert (out[..., pads, :] == 0).all() and (w[..., pads] == 0).all()


@pytest.mark.parametrize(
    "positions, key_positions, says",
    [
        (torch.arange(3), torch.arange(3)[None], r"positions must be int64.*\(3,\)"),
        (torch.arange(3)[None], torch.arange(3.0)[None], "key_positions.*float32"),
        (torch.arange(3)[None].int(), torch.arange(3)[None], "positions.*int32"),
        (
            torch.zeros(2, 3).long(),
            torch.zeros(3, 3).long(),
            r"'positions': 2, 'key_positions': 3",
        ),
        (torch.zeros(2, 3) > 1, torch.zeros(2, 3).long(), "torch.bool"),
    ],
)
def test_wrong_positions_are_named(positions, key_positions, says):
    with pytest.raises(ValueError, match=says):
        causal_mask(positions, key_positions)


def test_wrong_key_positions_are_named():
    with pytest.raises(ValueError, match=r"key_positions must be int64.*\(4,\)"):
        padding_mask(torch.arange(4))


# the worked examples; the digits were computed with 50-digit arithmetic

X = torch.tensor([[0.1, 0.3], [0.4, 0.6], [0.7, 0.9]], dtype=torch.float64)


@pytest.mark.parametrize(
    "causal, scale, firsts",
    [
        (False, 1.0, [0.42394257913092412, 0.45911720131148230, 0.49248854885400106]),
        (False, None, [0.41695022979062818, 0.44211128011862502, 0.46661062042113668]),
        (True, 1.0, [0.1, 0.272333, 0.49248854885400106]),
        (True, None, [0.1, 0.265851, 0.46661062042113668]),
    ],
)
def test_i_love_ai(causal, scale, firsts):
    at = torch.arange(3)[None]
    out, _w = attend(
        X, X, X, causal_mask(at, at)[0, 0] if causal else None, scale=scale
    )
    for ours, exact in zip(out[:, 0].tolist(), firsts, strict=True):
        digits = len(str(exact)) - 3
        assert abs(ours - exact) < 10.0 ** -min(digits, 15)
    assert torch.allclose(
        out[:, 1] - out[:, 0], torch.tensor(0.2).double(), rtol=0, atol=1e-8
    )


def test_i_love_ai_by_decimals():
    x = [
        [Decimal(a), Decimal(b)]
        for a, b in (("0.1", "0.3"), ("0.4", "0.6"), ("0.7", "0.9"))
    ]
    weights = [
        exact_shares(
            [
                sum(a * b for a, b in zip(q, k, strict=True)) / Decimal(2).sqrt()
                for k in x
            ]
        )
        for q in x
    ]
    exact = [
        [float(sum(w * v[i] for w, v in zip(row, x, strict=True))) for i in (0, 1)]
        for row in weights
    ]
    out, w = attend(X, X, X)
    torch.testing.assert_close(out, torch.tensor(exact).double(), rtol=0, atol=1e-7)
    assert all(
        math.isclose(a, float(b), rel_tol=1e-13)
        for a, b in zip(w.flatten().tolist(), chain(*weights), strict=True)
    )


@pytest.mark.parametrize(
    "scale, first, second",
    [
        (
            1.0,
            [3.6884827283920533e-5, 0.0060547615938040031, 0.99390835357891208],
            [18.08038870000521, 18.979408135005471],
        ),
        (None, [0.000716513, 0.0264023, 0.972881], [18.010927, 18.906473]),
    ],
)
def test_two_heads(scale, first, second):
    def block(start, rows, cols):
        n = torch.arange(start, start + rows * cols, dtype=torch.float64)
        return n.reshape(rows, cols) / 10

    ins = block(5, 1, 4), block(1, 3, 4), block(13, 3, 4)
    q, k, v = (
        torch.stack([x @ block(8 * i + 24 * h + 1, 4, 2) for h in (0, 1)])
        for i, x in enumerate(ins)
    )
    scores = (q @ k.mT)[:, 0]
    expected = [[3.442, 8.5428, 13.6436], [56.338, 144.0756, 231.8132]]
    torch.testing.assert_close(
        scores, torch.tensor(expected).double(), rtol=1e-6, atol=1e-6
    )
    out, w = attend(q, k, v, scale=scale)
    assert all(
        math.isclose(a, b, rel_tol=1e-5)
        for a, b in zip(w[0, 0].tolist(), first, strict=True)
    )
    assert all(
        math.isclose(a, b, rel_tol=1e-7)
        for a, b in zip(out[0, 0].tolist(), second, strict=True)
    )
    assert all(
        math.isclose(a, b, rel_tol=1e-14)
        for a, b in zip(out[1, 0].tolist(), [39.7, 40.6], strict=True)
    )
    tail = [6.19568e-77, 7.87126e-39] if scale else [1.29679e-54, 1.13877e-27]
    assert all(
        math.isclose(a, b, rel_tol=1e-4)
        for a, b in zip(w[1, 0, :2].tolist(), tail, strict=True)
    )


# parity with PyTorch


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)])
@pytest.mark.parametrize("t, s", [(5, 5), (3, 7), (6, 2), (1, 1)])
@pytest.mark.parametrize(
    "with_mask, with_bias, scale",
    [
        (False, False, None),
        (True, False, None),
        (False, True, None),
        (True, True, 0.3),
        (True, False, 2.0),
        (True, True, 0.0),
    ],
)
def test_values_and_gradients_equal_sdpa(lead, t, s, with_mask, with_bias, scale):
    seed = 100 * t + s
    mask = bias = added = None
    if with_bias:
        added = bias = randn(*lead, t, s, seed=seed + 9)
    if with_mask:
        mask = some_mask(*lead, t, s, seed=seed, empty=t - 1)
        added = torch.where(mask, 0.0 if bias is None else bias, -math.inf)
    ours, peer = (
        [x.requires_grad_() for x in qkv(t, s, lead=lead, seed=seed)] for _ in range(2)
    )
    out, w = attend(*ours, mask, bias, scale)
    ref = F.scaled_dot_product_attention(*peer, added, scale=scale)
    assert w.shape == (*lead, t, s)
    close(out, ref)
    tilt = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    (out * tilt).sum().backward()
    (ref * tilt).sum().backward()
    for a, b in zip(ours, peer, strict=True):
        assert a.grad.isfinite().all()
        close(a.grad, b.grad)
    if with_mask:
        assert (out[..., -1, :] == 0).all() and (w[..., -1, :] == 0).all()
        assert (ours[0].grad[..., -1, :] == 0).all()


@pytest.mark.parametrize(
    "shape",
    [
        (7,),
        (1,),
        (5, 7),
        (1, 7),
        (5, 1),
        (1, 1, 5, 7),
        (2, 1, 1, 7),
        (2, 3, 5, 7),
        (1, 3, 5, 1),
    ],
)
def test_masks_and_biases_broadcast(shape):
    "Two axes where scores have three; with four they are refused."
    lead = (3,) if len(shape) == 2 else (2, 3)
    q, k, v = qkv(5, 7, lead=lead)
    mask = some_mask(*shape, seed=3)
    bias = randn(*shape, seed=4)
    full = (*lead, 5, 7)
    out, w = attend(q, k, v, mask, bias)
    long, w_long = attend(q, k, v, mask.expand(full), bias.expand(full))
    assert torch.equal(out, long) and torch.equal(w, w_long)
    added = bias.expand(full).masked_fill(~mask.expand(full), -math.inf)
    close(out, F.scaled_dot_product_attention(q, k, v, added))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_bias_may_be_of_another_type(dtype):
    q, k, v = qkv(5, 7)
    bias = randn(5, 7).to(dtype)
    out, w = attend(q, k, v, bias=bias)
    assert out.dtype == w.dtype == torch.float32
    assert torch.equal(out, attend(q, k, v, bias=bias.float())[0])


@pytest.mark.parametrize("shape", [(3, 5, 7), (5, 7), (1, 7), (5, 1)])
def test_a_bias_needs_no_leading_axes(shape):
    "Unlike a mask: numbers per text are not what biases are."
    q, k, v = qkv(5, 7)
    bias = randn(*shape)
    out, w = attend(q, k, v, bias=bias)
    long, w_long = attend(q, k, v, bias=bias.expand(2, 3, 5, 7))
    assert torch.equal(out, long) and torch.equal(w, w_long)


@pytest.mark.parametrize("t, s, d", [(16, 16, 8), (40, 70, 32), (96, 96, 64)])
@pytest.mark.parametrize("masked", [False, True])
def test_bfloat16_is_as_exact_as_sdpa(t, s, d, masked):
    mask = some_mask(1, 1, t, s, seed=t, empty=2) if masked else None
    data = qkv(t, s, d, d, lead=(2, 2), seed=t, dtype=torch.bfloat16)

    def run(function, dtype):
        x = [y.detach().to(dtype).requires_grad_() for y in data]
        out = function(*x)
        grads = torch.autograd.grad(out, x, torch.ones_like(out))
        return [y.double() for y in (out, *grads)]

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask)

    ours = run(lambda *x: attend(*x, mask)[0], torch.bfloat16)
    peer = run(sdpa, torch.bfloat16)
    truth = run(sdpa, torch.float64)
    for a, b, exact in zip(ours, peer, truth, strict=True):
        error, limit = ((x - exact).abs().mean() for x in (a, b))
        assert error <= 1.1 * limit + 1e-6
        assert torch.allclose(a, exact, rtol=2**-7, atol=2e-2)
    if masked:
        assert (ours[0][..., 2, :] == 0).all()
        assert (ours[1][..., 2, :] == 0).all()


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_types_are_kept(dtype):
    out, w = attend(*qkv(4, 5, dtype=dtype), bias=randn(4, 5))
    assert out.dtype == w.dtype == dtype


def test_under_autocast():
    q, k, v = qkv(5, 7)
    with torch.autocast("cpu", torch.bfloat16):
        out, w = attend(q, k, v, some_mask(1, 1, 5, 7, empty=1))
    assert out.isfinite().all() and (w[..., 1, :] == 0).all()
    close(out, attend(q, k, v, some_mask(1, 1, 5, 7, empty=1))[0])


# empty rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by", ["mask", "bias", "all", "no keys"])
def test_empty_rows_are_zero_with_finite_gradients(dtype, by):
    s = 0 if by == "no keys" else 4
    q, k, v = (x.requires_grad_() for x in qkv(3, s, dtype=dtype))
    mask = torch.ones(1, 1, 3, s).bool()
    bias = torch.zeros(3, s)
    if by == "mask":
        mask[..., 1, :] = False
    elif by == "bias":
        bias[1] = -math.inf
    elif by == "all":
        mask[:] = False
    out, w = attend(q, k, v, mask, bias)
    rows = [1] if by in ("mask", "bias") else [0, 1, 2]
    assert (out[..., rows, :] == 0).all() and (w[..., rows, :] == 0).all()
    (out.float().pow(2).sum() + w.float().pow(2).sum()).backward()
    for x in (q, k, v):
        assert x.grad.isfinite().all()
    assert (q.grad[..., rows, :] == 0).all()
    if by in ("mask", "bias"):
        assert (out[..., [0, 2], :] != 0).any(-1).all()


# properties


@quick
@given(sizes, sizes, st.booleans(), seeds)
def test_rows_sum_to_one_or_zero_and_outputs_stay_in_the_hull(t, s, few, seed):
    q, k, v = qkv(t, s, seed=seed, dtype=torch.float64)
    mask = torch.rand(t, s, generator=torch.Generator().manual_seed(seed)) < (
        0.3 if few else 0.8
    )
    out, w = attend(3 * q, k, v, mask[None, None])
    alive = mask.any(-1)
    total = w.sum(-1)
    assert torch.allclose(total, alive.double().expand_as(total), atol=1e-12)
    assert (w >= 0).all() and (w[..., ~mask] == 0).all()
    for i in range(t):
        if alive[i]:
            seen = v[..., mask[i], :]
            assert (out[..., i, :] >= seen.amin(-2) - 1e-12).all()
            assert (out[..., i, :] <= seen.amax(-2) + 1e-12).all()
        else:
            assert (out[..., i, :] == 0).all()


@quick
@given(sizes, sizes, seeds, st.floats(-50, 50))
def test_a_constant_bias_changes_nothing(t, s, seed, c):
    q, k, v = qkv(t, s, seed=seed, dtype=torch.float64)
    a = attend(q, k, v)[0]
    b = attend(q, k, v, bias=torch.full((t, 1), c, dtype=torch.float64))[0]
    assert torch.allclose(a, b, atol=1e-11)


@quick
@given(sizes, st.integers(2, 6), seeds)
def test_the_order_of_keys_does_not_matter(t, s, seed):
    q, k, v = qkv(t, s, seed=seed, dtype=torch.float64)
    order = torch.randperm(s, generator=torch.Generator().manual_seed(seed))
    mask = some_mask(1, 1, t, s, seed=seed)
    a, w = attend(q, k, v, mask)
    b, u = attend(q, k[..., order, :], v[..., order, :], mask[..., order])
    assert torch.allclose(a, b, atol=1e-12)
    assert torch.allclose(w[..., order], u, atol=1e-12)


def test_self_attention_is_equivariant_and_causal_is_not():
    x = randn(6, 4, dtype=torch.float64)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    at = torch.arange(6)[None]
    lower = causal_mask(at, at)[0, 0]
    for mask, equivariant in ((None, True), (lower, False)):
        a = attend(x, x, x, mask)[0]
        b = attend(*[x[order]] * 3, mask)[0]
        assert torch.allclose(b, a[order], atol=1e-12) == equivariant
        assert not torch.allclose(b, a, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("t", [2, 7, 33])
def test_the_future_does_not_move_the_past(t, dtype):
    "Bit for bit, output and weights."
    at = torch.arange(t)[None]
    mask = causal_mask(at, at)
    x = qkv(t, t, 16, 16, seed=t, dtype=dtype)
    out, w = attend(*x, mask)
    for cut in {1, t // 2, t - 1}:
        y = [z.clone() for z in x]
        for i, z in enumerate(y):
            z[..., cut:, :] = 10 * randn(
                *z[..., cut:, :].shape, seed=i + 50, dtype=dtype
            )
        other, u = attend(*y, mask)
        assert torch.equal(out[..., :cut, :], other[..., :cut, :])
        assert torch.equal(w[..., :cut, :], u[..., :cut, :])
        assert not torch.equal(out[..., cut:, :], other[..., cut:, :])


def test_the_inputs_are_left_alone():
    tensors = [*qkv(4, 5), some_mask(1, 1, 4, 5), randn(4, 5)]
    before = [x.clone() for x in tensors]
    attend(*tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


def test_gradients_reach_the_bias():
    q, k, v = qkv(3, 4, lead=(), dtype=torch.float64)
    bias = randn(3, 4, dtype=torch.float64).requires_grad_()
    mask = some_mask(3, 4, empty=1)
    assert torch.autograd.gradcheck(lambda b: attend(q, k, v, mask, b)[0], (bias,))
    attend(q, k, v, mask, bias)[0].sum().backward()
    assert (bias.grad[~mask] == 0).all()


# mistakes are named


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(mask=torch.ones(1, 1, 5, 7)), "mask is boolean.*float32.*bias"),
        (
            dict(mask=torch.ones(1, 1, 5, 7).long()),
            r"mask is boolean.*int64.*bool\(\)\[:, None, None\]",
        ),
        (dict(bias=torch.ones(5, 7).bool()), "bias is a floating.*bool.*mask"),
        (
            dict(mask=torch.ones(1, 1, 5, 6).bool()),
            r"mask of shape \(1, 1, 5, 6\) does not.*\(2, 3, 5, 7\)",
        ),
        (dict(mask=torch.ones(6).bool()), r"mask of shape \(6,\) does not"),
        (dict(mask=torch.ones(2, 2, 5, 7).bool()), r"\(2, 2, 5, 7\) does not"),
        (dict(mask=torch.ones(1, 2, 3, 5, 7).bool()), r"\(1, 2, 3, 5, 7\) does not"),
        (dict(mask=torch.ones(3, 5, 7).bool()), "two things"),
        (dict(bias=torch.ones(7, 5)), r"bias of shape \(7, 5\) does not"),
        (dict(bias=torch.ones(2, 5, 7)), r"bias of shape \(2, 5, 7\) does not"),
        (
            dict(q=torch.ones(2, 3, 5, 6)),
            r"k must be .*\(2, 3, s, 6\).*q \(2, 3, 5, 6\), got \(2, 3, 7, 4\)",
        ),
        (
            dict(v=torch.ones(2, 3, 6, 3)),
            r"v must be .*\(2, 3, 7, d_v\).*k \(2, 3, 7, 4\), got \(2, 3, 6, 3\)",
        ),
        (dict(v=torch.ones(2, 2, 7, 3)), r"v must be .*got \(2, 2, 7, 3\)"),
        (
            dict(q=torch.ones(2, 1, 5, 4)),
            r"k must be .*\(2, 1, s, 4\).*got \(2, 3, 7, 4\)",
        ),
        (dict(k=torch.ones(3, 7, 4)), r"k must be .*got \(3, 7, 4\)"),
        (dict(q=torch.ones(4)), r"q must be .*t, d\), got \(4,\)"),
        (dict(q=torch.ones(2, 3, 5, 4).double()), "float64.*float32"),
        (dict(q=torch.ones(2, 3, 5, 4).long()), "int64"),
        ({n: torch.ones(2, 3, 5, 4).long() for n in "qkv"}, "int64"),
    ],
)
def test_wrong_arguments_are_named(change, says):
    q, k, v = qkv(5, 7)
    with pytest.raises(ValueError, match=f"(?s){says}"):
        attend(**{**dict(q=q, k=k, v=v), **change})


def test_a_mask_that_would_land_on_the_heads_is_refused():
    "With as many heads as sentences it broadcasts, to the wrong axis."
    q, k, v = qkv(5, 7, lead=(2, 2))
    mask = torch.ones(2, 5, 7).bool()
    with pytest.raises(ValueError, match=r"mask\[:, None\] for all heads"):
        attend(q, k, v, mask)
    assert attend(q, k, v, mask[:, None])[0].shape == (2, 2, 5, 3)


def test_autocast_does_not_narrow_the_products():
    q, k, v = qkv(5, 7, d=16)
    plain = attend(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        cast = attend(q, k, v)
    assert torch.equal(plain[0], cast[0]) and torch.equal(plain[1], cast[1])


@pytest.mark.parametrize("t", [4, 2])
def test_a_mask_of_two_axes_is_refused_and_both_spellings_are_named(t):
    "(b, s) or (t, s)? With t = b or b = 1 nobody could know."
    q, k, v = qkv(t, 4, lead=(2, 3))
    mask = some_mask(2, 4, seed=t)
    with pytest.raises(ValueError, match="two things") as refused:
        attend(q, k, v, mask=mask)
    for spelling in (
        "mask[:, None, None] for one row for each text (b, s)",
        "mask[None, None] for one row for each query (t, s)",
    ):
        assert spelling in str(refused.value)
    by_text, _ = attend(q, k, v, mask=mask[:, None, None])
    for i in range(2):
        close(by_text[i], attend(q[i], k[i], v[i], mask=mask[i])[0])
    if t == 2:
        by_query, _ = attend(q, k, v, mask=mask[None, None])
        for i in range(2):
            close(by_query[i], attend(q[i], k[i], v[i], mask=mask)[0])
        assert not torch.allclose(by_text, by_query)
    with pytest.raises(ValueError, match=rf"\(2, 3, {t}, 4\)$"):
        attend(q, k, v, bias=torch.ones(3, 4))


@pytest.mark.parametrize("n_axes", [4, 5, 6])
def test_the_advice_for_a_mask_with_too_few_axes_can_be_followed(n_axes):
    "Every mask that the error writes has all axes, and is taken."
    q, k, v = torch.randn(3, *[4] * (n_axes - 1), 3)
    for size in range(2, n_axes):
        mask = torch.rand([4] * size) < 0.7
        mask[..., 0] = True
        with pytest.raises(ValueError, match="write all axes") as error:
            attend(q, k, v, mask=mask)
        written = re.findall(r"mask\[.*?\]", str(error.value))
        assert written and len({*written}) == len(written)
        for text in written:
            whole = eval(text, {"mask": mask})
            assert whole.ndim == n_axes
            out, _ = attend(q, k, v, mask=whole)
            expected = F.scaled_dot_product_attention(q, k, v, whole)
            assert torch.allclose(out, expected, atol=1e-6)
    mask = torch.ones(4, 4).bool()
    with pytest.raises(ValueError, match=r"mask\[None, .*\] for one row for each q"):
        attend(q, k, v, mask=mask)
