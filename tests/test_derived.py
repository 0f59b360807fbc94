"""Buffers that follow from numbers: made without memory, moved, copied."""

import copy
import io
import os
import pickle

import pytest
import torch
from torch import nn

from tformer.nn.embedding import DerivedBuffersModule, SinusoidalPositionEmbedding
from tformer.nn.relative_bias import ALiBi
from tformer.nn.rope_scaling import linear_scaling, llama3_scaling, yarn_scaling
from tformer.nn.rotary import RotaryEmbedding, rope_frequencies

POS = torch.tensor([[0, 1, 2, 5, 3], [7, -1, 0, 1, 30]])
Q = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))


def llama3():
    freqs = rope_frequencies(8, 500_000.0)
    return RotaryEmbedding(
        8,
        freqs=llama3_scaling(
            freqs,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_len=64,
        ),
    )


def yarn():
    freqs, scale = yarn_scaling(8, factor=4.0, original_max_len=64)
    return RotaryEmbedding(8, freqs=freqs, attention_factor=scale)


def turned(part, positions):
    return part(Q.to(positions.device), positions=positions)[0]


def placed(part, positions):
    return part(positions)


def biased(part, positions):
    return part(positions, positions)


KINDS = {
    "sinusoids": (lambda: SinusoidalPositionEmbedding(9, 6, base=100.0), placed),
    "rotary": (lambda: RotaryEmbedding(8, base=500.0, attention_factor=1.5), turned),
    "rotary, interleaved": (lambda: RotaryEmbedding(8, layout="interleaved"), turned),
    "rotary, linear": (
        lambda: RotaryEmbedding(8, freqs=linear_scaling(rope_frequencies(8), 3.0)),
        turned,
    ),
    "rotary, llama3": (llama3, turned),
    "rotary, yarn": (yarn, turned),
    "ALiBi": (lambda: ALiBi(3), biased),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


class Model(nn.Module):
    "The part below something that has weights."

    def __init__(self, part):
        super().__init__()
        self.part = part
        self.weight = nn.Parameter(torch.ones(2))


def on_meta(make):
    with torch.device("meta"):
        model = Model(make())
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    return model


def equal(ours, reference, use, positions=POS):
    "Buffers, their types, and what comes out, bit for bit."
    for (name, a), (other, b) in zip(
        ours.named_buffers(), reference.named_buffers(), strict=True
    ):
        assert name == other and a.dtype == b.dtype and torch.equal(a, b)
    assert torch.equal(use(ours, positions), use(reference, positions))
    assert repr(ours) == repr(reference)


def spoiled(fn):
    "What `to_empty` may find in fresh memory, made sure of."
    return lambda t, **kw: fn(t, **kw).fill_(77)


@each_kind
def test_filled_after_the_meta_device(kind, monkeypatch):
    make, use = KINDS[kind]
    model = on_meta(make)
    monkeypatch.setattr(torch, "empty_like", spoiled(torch.empty_like))
    model.to_empty(device="cpu")
    assert (model.weight == 77).all()
    equal(model.part, make(), use)
    assert not make().state_dict()


@each_kind
def test_weights_assigned_to_a_model_on_meta(kind):
    "Nothing moves the buffers then: the first use derives them."
    make, use = KINDS[kind]
    model = on_meta(make)
    model.load_state_dict({"weight": torch.zeros(2)}, assign=True)
    assert all(b.is_meta for b in model.part.buffers())
    out = use(model.part, POS)
    assert torch.equal(out, use(make(), POS))
    equal(model.part, make(), use)


@each_kind
def test_derived_in_inference_and_trained_after(kind):
    make, use = KINDS[kind]
    model = on_meta(make)
    with torch.inference_mode():
        use(model.part, POS)
    assert not any(b.is_inference() for b in model.part.buffers())


@each_kind
def test_without_values_there_are_shapes(kind):
    make, use = KINDS[kind]
    part = on_meta(make).part
    there = use(part, POS.to("meta"))
    assert there.is_meta and there.shape == use(make(), POS).shape
    assert all(b.is_meta for b in part.buffers())
    back = make().to("meta")
    assert all(b.is_meta for b in back.buffers())
    equal(back.to_empty(device="cpu"), make(), use)


@each_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types(kind, dtype):
    "Exact where angles and slopes are; a table follows its model."
    make, use = KINDS[kind]
    here = make().to(dtype)
    born = on_meta(make).part.to(dtype)
    born.to_empty(device="cpu")
    lazy = on_meta(make).part.to(dtype)
    use(lazy, POS)
    wanted = dtype if kind == "sinusoids" else torch.float32
    for part in (here, born, lazy):
        for buffer, exact in zip(part.buffers(), make().buffers(), strict=True):
            assert buffer.dtype == wanted
            assert torch.equal(buffer, exact.to(wanted))
        equal(part, here, use)


@each_kind
def test_whatever_the_default_type_is(kind):
    "Loaders set it while they build."
    make, use = KINDS[kind]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        part = make()
    finally:
        torch.set_default_dtype(before)
    equal(part, make(), use)


@each_kind
def test_copies_and_pickles(kind):
    make, use = KINDS[kind]
    for part in (make(), on_meta(make).part):
        file = io.BytesIO()
        torch.save(part, file)
        file.seek(0)
        for twin in (
            copy.deepcopy(part),
            pickle.loads(pickle.dumps(part)),
            torch.load(file, weights_only=False),
        ):
            equal(
                twin.to_empty(device="cpu") if next(twin.buffers()).is_meta else twin,
                make(),
                use,
            )


@pytest.mark.nightly
@pytest.mark.skipif(
    "TFORMER_SHAPES" in os.environ, reason="signatures are not compiled"
)
@each_kind
@pytest.mark.parametrize("born", ["here", "on meta"])
def test_compiled_in_one_graph(kind, born):
    make, use = KINDS[kind]
    part = make() if born == "here" else on_meta(make).part
    torch.compiler.reset()
    compiled = torch.compile(
        lambda positions: use(part, positions), fullgraph=True, backend="eager"
    )
    for positions in (POS, POS[:, 1:] if use is not turned else POS + 1):
        assert torch.equal(compiled(positions), use(make(), positions))


def test_values_that_were_replaced_stay():
    "Only what left the meta device is derived again."
    part = SinusoidalPositionEmbedding(4, 6)
    part.table.copy_(torch.arange(24.0).reshape(4, 6))
    assert torch.equal(part.double().table, torch.arange(24.0).double().reshape(4, 6))
    bias = ALiBi(2)
    bias.slopes.fill_(0.3)
    assert (bias.bfloat16().slopes == torch.tensor(0.3)).all()


def test_a_class_of_ones_own():
    class Counted(DerivedBuffersModule):
        def __init__(self, n):
            super().__init__()
            self.n = n
            self.reset_buffers()

        def compute_buffers(self, device):
            return {
                "count": torch.arange(self.n, device=device),
                "share": torch.ones(2, device="cpu") / 2,
            }

    with torch.device("meta"):
        part = Counted(3)
    x = torch.zeros(1)
    assert part.get_buffer_for("count", x.to("meta")).is_meta
    assert part.get_buffer_for("count", x).tolist() == [0, 1, 2]
    assert part.share.tolist() == [0.5, 0.5] and not part.state_dict()
    with pytest.raises(NotImplementedError):
        DerivedBuffersModule().reset_buffers()


@pytest.mark.gpu
@each_kind
def test_on_cuda(kind):
    make, use = KINDS[kind]
    with torch.device("cuda"):
        born = make()
    lazy = on_meta(make).part
    use(lazy, POS.cuda())
    filled = on_meta(make).part.to_empty(device="cuda")
    for part in (born, lazy, filled):
        assert all(b.is_cuda for b in part.buffers())
        equal(part, make().cuda(), use, POS.cuda())
