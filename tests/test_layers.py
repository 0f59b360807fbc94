"""Norms, feed-forward layers and residual wrappers against their peers."""

import copy
import itertools
import math
import os
import pickle
import statistics
from decimal import Decimal, localcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import BertConfig, GPT2Config, GPT2Model, LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.bert.modeling_bert import BertIntermediate, BertOutput
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from tformer.nn import feed_forward, layers, norms
from tformer.nn.feed_forward import (
    ACTIVATIONS,
    FeedForward,
    GatedFeedForward,
    gelu,
    gelu_tanh,
    identity,
    relu,
    silu,
    swiglu_width,
)
from tformer.nn.functional import attend
from tformer.nn.layers import Dropout, Linear, PostNorm, PreNorm, dropout, init_weights
from tformer.nn.norms import LayerNorm, RMSNorm, layer_norm, rms_norm

quick = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
NORMS = {"LayerNorm": (LayerNorm, layer_norm), "RMSNorm": (RMSNorm, rms_norm)}


def randn(*shape, seed=0, mean=0.0, std=1.0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g, dtype=torch.float64)
    return (mean + std * x).to(dtype)


def close(ours, reference, tolerance=1e-5):
    "The parity of the course: relative to the largest number, at least 1."
    assert ours.shape == reference.shape and ours.dtype == reference.dtype
    worst = (ours - reference).abs().max().item()
    assert worst <= tolerance * max(1, reference.abs().max().item())


def fill(module, seed=0):
    "Matrices of deviation 0.1, norms away from 1, biases away from 0."
    for i, (name, p) in enumerate(module.named_parameters()):
        mean = 0.0 if p.ndim > 1 else 0.4 if "bias" in name else 1.3
        p.data = randn(*p.shape, seed=seed + i, mean=mean, std=0.1)
    return module


def backward(out):
    tilt = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    (out * tilt.to(out.dtype)).sum().backward()


def same(ours, peer, x, names=None, turned=(), **kwargs):
    """Equal values and gradients, with the parameters of ``ours``.

    ``names`` maps our parameters to the peer's (None: equal names);
    those in ``turned`` are stored transposed there.
    """
    names = names or {n: n for n, _ in ours.named_parameters()}
    theirs = dict(peer.named_parameters())
    assert sorted(names.values()) == sorted(theirs)
    for a, p in ours.named_parameters():
        data = p.data.mT if a in turned else p.data
        assert theirs[names[a]].shape == data.shape
        theirs[names[a]].data = data.clone()
    x, y = (x.clone().requires_grad_() for _ in range(2))
    out = ours(x, **kwargs)
    reference = peer(y, **kwargs)
    close(out, reference)
    ours.zero_grad(), peer.zero_grad()
    backward(out), backward(reference)
    close(x.grad, y.grad)
    for a, p in ours.named_parameters():
        grad = theirs[names[a]].grad
        close(p.grad, grad.mT if a in turned else grad)


# linear layers


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("lead", [(), (3,), (2, 5), (2, 3, 4)])
def test_linear_equals_torch(lead, bias):
    same(fill(Linear(24, 40, bias)), nn.Linear(24, 40, bias), randn(*lead, 24, seed=9))


@pytest.mark.parametrize("d_in", [16, 256, 1024])
def test_linear_keeps_the_mean_square(d_in):
    torch.manual_seed(d_in)
    layer = Linear(d_in, 400)
    assert abs(layer.weight.var().item() * d_in - 1) < 0.05
    assert (layer.bias == 0).all()
    assert abs(layer(randn(200, d_in)).square().mean().item() - 1) < 0.1
    shifted = layer(randn(200, d_in, mean=3.0)).square().mean().item()
    assert abs(shifted / 10 - 1) < 0.2


def test_linear_loads_torch_weights():
    ours = Linear(4, 3)
    peer = nn.Linear(4, 3)
    ours.load_state_dict(peer.state_dict())
    assert torch.equal(ours(torch.ones(4)), peer(torch.ones(4)))
    assert list(Linear(4, 3, bias=False).state_dict()) == ["weight"]


# norms


def exact_norm(row, center, eps=Decimal(0)):
    "One vector normed in forty digits."
    with localcontext() as context:
        context.prec = 40
        row = [Decimal(r) for r in row]
        mean = sum(row) / len(row) if center else Decimal(0)
        row = [r - mean for r in row]
        root = (sum(r * r for r in row) / len(row) + eps).sqrt()
        return [float(r / root) for r in row]


@quick
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=9),
    st.sampled_from([1e-3, 1e-5, 1e-6]),
)
def test_norms_equal_exact_decimals(row, eps):
    x = torch.tensor(row, dtype=torch.float64)
    for norm, center in ((layer_norm, True), (rms_norm, False)):
        exact = torch.tensor(exact_norm(row, center, Decimal(eps)))
        assert torch.allclose(norm(x, eps=eps), exact.double(), atol=1e-9)


def test_norms_by_hand():
    x = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64)
    root = math.sqrt(12.5)
    spread = statistics.pstdev(x.tolist())
    close(rms_norm(x, eps=0.0), x / root, 1e-15)
    close(layer_norm(x, eps=0.0), (x - 3) / spread, 1e-15)
    assert spread == math.sqrt(3.5)


@pytest.mark.parametrize("lead", [(), (4,), (2, 5)])
@pytest.mark.parametrize("eps", [None, 1e-5, 1e-6, 1e-3])
@pytest.mark.parametrize("size", [1e-3, 1.0, 50.0])
def test_norms_equal_torch(lead, eps, size):
    x = size * randn(*lead, 48, mean=0.5)
    d = 48
    told = {} if eps is None else dict(eps=eps)
    same(fill(LayerNorm(d, **told)), nn.LayerNorm(d, eps or 1e-5), x)
    same(
        fill(LayerNorm(d, bias=False, **told)),
        nn.LayerNorm(d, eps or 1e-5, bias=False),
        x,
    )
    same(fill(RMSNorm(d, **told)), nn.RMSNorm(d, eps or 1e-6), x)
    same(fill(RMSNorm(d, **told)), LlamaRMSNorm(d, eps or 1e-6), x)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("size", [1e-3, 1.0, 50.0])
def test_the_written_norms_equal_the_classes(name, size):
    kind, function = NORMS[name]
    module = fill(kind(32))
    x = size * randn(2, 7, 32, mean=0.5)
    values = [p.detach().clone().requires_grad_() for p in module.parameters()]
    x, y = (x.clone().requires_grad_() for _ in range(2))
    out = module(x)
    written = function(y, *values, eps=module.eps)
    close(written, out)
    backward(out), backward(written)
    close(y.grad, x.grad)
    for value, p in zip(values, module.parameters(), strict=True):
        close(value.grad, p.grad)


def test_the_default_eps_is_that_of_the_checkpoints():
    "10⁻⁵ for LayerNorm, 10⁻⁶ for RMSNorm, and small inputs tell them apart."
    x = randn(20, 512, std=math.sqrt(1.85e-4))
    x = x * math.sqrt(1.85e-4) / x.square().mean(-1, keepdim=True).sqrt()
    for norm, eps in (
        (RMSNorm(512), 1e-6),
        (rms_norm, 1e-6),
        (LayerNorm(512), 1e-5),
        (layer_norm, 1e-5),
    ):
        out = norm(x)
        m = out.var(-1, correction=0) if eps == 1e-5 else out.square().mean(-1)
        before = x.var(-1, correction=0) if eps == 1e-5 else x.square().mean(-1)
        torch.testing.assert_close(m, before / (before + eps), rtol=1e-5, atol=1e-6)
    rms = [rms_norm(x, eps=eps).square().mean().sqrt().item() for eps in (1e-5, 1e-6)]
    assert abs(rms[0] - math.sqrt(185 / 195)) < 1e-5
    assert abs(rms[1] - math.sqrt(1850 / 1860)) < 1e-5


@pytest.mark.parametrize(
    "vocab_size, d_model, rms", [(10_000, 512, 0.973939), (50_257, 768, 0.889870)]
)
def test_eps_takes_its_share_of_small_embeddings(vocab_size, d_model, rms):
    "Xavier's variance on a table, cut off at three deviations."
    z = randn(2_200_000)
    z = z[z.abs() <= 3][: 2000 * d_model].view(-1, d_model)
    x = z * math.sqrt(2 / (vocab_size + d_model))
    shown = rms_norm(x, eps=1e-5).square().mean(-1).sqrt().mean().item()
    assert abs(shown - rms) < 1e-3
    assert 1 - rms_norm(x).square().mean().sqrt().item() < 0.014


@quick
@given(seeds, st.integers(2, 9), st.floats(0.01, 100), st.floats(-50, 50))
def test_what_norms_do_not_see(seed, d, scale, shift):
    x = randn(3, d, seed=seed, dtype=torch.float64)
    assert torch.allclose(rms_norm(scale * x, eps=0.0), rms_norm(x, eps=0.0))
    assert torch.allclose(
        layer_norm(scale * x + shift, eps=0.0), layer_norm(x, eps=0.0), atol=1e-7
    )
    assert torch.allclose(
        rms_norm(x, eps=0.0).square().mean(-1), torch.ones(3).double()
    )
    y = layer_norm(x, eps=0.0)
    assert torch.allclose(y.mean(-1), torch.zeros(3).double(), atol=1e-12)
    assert torch.allclose(y.square().mean(-1), torch.ones(3).double())


def test_layer_norm_is_rms_norm_behind_a_projection():
    d = 16
    projection = torch.eye(d).double() - 1 / d
    x = randn(10, d, mean=0.7, dtype=torch.float64)
    close(layer_norm(x), rms_norm(x @ projection, eps=1e-5), 1e-14)
    assert not torch.allclose(layer_norm(x), rms_norm(x, eps=1e-5), atol=0.1)


@pytest.mark.parametrize("norm", [layer_norm, rms_norm])
def test_norm_gradients(norm):
    x = randn(3, 5, dtype=torch.float64).requires_grad_()
    w = randn(5, mean=1.3, seed=1, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(norm, (x, w))
    assert torch.autograd.gradgradcheck(norm, (x, w))


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("written", [True, False])
def test_norms_are_wide_inside(name, written):
    "float16 squares overflow from 256 on, bfloat16 means have 8 bits."
    kind, function = NORMS[name]

    def norm(x):
        module = kind(x.shape[-1]).to(x.dtype)
        return function(x, eps=module.eps) if written else module(x)

    x = 300 * randn(4, 64, mean=1.0, dtype=torch.float64)
    truth = norm(x)
    for dtype, limit in ((torch.float16, 2**-10), (torch.bfloat16, 2**-7)):
        out = norm(x.to(dtype))
        assert out.dtype == dtype and out.isfinite().all()
        assert torch.allclose(out.double(), truth, rtol=limit, atol=4 * limit)
    x = randn(256, 512, mean=0.1).bfloat16()
    error = (norm(x).double() - norm(x.double())).abs().mean()
    rounding = (norm(x.double()).bfloat16().double() - norm(x.double())).abs().mean()
    assert error <= 1.05 * rounding  # one rounding and no second


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
def test_norms_in_bfloat16_are_as_exact_as_torch(name, weight):
    kind, _ = NORMS[name]
    peer_kind = {"LayerNorm": nn.LayerNorm, "RMSNorm": LlamaRMSNorm}[name]
    ours = fill(kind(128))
    peer = peer_kind(128, eps=kind(1).eps)
    peer.load_state_dict(ours.state_dict())

    def run(module, dtype, weight):
        module = copy.deepcopy(module).to(weight)
        x = randn(64, 128, mean=0.3).bfloat16().to(dtype).requires_grad_()
        out = module(x)
        assert out.dtype == dtype or module is peer
        backward(out)
        return [t.double() for t in (out, x.grad, module.weight.grad)]

    got = run(ours, torch.bfloat16, weight)
    theirs = run(peer, torch.bfloat16, torch.bfloat16)
    truth = run(ours.to(weight), torch.float64, torch.float64)
    for a, b, exact in zip(got, theirs, truth, strict=True):
        assert (a - exact).abs().mean() <= 1.1 * (b - exact).abs().mean()


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(
    "x_type, weight_type",
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float64),
    ],
)
def test_mixed_types_are_rounded_once(name, x_type, weight_type):
    "Against float64: as near as one rounding of the exact result."
    kind, function = NORMS[name]
    module = fill(kind(96)).to(weight_type)
    x = (3 * randn(64, 96, mean=0.5)).to(x_type).requires_grad_()
    out = module(x)
    assert out.dtype == x_type
    exact = copy.deepcopy(module).double()
    y = x.detach().double().requires_grad_()
    truth = function(y, *exact.parameters(), eps=exact.eps)
    inside = torch.promote_types(
        torch.promote_types(x_type, weight_type), torch.float32
    )
    finest = 8 * torch.finfo(inside).eps
    rounding = max(torch.finfo(x_type).eps / 2, finest)
    assert ((out.double() - truth).abs() <= rounding * truth.abs() + finest).all()
    tilt = torch.linspace(-1, 1, out.numel()).view(out.shape).to(x_type)
    out.backward(tilt), truth.backward(tilt.double())
    assert x.grad.dtype == x_type
    pairs = [(x.grad, y.grad, x_type)] + [
        (p.grad, q.grad, weight_type)
        for p, q in zip(module.parameters(), exact.parameters(), strict=True)
    ]
    for ours, theirs, kept in pairs:
        assert ours.dtype == kept
        near = 2 * torch.finfo(x_type).eps + torch.finfo(kept).eps + 1e-5
        assert (ours.double() - theirs).abs().max() <= near * theirs.abs().max()


@pytest.mark.parametrize("name", NORMS)
def test_gains_of_another_type_do_not_reach_the_kernel(name):
    "On the CPU it takes them with a warning at best, on CUDA not at all."
    kind, function = NORMS[name]
    module = fill(kind(32))
    x = randn(4, 32).bfloat16()
    with mock.patch.multiple(F, layer_norm=None, rms_norm=None):
        out = module(x)
    assert torch.equal(out, function(x, *module.parameters(), eps=module.eps))


def test_a_norm_sees_each_vector_alone():
    x = randn(2, 5, 8)
    other = x.clone()
    other[:, 3] += 1.0
    for norm in (LayerNorm(8), RMSNorm(8), layer_norm, rms_norm):
        moved = (norm(x) != norm(other)).any(-1)
        assert moved.tolist() == [[False, False, False, True, False]] * 2


# activations

POINTS = [-100.0, -40.0, -5.0, -1.278465, -0.75, -1e-4, 0.0, 1e-4, 0.5, 2.7, 40.0]


@pytest.mark.parametrize(
    "ours, reference",
    [
        (relu, F.relu),
        (gelu, F.gelu),
        (silu, F.silu),
        (gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
    ],
)
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_activations_equal_torch(ours, reference, dtype):
    x = torch.cat([torch.tensor(POINTS), 3 * randn(200)]).to(dtype)
    x, y = (x.clone().requires_grad_() for _ in range(2))
    a = ours(x)
    b = reference(y)
    backward(a), backward(b)
    tolerance = {torch.bfloat16: 2**-8, torch.float16: 2**-10}.get(dtype, 1e-5)
    close(a, b, tolerance)
    close(x.grad, y.grad, 4 * tolerance)
    assert x.grad.isfinite().all()


@pytest.mark.parametrize(
    "name, written",
    [
        ("relu", relu),
        ("gelu", gelu),
        ("gelu_tanh", gelu_tanh),
        ("silu", silu),
        ("sigmoid", lambda x: 1 / (1 + (-x).exp())),
        ("identity", identity),
    ],
)
def test_the_table_equals_what_is_written_out(name, written):
    x, y = (randn(500, std=3.0).requires_grad_() for _ in range(2))
    a = ACTIVATIONS[name](x)
    b = written(y)
    close(a, b)
    backward(a), backward(b)
    close(x.grad, y.grad)


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ("relu", "relu"),
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("silu", "silu"),
        ("sigmoid", "sigmoid"),
    ],
)
def test_activations_by_their_names_in_transformers(theirs, ours):
    x = randn(500, std=3.0)
    close(ACTIVATIONS[ours](x), ACT2FN[theirs](x))


@quick
@given(st.floats(-8, 8))
def test_gelu_is_x_times_the_normal_distribution(x):
    out = gelu(torch.tensor(x, dtype=torch.float64)).item()
    assert math.isclose(
        out, x * statistics.NormalDist().cdf(x), rel_tol=1e-9, abs_tol=1e-15
    )


def test_the_two_gelus_are_apart():
    x = torch.linspace(-8, 8, 160_001, dtype=torch.float64)
    for exact, tanh in (
        (gelu, gelu_tanh),
        (ACTIVATIONS["gelu"], ACTIVATIONS["gelu_tanh"]),
    ):
        gap = (exact(x) - tanh(x)).abs()
        assert abs(gap.max().item() - 4.732e-4) < 1e-7
        assert abs(x[gap.argmax()].abs().item() - 2.699) < 1e-3


def test_the_least_value_of_silu():
    x = torch.linspace(-2, -1, 2_000_001, dtype=torch.float64)
    y = silu(x)
    at = x[y.argmin()].item()
    assert abs(at + 1.278465) < 1e-6 and abs(y.min().item() + 0.278465) < 1e-6
    assert abs(y.min().item() - (1 + at)) < 1e-6
    assert silu(torch.tensor(-100.0)).item() <= 0


def test_relu_keeps_nan_and_has_slope_0_at_0():
    x = torch.tensor([math.nan, 0.0, -0.0], requires_grad=True)
    y = relu(x)
    y[1:].sum().backward()
    assert y[0].isnan() and (y[1:] == 0).all() and (x.grad == 0).all()


# dropout


@pytest.mark.parametrize("kind", ["written", "module"])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_keeps_the_expectation(kind, p, dtype):
    torch.manual_seed(0)
    x = torch.ones(200_000, dtype=dtype)
    y = dropout(x, p) if kind == "written" else Dropout(p)(x)
    assert y.dtype == dtype
    kept = torch.tensor(1 / (1 - p), dtype=dtype).double()
    values = y.double().unique()
    assert len(values) == 2 and values[0] == 0
    assert abs(values[1] / kept - 1) < 1e-6 + (dtype != x.float().dtype) / 64
    tolerance = 4 * math.sqrt(p / (1 - p) / len(x)) + (kept * (1 - p) - 1)
    assert abs(y.double().mean() - 1) < tolerance + 0.002
    assert abs((y == 0).double().mean() - p) < 0.006


@pytest.mark.parametrize("kind", ["written", "module"])
def test_dropout_is_off_in_eval_and_at_0(kind):
    x = randn(3, 50)
    if kind == "module":
        layer = Dropout(0.5)
        assert not torch.equal(layer(x), x)
        assert torch.equal(layer.eval()(x), x)
        assert not torch.equal(layer.train()(x), x)
        assert torch.equal(Dropout(0.0)(x), x)
    else:
        assert not torch.equal(dropout(x, 0.5), x)
        assert torch.equal(dropout(x, 0.5, training=False), x)
        assert torch.equal(dropout(x, 0.0), x)


@pytest.mark.parametrize("function", [dropout, lambda x, p: Dropout(p)(x)])
def test_the_gradient_of_dropout_is_its_mask(function):
    x = torch.full((1000,), 2.0, requires_grad=True)
    y = function(x, 0.4)
    y.sum().backward()
    close(x.grad, y.detach() / 2)
    assert 300 < (x.grad == 0).sum() < 500


def test_dropout_does_not_spread_nan():
    "A dropped entry is 0 even where the input is not a number."
    torch.manual_seed(0)
    y = dropout(torch.full((1000,), math.nan), 0.5)
    assert 400 < (y == 0).sum() < 600


# feed-forward layers

PLAIN = {
    "up_proj.weight": "c_fc.weight",
    "up_proj.bias": "c_fc.bias",
    "down_proj.weight": "c_proj.weight",
    "down_proj.bias": "c_proj.bias",
}


def test_feed_forward_equals_gpt2():
    peer = GPT2MLP(96, GPT2Config(n_embd=24, resid_pdrop=0.0))
    ours = fill(FeedForward(24, 96, activation="gelu_tanh"))
    same(
        ours,
        peer,
        3 * randn(2, 5, 24),
        PLAIN,
        turned=("up_proj.weight", "down_proj.weight"),
    )


def test_feed_forward_equals_bert():
    config = BertConfig(hidden_size=24, intermediate_size=96, num_attention_heads=2)
    up = BertIntermediate(config)
    down = BertOutput(config)
    peer = nn.Sequential(up.dense, up.intermediate_act_fn, down.dense)
    ours = fill(FeedForward(24, 96, activation="gelu"))
    same(
        ours,
        peer,
        3 * randn(2, 5, 24),
        dict(
            zip(
                (n for n, _ in ours.named_parameters()),
                (n for n, _ in peer.named_parameters()),
                strict=True,
            )
        ),
    )


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh"])
def test_a_wrong_activation_is_seen(activation):
    "The exact GELU and its tanh form differ by more than the parity."
    ours = fill(FeedForward(24, 96, activation=activation))
    x = 3 * randn(2, 5, 24)
    for other in {"relu", "gelu", "gelu_tanh"} - {activation}:
        wrong = FeedForward(24, 96, activation=other)
        wrong.load_state_dict(ours.state_dict())
        assert (ours(x) - wrong(x)).abs().max() > 2e-5


@pytest.mark.parametrize("bias", [False, True])
def test_gated_feed_forward_equals_llama(bias):
    peer = LlamaMLP(
        LlamaConfig(
            hidden_size=24, intermediate_size=64, num_attention_heads=2, mlp_bias=bias
        )
    )
    same(fill(GatedFeedForward(24, 64, bias=bias)), peer, randn(2, 5, 24))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_family_of_gates(activation):
    layer = fill(GatedFeedForward(6, 10, activation=activation))
    x = randn(4, 6)
    gate, up = (x @ m.weight.T for m in (layer.gate_proj, layer.up_proj))
    hidden = {
        "sigmoid": lambda: F.glu(torch.cat([up, gate], -1)),
        "relu": lambda: gate.clamp(min=0) * up,
        "identity": lambda: gate * up,
        "silu": lambda: gate / (1 + (-gate).exp()) * up,
        "gelu": lambda: F.gelu(gate) * up,
        "gelu_tanh": lambda: F.gelu(gate, approximate="tanh") * up,
    }
    close(layer(x), hidden[activation]() @ layer.down_proj.weight.T)
    swapped = copy.deepcopy(layer)
    swapped.gate_proj = layer.up_proj
    swapped.up_proj = layer.gate_proj
    gap = (swapped(x) - layer(x)).abs().max()
    assert gap < 1e-6 if activation == "identity" else gap > 1e-3


@pytest.mark.parametrize("kind", [FeedForward, GatedFeedForward])
def test_dropout_acts_on_the_hidden_features_and_in_training_only(kind):
    torch.manual_seed(0)
    layer = fill(kind(8, 32, dropout=0.5))
    x = randn(5, 8)
    plain = kind(8, 32)
    plain.load_state_dict(layer.state_dict())
    assert not torch.equal(layer(x), plain(x))
    assert torch.equal(layer.eval()(x), plain(x))
    seen = []
    layer.down_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    layer(x), layer.train()(x)
    kept = seen[1] != 0
    assert 0.3 < kept.float().mean() / (seen[0] != 0).float().mean() < 0.7
    close(seen[1][kept], 2 * seen[0][kept])


@pytest.mark.parametrize(
    "layer",
    [
        FeedForward(8, 32),
        GatedFeedForward(8, 32),
        Linear(8, 8),
        LayerNorm(8),
        RMSNorm(8),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_types_are_kept_and_positions_are_alone(layer, dtype):
    layer = copy.deepcopy(layer).to(dtype)
    x = randn(2, 5, 8).to(dtype)
    out = layer(x)
    assert out.dtype == dtype and out.shape == x.shape
    one = torch.stack([layer(x[:, i]) for i in range(5)], 1)
    assert torch.allclose(
        out.float(), one.float(), atol=1e-2 if dtype == torch.bfloat16 else 1e-5
    )


def test_attention_of_one_token_is_linear_and_without_biases_odd():
    w = [randn(8, 8, seed=i, std=0.4, dtype=torch.float64) for i in range(4)]

    def f(x):
        return attend(x @ w[0], x @ w[1], x @ w[2])[0] @ w[3]

    one, five = (randn(n, 8, dtype=torch.float64) for n in (1, 5))
    assert torch.allclose(f(2 * one), 2 * f(one))
    assert not torch.allclose(f(2 * five), 2 * f(five), atol=1e-2)
    assert torch.allclose(f(-five), -f(five))


def test_a_feed_forward_layer_computes_what_attention_cannot():
    absolute = FeedForward(1, 2, bias=False)
    absolute.up_proj.weight.data = torch.tensor([[1.0], [-1.0]])
    absolute.down_proj.weight.data = torch.ones(1, 2)
    x = randn(50, 1)
    assert torch.equal(absolute(x), x.abs())
    xor = FeedForward(2, 2)
    xor.up_proj.weight.data = torch.ones(2, 2)
    xor.up_proj.bias.data = torch.tensor([0.0, -1.0])
    xor.down_proj.weight.data = torch.tensor([[1.0, -2.0], [0.0, 0.0]])
    for a, b in itertools.product((0, 1), repeat=2):
        assert xor(torch.tensor([a, b]).float())[0] == a ^ b
    product = GatedFeedForward(2, 1, activation="identity")
    product.gate_proj.weight.data = torch.tensor([[1.0, 0.0]])
    product.up_proj.weight.data = torch.tensor([[0.0, 1.0]])
    product.down_proj.weight.data = torch.tensor([[1.0], [0.0]])
    pairs = randn(50, 2)
    assert torch.equal(product(pairs)[:, 0], pairs.prod(-1))


@quick
@given(st.integers(1, 20_000), st.integers(1, 512))
def test_swiglu_width_is_the_nearest_multiple(d, m):
    width = swiglu_width(d, m)
    assert width % m == 0 and width >= m
    gap = abs(3 * width - 8 * d)
    assert all(
        gap <= abs(3 * other - 8 * d) for other in (width - m, width + m) if other >= m
    )


def test_swiglu_widths_of_known_models():
    assert swiglu_width(512) == 1344 and swiglu_width(4096) == 10944
    assert swiglu_width(768) == 2048 and swiglu_width(4096, 256) == 11008
    for d in (512, 768, 1024, 4096, 8192):
        gated = GatedFeedForward(8, 1).to("meta")
        assert sum(p.numel() for p in gated.parameters()) == 3 * 8
        assert abs(3 * d * swiglu_width(d) / (8 * d * d) - 1) <= 12 / d


# the residual stream


class Borrowed(nn.Module):
    def __init__(self, mha):
        super().__init__()
        self.mha = mha

    def forward(self, x, mask=None):
        return self.mha(x, x, x, attn_mask=mask, need_weights=False)[0]


def pair(norm_first, d=24):
    "A TransformerEncoderLayer and our two wrappers around equal parts."
    torch.manual_seed(0)
    peer = nn.TransformerEncoderLayer(
        d, 2, 96, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    wrap = PreNorm if norm_first else PostNorm
    mha = nn.MultiheadAttention(d, 2, batch_first=True)
    ours = fill(
        nn.ModuleDict(
            dict(
                attention=wrap(LayerNorm(d), Borrowed(mha)),
                feed=wrap(LayerNorm(d), FeedForward(d, 96)),
            )
        )
    )
    names = {}
    for name, _ in ours.named_parameters():
        new = (
            name.replace("attention.sublayer.mha", "self_attn")
            .replace("attention.norm", "norm1")
            .replace("feed.norm", "norm2")
            .replace("feed.sublayer.up_proj", "linear1")
            .replace("feed.sublayer.down_proj", "linear2")
        )
        names[name] = new
    return ours, peer, names


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_the_two_orders_equal_torch(norm_first, masked):
    ours, peer, names = pair(norm_first)
    mask = torch.ones(5, 5).triu(1).bool() if masked else None
    ours.forward = lambda x: ours["feed"](ours["attention"](x, mask=mask))
    forward = peer.forward
    peer.forward = lambda x: forward(x, src_mask=mask)
    same(ours, peer, randn(2, 5, 24), names)


def test_pre_norm_and_post_norm_written_out():
    norm = fill(RMSNorm(8))
    part = fill(Linear(8, 8))
    x = randn(3, 8)
    close(PreNorm(norm, part)(x), x + part(norm(x)))
    close(PostNorm(norm, part)(x), norm(x + part(x)))
    assert not torch.allclose(PreNorm(norm, part)(x), PostNorm(norm, part)(x), atol=0.1)


@pytest.mark.parametrize("wrap", [PreNorm, PostNorm])
def test_wrappers_hand_further_arguments_on(wrap):
    class Part(nn.Module):
        def forward(self, x, a, *, b):
            return a * x + b

    x = randn(2, 8)
    out = wrap(nn.Identity(), Part())(x, 3.0, b=1.0)
    close(out, x + (3 * x + 1))


@pytest.mark.parametrize("wrap", [PreNorm, PostNorm])
def test_dropout_of_the_wrappers_acts_on_what_is_added(wrap):
    torch.manual_seed(0)
    x = torch.ones(4, 500)
    layer = wrap(nn.Identity(), nn.Identity(), dropout=0.5)
    assert sorted(layer(x).unique().tolist()) == [1.0, 3.0]
    assert layer.eval()(x).unique().tolist() == [2.0]


def test_the_second_residual_adds_the_first_norm():
    "What attention writes must not be lost when the MLP writes nothing."
    ours, _, _ = pair(norm_first=False)
    for p in ours["feed"].sublayer.down_proj.parameters():
        p.data.zero_()
    x = randn(1, 5, 24)
    other = x.clone()
    other[:, 4] += 1.0
    a, b = (ours["feed"](ours["attention"](z)) for z in (x, other))
    assert (a[:, :4] - b[:, :4]).abs().amax(-1).min() > 1e-3


# initialization


def model(d=64, n=2):
    blocks = [
        nn.ModuleDict(
            dict(
                o_proj=PreNorm(RMSNorm(d), Linear(d, d)),
                fused_o_proj=Linear(d, d),
                attention=nn.ModuleDict(dict(q_proj=Linear(d, d), o_proj=Linear(d, d))),
                mlp=PreNorm(LayerNorm(d), FeedForward(d, 4 * d)),
            )
        )
        for _ in range(n)
    ]
    return nn.ModuleDict(
        dict(
            embed=nn.Embedding(500, d), blocks=nn.ModuleList(blocks), norm=LayerNorm(d)
        )
    )


@pytest.mark.parametrize("std", [0.02, 0.1])
@pytest.mark.parametrize("n_layers", [None, 2, 8])
def test_init_weights_follows_its_table(std, n_layers):
    torch.manual_seed(0)
    built = fill(model())
    init_weights(built, std=std, n_layers=n_layers)
    shrink = 1 if n_layers is None else 1 / math.sqrt(2 * n_layers)
    for name, p in built.named_parameters():
        spread = p.std().item()
        if name.endswith("bias"):
            assert (p == 0).all()
        elif "norm" in name:
            assert (p == 1).all()
        elif name.endswith((".attention.o_proj.weight", "down_proj.weight")):
            assert abs(spread / (std * shrink) - 1) < 0.05, name
        else:
            assert abs(spread / std - 1) < 0.05, name


def test_init_weights_spreads_like_gpt2():
    torch.manual_seed(0)
    ours = nn.ModuleDict(dict(mlp=FeedForward(64, 256), o_proj=Linear(64, 64)))
    init_weights(ours, n_layers=8)
    peer = GPT2Model(
        GPT2Config(
            vocab_size=100,
            n_embd=64,
            n_layer=8,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    for a, b in (
        (ours["mlp"].up_proj, peer.h[0].mlp.c_fc),
        (ours["mlp"].down_proj, peer.h[0].mlp.c_proj),
        (ours["o_proj"], peer.h[0].attn.c_proj),
    ):
        assert abs(a.weight.std() / b.weight.std() - 1) < 0.05
        assert (a.bias == b.bias).all()


def test_init_weights_on_other_peoples_parts():
    layer = nn.TransformerEncoderLayer(32, 2, 64)
    init_weights(layer, std=0.05)
    for name, p in layer.named_parameters():
        if p.ndim == 1:
            assert (p == (0 if "bias" in name else 1)).all()
        else:
            assert abs(p.std().item() - 0.05) < 0.005


def test_init_weights_draws_tied_weights_once_and_repeats():
    def tied():
        m = nn.ModuleDict(
            dict(embed=nn.Embedding(50, 16), lm_head=Linear(16, 50, bias=False))
        )
        m["lm_head"].weight = m["embed"].weight
        torch.manual_seed(3)
        init_weights(m)
        return m

    a = tied()
    b = tied()
    assert a["lm_head"].weight is a["embed"].weight
    assert torch.equal(a["embed"].weight, b["embed"].weight)


def test_an_unknown_parameter_is_named_and_nothing_is_changed():
    odd = nn.ParameterDict(dict(temperature=torch.ones(())))
    m = nn.ModuleDict(dict(norm=fill(LayerNorm(4)), last=odd))
    before = m["norm"].weight.clone()
    with pytest.raises(ValueError, match=r"'last\.temperature'.*shape \(\)"):
        init_weights(m)
    assert torch.equal(m["norm"].weight, before)


def test_scaled_writes_keep_the_stream_level_at_any_depth():
    spread = {}
    for scaled, n in itertools.product((False, True), (2, 16)):
        torch.manual_seed(0)
        stack = nn.Sequential(
            *(PreNorm(RMSNorm(64), FeedForward(64, 256)) for _ in range(2 * n))
        )
        init_weights(stack, std=0.125, n_layers=n if scaled else None)
        with torch.no_grad():
            spread[scaled, n] = stack(randn(64, 64)).std().item()
    assert spread[False, 16] > 2 * spread[False, 2]
    assert abs(spread[True, 16] / spread[True, 2] - 1) < 0.1


# mistakes are named


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: LayerNorm(8)(torch.ones(2, 7)), r"x .*, 8\), got \(2, 7\)"),
        (lambda: LayerNorm(8)(torch.ones(2, 1)), r"x .*, 8\), got \(2, 1\)"),
        (lambda: LayerNorm(8)(torch.ones(2, 1).bfloat16()), r"got \(2, 1\)"),
        (lambda: LayerNorm(8)(torch.ones(())), r"x .*, 8\), got \(\)"),
        (lambda: RMSNorm(8)(torch.ones(2, 7)), r"x .*, 8\), got \(2, 7\)"),
        (lambda: RMSNorm(8)(torch.ones(2, 1)), r"x .*, 8\), got \(2, 1\)"),
        (lambda: RMSNorm(8)(torch.ones(2, 1).bfloat16()), r"got \(2, 1\)"),
        (lambda: Linear(4.0, 4), "d_in.*whole.*got 4.0"),
        (lambda: Linear(4, True), "d_out.*whole.*got True"),
        (lambda: LayerNorm(8, eps=0.0), "eps.*above 0.*got 0.0"),
        (lambda: RMSNorm(8, eps=-1e-6), "eps.*above 0.*got -1e-06"),
        (lambda: RMSNorm(8, eps=math.nan), "eps.*got nan"),
        (lambda: swiglu_width(8.5), "d_model.*got 8.5"),
        (lambda: Dropout(True), "p must.*got True"),
        (lambda: Dropout("0.1"), "p must.*got '0.1'"),
        (lambda: init_weights(Linear(2, 2), std=-0.1), "std.*got -0.1"),
        (lambda: init_weights(Linear(2, 2), n_layers=2.0), "n_layers.*got 2.0"),
        (lambda: Linear(0, 4), "d_in.*at least 1, got 0"),
        (lambda: Linear(4, -1), "d_out.*at least 1, got -1"),
        (lambda: LayerNorm(0), "d_model.*got 0"),
        (lambda: RMSNorm(0), "d_model.*got 0"),
        (lambda: FeedForward(8, 0), "d_ff.*got 0"),
        (lambda: GatedFeedForward(8, 8 / 3), "d_ff.*whole.*got 2.66"),
        (lambda: swiglu_width(0), "d_model.*got 0"),
        (lambda: swiglu_width(8, 0), "multiple_of.*got 0"),
        (
            lambda: FeedForward(8, 16, activation="swish"),
            "'relu', 'gelu', 'gelu_tanh', 'silu', 'sigmoid', 'identity', got 'swish'",
        ),
        (lambda: GatedFeedForward(8, 16, activation="SiLU"), "'relu'.*'SiLU'"),
        (lambda: Dropout(1.0), "below 1, got 1.0"),
        (lambda: Dropout(-0.1), "got -0.1"),
        (lambda: Dropout(math.nan), "got nan"),
        (lambda: dropout(torch.ones(2), 1.5), "got 1.5"),
        (lambda: dropout(torch.ones(2), 1.5, training=False), "got 1.5"),
        (lambda: FeedForward(8, 16, dropout=1.0), "got 1.0"),
        (lambda: PreNorm(nn.Identity(), nn.Identity(), dropout=2.0), "got 2.0"),
        (lambda: PostNorm(nn.Identity(), nn.Identity(), dropout=2.0), "got 2.0"),
        (lambda: init_weights(Linear(2, 2), n_layers=0), "n_layers.*got 0"),
    ],
)
def test_wrong_arguments_are_named(call, says):
    with pytest.raises(ValueError, match=f"(?s){says}"):
        call()


@pytest.mark.skipif("TFORMER_SHAPES" in os.environ, reason="signatures refuse first")
@pytest.mark.parametrize("kind", [Linear, FeedForward, GatedFeedForward])
def test_a_wrong_width_is_refused_by_the_product(kind):
    for shape in ((2, 7), (7,), (2, 1), ()):
        with pytest.raises(RuntimeError):
            kind(8, 16)(torch.ones(shape))


@pytest.mark.skipif("TFORMER_SHAPES" in os.environ, reason="signatures say int")
def test_sizes_may_be_numbers_of_numpy():
    eight = np.int64(8)
    x = randn(2, 8)
    for part in (
        Linear(eight, 4),
        LayerNorm(eight),
        RMSNorm(eight),
        FeedForward(eight, eight),
        GatedFeedForward(eight, eight),
        Dropout(np.float64(0.5)),
    ):
        assert part(x).shape[0] == 2
    assert swiglu_width(eight) == swiglu_width(8)


# as modules


class Keeps(nn.Module):
    "A part that makes a cache, as attention does."

    def new_cache(self, batch, max_len=None):
        return self, batch, max_len


@pytest.mark.parametrize("kind", [PreNorm, PostNorm])
def test_the_cache_of_a_wrapped_part(kind):
    part = Keeps()
    block = kind(RMSNorm(8), part)
    assert block.new_cache(3) == (part, 3, None)
    assert block.new_cache(3, 40) == (part, 3, 40)
    assert block.new_cache(3, max_len=40) == (part, 3, 40)
    assert kind(RMSNorm(8), block).new_cache(2, 5) == (part, 2, 5)
    assert kind(RMSNorm(8), FeedForward(8, 16)).new_cache(3, 40) is None


def test_print_shows_all_that_changes_the_numbers():
    kinds = [
        Linear(8, 4),
        Linear(4, 8),
        Linear(8, 4, bias=False),
        LayerNorm(8),
        LayerNorm(4),
        LayerNorm(8, eps=1e-6),
        LayerNorm(8, bias=False),
        RMSNorm(8),
        RMSNorm(8, eps=1e-5),
        Dropout(0.1),
        Dropout(0.2),
        FeedForward(8, 16),
        FeedForward(8, 24),
        FeedForward(8, 16, activation="gelu"),
        FeedForward(8, 16, dropout=0.1),
        FeedForward(8, 16, bias=False),
        GatedFeedForward(8, 16),
        GatedFeedForward(8, 16, activation="gelu"),
        PreNorm(RMSNorm(8), Linear(8, 8)),
        PostNorm(RMSNorm(8), Linear(8, 8)),
        PostNorm(RMSNorm(8), Linear(8, 8), 0.1),
    ]
    assert len({repr(part) for part in kinds}) == len(kinds)
    assert repr(Linear(8, 4)) == "Linear(8, 4, bias=True)"
    assert repr(RMSNorm(8)) == "RMSNorm(8, eps=1e-06)"


MODULES = [
    Linear(8, 4),
    LayerNorm(8),
    RMSNorm(8),
    Dropout(0.1),
    FeedForward(8, 16, activation="gelu_tanh", dropout=0.1),
    GatedFeedForward(8, 16, activation="identity"),
    PreNorm(RMSNorm(8), FeedForward(8, 16), 0.1),
    PostNorm(LayerNorm(8), GatedFeedForward(8, 16)),
]


@pytest.mark.parametrize("module", MODULES, ids=lambda m: type(m).__name__)
def test_modules_are_good_citizens(module):
    x = randn(2, 3, 8)
    module.eval()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), module(x))
    meta = copy.deepcopy(module).to("meta")
    assert meta(x.to("meta")).device.type == "meta"
    assert type(module).__name__ in repr(module)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert module(x).isfinite().all()


def test_parts_are_born_where_the_context_says():
    "Parts take no device argument that they could ignore."
    with torch.device("meta"):
        for build in (
            lambda: RMSNorm(8),
            lambda: LayerNorm(8),
            lambda: FeedForward(8, 16),
            lambda: GatedFeedForward(8, 16),
        ):
            assert all(p.is_meta for p in build().parameters())
    for kind in (RMSNorm, LayerNorm, Dropout, PreNorm):
        with pytest.raises(TypeError):
            kind(8, device="cpu")


@pytest.mark.nightly
@pytest.mark.skipif(
    "TFORMER_SHAPES" in os.environ, reason="executed signatures break the graph"
)
@pytest.mark.parametrize("module", MODULES, ids=lambda m: type(m).__name__)
def test_modules_are_one_graph(module):
    "Without a break, as torch.compile(fullgraph=True) asks."
    module = copy.deepcopy(module).eval()
    x = randn(2, 3, 8)
    graph = torch.compile(module, fullgraph=True, backend="eager")
    close(graph(x), module(x))
    if not isinstance(module, Dropout):
        half = copy.deepcopy(module).bfloat16()
        torch.compile(half, fullgraph=True, backend="eager")(x.bfloat16())


@pytest.mark.gpu
@pytest.mark.parametrize("module", MODULES, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_equals_cpu(module, dtype):
    x = randn(2, 3, 8).to(dtype)
    module = copy.deepcopy(module).eval()
    cpu = module.to(dtype)(x)
    gpu = module.to("cuda")(x.cuda()).cpu()
    close(gpu.float(), cpu.float(), 1e-4 if dtype == x.float().dtype else 3e-2)
    if isinstance(module, (LayerNorm, RMSNorm)):  # gains of another type
        module.to(torch.float32)
        assert module(x.cuda()).dtype == dtype


def test_everything_public_has_a_test_here():
    text = Path(__file__).read_text(encoding="utf-8")
    names = {*norms.__all__, *layers.__all__, *feed_forward.__all__} - {"INIT_RULES"}
    assert all(name in text for name in names)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 5, 8)])
def test_the_size_of_eps_is_read_in_every_mode(grad, shape):
    "Also after it was changed, and where another type is the default."
    norm = RMSNorm(8)
    x = randn(*shape) * 1e-3
    norm.eps = 0.5
    with torch.set_grad_enabled(grad):
        close(norm(x).detach(), rms_norm(x, norm.weight, 0.5).detach())
        torch.set_default_dtype(torch.float64)
        try:
            close(norm(x).detach(), rms_norm(x, norm.weight, 0.5).detach())
        finally:
            torch.set_default_dtype(torch.float32)
        x = torch.zeros(1, 8)
        assert not norm(x).any() and norm(x).isfinite().all()


@torch.no_grad()
def test_the_quick_rms_norm_is_the_norm():
    norm = RMSNorm(16, eps=1e-3)
    norm.weight.copy_(torch.linspace(0.5, 2.0, 16))
    x = 0.05 * torch.randn(3, 1, 16)
    expected = F.rms_norm(x.double(), (16,), norm.weight.double(), 1e-3)
    assert torch.allclose(norm(x).double(), expected, rtol=1e-5)
