"""Sparse attention: against transformers, ties, blocks, losses, and what is refused."""

import copy
import itertools
import math

import pytest
import torch

from conftest import read_rows, run_small
from helpers import close, draw_ids, plain_only, randn, spread

transformers = pytest.importorskip("transformers")
from transformers import (  # noqa: E402
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    DynamicCache,
)
from transformers.models.minimax_m3_vl import (  # noqa: E402
    configuration_minimax_m3_vl,
    modeling_minimax_m3_vl,
)

from tformer import check  # noqa: E402
from tformer.inference.generation import generate  # noqa: E402
from tformer.models.base import load_weights  # noqa: E402
from tformer.models.llama import Llama, LlamaConfig  # noqa: E402
from tformer.models.mini_gpt import load_record  # noqa: E402
from tformer.nn.attention import SelfAttention  # noqa: E402
from tformer.nn.kv_cache import CrossAttentionCache  # noqa: E402
from tformer.nn.norms import RMSNorm  # noqa: E402
from tformer.nn.positions import Positions  # noqa: E402
from tformer.nn.quantized import quantize_int8  # noqa: E402
from tformer.nn.relative_bias import ALiBi  # noqa: E402
from tformer.nn.rotary import RotaryEmbedding  # noqa: E402
from tformer.nn.static_cache import new_static_cache  # noqa: E402
from tformer.variants.mla import DEEPSEEK_NAMES, make_mla_factory  # noqa: E402
from tformer.variants.sparse import (  # noqa: E402
    DEEPSEEK_INDEXER_NAMES,
    GroupIndexer,
    LightningIndexer,
    SparseAttention,
    SparseLatentAttention,
    choose_candidates,
    collect_indexer_losses,
    indexer_loss,
    make_sparse_factory,
    set_top_k,
)

VOCAB = 47
LATENT = dict(kv_rank=12, d_nope=10, d_rope=8, d_v=6, q_rank=14)
INDEX = dict(d_index=12, n_index_heads=5, d_index_rope=8)
YARN = dict(
    factor=4.0,
    original_max_len=16,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=0.7,
    mscale_all_dim=0.4,
)
CONFIG = LlamaConfig(
    vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, d_ff=40, max_len=128, eps=1e-6
)
GROUPED = LlamaConfig(
    vocab_size=VOCAB,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    d_ff=40,
    max_len=128,
)
NAMES = {
    "blocks": "model.layers",
    "embed": "model.embed_tokens",
    "attention.norm": "input_layernorm",
    "attention.sublayer": "self_attn",
    "feed_forward.norm": "post_attention_layernorm",
    "feed_forward.sublayer": "mlp",
}
LAYERS = {
    "tokens": dict(top_k=4, d_index=8, n_index_heads=3),
    "tokens and local ones": dict(top_k=5, d_index=8, n_index_heads=3, n_local=2),
    "groups": dict(top_k=4, d_index=8, n_index_heads=None),
    "blocks": dict(top_k=2, d_index=8, n_index_heads=3, block_size=3),
    "blocks of groups": dict(
        top_k=2, d_index=8, n_index_heads=None, block_size=3, n_local=1
    ),
    "latent": dict(top_k=4, **INDEX, latent=LATENT),
    "latent blocks": dict(top_k=2, **INDEX, latent=LATENT, block_size=4),
}
each_layer = pytest.mark.parametrize("name", LAYERS)


def make_layer(name, std=0.4, **changes):
    how = LAYERS[name] | changes
    config = CONFIG if "latent" in how else GROUPED
    return spread(make_sparse_factory(config, **how)(0), std)


def their_name(name):
    if ".indexer." in name:
        for theirs, ours in DEEPSEEK_INDEXER_NAMES.items():
            name = name.replace(f"indexer.{ours}.", f"indexer.{theirs}.")
    else:
        for theirs, ours in DEEPSEEK_NAMES.items():
            name = name.replace(f"sublayer.{ours}.", f"sublayer.{theirs}.")
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return f"model.{name}" if name.startswith("norm") else name


def pair(top_k=6, yarn=None):
    "A model of ours and DeepSeek-V3.2 with the same weights, all of its layers dense."
    rope = dict(rope_type="default", rope_theta=10_000.0)
    if yarn is not None:
        rope |= dict(yarn, rope_type="yarn")
        rope["original_max_position_embeddings"] = rope.pop("original_max_len")
    theirs = spread(
        DeepseekV32ForCausalLM(
            DeepseekV32Config(
                vocab_size=VOCAB,
                hidden_size=32,
                intermediate_size=40,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=4,
                kv_lora_rank=12,
                q_lora_rank=14,
                qk_nope_head_dim=10,
                qk_rope_head_dim=8,
                v_head_dim=6,
                index_topk=top_k,
                index_head_dim=12,
                index_n_heads=5,
                first_k_dense_replace=2,
                max_position_embeddings=128,
                rms_norm_eps=1e-6,
                rope_parameters=rope,
                tie_word_embeddings=False,
                attn_implementation="eager",
            )
        ),
        0.2,
    )
    latent = LATENT if yarn is None else dict(LATENT, yarn=yarn)
    ours = Llama(CONFIG, make_sparse_factory(CONFIG, top_k, **INDEX, latent=latent))
    tensors = theirs.state_dict()
    load_weights(ours, {name: tensors[their_name(name)] for name in ours.state_dict()})
    return ours.eval(), theirs


def gaps(model, ids, top_k):
    """How far apart the k-th and the next score of each query are, in the layer where
    they are closest; inf where nothing is left out."""
    found = []

    def watch(layer, given, how):
        x = given[0]
        positions = Positions.of(how["positions"], x)
        latent = layer.compress_queries(x)
        queries = layer.indexer.project_queries(x, latent, positions)
        keys = layer.indexer.project_keys(x, positions)
        scores = layer.indexer.score(*queries, keys)
        best = scores.masked_fill(
            ~torch.ones(scores.shape[-2:]).bool().tril(), -math.inf
        ).sort(-1, descending=True)[0]
        found.append((best[..., top_k - 1] - best[..., top_k])[:, 0])

    hooks = [
        block.attention.sublayer.register_forward_pre_hook(watch, with_kwargs=True)
        for block in model.blocks
    ]
    model(ids)
    for hook in hooks:
        hook.remove()
    return torch.stack(found).nan_to_num(math.inf).amin(0)


# against DeepSeek-V3.2


@torch.no_grad()
@pytest.mark.parametrize("yarn", [None, YARN], ids=["plain", "YaRN"])
def test_equal_to_deepseek_wherever_the_choice_is_unique(yarn):
    ours, theirs = pair(yarn=yarn)
    ids = draw_ids(8, 40, high=VOCAB)
    found = ours(ids)
    expected = theirs(ids).logits
    clear = gaps(ours, ids, 6) > 1e-5
    # a query that is not clear changes what later ones read in the next layer
    upto = clear.long().cumprod(-1).bool()
    close(found[upto], expected[upto])
    assert upto.float().mean() > 0.5
    print(f"{1 - clear.float().mean():.1%} of the queries have no unique choice")


@torch.no_grad()
def test_k_at_least_the_length_equals_dense_exactly():
    ours, theirs = pair(top_k=40)
    ids = draw_ids(2, 40, high=VOCAB)
    dense = Llama(CONFIG, make_mla_factory(CONFIG, **LATENT)).eval()
    tensors = ours.state_dict()
    load_weights(dense, {name: tensors[name] for name in dense.state_dict()})
    assert torch.equal(ours(ids), dense(ids))
    close(ours(ids), theirs(ids).logits)
    caches = [model.new_cache(2) for model in (ours, dense)]
    for part in ids.split([13, 1, 1, 25], 1):
        assert torch.equal(
            *(
                model(part, cache=cache)
                for model, cache in zip((ours, dense), caches, strict=True)
            )
        )
    set_top_k(ours, 39)
    assert not torch.equal(ours(ids)[:, -1], dense(ids)[:, -1])
    assert torch.equal(ours(ids[:, :39]), dense(ids[:, :39]))


@torch.no_grad()
def test_deepseek_differs_from_itself_cached_and_ours_does_not():
    "Exact zeros tie, and their topk takes others of them in a table of another size."
    ours, theirs = pair()
    ids = draw_ids(8, 40, high=VOCAB)
    parts = ids.split([20] + [1] * 20, 1)
    past = DynamicCache(config=theirs.config)
    cached = [
        theirs(part, past_key_values=past, use_cache=True).logits for part in parts
    ]
    assert (torch.cat(cached, 1) - theirs(ids).logits).abs().max() > 0.1
    cache = ours.new_cache(8)
    close(torch.cat([ours(part, cache=cache) for part in parts], 1), ours(ids))


def test_all_checks_pass_but_for_the_gradient_of_the_choice():
    ours, _ = pair()
    report = check.run_all(ours, VOCAB, skip=("gradients",))
    assert {said for _, said in report.notes} <= {"passed", "skipped"}
    with pytest.raises(check.CheckFailed, match="indexer"):
        check.gradients(ours, VOCAB)
    assert check.gradients(ours, VOCAB, frozen=("*indexer*",))


# against MiniMax-M3


def minimax_pair(block_size=4, top_k=3, n_local=1):
    config = configuration_minimax_m3_vl.MiniMaxM3VLTextConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        num_hidden_layers=1,
        index_n_heads=2,
        index_head_dim=10,
        index_block_size=block_size,
        index_topk_blocks=top_k,
        index_local_blocks=n_local,
        rotary_dim=8,
        max_position_embeddings=128,
        layer_types=["minimax_m3_sparse"],
        rms_norm_eps=1e-6,
        rope_parameters=dict(
            rope_type="default", rope_theta=10_000.0, partial_rotary_factor=8 / 12
        ),
    )
    config._attn_implementation = "eager"
    theirs = spread(modeling_minimax_m3_vl.MiniMaxM3VLAttention(config, 0), 0.4)
    turn = RotaryEmbedding(8)

    def first_eight(*tensors, positions):
        return [
            torch.cat([*turn(x[..., :8], positions=positions), x[..., 8:]], -1)
            for x in tensors
        ]

    ours = SparseAttention(
        32,
        4,
        n_kv_heads=2,
        d_head=12,
        bias=False,
        rotary=first_eight,
        q_norm=RMSNorm(12, eps=1e-6),
        k_norm=RMSNorm(12, eps=1e-6),
        indexer=GroupIndexer(32, 2, 10, rotary=turn),
        top_k=top_k,
        block_size=block_size,
        n_local=n_local,
    )
    # their norms keep what is added to one
    ours.load_state_dict(
        {
            name: x + 1 if "norm" in name else x
            for name, x in theirs.state_dict().items()
        }
    )
    rotary = modeling_minimax_m3_vl.MiniMaxM3VLRotaryEmbedding(config)
    return ours.eval(), theirs, rotary


@torch.no_grad()
@pytest.mark.parametrize(
    "block_size, top_k, n_local",
    [(4, 3, 1), (5, 2, 0), (4, 3, 2), (3, 1, 1), (16, 2, 1)],
)
def test_equal_to_minimax_whole_and_in_pieces(block_size, top_k, n_local):
    ours, theirs, rotary = minimax_pair(block_size, top_k, n_local)
    x = randn(2, 43, 32)
    positions = torch.arange(43)[None]
    expected, _ = theirs(x, rotary(x, positions), None, position_ids=positions)
    close(ours(x), expected)
    close(ours(x, need_weights=True)[0], expected)
    cache = ours.new_cache(2)
    close(
        torch.cat(
            [ours(part, cache=cache) for part in x.split([21, 1, 1, 9, 11], 1)], 1
        ),
        expected,
    )


@torch.no_grad()
def test_padding_on_the_left_moves_no_block():
    "As it does in transformers, by its own words."
    ours, _, _ = minimax_pair()
    x = randn(1, 43, 32)
    expected = ours(x)
    for n in range(1, 6):
        padded = torch.cat([randn(1, n, 32, seed=1), x], 1)
        positions = (torch.arange(43 + n) - n).clamp(min=-1)[None]
        close(ours(padded, positions=positions)[:, n:], expected)
        cache = ours.new_cache(1)
        parts = [
            ours(a, positions=b, cache=cache)
            for a, b in zip(
                padded.split([30, 1, 12 + n], 1),
                positions.split([30, 1, 12 + n], 1),
                strict=True,
            )
        ]
        close(torch.cat(parts, 1)[:, n:], expected)


# the choice


def plain(t, start=0):
    return Positions(start=start, length=t)


@pytest.mark.parametrize("top_k", [1, 3, 7])
@pytest.mark.parametrize("n_local", [0, 1, 3])
def test_candidates_are_those_of_a_sort(top_k, n_local):
    "Scores of which many are equal, zeros of both signs, and negative ones."
    if n_local > top_k:
        return
    scores = torch.randn(2, 2, 9, 20).mul(2).round().div(2)
    scores = torch.where(torch.rand(2, 2, 9, 20) < 0.3, -0.0, scores)
    seen = torch.arange(20) <= torch.arange(11, 20)[:, None]
    scores = scores.masked_fill(~seen, -math.inf)
    best, owner = choose_candidates(
        scores, plain(9, 11), plain(20), top_k, n_local=n_local
    )
    assert owner.tolist() == [list(range(20))]
    for b, g, t in itertools.product(range(2), range(2), range(9)):
        at = 11 + t
        order = sorted(
            range(at + 1),
            reverse=True,
            key=lambda s: (at - s < n_local, scores[b, g, t, s].item(), s),
        )
        assert sorted(best[b, g, t].tolist()) == sorted(order[:top_k])


def test_ties_go_by_position_wherever_tokens_stand():
    scores = torch.zeros(1, 1, 1, 8)
    positions = torch.tensor([[3, 0, 7, 1, 6, 2, 5, 4]])
    best, _ = choose_candidates(scores, plain(1, 7), Positions(positions), 3)
    assert sorted(positions[0, best.flatten()].tolist()) == [5, 6, 7]


@pytest.mark.parametrize("n_local", [0, 1])
@pytest.mark.parametrize("start", [0, 1, 5, 6])
def test_blocks_are_the_same_however_positions_are_given(start, n_local):
    scores = randn(2, 1, 4, 17)
    where = [plain(17, start), Positions(torch.arange(start, start + 17)[None])]
    chosen = []
    for key_positions in where:
        best, owner = choose_candidates(
            scores,
            plain(4, start + 13),
            key_positions,
            2,
            block_size=4,
            n_local=n_local,
        )
        table = torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, best, True)
        chosen.append(table.gather(-1, owner[:, None, None].expand_as(scores)))
    assert torch.equal(*chosen)
    assert chosen[0].any() and not chosen[0].all()
    blocks = torch.arange(start, start + 17) // 4
    for b, t in itertools.product(range(2), range(4)):
        best = {
            block.item(): scores[b, 0, t][blocks == block].amax().item()
            for block in blocks.unique()
        }
        own = (start + 13 + t) // 4
        two = sorted(best, key=lambda c: (n_local and c == own, best[c]))[-2:]
        assert chosen[0][b, 0, t].tolist() == [x in two for x in blocks.tolist()]


@each_layer
@torch.no_grad()
def test_gathered_is_masked(name, monkeypatch):
    "One token, and several, behind a text; alone, padded, and in turned order."
    layer = make_layer(name)
    ways = {
        "plain": None,
        "padded": (torch.arange(40) - torch.tensor([[0], [7]])).clamp(min=-1),
        "from 5 on": torch.arange(5, 45)[None],
        "start at 5": 5,
    }
    x = randn(2, 40, 32)
    for way, positions in ways.items():
        outputs = []
        for never in (False, True):
            gathered = []
            can = type(layer)._can_gather

            def decide(self, *given, never=never, can=can, gathered=gathered):
                yes = can(self, *given) and not never
                gathered.append(yes)
                return yes

            with monkeypatch.context() as patch:
                patch.setattr(type(layer), "_can_gather", decide)
                cache = layer.new_cache(2)
                start = 0
                parts = []
                for n in (33, 1, 2, 1, 3):
                    part = slice(start, start + n)
                    parts.append(
                        layer(
                            x[:, part],
                            cache=cache,
                            positions=(
                                plain(n, 5 + start)
                                if way == "start at 5"
                                else None
                                if positions is None
                                else positions[:, part]
                            ),
                        )
                    )
                    start += n
            outputs.append(torch.cat(parts, 1))
            if never or (layer.block_size > 1 and way in ("padded", "from 5 on")):
                assert not any(gathered)
            else:
                assert gathered == [False, True, True, True, True]
        alive = torch.ones(2, 40).bool()
        if way == "padded":
            alive = positions >= 0
        close(outputs[0][alive], outputs[1][alive])


@each_layer
@torch.no_grad()
def test_one_token_reads_no_more_than_was_chosen(name):
    "What is not chosen is not looked at: not even numbers that are no numbers."
    layer = make_layer(name)
    x = randn(1, 40, 32)
    n_read = layer.top_k * layer.block_size
    cache = layer.new_cache(1)
    layer(x[:, :39], cache=cache)
    index_k = cache.tensors[-1]
    new = copy.deepcopy(cache)
    expected = layer(x[:, 39:], cache=cache)
    cache = new
    touched = []
    for slot in range(39):
        spoiled = copy.deepcopy(cache)
        for kept in spoiled.tensors[:-1]:
            kept[..., slot, :] = math.nan
        assert torch.equal(spoiled.tensors[-1], index_k)
        touched.append(not torch.equal(layer(x[:, 39:], cache=spoiled), expected))
    # two groups may choose differently, and the newest token is often chosen
    assert 0 < sum(touched) <= n_read * layer.indexer.n_choices


def test_a_choice_is_made_for_some_queries_at_a_time(monkeypatch):
    for name in LAYERS:
        layer = make_layer(name)
        x = randn(2, 40, 32)
        expected = layer(x)
        with monkeypatch.context() as patch:
            patch.setattr("tformer.variants.sparse._MAX_PRODUCTS", 7 * 5 * 40)
            close(layer(x), expected)


def test_masks_of_the_caller_hold_for_the_choice():
    "A key that is forbidden takes no place among the chosen ones."
    for name in LAYERS:
        layer = make_layer(name)
        x = randn(2, 20, 32)
        mask = torch.ones(20, 20).bool()
        mask[:, [3, 4, 8, 15]] = False
        mask |= torch.eye(20).bool()
        per_head = mask[None, None].expand(1, 4, -1, -1)
        close(layer(x, mask=mask[None, None]), layer(x, mask=per_head))
        _, weights = layer(x, mask=mask[None, None], need_weights=True)
        assert not weights[..., ~mask].any()
        if layer.block_size == 1:
            n_seen = (mask & torch.ones(20, 20).bool().tril()).sum(-1)
            expected = n_seen.clamp(max=layer.top_k)
            assert ((weights > 0).sum(-1) == expected).all()


@each_layer
@torch.no_grad()
def test_what_is_no_number_is_not_hidden(name):
    "A key that is no number is chosen, so that later outputs are none either."
    layer = make_layer(name)
    for value in (math.nan, -math.nan):
        x = randn(1, 40, 32)
        x[0, 5] = value
        cache = layer.new_cache(1)
        parts = [layer(part, cache=cache) for part in x.split([37, 1, 2], 1)]
        for output in (layer(x), torch.cat(parts, 1)):
            assert output[0, 5:].isnan().all()


@torch.no_grad()
def test_a_mask_of_each_head_is_kept_and_what_one_head_sees_is_a_candidate():
    "For whole texts, and for one token behind others, which is not gathered then."
    for name in LAYERS:
        layer = make_layer(name, n_local=0)
        x = randn(1, 20, 32)
        own = torch.eye(20).bool()
        mask = (randn(1, 4, 20, 20) > 0.3) | own
        _, weights = layer(x, mask=mask, need_weights=True)
        assert not weights[~mask].any()
        # a head reads nothing if it sees none of what was chosen
        close(weights.sum(-1), (weights.sum(-1) > 0.5).float())
        g = layer.indexer.n_choices
        seen = mask & torch.ones(20, 20).bool().tril()
        some = seen.unflatten(1, (g, -1)).any(2)
        read = (weights > 0).unflatten(1, (g, -1)).any(2)
        if layer.block_size == 1:
            positions = plain(20)
            q_input = layer.compress_queries(x) if "latent" in name else x
            queries = layer.indexer.project_queries(x, q_input, positions)
            keys = layer.indexer.project_keys(x, positions)
            scores = layer.indexer.score(*queries, keys)
            best, _ = choose_candidates(
                scores.masked_fill(~some, -math.inf), positions, positions, layer.top_k
            )
            chosen = torch.zeros_like(some).scatter(-1, best, True) & some
            assert torch.equal(read, chosen & read)
            assert (read == chosen).float().mean() > 0.9
        cache = layer.new_cache(1)
        layer(x[:, :19], mask=mask[..., :19, :19], cache=cache)
        close(
            layer(x[:, 19:], mask=mask[..., 19:, :], cache=cache),
            layer(x, mask=mask)[:, 19:],
        )


@torch.no_grad()
def test_a_choice_can_serve_several_key_heads():
    turn = RotaryEmbedding(8)
    layer = spread(
        SparseAttention(
            32,
            4,
            n_kv_heads=4,
            rotary=turn,
            indexer=GroupIndexer(32, 2, 8, rotary=turn),
            top_k=4,
        ),
        0.4,
    )
    x = randn(2, 30, 32)
    cache = layer.new_cache(2)
    parts = [layer(part, cache=cache) for part in x.split([20, 1, 1, 8], 1)]
    close(torch.cat(parts, 1), layer(x))
    seen = layer(x, need_weights=True)[1] > 0
    assert torch.equal(seen[:, 0], seen[:, 1]) and torch.equal(seen[:, 2], seen[:, 3])
    assert not torch.equal(seen[:, 1], seen[:, 2])


# the loss of an indexer


def test_the_loss_is_the_divergence_of_two_distributions():
    scores = randn(2, 2, 5, 9).masked_fill(randn(2, 2, 5, 9, seed=1) < -0.5, -math.inf)
    seen = scores > -math.inf
    weights = (
        randn(2, 4, 5, 9, seed=2)
        .masked_fill(~seen.repeat_interleave(2, 1), -math.inf)
        .softmax(-1)
    )
    target = weights.view(2, 2, 2, 5, 9).mean(2)
    total = []
    for index in itertools.product(range(2), range(2), range(5)):
        p = target[index][seen[index]]
        q = scores[index][seen[index]].softmax(0)
        total.append((p * (p / q).log()).sum())
    close(indexer_loss(scores, weights), torch.stack(total).mean())
    # nothing to learn where they agree, and rows that see nothing do not count
    close(indexer_loss(target.log(), weights), torch.tensor(0.0))
    weights[:, :, 2] = 0.0
    scores[:, :, 2] = -math.inf
    rest = [i for i in range(20) if i % 5 != 2]
    close(indexer_loss(scores, weights), torch.stack(total)[rest].mean())


@each_layer
@pytest.mark.parametrize("top_k", ["dense", "sparse"])
def test_the_indexer_gets_a_gradient_and_the_model_none(name, top_k):
    layer = make_layer(name)
    if top_k == "dense":
        layer.set_top_k(None)
    x = randn(2, 30, 32).requires_grad_()
    before = layer(x)
    with collect_indexer_losses(layer) as losses:
        output = layer(x)
        both = layer(x, need_weights=True)
    close(output, before)
    close(both[0], before)
    assert len(losses) == 2 and losses[0] == losses[1]
    losses[0].backward()
    assert x.grad is None
    for parameter, p in layer.named_parameters():
        learns = "indexer" in parameter
        assert (p.grad is not None) == learns, parameter
        assert not learns or p.grad.abs().max() > 0
    layer(x)
    assert len(losses) == 2 and layer.indexer_losses is None


def test_the_loss_of_a_sparse_stage_counts_what_was_chosen():
    layer = make_layer("tokens")
    x = randn(1, 30, 32)
    with collect_indexer_losses(layer) as losses:
        _, weights = layer(x, need_weights=True)
    positions = plain(30)
    q, small = layer.indexer.project_queries(x, x, positions)
    scores = layer.indexer.score(q, small, layer.indexer.project_keys(x, positions))
    read = weights[:, :1] > 0
    close(losses[0], indexer_loss(scores.masked_fill(~read, -math.inf), weights))


def test_an_indexer_learns_what_attention_reads():
    "And then few tokens are enough."
    torch.manual_seed(0)
    layer = make_layer("tokens", top_k=None)
    x = randn(8, 30, 32)
    dense = layer(x)
    optimizer = torch.optim.Adam(layer.indexer.parameters(), lr=0.01)
    errors = []
    for step in range(200):
        if step in (0, 199):
            layer.set_top_k(6)
            errors.append((layer(x) - dense).square().mean().item())
            layer.set_top_k(None)
        with collect_indexer_losses(layer) as losses:
            layer(x)
        optimizer.zero_grad()
        losses[0].backward()
        optimizer.step()
    assert errors[1] < errors[0] / 2


def test_top_k_is_set_in_all_layers_or_in_none():
    model = Llama(
        GROUPED,
        make_sparse_factory(GROUPED, [8, 3], n_local=2, d_index=8, n_index_heads=2),
    )
    layers = [block.attention.sublayer for block in model.blocks]
    assert [layer.top_k for layer in layers] == [8, 3]
    layers[1].n_local = 5
    with pytest.raises(ValueError, match="5 local candidates do not fit in top_k=4"):
        set_top_k(model, 4)
    assert [layer.top_k for layer in layers] == [8, 3]
    set_top_k(model, None)
    assert [layer.top_k for layer in layers] == [None, None]


# decoding


def test_it_keeps_one_small_key_more_for_each_token():
    for name, width in (("tokens", 2 * 2 * 8 + 8), ("latent", 12 + 8 + 12)):
        cache = make_layer(name).new_cache(2)
        make_layer(name)(randn(2, 10, 32), cache=cache)
        assert cache.nbytes == 2 * 10 * width * 4


def test_generate_writes_what_the_model_writes_without_a_cache():
    ours, _ = pair()
    prompt = draw_ids(1, 15, high=VOCAB)
    (text,) = generate(ours, prompt.tolist(), max_new_tokens=30)
    ids = prompt
    for _ in range(30):
        ids = torch.cat([ids, ours(ids)[:, -1:].argmax(-1)], 1)
    assert text.ids == ids[0, 15:].tolist()


@torch.no_grad()
def test_static_caches_of_blocks_hold_texts_of_any_length():
    model = spread(
        Llama(GROUPED, make_sparse_factory(GROUPED, **LAYERS["blocks of groups"])), 0.3
    )
    ids = draw_ids(2, 30, high=VOCAB)
    for max_len in (30, 31, 40):
        cache = new_static_cache(model, 2, max_len)
        parts = [model(part, cache=cache) for part in ids.split([11, 1, 1, 17], 1)]
        close(torch.cat(parts, 1), model(ids))


def test_weights_of_one_byte_choose_nearly_the_same():
    for name in ("tokens", "latent"):
        layer = make_layer(name, 0.2)
        x = randn(1, 30, 32)
        expected = layer(x)
        small = quantize_int8(copy.deepcopy(layer))
        assert (small(x) - expected).abs().mean() < 0.1 * expected.abs().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_are_summed_in_full(dtype):
    for name in LAYERS:
        layer = make_layer(name)
        x = randn(1, 20, 32).to(dtype)
        layer = layer.to(dtype)
        q, weights = layer.indexer.project_queries(
            x, layer.compress_queries(x) if "latent" in name else x, plain(20)
        )
        keys = layer.indexer.project_keys(x, plain(20))
        scores = layer.indexer.score(q, weights, keys)
        assert scores.dtype == torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            again = layer.indexer.score(q, weights, keys)
        assert again.dtype == torch.float32
        assert layer(x).dtype == dtype


# what is refused


def indexer(n_choices=1, **how):
    return (
        LightningIndexer(32, 3, 8, **how)
        if n_choices == 1
        else GroupIndexer(32, n_choices, 8, **how)
    )


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SparseAttention(32, 4, indexer=indexer(), top_k=0), "top_k.*0"),
        (lambda: SparseAttention(32, 4, indexer=indexer(), top_k=2.5), "top_k.*2.5"),
        (lambda: SparseAttention(32, 4, indexer=indexer(), top_k=True), "top_k.*True"),
        (
            lambda: SparseAttention(32, 4, indexer=indexer(), top_k=4, block_size=0),
            "block_size.*0",
        ),
        (
            lambda: SparseAttention(32, 4, indexer=indexer(), top_k=4, n_local=-1),
            "n_local.*-1",
        ),
        (
            lambda: SparseAttention(32, 4, indexer=indexer(), top_k=4, n_local=5),
            "5 local candidates do not fit in top_k=4",
        ),
        (
            lambda: SparseAttention(32, 4, indexer=indexer(3), top_k=4),
            "4 heads cannot be divided evenly among 3 choices",
        ),
        (
            lambda: SparseAttention(32, 4, n_kv_heads=2, indexer=indexer(4), top_k=4),
            "2 key heads cannot be divided evenly among 4 choices",
        ),
        (lambda: SparseAttention(32, 4, indexer=None, top_k=4), "indexer.*NoneType"),
        (
            lambda: SparseAttention(
                32, 4, indexer=indexer(), top_k=4, score_bias=ALiBi(4)
            ),
            "score_bias",
        ),
        (
            lambda: SparseLatentAttention(32, 4, indexer=indexer(2), top_k=4, **LATENT),
            "one latent for all heads.*got 2",
        ),
        (
            lambda: SparseLatentAttention(32, 4, indexer=indexer(), top_k=4, **LATENT),
            "14 numbers, got q_dim=32",
        ),
        (lambda: indexer(rotary=RotaryEmbedding(10)), "10 wide.*8"),
        (lambda: indexer(2, rotary=RotaryEmbedding(10)), "10 wide.*8"),
        (lambda: indexer(rotary=SelfAttention(4, 2)), "rotary"),
        (lambda: LightningIndexer(32, 0, 8), "n_heads.*0"),
        (lambda: GroupIndexer(32, 2, 0), "d_head.*0"),
        (lambda: make_sparse_factory(GROUPED, [], d_index=8, n_index_heads=2), "none"),
        (
            lambda: make_sparse_factory(GROUPED, 0, d_index=8, n_index_heads=2)(0),
            "top_k.*0",
        ),
        (
            lambda: make_sparse_factory(
                GROUPED, 4, d_index=8, n_index_heads=2, d_index_rope=3
            ),
            "d_index_rope 3",
        ),
        (
            lambda: make_sparse_factory(GROUPED, 4, **INDEX, latent=LATENT),
            "no keys are shared",
        ),
        (lambda: make_sparse_factory("small", 4, d_index=8, n_index_heads=2), "config"),
        (lambda: set_top_k(Llama(GROUPED), 4), "Llama has no sparse layers"),
        (
            lambda: collect_indexer_losses(Llama(GROUPED)).__enter__(),
            "no sparse layers",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@each_layer
def test_a_cache_without_the_keys_of_the_indexer_is_refused(name):
    "And it is as it was."
    layer = make_layer(name)
    dense = SelfAttention(32, 4, n_kv_heads=2, causal=True)
    x = randn(2, 9, 32)
    cache = dense.new_cache(2)
    dense(x, cache=cache)
    kept = [y.clone() for y in cache.tensors]
    with pytest.raises(ValueError, match=r"last one for its indexer.*width 8 and 8"):
        layer(x, cache=cache)
    assert all(map(torch.equal, kept, cache.tensors))
    with pytest.raises(ValueError, match="CrossAttentionCache keeps no tokens"):
        layer(x, cache=CrossAttentionCache(2))
    cache = layer.new_cache(2)
    layer(x, cache=cache)
    with pytest.raises(ValueError):
        dense(x, cache=cache)


@torch.no_grad()
def test_a_text_longer_than_the_model_is_refused_and_the_cache_is_kept():
    model, _ = pair()
    cache = model.new_cache(1)
    model(draw_ids(1, 120, high=VOCAB), cache=cache)
    with pytest.raises(ValueError, match="128"):
        model(draw_ids(1, 9, high=VOCAB), cache=cache)
    assert cache.lengths.tolist() == [120]
    model(draw_ids(1, 8, high=VOCAB), cache=cache)


def test_scores_are_those_of_the_formula():
    indexer = spread(LightningIndexer(10, 3, 4, q_dim=7), 0.5)
    x = randn(2, 5, 10)
    latent = randn(2, 5, 7, seed=1)
    queries = indexer.project_queries(x, latent, plain(5))
    found = indexer.score(*queries, indexer.project_keys(x, plain(5)))
    keys = indexer.k_norm(indexer.k_proj(x))
    q = indexer.q_proj(latent).view(2, 5, 3, 4)
    products = torch.einsum("bthd,bsd->bths", q, keys).relu() / 4**0.5
    weights = indexer.weights_proj(x) / 3**0.5
    close(found[:, 0], torch.einsum("bth,bths->bts", weights, products))
    groups = spread(GroupIndexer(10, 2, 4), 0.5)
    queries = groups.project_queries(x, None, plain(5))
    keys = groups.k_norm(groups.k_proj(x))
    q = groups.q_norm(groups.q_proj(x).view(2, 5, 2, 4))
    close(
        groups.score(*queries, groups.project_keys(x, plain(5))),
        torch.einsum("btgd,bsd->bgts", q, keys) / 2,
    )


@pytest.mark.parametrize("latent", [None, LATENT])
def test_a_factory_hands_on_what_it_is_given(latent):
    config = LlamaConfig(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, eps=1e-3)
    for n_index_heads in (None, 2) if latent is None else (2,):
        layer = make_sparse_factory(
            config,
            4,
            d_index=8,
            n_index_heads=n_index_heads,
            dropout=0.25,
            fused=False,
            latent=latent,
        )(0)
        assert layer.dropout == 0.25 and not layer.fused
        norms = {
            name: module.eps for name, module in layer.named_modules() if "norm" in name
        }
        theirs = {"indexer.k_norm"} if n_index_heads else set()
        assert {name for name, eps in norms.items() if eps != 1e-3} == theirs
        assert all(norms[name] == 1e-6 for name in theirs)


@plain_only
@pytest.mark.nightly
def test_what_indexers_cost_is_recorded_by_its_script(tmp_path):
    run_small("sparse", tmp_path)
    for name in ("sparse", "sparse_training"):
        new = read_rows(tmp_path / f"{name}.csv")
        kept = load_record(name)
        assert new[0].keys() == kept[0].keys()
        keys = [key for key in ("task", "chooser", "k", "layer") if key in new[0]]
        assert {tuple(row[key] for key in keys) for row in new} == {
            tuple(row[key] for key in keys) for row in kept
        }
