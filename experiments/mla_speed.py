"""In which order is latent attention faster, and from how many tokens on?

    python experiments/mla_speed.py                 one thread, five minutes
    python experiments/mla_speed.py --rounds 1 --longest 64 --out some.csv

One attention layer of the size of DeepSeek-V2-Lite's, in float32 and with random
weights, reads `t` new tokens of one text of which its cache holds `past` tokens: in
the expanded and in the absorbed order, in turn. `kind` is "decode" for one token
after more and more of them, or "prompt" for the last `t` tokens of a text of 2,048.
`expanded_ms` and `absorbed_ms` are medians of the processor time of the whole layer,
with the lowest and the highest of the rounds beside them. `expanded_macs` and
`absorbed_macs` are the multiplications that `LatentAttention.cheaper_order` compares,
summed over the heads; the projections that both orders share are not among them.

With `--longest` no text has more tokens than that, neither in the cache of "decode"
nor in all of "prompt". The rows go to tformer/records/mla_speed.csv.
"""

import time
from statistics import median

import torch

import common
from tformer.variants.mla import LatentAttention

OUT = common.RECORDS / "mla_speed.csv"
D_MODEL = 2048
N_HEADS = 16
SIZES = {"kv_rank": 512, "d_nope": 128, "d_rope": 64, "d_v": 128}
ORDERS = ("expanded", "absorbed")
PAST = (16, 64, 256, 1024, 2048, 4096)  # of decode
NEW = (1, 4, 16, 64, 128, 256, 512, 1024, 2048)  # of prompt
KEYS = 2048  # tokens of a whole prompt
STEPS = 4  # steps in one measurement of a token


def multiplications(t, s):
    "Those of each order for t queries and s keys, by the formula of cheaper_order."
    up = SIZES["kv_rank"] * (SIZES["d_nope"] + SIZES["d_v"])
    wide = SIZES["d_nope"] + SIZES["d_rope"] + SIZES["d_v"]
    latent = 2 * SIZES["kv_rank"] + SIZES["d_rope"]
    return {
        "expanded": N_HEADS * (s * up + t * s * wide),
        "absorbed": N_HEADS * (t * up + t * s * latent),
    }


def make_layer():
    "The layer that runs in both orders."
    torch.manual_seed(0)
    return LatentAttention(D_MODEL, N_HEADS, **SIZES).eval()


def fill(cache, width, tokens):
    "Let an empty cache hold so many random vectors, with room behind the last."
    for start, n in ((0, tokens - 1), (tokens - 1, 1)):
        cache.update(
            torch.randn(1, 1, n, width), positions=torch.arange(start, start + n)[None]
        )


def restore(cache, past):
    """Let a cache end after so many tokens again, with room behind the last.

    Cropping leaves no room, and the next step would have to copy all that is kept.
    In a text that grows, this happens once in a while, so here it is done outside
    the time that is measured: the last of the kept tokens is put once more.
    """
    if not past:
        cache.crop(0)
        return
    last = cache.tensors[0][..., past - 1 : past, :].clone()
    cache.crop(past - 1)
    cache.update(last, positions=torch.tensor([[past - 1]]))


def run(layer, order, x, cache, past):
    "Mean processor seconds of a step, after a first one that is not counted."
    layer.order = order
    steps = STEPS if x.shape[1] == 1 else 1
    spent = []
    for _ in range(steps + 1):
        restore(cache, past)
        start = time.process_time()
        layer(x, cache=cache)
        spent.append(time.process_time() - start)
    return sum(spent[1:]) / steps


@torch.inference_mode()
def measure(layer, kind, t, past, rounds):
    "One row: both orders in turn, so many times."
    x = torch.randn(1, t, D_MODEL)
    cache = layer.new_cache(1)
    if past:
        fill(cache, layer.kv_rank + layer.d_rope, past)
    times = {order: [] for order in ORDERS}
    for _ in range(rounds):
        for order in ORDERS:
            times[order].append(1e3 * run(layer, order, x, cache, past))
    row = {"kind": kind, "t": str(t), "past": str(past)}
    for order, found in times.items():
        row |= {
            f"{order}_ms": f"{median(found):.3f}",
            f"{order}_lowest": f"{min(found):.3f}",
            f"{order}_highest": f"{max(found):.3f}",
        }
    counts = multiplications(t, past + t)
    return (
        row
        | {f"{order}_macs": str(counts[order]) for order in ORDERS}
        | {"rounds": str(rounds), "processor": common.processor(), **common.about()}
    )


def cases(longest):
    "What is measured: one token after more and more, and ends of a prompt."
    keys = min(KEYS, longest)
    found = [("decode", 1, past) for past in PAST if past <= longest]
    return found + [("prompt", t, keys - t) for t in NEW if t <= keys]


def main():
    args = common.speed_arguments(__doc__, longest=max(PAST), out=OUT)
    layer = make_layer()
    rows = []
    for kind, t, past in cases(args.longest):
        rows.append(measure(layer, kind, t, past, args.rounds))
        print(*list(rows[-1].values())[:11], flush=True)
        common.write(rows, args.out)


if __name__ == "__main__":
    main()
