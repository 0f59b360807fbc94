"""What only the lessons need: their device, their clock, and training there."""

import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers import plain_only
from pretend import PretendedCard
from tformer.course.device import best_seconds, lesson_device, train
from tformer.models import mini_gpt

pytestmark = plain_only


def test_the_cpu_unless_the_variable_says_otherwise(monkeypatch):
    monkeypatch.delenv("TFORMER_DEVICE", raising=False)
    assert lesson_device() == torch.device("cpu")
    with PretendedCard():
        monkeypatch.setenv("TFORMER_DEVICE", "cuda")
        assert lesson_device() == torch.device("cuda")


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta", "1.5", "cpu,cuda"])
def test_a_device_that_is_not_there_is_refused(name):
    with pytest.raises(ValueError, match=r"TFORMER_DEVICE is .* expected") as error:
        lesson_device({"TFORMER_DEVICE": name})
    assert repr(name) in str(error.value)


def test_functions_take_turns_and_the_shortest_call_counts(monkeypatch):
    now = 0.0
    calls = []
    waits = iter([5, 50, 3, 70, 4, 60])

    def work(name):
        nonlocal now
        now += next(waits)
        calls.append(name)

    monkeypatch.setattr(time, "process_time", lambda: now)
    found = best_seconds([lambda: work("a"), lambda: work("b")], "cpu", rounds=3)
    assert calls == ["a", "b"] * 3 and found == [3, 50]


def test_a_card_is_waited_for(monkeypatch):
    now = 0.0

    def wait(device):
        nonlocal now
        assert torch.device(device).type == "cuda"
        now += 7

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(torch.accelerator, "synchronize", wait)
    assert best_seconds([lambda: None], torch.device("cuda"), rounds=2) == [7]


@pytest.mark.parametrize("rounds", [0, -1, 2.5, True, "3"])
def test_rounds_are_counted_in_whole_numbers(rounds):
    with pytest.raises(ValueError, match="rounds must be a whole number"):
        best_seconds([], "cpu", rounds=rounds)


def line(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(1, 1)


def pairs(n=20):
    draw = torch.Generator().manual_seed(0)
    for _ in range(n):
        x = torch.randn(8, 1, generator=draw)
        yield x, 3 * x + 1


def squares(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def test_a_training_there_is_the_one_of_the_tour():
    here = line()
    losses = mini_gpt.train(here, pairs(), 20, squares, lr=0.1)
    there = line()
    with PretendedCard() as card:
        seen = []

        def watched(model, batch):
            seen.extend(x.is_cuda for x in (*batch, model.weight))
            return squares(model, batch)

        assert train(there, pairs(), 20, watched, lr=0.1, device="cuda") == losses
        assert seen == [True] * 60 and card.num_calls > 0
        assert not there.weight.is_cuda and not there.bias.is_cuda
    assert torch.equal(there.weight, here.weight) and torch.equal(there.bias, here.bias)


def test_a_model_comes_back_from_a_training_that_fails():
    model = line()
    with PretendedCard():
        with pytest.raises(ValueError, match="3 batches for 4 steps"):
            train(model, pairs(3), 4, squares, device="cuda")
        assert not model.weight.is_cuda


def test_windows_of_ids_are_moved_as_they_are():
    ids = torch.arange(50) % 7
    model = mini_gpt.MiniGPT(7, d_model=8, n_layers=1, n_heads=2, max_len=6)
    seen = []

    def watched(model, window):
        seen.append(window.is_cuda)
        return mini_gpt.next_token_loss(model, window)

    with PretendedCard():
        train(model, mini_gpt.random_windows(ids, 6), 3, watched, device="cuda")
        assert seen == [True] * 3 and not model.embed.weight.is_cuda
