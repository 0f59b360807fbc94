"""No device is mixed with another, as far as a machine without a card can tell.

The jobs of `tests/device_jobs.py` are done on a pretended card (`tests/pretend.py`),
which refuses what a card refuses, and must come out as on the CPU.
"""
import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn

import device_jobs as jobs
import test_caches
from helpers import plain_only, randn
from models import FAMILIES, ROWS, rows
from pretend import CARD, MIXED, PretendedCard
from tformer.speculate import PrefixedModel

pytestmark = plain_only
# all is computed by the same code but for a few branches for the CPU
TOLERANCE = 1e-9


def on_both(job, *args):
    "A job on the pretended card, which must be used, and then on the CPU."
    with PretendedCard() as card:
        found = job(*args, "cuda")
        found = jobs.tree_map(lambda x: x.cpu() if isinstance(
            x, torch.Tensor) else x, found)
    assert card.num_calls > 0
    jobs.same_results(found, job(*args, "cpu"), TOLERANCE)


def with_model(job, row, device):
    return job(row, row.make().double().to(device), device)


def over(functions):
    return pytest.mark.parametrize("job", functions, ids=lambda f: f.__name__)


@rows(usual=FAMILIES)
@over(jobs.OF_MODELS)
def test_every_model(row, job):
    on_both(with_model, job, row)


@rows("causal", usual=["Seq2Seq", "GPT", "Llama, grouped, tied, scaled"])
@over(jobs.OF_WRITERS)
def test_what_writes(row, job):
    on_both(with_model, job, row)


@pytest.mark.parametrize("row", [
    pytest.param(row, id=row.name, marks=[] if row.name in FAMILIES else
                 pytest.mark.nightly)
    for row in ROWS if row.causal and not row.source])
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
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    on_both(lambda device: jobs.trained(device, tmp_path / device[:1]))
