"""Sliding windows: against transformers, all cuts of a text, and what is refused."""

import copy
import itertools

import pytest
import torch
from torch.nn import functional as F

from helpers import close, draw_ids, equal_to_peer, randn, spread

transformers = pytest.importorskip("transformers")
from transformers import MistralConfig, MistralForCausalLM  # noqa: E402

from tformer import check  # noqa: E402
from tformer.inference.generation import generate  # noqa: E402
from tformer.inference.speculative import DraftModel, speculative_generate  # noqa: E402
from tformer.models.base import load_weights  # noqa: E402
from tformer.models.llama import Llama, LlamaConfig  # noqa: E402
from tformer.nn.attention import SelfAttention  # noqa: E402
from tformer.nn.kv_cache import DynamicLayerCache  # noqa: E402
from tformer.nn.positions import Positions  # noqa: E402
from tformer.nn.relative_bias import ALiBi  # noqa: E402
from tformer.nn.static_cache import new_static_cache  # noqa: E402
from tformer.serving.engine import Engine  # noqa: E402
from tformer.serving.requests import Request  # noqa: E402
from tformer.variants.sliding_window import (  # noqa: E402
    RollingLayerCache,
    SlidingWindowAttention,
    make_window_factory,
    window_attend,
)

VOCAB = 47
NAMES = {
    "blocks": "model.layers",
    "embed": "model.embed_tokens",
    "attention.norm": "input_layernorm",
    "attention.sublayer": "self_attn",
    "feed_forward.norm": "post_attention_layernorm",
    "feed_forward.sublayer": "mlp",
}


def their_name(name):
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return f"model.{name}" if name.startswith("norm") else name


def pair(window=6):
    "A model of ours and Mistral with the same weights."
    theirs = spread(
        MistralForCausalLM(
            MistralConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=40,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=256,
                sliding_window=window,
                rms_norm_eps=1e-6,
                tie_word_embeddings=False,
                rope_parameters=dict(rope_type="default", rope_theta=10_000.0),
            )
        ),
        0.2,
    )
    config = LlamaConfig(
        vocab_size=VOCAB,
        d_model=32,
        n_layers=3,
        n_heads=4,
        n_kv_heads=2,
        d_ff=40,
        max_len=256,
        eps=1e-6,
    )
    ours = Llama(config, make_window_factory(config, window))
    tensors = theirs.state_dict()
    load_weights(ours, {name: tensors[their_name(name)] for name in ours.state_dict()})
    return ours.eval(), theirs


# against Mistral


@pytest.mark.parametrize("n", [5, 40, 200])
def test_equal_to_mistral_in_logits_and_gradients(n):
    ours, theirs = pair()
    equal_to_peer(ours, theirs, draw_ids(2, n, high=VOCAB), their_name)


@torch.no_grad()
def test_cached_decoding_equals_mistral():
    ours, theirs = pair()
    ids = draw_ids(2, 40, high=VOCAB)
    cache = ours.new_cache(2)
    past = transformers.DynamicCache(config=theirs.config)
    start = 0
    for n in (17, 1, 1, 9, 1, 11):
        part = ids[:, start : start + n]
        close(
            ours(part, cache=cache),
            theirs(part, past_key_values=past, use_cache=True).logits,
        )
        start += n
    assert [layer.tensors[0].shape for layer in cache.layers] == [
        layer.keys.shape for layer in past.layers
    ]


def test_generate_writes_what_mistral_writes():
    ours, theirs = pair()
    prompt = draw_ids(1, 15, high=VOCAB)
    expected = theirs.generate(
        prompt,
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        attention_mask=torch.ones_like(prompt),
    )
    (text,) = generate(ours, prompt.tolist(), max_new_tokens=30)
    assert text.ids == expected[0, 15:].tolist()


def test_check_calls_both_the_same_and_all_checks_pass():
    ours, theirs = pair()
    assert check.same(ours, theirs, VOCAB)
    assert check.run_all(ours, VOCAB)


# the work that is skipped


def masked(q, k, v, window):
    "By one mask over all scores."
    t = q.shape[2]
    s = k.shape[2]
    distance = torch.arange(s - t, s)[:, None] - torch.arange(s)
    near = (distance >= 0) & (distance < window)
    return F.scaled_dot_product_attention(q, k, v, near, enable_gqa=True)


@pytest.mark.parametrize("block_size", [1, 3, 8, None])
def test_blocks_equal_the_mask_for_every_length_before_and_after(block_size):
    for window, t, past in itertools.product(
        (1, 2, 5, 9), (1, 2, 7, 11, 20), (0, 1, 4, 8, 30)
    ):
        q = randn(2, 4, t, 6)
        k, v = randn(2, 2, 2, t + past, 6, seed=1)
        close(
            window_attend(q, k, v, window, block_size=block_size),
            masked(q, k, v, window),
        )


def test_blocks_have_the_gradients_of_the_mask():
    q, k, v = (
        x.double().requires_grad_()
        for x in (randn(1, 4, 30, 6), *randn(2, 1, 2, 33, 6, seed=1))
    )
    tilt = randn(1, 4, 30, 6, seed=2).double()
    outputs = window_attend(q, k, v, 5, block_size=4), masked(q, k, v, 5)
    found, expected = (
        torch.autograd.grad((out * tilt).sum(), (q, k, v)) for out in outputs
    )
    for a, b in zip(found, expected, strict=True):
        close(a, b)


def test_the_layer_skips_where_it_can_and_only_there(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "tformer.variants.sliding_window.window_attend",
        lambda *given, **how: calls.append(given[3]) or window_attend(*given, **how),
    )
    layer = spread(SlidingWindowAttention(16, 2, window=4))
    x = randn(1, 30, 16)
    expected = layer(x, need_weights=True)[0]
    padded = torch.arange(30)[None].clone()
    padded[0, :3] = -1
    for how in (
        dict(positions=torch.arange(30)[None]),
        dict(positions=padded),
        dict(mask=torch.ones(1, 1, 30, 30).bool()),
    ):
        layer(x, **how)
    layer(x[:, :4])
    SlidingWindowAttention(16, 2, window=None)(x)
    SlidingWindowAttention(16, 2, window=4, sinks=True)(x)
    SlidingWindowAttention(16, 2, window=4, softcap=2.0)(x)
    SlidingWindowAttention(16, 2, window=4, score_bias=ALiBi(2))(x)
    assert not calls
    close(layer(x), expected)
    assert calls == [4]


def test_blocks_take_the_scale_of_the_layer():
    layer = spread(SlidingWindowAttention(16, 2, window=4, scale=0.9))
    x = randn(1, 30, 16)
    close(layer(x), layer(x, need_weights=True)[0])


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_dropout_is_drawn_in_blocks_and_under_a_cap(softcap):
    layer = spread(
        SlidingWindowAttention(16, 2, window=4, dropout=0.5, softcap=softcap)
    )
    x = randn(1, 30, 16)
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))


# what a query sees


@pytest.mark.parametrize(
    "options",
    [{}, dict(sinks=True), dict(softcap=1.5), dict(sinks=True, softcap=1.5)],
    ids=str,
)
def test_a_token_sees_its_window_and_nothing_else(options):
    layer = spread(SlidingWindowAttention(16, 2, window=4, **options))
    x = randn(1, 12, 16).requires_grad_()
    for i in range(12):
        (grad,) = torch.autograd.grad(layer(x)[0, i].sum(), x)
        seen = grad[0].abs().sum(-1).nonzero()[:, 0].tolist()
        assert seen == [*range(max(0, i - 3), i + 1)]
    weights = layer(x, need_weights=True)[1]
    assert weights.shape == (1, 2, 12, 12)
    total = weights.sum(-1)
    assert (
        (total < 0.999).all()
        if "sinks" in options
        else (torch.allclose(total, torch.ones(1, 2, 12)))
    )


def test_a_sink_is_a_key_with_value_zero():
    layer = spread(SlidingWindowAttention(16, 2, window=None, sinks=True))
    x = randn(1, 7, 16)
    q, k, v = layer.project_qkv(x)
    scores = (q @ k.mT / 8**0.5).exp().tril()
    share = scores / (scores.sum(-1, keepdim=True) + layer.sinks.exp()[:, None, None])
    close(layer(x), layer.o_proj((share @ v).transpose(1, 2).flatten(2)))


def test_the_cap_bends_scores_and_leaves_the_sink():
    "By the formula of Gemma 2, with a sink beside it."
    layer = spread(
        SlidingWindowAttention(
            16, 2, window=3, sinks=True, softcap=0.7, scale=0.9, score_bias=ALiBi(2)
        )
    )
    x = randn(1, 7, 16)
    q, k, v = layer.project_qkv(x)
    scores = 0.7 * (0.9 * q @ k.mT / 0.7).tanh()
    at = torch.arange(7)[None]
    scores = (scores + layer.score_bias(at, at)).exp().tril().triu(-2)
    share = scores / (scores.sum(-1, keepdim=True) + layer.sinks.exp()[:, None, None])
    close(layer(x), layer.o_proj((share @ v).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("window", [None, 9])
def test_a_cap_does_not_open_the_future(window):
    layer = spread(SlidingWindowAttention(16, 2, window=window, softcap=0.7))
    x = randn(1, 7, 16)
    close(layer(x)[:, :4], layer(x[:, :4]))
    close(layer(x), layer(x, mask=torch.ones(1, 1, 7, 7).bool()))


def test_padding_and_documents_inside_a_window():
    layer = spread(SlidingWindowAttention(16, 2, window=5, sinks=True))
    x = randn(1, 9, 16)
    padded = torch.cat([randn(1, 3, 16, seed=3), x], 1)
    positions = torch.tensor([[-1, -1, -1, *range(9)]])
    found = layer(padded, positions=positions)
    close(found[:, 3:], layer(x))
    assert not found[:, :3].any() or layer.o_proj.bias is not None
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    mask = (documents[:, None] == documents)[None, None]
    close(layer(x, mask=mask)[:, 4:], layer(x[:, 4:]))


@pytest.mark.parametrize("options", [{}, dict(sinks=True), dict(softcap=2.0)], ids=str)
def test_half_precision_stays_near(options):
    layer = spread(SlidingWindowAttention(16, 2, window=4, **options), 0.2)
    x = randn(1, 30, 16)
    found = copy.deepcopy(layer).bfloat16()(x.bfloat16())
    assert found.dtype == torch.bfloat16
    assert (found - layer(x)).abs().max() < 3e-2


# the rolling cache


def numbers(start, end):
    "Tensors whose only number says at which position they stand."
    return torch.arange(start, end).view(1, 1, -1, 1).float()


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_ragged_rows_in_every_order_of_padding(window):
    """Two rows read 4 slots of tokens or padding, in every pattern, cut in the middle.

    Each row must return all of its tokens that the next one sees.
    """
    for pattern in itertools.product((True, False), repeat=8):
        token = torch.tensor(pattern).view(2, 4)
        positions = (token.cumsum(-1) - 1).masked_fill(~token, -1)
        cache = RollingLayerCache(window)
        for part in positions.split([1, 2, 1], 1):
            before = 0 if cache.is_empty else cache.key_positions.tensor
            found, at = cache.update(
                part[:, None, :, None].float(), positions=part, window=window
            )
            assert torch.equal(found[:, 0, :, 0].long(), at.tensor.expand(2, -1))
            for row in range(2):
                new = [p for p in part[row].tolist() if p >= 0]
                if new:
                    needed = {*range(max(0, new[0] - window + 1), new[-1] + 1)}
                    assert needed <= {*at.tensor[row].tolist()}
            held = [
                sorted(p for p in row if p >= 0)
                for row in cache.key_positions.tensor.expand(2, -1).tolist()
            ]
            read = [
                max([*row, -1]) + 1
                for row in torch.cat(
                    [positions[:, :0], part]
                    if isinstance(before, int)
                    else [before.expand(2, -1), part],
                    1,
                ).tolist()
            ]
            n = max(window - 1, 1)
            assert held == [[*range(max(0, end - n), end)] for end in read]
            assert cache.tensors[0].shape[-2] <= n
            gone = torch.as_tensor(cache.dropped_end).expand(2).tolist()
            assert gone == [max(0, end - n) for end in read]


@torch.no_grad()
@pytest.mark.parametrize("window", [1, 5, 40])
def test_memory_is_flat_for_long_prompts_and_long_texts(window):
    "Counted in bytes that are allocated, without padding and with."
    layer = spread(SlidingWindowAttention(16, 2, window=window))
    held = max(window - 1, 1)
    bound = (held + max(held // 4, 16) + 1) * 16 * 4
    for positions in (None, torch.arange(-3, 10 * window + 97)[None].clamp(min=-1)):
        cache = layer.new_cache(1)
        x = randn(1, 10 * window + 100, 16)
        whole = layer(x, positions=positions)
        parts = []
        for start, end in itertools.pairwise([0, 100, *range(101, x.shape[1] + 1)]):
            at = positions if positions is None else positions[:, start:end]
            parts.append(layer(x[:, start:end], positions=at, cache=cache))
            assert cache.lengths.item() == min(held, end - 3 * (positions is not None))
            for y in cache.tensors:
                assert y.untyped_storage().nbytes() <= bound
        skip = 0 if positions is None else 3
        close(torch.cat(parts, 1)[:, skip:], whole[:, skip:])


def test_every_crop_is_right_or_refused():
    "For all small windows, lengths, promises and places to go back to."
    for window, n, promise in itertools.product(range(1, 5), range(1, 9), range(4)):
        for to in range(n + 2):
            cache = RollingLayerCache(window)
            cache.allow_rollback(promise)
            cache.update(
                numbers(0, n), positions=Positions(start=0, length=n), window=window
            )
            held = cache.tensors[0].flatten().tolist()
            need = {*range(max(0, to - max(window - 1, 1)), min(to, n))}
            if to >= n or need <= {*held} or to == 0:
                cache.crop(to)
                assert cache.tensors[0].flatten().tolist() == [
                    p for p in held if p < to
                ]
                at = 0 if to == 0 else min(to, n)
                _, where = cache.update(
                    numbers(at, at + 1),
                    positions=Positions(start=at, length=1),
                    window=window,
                )
                assert {*range(max(0, at - window + 1), at + 1)} <= {
                    *where.tensor[0].tolist()
                }
            else:
                assert n - to > promise  # what was promised is never refused
                with pytest.raises(ValueError, match=rf"crop\({to}\) leaves a token"):
                    cache.crop(to)
                assert cache.tensors[0].flatten().tolist() == held


def test_a_smaller_promise_changes_nothing():
    cache = RollingLayerCache(4)
    cache.allow_rollback(3)
    cache.allow_rollback(1)
    cache.update(numbers(0, 20), positions=Positions(start=0, length=20), window=4)
    assert cache.lengths.tolist() == [3 + 3]


def test_crop_of_rows_that_stand_at_different_places():
    ids = torch.tensor([[*range(9)], [-1, -1, -1, *range(6)]])
    cache = RollingLayerCache(4)
    cache.allow_rollback(2)
    cache.update(ids[:, None, :, None].float(), positions=ids, window=4)
    assert cache.lengths.tolist() == [5, 5] and cache.dropped_end.tolist() == [4, 1]
    before = cache.tensors[0].clone()
    with pytest.raises(ValueError, match=r"crop\(3\) leaves"):
        cache.crop(torch.tensor([9, 3]))
    assert torch.equal(cache.tensors[0], before)
    cache.crop(torch.tensor([7, 0]))
    assert cache.lengths.tolist() == [3, 0] and cache.dropped_end.tolist() == [4, 0]
    new = torch.tensor([[7], [0]])
    cache.update(new[:, None, :, None].float(), positions=new, window=4)
    assert cache.key_positions.tensor.amax(-1).tolist() == [7, 0]


@torch.no_grad()
def test_a_model_refuses_a_crop_before_any_layer_has_changed():
    config = LlamaConfig(vocab_size=VOCAB, d_model=16, n_layers=2, n_heads=2)
    model = spread(Llama(config, make_window_factory(config, [None, 4])))
    cache = model.new_cache(1)
    ids = draw_ids(1, 12, high=VOCAB)
    whole = model(ids)
    model(ids[:, :9], cache=cache)
    with pytest.raises(ValueError, match=r"crop\(5\) .* crop\(9\) is the furthest"):
        cache.crop(5)
    assert [layer.lengths.item() for layer in cache.layers] == [9, 3]
    close(model(ids[:, 9:], cache=cache), whole[:, 9:])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("promise", [0, 2])
def test_a_refused_crop_says_how_far_it_can_go(promise, rows):
    "Two crops together go no deeper than what was promised, and no less deep."
    cache = RollingLayerCache(2, rows)
    cache.allow_rollback(promise)
    at = torch.arange(11)[None]
    x = torch.zeros(rows, 1, 11, 1)

    def crop(n):
        cache.crop(n if rows == 1 else torch.tensor([n, 11]))

    cache.update(x[:, :, :10], positions=at[:, :10], window=2)
    crop(10 - promise)
    lowest = 10 - promise if promise else 11
    cache.update(x[:, :, :1], positions=at[:, 10 - promise :][:, :1], window=2)
    with pytest.raises(ValueError) as error:
        crop(lowest - 1)
    assert f"crop({lowest}) is the furthest" in str(error.value)
    assert "a larger number before the tokens are read" in str(error.value)
    crop(lowest)


@torch.no_grad()
def test_rows_leave_come_and_go_on():
    config = LlamaConfig(vocab_size=VOCAB, d_model=16, n_layers=2, n_heads=2)
    model = spread(Llama(config, make_window_factory(config, [None, 4])))
    ids = draw_ids(3, 12, high=VOCAB)
    whole = model(ids)
    cache = model.new_cache(2)
    model(ids[:2, :9], cache=cache)
    guest = model.new_cache(1)
    model(ids[2:, :6], cache=guest)
    cache.set_rows(torch.tensor([0]), guest)
    assert cache.layers[1].dropped_end.tolist() == [3, 6]
    positions = torch.tensor([[6, 7, 8], [9, 10, 11]])
    found = model(
        torch.stack([ids[2, 6:9], ids[1, 9:]]), positions=positions, cache=cache
    )
    close(found, torch.stack([whole[2, 6:9], whole[1, 9:]]))
    cache.select(torch.tensor([1]))
    assert cache.layers[1].dropped_end.tolist() == [9]


@pytest.mark.parametrize("draft_window", [3, 6])
def test_speculation_takes_back_what_it_announced(draft_window):
    "Both models forget."
    ours, _ = pair()
    draft, _ = pair(draft_window)
    if draft_window == 3:
        spread(draft, 0.19)  # it has other weights, and is often wrong
    prompt = draw_ids(1, 15, high=VOCAB)
    (expected,) = generate(ours, prompt.tolist(), max_new_tokens=40)
    found = speculative_generate(
        ours, prompt[0], DraftModel(draft, 4), max_new_tokens=40
    )
    assert found.ids == expected.ids


def test_rows_of_the_engine_forget():
    ours, _ = pair()
    engine = Engine(ours, max_num_seqs=2)
    prompts = draw_ids(5, 20, high=VOCAB).tolist()
    handles = engine.run(
        [Request(prompt[:n], max_new_tokens=25) for n, prompt in enumerate(prompts, 3)]
    )
    for n, (handle, prompt) in enumerate(zip(handles, prompts, strict=True), 3):
        (expected,) = generate(ours, [prompt[:n]], max_new_tokens=25)
        assert handle.output_ids == expected.ids
    for layer in engine.runner.cache.layers:
        assert isinstance(layer, RollingLayerCache)
        assert layer.tensors[0].shape[-2] <= 6  # a step that fails is taken back


def test_fixed_shapes_keep_all_tokens():
    ours, _ = pair()
    assert {type(layer).__name__ for layer in new_static_cache(ours, 1).layers} == {
        "StaticLayerCache"
    }
    assert {
        type(layer) for layer in new_static_cache(ours, 1, keep_rolling=True).layers
    } == {RollingLayerCache}


@torch.no_grad()
def test_a_cache_goes_on_in_another_precision():
    layer = spread(SlidingWindowAttention(16, 2, window=4))
    x = randn(1, 9, 16)
    cache = layer.new_cache(1)
    for part in x[:, :8].split([6, 1, 1], 1):
        layer(part, cache=cache)
    whole = layer.double()(x.double())
    found = layer(x[:, 8:].double(), cache=cache)
    assert found.dtype == cache.tensors[0].dtype == torch.float64
    close(found, whole[:, 8:], 1e-5)


def test_padding_that_is_known_by_its_start_is_masked():
    layer = spread(SlidingWindowAttention(16, 2, window=4))
    x = randn(1, 30, 16)
    found = layer(x, positions=Positions(start=-3, length=30))
    close(found[:, 3:], layer(x[:, 3:]))


def test_gradients_flow_through_what_is_kept():
    layer = spread(SlidingWindowAttention(16, 2, window=4)).double()
    x = randn(1, 20, 16).double().requires_grad_()
    cache = layer.new_cache(1)
    parts = [layer(part, cache=cache) for part in x.split([9, 1, 1, 9], 1)]
    tilt = randn(1, 20, 16, seed=1).double()
    found, expected = (
        torch.autograd.grad((y * tilt).sum(), x)[0]
        for y in (torch.cat(parts, 1), layer(x))
    )
    close(found, expected)


# what is refused


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: SlidingWindowAttention(16, 2, window=0), "window must .*, got 0"),
        (lambda: SlidingWindowAttention(16, 2, window=2.0), "window must .*, got 2.0"),
        (
            lambda: SlidingWindowAttention(16, 2, window=3, softcap=0.0),
            "softcap .* 0.0",
        ),
        (
            lambda: SlidingWindowAttention(16, 2, window=3, scale=-1.0),
            "scale .* got -1.0",
        ),
        (lambda: RollingLayerCache(0), "window must .*, got 0"),
        (lambda: RollingLayerCache(3).allow_rollback(-1), "n must .*, got -1"),
        (lambda: make_window_factory(config(), []), "one window or more, got none"),
        (lambda: make_window_factory(config(), [4, 0]), "window must .*, got 0"),
        (lambda: window_attend(*randn(3, 1, 2, 5, 4), 0), "window must .*, got 0"),
        (
            lambda: window_attend(*randn(3, 1, 2, 5, 4), 3, block_size=0),
            "block_size must .*, got 0",
        ),
        (
            lambda: window_attend(randn(1, 2, 6, 4), *randn(2, 1, 2, 5, 4), 3),
            "6 queries and 5 keys",
        ),
    ],
)
def test_bad_arguments_are_named(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def config():
    return LlamaConfig(vocab_size=VOCAB, d_model=16, n_layers=2, n_heads=2)


@pytest.mark.parametrize(
    "read, match",
    [
        (
            lambda x, cache: SlidingWindowAttention(16, 2, window=5)(x, cache=cache),
            "a window of 4, and the layer that reads it has a window of 5",
        ),
        (
            lambda x, cache: SlidingWindowAttention(16, 2, window=None)(x, cache=cache),
            "a window of 4, and the layer that reads it has no window",
        ),
        (
            lambda x, cache: SelfAttention(16, 2, causal=True)(x, cache=cache),
            "a window of 4, and the layer that reads it has no window",
        ),
        (
            lambda x, cache: SlidingWindowAttention(16, 2, window=4)(
                x, cache=cache, positions=torch.tensor([[5, 6]])
            ),
            "position 5 sees 4",
        ),
        (
            lambda x, cache: SlidingWindowAttention(16, 2, window=4)(
                x, cache=cache, positions=Positions(start=5, length=2)
            ),
            "position 5 sees",
        ),
        (
            lambda x, cache: SlidingWindowAttention(16, 2, window=4)(
                x, cache=cache, positions=torch.tensor([[8, 9]])
            ),
            "position 8 sees 4",
        ),
        (
            lambda x, cache: SlidingWindowAttention(16, 2, window=4)(
                x, cache=cache, positions=Positions(start=8, length=2)
            ),
            "position 8 sees",
        ),
        (
            lambda x, cache: SlidingWindowAttention(16, 2, window=4)(
                x[:1], cache=cache
            ),
            "batch",
        ),
        (lambda x, cache: other_window(cache), "a window of 3, and .* a window of 4"),
    ],
)
@torch.no_grad()
def test_what_a_cache_refuses_leaves_it_as_it_was(read, match):
    layer = spread(SlidingWindowAttention(16, 2, window=4))
    cache = layer.new_cache(2)
    layer(randn(2, 9, 16), cache=cache)
    before = copy.deepcopy(vars(cache))
    with pytest.raises(ValueError, match=match):
        read(randn(2, 2, 16), cache)
    for a, b in zip(before["tensors"], cache.tensors, strict=True):
        assert torch.equal(a, b)
    assert cache.dropped_end == before["dropped_end"] == 6
    assert cache.key_positions.tensor.tolist() == [[6, 7, 8]]


def other_window(cache):
    guest = RollingLayerCache(3)
    guest.update(
        *[randn(2, 2, 4, 8)] * 2, positions=Positions(start=0, length=4), window=3
    )
    cache.set_rows(torch.tensor([0, 1]), guest)


def test_saving_says_which_windows_a_model_has(tmp_path):
    make = make_window_factory(config(), [4, None], sinks=True, softcap=2.0)
    model = spread(Llama(config(), make))
    model.save(tmp_path)
    ids = draw_ids(2, 9, high=VOCAB)
    assert torch.equal(Llama.load(tmp_path, attention_factory=make)(ids), model(ids))
    for other in (
        make_window_factory(config(), [5, None], sinks=True, softcap=2.0),
        make_window_factory(config(), [4, None], sinks=True, softcap=3.0),
        make_window_factory(config(), [4, None], sinks=True, softcap=2.0, scale=0.3),
    ):
        with pytest.raises(ValueError, match="attention"):
            Llama.load(tmp_path, attention_factory=other)


def test_the_factory_hands_on_what_it_is_given():
    make = make_window_factory(
        config(),
        [4, 8, None],
        scale=0.3,
        softcap=5.0,
        sinks=True,
        bias=True,
        dropout=0.25,
        fused=False,
    )
    layers = [make(i) for i in range(5)]
    assert [layer.window for layer in layers] == [4, 8, None, 4, 8]
    for layer in layers:
        assert (layer.scale, layer.softcap, layer.dropout) == (0.3, 5.0, 0.25)
        assert layer.sinks.shape == (2,) and layer.q_proj.bias is not None
        assert not layer.fused and layer.rotary is layers[0].rotary and layer.causal
    assert type(layers[2].new_cache(1)) is DynamicLayerCache
    assert make_window_factory(config(), 4)(1).q_proj.bias is None
