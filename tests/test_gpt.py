"""GPT-1 and GPT-2 against transformers, and GPT-2's own files."""

import dataclasses
import inspect
import json
import math
import pydoc
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from helpers import close, draw_ids, padded, randn, spread
from tformer import check
from tformer.models import gpt
from tformer.models.gpt import (
    GPT,
    GPT1,
    GPTConfig,
    config_from_gpt2,
    load_gpt2_tensors,
    read_gpt2_tensors,
    to_gpt2_name,
    token_log_probs,
)
from tformer.models.mini_gpt import next_token_loss
from tformer.nn.layers import PostNorm, PreNorm

warnings.filterwarnings("ignore", message="IProgress not found")
import transformers  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

both = pytest.mark.parametrize("kind", [GPT, GPT1])
CONFIG = GPTConfig(
    vocab_size=61, d_model=32, n_layers=2, n_heads=4, max_len=40, dropout=0.0
)


def model(kind=GPT, **changes):
    return spread(kind(dataclasses.replace(CONFIG, **changes)))


def some_ids(b=3, t=12):
    return draw_ids(b, t, high=61)


def theirs_gpt2(**options):
    options = (
        dict(
            vocab_size=61,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=40,
            bos_token_id=None,
            eos_token_id=None,
        )
        | options
    )
    return spread(transformers.GPT2LMHeadModel(transformers.GPT2Config(**options)))


def theirs_gpt1():
    return spread(
        transformers.OpenAIGPTLMHeadModel(
            transformers.OpenAIGPTConfig(
                vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=40
            )
        )
    )


def ours_gpt1(theirs):
    ours = GPT1(CONFIG).eval()
    load_gpt2_tensors(
        ours,
        {
            name.removeprefix("transformer.")
            .replace("tokens_embed", "wte")
            .replace("positions_embed", "wpe"): x
            for name, x in theirs.state_dict().items()
            if not name.endswith((".attn.bias", "position_ids"))
        },
    )
    return ours


def pair(kind, tmp_path):
    "A model of ours and its twin, with equal weights."
    if kind is GPT1:
        theirs = theirs_gpt1()
        return ours_gpt1(theirs), theirs
    theirs = theirs_gpt2()
    theirs.save_pretrained(tmp_path / "gpt2")
    return GPT.from_gpt2(tmp_path / "gpt2"), theirs


# parity


@both
def test_values_equal_transformers(kind, tmp_path):
    ours, theirs = pair(kind, tmp_path)
    close(ours(some_ids()), theirs(some_ids()).logits)
    check.same(ours, theirs, 61)


def test_gpt2_equals_transformers(tmp_path):
    ours, theirs = pair(GPT, tmp_path)
    close(ours(some_ids()), theirs(some_ids()).logits)


def test_gpt1_equals_transformers():
    theirs = theirs_gpt1()
    close(ours_gpt1(theirs)(some_ids()), theirs(some_ids()).logits)


@both
def test_gradients_equal_transformers(kind, tmp_path):
    ours, theirs = pair(kind, tmp_path)
    slope = randn(3, 12, 61, seed=5)
    (ours(some_ids()) * slope).sum().backward()
    (theirs(some_ids()).logits * slope).sum().backward()
    grads = {
        n.removeprefix("transformer.")
        .replace("tokens_embed", "wte")
        .replace("positions_embed", "wpe"): p.grad
        for n, p in theirs.named_parameters()
    }
    for name, p in ours.named_parameters():
        there = grads[to_gpt2_name(name)]
        close(p.grad, there.T if ".c_" in to_gpt2_name(name) and p.ndim == 2 else there)


def test_padded_batches_equal_transformers(tmp_path):
    ours, theirs = pair(GPT, tmp_path)
    positions = padded()
    ids = some_ids()
    live = positions >= 0
    right = theirs(
        ids, attention_mask=live.long(), position_ids=positions.clamp(min=0)
    ).logits
    got = ours(ids, positions=positions)
    close(got[live], right[live])
    slope = randn(3, 12, 61)[live]
    (got[live] * slope).sum().backward()
    (right[live] * slope).sum().backward()
    close(
        ours.blocks[0].attention.sublayer.qkv_proj.weight.grad,
        theirs.transformer.h[0].attn.c_attn.weight.grad.T,
    )
    close(ours.embed_positions.weight.grad[1:], theirs.transformer.wpe.weight.grad[1:])
    assert ours(ids, positions=positions).isfinite().all()


def test_positions_continue_with_a_cache():
    ours = model()
    ids = some_ids(2)
    cache = ours.new_cache(2)
    parts = [ours(x, cache=cache) for x in ids.split(1, 1)]
    close(torch.cat(parts, 1), ours(ids))


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_checks_pass(kind, dtype):
    ours = spread(kind(CONFIG), 0.3)  # far above the rounding of bfloat16
    assert check.run_all(ours.to(dtype), 61)


def test_a_callers_mask_is_joined():
    ours = model()
    ids = some_ids()
    two = torch.arange(12) // 6  # two documents
    mask = (two[:, None] == two)[None, None]
    positions = (torch.arange(12) % 6)[None]
    got = ours(ids, mask=mask, positions=torch.arange(12)[None])
    other = ids.clone()
    other[:, :6] = (ids[:, :6] + 1) % 61
    close(ours(other, mask=mask, positions=torch.arange(12)[None])[:, 6:], got[:, 6:])
    close(
        ours(ids, mask=mask, positions=torch.arange(12)[None])[:, :6], ours(ids[:, :6])
    )
    assert positions.max() == 5


# wiring


def test_gpt2_is_pre_norm_with_a_final_norm():
    ours = model()
    assert all(
        type(part) is PreNorm
        for b in ours.blocks
        for part in (b.attention, b.feed_forward)
    )
    x = randn(1, 4, 32)
    block = ours.blocks[0]
    y = x + block.attention.sublayer(block.attention.norm(x))
    close(block(x), y + block.feed_forward.sublayer(block.feed_forward.norm(y)))
    assert isinstance(ours.norm, nn.Module) and len(list(ours.norm.parameters())) == 2


def test_gpt1_is_post_norm_without_a_final_norm():
    ours = model(GPT1)
    assert all(
        type(part) is PostNorm
        for b in ours.blocks
        for part in (b.attention, b.feed_forward)
    )
    assert not list(ours.norm.parameters())
    x = randn(1, 4, 32)
    block = ours.blocks[0]
    y = block.attention.norm(x + block.attention.sublayer(x))
    close(block(x), block.feed_forward.norm(y + block.feed_forward.sublayer(y)))


def test_the_head_is_the_table():
    for kind in (GPT, GPT1):
        ours = model(kind)
        assert ours.lm_head.weight is ours.embed.weight
        assert ours.lm_head.bias is None
        names = [n for n, _ in ours.named_parameters()]
        assert "embed.weight" in names and "lm_head.weight" not in names
        ours.to(torch.float64)
        assert ours.lm_head.weight is ours.embed.weight


def test_queries_keys_and_values_are_one_matrix():
    state = model().state_dict()
    assert state["blocks.0.attention.sublayer.qkv_proj.weight"].shape == (96, 32)
    assert not any("q_proj" in n or "k_proj" in n for n in state)


def test_sizes():
    with torch.device("meta"):
        small = GPT(GPTConfig())
        first = GPT1(GPTConfig(vocab_size=40_478, max_len=512))
    assert sum(p.numel() for p in small.parameters()) == 124_439_808
    assert sum(p.numel() for p in first.parameters()) == 116_534_784
    assert model(d_ff=50).blocks[0].feed_forward.sublayer.up_proj.weight.shape == (
        50,
        32,
    )
    assert model().blocks[1].feed_forward.sublayer.up_proj.weight.shape == (128, 32)


def test_the_first_weights_are_those_of_gpt2():
    torch.manual_seed(0)
    config = dataclasses.replace(
        CONFIG, d_model=128, vocab_size=300, max_len=200, n_layers=8
    )
    for kind, shrink in ((GPT, 4.0), (GPT1, 1.0)):
        ours = kind(config)
        part = ours.blocks[3].attention.sublayer
        wide = ours.blocks[3].feed_forward.sublayer
        for p in (ours.embed, ours.embed_positions, part.qkv_proj, wide.up_proj):
            assert p.weight.std().item() == pytest.approx(0.02, rel=0.05)
        for p in (part.o_proj, wide.down_proj):
            assert p.weight.std().item() == pytest.approx(0.02 / shrink, rel=0.05)
        assert all(
            (p == 0).all() for n, p in ours.named_parameters() if n.endswith("bias")
        )
        assert (ours.blocks[0].attention.norm.weight == 1).all()
        loss = next_token_loss(ours, torch.randint(300, (4, 50))).item()
        assert kind is GPT1 or loss == pytest.approx(math.log(300), abs=0.1)


@both
def test_dropout_acts_in_training_only(kind):
    ours = model(kind, dropout=0.3)
    ids = some_ids()
    close(ours(ids), model(kind)(ids))
    ours.train()
    torch.manual_seed(0)
    assert not torch.equal(ours(ids), ours(ids))


def test_dropout_is_where_gpt2_has_it():
    seen = {}
    ours = model(dropout=0.5).train()
    for name, module in ours.named_modules():
        if hasattr(module, "p") or hasattr(module, "dropout"):
            rate = getattr(module, "p", getattr(module, "dropout", None))
            if isinstance(rate, float):
                seen[name] = rate
    on = {name for name, rate in seen.items() if rate == 0.5}
    assert on == {
        "dropout",
        *(
            f"blocks.{i}.{n}"
            for i in (0, 1)
            for n in ("attention.dropout", "attention.sublayer", "feed_forward.dropout")
        ),
    }
    drops = []
    ours.dropout.register_forward_hook(
        lambda m, x, y: drops.append((x[0].abs().sum() > 0) & (y == 0).any())
    )
    ours(some_ids())
    assert drops == [True]


@pytest.mark.gpu
@both
def test_it_runs_on_cuda(kind):
    ours = model(kind)
    ids = some_ids(2)
    positions = padded(2)
    right = ours(ids, positions=positions)
    got = ours.cuda()(ids.cuda(), positions=positions.cuda()).cpu()
    close(got[positions >= 0], right[positions >= 0], 1e-4)
    check.run_all(ours, 61)


def test_half_precision():
    ours = model()
    ids = some_ids()
    right = ours(ids)
    with torch.autocast("cpu", torch.bfloat16):
        close(ours(ids).float(), right, 3e-2)
    half = ours.to(torch.bfloat16)(ids)
    assert half.dtype == torch.bfloat16
    close(half.float(), right, 3e-2)


# configuration


def test_the_configuration():
    config = GPTConfig()
    assert config.activation == "gelu_tanh" and config.eps == 1e-5
    assert (
        config.vocab_size,
        config.d_model,
        config.n_layers,
        config.n_heads,
        config.max_len,
    ) == (50_257, 768, 12, 12, 1024)
    with pytest.raises(ValueError, match=r"768 .* n_heads 5"):
        GPTConfig(n_heads=5)
    with pytest.raises(
        ValueError, match=(r"activation .*'gelu_tanh'.* got 'gelu_new'")
    ):
        GPTConfig(activation="gelu_new")


# log-likelihood


def test_log_likelihood_is_the_logarithm_of_probabilities():
    ours = model()
    ids = some_ids()
    got = token_log_probs(ours, ids)
    p = ours(ids).double().softmax(-1)
    for b in range(3):
        for i in range(11):
            assert got[b, i].item() == pytest.approx(
                math.log(p[b, i, ids[b, i + 1]].item()), abs=1e-5
            )
    close(-got.mean(), next_token_loss(ours, ids))


def test_log_likelihood_equals_the_loss_of_transformers(tmp_path):
    ours, theirs = pair(GPT, tmp_path)
    loss = theirs(some_ids(), labels=some_ids()).loss
    close(-token_log_probs(ours, some_ids()).mean(), loss)


def test_padding_has_no_likelihood():
    ours = model()
    ids = some_ids()
    positions = padded()
    got = token_log_probs(ours, ids, positions=positions)
    for row in range(3):
        kept = positions[row] >= 0
        alone = token_log_probs(ours, ids[row : row + 1, kept])[0]
        close(got[row][got[row] != 0], alone)
        assert (got[row] != 0).sum() == kept.sum() - 1


def test_the_likelihood_takes_a_mask():
    ours = model()
    ids = some_ids()
    two = torch.arange(12) // 6  # two documents
    mask = (two[:, None] == two)[None, None]
    got = token_log_probs(ours, ids, mask=mask)
    close(got[:, :5], token_log_probs(ours, ids[:, :6]))
    p = ours(ids, mask=mask).softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    close(got, p.log())
    assert not torch.allclose(got, token_log_probs(ours, ids))


def test_log_likelihood_is_wide_and_takes_any_model():
    half = token_log_probs(model().to(torch.bfloat16), some_ids())
    assert half.dtype == torch.float32
    flat = token_log_probs(lambda ids: torch.zeros(*ids.shape, 61), some_ids())
    close(flat, torch.full((3, 11), -math.log(61)))
    for shape in ((3, 1), (3,)):
        with pytest.raises(ValueError, match="two tokens"):
            token_log_probs(model(), torch.zeros(shape, dtype=torch.long))


# GPT-2's own files


def folder_of(tmp_path, change=None, tensors=None, **options):
    theirs = theirs_gpt2(**options)
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | (change or {})))
    if tensors is not None:
        path = tmp_path / "model.safetensors"
        save_file(tensors(load_file(path)), path)
    return theirs


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ("gelu_new", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu", "gelu"),
        ("relu", "relu"),
        ("silu", "silu"),
        ("swish", "silu"),
    ],
)
def test_activations_keep_their_meaning(tmp_path, theirs, ours):
    twin = folder_of(
        tmp_path, activation_function=theirs, n_inner=56, layer_norm_epsilon=1e-3
    )
    got = GPT.from_gpt2(tmp_path)
    assert got.config.activation == ours and got.config.d_ff == 56
    assert got.config.eps == 1e-3
    close(got(some_ids()), twin(some_ids()).logits, 1e-6)


def test_gpt2s_own_names_and_buffers(tmp_path):
    "As OpenAI's folder: no prefix, no head, the masks of every layer."

    def old(tensors):
        mask = torch.ones(2, 1, 1, 40, 40).tril()
        return {n.removeprefix("transformer."): x for n, x in tensors.items()} | {
            f"h.{i}.attn.{n}": x
            for i in (0, 1)
            for n, x in (("bias", mask[i].clone()), ("masked_bias", torch.tensor(-1e4)))
        }

    theirs = folder_of(tmp_path, tensors=old)
    assert "wte.weight" in load_file(tmp_path / "model.safetensors")
    close(GPT.from_gpt2(tmp_path)(some_ids()), theirs(some_ids()).logits)


def test_shards_are_joined(tmp_path):
    theirs = theirs_gpt2()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    close(GPT.from_gpt2(tmp_path)(some_ids()), theirs(some_ids()).logits)


def test_missing_and_unknown_tensors_are_listed(tmp_path):
    def less(tensors):
        del tensors["transformer.h.1.ln_2.bias"]
        del tensors["transformer.wpe.weight"]
        return tensors

    folder_of(tmp_path, tensors=less)
    with pytest.raises(
        ValueError,
        match=r"2 tensors .* missing: "
        r"wpe\.weight, h\.1\.ln_2\.bias",
    ):
        GPT.from_gpt2(tmp_path)
    folder_of(tmp_path, tensors=lambda t: t | {"h.7.more": torch.ones(3)})
    with pytest.raises(ValueError, match=r"unknown: h.7.more \(3,\)"):
        GPT.from_gpt2(tmp_path)
    folder_of(tmp_path, change=dict(n_positions=30))
    with pytest.raises(ValueError, match=r"\(40, 32\), .* \(30, 32\)"):
        GPT.from_gpt2(tmp_path)


def test_a_head_of_its_own_is_refused(tmp_path):
    def headed(tensors, by=0.0):
        wte = tensors["transformer.wte.weight"]
        return tensors | {"lm_head.weight": wte + by}

    theirs = folder_of(tmp_path, tensors=headed)
    close(GPT.from_gpt2(tmp_path)(some_ids()), theirs(some_ids()).logits)
    folder_of(tmp_path, tensors=lambda t: headed(t, 0.1))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs"):
        GPT.from_gpt2(tmp_path)


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(activation_function="gelu_fast"), "'gelu_new'.*got 'gelu_fast'"),
        (dict(scale_attn_weights=False), "scale_attn_weights must .*True, got False"),
        (
            dict(scale_attn_by_inverse_layer_idx=True),
            "inverse_layer_idx must .*False, got True",
        ),
        (dict(add_cross_attention=True), "add_cross_attention must .*False, got T"),
        (dict(tie_word_embeddings=False), "tie_word_embeddings must .*True, got F"),
        (dict(model_type="llama"), "model_type must .*'gpt2', got 'llama'"),
        (dict(attn_pdrop=0.3), "attn_pdrop': 0.3.*dropout="),
        (dict(n_head=5), "32 .* 5"),
    ],
)
def test_options_that_differ_are_refused(tmp_path, change, said):
    folder_of(tmp_path, change=change)
    with pytest.raises(ValueError, match=said):
        GPT.from_gpt2(tmp_path)


def test_the_rate_of_dropout_can_be_given(tmp_path):
    folder_of(tmp_path, change=dict(attn_pdrop=0.3))
    assert GPT.from_gpt2(tmp_path, dropout=0.2).config.dropout == 0.2
    assert config_from_gpt2({}).dropout == 0.1
    assert (
        config_from_gpt2(dict(embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)).dropout
        == 0.0
    )
    assert config_from_gpt2({}) == GPTConfig()
    assert not GPT.from_gpt2(tmp_path, dropout=0.2).training


def test_the_type_is_that_of_the_file(tmp_path):
    theirs_gpt2().to(torch.bfloat16).save_pretrained(tmp_path)
    ours = GPT.from_gpt2(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert ours.lm_head.weight is ours.embed.weight


def test_a_pickle_is_never_opened(tmp_path):
    folder_of(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="no such file"):
        read_gpt2_tensors(tmp_path)
    assert "pickle" not in inspect.getsource(gpt).replace(
        "a pickle", ""
    ) and "torch.load(" not in inspect.getsource(gpt)


def test_loading_fails_whole(tmp_path):
    ours = model()
    before = ours(some_ids())
    tensors = {to_gpt2_name(n): torch.zeros(1) for n, _ in ours.named_parameters()}
    with pytest.raises(ValueError):
        load_gpt2_tensors(ours, tensors)
    assert torch.equal(ours(some_ids()), before)


@both
def test_help_tells_what_forward_takes(kind):
    said = pydoc.plain(pydoc.render_doc(kind.forward))
    for words in (
        "Logits for the token after each, (b, t, vocab)",
        "``cache``: from ``new_cache``",
        "``positions``: int64 (b, t)",
        "``mask``: (b, h, t, s), True = may attend",
        "max_len",
    ):
        assert words in said
    assert list(inspect.signature(kind.forward).parameters) == [
        "self",
        "ids",
        "cache",
        "positions",
        "mask",
        "logits_to_keep",
    ]
