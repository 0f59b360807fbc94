"""`make check` finds the tests that a change can affect."""

import json
import subprocess
from fnmatch import fnmatch

import pytest

import affected
from conftest import ROOT, tracked


def notebook(*sources):
    cells = [
        {"cell_type": "code", "source": s.splitlines(keepends=True)} for s in sources
    ]
    prose = {"cell_type": "markdown", "source": ["import toy.above"]}
    return json.dumps({"cells": [prose, *cells]})


# base <- middle <- top; apart stands alone; deep is in a folder
TOY = {
    "toy/__init__.py": "",
    "toy/base.py": "",
    "toy/middle.py": "from .base import a",
    "toy/top.py": "def late():\n    from . import middle",
    "toy/apart.py": "",
    "toy/deep/__init__.py": "",
    "toy/deep/inner.py": "from ..base import a",
    "tests/conftest.py": "",
    "tests/helpers.py": "from toy.apart import x",
    "tests/bench/bench_it.py": "import toy.top",
    "tests/test_base.py": "from toy.base import a",
    "tests/test_middle.py": "from toy import middle",
    "tests/test_top.py": "import toy\ntoy.top.late()",
    "tests/test_apart.py": "import helpers",
    "tests/test_inner.py": "from toy.deep.inner import b",
    "tests/test_bench.py": "import bench_it",
    "tests/test_reads.py": 'DATA = "records"\nread_record("curves")',
    "tests/test_project.py": "",
    "tests/test_form.py": "",
    "nbs/01_base.ipynb": notebook("#| default_exp base", "#| export\na = 1"),
    "nbs/02_uses.ipynb": notebook("%pip install toy\nfrom toy.top import late"),
    "nbs/room/inner.ipynb": notebook("#| default_exp deep.inner"),
    "records/curves.csv": "",
    "records/other.csv": "",
}


@pytest.fixture
def toy(tmp_path):
    "A small project of its own."
    for name, text in TOY.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


def near(root, *changed):
    "Return the affected files and their distances, less what RULES names."
    found = affected.Project(root, "toy").affected(changed)
    return {
        name: n
        for name, n in found.items()
        if name not in {"tests/test_project.py", "tests/test_form.py"}
    }


def test_a_module_affects_what_imports_it_the_nearest_first(toy):
    assert near(toy, "toy/base.py") == {
        "tests/test_base.py": 1,
        "tests/test_middle.py": 2,
        "tests/test_inner.py": 2,
        "tests/test_top.py": 3,
        "nbs/02_uses.ipynb": 3,
        "tests/test_bench.py": 4,
    }
    assert near(toy, "toy/top.py") == {
        "tests/test_top.py": 1,
        "nbs/02_uses.ipynb": 1,
        "tests/test_bench.py": 2,
    }
    assert near(toy, "toy/deep/inner.py") == {"tests/test_inner.py": 1}
    # by way of a helper of the tests
    assert near(toy, "toy/apart.py") == {"tests/test_apart.py": 2}
    assert near(toy, "tests/helpers.py") == {"tests/test_apart.py": 1}


def test_a_notebook_affects_itself_and_its_module(toy):
    found = near(toy, "nbs/01_base.ipynb")
    assert found["nbs/01_base.ipynb"] == 0
    assert found["tests/test_base.py"] == 2 and found["nbs/02_uses.ipynb"] == 4
    assert near(toy, "nbs/room/inner.ipynb") == {
        "nbs/room/inner.ipynb": 0,
        "tests/test_inner.py": 2,
    }
    assert near(toy, "nbs/02_uses.ipynb") == {"nbs/02_uses.ipynb": 0}


def test_other_files_affect_what_reads_them(toy):
    assert near(toy, "tests/test_top.py") == {"tests/test_top.py": 0}
    assert near(toy, "records/curves.csv") == {"tests/test_reads.py": 1}
    assert near(toy, "records/other.csv") == {}
    tests = {name for name in TOY if name.startswith("tests/test_")}
    notebooks = {name for name in TOY if name.endswith(".ipynb")}
    project = affected.Project(toy, "toy")
    assert set(project.affected(["tests/conftest.py"])) == tests
    assert set(project.affected(["conftest.py"])) == tests | notebooks
    # rules: every file is read by one test, notebooks by others as well
    assert project.affected(["LICENSE"]) == {"tests/test_project.py": 1}
    assert project.affected(["nbs/room/inner.ipynb"])["tests/test_form.py"] == 1
    # a file that is gone is not run
    assert "tests/test_gone.py" not in project.affected(["tests/test_gone.py"])


def test_the_budget_is_filled_with_the_nearest_and_quickest():
    distance = {"far": 2, "near, slow": 1, "near, quick": 1, "self": 0, "new": 2}
    seconds = {"far": 20, "near, slow": 90, "near, quick": 10, "self": 30}

    def choose(budget):
        return affected.choose(distance, seconds, budget)

    assert choose(1000) == (["self", "near, quick", "near, slow", "new", "far"], [])
    # 30 + 10 are spent; 90 do not fit, but 15 (usual) and 20 do
    assert choose(80) == (["self", "near, quick", "new", "far"], ["near, slow"])
    assert choose(60) == (["self", "near, quick", "new"], ["near, slow", "far"])
    assert choose(130) == (["self", "near, quick", "near, slow"], ["new", "far"])


def test_what_is_left_is_said():
    said = affected.report(
        ["a", "b"],
        "main",
        ["tests/test_a.py"],
        ["tests/test_b.py", "nbs/c.ipynb"],
        {"tests/test_a.py": 7},
    )
    assert said == (
        "2 files differ from main.\n"
        "1 of 3 affected test files and notebooks are run; on record they take 7 s.\n"
        "These affected files did not fit into 150 s and are left to `make test`: "
        "tests/test_b.py, nbs/c.ipynb."
    )
    said = affected.report(["a"], "main", ["tests/test_a.py"], [], {})
    assert said.startswith("1 file differs from main.\n") and "left" not in said


def test_git_says_what_has_changed(tmp_path):
    def git(*args):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *args],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )

    def commit(*names):
        for name in names:
            (tmp_path / name).write_text(f"{name} {len(names)}", encoding="utf-8")
        git("add", "-A")
        git("commit", "-m", "a")

    git("init", "-b", "main")
    commit("one")
    commit("one", "two words")
    # nothing differs: the last commit
    assert affected.changed_files(tmp_path) == (
        ["one", "two words"],
        "the commit before the last",
    )
    (tmp_path / "new").touch()
    (tmp_path / "one").unlink()
    changed, since = affected.changed_files(tmp_path)
    assert changed == ["new", "one"] and "where this branch left main" in since
    # a branch: its commits, the staged and the rest of the working tree
    git("checkout", "--", "one")
    git("checkout", "-b", "topic")
    commit("three")
    git("mv", "two words", "four")
    (tmp_path / "one").write_text("other", encoding="utf-8")
    changed, since = affected.changed_files(tmp_path)
    assert changed == ["four", "new", "one", "three", "two words"]
    # what main did meanwhile is no change of this branch
    git("stash")
    git("checkout", "main")
    commit("five")
    git("checkout", "topic")
    assert affected.changed_files(tmp_path)[0] == ["new", "three"]


# The project itself


@pytest.fixture(scope="module")
def project():
    return affected.Project()


def test_every_module_affects_its_own_tests_and_notebook(project):
    for module in [
        name
        for name in project.source
        if fnmatch(name, "tformer/*.py") and "/_" not in name
    ]:
        found = project.affected([module])
        direct = {name for name, steps in found.items() if steps == 1}
        assert len(direct - {"tests/test_project.py", "tests/test_package.py"}) > 0, (
            f"no test imports {module}"
        )
        assert any(name.endswith(".ipynb") for name in project.needs[module]), module
    assert project.affected(["tformer/functional.py"])["tests/test_functional.py"] == 1
    assert project.affected(["tformer/functional.py"])["tests/test_gpt.py"] > 1


def test_files_that_tests_read_lead_to_them(project):
    for changed, test in (
        ("experiments/mup.py", "tests/test_optimizers.py"),
        ("tformer/records/positions.csv", "tests/test_rotary.py"),
        ("tformer/weights/stories/card.json", "tests/test_bundle.py"),
        ("tests/bench/bench_parts.py", "tests/test_bench.py"),
        ("tests/models.py", "tests/test_model.py"),
        ("book/_ext/course.py", "tests/test_ext.py"),
        ("book/verify.py", "tests/test_form.py"),
        ("book/notation.md", "tests/test_notation.py"),
        (".github/workflows/ci.yml", "tests/test_workflows.py"),
        ("tests/sanitize.cfg", "nbs/00_tour.ipynb"),
    ):
        assert (ROOT / changed).exists(), changed
        assert project.affected([changed]).get(test) == 1, (changed, test)
    names = [path.relative_to(ROOT).as_posix() for path in tracked()]
    for pattern, tests in affected.RULES:
        assert any(fnmatch(name, pattern) for name in names), pattern
        for test in tests:
            assert (ROOT / "tests" / f"test_{test}.py").exists(), test
