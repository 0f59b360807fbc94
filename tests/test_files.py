"""Files that exist, and files that are replaced as a whole or not at all."""

import os
import threading
import time
from pathlib import Path

import pytest

from helpers import child, says
from tformer.base import files


def test_a_file_that_is_there(tmp_path):
    path = tmp_path / "a.txt"
    path.touch()
    assert files.require_file(path) == files.require_file(str(path)) == path
    with says(f"a folder, not a file: {str(tmp_path)!r:.80}", FileNotFoundError):
        files.require_file(tmp_path)
    with says("no such file: 'no/such.txt'", FileNotFoundError):
        files.require_file("no/such.txt")
    for wrong in (3, None, b"a.txt", Path):
        with pytest.raises(ValueError, match=r"^path must be str or PathLike"):
            files.require_file(wrong)


@pytest.fixture
def paths(tmp_path):
    "Three paths that belong together, with what they held before."
    for name in ("config", "weights", "tokens"):
        (tmp_path / name).write_text(f"old {name}")
    return [tmp_path / name for name in ("config", "weights", "tokens")]


def held(paths):
    return [p.read_text() for p in paths]


def alone(paths):
    return sorted(paths[0].parent.iterdir()) == sorted(paths)


def test_files_are_replaced(paths):
    new = paths[0].parent / "new"
    files.write_files_atomically(
        {p: lambda to: to.write_text("new") for p in (*paths, new)}
    )
    assert held([*paths, new]) == 4 * ["new"] and alone([*paths, new])
    files.write_files_atomically({})


class Slip(Exception):
    pass


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("how", ["before", "half", "after", "nothing"])
def test_a_writer_that_raises_changes_no_file(paths, at, how):
    seen = []

    def writer(i):
        def write(path):
            assert path not in paths and path.parent == paths[i].parent
            assert held(paths) == [f"old {p.name}" for p in paths]
            seen.append(i)
            if i == at and how == "nothing":
                return  # no file, no error of its own
            if i != at or how != "before":
                path.write_text("half of the n")
            if i == at and how in ("before", "half"):
                raise Slip
            path.write_text("new")
            if i == at:
                raise Slip

        return write

    with pytest.raises(FileNotFoundError if how == "nothing" else Slip):
        files.write_files_atomically({p: writer(i) for i, p in enumerate(paths)})
    assert seen == list(range(at + 1))
    assert held(paths) == [f"old {p.name}" for p in paths]
    assert alone(paths)


def test_a_failed_rename_leaves_nothing_beside(paths, monkeypatch):
    def refuse(here, there):
        raise PermissionError(there)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError):
        files.write_files_atomically(
            {p: lambda to: to.write_text("new") for p in paths}
        )
    assert held(paths) == [f"old {p.name}" for p in paths]
    assert alone(paths)


def test_all_is_on_the_disk_before_the_first_rename(paths, monkeypatch):
    done = []
    sync = os.fsync
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append("sync"), sync(fd)))
    monkeypatch.setattr(
        os, "replace", lambda a, b: (done.append(b.name), replace(a, b))
    )
    files.write_files_atomically({p: lambda to: to.write_text("new") for p in paths})
    assert done == 3 * ["sync"] + ["config", "weights", "tokens"]


def test_threads_that_write_one_path(paths, monkeypatch):
    "Each has its temporary files, and files that belong together stay together."
    replace = os.replace

    def slowly(here, there):
        replace(here, there)
        renamed.append(threading.get_ident())
        time.sleep(0.002)

    monkeypatch.setattr(os, "replace", slowly)
    errors = []
    renamed = []

    def save(name):
        def write(path):
            path.write_text(name)
            time.sleep(0.001)

        for _ in range(10):
            try:
                files.write_files_atomically(dict.fromkeys(paths, write))
            except OSError as error:
                errors.append(error)

    threads = [threading.Thread(target=save, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(renamed) == 90
    assert all(len({*renamed[i : i + 3]}) == 1 for i in range(0, 90, 3))
    assert held(paths) in [3 * [name] for name in ("a", "b", "c")] and alone(paths)


def test_two_processes_of_one_number_write_one_path(paths, monkeypatch):
    "As in two containers that share a disk: in each of them the process is number 1."
    monkeypatch.setattr(os, "getpid", lambda: 1)

    def save(name, delay):
        def write(path):
            path.write_text(name)
            time.sleep(delay)

        return lambda: files.write_files_atomically({paths[0]: write})

    thread = threading.Thread(target=lambda: codes.append(child(save("a", 0.3))))
    codes = []
    thread.start()
    time.sleep(0.1)
    codes.append(child(save("b", 0.0)))
    thread.join()
    assert codes == [0, 0] and paths[0].read_text() == "a" and alone(paths)


def test_what_was_left_by_a_killed_program_goes_when_it_is_old(paths):
    others = [paths[0].with_name(name) for name in ("config.part", "config.01234567.1")]
    left = paths[0].with_name("config.01234567.1.part")
    for path in (*others, left):
        path.touch()
    files.write_files_atomically({paths[0]: lambda to: to.write_text("new")})
    assert left.exists()  # somebody may be writing it
    for path in (*others, left):
        os.utime(path, (0, time.time() - 3700))
    files.write_files_atomically({paths[0]: lambda to: to.write_text("new")})
    assert not left.exists() and all(path.exists() for path in others)


@pytest.mark.parametrize(
    "point, new",
    [("config", 0), ("tokens", 0), ("after config", 1), ("after weights", 2)],
)
def test_a_program_that_is_killed_leaves_whole_files(paths, point, new):
    "It ends at that point as if the power went: nothing is cleaned up."
    replace = os.replace

    def write(path):
        path.write_text("half of the n")
        if point in path.name:
            os._exit(9)
        path.write_text("new " + path.name.split(".")[0])

    def rename(here, there):
        replace(here, there)
        if point == f"after {there.name}":
            os._exit(9)

    def save():
        os.replace = rename
        files.write_files_atomically(dict.fromkeys(paths, write))

    assert os.waitstatus_to_exitcode(child(save)) == 9
    assert held(paths) == [
        f"{'new' if i < new else 'old'} {p.name}" for i, p in enumerate(paths)
    ]


@pytest.mark.parametrize(
    "text, error, match",
    [
        ("{", ValueError, r"config\.json is no JSON: Expecting"),
        ("[1]", ValueError, r"config\.json holds list, not an object"),
        (None, FileNotFoundError, "no such file"),
    ],
)
def test_settings_that_are_no_object(tmp_path, text, error, match):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(error, match=match):
        files.read_json_object(path)
    with pytest.raises(ValueError, match=r"^path must be str or PathLike, got int 5$"):
        files.read_json_object(5)
    path.write_text('{"d_model": 8}')
    assert files.read_json_object(path) == {"d_model": 8}
