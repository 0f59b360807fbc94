"""Interfaces that are written down: each class of the package can be called by them.

``isinstance`` compares names. What a call looks like is compared here by
``inspect.signature``, of classes that are found and not listed.
"""

import importlib
import inspect
import pkgutil

import pytest
import torch
from torch import nn

import test_attention
import test_caches
import tformer
from models import ROWS, Preallocates, causal
from tformer.attention import CrossAttention, SelfAttention
from tformer.compiled import CompiledModel
from tformer.generate import generate
from tformer.gpt import GPT
from tformer.kv_cache import (
    BatchCache,
    CrossAttentionCache,
    DynamicLayerCache,
    KVCache,
    LayerCache,
)
from tformer.model import DecoderModel, TransformerBlock
from tformer.paged_cache import BlockPool, PagedLayerCache, new_paged_cache
from tformer.prefix import PrefixedModel
from tformer.static_cache import StaticLayerCache, new_static_cache
from tformer.variants.sliding_window import RollingLayerCache

GPT_ROW = next(row for row in ROWS if row.name == "GPT")


def module_names():
    found = pkgutil.walk_packages(tformer.__path__, "tformer.")
    return [module.name for module in found if not module.name.endswith("__main__")]


def classes(*modules):
    "Each class, where it is written, but the protocols themselves."
    for module in modules:
        for cls in vars(module).values():
            own = inspect.isclass(cls) and cls.__module__ == module.__name__
            if own and not getattr(cls, "_is_protocol", False):
                yield cls


def parameters(function):
    return inspect.signature(function).parameters


def is_cache(cls):
    "It keeps tokens: has ``update`` with positions, or forgets and selects."
    update = getattr(cls, "update", None)
    keeps = inspect.isfunction(update) and "positions" in parameters(update)
    return keeps or (hasattr(cls, "crop") and hasattr(cls, "select"))


def is_decoder(cls):
    "It makes caches, and is called with ids and one of them."
    call = getattr(cls, "forward", None) or cls.__call__
    if not hasattr(cls, "new_cache") or not inspect.isfunction(call):
        return False
    return {"ids", "cache"} <= {*parameters(call)}


def bind_error(protocol, cls):
    """Why a class cannot be called as a protocol says, or None.

    Required parameters of the protocol are passed in their order, those that
    have a default by name.
    """
    for name, member in inspect.getmembers(protocol, inspect.isfunction):
        if name.startswith("_") and name != "__call__":
            continue
        method = getattr(cls, name, None)
        if name == "__call__" and issubclass(cls, nn.Module):
            method = cls.forward
        if method is None:
            return f"{cls.__name__} has no {name}"
        args = []
        named = {}
        for parameter in parameters(member).values():
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD):
                if parameter.kind is parameter.KEYWORD_ONLY:
                    named[parameter.name] = None
            elif parameter.kind is parameter.VAR_POSITIONAL:
                args += [None, None]  # such as keys and values
            else:
                args.append(None)
        try:
            inspect.signature(method).bind(*args, **named)
        except TypeError as error:
            return f"{cls.__name__}.{name}: {error}"
    return None


def caches():
    "Every cache that the models of the table make, in each of its ways."
    made = []
    for row in ROWS:
        if row.cls is None or not row.causal:
            continue
        model = row.make()
        for cache in (
            model.new_cache(2, 8),
            new_static_cache(model, 2, 8),
            new_paged_cache(model, BlockPool(9, 4), 2),
        ):
            made += [cache, *cache.layers, *cache._leaves()]
            with torch.no_grad():
                row.run(model, row.ids(2, 3), cache=cache)
    found = {}
    for cache in made:
        found.setdefault(type(cache), cache)
    return found


PACKAGE = [importlib.import_module(name) for name in module_names()]
OWN = [*classes(*PACKAGE)]


def test_every_cache_of_the_package_is_one():
    "A class that is new is found by its methods, and has to be made above."
    made = caches()
    found = {cls for cls in OWN if is_cache(cls)}
    assert found == {*made}
    assert {DynamicLayerCache, StaticLayerCache, PagedLayerCache} < found
    assert {CrossAttentionCache, KVCache, RollingLayerCache} < found
    for cls, cache in made.items():
        assert isinstance(cache, BatchCache), cls
        assert isinstance(cache, LayerCache) == hasattr(cls, "update"), cls
        protocol = LayerCache if hasattr(cls, "update") else BatchCache
        assert bind_error(protocol, cls) is None


OTHERS = [cls for cls in classes(test_caches, test_attention) if is_cache(cls)]


@pytest.mark.parametrize("cls", OTHERS, ids=lambda cls: cls.__name__)
def test_caches_of_other_people_are_called_in_the_same_way(cls):
    protocol = LayerCache if hasattr(cls, "update") else BatchCache
    assert bind_error(protocol, cls) is None


def test_caches_that_are_tested_are_found():
    names = {cls.__name__ for cls in OTHERS}
    assert names == {"Rolling", "Preallocated", "Slots", "Window", "Refuses"}
    cache = test_attention.Window(4)
    assert isinstance(cache, LayerCache)
    cache.update(torch.zeros(2, 1, 3, 1), positions=torch.arange(3)[None])
    assert isinstance(cache, LayerCache) and cache.lengths.tolist() == [3, 3]


DECODERS = [cls for cls in OWN if is_decoder(cls)]


@pytest.mark.parametrize("cls", DECODERS, ids=lambda cls: cls.__name__)
def test_every_decoder_is_called_in_the_same_way(cls):
    assert issubclass(cls, DecoderModel)
    assert bind_error(DecoderModel, cls) is None


def test_decoders_are_found():
    names = {cls.__name__ for cls in DECODERS}
    assert names >= {row.cls.__name__ for row in ROWS if row.cls in OWN and row.causal}
    assert names >= {"CausalLM", "PrefixedModel", "CompiledModel"}


@causal
def test_every_decoder_is_one(row):
    model = row.make()
    assert (
        isinstance(model, DecoderModel)
        and bind_error(DecoderModel, type(model)) is None
    )
    assert isinstance(model.new_cache(2, 8), BatchCache)
    assert model.max_len and model.lm_head and model.hidden_states


def test_models_around_models_are_decoders_as_well(monkeypatch):
    model = GPT_ROW.make()
    monkeypatch.setattr("tformer.compiled.require_compiler", lambda: None)
    for other in (
        Preallocates(model),
        PrefixedModel(model, [1, 2]),
        CompiledModel(model),
    ):
        assert isinstance(other, DecoderModel)
        assert bind_error(DecoderModel, type(other)) is None
        assert isinstance(other.new_cache(2, 8), BatchCache)


def test_attentions_and_blocks_make_caches():
    for part in (
        SelfAttention(16, 4, causal=True),
        TransformerBlock(SelfAttention(16, 4, causal=True), nn.Identity()),
        CrossAttention(16, 4),
    ):
        cache = part.new_cache(2, 8)
        assert isinstance(cache, BatchCache)
        assert isinstance(cache, LayerCache) == (not isinstance(part, CrossAttention))


def unlike(**changes):
    "A cache with a method that cannot be called as others are."
    return type("Unlike", (DynamicLayerCache,), changes)


@pytest.mark.parametrize(
    "cls, says",
    [
        (unlike(crop=lambda self: None), "Unlike.crop: too many positional"),
        (
            unlike(select=lambda self, rows, n: None),
            "Unlike.select: missing a required",
        ),
        (unlike(set_rows=lambda self, rows: None), "Unlike.set_rows: too many"),
        (unlike(update=lambda self, k, v: None), "Unlike.update: got an unexpected"),
        (unlike(update=lambda self, k, *, positions: None), "Unlike.update: too many"),
        (unlike(select=None), "Unlike has no select"),
    ],
)
def test_a_cache_that_is_called_otherwise_is_seen(cls, says):
    assert bind_error(LayerCache, DynamicLayerCache) is None
    assert bind_error(LayerCache, cls).startswith(says)


def test_a_model_that_is_called_otherwise_is_seen():
    class Other(GPT):
        def new_cache(self, batch_size):
            "As many models of other people have it."

    assert bind_error(DecoderModel, GPT) is None
    assert bind_error(DecoderModel, Other) == (
        "Other.new_cache: too many positional arguments"
    )
    assert not isinstance(nn.Linear(2, 2), DecoderModel)
    assert not isinstance([], BatchCache)


def test_a_model_and_a_cache_that_inherit_from_nothing_write():
    "No more than the protocols list."

    class Nothing:
        key_positions = None
        lengths = torch.zeros(1, dtype=torch.int64)
        nbytes = 0

        def select(self, rows):
            pass

        def crop(self, n):
            pass

        def set_rows(self, rows, source):
            pass

    class Next:
        def __call__(self, ids, *, cache=None, positions=None):
            return torch.eye(5)[(ids + 1) % 5]

        def new_cache(self, batch_size, max_len):
            return Nothing()

    model = Next()
    assert isinstance(model, DecoderModel) and isinstance(Nothing(), BatchCache)
    texts = generate(model, [[3], [1, 2]], max_new_tokens=3, stop_token_ids=[0])
    assert [text.ids for text in texts] == [[4], [3, 4]]
