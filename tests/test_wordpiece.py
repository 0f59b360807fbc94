"""Word pieces, labels laid over them, spans and their scores."""
import random
import re

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models

from helpers import plain_only
from tformer import stories
from tformer.bpe import GPT2_PATTERN
from tformer.wordpiece import (
    Span, WordPiece, align_labels, bio, span_scores, spans_of, tag_story,
    train_pieces)

vocabularies = st.sets(st.text("ab", min_size=1, max_size=3).flatmap(
    lambda s: st.sampled_from([s, f"##{s}"])), min_size=1, max_size=12)
tags = st.lists(st.sampled_from(["O", "B-X", "I-X", "B-Y", "I-Y"]),
                max_size=9)


@given(vocabularies, st.text("ab", min_size=1, max_size=8))
def test_words_are_cut_as_by_the_library(vocab, word):
    theirs = models.WordPiece({v: i for i, v in enumerate(
        [*sorted(vocab), "[UNK]"])}, unk_token="[UNK]")
    assert WordPiece(vocab).cut(word) == [
        t.value for t in theirs.tokenize(word)]


def test_a_word_that_is_too_long_is_unknown():
    cutter = WordPiece(["a", "##a"], max_chars=5)
    assert cutter.cut("aaaaa") == ["a", *["##a"] * 4]
    assert cutter.cut("aaaaaa") == ["[UNK]"]


def test_each_piece_has_the_number_of_its_word():
    pieces, words = WordPiece(["sun", "##ny", "day", "."]).encode(
        "sunny day.")
    assert pieces == ["sun", "##ny", "day", "."]
    assert words == [0, 0, 1, 2]


def test_what_is_learned_can_be_read_again():
    texts = list(stories.generate(40, 0))
    vocab = train_pieces(texts, 90)
    assert len(vocab) == len(set(vocab)) == 90
    cutter = WordPiece(vocab)
    for text in texts:
        pieces, words = cutter.encode(text)
        joined = {}
        for piece, n in zip(pieces, words):
            joined[n] = joined.get(n, "") + piece.removeprefix("##")
        assert [*joined.values()] == re.findall(r"\w+|[^\w\s]", text)
    assert train_pieces(["ab ab"], 50) == ["##b", "a", "ab"]


def test_the_worth_is_not_the_count():
    text = "xy xy " + "ab ac ad eb ec ed " * 3 + "ab"
    vocab = train_pieces([text], 9)
    assert vocab[7] == "xy" and len(vocab[6]) < 4


def test_labels_stand_on_first_pieces():
    assert align_labels([3, 5], [-1, 0, 0, 1, None]) == [
        -100, 3, -100, 5, -100]
    for labels in ([3], [3, 5, 7]):
        with pytest.raises(ValueError, match=f"{len(labels)} labels for 2"):
            align_labels(labels, [-1, 0, 0, 1, -1])


@given(tags)
def test_spans_and_tags_go_both_ways(row):
    spans = spans_of(row)
    assert spans_of(bio(len(row), spans)) == spans
    assert sum(end - start for start, end, _ in spans) == sum(
        tag != "O" for tag in row)


@given(st.lists(st.tuples(tags, tags)))
def test_scores_are_those_of_counting_pairs(pairs):
    pairs = [(a[:min(len(a), len(b))], b[:min(len(a), len(b))])
             for a, b in pairs]
    gold, guess = [a for a, _ in pairs], [b for _, b in pairs]
    right = sum(len({*spans_of(a)} & {*spans_of(b)}) for a, b in pairs)
    said = sum(len(spans_of(b)) for b in guess)
    there = sum(len(spans_of(a)) for a in gold)
    p, r, f1 = span_scores(gold, guess)
    assert p == right / max(1, said) and r == right / max(1, there)
    assert f1 == (2 * p * r / (p + r) if right else 0) or abs(
        f1 - 2 * p * r / (p + r)) < 1e-12


def test_half_a_span_is_wrong():
    gold = bio(5, [Span(1, 4, "PLACE")])
    for guess in (Span(2, 4, "PLACE"), Span(1, 4, "THING")):
        assert span_scores([gold], [bio(5, [guess])]).f1 == 0


def test_stories_are_tagged_by_their_grammar():
    for text in stories.generate(200, 7):
        words, spans = tag_story(text.strip(), GPT2_PATTERN)
        assert "".join(words) == text.strip()
        assert words == regex.findall(GPT2_PATTERN, text.strip())
        bio(len(words), spans)
        said = [("".join(words[s.start:s.end]).strip(), s.kind)
                for s in spans]
        heroes = {w for w, kind in said if kind == "HERO"}
        assert len(heroes) == 1
        assert not heroes & {w for w, kind in said if kind == "FRIEND"}
        for name in stories.SEX:
            told = sum(w.strip() == name for w in words)
            if name[0].isupper():
                assert told == sum(w == name for w, _ in said)


@plain_only
@pytest.mark.parametrize("call, message", [
    (lambda: WordPiece([]).encode("  "), "the text is empty"),
    (lambda: bio(3, [Span(0, 2, "X"), Span(1, 3, "Y")]), "lies on another"),
    (lambda: bio(3, [Span(2, 4, "X")]), "does not fit 3 words"),
    (lambda: spans_of(["O", "X"]), "tag 1 is 'X'"),
    (lambda: span_scores([["O"]], [["O", "O"]]), "do not fit"),
    (lambda: WordPiece([], max_chars=0), "max_chars"),
    (lambda: train_pieces([], 0), "size"),
])
def test_bad_input_is_refused_in_one_sentence(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_random_spans_survive():
    dice = random.Random(0)
    for _ in range(100):
        n, spans, at = dice.randint(1, 20), [], 0
        while at < n:
            start = at + dice.randint(0, 3)
            end = start + dice.randint(1, 3)
            if end <= n:
                spans.append(Span(start, end, dice.choice("XY")))
            at = end
        assert spans_of(bio(n, spans)) == spans
