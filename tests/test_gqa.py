"""A converted model: what is refused, and what is done with it afterwards."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from helpers import draw_ids, spread
from tformer.inference.generation import generate
from tformer.models.gpt import GPT, GPTConfig, to_gpt2_name
from tformer.models.llama import Llama, LlamaConfig, Qwen3, make_gqa_factory
from tformer.models.seq2seq import Seq2Seq, Seq2SeqConfig
from tformer.nn.attention import SelfAttention
from tformer.nn.quantized import quantize_int8
from tformer.serving.engine import Engine
from tformer.serving.requests import Request
from tformer.variants.gqa import GQA_METHODS, convert_to_gqa

SIZE = dict(vocab_size=29, d_model=32, n_layers=2, n_heads=8, max_len=24)
IDS = draw_ids(4, 16, low=1, high=29, seed=0)


def gpt(**changes):
    return spread(GPT(GPTConfig(**SIZE | changes)), 0.3)


def llama(cls=Llama, **changes):
    return spread(cls(LlamaConfig(**SIZE | changes)), 0.3)


def weights(model, name):
    return model.state_dict()[f"blocks.1.attention.sublayer.{name}"]


@pytest.mark.parametrize("n", [4, 2, 1])
def test_mean_and_first_are_what_they_say(n):
    model = gpt()
    before = weights(model, "qkv_proj.weight").unflatten(0, (3, n, 8 // n, 4))
    for method, pool in (("mean", lambda x: x.mean(1)), ("first", lambda x: x[:, 0])):
        new = convert_to_gqa(model, n, method=method)
        q, k, v = weights(new, "qkv_proj.weight").split([32, 4 * n, 4 * n])
        assert torch.equal(q, before[0].flatten(0, 2))
        assert torch.allclose(k, pool(before[1]).flatten(0, 1), atol=1e-6)
        assert torch.allclose(v, pool(before[2]).flatten(0, 1), atol=1e-6)
        assert torch.equal(
            weights(new, "o_proj.weight"), weights(model, "o_proj.weight")
        )


def test_random_heads_follow_the_generator_and_have_the_old_spread():
    model = llama(d_model=128)
    first, again, other = (
        convert_to_gqa(
            model, 4, method="random", generator=torch.Generator().manual_seed(seed)
        )
        for seed in (0, 0, 1)
    )
    old, *found = (weights(m, "k_proj.weight") for m in (model, first, again, other))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert found[0].std() == pytest.approx(old.std().item(), rel=0.05)


def test_calibration_beats_guessing():
    "The aligned heads are nearer to the model on the texts that they were fit to."
    model = spread(Llama(LlamaConfig(**SIZE)), 0.3)
    with torch.no_grad():
        model.embed.weight *= torch.logspace(0, 2, 32)  # inputs of unequal size
    wanted = model(IDS)
    off = [
        (convert_to_gqa(model, 4, calibration_ids=ids)(IDS) - wanted).norm()
        for ids in (IDS, None)
    ]
    assert off[0] < off[1]


def test_nothing_random_is_used_up_and_no_hook_stays():
    model = gpt().train()
    state = torch.get_rng_state()
    convert_to_gqa(model, 2, calibration_ids=IDS)
    assert torch.equal(state, torch.get_rng_state())
    assert not any(m._forward_pre_hooks for m in model.modules())
    with pytest.raises(ValueError, match="max_len"):
        convert_to_gqa(model, 2, calibration_ids=draw_ids(1, 30, high=29))
    assert model.training
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_step_by_step_ends_with_as_many_heads():
    once = convert_to_gqa(convert_to_gqa(llama(), 4), 2)
    assert once.config.n_kv_heads == 2
    assert once(IDS).shape == (4, 16, 29)


@pytest.mark.parametrize("method", GQA_METHODS)
@pytest.mark.parametrize("make", [gpt, llama])
def test_it_saves_loads_writes_and_is_served(make, method, tmp_path):
    model = convert_to_gqa(make(), 2, method=method, calibration_ids=IDS).eval()
    model.save(tmp_path)
    loaded = type(model).load(tmp_path)
    assert torch.equal(loaded(IDS), model(IDS))
    prompt = IDS[0, :5].tolist()
    (text,) = generate(loaded, [prompt], max_new_tokens=8)
    engine = Engine(loaded, max_num_seqs=2)
    handle = engine.submit(Request(prompt, max_new_tokens=8))
    engine.run()
    assert handle.output_ids == text.ids


def test_a_folder_of_gpt2_is_converted(tmp_path):
    "GPT-2's own file layout, with matrices turned, becomes a folder of ours."
    model = gpt()
    tensors = {}
    for name, p in model.named_parameters():
        name = to_gpt2_name(name)
        tensors[name] = (p.T if p.ndim == 2 and ".c_" in name else p).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    values = dict(
        model_type="gpt2", vocab_size=29, n_embd=32, n_layer=2, n_head=8, n_positions=24
    )
    (tmp_path / "config.json").write_text(json.dumps(values), "utf-8")
    loaded = GPT.from_gpt2(tmp_path)
    converted = convert_to_gqa(loaded, 2, calibration_ids=IDS)
    converted.save(tmp_path / "ours")
    again = GPT.load(tmp_path / "ours")
    assert again.config.n_kv_heads == 2
    assert torch.equal(again(IDS), converted(IDS))
    keys = again.new_cache(batch_size=4)
    again(IDS, cache=keys)
    assert keys.layers[0].tensors[0].shape == (4, 2, 16, 4)


def custom(**how):
    def attention(layer):
        return SelfAttention(32, 8, causal=True, **how)

    return Llama(LlamaConfig(**SIZE), attention)


class NoAttention(nn.Module):
    def forward(self, x, **how):
        return x


REFUSED = {
    "no divisor": (gpt, dict(n_kv_heads=3), "8 key heads cannot form 3 groups"),
    "more heads": (gpt, dict(n_kv_heads=16), "has 8 key heads already"),
    "converted": (
        lambda: convert_to_gqa(gpt(), 2),
        dict(n_kv_heads=2),
        "has 2 key heads already",
    ),
    "zero": (gpt, dict(n_kv_heads=0), "n_kv_heads must be a whole number"),
    "text": (gpt, dict(n_kv_heads="2"), "n_kv_heads must be a whole number"),
    "method": (gpt, dict(n_kv_heads=2, method="max"), "method must be one of"),
    "norms": (lambda: llama(Qwen3), dict(n_kv_heads=2), "norms on queries and keys"),
    "encoder-decoder": (
        lambda: Seq2Seq(Seq2SeqConfig(**SIZE)),
        dict(n_kv_heads=2),
        "such as GPT or Llama, got Seq2Seq",
    ),
    "no model": (lambda: nn.Linear(2, 2), dict(n_kv_heads=2), "got Linear"),
    "other rotary": (
        lambda: custom(rotary=NoAttention()),
        dict(n_kv_heads=2),
        "turns its keys by a NoAttention",
    ),
    "other attention": (
        lambda: Llama(LlamaConfig(**SIZE), lambda i: NoAttention()),
        dict(n_kv_heads=2),
        "0 of the 2 layers",
    ),
    "quantized": (
        lambda: quantize_int8(llama()),
        dict(n_kv_heads=2),
        "has a Int8Linear",
    ),
    "not finite": (
        lambda: broken(),
        dict(n_kv_heads=2, calibration_ids=IDS),
        "are not finite",
    ),
}


def broken():
    model = gpt()
    with torch.no_grad():
        model.embed.weight[:] = float("inf")
    return model


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_sentence(case):
    make, how, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence) as error:
        convert_to_gqa(make(), **how)
    if "jaxtyping" not in type(error.value).__module__:  # types are executed
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", ["mean", "first", "random"])
def test_norms_on_queries_and_keys_allow_what_needs_no_basis(method):
    new = convert_to_gqa(llama(Qwen3), 2, method=method)
    assert new(IDS).shape == (4, 16, 29)


def test_a_failure_leaves_the_model():
    model = gpt()
    kept = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError):
        convert_to_gqa(model, 3)
    assert all(torch.equal(x, kept[n]) for n, x in model.state_dict().items())


def test_a_layer_of_another_kind_still_decodes():
    "A Llama whose attention was made by hand is converted with all its options."
    config = LlamaConfig(**SIZE, d_head=6)
    model = spread(Llama(config, make_gqa_factory(config)), 0.3)
    new = convert_to_gqa(model, 4, calibration_ids=IDS)
    cache = new.new_cache(batch_size=4)
    parts = [new(IDS[:, i : i + 4], cache=cache) for i in range(0, 16, 4)]
    assert torch.allclose(torch.cat(parts, 1), new(IDS), atol=1e-5)
