"""What a compiler needs, and what is said where it is missing."""

import pytest
import torch

from models import (
    ROWS,
)
from tformer.base.runtime import compile_model, require_compiler
from tformer.inference.compiled import compile_decode_step

GPT_ROW = next(row for row in ROWS if row.name == "GPT")


# the compiler


def test_a_missing_compiler_is_named_in_one_sentence(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    for call in (
        require_compiler,
        lambda: compile_model(GPT_ROW.make()),
        lambda: compile_decode_step(GPT_ROW.make()),
    ):
        with pytest.raises(
            RuntimeError,
            match="^torch.compile needs a C.. "
            "compiler, and there is no no-such-compiler: "
            r"install it \(apt-get install g..\), or name "
            "another in CXX$",
        ):
            call()
    monkeypatch.setenv("CXX", "sh")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": "/none"})
    with pytest.raises(RuntimeError, match=r"there is no /none/Python\.h"):
        require_compiler()


def test_a_model_on_another_device_asks_for_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    compile_model(torch.nn.Linear(1, 1, device="meta"))
