"""Losses, against PyTorch's and against formulas."""

import math

import pytest
import torch
from torch.nn import functional as F

from tformer.training import losses
from tformer.training.losses import (
    bits_per_byte,
    chunked_cross_entropy,
    cross_entropy,
    kl_divergence,
    perplexity,
)

torch.set_num_threads(1)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(
        *shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)
    )


def labels(*shape, vocab=50, seed=0, gaps=True):
    y = torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))
    if gaps:
        y.view(-1)[::3] = -100
    return y


def close(a, b, tolerance):
    assert (a - b).abs().max() <= tolerance * max(1, b.abs().max())


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize(
    "kind, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)]
)
@pytest.mark.parametrize("size", [1.0, 100.0, 1e4])
def test_cross_entropy_equals_torch(smoothing, kind, tolerance, size):
    z = (size * randn(3, 7, 50, dtype=kind)).requires_grad_()
    y = labels(3, 7)
    ours = cross_entropy(z, y, label_smoothing=smoothing)
    peer = F.cross_entropy(z.flatten(0, 1), y.flatten(), label_smoothing=smoothing)
    close(ours, peer, tolerance)
    close(torch.autograd.grad(ours, z)[0], torch.autograd.grad(peer, z)[0], tolerance)


def test_the_slope_is_p_minus_y():
    z = randn(4, 9, dtype=torch.float64).requires_grad_()
    y = torch.tensor([3, 0, -100, 8])
    cross_entropy(z, y).backward()
    slope = (z.softmax(-1) - F.one_hot(y.clamp(0), 9)).detach() / 3
    slope[2] = 0
    close(z.grad, slope, 1e-12)
    assert torch.autograd.gradcheck(
        lambda z: cross_entropy(z, y, label_smoothing=0.2), z
    )


def test_padding_is_never_averaged_in():
    z = randn(2, 6, 50)
    y = labels(2, 6, gaps=False)
    padded = torch.cat([z, 1e3 * randn(2, 9, 50)], 1)
    for pad in (-100, 0):
        y[y == pad] = 1
        more = F.pad(y, (0, 9), value=pad)
        close(cross_entropy(padded, more, ignore_index=pad), cross_entropy(z, y), 1e-6)
    uniform = torch.zeros(6, 10)
    uniform[2:, 0] = math.log(0.9999 / (0.0001 / 9))
    row = torch.tensor([5, 6, 0, 0, 0, 0])
    assert F.cross_entropy(uniform, row).item() == pytest.approx(0.767595, abs=1e-6)
    assert cross_entropy(uniform, row, ignore_index=0).item() == pytest.approx(
        2.302585, abs=1e-6
    )


def test_nothing_to_count_costs_nothing():
    z = randn(2, 3, 5).requires_grad_()
    y = torch.full((2, 3), -100)
    h = randn(2, 3, 4).requires_grad_()
    w = randn(5, 4).requires_grad_()
    for loss, inputs in (
        (cross_entropy(z, y), [z]),
        (chunked_cross_entropy(h, w, y), [h, w]),
    ):
        assert loss.item() == 0
        assert all(not g.any() for g in torch.autograd.grad(loss, inputs))


def test_half_precision_is_summed_in_float32():
    z = randn(64, 1000).bfloat16()
    y = labels(64, vocab=1000)
    loss = cross_entropy(z, y)
    assert loss.dtype == torch.float32
    close(loss, F.cross_entropy(z.float(), y), 1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [1, 4, 21, 1000])
@pytest.mark.parametrize("with_bias", [True, False])
def test_chunked_equals_whole(smoothing, chunk, with_bias):
    inputs = [
        randn(*s, seed=i, dtype=torch.float64).requires_grad_()
        for i, s in enumerate(((3, 7, 8), (50, 8), (50,)))
    ]
    h, w, b = inputs
    if not with_bias:
        b = None
        inputs = inputs[:2]
    y = labels(3, 7)
    ours = chunked_cross_entropy(
        h, w, y, bias=b, chunk_size=chunk, label_smoothing=smoothing
    )
    whole = F.cross_entropy(
        F.linear(h, w, b).flatten(0, 1), y.flatten(), label_smoothing=smoothing
    )
    close(ours, whole, 1e-12)
    for a, c in zip(
        torch.autograd.grad(5 * ours, inputs),
        torch.autograd.grad(5 * whole, inputs),
        strict=True,
    ):
        close(a, c, 1e-12)


@pytest.mark.parametrize("vocab", [100, 256, 1000])
@pytest.mark.parametrize(
    "kind", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16]
)
def test_labels_of_any_integer_type(kind, vocab):
    h = randn(3, 8)
    w = randn(vocab, 8, seed=1)
    y = torch.tensor([5, 20, 99])
    close(cross_entropy(h @ w.mT, y.to(kind)), cross_entropy(h @ w.mT, y), 0)
    close(chunked_cross_entropy(h, w, y.to(kind)), cross_entropy(h @ w.mT, y), 1e-6)
    gaps = torch.tensor([5, -100, 99])
    if kind.is_signed:
        same = cross_entropy(h @ w.mT, gaps)
        close(cross_entropy(h @ w.mT, gaps.to(kind)), same, 0)
        close(chunked_cross_entropy(h, w, gaps.to(kind)), same, 1e-6)
    with pytest.raises(ValueError, match=r"label \[99\] is outside .* from 0 to 98,"):
        cross_entropy(h @ w[:99].mT, y.to(kind))


def test_chunked_of_one_row():
    h = randn(8, dtype=torch.float64).requires_grad_()
    w = randn(10, 8, seed=1, dtype=torch.float64).requires_grad_()
    ours = chunked_cross_entropy(h, w, torch.tensor(3))
    theirs = cross_entropy(w @ h, torch.tensor(3))
    close(ours, theirs, 1e-12)
    for a, b in zip(
        torch.autograd.grad(ours, [h, w]),
        torch.autograd.grad(theirs, [h, w]),
        strict=True,
    ):
        close(a, b, 1e-12)
    empty = chunked_cross_entropy(h[None][:0], w, torch.zeros(0, dtype=torch.int64))
    assert empty == 0


def test_chunked_needs_no_gradient_and_takes_frozen_weights():
    h = randn(6, 4)
    w = randn(9, 4)
    y = labels(6, vocab=9)
    with torch.no_grad():
        quiet = chunked_cross_entropy(h.requires_grad_(), w, y, chunk_size=2)
    assert not quiet.requires_grad
    loss = chunked_cross_entropy(h, w, y, chunk_size=2)
    assert torch.equal(loss, quiet)
    loss.backward()
    assert h.grad is not None and w.grad is None
    ref = torch.autograd.grad(F.cross_entropy(h @ w.mT, y), h)[0]
    close(h.grad, ref, 1e-6)


def test_chunked_under_autocast():
    h = randn(20, 16).requires_grad_()
    w = randn(50, 16).requires_grad_()
    y = labels(20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = chunked_cross_entropy(h, w, y, chunk_size=6)
        whole = cross_entropy(h @ w.mT, y)
    assert ours.dtype == torch.float32
    close(ours, whole, 1e-3)
    for a, b in zip(
        torch.autograd.grad(ours, (h, w)),
        torch.autograd.grad(whole, (h, w)),
        strict=True,
    ):
        assert a.dtype == torch.float32
        close(a, b, 2e-2)


def test_many_chunks_are_summed_in_float32():
    "In bfloat16 a sum of 256 chunks is 1.9 % off, a whole one 0.3 %."
    h = randn(8192, 32)
    y = labels(8192, gaps=False)
    w = randn(50, 32, seed=1) / 6
    b = torch.zeros(50)
    inputs = [x.requires_grad_() for x in (w, b)]
    exact = torch.autograd.grad(cross_entropy(h @ w.mT + b, y), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = chunked_cross_entropy(h, w, y, bias=b, chunk_size=32)
    for ours, ref in zip(torch.autograd.grad(loss, inputs), exact, strict=True):
        assert (ours - ref).norm() <= 0.004 * ref.norm()
    half = [x.detach().bfloat16().requires_grad_() for x in (h, w)]
    ours = torch.autograd.grad(chunked_cross_entropy(*half, y, chunk_size=32), half)
    ref = torch.autograd.grad(
        F.cross_entropy(half[0].float() @ half[1].float().mT, y), half
    )
    for a, b in zip(ours, ref, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - b).float().norm() <= 0.006 * b.float().norm()


@pytest.mark.parametrize("shape", [(0,), (0, 7), (3, 0)])
def test_no_tokens_cost_nothing(shape):
    h = randn(*shape, 4).requires_grad_()
    w = randn(5, 4).requires_grad_()
    y = torch.zeros(shape, dtype=torch.int64)
    for loss in (cross_entropy(h @ w.mT, y), chunked_cross_entropy(h, w, y)):
        assert loss.item() == 0
        assert all(not g.any() for g in torch.autograd.grad(loss, (h, w)))


def test_chunked_keeps_no_logits():
    "The profiler's peak: under 0.3 of that with all logits."
    from torch.profiler import ProfilerActivity, profile

    def peak(work):
        work()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            work()
        sizes = [
            e.nbytes()
            for e in seen.profiler.kineto_results.events()
            if e.name() == "[memory]"
        ]
        return torch.tensor(sizes).cumsum(0).max().item()

    h = randn(512, 16).requires_grad_()
    w = randn(8000, 16).requires_grad_()
    y = labels(512, vocab=8000)
    whole = peak(lambda: torch.autograd.grad(F.cross_entropy(h @ w.mT, y), (h, w)))
    ours = peak(
        lambda: torch.autograd.grad(
            chunked_cross_entropy(h, w, y, chunk_size=64), (h, w)
        )
    )
    assert ours <= 0.3 * whole


def test_kl_equals_torch():
    p = randn(3, 4, 9)
    q = randn(3, 4, 9, seed=1)
    of = torch.distributions.Categorical
    ref = torch.distributions.kl_divergence(of(logits=p), of(logits=q))
    close(kl_divergence(p, q), ref, 1e-6)
    assert not kl_divergence(p, p).any()
    never = torch.tensor([0.0, -math.inf]).requires_grad_()
    other = torch.zeros(2, requires_grad=True)
    loss = kl_divergence(never, other)
    assert loss.item() == pytest.approx(math.log(2))
    loss.backward()
    assert other.grad.isfinite().all()


def test_units():
    assert perplexity(math.log(7)) == pytest.approx(7)
    assert perplexity(torch.tensor(0.0)).item() == 1
    assert bits_per_byte(math.log(2)) == pytest.approx(1)
    assert bits_per_byte(4 * math.log(2), 4.0) == pytest.approx(1)


@pytest.mark.parametrize(
    "call, says",
    [
        (
            lambda z: cross_entropy(z, torch.tensor([0, 5])),
            r"label \[5\] is outside the vocabulary: labels go from 0 to 4",
        ),
        (
            lambda z: cross_entropy(z, torch.tensor([0, -1])),
            r"label \[-1\] is outside the vocabulary",
        ),
        (
            lambda z: cross_entropy(z, torch.tensor([0, -100]), ignore_index=0),
            r"label \[-100\] is outside",
        ),
        (
            lambda z: cross_entropy(z.tolist(), torch.tensor([0, 1])),
            "logits must be Tensor, got list",
        ),
        (
            lambda z: cross_entropy(z, [0, 1]),
            "targets must be Tensor, got list",
        ),
        (
            lambda z: cross_entropy(z, torch.tensor([0, 1]), ignore_index=None),
            "ignore_index must be a whole number, got None",
        ),
        (
            lambda z: cross_entropy(z, torch.tensor([0, 1, 2])),
            r"targets must be of shape \(2\)",
        ),
        (
            lambda z: cross_entropy(z, torch.tensor([0.0, 1.0])),
            "targets must be integers",
        ),
        (
            lambda z: cross_entropy(z.long(), torch.tensor([0, 1])),
            "logits must have a floating type",
        ),
        (
            lambda z: cross_entropy(z, torch.tensor([0, 1]), label_smoothing=1.0),
            "label_smoothing must be at least 0 and below 1",
        ),
        (
            lambda z: chunked_cross_entropy(z, randn(9, 5), torch.tensor([0, 9])),
            r"label \[9\] is outside the vocabulary: labels go from 0 to 8",
        ),
        (
            lambda z: chunked_cross_entropy(z, randn(9, 4), torch.tensor([0, 1])),
            "weight must be of shape",
        ),
        (
            lambda z: chunked_cross_entropy(
                z, randn(9, 5), torch.tensor([0, 1]), chunk_size=0
            ),
            "chunk_size must be a whole",
        ),
        (lambda z: kl_divergence(z, z[:, :3]), "logits must be of shape"),
        (lambda z: bits_per_byte(1.0, 0.0), "bytes_per_token must be above 0"),
    ],
)
def test_bad_labels_are_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call(randn(2, 5))


def test_where_nobody_looks_a_bad_label_gives_nan(monkeypatch):
    "As on a device, whose values are not read."
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    y = torch.tensor([0, 7])
    assert cross_entropy(randn(2, 5), y).isnan()
    assert chunked_cross_entropy(randn(2, 4), randn(5, 4), y).isnan()


def test_what_is_public():
    assert {"cross_entropy", "chunked_cross_entropy"} <= {*losses.__all__}
