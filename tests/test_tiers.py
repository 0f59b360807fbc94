"""The tiers of tests: what `make check`, `make test` and `make nightly` run."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import build_book  # book/_ext, where the conftest of the root looks
import course
import processors
from conftest import ROOT, SAME_EVERYWHERE

# minutes that a tier may take on two quiet cores: quick ones with AVX-512, and others
MINUTES = {"test": (10, 30), "nightly": (30, 90)}
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
        "book/_ext/build_book.py",
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
    for tier in ("test", "nightly"):
        args = ["--ignore=tests/test_typo.py", "--nbval", "--nbval-current-env"]
        done = made_up(*args, "-m", chosen(tier)[0], "nbs", "tests")
        assert done.returncode == 0, done.stdout + done.stderr
        lines = done.stdout.splitlines()
        found[tier] = sorted(line for line in lines if "::" in line)
    assert found == {
        "test": [
            "nbs/01_a.ipynb::Cell 0",
            "nbs/01_a.ipynb::Cell 1",
            "nbs/02_words.ipynb::Cell 0",
            "tests/test_shapes.py::test_a_wrong_call_is_refused[1]",
            "tests/test_shapes.py::test_a_wrong_call_is_refused[2]",
            "tests/test_some.py::test_of_two[1]",
            "tests/test_some.py::test_usual",
        ],
        "nightly": [
            "tests/test_shapes.py::test_signatures_hold[1]",
            "tests/test_shapes.py::test_signatures_hold[2]",
            "tests/test_some.py::test_of_two[2]",
            "tests/test_some.py::test_slow",
        ],
    }


def test_what_is_left_when_the_time_is_up_is_said(made_up):
    done = made_up(f"--until={time.time() - 1}", "tests/test_some.py", collect=False)
    assert done.returncode == 0 and "passed" not in done.stdout, done.stdout
    assert "4 tests were left out: there was no time left" in done.stdout


def test_no_test_is_begun_after_the_time():
    rules = load(ROOT / "conftest.py")
    for until in (None, time.time() + 3600):
        config = SimpleNamespace(getoption={"--until": until}.get)
        rules.pytest_runtest_setup(SimpleNamespace(config=config))
    config = SimpleNamespace(getoption={"--until": time.time() - 1}.get)
    with pytest.raises(pytest.skip.Exception, match=rules.NO_TIME):
        rules.pytest_runtest_setup(SimpleNamespace(config=config))


def test_a_digest_tells_trees_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(build_book, "ROOT", tmp_path)
    digest = build_book.digest_of_tree
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.write_text("same", "utf-8")
    seen = {digest(paths), digest(paths[:1]), digest(paths[1:])}
    paths[1].write_text("other", "utf-8")
    assert len(seen | {digest(paths)}) == 4
    assert digest(paths) == digest(paths)


def test_the_book_is_copied_only_if_these_files_were_built(tmp_path, monkeypatch):
    kept = tmp_path / "books" / "digest"
    monkeypatch.setattr(build_book, "kept_pages", lambda: kept)
    built = []
    monkeypatch.setattr(build_book, "build", built.append)
    out = tmp_path / "out"
    build_book.copy_or_build(out)
    assert built == [out]
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "index.html").write_text("new", "utf-8")
    build_book.keep(pages, kept)
    old = out / "_build" / "html" / "gone.html"
    old.parent.mkdir(parents=True)
    old.touch()
    build_book.copy_or_build(out)
    assert built == [out] and not old.exists()
    assert (old.parent / "index.html").read_text("utf-8") == "new"
    # what nobody has asked for within a day goes with the next build
    long_ago = time.time() - 25 * 60 * 60
    os.utime(kept, (long_ago, long_ago))
    pages.mkdir()
    build_book.keep(pages, kept.with_name("next"))
    assert [*kept.parent.iterdir()] == [kept.with_name("next")]


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


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "book/maintain.md"])
def test_pages_state_the_minutes_of_the_tiers(name):
    text = (ROOT / name).read_text(encoding="utf-8")
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


def test_the_record_of_seconds_is_whole():
    "`make seconds` writes it anew, and so does the night."
    recorded = {*read_record()["files"]}
    files = files_that_run()
    assert not recorded - files, "files that are gone are on record"
    missing = files - recorded
    assert len(missing) <= 0.05 * len(files), sorted(missing)


def test_the_tiers_keep_their_time():
    "By the record, on two cores that both have work until the end."
    record = read_record()
    usual = load(ROOT / "conftest.py").USUAL
    missing = files_that_run() - {*record["files"]}
    for tier, (quick, slow) in MINUTES.items():
        minutes = quick if "AVX512" in record["machines"][tier] else slow
        took = sum(seconds.get(tier, 0) for seconds in record["files"].values())
        took += usual * len(missing)
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


def test_two_notebooks_of_one_name_have_two_records():
    clock = load(ROOT / "conftest.py").Clock()
    for name, failed in (("package/nn/attention", True), ("attention", False)):
        clock.pytest_runtest_logreport(
            SimpleNamespace(
                nodeid=f"nbs/{name}.ipynb::Cell 0",
                duration=1.0,
                when="call",
                failed=failed,
                keywords={},
            )
        )
    assert {name: book["passed"] for name, book in clock.books.items()} == {
        "package/nn/attention": False,
        "attention": True,
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
