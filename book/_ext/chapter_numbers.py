"""Number the chapters of the book by the names of their files.

Sphinx counts the pages of a numbered table of contents, so a page that comes between
two others would give a new number to all that follow. A lesson has its number in its
name: `07_multi_head_attention` is chapter 7 wherever it stands, and `06b_feed_forward`
is 6b.
"""

from __future__ import annotations

from docutils import nodes
from sphinx_external_toc.collectors import TocTreeCollectorWithStyles

from course_map import number


def renumber(env) -> None:
    "Write the number of each chapter wherever Sphinx has put a count."
    for page, sections in env.toc_secnumbers.items():
        chapter = number(page)
        if not chapter:
            continue
        for anchor, counts in sections.items():
            if counts:
                sections[anchor] = (chapter, *counts[1:])
        for link in env.tocs[page].findall(nodes.reference):
            if link.get("secnumber"):
                link["secnumber"] = [chapter, *link["secnumber"][1:]]
        title = env.titles[page]
        if title.get("secnumber"):
            title["secnumber"] = [chapter, *title["secnumber"][1:]]


def setup(app):
    assign = TocTreeCollectorWithStyles.assign_section_numbers

    def assign_section_numbers(self, env):
        changed = assign(self, env)
        renumber(env)
        return changed

    if not hasattr(assign, "renumbers"):  # a process may build two books
        assign_section_numbers.renumbers = True
        TocTreeCollectorWithStyles.assign_section_numbers = assign_section_numbers
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
