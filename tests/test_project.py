"""The project's own order: imports, exports, notebooks, addresses, time."""
import ast
import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from conftest import ROOT, run, tracked

NOTEBOOKS = sorted((ROOT / "nbs").glob("*.ipynb"))
CHAPTERS = [p for p in NOTEBOOKS if p.name[0].isdigit()]
MODULES = sorted(p for p in (ROOT / "tformer").glob("*.py")
                 if not p.name.startswith("_"))
ANYWHERE = {"plot", "stories", "expect"}    # importable from every chapter
# appendices that stand between chapters in the order of imports
READ_AS = {"A4_models.ipynb": "08~", "A5_rebuild.ipynb": "12~",
           "A7_caches.ipynb": "06~", "A8_corpora.ipynb": "14~",
           "A9_checkpoints.ipynb": "16~", "A10_trained.ipynb": "17~",
           "A11_parallel.ipynb": "17~", "A12_word_pieces.ipynb": "17~",
           "A13_faster_decoding.ipynb": "21~",
           "A14_fixed_caches.ipynb": "20~",
           "A15_paged_caches.ipynb": "22~"}
STANDARD = set(sys.stdlib_module_names)
RUNTIME = {"torch", "numpy", "einops", "jaxtyping", "regex", "tqdm",
           "safetensors"}


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def source(cell):
    return "".join(cell["source"])


def code_cells(path):
    return [c for c in read(path)["cells"] if c["cell_type"] == "code"]


def notebook_of(module):
    "The notebook that a module says it was exported from."
    m = re.search(r"File to edit: \.\./nbs/(\S+\.ipynb)",
                  module.read_text(encoding="utf-8"))
    assert m, f"{module.name} was not exported from a notebook"
    return m[1]


def imported(tree):
    "(package, rest) of every import."
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")[0], alias.name.split(".")[1:]
        elif isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            if node.level or parts[0] == "tformer":
                rest = parts if node.level else parts[1:]
                rest = [r for r in rest if r]
                for alias in node.names:
                    yield "tformer", rest or [alias.name]
            else:
                yield parts[0], parts[1:]


def order_faults(order, name, tree):
    "Imports of `tree`, exported by notebook `name`, that come too early."
    for package, rest in imported(tree):
        if package != "tformer" or not rest or rest[0] in ANYWHERE:
            continue
        if order.get(rest[0], "~") >= name:
            yield f"{name} imports tformer.{rest[0]}"


def test_imports_follow_the_order_of_reading():
    notebook = {m.stem: notebook_of(m) for m in MODULES}
    order = {m: READ_AS.get(n, n) for m, n in notebook.items()}
    assert order, "no module was exported"
    for module in MODULES:
        tree = ast.parse(module.read_text(encoding="utf-8"))
        assert not list(order_faults(order, order[module.stem], tree))
    for path in NOTEBOOKS:
        for cell in code_cells(path):
            tree = ast.parse(re.sub(r"^(\s*)[%!].*$", r"\1pass",
                                    source(cell), flags=re.M))
            own = {m for m, n in notebook.items() if n == path.name}
            at = READ_AS.get(path.name, path.name)
            faults = [f for f in order_faults(order, at, tree)
                      if f.split(".")[-1] not in own]
            assert not faults
    early = ast.parse("from tformer.bpe import BPE")
    assert list(order_faults(order, "01_attention_by_hand.ipynb", early))


def test_run_time_imports_are_declared():
    for module in MODULES:
        allowed = STANDARD | RUNTIME | {"tformer"}
        if module.stem == "plot":
            allowed |= {"matplotlib", "PIL"}    # Pillow comes with it
        if module.stem == "corpora":
            allowed |= {"pyarrow"}              # for Parquet alone
        if module.stem == "translation":
            allowed |= {"sacrebleu"}            # for BLEU and chrF alone
        tree = ast.parse(module.read_text(encoding="utf-8"))
        extra = {p for p, _ in imported(tree)} - allowed
        assert not extra, f"{module.name} imports {sorted(extra)}"


def test_exporting_again_changes_nothing(tmp_path, copy_tree):
    copy = copy_tree(tmp_path)
    before = {p.name: p.read_text(encoding="utf-8")
              for p in (copy / "tformer").glob("*.py")}
    env = {k: v for k, v in os.environ.items() if k != "IN_TEST"}
    run(sys.executable, "-c",
        "from nbdev.doclinks import nbdev_export as f; f()",
        cwd=copy, env=env)
    after = {p.name: p.read_text(encoding="utf-8")
             for p in (copy / "tformer").glob("*.py")}
    assert after.keys() == before.keys()
    for name in before:
        assert before[name] == after[name], f"export {name} again"
    # a module whose notebook is gone would survive an export
    assert {notebook_of(m) for m in MODULES} <= {p.name for p in NOTEBOOKS}


def test_cleaning_again_changes_nothing(tmp_path, copy_tree):
    copy = copy_tree(tmp_path)
    run(sys.executable, "-c", "from nbdev.clean import nbdev_clean as f; f()",
        cwd=copy)
    for path in NOTEBOOKS:
        assert path.read_text(encoding="utf-8") == \
            (copy / "nbs" / path.name).read_text(encoding="utf-8"), \
            f"make notebooks NB={path.stem} was not run"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_holds_what_a_chapter_holds(path):
    nb = read(path)
    prose = "\n\n".join(source(c) for c in nb["cells"]
                        if c["cell_type"] == "markdown")
    assert re.match(r"# \S.*\n\n> \S", source(nb["cells"][0])), \
        "a chapter opens with its title and one line that sums it up"
    for part in ("How this goes wrong", "What to remember",
                 "Questions you can now answer", "Exercises",
                 "Further reading"):
        assert re.search(rf"^## {part}", prose, re.M), f"no part: {part}"
    for kind in ("Predict", "Break", "Build"):
        assert re.search(rf"\{{exercise(-start)?\}} {kind}: .*minutes\)",
                         prose), f"no exercise: {kind}: … (N minutes)"
    outputs = json.dumps([c["outputs"] for c in code_cells(path)])
    assert "<svg" in outputs, "no figure"
    assert '"output_type": "error"' not in outputs
    assert '"image/png":' not in outputs, "draw with plot.show"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
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
                    not node.name.startswith("_")):
                assert ast.get_docstring(node), f"{node.name}: no docstring"


# names that begin with _ are a module's own; what still reaches for those
# of another module: this can only shrink
PRIVATE_USES = set()


def private_uses(tree):
    "Private names that a module takes from others, as module.name."
    names = {}          # of modules of the package, as they are called here
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("tformer."):
                    names[alias.asname or alias.name] = alias.name[8:]
        elif isinstance(node, ast.ImportFrom) and (
                node.level or (node.module or "").split(".")[0] == "tformer"):
            module = (node.module or "").removeprefix("tformer").strip(".")
            for alias in node.names:
                if not module:
                    names[alias.asname or alias.name] = alias.name
                elif is_private(alias.name):
                    yield f"{module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if module := names.get(ast.unparse(node.value)):
                yield f"{module}.{node.attr}"


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def test_private_names_stay_in_their_module():
    found = {f"{m.stem}: {use}" for m in MODULES for use in private_uses(
        ast.parse(m.read_text(encoding="utf-8")))}
    assert found <= PRIVATE_USES, f"new: {sorted(found - PRIVATE_USES)}"
    assert PRIVATE_USES <= found, (
        f"mended, take them out: {sorted(PRIVATE_USES - found)}")
    slips = """
from .attend import attend, _hidden
from tformer.layers import _other as other
from . import rotary as turn, expect
import tformer.gpt
import tformer.bert as b
turn._turned(1), expect.whole(n=1), tformer.gpt._deep.x, b._made(2)
self._own, b.__name__, attend._not_a_module
"""
    assert sorted(private_uses(ast.parse(slips))) == [
        "attend._hidden", "bert._made", "gpt._deep", "layers._other",
        "rotary._turned"]


def public(text):
    "The names that a module gives away."
    return {name for node in ast.parse(text).body
            if isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "__all__"
            for name in ast.literal_eval(node.value)}


def borrowed_names(tree, given):
    "Imports of the package that the named module does not give away."
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (
                node.level or (node.module or "").startswith("tformer.")):
            module = (node.module or "").removeprefix("tformer.")
            for alias in node.names:
                if alias.name not in given.get(module, {alias.name}):
                    yield f"{module}.{alias.name}"


def unused_imports(tree):
    "Names that are imported and not used."
    names, used = [], set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names += [(a.asname or a.name).split(".")[0] for a in node.names]
        elif isinstance(node, ast.Name):
            used.add(node.id)
    return [name for name in names if name not in used]


def test_names_are_taken_from_where_they_are_made():
    text = {m.stem: m.read_text(encoding="utf-8") for m in MODULES}
    given = {name: public(code) for name, code in text.items()}
    trees = {name: ast.parse(code) for name, code in text.items()}
    trees |= {f"{path.stem}, cell {c['id']}": ast.parse(re.sub(
        r"^(\s*)[%!].*$", r"\1pass", source(c), flags=re.M))
        for path in NOTEBOOKS for c in code_cells(path)}
    assert {name: found for name, tree in trees.items()
            if (found := list(borrowed_names(tree, given)))} == {}
    slips = ast.parse("from .rows import Room, Positions\n"
                      "from tformer.gpt import GPT, Block\n"
                      "from . import expect\nfrom torch import Tensor")
    assert list(borrowed_names(slips, {"rows": {"Positions"},
                                       "gpt": {"GPT"}})) == [
        "rows.Room", "gpt.Block"]


def test_no_module_imports_what_it_does_not_use():
    for module in MODULES:
        unused = unused_imports(ast.parse(module.read_text("utf-8")))
        assert not unused, f"{module.name}: {unused}"
    slips = ast.parse("import json, os.path\nfrom a import b as c, d\n"
                      "os.sep, d")
    assert unused_imports(slips) == ["json", "c"]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_address_names_one_owner(tmp_path, copy_tree):
    owner = load(ROOT / ".ci" / "owner.py")
    assert not list(owner.disagreements(owner.current()))
    copy = copy_tree(tmp_path)
    run("git", "init", "-q", cwd=copy)
    for name in ("nobody-yet", "some-body"):        # it can be set again
        run(sys.executable, ".ci/owner.py", name, cwd=copy)
    text = (copy / "settings.ini").read_text(encoding="utf-8")
    assert "user = some-body" in text and "OWNER" not in text
    left = [p for p in copy.rglob("*") if p.is_file()
            and ".git" not in p.relative_to(copy).parts
            and p.suffix in {".md", ".yml", ".ini", ".ipynb", ".cff"}
            and re.search("(OWNER|nobody-yet)/tformer",
                          p.read_text(encoding="utf-8"))]
    assert not left
    # one address changed by hand is found
    page = copy / "README.md"
    page.write_text(page.read_text(encoding="utf-8") +
                    "\nhttps://github.com/" + "another/tformer\n")
    found = load(copy / ".ci" / "owner.py")
    assert [d.split(":")[0] for d in found.disagreements("some-body")] == \
        ["README.md"]
    assert found.main(["not a login"]) == 2


def test_nothing_tells_of_the_machine():
    telling = re.compile(r"/root/|/home/\w+/|/tmp/\w+|/work/|\.pyenv|"
                         r"127\.0\.0\.1:\d{4,}|site-packages/|file:///")
    for path in tracked():
        if path.suffix in {".woff2", ".png", ".ico", ".inv", ".safetensors"} or \
                "mathjax" in path.parts or path == Path(__file__):
            continue
        text = path.read_text(encoding="utf-8")
        found = [m[0] for m in telling.finditer(text)]
        assert not found, f"{path.relative_to(ROOT)}: {found[:3]}"


def test_time_budgets():
    rules = load(ROOT / "conftest.py")
    record = read(ROOT / "book" / "status.json")["notebooks"]
    assert set(record) == {p.stem for p in NOTEBOOKS}, "make status"
    seconds = sorted(b["seconds"] for b in record.values())
    assert all(b["passed"] for b in record.values())
    assert seconds[-1] <= rules.NOTEBOOK_BUDGET
    assert sum(seconds) <= rules.TOTAL_BUDGET
    # the clock of a run that takes too long says so
    clock = rules.Clock()
    clock.books["slow"]["seconds"] = rules.TOTAL_BUDGET + 1
    assert "1801 s" in clock.over_budget()
    clock.books["slow"]["seconds"] = 1
    assert clock.over_budget() is None


def test_the_longest_files_begin_first(tmp_path):
    rules = load(ROOT / "conftest.py")
    record = tmp_path / "status.json"
    record.write_text('{"notebooks": {"07_a": {"seconds": 40}, '
                      '"08_b": {"seconds": 3}}}', encoding="utf-8")
    names = ["08_b", "test_new", "07_a", "test_shapes", "test_other"]
    items = [SimpleNamespace(path=Path(name), at=at)
             for name in names for at in (0, 1)]
    rules.longest_first(items, record)
    assert [(item.path.stem, item.at) for item in items] == [
        (name, at) for name in ("test_shapes", "07_a", "test_new",
                                "test_other", "08_b") for at in (0, 1)]
    rules.longest_first(items, tmp_path / "none")       # no notebook is known
    assert items[0].path.stem == "test_shapes"
    assert all((ROOT / "tests" / f"{name}.py").exists() for name in rules.LONG)
    assert "--no-loadscope-reorder" in (ROOT / "Makefile").read_text()


def test_figures_compare_by_what_they_say():
    rules = load(ROOT / "conftest.py")
    svg = '<p>a</p><svg id="{}"><title>T</title><desc id="x">D</desc></svg>'
    assert rules.reduce_svg(svg.format(1)) == rules.reduce_svg(svg.format(2))
    assert "T | D" in rules.reduce_svg(svg.format(1))
    other = svg.format(1).replace("D<", "E<")
    assert rules.reduce_svg(svg.format(1)) != rules.reduce_svg(other)


def test_make_knows_what_the_readme_names():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`make (\w+)", text)) | \
        set(re.findall(r"^make (\w+)", text, re.M))
    assert {"test", "book"} <= named
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert named <= set(re.findall(r"^(\w+):", rules, re.M))
