"""The fast tokenizer against ``tokenizers``, ``tiktoken`` and chapter 2."""

import codecs
import copy
import inspect
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import threading
import tracemalloc
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from helpers import plain_only
from tformer.corpora import stories
from tformer.text import bpe, vocabulary
from tformer.text.bpe import GPT2_BYTE_ORDER, GPT2_PATTERN
from tformer.text.bpe_trainer import learn_merges
from tformer.text.pretokenizer import read_text_chunks, split_stream
from tformer.text.tokenizer import (
    Encoder,
    IncrementalDecoder,
    PretokenCache,
    StopStringCriterion,
    Tokenizer,
    _ParallelBatch,
    cut_at_stop_string,
    parse_stop_strings,
)
from tformer.text.tokenizer_files import (
    _checksum,
    vocabulary_from_dict,
    vocabulary_from_gpt2,
    vocabulary_from_hf,
    vocabulary_from_tiktoken,
    vocabulary_to_dict,
    vocabulary_to_gpt2,
    vocabulary_to_hf,
    vocabulary_to_tiktoken,
)
from tformer.text.vocabulary import (
    Vocabulary,
    build_merge_tables,
    bytes_to_chars,
    merge_long,
    merge_short,
)

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = """\
English don't DON'T I'll we've they're 'tis 12,345.67 (a) [b] {c} -- ... !?
Français : l'été où naïve œuvre — « ça » Ελληνικά: καλημέρα κόσμε Русский: привет, мир
العربية: مرحبا بالعالم ١٢٣ עברית: שָׁלוֹם हिन्दी: नमस्ते दुनिया १२३ ไทย: สวัสดีชาวโลก
中文：你好，世界。一二三 日本語：こんにちは、世界 한국어: 안녕하세요 𠀀𠮷 𝒜𝟙 𐐀 Ⅷ ½ ²
😀👩‍👩‍👧‍👦🏳️‍🌈🇫🇷 e\u0301 \u200b\u00a0\u3000\u2028\u0085 \x00\x01\x1c\x1f\x7f\t\v\f
\r\nwindows\r\n\r\n\n\n  indented\n\t\ttabs   \n end   """
NASTY = "don't<|a|><|b|>\n\n  x<|a|><|a|><|b|> 12.5<|a <|b|>'re \r\né𝒜 1a2 <|a|>  "
SPECIAL = ["<|a|>", "<|a|><|b|>", "|> "]


def code_points():
    "All characters, without the halves of pairs."
    return [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def hf_trained(texts, vocab_size):
    "A byte-level BPE tokenizer trained by Hugging Face's library."
    hf = tokenizers.Tokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return hf


def made(*args, **options):
    "A tokenizer of merges and special tokens, not of a vocabulary."
    return Tokenizer(Vocabulary(*args, **options))


def quiet_train(texts, size, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Tokenizer.train(texts, size, progress=False, **options)


@pytest.fixture(scope="module")
def text():
    return SCRIPTS * 3 + stories.story_corpus(60_000, seed=1, level=3)


@pytest.fixture(scope="module")
def tok(text):
    return Tokenizer.train([text], 1500, special_tokens=SPECIAL, progress=False)


@pytest.fixture(scope="module")
def peers(tok):
    "The same vocabulary in both libraries, without special tokens."
    plain = made(tok.vocab.merges)
    tik = tiktoken.Encoding("t", **plain.to_tiktoken())
    hf = tokenizers.Tokenizer.from_str(json.dumps(vocabulary_to_hf(plain.vocab)))
    return plain, tik, hf


@pytest.fixture(scope="module")
def disputed():
    "Characters whose class in ``regex`` is another in one of the peers."
    every = "".join(code_points())
    found = set()
    byte_ids = {bytes([i]): i for i in range(256)}
    for name in (r"\p{L}", r"\p{N}", r"\s"):
        ours = set(regex.findall(name, every))
        tik = tiktoken.Encoding(
            "probe", pat_str=name, special_tokens={}, mergeable_ranks=byte_ids
        )
        hf = pre_tokenizers.Split(tokenizers.Regex(name + "+"), "removed", invert=True)
        found |= ours ^ set(bytes(tik.encode_ordinary(every)).decode())
        found |= ours ^ set("".join(w for w, _ in hf.pre_tokenize_str(every)))
    return found


def test_processes_agree(tok, text):
    texts = [text[i : i + 3000] for i in range(0, len(text), 3000)]
    assert (
        tok.encode_batch(texts, num_workers=2, disallowed_special=())
        == tok.encode_batch(texts, disallowed_special=())
        == [tok.encode(t, disallowed_special=()) for t in texts]
    )


def test_other_patterns():
    pattern = r"\w+|\W"
    tok = quiet_train(["ab ab, ab"], 260, pattern=pattern)
    assert tok.vocab.merges == [(b"a", b"b")]
    chunks = ["ab a", "b, ", "ab"]
    assert (
        list(tok.encode_iterable(chunks))
        == tok.encode("ab ab, ab")
        == [256, 32, 256, 44, 32, 256]
    )
    with pytest.raises(ValueError, match="skips"):
        made([], pattern=r"\w+").encode("a b")


# ---- ids

CASES = [
    SCRIPTS,
    "",
    " ",
    "\n",
    "a",
    "\x00",
    "é",
    "\r\n",
    "  ",
    "a\n\n\nb",
    " \n",
    "'s",
    "''s",
    "1a1",
    "\U0010ffff",
    "a" * 3000,
    "ab" * 999,
    "= " * 500,
    "".join(map(chr, range(256))),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_ids_equal_the_peers(peers, case):
    plain, tik, hf = peers
    ids = plain.encode(CASES[case])
    assert ids == tik.encode(CASES[case], disallowed_special=())
    assert ids == hf.encode(CASES[case]).ids
    assert ids == bpe.BPE(plain.vocab.merges).encode(CASES[case])
    assert plain.decode(ids) == CASES[case] == tik.decode(ids)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(data=st.data())
def test_ids_equal_the_peers_on_any_text(peers, disputed, data):
    alphabet = st.one_of(
        st.sampled_from(" etaonis'\n\r\t.1"), st.characters(exclude_categories=["Cs"])
    )
    text = data.draw(st.text(alphabet, max_size=40))
    text = "".join(c for c in text if c not in disputed)
    plain, tik, hf = peers
    ids = plain.encode(text)
    assert ids == tik.encode(text, disallowed_special=())
    assert ids == hf.encode(text).ids
    assert plain.decode_bytes(ids) == text.encode()


def test_all_undisputed_code_points(peers, disputed):
    plain, tik, hf = peers
    points = [c for c in code_points() if c not in disputed]
    random.Random(0).shuffle(points)
    for low in range(0, len(points), 200_000):
        text = "".join(f"a{c}1{c} {c}" for c in points[low : low + 20_000])
        ids = plain.encode(text)
        assert ids == tik.encode_ordinary(text)
        assert ids == hf.encode(text).ids
    # the dispute is about new characters only: none of the large alphabets
    assert all(ord(c) >= 0x530 for c in disputed)
    assert len(disputed) < 0.03 * 0x110000


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text("aab no", max_size=120))
def test_both_ways_of_merging_agree(tok, text):
    word = bytes_to_chars(text)
    rules = build_merge_tables(tok.vocab.merges)
    assert merge_short(word, rules) == merge_long(word, rules)


def test_long_words_cost_no_quadratic_time(monkeypatch, tok):
    "Heap operations and passes over the text grow no faster than it."
    rng = random.Random(0)
    rules = build_merge_tables(tok.vocab.merges)
    pushes = []
    passes = []
    push = vocabulary.heappush
    monkeypatch.setattr(vocabulary, "heappush", lambda *a: (pushes.append(1), push(*a)))
    pop = vocabulary.heappop
    monkeypatch.setattr(
        vocabulary, "heappop", lambda *a: (passes.append(1), pop(*a))[1]
    )

    def work(text):
        pushes.clear(), passes.clear()
        merge_long(text, rules)
        return len(pushes) + len(passes)

    small = work("".join(rng.choices("etaoinshrdlu", k=10_000)))
    large = work("".join(rng.choices("etaoinshrdlu", k=160_000)))
    assert large < 5 * small  # 16 times the text
    assert large < 20 * len(tok.vocab.merges)
    assert work("a" * 1_000_000) < 100
    assert len(tok.encode("a" * 1_000_000)) > 100_000


# ---- special tokens


def test_special_tokens_as_in_tiktoken(tok):
    tik = tiktoken.Encoding("t", **tok.to_tiktoken())
    some = {"<|a|>"}
    for text in (NASTY, "<|a|>", "<|a|><|b|>", "plain", "<|a|"):
        for allowed in (set(), some, "all"):
            for forbidden in ("all", set(), some, {"<|a|><|b|>"}):
                options = dict(allowed_special=allowed, disallowed_special=forbidden)
                try:
                    theirs = tik.encode(text, **options)
                except ValueError:
                    with pytest.raises(ValueError, match="special token"):
                        tok.encode(text, **options)
                else:
                    # tiktoken takes the first listed, not the longest, so
                    # only texts where the two agree are compared
                    ours = tok.encode(text, **options)
                    assert tok.decode(ours) == text == tik.decode(theirs)
                    if allowed != "all":
                        assert ours == theirs


def test_longest_special_token_wins(tok):
    for text in ("x<|a|><|b|>", "<|a|><|b|><|a|>"):
        with pytest.raises(ValueError, match=r"token '<\|a\|><\|b\|>'"):
            tok.encode(text)
    a, ab = (tok.vocab.special_tokens[t] for t in SPECIAL[:2])
    ids = tok.encode("<|a|><|b|><|a|>x", allowed_special="all")
    assert ids == [ab, a, ord("x")]


def test_cache_does_not_mix_up_special_tokens(tok):
    "The same text, as text and as a special token, in either order."
    tok = made(tok.vocab.merges, ["<|>", "the"])
    for _ in range(2):
        for text in ("<|>", "the"):  # each of them one pre-token
            as_text = tok.encode(text, disallowed_special=())
            as_id = tok.encode(text, allowed_special="all")
            assert as_id == [tok.vocab.special_tokens[text]] != as_text


def test_reserved_tokens_fill_the_ids_up_to_the_size_of_a_model(tok, tmp_path):
    "They decode, they come back from files, and ordinary text has none of them."
    n = len(tok)
    padded = tok.with_reserved_tokens(n + 5)
    assert (len(tok), len(padded)) == (n, n + 5)
    assert padded.encode(NASTY, disallowed_special=()) == tok.encode(
        NASTY, disallowed_special=()
    )
    tik = tiktoken.Encoding("t", **padded.to_tiktoken(), explicit_n_vocab=n + 5)
    padded.to_hf(tmp_path / "hf.json")
    hf = tokenizers.Tokenizer.from_file(str(tmp_path / "hf.json"))
    assert hf.get_vocab_size() == tik.n_vocab == n + 5
    for i in range(n, n + 5):
        text = f"<|reserved_{i}|>"
        assert padded.decode([i]) == tik.decode([i]) == hf.id_to_token(i) == text
        assert padded.encode(text, allowed_special="all") == [i]
    padded.save(tmp_path / "own.json")
    assert Tokenizer.load(tmp_path / "own.json") == padded
    assert Tokenizer.from_hf(tmp_path / "hf.json") == padded
    assert tok.with_reserved_tokens(n) == tok
    assert padded.with_reserved_tokens(n + 9) == tok.with_reserved_tokens(n + 9)


def test_ids_that_stand_for_nothing_are_reserved_too():
    vocab = Vocabulary([], {"<|end|>": 259})
    for id in (256, 257, 258):
        with pytest.raises(ValueError, match=f"^id {id} stands for nothing: no token"):
            vocab.decode([65, id])
    for id in (-1, 260):
        with pytest.raises(ValueError, match=f"^id {id} is unknown, expected 0 to 259"):
            vocab.decode([65, id])
    padded = vocab.with_reserved_tokens(261)
    assert padded.decode(range(256, 261)) == (
        "<|reserved_256|><|reserved_257|><|reserved_258|><|end|><|reserved_260|>"
    )


@plain_only
@pytest.mark.parametrize("wrong", [256, 257.0, True, "300"])
def test_a_vocabulary_is_not_cut(wrong):
    vocab = Vocabulary([], ["<|end|>"])
    with pytest.raises(ValueError, match=f"vocab_size must be .* 257, got {wrong!r}"):
        vocab.with_reserved_tokens(wrong)


def test_a_special_token_does_not_lose_its_id_to_a_reserved_one():
    token = "<|reserved_257|>"
    vocab = Vocabulary([], [token])
    said = f"^{regex.escape(repr(token))} has the id 256 already"
    with pytest.raises(ValueError, match=said):
        vocab.with_reserved_tokens(258)


# ---- streams


def test_every_cut(tok):
    for allowed in ((), {"<|a|>"}, "all"):
        options = dict(allowed_special=allowed, disallowed_special=())
        whole = tok.encode(NASTY, **options)
        for a in range(len(NASTY) + 1):
            for b in range(a, len(NASTY) + 1, 3):
                chunks = NASTY[:a], NASTY[a:b], NASTY[b:]
                assert list(tok.encode_iterable(chunks, **options)) == whole
        assert list(tok.encode_iterable(iter(NASTY), **options)) == whole


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13])
def test_every_cut_in_small_blocks(tok, size, monkeypatch):
    "The blocks themselves are cut everywhere that their size allows."
    monkeypatch.setattr(
        "tformer.text.tokenizer.split_stream", partial(split_stream, size=size)
    )
    for text in (NASTY, CASES[0][:150], "a\n\n\nb  c \n d's 1a", "a" * 40):
        for allowed in ((), "all"):
            options = dict(allowed_special=allowed, disallowed_special=())
            whole = tok.encode(text, **options)
            for cut in range(len(text) + 1):
                chunks = text[:cut], text[cut:]
                assert list(tok.encode_iterable(chunks, **options)) == whole


def test_forbidden_token_across_chunks(tok):
    for cut in range(6):
        with pytest.raises(ValueError, match="special token"):
            list(tok.encode_iterable(["x <|a|> y"[: 2 + cut], "x <|a|> y"[2 + cut :]]))
    # but two texts of a batch do not meet
    tok.encode_batch(["x <|a", "|>y"])


@pytest.mark.nightly
def test_stream_in_constant_memory(tok, text):
    def peak(n):
        tracemalloc.start()
        stream = (text for _ in range(n))
        count = sum(1 for _ in tok.encode_iterable(stream, disallowed_special=()))
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return count, top

    few = peak(12)
    many = peak(48)
    assert many[0] > 3 * few[0]
    assert many[1] < 1.2 * few[1] < 40e6


def test_cache_is_bounded():
    cache = PretokenCache(lambda word: (len(word),), limit=10, max_length=5)
    for i in range(100):
        assert cache[str(i)] == (len(str(i)),)
        assert len(cache) <= 10
    before = dict(cache)
    assert cache["x" * 6] == (6,) and dict(cache) == before


# ---- decoding


def test_decode(tok):
    ids = tok.encode("🦄é")
    assert tok.decode(ids[:1]) == "\ufffd"
    assert tok.decode(np.array(ids)) == "🦄é"
    assert tok.decode(iter(ids)) == "🦄é" and tok.decode([]) == ""
    assert tok.decode_batch([ids, []]) == ["🦄é", ""]
    for bad in (len(tok), -1, 10**9):
        with pytest.raises(ValueError, match=f"id {bad} is unknown"):
            tok.decode([65, bad])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_ids_decode(tok, data):
    ids = data.draw(st.lists(st.integers(0, len(tok) - 1), max_size=20))
    assert tok.decode_bytes(ids) == b"".join(map(tok.id_to_bytes, ids))
    tok.decode(ids)


# ---- text while it is written

BYTES = made([], ["<|end|>"])  # each byte has an id of its own
# first and last bytes of characters, and bytes that are in none
EDGES = bytes.fromhex("41 80 8f 90 9f a0 bf c1 c2 e0 e1 ed ef f0 f3 f4 f5 ff")


def in_portions(data, ids):
    "The ids in portions of any size, empty ones too; single ids as numbers."
    while ids:
        n = data.draw(st.integers(0, 4))
        yield ids[0] if n == 1 else ids[:n]
        ids = ids[n:]


def pieces_of(decoder, portions):
    "What each portion gives, and at the end the rest."
    return [*map(decoder.decode, portions), decoder.finish()]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_pieces_join_to_the_decoded_text(tok, data):
    ids = data.draw(st.lists(st.integers(0, len(tok) - 1), max_size=25))
    ids += data.draw(st.lists(st.sampled_from(EDGES), max_size=9))
    pieces = pieces_of(IncrementalDecoder(tok), in_portions(data, ids))
    assert "".join(pieces) == tok.decode(ids)


def test_any_bytes_join_to_the_decoded_text():
    "All sequences of three bytes of which each can change what the others mean."
    for raw in itertools.product(EDGES, repeat=3):
        for ids in ([*raw], [240, *raw], [*raw, 65]):
            pieces = pieces_of(IncrementalDecoder(BYTES), ids)
            assert "".join(pieces) == bytes(ids).decode("utf-8", "replace")


def test_a_piece_is_given_as_soon_as_its_characters_are_whole():
    raw = "é🐻a".encode()
    assert pieces_of(IncrementalDecoder(BYTES), raw) == [
        *["", "é"],
        *["", "", "", "🐻"],
        *["a", ""],
    ]
    end = BYTES.token_to_id("<|end|>")
    decoder = IncrementalDecoder(BYTES)
    assert decoder.decode([raw[0], end, raw[2]]) == "\ufffd<|end|>"
    assert decoder.finish() == "\ufffd" and decoder.finish() == ""
    assert decoder.stop_string is None
    assert IncrementalDecoder(BYTES).decode(np.array([65, 66])) == "AB"


def test_the_text_of_whole_characters_is_that_of_hugging_face(tok):
    "Theirs also keeps back the whole characters of a token that ends in a part of one."
    plain = made(tok.vocab.merges)
    hf = tokenizers.Tokenizer.from_str(json.dumps(vocabulary_to_hf(plain.vocab)))
    theirs = tokenizers.decoders.DecodeStream()
    decoder = IncrementalDecoder(plain)
    raw = b""
    ours = other = ""
    waits = 0
    for i in plain.encode(SCRIPTS + "naïve 🦄🏳️‍🌈 𒀀 words"):
        ours += decoder.decode(i)
        other += theirs.step(hf, i) or ""
        raw += plain.id_to_bytes(i)
        whole = raw.decode("utf-8", "ignore")  # only its end can be incomplete
        assert ours == whole and whole.startswith(other)
        if whole.encode() == raw:
            assert other == ours
        else:
            waits += 1
    assert waits > 20 and decoder.finish() == ""


def test_a_decoder_reads_each_id_once(monkeypatch):
    "Neither the ids nor the text so far are looked at anew for each id."
    n = []
    decode_bytes = Tokenizer.decode_bytes

    def counted(self, ids):
        ids = [*ids]
        n.append(len(ids))
        return decode_bytes(self, ids)

    monkeypatch.setattr(Tokenizer, "decode_bytes", counted)
    decoder = IncrementalDecoder(BYTES, stop_strings=["x" * 9, "aaab"])
    for _ in range(500):
        decoder.decode(97)
        assert len(decoder._buffer.held) < 9
    assert n == [1] * 500
    criterion = StopStringCriterion(BYTES, ["aaab"])
    n.clear()
    assert not any(criterion([97] * i) for i in range(500))
    assert max(n) < 30


def test_what_a_decoder_refuses():
    decoder = IncrementalDecoder(BYTES)
    assert decoder.decode("é".encode()[0]) == ""
    with pytest.raises(ValueError, match="id 999 is unknown"):
        decoder.decode([65, 999])
    assert decoder.decode("é".encode()[1]) == "é"  # nothing was lost by it
    decoder.finish()
    with pytest.raises(ValueError, match=r"finished.* a new IncrementalDecoder"):
        decoder.decode(65)


@plain_only
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("", "a stop string must hold a character.*empty"),
        (["a", ""], "a stop string must hold a character.*empty"),
        ([3], "a stop string must be a str, got int"),
        (b"end", "stop_strings must be .*got bytes b'end'"),
        (None, "stop_strings must be .*got NoneType"),
        (["\ud800"], "a stop string must be .*surrogate"),
    ],
)
def test_what_is_no_stop_string_is_refused(wrong, message):
    for call in (
        parse_stop_strings,
        partial(IncrementalDecoder, BYTES),
        partial(StopStringCriterion, BYTES),
        partial(cut_at_stop_string, "text"),
    ):
        with pytest.raises(ValueError, match=message):
            call(wrong)


@plain_only
def test_only_a_tokenizer_is_decoded_with():
    for kind in (IncrementalDecoder, StopStringCriterion):
        with pytest.raises(ValueError, match="tokenizer must be Tokenizer, got str"):
            kind("gpt2", "end")


def cut_by_hand(text, strings):
    "A text up to the first place at which one of the strings stands."
    for i in range(len(text)):
        if any(text[i : i + len(string)] == string for string in strings):
            return text[:i]
    return text


@pytest.mark.parametrize(
    ("text", "strings", "cut"),
    [
        ("aaab", ["aab"], "a"),  # overlaps itself
        ("xabcabd", ["abcabd"], "x"),
        ("abcabcabd", ["abcabd"], "abc"),
        ("the end", ["end", "the"], ""),
        ("a\n\nb", "\n\n", "a"),
        ("xabcd", ["bc", "abcd"], "x"),  # one inside another
        ("xabce", ["bc", "abcd"], "xa"),
        ("xabc", ["bc", "abcd"], "xa"),
        ("xaba", ["ab", "aba"], "x"),
        ("aé🐻b", ["🐻"], "aé"),  # split inside characters
        ("aé🐻b", ["é🐻b"], "a"),
        ("no stop", ["stops"], "no stop"),
        ("no stop", [], "no stop"),
        ("ab<|end|>c", "b<|", "a"),  # inside one token
    ],
)
def test_a_text_ends_before_a_stop_string(text, strings, cut):
    assert cut_at_stop_string(text, strings) == cut
    ids = BYTES.encode(text, allowed_special="all")
    for n in range(1, len(ids) + 1):
        decoder = IncrementalDecoder(BYTES, strings)
        portions = [ids[i : i + n] for i in range(0, len(ids), n)]
        assert "".join(pieces_of(decoder, portions)) == cut
        found = decoder.stop_string
        assert (found is None) == (cut == text)
        assert found is None or text.startswith(found, len(cut))
    assert text != "xaba" or found == "ab"  # the shorter of two at one place


def test_no_character_waits_that_cannot_begin_a_stop_string():
    decoder = IncrementalDecoder(BYTES, ["aab", "b!"])
    told = [decoder.decode(i) for i in b"xaaacaab"]
    assert told == ["x", "", "", "a", "aac", "", "", ""]
    assert decoder.stop_string == "aab"
    assert decoder.decode([65, 66]) == "" and decoder.finish() == ""
    waiting = IncrementalDecoder(BYTES, ["b!"])
    assert (waiting.decode(98), waiting.finish()) == ("", "b")
    split = IncrementalDecoder(BYTES, ["\ufffd"])  # of an incomplete character
    assert (split.decode(0xC3), split.finish()) == ("", "")
    assert split.stop_string == "\ufffd"


def test_the_beginning_of_a_stop_string_is_held_back():
    decoder = IncrementalDecoder(made([(b"a", b"b")]), ["aba"])
    assert [decoder.decode(i) for i in (98, 97, 98, 98)] == ["b", "", "", "abb"]


TINY = st.text("abé", min_size=1, max_size=4)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(data=st.data())
def test_stop_strings_are_cut_as_by_hand(data):
    merged = made([(b"a", b"b"), (b"ab", b"a"), (b"\xa9", b"a"), (b"b", b"\xc3")])
    ids = data.draw(st.lists(st.sampled_from([97, 98, 195, 169, *range(256, 260)])))
    strings = data.draw(st.lists(TINY, max_size=3))
    whole = merged.decode(ids)
    cut = cut_by_hand(whole, strings)
    assert cut_at_stop_string(whole, strings) == cut
    portions = [*in_portions(data, ids)]
    decoder = IncrementalDecoder(merged, strings)
    pieces = pieces_of(decoder, portions)
    assert "".join(pieces) == cut
    assert (decoder.stop_string is None) == (cut == whole)
    # what is held back is a beginning of a stop string, and nothing else is
    decoder = IncrementalDecoder(merged, strings)
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    seen = shown = ""
    for portion in portions:
        flat = portion if isinstance(portion, list) else [portion]
        seen += utf8.decode(merged.decode_bytes(flat))
        shown += decoder.decode(portion)
        assert cut.startswith(shown)
        if decoder.stop_string is None:
            held = seen.removeprefix(shown)
            assert shown + held == seen
            assert not held or any(s != held and s.startswith(held) for s in strings)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_criterion_ends_a_text_where_the_decoder_does(data):
    "Asked after each id about all ids, and remembering nothing."
    alphabet = [97, 98, 195, 169, 0x80, 0xF0, *[97, 98] * 3]
    ids = data.draw(st.lists(st.sampled_from(alphabet), max_size=60))
    strings = data.draw(st.lists(TINY | st.just("\ufffd"), max_size=2))
    criterion = StopStringCriterion(BYTES, strings)
    decoder = IncrementalDecoder(BYTES, strings)
    for n, i in enumerate(ids, 1):
        decoder.decode(i)
        assert criterion(ids[:n]) is (decoder.stop_string is not None)
        if decoder.stop_string is not None:
            break
    assert criterion([]) is False


@pytest.mark.parametrize("character", ["a", "é", "熊", "🐻"])
def test_the_criterion_looks_far_enough_back_and_no_further(character):
    "In a long text, at each id of it; half a character is not one that is invalid."
    text = ("x" + character * 4) * 9
    ids = BYTES.encode(text)
    half = StopStringCriterion(BYTES, ["\ufffd", "\ufffd" + character])
    assert not any(half(ids[:n]) for n in range(len(ids) + 1))
    long = StopStringCriterion(BYTES, ["q", character * 4 + "x" + character * 4])
    found = [n for n in range(len(ids) + 1) if long(ids[:n])]
    assert found[0] == len(("x" + character * 4).encode()) * 2
    apart = BYTES.encode("x" * 40 + character * 7 + "end")
    for n in range(1, 10):
        criterion = StopStringCriterion(BYTES, character * n + "end")
        assert criterion(apart) is (n < 8)


# ---- files


def test_save_and_load(tok, tmp_path):
    path = tmp_path / "t.json"
    tok.save(path)
    again = Tokenizer.load(path)
    assert again == tok and repr(again) == repr(tok)
    assert again.encode(SCRIPTS) == tok.encode(SCRIPTS)
    assert list(tmp_path.iterdir()) == [path]
    odd = made(
        [(b"a", b"\xff")],
        {"<x>": 9999},
        r"\w+|\W",
        {bytes([i]): 300 - i for i in range(256)} | {b"a\xff": 2},
    )
    odd.save(path)
    assert Tokenizer.load(path) == odd and len(odd) == 10000


def test_failed_save_keeps_the_old_file(tok, tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    tok.save(path)
    before = path.read_bytes()

    def full(*args):
        raise OSError("No space left on device")

    for owner, name in ((os, "fsync"), (os, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(OSError, match="No space"):
                made([]).save(path)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]


def test_damaged_files_are_refused(tok, tmp_path):
    path = tmp_path / "t.json"
    made(tok.vocab.merges[:40], SPECIAL).save(path)
    whole = path.read_text(encoding="utf-8")
    good = Tokenizer.load(path)
    for n in range(0, len(whole) - 1, 17):
        path.write_text(whole[:n], encoding="utf-8")
        with pytest.raises(ValueError, match=r"t\.json"):
            Tokenizer.load(path)
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        i = rng.randrange(len(whole))
        edited = whole[:i] + rng.choice('az0 ,"') + whole[i + 1 :]
        path.write_text(edited, encoding="utf-8")
        try:
            assert Tokenizer.load(path) == good  # only layout changed
        except ValueError as e:
            assert "t.json" in str(e)
            refused += 1
    assert refused > 200
    for bad in ("[]", "3", '{"format": "other"}', "\x00"):
        path.write_text(bad)
        with pytest.raises(ValueError, match=r"t\.json"):
            Tokenizer.load(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"t\.json"):
        Tokenizer.load(path)
    with pytest.raises(FileNotFoundError):
        Tokenizer.load(tmp_path / "none.json")


@pytest.mark.parametrize("pattern", [GPT2_PATTERN, r"\p{N}{1,3}|\P{N}+"])
def test_hf_round_trip(tok, tmp_path, pattern):
    path = tmp_path / "tokenizer.json"
    ours = made(tok.vocab.merges, SPECIAL, pattern)
    ours.to_hf(path)
    hf = tokenizers.Tokenizer.from_file(str(path))
    for case in (*CASES, NASTY):
        ids = ours.encode(case, allowed_special="all")
        assert hf.encode(case).ids == ids
        assert hf.decode(ids, skip_special_tokens=False) == case
    again = Tokenizer.from_hf(path)
    assert again == ours
    hf.save(str(path))
    assert Tokenizer.from_hf(path) == ours


def test_from_hf_trained_there(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    hf = tokenizers.Tokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.train_from_iterator(
        [text],
        trainers.BpeTrainer(
            vocab_size=900,
            special_tokens=["<pad>", "<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    hf.save(str(path))
    ours = Tokenizer.from_hf(path)
    assert ours.vocab.special_tokens == {"<pad>": 0, "<|end|>": 1}
    assert len(ours) == 900
    for case in (*CASES, "a<|end|>b<pad>"):
        ids = hf.encode(case).ids
        assert ours.encode(case, allowed_special="all") == ids
    body = json.loads(path.read_text())
    body["model"]["merges"] = [" ".join(m) for m in body["model"]["merges"]]
    path.write_text(json.dumps(body))
    assert Tokenizer.from_hf(path) == ours


def test_an_added_token_that_is_not_special_stays_so(tmp_path):
    "Hugging Face leaves such tokens in its answers, as the <think> of Qwen3."
    one, two, own = (tmp_path / f"{name}.json" for name in ("one", "two", "own"))
    made([], ["<|end|>", "<think>", "</think>"]).to_hf(one)
    hf = tokenizers.Tokenizer.from_file(str(one))
    hf.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    hf.save(str(one))
    body = json.loads(one.read_text())
    assert [token["special"] for token in body["added_tokens"]] == [True] * 3 + [False]
    body["added_tokens"][1]["special"] = False
    one.write_text(json.dumps(body))
    ours = Tokenizer.from_hf(one)
    assert ours != made([], ["<|end|>", "<think>", "</think>", "<tool>"])
    ours.save(own)
    for kept in (ours, Tokenizer.load(own), copy.deepcopy(ours)):
        kept.to_hf(two)
        assert json.loads(two.read_text())["added_tokens"] == body["added_tokens"]
        assert Tokenizer.from_hf(two) == ours == kept
    ids = ours.encode("a <think> b</think> <tool><|end|>", allowed_special="all")
    for path in (one, two):
        hf = tokenizers.Tokenizer.from_file(str(path))
        assert hf.decode(ids) == "a <think> b <tool>"
    ours.with_reserved_tokens(262).to_hf(two)
    hf = tokenizers.Tokenizer.from_file(str(two))
    assert hf.decode([*ids, 260, 261]) == "a <think> b <tool>"
    made([], ["<|end|>"]).save(own)  # as it was written before
    assert "nonspecial" not in own.read_text()


def test_only_special_tokens_can_be_left_in_answers():
    with pytest.raises(ValueError, match=r"\['<b>'\] are no special tokens"):
        Vocabulary([], ["<a>"], nonspecial_tokens=["<a>", "<b>"])


def change(body, where, value):
    *path, last = where.split("/")
    for key in path:
        body = body[int(key) if key.isdigit() else key]
    body[last] = value


@pytest.mark.parametrize(
    "where, value, names",
    [
        ("normalizer", {"type": "NFC"}, "normalizer.*NFC"),
        ("truncation", {"max_length": 4}, "truncation"),
        ("padding", {"strategy": "x"}, "padding"),
        ("post_processor", {"type": "TemplateProcessing"}, "TemplateProcessing"),
        ("decoder", {"type": "WordPiece"}, "decoder.*WordPiece"),
        ("pre_tokenizer", None, "pre_tokenizer"),
        ("pre_tokenizer", {"type": "Whitespace"}, "pre_tokenizer.*Whitespace"),
        (
            "pre_tokenizer",
            {"type": "Sequence", "pretokenizers": [{"type": "Digits"}]},
            "Digits",
        ),
        ("pre_tokenizer/add_prefix_space", True, "add_prefix_space"),
        ("pre_tokenizer/use_regex", False, "use_regex"),
        ("novelty", 1, "novelty"),
        ("model/novelty", 1, "novelty"),
        ("model/type", "Unigram", "Unigram"),
        ("model/dropout", 0.1, "dropout"),
        ("model/byte_fallback", True, "byte_fallback"),
        ("model/end_of_word_suffix", "</w>", "end_of_word_suffix"),
        ("added_tokens/0/lstrip", True, "lstrip"),
        ("added_tokens/0/id", 5, "5"),
        ("model/vocab/zzz", 77777, "zzz"),
        ("model/merges", [["a", "☃"]], "☃"),
        ("model/merges", [["zz", "a"]], "zz"),
        ("model", None, "merges"),
        ("model/merges", None, "tokenizer.json"),
        ("added_tokens", {"a": 1}, "tokenizer.json"),
    ],
)
def test_unknown_parts_are_refused_by_name(tmp_path, where, value, names):
    path = tmp_path / "tokenizer.json"
    made([(b"a", b"b")], ["<x>"]).to_hf(path)
    body = json.loads(path.read_text())
    change(body, where, value)
    path.write_text(json.dumps(body))
    with pytest.raises(ValueError, match=names):
        Tokenizer.from_hf(path)


def test_ignore_merges(tmp_path):
    path = tmp_path / "tokenizer.json"
    good = made([(b"a", b"b"), (b"ab", b"c")])
    good.to_hf(path)
    body = json.loads(path.read_text())
    body["model"]["ignore_merges"] = True
    path.write_text(json.dumps(body))
    assert Tokenizer.from_hf(path) == good
    # (b, c) comes first, so «abc» becomes a + bc and never «abc»
    bad = made([(b"b", b"c"), (b"a", b"b"), (b"ab", b"c")])
    bad.to_hf(path)
    assert Tokenizer.from_hf(path) == bad
    body = json.loads(path.read_text())
    body["model"]["ignore_merges"] = True
    path.write_text(json.dumps(body))
    with pytest.raises(ValueError, match="ignore_merges"):
        Tokenizer.from_hf(path)
    with pytest.raises(ValueError, match="tiktoken"):
        bad.to_tiktoken()


def test_tiktoken_both_ways(tok, tmp_path):
    import base64

    kwargs = tok.to_tiktoken()
    tik = tiktoken.Encoding("t", **kwargs)
    assert tik.n_vocab == len(tok) == tok.vocab_size
    again = Tokenizer.from_tiktoken(kwargs["mergeable_ranks"], kwargs["special_tokens"])
    assert again == tok
    path = tmp_path / "x.tiktoken"
    path.write_text(
        "".join(
            f"{base64.b64encode(t).decode()} {r}\n"
            for t, r in kwargs["mergeable_ranks"].items()
        )
    )
    assert Tokenizer.from_tiktoken(path, SPECIAL) == tok
    assert tok.to_tiktoken(tmp_path / "y.tiktoken") == kwargs
    assert (tmp_path / "y.tiktoken").read_bytes() == path.read_bytes()
    path.write_text("YQ== 1\n???\n")
    with pytest.raises(ValueError, match="line 2"):
        Tokenizer.from_tiktoken(path)
    ranks = {bytes([i]): i for i in range(256)}
    with pytest.raises(ValueError, match="3 tokens of lower rank"):
        Tokenizer.from_tiktoken(ranks | {b"abc": 256})
    with pytest.raises(ValueError, match="no id"):
        Tokenizer.from_tiktoken({b"a": 0})


def test_gpt2_layout(tok, tmp_path):
    "Bytes in GPT-2's order, merges from 256 on, as OpenAI published it."
    names = [bytes([b]) for b in GPT2_BYTE_ORDER] + [a + b for a, b in tok.vocab.merges]
    ours = made(
        tok.vocab.merges,
        {"<|endoftext|>": len(names)},
        ids={t: i for i, t in enumerate(names)},
    )
    assert ours.token_to_id("!") == 0 and ours.token_to_id(" ") == 220
    v = tmp_path / "vocab.json"
    m = tmp_path / "merges.txt"
    ours.to_gpt2(v, m)
    assert json.loads(v.read_text())["Ġ"] == 220
    assert Tokenizer.from_gpt2(v, m) == ours
    hf = tokenizers.Tokenizer(models.BPE.from_file(str(v), str(m)))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tik = tiktoken.Encoding("t", **ours.to_tiktoken())
    for case in CASES:
        ids = ours.encode(case)
        assert ids == hf.encode(case).ids == tik.encode_ordinary(case)
        assert ours.decode(ids) == case
    with pytest.raises(ValueError, match="endoftext"):
        Tokenizer.from_gpt2(v, m, special_tokens=())
    m.write_text("#version: 0.2\na b c\n")
    with pytest.raises(ValueError, match=r"merge 0 must join .* \(b'a', b'b', b'c'\)"):
        Tokenizer.from_gpt2(v, m)


def test_transformers_reads_the_export(tok, tmp_path):
    from transformers import PreTrainedTokenizerFast

    path = tmp_path / "tokenizer.json"
    tok.to_hf(path)
    fast = PreTrainedTokenizerFast(tokenizer_file=str(path))
    assert fast(NASTY)["input_ids"] == tok.encode(NASTY, allowed_special="all")


# ---- bad input

LONE = "ab\ud800cd"


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda t, p: t.train(p / "none.txt", 300), FileNotFoundError, "none"),
        (
            lambda t, p: t.train("It was a dark night", 300),
            FileNotFoundError,
            "put it in a list",
        ),
        (lambda t, p: t.train([str(p / "empty.txt")], 300), ValueError, "names a file"),
        (lambda t, p: t.train(p / "empty.txt", 300), ValueError, "is empty"),
        (lambda t, p: t.train(p, 300), OSError, "directory"),
        (
            lambda t, p: t.train(p / "latin1.txt", 300),
            ValueError,
            "latin1.txt is not UTF-8: byte 0xe9 at position 3",
        ),
        (
            lambda t, p: t.train(p / "cut.txt", 300),
            ValueError,
            "cut.txt is not UTF-8: byte 0xc3 at position 1",
        ),
        (
            lambda t, p: t.train(p / "latin1.txt", 300, num_workers=2),
            ValueError,
            "not UTF-8",
        ),
        (lambda t, p: t.train([], 300), ValueError, "no text"),
        (lambda t, p: t.train([""], 300), ValueError, "no text"),
        (lambda t, p: t.train([b"ab"], 300), ValueError, "bytes"),
        (lambda t, p: t.train([LONE], 300), ValueError, "surrogate"),
        (lambda t, p: t.train(["ab"], 255), ValueError, "at least 256 .* got 255"),
        (
            lambda t, p: t.train(["ab"], 257, special_tokens=["a", "b"]),
            ValueError,
            "2 special .* got 257",
        ),
        (
            lambda t, p: t.train(["ab"], 300, special_tokens=["a", "a"]),
            ValueError,
            "twice",
        ),
        (lambda t, p: t.train(["ab"], 300, special_tokens="<x>"), ValueError, "<x>"),
        (lambda t, p: t.train(["ab"], 300, special_tokens=[""]), ValueError, "empty"),
        (lambda t, p: t.train(["ab"], 300, tie_break="other"), ValueError, "other"),
        (
            lambda t, p: t.train(p / "none.txt", 300, tie_break="other"),
            ValueError,
            "tie_break must be one of 'bytes', 'ids', got 'other'",
        ),
        (lambda t, p: learn_merges({"ab": 1}, 1, "other"), ValueError, "other"),
        (
            lambda t, p: made(
                [
                    (b"a", b"b"),
                    (b"ab", b"c"),
                    (b"abc", b"d"),
                    (b"b", b"c"),
                    (b"a", b"bc"),
                ]
            ),
            ValueError,
            "merge 4 makes b'abc' again",
        ),
        (
            lambda t, p: t.train(["ab"], 300, num_workers=0),
            ValueError,
            "num_workers must be a whole number of at least 1, got 0",
        ),
        (lambda t, p: made([], ["a", "a"]), ValueError, "twice"),
        (
            lambda t, p: made([(b"ab", b"c")]),
            ValueError,
            r"merge 0 must join .*\(b'ab', b'c'\)",
        ),
        (lambda t, p: made([(b"a", b"b")] * 2), ValueError, "again"),
        (
            lambda t, p: made(
                [
                    (b"a", b"b"),
                    (b"ab", b"c"),
                    (b"b", b"c"),
                    (b"bc", b"d"),
                    (b"a", b"bc"),
                    (b"a", b"b"),
                ]
            ),
            ValueError,
            "again",
        ),
        (
            lambda t, p: made([], {"<x>": 65}),
            ValueError,
            r"ids must be distinct, got \[65\] twice",
        ),
        (
            lambda t, p: made([], {"<x>": -1}),
            ValueError,
            "id of '<x>' must be a whole number of at least 0, got -1",
        ),
        (lambda t, p: made([], ids={b"a": 0}), ValueError, "have no id"),
        (
            lambda t, p: made(
                [], ids={bytes([i]): i for i in range(256)} | {b"zz": 256}
            ),
            ValueError,
            "no merge makes.*zz",
        ),
        (
            lambda t, p: made([], {"<x>": 300.0}),
            ValueError,
            "id of '<x>' must be a whole number .* 300.0",
        ),
        (lambda t, p: t([(b"a", b"b")]), ValueError, "vocab must be Vocabulary"),
        (
            lambda t, p: t.train(["ab"], 300.0),
            ValueError,
            "vocab_size must be a whole number",
        ),
        (
            lambda t, p: t.train(["ab"], 300, num_workers=2.5),
            ValueError,
            "num_workers must be a whole number",
        ),
        (lambda t, p: t.train(b"ab", 300), ValueError, "source must be .*bytes"),
        (lambda t, p: t.train(3, 300), ValueError, "source must be .*int"),
        (
            lambda t, p: made([]).encode_iterable("corpus.txt"),
            ValueError,
            r"'corpus.txt'; write open\(path.*\[text\]",
        ),
        (
            lambda t, p: made([]).encode_iterable(p / "a.txt"),
            ValueError,
            r"a.txt.*; write open\(path",
        ),
        (
            lambda t, p: made([]).encode_batch(p / "a.txt"),
            ValueError,
            r"a.txt.*; write open\(path",
        ),
        (
            lambda t, p: made([]).encode_batch(["a"], num_workers=0),
            ValueError,
            "num_workers must be a whole number of at least 1, got 0",
        ),
        (lambda t, p: made([]).encode(LONE), ValueError, "character 2"),
        (
            lambda t, p: list(made([]).encode_iterable(["x", LONE])),
            ValueError,
            "surrogate",
        ),
        (lambda t, p: made([]).encode_batch([LONE]), ValueError, "surrogate"),
        (
            lambda t, p: made([]).encode_batch("text"),
            ValueError,
            r"'text'; write .*\[text\] for one text",
        ),
        (
            lambda t, p: made([], ["<x>"]).encode("a<x>"),
            ValueError,
            "special token '<x>'",
        ),
        (
            lambda t, p: made([], ["<x>"]).encode("a", allowed_special={"<y>"}),
            ValueError,
            "<y>",
        ),
        (
            lambda t, p: made([], ["<x>"]).encode("a", allowed_special="<x>"),
            ValueError,
            "a set of .*got '<x>'",
        ),
        (lambda t, p: made([]).token_to_id("zz"), ValueError, "zz"),
        (lambda t, p: made([]).id_to_bytes(256), ValueError, "256"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_input(call, error, message, tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin1.txt").write_bytes("caf\xe9 au lait".encode("latin1"))
    (tmp_path / "cut.txt").write_bytes("aé".encode()[:-1])
    with pytest.raises(error, match=message):
        call(Tokenizer, tmp_path)


def test_unreadable_file(tmp_path, monkeypatch):
    path = tmp_path / "locked.txt"
    path.write_text("ab")

    def locked(name, *args):
        raise PermissionError(13, "Permission denied", str(name))

    monkeypatch.setattr("builtins.open", locked)
    with pytest.raises(PermissionError, match=r"locked\.txt"):
        Tokenizer.train(path, 300, progress=False)


# ---- a good citizen


def test_pickle_and_equality(tok):
    tok.encode(SCRIPTS)
    raw = pickle.dumps(tok)
    again = pickle.loads(raw)
    assert again == tok and not again._encoder.pretoken_ids
    assert again.encode(SCRIPTS) == tok.encode(SCRIPTS)
    assert tok != made(tok.vocab.merges) and tok != 3
    assert tok != made(tok.vocab.merges, SPECIAL, r"\w+|\W")
    assert "1500" in repr(tok)


def test_threads(tok, text):
    fresh = pickle.loads(pickle.dumps(tok))
    fresh._encoder.pretoken_ids.limit = 50  # so that it is emptied all the time
    parts = [text[i : i + 5000] for i in range(0, 40_000, 5000)]
    right = [tok.encode(p, disallowed_special=()) for p in parts]
    wrong = []

    def work(k):
        for i in range(len(parts)):
            j = (i + k) % len(parts)
            if fresh.encode(parts[j], disallowed_special=()) != right[j]:
                wrong.append(j)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and len(fresh._encoder.pretoken_ids) <= 56


@pytest.mark.nightly
def test_benchmark_runs(tmp_path):
    out = subprocess.run(
        [sys.executable, "-m", "tests.bench.bench_tokenizer", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert out.returncode == 0, out.stderr
    for word in ("training", "hard case", "tiktoken", "processes", "extrapolat"):
        assert word in out.stdout


def test_special_tokens_have_an_order():
    with pytest.raises(ValueError, match="must be list or tuple, got set"):
        made([], {"<a>", "<b>"})
    with pytest.raises(ValueError, match="must be list or tuple, got set"):
        Tokenizer.train(["some text"], 300, special_tokens={"<a>", "<b>"})


def test_a_token_and_a_special_token_that_read_the_same(tmp_path):
    tokenizer = made([(b"t", b"h")], ["th"])
    ids = tokenizer.encode("the th", allowed_special="all")
    assert ids == [257, 101, 32, 257]  # the special token wins
    for write in (
        lambda: tokenizer.to_hf(tmp_path / "t.json"),
        lambda: tokenizer.to_gpt2(tmp_path / "v", tmp_path / "m"),
    ):
        with pytest.raises(ValueError, match="'th' is a token and a special"):
            write()
    assert not list(tmp_path.iterdir())


def test_files_that_lack_a_part_or_repeat_one(tmp_path):
    path = tmp_path / "t.json"
    made([(b"t", b"h")]).save(path)
    body = json.loads(path.read_text(encoding="utf-8"))
    del body["merges"], body["checksum"]
    body["checksum"] = _checksum(body)
    path.write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(ValueError, match=r"cannot read .*t\.json: KeyError: 'merges'"):
        Tokenizer.load(path)
    ranks = tmp_path / "r.tiktoken"
    ranks.write_text("YQ== 0\nYQ== 1\n", encoding="ascii")
    with pytest.raises(ValueError, match="line 2"):
        Tokenizer.from_tiktoken(ranks)


def test_there_and_back_through_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer.train(
        ["low lower lowest newer new"] * 5, 270, special_tokens=["<|endoftext|>"]
    )
    ours.to_hf(tmp_path / "tokenizer.json")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json")
    )
    text = "the lowest is newer, naïve"
    assert theirs(text)["input_ids"] == ours.encode(text)
    theirs.save_pretrained(tmp_path / "saved")
    back = Tokenizer.from_hf(tmp_path / "saved" / "tokenizer.json")
    assert back == ours


def test_packed_ids_survive_gaps_and_pickling():
    tokenizer = made([(b"t", b"h")], {"<a>": 70_000})
    texts = ["the th<a>x", "", "<a><a>", "naïve"] * 3
    one = tokenizer.encode_batch(texts, allowed_special="all")
    assert one[0] == [256, 101, 32, 256, 70_000, 120]
    assert one == tokenizer.encode_batch(texts, allowed_special="all", num_workers=2)
    batch = _ParallelBatch(tokenizer._encoder, texts, frozenset(["<a>"]))
    again = pickle.loads(pickle.dumps(batch))
    assert batch.dtype == np.uint32
    packed = np.array(one[0] + one[1] + one[2], np.uint32).tobytes()
    for one_of in (batch, again):
        assert one_of(range(3)) == (packed, [6, 0, 2])
    assert [*batch.spans(5)] == [
        range(0, 1),
        range(1, 3),
        range(3, 4),
        range(4, 5),
        range(5, 7),
        range(7, 8),
        range(8, 9),
        range(9, 11),
        range(11, 12),
    ]


def test_a_file_is_encoded_as_it_is_read(tok, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\n\r\ntwo the")
    whole = tok.encode("one\r\n\r\ntwo the")
    with open(path, encoding="utf-8", newline="") as file:
        assert list(tok.encode_iterable(file)) == whole
    assert list(tok.encode_iterable(read_text_chunks(path))) == whole


def test_what_a_tokenizer_passes_on_reads_like_its_own():
    for name in ("encode", "encode_batch", "encode_iterable"):
        ours, part = (getattr(c, name) for c in (Tokenizer, Encoder))
        assert inspect.signature(ours) == inspect.signature(part)
        assert ours.__doc__ == part.__doc__
    assert Tokenizer.decode.__doc__ == Vocabulary.decode.__doc__
    assert Tokenizer.__mro__ == (Tokenizer, object)


def test_a_vocabulary_stands_alone(tok):
    vocab = tok.vocab
    assert Tokenizer(vocab) == tok and vocab != 3
    assert vocab == vocabulary_from_dict(vocabulary_to_dict(vocab))
    assert vocab != Vocabulary(vocab.merges)
    assert vocab.decode(tok.encode("été")) == "été"
    assert vocabulary_from_hf(vocabulary_to_hf(vocab)) == vocab
    assert vocabulary_from_gpt2(*vocabulary_to_gpt2(vocab), SPECIAL) == vocab
    ranks = vocabulary_to_tiktoken(vocab)
    assert vocabulary_from_tiktoken(ranks["mergeable_ranks"], SPECIAL) == vocab
