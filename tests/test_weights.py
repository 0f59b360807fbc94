"""The bundled models keep every number that they had when they were trained.

``bundles.json`` has a fingerprint of each tensor, taken before the tensors got
the names that they have now, and logits that the models gave then.
"""

import hashlib
import json

import pytest
import torch
from safetensors import safe_open

import tformer
from conftest import ROOT

BUNDLES = json.loads((ROOT / "tests" / "bundles.json").read_text("utf-8"))


def fingerprint(tensor):
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


def test_every_bundle_has_a_fingerprint():
    folders = {
        path.parent.name
        for path in (ROOT / "tformer" / "weights").glob("*/model.safetensors")
    }
    assert folders == set(BUNDLES)


@pytest.mark.parametrize("name", BUNDLES)
def test_the_tensors_are_those_of_the_training(name):
    path = ROOT / "tformer" / "weights" / name / "model.safetensors"
    with safe_open(path, "pt") as file:
        names = list(file.keys())
        found = {key: fingerprint(file.get_tensor(key)) for key in names}
    assert found == BUNDLES[name]["tensors"]


@pytest.mark.parametrize("name", BUNDLES)
@torch.no_grad()
def test_the_logits_are_those_of_the_training(name):
    model = tformer.load(name)[0].eval()
    ids = torch.arange(3, 15)[None]
    source = (
        {"encoder_hidden_states": model.encode(ids + 20)}
        if name == "translator"
        else {}
    )
    logits = model(ids, **source)
    expected = torch.tensor(BUNDLES[name]["logits"])
    assert torch.allclose(logits[0, -1, :8], expected, atol=1e-4)
    total = logits.double().square().sum().item()
    assert total == pytest.approx(BUNDLES[name]["sum_of_squares"], rel=1e-5)
