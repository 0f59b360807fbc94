"""Gather the takeaways page from the notebooks themselves.

Where the page says ``<!-- one line each -->``, every notebook gives the line
under its title. Where it says ``<!-- takeaways -->``, every notebook of the table of
contents gives its sections *What to remember* and *Questions you can now
answer*. Links between pages are rewritten to hold from where they now stand.
"""

from __future__ import annotations

from pathlib import Path

from course import Notebook, notebooks, relink, section

MARK = "<!-- takeaways -->"
LINES = "<!-- one line each -->"
SECTIONS = ("What to remember", "Questions you can now answer")


def takeaways(found: list[Notebook], root: str = "..") -> str:
    "Markdown of the page's body."
    out = []
    for nb in found:
        parts = [(name, section(nb.text, name)) for name in SECTIONS]
        parts = [(name, body) for name, body in parts if body]
        if parts:
            out.append(f"## [{nb.title}]({root}/nbs/{nb.name}.ipynb)")
        for name, body in parts:
            out += [f"### {name}", relink(body, f"{root}/{nb.folder}")]
    return "\n\n".join(out) or "No chapter has takeaways yet."


def one_line_each(found: list[Notebook], root: str = "..") -> str:
    "A list: each chapter, and the line under its title."
    return "\n".join(
        f"- [{nb.title}]({root}/nbs/{nb.name}.ipynb): "
        f"{relink(nb.summary, f'{root}/{nb.folder}')}"
        for nb in found
        if nb.summary
    )


def on_source_read(app, docname, content):
    if MARK not in content[0]:
        return
    root = Path(app.srcdir)
    found = notebooks(root)
    for nb in found:
        app.env.note_dependency(str(nb.path))
    app.env.note_dependency(str(root / "_toc.yml"))
    content[0] = (
        content[0].replace(MARK, takeaways(found)).replace(LINES, one_line_each(found))
    )


def setup(app):
    app.connect("source-read", on_source_read)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
