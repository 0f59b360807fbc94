"""`make lint` finds nothing in the project, and the layers of imports hold."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

# imports that stand in a module, and what is said of each
FORBIDDEN = {
    "base/validate": (
        "from tformer.base import files",
        "tformer.base.validate -> tformer.base.files",
    ),
    "check/report": (
        "from ..base import files",
        "tformer.check.report -> tformer.base.files",
    ),
    "base/workers": ("import torch", "tformer.base.workers -> torch"),
    "variants/gqa": (
        "from ..training.checkpoints import flatten_state",
        "tformer.variants.gqa -> tformer.training.checkpoints",
    ),
    "variants/sparse": (
        "from ..models import llama",
        "tformer.variants.sparse -> tformer.models.llama",
    ),
    "text/wordpiece": (
        "from ..corpora import stories",
        "tformer.text.wordpiece -> tformer.corpora.stories",
    ),
    "models/mini_gpt": (
        "from .. import plot",
        "tformer.models.mini_gpt -> tformer.plot",
    ),
    "tasks/masked_lm": (
        "from ..bundle import load_bundle",
        "tformer.tasks.masked_lm -> tformer.bundle",
    ),
    "inference/generation": (
        "from ..training.trainer import Trainer",
        "tformer.inference.generation -> tformer.training.trainer",
    ),
    "models/gpt": ("from . import llama", "tformer.models.gpt -> tformer.models.llama"),
    "a_new_one": ("import math", "a_new_one"),  # nobody has said where it stands
}


def commands():
    "Return the commands of `make lint`, as lists of words."
    text = (ROOT / "Makefile").read_text("utf-8")
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", text, re.M)[1]
    return [line.split() for line in recipe.splitlines()]


def run_program(words, folder):
    "Run a program of the environment in which the tests run."
    return subprocess.run(
        [Path(sys.executable).parent / Path(words[0]).name, *words[1:]],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_nothing_is_found_in_the_project(words):
    done = run_program(words, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_imports_that_the_layers_forbid_are_found(tmp_path):
    shutil.copy(ROOT / ".importlinter", tmp_path)
    skipped = shutil.ignore_patterns("weights", "records", "__pycache__")
    shutil.copytree(ROOT / "tformer", tmp_path / "tformer", ignore=skipped)
    for module, (line, _) in FORBIDDEN.items():
        with (tmp_path / "tformer" / f"{module}.py").open("a", encoding="utf-8") as f:
            f.write(f"\n{line}\n")
    (words,) = [words for words in commands() if "lint-imports" in words[0]]
    done = run_program(words, tmp_path)
    assert done.returncode == 1, done.stdout
    for _, says in FORBIDDEN.values():
        assert says in done.stdout, done.stdout
