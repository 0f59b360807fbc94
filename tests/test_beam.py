"""Beam search: against enumeration, ``transformers``, and lists of Python."""

import copy
import itertools
import math
import re
import sys
import warnings

import pytest
import torch

from conftest import ROOT
from helpers import by_day, draw_ids, generator, plain_only
from models import ROWS, VOCAB, WRITERS, Preallocates, rows
from tformer.inference.beam import (
    beam_search,
    best_possible_score,
    expand_beams,
    expected_utility,
    length_divisor,
    select_minimum_bayes_risk,
    split_finished,
)
from tformer.inference.generation import generate
from tformer.inference.sampler import SamplingParams
from tformer.models.mini_gpt import load_record

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers.modeling_outputs import BaseModelOutput

torch.set_num_threads(1)
NAN = float("nan")


class Table:
    """A model whose next id depends on the last two, and on the place.

    ``logits[n % 8, a, b]``.  It keeps the protocol, has no weights, and
    counts its calls.
    """

    max_len = 100

    def __init__(self, vocab=4, seed=0, spread=1.5):
        self.logits = spread * torch.randn(
            8, vocab, vocab, vocab, generator=generator(seed), dtype=torch.float64
        )
        self.vocab = vocab
        self.calls = 0

    def new_cache(self, batch, max_len=None):
        return Kept(batch)

    def __call__(self, ids, *, cache, positions=None):
        self.calls += 1
        if positions is not None:
            ids = ids.masked_fill(positions < 0, -1)
        cache.texts = torch.cat([cache.texts, ids], 1)
        texts = [[i for i in text if i >= 0] for text in cache.texts.tolist()]
        return torch.stack([self.after(text) for text in texts])[:, None]

    def after(self, text):
        return self.logits[len(text) % 8, text[-2:][0], text[-1]]

    def log_probs(self, prompt, ids):
        "Of each id after those before it."
        text = list(prompt)
        found = []
        for i in ids:
            found.append(self.after(text).log_softmax(-1)[i].item())
            text.append(i)
        return found


class Kept:
    "A cache of texts: what is asked of a cache, and what the table reads."

    key_positions = None
    nbytes = 0

    def __init__(self, batch):
        self.texts = torch.empty(batch, 0, dtype=torch.int64)

    @property
    def lengths(self):
        return torch.tensor([self.texts.shape[1]])

    def select(self, rows):
        self.texts = self.texts[rows]

    def crop(self, n):
        self.texts = self.texts[:, :n]

    def set_rows(self, rows, source):
        self.texts[rows] = source.texts


def grown(model, prompt, live):
    "All continuations of some texts, with their sums; none that is impossible."
    return [
        ((*ids, i), total + p)
        for ids, total in live
        for i, p in enumerate(model.after([*prompt, *ids]).log_softmax(-1).tolist())
        if p > -math.inf
    ]


def judged(ids, stop, criteria):
    "Whether a text has ended, and its ids without the stop id."
    if ids[-1] in stop:
        return True, list(ids[:-1])
    return any(f(list(ids)) for f in criteria), list(ids)


def every_text(model, prompt, room, norm, stop, criteria=()):
    "All texts that end, or fill the room: (score, ids, why); sorted."
    found = []
    live = [((), 0.0)]
    for n in range(1, room + 1):
        going = []
        for ids, total in grown(model, prompt, live):
            ended, text = judged(ids, stop, criteria)
            if ended or n == room:
                found.append((total / norm(n), text, "stop" if ended else "length"))
            else:
                going.append((ids, total))
        live = going
    return sorted(found, reverse=True)


def lists(
    model,
    prompt,
    width,
    room,
    norm,
    stop,
    criteria=(),
    early_stopping=None,
    n_best=1,
    calls=None,
):
    """Beam search as one would write it on lists: (score, ids, why); sorted.

    ``early_stopping`` None goes on to the last step.  ``calls`` comes to hold the
    texts about which functions are asked.
    """
    calls = [] if calls is None else calls
    live = [((), 0.0)]
    done = []
    for n in range(1, room + 1):
        going = []
        every = sorted(grown(model, prompt, live), key=lambda c: -c[1])
        for k, (ids, total) in enumerate(every):
            if len(going) == width or (n == room and k == width):
                break
            if criteria and ids[-1] not in stop:
                calls.append(list(ids))
            ended, text = judged(ids, stop, criteria)
            if k < width and (ended or n == room):
                done.append((total / norm(n), text, "stop" if ended else "length"))
            if not ended:
                going.append((ids, total))
        done = sorted(done, reverse=True)[:width]
        live = going
        if not live:
            break
        best = live[0][1]
        if early_stopping is True and len(done) >= width:
            break
        worst = done[-1][0] if len(done) >= width else -math.inf
        if early_stopping is False and best / norm(n) <= worst:
            break
        worst = done[n_best - 1][0] if len(done) >= n_best else -math.inf
        bound = max(best / norm(m) for m in range(n, room + 1))
        if early_stopping == "never" and bound <= worst:
            break
    return done


EARLY_STOPPING = ("never", False, True)
NORMS = [
    (0.0, "power"),
    (0.7, "power"),
    (1.0, "power"),
    (2.0, "power"),
    (-0.5, "power"),
    (0.6, "gnmt"),
    (1.4, "gnmt"),
]


def norm_of(alpha, form):
    return lambda n: (n if form == "power" else (5 + n) / 6) ** alpha


def same(beams, texts, n=None):
    "As many texts, of the same ids and scores, ended for the same reason."
    texts = texts[:n]
    assert [beam.ids for beam in beams] == [ids for _, ids, _ in texts]
    for beam, (score, _, why) in zip(beams, texts, strict=True):
        assert beam.finish_reason == why
        assert beam.score == pytest.approx(score, abs=1e-9)


@pytest.mark.parametrize("alpha, form", NORMS)
@pytest.mark.parametrize("seed", range(4))
def test_a_beam_that_is_wide_enough_equals_enumeration(alpha, form, seed):
    model = Table(seed=seed)
    prompt = [2, 0, 1]
    stop = 3
    texts = every_text(model, prompt, 5, norm_of(alpha, form), [stop])
    assert len(texts) == 1 + 3 + 9 + 27 + 81 + 243
    (found,) = beam_search(
        model,
        [prompt],
        num_beams=500,
        max_new_tokens=5,
        stop_token_ids=stop,
        length_penalty=alpha,
        length_penalty_form=form,
        num_return_sequences=500,
    )
    same(found, texts)
    (found,) = beam_search(
        model,
        [prompt],
        num_beams=324,
        max_new_tokens=5,
        stop_token_ids=stop,
        length_penalty=alpha,
        length_penalty_form=form,
        num_return_sequences=10,
    )
    same(found, texts, 10)


@pytest.mark.parametrize("alpha, form", NORMS)
def test_every_width_equals_lists(alpha, form):
    for seed, width in itertools.product(range(4), (1, 2, 3, 7)):
        model = Table(5, seed)
        wanted = lists(model, [1], width, 7, norm_of(alpha, form), [4])
        (found,) = beam_search(
            model,
            [[1]],
            num_beams=width,
            max_new_tokens=7,
            stop_token_ids=4,
            length_penalty=alpha,
            length_penalty_form=form,
            num_return_sequences=width,
        )
        same(found, wanted, width)


def test_the_mean_of_best_sums_does_not_fall_with_the_width():
    "A single search may; where nothing is pruned any more, none does."
    best = [
        [
            beam_search(
                Table(6, seed, 2.0),
                [[0]],
                num_beams=w,
                max_new_tokens=6,
                stop_token_ids=5,
                length_penalty=0.0,
            )[0][0].log_prob
            for w in (1, 2, 4, 8, 32, 4000)
        ]
        for seed in range(20)
    ]
    for row in best:
        assert max(row) == row[-1]
    means = torch.tensor(best).mean(0)
    assert (means.diff() > -1e-6).all() and means[-1] > means[0] + 0.1


def test_one_beam_that_ends_at_the_first_end_is_greedy():
    "And one that goes on, by the sure rule, may only gain by it."
    others = 0
    for seed in range(40):
        model = Table(5, seed)
        ids = []
        text = [2]
        while len(ids) < 9 and 4 not in ids:
            ids.append(model.after(text).argmax().item())
            text.append(ids[-1])
        for how in (
            dict(length_penalty=0.0),
            dict(length_penalty=-0.7),
            dict(length_penalty=1.0, early_stopping=True),
            dict(length_penalty=2.0, early_stopping=False),
        ):
            ((found,),) = beam_search(
                model, [[2]], num_beams=1, max_new_tokens=9, stop_token_ids=4, **how
            )
            assert found.ids == [i for i in ids if i != 4]
            assert (found.finish_reason == "stop") == (ids[-1] == 4)
        ((found,),) = beam_search(
            model,
            [[2]],
            num_beams=1,
            max_new_tokens=9,
            stop_token_ids=4,
            length_penalty=1.0,
        )
        mean = sum(model.log_probs([2], ids)) / len(ids)
        same_ids = found.ids == [i for i in ids if i != 4]
        assert same_ids or found.score > mean
        others += not same_ids
    assert others >= 5


def test_the_sure_bound_loses_nothing_and_the_usual_one_does():
    worse = {False: 0, True: 0}
    for seed in range(40):
        model = Table(5, seed)
        how = dict(num_beams=3, max_new_tokens=12, stop_token_ids=4, length_penalty=2.0)
        wanted = lists(model, [1], 3, 12, norm_of(2.0, "power"), [4])
        ((sure,),) = beam_search(model, [[1]], **how)
        same([sure], wanted, 1)
        for early in worse:
            ((found,),) = beam_search(model, [[1]], early_stopping=early, **how)
            assert found.score <= sure.score + 1e-12
            worse[early] += found.score < sure.score - 1e-9
    assert 3 <= worse[False] < worse[True], worse


def test_a_search_ends_when_nothing_can_be_gained():
    "With sums, a search is over with the first text that none can reach."
    model = Table(4)
    model.logits[..., 3] += 12.0  # nearly always the end
    beam_search(
        model,
        [[1]],
        num_beams=3,
        max_new_tokens=50,
        stop_token_ids=3,
        length_penalty=0.0,
    )
    assert model.calls <= 2


def test_a_bound_is_a_bound():
    for alpha, form in NORMS:
        for n, longest in ((1, 1), (2, 9), (5, 6)):
            bound = best_possible_score(-3.0, n, longest, alpha, form)
            norm = norm_of(alpha, form)
            each = [-3.0 / norm(m) for m in range(n, longest + 1)]
            assert bound == pytest.approx(max(each))


def test_grow_and_set_apart_equal_loops():
    sums = torch.tensor([[-1.0, -2.0], [-3.0, -0.5]])
    following = torch.randn(2, 2, 5, generator=generator()).log_softmax(-1)
    best = expand_beams(sums, following, 4)
    stop = torch.tensor([0, 3])
    ended, live = split_finished(best.ids, stop, 2)
    for row in range(2):
        every = sorted(
            ((sums[row, k] + following[row, k, i]).item(), k, i)
            for k in range(2)
            for i in range(5)
        )[::-1][:4]
        assert [
            *zip(
                best.log_probs[row].tolist(),
                best.beam_indices[row].tolist(),
                best.ids[row].tolist(),
                strict=True,
            )
        ] == every
        ends = [i in (0, 3) for *_, i in every]
        assert ended[row].tolist() == [e and k < 2 for k, e in enumerate(ends)]
        assert live[row].tolist() == [
            not e and sum(not x for x in ends[: k + 1]) <= 2 for k, e in enumerate(ends)
        ]


def test_length_norms():
    assert length_divisor(7, 0.0) == length_divisor(1, 3.0) == 1
    assert length_divisor(4, 0.5) == 2 and length_divisor(4, -1.0) == 0.25
    assert length_divisor(7, 0.5, "gnmt") == pytest.approx(math.sqrt(2))
    assert length_divisor(1, 0.6, "gnmt") == 1


def test_the_prompt_is_not_counted():
    "A longer prompt of the same last ids gives the same, score and all."
    model = Table()
    a, b = (
        beam_search(
            model,
            [prompt],
            num_beams=3,
            max_new_tokens=6,
            stop_token_ids=3,
            length_penalty=1.0,
            num_return_sequences=3,
        )[0]
        for prompt in ([1, 2], [0] * 40 + [1, 2])
    )
    assert a == b


def test_many_stop_ids_and_none():
    model = Table(6, 3)
    for stop in ((), (5,), [1, 3, 5], (5, 5), (0, 1, 2, 3, 4, 5)):
        (found,) = beam_search(
            model,
            [[2]],
            num_beams=4,
            max_new_tokens=6,
            stop_token_ids=stop,
            num_return_sequences=4,
        )
        same(found, lists(model, [2], 4, 6, norm_of(1.0, "power"), (*stop,)))
        for beam in found:
            n = len(beam.ids) + (beam.finish_reason == "stop")
            assert not {*beam.ids} & {*stop}  # but they count
            assert beam.finish_reason == "stop" or n == 6
            assert beam.score == pytest.approx(beam.log_prob / n)
            ends = [[i] for i in stop] if beam.finish_reason == "stop" else [[]]
            sums = [sum(model.log_probs([2], beam.ids + end)) for end in ends]
            assert min(abs(beam.log_prob - x) for x in sums) < 1e-9


def test_forbidden_ids_are_never_written():
    model = Table(5, 1)
    model.logits[..., 1:3] = -math.inf
    (found,) = beam_search(
        model,
        [[0]],
        num_beams=50,
        max_new_tokens=3,
        stop_token_ids=4,
        num_return_sequences=50,
    )
    texts = {tuple(beam.ids) for beam in found}
    assert len(texts) == len(found)
    assert texts == {
        text for n in range(4) for text in itertools.product((0, 3), repeat=n)
    }


def test_fewer_texts_than_asked_for_are_no_mistake():
    (found,) = beam_search(
        Table(2),
        [[0]],
        num_beams=9,
        max_new_tokens=2,
        stop_token_ids=1,
        num_return_sequences=9,
    )
    assert sorted(beam.ids for beam in found) == [[], [0], [0, 0]]


# --- functions that end a text

CRITERIA = {
    "none": (),
    "an id": (lambda ids: ids[-1] == 2,),
    "two functions": (lambda ids: ids[-2:] == [0, 1], lambda ids: len(ids) == 4),
    "most of all": (lambda ids: hash((*ids,)) % 10 < 8,),
    "all but an id": (lambda ids: ids[-1] != 0,),
    "everything": (lambda ids: True,),
}
PROMPTS = [[1], [2, 0, 1], [0, 0, 4, 3, 2]]


class Recorded:
    "A function that notes which texts it is asked about."

    def __init__(self, function=lambda ids: False):
        self.function = function
        self.calls = []

    def __call__(self, ids):
        self.calls.append(list(ids))
        return self.function(ids)


@pytest.mark.parametrize("early_stopping", EARLY_STOPPING)
@pytest.mark.parametrize("criteria", CRITERIA.values(), ids=CRITERIA)
@pytest.mark.parametrize("stop", [(), (4,), (1, 3)])
def test_functions_end_texts_as_in_lists(stop, criteria, early_stopping):
    for seed, (width, alpha) in itertools.product(
        range(2), ((1, 1.0), (2, 0.0), (3, 2.0), (6, 1.0))
    ):
        model = Table(5, seed)
        n_best = (width + 1) // 2
        found = beam_search(
            model,
            PROMPTS,
            num_beams=width,
            max_new_tokens=6,
            stop_token_ids=stop,
            stopping_criteria=criteria,
            length_penalty=alpha,
            num_return_sequences=n_best,
            early_stopping=early_stopping,
        )
        for beams, prompt in zip(found, PROMPTS, strict=True):
            norm = norm_of(alpha, "power")
            how = dict(early_stopping=early_stopping, n_best=n_best)
            same(
                beams,
                lists(model, prompt, width, 6, norm, stop, criteria, **how),
                n_best,
            )


def test_rows_with_fewer_live_beams_than_others_are_filled_up():
    """Of two beams the one prompt keeps both, and the other one.

    What fills the row has ended, and is not continued, however likely.
    """
    model = Table(5, 1)
    model.logits *= 0.1
    model.logits[2, 1, 1, :2] += 5.0  # the one prompt has the beams 0 and 1
    model.logits[2, 2, 2, 2:4] += 5.0  # the other one 2 and 3
    model.logits[4:, :, :, 1] += 5.0
    criterion = lambda ids: len(ids) == 2 and ids[0] > 1 and ids != [3, 0]  # noqa: E731
    for width, room in itertools.product((2, 3), (3, 4, 6)):
        found = beam_search(
            model,
            [[1, 1], [2, 2]],
            num_beams=width,
            max_new_tokens=room,
            stopping_criteria=criterion,
            length_penalty=2.0,  # what grows on would win
            num_return_sequences=width,
        )
        for beams, prompt in zip(found, ([1, 1], [2, 2]), strict=True):
            norm = norm_of(2.0, "power")
            how = dict(criteria=[criterion], early_stopping="never", n_best=width)
            same(beams, lists(model, prompt, width, room, norm, (), **how), width)
            assert not any(len(b.ids) > 2 and criterion(b.ids[:2]) for b in beams)


@pytest.mark.parametrize("stop", [(), (3,), (0, 3)])
@pytest.mark.parametrize("criteria", CRITERIA.values(), ids=CRITERIA)
def test_functions_and_a_beam_that_is_wide_enough_equal_enumeration(criteria, stop):
    for seed, alpha in itertools.product(range(2), (0.0, 1.0, -0.5)):
        model = Table(4, seed)
        found = beam_search(
            model,
            [[2, 0], [1]],
            num_beams=1024,
            max_new_tokens=5,
            stop_token_ids=stop,
            stopping_criteria=criteria,
            length_penalty=alpha,
            num_return_sequences=1024,
        )
        for beams, prompt in zip(found, ([2, 0], [1]), strict=True):
            norm = norm_of(alpha, "power")
            same(beams, every_text(model, prompt, 5, norm, stop, criteria))


def test_a_function_is_asked_only_where_its_answer_counts():
    "Once about a text, the best first, until enough go on; about no stop id."
    asked = 0
    for (name, criteria), seed, width, early in itertools.product(
        CRITERIA.items(), range(4), (1, 2, 5), EARLY_STOPPING
    ):
        if name != "none":
            model = Table(5, seed)
            model.logits[:, :, 2, 1] = -math.inf  # nor about what cannot be
            functions = [Recorded(), *map(Recorded, criteria)]
            calls = []
            lists(
                model,
                [1],
                width,
                6,
                norm_of(1.0, "power"),
                [4],
                criteria,
                early_stopping=early,
                calls=calls,
            )
            beam_search(
                model,
                [[1]],
                num_beams=width,
                max_new_tokens=6,
                stop_token_ids=4,
                stopping_criteria=functions,
                early_stopping=early,
            )
            assert functions[0].calls == calls
            assert functions[1].calls == calls
            assert not any(4 in ids for ids in calls)
            asked += len(calls)
    assert asked > 1000


def test_a_function_may_keep_and_change_the_list_that_it_is_given():
    def clears(ids):
        last = ids[-1]
        ids.clear()
        return last == 2

    a, b = (
        beam_search(
            Table(5, 1),
            PROMPTS,
            num_beams=3,
            max_new_tokens=6,
            stopping_criteria=function,
            num_return_sequences=3,
        )
        for function in (clears, lambda ids: ids[-1] == 2)
    )
    assert a == b and any(beam.finish_reason == "stop" for row in a for beam in row)


def test_a_function_that_raises_is_named_with_its_prompt():
    "Of the two, the first ends at once, and leaves the batch."
    model = Table(4)
    model.logits[:, 1, 1, 3] += 20.0

    def raises(ids):
        return len(ids) == 3 and 1 / 0

    with pytest.raises(ValueError, match="ZeroDivisionError at row 1 after 3 ids"):
        beam_search(
            model,
            [[1, 1], [0, 2]],
            num_beams=1,
            max_new_tokens=5,
            stop_token_ids=3,
            stopping_criteria=raises,
            early_stopping=True,
        )


def test_a_search_without_functions_takes_no_more_candidates(monkeypatch):
    taken = []

    def counts(log_probs, following, n):
        taken.append(n)
        return expand_beams(log_probs, following, n)

    monkeypatch.setattr("tformer.inference.beam.expand_beams", counts)
    how = dict(num_beams=3, max_new_tokens=4, stop_token_ids=[3, 4])
    beam_search(Table(30), [[1]], **how)
    assert {*taken} == {9} and len(taken) <= 4
    taken.clear()
    beam_search(Table(30), [[1]], stopping_criteria=lambda ids: False, **how)
    assert {*taken} == {9}
    taken.clear()
    beam_search(Table(30), [[1]], stopping_criteria=lambda ids: ids[-1] != 0, **how)
    assert taken[:3] == [9, 18, 36]  # of 30 in the first step


def test_the_same_ids_may_be_ended_by_two_stop_ids():
    model = Table(4, 2)
    model.logits[..., 0] = -math.inf
    (found,) = beam_search(
        model,
        [[1]],
        num_beams=4,
        max_new_tokens=1,
        stop_token_ids=[2, 3],
        num_return_sequences=4,
    )
    assert sorted(beam.ids for beam in found) == [[], [], [1]]
    sums = sorted(beam.log_prob for beam in found if not beam.ids)
    assert sums == pytest.approx(sorted(model.after([1]).log_softmax(-1)[2:].tolist()))


# --- models with weights


def searched(row, model, ids, source=None, **how):
    more = {}
    if row.source:
        mask = source >= 0
        more = dict(
            encoder_hidden_states=model.encode(source.clamp(min=0), mask),
            encoder_attention_mask=mask,
        )
    return beam_search(model, ids, stop_token_ids=[7, 8], **more, **how)


def sources(b, t=6):
    made = draw_ids(b, t, low=1, high=VOCAB, seed=9)
    for i in range(b):
        made[i, t - i :] = -1
    return made


@rows("causal", usual=WRITERS)
@torch.no_grad()
def test_a_batch_gives_each_the_same_as_alone(row):
    model = row.make()
    prompts = [[9, 3, 5], [11], [4, 2, 6, 1, 30], [9, 3, 5]]
    source = sources(4)
    for alpha in (0.0, 1.0):
        how = dict(
            num_beams=3, max_new_tokens=9, length_penalty=alpha, num_return_sequences=3
        )
        together = searched(row, model, prompts, source, **how)
        for i, prompt in enumerate(prompts):
            (alone,) = searched(row, model, [prompt], source[i : i + 1], **how)
            assert [b.ids for b in together[i]] == [b.ids for b in alone]
            for a, b in zip(together[i], alone, strict=True):
                assert a.score == pytest.approx(b.score, abs=1e-5)


@rows("causal", usual=WRITERS)
@torch.no_grad()
def test_scores_are_those_of_one_pass_over_the_whole_text(row):
    model = row.make()
    source = sources(2)
    prompts = [[9, 3, 5], [11, 2]]
    for form in ("power", "gnmt"):
        every = searched(
            row,
            model,
            prompts,
            source,
            num_beams=4,
            max_new_tokens=8,
            length_penalty=0.8,
            length_penalty_form=form,
            num_return_sequences=4,
        )
        for i, prompt in enumerate(prompts):
            for beam in every[i]:
                ends = [[7], [8]] if beam.finish_reason == "stop" else [[]]
                n = len(beam.ids + ends[0])
                text = torch.tensor([prompt + beam.ids])
                more = {}
                if row.source:
                    mask = source[i : i + 1] >= 0
                    more = dict(
                        encoder_hidden_states=model.encode(
                            source[i : i + 1].clamp(min=0), mask
                        ),
                        encoder_attention_mask=mask,
                    )
                said = model(text, **more).log_softmax(-1)[0, len(prompt) - 1 :]
                sums = [said[range(n), beam.ids + end].sum().item() for end in ends]
                total = min(sums, key=lambda x: abs(x - beam.log_prob))
                assert beam.log_prob == pytest.approx(total, abs=1e-4)
                assert beam.score == pytest.approx(
                    total / norm_of(0.8, form)(n), abs=1e-4
                )


def test_a_model_in_training_is_searched_in_eval_mode_and_left():
    row = next(row for row in ROWS if row.name == "GPT")
    model = row.make(dropout=0.5)
    model.train()
    model.blocks[0].eval()
    modes = [m.training for m in model.modules()]
    a, b = (
        beam_search(model, [[3, 4]], num_beams=3, max_new_tokens=6, stop_token_ids=7)
        for _ in range(2)
    )
    assert a == b
    assert [m.training for m in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())


# --- against transformers


class Theirs:
    "A model of ``transformers``, called as the course calls models."

    max_len = 64

    def __init__(self, model):
        self.model = model

    def new_cache(self, batch, max_len=None):
        return Past()

    def __call__(
        self, ids, *, cache, encoder_hidden_states=None, encoder_attention_mask=None
    ):
        if encoder_hidden_states is not None:
            cache.memory = encoder_hidden_states
            cache.mask = encoder_attention_mask
        given = {"input_ids": ids}
        if cache.memory is not None:
            given = {
                "decoder_input_ids": ids,
                "attention_mask": cache.mask,
                "encoder_outputs": BaseModelOutput(last_hidden_state=cache.memory),
            }
        out = self.model(**given, past_key_values=cache.past)
        cache.past = out.past_key_values
        return out.logits


class Past:
    past = memory = mask = None

    def select(self, rows):
        self.past.reorder_cache(rows)
        if self.memory is not None:
            self.memory = self.memory[rows]
            self.mask = self.mask[rows]


def peer(name):
    "Random, in float64, its weights large enough to have opinions."
    kind, config = {
        "gpt2": (
            transformers.GPT2LMHeadModel,
            transformers.GPT2Config(
                vocab_size=11,
                n_positions=64,
                n_embd=16,
                n_layer=2,
                n_head=2,
                bos_token_id=0,
                eos_token_id=5,
            ),
        ),
        "llama": (
            transformers.LlamaForCausalLM,
            transformers.LlamaConfig(
                vocab_size=11,
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                bos_token_id=0,
                eos_token_id=5,
            ),
        ),
        "bart": (
            transformers.BartForConditionalGeneration,
            transformers.BartConfig(
                vocab_size=11,
                d_model=16,
                encoder_layers=1,
                decoder_layers=2,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=16,
                decoder_ffn_dim=16,
                pad_token_id=0,
                max_position_embeddings=64,
                bos_token_id=1,
                eos_token_id=5,
                decoder_start_token_id=1,
                forced_eos_token_id=None,
            ),
        ),
        "marian": (
            transformers.MarianMTModel,
            transformers.MarianConfig(
                vocab_size=11,
                d_model=16,
                encoder_layers=1,
                decoder_layers=2,
                encoder_attention_heads=2,
                decoder_attention_heads=2,
                encoder_ffn_dim=16,
                decoder_ffn_dim=16,
                pad_token_id=0,
                max_position_embeddings=64,
                eos_token_id=5,
                decoder_start_token_id=1,
                forced_eos_token_id=None,
            ),
        ),
    }[name]
    torch.manual_seed(0)
    made = kind(config).double().eval()
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(0.35 * torch.randn_like(p))
    return made


@plain_only
@pytest.mark.parametrize("name", ["gpt2", "llama", "bart", "marian"])
@pytest.mark.parametrize("alpha", by_day([0.0, 0.7, 1.0, 2.0], 0.7))
@torch.no_grad()
def test_texts_and_scores_are_those_of_transformers(name, alpha):
    model = peer(name)
    src = draw_ids(3, 5, low=1, high=5)
    mask = torch.ones(3, 5).bool()
    ours = {}
    theirs = {}
    ids = src
    if name in ("bart", "marian"):
        mask[1, 3:] = False
        mask[2, 4:] = False
        ours = {
            "encoder_hidden_states": model.get_encoder()(
                src, attention_mask=mask
            ).last_hidden_state,
            "encoder_attention_mask": mask,
        }
        ids = torch.ones(3, 1, dtype=torch.int64)
        theirs = {"decoder_input_ids": ids}
    for early, (width, n, stop) in itertools.product(
        EARLY_STOPPING, ((2, 2, [5]), (4, 4, [5, 6]), (4, 1, [5, 6]))
    ):
        out = model.generate(
            input_ids=src,
            **theirs,
            attention_mask=mask,
            num_beams=width,
            do_sample=False,
            num_return_sequences=n,
            max_new_tokens=8,
            length_penalty=alpha,
            early_stopping=early,
            eos_token_id=stop,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        found = beam_search(
            Theirs(model),
            ids,
            num_beams=width,
            max_new_tokens=8,
            stop_token_ids=stop,
            length_penalty=alpha,
            num_return_sequences=n,
            early_stopping=early,
            **ours,
        )
        found = [beam for row in found for beam in row]
        for beam, row, score in zip(
            found,
            out.sequences[:, ids.shape[1] :].tolist(),
            out.sequences_scores.tolist(),
            strict=True,
        ):
            n = len(beam.ids)
            assert beam.ids == row[:n]
            if beam.finish_reason == "stop":
                assert row[n] in stop  # theirs keeps it
                n += 1
            assert {*row[n:]} <= {0, 5}  # padding
            assert beam.score == pytest.approx(score, 1e-6)


@plain_only
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("alpha", by_day([0.0, 1.0, 2.0], 1.0))
@torch.no_grad()
def test_functions_end_texts_as_in_transformers(name, alpha):
    """Where ``transformers`` takes enough continuations, its rule is ours.

    It takes as many as its stop ids can end; two ids that nobody writes
    make room for those that functions end.
    """
    model = peer(name)
    src = draw_ids(3, 5, low=1, high=5)
    criteria = [
        lambda ids: ids[-1] == 7,
        lambda ids: len(ids) > 2 and ids[-1] == 1 + sum(ids[:-1]) % 4,
    ]

    class Ends(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor(
                [any(f(row[5:]) for f in criteria) for row in input_ids.tolist()]
            )

    ended = 0
    for early, (width, n) in itertools.product(
        EARLY_STOPPING, ((1, 1), (2, 2), (4, 4), (4, 1))
    ):
        if width == 1 and early is not True:
            continue  # transformers decodes greedily, whatever the rule
        out = model.generate(
            input_ids=src,
            attention_mask=torch.ones_like(src),
            num_beams=width,
            do_sample=False,
            num_return_sequences=n,
            max_new_tokens=8,
            length_penalty=alpha,
            early_stopping=early if width > 1 else None,
            eos_token_id=[5, 98, 99],
            pad_token_id=0,
            stopping_criteria=transformers.StoppingCriteriaList([Ends()]),
            output_scores=True,
            return_dict_in_generate=True,
        )
        found = beam_search(
            Theirs(model),
            src,
            num_beams=width,
            max_new_tokens=8,
            stop_token_ids=5,
            stopping_criteria=criteria,
            length_penalty=alpha,
            num_return_sequences=n,
            early_stopping=early,
        )
        found = [beam for row in found for beam in row]
        for beam, row in zip(found, out.sequences[:, 5:].tolist(), strict=True):
            k = len(beam.ids)
            assert beam.ids == row[:k]
            by_function = bool(beam.ids) and any(f(beam.ids) for f in criteria)
            assert (beam.finish_reason == "stop") == (
                by_function or (k < 8 and row[k] == 5)
            )
            assert {*row[k:]} <= {0, 5}
            ended += by_function
        if width > 1:
            assert [beam.score for beam in found] == pytest.approx(
                out.sequences_scores.tolist(), 1e-6
            )
    assert ended > 6


@pytest.mark.parametrize(
    "name",
    by_day(
        [row.name for row in ROWS if row.causal and not row.source],
        "GPT",
        "Llama",
        "Llama, windows",
    ),
)
@torch.no_grad()
def test_a_single_beam_is_generate(name):
    "The same ids, the same reasons; stop ids, functions, both and neither."
    model = next(row for row in ROWS if row.name == name).make()
    prompts = [[9, 3, 5], [11], [4, 2]]
    singles = [dict(early_stopping=True)]
    if name == "Llama":
        singles += [dict(early_stopping=False), dict(length_penalty=0.0)]
    ended = 0
    for stop, criteria in itertools.product(
        ((), [*range(0, VOCAB, 3)]),
        ((), lambda ids: len(ids) > 2 and ids[-1] % 2 == 0),
    ):
        how = dict(max_new_tokens=9, stop_token_ids=stop, stopping_criteria=criteria)
        texts = generate(model, prompts, **how)
        for single in singles:
            found = beam_search(model, prompts, num_beams=1, **how, **single)
            for text, (beam,) in zip(texts, found, strict=True):
                assert beam.ids == text.ids
                assert beam.finish_reason == text.finish_reason
                if not stop:
                    assert beam.log_prob == pytest.approx(sum(text.log_probs), abs=1e-4)
        ended += sum(text.finish_reason == "stop" for text in texts)
    assert ended > 2


def test_what_is_given_is_not_changed():
    row = next(row for row in ROWS if row.name == "Seq2Seq")
    model = row.make()
    with torch.no_grad():
        memory = model.encode(sources(2).clamp(min=0))
    ids = torch.tensor([[3], [4]])
    prompts = copy.deepcopy(memory)
    beam_search(model, ids, num_beams=3, max_new_tokens=5, encoder_hidden_states=memory)
    assert torch.equal(memory, prompts) and ids.tolist() == [[3], [4]]


def test_a_prompt_whose_search_is_over_leaves_the_batch():
    class Counts(Table):
        rows = 0

        def __call__(self, ids, *, cache, positions=None):
            self.rows += len(ids)
            return super().__call__(ids, cache=cache, positions=positions)

    model = Counts(4)
    model.logits[:, 1, 1, 3] += 20.0  # after 1, 1 comes the end
    beam_search(
        model,
        [[1, 1], [0, 2]],
        num_beams=2,
        max_new_tokens=20,
        stop_token_ids=3,
        length_penalty=0.0,
        early_stopping=True,
    )
    assert model.rows < 2 + 2 * 2 * 19


class Fails:
    "A function that answers False, and raises at its third call."

    def __init__(self, error):
        self.error = error
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == 3:
            raise self.error
        return False


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("no"), LookupError])
@pytest.mark.parametrize("where", ["criterion", "model", "cache"])
def test_a_search_that_fails_changes_nothing(where, error, monkeypatch):
    row = next(row for row in ROWS if row.name == "Seq2Seq")
    model = row.make(dropout=0.5)
    with torch.no_grad():
        memory = model.encode(sources(2).clamp(min=0))
    model.train()
    next(model.children()).eval()
    ids = torch.tensor([[3], [4]])
    fails = Fails(error)
    how = dict(
        num_beams=3,
        max_new_tokens=6,
        stop_token_ids=7,
        encoder_hidden_states=memory,
        num_return_sequences=3,
    )
    right = beam_search(model, ids, **how)

    def state():
        return [
            [m.training for m in model.modules()],
            [p.clone() for p in model.parameters()],
            [p.grad for p in model.parameters()],
            [memory.clone(), ids.clone(), torch.get_rng_state()],
            torch.is_grad_enabled(),
        ]

    def before(function):
        return lambda *args, **kwargs: fails() or function(*args, **kwargs)

    was = state()
    with monkeypatch.context() as patch:
        if where == "model":
            patch.setattr(type(model), "__call__", before(type(model).__call__))
        if where == "cache":
            kind = type(model.new_cache(1))
            patch.setattr(kind, "select", before(kind.select))
        criteria = fails if where == "criterion" else ()
        interrupt = error is KeyboardInterrupt
        with pytest.raises(
            KeyboardInterrupt if interrupt else (ValueError, RuntimeError, LookupError)
        ):
            beam_search(model, ids, stopping_criteria=criteria, **how)
    assert fails.calls == 3
    now = state()
    assert now[0] == was[0] and now[2] == was[2] and now[4] == was[4]
    for a, b in zip(now[1] + now[3], was[1] + was[3], strict=True):
        assert torch.equal(a, b)
    assert beam_search(model, ids, **how) == right


def test_no_gradients_and_the_longest_text_there_is():
    class Looks(Table):
        max_len = 6

        def __call__(self, ids, *, cache, positions=None):
            assert not torch.is_grad_enabled()
            return super().__call__(ids, cache=cache, positions=positions)

    model = Looks()
    (found,) = beam_search(model, [[1, 2]], num_beams=2, max_new_tokens=5)
    assert len(found[0].ids) == 5 and model.calls == 5
    with pytest.raises(ValueError, match="2 ids and max_new_tokens 6 go beyond"):
        beam_search(model, [[1, 2]], num_beams=2, max_new_tokens=6)


def test_a_search_without_a_live_beam_is_over():
    model = Table()
    model.logits[:, :, :, :3] = -math.inf  # only the end can follow
    (found,) = beam_search(
        model,
        [[1, 2]],
        num_beams=3,
        max_new_tokens=9,
        stop_token_ids=3,
        num_return_sequences=3,
    )
    assert [beam.ids for beam in found] == [[]] and model.calls == 1


# --- minimum risk


def test_minimum_risk_equals_a_loop():
    texts = ["a b c", "a b d", "x y z", "a b"]
    gain = lambda a, b: len({*a.split()} & {*b.split()}) / 3  # noqa: E731
    for weights in (None, [1.0, 2.0, 5.0, 1.0]):
        w = weights or [1] * 4
        wanted = [
            sum(k * gain(a, b) for k, b in zip(w, texts, strict=True)) / sum(w)
            for a in texts
        ]
        assert expected_utility(texts, gain, weights) == pytest.approx(wanted)
        best = texts[max(range(4), key=wanted.__getitem__)]
        assert select_minimum_bayes_risk(texts, gain, weights) == best
    assert select_minimum_bayes_risk(texts, gain) != "x y z"
    assert select_minimum_bayes_risk(texts, gain, [0.0, 0.0, 1.0, 0.0]) == "x y z"


def test_the_gain_of_equality_chooses_the_most_frequent():
    drawn = [*list("abacbaaccc"), "a"]
    assert select_minimum_bayes_risk(drawn, lambda a, b: float(a == b)) == "a"


# --- refusals


class NoSelect(Table):
    def new_cache(self, batch, max_len=None):
        cache = super().new_cache(batch)
        cache.select = None
        return cache


class Says(Table):
    "Answers what it is given."

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def __call__(self, ids, *, cache, positions=None):
        return self.answer


class Raises:
    "A function that fails after so many prompts of three beams."

    def __init__(self, n):
        self.n = 3 * n

    def __call__(self, ids):
        self.n -= 1
        return [False][-1 if self.n >= 0 else 1]


GOOD = dict(prompts=[[1, 2]], num_beams=3, max_new_tokens=4, stop_token_ids=3)


@plain_only
@pytest.mark.parametrize(
    "changes, sentence",
    [
        (dict(num_beams=0), "num_beams must be a whole number of at least 1, got 0"),
        (dict(num_beams=2.0), "num_beams must be a whole number of at least 1"),
        (dict(max_new_tokens=0), "max_new_tokens must be a whole number of at least 1"),
        (
            dict(num_return_sequences=0),
            "num_return_sequences must be a whole number of at least 1",
        ),
        (dict(num_return_sequences=4), "4 num_return_sequences, beyond num_beams 3"),
        (dict(prompts=[]), "prompt"),
        (dict(prompts=[[1], []]), "prompt 1 is empty"),
        (dict(prompts=[[1], [0.5]]), "prompt 1 must be integers"),
        (dict(prompts=[[1, -1]]), "prompt 0 holds id -1"),
        (dict(prompts=[[1], [0, 4]]), "Table cannot answer .* to 4"),
        (dict(prompts=[[1] * 101]), "prompt 0 of 101 ids go beyond max_len 100"),
        (dict(prompts=[[1] * 98]), "98 ids and max_new_tokens 4 go beyond max_len 100"),
        (
            dict(stop_token_ids=4),
            "stop id 4 is outside the vocabulary: ids go from 0 to",
        ),
        (dict(stop_token_ids=-1), "a stop id must be a whole number of at least 0"),
        (dict(stop_token_ids=["."]), "a stop id must be a whole number"),
        (
            dict(stop_token_ids=1.5),
            "stop_token_ids must be an id or a list.* got float 1.5",
        ),
        (
            dict(stop_token_ids=None),
            "stop_token_ids must be an id or a list.* got NoneType None",
        ),
        (
            dict(stop_token_ids=len),
            "stop_token_ids must be an id or a list.* got .*len",
        ),
        (
            dict(length_penalty=NAN),
            "length_penalty must be at least -10 and at most 10, got nan",
        ),
        (dict(length_penalty=math.inf), "length_penalty must be .* got inf"),
        (dict(length_penalty_form="mean"), "length_penalty_form .*'mean'"),
        (
            dict(early_stopping=1),
            "early_stopping must be one of 'never', False, True, got 1",
        ),
        (
            dict(encoder_hidden_states=torch.zeros(2, 3, 4)),
            "encoder_hidden_states of 2 rows for 1 prompts",
        ),
        (
            dict(stopping_criteria="."),
            "stopping_criteria must be list .* got str '.'",
        ),
        (dict(stopping_criteria=[1]), "a stopping criterion is called .* got 1"),
        (
            dict(stopping_criteria=lambda ids: 1),
            "a stopping criterion must answer True or False, got 1 at row 0",
        ),
        (
            dict(prompts=[[1], [1, 2]], stopping_criteria=Raises(1)),
            "raised IndexError at row 1 after 1 ids: list index",
        ),
        (
            dict(sampling_params=SamplingParams(seed=1)),
            "takes no sampling_params: .* draws nothing; got SamplingParams",
        ),
        (dict(context_shift=True), "takes no context_shift: .* got True"),
        (dict(context_shift=2), "takes no context_shift: .* got 2"),
        (dict(cache=Kept(1)), "takes no cache: .* got <.*Kept"),
        (dict(drop_finished=False), "takes no drop_finished: .* got False"),
        (dict(model=object()), "object cannot answer model.new_cache"),
        (dict(model=torch.nn.Linear(2, 2)), "Linear cannot answer model.new_"),
        (dict(model=NoSelect()), "NoSelect cannot answer cache.select"),
        (dict(model=Says("no")), "Says cannot answer model"),
        (dict(model=Says(torch.zeros(1, 1, 4) * NAN)), "NaN"),
        (dict(model=Says(torch.zeros(1, 1, 4) - math.inf)), "forbid every id"),
        (dict(model=Says(torch.zeros(3, 1, 4))), "must return logits"),
        (dict(model=Says(torch.zeros(1, 1, 4).long())), "logits must have a fl"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        beam_search(**dict(model=Table()) | GOOD | changes)
    assert "\n" not in str(error.value) and len(str(error.value)) < 320


def test_parts_refuse_too():
    with pytest.raises(ValueError, match="next_log_probs must be of shape"):
        expand_beams(torch.zeros(2, 3), torch.zeros(2, 4, 5), 3)
    with pytest.raises(ValueError, match="num_beams"):
        split_finished(torch.zeros(1, 3).long(), torch.tensor([1]), 0)
    with pytest.raises(ValueError, match="5 ids, beyond max_length 4"):
        best_possible_score(-1.0, 5, 4, 1.0)
    with pytest.raises(ValueError, match="no candidate"):
        select_minimum_bayes_risk([], lambda a, b: 0.0)
    with pytest.raises(ValueError, match="2 weights for 1 candidates"):
        expected_utility(["a"], lambda a, b: 0.0, [1.0, 2.0])


@plain_only
@pytest.mark.parametrize("choose", [expected_utility, select_minimum_bayes_risk])
@pytest.mark.parametrize(
    "weights, says",
    [
        ([0, 0], r"^the sum of the weights must be above 0 and finite, got 0"),
        ([1e308, 1e308], r"^the sum of the weights must be .* got inf"),
        ([1, math.nan], "^weight 1 must be .* got nan"),
        ([math.inf, 1], "^weight 0 must be .* got inf"),
        ([1, -0.5], "^weight 1 must be .* got -0.5"),
        (["a", 1], "^weight 0 must be .* got 'a'"),
    ],
)
def test_weights_are_shares(choose, weights, says):
    with pytest.raises(ValueError, match=says):
        choose(["a", "b"], lambda a, b: float(a == b), weights)


def test_weights_may_be_a_tensor():
    found = expected_utility(["a", "b"], lambda a, b: a == b, torch.tensor([3.0, 1.0]))
    assert found == [0.75, 0.25]


@plain_only
@pytest.mark.parametrize("n", [0, -3, 1.5, None])
def test_a_length_is_at_least_one(n):
    with pytest.raises(ValueError, match=f"^n must be .* at least 1, got {n}"):
        length_divisor(n, 0.5)


# --- elsewhere


@pytest.mark.gpu
@torch.no_grad()
def test_a_device_finds_what_the_cpu_finds():
    for row in ROWS:
        if row.causal and not row.source:
            model = row.make()
            here, there = (
                beam_search(
                    m,
                    [[9, 3, 5], [11]],
                    num_beams=4,
                    max_new_tokens=8,
                    stop_token_ids=7,
                    num_return_sequences=4,
                )
                for m in (model, copy.deepcopy(model).cuda())
            )
            assert [[b.ids for b in row] for row in here] == [
                [b.ids for b in row] for row in there
            ]


def test_half_precision_sums_in_float32():
    row = next(row for row in ROWS if row.name == "Llama")
    model = row.make().bfloat16()
    ((beam,),) = beam_search(
        model, [[3, 4]], num_beams=2, max_new_tokens=6, stop_token_ids=7
    )
    assert beam.log_prob != torch.tensor(beam.log_prob).bfloat16().item()


def test_a_cache_that_cannot_grow_has_a_slot_for_all_but_the_last_id():
    row = next(row for row in ROWS if row.name == "Llama")
    model = row.make().double()

    for max_new_tokens in (5, model.max_len - 1):
        how = dict(num_beams=3, max_new_tokens=max_new_tokens, stop_token_ids=7)
        full = Preallocates(model)
        ((made,),) = beam_search(full, [[3, 4]], **how)
        ((expected,),) = beam_search(model, [[3, 4]], **how)
        assert made.ids == expected.ids
        assert made.log_prob == pytest.approx(expected.log_prob)
        assert full.asked == [2 + max_new_tokens - 1]


@plain_only
def test_the_experiment_runs_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import beam as experiment

    monkeypatch.setattr(experiment, "READ", 200)
    monkeypatch.setattr(experiment, "ALPHAS", (0.0,))
    monkeypatch.setattr(experiment, "DRAWS", 3)
    out = tmp_path / "some.csv"
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "beam.py",
            "--sentences",
            "2",
            "--steps",
            "2",
            "--seeds",
            "1",
            "--widths",
            "1",
            "2",
            "--out",
            str(out),
        ],
    )
    experiment.main()
    first = out.read_text(encoding="utf-8")
    assert first.count("\n") == 7
    assert "beam,translator,0,2,2,1,0.0,1.0,100.0,1.0,0.0," in first
    capsys.readouterr()
    experiment.main()
    assert capsys.readouterr().out == ""
    assert out.read_text(encoding="utf-8") == first


def test_the_record_is_whole():
    rows = load_record("beam")
    beams = [r for r in rows if r["way"] == "beam"]
    assert len(beams) == 4 * 6 * 3 and len(rows) == len(beams) + 4
    assert {r["seed"] for r in rows if r["model"] == "weak"} == {*"012"}
    assert all(r["torch"] and re.match("20..-..-..$", r["date"]) for r in rows)
