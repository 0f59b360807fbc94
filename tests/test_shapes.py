"""Every signature of the package is executed, not only read."""

import os
import re
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import pytest

import course  # book/_ext, where the conftest of the root looks
from conftest import ROOT

# modules that have their tests in one file
TOGETHER = {
    "inference.logits": "test_sampling.py",
    "inference.sampler": "test_sampling.py",
    "inference.generation": "test_generate.py",
    "models.base": "test_model.py",
    "nn.feed_forward": "test_layers.py",
    "nn.norms": "test_layers.py",
    "nn.relative_bias": "test_rotary.py",
    "nn.rope_scaling": "test_rotary.py",
    "tasks.masked_lm": "test_mlm.py",
    "training.trainer": "test_train.py",
}


def file_of_tests(name):
    "The file with the tests of a module: its own, else that of its folder."
    if name in TOGETHER:
        return TOGETHER[name]
    room, _, last = name.rpartition(".")
    own = f"test_{last}.py"
    return own if not room or (ROOT / "tests" / own).exists() else f"test_{room}.py"


# the tests of every module whose signatures carry shapes
FILES = sorted(
    {
        file_of_tests(name)
        for name in course.module_names(ROOT)
        if "from jaxtyping import"
        in course.module_path(ROOT, name).read_text(encoding="utf-8")
    }
)


def shaped(*args, cwd=ROOT):
    "Tests, run once more with jaxtyping's own option."
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--jaxtyping-packages=tformer,beartype.beartype",
            *args,
        ],
        cwd=cwd,
        text=True,
        capture_output=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TFORMER_SHAPES": "1",
            # the conftest of the tests imports from there, in a copy as well
            "PYTHONPATH": str(ROOT / "book" / "_ext"),
        },
    )


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    "What the tests of these files did; one process runs all asked for."
    asked = [
        item.callspec.params["name"]
        for item in request.session.items
        if "results" in getattr(item, "fixturenames", ())
    ]
    out = tmp_path_factory.mktemp("shapes") / "results.xml"
    until = request.config.getoption("--until")
    done = shaped(
        f"--junitxml={out}",
        *([] if until is None else [f"--until={until}"]),
        *(f"tests/{name}" for name in asked if (ROOT / "tests" / name).exists()),
    )
    assert done.returncode in (0, 1), done.stdout[-6000:] + done.stderr[-2000:]
    return list(ElementTree.parse(out).iter("testcase"))


@pytest.mark.parametrize("name", FILES)
def test_signatures_hold(name, results):
    cases = [
        case
        for case in results
        if case.get("classname").split(".")[1] == name.removesuffix(".py")
    ]
    assert cases, f"{name} was not run"
    red = [
        f"{case.get('name')}: {part.text}"
        for case in cases
        for part in case
        if part.tag in ("failure", "error")
    ]
    assert not red, f"{len(red)} are red\n{red[0][-6000:]}"


WRONG = """
import torch
from jaxtyping import TypeCheckError
from tformer.nn.functional import causal_mask


def test_wrong():
    try:
        causal_mask(torch.zeros(2, 3), torch.zeros(2, 3))
    except TypeCheckError:
        return
    raise AssertionError("taken")
"""


def test_every_module_with_shapes_has_a_file_of_tests():
    missing = [name for name in FILES if not (ROOT / "tests" / name).exists()]
    assert not missing, f"{missing}: say in TOGETHER which file tests the module"


def test_a_wrong_call_is_refused(tmp_path):
    assert "test_functional.py" in FILES
    file = tmp_path / "test_wrong.py"
    file.write_text(WRONG, encoding="utf-8")
    done = shaped(f"--rootdir={tmp_path}", str(file))
    assert "1 passed" in done.stdout, done.stdout + done.stderr


COUNTED = """
import pytest
from hypothesis import given, settings, strategies as st

seen = []


class TestMany:
    @settings(max_examples=50, deadline=None)
    @given(n=st.integers(0, 10**9))
    def test_many(self, n):
        seen.append(n)


@settings(max_examples=3, deadline=None)
@given(n=st.integers(0, 10**9))
def test_few(n):
    seen.append(n)


@pytest.mark.parametrize("n", ["day", pytest.param("night", marks=pytest.mark.nightly)])
def test_values(n):
    seen.append(n)


@pytest.mark.nightly
def test_all_of_it_at_night():
    seen.append("whole")


def test_how_many():
    assert len(seen) == 10 + 3 + 2 and seen[-2:] == ["day", "whole"]
"""


def test_ten_examples_and_the_values_of_the_day_are_tried(tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    for name in ("conftest.py", "helpers.py"):
        shutil.copy(ROOT / "tests" / name, folder)
    file = folder / "test_counted.py"
    file.write_text(COUNTED, encoding="utf-8")
    done = shaped(f"--rootdir={tmp_path}", str(file))
    assert "5 passed, 1 deselected" in done.stdout, done.stdout + done.stderr


WRONG_SIGNATURES = [
    (
        "nn/functional",
        'Bool[Tensor, "#b 1 t s"]',
        'Bool[Tensor, "#b 1 s t"]',
        "test_functional.py::test_masks_equal_loops",
    ),
    (
        "check/causality",
        ') -> Int[Tensor, "n t"]:',
        ') -> Int[Tensor, "t n"]:',
        "test_check.py::test_variants_replace_one_token_each",
    ),
]


def test_wrong_signatures_go_red(tmp_path):
    for name in ("tformer", "tests"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    tests = [f"tests/{test}" for *_, test in WRONG_SIGNATURES]
    assert shaped(*tests, cwd=tmp_path).returncode == 0
    for module, right, wrong, _ in WRONG_SIGNATURES:
        path = tmp_path / "tformer" / f"{module}.py"
        text = path.read_text(encoding="utf-8")
        assert right in text
        path.write_text(text.replace(right, wrong), encoding="utf-8")
    done = shaped("-rf", *tests, cwd=tmp_path)
    assert done.returncode == 1
    for test in tests:
        assert re.search(rf"^FAILED {test} - jaxtyping", done.stdout, re.M), done.stdout
