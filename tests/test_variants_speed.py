"""The script that measures all attention variants: what it counts, and its rows."""

import sys

import pytest
import torch

from conftest import ROOT

sys.path.insert(0, str(ROOT / "experiments"))
import variants_speed
from variants_speed import common

sys.path.pop(0)

SMALL = variants_speed.Sizes(
    d_model=64,
    n_layers=4,
    n_heads=4,
    vocab_size=32,
    max_len=512,
    window=32,
    kv_rank=24,
    d_nope=16,
    d_rope=8,
    d_v=12,
    top_k=6,
    n_index_heads=2,
    d_index=8,
    d_index_rope=4,
)
COLUMNS = [
    "kind",
    "variant",
    "tokens",
    "ms",
    "lowest",
    "highest",
    "cache_bytes",
    "read_bytes",
    "parameters",
    "rounds",
    "processor",
    *common.about(),
]


def numbers(variant, size, held):
    """The numbers that all layers hold, and those that attention reads in a step.

    In closed form, for a cache that holds so many tokens before the step.
    """
    s = held + 1
    d_head = size.d_model // size.n_heads
    head = 2 * d_head
    shared = size.n_kv_heads * head
    latent = size.kv_rank + size.d_rope
    last = min(held, size.window - 1)
    seen = min(s, size.window)
    chosen = size.d_index * s + shared * size.top_k if s > size.top_k else shared * s
    one_layer = {
        "mha": (size.n_heads * head * held, size.n_heads * head * s),
        "gqa": (shared * held, shared * s),
        "mqa": (head * held, head * s),
        "mla": (latent * held, latent * s),
        "sliding": (shared * last, shared * seen),
        "alternating": (shared * (last + held) / 2, shared * (seen + s) / 2),
        "sparse": ((shared + size.d_index) * held, chosen),
    }
    return tuple(int(size.n_layers * n) for n in one_layer[variant])


@pytest.fixture(scope="module")
def models():
    return variants_speed.make_models(SMALL)


def test_variants_are_those_of_the_record(models):
    assert list(models) == list(variants_speed.VARIANTS)
    real = variants_speed.Sizes()
    assert real.d_model // real.n_heads == 64
    keys = {v: numbers(v, real, 1000)[0] for v in variants_speed.VARIANTS}
    assert keys["mla"] == keys["mqa"] == 4 * 128 * 1000
    assert keys["mha"] == 4 * keys["gqa"] == 8 * keys["mqa"]
    # nothing but the attention differs
    outside = {
        variant: {
            name: x.shape
            for name, x in model.state_dict().items()
            if ".attention.sublayer." not in name
        }
        for variant, model in models.items()
    }
    assert all(outside["mha"] == shapes for shapes in outside.values())


@pytest.mark.parametrize("held", [2, 4, 5, 6, 7, 20, 30, 31, 32, 33, 90])
@pytest.mark.parametrize("variant", variants_speed.VARIANTS)
@torch.inference_mode()
def test_bytes_are_those_of_the_formulas(variant, held, models):
    found = variants_speed.step_sizes(models[variant], held)
    assert found == tuple(4 * n for n in numbers(variant, SMALL, held))


def test_memory_is_counted_once():
    count = variants_speed.count_bytes
    room = torch.zeros(1, 3, 10, 6)
    kept = room.narrow(2, 2, 5)
    assert count(kept) == 4 * 3 * 5 * 6
    assert count(kept, kept[..., :4]) == count(kept, kept) == count(kept)
    # the two share 2 of 5 and 4 slots
    assert count(kept, room[:, :, 5:9]) == 4 * 3 * 7 * 6
    assert count(kept, kept.clone()) == 2 * count(kept)
    assert count(kept.mT, kept[:, :1].expand(-1, 7, -1, -1)) == count(kept)
    assert count(room.double()) == 8 * room.numel()


@torch.inference_mode()
def test_watching_changes_nothing_and_ends(models):
    ids = variants_speed.random_ids(models["sparse"], 9)
    before = models["sparse"](ids)
    kernel = torch.nn.functional.scaled_dot_product_attention
    score = variants_speed.LightningIndexer.score
    with variants_speed.watched_reads() as read:
        assert torch.equal(models["sparse"](ids), before)
    assert len(read) == 2 * SMALL.n_layers
    models["sparse"](ids)
    assert len(read) == 2 * SMALL.n_layers
    assert torch.nn.functional.scaled_dot_product_attention is kernel
    assert variants_speed.LightningIndexer.score is score


@pytest.mark.parametrize("tokens", [2, 6, 31, 32, 50])
@pytest.mark.parametrize("variant", variants_speed.VARIANTS)
@torch.inference_mode()
def test_a_filled_cache_is_like_one_that_has_read(variant, tokens, models):
    model = models[variant]
    filled = variants_speed.filled_cache(model, tokens)
    read = model.new_cache(1)
    model(variants_speed.random_ids(model, tokens), cache=read)
    for _ in range(3):
        assert filled.nbytes == read.nbytes
        for one, other in zip(filled.layers, read.layers, strict=True):
            assert type(one) is type(other)
            assert [x.shape for x in one.tensors] == [x.shape for x in other.tensors]
            assert one.key_positions.start == other.key_positions.start
            assert one.key_positions.end == other.key_positions.end
            assert getattr(one, "dropped_end", 0) == getattr(other, "dropped_end", 0)
        ids = variants_speed.random_ids(model, 1)
        assert model(ids, cache=filled).isfinite().all()
        model(ids, cache=read)
    assert filled.layers[0].key_positions.end == tokens + 3
    # the vectors are no zeros, and differ between layers
    first, second = (layer.tensors[0] for layer in filled.layers[1:3])
    assert first.std() > 0.5
    assert first.shape != second.shape or not torch.equal(first, second)


@torch.inference_mode()
def test_a_filled_cache_goes_on_as_the_text_does(models, monkeypatch):
    "With the vectors of a text instead of random ones, it gives the next logits."
    for variant, model in models.items():
        if variant in ("sliding", "alternating"):  # they hold fewer vectors
            continue
        ids = variants_speed.random_ids(model, 41)
        read = model.new_cache(1)
        model(ids[:, :40], cache=read)
        vectors = iter([x for layer in read.layers for x in layer.tensors])
        with monkeypatch.context() as patch:
            patch.setattr(torch, "randn", lambda *shape: next(vectors))
            filled = variants_speed.filled_cache(model, 40)
        found = model(ids[:, 40:], cache=filled)
        torch.testing.assert_close(found, model(ids)[:, 40:], atol=1e-5, rtol=1e-4)


def storages(cache):
    return [layer.tensors[0].untyped_storage().data_ptr() for layer in cache.layers]


@pytest.mark.parametrize("variant", ["gqa", "mla", "sliding", "alternating", "sparse"])
@pytest.mark.parametrize("tokens", [12, 100])
@torch.inference_mode()
def test_caches_are_copied_when_the_script_says(variant, tokens, models):
    size = SMALL._replace(window=128)
    model = variants_speed.make_model(variant, size)
    cache = variants_speed.filled_cache(model, tokens)
    cycle = variants_speed.steps_between_copies(cache)
    rolling = [
        layer
        for layer, made in enumerate(cache.layers)
        if isinstance(made, variants_speed.RollingLayerCache)
    ]
    assert len(rolling) == {"sliding": 4, "alternating": 2}.get(variant, 0)
    assert cycle == (None if not rolling else {12: 17, 100: 26}[tokens])
    kept = []  # or another tensor could get the memory of a former one
    copies = []
    for _ in range(2 + (cycle or 10)):
        before = storages(cache)
        kept.append([layer.tensors for layer in cache.layers])
        model(variants_speed.random_ids(model, 1), cache=cache)
        copies.append(
            [
                layer
                for layer, (a, b) in enumerate(
                    zip(before, storages(cache), strict=True)
                )
                if a != b
            ]
        )
    assert copies[0] == rolling
    assert all(not set(found) - set(rolling) for found in copies[:9])
    if cycle:
        assert not any(set(found) & set(rolling) for found in copies[1:cycle])
        assert set(rolling) <= set(copies[cycle])


@torch.inference_mode()
def test_a_full_window_is_copied_each_128_steps():
    size = SMALL._replace(window=variants_speed.Sizes().window, max_len=1024)
    model = variants_speed.make_model("sliding", size)
    cache = variants_speed.filled_cache(model, 600)
    assert variants_speed.steps_between_copies(cache) == 128
    assert len(cache.layers[0].tensors[0][0, 0]) == size.window - 1


def test_the_mean_counts_a_copy_once_in_a_cycle():
    assert variants_speed.mean_step(9.0, 2.0, None) == 2.0
    assert variants_speed.mean_step(9.0, 2.0, 7) == 3.0


def test_decoding_takes_each_variant_in_turn(models, monkeypatch):
    calls = []
    names = {id(model): variant for variant, model in models.items()}

    def milliseconds(model, ids, cache):
        assert ids.shape == (1, 1)
        calls.append((names[id(model)], cache.layers[-1].key_positions.end))
        model(ids, cache=cache)
        return 10.0 if len(calls) <= len(models) else 1.0

    monkeypatch.setattr(variants_speed, "milliseconds", milliseconds)
    with torch.inference_mode():
        times, _ = variants_speed.decode(models, 40, 2)
    steps = 1 + variants_speed.STEPS
    assert calls == 2 * [(variant, 40 + i) for i in range(steps) for variant in models]
    copied = (10 + 16) / 17  # 31 slots are held: room for 16 more
    for variant, found in times.items():
        usual = variant not in ("sliding", "alternating")
        assert found == pytest.approx([1.0 if usual else copied, 1.0])


def check_bytes(row, held, read):
    "Training keeps nothing, and only decoding reads what is kept."
    assert row["cache_bytes"] == ("" if row["kind"] == "train" else str(4 * held))
    assert row["read_bytes"] == (str(4 * read) if row["kind"] == "decode" else "")


def test_rows_are_as_documented(models, monkeypatch, tmp_path):
    monkeypatch.setattr(variants_speed, "Sizes", lambda: SMALL)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "variants_speed.py",
            "--rounds",
            "2",
            "--longest",
            "256",
            "--out",
            str(tmp_path / "some.csv"),
        ],
    )
    threads = torch.get_num_threads()
    try:
        variants_speed.main()
    finally:
        torch.set_num_threads(threads)
    rows = common.read(tmp_path / "some.csv")
    assert [list(row) for row in rows] == len(rows) * [COLUMNS]
    assert [(row["kind"], row["variant"]) for row in rows] == [
        (kind, variant) for kind in ("decode", "prefill", "train") for variant in models
    ]
    for row in rows:
        held, read = numbers(row["variant"], SMALL, 256)
        assert row["tokens"] == "256" and row["rounds"] == "2"
        assert 0 < float(row["lowest"]) <= float(row["ms"]) <= float(row["highest"])
        check_bytes(row, held, read)
        unique = {id(p): p.numel() for p in models[row["variant"]].parameters()}
        assert row["parameters"] == str(sum(unique.values()))


def test_the_longest_text_bounds_what_is_measured():
    assert variants_speed.cases(100) == []
    assert variants_speed.cases(512) == [
        ("decode", 256),
        ("decode", 512),
        ("prefill", 256),
        ("prefill", 512),
        ("train", 256),
        ("train", 512),
    ]
    every = variants_speed.cases(2**14)
    assert ("decode", 2**14) in every and ("prefill", 2**12) in every
    assert len(every) == 15
    assert max(variants_speed.DECODES) + 1 + variants_speed.STEPS <= (
        variants_speed.Sizes().max_len
    )


def test_training_gives_every_weight_a_gradient():
    size = SMALL._replace(max_len=64)
    for variant in variants_speed.VARIANTS:
        model = variants_speed.make_model(variant, size)
        variants_speed.take_gradients(model, variants_speed.random_ids(model, 41))
        assert all(
            p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters()
        )


def test_the_record_is_that_of_the_script():
    rows = common.read(variants_speed.OUT)
    assert [list(row) for row in rows] == len(rows) * [COLUMNS]
    assert [(row["kind"], int(row["tokens"]), row["variant"]) for row in rows] == [
        (*case, variant)
        for case in variants_speed.cases(2**14)
        for variant in variants_speed.VARIANTS
    ]
    for row in rows:
        held, read = numbers(row["variant"], variants_speed.Sizes(), int(row["tokens"]))
        check_bytes(row, held, read)
