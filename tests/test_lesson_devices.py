"""Lessons that train or time ask one helper for the device, and mix no devices.

What a lesson prints must not depend on the device. `make gpu` runs all lessons on a
card; where there is none, `pretended_lessons.py` runs them on a pretended one.
"""

import ast
import os
import re
import subprocess
import sys

import pytest

import course
from helpers import plain_only
from test_project import ROOT, code_cells, source

pytestmark = plain_only
CLOCKS = {"perf_counter", "process_time", "timeit", "best_seconds"}
TRAINERS = {"train", "Trainer"}
# notebooks that train or time without asking for a device, and why
WITHOUT = {
    "03_tokenizer": "a tokenizer computes with no tensors",
    "16_objectives_and_optimizers": "what is trained are a few numbers in float64",
    "A0_tensors": "loops of Python are compared with the product of two matrices",
    "A2_stories": "stories are told and graded without tensors",
}


def name_of(function):
    return getattr(function, "id", getattr(function, "attr", ""))


def device_faults(cells):
    """What is wrong with the cells of a lesson.

    Cells that are exported belong to the package, whose code goes where its arguments
    are.
    """
    faults = []
    asks = False
    works = False
    for cell in cells:
        text = course.MAGIC.sub(r"\1pass", source(cell))
        if re.search(r"^#\| *export", text, re.M):
            continue
        for node in ast.walk(ast.parse(text)):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module == "tformer.models.mini_gpt"
            ):
                faults += [
                    f"imports {name.name} of minimal"
                    for name in node.names
                    if name.name == "train"
                ]
            if not isinstance(node, ast.Call):
                continue
            name = name_of(node.func)
            asks |= name == "lesson_device"
            plain = isinstance(node.func, ast.Name)  # not ``model.train()``
            works |= name in CLOCKS or (plain and name in TRAINERS)
            if (
                name == "train"
                and plain
                and not any(keyword.arg == "device" for keyword in node.keywords)
            ):
                faults.append("trains without a device")
            if name == "is_available":
                faults.append("looks for a GPU by itself")
    if works and not asks:
        faults.append("trains or times, and asks for no device")
    return faults


def lessons():
    for path in course.notebook_paths(ROOT):
        name = course.document_name(ROOT, path)
        if "/" not in name:
            yield name, path


def test_lessons_ask_for_their_device():
    found = {name: device_faults(code_cells(path)) for name, path in lessons()}
    # the tour shows its own loop, and moves its model itself
    found["00_tour"] = [
        fault for fault in found["00_tour"] if fault != "trains without a device"
    ]
    for name in WITHOUT:
        assert found.pop(name), f"{name} is no exception any more"
    assert not {name: faults for name, faults in found.items() if faults}


@pytest.mark.parametrize(
    "code, says",
    [
        ("train(model, batches, 3)", "trains without a device"),
        ("from tformer.models.mini_gpt import train", "imports train of minimal"),
        ("t = time.perf_counter()", "trains or times, and asks for no device"),
        ("Trainer(model, batches, max_steps=1)", "trains or times, and asks"),
        ("device = torch.accelerator.is_available()", "looks for a GPU by itself"),
        ("train(model, batches, 3, device=lesson_device())", ""),
        ("Tokenizer.train(texts, 300)", ""),
        ("model.train()", ""),
        ("#| export\nt = time.perf_counter()", ""),
    ],
)
def test_such_a_lesson_is_found(code, says):
    found = device_faults([{"source": code}])
    assert says in "; ".join(found) if says else not found


def pretended(tmp_path, *cells):
    "What is said of a notebook that is run on the pretended card."
    import nbformat

    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(text, execution_count=1) for text in cells]
    )
    path = tmp_path / "some.ipynb"
    nbformat.write(book, path)
    return subprocess.run(
        [sys.executable, str(ROOT / "tests/pretended_lessons.py"), str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.nightly
def test_a_lesson_that_mixes_is_seen(tmp_path):
    setup = (
        "import torch\nfrom tformer.course.device import lesson_device\n"
        "device = lesson_device()\nx = torch.ones(3).to(device)\n"
        "assert x.is_cuda;"
    )
    run = pretended(tmp_path, setup, "y = x.cpu() + torch.ones(3);")
    assert run.returncode == 0, run.stdout
    run = pretended(tmp_path, setup, "y = x + torch.ones(3);")
    assert run.returncode == 1
    assert "Expected all tensors to be on the same" in run.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["package/nn/kv_cache", "package/course/device"])
def test_lessons_run_on_the_pretended_card(name):
    "The quick ones; `make pretend` runs the others."
    run = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests/pretended_lessons.py"),
            str(ROOT / "nbs" / f"{name}.ipynb"),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stdout[-3000:]
