"""The wheel: what is in it, what it asks for, and that it works alone."""

import email
import json
import re
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import course  # book/_ext, where the conftest of the root looks
from conftest import ROOT, run


def build(copy, out):
    "The wheel of a copy of the tree, built by way of the sdist."
    run(sys.executable, "-m", "build", "--no-isolation", "-o", out, cwd=copy)
    assert len(list(out.glob("*.tar.gz"))) == 1
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, copy_tree):
    "The wheel, built from a clean copy."
    return build(
        copy_tree(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("dist")
    )


def metadata(wheel):
    with zipfile.ZipFile(wheel) as z:
        name = next(n for n in z.namelist() if n.endswith("/METADATA"))
        return email.message_from_bytes(z.read(name))


def unshared_files(wheel, root):
    "Files that the wheel holds and the package does not, and the reverse."
    with zipfile.ZipFile(wheel) as z:
        names = {n for n in z.namelist() if ".dist-info/" not in n}
    here = {
        str(p.relative_to(root))
        for p in (root / "tformer").rglob("*")
        if p.suffix in {".py", ".csv", ".safetensors", ".json"}
    }
    return sorted(names ^ (here | {"tformer/py.typed"}))


def test_wheel_holds_the_package_alone(wheel):
    assert not unshared_files(wheel, ROOT)


def test_wheel_brings_the_command(wheel):
    with zipfile.ZipFile(wheel) as z:
        name = next(n for n in z.namelist() if n.endswith("/entry_points.txt"))
        lines = z.read(name).decode().splitlines()
    assert (
        lines[lines.index("[console_scripts]") + 1] == "tformer = tformer.__main__:main"
    )


def test_wheel_asks_for_lower_bounds_alone(wheel):
    meta = metadata(wheel)
    asked = meta.get_all("Requires-Dist")
    plain = {re.split(r"[>=<; ]", r)[0] for r in asked if "extra" not in r}
    assert plain == {
        "torch",
        "numpy",
        "einops",
        "jaxtyping",
        "regex",
        "tqdm",
        "safetensors",
        "typer",
    }
    for line in asked:
        assert re.fullmatch(r"[\w-]+>=[\d.]+(; extra == \"\w+\")?", line)
    assert meta["Requires-Python"] == ">=3.11"
    assert meta["License"] == "Apache-2.0" or meta["License-Expression"] == "Apache-2.0"


def readme_snippets():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    shown = re.findall(r"```text\n(.*?)```", text, re.S)
    assert blocks and len(blocks) == len(shown), (
        "the README shows no Python, or not its output"
    )
    return zip(blocks, shown, strict=True)


def needed(requires, extras):
    "The installed distributions that these requirements lead to."
    found = {}
    left = [(line, extras) for line in requires]
    while left:
        line, extras = left.pop()
        asked = Requirement(line)
        if asked.marker and not any(
            asked.marker.evaluate({"extra": e}) for e in extras
        ):
            continue
        key = asked.name, frozenset(asked.extras)
        if key not in found:
            found[key] = distribution(asked.name)
            left += [(line, ("", *asked.extras)) for line in found[key].requires or ()]
    return found.values()


@pytest.fixture
def fresh(wheel, tmp_path):
    """An environment of its own, into which pip has put the wheel.

    What the wheel asks for is linked into it from the one that runs the
    tests, which is quicker than to install PyTorch again; nothing else
    is there, and pip, without an index, refuses what is missing.
    """
    home = tmp_path / "env"
    venv.create(home, with_pip=False)
    site = next(home.glob("lib/python*/site-packages"))
    for dist in needed(metadata(wheel).get_all("Requires-Dist"), ("", "plot")):
        for top in {f.parts[0] for f in dist.files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(dist.locate_file(top).resolve())
    python = home / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-index",
        "-c",
        ROOT / "requirements.txt",
        f"{wheel}[plot]",
        cwd=tmp_path,
    )
    return python


IN_FORKS = """
import importlib.util, json, os, sys

snippets, modules = json.load(sys.stdin)


def fork(function, problem):
    sys.stdout.flush()
    if not os.fork():
        function()
        sys.stdout.flush()
        os._exit(0)
    if os.wait()[1]:
        sys.exit(problem)


for name in modules:        # what else they import is then at hand
    importlib.import_module(f"tformer.{name}")
for name in [m for m in sys.modules if m.split(".")[0] == "tformer"]:
    del sys.modules[name]
for name in modules:
    fork(lambda: importlib.import_module(f"tformer.{name}"),
         f"tformer.{name} cannot be imported alone")
for snippet in snippets:
    fork(lambda: exec(snippet, {"__name__": "__main__"}), snippet)
    print(end="\\0")
import tformer
print(tformer.__file__, end="\\0")
for name in ("pytest", "transformers"):
    print(importlib.util.find_spec(name), end="\\0")
"""


def test_readme_runs_from_the_wheel_in_a_fresh_environment(fresh, tmp_path):
    "Each snippet, and each module alone, in a fork of one process."
    snippets, shown = zip(*readme_snippets(), strict=False)
    modules = course.module_names(ROOT)
    said = run(
        fresh, "-I", "-c", IN_FORKS, cwd=tmp_path, input=json.dumps([snippets, modules])
    ).split("\0")
    *printed, where, pytest_there, transformers_there, end = said
    assert printed == list(shown)
    assert Path(where).is_relative_to(tmp_path / "env")
    assert (pytest_there, transformers_there, end) == ("None", "None", "")


def test_modules_are_there_on_first_use():
    """import tformer; tformer.check works, and costs nothing before.

    All modules but one can be imported without matplotlib, and that one says what is
    missing.
    """
    said = run(
        sys.executable,
        "-c",
        """
import sys, tformer
assert "torch" not in sys.modules and "check" in dir(tformer)
assert not {"importlib", "pkgutil"} & {*dir(tformer)}
sys.modules["matplotlib"] = None  # as if it were not installed
from tformer import *
assert check.causal and bundle.load_bundle and "plot" not in dir()
assert "plot" in dir(tformer)
for ask in (lambda: tformer.plot, lambda: __import__("tformer.plot")):
    try:
        ask()
    except ImportError as error:
        print(error)
del sys.modules["matplotlib"]
assert callable(tformer.check.causal)
for name in (*tformer.__all__, "plot"):
    assert getattr(tformer, name).__name__ == f"tformer.{name}"
try:
    tformer.chek
except AttributeError as error:
    print(error)
""",
    )
    missing = 'figures need matplotlib: pip install "tformer[plot]"'
    *without, unknown = said.splitlines()
    assert without == [missing, missing]
    assert unknown.startswith("tformer has no module 'chek'; it has base, ")


def test_importing_the_package_imports_the_standard_library_alone():
    said = run(
        sys.executable,
        "-c",
        """
import importlib, pkgutil, sys
before = {*sys.modules}
import tformer
print(*sorted({*sys.modules} - before))
""",
    )
    assert {*said.split()} - sys.stdlib_module_names == {"tformer"}


@pytest.mark.parametrize(
    "module",
    [
        "base.validate",
        "base.files",
        "base.interrupts",
        "base.workers",
        "text.bpe",
        "text.pretokenizer",
        "text.vocabulary",
        "text.bpe_trainer",
        "text.tokenizer_files",
        "text.tokenizer",
        "text.wordpiece",
    ],
)
def test_texts_become_tokens_without_torch(module):
    run(
        sys.executable,
        "-c",
        f"""
import sys
sys.modules["torch"] = None  # as if it were not installed
import tformer.{module}
""",
    )
