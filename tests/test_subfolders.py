"""A notebook in a folder is exported, run, built, linked and packed.

What guards the notebooks of the project is asked here of a small copy of the
tree, in which two notebooks stand in ``nbs/package/nn/``: of `probe` all is
right, and of `slip` three things are wrong, each of which must be told.
"""

import json
import os
import re
import subprocess
import sys
import zipfile
from html import unescape
from types import SimpleNamespace

import pytest
import yaml

import addresses
import course  # book/_ext, where the conftest of the root looks
import test_book
import test_package
import test_project
from conftest import ROOT, build_book

KEPT = ["01_attention_by_hand", "A1_figures", "package/validate"]
ROOM = "package/nn"
OWNER = "some-body"
INIT = '"""Parts of networks."""\n'


def md(text):
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def code(text, shown=None):
    outputs = (
        []
        if shown is None
        else [
            {
                "output_type": "execute_result",
                "execution_count": None,
                "metadata": {},
                "data": {"text/plain": shown},
            }
        ]
    )
    return {
        "cell_type": "code",
        "metadata": {},
        "source": text,
        "execution_count": None,
        "outputs": outputs,
    }


PROBE = [
    md(
        "# A probe\n\n> A notebook in a folder; its module is in one, too.\n\n"
        "It builds on [attention](../../01_attention_by_hand.ipynb), stands "
        "beside [another](#slip-start), and gives "
        "{py:func}`~tformer.nn.probe.shifted` to [the package]"
        "(../../../book/api.md)."
    ),
    code("#| default_exp nn.probe"),
    md("## A mask"),
    code(
        "#| export\nimport torch\nfrom torch import Tensor\n\n"
        "from tformer.functional import causal_mask"
    ),
    code(
        "#| export\ndef shifted(\n    n: int,  # how many positions\n"
        ') -> Tensor:  # the mask\n    "Return a mask that hides oneself."\n'
        "    positions = torch.arange(n)[None]\n"
        "    return causal_mask(positions, positions + 1)[0, 0]"
    ),
    code(
        "shifted(3)",
        "tensor([[False, False, False],\n"
        "        [ True, False, False],\n        [ True,  True, False]])",
    ),
    md("## What to remember\n\n- [The other](slip.ipynb) is wrong."),
]
SLIP = [
    md(
        "# A slip\n\n> A notebook in a folder, with three mistakes.\n\n"
        "(slip-start)=\n## A start"
    ),
    code("#| default_exp nn.slip"),
    code("#| export\nfrom tformer.nn.probe import shifted"),
    code(
        "#| export\ndef flipped(\n    n: int,  # how many positions\n):\n"
        '    "Return the shifted mask, turned around."\n'
        "    return shifted(n).T"
    ),
    code("assert flipped(2).all()"),
    md(
        "## Code of others\n\n```{package-source} nn.probe.shifted\n```\n\n"
        "```{package-source} plot.machine_diagram\n```"
    ),
    md(
        'Here is <a href="nowhere.html">a link</a>, <span style="color: '
        '#bbb">faint by day</span> and <span style="color: #555">faint by '
        "night</span>."
    ),
]
PAGES = {
    "intro": "# The beginning\n\nText.",
    "glossary": "# The glossary\n\nText.",  # the page 404 leads here
    "api": "# The package\n\n<!-- api -->",
    "lists": "# Lists\n\n<!-- chapters -->\n\n<!-- one line each -->\n\n"
    "<!-- takeaways -->\n\n## Status\n\n<!-- status -->\n\n"
    "(status-claims)=\n## Claims\n\n<!-- claims -->",
}
CONTENTS = {
    "format": "jb-book",
    "root": "book/intro",
    "parts": [
        {
            "caption": "Lessons",
            "numbered": True,
            "chapters": [{"file": f"nbs/{KEPT[0]}"}],
        },
        {
            "caption": "The package",
            "chapters": [
                {"file": f"nbs/{name}"}
                for name in (f"{ROOM}/probe", f"{ROOM}/slip", *KEPT[1:])
            ],
        },
        {
            "caption": "Reference",
            "chapters": [{"file": f"book/{name}"} for name in PAGES if name != "intro"],
        },
    ],
}
PLAN = [
    {
        "part": "Lessons",
        "chapters": [
            {
                "nb": KEPT[0],
                "title": "Attention",
                "builds": "attention",
                "builds_parts": ["attention"],
            }
        ],
    },
    {
        "part": "The package",
        "chapters": [
            {
                "nb": f"{ROOM}/probe",
                "title": "A probe",
                "builds": "a mask",
                "needs": f"[attention]({KEPT[0]}.ipynb)",
                "lit": ["attention"],
            }
        ],
    },
]


def write_notebook(path, cells):
    cells = [{"id": f"{path.stem}{i:02}", **cell} for i, cell in enumerate(cells)]
    text = json.dumps(
        {
            "cells": cells,
            "metadata": {
                "kernelspec": {
                    "display_name": "python3",
                    "language": "python",
                    "name": "python3",
                }
            },
            "nbformat": 4,
            "nbformat_minor": 5,
        },
        indent=1,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def shorten(path):
    "Keep of a notebook its title, its summary and its code."
    text = path.read_text(encoding="utf-8")
    found = course.read_notebook(path)
    kept = [
        {**cell, "outputs": []}
        for cell in json.loads(text)["cells"]
        if cell["cell_type"] == "code"
    ]
    write_notebook(path, [md(f"# {found.title}\n\n> {found.summary}"), *kept])


def reduce_tree(copy):
    "Leave of a copy of the project three notebooks, and add those above."
    for path in course.notebook_paths(copy):
        if course.document_name(copy, path) in KEPT:
            shorten(path)
        else:
            path.unlink()
    for path in course.module_paths(copy):
        if course.exported_from(path.read_text(encoding="utf-8")) not in KEPT:
            path.unlink()
    for path in (copy / "tformer").rglob("*.safetensors"):
        path.unlink()
    write_notebook(course.notebook_path(copy, f"{ROOM}/probe"), PROBE)
    write_notebook(course.notebook_path(copy, f"{ROOM}/slip"), SLIP)
    (copy / "tformer" / "nn").mkdir()
    (copy / "tformer" / "nn" / "__init__.py").write_text(INIT, "utf-8")
    for path in (copy / "book").glob("*.md"):
        path.unlink()
    for name, text in PAGES.items():
        (copy / "book" / f"{name}.md").write_text(text + "\n", "utf-8")
    (copy / "book" / "chapters.yml").write_text(yaml.safe_dump(PLAN), "utf-8")
    (copy / "_toc.yml").write_text(yaml.safe_dump(CONTENTS), "utf-8")


@pytest.fixture(scope="module")
def tree(tmp_path_factory, copy_tree):
    "The small copy of the project, exported; its repository has an owner."
    copy = copy_tree(tmp_path_factory.mktemp("tree")).resolve()
    reduce_tree(copy)
    settings = copy / "settings.ini"
    settings.write_text(
        re.sub(
            "^owner =.*$", f"owner = {OWNER}", settings.read_text("utf-8"), flags=re.M
        ),
        "utf-8",
    )
    test_project.export(copy)
    return copy


@pytest.fixture(scope="module")
def html(tree, tmp_path_factory):
    "The pages of its book, built with every warning fatal."
    return build_book(tmp_path_factory.mktemp("pages"), tree)


# --- nbdev and the lists


def test_a_module_is_written_into_its_folder(tree):
    text = test_project.package_texts(tree)
    assert text["nn/__init__.py"] == INIT
    assert "\nfrom ..functional import causal_mask\n" in text["nn/probe.py"]
    assert "\nfrom .probe import shifted\n" in text["nn/slip.py"]
    ours = test_project.package_texts(ROOT)
    for name in ("functional.py", "plot.py", "validate.py", "__init__.py"):
        assert text[name] == ours[name], name
    assert course.exported_from(text["nn/probe.py"]) == f"{ROOM}/probe"
    assert not test_project.changed_by_export(tree)


def test_lists_are_complete_in_a_folder(tree):
    assert course.document_names(tree) == sorted(
        [*KEPT, f"{ROOM}/probe", f"{ROOM}/slip"]
    )
    assert course.module_names(tree) == [
        "functional",
        "nn.probe",
        "nn.slip",
        "plot",
        "validate",
    ]
    for faults in (
        test_project.unlisted_notebooks,
        test_project.unindexed_modules,
        test_project.homeless_modules,
        test_project.early_imports,
    ):
        assert not faults(tree), faults.__name__


def test_what_is_in_no_list_is_told(tree):
    "A notebook and a module that nobody has listed, and one gone."
    notebook = course.notebook_path(tree, f"{ROOM}/stray")
    module = course.module_path(tree, "nn.stray")
    write_notebook(notebook, [md("# Stray"), code("import tformer.nn.later")])
    module.write_text(
        "# File to edit: ../../nbs/package/nn/gone.ipynb.\nfrom .later import x\n",
        "utf-8",
    )
    try:
        assert test_project.unlisted_notebooks(tree) == [f"{ROOM}/stray"]
        assert test_project.unindexed_modules(tree) == ["tformer.nn.stray"]
        assert test_project.homeless_modules(tree) == ["nn.stray"]
        assert test_project.early_imports(tree) == [
            f"{ROOM}/gone imports tformer.nn.later.x",
            f"{ROOM}/stray imports tformer.nn.later",
        ]
    finally:
        notebook.unlink()
        module.unlink()
    probe = course.notebook_path(tree, f"{ROOM}/probe")
    aside = probe.rename(tree / "aside")
    try:
        assert test_project.unlisted_notebooks(tree) == [f"{ROOM}/probe"]
        assert test_project.homeless_modules(tree) == ["nn.probe"]
    finally:
        aside.rename(probe)


# --- nbval


def test_notebooks_in_a_folder_are_run(tree, tmp_path):
    record = tmp_path / "status.json"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--nbval",
            "--nbval-current-env",
            "--nbval-sanitize-with",
            "tests/sanitize.cfg",
            f"--record={record}",
            "nbs",
            "-k",
            "probe or slip",
        ],
        cwd=tree,
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "assert flipped(2).all()" in done.stdout
    seen = json.loads(record.read_text("utf-8"))["notebooks"]
    assert {name: (book["passed"], book["cells"]) for name, book in seen.items()} == {
        f"{ROOM}/probe": (True, 4),
        f"{ROOM}/slip": (False, 4),
    }
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.M)
    assert failed == [f"nbs/{ROOM}/slip.ipynb::Cell"], done.stdout


# --- the book


def test_a_page_in_a_folder_is_found(tree, html):
    assert not test_book.unpaired_notebooks(html, tree)
    assert not test_book.undocumented_modules(html, tree)
    assert not test_book.shifted_sources(html, tree)
    assert not test_book.missing_buttons(html, OWNER)
    assert not test_book.missing_from_sidebar(html)
    text = (html / "book" / "lists.html").read_text("utf-8")
    row = re.search(
        r'<tr[^>]*>(?:(?!</tr>).)*"\.\./nbs/package/nn/probe\.html'
        r'"(?:(?!</tr>).)*not recorded',
        text,
        re.S,
    )
    assert row, "the status page does not show it"
    assert text.count('href="../nbs/package/nn/probe.html"') >= 4
    assert "tformer.nn.probe" in (html / "nbs" / ROOM / "probe.html").read_text("utf-8")


def test_links_of_a_page_in_a_folder(html):
    text = (html / "nbs" / ROOM / "probe.html").read_text("utf-8")
    for link in (
        "../../01_attention_by_hand.html",  # of prose, head, map
        "slip.html#slip-start",
        "../../../book/api.html",
        "../../../book/api.html#tformer.nn.probe.shifted",
        "../../../_static/course.css",
    ):
        assert re.search(rf'href="{re.escape(link)}["?]', text), link
    text = (html / "book" / "api.html").read_text("utf-8")
    assert 'href="../_modules/tformer/nn/probe.html#shifted"' in text
    assert test_book.broken_links(html) == [f"nbs/{ROOM}/slip.html: nowhere.html"]


def test_addresses_are_those_of_the_owner(tree, html):
    assert not addresses.foreign_addresses(html, OWNER)
    assert not addresses.own_address_faults(html, OWNER)
    assert not addresses.misleading_addresses(html, tree, OWNER)


def test_code_of_other_notebooks_is_shown(tree, html):
    text = (html / "nbs" / ROOM / "slip.html").read_text("utf-8")
    for name in ("nn.probe.shifted", "plot.machine_diagram"):
        module, _, last = name.rpartition(".")
        source = course.module_path(tree, module).read_text("utf-8")
        code = re.search(rf"^def {last}\(.*\n(?:[ )].*\n|\n(?= ))*", source, re.M)[0]
        shown = [
            unescape(re.sub(r"<[^>]+>", "", block))
            for block in re.findall(r"<pre>(.*?)</pre>", text, re.S)
        ]
        assert code in shown, name
    labels = re.findall(r"the code of [\w.]+", text)
    assert labels == ["the code of machine_diagram"] * 2
    links = re.findall(r'<p class="tf-origin">.*?href="([^"]+)"', text)
    assert links == ["probe.html", "../../A1_figures.html"]


def test_a_page_that_is_gone_is_told(tree, html):
    page = html / "nbs" / ROOM / "probe.html"
    aside = page.rename(html / "aside")
    try:
        assert test_book.unpaired_notebooks(html, tree) == {f"{ROOM}/probe"}
        assert any(link.endswith("probe.html") for link in test_book.broken_links(html))
        text = aside.read_text("utf-8")
        page.write_text(
            text.replace(f"main/nbs/{ROOM}/probe", "main/probe").replace(
                "slip.html", "slop.html"
            ),
            "utf-8",
        )
        assert test_book.missing_buttons(html, OWNER) == [
            f"{ROOM}/probe: Colab",
            f"{ROOM}/probe: edit",
        ]
        assert test_book.missing_from_sidebar(html) == [
            f"nbs/{ROOM}/probe.html: nbs/{ROOM}/slip.html"
        ]
    finally:
        aside.replace(page)


@pytest.mark.nightly
def test_text_of_a_page_in_a_folder_is_seen(html, chromium):
    faults = test_book.browser_faults(chromium, test_book.pages(html), test_book.KINDS)
    assert [re.sub(r"[\d.]+ : 1, ", "", one) for one in faults] == [
        "nn/slip.html, light: 'faint by day', #bbbbbb on #ffffff",
        "nn/slip.html, dark: 'faint by night', #555555 on #14181e",
    ]
    slip = [html / "nbs" / ROOM / "slip.html"]
    known = {
        "nn/slip.html": {
            "#bbbbbb on #ffffff",
            "#555555 on #14181e",
            "#777777 on #ffffff",
        }
    }
    assert test_book.browser_faults(chromium, slip, test_book.KINDS[:2], known) == [
        "nn/slip.html: mended, take it off the list: #777777 on #ffffff"
    ]


# --- the wheel


def test_the_wheel_holds_a_folder(tree, tmp_path):
    wheel = test_package.build(tree, tmp_path)
    with zipfile.ZipFile(wheel) as z:
        assert {
            "tformer/nn/__init__.py",
            "tformer/nn/probe.py",
            "tformer/nn/slip.py",
        } <= {*z.namelist()}
    assert not test_package.unshared_files(wheel, tree)
    late = tree / "tformer" / "nn" / "late.py"
    late.touch()
    try:
        assert test_package.unshared_files(wheel, tree) == ["tformer/nn/late.py"]
    finally:
        late.unlink()


# --- the clock


def test_two_notebooks_of_one_name_have_two_records():
    rules = test_project.load(ROOT / "conftest.py")
    clock = rules.Clock()
    for name, failed in ((f"{ROOM}/attention", True), ("attention", False)):
        clock.pytest_runtest_logreport(
            SimpleNamespace(
                nodeid=f"nbs/{name}.ipynb::Cell 0",
                duration=1.0,
                when="call",
                failed=failed,
                keywords={},
            )
        )
    assert {name: book["passed"] for name, book in clock.books.items()} == {
        f"{ROOM}/attention": False,
        "attention": True,
    }
