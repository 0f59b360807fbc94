"""Feed setuptools from settings.ini, the one place for package metadata."""

from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
ini = ConfigParser(delimiters="=", interpolation=None)
ini.read(here / "settings.ini", encoding="utf-8")
cfg = ini["DEFAULT"]
lib = cfg["lib_path"]
EXTRA = "_requirements"
# addresses that lead somewhere only where the repository has an owner
addresses = {
    "author_email": cfg["author_email"],
    "url": cfg["git_url"],
    "project_urls": {
        "Book": cfg["doc_host"] + cfg["doc_baseurl"],
        "Source": cfg["git_url"],
    },
}

setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    description=cfg["description"],
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    keywords=cfg["keywords"].split(),
    author=cfg["author"],
    license="Apache-2.0",
    **(addresses if cfg["owner"] else {}),
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Education",
        "Intended Audience :: Developers",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{n}" for n in range(11, 15)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=[lib, lib + ".*"]),
    package_data={
        lib: ["py.typed", "records/*.csv", "records/*.safetensors", "weights/*/*"]
    },
    python_requires=">=" + cfg["min_python"],
    install_requires=cfg["requirements"].split(),
    extras_require={
        k.removesuffix(EXTRA): cfg[k].split() for k in cfg if k.endswith(EXTRA)
    },
    entry_points={
        "console_scripts": cfg.get("console_scripts", "").split(),
        "nbdev": [f"{lib}={lib}._modidx:d"],
    },
)
