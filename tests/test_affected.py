"""`make check` runs the tests that a change concerns."""

import pytest

import affected
from conftest import ROOT


@pytest.mark.parametrize(
    "changed, names",
    [
        ("tests/test_beam.py", ["tests/test_beam.py"]),
        ("tests/models.py", ["tests/test_model.py"]),
        ("experiments/mup.py", ["tests/test_optimizers.py"]),
        ("book/_ext/course.py", ["tests/test_ext.py"]),
        ("tformer/records/positions.csv", ["tests/test_rotary.py"]),
        (
            "tformer/inference/generation.py",
            ["nbs/package/inference/generation.ipynb", "tests/test_beam.py"],
        ),
        ("tformer/check/suite.py", ["nbs/08_is_it_right.ipynb", "tests/test_check.py"]),
        ("LICENSE", ["tests/test_project.py"]),
    ],
)
def test_a_file_concerns_the_tests_that_read_it(changed, names):
    assert (ROOT / changed).exists()
    assert affected.affected({changed}) >= {*names}


def test_the_quickest_are_run_and_the_others_named():
    seconds = {"slow": 90, "quick": 10, "medium": 20}
    names = {"slow", "quick", "medium", "new"}
    assert affected.choose(names, seconds, 50) == (["quick", "new", "medium"], ["slow"])
    assert affected.choose(names, seconds, 20) == (["quick"], ["new", "medium", "slow"])


def test_files_that_are_always_run_are_there():
    for tests in affected.ALWAYS.values():
        for test in tests:
            assert (ROOT / "tests" / f"test_{test}.py").exists(), test
