"""Every name that a text for readers speaks of exists, and the examples run.

What is read, and which names are found in it, is said in `vocabulary.py`. The names
that are meant although they exist nowhere stand in `vocabulary.yml`, each with its
reason.
"""

import doctest
import importlib
from fnmatch import fnmatch

import pytest
import yaml

import course
import vocabulary
from conftest import ROOT
from vocabulary import Code, Text

EXCEPTIONS = yaml.safe_load(
    (ROOT / "tests" / "vocabulary.yml").read_text(encoding="utf-8")
)
# captions that begin with a word and a comma, and name nothing
WORDS = {"imports"}


@pytest.fixture(scope="module")
def names():
    return vocabulary.Vocabulary(ROOT)


@pytest.fixture(scope="module")
def texts():
    return list(vocabulary.texts(ROOT))


# Names in texts


def is_excepted(name, where):
    "Whether the table excepts a name in a file."
    return any(
        name in row["names"].split()
        and fnmatch(where.split(":")[0], row.get("where", "*"))
        for row in EXCEPTIONS
    )


def unknown(names, texts):
    "Return a line for each name of the texts that does not exist."
    return sorted(
        {
            f"{text.where}: `{name}` ({text.kind})"
            for text in texts
            for name in set(vocabulary.names_in(text))
            if name
            and not names.knows(name, text.code)
            and not is_excepted(name, text.where)
        }
    )


def test_every_name_in_a_text_exists(names, texts):
    found = unknown(names, texts)
    assert not found, "\n".join(["these names do not exist:", *found])


HERE = Code(["def scale(alpha):\n    beta = alpha.gamma\n    return runner, beta"])


@pytest.mark.parametrize(
    "kind, text, name",
    [
        ("prose", "It is made by `from_attention_mask`.", "from_attention_mask"),
        ("prose", "`check.every` runs all of them.", "check.every"),
        (
            "prose",
            "See {py:func}`~tformer.nn.functional.no_such`.",
            "tformer.nn.functional.no_such",
        ),
        ("prose", "Rows are set by `KVCache.put`.", "KVCache.put"),
        ("prose", "`generate(model, ids, max_new=8)`", "generate(max_new"),
        ("prose", "`torch.nn.functional.softmaxx`", "torch.nn.functional.softmaxx"),
        ("docstring", "Call ``runner.forget()`` then.", "runner.forget"),
        ("docstring", "What ``_private_of_another`` returns.", "_private_of_another"),
        ("comment", "memory_mask=, as in ``decode``", "memory_mask"),
        ("message", "call check.cache with step=", "check.cache(step"),
        ("message", "load it with load_all(path)", "load_all"),
        ("caption", "make_picker, from settings to a function", "make_picker"),
        ("claim", "share_heads gives equal outputs", "share_heads"),
        ("figure", "split_words", "split_words"),
        ("output", "check.every passed: 9 checks", "tformer.check.every"),
        ("program", "text = decode(handle.ids_so_far)", "handle.ids_so_far"),
    ],
)
def test_a_name_that_is_gone_is_found(names, kind, text, name):
    found = {
        name
        for name in vocabulary.names_in(Text("", kind, text, HERE))
        if not names.knows(name, HERE)
    }
    assert name in found


def captions():
    "Yield the place, the caption and the source of each cell that has a caption."
    for path in course.notebook_paths(ROOT):
        for cell in course.code_cells(
            course.json.loads(path.read_text(encoding="utf-8"))["cells"]
        ):
            if "code-summary" in cell.directives:
                where = f"{path.relative_to(ROOT).as_posix()}:cell {cell.index}"
                yield where, cell.directives["code-summary"], cell.source


def misnamed(caption, source):
    "Return the name with which a caption begins, if its cell does not define it."
    name = vocabulary.first_name(caption)
    return None if name in {None, *WORDS, *vocabulary.defined(source)} else name


def test_a_caption_names_what_its_cell_defines():
    found = [
        f"{where}: {name}"
        for where, caption, source in captions()
        if (name := misnamed(caption, source))
    ]
    assert not found, "\n".join(["these captions name nothing in their cell:", *found])


@pytest.mark.parametrize(
    "caption, name",
    [
        ("picker, from settings to what chooses", "picker"),
        ("Exact", "Exact"),
        ("no_autocast keeps types", "no_autocast"),
        ("`old`: so it is", "old"),
        ("old(), which is gone", "old"),
        ("imports, and helpers", None),
        ("how it is drawn", None),
        ("make_it, from settings", None),
    ],
)
def test_a_caption_that_names_nothing_is_found(caption, name):
    assert misnamed(caption, "def make_it():\n    return 1") == name


@pytest.mark.parametrize("name", course.module_names(ROOT))
def test_the_examples_in_docstrings_run(name):
    module = importlib.import_module(f"tformer.{name}")
    failed, _ = doctest.testmod(module)
    assert not failed
