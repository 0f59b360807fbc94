"""GPT-1 and GPT-2 against transformers, GPT-2's files, and the capstone."""
import dataclasses
import inspect
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from tformer import check, gpt, seq2seq
from tformer.attention import Cache, next_positions
from tformer.bert import BertConfig
from tformer.gpt import (
    GAPS, EmptyGPT, GPT, GPT1, GPTConfig, check_gap, gpt2_config,
    gpt2_name, load_gpt2_tensors, log_likelihood, read_gpt2_tensors,
    rebuild, skeleton)
from tformer.layers import PostNorm, PreNorm
from tformer.minimal import next_id_loss

warnings.filterwarnings("ignore", message="IProgress not found")
import transformers  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

both = pytest.mark.parametrize("kind", [GPT, GPT1])
plain_only = pytest.mark.skipif(  # nothing in it is a question of shapes
    "TFORMER_SHAPES" in os.environ, reason="slow where shapes are checked")
CONFIG = GPTConfig(vocab_size=61, d_model=32, n_layers=2, n_heads=4,
                   max_len=40, dropout=0.0)


def draw(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g)


@torch.no_grad()
def spread(module, std=0.1):
    "Every parameter drawn anew; weights of norms around 1."
    for i, (name, p) in enumerate(module.named_parameters()):
        norm = p.ndim == 1 and name.endswith("weight")
        p.copy_(norm + std * draw(*p.shape, seed=100 + i))
    return module.eval()


def model(kind=GPT, **changes):
    return spread(kind(dataclasses.replace(CONFIG, **changes)))


def some_ids(b=3, t=12, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(61, (b, t), generator=g)


def padded(b=3, t=12):
    "Positions of rows that are padded on the left, on the right, and not."
    at = torch.arange(t)[None]
    return torch.cat([at, (at - 4).clamp(min=-1), torch.where(
        at < t - 3, at, -1)])[:b]


def close(ours, reference, tolerance=1e-5):
    assert ours.shape == reference.shape
    worst = (ours - reference).abs().max().item()
    assert worst <= tolerance * max(1, reference.abs().max().item())


def theirs_gpt2(**options):
    options = dict(vocab_size=61, n_embd=32, n_layer=2, n_head=4,
                   n_positions=40, bos_token_id=None,
                   eos_token_id=None) | options
    return spread(transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**options)))


def theirs_gpt1():
    return spread(transformers.OpenAIGPTLMHeadModel(
        transformers.OpenAIGPTConfig(vocab_size=61, n_embd=32, n_layer=2,
                                     n_head=4, n_positions=40)))


def ours_gpt1(theirs):
    ours = GPT1(CONFIG).eval()
    load_gpt2_tensors(ours, {
        name.removeprefix("transformer.").replace(
            "tokens_embed", "wte").replace("positions_embed", "wpe"): x
        for name, x in theirs.state_dict().items()
        if not name.endswith((".attn.bias", "position_ids"))})
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
    slope = draw(3, 12, 61, seed=5)
    (ours(some_ids()) * slope).sum().backward()
    (theirs(some_ids()).logits * slope).sum().backward()
    grads = {n.removeprefix("transformer.").replace(
        "tokens_embed", "wte").replace("positions_embed", "wpe"): p.grad
        for n, p in theirs.named_parameters()}
    for name, p in ours.named_parameters():
        there = grads[gpt2_name(name)]
        close(p.grad, there.T if ".c_" in gpt2_name(name)
              and p.ndim == 2 else there)


def test_padded_batches_equal_transformers(tmp_path):
    ours, theirs = pair(GPT, tmp_path)
    pos, ids = padded(), some_ids()
    live = pos >= 0
    right = theirs(ids, attention_mask=live.long(),
                   position_ids=pos.clamp(min=0)).logits
    got = ours(ids, pos=pos)
    close(got[live], right[live])
    slope = draw(3, 12, 61)[live]
    (got[live] * slope).sum().backward()
    (right[live] * slope).sum().backward()
    close(ours.blocks[0].attention.part.qkv_proj.weight.grad,
          theirs.transformer.h[0].attn.c_attn.weight.grad.T)
    close(ours.embed_pos.weight.grad[1:],
          theirs.transformer.wpe.weight.grad[1:])
    assert ours(ids, pos=pos).isfinite().all()


@both
def test_rows_padded_on_both_sides_are_as_alone(kind):
    ours, ids, pos = model(kind), some_ids(), padded()
    got = ours(ids, pos=pos)
    for row in range(3):
        kept = pos[row] >= 0
        close(got[row, kept], ours(ids[row:row + 1, kept])[0])


@both
@pytest.mark.parametrize("sizes", [[12], [1] * 12, [5, 1, 1, 5], [8, 4]])
def test_a_cache_continues_a_padded_batch(kind, sizes):
    ours, ids = model(kind), some_ids(2)
    pos = padded(2)
    whole, cache, parts, seen = ours(ids, pos=pos), ours.new_cache(2), [], 0
    for n in sizes:
        at = slice(seen, seen + n)
        # padding has to be named; after it the positions continue
        given = pos[:, at] if (pos[:, at] < 0).any() else None
        parts.append(ours(ids[:, at], pos=given, cache=cache))
        seen += n
    live = pos >= 0
    close(torch.cat(parts, 1)[live], whole[live])
    assert cache.n_seen.tolist() == [12, 8]


def test_positions_continue_with_a_cache():
    ours, ids = model(), some_ids(2)
    cache = ours.new_cache(2)
    parts = [ours(x, cache=cache) for x in ids.split(1, 1)]
    close(torch.cat(parts, 1), ours(ids))


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_checks_pass(kind, dtype):
    ours = spread(kind(CONFIG), 0.3)  # far above the rounding of bfloat16
    assert check.every(ours.to(dtype), 61)


def test_a_callers_mask_is_joined():
    ours, ids = model(), some_ids()
    two = torch.arange(12) // 6  # two documents
    mask = (two[:, None] == two)[None, None]
    pos = (torch.arange(12) % 6)[None]
    got = ours(ids, mask=mask, pos=torch.arange(12)[None])
    other = ids.clone()
    other[:, :6] = (ids[:, :6] + 1) % 61
    close(ours(other, mask=mask, pos=torch.arange(12)[None])[:, 6:],
          got[:, 6:])
    close(ours(ids, mask=mask, pos=torch.arange(12)[None])[:, :6],
          ours(ids[:, :6]))
    assert pos.max() == 5


# wiring

def test_gpt2_is_pre_norm_with_a_final_norm():
    ours = model()
    assert all(type(part) is PreNorm for b in ours.blocks
               for part in (b.attention, b.feed_forward))
    x = draw(1, 4, 32)
    block = ours.blocks[0]
    y = x + block.attention.part(block.attention.norm(x))
    close(block(x), y + block.feed_forward.part(
        block.feed_forward.norm(y)))
    assert isinstance(ours.norm, nn.Module) and len(
        list(ours.norm.parameters())) == 2


def test_gpt1_is_post_norm_without_a_final_norm():
    ours = model(GPT1)
    assert all(type(part) is PostNorm for b in ours.blocks
               for part in (b.attention, b.feed_forward))
    assert not list(ours.norm.parameters())
    x, block = draw(1, 4, 32), ours.blocks[0]
    y = block.attention.norm(x + block.attention.part(x))
    close(block(x), block.feed_forward.norm(
        y + block.feed_forward.part(y)))


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
    assert state["blocks.0.attention.part.qkv_proj.weight"].shape == (96, 32)
    assert not any("q_proj" in n or "k_proj" in n for n in state)


def test_sizes():
    with torch.device("meta"):
        small = GPT(GPTConfig())
        first = GPT1(GPTConfig(vocab_size=40_478, max_len=512))
    assert sum(p.numel() for p in small.parameters()) == 124_439_808
    assert sum(p.numel() for p in first.parameters()) == 116_534_784
    assert model(d_ff=50).blocks[0].feed_forward.part.up_proj.weight.shape \
        == (50, 32)
    assert model().blocks[1].feed_forward.part.up_proj.weight.shape \
        == (128, 32)


def test_the_first_weights_are_those_of_gpt2():
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, d_model=128, vocab_size=300,
                                 max_len=200, n_layers=8)
    for kind, shrink in ((GPT, 4.0), (GPT1, 1.0)):
        ours = kind(config)
        part, wide = (ours.blocks[3].attention.part,
                      ours.blocks[3].feed_forward.part)
        for p in (ours.embed, ours.embed_pos, part.qkv_proj, wide.up_proj):
            assert p.weight.std().item() == pytest.approx(0.02, rel=0.05)
        for p in (part.o_proj, wide.down_proj):
            assert p.weight.std().item() == pytest.approx(
                0.02 / shrink, rel=0.05)
        assert all((p == 0).all() for n, p in ours.named_parameters()
                   if n.endswith("bias"))
        assert (ours.blocks[0].attention.norm.weight == 1).all()
        loss = next_id_loss(ours, torch.randint(300, (4, 50))).item()
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
    assert on == {"dropout", *(
        f"blocks.{i}.{n}" for i in (0, 1) for n in (
            "attention.dropout", "attention.part",
            "feed_forward.dropout"))}
    drops = []
    ours.dropout.register_forward_hook(lambda m, x, y: drops.append(
        (x[0].abs().sum() > 0) & (y == 0).any()))
    ours(some_ids())
    assert drops == [True]


def test_too_many_tokens_are_refused():
    ours = model()
    ours(some_ids(1, 40))
    with pytest.raises(ValueError, match="41 tokens.*max_len 40"):
        ours(some_ids(1, 41))
    cache = ours.new_cache(1)
    ours(some_ids(1, 38), cache=cache)
    with pytest.raises(ValueError, match="41 tokens.*max_len 40"):
        ours(some_ids(1, 3), cache=cache)
    with pytest.raises(ValueError, match="41 tokens.*max_len 40"):
        ours(some_ids(1, 2), pos=torch.tensor([[39, 40]]))
    pos = (torch.arange(45) - 5).clamp(min=-1)[None]
    assert ours(some_ids(1, 45), pos=pos).shape == (1, 45, 61)
    with pytest.raises(ValueError, match="id 61 .* 61"):
        ours(torch.tensor([[61]]))


@plain_only
@both
def test_it_compiles_as_one_graph(kind):
    ours, ids = model(kind, n_layers=1), some_ids(2, 8)
    torch._dynamo.reset()  # it limits the graphs of one function
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    close(compiled(ids), ours(ids))
    close(compiled(ids[:, :5]), ours(ids[:, :5]))
    cache = ours.new_cache(2)
    parts = [compiled(x, cache=cache) for x in ids.split([4, 1, 1, 2], 1)]
    close(torch.cat(parts, 1), ours(ids))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@both
def test_it_runs_on_cuda(kind):
    ours, ids, pos = model(kind), some_ids(2), padded(2)
    right = ours(ids, pos=pos)
    got = ours.cuda()(ids.cuda(), pos=pos.cuda()).cpu()
    close(got[pos >= 0], right[pos >= 0], 1e-4)
    check.every(ours, 61)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_rebuilt_model_runs_on_cuda():
    ours = Mine(CONFIG).eval().cuda()
    check.every(ours, 61)


def test_half_precision():
    ours, ids = model(), some_ids()
    right = ours(ids)
    with torch.autocast("cpu", torch.bfloat16):
        close(ours(ids).float(), right, 3e-2)
    half = ours.to(torch.bfloat16)(ids)
    assert half.dtype == torch.bfloat16
    close(half.float(), right, 3e-2)


# configuration, save and load

def test_the_configuration():
    config = GPTConfig()
    assert eval(repr(config)) == config
    assert config.activation == "gelu_tanh" and config.eps == 1e-5
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.d_model = 5
    assert GPTConfig.from_dict(config.to_dict()) == config
    with pytest.raises(TypeError):
        GPTConfig(100)


@pytest.mark.parametrize("field, value, said", [
    ("vocab_size", 0, "vocab_size .* 0"), ("d_model", 2.5, "d_model.*2.5"),
    ("n_layers", 0, "n_layers .* 0"), ("n_heads", 5, "768 .* 5"),
    ("max_len", -1, "max_len .* -1"), ("d_ff", 0, "d_ff .* 0"),
    ("dropout", 1.0, "dropout .* 1.0"), ("eps", 0.0, "eps .* 0.0"),
    ("eps", "1e-5", "eps .* '1e-5'"),
    ("activation", "gelu_new", "'gelu_new'.*gelu_tanh")])
def test_bad_fields_are_refused(field, value, said):
    with pytest.raises(ValueError, match=f"(?s){said}"):
        GPTConfig(**{field: value})


@both
def test_save_and_load(kind, tmp_path):
    ours = model(kind)
    ours.save(tmp_path)
    again = kind.load(tmp_path)
    assert again.config == ours.config and not again.training
    assert torch.equal(again(some_ids()), ours(some_ids()))
    assert again.lm_head.weight is again.embed.weight
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    other = GPT1 if kind is GPT else GPT
    with pytest.raises(ValueError, match="holds a "):
        other.load(tmp_path)


def test_an_interrupted_save_leaves_the_old(tmp_path, monkeypatch):
    old = model()
    old.save(tmp_path)

    def broken(*args, **kwargs):
        raise KeyboardInterrupt

    for name, where in (("save_file", seq2seq), ("replace", os)):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, broken)
            with pytest.raises(KeyboardInterrupt):
                spread(GPT(CONFIG), 0.2).save(tmp_path)
        assert torch.equal(GPT.load(tmp_path)(some_ids()), old(some_ids()))
        assert len(list(tmp_path.iterdir())) == 2


def test_wrong_weights_are_listed(tmp_path):
    model().save(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    tensors = load_file(path)
    tensors["norm.weight"] = torch.zeros(31)
    tensors["extra"] = tensors.pop("embed_pos.weight")
    save_file(tensors, path)
    with pytest.raises(ValueError, match="(?s)missing: embed_pos.weight.*"
                       r"unknown: extra.*norm.weight: \(31,\).*\(32,\)"):
        GPT.load(tmp_path)
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="no whole safetensors file"):
        GPT.load(tmp_path)


# log-likelihood

def test_log_likelihood_is_the_logarithm_of_probabilities():
    ours, ids = model(), some_ids()
    got = log_likelihood(ours, ids)
    p = ours(ids).double().softmax(-1)
    for b in range(3):
        for i in range(11):
            assert got[b, i].item() == pytest.approx(
                math.log(p[b, i, ids[b, i + 1]].item()), abs=1e-5)
    close(-got.mean(), next_id_loss(ours, ids))


def test_log_likelihood_equals_the_loss_of_transformers(tmp_path):
    ours, theirs = pair(GPT, tmp_path)
    loss = theirs(some_ids(), labels=some_ids()).loss
    close(-log_likelihood(ours, some_ids()).mean(), loss)


def test_padding_has_no_likelihood():
    ours, ids, pos = model(), some_ids(), padded()
    got = log_likelihood(ours, ids, pos=pos)
    for row in range(3):
        kept = pos[row] >= 0
        alone = log_likelihood(ours, ids[row:row + 1, kept])[0]
        close(got[row][got[row] != 0], alone)
        assert (got[row] != 0).sum() == kept.sum() - 1


def test_the_likelihood_takes_a_mask():
    ours, ids = model(), some_ids()
    two = torch.arange(12) // 6  # two documents
    mask = (two[:, None] == two)[None, None]
    got = log_likelihood(ours, ids, mask=mask)
    close(got[:, :5], log_likelihood(ours, ids[:, :6]))
    p = ours(ids, mask=mask).softmax(-1)[:, :-1].gather(
        -1, ids[:, 1:, None])[..., 0]
    close(got, p.log())
    assert not torch.allclose(got, log_likelihood(ours, ids))


def test_log_likelihood_is_wide_and_takes_any_model():
    half = log_likelihood(model().to(torch.bfloat16), some_ids())
    assert half.dtype == torch.float32
    flat = log_likelihood(lambda ids: torch.zeros(*ids.shape, 61),
                          some_ids())
    close(flat, torch.full((3, 11), -math.log(61)))
    for shape in ((3, 1), (3,)):
        with pytest.raises(ValueError, match="two tokens"):
            log_likelihood(model(), torch.zeros(shape, dtype=torch.long))


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


@pytest.mark.parametrize("theirs, ours", [
    ("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh"),
    ("gelu", "gelu"), ("relu", "relu"), ("silu", "silu"),
    ("swish", "silu")])
def test_activations_keep_their_meaning(tmp_path, theirs, ours):
    twin = folder_of(tmp_path, activation_function=theirs, n_inner=56,
                     layer_norm_epsilon=1e-3)
    got = GPT.from_gpt2(tmp_path)
    assert got.config.activation == ours and got.config.d_ff == 56
    assert got.config.eps == 1e-3
    close(got(some_ids()), twin(some_ids()).logits, 1e-6)


def test_gpt2s_own_names_and_buffers(tmp_path):
    "As OpenAI's folder: no prefix, no head, the masks of every layer."
    def old(tensors):
        mask = torch.ones(2, 1, 1, 40, 40).tril()
        return {n.removeprefix("transformer."): x
                for n, x in tensors.items()} | {
            f"h.{i}.attn.{n}": x for i in (0, 1) for n, x in (
                ("bias", mask[i].clone()), ("masked_bias", torch.tensor(-1e4)))}

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
    with pytest.raises(ValueError, match="2 tensors .* missing: "
                       "wpe.weight, h.1.ln_2.bias"):
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
    with pytest.raises(ValueError, match="lm_head.weight differs"):
        GPT.from_gpt2(tmp_path)


@pytest.mark.parametrize("change, said", [
    (dict(activation_function="gelu_fast"), "'gelu_fast'.*gelu_new"),
    (dict(scale_attn_weights=False), "scale_attn_weights is False"),
    (dict(scale_attn_by_inverse_layer_idx=True), "inverse_layer_idx is T"),
    (dict(add_cross_attention=True), "add_cross_attention is True"),
    (dict(tie_word_embeddings=False), "tie_word_embeddings is False"),
    (dict(model_type="llama"), "model_type is 'llama'"),
    (dict(attn_pdrop=0.3), "attn_pdrop': 0.3.*dropout="),
    (dict(n_head=5), "32 .* 5")])
def test_options_that_differ_are_refused(tmp_path, change, said):
    folder_of(tmp_path, change=change)
    with pytest.raises(ValueError, match=said):
        GPT.from_gpt2(tmp_path)


def test_the_rate_of_dropout_can_be_given(tmp_path):
    folder_of(tmp_path, change=dict(attn_pdrop=0.3))
    assert GPT.from_gpt2(tmp_path, dropout=0.2).config.dropout == 0.2
    assert gpt2_config({}).dropout == 0.1
    assert gpt2_config(dict(embd_pdrop=0.0, attn_pdrop=0.0,
                            resid_pdrop=0.0)).dropout == 0.0
    assert gpt2_config({}) == GPTConfig()
    assert not GPT.from_gpt2(tmp_path, dropout=0.2).training


def test_the_type_is_that_of_the_file(tmp_path):
    theirs_gpt2().to(torch.bfloat16).save_pretrained(tmp_path)
    ours = GPT.from_gpt2(tmp_path)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert ours.lm_head.weight is ours.embed.weight


def test_a_pickle_is_never_opened(tmp_path):
    folder_of(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="model.safetensors"):
        read_gpt2_tensors(tmp_path)
    assert "pickle" not in inspect.getsource(gpt).replace(
        "a pickle", "") and "torch.load(" not in inspect.getsource(gpt)


def test_loading_fails_whole(tmp_path):
    ours = model()
    before = ours(some_ids())
    tensors = {gpt2_name(n): torch.zeros(1) for n, _ in
               ours.named_parameters()}
    with pytest.raises(ValueError):
        load_gpt2_tensors(ours, tensors)
    assert torch.equal(ours(some_ids()), before)


# the capstone

class Mine(EmptyGPT):
    "The eight gaps, filled by hand."

    def places(self, cache, t):
        at = torch.arange(t)[None]
        return at if cache is None else cache.n_seen[:, None] + at

    def vectors(self, ids, pos):
        return self.embed(ids) + self.embed_pos(pos)

    def allowed(self, pos, k_pos):
        at, to = pos[:, None, :, None], k_pos[:, None, None, :]
        return (to <= at) & (to >= 0)

    def split(self, qkv):
        b, t, d = qkv.shape
        h = self.config.n_heads
        return [x.view(b, t, h, d // 3 // h).transpose(1, 2)
                for x in qkv.chunk(3, dim=-1)]

    def attend(self, q, k, v, allowed):
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        least = torch.finfo(scores.dtype).min
        weights = scores.masked_fill(~allowed, least).softmax(dim=-1)
        return (weights @ v).transpose(1, 2).flatten(2)

    def ffn(self, x, up, down):
        return down(F.gelu(up(x), approximate="tanh"))

    def block(self, x, norm_1, attention, norm_2, feed_forward):
        x = x + attention(norm_1(x))
        return x + feed_forward(norm_2(x))

    def head(self, x):
        return self.norm(x) @ self.embed.weight.T


def failed(gap, filling, base=EmptyGPT):
    "The report of one gap with this filling; it must fail."
    with pytest.raises(check.CheckFailed) as caught:
        check_gap(type("Wrong", (base,), {gap: filling}), gap)
    return caught.value.report


def test_the_empty_one_fails_at_each_gap():
    for gap in GAPS:
        with pytest.raises(check.CheckFailed, match="still empty"):
            check_gap(EmptyGPT, gap)
    report = rebuild(EmptyGPT)
    assert not report and str(report).count("still empty") == 8
    assert "8 of 8 gaps are open" in str(report)


def test_the_filled_one_passes():
    for gap in GAPS:
        assert check_gap(Mine, gap)
    report = rebuild(Mine)
    assert report and str(report).count("passed") == 9
    assert "check.every" in str(report)


def test_there_are_eight_gaps_and_eight_checkers():
    assert len(GAPS) == 8 == len(set(GAPS))
    for table in (gpt._FILLED, gpt._CALLS, gpt._MISTAKES, gpt._WATCHED):
        assert set(table) == set(GAPS)
    stubs = [n for n, f in vars(EmptyGPT).items()
             if inspect.isfunction(f) and n != "forward"]
    assert tuple(stubs) == GAPS


@plain_only
@pytest.mark.parametrize("gap", GAPS)
def test_every_mistake_is_called_by_its_name(gap):
    said = set()
    for likely, version in gpt._MISTAKES[gap]:
        report = failed(gap, version)
        assert report.likely == likely
        assert any(label == "symptom" for label, _ in report.lines)
        said.add(likely)
    assert len(said) == len(gpt._MISTAKES[gap]) >= 3


def test_one_wrong_gap_does_not_hide_the_others():
    class Wrong(Mine):
        def allowed(self, pos, k_pos):
            return ~Mine.allowed(self, pos, k_pos)

    report = rebuild(Wrong)
    assert "1 of 8" in str(report) and str(report).count("passed") == 7
    assert "inverted" in str(report)


@pytest.mark.parametrize("gap, filling, said", [
    ("places", lambda s, cache, t: None, "returns None"),
    ("places", lambda s, cache, t: torch.arange(t), "expected"),
    ("places", lambda s, cache, t: torch.arange(float(t))[None],
     "torch.float32, expected torch.int64"),
    ("vectors", lambda s, ids: 0, "TypeError"),
    ("allowed", lambda s, pos, k_pos: torch.ones(5, 5).tril().bool(),
     r"\(5, 5\), expected \(2, 1, 5, 5\)"),
    ("allowed", lambda s, pos, k_pos: torch.zeros(
        len(pos), 1, pos.shape[1], k_pos.shape[1]),
     "torch.float32, expected torch.bool"),
    ("split", lambda s, qkv: qkv.chunk(2, -1), "3 tensors"),
    ("split", lambda s, qkv: qkv, "3 tensors"),
    ("split", lambda s, qkv: [x.view(2, 5, 3, 8) for x in
                              qkv.chunk(3, -1)],
     r"\(2, 5, 3, 8\), expected \(2, 3, 5, 8\)"),
    ("head", lambda s, x: 7, "must return a tensor, got int"),
    ("head", lambda s, x: s.lm_head(s.norm(x)).argmax(-1), "int64"),
    ("block", lambda s, x, n1, a, n2, f: x @ x, "RuntimeError")])
def test_results_of_another_form_are_described(gap, filling, said):
    report = failed(gap, filling)
    assert said in report.problem or __import__("re").search(
        said, report.problem)


def test_rows_without_keys_are_watched():
    def attend(self, q, k, v, allowed):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)

    report = failed("attend", attend)
    assert report.problem == "not all results are numbers"
    assert "padding" in report.likely


def test_an_error_comes_with_its_line_and_what_was_given():
    class Wrong(EmptyGPT):
        def places(self, cache, t):
            at = torch.arange(t)
            return at[:, None] if cache is None else cache.n_seen + at

        def attend(self, q, k, v, allowed):
            return q @ k @ v

    for gap, line, given in (
            ("attend", "return q @ k @ v", "q of shape (2, 3, 5, 8)"),
            ("places", "", "cache None, t 3")):
        with pytest.raises(check.CheckFailed) as caught:
            check_gap(Wrong, gap)
        report = caught.value.report
        assert line in report.problem and given in dict(
            report.lines)["given"]
        assert not report.likely and "symptom" not in dict(report.lines)
    said = " ".join(str(rebuild(Wrong)).split())
    assert 'raises RuntimeError in "return q @ k @ v": ' in said


def test_what_is_given_must_not_be_changed():
    def block(self, x, norm_1, attention, norm_2, feed_forward):
        x += attention(norm_1(x))
        return x + feed_forward(norm_2(x))

    assert "x = x + …" in failed("block", block).problem

    def ffn(self, x, up, down):  # a tensor of its own may change
        hidden = up(x)
        hidden *= 1.0
        return down(F.gelu(hidden, approximate="tanh"))

    with torch.no_grad():
        assert not gpt._cause(gpt._fill(type("Own", (EmptyGPT,), {
            "ffn": ffn}), "ffn")[0], "ffn")[0]


@plain_only
def test_an_unknown_mistake_is_shown_at_its_place_and_told_where_to_read():
    report = failed("split", lambda self, qkv: gpt._FILLED["split"](
        self, qkv)[::-1])
    lines = dict(report.lines)
    assert "chapter 7" in report.likely and "is right, at [" in \
        lines["returns"]
    assert lines["symptom"].startswith("check.same")
    report = failed("allowed", lambda self, pos, k_pos: torch.ones(
        len(pos), 1, pos.shape[1], k_pos.shape[1]).bool())
    assert dict(report.lines)["returns"].startswith(
        "True where False is right")
    assert dict(report.lines)["given"].startswith("pos [[-1, -1, 0, 1, 2]")
    titles = (Path(__file__).parents[1] / "nbs").glob("*.ipynb")
    text = {path.name[:2]: path.read_text("utf-8") for path in titles}
    for gap, place in gpt._TOLD.items():
        number, _, name = place.removeprefix("chapter ").partition(", ")
        for title in name.split(" and ") if gap == "ffn" else [name]:
            assert f"## {title}" in text[f"{int(number):02}"], place


def test_what_only_a_model_shows_is_found():
    "Right alone, wrong in use: the checks of chapter 8 see it."
    def detached(self, x, up, down):
        return down(F.gelu(up(x).detach(), approximate="tanh"))

    report = failed("ffn", detached)
    assert "gradient" in report.problem and "detach" in report.likely
    seen = []

    def once(self, ids, pos):
        seen.append(1)
        x = self.embed(ids) + self.embed_pos(pos)
        return x if len(seen) < 2 else 1.5 * x

    assert failed("vectors", once).problem


def test_helpers_of_the_class_are_found():
    class Helped(Mine):
        def ffn(self, x, up, down):
            return down(self.curve(up(x)))

        def curve(self, x):
            return F.gelu(x, approximate="tanh")

    assert check_gap(Helped, "ffn")


def test_an_unknown_gap_is_refused():
    with pytest.raises(ValueError, match="places, .*'mask' of Mine"):
        check_gap(Mine, "mask")
    with pytest.raises(ValueError, match="of an EmptyGPT, .* GPT"):
        check_gap(GPT, "places")


def test_the_filled_one_is_gpt2(tmp_path):
    theirs = folder_of(tmp_path)
    mine = Mine.from_gpt2(tmp_path)
    assert type(mine) is Mine
    close(mine(some_ids()), theirs(some_ids()).logits)
    ours, pos = GPT.from_gpt2(tmp_path), padded()
    got = mine(some_ids(), pos=pos)
    close(got[pos >= 0], ours(some_ids(), pos=pos)[pos >= 0])
    mine.save(tmp_path / "mine")
    close(Mine.load(tmp_path / "mine")(some_ids()), ours(some_ids()))
    mask = torch.rand(3, 1, 12, 12) > 0.3
    mask |= torch.eye(12).bool()
    close(mine(some_ids(), mask=mask), ours(some_ids(), mask=mask))


def test_dropout_acts_in_the_frame():
    mine = Mine(dataclasses.replace(CONFIG, dropout=0.5)).train()
    calls = []
    mine.dropout.register_forward_hook(lambda *_: calls.append(1))
    mine(some_ids())
    assert len(calls) == 1 + 2 * 2  # the vectors, two sublayers a block
    assert not torch.equal(mine(some_ids()), mine(some_ids()))


def test_places_of_an_empty_cache_are_asked_without_one():
    caches = []

    class Nosy(Mine):
        def places(self, cache, t):
            caches.append(cache)
            return next_positions(cache, t)

    nosy = spread(Nosy(CONFIG))
    cache = nosy.new_cache(1)
    for part in some_ids(1).split(6, 1):
        nosy(part, cache=cache)
    assert caches == [None, cache]


def test_the_skeleton_runs_as_a_file(tmp_path):
    path = tmp_path / "my_gpt.py"
    path.write_text(skeleton(), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, path], text=True, capture_output=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1",
                          "PYTHONIOENCODING": "utf-8"})
    assert done.returncode == 0, done.stderr
    assert "rebuild FAILED: MyGPT" in done.stdout
    assert done.stdout.count("still empty") == 8
    space = {"__name__": "my_gpt"}
    exec(skeleton(), space)
    assert space["MyGPT"].__mro__[1] is EmptyGPT
    assert all(gap in vars(space["MyGPT"]) for gap in GAPS)


def test_ids_without_a_batch_are_refused():
    for kind in (GPT, GPT1):
        with pytest.raises(ValueError, match=r"\(b, t\), got \(5,\)"):
            model(kind)(torch.arange(5))


@both
def test_positions_of_other_tokens_are_refused(kind):
    ours, ids = model(kind), some_ids(2, 5)
    for pos in (torch.arange(4)[None], torch.zeros(3, 5).long(),
                torch.zeros(1, 1).long()):
        with pytest.raises(ValueError, match=(
                rf"pos of shape \({len(pos)}, .*\(2, 5\)")):
            ours(ids, pos=pos)
    with pytest.raises(ValueError, match=r"\(2, 5\) does not .*\(1, 5\)"):
        ours(ids[:1], pos=torch.arange(5).expand(2, 5))


@both
def test_a_cache_of_another_model_is_refused_and_left_alone(kind):
    ours = model(kind)
    for n in (1, 3):
        cache = Cache(n)
        with pytest.raises(ValueError, match=f"of {n} layers .* model of 2"):
            ours(some_ids(), cache=cache)
        assert cache.empty


@both
def test_a_configuration_of_another_model_is_refused(kind):
    like = BertConfig(vocab_size=61, d_model=32, n_layers=2, n_heads=4)
    for other in (like, CONFIG.to_dict(), None):
        with pytest.raises(ValueError, match=(
                f"{kind.__name__} takes a GPTConfig, got a "
                f"{type(other).__name__}$")):
            kind(other)
