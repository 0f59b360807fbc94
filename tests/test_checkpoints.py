"""Checkpoints: packing, chance, whole folders, what is kept, places, rows."""

import errno
import json
import os
import random
import signal
import sys
import threading
import warnings
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch.utils.data import DataLoader, TensorDataset

from conftest import ROOT, run
from helpers import child, die_after, plain_only
from tformer.base.runtime import get_rng_state, isolated_eval, set_rng_state
from tformer.models.base import CONFIG_NAME, WEIGHTS_NAME
from tformer.models.llama import Llama, LlamaConfig
from tformer.text.tokenizer import Tokenizer
from tformer.training import checkpoints
from tformer.training.checkpoints import (
    STATE_NAME,
    STATE_TENSORS_NAME,
    CheckpointManager,
    History,
    ResumableBatches,
    TensorBoardLogger,
    flatten_state,
    load_training_state,
    read_checkpoint,
    require_same_config,
    save_training_state,
    unflatten_state,
    write_checkpoint,
    write_folder_atomically,
)
from tformer.training.data import RandomWindowLoader
from tformer.training.optimizers import AdamW, Muon
from tformer.training.trainer import LossMonitor


def small(width=16, **more):
    torch.manual_seed(0)
    return Llama(
        LlamaConfig(
            vocab_size=40, d_model=width, n_layers=1, n_heads=2, max_len=16, **more
        )
    )


# --- a state as tensors and text

leaves = (
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
)
nests = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=8,
)


def through_json(state):
    tensors, rest = flatten_state(state)
    tensors = {name: x.clone() for name, x in tensors.items()}
    return unflatten_state(tensors, json.loads(json.dumps(rest, allow_nan=False)))


@settings(max_examples=60, deadline=None)
@given(nests)
def test_any_nest_comes_back(state):
    assert repr(through_json(state)) == repr(state)


@pytest.mark.parametrize(
    "state",
    [
        {"$tensor": 1},
        {"$x": {"$tuple": [1]}},
        {1: 2, "1": 3},
        {(1, "a"): 0},
        [float("inf"), -float("inf")],
        ((), [], {}),
        {"a.b": 1, "a": {"b": 2}},
    ],
)
def test_marks_and_odd_keys_come_back(state):
    assert repr(through_json(state)) == repr(state)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    ],
)
def test_tensors_come_back_with_their_type(dtype):
    x = torch.tensor([[0, 1, 0], [1, 1, 0]]).to(dtype)
    for given_ in (x, x.mT, x[:, 1:], x[:0], x[0, 0]):
        back = through_json({"x": given_})["x"]
        assert back.dtype == dtype and torch.equal(back, given_)


def test_places_that_read_alike_stay_apart():
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    back = through_json(state)
    assert back["a.b"].item() == 0 and back["a"]["b"].item() == 1


def test_a_shared_tensor_is_kept_once_and_a_view_owns_its_memory():
    x = torch.arange(100.0)
    tensors, _ = flatten_state({"a": x, "b": x, "c": x[:3]})
    assert [t.numel() for t in tensors.values()] == [100, 3]
    assert tensors["state.c"].untyped_storage().nbytes() == 12


def test_a_tensor_and_a_view_of_all_of_it_come_back(tmp_path):
    x = torch.randn(3, 3)
    state = {"a": x, "b": [x.view(9)], "c": x.T, "d": x}
    write_checkpoint(tmp_path / "a", small(), state)
    _, back = read_checkpoint(tmp_path / "a")
    assert torch.equal(back["a"], x) and torch.equal(back["b"][0], x.view(9))
    assert torch.equal(back["c"], x.T) and back["d"] is back["a"]


@pytest.mark.parametrize(
    "state, place",
    [
        ({"a": {1, 2}}, "state.a is of type set"),
        ({"a": [0, object()]}, "state.a.1 is of type object"),
        ([np.ones(1)], "state.0 is of type ndarray"),
        ({"f": len}, "state.f is of type builtin_function_or_method"),
    ],
)
def test_what_cannot_be_kept_is_named(state, place):
    with pytest.raises(ValueError, match=place):
        flatten_state(state)


def test_numbers_of_numpy_are_numbers():
    state = [
        np.float64(0.1),
        np.float32(0.5),
        np.int64(3),
        np.bool_(True),
        np.float64("nan"),
        {np.int64(1): 2},
    ]
    assert repr(through_json(state)) == "[0.1, 0.5, 3, True, nan, {1: 2}]"


@pytest.mark.parametrize(
    "make",
    [
        lambda p: AdamW(p, 1e-2),
        lambda p: Muon(p, 1e-2),
        lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
        lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    ],
)
def test_the_state_of_an_optimizer_comes_back(make):
    x = torch.nn.Parameter(torch.ones(3, 3))
    y = torch.nn.Parameter(torch.ones(3, 3))
    ours = make([x])
    other = make([y])
    for _ in range(3):
        (x**2).sum().backward()
        ours.step()
    other.load_state_dict(through_json(ours.state_dict()))
    y.data.copy_(x.data)
    for p, optimizer in ((x, ours), (y, other)):
        p.grad = torch.full((3, 3), 0.5)
        optimizer.step()
    assert torch.equal(x, y)


# --- chance


def draws():
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.randn(),
        torch.rand(1).item(),
        torch.randn(1).item(),
    ]


def test_random_states_are_restored_from_files():
    random.gauss(0, 1), np.random.randn()  # each keeps one more
    state = through_json(get_rng_state())
    first = draws()
    second = draws()
    set_rng_state(state)
    assert draws() == first and draws() == second


def test_aside_restores_the_mode_of_every_module():
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.Dropout())
    model[0].eval()
    with isolated_eval(model):
        assert not model.training and not model[1].training
    assert [m.training for m in model.modules()] == [True, False, True]


# --- whole or not at all


def test_a_folder_appears_at_once(tmp_path):
    folder = tmp_path / "a" / "b"

    def write(path):
        assert not folder.exists() and path.parent == folder.parent
        (path / "x").write_text("new")

    write_folder_atomically(folder, write)
    assert [p.name for p in folder.parent.iterdir()] == ["b"]
    with pytest.raises(ValueError, match="b is there already"):
        write_folder_atomically(folder, write)


def test_what_a_process_of_the_same_number_left_is_removed(tmp_path):
    "In a container every training is process number 1."
    saved = CheckpointManager(tmp_path, keep_last=1)
    for step in (1, 2):
        left = tmp_path / f"step-{step:06d}.{os.getpid()}.part"
        left.mkdir()
        (left / WEIGHTS_NAME).write_bytes(b"half")
        saved.save(step, small(), {})
        left.mkdir()  # while step 1 was being forgotten
        (left / "x").write_bytes(b"half")
    assert saved.steps() == [2]
    saved.save(3, small(), {})
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]


def together(*calls):
    "Run functions in threads; what each of them raised, in no order."
    errors = []

    def run_one(call):
        try:
            call()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run_one, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return errors


def test_of_two_threads_that_save_one_step_one_is_refused(tmp_path):
    both = threading.Barrier(2, timeout=10)

    def write(path, text):
        (path / "x").write_text(text)
        both.wait()  # both have begun, and neither has finished
        (path / "y").write_text(text)
        both.wait()

    def call(text):
        write_folder_atomically(tmp_path / "a", lambda path: write(path, text))

    (error,) = together(lambda: call("one"), lambda: call("two"))
    assert isinstance(error, ValueError) and "a is there already" in str(error)
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    x, y = ((tmp_path / "a" / name).read_text() for name in "xy")
    assert x == y


def test_threads_may_save_into_one_folder(tmp_path):
    "While one writes, the other saves another step and throws rubbish away."
    saved = CheckpointManager(tmp_path, keep_last=2)
    begun = threading.Event()
    done = threading.Event()

    def slow():
        def write(path):
            (path / "x").write_text("half")
            begun.set()
            assert done.wait(30)
            (path / STATE_NAME).write_text("{}")

        write_folder_atomically(saved.path(9), write)

    def quick():
        assert begun.wait(30)
        try:
            for step in (1, 2, 3):
                saved.save(step, small(), {})
        finally:
            done.set()

    assert together(slow, quick) == []
    assert saved.steps() == [2, 3, 9]
    assert (saved.path(9) / "x").read_text() == "half"
    assert [*tmp_path.glob("*.part")] == []


def test_what_another_forgot_meanwhile_is_no_error(tmp_path, monkeypatch):
    saved = CheckpointManager(tmp_path, keep_last=1)
    saved.save(1, small(), {}, 2.0)
    saved.save(2, small(), {}, 1.0)
    monkeypatch.setattr(saved, "steps", lambda: [0, 1, 2])  # 0 and 1 are gone
    assert saved.metrics() == {2: 1.0}
    saved.delete_old()
    assert [p.name for p in tmp_path.iterdir()] == ["step-000002"]


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    def write(path):
        (path / "x").write_text("half")
        raise OSError(errno.ENOSPC, "no space left on device")

    with pytest.raises(OSError, match="no space"):
        write_folder_atomically(tmp_path / "a", write)
    assert not [*tmp_path.iterdir()]


def test_killed_at_any_call_a_save_is_whole_or_absent(tmp_path):
    model = small()
    n = 0

    def save_and_die():
        die_after(n, ("fsync", "rename", "replace", "mkdir", "open"))
        CheckpointManager(tmp_path / str(n), keep_last=1).save(2, model, {"n": 2})

    for n in range(60):
        saved = CheckpointManager(tmp_path / str(n), keep_last=1)
        saved.save(1, model, {"n": 1})
        done = child(save_and_die) == 0
        last = max(saved.steps())
        assert saved.load(small())["n"] == last
        assert last == 2 or not done
        saved.save(3, model, {"n": 3})  # and rubbish is thrown away
        assert [p.name for p in saved.folder.iterdir()] == ["step-000003"]
        if done:
            break
    assert done and n > 10


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    resource = pytest.importorskip("resource")
    saved = CheckpointManager(tmp_path / "run")
    saved.save(1, small(), {"x": torch.zeros(10)})

    def fill():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        saved.save(2, small(), {"x": torch.zeros(100_000)})

    assert os.waitstatus_to_exitcode(child(fill)) == 7
    assert [p.name for p in saved.folder.iterdir()] == ["step-000001"]
    assert saved.load(small())["x"].shape == (10,)


def test_the_model_of_a_checkpoint_loads_by_itself(tmp_path):
    model = small(tie_word_embeddings=True)
    write_checkpoint(tmp_path / "a", model, {})
    again = Llama.load(tmp_path / "a")
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_a_model_without_a_configuration(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight  # tied
    CheckpointManager(tmp_path).save(5, model, {})
    other = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    other[1].weight = other[0].weight
    CheckpointManager(tmp_path).load(other)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@dataclass
class Own:
    size: int = 3


@pytest.mark.parametrize("config", [Own(), {"size": 3}])
def test_a_configuration_of_its_own_is_left_alone(config, tmp_path):
    model = torch.nn.Linear(3, 3)
    other = torch.nn.Linear(3, 3)
    model.config = config
    other.config = config
    saved = CheckpointManager(tmp_path)
    saved.save(1, model, {})
    saved.load(other)
    assert torch.equal(model.weight, other.weight)
    (saved.path(1) / "config.json").write_text("{}")
    require_same_config(other, saved.path(1))


def test_a_checkpoint_is_not_written_with_the_tokenizer_of_another_model(tmp_path):
    tokenizer = Tokenizer.train(["a"], 256)
    saved = CheckpointManager(tmp_path / "x", tokenizer=tokenizer)
    with pytest.raises(
        ValueError, match=r"^the model has vocab_size 40, and the tokenizer 256 ids"
    ):
        saved.save(1, small(), {})
    assert not (tmp_path / "x").exists()
    saved.save(1, torch.nn.Linear(2, 2), {})  # which tells of no ids


def test_a_configuration_is_compared_as_json_gives_it_back(tmp_path):
    class Pairs(LlamaConfig):
        def to_dict(self):
            return super().to_dict() | {"pairs": (1, 2), "names": {0: "a"}}

    torch.manual_seed(0)
    model = Llama(Pairs(vocab_size=40, d_model=16, n_layers=1, n_heads=2))
    saved = CheckpointManager(tmp_path)
    saved.save(1, model, {})
    saved.load(model)


def test_a_field_that_an_older_file_lacks_has_its_default(tmp_path):
    saved = CheckpointManager(tmp_path)
    saved.save(1, small(), {})
    path = saved.path(1) / "config.json"
    values = json.loads(path.read_text())
    del values["tie_word_embeddings"]
    path.write_text(json.dumps(values))
    require_same_config(small(), saved.path(1))
    with pytest.raises(ValueError, match="tie_word_embeddings False there, True here"):
        require_same_config(small(tie_word_embeddings=True), saved.path(1))
    del values["d_model"]  # has none
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match="d_model None there, 16 here"):
        require_same_config(small(), saved.path(1))


def test_a_damaged_checkpoint_says_what_can_be_done(tmp_path):
    saved = CheckpointManager(tmp_path)
    for step in (1, 2):
        saved.save(step, small(), {})
    for step, then in ((2, "from step 1"), (1, "from the beginning")):
        (saved.path(step) / STATE_TENSORS_NAME).write_bytes(b"")
        with pytest.raises(
            ValueError,
            match=f"step-00000{step} is damaged: delete this folder, .* goes on {then}",
        ):
            saved.load(small(), step)


def test_what_another_process_writes_is_left_alone(tmp_path):
    saved = CheckpointManager(tmp_path, keep_last=1)
    gone = child(lambda: None) or os.getpid() + 10**7
    theirs = tmp_path / f"step-000009.{os.getppid()}.part"
    for name in (
        theirs.name,
        f"step-000008.{gone}.part",
        f"step-000007.{os.getpid()}.part",
        "step-000006.part",
    ):
        (tmp_path / name).mkdir()
    saved.save(1, small(), {})
    assert sorted(tmp_path.iterdir()) == [saved.path(1), theirs]


@pytest.mark.parametrize("name", [WEIGHTS_NAME, STATE_TENSORS_NAME, STATE_NAME])
@pytest.mark.parametrize("keep", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path, name, keep):
    saved = CheckpointManager(tmp_path)
    saved.save(1, small(), {"x": torch.ones(99)})
    path = saved.path(1) / name
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    model = small()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=f"{name} is no"):
        saved.load(model)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("name", [WEIGHTS_NAME, STATE_TENSORS_NAME])
@pytest.mark.parametrize("place", [-1, -50])
def test_a_flipped_bit_is_noticed(tmp_path, name, place):
    saved = CheckpointManager(tmp_path)
    saved.save(1, small(), {"x": torch.ones(99)})
    path = saved.path(1) / name
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
    model = small()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(
        ValueError, match=f"{name} is (no longer what was written|damaged)"
    ):
        saved.load(model)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("name", [STATE_NAME, CONFIG_NAME])
def test_each_bit_of_the_json_files_is_looked_at(tmp_path, name):
    saved = CheckpointManager(tmp_path)
    model, optimizers, data = parts()
    save_training_state(saved, 1, model, optimizers, data, 0.5)
    path = saved.path(1) / name
    written = path.read_bytes()
    model, optimizers, data = parts()
    with torch.no_grad():
        model.norm.weight.fill_(3.0)
    before = [p.clone() for p in model.parameters()]
    # 7 and 8 share no factor: each of the eight bits comes
    flips = [(place, place % 8) for place in range(0, len(written), 7)]
    if name == STATE_NAME:  # and every bit of the name under which the sums stand
        start = written.index(b"$sha256")
        flips += [(start + i, bit) for i in range(7) for bit in range(8)]
    for place, bit in flips:
        content = bytearray(written)
        content[place] ^= 1 << bit
        path.write_bytes(content)
        with pytest.raises(ValueError, match="step-000001 is damaged: delete"):
            load_training_state(saved, model, optimizers, data)
    assert all(map(torch.equal, before, model.parameters()))
    path.write_bytes(written)
    assert load_training_state(saved, model, optimizers, data) == 1


def without_sums_of_json(path):
    "A folder as it was before the JSON files had sums."
    state = json.loads(path.read_text())
    for name in (STATE_NAME, CONFIG_NAME):
        state["$sha256"].pop(name, None)
    path.write_text(json.dumps(state))
    return state


def test_a_folder_without_sums_of_its_json_files_is_loaded(tmp_path):
    saved = CheckpointManager(tmp_path)
    model, optimizers, data = parts()
    save_training_state(saved, 1, model, optimizers, data)
    path = saved.path(1) / STATE_NAME
    state = without_sums_of_json(path)
    assert load_training_state(saved, *parts()) == 1
    for key in ("optimizers", "data", "rng_state", "loss_monitor"):
        path.write_text(json.dumps({k: x for k, x in state.items() if k != key}))
        with pytest.raises(ValueError, match=f"holds no training.*'{key}'"):
            load_training_state(saved, *parts())
    path.write_text(json.dumps(state).replace("state.rng_state", "state.nowhere"))
    with pytest.raises(ValueError, match="no tensor 'state"):
        load_training_state(saved, *parts())


class Counting(torch.nn.Linear):
    "A layer with a number that is no tensor."

    def __init__(self, count=0):
        super().__init__(2, 2)
        self.count = count

    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        self.count = state


@pytest.mark.parametrize("count", [7, {"n": torch.ones(2), "t": (1, None)}])
@pytest.mark.parametrize("inside", [False, True])
def test_what_a_module_keeps_beside_its_tensors_is_restored(tmp_path, count, inside):
    saved = CheckpointManager(tmp_path)
    ours = Counting(count)
    theirs = Counting()
    wrapped = [torch.nn.Sequential(x) if inside else x for x in (ours, theirs)]
    saved.save(1, wrapped[0], {"count": 3})
    assert saved.load(wrapped[1])["count"] == 3
    assert repr(theirs.count) == repr(count)
    assert torch.equal(ours.weight, theirs.weight)
    with pytest.raises(
        ValueError, match="extra states do not fit Linear: the checkpoint has"
    ):
        saved.load(torch.nn.Linear(2, 2))


def test_an_extra_state_that_is_a_tensor_is_restored(tmp_path):
    saved = CheckpointManager(tmp_path)
    saved.save(1, Counting(torch.ones(3)), {})
    other = Counting(torch.zeros(3))
    saved.load(other)
    assert torch.equal(other.count, torch.ones(3))


def test_an_extra_state_that_no_file_holds_is_refused_by_name(tmp_path):
    model = torch.nn.Sequential(Counting(object()))
    with pytest.raises(ValueError, match=r"model\.0\..* is of type object"):
        write_checkpoint(tmp_path / "a", model, {})
    assert not [*tmp_path.iterdir()]


def test_a_checkpoint_of_another_format_is_refused(tmp_path):
    saved = CheckpointManager(tmp_path)
    saved.save(1, small(), {})
    path = saved.path(1) / STATE_NAME
    state = without_sums_of_json(path)
    assert state.pop("format") == 3
    for other, found in (({}, "None"), ({"format": 2}, "2")):
        path.write_text(json.dumps(state | other))
        with pytest.raises(ValueError, match=f"step-000001 is of format {found}, and"):
            saved.load(small())


def test_a_missing_file_is_named(tmp_path):
    saved = CheckpointManager(tmp_path)
    saved.save(1, small(), {})
    (saved.path(1) / WEIGHTS_NAME).unlink()
    with pytest.raises(FileNotFoundError, match="no such file"):
        saved.load(small())


def test_another_model_is_refused_by_its_numbers(tmp_path):
    saved = CheckpointManager(tmp_path)
    saved.save(1, small(), {})
    other = small(32, tie_word_embeddings=True)
    before = [p.clone() for p in other.parameters()]
    with pytest.raises(
        ValueError,
        match="d_model 16 there, 32 here; tie_word_embeddings False there, True here",
    ):
        saved.load(other)
    assert all(map(torch.equal, before, other.parameters()))
    require_same_config(small(), saved.path(1))
    require_same_config(torch.nn.Linear(1, 1), saved.path(1))


def test_no_pickle_is_read_or_written(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "load", None)
    monkeypatch.setattr(torch, "save", None)
    saved = CheckpointManager(tmp_path)
    saved.save(1, small(), {"rng_state": get_rng_state()})
    saved.load(small())
    for name in (WEIGHTS_NAME, STATE_TENSORS_NAME):
        with safe_open(saved.path(1) / name, "pt") as file:
            assert file.keys()
    json.loads((saved.path(1) / STATE_NAME).read_text())


# --- the last few, and the best


def test_the_last_few_and_the_best_stay(tmp_path):
    saved = CheckpointManager(tmp_path, keep_last=2)
    assert saved.steps() == [] and saved.best_step is None
    for step, score in (
        (10, 3.0),
        (20, 1.0),
        (30, 2.0),
        (40, None),
        (50, float("nan")),
    ):
        saved.save(step, small(), {}, score)
    assert saved.steps() == [20, 40, 50] and saved.best_step == 20
    saved.save(60, small(), {}, 0.5)
    assert saved.steps() == [50, 60] and saved.best_step == 60


def test_to_load_forgets_nothing(tmp_path):
    for step in range(1, 6):
        CheckpointManager(tmp_path, keep_last=9).save(step, small(), {})
    CheckpointManager(tmp_path, keep_last=1).load(small(), 2)
    assert CheckpointManager(tmp_path).steps() == [1, 2, 3, 4, 5]


def test_the_last_and_the_best_are_called_so(tmp_path):
    saved = CheckpointManager(tmp_path)
    for step, score in ((1, 2.0), (2, 1.0), (3, 3.0)):
        saved.save(step, small(), {}, score)
    named = [saved.find_step(name) for name in (None, "last", "best", 1)]
    assert named == [3, 3, 2, 1]
    for name, step in ((None, 3), ("last", 3), ("best", 2), (1, 1)):
        assert saved.load(small(), name)["step"] == step


def test_a_step_that_is_not_there(tmp_path):
    saved = CheckpointManager(tmp_path)
    with pytest.raises(
        ValueError,
        match="has no checkpoint of step None; "
        r"it has \[\]",
    ):
        saved.load(small())
    (tmp_path / "step-000007").mkdir()  # not ours: nothing in it
    (tmp_path / "step-x").mkdir()
    assert saved.steps() == []
    with pytest.raises(ValueError, match="keep_last must be"):
        CheckpointManager(tmp_path, keep_last=0)


@plain_only
@pytest.mark.parametrize("step", [-1, "3", 2.0, True, None])
def test_a_checkpoint_is_of_a_whole_step(step, tmp_path):
    saved = CheckpointManager(tmp_path)
    with pytest.raises(ValueError, match=f"step must be a whole .* at least 0.*{step}"):
        saved.save(step, small(), {})
    assert not [*tmp_path.iterdir()]
    saved.save(np.int64(1), small(), {})
    assert saved.steps() == [1] and saved.read(small())[1]["step"] == 1


@plain_only
@pytest.mark.parametrize("metric", ["0.5", [0.5], torch.tensor(0.5)])
def test_a_metric_is_a_number(metric, tmp_path):
    saved = CheckpointManager(tmp_path)
    with pytest.raises(ValueError, match="metric must be a number or None, got"):
        saved.save(1, small(), {}, metric)
    assert not [*tmp_path.iterdir()]
    saved.save(1, small(), {}, np.float32(0.5))
    before = (saved.path(1) / STATE_NAME).read_bytes()
    with pytest.raises(ValueError, match="metric must be a number or None, got"):
        saved.set_metric(1, metric)
    assert (saved.path(1) / STATE_NAME).read_bytes() == before
    assert saved.best_step == 1


def test_a_metric_may_come_later(tmp_path):
    late, known = (CheckpointManager(tmp_path / name, keep_last=1) for name in "ab")
    model = small()
    known.save(1, model, {"n": 1}, 2.0)
    late.save(1, model, {"n": 1})
    late.set_metric(1, 2.0)
    written = [(m.path(1) / STATE_NAME).read_bytes() for m in (known, late)]
    assert written[0] == written[1] and read_checkpoint(late.path(1))
    assert [*late.path(1).rglob("*.part")] == []
    late.save(2, model, {})
    assert late.best_step == 1 and late.load(model, "best")["metric"] == 2.0
    late.set_metric(2, 1.0)
    assert late.steps() == [2]
    with pytest.raises(ValueError, match="no checkpoint of step 1"):
        late.set_metric(1, 0.5)


@pytest.mark.parametrize("name", [STATE_NAME, CONFIG_NAME])
def test_a_metric_is_not_given_to_a_damaged_checkpoint(name, tmp_path):
    saved = CheckpointManager(tmp_path)
    saved.save(2, small(), {"seen": 1234})
    saved.save(3, small(), {"seen": 1234})
    path = saved.path(3) / name
    written = path.read_bytes()
    number = b"1234" if name == STATE_NAME else b"16"
    damaged = written.replace(number, number[:-1] + b"5", 1)
    path.write_bytes(damaged)
    assert damaged != written
    for call in (lambda: saved.load(small(), 3), lambda: saved.set_metric(3, 0.5)):
        with pytest.raises(
            ValueError,
            match=f"{name} is no longer what .* is damaged: delete .* from step 2",
        ):
            call()
    assert path.read_bytes() == damaged and saved.metrics() == {}
    path.write_bytes(written)
    saved.set_metric(3, 0.5)
    assert saved.load(small(), "best")["seen"] == 1234


# --- a place in the data


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomWindowLoader(torch.arange(500), 8, batch_size=2, seed=3),
        lambda: [torch.tensor([i]) for i in range(7)],
        lambda: (torch.tensor([i]) for i in range(100)),
    ],
)
@pytest.mark.parametrize("taken", [0, 1, 5, 9])
def test_a_stream_goes_on_where_it_was(make, taken):
    stream = ResumableBatches(make())
    stream.next_batches(taken)
    state = through_json(stream.state_dict())
    other = ResumableBatches(make())
    other.load_state_dict(state)
    for a, b in zip(stream.next_batches(10), other.next_batches(10), strict=True):
        assert torch.equal(a[0], b[0])
    assert stream.num_yielded == other.num_yielded == taken + 10


@pytest.mark.parametrize("state", [None, 3, []])
def test_a_stream_refuses_what_is_no_state(state):
    stream = ResumableBatches([1, 2, 3])
    stream.next_batches(2)
    with pytest.raises(ValueError, match="state must be Mapping, got"):
        stream.load_state_dict(state)
    assert stream.next() == 3


def test_a_stream_that_ends():
    stream = ResumableBatches(iter([1, 2]))
    assert stream.next_batches(2) == [1, 2]
    with pytest.raises(ValueError, match="the batches end after 2"):
        stream.next()
    with pytest.raises(ValueError, match="end after 0"):
        ResumableBatches([]).next()


@pytest.mark.parametrize("own", [True, False])
def test_a_shuffled_pass_is_taken_up_in_its_own_order(own):
    def make():
        draw = torch.Generator().manual_seed(4) if own else None
        return ResumableBatches(
            torch.utils.data.DataLoader(
                torch.arange(10), batch_size=2, shuffle=True, generator=draw
            )
        )

    def some(stream, n):
        found = []
        for batch in stream.next_batches(n):
            torch.rand(3)  # a training throws dice as well
            found += batch.tolist()
        return found

    for before in (0, 3, 5, 8, 13):
        torch.manual_seed(0)
        stream = make()
        other = make()
        some(stream, before)
        state = through_json(stream.state_dict())
        chance = get_rng_state()
        straight = some(stream, 12)
        torch.manual_seed(7)
        here = torch.get_rng_state()
        other.load_state_dict(state)
        assert torch.equal(here, torch.get_rng_state())
        set_rng_state(chance)
        assert some(other, 12) == straight
        assert other.num_yielded == before + 12


def test_a_replay_keeps_no_batches_and_reads_one_pass():
    class Thing:
        pass

    alive = weakref.WeakSet()
    most = 0
    read = 0

    class Things:
        def __iter__(self):
            nonlocal most, read
            for _ in range(50):
                thing = Thing()
                alive.add(thing)
                most = max(most, len(alive))
                read = read + 1
                yield thing

    stream = ResumableBatches(Things())
    for _ in range(140):
        stream.next()
    state = stream.state_dict()
    most = read = 0
    ResumableBatches(Things()).load_state_dict(state)
    assert read == 40 and most <= 4


def test_a_pass_that_is_now_shorter():
    def make(n):
        return ResumableBatches(i for i in range(n))

    stream = make(3)
    stream.next_batches(3)
    with pytest.raises(
        ValueError, match="end after 2; the checkpoint was written after 3"
    ):
        make(2).load_state_dict(stream.state_dict())


def windows(**more):
    return RandomWindowLoader(torch.arange(500), 8, **more)


def loader(n=40, size=2, dataset=lambda x: x, **more):
    return DataLoader(dataset(torch.arange(n)), size, **more)


@pytest.mark.parametrize(
    "before, after, words",
    [
        (windows, lambda: [1, 2], "RandomWindowLoader there, builtins.list here"),
        (windows, loader, "RandomWindowLoader there, torch.*DataLoader here"),
        (loader, windows, "torch.*DataLoader there, .*RandomWindowLoader here"),
        (loader, lambda: iter(loader()), "DataLoader there, .*Iter here"),
        (
            loader,
            lambda: loader(30),
            "number 20 there, 15 here; samples 40 there, 30 here$",
        ),
        (
            loader,
            lambda: loader(80, 4),
            "batches: batch size 2 there, 4 here; samples 40 there, 80 here$",
        ),
        (lambda: [1, 2], lambda: [1, 2, 3], "number 2 there, 3 here; checksum"),
        (lambda: [1, 2], lambda: (1, 2), "builtins.list there, builtins.tuple here"),
        (
            lambda: [torch.zeros(2, 3), torch.zeros(2, 3)],
            lambda: [torch.zeros(2, 3), torch.ones(2, 3)],
            r"batches: checksum \d+ there, \d+ here; checksum of all",
        ),
        (
            lambda: torch.zeros(4, 2, 3),
            lambda: torch.ones(4, 2, 3),
            "batches: checksum",
        ),
        (lambda: [1, 2], lambda: [1, 3], "batches: checksum"),
        (
            lambda: [*torch.zeros(3, 2)],
            lambda: [*torch.tensor([[0.0, 0], [0, 1], [0, 0]])],
            r"batches: checksum of all \d+ there, \d+ here$",
        ),
        (loader, lambda: loader(shuffle=True), "SequentialSampler there, .*Random"),
        (loader, lambda: loader(drop_last=True), "drop last False there, True here"),
        (
            loader,
            lambda: loader(40, 2, lambda x: TensorDataset(x)),
            r"dataset torch\.Tensor there, .*TensorDataset here",
        ),
        (loader, lambda: loader(39), "samples 40 there, 39 here$"),
        (lambda: [np.zeros(2)], lambda: [np.ones(2)], "batches: checksum"),
        (
            lambda: [{"ids": (torch.zeros(2), None)}],
            lambda: [{"ids": (torch.ones(2), None)}],
            "batches: checksum",
        ),
    ],
)
def test_other_batches_are_refused_and_nothing_moves(before, after, words):
    stream = ResumableBatches(before())
    stream.next()
    state = through_json(stream.state_dict())
    ResumableBatches(before()).load_state_dict(state)  # the same are accepted
    other = ResumableBatches(after())
    with pytest.raises(ValueError, match=words):
        other.load_state_dict(state)
    assert other.num_yielded == 0 and other.iterator is None


def test_a_place_of_an_older_version_is_taken_up():
    for make in (loader, lambda: [*torch.zeros(3, 2)]):
        stream = ResumableBatches(make())
        stream.next()
        state = through_json(stream.state_dict())
        new = {"checksum of all", "dataset", "samples", "sampler"}
        new |= {"batch sampler", "drop last"}
        state["source"] = {k: x for k, x in state["source"].items() if k not in new}
        other = ResumableBatches(make())
        other.load_state_dict(state)
        assert other.num_yielded == 1


def test_batches_whose_number_is_unknown_are_taken_up():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(1000))

    stream = ResumableBatches(torch.utils.data.DataLoader(Endless(), 4))
    stream.next()
    other = ResumableBatches(torch.utils.data.DataLoader(Endless(), 4))
    other.load_state_dict(through_json(stream.state_dict()))
    assert other.next().tolist() == [4, 5, 6, 7]


def test_a_checkpoint_without_sums_gets_no_metric_and_is_not_called_damaged(tmp_path):
    "Another version wrote it: nobody is told to delete it."
    saved = CheckpointManager(tmp_path)
    saved.save(3, small(), {})
    path = saved.path(3) / STATE_NAME
    state = json.loads(path.read_text())
    del state["$sha256"]
    path.write_text(json.dumps(state))
    written = path.read_bytes()
    with pytest.raises(ValueError, match="stays as it is: another version") as told:
        saved.set_metric(3, 0.5)
    assert "delete" not in str(told.value) and path.read_bytes() == written


class Layers(torch.nn.Module):
    "Two matrices of one shape, and one of another."

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 4, bias=False)
        self.b = torch.nn.Linear(4, 4, bias=False)
        self.c = torch.nn.Linear(4, 2, bias=False)


def optimizer_of(model, names, groups=1):
    "An optimizer of some layers, in one group or with the first in its own."
    params = [getattr(model, name).weight for name in names]
    cut = [params[:1], params[1:]] if groups == 2 else [params]
    return torch.optim.AdamW([{"params": part} for part in cut], 0.1)


def stepped(model, names, groups=1):
    "Such an optimizer after a step."
    optimizer = optimizer_of(model, names, groups)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    "before, after, number", [("abc", "bac", 1), ("abc", "acb", 2)]
)
def test_an_optimizer_of_other_parameters_is_refused(
    before, after, number, groups, tmp_path
):
    saved = CheckpointManager(tmp_path)
    model = Layers()
    data = ResumableBatches([1, 2, 3])
    optimizer = stepped(model, before, groups)
    save_training_state(saved, 1, model, [optimizer], data)
    kept = optimizer.state_dict()
    model = Layers()
    weights = [p.clone() for p in model.parameters()]
    there = before[number - 1]
    here = after[number - 1]
    with pytest.raises(
        ValueError,
        match=f"parameter {number} of torch.optim.adamw.AdamW is {there}.weight in the "
        f"checkpoint, and {here}.weight here",
    ):
        load_training_state(saved, model, [optimizer_of(model, after, groups)], data)
    assert all(map(torch.equal, weights, model.parameters()))
    own = optimizer_of(model, before, groups)
    assert load_training_state(saved, model, [own], data) == 1
    for i, moments in kept["state"].items():
        assert torch.equal(moments["exp_avg"], own.state_dict()["state"][i]["exp_avg"])


def test_an_optimizer_of_other_shapes_is_refused_without_names(tmp_path):
    "An older checkpoint tells no names."
    saved = CheckpointManager(tmp_path)
    model = Layers()
    data = ResumableBatches([1, 2, 3])
    save_training_state(saved, 1, model, [stepped(model, "abc")], data)
    path = saved.path(1) / STATE_NAME
    state = without_sums_of_json(path)
    del state["optimizers"][0]["parameters"]
    path.write_text(json.dumps(state))
    with pytest.raises(
        ValueError,
        match=r"exp_avg\w* of c\.weight in torch.optim.adamw.AdamW has shape \(4, 4\) "
        r"in the checkpoint, and the parameter has \(2, 4\)",
    ):
        load_training_state(saved, model, [optimizer_of(model, "acb")], data)
    assert load_training_state(saved, model, [optimizer_of(model, "bac")], data) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adafactor(p),  # rows and columns of a matrix
        lambda p: torch.optim.LBFGS(p),  # all parameters in one vector
        lambda p: torch.optim.ASGD(p),
        lambda p: Muon(p, 0.1),
    ],
)
def test_what_has_no_shape_of_a_parameter_is_taken_up(make, tmp_path):
    saved = CheckpointManager(tmp_path)
    model = Layers()
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(2, 2)))
    data = ResumableBatches([1, 2, 3])
    own = [p for n, p in model.named_parameters() if n != "unused"]
    beside = torch.nn.Parameter(torch.ones(2, 3))  # of a loss, say
    optimizer = make([*own, beside])
    for p in [*own, beside]:
        p.grad = torch.ones_like(p)
    optimizer.step(lambda: sum(p.sum() for p in own))
    save_training_state(saved, 1, model, [optimizer], data)
    assert load_training_state(saved, model, [make([*own, beside])], data) == 1


def test_an_optimizer_of_the_same_name_is_another(tmp_path):
    saved = CheckpointManager(tmp_path)
    model, _, stream = parts()
    ours = [AdamW(model.parameters(), 0.1)]
    save_training_state(saved, 1, model, ours, stream)
    theirs = [torch.optim.AdamW(model.parameters(), 0.1)]
    with pytest.raises(
        ValueError,
        match=r"the state of tformer\.training\.optimizers\.AdamW, not of torch\.op",
    ):
        load_training_state(saved, model, theirs, stream)


# --- all of it


def parts(width=16, seed=0, groups=1, lr=0.1):
    model = small(width)
    params = [*model.parameters()]
    cut = [params[:3], params[3:]] if groups == 2 else [params]
    return (
        model,
        [torch.optim.SGD([{"params": p} for p in cut], lr)],
        ResumableBatches(RandomWindowLoader(torch.arange(500) % 40, 8, seed=seed)),
    )


@pytest.mark.parametrize(
    "how, words",
    [
        ({"seed": 1}, "this loader"),
        ({"width": 32}, "another model"),
        ({"groups": 2}, r"groups of \[\d+\] parameters, these have \[3, "),
    ],
)
def test_what_does_not_fit_changes_nothing(how, words, tmp_path):
    saved = CheckpointManager(tmp_path)
    model, optimizers, stream = parts(lr=0.5)
    torch.nn.init.zeros_(model.norm.weight)
    stream.next_batches(3)
    save_training_state(saved, 3, model, optimizers, stream)
    model, optimizers, stream = parts(**how)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=words):
        load_training_state(saved, model, optimizers, stream)
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizers[0].param_groups[0]["lr"] == 0.1
    assert stream.num_yielded == stream.batches.num_yielded == 0


def test_weights_that_do_not_fit_leave_the_data_where_it_was(tmp_path):
    saved = CheckpointManager(tmp_path)
    data = torch.arange(500) % 40
    one = torch.nn.Linear(2, 2)
    two = torch.nn.Linear(2, 3)
    stream = ResumableBatches(RandomWindowLoader(data, 8))
    stream.next_batches(2)
    save_training_state(saved, 2, one, [], stream)
    stream = ResumableBatches(RandomWindowLoader(data, 8))
    with pytest.raises(ValueError, match="do not fit"):
        load_training_state(saved, two, [], stream)
    assert stream.num_yielded == stream.batches.num_yielded == 0


def own_loader(n=12, items=None):
    "A loader with a generator of its own; of n numbers, or of items without a length."

    class Items(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(range(items))

    own = torch.Generator().manual_seed(77)
    if items is not None:
        return DataLoader(Items(), 2, generator=own)
    return DataLoader(TensorDataset(torch.arange(n)), 2, shuffle=True, generator=own)


@pytest.mark.parametrize(
    "before, after, width, words",
    [
        ({}, {}, 3, "do not fit"),
        ({"items": 12}, {"items": 4}, 2, "the batches end after 2"),
    ],
)
@pytest.mark.parametrize("begun", [False, True])
def test_a_refusal_leaves_a_loader_s_own_generator(
    before, after, width, words, begun, tmp_path
):
    saved = CheckpointManager(tmp_path)
    data = ResumableBatches(own_loader(**before))
    data.next_batches(5)
    save_training_state(saved, 5, torch.nn.Linear(2, 2), [], data)
    alike, data = (ResumableBatches(own_loader(**after)) for _ in range(2))
    for stream in (alike, data):
        torch.manual_seed(3)
        stream.next_batches(int(begun))
    place = data.state_dict()
    with pytest.raises(ValueError, match=words):
        load_training_state(saved, torch.nn.Linear(2, width), [], data)
    generators = [stream.batches.generator.get_state() for stream in (alike, data)]
    assert torch.equal(*generators)
    assert repr(data.state_dict()) == repr(place)
    found = []
    for stream in (alike, data):
        torch.manual_seed(4)
        found.append(repr(stream.next_batches(2)))
    assert found[0] == found[1]


def test_another_learning_rate_is_told(tmp_path, recwarn):
    saved = CheckpointManager(tmp_path)
    save_training_state(saved, 1, *parts())
    load_training_state(saved, *parts())
    assert not recwarn.list
    with pytest.warns(
        UserWarning,
        match=r"checkpoint go on, \[0.1\], not "
        r"those given now, \[0.2\]",
    ):
        load_training_state(saved, *parts(lr=0.2))


def test_a_rate_that_a_scheduler_of_torch_moved_is_not_another(tmp_path, recwarn):
    def scheduled():
        made = parts()
        return made, torch.optim.lr_scheduler.ExponentialLR(made[1][0], 0.5)

    saved = CheckpointManager(tmp_path)
    made, scheduler = scheduled()
    made[1][0].step()
    scheduler.step()
    save_training_state(saved, 1, *made)
    made, _ = scheduled()
    load_training_state(saved, *made)
    assert not recwarn.list
    assert made[1][0].param_groups[0]["lr"] == 0.05


def test_a_history_without_a_file_is_cut(tmp_path):
    for history in (History(), History(tmp_path / "history.csv")):
        for step in range(1, 5):
            history.append({"step": step, "loss": 1.0})
        history.truncate(2)
        assert [row["step"] for row in history.records] == [1, 2]
        history.append({"step": 3, "eval_loss": 2.0})
        assert history.columns() == ["step", "loss", "eval_loss"]
        history.truncate(0)
        assert history.records == []
    assert [*tmp_path.iterdir()] == []


class OtherMonitor:
    def state_dict(self):
        return {"means": [1.0]}

    def load_state_dict(self, state):
        self.means = state["means"]


def test_another_loss_monitor_is_refused_and_nothing_changes(tmp_path):
    saved = CheckpointManager(tmp_path)
    model, optimizers, stream = parts(lr=0.5)
    torch.nn.init.zeros_(model.norm.weight)
    monitor = LossMonitor()
    monitor(3.0, 1.0)
    save_training_state(saved, 3, model, optimizers, stream, None, monitor)
    model, optimizers, stream = parts()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(
        ValueError, match=r"loss monitor tformer\.training\.trainer\.LossMonitor, "
    ):
        load_training_state(
            saved, model, optimizers, stream, loss_monitor=OtherMonitor()
        )
    assert all(map(torch.equal, before, model.parameters()))
    assert optimizers[0].param_groups[0]["lr"] == 0.1 and not stream.num_yielded
    optimizers[0].param_groups[0]["lr"] = 0.5
    again = LossMonitor()
    load_training_state(saved, model, optimizers, stream, loss_monitor=again)
    assert again.losses == [3.0]
    load_training_state(saved, model, optimizers, stream, loss_monitor=len)


class Numbers(torch.utils.data.Dataset):
    "Pairs whose second part is augmented by chance of PyTorch's, or of its own."

    def __init__(self, first=0, own_chance=False):
        self.first = first
        self.rng = np.random.default_rng() if own_chance else None
        self.reads = 0

    def __len__(self):
        return 20

    def __getitem__(self, i):
        self.reads += 1
        x = torch.rand(()).item() if self.rng is None else self.rng.random()
        return {"ids": torch.tensor([self.first + i]), "x": torch.tensor([x])}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("taken", [1, 4, 5, 8])
def test_other_data_in_a_loader_of_the_same_sizes_is_told(taken, workers):
    def stream(*given):
        loader = DataLoader(
            Numbers(*given), batch_size=4, shuffle=True, num_workers=workers
        )
        return ResumableBatches(loader)

    torch.manual_seed(0)
    before = stream()
    for batch in before.next_batches(taken):
        batch["ids"].zero_()  # what a loss does to its batch is not compared
    state = through_json(before.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = stream()
        same.load_state_dict(state)
        stream().load_state_dict(stream().state_dict())  # of which none was read
        older = {k: x for k, x in state.items() if k != "last_batch"}
        stream(100).load_state_dict(older)  # an older version kept no sum
    if not workers:
        read = 4 * (taken % 5 or 5)
        assert same.batches.dataset.reads == read  # as many as before, and no more
    for other in (stream(100), stream(0, True)):
        chance = torch.get_rng_state()
        with pytest.warns(UserWarning, match="batch .* is not what it was: other data"):
            other.load_state_dict(state)
        assert torch.equal(chance, torch.get_rng_state())


def test_a_large_batch_is_not_summed_to_its_end():
    class Rows(Numbers):
        def __getitem__(self, i):
            return torch.zeros(2**20).index_fill(0, torch.tensor([2**19]), self.first)

    first, other = (ResumableBatches(DataLoader(Rows(n))) for n in (0, 1))
    first.next_batches(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.load_state_dict(first.state_dict())


# --- rows


def test_a_history_is_on_the_disk_after_every_row(tmp_path):
    path = tmp_path / "deep" / "history.csv"
    history = History(path)
    for step in range(1, 6):
        row = {"step": step, "loss": 1 / 3 / step}
        history.append(row | ({"eval_loss": 0.1} if step == 3 else {}))
        later = History(path)
        later.truncate(step)
        assert later.records == history.records
    history.truncate(2)
    assert [row["step"] for row in history.records] == [1, 2]
    history.append({"step": 3, "loss": 7.0})
    later.truncate(9)
    assert later.records == history.records


def test_a_line_that_was_cut_is_left_out(tmp_path):
    history = History(tmp_path / "h.csv")
    history.append({"step": 1, "loss": 0.5})
    with history.path.open("a") as file:
        file.write("2,0.3")
    history.truncate(2)
    assert history.records == [{"step": 1, "loss": 0.5}]
    assert history.path.read_text().splitlines() == ["step,loss", "1,0.5"]


def test_lines_that_are_no_rows_are_left_out(tmp_path):
    history = History(tmp_path / "h.csv")
    history.path.write_bytes(
        b"step,loss,lr\r\n1,2,.1\r\n2,2.03,2,.1\r\n3,0.5\r\n4,x,.1\r\n"
        b"\xff\xfe\x00\r\n\r\n,1,1\r\n2.5,1,1\r\n5,1,\r\n6,nan,1\r\n7,1,1"
    )
    rows = [{"step": 1, "loss": 2, "lr": 0.1}, {"step": 5, "loss": 1}]
    assert history.read()[:-1] == rows
    history.truncate(5)
    assert history.records == history.read() == rows


def test_a_history_that_is_not_there_begins_anew(tmp_path):
    history = History(tmp_path / "h.csv")
    history.truncate(3)
    assert history.records == [] and not history.path.exists()
    history.append({"step": 4, "loss": 1.0})
    history.truncate(3)
    assert history.records == [] and not history.path.exists()
    history.append({"step": 4, "loss": 1.0})
    assert history.read() == history.records
    history.path.write_bytes(b"")  # a disk that was full at the first row
    assert history.read() == []


def test_a_file_that_is_no_history_is_refused_and_stays(tmp_path):
    path = tmp_path / "h.csv"
    path.write_bytes(b"\xff\xfe\n1,2\n")
    with pytest.raises(ValueError, match=r"h\.csv is no history: its first line"):
        History(path).truncate(3)
    assert path.read_bytes() == b"\xff\xfe\n1,2\n"


def test_a_row_that_cannot_be_written_leaves_the_file_as_it_was(tmp_path):
    resource = pytest.importorskip("resource")
    history = History(tmp_path / "h.csv")
    for step in range(1, 4):
        history.append({"step": step, "loss": 0.1})
    before = history.path.read_bytes()

    def fill():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        full = len(before) + 3
        resource.setrlimit(resource.RLIMIT_FSIZE, (full, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="too large"):
            history.append({"step": 4, "loss": 0.2})
        assert history.path.read_bytes() == before
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, resource.RLIM_INFINITY))
        history.append({"step": 5, "loss": 0.3})

    assert child(fill) == 0
    assert [row["step"] for row in history.read()] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("call, is_kept", [("append", True), ("extend_last", False)])
def test_a_new_column_that_cannot_be_written_changes_no_file(
    call, is_kept, tmp_path, monkeypatch
):
    "A row that was appended is in memory, and comes with the next one."
    history = History(tmp_path / "h.csv")
    history.append({"step": 1, "loss": 0.1})
    before = history.path.read_bytes()

    def full(*args):
        raise OSError("the disk is full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(os, "replace", full)
        getattr(history, call)({"step": 1, "eval_loss": 0.5})
    assert history.path.read_bytes() == before
    assert ("eval_loss" in history.records[-1]) == is_kept
    if not is_kept:
        assert history.records == [{"step": 1, "loss": 0.1}]
        history.extend_last({"eval_loss": 0.4})
    history.append({"step": 2, "loss": 0.2, "eval_loss": 0.3})
    assert history.read() == history.records
    assert history.records[-2]["eval_loss"] == (0.5 if is_kept else 0.4)


def test_a_history_is_no_folder(tmp_path):
    with pytest.raises(ValueError, match=r"kept in a file, and .* is a folder"):
        History(tmp_path)


def test_a_row_costs_the_same_however_many_there_are(tmp_path):
    class Unwalked(list):
        def __iter__(self):
            raise AssertionError("every row was walked")

    history = History(tmp_path / "h.csv")
    history.append({"step": 1, "loss": 0.5})
    history.records = Unwalked(history.records)
    history.append({"step": 2, "loss": 0.5})
    assert history.path.read_text().splitlines()[1:] == ["1,0.5", "2,0.5"]


def test_a_history_without_a_file():
    history = History()
    history.append({"step": 1})
    history.append({"step": 2, "new": 1.0})
    assert history.columns() == ["step", "new"]


def test_tensorboard_is_asked_for_by_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"tformer\[log\]"):
        TensorBoardLogger(tmp_path)


def test_tensorboard_gets_every_number(monkeypatch, tmp_path):
    said = []

    class Writer:
        def __init__(self, folder):
            assert folder == str(tmp_path)

        def add_scalar(self, *values):
            said.append(values)

        def flush(self):
            pass

    fake = type(sys)("tensorboard")
    fake.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    TensorBoardLogger(tmp_path)({"step": 3, "loss": 0.5, "lr": 0.1})
    assert said == [("loss", 0.5, 3), ("lr", 0.1, 3)]


@pytest.mark.nightly
def test_the_bench_runs():
    run(sys.executable, ROOT / "tests" / "bench" / "bench_checkpoints.py", "--quick")


def test_read_checkpoint_returns_weights_and_state(tmp_path):
    write_checkpoint(tmp_path / "a", small(), {"k": 1})
    weights, state = read_checkpoint(tmp_path / "a")
    assert set(weights) == set(small().state_dict())
    assert state == {"k": 1, "format": checkpoints.STATE_FORMAT}
    assert checkpoints.__all__


def test_a_manager_loads_what_write_checkpoint_wrote(tmp_path):
    manager = CheckpointManager(tmp_path)
    write_checkpoint(manager.path(3), small(), {"k": 1})
    assert manager.load(small())["k"] == 1
    _, state = read_checkpoint(manager.path(3))
    write_checkpoint(tmp_path / "again", small(), state)  # what was read is accepted
    with pytest.raises(ValueError, match="'safetensors', and format 3 is written"):
        write_checkpoint(tmp_path / "new", small(), {"format": "safetensors"})
    assert not (tmp_path / "new").exists()
