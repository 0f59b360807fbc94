"""The workflows can be read, and what they run is there.

A workflow that is broken stops the book from being published, and nothing else says so.
"""

import os
import re
import subprocess

import pytest
import yaml

from conftest import ROOT

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PATH = re.compile(r"(?<![\w./-])(?:tests|experiments|book)/[\w./-]+\.(?:py|cfg|css)\b")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_a_workflow_names_is_there(path):
    jobs = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]
    for name, job in jobs.items():
        needs = job.get("needs", [])
        for other in [needs] if isinstance(needs, str) else needs:
            assert other in jobs, f"{name} needs {other}"
        assert all("run" in step or "uses" in step for step in job["steps"]), name
    text = "\n".join(
        step.get("run", "") for job in jobs.values() for step in job["steps"]
    )
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake (\w+)", text):
        assert re.search(rf"^{target}:", rules, re.M), f"make {target}"
    for name in PATH.findall(text):
        assert (ROOT / name).exists(), name


def test_there_are_workflows():
    assert {"ci", "gpu", "nightly", "weekly"} <= {path.stem for path in FILES}


def test_the_tests_of_the_wheel_are_copied_with_what_they_read(tmp_path):
    "They run away from the checkout, where nothing else of it is."
    path = ROOT / ".github" / "workflows" / "ci.yml"
    steps = yaml.safe_load(path.read_text("utf-8"))["jobs"]["package"]["steps"]
    script = next(s["run"] for s in steps if s.get("name") == "Test from the wheel")
    choice = script[: script.index("cd ")] + "echo $files"
    done = subprocess.run(
        ["bash", "-e", "-c", choice],
        cwd=ROOT,
        check=True,
        text=True,
        capture_output=True,
        env={**os.environ, "RUNNER_TEMP": str(tmp_path)},
    )
    chosen = done.stdout.split()
    assert len(chosen) > 30
    for name in chosen:
        text = (tmp_path / "alone" / name).read_text(encoding="utf-8")
        for read in re.findall(r'ROOT / "([\w./-]+)"', text):
            assert (tmp_path / "alone" / read).exists(), f"{name} reads {read}"
