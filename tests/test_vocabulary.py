"""Every name that a text speaks of exists, and words of an earlier vocabulary are gone.

What is read, and which names are found in it, is said in `vocabulary.py`. The names
that are meant although they exist nowhere, and the retired words, stand in
`vocabulary.yml`, each with its reason.
"""

import doctest
import importlib
import re
from fnmatch import fnmatch

import pytest
import yaml

import course
import vocabulary
from conftest import ROOT
from vocabulary import Code, Text

TABLE = yaml.safe_load((ROOT / "tests" / "vocabulary.yml").read_text(encoding="utf-8"))
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
        for row in TABLE["exceptions"]
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


def test_every_exception_is_needed(names, texts):
    "A row of the table whose names exist by now, or are gone, has to go as well."
    used = {
        (name, text.where.split(":")[0])
        for text in texts
        for name in set(vocabulary.names_in(text))
        if name and not names.knows(name, text.code)
    }
    idle = [
        f"{name} in {row.get('where', '*')}"
        for row in TABLE["exceptions"]
        for name in row["names"].split()
        if not any(
            name == other and fnmatch(file, row.get("where", "*"))
            for other, file in used
        )
    ]
    assert not idle, idle
    assert len(TABLE["exceptions"]) <= 40
    assert all(row["reason"] for row in TABLE["exceptions"])


HERE = Code(["def scale(alpha):\n    beta = alpha.gamma\n    return runner, beta"])


@pytest.mark.parametrize(
    "kind, text, name",
    [
        ("prose", "It is made by `from_attention_mask`.", "from_attention_mask"),
        ("prose", "`check.every` runs all of them.", "check.every"),
        (
            "prose",
            "See {py:func}`~tformer.functional.no_such`.",
            "tformer.functional.no_such",
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


@pytest.mark.parametrize(
    "text",
    [
        "`alpha`, `beta`, `alpha.gamma`, `scale(alpha=1)`",
        "`attend`, `tformer.functional`",
        "`SelfAttention.forward`, `KVCache.set_rows`, `Trainer.fit`, "
        "`RequestHandle.error`",
        "`check.run_all(model)`, `check.cache(model, step_fn=f)`, `max_new_tokens=`",
        "`nn.Linear`, `F.softmax`, `np.memmap`, `x.masked_fill`, `state_dict`, "
        "`is_causal`",
        "`BertForMaskedLM`, `position_ids`, `list.append`, `None`, `json`",
        "`n`, `W_K`",
        "`tests/helpers.py`, `model.safetensors`, `make test`, `--check`, `code-fold`",
    ],
)
def test_a_name_that_exists_is_known(names, text):
    assert [
        name
        for name in vocabulary.names_in(Text("", "prose", text, HERE))
        if name and not names.knows(name, HERE)
    ] in ([], ["W_K"])


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


# Retired words


def words_of(name):
    "Return an identifier in lower case, with its words between underscores."
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)
    return f"_{'_'.join(words).lower()}_"


def is_retired(name, word):
    return name == word[1:] if word[0] == "=" else words_of(word) in words_of(name)


def matches(file, patterns):
    return any(fnmatch(file, pattern) for pattern in patterns)


def retired(file, names):
    "Return a line for each name in a file that holds a retired word."
    found = []
    for row in TABLE["retired"]:
        spared = row.get("except", {})
        if matches(file, row.get("only", "*").split()) and not matches(file, spared):
            found += [
                f"{file}: {name} (now: {row['now']})"
                for word in row["word"].split()
                for name in names
                if name not in spared and is_retired(name, word)
            ]
    return found


def identifiers():
    "Yield every file of code with the names that stand in it; names of mutations."
    for path in [*(ROOT / "tformer").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        if path.name not in {"_modidx.py", "test_vocabulary.py"}:
            yield path, [path.read_text(encoding="utf-8")]
    for path in course.notebook_paths(ROOT):
        cells = course.json.loads(path.read_text(encoding="utf-8"))["cells"]
        yield (
            path,
            [
                vocabulary.without_magic(course.source(cell))
                for cell in cells
                if cell["cell_type"] == "code"
            ],
        )


def test_retired_words_are_gone_from_code():
    found = []
    for path, sources in identifiers():
        names = {
            name
            for source in sources
            for name in vocabulary.read_code(source).identifiers
        }
        found += retired(path.relative_to(ROOT).as_posix(), names)
    assert not found, "\n".join(["these names hold a retired word:", *sorted(found)])


def test_retired_words_are_gone_from_texts(texts):
    found = []
    for text in texts:
        names = {part for name in vocabulary.names_in(text) for part in name.split(".")}
        if text.kind in {"caption", "claim"}:
            names.add("_".join(re.findall(r"\w+", text.text)))
        found += retired(text.where.split(":")[0], names)
    assert not found, "\n".join(["these texts hold a retired word:", *sorted(found)])


@pytest.mark.parametrize(
    "file, name, is_found",
    [
        ("tests/test_serving.py", "test_a_ticket_is_iterated", True),
        ("tests/test_caches.py", "BrokenVerbs", True),
        ("tests/test_caches.py", "k_pos", True),
        ("tformer/serving.py", "patience", True),
        ("tformer/beam.py", "max_new", True),
        ("tformer/beam.py", "max_new_tokens", False),
        ("tformer/positions.py", "input", False),
        ("nbs/17_training.ipynb", "index_put_", False),
        ("tformer/bilingual.py", "Verb", False),
    ],
)
def test_a_retired_word_is_found(file, name, is_found):
    assert bool(retired(file, {name})) == is_found
