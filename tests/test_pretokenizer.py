"""Pre-tokens, and the places where a text may be cut."""

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from tformer.text import bpe
from tformer.text.bpe import GPT2_PATTERN
from tformer.text.pretokenizer import SAFE_SPLITS, split_pretokens


@pytest.mark.nightly
def test_split_words_on_every_code_point():
    points = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    for low in range(0, len(points), 60_000):
        text = "".join(f"a{c}1{c} {c}" for c in points[low : low + 60_000])
        assert split_pretokens(text) == regex.findall(GPT2_PATTERN, text)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.text(
        st.one_of(
            st.sampled_from("slab'.1 \n\t\r\u00a0é½𝒜"),
            st.characters(exclude_categories=["Cs"]),
        ),
        max_size=30,
    )
)
def test_split_words_and_safe_cuts(text):
    words = split_pretokens(text)
    assert words == bpe.pretokenize_text(text)
    safe = SAFE_SPLITS[GPT2_PATTERN].pattern.replace("(?r)", "")
    for cut in (m.start() for m in regex.finditer(safe, text)):
        assert split_pretokens(text[:cut]) + split_pretokens(text[cut:]) == words
