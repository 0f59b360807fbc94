"""How much faster is decoding with a quarter of the key heads?

    python experiments/gqa_speed.py                 one thread, ten minutes
    python experiments/gqa_speed.py --rounds 1 --longest 64 --out some.csv

One attention layer writes one token for each of eight texts, in float32 and from a
cache that holds so many tokens of each: once with as many key heads as query heads
and once with a quarter of them, in turn. `predicted` is the ratio of the bytes that
both have to read, weights and caches; `measured` is the median ratio of their
times, with the lowest and the highest of the rounds beside it. `kind` is "decode",
or "prefill" for a pass over so many tokens at once with an empty cache, of a
single text; its `predicted` is the ratio of the multiplications.

The rows go to tformer/records/gqa_speed.csv.
"""

import time
from statistics import median

import torch

import common
from tformer.nn.attention import SelfAttention
from tformer.nn.rotary import RotaryEmbedding

OUT = common.RECORDS / "gqa_speed.csv"
BATCH = 8
D_HEAD = 64
GROUP = 4  # query heads for each key head
WIDTHS = (512, 1024, 2048)
LENGTHS = (1, 16, 64, 256, 1024, 2048, 4096, 8192)
PREFILLS = (64, 256, 1024, 2048)
WIDTH = 1024  # of the sweep over lengths
AT = 2048  # tokens, where the widths are compared
STEPS = 4  # steps in one measurement


def step_bytes(d_model, n_kv_heads, tokens, batch=BATCH, number=4):
    "Bytes that one layer reads to write a token for each text: weights and caches."
    kv_width = n_kv_heads * D_HEAD
    weights = 2 * d_model * d_model + 2 * d_model * kv_width
    return number * (weights + 2 * batch * tokens * kv_width)


def prefill_products(d_model, n_kv_heads, tokens):
    "Multiplications of one layer over a whole text, causality used."
    kv_width = n_kv_heads * D_HEAD
    weights = 2 * d_model * d_model + 2 * d_model * kv_width
    return tokens * weights + 2 * d_model * tokens * (tokens + 1) // 2


def make_layers(d_model):
    "The layer with all key heads, and the one with a quarter of them."
    n_heads = d_model // D_HEAD
    torch.manual_seed(0)
    return [
        SelfAttention(
            d_model,
            n_heads,
            n_kv_heads=n,
            bias=False,
            causal=True,
            rotary=RotaryEmbedding(D_HEAD),
        ).eval()
        for n in (n_heads, n_heads // GROUP)
    ]


def filled_cache(layer, tokens, batch=BATCH):
    "A cache that holds so many random tokens of each text."
    cache = layer.new_cache(batch)
    keys, values = (
        torch.randn(batch, layer.n_kv_heads, tokens, D_HEAD) for _ in range(2)
    )
    cache.update(keys, values, positions=torch.arange(tokens)[None])
    return cache


def decode(layer, tokens):
    "Seconds of a step, after a first one that is not counted."
    cache = filled_cache(layer, tokens)
    x = torch.randn(BATCH, 1, layer.o_proj.weight.shape[0])
    layer(x, cache=cache)
    start = time.perf_counter()
    for _ in range(STEPS):
        layer(x, cache=cache)
    return (time.perf_counter() - start) / STEPS


def prefill(layer, tokens):
    "Seconds of a pass over one text."
    x = torch.randn(1, tokens, layer.o_proj.weight.shape[0])
    layer(x[:, :8])
    start = time.perf_counter()
    layer(x)
    return time.perf_counter() - start


@torch.inference_mode()
def measure(kind, d_model, tokens, rounds):
    "One row: both layers in turn, so many times."
    layers = make_layers(d_model)
    run = {"decode": decode, "prefill": prefill}[kind]
    count = {"decode": step_bytes, "prefill": prefill_products}[kind]
    times = [[run(layer, tokens) for layer in layers] for _ in range(rounds)]
    ratios = sorted(before / after for before, after in times)
    before, after = (count(d_model, layer.n_kv_heads, tokens) for layer in layers)
    seconds = [median(column) for column in zip(*times, strict=True)]
    return {
        "kind": kind,
        "d_model": str(d_model),
        "tokens": str(tokens),
        "predicted": f"{before / after:.3f}",
        "measured": f"{median(ratios):.3f}",
        "lowest": f"{ratios[0]:.3f}",
        "highest": f"{ratios[-1]:.3f}",
        "ms_all_heads": f"{1e3 * seconds[0]:.3f}",
        "ms_quarter": f"{1e3 * seconds[1]:.3f}",
        "rounds": str(rounds),
        "processor": common.processor(),
        **common.about(),
    }


def cases(longest):
    "What is measured: lengths at one width, widths at one length, and prefill."
    found = [("decode", WIDTH, n) for n in LENGTHS]
    found += [("decode", d, AT) for d in WIDTHS if d != WIDTH]
    found += [("prefill", WIDTH, n) for n in PREFILLS]
    return [case for case in found if case[2] <= longest]


def main():
    args = common.speed_arguments(__doc__, longest=max(LENGTHS), out=OUT)
    rows = []
    for kind, d_model, tokens in cases(args.longest):
        rows.append(measure(kind, d_model, tokens, args.rounds))
        print(*list(rows[-1].values())[:9], flush=True)
        common.write(rows, args.out)


if __name__ == "__main__":
    main()
