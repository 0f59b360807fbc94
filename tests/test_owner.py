"""The owner of the repository: one setting, which every address follows."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import setuptools
import yaml

import site_address
import site_wheel
from addresses import foreign_addresses, misleading_addresses, own_address_faults
from build_book import project_files
from conftest import ROOT, run
from site_address import book_url, read_owner, repository_url
from test_project import load

NOBODY = "nobody-yet"
script = load(ROOT / ".ci" / "owner.py")
ADDRESS = re.compile(
    r"github\.com[/:][\w-]+/tformer\b|[\w-]\.github\.io/tformer\b"
    r"|[\w-]@users\.noreply\.github\.com"
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory, copy_tree):
    "A copy of the project."
    return copy_tree(tmp_path_factory.mktemp("owner")).resolve()


def texts(root):
    return {path: path.read_bytes().decode() for path in script.files(root)}


# --- the setting, and what follows from it


def test_all_agrees_with_the_setting():
    owner = read_owner(ROOT)
    for path, text in texts(ROOT).items():
        assert script.written(path, text, owner) == text, f"make owner NAME={owner}"


def test_nothing_else_names_an_owner():
    found = []
    for path in project_files():
        if path.suffix in {".py", ".md", ".ipynb", ".yml", ".cff", ".ini", ".toml"}:
            text = path.read_bytes().decode()
            if path in script.files(ROOT):
                text = script.written(path, text, "")
            found += [f"{path.name}: {m[0]}" for m in ADDRESS.finditer(text)]
    assert not found, found


def test_every_notebook_has_a_cell_for_colab():
    "Without it the button that opens the notebook there leads to an import error."
    for path, text in texts(ROOT).items():
        if path.suffix == ".ipynb":
            assert text.count('"if \\"google.colab\\" in sys.modules:\\n"') == 1, path
            assert len(script.INSTALLS.findall(text)) == 1, path


def test_an_owner_can_be_set_and_unset(copy):
    first = read_owner(copy)
    before = texts(copy)
    run("make", "owner", "NAME=", cwd=copy)
    unset = texts(copy)
    run("make", "owner", f"NAME={NOBODY}", cwd=copy)
    after = texts(copy)
    assert read_owner(copy) == NOBODY
    for path in before:
        assert "example.org" not in after[path] and NOBODY not in unset[path], path
        if path.suffix == ".ipynb":
            wheel = f"{site_wheel.FOLDER}/{site_wheel.wheel_name(copy)}"
            address = f"tformer @ {book_url(NOBODY)}{wheel}"
            cells = ["".join(c["source"]) for c in json.loads(after[path])["cells"]]
            (cell,) = [c for c in cells if '"google.colab" in sys.modules' in c]
            line = f'    %pip install -q "{address}"'
            assert line in cell.replace("[plot]", ""), path
    for name in ("README.md", "book/intro.md", "CITATION.cff", "tformer/_modidx.py"):
        text = after[copy / name]
        assert repository_url(NOBODY) in text or book_url(NOBODY) in text, name
    run("make", "owner", f"NAME={first}", cwd=copy)
    assert texts(copy) == before


def test_only_a_login_is_taken(copy):
    before = texts(copy)
    for args in (["NAME=not a login"], ["NAME=a/b"], ["NAME=a."], []):
        done = subprocess.run(
            ["make", "owner", *args], cwd=copy, text=True, capture_output=True
        )
        assert done.returncode == 2, done
        assert "login was expected" in done.stderr or not args
    assert texts(copy) == before


@pytest.mark.parametrize("owner", ["", NOBODY])
def test_the_package_states_addresses_only_of_an_owner(tmp_path, monkeypatch, owner):
    for name in ("setup.py", "README.md", "settings.ini"):
        text = (ROOT / name).read_text(encoding="utf-8")
        if name == "settings.ini":
            text = script.written(ROOT / name, text, owner)
        (tmp_path / name).write_text(text, encoding="utf-8")
    told = {}
    monkeypatch.setattr(setuptools, "setup", lambda **kwargs: told.update(kwargs))
    monkeypatch.chdir(tmp_path)
    runpy.run_path("setup.py")
    assert told.pop("name") == "tformer" and told.pop("long_description")
    assert "example.org" not in repr(told)
    asked = {key: told.get(key) for key in ("url", "project_urls", "author_email")}
    assert asked == (
        {
            "url": repository_url(owner),
            "project_urls": {
                "Book": book_url(owner).rstrip("/"),
                "Source": repository_url(owner),
            },
            "author_email": f"{owner}@users.noreply.github.com",
        }
        if owner
        else dict.fromkeys(asked)
    )


# --- the addresses of a built site


def test_the_extension_asks_for_addresses_only_with_an_owner(tmp_path):
    for owner in "", NOBODY:
        (tmp_path / "settings.ini").write_text(f"[DEFAULT]\nowner = {owner}\n")
        loaded = []
        app = SimpleNamespace(
            srcdir=tmp_path,
            setup_extension=loaded.append,
            connect=lambda *args, **kwargs: None,
        )
        site_address.setup(app)
        assert loaded == [*site_address.EXTENSIONS] * bool(owner)


@pytest.mark.nightly
def test_addresses_of_a_book_with_an_owner(copy, tmp_path):
    "Buttons, tags for sharing and the map of the site name the very page."
    chapters = ["nbs/01_attention_by_hand", "nbs/package/check/adapter"]
    files = [{"file": name} for name in (*chapters, "book/glossary")]
    toc = {"format": "jb-book", "root": "book/intro", "chapters": files}
    first = (copy / "settings.ini").read_text("utf-8")
    for name, text in {
        "_toc.yml": yaml.safe_dump(toc),
        "book/intro.md": "# The beginning\n\nText.\n",
        "settings.ini": re.sub("(?m)^owner =.*$", f"owner = {NOBODY}", first),
    }.items():
        (copy / name).write_text(text, encoding="utf-8")
    program = Path(sys.executable).parent / "jupyter-book"
    env = {**os.environ, "PYTHONPATH": str(copy)}
    run(program, "build", ".", "--path-output", tmp_path, cwd=copy, env=env)
    html = tmp_path / "_build" / "html"
    for faults in (
        foreign_addresses(html, NOBODY),
        own_address_faults(html, NOBODY),
        misleading_addresses(html, copy, NOBODY),
    ):
        assert not faults, (len(faults), faults[:10])
    for name in chapters:
        text = (html / f"{name}.html").read_text(encoding="utf-8")
        for address in (
            f"https://colab.research.google.com/github/{NOBODY}/tformer/blob/main/"
            f"{name}.ipynb",
            f"https://mybinder.org/v2/gh/{NOBODY}/tformer/main?urlpath=lab/tree/"
            f"{name}.ipynb",
            f"{repository_url(NOBODY)}/edit/main/{name}.ipynb",
        ):
            assert f'"{address}"' in text, f"{name}: {address}"


@pytest.mark.parametrize(
    "address, faults",
    [
        ("https://arxiv.org/abs/1706.03762", 0),
        ("https://github.com/a/b/issues/3", 0),
        (f"{book_url(NOBODY)}book/intro.html", 0),
        (f"{repository_url(NOBODY)}/edit/main/book/intro.md", 0),
        (f"{repository_url(NOBODY)}/edit/main/intro.md", 1),
        (f"{book_url(NOBODY)}intro.html", 1),
        ("https://github.com/some-body" + "/tformer", 1),
        ("https://mybinder.org/v2/gh/a" + "/tformer/main", 1),
        ("https://example.org/tformer", 2),  # and as a text
    ],
)
def test_an_address_that_leads_nowhere_is_told(tmp_path, address, faults):
    (tmp_path / "book").mkdir()
    page = f'<html><head></head><body><a href="{address}">x</a></body></html>'
    (tmp_path / "book" / "intro.html").write_text(page, encoding="utf-8")
    found = foreign_addresses(tmp_path, NOBODY)
    found += misleading_addresses(tmp_path, ROOT, NOBODY)
    assert len(found) == faults, found
