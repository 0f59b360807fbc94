"""What the README says of uv: a clone is set up, and writes a story."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT, run


def wheel_folders():
    "The folders of wheels that pip is told of, by its settings."
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        text=True,
        capture_output=True,
        check=False,
    )
    found = re.findall(r"find-links='(.*?)'", done.stdout)
    return [
        Path(name.removeprefix("file://")) for line in found for name in line.split()
    ]


def torch_on_disk():
    "A CPU build of torch for this Python, or None."
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    return next(
        (
            path
            for folder in wheel_folders()
            for path in sorted(folder.glob(f"torch-*+cpu-{tag}-{tag}-*.whl"))
        ),
        None,
    )


@pytest.mark.nightly
def test_uv_sets_up_a_clone_that_writes_a_story(tmp_path, copy_tree):
    uv = os.environ.get("UV") or shutil.which("uv")
    wheel = torch_on_disk()
    if uv is None:
        pytest.skip("no uv on this machine: neither in $UV nor on the path")
    if wheel is None:
        pytest.skip("no CPU build of torch in the folders of pip's find-links")
    clone = copy_tree(tmp_path / "clone")
    project = clone / "pyproject.toml"
    version = wheel.name.split("-")[1]
    text, count = re.subn(
        r"^\[tool\.uv\]$",
        rf'\g<0>\nconstraint-dependencies = ["torch=={version}"]',
        project.read_text(encoding="utf-8"),
        flags=re.M,
    )
    assert count == 1
    project.write_text(text, encoding="utf-8")
    env = {
        k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")
    }
    links = ["--find-links", str(wheel.parent)]
    run(
        uv,
        "sync",
        "--no-progress",
        "--python",
        sys.executable,
        *links,
        cwd=clone,
        env=env,
    )
    story = run(
        uv,
        "run",
        *links,
        "-m",
        "tformer",
        "Once upon a time",
        "--seed",
        "1",
        cwd=clone,
        env=env,
    )
    assert story.startswith("Once upon a time ") and len(story.split()) > 8
    where = run(
        uv,
        "run",
        *links,
        "python",
        "-c",
        "import tformer, torch; print(tformer.__file__, torch.__version__)",
        cwd=clone,
        env=env,
    )
    assert where.split() == [str(clone / "tformer" / "__init__.py"), version]


def test_the_lock_of_uv_is_not_committed():
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").split()
    assert "/uv.lock" in ignored
    assert "[tool.uv]\n" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
