"""Sources of texts, downloads that break, token files, near-duplicates."""

import contextlib
import errno
import hashlib
import io
import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import plain_only
from tformer.corpora import documents, stories
from tformer.corpora.documents import (
    DocumentEncoder,
    TokenFile,
    download,
    find_near_duplicates,
    load_documents,
    python_docs,
    read_hub_file,
    read_jsonl,
    read_parquet,
    read_path,
    read_texts,
    shingles,
    tokenizer_hash,
    write_token_file,
)
from tformer.text.tokenizer import Tokenizer
from tformer.text.vocabulary import Vocabulary

BYTES = Tokenizer(Vocabulary([]))
END = Tokenizer(Vocabulary([(b"a", b"b")], ["<|end|>"]))


# --- files


@given(
    texts=st.lists(
        st.text(
            st.characters(exclude_categories=["Cs"], exclude_characters="\x1e\ufeff")
        ),
        min_size=1,
    ),
    size=st.integers(1, 9),
)
@settings(max_examples=40, deadline=None)
def test_a_file_is_cut_where_the_separator_stands(tmp_path_factory, texts, size):
    path = tmp_path_factory.mktemp("texts") / "a.txt"
    separator = "\x1e" * (size % 2 + 1)
    path.write_text(separator.join(texts) + "!", "utf-8", newline="")
    found = list(read_texts(path, separator))
    assert found == [*texts[:-1], texts[-1] + "!"]
    assert "".join(read_texts(path)) == separator.join(texts) + "!"


def test_a_separator_may_lie_across_blocks(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("one<END>two<END>three", "utf-8")
    read = documents.read_text_chunks
    for size in range(1, 12):
        monkeypatch.setattr(
            documents, "read_text_chunks", lambda path, n=size: read(path, n)
        )
        assert list(read_texts(path, "<END>")) == ["one", "two", "three"]


def test_jsonl_holds_objects_or_strings_and_names_the_line(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\nb", "n": 1}\n\n"c"\n', "utf-8")
    assert list(read_jsonl(path)) == ["a\nb", "c"]
    for line in ('{"txt": "a"}', '{"text": 3}', "{", "[1]", "\xff"):
        path.write_text('"good"\n' + line + "\n", "utf-8")
        with pytest.raises(ValueError, match="line 2: no text in 'text'"):
            list(read_jsonl(path))
    path.write_text('{"body": "x"}', "utf-8")
    assert list(load_documents(path, field="body")) == ["x"]


def test_a_text_of_white_space_is_none_and_does_not_count(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('""\n" "\n"a"\n"\\n"\n"b"\n"c"\n', "utf-8")
    for limit, texts in ((1, ["a"]), (2, ["a", "b"]), (9, ["a", "b", "c"])):
        assert list(load_documents(path, limit)) == texts


def test_parquet_is_read_by_rows(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    texts = [f"text {i}" for i in range(2500)]
    parquet.write_table(pa.table({"text": texts, "n": range(2500)}), path)
    assert list(read_parquet(path)) == list(load_documents(path)) == texts
    with pytest.raises(ValueError, match=r"a column of .*'text', 'n'"):
        list(read_parquet(path, "body"))


def test_a_parquet_row_without_a_text_is_named(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    for wrong in ([None], [3]):
        texts = ["a"] * 1200 if wrong == [None] else []
        parquet.write_table(pa.table({"text": texts + wrong}), path)
        with pytest.raises(
            ValueError,
            match=(
                f"row {len(texts) + 1} of 'text' in .*parquet must be a str, "
                f"got {type(wrong[0]).__name__}"
            ),
        ):
            list(load_documents(path))


def test_a_byte_order_mark_is_no_text(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("one|two\ufeff|three", "utf-8-sig")
    assert list(read_texts(path)) == ["one|two\ufeff|three"]
    read = documents.read_text_chunks
    for size in (1, 2, 100):
        monkeypatch.setattr(
            documents, "read_text_chunks", lambda path, n=size: read(path, n)
        )
        assert list(read_texts(path, "|")) == ["one", "two\ufeff", "three"]
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n', "utf-8-sig")
    assert list(load_documents(tmp_path / "a.jsonl")) == ["a"]


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"tformer\[data\]"):
        list(read_parquet(tmp_path / "a.parquet"))


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    for name in ("b.txt", "a.md", "sub/c.txt", "x.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name, "utf-8")
    assert list(load_documents(tmp_path)) == ["a.md", "b.txt", "sub/c.txt"]
    assert list(read_path(tmp_path / "x.bin")) == ["x.bin"]


@pytest.mark.parametrize(
    "make, error, says",
    [
        (lambda p: load_documents(p / "none.txt"), FileNotFoundError, "no such file"),
        (
            lambda p: load_documents("storis"),
            FileNotFoundError,
            "no such file: 'storis'; nor .* 'stories', 'pydocs', 'hub:owner/dataset' "
            "and",
        ),
        (
            lambda p: load_documents("stories", sede=1),
            ValueError,
            "'stories' has no option sede; its options are seed, level",
        ),
        (lambda p: load_documents("pydocs", seed=1), ValueError, "no option seed"),
        (
            lambda p: load_documents(p / "latin.txt", feld="a"),
            ValueError,
            "reader of latin.txt has no option feld; its options are separator",
        ),
        (
            lambda p: load_documents(p / "latin.jsonl"),
            ValueError,
            "latin.jsonl, line 2, is not UTF-8: byte 0xe9 at position 4",
        ),
        (lambda p: load_documents(p / "empty.txt"), ValueError, "is empty"),
        (
            lambda p: load_documents(p / "blank.txt"),
            ValueError,
            "the corpus is empty: .* holds no text",
        ),
        (lambda p: load_documents(p / "folder"), ValueError, "the corpus is empty"),
        (
            lambda p: load_documents(p / "latin.txt"),
            ValueError,
            "latin.txt is not UTF-8: byte 0xe9 at position 3",
        ),
        (lambda p: load_documents("stories", 0), ValueError, "limit must be"),
        (
            lambda p: load_documents("hub:one"),
            ValueError,
            "hub:owner/dataset, got 'hub:",
        ),
        (lambda p: load_documents("hub:/two"), ValueError, "hub:owner/dataset, got"),
        (lambda p: load_documents("hub:a/b/"), ValueError, "hub:owner/dataset/file"),
        (lambda p: load_documents("hub:a/b/../../c"), ValueError, "hub:owner"),
        (lambda p: load_documents("hub:a/b//etc/c.txt"), ValueError, "hub:owner"),
        (lambda p: load_documents("hub:../b"), ValueError, "hub:owner/dataset, got"),
        (lambda p: load_documents("hub:../b/c.txt"), ValueError, "hub:owner/dataset/f"),
        (lambda p: read_texts(p / "blank.txt", ""), ValueError, "separator"),
    ],
)
def test_bad_sources_are_refused(tmp_path, make, error, says):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "latin.jsonl").write_bytes(b'"one"\n"caf\xe9"\n')
    (tmp_path / "folder").mkdir()
    with pytest.raises(error, match=says):
        list(make(tmp_path))


# --- corpora that are always there


def test_stories_are_those_of_the_grammar():
    assert list(load_documents("stories", 20)) == list(stories.generate_stories(20))
    assert list(load_documents("stories", 5, seed=3, level=2)) == list(
        stories.generate_stories(5, 3, 2)
    )
    assert sum(1 for _ in load_documents("stories", 10, level=3)) == 10


def test_pydocs_are_many_distinct_and_in_one_order():
    texts = list(python_docs())
    assert len(texts) > 1000 and sum(map(len, texts)) > 400_000
    assert texts == list(load_documents("pydocs"))
    heads = [text.split("\n")[0] for text in texts]
    assert len(set(heads)) > 0.99 * len(heads)
    entry = texts[heads.index("textwrap.indent")]
    import inspect
    import textwrap

    assert inspect.cleandoc(textwrap.indent.__doc__) in entry
    assert not any("object at 0x" in text for text in texts)
    out = subprocess.run(  # the same in another process
        [
            sys.executable,
            "-c",
            "import hashlib; from tformer.corpora.documents import "
            "python_docs; print(hashlib.sha256("
            "''.join(python_docs()).encode()).hexdigest())",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        out.stdout.strip() == hashlib.sha256("".join(texts).encode()).hexdigest()
        and not out.stderr
    )


def test_what_other_packages_add_to_classes_is_no_documentation(monkeypatch):
    import logging

    before = list(python_docs())

    def shout(self, message):
        "Say it loudly."

    monkeypatch.setattr(logging.Logger, "shout", shout, raising=False)
    assert list(python_docs()) == before


# --- downloads

BODY = random.Random(0).randbytes(300_000)
RIGHT = hashlib.sha256(BODY).hexdigest()


@pytest.fixture
def server():
    "A server on this machine, whose moods can be set."

    class Handler(BaseHTTPRequestHandler):
        body = BODY
        tag = '"one"'
        most = 10**9
        ranges = True
        asked = []
        codes = []

        def do_GET(self):
            cls = type(self)
            start = 0
            if self.path.endswith("missing"):
                return self.send_error(404)
            said = self.headers.get("Range")
            if said and cls.ranges and (self.headers.get("If-Range") == cls.tag):
                start = int(said.removeprefix("bytes=")[:-1])
            cls.asked.append(said)
            code = 206 if start else 200
            cls.codes.append(code)
            self.send_response(code)
            self.send_header("Content-Length", str(len(cls.body) - start))
            self.send_header("ETag", cls.tag)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(cls.body[start : start + cls.most])

        def log_message(self, *args):
            pass

    Handler.asked = []
    Handler.codes = []
    made = ThreadingHTTPServer(("localhost", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    Handler.url = f"http://localhost:{made.server_port}"
    yield Handler
    made.shutdown()
    made.server_close()


def test_a_download_is_there_in_full_and_asked_for_once(server, tmp_path):
    path = tmp_path / "deep" / "a.txt"
    assert download(f"{server.url}/a", path, RIGHT) == path
    assert path.read_bytes() == BODY
    assert [p.name for p in path.parent.iterdir()] == ["a.txt"]
    n = len(server.asked)
    download(f"{server.url}/a", path, RIGHT)
    download(f"{server.url}/a", path)
    assert len(server.asked) == n


def test_a_broken_download_goes_on_where_it_broke(server, tmp_path):
    server.most = 70_000
    path = tmp_path / "a.txt"
    with pytest.raises(
        ConnectionError, match="broke at 140,000 of 300,000 bytes; call again"
    ):
        download(f"{server.url}/a", path, RIGHT, max_retries=2)
    assert not path.exists()
    (part,) = tmp_path.iterdir()
    assert part.read_bytes() == BODY[:140_000]
    assert download(f"{server.url}/a", path, RIGHT).read_bytes() == BODY
    assert [r for r in server.asked if r] == [
        f"bytes={n}-" for n in (70_000, 140_000, 210_000, 280_000)
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_what_came_to_the_last_byte_is_not_asked_for(server, tmp_path):
    "Killed between the last byte and the renaming."
    path = tmp_path / "a.txt"
    server.most = 70_000
    with pytest.raises(ConnectionError):
        download(f"{server.url}/a", path, RIGHT, max_retries=1)
    (part,) = tmp_path.iterdir()
    part.write_bytes(BODY)
    server.most = 0
    n = len(server.asked)
    assert download(f"{server.url}/a", path, RIGHT).read_bytes() == BODY
    assert server.asked[n:] == [None]  # its size alone
    path.unlink()
    part.write_bytes(BODY + b"x")
    with pytest.raises(ValueError, match="sha256"):
        download(f"{server.url}/a", path, RIGHT)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_no_broken_line(server, tmp_path, monkeypatch):
    class Full(io.FileIO):
        def write(self, data):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(documents, "open", Full, raising=False)
    with pytest.raises(OSError, match="No space left") as seen:
        download(f"{server.url}/a", tmp_path / "a.txt", max_retries=2)
    assert seen.value.errno == errno.ENOSPC
    assert len(server.asked) == 2  # its size, then one try


def test_a_server_without_ranges_sends_all_again(server, tmp_path):
    server.most = 70_000
    server.ranges = False
    path = tmp_path / "a.txt"
    with pytest.raises(ConnectionError, match="70,000 of 300,000"):
        download(f"{server.url}/a", path, RIGHT)
    server.most = 10**9
    assert download(f"{server.url}/a", path, RIGHT).read_bytes() == BODY


def test_halves_of_two_files_are_never_joined(server, tmp_path):
    server.most = 70_000
    path = tmp_path / "a.txt"
    with pytest.raises(ConnectionError):
        download(f"{server.url}/a", path, max_retries=1)
    server.most = 10**9
    server.tag = '"two"'
    server.body = bytes(len(BODY))  # replaced, of equal size
    assert download(f"{server.url}/a", path).read_bytes() == server.body


def test_a_wrong_checksum_leaves_nothing(server, tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"the old file")
    with pytest.raises(ValueError, match=f"a.txt: sha256 {RIGHT}, expected 0"):
        download(f"{server.url}/a", path, "0" * 64)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"the old file"]


def test_what_is_not_there_says_so(server, tmp_path):
    with pytest.raises(FileNotFoundError, match="answers 404"):
        download(f"{server.url}/missing", tmp_path / "a")
    server.url_off = "http://localhost:1/a"
    with pytest.raises(
        ConnectionError,
        match=(r'without a network there is load_documents\("stories"\)'),
    ):
        download(server.url_off, tmp_path / "a")
    with pytest.raises(ConnectionError, match="stories"):
        list(
            load_documents(
                "hub:o/d/f.txt", server="http://localhost:1", folder=tmp_path
            )
        )
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.fixture
def raw_server():
    "A server that sends the bytes of a list as they are, then hangs up or breaks."
    listener = socket.create_server(("localhost", 0))
    found = SimpleNamespace(
        url=f"http://localhost:{listener.getsockname()[1]}/a",
        answers=[],
        breaks=[],
        num_asked=0,
    )

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.recv(1 << 16)
            i = min(found.num_asked, len(found.answers) - 1)
            found.num_asked += 1
            with contextlib.suppress(OSError):
                connection.sendall(found.answers[i])
            if found.breaks[min(i, len(found.breaks) - 1)]:  # a reset, not an end
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.close()

    threading.Thread(target=serve, daemon=True).start()
    yield found
    listener.close()


PLAIN = b"HTTP/1.0 200 OK\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_break_is_no_end_where_nobody_says_the_size(raw_server, tmp_path):
    raw_server.answers = [PLAIN + 70_000 * b"x"]
    raw_server.breaks = [True]
    path = tmp_path / "a.txt"
    with pytest.raises(ConnectionError, match=r"^a\.txt: the line broke at .* bytes,"):
        download(raw_server.url, path, max_retries=2)
    assert not [*tmp_path.iterdir()]
    assert raw_server.num_asked == 3  # for its size, and two tries
    raw_server.breaks = [True, True, True, True, False]
    raw_server.answers = [*(4 * [PLAIN + 999 * b"x"]), PLAIN + BODY]
    assert download(raw_server.url, path, max_retries=2).read_bytes() == BODY
    assert raw_server.num_asked == 5


def test_a_chunked_answer_that_breaks_off_is_told(raw_server, tmp_path):
    half = CHUNKED + b"4\r\nabcd\r\n400\r\nxxxx"
    raw_server.answers = [half]
    raw_server.breaks = [False]
    path = tmp_path / "a.txt"
    with pytest.raises(ConnectionError, match=r"the line broke at .* bytes, and"):
        download(raw_server.url, path, max_retries=1)
    assert not [*tmp_path.iterdir()]
    whole = CHUNKED + b"4\r\nabcd\r\n2\r\nef\r\n0\r\n\r\n"
    raw_server.answers = [*(4 * [half]), whole]
    assert download(raw_server.url, path).read_bytes() == b"abcdef"


def test_an_answer_that_is_no_http_is_told(raw_server, tmp_path):
    raw_server.answers = [b"hello\r\n\r\n"]
    raw_server.breaks = [False]
    with pytest.raises(ConnectionError, match=r"^cannot reach http://localhost.*hello"):
        download(raw_server.url, tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["my owner/set", "own/my set", "own/s?t", "ö/set"])
def test_names_that_the_hub_cannot_have_are_refused(name, tmp_path):
    for source in (f"hub:{name}", f"hub:{name}/a.txt"):
        with pytest.raises(ValueError, match=r"^a name on the hub has letters,"):
            list(load_documents(source, folder=tmp_path, server="http://localhost:1"))
    assert not [*tmp_path.iterdir()]


def test_a_file_of_the_hub_is_kept(server, tmp_path, monkeypatch):
    server.body = b'{"text": "from afar"}\n'
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path))
    for _ in range(2):
        assert list(
            load_documents("hub:own/set/some/f.jsonl", server=server.url, revision="v1")
        ) == ["from afar"]
    assert (tmp_path / "own/set/v1/some/f.jsonl").exists()
    assert len(server.asked) == 2  # its size, then itself
    with pytest.raises(ValueError, match="sha256"):
        list(read_hub_file("own/set/f.jsonl", sha256="0" * 64, server=server.url))


# --- data sets of the hub


def parquet_bytes(texts):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    held = io.BytesIO()
    parquet.write_table(pa.table({"text": texts}), held)
    return held.getvalue()


def two_texts(file):
    return [f"{file}, one", f"{file}, two"]


TINY = [f"data/train-0000{i}-of-00004-2d5a1467fff1081{i}.parquet" for i in range(4)]
TINY_VALID = ["data/validation-00000-of-00001-869c898b519ad725.parquet"]
OPEN = [f"plain_text/train-{i:05}-of-00080.parquet" for i in range(80)]
HUB = {
    ("roneneldan/TinyStories", "main"): [
        ".gitattributes",
        "README.md",
        "TinyStories-train.txt",
        "TinyStories-valid.txt",
        "TinyStories_all_data.tar.gz",
        *TINY_VALID,
        *TINY,
    ],
    ("Skylion007/openwebtext", "main"): ["README.md", "openwebtext.py", *OPEN[::-1]],
    ("own/set", "refs/convert/parquet"): [
        "default/partial-train/0000.parquet",
        "default/test/0000.parquet",
        "default/train/0001.parquet",
        "default/train/0000.parquet",
        "default/trained/0000.parquet",
    ],
    ("own/set", "main"): [
        "train.jsonl",
        "test.parquet",
        "a b/train.parquet",
        "upper/Train-0.parquet",
    ],
    ("own/bad", "main"): ["../../train/0.parquet"],
}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server at the hub's own address, with the files of `HUB`.

    The answers have the form of the hub's: `siblings` with their `rfilename`,
    which `huggingface_hub` reads as well; a slash in a revision is %2F.
    """
    paths = {}
    for (name, revision), names in HUB.items():
        branch = revision.replace("/", "%2F")
        paths[f"/api/datasets/{name}/revision/{branch}"] = json.dumps(
            {"id": name, "siblings": [{"rfilename": file} for file in names]}
        ).encode()
        for file in names:
            paths[f"/datasets/{name}/resolve/{branch}/{file.replace(' ', '%20')}"] = (
                file
            )
    paths["/api/datasets/own/broken/revision/main"] = b'{"siblings": [{"rfi'
    paths["/api/datasets/own/other/revision/main"] = b'["a list"]'

    class Handler(BaseHTTPRequestHandler):
        asked = []

        def do_GET(self):
            if self.path not in paths:
                return self.send_error(404)
            self.asked.append(self.path)
            body = paths[self.path]
            if isinstance(body, str):
                body = parquet_bytes(two_texts(body))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, *args):
            pass

    made = ThreadingHTTPServer(("localhost", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    opened = documents._open_url

    def redirected(url, *rest):
        assert url.startswith("https://huggingface.co/"), url
        return opened(
            url.replace(
                "https://huggingface.co", f"http://localhost:{made.server_port}"
            ),
            *rest,
        )

    monkeypatch.setattr(documents, "_open_url", redirected)
    monkeypatch.setenv("TFORMER_CACHE", str(tmp_path / "cache"))
    yield Handler
    made.shutdown()
    made.server_close()


def files_asked(hub):
    "The files that a server was asked for, in order, each once."
    found = [
        path.split("/resolve/")[1].partition("/")[2]
        for path in hub.asked
        if "/resolve/" in path
    ]
    return list(dict.fromkeys(found))


def lines_of_the_notebook():
    "The lines by which the notebook of documents says that two corpora are loaded."
    from test_project import ROOT

    page = json.loads((ROOT / "nbs/package/corpora/documents.ipynb").read_text("utf-8"))
    text = "\n".join(
        "".join(cell["source"])
        for cell in page["cells"]
        if cell["cell_type"] == "markdown"
    )
    return re.search(r"```python\n(load_documents.*?)\n```", text, re.S)[1].split("\n")


def test_the_lines_of_the_notebook_load_the_two_corpora(hub):
    pytest.importorskip("pyarrow")
    tiny, open_web = lines_of_the_notebook()
    for line, files in ((tiny, TINY), (open_web, OPEN)):
        hub.asked.clear()
        texts = list(eval(line, {"load_documents": load_documents}))
        assert texts == [text for file in files for text in two_texts(file)]
        assert files_asked(hub) == files
        n = len(hub.asked)  # then nothing is asked for again
        assert list(eval(line, {"load_documents": load_documents})) == texts
        assert len(hub.asked) == n


def test_a_split_of_the_hub_is_that_split_alone(hub):
    pytest.importorskip("pyarrow")
    source = "hub:roneneldan/TinyStories"
    assert list(load_documents(source, split="validation")) == two_texts(TINY_VALID[0])
    assert files_asked(hub) == TINY_VALID
    converted = dict(split="train", revision="refs/convert/parquet")
    assert list(load_documents("hub:own/set", **converted)) == [
        text for i in range(2) for text in two_texts(f"default/train/000{i}.parquet")
    ]
    assert list(load_documents("hub:own/set")) == two_texts("a b/train.parquet")
    with pytest.raises(
        ValueError,
        match=(
            "TinyStories has no Parquet file of the split 'tests' at main, it has "
            "data/train-00000"
        ),
    ):
        list(load_documents(source, split="tests"))


def test_files_of_a_data_set_are_downloaded_when_it_is_their_turn(hub):
    pytest.importorskip("pyarrow")
    assert list(load_documents("hub:Skylion007/openwebtext", 3)) == [
        *two_texts(OPEN[0]),
        f"{OPEN[1]}, one",
    ]
    assert files_asked(hub) == OPEN[:2]


def test_a_data_set_that_the_hub_does_not_list_is_refused(hub, tmp_path):
    for name in ("own/broken", "own/other"):
        with pytest.raises(ValueError, match=f"no list of the files of {name} at main"):
            list(load_documents(f"hub:{name}"))
    assert not list((tmp_path / "cache").rglob("*.json"))  # a new try asks again
    with pytest.raises(FileNotFoundError, match="answers 404"):
        list(load_documents("hub:own/none"))
    with pytest.raises(ValueError, match="hub:owner/dataset/file"):
        list(load_documents("hub:own/bad"))


# --- token files


@given(
    texts=st.lists(
        st.text(st.characters(exclude_categories=["Cs"])), min_size=1
    ).filter(any),
    end=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_token_file_holds_the_documents(tmp_path_factory, texts, end):
    path = tmp_path_factory.mktemp("tokens") / "a.tok"
    write_token_file(path, texts, END, end_token="<|end|>" if end else None)
    file = TokenFile(path, END)
    texts = [text for text in texts if text]
    rows = [END.encode(text, disallowed_special=()) + [257] * end for text in texts]
    assert [file[i].tolist() for i in range(len(file))] == rows
    assert file.ids.tolist() == [i for row in rows for i in row]
    assert file.lengths.tolist() == [len(row) for row in rows]
    assert file.starts.tolist() == [sum(map(len, rows[:i])) for i in range(len(rows))]
    assert file[-1].tolist() == rows[-1]
    with pytest.raises(IndexError):
        file[len(rows)]


def test_special_tokens_in_a_text_are_text(tmp_path):
    write_token_file(tmp_path / "a", ["x<|end|>y"], END, end_token="<|end|>")
    ids = TokenFile(tmp_path / "a", END).ids
    assert ids.tolist().count(257) == 1 and ids[-1] == 257
    with pytest.raises(ValueError, match="no token"):
        write_token_file(tmp_path / "b", ["x"], END, end_token="<|none|>")


def test_ids_take_two_bytes_or_four(tmp_path):
    for size, width in ((65_536, 2), (65_537, 4)):
        wide = Tokenizer(Vocabulary([], {"<|last|>": size - 1}))
        assert wide.vocab_size == size
        write_token_file(tmp_path / "a", ["ab"], wide, end_token="<|last|>")
        file = TokenFile(tmp_path / "a", wide)
        assert file.header.bytes_per_id == file.ids.itemsize == width
        assert file.ids.tolist() == [97, 98, size - 1]
        assert (tmp_path / "a").stat().st_size == 64 + 8 * (1 if width == 2 else 2) + 8


def test_a_foreign_or_truncated_file_is_refused(tmp_path):
    path = tmp_path / "a.tok"
    write_token_file(path, ["some text", "and more"], BYTES)
    with pytest.raises(ValueError, match="written with another tokenizer"):
        TokenFile(path, END)
    assert len(TokenFile(path)) == 2  # not compared
    whole = path.read_bytes()
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        with pytest.raises(ValueError, match=r"is truncated|is no token file"):
            TokenFile(path, BYTES)
    for damaged, says in (
        (whole + b"x", "damaged: 121 bytes of 120"),
        (whole.replace(b"TFTOKENS", b"TFTOKENZ"), "no token file"),
        (whole[:8] + b"\2" + whole[9:], "version 2, expected 1"),
        (bytes(64) + whole[64:], "no token file"),
        (b"some text, longer than a header of " * 9, "no token file"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=says):
            TokenFile(path, BYTES)
    with pytest.raises(FileNotFoundError):
        TokenFile(tmp_path / "none")


def test_a_failure_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.tok"
    write_token_file(path, ["the old text"], BYTES)
    old = path.read_bytes()

    def broken():
        yield "x" * 3_000_000
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="broke"):
        write_token_file(path, broken(), BYTES)
    for texts in ([], ["", ""]):
        with pytest.raises(ValueError, match="the corpus is empty"):
            write_token_file(path, texts, BYTES)
    with pytest.raises(ValueError, match="text must be a str"):
        write_token_file(path, [b"bytes"], BYTES)
    assert path.read_bytes() == old and len(list(tmp_path.iterdir())) == 1


def test_tokenizers_that_differ_have_other_hashes():
    some = [
        Vocabulary([]),
        Vocabulary([(b"a", b"b")]),
        Vocabulary([(b"b", b"a")]),
        Vocabulary([], ["<|end|>"]),
        Vocabulary([], ["<|eos|>"]),
    ]
    assert len({tokenizer_hash(Tokenizer(v)) for v in some}) == 5
    assert tokenizer_hash(END) == tokenizer_hash(
        Tokenizer(Vocabulary([(b"a", b"b")], ["<|end|>"]))
    )
    with pytest.raises(ValueError, match="tokenizer must be Tokenizer"):
        tokenizer_hash("gpt2")


def test_the_folder_of_a_token_file_is_made(tmp_path):
    path = tmp_path / "not" / "yet" / "a.tok"
    write_token_file(path, ["some text"], BYTES)
    assert len(TokenFile(path, BYTES)) == 1


@plain_only
def test_processes_write_the_same_file(tmp_path):
    texts = list(load_documents("pydocs", 300)) * 12
    tokenizer = Tokenizer.train(texts[:100], 400)
    for workers in (1, 2):
        write_token_file(tmp_path / f"{workers}", texts, tokenizer, num_workers=workers)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()
    assert (tmp_path / "1").stat().st_size > 400_000


def test_ids_travel_as_bytes():
    ids, lengths = DocumentEncoder(BYTES)(["ab", "c"])
    assert np.frombuffer(ids, "<u2").tolist() == [97, 98, 99]
    assert lengths == [2, 1]


PEAK = """
import resource, sys
from tformer.corpora.documents import *
from tformer.text.tokenizer import Tokenizer
unit = "".join(f"word{i} and some more of it. " for i in range(40))
def texts(size):
    for i in range(size // len(unit)):
        yield f"{i} {unit}"
tokenizer = Tokenizer.train([unit], 500)
write_token_file(sys.argv[1], texts(int(sys.argv[2])), tokenizer)
header = TokenFileHeader.from_file(sys.argv[1])
print(header.n_ids, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.nightly
@plain_only
@pytest.mark.skipif(sys.platform != "linux", reason="counts kilobytes")
def test_the_memory_of_writing_does_not_grow(tmp_path):
    peak = {}
    n_ids = {}
    for megabytes in (5, 30):
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                PEAK,
                str(tmp_path / "a.tok"),
                str(megabytes * 1_000_000),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        n_ids[megabytes], peak[megabytes] = map(int, done.stdout.split())
    assert n_ids[30] > 5.9 * n_ids[5]
    assert peak[30] - peak[5] < 4_000  # kilobytes, for 25 MB more


# --- near-duplicates


def runs_of(text, n=5):
    words = text.lower().split()
    return {tuple(words[i : i + n]) for i in range(max(1, len(words) - n + 1))}


def slow_pairs(texts, alike):
    runs = [runs_of(text) for text in texts]
    scores = {
        (i, j): len(runs[i] & runs[j]) / len(runs[i] | runs[j])
        for i, j in combinations(range(len(texts)), 2)
    }
    return {pair: score for pair, score in scores.items() if score >= alike}


def test_near_duplicates_are_those_of_all_pairs():
    texts = list(load_documents("pydocs", 250))
    rng = random.Random(1)
    for text in texts[:30]:
        words = text.split()
        for i in rng.sample(range(len(words)), len(words) // 30):
            words[i] = "changed"
        texts.append(" ".join([*words, "more"]))  # none is equal
    slow = slow_pairs(texts, 0.6)
    found = {(i, j): score for i, j, score in find_near_duplicates(texts, 0.6)}
    assert found == slow and len(slow) >= 20
    few = slow_pairs(texts, 0.3)
    loose = {(i, j) for i, j, _ in find_near_duplicates(texts, 0.3)}
    assert loose <= {*few} and len(loose) > 0.8 * len(few)


def test_equal_and_short_texts_are_compared():
    assert find_near_duplicates(["one two", "One  TWO", "two one", "x"]) == [
        (0, 1, 1.0)
    ]
    assert find_near_duplicates(["", " ", "a"]) == [(0, 1, 1.0)]
    assert find_near_duplicates([]) == []
    assert len(shingles("a b c d e f g")) == 3
    assert json.loads(json.dumps(find_near_duplicates(["a"] * 3))) == [
        [0, 1, 1.0],
        [0, 2, 1.0],
    ]


def test_equal_texts_are_compared_once():
    "A million pairs among 1,500 would tell nothing more."
    words = [f"word{i}" for i in range(60)]
    one = " ".join(words)
    two = " ".join(words[:-1])
    found = find_near_duplicates([two] + [one] * 1500 + [two])
    assert [pair[:2] for pair in found] == [(0, 1), (0, 1501)] + [
        (1, j) for j in range(2, 1501)
    ]
    assert found[0][2] == pytest.approx(55 / 56)


def test_nothing_is_downloaded_into_the_home_folder_by_tests():
    assert not os.path.exists(os.path.expanduser("~/.cache/tformer/own"))


def test_runs_of_no_word_are_refused():
    for call in (
        lambda: shingles("a b", 0),
        lambda: find_near_duplicates(["a b", "c d e"], n=0),
    ):
        with pytest.raises(ValueError, match="n must be a whole number of at least 1"):
            call()
    with pytest.raises(ValueError, match="bands must be a whole number of at least 1"):
        find_near_duplicates(["a b", "c d e"], bands=0)
