"""What a model costs: predicted by `tformer.costs`, counted on real models.

The references are models of `transformers` and of this package, the counter
of PyTorch, and sums over pairs, tokens and layers written out one by one.
"""

import dataclasses
import inspect
import math
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from helpers import plain_only
from tformer import costs as module
from tformer.costs import (
    ACCELERATORS,
    Accelerator,
    ModelCosts,
    ModelSpec,
    Work,
    activation_bytes,
    attention_ffn_crossover,
    decode_workload,
    estimate_costs,
    flops_by_component,
    format_quantity,
    forward_flops,
    kv_cache_bytes,
    max_batch_size,
    parameters_by_component,
    prefill_workload,
    spec_from_config,
    training_bytes,
    training_flops,
    training_seconds,
    training_state_by_component,
    weight_bytes,
)
from tformer.models.bert import Bert, BertConfig
from tformer.models.gpt import GPT, GPT1, GPTConfig
from tformer.models.llama import Llama, LlamaConfig, Qwen3
from tformer.models.seq2seq import PreNormSeq2Seq, Seq2Seq, Seq2SeqConfig
from tformer.nn.attention import SelfAttention

warnings.filterwarnings("ignore", message="IProgress not found")
transformers = pytest.importorskip("transformers")

SMALL = dict(vocab_size=50, d_model=32, n_layers=2, n_heads=4)
THEIRS = dict(
    vocab_size=60,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=56,
)
GROUPED = dict(THEIRS, num_key_value_heads=2)


def sizes(**more):
    return ModelSpec(**{**SMALL, **more})


def numel(model):
    return sum(p.numel() for p in model.parameters())


def total(parts):
    return sum(parts.values())


def llama_8b():
    return transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    )


def nemotron():
    return transformers.NemotronConfig(
        vocab_size=256_000,
        hidden_size=18_432,
        intermediate_size=73_728,
        num_hidden_layers=96,
        num_attention_heads=96,
        num_key_value_heads=8,
        head_dim=192,
        max_position_embeddings=4096,
    )


def without_numbers(config):
    "The model of a configuration, on the meta device."
    body = config.model_type in ("bert", "roberta", "distilbert")
    kind = transformers.AutoModel if body else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(config, attn_implementation="eager")


# ---- parameters ---------------------------------------------------------


def known():
    "Configurations of transformers: as they come, and with options."
    t = transformers
    return {
        "gpt2": (t.GPT2Config(), 124_439_808),
        "gpt2 inner": (t.GPT2Config(n_inner=1000, n_layer=2), None),
        "gpt2 untied": (t.GPT2Config(tie_word_embeddings=False), None),
        "gpt1": (t.OpenAIGPTConfig(), 116_534_784),
        "bert": (t.BertConfig(), 109_482_240),
        "bert large": (
            t.BertConfig(
                hidden_size=1024,
                num_hidden_layers=24,
                num_attention_heads=16,
                intermediate_size=4096,
            ),
            335_141_888,
        ),
        "roberta": (t.RobertaConfig(), None),
        "distilbert": (t.DistilBertConfig(), None),
        "llama": (llama_8b(), 8_030_261_248),
        "llama tied": (t.LlamaConfig(**GROUPED, tie_word_embeddings=True), None),
        "llama biases": (
            t.LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True),
            None,
        ),
        "llama attention bias": (t.LlamaConfig(**GROUPED, attention_bias=True), None),
        "llama heads": (t.LlamaConfig(**GROUPED, head_dim=12), None),
        "mistral": (t.MistralConfig(), 7_241_732_096),
        "qwen2": (t.Qwen2Config(**GROUPED), None),
        "qwen3": (t.Qwen3Config(**GROUPED), None),
        "qwen3 bias": (t.Qwen3Config(**GROUPED, attention_bias=True), None),
        "nemotron": (nemotron(), 341_029_195_776),
        "nemotron biases": (
            t.NemotronConfig(**GROUPED, attention_bias=True, mlp_bias=True),
            None,
        ),
        "gemma": (t.GemmaConfig(**GROUPED), None),
        "gemma2": (t.Gemma2Config(**GROUPED), None),
        "gemma3": (t.Gemma3TextConfig(**GROUPED), None),
        "phi3": (t.Phi3Config(**GROUPED, pad_token_id=0), None),
        "granite": (t.GraniteConfig(**GROUPED), None),
        "smollm3": (t.SmolLM3Config(**GROUPED, pad_token_id=0), None),
        "gpt_neox": (t.GPTNeoXConfig(**THEIRS), None),
    }


@pytest.mark.parametrize("name", known())
def test_parameters_are_exactly_those_of_transformers(name):
    config, published = known()[name]
    predicted = total(parameters_by_component(spec_from_config(config)))
    assert predicted == numel(without_numbers(config))
    assert published in (None, predicted)


OWN = SMALL | dict(
    vocab_size=61,
    decoder_vocab_size=47,
    n_layers=3,
    n_decoder_layers=1,
    tie_word_embeddings=False,
)


def own_models():
    return {
        "gpt": GPT(GPTConfig(**SMALL, max_len=16)),
        "gpt d_ff": GPT(GPTConfig(**SMALL, max_len=16, d_ff=24)),
        "gpt1": GPT1(GPTConfig(**SMALL, max_len=16)),
        "llama": Llama(LlamaConfig(**SMALL)),
        "llama options": Llama(
            LlamaConfig(
                **SMALL, n_kv_heads=1, d_head=6, d_ff=20, tie_word_embeddings=True
            )
        ),
        "qwen3": Qwen3(LlamaConfig(**SMALL, n_kv_heads=2)),
        "bert": Bert(BertConfig(**SMALL, max_len=16)),
        "seq2seq": Seq2Seq(Seq2SeqConfig(**SMALL)),
        "seq2seq norms": Seq2Seq(Seq2SeqConfig(**SMALL, final_norm=True)),
        "seq2seq own sizes": Seq2Seq(Seq2SeqConfig(**OWN)),
        "seq2seq tied": Seq2Seq(Seq2SeqConfig(**OWN | dict(tie_word_embeddings=True))),
        "prenorm": PreNormSeq2Seq(Seq2SeqConfig(**SMALL)),
    }


two_stacks = pytest.mark.parametrize("name", ["seq2seq", "seq2seq own sizes"])


@pytest.mark.parametrize("name", own_models())
def test_parameters_are_exactly_those_of_our_models(name):
    model = own_models()[name]
    c = estimate_costs(model)
    assert c.parameters == numel(model)
    with torch.no_grad():  # one more parameter is noticed
        model.extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=f"{c.parameters + 1:,} param"):
        estimate_costs(model)


def test_a_configuration_alone_is_enough():
    "The class of a model tells more only where two share a configuration."
    model = own_models()["seq2seq"]
    assert spec_from_config(model) == spec_from_config(model.config)
    config = GPTConfig(**SMALL, max_len=16)
    one = spec_from_config(config, family="GPT1")
    two = spec_from_config(config)
    one_n, two_n = (total(parameters_by_component(s)) for s in (one, two))
    assert two_n - one_n == 64
    assert spec_from_config(GPT1(config)) == one
    assert spec_from_config(LlamaConfig(**SMALL), "qwen3").qk_norm


def test_a_second_stack_has_sizes_of_its_own():
    s = spec_from_config(Seq2SeqConfig(**OWN), name="x")
    assert (s.vocab_size, s.encoder_vocab_size) == (47, 61)
    assert (s.n_layers, s.n_encoder_layers) == (1, 3)
    assert "3 + 1 layers, width" in repr(estimate_costs(s))
    one = spec_from_config(Seq2SeqConfig(**SMALL))
    assert one.encoder_vocab_size is None
    assert f"\n{SMALL['n_layers']} layers, width" in repr(estimate_costs(one))
    tables = parameters_by_component(s)
    assert tables["token embedding"] == (47 + 61) * SMALL["d_model"]
    assert tables["output layer"] == 47 * SMALL["d_model"]


@pytest.mark.parametrize("shared", [True, False])
def test_two_stacks_of_marian_are_read(shared):
    config = transformers.MarianConfig(
        vocab_size=61,
        decoder_vocab_size=61 if shared else 47,
        d_model=32,
        encoder_layers=3,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_position_embeddings=16,
        pad_token_id=0,
        share_encoder_decoder_embeddings=shared,
    )
    with torch.device("meta"):
        model = transformers.MarianMTModel(config)
    sinusoids = sum(
        p.numel() for name, p in model.named_parameters() if "embed_positions" in name
    )
    predicted = total(parameters_by_component(spec_from_config(config, "Seq2Seq")))
    assert predicted == numel(model) - sinusoids


def test_both_libraries_describe_the_same_gpt2():
    assert estimate_costs(GPTConfig(), name="x") == estimate_costs(
        transformers.GPT2Config(), name="x"
    )
    ours = estimate_costs(BertConfig())
    theirs = estimate_costs(transformers.BertConfig())
    assert theirs.parameters - ours.parameters == 768 * 768 + 768  # pooler
    assert estimate_costs(BertConfig(), "bert").parameters == 109_482_240


def test_base_transformer_of_2017_is_63_million():
    c = estimate_costs(Seq2SeqConfig(vocab_size=37_000))
    assert c.parameters == 44_138_496 + 37_000 * 512
    bare = c.parameters - c.parameters_by_component()["token embedding"]
    assert bare == 44_138_496
    more = estimate_costs(Seq2SeqConfig(vocab_size=37_000, final_norm=True))
    assert more.parameters == c.parameters + 2 * 2 * 512


def test_two_thirds_of_a_layer_are_feed_forward():
    s = ModelSpec(vocab_size=1, d_model=512, n_layers=1, n_heads=8)
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048)
    assert parameters_by_component(s)["feed-forward"] == 2_099_712
    assert parameters_by_component(s)["attention"] == numel(layer.self_attn)
    assert round(2_099_712 / numel(layer), 6) == 0.666071


def test_weights_measured_in_bytes():
    model = own_models()["llama options"]
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        measured = sum(p.to(dtype).nbytes for p in model.parameters())
        assert weight_bytes(spec_from_config(model), dtype) == measured
    big = weight_bytes(spec_from_config(nemotron()))
    assert round(big / 1e9, 1) == 682.1


# ---- reading ------------------------------------------------------------


class Plain:
    "A configuration of nobody's, with some fields."

    def __init__(self, **fields):
        self.__dict__.update(fields)


def test_any_object_with_the_fields_is_read():
    theirs = Plain(model_type="llama", **GROUPED, max_position_embeddings=9)
    ours = Plain(**SMALL, d_ff=56, n_kv_heads=2, max_len=9)
    a = spec_from_config(theirs)
    b = spec_from_config(ours, family="llama")
    assert a.max_len == b.max_len == 9 and a.d_ff == b.d_ff == 56
    assert a.n_kv_heads == b.n_kv_heads == 2
    assert b.gated_ffn and b.norm_vectors == 1 and b.biases == ()


def test_transformers_is_not_needed():
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert "import transformers" not in source


class DerivedConfig(GPTConfig):
    pass


def test_a_derived_configuration_is_of_its_family():
    assert spec_from_config(DerivedConfig()) == spec_from_config(GPTConfig())


def test_a_family_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match=r"no family 'mamba'.*llama.*family="):
        spec_from_config(Plain(model_type="mamba", **GROUPED))
    with pytest.raises(ValueError, match="no family 'Plain'"):
        spec_from_config(Plain(**GROUPED))
    with pytest.raises(ValueError, match="no family 'lama'"):
        spec_from_config(LlamaConfig(**SMALL), family="lama")


@pytest.mark.parametrize(
    "thing", ["gpt2", {"vocab_size": 8}, None, torch.nn.Linear(2, 2)]
)
def test_what_is_no_configuration_is_refused_by_its_kind(thing):
    with pytest.raises(
        ValueError, match="expected the configuration.*got " + type(thing).__name__
    ):
        spec_from_config(thing)


def test_a_missing_number_is_named():
    fields = {
        k: v for k, v in GROUPED.items() if k not in ("hidden_size", "vocab_size")
    }
    with pytest.raises(ValueError, match="no vocab_size, no d_model"):
        spec_from_config(Plain(model_type="llama", **fields))
    with pytest.raises(ValueError, match="no max_len"):
        spec_from_config(Plain(**SMALL), family="gpt2")


@pytest.mark.parametrize(
    "field", ["num_local_experts", "num_experts", "n_routed_experts", "kv_lora_rank"]
)
def test_parts_that_are_not_counted_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} is 8"):
        spec_from_config(Plain(model_type="llama", **GROUPED, **{field: 8}))


def test_windows_are_read_layer_by_layer():
    t = transformers
    mistral = spec_from_config(t.MistralConfig(**GROUPED, sliding_window=7))
    assert (mistral.sliding_window, mistral.n_sliding_layers) == (7, 3)
    none = spec_from_config(t.MistralConfig(**GROUPED, sliding_window=None))
    assert (none.sliding_window, none.n_sliding_layers) == (None, 0)
    mixed = t.Gemma2Config(**GROUPED, sliding_window=7)
    n = mixed.layer_types.count("sliding_attention")
    assert 0 < n < 3
    assert spec_from_config(mixed).n_sliding_layers == n
    off = t.Qwen2Config(**GROUPED, use_sliding_window=False, sliding_window=7)
    assert spec_from_config(off).n_sliding_layers == 0
    for use, n in ((False, 0), (True, 3)):
        plain = Plain(
            model_type="qwen2", **GROUPED, sliding_window=7, use_sliding_window=use
        )
        assert spec_from_config(plain).n_sliding_layers == n


# ---- sizes --------------------------------------------------------------


def test_defaults_are_filled_in():
    s = sizes()
    assert (s.n_kv_heads, s.d_head, s.d_ff, s.ffn_saved_activations) == (4, 8, 128, 2)
    assert sizes(gated_ffn=True).ffn_saved_activations == 4
    assert sizes(n_heads=5, d_head=3).d_head == 3


@pytest.mark.parametrize(
    "fields, says",
    [
        (dict(vocab_size=0), "vocab_size .* 1, got 0"),
        (dict(d_model=0), "d_model .* got 0"),
        (dict(n_layers=-1), "n_layers .* got -1"),
        (dict(n_heads=0), "n_heads .* got 0"),
        (dict(n_heads=2.0), "n_heads .* got 2.0"),
        (dict(n_layers=True), "n_layers .* got True"),
        (dict(d_model="32"), "d_model .* got '32'"),
        (dict(n_kv_heads=0), "n_kv_heads .* got 0"),
        (dict(d_head=0), "d_head .* got 0"),
        (dict(d_ff=0), "d_ff .* got 0"),
        (dict(n_encoder_layers=-1), "n_encoder_layers .* 0, got -1"),
        (dict(n_encoder_layers=1, encoder_vocab_size=0), "encoder_vocab_size .* got 0"),
        (
            dict(encoder_vocab_size=50),
            "encoder_vocab_size is 50, .* n_encoder_layers is 0",
        ),
        (dict(n_position_embeddings=-1), "n_position_embeddings .* got -1"),
        (dict(n_kv_heads=3), "4 query heads cannot share 3"),
        (dict(n_kv_heads=8), "4 query heads cannot share 8"),
        (dict(n_heads=5), "d_model 32 is no multiple of n_heads 5"),
        (dict(sliding_window=0, n_sliding_layers=1), "sliding_window .* got 0"),
        (dict(sliding_window=4, n_sliding_layers=3), "3 of 2 layers"),
        (dict(n_sliding_layers=1), "1 of 2 layers cannot have the window None"),
        (dict(biases=("q",)), "biases are among"),
        (dict(max_len=0), "max_len .* 1, got 0"),
        (dict(norms_per_layer=-1), "norms_per_layer .* 0, got -1"),
        (dict(gated_ffn=1), "gated_ffn must be one of True, False, got 1"),
        (
            dict(tie_word_embeddings="no"),
            "tie_word_embeddings must be one of True, False, got 'no'",
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        sizes(**fields)


def test_numbers_of_numpy_neither_overflow_nor_stay():
    ours = spec_from_config(nemotron())
    theirs = dataclasses.replace(
        ours,
        **{
            f.name: np.int32(getattr(ours, f.name))
            for f in dataclasses.fields(ours)
            if type(getattr(ours, f.name)) is int
        },
    )
    assert theirs == ours
    assert all(
        type(getattr(theirs, f.name)) is type(getattr(ours, f.name))
        for f in dataclasses.fields(ours)
    )
    for n in (np.int32(4096), np.int64(4096)):
        assert forward_flops(ours, n, n) == forward_flops(ours, 4096, 4096) > 2**63
        assert kv_cache_bytes(ours, n, n) == kv_cache_bytes(ours, 4096, 4096)
        assert activation_bytes(ours, n, n) == activation_bytes(ours, 4096, 4096)
        assert decode_workload(ours, n, n) == decode_workload(ours, 4096, 4096)


def test_sizes_and_costs_are_frozen():
    for thing in (sizes(), estimate_costs(sizes()), ACCELERATORS["H100"], Work(1, 1)):
        name = dataclasses.fields(thing)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, name, 1)
    assert hash(sizes()) == hash(sizes())


# ---- FLOPs --------------------------------------------------------------


def counted(model, **inputs):
    with FlopCounterMode(display=False) as counter:
        model(**inputs)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "name",
    [
        "gpt2 inner",
        "gpt2 untied",
        "bert",
        "distilbert",
        "llama",
        "llama heads",
        "nemotron",
        "qwen3",
        "gpt_neox",
        "gpt1",
    ],
)
def test_flops_are_what_the_counter_counts(name):
    config, _ = known()[name]
    if name in ("llama", "nemotron"):
        config.num_hidden_layers = 3
    model = without_numbers(config)
    with torch.device("meta"):
        ids = torch.zeros(2, 24).long()
        mask = torch.zeros(2, 1, 24, 24)
    if name == "gpt1":
        mask = torch.ones(2, 24, device="meta")
    if name == "distilbert":
        mask = None
    got = counted(model, input_ids=ids, attention_mask=mask)
    assert got == forward_flops(spec_from_config(config), 24, 2)


def explicit(model):
    "The model without fused kernels, which the counter does not see."
    for part in model.modules():
        if hasattr(part, "fused"):
            part.fused = False
    return model.eval()


@pytest.mark.parametrize("name", ["gpt", "gpt1", "llama options", "qwen3"])
def test_flops_of_our_models_cached_and_not(name):
    model = explicit(own_models()[name])
    ids = torch.zeros(3, 10).long()
    cache = model.new_cache(3)
    s = spec_from_config(model)
    assert counted(model, ids=ids) == forward_flops(s, 10, 3)
    assert counted(model, ids=ids[:, :6], cache=cache) == forward_flops(s, 6, 3)
    for past in (6, 7):
        step = counted(model, ids=ids[:, :1], cache=cache)
        assert step == forward_flops(s, 1, 3, past_tokens=past)
    assert (
        forward_flops(s, 3, past_tokens=7)
        == forward_flops(s, 3, past_tokens=7, batch_size=4) // 4
    )


@two_stacks
def test_flops_of_an_encoder_decoder(name):
    model = explicit(own_models()[name])
    s = spec_from_config(model)
    source = torch.ones(2, 9).long()
    with FlopCounterMode(display=False) as counter:
        states = model.encode(source)
        model(source[:, :5], encoder_hidden_states=states)
    assert counter.get_total_flops() == forward_flops(s, 5, 2, source_tokens=9)
    cache = model.new_cache(2)
    model(source[:, :5], encoder_hidden_states=states, cache=cache)
    with FlopCounterMode(display=False) as counter:
        model(source[:, :1], encoder_hidden_states=states, cache=cache)
    assert counter.get_total_flops() == forward_flops(
        s, 1, 2, past_tokens=5, source_tokens=9
    )


def test_flops_of_bert():
    model = explicit(own_models()["bert"])
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(3, 10).long())
    assert counter.get_total_flops() == forward_flops(spec_from_config(model), 10, 3)


@pytest.mark.parametrize(
    "window, n_sliding", [(None, 0), (4, 2), (4, 1), (1, 1), (50, 2)]
)
@pytest.mark.parametrize("tokens, past", [(1, 0), (7, 0), (1, 9), (3, 2)])
def test_pairs_that_a_mask_allows_one_by_one(tokens, past, window, n_sliding):
    s = sizes(sliding_window=window, n_sliding_layers=n_sliding)
    by_hand = 0
    for layer in range(2):
        seen = window if layer < n_sliding else math.inf
        for query in range(past, past + tokens):
            by_hand += sum(
                key <= query and query - key < seen for key in range(past + tokens)
            )
    parts = flops_by_component(s, tokens, past_tokens=past, skip_masked=True)
    assert parts["pairs"] == 4 * 32 * by_hand
    all_pairs = flops_by_component(s, tokens, past_tokens=past)["pairs"]
    assert all_pairs == 4 * 32 * 2 * tokens * (past + tokens)


def test_nothing_is_skipped_where_nothing_is_masked():
    s = sizes(causal=False)
    assert forward_flops(s, 9, skip_masked=True) == forward_flops(s, 9)


def test_training_is_three_forward_passes():
    model = explicit(own_models()["gpt"])
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 8).long()).sum().backward()
    s = spec_from_config(model)
    assert counter.get_total_flops() == 3 * forward_flops(s, 8, 2)
    assert training_flops(s, 16, seq_len=8) == 3 * forward_flops(s, 8, 2)
    both = spec_from_config(own_models()["seq2seq"])
    assert training_flops(both, 16, 8) == 3 * forward_flops(both, 8, 2, source_tokens=8)


def test_llama_405b_trained_as_reported():
    "Grattafiori et al. (2024): 15.6T tokens, 3.8e25 FLOPs."
    s = spec_from_config(
        transformers.LlamaConfig(
            vocab_size=128_256,
            hidden_size=16_384,
            intermediate_size=53_248,
            num_hidden_layers=126,
            num_attention_heads=128,
            num_key_value_heads=8,
        )
    )
    n = total(parameters_by_component(s))
    assert n == 405_853_388_800
    assert abs(6 * n * 15.6e12 / 3.8e25 - 1) < 0.005
    assert abs(training_flops(s, 15.6e12, 8192) / 3.8e25 - 1) < 0.1


def test_nemotron_attention_overtakes_at_53760():
    s = spec_from_config(nemotron())
    assert attention_ffn_crossover(s) == 53_760

    def ratio(n, skip=False):
        p = flops_by_component(s, n, skip_masked=skip)
        return (p["projections"] + p["pairs"]) / p["feed-forward"]

    assert round(ratio(4096), 6) == 0.326389
    assert round(ratio(131_072), 6) == 2.048611
    assert abs(ratio(4096, True) - 0.298611) < 1e-5  # causal
    assert abs(ratio(131_072, True) - 1.159722) < 1e-5
    pairs_alone = flops_by_component(s, 73_728)
    assert pairs_alone["pairs"] == pairs_alone["feed-forward"]


def test_crossover_of_other_models():
    assert attention_ffn_crossover(spec_from_config(transformers.GPT2Config())) == 1536
    assert attention_ffn_crossover(spec_from_config(llama_8b())) == 16_384
    assert attention_ffn_crossover(sizes(d_ff=1)) < 0


@pytest.mark.parametrize(
    "how, says",
    [
        (dict(seq_len=0), "seq_len .* 1, got 0"),
        (dict(seq_len=1.5), "seq_len .* got 1.5"),
        (dict(seq_len=2.0), "seq_len .* got 2.0"),
        (dict(seq_len=True), "seq_len .* got True"),
        (dict(seq_len=1, batch_size=0), "batch_size .* got 0"),
        (dict(seq_len=1, past_tokens=-1), "past_tokens .* got -1"),
        (dict(seq_len=1, source_tokens=-1), "source_tokens .* got -1"),
        (dict(seq_len=1, source_tokens=3), "source_tokens is 3, but model"),
    ],
)
def test_tokens_that_cannot_be_are_refused(how, says):
    with pytest.raises(ValueError, match=says):
        forward_flops(sizes(), **how)


def test_an_encoder_has_no_past():
    with pytest.raises(ValueError, match="past_tokens is 4"):
        forward_flops(sizes(causal=False), 1, past_tokens=4)


def test_forward_flops_has_every_parameter_of_its_parts():
    whole, parts = (
        inspect.signature(f).parameters for f in (forward_flops, flops_by_component)
    )
    assert [*whole.values()] == [*parts.values()]
    s = sizes(n_encoder_layers=2, sliding_window=2, n_sliding_layers=1)
    plain = flops_by_component(s, 5, 3)
    for option in (dict(past_tokens=4), dict(source_tokens=7), dict(skip_masked=True)):
        counted = flops_by_component(s, 5, 3, **option)
        assert forward_flops(s, 5, 3, **option) == total(counted) != total(plain)


def test_every_public_function_names_its_parameters():
    for name in module.__all__:
        if inspect.isfunction(function := getattr(module, name)):
            for parameter in inspect.signature(function).parameters.values():
                assert parameter.kind not in (
                    inspect.Parameter.VAR_POSITIONAL,
                    inspect.Parameter.VAR_KEYWORD,
                ), f"{name}: {parameter}"


# ---- memory of training -------------------------------------------------


@pytest.mark.parametrize(
    "name, make",
    [
        ("adamw", torch.optim.AdamW),
        ("momentum", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1)),
    ],
)
def test_state_is_what_an_optimizer_keeps(name, make):
    model = own_models()["gpt"]
    optimizer = make(model.parameters())
    model(torch.zeros(1, 8).long()).sum().backward()
    optimizer.step()
    parts = training_state_by_component(spec_from_config(model), name, torch.float32)
    assert parts["weights"] == sum(p.nbytes for p in model.parameters())
    assert parts["gradients"] == sum(p.grad.nbytes for p in model.parameters())
    kept = sum(
        t.nbytes
        for state in optimizer.state.values()
        for t in state.values()
        if torch.is_tensor(t) and t.ndim
    )
    assert parts.get("optimizer", 0) == kept
    assert "float32 copy" not in parts


def test_adamw_takes_16_bytes_either_way():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        s = sizes()
        n = total(parameters_by_component(s))
        assert total(training_state_by_component(s, dtype=dtype)) == 16 * n
    mixed = training_state_by_component(sizes())
    assert mixed["weights"] == mixed["gradients"] == 2 * n
    assert mixed["float32 copy"] == 4 * n and mixed["optimizer"] == 8 * n
    assert total(training_state_by_component(sizes(), "sgd")) == 8 * n
    with pytest.raises(
        ValueError,
        match="optimizer must be one of 'sgd', 'momentum', 'adamw', got 'adagrad'",
    ):
        training_state_by_component(sizes(), "adagrad")


def kept_bytes(model, *inputs, **more):
    "What the forward pass and the loss keep, each memory once."
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found = {}

    def keep(t):
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    ids = inputs[-1]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = model(*inputs, **more)
        loss = F.cross_entropy(out.flatten(0, 1), ids.flatten())
    assert loss.isfinite()
    return sum(n for at, n in found.items() if at not in weights)


WIDE = dict(vocab_size=301, d_model=64, n_layers=3, n_heads=4)


def test_activations_are_what_autograd_keeps():
    ids = torch.randint(301, (3, 96), generator=torch.Generator().manual_seed(0))
    gpt = GPT(GPTConfig(**WIDE, max_len=96, dropout=0.0))
    llama = Llama(LlamaConfig(**WIDE, n_kv_heads=2, d_head=24))
    for model, high in ((gpt, 1.04), (llama, 1.3)):
        said = activation_bytes(spec_from_config(model), 96, 3, torch.float32)
        assert 1 <= kept_bytes(model, ids) / said < high
    said = activation_bytes(spec_from_config(gpt), 96, 3, torch.float32, fused=False)
    assert 1 <= kept_bytes(explicit(gpt).train(), ids) / said < 1.1


@pytest.mark.parametrize(
    "own",
    [{}, dict(n_decoder_layers=1, decoder_vocab_size=350, tie_word_embeddings=False)],
)
def test_activations_with_relu_and_memory(own):
    model = Seq2Seq(Seq2SeqConfig(**WIDE, d_ff=256, dropout=0.0, **own))
    ids = torch.randint(1, 301, (2, 40), generator=torch.Generator().manual_seed(0))
    said = activation_bytes(spec_from_config(model), 40, 2, torch.float32)
    whole = kept_bytes(lambda_model(model), ids)
    assert 0.95 < whole / said < 1.1


def lambda_model(model):
    "Encode and decode the same tokens."

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, ids):
            return self.model(ids, encoder_hidden_states=self.model.encode(ids))

    return Both()


def test_activations_grow_as_they_should():
    s = sizes()
    assert activation_bytes(s, 8, 6) == 6 * activation_bytes(s, 8)
    assert activation_bytes(s, 16) == 2 * activation_bytes(s, 8)
    tables = [
        activation_bytes(s, n, fused=False) - activation_bytes(s, n) for n in (8, 16)
    ]
    assert tables[0] == 2 * 2 * 4 * 8 * 8 * 2  # layers, twice, heads, t²
    assert tables[1] == 4 * tables[0]
    fewer = dataclasses.replace(s, n_kv_heads=1)
    saved = 2 * 8 * 2 * (4 - 1) * 8 * 2  # layers, tokens, K and V
    assert activation_bytes(s, 8) - activation_bytes(fewer, 8) == saved
    plain = dataclasses.replace(s, final_norms=0)
    assert activation_bytes(s, 8) - activation_bytes(plain, 8) == 2 * 8 * 32 * 2
    top = 4 * 8 * 50
    half, full = (
        activation_bytes(s, 8, dtype=d) - top for d in (torch.bfloat16, torch.float32)
    )
    assert full == 2 * half
    assert (
        activation_bytes(s, 8)
        - activation_bytes(dataclasses.replace(s, has_lm_head=False), 8)
        == top
    )


def test_training_needs_state_and_activations():
    s = sizes()
    for optimizer in ("adamw", "sgd"):
        for dtype in (torch.bfloat16, torch.float32):
            for fused in (True, False):
                state = training_state_by_component(s, optimizer, dtype)
                assert training_bytes(s, 8, 3, optimizer, dtype, fused=fused) == total(
                    state
                ) + activation_bytes(s, 8, 3, dtype, fused=fused)


# ---- KV cache -----------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "gpt1", "llama", "llama options", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_measured_in_bytes(name, dtype):
    model = own_models()[name].to(dtype).eval()
    cache = model.new_cache(3)
    with torch.no_grad():
        model(torch.zeros(3, 7).long(), cache=cache)
    assert cache.nbytes == kv_cache_bytes(spec_from_config(model), 7, 3, dtype)


@two_stacks
def test_cache_of_an_encoder_decoder_keeps_the_memory_too(name):
    model = own_models()[name].eval()
    source = torch.ones(2, 9).long()
    cache = model.new_cache(2)
    with torch.no_grad():
        model(source[:, :4], encoder_hidden_states=model.encode(source), cache=cache)
    s = spec_from_config(model)
    assert cache.nbytes == kv_cache_bytes(s, 4, 2, torch.float32, source_tokens=9)


def test_cache_of_transformers_in_bytes():
    config = transformers.LlamaConfig(**GROUPED)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        out = model(torch.zeros(3, 7).long(), use_cache=True)
    measured = sum(
        t.nbytes
        for layer in out.past_key_values.layers
        for t in (layer.keys, layer.values)
    )
    assert kv_cache_bytes(spec_from_config(config), 7, 3, torch.float32) == measured


def test_nemotron_cache_is_27_gib_as_mha_and_a_twelfth_in_fact():
    s = spec_from_config(nemotron())
    mha = dataclasses.replace(s, n_kv_heads=96)
    assert kv_cache_bytes(mha, 4096) == 27 * 2**30 == 28_991_029_248
    assert kv_cache_bytes(s, 4096) == 2.25 * 2**30
    assert format_quantity(kv_cache_bytes(mha, 4096)) == "29.0 GB = 27.0 GiB"


def test_a_window_bounds_the_cache():
    s = sizes(sliding_window=4, n_sliding_layers=1)
    each = 2 * 32 * 2  # K and V, width, bytes
    assert kv_cache_bytes(s, 3) == 2 * 3 * each
    assert kv_cache_bytes(s, 4) == 2 * 4 * each
    assert kv_cache_bytes(s, 100) == (100 + 4) * each
    assert kv_cache_bytes(s, 100, 5) == 5 * (100 + 4) * each


def test_an_encoder_keeps_no_cache():
    s = sizes(causal=False)
    assert kv_cache_bytes(s, 9) == 0
    with pytest.raises(ValueError, match="causal is False"):
        max_batch_size(s, ACCELERATORS["H100"], 9)
    with pytest.raises(ValueError, match=r"past_tokens is 9.*not causal"):
        decode_workload(s, 9)


# ---- work on cards ------------------------------------------------------


def test_roofline_by_hand():
    card = Accelerator("toy", memory_bytes=100, bandwidth=10, flops=40)
    assert card.ridge_point == 4
    low = Work(20, 10)
    high = Work(80, 10)
    assert low.arithmetic_intensity == 2 and high.arithmetic_intensity == 8
    assert card.min_seconds(low) == 1.0 and card.bottleneck(low) == "memory"
    assert card.min_seconds(high) == 2.0 and card.bottleneck(high) == "compute"
    assert card.bottleneck(Work(40, 10)) == "compute"  # both
    assert low + high == Work(100, 20)
    assert repr(Work(2e9, 2048)) == "2.00 GFLOP, 2.05 kB = 2.00 KiB"


@pytest.mark.parametrize("name", ["memory_bytes", "bandwidth", "flops"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, True, "1e12"])
def test_a_card_without_speed_is_refused(name, value):
    good = dict(name="x", memory_bytes=1, bandwidth=1, flops=1)
    with pytest.raises(ValueError, match=f"{name} must be above 0, got"):
        Accelerator(**{**good, name: value})


@plain_only
@pytest.mark.parametrize(
    "call",
    [
        lambda dtype: weight_bytes(sizes(), dtype),
        lambda dtype: kv_cache_bytes(sizes(), 4, dtype=dtype),
        lambda dtype: kv_cache_bytes(sizes(causal=False), 4, dtype=dtype),
        lambda dtype: activation_bytes(sizes(), 4, dtype=dtype),
        lambda dtype: training_bytes(sizes(), 4, dtype=dtype),
        lambda dtype: decode_workload(sizes(), 4, dtype=dtype),
        lambda dtype: prefill_workload(sizes(), 4, dtype=dtype),
    ],
)
def test_a_type_by_its_name_is_refused(call):
    assert call(torch.bfloat16) is not None
    with pytest.raises(ValueError, match=r"got 'bfloat16': write torch\.bfloat16"):
        call("bfloat16")


def test_cards_are_those_of_the_data_sheets():
    numbers = {
        name: (c.memory_bytes / 1e9, c.bandwidth / 1e9, c.flops / 1e12)
        for name, c in ACCELERATORS.items()
    }
    assert numbers == {
        "RTX 4090": (24, 1008, 165.2),
        "A100 40GB": (40, 1555, 312),
        "A100 80GB": (80, 2039, 312),
        "H100": (80, 3350, 989),
        "H200": (141, 4800, 989),
    }
    assert all(c.name == name for name, c in ACCELERATORS.items())


def test_a_step_reads_each_weight_once():
    s = sizes(tie_word_embeddings=True)
    matrices = sum(
        p.numel()
        for name, p in GPT(GPTConfig(**SMALL)).named_parameters()
        if p.ndim == 2 and "embed_positions" not in name
    )
    for batch in (1, 5):
        work = decode_workload(s, 9, batch)
        assert work.nbytes == 2 * matrices + kv_cache_bytes(s, 10, batch)
        assert work.flops == forward_flops(s, 1, batch, past_tokens=9)
    untied = decode_workload(dataclasses.replace(s, tie_word_embeddings=False), 9)
    assert untied == decode_workload(s, 9)  # the table is looked up only
    single = decode_workload(s, 9, dtype=torch.float32)
    assert single.nbytes == 2 * decode_workload(s, 9).nbytes


def test_a_step_of_an_encoder_decoder_leaves_the_encoder_alone():
    s = sizes(n_encoder_layers=2)
    work = decode_workload(s, 9, 3, source_tokens=6)
    assert work.flops == forward_flops(s, 1, 3, past_tokens=9, source_tokens=6)
    # W_Q, W_O twice, W_K, W_V once, feed-forward; the output layer
    matrices = 2 * (6 * 32 * 32 + 8 * 32 * 32) + 50 * 32
    assert work.nbytes == 2 * matrices + kv_cache_bytes(s, 10, 3, source_tokens=6)


def test_a_window_bounds_a_step():
    s = sizes(sliding_window=4, n_sliding_layers=2)
    assert decode_workload(s, 50) == decode_workload(s, 500)
    assert decode_workload(s, 2).flops < decode_workload(s, 50).flops


def test_intensity_is_the_batch_and_pairs_are_shared_by_heads():
    s = spec_from_config(llama_8b())
    for batch in (1, 16):
        work = decode_workload(s, 1, batch)
        assert abs(work.arithmetic_intensity / batch - 1) < 0.01
    long = [decode_workload(s, n) for n in (10**6, 2 * 10**6)]
    more = Work(long[1].flops - long[0].flops, long[1].nbytes - long[0].nbytes)
    assert more.arithmetic_intensity == 32 / 8


def test_llama_8b_writes_223_tokens_a_second_on_an_h100():
    c = estimate_costs(llama_8b())
    h100 = ACCELERATORS["H100"]
    assert 222 < 1 / c.decode_step_seconds(h100, 1) < 224
    assert c.decode_step_seconds(h100, 9, 3) == h100.min_seconds(
        decode_workload(c, 9, 3)
    )
    assert c.decode_step_seconds(
        h100, 9, dtype=torch.float32
    ) > 1.9 * c.decode_step_seconds(h100, 9)


def test_a_prompt_reads_each_weight_once():
    s = sizes()
    step = decode_workload(s, 1).nbytes - kv_cache_bytes(s, 2)
    for tokens, batch in ((1, 1), (9, 1), (9, 4)):
        work = prefill_workload(s, tokens, batch)
        assert work.nbytes == step + kv_cache_bytes(s, tokens, batch)
        assert work.flops == forward_flops(s, tokens, batch, skip_masked=True)
    h100 = ACCELERATORS["H100"]
    llama = spec_from_config(llama_8b())
    assert h100.bottleneck(prefill_workload(llama, 2048)) == "compute"
    assert h100.bottleneck(decode_workload(llama, 2048)) == "memory"


def test_a_step_continues_something():
    with pytest.raises(ValueError, match=r"past_tokens must be .* 1, got 0"):
        decode_workload(sizes(), 0)


def test_max_batch_is_the_largest_that_fits():
    s = spec_from_config(llama_8b())
    card = ACCELERATORS["H100"]
    n = max_batch_size(s, card, 2048)
    assert n == 238
    weights = weight_bytes(s)
    assert weights + kv_cache_bytes(s, 2048, n) <= card.memory_bytes
    assert weights + kv_cache_bytes(s, 2048, n + 1) > card.memory_bytes
    assert max_batch_size(spec_from_config(nemotron()), card, 1) == 0
    assert max_batch_size(s, card, 2048, torch.float32) < n / 2


def test_training_time_is_flops_by_speed():
    s = sizes()
    card = Accelerator("toy", 1, 1, 1e6)
    one = training_seconds(s, 1000, card, seq_len=10, mfu=1.0)
    assert one == pytest.approx(training_flops(s, 1000, 10) / 1e6)
    assert training_seconds(s, 1000, card, 4, seq_len=10) == pytest.approx(
        one / 4 / 0.4
    )
    for bad in (0, -0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=f"mfu.*got {bad}"):
            training_seconds(s, 1, card, mfu=bad)
    with pytest.raises(ValueError, match=r"num_accelerators must be .* 1, got 0"):
        training_seconds(s, 1, card, 0)
    with pytest.raises(ValueError, match=r"seq_len must be .* 1, got 0"):
        training_seconds(s, 1, card, seq_len=0)


# ---- the table ----------------------------------------------------------


@pytest.mark.parametrize(
    "n, unit, says",
    [
        (0, "B", "0 B"),
        (1, "B", "1 B"),
        (999, "B", "999 B"),
        (1000, "B", "1.00 kB"),
        (1024, "B", "1.02 kB = 1.00 KiB"),
        (2**30, "B", "1.07 GB = 1.00 GiB"),
        (80e9, "B", "80.0 GB = 74.5 GiB"),
        (999_600, "", "1.00 M"),
        (999_400, "", "999 k"),
        (12_345, "", "12.3 k"),
        (9.996, "s", "10.0 s"),
        (9.99, "s", "9.99 s"),
        (99.96, "s", "100 s"),
        (1.5, "s", "1.50 s"),
        (0, "s", "0 s"),
        (1, "s", "1 s"),
        # below one: what is measured has prefixes, what is counted has none
        (0.0042, "s", "4.20 ms"),
        (4.2e-6, "s", "4.20 µs"),
        (42e-9, "s", "42.0 ns"),
        (420e-12, "J", "420 pJ"),
        (0.9996, "s", "1.00 s"),
        (0.9994, "s", "999 ms"),
        (0.5, "s", "500 ms"),
        (9.994e-4, "s", "999 µs"),
        (9.996e-4, "s", "1.00 ms"),
        (1e-18, "s", "0.00100 fs"),
        (0.5, "B", "0.500 B"),
        (0.0042, "FLOP", "0.00420 FLOP"),
        (0.25, "", "0.250"),
        # beyond exa
        (3.14e23, "FLOP", "314 ZFLOP"),
        (3.8e25, "FLOP", "38.0 YFLOP"),
        (9.996e20, "FLOP", "1.00 ZFLOP"),
        (38 * 10**24, "", "38.0 Y"),
        (3.8e28, "FLOP", "38000 YFLOP"),
        (2**70, "B", "1.18 ZB = 1.00 ZiB"),
        (2**80, "B", "1.21 YB = 1.00 YiB"),
    ],
)
def test_readable(n, unit, says):
    assert format_quantity(n, unit) == says


def test_table_of_llama_8b_line_by_line():
    text = repr(estimate_costs(llama_8b(), name="Llama 3 8B"))
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["Llama", "3", "8B"]
    assert text.splitlines()[1] == ("32 layers, width 4,096, 32 heads, 8 of keys")
    for line in (
        "parameters 8,030,261,248",
        "feed-forward 5,637,144,576 70.2%",
        "weights, bfloat16 16.1 GB = 15.0 GiB",
        "training state, AdamW 128 GB = 120 GiB",
        "KV cache, a token 131 kB = 128 KiB",
        "KV cache, 8,192 tokens 1.07 GB = 1.00 GiB",
        "forward, a token 15.0 GFLOP",
        "and for each key 524 kFLOP",
        "training, 8,192 tokens 474 TFLOP",
        "attention = feed-forward 16,384 tokens",
    ):
        assert line.split() in lines, line
    assert max(map(len, text.splitlines())) <= 48


def test_table_of_an_encoder_decoder_counts_both_stacks():
    c = estimate_costs(Seq2SeqConfig(vocab_size=37_000))
    lines = [line.split() for line in repr(c).splitlines()]
    parts = c.flops_by_component(512, source_tokens=512)
    pairs = parts.pop("pairs")
    for line in (
        "KV cache, 512 tokens "
        + format_quantity(c.kv_cache_bytes(512, source_tokens=512)),
        "forward, a token " + format_quantity(total(parts) / 512, "FLOP"),
        "and for each key " + format_quantity(pairs / 512**2, "FLOP"),
        "training, 512 tokens "
        + format_quantity(3 * c.forward_flops(512, source_tokens=512), "FLOP"),
    ):
        assert line.split() in lines, line


@pytest.mark.parametrize("name", own_models())
def test_every_model_has_a_table(name):
    c = estimate_costs(own_models()[name], name=name)
    text = str(c)
    depth = 2 if c.n_encoder_layers in (0, 2) else "3 + 1"
    assert text.startswith(f"{name}\n{depth} layers, width 32, 4 heads")
    assert f"{c.parameters:,}" in text
    assert ("KV cache" in text) == c.causal
    assert "GiB" in text or "KiB" in text


def test_costs_are_sizes_with_the_functions_as_methods():
    s = sizes(n_kv_heads=2)
    c = estimate_costs(s, name="mine")
    assert isinstance(c, ModelCosts) and isinstance(c, ModelSpec)
    assert c.name == "mine" and estimate_costs(s).name == "model"
    card = ACCELERATORS["A100 80GB"]
    for name, args in dict(
        parameters_by_component=(),
        weight_bytes=(),
        flops_by_component=(3,),
        forward_flops=(3, 2),
        attention_ffn_crossover=(),
        training_flops=(64, 8),
        training_state_by_component=("sgd",),
        activation_bytes=(5, 2),
        kv_cache_bytes=(7, 3),
        training_bytes=(5, 2),
        decode_workload=(5, 2),
        prefill_workload=(5,),
        max_batch_size=(card, 5),
        training_seconds=(1e6, card),
    ).items():
        assert getattr(c, name)(*args) == getattr(module, name)(s, *args)
    fewer = dataclasses.replace(c, n_kv_heads=1)
    assert isinstance(fewer, ModelCosts)
    assert 2 * fewer.kv_cache_bytes(7) == c.kv_cache_bytes(7)
    assert "8 of keys" not in repr(estimate_costs(sizes()))


def test_the_counter_does_not_see_the_fused_kernel_of_the_cpu():
    "If this fails, PyTorch has learned it: change the text of chapter 14."
    layer = SelfAttention(64, 4, causal=True)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.zeros(1, 50, 64))
    s = ModelSpec(vocab_size=1, d_model=64, n_layers=1, n_heads=4)
    assert counter.get_total_flops() == flops_by_component(s, 50)["projections"]


@pytest.mark.gpu
def test_memory_of_a_card_by_its_own_books():
    model = Llama(LlamaConfig(vocab_size=512, d_model=256, n_layers=4, n_heads=4)).to(
        "cuda", torch.bfloat16
    )
    c = estimate_costs(model)
    ids = torch.zeros(4, 128, dtype=torch.long, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    cache = model.new_cache(4)
    with torch.no_grad():
        model(ids, cache=cache)
    assert cache.nbytes == c.kv_cache_bytes(128, 4)
    kept = torch.cuda.memory_allocated() - before
    assert c.kv_cache_bytes(128, 4) <= kept < 2 * c.kv_cache_bytes(128, 4) + 4 * 2**20


def hf_llama():
    from transformers import LlamaConfig as HFLlamaConfig

    return HFLlamaConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4)


def test_a_dict_counts_as_the_configuration_that_it_came_from():
    assert spec_from_config(hf_llama().to_dict()) == spec_from_config(hf_llama())
    with pytest.raises(
        ValueError, match="no family 'dict'; if it is built like one of"
    ):
        spec_from_config({"hidden_size": 8})
    with pytest.raises(ValueError, match="no n_heads under any known name"):
        spec_from_config(
            {"model_type": "llama", "vocab_size": 9, "n_layers": 1, "d_model": 8}
        )


def test_the_command_prints_the_table(tmp_path, capsys):
    hf_llama().save_pretrained(tmp_path)
    for argument in (tmp_path, tmp_path / "config.json"):
        assert module.main([str(argument)]) == 0
        out, err = capsys.readouterr()
        table = repr(estimate_costs(hf_llama(), name=tmp_path.name))
        assert (out, err) == (f"{table}\n", "")


@pytest.mark.parametrize(
    "text, says",
    [
        (None, "No such file"),
        ("{", "Expecting"),
        ("[]", "expected the configuration of a Transformer"),
        ('{"model_type": "mamba"}', "no family 'mamba'"),
    ],
)
def test_the_command_says_what_is_wrong_with_a_file(tmp_path, capsys, text, says):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert module.main([str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"tformer.costs: {path}: ") and says in err
    assert err.count("\n") == 1


def test_the_command_is_no_silence():
    "What `python -m tformer.costs` once printed was nothing, with status 0."
    for args, status in (([], 2), (["a", "b"], 2), (["--help"], 0)):
        done = subprocess.run(
            [sys.executable, "-m", "tformer.costs", *args],
            text=True,
            capture_output=True,
            check=False,
        )
        assert done.returncode == status
        assert (done.stdout + done.stderr).strip() == module.USAGE
