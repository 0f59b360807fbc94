"""Optimizers, groups and clipping, against PyTorch's."""

import copy
import json
import math
import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from conftest import ROOT, run
from helpers import plain_only
from tformer.models.gpt import GPT, GPTConfig
from tformer.models.mini_gpt import MiniGPT, load_record
from tformer.training import optimizers
from tformer.training.optimizers import (
    SGD,
    AdamW,
    Muon,
    RMSprop,
    clip_grad_norm_,
    hidden_matrices,
    mup_groups,
    orthogonalize,
    param_groups,
)

torch.set_num_threads(1)


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(
        *shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)
    )


def close(a, b, tolerance):
    assert (a - b).abs().max() <= tolerance * max(1, b.abs().max())


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


def both_ways():
    "Each class here and in torch.optim, with the options that both have."
    for name, options in (
        ("SGD", {}),
        ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
        ("RMSprop", {"alpha": 0.9}),
        ("AdamW", {"betas": (0.8, 0.99)}),
        ("Muon", {"momentum": 0.9}),
    ):
        ours = getattr(optimizers, name)
        theirs = getattr(torch.optim, name)
        yield ours, theirs, options
        yield theirs, ours, options


@pytest.mark.parametrize("through_json", [False, True])
@pytest.mark.parametrize("first, second, options", [*both_ways()])
def test_a_state_goes_both_ways(first, second, options, through_json):
    "Four steps by one class: the same as two steps by each."
    torch.manual_seed(0)
    start = torch.randn(4, 3)
    grads = torch.randn(5, 4, 3)
    p = nn.Parameter(start.clone())
    whole = first([p], 0.01, **options)
    for t, grad in enumerate(grads):
        if t == 2:
            q = nn.Parameter(p.detach().clone())
            other = second([q], 0.5)  # the options come from the state
            state = copy.deepcopy(whole.state_dict())
            if through_json:
                groups = json.loads(json.dumps(state["param_groups"]))
                state["param_groups"] = groups
            other.load_state_dict(state)
        p.grad = grad.clone()
        whole.step()
        if t >= 2:
            q.grad = grad.clone()
            other.step()
    close(q, p, 1e-6)
    back = first([nn.Parameter(q.detach().clone())], 0.5)
    back.load_state_dict(other.state_dict())
    assert back.param_groups[0]["lr"] == 0.01


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "AdamW", "Muon"])
def test_a_state_may_be_read_more_than_once(name):
    optimizer = getattr(optimizers, name)([nn.Parameter(torch.ones(2, 2))], 0.01)
    state = copy.deepcopy(optimizer.state_dict())
    for _ in range(3):
        optimizer.load_state_dict(state)
        assert str(optimizer.state_dict()) == str(state)


@pytest.mark.parametrize(
    "theirs, ours, options, said",
    [
        ("SGD", SGD, {"momentum": 0.9, "nesterov": True}, "nesterov=True"),
        ("SGD", SGD, {"momentum": 0.9, "dampening": 0.5}, r"dampening=0\.5"),
        ("SGD", SGD, {"maximize": True}, "maximize=True"),
        ("RMSprop", RMSprop, {"momentum": 0.9}, r"momentum=0\.9"),
        ("RMSprop", RMSprop, {"centered": True}, "centered=True"),
        ("RMSprop", RMSprop, {"weight_decay": 0.1}, r"weight_decay=0\.1"),
        ("AdamW", AdamW, {"amsgrad": True}, "amsgrad=True"),
        ("Muon", Muon, {"ns_steps": 3}, "ns_steps=3"),
        ("SGD", AdamW, {"momentum": 0.9}, "needs a value for betas, eps;"),
        ("SGD", Muon, {"momentum": 0.9}, "needs a value for adjust_lr_fn;"),
        ("AdamW", SGD, {}, "needs a value for momentum;"),
        ("AdamW", RMSprop, {}, "needs a value for alpha;"),
        ("Adamax", AdamW, {}, "has exp_avg, exp_inf, and AdamW goes on from exp_avg"),
        ("NAdam", AdamW, {}, "has exp_avg, exp_avg_sq, mu_product, and AdamW"),
    ],
)
def test_a_state_of_another_algorithm_is_refused(theirs, ours, options, said):
    p = nn.Parameter(torch.ones(2, 2))
    p.grad = torch.ones(2, 2)
    source = getattr(torch.optim, theirs)([p], 0.01, **options)
    source.step()
    optimizer = ours([p], 0.02)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(source.state_dict())
    assert str(optimizer.state_dict()) == str(before)


def test_a_module_is_no_list_of_parameters():
    for call in (AdamW, lambda model: clip_grad_norm_(model, 1.0)):
        with pytest.raises(ValueError, match=r"got a Linear: give its parameters\(\)"):
            call(nn.Linear(2, 2))


@plain_only
def test_nothing_is_no_list_of_parameters_and_no_model():
    for call in (SGD, AdamW, lambda params: clip_grad_norm_(params, 1.0)):
        with pytest.raises(
            ValueError, match=r"must be parameters, got None: give a model's parameters"
        ):
            call(None)
    with pytest.raises(ValueError, match="model must be Module, got NoneType None"):
        param_groups(None, 0.1)


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


def test_orthogonalize_leaves_small_values_small():
    "The numbers of its docstring."
    u, _, v = torch.linalg.svd(randn(16, 16, dtype=torch.float64))
    s = torch.tensor(15 * [1.0] + [1e-6], dtype=torch.float64)
    ours = orthogonalize(u @ s.diag() @ v, dtype=torch.float64)
    found = torch.linalg.svdvals(ours)
    assert found[-2] > 0.68 and found[0] < 1.16
    assert found[-1] == pytest.approx(1e-6 / 15**0.5 * 3.4445**5, rel=1e-3)
    sizes = torch.logspace(math.log10(1 / 200), 0, 5000, dtype=torch.float64)
    for size in sizes.tolist():
        pair = torch.tensor([[size, 0], [0, (1 - size**2) ** 0.5]]).double()
        low = orthogonalize(pair, dtype=torch.float64)[0, 0]
        assert 0.68 < low < 1.16


def test_only_a_matrix_is_orthogonalized():
    for wrong in (randn(4), randn(4, 3, 2)):
        with pytest.raises(ValueError, match=r"matrix must be of shape \(m, n\), got"):
            orthogonalize(wrong)
    with pytest.raises(ValueError, match="matrix must have a floating type"):
        orthogonalize(torch.ones(2, 2, dtype=torch.int64))


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
        (AdamW, {"betas": (0.9,)}, r"betas must be two numbers, got \(0\.9,\)"),
        (AdamW, {"betas": 3 * (0.9,)}, r"betas must be two numbers, got \(0\.9, 0"),
        (AdamW, {"betas": 0.9}, r"betas must be two numbers, got 0\.9"),
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


def test_mup_without_matrices_that_learn_leaves_the_rate():
    for model in (nn.LayerNorm(8), MiniGPT(d_model=128)):
        for p in model.parameters():
            p.requires_grad_(p.ndim < 2)
        [rest] = mup_groups(model, 0.01, width=128, base_width=32)
        assert rest["lr"] == 0.01 and {p.ndim for p in rest["params"]} == {1}
    assert mup_groups(model.requires_grad_(False), 1.0, width=2, base_width=1) == []
    with pytest.raises(ValueError, match="lr must be above 0, got 0"):
        mup_groups(model, 0, width=128, base_width=32)


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
    assert {"AdamW", "Muon", "param_groups", "clip_grad_norm_"} <= {*optimizers.__all__}
