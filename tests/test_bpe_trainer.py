"""Merges are those of the readable trainer and of Hugging Face."""

import csv
import json
import random
import sys
import tracemalloc
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import plain_only
from test_tokenizer import SCRIPTS, hf_trained, quiet_train
from tformer.corpora import stories
from tformer.text import bpe
from tformer.text.bpe_trainer import count_source_pretokens, learn_merges
from tformer.text.tokenizer import Tokenizer
from tformer.text.tokenizer_files import printable_to_bytes

ROOT = Path(__file__).resolve().parents[1]


def hf_merges(hf):
    return [
        tuple(map(printable_to_bytes, pair))
        for pair in json.loads(hf.to_str())["model"]["merges"]
    ]


@pytest.fixture(scope="module")
def text():
    return SCRIPTS * 3 + stories.story_corpus(60_000, seed=1, level=3)


@pytest.mark.parametrize("corpus", ["scripts", "stories", "runs", "crlf"])
def test_merges_equal_both_references(corpus):
    rng = random.Random(corpus)
    texts = {
        "scripts": [SCRIPTS],
        "crlf": ["a\r\nb\r\n\r\n c\n" * 30],
        "stories": [stories.story_corpus(8_000, seed=3, level=2)],
        "runs": ["".join(rng.choices("aab ", k=400))],
    }[corpus]
    hf = hf_merges(hf_trained(texts, 256 + 400))
    words = Counter(bpe.pretokenize_text(texts[0]))
    assert learn_merges(words, 400, "ids") == hf
    for ties in ("bytes", "ids"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            slow = bpe.train_bpe(texts, 656, tie_break=ties)
        assert learn_merges(words, 400, ties) == slow
        assert quiet_train(texts, 656, tie_break=ties).vocab.merges == slow
    assert len(hf) > 2


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.dictionaries(
        st.text("abc", min_size=1, max_size=9),
        st.integers(1, 4),
        min_size=1,
        max_size=8,
    )
)
def test_merges_of_random_words(words):
    text = " ".join(" ".join([w] * n) for w, n in words.items())
    counts = Counter(bpe.pretokenize_text(text))
    for ties in ("bytes", "ids"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            slow = bpe.train_bpe([text], 256 + 30, tie_break=ties)
        assert learn_merges(counts, 30, ties) == slow
    assert slow == hf_merges(hf_trained([text], 256 + 30))


def test_merges_of_a_real_vocabulary(text):
    "Thousands of merges, where most heap entries are out of date."
    words = Counter(bpe.pretokenize_text(text))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hf = hf_merges(hf_trained([text], 5000))
    assert len(hf) > 2000
    assert learn_merges(words, len(hf), "ids") == hf


def test_special_tokens_are_left_out_of_training():
    text = "ab<|x|>ab<|x|><|y|>ab<|x|>" * 20
    special = ["<|x|>", "<|x|><|y|>"]
    tok = quiet_train([text], 300, special_tokens=special)
    plain = quiet_train(["ab"] * 60, 300)
    assert tok.vocab.merges == plain.vocab.merges == [(b"a", b"b")]
    assert tok.vocab.special_tokens == {"<|x|>": 257, "<|x|><|y|>": 258}


def test_sources(tmp_path, text):
    text = text.replace("\n", "\r\n")
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    ways = [path, str(path), [path], [text], iter([text])]
    toks = [quiet_train(way, 400) for way in ways]
    assert all(t == toks[0] for t in toks)
    assert quiet_train(path, 400, num_workers=2) == toks[0]
    halves = quiet_train((t for t in (text, text)), 400)
    assert halves == quiet_train([path, text], 400)


def test_each_text_stands_alone():
    assert quiet_train(["a", "b"] * 9, 300).vocab.merges == []


def test_stops_early_and_says_so():
    with pytest.warns(UserWarning, match="after 1 merges.*257.*not 300"):
        tok = Tokenizer.train(["ab ab"[:2]], 300, progress=False)
    assert len(tok) == 257


@pytest.mark.nightly
def test_training_in_constant_memory(text):
    def peak(n):
        tracemalloc.start()
        words = count_source_pretokens(text for _ in range(n))
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return sum(words.values()), top

    few = peak(40)
    many = peak(120)
    assert many[0] == 3 * few[0]
    assert many[1] < 1.2 * few[1]


# ---- the recorded experiment

FORMS = [("1", "again"), ("2", "again"), ("1", "kept"), ("2", "kept")]


def speed_script(monkeypatch):
    from test_project import load

    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    return load(ROOT / "experiments" / "bpe_speed.py")


@plain_only
def test_the_experiment_on_speed_runs_small(tmp_path, monkeypatch, capsys):
    from tformer.models.mini_gpt import load_record

    script = speed_script(monkeypatch)
    sample = tmp_path / "sample.txt"
    sample.write_text("\n<|endoftext|>\n".join(stories.generate_stories(30)), "utf-8")
    out = tmp_path / "some.csv"
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "x",
            str(sample),
            "--megabytes",
            "0.02",
            "--vocab",
            "320",
            "--rounds",
            "2",
            "--out",
            str(out),
        ],
    )
    script.main()
    rows = list(csv.DictReader(out.open(encoding="utf-8")))
    assert rows[0].keys() == load_record("bpe_speed")[0].keys()
    assert [(r["corpus"], r["processes"], r["counting"]) for r in rows] == [
        (name, *form) for name in ("stories", "tinystories") for form in FORMS
    ]
    assert {r["vocabulary"] for r in rows} == {"320"}
    assert rows[4]["bytes"] == str(sample.stat().st_size)
    for row in rows:
        low, middle, high = (
            float(row[f"total_{name}"]) for name in ("lowest", "seconds", "highest")
        )
        assert low <= middle <= high
        parts = (float(row["pretokenize_lowest"]), float(row["merge_lowest"]))
        assert sum(parts) <= high + 0.002


@pytest.mark.parametrize(
    "words",
    [
        Counter(["low", "lower", "lowest", "new"] * 3 + ["aaaa", "abab"]),
        Counter(["a"]),
        Counter(["ab", "ab"]),
    ],
)
def test_both_ways_of_counting_find_the_merges(words, monkeypatch):
    script = speed_script(monkeypatch)
    for n in (0, 1, 5, 40):
        right = learn_merges(words, n)
        assert script.merge_and_count_again(words, n) == right
        assert script.merge_with_kept_counts(words, n) == right


def test_merges_that_differ_are_refused(tmp_path, monkeypatch):
    script = speed_script(monkeypatch)
    monkeypatch.setitem(script.MERGING, "kept", lambda words, n: [])
    path = tmp_path / "a.txt"
    path.write_text("low lower lowest", "utf-8")
    args = SimpleNamespace(rounds=1, vocab=260)
    with pytest.raises(SystemExit, match="the merges of the four forms differ"):
        list(script.measure("some", path, args))


def test_the_record_of_speed_is_whole():
    from tformer.models.mini_gpt import load_record

    rows = load_record("bpe_speed")
    assert [(r["corpus"], r["processes"], r["counting"]) for r in rows] == [
        (name, *form) for name in ("stories", "tinystories") for form in FORMS
    ]
    for name in ("stories", "tinystories"):
        of = [r for r in rows if r["corpus"] == name]
        assert (
            len(
                {
                    (
                        r["bytes"],
                        r["words"],
                        r["distinct"],
                        r["vocabulary"],
                        r["rounds"],
                    )
                    for r in of
                }
            )
            == 1
        )
    # of the sample, which has many distinct words
    again, kept = (
        min(float(r["merge_seconds"]) for r in of if r["counting"] == how)
        for how in ("again", "kept")
    )
    assert kept < again
