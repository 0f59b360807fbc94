"""Load the scripts of live figures, only on pages that show one.

``tformer.plot.live`` writes ``<figure … data-live="NAME">``. A page with such a
figure gets live.css, live.js, which all live figures share, and live/NAME.js for
each name. All are deferred, so they run in this order, after the page was read.
The build fails where a script does not exist.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.errors import ExtensionError

STATIC = Path(__file__).resolve().parents[1] / "_static"
# text that shows HTML writes &lt;figure, so this finds elements only
LIVE = re.compile(r'<figure\b[^>]*\sdata-live="([a-z0-9-]+)"')


def live_names(body: str) -> list[str]:
    "Return the names of the live figures of a page, each once, in their order."
    return list(dict.fromkeys(LIVE.findall(body)))


def add_scripts(app, page, template, context, doctree):
    """Add the files that the live figures of one page need.

    What is added while a page is written stays with this page. ``lean_pages``
    replaces the list of scripts (priority 900), so this has to come before.
    """
    names = live_names(context.get("body") or "")
    if not names:
        return
    files = ["live.js", *(f"live/{name}.js" for name in names)]
    for file in ("live.css", *files):
        if not (STATIC / file).is_file():
            raise ExtensionError(
                f"{page}: a live figure needs book/_static/{file}, which does not exist"
            )
    app.add_css_file("live.css")
    for file in files:
        app.add_js_file(file, loading_method="defer")


def setup(app):
    app.connect("html-page-context", add_scripts, priority=600)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
