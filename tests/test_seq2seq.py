"""The encoder-decoder, against two others."""

import copy
import dataclasses
import math
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import helpers
from helpers import close, equal_models, generator, plain_only, randn, spread
from tformer import check
from tformer.models import seq2seq
from tformer.models.base import TransformerBlock
from tformer.models.mini_gpt import train
from tformer.models.seq2seq import (
    DecoderBlock,
    PreNormSeq2Seq,
    Seq2Seq,
    Seq2SeqConfig,
    greedy,
    positions_from_padding,
    shift_right,
    teacher_forced_loss,
)
from tformer.nn.attention import CrossAttention, SelfAttention
from tformer.nn.embedding import sinusoids
from tformer.nn.feed_forward import FeedForward
from tformer.nn.layers import PostNorm, PreNorm
from tformer.nn.norms import LayerNorm

SMALL = Seq2SeqConfig(
    vocab_size=40, d_model=16, n_layers=2, n_heads=4, d_ff=24, max_len=20, dropout=0.0
)
kinds = pytest.mark.parametrize("kind", [Seq2Seq, PreNormSeq2Seq])
draw_ids = partial(helpers.draw_ids, low=3, high=40)


def make(kind=Seq2Seq, std=0.1, **changes):
    return spread(kind(dataclasses.replace(SMALL, **changes)), std)


@torch.no_grad()
def talkative(model):
    "A model that says different things at different places; 12 often."
    spread(model, 0.2)
    weight = dict(model.named_parameters()).get("embed.weight")
    weight = model.model.shared.weight if weight is None else weight
    weight.copy_(0.02 * randn(40, 16, seed=5))
    return model


def padded_sources(side="right"):
    "Three sources, two of them padded with 0, and the mask."
    src = draw_ids(3, 7)
    for row, n in ((1, 3), (2, 5)):
        src[row, slice(7 - n, 7) if side == "right" else slice(n)] = 0
    return src, src != 0


# references


class Around(nn.Module):
    "nn.Transformer with embeddings, positions and an output layer."

    def __init__(self, c, norm_first=False):
        super().__init__()
        self.embed = nn.Embedding(c.decoder_vocab_size or c.vocab_size, c.d_model)
        self.encoder_embed = self.embed
        if c.decoder_vocab_size:
            self.encoder_embed = nn.Embedding(c.vocab_size, c.d_model)
        self.head = self.embed.weight
        if not c.tie_word_embeddings:
            self.head = nn.Parameter(torch.empty_like(self.embed.weight))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.stacks = nn.Transformer(
                c.d_model,
                c.n_heads,
                c.n_layers,
                c.n_decoder_layers or c.n_layers,
                c.d_ff,
                0.0,
                batch_first=True,
                norm_first=norm_first,
            )

    def enter(self, embed, ids, positions):
        d = embed.embedding_dim
        there = torch.zeros(*positions.shape, d)
        there[positions >= 0] = sinusoids(positions[positions >= 0], d)
        return math.sqrt(d) * embed(ids) + there

    def forward(self, src, ids, keep, positions=None):
        t = ids.shape[1]
        if positions is None:
            positions = torch.arange(t)[None].expand(len(ids), -1)
        at = (keep.cumsum(-1) - 1).masked_fill(~keep, -1)
        x = self.stacks(
            self.enter(self.encoder_embed, src, at),
            self.enter(self.embed, ids, positions),
            tgt_mask=torch.ones(t, t).triu(1).bool(),
            src_key_padding_mask=~keep,
            memory_key_padding_mask=~keep,
        )
        return x @ self.head.T


@torch.no_grad()
def copy_block(block, layer):
    attentions = [(block.attention, layer.self_attn)]
    norms = [layer.norm1, layer.norm2]
    if hasattr(layer, "multihead_attn"):
        attentions.append((block.cross_attention, layer.multihead_attn))
        norms.append(layer.norm3)
    for wrapped, theirs in attentions:
        part = wrapped.sublayer
        for p, w, b in zip(
            (part.q_proj, part.k_proj, part.v_proj),
            theirs.in_proj_weight.chunk(3),
            theirs.in_proj_bias.chunk(3),
            strict=True,
        ):
            p.weight.copy_(w)
            p.bias.copy_(b)
        part.o_proj.load_state_dict(theirs.out_proj.state_dict())
    feed = block.feed_forward.sublayer
    feed.up_proj.load_state_dict(layer.linear1.state_dict())
    feed.down_proj.load_state_dict(layer.linear2.state_dict())
    wrapped = [w for w, _ in attentions] + [block.feed_forward]
    for w, norm in zip(wrapped, norms, strict=True):
        w.norm.load_state_dict(norm.state_dict())


@torch.no_grad()
def from_torch(peer, config, kind=Seq2Seq):
    ours = kind(config).eval()
    ours.embed.weight.copy_(peer.embed.weight)
    if config.decoder_vocab_size:
        ours.encoder_embed.weight.copy_(peer.encoder_embed.weight)
    if not config.tie_word_embeddings:
        ours.lm_head.weight.copy_(peer.head)
    for blocks, stack, norm in (
        (ours.encoder_blocks, peer.stacks.encoder, ours.encoder_norm),
        (ours.blocks, peer.stacks.decoder, ours.norm),
    ):
        for block, layer in zip(blocks, stack.layers, strict=True):
            copy_block(block, layer)
        norm.load_state_dict(stack.norm.state_dict())
    return ours


def make_marian(c):
    transformers = pytest.importorskip("transformers")
    config = transformers.MarianConfig(
        vocab_size=c.vocab_size,
        d_model=c.d_model,
        encoder_layers=c.n_layers,
        decoder_layers=c.n_layers,
        encoder_attention_heads=c.n_heads,
        encoder_ffn_dim=c.d_ff,
        decoder_attention_heads=c.n_heads,
        decoder_ffn_dim=c.d_ff,
        max_position_embeddings=c.max_len,
        activation_function="relu",
        scale_embedding=True,
        dropout=0.0,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
        decoder_vocab_size=c.vocab_size,
        attn_implementation="eager",
    )
    marian = spread(transformers.MarianMTModel(config))
    for module in marian.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # else row 0 gets no gradient
    return marian


@torch.no_grad()
def from_marian(peer, config):
    ours = Seq2Seq(config).eval()
    inner = peer.model
    ours.embed.weight.copy_(inner.shared.weight)
    ours.embed_positions.table.copy_(inner.encoder.embed_positions.weight)

    def load(wrapped, theirs, norm, names):
        for mine, name in names.items():
            getattr(wrapped.sublayer, mine).load_state_dict(
                getattr(theirs, name).state_dict()
            )
        wrapped.norm.load_state_dict(norm.state_dict())

    qkvo = dict(q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", o_proj="out_proj")
    for blocks, stack in (
        (ours.encoder_blocks, inner.encoder),
        (ours.blocks, inner.decoder),
    ):
        for block, layer in zip(blocks, stack.layers, strict=True):
            load(block.attention, layer.self_attn, layer.self_attn_layer_norm, qkvo)
            if stack is inner.decoder:
                load(
                    block.cross_attention,
                    layer.encoder_attn,
                    layer.encoder_attn_layer_norm,
                    qkvo,
                )
            load(
                block.feed_forward,
                layer,
                layer.final_layer_norm,
                dict(up_proj="fc1", down_proj="fc2"),
            )
    return ours


def agree(ours, peer, again, out, expected):
    "Values, then the gradients of all parameters, copied like weights."
    close(out, expected)
    tilt = torch.linspace(-1, 1, out.numel()).view(out.shape)
    (out * tilt).sum().backward()
    (expected * tilt).sum().backward()
    for p in peer.parameters():
        if p.requires_grad:
            p.data = p.grad
    slopes = dict(again(peer).named_parameters())
    for name, p in ours.named_parameters():
        close(p.grad, slopes[name].detach())
        assert "k_proj.bias" in name or p.grad.abs().max() > 1e-4, name


# parity


def test_equals_nn_transformer_in_value_and_gradient():
    config = dataclasses.replace(SMALL, final_norm=True)
    peer = spread(Around(config))
    ours = from_torch(peer, config)
    src, keep = padded_sources()
    ids = draw_ids(3, 5, seed=1)
    out = ours(
        ids, encoder_hidden_states=ours.encode(src, keep), encoder_attention_mask=keep
    )
    agree(ours, peer, lambda peer: from_torch(peer, config), out, peer(src, ids, keep))


@pytest.mark.parametrize("side", ["left", "right"])
def test_pre_norm_equals_norm_first_in_value_and_gradient(side):
    peer = spread(Around(SMALL, norm_first=True))
    ours = from_torch(peer, SMALL, PreNormSeq2Seq)
    src, keep = padded_sources(side)
    ids = draw_ids(3, 5, seed=1)
    out = ours(
        ids, encoder_hidden_states=ours.encode(src, keep), encoder_attention_mask=keep
    )
    agree(
        ours,
        peer,
        lambda peer: from_torch(peer, SMALL, PreNormSeq2Seq),
        out,
        peer(src, ids, keep),
    )


def test_sources_padded_on_the_left_equal_nn_transformer():
    config = dataclasses.replace(SMALL, final_norm=True)
    peer = spread(Around(config))
    ours = from_torch(peer, config)
    src, keep = padded_sources("left")
    ids = draw_ids(3, 5, seed=1)
    out = ours(
        ids, encoder_hidden_states=ours.encode(src, keep), encoder_attention_mask=keep
    )
    agree(ours, peer, lambda peer: from_torch(peer, config), out, peer(src, ids, keep))


OWN = {  # what a configuration may say about sizes of their own
    "deep encoder": dict(n_layers=3, n_decoder_layers=1),
    "deep decoder": dict(n_layers=1, n_decoder_layers=3),
    "larger source": dict(vocab_size=50, decoder_vocab_size=40),
    "larger target": dict(vocab_size=40, decoder_vocab_size=50),
    "two tables of one size": dict(decoder_vocab_size=40),
    "untied": dict(tie_word_embeddings=False),
    "all of it": dict(
        vocab_size=50,
        decoder_vocab_size=40,
        n_layers=2,
        n_decoder_layers=3,
        tie_word_embeddings=False,
    ),
}
own_sizes = pytest.mark.parametrize("own", OWN.values(), ids=OWN)


@kinds
@own_sizes
def test_stacks_and_tables_of_their_own_equal_nn_transformer(kind, own):
    config = dataclasses.replace(SMALL, final_norm=True, **own)
    peer = spread(Around(config, norm_first=kind is PreNormSeq2Seq))
    ours = from_torch(peer, config, kind)
    src = draw_ids(3, 7, high=config.vocab_size)
    src[1, 3:] = 0
    keep = src != 0
    ids = draw_ids(3, 5, high=config.decoder_vocab_size or 40, seed=1)
    out = ours(
        ids, encoder_hidden_states=ours.encode(src, keep), encoder_attention_mask=keep
    )
    agree(
        ours,
        peer,
        lambda peer: from_torch(peer, config, kind),
        out,
        peer(src, ids, keep),
    )


def test_equals_marian_in_value_and_gradient():
    marian = make_marian(SMALL)
    ours = from_marian(marian, SMALL)
    src, keep = padded_sources()
    ids = draw_ids(3, 5, seed=1)
    out = ours(
        ids, encoder_hidden_states=ours.encode(src, keep), encoder_attention_mask=keep
    )
    expected = marian(
        input_ids=src, attention_mask=keep.long(), decoder_input_ids=ids
    ).logits
    agree(ours, marian, lambda peer: from_marian(peer, SMALL), out, expected)


def test_check_same_agrees_with_marian():
    marian = make_marian(SMALL)
    ours = from_marian(marian, SMALL)
    src = draw_ids(1, 7)
    report = check.same(
        check.FixedSourceModel(ours, src), check.FixedSourceModel(marian, src), 40
    )
    assert report and "agree" in dict(report.notes)["gradients"]


def test_greedy_writes_what_marian_generates():
    marian = talkative(make_marian(SMALL))
    ours = from_marian(marian, SMALL)
    src, keep = padded_sources()
    free = greedy(
        ours,
        src,
        9,
        decoder_start_token_id=1,
        eos_token_id=-1,
        encoder_attention_mask=keep,
    )
    ends = {*free[:, :6].flatten().tolist()} - {0, 1}
    assert len(ends) > 1
    for eos in (2, *ends):
        want = marian.generate(
            src,
            attention_mask=keep.long(),
            num_beams=1,
            eos_token_id=eos,
            do_sample=False,
            max_new_tokens=9,
        )[:, 1:]
        out = greedy(
            ours,
            src,
            9,
            decoder_start_token_id=1,
            eos_token_id=eos,
            encoder_attention_mask=keep,
        )
        ended = (want == eos).cumsum(-1) > 0  # theirs ends in padding
        assert ended.any() or eos == 2
        assert torch.equal(out, want.masked_fill(ended, eos))


def test_default_eps_and_stacks_are_those_of_the_paper():
    c = Seq2SeqConfig(vocab_size=37_000)
    assert (
        c.n_layers,
        c.n_heads,
        c.d_model,
        c.d_model // c.n_heads,
        c.d_ff,
        c.dropout,
    ) == (6, 8, 512, 64, 2048, 0.1)
    table = 37_000 * 512
    with torch.device("meta"):
        counts = [
            sum(
                p.numel()
                for p in Seq2Seq(dataclasses.replace(c, final_norm=ends)).parameters()
            )
            for ends in (False, True)
        ]
    assert counts == [44_138_496 + table, 44_140_544 + table]


# contracts


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_check_passes(kind, dtype):
    model = make(kind).to(dtype)
    if dtype == torch.bfloat16:
        model = spread(model, 0.15)
    source = check.FixedSourceModel(model, draw_ids(1, 7))
    report = check.run_all(source, 40)
    assert all(text == "passed" for _, text in report.notes)


@plain_only
def test_every_check_passes_on_the_fresh_model():
    torch.manual_seed(0)
    model = Seq2Seq(SMALL)
    assert check.run_all(check.FixedSourceModel(model, draw_ids(1, 7)), 40)


def test_the_memory_is_projected_once_and_kept():
    model = make()
    src = draw_ids(2, 7)
    cache = model.new_cache(2)
    memory = model.encode(src)
    calls = []
    for block in model.blocks:
        block.cross_attention.sublayer.k_proj.register_forward_hook(
            lambda *_: calls.append(1)
        )
    for _ in range(3):
        model(draw_ids(2, 1), encoder_hidden_states=memory, cache=cache)
    assert len(calls) == SMALL.n_layers
    for layer in cache.layers:
        k, _v = layer.layers[1].tensors
        assert k.shape == (2, 4, 7, 4) and layer.layers[1].key_positions.length == 7


def test_another_memory_in_the_same_cache_is_not_answered_with_the_old():
    model = make(std=0.3)
    ids = draw_ids(2, 5, seed=1)
    first, other = (model.encode(draw_ids(2, 7, seed=s)) for s in (2, 3))
    cache = model.new_cache(2)
    model(ids[:, :3], encoder_hidden_states=first, cache=cache)
    out = model(ids[:, 3:4], encoder_hidden_states=other, cache=cache)
    again = model(ids[:, 4:], cache=cache)  # goes on with the other one
    fresh = model.new_cache(2)
    model(ids[:, :3], encoder_hidden_states=first, cache=fresh)
    for layer in fresh.layers:
        layer.layers[1] = type(layer.layers[1])()
    close(out, model(ids[:, 3:4], encoder_hidden_states=other, cache=fresh))
    close(again, model(ids[:, 4:], encoder_hidden_states=other, cache=fresh))
    with pytest.raises(ValueError, match="encoder_hidden_states="):
        model(ids, cache=model.new_cache(2))


def test_rows_of_a_cache_are_reordered_with_their_memory():
    model = make(std=0.3)
    ids = draw_ids(3, 6, seed=1)
    src, keep = padded_sources()
    memory = model.encode(src, keep)
    cache = model.new_cache(3)
    model(
        ids[:, :4],
        encoder_hidden_states=memory,
        encoder_attention_mask=keep,
        cache=cache,
    )
    rows = torch.tensor([2, 0, 0])
    cache.select(rows)
    out = model(
        ids[rows, 4:],
        encoder_hidden_states=memory[rows],
        encoder_attention_mask=keep[rows],
        cache=cache,
    )
    whole = model(
        ids[rows], encoder_hidden_states=memory[rows], encoder_attention_mask=keep[rows]
    )
    close(out, whole[:, 4:])


def test_a_source_padded_on_any_side_equals_the_source_alone():
    model = make(std=0.3)
    ids = draw_ids(3, 5, seed=1)
    for side in ("left", "right"):
        src, keep = padded_sources(side)
        out = model(
            ids,
            encoder_hidden_states=model.encode(src, keep),
            encoder_attention_mask=keep,
        )
        for i in range(3):
            alone = model.encode(src[i, keep[i]][None])
            close(out[i : i + 1], model(ids[i : i + 1], encoder_hidden_states=alone))
        assert not torch.allclose(  # the mask matters in both places
            out,
            model(
                ids,
                encoder_hidden_states=model.encode(src),
                encoder_attention_mask=keep,
            ),
        )
        assert not torch.allclose(
            out, model(ids, encoder_hidden_states=model.encode(src, keep))
        )


def test_a_mask_of_the_caller_reaches_the_self_attention_alone():
    model = make(std=0.3)
    ids = draw_ids(2, 6, seed=1)
    memory = model.encode(draw_ids(2, 7))
    first = torch.zeros(1, 1, 6, 6).bool()
    # two documents
    first[..., :3, :3] = True
    first[..., 3:, 3:] = True
    out = model(ids, encoder_hidden_states=memory, mask=first)
    other = ids.clone()
    other[:, 0] = (ids[:, 0] - 2) % 37 + 3
    moved = (
        (model(other, encoder_hidden_states=memory, mask=first) - out).abs().amax(-1)
    )
    assert (moved[:, :3] > 1e-4).all() and (moved[:, 3:] == 0).all()


def test_positions_given_equal_positions_counted():
    model = make(std=0.3)
    ids = draw_ids(2, 6, seed=1)
    memory = model.encode(draw_ids(2, 7))
    out = model(ids, encoder_hidden_states=memory)
    close(
        model(ids, encoder_hidden_states=memory, positions=torch.arange(6)[None]), out
    )
    moved = model(ids, encoder_hidden_states=memory, positions=torch.arange(1, 7)[None])
    assert (moved - out).abs().max() > 1e-3


def test_the_encoder_sees_both_ways_and_its_order():
    model = make(std=0.3)
    src = draw_ids(1, 7)
    memory = model.encode(src)
    other = src.clone()
    other[0, 6] = (src[0, 6] - 2) % 37 + 3
    assert ((model.encode(other) - memory).abs().amax(-1) > 1e-4).all()
    order = torch.tensor([3, 1, 0, 2, 6, 5, 4])
    assert not torch.allclose(model.encode(src[:, order]), memory[:, order], atol=1e-3)


def test_the_decoder_reads_the_memory_as_a_set():
    model = make(std=0.3)
    ids = draw_ids(1, 4)
    memory = model.encode(draw_ids(1, 7))
    order = torch.tensor([3, 1, 0, 2, 6, 5, 4])
    close(
        model(ids, encoder_hidden_states=memory[:, order]),
        model(ids, encoder_hidden_states=memory),
    )


def test_a_source_of_padding_only_is_finite():
    model = make(std=0.3)
    src = draw_ids(2, 5)
    keep = torch.ones(2, 5).bool()
    keep[1] = False
    out = model(
        draw_ids(2, 4),
        encoder_hidden_states=model.encode(src, keep),
        encoder_attention_mask=keep,
    )
    out.sum().backward()
    assert out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


# construction


def test_one_table_embeds_both_texts_and_makes_the_logits():
    model = make()
    assert model.lm_head.weight is model.embed.weight
    assert model.lm_head.bias is None
    assert model.embed.scale == 4.0  # the root of 16
    names = [n for n, p in model.named_parameters() if p.shape == (40, 16)]
    assert names == ["embed.weight"]


def numel(module):
    return sum(p.numel() for p in module.parameters())


@kinds
@own_sizes
@pytest.mark.parametrize("final_norm", [False, True])
def test_parameters_are_those_of_the_parts(kind, own, final_norm):
    c = dataclasses.replace(SMALL, final_norm=final_norm, **own)
    attention = 4 * (16 * 16 + 16)
    ff = 16 * 24 + 24 + 24 * 16 + 16
    norm = 2 * 16
    encoder = c.n_layers * (attention + ff + 2 * norm)
    decoder = (c.n_decoder_layers or c.n_layers) * (2 * attention + ff + 3 * norm)
    target = c.decoder_vocab_size or c.vocab_size
    tables = [target] + [c.vocab_size] * bool(c.decoder_vocab_size)
    tables += [target] * (not c.tie_word_embeddings)
    ends = 2 * norm * (final_norm or kind is PreNormSeq2Seq)
    model = kind(c)
    assert numel(model.encoder_blocks) == encoder
    assert numel(model.blocks) == decoder
    assert numel(model) == encoder + decoder + ends + 16 * sum(tables)


@own_sizes
def test_the_output_layer_is_the_table_of_the_target_or_its_own(own, tmp_path):
    model = make(**own)
    c = model.config
    target = c.decoder_vocab_size or c.vocab_size
    assert model.embed.weight.shape == model.lm_head.weight.shape == (target, 16)
    assert (model.lm_head.weight is model.embed.weight) == c.tie_word_embeddings
    if c.decoder_vocab_size is None:
        assert model.encoder_embed is None
    else:
        assert model.encoder_embed.weight.shape == (c.vocab_size, 16)
        assert model.encoder_embed.scale == model.embed.scale == 4.0
        assert model.encoder_embed.weight is not model.embed.weight
    logits = model(draw_ids(2, 5), encoder_hidden_states=model.encode(draw_ids(2, 7)))
    assert logits.shape == (2, 5, target)
    other = make(std=0.5, **own)
    other.load_state_dict(model.state_dict())
    assert equal_models(other, model)
    model.save(tmp_path)
    again = Seq2Seq.load(tmp_path)
    assert again.config == c and equal_models(again, model)
    assert (again.lm_head.weight is again.embed.weight) == c.tie_word_embeddings


def test_sizes_that_are_left_out_change_no_number():
    "Neither a name nor a random number, and older files name none of them."
    model = make()
    assert not [n for n in model.state_dict() if n.startswith("encoder_embed")]
    values = SMALL.to_dict()
    older = {
        name: values[name]
        for name in (
            "vocab_size",
            "d_model",
            "n_layers",
            "n_heads",
            "d_ff",
            "max_len",
            "dropout",
            "eps",
            "final_norm",
        )
    }
    assert Seq2SeqConfig.from_dict(older) == SMALL
    one, same_depth, untied = (
        (torch.manual_seed(0), Seq2Seq(dataclasses.replace(SMALL, **changes)))[1]
        for changes in ({}, dict(n_decoder_layers=2), dict(tie_word_embeddings=False))
    )
    assert equal_models(one, same_depth)
    untied = untied.state_dict()
    assert all(
        torch.equal(x, untied[name])
        for name, x in one.state_dict().items()
        if name != "lm_head.weight"
    )


def test_each_text_has_ids_of_its_own_vocabulary():
    model = make(vocab_size=60, decoder_vocab_size=40)
    memory = model.encode(torch.tensor([[59, 40, 3]]))
    model(torch.tensor([[39]]), encoder_hidden_states=memory)
    with pytest.raises(ValueError, match="id 60 is outside the vocabulary of 60 ids"):
        model.encode(torch.tensor([[3, 60]]))
    with pytest.raises(ValueError, match="id 40 is outside the vocabulary of 40 ids"):
        model(torch.tensor([[3, 40]]), encoder_hidden_states=memory)


@own_sizes
def test_greedy_and_the_loss_take_sizes_of_their_own(own):
    model = make(std=0.3, **own)
    target = model.config.decoder_vocab_size or model.config.vocab_size
    src = draw_ids(3, 7, high=model.config.vocab_size)
    src[1, 4:] = 0
    how = dict(
        decoder_start_token_id=1, eos_token_id=2, encoder_attention_mask=src != 0
    )
    out = greedy(model, src, 8, **how)
    assert torch.equal(out, greedy(model, src, 8, cached=False, **how))
    assert out.max() < target
    logits = model(
        shift_right(out, 1),
        encoder_hidden_states=model.encode(src, src != 0),
        encoder_attention_mask=src != 0,
    )
    loss = teacher_forced_loss(
        model, src, out, decoder_start_token_id=1, pad_token_id=0
    )
    close(loss, F.cross_entropy(logits.flatten(0, 1), out.flatten(), ignore_index=0))


def test_numbers_start_at_the_size_they_should():
    torch.manual_seed(0)
    model = Seq2Seq(Seq2SeqConfig(vocab_size=4000, n_layers=1, dropout=0.0))
    src, ids = draw_ids(2, 2, 100, high=4000)
    with torch.no_grad():
        entered = model.embed_inputs(src, model.prepare_positions(src))
        logits = model(ids, encoder_hidden_states=model.encode(src))
    assert abs(model.embed(src).square().mean().item() - 1.0) < 0.03
    assert abs(entered.square().mean().item() - 1.5) < 0.04
    assert abs(logits.var().item() - 1.0) < 0.1
    for name, p in model.named_parameters():
        if p.ndim == 2:
            d = p.shape[1]
            assert abs(p.var().item() * d - 1) < 0.05, name
        else:
            assert (p == (1.0 if name.endswith("weight") else 0.0)).all()


def test_blocks_are_wrapped_as_they_say_and_attention_is_causal_once():
    for kind, arrange in ((Seq2Seq, PostNorm), (PreNormSeq2Seq, PreNorm)):
        model = make(kind, dropout=0.3, eps=1e-3)
        assert len(model.blocks) == len(model.encoder_blocks) == 2
        for block in (*model.encoder_blocks, *model.blocks):
            wrapped = list(block.children())
            assert {type(m) for m in wrapped} == {arrange}
            assert {m.dropout.p for m in wrapped} == {0.3}
            assert {m.norm.eps for m in wrapped} == {1e-3}
        for block in model.blocks:
            assert block.attention.sublayer.causal
            assert isinstance(block.cross_attention.sublayer, CrossAttention)
        assert not any(b.attention.sublayer.causal for b in model.encoder_blocks)
        assert model.dropout.p == 0.3
        ends = [type(m).__name__ for m in (model.encoder_norm, model.norm)]
        assert ends == [["Identity"] * 2, ["LayerNorm"] * 2][kind is PreNormSeq2Seq]
    model = make(PreNormSeq2Seq, eps=1e-3)
    assert model.norm.eps == model.encoder_norm.eps == 1e-3


def wrapped(arrange, *parts):
    return [arrange(LayerNorm(16), part) for part in parts]


@pytest.mark.parametrize("arrange", [PostNorm, PreNorm])
def test_an_encoder_block_with_causal_attention_takes_a_cache(arrange):
    block = spread(
        TransformerBlock(
            *wrapped(arrange, SelfAttention(16, 4, causal=True), FeedForward(16, 24))
        ),
        0.3,
    )
    x = randn(2, 6, 16)
    cache = block.new_cache(2)
    parts = [block(part, cache=cache) for part in x.split([2, 1, 3], 1)]
    close(torch.cat(parts, 1), block(x))


@pytest.mark.parametrize("arrange", [PostNorm, PreNorm])
def test_blocks_hand_their_arguments_on(arrange):
    x = randn(2, 4, 16)
    memory = randn(2, 5, 16, seed=1)
    positions = torch.tensor([[0, 1, 2, 3], [0, 1, -1, -1]])
    encoder_positions = torch.tensor([[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]])
    block = spread(
        DecoderBlock(
            *wrapped(
                arrange,
                SelfAttention(16, 4, causal=True),
                CrossAttention(16, 4),
                FeedForward(16, 24),
            )
        ),
        0.3,
    )
    out = block(
        x,
        encoder_hidden_states=memory,
        encoder_positions=encoder_positions,
        positions=positions,
    )
    close(out[1:, :2], block(x[1:, :2], encoder_hidden_states=memory[1:, 2:]))


def test_dropout_acts_in_training_only_and_in_every_place():
    model = make(dropout=0.5)
    ids = draw_ids(2, 5)

    def run():
        return model(ids, encoder_hidden_states=model.encode(ids))

    assert torch.equal(run(), run())
    for part in model.modules():  # each place by itself
        if isinstance(part, seq2seq.Dropout) and part.p:
            part.train()
            assert not torch.equal(run(), run())
            part.eval()
    active = [
        m for m in model.modules() if isinstance(m, seq2seq.Dropout) and m.p == 0.5
    ]
    assert len(active) == 1 + 2 * 2 + 2 * 3  # where they enter, each part
    model.train()
    assert not torch.equal(run(), run())


def test_too_long_texts_are_refused_naming_both_numbers():
    model = make()
    memory = torch.zeros(1, 3, 16)
    with pytest.raises(ValueError, match=r"21 tokens.*max_len 20"):
        model.encode(draw_ids(1, 21))
    with pytest.raises(ValueError, match=r"21 tokens.*max_len 20"):
        model(draw_ids(1, 21), encoder_hidden_states=memory)
    cache = model.new_cache(1)
    model(draw_ids(1, 20), encoder_hidden_states=memory, cache=cache)
    with pytest.raises(ValueError, match=r"21 tokens.*max_len 20"):
        model(draw_ids(1, 1), encoder_hidden_states=memory, cache=cache)
    with pytest.raises(ValueError, match=r"21 tokens.*max_len 20"):
        model(
            draw_ids(1, 1), encoder_hidden_states=memory, positions=torch.tensor([[20]])
        )
    positions = torch.arange(22)[None] - 2  # the padding is not counted
    model(draw_ids(1, 22), encoder_hidden_states=memory, positions=positions)
    cache = model.new_cache(2)
    model(
        draw_ids(2, 20),
        encoder_hidden_states=memory.repeat(2, 1, 1),
        cache=cache,
        positions=torch.stack([torch.arange(20), torch.arange(20) - 3]),
    )
    with pytest.raises(ValueError, match=r"21 tokens.*max_len 20"):
        model(draw_ids(2, 1), encoder_hidden_states=memory.repeat(2, 1, 1), cache=cache)


@pytest.mark.parametrize(
    "mask, said",
    [
        (torch.ones(2, 5), "mask must hold True and False"),
        (torch.tensor([[0, 1, 2, 1, 1]]), "mask must hold .* 0 and 1, got"),
        (torch.ones(2, 4).bool(), r"\(2, 4\) do not fit x \(2, 5"),
        (torch.ones(3, 5).bool(), r"\(3, 5\) do not fit x \(2, 5"),
        (torch.ones(2, 1, 1, 5).bool(), r"mask must be of shape \(b, n\)"),
    ],
)
def test_masks_that_do_not_fit_are_refused(mask, said):
    model = make()
    src = draw_ids(2, 5)
    with pytest.raises(ValueError, match=said):
        model.encode(src, mask)
    with pytest.raises(ValueError, match=said):
        model(src, encoder_hidden_states=model.encode(src), encoder_attention_mask=mask)


def test_an_encoder_output_of_another_batch_is_refused():
    with pytest.raises(ValueError, match=r"\(2, s, m\).*got \(3, 5, 16\)"):
        make()(draw_ids(2, 5), encoder_hidden_states=torch.zeros(3, 5, 16))


def test_a_mask_of_zeros_and_ones_is_a_mask():
    model = make(std=0.3)
    src = draw_ids(2, 5)
    keep = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    assert torch.equal(model.encode(src, keep), model.encode(src, keep.bool()))


# positions, shift, loss, greedy


def test_positions_count_the_tokens_on_any_side():
    ids = torch.tensor([[5, 6, 7], [0, 5, 6], [5, 0, 0], [0, 0, 0]])
    assert positions_from_padding(ids, 0).tolist() == [
        [0, 1, 2],
        [-1, 0, 1],
        [0, -1, -1],
        [-1, -1, -1],
    ]
    assert positions_from_padding(ids, 5).dtype == torch.int64


def test_shift_right_begins_with_the_start_and_drops_the_last():
    ids = torch.tensor([[11, 12, 13, 2]])
    assert shift_right(ids, 1).tolist() == [[1, 11, 12, 13]]
    assert ids.tolist() == [[11, 12, 13, 2]]
    assert shift_right(ids[:, :1], 7).tolist() == [[7]]


def test_the_loss_equals_predictions_made_one_by_one():
    model = make(std=0.3)
    src, _ = padded_sources()
    targets = draw_ids(3, 5, seed=1)
    targets[0, 3:] = 0
    targets[2, 4:] = 0
    losses = []
    with torch.no_grad():
        for row in range(3):
            memory = model.encode(src[row][src[row] != 0][None])
            seen = torch.tensor([[1]])
            for token in targets[row][targets[row] != 0]:
                logits = model(seen, encoder_hidden_states=memory)[0, -1]
                losses.append(-logits.log_softmax(-1)[token])
                seen = torch.cat([seen, token.view(1, 1)], 1)
        at_once = teacher_forced_loss(
            model, src, targets, decoder_start_token_id=1, pad_token_id=0
        )
    assert len(losses) == 12
    close(at_once, torch.stack(losses).mean())


def test_without_a_padding_id_every_target_counts():
    model = make()
    src = draw_ids(2, 6)
    targets = draw_ids(2, 4, seed=1)
    targets[0, 3] = 0
    logits = model(shift_right(targets, 1), encoder_hidden_states=model.encode(src))
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    close(teacher_forced_loss(model, src, targets, decoder_start_token_id=1), want)
    ours = teacher_forced_loss(
        model, src, targets, decoder_start_token_id=1, pad_token_id=0
    )
    assert abs(ours - want) > 1e-4


def test_the_loss_of_a_narrow_model_is_wide():
    model = make().bfloat16()
    loss = teacher_forced_loss(
        model, draw_ids(2, 6), draw_ids(2, 4), decoder_start_token_id=1
    )
    assert loss.dtype == torch.float32


def test_greedy_is_the_same_with_and_without_a_cache():
    src, keep = padded_sources()
    for kind in (Seq2Seq, PreNormSeq2Seq):
        for eos in (2, 12):
            model = talkative(make(kind))
            out = greedy(
                model,
                src,
                12,
                decoder_start_token_id=1,
                eos_token_id=eos,
                encoder_attention_mask=keep,
            )
            slow = greedy(
                model,
                src,
                12,
                decoder_start_token_id=1,
                eos_token_id=eos,
                encoder_attention_mask=keep,
                cached=False,
            )
            assert torch.equal(out, slow) and len(out.unique()) > 1


def test_greedy_takes_the_likeliest_token_each_time():
    model = talkative(make())
    src = draw_ids(2, 7)
    out = greedy(model, src, 6, decoder_start_token_id=1, eos_token_id=-1)
    assert len(out.unique()) > 2
    assert out.shape == (2, 6)
    logits = model(shift_right(out, 1), encoder_hidden_states=model.encode(src))
    assert torch.equal(logits.argmax(-1), out)


class Script(nn.Module):
    "Says what is written down, whatever it reads."

    def __init__(self, rows):
        super().__init__()
        self.rows = torch.tensor(rows)
        self.calls = []

    def encode(self, src, mask=None):
        return torch.zeros(len(src), src.shape[1], 4)

    def new_cache(self, batch):
        return [0]

    def forward(
        self, ids, *, encoder_hidden_states, encoder_attention_mask=None, cache=None
    ):
        self.calls.append(tuple(ids.shape))
        assert not torch.is_grad_enabled()
        start = 0 if cache is None else cache[0]
        if cache is not None:
            cache[0] += ids.shape[1]
        said = self.rows[:, start : start + ids.shape[1]]
        return F.one_hot(said, 10).float()


@pytest.mark.parametrize("cached", [True, False])
def test_greedy_stops_each_row_at_its_end_and_then_altogether(cached):
    model = Script([[5, 2, 7, 8, 9, 6], [5, 6, 7, 2, 9, 6], [2, 5, 6, 7, 9, 6]])
    src = draw_ids(3, 4)
    out = greedy(model, src, 6, decoder_start_token_id=1, eos_token_id=2, cached=cached)
    assert out.tolist() == [[5, 2, 2, 2], [5, 6, 7, 2], [2, 2, 2, 2]]
    assert model.calls == [(3, 1 if cached else n + 1) for n in range(4)]
    assert (
        greedy(
            Script([[5, 6, 7, 8]] * 3), src, 3, decoder_start_token_id=1, eos_token_id=2
        ).tolist()
        == [[5, 6, 7]] * 3
    )
    assert greedy(model, src, 0, decoder_start_token_id=1, eos_token_id=2).shape == (
        3,
        0,
    )
    # a start that is the end as well does not end anything
    out = greedy(
        Script([[5, 6, 2, 8]] * 3), src, 4, decoder_start_token_id=2, eos_token_id=2
    )
    assert out.tolist() == [[5, 6, 2]] * 3


def test_greedy_ends_each_row_by_itself():
    out = greedy(
        Script([[5, 2, 7, 8], [5, 6, 7, 2]]),
        draw_ids(2, 4),
        4,
        decoder_start_token_id=1,
        eos_token_id=2,
    )
    assert out.tolist() == [[5, 2, 2, 2], [5, 6, 7, 2]]


def test_greedy_writes_for_each_row_what_it_writes_alone():
    model = talkative(make())
    src, keep = padded_sources("left")
    out = greedy(
        model,
        src,
        8,
        decoder_start_token_id=1,
        eos_token_id=2,
        encoder_attention_mask=keep,
    )
    for row in range(3):
        alone = greedy(
            model,
            src[row, keep[row]][None],
            8,
            decoder_start_token_id=1,
            eos_token_id=2,
        )
        assert torch.equal(alone[0], out[row, : alone.shape[1]])


@plain_only
def test_it_learns_to_reverse():
    def batches(seed, batch=32, n=4):
        g = generator(seed)
        while True:
            src = torch.randint(3, 11, (batch, n), generator=g)
            yield src, F.pad(src.flip(1), (0, 1), value=2)

    torch.manual_seed(0)
    model = Seq2Seq(
        Seq2SeqConfig(
            vocab_size=11,
            d_model=32,
            n_layers=1,
            n_heads=4,
            d_ff=64,
            max_len=8,
            dropout=0.0,
        )
    )
    losses = train(
        model,
        batches(0),
        250,
        lambda m, b: teacher_forced_loss(
            m, *b, decoder_start_token_id=1, pad_token_id=0
        ),
        lr=1e-2,
    )
    src, targets = next(batches(9, batch=100))
    out = greedy(model.eval(), src, 5, decoder_start_token_id=1, eos_token_id=2)
    assert losses[0] > 2 and losses[-1] < 0.2
    assert (out == targets).all(1).float().mean() > 0.8


# configurations


@pytest.mark.parametrize(
    "bad, words",
    [
        (dict(vocab_size=0), "vocab_size.*got 0"),
        (dict(n_layers=-1), "n_layers.*got -1"),
        (dict(n_layers=2.0), "n_layers.*got 2.0"),
        (dict(d_ff=True), "d_ff.*got True"),
        (dict(max_len="20"), "max_len.*got '20'"),
        (dict(n_heads=0), "n_heads.*got 0"),
        (dict(d_model=18), "d_model 18 .*n_heads 4"),
        (dict(d_model=15, n_heads=5), "d_model 15 must be even"),
        (dict(dropout=1.0), "dropout.*got 1.0"),
        (dict(dropout=-0.1), "dropout.*got -0.1"),
        (dict(dropout="0.1"), "dropout.*got '0.1'"),
        (dict(dropout=float("nan")), "dropout.*got nan"),
        (dict(eps=0.0), "eps.*got 0.0"),
        (dict(eps=True), "eps.*got True"),
        (dict(final_norm=1), "final_norm.*got 1"),
        (dict(n_decoder_layers=0), "n_decoder_layers must be .* at least 1, got 0"),
        (dict(n_decoder_layers=True), "n_decoder_layers.*got True"),
        (dict(n_decoder_layers=2.0), "n_decoder_layers.*got 2.0"),
        (dict(decoder_vocab_size=0), "decoder_vocab_size must be .* at least 1, got 0"),
        (dict(decoder_vocab_size=True), "decoder_vocab_size.*got True"),
        (dict(decoder_vocab_size="40"), "decoder_vocab_size.*got '40'"),
        (dict(tie_word_embeddings=0), "tie_word_embeddings must be .*got 0"),
        (dict(tie_word_embeddings=None), "tie_word_embeddings.*got None"),
    ],
)
def test_bad_fields_are_refused_naming_the_value(bad, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(SMALL, **bad)


# files


# other ways to run


def test_bfloat16_is_near_float32():
    model = make()
    src = draw_ids(2, 7)
    ids = draw_ids(2, 5, seed=1)
    want = model(ids, encoder_hidden_states=model.encode(src))
    low = copy.deepcopy(model).bfloat16()
    out = low(ids, encoder_hidden_states=low.encode(src))
    assert out.dtype == torch.bfloat16
    assert (out.float() - want).abs().max() < 0.05 * want.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(ids, encoder_hidden_states=model.encode(src))
    assert (out.float() - want).abs().max() < 0.05 * want.abs().max()


def test_works_on_meta_tensors():
    with torch.device("meta"):
        model = Seq2Seq(SMALL)
        src = torch.zeros(2, 5, dtype=torch.int64)
        out = model(
            src,
            encoder_hidden_states=model.encode(src, src == 0),
            encoder_attention_mask=src == 0,
        )
    assert out.shape == (2, 5, 40)


@pytest.mark.gpu
@kinds
def test_runs_on_a_gpu(kind, tmp_path):
    model = make(kind, 0.3)
    src, keep = padded_sources()
    ids = draw_ids(3, 5, seed=1)
    want = model(
        ids, encoder_hidden_states=model.encode(src, keep), encoder_attention_mask=keep
    )
    written = greedy(
        model,
        src,
        6,
        decoder_start_token_id=1,
        eos_token_id=2,
        encoder_attention_mask=keep,
    )
    model.cuda()
    src = src.cuda()
    keep = keep.cuda()
    ids = ids.cuda()
    out = model(
        ids, encoder_hidden_states=model.encode(src, keep), encoder_attention_mask=keep
    )
    close(out.cpu(), want, 1e-4)
    assert torch.equal(
        greedy(
            model,
            src,
            6,
            decoder_start_token_id=1,
            eos_token_id=2,
            encoder_attention_mask=keep,
        ).cpu(),
        written,
    )
    assert check.run_all(check.FixedSourceModel(model, src[:1]), 40)
    model.save(tmp_path)
    assert equal_models(kind.load(tmp_path), model.cpu())
