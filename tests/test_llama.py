"""Llama and Qwen3 against transformers, and by their laws."""

import csv
import math
import re
import sys
import warnings

import pytest
import torch
from torch import nn

warnings.filterwarnings("ignore", message="IProgress not found")
import transformers  # noqa: E402
from transformers import LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from conftest import ROOT, load_experiment, run  # noqa: E402
from helpers import close, equal_to_peer, randn  # noqa: E402
from tformer import check  # noqa: E402
from tformer.models.base import load_weights  # noqa: E402
from tformer.models.gpt import GPTConfig  # noqa: E402
from tformer.models.llama import (  # noqa: E402
    Llama,
    LlamaConfig,
    Qwen3,
    make_gqa_factory,
)
from tformer.models.mini_gpt import load_record  # noqa: E402
from tformer.nn import attention as attention_module  # noqa: E402
from tformer.nn import attention_backends as backends_module  # noqa: E402
from tformer.nn.attention import SelfAttention  # noqa: E402
from tformer.nn.feed_forward import GatedFeedForward  # noqa: E402
from tformer.nn.kv_cache import DynamicLayerCache, KVCache  # noqa: E402
from tformer.nn.norms import RMSNorm, rms_norm  # noqa: E402
from tformer.nn.relative_bias import ALiBi  # noqa: E402
from tformer.nn.rope_scaling import make_rotary  # noqa: E402
from tformer.nn.rotary import RotaryEmbedding, rope_frequencies  # noqa: E402

SMALL = dict(
    vocab_size=50, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48, max_len=64
)
SCALING = dict(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=16
)
CASES = {
    "MHA": dict(n_kv_heads=None),
    "GQA": {},
    "MQA": dict(n_kv_heads=1),
    "scaled": dict(rope_scaling=SCALING, rope_theta=500_000.0),
    "tied": dict(tie_word_embeddings=True),
    "wide heads": dict(d_head=16),
    "eps": dict(eps=1e-3),
}
NAMES = {
    "blocks": "model.layers",
    "embed": "model.embed_tokens",
    "attention.norm": "input_layernorm",
    "attention.sublayer": "self_attn",
    "feed_forward.norm": "post_attention_layernorm",
    "feed_forward.sublayer": "mlp",
}
both_paths = pytest.mark.parametrize("fused", [True, False])


@torch.no_grad()
def spread(model, std=0.1):
    "Matrices of this spread, weights of norms away from 1."
    for i, p in enumerate(model.parameters()):
        drawn = randn(*p.shape, seed=100 + i)
        p.copy_(std * drawn if p.ndim > 1 else 1 + 0.3 * drawn)
    return model.eval()


def config(**change):
    return LlamaConfig(**{**SMALL, **change})


def model(kind=Llama, std=0.1, **change):
    return spread(kind(config(**change)), std)


def their_name(name):
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return f"model.{name}" if name.startswith("norm") else name


def pair(kind=Llama, std=0.1, **change):
    "A model of ours and one of transformers with the same weights."
    c = config(**change)
    rope = dict(rope_type="default", rope_theta=c.rope_theta)
    if c.rope_scaling is not None:
        rope = dict(c.rope_scaling, rope_type="llama3", rope_theta=c.rope_theta)
        rope["original_max_position_embeddings"] = rope.pop("original_max_len")
    cls, config_cls = (
        (Qwen3ForCausalLM, Qwen3Config)
        if kind is Qwen3
        else (LlamaForCausalLM, transformers.LlamaConfig)
    )
    theirs = spread(
        cls(
            config_cls(
                vocab_size=c.vocab_size,
                hidden_size=c.d_model,
                intermediate_size=c.d_ff,
                num_hidden_layers=c.n_layers,
                num_attention_heads=c.n_heads,
                rms_norm_eps=c.eps,
                num_key_value_heads=c.n_kv_heads or c.n_heads,
                head_dim=c.d_head or c.d_model // c.n_heads,
                max_position_embeddings=c.max_len,
                tie_word_embeddings=c.tie_word_embeddings,
                rope_parameters=rope,
            )
        ),
        std,
    )
    ours = kind(c)
    tensors = theirs.state_dict()
    load_weights(ours, {name: tensors[their_name(name)] for name in ours.state_dict()})
    return ours.eval(), theirs


def some_ids(*shape, seed=0):
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(seed))


def equal_to_theirs(ours, theirs, tokens=40):
    "Logits, and the gradient of every parameter."
    equal_to_peer(ours, theirs, some_ids(2, tokens), their_name)


# against transformers


@pytest.mark.parametrize("name", CASES)
def test_equal_to_llama_in_value_and_gradient(name):
    ours, theirs = pair(**CASES[name])
    equal_to_theirs(ours, theirs)
    assert check.same(ours, theirs, 50)
    assert check.same(ours, theirs, 50, name_map=None, check_gradients=True)


@pytest.mark.parametrize("name", CASES)
def test_equal_to_qwen3_in_value_and_gradient(name):
    ours, theirs = pair(Qwen3, **CASES[name])
    equal_to_theirs(ours, theirs)
    assert check.same(ours, theirs, 50)


def test_llama_equals_transformers():
    for change in (
        {},
        dict(n_kv_heads=1),
        dict(tie_word_embeddings=True),
        dict(rope_scaling=SCALING, rope_theta=1e6),
    ):
        equal_to_theirs(*pair(**change))


def test_qwen3_equals_transformers():
    equal_to_theirs(*pair(Qwen3, d_head=16))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", [Llama, Qwen3])
def test_padded_batches_equal_transformers(kind, side):
    ours, theirs = pair(kind, n_kv_heads=1 if side == "left" else 2)
    keep = torch.ones(3, 9, dtype=torch.bool)
    for row, n in ((1, 4), (2, 7)):
        keep[row, :n] = False
    keep = keep if side == "left" else keep.flip(1)
    positions = (keep.cumsum(1) - 1).masked_fill(~keep, -1)
    ids = some_ids(3, 9)
    with torch.no_grad():
        a = ours(ids, positions=positions)
        b = theirs(
            ids, attention_mask=keep.long(), position_ids=positions.clamp(min=0)
        ).logits
    close(a[keep], b[keep])
    for row in range(3):
        close(a[row][keep[row]], ours(ids[row : row + 1, keep[row]])[0])


@pytest.mark.parametrize("kind", [Llama, Qwen3])
def test_greedy_continuation_of_a_padded_batch_equals_generate(kind):
    ours, theirs = pair(kind, std=0.5)
    ids = some_ids(2, 7)
    first = torch.tensor([[0], [3]])
    positions = (torch.arange(7) - first).clamp(min=-1)
    with torch.no_grad():
        expected = theirs.generate(
            ids,
            attention_mask=(positions >= 0).long(),
            max_new_tokens=10,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )[:, 7:]
        cache = ours.new_cache(2)
        found = []
        step = ids
        for _ in range(10):
            step = ours(step, positions=positions, cache=cache)[:, -1:].argmax(-1)
            found.append(step)
            positions = None
    assert torch.equal(torch.cat(found, 1), expected)
    assert len(expected.unique()) > 5


def test_state_dict_has_as_many_tensors_as_theirs():
    for kind in (Llama, Qwen3):
        ours, theirs = pair(kind)
        assert {their_name(n) for n in ours.state_dict()} == set(theirs.state_dict())


# the attention layer


def sharing(d_model, n_heads, *, bias=False, **options):
    "Attention as Llama has it: causal, without biases."
    return SelfAttention(d_model, n_heads, bias=bias, causal=True, **options)


@torch.no_grad()
def unshared(layer, d_head):
    "A layer with each key head as often as it is shared."
    n = layer.n_heads // layer.n_kv_heads
    full = SelfAttention(
        layer.o_proj.weight.shape[0],
        layer.n_heads,
        d_head=d_head,
        bias=False,
        causal=True,
        rotary=layer.rotary,
    )
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        w = getattr(layer, name).weight
        if name in ("k_proj", "v_proj"):
            w = w.view(-1, d_head, w.shape[1]).repeat_interleave(n, 0)
            w = w.flatten(0, 1)
        getattr(full, name).weight.copy_(w)
    return full.eval()


@both_paths
@pytest.mark.parametrize("kv", [6, 3, 2, 1])
def test_shared_heads_equal_repeated_weights(fused, kv):
    layer = spread(
        sharing(24, 6, n_kv_heads=kv, d_head=8, rotary=RotaryEmbedding(8), fused=fused),
        0.3,
    )
    full = unshared(layer, 8)
    x = randn(2, 5, 24)
    close(layer(x), full(x))
    positions = torch.tensor([[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]])
    close(layer(x, positions=positions), full(x, positions=positions))
    mask = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.7
    close(layer(x, mask=mask), full(x, mask=mask))
    close(
        layer(x, positions=positions, mask=mask),
        full(x, positions=positions, mask=mask),
    )


@both_paths
def test_the_cache_holds_turned_keys_of_few_heads(fused):
    rotary = RotaryEmbedding(8)
    layer = spread(sharing(32, 4, n_kv_heads=2, rotary=rotary, fused=fused), 0.3)
    x = randn(2, 6, 32)
    cache = DynamicLayerCache()
    whole = layer(x)
    parts = [layer(x[:, a:b], cache=cache) for a, b in ((0, 3), (3, 4), (4, 6))]
    close(torch.cat(parts, 1), whole)
    k, v = cache.tensors
    key_positions = cache.key_positions.tensor
    assert k.shape == v.shape == (2, 2, 6, 8)
    raw = layer.k_proj(x).view(2, 6, 2, 8).transpose(1, 2)
    close(k, rotary(raw, positions=key_positions)[0])
    close(v, layer.v_proj(x).view(2, 6, 2, 8).transpose(1, 2))
    assert key_positions.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert cache.nbytes == 2 * 4 * k.numel()


def test_plain_texts_spare_the_mask(monkeypatch):
    seen = []
    real = attention_module.fused_attend

    def spy(q, k, v, mask=None, *rest, **how):
        seen.append((mask, how.get("causal", False), *q.shape[1:3], k.shape[1]))
        return real(q, k, v, mask, *rest, **how)

    monkeypatch.setattr(attention_module, "fused_attend", spy)
    monkeypatch.setattr(backends_module, "fused_attend", spy)
    layer = sharing(32, 4, n_kv_heads=2, rotary=RotaryEmbedding(8))
    cache = DynamicLayerCache()
    x = randn(1, 5, 32)
    layer(x, cache=cache)
    layer(x[:, :1], cache=cache)  # two heads are two rows of one
    assert seen == [
        (None, True, 4, 5, 2),
        (None, False, 4, 1, 2),
        (None, False, 2, 2, 2),
    ]
    layer(x[:, :2], cache=cache)
    assert seen[-1][0].shape[-2:] == (2, 8) and not seen[-1][1]
    assert cache.key_positions.start == 0 and cache.key_positions.length == 8


def test_only_distances_count():
    layer = spread(sharing(32, 4, n_kv_heads=2, rotary=RotaryEmbedding(8)), 0.3)
    x = randn(1, 5, 32)
    positions = torch.tensor([[3, 4, 6, 9, 11]])
    close(layer(x, positions=positions), layer(x, positions=positions + 40), 1e-4)
    assert not torch.allclose(layer(x, positions=positions), layer(x), atol=1e-3)
    bare = spread(sharing(32, 4, n_kv_heads=2, rotary=None), 0.3)
    close(bare(x, positions=positions), bare(x))


def test_norms_act_on_each_head_before_the_rotation():
    q_norm, k_norm = (spread(RMSNorm(8, eps=0.1)) for _ in range(2))
    with torch.no_grad():
        k_norm.weight += 0.5 * randn(8, seed=5)
    layer = spread(
        sharing(
            32, 4, n_kv_heads=2, rotary=RotaryEmbedding(8), q_norm=q_norm, k_norm=k_norm
        ),
        0.3,
    )
    x = randn(2, 6, 32)
    cache = DynamicLayerCache()
    layer(x, cache=cache)
    raw = layer.k_proj(x).view(2, 6, 2, 8).transpose(1, 2)
    at = torch.arange(6)[None]
    close(
        cache.tensors[0],
        layer.rotary(rms_norm(raw, k_norm.weight, 0.1), positions=at)[0],
    )
    calls = []
    q_norm.register_forward_hook(lambda m, args, out: calls.append(args[0]))
    layer(x)
    assert torch.equal(calls[0], layer.q_proj(x).view(2, 6, 4, 8))
    keyless = spread(
        sharing(32, 4, n_kv_heads=2, rotary=RotaryEmbedding(8), q_norm=q_norm), 0.3
    )
    assert keyless(x).shape == x.shape


def test_a_padding_token_moves_nothing():
    layer = spread(sharing(32, 4, n_kv_heads=2, rotary=RotaryEmbedding(8)), 0.3)
    x = randn(1, 6, 32)
    positions = torch.tensor([[-1, -1, 0, 1, 2, 3]])
    y = x.clone()
    y[:, :2] = 100.0
    a = layer(x, positions=positions)
    b = layer(y, positions=positions)
    assert torch.equal(a[:, 2:], b[:, 2:])
    close(a[:, 2:], layer(x[:, 2:]))
    assert a.isfinite().all() and (a[:, :2] == 0).all()


def test_biases_where_asked_for():
    names = list(sharing(32, 4, rotary=None).state_dict())
    assert names == [f"{p}_proj.weight" for p in "qkvo"]
    layer = sharing(32, 4, n_kv_heads=2, rotary=None, bias=True)
    assert [tuple(layer.state_dict()[f"{p}_proj.bias"].shape) for p in "qkvo"] == [
        (32,),
        (16,),
        (16,),
        (32,),
    ]
    assert "proj_sizes=[32, 16, 16]" in repr(layer)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: sharing(32, 4, n_kv_heads=3, rotary=None), "4 3"),
        (lambda: sharing(32, 4, n_kv_heads=0, rotary=None), "n_kv_heads 0"),
        (lambda: sharing(32, 4, n_kv_heads=8, rotary=None), "4 8"),
        (lambda: sharing(30, 4, rotary=None), "30 4"),
        (
            lambda: sharing(32, 4, rotary=None)(
                randn(2, 3, 32), positions=torch.arange(4)[None]
            ),
            "(1, 4) 3",
        ),
        (lambda: config(n_kv_heads=3), "4 3"),
        (lambda: config(d_model=30), "30 4"),
        (lambda: config(d_head=7), "7"),
        (lambda: config(d_model=36, n_heads=4), "9"),
        (lambda: config(vocab_size=0), "vocab_size 0"),
        (lambda: config(n_layers=0), "n_layers 0"),
        (lambda: config(n_kv_heads=0), "n_kv_heads 0"),
        (lambda: config(d_ff=-1), "d_ff -1"),
        (lambda: config(d_ff=10.5), "d_ff 10.5"),
        (lambda: config(max_len=0), "max_len 0"),
        (lambda: config(rope_theta=0.0), "rope_theta 0"),
        (lambda: config(eps=-1e-6), "eps -1e-06"),
        (lambda: config(eps=math.nan), "eps nan"),
        (lambda: config(eps="1e-5"), "eps '1e-5'"),
        (lambda: config(rope_theta=None), "rope_theta None"),
        (lambda: config(tie_word_embeddings="no"), "tie_word_embeddings 'no'"),
        (lambda: config(rope_scaling=dict(SCALING, factor="8")), "factor '8'"),
        (lambda: config(rope_scaling=8.0), "rope_scaling 8.0"),
        (lambda: config(rope_scaling=dict(factor=8.0)), "factor low_freq_factor"),
        (lambda: config(rope_scaling=dict(SCALING, rope_type="llama3")), "rope_type"),
        (lambda: config(rope_scaling=dict(SCALING, factor=0)), "factor 0"),
        (lambda: config(rope_scaling=dict(SCALING, low_freq_factor=5.0)), "5.0 4.0"),
        (
            lambda: LlamaConfig.from_dict(dict(SMALL, hidden_size=3)),
            "hidden_size d_model",
        ),
        (lambda: Llama(config())(some_ids(1, 65)), "65 64"),
        (
            lambda: Llama(config())(some_ids(1, 2), positions=torch.tensor([[63, 64]])),
            "65 64",
        ),
        (
            lambda: Llama(config())(
                some_ids(1, 2), cache=KVCache([DynamicLayerCache() for _ in "abc"])
            ),
            "3 2",
        ),
    ],
)
def test_errors_name_what_was_given(make, said):
    words = "".join(f"(?=.*{re.escape(w)})" for w in said.split(" "))
    with pytest.raises(ValueError, match=f"(?s)^{words}"):
        make()


# configurations


def test_the_config_keeps_a_scaling_of_its_own():
    mine = dict(SCALING)
    c = config(rope_scaling=mine)
    mine["factor"] = -1.0
    assert c.rope_scaling == SCALING


def test_rotary_of_a_config():
    c = config(d_head=16, rope_theta=1234.0)
    assert torch.equal(make_rotary(c).freqs, rope_frequencies(16, 1234.0))
    slow = make_rotary(
        config(d_head=16, rope_scaling=dict(SCALING, original_max_len=64))
    ).freqs
    assert torch.equal(slow[0], rope_frequencies(16)[0])
    close(slow[-1] * 8, rope_frequencies(16)[-1])


# the model


def test_every_check_passes():
    for kind in (Llama, Qwen3):
        assert check.run_all(model(kind), 50)
    assert check.run_all(model(std=0.3, n_kv_heads=1), 50)


@pytest.mark.parametrize("kind", [Llama, Qwen3])
def test_every_check_passes_in_bfloat16(kind):
    m = model(kind).to(torch.bfloat16)
    assert m(some_ids(2, 5)).dtype == torch.bfloat16
    assert check.run_all(m, 50)


def test_bfloat16_is_near_float32():
    m = model(std=0.05)
    reference = m(some_ids(2, 20))
    freqs = m.blocks[0].attention.sublayer.rotary.freqs.clone()
    m.to(torch.bfloat16)
    assert torch.equal(m.blocks[0].attention.sublayer.rotary.freqs, freqs)
    close(m(some_ids(2, 20)).float(), reference, 0.03)


def test_feeding_in_chunks_equals_feeding_whole():
    m = model(std=0.3)
    ids = some_ids(2, 9)
    whole = m(ids)
    for cuts in ((1,) * 9, (4, 5), (8, 1), (2, 1, 3, 3)):
        cache = m.new_cache(2)
        at = 0
        out = []
        for n in cuts:
            out.append(m(ids[:, at : at + n], cache=cache))
            at += n
        close(torch.cat(out, 1), whole)
        assert cache.key_positions.length == 9 and cache.lengths.tolist() == [9, 9]


def test_max_len_counts_positions_and_not_places():
    m = model(max_len=6)
    cache = m.new_cache(1)
    m(some_ids(1, 5), cache=cache)
    m(some_ids(1, 1), cache=cache)
    with pytest.raises(ValueError, match=r"7.*6"):
        m(some_ids(1, 1), cache=cache)
    assert cache.key_positions.length == 6
    positions = torch.arange(8)[None] - 3
    m(some_ids(1, 8), positions=positions.clamp(min=-1))
    cache = m.new_cache(1)
    m(some_ids(1, 8), positions=positions.clamp(min=-1), cache=cache)
    m(some_ids(1, 1), cache=cache)
    with pytest.raises(ValueError, match=r"7.*6"):
        m(some_ids(1, 1), cache=cache)
    assert m(some_ids(2, 0), positions=torch.zeros(1, 0, dtype=torch.long)).shape == (
        2,
        0,
        50,
    )


def test_a_mask_reaches_every_layer():
    m = model(std=0.3)
    ids = some_ids(1, 6)
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[3:, :3] = False  # a new document begins at 3
    mask = mask[None, None]
    close(m(ids, mask=mask)[:, 3:], m(ids[:, 3:]))
    assert not torch.allclose(m(ids)[:, 3:], m(ids[:, 3:]), atol=1e-3)


def test_any_attention_can_be_handed_in():
    asked = []

    def attention(layer):
        asked.append(layer)
        if layer == 1:
            return sharing(32, 4, n_kv_heads=1, rotary=None)
        return SelfAttention(32, 4, bias=False, causal=True, score_bias=ALiBi(4))

    m = spread(Llama(config(n_layers=3), attention))
    assert asked == [0, 1, 2]
    assert isinstance(m.blocks[0].attention.sublayer.score_bias, ALiBi)
    assert check.run_all(m, 50)
    same = Llama(config(), attention_factory=make_gqa_factory(config()))
    assert list(same.state_dict()) == list(Llama(config()).state_dict())


def test_layers_have_modules_of_their_own():
    m = Qwen3(config())
    first, second = (b.attention.sublayer for b in m.blocks)
    for name in ("q_norm", "k_norm", "q_proj"):
        assert getattr(first, name) is not getattr(second, name)
    assert first.rotary is second.rotary  # its angles are made once
    assert first.q_norm is not first.k_norm


def test_qk_norm_only_where_asked():
    names = set(Qwen3(config()).state_dict()) - set(Llama(config()).state_dict())
    assert names == {
        f"blocks.{i}.attention.sublayer.{n}_norm.weight" for i in (0, 1) for n in "qk"
    }
    m = Qwen3(config(eps=0.5, d_head=16))
    norm = m.blocks[0].attention.sublayer.q_norm
    assert norm.eps == 0.5 and norm.weight.shape == (16,)


def test_no_biases_anywhere():
    assert not [n for n, _ in Qwen3(config()).named_parameters() if "bias" in n]


def test_every_norm_has_the_eps():
    m = Llama(config(eps=0.25))
    found = [n.eps for n in m.modules() if isinstance(n, RMSNorm)]
    assert found == [0.25] * 5


def test_the_block_is_pre_norm_with_two_residuals():
    block = model(std=0.3, eps=0.1).blocks[0]
    x = randn(2, 5, 32)
    attention = block.attention.sublayer
    w1 = block.attention.norm.weight
    w2 = block.feed_forward.norm.weight
    y = x + attention(rms_norm(x, w1, 0.1))
    close(block(x), y + block.feed_forward.sublayer(rms_norm(y, w2, 0.1)))


def test_tied_heads_share_one_tensor():
    m = Llama(config(tie_word_embeddings=True))
    assert m.lm_head.weight is m.embed.weight
    assert Llama(config()).lm_head.weight is not m.embed.weight
    free = sum(p.numel() for p in Llama(config()).parameters())
    assert free - sum(p.numel() for p in m.parameters()) == 50 * 32


def test_sizes_of_published_models():
    sizes = []
    with torch.device("meta"):
        for kind, change in (
            (
                Llama,
                dict(
                    vocab_size=128_256,
                    d_model=4096,
                    n_layers=32,
                    n_heads=32,
                    n_kv_heads=8,
                    d_ff=14_336,
                ),
            ),
            (
                Llama,
                dict(
                    vocab_size=32_000,
                    d_model=4096,
                    n_layers=32,
                    n_heads=32,
                    n_kv_heads=None,
                    d_ff=11_008,
                ),
            ),
            (
                Qwen3,
                dict(
                    vocab_size=151_936,
                    d_model=1024,
                    n_layers=28,
                    n_heads=16,
                    n_kv_heads=8,
                    d_head=128,
                    d_ff=3072,
                    tie_word_embeddings=True,
                ),
            ),
        ):
            m = kind(config(**change))
            sizes.append(sum(p.numel() for p in m.parameters()))
    assert sizes == [8_030_261_248, 6_738_415_616, 596_049_920]


def test_the_default_width_is_that_of_swiglu():
    m = Llama(config(d_ff=None, d_model=64))
    assert m.blocks[0].feed_forward.sublayer.up_proj.weight.shape == (192, 64)
    assert isinstance(m.blocks[0].feed_forward.sublayer, GatedFeedForward)


def test_first_weights():
    torch.manual_seed(0)
    m = Qwen3(config(vocab_size=500, d_model=128, n_layers=8, d_ff=256))
    for name, p in m.named_parameters():
        if p.ndim == 1:
            assert torch.equal(p, torch.ones_like(p)), name
            continue
        std = 0.02 / (4 if "o_proj" in name or "down_proj" in name else 1)
        assert abs(p.std().item() / std - 1) < 0.05, name
        assert abs(p.mean().item()) < 0.1 * std, name


def test_training_and_eval_are_one_function():
    "There is no dropout in this model."
    m = model()
    ids = some_ids(2, 6)
    assert torch.equal(m.train()(ids), m.eval()(ids))


def test_integers_of_other_widths_are_ids_too():
    m = model()
    ids = some_ids(2, 6)
    assert torch.equal(m(ids.int()), m(ids))


# saving


# compiled, on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype):
    m = model(Qwen3)
    ids = some_ids(2, 9)
    reference = model(Qwen3)(some_ids(2, 9))
    m = m.to("cuda", dtype)
    ids = ids.cuda()
    close(m(ids).float().cpu(), reference, 1e-4 if dtype == torch.float32 else 0.03)
    cache = m.new_cache(2)
    parts = [m(ids[:, i : i + 3], cache=cache) for i in (0, 3, 6)]
    close(
        torch.cat(parts, 1).float().cpu(),
        reference,
        1e-4 if dtype == torch.float32 else 0.03,
    )
    positions = torch.arange(9, device="cuda")[None].clone()
    positions[0, 0] = -1
    assert m(ids, positions=positions - 1).isfinite().all()


# the record


def modern():
    "The script as a module."
    return load_experiment("modern")


@pytest.mark.nightly
def test_the_record_is_made_by_its_script(tmp_path, monkeypatch):
    out = tmp_path / "modern.csv"
    words = ["modern.py", "--steps", "1", "--seeds", "1", "--out", str(out)]
    run(sys.executable, ROOT / "experiments" / words[0], *words[1:])
    with out.open(encoding="utf-8", newline="") as lines:
        new = list(csv.DictReader(lines))
    kept = [r for r in load_record("modern") if r["seed"] == "0"]
    assert [r["variant"] for r in new] == [r["variant"] for r in kept]
    goal = int(new[0]["parameters"])
    for short, long in zip(new, kept, strict=True):
        assert short.keys() == long.keys()
        for same in ("parameters", "d_ff"):
            assert short[same] == long[same]
        assert abs(int(short["parameters"]) / goal - 1) < 0.01
        assert float(short["nats_per_byte"]) > float(long["nats_per_byte"])
    before = out.read_bytes()
    script = modern()  # once more: all of it is there
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(script, "train_one", None)
    monkeypatch.setattr(script.stories, "story_corpus", lambda *a, **k: "a")
    script.main()
    assert out.read_bytes() == before
    rows = script.kept_rows(out, 1, again=False)
    script.write(rows[::-1][1:], out)  # a run that was stopped
    monkeypatch.setattr(
        script,
        "train_one",
        lambda name, seed, *rest: {**rows[0], "variant": name, "seed": str(seed)},
    )
    script.main()
    assert len(script.kept_rows(out, 1, again=False)) == len(rows)
    assert not script.kept_rows(out, 2, again=False)
    assert not script.kept_rows(out, 1, again=True)


def test_the_ends_of_the_record_are_the_models_of_the_book():
    from tformer.models.gpt import GPT

    script = modern()
    ids = some_ids(1, 20)
    size = dict(vocab_size=256, d_model=96, n_layers=2, n_heads=4, max_len=128)
    first = spread(script.Mixed())
    gpt = GPT(GPTConfig(dropout=0.0, **size)).eval()
    tensors = iter(t for n, t in first.state_dict().items())
    ours = {}
    for name in first.state_dict():
        i = int(name.split(".")[1]) if name.startswith("blocks") else 0
        there = name.replace(
            f"blocks.{i}.",
            f"blocks.{i // 2}." + ("feed_forward." if i % 2 else "attention."),
        )
        ours[there] = next(tensors)
    for i in range(2):
        for kind in ("weight", "bias"):
            at = f"blocks.{i}.attention.sublayer."
            ours[f"{at}qkv_proj.{kind}"] = torch.cat(
                [ours.pop(f"{at}{p}_proj.{kind}") for p in "qkv"]
            )
    load_weights(gpt, ours)
    close(first(ids), gpt(ids))
    assert script.count((), script.D_FF) == sum(p.numel() for p in gpt.parameters())
    width = script.equal_width(script.LLAMA)
    last = spread(script.Mixed(script.LLAMA, width))
    llama_ = Llama(LlamaConfig(n_kv_heads=2, d_ff=width, **size))
    tensors = list(last.state_dict().values())
    assert len(tensors) == len(llama_.state_dict())
    load_weights(llama_, dict(zip(llama_.state_dict(), tensors, strict=True)))
    close(last(ids), llama_(ids))


def test_the_record_is_whole():
    rows = load_record("modern")
    script = modern()
    assert [(r["variant"], r["seed"]) for r in rows] == [
        (name, str(seed)) for name in script.VARIANTS for seed in range(5)
    ]
    assert {r["steps"] for r in rows} == {str(script.STEPS)}
    assert isinstance(script.Mixed(), nn.Module)
