"""The readable tokenizer against the Hugging Face trainer, tiktoken, and itself."""

import itertools
import json
import random
import warnings
from collections import Counter
from pydoc_data import topics

import numpy as np
import pytest
import tiktoken
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer.text import bpe
from tformer.text.bpe import (
    BPE,
    GPT2_BYTE_ORDER,
    GPT2_PATTERN,
    apply_merges,
    best_pair,
    build_vocab,
    count_pairs,
    count_pretokens,
    merge_pair,
    pretokenize_text,
    split_special,
    train_bpe,
)

EOT = "<|endoftext|>"
PAGES = "\n".join(topics.topics.values())[:60_000]
MIXED = "\n".join(
    [
        "The naïve café's menu isn't cheap; THEY'LL charge $12.50.",
        "Съешь же ещё этих мягких французских булок, да выпей чаю.",
        "सभी मनुष्यों को गौरव और अधिकारों के मामले में समानता प्राप्त है।",
        "人人生而自由，在尊严和权利上一律平等。すべての人間は自由である。",
        "כל בני האדם נולדו בני חורין  يولد جميع الناس أحرارا",
        "👩‍👩‍👧‍👦🏳️‍🌈🇫🇷👍🏽 ½ ² Ⅷ ٣٤ ߀ e\u0302 \u212b ﬁ",
        "tab\tand\x00null\x1b[0m\x7f\u200b\u00a0\u3000end  ",
    ]
)
TEXTS = [
    "",
    "a",
    " ",
    "\n",
    "é",
    "\x00",
    "aaa",
    "don't DON'T I’ll",
    "a\r\nb\r\n\r\nc\rd",
    "   x  \n\n  y\t\t",
    MIXED,
    PAGES[:5000],
]
to_letter = {
    b: chr(b) if k < 188 else chr(256 + k - 188) for k, b in enumerate(GPT2_BYTE_ORDER)
}
to_byte = {c: b for b, c in to_letter.items()}
# no surrogates; any other code point
anything = st.text(st.characters(exclude_categories=["Cs"]))
# few letters make many ties and runs
crowded = st.text(st.sampled_from("aab cé\n'1"), max_size=60)


@pytest.fixture(autouse=True)
def quiet():
    "Stopping early is tested where it is the point."
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no pair is left")
        yield


def hugging_face(texts, vocab_size, special=()):
    "The tokenizer and the merges that `tokenizers` learns."
    level = tokenizers.pre_tokenizers.ByteLevel
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs.pre_tokenizer = level(add_prefix_space=False, use_regex=True)
    theirs.train_from_iterator(
        texts,
        tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(special),
            initial_alphabet=level.alphabet(),
            show_progress=False,
        ),
    )
    merges = json.loads(theirs.to_str())["model"]["merges"]
    return theirs, [
        tuple(bytes(to_byte[c] for c in part) for part in pair) for pair in merges
    ]


def in_tiktoken(ours):
    "The same tokenizer as tiktoken has it: ranks of tokens."
    special = set(ours.special_tokens.values())
    return tiktoken.Encoding(
        "ours",
        pat_str=GPT2_PATTERN,
        special_tokens=ours.special_tokens,
        mergeable_ranks={
            piece: i for i, piece in ours.vocab.items() if i not in special
        },
    )


def in_hugging_face(ours):
    "The same tokenizer in `tokenizers`, its ids like ours."
    text = {i: "".join(to_letter[b] for b in piece) for i, piece in ours.vocab.items()}
    theirs = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {piece: i for i, piece in text.items()},
            [
                tuple("".join(to_letter[b] for b in part) for part in pair)
                for pair in ours.merges
            ],
        )
    )
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=True
    )
    return theirs


def brute_force(text, n_merges, ties):
    """Another trainer: one list of byte strings per occurrence, no ids."""
    sequences = [[bytes([b]) for b in word.encode()] for word in pretokenize_text(text)]
    learned = []  # in order: what "ids" breaks ties by
    age = {bytes([b]): k for k, b in enumerate(GPT2_BYTE_ORDER)}
    for _ in range(n_merges):
        counts = Counter(pair for s in sequences for pair in itertools.pairwise(s))
        if not counts:
            break
        if ties == "bytes":
            pair = sorted(counts, key=lambda p: (counts[p], *p))[-1]
        else:
            pair = sorted(counts, key=lambda p: (-counts[p], age[p[0]], age[p[1]]))[0]
        age[pair[0] + pair[1]] = len(age)
        learned.append(pair)
        for s in sequences:
            i = 0
            while i + 1 < len(s):
                if (s[i], s[i + 1]) == pair:
                    s[i : i + 2] = [pair[0] + pair[1]]
                i += 1
    return learned


# --- training ------------------------------------------------------------


@pytest.mark.parametrize("text", [PAGES, MIXED, *TEXTS])
def test_merges_equal_hugging_face(text):
    assert train_bpe(text, 400, tie_break="ids") == hugging_face([text], 400)[1]


def test_merges_equal_hugging_face_for_documents_and_special_tokens():
    documents = [PAGES[:3000], "", MIXED, "aaa aaa"]
    special = [EOT, "<pad>"]
    ours = train_bpe(documents, 380, special, tie_break="ids")
    assert ours == hugging_face(documents, 380, special)[1]
    assert len(ours) == 380 - 256 - 2
    # in one text, cut by a special token, they are the same documents
    assert ours == train_bpe(EOT.join(documents), 380, special, tie_break="ids")


@settings(max_examples=80, deadline=None)
@given(crowded, st.integers(256, 300))
def test_merges_of_crowded_texts_equal_hugging_face(text, vocab_size):
    theirs = hugging_face([text], vocab_size)[1]
    assert train_bpe(text, vocab_size, tie_break="ids") == theirs


@settings(max_examples=100, deadline=None)
@given(crowded | anything, st.sampled_from(["bytes", "ids"]))
def test_merges_equal_brute_force(text, ties):
    ours = train_bpe(text, 256 + 40, tie_break=ties)
    assert ours == brute_force(text, 40, ties)


@pytest.mark.parametrize("ties", ["bytes", "ids"])
def test_merges_equal_brute_force_on_real_text(ties):
    text = PAGES[:6000] + MIXED
    assert train_bpe(text, 330, tie_break=ties) == brute_force(text, 74, ties)


@settings(max_examples=100, deadline=None)
@given(crowded)
def test_no_token_is_learned_twice(text):
    joined = [a + b for a, b in train_bpe(text, 320)]
    assert len(set(joined)) == len(joined)


def test_worked_example():
    words = {tuple(b"aaabdaaabac"): 1}
    pairs = {bytes(p): n for p, n in count_pairs(words).items()}
    assert pairs == {b"aa": 4, b"ab": 2, b"bd": 1, b"da": 1, b"ba": 1, b"ac": 1}
    assert train_bpe("aaabdaaabac", 259) == [
        (b"a", b"a"),
        (b"aa", b"a"),
        (b"aaa", b"b"),
    ]
    assert train_bpe("aaabdaaabac", 259, tie_break="ids") == [
        (b"a", b"a"),
        (b"a", b"b"),
        (b"aa", b"ab"),
    ]


@pytest.mark.parametrize("n", range(9))
def test_runs_are_counted_with_overlap_and_merged_without(n):
    run = (97,) * n
    assert count_pairs({run: 2}).get((97, 97), 0) == 2 * max(n - 1, 0)
    merged = merge_pair(run, (97, 97), 256)
    assert merged == (256,) * (n // 2) + (97,) * (n % 2)


def test_ties():
    text = "ab cd"  # two words, one pair each: (a, b), (space, c)…
    assert train_bpe("ab\ncd", 257) == [(b"c", b"d")]
    assert train_bpe("ab\ncd", 257, tie_break="ids") == [(b"a", b"b")]
    # GPT-2's order: the space comes after the letters
    assert train_bpe(text, 257, tie_break="ids") == [(b"a", b"b")]
    # a pair of byte strings is compared, not the joined bytes: the pairs
    # (a, bz) and (ab, c) have (ab, c) the greater, abz > abc joined
    vocab = {1: b"a", 2: b"bz", 3: b"ab", 4: b"c"}
    assert best_pair({(1, 2): 5, (3, 4): 5}, vocab) == (3, 4)
    with pytest.raises(
        ValueError, match="tie_break must be one of 'bytes', 'ids', got 'random'"
    ):
        train_bpe("ab", 300, tie_break="random")


def test_byte_order_is_that_of_gpt2():
    assert sorted(GPT2_BYTE_ORDER) == list(range(256))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert alphabet == [to_letter[b] for b in GPT2_BYTE_ORDER]


def test_stops_early_and_says_so():
    with pytest.warns(UserWarning, match="after 3 merges.* 259 tokens, not 1000"):
        merges = train_bpe("abcd", 1000)
    assert [a + b for a, b in merges][-1] == b"abcd"
    with pytest.warns(UserWarning, match="after 0 merges.* 257 tokens, not 300"):
        assert train_bpe("", 300, [EOT]) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train_bpe("abcd", 259) == merges
        assert train_bpe("abcd", 256) == []


def test_smaller_vocabularies_are_prefixes():
    merges = train_bpe(PAGES[:5000], 340)
    assert train_bpe(PAGES[:5000], 300) == merges[:44]


def test_special_tokens_are_never_learned_nor_crossed():
    text = f"ab{EOT}ab{EOT}ab"
    learned = {a + b for a, b in train_bpe(text, 300, [EOT])}
    assert learned == {b"ab"}
    without = {a + b for a, b in train_bpe(text, 300)}
    assert b"endoftext" in without


def test_counts_are_those_of_all_occurrences():
    counts = count_pretokens([PAGES, MIXED])
    every = Counter(
        tuple(w.encode()) for t in (PAGES, MIXED) for w in pretokenize_text(t)
    )
    assert counts == every


# --- encoding ------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    return BPE(train_bpe(PAGES + MIXED * 3, 700, [EOT]), [EOT])


@pytest.fixture(scope="module")
def peers(trained):
    return in_tiktoken(trained), in_hugging_face(trained)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_equal_the_peers(trained, peers, text):
    ours = trained.encode(text)
    assert ours == peers[0].encode(text)
    assert ours == peers[1].encode(text).ids
    assert trained.decode(ours) == text


def test_ids_of_a_whole_text_equal_the_peers(trained, peers):
    text = PAGES + MIXED
    assert trained.encode(text) == peers[0].encode(text)
    assert trained.encode(text) == peers[1].encode(text).ids


def test_ids_equal_the_peers_on_random_strings(trained, peers):
    rng = random.Random(0)
    letters = sorted(set(MIXED + " \r\n\t'") | {chr(c) for c in range(256)})
    for _ in range(500):
        text = "".join(rng.choices(letters, k=rng.randrange(40)))
        ours = trained.encode(text)
        assert ours == peers[0].encode(text)
        assert ours == peers[1].encode(text).ids


@settings(max_examples=60, deadline=None)
@given(crowded, crowded)
def test_tokens_alone_tell_the_merges(corpus, text):
    "tiktoken knows no merges, only tokens; on trained ones they agree."
    ours = BPE(train_bpe(corpus, 300))
    assert ours.encode(text) == in_tiktoken(ours).encode(text)


@settings(max_examples=300, deadline=None)
@given(anything)
def test_round_trip(text):
    assert SMALL.decode(SMALL.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(st.lists(anything, max_size=4))
def test_round_trip_with_special_tokens(parts):
    text = EOT.join(parts)
    ids = SMALL.encode(text)
    assert SMALL.decode(ids) == text
    assert ids.count(SMALL.special_tokens[EOT]) == text.count(EOT)


SMALL = BPE(train_bpe(MIXED, 330, [EOT]), [EOT])


def test_special_tokens_keep_their_ids(trained, peers):
    text = f"{EOT}a b{EOT}{EOT}c"
    ids = trained.encode(text)
    assert ids.count(trained.special_tokens[EOT]) == 3
    assert ids == peers[0].encode(text, allowed_special="all")
    assert trained.decode(ids) == text
    assert BPE(trained.merges).encode(text).count(trained.special_tokens[EOT]) == 0


def test_longest_special_token_wins():
    for order in itertools.permutations(["<|a|>", "<|a|><|b|>", "<"]):
        ours = BPE([], order)
        ids = ours.encode("x<|a|><|b|>y<|a|>")
        assert ids == [
            120,
            ours.special_tokens["<|a|><|b|>"],
            121,
            ours.special_tokens["<|a|>"],
        ]
    assert split_special("a.b|c", ["|", "."]) == ["a", ".", "b", "|", "c"]
    assert split_special("abc", []) == ["abc"]
    assert split_special("", [EOT]) == split_special("", []) == []


def test_ids_are_bytes_then_merges_then_special_tokens():
    ours = BPE([(b"a", b"b"), (b"ab", b"c")], ["<x>", EOT])
    assert [ours.vocab[i] for i in (0, 255, 256, 257, 258, 259)] == [
        b"\0",
        b"\xff",
        b"ab",
        b"abc",
        b"<x>",
        EOT.encode(),
    ]
    assert len(ours) == len(ours.vocab) == 260
    assert ours.encode("abcd<x>") == [257, 100, 258]


def test_lowest_rank_goes_first():
    ours = BPE([(b"b", b"c"), (b"a", b"b")])
    assert [ours.vocab[i] for i in ours.encode("abc")] == [b"a", b"bc"]


def test_encoding_repeats_training():
    "On its own pre-tokens, encoding ends where training ended."
    merges = train_bpe(PAGES, 500)
    _vocab, ranks = build_vocab(merges)
    words = {ids: ids for ids in count_pretokens(PAGES)}
    for pair, new_id in ranks.items():
        words = {raw: merge_pair(ids, pair, new_id) for raw, ids in words.items()}
    assert all(apply_merges(raw, ranks) == ids for raw, ids in words.items())


def test_train_is_train_bpe():
    ours = BPE.train(MIXED, 300, [EOT], tie_break="ids")
    assert ours.merges == train_bpe(MIXED, 300, [EOT], tie_break="ids")
    assert len(ours) == 300


def test_a_pattern_of_ones_own():
    whole = r"(?s).+"
    ours = BPE.train("a b a b a b", 260, pattern=whole)
    assert b" " in ours.vocab[259] and len(ours.encode("a b a b")) < 4
    with pytest.raises(ValueError, match="skips ' ' at position 1"):
        BPE([], pattern=r"\w+").encode("a b")
    with pytest.raises(ValueError, match="skips '!' at position 1"):
        pretokenize_text("a!", r"\w+")


# --- pre-tokens ----------------------------------------------------------


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("don't DON'T", ["don", "'t", " DON", "'", "T"]),
        ("a   b", ["a", "  ", " b"]),
        ("a \n\tb", ["a", " \n", "\t", "b"]),
        ("x=42, y_1", ["x", "=", "42", ",", " y", "_", "1"]),
        ("a\r\nb", ["a", "\r", "\n", "b"]),
        ("end  ", ["end", "  "]),
        ("re\u0302ve", ["re", "\u0302", "ve"]),
        ("", []),
    ],
)
def test_pre_tokens(text, pieces):
    assert pretokenize_text(text) == pieces


@settings(max_examples=200, deadline=None)
@given(anything)
def test_pre_tokens_join_to_the_text(text):
    pieces = pretokenize_text(text)
    assert "".join(pieces) == text and all(pieces)


def test_pre_tokens_equal_hugging_face():
    level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in TEXTS:
        theirs = [
            bytes(to_byte[c] for c in piece).decode()
            for piece, _ in level.pre_tokenize_str(text)
        ]
        assert pretokenize_text(text) == theirs


# --- decoding ------------------------------------------------------------


def test_part_of_a_character():
    assert SMALL.decode([0xC3]) == SMALL.decode([0xAB]) == "\ufffd"
    assert SMALL.decode([0xC3, 0xAB]) == "\u00eb"
    assert SMALL.decode_bytes([0xC3]) == b"\xc3"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(SMALL) - 1)))
def test_any_ids_decode(ids):
    raw = b"".join(SMALL.vocab[i] for i in ids)
    assert SMALL.decode_bytes(ids) == raw
    assert SMALL.decode(ids) == raw.decode("utf-8", errors="replace")


def test_ids_of_other_integer_types_decode():
    ids = SMALL.encode("café")
    assert SMALL.decode(torch.tensor(ids)) == "café"
    assert SMALL.decode(np.array(ids, dtype=np.uint16)) == "café"
    assert SMALL.decode(iter(ids)) == "café"
    assert SMALL.decode([]) == ""
    with pytest.raises(TypeError):
        SMALL.decode([97.5])


# --- mistakes ------------------------------------------------------------


@pytest.mark.parametrize(
    "do, message",
    [
        (
            lambda: train_bpe("ab", 255),
            "vocab_size must be at least 256 bytes \\+ 0 special tokens, got 255",
        ),
        (lambda: train_bpe("ab", 257, [EOT, "<x>"]), "2 special.* got 257"),
        (lambda: train_bpe("ab", 300.0), "vocab_size must be a whole .* 300.0"),
        (lambda: train_bpe("ab", True), "vocab_size must be a whole .* True"),
        (lambda: SMALL.decode([0, 330]), r"ids must be 0 to 329, got \[330\]"),
        (lambda: SMALL.decode([-1]), r"ids must be 0 to 329, got \[-1\]"),
        (lambda: SMALL.encode("ok \ud800"), r"character 3 is '\\ud800', a lone"),
        (lambda: train_bpe(["fine", "\udfff"], 300), "lone surrogate"),
        (lambda: BPE([], ["\ud800"]), "lone surrogate"),
        (lambda: BPE([], [""]), r"special_tokens\[0\] is empty"),
        (lambda: BPE([], ["<x>", EOT, "<x>"]), "'<x>' is twice"),
        (lambda: BPE([], EOT), "special_tokens must be list .*, got str"),
        (lambda: BPE([], ["a", b"x"]), r"special_tokens\[1\] must be a str, got b"),
        (lambda: train_bpe("ab", 300, ["a", ""]), r"tokens\[1\] is empty"),
        (lambda: split_special("ab", ["a", "a"]), "'a' is twice"),
        (lambda: SMALL.encode(b"bytes"), "text must be a str, got bytes"),
        (lambda: train_bpe(b"bytes", 300), "text must be a str, got bytes"),
        (lambda: BPE([(b"a", b"bc")]), "merge 0 must join .* got b'a' and b'bc'"),
        (lambda: BPE([(b"a", b"b"), (b"a", b"b")]), "merge 1 makes b'ab' again"),
        (lambda: BPE([("a", "b")]), "merge 0 must join .* got 'a' and 'b'"),
    ],
)
def test_errors_name_the_value_and_what_was_expected(do, message):
    with pytest.raises(ValueError, match=message):
        do()


def test_everything_public_is_documented():
    names = [n for n in bpe.__all__ if callable(getattr(bpe, n))]
    assert {"BPE", "train_bpe", "pretokenize_text"} <= set(names)
    assert all(getattr(bpe, n).__doc__ for n in names)


def test_special_tokens_have_an_order():
    with pytest.raises(ValueError, match="must be list or tuple, got set"):
        BPE([], {"<a>", "<b>"})


def test_merge_pair_takes_a_list():
    assert merge_pair([1, 2, 1, 2], (1, 2), 256) == (256, 256)
