"""Mend the HTML that Sphinx and its extensions write.

Every id stands once on a page; lists and signatures are what their roles say;
a formula stays with the punctuation behind it; *W_O* in a heading is a letter
with an index. All of it works on the finished body of a page, so that it holds
for every page, whatever wrote it.
"""

from __future__ import annotations

import re
from itertools import count

CONTENT_ID = re.compile(r'<section id="((?:exercise|solution)-content)"')
SVG = re.compile(r"<svg\b.*?</svg>", re.S)
ID = re.compile(r'\bid="([^"]+)"')
TAG = re.compile(r"<[^>]+>")
SIGNATURE = re.compile(r'<dt class="sig .*?</dt>', re.S)
EMPTY_HEAD = re.compile(
    r"<thead>(?:\s|</?tr[^>]*>|<th[^>]*>\s*"
    r"(?:<p>\s*</p>)?\s*</th>)*</thead>"
)
EXERCISE = re.compile(
    r'(<p class="admonition-title"><span class="caption-number">)'
    r"(Exercise [\w.]+) </span> \((.*?) \((\d+ minutes?)\)\)</p>"
)
SOLUTION = re.compile(
    r'(<p class="admonition-title">Solution to)(<a [^>]*>)'
    r" (Exercise [\w.]+) .*?</a></p>"
)
FORMULA = re.compile(
    r'([(\[“‘]*)(<span class="math notranslate nohighlight">[^<]*</span>)'
    r"([.,;:!?)\]”’…]*(?:[-‑–][\w-]+[.,;:!?)\]”’]*)?)"
)
HEADING = re.compile(r"<h[1-6]\b.*?</h[1-6]>", re.S)
INDEX = re.compile(r"\b([A-Z])_([A-Za-z0-9])\b")
CODE_OR_TAG = re.compile(
    r"(<code\b.*?</code>|<span class=\"math.*?</span>"
    r"|<[^>]*>)",
    re.S,
)


def drop_content_ids(body: str) -> str:
    "An exercise's body needs no name; all had the same one."
    return CONTENT_ID.sub(r'<section class="\1"', body)


def part_figures(body: str) -> str:
    "A figure shown a second time gets ids of its own."
    seen = set()
    number = count(2)

    def own(match: re.Match) -> str:
        names = set(ID.findall(match[0]))
        again = names & seen
        suffix = f"-n{next(number)}"
        seen.update(names)
        if not again:
            return match[0]
        known = re.compile(
            r"(?<=[\"#\s])(?:{})(?=[\"\s)])".format(
                "|".join(map(re.escape, sorted(again)))
            )
        )
        return TAG.sub(
            lambda tag: known.sub(lambda name: name[0] + suffix, tag[0]), match[0]
        )

    return SVG.sub(own, body)


def mend_roles(body: str) -> str:
    "Lists hold list items, and a signature of several lines is no list."
    body = body.replace('role="doc-biblioentry"', 'role="listitem"')
    body = body.replace('<summary aria-label="Toggle hidden content">', "<summary>")
    body = EMPTY_HEAD.sub("", body)

    def lines(match: re.Match) -> str:
        out = match[0].replace("<dl>", '<div class="sig-lines">')
        out = out.replace("</dl>", "</div>")
        return out.replace("<dd>", "<div>").replace("</dd>", "</div>")

    return SIGNATURE.sub(lines, body)


def title_once(body: str) -> str:
    "An exercise's title without brackets, and a solution that names its number alone."
    body = EXERCISE.sub(r'\1\2</span> \3 <span class="tf-minutes">\4</span></p>', body)
    return SOLUTION.sub(r"\1 \2\3</a></p>", body)


def keep_together(body: str) -> str:
    "No line begins with the comma behind a formula."

    def join(match: re.Match) -> str:
        before, formula, after = match.groups()
        if not before and not after:
            return formula
        return f'<span class="tf-joined">{before}{formula}{after}</span>'

    return FORMULA.sub(join, body)


def lower_indices(html: str) -> str:
    "W_O in running text as a letter with an index; code stays as it is."
    parts = CODE_OR_TAG.split(html)
    parts[::2] = [INDEX.sub(r"<i>\1</i><sub>\2</sub>", p) for p in parts[::2]]
    return "".join(parts)


def mend(body: str) -> str:
    body = part_figures(drop_content_ids(body))
    body = keep_together(title_once(mend_roles(body)))
    return HEADING.sub(lambda m: lower_indices(m[0]), body)


def on_page(app, page, template, context, doctree):
    if context.get("body"):
        context["body"] = mend(context["body"])


def on_contents(app, page, template, context, doctree):
    "The contents of the page, before the theme has drawn them."
    if context.get("toc"):
        context["toc"] = lower_indices(context["toc"])


def setup(app):
    app.connect("html-page-context", on_contents, priority=100)
    app.connect("html-page-context", on_page, priority=850)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
