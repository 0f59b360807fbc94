"""Changes made by name and syntax: what matches, what is refused, what stays."""

import ast
import builtins
import sys

import pytest
import torch

from conftest import ROOT

sys.path.insert(0, str(ROOT / "book" / "_ext"))

import code_changes as cc

SOURCE = '''"""A module."""
import math

LIMITS = {"low": 0, "high": 9}


@cache
def area(r, *, unit="m"):  # of a circle
    if r < 0: raise ValueError(f"r is {r:.2f}, expected {r >= 0}")
    text = f"{math.pi * r ** 2} {unit}"
    return text


class Box:
    side = 1

    @property
    def volume(self):
        return self.side ** 3

    @volume.setter
    def volume(self, new):
        self.side = new ** (1 / 3)
        self.log("set", value=new, unit="m")

    def log(self, *words, **more):
        def line(word):
            return word + 1
        for word in words:
            print(word)
            print(more)
        return [line(w) for w in words]
'''


def change(where, old, new):
    "SOURCE with a change made."
    qualname = where.removeprefix("m").removeprefix(".")
    return cc.apply(SOURCE, qualname, cc.CodeChange(where, old, new))


@pytest.mark.parametrize(
    "where, old, new, text, becomes",
    [
        # an expression, in another layout and with other names; inside an f-string
        ("m.area", "math.pi  *  $x**2", "$x", "math.pi * r ** 2", "r"),
        ("m.area", "$r < 0", "$r <= 0", "r < 0", "r <= 0"),
        ("m.area", "'m'", "'cm'", '"m"):', '"cm"):'),
        # constants of the module and of a class
        ("m.LIMITS", "9", "8", "9", "8"),
        ("m.Box.side", "1", "2", "side = 1", "side = 2"),
        # one of two definitions of the same name, a function in a function
        ("m.Box.volume", "$x ** 3", "$x ** 2", "side ** 3", "side ** 2"),
        ("m.Box.log.line", "$w + 1", "$w - 1", "word + 1", "word - 1"),
        # attributes, keywords and the rest of the arguments
        (
            "m.Box.volume",
            "self.$side = $x",
            "self.$side = -$x",
            "new ** (1 / 3)",
            "-new ** (1 / 3)",
        ),
        (
            "m.Box.volume",
            "self.$log($$first, $v=$new, **$$rest)",
            "self.$log($$first, **$$rest)",
            "value=new, ",
            "",
        ),
        # statements: one, several, none; behind a colon
        ("m.Box.log", "print($b)\nreturn $c", "return $c", None, None),
        (
            "m.Box.log",
            "print($a)\nprint($b)",
            "print($b)\nprint($a)",
            "print(word)\n            print(more)",
            "print(more)\n            print(word)",
        ),
        (
            "m.Box.log",
            "for $_ in $_:\n    $$body\nreturn $x",
            "return $x",
            "for word in words:\n            print(word)\n            print(more)\n    "
            "    return",
            "return",
        ),
        (
            "m.area",
            "raise ValueError($$a)",
            "",
            'raise ValueError(f"r is {r:.2f}, expected {r >= 0}")',
            "pass",
        ),
        # decorators and the signature
        (
            "m.area",
            "@cache\ndef $f($$parameters):\n    $$body",
            "def $f($$parameters):\n    $$body",
            "@cache\ndef area",
            "def area",
        ),
    ],
)
def test_what_a_change_does(where, old, new, text, becomes):
    if text is None:  # what follows is in another block
        with pytest.raises(cc.ChangeError, match="0 places"):
            change(where, old, new)
        return
    assert SOURCE.count(text) == 1
    expected = SOURCE.replace(text, becomes)
    assert ast.dump(ast.parse(change(where, old, new))) == ast.dump(ast.parse(expected))


@pytest.mark.parametrize(
    "where, old, new, says",
    [
        ("m.volume", "1", "2", "m.volume is not defined"),
        ("m.Box.log", "print($x)", "1", "m.Box.log has 2 places, expected one"),
        ("m.Box.log", "print($x)\nprint($x)", "", "m.Box.log has 0 places"),
        ("m.Box.log", "$x + 2", "1", "m.Box.log has 0 places, expected one"),
        ("m.Box.log.line", "$w + 1", "1 + $v", r"\$v is in the new code"),
        ("m.Box.log.line", "$w + 1", "$w + 1", "changes nothing"),
        ("m.Box.log.line", "$w +", "$w", "not Python"),
        ("m.Box.log.line", "$w + 1", "return $w", "cannot become"),
    ],
)
def test_what_is_refused(where, old, new, says):
    with pytest.raises(cc.ChangeError, match=says):
        change(where, old, new)


def test_a_name_begins_with_its_module(tmp_path):
    (tmp_path / "nn").mkdir()
    for name in ("attend", "nn/functional", "nn/__init__"):
        (tmp_path / f"{name}.py").write_text("", encoding="utf-8")
    for where, found in (
        ("attend.attend", ("attend.py", "attend")),
        ("attend", ("attend.py", "")),
        ("nn.functional.softmax.f", ("nn/functional.py", "softmax.f")),
    ):
        path, qualname = cc.split_where(where, tmp_path)
        assert (path.relative_to(tmp_path).as_posix(), qualname) == found
    with pytest.raises(cc.ChangeError, match=r"'layers\.norm'"):
        cc.split_where("layers.norm", tmp_path)


def test_a_reader_sees_the_code_that_is_changed():
    entry = cc.CodeChange("m.area", "math.pi * $r ** 2", "$r")
    assert cc.preview(SOURCE, "area", entry) == ("math.pi * r ** 2", "r")


# --- renaming leaves every change as it is

TORCH = {
    *dir(torch.Tensor),
    *dir(torch.nn.Module),
    *dir(torch.nn.Linear(1, 1)),
    *dir(str),
    *dir(list),
    *dir(dict),
    *dir(set),
    *dir(tuple),
}


class Renamed(ast.NodeTransformer):
    "Gives another name to all that a module calls by a name of the package."

    def __init__(self, tree, owned):
        self.owned = owned
        self.outside = {*dir(builtins), "self", "cls", "_"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import) or (
                isinstance(node, ast.ImportFrom) and not node.level
            ):
                self.outside |= {(a.asname or a.name).split(".")[0] for a in node.names}

    def visit_Name(self, node):
        if node.id not in self.outside:
            node.id += "_renamed"
        return node

    def visit_arg(self, node):
        if node.arg not in self.outside:
            node.arg += "_renamed"
        return self.generic_visit(node)

    def is_own(self, node):
        "Whether an attribute is one of the package's, and not of a library's module."
        root = node.value
        while isinstance(root, ast.Attribute):
            root = root.value
        library = isinstance(root, ast.Name) and root.id in self.outside - {"self"}
        return node.attr in self.owned and not library

    def visit_Attribute(self, node):
        if self.is_own(node):
            node.attr += "_renamed"
        return self.generic_visit(node)

    def visit_Call(self, node):
        "Arguments that are given by name to what the package defines."
        own = (
            isinstance(node.func, ast.Name) and node.func.id not in self.outside
        ) or (isinstance(node.func, ast.Attribute) and self.is_own(node.func))
        for keyword in node.keywords:
            if own and keyword.arg not in {None, "dtype", "device", "dim"}:
                keyword.arg += "_renamed"
        return self.generic_visit(node)


def owned_attributes(trees):
    "Names of fields and methods that the package gives, and PyTorch does not."
    found = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.ClassDef):
                found |= {name for name, _ in cc.definitions(node.body)}
    return {n for n in found if n not in TORCH and not n.startswith("__")}


def every_change():
    "The rows of the mutations and of the claims, with who they are."
    for row in cc.read_rows(ROOT / "tests" / "mutations.yml"):
        yield row["name"], cc.CodeChange(row["where"], row["old"], row["new"])
    for path in sorted((ROOT / "book" / "verified").rglob("*.yml")):
        for row in cc.read_rows(path):
            yield row["claim"], cc.CodeChange(row["where"], row["old"], row["new"])


def test_a_rename_touches_nothing_but_the_place():
    "Locals, parameters and fields get other names; every pattern still matches once."
    changes = [
        (name, *cc.split_where(c.where, ROOT / "tformer"), c)
        for name, c in every_change()
    ]
    paths = {path for _, path, _, _ in changes}
    trees = {path: ast.parse(path.read_text("utf-8")) for path in paths}
    owned = owned_attributes(trees.values())
    assert len(changes) > 500 and len(owned) > 200
    source = {}
    for path, tree in trees.items():
        changer = Renamed(tree, owned)
        changer.outside |= {
            part for _, p, q, _ in changes if p == path for part in q.split(".")
        }
        source[path] = ast.unparse(changer.visit(tree))
    lost = []
    for name, path, qualname, c in changes:
        try:
            cc.locate(source[path], qualname, c)
        except cc.ChangeError as error:
            lost.append(f"{name}: {error}")
    assert not lost, "\n".join([str(len(lost)), *lost])
