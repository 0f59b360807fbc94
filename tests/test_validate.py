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

from helpers import says
from tformer import validate

quick = settings(max_examples=100, deadline=None, derandomize=True)
SCORES = 2, 4, 5, 5  # b, h, t, s


def takes(validator, *args, **kwargs):
    "Whether a validator lets something through; it returns nothing then."
    try:
        return validator(*args, **kwargs) is None
    except ValueError:
        return False


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
    assert not takes(validate.integer, n=value)
    assert not takes(validate.integer, fine=1, n=value)


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
    assert takes(validate.number, f"{left}{low}, {high}{right}", x=value) == inside


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
    assert not takes(validate.number, interval, x=value)


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
    assert not takes(validate.one_of, options, x=value)


def test_a_sentence_of_ones_own():
    validate.require(True, "never said")
    validate.require([0], "never said")
    for wrong in (False, None, 0, (), ""):
        with says("3 is not below 2"):
            validate.require(wrong, "3 is not below 2")


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


def test_a_type_of_tensors():
    validate.torch_dtype(dtype=torch.bfloat16, other=torch.int64)
    known = "dtype must be a torch.dtype such as torch.float32"
    with says(f"{known}, got 'bfloat16': write torch.bfloat16"):
        validate.torch_dtype(dtype="bfloat16")
    for value in ("bf61", "nn", None, 16, torch.Tensor):
        with says(f"{known}, got {value!r}"):
            validate.torch_dtype(dtype=value)


def test_a_device_that_is_there():
    for value in ("cpu", "meta", torch.device("cpu")):
        validate.usable_device(device=value)
    for value in ("gpu", "", None, 2.5):
        with says(
            "device must be a device that PyTorch knows, such as 'cpu' or 'cuda', "
            f"got {value!r}"
        ):
            validate.usable_device(device=value)
    with says(
        "device must be a device of this machine, and PyTorch finds no 'cuda:99'"
    ):
        validate.usable_device(device="cuda:99")


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


# shapes

sizes = st.tuples(*3 * [st.integers(1, 4)])


@quick
@given(sizes, sizes)
def test_the_same_letter_is_the_same_number(a, b):
    x = torch.zeros(a)
    y = torch.zeros(b)
    assert takes(validate.shapes, x=(x, "b t d"), y=(y, "b s d")) == (
        a[0] == b[0] and a[2] == b[2]
    )
    assert takes(validate.shapes, x=(x, "b t d"), y=(y, "#b s #d")) == all(
        b[i] in (1, a[i]) for i in (0, 2)
    )
    assert takes(validate.shapes, x=(x, "*b d"), y=(y, "*b e")) == (a[:2] == b[:2])
    assert takes(validate.shapes, x=(x, "b d d")) == (a[1] == a[2])
    assert takes(validate.shapes, x=(x, "b 3 d")) == (a[1] == 3)


@quick
@given(sizes, sizes, sizes)
def test_shapes_as_broadcasting_has_them(a, b, c):
    "Patterns of # agree exactly when PyTorch can broadcast."
    named = dict(zip("xyz", (torch.zeros(s) for s in (a, b, c)), strict=True))
    try:
        torch.broadcast_shapes(a, b, c)
        fit = True
    except RuntimeError:
        fit = False
    assert (
        takes(validate.shapes, **{n: (x, "#b #t #d") for n, x in named.items()}) == fit
    )


@quick
@given(
    st.lists(st.integers(1, 3), max_size=5),
    st.lists(st.sampled_from(["b", "t", "2"]), max_size=4),
)
def test_the_number_of_axes_counts(shape, axes):
    x = torch.zeros(shape)
    pattern = " ".join(axes)
    assume(pattern)
    if len(shape) != len(axes):
        assert not takes(validate.shapes, x=(x, pattern))
    if len(shape) < len(axes):
        assert not takes(validate.shapes, x=(x, f"*many {pattern}"))
    loose = " ".join(f"a{i}" for i, _ in enumerate(axes))
    assert takes(validate.shapes, x=(x, f"*many {loose}")) == (len(shape) >= len(axes))


def test_none_has_any_shape():
    validate.shapes(x=(None, "b t"), y=(torch.zeros(2, 3), "b t"))
    with pytest.raises(ValueError, match=r"^z must"):
        validate.shapes(
            y=(torch.zeros(2, 3), "b t"), x=(None, "b t"), z=(torch.zeros(2, 4), "b t")
        )


def test_the_sentence_about_shapes():
    x = torch.zeros(2, 5, 16)
    ids = torch.zeros(2, 4).long()
    validate.shapes(x=(x, "b t 16"), pos=(torch.zeros(1, 5), "#b t"))
    with says("x must be of shape (b, t, 32), got (2, 5, 16)"):
        validate.shapes(x=(x, "b t 32"))
    with says("pos must be of shape (1 or 2, 5) to fit x (2, 5, 16), got (2, 4)"):
        validate.shapes(x=(x, "b t 16"), pos=(ids, "#b t"))
    with says(
        "k must be of shape (2, 5, s, 3) to fit q (2, 5, 16, 3), got (2, 6, 16, 3)"
    ):
        validate.shapes(
            q=(x[..., None].expand(2, 5, 16, 3), "*b t d"),
            k=(torch.zeros(2, 6, 16, 3), "*b s d"),
        )
    with says("x must be of shape (…, t, 8), got (16,)"):
        validate.shapes(x=(x[0, 0], "*b t 8"))
    with says("y must be of shape (2, d) to fit a (1, 3), x (2, 4), got (3, 3)"):
        validate.shapes(
            a=(torch.zeros(1, 3), "#b s"),
            x=(torch.zeros(2, 4), "b t"),
            y=(torch.zeros(3, 3), "b d"),
        )


# what tensors hold


def test_floating_types():
    x = torch.zeros(2)
    validate.floating_tensors(x=x, y=x[:1])
    validate.floating_tensors(x=x.half())
    with says("x must have a floating type, got x torch.int64"):
        validate.floating_tensors(x=x.long())
    with says("q, k must have one floating type, got q torch.float32, k torch.float64"):
        validate.floating_tensors(q=x, k=x.double())
    assert not takes(validate.floating_tensors, q=x, k=x.long())
    assert not takes(validate.floating_tensors, q=x.bool(), k=x.bool())


def test_integer_types():
    x = torch.zeros(2)
    validate.integer_tensors(ids=x.long(), rows=x.int(), bytes=x.to(torch.uint8))
    with says("ids must be integers, got torch.float32"):
        validate.integer_tensors(ids=x)
    with says("ids must be integers, got torch.bool"):
        validate.integer_tensors(fine=x.long(), ids=x.bool())


def test_positions():
    positions = torch.arange(5)[None]
    validate.position_tensors(positions=positions, key_positions=positions.expand(3, 5))
    validate.position_tensors(
        positions=positions.expand(3, 5), key_positions=positions[:, :2].expand(3, 2)
    )
    with says(
        "positions must be int64 of shape (b, length), got torch.int64 of shape (5,)"
    ):
        validate.position_tensors(positions=positions[0])
    with says(
        "key_positions must be int64 of shape (b, length), got torch.int32 of "
        "shape (1, 5)"
    ):
        validate.position_tensors(positions=positions, key_positions=positions.int())
    with says("batch sizes differ: {'positions': 2, 'key_positions': 3}"):
        validate.position_tensors(
            positions=positions.expand(2, 5), key_positions=positions.expand(3, 5)
        )


# masks


@quick
@given(
    st.lists(st.sampled_from([1, 2, 3]), max_size=5),
    st.lists(st.sampled_from([1, 2, 3]), min_size=2, max_size=4),
)
def test_masks_and_biases_broadcast_as_torch_has_it(size, shape):
    "What is taken can be added to scores without making them larger."
    x = torch.ones(size)
    scores = torch.zeros(shape)
    try:
        fits = (scores + x).shape == scores.shape
    except RuntimeError:
        fits = False
    assert takes(validate.mask_and_bias, tuple(shape), bias=x) == fits
    unclear = len(shape) == 4 and len(size) in (2, 3)
    assert takes(validate.mask_and_bias, tuple(shape), x.bool()) == (
        fits and not unclear
    )


@pytest.mark.parametrize(
    "mask, bias, sentence",
    [
        (
            torch.ones(2, 5).bool(),
            None,
            "a mask of shape (2, 5) could mean two things for scores of shape (2, "
            "4, 5, 5); write all axes: mask[:, None, None] for one row for each "
            "text (b, s), mask[None, None] for one row for each query (t, s)",
        ),
        (
            torch.ones(2, 5, 5).bool(),
            None,
            "a mask of shape (2, 5, 5) could mean two things for scores of shape "
            "(2, 4, 5, 5); write all axes: mask[:, None] for all heads",
        ),
        (
            torch.ones(2, 1, 1, 4).bool(),
            None,
            "a mask of shape (2, 1, 1, 4) does not broadcast to scores of shape "
            "(2, 4, 5, 5)",
        ),
        (
            torch.zeros(2, 1, 5, 5),
            None,
            "a mask is boolean, True = may attend, got torch.float32; numbers to "
            "add are a bias",
        ),
        (
            torch.zeros(2, 5).long(),
            None,
            "a mask is boolean, True = may attend, got torch.int64; 0 and 1 per "
            "key become one by mask.bool()[:, None, None]",
        ),
        (
            None,
            torch.ones(5, 5).bool(),
            "a bias is a floating tensor, got torch.bool; booleans that allow or "
            "forbid are a mask",
        ),
        (
            None,
            torch.ones(3, 1, 1),
            "a bias of shape (3, 1, 1) does not broadcast to scores of shape (2, "
            "4, 5, 5)",
        ),
    ],
)
def test_masks_that_are_refused(mask, bias, sentence):
    with says(sentence):
        validate.mask_and_bias(SCORES, mask, bias)


def test_masks_that_are_taken():
    validate.mask_and_bias(SCORES)
    validate.mask_and_bias(SCORES, torch.ones(2, 1, 1, 5).bool(), torch.zeros(5, 5))
    validate.mask_and_bias(SCORES, torch.ones(5).bool(), torch.zeros(4, 1, 5).half())
    validate.mask_and_bias((5, 6), torch.ones(5, 6).bool())
    validate.mask_and_bias((2, 5, 6), torch.ones(5, 6).bool())


@pytest.mark.parametrize("kind", [list, np.ndarray])
def test_only_tensors_are_tensors(kind):
    x = np.ones((1, 2, 3, 4), np.float32)
    mask = np.ones((3, 3), bool)
    positions = np.arange(3)[None]
    if kind is list:
        x, mask, positions = (a.tolist() for a in (x, mask, positions))
    tensor = torch.ones(1, 2, 3, 4)
    for name, call in (
        ("positions", lambda: validate.position_tensors(positions=positions)),
        ("mask", lambda: validate.mask_and_bias((3, 3), mask)),
        ("bias", lambda: validate.mask_and_bias((3, 3), None, x)),
        ("q", lambda: validate.attention_inputs(x, tensor, tensor)),
        ("k", lambda: validate.attention_inputs(tensor, x, tensor)),
        ("v", lambda: validate.attention_inputs(tensor, tensor, x)),
        ("mask", lambda: validate.attention_inputs(tensor, tensor, tensor, mask)),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be Tensor, got "):
            call()


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


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "q, k, v, problem",
    [
        ((1, 2, 3, 8), (1, 2, 3, 6), (1, 2, 3, 8), "k must be of shape"),
        ((1, 2, 3, 8), (1, 2, 4, 8), (1, 2, 3, 8), "v must be of shape"),
        ((1, 2, 3, 8), (3, 2, 3, 8), (3, 2, 3, 8), "k must be of shape"),
        ((1, 3, 3, 8), (1, 2, 3, 8), (1, 2, 3, 8), "k|key heads|n_kv_heads|kv"),
        ((5, 3, 8), (5, 8), (5, 8), "k must be of shape|q must be of shape"),
    ],
)
def test_no_quick_look_lets_attention_pass(q, k, v, problem, shared):
    with pytest.raises(ValueError, match=problem):
        validate.attention_inputs(*map(torch.zeros, (q, k, v)), allow_gqa=shared)


@pytest.mark.parametrize(
    "types",
    [
        (torch.float32, torch.float64, torch.float32),
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.int64, torch.int64, torch.int64),
    ],
)
def test_no_quick_look_lets_types_pass(types):
    with pytest.raises(ValueError, match="float"):
        validate.attention_inputs(
            *(torch.zeros(1, 2, 3, 8, dtype=t) for t in types), allow_gqa=True
        )


def test_right_rows_are_not_printed(monkeypatch):
    "To print a tensor of a GPU would wait for it."
    rows = torch.tensor([0, 2])

    def refuse(tensor, **kwargs):
        raise AssertionError("a tensor is printed")

    monkeypatch.setattr(torch.Tensor, "__repr__", refuse)
    validate.row_indices(3, rows=rows)
