"""Word pieces, labels laid over them, spans and their scores."""

import itertools
import random
import re
import warnings
from collections import Counter
from math import log

import numpy as np
import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from helpers import plain_only
from tformer.corpora import stories
from tformer.corpora.stories import tag_story
from tformer.text.bpe import GPT2_PATTERN
from tformer.text.wordpiece import (
    Span,
    WordPiece,
    align_labels,
    bio_to_spans,
    likelihood_gain,
    span_scores,
    spans_to_bio,
    train_wordpiece,
)

vocabularies = st.sets(
    st.text("ab", min_size=1, max_size=3).flatmap(
        lambda s: st.sampled_from([s, f"##{s}"])
    ),
    min_size=1,
    max_size=12,
)
tags = st.lists(st.sampled_from(["O", "B-X", "I-X", "B-Y", "I-Y"]), max_size=9)
RULES = ("likelihood", "count", "ratio")


@given(vocabularies, st.text("ab", min_size=1, max_size=8))
def test_words_are_cut_as_by_the_library(vocab, word):
    theirs = models.WordPiece(
        {v: i for i, v in enumerate([*sorted(vocab), "[UNK]"])}, unk_token="[UNK]"
    )
    assert WordPiece(vocab).tokenize_word(word) == [
        t.value for t in theirs.tokenize(word)
    ]


def test_a_word_that_is_too_long_is_unknown():
    cutter = WordPiece(["a", "##a"], max_input_chars_per_word=5)
    assert cutter.tokenize_word("aaaaa") == ["a", *["##a"] * 4]
    assert cutter.tokenize_word("aaaaaa") == ["[UNK]"]


def test_each_piece_has_the_number_of_its_word():
    pieces, words = WordPiece(["sun", "##ny", "day", "."]).tokenize("sunny day.")
    assert pieces == ["sun", "##ny", "day", "."]
    assert words == [0, 0, 1, 2]


@given(
    st.text(
        "ab9 .,-_'[]\n\u00e9\u0308\u0939\u093f\u0928\u094d\u6f22\u5b57\uac00\u3042",
        min_size=1,
        max_size=12,
    )
)
def test_a_text_is_cut_into_the_words_of_bert(text):
    theirs = [
        word for word, _ in pre_tokenizers.BertPreTokenizer().pre_tokenize_str(text)
    ]
    # the pre-tokenizer leaves Chinese characters to the normalizer
    theirs = [
        part for word in theirs for part in regex.findall(r"\p{Han}|\P{Han}+", word)
    ]
    if theirs:
        letters = {m + c for c in text for m in ("", "##")}
        pieces, words = WordPiece(letters).tokenize(text)
        joined = [""] * (words[-1] + 1)
        for piece, n in zip(pieces, words, strict=True):
            joined[n] += re.sub("^##", "", piece)
        assert joined == theirs


def test_words_of_other_scripts_stay_whole():
    for text, words in (
        ("nai\u0308ve", 1),
        ("\u6f22\u5b57", 2),
        ("a_b", 3),
        ("[MASK]", 3),
        ("\u0939\u093f\u0928\u094d\u0926\u0940", 1),
    ):
        assert WordPiece([]).tokenize(text) == (["[UNK]"] * words, [*range(words)])


def test_the_sign_for_the_unknown_is_the_callers():
    assert WordPiece(["a"], unk_token="<unk>").tokenize_word("b") == ["<unk>"]
    assert WordPiece(["a"], unk_token="<unk>").tokenize_word("") == ["<unk>"]


def shares(row):
    "The log-likelihood of pieces, each drawn by its share."
    return sum(n * log(n / len(row)) for n in Counter(row).values())


def joined(row, a, b):
    out = []
    for piece in row:
        if out and (out[-1], piece) == (a, b):
            out[-1] = a + b
        else:
            out.append(piece)
    return out


@given(
    st.lists(st.sampled_from("abc"), min_size=2, max_size=30),
    st.sampled_from("abc"),
    st.sampled_from("abc"),
)
def test_the_gain_is_that_of_the_likelihood(row, a, b):
    after = joined(row, a, b)
    n = len(row) - len(after)
    ones = Counter(row)
    if n:
        gain = likelihood_gain(
            *(np.array([x], float) for x in (n, ones[a], ones[b])),
            np.array([a == b]),
            len(row),
        )
        assert abs(gain[0] - (shares(after) - shares(row))) < 1e-9


def slow_training(words, size, min_count, rule):
    "Everything counted anew for each piece."
    cut = {w: [w[0], *(f"##{c}" for c in w[1:])] for w in words}
    vocab = sorted({p for row in cut.values() for p in row})
    while len(vocab) < size:
        ones = Counter()
        best = []
        for w, row in cut.items():
            ones.update({p: row.count(p) * words[w] for p in {*row}})
        total = sum(ones.values())
        for a, b in {p for row in cut.values() for p in itertools.pairwise(row)}:
            trial = {w: joined(row, a, b) for w, row in cut.items()}
            n = sum((len(cut[w]) - len(trial[w])) * words[w] for w in cut)
            then = Counter()
            for w, row in trial.items():
                then.update({p: row.count(p) * words[w] for p in {*row}})
            gain = sum(k * log(k / (total - n)) for k in then.values()) - (
                sum(k * log(k / total) for k in ones.values())
            )
            worth = {
                "count": n,
                "ratio": n / (ones[a] * ones[b]),
                "likelihood": round(gain, 7),
            }[rule]
            if n >= min_count:
                best.append((-worth, -n, (a, b)))
        if not best:
            break
        a, b = min(best)[2]
        new = a + b[2:]
        cut = {
            w: [new if p == a + b else p for p in joined(row, a, b)]
            for w, row in cut.items()
        }
        vocab += [new] * (new not in vocab)
    return vocab


@plain_only
@pytest.mark.parametrize("rule", RULES)
def test_training_is_that_which_counts_everything_anew(rule):
    rng = random.Random(1)
    for _trial in range(25):
        words = Counter(
            "".join(rng.choices("abc", k=rng.randint(1, 7)))
            for _ in range(rng.randint(1, 25))
        )
        text = " ".join(words.elements())
        size = rng.randint(4, 40)
        least = rng.randint(1, 3)
        assert train_wordpiece([text], size, least, rule) == slow_training(
            words, size, least, rule
        )


@pytest.mark.parametrize("rule", RULES)
def test_what_is_learned_can_be_read_again(rule):
    texts = list(stories.generate_stories(40, 0))
    vocab = train_wordpiece(texts, 90, criterion=rule)
    assert len(vocab) == len(set(vocab)) == 90
    cutter = WordPiece(vocab)
    for text in texts:
        pieces, words = cutter.tokenize(text)
        joined = {}
        for piece, n in zip(pieces, words, strict=True):
            joined[n] = joined.get(n, "") + piece.removeprefix("##")
        assert [*joined.values()] == re.findall(r"\w+|[^\w\s]", text)
    assert train_wordpiece(["ab ab"], 50, criterion=rule) == ["##b", "a", "ab"]


def test_each_rule_has_its_own_first_piece():
    text = "xy xy " + "zw " * 9 + "ab ac ad eb ec ed " * 9 + "ab " * 3
    found = {rule: train_wordpiece([text], 12, criterion=rule)[9:] for rule in RULES}
    assert found["ratio"][0] == "xy"
    assert found["likelihood"][0] == "zw"
    assert found["count"][0] == "ab"


def test_the_likelihood_finds_english_and_the_ratio_rare_letters():
    texts = list(stories.generate_stories(300, seed=0, level=3))
    by = {
        rule: [
            p
            for p in train_wordpiece(texts, 130, 5, rule)
            if len(p.removeprefix("##")) > 1
        ][:10]
        for rule in RULES
    }
    assert by["likelihood"] == [
        "th",
        "the",
        "##nd",
        "and",
        "to",
        "##ed",
        "Th",
        "wa",
        "was",
        "##ck",
    ]
    assert "##zz" in by["ratio"] and "the" not in by["ratio"]


def test_the_size_and_the_least_count_are_kept():
    assert train_wordpiece(["ab cd"], 9) == ["##b", "##d", "a", "c"]
    assert train_wordpiece(["ab cd"], 9, min_frequency=1)[4:] == ["ab", "cd"]
    assert train_wordpiece(["abcabc"], 1) == ["##a", "##b", "##c", "a"]
    for rule in RULES:
        # of equal pairs the more frequent, then the first by letters
        assert train_wordpiece(["ad cd xy xy"], 6, 1, rule)[-1] == "xy"
        assert train_wordpiece(["cd ab"], 5, 1, rule)[-1] == "ab"
        many = train_wordpiece(["xababab " * 2], 20, criterion=rule)
        assert len(many) == len({*many})
    assert train_wordpiece(["ab " * 4 + "cd " * 2], 5)[-1] == "ab"


def test_training_takes_an_iterator_of_texts():
    texts = ["ab ab", "cd"]
    assert train_wordpiece(iter(texts), 9) == train_wordpiece(texts, 9)


def test_labels_stand_on_first_pieces():
    assert align_labels([3, 5], [-1, 0, 0, 1, None]) == [-100, 3, -100, 5, -100]
    assert align_labels([7, 8], [None, 0, 1]) == [-100, 7, 8]
    assert align_labels([7, 8], [0, 0, 1, 1]) == [7, -100, 8, -100]
    for labels in ([3], [3, 5, 7]):
        with pytest.raises(ValueError, match=f"{len(labels)} labels for 2"):
            align_labels(labels, [-1, 0, 0, 1, -1])


@given(tags)
def test_spans_and_tags_go_both_ways(row):
    spans = bio_to_spans(row)
    assert bio_to_spans(spans_to_bio(len(row), spans)) == spans
    assert sum(end - start for start, end, _ in spans) == sum(tag != "O" for tag in row)


def scanned(row):
    "Spans by the letter: each place in turn, from the left."
    found = set()
    i = 0
    while i < len(row):
        begin = i
        kind = row[i][2:]
        i += 1
        while kind and i < len(row) and row[i] == "I-" + kind:
            i += 1
        if kind:
            found.add((begin, i, kind))
    return found


@given(st.lists(st.tuples(tags, tags)))
def test_scores_are_those_of_counting_pairs(pairs):
    pairs = [(a[: min(len(a), len(b))], b[: min(len(a), len(b))]) for a, b in pairs]
    gold = [a for a, _ in pairs]
    guess = [b for _, b in pairs]
    assert all({*bio_to_spans(a)} == scanned(a) for a in gold)
    right = sum(len(scanned(a) & scanned(b)) for a, b in pairs)
    said = sum(len(scanned(b)) for b in guess)
    there = sum(len(scanned(a)) for a in gold)
    p, r, f1 = span_scores(gold, guess)
    assert p == right / max(1, said) and r == right / max(1, there)
    assert (
        f1 == (2 * p * r / (p + r) if right else 0)
        or abs(f1 - 2 * p * r / (p + r)) < 1e-12
    )
    assert (p, r, f1) == span_scores(iter(gold), (g for g in guess))
    assert (p, r, f1) == span_scores(map(tuple, gold), map(iter, guess))


@pytest.mark.parametrize(
    "row, spans",
    [
        ("O O", []),
        ("B-HERO", [(0, 1, "HERO")]),
        ("B-HERO B-HERO", [(0, 1, "HERO"), (1, 2, "HERO")]),
        ("O B-PLACE I-PLACE I-PLACE O", [(1, 4, "PLACE")]),
        ("I-THING I-THING O", [(0, 2, "THING")]),
        ("B-THING I-PLACE", [(0, 1, "THING"), (1, 2, "PLACE")]),
        ("B-FRIEND O I-FRIEND", [(0, 1, "FRIEND"), (2, 3, "FRIEND")]),
        ("B-PLACE I-PLACE B-PLACE I-PLACE", [(0, 2, "PLACE"), (2, 4, "PLACE")]),
    ],
)
def test_spans_written_by_hand(row, spans):
    assert bio_to_spans(row.split()) == spans


def test_scores_written_by_hand():
    gold = ["B-HERO O B-PLACE I-PLACE".split(), "O B-THING".split()]
    guess = ["B-HERO O O B-PLACE".split(), "B-THING B-THING".split()]
    assert span_scores(gold, guess) == (2 / 4, 2 / 3, 4 / 7)
    assert span_scores(gold, gold) == (1, 1, 1)
    assert span_scores([["O"]], [["O"]]) == (0, 0, 0)


def test_half_a_span_is_wrong():
    gold = spans_to_bio(5, [Span(1, 4, "PLACE")])
    for guess in (Span(2, 4, "PLACE"), Span(1, 4, "THING")):
        assert span_scores([gold], [spans_to_bio(5, [guess])]).f1 == 0


def test_stories_are_tagged_by_their_grammar():
    for text in stories.generate_stories(200, 7):
        words, spans = tag_story(text.strip(), GPT2_PATTERN)
        assert "".join(words) == text.strip()
        assert words == regex.findall(GPT2_PATTERN, text.strip())
        spans_to_bio(len(words), spans)
        said = [("".join(words[s.start : s.end]).strip(), s.label) for s in spans]
        heroes = {w for w, kind in said if kind == "HERO"}
        assert len(heroes) == 1
        assert not heroes & {w for w, kind in said if kind == "FRIEND"}
        for name in stories.GENDER:
            told = sum(w.strip() == name for w in words)
            if name[0].isupper():
                assert told == sum(w == name for w, _ in said)


def told(text, pattern=GPT2_PATTERN):
    words, spans = tag_story(text, pattern)
    return [("".join(words[s.start : s.end]).strip(), s.label) for s in spans]


def test_a_story_tagged_by_hand():
    assert told(
        "Once there was a little boy named Ben. One cold day, he took a "
        "red boat to the bedroom. Ben put the boat in the box."
    ) == [
        ("Ben", "HERO"),
        ("boat", "THING"),
        ("the bedroom", "PLACE"),
        ("Ben", "HERO"),
        ("boat", "THING"),
        ("in the box", "PLACE"),
    ]


def test_a_thing_is_not_found_inside_a_word():
    story = (
        "Anna looked under the table and found the car. She took "
        "better care of the car after that."
    )
    words, spans = tag_story(story, GPT2_PATTERN)
    assert [words[s.start] for s in spans if s.label == "THING"] == [" car", " car"]


def test_patterns_that_keep_signs_at_words_lose_no_span():
    story = 'Mia had a blue book. "Can I have the book?" asked Zoe.'
    assert told(story, r"\s*\S+") == [
        ("Mia", "HERO"),
        ("book.", "THING"),
        ('book?"', "THING"),
        ("Zoe.", "FRIEND"),
    ]
    coarse = told(story, r"(?s).{1,7}")
    assert [kind for _, kind in coarse] == [kind for _, kind in told(story)]
    for (some, _), (text, _) in zip(coarse, told(story), strict=True):
        assert text in some
    gaps = story.replace(" ", "  \n")
    assert told(gaps, r"\s*\S+") == told(story, r"\s*\S+")


def test_sentences_of_no_grammar_are_told_of():
    with pytest.warns(UserWarning, match="1 sentences .*Colorless green"):
        assert told("Colorless green ideas sleep. Mia was a kind girl.") == [
            ("Mia", "HERO")
        ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        told("Mia was a kind girl.")


def test_no_name_is_anything_else():
    "So ``tag_story`` need not ask whether a person stands in a gap."
    people = {
        "girl",
        "boy",
        "woman",
        "man",
        "child",
        "grown",
        "pet",
        "small_pet",
        "big_pet",
    }
    for kind, levels in stories.LEXICON.items():
        if kind not in people:
            assert not stories.GENDER.keys() & {*levels[2]}


@plain_only
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: WordPiece([]).tokenize("  "), "the text is empty"),
        (
            lambda: spans_to_bio(3, [Span(0, 2, "X"), Span(1, 3, "Y")]),
            "lies on another",
        ),
        (lambda: spans_to_bio(3, [Span(2, 4, "X")]), "does not fit 3 words"),
        (lambda: bio_to_spans(["O", "X"]), "tag 1 is 'X'"),
        (lambda: span_scores([["O"]], [["O", "O"]]), "do not fit"),
        (lambda: WordPiece([], max_input_chars_per_word=0), "max_input_chars_per_word"),
        (lambda: train_wordpiece([], 0), "size"),
        (lambda: train_wordpiece(["a"], 9, criterion="worth"), "'ratio', got 'worth'"),
        (lambda: train_wordpiece("abc abc", 9), "texts must be a collection"),
        (lambda: train_wordpiece(None, 9), "texts must be Iterable, got None"),
        (lambda: train_wordpiece([None], 9), "text must be a str, got None"),
        (lambda: WordPiece("abc"), "vocab must be a collection"),
        (lambda: WordPiece(None), "vocab must be Iterable, got None"),
        (lambda: WordPiece([]).tokenize_word(None), "word must be a str"),
        (lambda: align_labels(None, [0]), "labels must be Iterable"),
        (lambda: align_labels([1], None), "word_ids must be Iterable"),
        (lambda: align_labels([1], "0"), "word_ids must be a collection"),
        (lambda: align_labels([1], [0.5]), "words must be numbers or None"),
        (lambda: align_labels([7, 8], [-1, 0, 1, -1, 0, 1]), "must rise"),
        (lambda: align_labels([7, 8], [0, -1, 0, 1]), "align two texts one"),
        (lambda: align_labels([7, 8], [0, 1, 0]), "must rise, got .0, 1, 0"),
        (lambda: spans_to_bio(3, [Span(-3, 2, "X")]), "does not fit 3 words"),
        (lambda: spans_to_bio(3, [Span(1, 1, "X")]), "does not fit 3 words"),
        (lambda: spans_to_bio(None, []), "n must be a whole number"),
        (lambda: bio_to_spans([0]), "tag 0 is 0"),
        (lambda: bio_to_spans("O"), "tags must be a collection"),
        (lambda: span_scores(["O", "O"], ["O", "O"]), "each row of tags must"),
        (lambda: span_scores([["O"]], [["O"], ["O"]]), "do not fit"),
        (lambda: span_scores(None, []), "gold must be Iterable"),
        (lambda: tag_story("Mia was a kind girl.", "("), "cannot be read"),
        (lambda: tag_story("Mia was a kind girl.", "M"), "the whole story"),
        (lambda: tag_story("Mia was.", r"(\s*)(\S+)"), "have no groups"),
        (lambda: tag_story(None, "M"), "story must be a str"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_random_spans_survive():
    rng = random.Random(0)
    for _ in range(100):
        n = rng.randint(1, 20)
        spans = []
        at = 0
        while at < n:
            start = at + rng.randint(0, 3)
            end = start + rng.randint(1, 3)
            if end <= n:
                spans.append(Span(start, end, rng.choice("XY")))
            at = end
        assert bio_to_spans(spans_to_bio(n, spans)) == spans
