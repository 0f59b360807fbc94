"""Caches of fixed shape: as the growing ones, and one program for every step."""
import copy
import os

import pytest
import torch
from torch._dynamo.utils import counters

from helpers import close, draw_ids, plain_only
from models import MAX_LEN, RAGGED, ROWS, VOCAB, causal, in_pieces, pieces
from tformer import check
from tformer.attention import LayerCache
from tformer.generate import generate
from tformer.gpt import GPT, GPTConfig
from tformer.places import (
    Compiled,
    FixedCache,
    compiled_step,
    expect_compiler,
    fixed_cache,
)
from tformer.rows import MemoryCache
from tformer.speculate import Prefix

GPT_ROW = next(row for row in ROWS if row.name == "GPT")


@in_pieces
@torch.no_grad()
def test_logits_of_every_decoder(row, sizes, pos):
    "Those of the growing cache, and of none."
    model = row.make()
    ids = row.ids(3, 12)
    found, grown = (pieces(row, model, ids, cache, sizes, pos) for cache in (
        fixed_cache(model, 3, 12), model.new_cache(3)))
    whole = row.run(model, ids, **({} if pos is None else dict(pos=pos)))
    token = torch.ones(3, 12).bool() if pos is None else pos >= 0
    close(found[token], grown[token])
    close(found[token], whole[token])


@causal
@torch.no_grad()
def test_verbs_of_every_decoder(row):
    "Side by side with a growing cache: select, crop, put, and on."
    model = row.make()
    ids = row.ids(3, 12)
    pair = (fixed_cache(model, 3), model.new_cache(3))
    guest = []
    for rows in (2, 2):
        guest.append(model.new_cache(rows))
    row.run(model, row.ids(2, 7, seed=4), cache=guest[0])
    guest[1] = fixed_cache(model, 2, 9)
    row.run(model, row.ids(2, 7, seed=4), cache=guest[1])
    found = []
    for cache in pair:
        out = [row.run(model, ids[:, :8], pos=RAGGED[:, :8], cache=cache)[
            RAGGED[:, :8] >= 0]]
        for i, act in enumerate((
                lambda: cache.select(torch.tensor([2, 0, 2])),
                lambda: cache.crop(torch.tensor([2, 6, 3])),
                lambda: cache.crop(5),
                lambda: cache.put(torch.tensor([2, 0]), guest[0]),
                lambda: cache.put(torch.tensor([1, 2]), guest[1]))):
            act()
            out.append(row.run(model, ids[:, i:i + 2], cache=cache))
        found.append(out)
    for ours, theirs in zip(*found, strict=False):
        close(ours, theirs)
    assert pair[0].n_seen.tolist() == pair[1].n_seen.tolist()


@plain_only
@pytest.mark.parametrize("name", ["GPT", "Qwen3"])
def test_check_cache_passes(name):
    row = next(row for row in ROWS if row.name == name)
    model = row.make()
    twin = row.make()
    model.new_cache = lambda batch, max_len=None: fixed_cache(twin, batch)
    report = check.cache(model, VOCAB)
    assert all(verb in str(report) for verb in ("select", "crop", "put"))


def test_the_layers_say_what_they_keep():
    for row in ROWS:
        if not row.causal:
            continue
        cache = fixed_cache(row.make(), 2, 7)
        for layer in cache.layers:
            inner = layer.layers if row.source else [layer]
            assert [type(c) for c in inner] == [FixedCache, MemoryCache][
                :len(inner)]
            assert inner[0].max_len == 7 and inner[0].batch == 2
    assert fixed_cache(GPT_ROW.make(), 1).layers[0].max_len == MAX_LEN


@torch.no_grad()
def test_shape_and_memory_are_there_from_the_first_token():
    for n_kv_heads, row in ((4, GPT_ROW), (2, ROWS[5]), (1, ROWS[6])):
        model = row.make()
        width = row.config.d_model // 4
        width = getattr(row.config, "d_head", None) or width
        cache = fixed_cache(model, 3, 9)
        assert cache.nbytes == 0 and cache.empty
        buffers = []
        for _i in range(9):
            model(row.ids(3, 1), cache=cache)
            assert cache.nbytes == 2 * 2 * 3 * 10 * n_kv_heads * width * 4
            buffers.append([x.data_ptr() for c in cache.layers
                            for x in c.kept])
        assert all(at == buffers[0] for at in buffers)  # written in place


def test_rows_lie_side_by_side_from_place_0():
    cache = FixedCache(2, 6)
    k = torch.arange(1.0, 11).view(2, 1, 5, 1)
    pos = torch.tensor([[-1, 0, -1, 1, 2], [4, 2, 9, -7, -1]])
    out = cache.update(k, pos=pos)
    assert out[0] is k and out[1].at.tolist() == pos.tolist()
    assert cache.k_pos.at.tolist() == [[0, 1, 2, -1, -1, -1, -1],
                                       [4, 2, 9, -1, -1, -1, -1]]
    assert cache.kept[0][:, 0, :3, 0].tolist() == [[2, 4, 5], [6, 7, 8]]
    assert cache.kept[0][:, 0, 5:, 0].tolist() == [[0, 0], [0, 0]]
    cache.update(torch.tensor([[[[20.0], [21]]], [[[22.0], [23]]]]),
                 pos=torch.tensor([[-1, 3], [10, 11]]))
    assert cache.k_pos.at.tolist() == [[0, 1, 2, 3, -1, -1, -1],
                                       [4, 2, 9, 10, 11, -1, -1]]
    assert cache.kept[0][0, 0, :4, 0].tolist() == [2, 4, 5, 21]
    assert cache.kept[0][1, 0, :5, 0].tolist() == [6, 7, 8, 22, 23]
    assert cache.n_seen.tolist() == [4, 5]
    cache.crop(torch.tensor([4, 9]))    # a hole is closed
    assert cache.k_pos.at[:, :4].tolist() == [[0, 1, 2, 3], [4, 2, -1, -1]]
    cache.crop(torch.tensor([4, 3]))
    cache.update(torch.full((2, 1, 2, 1), 30.0),
                 pos=torch.tensor([[4, 5], [3, 4]]))
    assert cache.kept[0][0, 0, :6, 0].tolist() == [2, 4, 5, 21, 30, 30]
    assert cache.kept[0][1, 0, :3, 0].tolist() == [7, 30, 30]
    cache = FixedCache(1, 3)    # what was kept of other sizes
    cache.hold([torch.ones(1, 2, 9, 4)], torch.tensor([[-1] * 6 + [3, -1, 5]]))
    assert cache.k_pos.at.tolist() == [[3, 5, -1, -1]]


@torch.no_grad()
def test_a_full_cache_refuses_and_has_not_changed():
    model = GPT_ROW.make()
    ids = GPT_ROW.ids(3, 12)
    cache = fixed_cache(model, 3, 9)
    model(ids[:, :9], pos=RAGGED[:, :9], cache=cache)  # row 0 is full
    before = copy.deepcopy(cache)
    step = compiled_step(model, backend="eager")
    for follow in (model, step):
        with pytest.raises(ValueError, match=r"^10 tokens, but the cache has "
                           r"9 places for a text$"):
            follow(ids[:, 9:10], cache=cache)
    with pytest.raises(ValueError, match=r"11 tokens, .* 9 places"):
        model(ids[:, 9:11], cache=cache)
    for layer, old in zip(cache.layers, before.layers, strict=True):
        assert torch.equal(layer.k_pos.at, old.k_pos.at)
        assert all(map(torch.equal, layer.kept, old.kept))
    cache.select(torch.tensor([1, 2]))  # the short rows go on
    close(model(ids[1:, 9:12], cache=cache),
          model(ids[1:], pos=RAGGED[1:])[:, 9:])
    with pytest.raises(ValueError, match="12 tokens, but the cache has 9"):
        fixed_cache(model, 3, 9).put(torch.tensor([0]), _filled(model, 12))
    with pytest.raises(ValueError, match="12 tokens, but the cache has 9"):
        model(ids, cache=fixed_cache(model, 3, 9))


def _filled(model, n):
    cache = model.new_cache(1)
    model(GPT_ROW.ids(1, n), cache=cache)
    return cache


@torch.no_grad()
def test_a_refused_put_changes_nothing():
    model = GPT_ROW.make()
    cache = fixed_cache(model, 2, 9)
    model(GPT_ROW.ids(2, 4), cache=cache)
    with pytest.raises(ValueError, match="12 tokens"):
        cache.put(torch.tensor([1]), _filled(model, 12))
    assert cache.n_seen.tolist() == [4, 4]
    cache.put(torch.tensor([1]), _filled(model, 8))
    assert cache.n_seen.tolist() == [4, 8]
    back = model.new_cache(2)           # and into a growing one
    back.put(torch.tensor([1, 0]), cache)
    more = GPT_ROW.ids(2, 1, seed=8)
    close(model(more.flip(0), cache=back).flip(0), model(more, cache=cache))


@pytest.mark.parametrize("made, says", [
    (lambda m: FixedCache(0, 4), "batch must be a whole number"),
    (lambda m: FixedCache(1, 2.5), "max_len must be a whole number .*2.5"),
    (lambda m: fixed_cache(m, 1, 0), "max_len must be a whole number"),
    (lambda m: fixed_cache(m, 1, 21), "21 places, beyond max_len 20"),
    (lambda m: fixed_cache(m, True), "batch must be a whole number")])
def test_what_is_no_size(made, says):
    with pytest.raises(ValueError, match=says):
        made(GPT_ROW.make())


@pytest.mark.parametrize("shape, kind, pos, says", [
    ((3, 4, 1, 4), torch.float32, [[4]], "batch of 3, .* cache of 2"),
    ((2, 4, 2, 4), torch.float32, [[4]], "2 tokens have 1 positions"),
    ((2, 3, 1, 4), torch.float32, [[4]], r"3.* meets .*4"),
    ((2, 4, 1, 5), torch.float32, [[4]], r"5, .* meets .*4"),
    ((2, 4, 1, 4), torch.float64, [[4]], "float64.* meets .*float32"),
    ((2, 4, 1, 4), torch.float32, [[4]] * 3, "positions of 3")])
def test_what_does_not_belong_is_named(shape, kind, pos, says):
    cache = FixedCache(2, 8)
    cache.update(*[torch.randn(2, 4, 3, 4)] * 2, pos=torch.arange(3)[None])
    with pytest.raises(ValueError, match=says):
        cache.update(*[torch.zeros(shape, dtype=kind)] * 2,
                     pos=torch.tensor(pos))
    assert cache.n_seen.tolist() == [3, 3]


def test_an_empty_cache_has_all_verbs():
    cache = FixedCache(3, 8)
    cache.crop(2), cache.select(torch.tensor([2, 0]))
    assert cache.batch == 2 and cache.empty and cache.n_seen.tolist() == [0]
    guest = LayerCache(1)
    guest.update(torch.ones(1, 2, 4), pos=torch.arange(2)[None])
    cache.put(torch.tensor([1]), guest)     # of three axes, as a latent
    assert cache.n_seen.tolist() == [0, 2]
    assert cache.kept[0].shape == (2, 9, 4)
    cache.crop(0)
    assert cache.n_seen.tolist() == [0, 0]
    assert cache.k_pos.following(1).at.tolist() == [[0], [0]]


@plain_only
def test_gradients_and_inference_mode():
    "Written in place only where that is allowed."
    row = GPT_ROW
    model = row.make()
    ids = row.ids(2, 6)
    cache = fixed_cache(model, 2, 8)
    parts = [model(x, cache=cache) for x in ids.split((3, 1, 2), 1)]
    grads = [torch.autograd.grad(y.square().sum(), list(model.parameters()))
             for y in (torch.cat(parts, 1), model(ids))]
    for ours, theirs in zip(*grads, strict=False):
        close(ours, theirs, 1e-4)
    with torch.no_grad():
        close(model(ids[:, :1], cache=cache),
              model(torch.cat([ids, ids[:, :1]], 1))[:, -1:])
    with torch.inference_mode():
        cache = fixed_cache(model, 2, 8)
        model(ids[:, :3], cache=cache)
    step = compiled_step(model, backend="eager")
    with torch.no_grad():
        found = [model(ids[:, 3:4], cache=cache),
                 step(ids[:, 4:5], cache=cache)]
        close(torch.cat(found, 1), model(ids)[:, 3:5])
    cache = fixed_cache(model, 2, 8)    # a prompt read with gradients
    model(ids[:, :3], cache=cache)
    close(step(ids[:, 3:4], cache=cache), model(ids)[:, 3:4].detach())


# one program

@plain_only
@pytest.mark.parametrize("row", [
    pytest.param(row, id=row.name,
                 marks=[pytest.mark.nightly] if row.name != "GPT" else [])
    for row in ROWS if row.name in ("Seq2Seq", "GPT", "Qwen3")])
@torch.no_grad()
def test_one_graph_for_every_token(row):
    "Rows of different lengths, and the next text; no compiler at work."
    model = row.make()
    ids = row.ids(3, 12)
    step = compiled_step(model, backend="eager")
    for text in range(2):
        cache = fixed_cache(model, 3)
        row.run(model, ids[:, :5], pos=RAGGED[:, :5], cache=cache)
        before = counters["stats"]["unique_graphs"]
        found = [step(ids[:, i:i + 1], cache=cache) for i in range(5, 9)]
        pos = RAGGED[:, 9:10]           # positions may be given
        found.append(step(ids[:, 9:10].int(), cache=cache, pos=pos))
        cache.select(torch.tensor([2, 1, 0]))
        cache.crop(torch.tensor([4, 6, 10]))
        cache.put(torch.tensor([1]), _copy_of(cache, 0))
        step(ids[:, :1], cache=cache)
        made = counters["stats"]["unique_graphs"] - before
        assert made == (1 if text == 0 else 0)
        whole = row.run(model, ids, pos=RAGGED)
        close(torch.cat(found, 1), whole[:, 5:10])
        ids = ids.flip(1)


def _copy_of(cache, i):
    one = copy.deepcopy(cache)
    one.select(torch.tensor([i]))
    return one


@plain_only
@torch.no_grad()
def test_layers_share_positions_and_bounds():
    model = GPT_ROW.make()
    ids = GPT_ROW.ids(2, 12)
    step = compiled_step(model, backend="eager")
    cache = fixed_cache(model, 2)
    model(ids[:, :3], cache=cache)
    for i in range(3, 6):
        step(ids[:, i:i + 1], cache=cache)
        first, *others = [layer.k_pos for layer in cache.layers]
        assert all(at is first for at in others) and first.bound == i + 1
        model(ids[:, i:i + 1], cache=cache)     # both in turn
        cache.crop(i + 1)


@plain_only
@pytest.mark.parametrize("act, says", [
    (lambda m, s: s(GPT_ROW.ids(2, 1), cache=m.new_cache(2)),
     "needs fixed_cache.* has a LayerCache"),
    (lambda m, s: s(GPT_ROW.ids(2, 1), cache=fixed_cache(m, 2)),
     "the cache is empty: let the model read a prompt first"),
    (lambda m, s: s(GPT_ROW.ids(2, 1), cache=None), "cache must be Cache"),
    (lambda m, s: s(GPT_ROW.ids(2, 2), cache=_read(m, 3)),
     r"ids must be of shape \(b, 1\)"),
    (lambda m, s: s(GPT_ROW.ids(3, 1), cache=_read(m, 3)), "do not fit"),
    (lambda m, s: s(GPT_ROW.ids(3, 1), cache=_read(m, 3),
                    pos=torch.tensor([[3]])), "3 meets a cache of 2"),
    (lambda m, s: _read(m, 3).crop(torch.tensor([1, 2, 3])), "n must be"),
    (lambda m, s: fixed_cache(Prefix(m, [[1, 2]]), 2),
     "caches of Prefix begin with 2 tokens"),
    (lambda m, s: s(GPT_ROW.ids(2, 1), cache=_read(m, MAX_LEN)),
     "21 tokens, beyond max_len 20"),
    (lambda m, s: s(GPT_ROW.ids(2, 1), cache=_read(m, 3),
                    pos=torch.tensor([[20]])), "21 tokens, beyond"),
    (lambda m, s: s(GPT_ROW.ids(2, 1), cache=_read(m, 3),
                    pos=torch.tensor([[3, 4]])), "do not fit")])
def test_what_no_program_can_refuse_is_refused_before(act, says):
    model = GPT_ROW.make()
    with pytest.raises(ValueError, match=says), torch.no_grad():
        act(model, compiled_step(model, backend="eager"))


def _read(model, n):
    cache = fixed_cache(model, 2)
    model(GPT_ROW.ids(2, n), cache=cache)
    return cache


@plain_only
def test_a_step_takes_no_gradients():
    model = GPT_ROW.make()
    with torch.no_grad():
        cache = _read(model, 3)
    step = compiled_step(model, backend="eager")
    assert not step(GPT_ROW.ids(2, 1), cache=cache).requires_grad
    assert not any(x.requires_grad for layer in cache.layers
                   for x in layer.kept)


@plain_only
@torch.no_grad()
def test_after_an_error_the_cache_is_as_before(monkeypatch):
    model = GPT_ROW.make()
    ids = GPT_ROW.ids(2, 4)
    cache = _read(model, 3)

    def breaks(graph, inputs):
        def run(*args):
            graph.forward(*args)
            raise RuntimeError("the machine is on fire")
        return run
    held = [(c.filled, c.k_pos) for c in cache.layers]
    with pytest.raises(RuntimeError, match="on fire"):
        compiled_step(model, backend=breaks)(ids[:, 3:], cache=cache)
    assert [(c.filled, c.k_pos) for c in cache.layers] == held
    close(model(ids[:, 3:], cache=cache), model(torch.cat(
        [GPT_ROW.ids(2, 3), ids[:, 3:]], 1))[:, 3:])


@pytest.mark.nightly
@plain_only
@torch.no_grad()
@torch._dynamo.config.patch(recompile_limit=2)
def test_more_models_than_pytorch_recompiles_for():
    "Each step is counted for itself."
    tiny = GPTConfig(vocab_size=5, d_model=4, n_layers=1, n_heads=1,
                     max_len=4, dropout=0.0)
    for seed in range(3):
        model = GPT(tiny).eval()
        cache = fixed_cache(model, 1)
        ids = draw_ids(1, 2, high=5, seed=seed)
        model(ids[:, :1], cache=cache)
        step = compiled_step(model, backend="eager")
        close(step(ids[:, 1:], cache=cache), model(ids)[:, 1:])


# the compiler

def test_a_missing_compiler_is_named_in_one_sentence(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    for call in (expect_compiler, lambda: compiled_step(GPT_ROW.make())):
        with pytest.raises(RuntimeError, match="^torch.compile needs a C.. "
                           "compiler, and there is no no-such-compiler: "
                           r"install it \(apt-get install g..\), or name "
                           "another in CXX$"):
            call()
    monkeypatch.setenv("CXX", "sh")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": "/none"})
    with pytest.raises(RuntimeError, match=r"there is no /none/Python\.h"):
        expect_compiler()


@pytest.mark.nightly
@plain_only
@causal
def test_a_compiled_model_is_written_with(row):
    "Ragged prompts, rows that stop and stay, a memory: as by the model."
    model = row.make().double()
    more = {}
    if row.source:
        with torch.no_grad():
            more = dict(memory=model.encode(row.ids(3, 7, seed=9)))
    compiled = Compiled(model, backend="eager")
    asked = dict(ids=[[3, 4, 5], [6], [7, 8]], max_new=9, drop=False,
                 stop=generate(model, [[3, 4, 5]] * 3, max_new=4, **more)[
                     0].ids[-1:], **more)
    steps = []
    step = compiled.step
    compiled.step = lambda *a, **how: steps.append(1) or step(*a, **how)
    for ours, text in zip(generate(compiled, **asked),
                          generate(model, **asked), strict=True):
        assert (ours.ids, ours.stopped) == (text.ids, text.stopped)
        assert ours.log_probs == pytest.approx(text.log_probs, abs=1e-9)
    assert len(steps) >= 3
    alone = compiled(row.ids(2, 1), **({"memory": more["memory"][:2]}
                                       if more else {}))
    assert len(steps) <= 8 and alone.shape == (2, 1, VOCAB)


def compiler_or_skip():
    "Where CI runs, a missing compiler is a failure."
    try:
        expect_compiler()
    except RuntimeError as missing:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(missing))


def test_without_a_compiler_ci_fails_and_others_skip(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(RuntimeError, match="needs a C"):
        compiler_or_skip()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="needs a C"):
        compiler_or_skip()


@pytest.mark.nightly
@plain_only
@torch.no_grad()
def test_the_compiled_step_equals_the_model():
    "Compiled by the real compiler, once."
    compiler_or_skip()
    tiny = GPT(GPTConfig(vocab_size=31, d_model=16, n_layers=1, n_heads=4,
                         max_len=24, dropout=0.0)).eval()
    ids = draw_ids(2, 12, high=31)
    step = compiled_step(tiny)
    before = counters["stats"]["unique_graphs"]
    pos = RAGGED[:2]
    cache = fixed_cache(tiny, 2)
    parts = [tiny(ids[:, :6], pos=pos[:, :6], cache=cache)]
    at = [x.data_ptr() for x in cache.layers[0].kept]
    parts += [step(ids[:, i:i + 1], cache=cache) for i in range(6, 12)]
    assert [x.data_ptr() for x in cache.layers[0].kept] == at
    assert counters["stats"]["unique_graphs"] - before == 1
    close(torch.cat(parts, 1)[pos >= 0], tiny(ids, pos=pos)[pos >= 0])
