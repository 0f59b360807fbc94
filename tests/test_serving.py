"""Texts in rows: each as if it were alone, whatever happens beside it."""

import asyncio
import contextlib
import functools
import gc
import inspect
import re
import signal
import sys
import tracemalloc
import types
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tformer
from helpers import (
    by_day,
    interrupted_at,
    plain_only,
    raise_interrupt,
    send_ctrl_c,
)
from models import MAX_LEN, ROWS, VOCAB
from test_paged_cache import consistent
from tformer.inference.generation import Completion, generate
from tformer.inference.prefix import PrefixedModel
from tformer.inference.sampler import SamplingParams
from tformer.models.gpt import GPT, GPTConfig
from tformer.serving.engine import Engine, QueueFull
from tformer.serving.executor import StepExecutor
from tformer.serving.requests import Request, RequestHandle, Sequence, SequenceStatus
from tformer.serving.runner import ModelRunner
from tformer.serving.scheduler import (
    SCHEDULING_POLICIES,
    Scheduler,
    first_come_first_served,
    shortest_first,
    similar_length,
)

torch.set_num_threads(1)
DECODERS = [row for row in ROWS if row.causal]


@functools.cache
def model_of(name):
    "In float64, once for all tests."
    row = next(row for row in ROWS if row.name == name)
    return row.make().double()


@functools.cache
def source_of(name, i):
    "What the model reads beside: of another length for each i."
    row = next(row for row in ROWS if row.name == name)
    with torch.no_grad():
        return model_of(name).encode(row.ids(1, 2 + i, seed=i))[0]


@functools.cache
def alone(name, ids, max_new_tokens, stop=(), seed=None, source=None):
    "What generate writes for this request."
    more = (
        {}
        if source is None
        else dict(encoder_hidden_states=source_of(name, source)[None])
    )
    (text,) = generate(
        model_of(name),
        [ids],
        max_new_tokens=max_new_tokens,
        stop_token_ids=stop,
        sampling_params=sampling(seed) and [sampling(seed)],
        **more,
    )
    return text


def sampling(seed):
    return (
        None
        if seed is None
        else SamplingParams(top_k=9, temperature=1.3, repetition_penalty=1.2, seed=seed)
    )


def finished(coroutine):
    "Run in a thread of its own: a browser's loop may run in this one."
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def same(handle, text):
    assert handle.error is None, handle.error
    assert (handle.output_ids, handle.finish_reason) == (text.ids, text.finish_reason)
    assert handle.log_probs == pytest.approx(text.log_probs, abs=1e-9)


def sound(engine):
    "Slots, blocks and the queue fit together."
    for i, handle in enumerate(engine.scheduler.row_owners):
        assert handle is None or (handle.row, handle.finish_reason) == (i, None)
    for handle in engine.scheduler.waiting:
        assert handle.row is None and handle.finish_reason is None
    indices = [t.index for t in engine.scheduler.waiting]
    assert indices == sorted(indices) == [*engine.scheduler.queue]
    if engine.runner.pool is None:
        return
    tables = engine.runner.cache.tables
    consistent(engine.runner.pool, tables)
    for handle, row in zip(engine.scheduler.row_owners, tables.tables, strict=True):
        assert handle is not None or not row


def empty(engine):
    "Nothing is held by anybody."
    sound(engine)
    assert not engine.has_unfinished_requests
    assert all(handle is None for handle in engine.scheduler.row_owners)
    pool = engine.runner.pool
    assert pool is None or pool.num_used_blocks == 0


# --- each text is what it is alone

PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=13).map(tuple)
STOPS = st.sampled_from([(), (), (4,), tuple(range(0, VOCAB, 5))])
ASKED = st.lists(
    st.tuples(
        st.integers(0, 9),  # the step in which it comes
        PROMPTS,
        st.integers(1, 8),
        STOPS,
        st.sampled_from([None, None, 5, 6]),  # greedy, or a seed
        st.sampled_from([None] * 4 + [0, 2, 5]),
    ),
    min_size=1,
    max_size=7,
)
BLOCKS = st.sampled_from(
    [
        {},
        {},
        dict(num_blocks=40, block_size=3),
        dict(num_blocks=7, block_size=3),
        dict(num_blocks=10, block_size=2),
        dict(num_blocks=20, block_size=1),
    ]
)


@pytest.mark.parametrize(
    "name",
    by_day([row.name for row in DECODERS], "Seq2Seq", "Llama, grouped, tied, scaled"),
)
@settings(max_examples=25, deadline=None)
@given(
    asked=ASKED,
    max_num_seqs=st.integers(1, 4),
    blocks=BLOCKS,
    chunk=st.sampled_from([None, 1, 3, 5]),
    policy=st.sampled_from(sorted(SCHEDULING_POLICIES)),
    max_overtakes=st.integers(0, 3),
)
def test_each_text_is_what_it_is_alone(
    name, asked, max_num_seqs, blocks, chunk, policy, max_overtakes
):
    "Arrivals, prompts, stops, policies, chunks, blocks, cancels: any."
    source = next(row for row in ROWS if row.name == name).source
    engine = Engine(
        model_of(name),
        max_num_seqs,
        policy=policy,
        max_prefill_tokens=chunk,
        max_overtakes=max_overtakes,
        **blocks,
    )
    handles = {}
    step = 0
    while len(handles) < len(asked) or engine.has_unfinished_requests:
        for i, (when, ids, max_new_tokens, stop, seed, _) in enumerate(asked):
            if when <= step and i not in handles:
                handles[i] = engine.submit(
                    Request(
                        ids,
                        max_new_tokens,
                        sampling(seed),
                        stop,
                        encoder_hidden_states=source_of(name, i) if source else None,
                    )
                )
        for handle, i in engine.step():
            assert handle.output_ids.count(i)
        sound(engine)
        for i, (when, *_, cancelled) in enumerate(asked):
            if cancelled is not None and step == when + cancelled:
                engine.cancel(handles[i])
                sound(engine)
        step += 1
        assert step < 400, "it never ends"
    empty(engine)
    for i, (_, ids, max_new_tokens, stop, seed, cancelled) in enumerate(asked):
        text = alone(name, ids, max_new_tokens, stop, seed, i if source else None)
        if handles[i].finish_reason == "cancelled":
            n = len(handles[i].output_ids)
            assert cancelled is not None
            assert handles[i].output_ids == text.ids[:n]
        else:
            same(handles[i], text)


def small(**changes):
    torch.manual_seed(1)
    config = (
        dict(
            vocab_size=VOCAB, d_model=16, n_layers=2, n_heads=4, max_len=40, dropout=0.0
        )
        | changes
    )
    model = GPT(GPTConfig(**config)).double().eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model


MODEL = small()
PAGED = dict(num_blocks=40, block_size=4)
HOW = {
    "slots": {},
    "paged": PAGED,
    "chunks": dict(max_prefill_tokens=3),
    "both": PAGED | dict(max_prefill_tokens=3),
}


def ways(*usual):
    "A test of all ways to keep and read prompts; by day of the usual ones."
    return pytest.mark.parametrize("how", by_day(HOW, *usual), indirect=True)


@pytest.fixture
def how(request):
    "The options of an engine, by their name."
    return HOW[request.param]


WAYS = ways(*HOW)


def texts(requests, model=MODEL):
    return [
        generate(
            model,
            [r.prompt_ids],
            max_new_tokens=r.max_new_tokens,
            stop_token_ids=r.stop_token_ids,
            stopping_criteria=r.stopping_criteria,
            sampling_params=[r.sampling_params]
            if isinstance(r.sampling_params, SamplingParams)
            else r.sampling_params,
        )[0]
        for r in requests
    ]


@WAYS
def test_what_a_row_reads_is_never_what_another_reads(how):
    "Long beside short, in the same call and in the same row."
    requests = [
        Request([*range(1, 1 + n)], 3 + n % 5) for n in (30, 1, 2, 17, 1, 9, 33, 4)
    ]
    handles = Engine(MODEL, 3, **how).run(requests)
    for handle, text in zip(handles, texts(requests), strict=True):
        same(handle, text)


def test_a_model_in_training_mode_is_left_as_it_was():
    model = small(dropout=0.5)
    model.train()
    engine = Engine(model, 2)
    (handle,) = engine.run([Request([1, 2, 3], 6)])
    assert model.training and all(m.training for m in model.modules())
    same(handle, texts([Request([1, 2, 3], 6)], small())[0])
    assert torch.is_grad_enabled()


# --- four mistakes that engines have shipped


def reads(engine):
    "How many tokens each call of ``read`` is given."
    seen = []
    read = engine.runner.prefill

    def watched(rows, pieces, starts, **encoder_hidden_states):
        seen.append([len(piece) for piece in pieces])
        return read(rows, pieces, starts, **encoder_hidden_states)

    engine.runner.prefill = watched
    return seen


@pytest.mark.parametrize("n", [4, 8, 9, 11])
def test_a_prompt_that_is_cached_whole_computes_its_last_token(n):
    engine = Engine(MODEL, 2, **PAGED)
    asked = Request([*range(1, n + 1)], 5)
    seen = reads(engine)
    text = texts([asked])[0]
    for _ in range(2):
        (handle,) = engine.run([asked])
        same(handle, text)
    assert seen == [[n], [max(1, n % 4)]]
    both = engine.run([asked, asked])  # side by side: a block is copied
    for handle in both:
        same(handle, text)
    empty(engine)


@pytest.mark.parametrize("seed", [None, 3])
def test_who_was_preempted_and_meets_its_own_blocks_writes_the_same(seed):
    requests = [
        Request([1, 2, 3, 4, 5], 20, sampling(seed)),
        Request([6, 7, 8, 9, 10, 11, 12, 13], 20, sampling(seed)),
    ]
    engine = Engine(MODEL, 2, num_blocks=10, block_size=3)
    handles = [engine.submit(r) for r in requests]
    met = 0
    begin = engine.runner.cache.match_prefix

    def watched(row, ids):
        nonlocal met
        n = begin(row, ids)
        met += bool(engine.scheduler.num_preemptions and n)
        return n

    engine.runner.cache.match_prefix = watched
    while engine.has_unfinished_requests:
        engine.step()
        sound(engine)
    assert engine.scheduler.num_preemptions and met
    for handle, text in zip(handles, texts(requests), strict=True):
        same(handle, text)


def test_who_comes_back_reads_what_it_wrote_and_shares_what_is_there():
    asked = Request([1, 2, 3, 4, 5], 12)
    engine = Engine(MODEL, 2, **PAGED)
    seen = reads(engine)
    handle = engine.submit(asked)
    for _ in range(8):
        engine.step()
    assert len(handle.output_ids) == 8 and handle.sequence.num_computed_tokens == 12
    engine.scheduler.preempt(handle.sequence)
    assert (
        handle.sequence.status is SequenceStatus.WAITING
        and not engine.runner.pool.num_used_blocks
    )
    engine.step()
    assert seen == [[5], [1]]  # 12 of 13 are cached: three blocks
    engine.run()
    # the first time
    assert handle.first_scheduled_step == 1 and handle.steps_waited == 0
    same(handle, texts([asked])[0])


def test_a_block_is_not_shared_before_it_is_filled():
    ids = [*range(1, 17)]
    engine = Engine(MODEL, 2, num_blocks=20, block_size=4, max_prefill_tokens=5)
    first = engine.submit(Request(ids, 6))
    engine.step()
    assert first.sequence.num_computed_tokens == 5
    assert len(engine.runner.pool.hash_to_block) == 1
    second = engine.submit(Request(ids, 6))
    engine.step()
    assert second.sequence.num_computed_tokens == 4
    assert first.sequence.num_computed_tokens == 10
    engine.run()
    for handle in (first, second):
        same(handle, texts([Request(ids, 6)])[0])


@WAYS
def test_who_has_written_nothing_may_still_be_reading(how):
    "And who has written may read again."
    engine = Engine(MODEL, 2, **how | dict(max_prefill_tokens=2))
    short = engine.submit(Request([9], 12))
    long = engine.submit(Request([*range(1, 8)], 5))
    written = []
    for _ in range(4):
        engine.step()
        written.append((len(short.output_ids), len(long.output_ids)))
    assert written == [(1, 0), (2, 0), (3, 0), (4, 1)]
    engine.scheduler.preempt(long.sequence)
    engine.step()
    assert (
        long.sequence.is_prefilling
        and len(long.output_ids) == 1
        and len(short.output_ids) == 5
    )
    engine.run()
    for handle in (short, long):
        same(handle, texts([handle.request])[0])


# --- chunks, policies, fairness


def test_a_long_prompt_holds_nobody_up():
    engine = Engine(MODEL, 2, max_prefill_tokens=4)
    seen = reads(engine)
    short = engine.submit(Request([1, 2], 12))
    engine.step()
    engine.submit(Request([*range(1, 31)], 2))
    for n in range(2, 9):
        engine.step()
        assert len(short.output_ids) == n
    assert [sum(call) for call in seen] == [2] + [4] * 7
    engine.run()


def test_all_live_rows_share_one_call():
    engine = Engine(MODEL, 4)
    calls = []
    hook = MODEL.embed.register_forward_pre_hook(
        lambda part, given: calls.append(tuple(given[0].shape))
    )
    engine.run([Request([1, 2, 3], 5)] * 4)
    hook.remove()
    assert calls == [(4, 3)] + [(4, 1)] * 4


def sequences_of(lengths):
    engine = Engine(MODEL)
    return [engine.submit(Request([1] * n, 1)).sequence for n in lengths]


def test_policies():
    waiting = sequences_of([7, 3, 9, 3])
    assert (
        first_come_first_served(waiting, [])
        == first_come_first_served(waiting, [3])
        == 0
    )
    assert shortest_first(waiting, []) == shortest_first(waiting, [9]) == 1
    assert similar_length(waiting, []) == 0 and similar_length(waiting, [4]) == 1
    assert (
        similar_length(waiting, [3, 8]) == 0 and similar_length(waiting, [3, 20]) == 2
    )


def test_who_was_preempted_has_also_to_read_what_it_wrote():
    engine = Engine(MODEL, 1)
    long = engine.submit(Request([3, 4], 9))
    while len(long.output_ids) < 4:
        engine.step()
    short = engine.submit(Request([5, 6, 7], 9))
    long = long.sequence
    short = short.sequence
    assert shortest_first([long, short], []) == 1
    assert similar_length([short, long], [6]) == 1
    assert similar_length([long, short], [2]) == 1


def test_a_policy_is_told_what_is_left_to_read():
    told = []

    def policy(waiting, beside):
        told.append(beside)
        return 0

    engine = Engine(MODEL, 3, policy=policy, **PAGED)
    asked = Request([*range(1, 10)], 2)
    engine.run([asked])
    engine.run([asked, Request([7] * 5, 2), Request([8], 2)])
    assert told == [(), (), (1,), (1, 5)]  # 8 of 9 are cached


def order(policy, lengths, max_num_seqs=1, **how):
    engine = Engine(MODEL, max_num_seqs, policy=policy, **how)
    handles = [engine.submit(Request([1] * n, 2)) for n in lengths]
    engine.run()
    return sorted(
        range(len(lengths)),
        key=lambda i: (handles[i].first_scheduled_step, i),
    ), engine


def test_who_comes_next():
    lengths = [9, 2, 5, 1, 30, 3]
    assert order("fcfs", lengths)[0] == [0, 1, 2, 3, 4, 5]
    assert order("shortest", lengths)[0] == [3, 1, 5, 2, 0, 4]
    assert order(lambda waiting, beside: len(waiting) - 1, lengths)[0] == [
        5,
        4,
        3,
        2,
        1,
        0,
    ]


def test_like_lengths_waste_less_padding():
    lengths = [20, 2, 19, 3, 18, 1, 21, 2]
    wasted = [
        order(policy, lengths, max_num_seqs=4)[1].runner.num_padding_tokens
        for policy in ("fcfs", "similar_length")
    ]
    assert wasted == [36 + 42, 6 + 4]


@pytest.mark.parametrize("max_overtakes", [0, 1, 3])
def test_nobody_is_overtaken_more_often_than_max_overtakes_allows(max_overtakes):
    engine = Engine(MODEL, 1, policy="shortest", max_overtakes=max_overtakes)
    long = engine.submit(Request([1] * 9, 1))
    others = []
    while long.first_scheduled_step is None:
        others.append(engine.submit(Request([1], 1)))
        engine.step()
        assert len(others) < 20
    engine.run()
    assert (
        sum(t.first_scheduled_step < long.first_scheduled_step for t in others)
        == max_overtakes
    )
    assert long.sequence.times_overtaken == max_overtakes
    assert long.steps_waited == max_overtakes


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), max_size=14),
    max_overtakes=st.integers(0, 4),
    max_num_seqs=st.integers(1, 3),
    policy=st.sampled_from(sorted(SCHEDULING_POLICIES)),
)
def test_the_bound_holds_for_everybody(lengths, max_overtakes, max_num_seqs, policy):
    engine = Engine(
        MODEL,
        max_num_seqs,
        policy=policy,
        max_overtakes=max_overtakes,
        num_blocks=9,
        block_size=3,
    )
    handles = []
    for n in lengths:
        handles.append(engine.submit(Request([n] * n, 2)))
        if n % 2:
            engine.step()
    engine.run()
    assert all(t.sequence.times_overtaken <= max_overtakes for t in handles)
    for i, t in enumerate(handles):
        assert sum(
            other.first_scheduled_step < t.first_scheduled_step
            for other in handles[i + 1 :]
        ) <= (max_overtakes)


# --- blocks run out


def test_the_youngest_gives_way():
    requests = [Request([i] * 4, 14) for i in (1, 2, 3)]
    engine = Engine(MODEL, 3, num_blocks=9, block_size=3)
    handles = [engine.submit(r) for r in requests]
    while engine.has_unfinished_requests:
        inside = engine.scheduler.running
        engine.step()
        gone = [t for t in inside if t.row is None and t.finish_reason is None]
        assert gone == inside[len(inside) - len(gone) :]
        sound(engine)
    assert engine.scheduler.num_preemptions
    for handle, text in zip(handles, texts(requests), strict=True):
        same(handle, text)
    assert handles[0].steps_waited == 0


def test_who_has_ended_waits_no_longer():
    "Also a request that never had a row."
    now = [0.0]
    engine = Engine(MODEL, 1, clock=lambda: now[0])
    first, late, cancelled = (
        engine.submit(Request([1, 2], max_new_tokens=12, timeout=timeout))
        for timeout in (None, 5.0, None)
    )
    for waited in range(3):
        assert (late.steps_waited, cancelled.steps_waited) == (waited, waited)
        engine.step()
    cancelled.cancel()
    refused = engine.submit(Request([], max_new_tokens=2))
    assert refused.finish_reason == "error"
    now[0] = 9.0
    engine.step()  # which begins without a row for it
    assert late.finish_reason == "timeout"
    for _ in range(3):
        handles = first, late, cancelled, refused
        assert [handle.steps_waited for handle in handles] == [0, 4, 3, 0]
        engine.step()


def test_memory_of_a_prefix_is_taken_once():
    prefix = [*range(1, 13)]
    engine = Engine(MODEL, 4, **PAGED)
    engine.run([Request(prefix, 1)])
    requests = [Request([*prefix, i], 4) for i in (1, 2, 3, 4)]
    handles = [engine.submit(r) for r in requests]
    engine.step()
    assert engine.runner.pool.num_used_blocks == 3 + 4
    engine.run()
    for handle, text in zip(handles, texts(requests), strict=True):
        same(handle, text)


# --- whoever fails, fails alone


def raising(ids):
    raise KeyError("x")


def often(ids):
    if len(ids) == 3:
        raise RuntimeError("on\nlines")
    return False


class Nan(nn.Module):
    "A model for which one id is poison, in its own row."

    def __init__(self, poison):
        super().__init__()
        self.model = small()
        self.poison = poison
        self.max_len = 40
        self.new_cache = self.model.new_cache
        with torch.no_grad():
            self.model.embed.weight[poison] = torch.nan
        self.model.lm_head.weight = nn.Parameter(small().embed.weight.detach().clone())

    def forward(self, ids, **how):
        return self.model(ids, **how)


BAD = [
    (dict(prompt_ids=[]), "prompt_ids is empty"),
    (dict(prompt_ids="Once"), "prompt_ids must be one flat row of ids, got 'Once'"),
    (dict(prompt_ids=None), "prompt_ids must be one flat row of ids, got None"),
    (dict(prompt_ids=[1.5]), "prompt_ids must be integers"),
    (dict(prompt_ids=[VOCAB]), f"id {VOCAB} is outside the vocabulary"),
    (dict(prompt_ids=[1, -1]), "id -1 is outside the vocabulary"),
    (dict(prompt_ids=[1] * 41), "43 tokens of prompt and text, beyond max_len 40"),
    (dict(prompt_ids=[1] * 38, max_new_tokens=4), "41 tokens of prompt and text"),
    (dict(max_new_tokens=0), "max_new_tokens must be a whole number of at least 1"),
    (dict(max_new_tokens="5"), "max_new_tokens must be a whole number"),
    (dict(stop_token_ids="end"), "stop_token_ids must be an id or a list.* 'end'"),
    (
        dict(stop_token_ids=raising),
        "stop_token_ids must be an id or a list.* function",
    ),
    (dict(stop_token_ids=-1), "a stop id must be a whole number"),
    (dict(stopping_criteria="end"), "stopping_criteria must be list .* 'end'"),
    (dict(stopping_criteria=[7]), "called with the new ids of a text, got 7"),
    (dict(stopping_criteria=raising), "criterion raised KeyError .* after 1 ids"),
    (
        dict(stopping_criteria=often, max_new_tokens=9),
        "criterion raised RuntimeError .* after 3 ids",
    ),
    (dict(stopping_criteria=lambda ids: None), "criterion must answer True or False"),
    (dict(timeout=0), "timeout must be above 0"),
    (dict(sampling_params=dict(temperature=-1)), "temperature must be"),
    (dict(sampling_params=dict(top_p=1.5)), "top_p must be"),
    (
        dict(sampling_params=dict(top_q=1)),
        "^sampling_params has no setting top_q; its settings are temperature, top_k, .*"
        "allowed_tokens_fn, seed$",
    ),
    (dict(sampling_params={3: 1}), "^sampling_params has no setting 3; its settings"),
    (dict(sampling_params="p"), "must be None, a SamplingParams, .* got str 'p'"),
    (dict(sampling_params=0.7), "sampling_params must be"),
    (dict(sampling_params=SamplingParams(logit_bias={VOCAB: 1.0})), f"{VOCAB}"),
    (
        dict(
            sampling_params=SamplingParams(
                allowed_tokens_fn=lambda ids: torch.zeros(VOCAB).bool()
            )
        ),
        "forbids every id",
    ),
    (dict(sampling_params=SamplingParams(allowed_tokens_fn=raising)), "KeyError: 'x'"),
    (dict(sampling_params=lambda z, ids: 1), "one id for one row, below 47, got 1"),
    (dict(sampling_params=lambda z, ids: torch.tensor([VOCAB])), "below 47, got"),
    (dict(sampling_params=lambda z, ids: torch.tensor([-1])), "below 47, got"),
    (dict(sampling_params=lambda z, ids: torch.tensor([True])), "below 47, got"),
    (
        dict(encoder_attention_mask=torch.ones(3).bool()),
        "encoder_attention_mask without encoder_hidden_states",
    ),
    (dict(encoder_hidden_states="m"), "encoder_hidden_states must be"),
    (
        dict(
            encoder_hidden_states=torch.zeros(3, 16),
            encoder_attention_mask=torch.ones(3),
        ),
        "encoder_attention_mask must be boolean",
    ),
    (
        dict(encoder_hidden_states=torch.zeros(1, 3, 16)),
        "encoder_hidden_states must be of shape",
    ),
    (dict(sampling_params=raising), "TypeError"),
    (
        dict(encoder_hidden_states=torch.zeros(3, 16)),
        "TypeError.*encoder_hidden_states",
    ),
]


@plain_only
@ways("both")
@pytest.mark.parametrize("change, says", BAD)
def test_a_bad_request_fails_alone(change, says, how):
    good = [Request([1, 2, 3], 6), Request([4] * 7, 5, sampling(2)), Request([5], 9)]
    bad = Request(**dict(prompt_ids=[7, 8], max_new_tokens=3) | change)
    engine = Engine(MODEL, 3, **how)
    handles = [engine.submit(r) for r in (*good[:2], bad, good[2])]
    while engine.has_unfinished_requests:
        engine.step()
        sound(engine)
    failed = handles.pop(2)
    assert failed.finish_reason == "error" and "\n" not in failed.error
    with pytest.raises(ValueError, match=says):
        list(failed)
    for handle, text in zip(handles, texts(good), strict=True):
        same(handle, text)
    empty(engine)


@WAYS
def test_nan_of_a_row_is_its_own(how):
    model = Nan(poison=13)
    good = [Request([1, 2, 3], 7), Request([4] * 9, 7), Request([5], 6)]
    engine = Engine(model, 2, **how | dict(num_blocks=9 if "blocks" in how else None))
    for poison in ([13], [1, 2, 13, 4], [6] * 8 + [13]):
        bad = Request(poison, 4)
        handles = [engine.submit(r) for r in (good[0], bad, *good[1:])]
        engine.run()
        failed = handles.pop(1)
        assert failed.error == "the logits hold NaN after 0 new ids"
        for handle, text in zip(handles, texts(good, model), strict=True):
            same(handle, text)
        empty(engine)


def test_a_model_that_raises_while_it_decodes_fails_one():
    model = small()

    def fail(part, given):
        if given[0].shape[1] == 1 and (given[0] == 5).any():
            raise RuntimeError("five is too much")

    requests = [Request([1, 2], 9), Request([3, 4], 9), Request([6, 7], 9)]
    full = [text.ids for text in texts(requests)]
    pick = 5
    swap = full[1][2]
    model.register_forward_pre_hook(fail)
    engine = Engine(model, 3)
    good = [Request([1, 2], 9), Request([6, 7], 9)]

    def choose(logits, ids):
        return torch.tensor([pick if ids.shape[1] == 2 else swap])

    handles = [engine.submit(r) for r in (good[0], Request([3, 4], 9, choose), good[1])]
    engine.run()
    assert handles[1].error == "RuntimeError: five is too much"
    assert len(handles[1].output_ids) == 3
    if not any(5 in ids for ids in (full[0], full[2])):
        for handle, ids in zip(
            (handles[0], handles[2]), (full[0], full[2]), strict=True
        ):
            assert handle.output_ids == ids
    empty(engine)


def test_a_text_needs_no_more_blocks_than_there_are():
    engine = Engine(MODEL, 2, num_blocks=4, block_size=4)
    handles = engine.run([Request([1] * 9, 9), Request([1] * 9, 8)])
    assert handles[0].error == "5 blocks needed, beyond all of them, 4"
    assert handles[1].finish_reason == "length"
    assert (
        Engine(MODEL, 1, max_len=10).run([Request([1] * 9, 3)])[0].error
        == "11 tokens of prompt and text, beyond max_len 10"
    )


# --- a step that raises


@WAYS
def test_an_interrupted_step_is_mended(how):
    "Whatever was under way is read again, and written as it would be."
    once = [1]

    def interrupts(logits, ids):
        if ids.shape[1] == 2 and once:
            once.pop()
            raise KeyboardInterrupt
        return logits.argmax(-1)

    requests = [
        Request([1, 2], 9),
        Request([3], 9, interrupts),
        Request([4] * 5, 9, sampling(3)),
    ]
    engine = Engine(MODEL, 3, **how)
    handles = [engine.submit(r) for r in requests]
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    sound(engine)
    engine.run()
    first, last = texts([requests[0], requests[2]])
    same(handles[0], first), same(handles[2], last)
    assert handles[1].output_ids == texts([Request([3], 9)])[0].ids
    empty(engine)


def interrupt(monkeypatch, place, victim, when):
    "Arrange for one interrupt; return what the victim's request needs for it."
    waiting = [1]

    def once(n):
        if n == when and waiting:
            waiting.pop()
            raise KeyboardInterrupt

    def stop(ids):
        once(len(ids))
        return False

    def sampler(logits, ids):
        once(ids.shape[1] + 1)
        return logits.argmax(-1)

    def around(name, of_handle):
        real = getattr(of_handle, name)

        def interrupted(*args):
            sequence = next(a for a in args if isinstance(a, Sequence))
            if name == "append_token":
                real(*args)  # and then, between two of them
            if sequence.index == victim and args[-1] != "error":
                once(sequence.num_output_tokens)
            return real(*args) if name != "append_token" else True

        monkeypatch.setattr(of_handle, name, interrupted)

    if place == "append":
        around("append_token", Sequence)
    elif place == "finish":
        around("finish", Scheduler)
    return {
        "stop": dict(stopping_criteria=stop),
        "sampler": dict(sampling_params=sampler),
    }.get(place, {})


@ways("both")
@pytest.mark.parametrize("place", ["stop", "sampler", "append", "finish"])
@pytest.mark.parametrize("victim", range(3))
def test_a_step_that_is_interrupted_was_none(how, place, victim, monkeypatch):
    """Texts and generators are as before it, whoever is interrupted where, and are
    then those of ``generate``: no id twice, none too many, no draw lost."""
    n = 9
    when = n if place == "finish" else 5
    requests = [
        Request([1, 2], n, sampling(3)),
        Request([3], n, sampling(4)),
        Request([4] * 5, n, sampling(5)),
    ]
    right = texts(requests)
    more = interrupt(monkeypatch, place, victim, when)
    if more:
        old = requests[victim]
        requests[victim] = Request(
            old.prompt_ids, n, **dict(sampling_params=old.sampling_params) | more
        )
        if place == "sampler":
            (right[victim],) = texts([Request(old.prompt_ids, n)])
    engine = Engine(MODEL, 3, **how)
    handles = [engine.submit(r) for r in requests]

    def look():
        return [
            (
                [*t.output_ids],
                [*t.log_probs],
                getattr(t.sequence.sampler, "row_states", None)
                and t.sequence.sampler.row_states[0][1].get_state().tolist(),
            )
            for t in handles
            if t.finish_reason is None
        ]

    interrupts = 0
    while engine.has_unfinished_requests:
        before = look()
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
            assert look() == before[len(before) - len(look()) :]
            sound(engine)
    assert interrupts == 1
    for handle, text in zip(handles, right, strict=True):
        same(handle, text)
    empty(engine)


@WAYS
def test_what_a_broken_step_had_comes_with_the_next_one(how):
    "Who collects what ``step`` returns has the whole text."
    waiting = [1]

    def stop(ids):
        if len(ids) == 1 and waiting:
            waiting.pop()
            raise KeyboardInterrupt
        return False

    engine = Engine(MODEL, 3, **how)
    found = {}
    handles = [engine.submit(Request([1, 2], 8))]
    for i in range(30):
        if i == 2:
            handles.append(engine.submit(Request([3, 4], 5, stopping_criteria=stop)))
        try:
            for handle, token in engine.step():
                found.setdefault(handle, []).append(token)
        except KeyboardInterrupt:
            pass
    assert not waiting and found == {t: t.output_ids for t in handles}


@WAYS
def test_a_call_that_fails_at_its_end_fails_one(how):
    "The cache has moved on by then; it goes back."
    model = small()

    def late(part, given, out):
        if given[0].shape[1] == 1 and (given[0] == 5).any():
            raise RuntimeError("five")

    model.register_forward_hook(late)
    good = [Request([1, 2], 6), Request([6, 7], 6)]
    assert not any(5 in text.ids for text in texts(good))
    engine = Engine(model, 3, **how)
    handles = [
        engine.submit(r)
        for r in (
            good[0],
            Request([3, 4], 6, lambda z, ids: torch.tensor([5])),
            good[1],
        )
    ]
    engine.run()
    assert handles[1].error == "RuntimeError: five"
    same(handles[0], texts(good)[0]), same(handles[2], texts(good)[1])
    empty(engine)


def test_nobody_steps_within_a_step():
    engine = Engine(MODEL, 2)
    other = engine.submit(Request([1, 2], 6))

    def steps(ids):
        return bool(list(other))

    bad = engine.submit(Request([3], 6, stopping_criteria=steps))
    engine.run()
    assert "a step is under way" in bad.error
    same(other, texts([Request([1, 2], 6)])[0])


def test_a_handle_belongs_to_its_engine():
    one = Engine(MODEL, 1)
    other = Engine(MODEL, 1)
    handle = one.submit(Request([1], 3))
    mine = other.submit(Request([2], 3))
    other.step()
    with pytest.raises(ValueError, match="submitted to another engine"):
        other.cancel(handle)
    other.run(), one.run()
    assert mine.finish_reason == handle.finish_reason == "length"


@plain_only
@pytest.mark.parametrize("answer", [2, -1, None, "first", 0.0])
def test_a_policy_that_answers_nonsense(answer):
    engine = Engine(MODEL, 1, policy=lambda waiting, beside: answer)
    handles = [engine.submit(Request([1], 2)) for _ in range(2)]
    for _ in range(2):
        with pytest.raises(ValueError, match="an index below 2, got"):
            engine.step()
    sound(engine)
    engine.scheduler.policy = lambda waiting, beside: len(waiting) - 1
    engine.run()
    assert [t.finish_reason for t in handles] == ["length"] * 2


def test_a_policy_cannot_change_the_queue():
    engine = Engine(
        MODEL,
        1,
        policy=lambda waiting, beside: (
            (isinstance(waiting, list) and waiting.clear()) or 0
        ),
    )
    handles = engine.run([Request([i], 2) for i in (1, 2, 3)])
    assert [t.finish_reason for t in handles] == ["length"] * 3


@pytest.mark.parametrize("how", [{}, PAGED])
@pytest.mark.parametrize("steps", [1, 3, 6])
def test_weights_that_change_in_flight_are_the_only_ones_afterwards(how, steps):
    "What was computed with the old ones is neither read on nor found later."
    model = small()
    asked = Request([*range(1, 10)], 12)
    late = Request([*range(2, 12)], 3)
    engine = Engine(model, 2, **how)
    first, _ = [engine.submit(r) for r in (asked, late)]
    for _ in range(steps):
        engine.step()
    before = list(first.output_ids)
    with torch.no_grad():
        model.blocks[0].attention.sublayer.qkv_proj.weight.mul_(1.3)
    engine.reset_prefix_cache()
    engine.run()
    new = len(first.output_ids) - len(before)
    assert before and new and first.output_ids[: len(before)] == before
    (text,) = texts([Request([*asked.prompt_ids, *before], new)], model)
    assert first.output_ids[len(before) :] == text.ids
    assert first.log_probs[len(before) :] == pytest.approx(text.log_probs, abs=1e-9)
    handles = engine.run([asked, late])
    for handle, text in zip(handles, texts([asked, late], model), strict=True):
        same(handle, text)
    empty(engine)


def test_blocks_from_before_a_reset_are_not_found_again():
    "Not even where the runner is reset alone, below requests in flight."
    model = small()
    asked = Request([*range(1, 10)], 12)
    engine = Engine(model, 2, **PAGED)
    engine.submit(asked)
    for _ in range(3):
        engine.step()
    with torch.no_grad():
        model.blocks[0].attention.sublayer.qkv_proj.weight.mul_(1.3)
    engine.runner.reset_prefix_cache()
    engine.run()
    assert not engine.runner.pool.hash_to_block
    (handle,) = engine.run([asked])
    same(handle, texts([asked], model)[0])


def test_no_reset_during_a_step():
    model = small()
    engine = Engine(model, 2, **PAGED)
    (handle,) = engine.run(
        [Request([1], 2, stopping_criteria=lambda ids: engine.reset_prefix_cache())]
    )
    assert "a step is under way" in handle.error


@pytest.mark.parametrize("how", [{}, PAGED])
def test_a_cancel_from_another_thread_waits_for_the_end_of_the_step(how):
    "In the middle of the model's call, for each request; nobody else's text changes."
    requests = [Request([1 + i, 2, 3], 8) for i in range(3)]
    right = texts(requests, small())
    for victim in range(3):
        model = small()
        engine = Engine(model, 3, **how)
        handles = [engine.submit(r) for r in requests]
        engine.step()
        engine.step()

        def from_outside(*_):
            with ThreadPoolExecutor(1) as pool:
                pool.submit(engine.cancel, handles[victim]).result()
            assert handles[victim].finish_reason is None

        hook = model.register_forward_pre_hook(from_outside)
        engine.step()
        hook.remove()
        assert handles[victim].finish_reason == "cancelled"
        engine.run()
        for i, (handle, text) in enumerate(zip(handles, right, strict=True)):
            if i != victim:
                same(handle, text)
        empty(engine)


def test_a_prefixed_model_is_refused_with_blocks():
    "Their cache would lose the prefix, and every request would fail."
    model = PrefixedModel(small(), [5, 6, 7])
    with pytest.raises(ValueError, match="begin with 3 tokens, and blocks begin empty"):
        Engine(model, 2, **PAGED)


def test_old_prefixes_are_forgotten_where_weights_are_others():
    model = small()
    asked = Request([*range(1, 10)], 5)
    engine = Engine(model, 2, **PAGED)
    engine.run([asked])
    with torch.no_grad():
        model.blocks[0].attention.sublayer.qkv_proj.weight.mul_(1.3)
    engine.reset_prefix_cache()
    pool = engine.runner.pool
    assert pool.num_free_blocks == pool.num_blocks and not pool.hash_to_block
    (handle,) = engine.run([asked])
    same(handle, texts([asked], model)[0])


def test_padding_of_an_encoder_output_is_not_attended_to():
    row = next(row for row in ROWS if row.source)
    model = model_of(row.name)
    memory = source_of(row.name, 4)
    padded = torch.cat([memory, 9 * torch.ones(3, memory.shape[1]).double()])
    keep = torch.arange(len(padded)) < len(memory)
    plain, masked, _ = Engine(model, 3).run(
        [
            Request([1], 6, encoder_hidden_states=memory),
            Request([1], 6, encoder_hidden_states=padded, encoder_attention_mask=keep),
            Request([1], 6, encoder_hidden_states=source_of(row.name, 0)),
        ]
    )
    assert masked.output_ids == plain.output_ids
    assert masked.log_probs == pytest.approx(plain.log_probs, abs=1e-9)


# --- ends, queue, time


def test_ends():
    asked = Request([5], 8)
    full = texts([asked])[0].ids
    engine = Engine(MODEL, 2)
    by_id, by_function, by_length = engine.run(
        [
            Request([5], 8, stop_token_ids=full[4]),
            Request([5], 8, stopping_criteria=lambda ids: len(ids) == 3),
            asked,
        ]
    )
    cut = full.index(full[4])
    assert (by_id.output_ids, by_id.finish_reason) == (full[:cut], "stop")
    assert (by_function.output_ids, by_function.finish_reason) == (full[:3], "stop")
    assert (by_length.output_ids, by_length.finish_reason) == (full, "length")


def test_a_full_queue_pushes_back():
    engine = Engine(MODEL, 1, max_queued_requests=2)
    kept = [engine.submit(Request([1], 3)) for _ in range(2)]
    with pytest.raises(QueueFull, match="2 requests wait already"):
        engine.submit(Request([1], 3))
    engine.step()
    kept.append(engine.submit(Request([1], 3)))
    with pytest.raises(QueueFull):
        engine.submit(Request([1], 3))
    engine.run()
    assert [t.finish_reason for t in kept] == ["length"] * 3
    handles = Engine(MODEL, 1, max_queued_requests=2).run([Request([1], 2)] * 7)
    assert [t.finish_reason for t in handles] == ["length"] * 7


@WAYS
def test_time_outs_and_cancels(how):
    now = [0.0]
    engine = Engine(MODEL, 1, clock=lambda: now[0], **how)
    requests = [
        Request([1, 2], 30),
        Request([3], 9, timeout=4.0),
        Request([4], 9, timeout=9.0),
        Request([5], 9),
    ]
    handles = [engine.submit(r) for r in requests]
    for _ in range(5):
        now[0] += 1
        engine.step()
        sound(engine)
    assert (handles[1].finish_reason, handles[1].output_ids) == ("timeout", [])
    engine.cancel(handles[0])
    assert handles[0].finish_reason == "cancelled" and handles[0].sequence.row is None
    engine.step()
    now[0] = 8.9
    engine.step()
    assert handles[2].finish_reason is None
    now[0] = 9.0
    engine.step()
    assert handles[2].finish_reason == "timeout" and len(handles[2].output_ids) == 2
    with pytest.raises(TimeoutError, match="out of time after 2 ids"):
        list(handles[2])
    engine.cancel(handles[2])
    assert handles[2].finish_reason == "timeout" and handles[2].sequence.row is None
    engine.run()
    same(handles[3], texts(requests)[3])
    empty(engine)


def test_a_stop_function_may_cancel_others():
    engine = Engine(MODEL, 3, max_prefill_tokens=2)
    handles = []

    def stop(ids):
        for handle in handles[1:]:
            engine.cancel(handle)
        return False

    handles += [
        engine.submit(r)
        for r in (
            Request([1], 4, stopping_criteria=stop),
            Request([2], 4),
            Request([3, 4, 5, 6], 4),
            Request([7], 4),
        )
    ]
    engine.run()
    assert [t.finish_reason for t in handles] == ["length"] + ["cancelled"] * 3
    assert not any(t.output_ids for t in handles[1:])
    empty(engine)


def test_a_handle_is_iterated():
    engine = Engine(MODEL, 2)
    requests = [Request([1, 2], 6), Request([3], 9)]
    first, second = [engine.submit(r) for r in requests]
    expected = texts(requests)
    assert [*second] == expected[1].ids and first.output_ids == expected[0].ids
    assert [*first] == expected[0].ids and [*first] == [*first]
    assert "2 + 6 ids, length" in repr(first)
    some = engine.submit(Request([1, 2], 6))
    reader = iter(some)
    assert next(reader) == expected[0].ids[0] and some.finish_reason is None
    assert "on its way" in repr(some)


def test_streams_side_by_side():
    requests = [Request([i] * i, 3 + i) for i in range(1, 7)]
    engine = Engine(MODEL, 2, **PAGED)
    steps = Engine(MODEL, 2, **PAGED)
    steps.run(requests)

    async def collect(request):
        return [i async for i in engine.submit(request)]

    async def main():
        return await asyncio.gather(*map(collect, requests))

    found = finished(main())
    assert found == [text.ids for text in texts(requests)]
    assert engine.steps <= steps.steps + 1  # each step is for all
    empty(engine)


def test_a_stream_that_is_cancelled_leaves():
    engine = Engine(MODEL, 2, **PAGED)
    seen = []

    async def follow(request, into):
        async for i in engine.submit(request):
            into.append(i)

    async def main():
        other = []
        long = asyncio.create_task(follow(Request([1, 2], 30), seen))
        rest = asyncio.create_task(follow(Request([3], 12), other))
        while len(seen) < 4:
            await asyncio.sleep(0)
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        assert engine.scheduler.row_owners.count(None) == 1
        await rest
        return other

    assert finished(main()) == texts([Request([3], 12)])[0].ids
    assert len(seen) < 8
    empty(engine)
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        finished(follow(Request([], 3), seen))


# --- a step looks at what runs


class CountedQueue(OrderedDict):
    "Counts what is taken out of it by walking along it."

    num_visited = 0

    def _counted(self, iterator):
        for x in iterator:
            CountedQueue.num_visited += 1
            yield x

    def __iter__(self):
        return self._counted(super().__iter__())

    def values(self):
        return self._counted(super().values())

    def items(self):
        return self._counted(super().items())


def work_of_steps(monkeypatch, num_waiting, policy, num_steps, timeout):
    "Reads of the attributes of waiting sequences, and visits, in each step."
    engine = Engine(MODEL, 2, policy=policy, max_queued_requests=10_000)
    engine.scheduler.queue = CountedQueue()
    for _ in range(2):
        engine.submit(Request([1, 2], num_steps - 2, timeout=timeout))
    engine.step()
    for _ in range(num_waiting):
        engine.submit(Request([1, 2, 3], 2, timeout=timeout))
    reads = [0]
    plain = Sequence.__getattribute__

    def counted(self, name):
        reads[0] += plain(self, "row") is None
        return plain(self, name)

    found = []
    with monkeypatch.context() as m:
        m.setattr(Sequence, "__getattribute__", counted)
        for _ in range(num_steps):
            reads[0] = 0
            CountedQueue.num_visited = 0
            engine.step()
            found.append(reads[0] + CountedQueue.num_visited)
    sound(engine)
    return found


@pytest.mark.parametrize("timeout", [None, 900.0])
@pytest.mark.parametrize("policy", ["fcfs", "shortest"])
def test_a_step_does_not_look_at_those_who_wait(monkeypatch, policy, timeout):
    "First come, first served never; another policy where a slot is free."
    few = work_of_steps(monkeypatch, 5, policy, 8, timeout)
    many = work_of_steps(monkeypatch, 500, policy, 8, timeout)
    # the two that run end in the fifth of these steps, those after them in the seventh
    if policy == "fcfs":
        assert few == many and max(many) < 200
    else:
        admits = [b > a for a, b in zip(few, many, strict=True)]
        assert admits == [False] * 5 + [True, False, True]
        assert max(many) < 12 * 500


def test_who_timed_out_or_left_is_not_kept():
    "Neither in the queue nor among the deadlines."
    now = [0.0]
    engine = Engine(MODEL, 1, clock=lambda: now[0], max_queued_requests=8)
    engine.submit(Request([1], 39, timeout=1e9))
    for i in range(30):
        handle = engine.submit(Request([2], 3, timeout=1e6 + i))
        (engine.cancel if i % 2 else engine.scheduler.finish)(
            *((handle,) if i % 2 else (handle.sequence, "length"))
        )
        engine.step()
        assert len(engine.scheduler.deadlines) <= 2 * (1 + 1)
    assert engine.scheduler.waiting == []


@given(timeouts=st.lists(st.one_of(st.none(), st.integers(1, 9)), max_size=9))
@settings(max_examples=40, deadline=None)
def test_each_times_out_at_its_own_time(timeouts):
    "Whatever the order in which they came, waiting or running."
    now = [0.0]
    engine = Engine(MODEL, 2, clock=lambda: now[0])
    handles = [
        engine.submit(Request([1], 30, timeout=t and float(t))) for t in timeouts
    ]
    for _ in range(10):
        now[0] += 1
        engine.step()
        sound(engine)
        for handle, timeout in zip(handles, timeouts, strict=True):
            late = timeout is not None and now[0] >= timeout
            assert (handle.finish_reason == "timeout") == late


def test_ids_are_appended_to_one_list():
    "Neither copied for each token nor kept twice."
    engine = Engine(MODEL, 2, **PAGED)
    handle = engine.submit(Request([1, 2, 3], 9))
    ids = handle.sequence.all_ids
    engine.run()
    assert handle.sequence.all_ids is ids
    assert ids == handle.prompt_ids + handle.output_ids and len(ids) == 12


# --- what a caller holds


@WAYS
def test_a_result_is_what_generate_returns(how):
    requests = [Request([1, 2], 6), Request([3] * 7, 9, sampling(4))]
    first, second = [Engine(MODEL, 2, **how).submit(r) for r in requests]
    for handle, text in zip((second, first), reversed(texts(requests)), strict=True):
        result = handle.result()
        assert isinstance(result, Completion)
        assert (result.ids, result.finish_reason) == (text.ids, text.finish_reason)
        assert result.log_probs == pytest.approx(text.log_probs, abs=1e-9)
        assert handle.result() == result


def test_a_result_raises_what_went_wrong():
    now = [0.0]
    engine = Engine(MODEL, 1, clock=lambda: now[0])
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        engine.submit(Request([], 3)).result()
    late = engine.submit(Request([1], 9, timeout=2.0))
    engine.step()
    now[0] = 5.0
    with pytest.raises(TimeoutError, match="out of time after 1 ids"):
        late.result()
    left = engine.submit(Request([1], 9))
    engine.step()
    left.cancel()
    assert (left.result().finish_reason, len(left.result().ids)) == ("cancelled", 1)


def test_a_result_that_is_interrupted_may_be_asked_for_again():
    once = [1]

    def stop(ids):
        if len(ids) == 3 and once:
            once.pop()
            raise KeyboardInterrupt
        return False

    handle = Engine(MODEL, 1).submit(Request([1, 2], 6, stopping_criteria=stop))
    with pytest.raises(KeyboardInterrupt):
        handle.result()
    assert handle.result().ids == texts([Request([1, 2], 6)])[0].ids


def test_what_a_handle_shows_is_documented_and_typed():
    shown = {name: x for name, x in vars(RequestHandle).items() if type(x) is property}
    assert {"request", "output_ids", "finish_reason", "error"} <= {*shown}
    for name, one in shown.items():
        assert inspect.isfunction(one.fget) and one.fget.__doc__, name
        assert "return" in one.fget.__annotations__, name


def test_what_a_handle_shows_cannot_be_written_through():
    handle = Engine(MODEL, 1).submit(Request([1, 2], 6))
    handle.result()
    for name in ("output_ids", "log_probs", "prompt_ids"):
        getattr(handle, name).clear()
    same(handle, texts([Request([1, 2], 6)])[0])
    assert handle.prompt_ids == [1, 2]


def test_a_sequence_has_a_status():
    engine = Engine(MODEL, 1)
    sequences = [engine.submit(Request([i], 2)).sequence for i in (1, 2)]
    waiting, running, finished = SequenceStatus
    seen = [[t.status for t in sequences]]
    for _ in range(4):
        engine.step()
        seen.append([t.status for t in sequences])
    assert seen == [
        [waiting, waiting],
        [running, waiting],
        [finished, waiting],
        [finished, running],
        [finished, finished],
    ]


# --- loops that break off


def break_off(way, handle, n=2):
    "Read n ids of a handle with `for` or `async for`, and leave the loop like this."

    def leaves(i):
        if i == n and way == "break":
            return True
        if i == n and way == "exception":
            raise KeyError("enough")
        return False

    def loop():
        # a name for it only where it is needed: a traceback keeps local variables
        reader = iter(handle) if way == "close" else None
        for i, _ in enumerate(reader or handle, 1):
            if i == n and way == "close":
                reader.close()
            if leaves(i):
                break

    async def aloop():
        reader = aiter(handle) if way == "close" else None
        i = 0
        async for _ in reader or handle:
            i += 1
            if i == n and way == "close":
                await reader.aclose()
            if i == n and way == "cancelled":
                asyncio.current_task().cancel()
            if leaves(i):
                break

    return loop, aloop


@pytest.mark.parametrize("is_async", [False, True], ids=["for", "async for"])
@pytest.mark.parametrize("way", ["break", "exception", "close", "cancelled"])
@pytest.mark.parametrize("how", [{}, PAGED])
def test_a_loop_that_breaks_off_cancels_its_request(way, is_async, how):
    "In both kinds of loop, and only its own."
    if way == "cancelled" and not is_async:
        pytest.skip("a task is cancelled in an async for")
    engine = Engine(MODEL, 2, **how)
    other = engine.submit(Request([3, 4], 9))
    handle = engine.submit(Request([1, 2], 9))
    loop, aloop = break_off(way, handle)
    errors = {"exception": KeyError, "cancelled": asyncio.CancelledError}
    try:
        finished(aloop()) if is_async else loop()
    except (KeyError, asyncio.CancelledError) as error:
        assert isinstance(error, errors[way])
    else:
        assert way not in errors
    assert handle.finish_reason == "cancelled" and handle.sequence.row is None
    assert handle.output_ids == texts([handle.request])[0].ids[:2]
    engine.run()
    same(other, texts([other.request])[0])
    empty(engine)


@pytest.mark.parametrize("way", ["break", "exception", "close"])
def test_another_reader_reads_on(way):
    "A loop that breaks off truncates nobody else's, whichever kind they are."
    engine = Engine(MODEL, 2)
    text = texts([Request([1, 2], 9)])[0].ids
    handle = engine.submit(Request([1, 2], 9))
    reader = iter(handle)
    assert next(reader) == text[0]
    loop, aloop = break_off(way, handle)
    for leave in (loop, lambda: finished(aloop())):
        try:
            leave()
        except KeyError:
            assert way == "exception"
        assert handle.finish_reason is None
    assert [text[0], *reader] == text and handle.finish_reason == "length"
    assert [*handle] == text


def test_two_tasks_read_one_handle():
    engine = Engine(MODEL, 2)
    handle = engine.submit(Request([1, 2], 10))
    found = {2: [], 99: [], 5: []}

    async def read(n):
        async for i in handle:
            found[n].append(i)
            if len(found[n]) == n:
                break

    async def main():
        await asyncio.gather(*map(read, found))

    finished(main())
    text = texts([Request([1, 2], 10)])[0].ids
    assert [*found.values()] == [text[:2], text, text[:5]]
    assert handle.finish_reason == "length"


def test_the_last_of_two_tasks_that_leave_cancels():
    engine = Engine(MODEL, 2)
    handle = engine.submit(Request([1, 2], 10))

    async def read(n):
        read_ids = []
        async for i in handle:
            read_ids.append(i)
            if len(read_ids) == n:
                return handle.finish_reason

    async def main():
        return await asyncio.gather(read(2), read(4))

    assert finished(main()) == [None, None]
    assert handle.finish_reason == "cancelled" and len(handle.output_ids) == 4
    empty(engine)


def test_an_interrupted_loop_cancels_even_where_its_traceback_is_kept():
    "The frame of the reader is in it, and the reader with it."
    engine = Engine(MODEL, 1)
    once = [1]

    def stop(ids):
        if once:
            once.pop()
            raise KeyboardInterrupt
        return False

    handle = engine.submit(Request([1], 5, stopping_criteria=stop))
    with pytest.raises(KeyboardInterrupt) as kept:
        list(handle)
    assert handle.finish_reason == "cancelled" and kept.tb is not None
    empty(engine)


def test_a_reader_that_has_left_reads_nothing_more():
    handle = Engine(MODEL, 1).submit(Request([1, 2], 5))
    reader = iter(handle)
    next(reader)
    reader.close()
    assert [*reader] == [] and next(reader, "end") == "end"
    again = iter(handle)
    assert len([*again]) == 1 and [*again] == []


# --- waiting for room


def test_tasks_wait_for_room_in_the_queue():
    "First come, first served, and each text as if it were alone."
    requests = [Request([i, i], 2 + i % 3, request_id=i) for i in range(1, 12)]
    engine = Engine(MODEL, 2, max_queued_requests=1)
    order = []
    most = 0

    async def answer(request):
        nonlocal most
        handle = await engine.submit_when_free(request)
        order.append(request.request_id)
        most = max(most, len(engine.scheduler.waiting))
        return [i async for i in handle]

    async def main():
        return await asyncio.gather(*map(answer, requests))

    for _ in range(2):  # the second time in another event loop
        order.clear()
        assert finished(main()) == [text.ids for text in texts(requests)]
        assert order == [r.request_id for r in requests] and most == 1
        empty(engine)


def test_who_waits_for_room_steps_where_nobody_else_does():
    engine = Engine(MODEL, 1, max_queued_requests=2)
    for _ in range(2):
        engine.submit(Request([1], 3))

    async def submit():
        return [await engine.submit_when_free(Request([2], 3)) for _ in range(4)]

    async def main():
        task = asyncio.create_task(submit())
        for _ in range(1000):  # turns of the loop; who never steps waits forever
            await asyncio.sleep(0)
        assert task.done()
        return task.result()

    handles = finished(main())
    assert len(engine.scheduler.waiting) == 2  # no more steps than needed
    engine.run()
    for handle in handles:
        same(handle, texts([handle.request])[0])


def test_a_task_that_is_cancelled_while_it_waits_leaves_nothing_queued():
    engine = Engine(MODEL, 1, max_queued_requests=1)
    long = [engine.submit(Request([1], 9))]
    engine.step()
    long.append(engine.submit(Request([2], 4)))
    submitted = []

    async def submit_one(i):
        submitted.append((i, await engine.submit_when_free(Request([i], 2))))

    async def main():
        tasks = [asyncio.create_task(submit_one(i)) for i in (5, 6, 7)]
        await asyncio.sleep(0)
        tasks[0].cancel()  # the first, which makes the steps
        tasks[1].cancel()  # and one behind it
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return [type(x) for x in results]

    cancelled = asyncio.CancelledError
    assert finished(main()) == [cancelled, cancelled, type(None)]
    assert [i for i, _ in submitted] == [7]
    engine.run()
    assert [t.finish_reason for t in long] == ["length"] * 2
    assert next(engine._numbers) == 3  # nobody else was submitted
    empty(engine)


@plain_only
def test_what_is_no_request_does_not_wait():
    engine = Engine(MODEL, 1, max_queued_requests=1)
    engine.submit(Request([1], 3))
    with pytest.raises(ValueError, match="request must be Request"):
        finished(engine.submit_when_free([1, 2]))
    assert engine.steps == 0


# --- interrupts at any place


class Ticker:
    "Counts the calls of what a step calls, and interrupts some of them."

    def __init__(self, interrupted=(), cancelled=()):
        self.interrupted = {*interrupted}
        self.cancelled = dict(cancelled)  # at which call which request
        self.num_calls = 0
        self.num_interrupts = 0
        self.handles = []
        self.is_on = True

    def __call__(self):
        if not self.is_on:
            return
        self.num_calls += 1
        victim = self.cancelled.get(self.num_calls)
        if victim is not None and self.handles:
            handle = self.handles[victim % len(self.handles)]
            if victim % 2:
                handle.cancel()
            else:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(handle.cancel).result()
        if self.num_calls in self.interrupted:
            self.num_interrupts += 1
            raise KeyboardInterrupt

    def around(self, call):
        "A function that ticks before and after it."

        def ticking(*args, **kwargs):
            self()
            result = call(*args, **kwargs)
            self()
            return result

        return ticking

    def time(self):
        self()
        return 0.0

    def policy(self, name):
        def choose(waiting, admitted_lengths):
            self()
            return SCHEDULING_POLICIES[name](waiting, admitted_lengths)

        return choose

    def request(self, ids, max_new_tokens, stop, kind):
        "A request whose sampler or criterion ticks, as ``kind`` says."

        def criterion(ids):
            self()
            return len(ids) > 1 and sum(ids) % 7 == 0

        def allowed(ids):
            self()
            mask = torch.ones(VOCAB, dtype=torch.bool)
            mask[::3] = False
            return mask

        def third(logits, *_):
            self()
            return logits.topk(3).indices[:, -1]

        more = {
            "greedy": {},
            "seed": dict(sampling_params=sampling(len(ids))),
            "criterion": dict(sampling_params=sampling(3), stopping_criteria=criterion),
            "allowed": dict(
                sampling_params=SamplingParams(
                    seed=5, temperature=1.2, allowed_tokens_fn=allowed
                )
            ),
            "function": dict(sampling_params=third, stopping_criteria=criterion),
        }[kind]
        return Request([*ids], max_new_tokens, stop_token_ids=stop, **more)

    def watch(self, engine):
        "Let the runner and the model tick; return the model's hooks."
        for name in (
            "prefill decode allocate try_reserve cache_full_blocks crop cache_for"
        ).split():
            setattr(engine.runner, name, self.around(getattr(engine.runner, name)))
        model = engine.runner.model
        return [
            model.embed.register_forward_pre_hook(lambda *_: self()),
            model.blocks[-1].register_forward_hook(lambda *_: self()),
        ]


def attempt(call, *args):
    "What it returns, or None where it is interrupted."
    try:
        return call(*args)
    except KeyboardInterrupt:
        return None


def check_interrupted(asked, ticker, policy, resets=(), **how):
    "Run requests whose steps are interrupted; each has the text it has alone."
    engine = Engine(MODEL, policy=ticker.policy(policy), clock=ticker.time, **how)
    ticker.is_on = False
    requests = [ticker.request(*what) for _, *what in asked]
    right = texts(requests)
    hooks = ticker.watch(engine)
    ticker.is_on = True
    collected = {}

    submitted = {}
    try:
        step = 0
        while len(submitted) < len(asked) or engine.has_unfinished_requests:
            for i in {*range(len(asked))} - {*submitted}:
                # one whose submission is interrupted is not queued: once more
                if asked[i][0] <= step and (h := attempt(engine.submit, requests[i])):
                    submitted[i] = h
                    ticker.handles.append(h)
            if step in resets:
                attempt(engine.reset_prefix_cache)
            for handle, new in attempt(engine.step) or ():
                collected.setdefault(handle, []).append(new)
            step += 1
            assert step < 10_000, "it never ends"
        ticker.is_on = False
        for handle, new in engine.step():  # what the last interrupt kept back
            collected.setdefault(handle, []).append(new)
    finally:
        for hook in hooks:
            hook.remove()
    empty(engine)
    assert not engine._cancelled and not engine._free.locked()
    for i, handle in submitted.items():
        assert collected.get(handle, []) == handle.output_ids
        n = len(handle.output_ids)
        if handle.finish_reason == "cancelled":
            assert ticker.cancelled and handle.output_ids == right[i].ids[:n]
            assert handle.log_probs == pytest.approx(right[i].log_probs[:n], abs=1e-9)
        else:
            same(handle, right[i])


KINDS = ["greedy", "seed", "criterion", "allowed", "function"]
INTERRUPTED = dict(
    asked=st.lists(
        st.tuples(
            st.integers(0, 5), PROMPTS, st.integers(1, 6), STOPS, st.sampled_from(KINDS)
        ),
        min_size=1,
        max_size=5,
    ),
    interrupted=st.lists(st.integers(1, 250), max_size=12),
    cancelled=st.dictionaries(st.integers(1, 200), st.integers(0, 4), max_size=2),
    resets=st.sets(st.integers(1, 9), max_size=2),
    policy=st.sampled_from(sorted(SCHEDULING_POLICIES)),
    max_num_seqs=st.integers(1, 3),
    max_prefill_tokens=st.sampled_from([None, 1, 4]),
    blocks=st.sampled_from(
        [{}, dict(num_blocks=40, block_size=3), dict(num_blocks=7, block_size=3)]
    ),
)


@settings(max_examples=40, deadline=None)
@given(**INTERRUPTED)
def test_interrupts_at_any_place_change_no_text(
    asked, interrupted, cancelled, resets, blocks, policy, **how
):
    """In policies, clocks, samplers, criteria, the runner's calls and the model.

    Requests come in any order, some are cancelled on the way, from within a step or
    from another thread, and caches are reset; what each writes is what it writes alone,
    and what the steps return is what it wrote.
    """
    ticker = Ticker(interrupted, cancelled)
    check_interrupted(asked, ticker, policy, resets, **how, **blocks)


def test_a_cancel_that_is_interrupted_is_completed():
    "Its row is free for the next one after the next step."
    engine = Engine(MODEL, 1)
    first, second = [engine.submit(Request([i], 5)) for i in (1, 2)]
    engine.step()
    crop = engine.runner.crop

    def interrupted(*args):
        engine.runner.crop = crop
        raise KeyboardInterrupt

    engine.runner.crop = interrupted
    with pytest.raises(KeyboardInterrupt):
        first.cancel()
    assert first.finish_reason == "cancelled"
    engine.step()
    sound(engine)
    assert second.sequence.status is SequenceStatus.RUNNING
    engine.run()
    same(second, texts([second.request])[0])
    empty(engine)


def test_an_id_that_is_taken_back_is_handed_out_once():
    "Its step breaks off while the one behind it is finished."
    engine = Engine(MODEL, 2)
    handles = [engine.submit(Request([i], n)) for i, n in ((1, 6), (2, 3))]
    found = {handle: [] for handle in handles}
    crop = engine.runner.crop
    interrupts = 0

    def interrupted(*args):
        engine.runner.crop = crop
        raise KeyboardInterrupt

    while engine.has_unfinished_requests:
        if engine.steps == 2:
            engine.runner.crop = interrupted
        try:
            for handle, i in engine.step():
                found[handle].append(i)
        except KeyboardInterrupt:
            interrupts += 1
            assert [len(t.output_ids) for t in handles] == [2, 3]
    assert interrupts == 1 and found == {t: t.output_ids for t in handles}
    for handle in handles:
        same(handle, texts([handle.request])[0])


def call_at_line(n, call, is_inside):
    "A trace function that makes a call at the n-th line of the frames inside."
    left = [n]

    def on_line(frame, event, arg):
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                call()
        return on_line

    return lambda frame, event, arg: on_line if is_inside(frame) else None, left


def makes_a_step(frame):
    owner = type(frame.f_locals.get("self"))
    return owner in (Scheduler, StepExecutor, Sequence)


@pytest.mark.parametrize("first", by_day(range(1, 14), 1))
def test_the_usual_loop_has_all_ids_whichever_line_is_interrupted(first):
    "It ends with ``has_unfinished_requests``, and has been handed every id."
    requests = [Request([1, 2], 2), Request([3], 1)]
    right = texts(requests)
    n = first
    left = [0]
    while left[0] <= 0:
        engine = Engine(MODEL, 2)
        handles = [engine.submit(r) for r in requests]
        found = {handle: [] for handle in handles}
        trace, left = call_at_line(n, raise_interrupt, makes_a_step)
        before = sys.gettrace()
        while engine.has_unfinished_requests:
            try:
                sys.settrace(trace)
                new = engine.step()
            except KeyboardInterrupt:
                continue
            finally:
                sys.settrace(before)
            for handle, i in new:
                found[handle].append(i)
        assert found == {t: t.output_ids for t in handles}, n
        for handle, text in zip(handles, right, strict=True):
            same(handle, text)
        empty(engine)
        n += 13
    assert n > 100


# the code that decides who may step, and what it calls: of torch `inference_mode`
AROUND_A_STEP = {
    contextlib.__file__,
    torch.autograd.grad_mode.__file__,
    torch.utils._contextlib.__file__,
    tformer.base.interrupts.__file__,
}


def is_around_a_step(frame):
    is_engine = isinstance(frame.f_locals.get("self"), Engine)
    is_inside = frame.f_code.co_filename in AROUND_A_STEP
    return is_engine or is_inside or frame.f_code.co_name == "take_new"


@pytest.fixture
def ctrl_c():
    "Ctrl-C raises KeyboardInterrupt, also where a shell has it ignored."
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@plain_only  # what executes a signature would be interrupted, too
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("first", by_day(range(1, 6), 4))
@pytest.mark.parametrize("call", ["step", "cancel", "reset_prefix_cache"])
def test_nothing_is_held_or_lost_whichever_line_ctrl_c_meets(call, first):
    """Also while the traceback is kept, as Python does at its prompt.

    Ctrl-C comes as a signal, so that what lets it wait is seen at work.
    """
    requests = [Request([1, 2], 2), Request([3], 3)]
    right = texts(requests)
    before = sys.gettrace()
    num_interrupts = num_tried = 0
    n = first
    left = [0]
    while left[0] <= 0:
        num_tried += 1
        engine = Engine(MODEL, 2)
        handles = [engine.submit(r) for r in requests]
        found = {handle: [] for handle in handles}
        for handle, i in engine.step():
            found[handle].append(i)
        args = handles[:1] if call == "cancel" else []
        trace, left = call_at_line(n, send_ctrl_c, is_around_a_step)
        new = []
        interrupt = None
        try:
            sys.settrace(trace)
            new = getattr(engine, call)(*args)
        except KeyboardInterrupt as error:
            interrupt = error  # and with it every frame that it passed
            num_interrupts += 1
        finally:
            sys.settrace(before)
        assert not engine._free.locked() and engine._thread is None, n
        assert not torch.is_inference_mode_enabled(), n
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, n
        for handle, i in new or ():
            found[handle].append(i)
        while engine.has_unfinished_requests:
            for handle, i in engine.step():
                found[handle].append(i)
        assert found == {t: t.output_ids for t in handles}, n
        for handle, text in zip(handles, right, strict=True):
            if call != "cancel" or handle.finish_reason != "cancelled":
                same(handle, text)
        assert call != "cancel" or interrupt or handles[0].finish_reason == "cancelled"
        empty(engine)
        del interrupt
        n += 5
    assert num_interrupts == num_tried - 1 > 4


@plain_only  # what executes a signature would be interrupted, too
@pytest.mark.parametrize("first", by_day(range(1, 91, 6), 1))
def test_no_block_is_lost_wherever_an_interrupt_comes(first):
    "Nor is one found by a key that is no longer its own."
    requests = [
        Request([1, 2, 3, 1, 2, 3], 4),
        Request([1, 2, 3, 1, 2], 2),
        Request([3], 5),
    ]
    right = texts(requests)

    def write(engine, handles):
        while engine.has_unfinished_requests:
            engine.step()
            if len(handles[0].output_ids) == 2:
                handles[0].cancel()

    def is_inside(frame, event):
        return frame.f_code.co_filename == tformer.nn.paged_cache.__file__

    n = first
    left = [0]
    while left[0] <= 0:
        engine = Engine(MODEL, 2, num_blocks=9, block_size=2)
        for _ in range(2):  # the second time some of it is known
            handles = [engine.submit(r) for r in [Request([2, 1, 3], 9), *requests]]
            try:
                with interrupted_at(n, is_inside) as left:
                    write(engine, handles)
            except KeyboardInterrupt:
                pass
            write(engine, handles)
            for handle, text in zip(handles[1:], right, strict=True):
                same(handle, text)
            empty(engine)
            consistent(engine.runner.pool, engine.runner.cache.tables)
        n += 90
    assert n > 1000


def reset_with(engine, reset):
    "Reset an engine whose pool is reset in another way, which is interrupted."
    pool = engine.runner.pool
    real = pool.reset_prefix_cache
    pool.reset_prefix_cache = lambda: reset(pool)
    with pytest.raises(KeyboardInterrupt):
        engine.reset_prefix_cache()
    pool.reset_prefix_cache = real


def give_twice(pool):
    "Say of cached blocks that they are free, too."
    pool.free_block_ids += pool.evictable
    raise KeyboardInterrupt


def count_too_few(pool):
    "Say of blocks in tables that nobody holds them."
    pool.ref_counts = [0] * pool.num_blocks
    raise KeyboardInterrupt


@pytest.mark.parametrize("reset", [give_twice, count_too_few])
def test_a_reset_that_breaks_off_is_recovered_from(reset):
    "Whatever it leaves, no block is given to two requests, and none is lost."
    requests = [Request([2, 2, 4, 4, i], 8) for i in range(6)]
    engine = Engine(MODEL, 3, num_blocks=18, block_size=2)
    engine.run([Request([1, 2, 3, 4, 5, 6, 7], 3), Request([5, 5, 5, 5, 1], 3)])
    handles = [engine.submit(r) for r in requests]
    engine.step()
    reset_with(engine, reset)
    engine.run()
    for handle, text in zip(handles, texts(requests), strict=True):
        same(handle, text)
    empty(engine)


@plain_only  # what executes a signature would be interrupted, too
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("first", by_day(range(1, 20, 3), 1))
def test_a_reset_keeps_texts_and_blocks_whichever_line_ctrl_c_meets(first):
    "Afterwards all prefixes of before are found, or none is."
    start = Request([1, 2, 3, 4, 5, 6, 7], 3)
    requests = [Request([2, 2, 4, 4, i], 6) for i in range(4)] + [start]
    right = texts(requests)
    files = {
        tformer.nn.paged_cache.__file__,
        tformer.serving.runner.__file__,
        tformer.serving.scheduler.__file__,
        tformer.serving.executor.__file__,
        tformer.serving.engine.__file__,
    }
    before = sys.gettrace()
    n = first
    left = [0]
    while left[0] <= 0:
        engine = Engine(MODEL, 3, num_blocks=18, block_size=2)
        engine.run([start, Request([5, 5, 5, 5, 1], 3)])
        handles = [engine.submit(requests[0])]
        engine.step()
        engine.step()
        pool = engine.runner.pool
        known = {**pool.hash_to_block}
        trace, left = call_at_line(
            n, send_ctrl_c, lambda frame: frame.f_code.co_filename in files
        )
        try:
            sys.settrace(trace)
            engine.reset_prefix_cache()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        assert pool.hash_to_block in (known, {})
        handles += [engine.submit(r) for r in requests[1:]]
        engine.run()
        for handle, text in zip(handles, right, strict=True):
            same(handle, text)
        empty(engine)
        n += 19
    assert n > 100


@pytest.mark.parametrize("first", by_day(range(1, 4), 1))
def test_who_comes_back_stands_in_order_whichever_line_is_interrupted(first):
    "Also where it has overtaken some that still wait."
    requests = [Request([i + 1] * n, 6) for i, n in enumerate((9, 7, 8, 2, 1, 2))]

    def is_inside(frame):
        owner = type(frame.f_locals.get("self"))
        return owner is Scheduler and frame.f_code.co_name == "preempt"

    before = sys.gettrace()
    n = first
    num_interrupts = num_tried = 0
    left = [0]
    while left[0] <= 0:
        num_tried += 1
        engine = Engine(MODEL, 4, num_blocks=9, block_size=2, policy="shortest")
        handles = [engine.submit(r) for r in requests]
        trace, left = call_at_line(n, raise_interrupt, is_inside)
        while engine.has_unfinished_requests:
            try:
                sys.settrace(trace)
                engine.step()
            except KeyboardInterrupt:
                num_interrupts += 1
            finally:
                sys.settrace(before)
            sound(engine)
        assert engine.scheduler.num_preemptions
        n += 3
    for handle, text in zip(handles, texts(requests), strict=True):
        same(handle, text)
    assert num_interrupts == num_tried - 1 > 3


@plain_only  # what executes a signature would be interrupted, too
@pytest.mark.parametrize("first", by_day(range(1, 6), 1))
def test_no_block_is_lost_whichever_line_is_interrupted(first):
    "Of the methods that take or give back blocks, in two steps and a cancel."
    requests = [Request([1, 2, 3], 9), Request([3, 1], 4)]
    right = texts(requests)
    moving = "allocate reserve release trim finish _release".split()

    files = {tformer.nn.paged_cache.__file__, tformer.serving.scheduler.__file__}

    def is_inside(frame):
        code = frame.f_code
        return code.co_filename in files and code.co_name in moving

    n = first
    left = [0]
    while left[0] <= 0:
        engine = Engine(MODEL, 2, num_blocks=12, block_size=2)
        handles = [engine.submit(r) for r in requests]
        engine.step()
        trace, left = call_at_line(n, raise_interrupt, is_inside)
        before = sys.gettrace()
        try:
            sys.settrace(trace)
            engine.step()
            engine.step()
            handles[0].cancel()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        handles[0].cancel()
        for _ in range(50 * engine.has_unfinished_requests):
            engine.step()
        assert not engine.has_unfinished_requests, n
        assert handles[0].finish_reason == "cancelled", n
        same(handles[1], right[1])
        empty(engine)
        consistent(engine.runner.pool, engine.runner.cache.tables)
        n += 5
    assert n > 50


@ways("both")
def test_calls_all_over_a_run_may_be_interrupted(how):
    "And the one after each of them, while the failed step is mended."
    asked = [(0, [1, 2], 4, (), kind) for kind in KINDS]
    quiet = Ticker()
    check_interrupted(asked, quiet, "shortest", max_num_seqs=3, **how)
    for n in range(1, quiet.num_calls + 1, 1 + quiet.num_calls // 8):
        ticker = Ticker([n, n + 1])
        check_interrupted(asked, ticker, "shortest", max_num_seqs=3, **how)
        assert ticker.num_interrupts


@plain_only
def test_memory_stays_flat():
    engine = Engine(MODEL, 4, num_blocks=24, block_size=4, max_queued_requests=8)

    def grown_by(n):
        "Bytes that are kept after so many further requests."
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        engine.run(Request([1 + i % 9, 1 + i % 7], 2) for i in range(n))
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    grown_by(60)
    # a leak grows each time, what is filled once does not
    least = min(grown_by(100) for _ in range(3))
    tracemalloc.stop()
    assert least < 10_000
    empty(engine)


@plain_only
@pytest.mark.parametrize(
    "change, says",
    [
        (dict(max_num_seqs=0), "max_num_seqs must be a whole number"),
        (dict(max_prefill_tokens=0), "max_prefill_tokens must be a whole number"),
        (dict(max_queued_requests=0), "max_queued_requests must be a whole number"),
        (dict(max_overtakes=-1), "max_overtakes must be a whole number"),
        (
            dict(policy="last"),
            "policy must be one of 'fcfs', 'shortest', 'similar_length'",
        ),
        (dict(num_blocks=0), "num_blocks must be a whole number"),
        (dict(max_len=41), "41 slots, beyond max_len 40"),
        (dict(max_len="a"), "max_len must be a whole number of at least 1, got 'a'"),
        (dict(max_len=-1), "max_len must be a whole number of at least 1, got -1"),
        (dict(max_len=-1, num_blocks=3), "max_len must be a whole number"),
        (dict(clock=3), "clock must be a function without arguments .* got 3"),
    ],
)
def test_an_engine_that_cannot_be(change, says):
    with pytest.raises(ValueError, match=says) as told:
        Engine(MODEL, **change)
    assert "\n" not in str(told.value)
    with pytest.raises(ValueError, match="request must be Request"):
        Engine(MODEL).submit([1, 2])


@plain_only
@pytest.mark.parametrize(
    "model, says",
    [
        ("x", "model must be a decoder, such as GPT or Llama, got str 'x'"),
        (None, "model must be a decoder, such as GPT or Llama, got NoneType None"),
        (nn.Linear(2, 2), "got Linear Linear.*no new_cache or cannot"),
        (
            types.SimpleNamespace(model=MODEL, tokenizer=None),
            "got SimpleNamespace .*: give its model, bundle.model",
        ),
    ],
)
@pytest.mark.parametrize("how", [{}, PAGED])
def test_what_is_no_decoder_is_refused_at_once(model, says, how):
    with pytest.raises(ValueError, match=says) as told:
        Engine(model, 2, **how)
    assert "\n" not in str(told.value)


def test_a_bundle_is_refused_by_the_name_of_its_model():
    bundle = tformer.load("stories")
    with pytest.raises(ValueError, match=r"got ModelBundle .*bundle\.model"):
        Engine(bundle)


@plain_only
@pytest.mark.parametrize("requests", [Request([1], 2), 3, None])
def test_run_takes_a_list(requests):
    with pytest.raises(ValueError, match=r"a list of Request, got .*\[request\]"):
        Engine(MODEL).run(requests)


@plain_only
@pytest.mark.parametrize(
    "prompt_ids, says",
    [
        ([[1, 2]], r"drop the outer brackets of \[\[1, 2\]\], and give one text"),
        (((1, 2),), r"drop the outer brackets of \[\(1, 2\)\]"),
        (torch.tensor([[1, 2]]), r"drop the outer brackets of \[\[1, 2\]\]"),
        ([torch.tensor([1, 2])], r"drop the outer brackets of \[tensor\(\[1, 2\]\)\]"),
        ([[1, 2], [3]], r"outer brackets of \[\[1, 2\], \[3\]\], and give one text"),
        (torch.ones(2, 3).long(), r"\[1, 1, 1\]\], and give one text at a time"),
    ],
)
def test_a_prompt_is_one_flat_row(prompt_ids, says):
    engine = Engine(MODEL)
    (handle,) = engine.run([Request(prompt_ids, 2)])
    assert handle.finish_reason == "error"
    assert re.search(says, handle.error)
    assert handle.error.startswith("prompt_ids must be one flat row of ids")
    empty(engine)


@plain_only
@pytest.mark.parametrize("given", [Request([1, 2], 3), None, 5])
def test_what_is_no_list_of_requests_is_refused(given):
    engine = Engine(MODEL, 2)
    says = rf"requests must be a list of Request, got {re.escape(repr(given)[:20])}"
    with pytest.raises(ValueError, match=rf"{says}.*one request has brackets, \[req"):
        engine.run(given)
    empty(engine)


def test_parts_have_names():
    assert issubclass(QueueFull, RuntimeError)
    assert isinstance(sequences_of([1])[0], Sequence)
    assert ModelRunner(MODEL, 2).max_len == MODEL.max_len > MAX_LEN


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{}, PAGED, PAGED | dict(max_prefill_tokens=3)])
def test_on_a_device(how):
    model = small()
    requests = [Request([*range(1, 1 + n)], 3 + n % 5) for n in (30, 1, 2, 17, 1, 9)]
    expected = texts(requests)
    handles = Engine(model.cuda(), 3, **how).run(requests)
    assert [t.output_ids for t in handles] == [text.ids for text in expected]
