"""Attention by an online softmax and by the kernel, against PyTorch."""

import pytest
import torch
from torch.nn import functional as F

from tformer.nn import attention_backends
from tformer.nn.attention_backends import (
    eager_attend,
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


@pytest.mark.parametrize("n_axes", [1, 2, 3, 4])
def test_one_query_takes_a_bias_of_any_number_of_axes(n_axes):
    """Six heads that share the keys of two: what is added belongs to a head.

    A mask has one axis or all of them.
    """
    q, k, v = (torch.randn(2, h, t, 4) for h, t in ((6, 1), (2, 5), (2, 5)))
    bias = torch.randn((2, 6, 1, 5)[-n_axes:])
    mask = torch.rand(bias.shape if n_axes == 4 else (5,)) < 0.7
    mask[..., 0] = True
    for given in ({"bias": bias}, {"mask": mask}, {"mask": mask, "bias": bias}):
        expected, _ = eager_attend(q, k, v, **given)
        assert torch.allclose(fused_attend(q, k, v, **given), expected, atol=1e-6)


def test_every_public_name_has_words():
    for name in attention_backends.__all__:
        assert getattr(attention_backends, name).__doc__, name
