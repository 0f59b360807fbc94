"""Interfaces that are written down: each class of the package can be called by them.

``isinstance`` compares names. What a call looks like is compared here by
``inspect.signature``, of classes that are found and not listed.
"""

import functools
import importlib
import inspect
import pkgutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import test_attention
import test_caches
import tformer
from helpers import by_day, close
from models import ROWS, Preallocates, causal
from tformer.inference.beam import beam_search
from tformer.inference.compiled import CompiledModel
from tformer.inference.generation import generate, next_token_logits, stream
from tformer.inference.prefix import PrefixedModel
from tformer.inference.scoring import strided_token_log_probs
from tformer.inference.speculative import DraftModel, PromptLookup, speculative_generate
from tformer.models.base import DecoderModel, TransformerBlock
from tformer.models.gpt import GPT
from tformer.models.llama import Llama
from tformer.nn.attention import CrossAttention, SelfAttention
from tformer.nn.kv_cache import (
    BatchCache,
    CrossAttentionCache,
    DynamicLayerCache,
    KVCache,
    LayerCache,
)
from tformer.nn.paged_cache import BlockPool, PagedLayerCache, new_paged_cache
from tformer.nn.static_cache import StaticLayerCache, new_static_cache
from tformer.serving.engine import Engine
from tformer.serving.requests import Request
from tformer.variants.sliding_window import RollingLayerCache

GPT_ROW = next(row for row in ROWS if row.name == "GPT")
LLAMA_ROW = next(row for row in ROWS if row.name == "Llama")


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
    monkeypatch.setattr("tformer.inference.compiled.require_compiler", lambda: None)
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


def cap(logits):
    "A soft cap, as Gemma 2 has it: monotone, so greedy texts keep their ids."
    return torch.tanh(logits / 0.5) * 0.5


class Capped(Llama):
    "A model whose logits are not those of its output layer."

    def forward(self, ids, *, cache=None, positions=None, mask=None):
        return cap(super().forward(ids, cache=cache, positions=positions, mask=mask))


class HandsOn(Llama):
    "The same, by its own way, which does not know each keyword of a forward."

    def forward(self, ids, **kwargs):
        return cap(self.lm_head(self.hidden_states(ids, **kwargs)))


class Knows(Llama):
    "The same, and it has read how only some of the logits are asked for."

    def forward(self, ids, *, logits_to_keep=0, **kwargs):
        return cap(super().forward(ids, logits_to_keep=logits_to_keep, **kwargs))


class Delegates:
    "No module: it hands each attribute on, and changes the call."

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, ids, *, cache=None, positions=None):
        return cap(self.model(ids, cache=cache, positions=positions))


class ForwardOnly(nn.Module):
    "No more than a decoder must have."

    def __init__(self, model):
        super().__init__()
        self.inside = [model]
        self.max_len = model.max_len

    def new_cache(self, batch_size, max_len=None):
        return self.inside[0].new_cache(batch_size, max_len)

    def forward(self, ids, *, cache=None, positions=None):
        return cap(self.inside[0](ids, cache=cache, positions=positions))


class OtherCall(Llama):
    "A module that has its own way of being called."

    def __call__(self, ids, *, cache=None, positions=None):
        return cap(super().__call__(ids, cache=cache, positions=positions))


def hooked():
    model = LLAMA_ROW.make()
    model.register_forward_hook(lambda model, args, logits: cap(logits))
    return model


def patched():
    "Its forward is replaced; what replaces it says that it is the old one."
    model = LLAMA_ROW.make()
    forward = model.forward

    @functools.wraps(forward)
    def capped(ids, *, cache=None, positions=None):
        return cap(forward(ids, cache=cache, positions=positions))

    model.forward = capped
    return model


def subclass(cls):
    model = cls(LLAMA_ROW.config).eval()
    model.load_state_dict(LLAMA_ROW.make().state_dict())
    return model


CHANGED = {
    "a subclass": lambda: subclass(Capped),
    "a subclass that hands on": lambda: subclass(HandsOn),
    "a subclass that knows": lambda: subclass(Knows),
    "another call": lambda: subclass(OtherCall),
    "a hook": hooked,
    "a patch": patched,
    "a wrapper": lambda: Delegates(LLAMA_ROW.make()),
    "forward only": lambda: ForwardOnly(LLAMA_ROW.make()),
}
changed = pytest.mark.parametrize("make", CHANGED.values(), ids=CHANGED.keys())
PROMPTS = [[5, 9, 5, 9, 5], [7, 3, 8]]


def of_engine(model, **options):
    engine = Engine(model, 2, **options)
    handles = [engine.submit(Request(row, max_new_tokens=6)) for row in PROMPTS]
    return [handle.result()[:2] for handle in handles]


def of_stream(model):
    texts = [([], []) for _ in PROMPTS]
    for step in stream(model, PROMPTS, max_new_tokens=6):
        for row, i, log_prob in step:
            texts[row][0].append(i)
            texts[row][1].append(log_prob)
    return texts


def of_speculation(model, draft):
    found = [
        speculative_generate(model, row, draft, max_new_tokens=6) for row in PROMPTS
    ]
    return [text[:2] for text in found]


def of_prefix(model):
    "The longer prompt only, of which a part is read before."
    [text] = generate(PrefixedModel(model, [5, 9]), [[5, 9, 5]], max_new_tokens=6)
    return [text[:2]]


WAYS = {
    "generate": lambda m: [t[:2] for t in generate(m, PROMPTS, max_new_tokens=6)],
    "stream": of_stream,
    "engine": of_engine,
    "engine, prompts in chunks": lambda m: of_engine(m, max_prefill_tokens=2),
    "engine, blocks": lambda m: of_engine(m, num_blocks=9, block_size=4),
    "engine, blocks and chunks": lambda m: of_engine(
        m, num_blocks=9, block_size=4, max_prefill_tokens=2
    ),
    "prompt lookup": lambda m: of_speculation(m, PromptLookup(min_saved_steps=0)),
    "a draft model": lambda m: of_speculation(m, DraftModel(LLAMA_ROW.make())),
    "a prefix": of_prefix,
}


def expect_capped(texts):
    "The ids of the model as it was made, with the capped log-probabilities."
    plain = LLAMA_ROW.make()
    expected = generate(plain, PROMPTS, max_new_tokens=6)
    assert texts
    for prompt, text, (ids, log_probs) in zip(PROMPTS, expected, texts, strict=False):
        assert ids == text.ids[: len(ids)]
        logits = cap(plain(torch.tensor([prompt + ids])))[0, len(prompt) - 1 : -1]
        true = logits.log_softmax(-1)[range(len(ids)), ids]
        assert log_probs == pytest.approx(true.tolist(), abs=1e-5)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@changed
def test_each_token_comes_out_of_the_call_of_the_model(make, way):
    "What a subclass, a hook or a wrapper does to logits, it does to all of them."
    expect_capped(way(make()))


@changed
def test_beams_and_scores_come_out_of_the_call_of_the_model(make):
    plain = LLAMA_ROW.make()
    model = make()
    [beams] = beam_search(
        model, PROMPTS[:1], num_beams=2, max_new_tokens=4, num_return_sequences=2
    )
    for beam in beams:
        text = torch.tensor([PROMPTS[0] + beam.ids])
        log_probs = cap(plain(text)).log_softmax(-1)[0, :-1]
        log_probs = log_probs[range(8), text[0, 1:]]
        assert beam.log_prob == pytest.approx(log_probs[4:].sum().item(), abs=1e-5)
        close(strided_token_log_probs(model, text[0], 9, 1), log_probs.detach())


@pytest.mark.parametrize(
    "name", by_day(["a subclass", "a subclass that knows", "a hook"], "a hook")
)
def test_a_compiled_model_calls_the_model_it_is_made_of(name):
    model = CHANGED[name]()
    made = CompiledModel(model, backend="eager")
    texts = generate(made, PROMPTS, max_new_tokens=4, drop_finished=False)
    expect_capped([text[:2] for text in texts])


@pytest.mark.parametrize("around", ["nothing", "a prefix", "a compiled step"])
def test_a_hook_is_called_as_often_as_the_model(around, monkeypatch):
    "Of a prompt, too, the logits are made of the last position alone."
    model = LLAMA_ROW.make()
    whole = model
    if around == "a prefix":
        whole = PrefixedModel(model, [5, 9])
    if around == "a compiled step":
        monkeypatch.setattr("tformer.inference.compiled.require_compiler", lambda: None)
        whole = CompiledModel(model)
        whole.step = lambda *args, **kwargs: model(*args, **kwargs)
    shapes = []
    model.register_forward_hook(lambda *given: shapes.append(tuple(given[2].shape)))
    generate(whole, PROMPTS, max_new_tokens=4, drop_finished=False)
    assert shapes == [(2, 1, 47)] * 4
    ids = torch.tensor([PROMPTS[0]])
    every = whole(ids)
    assert every.shape == (1, 5, 47)
    close(whole(ids, logits_to_keep=2), every[:, -2:])


def test_a_decorator_that_hands_on_every_keyword_hides_none():
    model = LLAMA_ROW.make()
    forward = model.forward
    given = []

    @functools.wraps(forward)
    def watched(*args, **kwargs):
        given.append(kwargs)
        return forward(*args, **kwargs)

    model.forward = watched
    next_token_logits(model, torch.tensor(PROMPTS[:1]))
    assert given == [{"logits_to_keep": 1}]


def test_a_compiled_module_is_asked_what_its_own_forward_takes():
    model = LLAMA_ROW.make()
    compiled = torch.compile(model, backend="eager")
    given = []
    compiled.forward = lambda ids, **kwargs: given.append(kwargs) or model(ids)
    next_token_logits(compiled, torch.tensor(PROMPTS[:1]))
    assert given == [{"logits_to_keep": 1}]


def test_what_tells_no_signature_is_called_with_ids_alone():
    "As a method that is written in C."
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(F.one_hot)
    logits = next_token_logits(F.one_hot, torch.tensor([[1, 2]]))
    assert logits.tolist() == [[0, 0, 1]]


@causal
def test_of_a_prompt_only_the_logits_asked_for_are_made(row):
    "They are the last ones, and the cache keeps the whole prompt."
    model = row.make()
    ids = row.ids(3, 7)
    caches = [model.new_cache(3) for _ in range(2)]
    every = row.run(model, ids, cache=caches[0])
    for n in (1, 3, 7):
        some = row.run(model, ids, logits_to_keep=n)
        assert some.shape == (3, n, 47)
        close(some, every[:, -n:])
    assert torch.equal(row.run(model, ids, logits_to_keep=0), row.run(model, ids))
    row.run(model, ids, cache=caches[1], logits_to_keep=1)
    close(*(row.run(model, ids[:, :1], cache=cache) for cache in caches))


def test_a_model_that_answers_all_the_same_is_asked_in_vain():
    "The keyword saves work; nobody relies on its being heeded."

    class Deaf(Llama):
        def forward(self, ids, *, logits_to_keep=0, **kwargs):
            return super().forward(ids, **kwargs)

    ids = torch.tensor([PROMPTS[0]])
    close(next_token_logits(subclass(Deaf), ids), LLAMA_ROW.make()(ids)[:, -1])
