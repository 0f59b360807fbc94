"""`make lint` finds what it is there for, in notebooks as well as in modules."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from conftest import ROOT

SETTINGS = (
    "ruff.toml",
    "nbs/ruff.toml",
    "nbs/package/ruff.toml",
    ".codespellrc",
    ".ci/one_assignment.py",
)
LESSON = "nbs/{}_lesson.ipynb"
PACKAGE = "nbs/package/nn/part_{}.ipynb"
TEST = "tests/test_{}.py"
PAGE = "book/page_{}.md"
A_LINE = 'print("{}", 1)\n'

# a file, what is wrong in it, the program that says so, and a word of that
SLIPS = [
    (LESSON, "import os\n", "ruff", "F401"),
    (PACKAGE, "import os\n", "ruff", "F401"),
    (TEST, "import os\n", "ruff", "F401"),
    (LESSON, "print(mth.pi)\n", "ruff", "F821"),
    (LESSON, A_LINE.format(64 * "x"), "ruff", "E501"),
    (PACKAGE, A_LINE.format(77 * "x"), "ruff", "E501"),
    (TEST, A_LINE.format(77 * "x"), "ruff", "E501"),
    (TEST, "def test(a=[]):\n    return a\n", "ruff", "B006"),
    (TEST, "print(1); print(2)\n", "ruff", "E702"),
    (LESSON, "a, b = 1, 2\nprint(a, b)\n", "one_assignment", ":cell 2:1: one assign"),
    (PACKAGE, "a, b = 1, 2\nprint(a, b)\n", "one_assignment", "one assignment"),
    (
        TEST,
        "def f(self):\n    self.a, self.b = 1, 2\n",
        "one_assignment",
        ".py:2: one assignment a line",
    ),
    (TEST, "(a, b), c = (1, 2), 3\n", "one_assignment", "one assignment"),
    (TEST, "[a, b] = [1, 2]\n", "one_assignment", "one assignment"),
    (TEST, "def f(a, b):\n    a.x = b.x = 1\n", "one_assignment", "one target"),
    (LESSON, "print(1)  # teh first\n", "codespell", "teh"),
    (TEST, '"""Recieve."""\n', "codespell", "Recieve"),
    (PAGE, "A page that was seperated.\n", "codespell", "seperated"),
]
# what is nearly wrong
MEANT = [
    (LESSON, A_LINE.format(63 * "x")),
    (PACKAGE, A_LINE.format(76 * "x")),
    (TEST, A_LINE.format(76 * "x")),
    (LESSON, "#| verified: " + 40 * "word " + "\nprint(1)\n"),
    (LESSON, "%matplotlib inline\n!ls\nprint(1)\n"),
    (TEST, "def f(a, b):\n    a, b = b, a\n    return a, b\n"),  # a swap
    (TEST, "def f(a, b):\n    a, b = b, a + b\n    return a, b\n"),
    (TEST, "def f(x):\n    x[0], n = 1, len(x)\n    return n\n"),
    (TEST, "def f(x):\n    a, (b, *c) = x\n    return a, b, c\n"),
    (TEST, "def f(x):\n    a, *b = 1, *x\n    return a, b\n"),
    (TEST, "a = b = 0\n"),
]


def commands():
    "The commands of `make lint`, by the name of their program."
    recipe = re.search(
        r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text("utf-8"), re.M
    )[1]
    lines = [
        line.strip().replace("$(PY)", ".venv/bin/python").replace("$(VENV)", ".venv")
        for line in recipe.splitlines()
    ]
    names = {
        "ruff check": "ruff",
        "ruff format": "format",
        "one_": "one_assignment",
        "lint-imports": "imports",
    }
    return {
        next((n for part, n in names.items() if part in line), Path(line).stem): line
        for line in lines
    }


def write(path, text, printed="", prose="A page."):
    "A file of the project; a notebook has a cell with prose and one with code."
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".ipynb":
        output = {"name": "stdout", "output_type": "stream", "text": [printed + "\n"]}
        cells = [
            {"cell_type": "markdown", "id": "a", "metadata": {}, "source": [prose]},
            {
                "cell_type": "code",
                "execution_count": None,
                "id": "b",
                "metadata": {},
                "outputs": [output],
                "source": text.splitlines(keepends=True),
            },
        ]
        text = (
            json.dumps(
                {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5},
                indent=1,
                sort_keys=True,
            )
            + "\n"
        )
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def project(tmp_path):
    "An empty project with our settings."
    for name in SETTINGS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def findings(folder):
    "Pairs of a program and a line that it prints about a file."
    for name, line in commands().items():
        if name in ("format", "imports"):  # which have tests of their own
            continue
        program, *arguments = line.split()
        done = subprocess.run(
            [Path(sys.executable).parent / Path(program).name, *arguments],
            cwd=folder,
            text=True,
            capture_output=True,
            check=False,
        )
        lines = [
            said.removeprefix("./")
            for said in done.stdout.splitlines()
            if re.match(r"[\w./]+:", said)
        ]
        assert bool(done.returncode) == bool(lines), done.stdout + done.stderr
        yield from ((name, said) for said in lines)


def test_hooks_run_the_same_programs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    entries = [hook["entry"] for hook in hooks["repos"][-1]["hooks"]]
    names = ["ruff", "format", "one_assignment", "imports", "codespell"]
    assert list(commands()) == names
    assert entries[-5:] == list(commands().values())


def test_the_versions_of_the_programs_are_pinned():
    pins = (ROOT / "requirements.txt").read_text("utf-8")
    for name in ("ruff", "codespell", "import-linter"):
        assert re.search(rf"^{name}==[\d.]+$", pins, re.M)


def test_each_slip_is_found_by_one_program(project):
    for n, (name, text, *_) in enumerate(SLIPS, 10):
        write(project / name.format(n), text)
    found = list(findings(project))
    for n, (name, text, program, says) in enumerate(SLIPS, 10):
        about = [
            (by, line) for by, line in found if line.startswith(name.format(n) + ":")
        ]
        assert len(about) == 1, (text, about)
        assert about[0][0] == program, about
        assert says in about[0][1], about
    assert len(found) == len(SLIPS)


@pytest.mark.parametrize("name, columns", [(LESSON, 75), (PACKAGE, 88), (TEST, 88)])
def test_a_file_that_is_laid_out_otherwise_is_found(project, name, columns):
    words = commands()["format"].split()
    path = project / name.format("10")

    def check():
        return subprocess.run(
            [Path(sys.executable).parent / Path(words[0]).name, *words[1:]],
            cwd=project,
            text=True,
            capture_output=True,
            check=False,
        )

    end = "" if path.suffix == ".ipynb" else "\n"
    longest = f"#| export\nf({(columns - 6) * 'x'}, 1)"
    for text in (longest, "#| hide\n#|eval: false\nf(1)"):
        write(path, text + end)
        assert check().returncode == 0, text
    for text in ("f( 1 )", "a = [1,\n     2]", longest.replace("f", "ff")):
        write(path, text + end)
        found = check()
        assert found.returncode == 1, text
        assert found.stdout.startswith(name.format("10") + ":")


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    "A copy of the package with the contracts for its imports."
    folder = tmp_path_factory.mktemp("package")
    shutil.copy(ROOT / ".importlinter", folder)
    skipped = shutil.ignore_patterns("weights", "records", "__pycache__")
    shutil.copytree(ROOT / "tformer", folder / "tformer", ignore=skipped)
    return folder


def imports_are_kept(folder):
    "What lint-imports says of a package."
    program, *arguments = commands()["imports"].split()
    return subprocess.run(
        [Path(sys.executable).parent / Path(program).name, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        text=True,
        capture_output=True,
        check=False,
    )


def test_each_module_imports_what_stands_below_it(package):
    done = imports_are_kept(package)
    assert done.returncode == 0, done.stdout
    assert " 0 broken" in done.stdout and "Inference needs nothing" in done.stdout


@pytest.mark.parametrize(
    "module, line, says",
    [
        ("validate", "from tformer import files", "tformer.validate -> tformer.files"),
        (
            "check/trial",
            "import tformer.model",
            "tformer.check.trial -> tformer.model",
        ),
        (
            "check/report",
            "from tformer.check.trial import CheckRun",
            "tformer.check.report -> tformer.check.trial",
        ),
        (
            "check/report",
            "from .. import files",
            "tformer.check.report -> tformer.files",
        ),
        ("generate", "from .train import Trainer", "tformer.generate -> tformer.train"),
        ("attention", "from . import plot", "tformer.attention -> tformer.plot"),
        ("gpt", "from . import llama", "tformer.gpt -> tformer.llama"),
        ("a_new_one", "import math", "a_new_one"),  # nobody has said where it stands
    ],
)
def test_an_import_that_the_layers_forbid_is_found(package, module, line, says):
    path = package / "tformer" / f"{module}.py"
    text = path.read_text("utf-8") if path.exists() else ""
    path.write_text(f"{text}\n{line}\n", "utf-8")
    try:
        done = imports_are_kept(package)
    finally:
        if text:
            path.write_text(text, "utf-8")
        else:
            path.unlink()
    assert done.returncode == 1, done.stdout
    assert says in done.stdout, done.stdout


def test_prose_is_read(project):
    write(project / LESSON.format("01"), "print(1)\n", prose="Teh page.")
    ((program, line),) = findings(project)
    assert program == "codespell" and "Teh" in line


def test_what_is_meant_and_what_is_printed_is_left_alone(project):
    for n, (name, text) in enumerate(MEANT, 10):
        write(project / name.format(n), text)
    write(project / LESSON.format("01"), "print(1)\n", printed="teh")
    assert list(findings(project)) == []


def test_nothing_is_found_in_the_project():
    assert list(findings(ROOT)) == []
    program, *arguments = commands()["format"].split()
    subprocess.run([ROOT / program, *arguments], cwd=ROOT, check=True)
