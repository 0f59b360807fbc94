"""The code on the notation page is run, and its adapters are compared with
PyTorch and `transformers` on masks that the page does not show."""

import re

import pytest
import torch
import torch.nn.functional as F

from conftest import ROOT
from tformer.nn.functional import attend, causal_mask, padding_mask

PAGE = ROOT / "book" / "notation.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
B = 3
H = 2
T = 6
D = 4


def blocks():
    return BLOCK.findall(PAGE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page():
    "What the page's code has defined once all of it has run."
    space = {}
    for i, block in enumerate(blocks()):
        exec(compile(block, f"notation.md block {i}", "exec"), space)
    return space


def positions(seed):
    "Padding anywhere in the row, at least one token in each."
    g = torch.Generator().manual_seed(seed)
    kept = torch.rand(B, T, generator=g) > 0.3
    kept[:, -1] = True
    return torch.where(kept, kept.long().cumsum(-1) - 1, -1)


def inputs(seed):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(4, B, H, T, D, generator=g)


def test_every_adapter_of_the_page_is_there(page):
    for name in (
        "to_sdpa",
        "to_attn_mask",
        "to_key_padding_mask",
        "positions_from_attention_mask",
        "to_hugging_face",
    ):
        assert callable(page[name])


@pytest.mark.parametrize("seed", range(5))
def test_sdpa_agrees(page, seed):
    q, k, v, noise = inputs(seed)
    pos = positions(seed)
    mask = causal_mask(pos, pos) & padding_mask(pos)
    bias = noise[:, :, :, :1] + noise[:, :, None, :, 0]
    live = mask.any(-1, keepdim=True)
    for m, a in ((mask, None), (mask, bias), (None, bias), (None, None)):
        ours, _ = attend(q, k, v, mask=m, bias=a)
        ref = F.scaled_dot_product_attention(q, k, v, page["to_sdpa"](m, a))
        rows = live if m is not None else torch.ones_like(live)
        torch.testing.assert_close(ours, ref.where(rows, 0))


@pytest.mark.parametrize("seed", range(5))
def test_multihead_attention_agrees(page, seed):
    pos = positions(seed)
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(B, T, H * D, generator=g)
    mha = torch.nn.MultiheadAttention(H * D, H, bias=False, batch_first=True)
    q, k, v = (
        a.unflatten(-1, (H, D)).transpose(1, 2)
        for a in (x @ mha.in_proj_weight.T).chunk(3, -1)
    )
    keys = padding_mask(pos)
    order = causal_mask(pos, pos)
    for mask, kwargs in (
        (keys, {"key_padding_mask": page["to_key_padding_mask"](pos)}),
        (keys & order, {"attn_mask": page["to_attn_mask"](keys & order, B, H)}),
    ):
        live = mask.expand(B, 1, T, T).any(-1)[:, 0, :, None]
        ours, _ = attend(q, k, v, mask=mask)
        ours = mha.out_proj(ours.transpose(1, 2).flatten(-2))
        ref, _ = mha(x, x, x, need_weights=False, **kwargs)
        torch.testing.assert_close(ours.where(live, 0), ref.where(live, 0))


@pytest.mark.parametrize("seed", range(5))
def test_hugging_face_round_trip(page, seed):
    pos = positions(seed)
    given = page["to_hugging_face"](pos)
    assert given["attention_mask"].dtype == torch.int64
    assert given["attention_mask"].sum() == (pos >= 0).sum()
    assert given["position_ids"].min() >= 0
    assert page["positions_from_attention_mask"](given["attention_mask"]).equal(pos)


@pytest.mark.parametrize(
    "right, wrong",
    [
        ("return ~mask.expand", "return mask.expand"),
        ("return key_positions < 0", "return key_positions >= 0"),
        (
            'torch.where(mask, bias, float("-inf"))',
            'torch.where(mask, float("-inf"), bias)',
        ),
        (
            "position_ids=positions.clamp(min=0)\n    )\n\n\n",
            "position_ids=None\n    )\n\n\n",
        ),
        (
            "dict(\n        attention_mask=(positions >= 0)",
            "dict(\n        attention_mask=(positions > 0)",
        ),
    ],
)
def test_the_page_notices_a_wrong_adapter(right, wrong):
    text = "\n".join(blocks())
    assert text.count(right) == 1
    with pytest.raises((AssertionError, RuntimeError)):
        exec(compile(text.replace(right, wrong), "notation.md", "exec"), {})
