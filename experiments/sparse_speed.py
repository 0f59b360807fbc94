"""From how many tokens on does it pay to choose what attention reads?

    python experiments/sparse_speed.py              one thread, ten minutes
    python experiments/sparse_speed.py --rounds 1 --longest 512 --out some.csv

One attention layer of the size of DeepSeek-V2-Lite's, in float32 and with random
weights: once as `LatentAttention`, which reads all that it keeps, and once as
`SparseLatentAttention`, which reads 256 tokens that an indexer chooses, in turn. The
indexer has 16 heads of 64 numbers. So it multiplies as much for each token, compared
with the attention, as that of DeepSeek-V3.2 (5.9 %), and its key takes as large a part
of what is kept as there, where it has one byte for each number and the latent two
(11 %).

`kind` is "decode" for one token of a text that has `tokens` with it. Attention alone,
from given queries to mixtures of latents, takes `dense_ms` and `sparse_ms`. The parts
of the latter are scoring all tokens (`score_ms`), choosing the best (`choose_ms`),
copying what is kept of them (`gather_ms`) and attending to it (`attend_ms`). Where no
more than `top_k` tokens are kept, the layer reads them all, and there are no other
parts. `dense_layer_ms` and `sparse_layer_ms` are whole layers, with projections. Each
step of attention alone comes after one of the whole layer, and after the projection of
its queries. As in a decoder, the weights that are read in between, 50 MB or more, drive
what is kept of the text, and the code, out of the caches of the processor.

`flops_ratio` and `bytes_ratio` predict how many times longer dense attention takes:
by its multiply-adds, and by the bytes that it reads and writes. The lengths from
which on the ratios are above 1 are printed before anything is measured, and at the
end the length at which both took equally long.

`kind` is "fixed" for the shortest texts in which anything is chosen, of `top_k` + 1
tokens: with the same `top_k`, and with 1. `fixed_ms` is by how much sparse attention
takes longer there. With `top_k` 1 there is next to nothing to compute, so it is what
calling the additional operations costs.

`kind` is "prefill" for a whole prompt of `tokens`, without a cache. `dense_ms` is the
causal kernel. `sparse_ms` is the sum of scoring, choosing and `attend_ms`, which is
the kernel with the mask of the chosen pairs. Both are quadratic in the length: the
indexer scores all pairs, and the masked kernel multiplies all pairs as well.

All times are medians of processor time; those of whole ways have the lowest and the
highest of the rounds beside them. With `--longest` no text has more tokens than that.
The rows go to tformer/records/sparse_speed.csv.
"""

import math
import time
from itertools import count, pairwise
from statistics import median
from typing import NamedTuple

import torch

import common
import mla_speed
from tformer.nn.attention_backends import fused_attend
from tformer.nn.positions import Positions
from tformer.nn.rotary import RotaryEmbedding
from tformer.variants import sparse
from tformer.variants.mla import LatentAttention
from tformer.variants.sparse import (
    LightningIndexer,
    SparseLatentAttention,
    choose_candidates,
)

OUT = common.RECORDS / "sparse_speed.csv"
DECODES = tuple(2**i for i in range(8, 15))  # 256 to 16,384
PREFILLS = tuple(2**i for i in range(9, 13))  # 512 to 4,096
STEPS = 8  # steps in a round of decoding
WAYS = ("dense", "sparse", "dense_layer", "sparse_layer")
PARTS = ("score", "choose", "gather", "attend")


class Sizes(NamedTuple):
    "Those of the attention, of its indexer, and how many tokens a query reads."

    d_model: int = mla_speed.D_MODEL
    n_heads: int = mla_speed.N_HEADS
    kv_rank: int = mla_speed.SIZES["kv_rank"]
    d_nope: int = mla_speed.SIZES["d_nope"]
    d_rope: int = mla_speed.SIZES["d_rope"]
    d_v: int = mla_speed.SIZES["d_v"]
    q_rank: int | None = None
    n_index_heads: int = 16
    d_index: int = 64
    top_k: int = 256

    @property
    def latent(self):
        "The arguments of ``LatentAttention``."
        return {name: getattr(self, name) for name in (*mla_speed.SIZES, "q_rank")}


LITE = Sizes()


# predictions


def flops_dense(s, *, n_heads=LITE.n_heads, kv_rank=LITE.kv_rank, d_rope=LITE.d_rope):
    """Multiply-adds of dense absorbed attention for one query and s tokens.

    Each head multiplies each latent twice, as a key and as a value, and its rotary key
    once.
    """
    return s * n_heads * (2 * kv_rank + d_rope)


def flops_sparse(
    s,
    *,
    top_k=LITE.top_k,
    n_index_heads=LITE.n_index_heads,
    d_index=LITE.d_index,
    **sizes,
):
    """Multiply-adds of sparse attention for one query and s tokens.

    The indexer multiplies the keys of all s tokens, and the attention those of top_k.
    Where there are no more than these, nothing is scored. ``sizes`` are those of
    ``flops_dense``.
    """
    if s <= top_k:
        return flops_dense(s, **sizes)
    return s * n_index_heads * d_index + flops_dense(top_k, **sizes)


def bytes_dense(s, *, kv_rank=LITE.kv_rank, d_rope=LITE.d_rope, size=4):
    "Bytes that dense attention reads of s tokens, each number once."
    return size * s * (kv_rank + d_rope)


def bytes_sparse(s, *, top_k=LITE.top_k, d_index=LITE.d_index, size=4, **sizes):
    """Bytes that sparse attention reads and writes for one query and s tokens.

    It reads the index keys of all s tokens. What is kept of top_k of them it reads,
    writes to another place and reads again. Where there are no more than these,
    nothing is scored or copied. ``sizes`` are those of ``bytes_dense``.
    """
    if s <= top_k:
        return bytes_dense(s, size=size, **sizes)
    return size * s * d_index + 3 * bytes_dense(top_k, size=size, **sizes)


def predicted_crossover(dense, sparse, top_k=LITE.top_k):
    "The first length above top_k at which dense(s) is not below sparse(s)."
    return next(s for s in count(top_k + 1) if dense(s) >= sparse(s))


def measured_crossover(lengths, ratios):
    """The length from which on ratios of times are above 1; None where there is none.

    Between two lengths the logarithm of the ratio is a line over that of the length.
    """
    pairs = list(zip(lengths, ratios, strict=True))
    for (s, before), (end, after) in reversed(list(pairwise(pairs))):
        if before <= 1 < after:
            part = math.log(before) / (math.log(before) - math.log(after))
            return s * (end / s) ** part
    return None


# what is measured


def make_layers(size=LITE):
    "A layer that reads all tokens, and one that reads some, with equal weights."
    torch.manual_seed(0)
    indexer = LightningIndexer(
        size.d_model,
        size.n_index_heads,
        size.d_index,
        q_dim=size.q_rank,
        rotary=RotaryEmbedding(size.d_rope, layout="half"),
    )
    chosen = SparseLatentAttention(
        size.d_model, size.n_heads, indexer=indexer, top_k=size.top_k, **size.latent
    ).eval()
    dense = LatentAttention(size.d_model, size.n_heads, **size.latent).eval()
    dense.load_state_dict(
        {
            name: x
            for name, x in chosen.state_dict().items()
            if not name.startswith("indexer.")
        }
    )
    return {"dense": dense, "sparse": chosen}


def fill(cache, tensors):
    "Let an empty cache hold these vectors, with room behind the last."
    n = tensors[0].shape[-2] - 1
    for start, end in ((0, n), (n, n + 1)):
        cache.update(
            *(x[..., start:end, :] for x in tensors),
            positions=Positions(start=start, length=end - start),
        )
    return cache


def restore(cache, past):
    "Let a cache end after so many tokens again, as in mla_speed."
    last = [x[..., past - 1 : past, :].clone() for x in cache.tensors]
    cache.crop(past - 1)
    cache.update(*last, positions=Positions(start=past - 1, length=1))


def new_caches(layers, size, tokens):
    "A cache of each layer that holds so many tokens, with the same random latents."
    kept = torch.randn(1, 1, tokens, size.kv_rank + size.d_rope)
    index_k = torch.randn(1, 1, tokens, size.d_index)
    return {
        "dense": fill(layers["dense"].new_cache(1), [kept]),
        "sparse": fill(layers["sparse"].new_cache(1), [kept, index_k]),
    }


def attend(layer, q, kept):
    "The mixtures of latents (1, h, 1, kv_rank), made as in the absorbed order."
    rows = fused_attend(q.transpose(1, 2), kept, kept, scale=layer.scale)
    return rows[..., : layer.kv_rank].transpose(1, 2)


def absorbed_queries(layer, x, positions):
    "The queries (1, h, 1, kv_rank + d_rope) that meet what is kept of a token."
    q_nope, q_rope = layer.project_queries(x)
    (q_rope,) = layer.rotary(q_rope, positions=positions)
    up_k, _ = up_matrices(layer)
    return torch.cat([q_nope @ up_k, q_rope], -1)


def up_matrices(layer):
    "The matrices from a latent to the key and the value of each head, (h, d, r)."
    weight = layer.kv_up_proj.weight.view(layer.n_heads, -1, layer.kv_rank)
    return weight.split([layer.d_nope, layer.d_v], 1)


def project_mixtures(layer, mixed):
    "The output of a layer, made from the mixtures of latents."
    _, up_v = up_matrices(layer)
    return layer.o_proj((mixed @ up_v.mT).transpose(1, 2).flatten(2))


def decoding_parts(layer, x, cache):
    """Functions of which each takes what the one before has returned.

    They are the parts of attention for the last token of a cache, x: one for a dense
    layer, and for a sparse one those of `PARTS`. The last returns mixtures of latents.
    """
    kept = cache.tensors[0]
    key_positions = Positions(start=0, length=kept.shape[-2])
    positions = Positions(start=kept.shape[-2] - 1, length=1)
    queries = absorbed_queries(layer, x, positions)
    if kept.shape[-2] <= getattr(layer, "top_k", math.inf):
        return {"attend": lambda _: attend(layer, queries, kept)}
    q, weights = layer.indexer.project_queries(x, layer.compress_queries(x), positions)
    index_k = cache.tensors[1]
    # layers that share positions make their tensor once
    assert key_positions.tensor.shape == (1, kept.shape[-2])
    return {
        "score": lambda _: layer.indexer.score(q, weights, index_k),
        "choose": lambda scores: choose_candidates(
            scores, positions, key_positions, layer.top_k
        )[0],
        # not public, but what the layer calls
        "gather": lambda slots: sparse._gather(kept, slots),
        "attend": lambda chosen: attend(layer, queries, chosen),
    }


def run_parts(parts):
    "The processor milliseconds of each part in turn, and what the last returns."
    spent = {}
    result = None
    for name, part in parts.items():
        start = time.process_time()
        result = part(result)
        spent[name] = 1e3 * (time.process_time() - start)
    return spent, result


def milliseconds(function):
    "The processor milliseconds of a call."
    return run_parts({"all": lambda _: function()})[0]["all"]


def must_agree(found, expected, what):
    "Refuse parts that do not compute what the layer does."
    wrong = (found - expected).abs().max() / expected.abs().max()
    assert wrong < 1e-4, f"{what}: the parts differ from the layer by {wrong:.1e}"


def decode(tokens, rounds, size=LITE):
    "Milliseconds of each way and part in each round: one token, the last of a text."
    layers = make_layers(size)
    caches = new_caches(layers, size, tokens - 1)
    x = torch.randn(1, 1, size.d_model)
    for way, layer in layers.items():
        expected = layer(x, cache=caches[way])
        _, mixed = run_parts(decoding_parts(layer, x, caches[way]))
        must_agree(project_mixtures(layer, mixed), expected, f"{way}, {tokens} tokens")
    times = {}
    for _ in range(rounds):
        steps = {}
        for _ in range(STEPS):
            for way, layer in layers.items():
                for name, ms in decoding_step(way, layer, x, caches[way]).items():
                    steps.setdefault(name, []).append(ms)
        for name, found in steps.items():
            times.setdefault(name, []).append(median(found))
    return times


def decoding_step(way, layer, x, cache):
    "Milliseconds of a layer for the last token of a cache, and of its attention alone."
    restore(cache, cache.key_positions.length - 1)
    layer_ms = milliseconds(lambda: layer(x, cache=cache))
    spent, _ = run_parts(decoding_parts(layer, x, cache))
    parts = spent if way == "sparse" else {}
    return {f"{way}_layer": layer_ms, way: sum(spent.values()), **parts}


def prefill_parts(layers, size, x):
    "Functions of which each returns something of a whole prompt: ways, and parts."
    layer = layers["sparse"]
    tokens = x.shape[1]
    positions = Positions(start=0, length=tokens)
    q, weights = layer.indexer.project_queries(x, layer.compress_queries(x), positions)
    index_k = layer.indexer.project_keys(x, positions)
    visible = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
    # as many queries at a time as in the layer
    n = max(sparse._MAX_PRODUCTS // (size.n_index_heads * tokens), 1)
    # the layer gives the kernel values as wide as the keys
    wide = [
        torch.randn(1, size.n_heads, tokens, size.d_nope + size.d_rope)
        for _ in range(3)
    ]

    def score():
        for start in range(0, tokens, n):
            part = slice(start, start + n)
            layer.indexer.score(q[:, part], weights[:, part], index_k)

    def choose():
        choice = layer._choose_mask(
            q,
            weights,
            index_k,
            positions=positions,
            key_positions=positions,
            visible=visible,
        )
        return choice.kwargs["mask"]

    mask = choose()
    reads = torch.arange(1, tokens + 1).clamp(max=size.top_k)
    assert torch.equal(mask[0, 0].sum(-1), reads)
    return {
        "score": score,
        "score and choose": choose,
        "attend": lambda: fused_attend(*wide, mask, scale=layer.scale),
        "dense": lambda: fused_attend(*wide, causal=True, scale=layer.scale),
        "dense_layer": lambda: layers["dense"](x),
        "sparse_layer": lambda: layer(x),
    }


def prefill(tokens, rounds, size=LITE):
    "Milliseconds of each way and part in each round: a whole prompt."
    functions = prefill_parts(
        make_layers(size), size, torch.randn(1, tokens, size.d_model)
    )
    times = {}
    for i in range(rounds + 1):
        spent = {name: milliseconds(function) for name, function in functions.items()}
        spent["sparse"] = spent["score and choose"] + spent["attend"]
        spent["choose"] = spent.pop("score and choose") - spent["score"]
        for name, ms in spent.items():
            if i:  # the first round is not counted
                times.setdefault(name, []).append(ms)
    return times


def predictions(kind, tokens, size):
    "The columns that predict how many times longer dense attention takes."
    if kind == "prefill":
        return {"flops_ratio": "", "bytes_ratio": ""}
    latent = {"kv_rank": size.kv_rank, "d_rope": size.d_rope}
    index = {"top_k": size.top_k, "d_index": size.d_index}
    heads = {"n_heads": size.n_heads}
    flops = flops_dense(tokens, **latent, **heads) / flops_sparse(
        tokens, **latent, **heads, **index, n_index_heads=size.n_index_heads
    )
    moved = bytes_dense(tokens, **latent) / bytes_sparse(tokens, **latent, **index)
    return {"flops_ratio": f"{flops:.3f}", "bytes_ratio": f"{moved:.3f}"}


@torch.inference_mode()
def measure(kind, tokens, rounds, size=LITE):
    "One row: all ways in turn, so many times."
    times = (prefill if kind == "prefill" else decode)(tokens, rounds, size)
    row = {"kind": kind, "top_k": str(size.top_k), "tokens": str(tokens)}
    for way in WAYS:
        row |= {
            f"{way}_{name}": f"{of(times[way]):.3f}"
            for name, of in (("ms", median), ("lowest", min), ("highest", max))
        }
    for part in PARTS:
        row[f"{part}_ms"] = f"{median(times[part]):.3f}" if part in times else ""
    fixed = median(a - b for a, b in zip(times["sparse"], times["dense"], strict=True))
    row["fixed_ms"] = f"{fixed:.3f}" if kind == "fixed" else ""
    return (
        row
        | predictions(kind, tokens, size)
        | {"rounds": str(rounds), "processor": common.processor(), **common.about()}
    )


def cases(longest):
    "What is measured: one token of longer and longer texts, and whole prompts."
    found = [("fixed", 2, LITE._replace(top_k=1)), ("fixed", LITE.top_k + 1, LITE)]
    found += [("decode", n, LITE) for n in DECODES]
    found += [("prefill", n, LITE) for n in PREFILLS]
    return [case for case in found if case[1] <= longest]


def tell_crossover(rows):
    "Print where both take equally long, and where the fixed cost says they would."
    decoded = [row for row in rows if row["kind"] == "decode"]
    lengths = [int(row["tokens"]) for row in decoded]
    at = measured_crossover(
        lengths, [float(row["dense_ms"]) / float(row["sparse_ms"]) for row in decoded]
    )
    print("measured crossover:", "none" if at is None else f"{at:.0f} tokens")
    first = next(
        (
            row
            for row in rows
            if row["kind"] == "fixed" and row["top_k"] == str(LITE.top_k)
        ),
        None,
    )
    if first is None or len(decoded) < 2:
        return
    start = int(first["tokens"])
    dense, chosen = (
        1e3 * (float(decoded[-1][way]) - float(first[way])) / (lengths[-1] - start)
        for way in ("dense_ms", "sparse_ms")
    )
    expected = dense * LITE.n_index_heads * LITE.d_index / flops_dense(1)
    fixed = float(first["fixed_ms"])
    print(
        f"fixed cost: {fixed:.3f} ms at {start} tokens; each further one costs "
        f"{dense:.3f} µs dense and {chosen:.3f} µs sparse ({expected:.3f} µs by "
        f"multiply-adds), so both meet at "
        f"{start + 1e3 * fixed / (dense - chosen):.0f} tokens"
    )


def main():
    args = common.speed_arguments(__doc__, longest=max(DECODES), out=OUT)
    for what, dense, chosen in (
        ("multiply-adds", flops_dense, flops_sparse),
        ("bytes", bytes_dense, bytes_sparse),
    ):
        print(
            f"predicted crossover by {what}:",
            predicted_crossover(dense, chosen),
            "tokens",
            flush=True,
        )
    rows = []
    for kind, tokens, size in cases(args.longest):
        rows.append(measure(kind, tokens, args.rounds, size))
        print(
            *(
                f"{name}={x}"
                for name, x in list(rows[-1].items())[:22]
                if x and not name.endswith("est")
            ),
            flush=True,
        )
        common.write(rows, args.out)
    tell_crossover(rows)


if __name__ == "__main__":
    main()
