"""The script that trains all attention variants: its texts, its runs, its record."""

import subprocess
import sys

import pytest
import torch

from conftest import ROOT

sys.path.insert(0, str(ROOT / "experiments"))
import variants
from variants import common

sys.path.pop(0)

SCRIPT = ROOT / "experiments" / "variants.py"
COLUMNS = [
    "variant",
    "seed",
    "steps",
    "loss",
    "near",
    "far",
    "parameters",
    "seconds",
    *common.about(),
]


def decode(ids):
    return variants.tokenizer().decode(ids)


@pytest.mark.parametrize("length", [variants.NEAR, 64, variants.FAR])
def test_each_question_has_one_answer(length):
    names = set(variants.word_ids(variants.NAMES))
    words = set(variants.word_ids(variants.WORDS))
    rows = variants.questions(40, 5, length)
    assert rows.shape == (40, length + 1)
    assert not torch.equal(rows[0], rows[1])
    for row in rows.tolist():
        told = row[1 : 1 + variants.ASKED]
        filler = row[1 + variants.ASKED : -variants.ASKED]
        asked = row[-variants.ASKED :]
        answers = dict(zip(told[::2], told[1::2], strict=True))
        assert set(answers) <= names and set(answers.values()) <= words
        assert len(answers) == len(set(answers.values())) == variants.PAIRS
        assert not set(answers) & set(filler)
        assert [answers[name] for name in asked[::2]] == asked[1::2]
        assert sorted(asked[::2]) == sorted(answers)
    assert any(row[1:13:2] != row[-12::2] for row in rows.tolist())
    targets = variants.due(rows, "questions")
    assert targets.tolist() == rows[:, -variants.ASKED :][:, 1::2].tolist()
    # the prediction of an answer is made at the name before it
    before = variants.due(rows[:, :-1], "questions")
    assert before.tolist() == rows[:, -variants.ASKED :][:, ::2].tolist()


def test_no_window_reaches_the_answers_of_long_rows():
    "A question attends to a name's neighbor; this is how far that is away."
    rows = variants.questions(200, 6)
    back = [
        position - row.index(row[position]) - 1
        for row in rows.tolist()
        for position in range(variants.FAR + 1 - variants.ASKED, variants.FAR, 2)
    ]
    assert min(back) == 105 and max(back) == 125
    layers = variants.SHAPE["n_layers"]
    assert layers * (variants.WINDOW - 1) == 92 < min(back)
    near = variants.questions(200, 5, variants.NEAR)
    back = [
        position - row.index(row[position]) - 1
        for row in near.tolist()
        for position in range(variants.NEAR + 1 - variants.ASKED, variants.NEAR, 2)
    ]
    assert max(back) < variants.WINDOW


def test_copies_come_after_other_numbers_of_tokens():
    rows = variants.copies(60, 3)
    gaps = set()
    for row in rows.tolist():
        copied = row[-variants.ASKED :]
        start = row.index(copied[0], row.index(variants.end()))
        assert row[start : start + variants.ASKED] == copied
        gaps.add(len(row) - 2 * variants.ASKED - start)
    assert gaps == set(range(variants.FILLER + 1))
    assert variants.due(rows, "copies").tolist() == rows[:, -11:].tolist()


def test_new_texts_are_new():
    read = {tuple(row) for row in variants.story_rows(400, 2).tolist()}
    assert not read & {tuple(row) for row in variants.story_rows(200, 1).tolist()}
    read = {tuple(row) for row in variants.questions(400, 4).tolist()}
    assert not read & {tuple(row) for row in variants.questions(200, 6).tolist()}


def test_a_variant_differs_in_its_attention_alone():
    shapes = {
        variant: {
            name: x.shape
            for name, x in variants.make_model(variant).state_dict().items()
            if ".attention.sublayer." not in name
        }
        for variant in variants.KV_HEADS
    }
    assert all(found == shapes["mha"] for found in shapes.values())
    ids = torch.zeros(1, 40, dtype=torch.long)
    kept = {}
    for variant in variants.KV_HEADS:
        model = variants.make_model(variant, variants.WINDOW).eval()
        cache = model.new_cache(1)
        with torch.no_grad():
            model(ids, cache=cache)
        kept[variant] = cache.nbytes // (4 * 4)
    assert kept == {
        "mha": 40 * 256,
        "gqa": 40 * 64,
        "mqa": 40 * 32,
        "mla": 40 * 32,
        "mla_wide": 40 * 64,
        "sliding": 23 * 64,
        "alternating": (23 + 40) * 32,
        "sparse": 40 * (64 + 16),
    }


def test_all_variants_get_the_same_batches():
    first = list(variants.draw_batches(12, 0))
    again = list(variants.draw_batches(12, 0))
    other = list(variants.draw_batches(12, 1))

    def flat(batches):
        return torch.cat(
            [
                x.flatten()
                for told, asked in batches
                for x in (told, *(rows for _, rows in asked))
            ]
        )

    assert torch.equal(flat(first), flat(again))
    assert not torch.equal(flat(first), flat(other))
    kinds = [[(kind, rows.shape[1] - 1) for kind, rows in asked] for _, asked in first]
    assert kinds[0] == [("copies", 32)]
    assert kinds[-1] == [("questions", 128), ("questions", 24)]


@pytest.mark.parametrize("variant", ["gqa", "sparse"])
def test_every_weight_is_trained_by_one_optimizer(variant):
    model = variants.make_model(variant)
    held = [
        id(p)
        for optimizer in variants.optimizers(model)
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    told, asked = next(variants.draw_batches(2, 0))
    variants.take_step(model, variants.optimizers(model), told, asked)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_sparse_model_ends_sparse(monkeypatch):
    seen = []
    take_step = variants.take_step

    def watch(model, *rest):
        seen.append(model.blocks[0].attention.sublayer.top_k)
        take_step(model, *rest)

    monkeypatch.setattr(variants, "take_step", watch)
    model, _ = variants.train_model("sparse", 10, 0)
    n = seen.count(variants.WINDOW)
    assert seen == [None] * (len(seen) - n) + [variants.WINDOW] * n
    assert n == pytest.approx(variants.SPARSE * len(seen), abs=1)
    assert not model.training


def test_answers_are_counted():
    rows = variants.questions(30, 5, variants.NEAR)

    class Knows(torch.nn.Module):
        def forward(self, ids):
            logits = torch.zeros(*ids.shape, len(variants.tokenizer()))
            after = rows[:, 1:][: len(ids)] if self.right else rows[:, 1:] * 0
            return logits.scatter(-1, after[..., None], 1.0)

    model = Knows()
    model.right = True
    assert variants.answered(model, rows) == 1.0
    model.right = False
    assert variants.answered(model, rows) == 0.0


def run(out, *words):
    command = [sys.executable, SCRIPT, "--steps", "2", "--seeds", "1", "--out", out]
    return subprocess.run(
        [*command, *words], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout


def test_the_script_goes_on_where_it_was(tmp_path):
    out = tmp_path / "some.csv"
    run(out, "--only", "mqa")
    first = common.read(out)
    assert [list(row) for row in first] == [COLUMNS]
    said = run(out, "--only", "mqa", "sliding")
    rows = common.read(out)
    assert [row["variant"] for row in rows] == ["mqa", "sliding"]
    assert rows[0] == first[0] and "mqa" not in said and "sliding" in said


def test_the_record_is_complete():
    rows = common.read(common.RECORDS / "variants.csv")
    assert [list(row) for row in rows] == len(rows) * [COLUMNS]
    assert [(row["variant"], row["seed"]) for row in rows] == [
        (variant, str(seed)) for variant in variants.KV_HEADS for seed in range(3)
    ]
    assert {row["steps"] for row in rows} == {str(variants.STEPS)}
    assert sum(int(row["seconds"]) for row in rows) < 7200
    for row in rows:
        model = variants.make_model(row["variant"])
        assert int(row["parameters"]) == sum(p.numel() for p in model.parameters())
