"""What do shared keys gain? python tests/bench/bench_variants.py

One attention layer writes a token for each of eight texts that hold 2,048 tokens,
with all key heads and with a quarter of them, in turn: the ratio of their times,
divided by the ratio of the bytes that they have to read. The target is 0.7, at
three widths. Beside it stand a whole step of a decoder of such layers, with the
share of it that attention takes, and the bytes of the caches against the formula of
`tformer.costs`, which may differ by 2 %. One thread.

--quick           small sizes, one round: that everything runs
"""
import sys
import time
from pathlib import Path
from statistics import median

import torch

import timing

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import gqa_speed
from tformer.costs import kv_cache_bytes, spec_from_config
from tformer.llama import Llama, LlamaConfig

TARGET = timing.AT_LEAST, 0.7
MEMORY = timing.AT_MOST, 1.02
ROUNDS = 9
LAYERS = 2
FAILED = []


def tell(name, value, target, detail):
    "Print a row, and remember it if the target is missed."
    timing.row(name, value, target, detail)
    if target and value * target[0] < target[1] * target[0]:
        FAILED.append((name, value))


def layer_rows(widths, tokens):
    for d_model in widths:
        row = gqa_speed.measure("decode", d_model, tokens,
                                1 if timing.quick else ROUNDS)
        measured = float(row["measured"])
        predicted = float(row["predicted"])
        tell(f"quarter of the key heads, width {d_model}", measured / predicted,
             TARGET, f"{row['ms_all_heads']} and {row['ms_quarter']} ms: "
             f"{measured:.2f} times faster, by bytes {predicted:.2f}")


def make_models(d_model):
    "A decoder with all key heads, and one with a quarter of them."
    n_heads = d_model // gqa_speed.D_HEAD
    torch.manual_seed(0)
    return [Llama(LlamaConfig(vocab_size=512, d_model=d_model, n_layers=LAYERS,
                              n_heads=n_heads, n_kv_heads=n, max_len=4096)).eval()
            for n in (n_heads, n_heads // gqa_speed.GROUP)]


def filled(model, tokens):
    "A cache of random keys and values, as long for all layers."
    cache = model.new_cache(gqa_speed.BATCH)
    positions = torch.arange(tokens)[None]
    for layer in cache.layers:
        layer.update(*(torch.randn(gqa_speed.BATCH, model.config.n_kv_heads, tokens,
                                   gqa_speed.D_HEAD) for _ in range(2)),
                     positions=positions)
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
        hooks.append(layer.register_forward_pre_hook(
            lambda *given: began.append(time.perf_counter())))
        hooks.append(layer.register_forward_hook(
            lambda *given: spent.append(time.perf_counter() - began[-1])))
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
        times = [[step_seconds(model, tokens) for model in models]
                 for _ in range(1 if timing.quick else ROUNDS)]
        ratio = median(before[0] / after[0] for before, after in times)
        shares = [median(round_[i][1] for round_ in times) for i in (0, 1)]
        tell(f"whole step, width {d_model}", ratio, None,
             f"times faster; attention takes {shares[0]:.0%} of a step with all "
             f"key heads, {shares[1]:.0%} with a quarter")


def memory_rows(widths, tokens):
    for d_model in widths:
        for model in make_models(d_model):
            cache = filled(model, tokens)
            expected = kv_cache_bytes(spec_from_config(model.config), tokens,
                                      gqa_speed.BATCH, torch.float32)
            ratio = cache.nbytes / expected
            tell(f"bytes kept, {model.config.n_kv_heads} key heads, width {d_model}",
                 max(ratio, 1 / ratio), MEMORY, f"{cache.nbytes:,} and {expected:,}")


@torch.inference_mode()
def main():
    timing.begin(__doc__)
    widths, tokens = ((256,), 32) if timing.quick else (gqa_speed.WIDTHS,
                                                        gqa_speed.AT)
    timing.head(f"Shared keys, {gqa_speed.BATCH} texts of {tokens} tokens, "
                f"{gqa_speed.processor()}")
    layer_rows(widths, tokens)
    step_rows(widths, tokens)
    memory_rows(widths, tokens)
    return 0 if timing.quick or not FAILED else 1


if __name__ == "__main__":
    sys.exit(main())
