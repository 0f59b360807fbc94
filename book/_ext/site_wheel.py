"""Let the site carry the package: a wheel beside its pages, and a link to it.

``<!-- wheel -->`` in a page becomes the link. A notebook that somebody opens elsewhere
installs the package from there (``.ci/owner.py``), so that page and package are of the
same version.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from configparser import ConfigParser
from pathlib import Path

MARK = "<!-- wheel -->"
FOLDER = "_static/wheel"
# all that a wheel is built from
SOURCES = (
    "tformer",
    "setup.py",
    "settings.ini",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
)


def wheel_name(root: Path) -> str:
    "Return the name of the file, which says the version."
    settings = ConfigParser(delimiters="=", interpolation=None)
    settings.read(Path(root) / "settings.ini", encoding="utf-8")
    return f"tformer-{settings['DEFAULT']['version']}-py3-none-any.whl"


def build_wheel(root: Path, out: Path) -> Path:
    "Build the wheel in a copy of its sources, and return where it stands."
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "source"
        copy.mkdir()
        for name in SOURCES:
            if (source := Path(root) / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(source, copy / name, ignore=ignored)
            else:
                shutil.copy(source, copy / name)
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "wheel", "--quiet"),
                *("--no-deps", "--no-index", "--no-build-isolation"),
                *("--wheel-dir", folder, str(copy)),
            ],
            check=True,
        )
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        return Path(shutil.copy(Path(folder) / wheel_name(root), out))


def on_source_read(app, docname, content):
    if MARK in content[0]:
        name = wheel_name(app.srcdir)
        way = "../" * docname.count("/")
        link = f'<a href="{way}{FOLDER}/{name}" download>{name}</a>'
        content[0] = content[0].replace(MARK, link)


def add_wheel(app, exception):
    if exception is None and app.builder.format == "html":
        build_wheel(Path(app.srcdir), Path(app.outdir) / FOLDER)


def setup(app):
    app.connect("source-read", on_source_read)
    app.connect("build-finished", add_wheel)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
