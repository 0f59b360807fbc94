"""Losses, optimizers, schedules and clipping, against independent references."""

import copy
import json
import math
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from conftest import ROOT, run
from helpers import plain_only
from tformer import optim
from tformer.gpt import GPT, GPTConfig
from tformer.mini_gpt import MiniGPT, load_record
from tformer.optim import (
    SGD,
    AdamW,
    Muon,
    RMSprop,
    bits_per_byte,
    chunked_cross_entropy,
    clip_grad_norm_,
    cross_entropy,
    hidden_matrices,
    inverse_sqrt,
    kl_divergence,
    mup_groups,
    orthogonalize,
    param_groups,
    perplexity,
    scale_lr,
    warmup_cosine,
    warmup_stable_decay,
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


# --- losses


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


# --- optimizers

SHAPES = (4, 3), (5,), (2, 6)
PAIRS = {
    "SGD": (
        lambda p: SGD(p, 1e-2),
        lambda p: torch.optim.SGD(p, 1e-2),
        {"weight_decay": 0.1},
    ),
    "momentum": (
        lambda p: SGD(p, 1e-2, momentum=0.9),
        lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
        {"momentum": 0.5},
    ),
    "RMSprop": (RMSprop, torch.optim.RMSprop, {"alpha": 0.9, "eps": 0.1}),
    "AdamW": (AdamW, torch.optim.AdamW, {"weight_decay": 0.3, "betas": (0.8, 0.99)}),
    "Adam": (
        lambda p: AdamW(p, decoupled_weight_decay=False, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, weight_decay=0.1),
        {"eps": 1e-3},
    ),
}


def walk(make, more, kind, steps=1000, gaps=True):
    "Two groups; now and then a parameter has no gradient."
    ps = [nn.Parameter(randn(*s, seed=i, dtype=kind)) for i, s in enumerate(SHAPES)]
    optimizer = make([{"params": ps[:2], "lr": 3e-3}, {"params": ps[2:], **more}])
    draw = torch.Generator().manual_seed(1)
    for i in range(steps):
        for j, p in enumerate(ps):
            noise = torch.randn(p.shape, generator=draw, dtype=kind)
            p.grad = None if gaps and (i + j) % 7 == 0 else noise + p.detach()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in ps]), optimizer


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(
    "kind, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)]
)
def test_a_thousand_steps_equal_torch(name, kind, tolerance):
    ours, peer, more = PAIRS[name]
    close(walk(ours, more, kind)[0], walk(peer, more, kind)[0], tolerance)


def test_lists_equal_the_clear_loop():
    "The update of one tensor, as chapter 16 writes it."
    w, m, v = randn(5, dtype=torch.float64), *torch.zeros(2, 5).double()
    p = nn.Parameter(w.clone())
    optimizer = AdamW([p], 1e-2, weight_decay=0.1)
    for t in range(1, 50):
        g = 1e-6 * randn(5, seed=t, dtype=torch.float64)
        w = w - 1e-2 * 0.1 * w
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        w = w - 1e-2 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        p.grad = g
        optimizer.step()
        close(p.detach(), w, 1e-12)


def test_what_bias_correction_does():
    for corrected in (True, False):
        p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        optimizer = AdamW(
            [p], 1.0, eps=0.0, weight_decay=0.0, bias_correction=corrected
        )
        at = [0.0]
        for _ in range(1000):
            p.grad = torch.full_like(p, -3.0)
            optimizer.step()
            at.append(p.item())
        steps = torch.tensor(at, dtype=torch.float64).diff()
        if corrected:
            close(steps, torch.ones_like(steps), 1e-9)
        else:
            assert [round(steps[t - 1].item(), 6) for t in (1, 12, 1000)] == [
                3.162278,
                6.568520,
                1.257584,
            ]
            assert steps.argmax() == 11


def test_the_state_survives_a_file_and_torchs_loads(tmp_path):
    for name in ("AdamW", "momentum", "RMSprop"):
        ours, peer, more = PAIRS[name]
        half, optimizer = walk(ours, more, torch.float64, 20, gaps=False)
        state = copy.deepcopy(optimizer.state_dict())
        torch.save(state, tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        _, theirs = walk(peer, more, torch.float64, 20, gaps=False)
        ends = []
        for source in (state, theirs.state_dict()):
            ps = [nn.Parameter(x.clone()) for x in half.split([12, 5, 12])]
            ps = [
                nn.Parameter(p.detach().view(s))
                for p, s in zip(ps, SHAPES, strict=True)
            ]
            again = ours([{"params": ps[:2], "lr": 3e-3}, {"params": ps[2:], **more}])
            if source is state:
                again.load_state_dict(source)
            else:  # the tensors alone: options have other names there
                again.load_state_dict(again.state_dict() | {"state": source["state"]})
            for p in ps:
                p.grad = torch.ones_like(p)
            again.step()
            ends.append(torch.cat([p.detach().flatten() for p in ps]))
        close(ends[0], ends[1], 1e-12)


def test_tensors_are_changed_in_place():
    p = nn.Parameter(randn(3))
    place = p.data_ptr()
    optimizer = AdamW([p])
    for _ in range(3):
        p.grad = torch.ones(3)
        optimizer.step()
        places = [
            x.data_ptr()
            for x in optimizer.state[p].values()
            if isinstance(x, torch.Tensor)
        ]
    p.grad = torch.ones(3)
    optimizer.step()
    assert p.data_ptr() == place
    assert places == [
        x.data_ptr() for x in optimizer.state[p].values() if isinstance(x, torch.Tensor)
    ]


def test_a_closure_may_take_gradients():
    p = nn.Parameter(torch.ones(2))
    optimizer = SGD([p], 0.1)

    def closure():
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2
    close(p.detach(), torch.full((2,), 0.8), 1e-6)


def test_rows_that_are_not_used_move_all_the_same():
    table = nn.Embedding(10, 4)
    optimizer = AdamW(table.parameters(), weight_decay=0.1)
    before = table.weight.detach().clone()
    table(torch.tensor([3, 7])).sum().backward()
    optimizer.step()
    assert (table.weight != before).any(1).sum() == 10


def test_l2_is_no_decoupled_decay():
    moved = {}
    for decoupled in (True, False):
        p = nn.Parameter(torch.ones(2, dtype=torch.float64))
        optimizer = AdamW([p], 0.01, weight_decay=0.1, decoupled_weight_decay=decoupled)
        for t in range(100):
            p.grad = (-1.0) ** t * torch.tensor([1.0, 1e-3]).double()
            optimizer.step()
        moved[decoupled] = (1 - p.detach()).tolist()
    assert moved[True][0] == pytest.approx(moved[True][1], rel=0.1)
    assert moved[False][1] > 5 * moved[False][0]


def test_muon_equals_torchs():
    theirs = pytest.importorskip("torch.optim._muon").Muon  # torch ≥ 2.9
    for options in (
        {},
        {"nesterov": False},
        {"adjust_lr_fn": "original"},
        {"adjust_lr_fn": "match_rms_adamw"},
        {"weight_decay": 0.0},
    ):
        sides = []
        for make in (Muon, theirs):
            ps = [nn.Parameter(randn(*s)) for s in ((24, 16), (16, 40))]
            optimizer = make(ps, 0.02, **options)
            for p in ps:
                p.grad = randn(*p.shape, seed=2)
            optimizer.step()
            sides.append(ps)
        for start, a, b in zip(((24, 16), (16, 40)), *sides, strict=False):
            step = (b - randn(*start)).abs().max()
            assert (a - b).abs().max() <= step / 128


def test_muon_refuses_an_unknown_size_of_its_steps():
    p = nn.Parameter(randn(4, 4))
    says = (
        "adjust_lr_fn must be one of None, 'original', 'match_rms_adamw', got 'adamw'"
    )
    with pytest.raises(ValueError, match=says):
        Muon([p], adjust_lr_fn="adamw")
    optimizer = Muon([p])
    with pytest.raises(ValueError, match=says):
        optimizer.add_param_group(
            {"params": [nn.Parameter(randn(2, 2))], "adjust_lr_fn": "adamw"}
        )
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_remembers_like_torchs(nesterov):
    "Slopes of many steps, the first long: its momentum lasts."
    theirs = pytest.importorskip("torch.optim._muon").Muon
    ends = []
    for make in (Muon, theirs):
        p = nn.Parameter(randn(24, 16))
        optimizer = make([p], 0.02, nesterov=nesterov)
        for t in range(6):
            p.grad = randn(24, 16, seed=t) * (10 if t == 0 else 1)
            optimizer.step()
        ends.append(p.detach())
    moved = (ends[1] - randn(24, 16)).norm()
    assert (ends[0] - ends[1]).norm() <= moved / 64


@pytest.mark.parametrize("shape", [(8, 8), (24, 16), (16, 40), (1, 5)])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_orthogonalize_keeps_directions(shape, size):
    x = randn(*shape)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    x = size * u @ s.clamp(min=0.05 * s[0]).diag() @ v
    ours = u.mT @ orthogonalize(x, dtype=torch.float32) @ v.mT
    close(ours, ours.diagonal().diag(), 1e-3)
    assert ours.diagonal().min() > 0.6 and ours.diagonal().max() < 1.3
    assert not orthogonalize(torch.zeros(shape)).any()


BAD_LR = [0, 0.0, -1e-3, math.nan, math.inf, True, "1e-3", None]


@pytest.mark.parametrize("lr", BAD_LR)
@pytest.mark.parametrize("make", [SGD, RMSprop, AdamW, Muon])
def test_a_bad_learning_rate_is_refused(make, lr):
    p = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match="lr must be above 0, got"):
        make([p], lr)
    with pytest.raises(ValueError, match="lr must be above 0, got"):
        make([{"params": [p], "lr": lr}])


@pytest.mark.parametrize(
    "make, options, says",
    [
        (SGD, {"momentum": 1.0}, "momentum must be at least 0 and below 1"),
        (SGD, {"weight_decay": -0.1}, "weight_decay must be at least 0"),
        (RMSprop, {"alpha": 1.5}, "alpha must be at least 0 and below 1"),
        (AdamW, {"betas": (0.9, 1.0)}, "beta must be at least 0 and below 1"),
        (AdamW, {"eps": math.nan}, "eps must be at least 0"),
        (AdamW, {"weight_decay": math.nan}, "weight_decay must be at least 0"),
    ],
)
def test_bad_options_are_refused(make, options, says):
    with pytest.raises(ValueError, match=says):
        make([nn.Parameter(torch.ones(2, 2))], 0.1, **options)


def test_muon_refuses_what_is_no_matrix():
    with pytest.raises(ValueError, match=r"matrices, got .* \(3,\)"):
        Muon([nn.Parameter(torch.ones(3))])


def test_muon_refuses_further_vectors():
    optimizer = Muon([nn.Parameter(torch.ones(3, 2))])
    for group in (
        {"params": nn.Parameter(torch.ones(3))},
        {"params": iter([nn.Parameter(torch.ones(3))])},
    ):
        with pytest.raises(ValueError, match=r"matrices, got .* \(3,\)"):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": nn.Parameter(torch.ones(2, 2))})
    assert len(optimizer.param_groups) == 2


# --- groups


def names(model, params):
    found = {p: name for name, p in model.named_parameters()}
    return {found[p] for p in params}


def test_matrices_decay_and_nothing_else():
    model = GPT(GPTConfig(vocab_size=40, d_model=16, n_layers=2, n_heads=2, max_len=8))
    groups = param_groups(model, 0.1)
    every = [p for g in groups for p in g["params"]]
    assert len(every) == len({*every}) == len([*model.parameters()])
    decays = names(model, groups[0]["params"])
    assert groups[0]["weight_decay"] == 0.1
    assert groups[1]["weight_decay"] == 0
    assert all(name.endswith("proj.weight") for name in decays)
    rest = names(model, groups[1]["params"])
    assert any("embed" in name for name in rest)  # tied to the head, too
    assert all("embed" in n or "norm" in n or n.endswith("bias") for n in rest), rest


def test_frozen_parameters_are_left_out():
    model = MiniGPT()
    for p in model.blocks.parameters():
        p.requires_grad_(False)
    groups = param_groups(model, 0.1)
    assert names(model, groups[0]["params"]) == {"lm_head.weight"}
    assert not hidden_matrices(model)
    for p in model.parameters():
        p.requires_grad_(False)
    assert param_groups(model, 0.1) == []


def test_muon_gets_the_hidden_matrices():
    model = MiniGPT()
    found = names(model, hidden_matrices(model))
    assert len(found) == 8 and all(n.startswith("blocks") for n in found)


def test_muon_must_know_the_head():
    model = nn.ModuleDict({"hidden": nn.Linear(4, 4), "out": nn.Linear(4, 9)})
    with pytest.raises(ValueError, match="no layer 'lm_head': give the"):
        hidden_matrices(model)
    assert names(model, hidden_matrices(model, "out")) == {"hidden.weight"}
    assert len(hidden_matrices(model, None)) == 2


def test_mup_divides_the_rate_of_matrices():
    model = MiniGPT(d_model=128)
    matrices, rest = mup_groups(model, 0.01, width=128, base_width=32)
    assert matrices["lr"] == 0.0025 and rest["lr"] == 0.01
    assert "lm_head.weight" in names(model, matrices["params"])
    AdamW([matrices, rest])
    with pytest.raises(ValueError, match="base_width must be a whole number"):
        mup_groups(model, 0.01, width=128, base_width=0)


# --- clipping


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=6), st.floats(1e-3, 1e4))
def test_clipping_equals_torch(values, limit):
    ours = [nn.Parameter(torch.zeros(3)) for _ in values] + [
        nn.Parameter(torch.zeros(2))
    ]
    for p, value in zip(ours, values, strict=False):
        p.grad = torch.tensor([value, 1.0, -value / 2])
    peer = copy.deepcopy(ours)
    for p, q in zip(ours, peer, strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    a = clip_grad_norm_(ours, limit)
    b = nn.utils.clip_grad_norm_(peer, limit)
    close(a, b, 1e-6)
    for p, q in zip(ours[:-1], peer, strict=False):
        close(p.grad, q.grad, 1e-6)
    assert ours[-1].grad is None


def test_clipping_takes_one_tensor():
    p = nn.Parameter(torch.ones(2, 3))
    p.grad = torch.full((2, 3), 6**0.5)
    assert clip_grad_norm_(p, 1.0).item() == pytest.approx(6)
    assert p.grad.norm().item() == pytest.approx(1, rel=1e-5)


def test_without_a_limit_the_norm_is_only_measured():
    p = nn.Parameter(torch.ones(2))
    q = nn.Parameter(torch.ones(1))
    p.grad = torch.tensor([math.inf, 2])
    q.grad = torch.tensor([-3.0])
    assert clip_grad_norm_([p, q], math.inf).item() == math.inf
    assert p.grad.tolist() == [math.inf, 2] and q.grad.item() == -3


def test_clipping_takes_mixed_precision():
    ps = [
        nn.Parameter(torch.ones(3, dtype=kind))
        for kind in (torch.bfloat16, torch.float32, torch.float64)
    ]
    for p in ps:
        p.grad = torch.full_like(p, 2)
    assert clip_grad_norm_(ps, 3.0).item() == pytest.approx(6, rel=1e-2)
    assert all(p.grad.dtype == p.dtype for p in ps)
    close(torch.cat([p.grad.float() for p in ps]), torch.ones(9), 1e-2)


def test_clipping_reads_no_value():
    p = nn.Parameter(torch.ones(3, device="meta"))
    p.grad = torch.ones(3, device="meta")  # there is nothing to read
    assert clip_grad_norm_([p], 1.0).is_meta


def test_clipping_without_gradients():
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item() == 0
    assert clip_grad_norm_([], math.inf).item() == 0
    for limit in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm must be above 0"):
            clip_grad_norm_([], limit)


# --- schedules


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.data())
def test_no_update_is_wasted(steps, data):
    warmup = data.draw(st.integers(0, steps))
    decay = data.draw(st.integers(0, steps - warmup))
    floor = data.draw(st.floats(0, 1))
    for factor in (
        warmup_cosine(steps, warmup, floor),
        warmup_stable_decay(steps, warmup, decay),
        inverse_sqrt(max(warmup, 1)),
    ):
        made = [factor(t) for t in range(1, steps + 1)]
        assert all(0 < x <= 1 for x in made)
        assert max(made) == pytest.approx(1) or decay == steps
        up = made[: max(warmup, 1)]
        if decay < steps:
            assert up == pytest.approx(
                [t / max(warmup, 1) for t in range(1, len(up) + 1)]
            )
        assert factor(10 * steps + 10) >= 0  # and after the end


def test_schedules_equal_their_formulas():
    for t in range(1, 9000, 7):
        paper = 512**-0.5 * min(t**-0.5, t * 4000**-1.5)
        assert (512 * 4000) ** -0.5 * inverse_sqrt(4000)(t) == (pytest.approx(paper))
    p = nn.Parameter(torch.ones(1))
    peer = torch.optim.SGD([p], 1.0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(peer, 91, 0.1)
    ours = warmup_cosine(100, 10)
    for t in range(10, 101):
        assert ours(t) == pytest.approx(peer.param_groups[0]["lr"])
        peer.step()
        cosine.step()
    assert ours(101) == ours(10**6) == pytest.approx(0.1)
    stable = warmup_stable_decay(10, 2, 4)
    assert [round(stable(t), 3) for t in range(1, 12)] == [
        0.5,
        1,
        1,
        1,
        1,
        1,
        0.8,
        0.6,
        0.4,
        0.2,
        0,
    ]


def test_degenerate_lengths_are_defined():
    assert warmup_cosine(1)(1) == 1
    assert warmup_cosine(1, 1, 0.0)(1) == 1
    assert [warmup_cosine(4, 4)(t) for t in (1, 4, 5)] == [0.25, 1, 0.1]
    assert warmup_stable_decay(3, 0, 3)(1) == 0.75
    assert warmup_stable_decay(2, 2, 0)(2) == 1


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: warmup_cosine(0), "total_steps must be a whole number"),
        (lambda: warmup_cosine(5, 6), "6 steps up and 0 down do not fit into 5"),
        (lambda: warmup_cosine(5, -1), "warmup_steps must be a whole number"),
        (lambda: warmup_cosine(5, 1, math.nan), "min_lr_ratio must be"),
        (lambda: warmup_stable_decay(5, 3, 3), "3 steps up and 3 down"),
        (lambda: inverse_sqrt(0), "warmup_steps must be a whole number"),
        (
            lambda: scale_lr(SGD([nn.Parameter(torch.ones(1))]), math.nan),
            "factor must be at least 0",
        ),
    ],
)
def test_bad_schedules_are_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_each_group_keeps_its_own_rate():
    ps = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    for make in (SGD, torch.optim.SGD):
        optimizer = make([{"params": ps[:1], "lr": 1.0}, {"params": ps[1:], "lr": 0.1}])
        for factor in (0.5, 0.25, 1.0):
            scale_lr(optimizer, factor)
            assert [g["lr"] for g in optimizer.param_groups] == (
                pytest.approx([factor, 0.1 * factor])
            )
        optimizer.load_state_dict(optimizer.state_dict())
        scale_lr(optimizer, 0.5)
        assert optimizer.param_groups[1]["lr"] == pytest.approx(0.05)


@plain_only  # numbers of numpy are no int by their type
def test_a_rate_from_numpy_can_be_saved():
    optimizer = SGD([nn.Parameter(torch.ones(1))], 0.5)
    scale_lr(optimizer, np.float32(0.5))
    assert type(optimizer.param_groups[0]["lr"]) is float
    scale_lr(optimizer, np.float32(0.25))
    assert json.dumps(optimizer.param_groups[0]["lr"]) == "0.125"


# --- the recorded experiments


@pytest.mark.parametrize("name, rows, most", [("leave_out", 48, 3), ("mup", 90, 3)])
def test_records_are_whole(name, rows, most):
    found = load_record(name)
    assert len(found) == rows
    assert {row["seed"] for row in found} == {*map(str, range(most))}
    assert all(row["torch"] and row["machine"] and row["date"] for row in found)


@plain_only
@pytest.mark.parametrize("name", ["leave_out", "mup"])
def test_experiments_run_and_go_on(name, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    for module in ("common", name):
        monkeypatch.delitem(sys.modules, module, raising=False)
    experiment = __import__(name)
    common = sys.modules["common"]
    cases = experiment.CASES[:2]
    made = []

    def train(**case):
        made.append(case)
        return experiment.train(**case)

    args = types.SimpleNamespace(
        steps=2, seeds=1, again=False, out=tmp_path / "new" / "x.csv"
    )
    common.run(cases[:1], train, args)
    common.run(cases, train, args)
    assert len(made) == 2  # the first was not made again
    rows = common.read(args.out)
    assert [row["seed"] for row in rows] == ["0", "0"]
    assert all(0 < float(row["nats_per_byte"]) < 9 for row in rows)


@plain_only
def test_the_command_line_of_experiments():
    said = run(sys.executable, ROOT / "experiments" / "leave_out.py", "--help")
    assert "--seeds" in str(said)


@pytest.mark.nightly
@plain_only
def test_the_benchmark_runs():
    said = str(
        run(sys.executable, ROOT / "tests" / "bench" / "bench_optim.py", "--quick")
    )
    for row in ("memory", "AdamW", "SGD", "RMSprop", "clip_grad_norm_"):
        assert row in said


def test_what_is_public():
    assert {
        "cross_entropy",
        "chunked_cross_entropy",
        "AdamW",
        "Muon",
        "param_groups",
        "clip_grad_norm_",
    } <= {*optim.__all__}
