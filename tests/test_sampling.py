"""Filters, penalties, masks and the sampler, against independent references."""

import copy
import json
import math
import re
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import generation as peers

from conftest import ROOT, load_experiment
from helpers import generator, plain_only
from tformer.inference import logits
from tformer.inference.logits import (
    apply_allowed_mask,
    apply_frequency_penalty,
    apply_logit_bias,
    apply_min_p,
    apply_presence_penalty,
    apply_repetition_penalty,
    apply_temperature,
    apply_top_k,
    apply_top_p,
    apply_typical_p,
    distinct_n,
    to_float,
)
from tformer.inference.sampler import (
    Sampler,
    SamplingParams,
    process_logits,
    sample_ids,
)

torch.set_num_threads(1)
INF = math.inf


@st.composite
def rows(draw_, ties=True):
    "Logits (b, vocab) with ties and −∞, an id of each row left."
    b = draw_(st.integers(1, 4))
    vocab = draw_(st.integers(2, 90))
    made = generator(draw_(st.integers(0, 10**6)))
    z = draw_(st.sampled_from((0.3, 2.0, 8.0))) * torch.randn(b, vocab, generator=made)
    if ties and draw_(st.booleans()):
        z = z.round()
    gone = torch.rand(b, vocab, generator=made) < draw_(
        st.sampled_from((0.0, 0.3, 0.9))
    )
    gone[torch.arange(b), torch.randint(vocab, (b,), generator=made)] = False
    return z.masked_fill(gone, -INF)


some = settings(max_examples=60, deadline=None)
share = st.floats(0.01, 0.99)


def crosses(z, order, p):
    "Whether a running sum comes so near to p that rounding decides."
    mass = z.double().softmax(-1).gather(-1, order).cumsum(-1)
    return ((mass - p).abs() < 1e-5).any() or ((mass - (1 - p)).abs() < 1e-5).any()


def largest_set(ours, theirs):
    "Equal, but for ids that tie with the smallest that they keep."
    kept = ours > -INF
    least = theirs.masked_fill(theirs == -INF, INF).amin(-1, keepdim=True)
    more = kept & (theirs == -INF)
    assert (kept >= (theirs > -INF)).all()
    assert torch.equal(ours[kept & ~more], theirs[kept & ~more])
    assert (ours[more] == least.expand_as(ours)[more]).all()


# --- equal to transformers, to float64, to loops


@some
@given(rows(), st.floats(0.05, 5))
def test_temperature_equals_transformers(z, t):
    assert torch.equal(
        apply_temperature(z, t), peers.TemperatureLogitsWarper(t)(None, z)
    )


@some
@given(rows(), st.integers(1, 100))
def test_top_k_equals_transformers(z, k):
    assert torch.equal(apply_top_k(z, k), peers.TopKLogitsWarper(k)(None, z))


@some
@given(rows(), share)
def test_top_p_equals_transformers(z, p):
    if not crosses(z, z.argsort(descending=True), p):
        largest_set(apply_top_p(z, p), peers.TopPLogitsWarper(p)(None, z))


@some
@given(rows(), share)
def test_min_p_equals_transformers(z, p):
    said = z.double().softmax(-1)
    if ((said / said.amax(-1, keepdim=True) - p).abs() > 1e-5).all():
        assert torch.equal(apply_min_p(z, p), peers.MinPLogitsWarper(p)(None, z))


@some
@given(rows(ties=False), share)
def test_typical_equals_transformers(z, p):
    log_p = z.double().log_softmax(-1)
    entropy = -(log_p.exp() * log_p).nansum(-1, keepdim=True)
    far = (-log_p - entropy).abs()
    gaps = far.sort().values.diff()
    if not crosses(z, far.argsort(), p) and not (gaps < 1e-5).any():
        assert torch.equal(apply_typical_p(z, p), peers.TypicalLogitsWarper(p)(None, z))


@some
@given(rows(), st.floats(0.3, 3), st.integers(0, 12), st.integers(0, 99))
def test_repetition_equals_transformers(z, penalty, n, seed):
    ids = torch.randint(z.shape[1], (len(z), n), generator=generator(seed))
    ours = apply_repetition_penalty(z, ids, penalty)
    peer = peers.RepetitionPenaltyLogitsProcessor(penalty)
    assert torch.equal(ours, peer(ids, z))
    padded = torch.cat([torch.full((len(z), 2), -1), ids], 1)
    assert torch.equal(apply_repetition_penalty(z, padded, penalty), ours)


@some
@given(rows(), st.floats(-3, 3), st.integers(0, 12), st.integers(0, 99))
def test_counting_penalties_equal_loops(z, penalty, n, seed):
    ids = torch.randint(-1, z.shape[1], (len(z), n), generator=generator(seed))
    ids = torch.cat([ids, torch.full((len(z), 1), -1)], 1)  # nothing
    often = z.clone()
    once = z.clone()
    for row, wrote in enumerate(ids.tolist()):
        for i in {*wrote} - {-1}:
            often[row, i] -= penalty * wrote.count(i)
            once[row, i] -= penalty
    torch.testing.assert_close(apply_frequency_penalty(z, ids, penalty), often)
    torch.testing.assert_close(apply_presence_penalty(z, ids, penalty), once)


@some
@given(rows(ties=False), st.integers(0, 99))
@example(-0.2 * torch.arange(40.0)[None], 5)  # the order of the steps decides
def test_all_together_equal_the_list_of_transformers(z, seed):
    vocab = z.shape[1]
    ids = torch.randint(vocab, (len(z), 5), generator=generator(seed))
    mask = torch.rand(vocab, generator=generator(seed)) < 0.8
    mask[z.argmax(-1)] = True
    chain = peers.LogitsProcessorList(
        [
            peers.SequenceBiasLogitsProcessor({(0,): 1.5, (1,): -2.0}),
            peers.RepetitionPenaltyLogitsProcessor(1.3),
            peers.PrefixConstrainedLogitsProcessor(
                lambda batch, ids: mask.nonzero()[:, 0].tolist(), 1
            ),
            peers.TemperatureLogitsWarper(0.8),
            peers.TopKLogitsWarper(12),
            peers.TopPLogitsWarper(0.9),
            peers.MinPLogitsWarper(0.03),
        ]
    )
    ours = process_logits(
        z,
        SamplingParams(
            logit_bias={0: 1.5, 1: -2.0},
            repetition_penalty=1.3,
            allowed_tokens_fn=lambda ids: mask,
            temperature=0.8,
            top_k=12,
            top_p=0.9,
            min_p=0.03,
        ),
        ids,
    )
    theirs = chain(ids, z)
    if torch.equal(ours > -INF, theirs > -INF):
        torch.testing.assert_close(ours, theirs)
    else:  # a sum, or a share of the best, within rounding of its limit
        assert ((ours > -INF) != (theirs > -INF)).sum() <= len(z)


def test_the_smallest_set_has_the_crossing_id_and_no_more():
    z = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    for p, n in ((0.01, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.8, 4), (1.0, 4)):
        assert (apply_top_p(z, p) > -INF).sum() == n


def test_a_share_of_1_is_off():
    z = 4 * torch.randn(2, 50_257, generator=generator())
    assert torch.equal(apply_top_p(z, 1.0), z) and torch.equal(
        apply_typical_p(z, 1.0), z
    )
    assert (z.softmax(-1).sort(descending=True)[0].cumsum(-1) > 1).any()


@pytest.mark.parametrize("scale", (0.1, 2.0, 6.0))
def test_a_long_vocabulary_equals_float64(scale):
    z = scale * torch.randn(3, 5_000, generator=generator(1))
    said, rank = z.double().softmax(-1).sort(descending=True)
    for p in (0.3, 0.9, 0.999):
        n = ((said.cumsum(-1) - said) < p).sum(-1)
        kept = apply_top_p(z, p) > -INF
        assert ((kept.sum(-1) - n).abs() <= 1).all()  # float32 softmax
        assert all(kept[i, rank[i, : n[i] - 1]].all() for i in range(3))


@some
@given(rows(), st.integers(0, 99))
def test_every_filter_leaves_an_id_and_its_input(z, seed):
    before = z.clone()
    ids = torch.randint(z.shape[1], (len(z), 3), generator=generator(seed))
    for rule in (
        lambda x: apply_temperature(x, 0.0),
        lambda x: apply_temperature(x, 1e-7),
        lambda x: apply_temperature(x, 1e-3),
        lambda x: apply_top_k(x, 1),
        lambda x: apply_top_p(x, 1e-9),
        lambda x: apply_min_p(x, 1.0),
        lambda x: apply_typical_p(x, 1e-9),
        lambda x: apply_logit_bias(x, {0: 2.0}),
        lambda x: apply_repetition_penalty(x, ids, 5.0),
        lambda x: apply_frequency_penalty(x, ids, 2.0),
        lambda x: apply_presence_penalty(x, ids, 2.0),
        lambda x: apply_allowed_mask(x, torch.ones(x.shape[1], dtype=torch.bool)),
    ):
        left = rule(z)
        assert torch.equal(z, before) and left is not z
        assert left.shape == z.shape and (left > -INF).any(-1).all()
        assert not (left > -INF)[z == -INF].any()  # nothing comes back
        left.add_(1)
        assert torch.equal(z, before)


@pytest.mark.parametrize("kind", (torch.bfloat16, torch.float16))
def test_16_bits_are_computed_in_32(kind):
    z = (3 * torch.randn(2, 300, generator=generator())).to(kind)
    for rule in (
        lambda x: apply_temperature(x, 0.7),
        lambda x: apply_top_p(x, 0.9),
        lambda x: apply_typical_p(x, 0.9),
        lambda x: apply_min_p(x, 0.1),
        lambda x: apply_logit_bias(x, {3: 0.001}),
    ):
        assert rule(z).dtype == torch.float32
        assert torch.equal(rule(z), rule(z.float()))
    u = torch.tensor([0.2, 0.9])
    assert torch.equal(sample_ids(z, u), sample_ids(z.float(), u))
    assert apply_temperature(z.double(), 0.7).dtype == torch.float64


# --- draws


def p_value(times, exact):
    "Of Pearson's test; classes with less than 5 expected are one."
    n = times.sum()
    often = exact * n >= 5
    seen = torch.cat([times[often], times[~often].sum()[None]]).double()
    meant = torch.cat([exact[often], exact[~often].sum()[None]]) * n
    if meant[-1] < 5:
        seen[-2] = seen[-2] + seen[-1]
        meant[-2] = meant[-2] + meant[-1]
        seen = seen[:-1]
        meant = meant[:-1]
    square = ((seen - meant) ** 2 / meant).sum()
    free = torch.tensor((len(seen) - 1) / 2).double()
    return torch.special.gammaincc(free, square / 2).item()


@pytest.mark.parametrize(
    "how",
    (
        {},
        {"top_k": 9},
        {"top_p": 0.8, "temperature": 1.3},
        {"min_p": 0.1},
        {"typical_p": 0.7},
    ),
)
def test_frequencies_are_the_probabilities(how):
    "Level 1e-4 each; the seeds are fixed, so it never fails by chance."
    z = 2 * torch.randn(1, 40, generator=generator(3))
    exact = process_logits(z, SamplingParams(**how))[0].double().softmax(-1)
    sampler = Sampler(SamplingParams(seed=0, **how))
    z = z.expand(2_000, -1)
    times = torch.zeros(40)
    for _ in range(10):
        times += sampler(z).bincount(minlength=40)
    assert p_value(times, exact) > 1e-4
    assert not times[exact == 0].any()
    assert p_value(times, exact.roll(1)) < 1e-9  # it can fail


def test_neighboring_seeds_do_not_look_alike():
    first = torch.cat(
        [torch.rand(1, generator=generator(s)).double() for s in range(4_000)]
    )
    assert (
        p_value(
            (first * 20).long().bincount(minlength=20), torch.full((20,), 0.05).double()
        )
        > 1e-4
    )
    assert abs(torch.corrcoef(torch.stack([first[1:], first[:-1]]))[0, 1]) < 0.05


def test_the_ends_of_the_line():
    z = torch.tensor([[-INF, 0.0, -INF, 0.0, -INF]])
    for u, i in ((0.0, 1), (0.4999999, 1), (0.5, 3), (1 - 2**-53, 3)):
        assert sample_ids(z, torch.tensor([u], dtype=torch.float64)) == i
    assert sample_ids(z[0], torch.tensor(0.7)) == 3  # no batch


def test_greedy_takes_the_first_of_the_best():
    z = torch.tensor([[1.0, 3, 3, 0], [5, 1, 1, 5]])
    assert Sampler(SamplingParams(temperature=0.0, top_p=0.5))(z).tolist() == [1, 0]
    assert (apply_temperature(z, 0.0) > -INF).sum(-1).tolist() == [1, 1]


# --- rows

WAYS = [
    SamplingParams(seed=1),
    SamplingParams(seed=2, top_k=5),
    SamplingParams(seed=3, top_k=5),
    SamplingParams(seed=4, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(seed=5, temperature=0.0),
    SamplingParams(seed=6, typical_p=0.8),
    SamplingParams(seed=7, min_p=0.05, frequency_penalty=0.4),
]


def texts(groups, z, steps):
    "What rows write whose sampler is changed on the way."
    sampler = Sampler([])
    wrote = {}
    names = []
    for t in range(steps):
        for name in groups.get(t, []):
            if name < 0:
                names.remove(~name)
            else:
                names.append(name)
                wrote[name] = []
        if t in groups:
            old = getattr(sampler, "names", [])
            stays = [n for n in names if n in old]
            comes = [n for n in names if n not in old]
            sampler.select([old.index(n) for n in stays])
            sampler.extend(Sampler([WAYS[n] for n in comes]))
            names = stays + comes
            sampler.names = stays + comes
        ids = sampler(
            torch.stack([z[len(wrote[n]), n] for n in names]), [wrote[n] for n in names]
        )
        for n, i in zip(names, ids.tolist(), strict=True):
            wrote[n].append(i)
    return wrote


@pytest.mark.parametrize("vocab", (633, 40))
def test_a_row_does_not_know_its_neighbors(vocab):
    z = 2 * torch.randn(24, 7, vocab, generator=generator(5))
    z[:, 2] = z[:, 2].round()  # ties beyond the short list
    alone = {}
    for n in range(7):
        alone |= texts({0: [n]}, z, 24)
    assert len({tuple(x) for x in alone.values()}) == 7
    for groups in (
        {0: [0, 1, 2, 3, 4, 5, 6]},
        {0: [6, 5, 4, 3, 2, 1, 0]},
        {0: [3, 1], 5: [0, 2], 9: [~3, 6], 15: [~1, 5, 4]},
    ):
        for n, wrote in texts(groups, z, 24).items():
            assert wrote == alone[n][: len(wrote)], n


def test_one_setting_for_all_counts_seeds_on():
    z = 2 * torch.randn(10, 3, 50, generator=generator())
    shared = Sampler(SamplingParams(seed=8, top_k=9))
    each = [Sampler(SamplingParams(seed=8 + i, top_k=9)) for i in range(3)]
    for x in z:
        assert shared(x).tolist() == [
            one(x[i, None]).item() for i, one in enumerate(each)
        ]
    fresh = [Sampler(SamplingParams())(z[0].expand(3, -1)) for _ in range(2)]
    assert fresh[0].shape == (3,)
    wide = torch.zeros(4, 10**5)
    assert not torch.equal(
        Sampler(SamplingParams())(wide), Sampler(SamplingParams())(wide)
    )


def test_a_row_kept_twice_goes_on_the_same_way_twice():
    z = torch.zeros(2, 1000)
    sampler = Sampler(SamplingParams(seed=0))
    sampler(z)
    sampler.select([1, 1])
    assert len({*sampler(z).tolist()}) == 1


@pytest.mark.parametrize(
    "how",
    (
        dict(top_k=20, top_p=0.9, temperature=0.8),
        dict(min_p=0.01, top_p=0.6),
        dict(min_p=0.01, typical_p=0.6),
        dict(top_k=40, typical_p=0.6),
    ),
)
def test_a_short_list_draws_what_the_whole_vocabulary_draws(how):
    z = 3 * torch.randn(1, 2000, generator=generator(2))
    sampler = Sampler(SamplingParams(seed=3, **how))
    rng = generator(3)
    for _ in range(200):
        u = torch.rand(1, generator=rng, dtype=torch.float64)
        assert sampler(z) == sample_ids(process_logits(z, SamplingParams(**how)), u)


@pytest.mark.parametrize(
    "where", [slice(0, 60), slice(-25, None), slice(None, None, 333)]
)
def test_a_short_list_is_found_in_a_large_vocabulary(where):
    "Wherever the best ids are: side by side, at the end, far apart."
    z = torch.randn(2, 20_011, generator=generator(7))
    z[:, where] += 6
    how = dict(top_k=40, temperature=0.7)
    sampler = Sampler([SamplingParams(seed=3, **how)] * 2)
    rng = generator(3)
    for _ in range(100):
        u = torch.rand((), generator=rng, dtype=torch.float64).expand(2)
        assert torch.equal(
            sampler(z), sample_ids(process_logits(z, SamplingParams(**how)), u)
        )


def test_each_setting_does_what_its_function_does():
    z = torch.zeros(1, 5)
    wrote = torch.tensor([[1, 1, 2]])
    both = process_logits(
        z, SamplingParams(frequency_penalty=0.5, presence_penalty=2.0), wrote
    )
    assert both.tolist() == [[0, -3, -2.5, 0, 0]]
    y = 2 * torch.randn(3, 50, generator=generator(4))
    for how, function in (
        (dict(typical_p=0.5), lambda y: apply_typical_p(y, 0.5)),
        (dict(min_p=0.2), lambda y: apply_min_p(y, 0.2)),
        (dict(top_p=0.5), lambda y: apply_top_p(y, 0.5)),
        (dict(top_k=5), lambda y: apply_top_k(y, 5)),
    ):
        left = process_logits(y, SamplingParams(**how))
        assert torch.equal(left, function(y)) and not torch.equal(left, y)


def test_a_refused_call_draws_nothing():
    z = 2 * torch.randn(2, 30, generator=generator(5))
    calm, rough = (
        Sampler([SamplingParams(seed=1), SamplingParams(seed=2)]) for _ in range(2)
    )
    with pytest.raises(ValueError, match="row 1 hold NaN"):
        rough(torch.stack([z[0], z[1] * NAN]))
    assert all(torch.equal(calm(z), rough(z)) for _ in range(5))
    late = Sampler(SamplingParams(seed=1))
    with pytest.raises(ValueError):
        late(z * NAN)
    assert torch.equal(late(z[:1]), Sampler(SamplingParams(seed=1))(z[:1]))


def test_joined_rows_are_copies():
    z = torch.zeros(1, 1000)
    one = Sampler([SamplingParams(seed=1)])
    other = Sampler([SamplingParams(seed=2)])
    straight = Sampler([SamplingParams(seed=2)])
    one(z)
    one.extend(other)
    one(z.expand(2, -1))
    assert torch.equal(other(z), straight(z))


def test_a_row_that_joins_is_written_by_its_own_settings():
    z = 2 * torch.randn(2, 50, generator=generator(6))
    some = Sampler([SamplingParams(seed=1)])
    some(z[:1])
    some.extend(Sampler([SamplingParams(temperature=0.0)]))
    for _ in range(5):
        assert some(z)[1] == z[1].argmax()


def test_without_rows_nothing_is_written():
    assert Sampler([])(torch.zeros(0, 5)).shape == (0,)
    some = Sampler(SamplingParams(seed=0))
    some(torch.zeros(2, 5))
    some.select([])
    assert some(torch.zeros(0, 5)).shape == (0,)
    with pytest.raises(ValueError, match="2 rows for a sampler of 0"):
        some(torch.zeros(2, 5))  # it does not begin again
    assert apply_allowed_mask(torch.zeros(0, 5), torch.ones(5).bool()).shape == (0, 5)


def test_what_is_nearly_no_temperature_leaves_one():
    tied = torch.tensor([[1.0, 1.0]])
    assert (apply_temperature(tied, 1e-7) > -INF).sum() == 1


def test_what_is_nearly_never_drawn_can_be():
    u = torch.tensor([1 - 1e-12], dtype=torch.float64)
    assert sample_ids(torch.tensor([[0.0, -25.0]]), u) == 1


def test_a_short_list_draws_ties_beyond_it():
    "Of 500 equal ids, top-k keeps all, not those of a list of 21."
    z = torch.zeros(2, 500)
    z[1, :3] = 9.0
    sampler = Sampler(SamplingParams(seed=0, top_k=5))
    drawn = torch.stack([sampler(z) for _ in range(200)])
    assert len(drawn[:, 0].unique()) > 120
    hot = Sampler(SamplingParams(seed=0, min_p=0.5))
    assert len(torch.stack([hot(z) for _ in range(200)])[:, 0].unique()) > 120


def test_allowed_sees_what_its_row_wrote():
    seen = []

    def allowed(ids):
        seen.append(ids.tolist())
        return torch.arange(6) == len(ids)

    sampler = Sampler(
        [
            SamplingParams(allowed_tokens_fn=allowed),
            SamplingParams(allowed_tokens_fn=allowed),
        ]
    )
    z = torch.zeros(2, 6)
    assert sampler(z, [[4, 4], []]).tolist() == [2, 0]
    assert sampler(z, torch.tensor([[-1, 5], [3, 3]])).tolist() == [1, 2]
    assert seen == [[4, 4], [], [5], [3, 3]]


@pytest.mark.gpu
def test_a_device_writes_what_the_cpu_writes():
    z = 2 * torch.randn(20, 7, 633, generator=generator(5))
    here = Sampler(WAYS)
    there = Sampler(WAYS)
    for x in z:
        assert torch.equal(here(x), there(x.cuda()).cpu())


# --- refusals

NAN = float("nan")
Z = torch.zeros(2, 5)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: apply_temperature(Z, -0.1),
            "temperature must be at least 0, got -0.1",
        ),
        (lambda: apply_temperature(Z, NAN), "temperature must be at least 0, got nan"),
        (lambda: apply_top_p(Z, 0.0), "p must be above 0 and at most 1, got 0.0"),
        (lambda: apply_top_p(Z, 1.1), "p must be above 0 and at most 1, got 1.1"),
        (lambda: apply_typical_p(Z, NAN), "p must be above 0 and at most 1, got nan"),
        (lambda: apply_min_p(Z, -1.0), "p must be above 0 and at most 1, got -1"),
        (lambda: apply_top_k(Z, 0), "k must be a whole number of at least 1, got 0"),
        (lambda: apply_top_k(Z, 2.0), "k must be a whole number of at least 1"),
        (
            lambda: apply_repetition_penalty(Z, Z[:, :1].long(), 0.0),
            "penalty must be above 0",
        ),
        (
            lambda: apply_repetition_penalty(Z, torch.tensor([[1], [5]]), 1.2),
            "id 5 is outside the vocabulary: ids go from 0 to 4",
        ),
        (
            lambda: apply_frequency_penalty(Z, torch.tensor([[1]]), 1.0),
            "ids must be of shape",
        ),
        (
            lambda: apply_logit_bias(Z, {7: 1.0}),
            r"bias_by_id names id \[7\], outside the vocab",
        ),
        (
            lambda: apply_allowed_mask(Z, torch.zeros(5, dtype=torch.bool)),
            "the mask forbids every id that the logits allow, in row 0",
        ),
        (lambda: apply_allowed_mask(Z, torch.eye(2, 5) > 1), "forbids every id"),
        (
            lambda: apply_allowed_mask(Z, torch.ones(5)),
            "a mask of allowed ids is boolean",
        ),
        (
            lambda: apply_allowed_mask(Z, torch.ones(4, dtype=torch.bool)),
            "each of 5 ids",
        ),
        (lambda: sample_ids(Z * NAN, Z[:, 0]), "the logits of row 0 hold NaN"),
        (
            lambda: apply_top_k(torch.tensor([[0.0, 1], [-INF, -INF]]), 1),
            "the logits of row 1 forbid every id: all are -inf",
        ),
        (lambda: apply_top_k(torch.tensor([0.0, INF]), 1), "hold \\+inf"),
        (lambda: apply_top_k(Z.long(), 1), "logits must have a floating type"),
        (lambda: SamplingParams(temperature=-1.0), "temperature must be at least 0"),
        (lambda: SamplingParams(temperature=NAN), "temperature must be at least 0"),
        (lambda: SamplingParams(top_p=0.0), "top_p must be above 0 and at most 1"),
        (lambda: SamplingParams(min_p=2.0), "min_p must be above 0 and at most 1"),
        (lambda: SamplingParams(typical_p=-1.0), "typical_p must be above 0"),
        (
            lambda: SamplingParams(top_k=0),
            "top_k must be at least 1, got 0; None turns",
        ),
        (lambda: SamplingParams(top_k=-1), "top_k must be a whole number of at least"),
        (lambda: SamplingParams(temperature=None), "temperature must be a"),
        (
            lambda: SamplingParams(repetition_penalty=None),
            "repetition_penalty must be a",
        ),
        (
            lambda: SamplingParams(presence_penalty=NAN),
            "presence_penalty must be a finite number",
        ),
        (lambda: SamplingParams(seed=2**64), r"seed must be below 2\*\*63"),
        (
            lambda: SamplingParams(logit_bias=[1.0]),
            "logit_bias must be Mapping or NoneType, got l",
        ),
        (lambda: Sampler(None), "sampling_params must be Sequence, got NoneType"),
        (lambda: Sampler({"top_k": 3}), "sampling_params must be Sequence, got dict"),
        (
            lambda: Sampler([SamplingParams(), 3]),
            "sampling_params 1 must be SamplingParams, got in",
        ),
        (lambda: Sampler([SamplingParams()]).select([1]), "there are 1 rows, from 0"),
        (lambda: Sampler([SamplingParams()]).select([-1]), r"none is \[-1\]"),
        (lambda: Sampler(SamplingParams()).select([0]), "no rows before its first"),
        (
            lambda: Sampler([SamplingParams()]).extend(Sampler(SamplingParams())),
            "no rows befo",
        ),
        (lambda: Sampler(SamplingParams(temperature=0.0))(Z - INF), "row 0 forbid"),
        (lambda: Sampler(SamplingParams(temperature=0.0))(Z * NAN), "row 0 hold NaN"),
        (
            lambda: Sampler(
                SamplingParams(
                    temperature=0.0, logit_bias=dict.fromkeys(range(5), -INF)
                )
            )(Z),
            "row 0 forbid every id",
        ),
        (
            lambda: Sampler([SamplingParams(top_p=0.9), SamplingParams(top_k=2)])(
                torch.stack([Z[0], Z[1] * NAN])
            ),
            "the logits of row 1 hold NaN",
        ),
        (
            lambda: Sampler(
                [
                    SamplingParams(),
                    SamplingParams(
                        allowed_tokens_fn=lambda ids: torch.zeros(5, dtype=torch.bool)
                    ),
                ]
            )(Z),
            r"of rows \[1\]: the mask forbids",
        ),
        (
            lambda: Sampler(SamplingParams(allowed_tokens_fn=lambda ids: None))(Z),
            r"allowed_tokens_fn must answer with a boolean tensor \(5,\), got None",
        ),
        (
            lambda: Sampler(
                SamplingParams(allowed_tokens_fn=lambda ids: torch.ones(5))
            )(Z),
            "allowed_tokens_fn must answer with a boolean tensor",
        ),
        (lambda: Sampler(SamplingParams())(Z[0]), "logits must be of shape"),
        (lambda: Sampler(SamplingParams())(Z.tolist()), "logits must be Tensor, got l"),
        (
            lambda: Sampler(SamplingParams(presence_penalty=1.0))(Z, [[1.5], [2]]),
            "ids of row 0 must be integers",
        ),
        (
            lambda: process_logits(
                Z, SamplingParams(presence_penalty=1.0), torch.tensor([[1]])
            ),
            "ids must be of shape",
        ),
        (lambda: apply_top_k(Z.numpy(), 1), "logits must be Tensor, got ndarray"),
        (
            lambda: apply_logit_bias(Z, {1: NAN}),
            "the bias of id 1 must be a finite number, got nan",
        ),
        (lambda: apply_logit_bias(Z, {1: INF}), "bias of id 1 must be .* got inf"),
        (lambda: apply_logit_bias(Z, {1: "a"}), "bias of id 1 must be .* got 'a'"),
        (lambda: apply_logit_bias(Z, {1: None}), "bias of id 1 must be .* got None"),
        (
            lambda: apply_logit_bias(Z, {1.5: 1.0}),
            "an id in bias_by_id must be a whole number of at least 0, got 1.5",
        ),
        (lambda: apply_logit_bias(Z, {"a": 1.0}), "an id in bias_by_id .* got 'a'"),
        (lambda: apply_logit_bias(Z, {True: 1.0}), "an id in bias_by_id .* got True"),
        (lambda: apply_logit_bias(Z, {-1: 1.0}), "an id in bias_by_id .* got -1"),
        (lambda: apply_logit_bias(Z, [1.0]), "bias_by_id must be Mapping, got list"),
        (lambda: apply_logit_bias(Z, None), "bias_by_id must be Mapping, got NoneType"),
        (lambda: apply_allowed_mask(Z, [True] * 5), "mask must be Tensor, got list"),
        (lambda: apply_allowed_mask(Z, None), "mask must be Tensor, got NoneType"),
        (
            lambda: apply_allowed_mask(Z.tolist(), torch.ones(5, dtype=torch.bool)),
            "logits must be Tensor, got list",
        ),
        (
            lambda: apply_allowed_mask(Z, torch.ones(3, 5, dtype=torch.bool)),
            "each of 5 ids",
        ),
        (
            lambda: apply_allowed_mask(Z, torch.ones(3, 2, 5, dtype=torch.bool)),
            "each of 5 id",
        ),
        (
            lambda: sample_ids(Z, torch.tensor([0.5, 1.0])),
            "uniforms must be from 0 to below",
        ),
        (lambda: sample_ids(Z, torch.tensor([-0.5, 0.5])), "got -0.5 to 0.5"),
        (
            lambda: sample_ids(Z, torch.tensor([NAN, 0.5])),
            "uniforms must be from 0 to below",
        ),
        (lambda: distinct_n("a b c d e"), "texts must be a list of texts, got on"),
        (lambda: SamplingParams(seed=-1), "seed must be a whole number of at least 0"),
        (
            lambda: SamplingParams(repetition_penalty=0.0),
            "repetition_penalty must be above 0",
        ),
        (
            lambda: SamplingParams(frequency_penalty=NAN),
            "frequency_penalty must be a finite number",
        ),
        (
            lambda: SamplingParams(logit_bias={-1: 1.0}),
            "an id in logit_bias must be a whole",
        ),
        (
            lambda: SamplingParams(logit_bias={1: INF}),
            "logit_bias of id 1 must be a finite",
        ),
        (
            lambda: SamplingParams(allowed_tokens_fn=[1, 2]),
            "allowed_tokens_fn is a function of ids",
        ),
        (lambda: Sampler([SamplingParams()])(Z), "logits of 2 rows for a sampler of 1"),
        (lambda: Sampler(SamplingParams())(Z, [[1]]), "ids of 1 rows for logits of 2"),
        (
            lambda: Sampler(SamplingParams(repetition_penalty=2.0))(Z, [[9], []]),
            "id 9 is out",
        ),
        (lambda: distinct_n(["too short"]), "no text has 4 words"),
        (lambda: distinct_n(["a b"], 0), "n must be a whole number of at least 1"),
        (lambda: distinct_n(["a b"], 1.5), "n must be a whole number .* got 1.5"),
        (lambda: distinct_n(["a b"], "2"), "n must be a whole number .* got '2'"),
        (lambda: distinct_n(["a b"], True), "n must be a whole number .* got True"),
        (lambda: distinct_n(None), "texts must be a list of texts, got None"),
        (lambda: distinct_n(["a b", 3], 1), "text 1 must be str, got int 3"),
        (lambda: distinct_n([b"a b"], 1), "text 0 must be str, got bytes"),
        (
            lambda: Sampler([SamplingParams()]).extend("a"),
            "other must be Sampler, got str 'a'",
        ),
        (
            lambda: Sampler([SamplingParams()]).select("0"),
            "rows must be a list of row numbers, got '0'",
        ),
        (lambda: Sampler([SamplingParams()]).select(None), "rows must be a list"),
        (lambda: Sampler([SamplingParams()]).select(0), "rows must be a list"),
        (
            lambda: Sampler([SamplingParams()]).select(torch.tensor([[0]])),
            "there are 1 rows, from 0 on, and none is",
        ),
        (lambda: Sampler([SamplingParams()]).select(["a"]), r"none is \['a'\]"),
        (lambda: Sampler([SamplingParams()]).select([0.0]), r"none is \[0.0\]"),
        (lambda: Sampler([SamplingParams()]).select([False]), r"none is \[False\]"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(call, message):
    with pytest.raises((ValueError, TypeError)) as seen:
        call()
    if "jaxtyping" not in type(seen.value).__module__:  # types are executed
        assert isinstance(seen.value, ValueError)
        assert re.search(message, str(seen.value)), seen.value


def test_what_may_be_is_taken():
    assert SamplingParams(logit_bias={1: -INF}).logit_bias == {1: -INF}
    assert (apply_logit_bias(Z, {1: -INF})[:, 1] == -INF).all()
    assert torch.equal(apply_logit_bias(Z, {}), Z)
    assert process_logits(Z, SamplingParams(repetition_penalty=2.0)).shape == Z.shape
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 2
    assert copy.deepcopy(SamplingParams(top_k=3)) == SamplingParams(top_k=3)


PENALTY = SamplingParams(repetition_penalty=2.0, presence_penalty=1.0)


@plain_only
@pytest.mark.parametrize("name", ["ids", "prompt_ids"])
@pytest.mark.parametrize(
    "ids, message",
    [
        ([1, 2], r"of row 0 must be a row of ids, such as \[1, 2\], got 1"),
        ([[1], 2], "of row 1 must be a row of ids, .* got 2"),
        ([[[1]], [[2]]], r"of row 0 must be a row of ids, .* got \[\[1\]\]"),
        (torch.tensor([1, 2]), r" must be of shape \(b, n\), got \(2,\)"),
        (torch.tensor([[[1]], [[2]]]), r" must be of shape \(b, n\), got \(2, 1, 1\)"),
        (torch.tensor(1), r" must be rows of ids, got tensor\(1\)"),
        (torch.tensor([[True], [False]]), " must be integers, got torch.bool"),
        (["a", "b"], "of row 0 must be a row of ids, .* got 'a'"),
        ([[1], None], "of row 1 must be a row of ids, .* got None"),
        ("ab", " must be rows of ids, got 'ab'"),
        ({0: [1], 1: [2]}, " must be rows of ids, got {0"),
        (5, " must be rows of ids, got 5"),
        (iter([[1], [2]]), " must be rows of ids, got <list_iterator"),
    ],
)
def test_a_penalty_looks_at_rows_of_ids(name, ids, message):
    with pytest.raises(
        ValueError, match=f"^{name}{'' if message[0] == ' ' else ' '}{message}"
    ):
        Sampler(PENALTY)(Z, **{name: ids})


@plain_only
def test_rows_to_keep_come_in_any_form():
    for rows in ([1, 0], (1, 0), torch.tensor([1, 0]), np.array([1, 0]), iter([1, 0])):
        sampler = Sampler([SamplingParams(seed=1), SamplingParams(seed=2)])
        sampler.select(rows)
        assert [s.seed for s, _ in sampler.row_states] == [2, 1]


NO_IDS = torch.zeros(2, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: to_float(NO_IDS),
        lambda: apply_temperature(NO_IDS, 0.5),
        lambda: apply_top_k(NO_IDS, 1),
        lambda: apply_top_p(NO_IDS, 0.5),
        lambda: apply_min_p(NO_IDS, 0.5),
        lambda: apply_typical_p(NO_IDS, 0.5),
        lambda: apply_logit_bias(NO_IDS, {}),
        lambda: apply_repetition_penalty(NO_IDS, NO_IDS.long(), 2.0),
        lambda: apply_frequency_penalty(NO_IDS, NO_IDS.long(), 2.0),
        lambda: apply_presence_penalty(NO_IDS, NO_IDS.long(), 2.0),
        lambda: apply_allowed_mask(NO_IDS, NO_IDS[0].bool()),
        lambda: sample_ids(NO_IDS, torch.zeros(2)),
        lambda: process_logits(NO_IDS, SamplingParams()),
        lambda: Sampler(SamplingParams())(NO_IDS),
        lambda: Sampler(SamplingParams(temperature=0.0))(NO_IDS),
    ],
)
def test_logits_of_no_vocabulary_are_refused(call):
    says = r"logits must hold a number for each of one id or more, got .* \(2, 0\)"
    with pytest.raises(ValueError, match=says):
        call()


def test_distinct_is_the_share_of_different_runs():
    assert distinct_n(["a b c", "a b d"], 2) == 3 / 4
    assert distinct_n(["a a a a a"]) == 1 / 2


# --- the recorded experiment and the benchmark


@plain_only
def test_the_experiment_runs_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    import sampling as experiment

    monkeypatch.setattr(
        experiment,
        "METHODS",
        {
            "temperature": ("temperature", (0.5, 1.0), {}),
            "hot min-p": ("min_p", (0.1,), {"temperature": 1.5}),
        },
    )
    out = tmp_path / "some.csv"
    monkeypatch.setattr(
        sys, "argv", ["sampling.py", "--texts", "3", "--seeds", "1", "--out", str(out)]
    )
    experiment.main()
    first = out.read_text(encoding="utf-8")
    assert first.count("\n") == 4 and "hot min-p,0.1,0,3," in first
    capsys.readouterr()
    experiment.main()
    assert capsys.readouterr().out == ""
    assert out.read_text(encoding="utf-8") == first


# what leaves logits as they are, or changes some: for each function its arguments
APPLIED = {
    "apply_temperature": [(1.0,), (0.0,), (0.5,)],
    "apply_top_k": [(1,), (4,), (99,)],
    "apply_top_p": [(1.0,), (0.4,)],
    "apply_min_p": [(1e-9,), (0.4,)],
    "apply_typical_p": [(1.0,), (0.4,)],
    "apply_logit_bias": [({},), ({1: 2.0},)],
    "apply_repetition_penalty": [
        (torch.tensor([ids], dtype=torch.int64), penalty)
        for ids in ([], [-1], [0, 2])
        for penalty in (1.0, 2.0)
    ],
    "apply_frequency_penalty": [
        (torch.tensor([ids]), penalty)
        for ids in ([-1], [0, 2])
        for penalty in (0.0, 1.0)
    ],
    "apply_presence_penalty": [
        (torch.tensor([ids]), penalty)
        for ids in ([-1], [0, 2])
        for penalty in (0.0, 1.0)
    ],
    "apply_allowed_mask": [
        (torch.ones(1, 4).bool(),),
        (torch.ones(4).bool(),),
        (torch.tensor([True, False, True, True]),),
    ],
}


def test_each_function_that_is_applied_is_in_the_table():
    assert {*APPLIED} == {n for n in logits.__all__ if n.startswith("apply_")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", APPLIED)
def test_what_is_applied_leaves_its_argument_alone(name, dtype):
    "The result is a tensor of its own, even where nothing has changed."
    for args in APPLIED[name]:
        given = torch.tensor([[0.5, -1.0, 2.0, 0.25]], dtype=dtype)
        before = given.clone()
        result = getattr(logits, name)(given, *args)
        assert torch.equal(given, before)
        result.fill_(7.0)
        assert torch.equal(given, before), args


def test_the_record_is_whole():
    from tformer.models.mini_gpt import load_record

    experiment = load_experiment("sampling")
    rows = load_record("sampling")
    every = {
        (m, str(v), str(s))
        for m, (_, values, _) in experiment.METHODS.items()
        for v in values
        for s in range(3)
    }
    assert {(r["method"], r["value"], r["seed"]) for r in rows} == every
    assert {r["texts"] for r in rows} == {"120"}


@plain_only
def test_a_benchmark_row_is_within_reach(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "bench"))
    import bench_sampling
    import timing

    monkeypatch.setattr(timing, "quick", True)
    monkeypatch.setattr(timing, "keep_memory", lambda: None)
    monkeypatch.setattr(sys, "argv", ["bench_sampling.py", "--quick"])
    bench_sampling.main()
    printed = capsys.readouterr().out
    assert printed.count("a step") >= 8 and json.dumps(printed)
