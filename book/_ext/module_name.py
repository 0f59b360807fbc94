"""Tell the style sheet which module a notebook exports, for the badge on exported cells."""
import json
import re
from pathlib import Path

DEFAULT_EXP = re.compile(r"^#\s*\|\s*default_exp\s+([\w.]+)", re.MULTILINE)


def module_of(path: Path) -> str | None:
    "The module named by a notebook's ``default_exp`` line."
    if path.suffix != ".ipynb" or not path.exists():
        return None
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    return next((m[1] for m in map(DEFAULT_EXP.search, code) if m), None)


def on_page(app, page, template, context, doctree):
    module = doctree is not None and module_of(Path(app.env.doc2path(page)))
    if module:
        context["metatags"] = context.get("metatags", "") + f'\n<style>:root{{--tf-module:"tformer.{module}"}}</style>'


def setup(app):
    app.connect("html-page-context", on_page)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
