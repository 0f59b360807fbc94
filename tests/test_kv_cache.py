"""What a growing cache holds. More of it: test_caches.py, test_attention.py."""

import torch

from tformer import kv_cache
from tformer.kv_cache import GrowingRows
from tformer.positions import Positions, append_positions


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
    for name in kv_cache.__all__:
        assert getattr(kv_cache, name).__doc__, name
