"""Contracts that all parts of chapters 04–07 keep, whatever they compute.

Device, type, `state_dict`, compilation, causality, equal paths, no memory.
"""

import math
import shutil

import pytest
import torch
from torch import nn

import helpers
import tformer.nn.attention
import tformer.nn.attention_backends
from helpers import by_day, close, generator
from tformer.models import mini_gpt
from tformer.nn.attention import CrossAttention, SelfAttention
from tformer.nn.attention_backends import (
    eager_attend,
    fused_attend,
    online_softmax_attend,
)
from tformer.nn.embedding import (
    Embedding,
    LearnedPositionEmbedding,
    SinusoidalPositionEmbedding,
)
from tformer.nn.feed_forward import FeedForward, GatedFeedForward
from tformer.nn.layers import Dropout, Linear, PostNorm, PreNorm
from tformer.nn.norms import LayerNorm, RMSNorm
from tformer.nn.relative_bias import ALiBi, ShawRelativePositions, T5RelativeBias
from tformer.nn.rotary import RotaryEmbedding

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16]
B = 2
T = 7
D = 16
H = 4
each_device = pytest.mark.parametrize("device", DEVICES)


def name_of_dtype(dtype):
    return str(dtype).removeprefix("torch.")


each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name_of_dtype)


def randn(*shape, seed=0, device="cpu", dtype=torch.float32):
    "Drawn on the CPU, so that all devices get the same numbers."
    return helpers.randn(*shape, seed=seed).to(device, dtype)


def some_positions(device="cpu", t=T):
    return torch.arange(t, device=device)[None]


def seeded(make, seed=0):
    "A built part with weights away from 0, biases too, norms away from 1."
    torch.manual_seed(seed)
    part = make()
    for i, p in enumerate(part.parameters()):
        rest = 1.3 if p.ndim == 1 and p.mean() > 0.9 else 0.0
        p.data = rest + 0.1 * randn(*p.shape, seed=100 * seed + i)
    return part


def mha(**options):
    return lambda: SelfAttention(D, H, **options)


def cross(**options):
    return lambda: CrossAttention(D, H, **options)


def with_rotary(**options):
    return lambda: SelfAttention(
        D, H, causal=True, rotary=RotaryEmbedding(D // H), **options
    )


def with_norms(**options):
    return lambda: SelfAttention(
        D,
        H,
        causal=True,
        rotary=RotaryEmbedding(D // H),
        n_kv_heads=2,
        bias=False,
        q_norm=RMSNorm(D // H),
        k_norm=RMSNorm(D // H),
        **options,
    )


def with_bias(bias, **options):
    return lambda: SelfAttention(D, H, causal=True, score_bias=bias(), **options)


def heads(x):
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def on_x(part, x):
    return part(x)


def on_ids(part, x):
    return part(torch.tensor([[3, 1, 4, 1, 5, 9, 2]] * B, device=x.device))


def on_positions(part, x):
    return part(some_positions(x.device))


def on_padded_positions(part, x):
    return part(some_positions(x.device) - 2)


def on_two_positions(part, x):
    return part(some_positions(x.device), some_positions(x.device))


def on_q_and_k(part, x):
    return part(heads(x), heads(2 * x), positions=some_positions(x.device))


def on_angles(part, x):
    return part(heads(x), heads(2 * x), cos_sin=part.cos_sin(some_positions(x.device)))


def on_scores(part, x):
    at = some_positions(x.device)
    bias = part.score_bias(heads(x), at, at)
    return bias, part.value_offset(bias.softmax(-1), at, at)


def with_positions(part, x):
    positions = some_positions(x.device).repeat(B, 1)
    positions[1] -= 3  # a row that is padded on the left
    return part(x, positions=positions)


def with_memory(part, x):
    return part(x, encoder_hidden_states=x.flip(1)[:, :5])


def with_padded_memory(part, x):
    positions = some_positions(x.device, 5).repeat(B, 1)
    positions[1] -= 3
    return part(x, encoder_hidden_states=x.flip(1)[:, :5], encoder_positions=positions)


def with_cached_encoder_output(part, x):
    cache = part.new_cache(len(x))
    memory = x.flip(1)[:, :5]
    first = part(x[:, :4], encoder_hidden_states=memory, cache=cache)
    return torch.cat([first, part(x[:, 4:], cache=cache)], 1)


def with_weights(part, x):
    return part(x, need_weights=True)


def with_cache(part, x):
    cache = part.new_cache(len(x))
    first = part(x[:, :4], cache=cache)
    return torch.cat([first, part(x[:, 4:], cache=cache)], 1)


def with_padded_cache(part, x):
    positions = some_positions(x.device, 4).repeat(B, 1)
    positions[1] -= 2
    cache = part.new_cache(len(x))
    first = part(x[:, :4], positions=positions, cache=cache)
    return torch.cat(
        [first, *(part(y, cache=cache) for y in x[:, 4:].split((1, 2), 1))], 1
    )


PARTS = {
    "Embedding": (lambda: Embedding(11, D, scale=3.0), on_ids),
    "SinusoidalPositionEmbedding": (
        lambda: SinusoidalPositionEmbedding(12, D),
        on_positions,
    ),
    "SinusoidalPositionEmbedding, beyond": (
        lambda: SinusoidalPositionEmbedding(3, D),
        on_padded_positions,
    ),
    "LearnedPositionEmbedding": (lambda: LearnedPositionEmbedding(12, D), on_positions),
    "LearnedPositionEmbedding, padded": (
        lambda: LearnedPositionEmbedding(12, D),
        on_padded_positions,
    ),
    "ShawRelativePositions": (lambda: ShawRelativePositions(D // H, 3), on_scores),
    "T5RelativeBias": (lambda: T5RelativeBias(H), on_two_positions),
    "ALiBi": (lambda: ALiBi(H), on_two_positions),
    "RotaryEmbedding": (lambda: RotaryEmbedding(D // H), on_q_and_k),
    "Rotary, interleaved": (
        lambda: RotaryEmbedding(D // H, layout="interleaved"),
        on_q_and_k,
    ),
    "Rotary, ready angles": (lambda: RotaryEmbedding(D // H), on_angles),
    "Linear": (lambda: Linear(D, 5), on_x),
    "LayerNorm": (lambda: LayerNorm(D), on_x),
    "RMSNorm": (lambda: RMSNorm(D), on_x),
    "Dropout": (lambda: Dropout(0.0), on_x),
    "FeedForward": (lambda: FeedForward(D, 40), on_x),
    "FeedForward, gelu_tanh": (
        lambda: FeedForward(D, 40, activation="gelu_tanh"),
        on_x,
    ),
    "GatedFeedForward": (lambda: GatedFeedForward(D, 24), on_x),
    "PreNorm": (lambda: PreNorm(RMSNorm(D), GatedFeedForward(D, 24)), on_x),
    "PostNorm": (lambda: PostNorm(LayerNorm(D), mha()()), on_x),
    "attention": (mha(), on_x),
    "attention, causal": (mha(causal=True), on_x),
    "attention, explicit": (mha(causal=True, fused=False), on_x),
    "attention, weights": (mha(causal=True), with_weights),
    "attention, packed": (mha(causal=True, fused_qkv=True), on_x),
    "attention, widths": (mha(d_head=6, d_v=3, bias=False), on_x),
    "attention, shared": (mha(causal=True, n_kv_heads=2), on_x),
    "attention, shared, explicit": (mha(causal=True, n_kv_heads=1, fused=False), on_x),
    "attention, normed": (with_norms(), on_x),
    "attention, normed, packed": (with_norms(fused_qkv=True), with_cache),
    "attention, memory": (cross(), with_memory),
    "attention, memory, explicit": (cross(fused=False), with_memory),
    "attention, memory, padded": (cross(), with_padded_memory),
    "attention, memory, kept": (cross(d_head=6, d_v=3), with_cached_encoder_output),
    "attention, memory, weights": (
        cross(bias=False),
        lambda part, x: part(x, encoder_hidden_states=x[:, :5], need_weights=True),
    ),
    "attention, rotary": (with_rotary(), on_x),
    "attention, ALiBi": (with_bias(lambda: ALiBi(H)), on_x),
    "attention, T5": (with_bias(lambda: T5RelativeBias(H)), on_x),
    "attention, padded": (with_rotary(), with_positions),
    "attention, cached": (with_rotary(), with_cache),
    "attention, cached, padded": (with_rotary(), with_padded_cache),
    "attention, cached, ALiBi": (with_bias(lambda: ALiBi(H)), with_padded_cache),
}
each_part = pytest.mark.parametrize("name", PARTS)


def results(out):
    return out if isinstance(out, tuple) else (out,)


def loss(out):
    "Not constant in any of the outputs."
    return sum(
        (x.float() * torch.linspace(-1, 1, x.numel()).view(x.shape).to(x.device)).sum()
        for x in results(out)
    )


def run(part, use, x):
    "Outputs, and the gradients of x and all parameters, by name."
    x = x.clone().requires_grad_()
    part.zero_grad()
    out = use(part, x)
    if loss(out).requires_grad:
        loss(out).backward()
    grads = {n: p.grad for n, p in part.named_parameters()}
    return results(out), {**grads, "x": x.grad}


# device, type, state_dict


@each_device
@each_dtype
@each_part
def test_device_and_type_are_kept_and_all_is_finite(name, device, dtype):
    make, use = PARTS[name]
    part = seeded(make).to(device, dtype)
    x = randn(B, T, D, device=device, dtype=dtype)
    out, grads = run(part, use, x)
    for y in out:
        wide = name == "ALiBi"  # slopes are exact in every type
        assert y.dtype == (torch.float32 if wide else dtype)
        assert y.device.type == device and y.isfinite().all()
    uses_x = use not in (on_ids, on_positions, on_padded_positions, on_two_positions)
    assert (grads.pop("x") is not None) == uses_x
    for key, grad in grads.items():
        assert grad is not None, f"{key} gets no gradient"
        assert grad.dtype == dtype and grad.device.type == device
        assert grad.isfinite().all()
    assert any(g.any() for g in grads.values()) or not grads


@each_part
def test_bfloat16_is_near_float32(name):
    "Not merely finite: the same numbers, up to rounding."
    make, use = PARTS[name]
    x = randn(B, T, D).bfloat16()
    exact = results(use(seeded(make).bfloat16().float(), x.float()))
    for a, b in zip(results(use(seeded(make).bfloat16(), x)), exact, strict=True):
        close(a.float(), b, 2e-2)


@each_part
def test_the_state_comes_back(name):
    make, use = PARTS[name]
    old = seeded(make)
    new = seeded(make, seed=1)
    x = randn(B, T, D)
    state = {k: v.clone() for k, v in old.state_dict().items()}
    assert set(state) == {n for n, _ in old.named_parameters()}
    new.load_state_dict(state, strict=True)
    for a, b in zip(results(use(old, x)), results(use(new, x)), strict=True):
        assert torch.equal(a, b)


@each_device
@each_dtype
@each_part
def test_no_module_keeps_anything(name, device, dtype):
    "No attribute, buffer or hook is new or changed after a forward."
    make, use = PARTS[name]
    part = seeded(make).to(device, dtype)

    def described(value):
        if isinstance(value, torch.Tensor):
            return value.dtype, value.device, value.tolist()
        if isinstance(value, dict):
            return {key: described(item) for key, item in value.items()}
        return repr(value)

    def kept():
        return [
            (where, key, type(value), described(value))
            for where, module in part.named_modules()
            for key, value in sorted(vars(module).items())
            if key != "_modules"
        ]

    for training in (True, False):
        part.train(training)
        before = kept()
        with torch.no_grad():
            use(part, randn(B, T, D, device=device, dtype=dtype))
        assert kept() == before


# torch.compile


def agree_compiled(name, backend):
    make, use = PARTS[name]
    part = seeded(make)
    x = randn(B, T, D)
    out, grads = run(part, use, x)
    torch._dynamo.reset()
    if use is on_scores:  # two methods, and no forward
        fast = torch.compile(use, fullgraph=True, backend=backend)
    else:
        whole_part = torch.compile(part, fullgraph=True, backend=backend)

        def fast(part, x):
            return use(whole_part, x)

    faster, slopes = run(part, fast, x)
    for a, b in zip(faster, out, strict=True):
        close(a, b)
    for key, grad in grads.items():
        assert (grad is None) == (slopes[key] is None)
        if grad is not None:
            close(slopes[key], grad)


@pytest.mark.nightly
@pytest.mark.parametrize("name", PARTS)
def test_compiled_in_one_graph_equals_eager(name):
    agree_compiled(name, "aot_eager")


@pytest.mark.nightly
@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")),
    reason="no C++ compiler on this machine",
)
@pytest.mark.parametrize("name", ["RMSNorm", "attention, rotary"])
def test_compiled_to_machine_code_equals_eager(name):
    agree_compiled(name, "inductor")


# causality (DESIGN, section 5)


class TourAttention(mini_gpt.MiniAttention):
    "The tour's: explicit, and without positions or cache."

    def __init__(self):
        super().__init__(D, H)


def whole(layer, x):
    return layer(x)


def placed(layer, x):
    return layer(x, positions=some_positions(x.device, x.shape[1]))


def weighed(layer, x):
    return layer(x, need_weights=True)[0]


def in_chunks(*sizes):
    def chunks(layer, x):
        cache = layer.new_cache(len(x))
        return torch.cat([layer(part, cache=cache) for part in x.split(sizes, 1)], 1)

    chunks.__name__ = f"cached {sizes}"
    return chunks


def padded_in_chunks(layer, x):
    "As ``padded``, and the rest token by token from a cache."
    filler = 50 * torch.ones_like(x[:, :2])
    positions = some_positions(x.device, 5) - 2
    cache = layer.new_cache(len(x))
    parts = [
        layer(torch.cat([filler, x[:, :3]], 1), positions=positions, cache=cache)[:, 2:]
    ]
    return torch.cat(
        parts + [layer(part, cache=cache) for part in x[:, 3:].split(1, 1)], 1
    )


def padded(layer, x):
    "Behind two places of padding that hold large numbers."
    filler = 50 * torch.ones_like(x[:, :2])
    positions = some_positions(x.device, x.shape[1] + 2) - 2
    return layer(torch.cat([filler, x], 1), positions=positions)[:, 2:]


CAUSAL = {
    "explicit": mha(causal=True, fused=False),
    "fused": mha(causal=True),
    "packed": mha(causal=True, fused_qkv=True),
    "packed, explicit": mha(causal=True, fused_qkv=True, fused=False),
    "rotary": with_rotary(),
    "rotary, packed": with_rotary(fused_qkv=True),
    "rotary, explicit": with_rotary(fused=False),
    "ALiBi": with_bias(lambda: ALiBi(H)),
    "ALiBi, explicit": with_bias(lambda: ALiBi(H), fused=False),
    "shared": mha(causal=True, n_kv_heads=2),
    "normed": with_norms(),
    "normed, packed, explicit": with_norms(fused_qkv=True, fused=False),
    "T5": with_bias(lambda: T5RelativeBias(H, causal=True)),
    "T5, both sides, explicit": with_bias(lambda: T5RelativeBias(H), fused=False),
}
WAYS = [
    whole,
    placed,
    weighed,
    padded,
    padded_in_chunks,
    in_chunks(1, 1, 1, 1, 1, 1, 1),
    in_chunks(3, 4),
    in_chunks(6, 1),
]


def is_causal(layer, way, dtype, exact, device="cpu"):
    "Change what comes after each place; nothing up to it may move."
    x = randn(B, T, D, seed=1, device=device, dtype=dtype)
    with torch.no_grad():
        before = way(layer, x)
    assert before.isfinite().all()
    for n in range(1, T):
        y = x.clone()
        y[:, n:] = 8 * randn(B, T - n, D, seed=n, device=device, dtype=dtype)
        with torch.no_grad():
            after = way(layer, y)
        assert not torch.equal(before[:, n:], after[:, n:])
        if exact:
            assert torch.equal(before[:, :n], after[:, :n]), f"from {n} on"
        else:
            close(after[:, :n], before[:, :n], 4 * torch.finfo(dtype).eps)


@each_device
@pytest.mark.parametrize("dtype", by_day(DTYPES, torch.float32), ids=name_of_dtype)
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("kind", CAUSAL)
def test_the_future_does_not_move_the_past(kind, way, dtype, device):
    layer = seeded(CAUSAL[kind]).to(device, dtype).eval()
    exact = device == "cpu" and ("explicit" in kind or way is weighed)
    is_causal(layer, way, dtype, exact, device)


@each_dtype
def test_the_tour_does_not_look_ahead(dtype):
    is_causal(seeded(TourAttention).to(dtype), whole, dtype, exact=True)


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("kind", CAUSAL)
def test_no_gradient_comes_from_the_future(kind, way):
    "Exactly none: the derivative says it for all changes at once."
    layer = seeded(CAUSAL[kind]).eval()
    for n in (1, 3, T - 1):
        x = randn(B, T, D).requires_grad_()
        (grad,) = torch.autograd.grad(way(layer, x)[:, :n].sum(), x)
        assert (grad[:, n:] == 0).all() and (grad[:, :n] != 0).any()


def off_by_one(positions, key_positions):
    return (key_positions[:, None, :] <= positions[:, :, None] + 1)[:, None]


def flag_off_by_one(mask, causal, t, s, device):
    lower = torch.ones(1, 1, t, s, dtype=torch.bool, device=device).tril(1)
    return mask if not causal else lower if mask is None else mask & lower


class LeakyView(nn.Module):
    "Heads cut by a view instead of a transpose: places mix."

    def forward(self, x):
        q = x.view(B, H, T, -1)
        out, _ = eager_attend(q, q, q, causal=True)
        return out.transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("dtype", by_day(DTYPES, torch.float32), ids=name_of_dtype)
@pytest.mark.parametrize(
    "way",
    [placed, weighed, padded, padded_in_chunks, in_chunks(3, 4)],
    ids=lambda w: w.__name__,
)
@pytest.mark.parametrize(
    "kind", by_day(CAUSAL, "explicit", "fused", "rotary, packed", "T5")
)
def test_a_mask_off_by_one_is_found(kind, way, dtype, monkeypatch):
    "The contract's own check: it must fail where it should."
    monkeypatch.setattr(tformer.nn.attention, "causal_mask", off_by_one)
    monkeypatch.setattr(
        tformer.nn.attention_backends, "add_causal_mask", flag_off_by_one
    )
    layer = seeded(CAUSAL[kind]).to(dtype).eval()
    with pytest.raises(AssertionError, match=r"."):
        is_causal(layer, way, dtype, exact=False)


@pytest.mark.parametrize(
    "make",
    [
        mha(),
        mha(fused=False),
        mha(fused_qkv=True),
        LeakyView,
        lambda: mini_gpt.MiniAttention(D, H, causal=False),
    ],
)
def test_layers_that_see_the_future_are_found(make):
    with pytest.raises(AssertionError):
        is_causal(seeded(make), whole, torch.float32, exact=False)


# explicit = fused = packed


def three_paths(score_bias=None, causal=False, rotary=None):
    "The same weights in an explicit, a fused and a packed layer."
    options = dict(causal=causal, score_bias=score_bias, rotary=rotary)
    explicit = seeded(mha(fused=False, **options))
    fused = mha(**options)()
    packed = mha(fused_qkv=True, **options)()
    state = explicit.state_dict()
    fused.load_state_dict(state)
    for end in ("weight", "bias"):
        state[f"qkv_proj.{end}"] = torch.cat(
            [state.pop(f"{x}_proj.{end}") for x in "qkv"]
        )
    packed.load_state_dict(state)
    return explicit, fused, packed


def lower(*shape):
    return torch.ones(*shape).tril().bool()


def a_mask(name):
    "Some masks, and which (row, query) they leave with nothing."
    some = torch.rand(B, 1, T, T, generator=generator()) < 0.6
    some[..., 0] = True
    empty = some.clone()
    empty[0, :, 2] = False
    empty[1, :, 5] = False
    return {
        "none": None,
        "lower": lower(1, 1, T, T),
        "rows": some,
        "heads": some ^ torch.eye(H).bool()[:, :1, None],
        "empty": empty,
        "all empty": torch.zeros(1, 1, T, T).bool(),
    }[name]


BIASES = {
    "no bias": lambda: None,
    "ALiBi": lambda: ALiBi(H),
    "T5": lambda: T5RelativeBias(H),
}


@pytest.mark.parametrize(
    "mask", ["none", "lower", "rows", "heads", "empty", "all empty"]
)
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("positions", ["default", "padded"])
def test_all_paths_agree(mask, bias, causal, positions):
    paths = three_paths(BIASES[bias](), causal)
    allowed = a_mask(mask)
    options = {}
    if positions == "padded":
        options["positions"] = torch.stack(
            [torch.arange(T), torch.tensor([-1, -1, 0, 1, -1, 2, 3])]
        )
    all_out = []
    all_grads = []
    for layer in paths:
        out, grads = run(
            layer, lambda p, x: p(x, mask=allowed, **options), randn(B, T, D)
        )
        for end in ("weight", "bias"):
            if f"qkv_proj.{end}" not in grads:
                grads[f"qkv_proj.{end}"] = torch.cat(
                    [grads.pop(f"{x}_proj.{end}") for x in "qkv"]
                )
        all_out.append(out[0]), all_grads.append(grads)
    for out, grads in zip(all_out[1:], all_grads[1:], strict=False):
        close(out, all_out[0])
        assert grads.keys() == all_grads[0].keys()
        for key, grad in grads.items():
            close(grad, all_grads[0][key])
    if mask == "all empty":
        for layer, out in zip(paths, all_out, strict=True):
            assert torch.equal(out, layer.o_proj.bias.expand_as(out))
    if mask == "empty" and positions == "default":
        for layer, out in zip(paths, all_out, strict=True):
            for row, query in ((0, 2), (1, 5)):
                assert torch.equal(out[row, query], layer.o_proj.bias)


@each_device
@each_dtype
@pytest.mark.parametrize("kind", ["mask", "bias", "both"])
def test_empty_rows_are_zero_on_every_path(kind, dtype, device):
    q, k, v = (
        randn(B, H, T, 8, seed=i, device=device, dtype=dtype).requires_grad_()
        for i in range(3)
    )
    mask = bias = None
    if kind != "bias":
        mask = a_mask("empty").to(device)
    if kind != "mask":
        bias = randn(B, H, T, T, device=device).masked_fill(
            ~a_mask("empty").to(device), -math.inf
        )
    paths = [eager_attend(q, k, v, mask, bias)[0], fused_attend(q, k, v, mask, bias)]
    if bias is None:
        paths.append(online_softmax_attend(q, k, v, mask, chunk_size=3))
    for out in paths:
        assert out.dtype == dtype and out.isfinite().all()
        assert (out[0, :, 2] == 0).all() and (out[1, :, 5] == 0).all()
        assert (out[0, :, 3] != 0).any()
        close(out, paths[0], 1e-5 if dtype == torch.float32 else 2e-2)
        for grad in torch.autograd.grad(
            out.float().pow(2).sum(), (q, k, v), retain_graph=True
        ):
            assert grad.isfinite().all()


@pytest.mark.parametrize("kv", [1, 2, 4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_shared_key_heads_agree_on_both_paths(kv, causal, masked):
    q = randn(B, H, T, 8)
    k, v = (randn(B, kv, T, 8, seed=i) for i in (1, 2))
    mask = a_mask("rows") if masked else None
    ours = eager_attend(q, k, v, mask, causal=causal)[0]
    close(fused_attend(q, k, v, mask, causal=causal), ours)
    of = torch.arange(H) // (H // kv)  # which key head each query head has
    long = eager_attend(q, k[:, of], v[:, of], mask, causal=causal)
    close(ours, long[0])
