"""Positions: those that follow, and those that are left."""

import weakref

import pytest
import torch

from models import ROWS
from tformer.nn import positions
from tformer.nn.paged_cache import BlockPool, new_paged_cache
from tformer.nn.positions import (
    AttentionContext,
    Positions,
    append_positions,
    crop_positions,
)
from tformer.nn.rotary import RotaryEmbedding
from tformer.nn.static_cache import new_static_cache


def test_positions_go_on_from_the_largest_of_each_row():
    at = torch.tensor([[0, 1, 2], [-1, -1, 0], [-1, -1, -1]])
    later = Positions(at).next(2).tensor
    assert later.tolist() == [[3, 4], [1, 2], [0, 1]]
    both = append_positions(Positions(at), Positions(later))
    assert both.tensor.tolist() == [
        a + b for a, b in zip(at.tolist(), later.tolist(), strict=True)
    ]


def test_what_is_below_is_kept_in_order():
    at = torch.tensor([[0, 1, 2, 3], [-1, 0, 1, 2]])
    below, slots = crop_positions(Positions(at), 2)
    assert below.tensor.tolist() == [[0, 1, -1], [-1, 0, 1]]
    assert slots.tolist() == [0, 1, 2]


@pytest.mark.parametrize("end", range(8))
def test_counted_positions_are_cut_as_a_tensor_of_them_is(end):
    "Below the first of them nothing is left."
    counted = Positions(start=3, length=4)
    below, slots = crop_positions(counted, end)
    named, kept = crop_positions(Positions(counted.tensor), end)
    assert below.length == named.length == max(end - 3, 0) - max(end - 7, 0)
    assert below.tensor.tolist() == named.tensor.tolist()
    assert torch.arange(4)[slots].tolist() == kept.tolist()


def test_positions_stay_what_they_are():
    tensor = torch.tensor([[0, 1, 2, -1]])
    kept = Positions(tensor)
    tensor += 5
    assert kept.tensor.tolist() == [[0, 1, 2, -1]] and kept.end == 3


def test_positions_keep_nothing():
    for kept in (Positions(start=0, length=2), Positions(torch.zeros(1, 2).long())):
        made = [kept.memoize(("key",), object) for _ in range(2)]
        assert made[0] is not made[1]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_nothing_that_was_derived_outlives_a_call(row):
    """The same ``Positions`` twice, and in between what it is for is changed in place:
    the mask, and the frequencies and the factor of rotary embeddings."""
    model = row.make().double()
    ids = row.ids(2, 6)
    kept = Positions(torch.tensor([[0, 1, 2, 3, 4, 5], [-1, -1, 0, 1, 2, 3]]))
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    ghost = weakref.ref(mask)
    with torch.inference_mode():
        before = row.run(model, ids, positions=kept, mask=mask)
    mask[..., 1:3] = torch.eye(6, dtype=torch.bool)[:, 1:3]
    for part in model.modules():
        if isinstance(part, RotaryEmbedding):
            part.attention_factor = 1.5
            for buffer in part.buffers():
                buffer.mul_(0.5)
    after = row.run(model, ids, positions=kept, mask=mask)
    again = row.run(model, ids, positions=kept.tensor, mask=mask.clone())
    assert torch.equal(after, again) and not torch.equal(before, after)
    after.sum().backward()  # and what inference mode has made is not kept
    del mask
    assert ghost() is None


def leaves(cache):
    for layer in getattr(cache, "layers", ()):
        yield from leaves(layer) if hasattr(layer, "layers") else [layer]


@pytest.mark.parametrize("how", ["growing", "static", "paged"])
@pytest.mark.parametrize("row", [r for r in ROWS if r.causal], ids=lambda row: row.name)
def test_a_cache_keeps_no_context(row, how):
    "What a call has derived ends with it, whatever remembers its positions."
    model = row.make()
    cache = {
        "growing": lambda: model.new_cache(2),
        "static": lambda: new_static_cache(model, 2, 12),
        "paged": lambda: new_paged_cache(model, BlockPool(12, 4), 2),
    }[how]()
    ids = row.ids(2, 5)
    with torch.inference_mode():
        for part in (ids[:, :4], ids[:, 4:]):
            row.run(model, part, cache=cache)
            kept = [leaf.key_positions for leaf in leaves(cache)]
            assert kept and not any(isinstance(k, AttentionContext) for k in kept)


@pytest.mark.parametrize("row", [r for r in ROWS if r.source], ids=lambda row: row.name)
def test_an_encoder_output_read_in_inference_mode_can_be_trained_on(row):
    model = row.make()
    cache = model.new_cache(2)
    ids = row.ids(2, 5)
    with torch.inference_mode():
        row.run(model, ids[:, :4], cache=cache)
    row.run(model, ids[:, 4:], cache=cache).sum().backward()
    assert model.lm_head.weight.grad.any()


def test_every_public_name_has_words():
    for name in positions.__all__:
        assert getattr(positions, name).__doc__, name
