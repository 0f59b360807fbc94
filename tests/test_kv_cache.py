"""What a growing cache holds. More of it: test_caches.py, test_attention.py."""

import torch

from tformer.nn import kv_cache
from tformer.nn.kv_cache import DynamicLayerCache, GrowingRows, KVCache
from tformer.nn.positions import Positions, append_positions


def test_rows_that_grow_hold_what_they_were_given():
    kept = GrowingRows(2)
    parts = [torch.randn(2, n, 3) for n in (4, 1, 5)]
    start = 0
    for part in parts:
        positions = Positions(start=start, length=part.shape[1])
        got = kept._append((part,), positions)
        kept.replace(got, append_positions(kept.key_positions, positions))
        start += part.shape[1]
    assert torch.equal(kept.tensors[0], torch.cat(parts, -2))
    assert kept.key_positions.tensor.tolist() == [list(range(10))]


def filled(layers, b, n):
    "A cache of these layers that holds n tokens of b texts, drawn at random."
    cache = KVCache(layers)
    for leaf in cache._leaves():
        k, v = torch.randn(2, b, 2, n, 4)
        leaf.update(k, v, positions=Positions(start=0, length=n))
    return cache


def values(cache):
    "Copies of all that a cache keeps, layer by layer."
    return [[x.clone() for x in leaf.tensors] for leaf in cache._leaves()]


def test_a_view_holds_these_rows_and_leaves_the_cache_as_it_was():
    make = DynamicLayerCache
    cache = filled([make(), KVCache([make(), make()])], b=3, n=5)
    before = values(cache)
    view = cache.view(torch.tensor([2, 0]))
    for ours, all_rows in zip(values(view), before, strict=True):
        for x, rows in zip(ours, all_rows, strict=True):
            assert torch.equal(x, rows[[2, 0]])
    view.crop(3)
    assert view.lengths.tolist() == [3, 3] and cache.lengths.tolist() == [5, 5, 5]
    for now, old in zip(values(cache), before, strict=True):
        assert all(map(torch.equal, now, old))
    cache.set_rows(torch.tensor([2, 0]), view)
    assert cache.lengths.tolist() == [3, 5, 3]


def test_every_public_name_has_words():
    for name in kv_cache.__all__:
        assert getattr(kv_cache, name).__doc__, name
