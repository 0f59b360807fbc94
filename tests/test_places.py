"""Caches of fixed shape: as the growing ones, and one program for every step."""

import copy
import os

import pytest
import torch
from torch._dynamo.utils import counters

from helpers import close, draw_ids, plain_only
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
from tformer.attention import DynamicLayerCache
from tformer.generate import generate
from tformer.gpt import GPT, GPTConfig
from tformer.places import (
    CompiledModel,
    StaticLayerCache,
    compile_decode_step,
    new_static_cache,
    require_compiler,
)
from tformer.rows import CrossAttentionCache
from tformer.speculate import PrefixedModel

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
        ((3, 4, 1, 4), torch.float32, [[4]], "batch of 3, .* cache of 2"),
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


# one program


@plain_only
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row, id=row.name, marks=[pytest.mark.nightly] if row.name != "GPT" else []
        )
        for row in ROWS
        if row.name in ("Seq2Seq", "GPT", "Qwen3")
    ],
)
@torch.no_grad()
def test_one_graph_for_every_token(row):
    "Rows of different lengths, and the next text; no compiler at work."
    model = row.make()
    ids = row.ids(3, 12)
    step = compile_decode_step(model, backend="eager")
    for text in range(2):
        cache = new_static_cache(model, 3)
        row.run(model, ids[:, :5], positions=RAGGED[:, :5], cache=cache)
        before = counters["stats"]["unique_graphs"]
        found = [step(ids[:, i : i + 1], cache=cache) for i in range(5, 9)]
        positions = RAGGED[:, 9:10]  # positions may be given
        found.append(step(ids[:, 9:10].int(), cache=cache, positions=positions))
        cache.select(torch.tensor([2, 1, 0]))
        cache.crop(torch.tensor([4, 6, 10]))
        cache.set_rows(torch.tensor([1]), _copy_of(cache, 0))
        step(ids[:, :1], cache=cache)
        made = counters["stats"]["unique_graphs"] - before
        assert made == (1 if text == 0 else 0)
        whole = row.run(model, ids, positions=RAGGED)
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
    step = compile_decode_step(model, backend="eager")
    cache = new_static_cache(model, 2)
    model(ids[:, :3], cache=cache)
    for i in range(3, 6):
        step(ids[:, i : i + 1], cache=cache)
        first, *others = [layer.key_positions for layer in cache.layers]
        assert all(at is first for at in others) and first.upper_bound == i + 1
        model(ids[:, i : i + 1], cache=cache)  # both in turn
        cache.crop(i + 1)


@plain_only
@pytest.mark.parametrize(
    "act, says",
    [
        (
            lambda m, s: s(GPT_ROW.ids(2, 1), cache=m.new_cache(2)),
            "needs new_static_cache.* has a DynamicLayerCache",
        ),
        (
            lambda m, s: s(GPT_ROW.ids(2, 1), cache=new_static_cache(m, 2)),
            "the cache is empty: let the model read a prompt first",
        ),
        (lambda m, s: s(GPT_ROW.ids(2, 1), cache=None), "cache must be KVCache"),
        (
            lambda m, s: s(GPT_ROW.ids(2, 2), cache=_read(m, 3)),
            r"ids must be of shape \(b, 1\)",
        ),
        (lambda m, s: s(GPT_ROW.ids(3, 1), cache=_read(m, 3)), "do not fit"),
        (
            lambda m, s: s(
                GPT_ROW.ids(3, 1), cache=_read(m, 3), positions=torch.tensor([[3]])
            ),
            "3 meets a cache of 2",
        ),
        (lambda m, s: _read(m, 3).crop(torch.tensor([1, 2, 3])), "n must be"),
        (
            lambda m, s: new_static_cache(PrefixedModel(m, [[1, 2]]), 2),
            "caches of PrefixedModel begin with 2 tokens",
        ),
        (
            lambda m, s: s(GPT_ROW.ids(2, 1), cache=_read(m, MAX_LEN)),
            "21 tokens, beyond max_len 20",
        ),
        (
            lambda m, s: s(
                GPT_ROW.ids(2, 1), cache=_read(m, 3), positions=torch.tensor([[20]])
            ),
            "21 tokens, beyond",
        ),
        (
            lambda m, s: s(
                GPT_ROW.ids(2, 1), cache=_read(m, 3), positions=torch.tensor([[3, 4]])
            ),
            "do not fit",
        ),
    ],
)
def test_what_no_program_can_refuse_is_refused_before(act, says):
    model = GPT_ROW.make()
    with pytest.raises(ValueError, match=says), torch.no_grad():
        act(model, compile_decode_step(model, backend="eager"))


def _read(model, n):
    cache = new_static_cache(model, 2)
    model(GPT_ROW.ids(2, n), cache=cache)
    return cache


@plain_only
def test_a_step_takes_no_gradients():
    model = GPT_ROW.make()
    with torch.no_grad():
        cache = _read(model, 3)
    step = compile_decode_step(model, backend="eager")
    assert not step(GPT_ROW.ids(2, 1), cache=cache).requires_grad
    assert not any(x.requires_grad for layer in cache.layers for x in layer.tensors)


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

    held = [(c.length, c.key_positions) for c in cache.layers]
    with pytest.raises(RuntimeError, match="on fire"):
        compile_decode_step(model, backend=breaks)(ids[:, 3:], cache=cache)
    assert [(c.length, c.key_positions) for c in cache.layers] == held
    close(
        model(ids[:, 3:], cache=cache),
        model(torch.cat([GPT_ROW.ids(2, 3), ids[:, 3:]], 1))[:, 3:],
    )


@pytest.mark.nightly
@plain_only
@torch.no_grad()
@torch._dynamo.config.patch(recompile_limit=2)
def test_more_models_than_pytorch_recompiles_for():
    "Each step is counted for itself."
    tiny = GPTConfig(
        vocab_size=5, d_model=4, n_layers=1, n_heads=1, max_len=4, dropout=0.0
    )
    for seed in range(3):
        model = GPT(tiny).eval()
        cache = new_static_cache(model, 1)
        ids = draw_ids(1, 2, high=5, seed=seed)
        model(ids[:, :1], cache=cache)
        step = compile_decode_step(model, backend="eager")
        close(step(ids[:, 1:], cache=cache), model(ids)[:, 1:])


# the compiler


def test_a_missing_compiler_is_named_in_one_sentence(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    for call in (require_compiler, lambda: compile_decode_step(GPT_ROW.make())):
        with pytest.raises(
            RuntimeError,
            match="^torch.compile needs a C.. "
            "compiler, and there is no no-such-compiler: "
            r"install it \(apt-get install g..\), or name "
            "another in CXX$",
        ):
            call()
    monkeypatch.setenv("CXX", "sh")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": "/none"})
    with pytest.raises(RuntimeError, match=r"there is no /none/Python\.h"):
        require_compiler()


@pytest.mark.nightly
@plain_only
@causal
def test_a_compiled_model_is_written_with(row):
    "Ragged prompts, rows that stop and stay, a memory: as by the model."
    model = row.make().double()
    more = {}
    if row.source:
        with torch.no_grad():
            more = dict(encoder_hidden_states=model.encode(row.ids(3, 7, seed=9)))
    compiled = CompiledModel(model, backend="eager")
    asked = dict(
        prompts=[[3, 4, 5], [6], [7, 8]],
        max_new_tokens=9,
        drop_finished=False,
        stop=generate(model, [[3, 4, 5]] * 3, max_new_tokens=4, **more)[0].ids[-1:],
        **more,
    )
    steps = []
    step = compiled.step
    compiled.step = lambda *a, **how: steps.append(1) or step(*a, **how)
    for ours, text in zip(
        generate(compiled, **asked), generate(model, **asked), strict=True
    ):
        assert (ours.ids, ours.finish_reason) == (text.ids, text.finish_reason)
        assert ours.log_probs == pytest.approx(text.log_probs, abs=1e-9)
    assert len(steps) >= 3
    alone = compiled(
        row.ids(2, 1),
        **(
            {"encoder_hidden_states": more["encoder_hidden_states"][:2]} if more else {}
        ),
    )
    assert len(steps) <= 8 and alone.shape == (2, 1, VOCAB)


def compiler_or_skip():
    "Where CI runs, a missing compiler is a failure."
    try:
        require_compiler()
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
    tiny = GPT(
        GPTConfig(
            vocab_size=31, d_model=16, n_layers=1, n_heads=4, max_len=24, dropout=0.0
        )
    ).eval()
    ids = draw_ids(2, 12, high=31)
    step = compile_decode_step(tiny)
    before = counters["stats"]["unique_graphs"]
    positions = RAGGED[:2]
    cache = new_static_cache(tiny, 2)
    parts = [tiny(ids[:, :6], positions=positions[:, :6], cache=cache)]
    at = [x.data_ptr() for x in cache.layers[0].tensors]
    parts += [step(ids[:, i : i + 1], cache=cache) for i in range(6, 12)]
    assert [x.data_ptr() for x in cache.layers[0].tensors] == at
    assert counters["stats"]["unique_graphs"] - before == 1
    close(
        torch.cat(parts, 1)[positions >= 0],
        tiny(ids, positions=positions)[positions >= 0],
    )
