"""Every signature of the package is executed, not only read."""
import os
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

# the tests of every module whose signatures carry shapes
FILES = [f"test_{p.stem}.py" for p in sorted(ROOT.glob("tformer/[a-z]*.py"))
         if "from jaxtyping import" in p.read_text(encoding="utf-8")]


def shaped(*args, cwd=ROOT):
    "Tests, run once more with jaxtyping's own option."
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider",
         "--jaxtyping-packages=tformer,beartype.beartype", *args],
        cwd=cwd, text=True, capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("name", FILES)
def test_signatures_hold(name):
    done = shaped(f"tests/{name}")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


WRONG = """
import torch
from jaxtyping import TypeCheckError
from tformer.attend import causal_mask


def test_wrong():
    try:
        causal_mask(torch.zeros(2, 3), torch.zeros(2, 3))
    except TypeCheckError:
        return
    raise AssertionError("taken")
"""


def test_a_wrong_call_is_refused(tmp_path):
    assert "test_attend.py" in FILES
    file = tmp_path / "test_wrong.py"
    file.write_text(WRONG, encoding="utf-8")
    done = shaped(f"--rootdir={tmp_path}", str(file))
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("module, right, wrong, test", [
    ("attend", 'Bool[Tensor, "#b 1 t s"]', 'Bool[Tensor, "#b 1 s t"]',
     "test_attend.py::test_masks_equal_loops"),
    ("check", ') -> Int[Tensor, "n t"]:', ') -> Int[Tensor, "t n"]:',
     "test_check.py::test_variants_replace_one_token_each")])
def test_a_wrong_signature_goes_red(tmp_path, module, right, wrong, test):
    for name in ("tformer", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name,
                        ignore=shutil.ignore_patterns("__pycache__"))
    assert shaped(f"tests/{test}", cwd=tmp_path).returncode == 0
    path = tmp_path / "tformer" / f"{module}.py"
    text = path.read_text(encoding="utf-8")
    assert right in text
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    done = shaped(f"tests/{test}", cwd=tmp_path)
    assert done.returncode == 1 and "TypeCheckError" in done.stdout
