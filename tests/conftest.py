"""What several test files share: the built book, a browser, executed shapes."""

import csv
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import build_book  # book/_ext, where the conftest of the root looks

ROOT = Path(__file__).resolve().parents[1]
# test files of which all tests are marked nightly, except these
NIGHTLY = {
    "test_mutations.py": {
        "test_every_row_can_be_made",
        "test_names_of_mutations_are_different",
    },
    "test_shapes.py": {
        "test_a_wrong_call_is_refused",
        "test_every_module_with_shapes_has_a_file_of_tests",
    },
}
# test files that import torch, but compare nothing that a processor could round in
# its own way: all others are marked processor
SAME_EVERYWHERE = {
    "test_bench.py",
    "test_bpe.py",
    "test_weights.py",
    "test_costs.py",
    "test_live.py",
    "test_processors.py",
    "test_shapes.py",
    "test_tensor_checks.py",
    "test_validate.py",
}
IMPORTS_TORCH = re.compile(r"^(import|from) torch\b", re.M)
pytest.register_assert_rewrite("helpers")  # its failures show numbers


def pytest_configure(config):
    """With ``--jaxtyping-packages`` every signature is executed.

    A call may then be refused by its signature before it is refused by
    the function.  Tests that cannot be run like that, or run smaller,
    ask for TFORMER_SHAPES.
    """
    config.addinivalue_line(
        "markers", "nightly: run by `make nightly`, not by `make test`"
    )
    config.addinivalue_line(
        "markers",
        "gpu: needs a CUDA device, and is skipped elsewhere; run by `make gpu`",
    )
    if not config.getoption("--jaxtyping-packages", None):
        os.environ.pop("TFORMER_SHAPES", None)
        return
    from jaxtyping import TypeCheckError

    os.environ["TFORMER_SHAPES"] = "1"
    plain = pytest.raises

    def raises(expected, *args, **kwargs):
        kinds = expected if isinstance(expected, tuple) else (expected,)
        kwargs.pop("match", None)
        return plain((*kinds, TypeCheckError), *args, **kwargs)

    pytest.raises = raises


@pytest.hookimpl(tryfirst=True)  # before -m chooses by markers
def pytest_collection_modifyitems(config, items):
    files = by_file(items)
    mark_nightly(files)
    mark_processor(files)
    skip_without_gpu(items)
    if "TFORMER_SHAPES" in os.environ:
        run_less(config, items)


def by_file(items):
    "The items of each file of this folder, by the name of the file."
    files = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    here = Path(__file__).parent
    return {path.name: some for path, some in files.items() if path.parent == here}


def mark_nightly(files):
    "Mark the tests of the files that `NIGHTLY` names."
    for name, spared in NIGHTLY.items():
        for item in files.get(name, ()):
            if item.originalname not in spared:
                item.add_marker(pytest.mark.nightly)


def mark_processor(files):
    "Mark the tests of files that compute with floats."
    for name, items in files.items():
        if name not in SAME_EVERYWHERE and IMPORTS_TORCH.search(
            items[0].path.read_text(encoding="utf-8")
        ):
            for item in items:
                item.add_marker(pytest.mark.processor)


def skip_without_gpu(items):
    "Let tests marked gpu be skipped where there is no CUDA device."
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if not needing:
        return
    import torch  # which files without such tests need not

    if not torch.cuda.is_available():
        for item in needing:
            item.add_marker(
                pytest.mark.skip(
                    reason="This test needs a CUDA device, and PyTorch finds none."
                )
            )


def run_less(config, items):
    """Where signatures are executed, run less over the table of models.

    There each row and each value of another parameter is tried, not each
    with each: all combinations are run without, and the shapes are the
    same. Ten examples of a property are enough for the same reason, and so are
    the values of a parameter that are run by day, where there are any.
    """
    by_day = {
        item.nodeid.partition("[")[0]
        for item in items
        if not item.get_closest_marker("nightly")
    }
    for item in items:
        test = getattr(item.obj, "__func__", item.obj)
        if usual := getattr(test, "_hypothesis_internal_use_settings", None):
            few = min(usual.max_examples, 10)
            test._hypothesis_internal_use_settings = type(usual)(
                usual, max_examples=few
            )
    tried = set()
    kept = []
    left = []
    for item in items:
        test, _, of = item.nodeid.partition("[")
        if test in by_day and item.get_closest_marker("nightly"):
            left.append(item)
            continue
        values = (
            {(test, name, repr(value)) for name, value in item.callspec.params.items()}
            if of
            else set()
        )
        whole = not any(name == "row" for _, name, _ in values)
        (kept if whole or values - tried else left).append(item)
        tried |= values
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def find_chromium(playwright):
    "The browser to test with, the system's or Playwright's own, or None."
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        if path := shutil.which(name):
            return path
    own = playwright.chromium.executable_path
    return own if Path(own).exists() else None


@pytest.fixture(scope="session")
def chromium():
    """A headless browser; where CI is set, its absence is a failure.

    The only one: Playwright cannot be started twice in one process.
    """
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as p:
        path = find_chromium(p)
        if path is None:
            if os.environ.get("CI"):
                pytest.fail("no Chromium on this machine: install the package chromium")
            pytest.skip("no Chromium on this machine")
        browser = p.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


PATIENCE = 120_000  # milliseconds that a page may take on a machine at full load


@pytest.fixture(scope="session")
def windows():
    "The windows that tests have opened, with what each shows, by their kinds."
    return {}


@pytest.fixture
def open_page(chromium, windows):
    """Open an address, or a file, in the window of its kind, which all tests share.

    Width, colors and medium of a window can be changed, so a kind is what else it is
    asked for. A test that changes nothing but these says that it only looks: then the
    page is not loaded again if the window shows it, and no other test has changed it.
    """
    used = []

    def visit(path, width=1280, height=900, color_scheme="light", look=False, **kind):
        address = path if isinstance(path, str) else path.as_uri()
        key = tuple(sorted(kind.items()))
        if key not in windows:
            windows[key] = [chromium.new_context(**kind).new_page(), None]
            windows[key][0].set_default_timeout(PATIENCE)
        page, shown = windows[key]
        used.append(page)
        page.set_viewport_size({"width": width, "height": height})
        page.emulate_media(media="screen", color_scheme=color_scheme)
        if not look or shown != address:
            page.goto(address, wait_until="load")
        windows[key][1] = address if look else None
        return page

    yield visit
    for page in used:  # nothing is remembered from one test to the next
        if page.url != "about:blank":
            page.evaluate("localStorage.clear(), sessionStorage.clear()")


def run(*args, cwd=ROOT, **kwargs):
    "Run a command; its whole output is in the failure."
    done = subprocess.run(
        [str(a) for a in args], cwd=cwd, text=True, capture_output=True, **kwargs
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def read_rows(path):
    "Return the rows of a CSV, each as a dict."
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def run_small(name, folder):
    "Return the rows that an experiment writes after two steps with one seed."
    out = folder / f"{name}.csv"
    script = ROOT / "experiments" / f"{name}.py"
    run(sys.executable, script, "--steps", "2", "--seeds", "1", "--out", out)
    return read_rows(out)


def load_experiment(name):
    "Import a script of the folder experiments/ as a module."
    sys.path.insert(0, str(ROOT / "experiments"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "experiments"))


@pytest.fixture(scope="session")
def copy_tree():
    "Copies the project's own files into a folder."

    def copy(target):
        for path in build_book.project_files():
            to = Path(target) / path.relative_to(ROOT)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, to)
        return Path(target)

    return copy


@pytest.fixture(scope="session")
def book(tmp_path_factory):
    "The book, built once for all runs over the same tree; its HTML folder."
    kept = build_book.kept_pages()
    if not kept.exists():
        out = tmp_path_factory.mktemp("book")
        run(
            sys.executable,
            "-c",
            "import build_book, sys; build_book.build(sys.argv[1])",
            out,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'book' / '_ext'}"},
        )
        build_book.keep(out / "_build" / "html", kept)
    os.utime(kept)  # it is in use
    return kept
