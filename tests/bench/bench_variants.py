"""What do the variants of attention gain? python tests/bench/bench_variants.py

Shared keys: one attention layer writes a token for each of eight texts that hold
2,048 tokens, with all key heads and with a quarter of them, in turn. The row is the
ratio of their times, divided by the ratio of the bytes that they have to read. The
target is 0.7, at three widths. Beside it stand a whole step of a decoder of such
layers, with the share of it that attention takes, and the bytes of the caches
against the formula of `tformer.costs`, which may differ by 2 %.

Latent attention: one layer of the size of DeepSeek-V2-Lite's writes a token of one
text that holds 2,048 tokens, in turn with the attention layer of DeepSeek-V3 in
`transformers`, which projects all that it keeps to keys and values in every step.
Ours has to be 20 times faster. A whole step of a decoder of two such layers has to
be 1.1 times faster than the same step of `DeepseekV3ForCausalLM`. Both sides have
random weights of their own. The bytes of the cache may differ by 2 % from one latent
and one rotary key of each layer and token. One thread.

Sliding windows: a layer with a window of w = 512 tokens writes a token of a text of
which 8 w tokens were read, in turn with one of 2 w tokens; the times may differ by
10 %. `window_attend` reads 16 w tokens in half of the time that the causal kernel
takes, or less, and 8 w tokens in 0.3 of the time of the kernel that is given the
window as a mask: attention alone, 8 query heads, 2 key heads. The masks are made
beforehand. Beside it stands FlexAttention, compiled. A whole step of a decoder of two
such layers has to be 1.1 times faster than the same step of `MistralForCausalLM` with
the same weights and the same cache, with a window of 2,048 tokens. One thread.

Sparse attention: a token of a text of 4,096 reads 256 tokens that an indexer chooses.
This attention, with the indexer, has to be 3 times faster than the dense one of the
same layer, which has the size of DeepSeek-V2-Lite's: from given queries to mixtures of
latents, with caches that other weights have emptied (`experiments/sparse_speed.py`).
Beside it stands the ratio of the whole layers. The sparse layer, with queries from a
latent of 1,536 numbers, has to be 1.1 times faster than `DeepseekV32Attention` in
`transformers` with the same weights and the same cache, which chooses the same tokens.
The bytes of the cache may differ by 2 % from one latent, one rotary key and one key of
the indexer for each token. One thread.

--quick           small sizes, one round: that everything runs
"""

import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DynamicCache,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as peers
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as sparse_peers

import bench_models
import timing

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import common
import gqa_speed
import mla_speed
import sparse_speed
import window_speed
from tformer.costs import kv_cache_bytes, spec_from_config
from tformer.models.llama import Llama, LlamaConfig
from tformer.nn.positions import Positions
from tformer.variants.mla import DEEPSEEK_NAMES, LatentAttention, make_mla_factory
from tformer.variants.sliding_window import make_window_factory
from tformer.variants.sparse import DEEPSEEK_INDEXER_NAMES

TARGET = timing.AT_LEAST, 0.7
LATENT_LAYER = timing.AT_LEAST, 20
LATENT_STEP = timing.AT_LEAST, 1.1
WINDOW_DECODE = timing.AT_MOST, 1.1
WINDOW_CAUSAL = timing.AT_MOST, 0.5
WINDOW_MASKED = timing.AT_MOST, 0.3
WINDOW_STEP = timing.AT_LEAST, 1.1
SPARSE_DECODE = timing.AT_LEAST, 3
SPARSE_LAYER = timing.AT_LEAST, 1.1
MEMORY = timing.AT_MOST, 1.02
ROUNDS = 9
LAYERS = 2
# latent attention: DeepSeek-V2-Lite's sizes, and those of --quick
LATENT = {
    "d_model": mla_speed.D_MODEL,
    "n_heads": mla_speed.N_HEADS,
    "d_ff": 10944,
    **mla_speed.SIZES,
}
SMALL = {
    "d_model": 64,
    "n_heads": 4,
    "d_ff": 96,
    "kv_rank": 16,
    "d_nope": 8,
    "d_rope": 8,
    "d_v": 8,
}
# tokens of the window, and those of --quick
WINDOW = window_speed.WINDOW
SMALL_WINDOW = 16
STEP_WINDOW = 2048  # of a whole step, in which attention is then no trifle
D_FF = 1792  # of the decoder with a window: 3.5 times its width
# sparse attention: the tokens of a text, and those of --quick with their sizes
SPARSE_TOKENS = 4096
SMALL_TOKENS = 32
SMALL_SPARSE = sparse_speed.Sizes(
    d_model=64,
    n_heads=4,
    kv_rank=16,
    d_nope=8,
    d_rope=8,
    d_v=8,
    n_index_heads=4,
    d_index=16,
    top_k=8,
)
Q_RANK = 1536  # of DeepSeek-V3.2, whose layer has no other queries
VOCAB = 512
FAILED = []


def tell(name, value, target, detail):
    "Print a row, and remember it if the target is missed."
    timing.row(name, value, target, detail)
    if target and value * target[0] < target[1] * target[0]:
        FAILED.append((name, value))


def layer_rows(widths, tokens):
    for d_model in widths:
        row = gqa_speed.measure(
            "decode", d_model, tokens, 1 if timing.quick else ROUNDS
        )
        measured = float(row["measured"])
        predicted = float(row["predicted"])
        tell(
            f"quarter of the key heads, width {d_model}",
            measured / predicted,
            TARGET,
            f"{row['ms_all_heads']} and {row['ms_quarter']} ms: "
            f"{measured:.2f} times faster, by bytes {predicted:.2f}",
        )


def make_models(d_model):
    "A decoder with all key heads, and one with a quarter of them."
    n_heads = d_model // gqa_speed.D_HEAD
    torch.manual_seed(0)
    return [
        Llama(
            LlamaConfig(
                vocab_size=512,
                d_model=d_model,
                n_layers=LAYERS,
                n_heads=n_heads,
                n_kv_heads=n,
                max_len=4096,
            )
        ).eval()
        for n in (n_heads, n_heads // gqa_speed.GROUP)
    ]


def filled(model, tokens):
    "A cache of random keys and values, as long for all layers."
    cache = model.new_cache(gqa_speed.BATCH)
    positions = torch.arange(tokens)[None]
    for layer in cache.layers:
        layer.update(
            *(
                torch.randn(
                    gqa_speed.BATCH, model.config.n_kv_heads, tokens, gqa_speed.D_HEAD
                )
                for _ in range(2)
            ),
            positions=positions,
        )
    return cache


def step_seconds(model, tokens):
    "Seconds of a whole step, and the share of it that attention layers take."
    cache = filled(model, tokens)
    ids = torch.zeros(gqa_speed.BATCH, 1, dtype=torch.long)
    spent = []
    began = []
    hooks = []
    for block in model.blocks:
        layer = block.attention.sublayer
        hooks.append(
            layer.register_forward_pre_hook(
                lambda *given: began.append(time.perf_counter())
            )
        )
        hooks.append(
            layer.register_forward_hook(
                lambda *given: spent.append(time.perf_counter() - began[-1])
            )
        )
    model(ids, cache=cache)
    spent.clear()
    start = time.perf_counter()
    for _ in range(gqa_speed.STEPS):
        model(ids, cache=cache)
    took = time.perf_counter() - start
    for hook in hooks:
        hook.remove()
    return took / gqa_speed.STEPS, sum(spent) / took


def step_rows(widths, tokens):
    for d_model in widths:
        models = make_models(d_model)
        times = [
            [step_seconds(model, tokens) for model in models]
            for _ in range(1 if timing.quick else ROUNDS)
        ]
        ratio = median(before[0] / after[0] for before, after in times)
        shares = [median(round_[i][1] for round_ in times) for i in (0, 1)]
        tell(
            f"whole step, width {d_model}",
            ratio,
            None,
            f"times faster; attention takes {shares[0]:.0%} of a step with all "
            f"key heads, {shares[1]:.0%} with a quarter",
        )


def memory_rows(widths, tokens):
    for d_model in widths:
        for model in make_models(d_model):
            cache = filled(model, tokens)
            expected = kv_cache_bytes(
                spec_from_config(model.config), tokens, gqa_speed.BATCH, torch.float32
            )
            ratio = cache.nbytes / expected
            tell(
                f"bytes kept, {model.config.n_kv_heads} key heads, width {d_model}",
                max(ratio, 1 / ratio),
                MEMORY,
                f"{cache.nbytes:,} and {expected:,}",
            )


def latent_config(size):
    "The configurations of a decoder: ours, and that of transformers."
    ours = LlamaConfig(
        vocab_size=VOCAB,
        d_model=size["d_model"],
        n_layers=LAYERS,
        n_heads=size["n_heads"],
        d_ff=size["d_ff"],
        max_len=4096,
    )
    theirs = DeepseekV3Config(
        vocab_size=VOCAB,
        hidden_size=size["d_model"],
        num_hidden_layers=LAYERS,
        first_k_dense_replace=LAYERS,
        intermediate_size=size["d_ff"],
        num_attention_heads=size["n_heads"],
        num_key_value_heads=size["n_heads"],
        q_lora_rank=None,
        kv_lora_rank=size["kv_rank"],
        qk_nope_head_dim=size["d_nope"],
        qk_rope_head_dim=size["d_rope"],
        v_head_dim=size["d_v"],
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
        attn_implementation="sdpa",
    )
    return ours, theirs


def ranks(size):
    "Those of the sizes that only latent attention has."
    return {name: size[name] for name in mla_speed.SIZES}


def latent_filled(model, size, tokens):
    "A cache of random latents, as long for all layers; model may be a layer."
    cache = model.new_cache(1)
    for layer in getattr(cache, "layers", [cache]):
        mla_speed.fill(layer, size["kv_rank"] + size["d_rope"], tokens)
    return cache


def their_filled(config, size, layers, tokens):
    "A cache of random latents, as transformers keeps it."
    cache = DynamicCache(config=config)
    for layer in range(layers):
        cache.update(
            torch.randn(1, 1, tokens, size["kv_rank"]),
            torch.randn(1, 1, tokens, size["d_rope"]),
            layer,
        )
    return cache


def latent_layers(size, tokens):
    "Functions that return the step of a layer with a full cache: ours and theirs."
    _, config = latent_config(size)
    torch.manual_seed(0)
    ours = LatentAttention(size["d_model"], size["n_heads"], **ranks(size)).eval()
    theirs = peers.DeepseekV3Attention(config, 0).eval()
    rotary = peers.DeepseekV3RotaryEmbedding(config)
    x = torch.randn(1, 1, size["d_model"])

    def our_step():
        cache = latent_filled(ours, size, tokens)
        return lambda: ours(x, cache=cache)

    def their_step():
        cache = their_filled(config, size, 1, tokens)

        def step():
            position = torch.tensor([[cache.get_seq_length()]])
            theirs(x, rotary(x, position), None, past_key_values=cache)

        return step

    return our_step, their_step


def latent_models(size, tokens):
    "Functions that return the step of a decoder with a full cache: ours and theirs."
    our_config, config = latent_config(size)
    torch.manual_seed(0)
    ours = Llama(our_config, make_mla_factory(our_config, **ranks(size))).eval()
    theirs = DeepseekV3ForCausalLM(config).eval()
    ids = torch.zeros(1, 1, dtype=torch.long)

    def our_step():
        cache = latent_filled(ours, size, tokens)
        return lambda: ours(ids, cache=cache)

    def their_step():
        cache = their_filled(config, size, LAYERS, tokens)
        return lambda: theirs(ids, past_key_values=cache, use_cache=True)

    return our_step, their_step


def seconds_of_step(make_step, steps=mla_speed.STEPS):
    "Processor seconds of a step with a new cache, after a first one not counted."
    step = make_step()
    step()
    took, _ = timing.once(lambda: [step() for _ in range(steps)])
    return took / steps


def latent_rows(size, tokens):
    "A layer and a whole step, each against that of transformers."
    for name, make, target in (
        ("latent layer / DeepseekV3Attention", latent_layers, LATENT_LAYER),
        ("latent step / DeepseekV3ForCausalLM", latent_models, LATENT_STEP),
    ):
        steps = make(size, tokens)
        times = [
            [seconds_of_step(step) for step in steps]
            for _ in range(1 if timing.quick else ROUNDS)
        ]
        ratio = median(theirs / ours for ours, theirs in times)
        ms = [1e3 * median(column) for column in zip(*times, strict=True)]
        tell(name, ratio, target, f"times faster: {ms[0]:.2f} and {ms[1]:.2f} ms")


def latent_memory_rows(size, tokens):
    "The bytes that a decoder keeps of a text, against those of the formula."
    config, _ = latent_config(size)
    model = Llama(config, make_mla_factory(config, **ranks(size))).eval()
    cache = model.new_cache(1)
    model(torch.zeros(1, tokens, dtype=torch.long), cache=cache)
    expected = LAYERS * tokens * (size["kv_rank"] + size["d_rope"]) * 4
    ratio = cache.nbytes / expected
    tell(
        "bytes kept, latent",
        max(ratio, 1 / ratio),
        MEMORY,
        f"{cache.nbytes:,} and {expected:,}",
    )


def window_decode_row(window):
    "A token late in a text, in turn with one earlier in it."
    layer = window_speed.make_layers(window)["window"]
    steps = window_speed.cycle(window, window)
    times = [
        [window_speed.decode(layer, n * window, steps)[0] for n in (8, 2)]
        for _ in range(1 if timing.quick else ROUNDS)
    ]
    ms = [1e3 * median(column) for column in zip(*times, strict=True)]
    tell(
        "window decode, 8w / 2w",
        median(late / early for late, early in times),
        WINDOW_DECODE,
        f"{ms[0]:.3f} and {ms[1]:.3f} ms a step",
    )


def flex_prefill(q, k, v, window):
    "FlexAttention to the window, compiled, with its table of blocks made beforehand."
    t = q.shape[2]
    blocks = create_block_mask(
        lambda b, h, i, j: (i >= j) & (i - j < window),
        None,
        None,
        t,
        t,
        device=q.device,
    )
    compiled = torch.compile(flex_attention)
    return lambda: compiled(q, k, v, block_mask=blocks, enable_gqa=True)


def window_prefill_rows(window):
    "`window_attend`, in turn with other ways to the same."
    for name, way, n, target in (
        ("full causal kernel", "full", 16, WINDOW_CAUSAL),
        ("masked kernel", "masked", 8, WINDOW_MASKED),
        ("FlexAttention", "flex", 8, None),
    ):
        inputs = window_speed.draw(n * window)
        ways = window_speed.prefills(*inputs, window)
        if way == "flex":
            ways["flex"] = flex_prefill(*inputs, window)
        ways = {key: ways[key] for key in ("window", way)}
        ours, theirs = (run() for run in ways.values())  # and compiled
        assert way == "full" or (ours - theirs).abs().max() < 1e-4, name
        times = timing.rounds_of(ways, ROUNDS)
        ratio = median(a / b for a, b in zip(*times.values(), strict=True))
        ms = [1e3 * median(column) for column in times.values()]
        tell(
            f"window prefill / {name}",
            ratio,
            target,
            f"{ms[0]:.1f} and {ms[1]:.1f} ms for {n * window:,} tokens",
        )


def window_models(window):
    "A decoder of layers with a window, and that of transformers with its weights."
    heads = {"n_heads": window_speed.N_HEADS, "n_kv_heads": window_speed.N_KV_HEADS}
    ours = LlamaConfig(
        vocab_size=VOCAB,
        d_model=window_speed.D_MODEL,
        n_layers=LAYERS,
        d_ff=D_FF,
        max_len=16 * window,
        **heads,
    )
    theirs = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=ours.d_model,
        num_hidden_layers=LAYERS,
        intermediate_size=D_FF,
        num_attention_heads=ours.n_heads,
        num_key_value_heads=ours.n_kv_heads,
        rms_norm_eps=ours.eps,
        sliding_window=window,
        max_position_embeddings=ours.max_len,
        rope_parameters={"rope_type": "default", "rope_theta": ours.rope_theta},
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = Llama(ours, make_window_factory(ours, window)).eval()
    peer = MistralForCausalLM(theirs).eval()
    peer.load_state_dict(bench_models.renamed(model.state_dict(), bench_models.LLAMA))
    return model, peer


def window_steps(model, peer, tokens):
    "Functions that return the step of each, with caches of the same text."
    shape = 1, model.config.n_kv_heads, tokens, model.config.head_dim
    kept = [[torch.randn(shape) for _ in range(2)] for _ in range(LAYERS)]
    ids = torch.zeros(1, 1, dtype=torch.long)

    def our_step():
        cache = model.new_cache(1)
        for layer, pair in zip(cache.layers, kept, strict=True):
            layer.update(
                *pair, positions=Positions(start=0, length=tokens), window=layer.window
            )
        return lambda: model(ids, cache=cache)

    def their_step():
        cache = DynamicCache(config=peer.config)
        for i, pair in enumerate(kept):
            cache.update(*pair, i)
        return lambda: peer(ids, past_key_values=cache, use_cache=True).logits

    return our_step, their_step


def window_step_rows(window):
    "A whole step, against that of transformers, beyond the window."
    models = window_models(window)
    steps = window_speed.cycle(window, window)
    for n in (2, 8):
        makers = window_steps(*models, n * window)
        ours, theirs = (make()() for make in makers)
        assert (ours - theirs).abs().max() < 1e-4 * max(1, theirs.abs().max())
        times = [
            [seconds_of_step(make, steps) for make in makers]
            for _ in range(1 if timing.quick else ROUNDS)
        ]
        ratio = median(theirs / ours for ours, theirs in times)
        ms = [1e3 * median(column) for column in zip(*times, strict=True)]
        tell(
            f"window step / MistralForCausalLM, {n}w",
            ratio,
            WINDOW_STEP,
            f"times faster: {ms[0]:.2f} and {ms[1]:.2f} ms",
        )


def sparse_decode_rows(size, tokens):
    "A token of sparse attention, in turn with dense: attention alone, and layers."
    times = sparse_speed.decode(tokens, 1 if timing.quick else ROUNDS, size)
    for name, way, target in (
        ("sparse / dense attention", "", SPARSE_DECODE),
        ("sparse / dense layer", "_layer", None),
    ):
        pair = times[f"dense{way}"], times[f"sparse{way}"]
        ratio = median(dense / chosen for dense, chosen in zip(*pair, strict=True))
        ms = [median(column) for column in pair]
        tell(name, ratio, target, f"times faster: {ms[1]:.3f} and {ms[0]:.3f} ms")


def sparse_layers(size):
    "A sparse layer, that of transformers with its weights, and its rotary embedding."
    ours = sparse_speed.make_layers(size)["sparse"]
    config = DeepseekV32Config(
        vocab_size=VOCAB,
        hidden_size=size.d_model,
        num_hidden_layers=1,
        num_attention_heads=size.n_heads,
        num_key_value_heads=size.n_heads,
        q_lora_rank=size.q_rank,
        kv_lora_rank=size.kv_rank,
        qk_nope_head_dim=size.d_nope,
        qk_rope_head_dim=size.d_rope,
        v_head_dim=size.d_v,
        index_n_heads=size.n_index_heads,
        index_head_dim=size.d_index,
        index_topk=size.top_k,
        max_position_embeddings=2 * SPARSE_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        attn_implementation="sdpa",
    )
    names = {f"{our}.": f"{their}." for their, our in DEEPSEEK_NAMES.items()} | {
        f"indexer.{our}.": f"indexer.{their}."
        for their, our in DEEPSEEK_INDEXER_NAMES.items()
    }
    weights = {}
    for name, x in ours.state_dict().items():
        module = name[: name.rindex(".") + 1]
        weights[names[module] + name.removeprefix(module)] = x
    theirs = sparse_peers.DeepseekV32Attention(config, 0).eval()
    theirs.load_state_dict(weights)
    return ours, theirs, sparse_peers.DeepseekV32RotaryEmbedding(config)


def sparse_steps(size, tokens):
    """Functions that return the step of a layer with a cache of the same text: ours and
    that of transformers."""
    ours, theirs, rotary = sparse_layers(size)
    latent = torch.randn(1, 1, tokens, size.kv_rank)
    k_rope = torch.randn(1, 1, tokens, size.d_rope)
    index_k = torch.randn(1, 1, tokens, size.d_index)
    x = torch.randn(1, 1, size.d_model)

    def our_step():
        cache = sparse_speed.fill(
            ours.new_cache(1), [torch.cat([latent, k_rope], -1), index_k]
        )

        def step():
            output = ours(x, cache=cache)
            return output, lambda: sparse_speed.decoding_parts(ours, x, cache)

        return step

    def their_step():
        cache = DynamicCache(config=theirs.config)
        # they keep the first numbers of all pairs, and then the second ones
        cache.update(latent, torch.cat([k_rope[..., ::2], k_rope[..., 1::2]], -1), 0)
        cache.update_indexer(index_k[:, 0], 0)

        def step():
            n = cache.get_seq_length()
            visible = torch.ones(1, 1, 1, n + 1, dtype=torch.bool)
            return theirs(
                x, rotary(x, torch.tensor([[n]])), visible, past_key_values=cache
            )

        return step

    return our_step, their_step


def sparse_layer_row(size, tokens):
    "A token of a sparse layer, in turn with that of transformers."
    steps = sparse_steps(size, tokens)
    (ours, parts), (theirs, _) = (make()() for make in steps)
    best = parts()["score"](None).flatten().sort(descending=True)[0]
    gap = (best[size.top_k - 1] - best[size.top_k]) / best[0]
    assert gap > 1e-6, f"several choices are right: scores differ by {gap:.1e}"
    wrong = (ours - theirs).abs().max() / theirs.abs().max()
    assert wrong < 1e-3, f"the sparse layers differ by {wrong:.1e}"
    times = [
        [seconds_of_step(step) for step in steps]
        for _ in range(1 if timing.quick else ROUNDS)
    ]
    ratio = median(theirs / ours for ours, theirs in times)
    ms = [1e3 * median(column) for column in zip(*times, strict=True)]
    tell(
        "sparse layer / DeepseekV32Attention",
        ratio,
        SPARSE_LAYER,
        f"times faster: {ms[0]:.2f} and {ms[1]:.2f} ms; outputs differ by {wrong:.0e}",
    )


def sparse_memory_row(size, tokens):
    "The bytes that a layer keeps of a text, against those of the formula."
    layer = sparse_speed.make_layers(size)["sparse"]
    cache = layer.new_cache(1)
    layer(torch.randn(1, tokens, size.d_model), cache=cache)
    expected = tokens * (size.kv_rank + size.d_rope + size.d_index) * 4
    ratio = cache.nbytes / expected
    tell(
        "bytes kept, sparse",
        max(ratio, 1 / ratio),
        MEMORY,
        f"{cache.nbytes:,} and {expected:,}",
    )


@torch.inference_mode()
def main():
    timing.begin(__doc__)
    widths, tokens = ((256,), 32) if timing.quick else (gqa_speed.WIDTHS, gqa_speed.AT)
    timing.head(
        f"Shared keys, {gqa_speed.BATCH} texts of {tokens} tokens, {common.processor()}"
    )
    layer_rows(widths, tokens)
    step_rows(widths, tokens)
    memory_rows(widths, tokens)
    timing.head(f"Latent attention, one text of {tokens} tokens, {common.processor()}")
    size = SMALL if timing.quick else LATENT
    latent_rows(size, tokens)
    latent_memory_rows(size, tokens)
    window = SMALL_WINDOW if timing.quick else WINDOW
    timing.head(f"Sliding windows of {window} tokens, {common.processor()}")
    window_decode_row(window)
    window_prefill_rows(window)
    window_step_rows(SMALL_WINDOW if timing.quick else STEP_WINDOW)
    size = SMALL_SPARSE if timing.quick else sparse_speed.LITE
    at = SMALL_TOKENS if timing.quick else SPARSE_TOKENS
    timing.head(
        f"Sparse attention to {size.top_k} of {at} tokens, {common.processor()}"
    )
    sparse_decode_rows(size, at)
    sparse_layer_row(size._replace(q_rank=24 if timing.quick else Q_RANK), at)
    sparse_memory_row(size, tokens)
    return 0 if timing.quick or not FAILED else 1


if __name__ == "__main__":
    sys.exit(main())
