"""Texts behind a prefix are those of the whole."""

import pytest
import torch

from helpers import close, draw_ids, spread
from models import MAX_LEN, ROWS, VOCAB
from tformer.inference.generation import generate
from tformer.inference.prefix import PrefixedModel
from tformer.inference.speculative import DraftModel, speculative_generate
from tformer.models.llama import Llama
from tformer.variants.sliding_window import make_window_factory

decoders = pytest.mark.parametrize(
    "row", [r for r in ROWS if r.causal and not r.source], ids=lambda row: row.name
)
LLAMA = next(r for r in ROWS if r.cls is Llama)


def same(ours, reference):
    assert ours.ids == reference.ids and ours.finish_reason == reference.finish_reason
    assert ours.log_probs == pytest.approx(reference.log_probs, abs=1e-6)


@decoders
def test_rows_behind_a_prefix(row):
    model = row.make().double()
    prefix = [4, 9, 9, 1]
    rests = [[3], [8, 2, 5], [7, 7]]
    begun = PrefixedModel(model, prefix)
    assert begun.max_len == MAX_LEN - 4
    kept = [x.clone() for layer in begun.prefix_cache.layers for x in layer.tensors]
    for some in (rests, rests[:1], [[3, 1], [4, 1]]):
        whole = generate(model, [prefix + rest for rest in some], max_new_tokens=10)
        for ours, reference in zip(
            generate(begun, some, max_new_tokens=10), whole, strict=True
        ):
            same(ours, reference)
    draft = DraftModel(row.make().double())
    same(
        speculative_generate(begun, rests[1], draft, max_new_tokens=14),
        generate(model, [prefix + rests[1]], max_new_tokens=14)[0],
    )
    after = [x for layer in begun.prefix_cache.layers for x in layer.tensors]
    assert all(torch.equal(a, b) for a, b in zip(kept, after, strict=True))
    ids = draw_ids(2, 5, high=VOCAB)
    whole = torch.cat([torch.tensor([prefix] * 2), ids], 1)
    close(begun(ids), model(whole)[:, 4:], 1e-9)
    positions = torch.tensor([[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4]])
    close(
        begun(ids, positions=positions)[:1, 2:],
        model(torch.cat([torch.tensor([prefix]), ids[:1, 2:]], 1))[:, 4:],
        1e-9,
    )


def test_a_prefix_is_read_anew_where_weights_are_others():
    begun = PrefixedModel(LLAMA.make(), [4, 9, 9, 1])
    rest = [[3]]
    begun.double()
    assert begun.prefix_cache.layers[0].tensors[0].dtype == torch.float64
    same(
        generate(begun, rest, max_new_tokens=9)[0],
        generate(begun.model, [[4, 9, 9, 1, 3]], max_new_tokens=9)[0],
    )
    torch.nn.init.normal_(begun.model.blocks[0].attention.sublayer.k_proj.weight)
    begun.compute_prefix()
    same(
        generate(begun, rest, max_new_tokens=9)[0],
        generate(begun.model, [[4, 9, 9, 1, 3]], max_new_tokens=9)[0],
    )
    assert "ids" not in begun.state_dict()


def test_a_window_keeps_the_prefix():
    model = LLAMA.make()
    begun = PrefixedModel(model, [7, 8, 9])
    alone = generate(begun, [[1, 2, 3]], max_new_tokens=30, context_shift=8)[0].ids
    both = generate(begun, [[1, 2, 3], [4]], max_new_tokens=30, context_shift=8)[0].ids
    assert alone == both


@torch.no_grad()
def write_slowly(model, prefix, text, n, keep):
    "Every token from all that is left of the text, computed anew."
    new = []
    for _ in range(n):
        if len(prefix + text) > MAX_LEN:
            text = text[-keep:]
        logits = model(torch.tensor([prefix + text]))[0, -1]
        new.append(logits.argmax().item())
        text = [*text, new[-1]]
    return new


@pytest.mark.parametrize("window", [None, 1, 3, 30])
def test_a_full_text_behind_a_prefix_is_shifted_whatever_the_layers_see(window):
    "A cache of windows has dropped the prefix by then."
    model = LLAMA.make().double()
    if window:
        factory = make_window_factory(LLAMA.config, window)
        model = spread(Llama(LLAMA.config, factory), 0.3).double()
    begun = PrefixedModel(model, [5, 6])
    asked = dict(max_new_tokens=40, context_shift=5)
    for prompts in ([[1, 2, 3]], [[1, 2, 3], [4, 4, 4]], [[7], [1, 2, 3, 4, 5, 6]]):
        found = generate(begun, prompts, **asked)
        for prompt, text in zip(prompts, found, strict=True):
            assert text.ids == write_slowly(model, [5, 6], prompt, 40, 5)


@pytest.mark.parametrize(
    "prefix, says",
    [
        ([[1], [2]], "one text at a time"),
        ([[1, 2]], r"prefix_ids must be one flat row .*brackets of \[\[1, 2\]\]"),
        ([1] * 21, "^prefix_ids of 21 ids go beyond max_len 20"),
        ([], "^prefix_ids is empty"),
        ([1.5], "^prefix_ids must be integers"),
    ],
)
def test_bad_prefixes(prefix, says):
    with pytest.raises(ValueError, match=says):
        PrefixedModel(LLAMA.make(), prefix)
