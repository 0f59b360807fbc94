"""What all models share, once for each: the contracts of `tformer.models.base`."""

import copy
import dataclasses
import json
import os
import pickle
import re
import shutil
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from conftest import run
from helpers import by_day, close, equal_models, padded, plain_only, randn, spread
from models import FAMILIES, MAX_LEN, ROWS, VOCAB, causal, every, num_read, rows
from tformer.inference.generation import generate
from tformer.models import base as saving
from tformer.models.base import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    Model,
    ModelConfig,
    TransformerBlock,
    describe_module,
    load_model,
    load_weights,
    new_layer_cache,
    positions_from_attention_mask,
    read_safetensors,
    require_same_vocabulary,
    save_model,
)
from tformer.models.gpt import GPT, GPTConfig
from tformer.models.llama import Llama, LlamaConfig, Qwen3, make_gqa_factory
from tformer.models.seq2seq import DecoderBlock
from tformer.nn.kv_cache import DynamicLayerCache
from tformer.nn.positions import Positions
from tformer.serving.runner import ModelRunner

warnings.filterwarnings("ignore", message="IProgress not found")

OF = {row.name: row for row in ROWS}


# configurations


@every
def test_a_configuration_is_frozen_keyword_only_and_a_key(row):
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.config.d_model = 8
    with pytest.raises(TypeError):
        type(row.config)(40)
    assert {row.config: 1}[row.change()] == 1
    assert copy.deepcopy(row.config) == row.config
    assert pickle.loads(pickle.dumps(row.config)) == row.config


@every
def test_a_configuration_prints_as_its_call_and_goes_through_json(row):
    cls = type(row.config)
    assert eval(repr(row.config), {cls.__name__: cls}) == row.config
    text = json.dumps(row.config.to_dict())
    assert cls.from_dict(json.loads(text)) == row.config
    assert list(row.config.to_dict()) == [f.name for f in dataclasses.fields(cls)]
    with pytest.raises(
        ValueError,
        match="has no field depth, width; its fields are vocab_size, d_model",
    ):
        cls.from_dict({"vocab_size": 5, "width": 1, "depth": 2})
    needed = [f.name for f in dataclasses.fields(cls) if f.default is f.default_factory]
    if needed:
        with pytest.raises(
            ValueError, match=(f"needs a value for {', '.join(needed)};")
        ):
            cls.from_dict({})
    else:
        assert cls.from_dict({}) == cls()


@every
@pytest.mark.parametrize(
    "field, value",
    [
        ("vocab_size", 0),
        ("d_model", 2.5),
        ("d_model", None),
        ("n_layers", -1),
        ("n_layers", 2.0),
        ("n_layers", True),
        ("n_heads", 0),
        ("n_heads", "4"),
        ("max_len", 0),
        ("max_len", "20"),
        ("d_ff", -4),
        ("d_ff", True),
        ("dropout", 1.0),
        ("dropout", -0.1),
        ("dropout", "0.1"),
        ("dropout", float("nan")),
        ("eps", 0.0),
        ("eps", True),
        ("eps", "1e-5"),
        ("eps", float("nan")),
    ],
)
def test_a_field_that_cannot_be_is_refused_by_name(row, field, value):
    if field not in row.config.to_dict():
        with pytest.raises(TypeError):
            row.change(**{field: value})
        return
    with pytest.raises(
        ValueError, match=rf"{field} must be .*" + re.escape(f"got {value!r}")
    ):
        row.change(**{field: value})
    with pytest.raises(ValueError, match=r"d_model 18 .* n_heads 4"):
        row.change(
            d_model=18, **({"d_head": None} if "d_head" in row.config.to_dict() else {})
        )


@plain_only  # where an annotation says int, and means it
@every
def test_whole_numbers_of_numpy_are_whole_numbers(row, tmp_path):
    config = row.change(n_layers=np.int64(1), max_len=np.int32(20))
    row.cls(config).save(tmp_path)
    assert row.cls.load(tmp_path).config == row.change(n_layers=1)


def test_fields_of_other_kinds_are_printed_and_filled_in():
    @dataclass(frozen=True, kw_only=True, repr=False)
    class Listed(ModelConfig):
        vocab_size: int
        activation: str = "gelu"
        scales: tuple = dataclasses.field(default_factory=tuple)

    config = Listed.from_dict({"vocab_size": 3})
    assert config.scales == ()
    assert eval(repr(config), {"Listed": Listed}) == config


@every
def test_a_configuration_of_another_model_is_refused(row):
    own = type(row.config)

    @dataclass(frozen=True, kw_only=True, repr=False)
    class More(own):
        more: int = 1

    model = row.cls(More(**row.config.to_dict()))
    assert model.config.more == 1 and model.max_len == MAX_LEN
    others = [r.config for r in ROWS if r.cls and type(r.config) is not own]
    assert len({type(c) for c in others}) >= 2
    for other in (*others, OddConfig(), row.config.to_dict(), None):
        with pytest.raises(
            ValueError,
            # a layer that is made first may ask for the numbers that it needs
            match=(
                f"config must (be {own.__name__}|have .*), got {type(other).__name__}"
            ),
        ):
            row.cls(other)
    with pytest.raises(ValueError, match=f"got the class {own.__name__}"):
        row.cls(own)


@every
def test_a_configuration_of_the_same_name_is_refused_by_its_class(row):
    "``LlamaConfig`` is a class of transformers, too."
    transformers = pytest.importorskip("transformers")
    twin = type(type(row.config).__name__, (), row.config.to_dict())
    for other in (transformers.LlamaConfig(), twin()):
        with pytest.raises(
            ValueError, match=f"config must (be|have) .*, got {type(other).__name__}"
        ):
            row.cls(other)


# what a model is called with


@every
def test_ids_without_a_batch_are_refused(row):
    model = row.make()
    for call in filter(
        None, (lambda ids: row.run(model, ids, [0]), getattr(model, "encode", None))
    ):
        with pytest.raises(ValueError, match=r"\(b, t\).*got \(5,\)"):
            call(torch.arange(5))


@every
def test_ids_outside_of_the_vocabulary_are_refused(row):
    model = row.make()
    ids = row.ids(1, 5)
    ids[0, 3] = VOCAB
    with pytest.raises(ValueError, match=f"id {VOCAB} .*{VOCAB}"):
        row.run(model, ids)


@every
def test_more_tokens_than_max_len_are_refused(row):
    model = row.make()
    too_many = f"{MAX_LEN + 1} tokens.*max_len.* {MAX_LEN}"
    row.run(model, row.ids(1, MAX_LEN))
    for call in (
        lambda: row.run(model, row.ids(1, MAX_LEN + 1)),
        lambda: row.run(
            model, row.ids(1, 2), positions=torch.tensor([[MAX_LEN - 1, MAX_LEN]])
        ),
        lambda: row.run(
            model, row.ids(1, 2), positions=Positions(start=MAX_LEN - 1, length=2)
        ),
    ):
        with pytest.raises(ValueError, match=too_many):
            call()
    if row.source:
        with pytest.raises(ValueError, match=too_many):
            model.encode(row.ids(1, MAX_LEN + 1))
    positions = (torch.arange(MAX_LEN + 5) - 5).clamp(min=-1)[None]
    row.run(model, row.ids(1, MAX_LEN + 5), positions=positions)  # padding is no token


@causal
@pytest.mark.parametrize("pad", [0, 3])
def test_more_tokens_than_max_len_are_refused_with_a_cache(row, pad):
    model = row.make()
    cache = row.make().new_cache(2)
    positions = torch.stack(
        [
            torch.arange(MAX_LEN - 1 + pad) - pad,
            torch.arange(MAX_LEN - 1 + pad) - pad - 2,
        ]
    )
    given = dict(positions=positions.clamp(min=-1)) if pad else {}
    row.run(model, row.ids(2, MAX_LEN - 1 + pad), cache=cache, **given)
    row.run(model, row.ids(2, 1), cache=cache)
    seen = num_read(cache).tolist()
    assert max(seen) == MAX_LEN
    with pytest.raises(ValueError, match=f"{MAX_LEN + 1} tokens"):
        row.run(model, row.ids(2, 1), cache=cache)
    assert num_read(cache).tolist() == seen  # and none of them was taken


@every
def test_positions_of_other_tokens_are_refused(row):
    model = row.make()
    for positions, said in (
        (torch.arange(4)[None], r"\(1, 4\) do not fit"),
        (torch.zeros(3, 5).long(), r"\(3, 5\) do not fit"),
        (torch.zeros(1, 1).long(), r"\(1, 1\) do not fit"),
        (Positions(start=0, length=4), r"\(1, 4\) do not fit"),
        (torch.arange(5), "int64 of shape"),
        (torch.zeros(2, 5), "int64 of shape"),
    ):
        with pytest.raises(ValueError, match=said):
            row.run(model, row.ids(2, 5), positions=positions)
    with pytest.raises(ValueError, match=r"\(2, 5\) do not fit x \(1, 5"):
        row.run(model, row.ids(1, 5), positions=torch.arange(5).expand(2, 5))


@causal
def test_a_cache_of_another_model_is_refused_and_left_alone(row):
    model = row.make()
    ids = row.ids()
    for n in (1, 3):
        cache = row.make(**row.depth(n)).new_cache(3)
        with pytest.raises(ValueError, match=f"of {n} layers .* model of 2"):
            row.run(model, ids, cache=cache)
        assert cache.is_empty and cache.nbytes == 0
    model.new_cache(3, max_len=5)  # a limit is no promise to keep to it


@every
def test_a_mask_of_zeros_and_ones_is_refused_as_positions(row):
    model = row.make()
    keep = (padded() >= 0).long()
    for positions in (keep, keep[1:], torch.ones(1, 12).long()):
        with pytest.raises(ValueError, match=r"0/1 mask.*from_attention_m"):
            row.run(model, row.ids(len(positions)), positions=positions)
        if row.causal:
            with pytest.raises(ValueError, match="0/1 mask"):
                row.run(
                    model,
                    row.ids(len(positions)),
                    positions=positions,
                    cache=model.new_cache(len(positions)),
                )
    row.run(model, row.ids(2, 1), positions=torch.ones(2, 1).long())


@every
def test_positions_made_of_a_mask_make_rows_equal_rows_alone(row):
    model = row.make()
    ids = row.ids()
    keep = padded() >= 0
    for mask in (keep, keep.long(), keep.int()):
        positions = positions_from_attention_mask(mask)
        assert torch.equal(positions, padded())
        got = row.run(model, ids, positions=positions)
        assert got.isfinite().all()
        for i in range(3):
            if got.ndim < 3:
                continue
            alone = row.run(model, ids[i : i + 1, keep[i]], [i])
            close(got[i, keep[i]], alone[0])
        again = row.run(model, ids, positions=Positions(positions))
        assert torch.equal(again, got)
    if row.source:  # the same mask, of the source
        src = row.ids(3, 12, seed=4)
        assert torch.equal(model.encode(src, keep.long()), model.encode(src, keep))


# a model as a whole


@every
def test_a_model_prints_its_sizes(row):
    model = row.make()
    for name, module in model.named_modules():
        said = module.extra_repr()
        for p in module.parameters(recurse=False):
            for size in p.shape:
                assert re.search(rf"\b{size}\b", said), f"{name}: {said}"
        if list(module.buffers(recurse=False)):
            assert re.search(r"\d", said), f"{name}: {said}"
    n = sum(p.numel() for p in model.parameters())
    assert f"{n:,} parameters, max_len={MAX_LEN}" in repr(model)
    assert not re.search(r"(Embedding|Linear|Norm|Positions)\(\)", repr(model))


@causal
def test_hidden_and_the_head_are_forward(row):
    model = row.make()
    ids = row.ids()
    positions = padded()
    mask = torch.rand(3, 1, 12, 12) > 0.3
    for how in ({}, dict(positions=positions), dict(positions=positions, mask=mask)):
        vectors = row.run(model, ids, via="hidden_states", **how)
        assert vectors.shape == (3, 12, 16)
        assert torch.equal(model.lm_head(vectors), row.run(model, ids, **how))
    cache = model.new_cache(3)
    other = model.new_cache(3)
    for part in ids.split(4, 1):
        assert torch.equal(
            model.lm_head(row.run(model, part, via="hidden_states", cache=cache)),
            row.run(model, part, cache=other),
        )
    assert num_read(cache).tolist() == [12] * 3


# cached equals uncached


def fed(row, model, ids, positions, sizes, cache, start=0):
    "Logits of a text in parts; padding is named, the rest continues."
    parts = []
    at = start
    for n in sizes:
        now = slice(at, at + n)
        given = positions[:, now] if (positions[:, now] < 0).any() else None
        parts.append(row.run(model, ids[:, now], positions=given, cache=cache))
        at += n
    return torch.cat(parts, 1)


@causal
@pytest.mark.parametrize("sizes", [[12], [1] * 12, [5, 1, 1, 5], [8, 4]])
@pytest.mark.parametrize("grad", by_day([True, False], False))
def test_cached_equals_uncached(row, sizes, grad):
    model = row.make()
    ids = row.ids()
    with torch.set_grad_enabled(grad):
        for positions in (padded(), padded(1).expand(3, -1)):
            live = positions >= 0
            cache = model.new_cache(3)
            whole = row.run(model, ids, positions=positions)
            found = fed(row, model, ids, positions, sizes, cache)
            close(found[live], whole[live])
            assert torch.equal(num_read(cache), live.sum(-1))
    plain = model.new_cache(3)
    parts = [row.run(model, part, cache=plain) for part in ids.split(sizes, 1)]
    close(torch.cat(parts, 1), row.run(model, ids))


@causal
def test_a_cache_whose_rows_are_selected_goes_on(row):
    model = row.make()
    ids = row.ids()
    positions = padded()
    cache = model.new_cache(3)
    order = torch.tensor([1, 0, 1, 2])
    fed(row, model, ids, positions, [8], cache)
    cache.select(order)
    found = fed(row, model, ids[order], positions[order], [1, 3], cache, 8)
    whole = row.run(model, ids[order], order, positions=positions[order])
    live = positions[order][:, 8:] >= 0
    close(found[live], whole[:, 8:][live])


@causal
@pytest.mark.parametrize("n", [5, torch.tensor([3, 5, 8])])
def test_a_cache_that_is_cropped_goes_on(row, n):
    model = row.make()
    ids = row.ids()
    positions = padded(2)[[0, 1, 0]]
    cache = model.new_cache(3)
    cache.allow_rollback(12)
    fed(row, model, ids, positions, [7, 5], cache)
    cache.crop(n)
    left = (n if isinstance(n, torch.Tensor) else torch.tensor([n])).expand(3)
    assert torch.equal(num_read(cache), left)
    new = row.ids(3, 4, seed=5)
    found = row.run(model, new, cache=cache)
    for i, keep in enumerate(left.tolist()):
        begun = ids[i, positions[i] >= 0][:keep]
        alone = row.run(model, torch.cat([begun, new[i]])[None], [i])
        close(found[i], alone[0, -4:])
    cache.crop(0)
    assert cache.lengths.tolist() == [0] * 3


# saved and loaded


def narrow(model, dtype):
    "``mixed``: norms in float32, the rest in bfloat16."
    if dtype != "mixed":
        return model.to(dtype)
    model.bfloat16()
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    return model


@every
@pytest.mark.parametrize(
    "dtype", by_day([torch.float32, torch.bfloat16, "mixed", torch.float64], "mixed")
)
def test_a_model_comes_back_from_its_folder(row, dtype, tmp_path, monkeypatch):
    model = narrow(row.make(), dtype)
    folder = tmp_path / "new" / "folder"
    model.train()
    before = copy.deepcopy(model.state_dict())
    model.save(folder)
    assert model.training and all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert sorted(os.listdir(folder)) == [CONFIG_NAME, WEIGHTS_NAME]
    torch.manual_seed(3)
    want = torch.rand(4)
    for small in (2**26, 0):  # bytes of a model that is not made on meta
        monkeypatch.setattr("tformer.models.base._SMALL", small)
        torch.manual_seed(3)
        again = row.cls.load(folder)
        assert torch.equal(torch.rand(4), want)  # nothing was drawn
        assert type(again) is row.cls and again.config == model.config
        assert not again.training and equal_models(again, model)
        assert all(p.requires_grad and not p.is_meta for p in again.parameters())
        assert [(n, b.dtype) for n, b in again.named_buffers()] == [
            (n, b.dtype) for n, b in model.named_buffers()
        ]
        assert torch.equal(row.run(again, row.ids()), row.run(model.eval(), row.ids()))


def test_a_small_model_is_loaded_without_the_compiler():
    run(
        sys.executable,
        "-c",
        """
import sys, tformer
tformer.load("stories")
assert not {"torch._dynamo", "sympy"} & {*sys.modules}
""",
    )


def shared(model):
    "Which names stand for one parameter."
    names = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return sorted(n for n in names.values() if len(n) > 1)


@every
def test_files_are_json_and_safetensors_with_each_tensor_once(row, tmp_path):
    model = row.make()
    model.save(tmp_path)
    values = json.loads((tmp_path / CONFIG_NAME).read_text())
    assert values == {
        "model": row.cls.__name__,
        **model.describe_components(),
        **row.config.to_dict(),
    }
    tensors, metadata = read_safetensors(tmp_path / WEIGHTS_NAME)
    assert metadata["format"] == "pt"
    assert json.loads(metadata["config"]) == values
    assert sorted(tensors) == sorted(n for n, _ in model.named_parameters())
    assert shared(row.cls.load(tmp_path)) == shared(model)


def test_which_tables_are_tied():
    tied = {row.name: shared(row.cls(row.config)) for row in ROWS if row.cls}
    one = [["embed.weight", "lm_head.weight"]]
    for name in (
        "Seq2Seq",
        "PreNormSeq2Seq",
        "GPT",
        "GPT1",
        "Llama, grouped, tied, scaled",
    ):
        assert tied[name] == one
    assert tied["Llama"] == tied["Qwen3"] == tied["Seq2Seq, own sizes"] == []


@every
def test_saving_again_replaces_and_leaves_nothing_beside(row, tmp_path):
    for model in (row.make(), row.make(0.2, n_layers=1), row.make(0.1)):
        model.save(tmp_path)
        again = row.cls.load(tmp_path)
        assert again.config == model.config and equal_models(again, model)
        assert len(os.listdir(tmp_path)) == 2


@every
def test_another_class_is_refused(row, tmp_path):
    row.make().save(tmp_path)
    for other in {r.cls for r in ROWS if r.cls} - {row.cls}:
        said = f"holds a {row.cls.__name__}, not a {other.__name__}$"
        with pytest.raises(ValueError, match=said):
            other.load(tmp_path)
        with pytest.raises(ValueError, match=said):
            load_model(other, tmp_path)


class Cut(Exception):
    "The power is gone."


def cut(patch, what, n):
    "Let the n-th call of a function fail; a half-written file stays."
    if what == "save_file":

        def half(tensors, path, metadata=None):
            Path(path).write_bytes(b"half")
            raise Cut

        patch.setattr("tformer.models.base.save_file", half)
        return
    owner, name = (Path, what) if what == "write_text" else (os, what)
    real = getattr(owner, name)
    calls = []

    def broken(*args, **kwargs):
        calls.append(1)
        if len(calls) == n:
            raise Cut
        return real(*args, **kwargs)

    patch.setattr(owner, name, broken)


CHANGES = {
    "other weights": dict(std=0.2),
    "other numbers": dict(eps=0.01),
    "other shapes": dict(n_layers=1),
}


# all models share this function: two of them, and each cut with one change;
# between the two renames, where the files differ, with every change
@pytest.mark.parametrize(
    "name", by_day(["Seq2Seq", "Llama, grouped, tied, scaled"], "Seq2Seq")
)
@pytest.mark.parametrize(
    "what, n, wins, change",
    [
        ("save_file", 1, "old", "other shapes"),
        ("write_text", 1, "old", "other numbers"),
        ("fsync", 1, "old", "other weights"),
        ("fsync", 2, "old", "other numbers"),
        ("replace", 1, "old", "other weights"),
        ("replace", 2, "new", "other weights"),
        ("replace", 2, "new", "other numbers"),
        ("replace", 2, "new", "other shapes"),
    ],
)
def test_an_interrupted_save_leaves_the_old_model_or_the_new(
    name, change, what, n, wins, tmp_path, monkeypatch
):
    row = OF[name]
    old = row.make()
    new = row.make(**CHANGES[change])
    old.save(tmp_path)
    for killed in (False, True, False):  # three times, never repaired
        with monkeypatch.context() as patch:
            cut(patch, what, n)
            if killed:  # then nobody sweeps up
                patch.setattr(Path, "unlink", lambda *a, **k: None)
            with pytest.raises(Cut):
                new.save(tmp_path)
        again = row.cls.load(tmp_path)
        right = old if wins == "old" else new
        assert again.config == right.config and equal_models(again, right)
        beside = [*tmp_path.glob("*.part")]
        assert len(os.listdir(tmp_path)) - len(beside) == 2
        assert killed or not beside
        for path in beside:
            path.unlink()
    new.save(tmp_path)
    assert equal_models(row.cls.load(tmp_path), new)
    assert len(os.listdir(tmp_path)) == 2


def test_there_are_two_renames(tmp_path, monkeypatch):
    "So that the test above has interrupted all of them."
    renames = []
    real = os.replace
    monkeypatch.setattr(
        os, "replace", lambda a, b: (renames.append(Path(b).name), real(a, b))
    )
    OF["GPT"].make().save(tmp_path)
    assert renames == [WEIGHTS_NAME, CONFIG_NAME]


def test_the_first_save_interrupted_leaves_no_half_model(tmp_path, monkeypatch):
    row = OF["GPT"]
    for n in (1, 2):
        with monkeypatch.context() as patch:
            cut(patch, "replace", n)
            with pytest.raises(Cut):
                row.make().save(tmp_path)
        if n == 1:
            with pytest.raises(FileNotFoundError):
                row.cls.load(tmp_path)
        else:  # the weights hold a copy of the configuration
            assert equal_models(row.cls.load(tmp_path), row.make())
    row.make().save(tmp_path)
    assert equal_models(row.cls.load(tmp_path), row.make())


# files that are not what was saved


@rows(usual=FAMILIES)
@pytest.mark.parametrize("change", ["other numbers", "other shapes"])
def test_files_of_two_saves_are_refused(row, change, tmp_path):
    row.make().save(tmp_path / "a")
    row.make(**CHANGES[change]).save(tmp_path / "b")
    shutil.copy(tmp_path / "a" / CONFIG_NAME, tmp_path / "b" / CONFIG_NAME)
    (name,) = {"std": None, **CHANGES[change]}.keys() - {"std"}
    with pytest.raises(ValueError, match=f"not of one save: .*{name} "):
        row.cls.load(tmp_path / "b")
    path = tmp_path / "a" / CONFIG_NAME
    path.write_text(path.read_text().replace('"n_heads": 4', '"n_heads": 2'))
    with pytest.raises(ValueError, match="not of one save: n_heads 2 and 4"):
        row.cls.load(tmp_path / "a")


@rows(usual=FAMILIES)
@pytest.mark.parametrize("size", [0, 4, 100, 3000, -100, -1])
def test_a_file_cut_short_is_refused(row, size, tmp_path):
    row.make().save(tmp_path)
    path = tmp_path / WEIGHTS_NAME
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=f"{WEIGHTS_NAME} is no whole safetens"):
        row.cls.load(tmp_path)


def test_a_file_whose_head_is_spoiled_is_refused(tmp_path):
    row = OF["GPT"]
    row.make().save(tmp_path)
    path = tmp_path / WEIGHTS_NAME
    whole = path.read_bytes()
    for at in (1, 8, 9):
        path.write_bytes(whole[:at] + b"\xff" + whole[at + 1 :])
        with pytest.raises(ValueError, match="no whole safetensors file"):
            row.cls.load(tmp_path)


def test_a_pickle_is_refused_and_never_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    row = OF["Seq2Seq"]
    row.make().save(tmp_path)
    path = tmp_path / WEIGHTS_NAME
    for write in (
        lambda: path.write_bytes(pickle.dumps(Trap())),
        lambda: torch.save({"x": Trap()}, path),
    ):
        write()
        with pytest.raises(ValueError, match="no whole safetensors file"):
            row.cls.load(tmp_path)
    assert not (tmp_path / "sprung").exists()


def test_missing_and_broken_files_are_named(tmp_path):
    row = OF["Llama"]
    with pytest.raises(FileNotFoundError, match="a folder, not a file"):
        read_safetensors(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        row.cls.load(tmp_path)
    row.make().save(tmp_path)
    path = tmp_path / CONFIG_NAME
    text = path.read_text()
    for broken in (text[:20].encode(), b"{", b"\xff\xfe"):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=f"{CONFIG_NAME}.*is no JSON"):
            row.cls.load(tmp_path)
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match=f"{CONFIG_NAME} holds list, not an obj"):
        row.cls.load(tmp_path)
    path.write_bytes(b"\xff\xfe")
    row.make(0.2).save(tmp_path)  # over a broken one
    assert equal_models(row.cls.load(tmp_path), row.make(0.2))
    path.unlink()
    with pytest.raises(FileNotFoundError, match="no such file"):
        row.cls.load(tmp_path)


def test_each_bit_of_a_saved_model_is_looked_at(tmp_path):
    "A flipped bit is refused in a sentence, or it was in what loading does not use."
    row = OF["GPT"]
    model = row.make(n_layers=1)
    model.save(tmp_path)
    path = tmp_path / WEIGHTS_NAME
    data = path.read_bytes()
    first_number = 8 + int.from_bytes(data[:8], "little")
    said = []
    for i in [*range(0, first_number, 5), *range(first_number, len(data), 397)]:
        damaged = bytearray(data)
        damaged[i] ^= 1 << i % 7
        path.write_bytes(damaged)
        try:
            again = row.cls.load(tmp_path)
        except ValueError as error:
            said.append(str(error))
            assert "model.safetensors" in said[-1] or "holds a" in said[-1], error
        else:
            assert i < first_number and equal_models(again, model), i
    of_numbers = [text for text in said if f"{path} is damaged: the SHA-256" in text]
    assert len(of_numbers) > len(range(first_number, len(data), 397))
    header = data[8:first_number]
    for kind in (b'"F32"', b'"I32"'):  # as many bytes, and other numbers
        path.write_bytes(
            data[:8] + header.replace(b'"F32"', kind) + data[first_number:]
        )
        if kind == b'"F32"':
            assert equal_models(row.cls.load(tmp_path), model)
        else:
            with pytest.raises(ValueError, match="is damaged"):
                row.cls.load(tmp_path)


def test_a_file_without_a_hash_is_loaded_as_it_is(tmp_path):
    "Of other programs, and of versions of this one that wrote none."
    row = OF["GPT"]
    row.make().save(tmp_path)
    path = tmp_path / WEIGHTS_NAME
    tensors, about = read_safetensors(path)
    assert len(about.pop("tensors_sha256")) == 64
    name = next(iter(tensors))
    tensors[name][0] += 1
    save_file(tensors, path, about)
    assert torch.equal(row.cls.load(tmp_path).state_dict()[name], tensors[name])


def test_hashes_of_all_kinds_of_tensors(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = OF["GPT"].config
            for i, x in enumerate(ODD_TENSORS):
                self.register_buffer(f"x{i}", x.clone())

    save_model(Odd(), tmp_path)
    tensors, _ = read_safetensors(tmp_path / WEIGHTS_NAME)
    for i, x in enumerate(ODD_TENSORS):
        assert torch.equal(tensors[f"x{i}"], x) and tensors[f"x{i}"].dtype == x.dtype


ODD_TENSORS = [
    torch.tensor(3),
    torch.zeros(0, 4),
    torch.tensor([True, False]),
    torch.randn(2, 3).bfloat16().mT,
    torch.randn(3, dtype=torch.complex64),
    torch.arange(5, dtype=torch.uint8),
]


def test_a_state_that_is_no_tensor_is_refused(tmp_path):
    class Counts(nn.Module):
        def get_extra_state(self):
            return {"n": 7}

        def set_extra_state(self, state):
            pass

    model = OF["GPT"].make()
    model.save(tmp_path)
    model.blocks[1].counts = Counts()
    with pytest.raises(ValueError, match=r"^blocks\.1\.counts has a state of its own"):
        OF["GPT"].make(0.2).save(tmp_path / "other")
        model.save(tmp_path)
    assert equal_models(OF["GPT"].cls.load(tmp_path), OF["GPT"].make())
    assert len(os.listdir(tmp_path)) == 3


def test_a_model_and_a_tokenizer_of_other_sizes():
    model = OF["GPT"].make()
    for same in (range(VOCAB), None, object()):
        require_same_vocabulary(model, same)
    require_same_vocabulary(nn.Linear(2, 2), range(5))
    for n in (VOCAB - 1, VOCAB + 1):
        with pytest.raises(
            ValueError,
            match=f"^the model has vocab_size {VOCAB}, and the tokenizer {n} ids: "
            f"they do not belong together; make the model with vocab_size={n}",
        ) as caught:
            require_same_vocabulary(model, range(n))
        # a tokenizer can get more ids, and not fewer
        assert ("with_reserved_tokens" in str(caught.value)) == (n < VOCAB)
    two = OF["Seq2Seq"].change(decoder_vocab_size=VOCAB + 1)
    with pytest.raises(ValueError, match=f"decoder_vocab_size {VOCAB + 1}, "):
        require_same_vocabulary(OF["Seq2Seq"].cls(two), range(VOCAB))


class TwoSides(list):
    "As many ids as it has entries, of which the first four are a source's."

    source = range(4)


def test_an_encoder_with_a_table_of_its_own_needs_the_source_alone():
    def seq2seq(vocab_size, decoder_vocab_size=None):
        return OF["Seq2Seq"].cls(
            OF["Seq2Seq"].change(
                vocab_size=vocab_size, decoder_vocab_size=decoder_vocab_size
            )
        )

    sides = TwoSides(range(9))
    for fits in (seq2seq(9), seq2seq(9, 9), seq2seq(4, 9)):
        require_same_vocabulary(fits, sides)
    for wrong, said in (
        (seq2seq(4), "^the model has vocab_size 4, and the tokenizer 9 ids"),
        (seq2seq(5, 9), "^the model has vocab_size 5, and the tokenizer 9 ids"),
        (seq2seq(4, 5), "^the model has decoder_vocab_size 5, and the tokenizer 9"),
        (seq2seq(9, 4), "^the model has decoder_vocab_size 4, and the tokenizer 9"),
    ):
        with pytest.raises(ValueError, match=said):
            require_same_vocabulary(wrong, sides)


def share_otherwise(model, how):
    "Share, or cut apart, what every model of this configuration has otherwise."
    if how == "untied":
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
    elif how == "tied":
        model.lm_head.weight = model.embed.weight
    else:
        model.blocks[1] = model.blocks[0]
    return model


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    "tied, how, words",
    [
        (
            True,
            "untied",
            "embed.weight and lm_head.weight are two tensors here, and on",
        ),
        (False, "tied", "embed.weight and lm_head.weight are one tensor here, and two"),
        (
            True,
            "blocks",
            r"blocks\.0\..* and blocks\.1\..* are one tensor here, and two",
        ),
    ],
)
def test_tensors_that_no_load_would_share_so_are_not_saved(
    tied, how, words, large, tmp_path, monkeypatch
):
    if large:
        monkeypatch.setattr(saving, "_SMALL", 0)
    config = LlamaConfig(
        vocab_size=9, d_model=8, n_heads=2, n_layers=2, tie_word_embeddings=tied
    )
    model = share_otherwise(Llama(config), how)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=words):
        save_model(model, tmp_path / "model")
    assert torch.equal(before, torch.get_rng_state())
    assert not (tmp_path / "model").exists()
    kept = Llama(config)
    save_model(kept, tmp_path / "kept")
    assert equal_models(load_model(Llama, tmp_path / "kept"), kept)


def test_a_head_that_was_cut_off_its_table_is_not_saved(tmp_path):
    model = share_otherwise(
        GPT(GPTConfig(vocab_size=9, d_model=8, n_heads=2)), "untied"
    )
    with pytest.raises(ValueError, match=r"lm_head\.weight are two tensors here"):
        save_model(model, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_folder_that_save_did_not_write_is_refused(tmp_path):
    row = OF["GPT"]
    save_file({"x": torch.zeros(2)}, tmp_path / WEIGHTS_NAME)
    (tmp_path / CONFIG_NAME).write_text('{"d_model": 16, "model_type": "gpt2"}')
    with pytest.raises(ValueError, match="and no model that save wrote"):
        row.cls.load(tmp_path)


@every
def test_weights_that_do_not_fit_are_listed(row, tmp_path):
    "Rewritten by another program, that is without the inner copy."
    row.make().save(tmp_path)
    path = tmp_path / WEIGHTS_NAME
    tensors = load_file(path)
    save_file(tensors, path)
    assert equal_models(row.cls.load(tmp_path), row.make())
    gain, table = (
        next(n for n, t in tensors.items() if t.shape == shape)
        for shape in ((16,), (VOCAB, 16))
    )
    tensors[gain] = torch.zeros(15)
    tensors["extra"] = tensors.pop(table)
    save_file(tensors, path)
    with pytest.raises(ValueError) as problem:
        row.cls.load(tmp_path)
    assert sorted(str(problem.value).splitlines()) == sorted(
        [
            f"the weights do not fit {row.cls.__name__}:",
            f"  missing: {table} ({VOCAB}, 16)",
            f"  unknown: extra ({VOCAB}, 16)",
            f"  {gain}: (15,), expected (16,)",
        ]
    )


# weights of a model


def test_all_misfits_are_listed_and_nothing_is_changed():
    row = OF["Seq2Seq"]
    model = row.make()
    tensors = dict(row.make(0.2).state_dict())
    before = copy.deepcopy(model.state_dict())
    del tensors["blocks.0.attention.norm.bias"]
    del tensors["embed.weight"], tensors["lm_head.weight"]
    tensors["blocks.1.extra"] = torch.zeros(2, 3)
    tensors["encoder_blocks.0.attention.sublayer.q_proj.weight"] = randn(4, 4)
    with pytest.raises(ValueError) as error:
        load_weights(model, tensors)
    lines = str(error.value).splitlines()
    assert lines[0] == "the weights do not fit Seq2Seq:"
    assert sorted(lines[1:]) == [
        "  encoder_blocks.0.attention.sublayer.q_proj.weight: (4, 4), expected "
        "(16, 16)",
        "  missing: blocks.0.attention.norm.bias (16,)",
        f"  missing: embed.weight ({VOCAB}, 16)",
        "  unknown: blocks.1.extra (2, 3)",
    ]
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


@every
def test_a_shared_tensor_may_come_under_any_of_its_names(row):
    source = row.make(0.2)
    full = source.state_dict()
    tied = shared(source)
    first, *others = tied[0] if tied else (None,)
    for gone in ((), (first,), others):
        model = row.make()
        load_weights(model, {n: t for n, t in full.items() if n not in gone})
        assert equal_models(model, source) and shared(model) == tied
    for name in others:
        apart = {**full, name: full[name] + 1}
        with pytest.raises(ValueError, match=f"{name}: differs from {first}"):
            load_weights(row.make(), apart)


def test_loading_weights_keeps_the_type_of_the_model():
    row = OF["GPT"]
    model = row.make().bfloat16()
    source = row.make(0.2)
    load_weights(model, source.state_dict())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.embed.weight, source.embed.weight.bfloat16())


@dataclass(frozen=True, kw_only=True, repr=False)
class OddConfig(ModelConfig):
    d: int = 4


class Odd(nn.Module):
    "Shared tensors, views, empty ones, buffers, several types; no Model."

    config_class = OddConfig

    def __init__(self, config, extra=None):
        super().__init__()
        self.config = config
        self.extra = extra
        self.a = nn.Linear(config.d, config.d, bias=False)
        self.b = nn.Linear(config.d, config.d, bias=False)
        self.b.weight = self.a.weight
        self.norm = nn.LayerNorm(config.d)
        large = torch.arange(12.0)
        self.view = nn.Parameter(large[2:6])
        self.other = nn.Parameter(large[4:9])  # overlaps
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).T)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.void = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("table", torch.ones(2), persistent=False)


def test_views_shares_and_types_of_all_kinds_survive(tmp_path):
    odd = Odd(OddConfig()).bfloat16()
    odd.norm.float()
    with torch.no_grad():
        odd.count += 3
        for p in odd.parameters():
            p.add_(1.0)
    save_model(odd, tmp_path)
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    again = load_model(Odd, tmp_path, extra="part")
    assert torch.equal(torch.rand(4), want)
    assert equal_models(odd, again) and again.extra == "part"
    assert again.b.weight is again.a.weight
    assert again.count.item() == 10 and again.count.dtype == torch.int64
    assert again.norm.weight.dtype == torch.float32
    assert again.table.dtype == torch.bfloat16
    assert (again.table == 1).all()
    odd = Odd(OddConfig())  # with views that overlap
    save_model(odd, tmp_path)
    assert equal_models(odd, load_model(Odd, tmp_path))


def test_two_parameters_over_one_memory_are_written_once(tmp_path):
    odd = Odd(OddConfig())
    odd.b.weight = nn.Parameter(odd.a.weight.data)  # shares the memory
    assert odd.b.weight is not odd.a.weight
    save_model(odd, tmp_path)
    tensors, _ = read_safetensors(tmp_path / WEIGHTS_NAME)
    assert "a.weight" in tensors and "b.weight" not in tensors
    assert equal_models(odd, load_model(Odd, tmp_path))


def test_a_table_of_someone_else_survives(tmp_path, monkeypatch):
    "A buffer that is not saved, in a Model: it is made the usual way."
    monkeypatch.setattr("tformer.models.base._SMALL", 0)

    class Waves(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(4.0), persistent=False)

    class Wavy(Model):
        config_class = OddConfig

        def __init__(self, config):
            super().__init__(config)
            self.waves = Waves()
            self.lm_head = nn.Linear(4, 4)

    @dataclass(frozen=True, kw_only=True, repr=False)
    class WavyConfig(OddConfig):
        max_len: int = 3

    Wavy.config_class = WavyConfig
    Wavy(WavyConfig()).save(tmp_path)
    again = Wavy.load(tmp_path)
    assert torch.equal(again.waves.table, torch.arange(4.0))


@every
def test_a_compiled_model_is_saved_under_its_own_names(row, tmp_path):
    model = row.make()
    save_model(torch.compile(model), tmp_path)
    assert equal_models(row.cls.load(tmp_path), model)
    other = row.make(0.2)
    load_weights(torch.compile(other), model.state_dict())
    assert equal_models(other, model)


# made without memory

WAYS = {
    "to_empty, load_weights": lambda model, state: load_weights(
        model.to_empty(device="cpu"), state
    ),
    "to_empty, load_state_dict": lambda model, state: model.to_empty(
        device="cpu"
    ).load_state_dict(state),
    "assign": lambda model, state: model.load_state_dict(state, assign=True),
}


@every
@pytest.mark.parametrize("way", by_day(WAYS, "to_empty, load_weights"))
@pytest.mark.parametrize(
    "dtype", by_day([torch.float32, torch.bfloat16], torch.float32)
)
def test_made_on_meta_and_loaded_equals_made_here(row, way, dtype, monkeypatch):
    right = row.make().to(dtype)
    with torch.device("meta"):
        model = row.cls(row.config).to(dtype)
    assert all(p.is_meta for p in model.parameters())
    real = torch.empty_like  # what is in fresh memory, made sure of
    monkeypatch.setattr(torch, "empty_like", lambda t, **how: real(t, **how).fill_(77))
    WAYS[way](model, copy.deepcopy(right.state_dict()))
    monkeypatch.undo()
    model.eval()
    assert equal_models(model, right)
    assert torch.equal(row.run(model, row.ids()), row.run(right, row.ids()))
    assert way == "assign" or shared(model) == shared(right)


@pytest.mark.parametrize("name", ["Seq2Seq", "GPT", "Llama, grouped, tied, scaled"])
def test_tables_stay_tied_when_weights_are_assigned(name):
    row = OF[name]
    with torch.device("meta"):
        model = row.cls(row.config)
    model.load_state_dict(row.make().state_dict(), assign=True)
    assert shared(model) == shared(row.make())


# parts that the configuration does not tell of


def test_an_attention_of_ones_own_is_refused_by_name_or_loaded(tmp_path):
    row = OF["Llama"]
    config = row.config
    normed = make_gqa_factory(row.config, qk_norm=True)
    model = spread(Llama(config, normed), 0.3)
    model.save(tmp_path)
    with pytest.raises(
        ValueError,
        match=r"holds a Llama with attention "
        r"SelfAttention.*q_norm.*the attention_factory= that",
    ):
        Llama.load(tmp_path)
    again = Llama.load(tmp_path, attention_factory=normed)
    assert torch.equal(again(row.ids()), model(row.ids()))
    with pytest.raises(ValueError, match="holds a Llama, not a Qwen3"):
        Qwen3.load(tmp_path)
    with pytest.raises(ValueError, match="Llama with attention"):
        load_model(Llama, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        dict(rope_theta=500.0),
        dict(rope_scaling=None),
        dict(n_heads=2),
        dict(n_kv_heads=None),
    ],
)
def test_attentions_of_equal_weights_are_told_apart(change, tmp_path):
    "Names and shapes agree; what is computed does not."
    config = OF["Llama, grouped, tied, scaled"].config
    config = dataclasses.replace(config, n_kv_heads=4, n_heads=4)
    other = dataclasses.replace(
        config,
        **(dict(n_kv_heads=2, d_head=8) if "n_heads" in change else {}),
        **change,
    )
    if change == dict(n_kv_heads=None):
        other = dataclasses.replace(config, eps=0.1)  # of nothing in it
    model = spread(Llama(config, make_gqa_factory(other)), 0.3)
    model.save(tmp_path)
    if change == dict(n_kv_heads=None):
        assert equal_models(Llama.load(tmp_path), model)
        return
    with pytest.raises(
        ValueError,
        match=r"(?s)with attention .*, but what "
        r"was made has .*the attention_factory= that",
    ):
        Llama.load(tmp_path)
    again = Llama.load(tmp_path, attention_factory=make_gqa_factory(other))
    ids = OF["Llama"].ids()
    assert torch.equal(again(ids), model(ids))
    assert not torch.allclose(spread(Llama(config), 0.3)(ids), model(ids))


def test_layers_that_differ_are_described_one_by_one(tmp_path):
    config = OF["Llama"].config

    def attention(layer):
        return make_gqa_factory(config, qk_norm=layer == 1)(layer)

    model = Llama(config, attention)
    first, second = (describe_module(b.attention.sublayer) for b in model.blocks)
    assert model.describe_components() == {"attention": f"{first}; {second}"}
    assert "q_norm" in second and "q_norm" not in first
    model.save(tmp_path)
    assert equal_models(Llama.load(tmp_path, attention_factory=attention), model)
    with pytest.raises(ValueError, match="with attention"):
        Llama.load(tmp_path, attention_factory=make_gqa_factory(config))


# on other machines


@pytest.mark.gpu
@every
@pytest.mark.parametrize("where", ["moved", "born", "loaded"])
def test_it_runs_on_cuda_and_is_saved_from_there(row, where, tmp_path):
    model = row.make()
    ids = row.ids()
    positions = padded()
    right = row.run(model, ids, positions=positions)
    if where == "born":
        with torch.device("cuda"):
            there = row.cls(row.config).eval()
        load_weights(there, model.state_dict())
    else:
        model.save(tmp_path / "a")
        there = (
            row.cls.load(tmp_path / "a") if where == "loaded" else copy.deepcopy(model)
        ).cuda()
    assert shared(there) == shared(model)
    if not row.source:  # whose sources are drawn here
        found = row.run(there, ids.cuda(), positions=positions.cuda()).cpu()
        if found.ndim == 3:
            found = found[positions >= 0]
            right = right[positions >= 0]
        close(found, right, 1e-4)
    there.save(tmp_path)
    assert equal_models(row.cls.load(tmp_path), model)


# compiled


@plain_only
@rows(usual=FAMILIES)
def test_it_compiles_as_one_graph(row):
    model = row.make(n_layers=1)
    ids = row.ids(2)
    positions = padded(2)
    torch._dynamo.reset()  # it limits the graphs of one function
    how = dict(fullgraph=True, backend="eager")
    fast = torch.compile(model, **how)
    with torch.no_grad():
        for some in (ids, ids[:, :5]):
            close(row.run(fast, some), row.run(model, some))
        found, right = (row.run(m, ids, positions=positions) for m in (fast, model))
        if found.ndim == 3:
            found = found[positions >= 0]
            right = right[positions >= 0]
        close(found, right)
        if row.source:
            close(
                torch.compile(model.encode, **how)(ids, positions >= 0),
                model.encode(ids, positions >= 0),
            )
        if row.causal:
            cache = model.new_cache(2)
            parts = [row.run(fast, x, cache=cache) for x in ids.split([8, 1, 1, 2], 1)]
            close(torch.cat(parts, 1), row.run(model, ids))


@pytest.mark.nightly
@plain_only
def test_it_compiles_to_code():
    row = OF["Llama, grouped, tied, scaled"]
    model = row.make(n_layers=1)
    ids = row.ids(2, 8)
    positions = padded(2, 8)
    torch._dynamo.reset()
    fast = torch.compile(model, fullgraph=True, backend="inductor")
    with torch.no_grad():
        close(
            fast(ids, positions=positions)[positions >= 0],
            model(ids, positions=positions)[positions >= 0],
        )


# --- what the attention of somebody else is handed


class Told(nn.Module):
    "An attention that notes for how many rows and tokens it makes a cache."

    def __init__(self):
        super().__init__()
        self.told = []

    def new_cache(self, batch_size, max_len):
        self.told.append((batch_size, max_len))
        return DynamicLayerCache(batch_size)


@pytest.mark.parametrize(
    "make",
    [
        lambda part: new_layer_cache(nn.Sequential(nn.Identity(), part), 3, 17),
        lambda part: TransformerBlock(part, nn.Identity()).new_cache(3, 17),
        lambda part: DecoderBlock(part, nn.Identity(), nn.Identity()).new_cache(3, 17),
    ],
    ids=["wrapped", "in a block", "in a decoder block"],
)
def test_an_attention_is_told_rows_and_tokens(make):
    part = Told()
    make(part)
    assert part.told == [(3, 17)]


def test_an_attention_is_told_how_many_tokens_will_be_read():
    "By whoever lets a model write: no more than it will keep, and no fewer."
    model = Llama(
        LlamaConfig(vocab_size=9, d_model=8, n_layers=1, n_heads=2, max_len=20)
    )
    part = model.blocks[0].attention.sublayer
    told = []

    def new_cache(batch_size, max_len):
        told.append((batch_size, max_len))
        return DynamicLayerCache(batch_size)

    part.new_cache = new_cache
    model.new_cache(2)
    model.new_cache(2, 7)
    generate(model, [[1, 2, 3], [4]], max_new_tokens=5)
    assert told == [(2, None), (2, 7), (2, 8)]
    told.clear()
    runner = ModelRunner(model, 3, max_len=12)
    runner.prefill([1], [[1, 2, 3]], [0])
    assert told == [(3, 12), (1, 12)]
