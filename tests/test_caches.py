"""The cache protocol, proved on seven caches, most of them yet to build.

Each is about thirty lines: what is kept differs, the methods do not. Every one
goes through the same tests, and must give what is given without a cache.
"""

import contextlib
import gc

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import close, draw_ids, interrupted_at, plain_only, spread
from models import ROWS, causal, num_read
from tformer import check
from tformer.models.llama import Llama, LlamaConfig
from tformer.nn import kv_cache
from tformer.nn.attention import (
    CrossAttention,
    SelfAttention,
    build_mask,
    mask_kwargs,
    merge_heads,
    split_heads,
)
from tformer.nn.attention_backends import fused_attend
from tformer.nn.kv_cache import (
    CrossAttentionCache,
    DynamicLayerCache,
    KVCache,
    LayerCacheBase,
)
from tformer.nn.layers import Linear
from tformer.nn.positions import Positions
from tformer.nn.relative_bias import ALiBi
from tformer.nn.rotary import RotaryEmbedding
from tformer.nn.static_cache import StaticLayerCache
from tformer.variants.sliding_window import SlidingWindowAttention
from tformer.variants.sparse import make_sparse_factory

VOCAB = 31
MAX_LEN = 40
WINDOW = 5
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    d_model=16,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    d_ff=24,
    max_len=MAX_LEN,
)
ROTARY = RotaryEmbedding(4)


def own_attention(cls=SelfAttention, **options):
    return cls(16, 4, n_kv_heads=2, bias=False, causal=True, rotary=ROTARY, **options)


# latent: two things are kept, neither of them a key or a value


class Latent(nn.Module):
    "Multi-head latent attention, the up-projections absorbed."

    def __init__(self, d=16, h=4, rank=6, d_head=4, d_rope=4, absorbed=True):
        super().__init__()
        self.h = h
        self.sizes = (d_head, d_rope)
        self.absorbed = absorbed
        self.q_proj = Linear(d, h * (d_head + d_rope), bias=False)
        self.down = Linear(d, rank + d_rope, bias=False)
        self.k_up = nn.Parameter(torch.empty(h, d_head, rank))
        self.v_up = nn.Parameter(torch.empty(h, d_head, rank))
        self.o_proj = Linear(h * d_head, d, bias=False)
        self.rotary = RotaryEmbedding(d_rope)

    def new_cache(self, batch, max_len=None):
        return DynamicLayerCache(batch)

    def forward(self, x, *, positions=None, mask=None, cache=None):
        key_positions = positions = Positions.of(positions, x, cache)
        q, q_rope = split_heads(self.q_proj(x), self.h).split(self.sizes, -1)
        latent, k_rope = self.down(x).split([self.k_up.shape[-1], self.sizes[1]], -1)
        q_rope, k_rope = self.rotary(q_rope, k_rope[:, None], positions=positions)
        if cache is not None:
            latent, k_rope, key_positions = cache.update(
                latent, k_rope, positions=positions
            )
        k = v = latent[:, None]
        if self.absorbed:
            q = torch.einsum("bhtd,hdr->bhtr", q, self.k_up)
        else:
            k, v = (
                torch.einsum("bosr,hdr->bhsd", k, up) for up in (self.k_up, self.v_up)
            )
        shape = *q.shape[:3], k.shape[-2]
        how = mask_kwargs(positions, Positions.of(key_positions), shape, True, mask)
        k_rope = k_rope.expand(-1, k.shape[1], -1, -1)
        out = fused_attend(
            torch.cat([q, q_rope], -1),
            torch.cat([k, k_rope], -1),
            v,
            scale=sum(self.sizes) ** -0.5,
            **how,
        )
        if self.absorbed:
            out = torch.einsum("bhtr,hdr->bhtd", out, self.v_up)
        return self.o_proj(merge_heads(out))


# indexer: a third tensor is kept, by which few keys are chosen


class Indexed(SelfAttention):
    "Attention to the ``n`` keys that an indexer likes best."

    def __init__(self, *args, n=4, by_slot=False, **options):
        super().__init__(*args, **options)
        self.n = n
        self.by_slot = by_slot
        self.iq_proj, self.ik_proj = (Linear(16, 3, bias=False) for _ in range(2))

    def forward(self, x, *, positions=None, mask=None, cache=None):
        key_positions = positions = Positions.of(positions, x, cache)
        q, k, v = self.project_qkv(x)
        q, k = self.rotary(q, k, positions=positions)
        iq = self.iq_proj(x)
        ik = self.ik_proj(x)
        if cache is not None:
            k, v, ik, key_positions = cache.update(k, v, ik, positions=positions)
        key_positions = Positions.of(key_positions)
        allowed = build_mask(
            positions.tensor, key_positions.tensor, mask, (*q.shape[:3], k.shape[-2])
        )
        chosen = self.choose(iq, ik, key_positions.tensor, allowed)
        return self.attend_and_project(q, k, v, mask=allowed & chosen)

    def choose(self, iq, ik, key_positions, allowed):
        "The best n; of equally good ones those that stand first."
        scores = (iq.double() @ ik.double().mT).relu()[:, None]
        scores = (2 * scores).round()  # so that many are equal
        scores = scores.masked_fill(~allowed, -1.0)
        slot = torch.arange(ik.shape[1])[None] if self.by_slot else key_positions
        a = scores[..., :, None]
        b = scores[..., None, :]
        slot = slot[:, None, None]
        ahead = (b > a) | (b == a) & (slot[..., None, :] < slot[..., :, None])
        return ahead.sum(-1) < self.n


# rolling: the last few tokens only


class Windowed(SelfAttention):
    "Each query sees the last ``WINDOW`` tokens, itself among them."

    def new_cache(self, batch, max_len=None):
        return Rolling(WINDOW, batch, self.o_proj.weight.device)

    def forward(self, x, *, positions=None, mask=None, cache=None):
        key_positions = positions = Positions.of(positions, x, cache)
        q, k, v = self.project_qkv(x)
        q, k = self.rotary(q, k, positions=positions)
        if cache is not None:
            k, v, key_positions = cache.update(k, v, positions=positions)
        key_positions = Positions.of(key_positions)
        near = (
            positions.tensor[:, None, :, None] - key_positions.tensor[:, None, None]
            < WINDOW
        )
        mask = near if mask is None else mask & near
        return self.attend_and_project(
            q,
            k,
            v,
            **mask_kwargs(
                positions, key_positions, (*q.shape[:3], k.shape[-2]), True, mask
            ),
        )


class Rolling(LayerCacheBase):
    "Returns all it had and all that is new; keeps what may be needed."

    def __init__(self, window, batch, device=None):
        super().__init__(batch)
        self.window = window
        self.lost = torch.full((batch,), -1, device=device)

    def update(self, *tensors, positions):
        at = Positions.of(positions).tensor.expand(len(tensors[0]), -1)
        if (at >= 0).any() and ((at >= 0) & (at <= self.lost[:, None])).any():
            raise ValueError("a token before those that were forgotten")
        if not self.is_empty:
            at = torch.cat([self.key_positions.tensor, at], -1)
            tensors = [
                torch.cat(p, -2) for p in zip(self.tensors, tensors, strict=True)
            ]
        order = at.argsort(-1, descending=True)
        keep = order[:, : self.window]
        drop = order[:, self.window :]
        self.lost = torch.cat([self.lost[:, None], at.gather(1, drop)], -1).amax(-1)
        rows = torch.arange(len(at))[:, None]
        self.replace(
            [x.transpose(1, -2)[rows, keep].transpose(1, -2) for x in tensors],
            Positions(at.gather(1, keep)),
        )
        return *tensors, Positions(at)

    def select(self, rows):
        super().select(rows)
        self.lost = self.lost[rows]

    def set_rows(self, rows, other):
        super().set_rows(rows, other)
        self.lost = self.lost.index_copy(0, rows, other.lost)

    def crop(self, n):
        n = torch.as_tensor(n).expand(self.batch_size)
        last = self.key_positions.tensor.amax(-1)
        cut = n <= last
        if (cut & (n - self.window < self.lost) & (n > 0)).any():
            raise ValueError(
                f"cannot crop to {n.tolist()}: forgotten up to {self.lost.tolist()}"
            )
        at = self.key_positions.tensor
        self.replace(self.tensors, Positions(at.masked_fill(at >= n[:, None], -1)))
        self.lost = self.lost.masked_fill(n == 0, -1)


# preallocated: the shape never changes; and slots: one for each position


class Fixed(SelfAttention):
    def new_cache(self, batch, max_len=None):
        return Preallocated(
            batch, max_len or MAX_LEN, (2, 4), (2, 4), like=self.o_proj.weight
        )


class Placed(SelfAttention):
    def new_cache(self, batch, max_len=None):
        return StaticLayerCache(batch, max_len or MAX_LEN)


class Slotted(SelfAttention):
    def new_cache(self, batch, max_len=None):
        return Slots(batch, max_len or MAX_LEN, (2, 4), (2, 4), like=self.o_proj.weight)


class Preallocated(LayerCacheBase):
    "All slots are returned; the next token is written at ``n``."

    def __init__(self, batch, max_len, *sizes, like):
        super().__init__(batch)
        self.tensors = [
            like.new_zeros(batch, *size[:-1], max_len, size[-1]) for size in sizes
        ]
        whole = dict(dtype=torch.int64, device=like.device)
        self.key_positions = torch.full((batch, max_len), -1, **whole)
        self.n = torch.zeros(1, **whole)

    lengths = property(lambda self: (self.key_positions >= 0).sum(-1))
    is_empty = property(lambda self: False)

    def update(self, *tensors, positions):
        at = Positions.of(positions).tensor.expand(self.batch_size, -1)
        slots = self.n + torch.arange(at.shape[1], device=at.device)
        for buffer, x in zip(self.tensors, tensors, strict=True):
            buffer.index_copy_(-2, slots, x)
        self.key_positions.index_copy_(1, slots, at)
        self.n += at.shape[1]
        return *self.tensors, self.key_positions

    def select(self, rows):
        self.tensors = [x[rows] for x in self.tensors]
        self.key_positions = self.key_positions[rows]
        self.batch_size = len(rows)

    def crop(self, n):
        n = torch.as_tensor(n).reshape(-1, 1)
        self.key_positions = self.key_positions.masked_fill(self.key_positions >= n, -1)

    def set_rows(self, rows, other):
        self.key_positions = self.key_positions.index_copy(0, rows, other.key_positions)
        self.n = torch.maximum(self.n, other.n)
        self.tensors = [
            x.index_copy(0, rows, y)
            for x, y in zip(self.tensors, other.tensors, strict=True)
        ]


class Slots(Preallocated):
    "A token is written at its position; padding in a slot of no use."

    def __init__(self, batch, max_len, *sizes, like):
        super().__init__(batch, max_len + 1, *sizes, like=like)

    def update(self, *tensors, positions):
        at = Positions.of(positions).tensor.expand(self.batch_size, -1)
        last = self.key_positions.shape[1] - 1
        rows = torch.arange(self.batch_size, device=at.device)[:, None]
        slots = torch.where(at < 0, last, at)
        for buffer, x in zip(self.tensors, tensors, strict=True):
            buffer.transpose(1, 2)[rows, slots] = x.transpose(1, 2)
        self.key_positions[rows, slots] = at
        return *self.tensors, self.key_positions


TABLE = {
    "growing": lambda layer: own_attention(),
    "latent": lambda layer: Latent(),
    "indexer": lambda layer: own_attention(Indexed),
    "rolling": lambda layer: own_attention(Windowed),
    "preallocated": lambda layer: own_attention(Fixed),
    "slots": lambda layer: own_attention(Slotted),
    "fixed": lambda layer: own_attention(Placed),
    "mixed": lambda layer: own_attention(SelfAttention if layer % 2 else Windowed),
    "windows": lambda layer: SlidingWindowAttention(
        16, 4, n_kv_heads=2, bias=False, rotary=ROTARY, window=WINDOW
    ),
    "sparse": make_sparse_factory(CONFIG, 4, d_index=8, n_index_heads=2),
    "blocks": make_sparse_factory(
        CONFIG, 2, d_index=8, n_index_heads=None, block_size=3, n_local=1
    ),
}
FORGETFUL = "rolling", "mixed", "windows"
INDEXED = "indexer", "sparse", "blocks"
each = pytest.mark.parametrize("name", TABLE)


def model_of(attention):
    "Weights so large that every token matters."
    return spread(Llama(CONFIG, TABLE.get(attention, attention)), std=0.35)


def texts(*lengths, seed=0):
    ids = draw_ids(len(lengths), max(lengths), high=VOCAB, seed=seed)
    return [row[:n] for row, n in zip(ids, lengths, strict=True)]


def left_padded(rows):
    "Ids and positions of texts of different lengths, in one batch."
    n = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), n).long()
    positions = torch.full((len(rows), n), -1)
    for i, row in enumerate(rows):
        ids[i, n - len(row) :] = row
        positions[i, n - len(row) :] = torch.arange(len(row))
    return ids, positions


@torch.no_grad()
def alone(model, text, n):
    "Greedy decoding of one text, without a cache; and the logits of each."
    ids = text[None]
    logits = []
    for _ in range(n):
        logits.append(model(ids)[:, -1:])
        ids = torch.cat([ids, logits[-1].argmax(-1)], 1)
    return ids[:, len(text) :], torch.cat(logits, 1)


@torch.no_grad()
def together(model, cache, rows, n, chunk=None):
    "The same of a padded batch, with a cache."
    ids, positions = left_padded(rows)
    size = chunk or ids.shape[1]
    logits = []
    for part, at in zip(ids.split(size, 1), positions.split(size, 1), strict=True):
        out = model(part, positions=at, cache=cache)
    for _ in range(n):
        logits.append(out[:, -1:])
        out = model(logits[-1].argmax(-1), cache=cache)
    logits = torch.cat(logits, 1)
    return logits.argmax(-1), logits


def equal_to_alone(model, rows, found):
    "The same tokens, by the same logits."
    texts = [alone(model, text, found[0].shape[1]) for text in rows]
    ids, logits = (torch.cat(part) for part in zip(*texts, strict=False))
    close(found[1], logits)
    assert torch.equal(found[0], ids)
    assert len(set(ids.flatten().tolist())) > 3  # it says something


@each
def test_every_check_passes(name):
    # what an indexer chooses is no number, and has no gradient
    skip = ("gradients",) if name in INDEXED else ()
    report = check.run_all(model_of(name), VOCAB, skip=skip)
    said = {said for _, said in report.notes} - {"passed", "skipped"}
    # a window may refuse to take back what it has forgotten
    assert not said or (name in FORGETFUL and all("crop" in text for text in said))


@each
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_greedy_decoding_equals_no_cache(name, chunk):
    "Texts shorter than the window, and longer ones."
    model = model_of(name)
    rows = texts(3, 9, 14)
    equal_to_alone(model, rows, together(model, model.new_cache(3), rows, 12, chunk))


# positions: with gaps, out of order, from 5 on

WAYS = {
    "from 5 on": [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]],
    "gaps": [[0, 1, 2, 5, 6, 9, 10, 11, 17, 18], [2, 3, 4, 7, 11, 12, 13, 14, 15, 30]],
    "out of order": [[3, 0, 2, 1, 5, 4, 6, 9, 7, 8], [2, 1, 0, 3, 4, 5, 6, 7, 9, 8]],
    "holes": [[-1, 0, 1, -1, 2, 3, 4, -1, 5, 6], [0, 1, -1, -1, 2, -1, 3, 4, 5, 6]],
}


@each
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sizes", [(4, 2, 4), (1, 2, 3, 4)])
def test_positions_of_all_kinds(name, way, sizes):
    "Without a cache, keys that had not come yet are masked instead."
    if (way, sizes[0]) == ("out of order", 1) and name in FORGETFUL:
        sizes = 4, 6  # a window forgets what came too late
    model = model_of(name)
    positions = torch.tensor(WAYS[way]).expand(2, -1)
    ids = draw_ids(2, 10, high=VOCAB)
    cache = model.new_cache(2)
    tokens = positions >= 0
    came = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    there = (came[:, None] >= came)[None, None]
    with torch.no_grad():
        whole = model(ids, positions=positions, mask=there)
        parts = [
            model(a, positions=b, cache=cache)
            for a, b in zip(ids.split(sizes, 1), positions.split(sizes, 1), strict=True)
        ]
        close(torch.cat(parts, 1)[tokens], whole[tokens])
        # and the next token follows the largest position
        last = draw_ids(2, 1, high=VOCAB, seed=1)
        after = positions.amax(-1, keepdim=True) + 1
        y = model(
            torch.cat([ids, last], 1),
            positions=torch.cat([positions, after], 1),
            mask=F.pad(F.pad(there, (0, 1)), (0, 0, 0, 1), value=True),
        )
        close(model(last, cache=cache), y[:, -1:])


@pytest.mark.parametrize("name", FORGETFUL)
def test_a_window_refuses_what_comes_too_late(name):
    model = model_of(name)
    ids = draw_ids(2, 9, high=VOCAB)
    cache = model.new_cache(2)
    model(ids[:, :8], cache=cache)
    with pytest.raises(ValueError, match=r"were forgotten|has dropped"):
        model(ids[:, 8:], positions=torch.tensor([[2]]), cache=cache)


def test_queries_out_of_order_are_the_same_queries():
    ids = draw_ids(1, 10, high=VOCAB)
    order = torch.randperm(10)
    for name in TABLE:
        model = model_of(name)
        close(model(ids[:, order], positions=order[None]), model(ids)[:, order])


# the methods


@each
@pytest.mark.parametrize("n", [10, 9, [10, 8], [9, 3]])
def test_crop_takes_back(name, n):
    "As if what was forgotten had never been written."
    model = model_of(name)
    rows = texts(10, 8)
    lengths = [
        min(k, len(row))
        for k, row in zip([n, n] if isinstance(n, int) else n, rows, strict=True)
    ]
    ids, positions = left_padded(rows)
    cache = model.new_cache(2)
    cache.allow_rollback(1)
    more = draw_ids(2, 3, high=VOCAB, seed=2)
    with torch.no_grad():
        model(ids, positions=positions, cache=cache)
        n = n if isinstance(n, int) else torch.tensor(n)
        if lengths[1] == 3 and name in FORGETFUL:
            held = [
                (c.lengths.tolist(), [x.clone() for x in c.tensors])
                for c in cache.layers
            ]
            with pytest.raises(ValueError, match=r"cannot crop|crop\(3\) leaves"):
                cache.crop(n)
            for layer, (seen, kept) in zip(cache.layers, held, strict=True):
                assert layer.lengths.tolist() == seen
                assert all(map(torch.equal, layer.tensors, kept))
            return
        cache.crop(n)
        parts = torch.cat([model(more[:, i : i + 1], cache=cache) for i in range(3)], 1)
        for i, (row, k) in enumerate(zip(rows, lengths, strict=True)):
            text = torch.cat([row[:k], more[i]])[None]
            close(parts[i : i + 1], model(text)[:, k:])


@each
def test_select_reorders_and_repeats(name):
    model = model_of(name)
    rows = texts(7, 4)
    ids, positions = left_padded(rows)
    cache = model.new_cache(2)
    order = torch.tensor([1, 1, 0])
    more = draw_ids(3, 2, high=VOCAB, seed=3)
    with torch.no_grad():
        model(ids, positions=positions, cache=cache)
        cache.select(order)
        y = torch.cat([model(x, cache=cache) for x in more.split(1, 1)], 1)
        for i, j in enumerate(order.tolist()):
            text = torch.cat([rows[j], more[i]])[None]
            close(y[i : i + 1], model(text)[:, len(rows[j]) :])


@torch.no_grad()
def serve(model, jobs, batch_size):
    """Texts that come and go: in-flight batching in its smallest form.

    ``jobs`` are pairs of a text and how many tokens to write; a row that
    has written all of its own is given to the next.
    """
    cache = model.new_cache(batch_size)
    waiting = list(enumerate(jobs))
    rows = [None] * batch_size
    last = torch.zeros(batch_size, 1).long()
    done = {}
    while waiting or any(rows):
        for index in range(batch_size):
            if rows[index] is None and waiting:
                job, (text, n) = waiting.pop(0)
                one = model.new_cache(1)
                out = model(text[None], cache=one)
                cache.set_rows(torch.tensor([index]), one)
                last[index] = out[0, -1].argmax()
                rows[index] = (job, n, [last[index].item()])
        busy = torch.tensor([row is not None for row in rows])[:, None]
        positions = cache.key_positions.next(1).tensor.where(busy, -1)
        out = model(last, positions=positions, cache=cache)
        last = out[:, -1:].argmax(-1)
        for index, row in enumerate(rows):
            if row and len(row[2]) == row[1]:
                done[row[0]] = row[2]
                rows[index] = None
            elif row:
                row[2].append(last[index].item())
    return [done[i] for i in range(len(jobs))]


@each
def test_rows_that_end_are_taken_by_others(name):
    model = model_of(name)
    jobs = list(zip(texts(6, 2, 11, 1, 4, 3), (3, 9, 2, 7, 1, 5), strict=True))
    assert serve(model, jobs, batch_size=2) == [
        alone(model, text, n)[0][0].tolist() for text, n in jobs
    ]


@each
def test_several_rows_are_set_at_once(name):
    model = model_of(name)
    rows = texts(4, 9, 6)
    more = texts(3, 8, seed=5)
    with torch.no_grad():
        caches = []
        for group in (rows, more):
            ids, positions = left_padded(group)
            caches.append(model.new_cache(len(group)))
            model(ids, positions=positions, cache=caches[-1])
        one, two = caches
        one.set_rows(torch.tensor([2, 0]), two)
        now = [more[1], rows[1], more[0]]
        last = draw_ids(3, 1, high=VOCAB, seed=6)
        for _ in range(2):
            y = model(last, cache=one)
            now = [torch.cat([row, x]) for row, x in zip(now, last, strict=True)]
            close(y, torch.cat([model(row[None])[:, -1:] for row in now]))


# a cache that gives back all its slots (−1 where there is nothing)


def test_all_slots_may_be_given_back():
    "Nothing that is empty is seen, nor does it make the mask plain."
    for name in ("preallocated", "slots", "fixed"):
        model = model_of(name)
        ids = draw_ids(2, 9, high=VOCAB)
        cache = model.new_cache(2)
        with torch.no_grad():
            close(model(ids[:, :6], cache=cache), model(ids[:, :6]))
            assert (cache.key_positions.tensor >= 0).sum(-1).tolist() == [6, 6]
            for buffer in cache.layers[0].tensors:  # of empty slots
                assert buffer.shape[-2] >= MAX_LEN
            close(model(ids[:, 6:], cache=cache), model(ids)[:, 6:])


@pytest.mark.nightly
@plain_only
@pytest.mark.parametrize("name", ["preallocated", "slots"])
def test_two_graphs_serve_prefill_and_every_step(name):
    "Of fixed shape, ragged, compiled whole."
    graphs = []
    model = model_of(name)
    rows = texts(3, 9, 14)

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    fast = torch.compile(model, backend=backend, fullgraph=True)
    found = together(fast, model.new_cache(3), rows, 12)
    torch.compiler.reset()
    assert len(graphs) == 2
    equal_to_alone(model, rows, found)


# a step asks the device for nothing


class Reads(TorchDispatchMode):
    "Refuses what a host has to wait for, where tensors are on a GPU."

    now = False

    def __enter__(self):
        Reads.now = True
        return super().__enter__()

    def __exit__(self, *error):
        Reads.now = False
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "equal"), (
            f"{name} waits for the device"
        )
        return function(*args, **(kwargs or {}))


@pytest.fixture
def elsewhere(monkeypatch):
    "All tensors say that they are not on the CPU."
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda x: False))
    for name in ("tolist", "numpy", "cpu", "unique", "masked_select"):
        plain = getattr(torch.Tensor, name)

        def spy(self, *args, _plain=plain, _name=name, **how):
            assert not Reads.now, f"{_name} waits for the device"
            return _plain(self, *args, **how)

        monkeypatch.setattr(torch.Tensor, name, spy)


def step_blind(model, ragged, source=False):
    "Prefill, then steps, of which none may read a value."
    ids = draw_ids(3, 9, high=VOCAB)
    positions = (
        torch.tensor([[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2], [-1, 0, 1, 2, 3]])
        if ragged
        else None
    )
    cache = model.new_cache(3)
    how = {}
    with torch.no_grad():
        if source:
            keep = torch.ones(3, 7).bool()
            keep[0, :ragged] = False
            how = dict(
                encoder_hidden_states=model.encode(ids[:, :7], keep),
                encoder_attention_mask=keep,
            )
        model(ids[:, :5], positions=positions, cache=cache, **how)
        with Reads():
            parts = [model(ids[:, i : i + 1], cache=cache, **how) for i in range(5, 9)]
    return torch.cat(parts, 1)


@plain_only
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("name", [n for n in TABLE if n not in ("rolling", "mixed")])
def test_a_step_of_a_cache_reads_no_value(name, ragged, elsewhere):
    model = model_of(name)
    step_blind(model, ragged)


@plain_only
@pytest.mark.parametrize("ragged", [False, True])
@causal
def test_a_step_of_a_model_reads_no_value(row, ragged, elsewhere):
    step_blind(row.make(), ragged, row.source)


def test_what_is_read_is_seen(elsewhere):
    for read in (
        torch.Tensor.any,
        torch.Tensor.nonzero,
        lambda x: x[x > 0],
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: x.unique(),
    ):
        with pytest.raises(AssertionError, match="waits"), Reads():
            bool(read(torch.ones(1)))


# rows of the models of the course


@causal
def test_rows_of_every_model_make_place(row):
    "With a source each, of different lengths, for those that read one."
    model = row.make()
    ids = row.ids(3, 9)
    sources = row.ids(3, 7, seed=9)
    lengths = (7, 3, 5)

    def start(i, k):
        cache = model.new_cache(1)
        how = {}
        if row.source:
            how = dict(
                encoder_hidden_states=model.encode(sources[i : i + 1, : lengths[i]])
            )
        model(ids[i : i + 1, :k], cache=cache, **how)
        return cache

    def whole(i, text):
        how = (
            dict(encoder_hidden_states=model.encode(sources[i : i + 1, : lengths[i]]))
            if row.source
            else {}
        )
        return model(text[None], **how)[:, -1:]

    with torch.no_grad():
        cache = model.new_cache(2)
        cache.set_rows(torch.tensor([1]), start(0, 4))
        cache.set_rows(torch.tensor([0]), start(1, 6))
        y = model(ids[[1, 0], 8:], cache=cache)
        rows = [
            torch.cat([ids[1, :6], ids[1, 8:]]),
            torch.cat([ids[0, :4], ids[0, 8:]]),
        ]
        close(y, torch.cat([whole(1, rows[0]), whole(0, rows[1])]))
        cache.set_rows(torch.tensor([0]), start(2, 5))
        y = model(ids[[2, 0], 7:8], cache=cache)
        close(
            y,
            torch.cat(
                [
                    whole(2, torch.cat([ids[2, :5], ids[2, 7:8]])),
                    whole(0, torch.cat([rows[1], ids[0, 7:8]])),
                ]
            ),
        )


def filled(rows, n=4, width=4, dtype=torch.float32):
    cache = DynamicLayerCache(rows)
    cache.update(
        *(torch.randn(rows, 2, n, width, dtype=dtype) for _ in range(2)),
        positions=torch.arange(n)[None],
    )
    return cache


@pytest.mark.parametrize(
    "rows, other, says",
    [
        (
            [0, 1],
            lambda: filled(1),
            r"the source has 1 rows, .* name 1 rows, got \(2,\)",
        ),
        ([[0]], lambda: filled(1), r"rows must be a tensor of row numbers"),
        ([3], lambda: filled(1), r"from 0 to 2, got \[3\]"),
        ([-1], lambda: filled(1), r"from 0 to 2, got \[-1\]"),
        ([1, 1], lambda: filled(2), r"different numbers .* got \[1, 1\]"),
        ([1], lambda: DynamicLayerCache(1), "a cache that holds tokens"),
        ([1], lambda: filled(1, width=5), "all but batch and time.* 5"),
        ([1], lambda: filled(1, dtype=torch.float64), "float64.* meets .*32"),
    ],
)
def test_rows_that_do_not_fit_are_named(rows, other, says):
    "And if the second layer refuses, the first has not changed."
    cache = KVCache([filled(3), filled(3)])
    rows = torch.tensor(rows)
    good = filled(rows.numel())
    bad = other()
    before = [[x.clone() for x in layer.tensors] for layer in cache.layers]
    with pytest.raises(ValueError, match=says):
        cache.set_rows(rows, KVCache([good if rows.ndim == 1 else bad, bad]))
    for layer, kept in zip(cache.layers, before, strict=True):
        assert all(map(torch.equal, layer.tensors, kept))
        assert layer.key_positions.tensor.tolist() == [[0, 1, 2, 3]]


def test_rows_of_a_cache_of_more_layers_are_refused():
    with pytest.raises(ValueError, match=r"of 1 layers .* in one of 2"):
        KVCache([filled(2), filled(2)]).set_rows(
            torch.tensor([0]), KVCache([filled(1)])
        )
    with pytest.raises(ValueError, match="knows how many rows"):
        DynamicLayerCache().set_rows(torch.tensor([0]), filled(1))


def test_an_empty_cache_knows_its_rows():
    cache = own_attention().new_cache(3)
    cache.set_rows(torch.tensor([2]), filled(1))
    assert cache.lengths.tolist() == [0, 0, 4]
    assert cache.key_positions.next(1).tensor.tolist() == [[0], [0], [4]]
    cache.select(torch.tensor([2, 0]))
    assert cache.lengths.tolist() == [4, 0] and cache.batch_size == 2
    with pytest.raises(ValueError, match="a batch of 3 meets a cache of 2"):
        cache.update(*[torch.zeros(3, 2, 1, 4)] * 2, positions=torch.tensor([[4]]))
    with pytest.raises(ValueError, match="a batch of 2 meets a cache of 3"):
        DynamicLayerCache(3).update(
            torch.zeros(2, 2, 1, 4), positions=torch.tensor([[0]])
        )


def test_the_limit_is_that_of_the_rows_that_are_there():
    "A long row that left does not keep a short one from going on."
    model = model_of("growing")
    short = torch.tensor([1])
    ids, positions = left_padded(texts(MAX_LEN, 3))
    for leave in ("select", "put", "crop"):
        cache = model.new_cache(2)
        with torch.no_grad():
            model(ids, positions=positions, cache=cache)
            if leave == "select":
                cache.select(short)
            elif leave == "put":
                one = model.new_cache(1)
                model(ids[1:, -3:], cache=one)
                cache.set_rows(torch.tensor([0]), one)
            else:
                cache.crop(torch.tensor([2, 3]))
            n = len(cache.layers[0].tensors[0])
            model(ids[:n, -1:], cache=cache)
            assert cache.lengths.tolist()[-1] == 4
        cache = model.new_cache(2)
        model(ids, positions=positions, cache=cache)
        with pytest.raises(ValueError, match=f"{MAX_LEN + 1} tokens, beyond"):
            model(ids[:, -1:], cache=cache)


# broken on purpose


@pytest.mark.parametrize("seed", range(3))
def test_absorbed_weights_are_the_same_weights(seed):
    a = Latent()
    b = Latent(absorbed=False)
    spread(a, 0.5), spread(b, 0.5)
    x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(seed))
    close(a(x), b(x))


def test_a_latent_is_all_that_is_kept():
    model = model_of("latent")
    cache = None
    cache = model.new_cache(2)
    model(draw_ids(2, 9, high=VOCAB), cache=cache)
    assert cache.nbytes == 2 * 2 * 9 * (6 + 4) * 4
    rolling = model_of("rolling")
    cache = rolling.new_cache(2)
    rolling(draw_ids(2, 9, high=VOCAB), cache=cache)
    assert cache.nbytes == 2 * 2 * WINDOW * 2 * (2 * 4) * 4


def trimmed(self, *tensors, positions):
    "Only what is kept, also of a prefill longer than the window."
    Rolling_update(self, *tensors, positions=positions)
    return *self.tensors, self.key_positions


def full_of_tokens(self, *tensors, positions):
    "Empty slots count as tokens at position 0."
    *kept, key_positions = Preallocated_update(self, *tensors, positions=positions)
    return *kept, key_positions.clamp(min=0)


def by_arrival(self, *tensors, positions):
    "A slot that is the number of the token in this call."
    at = Positions.of(positions).tensor.expand(self.batch_size, -1)
    for buffer, x in zip(self.tensors, tensors, strict=True):
        buffer[:, :, : at.shape[1]] = x
    self.key_positions[:, : at.shape[1]] = at
    return *self.tensors, self.key_positions


def one_row_late(self, rows, other):
    LayerCacheBase_set_rows(self, (rows + 1) % self.batch_size, other)


def old_positions(self, rows, other):
    key_positions = self.key_positions
    n = self.is_empty
    LayerCacheBase_set_rows(self, rows, other)
    if not n and key_positions.length == self.key_positions.length:
        self.key_positions = key_positions


Rolling_update = Rolling.update
Preallocated_update = Preallocated.update
LayerCacheBase_set_rows = LayerCacheBase.set_rows


def red(name):
    "Each contract that a table's row breaks."
    found = []
    for test, rest in (
        (test_every_check_passes, ()),
        (test_greedy_decoding_equals_no_cache, (None,)),
        (test_positions_of_all_kinds, ("gaps", (4, 2, 4))),
        (test_crop_takes_back, (9,)),
        (test_select_reorders_and_repeats, ()),
        (test_rows_that_end_are_taken_by_others, ()),
    ):
        try:
            test(name, *rest)
        except (AssertionError, ValueError, RuntimeError):
            found.append(test.__name__.split("_")[1])
    return found


@pytest.mark.parametrize(
    "name, owner, operation, wrong, least",
    [
        (
            "rolling",
            Rolling,
            "update",
            trimmed,
            {"every", "greedy", "positions", "rows"},
        ),
        (
            "preallocated",
            Preallocated,
            "update",
            full_of_tokens,
            {"every", "greedy", "positions", "crop", "select", "rows"},
        ),
        ("slots", Slots, "update", by_arrival, {"every", "greedy", "rows"}),
        ("growing", LayerCacheBase, "set_rows", one_row_late, {"rows"}),
        ("growing", LayerCacheBase, "set_rows", old_positions, {"rows"}),
        ("latent", LayerCacheBase, "select", lambda self, rows: None, {"select"}),
        ("indexer", DynamicLayerCache, "crop", lambda self, n: None, {"crop"}),
    ],
)
def test_what_is_broken_is_seen(name, owner, operation, wrong, least, monkeypatch):
    assert red(name) == []
    monkeypatch.setattr(owner, operation, wrong)
    assert set(red(name)) >= least


def test_ties_must_not_depend_on_where_a_key_lies(monkeypatch):
    row_of = TABLE["indexer"]

    def by_slot(layer):
        made = row_of(layer)
        made.by_slot = True
        return made

    monkeypatch.setitem(TABLE, "indexer", by_slot)
    with pytest.raises(AssertionError):
        test_queries_out_of_order_are_the_same_queries()


# what is refused changes nothing


@causal
def test_a_refused_step_leaves_the_cache_as_it_was(row):
    "Also if the second layer refuses, or a memory is forgotten."
    model = row.make()
    ids = row.ids(3, 8)
    cache = model.new_cache(3)
    how = {}
    later = {}
    with torch.no_grad():
        if row.source:
            memory = model.encode(row.ids(3, 7, seed=9))
            with pytest.raises(ValueError, match="no encoder_hidden_states yet"):
                model(ids[:, :5], cache=cache)
            assert cache.is_empty
            how = dict(encoder_hidden_states=memory)
            later = dict(encoder_hidden_states=memory)
        whole = model(ids, **how)
        model(ids[:, :5], cache=cache, **how)
        for wrong in (
            dict(mask=torch.ones(3, 6).bool()),
            dict(mask=torch.ones(3, 1, 1, 9).bool()),
            dict(mask=torch.ones(3, 1, 1, 6)),
        ):
            with pytest.raises(ValueError, match="mask"):
                model(ids[:, 5:6], cache=cache, **wrong, **later)
            assert num_read(cache).tolist() == [5, 5, 5]
        # a layer that fails, as where memory is too small for the logits
        for last in (model.blocks[-1].feed_forward.sublayer, model.lm_head):
            hook = last.register_forward_pre_hook(lambda *a: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(ids[:, 5:6], cache=cache, **later)
            hook.remove()
            assert num_read(cache).tolist() == [5, 5, 5]
        close(model(ids[:, 5:], cache=cache, **later), whole[:, 5:])


def test_positions_of_fewer_keys_are_refused():
    class Late(DynamicLayerCache):
        def update(self, *tensors, positions):
            return *super().update(*tensors, positions=positions)[:-1], positions

    layer = own_attention()
    late = Late()
    layer(torch.randn(2, 4, 16), cache=late)
    with pytest.raises(ValueError, match="1 positions for 5 keys"):
        layer(torch.randn(2, 1, 16), cache=late)


def test_a_server_does_not_grow_without_end():
    "Places that no row needs any more go when another text comes."
    model = model_of("growing")
    text = draw_ids(1, 20, high=VOCAB)
    cache = model.new_cache(2)
    widest = 0
    with torch.no_grad():
        for i in range(60):
            if i % 6 == 0:
                one = model.new_cache(1)
                model(text[:, :4], cache=one)
                cache.set_rows(torch.tensor([i // 6 % 2]), one)
            model(text[:, :1].expand(2, 1), cache=cache)
            widest = max(widest, cache.layers[0].tensors[0].shape[-2])
    assert widest <= 4 + 3 * 6


def test_the_same_memory_keeps_its_padding():
    row = next(r for r in ROWS if r.source)
    model = row.make()
    ids = row.ids(2, 6)
    keep = torch.ones(2, 7).bool()
    keep[1, :3] = False
    memory = model.encode(row.ids(2, 7, seed=9), keep)
    cache = None
    cache = model.new_cache(2)
    how = dict(encoder_hidden_states=memory, encoder_attention_mask=keep)
    model(ids[:, :5], cache=cache, **how)
    close(
        model(ids[:, 5:], encoder_hidden_states=memory, cache=cache),
        model(ids, **how)[:, 5:],
    )


@pytest.mark.parametrize(
    "use, says",
    [
        (lambda c: c.select(torch.tensor([0, 3])), r"from 0 to 2, got \[0, 3\]"),
        (lambda c: c.select([0, 1]), "rows must be a tensor of row numbers"),
        (lambda c: c.select(torch.tensor([True, False, True])), "row numbers"),
        (lambda c: c.select(torch.tensor([0.0])), "row numbers"),
        (lambda c: c.crop(2.5), "n must be a whole number .*2.5"),
        (lambda c: c.crop(True), "n must be a whole number .*True"),
        (lambda c: c.crop(-1), "n must be a whole number .*-1"),
        (lambda c: c.crop(torch.tensor(3)), r"one for each row, got .*\(\)"),
        (lambda c: c.crop(torch.tensor([1, 2])), r"\(3,\), one for each row"),
        (lambda c: c.crop(torch.tensor([1.0, 2, 3])), "got torch.float32"),
    ],
)
def test_methods_refuse_what_is_no_row_and_no_number(use, says):
    for cache in (filled(3), KVCache([filled(3), filled(3)])):
        with pytest.raises(ValueError, match=says):
            use(cache)
        assert cache.lengths.tolist() == [4, 4, 4]
    cache.crop(np.int64(3))
    assert cache.lengths.tolist() == [3, 3, 3]


@pytest.mark.parametrize("batch", [0, -1, 2.5, True])
def test_a_cache_of_no_rows_is_refused(batch):
    with pytest.raises(ValueError, match="batch_size must be a whole number"):
        model_of("growing").new_cache(batch)


@pytest.mark.parametrize("cache", [DynamicLayerCache(1), (DynamicLayerCache(1),), 3])
def test_what_is_no_cache_is_named(cache):
    with pytest.raises(ValueError, match="what new_cache makes, got"):
        model_of("growing")(torch.zeros(1, 2).long(), cache=cache)


def test_a_batch_that_meets_the_cache_of_another():
    model = model_of("growing")
    ids, positions = left_padded(texts(3, 5))
    for given in (positions, None):
        cache = model.new_cache(2)
        model(ids, positions=given, cache=cache)
        with pytest.raises(
            ValueError,
            match=r"after the cache of shape "
            r"\(2, 1\)|a batch of 3 meets a cache of 2",
        ):
            model(torch.zeros(3, 1).long(), cache=cache)


# what is broken in the methods is found by the check that readers have


def only_tensors(self, rows):
    self.tensors = [x[rows] for x in self.tensors]
    self.batch_size = len(rows)


def only_positions(self, rows):
    at = self.key_positions.tensor.expand(self.batch_size, -1)[rows]
    self.key_positions = Positions(at)
    self.batch_size = len(rows)
    self.tensors = [
        x[torch.arange(len(rows)) % len(x)] if len(rows) == 3 else x
        for x in self.tensors
    ]


def widest_row(self, n):
    DynamicLayerCache_crop(self, int(torch.as_tensor(n).max()))


def every_slot(self, n):
    self.tensors = [x[..., :-1, :] for x in self.tensors]


DynamicLayerCache_crop = DynamicLayerCache.crop


@pytest.mark.parametrize(
    "operation, wrong, says",
    [
        ("select", only_tensors, "after select, rows that stand at different"),
        ("select", only_positions, "after select, "),
        ("set_rows", lambda self, rows, other: None, "after set_rows, rows that stand"),
        ("set_rows", one_row_late, "after set_rows, rows that stand"),
        ("crop", lambda self, n: None, "after crop, "),
        ("crop", widest_row, "after crop, rows that stand at different"),
        ("crop", every_slot, "positions|shape|crop"),
    ],
)
def test_check_cache_finds_broken_methods(operation, wrong, says, monkeypatch):
    owner = LayerCacheBase if operation != "crop" else DynamicLayerCache
    monkeypatch.setattr(owner, operation, wrong)
    with pytest.raises((check.CheckFailed, ValueError), match=says):
        check.cache(model_of("growing"), VOCAB)


def test_what_a_cache_cannot_do_is_not_hidden(monkeypatch):
    def refuses(self, n):
        raise ValueError("nothing is forgotten here")

    def breaks_down(self, rows):
        raise RuntimeError("sizes of tensors must match")

    monkeypatch.setattr(DynamicLayerCache, "crop", refuses)
    said = dict(check.run_all(model_of("growing"), VOCAB).notes)
    assert said["cache"] == "passed, crop, crop of rows not tested"
    monkeypatch.setattr(LayerCacheBase, "select", breaks_down)
    with pytest.raises(
        check.CheckFailed, match="select raised RuntimeError: sizes of tensors"
    ):
        check.cache(model_of("growing"), VOCAB)


def test_what_a_window_gave_back_too_little_of_is_said(monkeypatch):
    monkeypatch.setattr(Rolling, "update", trimmed)
    with pytest.raises(
        check.CheckFailed,
        match=r"(?s)of its own call.*Forget"
        r"\s+only\s+after\s+it was looked at",
    ):
        check.cache(model_of("rolling"), VOCAB, seq_len=14)


# what an engineer broke


def test_rows_that_are_set_have_positions_of_their_own():
    "Also where one cache is put twice, by rows that were changed."
    one = filled(1)
    rows = torch.tensor([0])
    a = DynamicLayerCache(2)
    b = DynamicLayerCache(3)
    a.set_rows(rows, one), b.set_rows(rows, one)
    assert a.lengths.tolist() == [4, 0] and b.lengths.tolist() == [4, 0, 0]
    rows.fill_(1)
    b.set_rows(rows, one)
    assert b.lengths.tolist() == [4, 4, 0]
    for _ in range(3):
        rows.fill_(0)
        b.select(torch.tensor([1, 2, 0])), b.crop(rows.expand(3) + 3)
    assert b.lengths.tolist() == [3, 3, 0]


@pytest.mark.parametrize("operation", ["select", "crop", "set_rows"])
def test_layers_share_positions_after_every_operation(operation):
    model = model_of("growing")
    ids, positions = left_padded(texts(6, 3))
    cache = model.new_cache(2)
    guest = model.new_cache(1)
    model(ids, positions=positions, cache=cache), model(ids[:1], cache=guest)
    {
        "select": lambda: cache.select(torch.tensor([1, 0])),
        "crop": lambda: cache.crop(torch.tensor([4, 2])),
        "set_rows": lambda: cache.set_rows(torch.tensor([1]), guest),
    }[operation]()
    first, *others = [layer.key_positions for layer in cache.layers]
    assert others and all(key_positions is first for key_positions in others)
    mixed = model_of("mixed")
    cache = mixed.new_cache(2)
    mixed(ids, positions=positions, cache=cache)
    cache.select(torch.tensor([1, 0]))
    assert cache.layers[0].key_positions is not cache.layers[1].key_positions


class Bare(nn.Module):
    "An attention without ``new_cache``."

    def __init__(self):
        super().__init__()
        self.inside = [own_attention()]  # not a module of this one
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x, *, positions=None, mask=None, cache=None):
        return self.weight * self.inside[0](
            x, positions=positions, mask=mask, cache=cache
        )


def test_an_attention_without_a_cache_of_its_own_gets_one():
    model = model_of(lambda layer: Bare())
    ids = draw_ids(2, 6, high=VOCAB)
    cache = model.new_cache(2)
    assert all(type(layer) is DynamicLayerCache for layer in cache.layers)
    with torch.no_grad():
        parts = [model(x, cache=cache) for x in ids.split((3, 2, 1), 1)]
        close(torch.cat(parts, 1), model(ids))


def test_a_buffer_of_positions_may_be_used_again():
    layer = own_attention(score_bias=ALiBi(4))  # it reads all positions
    x = torch.randn(1, 4, 16)
    cache = layer.new_cache(1)
    buffer = torch.zeros(1, 1).long()
    parts = []
    for i in range(4):
        buffer.fill_(i)
        parts.append(layer(x[:, i : i + 1], positions=buffer, cache=cache))
    close(torch.cat(parts, 1), layer(x))


def test_an_encoder_output_that_was_changed_in_place_is_another():
    layer = spread(CrossAttention(16, 4))
    x = torch.randn(2, 3, 16)
    memory = torch.randn(2, 5, 16)
    cache = layer.new_cache(2)
    for _ in range(2):
        close(
            layer(x, encoder_hidden_states=memory, cache=cache),
            layer(x, encoder_hidden_states=memory),
        )
        memory.mul_(-2.0)
    with torch.inference_mode():  # there PyTorch does not count
        close(
            layer(x, encoder_hidden_states=memory, cache=layer.new_cache(2)),
            layer(x, encoder_hidden_states=memory),
        )


def test_padding_below_minus_one_and_nothing_at_all():
    layer = own_attention()
    cache = layer.new_cache(2)
    layer(
        torch.randn(2, 2, 16),
        cache=cache,
        positions=torch.tensor([[0, 1], [-100, -100]]),
    )
    assert cache.key_positions.next(1).tensor.tolist() == [[2], [0]]
    cache = layer.new_cache(1)
    layer(torch.randn(1, 4, 16), positions=Positions(start=5, length=4), cache=cache)
    cache.crop(0)
    assert cache.key_positions.next(2).tensor.tolist() == [[0, 1]]


def test_an_empty_batch_may_go_on():
    layer = own_attention()
    cache = layer.new_cache(2)
    layer(torch.randn(2, 2, 16), cache=cache)
    cache.select(torch.tensor([], dtype=torch.int64))
    assert layer(torch.zeros(0, 1, 16), cache=cache).shape == (0, 1, 16)


def test_rows_may_be_narrow_integers():
    cache = filled(3)
    cache.set_rows(torch.tensor([1], dtype=torch.int32), filled(1, n=6))
    assert cache.lengths.tolist() == [4, 6, 4]
    with pytest.raises(ValueError, match=r"n must be a whole number .*-1"):
        cache.crop(torch.tensor([1, -1, 2]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_large_bias_is_rounded_where_it_is_small(dtype):
    "Only differences count, so the largest is taken off before."
    q, k, v = (torch.randn(1, 2, 3, 8, dtype=dtype) for _ in range(3))
    near = torch.randn(2, 3, 3)
    far = 600.0
    mask = torch.ones(1, 1, 3, 3).bool().tril()
    for how in ({}, dict(mask=mask)):
        a = fused_attend(q, k, v, bias=near + far, **how)
        b = fused_attend(q, k, v, bias=near, **how)
        close(a, b, 2e-2)
    low = torch.full((3, 3), -1e5)
    assert (fused_attend(q, k, v, bias=low) != 0).any()


def test_the_limit_holds_where_nobody_looks(elsewhere):
    "After every operation, and for positions that a caller gave."
    model = model_of("growing")
    ids, positions = left_padded(texts(MAX_LEN, 3))
    for operation in (
        lambda c: c.select(torch.tensor([1, 0])),
        lambda c: c.crop(torch.tensor([MAX_LEN, 3])),
        lambda c: None,
    ):
        cache = model.new_cache(2)
        model(ids, positions=positions, cache=cache)
        operation(cache)
        with pytest.raises(ValueError, match=f"{MAX_LEN + 1} tokens, beyond"):
            model(ids[:, -1:], cache=cache)
    cache = model.new_cache(2)
    guest = model.new_cache(1)
    model(ids[:1], cache=guest)
    cache.set_rows(torch.tensor([1]), guest)
    with pytest.raises(ValueError, match=f"{MAX_LEN + 1} tokens, beyond"):
        model(ids[:, -1:], cache=cache)
    with pytest.raises(ValueError, match="58 tokens, beyond"):
        model(ids[:, :1], positions=torch.tensor([[57]]))
    cache = model.new_cache(2)
    guest = model.new_cache(1)
    model(ids[:1, :3], cache=guest)
    for i in range(2 * MAX_LEN):  # a busy server: the end is known
        if i % 5 == 0:
            cache.set_rows(torch.tensor([i // 5 % 2]), guest)
        with Reads():
            model(ids[:, :1], cache=cache)
    with torch.no_grad(), Reads():  # a bound that was told is believed
        model(ids[:, :1], positions=Positions(torch.tensor([[7]]), upper_bound=9))


@plain_only  # what executes a signature would be interrupted, too
def test_what_was_interrupted_is_not_taken_back_later():
    "When its traceback goes, the cache may hold another text."
    files = {contextlib.__file__, kv_cache.__file__, __file__}

    def is_inside(frame, event):
        return frame.f_code.co_filename in files

    n = 0
    interrupt = True
    while interrupt:
        n += 1
        layer = filled(1)
        cache = KVCache([layer])
        interrupt = None
        try:
            with interrupted_at(n, is_inside), cache.atomic():
                pass
        except KeyboardInterrupt as error:
            interrupt = error
        layer.update(*torch.randn(2, 1, 2, 1, 4), positions=torch.tensor([[4]]))
        held = [x.clone() for x in layer.tensors]
        if interrupt:
            interrupt = True  # and the traceback goes
        gc.collect()
        assert layer.lengths.tolist() == [5], n
        assert all(map(torch.equal, layer.tensors, held)), n
    assert n > 3


# --- exact borders, and what is used twice


def rows_of(b, t=1):
    "Keys and values of t tokens of b rows, and their positions."
    return torch.ones(b, 2, t, 4), torch.ones(b, 2, t, 4), torch.arange(t)[None]


@pytest.mark.parametrize("told, given", [(1, 3), (3, 1), (2, 3), (3, 2)])
def test_a_cache_takes_as_many_rows_as_it_was_made_for(told, given):
    k, v, positions = rows_of(given)
    cache = DynamicLayerCache(told)
    with pytest.raises(ValueError, match=f"a batch of {given} meets a cache of {told}"):
        cache.update(k, v, positions=positions)
    assert cache.is_empty
    k, v, positions = rows_of(told)
    cache.update(k, v, positions=positions)
    assert cache.lengths.tolist() == [1] * told


def test_another_memory_may_have_other_rows():
    "It is given to a cache that has kept one before, and rows are selected of it."
    cache = CrossAttentionCache()
    for b in (2, 3, 1, 4):
        memory = torch.arange(float(b))[:, None, None].expand(b, 5, 4).clone()
        cache.get_or_compute(memory, None, lambda x: (x[:, None],))
        assert cache.batch_size == b
        cache.select(torch.tensor([b - 1, 0]))
        assert cache.tensors[0][:, 0, 0, 0].tolist() == [b - 1, 0]
        assert cache.batch_size == 2


def test_an_empty_cache_is_selected_from_twice():
    cache = DynamicLayerCache(2)
    cache.select(torch.tensor([0, 0, 1]))
    cache.select(torch.tensor([2, 2, 1, 0]))
    k, v, positions = rows_of(4)
    cache.update(k, v, positions=positions)
    assert len(cache.tensors[0]) == 4


@pytest.mark.parametrize(
    "lengths", [((5, 1), (1, 5)), ((5, 1), (3, 7)), ((4, 0), (4, 8))]
)
def test_a_fixed_cache_counts_the_tokens_of_each_row(lengths):
    "Rows of different lengths fit as long as the longest row does, to the last slot."
    cache = StaticLayerCache(2, 8)
    ends = torch.zeros(2, 1, dtype=torch.int64)
    for part in lengths:
        new = torch.tensor(part)[:, None]
        t = max(part)
        at = torch.arange(t) - (t - new)  # padded on the left
        k, v, _ = rows_of(2, t)
        cache.update(k, v, positions=torch.where(at < 0, -1, at + ends))
        ends += new
    assert cache.lengths.tolist() == ends[:, 0].tolist()
    k, v, _ = rows_of(2, 9 - cache.length)
    at = torch.arange(9 - cache.length) + ends
    with pytest.raises(ValueError, match="9 tokens, but the cache has 8 slots"):
        cache.update(k, v, positions=at)
