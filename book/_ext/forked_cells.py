"""A process that runs the cells of notebooks in forks of itself.

Most of what a short notebook takes is the import of PyTorch and the like. This process
imports what notebooks and package import from elsewhere, and nothing of the package;
each fork of it then runs cells with a package of its own, as a fresh process would. It
is started by ``book/verify.py``. Each line that it reads is a task::

    {"folder": where the package lies, "cells": [[index, source], …], "limit": seconds}

and it answers with one line, ``{"failed": [index, name of the error]}`` of the first
cell that failed, or null for index and name if none did; ``{"died": why}`` if the fork
ended before it could say so.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from course import code_cells, module_paths, notebook_paths


def imports(source: str) -> list[ast.stmt]:
    "What a source imports at its top level, the package left out."
    try:
        body = ast.parse(source).body
    except SyntaxError:  # a cell with a line for IPython
        return []
    found = []
    for node in body:
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        if all(name.split(".")[0] not in ("tformer", "__future__") for name in names):
            found.append(node)
    return found


def preload(sources: Iterable[str]) -> None:
    "Import what these sources import and what is there."
    for source in sources:
        for node in imports(source):
            with contextlib.suppress(ImportError):
                exec(compile(ast.Module([node], []), "<import>", "exec"), {})


def sources(root: Path) -> Iterable[str]:
    "The sources of the package and of all cells."
    for path in module_paths(root):
        yield path.read_text("utf-8")
    for path in notebook_paths(root):
        for cell in code_cells(json.loads(path.read_text("utf-8"))["cells"]):
            yield cell.source


def run(folder: str, cells: list) -> list:
    "Run the cells with the package in `folder`; return the first failure."
    from IPython.core.interactiveshell import InteractiveShell

    if early := [name for name in sys.modules if name.split(".")[0] == "tformer"]:
        raise RuntimeError(f"imported before there was a package: {early}")
    os.chdir(folder)
    os.environ["PYTHONPATH"] = folder  # for what a cell starts
    sys.path.insert(0, folder)
    sys.argv = [""]
    shell = InteractiveShell.instance()
    failed = [None, None]
    for index, text in cells:
        done = shell.run_cell(text, store_history=False)
        if not done.success:
            error = done.error_in_exec or done.error_before_exec
            failed = [index, type(error).__name__]
            break
    package = sys.modules.get("tformer")
    if package and not Path(package.__file__).is_relative_to(folder):
        raise RuntimeError(f"took the package from {package.__file__}")
    return failed


def fork(folder: str, cells: list, limit: int) -> dict:
    "The answer to one task, computed by a child that then ends."
    with tempfile.TemporaryFile() as answer:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)  # a group, with all that its cells start
            signal.alarm(limit)
            nothing = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(nothing, stream)
            try:
                said = {"failed": run(folder, cells)}
            except BaseException as error:
                said = {"died": repr(error)}
            answer.write(json.dumps(said).encode())
            answer.flush()
            os._exit(0)
        with contextlib.suppress(OSError):  # it was faster
            os.setpgid(child, child)
        try:
            _, status = os.waitpid(child, 0)
        finally:  # also where an interrupt ends the waiting
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        answer.seek(0)
        text = answer.read().decode()
    return json.loads(text) if text else {"died": f"status {status}"}


def serve(root: Path) -> None:
    "Answer every line of the input."
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what an import prints is no answer
    preload(["import IPython.core.interactiveshell", *sources(root)])
    gc.collect()
    gc.freeze()  # a child's collections need not copy all of it
    for line in sys.stdin:
        print(json.dumps(fork(**json.loads(line))), file=answers)


if __name__ == "__main__":
    serve(Path(__file__).resolve().parents[2])
