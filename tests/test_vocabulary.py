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
    return any(name in row["names"].split() and fnmatch(
        where.split(":")[0], row.get("where", "*")) for row in TABLE["exceptions"])


def unknown(names, texts):
    "Return a line for each name of the texts that does not exist."
    return sorted({
        f"{text.where}: `{name}` ({text.kind})" for text in texts
        for name in set(vocabulary.names_in(text))
        if name and not names.knows(name, text.code)
        and not is_excepted(name, text.where)})


def test_every_name_in_a_text_exists(names, texts):
    found = unknown(names, texts)
    assert not found, "\n".join(["these names do not exist:", *found])


def test_every_exception_is_needed(names, texts):
    "A row of the table whose names exist by now, or are gone, has to go as well."
    used = {(name, text.where.split(":")[0]) for text in texts
            for name in set(vocabulary.names_in(text))
            if name and not names.knows(name, text.code)}
    idle = [f"{name} in {row.get('where', '*')}" for row in TABLE["exceptions"]
            for name in row["names"].split()
            if not any(name == other and fnmatch(file, row.get("where", "*"))
                       for other, file in used)]
    assert not idle, idle
    assert len(TABLE["exceptions"]) <= 40
    assert all(row["reason"] for row in TABLE["exceptions"])


def captions():
    "Yield the place, the caption and the source of each cell that has a caption."
    for path in course.notebook_paths(ROOT):
        for cell in course.code_cells(course.json.loads(
                path.read_text(encoding="utf-8"))["cells"]):
            if "code-summary" in cell.directives:
                where = f"{path.relative_to(ROOT).as_posix()}:cell {cell.index}"
                yield where, cell.directives["code-summary"], cell.source


def misnamed(caption, source):
    "Return the name with which a caption begins, if its cell does not define it."
    name = vocabulary.first_name(caption)
    return None if name in {None, *WORDS, *vocabulary.defined(source)} else name


def test_a_caption_names_what_its_cell_defines():
    found = [f"{where}: {name}" for where, caption, source in captions()
             if (name := misnamed(caption, source))]
    assert not found, "\n".join(["these captions name nothing in their cell:", *found])


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
            found += [f"{file}: {name} (now: {row['now']})"
                      for word in row["word"].split() for name in names
                      if name not in spared and is_retired(name, word)]
    return found


def identifiers():
    "Yield every file of code with the names that stand in it; names of mutations."
    for path in [*(ROOT / "tformer").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        if path.name not in {"_modidx.py", "test_vocabulary.py"}:
            yield path, [path.read_text(encoding="utf-8")]
    for path in course.notebook_paths(ROOT):
        cells = course.json.loads(path.read_text(encoding="utf-8"))["cells"]
        yield path, [vocabulary.without_magic(course.source(cell)) for cell in cells
                     if cell["cell_type"] == "code"]


def test_retired_words_are_gone_from_code():
    found = []
    for path, sources in identifiers():
        names = {name for source in sources
                 for name in vocabulary.read_code(source).identifiers}
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
