"""Pages and tools of the site as a whole: the page for an address that leads
nowhere, and the source pages without nbdev's directives."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from sphinx.pycode import ModuleAnalyzer

DIRECTIVE = re.compile(r"^[ \t]*#\|.*$", re.MULTILINE)

LOST = """<section id="not-found">
<h1>Nothing stands at this address</h1>
<p>The page was moved, or never was. The table of contents beside this text
lists every chapter; the <a href="search.html">search</a> finds words and
names.</p>
<ul>
<li><a href="book/intro.html">The beginning</a></li>
<li><a href="book/glossary.html">The glossary</a></li>
<li><a href="book/api.html">The package</a></li>
</ul>
</section>"""

# A page for any address: what it loads is found from the site's root.
BASE = """<script>
if (location.protocol !== "file:") document.write('<base href="' +
  (location.pathname.startsWith("{root}") ? "{root}" : "/") + '">');
</script>
<noscript><base href="{root}"></noscript>
<meta name="robots" content="noindex">
"""


def base(url: str) -> str:
    "The element that says where the site's root is."
    return BASE.replace("{root}", urlsplit(url).path or "/")


def lost_page(app):
    "The page that a server shows for an address without one."
    yield "404", {"title": "Not found", "body": LOST}, "page.html"


def on_page(app, page, template, context, doctree):
    if page == "404":
        context["metatags"] = base(app.config.html_baseurl or "/") + context.get(
            "metatags", ""
        )


def blank_directives(code: str) -> str:
    "The source without nbdev's directives, every line where it was."
    return DIRECTIVE.sub("", code)


def find_source(app, module):
    "What the source pages show of a module, and where its names stand."
    if not module.startswith("tformer"):
        return None  # a value whose class is somebody else's
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.find_tags()
    return blank_directives(analyzer.code), analyzer.tags


def setup(app):
    app.connect("html-collect-pages", lost_page)
    app.connect("html-page-context", on_page, priority=800)
    app.connect("viewcode-find-source", find_source)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
