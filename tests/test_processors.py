"""Switches to another processor's code: what each must change, and what is refused."""

import os
import subprocess
import sys

import pytest
import torch

import processors
from conftest import ROOT

SCRIPT = ROOT / "tests" / "processors.py"


def run(*words):
    return subprocess.run(
        [sys.executable, SCRIPT, *words], text=True, check=False, capture_output=True
    )


def made_up(monkeypatch, results):
    "Let `results[switch]` be the hashes that successive processes print."
    asked = []

    def hash_once(switch):
        asked.append(switch)
        values = results[switch]
        return dict(values[asked.count(switch) % len(values)])

    monkeypatch.setattr(processors, "_hash_once", hash_once)


def test_a_switch_sets_variables_and_nothing_else():
    assert processors.variables("MKL_CBWR=AVX2 OMP_NUM_THREADS=2") == {
        "MKL_CBWR": "AVX2",
        "OMP_NUM_THREADS": "2",
    }
    for wrong in ("AVX2", "PATH=/tmp", "MKL_CBWR=", "=AVX2"):
        with pytest.raises(SystemExit, match="a switch is VARIABLE=value"):
            processors.variables(wrong)
    for switch in processors.SWITCHES:
        assert processors.variables(switch)


def test_the_first_switch_that_changes_something_is_taken(monkeypatch):
    own = [{"sum": "a", "product": "b"}]
    monkeypatch.setattr(processors, "SWITCHES", ["MKL_CBWR=AVX2", "OMP_NUM_THREADS=2"])
    made_up(
        monkeypatch,
        {
            "": own,
            "MKL_CBWR=AVX2": own,
            "OMP_NUM_THREADS=2": [{"sum": "c", "product": "b"}],
        },
    )
    assert processors.choose() == ("OMP_NUM_THREADS=2", ["sum"])
    with pytest.raises(SystemExit, match="MKL_CBWR=AVX2 changes none of sum, product"):
        processors.choose("MKL_CBWR=AVX2")


def test_a_result_that_varies_from_run_to_run_tells_nothing(monkeypatch):
    made_up(
        monkeypatch,
        {"": [{"sum": "a"}, {"sum": "b"}], "OMP_NUM_THREADS=2": [{"sum": "c"}]},
    )
    assert processors.changed("OMP_NUM_THREADS=2", processors.hashes()) == []


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="this processor has no vector instructions to leave out",
)
def test_a_command_runs_under_the_switch_and_its_status_is_returned():
    code = (
        "import os, sys, torch; print(torch.backends.cpu.get_cpu_capability()); "
        "sys.exit(3)"
    )
    done = run(
        "run", "--switch", "ATEN_CPU_CAPABILITY=default", sys.executable, "-c", code
    )
    assert done.returncode == 3 and done.stdout.splitlines()[-1] == "DEFAULT", done
    assert "ATEN_CPU_CAPABILITY=default changes " in done.stdout
    assert "ATEN_CPU_CAPABILITY" not in os.environ
    refused = run("run", "--switch", "ATEN_CPU_CAPABILITY", "true")
    assert refused.returncode == 1 and "VARIABLE=value" in refused.stderr
