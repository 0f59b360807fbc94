"""Weights of one byte are off by half a step at most."""

import copy

import pytest
import torch
from torch import nn

from helpers import close, equal_models, generator, plain_only
from models import ROWS
from tformer.inference.generation import generate
from tformer.models.gpt import GPT
from tformer.models.llama import Llama
from tformer.nn.attention import SelfAttention
from tformer.nn.quantized import Int8Linear, quantize_int8
from tformer.training.losses import chunked_cross_entropy
from tformer.training.trainer import next_token_loss
from tformer.variants.mla import LatentAttention

LLAMA = next(r for r in ROWS if r.cls is Llama)


def test_one_byte_is_off_by_half_a_step_at_most():
    for seed in range(5):
        weight = torch.randn(9, 30, generator=generator(seed)).double()
        weight[0] = 0
        x = torch.randn(4, 30, generator=generator(9)).double()
        bias = torch.randn(9, generator=generator(8)).double()
        layer = Int8Linear(weight, bias)
        assert layer.int8_weight.dtype == torch.int8
        assert layer.int8_weight.abs()[1:].amax(1).tolist() == [127] * 8
        bound = x.abs().sum(-1, keepdim=True) * (weight.abs().amax(1) / 127 / 2)
        off = (layer(x) - x @ weight.T - bias).abs()
        assert (off <= bound + 1e-12).all() and off.max() > 0
        close(Int8Linear(weight)(x) + bias, layer(x), 1e-12)


def test_in_float16_only_what_is_beyond_its_numbers_is_infinite():
    "Sums of whole numbers are 127 times as large as those of weights up to 1."
    x = torch.full((1, 128), 8.0).half()
    layer = Int8Linear(torch.ones(4, 128)).half()
    assert layer(x).dtype == torch.float16
    assert layer(x).tolist() == [[1024.0] * 4]
    assert Int8Linear(torch.ones(4, 128) * 100).half()(x).isinf().all()


def test_a_model_of_one_byte():
    model = LLAMA.make()
    before = {k: x.clone() for k, x in model.state_dict().items()}
    small = quantize_int8(model)
    ids = LLAMA.ids()
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name
    assert not any(
        isinstance(m, nn.Linear) or type(m).__name__ == "Linear"
        for m in small.modules()
    )
    off = (small(ids) - model(ids)).abs().max()
    assert 0 < off < 0.05 * model(ids).abs().max()
    assert generate(small, ids, max_new_tokens=4)
    size = [sum(x.nbytes for x in m.state_dict().values()) for m in (model, small)]
    table = model.embed.weight.nbytes
    assert size[1] - table < 0.45 * (size[0] - table)
    assert isinstance(quantize_int8(nn.Linear(3, 2)), Int8Linear)
    assert not any(p.requires_grad for p in small.parameters())


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_the_loss_in_chunks_uses_the_scales_of_the_head(bias):
    model = LLAMA.make()
    if bias:
        head = nn.Linear(*model.lm_head.weight.T.shape)
        model.lm_head = head.to(model.lm_head.weight.dtype)
    small = quantize_int8(model)
    ids = LLAMA.ids()
    expected = nn.functional.cross_entropy(
        small(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )
    close(next_token_loss(small, ids, chunk_size=3), expected, 1e-6)
    close(
        small.lm_head.dequantize(),
        small.lm_head(torch.eye(len(small.norm.weight), dtype=expected.dtype)).T
        - (small.lm_head.bias[:, None] if bias else 0),
        1e-6,
    )


@plain_only
def test_a_loss_in_chunks_refuses_whole_numbers_as_weights():
    x = torch.randn(2, 3, 4)
    weight = torch.ones(5, 4, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"weight must have a floating type.*int8"):
        chunked_cross_entropy(x, weight, torch.zeros(2, 3, dtype=torch.long))


def test_a_shared_head_stays():
    model = next(r for r in ROWS if r.cls is GPT).make()
    small = quantize_int8(model)
    assert small.lm_head.weight is small.embed.weight
    assert isinstance(small.blocks[0].attention.sublayer.o_proj, Int8Linear)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_byte_turns_its_sign_in_sixteen_bits(dtype):
    weight = torch.linspace(0.5, 2, 4000).to(dtype)[:, None]
    small = Int8Linear(weight)
    assert small.int8_weight.min() == small.int8_weight.max() == 127
    x = torch.ones(2, 1, dtype=dtype)
    assert small(x).dtype == dtype
    close = (small(x)[0].float() - weight[:, 0].float()).abs()
    assert (close <= weight[:, 0].float() / 100).all()


def test_a_layer_that_others_read_or_that_computes_otherwise_stays():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    model = nn.Sequential(
        encoder.eval(),
        Doubled(16, 16),
        nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
        nn.Linear(16, 3),
    ).eval()
    small = quantize_int8(model)
    assert [type(m).__name__ for m in small.modules()].count("Int8Linear") == 1
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        close(small[:3](x), model[:3](x))
        close(small(x), model(x), 0.05)


class Reads(nn.Module):
    "A module that multiplies by the weight of its layer, and never calls it."

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(16, 8)

    def forward(self, x):
        x = x.to(self.proj.weight.dtype)
        x = nn.functional.linear(x, self.proj.weight, self.proj.bias)
        return x + self.proj.weight.norm(dim=1)


@pytest.mark.parametrize("change", ["bfloat16", "half", "double", "float"])
@torch.no_grad()
def test_a_module_that_reads_a_weight_is_given_numbers_not_bytes(change):
    torch.manual_seed(0)
    model = getattr(Reads().eval(), change)()
    small = quantize_int8(model)
    x = torch.randn(2, 5, 16)
    for one in (small, copy.deepcopy(small)):
        assert one.proj.weight.dtype == model.proj.weight.dtype == one(x).dtype
        close(one(x), model(x), 0.03)
    small = getattr(quantize_int8(Reads()), change)()
    assert small.proj.weight.dtype == model.proj.weight.dtype == small(x).dtype
    assert small.proj.int8_weight.dtype == torch.int8
    assert not small.proj.weight.requires_grad


@torch.no_grad()
def test_a_weight_that_is_read_is_that_of_the_layer():
    small = quantize_int8(Reads().double()).proj
    x = torch.randn(3, 16, generator=generator(1)).double()
    close(nn.functional.linear(x, small.weight, small.bias), small(x))
    assert {*small.state_dict()} == {"weight", "scale", "bias"}
    assert small.state_dict()["weight"].dtype == torch.int8
    again = Int8Linear(torch.zeros(8, 16).double(), torch.zeros(8).double())
    for assign in (False, True):
        again.load_state_dict(small.state_dict(), assign=assign)
        assert torch.equal(again.weight, small.weight)
        assert torch.equal(again(x), small(x))


@plain_only
@torch.no_grad()
def test_layers_of_one_byte_and_their_readers_are_compiled_as_one_graph():
    small = quantize_int8(nn.Sequential(nn.Linear(16, 16), Reads()))
    x = torch.randn(3, 16, generator=generator(1))
    close(torch.compile(small, backend="eager", fullgraph=True)(x), small(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("row", [r for r in ROWS if r.cls], ids=lambda row: row.name)
def test_a_model_of_one_byte_is_saved_and_loaded(row, dtype, tmp_path):
    small = quantize_int8(row.make().to(dtype))
    small.save(tmp_path)
    again = row.cls.load(tmp_path)
    assert equal_models(again, small) and not again.training
    assert [type(m) for m in again.modules()] == [type(m) for m in small.modules()]
    assert not any(p.requires_grad for p in again.parameters())
    layers = [m for m in again.modules() if isinstance(m, Int8Linear)]
    assert layers and {layer.weight.dtype for layer in layers} == {dtype}
    assert torch.equal(row.run(again, row.ids()), row.run(small, row.ids()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "make",
    [
        lambda: SelfAttention(16, 2, causal=True),
        lambda: LatentAttention(16, n_heads=2, kv_rank=8, d_nope=4, d_rope=4),
    ],
    ids=["multi-head", "latent"],
)
@torch.no_grad()
def test_weights_of_attention_stay_floating_point(make, dtype):
    attention = make().eval().to(dtype)
    x = torch.randn(2, 5, 16, generator=generator(3)).to(dtype)
    _, expected = attention(x, need_weights=True)
    _, weights = quantize_int8(attention)(x, need_weights=True)
    assert weights.dtype == expected.dtype == dtype
    close(weights, expected, 0.05)


def test_bytes_for_a_layer_that_is_not_there_are_listed(tmp_path):
    small = quantize_int8(LLAMA.make())
    small.config = LLAMA.change(n_layers=1)
    small.save(tmp_path)
    with pytest.raises(ValueError, match=r"unknown: blocks\.1\..*scale"):
        Llama.load(tmp_path)


def test_only_a_model_is_quantized():
    with pytest.raises(ValueError, match="model"):
        quantize_int8("model")
