"""Break the package on purpose: each change must turn its named test red.

A copy of the package and of the tests is changed by one replacement, and the
named test runs in a fork of a process that has imported PyTorch and the like
already, but nothing of the package. The test must fail itself: not at
collection, not in a fixture, not for a name that the change took away.

The changes are rows of ``mutations.yml``; ``book/_ext/code_changes.py`` says how they
are read and makes them.
"""

import ast
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book" / "_ext"))

import code_changes  # noqa: E402

Mutation = namedtuple("Mutation", "name where old new test")

# what is changed, where, from, to, and the test that must see it
ROWS = Path(__file__).parent / "mutations.yml"
MUTATIONS = [Mutation(**row) for row in code_changes.read_rows(ROWS)]

BLAMELESS = {
    "ImportError",
    "ModuleNotFoundError",
    "NameError",
    "SyntaxError",
    "IndentationError",
    "UnboundLocalError",
}
LIMIT = 300  # seconds for the tests of one copy; a change may never end


def mutated(mutation):
    "The module's path below the package, and its source with the mistake."
    package = ROOT / "tformer"
    path, qualname = code_changes.split_where(mutation.where, package)
    source = path.read_text(encoding="utf-8")
    change = code_changes.CodeChange(mutation.where, mutation.old, mutation.new)
    return path.relative_to(package), code_changes.apply(source, qualname, change)


# the process that forks, and its forks


def preload(files):
    "Import what the tests import, except the package and the tests."
    local = {"tformer", *(p.stem for p in files[0].parent.glob("*.py"))}
    import pytest  # noqa: F401

    for path in files:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = (
                [node.module or "."]
                if isinstance(node, ast.ImportFrom)
                else [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else []
            )
            for name in names:
                if name.split(".")[0] not in local:
                    exec(compile(ast.Module([node], []), path.name, "exec"), {})


class Log:
    "What the tests did: the plugin of a fork."

    def __init__(self):
        self.passed = []
        self.failed = []
        self.broken = []

    def pytest_collectreport(self, report):
        if report.failed:
            self.broken.append(f"{report.nodeid}: {report.longrepr}")

    def pytest_runtest_logreport(self, report):
        if report.failed and report.when != "call":
            self.broken.append(f"{report.nodeid}: {report.longrepr}")
        elif report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def pytest_exception_interact(self, node, call, report):
        if getattr(report, "when", None) == "call":
            self.failed.append(
                [node.nodeid, call.excinfo.typename, str(call.excinfo.value)[:300]]
            )


def run_tests(folder, tests, fast):
    "Run tests in this process against the package in `folder`."
    import pytest
    from hypothesis import Phase, settings

    phases = [Phase.explicit, Phase.generate]  # a failure is enough
    settings.register_profile("mutants", database=None, derandomize=True, phases=phases)
    settings.load_profile("mutants")
    assert not any(m.split(".")[0] == "tformer" for m in sys.modules)
    os.chdir(folder)
    sys.path.insert(0, folder)
    log = Log()
    code = pytest.main(
        [
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:unraisableexception",
            "-p",
            "_hypothesis_pytestplugin",
            "--tb=short",
            "--rootdir",
            folder,
            *(["-x"] if fast else []),
            *(f"tests/{t}" for t in tests),
        ],
        [log],
    )
    files = [
        m.__file__ for name, m in sys.modules.items() if name.split(".")[0] == "tformer"
    ]
    return {"code": int(code), "files": files, **vars(log)}


def fork(task):
    "The result of one task, computed by a child that then ends."
    answer = tempfile.TemporaryFile()  # noqa: SIM115, parent and child close it
    output = tempfile.TemporaryFile()  # noqa: SIM115
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT)
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
        try:
            result = run_tests(**task)
        except BaseException as error:
            result = {"died": repr(error)}
        answer.write(json.dumps(result).encode())
        answer.flush()
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    for file in (answer, output):
        file.seek(0)
    text = answer.read().decode()
    result = json.loads(text) if text else {"died": f"status {status}"}
    return {**result, "output": output.read().decode(errors="replace")[-4000:]}


def serve():
    "Answer every line of the input, a task, by a line: its result."
    sys.dont_write_bytecode = False  # what is not changed is kept
    folder = Path(sys.argv[1])
    sys.path[:] = [p for p in sys.path if p != str(Path(__file__).parent)]
    preload([folder / "tests" / name for name in sys.argv[2:]])
    gc.collect()
    gc.freeze()  # a child's collections need not copy all of it
    for line in sys.stdin:
        print(json.dumps(fork(json.loads(line))), flush=True)


# the tests

FILES = sorted({m.test.split("::")[0] for m in MUTATIONS})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A copy of the package and of the tests."
    folder = tmp_path_factory.mktemp("mutants")
    for name in ("tformer", "tests"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    return folder


@pytest.fixture(scope="module")
def ask(folder):
    "Runs tests against the copy as it is, and tells what happened."
    if not hasattr(os, "fork"):
        pytest.skip("needs a system that forks")
    env = {
        k: v
        for k, v in os.environ.items()
        if k not in ("TFORMER_SHAPES", "PYTEST_ADDOPTS")
        and not k.startswith("PYTEST_XDIST")
    }
    server = subprocess.Popen(
        [sys.executable, __file__, folder, *FILES],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            **env,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
    )

    def ask(tests, fast=True):
        task = {"folder": str(folder), "tests": tests, "fast": fast}
        server.stdin.write(json.dumps(task) + "\n")
        server.stdin.flush()
        result = json.loads(server.stdout.readline())
        assert "died" not in result, result["died"] + result["output"]
        assert result["files"], "the package was not imported"
        for file in result["files"]:
            assert Path(file).is_relative_to(folder / "tformer")
        assert not result["broken"], result["broken"]
        return result

    yield ask
    server.stdin.close()
    assert server.wait() == 0


def write(path, source):
    """Change a module; what was compiled of it goes.

    Python would take that for current: the same second, the same size.
    Of all other modules and of the tests it is used again.
    """
    path.write_text(source, encoding="utf-8")
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()


def check(mutation, folder, ask):
    "Change the copy, run the test, change it back; return which have failed."
    module, changed = mutated(mutation)
    path = folder / "tformer" / module
    source = path.read_text(encoding="utf-8")
    write(path, changed)
    try:
        result = ask([mutation.test])
    finally:
        write(path, source)
    assert result["code"] == 1 and result["failed"], (
        f"{mutation.test} stays green: {result['output']}"
    )
    for node, kind, message in result["failed"]:
        assert f"{node}[".startswith(f"tests/{mutation.test}[")
        assert kind not in BLAMELESS, f"{kind}: {message}"
    return {node for node, *_ in result["failed"]}


@pytest.fixture(scope="module")
def seen():
    "The tests that a change has turned red, each with its parameters."
    return set()


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[m.name for m in MUTATIONS])
def test_a_change_is_seen(mutation, folder, ask, seen):
    seen.update(check(mutation, folder, ask))


def test_nothing_is_red_without_a_change(ask, seen):
    "What was red with a change; run without those, all that rows name."
    tests = sorted(node.removeprefix("tests/") for node in seen) or sorted(
        {m.test for m in MUTATIONS}
    )
    result = ask(tests, fast=False)
    assert result["code"] == 0 and not result["failed"], result["output"]
    for test in tests:
        assert any(f"{p}[".startswith(f"tests/{test}[") for p in result["passed"]), (
            f"{test} did not run"
        )


HERE = "test_functional.py::test_i_love_ai"
RENAMED = (
    "def softmax($$parameters) -> $r:\n    $$body",
    "def sofmax($$parameters) -> $r:\n    $$body",
)


@pytest.mark.parametrize(
    "row, says",
    [
        (("nn.functional.softmax", "$a / $b", "$b ** -1 * $a", HERE), "stays green"),
        (("nn.functional.softmax", *RENAMED, HERE), "ImportError"),
        (
            (
                "nn.functional.attend",
                "$weights = $softmax($scores)",
                "$weights = sotfmax($scores)",
                HERE,
            ),
            "NameError",
        ),
        (("nn.functional.softmax", "$a / $b", "$b / $a", HERE + "_not"), "not found"),
    ],
)
def test_what_is_no_proof_is_refused(row, says, folder, ask):
    with pytest.raises(AssertionError, match=says):
        check(Mutation("", *row), folder, ask)


def test_every_row_can_be_made():
    "Each place is there once, and so is each test."
    tests = {}
    for mutation in MUTATIONS:
        mutated(mutation)
        name, test = mutation.test.split("::", 1)
        text = tests.setdefault(name, (ROOT / "tests" / name).read_text("utf-8"))
        function = test.split("[")[0].split("::")[-1]
        assert f"def {function}(" in text, mutation.test


def test_names_of_mutations_are_different():
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS)


if __name__ == "__main__":
    serve()
