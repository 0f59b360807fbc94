"""The capstone: an empty GPT, its eight gaps, checkers that name a mistake."""
import dataclasses
import inspect
import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from helpers import close, draw_ids, needs_cuda, padded, plain_only, spread
from tformer import check
from tformer.attention import Cache, LayerCache
from tformer.gpt import GPT, GPTConfig
from tformer.rebuild import GAPS, MISTAKES, EmptyGPT, check_gap, rebuild, skeleton
from tformer.rows import Positions

warnings.filterwarnings("ignore", message="IProgress not found")
import transformers  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

CONFIG = GPTConfig(vocab_size=61, d_model=32, n_layers=2, n_heads=4,
                   max_len=40, dropout=0.0)


def some_ids(b=3, t=12):
    return draw_ids(b, t, high=61)


class Mine(EmptyGPT):
    "The eight gaps, filled by hand."

    def places(self, cache, t):
        at = torch.arange(t)[None]
        return at if cache is None else cache.n_seen[:, None] + at

    def vectors(self, ids, pos):
        return self.embed(ids) + self.embed_pos(pos)

    def allowed(self, pos, k_pos):
        at = pos[:, None, :, None]
        to = k_pos[:, None, None, :]
        return (to <= at) & (to >= 0)

    def split(self, qkv):
        b, t, d = qkv.shape
        h = self.config.n_heads
        return [x.view(b, t, h, d // 3 // h).transpose(1, 2)
                for x in qkv.chunk(3, dim=-1)]

    def attend(self, q, k, v, allowed):
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        least = torch.finfo(scores.dtype).min
        weights = scores.masked_fill(~allowed, least).softmax(dim=-1)
        return (weights @ v).transpose(1, 2).flatten(2)

    def ffn(self, x, up, down):
        return down(F.gelu(up(x), approximate="tanh"))

    def block(self, x, norm_1, attention, norm_2, feed_forward):
        x = x + attention(norm_1(x))
        return x + feed_forward(norm_2(x))

    def head(self, x):
        return self.norm(x) @ self.embed.weight.T


def failed(gap, filling, base=EmptyGPT):
    "The report of one gap with this filling; it must fail."
    with pytest.raises(check.CheckFailed) as caught:
        check_gap(type("Wrong", (base,), {gap: filling}), gap)
    return caught.value.report


def test_the_empty_one_fails_at_each_gap():
    for gap in GAPS:
        with pytest.raises(check.CheckFailed, match="still empty"):
            check_gap(EmptyGPT, gap)
    report = rebuild(EmptyGPT)
    assert not report and str(report).count("still empty") == 8
    assert "8 of 8 gaps are open" in str(report)


def test_the_filled_one_passes():
    for gap in GAPS:
        assert check_gap(Mine, gap)
    report = rebuild(Mine)
    assert report and str(report).count("passed") == 9
    assert "check.every" in str(report)


def test_there_are_eight_gaps_and_eight_checkers():
    assert len(GAPS) == 8 == len(set(GAPS))
    assert set(MISTAKES) == set(GAPS)
    stubs = [n for n, f in vars(EmptyGPT).items() if inspect.isfunction(f)
             and "raise NotImplementedError" in inspect.getsource(f)]
    assert stubs == list(GAPS)


@plain_only
@pytest.mark.parametrize("gap", GAPS)
def test_every_mistake_is_called_by_its_name(gap):
    said = set()
    for likely, version in MISTAKES[gap]:
        report = failed(gap, version)
        assert report.likely == likely
        assert any(label == "symptom" for label, _ in report.lines)
        said.add(likely)
    assert len(said) == len(MISTAKES[gap]) >= 3


def test_one_wrong_gap_does_not_hide_the_others():
    class Wrong(Mine):
        def allowed(self, pos, k_pos):
            return ~Mine.allowed(self, pos, k_pos)

    report = rebuild(Wrong)
    assert "1 of 8" in str(report) and str(report).count("passed") == 7
    assert "inverted" in str(report)


@pytest.mark.parametrize("gap, filling, said", [
    ("places", lambda s, cache, t: None, "returns None"),
    ("places", lambda s, cache, t: torch.arange(t), "expected"),
    ("places", lambda s, cache, t: torch.arange(float(t))[None],
     "torch.float32, expected torch.int64"),
    ("vectors", lambda s, ids: 0, "TypeError"),
    ("allowed", lambda s, pos, k_pos: torch.ones(5, 5).tril().bool(),
     r"\(5, 5\), expected \(2, 1, 5, 5\)"),
    ("allowed", lambda s, pos, k_pos: torch.zeros(
        len(pos), 1, pos.shape[1], k_pos.shape[1]),
     "torch.float32, expected torch.bool"),
    ("split", lambda s, qkv: qkv.chunk(2, -1), "3 tensors"),
    ("split", lambda s, qkv: qkv, "3 tensors"),
    ("split", lambda s, qkv: [x.view(2, 5, 3, 8) for x in
                              qkv.chunk(3, -1)],
     r"\(2, 5, 3, 8\), expected \(2, 3, 5, 8\)"),
    ("head", lambda s, x: 7, "must return a tensor, got int"),
    ("head", lambda s, x: s.lm_head(s.norm(x)).argmax(-1), "int64"),
    ("block", lambda s, x, n1, a, n2, f: x @ x, "RuntimeError")])
def test_results_of_another_form_are_described(gap, filling, said):
    report = failed(gap, filling)
    assert said in report.problem or re.search(
        said, report.problem)


def test_rows_without_keys_are_watched():
    def attend(self, q, k, v, allowed):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)

    report = failed("attend", attend)
    assert report.problem == "not all results are numbers"
    assert "padding" in report.likely


def test_an_error_comes_with_its_line_and_what_was_given():
    class Wrong(EmptyGPT):
        def places(self, cache, t):
            at = torch.arange(t)
            return at[:, None] if cache is None else cache.n_seen + at

        def attend(self, q, k, v, allowed):
            return q @ k @ v

    for gap, line, given in (
            ("attend", "return q @ k @ v", "q of shape (2, 3, 5, 8)"),
            ("places", "", "cache None, t 3")):
        with pytest.raises(check.CheckFailed) as caught:
            check_gap(Wrong, gap)
        report = caught.value.report
        assert line in report.problem and given in dict(
            report.lines)["given"]
        assert not report.likely and "symptom" not in dict(report.lines)
    said = " ".join(str(rebuild(Wrong)).split())
    assert 'raises RuntimeError in "return q @ k @ v": ' in said


def test_what_is_given_must_not_be_changed():
    def block(self, x, norm_1, attention, norm_2, feed_forward):
        x += attention(norm_1(x))
        return x + feed_forward(norm_2(x))

    assert "x = x + …" in failed("block", block).problem

    def ffn(self, x, up, down):  # a tensor of its own may change
        hidden = up(x)
        hidden *= 1.0
        return down(F.gelu(hidden, approximate="tanh"))

    assert check_gap(type("Own", (EmptyGPT,), {"ffn": ffn}), "ffn")


@plain_only
def test_an_unknown_mistake_is_shown_at_its_place_and_told_where_to_read():
    report = failed("split", lambda self, qkv: Mine.split(
        self, qkv)[::-1])
    lines = dict(report.lines)
    assert GAPS["split"] in report.likely
    assert "is right, at [" in lines["returns"]
    assert lines["symptom"].startswith("check.same")
    report = failed("allowed", lambda self, pos, k_pos: torch.ones(
        len(pos), 1, pos.shape[1], k_pos.shape[1]).bool())
    assert dict(report.lines)["returns"].startswith(
        "True where False is right")
    assert dict(report.lines)["given"].startswith("pos [[-1, -1, 0, 1, 2]")


def test_where_a_gap_is_explained():
    import course  # book/_ext: not there where mutants are tested
    root = Path(__file__).parents[1]
    names = course.document_names(root)
    for place in GAPS.values():
        number, _, title = place.removeprefix("chapter ").partition(", ")
        name, = course.select(names, [f"{int(number):02}"])
        text = course.notebook_path(root, name).read_text("utf-8")
        assert f'## {title}\\n"' in text, place


def test_what_only_a_model_shows_is_found():
    "Right alone, wrong in use: the checks of chapter 8 see it."
    def detached(self, x, up, down):
        return down(F.gelu(up(x).detach(), approximate="tanh"))

    report = failed("ffn", detached)
    assert "gradient" in report.problem and "detach" in report.likely
    seen = []

    def once(self, ids, pos):
        seen.append(1)
        x = self.embed(ids) + self.embed_pos(pos)
        return x if len(seen) < 2 else 1.5 * x

    assert failed("vectors", once).problem


def test_helpers_of_the_class_are_found():
    class Helped(Mine):
        def ffn(self, x, up, down):
            return down(self.curve(up(x)))

        def curve(self, x):
            return F.gelu(x, approximate="tanh")

    assert check_gap(Helped, "ffn")


def test_an_unknown_gap_is_refused():
    with pytest.raises(ValueError, match=r"one of 'places', .*'mask'"):
        check_gap(Mine, "mask")
    for other, name in ((GPT, "GPT"), (Mine(CONFIG), "Mine"), (7, "7")):
        for ask in (rebuild, lambda cls: check_gap(cls, "places")):
            with pytest.raises(ValueError, match=(
                    f"(?s)a subclass of EmptyGPT, got .*{name}")):
                ask(other)


def test_the_filled_one_is_gpt2(tmp_path):
    theirs = spread(transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=40,
        bos_token_id=None, eos_token_id=None)))
    theirs.save_pretrained(tmp_path)
    mine = Mine.from_gpt2(tmp_path)
    assert type(mine) is Mine
    close(mine(some_ids()), theirs(some_ids()).logits)
    ours = GPT.from_gpt2(tmp_path)
    pos = padded()
    got = mine(some_ids(), pos=pos)
    close(got[pos >= 0], ours(some_ids(), pos=pos)[pos >= 0])
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
        def places(self, cache, t):
            caches.append(cache)
            return Mine.places(self, cache, t)

    nosy = spread(Nosy(CONFIG))
    cache = nosy.new_cache(1)
    for part in some_ids(1).split(6, 1):
        nosy(part, cache=cache)
    assert caches == [None, cache]


def test_the_skeleton_runs_as_a_file(tmp_path):
    path = tmp_path / "my_gpt.py"
    path.write_text(skeleton(), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, path], text=True, capture_output=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1",
                          "PYTHONIOENCODING": "utf-8"})
    assert done.returncode == 0, done.stderr
    assert "rebuild FAILED: MyGPT" in done.stdout
    assert done.stdout.count("still empty") == 8
    space = {"__name__": "my_gpt"}
    exec(skeleton(), space)
    assert space["MyGPT"].__mro__[1] is EmptyGPT
    assert all(gap in vars(space["MyGPT"]) for gap in GAPS)


@needs_cuda
def test_a_rebuilt_model_runs_on_cuda():
    assert check.every(Mine(CONFIG).eval().cuda(), 61)


def test_there_are_sixty_mistakes_and_each_has_a_name():
    names = [likely for known in MISTAKES.values() for likely, _ in known]
    assert len(names) == len(set(names)) == 60


def test_hidden_and_refusals_are_those_of_every_model():
    "What is given goes through the reader's own pieces, too."
    mine = spread(Mine(CONFIG))
    ours = spread(GPT(CONFIG))
    pos = padded()
    ids = some_ids()
    close(mine.lm_head(mine.hidden(ids, pos=pos)), mine(ids, pos=pos))
    close(mine.hidden(ids, pos=pos)[pos >= 0],
          ours.hidden(ids, pos=pos)[pos >= 0])

    class Twice(Mine):
        def block(self, x, *parts):
            return 2 * Mine.block(self, x, *parts)

    assert not torch.allclose(spread(Twice(CONFIG)).hidden(ids),
                              ours.hidden(ids))
    for call, said in (
            (lambda: mine(torch.arange(5)), r"\(b, t\), got \(5,\)"),
            (lambda: mine(some_ids(1, 41)),
             "41 tokens.*max_len.* 40"),
            (lambda: mine(ids, pos=torch.ones(3, 12).long()), "0/1 mask"),
            (lambda: mine(ids, cache=Cache([LayerCache()])),
             "of 1 layers .* model of 2")):
        with pytest.raises(ValueError, match=said):
            call()


def test_a_reader_is_handed_plain_tensors():
    seen = []

    class Nosy(Mine):
        def vectors(self, ids, pos):
            seen.append(pos)
            return Mine.vectors(self, ids, pos)

        def allowed(self, pos, k_pos):
            seen.extend([pos, k_pos])
            return Mine.allowed(self, pos, k_pos)

    nosy = spread(Nosy(CONFIG))
    ids = some_ids()
    cache = nosy.new_cache(3)
    for part in ids.split(6, 1):
        nosy(part, cache=cache)
    nosy(ids, pos=Positions(start=0, n=12))
    assert len(seen) == 3 * (1 + 2 * 2)
    assert all(type(x) is torch.Tensor and x.dtype == torch.int64
               for x in seen)
