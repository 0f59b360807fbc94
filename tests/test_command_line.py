"""The command: what it writes, how it ends, and what it does not import."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

import tformer
import tformer.__main__ as command
from conftest import ROOT, run
from tformer.__main__ import load_storyteller, main
from tformer.bundle import ModelBundle
from tformer.corpora import bilingual, stories
from tformer.inference.sampler import SamplingParams
from tformer.training.checkpoints import CheckpointManager

COMMAND = [sys.executable, "-m", "tformer"]
ENV = {**os.environ, "PYTHONUNBUFFERED": ""}  # what is not flushed is not there


def start(*args, **kwargs):
    "The command, running."
    return subprocess.Popen(
        [*COMMAND, *args], cwd=ROOT, env=ENV, stderr=subprocess.PIPE, **kwargs
    )


@pytest.fixture(scope="module")
def bundle():
    return load_storyteller("stories")


def test_the_same_seed_writes_the_same_story(capsys):
    def written(*args):
        assert main(["Once there was", "--max-new-tokens", "25", *args]) == 0
        out, err = capsys.readouterr()
        assert not err and out.startswith("Once there was") and out.endswith("\n")
        return out

    assert written("--seed", "1") == written("--seed", "1")
    assert len({written("--seed", str(n)) for n in range(4)}) > 1
    assert len({written() for _ in range(4)}) > 1  # without a seed each is another
    greedy = written("--temperature", "0")
    assert greedy == written("--top-k", "1") == written("--top-p", "1e-9")
    assert greedy != written("--temperature", "0", "--model", "stories_mha")
    assert greedy != written("--temperature", "3", "--seed", "1")


def test_a_story_may_begin_with_nothing_or_with_anything(capsys, bundle):
    assert main(["--seed", "0"]) == 0
    assert len(capsys.readouterr().out.split()) > 10
    for prompt in ("Zoë saw 🐻 and 熊", "<|endoftext|>", " ", "\x00\n", "-"):
        story = "".join(
            bundle.stream(
                prompt, max_new_tokens=3, sampling_params=SamplingParams(seed=0)
            )
        )
        assert story.startswith(prompt) and story != prompt


def test_as_many_tokens_as_asked_for_or_as_fit(bundle):
    def pieces(prompt, n):
        return [*bundle.stream(prompt, max_new_tokens=n)]

    long = pieces("Tom was a", 40)
    assert long[0] == "Tom was a" and len(long) == 41
    assert pieces("Tom was a", 7) == long[:8]
    room = bundle.model.max_len - 2
    full = "a" * room
    assert len(bundle.tokenizer.encode(full)) == room
    assert len(pieces(full, None)) == 2 and len(pieces(full, 1000)) == 2
    with pytest.raises(ValueError, match=f"has {room + 1} tokens.* at most {room} "):
        pieces(full + "a", None)


def test_a_story_ends_before_a_stop_string(capsys):
    def written(*args):
        assert main(["Once there was", "--temperature", "0", *args]) == 0
        return capsys.readouterr().out

    whole = written("--max-new-tokens", "40")
    assert written("--stop", ".") == whole.split(".")[0] + "\n"
    assert written("--stop", "garden", "--stop", "Mia. One") == (
        whole.split("Mia. One")[0] + "\n"
    )
    assert written("--stop", "Once", "--max-new-tokens", "40") == whole


WRONG = [
    (["--temperature", "-1"], "--temperature.* from 0 on, got '-1'"),
    (["--temperature", "inf"], "--temperature.* from 0 on, got 'inf'"),
    (["--temperature", "warm"], "--temperature.* from 0 on, got 'warm'"),
    (["--top-p", "1.1"], "--top-p.* above 0 and at most 1, got '1.1'"),
    (["--top-k", "0"], "--top-k.* from 1 on, got '0'"),
    (["--max-new-tokens", "2.5"], "--max-new-tokens.* from 1 on, got '2.5'"),
    (["--seed", str(2**63)], f"--seed.* from 0 to .*, got '{2**63}'"),
    (["--seed"], "--seed"),
    (["--stop", ""], "--stop.* at least one character, got ''"),
    (["--stop"], "--stop"),
    (["--stop", "\udce9"], "surrogate"),
    (["--sed", "1"], "--sed"),
    (["Once", "upon"], "upon"),
    (["--model", "poems"], "'poems'.* carries .*stories.* folder"),
    (["--model", "translator"], "give the sentence that 'translator' is to"),
    (
        ["--model", "translator", "Hi", "--seed", "1"],
        "--seed .*'translator' translates",
    ),
    (
        ["--model", "translator", "Hi.", "--temperature", "1", "--stop", "a"],
        "--temperature and --stop .* 'translator' translates",
    ),
    (["--model", "translator", "dog " * 90], r"takes \d+ tokens"),
    (["--model", "bert"], "'bert' is a BertMaskedLM"),
    (["--model", "."], "card.json"),
    (["Once " * 300], r"has \d+ tokens.* at most 254"),
    (["\udce9"], "surrogate"),
]


@pytest.mark.parametrize("args, told", WRONG, ids=[told for _, told in WRONG])
def test_what_cannot_be_is_told_in_one_line(args, told, capsys, monkeypatch):
    monkeypatch.chdir(ROOT / "tests")
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert re.fullmatch(f"tformer: .*{told}.*\n", err), err


def test_no_traceback_leaves_the_process():
    done = subprocess.run(
        [*COMMAND, "--seed", "x"], cwd=ROOT, text=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tformer: ") and done.stderr.count("\n") == 1
    for flag in ("--version", "--help"):
        with open("/dev/full", "w", encoding="utf-8") as full:
            done = subprocess.run(
                [*COMMAND, flag],
                cwd=ROOT,
                text=True,
                check=False,
                stdout=full,
                stderr=subprocess.PIPE,
            )
        assert done.returncode == 2 and "No space left" in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


def test_a_folder_is_a_model(tmp_path, capsys, bundle):
    bundle.save(tmp_path / "mine")
    args = ["Once there was", "--temperature", "0", "--model"]
    assert main([*args, str(tmp_path / "mine")]) == main([*args, "stories"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert main([*args, str(tmp_path / "mine")]) == 2
    assert "config.json is not the file" in capsys.readouterr().err


def test_the_translator_translates(capsys):
    for source, target in (
        ("The dog eats.", "Le chien mange."),
        ("The cat sees the dog.", "Le chat voit le chien."),
    ):
        assert main(["--model", "translator", source]) == 0
        assert tuple(capsys.readouterr()) == (f"{target}\n", "")


def test_words_that_the_translator_has_never_read_are_told(capsys):
    assert main(["--model", "translator", "The dog sleeps, and sleeps well."]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Le chien") and out.count("\n") == 1
    assert err == (
        "tformer: 'translator' has never read 'sleeps', 'and', 'well': what it makes "
        "of this is a guess\n"
    )
    for pair in bilingual.generate_pairs(2000, 3):
        assert not command._unknown_words(pair.source), pair.source


def test_the_model_of_the_tour_tells_a_story(capsys):
    args = ["Once there was", "--max-new-tokens", "9", "--temperature", "0"]
    assert main([*args, "--model", "tour"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Once there was") and len(out) == 24 and not err


def written(capsys, *args):
    assert main([*args, "--max-new-tokens", "9", "--seed", "1"]) == 0
    return capsys.readouterr()


@pytest.mark.parametrize("model", [[], ["--model", "stories_mha"], ["--model", "tour"]])
@pytest.mark.parametrize(
    "prompt, nearest",
    [
        ("Once upon a time", "Once there was a"),
        ("once there was", "Once there was a"),
        ("There lived a king.", "There was a"),
        ("The dragon slept", "Th"),
        ("Mia", None),
    ],
)
def test_a_beginning_that_the_stories_do_not_know_is_told(
    prompt, nearest, model, capsys
):
    out, err = written(capsys, prompt, *model)
    if nearest is None:
        assert out.startswith(prompt) and not err
        return
    begun = re.fullmatch(
        r"tformer: the stories that this model has read begin with (.*), and not with "
        r"(.*): this one begins with '(.*)'\n",
        err,
    )
    known, given, taken = begun.groups()
    assert given == repr(prompt) and repr(taken) in known.split(", ")
    assert taken.startswith(nearest) or nearest == "Th"
    assert out.startswith(taken)
    assert known.count(", ") >= 3
    again = written(capsys, taken, *model)
    assert tuple(again) == (out, "")


def test_a_beginning_that_the_stories_know_is_taken_as_it_is():
    for story in stories.generate_stories(40, 5, 1):
        words = story.split()
        for n in (1, 2, 3, 5, 8, 12, len(words)):
            assert command.nearest_beginning(" ".join(words[:n])) is None, words[:n]
        cut = story[: len(words[0]) // 2 + 1]  # in the middle of a word
        assert command.nearest_beginning(cut) is None
    for known in ("", " ", "Once there was", "Tom was a", "Mia and Tom were", "O"):
        assert command.nearest_beginning(known) is None
    for unknown, nearest in (
        ("Once upon", "Once there was a"),
        ("once", "Once there was a"),
        ("Mia said", "Mia was a"),
        ("Zoë was a", "Zoe was a"),
        ("🐻", "Once there was a"),
        ("Tom.", "Tom was a"),
        ("Mia and Ben are playing.", "Mia and Ben were friends."),
    ):
        assert command.nearest_beginning(unknown) == nearest
        assert command.nearest_beginning(nearest) is None


def test_the_beginning_of_ones_own_model_is_ones_own(tmp_path, capsys, bundle):
    bundle.save(tmp_path / "mine")
    out, err = written(capsys, "Once upon a time", "--model", str(tmp_path / "mine"))
    assert out.startswith("Once upon a time") and not err


def test_help_and_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tformer {tformer.__version__}\n"
    for flag in ("--help", "-h"):
        assert main([flag]) == 0
        text = capsys.readouterr().out
        for word in (
            "PROMPT",
            "--max-new-tokens",
            "--temperature",
            "--top-k",
            "--top-p",
            "--seed",
            "--stop",
            "--model",
            "--version",
            "default: 0.7",
        ):
            assert word in text
        assert text.isascii() and max(map(len, text.splitlines())) <= 80


def test_each_token_comes_at_once_until_the_pipe_is_closed():
    story = start("Once there was", "--temperature", "0", stdout=subprocess.PIPE)
    parts = [os.read(story.stdout.fileno(), 1 << 16) for _ in range(4)]
    assert parts[0] == b"Once there was" and max(map(len, parts[1:])) < 40
    story.stdout.close()
    assert story.wait() == 141 and not story.stderr.read()


def test_help_may_be_cut_short():
    helped = start("--help", stdout=subprocess.PIPE)
    helped.stdout.close()
    assert helped.wait() in (1, 141) and not helped.stderr.read()


def test_an_interrupt_ends_the_story_with_a_line(capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        yield "Once"
        raise KeyboardInterrupt

    monkeypatch.setattr(ModelBundle, "stream", interrupted)
    assert main(["Once"]) == 130
    assert tuple(capsys.readouterr()) == ("Once", "\n")


def test_the_folder_of_a_training_tells_a_story(capsys, bundle, tmp_path):
    saved = CheckpointManager(tmp_path, tokenizer=bundle.tokenizer)
    saved.save(3, bundle.model, {})
    args = ["Once there was", "--max-new-tokens", "9", "--temperature", "0"]
    told = []
    for name in ("stories", str(tmp_path), str(saved.path(3))):
        assert main([*args, "--model", name]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] == told[2]
    (saved.path(3) / "vocabulary.json").unlink()
    assert main([*args, "--model", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith(
        f"tformer: {saved.path(3)} has no vocabulary.json"
    )
    assert err.count("\n") == 1


def test_a_folder_of_hugging_face_is_told_apart(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert main(["Once", "--model", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1
    assert err.startswith(f"tformer: {tmp_path} holds a Hugging Face checkpoint")


def test_an_interrupt_ends_the_process():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            """
import signal, sys
import tformer.__main__ as command
signal.signal(signal.SIGINT, signal.default_int_handler)   # a job may ignore it
command.load_storyteller = lambda name: signal.raise_signal(signal.SIGINT)
sys.exit(command.main(["Once"]))
""",
        ],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\n")


INTERRUPTED_CLASS = """
import signal, sys
import tformer.__main__ as command
signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupts:
    def __set_name__(self, *given):  # an error here becomes a RuntimeError
        for _ in range({times}):
            signal.raise_signal(signal.SIGINT)

def load_storyteller(name):
    type("Loaded", (), dict(field=Interrupts()))
    print("loaded")

command.load_storyteller = load_storyteller
sys.exit(command.main(["Once"]))
"""


@pytest.mark.parametrize(("times", "told"), [(1, "loaded\n"), (2, "")])
def test_the_first_interrupt_waits_for_the_model_and_the_second_does_not(times, told):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_CLASS.format(times=times)],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (130, told), done.stderr


def test_a_thread_may_tell_a_story_too(capsys):
    "Only the main thread can say what an interrupt does."
    ends = []
    args = ["Once", "--max-new-tokens", "3"]
    thread = threading.Thread(target=lambda: ends.append(main(args)))
    thread.start()
    thread.join()
    assert ends == [0] and capsys.readouterr().err == ""


@pytest.mark.nightly
@pytest.mark.parametrize("seconds", [0.4, 0.8, 1.0, 1.2, 1.4, 1.6])
def test_an_interrupt_at_any_moment(seconds):
    """Also while torch is imported; no story without a limit ends as soon as that.

    An interrupt of code that Python compiles from a string, as torch does while it is
    imported, lets ``python -m`` end by the signal even though `main` returns 130.  A
    shell gives both the same number.  On a slow machine the signal may come before
    `main` begins; then Python tells it.
    """
    story = start("Once there was", "--temperature", "9", stdout=subprocess.PIPE)
    time.sleep(seconds)
    story.send_signal(signal.SIGINT)
    _, told = story.communicate()
    assert story.returncode in (0, 130, -signal.SIGINT), told
    from_python = b"in main" not in told and b"import" in told
    assert told.strip() == b"" or from_python, told


# what needs no model imports none of these, and a story none of those
HEAVY = {"torch", "numpy", "safetensors", "regex", "tqdm", "rich"}
NEVER = {
    "matplotlib",
    "transformers",
    "pyarrow",
    "sacrebleu",
    "rich",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "tformer.plot",
    "tformer.check",
}


@pytest.mark.parametrize(
    "args, status, absent",
    [
        (["--help"], 0, HEAVY),
        (["--version"], 0, HEAVY),
        (["--seed", "x"], 2, HEAVY),
        (["Tom was a", "--max-new-tokens", "20", "--seed", "1"], 0, NEVER),
    ],
)
def test_only_what_is_needed_is_imported(args, status, absent, capsys):
    done = run(
        sys.executable,
        "-c",
        """
import sys
from tformer.__main__ import main
status = main(sys.argv[1:])
print(status, *sys.modules, sep="\\0")
""",
        *args,
    )
    written, *modules = done.split("\0")
    assert not {*modules} & absent
    assert ("torch" in modules) == (absent is NEVER)
    if "--version" in args or absent is NEVER:  # as in a process, so in a call
        main(args)
        assert written == f"{capsys.readouterr().out}{status}"


def test_importing_the_package_imports_no_command_line():
    done = run(sys.executable, "-c", "import sys, tformer; print(*sys.modules)")
    assert not {"typer", "torch", "tformer.__main__"} & {*done.split()}


def test_a_small_model_has_one_thread(bundle, monkeypatch):
    before = torch.get_num_threads()
    seen = []
    hook = bundle.model.register_forward_pre_hook(
        lambda *args: seen.append(torch.get_num_threads())
    )
    monkeypatch.setattr(command, "load_storyteller", lambda name: bundle)
    args = ["Once there was", "--max-new-tokens", "3"]
    try:
        torch.set_num_threads(2)
        assert main(args) == 0 and {*seen} == {1}
        assert torch.get_num_threads() == 2
        seen.clear()
        monkeypatch.setattr(command, "SMALL", 1000)
        assert main(args) == 0 and {*seen} == {2}
    finally:
        hook.remove()
        torch.set_num_threads(before)
