"""Relative and rotary positions against transformers, and by properties."""

import copy
import math
import os
import sys
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, T5Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.wav2vec2_bert import modeling_wav2vec2_bert as w2v

from conftest import load_experiment, read_rows, run_small
from helpers import plain_only
from tformer.models.mini_gpt import load_record
from tformer.nn.functional import attend, causal_mask
from tformer.nn.relative_bias import (
    ALiBi,
    ShawRelativePositions,
    T5RelativeBias,
    alibi_slopes,
    relative_positions,
    t5_bucket,
)
from tformer.nn.rope_scaling import (
    linear_scaling,
    llama3_scaling,
    make_rotary,
    ntk_scaled_base,
    yarn_scaling,
)
from tformer.nn.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    convert_rotary_layout,
    rope_frequencies,
)

quick = settings(max_examples=30, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31)
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LAYOUTS = ["half", "interleaved"]


def randn(*shape, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def at(*numbers):
    return torch.tensor([numbers])


def steps(n, first=0):
    return torch.arange(first, first + n)[None]


def close(ours, reference, tolerance=1e-5):
    "The parity of the course: relative to the largest number, at least 1."
    assert ours.shape == reference.shape and ours.dtype == reference.dtype
    worst = (ours - reference).abs().max().item()
    assert worst <= tolerance * max(1, reference.abs().max().item())


def close_with_gradients(ours, peer, *inputs):
    "Outputs and the gradients of all inputs."
    results = []
    for function in (ours, peer):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        outs = function(*leaves)
        outs = outs if isinstance(outs, (tuple, list)) else (outs,)
        loss = sum(
            (o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).reshape(o.shape)).sum()
            for o in outs
        )
        results.append((*outs, *torch.autograd.grad(loss, leaves)))
    for a, b in zip(*results, strict=False):
        close(a, b)


def by_hand(x, positions, freqs, layout):
    "RoPE as a loop over pairs of plain numbers."
    d = x.shape[-1]
    out = x.clone()
    for i, f in enumerate(freqs.tolist()):
        a, b = (i, i + d // 2) if layout == "half" else (2 * i, 2 * i + 1)
        c = torch.tensor([math.cos(p * f) for p in positions], dtype=x.dtype)
        s = torch.tensor([math.sin(p * f) for p in positions], dtype=x.dtype)
        out[..., a] = x[..., a] * c - x[..., b] * s
        out[..., b] = x[..., a] * s + x[..., b] * c
    return out


def config(d=64, base=10_000.0, length=8192, kind="default", **numbers):
    return LlamaConfig(
        hidden_size=2 * d,
        num_attention_heads=2,
        head_dim=d,
        max_position_embeddings=length,
        rope_parameters=dict(rope_theta=base, rope_type=kind, **numbers),
    )


def scaled(kind, *args, length=None, **numbers):
    "Frequencies and factor of transformers."
    return ROPE_INIT_FUNCTIONS[kind](
        config(*args, kind=kind, **numbers), seq_len=length
    )


# relative positions, Shaw


def test_relative_positions_are_key_minus_query():
    positions = torch.tensor([[3, 4], [-1, 0]])
    key_positions = at(0, 1, 2, 3, 4)
    found = relative_positions(positions, key_positions)
    assert found.shape == (2, 2, 5) and found.dtype == torch.int64
    assert found[0].tolist() == [[-3, -2, -1, 0, 1], [-4, -3, -2, -1, 0]]
    assert found[1].tolist() == [[1, 2, 3, 4, 5], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    "positions",
    [torch.arange(3), torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.int32)],
)
def test_positions_of_other_kinds_are_refused(positions):
    for call in (
        lambda: relative_positions(positions, steps(3)),
        lambda: T5RelativeBias(2)(positions, steps(3)),
        lambda: ALiBi(2)(steps(3), positions),
        lambda: RotaryEmbedding(4)(randn(1, 1, 3, 4), positions=positions),
    ):
        with pytest.raises(ValueError, match="int64"):
            call()


@pytest.mark.parametrize("far", [1, 2, 7])
@pytest.mark.parametrize("t, s, first", [(6, 6, 0), (2, 9, 7), (5, 3, 0)])
def test_shaw_keys_equal_transformers(far, t, s, first):
    part = ShawRelativePositions(8, far, std=0.1)
    q = randn(2, 3, t, 8)
    k = randn(2, 3, s, 8)
    positions = steps(t, first)

    def ours(q, table):
        part.key_table.data = table.data
        return torch.func.functional_call(
            _Bias(part), {"part.key_table": table}, (q, positions, steps(s))
        )

    def peer(q, table):
        module = SimpleNamespace(
            left_max_position_embeddings=far,
            scaling=8**-0.5,
            right_max_position_embeddings=far,
            distance_embedding=lambda rows: table[rows],
        )
        full = torch.cat([q.new_zeros(2, 3, first, 8), q], 2)
        if first:  # it counts queries from 0
            return w2v._apply_relative_key_position_encoding(module, full, k)[1][
                :, :, first:
            ]
        return w2v._apply_relative_key_position_encoding(module, q, k)[1]

    close_with_gradients(ours, peer, q, part.key_table)


class _Bias(torch.nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, *args):
        return self.part.score_bias(*args)


@pytest.mark.parametrize("far", [1, 3])
def test_shaw_equals_its_equations(far):
    "Equations 3 and 4, with a batch of positions, padding and a mask."
    part = ShawRelativePositions(4, far, std=0.1)
    q, k, v = (randn(2, 3, 5, 4, seed=i) for i in range(3))
    positions = torch.tensor([[0, 1, 2, 3, 4], [-2, -1, 0, 1, 2]])
    mask = causal_mask(positions, positions)
    out, w = attend(q, k, v, mask, part.score_bias(q, positions, positions))
    out = out + part.value_offset(w, positions, positions)
    distance = (positions[:, None, :] - positions[:, :, None]).clamp(-far, far) + far
    key = k[:, :, None] + part.key_table[distance][:, None]
    value = v[:, :, None] + part.value_table[distance][:, None]
    scores = (q[:, :, :, None] * key).sum(-1) / 2
    shares = scores.masked_fill(~mask, -math.inf).softmax(-1)
    close(out, (shares[..., None] * value).sum(-2))
    out.sum().backward()
    for table in (part.key_table, part.value_table):
        assert table.grad.isfinite().all() and table.grad.abs().max() > 0


@pytest.mark.parametrize("dtype", TYPES)
def test_shaw_keeps_the_type(dtype):
    part = ShawRelativePositions(8, 2)
    q = randn(2, 3, 5, 8, dtype=dtype)
    bias = part.score_bias(q, steps(5), steps(5))
    more = part.value_offset(bias.softmax(-1), steps(5), steps(5))
    assert bias.dtype == more.dtype == dtype and more.shape == q.shape
    exact = part.score_bias(q.double(), steps(5), steps(5))
    assert torch.allclose(bias.double(), exact, atol=2e-2)


def test_shaw_is_shift_invariant_and_has_one_row_per_clipped_distance():
    part = ShawRelativePositions(8, 3)
    assert part.key_table.shape == part.value_table.shape == (7, 8)
    q = randn(1, 2, 9, 8)
    a, b = (part.score_bias(q, steps(9, n), steps(9, n)) for n in (0, 1000))
    assert torch.equal(a, b)
    with pytest.raises(ValueError, match=r"max_distance must be .* got 0"):
        ShawRelativePositions(8, 0)


# T5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n, far", [(32, 128), (16, 64), (8, 20), (64, 1000), (4, 8)])
def test_t5_buckets_equal_transformers(causal, n, far):
    distance = torch.arange(-5000, 5001)
    ours = t5_bucket(distance, n_buckets=n, max_distance=far, causal=causal)
    assert torch.equal(
        ours, T5Attention._relative_position_bucket(distance, not causal, n, far)
    )
    assert (ours.min() == 0 and ours.max() == n - 1) or causal


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("t, s, past", [(6, 6, 0), (1, 9, 8), (40, 300, 0)])
def test_t5_bias_equals_transformers(causal, t, s, past):
    peer = T5Attention(
        T5Config(d_model=12, num_heads=3, d_kv=4, is_decoder=causal),
        has_relative_attention_bias=True,
        layer_idx=0,
    )
    ours = T5RelativeBias(3, causal=causal)
    theirs = peer.relative_attention_bias
    theirs.weight.data = randn(32, 3)
    ours.load_state_dict(theirs.state_dict())
    a = ours(steps(t, past), steps(s))
    b = peer.compute_bias(t, s, past_seen_tokens=past)
    close(a, b)
    tilt = randn(*a.shape)
    (a * tilt).sum().backward()
    (b * tilt).sum().backward()
    close(ours.weight.grad, theirs.weight.grad)


def test_t5_names_what_does_not_fit():
    with pytest.raises(ValueError, match="2 buckets hold 0 exact"):
        T5RelativeBias(2, n_buckets=2)
    with pytest.raises(ValueError, match=r"8 exact .* max_distance is 8"):
        T5RelativeBias(2, max_distance=8)
    assert T5RelativeBias(2).bfloat16()(steps(3), steps(3)).dtype == torch.bfloat16


# ALiBi


@pytest.mark.parametrize("n", [1, 2, 3, 6, 8, 12, 16, 20, 40, 112])
def test_alibi_equals_bloom(n):
    "Up to a number per row, which a softmax does not see."
    ours = ALiBi(n)(steps(7), steps(7))
    theirs = build_alibi_tensor(torch.ones(1, 7), n, torch.float32)
    theirs = theirs.reshape(1, n, 1, 7)
    lower = causal_mask(steps(7), steps(7))
    close(ours * lower, (theirs - theirs.mT) * lower)
    q, k, v = (randn(1, n, 7, 4, seed=i) for i in range(3))
    for a, b in zip(
        attend(q, k, v, lower, ours), attend(q, k, v, lower, theirs), strict=True
    ):
        close(a, b)


def test_alibi_slopes_by_hand():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    six = [2.0**-i for i in (2, 4, 6, 8, 1, 3)]
    assert alibi_slopes(6).tolist() == six
    with pytest.raises(ValueError, match=r"n_heads must be .* got 0"):
        alibi_slopes(0)


def test_alibi_pays_for_both_directions_and_follows_positions():
    bias = ALiBi(2)(at(5), torch.tensor([[3, 5, 6], [0, 1, 5]]))
    assert bias.shape == (2, 2, 1, 3)
    assert bias[0, 1, 0].tolist() == [-2 / 256, 0, -1 / 256]
    assert bias[1, 0, 0].tolist() == [-5 / 16, -4 / 16, 0]


# RoPE


@pytest.mark.parametrize("d", [2, 8, 64, 80, 128])
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_frequencies_equal_transformers(d, base):
    peer = llama.LlamaRotaryEmbedding(config(d, base))
    assert torch.equal(rope_frequencies(d, base), peer.inv_freq)


def test_the_published_wavelengths():
    for d, slowest in ((64, 47117.242780), (128, 54410.143131)):
        wave = 2 * math.pi / rope_frequencies(d).double()
        assert math.isclose(wave[0], 2 * math.pi)
        assert math.isclose(wave[-1], slowest, rel_tol=1e-6)


@pytest.mark.parametrize("d", [0, 1, 63, -2])
def test_odd_widths_are_refused(d):
    for call in (lambda: rope_frequencies(d), lambda: RotaryEmbedding(d)):
        with pytest.raises(ValueError, match=rf"d_head.*{d}\b"):
            call()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("d", [2, 6, 64])
def test_rotation_equals_a_loop_over_pairs(layout, d):
    x = randn(2, 3, 5, d)
    positions = [0, 1, 7, 100, 3]
    (ours,) = RotaryEmbedding(d, layout=layout)(x, positions=at(*positions))
    close(ours, by_hand(x, positions, rope_frequencies(d), layout), 2e-5)


@pytest.mark.parametrize("d, base", [(64, 10_000.0), (16, 500_000.0)])
def test_half_layout_equals_llama(d, base):
    "Forward and gradients, fewer key heads, positions of a batch."
    peer = llama.LlamaRotaryEmbedding(config(d, base))
    positions = torch.stack([torch.arange(9), torch.arange(4000, 4009)])
    ours = RotaryEmbedding(d, base=base)
    close_with_gradients(
        lambda q, k: ours(q, k, positions=positions),
        lambda q, k: llama.apply_rotary_pos_emb(q, k, *peer(q, positions)),
        randn(2, 4, 9, d),
        randn(2, 2, 9, d, seed=1),
    )


def test_interleaved_layout_equals_gptj():
    table = gptj.create_sinusoidal_positions(20, 8)[None, 5:14]
    sin, cos = table.chunk(2, -1)
    ours = RotaryEmbedding(8, layout="interleaved")
    close_with_gradients(
        lambda q: ours(q, positions=steps(9, 5)),
        lambda q: gptj.apply_rotary_pos_emb(q.transpose(1, 2), sin, cos).transpose(
            1, 2
        ),
        randn(2, 3, 9, 8),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotation_gradients(layout):
    rotary = RotaryEmbedding(4, layout=layout)
    x = randn(1, 2, 3, 4, dtype=torch.float64).requires_grad_()

    def turned(x):
        return rotary(x, positions=steps(3, 5))[0]

    assert torch.autograd.gradcheck(turned, (x,))
    assert torch.autograd.gradgradcheck(turned, (x,))


@quick
@given(
    seeds, st.integers(-200, 200), st.sampled_from(LAYOUTS), st.sampled_from([2, 8, 64])
)
def test_scores_do_not_see_a_shift(seed, shift, layout, d):
    q, k = (randn(1, 2, 6, d, seed=seed + i) for i in range(2))
    rotary = RotaryEmbedding(d, layout=layout)
    a, b = (rotary(q, k, positions=steps(6, n)) for n in (0, shift))
    gap = (a[0] @ a[1].mT - b[0] @ b[1].mT).abs().max()
    assert gap < 2e-4 * d**0.5
    close(b[0].norm(dim=-1), q.norm(dim=-1))


def test_each_pair_turns_and_the_direction_counts():
    q = randn(1, 1, 1, 8)
    k = randn(1, 1, 1, 8, seed=1)
    rotary = RotaryEmbedding(8)
    (a,) = rotary(q, positions=at(0))
    (b,) = rotary(q, positions=at(1))
    pairs = (a - b).unflatten(-1, (2, 4)).norm(dim=-2)
    assert (pairs > 1e-4).all() and torch.equal(a, q)
    ahead = rotary(q, positions=at(0))[0] @ rotary(k, positions=at(3))[0].mT
    behind = rotary(q, positions=at(3))[0] @ rotary(k, positions=at(0))[0].mT
    assert abs(ahead - behind) > 1e-2


@pytest.mark.parametrize("one", [0, 3])
def test_a_query_alone_is_turned_as_in_the_sequence(one):
    "What a cache needs: positions are given, not counted."
    q = randn(2, 2, 6, 8)
    rotary = RotaryEmbedding(8)
    (whole,) = rotary(q, positions=steps(6, 10))
    (alone,) = rotary(q[:, :, one : one + 1], positions=at(10 + one))
    close(alone, whole[:, :, one : one + 1], 1e-6)
    (restarted,) = rotary(q[:, :, 3:4], positions=at(0))
    assert not torch.allclose(restarted, whole[:, :, 3:4], atol=0.1)


def test_positions_of_a_batch_go_with_the_batch():
    "With as many heads as sentences, so that a slip would fit."
    q = randn(2, 2, 5, 8)
    rotary = RotaryEmbedding(8)
    positions = torch.stack([torch.arange(5), torch.arange(5) - 2])
    (both,) = rotary(q, positions=positions)
    for row in range(2):
        (alone,) = rotary(q[row : row + 1], positions=positions[row : row + 1])
        assert torch.equal(both[row : row + 1], alone)
    angle = positions[..., None] * rope_frequencies(8)
    with pytest.raises(ValueError, match=r"\(2, 5, 4\).*\(2, 2, 5, 8\)"):
        apply_rotary_emb(q, angle.cos(), angle.sin())
    per_head = apply_rotary_emb(q, angle.cos()[:, None], angle.sin()[:, None])
    close(per_head, both)


def test_a_rotary_turns_as_rotate_does():
    "Two ways to write one turn: values and gradients, scaled or not."
    positions = torch.stack([torch.arange(5), torch.arange(5) + 700])
    angle = positions[:, None, :, None].float() * rope_frequencies(8)
    for layout in LAYOUTS:
        for scale in (1.0, 0.5):
            x = randn(2, 3, 5, 8).requires_grad_()
            (short,) = RotaryEmbedding(8, layout=layout, attention_factor=scale)(
                x, positions=positions
            )
            long = apply_rotary_emb(x, scale * angle.cos(), scale * angle.sin(), layout)
            close(short, long)
            tilt = randn(2, 3, 5, 8, seed=1)
            close(
                torch.autograd.grad(short, x, tilt)[0],
                torch.autograd.grad(long, x, tilt)[0],
            )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_the_gradient_of_a_turn(layout, scale):
    "Against finite differences, also of the gradient itself."
    rotary = RotaryEmbedding(8, layout=layout, attention_factor=scale)
    positions = steps(3, 700)
    cos, sin = (x.double() for x in rotary.cos_sin(positions))
    x = randn(2, 2, 3, 8, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotary(x, cos_sin=(cos, sin)), [x])
    assert torch.autograd.gradgradcheck(lambda x: rotary(x, cos_sin=(cos, sin)), [x])
    uneven = sin * (1 + torch.arange(8))  # no rotation at all
    assert torch.autograd.gradcheck(lambda x: rotary(x, cos_sin=(cos, uneven)), [x])
    free = cos.clone().requires_grad_()  # angles that are learned
    assert torch.autograd.gradcheck(
        lambda x, free: rotary(x, cos_sin=(free, sin)), [x, free]
    )


@plain_only
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_turn_under_transforms(layout):
    "Forward mode, and one text at a time."
    rotary = RotaryEmbedding(8, layout=layout)
    positions = steps(3, 5)
    x = randn(2, 2, 3, 8)
    along = randn(2, 2, 3, 8, seed=1)
    turn = lambda x: rotary(x, positions=positions)[0]  # noqa: E731
    value, moved = torch.func.jvp(turn, (x,), (along,))
    close(value, turn(x)), close(moved, turn(along))

    def loss(x):
        return (turn(x[None]) ** 3).sum()

    by_hand = x.clone().requires_grad_()
    (turn(by_hand) ** 3).sum().backward()
    close(torch.func.vmap(torch.func.grad(loss))(x), by_hand.grad)
    _, product = torch.func.jvp(torch.func.grad(loss), (x[0],), (along[0],))
    grad = torch.autograd.functional.hvp(loss, x[0], along[0])[1]
    close(product, grad)


@pytest.mark.parametrize("t, d", [(1, 64), (5, 16), (5, 64)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_narrow_turn_is_the_wide_one_rounded_once(t, d, layout, grad):
    rotary = RotaryEmbedding(d, layout=layout)
    positions = steps(t, 900)
    x = randn(2, 3, t, d, dtype=torch.bfloat16).requires_grad_(grad)
    close(
        rotary(x, positions=positions)[0].detach(),
        rotary(x.detach().float(), positions=positions)[0].bfloat16(),
        2**-8,
    )
    if grad:
        tilt = randn(2, 3, t, d, seed=1, dtype=torch.bfloat16)
        wide = x.detach().float().requires_grad_()
        (found,) = torch.autograd.grad(rotary(x, positions=positions), x, tilt)
        (asked,) = torch.autograd.grad(
            rotary(wide, positions=positions), wide, tilt.float()
        )
        close(found, asked.bfloat16(), 2**-8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TYPES)
def test_types_are_kept_and_angles_are_float32(dtype, layout):
    rotary = RotaryEmbedding(64, layout=layout)
    x = randn(1, 2, 5, 64, dtype=dtype)
    narrow = copy.deepcopy(rotary).to(dtype)
    (turned,) = narrow(x, positions=steps(5, 4000))
    (exact,) = rotary(x.double(), positions=steps(5, 4000))
    assert turned.dtype == dtype
    assert narrow.freqs.dtype == torch.float32
    assert (
        torch.equal(turned, exact.to(dtype))
        or (turned.double() - exact).abs().max() <= 2e-3 * exact.abs().max()
    )
    if dtype == torch.bfloat16:  # no worse than rounding once
        worst = ((turned.double() - exact).abs() / exact.abs()).max()
        assert worst <= 2**-8


def test_bfloat16_is_more_exact_than_llama():
    positions = steps(64, 1000)
    x = randn(1, 4, 64, 64, dtype=torch.bfloat16)
    peer = llama.LlamaRotaryEmbedding(config(64))
    (exact,) = RotaryEmbedding(64)(x.double(), positions=positions)
    (ours,) = RotaryEmbedding(64)(x, positions=positions)
    theirs, _ = llama.apply_rotary_pos_emb(x, x, *peer(x, positions))
    errors = [(y.double() - exact).abs().mean() for y in (ours, theirs)]
    assert errors[0] <= errors[1]


def test_a_model_in_bfloat16_keeps_exact_constants():
    model = torch.nn.ModuleList([RotaryEmbedding(64), ALiBi(12)])
    model.to(torch.bfloat16).double().half()
    assert torch.equal(model[0].freqs, rope_frequencies(64))
    assert torch.equal(model[1].slopes, alibi_slopes(12))
    assert not model.state_dict()


def test_rotary_names_what_does_not_fit():
    with pytest.raises(ValueError, match="d_head 8 has 4 pairs, got 3"):
        RotaryEmbedding(8, freqs=torch.ones(3))
    with pytest.raises(ValueError, match=r"half.*'neox'"):
        RotaryEmbedding(8, layout="neox")
    with pytest.raises(ValueError, match=r"\(5, 4\).*\(1, 1, 5, 6\)"):
        apply_rotary_emb(randn(1, 1, 5, 6), randn(5, 4), randn(5, 4))
    with pytest.raises(ValueError, match=r"\(b, h, 5, 8\).*\(1, 1, 5, 6\)"):
        RotaryEmbedding(8)(randn(1, 1, 5, 6), positions=steps(5))
    for wrong in (randn(1, 1, 4, 8), randn(1, 5, 8), randn(3, 1, 5, 8)):
        for q in ((wrong,), (randn(2, 1, 5, 8), wrong)):
            with pytest.raises(ValueError, match="x must be of shape"):
                RotaryEmbedding(8)(*q, positions=steps(5).repeat(2, 1))
    with pytest.raises(ValueError, match=r"8\), got \(1, 1, 5, 16\)"):
        RotaryEmbedding(8)(
            randn(1, 1, 5, 16), cos_sin=RotaryEmbedding(16).cos_sin(steps(5))
        )
    changed = RotaryEmbedding(8)
    x = randn(1, 1, 5, 8)
    changed.layout = "interleaved"  # afterwards: taken as it is
    assert torch.equal(changed.freqs, RotaryEmbedding(8).freqs)
    close(
        changed(x, positions=steps(5))[0],
        RotaryEmbedding(8, layout="interleaved")(x, positions=steps(5))[0],
    )
    changed.bfloat16().layout = "half"
    assert torch.equal(changed.freqs, RotaryEmbedding(8).freqs)
    changed.layout = "neox"
    with pytest.raises(ValueError, match="'neox'"):
        changed(x, positions=steps(5))
    with pytest.raises(ValueError, match="'neox'"):
        apply_rotary_emb(randn(5, 8), randn(5, 4), randn(5, 4), "neox")


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: ShawRelativePositions(0, 3), "d_head .* got 0"),
        (lambda: ShawRelativePositions(8, 2.5), "max_distance .* got 2.5"),
        (lambda: ShawRelativePositions(8, True), "max_distance .* got True"),
        (lambda: ShawRelativePositions(8, 3, std=-1.0), "std .* got -1.0"),
        (lambda: T5RelativeBias(0), "n_heads .* got 0"),
        (lambda: T5RelativeBias(2, n_buckets=8.0), "n_buckets .* got 8.0"),
        (lambda: T5RelativeBias(2, max_distance="9"), "max_distance .* got '9'"),
        (lambda: t5_bucket(at(1), n_buckets=0), "n_buckets .* got 0"),
        (lambda: ALiBi(-1), "n_heads .* got -1"),
        (lambda: alibi_slopes(2.0), "n_heads .* got 2.0"),
        (lambda: RotaryEmbedding(8.0), "d_head .* got 8.0"),
        (lambda: RotaryEmbedding(7), "d_head 7 .* even, as 8"),
        (lambda: RotaryEmbedding(8, base=0.0), "base .* got 0.0"),
        (lambda: RotaryEmbedding(8, base=math.inf), "base .* got inf"),
        (
            lambda: RotaryEmbedding(8, attention_factor=math.nan),
            "attention_factor .* got nan",
        ),
        (
            lambda: RotaryEmbedding(8, attention_factor=0.0),
            "attention_factor .* got 0.0",
        ),
        (lambda: RotaryEmbedding(8, freqs=torch.ones(4, device="meta")), "on meta"),
        (lambda: rope_frequencies(4, -1.0), "base .* got -1.0"),
        (lambda: convert_rotary_layout(randn(8, 2), 2.0), "d_head .* got 2.0"),
        (lambda: linear_scaling(torch.ones(2), 0.0), "factor .* got 0.0"),
        (lambda: ntk_scaled_base(1e4, -1.0, 8), "factor .* got -1.0"),
        (lambda: ntk_scaled_base(0.0, 2.0, 8), "base .* got 0.0"),
        (lambda: llama3(factor=0.0), "factor .* got 0.0"),
        (lambda: llama3(original_max_len=0), "original_max_len .* got 0"),
        (lambda: llama3(low_freq_factor=-1.0), "low_freq_factor -1.0"),
        (lambda: llama3(high_freq_factor=1.0), "1.0 must be below .* 1.0"),
        (
            lambda: make_rotary({"head_dim": 8}),
            "config must have head_dim, got dict",
        ),
        (
            lambda: make_rotary(SimpleNamespace(head_dim=8, rope_theta=1e4)),
            "config must have rope_scaling, got SimpleNamespace",
        ),
        (
            lambda: make_rotary(LlamaConfig),
            "config must have head_dim, got the class LlamaConfig",
        ),
        (lambda: yarn(factor=0.0), "factor .* got 0.0"),
        (lambda: yarn(base=1.0), "base .* got 1.0"),
        (lambda: yarn(original_max_len=1.5), "original_max_len .* got 1.5"),
        (lambda: yarn(beta_slow=0.0), "beta_slow .* got 0.0"),
        (lambda: yarn(beta_fast=0.5), "beta_slow 1.0 .* beta_fast 0.5"),
    ],
)
def test_wrong_numbers_are_named(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def llama3(**changed):
    return llama3_scaling(
        rope_frequencies(8),
        **{
            **dict(
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_len=64,
            ),
            **changed,
        },
    )


def yarn(**changed):
    return yarn_scaling(8, **{**dict(factor=8.0, original_max_len=64), **changed})


@pytest.mark.skipif("TFORMER_SHAPES" in os.environ, reason="signatures say int")
def test_sizes_may_be_numbers_of_numpy():
    two = np.int64(2)
    eight = np.int64(8)
    assert torch.equal(alibi_slopes(two), alibi_slopes(2))
    assert torch.equal(RotaryEmbedding(eight).freqs, RotaryEmbedding(8).freqs)
    assert T5RelativeBias(two, n_buckets=eight)(steps(3), steps(3)).shape[1] == 2
    assert ShawRelativePositions(eight, two).key_table.shape == (5, 8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scale", [1.0, 1.5])
@pytest.mark.parametrize("dtype", TYPES)
def test_angles_made_once_serve_every_layer(layout, scale, dtype):
    "Bit for bit what positions give, and exact in every bit themselves."
    rotary = RotaryEmbedding(8, layout=layout, attention_factor=scale)
    positions = torch.stack([torch.arange(5), torch.arange(5) + 700])
    q = randn(2, 3, 5, 8, dtype=dtype)
    k = randn(2, 1, 5, 8, dtype=dtype)
    cos, sin = rotary.cos_sin(positions)
    angle = positions[:, None, :, None] * rope_frequencies(8)
    twice = (
        (lambda x: torch.cat([x, x], -1))
        if layout == "half"
        else (lambda x: x.repeat_interleave(2, -1))
    )
    assert torch.equal(cos, scale * twice(angle).cos())
    assert torch.equal(sin.abs(), (scale * twice(angle).sin()).abs())
    assert cos.dtype == sin.dtype == torch.float32
    assert rotary.cos_sin(positions[:1])[0].shape == (1, 1, 5, 8)
    for a, b in zip(
        rotary(q, k, cos_sin=(cos, sin)), rotary(q, k, positions=positions), strict=True
    ):
        assert torch.equal(a, b)
    for wrong in ({}, dict(positions=positions, cos_sin=(cos, sin))):
        with pytest.raises(ValueError, match="either positions or cos_sin"):
            rotary(q, **wrong)


def test_scale_multiplies_and_the_input_is_left_alone():
    x = randn(1, 2, 5, 8)
    before = x.clone()
    (plain,) = RotaryEmbedding(8)(x, positions=steps(5))
    (large,) = RotaryEmbedding(8, attention_factor=1.5)(x, positions=steps(5))
    close(large, 1.5 * plain)
    assert torch.equal(x, before)
    assert RotaryEmbedding(8)(positions=steps(5)) == ()


# layouts


@quick
@given(st.integers(1, 4), st.sampled_from([2, 4, 10]), seeds)
def test_converting_there_and_back_changes_nothing(h, d, seed):
    for shape in ((h * d, 3), (h * d,)):
        weight = randn(*shape, seed=seed)
        for to, back in (LAYOUTS, LAYOUTS[::-1]):
            there = convert_rotary_layout(weight, d, to)
            assert torch.equal(convert_rotary_layout(there, d, back), weight)
    assert torch.equal(
        convert_rotary_layout(torch.arange(8.0), 4),
        torch.tensor([0.0, 2, 1, 3, 4, 6, 5, 7]),
    )


@pytest.mark.parametrize("to", LAYOUTS)
def test_the_same_model_in_both_layouts_gives_the_same_logits(to):
    from tformer.nn.attention import SelfAttention

    other = LAYOUTS[1 - LAYOUTS.index(to)]
    x = randn(2, 7, 16)
    head = randn(16, 11, seed=1)
    logits = {}
    torch.manual_seed(0)
    parts = [
        SelfAttention(16, 2, causal=True, rotary=RotaryEmbedding(8, layout=layout))
        for layout in (other, to, to)
    ]
    for p in parts[0].parameters():
        torch.nn.init.normal_(p, std=0.3)
    state = parts[0].state_dict()
    parts[2].load_state_dict(state)  # forgotten
    for name in ("q_proj", "k_proj"):
        for kind in ("weight", "bias"):
            state[f"{name}.{kind}"] = convert_rotary_layout(
                state[f"{name}.{kind}"], 8, to
            )
    parts[1].load_state_dict(state)
    logits = [part(x) @ head for part in parts]
    close(logits[1], logits[0])
    assert (logits[2] - logits[0]).abs().max() > 1e-2


def test_layouts_of_no_whole_heads_are_refused():
    with pytest.raises(ValueError, match=r"10 rows.*d_head 4"):
        convert_rotary_layout(randn(10, 2), 4)
    with pytest.raises(ValueError, match="d_head 3 must be even"):
        convert_rotary_layout(randn(9, 2), 3)
    with pytest.raises(ValueError, match="'neox'"):
        convert_rotary_layout(randn(8, 2), 4, "neox")


# what print shows


def test_print_shows_all_that_changes_the_numbers():
    freqs = rope_frequencies(8)
    scaled = linear_scaling(freqs, 2.0)
    kinds = [
        RotaryEmbedding(8),
        RotaryEmbedding(4),
        RotaryEmbedding(8, base=100.0),
        RotaryEmbedding(8, attention_factor=1.5),
        RotaryEmbedding(8, layout="interleaved"),
        RotaryEmbedding(8, freqs=freqs),
        RotaryEmbedding(8, freqs=scaled),
        ALiBi(4),
        ALiBi(8),
        T5RelativeBias(4),
        T5RelativeBias(8),
        T5RelativeBias(4, n_buckets=16),
        T5RelativeBias(4, max_distance=64),
        T5RelativeBias(4, causal=True),
        ShawRelativePositions(8, 2),
        ShawRelativePositions(4, 2),
        ShawRelativePositions(8, 4),
    ]
    assert len({repr(part) for part in kinds}) == len(kinds)
    assert (
        repr(RotaryEmbedding(8))
        == "RotaryEmbedding(8, base=10000.0, attention_factor=1.0, layout='half')"
    )
    assert repr(T5RelativeBias(4)) == (
        "T5RelativeBias(4, n_buckets=32, causal=False, max_distance=128)"
    )
    assert (
        repr(ShawRelativePositions(8, 2)) == "ShawRelativePositions(8, max_distance=2)"
    )
    assert repr(ALiBi(4)) == "ALiBi(4)"
    assert repr(RotaryEmbedding(8, freqs=scaled)) == repr(
        RotaryEmbedding(8, freqs=scaled)
    )
    changed = RotaryEmbedding(8)
    changed.layout = "interleaved"
    assert repr(changed) == repr(RotaryEmbedding(8, layout="interleaved"))


# scaling

SIZES = [(8, 10_000.0), (64, 10_000.0), (80, 10_000.0), (128, 500_000.0)]


@pytest.mark.parametrize("d, base", SIZES)
@pytest.mark.parametrize("factor", [1.5, 4.0, 32.0])
def test_scalings_equal_transformers(d, base, factor):
    freqs = rope_frequencies(d, base)
    numbers = dict(low_freq_factor=1.0, high_freq_factor=4.0)
    pairs = [
        (linear_scaling(freqs, factor), scaled("linear", d, base, factor=factor)),
        (
            rope_frequencies(d, ntk_scaled_base(base, factor, d)),
            scaled("dynamic", d, base, 1024, length=int(1024 * factor), factor=1.0),
        ),
        (
            llama3_scaling(freqs, factor=factor, original_max_len=1024, **numbers),
            scaled(
                "llama3",
                d,
                base,
                factor=factor,
                **numbers,
                original_max_position_embeddings=1024,
            ),
        ),
    ]
    for ours, (theirs, scale) in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
        assert scale == 1.0


@pytest.mark.parametrize("d, base", SIZES)
@pytest.mark.parametrize(
    "factor, fast, slow", [(4.0, 32.0, 1.0), (16.0, 32.0, 1.0), (8.0, 16.0, 2.0)]
)
@pytest.mark.parametrize("length", [128, 4096])
def test_yarn_equals_transformers(d, base, factor, fast, slow, length):
    ours, scale = yarn_scaling(
        d, base, factor=factor, beta_fast=fast, beta_slow=slow, original_max_len=length
    )
    theirs, their_scale = scaled(
        "yarn",
        d,
        base,
        factor=factor,
        beta_fast=fast,
        beta_slow=slow,
        original_max_position_embeddings=length,
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert math.isclose(scale, their_scale)


@pytest.mark.parametrize(
    "d, base, length",
    [
        (8, 10.0, 1024),
        (64, 10.0, 1024),  # the slowest turn often: to d - 1
        (8, 10_000.0, 16),
        (64, 500_000.0, 100),  # the fastest not once: to 0
        (8, 1e9, 256),  # all of the blend between two pairs
    ],
)
def test_yarn_beyond_the_ends_equals_transformers(d, base, length):
    ours, _ = yarn_scaling(d, base, factor=8.0, original_max_len=length)
    theirs, _ = scaled(
        "yarn", d, base, factor=8.0, original_max_position_embeddings=length
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    plain = rope_frequencies(d, base)
    assert (ours <= plain).all() and (ours >= plain / 8.01).all()
    # where all turn often all stay; transformers then slows them all
    often, _ = yarn_scaling(d, 1.5, factor=8.0, original_max_len=4096)
    assert torch.equal(often, rope_frequencies(d, 1.5))


def test_yarn_in_a_rotary_equals_llama():
    numbers = dict(factor=4.0, original_max_position_embeddings=256)
    peer = llama.LlamaRotaryEmbedding(config(32, kind="yarn", **numbers))
    freqs, scale = yarn_scaling(32, factor=4.0, original_max_len=256)
    q = randn(1, 2, 9, 32)
    k = randn(1, 2, 9, 32, seed=1)
    positions = steps(9, 900)
    for a, b in zip(
        RotaryEmbedding(32, freqs=freqs, attention_factor=scale)(
            q, k, positions=positions
        ),
        llama.apply_rotary_pos_emb(q, k, *peer(q, positions)),
        strict=True,
    ):
        close(a, b)


def test_what_the_scalings_keep_and_slow():
    freqs = rope_frequencies(64)
    ntk = rope_frequencies(64, ntk_scaled_base(10_000.0, 8.0, 64))
    assert ntk[0] == freqs[0]
    assert math.isclose(freqs[-1] / ntk[-1], 8.0, rel_tol=1e-5)
    three = llama3_scaling(
        freqs,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_len=1024,
    )
    turns = 1024 * freqs / (2 * math.pi)
    assert torch.equal(three[turns > 4], freqs[turns > 4])
    assert torch.equal(three[turns < 1], freqs[turns < 1] / 8)
    assert (three.diff() < 0).all()
    assert yarn_scaling(64, factor=1.0, original_max_len=1024)[1] == 1.0
    with pytest.raises(ValueError, match=r"4\.0 must be below.* 1\.0"):
        llama3_scaling(
            freqs,
            factor=8.0,
            low_freq_factor=4.0,
            high_freq_factor=1.0,
            original_max_len=1024,
        )
    with pytest.raises(ValueError, match=r"d_head .* at least 4, got 2"):
        ntk_scaled_base(10_000.0, 8.0, 2)


# compiled, other devices, the experiment


@pytest.mark.nightly
@pytest.mark.skipif(
    "TFORMER_SHAPES" in os.environ, reason="signatures are not compiled"
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_all_parts_compile_to_one_graph(dynamic):
    q = randn(2, 4, 6, 8)
    positions = steps(6).repeat(2, 1)
    shaw = ShawRelativePositions(8, 2)
    rotary = RotaryEmbedding(8)
    neighbors = RotaryEmbedding(8, layout="interleaved")
    calls = [
        lambda q, p: rotary(q, q[:, :1], positions=p)[0],
        lambda q, p: neighbors(q, positions=p)[0],
        lambda q, p: shaw.score_bias(q, p, p),
        lambda q, p: shaw.value_offset(q @ q.mT, p, p),
        lambda q, p: T5RelativeBias.forward(t5, p, p),
        lambda q, p: ALiBi.forward(alibi, p, p),
    ]
    t5 = T5RelativeBias(4)
    alibi = ALiBi(4)
    for call in calls:
        torch.compiler.reset()
        compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=dynamic)
        for t in (6, 4):
            x = q[:, :, :t]
            p = positions[:, :t]
            close(compiled(x, p), call(x, p), 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda(dtype):
    q = randn(2, 4, 6, 8, dtype=dtype)
    positions = steps(6, 300)
    for make, call in (
        (lambda: RotaryEmbedding(8), lambda m, q, p: m(q, positions=p)[0]),
        (lambda: T5RelativeBias(4), lambda m, q, p: m(p, p)),
        (lambda: ALiBi(4), lambda m, q, p: m(p, p)),
        (lambda: ShawRelativePositions(8, 2), lambda m, q, p: m.score_bias(q, p, p)),
        (
            lambda: ShawRelativePositions(8, 2),
            lambda m, q, p: m.value_offset((q @ q.mT).softmax(-1), p, p),
        ),
    ):
        part = make()
        here = call(part, q, positions)
        there = call(part.cuda(), q.cuda(), positions.cuda())
        assert there.is_cuda and there.dtype == here.dtype
        close(there.cpu(), here, 1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.nightly
@plain_only
def test_the_experiment_runs_at_a_small_size(tmp_path):
    small = run_small("positions", tmp_path)
    learned = read_rows(tmp_path / "position_buckets.csv")
    recorded = load_record("position_buckets")
    assert [list(r) for r in learned] == [list(r) for r in recorded]
    for rows in (learned, recorded):
        assert [(r["task"], int(r["bucket"])) for r in rows] == [
            *product(("back", "latest"), range(32))
        ]
    assert {r["seeds"] for r in recorded} == {"5"}
    full = load_record("positions")
    assert [list(r) for r in small] == [list(r) for r in full]
    for a, b in zip(small, full, strict=True):
        for name in ("task", "method", "first", "last"):
            assert a[name] == b[name]
        assert (
            0 <= float(b["lowest"]) <= float(b["accuracy"]) <= float(b["highest"]) <= 1
        )
    assert int(full[0]["seeds"]) >= 5 and full[0]["date"] > "2026"


@pytest.mark.nightly
@plain_only
def test_the_experiment_on_longer_texts_is_made_by_its_script(tmp_path, monkeypatch):
    full = load_record("longer")
    cases = {tuple(row[k] for k in ("rule", "factor", "further")) for row in full}
    assert len(cases) == 20 and len(full) == 3 * 21
    for row in full:
        losses = [float(x) for name, x in row.items() if "nats_" in name]
        assert len(losses) == 12 and all(0 < x < 20 for x in losses)
        assert row["date"] > "2026" and row["torch"] and row["machine"]
    script = load_experiment("longer")
    monkeypatch.setattr(script, "ROWS", 1)
    out = tmp_path / "longer.csv"
    words = ["longer.py", "--steps", "1", "--seeds", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    script.main()
    small = read_rows(out)
    assert [list(row) for row in small] == [list(full[0])] * 20
    assert {
        tuple(row[k] for k in ("rule", "factor", "further")) for row in small
    } == cases


def test_what_lesson_5_says_of_longer_texts():
    "Its sentences hold for each of the three seeds."

    def losses(rule, factor, further, first, steps=1800):
        wanted = rule, str(factor), str(further), str(steps)
        return [
            float(row[f"nats_{first}"])
            for row in load_record("longer")
            if (row["rule"], row["factor"], row["further"], row["steps"]) == wanted
        ]

    plain = "as trained", 1, 0
    for first, low, high in ((64, 0.1, 0.2), (128, 0.1, 0.25), (256, 4, 6.5)):
        found = losses(*plain, first)
        assert len(found) == 3 and low < min(found) and max(found) < high
    for first in (512, 768):
        short = losses(*plain, first, steps=300)
        assert max(short) < min(losses(*plain, first))
    after = {
        rule: [x for first in (512, 768) for x in losses(rule, 8, 50, first)]
        for rule in ("linear", "NTK", "Llama 3", "YaRN")
    }
    assert max(after["Llama 3"]) < min(after["YaRN"]) < max(after["YaRN"]) < 0.35
    assert min(after["linear"]) > 1.5
    assert min(losses("NTK", 8, 50, 768)) > 2 * max(after["YaRN"])
    # Llama's rule is the best of all at every position, after the further steps
    for first in (0, 32, 64, 96, 128, 160, 192, 224, 256, 384, 512, 768):
        seeds = zip(
            losses("Llama 3", 8, 50, first),
            losses("as trained", 1, 50, first),
            *(losses(rule, 8, 50, first) for rule in ("linear", "NTK", "YaRN")),
            strict=True,
        )
        for scores in seeds:
            assert scores[0] == min(scores)
    # the window and the clipped slow hands repair what the held hands do not
    for first in (256, 384):
        assert max(losses("window", 1, 0, first)) < 0.17
        assert max(losses("slow clipped", 1, 0, first)) < 0.25
        assert max(losses("clipped", 1, 0, first)) < 0.25
        assert min(losses("fast clipped", 1, 0, first)) > 3.5
        assert min(losses("six held", 1, 0, first)) > 5
    assert max(losses("six held", 1, 0, 96)) < 0.16
    assert min(losses("seven held", 1, 0, 96)) > 1.5


@pytest.mark.nightly
@plain_only
@pytest.mark.parametrize("d", [16, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_narrow_types_are_trained_when_compiled(d, layout):
    rotary = RotaryEmbedding(d, layout=layout)
    positions = steps(4, 9)

    def turn(x):
        return rotary(x, positions=positions)[0]

    torch.compiler.reset()
    fast = torch.compile(turn, backend="aot_eager", fullgraph=True)
    found = []
    for way in (turn, fast):
        x = randn(1, 2, 4, d, dtype=torch.bfloat16).requires_grad_()
        y = way(x)
        y.float().pow(3).sum().backward()
        found.append((y.detach(), x.grad))
    torch.compiler.reset()
    for a, b in zip(*found, strict=False):
        close(a, b, 2**-7)


def test_learned_angles_of_a_narrow_type():
    rotary = RotaryEmbedding(64)
    cos, sin = (x.requires_grad_() for x in rotary.cos_sin(steps(4)))
    x = randn(1, 2, 4, 64, dtype=torch.bfloat16).requires_grad_()
    rotary(x, cos_sin=(cos, sin))[0].float().pow(2).sum().backward()
    assert cos.grad.abs().max() > 0 and x.grad.isfinite().all()
