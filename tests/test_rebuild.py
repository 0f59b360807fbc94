"""The capstone: an empty GPT, its eight gaps, checkers that name a mistake."""

import dataclasses
import inspect
import math
import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from helpers import by_day, close, draw_ids, padded, plain_only, spread
from tformer import check
from tformer.course.rebuild import (
    KNOWN_MISTAKES,
    TODO_METHODS,
    GPTTemplate,
    check_class,
    check_method,
    template_source,
)
from tformer.models.gpt import GPT, GPTConfig
from tformer.nn.kv_cache import DynamicLayerCache, KVCache
from tformer.nn.positions import Positions

warnings.filterwarnings("ignore", message="IProgress not found")
import transformers  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

CONFIG = GPTConfig(
    vocab_size=61, d_model=32, n_layers=2, n_heads=4, max_len=40, dropout=0.0
)


def some_ids(b=3, t=12):
    return draw_ids(b, t, high=61)


class Mine(GPTTemplate):
    "The eight gaps, filled by hand."

    def next_positions(self, cache, length):
        new = torch.arange(length)[None]
        return new if cache is None else cache.lengths[:, None] + new

    def embed_tokens_and_positions(self, ids, positions):
        return self.embed(ids) + self.embed_positions(positions)

    def attention_mask_for(self, positions, key_positions):
        at = positions[:, None, :, None]
        to = key_positions[:, None, None, :]
        return (to <= at) & (to >= 0)

    def split_qkv(self, qkv):
        b, t, d = qkv.shape
        h = self.config.n_heads
        return [
            x.view(b, t, h, d // 3 // h).transpose(1, 2) for x in qkv.chunk(3, dim=-1)
        ]

    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        least = torch.finfo(scores.dtype).min
        weights = scores.masked_fill(~mask, least).softmax(dim=-1)
        return (weights @ v).transpose(1, 2).flatten(2)

    def feed_forward(self, x, up, down):
        return down(F.gelu(up(x), approximate="tanh"))

    def run_block(self, x, norm_1, attention, norm_2, feed_forward):
        x = x + attention(norm_1(x))
        return x + feed_forward(norm_2(x))

    def compute_logits(self, x):
        return self.norm(x) @ self.embed.weight.T


def failed(gap, filling, base=GPTTemplate):
    "The report of one gap with this filling; it must fail."
    with pytest.raises(check.CheckFailed) as caught:
        check_method(type("Wrong", (base,), {gap: filling}), gap)
    return caught.value.report


def test_the_empty_one_fails_at_each_gap():
    for gap in TODO_METHODS:
        with pytest.raises(check.CheckFailed, match="still empty"):
            check_method(GPTTemplate, gap)
    report = check_class(GPTTemplate)
    assert not report and str(report).count("still empty") == 8
    assert "8 of 8 methods are open" in str(report)


def test_the_filled_one_passes():
    report = check_class(Mine)  # which calls `check_method` for each gap
    assert report and str(report).count("passed") == 9
    assert "check.run_all" in str(report)


def test_there_are_eight_gaps_and_eight_checkers():
    assert len(TODO_METHODS) == 8 == len(set(TODO_METHODS))
    assert set(KNOWN_MISTAKES) == set(TODO_METHODS)
    stubs = [
        n
        for n, f in vars(GPTTemplate).items()
        if inspect.isfunction(f) and "raise NotImplementedError" in inspect.getsource(f)
    ]
    assert stubs == list(TODO_METHODS)


@plain_only
@pytest.mark.parametrize("gap", by_day(TODO_METHODS, "attention_mask_for"))
def test_every_mistake_is_called_by_its_name(gap):
    "By day the ✓ of the capstone asks the same of all eight methods."
    said = set()
    for likely, version in KNOWN_MISTAKES[gap]:
        report = failed(gap, version)
        assert report.likely_cause == likely
        assert any(label == "symptom" for label, _ in report.notes)
        said.add(likely)
    assert len(said) == len(KNOWN_MISTAKES[gap]) >= 3


def test_one_wrong_gap_does_not_hide_the_others():
    class Wrong(Mine):
        def attention_mask_for(self, positions, key_positions):
            return ~Mine.attention_mask_for(self, positions, key_positions)

    report = check_class(Wrong)
    assert "1 of 8" in str(report) and str(report).count("passed") == 7
    assert "inverted" in str(report)


@pytest.mark.parametrize(
    "gap, filling, said",
    [
        ("next_positions", lambda s, cache, t: None, "returns None"),
        ("next_positions", lambda s, cache, t: torch.arange(t), "expected"),
        (
            "next_positions",
            lambda s, cache, t: torch.arange(float(t))[None],
            "torch.float32, expected torch.int64",
        ),
        ("embed_tokens_and_positions", lambda s, ids: 0, "TypeError"),
        (
            "attention_mask_for",
            lambda s, positions, key_positions: torch.ones(5, 5).tril().bool(),
            r"\(5, 5\), expected \(2, 1, 5, 5\)",
        ),
        (
            "attention_mask_for",
            lambda s, positions, key_positions: torch.zeros(
                len(positions), 1, positions.shape[1], key_positions.shape[1]
            ),
            "torch.float32, expected torch.bool",
        ),
        ("split_qkv", lambda s, qkv: qkv.chunk(2, -1), "3 tensors"),
        ("split_qkv", lambda s, qkv: qkv, "3 tensors"),
        (
            "split_qkv",
            lambda s, qkv: [x.view(2, 5, 3, 8) for x in qkv.chunk(3, -1)],
            r"\(2, 5, 3, 8\), expected \(2, 3, 5, 8\)",
        ),
        ("compute_logits", lambda s, x: 7, "must return a tensor, got int"),
        ("compute_logits", lambda s, x: s.lm_head(s.norm(x)).argmax(-1), "int64"),
        ("run_block", lambda s, x, n1, a, n2, f: x @ x, "RuntimeError"),
    ],
)
def test_results_of_another_form_are_described(gap, filling, said):
    report = failed(gap, filling)
    assert said in report.problem or re.search(said, report.problem)


def test_rows_without_keys_are_watched():
    def attend(self, q, k, v, mask):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)

    report = failed("attend", attend)
    assert report.problem == "not all results are numbers"
    assert "padding" in report.likely_cause


def test_an_error_comes_with_its_line_and_what_was_given():
    class Wrong(GPTTemplate):
        def next_positions(self, cache, length):
            at = torch.arange(length)
            return at[:, None] if cache is None else cache.lengths + at

        def attend(self, q, k, v, mask):
            return q @ k @ v

    for gap, line, given in (
        ("attend", "return q @ k @ v", "q of shape (2, 3, 5, 8)"),
        ("next_positions", "", "cache None, length 3"),
    ):
        with pytest.raises(check.CheckFailed) as caught:
            check_method(Wrong, gap)
        report = caught.value.report
        assert line in report.problem and given in dict(report.notes)["given"]
        assert not report.likely_cause and "symptom" not in dict(report.notes)
    said = " ".join(str(check_class(Wrong)).split())
    assert 'raises RuntimeError in "return q @ k @ v": ' in said


def test_what_is_given_must_not_be_changed():
    def block(self, x, norm_1, attention, norm_2, feed_forward):
        x += attention(norm_1(x))
        return x + feed_forward(norm_2(x))

    assert "x = x + …" in failed("run_block", block).problem

    def ffn(self, x, up, down):  # a tensor of its own may change
        hidden = up(x)
        hidden *= 1.0
        return down(F.gelu(hidden, approximate="tanh"))

    assert check_method(
        type("Own", (GPTTemplate,), {"feed_forward": ffn}), "feed_forward"
    )


@plain_only
def test_an_unknown_mistake_is_shown_at_its_place_and_told_where_to_read():
    report = failed("split_qkv", lambda self, qkv: Mine.split_qkv(self, qkv)[::-1])
    lines = dict(report.notes)
    assert TODO_METHODS["split_qkv"] in report.likely_cause
    assert "is right, at [" in lines["returns"]
    assert lines["symptom"].startswith("check.same")
    report = failed(
        "attention_mask_for",
        lambda self, positions, key_positions: torch.ones(
            len(positions), 1, positions.shape[1], key_positions.shape[1]
        ).bool(),
    )
    assert dict(report.notes)["returns"].startswith("True where False is right")
    assert dict(report.notes)["given"].startswith("positions [[-1, -1, 0, 1, 2]")


def test_where_a_gap_is_explained():
    import course  # book/_ext: not there where mutants are tested

    root = Path(__file__).parents[1]
    names = course.document_names(root)
    for place in TODO_METHODS.values():
        where, _, title = place.partition(", ")
        if where.startswith("tformer."):
            name = "package/" + where.removeprefix("tformer.").replace(".", "/")
        else:
            number = where.removeprefix("chapter ")
            (name,) = course.select(names, [number.zfill(2 + number.endswith("b"))])
        text = course.notebook_path(root, name).read_text("utf-8")
        assert f'## {title}\\n"' in text, place


def test_what_only_a_model_shows_is_found():
    "Right alone, wrong in use: the checks of chapter 8 see it."

    def detached(self, x, up, down):
        return down(F.gelu(up(x).detach(), approximate="tanh"))

    report = failed("feed_forward", detached)
    assert "gradient" in report.problem and "detach" in report.likely_cause
    seen = []

    def once(self, ids, positions):
        seen.append(1)
        x = self.embed(ids) + self.embed_positions(positions)
        return x if len(seen) < 2 else 1.5 * x

    assert failed("embed_tokens_and_positions", once).problem


def test_helpers_of_the_class_are_found():
    class Helped(Mine):
        def feed_forward(self, x, up, down):
            return down(self.curve(up(x)))

        def curve(self, x):
            return F.gelu(x, approximate="tanh")

    assert check_method(Helped, "feed_forward")


def test_an_unknown_gap_is_refused():
    with pytest.raises(ValueError, match=r"one of 'next_positions', .*'mask'"):
        check_method(Mine, "mask")
    for other, name in ((GPT, "GPT"), (Mine(CONFIG), "Mine"), (7, "7")):
        for ask in (check_class, lambda cls: check_method(cls, "next_positions")):
            with pytest.raises(
                ValueError, match=(f"(?s)a subclass of GPTTemplate, got .*{name}")
            ):
                ask(other)


def test_the_filled_one_is_gpt2(tmp_path):
    theirs = spread(
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=61,
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_positions=40,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    )
    theirs.save_pretrained(tmp_path)
    mine = Mine.from_gpt2(tmp_path)
    assert type(mine) is Mine
    close(mine(some_ids()), theirs(some_ids()).logits)
    ours = GPT.from_gpt2(tmp_path)
    positions = padded()
    got = mine(some_ids(), positions=positions)
    close(got[positions >= 0], ours(some_ids(), positions=positions)[positions >= 0])
    mine.save(tmp_path / "mine")
    close(Mine.load(tmp_path / "mine")(some_ids()), ours(some_ids()))
    mask = torch.rand(3, 1, 12, 12) > 0.3
    mask |= torch.eye(12).bool()
    close(mine(some_ids(), mask=mask), ours(some_ids(), mask=mask))


def test_dropout_acts_in_the_frame():
    mine = Mine(dataclasses.replace(CONFIG, dropout=0.5)).train()
    calls = []
    mine.dropout.register_forward_hook(lambda *_: calls.append(1))
    mine(some_ids())
    assert len(calls) == 1 + 2 * 2  # the vectors, two sublayers a block
    assert not torch.equal(mine(some_ids()), mine(some_ids()))


def test_places_of_an_empty_cache_are_asked_without_one():
    caches = []

    class Nosy(Mine):
        def next_positions(self, cache, length):
            caches.append(cache)
            return Mine.next_positions(self, cache, length)

    nosy = spread(Nosy(CONFIG))
    cache = nosy.new_cache(1)
    for part in some_ids(1).split(6, 1):
        nosy(part, cache=cache)
    assert caches == [None, cache]


def test_the_skeleton_runs_as_a_file(tmp_path, capsys):
    path = tmp_path / "my_gpt.py"
    path.write_text(template_source(), encoding="utf-8")
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert "check_class FAILED: MyGPT" in printed
    assert printed.count("still empty") == 8
    space = {"__name__": "my_gpt"}
    exec(template_source(), space)
    assert space["MyGPT"].__mro__[1] is GPTTemplate
    assert all(gap in vars(space["MyGPT"]) for gap in TODO_METHODS)


@pytest.mark.gpu
def test_a_rebuilt_model_runs_on_cuda():
    assert check.run_all(Mine(CONFIG).eval().cuda(), 61)


def test_there_are_sixty_mistakes_and_each_has_a_name():
    names = [likely for known in KNOWN_MISTAKES.values() for likely, _ in known]
    assert len(names) == len(set(names)) == 60


def test_hidden_and_refusals_are_those_of_every_model():
    "What is given goes through the reader's own pieces, too."
    mine = spread(Mine(CONFIG))
    ours = spread(GPT(CONFIG))
    positions = padded()
    ids = some_ids()
    close(
        mine.lm_head(mine.hidden_states(ids, positions=positions)),
        mine(ids, positions=positions),
    )
    close(
        mine.hidden_states(ids, positions=positions)[positions >= 0],
        ours.hidden_states(ids, positions=positions)[positions >= 0],
    )

    class Twice(Mine):
        def run_block(self, x, *parts):
            return 2 * Mine.run_block(self, x, *parts)

    assert not torch.allclose(
        spread(Twice(CONFIG)).hidden_states(ids), ours.hidden_states(ids)
    )
    for call, said in (
        (lambda: mine(torch.arange(5)), r"\(b, t\), got \(5,\)"),
        (lambda: mine(some_ids(1, 41)), "41 tokens.*max_len.* 40"),
        (lambda: mine(ids, positions=torch.ones(3, 12).long()), "0/1 mask"),
        (
            lambda: mine(ids, cache=KVCache([DynamicLayerCache()])),
            "of 1 layers .* model of 2",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def test_a_reader_is_handed_plain_tensors():
    seen = []

    class Nosy(Mine):
        def embed_tokens_and_positions(self, ids, positions):
            seen.append(positions)
            return Mine.embed_tokens_and_positions(self, ids, positions)

        def attention_mask_for(self, positions, key_positions):
            seen.extend([positions, key_positions])
            return Mine.attention_mask_for(self, positions, key_positions)

    nosy = spread(Nosy(CONFIG))
    ids = some_ids()
    cache = nosy.new_cache(3)
    for part in ids.split(6, 1):
        nosy(part, cache=cache)
    nosy(ids, positions=Positions(start=0, length=12))
    assert len(seen) == 3 * (1 + 2 * 2)
    assert all(type(x) is torch.Tensor and x.dtype == torch.int64 for x in seen)
