"""Schedules of the learning rate, against their formulas."""

import functools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from helpers import plain_only
from tformer.training.optimizers import SGD
from tformer.training.schedules import (
    inverse_sqrt,
    scale_lr,
    warmup_cosine,
    warmup_stable_decay,
)

torch.set_num_threads(1)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.data())
def test_no_update_is_wasted(steps, data):
    warmup = data.draw(st.integers(0, steps))
    decay = data.draw(st.integers(0, steps - warmup))
    floor = data.draw(st.floats(0, 1))
    for factor in (
        warmup_cosine(steps, warmup, floor),
        warmup_stable_decay(steps, warmup, decay),
        inverse_sqrt(max(warmup, 1)),
    ):
        made = [factor(t) for t in range(1, steps + 1)]
        assert all(0 < x <= 1 for x in made)
        assert max(made) == pytest.approx(1) or decay == steps
        up = made[: max(warmup, 1)]
        if decay < steps:
            assert up == pytest.approx(
                [t / max(warmup, 1) for t in range(1, len(up) + 1)]
            )
        assert factor(10 * steps + 10) >= 0  # and after the end


def test_schedules_equal_their_formulas():
    for t in range(1, 9000, 7):
        paper = 512**-0.5 * min(t**-0.5, t * 4000**-1.5)
        assert (512 * 4000) ** -0.5 * inverse_sqrt(4000)(t) == (pytest.approx(paper))
    p = nn.Parameter(torch.ones(1))
    peer = torch.optim.SGD([p], 1.0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(peer, 91, 0.1)
    ours = warmup_cosine(100, 10)
    for t in range(10, 101):
        assert ours(t) == pytest.approx(peer.param_groups[0]["lr"])
        peer.step()
        cosine.step()
    assert ours(101) == ours(10**6) == pytest.approx(0.1)
    stable = warmup_stable_decay(10, 2, 4)
    assert [round(stable(t), 3) for t in range(1, 12)] == [
        0.5,
        1,
        1,
        1,
        1,
        1,
        0.8,
        0.6,
        0.4,
        0.2,
        0,
    ]


def test_degenerate_lengths_are_defined():
    assert warmup_cosine(1)(1) == 1
    assert warmup_cosine(1, 1, 0.0)(1) == 1
    assert [warmup_cosine(4, 4)(t) for t in (1, 4, 5)] == [0.25, 1, 0.1]
    assert warmup_stable_decay(3, 0, 3)(1) == 0.75
    assert warmup_stable_decay(2, 2, 0)(2) == 1


@pytest.mark.parametrize(
    "call, says",
    [
        *(
            (functools.partial(made, step), "step must be a whole number of at least 0")
            for made in (
                warmup_cosine(9),
                inverse_sqrt(3),
                warmup_stable_decay(9, 1, 1),
            )
            for step in (-3, 1.5, None)
        ),
        (lambda: warmup_cosine(0), "total_steps must be a whole number"),
        (lambda: warmup_cosine(5, 6), "6 steps up and 0 down do not fit into 5"),
        (lambda: warmup_cosine(5, -1), "warmup_steps must be a whole number"),
        (lambda: warmup_cosine(5, 1, math.nan), "min_lr_ratio must be"),
        (lambda: warmup_stable_decay(5, 3, 3), "3 steps up and 3 down"),
        (lambda: inverse_sqrt(0), "warmup_steps must be a whole number"),
        (
            lambda: scale_lr(SGD([nn.Parameter(torch.ones(1))]), math.nan),
            "factor must be at least 0",
        ),
    ],
)
def test_bad_schedules_are_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_each_group_keeps_its_own_rate():
    ps = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    for make in (SGD, torch.optim.SGD):
        optimizer = make([{"params": ps[:1], "lr": 1.0}, {"params": ps[1:], "lr": 0.1}])
        for factor in (0.5, 0.25, 1.0):
            scale_lr(optimizer, factor)
            assert [g["lr"] for g in optimizer.param_groups] == (
                pytest.approx([factor, 0.1 * factor])
            )
        optimizer.load_state_dict(optimizer.state_dict())
        scale_lr(optimizer, 0.5)
        assert optimizer.param_groups[1]["lr"] == pytest.approx(0.05)


def test_a_rate_that_was_set_by_hand_is_the_new_one():
    optimizer = SGD([nn.Parameter(torch.ones(1))], 1.0)
    (group,) = optimizer.param_groups
    scale_lr(optimizer, 0.5)
    group["lr"] = 0.1
    for factor in (0.5, 0.0, 0.25):
        scale_lr(optimizer, factor)
        assert group["lr"] == 0.1 * factor


def test_a_state_of_before_keeps_its_own_rate():
    optimizer = SGD([nn.Parameter(torch.ones(1))], 1.0)
    state = optimizer.state_dict()
    state["param_groups"][0] |= {"lr": 0.05, "base_lr": 0.1}
    optimizer.load_state_dict(state)
    scale_lr(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] == 0.025


@plain_only  # numbers of numpy are no int by their type
def test_a_rate_from_numpy_can_be_saved():
    optimizer = SGD([nn.Parameter(torch.ones(1))], 0.5)
    scale_lr(optimizer, np.float32(0.5))
    assert type(optimizer.param_groups[0]["lr"]) is float
    scale_lr(optimizer, np.float32(0.25))
    assert json.dumps(optimizer.param_groups[0]["lr"]) == "0.125"
