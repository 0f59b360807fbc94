"""Print the test files and notebooks that a change can affect, nearest first.

`make check` runs what this program prints: python tests/affected.py

The change is what git knows of it: the files of the working tree that differ from the
last commit, and those of the commits since this branch left its upstream. If nothing
differs, it is the last commit. A test or a notebook is affected if it imports a changed
file, directly or through others, if it mentions its name, or if `RULES` names it.
The distance is the number of imports in between. Files are chosen by distance, then
by the seconds that `tests/seconds.json` has on record, until `BUDGET` seconds are
spent. The rest is named on the error output, and `make test` runs it.
"""

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 150  # recorded seconds, of one process
USUAL = 15  # seconds of a file that is not on record
# where a bare import such as `import helpers` is looked for
FOLDERS = ["tests", "tests/bench", "book/_ext", "experiments", "book"]
# what pytest reads before it runs any test, or any notebook
FOR_TESTS = ["conftest.py", "tests/conftest.py", "requirements.txt", "pyproject.toml"]
FOR_NOTEBOOKS = [
    "conftest.py",
    "tests/kernels.py",
    "tests/sanitize.cfg",
    "requirements.txt",
]
# test files that read certain files instead of importing them
RULES = [
    ("*", ["project"]),  # one of its tests reads every file
    ("nbs/*.ipynb", ["book", "ext", "form", "vocabulary"]),
    ("tformer/*", ["code_changes", "package", "vocabulary"]),
    ("tests/mutations.yml", ["code_changes", "mutations", "vocabulary"]),
    ("tests/vocabulary.yml", ["vocabulary"]),
    ("book/verified/*", ["code_changes"]),
    ("book/_ext/*", ["live"]),
    ("book/_static/*", ["live"]),
    ("*ruff.toml", ["lint"]),
    (".codespellrc", ["lint"]),
    ("book/*", ["book", "ext", "form"]),
    ("book/notation.md", ["notation"]),
    ("book/errata.md", ["errata"]),
    ("book/sources.md", ["errata"]),
    ("tests/*.py", ["affected", "tiers", "vocabulary"]),
    ("tests/seconds.json", ["affected", "tiers"]),
    ("tests/bench/*", ["bench"]),
    (".github/*", ["tiers", "workflows"]),
    (".ci/*", ["lint", "tiers", "workflows"]),
    (".pre-commit-config.yaml", ["workflows"]),
    ("Makefile", ["lint", "tiers", "workflows"]),
    ("*.md", ["ext", "package", "tiers", "vocabulary"]),
    ("_*.yml", ["book", "ext"]),
    ("settings.ini", ["package", "uv", "workflows"]),
    ("setup.py", ["package", "uv"]),
    ("MANIFEST.in", ["package"]),
    ("pyproject.toml", ["package", "tiers", "uv"]),
    (".importlinter", ["lint"]),
]
MAGIC = re.compile(r"^(\s*)[%!](?=[A-Za-z%]).*$", re.M)
EXPORTS = re.compile(r"^#\s*\|\s*default_exp\s+(\S+)", re.M)


# What has changed


def git(root, *args):
    "Return what git prints, or None if the command fails."
    done = subprocess.run(
        ["git", *args], cwd=root, text=True, capture_output=True, check=False
    )
    return done.stdout if done.returncode == 0 else None


def changed_files(root):
    """Return the changed paths, and in words what they differ from.

    A file that was deleted or renamed counts under its old name as well.
    """
    names = set()
    since = "the last commit"
    for base in ("@{upstream}", "origin/main", "main"):
        fork = git(root, "merge-base", base, "HEAD")
        if fork is not None:
            names |= _names(
                git(
                    root,
                    "diff",
                    "-z",
                    "--name-only",
                    "--no-renames",
                    fork.strip(),
                    "HEAD",
                )
            )
            since = f"the commit {fork[:9]}, where this branch left {base}"
            break
    names |= _names(git(root, "diff", "-z", "--name-only", "--no-renames", "HEAD"))
    names |= _names(git(root, "ls-files", "-z", "--others", "--exclude-standard"))
    if names:
        return sorted(names), since
    last = git(
        root,
        "show",
        "-z",
        "--name-only",
        "--no-renames",
        "--first-parent",
        "--format=",
        "HEAD",
    )
    return sorted(_names(last)), "the commit before the last"


def _names(text):
    return {name for name in (text or "").split("\0") if name}


# What depends on it


def imported_names(tree, package):
    "Yield the dotted names that a syntax tree imports, and `package.name` in use."
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == package
        ):
            yield f"{package}.{node.attr}"


def code_of(path):
    "Return the Python source of a file; of a notebook, that of its code cells."
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = json.loads(text)["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    return MAGIC.sub(r"\1pass", "\n\n".join(code))


def is_run(name):
    "Whether pytest runs this file: a test file or a notebook."
    return fnmatch(name, "tests/test_*.py") or fnmatch(name, "nbs/*.ipynb")


class Project:
    """The files of a project, and which of them each one needs.

    ``needs[name]`` are the paths that the file ``name`` imports directly, and
    ``source[name]`` is its Python code. All paths are relative to ``root``.
    """

    def __init__(self, root=ROOT, package="tformer"):
        self.root = Path(root)
        self.package = package
        self.source = {}
        self.needs = defaultdict(set)
        self._read_package()
        for folder in ("tests", "nbs", "experiments", "book"):
            for path in sorted(self.root.glob(f"{folder}/**/*")):
                if path.suffix in {".py", ".ipynb"} and not any(
                    part.startswith(".") for part in path.parts[-2:]
                ):
                    self._read(path)

    def _file(self, module):
        "Return the path of a module of the package, or None."
        name = module.replace(".", "/")
        for path in (f"{name}.py", f"{name}/__init__.py"):
            if (self.root / path).exists():
                return path
        return None

    def _read_package(self):
        "Take the imports inside the package from grimp's graph of it."
        sys.path.insert(0, str(self.root))
        try:
            graph = grimp.build_graph(self.package, cache_dir=None)
        finally:
            sys.path.remove(str(self.root))
        for module in graph.modules:
            name = self._file(module)
            if name is None:
                raise ValueError(f"{module} is not a module of {self.root}")
            self.source[name] = code_of(self.root / name)
            self.needs[name] |= {
                self._file(other)
                for other in graph.find_modules_directly_imported_by(module)
            }

    def _read(self, path):
        "Take the imports of a test, a notebook or a script from its syntax tree."
        name = path.relative_to(self.root).as_posix()
        code = code_of(path)
        self.source[name] = code
        for imported in imported_names(ast.parse(code), self.package):
            found = self._resolve(imported)
            if found and found != name:
                self.needs[name].add(found)
        if fnmatch(name, "tests/test_*.py"):
            self.needs[name] |= set(FOR_TESTS)
        elif path.suffix == ".ipynb":
            self.needs[name] |= set(FOR_NOTEBOOKS)
            exported = EXPORTS.search(code)
            if exported:
                module = f"{self.package}/{exported[1].replace('.', '/')}.py"
                self.needs[module].add(name)

    def _resolve(self, imported):
        "Return the file that a dotted name stands for, or None."
        first = imported.split(".")[0]
        if first == self.package:
            return self._file(imported)
        for folder in FOLDERS:
            path = f"{folder}/{first}.py"
            if (self.root / path).exists():
                return path
        return None

    def mentions(self, changed):
        """Return the files whose code mentions a file that it may read or load.

        Mentioned is its full name, or its bare name in quotes where the name of its
        folder stands in the same file, such as "record" for `records/curves.csv`.
        """
        if fnmatch(changed, f"{self.package}/*.py"):
            return set()
        path = Path(changed)
        folder = path.parent.name.removesuffix("s")
        quoted = re.compile(rf"""["'/]{re.escape(path.stem)}["'/]""")
        return {
            name
            for name, code in self.source.items()
            if path.name in code or (folder and folder in code and quoted.search(code))
        }

    def ruled(self, changed):
        "Return the test files that `RULES` names for a file."
        tests = {
            f"tests/test_{test}.py"
            for pattern, names in RULES
            if fnmatch(changed, pattern)
            for test in names
        }
        return {test for test in tests if (self.root / test).exists()}

    def affected(self, changed):
        "Return the distance of each test file and notebook that can be affected."
        users = defaultdict(set)
        for name, needed in self.needs.items():
            for other in needed:
                users[other].add(name)
        distance = dict.fromkeys(changed, 0)
        edge = list(changed)
        steps = 0
        while edge:
            steps += 1
            reached = set()
            for name in edge:
                reached |= users[name]
            if steps == 1:
                for name in changed:
                    reached |= self.mentions(name) | self.ruled(name)
            edge = sorted(reached - distance.keys())
            distance |= dict.fromkeys(edge, steps)
        return {
            name: steps
            for name, steps in distance.items()
            if is_run(name) and (self.root / name).exists()
        }


# What is run


def choose(distance, seconds, budget=BUDGET):
    """Split the affected files into those that are run and those that are left.

    The nearest come first, and among equally near files the quickest. A file that
    does not fit any more is left, and the next one is tried.
    """
    cost = {name: seconds.get(name, USUAL) for name in distance}
    chosen = []
    left = []
    for name in sorted(distance, key=lambda n: (distance[n], cost[n], n)):
        if cost[name] <= budget:
            chosen.append(name)
            budget -= cost[name]
        else:
            left.append(name)
    return chosen, left


def recorded(path=ROOT / "tests" / "seconds.json"):
    "Return the seconds that each file takes in `make test`, from the record."
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: tiers["test"] for name, tiers in record.items() if "test" in tiers}


def report(changed, since, chosen, left, seconds):
    "Return in plain sentences what is run, and what is not."
    took = sum(seconds.get(name, USUAL) for name in chosen)
    files = "1 file differs" if len(changed) == 1 else f"{len(changed)} files differ"
    said = [
        f"{files} from {since}.",
        f"{len(chosen)} of {len(chosen) + len(left)} affected test files and "
        f"notebooks are run; on record they take {took:.0f} s.",
    ]
    if left:
        said.append(
            f"These affected files did not fit into {BUDGET} s and are left to "
            f"`make test`: {', '.join(left)}."
        )
    return "\n".join(said)


def main():
    changed, since = changed_files(ROOT)
    seconds = recorded()
    chosen, left = choose(Project().affected(changed), seconds)
    print(report(changed, since, chosen, left, seconds), file=sys.stderr)
    print("\n".join(chosen))


if __name__ == "__main__":
    main()
