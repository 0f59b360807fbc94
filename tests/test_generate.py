"""Texts written with a cache: equal to those read again, and to their peers."""

import contextlib
import copy
import inspect
import typing
from collections import namedtuple

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import tformer
from helpers import interrupted_at, plain_only
from models import MAX_LEN, ROWS, VOCAB, WRITERS, Preallocates, causal, rows
from tformer.costs import estimate_costs
from tformer.inference.beam import beam_search
from tformer.inference.generation import (
    Completion,
    DecodeState,
    StopTokenIds,
    generate,
    left_pad,
    make_sampler,
    make_stop_string_criterion,
    meets_stopping_criteria,
    next_token_logits,
    parse_stopping,
    require_context,
    stream,
)
from tformer.inference.prefix import PrefixedModel
from tformer.inference.sampler import Sampler, SamplingParams
from tformer.inference.speculative import (
    DraftModel,
    PromptLookup,
    speculative_generate,
    stream_speculative,
)
from tformer.models import seq2seq
from tformer.models.base import eval_mode
from tformer.models.gpt import GPT, GPTConfig
from tformer.models.llama import Llama, LlamaConfig
from tformer.serving.engine import Engine
from tformer.serving.requests import Request

torch.set_num_threads(1)
PROMPTS = [[3, 4, 5, 6, 7], [8], [9, 10, 11]]


def made(row, n=3):
    "A model in float64, and the memories that n prompts need."
    model = row.make().double()
    more = {}
    if row.source:
        keep = torch.ones(n, 7).bool()
        keep[0, 4:] = False
        with torch.no_grad():
            memory = model.encode(row.ids(n, 7, seed=9), keep)
        more = dict(encoder_hidden_states=memory, encoder_attention_mask=keep)
    return model, more


def of_row(more, i):
    return {name: x[i : i + 1] for name, x in more.items()}


@torch.no_grad()
def reread(model, ids, n, keep=None, **more):
    "n ids and their log-probabilities; everything is read again each time."
    ids, first, start, said = list(ids), len(ids), 0, []
    if keep and first > model.max_len:
        start = first - keep
    for _ in range(n):
        if keep and len(ids) - start > model.max_len:
            start = len(ids) - keep
        log_p = model(torch.tensor([ids[start:]]), **more)[0, -1]
        log_p = log_p.log_softmax(-1)
        ids.append(log_p.argmax().item())
        said.append(log_p[ids[-1]].item())
    return ids[first:], said


def same(text, expected, said):
    assert text.ids == expected
    assert text.log_probs == pytest.approx(said, abs=1e-9)


# --- equal to what is read again, whatever stands beside


@causal
def test_a_ragged_batch_writes_what_each_row_writes_alone(row):
    model, more = made(row)
    texts = generate(model, PROMPTS, max_new_tokens=MAX_LEN - 4, **more)
    for i, text in enumerate(texts):
        same(text, *reread(model, PROMPTS[i], MAX_LEN - 4, **of_row(more, i)))
        assert text.finish_reason == "length"


@rows("causal", usual=WRITERS)
def test_rows_that_stop_leave_and_others_do_not_notice(row):
    model, more = made(row)
    full = [reread(model, ids, 14, **of_row(more, i)) for i, ids in enumerate(PROMPTS)]
    stop = [full[0][0][8], full[2][0][3]]
    seen = []
    model.register_forward_pre_hook(lambda part, given: seen.append(len(given[0])))
    for drop in (True, False):
        texts = generate(
            model,
            PROMPTS,
            max_new_tokens=14,
            stop_token_ids=stop,
            drop_finished=drop,
            **more,
        )
        for text, (expected, said) in zip(texts, full, strict=True):
            cut = min([expected.index(i) for i in stop if i in expected], default=14)
            same(text, expected[:cut], said[:cut])
            assert text.finish_reason == ("stop" if cut < 14 else "length")
    n = len({len(text.ids) for text in texts})
    assert len({*seen}) >= n or n == 1


@rows("causal", usual=WRITERS)
@pytest.mark.parametrize(
    "window, keep",
    [
        (True, MAX_LEN // 2),
        (5, 5),
        pytest.param(MAX_LEN, MAX_LEN, marks=pytest.mark.nightly),
    ],
)
def test_a_window_is_what_the_last_tokens_say_anew(row, window, keep):
    model, more = made(row)
    prompts = [PROMPTS[0], PROMPTS[1], [7, 8, 9] * 9]
    texts = generate(model, prompts, max_new_tokens=40, context_shift=window, **more)
    for i, text in enumerate(texts):
        same(text, *reread(model, prompts[i], 40, keep, **of_row(more, i)))
    (alone,) = generate(
        model, prompts[:1], max_new_tokens=40, context_shift=window, **of_row(more, 0)
    )
    assert alone.ids == texts[0].ids


@rows("causal", usual=[*WRITERS, "PreNormSeq2Seq"])
def test_a_row_that_stops_changes_no_window_of_its_neighbors(row):
    "Also beside an encoder's output, of which each row has its own."
    model, more = made(row)
    prompts = [[3, 4, 5], [8], [9, 10, 11, 12, 13, 14, 15, 16]]
    full = [
        reread(model, ids, 24, MAX_LEN // 2, **of_row(more, i))
        for i, ids in enumerate(prompts)
    ]
    ends = full[0][0][2]  # the first row leaves before any window is full
    texts = generate(
        model,
        prompts,
        max_new_tokens=24,
        stop_token_ids=ends,
        context_shift=True,
        **more,
    )
    for text, (expected, said) in zip(texts, full, strict=True):
        cut = expected.index(ends) if ends in expected else 24
        same(text, expected[:cut], said[:cut])


@pytest.mark.parametrize("window", [False, True, 3])
def test_a_cache_that_cannot_grow_is_as_large_as_is_needed(window):
    model = small().double()
    n = 40 if window else MAX_LEN - 4  # the last one is written and not read
    other = Preallocates(model)
    texts = generate(other, PROMPTS, max_new_tokens=n, context_shift=window)
    assert set(other.asked) == {MAX_LEN}
    plain = generate(model, PROMPTS, max_new_tokens=n, context_shift=window)
    for text, expected in zip(texts, plain, strict=True):
        same(text, expected.ids, expected.log_probs)


@rows("source")
def test_an_encoder_decoder_writes_what_greedy_writes(row):
    model, more = made(row)
    plain = seq2seq.greedy(
        model,
        row.ids(3, 7, seed=9),
        12,
        decoder_start_token_id=1,
        eos_token_id=2,
        encoder_attention_mask=more["encoder_attention_mask"],
    )
    for text, ids in zip(
        generate(model, [[1]] * 3, max_new_tokens=12, stop_token_ids=2, **more),
        plain.tolist(),
        strict=True,
    ):
        assert text.ids == ids[: ids.index(2) if 2 in ids else 12]


@rows("source")
def test_a_function_may_lead_a_text_along_given_ids(row):
    "What follows is the model's own choice behind them, and it may end a text."
    model, more = made(row)
    given = row.ids(3, 4, seed=4).clamp(min=3)

    def led(logits, ids):
        n = ids.shape[1]
        return given[:, n] if n < given.shape[1] else logits.argmax(-1)

    texts = generate(model, [[1]] * 3, max_new_tokens=7, sampling_params=led, **more)
    for i, (text, ids) in enumerate(zip(texts, given.tolist(), strict=True)):
        assert text.ids[:4] == ids
        own, log_probs = reread(model, [1, *ids], 3, **of_row(more, i))
        assert text.ids[4:] == own
        assert np.allclose(text.log_probs[4:], log_probs, atol=1e-9)
    stop = given[0, 1].item()
    texts = generate(
        model,
        [[1]] * 3,
        max_new_tokens=4,
        sampling_params=led,
        stop_token_ids=stop,
        drop_finished=False,
        **more,
    )
    for text, ids in zip(texts, given.tolist(), strict=True):
        assert text.ids == (ids[: ids.index(stop)] if stop in ids else ids)


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_prompts_that_are_right_are_not_printed(kind, monkeypatch):
    "Their texts for an error took most of the time of a large batch."
    prompts = [kind(row) for row in PROMPTS]
    expected = generate(small(), prompts, max_new_tokens=2)

    def refuse(self, **kwargs):
        raise AssertionError("a tensor is printed")

    monkeypatch.setattr(torch.Tensor, "__repr__", refuse)
    assert generate(small(), prompts, max_new_tokens=2) == expected


@causal
def test_the_cache_has_the_bytes_of_the_formula(row):
    model, more = made(row)
    reader = DecodeState(model, *left_pad(PROMPTS), max_new_tokens=3, **more)
    for new in range(3):
        with torch.no_grad():
            reader.logits()
        reader.append(torch.tensor([1, 2, 3]))
        expected = estimate_costs(model.config).kv_cache_bytes(
            5 + new, 3, torch.float64, source_tokens=7 * row.source
        )
        if row.kept is not None:
            expected = model.config.n_layers * row.kept * (5 + new) * 3 * 8
        for window in filter(None, row.windows):
            # what a layer with a window keeps less, of keys and of values
            less = max(5 + new - (window - 1), 0)
            width = model.blocks[0].attention.sublayer.proj_sizes[1]
            expected -= 2 * 3 * less * width * 8
        assert reader.cache.nbytes == expected


# --- equal to transformers


def twins():
    torch.manual_seed(0)
    numbers = dict(
        vocab_size=VOCAB, bos_token_id=None, eos_token_id=None, pad_token_id=0
    )
    peer = (
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                **numbers,
                n_embd=16,
                n_layer=2,
                n_head=4,
                n_positions=40,
                initializer_range=0.5,
            )
        )
        .double()
        .eval()
    )
    ours = (
        GPT(GPTConfig(vocab_size=VOCAB, d_model=16, n_layers=2, n_heads=4, max_len=40))
        .double()
        .eval()
    )
    state = {}
    for name, x in peer.transformer.state_dict().items():
        for theirs, own in (
            ("wte", "embed"),
            ("wpe", "embed_positions"),
            ("h.", "blocks."),
            ("ln_1", "attention.norm"),
            ("ln_2", "feed_forward.norm"),
            ("attn.c_attn", "attention.sublayer.qkv_proj"),
            ("attn.c_proj", "attention.sublayer.o_proj"),
            ("mlp.c_fc", "feed_forward.sublayer.up_proj"),
            ("mlp.c_proj", "feed_forward.sublayer.down_proj"),
            ("ln_f", "norm"),
        ):
            name = name.replace(theirs, own)
        flat = "_proj" in name and x.ndim == 2
        state[name] = x.T if flat else x
    state["lm_head.weight"] = state["embed.weight"]
    ours.load_state_dict(state)
    yield ours, peer
    peer = (
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **numbers,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=24,
                rms_norm_eps=1e-5,
                initializer_range=0.5,
            )
        )
        .double()
        .eval()
    )
    ours = (
        Llama(
            LlamaConfig(
                vocab_size=VOCAB,
                d_model=16,
                n_layers=2,
                n_heads=4,
                n_kv_heads=2,
                d_ff=24,
                max_len=40,
            )
        )
        .double()
        .eval()
    )
    state = {}
    for name, x in peer.state_dict().items():
        for theirs, own in (
            ("model.", ""),
            ("embed_tokens", "embed"),
            ("layers", "blocks"),
            ("input_layernorm", "attention.norm"),
            ("post_attention_layernorm", "feed_forward.norm"),
            ("self_attn", "attention.sublayer"),
            ("mlp", "feed_forward.sublayer"),
        ):
            name = name.replace(theirs, own)
        state[name] = x
    ours.load_state_dict(state)
    yield ours, peer


def test_equal_to_transformers_token_for_token():
    for ours, peer in twins():
        ids = torch.randint(1, VOCAB, (4, 9))
        keep = torch.ones_like(ids)
        # padded on the left
        keep[1, :4] = 0
        keep[3, :8] = 0
        theirs = peer.generate(
            ids.where(keep.bool(), 0),
            attention_mask=keep,
            max_new_tokens=30,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
        prompts = [row[k.bool()] for row, k in zip(ids, keep, strict=True)]
        texts = generate(ours, prompts, max_new_tokens=30)
        assert [text.ids for text in texts] == (theirs.sequences[:, 9:].tolist())
        said = peer.compute_transition_scores(
            theirs.sequences, theirs.scores, normalize_logits=True
        )
        for text, expected in zip(texts, said.tolist(), strict=True):
            assert text.log_probs == pytest.approx(expected, abs=1e-5)


# --- what is chosen, and when a text ends


def small(**changes):
    torch.manual_seed(1)
    config = (
        dict(
            vocab_size=VOCAB,
            d_model=16,
            n_layers=2,
            n_heads=4,
            max_len=MAX_LEN,
            dropout=0.0,
        )
        | changes
    )
    model = GPT(GPTConfig(**config)).double().eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model


def test_a_row_is_drawn_alike_with_and_without_neighbors():
    model = small()
    ways = [
        SamplingParams(top_k=9, seed=5),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.4, repetition_penalty=1.3, seed=5),
    ]
    stop = [*range(0, VOCAB, 6)]
    texts = generate(
        model, PROMPTS, max_new_tokens=15, sampling_params=ways, stop_token_ids=stop
    )
    assert len({len(text.ids) for text in texts}) > 1
    for ids, way, text in zip(PROMPTS, ways, texts, strict=True):
        (alone,) = generate(
            model, [ids], max_new_tokens=15, sampling_params=[way], stop_token_ids=stop
        )
        assert alone.ids == text.ids
    one = generate(
        model, PROMPTS[:1] * 2, max_new_tokens=9, sampling_params=SamplingParams(seed=3)
    )
    assert (
        one[1].ids
        == generate(
            model, PROMPTS[:1], max_new_tokens=9, sampling_params=SamplingParams(seed=4)
        )[0].ids
    )


def test_who_chooses_sees_what_each_row_wrote():
    seen = []

    def choose(logits, ids):
        seen.append(ids.tolist())
        return torch.tensor([1, 2, 3])[: len(logits)] + len(seen)

    generate(small(), PROMPTS, max_new_tokens=3, sampling_params=choose)
    assert seen == [[[], [], []], [[2], [3], [4]], [[2, 3], [3, 4], [4, 5]]]


def test_penalties_and_masks_see_new_ids_only():
    model = small()
    asked = []
    allowed = torch.ones(VOCAB).bool()
    allowed[3] = False

    def mask(ids):
        asked.append(ids.tolist())
        return allowed

    (text,) = generate(
        model,
        [[3, 3]],
        max_new_tokens=4,
        sampling_params=SamplingParams(temperature=0.0, allowed_tokens_fn=mask),
    )
    assert asked == [text.ids[:n] for n in range(4)] and 3 not in text.ids


@pytest.mark.parametrize("penalty", [1.3, 3.0, 0.4])
def test_a_repetition_penalty_counts_the_prompt_as_transformers_does(penalty):
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=24,
            max_position_embeddings=64,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.3)
    theirs = theirs.double().eval()

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = theirs

        def new_cache(self, batch_size, max_len=None):
            return Everything()

        def forward(self, ids, *, cache, positions=None):
            return self.model(cache.read(ids)).logits

    prompt = [*range(3, 23)]
    expected = theirs.generate(
        torch.tensor([prompt]),
        max_new_tokens=20,
        do_sample=False,
        repetition_penalty=penalty,
    )[0, 20:].tolist()
    params = SamplingParams(temperature=0.0, repetition_penalty=penalty)
    (text,) = generate(Wrapped(), [prompt], max_new_tokens=20, sampling_params=params)
    assert text.ids == expected
    alone = SamplingParams(temperature=0.0)
    assert (
        generate(Wrapped(), [prompt], max_new_tokens=20, sampling_params=alone)[0].ids
        != expected
    )


class Everything:
    "A cache that keeps the ids, for a model that is to read them all again."

    key_positions = None
    lengths = torch.zeros(1, dtype=torch.int64)
    nbytes = 0

    def __init__(self):
        self.ids = None

    def select(self, rows):
        self.ids = self.ids[rows]

    def crop(self, n):
        self.ids = self.ids[:, :n]

    def set_rows(self, rows, source):
        self.ids[rows] = source.ids

    def read(self, ids):
        self.ids = ids if self.ids is None else torch.cat([self.ids, ids], 1)
        return self.ids


def test_a_repetition_penalty_sees_no_padding_and_rows_that_leave():
    "Id 0, which stands in the padding, is not penalized; rows keep their prompts."
    model = small()
    params = SamplingParams(temperature=0.0, repetition_penalty=1.7)
    prompts = [[*range(1, 11)], [3], [9, 8, 4]]
    stop = [*range(0, VOCAB, 7)]
    how = dict(max_new_tokens=10, sampling_params=params, stop_token_ids=stop)
    together = generate(model, prompts, **how)
    assert len({len(text.ids) for text in together}) > 1
    for row, text in zip(prompts, together, strict=True):
        assert text.ids == generate(model, [row], **how)[0].ids
    seen = []

    class Watching(Sampler):
        def __call__(self, logits, ids, prompt_ids):
            seen.append(prompt_ids.tolist())
            return super().__call__(logits, ids, prompt_ids)

    ends = [len(text.ids) for text in together]
    generate(model, prompts, **how | dict(sampling_params=Watching([params] * 3)))
    padded = [[-1] * (10 - len(row)) + row for row in prompts]
    for step, found in enumerate(seen):
        assert found == [row for row, n in zip(padded, ends, strict=True) if step <= n]


# --- a step that fails


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("where", ["criterion", "sampler", "model"])
def test_a_step_that_fails_takes_no_number_from_a_sampler(error, where, monkeypatch):
    model = small()
    params = [SamplingParams(seed=3), SamplingParams(seed=4, top_k=5)]
    how = dict(max_new_tokens=6)
    rows = [[5], [6, 7]]
    plain = [t.ids for t in generate(model, rows, sampling_params=params, **how)]
    sampler = Sampler(params)
    failing = False

    def fail(*args):
        if failing:
            raise error("enough")
        return False

    if where == "model":
        model.register_forward_pre_hook(lambda *args: fail() or None)
    if where == "sampler":
        drawn = Sampler.__call__
        monkeypatch.setattr(
            Sampler, "__call__", lambda *args: (drawn(*args), fail())[0]
        )
    steps = stream(
        model,
        rows,
        sampling_params=sampler,
        # row 0 is judged before row 1 is, and has drawn its number, too
        stopping_criteria=lambda ids: (
            where == "criterion" and ids[-1] == plain[1][2] and fail()
        ),
        **how,
    )
    texts = copy.deepcopy(rows)
    for _ in range(2):
        for token in next(steps):
            texts[token.prompt_index].append(token.id)
    failing = True
    with pytest.raises((error, ValueError)):
        next(steps)
    failing = False
    rest = generate(model, texts, sampling_params=sampler, max_new_tokens=4)
    assert [a[-2:] + b.ids for a, b in zip(texts, rest, strict=True)] == plain


@plain_only
def test_make_sampler():
    z = torch.tensor([[0.0, 2.0, 1.0]])
    assert make_sampler(None)(z, None).tolist() == [1]
    assert isinstance(make_sampler(SamplingParams()), Sampler)
    assert len(make_sampler([SamplingParams(), SamplingParams()]).row_states) == 2
    own = make_sampler(max)
    assert own is max
    with pytest.raises(ValueError, match="sampling_params 1 must be Sampling"):
        make_sampler([SamplingParams(), None])
    says = (
        "sampling_params must be None, a SamplingParams, a list or tuple of them, or a "
        "function of logits and ids, got "
    )
    with pytest.raises(ValueError, match=says + r"float 0.7$"):
        make_sampler(0.7)
    advice = r"dict {'top_k': 3}: write SamplingParams\(\*\*settings\)$"
    with pytest.raises(ValueError, match=says + advice):
        make_sampler({"top_k": 3})


def test_the_end_is_no_part_of_a_text_but_what_a_function_saw_is():
    model = small()
    full = generate(model, [[5]], max_new_tokens=8)[0].ids
    (text,) = generate(model, [[5]], max_new_tokens=8, stop_token_ids=full[4])
    assert text == Completion(full[: full.index(full[4])], text.log_probs, "stop")
    assert full[4] not in text.ids
    asked = []

    def stop(ids):
        asked.append(list(ids))
        ids.clear()  # what it does to its list is its own affair
        return len(asked) == 3

    (text,) = generate(model, [[5]], max_new_tokens=8, stopping_criteria=stop)
    assert asked == [full[:1], full[:2], full[:3]]
    assert (text.ids, text.finish_reason) == (full[:3], "stop")


@plain_only
def test_stop_strings_cross_the_borders_of_tokens():
    decode = "".join
    found = make_stop_string_criterion(decode, ["cat", "!"])
    assert [found(ids) for ids in (["c", "a"], ["c", "at", "s"], [], ["x!"])] == [
        False,
        True,
        False,
        True,
    ]
    assert make_stop_string_criterion(decode, "ab")(["a", "b"])
    for wrong, says in (([""], "empty string"), ([3], "must be a str")):
        with pytest.raises(ValueError, match=says):
            make_stop_string_criterion(decode, wrong)


STOP_FORMS = [
    int,
    lambda i: [i],
    lambda i: {i},
    torch.tensor,
    lambda i: torch.tensor([i]),
]


@pytest.mark.parametrize("form", [*STOP_FORMS, lambda i: np.array([i])])
def test_stop_ids_come_in_any_form_to_whoever_writes(form):
    "Where signatures are executed, each of them has to name these types."
    model = small()
    (full,) = generate(model, [[5]], max_new_tokens=8)
    n = full.ids.index(full.ids[4])
    how = dict(max_new_tokens=8, stop_token_ids=form(full.ids[4]))
    found = [
        generate(model, [[5]], **how)[0],
        beam_search(model, [[5]], num_beams=1, **how)[0][0],
        speculative_generate(model, [5], PromptLookup(), **how),
        Engine(model, 1).run([Request([5], **how)])[0].result(),
    ]
    ids = [i for step in stream(model, [[5]], **how) for _, i, _ in step]
    steps = stream_speculative(model, [5], PromptLookup(), **how)
    assert [i for step in steps for i in step.ids] == ids == full.ids[:n]
    assert all(text.ids == ids and text.finish_reason == "stop" for text in found)


def test_stop_ids_have_one_type():
    writers = generate, stream, beam_search, speculative_generate, stream_speculative
    for function in (*writers, parse_stopping, Request):
        assert typing.get_type_hints(function)["stop_token_ids"] == StopTokenIds


# --- a stream


def test_a_stream_computes_no_more_than_is_asked_for():
    model = small()
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    steps = stream(model, PROMPTS, max_new_tokens=9)
    assert not calls
    first = next(steps)
    second = next(steps)
    assert [t.prompt_index for t in first] == [0, 1, 2] and len(calls) == 2
    texts = generate(small(), PROMPTS, max_new_tokens=9)
    for tokens, n in ((first, 0), (second, 1)):
        assert [(t.id, t.log_prob) for t in tokens] == [
            (text.ids[n], text.log_probs[n]) for text in texts
        ]
    assert len([*steps]) == 7


def test_between_two_tokens_the_caller_is_as_before():
    model = small(dropout=0.5)
    model.train()
    model.blocks[0].eval()
    modes = [part.training for part in model.modules()]
    exact = [
        text.ids
        for text in generate(copy.deepcopy(model).eval(), PROMPTS, max_new_tokens=6)
    ]
    found = [[], [], []]
    for tokens in stream(model, PROMPTS, max_new_tokens=6):
        assert [part.training for part in model.modules()] == modes
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        for row, i, _ in tokens:
            found[row].append(i)
    assert found == exact
    with pytest.raises(ValueError):
        generate(model, PROMPTS, max_new_tokens=5, stopping_criteria=lambda ids: None)
    assert [part.training for part in model.modules()] == modes


def test_a_caller_may_train_between_two_tokens():
    model = small(dropout=0.5).eval()
    exact = [text.ids for text in generate(model, PROMPTS, max_new_tokens=6)]
    found = [[], [], []]
    for tokens in stream(model, PROMPTS, max_new_tokens=6):
        model.train()
        for row, i, _ in tokens:
            found[row].append(i)
    assert found == exact and model.training


def test_an_encoder_output_is_handed_over_once():
    "The cache keeps it: a model need not look whether it is the same."
    row = next(row for row in ROWS if row.source)
    model, more = made(row)
    given = []
    model.register_forward_pre_hook(
        lambda part, ids, how: given.append({*more} & {*how}), with_kwargs=True
    )
    generate(model, [[3], [4], [5]], max_new_tokens=5, **more)
    assert given == [{*more}] + [set()] * 4


def test_log_probabilities_are_at_least_float32():
    model = small().to(torch.bfloat16)
    (text,) = generate(model, PROMPTS[:1], max_new_tokens=4)
    with torch.no_grad():
        cache = model.new_cache(1)
        ids = torch.tensor(PROMPTS[:1])
        for i, said in zip(text.ids, text.log_probs, strict=True):
            log_p = model(ids, cache=cache)[0, -1].float().log_softmax(-1)
            assert said == pytest.approx(log_p[i].item(), abs=1e-6)
            ids = torch.tensor([[i]])


def test_what_ends_a_text_is_sorted_and_asked():
    def never(ids):
        return False

    assert parse_stopping(3, ()) == ({3}, [])
    assert parse_stopping((), never) == (set(), [never])
    for ids in ([3, 5], torch.tensor([3, 5]), np.array([3, 5]), torch.tensor(3)):
        found = parse_stopping(ids, ()).token_ids
        assert found == {*np.atleast_1d(ids).tolist()}
        assert all(type(i) is int for i in found)
    assert parse_stopping([3, 5], (never, len)) == ({3, 5}, [never, len])
    assert meets_stopping_criteria([never, lambda ids: ids == [1]], 0, [1])
    assert not meets_stopping_criteria([], 0, [1]) and not meets_stopping_criteria(
        [never], 0, [1]
    )
    seen = [1, 2]
    meets_stopping_criteria([lambda ids: ids.clear() is not None], 0, seen)
    assert seen == [1, 2]  # a copy is handed over
    require_context([3, 5], 7, 3), require_context([9], None, 9)
    with pytest.raises(ValueError, match=r"prompt 1 of 6 .* max_len 7; less"):
        require_context([3, 6], 7, 3, "; less")


def test_modes_are_as_found_after_an_error():
    model = small()
    model.train(), model.norm.eval()
    modes = [part.training for part in model.modules()]
    with pytest.raises(KeyError), eval_mode(model):
        assert not any(part.training for part in model.modules())
        raise KeyError
    assert [part.training for part in model.modules()] == modes
    with eval_mode(object()):
        pass


@plain_only  # what executes a signature would be interrupted, too
def test_modes_are_as_found_wherever_an_interrupt_comes():
    "Also while its traceback is kept, as Python does at its prompt."
    files = {
        contextlib.__file__,
        nn.modules.module.__file__,
        tformer.models.base.__file__,
        __file__,
    }

    def is_inside(frame, event):  # where `__exit__` begins nothing can be done
        is_exit = event == "call" and frame.f_code.co_name == "__exit__"
        return frame.f_code.co_filename in files and not is_exit

    model = small().train()
    model.norm.eval()
    modes = [part.training for part in model.modules()]
    n = 0
    interrupt = True
    while interrupt:
        n += 1
        interrupt = None
        try:
            with interrupted_at(n, is_inside), eval_mode(model):
                model(torch.tensor([[1, 2]]))
        except KeyboardInterrupt as error:
            interrupt = error
        assert [part.training for part in model.modules()] == modes, n
    assert n > 100


@plain_only  # what executes a signature would be interrupted, too
def test_an_interrupted_step_draws_nothing():
    "Wherever it comes before the step is handed over, and whoever owns the sampler."
    model = small()
    params = [SamplingParams(seed=1), SamplingParams(seed=2)]

    def is_inside(frame, event):  # where a generator is let go, none is raised
        code = frame.f_code
        is_ours = code.co_filename == tformer.inference.generation.__file__
        return is_ours and code.co_name != "<genexpr>"

    n = 0
    left = [0]
    while left[0] <= 0:
        n += 1
        sampler = Sampler(params)
        steps = stream(model, PROMPTS[:2], max_new_tokens=4, sampling_params=sampler)
        next(steps)
        before = [g.get_state() for _, g in sampler.row_states]
        with (
            contextlib.suppress(KeyboardInterrupt),
            interrupted_at(n, is_inside) as left,
        ):
            next(steps)
        after = [g.get_state() for _, g in sampler.row_states]
        is_drawn = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert is_drawn == [left[0] > 0] * 2, n
    assert n > 20


def test_only_the_last_token_pays_for_the_output_layer():
    model = small()
    seen = []
    model.lm_head.register_forward_pre_hook(
        lambda part, given: seen.append(given[0].shape[:-1].numel())
    )
    generate(model, PROMPTS, max_new_tokens=4)
    assert seen == [3] * 4
    logits = next_token_logits(model, torch.tensor([[1, 2, 3]]))
    assert torch.allclose(logits, model(torch.tensor([[1, 2, 3]]))[:, -1])


def test_each_token_goes_through_once():
    model = small()
    seen = []
    model.embed.register_forward_pre_hook(
        lambda part, given: seen.append(tuple(given[0].shape))
    )
    generate(model, PROMPTS, max_new_tokens=5)
    assert seen == [(3, 5)] + [(3, 1)] * 4


def test_a_cache_of_ones_own_is_written_to():
    model = small()
    cache = model.new_cache(3)
    texts = generate(model, PROMPTS, max_new_tokens=5, cache=cache)
    assert cache.lengths.tolist() == [9, 5, 7]  # the last ids are not read
    assert texts == generate(model, PROMPTS, max_new_tokens=5)


def test_left_padded():
    ids, positions = left_pad([[5, 6, 7], torch.tensor([8])])
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert positions.tolist() == [[0, 1, 2], [-1, -1, 0]]
    x = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    assert left_pad(x)[0].tolist() == x.tolist()


# --- what is refused


class Foreign(nn.Module):
    "A model that answers as it was told to."

    def __init__(self, answer, cache=lambda batch, max_len: object()):
        super().__init__()
        self.answer = answer
        self.new_cache = cache

    def forward(self, ids, *, cache=None, positions=None):
        return self.answer(ids)


def lookup(ids):
    return nn.Embedding(5, 3)(ids)


@pytest.mark.parametrize(
    "model, says",
    [
        (nn.Linear(2, 2), "Linear cannot answer model.new_cache"),
        (Foreign(lambda ids: None), r"Foreign cannot answer model\(ids, cache="),
        (Foreign(lookup), r"answer model\(ids.*ids from 0 to 11.*IndexError"),
        (Foreign(lambda ids: torch.zeros(2, 5, 7)), r"return logits \(3, 5, "),
        (Foreign(lambda ids: torch.zeros(3, 5)), r"return logits \(3, 5, vocab"),
        (
            Foreign(lambda ids: torch.full((*ids.shape, 50), torch.nan)),
            "logits of row 0 hold NaN after 0 new ids",
        ),
    ],
)
def test_a_model_that_breaks_the_protocol_is_told_which_call(model, says):
    with pytest.raises(ValueError, match=says):
        generate(model, PROMPTS, max_new_tokens=3)


@plain_only
@pytest.mark.parametrize(
    "ids, says",
    [
        (".", r"^stop_token_ids must be an id or .* got str '\.': for a string, give "),
        (["."], r"^a stop id must .* got '\.': for a string, give stopping_criteria="),
        (None, r"^stop_token_ids must be an id or .* got NoneType None$"),
        (np.array([1.5]), r"^a stop id must be a whole number .* got 1.5$"),
        (torch.tensor([True]), r"^a stop id must be a whole number .* got True$"),
        (torch.tensor([[1, 2]]), r"^a stop id must be .* got \[1, 2\]$"),
        (np.float64(2.5), r"^stop_token_ids must be an id or a list.* got float 2.5$"),
    ],
)
def test_what_ends_no_text_is_refused(ids, says):
    with pytest.raises(ValueError, match=says):
        parse_stopping(ids, ())


@plain_only
@pytest.mark.parametrize(
    "decode, strings, says",
    [
        (str, None, "^strings must be a string or a list of strings, got None$"),
        (str, 5, "^strings must be a string or a list of strings, got 5$"),
        (str, [5], "^string must be a str, got int$"),
        (None, "a", "^decode must be a function from ids to text, got None$"),
    ],
)
def test_a_stop_string_needs_a_decoder_and_strings(decode, strings, says):
    with pytest.raises(ValueError, match=says):
        make_stop_string_criterion(decode, strings)


Bundled = namedtuple("Bundled", "model tokenizer")


@plain_only
@pytest.mark.parametrize(
    "call",
    [
        lambda b: generate(b, PROMPTS, max_new_tokens=3),
        lambda b: next(stream(b, PROMPTS, max_new_tokens=3)),
        lambda b: beam_search(b, PROMPTS, num_beams=2, max_new_tokens=3),
        lambda b: speculative_generate(b, [1], PromptLookup(), max_new_tokens=3),
        lambda b: PrefixedModel(b, [1]),
        lambda b: DraftModel(b),
    ],
)
def test_a_bundle_is_told_to_give_its_model(call):
    with pytest.raises(ValueError, match=r"Bundled.*: give its model, bundle\.model$"):
        call(Bundled(small(), "a tokenizer"))


def raising(ids):
    raise KeyError("x")


@plain_only
@pytest.mark.parametrize(
    "change, says",
    [
        (dict(prompts=[[1], []]), "prompt 1 is empty"),
        (dict(prompts=[]), "prompts must be rows of ids"),
        (dict(prompts="Once"), "prompts must be rows of ids, got 'Once'"),
        (dict(prompts=["Once"]), "prompt 0 must be a row of ids"),
        (
            dict(prompts=[1, 2]),
            "prompt 0 must be a row of ids, got 1: one prompt has two brackets, "
            r"\[\[1, 2\]\]",
        ),
        (dict(prompts=5), "prompts must be rows of ids, got 5"),
        (
            dict(prompts=[[1], [[2, 3]]]),
            r"^prompt 1 must be one flat row of ids, such as \[1, 2, 3\]: "
            r"drop the outer brackets of \[\[2, 3\]\]$",
        ),
        (
            dict(prompts=torch.ones(1, 1, 2).long()),
            r"^prompt 0 must be .* drop the outer brackets of \[\[1, 1\]\]$",
        ),
        (dict(prompts=None), "prompts must be rows of ids, got None"),
        (dict(prompts=[[1.5]]), "prompt 0 must be integers"),
        (dict(prompts=torch.ones(2, 3)), "prompt 0 must be integers"),
        (dict(prompts=torch.ones(2, 3, 1).long()), "prompt 0 must be one flat row"),
        (dict(prompts=[[1] * 21]), "prompt 0 of 21 ids go beyond max_len 20"),
        (
            dict(max_new_tokens=17),
            "prompt 0 of 5 ids and max_new_tokens 17 go beyond max_len",
        ),
        (
            dict(max_new_tokens=0),
            "max_new_tokens must be a whole number of at least 1, got 0",
        ),
        (dict(prompts=[[VOCAB]]), f"id {VOCAB} is outside the vocabulary"),
        (dict(prompts=[[-1]]), "id -1 is outside the vocabulary"),
        (
            dict(sampling_params=[SamplingParams()] * 4),
            "sampling_params has 4 settings for 3 prompts",
        ),
        (dict(sampling_params=lambda z, ids: 1), "an id for each of 3 rows, got 1"),
        (dict(sampling_params=lambda z, ids: z[:, 0]), "an id for each of 3 rows"),
        (
            dict(stopping_criteria=raising),
            "a stopping criterion raised KeyError at row 0 after 1 ids",
        ),
        (
            dict(stopping_criteria=lambda ids: None),
            "a stopping criterion must answer True or False, got None at row 0",
        ),
        (dict(stopping_criteria="end"), "stopping_criteria must be list .* 'end'"),
        (dict(stopping_criteria=["end"]), "called with the new ids .* got 'end'"),
        (dict(stopping_criteria=3), "stopping_criteria must be list .* int 3"),
        (dict(stop_token_ids="end"), "stop_token_ids must be an id or a list.* 'end'"),
        (
            dict(stop_token_ids=raising),
            "stop_token_ids must be an id or a list.* function",
        ),
        (dict(stop_token_ids=[raising]), "a stop id must be a whole number"),
        (dict(stop_token_ids=-1), "a stop id must be a whole number"),
        (dict(context_shift=1), "context_shift must be a whole number of at least 2"),
        (dict(context_shift=21), "21 tokens of context_shift, beyond max_len 20"),
        (
            dict(encoder_hidden_states=torch.zeros(1, 3, 16)),
            "encoder_hidden_states of 1 rows for 3 prompts",
        ),
    ],
)
def test_bad_input_is_told_in_a_sentence(change, says):
    how = dict(prompts=PROMPTS, max_new_tokens=3) | change
    model = small()
    with pytest.raises(ValueError, match=says) as told:
        generate(model, **how)
    assert "\n" not in str(told.value)


def test_as_much_as_fits_is_written():
    model = small()
    (text,) = generate(model, [[1, 2]], max_new_tokens=MAX_LEN - 1)
    assert len(text.ids) == MAX_LEN - 1
    with pytest.raises(ValueError, match="beyond max_len"):
        generate(model, [[1, 2]], max_new_tokens=MAX_LEN)


@pytest.mark.gpu
def test_a_device_writes_the_same_and_is_read_once_a_step(monkeypatch):
    model = small()
    expected = [text.ids for text in generate(model, PROMPTS, max_new_tokens=12)]
    model.cuda()
    assert [
        text.ids for text in generate(model, PROMPTS, max_new_tokens=12)
    ] == expected
    reads = []
    for name in ("item", "tolist", "__bool__"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor,
            name,
            lambda x, plain=plain: (x.is_cuda and reads.append(1), plain(x))[1],
        )
    steps = stream(model, PROMPTS, max_new_tokens=12)
    next(steps)
    reads.clear()
    assert len([*steps]) == 11 and len(reads) == 11


@plain_only
@pytest.mark.parametrize(
    "rows",
    [
        np.array([[3, 4, 5], [6, 7, 8]]),
        [np.array([3, 4, 5]), [6, 7, 8]],
        [[np.int64(3), 4, 5], torch.tensor([6, 7, 8])],
        torch.tensor([[3, 4, 5], [6, 7, 8]]),
    ],
)
def test_rows_of_other_makers_are_rows(rows):
    ids, positions = left_pad(rows)
    assert ids.tolist() == [[3, 4, 5], [6, 7, 8]] and ids.dtype == torch.int64
    assert positions.tolist() == [[0, 1, 2]] * 2


@plain_only
@pytest.mark.parametrize(
    "rows",
    [
        torch.tensor([1, 2]),
        [1, 2],
        [[1, None]],
        [[1, "a"]],
        [{1, 2}],
        [None],
        torch.tensor(3),
        [[1.5]],
        [[True]],
        [torch.ones(1, 2).long()],
    ],
)
def test_what_are_no_rows_is_refused(rows):
    with pytest.raises(ValueError, match=r"prompt 0 must be|must be rows of ids"):
        left_pad(rows)


class Unlimited(nn.Module):
    "A model that tells no max_len."

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.new_cache = model.new_cache

    def forward(self, ids, **how):
        return self.model(ids, **how)


@plain_only
def test_nothing_wrong_is_silent():
    for window in (True, 8):
        with pytest.raises(ValueError, match="context_shift needs a model with a"):
            generate(
                Unlimited(small()), PROMPTS, max_new_tokens=3, context_shift=window
            )
    model = small()
    used = model.new_cache(3)
    with torch.no_grad():
        model(torch.tensor([[1, 2]] * 3), cache=used)
    with pytest.raises(ValueError, match="holds tokens already"):
        generate(model, PROMPTS, max_new_tokens=3, cache=used)
    for p in model.parameters():
        torch.nn.init.constant_(p, float("nan"))
    with pytest.raises(ValueError, match="row 0 hold NaN"):
        generate(model, PROMPTS, max_new_tokens=3, stop_token_ids=0)


def test_generate_names_every_parameter_of_stream():
    ours, theirs = (inspect.signature(f).parameters for f in (generate, stream))
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        assert parameter.kind in (
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        )
        assert parameter.default == theirs[name].default, name


@plain_only
def test_prompts_may_come_one_by_one():
    model = next(row for row in ROWS if row.cls is Llama).make()
    rows = [[1, 2, 3], [4, 5]]
    right = generate(model, rows, max_new_tokens=4)
    for prompts in (iter(rows), (row for row in rows), map(tuple, rows), np.array):
        if prompts is np.array:
            prompts = [np.array(row) for row in rows]
        assert generate(model, prompts, max_new_tokens=4) == right


@plain_only
def test_numbers_of_numpy_are_numbers():
    "As seeds, and as ids that end a text, in every decoder."
    model = next(row for row in ROWS if row.cls is Llama).make()
    params = [SamplingParams(seed=seed) for seed in (3, np.int64(3))]
    plain, numpy = (
        generate(model, [[1, 2]], max_new_tokens=6, sampling_params=p) for p in params
    )
    assert plain == numpy
    (text,) = generate(model, [[1, 2]], max_new_tokens=6)
    i = text.ids[3]
    right = generate(model, [[1, 2]], max_new_tokens=6, stop_token_ids=i)
    assert right[0].finish_reason == "stop"
    for stop in (np.int64(i), [np.int64(i)], {np.int32(i)}):
        assert generate(model, [[1, 2]], max_new_tokens=6, stop_token_ids=stop) == right
        found = beam_search(
            model, [[1, 2]], max_new_tokens=6, num_beams=2, stop_token_ids=stop
        )
        assert found == beam_search(
            model, [[1, 2]], max_new_tokens=6, num_beams=2, stop_token_ids=i
        )
