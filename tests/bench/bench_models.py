"""Compare whole models with their twins: python tests/bench/bench_models.py

The peers are the models of transformers, on PyTorch's fused attention, with
weights equal to ours. Every row is a ratio of processor times, as in
bench_parts.py: "forward" runs without gradients, "and backward" takes the
gradient of all parameters, "a step" decodes a few tokens, one by one, after a
text of some rows and tokens that both have in their caches. Before anything is
timed, both sides must have computed the same logits and gradients. Both read the
very same weights, unless the peer lays them the other way round.

--quick           small sizes, one round: that everything runs, not how fast
--only WORD       only the models whose name holds the word
--threads N       threads of PyTorch (then the processor time of all of them)
"""

import copy
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from transformers import BertConfig as TheirBertConfig
from transformers import (
    BertForPreTraining,
    DynamicCache,
    EncoderDecoderCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers import LlamaConfig as TheirLlamaConfig
from transformers.modeling_outputs import BaseModelOutput

sys.path.insert(0, str(Path(__file__).parent))
import timing
from bench_parts import Case, Size, as_list, compare, fill, ids_of, measure, run
from tformer.models import bert, gpt, llama, seq2seq
from tformer.nn.kv_cache import KVCache

TARGET = 1.0
SIZES = [Size(8, 64, 256, 4), Size(4, 256, 512, 8)]
LAYERS = 4
VOCAB = 2000
STEPS = 32  # tokens of a cached row, one by one
# rows and tokens in the cache when a step begins, and its target
SHORT = [(1, 8, None), (2, 8, None)]
CACHED = [(1, 64, 0.9), (8, 64, 0.9), (1, 1024, 0.85), (8, 1024, 0.85)]


# names of theirs, from names of ours: a pattern, what becomes of it, and
# whether a matrix lies the other way round

GPT2 = [
    (r"embed\.weight", "transformer.wte.weight"),
    (r"embed_positions\.weight", "transformer.wpe.weight"),
    (r"norm\.(.*)", r"transformer.ln_f.\1"),
    (r"blocks\.(\d+)\.attention\.norm", r"transformer.h.\1.ln_1"),
    (r"blocks\.(\d+)\.attention\.sublayer\.qkv_proj", r"transformer.h.\1.attn.c_attn"),
    (r"blocks\.(\d+)\.attention\.sublayer\.o_proj", r"transformer.h.\1.attn.c_proj"),
    (r"blocks\.(\d+)\.feed_forward\.norm", r"transformer.h.\1.ln_2"),
    (r"blocks\.(\d+)\.feed_forward\.sublayer\.up_proj", r"transformer.h.\1.mlp.c_fc"),
    (
        r"blocks\.(\d+)\.feed_forward\.sublayer\.down_proj",
        r"transformer.h.\1.mlp.c_proj",
    ),
]
GPT1 = [
    (a, b.replace("wte", "tokens_embed").replace("wpe", "positions_embed"))
    for a, b in GPT2
]
LLAMA = [
    (r"embed\.", "model.embed_tokens."),
    (r"norm\.", "model.norm."),
    (r"blocks\.(\d+)\.attention\.norm", r"model.layers.\1.input_layernorm"),
    (r"blocks\.(\d+)\.attention\.sublayer", r"model.layers.\1.self_attn"),
    (r"blocks\.(\d+)\.feed_forward\.norm", r"model.layers.\1.post_attention_layernorm"),
    (r"blocks\.(\d+)\.feed_forward\.sublayer", r"model.layers.\1.mlp"),
]
MARIAN = [
    (r"embed\.", "model.shared."),
    *(
        (rf"{blocks}\.(\d+)\.{ours}", rf"model.{stack}.layers.\1.{peer}")
        for blocks, stack in (("encoder_blocks", "encoder"), ("blocks", "decoder"))
        for ours, peer in (
            (r"attention\.sublayer\.o_proj", "self_attn.out_proj"),
            (r"attention\.sublayer", "self_attn"),
            (r"attention\.norm", "self_attn_layer_norm"),
            (r"cross_attention\.sublayer\.o_proj", "encoder_attn.out_proj"),
            (r"cross_attention\.sublayer", "encoder_attn"),
            (r"cross_attention\.norm", "encoder_attn_layer_norm"),
            (r"feed_forward\.sublayer\.up_proj", "fc1"),
            (r"feed_forward\.sublayer\.down_proj", "fc2"),
            (r"feed_forward\.norm", "final_layer_norm"),
        )
    ),
]


def renamed(tensors, rules):
    "Our tensors by the names of theirs, laid as theirs."
    found = {}
    for name, x in tensors.items():
        for pattern, new in rules:
            if re.match(pattern, name):
                name = re.sub("^" + pattern, new, name)
                break
        flat = ".c_" in name and x.ndim == 2  # GPT's Conv1D
        found[name] = x.T if flat else x
    return found


@dataclass
class Twins:
    "A model of ours, its twin with equal weights, and how both are run."

    name: str
    ours: nn.Module
    peer: nn.Module
    rename: object  # our named tensors, as theirs
    inputs: tuple
    run_ours: object
    run_peer: object
    step: object = None  # of ids: two functions, cached steps of each

    def __post_init__(self):
        width = self.ours.config.d_model  # keeps what flows at size 1
        fill(self.ours, min(0.1, width**-0.5))
        given = self.rename(dict(self.ours.named_parameters()))
        known = self.leaves()
        assert known.keys() == given.keys(), known.keys() ^ given.keys()
        for name, x in given.items():
            assert known[name].shape == x.shape, name
            known[name].data = x.data.contiguous()

    def leaves(self):
        "The parameters of the peer."
        return {name: p for name, p in self.peer.named_parameters() if p.requires_grad}

    def case(self):
        "Logits and gradients of both, ours laid as theirs."
        ours = dict(self.ours.named_parameters())
        theirs = self.leaves()

        def align(results):
            n = len(results) - len(ours)
            if n < 1:  # no gradients among them
                return results
            found = self.rename(dict(zip(ours, results[n:], strict=False)))
            return [*results[:n], *(found[name] for name in theirs)]

        return Case(
            self.name,
            self.run_ours,
            self.run_peer,
            self.inputs,
            modules=(self.ours, self.peer),
            align=align,
            leaves=(tuple(ours.values()), tuple(theirs.values())),
            target=TARGET,
        )

    def measure(self):
        measure(self.case())
        if self.step:
            self.ours.eval(), self.peer.eval()
            for rows, tokens, target in SHORT if timing.quick else CACHED:
                ids = ids_of(Size(rows, tokens, 0, 0), VOCAB)
                with torch.no_grad():
                    ours, peer = self.step(ids)
                    compare(
                        Case(self.name, None, None, target=target, finely=True),
                        f"a step, {rows} x {tokens}",
                        ours,
                        peer,
                        as_list,
                    )


def branch(cache):
    "A cache that goes on by itself, and leaves the other as it is."
    if hasattr(cache, "layers"):
        return KVCache([branch(layer) for layer in cache.layers])
    return copy.copy(cache)


def in_place(ours, cache, peer, theirs):
    """``STEPS`` steps each, that leave both caches as they were.

    ``ours(cache)`` and ``peer(theirs)`` run one step each; ``theirs`` is, or
    holds, the cache of the keys and values that grow.
    """
    grows = getattr(theirs, "self_attention_cache", theirs)
    kept = [(layer.keys, layer.values) for layer in grows.layers]
    steps = 2 if timing.quick else STEPS

    def our_steps():
        with torch.no_grad():
            own = branch(cache)
            return [ours(own) for _ in range(steps)][-1]

    def peer_steps():
        for layer, held in zip(grows.layers, kept, strict=True):
            layer.keys, layer.values = held
        with torch.no_grad():
            return [peer(theirs) for _ in range(steps)][-1]

    return our_steps, peer_steps


def decoder_step(ours, peer):
    "Tokens after a text, one by one, by both."

    def make(ids):
        cache = ours.new_cache(len(ids))
        theirs = DynamicCache()
        ours(ids, cache=cache)
        peer(ids, past_key_values=theirs, use_cache=True)
        last = ids[:, -1:]
        return in_place(
            lambda c: ours(last, cache=c),
            cache,
            lambda c: peer(last, past_key_values=c, use_cache=True).logits,
            theirs,
        )

    return make


def decoder(name, ours, peer, rules, ids, cached=True):
    return Twins(
        name,
        ours,
        peer,
        lambda x: renamed(x, rules),
        (ids,),
        ours,
        lambda ids: peer(ids, use_cache=False).logits if cached else peer(ids).logits,
        decoder_step(ours, peer) if cached else None,
    )


def bench_gpt(size):
    ids = ids_of(size, VOCAB)
    config = gpt.GPTConfig(
        vocab_size=VOCAB,
        d_model=size.d,
        n_heads=size.h,
        n_layers=LAYERS,
        max_len=2048,
        dropout=0.0,
    )
    numbers = dict(
        vocab_size=VOCAB,
        n_positions=2048,
        n_embd=size.d,
        n_layer=LAYERS,
        n_head=size.h,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    peer = GPT2LMHeadModel(GPT2Config(**numbers))
    yield decoder("GPT / GPT2LMHeadModel", gpt.GPT(config), peer, GPT2, ids)
    peer = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**numbers, afn="gelu"))
    yield decoder(
        "GPT1 / OpenAIGPTLMHeadModel",
        gpt.GPT1(replace(config, activation="gelu_tanh")),
        peer,
        GPT1,
        ids,
        cached=False,
    )


def bench_llama(size):
    ids = ids_of(size, VOCAB)
    for name, kv, ours, config, peer in (
        ("Llama", size.h, llama.Llama, TheirLlamaConfig, LlamaForCausalLM),
        ("Llama, GQA", size.h // 4, llama.Llama, TheirLlamaConfig, LlamaForCausalLM),
        ("Qwen3", size.h // 2, llama.Qwen3, Qwen3Config, Qwen3ForCausalLM),
    ):
        numbers = llama.LlamaConfig(
            vocab_size=VOCAB,
            d_model=size.d,
            n_heads=size.h,
            n_kv_heads=kv,
            n_layers=LAYERS,
            d_ff=3 * size.d,
            max_len=2048,
        )
        theirs = config(
            vocab_size=VOCAB,
            hidden_size=size.d,
            num_attention_heads=size.h,
            num_key_value_heads=kv,
            num_hidden_layers=LAYERS,
            head_dim=size.d // size.h,
            intermediate_size=3 * size.d,
            max_position_embeddings=2048,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
        )
        theirs._attn_implementation = "sdpa"
        yield decoder(
            f"{name} / {peer.__name__}", ours(numbers), peer(theirs), LLAMA, ids
        )


def bench_bert(size):
    config = bert.BertConfig(
        vocab_size=VOCAB,
        d_model=size.d,
        n_heads=size.h,
        n_layers=LAYERS,
        max_len=512,
        dropout=0.0,
    )
    peer = BertForPreTraining(
        TheirBertConfig(
            vocab_size=VOCAB,
            hidden_size=size.d,
            num_attention_heads=size.h,
            num_hidden_layers=LAYERS,
            intermediate_size=4 * size.d,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    names = [name for name, _ in peer.named_parameters()]
    segments = (torch.arange(size.t) >= size.t // 2).long().expand(size.b, -1)
    ours = bert.BertPretraining(config)
    yield Twins(
        "BERT / BertForPreTraining",
        ours,
        peer,
        lambda x: {name: x[bert.from_hf_bert_name(name)] for name in names},
        (ids_of(size, VOCAB), segments),
        lambda ids, segments: ours(ids, segment_ids=segments),
        lambda ids, segments: peer(ids, token_type_ids=segments).to_tuple(),
    )


def marian_step(ours, peer):
    "Tokens after a text, the translation of a source, by both."

    def make(ids):
        cache = ours.new_cache(len(ids))
        last = ids[:, -1:]
        src = ids[:, :64].flip(1)
        theirs = EncoderDecoderCache(DynamicCache(), DynamicCache())
        memory = ours.encode(src)
        state = BaseModelOutput(peer.model.encoder(src)[0])

        def peer_step(ids, cache):
            return peer(
                decoder_input_ids=ids,
                encoder_outputs=state,
                past_key_values=cache,
                use_cache=True,
            ).logits

        ours(ids, encoder_hidden_states=memory, cache=cache)
        peer_step(ids, theirs)
        return in_place(
            lambda c: ours(last, encoder_hidden_states=memory, cache=c),
            cache,
            lambda c: peer_step(last, c),
            theirs,
        )

    return make


def bench_seq2seq(size):
    src = ids_of(size, VOCAB)
    ids = src.flip(1)
    ours = seq2seq.Seq2Seq(
        seq2seq.Seq2SeqConfig(
            vocab_size=VOCAB,
            d_model=size.d,
            n_heads=size.h,
            n_layers=LAYERS,
            d_ff=4 * size.d,
            dropout=0.0,
            max_len=2048,
        )
    )
    peer = MarianMTModel(
        MarianConfig(
            vocab_size=VOCAB,
            d_model=size.d,
            encoder_layers=LAYERS,
            decoder_layers=LAYERS,
            encoder_attention_heads=size.h,
            decoder_attention_heads=size.h,
            encoder_ffn_dim=4 * size.d,
            decoder_ffn_dim=4 * size.d,
            max_position_embeddings=2048,
            activation_function="relu",
            scale_embedding=True,
            dropout=0.0,
            pad_token_id=0,
            decoder_start_token_id=0,
            attn_implementation="sdpa",
        )
    )
    for module in peer.modules():
        if isinstance(module, nn.Embedding):
            module.padding_idx = None  # row 0 is a token like others
    # the same sinusoids, in the order of columns that Marian has
    ours.embed_positions.table = peer.model.encoder.embed_positions.weight.data
    yield Twins(
        "Seq2Seq / MarianMTModel",
        ours,
        peer,
        lambda x: renamed(x, MARIAN),
        (src, ids),
        lambda src, ids: ours(ids, encoder_hidden_states=ours.encode(src)),
        lambda src, ids: peer(src, decoder_input_ids=ids, use_cache=False).logits,
        marian_step(ours, peer),
    )


BENCHES = [bench_seq2seq, bench_bert, bench_gpt, bench_llama]


def main():
    run(
        __doc__,
        BENCHES,
        SIZES,
        lambda size: (
            f"{size} (rows, tokens, d_model), {size.h} heads, {LAYERS} layers, "
            f"{VOCAB:,} ids"
        ),
        Twins.measure,
    )


if __name__ == "__main__":
    main()
