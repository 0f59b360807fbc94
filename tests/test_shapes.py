"""Every signature of the package is executed, not only read."""
import os
import subprocess
import sys

import pytest

from conftest import ROOT

# the tests of every module whose signatures carry shapes
FILES = [f"test_{p.stem}.py" for p in sorted(ROOT.glob("tformer/[a-z]*.py"))
         if "from jaxtyping import" in p.read_text(encoding="utf-8")]

WRONG = """
import torch
from jaxtyping import TypeCheckError, install_import_hook
install_import_hook("tformer", "beartype.beartype")
from tformer.attend import causal_mask
try:
    causal_mask(torch.zeros(2, 3), torch.zeros(2, 3))
except TypeCheckError:
    print("refused")
"""


def shaped(*args):
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, text=True, capture_output=True,
        env={**os.environ, "TFORMER_SHAPES": "1", "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("name", FILES)
def test_signatures_hold(name):
    done = shaped("-m", "pytest", "-q", "-p", "no:cacheprovider",
                  f"tests/{name}")
    assert done.returncode == 0, done.stdout[-6000:]


def test_a_wrong_call_is_refused():
    assert "test_attend.py" in FILES
    assert shaped("-c", WRONG).stdout == "refused\n"
