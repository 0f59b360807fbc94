"""Build the book, every warning being fatal: python book/_ext/build_book.py OUT

The pages are written to OUT/_build/html. The tests build the same book: what they have
built of exactly these files stands in `_proc/books` under a hash of them, and is copied
instead.
"""

import functools
import gc
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "_proc" / "books"
DAY = 24 * 60 * 60  # seconds


def project_files() -> list[Path]:
    "Return the project's own files: what git tracks, or would."
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    paths = (ROOT / name for name in names.stdout.decode().split("\0") if name)
    return sorted(path for path in paths if path.is_file())


def digest_of_tree(paths: list[Path]) -> str:
    "Return a hash of the names and contents of files."
    hashed = hashlib.sha256()
    for path in paths:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        hashed.update(f"{path.relative_to(ROOT)} {content}\n".encode())
    return hashed.hexdigest()[:16]


def kept_pages() -> Path:
    "Return where the pages of the project as it is are kept, or would be."
    return KEPT / digest_of_tree(project_files())


def keep(built: Path, kept: Path) -> None:
    """Move pages to the place where they are kept, in one step.

    What stands beside them goes if no run has asked for it within a day: another run
    may still read what it has asked for.
    """
    kept.parent.mkdir(parents=True, exist_ok=True)
    beside = kept.with_name(f"{kept.name}.{os.getpid()}.part")
    shutil.move(built, beside)
    try:
        beside.rename(kept)
    except OSError:  # another process was faster
        shutil.rmtree(beside)
    for other in kept.parent.iterdir():
        if time.time() - other.stat().st_mtime > DAY:
            shutil.rmtree(other, ignore_errors=True)


def build(out: Path) -> None:
    """Build the book of the current folder in this process, which ends with it.

    Without garbage collection, and with a plugin of the bibliography looked up once
    and not for each citation, a build takes half the time and 2 GB.
    """
    import pybtex.plugin
    from jupyter_book.cli.main import main

    gc.disable()
    load = pybtex.plugin._load_entry_point
    pybtex.plugin._load_entry_point = functools.cache(load)
    main(["build", ".", "--path-output", str(out), "-W", "-n", "--keep-going"])


def copy_or_build(out: Path) -> None:
    "Write the pages below a folder; what it held before is replaced."
    kept = kept_pages()
    if not kept.exists():
        build(out)
        return
    os.utime(kept)
    pages = out / "_build" / "html"
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(kept, pages)
    print(f"The tests have built these files already: {pages} is a copy.")


if __name__ == "__main__":
    copy_or_build(Path(sys.argv[1]))
