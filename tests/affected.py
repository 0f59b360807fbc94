"""Print the test files and notebooks that a change concerns, the quickest first.

`make check` runs what this program prints: python tests/affected.py

The change is what git knows of it: the files of the working tree that differ from the
last commit, and those of the commits since this branch left its upstream. If nothing
differs, it is the last commit. A test file or a notebook is concerned if it has
changed, if it imports a changed module or names another changed file, or if `ALWAYS`
says so. What imports a changed module through others is left to `make test`, and so is
what does not fit into `BUDGET`; that is named on the error output.
"""

import json
import re
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 150  # recorded seconds, of one process
USUAL = 15  # seconds of a file that is not on record
# tests that read all files of a kind, and name none of them
ALWAYS = {
    "*": ["project"],
    "nbs/*": ["ext", "form", "vocabulary"],
    "book/*": ["ext", "form", "vocabulary"],
    "tformer/*": ["mutations", "package", "vocabulary"],
    "tests/*": ["mutations"],
    "*.md": ["ext", "package", "vocabulary"],
}


def git(*args):
    "Return the names of files that git prints, or None if the command fails."
    done = subprocess.run(
        ["git", *args], cwd=ROOT, text=True, capture_output=True, check=False
    )
    return {*done.stdout.split("\0")} - {""} if done.returncode == 0 else None


def changed_files():
    """Return the changed paths.

    A file that was deleted or renamed counts under its old name as well.
    """
    listing = ("-z", "--name-only", "--no-renames")
    names = git("ls-files", "-z", "--others", "--exclude-standard")
    names |= git("diff", *listing, "HEAD")
    for base in ("@{upstream}", "origin/main", "main"):
        since = git("diff", *listing, f"{base}...HEAD")
        if since is not None:
            names |= since
            break
    return names or git("show", *listing, "--first-parent", "--format=", "HEAD")


def names_file(changed):
    "Return a pattern of the texts that import a module, or name another file."
    path = Path(changed)
    if path.suffix == ".py" and path.is_relative_to("tformer"):
        return imports_of(path.relative_to("tformer").with_suffix("").parts)
    stem = re.escape(path.stem)
    return re.compile(
        rf"""\b{re.escape(path.name)}\b|["'/]{stem}["']|\b(?:import|from) {stem}\b"""
    )


def imports_of(parts):
    "Return a pattern of the texts that import a module, or the package it is in."
    *folders, last = [part for part in parts if part != "__init__"] or [""]
    package = r"\.".join(["tformer", *folders])
    found = [
        rf"{package}\.{last}\b",
        rf"{package} import (?:\([^)]*|[^\n(]*)\b{last}\b",
        rf"default_exp {'.'.join([*folders, last])}\b",
    ]
    if folders:  # it may be imported from there
        found.append(rf"{package}\b(?!\.)")
        found.append(rf"tformer import (?:\([^)]*|[^\n(]*)\b{folders[0]}\b")
    return re.compile("|".join(found))


@cache
def read(path):
    "Return the text of a test file; of a notebook, that of its cells."
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])


def affected(changed):
    "Return the test files and notebooks that a change concerns."
    patterns = [names_file(name) for name in changed]
    files = [*ROOT.glob("tests/test_*.py"), *ROOT.glob("nbs/**/*.ipynb")]
    found = {
        f"tests/test_{test}.py"
        for kind, tests in ALWAYS.items()
        if any(fnmatch(name, kind) for name in changed)
        for test in tests
    }
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        if name in changed or any(pattern.search(read(path)) for pattern in patterns):
            found.add(name)
    return found


def choose(names, seconds, budget=BUDGET):
    "Split the files into those that are run, the quickest, and those that are left."
    chosen = []
    left = []
    for name in sorted(names, key=lambda name: (seconds.get(name, USUAL), name)):
        budget -= seconds.get(name, USUAL)
        (chosen if budget >= 0 else left).append(name)
    return chosen, left


def main():
    record = json.loads((ROOT / "tests" / "seconds.json").read_text(encoding="utf-8"))
    files = record["files"].items()
    seconds = {name: tiers["test"] for name, tiers in files if "test" in tiers}
    chosen, left = choose(affected(changed_files()), seconds)
    if left:
        print(f"left to `make test`: {', '.join(left)}", file=sys.stderr)
    print("\n".join(chosen))


if __name__ == "__main__":
    main()
