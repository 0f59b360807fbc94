"""What arguments have to be: each function, its sentence, and what it takes."""

import json
import math
from dataclasses import asdict, dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers import accepts, says
from tformer.base import validate

quick = settings(max_examples=100, deadline=None, derandomize=True)


# whole


@pytest.mark.parametrize("value", [1, 4, 10**30, np.int64(4), np.uint8(4)])
def test_whole_numbers(value):
    validate.integer(n=value)


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        np.True_,
        4.0,
        np.float64(4),
        2.5,
        "4",
        b"4",
        None,
        torch.tensor(4),
        np.array(4),
        [4],
        0,
        -1,
        np.int64(0),
        math.nan,
    ],
)
def test_what_is_no_whole_number(value):
    assert not accepts(validate.integer, n=value)
    assert not accepts(validate.integer, fine=1, n=value)


def test_whole_from_another_number_on():
    validate.integer(0, n=0)
    validate.integer(-1, n=-1, m=np.int32(0))
    with says("n_heads must be a whole number of at least 1, got True"):
        validate.integer(n_heads=True)
    with says("past must be a whole number of at least 0, got -1"):
        validate.integer(0, tokens=3, past=-1)
    with says("rows must be a whole number of at least 2, got 2.0"):
        validate.integer(2, rows=2.0)


# number

ends = st.integers(-20, 20).map(lambda n: n / 4)


@quick
@given(
    ends,
    ends,
    st.sampled_from("[("),
    st.sampled_from("])"),
    st.sampled_from([int, float, Fraction, np.float32, np.float64]),
    st.data(),
)
def test_a_number_lies_in_its_interval(low, high, left, right, kind, data):
    assume(low < high)
    value = kind(data.draw(st.sampled_from([low, high, (low + high) / 2]) | ends))
    inside = (low <= value if left == "[" else low < value) and (
        value <= high if right == "]" else value < high
    )
    assert accepts(validate.number, f"{left}{low}, {high}{right}", x=value) == inside


@pytest.mark.parametrize("interval", ["(-inf, inf)", "(0, inf)", "[0, 1]"])
@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        np.float32("nan"),
        True,
        np.True_,
        "0.5",
        None,
        0.5j,
        Decimal("0.5"),
        torch.tensor(0.5),
        [0.5],
    ],
)
def test_what_is_a_number_in_no_interval(interval, value):
    assert not accepts(validate.number, interval, x=value)


@pytest.mark.parametrize(
    "interval, value, sentence",
    [
        ("[0, 1)", 1.0, "x must be at least 0 and below 1, got 1.0"),
        ("(0, 1]", 0, "x must be above 0 and at most 1, got 0"),
        ("(0, inf)", -2.5, "x must be above 0, got -2.5"),
        ("[0, inf)", math.nan, "x must be at least 0, got nan"),
        ("(-inf, 2)", 2, "x must be below 2, got 2"),
        ("(-inf, 2]", "1", "x must be at most 2, got '1', a str and no number"),
        (
            "[0, 1]",
            True,
            "x must be at least 0 and at most 1, got True, a bool and no number",
        ),
        ("(0, inf)", math.inf, "x must be above 0, got inf, no finite number"),
        ("(-inf, inf)", math.inf, "x must be a finite number, got inf"),
    ],
)
def test_the_sentence_about_a_number(interval, value, sentence):
    with says(sentence):
        validate.number(interval, fine=0.5, x=value)


# choice, that, kind


def test_one_of_a_few():
    validate.one_of(("half", "interleaved"), layout="half")
    validate.one_of((True, False), tied=False)
    validate.one_of({"a": 1, "b": 2}, key="b", other="a")
    with says("layout must be one of 'half', 'interleaved', got 'halves'"):
        validate.one_of(("half", "interleaved"), layout="halves")
    with says("tied must be one of True, False, got 1"):
        validate.one_of((True, False), tied=1)


@pytest.mark.parametrize(
    "options, value",
    [
        ((True, False), 0),
        ((True, False), np.True_),
        ((1, 2), True),
        ((1, 2), 1.0),
        (("a",), None),
        (("a",), ["a"]),
        (("a",), "A"),
        ((), "a"),
    ],
)
def test_equal_is_not_enough_for_a_choice(options, value):
    assert not accepts(validate.one_of, options, x=value)


def test_a_sentence_of_ones_own():
    validate.require(True, "never said")
    validate.require([0], "never said")
    for wrong in (False, None, 0, (), ""):
        with says("3 is not below 2"):
            validate.require(wrong, "3 is not below 2")


def test_an_object_with_attributes():
    validate.has_attributes(("real", "imag"), a=1, b=2.0)
    validate.has_attributes((), a=None)
    with says("b must have imag, got str"):
        validate.has_attributes(("imag",), a=1, b="")
    with says("x must have real, got the class int"):
        validate.has_attributes(("real",), x=int)


def test_an_instance_of_a_class():
    validate.instance_of(str, a="", b="text")
    validate.instance_of((str, Path), path=Path("."))
    validate.instance_of(int, n=True)  # as isinstance has it
    with says("text must be str, got bytes b'bytes'"):
        validate.instance_of(str, text=b"bytes")
    with says("path must be str or Path, got int 3"):
        validate.instance_of((str, Path), path=3)
    with says("model must be Linear, got the class Linear itself"):
        validate.instance_of(torch.nn.Linear, model=torch.nn.Linear)
    twin = type("Linear", (), {"__module__": "a.b"})()
    with says("model must be Linear of torch.nn.modules.linear, got Linear of a.b"):
        validate.instance_of((torch.nn.Linear), model=twin)
    with says("x must be str or Linear of a.b, got Linear of torch.nn.modules.linear"):
        validate.instance_of((str, type(twin)), x=torch.nn.Linear(1, 1))
    with pytest.raises(ValueError) as refused:  # a value may be long
        validate.instance_of(int, x="-" * 10_000)
    assert len(str(refused.value)) < 100


# fields


@dataclass(frozen=True, kw_only=True)
class Config:
    d_model: int
    d_ff: int | None = None
    dropout: float = 0.0
    eps: float = 1e-5
    rope_theta: float | None = None
    slope: float = -1.0
    tied: bool = False
    name: str = "model"
    anything: object = None

    def __post_init__(self):
        validate.config_fields(self)


def test_fields_of_numpy_become_json():
    config = Config(
        d_model=np.int64(64),
        d_ff=np.int32(256),
        dropout=np.float32(0.5),
        eps=np.float64(1e-6),
        rope_theta=np.int64(10_000),
        slope=2,
        name=np.str_("a"),
    )
    for value, kind in zip(
        asdict(config).values(),
        (int, int, float, float, float, float, bool, str, type(None)),
        strict=True,
    ):
        assert type(value) is kind
    assert json.loads(json.dumps(asdict(config))) == dict(
        d_model=64,
        d_ff=256,
        dropout=0.5,
        eps=1e-6,
        rope_theta=10_000.0,
        slope=2.0,
        tied=False,
        name="a",
        anything=None,
    )


def test_fields_that_may_be_none():
    config = Config(d_model=4, anything={1, 2})
    assert config.d_ff is None and config.rope_theta is None
    assert config.anything == {1, 2}  # nothing is known of it
    for name in ("d_model", "dropout", "tied", "name"):
        with pytest.raises(ValueError, match=f"^{name} must .* got None"):
            Config(**{"d_model": 4, name: None})


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        (dict(d_model=True), "d_model must be a whole number of at least 1, got True"),
        (dict(d_model=64.0), "d_model must be a whole number of at least 1, got 64.0"),
        (dict(d_ff=0), "d_ff must be a whole number of at least 1, got 0"),
        (dict(dropout=1), "dropout must be at least 0 and below 1, got 1"),
        (dict(dropout=-0.1), "dropout must be at least 0 and below 1, got -0.1"),
        (dict(eps=0.0), "eps must be above 0 and below 1, got 0.0"),
        (dict(rope_theta=0), "rope_theta must be above 0, got 0"),
        (dict(slope=math.nan), "slope must be a finite number, got nan"),
        (dict(tied=1), "tied must be one of True, False, got 1"),
        (dict(tied="no"), "tied must be one of True, False, got 'no'"),
        (dict(name=b"a"), "name must be str, got bytes b'a'"),
    ],
)
def test_fields_are_what_their_annotations_say(wrong, sentence):
    with says(sentence):
        Config(**{"d_model": 64} | wrong)


# heads


def test_heads_share_evenly():
    validate.head_sizes(d_model=64, n_heads=8)
    validate.head_sizes(d_model=64, n_heads=np.int64(8), n_kv_heads=np.int64(2))
    validate.head_sizes(d_model=64, n_heads=5, d_head=16, d_v=3)
    with says(
        "d_model 64 is no multiple of n_heads 5: change one of them, or give d_head"
    ):
        validate.head_sizes(d_model=64, n_heads=5)
    with says("8 query heads cannot share 3 key heads: n_kv_heads must divide n_heads"):
        validate.head_sizes(d_model=64, n_heads=8, n_kv_heads=3)
    with pytest.raises(ValueError, match=r"8 query heads .* 16 key heads"):
        validate.head_sizes(d_model=64, n_heads=8, n_kv_heads=16)


@pytest.mark.parametrize("name", ["d_model", "n_heads", "n_kv_heads", "d_head", "d_v"])
@pytest.mark.parametrize("value", [0, 2.0, True])
def test_heads_are_whole_numbers(name, value):
    with says(f"{name} must be a whole number of at least 1, got {value}"):
        validate.head_sizes(**{"d_model": 8, "n_heads": 2, name: value})


# texts and files


@quick
@given(st.text(st.characters(codec="utf-8")))
def test_what_utf8_can_write_is_text(value):
    validate.utf8_string(a="fine", text=value)


@quick
@given(st.text(), st.integers(0xD800, 0xDFFF).map(chr), st.text())
def test_lone_surrogates_are_no_text(before, half, after):
    with pytest.raises(ValueError, match=r"^b must be what UTF-8 can write"):
        validate.utf8_string(a="fine", b=before + half + after)


@pytest.mark.parametrize(
    "value, sentence",
    [
        (
            "a \ud83d",
            "text must be what UTF-8 can write: character 2 is "
            "'\\ud83d', a lone surrogate",
        ),
        (b"bytes", "text must be a str, got bytes (decode bytes first)"),
        (None, "text must be a str, got NoneType"),
        (["a"], "text must be a str, got list"),
    ],
)
def test_the_sentence_about_a_text(value, sentence):
    with says(sentence):
        validate.utf8_string(text=value)
