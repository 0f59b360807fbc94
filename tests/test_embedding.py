"""Embeddings and positions against PyTorch, transformers and arithmetic."""

import cmath
import itertools
import math
import os
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from conftest import run_small
from helpers import plain_only
from tformer.models.mini_gpt import load_record
from tformer.nn.embedding import (
    Embedding,
    LearnedPositionEmbedding,
    SinusoidalPositionEmbedding,
    embed_one_hot,
    position_shift_matrix,
    sinusoids,
)
from tformer.nn.functional import attend, causal_mask

quick = settings(max_examples=40, deadline=None, derandomize=True)
evens = st.integers(1, 20).map(lambda half: 2 * half)
bases = st.sampled_from([10_000.0, 100.0, 2.0, 500_000.0])
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = bool(os.environ.get("TFORMER_SHAPES"))


def draw(*shape, high, low=0, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=g)


def randn(*shape, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def close(ours, reference, tolerance=1e-5):
    "The parity of the course: relative to the largest number, at least 1."
    assert ours.shape == reference.shape and ours.dtype == reference.dtype
    worst = (ours - reference).abs().max().item()
    assert worst <= tolerance * max(1, reference.abs().max().item())


def slopes(out, *tensors):
    "Gradients of a sum in which no two outputs count alike."
    tilt = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    return torch.autograd.grad((out * tilt.to(out)).sum(), tensors)


def by_formula(p, column, d, base=10_000.0):
    angle = p * base ** (-2 * (column // 2) / d)
    return (math.cos if column % 2 else math.sin)(angle)


def peer_table(n, d):
    "The sinusoids of transformers, its columns put in pairs."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.models.marian.modeling_marian import (
            MarianSinusoidalPositionalEmbedding,
        )
    table = MarianSinusoidalPositionalEmbedding(n, d).create_weight()
    return table.unflatten(-1, (2, d // 2)).mT.flatten(-2)


# embedding


@pytest.mark.parametrize("init", ["normal", "uniform"])
@pytest.mark.parametrize("d_model", [8, 96, 512])
def test_the_variance_is_one_over_d_model(init, d_model):
    torch.manual_seed(0)
    weight = Embedding(400_000 // d_model, d_model, init=init).weight
    assert weight.var().item() * d_model == pytest.approx(1, abs=0.02)
    assert weight.mean().abs() < 0.01
    edge = weight.abs().max() * d_model**0.5
    assert (edge <= 3**0.5) == (init == "uniform")
    kurtosis = (weight.pow(4).mean() / weight.var() ** 2).item()
    assert kurtosis == pytest.approx(1.8 if init == "uniform" else 3, abs=0.1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 4.0, 96**0.5])
def test_values_and_gradients_equal_nn_embedding(scale, dtype, device):
    ours = Embedding(13, 96, scale=scale).to(device, dtype)
    peer = nn.Embedding(13, 96, device=device, dtype=dtype)
    peer.load_state_dict(ours.state_dict())
    ids = draw(3, 7, high=11).to(device)
    out = ours(ids)
    ref = peer(ids) * scale
    assert out.dtype == dtype and torch.equal(out, ref)
    (grad,), (expected,) = (slopes(x, m.weight) for x, m in ((out, ours), (ref, peer)))
    assert torch.equal(grad, expected) and (grad[11:] == 0).all()


def test_the_one_hot_product_is_the_definition():
    layer = Embedding(13, 8)
    ids = draw(3, 7, high=13)
    out = layer(ids)
    hand = embed_one_hot(ids, layer.weight)
    assert torch.equal(out, hand)
    close(slopes(out, layer.weight)[0], slopes(hand, layer.weight)[0])
    assert embed_one_hot(ids[0, 0], layer.weight).shape == (8,)


def test_gradients_reach_only_the_rows_used_and_add_up():
    layer = Embedding(6, 4, scale=2.0)
    ids = torch.tensor([[2, 5, 2], [0, 2, 5]])
    share = torch.arange(1.0, 7.0).reshape(2, 3, 1)
    (layer(ids) * share).sum().backward()
    expected = 2 * torch.tensor([4.0, 0, 9, 0, 0, 8])
    assert torch.equal(layer.weight.grad, expected[:, None].expand(6, 4))


@pytest.mark.parametrize(
    "ids, says",
    [
        ([[0, 13]], "id 13 .* 13 ids"),
        ([[40, 2]], "id 40 .* 13 ids"),
        ([[-1, 2]], "id -1 .* 13 ids"),
        ([[0.0, 1.0]], "float32"),
        ([[True, False]], "bool"),
    ],
)
def test_wrong_ids_are_named(ids, says):
    with pytest.raises(ValueError, match=says):
        Embedding(13, 4)(torch.tensor(ids))


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: Embedding(0, 4), "vocab_size .* 0"),
        (lambda: Embedding(4, 0), "d_model .* 0"),
        (lambda: Embedding(4, 4, init="xavier"), "'uniform'.*'xavier'"),
        (lambda: Embedding(4.0, 4), "vocab_size .* 4.0"),
        (lambda: Embedding(4, True), "d_model .* True"),
        (lambda: Embedding(4, 4, scale=math.nan), "scale .* nan"),
        (lambda: LearnedPositionEmbedding(4, 4, std=-0.1), "std .* -0.1"),
        (lambda: SinusoidalPositionEmbedding(2.5, 4), "max_len .* 2.5"),
        (lambda: SinusoidalPositionEmbedding(4, 4, base=math.inf), "base .* inf"),
        (lambda: SinusoidalPositionEmbedding(4, 4)(torch.ones(1, 2)), "float32"),
        (lambda: sinusoids(torch.arange(3), 4.0), "d_model .* 4.0"),
        (lambda: sinusoids(torch.arange(3), 4, base=math.nan), "base .* nan"),
        (lambda: position_shift_matrix(1, 4, base=-1.0), "base .* -1.0"),
        (lambda: LearnedPositionEmbedding(0, 4), "max_len .* 0"),
        (lambda: LearnedPositionEmbedding(4, -1), "d_model .* -1"),
        (lambda: SinusoidalPositionEmbedding(0, 4), "max_len .* 0"),
        (lambda: SinusoidalPositionEmbedding(4, 7), "d_model 7.* even, as 8"),
        (lambda: sinusoids(torch.arange(3), 1), "d_model must be .* least 2, got 1"),
        (lambda: sinusoids(torch.arange(3), 4, base=0.0), "base .* 0.0"),
        (lambda: sinusoids(torch.arange(3.0), 4), "float32"),
        (lambda: position_shift_matrix(1, 5), "d_model 5.* even, as 6"),
    ],
)
def test_wrong_sizes_are_named(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.skipif(SHAPES, reason="signatures say int")
def test_sizes_may_be_numbers_of_numpy():
    ids = draw(2, 5, high=4)
    four = np.int64(4)
    for kind in (Embedding, LearnedPositionEmbedding, SinusoidalPositionEmbedding):
        assert kind(four, four)(ids).shape == (2, 5, 4)


def test_print_shows_all_that_changes_the_numbers():
    kinds = [
        Embedding(9, 4),
        Embedding(8, 4),
        Embedding(9, 6),
        Embedding(9, 4, scale=2.0),
        LearnedPositionEmbedding(9, 4),
        LearnedPositionEmbedding(8, 4),
        LearnedPositionEmbedding(9, 6),
        SinusoidalPositionEmbedding(9, 4),
        SinusoidalPositionEmbedding(8, 4),
        SinusoidalPositionEmbedding(9, 6),
        SinusoidalPositionEmbedding(9, 4, base=9.0),
    ]
    assert len({repr(part) for part in kinds}) == len(kinds)
    assert repr(Embedding(9, 4)) == "Embedding(9, 4, scale=1.0)"
    assert repr(LearnedPositionEmbedding(9, 4)) == "LearnedPositionEmbedding(9, 4)"
    assert (
        repr(SinusoidalPositionEmbedding(9, 4))
        == "SinusoidalPositionEmbedding(9, 4, base=10000.0)"
    )


def test_ids_may_be_narrow_or_none():
    layer = Embedding(13, 4)
    table = LearnedPositionEmbedding(13, 4)
    waves = SinusoidalPositionEmbedding(13, 4)
    ids = draw(2, 5, high=13)
    for part in (layer, table, waves):
        for dtype in (torch.int32, torch.int16, torch.int8):
            assert torch.equal(part(ids.to(dtype)), part(ids))
        assert part(ids[:, :0]).shape == (2, 0, 4)
        assert part(ids[:0]).shape == (0, 5, 4)


# sinusoids


@quick
@given(st.integers(-(10**6), 10**6), evens, bases)
def test_sinusoids_equal_the_formula(p, d, base):
    row = sinusoids(torch.tensor(p), d, base)
    assert row.dtype == torch.float32 and row.shape == (d,)
    for column in range(d):
        assert abs(row[column] - by_formula(p, column, d, base)) < 1e-6


@pytest.mark.parametrize("d", [2, 8, 64, 512])
def test_sinusoids_equal_transformers(d):
    close(sinusoids(torch.arange(1100), d), peer_table(1100, d), 1e-6)


def test_position_0_has_all_hands_upright():
    assert torch.equal(
        sinusoids(torch.tensor([0]), 6), torch.tensor([[0.0, 1, 0, 1, 0, 1]])
    )


def test_the_first_pair_turns_by_one_radian():
    rows = sinusoids(torch.arange(50), 8)[:, :2].double()
    turns = (rows[1:] * rows[:-1]).sum(-1)
    assert torch.allclose(turns, torch.tensor(1.0).double().cos(), atol=1e-6)


def test_any_shape_of_positions():
    positions = draw(2, 3, 4, high=1000)
    rows = sinusoids(positions, 8)
    assert rows.shape == (2, 3, 4, 8)
    assert torch.equal(rows[1, 2], sinusoids(positions[1, 2], 8))


@pytest.mark.parametrize(
    "offset, expected",
    [
        (0, 256),
        (1, 249.102098),
        (2, 231.733620),
        (10, 173.789725),
        (45, 134.311564),
        (64, 124.259909),
    ],
)
def test_dot_products_are_sums_of_cosines_of_the_offset(offset, expected):
    formula = math.fsum(math.cos(offset / 10_000 ** (2 * k / 512)) for k in range(256))
    assert formula == pytest.approx(expected, abs=1e-6)
    rows = sinusoids(torch.arange(200), 512).double()
    products = rows @ rows.T
    assert torch.allclose(
        products.diagonal(offset), torch.tensor(formula).double(), atol=1e-4
    )
    assert torch.allclose(products, products.T)


@quick
@given(st.integers(-500, 500), st.integers(0, 2000), evens, bases)
def test_a_step_is_one_matrix_for_all_positions(k, p, d, base):
    step = position_shift_matrix(k, d, base)
    before, after = (sinusoids(torch.tensor(n), d, base) for n in (p, p + k))
    assert torch.allclose(step @ before, after, atol=1e-5)
    back = position_shift_matrix(-k, d, base)
    assert torch.allclose(step @ back, torch.eye(d), atol=1e-5)
    assert torch.equal(step.T, back)


def test_a_step_is_a_product_of_complex_numbers():
    step = position_shift_matrix(7, 6)
    for i in range(3):
        turn = cmath.exp(7j * 10_000 ** (-2 * i / 6))
        expected = torch.tensor([[turn.real, turn.imag], [-turn.imag, turn.real]])
        here = slice(2 * i, 2 * i + 2)
        assert torch.allclose(step[here, here], expected, atol=1e-6)
        step[here, here] = 0
    assert (step == 0).all()


# the class around them


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_table_and_beyond_it_are_the_same(dtype, device):
    layer = SinusoidalPositionEmbedding(10, 16).to(device, dtype)
    positions = torch.tensor([[0, 1, 9, 10, 11, 5000]], device=device)
    out = layer(positions)
    assert out.dtype == dtype
    exact = torch.tensor(
        [[[by_formula(p, c, 16) for c in range(16)] for p in positions[0].tolist()]],
        dtype=torch.float64,
    )
    near = 1e-6 if dtype == torch.float32 else 2**-8
    assert (out.cpu().double() - exact).abs().max() <= near
    long = SinusoidalPositionEmbedding(6000, 16).to(device, dtype)
    assert torch.equal(out, long(positions))
    for p, row in zip(positions[0], out[0], strict=True):
        assert torch.equal(layer(p.reshape(1, 1))[0, 0], row)


def test_sinusoids_are_not_saved_and_not_trained():
    layer = SinusoidalPositionEmbedding(10, 16)
    assert not list(layer.parameters()) and not layer.state_dict()
    assert layer.to(torch.bfloat16).table.dtype == torch.bfloat16
    assert not layer(torch.arange(12)[None]).requires_grad


def test_another_base():
    layer = SinusoidalPositionEmbedding(10, 16, base=100.0)
    positions = torch.tensor([[3, 30]])
    close(layer(positions), sinusoids(positions, 16, 100.0))


# learned positions


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_learned_positions_equal_nn_embedding(dtype, device):
    ours = LearnedPositionEmbedding(9, 6).to(device, dtype)
    peer = nn.Embedding(9, 6, device=device, dtype=dtype)
    peer.load_state_dict(ours.state_dict())
    positions = draw(2, 7, high=9).to(device)
    out = ours(positions)
    ref = peer(positions)
    assert out.dtype == dtype and torch.equal(out, ref)
    assert torch.equal(slopes(out, ours.weight)[0], slopes(ref, peer.weight)[0])


@pytest.mark.parametrize("std", [0.02, 0.5])
def test_learned_positions_start_small(std):
    torch.manual_seed(0)
    weight = LearnedPositionEmbedding(500, 200, std=std).weight
    assert weight.std().item() == pytest.approx(std, rel=0.01)


@pytest.mark.parametrize(
    "positions, says",
    [
        ([[0, 9]], "position 9 .* 9 positions"),
        ([[-1, 4000]], "position 4000 .* 9 positions"),
        ([[0.5, 1.0]], "float32"),
    ],
)
def test_a_position_beyond_the_table_is_named(positions, says):
    with pytest.raises(ValueError, match=says):
        LearnedPositionEmbedding(9, 6)(torch.tensor(positions))


# both kinds of positions

KINDS = [lambda n, d: SinusoidalPositionEmbedding(n, d), LearnedPositionEmbedding]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_padding_gets_nothing(kind, device):
    "Zero, wherever it stands, and no gradient."
    layer = kind(9, 6).to(device)
    positions = torch.tensor([[-1, -1, 0, 1], [0, -7, 1, 2]], device=device)
    out = layer(positions)
    assert (out[positions < 0] == 0).all() and out.isfinite().all()
    alone = layer(positions.clamp(min=0))
    assert torch.equal(out[positions >= 0], alone[positions >= 0])
    if isinstance(layer, LearnedPositionEmbedding):
        tilt = torch.arange(1.0, 9.0, device=device).reshape(2, 4, 1)
        (out * tilt).sum().backward()
        expected = [3.0 + 5, 4 + 7, 8, 0, 0, 0, 0, 0, 0]
        assert layer.weight.grad[:, 0].tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_positions_decide_and_not_places(kind):
    "The row of a position is its own, whatever stands around it."
    layer = kind(12, 8)
    whole = layer(torch.arange(12)[None])[0]
    for positions in itertools.permutations((0, 3, 11)):
        assert torch.equal(layer(torch.tensor([positions]))[0], whole[list(positions)])
    for p in range(12):  # one token at a time
        assert torch.equal(layer(torch.tensor([[p]]))[0, 0], whole[p])


@pytest.mark.parametrize("d, base", [(8, 10_000.0), (64, 100.0)])
def test_the_first_row_is_position_0(d, base):
    "Shifted by one, both of these fail."
    layer = SinusoidalPositionEmbedding(20, d, base=base)
    positions = torch.arange(20)[None]
    exact = torch.tensor(
        [[by_formula(p, c, d, base) for c in range(d)] for p in range(20)]
    )
    close(layer(positions)[0], exact, 1e-6)
    table = LearnedPositionEmbedding(20, d)
    assert torch.equal(table(positions)[0], table.weight)


@pytest.mark.nightly
@pytest.mark.skipif(SHAPES, reason="signatures are not compiled")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Embedding(9, 6, scale=2.0),
        lambda: LearnedPositionEmbedding(9, 6),
        lambda: SinusoidalPositionEmbedding(9, 6),
    ],
)
def test_compiles_in_one_graph(make):
    layer = make()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    positions = torch.tensor([[0, 4, 8, 2], [3, 3, 1, 0]])
    assert torch.equal(compiled(positions), layer(positions))
    if isinstance(layer, Embedding):
        return
    padded = torch.tensor([[-1, 4, 8, 2], [-5, -1, 1, 0]])
    assert torch.equal(compiled(padded), layer(padded))
    if isinstance(layer, SinusoidalPositionEmbedding):
        far = torch.tensor([[-1, 4, 8, 9], [3, 9999, 1, 0]])
        assert torch.equal(compiled(far), layer(far))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Embedding(9, 6),
        lambda: LearnedPositionEmbedding(9, 6),
        lambda: SinusoidalPositionEmbedding(9, 6),
    ],
)
def test_without_data_there_are_shapes(make):
    layer = make().to("meta")
    assert layer(torch.zeros(2, 5, dtype=torch.int64, device="meta")).shape == (2, 5, 6)


# what they are for


def signal(layer, d):
    return layer.pow(2).mean().sqrt().item() / 0.5**0.5


@pytest.mark.parametrize("d", [256, 512])
def test_the_ratio_of_token_to_position(d):
    torch.manual_seed(0)
    waves = sinusoids(torch.arange(100), d)
    assert waves.pow(2).mean().sqrt().item() == pytest.approx(0.5**0.5)
    ids = torch.arange(1000)[None]
    ours = signal(Embedding(1000, d, scale=d**0.5)(ids), d)
    assert ours == pytest.approx(2**0.5, rel=0.01)
    default = signal(nn.Embedding(1000, d)(ids) * d**0.5, d)
    assert default == pytest.approx((2 * d) ** 0.5, rel=0.01)
    assert round((2 * d) ** 0.5, 1) == {256: 22.6, 512: 32.0}[d]


def test_one_causal_layer_is_blind_to_the_order_before_it():
    x = randn(5, 8, dtype=torch.float64)
    at = torch.arange(5)[None]
    mask = causal_mask(at, at)[0, 0]
    waves = sinusoids(torch.arange(5), 8).double()

    def layers(x, n):
        for _ in range(n):
            x = x + attend(x, x, x, mask)[0]
        return x[-1]

    orders = [[*o, 4] for o in itertools.permutations(range(4))]
    for positions, n, kinds in ((0, 1, 1), (0, 2, 24), (waves, 1, 24)):
        rows = torch.stack([layers(x[o] + positions, n) for o in orders])
        assert len(rows.round(decimals=9).unique(dim=0)) == kinds


def test_the_score_has_four_terms():
    e = randn(7, 8, seed=1)
    p = sinusoids(torch.arange(7), 8)
    w_q = randn(8, 8, seed=2)
    w_k = randn(8, 8, seed=3)
    terms = [(a @ w_q) @ (b @ w_k).T for a, b in itertools.product((e, p), repeat=2)]
    scores = ((e + p) @ w_q) @ ((e + p) @ w_k).T
    close(sum(terms), scores)
    turned = (p @ position_shift_matrix(2, 8)) @ p.T  # relative
    assert torch.allclose(turned[1:, 1:], turned[:-1, :-1], atol=1e-5)
    assert not torch.allclose(turned, turned.T, atol=0.1)
    assert not torch.allclose(terms[3][1:, 1:], terms[3][:-1, :-1], atol=0.1)


def test_the_inputs_are_left_alone():
    positions = torch.tensor([[-1, 0, 5]])
    for layer in (SinusoidalPositionEmbedding(3, 4), LearnedPositionEmbedding(6, 4)):
        layer(positions)
        assert positions.tolist() == [[-1, 0, 5]]


def test_beyond_the_trained_positions_no_model_is_better_than_a_guess():
    rows = load_record("beyond")
    assert all(
        float(r["lowest"]) <= float(r["loss"]) <= float(r["highest"]) for r in rows
    )
    for row in rows:
        if 8 <= int(row["first"]) < 64:
            assert float(row["highest"]) < 0.7
        if int(row["first"]) >= 96:
            assert float(row["lowest"]) > 3.0


@pytest.mark.nightly
@plain_only
def test_the_experiment_runs_at_a_small_size(tmp_path):
    small = run_small("beyond", tmp_path)
    full = load_record("beyond")
    assert [list(r) for r in small] == [list(r) for r in full]
    for a, b in zip(small, full, strict=True):
        for name in ("positions", "first", "last"):
            assert a[name] == b[name]
    assert int(full[0]["seeds"]) >= 3 and full[0]["date"] > "2026"
