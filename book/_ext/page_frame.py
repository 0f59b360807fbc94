"""What stands around the text of every page: the sidebar, the head and the foot.

The sidebar lists the lessons; other parts fold to a line each, and the one in which the
page stands is open. A page without a description takes its first paragraph. The foot
says which version of the book this is, and of which day.
"""

from __future__ import annotations

import html
import re
import subprocess
from configparser import ConfigParser
from pathlib import Path

FOLDED = {"Appendices", "The package", "Reference"}
PART = re.compile(r'(?=<p aria-level="2" class="caption")')
CAPTION = re.compile(
    r'<p aria-level="2" class="caption"[^>]*>(<span.*?>(.*?)</span>)</p>'
)
CAPTION_P = '<p class="caption">'
TERM = re.compile(r'<dt id="(term-[^"]+)">(?:<[^>]+>)*([^<])')
PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.S)
TAG = re.compile(r"<[^>]+>")
LONGEST = 200  # letters of a description


def fold_parts(sidebar: str) -> str:
    "Fold the parts of a sidebar that hold no lessons."
    pieces = []
    for piece in PART.split(sidebar):
        caption = CAPTION.match(piece)
        if caption and caption[2] in FOLDED:
            opened = " open" if re.search(r'class="[^"]*\bcurrent\b', piece) else ""
            rest = piece[caption.end() :]
            end = rest.rindex("</ul>") + len("</ul>")
            piece = (
                f'<details class="tf-part"{opened}><summary class="caption">'
                f"{caption[1]}</summary>{rest[:end]}</details>{rest[end:]}"
            )
        pieces.append(piece)
    return "".join(pieces)


def no_headings(sidebar: str) -> str:
    "Let the captions of a sidebar be no headings: they would come before the title."
    return sidebar.replace(
        '<p aria-level="2" class="caption" role="heading">', CAPTION_P
    )


def with_letters(body: str) -> str:
    "Put links to the first term of each letter below the title of the glossary."
    firsts: dict[str, str] = {}
    for name, term in TERM.findall(body):
        letter = term[0].upper()
        if letter.isascii() and letter.isalpha():
            firsts.setdefault(letter, name)
    links = " ".join(
        f'<a href="#{name}">{letter}</a>' for letter, name in sorted(firsts.items())
    )
    strip = f'<nav class="tf-letters" aria-label="Letters">{links}</nav>'
    return body.replace("</h1>", f"</h1>\n{strip}", 1)


def first_paragraph(body: str) -> str:
    "Return the first sentences of a page, as plain text, or nothing."
    for paragraph in PARAGRAPH.findall(body):
        text = " ".join(html.unescape(TAG.sub("", paragraph)).split())
        if len(text) > 40 and text[-1] in ".:?!":
            if len(text) > LONGEST:
                text = text[:LONGEST].rsplit(" ", 1)[0] + " …"
            return text
    return ""


def on_page(app, page, template, context, doctree):
    listed = context.get("generate_toctree_html")
    if listed:
        context["generate_toctree_html"] = lambda *args, **named: no_headings(
            fold_parts(str(listed(*args, **named)))
        )
    if page == "book/glossary":
        context["body"] = with_letters(context["body"])
    if 'name="description"' not in context.get("metatags", ""):
        text = first_paragraph(context.get("body") or "")
        if text:
            context["metatags"] = (
                f'<meta name="description" content="{html.escape(text)}" />\n'
                + context.get("metatags", "")
            )


def last_change(root: Path) -> str:
    "Return the day of the last commit, or nothing where there is none."
    command = ["git", "log", "-1", "--format=%cs"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def say_version(app, config):
    "Write version and day into the foot of all pages."
    settings = ConfigParser(delimiters=("=",))
    settings.read(Path(app.srcdir) / "settings.ini", encoding="utf-8")
    words = [f"Version {settings['DEFAULT']['version']}", last_change(Path(app.srcdir))]
    foot = f"<p>{', '.join(word for word in words if word)}</p>"
    config.html_theme_options = {**config.html_theme_options, "extra_footer": foot}


def setup(app):
    app.connect("config-inited", say_version)
    app.connect("html-page-context", on_page, priority=870)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
