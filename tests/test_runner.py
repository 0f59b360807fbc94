"""The rows of an engine: two calls of a model, in slots and in blocks."""

import pytest
import torch

from helpers import close, plain_only
from models import ROWS, Preallocates
from test_paged_cache import consistent
from tformer.inference.generation import generate
from tformer.nn.kv_cache import CrossAttentionCache, DynamicLayerCache, KVCache
from tformer.nn.paged_cache import BlockPool, new_paged_cache
from tformer.nn.static_cache import new_static_cache
from tformer.serving.engine import Engine
from tformer.serving.requests import Request
from tformer.serving.runner import ModelRunner, PagedModelRunner

GPT_ROW = next(row for row in ROWS if row.name == "GPT")
RUNNERS = pytest.mark.parametrize(
    "runner_of",
    [
        pytest.param(lambda model: ModelRunner(model, 3), id="slots"),
        pytest.param(lambda model: PagedModelRunner(model, 3, 12, 4), id="blocks"),
    ],
)


def begin(runner, texts):
    "Blocks for these texts, and all of each but its last token read in two parts."
    for row, text in enumerate(texts):
        assert runner.allocate(row, text, use_prefix_cache=False) == 0
    rows = [*range(len(texts))]
    runner.prefill(rows, [text[:2] for text in texts], [0] * len(rows))
    return runner.prefill(rows, [text[2:-1] for text in texts], [2] * len(rows))


@RUNNERS
@pytest.mark.parametrize("name", ["GPT", "Llama", "Qwen3"])
@torch.no_grad()
def test_each_row_is_what_its_text_is_alone(runner_of, name):
    row = next(row for row in ROWS if row.name == name)
    model = row.make().double()
    texts = [row.ids(1, n, seed=n)[0].tolist() for n in (9, 5)]
    runner = runner_of(model)
    found = begin(runner, texts)
    wholes = [model(torch.tensor([text]))[0] for text in texts]
    close(found, torch.stack([whole[-2] for whole in wholes]), 1e-9)
    close(runner.decode([1], texts[1][-1:], [4]), wholes[1][-1:], 1e-9)  # row 0 waits
    close(runner.decode([0], texts[0][-1:], [8]), wholes[0][-1:], 1e-9)
    assert runner.num_prompt_tokens == 8 + 4
    assert runner.num_padding_tokens == 6 - 2


@RUNNERS
@pytest.mark.parametrize("name", ["blocks.1", "lm_head"])
@torch.no_grad()
def test_a_step_that_fails_is_taken_back(runner_of, name, monkeypatch):
    "In the middle of the model, and when all layers have written already."
    model = GPT_ROW.make()
    texts = [GPT_ROW.ids(1, n, seed=n)[0].tolist() for n in (6, 4)]
    runner = runner_of(model)
    begin(runner, texts)
    last = [text[-1] for text in texts]

    def fails(*args, **kwargs):
        raise RuntimeError("the machine is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(model.get_submodule(name), "forward", fails)
        with pytest.raises(RuntimeError, match="on fire"):
            runner.decode([0, 1], last, [5, 3])
    assert runner.cache.lengths.tolist() == [5, 3, 0]
    found = runner.decode([0, 1], last, [5, 3])
    close(found, torch.stack([model(torch.tensor([t]))[0, -1] for t in texts]))


@torch.no_grad()
def test_a_row_for_which_there_is_no_room_gets_no_block():
    model = GPT_ROW.make()
    runner = PagedModelRunner(model, 2, num_blocks=3, block_size=4)
    assert runner.allocate(0, [*range(6)], use_prefix_cache=False) == 0
    assert runner.allocate(1, [*range(5)], use_prefix_cache=False) is None
    assert runner.pool.num_free_blocks == 1
    runner.prefill([0], [[*range(6)]], [0])
    assert [runner.try_reserve(0) for _ in range(2)] == [True, True]
    assert runner.allocate(1, [1, 2], use_prefix_cache=False) == 0
    consistent(runner.pool, runner.cache.tables)
    with pytest.raises(ValueError, match="4 blocks needed, beyond all of them, 3"):
        runner.require_capacity(13)
    with pytest.raises(ValueError, match="tokens of prompt and text"):
        ModelRunner(model, 2).require_capacity(model.max_len + 1)


@pytest.mark.parametrize("max_len", [None, 11])
def test_a_model_that_preallocates_is_told_how_much_a_row_holds(max_len):
    "More requests than rows, and prompts that are read in pieces."
    model = GPT_ROW.make().double().requires_grad_(False)
    other = Preallocates(model)
    engine = Engine(other, 2, max_len=max_len, max_prefill_tokens=3)
    prompts = [GPT_ROW.ids(1, n, seed=n)[0].tolist() for n in (7, 2, 5)]
    handles = engine.run([Request(prompt, 4) for prompt in prompts])
    wholes = [generate(model, [prompt], max_new_tokens=4)[0] for prompt in prompts]
    assert [handle.error for handle in handles] == [None] * 3
    assert [handle.output_ids for handle in handles] == [text.ids for text in wholes]
    assert {*other.asked} == {max_len or model.max_len} and len(other.asked) >= 3
    assert engine.runner.cache.layers[0].max_len == (max_len or model.max_len)


class Own(DynamicLayerCache):
    "A cache of one's own, which new_paged_cache does not know."


class Caches:
    "A model of which only the caches are known."

    max_len = 8

    def __init__(self, *layers):
        self.layers = layers

    def new_cache(self, batch_size, max_len):
        assert max_len <= self.max_len
        return KVCache([layer(batch_size) for layer in self.layers])


def test_blocks_refuse_a_cache_of_another_kind_at_once():
    model = GPT_ROW.make()
    with pytest.raises(ValueError, match=r"Preallocates.*StaticLayerCache") as told:
        Engine(Preallocates(model), 2, num_blocks=4)
    assert "\n" not in str(told.value)
    pool = BlockPool(4)
    inner = KVCache([Own(2)])
    for other in (
        Caches(DynamicLayerCache, Own),
        Caches(DynamicLayerCache, lambda b: inner),
    ):
        with pytest.raises(ValueError, match="of Caches keeps its text in Own"):
            new_paged_cache(other, pool, 2)
    with pytest.raises(ValueError, match="no layer of Caches keeps a text"):
        new_paged_cache(Caches(CrossAttentionCache), pool, 2)
    both = Caches(DynamicLayerCache, CrossAttentionCache)
    assert new_paged_cache(both, pool, 2).layers[0].tables.pool is pool


class Alone:
    "A cache of somebody who has not heard of ours."

    key_positions = None


@plain_only
@pytest.mark.parametrize("how", [{}, dict(num_blocks=4)], ids=["slots", "blocks"])
@pytest.mark.parametrize(
    "new_cache, says",
    [
        (lambda self, b: None, r"new_cache\(batch, max_len\): TypeError"),
        (lambda self, b, n: Alone(), "KVCache.*Other.*Alone"),
        (lambda self, b, n: [].missing, r"new_cache\(batch, max_len\): AttributeError"),
    ],
)
def test_a_model_whose_cache_no_engine_can_use(new_cache, says, how):
    call = dict(__call__=lambda self, ids, **kwargs: None)
    model = type("Other", (), dict(new_cache=new_cache, max_len=8, **call))()
    with pytest.raises(ValueError, match=says) as told:
        Engine(model, 2, **how)
    assert "\n" not in str(told.value)


@RUNNERS
def test_a_model_without_a_bound_needs_to_be_told_one(runner_of):
    model = GPT_ROW.make()
    other = Preallocates(model)
    other.max_len = None
    with pytest.raises(ValueError, match="Preallocates has no max_len"):
        runner_of(other)

    class Unbounded:
        "A model of which only the caches matter here."

        def __call__(self, ids, *, cache=None, positions=None):
            return model(ids, cache=cache, positions=positions)

        def new_cache(self, batch_size, max_len):
            return model.new_cache(batch_size)

    paged = PagedModelRunner(Unbounded(), 2, 4, 4, max_len=9)
    assert (ModelRunner(Unbounded(), 2, 9).max_len, paged.max_len) == (9, 9)


def test_rows_of_full_length_hold_what_a_fixed_cache_holds():
    "A preallocated cache that has a position -1 at each slot is empty."
    model = GPT_ROW.make()
    cache = new_static_cache(Preallocates(model), 2, 9)
    assert cache.is_empty and cache.layers[0].max_len == 9


@pytest.mark.parametrize("max_len", [-1, 0, 2.5, True])
def test_a_row_of_no_length_is_refused(max_len):
    "By rows and by blocks alike, before anything is allocated."
    model = GPT_ROW.make()
    for make in (
        lambda: ModelRunner(model, 2, max_len=max_len),
        lambda: PagedModelRunner(model, 2, 8, 4, max_len=max_len),
    ):
        with pytest.raises(ValueError, match=f"max_len must .* got {max_len}"):
            make()


@pytest.mark.parametrize("max_num_seqs", [-1, 0, 1.5])
def test_a_runner_without_rows_is_refused(max_num_seqs):
    model = GPT_ROW.make()
    for make in (
        lambda: ModelRunner(model, max_num_seqs),
        lambda: PagedModelRunner(model, max_num_seqs, 8, 4),
    ):
        with pytest.raises(
            ValueError, match=f"max_num_seqs must .* got {max_num_seqs}"
        ):
            make()
