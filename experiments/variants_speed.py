"""How fast does the same decoder write, read a prompt, and learn, with each attention?

    python experiments/variants_speed.py            one thread, ten minutes
    python experiments/variants_speed.py --rounds 1 --longest 256 --out some.csv

One decoder of the kind of Llama, in float32 and with random weights: 512 wide, with 4
layers and 8 query heads of 64 numbers. Only its attention differs. `variant` is "mha"
for 8 key heads, "gqa" for 2, "mqa" for 1, and "mla" for latent attention that keeps as
many numbers of each token as "mqa". The others are like "gqa": "sliding" has a window
of 512 tokens in every layer, "alternating" in every other one, and in "sparse" each
query attends to 256 tokens that an indexer chooses. `parameters` counts the weights of
the whole decoder.

`kind` is "decode" for one token of one text of which the cache holds `tokens`, as
random vectors. In each round all variants write some tokens, in turn, so a step comes
after those of the other variants. Their weights, 50 MB each, drive its own weights and
its cache out of the caches of the processor, as in a larger decoder its own weights do.
`ms` is the median of the steps after a first one. In that first step a rolling cache
is copied to new memory, as it is once in so many steps: 128 with a full window. So for
variants with a window, `ms` is the mean of all steps from one copy to the next, in
which the steps that were not run count like the median. A cache that grows has room
behind the last token. It is copied each time that a text has doubled, on average one
slot in a step, and this is left out.

`cache_bytes` are what the caches of all layers hold before the step. `read_bytes` are
counted in a step of its own: the bytes of all keys and values that the attention kernel
is given, in all layers, and of the index keys that are scored. Memory that serves as
keys and as values counts once. In a sparse layer these are the index keys of all
tokens, and the keys and values of those that were chosen. That the latter are copied
before is not counted again. Where no more than 256 tokens can be chosen, none are
scored; the shortest text here has 257, the new one among them.

`kind` is "prefill" for a prompt of `tokens` that the decoder reads at once, with an
empty cache, which holds `cache_bytes` afterwards. There are logits for all tokens. A
first reading is not counted, and `read_bytes` is empty.

`kind` is "train" for the loss and the gradients of one text of `tokens`, without the
step of an optimizer, which is the same for all but for the number of weights. In
"sparse" the indexers learn as well, from the attention's weights to what they have
chosen. Both numbers of bytes are empty.

All times are milliseconds of processor time, medians of the rounds, with the `lowest`
and the `highest` beside them. With `--longest`, no prompt has more tokens than that,
and no cache holds more before the first step. The rows go to
tformer/records/variants_speed.csv.
"""

import time
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import NamedTuple
from unittest import mock

import torch
from torch.nn import functional as F

import common
from tformer.models.llama import Llama, LlamaConfig
from tformer.nn.positions import Positions
from tformer.variants.mla import make_mla_factory
from tformer.variants.sliding_window import RollingLayerCache, make_window_factory
from tformer.variants.sparse import (
    LightningIndexer,
    collect_indexer_losses,
    make_sparse_factory,
)

OUT = common.RECORDS / "variants_speed.csv"
VARIANTS = ("mha", "gqa", "mqa", "mla", "sliding", "alternating", "sparse")
DECODES = tuple(2**i for i in range(8, 15))  # 256 to 16,384
PREFILLS = tuple(2**i for i in range(8, 13))  # 256 to 4,096
TRAINS = tuple(2**i for i in range(8, 11))  # 256 to 1,024
STEPS = 8  # steps in a round of decoding, after the first


class Sizes(NamedTuple):
    "Those of the decoder, and of each attention."

    d_model: int = 512
    n_layers: int = 4
    n_heads: int = 8
    vocab_size: int = 1024
    max_len: int = max(DECODES) + 64
    n_kv_heads: int = 2  # but in mha, mqa and mla
    window: int = 512
    kv_rank: int = 96  # of mla, as the next three
    d_nope: int = 64
    d_rope: int = 32
    d_v: int = 64
    top_k: int = 256  # of sparse, as the next three
    n_index_heads: int = 4
    d_index: int = 32
    d_index_rope: int = 16


# the decoders


def make_model(variant, size):
    "The decoder with one attention, and random weights."
    n_kv_heads = {"mha": size.n_heads, "mqa": 1, "mla": None}
    config = LlamaConfig(
        vocab_size=size.vocab_size,
        d_model=size.d_model,
        n_layers=size.n_layers,
        n_heads=size.n_heads,
        n_kv_heads=n_kv_heads.get(variant, size.n_kv_heads),
        max_len=size.max_len,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Llama(config, make_factory(variant, config, size)).eval()


def make_factory(variant, config, size):
    "What makes the attention of each layer; None is that of the decoder itself."
    if variant == "mla":
        return make_mla_factory(
            config,
            kv_rank=size.kv_rank,
            d_nope=size.d_nope,
            d_rope=size.d_rope,
            d_v=size.d_v,
        )
    if variant == "sparse":
        return make_sparse_factory(
            config,
            size.top_k,
            n_index_heads=size.n_index_heads,
            d_index=size.d_index,
            d_index_rope=size.d_index_rope,
        )
    windows = {"sliding": [size.window], "alternating": [size.window, None]}
    return make_window_factory(config, windows[variant]) if variant in windows else None


def make_models(size):
    "All decoders by the name of their variant."
    return {variant: make_model(variant, size) for variant in VARIANTS}


# their caches


def filled_cache(model, tokens):
    """A cache that holds random vectors of so many tokens, two or more, in all layers.

    One that grows has room behind the last. One that rolls has none, so it is copied in
    the next step.
    """
    cache = model.new_cache(1)
    one = model.new_cache(1)
    model(torch.zeros(1, 1, dtype=torch.long), cache=one)  # for the shapes
    positions = [
        Positions(start=start, length=end - start)
        for start, end in ((0, tokens), (0, tokens - 1), (tokens - 1, tokens))
    ]
    for layer, like in zip(cache.layers, one.layers, strict=True):
        vectors = [
            torch.randn(*x.shape[:-2], tokens, x.shape[-1]) for x in like.tensors
        ]
        if isinstance(layer, RollingLayerCache):
            layer.update(*vectors, positions=positions[0], window=layer.window)
            continue
        # layers that share positions make what follows from them once
        for some in positions[1:]:
            layer.update(
                *(x[..., some.start : some.end, :] for x in vectors), positions=some
            )
    return cache


def steps_between_copies(cache):
    "After how many steps the rolling caches are copied again; None: there are none."
    held = [
        layer.tensors[0].shape[-2]
        for layer in cache.layers
        if isinstance(layer, RollingLayerCache)
    ]
    return max(held[0] // 4, 16) + 1 if held else None


# what attention reads


def count_bytes(*tensors):
    "Bytes of memory in which these tensors lie; what they share is counted once."
    marks = {}
    for x in tensors:
        storage = x.untyped_storage()
        at = storage.data_ptr()
        if at not in marks:
            marks[at] = x.new_zeros(storage.nbytes() // x.itemsize)
        shape = [
            1 if stride == 0 else n
            for n, stride in zip(x.shape, x.stride(), strict=True)
        ]
        marks[at].as_strided(shape, x.stride(), x.storage_offset()).fill_(1.0)
    return sum(mark.count_nonzero().item() * mark.itemsize for mark in marks.values())


@contextmanager
def watched_reads():
    "A list that collects the bytes of keys and values which attention is given."
    read = []
    kernel = F.scaled_dot_product_attention
    score = LightningIndexer.score

    def watched_kernel(q, k, v, *args, **kwargs):
        read.append(count_bytes(k, v))
        return kernel(q, k, v, *args, **kwargs)

    def watched_score(indexer, q, weights, k):
        read.append(count_bytes(k))
        return score(indexer, q, weights, k)

    with (
        mock.patch.object(F, "scaled_dot_product_attention", watched_kernel),
        mock.patch.object(LightningIndexer, "score", watched_score),
    ):
        yield read


# what is measured


def milliseconds(model, ids, cache):
    "The processor milliseconds that the decoder takes to read these tokens."
    start = time.process_time()
    model(ids, cache=cache)
    return 1e3 * (time.process_time() - start)


def random_ids(model, tokens):
    "One text."
    return torch.randint(model.config.vocab_size, (1, tokens))


def step_sizes(model, tokens):
    "Bytes that a filled cache holds, and those that attention reads in a step."
    cache = filled_cache(model, tokens)
    held = cache.nbytes
    with watched_reads() as read:
        model(random_ids(model, 1), cache=cache)
    return held, sum(read)


def decode(models, tokens, rounds):
    "Milliseconds of a step in each round by variant, and two numbers of bytes."
    times = {variant: [] for variant in models}
    sizes = {variant: step_sizes(model, tokens) for variant, model in models.items()}
    for _ in range(rounds):
        caches = {
            variant: filled_cache(model, tokens) for variant, model in models.items()
        }
        cycles = {
            variant: steps_between_copies(cache) for variant, cache in caches.items()
        }
        steps = {variant: [] for variant in models}
        for _ in range(1 + STEPS):
            for variant, model in models.items():
                steps[variant].append(
                    milliseconds(model, random_ids(model, 1), caches[variant])
                )
        for variant, (first, *others) in steps.items():
            times[variant].append(mean_step(first, median(others), cycles[variant]))
    return times, sizes


def mean_step(copying, usual, cycle):
    "The mean of all steps from one copy to the next; of usual ones without a cycle."
    return usual if cycle is None else (copying + (cycle - 1) * usual) / cycle


def prefill(models, tokens, rounds):
    "Milliseconds of reading a prompt in each round by variant, and bytes kept of it."
    times = {variant: [] for variant in models}
    sizes = {}
    for i in range(rounds + 1):
        for variant, model in models.items():
            cache = model.new_cache(1)
            ms = milliseconds(model, random_ids(model, tokens), cache)
            sizes[variant] = cache.nbytes, ""
            if i:  # the first round is not counted
                times[variant].append(ms)
    return times, sizes


def take_gradients(model, ids):
    "The loss of a text, and the gradients of all weights."
    sparse = any(isinstance(part, LightningIndexer) for part in model.modules())
    with collect_indexer_losses(model) if sparse else nullcontext([]) as extra:
        logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:]) + sum(extra)
    model.zero_grad()
    loss.backward()


def train(models, tokens, rounds):
    "Milliseconds of loss and gradients in each round by variant, and no bytes."
    times = {variant: [] for variant in models}
    with torch.inference_mode(False):
        for i in range(rounds + 1):
            for variant, model in models.items():
                model.train()
                ids = random_ids(model, tokens + 1)
                start = time.process_time()
                take_gradients(model, ids)
                ms = 1e3 * (time.process_time() - start)
                model.zero_grad()
                model.eval()
                if i:  # the first round is not counted
                    times[variant].append(ms)
    return times, dict.fromkeys(models, ("", ""))


@torch.inference_mode()
def measure(models, kind, tokens, rounds):
    "A row of each variant."
    run = {"decode": decode, "prefill": prefill, "train": train}[kind]
    times, sizes = run(models, tokens, rounds)
    rows = []
    for variant, model in models.items():
        row = {"kind": kind, "variant": variant, "tokens": str(tokens)}
        row |= {
            name: f"{of(times[variant]):.3f}"
            for name, of in (("ms", median), ("lowest", min), ("highest", max))
        }
        held, read = sizes[variant]
        rows.append(
            row
            | {
                "cache_bytes": str(held),
                "read_bytes": str(read),
                "parameters": str(sum(p.numel() for p in model.parameters())),
                "rounds": str(rounds),
                "processor": common.processor(),
                **common.about(),
            }
        )
    return rows


def cases(longest):
    "What is measured: one token after more and more, and longer and longer prompts."
    found = [("decode", n) for n in DECODES] + [("prefill", n) for n in PREFILLS]
    found += [("train", n) for n in TRAINS]
    return [case for case in found if case[1] <= longest]


def main():
    args = common.speed_arguments(__doc__, longest=max(DECODES), out=OUT)
    models = make_models(Sizes())
    rows = []
    for kind, tokens in cases(args.longest):
        for row in measure(models, kind, tokens, args.rounds):
            print(*list(row.values())[:9], flush=True)
            rows.append(row)
        common.write(rows, args.out)


if __name__ == "__main__":
    main()
