"""No device is mixed with another, as far as a machine without a card can tell.

The jobs of `tests/device_jobs.py` are done on a pretended card (`tests/pretend.py`),
which refuses what a card refuses, and must come out as on the CPU.
"""

import copy

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import device_jobs as jobs
import test_caches
from helpers import plain_only
from models import FAMILIES, ROWS, rows
from pretend import CARD, MIXTURES, PretendedCard, refusal
from tformer.inference.prefix import PrefixedModel

pytestmark = plain_only
# all is computed by the same code but for a few branches for the CPU
TOLERANCE = 1e-9


def on_both(job, *args):
    "A job on the pretended card, which must be used, and then on the CPU."
    with PretendedCard() as card:
        found = job(*args, "cuda")
        found = tree_map_only(torch.Tensor, lambda x: x.cpu(), found)
        assert card.num_calls > 0
    jobs.same_results(found, job(*args, "cpu"), TOLERANCE)


def with_model(job, row, device):
    return job(row, row.make().double().to(device), device)


def over(functions):
    return pytest.mark.parametrize("job", functions, ids=lambda f: f.__name__)


# --- the pretended card


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_is_refused(name):
    "`tests/test_gpu.py` asks a real card the same."
    refused, mix = MIXTURES[name]
    here = torch.arange(6.0)
    with PretendedCard():
        there = here.cuda()
        with refusal(refused):
            mix(here, there, torch.arange(2).cuda())


def test_there_is_one_card():
    with PretendedCard(), pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1).to("cuda:1")


def test_tensors_know_where_they_are():
    with PretendedCard() as card:
        layer = nn.Linear(2, 3).cuda()
        twin = copy.deepcopy(layer)
        view = layer.weight.T[0]
        layer(torch.ones(1, 2, device="cuda")).sum().backward()
        for x in (
            layer.weight,
            twin.weight,
            view,
            layer.weight.grad,
            torch.tensor([1], device="cuda"),
            view.new_tensor([1]),
        ):
            assert x.device == CARD and x.is_cuda and not x.is_cpu
        back = layer.cpu().weight
        assert back.is_cpu and back.device == torch.device("cpu")
        assert not torch.zeros(2).is_cuda and card.num_calls > 0
    assert not torch.zeros(2).is_cuda


def test_the_memory_of_a_tensor_that_is_gone_is_not_taken_for_the_cards():
    with PretendedCard():
        for _ in range(100):
            torch.ones(7, device="cuda")
            assert torch.zeros(7).is_cpu


class PrefixedByTheCPU(PrefixedModel):
    "As it once was: its rows are numbered on the CPU."

    def new_cache(self, batch_size, max_len=None):
        cache = copy.deepcopy(self.prefix_cache)
        cache.select(torch.zeros(batch_size, dtype=torch.int64))
        return cache


def test_a_slip_is_found():
    model = jobs.row_named("GPT").make()
    with PretendedCard(), refusal(True):
        PrefixedByTheCPU(model.cuda(), [1, 2]).new_cache(2)


# --- the jobs


@rows(usual=FAMILIES)
@over(jobs.OF_MODELS)
def test_every_model(row, job):
    on_both(with_model, job, row)


@rows("causal", usual=["Seq2Seq", "GPT", "Llama, grouped, tied, scaled"])
@over(jobs.OF_WRITERS)
def test_what_writes(row, job):
    on_both(with_model, job, row)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row, id=row.name, marks=[] if row.name in FAMILIES else pytest.mark.nightly
        )
        for row in ROWS
        if row.causal and not row.source
    ],
)
@over(jobs.OF_CONTINUERS)
def test_what_goes_on(row, job):
    on_both(with_model, job, row)


@pytest.mark.parametrize("name", test_caches.TABLE)
def test_caches(name):
    on_both(jobs.cached, name)


@over(jobs.OTHERS)
def test_everything_else(job):
    on_both(job)


def test_training(tmp_path):
    on_both(lambda device: jobs.trained(device, tmp_path / device))
