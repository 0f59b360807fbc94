"""Find lines that pack several assignments into one.

    python .ci/one_assignment.py [FILE ...]

Reads Python files and notebooks, by default all of the project but the exported
package, and prints a line for each finding:

* ``a, b = x, y``, where two lines say the same. A swap or a rotation, in which
  a later value reads an earlier target (``a, b = b, a + b``), needs one line and
  is allowed; so is the unpacking of what a call returns.
* ``self.a = self.b = x``, where one of several targets is more than a name.

Statements that are joined by ``;`` or follow a ``:`` are found by ruff.
"""

import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# built, installed or exported
SKIPPED = {
    ".git",
    ".venv",
    "_book",
    "_build",
    "_docs",
    "_proc",
    "build",
    "dist",
    "tformer",
    ".ipynb_checkpoints",
}


def sources(path):
    "Pairs of a place to print and its code: one of a file, several of a notebook."
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        yield str(path), text
        return
    for n, cell in enumerate(json.loads(text)["cells"], 1):
        if cell["cell_type"] == "code":
            # lines for the shell or for IPython are no Python
            code = "".join(cell["source"])
            yield (
                f"{path}:cell {n}",
                re.sub(r"^(\s*)[%!](?=[A-Za-z%]).*$", r"\1pass", code, flags=re.M),
            )


def is_read(target, value):
    "Whether a value reads what a target sets, or the list that it changes."
    kinds = ast.Name | ast.Attribute | ast.Subscript
    changed = [
        n
        for n in ast.walk(target)
        if isinstance(n, kinds) and isinstance(n.ctx, ast.Store)
    ]
    changed += [n.value for n in changed if isinstance(n, ast.Subscript)]
    names = {ast.unparse(n) for n in changed}
    return any(
        isinstance(n, kinds) and ast.unparse(n) in names for n in ast.walk(value)
    )


def is_packed(node):
    "Whether a statement is ``a, b = x, y`` and could be two."
    if not isinstance(node, ast.Assign) or len(node.targets) > 1:
        return False
    target = node.targets[0]
    value = node.value
    display = ast.Tuple | ast.List
    if not isinstance(target, display) or not isinstance(value, display):
        return False
    if len(target.elts) != len(value.elts) or any(
        isinstance(n, ast.Starred) for n in target.elts + value.elts
    ):
        return False
    return not any(
        is_read(one, later)
        for i, one in enumerate(target.elts)
        for later in value.elts[i + 1 :]
    )


def is_chained(node):
    "Whether a statement sets several targets that are not all names."
    return (
        isinstance(node, ast.Assign)
        and len(node.targets) > 1
        and any(not isinstance(target, ast.Name) for target in node.targets)
    )


def findings(code):
    "The line number of each finding, and what to do about it."
    for node in ast.walk(ast.parse(code)):
        if is_packed(node):
            yield node.lineno, "one assignment a line"
        elif is_chained(node):
            yield node.lineno, "one target an assignment"


def everything():
    "All Python files and notebooks of the project but the exported ones."
    found = {
        path.relative_to(ROOT)
        for kind in ("*.py", "*.ipynb")
        for path in ROOT.rglob(kind)
    }
    return sorted(path for path in found if not SKIPPED & set(path.parts))


def main(names):
    found = [
        f"{place}:{line}: {what}"
        for path in map(Path, names or everything())
        for place, code in sources(path)
        for line, what in sorted(findings(code))
    ]
    print("\n".join(found) or "Each line assigns once.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
