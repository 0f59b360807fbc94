"""The rooms of the package: drawn from the imports, and a page for each of them."""

import ast
import importlib
import inspect
import re
from itertools import pairwise

import pytest

import course
import package_rooms
from conftest import ROOT

HOUSE = package_rooms.house(ROOT)
FOLDERS = [room for room in HOUSE if package_rooms.has_page(ROOT, room)]


@pytest.mark.parametrize(
    "line, rooms",
    [
        ("from . import norms", set()),
        ("from .norms import Norm", set()),
        ("from ..base import files, validate", {"base"}),
        ("from ..base.files import read", {"base"}),
        ("from .. import plot", {"plot"}),
        ("from tformer.text.bpe import BPE", {"text"}),
        ("from tformer import costs, plot", {"costs", "plot"}),
        ("import tformer.text.bpe as b, torch", {"text"}),
        ("import tformer\ntformer.load(1)", {"bundle"}),
        ("import torch\nfrom torch import nn", set()),
        ("def f():\n    from ..check import causal", {"check"}),
    ],
)
def test_the_rooms_from_which_a_module_imports(line, rooms):
    assert package_rooms.imported_rooms(line, "nn.attention") == rooms


def test_a_room_stands_above_what_it_imports():
    uses = {"a": "bc", "b": "c", "c": "", "d": "c", "e": ""}
    uses = {room: frozenset(others) for room, others in uses.items()}
    assert package_rooms.floors(uses) == [["a"], ["b", "d"], ["c", "e"]]
    assert package_rooms.direct(uses) == [("a", "b"), ("b", "c"), ("d", "c")]
    with pytest.raises(ValueError, match=r"a circle of imports: \['a', 'b'\]"):
        package_rooms.floors({"a": frozenset("b"), "b": frozenset("a")})


def test_the_house_is_that_of_the_package():
    assert HOUSE["base"] == frozenset()
    assert {"base", "models", "nn"} <= HOUSE["inference"]
    assert package_rooms.floors(HOUSE)[-1] == ["base"]
    arrows = package_rooms.direct(HOUSE)
    assert ("models", "nn") in arrows and ("inference", "nn") not in arrows


def test_boxes_of_a_floor_stand_side_by_side():
    rows = package_rooms.floors(HOUSE)
    place = package_rooms.places(rows, package_rooms.direct(HOUSE))
    for row in rows:
        boxes = sorted(place[room] for room in row)
        assert boxes[0][0] > 0 and sum(boxes[-1][::2]) < package_rooms.WIDTH
        for (x, y, width), (x2, y2, _) in pairwise(boxes):
            assert y == y2 and x + width < x2


def test_the_drawing_tells_what_is_imported_and_leads_to_the_pages():
    drawn = package_rooms.figure(ROOT, "nn", {"nn": "nn.html", "text": "text.html"})
    assert "inference imports base, models, nn" in drawn
    assert re.findall(r'href="([^"]*)"', drawn).count("nn.html") == 1
    assert drawn.count('fill-opacity="0.2"') == 1
    assert drawn.count("marker-end") == len(package_rooms.direct(HOUSE))


def test_what_contributors_see_is_drawn_from_the_code():
    program = "python book/_ext/package_rooms.py"
    picture = (ROOT / package_rooms.PICTURE).read_text("utf-8")
    assert picture == package_rooms.picture(ROOT), program
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert page == package_rooms.in_contributing(ROOT), program
    for room in HOUSE:
        assert f"`{room}`" in page


@pytest.mark.parametrize("room", FOLDERS)
def test_a_room_has_a_page_with_all_its_modules(room):
    page = (ROOT / "book" / "rooms" / f"{room}.md").read_text("utf-8")
    assert page.startswith(f"# `{room}`: ")
    assert f"```{{package-room}} {room}\n```" in page
    lines = package_rooms.module_list(ROOT, room, "../../nbs/")
    modules = [
        name for name in course.module_names(ROOT) if name.startswith(f"{room}.")
    ]
    assert [re.match(r"- `([\w.]+)`", line)[1] for line in lines] == modules
    for line in lines:
        (link,) = re.findall(r"\]\(\.\./\.\./(nbs/[^)]+)\)", line)
        assert (ROOT / link).is_file(), line


@pytest.mark.parametrize("room", FOLDERS)
def test_a_room_says_what_it_is_for_and_re_exports_at_most(room):
    code = (ROOT / "tformer" / room / "__init__.py").read_text("utf-8")
    tree = ast.parse(code)
    assert ast.get_docstring(tree)
    assert all(isinstance(node, ast.ImportFrom) for node in tree.body[1:])


def test_the_package_stands_in_the_contents_room_by_room():
    import yaml

    toc = yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8"))
    (part,) = [part for part in toc["parts"] if part["caption"] == "The package"]
    pages = {entry["file"]: entry for entry in part["chapters"]}
    assert {f"book/rooms/{room}" for room in FOLDERS} <= {*pages}
    for file in course.files_in(part):
        room = file.removeprefix("nbs/package/").partition("/")[0]
        if file.startswith("nbs/package/") and room in FOLDERS:
            sections = pages[f"book/rooms/{room}"]["sections"]
            assert {"file": file} in sections


def unknown_attributes(source):
    "Names that a file asks of modules of the package, and that these do not have."
    modules = {}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            "tformer"
        ):
            for alias in node.names:
                found = getattr(importlib.import_module(node.module), alias.name, None)
                if inspect.ismodule(found):
                    modules[alias.asname or alias.name] = found
    return [
        f"line {node.lineno}: {node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
        and not hasattr(modules[node.value.id], node.attr)
    ]


@pytest.mark.parametrize("folder", ["experiments", "tests", "tests/bench"])
def test_modules_have_what_tests_and_benchmarks_ask_of_them(folder):
    # benchmarks and experiments run at night or on demand only
    found = {
        path.name: unknown_attributes(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / folder).glob("*.py"))
    }
    assert found and not any(found.values()), {k: v for k, v in found.items() if v}


def test_an_attribute_that_has_moved_is_found():
    source = "from tformer.nn import layers, norms\nlayers.FeedForward, norms.RMSNorm"
    assert unknown_attributes(source) == ["line 2: layers.FeedForward"]
