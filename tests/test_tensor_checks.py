"""What tensors have to be: each function, its sentence, and what it takes."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers import accepts, says
from tformer.nn import tensor_checks

quick = settings(max_examples=100, deadline=None, derandomize=True)
SCORES = 2, 4, 5, 5  # b, h, t, s


# shapes

sizes = st.tuples(*3 * [st.integers(1, 4)])


@quick
@given(sizes, sizes)
def test_the_same_letter_is_the_same_number(a, b):
    x = torch.zeros(a)
    y = torch.zeros(b)
    assert accepts(tensor_checks.shapes, x=(x, "b t d"), y=(y, "b s d")) == (
        a[0] == b[0] and a[2] == b[2]
    )
    assert accepts(tensor_checks.shapes, x=(x, "b t d"), y=(y, "#b s #d")) == all(
        b[i] in (1, a[i]) for i in (0, 2)
    )
    assert accepts(tensor_checks.shapes, x=(x, "*b d"), y=(y, "*b e")) == (
        a[:2] == b[:2]
    )
    assert accepts(tensor_checks.shapes, x=(x, "b d d")) == (a[1] == a[2])
    assert accepts(tensor_checks.shapes, x=(x, "b 3 d")) == (a[1] == 3)


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
        accepts(tensor_checks.shapes, **{n: (x, "#b #t #d") for n, x in named.items()})
        == fit
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
        assert not accepts(tensor_checks.shapes, x=(x, pattern))
    if len(shape) < len(axes):
        assert not accepts(tensor_checks.shapes, x=(x, f"*many {pattern}"))
    loose = " ".join(f"a{i}" for i, _ in enumerate(axes))
    assert accepts(tensor_checks.shapes, x=(x, f"*many {loose}")) == (
        len(shape) >= len(axes)
    )


def test_none_has_any_shape():
    tensor_checks.shapes(x=(None, "b t"), y=(torch.zeros(2, 3), "b t"))
    with pytest.raises(ValueError, match=r"^z must"):
        tensor_checks.shapes(
            y=(torch.zeros(2, 3), "b t"), x=(None, "b t"), z=(torch.zeros(2, 4), "b t")
        )


def test_the_sentence_about_shapes():
    x = torch.zeros(2, 5, 16)
    ids = torch.zeros(2, 4).long()
    tensor_checks.shapes(x=(x, "b t 16"), pos=(torch.zeros(1, 5), "#b t"))
    with says("x must be of shape (b, t, 32), got (2, 5, 16)"):
        tensor_checks.shapes(x=(x, "b t 32"))
    with says("pos must be of shape (1 or 2, 5) to fit x (2, 5, 16), got (2, 4)"):
        tensor_checks.shapes(x=(x, "b t 16"), pos=(ids, "#b t"))
    with says(
        "k must be of shape (2, 5, s, 3) to fit q (2, 5, 16, 3), got (2, 6, 16, 3)"
    ):
        tensor_checks.shapes(
            q=(x[..., None].expand(2, 5, 16, 3), "*b t d"),
            k=(torch.zeros(2, 6, 16, 3), "*b s d"),
        )
    with says("x must be of shape (…, t, 8), got (16,)"):
        tensor_checks.shapes(x=(x[0, 0], "*b t 8"))
    with says("y must be of shape (2, d) to fit a (1, 3), x (2, 4), got (3, 3)"):
        tensor_checks.shapes(
            a=(torch.zeros(1, 3), "#b s"),
            x=(torch.zeros(2, 4), "b t"),
            y=(torch.zeros(3, 3), "b d"),
        )


# what tensors hold


def test_floating_types():
    x = torch.zeros(2)
    tensor_checks.floating_tensors(x=x, y=x[:1])
    tensor_checks.floating_tensors(x=x.half())
    with says("x must have a floating type, got x torch.int64"):
        tensor_checks.floating_tensors(x=x.long())
    with says("q, k must have one floating type, got q torch.float32, k torch.float64"):
        tensor_checks.floating_tensors(q=x, k=x.double())
    assert not accepts(tensor_checks.floating_tensors, q=x, k=x.long())
    assert not accepts(tensor_checks.floating_tensors, q=x.bool(), k=x.bool())


def test_integer_types():
    x = torch.zeros(2)
    tensor_checks.integer_tensors(ids=x.long(), rows=x.int(), bytes=x.to(torch.uint8))
    with says("ids must be integers, got torch.float32"):
        tensor_checks.integer_tensors(ids=x)
    with says("ids must be integers, got torch.bool"):
        tensor_checks.integer_tensors(fine=x.long(), ids=x.bool())


def test_positions():
    positions = torch.arange(5)[None]
    tensor_checks.position_tensors(
        positions=positions, key_positions=positions.expand(3, 5)
    )
    tensor_checks.position_tensors(
        positions=positions.expand(3, 5), key_positions=positions[:, :2].expand(3, 2)
    )
    with says(
        "positions must be int64 of shape (b, length), got torch.int64 of shape (5,)"
    ):
        tensor_checks.position_tensors(positions=positions[0])
    with says(
        "key_positions must be int64 of shape (b, length), got torch.int32 of "
        "shape (1, 5)"
    ):
        tensor_checks.position_tensors(
            positions=positions, key_positions=positions.int()
        )
    with says("batch sizes differ: {'positions': 2, 'key_positions': 3}"):
        tensor_checks.position_tensors(
            positions=positions.expand(2, 5), key_positions=positions.expand(3, 5)
        )


def test_a_type_of_tensors():
    tensor_checks.torch_dtype(dtype=torch.bfloat16, other=torch.int64)
    known = "dtype must be a torch.dtype such as torch.float32"
    with says(f"{known}, got 'bfloat16': write torch.bfloat16"):
        tensor_checks.torch_dtype(dtype="bfloat16")
    for value in ("bf61", "nn", None, 16, torch.Tensor):
        with says(f"{known}, got {value!r}"):
            tensor_checks.torch_dtype(dtype=value)


def test_a_device_that_is_there():
    for value in ("cpu", "meta", torch.device("cpu")):
        tensor_checks.usable_device(device=value)
    for value in ("gpu", "", None, 2.5):
        with says(
            "device must be a device that PyTorch knows, such as 'cpu' or 'cuda', "
            f"got {value!r}"
        ):
            tensor_checks.usable_device(device=value)
    with says(
        "device must be a device of this machine, and PyTorch finds no 'cuda:99'"
    ):
        tensor_checks.usable_device(device="cuda:99")


# masks and attention


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
    assert accepts(tensor_checks.mask_and_bias, tuple(shape), bias=x) == fits
    unclear = len(shape) == 4 and len(size) in (2, 3)
    assert accepts(tensor_checks.mask_and_bias, tuple(shape), x.bool()) == (
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
        tensor_checks.mask_and_bias(SCORES, mask, bias)


def test_masks_that_are_taken():
    tensor_checks.mask_and_bias(SCORES)
    tensor_checks.mask_and_bias(
        SCORES, torch.ones(2, 1, 1, 5).bool(), torch.zeros(5, 5)
    )
    tensor_checks.mask_and_bias(
        SCORES, torch.ones(5).bool(), torch.zeros(4, 1, 5).half()
    )
    tensor_checks.mask_and_bias((5, 6), torch.ones(5, 6).bool())
    tensor_checks.mask_and_bias((2, 5, 6), torch.ones(5, 6).bool())


@pytest.mark.parametrize("kind", [list, np.ndarray])
def test_only_tensors_are_tensors(kind):
    x = np.ones((1, 2, 3, 4), np.float32)
    mask = np.ones((3, 3), bool)
    positions = np.arange(3)[None]
    if kind is list:
        x, mask, positions = (a.tolist() for a in (x, mask, positions))
    tensor = torch.ones(1, 2, 3, 4)
    for name, call in (
        ("positions", lambda: tensor_checks.position_tensors(positions=positions)),
        ("mask", lambda: tensor_checks.mask_and_bias((3, 3), mask)),
        ("bias", lambda: tensor_checks.mask_and_bias((3, 3), None, x)),
        ("q", lambda: tensor_checks.attention_inputs(x, tensor, tensor)),
        ("k", lambda: tensor_checks.attention_inputs(tensor, x, tensor)),
        ("v", lambda: tensor_checks.attention_inputs(tensor, tensor, x)),
        ("mask", lambda: tensor_checks.attention_inputs(tensor, tensor, tensor, mask)),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be Tensor, got "):
            call()


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
        tensor_checks.attention_inputs(*map(torch.zeros, (q, k, v)), allow_gqa=shared)


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
        tensor_checks.attention_inputs(
            *(torch.zeros(1, 2, 3, 8, dtype=t) for t in types), allow_gqa=True
        )


# rows


def test_right_rows_are_not_printed(monkeypatch):
    "To print a tensor of a GPU would wait for it."
    rows = torch.tensor([0, 2])

    def refuse(tensor, **kwargs):
        raise AssertionError("a tensor is printed")

    monkeypatch.setattr(torch.Tensor, "__repr__", refuse)
    tensor_checks.row_indices(3, rows=rows)
