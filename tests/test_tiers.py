"""The tiers of tests: what `make check`, `make test` and `make nightly` run."""

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import conftest as tests_conftest
import course  # book/_ext, where the conftest of the root looks
import processors
from conftest import NIGHTLY, ROOT, SAME_EVERYWHERE, digest_of_tree, keep_build

# minutes that a tier may take on two quiet cores: quick ones with AVX-512, and others
MINUTES = {"test": (10, 20), "nightly": (30, 60)}
MAY_END = "$(if $(UNTIL),--until $(UNTIL))"


def load(path):
    spec = importlib.util.spec_from_file_location("loaded", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recipe(target):
    "Return the commands of a target of the Makefile, with PYTEST written out."
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")
    pytest_line = re.search(r"^PYTEST := (.*)$", text, re.M)[1]
    body = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text, re.M)[1]
    return body.replace("$(PYTEST)", pytest_line)


def chosen(target):
    "Return the -m expression and the other arguments of a target's pytest."
    line = next(s for s in recipe(target).splitlines() if "-m pytest" in s)
    line = line.replace(MAY_END, "")
    words = shlex.split(line[line.index("-m pytest") + len("-m pytest") :])
    at = words.index("-m")
    return words[at + 1], words[at + 2 :]


def test_a_run_in_the_background_heeds_ctrl_c_as_well():
    "A shell without job control has it ignored there, and many tests send it."
    heed_ctrl_c = load(ROOT / "conftest.py").heed_ctrl_c
    before = signal.getsignal(signal.SIGINT)
    try:
        for ours in (signal.SIG_DFL, lambda *args: None):  # stays as it is
            signal.signal(signal.SIGINT, ours)
            heed_ctrl_c()
            assert signal.getsignal(signal.SIGINT) is ours
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        heed_ctrl_c()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_makefile_runs_two_tiers_over_the_same_tests():
    assert chosen("test")[0] == "not nightly"
    assert chosen("nightly")[0] == "nightly"
    assert chosen("check")[0] == "not nightly"
    assert chosen("test")[1][-2:] == ["nbs", "tests"]
    assert chosen("nightly")[1][-1:] == ["tests"]
    for target in ("test", "nightly", "check"):
        line = recipe(target)
        # nothing else may leave a test out
        assert not re.search(r" (-k|--ignore|--ignore-glob|--deselect|--lf)\b", line), (
            line
        )
    assert "book/verify.py --check" in recipe("nightly")
    assert "tests/affected.py" in recipe("check")
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(r"^check:.* lint\b", text, re.M)
    assert "-n logical" in recipe("test")


def test_processors_runs_all_notebooks_and_the_marked_tests():
    expression, files = chosen("processors")
    assert expression == "processor and not nightly" and files == ["nbs", "tests"]
    assert "tests/processors.py run" in recipe("processors")
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    strategy = yaml.safe_load(text)["jobs"]["processors"]["strategy"]
    switches = strategy["matrix"]["switch"]
    assert len(switches) == 2 and {*switches} <= {*processors.SWITCHES}
    assert 'make processors SWITCH="${{ matrix.switch }}"' in text


MADE_UP = {
    "test_some.py": """
import pytest

def test_usual(): pass

@pytest.mark.nightly
def test_slow(): pass

@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_of_two(n): pass
""",
    "test_shapes.py": """
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_signatures_hold(n): pass

@pytest.mark.parametrize("n", [1, 2])
def test_a_wrong_call_is_refused(n): pass
""",
    "test_typo.py": """
import pytest

@pytest.mark.no_tier
def test_typo(): pass
""",
}


@pytest.fixture
def made_up(tmp_path):
    "A project with the project's own rules and tests that are made up."
    for name in (
        "conftest.py",
        "pyproject.toml",
        "tests/conftest.py",
        "tests/kernels.py",
        "tests/sanitize.cfg",
        "book/_ext/course.py",
    ):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / name, target)
    for name, text in MADE_UP.items():
        (tmp_path / "tests" / name).write_text(text, encoding="utf-8")
    cells = [
        {
            "cell_type": "code",
            "execution_count": None,
            "id": name,
            "metadata": {"tags": tags},
            "outputs": [],
            "source": [source],
        }
        for name, tags, source in (
            ("one", [], "import torch"),
            ("two", ["compiles"], "a = 1"),
        )
    ]
    kernel = {"name": "python3", "display_name": "", "language": "python"}
    (tmp_path / "nbs").mkdir()
    for name, chosen_cells in ("01_a", cells), ("02_words", cells[1:]):
        notebook = {
            "cells": chosen_cells,
            "metadata": {"kernelspec": kernel},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        (tmp_path / "nbs" / f"{name}.ipynb").write_text(
            json.dumps(notebook, indent=1), encoding="utf-8"
        )

    def run_pytest(*args, collect=True):
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                *["--collect-only"] * collect,
                *args,
            ],
            cwd=tmp_path,
            text=True,
            capture_output=True,
            check=False,
        )

    def write(name, text):
        (tmp_path / "tests" / name).write_text(text, encoding="utf-8")

    run_pytest.write = write
    return run_pytest


def test_each_test_is_in_exactly_one_tier(made_up):
    typo = made_up("tests/test_typo.py")
    assert typo.returncode and "'no_tier' not found" in typo.stdout, typo.stdout
    found = {}
    for tier in ("test", "nightly", "every"):
        args = ["--ignore=tests/test_typo.py", "--nbval", "--nbval-current-env"]
        if tier != "every":
            args += ["-m", chosen(tier)[0]]
        done = made_up(*args, "nbs", "tests")
        assert done.returncode == 0, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        found[tier] = [line for line in lines if "::" in line]
    assert sorted(found["test"] + found["nightly"]) == sorted(found["every"])
    assert found["nightly"] == [
        "tests/test_shapes.py::test_signatures_hold[1]",
        "tests/test_shapes.py::test_signatures_hold[2]",
        "tests/test_some.py::test_slow",
        "tests/test_some.py::test_of_two[2]",
    ]
    assert "nbs/01_a.ipynb::Cell 0" in found["test"]


def test_what_is_left_when_the_time_is_up_is_said(made_up):
    args = ("tests/test_some.py", "-n", "0")
    done = made_up(f"--until={time.time() - 1}", *args, collect=False)
    assert done.returncode == 0 and "passed" not in done.stdout, done.stdout
    assert "4 tests were left out: there was no time left" in done.stdout
    done = made_up(f"--until={time.time() + 3600}", *args, collect=False)
    assert "4 passed" in done.stdout and "left out" not in done.stdout, done.stdout
    # what has begun goes on to its end
    made_up.write(
        "test_first.py",
        "import time\n"
        "def test_it(pytestconfig):\n"
        "    while time.time() < pytestconfig.getoption('--until'):\n"
        "        time.sleep(0.1)\n",
    )
    args = ("tests/test_first.py", *args)
    done = made_up(f"--until={time.time() + 9}", *args, collect=False)
    assert "1 passed, 4 skipped" in done.stdout, done.stdout


def test_a_build_is_kept_until_the_tree_changes(tmp_path):
    made = []

    def build(rival=None):
        own = tmp_path / f"out{len(made)}"
        made.append(own)
        own.mkdir()
        (own / "index.html").write_text(own.name, "utf-8")
        if rival:  # another process is faster
            keep_build(rival, build)
        return own

    first, second, third = (tmp_path / "books" / key for key in ("one", "two", "three"))
    for _ in range(2):
        assert keep_build(first, build) == first
        assert (first / "index.html").read_text("utf-8") == "out0"
    with pytest.raises(KeyboardInterrupt):
        keep_build(second, interrupted)
    assert {*first.parent.iterdir()} == {first}
    keep_build(second, build)
    keep_build(third, lambda: build(third))
    assert (third / "index.html").read_text("utf-8") == "out3"
    # of these, the second was not asked for within a day, and a run has left a piece
    piece = first.parent / "four.99.part"
    piece.mkdir()
    long_ago = time.time() - 25 * 60 * 60
    for old in (first, second, piece):
        os.utime(old, (long_ago, long_ago))
    assert keep_build(first, build) == first and len(made) == 4
    assert {*first.parent.iterdir()} == {first, third}


def interrupted():
    raise KeyboardInterrupt


def test_a_digest_tells_trees_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(tests_conftest, "ROOT", tmp_path)
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_text("same", "utf-8")
    seen = {digest_of_tree(paths), digest_of_tree(paths[:1]), digest_of_tree(paths[1:])}
    paths[1].write_text("other", "utf-8")
    assert len(seen | {digest_of_tree(paths)}) == 4
    assert digest_of_tree(paths) == digest_of_tree(paths)


def test_only_what_may_be_left_out_has_an_end():
    for target in ("nightly", "processors"):
        line = next(s for s in recipe(target).splitlines() if "-m pytest" in s)
        assert MAY_END in line
    assert "UNTIL" not in recipe("test") + recipe("check")


def test_three_nights_see_every_change():
    verify = load(ROOT / "book" / "verify.py")
    jobs = [
        (name, change) for name in verify.noted() for change in verify.changes(name)
    ]
    seen = []
    for day in range(3):
        today = date(2026, 2, 28) + timedelta(days=day)
        first = [job for job in jobs if verify.days_until_turn(*job, today) == 0]
        assert abs(3 * len(first) / len(jobs) - 1) < 0.25
        seen += first
    assert len(seen) == len(jobs) and all(job in seen for job in jobs)


@pytest.mark.parametrize("name", NIGHTLY)
def test_files_of_the_night_hold_what_the_list_names(name):
    tree = ast.parse((ROOT / "tests" / name).read_text(encoding="utf-8"))
    tests = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert NIGHTLY[name] < tests, NIGHTLY[name] - tests


def test_notebooks_are_not_left_to_the_night():
    "Only a test function can carry the marker; no notebook does."
    rules = (ROOT / "conftest.py").read_text(encoding="utf-8")
    assert re.findall(r"add_marker\((.*)\)", rules) == ['"processor"']
    assert all(name.startswith("test_") for name in NIGHTLY)


def make_targets(text):
    return re.findall(r"\bmake (\w+)", text)


def commands(workflow):
    "Return the make targets that the steps of a workflow run, in order."
    path = ROOT / ".github" / "workflows" / f"{workflow}.yml"
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    steps = [step for job in jobs.values() for step in job.get("steps", [])]
    return make_targets("\n".join(step.get("run", "") for step in steps))


def test_who_runs_which_tier():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    lines = [line for line in script.splitlines() if line.startswith("make ")]
    assert [line.partition(" UNTIL=")[0] for line in lines] == [
        "make test",
        "make book",
        "make nightly",
        "make processors",
    ]
    assert all("UNTIL" not in line for line in lines[:2])
    assert [t for t in commands("ci") if t != "lint"] == ["test", "book", "processors"]
    assert commands("nightly") == ["seconds"]
    assert "nightly" not in commands("weekly")
    night = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
    # YAML reads the key `on` as true
    assert re.fullmatch(r"\d+ \d+ \* \* \*", night[True]["schedule"][0]["cron"])
    # models are trained again once a week, and in no tier
    weekly = (ROOT / ".github/workflows/weekly.yml").read_text(encoding="utf-8")
    assert "experiments/trained.py --check" in weekly
    assert all("trained.py" not in recipe(t) for t in ("check", "test", "nightly"))


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "book/maintain.md"])
def test_pages_name_the_tiers(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert {"check", "test", "nightly", "book"} <= set(make_targets(text))
    if name != "README.md":
        for minutes, _ in MINUTES.values():
            assert f"{minutes} minutes" in text


# Tests that another processor may see fail


def test_what_computes_with_floats_is_run_as_another_processor(made_up):
    made_up.write("test_floats.py", "import torch\n\ndef test_sum(): pass\n")
    made_up.write("test_validate.py", "import torch\n\ndef test_words(): pass\n")
    done = made_up(
        "--nbval",
        "--nbval-current-env",
        "-m",
        chosen("processors")[0],
        "--ignore=tests/test_typo.py",
        "nbs",
        "tests",
    )
    lines = [line for line in done.stdout.splitlines() if "::" in line]
    assert lines == [
        "nbs/01_a.ipynb::Cell 0",
        "nbs/01_a.ipynb::Cell 1",
        "tests/test_floats.py::test_sum",
    ], done.stdout + done.stderr
    for name in SAME_EVERYWHERE:
        assert (ROOT / "tests" / name).exists()


def test_a_run_says_on_which_processor(made_up, monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    done = made_up("-v", "--nbval", "--nbval-current-env", "nbs")
    line = next(
        line for line in done.stdout.splitlines() if line.startswith("processor:")
    )
    assert re.search(r" \(\w+, .*MKL_CBWR=COMPATIBLE", line), line


def test_cells_that_compile_are_left_out_without_vector_instructions(
    made_up, monkeypatch
):
    for value, word in ("default", "1 skipped"), ("", "2 passed"):
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", value)
        done = made_up(
            "--nbval", "--nbval-current-env", "nbs/01_a.ipynb", collect=False
        )
        assert word in done.stdout, done.stdout


# The record of seconds


def read_record():
    return load(ROOT / "conftest.py").read_seconds()


def files_that_run():
    "Return the paths of all notebooks and test files."
    paths = [*course.notebook_paths(ROOT), *(ROOT / "tests").glob("test_*.py")]
    return {Path(path).relative_to(ROOT).as_posix() for path in paths}


def test_the_tiers_keep_their_time():
    "By the record, on two cores that both have work until the end."
    record = read_record()
    for tier, (quick, slow) in MINUTES.items():
        minutes = quick if "AVX512" in record["machines"][tier] else slow
        took = sum(seconds.get(tier, 0) for seconds in record["files"].values())
        assert 0 < took <= 2 * 60 * minutes, f"{tier}: {took:.0f} s"


def test_the_clock_adds_up_by_file_and_tier(tmp_path, monkeypatch):
    rules = load(ROOT / "conftest.py")
    clock = rules.Clock()
    for nodeid, keywords, seconds in (
        ("tests/test_a.py::test_one[1]", {}, 2.0),
        ("tests/test_a.py::test_one[2]", {"nightly": 1}, 5.0),
        ("tests/test_a.py::test_two", {}, 1.0),
        ("nbs/x/01_a.ipynb::Cell 0", {}, 4.0),
    ):
        clock.pytest_runtest_logreport(
            SimpleNamespace(
                nodeid=nodeid,
                keywords=keywords,
                duration=seconds,
                when="call",
                outcome="passed",
                failed=False,
            )
        )
    assert clock.files == {
        "tests/test_a.py": {"test": 3.0, "nightly": 5.0},
        "nbs/x/01_a.ipynb": {"test": 4.0},
    }
    monkeypatch.setattr(rules, "ROOT", tmp_path)
    for name in ("tests/test_a.py", "nbs/x/01_a.ipynb", "tests/test_b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    del clock.files["tests/test_a.py"]["nightly"]  # was not run this time
    record = {
        "machines": {"test": "A", "nightly": "A"},
        "files": {
            "tests/test_a.py": {"test": 9.0, "nightly": 6.0},
            "tests/test_b.py": {"test": 7.0},
            "tests/test_gone.py": {"test": 8.0},
        },
    }
    ran = {
        "nbs/x/01_a.ipynb": {"test": 4.0},
        "tests/test_a.py": {"nightly": 6.0, "test": 3.0},
    }
    assert clock.merged(record, "A") == {
        "machines": record["machines"],
        "files": ran | {"tests/test_b.py": {"test": 7.0}},
    }
    # seconds of another processor do not stand beside those of this one
    assert clock.merged(record, "B") == {
        "machines": {"test": "B", "nightly": "A"},
        "files": ran,
    }


def gpu_run(rules, *reports):
    "A clock that has seen these: test, phase, outcome."
    clock = rules.Clock()
    for nodeid, when, outcome in reports:
        clock.pytest_runtest_logreport(
            SimpleNamespace(
                nodeid=f"tests/test_a.py::{nodeid}",
                keywords={"gpu": 1},
                duration=1.0,
                when=when,
                outcome=outcome,
                failed=outcome == "failed",
            )
        )
    return clock


def test_a_run_on_a_gpu_is_recorded(monkeypatch):
    rules = load(ROOT / "conftest.py")
    clock = gpu_run(
        rules,
        ("a", "setup", "passed"),
        ("a", "call", "passed"),
        ("a", "teardown", "passed"),
        ("b", "call", "failed"),
        ("b", "teardown", "passed"),
        ("c", "setup", "skipped"),
        ("d", "call", "passed"),
        ("d", "teardown", "failed"),
    )
    counts = {"passed": 1, "failed": 2, "skipped": 1}
    assert "gpu_tests" not in clock.as_record()  # this machine is none
    machine = {"device": "Some GPU", "versions": {"torch": "2.13.0"}}
    monkeypatch.setattr(rules, "describe_machine", lambda: dict(machine))
    record = clock.as_record()
    assert record["gpu_tests"] == counts and "notebooks" not in record
    # notebooks that were run before stay, if that was here and today
    books = {"notebooks": {"a": {"passed": True}}}
    assert clock.as_record(record | books) == record | books
    for change in {"device": "Another"}, {"date": "2026-01-02"}, {"versions": {}}:
        assert clock.as_record(record | books | change) == record


def test_tests_marked_gpu_say_why_they_are_skipped(made_up):
    made_up.write(
        "test_card.py",
        "import pytest\n\n@pytest.mark.gpu\n"
        "def test_card(): pass\n\ndef test_other(): pass\n",
    )
    done = made_up("-rs", "-m", "gpu", "tests/test_card.py", collect=False)
    assert "1 skipped, 1 deselected" in done.stdout, done.stdout
    assert "This test needs a CUDA device, and PyTorch finds none." in done.stdout


def test_only_the_marker_asks_for_a_card():
    "So that -m gpu runs all that needs one."
    for path in (ROOT / "tests").glob("test_*.py"):
        if path.name in ("test_workflows.py", "test_tiers.py"):
            continue
        text = path.read_text(encoding="utf-8")
        assert "cuda.is_available" not in text, path.name
        tree = ast.parse(text)
        marked = "mark.gpu" in text or path.name == "test_devices.py"
        uses = any(
            isinstance(node, ast.Attribute)
            and node.attr == "cuda"
            and isinstance(node.ctx, ast.Load)
            for node in ast.walk(tree)
        )
        assert marked or not uses, path.name


def test_make_gpu_runs_everything_and_then_what_needs_a_card():
    runs = [line for line in recipe("gpu").split(";") if "-m pytest" in line]
    assert len(runs) == 2 and all("--record $(GPU_STATUS)" in line for line in runs)
    assert " nbs " in runs[0] and " -m gpu " not in runs[0]
    assert " -m gpu " in runs[1] and " tests " in runs[1]
    # one file holds most of those: they are spread test by test
    assert " --dist worksteal " in runs[1] and "worksteal" not in runs[0]
    # the second also where the first fails, and then both have failed
    assert all(run.endswith(" || failed=1") for run in runs)
    assert recipe("gpu").rstrip().endswith("exit $$failed")


def test_the_longest_files_begin_first(tmp_path):
    rules = load(ROOT / "conftest.py")
    record = tmp_path / "seconds.json"
    record.write_text(
        json.dumps(
            {
                "machines": {},
                "files": {
                    "nbs/07_a.ipynb": {"test": 40},
                    "nbs/08_b.ipynb": {"test": 3},
                    "tests/test_night.py": {"test": 1, "nightly": 90},
                },
            }
        ),
        encoding="utf-8",
    )
    names = [
        "nbs/08_b.ipynb",
        "tests/test_new.py",
        "nbs/07_a.ipynb",
        "tests/test_night.py",
    ]
    items = [SimpleNamespace(nodeid=f"{name}::{at}") for name in names for at in (0, 1)]

    def order(expression, record=record):
        rules.longest_first(items, rules.tiers_run(expression), record)
        found = [rules.path_of(item.nodeid) for item in items]
        assert [item.nodeid[-1] for item in items] == ["0", "1"] * len(names)
        return found[::2]

    short, new, long, night = names
    assert order("not nightly") == [long, new, short, night]
    assert order("nightly")[:2] == [night, new]
    assert order("") == [night, long, new, short]
    order("", tmp_path / "none")  # without a record, all are equal
    assert "--no-loadscope-reorder" in recipe("test")
