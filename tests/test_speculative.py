"""Drafts accepted and refused."""

import math
import random
import sys

import pytest
import torch

from conftest import ROOT
from helpers import by_day, generator, plain_only
from models import MAX_LEN, ROWS, VOCAB, Preallocates
from tformer.inference.generation import generate
from tformer.inference.prefix import PrefixedModel
from tformer.inference.sampler import SamplingParams, process_logits
from tformer.inference.speculative import (
    DraftModel,
    DraftProposal,
    PromptLookup,
    expected_tokens_per_step,
    rejection_sample,
    speculative_generate,
    stream_speculative,
)
from tformer.models.gpt import GPT, GPTConfig
from tformer.models.llama import Llama

LLAMA = next(r for r in ROWS if r.cls is Llama)


class Knowing:
    "Offers the true ids, each with some probability another."

    def __init__(self, ids, right, k=4, seed=0):
        self.ids = ids
        self.right = right
        self.k = k
        self.rng = random.Random(seed)

    def __call__(self, ids, max_tokens, sampling_params, generator):
        return DraftProposal(
            [
                i if self.rng.random() < self.right else (i + 1) % VOCAB
                for i in self.ids[len(ids) :][: min(self.k, max_tokens)]
            ]
        )


NAN = float("nan")


def nothing(ids, max_tokens, sampling_params, generator):
    return DraftProposal([])


def same(ours, reference):
    assert ours.ids == reference.ids and ours.finish_reason == reference.finish_reason
    assert ours.log_probs == pytest.approx(reference.log_probs, abs=1e-6)


def test_the_last_step_says_why_it_is_the_last():
    model = LLAMA.make(3)
    prompt = [1, 5, 2]
    text = generate(model, [prompt], max_new_tokens=12)[0].ids
    draft = Knowing(prompt + text, right=0.7)
    for stop, expected in (((), "length"), (text[7], "stop")):
        *others, last = stream_speculative(
            model, prompt, draft, max_new_tokens=12, stop_token_ids=stop
        )
        assert others and all(step.finish_reason is None for step in others)
        assert last.finish_reason == expected
        ids = [i for step in (*others, last) for i in step.ids]
        assert ids == (text if expected == "length" else text[: text.index(stop)])


# --- models whose cache cannot grow


def test_a_cache_that_cannot_grow_is_as_large_as_is_needed():
    prompt = [5, 3, 9]
    model = LLAMA.make().double()
    other = Preallocates(model)
    for new in (6, MAX_LEN - 2):  # a few, and to the very end
        (plain,) = generate(model, [prompt], max_new_tokens=new)
        draft = Knowing(prompt + plain.ids, 0.7, 3)
        text = speculative_generate(other, prompt, draft, max_new_tokens=new)
        same(text, plain)
        assert other.asked.pop() == min(MAX_LEN, 3 + new)


def test_a_draft_whose_cache_cannot_grow_goes_from_text_to_text():
    model = LLAMA.make().double()
    other = Preallocates(LLAMA.make().double())
    draft = DraftModel(other, 3)
    # the second text begins like the first and is longer, the third is another one
    for prompt, new in (([5, 3], 6), ([5, 3, 9], 14), ([1], 10), ([1, 4], MAX_LEN - 1)):
        (plain,) = generate(model, [prompt], max_new_tokens=new)
        same(speculative_generate(model, prompt, draft, max_new_tokens=new), plain)
    assert other.asked == sorted(other.asked) and other.asked[-1] == MAX_LEN


@pytest.mark.parametrize(
    "name", [r.name for r in ROWS if "window" in r.name.lower() and not r.source]
)
def test_a_draft_with_a_window_goes_from_text_to_text(name):
    "Its window has dropped what the beginning of the next text would see."
    row = next(r for r in ROWS if r.name == name)
    model = LLAMA.make().double()  # rounding is not meant
    draft = DraftModel(row.make(), 3)
    for prompt in ([1, 2, 3], [1, 2, 3], [1, 2, 4, 3]):
        right = generate(model, [prompt], max_new_tokens=MAX_LEN - 8)[0]
        ours = speculative_generate(model, prompt, draft, max_new_tokens=MAX_LEN - 8)
        same(ours, right)


def test_a_draft_that_is_asked_for_a_little_more_each_time_reads_on():
    other = Preallocates(LLAMA.make().double())
    draft = DraftModel(other, 2)
    text = [5]
    for _ in range(MAX_LEN - 2):
        text += draft(text, 1, None, None).ids
    (plain,) = generate(other.model, [[5]], max_new_tokens=len(text) - 1)
    assert text[1:] == plain.ids
    assert len(other.asked) <= 6 < MAX_LEN - 2


# --- greedy


@pytest.mark.parametrize(
    "name",
    by_day(
        [row.name for row in ROWS if row.causal and not row.source],
        "GPT",
        "Llama, grouped, tied, scaled",
        "Llama, windows",
        "Llama, sparse latent",
    ),
)
@pytest.mark.parametrize("right", by_day([0.0, 0.5, 1.0], 0.5))
def test_greedy_texts_are_those_of_generate(name, right):
    row = next(row for row in ROWS if row.name == name)
    model = row.make().double()
    for prompt in ([5], [3, 9, 3, 1]):
        new = MAX_LEN - len(prompt) + 1  # to the very end
        plain = generate(model, [prompt], max_new_tokens=new)[0]
        for k in (1, 3, 30):
            same(
                speculative_generate(
                    model,
                    prompt,
                    Knowing(prompt + plain.ids, right, k),
                    max_new_tokens=new,
                ),
                plain,
            )
        for draft in (
            DraftModel(row.make(seed_std(right)).double(), 3),
            PromptLookup(1, 3, 0.0),
            nothing,
        ):
            same(speculative_generate(model, prompt, draft, max_new_tokens=new), plain)


def seed_std(right):
    "Drafts of a model like the large one, or far from it."
    return 0.3 if right > 0.5 else 0.05


def test_a_right_draft_saves_steps():
    model = LLAMA.make().double()
    plain = generate(model, [[5]], max_new_tokens=16)[0].ids
    made = list(
        stream_speculative(model, [5], Knowing([5, *plain], 1.0, 3), max_new_tokens=16)
    )
    assert [len(step.ids) for step in made] == [4] * 4
    assert [step.num_accepted for step in made] == [3] * 4
    made = list(
        stream_speculative(model, [5], Knowing([5, *plain], 0.0, 3), max_new_tokens=16)
    )
    assert len(made) == 16 and not any(step.num_accepted for step in made)
    assert [len(step.draft_ids) for step in made] == [3] * 13 + [2, 1, 0]


@pytest.mark.parametrize("right", [0.5, 1.0])
def test_a_text_stops_where_generate_stops_it(right):
    model = LLAMA.make().double()
    plain = generate(model, [[5]], max_new_tokens=16)[0].ids
    draft = Knowing([5, *plain], right)
    for how in (
        dict(stop_token_ids=plain[6]),
        dict(stop_token_ids=[plain[3], plain[9]]),
        dict(stopping_criteria=lambda ids: len(ids) >= 5),
        dict(stopping_criteria=[lambda ids: plain[7] in ids]),
        dict(
            stop_token_ids={plain[9]},
            stopping_criteria=(lambda ids: False, lambda ids: len(ids) >= 3),
        ),
    ):
        text = generate(model, [[5]], max_new_tokens=16, **how)[0]
        assert text.finish_reason == "stop"
        same(speculative_generate(model, [5], draft, max_new_tokens=16, **how), text)


def test_modes_are_left_as_they_were():
    model = LLAMA.make().train()
    model.blocks[0].eval()
    before = [part.training for part in model.modules()]
    steps = stream_speculative(model, [5], nothing, max_new_tokens=3)
    next(steps)
    assert [part.training for part in model.modules()] == before
    list(steps)
    draft = DraftModel(model)
    speculative_generate(LLAMA.make(), [5], draft, max_new_tokens=3)
    assert [part.training for part in model.modules()] == before


@plain_only
def test_log_probabilities_are_at_least_float32():
    model = LLAMA.make().to(torch.bfloat16)
    (text,) = generate(model, [[3, 4]], max_new_tokens=12)
    made = speculative_generate(
        model, [3, 4], Knowing([3, 4, *text.ids], 0.7), max_new_tokens=12
    )
    with torch.no_grad():
        ids = torch.tensor([[3, 4, *made.ids]])
        logits = model(ids)[0, 1:-1].float().log_softmax(-1)
    expected = logits.gather(-1, ids[0, 2:, None])[:, 0].tolist()
    assert made.log_probs == pytest.approx(expected, abs=0.02)
    halves = torch.tensor(made.log_probs, dtype=torch.bfloat16).tolist()
    assert made.log_probs != halves


def test_a_model_in_training_writes_as_in_eval_mode():
    row = next(row for row in ROWS if row.cls is GPT)
    model = row.make(dropout=0.5)
    text = generate(model.eval(), [[5]], max_new_tokens=9)[0]
    same(speculative_generate(model.train(), [5], nothing, max_new_tokens=9), text)


def test_logits_that_are_no_numbers_end_nothing_silently():
    model = LLAMA.make()
    model.lm_head.weight.data[3] = NAN
    with pytest.raises(ValueError, match="logits of row 0 hold NaN"):
        speculative_generate(model, [5], nothing, max_new_tokens=9)


def test_a_model_drafts_for_itself():
    "All is accepted, greedy and drawn, and its cache forgets what is not."
    model = LLAMA.make().double()
    for sampling in (None, SamplingParams(seed=1), SamplingParams(top_k=3, seed=2)):
        made = list(
            stream_speculative(
                model,
                [5],
                DraftModel(model, 4),
                max_new_tokens=15,
                sampling_params=sampling,
            )
        )
        assert [step.num_accepted for step in made] == [4, 4, 4]
    draft = DraftModel(model, 3)
    other = DraftModel(model, 3)
    for ids in ([4, 4, 1], [4, 4, 1, 7], [4, 4], [9], [4, 4, 1, 7, 2]):
        fresh = DraftModel(model, 3)
        assert draft(ids, 3, None, None).ids == fresh(ids, 3, None, None).ids
    assert len(other(list(range(19)), 9, None, None).ids) == 1
    assert other(list(range(21)), 9, None, None).ids == []


# --- drawn


def test_a_draft_behind_a_prefix_offers_its_own_text():
    "After a refusal, too: its cache forgets tokens of the text, none of the prefix."
    torch.manual_seed(2)
    model, other = [PrefixedModel(LLAMA.make().eval(), [5, 6, 7, 8]) for _ in "ab"]
    with torch.no_grad():
        for p in [*model.parameters(), *other.parameters()]:
            p.add_(0.3 * torch.randn_like(p))
    model.compute_prefix()
    other.compute_prefix()
    text = [1, 2, 3]
    refused = 0
    for step in stream_speculative(
        model, text, DraftModel(other, 3), max_new_tokens=13
    ):
        if step.draft_ids:
            (right,) = generate(other, [text], max_new_tokens=len(step.draft_ids))
            assert [*step.draft_ids] == right.ids
        refused += len(step.ids) <= len(step.draft_ids)
        text = text + step.ids
    assert refused > 3


def chi_square(times, exact):
    "The probability of frequencies at least so odd."
    n = times.sum()
    square = ((times - n * exact) ** 2 / (n * exact)).sum()
    free = torch.tensor((len(exact) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(free, square / 2).item()


@plain_only
@pytest.mark.parametrize("certain, n", [(False, 20_000), (True, 4000)])
def test_two_tokens_have_the_distribution_of_the_model(certain, n):
    "A second token that is missing is drawn from p."
    rng = generator(5)
    vocab = 3
    p = torch.rand(vocab + 1, vocab, generator=rng).double().softmax(-1)
    q = (3 * torch.rand(vocab + 1, vocab, generator=rng)).double().softmax(-1)
    times = torch.zeros(vocab, vocab, dtype=torch.float64)
    u = torch.rand(n, 3, generator=rng, dtype=torch.float64)
    likeliest = q.argmax(-1)
    firsts = torch.multinomial(q[0], n, True, generator=rng).tolist()
    seconds = torch.multinomial(q[1:], n, True, generator=rng).tolist()
    for i in range(n):
        a = likeliest[0].item() if certain else firsts[i]
        b = likeliest[a + 1].item() if certain else seconds[a][i]
        found = rejection_sample(
            p[[0, a + 1, 0]],
            None if certain else q[[0, a + 1]],
            torch.tensor([a, b]),
            u[i],
        )
        if found.num_accepted:
            times[a, b if found.num_accepted == 2 else found.next_id] += 1
        else:
            times[found.next_id] += p[found.next_id + 1]  # its expectation
    exact = p[0][:, None] * p[1:]
    assert chi_square(times.sum(1), p[0]) > 1e-4
    assert chi_square(times.flatten(), exact.flatten()) > 1e-4


@plain_only
def test_texts_have_the_distribution_of_the_model():
    "The first two ids of texts with a draft that is often refused."
    model, other = (
        LLAMA.make(std, vocab_size=4, n_layers=1).double() for std in (0.4, 0.6)
    )
    settings = SamplingParams(temperature=0.7, top_p=0.95, repetition_penalty=1.3)
    times = torch.zeros(4, 4, dtype=torch.float64)
    n = 500
    draft = DraftModel(other, 2)
    refused = 0
    for seed in range(n):
        how = SamplingParams(**{**vars(settings), "seed": seed})
        made = list(
            stream_speculative(model, [1], draft, max_new_tokens=3, sampling_params=how)
        )
        a, b = [i for step in made for i in step.ids][:2]
        times[a, b] += 1
        refused += made[0].num_accepted < 2
    with torch.no_grad():
        p = process_logits(model(torch.tensor([[1]]))[:, -1], settings)[0]
        exact = p.softmax(-1)[:, None] * torch.cat(
            [
                process_logits(
                    model(torch.tensor([[1, a]]))[:, -1], settings, torch.tensor([[a]])
                ).softmax(-1)
                for a in range(4)
            ]
        )
    assert refused > n / 8
    possible = exact.flatten() > 0
    assert not times.flatten()[~possible].any()
    assert chi_square(times.flatten()[possible], exact.flatten()[possible]) > 1e-4


def test_without_drafts_a_seed_gives_the_text_of_generate():
    model = LLAMA.make()
    for seed in range(5):
        how = SamplingParams(temperature=0.9, top_k=20, seed=seed)
        same(
            speculative_generate(
                model, [5], nothing, max_new_tokens=15, sampling_params=how
            ),
            generate(model, [[5]], max_new_tokens=15, sampling_params=how)[0],
        )


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_penalties_see_what_stands_before_each_draft(right):
    "At temperature 0 there is one right text."
    model = LLAMA.make().double()
    for how in (
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
        SamplingParams(temperature=0.0, frequency_penalty=2.0),
        SamplingParams(temperature=0.0, presence_penalty=3.0, logit_bias={7: 2.0}),
    ):
        plain = generate(model, [[5]], max_new_tokens=15, sampling_params=how)[0]
        assert plain.ids != generate(model, [[5]], max_new_tokens=15)[0].ids
        same(
            speculative_generate(
                model,
                [5],
                Knowing([5, *plain.ids], right),
                max_new_tokens=15,
                sampling_params=how,
            ),
            plain,
        )


def test_a_seed_is_a_text():
    model = LLAMA.make()
    draft = DraftModel(LLAMA.make(0.25))
    how = SamplingParams(seed=3)
    one, two = (
        speculative_generate(model, [5], draft, max_new_tokens=15, sampling_params=how)
        for _ in range(2)
    )
    assert one == two
    how = SamplingParams(seed=4)
    assert (
        one.ids
        != speculative_generate(
            model, [5], draft, max_new_tokens=15, sampling_params=how
        ).ids
    )


def test_what_is_equal_is_accepted_and_what_is_impossible_is_not():
    p = torch.tensor([0.5, 0.5, 0.0]).expand(2, -1)
    for u in (0.0, 0.5, 0.999):
        u = torch.tensor([u, u])
        assert rejection_sample(p, p[:1], torch.tensor([1]), u).num_accepted == 1
        n, i = rejection_sample(p, None, torch.tensor([2]), u)
        assert n == 0 and i in (0, 1)


# --- how many


@pytest.mark.parametrize("alpha, k", [(0.0, 4), (0.5, 3), (0.9, 7), (1.0, 5)])
def test_tokens_a_step_by_simulation(alpha, k):
    rng = random.Random(0)
    n = 20_000
    total = 0
    for _ in range(n):
        total += 1
        for _ in range(k):
            if rng.random() >= alpha:
                break
            total += 1
    assert expected_tokens_per_step(alpha, k) == pytest.approx(total / n, rel=0.03)
    if alpha < 1:
        assert expected_tokens_per_step(alpha, k) == pytest.approx(
            (1 - alpha ** (k + 1)) / (1 - alpha)
        )


# --- prompt lookup


def steps_of(draft, text, start):
    "Steps, and longer steps, for a text that is known."
    at = start
    steps = 0
    longer = 0
    while at < len(text):
        offer = draft(text[:at], len(text) - at - 1).ids
        n = 0
        while n < len(offer) and offer[n] == text[at + n]:
            n += 1
        at = at + n + 1
        steps = steps + 1
        longer = longer + bool(offer)
    return steps, longer


def test_lookup_offers_what_followed_the_last_time():
    draft = PromptLookup(2, 5, 0.0)
    assert draft([1, 2, 3, 4, 1, 2], 9).ids == [3, 4, 1, 2, 3]
    assert draft([7, 8, 9], 9).ids == []  # another text
    assert draft([7, 8, 9, 7, 8], 2).ids == [9, 7]
    assert draft([7, 8, 1, 7, 8, 2, 7, 8], 1).ids == [2]  # the latest
    assert draft([6, 6, 6], 9).ids == [6] * 5
    assert PromptLookup(3, 5, 0.0)([1, 2, 3, 4, 1, 2], 9).ids == []


def test_lookup_saves_steps_where_a_text_repeats_itself():
    rng = random.Random(0)
    run = rng.sample(range(10_000), 40)
    steps, longer = steps_of(PromptLookup(), run * 7, 64)
    assert steps <= 23 and longer >= steps - 2
    torn = [i if rng.random() < 0.9 else 0 for i in run * 7]
    steps, longer = steps_of(PromptLookup(), torn, 64)
    assert steps + 0.6 * longer < 216 / 1.5


@pytest.mark.parametrize("letters", [2, 3, 4, 6, 12, 10_000])
def test_lookup_falls_silent_where_it_is_refused(letters):
    "A longer step costs 0.6 more: never 5 % more than without drafts."
    total = 0
    for seed in range(10):
        text = random.Random(seed).choices(range(letters), k=464)
        steps, longer = steps_of(PromptLookup(), text, 64)
        total += steps + 0.6 * longer
    assert total < 4000 * 1.03
    # every pair goes on otherwise each time
    last = {}
    text = [0, 0]
    while len(text) < 464:
        pair = (*text[-2:],)
        last[pair] = (last.get(pair, text[-1]) + 1) % 8
        text.append(last[pair])
    steps, longer = steps_of(PromptLookup(), text, 64)
    assert steps + 0.6 * longer < 400 * 1.03


def test_lookup_speaks_again_when_a_text_repeats_itself_again():
    rng = random.Random(0)
    fresh = rng.sample(range(10_000), 100)
    run = [*range(20)]
    draft = PromptLookup()
    draft.saved_steps = 0.0  # it was wrong for long
    steps, _ = steps_of(draft, fresh + run * 12, 100)
    assert steps < 240 - 100


# --- bad input


@pytest.mark.parametrize(
    "ids, draft, how, says",
    [
        (
            [[1], [2]],
            nothing,
            {},
            r"outer brackets of \[\[1\], \[2\]\].* one text at a time",
        ),
        ([[1, 2]], nothing, {}, r"prompt_ids must be one flat row .*drop the outer"),
        (torch.ones(1, 2).long(), nothing, {}, r"outer brackets of \[\[1, 1\]\]"),
        (torch.ones(1), nothing, {}, "^prompt_ids must be integers"),
        ([], nothing, {}, "^prompt_ids is empty: a model needs a token"),
        (torch.tensor(3), nothing, {}, "one flat row of ids, got tensor.3"),
        (iter([]), nothing, {}, "^prompt_ids is empty"),
        ("ab", nothing, {}, "one flat row of ids, got 'ab'"),
        (None, nothing, {}, "one flat row of ids, got None"),
        ([1], "table", {}, "'table'"),
        ([1], nothing, dict(max_new_tokens=0), "max_new_tokens"),
        (
            [1] * 15,
            nothing,
            {},
            "^prompt_ids of 15 ids and max_new_tokens 8 go beyond max_len 20",
        ),
        (
            [1],
            nothing,
            dict(stopping_criteria=lambda ids: 1 / 0),
            "a stopping criterion raised ZeroDivi",
        ),
        (
            [1],
            nothing,
            dict(stopping_criteria=lambda ids: None),
            "True or False, got None",
        ),
        (
            [1],
            nothing,
            dict(sampling_params=[SamplingParams()]),
            "sampling_params is None or",
        ),
        (
            [1],
            nothing,
            dict(stop_token_ids=2.5),
            "stop_token_ids must be an id or a list",
        ),
        ([1], lambda *a: [3], {}, r"\[3\]"),
        ([1], lambda *a: DraftProposal([3] * 9), {}, "9 ids where 7 have room"),
        ([1], lambda *a: DraftProposal([VOCAB]), {}, "id 47 is outside"),
        ([1], lambda *a: DraftProposal([1.0]), {}, "draft offers must be a whole"),
        ([1], lambda *a: DraftProposal([-1]), {}, "draft offers must be a whole"),
        ([1], lambda *a: DraftProposal([1], torch.ones(1, 9)), {}, "model has 47"),
        ([1], lambda *a: DraftProposal([1], torch.ones(1, VOCAB)), {}, "sums .47"),
        ([1], lambda *a: DraftProposal([1], torch.full((1, VOCAB), NAN)), {}, "nan"),
        (
            [1],
            lambda *a: DraftProposal([1], torch.eye(VOCAB)[:1] * 2 - 1 / VOCAB),
            {},
            "0 or more",
        ),
    ],
)
def test_bad_calls(ids, draft, how, says):
    with pytest.raises(ValueError, match=says):
        speculative_generate(LLAMA.make(), ids, draft, **dict(max_new_tokens=8) | how)


@pytest.mark.parametrize(
    "call, says",
    [
        (
            lambda: rejection_sample(
                torch.ones(2, 3), None, torch.tensor([1, 2]), torch.ones(2)
            ),
            "target_probs must be of shape",
        ),
        (lambda: DraftModel(LLAMA.make(), 0), "num_speculative_tokens must be"),
        (lambda: PromptLookup(0), "ngram_size must be"),
        (lambda: PromptLookup(min_saved_steps=-1.0), "min_saved_steps must be"),
        (lambda: expected_tokens_per_step(1.5, 3), "acceptance_rate must be"),
    ],
)
def test_bad_parts(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@plain_only
@pytest.mark.parametrize(
    "rate, k, says",
    [
        (-0.1, 3, "acceptance_rate must be at least 0 and at most 1, got -0.1"),
        (NAN, 3, "acceptance_rate must be at least 0 and at most 1, got nan"),
        ("a", 3, "acceptance_rate must be at least 0 and at most 1, got 'a'"),
        (None, 3, "acceptance_rate must be .* got None"),
        (True, 3, "acceptance_rate must be .* got True"),
        (0.5, -1, "num_speculative_tokens must be a whole number of at least 0"),
        (0.5, 1.5, "num_speculative_tokens must be a whole number .* got 1.5"),
        (0.5, "3", "num_speculative_tokens must be a whole number .* got '3'"),
        (0.5, True, "num_speculative_tokens must be a whole number .* got True"),
    ],
)
def test_rates_and_numbers_of_drafts_that_cannot_be(rate, k, says):
    with pytest.raises(ValueError, match=says):
        expected_tokens_per_step(rate, k)


QUARTERS = torch.full((3, 4), 0.25)
DRAWN = dict(
    target_probs=QUARTERS,
    draft_probs=QUARTERS[:2],
    draft_ids=torch.tensor([1, 2]),
    uniforms=torch.tensor([0.1, 0.2, 0.3]),
)


@plain_only
@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
@pytest.mark.parametrize(
    "change, says",
    [
        (
            dict(draft_ids=torch.tensor([1, 4])),
            "draft_ids must be from 0 to 3, got 1, 4",
        ),
        (
            dict(draft_ids=torch.tensor([-1, 2])),
            "draft_ids must be from 0 to 3, got -1",
        ),
        (dict(draft_ids=[1, 2]), "draft_ids must be Tensor, got list"),
        (dict(draft_ids=None), "draft_ids must be Tensor, got NoneType"),
        (
            dict(draft_ids=torch.tensor(1)),
            r"draft_ids must be of shape \(k\), got \(\)",
        ),
        (dict(draft_ids=torch.tensor([[1, 2]])), r"draft_ids .* got \(1, 2\)"),
        (dict(draft_ids=torch.tensor([1.0, 2.0])), "draft_ids must be integers"),
        (dict(draft_ids=torch.tensor([True, False])), "draft_ids must be integers"),
        (dict(target_probs=QUARTERS.tolist()), "target_probs must be Tensor, got list"),
        (dict(target_probs=None), "target_probs must be Tensor, got NoneType"),
        (dict(uniforms=[0.1, 0.2, 0.3]), "uniforms must be Tensor, got list"),
        (dict(uniforms=None), "uniforms must be Tensor, got NoneType"),
        (dict(target_probs=QUARTERS.long()), "target_probs must have a floating type"),
        (
            dict(target_probs=QUARTERS - 1),
            "target_probs must be probabilities, .* -0.75",
        ),
        (
            dict(target_probs=QUARTERS * 3),
            "target_probs must be probabilities, .* sums",
        ),
        (
            dict(target_probs=QUARTERS * NAN),
            "target_probs must be probabilities, .* nan",
        ),
    ],
)
def test_what_cannot_be_verified_is_refused(change, says, certain):
    kwargs = DRAWN | change
    if certain:
        kwargs["draft_probs"] = None
    with pytest.raises(ValueError, match=says):
        rejection_sample(**kwargs)


@plain_only
@pytest.mark.parametrize(
    "draft_probs, says",
    [
        (QUARTERS[:2].tolist(), "draft_probs must be Tensor, got list"),
        (QUARTERS[:2].long(), "draft_probs must have a floating type"),
        (QUARTERS[:2] * 0, "draft_probs must be probabilities, .* sums"),
    ],
)
def test_what_a_draft_did_not_draw_from_is_refused(draft_probs, says):
    with pytest.raises(ValueError, match=says):
        rejection_sample(**DRAWN | dict(draft_probs=draft_probs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_probabilities_may_be_rounded_and_ids_be_short(dtype, id_dtype):
    "Half precision moves the sum of 50,000 equal probabilities."
    p = torch.full((2, 50_000), 1 / 50_000, dtype=dtype)
    ids = torch.tensor([7], dtype=id_dtype)
    u = torch.tensor([0.5, 0.5])
    assert rejection_sample(p, p[:1], ids, u).num_accepted == 1
    assert rejection_sample(p, None, ids, u).num_accepted == 0


@plain_only
@pytest.mark.parametrize("model", ["a", torch.nn.Linear(2, 2), None])
def test_what_is_no_decoder_drafts_nothing(model):
    name = type(model).__name__
    with pytest.raises(ValueError, match=f"must be a decoder, .* got {name}"):
        DraftModel(model)


def gpt_of(vocab_size):
    return GPT(
        GPTConfig(vocab_size=vocab_size, d_model=8, n_layers=1, n_heads=2, max_len=9)
    )


@pytest.mark.parametrize("vocab_size", [20, 1000])
@pytest.mark.parametrize("how", [None, SamplingParams(seed=1)])
def test_a_draft_model_of_another_vocabulary_is_refused_at_once(vocab_size, how):
    model = gpt_of(31)
    draft = DraftModel(gpt_of(vocab_size))
    says = f"^the draft model has {vocab_size} ids and the model 31: "
    with pytest.raises(ValueError, match=says):
        stream_speculative(model, [1, 2], draft, max_new_tokens=4, sampling_params=how)
    same_size = DraftModel(gpt_of(31))
    assert stream_speculative(model, [1, 2], same_size, max_new_tokens=4)
    # what does not tell how many ids it has is not compared
    assert stream_speculative(PrefixedModel(model, [1]), [2], draft, max_new_tokens=4)


def test_a_model_is_no_draft_before_it_is_wrapped():
    with pytest.raises(ValueError, match=r"got the model GPT: .* DraftModel\(model\)$"):
        stream_speculative(gpt_of(31), [1], gpt_of(31), max_new_tokens=3)


@pytest.mark.nightly
@plain_only
def test_the_benchmark_runs(monkeypatch, capsys):
    sys.path.insert(0, str(ROOT / "tests" / "bench"))
    import bench_speculative
    import timing

    monkeypatch.setattr(bench_speculative, "NEW", 30)
    monkeypatch.setattr(timing, "quick", True)
    monkeypatch.setattr(sys, "argv", ["", "--quick"])
    bench_speculative.main()
    assert capsys.readouterr().out.count(" x ") == 17


def test_a_list_that_grows_is_kept_score_of():
    draft = PromptLookup(ngram_size=1, num_speculative_tokens=2, min_saved_steps=0.0)
    ids = [1, 2, 3, 1]
    draft(ids, 4)
    guess = list(draft.proposed_ids)
    ids += guess[:1]
    draft(ids, 4)
    assert draft.num_matched == 1 or draft.proposed_ids != guess


# --- interrupts


class Interrupting:
    "Raises an interrupt at one of the lines that it runs through, counted from 0."

    def __init__(self, function, at):
        self.function = function
        self.code = {c.__code__ for c in self._methods(function)}
        self.left = at

    @staticmethod
    def _methods(function):
        return [f for f in vars(type(function)).values() if hasattr(f, "__code__")]

    def __call__(self, *args):
        sys.settrace(self._trace)
        try:
            return self.function(*args)
        finally:
            sys.settrace(None)

    def _trace(self, frame, event, arg):
        if frame.f_code not in self.code:
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                self.left = math.inf
                raise KeyboardInterrupt
        return self._trace


@pytest.mark.parametrize("kind", ["model", "lookup"])
def test_a_draft_that_was_interrupted_goes_on_as_a_new_one_would(kind):
    other = LLAMA.make().double()
    text = [5, 3, 5, 3, 5, 3, 9, 5]

    def make():
        return DraftModel(other, 1) if kind == "model" else PromptLookup(1, 2, 0.0)

    def ask(draft, ids):
        return draft(ids, MAX_LEN - len(ids), SamplingParams(), generator(1))

    expected = ask(make(), text)
    assert expected.ids
    at = 0
    while True:
        draft = make()
        ask(draft, text[:4])
        try:
            ask(Interrupting(draft, at), text)
        except KeyboardInterrupt:
            found = ask(draft, text)
            assert found.ids == expected.ids, at
            if kind == "model":
                torch.testing.assert_close(found.probs, expected.probs)
        else:
            break
        at += 1
    assert at > 15


def test_a_penalty_counts_the_prompt_in_drafts_and_in_the_model():
    model = LLAMA.make().double()
    prompt = [*range(12)]
    params = SamplingParams(repetition_penalty=1.5, seed=1)
    (plain,) = generate(model, [prompt], max_new_tokens=8, sampling_params=params)
    how = dict(max_new_tokens=8, sampling_params=params)
    same(speculative_generate(model, prompt, nothing, **how), plain)
    proposal = DraftModel(model, 1)(prompt, 9, params, generator())
    ids = torch.tensor([prompt])
    with torch.no_grad():
        logits = process_logits(model(ids)[:, -1], params, None, ids)
    torch.testing.assert_close(proposal.probs, logits.softmax(-1))
    steps = [*stream_speculative(model, prompt, DraftModel(model, 3), **how)]
    assert len(steps) == 2  # a model that drafts for itself is never refused
    assert all(step.num_accepted == len(step.draft_ids) == 3 for step in steps)
