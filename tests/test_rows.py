"""What stands behind a cached attention: positions, rows, online softmax."""

import pytest
import torch
from torch.nn import functional as F

from tformer import rows
from tformer.rows import (
    GrowingRows,
    Positions,
    append_positions,
    crop_positions,
    fused_attend,
    online_softmax_attend,
    repeat_kv,
)


@pytest.mark.parametrize("block", [1, 3, 64])
def test_online_attention_equals_the_kernel(block):
    q, k, v = (torch.randn(2, 3, n, 8) for n in (5, 7, 7))
    mask = torch.rand(2, 3, 5, 7) < 0.6
    mask[..., 0] = True
    expected = F.scaled_dot_product_attention(q, k, v, mask)
    got = online_softmax_attend(q, k, v, mask, chunk_size=block)
    assert torch.allclose(got, expected, atol=1e-5)
    assert not torch.allclose(online_softmax_attend(q, k, v), expected, atol=1e-3)


def test_shared_heads_are_those_of_the_kernel():
    q, k, v = (torch.randn(1, h, 6, 4) for h in (6, 2, 2))
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert torch.allclose(fused_attend(q, k, v), expected, atol=1e-6)
    again = F.scaled_dot_product_attention(q, repeat_kv(k, 3), repeat_kv(v, 3))
    assert torch.allclose(again, expected, atol=1e-6)


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


def test_rows_that_grow_hold_what_they_were_given():
    kept = GrowingRows(2)
    parts = [torch.randn(2, n, 3) for n in (4, 1, 5)]
    start = 0
    for part in parts:
        positions = Positions(start=start, length=part.shape[1])
        got = kept._append((part,), positions)
        kept.replace(got, append_positions(kept.key_positions, positions))
        start += part.shape[1]
    assert torch.equal(kept.tensors[0], torch.cat(parts, -2))
    assert kept.key_positions.tensor.tolist() == [list(range(10))]


def test_every_public_name_has_words():
    for name in rows.__all__:
        assert getattr(rows, name).__doc__, name
