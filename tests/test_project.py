"""The project's own order: imports, exports, notebooks, addresses, time."""

import ast
import importlib.util
import json
import os
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import course  # book/_ext, where the conftest of the root looks
from build_book import project_files
from conftest import ROOT, run

NOTEBOOKS = course.notebook_paths(ROOT)
MODULES = course.module_paths(ROOT)
every = pytest.mark.parametrize("path", NOTEBOOKS, ids=course.document_names(ROOT))
ANYWHERE = {
    "plot",
    "corpora.stories",
    "nn.tensor_checks",
    "base.validate",
    "base.files",
    "base.interrupts",
}  # importable from every chapter
# what a notebook may take from later: the tour loads the weights that it began to
# train, a trained model continues texts by the decoder of chapter 21, a saved model may
# have been quantized, and the parts of an engine are shown at work in one
EARLY = {
    "00_tour": {"tformer.bundle", "tformer.course.ablations", "tformer.course.device"},
    "18_translation": {"tformer.inference.generation"},
    "package/bundle": {
        "tformer.inference.generation",
        "tformer.inference.sampler",
        "tformer.tasks.translation",
    },
    "package/models/base": {"tformer.models.gpt", "tformer.nn.quantized"},
    "package/nn/layers": {"tformer.nn.feed_forward"},
    "package/serving/requests": {"tformer.serving.engine"},
    "package/serving/scheduler": {"tformer.serving.engine"},
    "package/serving/executor": {"tformer.serving.engine"},
}
# appendices and notebooks of the package, which stand between chapters in the order
# of imports
READ_AS = {
    "A4_rebuild": "12~~",
    "A8_trained": "17~~",
    "package/bundle": "17~",
    "package/models/base": "08~",
    "package/course/rebuild": "12~",
    "package/corpora/documents": "14~",
    "package/training/checkpoints": "16~",
    "package/corpora/bilingual": "17~",
    "package/text/wordpiece": "17~",
    "package/variants/gqa": "23~",
    "package/variants/mla": "24~",
    "package/variants/sliding_window": "25~",
    "package/variants/sparse": "26~",
    "package/command_line": "28~",
    "package/training/losses": "15~",
    "package/training/optimizers": "15~",
    "package/base/runtime": "00~",
    "package/nn/static_cache": "20~",
    "package/nn/paged_cache": "22~",
    "package/inference/compiled": "20~~~~",
    "package/serving/requests": "22~1",
    "package/serving/runner": "22~~",
    "package/serving/scheduler": "22~~~1",
    "package/serving/executor": "22~~~2",
    "package/serving/engine": "22~~~3",
    "package/inference/logits": "19~1",
    "package/inference/sampler": "19~2",
    "package/inference/generation": "20~~~",
    "package/nn/quantized": "21~",
    "package/inference/prefix": "21~",
    "package/inference/speculative": "21~~",
    "package/inference/beam": "21~~~",
    "package/inference/scoring": "21~",
    "package/nn/embedding": "03~",
    "package/nn/rotary": "04~1",
    "package/nn/rope_scaling": "04~2",
    "package/nn/relative_bias": "04~3",
    "package/nn/norms": "05~1",
    "package/nn/layers": "05~2",
    "package/nn/feed_forward": "05~3",
    "package/nn/positions": "06~",
    "package/nn/kv_cache": "06~~",
    "package/nn/attention_backends": "06~~",
    "package/nn/attention": "06~~~",
    "package/check/report": "07~1",
    "package/check/adapter": "07~2",
    "package/check/trial": "07~3",
    "package/check/causality": "07~4",
    "package/check/padded_batches": "07~5",
    "package/check/cached_decoding": "07~6",
    "package/check/gradient_flow": "07~7",
    "package/check/reference": "07~8",
    "package/check/suite": "07~9",
    "package/base/workers": "02~1",
    "package/text/pretokenizer": "02~2",
    "package/text/vocabulary": "02~3",
    "package/text/bpe_trainer": "02~4",
    "package/text/tokenizer_files": "02~5",
    "package/text/tokenizer": "02~6",
    "package/costs": "13~",
    "package/course/ablations": "00~",
    "package/course/device": "00~",
}
STANDARD = set(sys.stdlib_module_names)
RUNTIME = {
    "torch",
    "numpy",
    "einops",
    "jaxtyping",
    "regex",
    "tqdm",
    "safetensors",
    "typer",
}


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def source(cell):
    return "".join(cell["source"])


def code_cells(path):
    return [c for c in read(path)["cells"] if c["cell_type"] == "code"]


def modules(root):
    "The text of every exported module, by its dotted name."
    return {
        course.module_name(root, path): path.read_text(encoding="utf-8")
        for path in course.module_paths(root)
    }


def folder_of(name):
    "The dotted name of the folder that holds a module of this dotted name."
    return name.rpartition(".")[0]


def taken_from(node, folder=""):
    """The dotted name, below the package, of what an import takes names from.

    The package's own is the empty name; None stands for another package. The
    folder is that of the module in which the import stands.
    """
    parts = node.module.split(".") if node.module else []
    if not node.level:
        return ".".join(parts[1:]) if parts[:1] == ["tformer"] else None
    above = folder.split(".") if folder else []
    return ".".join(above[: len(above) - node.level + 1] + parts)


def imported(tree, folder=""):
    "(package, dotted name below it) of every import."
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.partition(".")[::2]
        elif isinstance(node, ast.ImportFrom):
            base = taken_from(node, folder)
            if base is None:
                yield node.module.partition(".")[::2]
                continue
            for alias in node.names:
                yield "tformer", f"{base}.{alias.name}".strip(".")


def module_in(name, known):
    "The known module of which a dotted name is a part, else the name."
    parts = name.split(".")
    heads = [".".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return next((head for head in heads if head in known), name)


def order_faults(order, name, tree, folder=""):
    "Imports of `tree`, exported by notebook `name`, that come too early."
    for package, rest in imported(tree, folder):
        module = module_in(rest, {*order, *ANYWHERE})
        if package != "tformer" or not rest or module in ANYWHERE:
            continue
        if order.get(module, "~") >= name:
            yield f"{name} imports tformer.{module}"


def read_with(root, order):
    "The place in the order of each package: that of the last module it re-exports."
    found = {}
    for path in (root / "tformer").rglob("*/__init__.py"):
        name = ".".join(path.parent.relative_to(root / "tformer").parts)
        taken = {
            module_in(rest, order)
            for _, rest in imported(ast.parse(path.read_text("utf-8")), name)
        }
        if placed := taken & {*order}:
            found[name] = max(order[m] for m in placed)
    return found


def early_imports(root):
    "Imports that the order of reading forbids, in modules and notebooks."
    text = modules(root)
    notebook = {name: course.exported_from(code) for name, code in text.items()}
    order = {m: READ_AS.get(n, n) for m, n in notebook.items()}
    order |= read_with(root, order)
    faults = []
    for name, code in text.items():
        early = EARLY.get(notebook[name], set())
        faults += [
            fault
            for fault in order_faults(
                order, order[name], ast.parse(code), folder_of(name)
            )
            if fault.split()[-1] not in early
        ]
    for path in course.notebook_paths(root):
        name = course.document_name(root, path)
        own = {f"tformer.{m}" for m, n in notebook.items() if n == name}
        own |= EARLY.get(name, set())
        for cell in code_cells(path):
            tree = ast.parse(course.MAGIC.sub(r"\1pass", source(cell)))
            faults += [
                fault
                for fault in order_faults(order, READ_AS.get(name, name), tree)
                if fault.split()[-1] not in own
            ]
    return faults


def test_imports_follow_the_order_of_reading():
    assert not early_imports(ROOT)
    placed = {"check.report": "07", "check.suite": "09", "mini_gpt": "00"}
    assert read_with(ROOT, placed)["check"] == "09"
    order = {"attend": "01_a", "bpe": "02_b", "nn.norms": "06_n"}
    for line, folder, module in (
        ("from tformer.bpe import BPE", "", "bpe"),
        ("from . import bpe", "", "bpe"),
        ("import tformer.bpe as b", "", "bpe"),
        ("from ..bpe import BPE", "nn", "bpe"),
        ("from .norms import Norm", "nn", "nn.norms"),
        ("from tformer.nn import norms", "", "nn.norms"),
        ("from tformer.nn.norms import Norm", "", "nn.norms"),
        ("from . import norms", "nn", "nn.norms"),
        ("from tformer.gone import x", "", "gone.x"),
        ("from .attend import attend", "", None),
        ("from ..attend import attend", "nn", None),
        ("from ..plot import show", "nn", None),
    ):
        found = [*order_faults(order, "01_b", ast.parse(line), folder)]
        assert found == [f"01_b imports tformer.{module}"] * bool(module), line


def test_run_time_imports_are_declared():
    for name, text in modules(ROOT).items():
        allowed = STANDARD | RUNTIME | {"tformer"}
        if name == "plot":
            allowed |= {"matplotlib", "PIL"}  # Pillow comes with it
        if name == "corpora.documents":
            allowed |= {"pyarrow"}  # for Parquet alone
        if name == "tasks.translation":
            allowed |= {"sacrebleu"}  # for BLEU and chrF alone
        extra = {p for p, _ in imported(ast.parse(text))} - allowed
        assert not extra, f"{name} imports {sorted(extra)}"


def export(root):
    "Write the modules of all notebooks anew."
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"}
    run(
        sys.executable,
        "-c",
        "from nbdev.doclinks import nbdev_export as f; f()",
        cwd=root,
        env=env,
    )


def package_texts(root):
    "Every Python file of the package, by its path below it."
    return {
        path.relative_to(root / "tformer").as_posix(): path.read_text(encoding="utf-8")
        for path in (root / "tformer").rglob("*.py")
    }


def changed_by_export(copy):
    "Files of the package that differ when a copy is exported from nothing."
    before = package_texts(copy)
    for path in course.module_paths(copy):
        path.unlink()
    (copy / "tformer" / "_modidx.py").unlink()
    export(copy)
    export(copy)
    after = package_texts(copy)
    return sorted(
        name for name in {*before, *after} if before.get(name) != after.get(name)
    )


def test_exporting_again_changes_nothing(tmp_path, copy_tree):
    assert not changed_by_export(copy_tree(tmp_path)), "export again"


def homeless_modules(root):
    "Modules whose notebook is gone: an export leaves them as they are."
    names = course.document_names(root)
    return [
        name
        for name, text in modules(root).items()
        if course.exported_from(text) not in names
    ]


def test_every_module_has_its_notebook():
    assert MODULES and not homeless_modules(ROOT)


def unlisted_notebooks(root):
    "Notebooks that are not in the table of contents once, and the reverse."
    here = Counter(course.document_names(root))
    here.subtract(course.names_in_toc(root))
    return sorted(name for name, n in here.items() if n)


def unindexed_modules(root):
    """Modules that nbdev's index does not hold, and what it holds beside them.

    It leaves out a module whose name begins with an underscore.
    """
    index = load(root / "tformer" / "_modidx.py").d["syms"]
    names = {
        f"tformer.{name}" for name in course.module_names(root) if name != "__main__"
    }
    return sorted(names ^ {*index})


def test_every_notebook_and_module_is_listed():
    """The lists that all checks walk through are complete.

    They are compared with the table of contents, which the book follows, and
    with the index, which nbdev writes.
    """
    assert len(NOTEBOOKS) > 30 and not unlisted_notebooks(ROOT)
    assert len(MODULES) > 30 and not unindexed_modules(ROOT)


def test_cleaning_again_changes_nothing(tmp_path, copy_tree):
    copy = copy_tree(tmp_path)
    run(sys.executable, "-c", "from nbdev.clean import nbdev_clean as f; f()", cwd=copy)
    for path in NOTEBOOKS:
        assert path.read_text(encoding="utf-8") == (
            copy / path.relative_to(ROOT)
        ).read_text(encoding="utf-8"), (
            f"make notebooks NB={course.document_name(ROOT, path)} was not run"
        )


@every
def test_notebook_holds_what_its_readers_expect(path):
    nb = read(path)
    prose = "\n\n".join(source(c) for c in nb["cells"] if c["cell_type"] == "markdown")
    assert re.match(r"# \S.*\n\n> \S", source(nb["cells"][0])), (
        "a notebook opens with its title and one line that sums it up"
    )
    if course.document_name(ROOT, path).startswith("package/"):
        holds_what_a_package_notebook_holds(path, prose)
    else:
        holds_what_a_lesson_holds(path, prose)
    outputs = json.dumps([c["outputs"] for c in code_cells(path)])
    assert '"output_type": "error"' not in outputs
    assert '"image/png":' not in outputs, "draw with plot.show"


def holds_what_a_lesson_holds(path, prose):
    for part in (
        "How this goes wrong",
        "What to remember",
        "Questions you can now answer",
        "Exercises",
        "Further reading",
    ):
        assert re.search(rf"^## {part}", prose, re.M), f"no part: {part}"
    for kind in ("Predict", "Break", "Build"):
        assert re.search(rf"\{{exercise(-start)?\}} {kind}: .*minutes\)", prose), (
            f"no exercise: {kind}: … (N minutes)"
        )
    outputs = json.dumps([c["outputs"] for c in code_cells(path)])
    assert "<svg" in outputs, "no figure"


def holds_what_a_package_notebook_holds(path, prose):
    module = course.read_notebook(path).module
    own = "command_line" if module == "__main__" else module.replace(".", "/")
    assert course.document_name(ROOT, path) == f"package/{own}", (
        "it stands at the path of its module"
    )
    purpose = prose.split("\n\n")[2]
    assert 2 <= len(re.findall(r"[a-z)`]\.(?: |$)", purpose)) <= 5, (
        "a few sentences say what the module is for"
    )
    assert f"```{{package-calls}} {module}\n" in prose, "no drawing of who calls whom"
    assert re.search(r"^## Why it is built so$", prose, re.M), "no reasons"
    codes = [source(c) for c in code_cells(path)]
    shown = [code for code in codes if not code.startswith("#|")]
    assert 3 <= len(shown[0].splitlines()) <= 12, "no short example at the head"
    assert any("#| verified: " in code for code in codes), "no claim is proved"


@every
def test_exported_code_is_documented_and_asserts_nothing(path):
    for cell in code_cells(path):
        text = source(cell)
        if not re.search(r"^#\s*\|\s*exporti?\b", text, re.M):
            continue
        tree = ast.parse(text)
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Assert), "assert in the package"
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (
                not node.name.startswith("_")
            ):
                assert ast.get_docstring(node), f"{node.name}: no docstring"


# names that begin with _ are a module's own; what still reaches for those
# of another module: this can only shrink
PRIVATE_USES = set()


def private_uses(tree, folder="", known=()):
    "Private names that a module takes from others, as module.name."
    names = {}  # of modules of the package, as they are called here
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("tformer."):
                    names[alias.asname or alias.name] = alias.name[8:]
        elif (
            isinstance(node, ast.ImportFrom)
            and (module := taken_from(node, folder)) is not None
        ):
            for alias in node.names:
                name = f"{module}.{alias.name}".strip(".")
                if is_private(alias.name):
                    yield name
                elif not module or node.module is None or name in known:
                    names[alias.asname or alias.name] = name
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and is_private(node.attr)
            and (module := names.get(ast.unparse(node.value)))
        ):
            yield f"{module}.{node.attr}"


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def test_private_names_stay_in_their_module():
    found = {
        f"{name}: {use}"
        for name, text in modules(ROOT).items()
        for use in private_uses(
            ast.parse(text), folder_of(name), course.module_names(ROOT)
        )
    }
    assert found <= PRIVATE_USES, f"new: {sorted(found - PRIVATE_USES)}"
    assert found >= PRIVATE_USES, (
        f"mended, take them out: {sorted(PRIVATE_USES - found)}"
    )
    slips = """
from .attend import attend, _hidden
from tformer.layers import _other as other
from . import rotary as turn, validate
import tformer.gpt
import tformer.bert as b
turn._turned(1), validate.integer(n=1), tformer.gpt._deep.x, b._made(2)
self._own, b.__name__, attend._not_a_module
"""
    assert sorted(private_uses(ast.parse(slips))) == [
        "attend._hidden",
        "bert._made",
        "gpt._deep",
        "layers._other",
        "rotary._turned",
    ]
    slips = """
from ..attend import attend, _hidden
from .norms import _other
from . import rotary as turn
from tformer.nn import blocks
turn._turned(1), blocks._made, self._own
"""
    assert sorted(private_uses(ast.parse(slips), "nn", {"nn.blocks"})) == [
        "attend._hidden",
        "nn.blocks._made",
        "nn.norms._other",
        "nn.rotary._turned",
    ]


# lessons that draw code of the package with {package-source}, because they lost a cell
# to it and are not rewritten yet: this list can only shrink
LESSONS_THAT_QUOTE_THE_PACKAGE = {
    "03_tokenizer",
    "08_is_it_right",
    "14_costs",
    "16_objectives_and_optimizers",
}


def quoting_notebooks(root):
    "The document names of the notebooks that use the directive in any cell."
    return {
        course.document_name(root, path)
        for path in course.notebook_paths(root)
        if any(
            "{package-source}" in source(c) or ".. package-source::" in source(c)
            for c in read(path)["cells"]
        )
    }


def test_lessons_that_quote_the_package_are_listed(tmp_path):
    found = quoting_notebooks(ROOT)
    listed = LESSONS_THAT_QUOTE_THE_PACKAGE
    assert found <= listed, f"write them anew instead: {sorted(found - listed)}"
    assert found >= listed, f"rewritten, take them out: {sorted(listed - found)}"
    for name, text in (
        ("01_a", "```{package-source} attend.attend\n```"),
        ("package/nn/b", "````{closer} x\n:::{package-source}\na.b\n"),
        ("02_c", "```{eval-rst}\n.. package-source:: a.b\n```"),
        ("03_d", "```{package-calls} attend\n```"),
    ):
        path = course.notebook_path(tmp_path, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps(
                {
                    "cells": [
                        {"cell_type": "markdown", "source": ["# A page\n", "\n", text]}
                    ]
                }
            ),
            "utf-8",
        )
    assert quoting_notebooks(tmp_path) == {"01_a", "package/nn/b", "02_c"}


def public(text):
    "The names that a module gives away."
    return {
        name
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    }


def borrowed_names(tree, given, folder=""):
    "Imports of the package that the named module does not give away."
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = taken_from(node, folder)
            for alias in node.names:
                if alias.name not in given.get(module, {alias.name}):
                    yield f"{module}.{alias.name}"


def unused_imports(tree):
    "Names that are imported and not used."
    names = []
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names += [(a.asname or a.name).split(".")[0] for a in node.names]
        elif isinstance(node, ast.Name):
            used.add(node.id)
    return [name for name in names if name not in used]


def test_names_are_taken_from_where_they_are_made():
    text = modules(ROOT)
    given = {name: public(code) for name, code in text.items()}
    trees = {name: ast.parse(code) for name, code in text.items()}
    trees |= {
        f"nbs/{path.name}, cell {c['id']}": ast.parse(
            course.MAGIC.sub(r"\1pass", source(c))
        )
        for path in NOTEBOOKS
        for c in code_cells(path)
        if re.search(r"(from|import) ", source(c))
    }
    assert {
        name: found
        for name, tree in trees.items()
        if (
            found := list(
                borrowed_names(tree, given, folder_of(name) if name in text else "")
            )
        )
    } == {}
    slips = ast.parse(
        "from .rows import Room, Positions\n"
        "from tformer.gpt import GPT, Block\n"
        "from . import validate\nfrom torch import Tensor"
    )
    assert list(borrowed_names(slips, {"rows": {"Positions"}, "gpt": {"GPT"}})) == [
        "rows.Room",
        "gpt.Block",
    ]
    slips = ast.parse(
        "from ..rows import Room\nfrom .norms import Norm, Epsilon"
        "\nfrom tformer.nn.norms import math"
    )
    assert list(borrowed_names(slips, {"rows": set(), "nn.norms": {"Norm"}}, "nn")) == [
        "rows.Room",
        "nn.norms.Epsilon",
        "nn.norms.math",
    ]


def test_no_module_imports_what_it_does_not_use():
    for module in MODULES:
        unused = unused_imports(ast.parse(module.read_text("utf-8")))
        assert not unused, f"{module.name}: {unused}"
    slips = ast.parse("import json, os.path\nfrom a import b as c, d\nos.sep, d")
    assert unused_imports(slips) == ["json", "c"]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_tells_of_the_machine():
    telling = re.compile(
        r"/root/|/home/\w+/|/tmp/\w+|/work/|\.pyenv|"
        r"127\.0\.0\.1:\d{4,}|site-packages/|file:///"
    )
    for path in project_files():
        if (
            path.suffix in {".woff2", ".png", ".ico", ".inv", ".safetensors"}
            or {"mathjax", "minisearch"} & {*path.parts}
            or path == Path(__file__)
        ):
            continue
        text = path.read_text(encoding="utf-8")
        found = [m[0] for m in telling.finditer(text)]
        assert not found, f"{path.relative_to(ROOT)}: {found[:3]}"


def test_outputs_that_are_not_compared_name_their_reason():
    "The table of reasons stands on the page for maintainers."
    page = (ROOT / "book" / "maintain.md").read_text(encoding="utf-8")
    reasons = {*re.findall(r"^\| `(ignored-\w+)` \|", page, re.M)}
    count = 0
    used = set()
    for path in NOTEBOOKS:
        for cell in code_cells(path):
            tags = cell["metadata"].get("tags", [])
            named = [tag for tag in tags if tag.startswith("ignored-")]
            ignored = "nbval-ignore-output" in tags
            assert len(named) == ignored, f"{path.name}, {cell['id']}: {tags}"
            count += ignored
            used |= {*named}
    assert used == reasons
    assert count <= 99, "compare the output of another cell in its place"


def test_time_budgets():
    rules = load(ROOT / "conftest.py")
    status = read(ROOT / "book" / "status.json")
    record = status["notebooks"]
    assert set(record) == {*course.document_names(ROOT)}, "make status"
    seconds = sorted(b["seconds"] for b in record.values())
    assert all(b["passed"] for b in record.values())
    slower = 1 if "AVX512" in status["instructions"] else rules.SLOWER
    assert seconds[-1] <= rules.NOTEBOOK_BUDGET * slower
    assert sum(seconds) <= rules.TOTAL_BUDGET * slower
    # the clock of a run that takes too long says so
    clock = rules.Clock()
    clock.books["slow"]["seconds"] = rules.TOTAL_BUDGET + 1
    assert f"{rules.TOTAL_BUDGET + 1} s" in clock.over_budget()
    # but it is no failure: another machine may be slower
    config = SimpleNamespace(clock=clock, getoption=lambda name: None)
    session = SimpleNamespace(config=config, exitstatus=0)
    rules.pytest_sessionfinish(session)
    assert session.exitstatus == 0
    assert config.clock_message == clock.over_budget()
    clock.books["slow"]["seconds"] = 1
    assert clock.over_budget() is None


@pytest.mark.nightly  # so that a cell more asks for no new record at once
def test_the_status_page_counts_the_cells_that_there_are():
    "The record of a GPU shows its date, and is not compared."
    record = read(ROOT / "book" / "status.json")["notebooks"]
    there = {
        name: len(code_cells(course.notebook_path(ROOT, name)))
        for name in course.document_names(ROOT)
    }
    assert {name: b["cells"] for name, b in record.items()} == there, "make status"


def test_figures_compare_by_what_they_say():
    rules = load(ROOT / "conftest.py")
    svg = '<p>a</p><svg id="{}"><title>T</title><desc id="x">D</desc></svg>'
    assert rules.reduce_svg(svg.format(1)) == rules.reduce_svg(svg.format(2))
    assert "T | D" in rules.reduce_svg(svg.format(1))
    other = svg.format(1).replace("D<", "E<")
    assert rules.reduce_svg(svg.format(1)) != rules.reduce_svg(other)


def test_the_words_of_figures_are_compared_however_often_the_rules_are_loaded():
    "What was reduced twice would have lost its words, and would equal anything."
    from nbval.plugin import IPyNbCell

    load(ROOT / "conftest.py")
    load(ROOT / "conftest.py")
    cell = SimpleNamespace(parent=SimpleNamespace(sanitize_patterns={}))
    cell.sanitize_text = partial(IPyNbCell.sanitize_text, cell)
    svg = "<svg><title>T</title><desc>D</desc></svg>"
    assert IPyNbCell.sanitize(cell, svg) == "<svg>T | D</svg>"


def test_make_knows_what_the_readme_names():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`make (\w+)", text)) | set(
        re.findall(r"^make (\w+)", text, re.M)
    )
    assert {"test", "book"} <= named
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert named <= set(re.findall(r"^(\w+):", rules, re.M))
