"""Latent attention: against DeepSeek's models in transformers, and all that decodes."""

import copy

import pytest
import torch

from helpers import close, draw_ids, equal_to_peer, randn, spread

transformers = pytest.importorskip("transformers")
from transformers import (  # noqa: E402
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)

from tformer import check  # noqa: E402
from tformer.inference.generation import generate  # noqa: E402
from tformer.models.base import load_weights  # noqa: E402
from tformer.models.llama import Llama, LlamaConfig  # noqa: E402
from tformer.nn.attention import SelfAttention  # noqa: E402
from tformer.nn.kv_cache import CrossAttentionCache, KVCache  # noqa: E402
from tformer.nn.paged_cache import BlockPool, new_paged_cache  # noqa: E402
from tformer.nn.quantized import quantize_int8  # noqa: E402
from tformer.nn.rotary import RotaryEmbedding, convert_rotary_layout  # noqa: E402
from tformer.nn.static_cache import new_static_cache  # noqa: E402
from tformer.variants.mla import (  # noqa: E402
    DEEPSEEK_NAMES,
    LatentAttention,
    make_mla_factory,
)

VOCAB = 47
SIZES = dict(kv_rank=12, d_nope=10, d_rope=8, d_v=6)
LAYER = dict(d_model=32, n_heads=4, **SIZES)
YARN = dict(
    factor=4.0,
    original_max_len=16,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
)
CASES = {
    "compressed queries": dict(q_rank=14),
    "whole queries": {},
    "YaRN": dict(q_rank=14, yarn=YARN),
    "YaRN, two factors": dict(yarn=YARN | dict(mscale=0.7, mscale_all_dim=0.4)),
}
FAMILIES = {
    "V2": (DeepseekV2ForCausalLM, DeepseekV2Config),
    "V3": (DeepseekV3ForCausalLM, DeepseekV3Config),
}
NAMES = {
    "blocks": "model.layers",
    "embed": "model.embed_tokens",
    "attention.norm": "input_layernorm",
    "attention.sublayer": "self_attn",
    "feed_forward.norm": "post_attention_layernorm",
    "feed_forward.sublayer": "mlp",
}
NAMES |= {
    f"self_attn.{ours}.": f"self_attn.{theirs}."
    for theirs, ours in DEEPSEEK_NAMES.items()
}
ORDERS = "expanded", "absorbed", "auto"
every_pair = pytest.mark.parametrize("family", FAMILIES)
every_case = pytest.mark.parametrize("case", CASES)


def their_name(name):
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return f"model.{name}" if name.startswith("norm") else name


def rope_of(yarn):
    "The rotary positions as a configuration of transformers has them."
    if yarn is None:
        return dict(rope_type="default", rope_theta=10_000.0)
    rope = dict(yarn, rope_type="yarn", rope_theta=10_000.0)
    rope["original_max_position_embeddings"] = rope.pop("original_max_len")
    return rope


def pair(family="V3", q_rank=None, yarn=None, **more):
    "A model of ours and one of transformers, all of its layers dense."
    cls, config_cls = FAMILIES[family]
    theirs = spread(
        cls(
            config_cls(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=40,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=4,
                kv_lora_rank=12,
                q_lora_rank=q_rank,
                qk_nope_head_dim=10,
                qk_rope_head_dim=8,
                v_head_dim=6,
                first_k_dense_replace=2,
                max_position_embeddings=64,
                rms_norm_eps=1e-6,
                tie_word_embeddings=False,
                rope_parameters=rope_of(yarn),
                **more,
            )
        ),
        0.2,
    )
    config = LlamaConfig(
        vocab_size=VOCAB,
        d_model=32,
        n_layers=2,
        n_heads=4,
        d_ff=40,
        max_len=64,
        eps=1e-6,
    )
    ours = Llama(config, make_mla_factory(config, **SIZES, q_rank=q_rank, yarn=yarn))
    tensors = theirs.state_dict()
    load_weights(ours, {name: tensors[their_name(name)] for name in ours.state_dict()})
    return ours.eval(), theirs


def set_order(model, order):
    for module in model.modules():
        if isinstance(module, LatentAttention):
            module.order = order
    return model


@pytest.mark.parametrize("d_v", [1, 6, 18, 40])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("t", [7, 130])
def test_values_of_any_width(d_v, order, t):
    "Those of many queries are padded to the width of the keys, and cut again."
    torch.manual_seed(2)
    layer = LatentAttention(**LAYER | dict(d_v=d_v), order=order).double()
    x = randn(2, t, 32).double()
    fused = layer(x)
    layer.fused = False
    close(fused, layer(x))


@every_pair
@every_case
@pytest.mark.parametrize("order", ORDERS)
def test_equal_to_deepseek_in_logits_and_gradients(family, case, order):
    ours, theirs = pair(family, **CASES[case])
    set_order(ours, order)
    equal_to_peer(ours, theirs, draw_ids(2, 40, high=VOCAB), their_name)


@every_pair
@every_case
def test_cached_decoding_equals_deepseek(family, case):
    ours, theirs = pair(family, **CASES[case])
    ids = draw_ids(2, 20, high=VOCAB)
    cache = ours.new_cache(2)
    past = transformers.DynamicCache(config=theirs.config)
    start = 0
    with torch.no_grad():
        for n in (7, 1, 1, 4, 1, 6):
            part = ids[:, start : start + n]
            close(
                ours(part, cache=cache),
                theirs(part, past_key_values=past, use_cache=True).logits,
            )
            start += n
    kept = [layer.keys.shape[-1] + layer.values.shape[-1] for layer in past.layers]
    assert [layer.tensors[0].shape[-1] for layer in cache.layers] == kept == [20, 20]


@every_pair
def test_generate_writes_what_transformers_writes(family):
    ours, theirs = pair(family, **CASES["YaRN"])
    prompt = draw_ids(1, 6, high=VOCAB)
    expected = theirs.generate(
        prompt,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        attention_mask=torch.ones_like(prompt),
    )
    (text,) = generate(ours, prompt.tolist(), max_new_tokens=12)
    assert text.ids == expected[0, 6:].tolist()


def test_check_calls_both_the_same():
    ours, theirs = pair(**CASES["YaRN"])
    assert check.same(ours, theirs, VOCAB)


@pytest.mark.parametrize("order", ORDERS)
def test_our_checks_pass(order):
    model = set_order(pair(**CASES["compressed queries"])[0], order)
    assert check.run_all(model, VOCAB)


def halves(ours):
    "The weights of a model for the layout in which pairs are halves of a head."
    tensors = {}
    for name, weight in ours.state_dict().items():
        if name.endswith(("q_proj.weight", "q_up_proj.weight")):
            heads = weight.clone().unflatten(0, (4, 18))
            for head in heads:
                head[10:] = convert_rotary_layout(head[10:], 8, to="half")
            weight = heads.flatten(0, 1)
        if name.endswith("kv_down_proj.weight"):
            weight = weight.clone()
            weight[12:] = convert_rotary_layout(weight[12:], 8, to="half")
        tensors[name] = weight
    return tensors


def test_the_message_on_layouts_says_how_to_convert():
    "A model of transformers whose pairs are halves has the converted weights."
    ours, theirs = pair(rope_interleave=False)
    interleaved = copy.deepcopy(ours)
    tensors = halves(interleaved)
    load_weights(
        theirs,
        {their_name(name): x for name, x in tensors.items()}
        | {
            name: x
            for name, x in theirs.state_dict().items()
            if name not in set(map(their_name, tensors))
        },
    )
    ids = draw_ids(2, 20, high=VOCAB)
    close(interleaved(ids), theirs(ids).logits)
    with pytest.raises(ValueError, match="convert_rotary_layout reorders"):
        LatentAttention(**LAYER, rotary=RotaryEmbedding(8))


# what is kept, and the order of the products


def test_bytes_are_those_of_the_formula():
    ours, _ = pair()
    cache = ours.new_cache(3)
    ours(draw_ids(3, 11, high=VOCAB), cache=cache)
    assert cache.nbytes == 2 * 3 * 11 * (12 + 8) * 4
    pool = BlockPool(16, 4)
    paged = new_paged_cache(ours, pool, 1)
    with torch.no_grad():
        ours(draw_ids(1, 8, high=VOCAB), cache=paged)
    assert paged.layers[0].nbytes == 8 * (12 + 8) * 4


def test_auto_takes_the_order_with_fewer_multiplications():
    layer = LatentAttention(**LAYER)
    for t, s in ((1, 1), (1, 2), (1, 5000), (3, 500), (500, 500), (70, 500)):
        up = 12 * (10 + 6)
        expanded = s * up + t * s * (10 + 8 + 6)
        absorbed = t * up + t * s * (2 * 12 + 8)
        assert layer.cheaper_order(t, s) == (
            "absorbed" if absorbed < expanded else "expanded"
        )
    deepseek = LatentAttention(2, 1, kv_rank=512, d_nope=128, d_rope=64)
    assert deepseek.cheaper_order(1, 2048) == "absorbed"
    assert deepseek.cheaper_order(2048, 2048) == "expanded"


@pytest.mark.parametrize("t, s", [(1, 9), (9, 9)])
def test_auto_runs_the_order_it_names(t, s, monkeypatch):
    layer = spread(LatentAttention(**LAYER))
    cache = layer.new_cache(1)
    if s > t:
        layer(randn(1, s - t, 32), cache=cache)
    ran = []
    for name in ("_attend_absorbed", "_attend_expanded"):
        method = getattr(layer, name)
        monkeypatch.setattr(
            layer,
            name,
            lambda *given, name=name, method=method: ran.append(name) or method(*given),
        )
    layer(randn(1, t, 32), cache=cache)
    assert ran == [f"_attend_{layer.cheaper_order(t, s)}"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_weights_and_output_in_every_order_and_type(order, dtype, tolerance):
    layer = spread(LatentAttention(**LAYER, q_rank=7))
    x = randn(2, 9, 32)
    expected, weights = layer(x, need_weights=True)
    layer = copy.deepcopy(layer).to(dtype)
    layer.order = order
    for fused in (True, False):
        layer.fused = fused
        assert (layer(x.to(dtype)) - expected).abs().max() < tolerance
    found = layer(x.to(dtype), need_weights=True)[1]
    assert found.shape == (2, 4, 9, 9) and found.dtype == dtype
    assert (found - weights).abs().max() < tolerance
    assert not found.triu(1).any()


def test_padding_in_any_place_is_not_seen():
    layer = spread(LatentAttention(**LAYER))
    x = randn(1, 5, 32)
    alone = layer(x)
    padded = torch.cat([randn(1, 2, 32, seed=3), x], 1)
    positions = torch.tensor([[-1, -1, 0, 1, 2, 3, 4]])
    for layer.order in ("expanded", "absorbed"):
        close(layer(padded, positions=positions)[:, 2:], alone)


def test_the_default_scale_counts_both_parts_of_a_query():
    assert LatentAttention(**LAYER).scale == pytest.approx((10 + 8) ** -0.5)
    layer = spread(LatentAttention(**LAYER))
    x = randn(1, 9, 32)
    other = copy.deepcopy(layer)
    other.scale = (10 + 8) ** -0.5
    assert torch.equal(layer(x), other(x))


@pytest.mark.parametrize("order", ORDERS)
def test_what_a_mask_forbids_is_not_seen(order):
    "Two documents in a row: the second is what it is without the first."
    layer = spread(LatentAttention(**LAYER))
    layer.order = order
    x = randn(2, 9, 32)
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    mask = (documents[:, None] == documents)[None, None]
    found = layer(x, mask=mask)
    close(found[:, :4], layer(x[:, :4]))
    positions = torch.arange(4, 9)[None]
    close(found[:, 4:], layer(x[:, 4:], positions=positions))
    one_head = mask.expand(1, 4, 9, 9).clone()
    one_head[:, 2] = True
    assert not torch.allclose(layer(x, mask=one_head)[:, 4:], found[:, 4:])


def test_a_model_with_another_scale_is_not_loaded(tmp_path):
    config = LlamaConfig(vocab_size=VOCAB, d_model=32, n_layers=1, n_heads=4)
    makes = [
        lambda layer, scale=scale: LatentAttention(**LAYER, scale=scale)
        for scale in (None, 0.3)
    ]
    Llama(config, makes[0]).save(tmp_path)
    with pytest.raises(ValueError, match="scale"):
        Llama.load(tmp_path, attention_factory=makes[1])


def test_the_factory_hands_on_what_it_is_given():
    config = LlamaConfig(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, eps=1e-3)
    make = make_mla_factory(config, **SIZES, q_rank=7, dropout=0.25, fused=False)
    first = make(0)
    second = make(1)
    assert first.kv_norm.eps == first.q_norm.eps == 1e-3
    assert first.dropout == 0.25 and not first.fused
    assert first.rotary is second.rotary and first.kv_norm is not second.kv_norm


def test_dropout_is_drawn_in_training_only():
    layer = spread(LatentAttention(**LAYER, dropout=0.5))
    x = randn(1, 9, 32)
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))


def test_weights_of_one_byte_work_in_both_orders():
    model = quantize_int8(pair(**CASES["compressed queries"])[0])
    ids = draw_ids(2, 12, high=VOCAB)
    expanded, absorbed = (set_order(model, order)(ids) for order in ORDERS[:2])
    close(expanded, absorbed)


def test_saving_says_which_attention_a_model_has(tmp_path):
    config = LlamaConfig(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4)
    make = make_mla_factory(config, **SIZES)
    model = spread(Llama(config, make))
    model.save(tmp_path)
    ids = draw_ids(2, 9, high=VOCAB)
    assert torch.equal(Llama.load(tmp_path, attention_factory=make)(ids), model(ids))
    stretched = make_mla_factory(config, **SIZES, yarn=YARN)
    for other in (None, stretched):
        with pytest.raises(ValueError, match="attention"):
            Llama.load(tmp_path, attention_factory=other)


@torch.no_grad()
@pytest.mark.parametrize(
    "new_cache",
    [
        lambda model: new_static_cache(model, 2, 24),
        lambda model: new_paged_cache(model, BlockPool(16, 4), 2),
        lambda model: model.new_cache(2),
    ],
    ids=["static", "paged", "growing"],
)
def test_rows_and_lengths_of_a_cache(new_cache):
    "select, crop and set_rows do with latents what they do with keys and values."
    model = pair()[0]
    ids = draw_ids(2, 12, high=VOCAB)
    cache = new_cache(model)
    model(ids[:, :8], cache=cache)
    cache.crop(6)
    cache.select(torch.tensor([1, 0]))
    swapped = ids[[1, 0]]
    close(model(swapped[:, 6:], cache=cache), model(swapped)[:, 6:])


# what is refused

REFUSED = {
    "no rank": (dict(kv_rank=0), "kv_rank must be a whole number"),
    "no query rank": (dict(q_rank=0), "q_rank must be a whole number"),
    "half a rank": (dict(kv_rank=1.5), "kv_rank must be a whole number"),
    "no heads": (dict(n_heads=0), "n_heads must be a whole number"),
    "no width": (dict(d_nope=0), "d_nope must be a whole number"),
    "no values": (dict(d_v=0), "d_v must be a whole number"),
    "odd rotary width": (dict(d_rope=7), "d_rope 7 must be even"),
    "no rotary width": (dict(d_rope=0), "d_rope must be a whole number"),
    "other rotary": (dict(rotary="yes"), "rotary must be RotaryEmbedding"),
    "rotary width": (
        dict(rotary=RotaryEmbedding(6, layout="interleaved")),
        "6 wide, and d_rope is 8",
    ),
    "layout": (dict(rotary=RotaryEmbedding(8)), "got layout='half'"),
    "scale": (dict(scale=0.0), "scale"),
    "order": (dict(order="fast"), "order must be one of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_sentence(case):
    how, sentence = REFUSED[case]
    with pytest.raises(ValueError) as error:
        LatentAttention(**LAYER | how)
    if "jaxtyping" not in type(error.value).__module__:  # types are executed
        assert sentence in str(error.value) and "\n" not in str(error.value)


def test_shared_keys_are_refused():
    config = LlamaConfig(
        vocab_size=VOCAB, d_model=32, n_layers=1, n_heads=4, n_kv_heads=2
    )
    with pytest.raises(ValueError, match="leave n_kv_heads out, got 2"):
        make_mla_factory(config, **SIZES)


@pytest.mark.parametrize("yarn", [dict(mscale=-1.0), dict(factor=0.0)])
def test_yarn_refuses_what_means_nothing(yarn):
    config = LlamaConfig(vocab_size=VOCAB, d_model=32, n_layers=1, n_heads=4)
    with pytest.raises(ValueError):
        make_mla_factory(config, **SIZES, yarn=YARN | yarn)


def test_a_cache_of_another_kind_is_refused_and_stays():
    layer = spread(LatentAttention(**LAYER))
    x = randn(1, 3, 32)
    for other in (
        SelfAttention(32, 4, causal=True),
        LatentAttention(**LAYER | dict(kv_rank=13)),
    ):
        cache = other.new_cache(1)
        other(x, cache=cache)
        before = [tensor.clone() for tensor in cache.tensors]
        with pytest.raises(ValueError, match="belongs to another attention"):
            layer(x, cache=cache)
        assert all(map(torch.equal, before, cache.tensors))
    for cache, sentence in (
        (CrossAttentionCache(1), "a CrossAttentionCache keeps no"),
        (KVCache([layer.new_cache(1)]), "a KVCache keeps no"),
    ):
        with pytest.raises(ValueError, match=sentence):
            layer(x, cache=cache, positions=torch.arange(3)[None])
    cache = layer.new_cache(1)
    layer(x, cache=cache)
    with pytest.raises(ValueError, match="only time, axis -2"):
        SelfAttention(32, 4, causal=True)(x, cache=cache)
