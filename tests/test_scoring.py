"""Strides equal a loop."""

import pytest
import torch

from helpers import close, draw_ids, plain_only
from models import ROWS, VOCAB
from tformer.inference.scoring import strided_token_log_probs
from tformer.models.llama import Llama

LLAMA = next(r for r in ROWS if r.cls is Llama)


@pytest.mark.parametrize(
    "window, stride", [(2, 1), (5, 1), (5, 2), (5, 3), (6, 5), (20, 7), (20, 1)]
)
@pytest.mark.parametrize("n", [2, 5, 6, 7, 19])
def test_strides_equal_a_loop(window, stride, n):
    model = LLAMA.make().double()
    ids = draw_ids(n, high=VOCAB)
    start = 0
    seen = 1
    loop = []
    while seen < n:
        end = min(start + window, n)
        logits = model(ids[None, start:end])[0].log_softmax(-1)
        loop += [logits[i - start - 1, ids[i]] for i in range(seen, end)]
        start = start + stride
        seen = end
    found = strided_token_log_probs(model, ids, window, stride, batch_size=2)
    assert len(found) == n - 1
    close(found.double(), torch.stack(loop).detach(), 1e-5)


@pytest.mark.parametrize("n, stride, says", [(9, 5, "stride"), (1, 2, "row of two")])
def test_bad_strides(n, stride, says):
    with pytest.raises(ValueError, match=says):
        strided_token_log_probs(LLAMA.make(), torch.arange(n), 5, stride)


@plain_only
def test_a_list_is_a_text():
    model = LLAMA.make()
    ids = [1, 2, 3, 4, 5, 6]
    found = strided_token_log_probs(model, ids, 4, 2)
    assert torch.equal(found, strided_token_log_probs(model, torch.tensor(ids), 4, 2))


@plain_only
@pytest.mark.parametrize(
    "change, says",
    [
        (
            dict(ids=torch.tensor([[1, 2, 3]])),
            r"^ids must be .* drop .*\[\[1, 2, 3\]\]",
        ),
        (dict(ids=[[1, 2, 3]]), r"^ids must be .* drop .*\[\[1, 2, 3\]\]"),
        (dict(ids="abc"), "^ids must be one flat row of ids, got 'abc'"),
        (dict(ids=[1.5, 2.5]), "^ids must be integers, got torch.float32"),
        (dict(ids=[]), "^ids is empty"),
        (dict(batch_size=0), "^batch_size must be a whole number .* got 0"),
        (dict(batch_size=2.5), "^batch_size must be a whole number .* got 2.5"),
        (dict(model=None), "^model must return logits of ids, got None"),
    ],
)
def test_bad_arguments(change, says):
    usual = dict(model=LLAMA.make(), ids=[1, 2, 3], context_len=3, stride=2)
    with pytest.raises(ValueError, match=says):
        strided_token_log_probs(**usual | change)
