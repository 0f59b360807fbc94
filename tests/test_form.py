"""The form of a chapter: folds, captions, predictions, ✓ and measure."""

import builtins
import dis
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import CodeType, SimpleNamespace

import pytest
from docutils import nodes
from IPython.core.inputtransformer2 import TransformerManager

from conftest import ROOT

sys.path.insert(0, str(ROOT / "book" / "_ext"))

import code_changes
import course
import course_form
import course_map
import nbdev_directives

spec = importlib.util.spec_from_file_location("verify", ROOT / "book" / "verify.py")
verify = importlib.util.module_from_spec(spec)
spec.loader.exec_module(verify)

# not yet rewritten to the measure of a chapter; this list only shrinks
TO_BE_REWRITTEN = {
    "02_bytes_and_bpe",
    "03_tokenizer",
    "08_is_it_right",
    "09_encoder_decoder",
    "10_pytorch_transformer",
    "11_bert",
    "12_gpt",
    "13_modern_decoder",
    "14_costs",
    "17_training",
}
NAMES = course.document_names(ROOT)
CHAPTERS = [name for name in NAMES if name[0].isdigit()]
# lessons whose open cells run after nothing but the setup
OPEN = [name for name in NAMES if course_form.is_open(course_form.entry(ROOT, name))]
WORDS = 4000
# of code in sight, as ruff lays it out; as many may be folded, and a third more: each
# assignment has a line of its own, names are written out, and drawings have many
LINES = 470
FOLDED = 1.3
WORDS_A_FIGURE = 600
every = pytest.mark.parametrize("name", NAMES)
chapter = pytest.mark.parametrize("name", CHAPTERS)
open_lesson = pytest.mark.parametrize("name", OPEN)


def cells_of(name):
    path = course.notebook_path(ROOT, name)
    return json.loads(path.read_text("utf-8"))["cells"]


# --- what a notebook says


def unlabeled(cells):
    "First lines of folds that do not say what is in them."
    return [
        c.source[:50]
        for c in course.code_cells(cells)
        if (
            (c.shown == "folded" and c.place == "")
            or c.has("code-fold")
            or (
                "exporti" in c.directives
                and c.place != "solution"
                and c.shown == "folded"
            )
        )
        and not c.directives.get("code-summary")
        and c.directives.get("setup", "true") == "true"
    ]


def without_caption(cells):
    "Drawings that stand in no plate, and plates with an empty caption."
    found = []
    for c in course.code_cells(cells):
        bare = re.sub(
            r'(?s)<figure class="tf-plate.*?</figure>|'
            r'<div class="tf-stepper".*?tf-caption">[^<]+<',
            "",
            c.html,
        )
        if (
            "<svg" in bare
            or re.search(r'tf-caption">\s*<', c.html)
            or ("tf-plate" in c.html and "tf-caption" not in c.html)
        ):
            found.append(c.source[-60:])
    return found


def unquoted(text):
    "Markdown without the source of other markdown that it shows."
    return re.sub(r"(?ms)^````text\n.*?^````$", "", text)


def bad_predictions(cells):
    "Predict boxes without an output and a folded answer after it."
    found = []
    for i, cell in enumerate(cells):
        if cell["cell_type"] != "markdown":
            continue
        text = unquoted(course.source(cell))
        for m in re.finditer(
            r"\{predict\}[^\n]*\n(.*?)\n\s*`{3,}|"
            r"\{predict\}[^\n]*\n(.*?)\n\s*:{3,}",
            text,
            re.S,
        ):
            box = m[1] or m[2]
            asked = box.strip()[:50]
            answer = re.search(r"^:answer: (\d+)$", box, re.M)
            options = len(re.findall(r"^- ", box, re.M))
            if answer and not (
                course_form.MIN_OPTIONS <= options <= course_form.MAX_OPTIONS
                and 1 <= int(answer[1]) <= options
            ):
                found.append(f"{asked}: {options} options, answer {answer[1]}")
                continue
            if text[m.end() :].strip(" `:\n"):
                found.append(f"{asked}: text between it and the output")
                continue
            found += [
                f"{asked}: {problem}"
                for problem in [after_prediction(cells[i + 1 :])]
                if problem
            ]
    return found


def after_prediction(cells):
    "What is wrong between a Predict box and its answer; None: nothing."
    shown = False
    for cell in cells:
        if cell["cell_type"] == "markdown":
            text = course.source(cell).lstrip()
            if not re.match(
                r"[`:]{3,}\{answer\}[^\n]*\n"
                r"\s*(?![`:]{3})\S",
                text,
            ):
                return "no answer follows the output"
            return None if shown else "no output before the answer"
        said, code = course.directives(course.source(cell))
        if {"hide", "verified"} & {*said}:
            return "a hidden cell before the answer"
        if re.search(r"^\s*assert\b", code, re.M):
            return "an assert before the answer"
        shown = shown or (
            bool(cell.get("outputs")) and said.get("output", "") != "false"
        )
    return "no answer"


@every
def test_every_fold_says_what_is_in_it(name):
    assert not unlabeled(cells_of(name))


@every
def test_every_figure_has_a_caption(name):
    assert not without_caption(cells_of(name))


@every
def test_a_prediction_is_followed_by_output_and_answer(name):
    assert not bad_predictions(cells_of(name))


@chapter
def test_a_chapter_keeps_the_measure(name):
    found = course.measure(course.notebook_path(ROOT, name))
    kept = (
        found.words <= WORDS
        and found.visible <= LINES
        and found.folded <= FOLDED * found.visible
        and found.figures * WORDS_A_FIGURE >= found.words
    )
    if name in TO_BE_REWRITTEN:
        assert not kept, "take it off the list: it keeps the measure now"
    else:
        assert kept, found


@chapter
def test_a_rewritten_chapter_has_its_parts(name):
    if name in TO_BE_REWRITTEN:
        pytest.skip("not yet rewritten")
    path = course.notebook_path(ROOT, name)
    text = course.read_notebook(path).text
    assert "{predict}" in text and "{answer}" in text, "no prediction"
    questions = course.section(text, "Questions you can now answer")
    assert len(re.findall(r"\{question\} \S", questions)) >= 3, (
        "fewer than three {question} boxes under Questions you can now answer"
    )
    assert not re.search(r"^\*\*.*\?\*\*", questions, re.M)
    for title in ("What to remember", "Exercises", "Further reading"):
        assert course.section(text, title), title
    assert re.search(r"how this goes wrong", text, re.I), "no How this goes wrong"
    assert len(course.measure(path).claims) >= 3, "fewer than three ✓"


# --- the open form


def open_code(cells):
    "The setup and the open cells of a lesson, in the order of the page."
    return [
        cell
        for cell in course.code_cells(cells)
        if cell.has("setup") or (cell.shown == "visible" and not cell.place)
    ]


def faults_of_form(cells):
    "What the open form does not allow."
    code = [c for c in course.code_cells(cells) if c.shown != "removed"]
    setups = [c for c in code if c.has("setup")]
    faults = []
    if len(setups) != 1 or code[0] is not setups[0]:
        faults.append("one setup, before all other code")
    faults += [
        f"a fold that is no part of a lesson: {c.source[:40]!r}"
        for c in code
        if c.shown == "folded" and not c.place and not c.has("setup")
    ]
    prose = "\n\n".join(course.source(c) for c in cells if c["cell_type"] == "markdown")
    prose = unquoted(prose)
    faults += [
        f"{{{name}}} is {{more}} here"
        for name in re.findall(r"\{(closer|solution)(?:-start)?\}", prose)
    ]
    for box in re.findall(r"(?ms)^[`:]{3,}\{predict\}.*?^[`:]{3,}$", prose):
        if ":answer:" not in box:
            faults.append(f"a prediction without options: {box[:60]!r}")
    for exercise in re.split(r"\{exercise-start\} ", prose)[1:]:
        if not re.search(r"\{more(-start)?\} Solution", exercise):
            title = exercise.partition("\n")[0]
            faults.append(f"no {{more}} Solution after the exercise {title!r}")
    return faults


def code_alone(cells):
    "Return the open code of a lesson as one text."
    return "\n".join(f"# cell {cell.index}\n{cell.source}" for cell in open_code(cells))


def run_alone(cells, folder):
    "Run the open code in a new process; return its error output, or nothing."
    script = folder / "open_cells.py"
    script.write_text(code_alone(cells), encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "IPython",
            "--no-banner",
            "--colors=nocolor",
            str(script),
        ],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def undefined_names(lessons, folder):
    "Return what ruff says of names that the open code of lessons does not define."
    for name, cells in lessons.items():
        code = course.MAGIC.sub(r"\1pass", code_alone(cells))
        (folder / f"{name}.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [
            Path(sys.executable).parent / "ruff",
            "check",
            "--isolated",
            "--no-cache",
            "--select=F821",
            "--config=builtins=['display', 'get_ipython']",
            "--output-format=concise",
            folder,
        ],
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return [line for line in done.stdout.splitlines() if ": F821 " in line]


def test_open_cells_use_only_names_of_the_setup_and_of_open_cells(tmp_path):
    found = undefined_names({name: cells_of(name) for name in OPEN}, tmp_path)
    assert not found, "\n".join(found)


@pytest.mark.nightly
@open_lesson
def test_open_cells_run_after_nothing_but_the_setup(name, tmp_path):
    error = run_alone(cells_of(name), tmp_path)
    assert not error, (
        "an open cell fails where only the setup and the open cells "
        f"before it have run:\n{error[-2000:]}"
    )


@open_lesson
def test_a_lesson_of_the_open_form_has_three_folds_and_a_setup(name):
    assert not faults_of_form(cells_of(name))


def test_open_lessons_have_a_strip():
    assert "parts_of_a_lesson" in OPEN
    for name in OPEN:
        text = course.notebook_path(ROOT, name).read_text(encoding="utf-8")
        made = json.loads(
            course_form.with_head(ROOT, course.notebook_path(ROOT, name), text)
        )["cells"]
        drawn = "".join(map(course.source, made))
        assert drawn.count('class="tf-strip"') == 1, f"{name}: lit in book/chapters.yml"
        assert "tf-machine" not in drawn
    with pytest.raises(course_form.ExtensionError, match=r"names antenna; .* cache, "):
        course_form.strip(["attention", "antenna"], ())
    with pytest.raises(course_form.ExtensionError, match="24_x has the form 'closed'"):
        course_form.is_open({"nb": "24_x", "form": "closed"})


# Names that cells of a lesson use and that no cell which its page shows has defined.
# The list only shrinks.
NOT_SHOWN = {
    "16_objectives_and_optimizers": ["plot", "raw"],
    "17_training": ["batch", "news", "np"],
    "18_translation": [
        "easy",
        "five",
        "five_right",
        "joint",
        "news",
        "plain",
        "runs",
        "translator",
        "whole",
    ],
    "19_masked_language_model": [
        "BertConfig",
        "BertMaskedLM",
        "BertTagger",
        "align_labels",
        "at",
        "bert",
        "copy",
        "encode_texts",
        "hidden",
        "init_weights",
        "load_bundle",
        "new",
        "partial",
        "read",
        "share_of",
        "show",
        "span_scores",
        "spans_to_bio",
        "tag_story",
        "tokenizer",
        "train_model",
        "transformers",
    ],
    "20_sampling": ["shares", "told", "valid", "write_all"],
    "26_sliding_window": ["check_cache", "check_sinks"],
    "27_sparse_attention": ["check_leaky", "check_mean", "our_change", "their_change"],
    "28_variants_compared": ["check_kept", "check_slow"],
}
# what Python and IPython define; names such as __file__ come on top
GIVEN = {*dir(builtins), "display", "get_ipython"}
# before Python 3.12 they are functions, which are called where they stand
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
lesson = pytest.mark.parametrize("name", [*CHAPTERS, "A0_tensors"])


def bound_and_used(source):
    """Names that a cell binds, those that it uses, and those that its functions use.

    They are read off the compiled code. A function runs when it is called, so its
    names may be bound in a later cell.
    """
    bound = set()
    used = set()
    used_in_functions = set()

    def read(code, in_function):
        of_class = set()
        for step in dis.get_instructions(code):
            value = step.argval
            if str(value).startswith("__"):
                continue
            if isinstance(value, CodeType):
                is_function = value.co_flags & inspect.CO_OPTIMIZED
                is_called = is_function and value.co_name not in COMPREHENSIONS
                read(value, in_function or is_called)
            elif step.opname == "STORE_NAME" and code.co_name != "<module>":
                of_class.add(value)
            elif step.opname in ("STORE_NAME", "STORE_GLOBAL"):
                bound.add(value)
            elif step.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
                if in_function:
                    used_in_functions.add(value)
                elif value not in bound | of_class:
                    used.add(value)

    python = TransformerManager().transform_cell(source)
    read(compile(python, "a cell", "exec", dont_inherit=True), False)
    return bound, used, used_in_functions


def not_shown(cells):
    """Names that the shown cells of a lesson use and do not define, folds included.

    A name is missing as well if a hidden cell was the last to bind it.
    """
    missing = set()
    in_functions = set()
    shown = {}  # for each name, whether the page shows the last cell that bound it
    ever_shown = set()
    for cell in course.code_cells(cells):
        bound, used, later = bound_and_used(cell.source)
        if cell.shown == "removed":
            shown |= dict.fromkeys(bound, False)
            continue
        missing |= {name for name in used - GIVEN if not shown.get(name)}
        in_functions |= later - GIVEN
        shown |= dict.fromkeys(bound, True)
        ever_shown |= bound
    return missing | in_functions - ever_shown


@lesson
def test_shown_cells_define_the_names_that_they_use(name):
    assert sorted(not_shown(cells_of(name))) == sorted(NOT_SHOWN.get(name, ())), (
        "cells that the page shows use names that only hidden cells define; import "
        "them in the setup, or take those that are defined now off NOT_SHOWN"
    )


# --- ✓ and its record


@every
def test_every_notebook_proves_something(name):
    assert course.measure(course.notebook_path(ROOT, name)).claims, "no ✓"


@every
def test_every_claim_has_been_seen_red(name):
    cells = [c for c in verify.cells_of(name) if c.claim]
    first = [change["claim"] for change in verify.changes(name, nouns=False)]
    assert sorted(first) == sorted({c.claim for c in cells})
    assert len(first) == len(cells)
    for cell in cells:
        assert len(cell.claim) <= 90 and "assert" in cell.source
    record = json.loads(verify.RECORD.read_text("utf-8")).get(name, {})
    assert {*record} == {*first}
    assert {
        claim: {*seen.get("nouns", ())}
        for claim, seen in record.items()
        if "nouns" in seen
    } == nouns_of(name)
    for change in verify.changes(name):
        claim = change["claim"]
        said = f"{claim} ({change['noun']})" if "noun" in change else claim
        module, qualname = code_changes.split_where(change["where"], ROOT / "tformer")
        code_changes.apply(
            module.read_text("utf-8"), qualname, verify.code_change(change)
        )
        seen = record[claim]
        if "noun" in change:
            seen = seen["nouns"][change["noun"]]
        assert seen["key"] == verify.key(verify.cells_of(name), claim, change), (
            f"{said}: edited since; python book/verify.py {name}"
        )
        assert seen["error"] == "AssertionError", said


def nouns_of(name):
    "The nouns that further changes break, for each claim; each stands there once."
    found = {}
    previous = None
    for change in verify.changes(name):
        if "noun" in change:
            assert change["claim"] == previous, f"{change}: not behind its claim"
            nouns = found.setdefault(previous, set())
            assert change["noun"] not in nouns, f"{change['noun']}: twice"
            nouns.add(change["noun"])
        previous = change["claim"]
    return found


def test_changes_and_records_belong_to_a_notebook():
    assert {*verify.noted()} <= {*NAMES}
    assert {*json.loads(verify.RECORD.read_text("utf-8"))} <= {*NAMES}


def test_the_changes_of_nouns_are_made_apart(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verify, "CHANGES", tmp_path)
    monkeypatch.setattr(verify, "RECORD", tmp_path / "verified.json")
    (tmp_path / "07_a.yml").write_text(
        "- {claim: all}\n- {claim: all, noun: tea}\n- {claim: all, noun: milk}\n"
        "- {claim: none}\n",
        "utf-8",
    )
    seen = []

    def replay_one(name, change, runner):
        seen.append(change.get("noun", change["claim"]))
        return {
            "noun": None,
            "key": seen[-1],
            "red": "milk" not in seen[-1:],
            "failed": [0, "E"],
            **change,
        }

    monkeypatch.setattr(verify, "replay_one", replay_one)
    assert verify.main(["07_a", "--check"]) == 0 and {*seen} == {"all", "none"}
    seen.clear()
    assert verify.main(["07_a", "--check", "--nouns"]) == 1
    assert {*seen} == {"tea", "milk"} and not verify.RECORD.exists()
    assert "NOT RED 07_a all (milk)" in capsys.readouterr().out
    seen.clear()
    assert verify.main(["07_a", "--check", "--until", "0"]) == 0 and not seen
    assert "2 changes were left out" in capsys.readouterr().out
    assert verify.main(["07_a", "--check", "--until", f"{time.time() + 99}"]) == 0
    assert {*seen} == {"all", "none"} and "left out" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        verify.main(["07_a", "--until", "0"])
    assert verify.main(["07_a"]) == 1
    assert json.loads(verify.RECORD.read_text("utf-8")) == {
        "07_a": {
            "all": {
                "key": "all",
                "error": "E",
                "nouns": {"tea": {"key": "tea", "error": "E"}},
            },
            "none": {"key": "none", "error": "E"},
        }
    }
    with pytest.raises(SystemExit):
        verify.main(["07_a", "--nouns"])
    assert nouns_of("07_a") == {"all": {"tea", "milk"}}
    (tmp_path / "07_a.yml").write_text(
        "- {claim: all}\n- {claim: none}\n- {claim: all, noun: tea}\n", "utf-8"
    )
    with pytest.raises(AssertionError, match="not behind its claim"):
        nouns_of("07_a")


@pytest.mark.nightly
def test_each_run_of_cells_begins_anew(tmp_path):
    (tmp_path / "tformer").mkdir()
    (tmp_path / "tformer" / "__init__.py").write_text("made_here = True", "utf-8")
    here = "import tformer; assert tformer.made_here"
    with verify.Runner() as runner:

        def first_failure(*cells):
            return runner.first_failure(str(tmp_path), [*enumerate(cells)])

        assert first_failure("x = 1", here, "x / 0", "y") == [2, "ZeroDivisionError"]
        assert first_failure("", "x") == [1, "NameError"]
        assert first_failure("1 +") == [0, "SyntaxError"]
        assert first_failure("assert x == 1") == [0, "NameError"]
        assert first_failure(here) is None
        with pytest.raises(RuntimeError, match=r"not run to an end.*status 768"):
            first_failure("import os; os._exit(3)")
        with pytest.raises(RuntimeError, match="took the package from"):
            first_failure(
                f"import sys; sys.path.insert(0, {str(ROOT)!r})", "import tformer"
            )
        assert first_failure(here) is None


# --- the tests above can fail


def code(text, html=None, out=False):
    outputs = [{"data": {"text/html": html}}] if html else []
    return {
        "cell_type": "code",
        "source": text,
        "metadata": {},
        "outputs": outputs or ([{"text": "1"}] if out else []),
    }


def md(text):
    return {"cell_type": "markdown", "source": text, "metadata": {}}


ASKED = md("```{predict}\nWhat?\n```")
TOLD = md("```{answer}\nThat.\n```")


def options(n, answer):
    "A Predict box with so many options."
    lines = "".join(f"- option {i}\n" for i in range(n))
    return md(f"```{{predict}}\n:answer: {answer}\nWhich?\n{lines}```")


@pytest.mark.parametrize(
    "cells, problems",
    [
        ([ASKED, code("f()", out=True), TOLD], 0),
        ([ASKED, code("f()"), code("g()", out=True), TOLD], 0),
        ([ASKED, TOLD], 1),
        ([ASKED, code("f()"), TOLD], 1),
        ([ASKED, code("assert f()", out=True), TOLD], 1),
        ([ASKED, code("#| hide\nf()", out=True), TOLD], 1),
        ([ASKED, code("f()", out=True), md("It is that.")], 1),
        ([ASKED, code("f()", out=True)], 1),
        ([ASKED, code("#| output: false\nf()", out=True), TOLD], 1),
        ([ASKED, code("f()", out=True), md("```{answer}\n```")], 1),
        ([md("```{predict}\nWhat?\n```\nIt is that."), code("f()", out=True), TOLD], 1),
        ([options(2, 2), code("f()", out=True), TOLD], 0),
        ([options(4, 1), code("f()", out=True), TOLD], 0),
        ([options(5, 3), code("f()", out=True), TOLD], 1),
        ([options(1, 1), code("f()", out=True), TOLD], 1),
        ([options(3, 4), code("f()", out=True), TOLD], 1),
    ],
)
def test_predictions_are_looked_at(cells, problems):
    assert len(bad_predictions(cells)) == problems


@pytest.mark.parametrize(
    "text, problems",
    [
        ("#| code-fold: true\nx = 1", 1),
        ("#| code-fold: true\n#| code-summary: a name\nx = 1", 0),
        ("#| exporti\ndef _f(): pass", 1),
        ("#| exporti\n#| code-fold: false\ndef _f(): pass", 0),
        ("#| verified: a claim\nassert x", 0),
        ("#| hide\nx = 1", 0),
        ("x = 1", 0),
    ],
)
def test_folds_are_looked_at(text, problems):
    assert len(unlabeled([code(text)])) == problems


@pytest.mark.parametrize(
    "html, problems",
    [
        (
            '<figure class="tf-plate"><svg></svg><figcaption '
            'class="tf-caption">One sees it.</figcaption></figure>',
            0,
        ),
        (
            '<figure class="tf-plate"><svg></svg><figcaption '
            'class="tf-caption"> </figcaption></figure>',
            1,
        ),
        ('<svg class="tf-figure"></svg>', 1),
        ('<figure class="tf-plate"><svg></svg></figure>', 1),
        ("<table></table>", 0),
    ],
)
def test_captions_are_looked_at(html, problems):
    assert len(without_caption([code("f()", html)])) == problems


def test_a_chapter_is_measured():
    text = json.dumps(
        {
            "cells": [
                md(
                    "(a)=\n# One two\n\n[three](x.ipynb#y) four\n\n"
                    "```{closer} Five\nsix\n```\n"
                    "```{exercise-start} Seven (5 minutes)\n:label: x\n```"
                ),
                code("x = 1\n\ny = 2"),
                code("#| hide\nz = 3"),
                code("#| verified: so it is\nassert x", "<svg>"),
                code("#| exporti\ndef _f():\n    pass", '<figure class="tf-plate">'),
                md("```{solution-start} x\n```"),
                code("w = 1"),
                md("```{solution-end}\n```"),
                code("#| echo: false\nv = 1"),
            ]
        }
    )
    found = course.measure(ROOT / "x.ipynb", text)
    assert found == course.Measure(
        words=5, visible=2, folded=2, figures=1, claims=["so it is"], exercises=5
    )


SETUP = code("#| setup: imports\nimport math")
SOLVED = (
    "```{exercise-start} Build: x (2 minutes)\n```\nx\n```{exercise-end}\n```\n"
    "```{more} Solution\ny\n```"
)


@pytest.mark.parametrize(
    "cells, problems",
    [
        ([SETUP, code("math.e"), md(SOLVED)], 0),
        ([code("math.e"), SETUP], 1),
        ([code("math.e")], 1),
        ([SETUP, SETUP], 1),
        ([SETUP, code("#| code-fold: true\n#| code-summary: x\nf()")], 1),
        ([SETUP, code("#| verified: x\nassert f()"), code("#| hide\nf()")], 0),
        ([SETUP, md("```{closer} x\ny\n```")], 1),
        ([SETUP, md("````text\n```{closer} x\ny\n```\n````")], 0),
        ([SETUP, md("```{predict}\nx\n- a\n- b\n```")], 1),
        ([SETUP, md("```{predict}\n:answer: 1\nx\n- a\n- b\n```")], 0),
        ([SETUP, md(SOLVED.replace("Solution", "History"))], 1),
        ([SETUP, md(SOLVED + "\n" + SOLVED.partition("```{more}")[0])], 1),
    ],
)
def test_the_open_form_is_looked_at(cells, problems):
    assert len(faults_of_form(cells)) == problems, faults_of_form(cells)


FOLDED_NAME = [
    SETUP,
    md("```{more-start} y\n```"),
    code("x = 1"),
    md("```{more-end}\n```"),
    code("print(x)"),
]


@pytest.mark.parametrize(
    "cells, is_missed",
    [
        ([SETUP, code("x = math.e"), code("%matplotlib inline\nprint(x)")], False),
        (FOLDED_NAME, True),
        ([SETUP, code("#| echo: false\nx = 1"), code("print(x)")], True),
        ([SETUP, code("#| verified: x\nx = 1"), code("print(x)")], True),
    ],
)
def test_a_name_from_a_fold_is_missed(cells, is_missed, tmp_path):
    found = undefined_names({"lesson": cells}, tmp_path)
    assert len(found) == is_missed and all("`x`" in line for line in found), found


def test_a_cell_that_needs_a_fold_fails(tmp_path):
    assert "name 'x' is not defined" in run_alone(FOLDED_NAME, tmp_path)


# --- what the build makes of it


@pytest.mark.parametrize(
    ("texts", "missing"),
    [
        (["#| echo: false\nimport torch", "torch.zeros(1)"], {"torch"}),
        (["#| hide\nimport torch", "def f():\n    return torch"], {"torch"}),
        (["#| hide\nn = 1", "[n for _ in range(2)]"], {"n"}),
        (["#| hide\nn = 1", "class A:\n    m = n"], {"n"}),
        (["n = 1", "#| hide\nn = [2]", "n + 1"], {"n"}),
        (["print(n)", "n = 1"], {"n"}),
        (["#| setup: imports\nimport torch", "torch.zeros(1)"], set()),
        (["#| code-fold: true\nimport torch", "torch.zeros(1)"], set()),
        (["n = 1", "#| hide\nn = [2]", "n = 3\nn + 1"], set()),
        (["def f():\n    return n", "n = 1", "print(f())"], set()),
        (["class A:\n    m = 1\n    n = m", "[m for m in range(2)]"], set()),
        (["%time display(len(__name__))"], set()),
    ],
)
def test_a_name_that_is_not_shown_is_missed(texts, missing):
    assert not_shown([code(text) for text in texts]) == missing


def test_a_setup_is_folded_under_its_words():
    cell = code("#| setup: imports\nimport math")
    nbdev_directives.strip_cell(cell)
    assert cell["metadata"]["tags"] == ["setup", "hide-input"]
    assert cell["metadata"]["mystnb"]["code_prompt_show"] == "Setup: imports"


def output_cell(*children):
    return nodes.container("", *children, nb_element="cell_code", classes=["cell"])


def test_a_question_gathers_what_comes_out():
    question = nodes.admonition(
        "", nodes.title("", "Predict"), nodes.paragraph("", "What?"), classes=["tf-ask"]
    )
    out, plot_out = (
        nodes.container("", nodes.paragraph("", text), nb_element="cell_code_output")
        for text in ("printed", "drawn")
    )
    shown = output_cell(nodes.container("", nb_element="cell_code_source"), out)
    silent = output_cell(nodes.container("", nb_element="cell_code_source"))
    answer = course_form.Fold(
        "",
        course_form.FoldTitle("", "Answer"),
        nodes.paragraph("", "Because."),
        classes=["tf-answer"],
    )
    after = nodes.paragraph("", "Later.")
    section = nodes.section(
        "", question, shown, silent, output_cell(plot_out), answer, after
    )
    course_form.Ask.gather(SimpleNamespace(), question)
    assert section.children == [shown, silent, question, after]
    assert len(shown) == 1  # its code
    reveal = question.children[-1]
    assert "tf-reveal" in reveal["classes"]
    assert [child.astext() for child in reveal.children[1:]] == [
        "printed",
        "drawn",
        "Because.",
    ]
    asked = nodes.admonition(
        "", nodes.title("", "Predict"), nodes.paragraph("", "What?"), classes=["tf-ask"]
    )
    nodes.section("", asked)
    page = SimpleNamespace(env=SimpleNamespace(docname="nbs/x"))
    with pytest.raises(course_form.ExtensionError, match=r"no \{answer\}"):
        course_form.Ask.gather(page, asked)


def test_a_claim_is_folded_under_its_words():
    cell = code("#| verified: it is so\nassert x")
    nbdev_directives.strip_cell(cell)
    assert cell["metadata"]["tags"] == ["verified", "hide-cell"]
    assert cell["metadata"]["mystnb"]["code_prompt_show"] == "✓ it is so"
    assert cell["source"] == "assert x"


def test_figures_are_numbered_in_order():
    plate = '<figcaption class="tf-caption">'
    body = course_form.numbered(f"{plate}a {plate}b", "7")
    assert re.findall(r'id="(fig-7-\d)">Figure (7\.\d)\.', body) == [
        ("fig-7-1", "7.1"),
        ("fig-7-2", "7.2"),
    ]
    assert course_map.number("00_tour") == "0"
    assert course_map.number("06b_feed_forward") == "6b"
    assert course_map.number("07_multi") == "7"
    assert course_map.number("A1_figures") == "A1"
    assert course_map.number("package/nn/attention") == ""
    assert 'id="fig-2">Figure 2.' in course_form.numbered(plate * 2, "")


def test_the_head_is_computed():
    text = json.dumps(
        {
            "cells": [
                md(
                    "# T\n\n> S\n\n"
                    + "word " * 1500
                    + "\n```{exercise-start} E (15 minutes)\n```"
                ),
                code("#| verified: so\nassert x"),
            ]
        }
    )
    line = course_form.head(ROOT, ROOT / "nbs" / "00_tour.ipynb", text)
    assert line.startswith("10 minutes to read · 15 for the exercises")
    assert "✓ 1 claim proved here" in line
    made = json.loads(
        course_form.with_head(ROOT, ROOT / "nbs" / "00_tour.ipynb", text)
    )["cells"]
    first = course.source(made[0])
    assert "needs Python, " in first and "](A0_tensors.ipynb)" in first
    assert first.index("> S") < first.index("tf-head") < first.index("word")


def test_the_head_leads_on_from_a_folder(monkeypatch):
    "Links of the plan, and of the machine, from a notebook in a folder."
    planned = {
        "nb": "package/nn/sample",
        "lit": ["attention"],
        "needs": "[tensors](A0_tensors.ipynb#x)",
    }
    plan = [*course_map.plan(ROOT), {"part": "P", "chapters": [planned]}]
    monkeypatch.setattr(course_form, "plan", lambda root: plan)
    text = json.dumps({"cells": [md("# T\n\n> S\n\nword"), md("## First")]})
    path = course.notebook_path(ROOT, "package/nn/sample")
    made = json.loads(course_form.with_head(ROOT, path, text))["cells"]
    assert "needs [tensors](../../A0_tensors.ipynb#x)" in course.source(made[0])
    drawn = "".join(map(course.source, made))
    assert 'href="../../01_attention_by_hand.html"' in drawn


def test_what_comes_out_waits_for_the_prediction():
    cells = [
        md("x"),
        code("f()", out=True),
        ASKED,
        code("g()", out=True),
        code("h()"),
        TOLD,
        code("i()", out=True),
    ]
    course_form.fold_predictions(cells)
    assert [c["metadata"].get("tags") for c in cells] == [
        None,
        None,
        None,
        ["reveal"],
        None,
        None,
        None,
    ]


def test_every_planned_chapter_says_what_it_needs():
    for part in course_map.plan(ROOT):
        for planned in part["chapters"]:
            if course.notebook_path(ROOT, planned["nb"]).exists():
                assert planned.get("needs"), planned["nb"]


@every
def test_no_fence_of_backticks_has_a_backtick_in_its_title(name):
    for cell in cells_of(name):
        if cell["cell_type"] == "markdown":
            found = re.search(r"(?m)^`{3,}\{[\w-]+\}.*`.*$", course.source(cell))
            assert not found, f"write it with :::, {found[0]}"


def test_a_section_in_a_fence_is_no_section():
    text = "a\n\n```text\n## not this\n```\n\n(lbl)=\n## this"
    assert text[course_form.section_at(text) :] == "(lbl)=\n## this"
    assert course_form.section_at("a\n# b") is None


def test_boxes_stand_in_boxes():
    cells = course.code_cells(
        [
            md("```{solution-start} x\n```\n```{closer-start} y\n```"),
            code("a"),
            md("```{closer-end}\n```"),
            code("b"),
            md("```{solution-end}\n```"),
            code("c"),
        ]
    )
    assert [c.place for c in cells] == ["solution", "solution", ""]


def test_a_claim_is_void_when_its_helpers_change():
    def cells(helper):
        return course.code_cells(
            [code(helper), code("#| verified: so it is\nassert same()")]
        )

    change = {"where": "m", "old": "a", "new": "b"}
    one, other, formatted = (
        verify.key(cells(h), "so it is", change)
        for h in (
            "def same(): pass",
            "def same(): return True",
            "def same():  # as above\n    pass",
        )
    )
    assert one != other
    assert one == formatted
    magic = [verify.key(cells(h), "so it is", change) for h in ("%pip a", "%pip b")]
    assert magic[0] != magic[1]
