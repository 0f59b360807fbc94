"""What does a window save? Decoding and prefill over the length of the text.

    python experiments/window_speed.py              one thread, five minutes
    python experiments/window_speed.py --rounds 1 --longest 512 --out some.csv

One attention layer in float32 and with random weights, 512 wide, with 8 query heads
and 2 key heads: once with full attention and once with a window of 512 tokens, in
turn. `kind` is "decode" for one token of a text of which `tokens` were read before:
`full_ms` is the whole layer with a `DynamicLayerCache`, `window_ms` that with a
`RollingLayerCache`. The mean is taken over so many steps that the rolling cache is
copied to new memory once, as it is every so many steps; the first step is not
counted, and with it the copy of all that the full cache holds, which happens each
time that a text has doubled. `full_bytes` and `window_bytes` are what the caches hold.

`kind` is "prefill" for attention alone over a text of `tokens`, of given queries,
keys and values: `full_ms` is the causal kernel, `masked_ms` the kernel that is given
the window as a mask of 0 and minus infinity (made beforehand; up to 8,192 tokens),
and `window_ms` is `window_attend`.

All times are medians of processor time, with the lowest and the highest of the rounds
beside them. With `--longest` no text has more tokens than that. The rows go to
tformer/records/window_speed.csv.
"""

import math
import time
from statistics import median

import torch
from torch.nn import functional as F

import common
from tformer.nn.attention import SelfAttention
from tformer.nn.positions import Positions
from tformer.nn.rotary import RotaryEmbedding
from tformer.variants.sliding_window import SlidingWindowAttention, window_attend

OUT = common.RECORDS / "window_speed.csv"
N_HEADS = 8
N_KV_HEADS = 2
D_HEAD = 64
D_MODEL = N_HEADS * D_HEAD
WINDOW = 512
WAYS = ("full", "masked", "window")
DECODES = tuple(2**i for i in range(7, 15))  # 128 to 16,384
PREFILLS = tuple(2**i for i in range(9, 15))  # 512 to 16,384
MASKED = 8192  # the longest text with a mask of all pairs


def make_layers(window=WINDOW):
    "A layer that sees all, and one that sees the window, with equal weights."
    options = dict(n_kv_heads=N_KV_HEADS, bias=False, rotary=RotaryEmbedding(D_HEAD))
    torch.manual_seed(0)
    full = SelfAttention(D_MODEL, N_HEADS, causal=True, **options).eval()
    local = SlidingWindowAttention(D_MODEL, N_HEADS, window=window, **options).eval()
    local.load_state_dict(full.state_dict())
    return {"full": full, "window": local}


def cycle(window, tokens):
    "After how many steps a rolling cache is copied to new memory."
    return max(min(window, tokens) // 4, 16) + 1


def fill(cache, n_kv_heads, tokens):
    "Let an empty cache of a layer read so many random keys and values."
    cache.update(
        *(torch.randn(1, n_kv_heads, tokens, D_HEAD) for _ in range(2)),
        positions=Positions(start=0, length=tokens),
        **({"window": cache.window} if hasattr(cache, "window") else {}),
    )
    return cache


def decode(layer, tokens, steps):
    "Mean processor seconds of a step, after a first one; bytes that the cache held."
    cache = fill(layer.new_cache(1), N_KV_HEADS, tokens)
    held = cache.nbytes
    x = torch.randn(1, 1, D_MODEL)
    layer(x, cache=cache)
    start = time.process_time()
    for _ in range(steps):
        layer(x, cache=cache)
    return (time.process_time() - start) / steps, held


def window_mask(window, tokens):
    "0 where a query sees a key, minus infinity elsewhere: what the kernel adds."
    at = torch.arange(tokens)
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance < window)
    return torch.zeros(tokens, tokens).masked_fill_(~seen, -math.inf)


def draw(tokens):
    "Random queries, keys and values of a text."
    return [
        torch.randn(1, n, tokens, D_HEAD) for n in (N_HEADS, N_KV_HEADS, N_KV_HEADS)
    ]


def prefills(q, k, v, window):
    "Functions that attend to the same keys and values, each in its way."
    tokens = q.shape[2]
    ways = {
        "full": lambda: F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
    }
    if tokens <= MASKED:
        mask = window_mask(window, tokens)
        ways["masked"] = lambda: F.scaled_dot_product_attention(
            q, k, v, mask, enable_gqa=True
        )
    return ways | {"window": lambda: window_attend(q, k, v, window)}


def spread(times):
    "Columns of each way: the median, the lowest and the highest; empty if not run."
    row = {}
    for way in WAYS:
        ms = [1e3 * seconds for seconds in times.get(way, ())]
        row |= {
            f"{way}_{name}": f"{of(ms):.3f}" if ms else ""
            for name, of in (("ms", median), ("lowest", min), ("highest", max))
        }
    return row


@torch.inference_mode()
def measure(kind, tokens, rounds):
    "One row: all ways in turn, so many times."
    times = {}
    held = {}
    if kind == "decode":
        layers = make_layers()
        steps = cycle(WINDOW, tokens)
        for _ in range(rounds):
            for way, layer in layers.items():
                seconds, held[way] = decode(layer, tokens, steps)
                times.setdefault(way, []).append(seconds)
    else:
        ways = prefills(*draw(tokens), WINDOW)
        for way in ways.values():
            way()
        for _ in range(rounds):
            for way, run in ways.items():
                start = time.process_time()
                run()
                times.setdefault(way, []).append(time.process_time() - start)
    return {
        "kind": kind,
        "window": str(WINDOW),
        "tokens": str(tokens),
        **spread(times),
        **{f"{way}_bytes": str(held.get(way, "")) for way in ("full", "window")},
        "rounds": str(rounds),
        "processor": common.processor(),
        **common.about(),
    }


def cases(longest):
    "What is measured: one token after more and more, and longer and longer texts."
    found = [("decode", n) for n in DECODES] + [("prefill", n) for n in PREFILLS]
    return [case for case in found if case[1] <= longest]


def main():
    args = common.speed_arguments(__doc__, longest=max(DECODES), out=OUT)
    rows = []
    for kind, tokens in cases(args.longest):
        rows.append(measure(kind, tokens, args.rounds))
        print(*list(rows[-1].values())[:14], flush=True)
        common.write(rows, args.out)


if __name__ == "__main__":
    main()
