"""Caches in blocks: as the growing ones, and every block is somebody's."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tformer.nn.paged_cache
from helpers import close, interrupted_at, plain_only, randn, spread
from models import MAX_LEN, RAGGED, ROWS, VOCAB, WRITERS, in_pieces, pieces, rows
from tformer.inference.generation import generate
from tformer.nn.attention import SelfAttention
from tformer.nn.kv_cache import DynamicLayerCache, KVCache
from tformer.nn.norms import RMSNorm
from tformer.nn.paged_cache import (
    BlockPool,
    BlockTables,
    OutOfBlocks,
    PagedKVCache,
    PagedLayerCache,
    hash_blocks,
    new_paged_cache,
)
from tformer.nn.positions import next_positions
from tformer.nn.relative_bias import ALiBi, T5RelativeBias
from tformer.nn.rotary import RotaryEmbedding

torch.set_num_threads(1)
GPT_ROW = next(row for row in ROWS if row.name == "GPT")


def consistent(pool, *tables):
    "Counts are those of the tables; each block is used, cached or free."
    stand = [block for table in tables for row in table.tables for block in row]
    assert pool.ref_counts == [stand.count(i) for i in range(pool.num_blocks)]
    for table in tables:
        for row in table.tables:
            assert len({*row}) == len(row)
    assert pool.num_free_blocks + pool.num_used_blocks + len(pool.evictable) == (
        pool.num_blocks
    )
    assert not {*pool.evictable} & {*pool.free_block_ids, *stand}
    assert {*pool.evictable} <= {*pool.block_to_hash}
    assert pool.hash_to_block == {key: b for b, key in pool.block_to_hash.items()}


@in_pieces
@torch.no_grad()
def test_logits_of_every_decoder(row, sizes, positions):
    model = row.make()
    ids = row.ids(3, 12)
    pool = BlockPool(9, 4)
    cache = new_paged_cache(model, pool, 3)
    found = pieces(row, model, ids, cache, sizes, positions)
    whole = row.run(
        model, ids, **({} if positions is None else dict(positions=positions))
    )
    token = torch.ones(3, 12).bool() if positions is None else positions >= 0
    close(found[token], whole[token])
    assert cache.seq_lens == token.sum(1).tolist() == cache.lengths.tolist()
    consistent(pool, cache.tables)


def attentions():
    d = dict(d_model=16, n_heads=4, causal=True)
    yield "plain", SelfAttention(**d)
    yield "rotary", SelfAttention(**d, rotary=RotaryEmbedding(4))
    yield "ALiBi", SelfAttention(**d, score_bias=ALiBi(4))
    yield (
        "T5",
        SelfAttention(
            **d, score_bias=T5RelativeBias(4, n_buckets=8, max_distance=10, causal=True)
        ),
    )
    yield "normed", SelfAttention(**d, q_norm=RMSNorm(4), k_norm=RMSNorm(4))
    yield "grouped", SelfAttention(**d, n_kv_heads=2, d_head=6, d_v=3)
    yield "packed", SelfAttention(**d, fused_qkv=True)


@pytest.mark.parametrize(
    "attention", [pytest.param(a, id=name) for name, a in attentions()]
)
@torch.no_grad()
def test_every_attention_of_the_course(attention):
    x = randn(3, 12, 16)
    attention = spread(attention, 0.5)
    whole = attention(x, positions=RAGGED)
    pool = BlockPool(13, 3)
    tables = BlockTables(pool, [[], [], []])
    cache = PagedKVCache([PagedLayerCache(tables, 0, [0, 0, 0])], tables)
    parts = [
        attention(x[:, part], positions=RAGGED[:, part], cache=cache.layers[0])
        for part in (slice(5), slice(5, 6), slice(6, 10), slice(10, 12))
    ]
    close(torch.cat(parts, 1)[RAGGED >= 0], whole[RAGGED >= 0])


@rows("causal", usual=WRITERS)
@torch.no_grad()
def test_methods_of_every_decoder(row):
    "Side by side with a growing cache: select, crop, put, and on."
    model = row.make()
    ids = row.ids(3, 12)
    pool = BlockPool(40, 2)
    pair = new_paged_cache(model, pool, 3), model.new_cache(3)
    guests = new_paged_cache(model, pool, 2), model.new_cache(2)
    found = []
    for cache, guest in zip(pair, guests, strict=True):
        cache.allow_rollback(12)
        row.run(model, row.ids(2, 7, seed=4), cache=guest)
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
                lambda: cache.set_rows(torch.tensor([2, 0]), guest),
                lambda: cache.select(torch.tensor([0, 0, 1])),
            )
        ):
            act()
            out.append(row.run(model, ids[:, i : i + 2], cache=cache))
        found.append(out)
    for ours, theirs in zip(*found, strict=False):
        close(ours, theirs)
    assert next_positions(pair[0], 1).tolist() == next_positions(pair[1], 1).tolist()
    consistent(pool, pair[0].tables, guests[0].tables)


@rows("causal", usual=WRITERS)
def test_generate_writes_the_same(row):
    model = row.make().double().requires_grad_(False)
    more = {}
    if row.source:
        with torch.no_grad():
            more = dict(encoder_hidden_states=model.encode(row.ids(3, 7)))
    prompts = [[3, 4, 5, 6, 7], [8], [9, 10, 11]]
    stop = [*range(0, VOCAB, 6)]
    pool = BlockPool(21, 3)
    cache = new_paged_cache(model, pool, 3)
    how = dict(max_new_tokens=14, stop_token_ids=stop, **more)
    for ours, theirs in zip(
        generate(model, prompts, cache=cache, **how),
        generate(model, prompts, **how),
        strict=True,
    ):
        assert (ours.ids, ours.finish_reason) == (theirs.ids, theirs.finish_reason)
        assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-9)
    consistent(pool, cache.tables)


def grown(n=7, batch=1, blocks=8, size=3):
    "A cache that holds a text in each row, and what it was given."
    model = GPT_ROW.make().double()
    pool = BlockPool(blocks, size)
    cache = new_paged_cache(model, pool, batch)
    ids = GPT_ROW.ids(batch, n)
    with torch.no_grad():
        model(ids, cache=cache)
    return model, pool, cache, ids


@torch.no_grad()
def test_a_copy_is_made_when_a_shared_block_is_written():
    model, pool, cache, ids = grown()
    cache.select(torch.tensor([0, 0]))
    assert pool.num_used_blocks == 3 and sorted(pool.ref_counts)[-3:] == [2, 2, 2]
    new = torch.tensor([[5], [9]])
    found = model(new, cache=cache)
    expected = model(torch.cat([ids.expand(2, -1), new], 1))[:, -1:]
    close(found, expected, 1e-12)
    first, second = cache.tables.tables
    assert first[:2] == second[:2] and first[2] != second[2]
    assert pool.num_used_blocks == 4
    consistent(pool, cache.tables)


@torch.no_grad()
def test_a_text_that_is_cached_whole_is_asked_for_its_last_token():
    model, pool, cache, ids = grown(6, 2)
    cache.cache_full_blocks(0, ids[0].tolist())
    assert len(pool.hash_to_block) == 2
    cache.crop(torch.tensor([MAX_LEN, 0]))
    assert cache.match_prefix(1, ids[0].tolist()) == 5
    cache.reserve(1, 1)  # a copy: the other row reads it still
    assert pool.ref_counts[cache.tables.tables[1][0]] == 2
    assert cache.tables.tables[0][1] != cache.tables.tables[1][1]
    part = cache.view(torch.tensor([1]))
    found = model(ids[:1, 5:], cache=part)
    cache.set_rows(torch.tensor([1]), part)
    close(found[0], model(ids[:1])[0, 5:], 1e-12)
    assert cache.seq_lens == [6, 6]
    consistent(pool, cache.tables)


@torch.no_grad()
def test_only_what_is_filled_is_indexed():
    model, pool, cache, ids = grown(4)
    text = [*ids[0].tolist(), 1, 2, 3, 4, 5]
    cache.reserve(0, 5)
    cache.cache_full_blocks(0, text)
    assert [*pool.hash_to_block] == [*hash_blocks(text, 3)][:1]
    model(torch.tensor([[1, 2]]), cache=cache)
    cache.cache_full_blocks(0, text)
    assert [*pool.hash_to_block] == [*hash_blocks(text, 3)][:2]
    assert cache.tables.tables[0][:2] == [*pool.hash_to_block.values()]


def test_a_key_is_of_the_block_and_all_before_it():
    a, b = ([*hash_blocks(ids, 2)] for ids in ([1, 2, 3, 4, 5], [9, 2, 3, 4, 5]))
    assert len(a) == len(b) == 2 and not {*a} & {*b}
    assert [*hash_blocks([1, 2, 3], 2)] == a[:1]
    assert [*hash_blocks([1], 2)] == []


@plain_only
@pytest.mark.parametrize(
    "args, says",
    [
        (([1, 2], 0), "block_size must be a whole number of at least 1, got 0"),
        (([1, 2], -1), "block_size must be a whole number of at least 1, got -1"),
        (([1, 2], 1.5), "block_size must be a whole number .* got 1.5"),
        (([1, 2], True), "block_size must be a whole number .* got True"),
        (([1, 2], "a"), "block_size must be a whole number .* got 'a'"),
        (([1, 2], 1, "key"), "key must be bytes, got str 'key'"),
        (([1, 2], 1, None), "key must be bytes, got NoneType"),
        (("ab", 1), "ids must be one flat row of whole numbers, got 'ab'"),
        ((b"eight bytes for", 1), "ids must be one flat row .* got b'eight"),
        ((bytearray(16), 1), "ids must be one flat row .* got bytearray"),
        (([1.5], 1), r"ids must be one flat row .* got \[1.5\]"),
        (([[1, 2]], 1), r"ids must be one flat row .* got \[\[1, 2\]\]"),
        (([2**63], 1), r"ids must be one flat row .* got \[9223372036854775808\]"),
        ((torch.tensor([[1], [2]]), 1), "ids must be one flat row .* got tensor"),
        ((torch.tensor([1.0]), 1), "ids must be one flat row .* got tensor"),
        ((None, 1), "ids must be one flat row .* got None"),
        ((5, 1), "ids must be one flat row .* got 5"),
    ],
)
def test_what_cannot_be_hashed_is_refused_where_it_is_called(args, says):
    with pytest.raises(ValueError, match=says):
        hash_blocks(*args)


@plain_only
def test_keys_are_of_the_ids_in_whatever_they_come():
    right = [*hash_blocks([1, 2, 3], 2)]
    for ids in ((1, 2, 3), range(1, 4), torch.tensor([1, 2, 3]), np.arange(1, 4)):
        assert [*hash_blocks(ids, 2)] == right
    assert [*hash_blocks(np.arange(1, 4, dtype=np.int32), 2)] == right


@torch.no_grad()
def test_what_is_written_anew_is_found_no_more():
    model, pool, cache, ids = grown(6)
    cache.cache_full_blocks(0, ids[0].tolist())
    cache.crop(4)
    assert len(pool.hash_to_block) == 2  # half of the second still stands
    model(torch.tensor([[40]]), cache=cache)
    assert len(pool.hash_to_block) == 1
    cache.crop(0)
    assert (pool.num_free_blocks, len(pool.evictable)) == (7, 1)
    assert cache.match_prefix(0, ids[0].tolist()) == 3


@pytest.fixture
def hashed(monkeypatch):
    "How many bytes each call of the hash function was given."
    sizes = []
    sha256 = tformer.nn.paged_cache.sha256

    def counted(data):
        sizes.append(len(data))
        return sha256(data)

    monkeypatch.setattr(tformer.nn.paged_cache, "sha256", counted)
    return sizes


def test_a_chain_of_keys_goes_on_from_any_of_them():
    ids = [*range(12)]
    keys = [*hash_blocks(ids, 3)]
    for i in range(1, 4):
        assert [*hash_blocks(ids[3 * i :], 3, keys[i - 1])] == keys[i:]


@torch.no_grad()
def test_each_full_block_is_hashed_once(hashed):
    "Token by token, so that the bytes hashed grow as the text does."
    n = 16
    model, pool, cache, _ = grown(1, size=2, blocks=10)
    text = GPT_ROW.ids(1, n)[0].tolist()
    cache.crop(0)
    for i, id in enumerate(text):
        model(torch.tensor([[id]]), cache=cache)
        cache.cache_full_blocks(0, text)
        assert len(hashed) == (i + 1) // 2
    # two ids of 8 bytes each, behind the key of 32 bytes
    assert hashed == [2 * 8] + [32 + 2 * 8] * (n // 2 - 1)
    assert [*pool.hash_to_block] == [*hash_blocks(text, 2)]


@torch.no_grad()
def test_a_row_that_goes_on_otherwise_has_other_keys():
    "After a crop into a block, and after one between two blocks."
    for n in (3, 4, 5, 7):
        model, pool, cache, ids = grown(8, size=2, blocks=10)
        text = ids[0].tolist()
        cache.cache_full_blocks(0, text)
        cache.crop(n)
        other = [(id + 1) % VOCAB for id in text[n:]]
        model(torch.tensor([other]), cache=cache)
        cache.cache_full_blocks(0, text[:n] + other)
        keys = [*hash_blocks(text[:n] + other, 2)]
        table = cache.tables.tables[0]
        assert [pool.hash_to_block[key] for key in keys] == table
        # what only the old text had is found where nobody wrote over it
        for key in [*hash_blocks(text, 2)][n // 2 :]:
            assert pool.hash_to_block.get(key) not in table


@torch.no_grad()
def test_a_twin_is_indexed_when_the_block_that_was_found_has_gone(hashed):
    "Two rows read the same; one leaves, and its blocks are taken by others."
    model, pool, cache, ids = grown(4, 2, size=2, blocks=7)
    ids[1] = ids[0]
    cache.crop(0)
    text = ids[0].tolist()
    model(ids, cache=cache)
    for row in (0, 1):
        cache.cache_full_blocks(row, text)
    assert [*pool.hash_to_block.values()] == cache.tables.tables[0]
    cache.crop(torch.tensor([0, MAX_LEN]))
    cache.reserve(0, 2 * pool.num_free_blocks + 4)  # the cached ones as well
    assert not pool.hash_to_block and len(hashed) == 4
    cache.cache_full_blocks(1, text)
    assert [*pool.hash_to_block.values()] == cache.tables.tables[1]
    assert len(hashed) == 4


def test_a_block_that_is_handed_out_has_no_key():
    pool = BlockPool(2, 2)
    first = pool.allocate()
    second = pool.allocate()
    for block in (first, second):
        pool.cache_block(b"same", block)
    assert pool.block_keys == [b"same"] * 2
    pool.release(second)  # it is free, because the first is found by the key
    assert pool.allocate() == second and pool.block_keys[second] is None
    pool.evict(first)
    assert pool.block_keys[first] is None


@torch.no_grad()
def test_a_reset_forgets_every_key():
    _, pool, cache, ids = grown(6)
    cache.cache_full_blocks(0, ids[0].tolist())
    pool.reset_prefix_cache()
    assert pool.block_keys == [None] * pool.num_blocks
    cache.cache_full_blocks(0, ids[0].tolist())
    assert not pool.hash_to_block


def append(cache, texts):
    "Ids behind the rows: the key and the value of an id are that number."
    n = max(map(len, texts))
    positions = torch.full((len(texts), n), -1)
    x = torch.zeros(len(texts), 1, n, 1)
    for i, (text, start) in enumerate(zip(texts, cache.seq_lens, strict=True)):
        positions[i, : len(text)] = start + torch.arange(len(text))
        x[i, 0, : len(text), 0] = torch.tensor(text)
    cache.layers[0].update(x, x, positions=positions)


def keys_are_right(cache, texts, told):
    """Each known key is the one computed from the beginning, and leads to its ids.

    ``told``: the ids of the last block of each key that there has ever been.
    """
    pool = cache.pool
    size = pool.block_size
    assert cache.seq_lens == [*map(len, texts)]
    for text, table in zip(texts, cache.tables.tables, strict=True):
        keys = [*hash_blocks(text, size)]
        for i, key in enumerate(keys):
            told[key] = text[i * size : (i + 1) * size]
        for key, block in zip(keys, table, strict=False):
            assert pool.block_keys[block] in (None, key)
    for key, block in pool.hash_to_block.items():
        slots = pool.buffers[0][0][block * size : (block + 1) * size]
        assert slots.flatten().tolist() == told[key]
        assert pool.block_keys[block] == key
    consistent(pool, cache.tables)


ACTS = ["append", "append", "index", "crop", "crop each", "select", "set_rows"]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*ACTS, "view", "layer crop", "begin", "reset"]),
            st.tuples(*[st.integers(0, 2)] * 3),
            st.integers(0, 7),
        ),
        max_size=40,
    )
)
def test_keys_are_those_that_are_computed_anew(acts):
    pool = BlockPool(30, 2)
    tables = BlockTables(pool, [[], [], []])
    cache = PagedKVCache([PagedLayerCache(tables, 0, [0, 0, 0])], tables)
    texts = [[], [], []]
    told = {}
    append(cache, [[1], [1], [1]])
    cache.crop(0)
    for act, some, n in acts:
        rows = torch.tensor(some)
        if act == "append":
            new = [[1 + (n + i) % 2] * i for i in some]
            if sum(map(len, new)) and max(map(len, texts)) < 12:
                append(cache, new)
                texts = [a + b for a, b in zip(texts, new, strict=True)]
        elif act == "index":
            for row in {*some}:
                cache.cache_full_blocks(row, texts[row] + [9, 9])
                # of what was read before a reset nothing is indexed
                found = [
                    key in pool.hash_to_block for key in hash_blocks(texts[row], 2)
                ]
                assert all(found) or pool.generation
        elif act in ("crop", "layer crop"):
            (cache if act == "crop" else cache.layers[0]).crop(n)
            texts = [text[:n] for text in texts]
        elif act == "crop each":
            cache.crop(rows + n)
            texts = [text[: i + n] for text, i in zip(texts, some, strict=True)]
        elif act == "select":
            cache.select(rows)
            texts = [[*texts[i]] for i in some]
        elif act == "set_rows":
            cache.set_rows(rows[:1], cache.view(rows[1:2]))
            texts[some[0]] = [*texts[some[1]]]
        elif act == "view" and len(texts[some[0]]) < 12:
            view = cache.view(rows[:1])
            append(view, [[3, n]])
            cache.set_rows(rows[:1], view)
            texts[some[0]] = [*texts[some[0]], 3, n]
        elif act == "begin" and texts[some[1]]:
            cache.crop(torch.tensor([0 if i == some[0] else 99 for i in range(3)]))
            text = [*texts[some[1]], 1]
            read = cache.match_prefix(some[0], text)
            texts[some[0]] = text[:read]
        elif act == "reset":
            pool.reset_prefix_cache()
        keys_are_right(cache, texts, told)


def test_the_block_longest_out_of_use_is_taken():
    pool = BlockPool(3, 2)
    blocks = [pool.allocate() for _ in range(3)]
    for i, block in enumerate(blocks):
        pool.cache_block(bytes([i]), block)
    for i in (1, 0, 2):
        pool.release(blocks[i])
    assert len(pool.evictable) == 3 and pool.num_free_blocks == 0
    pool.acquire(blocks[1])  # used again: now it is the youngest
    pool.release(blocks[1])
    assert [pool.allocate() for _ in range(3)] == [blocks[i] for i in (0, 2, 1)]
    assert not pool.hash_to_block and not pool.block_to_hash
    with pytest.raises(OutOfBlocks, match="all 3 blocks are in use"):
        pool.allocate()


@torch.no_grad()
def test_a_block_is_empty_when_it_is_handed_out():
    "Masked is not enough: 0 times NaN is NaN."
    model, pool, cache, ids = grown(8, blocks=3)
    cache.crop(0)
    for held in pool.buffers.values():
        for x in held:
            x[:9] = torch.nan  # what a text that failed leaves
    found = model(ids[:, :1], cache=cache), model(ids[:, 1:2], cache=cache)
    close(torch.cat(found, 1), model(ids[:, :2]), 1e-12)


@torch.no_grad()
def test_a_short_table_is_filled_up_with_a_block_of_nobody():
    model, pool, cache, ids = grown(8, 2)
    cache.crop(torch.tensor([8, 1]))
    expected = model(torch.cat([ids[1:, :1], ids[1:, 1:2]], 1))[0, -1:]
    own = {*cache.tables.tables[1]}
    for held in pool.buffers.values():
        for x in held:
            for block in {*range(pool.num_blocks)} - own:
                x[3 * block : 3 * block + 3] = torch.nan
    found = model(ids[:, 1:2], cache=cache, positions=torch.tensor([[8], [1]]))
    close(found[1], expected, 1e-12)


@plain_only
@torch.no_grad()
def test_bytes_are_those_of_the_blocks():
    model, pool, cache, _ids = grown(7, 2)
    c = model.config
    block = 2 * c.n_layers * c.d_model * 8 * pool.block_size
    assert cache.nbytes == 6 * block
    cache.select(torch.tensor([0, 0]))
    assert cache.nbytes == 3 * block
    assert new_paged_cache(model, BlockPool(3), 2).nbytes == 0


@torch.no_grad()
def test_a_model_that_refuses_leaves_all_as_it_was():
    model, pool, cache, ids = grown(5, 2)
    held = copy.deepcopy(pool.buffers)
    lengths = cache.seq_lens
    block = model.blocks[1]
    model.blocks[1] = torch.nn.Linear(1, 1)
    with pytest.raises(TypeError):
        model(ids[:, :1], cache=cache)
    model.blocks[1] = block
    assert cache.seq_lens == lengths and cache.lengths.tolist() == [5, 5]
    close(
        model(ids[:, :1], cache=cache),
        model(torch.cat([ids, ids[:, :1]], 1))[:, -1:],
        1e-12,
    )
    assert held.keys() == pool.buffers.keys()
    consistent(pool, cache.tables)


def test_inference_mode_and_gradients():
    model = GPT_ROW.make()
    cache = new_paged_cache(model, BlockPool(4, 4), 1)
    ids = GPT_ROW.ids(1, 6)
    with torch.inference_mode():
        model(ids[:, :3], cache=cache)
    with torch.no_grad():
        found = model(ids[:, 3:], cache=cache)
        close(found, model(ids)[:, 3:])
    with pytest.raises(ValueError, match=r"keeps no gradients.*no_grad"):
        model(ids[:, :1], cache=cache)


@plain_only
@torch.no_grad()
def test_bad_input_is_told_in_a_sentence():
    model, pool, cache, ids = grown(5, 2, blocks=4)
    growing = model.new_cache(1)
    model(ids[:1], cache=growing)
    with pytest.raises(OutOfBlocks, match="all 4 blocks are in use"):
        cache.reserve(0, 5)
    layer = cache.layers[0]
    x = torch.zeros(2, 4, 1, 4).double()
    for call, says in (
        (
            lambda: model(
                ids, cache=cache, positions=torch.tensor([[7, 8, 9, 10, 11]])
            ),
            "row 0 holds 5 tokens.*got .7, 8",
        ),
        (lambda: model(ids[:1, :1], cache=cache), "a batch of 1|do not"),
        (lambda: cache.set_rows(torch.tensor([0]), growing), "same pool"),
        (lambda: cache.select(torch.tensor([2])), "rows must be"),
        (lambda: cache.crop(-1), "n must be a whole number"),
        (
            lambda: layer.update(x.float(), x, positions=torch.tensor([[5]])),
            "only batch and time may differ",
        ),
        (lambda: BlockPool(0), "num_blocks must be a whole number"),
        (lambda: BlockPool(3, 0), "block_size must be a whole number"),
        (lambda: new_paged_cache(model, pool, 0), "batch_size must be a whole"),
    ):
        with pytest.raises((ValueError, IndexError), match=says) as told:
            call()
        assert "\n" not in str(told.value)
    fresh = BlockPool(2, 2)
    with pytest.raises(ValueError, match="block 0 is in no table"):
        fresh.release(0)
    with pytest.raises(ValueError, match="block 1 is free, and holds"):
        fresh.acquire(1)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["reserve", "trim", "select", "register", "begin"]),
            st.integers(0, 2),
            st.integers(1, 9),
        ),
        max_size=40,
    )
)
def test_blocks_are_never_lost(acts):
    pool = BlockPool(7, 2)
    tables = BlockTables(pool, [[], [], []])
    for act, row, n in acts:
        table = tables.tables[row]
        try:
            if act == "reserve":
                tables.reserve(row, max(0, 2 * len(table) - 1), 2 * len(table) + n)
            elif act == "trim":
                tables.trim(row, n)
            elif act == "select":
                tables.select([row, n % 3, (row + n) % 3])
            elif act == "register":
                for i, block in enumerate(table):
                    pool.cache_block(bytes([row, i, n]), block)
            elif not table and pool.hash_to_block:
                known = [*pool.evictable] or [*pool.hash_to_block.values()]
                block = known[n % len(known)]
                pool.acquire(block)
                table.append(block)
        except OutOfBlocks:
            assert not pool.num_free_blocks and not len(pool.evictable)
        consistent(pool, tables)
    for row in range(3):
        tables.trim(row, 0)
    consistent(pool, tables)
    assert not pool.num_used_blocks


def test_what_grows_has_blocks_and_the_rest_stays_what_it_is():
    row = ROWS[0]
    model = row.make()
    cache = new_paged_cache(model, BlockPool(4), 2)
    plain = model.new_cache(2)
    for ours, theirs in zip(cache.layers, plain.layers, strict=True):
        assert type(ours) is type(theirs) is KVCache
        for a, b in zip(ours.layers, theirs.layers, strict=True):
            assert type(a) is (
                PagedLayerCache if type(b) is DynamicLayerCache else type(b)
            )


@pytest.mark.gpu
@torch.no_grad()
def test_on_a_device():
    model = GPT_ROW.make().cuda()
    ids = GPT_ROW.ids(3, 12).cuda()
    cache = new_paged_cache(model, BlockPool(20, 3), 3)
    found = pieces(GPT_ROW, model, ids, cache, (5, 1, 4, 2))
    close(found, model(ids))
    cache.crop(7)
    close(model(ids[:, 7:8], cache=cache), model(ids[:, :8])[:, 7:])


def test_a_recount_finds_what_an_interrupt_has_left():
    "A count without a table, a key without its block, a block that is nowhere."
    pool = BlockPool(6, 2)
    for key in (b"a", b"b", b"c", b"d"):
        pool.cache_block(key, pool.allocate())
    first, second, third, fourth = pool.block_to_hash
    for block in (third, first):
        pool.release(block)
    pool.allocate()  # and the interrupt came before its table had it
    del pool.evictable[first]  # it was to be shared
    del pool.block_to_hash[fourth]  # it was to be written
    tables = BlockTables(pool, [[second], [fourth, second]])
    pool.recount(tables.tables)
    consistent(pool, tables)
    assert [*pool.evictable] == [third, first]
    assert pool.hash_to_block == {b"a": first, b"b": second, b"c": third}
    assert pool.ref_counts[second] == 2 and pool.num_free_blocks == 2


def interrupted_calls(*names, at_least):
    """Yields functions that make a call and say whether it was interrupted.

    The first one interrupts at the first place inside methods of these names, the
    second one at the second, until none is left.  Places are those of the module of
    blocks.
    """

    def is_inside(frame, event):
        code = frame.f_code
        return (
            code.co_filename == tformer.nn.paged_cache.__file__
            and code.co_name in names
        )

    def make(call):
        nonlocal is_interrupted
        is_interrupted = False
        try:
            with interrupted_at(n, is_inside):
                call()
        except KeyboardInterrupt:
            is_interrupted = True
        return is_interrupted

    n = 0
    is_interrupted = True
    while is_interrupted:
        n += 1
        yield make
    assert n > at_least


def state(pool):
    "All that a pool knows of its blocks."
    return [
        pool.generation,
        [*pool.generations],
        [*pool.ref_counts],
        [*pool.block_keys],
        {*pool.free_block_ids},
        [*pool.evictable],
        {**pool.hash_to_block},
        {**pool.block_to_hash},
    ]


@plain_only  # what executes a signature would be interrupted, too
@torch.no_grad()
def test_a_reset_is_done_or_not_wherever_an_interrupt_comes():
    "No block is ever free and cached at once, which would give it to two texts."
    for make in interrupted_calls("reset_prefix_cache", at_least=3):
        _, pool, cache, ids = grown(6, batch=2)
        for row in range(2):
            cache.cache_full_blocks(row, ids[row].tolist())
        cache.crop(torch.tensor([0, 6]))
        assert len(pool.evictable) == pool.num_used_blocks == 2
        before = state(pool)
        make(pool.reset_prefix_cache)
        consistent(pool, cache.tables)
        is_reset = not pool.hash_to_block
        if is_reset:
            assert pool.generation == 1 and not pool.block_to_hash
            assert pool.num_free_blocks == pool.num_blocks - 2
            assert pool.block_keys == [None] * pool.num_blocks
        else:
            assert state(pool) == before
    assert is_reset


METHODS_OF_BLOCKS = ("reserve", "allocate", "copy_block", "acquire", "release", "evict")


@plain_only  # what executes a signature would be interrupted, too
@torch.no_grad()
def test_a_copy_that_is_interrupted_is_made_when_the_step_is_repeated():
    "A block that is not yet copied is in no table, and none is lost."
    new = torch.tensor([[5], [9]])
    for make in interrupted_calls(*METHODS_OF_BLOCKS, at_least=5):
        model, pool, cache, ids = grown()
        cache.select(torch.tensor([0, 0]))
        is_interrupted = make(lambda: model(new, cache=cache))
        consistent(pool, cache.tables)
        if is_interrupted:
            found = model(new, cache=cache)
            expected = model(torch.cat([ids.expand(2, -1), new], 1))[:, -1:]
            close(found, expected, 1e-12)
            consistent(pool, cache.tables)
        cache.crop(0)
        assert not pool.num_used_blocks


@plain_only  # what executes a signature would be interrupted, too
@torch.no_grad()
def test_a_block_that_is_written_anew_is_not_found_after_an_interrupt():
    "A step that is repeated forgets the key of the block that it writes."
    for make in interrupted_calls("evict", at_least=2):
        model, pool, cache, ids = grown(6)
        cache.cache_full_blocks(0, ids[0].tolist())
        cache.crop(5)
        new = (ids[:, 5:] + 1) % VOCAB
        if make(lambda: model(new, cache=cache)):
            model(new, cache=cache)
        assert len(pool.hash_to_block) == 1
        consistent(pool, cache.tables)


ROWS_OF = ("select", "crop", "set_rows", "trim", "acquire", "release")


@plain_only  # what executes a signature would be interrupted, too
@pytest.mark.parametrize("act", ["select", "crop", "set_rows"])
@torch.no_grad()
def test_rows_are_changed_or_not_wherever_an_interrupt_comes(act):
    "In all layers and tables; blocks that other caches share stay theirs."
    num_undone = 0
    for make in interrupted_calls(*ROWS_OF, at_least=20):
        model, pool, cache, ids = grown(5, batch=2, blocks=20)
        cache.cache_full_blocks(0, ids[0].tolist())
        other = new_paged_cache(model, pool, 2)  # it shares a block
        part = cache.view(torch.tensor([0]))
        other.set_rows(torch.tensor([0]), part)
        new = GPT_ROW.ids(1, 4)
        end = new_paged_cache(model, pool, 1)
        model(new, cache=end)
        call = {
            "select": lambda: cache.select(torch.tensor([1, 0, 1])),
            "crop": lambda: cache.crop(torch.tensor([2, 3])),
            "set_rows": lambda: cache.set_rows(torch.tensor([1]), end),
        }[act]
        texts = {
            "select": [ids[1], ids[0], ids[1]],
            "crop": [ids[0, :2], ids[1, :3]],
            "set_rows": [ids[0], new[0]],
        }[act]
        before = [[*row] for row in cache.tables.tables]
        make(call)
        if cache.tables.tables == before:
            texts = [*ids]
            num_undone += 1
        lengths = [len(text) for text in texts]
        for layer in cache.layers:
            assert layer.lengths.tolist() == lengths
            assert layer.key_positions is cache.layers[0].key_positions
        consistent(pool, cache.tables, other.tables, end.tables)
        step = torch.full((len(texts), 1), 7)
        for row, logits in enumerate(model(step, cache=cache)):
            whole = torch.cat([texts[row], step[row]])[None]
            close(logits[-1], model(whole)[0, -1], 1e-12)
        for held in (cache, other, end):
            held.crop(0)
        assert not pool.num_used_blocks
    assert num_undone


@plain_only  # what executes a signature would be interrupted, too
@torch.no_grad()
def test_a_search_for_a_prefix_that_is_interrupted_may_be_made_again():
    "What it had found is not taken for the beginning of what it finds then."
    names = ("match_prefix", "acquire", "_set_lengths", "set_lengths")
    for make in interrupted_calls(*names, at_least=5):
        _, pool, cache, ids = grown(9, batch=2, blocks=8)
        cache.cache_full_blocks(0, ids[0].tolist())
        cache.crop(torch.tensor([9, 0]))
        text = ids[0].tolist()
        if make(lambda: cache.match_prefix(1, text)):
            assert cache.match_prefix(1, text) == 8
        assert cache.tables.tables[0] == cache.tables.tables[1]
        assert {*pool.ref_counts} == {0, 2}
        consistent(pool, cache.tables)
