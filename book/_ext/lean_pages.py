"""What the theme and its extensions load and the book does not need.

MathJax where no formula stands. The scripts of Thebe (declared twice, an error
in every console) and the icons as 1.5 MB of script: the theme's style sheet
draws the same icons with a font.
Sphinx's search, in place of which ``section_search`` has its own. The templates that
leave these out stand in ``book/_templates``; their files do not stay in the site.
"""

import re
from pathlib import Path

THEBE = re.compile(
    r"<script\b[^>]*>(?:(?!</script>).)*?"
    r"(?:requestKernel|kernelName)(?:(?!</script>).)*</script>",
    re.S,
)
TEMPLATES = Path(__file__).resolve().parents[1] / "_templates"
UNUSED = (
    "*webpack-macros.html",
    "sphinx-thebe.*",
    "scripts/fontawesome.js*",
    "searchtools.js",
    "language_data.js",
    "scripts/*.map",
    "styles/*.map",
)


def wanted(js) -> bool:
    "Whether a script of the page belongs to something the book uses."
    text = f"{js.filename or ''} {js.attributes.get('body', '')}"
    return "thebe" not in text.lower()


def mathjax(js) -> bool:
    "Whether a script sets formulas."
    return "mathjax" in f"{js.filename} {js.attributes.get('body')}".lower()


def drop(app, page, template, context, doctree):
    scripts = context.get("script_files", [])
    formulas = 'class="math ' in context.get("body", 'class="math ')
    context["script_files"] = [
        js
        for js in scripts
        if not hasattr(js, "attributes")
        or (wanted(js) and (formulas or not mathjax(js)))
    ]
    styles = context.get("css_files", [])
    context["css_files"] = [
        css for css in styles if "thebe" not in str(getattr(css, "filename", css))
    ]
    if "body" in context:
        context["body"] = THEBE.sub("", context["body"])
    context.setdefault("default_mode", "auto")


def use_templates(app, config):
    config.templates_path = [*config.templates_path, str(TEMPLATES)]


def drop_lost_pages(out: Path, documents) -> None:
    "Drop the pages of an earlier build whose documents have gone."
    (out / "searchindex.js").unlink(missing_ok=True)
    for folder in ("nbs", "book"):
        for path in (out / folder).rglob("*.html"):
            if path.relative_to(out).with_suffix("").as_posix() not in documents:
                path.unlink()


def tidy(app, exception):
    "Take the files that no page loads out of the site."
    if exception is None and app.builder.format == "html":
        static = Path(app.outdir) / "_static"
        for pattern in UNUSED:
            for path in static.glob(pattern):
                path.unlink()
        drop_lost_pages(Path(app.outdir), app.env.found_docs)


def setup(app):
    app.connect("config-inited", use_templates)
    app.connect("html-page-context", drop, priority=900)
    app.connect("build-finished", tidy, priority=900)
    return {"version": "2", "parallel_read_safe": True, "parallel_write_safe": True}
