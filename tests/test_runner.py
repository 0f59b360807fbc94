"""The rows of an engine: two calls of a model, in slots and in blocks."""

import pytest
import torch

from helpers import close
from models import ROWS
from test_paged_cache import consistent
from tformer.runner import ModelRunner, PagedModelRunner

GPT_ROW = next(row for row in ROWS if row.name == "GPT")
RUNNERS = pytest.mark.parametrize(
    "runner_of",
    [
        pytest.param(lambda model: ModelRunner(model, 3), id="slots"),
        pytest.param(lambda model: PagedModelRunner(model, 3, 12, 4), id="blocks"),
    ],
)


def begin(runner, texts):
    "Blocks for these texts, and all of each but its last token read in two parts."
    for row, text in enumerate(texts):
        assert runner.allocate(row, text, use_prefix_cache=False) == 0
    rows = [*range(len(texts))]
    runner.prefill(rows, [text[:2] for text in texts], [0] * len(rows))
    return runner.prefill(rows, [text[2:-1] for text in texts], [2] * len(rows))


@RUNNERS
@pytest.mark.parametrize("name", ["GPT", "Llama", "Qwen3"])
@torch.no_grad()
def test_each_row_is_what_its_text_is_alone(runner_of, name):
    row = next(row for row in ROWS if row.name == name)
    model = row.make().double()
    texts = [row.ids(1, n, seed=n)[0].tolist() for n in (9, 5)]
    runner = runner_of(model)
    found = begin(runner, texts)
    wholes = [model(torch.tensor([text]))[0] for text in texts]
    close(found, torch.stack([whole[-2] for whole in wholes]), 1e-9)
    close(runner.decode([1], texts[1][-1:], [4]), wholes[1][-1:], 1e-9)  # row 0 waits
    close(runner.decode([0], texts[0][-1:], [8]), wholes[0][-1:], 1e-9)
    assert runner.num_prompt_tokens == 8 + 4
    assert runner.num_padding_tokens == 6 - 2


@RUNNERS
@pytest.mark.parametrize("name", ["blocks.1", "lm_head"])
@torch.no_grad()
def test_a_step_that_fails_is_taken_back(runner_of, name, monkeypatch):
    "In the middle of the model, and when all layers have written already."
    model = GPT_ROW.make()
    texts = [GPT_ROW.ids(1, n, seed=n)[0].tolist() for n in (6, 4)]
    runner = runner_of(model)
    begin(runner, texts)
    last = [text[-1] for text in texts]

    def fails(*args, **kwargs):
        raise RuntimeError("the machine is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(model.get_submodule(name), "forward", fails)
        with pytest.raises(RuntimeError, match="on fire"):
            runner.decode([0, 1], last, [5, 3])
    assert runner.cache.lengths.tolist() == [5, 3, 0]
    found = runner.decode([0, 1], last, [5, 3])
    close(found, torch.stack([model(torch.tensor([t]))[0, -1] for t in texts]))


@torch.no_grad()
def test_a_row_for_which_there_is_no_room_gets_no_block():
    model = GPT_ROW.make()
    runner = PagedModelRunner(model, 2, num_blocks=3, block_size=4)
    assert runner.allocate(0, [*range(6)], use_prefix_cache=False) == 0
    assert runner.allocate(1, [*range(5)], use_prefix_cache=False) is None
    assert runner.pool.num_free_blocks == 1
    runner.prefill([0], [[*range(6)]], [0])
    assert [runner.try_reserve(0) for _ in range(2)] == [True, True]
    assert runner.allocate(1, [1, 2], use_prefix_cache=False) == 0
    consistent(runner.pool, runner.cache.tables)
    with pytest.raises(ValueError, match="4 blocks needed, beyond all of them, 3"):
        runner.require_capacity(13)
    with pytest.raises(ValueError, match="tokens of prompt and text"):
        ModelRunner(model, 2).require_capacity(model.max_len + 1)
