"""Caches of fixed shape: their logits and methods are those of the growing ones."""

import copy

import pytest
import torch

from helpers import close, plain_only
from models import (
    MAX_LEN,
    RAGGED,
    ROWS,
    VOCAB,
    causal,
    in_pieces,
    num_read,
    pieces,
)
from tformer import check
from tformer.inference.compiled import compile_decode_step
from tformer.nn.kv_cache import CrossAttentionCache, DynamicLayerCache
from tformer.nn.static_cache import StaticLayerCache, new_static_cache

GPT_ROW = next(row for row in ROWS if row.name == "GPT")


@in_pieces
@torch.no_grad()
def test_logits_of_every_decoder(row, sizes, positions):
    "Those of the growing cache, and of none."
    model = row.make()
    ids = row.ids(3, 12)
    found, grown = (
        pieces(row, model, ids, cache, sizes, positions)
        for cache in (new_static_cache(model, 3, 12), model.new_cache(3))
    )
    whole = row.run(
        model, ids, **({} if positions is None else dict(positions=positions))
    )
    token = torch.ones(3, 12).bool() if positions is None else positions >= 0
    close(found[token], grown[token])
    close(found[token], whole[token])


@causal
@torch.no_grad()
def test_methods_of_every_decoder(row):
    "Side by side with a growing cache: select, crop, put, and on."
    model = row.make()
    ids = row.ids(3, 12)
    pair = (new_static_cache(model, 3), model.new_cache(3))
    guest = []
    for rows in (2, 2):
        guest.append(model.new_cache(rows))
    row.run(model, row.ids(2, 7, seed=4), cache=guest[0])
    guest[1] = new_static_cache(model, 2, 9)
    row.run(model, row.ids(2, 7, seed=4), cache=guest[1])
    found = []
    for cache in pair:
        cache.allow_rollback(12)
        out = [
            row.run(model, ids[:, :8], positions=RAGGED[:, :8], cache=cache)[
                RAGGED[:, :8] >= 0
            ]
        ]
        for i, act in enumerate(
            (
                lambda: cache.select(torch.tensor([2, 0, 2])),
                lambda: cache.crop(torch.tensor([2, 6, 3])),
                lambda: cache.crop(5),
                lambda: cache.set_rows(torch.tensor([2, 0]), guest[0]),
                lambda: cache.set_rows(torch.tensor([1, 2]), guest[1]),
            )
        ):
            act()
            out.append(row.run(model, ids[:, i : i + 2], cache=cache))
        found.append(out)
    for ours, theirs in zip(*found, strict=False):
        close(ours, theirs)
    assert num_read(pair[0]).tolist() == num_read(pair[1]).tolist()


@plain_only
@pytest.mark.parametrize("name", ["GPT", "Qwen3"])
def test_check_cache_passes(name):
    row = next(row for row in ROWS if row.name == name)
    model = row.make()
    twin = row.make()
    model.new_cache = lambda batch, max_len=None: new_static_cache(twin, batch)
    report = check.cache(model, VOCAB)
    assert all(operation in str(report) for operation in ("select", "crop", "set_rows"))


def test_the_layers_say_what_they_keep():
    for row in ROWS:
        if not row.causal:
            continue
        cache = new_static_cache(row.make(), 2, 7)
        for layer in cache.layers:
            inner = layer.layers if row.source else [layer]
            assert [type(c) for c in inner] == [StaticLayerCache, CrossAttentionCache][
                : len(inner)
            ]
            assert inner[0].max_len == 7 and inner[0].batch_size == 2
    assert new_static_cache(GPT_ROW.make(), 1).layers[0].max_len == MAX_LEN


@torch.no_grad()
def test_shape_and_memory_are_there_from_the_first_token():
    for n_kv_heads, row in ((4, GPT_ROW), (2, ROWS[6]), (1, ROWS[7])):
        model = row.make()
        width = row.config.d_model // 4
        width = getattr(row.config, "d_head", None) or width
        cache = new_static_cache(model, 3, 9)
        assert cache.nbytes == 0 and cache.is_empty
        buffers = []
        for _i in range(9):
            model(row.ids(3, 1), cache=cache)
            assert cache.nbytes == 2 * 2 * 3 * 10 * n_kv_heads * width * 4
            buffers.append([x.data_ptr() for c in cache.layers for x in c.tensors])
        assert all(at == buffers[0] for at in buffers)  # written in place


def test_rows_lie_side_by_side_from_slot_0():
    cache = StaticLayerCache(2, 6)
    k = torch.arange(1.0, 11).view(2, 1, 5, 1)
    positions = torch.tensor([[-1, 0, -1, 1, 2], [4, 2, 9, -7, -1]])
    out = cache.update(k, positions=positions)
    assert out[0] is k and out[1].tensor.tolist() == positions.tolist()
    assert cache.key_positions.tensor.tolist() == [
        [0, 1, 2, -1, -1, -1, -1],
        [4, 2, 9, -1, -1, -1, -1],
    ]
    assert cache.tensors[0][:, 0, :3, 0].tolist() == [[2, 4, 5], [6, 7, 8]]
    assert cache.tensors[0][:, 0, 5:, 0].tolist() == [[0, 0], [0, 0]]
    cache.update(
        torch.tensor([[[[20.0], [21]]], [[[22.0], [23]]]]),
        positions=torch.tensor([[-1, 3], [10, 11]]),
    )
    assert cache.key_positions.tensor.tolist() == [
        [0, 1, 2, 3, -1, -1, -1],
        [4, 2, 9, 10, 11, -1, -1],
    ]
    assert cache.tensors[0][0, 0, :4, 0].tolist() == [2, 4, 5, 21]
    assert cache.tensors[0][1, 0, :5, 0].tolist() == [6, 7, 8, 22, 23]
    assert cache.lengths.tolist() == [4, 5]
    cache.crop(torch.tensor([4, 9]))  # a hole is closed
    assert cache.key_positions.tensor[:, :4].tolist() == [[0, 1, 2, 3], [4, 2, -1, -1]]
    cache.crop(torch.tensor([4, 3]))
    cache.update(
        torch.full((2, 1, 2, 1), 30.0), positions=torch.tensor([[4, 5], [3, 4]])
    )
    assert cache.tensors[0][0, 0, :6, 0].tolist() == [2, 4, 5, 21, 30, 30]
    assert cache.tensors[0][1, 0, :3, 0].tolist() == [7, 30, 30]
    cache = StaticLayerCache(1, 3)  # what was kept of other sizes
    cache.replace([torch.ones(1, 2, 9, 4)], torch.tensor([[-1] * 6 + [3, -1, 5]]))
    assert cache.key_positions.tensor.tolist() == [[3, 5, -1, -1]]


@torch.no_grad()
def test_a_full_cache_refuses_and_has_not_changed():
    model = GPT_ROW.make()
    ids = GPT_ROW.ids(3, 12)
    cache = new_static_cache(model, 3, 9)
    model(ids[:, :9], positions=RAGGED[:, :9], cache=cache)  # row 0 is full
    before = copy.deepcopy(cache)
    step = compile_decode_step(model, backend="eager")
    for follow in (model, step):
        with pytest.raises(
            ValueError,
            match=r"^10 tokens, but the cache has "
            r"9 slots for a text$",
        ):
            follow(ids[:, 9:10], cache=cache)
    with pytest.raises(ValueError, match=r"11 tokens, .* 9 slots"):
        model(ids[:, 9:11], cache=cache)
    for layer, old in zip(cache.layers, before.layers, strict=True):
        assert torch.equal(layer.key_positions.tensor, old.key_positions.tensor)
        assert all(map(torch.equal, layer.tensors, old.tensors))
    cache.select(torch.tensor([1, 2]))  # the short rows go on
    close(
        model(ids[1:, 9:12], cache=cache), model(ids[1:], positions=RAGGED[1:])[:, 9:]
    )
    with pytest.raises(ValueError, match="12 tokens, but the cache has 9"):
        new_static_cache(model, 3, 9).set_rows(torch.tensor([0]), _filled(model, 12))
    with pytest.raises(ValueError, match="12 tokens, but the cache has 9"):
        model(ids, cache=new_static_cache(model, 3, 9))


def _filled(model, n):
    cache = model.new_cache(1)
    model(GPT_ROW.ids(1, n), cache=cache)
    return cache


@torch.no_grad()
def test_rows_that_are_refused_change_nothing():
    model = GPT_ROW.make()
    cache = new_static_cache(model, 2, 9)
    model(GPT_ROW.ids(2, 4), cache=cache)
    with pytest.raises(ValueError, match="12 tokens"):
        cache.set_rows(torch.tensor([1]), _filled(model, 12))
    assert cache.lengths.tolist() == [4, 4]
    cache.set_rows(torch.tensor([1]), _filled(model, 8))
    assert cache.lengths.tolist() == [4, 8]
    back = model.new_cache(2)  # and into a growing one
    back.set_rows(torch.tensor([1, 0]), cache)
    more = GPT_ROW.ids(2, 1, seed=8)
    close(model(more.flip(0), cache=back).flip(0), model(more, cache=cache))


@pytest.mark.parametrize(
    "made, says",
    [
        (lambda m: StaticLayerCache(0, 4), "batch_size must be a whole number"),
        (lambda m: StaticLayerCache(1, 2.5), "max_len must be a whole number .*2.5"),
        (lambda m: new_static_cache(m, 1, 0), "max_len must be a whole number"),
        (lambda m: new_static_cache(m, 1, 21), "21 slots, beyond max_len 20"),
        (lambda m: new_static_cache(m, True), "batch_size must be a whole number"),
    ],
)
def test_what_is_no_size(made, says):
    with pytest.raises(ValueError, match=says):
        made(GPT_ROW.make())


@pytest.mark.parametrize(
    "shape, kind, positions, says",
    [
        ((3, 4, 1, 4), torch.float32, [[4]], "batch of 3 meets a cache of 2"),
        ((2, 4, 2, 4), torch.float32, [[4]], "2 tokens have 1 positions"),
        ((2, 3, 1, 4), torch.float32, [[4]], r"3.* meets .*4"),
        ((2, 4, 1, 5), torch.float32, [[4]], r"5, .* meets .*4"),
        ((2, 4, 1, 4), torch.float64, [[4]], "float64.* meets .*float32"),
        ((2, 4, 1, 4), torch.float32, [[4]] * 3, "positions of 3"),
    ],
)
def test_what_does_not_belong_is_named(shape, kind, positions, says):
    cache = StaticLayerCache(2, 8)
    cache.update(*[torch.randn(2, 4, 3, 4)] * 2, positions=torch.arange(3)[None])
    with pytest.raises(ValueError, match=says):
        cache.update(
            *[torch.zeros(shape, dtype=kind)] * 2, positions=torch.tensor(positions)
        )
    assert cache.lengths.tolist() == [3, 3]


def test_an_empty_cache_has_all_methods():
    cache = StaticLayerCache(3, 8)
    cache.crop(2), cache.select(torch.tensor([2, 0]))
    assert cache.batch_size == 2 and cache.is_empty and cache.lengths.tolist() == [0]
    guest = DynamicLayerCache(1)
    guest.update(torch.ones(1, 2, 4), positions=torch.arange(2)[None])
    cache.set_rows(torch.tensor([1]), guest)  # of three axes, as a latent
    assert cache.lengths.tolist() == [0, 2]
    assert cache.tensors[0].shape == (2, 9, 4)
    cache.crop(0)
    assert cache.lengths.tolist() == [0, 0]
    assert cache.key_positions.next(1).tensor.tolist() == [[0], [0]]


@plain_only
def test_gradients_and_inference_mode():
    "Written in place only where that is allowed."
    row = GPT_ROW
    model = row.make()
    ids = row.ids(2, 6)
    cache = new_static_cache(model, 2, 8)
    parts = [model(x, cache=cache) for x in ids.split((3, 1, 2), 1)]
    grads = [
        torch.autograd.grad(y.square().sum(), list(model.parameters()))
        for y in (torch.cat(parts, 1), model(ids))
    ]
    for ours, theirs in zip(*grads, strict=False):
        close(ours, theirs, 1e-4)
    with torch.no_grad():
        close(
            model(ids[:, :1], cache=cache),
            model(torch.cat([ids, ids[:, :1]], 1))[:, -1:],
        )
    with torch.inference_mode():
        cache = new_static_cache(model, 2, 8)
        model(ids[:, :3], cache=cache)
    step = compile_decode_step(model, backend="eager")
    with torch.no_grad():
        found = [model(ids[:, 3:4], cache=cache), step(ids[:, 4:5], cache=cache)]
        close(torch.cat(found, 1), model(ids)[:, 3:5])
    cache = new_static_cache(model, 2, 8)  # a prompt read with gradients
    model(ids[:, :3], cache=cache)
    close(step(ids[:, 3:4], cache=cache), model(ids)[:, 3:4].detach())
