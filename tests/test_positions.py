"""Positions: those that follow, and those that are left."""

import torch

from tformer import positions
from tformer.positions import Positions, append_positions, crop_positions


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


def test_every_public_name_has_words():
    for name in positions.__all__:
        assert getattr(positions, name).__doc__, name
