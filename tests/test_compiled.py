"""One program for every step of decoding, and a model that takes it."""

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
)
from tformer.base.runtime import require_compiler
from tformer.inference.compiled import CompiledModel, compile_decode_step
from tformer.inference.generation import generate
from tformer.inference.prefix import PrefixedModel
from tformer.models.gpt import GPT, GPTConfig
from tformer.nn.static_cache import new_static_cache

GPT_ROW = next(row for row in ROWS if row.name == "GPT")


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
            lambda m, s: new_static_cache(PrefixedModel(m, [1, 2]), 2),
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
        stop_token_ids=generate(model, [[3, 4, 5]] * 3, max_new_tokens=4, **more)[
            0
        ].ids[-1:],
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
