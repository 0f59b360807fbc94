"""The book's own extensions, and what they promise of the pages."""
import importlib
import inspect
import json
import re
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "book" / "_ext"))

import api_page  # noqa: E402
import api_types  # noqa: E402
import course  # noqa: E402
import course_map  # noqa: E402
import lean_pages  # noqa: E402
import mend_pages  # noqa: E402
import nbdev_directives  # noqa: E402
import site_pages  # noqa: E402
import status_page  # noqa: E402
import takeaways  # noqa: E402

FOUND = course.notebooks(ROOT)
PAGES = sorted((ROOT / "book").glob("*.md"))
EVERY = [ROOT / "README.md", *PAGES, *(nb.path for nb in FOUND)]


def code(text, **metadata):
    return {"cell_type": "code", "source": text.splitlines(keepends=True),
            "metadata": metadata, "outputs": []}


def md(text):
    return {"cell_type": "markdown", "source": text, "metadata": {}}


def notebook(*cells):
    return json.dumps({"cells": list(cells), "metadata": {}})


SAMPLE = notebook(
    md("# A title\n\n> What it *does*, with {term}`key <k>`.\n\nText."),
    code("#| default_exp sample"),
    md("(s-one)=\n## One\n\ntext\n\n```text\n# not a heading\n```"),
    md("## What to remember\n\n(s-two)=\n- a [link](01_x.ipynb#y)\n"
       "- b [here](#s-one)\n\n### Deeper\n\nstill\n\n## Exercises"),
    md("```{exercise-start} Predict: x (5 minutes)\n:label: s-ex\n```"))


# --- course.py

def test_a_notebook_is_read():
    nb = course.read_notebook("nbs/07_sample.ipynb", SAMPLE)
    assert (nb.name, nb.title, nb.module) == ("07_sample", "A title",
                                              "sample")
    assert course.plain(nb.summary) == "What it does, with key."
    assert nb.labels == ["s-one", "s-two"]
    body = course.section(nb.text, "what to remember")
    assert body.startswith("- a") and body.endswith("still")
    assert "s-two" not in body and "Exercises" not in body
    assert course.section(nb.text, "not a heading") == ""


def test_the_order_is_that_of_the_table_of_contents(tmp_path):
    toc = {"root": "a", "parts": [
        {"chapters": [{"file": "b", "sections": [{"file": "c"}]}]},
        {"chapters": [{"file": "d"}]}]}
    assert list(course.files_in(toc)) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("comment, rst", [
    ('["<|end|>"] or *any*', r'["<\|end\|>"] or \*any\*'),
    ("the `a|b` of x_", r"the `a|b` of x\_"),
    ("d_model, (b, t)", "d_model, (b, t)"),
])
def test_comments_are_no_markup(comment, rst):
    assert course.as_rst(comment) == rst


# --- nbdev_directives.py

@pytest.mark.parametrize("line, tags", [
    ("#| hide", ["remove-cell"]),
    ("#|default_exp attend", ["remove-cell"]),
    ("#| export", ["exported"]),
    ("# | exporti", ["exported", "hide-input"]),
    ("#| echo: false", ["remove-input"]),
    ("#| echo: true", []),
    ("#| output: false", ["remove-output"]),
    ("#| code-fold: true", ["hide-input"]),
    ("#| code-fold: false", []),
    ("#| eval: false", []),
])
def test_a_directive_becomes_its_tags(line, tags):
    cell = code(f"{line}\nx = 1\n#| export\n")
    nbdev_directives.strip_cell(cell)
    assert cell["metadata"]["tags"] == tags
    assert cell["source"] == "x = 1\n#| export\n"   # only the head is cut


def test_tags_are_kept_and_not_doubled():
    cell = code("#| export\n#| code-fold: true\nx", tags=["exported", "own"])
    nbdev_directives.strip_cell(cell)
    assert cell["metadata"]["tags"] == ["exported", "own", "hide-input"]


def test_a_private_cell_can_be_shown():
    cell = code("#| exporti\n#| code-fold: false\nx")
    nbdev_directives.strip_cell(cell)
    assert cell["metadata"]["tags"] == ["exported"]


def test_a_cell_of_directives_alone_is_not_drawn():
    cell = code("#| export\n\n")
    nbdev_directives.strip_cell(cell)
    assert "remove-cell" in cell["metadata"]["tags"]


def test_no_directive_is_left_in_any_notebook():
    for nb in FOUND:
        text = nb.path.read_text(encoding="utf-8")
        for cell in json.loads(nbdev_directives.strip(text))["cells"]:
            if cell["cell_type"] == "code":
                first = course.source(cell).lstrip().splitlines()[:1]
                assert not first or not first[0].startswith("#|")


def test_exported_cells_name_their_module():
    body = ('<div class="cell docutils"><div class="cell_input docutils">'
            '</div></div><div class="cell tag_exported docutils"><details>'
            '<div class="cell_input docutils"></div></details></div>')
    marked = nbdev_directives.mark_module(body, "tformer.attend")
    assert marked.count('data-module="tformer.attend"') == 2
    assert marked.startswith('<div class="cell docutils"><div class="cell_'
                             'input docutils"></div>')
    assert nbdev_directives.mark_module("<p></p>", "tformer.x") == "<p></p>"


def test_the_summary_describes_the_page():
    env = SimpleNamespace(metadata={"nbs/a": {}},
                          doc2path=lambda name: f"{name}.ipynb")
    app, content = SimpleNamespace(env=env), [SAMPLE]
    nbdev_directives.on_source_read(app, "nbs/a", content)
    context = {"body": '<div class="cell tag_exported">', "meta": None}
    nbdev_directives.on_page(app, "nbs/a", "", context, None)
    assert context["meta"]["og:description"] == "What it does, with key."
    assert 'name="description"' in context["metatags"]
    assert 'data-module="tformer.sample"' in context["body"]


def test_thebe_is_left_out():
    def script(name, body=""):
        return SimpleNamespace(filename=name, attributes={"body": body})
    context = {"script_files": [
        script("_static/sphinx-thebe.js"), script("_static/theme.js"),
        script(None, "const THEBE_JS_URL = 1"), "plain.js"]}
    lean_pages.drop(None, "", "", context, None)
    assert [getattr(s, "filename", s) for s in context["script_files"]] == [
        "_static/theme.js", "plain.js"]


def test_mathjax_is_loaded_where_a_formula_stands():
    for body, kept in (('<span class="math notranslate">', 1), ("<p>", 0)):
        script = SimpleNamespace(filename="_static/mathjax/tex-chtml.js",
                                 attributes={})
        context = {"script_files": [script], "body": body}
        lean_pages.drop(None, "", "", context, None)
        assert len(context["script_files"]) == kept


# --- mend_pages.py, site_pages.py

FORMULA = r'<span class="math notranslate nohighlight">\(x\)</span>'


@pytest.mark.parametrize("before, after", [
    (FORMULA, FORMULA),
    (f"a {FORMULA}, b", f'a <span class="tf-joined">{FORMULA},</span> b'),
    (f"({FORMULA}) b", f'<span class="tf-joined">({FORMULA})</span> b'),
    (f"{FORMULA}-th.", f'<span class="tf-joined">{FORMULA}-th.</span>'),
    (f"{FORMULA} – b", f"{FORMULA} – b"),
])
def test_a_formula_keeps_its_punctuation(before, after):
    assert mend_pages.keep_together(before) == after


def test_a_figure_shown_twice_has_ids_of_its_own():
    svg = ('<svg aria-labelledby="f1-t f1-d"><title id="f1-t">f1-t</title>'
           '<use href="#p6" clip-path="url(#p6)" id="f1-d"/>'
           '<path id="p6"/></svg>')
    once, twice = mend_pages.part_figures(svg + svg).split("</svg>")[:2]
    assert once + "</svg>" == svg and ">f1-t<" in twice
    names = re.findall(r'id="([^"]+)"', twice)
    assert not set(names) & set(re.findall(r'id="([^"]+)"', once))
    assert set(re.findall(r"#([\w-]+)", twice)) <= set(names)
    assert re.search('labelledby="([^"]+)"', twice)[1].split() == [
        n for n in names if n.startswith("f1")]


def test_indices_are_lowered_in_words_alone():
    assert mend_pages.lower_indices("<a href='#W_O'>W_O</a> <code>W_O</code>"
                                    " in_W_x") == (
        "<a href='#W_O'><i>W</i><sub>O</sub></a> <code>W_O</code> in_W_x")


def test_directives_are_blanked_line_by_line():
    code = "#| export\n#| code-fold: true\nx = 1  # | y\n"
    assert site_pages.blank_directives(code) == "\n\nx = 1  # | y\n"
    assert 'href="/tformer/"' in site_pages.base("https://a.io/tformer/")


# --- takeaways.py

def test_links_hold_from_another_folder():
    assert takeaways.relink("[a](01_x.ipynb#y) [b](#c) [d](https://e.org) "
                            "![f](g.png)", "../nbs") == (
        "[a](../nbs/01_x.ipynb#y) [b](#c) [d](https://e.org) "
        "![f](../nbs/g.png)")


def test_takeaways_say_what_the_notebook_says():
    nb = course.read_notebook("nbs/07_sample.ipynb", SAMPLE)
    page = takeaways.takeaways([nb])
    assert "## [A title](../nbs/07_sample.ipynb)" in page
    assert "- b [here](#s-one)" in page and "## Exercises" not in page
    assert "Questions you can now answer" not in page      # it has none


def test_labels_are_one_of_a_kind():
    counts = Counter(label for nb in FOUND for label in nb.labels)
    assert not [label for label, n in counts.items() if n > 1]


@pytest.mark.parametrize("nb", FOUND, ids=lambda nb: nb.name)
def test_every_answer_leads_to_a_cell(nb):
    labels = {label for other in FOUND for label in other.labels}
    body = course.section(nb.text, "Questions you can now answer")
    answers = re.findall(r"\{question\} (.*?)\n(?:```|:::)", body, re.S)
    assert len(answers) >= 3
    for answer in answers:
        found = re.findall(r"\]\((?:[\w.]+\.ipynb)?#([\w-]+)\)", answer)
        assert found, f"no link: {answer[:60]}"
        assert set(found) <= labels, f"leads nowhere: {found}"


# --- status_page.py

RECORD = {"date": "2026-01-02", "device": "CPU", "python": "3.11.7",
          "versions": {"torch": "2.13.0"}, "notebooks": {
              "a": {"passed": True, "cells": 3, "seconds": 1.25},
              "b": {"passed": False, "cells": 4, "seconds": 2.0}}}


def books(*names):
    return [course.Notebook(path=ROOT / f"{n}.ipynb", title=n.upper())
            for n in names]


def test_the_status_page_shows_the_record():
    page = status_page.status(RECORD, books("a", "b", "c"))
    assert "1 of 3 notebooks passed on 2026-01-02, on the CPU, in 3 s" in page
    assert "| [A](../nbs/a.ipynb) | passed | 3 | 1.2 |" in page
    assert "| [B](../nbs/b.ipynb) | **failed** | 4 | 2.0 |" in page
    assert "| [C](../nbs/c.ipynb) | not recorded | – | – |" in page
    assert "| torch | 2.13.0 |" in page


def test_the_status_page_bears_what_is_missing(tmp_path):
    empty = status_page.load(tmp_path / "status.json")
    assert status_page.status(empty, books("a")) == status_page.EMPTY
    bare = {"notebooks": {"a": {"passed": True}}}
    assert "| passed | – | – |" in status_page.status(bare, books("a"))


# --- course_map.py

def test_the_plan_holds_every_notebook():
    plan = {ch["nb"]: ch for part in course_map.plan(ROOT)
            for ch in part["chapters"]}
    assert len(plan) == 47 and list(plan) == sorted(plan, key=lambda nb: (
        nb[0] == "A", int(re.search(r"\d+", nb)[0])))
    for nb in FOUND:
        assert plan[nb.name].get("module", "") == nb.module, nb.name


def test_the_readme_shows_the_plan():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert course_map.in_readme(ROOT) == text, \
        "python book/_ext/course_map.py"
    assert text.count("| done |") == len(FOUND)


def test_hours_are_the_sum_of_what_is_measured(tmp_path):
    path = tmp_path / "x.ipynb"
    path.write_text(notebook(
        md("word " * 1500 + "\n```{exercise} Build: x (25 minutes)\n```"),
        code("x = 1\n\n" * 120),
        code("#| code-fold: true\n" + "x = 1\n" * 500)), "utf-8")
    assert 45 <= course_map.minutes(course.Notebook(path=path)) < 46
    assert course_map.minutes(None) == course_map.TO_COME
    page = course_map.routes(ROOT, "../nbs")
    hours = [int(h) for h in re.findall(r"About (\d+) hours", page)]
    assert len(hours) == 3 and hours[2] == max(hours)
    assert hours[2] > hours[0] > 10


def test_the_table_states_the_rule_of_the_hours():
    text = " ".join((ROOT / "book/chapters.md").read_text("utf-8").split())
    assert (f"{course.WORDS} words and {course.LINES} lines of visible code"
            in text)
    assert course_map.TO_COME == 75 and "an hour and a quarter" in text


# --- api_page.py, api_types.py

def test_every_public_name_is_on_the_page():
    modules = api_page.modules(ROOT, FOUND)
    page = api_page.page(modules, FOUND)
    assert {m.name for m in modules} == {
        f"tformer.{p.stem}" for p in (ROOT / "tformer").glob("[a-z]*.py")}
    for m in modules:
        module = importlib.import_module(m.name)
        assert module.__all__, m.name
        for name in module.__all__:
            value = getattr(module, name)
            kind = ("class" if inspect.isclass(value) else
                    "function" if inspect.isroutine(value) else "data")
            line = f".. auto{kind}:: {m.name}.{name}\n"
            assert line in page + "\n", f"{m.name}.{name} ({kind})"


def test_a_public_name_that_is_not_there_is_refused(tmp_path):
    path = tmp_path / "x.py"
    path.write_text('__all__ = ["f", "g"]\ndef f(): pass\n')
    with pytest.raises(ValueError, match=r"\['g'\]"):
        api_page.read_module(path)


def test_constants_are_described_by_their_comments(tmp_path):
    path = tmp_path / "x.py"
    path.write_text('"Doc."\n__all__ = ["A", "B", "C"]\n'
                    "# all of\n# it\nA = 1\nB, C = 2, 3  # the rest\n"
                    "# %% ../nbs/01_x.ipynb\n_D = 4\n")
    module = api_page.read_module(path)
    assert [n.comment for n in module.names] == ["all of it", "the rest",
                                                 "the rest"]


def sample(
    x: int,  # how many
    y: int = 2,  # a|b
) -> int:  # their sum
    "Add."
    return x + y


def test_comments_of_parameters_become_fields():
    lines = ["Add."]
    api_types.add_docments(None, "function", "sample", sample, {}, lines)
    assert lines[2:5] == [":param x: how many", r":param y: a\|b",
                          ":returns: their sum"]
    own = ["Add.", "", ":param x: mine"]
    api_types.add_docments(None, "function", "sample", sample, {}, own)
    assert len(own) == 3
    doc = inspect.cleandoc(list.__doc__).splitlines()
    api_types.add_docments(None, "data", "names", ["a"], {}, doc)
    assert doc == []


def test_types_of_the_standard_library_have_addresses():
    assert api_types.python_page("collections.abc.Iterable") == (
        "https://docs.python.org/3/library/collections.abc.html"
        "#collections.abc.Iterable")
    assert api_types.python_page("numpy.ndarray") is None


# --- what the pages promise

def glossary():
    text = (ROOT / "book/glossary.md").read_text(encoding="utf-8")
    body = re.search(r"```\{glossary\}\n:sorted:\n(.*?)```", text, re.S)[1]
    entries = {}
    for block in body.strip().split("\n\n"):
        terms = [l for l in block.splitlines() if not l.startswith("  ")]
        meaning = [l for l in block.splitlines() if l.startswith("  ")]
        for term in terms:
            assert term.lower() not in entries, f"twice: {term}"
            entries[term.lower()] = " ".join(meaning)
    return entries


def test_the_glossary_is_short_and_complete():
    entries = glossary()
    assert len(entries) >= 60
    for term, meaning in entries.items():
        assert 3 <= len(meaning.split()) <= 45, term
        assert meaning.rstrip().endswith("."), term


@pytest.mark.parametrize("path", EVERY, ids=lambda p: p.name)
def test_terms_are_in_the_glossary(path):
    text = path.read_text(encoding="utf-8")
    used = re.findall(r"\{term\}`(?:[^`<]*<)?([^`<>]+?)>?`", text)
    assert not {t.lower() for t in used} - set(glossary())


def works():
    text = (ROOT / "book/references.bib").read_text(encoding="utf-8")
    found = re.findall(r"^@\w+\{([\w-]+),(.*?)^\}", text, re.S | re.M)
    assert len(found) == len(re.findall(r"^@", text, re.M))
    return found


def test_works_are_listed_once_and_completely():
    keys = Counter(k for k, _ in works())
    titles = Counter(
        re.sub(r"\W", "", re.search(r"\btitle\s*=\s*(.*)", b)[1]).lower()
        for _, b in works())
    assert not [k for k, n in (keys + titles).items() if n > 1]
    for key, body in works():
        for name in ("author", "title", "year"):
            assert re.search(rf"\b{name}\s*=\s*\S", body), f"{key}: {name}"
        year = re.search(r"\byear\s*=\s*\{?(\d{4})", body)[1]
        assert year in key, key


@pytest.mark.parametrize("path", EVERY, ids=lambda p: p.name)
def test_citations_are_in_the_bibliography(path):
    text = path.read_text(encoding="utf-8")
    used = {k.strip() for group in re.findall(r"\{cite[\w:]*\}`([^`]+)`", text)
            for k in group.split(",")}
    assert not used - {k for k, _ in works()}


def test_links_of_the_readme_lead_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / link).exists(), link


def test_the_code_of_the_readme_is_short():
    "What it prints is compared in test_package.py, from the wheel."
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(
        r"```python\n(.*?)```\n\n```text\n(.*?)```", text, re.S)
    assert len(found) == text.count("```python") == 3
    for code, _ in found:
        lines = [l for l in code.splitlines() if l.strip()]
        assert len(lines) <= 12 and max(map(len, lines)) <= 75


def test_the_citation_names_the_version():
    ini = (ROOT / "settings.ini").read_text(encoding="utf-8")
    version = re.search(r"^version = (\S+)$", ini, re.M)[1]
    cff = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in cff
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_sources_of_others_are_not_looked_for():
    assert site_pages.find_source(None, "_struct") is None
    text, names = site_pages.find_source(None, "tformer.attend")
    assert "def attend" in text and "attend" in names
