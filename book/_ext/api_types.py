"""Draw jaxtyping annotations and nbdev's parameter comments in the API pages.

nbdev writes the meaning of a parameter as a comment beside it; autodoc does
not see comments. Their text is added to the docstring as a field list, unless
the docstring documents its parameters itself.
"""

import dataclasses
import inspect
import re
import sys

from docutils import nodes
from fastcore.docments import docments, empty
from sphinx.ext.intersphinx import missing_reference

from course import as_rst

ALIAS = {
    "Tensor": "torch.Tensor",
    "Module": "torch.nn.Module",
    "torch._C.Generator": "torch.Generator",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
}
ROUTINES = ("function", "method", "class")
PLAIN = ("property", "attribute", "data")


def described(what, obj):
    "What carries the parameter comments of a documented object."
    if what == "class":
        return obj if dataclasses.is_dataclass(obj) else obj.__init__
    return obj


def fields(obj) -> list[str]:
    "Field list lines from the comments beside an object's parameters."
    try:
        found = docments(obj, full=True)
    except (OSError, SyntaxError, TypeError, ValueError):
        return []
    out = []
    for arg, one in found.items():
        text = one.get("docment")
        if text and text is not empty:
            text = as_rst(text)
            out.append(
                f":returns: {text}" if arg == "return" else f":param {arg}: {text}"
            )
    return out


def add_docments(app, what, name, obj, options, lines):
    if what == "data" and "\n".join(lines).strip() == (
        inspect.cleandoc(type(obj).__doc__ or "").strip()
    ):
        lines.clear()  # a constant is not described by its type
        return
    target = described(what, obj) if what in ROUTINES else None
    routine = inspect.isroutine(target) or dataclasses.is_dataclass(target)
    if target is None or not routine:
        return
    documented = any(
        line.lstrip().startswith((":param", ":return", "Parameters")) for line in lines
    )
    new = [] if documented else fields(target)
    if new:
        lines += ["", *new, ""]


def keep_plain(app, what, name, obj, options, lines):
    "Remember a property's text: napoleon reads «a: b» in it as a type."
    if what in PLAIN:
        app.env.temp_data["plain", name] = list(lines)


def put_back(app, what, name, obj, options, lines):
    lines[:] = app.env.temp_data.pop(("plain", name), lines)


def python_page(target: str) -> str | None:
    "Address of a class of the standard library in Python's documentation."
    module, _, name = target.rpartition(".")
    if module.split(".")[0] in sys.stdlib_module_names and name:
        return f"https://docs.python.org/3/library/{module}.html#{target}"
    return None


def numpy_page(target: str) -> str | None:
    "Address of a class of NumPy."
    if re.fullmatch(r"numpy\.\w+", target):
        return f"https://numpy.org/doc/stable/reference/generated/{target}.html"
    return None


def resolve(app, env, node, contnode):
    target = node.get("reftarget", "")
    if target in ALIAS:
        node["reftarget"] = ALIAS[target]
        return missing_reference(app, env, node, contnode)
    page = python_page(target) or numpy_page(target)
    page = page if node.get("refdomain") == "py" else None
    if page:
        return nodes.reference("", "", contnode, refuri=page, internal=False)
    return None


def setup(app):
    app.connect("autodoc-process-docstring", add_docments, priority=400)
    app.connect("autodoc-process-docstring", keep_plain, priority=450)
    app.connect("autodoc-process-docstring", put_back, priority=550)
    app.connect("missing-reference", resolve)
    return {"version": "2", "parallel_read_safe": True, "parallel_write_safe": True}
