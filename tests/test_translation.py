"""Translation: batches, the loss, writing, averages, maps, scores."""

import copy
import csv
import functools
import json
import math
import re
import sys
from collections import Counter

import pytest
import sacrebleu
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel

from conftest import ROOT, run
from helpers import plain_only, spread
from tformer.corpora.bilingual import SentencePair, translate_word_for_word
from tformer.corpora.bilingual import generate_pairs as grammar
from tformer.models.mini_gpt import load_record
from tformer.models.seq2seq import (
    PreNormSeq2Seq,
    Seq2Seq,
    Seq2SeqConfig,
    greedy,
    teacher_forced_loss,
)
from tformer.nn.kv_cache import DynamicLayerCache, KVCache
from tformer.tasks.translation import (
    TRANSLATION_SPECIAL_TOKENS,
    PairLoader,
    TranslationBatch,
    TranslationTokenizer,
    average_weights,
    bleu_and_chrf,
    cross_attention_maps,
    exact_match_by_phenomenon,
    translate,
    translation_loss,
)
from tformer.text.tokenizer import Tokenizer
from tformer.training.trainer import Trainer

FIVE = [
    ("the white horse sleeps", "le cheval blanc dort"),
    ("the cat sees a bird", "le chat voit un oiseau"),
    ("i do not see the house", "je ne vois pas la maison"),
    ("she gives it to him", "elle le lui donne"),
    ("yes", "oui"),
]
LEARN = dict(special_tokens=TRANSLATION_SPECIAL_TOKENS)
ONE = Tokenizer.train(["\n".join(pair) for pair in FIVE], 300, **LEARN)
OTHER = Tokenizer.train([target for _, target in FIVE], 280, **LEARN)
SIDES = {
    "shared": TranslationTokenizer(ONE),
    "separate": TranslationTokenizer(ONE, OTHER),
}
each_side = pytest.mark.parametrize("sides", SIDES.values(), ids=[*SIDES])


def model(kind=Seq2Seq, vocab_size=300, **changes):
    return spread(
        kind(
            Seq2SeqConfig(
                **dict(
                    vocab_size=vocab_size,
                    d_model=16,
                    n_layers=2,
                    n_heads=2,
                    d_ff=32,
                    max_len=48,
                    dropout=0.0,
                )
                | changes
            )
        ),
        0.3,
    )


@functools.cache
def learned(side):
    "A model that knows the five sentences."
    torch.manual_seed(0)
    one = Seq2Seq(
        Seq2SeqConfig(
            vocab_size=len(SIDES[side]),
            d_model=32,
            n_layers=2,
            n_heads=2,
            d_ff=64,
            max_len=48,
            dropout=0.0,
        )
    )
    Trainer(
        one,
        PairLoader(FIVE, SIDES[side], 5),
        max_steps=70,
        loss_fn=translation_loss,
        lr=1e-2,
    ).fit()
    return one.eval()


class Bare(nn.Module):
    "A model of another maker, without a cache."

    def encode(self, src, mask):
        return torch.zeros(*src.shape, 1)


# --- text to ids and back


@each_side
def test_texts_come_back(sides):
    for source, target in FIVE:
        (read,) = sides.encode_sources([source])
        (said,) = sides.encode_targets([target])
        assert sides.source.decode(read[:-1]) == source
        assert read[-1] == sides.source.token_to_id("<|end|>")
        assert sides.decode_target(said) == target == sides.decode_target(said + said)
        assert (
            sides.decode_target(
                [sides.decoder_start_token_id, *said, sides.pad_token_id]
            )
            == target
        )
        assert "".join(sides.token_texts(said)[:-1]) == target
        assert max(read + said) < len(sides)


def test_separate_vocabularies_share_no_id():
    sides = SIDES["separate"]
    read = {i for row in sides.encode_sources(s for s, _ in FIVE) for i in row}
    said = {i for row in sides.encode_targets(t for _, t in FIVE) for i in row}
    assert not read & said and max(read) < len(ONE) <= min(said)
    assert len(sides) == len(ONE) + len(OTHER)
    assert TranslationTokenizer.wrap(sides) is sides
    assert len(TranslationTokenizer.wrap(ONE)) == len(ONE)
    assert sides.decode_target([3, *sides.encode_targets(["oui"])[0]]) == "oui"


# --- batches


@each_side
@pytest.mark.parametrize("buckets", [True, False])
@pytest.mark.parametrize("batch", [1, 2, 5, 99])
def test_every_pair_comes_once_a_pass(sides, buckets, batch):
    loader = PairLoader(FIVE, sides, batch, group_by_length=buckets)
    seen = []
    for k in range(len(loader.groups)):
        b = loader.get_batch(k)
        assert b.num_targets == int((b.targets != -100).sum())
        for src, mask, ids, targets in zip(*b[:4], strict=False):
            said = targets[targets != -100].tolist()
            assert ids[: len(said)].tolist() == [
                sides.decoder_start_token_id,
                *said[:-1],
            ]
            assert (ids[len(said) :] == sides.pad_token_id).all()
            assert (src[~mask] == sides.pad_token_id).all()
            assert mask.tolist() == sorted(mask.tolist(), reverse=True)
            seen.append((src[mask].tolist(), said))
    assert sorted(seen) == sorted(
        zip(
            sides.encode_sources(s for s, _ in FIVE),
            sides.encode_targets(t for _, t in FIVE),
            strict=True,
        )
    )
    once = [b.num_targets for b in loader.iter_once()]
    assert sum(once) == sum(len(said) for _, said in seen)


def test_buckets_leave_less_padding():
    some = grammar(200)

    def waste(buckets):
        loader = PairLoader(some, ONE, 16, group_by_length=buckets)
        made = [
            (
                b.targets.numel() + b.src.numel(),
                b.num_targets + int(b.src_attention_mask.sum()),
            )
            for b in loader.iter_once()
        ]
        return 1 - sum(n for _, n in made) / sum(n for n, _ in made)

    assert waste(True) < 0.6 * waste(False)


def test_order_can_be_saved():
    loader, other = (PairLoader(FIVE, ONE, 2, seed=3) for _ in range(2))
    first = [b.src.tolist() for _, b in zip(range(7), loader, strict=False)]
    state = json.loads(json.dumps(loader.state_dict()))
    other.load_state_dict(state)
    following = next(iter(other)).src.tolist()
    assert following == PairLoader(FIVE, ONE, 2, seed=3).get_batch(7).src.tolist()
    assert len({str(x) for x in first[:3]}) == 3
    with pytest.raises(ValueError, match="the state says"):
        PairLoader(FIVE[:4], ONE, 2, seed=3).load_state_dict(state)


def test_batches_move():
    b = PairLoader(FIVE, ONE).get_batch(0).to("meta")
    assert isinstance(b, TranslationBatch)
    assert {x.device.type for x in b[:4]} == {"meta"}
    assert b.num_targets == PairLoader(FIVE, ONE).get_batch(0).num_targets


@pytest.mark.parametrize(
    "pairs, says",
    [
        ([("a", "b"), ("a", "")], r"pair 1, \('a', ''\), has no target"),
        ([("a", " \n")], "pair 0, .* has no target"),
        ([("a",)], r"pair 0, \('a',\), has no target"),
        ([("", "b")], "pair 0, .* has no source"),
        ([("a", None)], "pair 0, .* has no target"),
        ([SentencePair("a", "", ())], "pair 0, .* has no target"),
        ([], "there are no pairs"),
        ([{"en": "a", "fr": "b"}], r"pair 0 must be \(source, target\), got {"),
        (["ab", "cd"], r"pair 0 must be \(source, target\), got 'ab'"),
        ([("a", "b"), None], r"pair 1 must be \(source, target\), got None"),
        (
            [("a", "b"), ("a" * 60, "b")],
            "the source of pair 1 takes .* tokens with its end, more than max_len",
        ),
        ([("a", "b" * 60)], "the target of pair 0 takes"),
    ],
)
def test_what_is_no_pair_is_refused(pairs, says):
    with pytest.raises(ValueError, match=says):
        PairLoader(pairs, ONE, max_len=40)


def test_a_batch_size_is_a_number():
    with pytest.raises(ValueError, match="batch_size must be a whole number"):
        PairLoader(FIVE, ONE, batch_size=0)
    with pytest.raises(ValueError, match="max_len must be"):
        PairLoader(FIVE, ONE, max_len=0)
    with pytest.raises(ValueError, match="seed must be a whole number"):
        PairLoader(FIVE, ONE, seed=-1)


def test_each_pass_and_each_seed_has_an_order_of_its_own():
    def order(seed, first):
        loader = PairLoader(grammar(60), ONE, batch_size=4, seed=seed)
        return [
            tuple(loader.get_batch(k).src.flatten().tolist())
            for k in range(first, first + 15)
        ]

    a = order(0, 0)
    b = order(0, 15)
    assert sorted(a) == sorted(b) and a != b
    assert order(1, 0) != a == order(0, 0)


# --- the loss


@pytest.mark.parametrize("kind", [Seq2Seq, PreNormSeq2Seq])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_the_loss_is_that_of_sentences_alone(kind, smoothing):
    one = model(kind).double()
    total = 0.0
    n = 0
    sides = SIDES["shared"]
    for source, target in FIVE:
        (read,) = sides.encode_sources([source])
        (said,) = sides.encode_targets([target])
        given = torch.tensor([[sides.decoder_start_token_id, *said[:-1]]])
        logits = one(given, encoder_hidden_states=one.encode(torch.tensor([read])))
        total = total + F.cross_entropy(
            logits[0], torch.tensor(said), reduction="sum", label_smoothing=smoothing
        )
        n += len(said)
    batch = next(iter(PairLoader(FIVE, ONE).iter_once()))
    assert (~batch.src_attention_mask).any()
    found = translation_loss(one, batch, smoothing)
    assert abs(found.item() - total.item() / n) < 1e-10
    if not smoothing:
        src = batch.src
        targets = batch.targets.where(batch.targets >= 0, sides.pad_token_id)
        assert (
            abs(
                found.item()
                - teacher_forced_loss(
                    one,
                    src,
                    targets,
                    decoder_start_token_id=sides.decoder_start_token_id,
                    pad_token_id=sides.pad_token_id,
                )
            )
            < 1e-5
        )


def test_the_default_is_the_smoothing_of_2017():
    batch = PairLoader(FIVE, ONE).get_batch(0)
    one = model()
    assert translation_loss(one, batch) == translation_loss(one, batch, 0.1)
    assert translation_loss(one, batch) != translation_loss(one, batch, 0.0)


# --- translating


@pytest.mark.parametrize("side", SIDES)
def test_alone_or_in_a_batch(side):
    one = learned(side)
    sides = SIDES[side]
    texts = [s for s, _ in FIVE] + ["the bird", "she gives a house to him"]
    alone = [translate(one, sides, [text])[0] for text in texts]
    assert alone[:5] == [t for _, t in FIVE]
    for batch in (1, 2, 3, 64):
        assert translate(one, sides, texts, batch_size=batch) == alone
    assert translate(one, sides, []) == []


@pytest.mark.parametrize("extra", [0, 9])
@pytest.mark.parametrize("kind", [Seq2Seq, PreNormSeq2Seq])
@each_side
def test_a_translation_is_what_greedy_writes(sides, kind, extra):
    "Lesson 9's loop, one sentence at a time, everything computed anew."
    one = model(kind, vocab_size=len(sides))
    texts = [s for s, _ in FIVE] + ["the bird", "a red house, a white bird"]
    expected = []
    for row in sides.encode_sources(texts):
        [ids] = greedy(
            one,
            torch.tensor([row]),
            min(len(row) + extra, 48),
            decoder_start_token_id=sides.decoder_start_token_id,
            eos_token_id=sides.eos_token_id,
            cached=False,
        )
        expected.append(sides.decode_target(ids.tolist()))
    assert translate(one, sides, texts, max_extra_tokens=extra) == expected


def test_nothing_is_left_behind():
    one = model(dropout=0.5).train()
    state = copy.deepcopy(one.state_dict())
    chance = torch.get_rng_state()
    first = translate(one, ONE, ["the cat"])
    assert one.training and torch.equal(chance, torch.get_rng_state())
    assert all(
        torch.equal(a, b)
        for a, b in zip(state.values(), one.state_dict().values(), strict=True)
    )
    assert first == translate(one, ONE, ["the cat"])


class Endless(nn.Module):
    "Writes the token of an *a* for ever."

    def __init__(self):
        super().__init__()
        self.say = nn.Parameter(torch.zeros(300))
        self.say.data[ONE.encode("a")[0]] = 1.0

    def encode(self, src, mask):
        return torch.zeros(*src.shape, 1)

    def new_cache(self, batch_size, max_len=None):
        return KVCache([DynamicLayerCache(batch_size)])  # stays empty

    def forward(self, ids, *, cache=None, positions=None, **encoder_inputs):
        return self.say.expand(*ids.shape, -1)


def test_a_limit_of_no_token_is_refused():
    for wrong in (0, -1, 2.5):
        with pytest.raises(ValueError, match="max_len must be a whole number of at le"):
            translate(Endless(), ONE, ["yes"], max_len=wrong)


def test_a_pair_is_two_texts():
    for pair in (("x", "a"), ["x", "a"]):
        assert exact_match_by_phenomenon(["a"], [pair])["all"] == (1, 1)
    with pytest.raises(ValueError, match="pair must be tuple or list, got int 3"):
        exact_match_by_phenomenon(["a"], [3])


def test_it_never_writes_beyond_the_limit():
    one = Endless()
    assert translate(one, ONE, ["yes"], max_len=24, max_extra_tokens=10**6) == [
        "a" * 24
    ]
    one.max_len = 9
    assert translate(one, ONE, ["yes"], max_extra_tokens=10**6) == ["a" * 9]
    with pytest.raises(ValueError, match="more than max_len 5"):
        translate(one, ONE, ["the white horse sleeps"], max_len=5)


def test_a_pair_of_exactly_max_len_tokens_is_taken():
    short = "the cat"
    long = "the white horse sleeps"
    (row,) = TranslationTokenizer.wrap(ONE).encode_sources([long])
    n = len(row)
    for pair in ((short, long), (long, short)):
        assert next(iter(PairLoader([pair], ONE, max_len=n))).num_targets
        with pytest.raises(ValueError, match=f"takes {n} .* more than max_len {n - 1}"):
            PairLoader([pair], ONE, max_len=n - 1)
    assert translate(Endless(), ONE, [long], max_len=n) == ["a" * n]
    with pytest.raises(ValueError, match=f"takes {n} .* more than max_len {n - 1}"):
        translate(Endless(), ONE, [long], max_len=n - 1)


def test_a_limit_beyond_the_model_is_the_models():
    one = model()
    expected = translate(one, ONE, ["the cat"])
    assert translate(one, ONE, ["the cat"], max_len=10**6) == expected
    with pytest.raises(ValueError, match=r"takes .* more than max_len 48"):
        translate(one, ONE, ["a cat " * 40], max_len=10**6)
    unlimited = Endless()
    unlimited.max_len = None
    found = translate(unlimited, ONE, ["yes"], max_extra_tokens=5)
    assert found == translate(Endless(), ONE, ["yes"], max_extra_tokens=5)


def test_logits_that_are_no_numbers_are_no_translation():
    one = model()
    one.embed.weight.data.fill_(math.nan)
    with pytest.raises(ValueError, match="the logits of row 0 hold NaN"):
        translate(one, ONE, ["the cat"])


def test_who_never_ends_is_cut_alone_as_in_a_batch():
    texts = ["yes", "i do not see the house"]
    for extra in (0, 5):
        alone = [
            translate(Endless(), ONE, [text], max_extra_tokens=extra)[0]
            for text in texts
        ]
        assert alone == translate(Endless(), ONE, texts, max_extra_tokens=extra)
        assert alone[0] == "a" * (len(ONE.encode("yes")) + 1 + extra)


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: translate(model(), ONE, ["a"], batch_size=0), "batch_size must be"),
        (lambda: translate(model(), ONE, ["a"], batch_size=2.5), "batch_size must be"),
        (
            lambda: translate(model(), ONE, ["a"], max_extra_tokens=-1),
            "max_extra_tokens must be",
        ),
        (lambda: translate(nn.Linear(2, 2), ONE, ["a"]), "Linear has no encode"),
        (
            lambda: translate(Bare(), ONE, ["a"]),
            r"Bare has no new_cache, which .*DecoderModel",
        ),
        (lambda: translate((model(), ONE), ONE, ["a"]), "model must be"),
        (
            lambda: translate(model(), ONE, ["a"], known_words="a b"),
            "known_words must be a list of words or texts, got one",
        ),
        (lambda: average_weights([nn.Linear(2, 2).state_dict()]), "model 0 must be"),
        (
            lambda: exact_match_by_phenomenon("ab", FIVE[:2]),
            "hypotheses must be a list of texts",
        ),
        (lambda: bleu_and_chrf(["a"], [3]), "^reference 0 must be str, got int 3"),
        (
            lambda: bleu_and_chrf(["a", None], ["a", "b"]),
            "^hypothesis 1 must be str, got NoneType None",
        ),
        (lambda: bleu_and_chrf("ab", ["a", "b"]), "hypotheses must be a list"),
    ],
)
def test_misuse_is_told_of(call, says):
    with pytest.raises(ValueError, match=says):
        call()


def test_generators_will_do():
    assert exact_match_by_phenomenon((t for _, t in FIVE), iter(FIVE))["all"] == (5, 5)
    assert bleu_and_chrf(iter(["a b c d"]), iter(["a b c d"])).bleu > 99
    assert translate(model(), ONE, iter(["yes"]), known_words=iter(FIVE))


@pytest.mark.parametrize(
    "texts, more, says",
    [
        (["a", ""], {}, r"texts\[1\] is empty"),
        ([" \n"], {}, r"texts\[0\] is empty"),
        ("a cat", {}, "texts must be a list of sentences, got one"),
        ([b"a cat"], {}, r"texts\[0\] must be a str, got bytes"),
        ([None], {}, r"texts\[0\] must be a str"),
        (
            ["a cat", "a cat " * 40],
            {},
            r"texts\[1\] takes .* tokens with its end, more than max_len 48",
        ),
        (
            ["the cat", "the zebra!"],
            {"known_words": ["the Cat"]},
            r"texts\[1\], 'the zebra!', has a word outside the vocabulary: "
            r"\['zebra'\]",
        ),
        (["<|end|>"], {}, "special token"),
    ],
)
def test_what_cannot_be_translated_is_refused(texts, more, says):
    with pytest.raises(ValueError, match=says):
        translate(model(), ONE, texts, **more)


def test_known_words_are_found_in_texts():
    one = model()
    assert translate(
        one, ONE, ["The cat, the HORSE?"], known_words=["the cat", "a horse sleeps"]
    )
    assert translate(one, ONE, ["anything goes"])


# --- averages


def test_the_average_is_that_of_torch():
    models = [spread(Seq2Seq(model().config), 0.1 * (i + 1)) for i in range(4)]
    for i, one in enumerate(models):
        with torch.no_grad():
            one.embed.weight += i
    theirs = AveragedModel(models[0])
    for one in models:
        theirs.update_parameters(one)
    before = copy.deepcopy(models[-1].state_dict())
    mean = average_weights(iter(models))
    for (name, p), q in zip(
        mean.named_parameters(), theirs.module.parameters(), strict=True
    ):
        assert (p - q).abs().max() < 1e-5, name
    assert mean.lm_head.weight is mean.embed.weight
    assert all(
        torch.equal(a, b)
        for a, b in zip(before.values(), models[-1].state_dict().values(), strict=True)
    )


def test_an_average_is_computed_wide():
    models = [nn.Linear(1, 1, bias=False) for _ in range(3)]
    for one, x in zip(models, (1e8, 1.0, -1e8), strict=True):
        nn.init.constant_(one.weight, x)
    assert abs(average_weights(models).weight.item() - 1 / 3) < 1e-6
    norms = [nn.BatchNorm1d(2) for _ in range(2)]
    norms[1].num_batches_tracked += 7
    assert average_weights(norms).num_batches_tracked == 7
    rounded = [nn.Linear(2, 2).bfloat16() for _ in range(2)]
    assert average_weights(rounded).weight.dtype == torch.bfloat16


def test_what_has_no_average_is_refused():
    with pytest.raises(ValueError, match="there is no model to average"):
        average_weights([])
    with pytest.raises(ValueError, match="model 0 has no weight of shape"):
        average_weights([nn.Linear(2, 3), nn.Linear(3, 3)])
    with pytest.raises(ValueError, match="model 0 has no bias of shape"):
        average_weights([nn.Linear(2, 3, bias=False), nn.Linear(2, 3)])
    with pytest.raises(
        ValueError, match="model 0 has bias, which the last one has not"
    ):
        average_weights([nn.Linear(2, 3), nn.Linear(2, 3, bias=False)])


def test_a_decoder_without_a_row_for_every_id_is_refused():
    "Two tokenizers number the target's tokens after the source's."
    two = SIDES["separate"]
    n = len(two)
    one = model(vocab_size=len(ONE), decoder_vocab_size=len(OTHER))
    with pytest.raises(
        ValueError,
        match=f"^the model has decoder_vocab_size {len(OTHER)}, and the tokenizer {n} "
        f"ids: .* make the model with decoder_vocab_size={n}",
    ) as caught:
        translate(one, two, ["the cat sleeps"])
    with pytest.raises(ValueError, match=f"^{re.escape(str(caught.value))}$"):
        cross_attention_maps(one, two, *FIVE[0])
    spare = model(vocab_size=n + 1)
    with pytest.raises(ValueError, match=f"vocab_size {n + 1}, and the tokenizer {n} "):
        translate(spare, two, ["the cat sleeps"])
    with pytest.raises(ValueError, match=r"id \d+ is outside the vocabulary"):
        translation_loss(one, PairLoader(FIVE, two).get_batch(0))
    fits = model(vocab_size=len(ONE), decoder_vocab_size=n, n_decoder_layers=1)
    assert len(translate(fits, two, ["the cat sleeps"])) == 1
    own = model(vocab_size=len(ONE), decoder_vocab_size=len(ONE))
    assert len(translate(own, ONE, ["the cat sleeps"])) == 1


# --- where it looks


@each_side
def test_maps_are_those_of_torch(sides):
    one = model(vocab_size=len(sides))
    found = cross_attention_maps(one, sides, *FIVE[0])
    batch = PairLoader(FIVE[:1], sides).make_batch([0])
    memory = one.encode(batch.src)
    held = []
    for layer, block in enumerate(one.blocks):
        part = block.cross_attention.sublayer
        twin = nn.MultiheadAttention(16, 2, batch_first=True)
        with torch.no_grad():
            for name in ("weight", "bias"):
                getattr(twin, f"in_proj_{name}").copy_(
                    torch.cat(
                        [
                            getattr(p, name)
                            for p in (part.q_proj, part.k_proj, part.v_proj)
                        ]
                    )
                )
        hook = part.register_forward_pre_hook(lambda m, args: held.append(args[0]))
        one(batch.decoder_input_ids, encoder_hidden_states=memory)
        hook.remove()
        _, expected = twin(held[-1], memory, memory, average_attn_weights=False)
        assert (found.weights[layer] - expected[0]).abs().max() < 1e-5
    assert found.weights.shape == (2, 2, len(found.target), len(found.source))
    assert "".join(found.source[:-1]) == FIVE[0][0]
    assert "".join(found.target[:-1]) == FIVE[0][1]


def test_maps_are_drawn_without_dropout():
    one = model(dropout=0.5).train()
    chance = torch.get_rng_state()
    a, b = (
        cross_attention_maps(one, ONE, "the cat", "le chat").weights for _ in range(2)
    )
    assert torch.equal(a, b) and one.training
    assert torch.equal(chance, torch.get_rng_state())


def test_maps_of_what_it_writes_itself():
    one = learned("shared")
    found = cross_attention_maps(one, ONE, FIVE[0][0])
    assert "".join(found.target[:-1]) == FIVE[0][1]
    assert not any(m._forward_pre_hooks for m in one.modules())
    with pytest.raises(ValueError, match="Linear has no CrossAttention"):
        cross_attention_maps(nn.Linear(2, 2), ONE, "a", "b")


# --- scores


def test_exact_matches_are_counted_by_phenomenon():
    pairs = [
        SentencePair("a", "A", ("x", "y")),
        SentencePair("b", "B", ("y",)),
        SentencePair("c", "C", ()),
    ]
    found = exact_match_by_phenomenon(["A", "b", "C"], pairs)
    assert found == {"all": (2, 3), "x": (1, 1), "y": (1, 2)}
    assert found["y"].accuracy == 0.5 and next(iter(found)) == "all"
    assert exact_match_by_phenomenon(["A"], [("a", "A")]) == {"all": (1, 1)}
    for some in ([], ["A"]):
        with pytest.raises(ValueError, match="translations for 3 right ones"):
            exact_match_by_phenomenon(some, pairs)


def test_bleu_is_what_papineni_wrote():
    def grams(words, n):
        return Counter(zip(*(words[i:] for i in range(n)), strict=False))

    wanted = [
        p.target.replace(".", "")
        .replace("?", "")
        .replace("'", " ")
        .replace(",", "")
        .replace("-", " ")
        for p in grammar(60)
    ]
    said = [" ".join(t.split()[1:]) for t in wanted]
    logs = sum(
        math.log(
            sum(
                (grams(a.split(), n) & grams(b.split(), n)).total()
                for a, b in zip(said, wanted, strict=True)
            )
            / sum(grams(a.split(), n).total() for a in said)
        )
        / 4
        for n in range(1, 5)
    )
    short = 1 - sum(len(b.split()) for b in wanted) / sum(len(a.split()) for a in said)
    found = bleu_and_chrf(said, wanted)
    assert abs(found.bleu - 100 * math.exp(logs + short)) < 1e-6
    assert abs(found.chrf - sacrebleu.corpus_chrf(said, [wanted]).score) < 1e-9
    assert "tok:13a" in found.signature
    assert bleu_and_chrf(wanted, wanted).bleu > 99.999
    with pytest.raises(ValueError, match="1 translations for 2 right ones"):
        bleu_and_chrf(["a"], ["a", "b"])


@plain_only
def test_the_dictionary_alone_scores_low():
    pairs = grammar(300, seed=1, held_out_only=True)
    marks = bleu_and_chrf(
        [translate_word_for_word(p.source) for p in pairs], [p.target for p in pairs]
    )
    assert marks.bleu <= 45


def test_without_sacrebleu_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu", None)
    with pytest.raises(ImportError, match=r'pip install "tformer\[score\]"'):
        bleu_and_chrf(["a"], ["a"])


@given(
    st.lists(
        st.tuples(*[st.text("abé ", min_size=1, max_size=9).filter(str.strip)] * 2),
        min_size=1,
        max_size=9,
    ),
    st.integers(1, 4),
)
@settings(max_examples=30, deadline=None)
def test_no_pair_is_lost(pairs, batch):
    loader = PairLoader(pairs, ONE, batch)
    sides = loader.tokenizer
    seen = []
    for b in loader.iter_once():
        for src, mask, targets in zip(
            b.src, b.src_attention_mask, b.targets, strict=True
        ):
            seen.append(
                (
                    ONE.decode(src[mask].tolist()[:-1]),
                    sides.decode_target(targets[targets >= 0].tolist()),
                )
            )
    assert sorted(seen) == sorted(pairs)


# --- the recorded corpus of messages


def program(folder, pairs):
    "A folder with a French catalogue, as programs carry one."
    from babel.messages import Catalog, mofile

    catalogue = Catalog(locale="fr")
    for english, french in pairs:
        catalogue.add(english, french)
    path = folder / "locale" / "fr" / "LC_MESSAGES" / "some.mo"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        mofile.write_mo(file, catalogue)


@plain_only
def test_messages_of_programs_are_read_and_tried(tmp_path, capsys):
    words = "file page user name line group".split()
    program(
        tmp_path / "one-1.0",
        [(f"Open the {a} of {b}", f"Ouvrir {a} {b}") for a in words for b in words],
    )
    program(
        tmp_path / "two-2.0",
        [(f"Close {a} {b}", f"Fermer {a} {b}") for a in words for b in words]
        + [
            ("Same", "Same"),
            ("two\nlines", "deux\nlignes"),
            ("Open the file of page", "encore"),
        ],
    )
    out = tmp_path / "some.csv"
    run(
        sys.executable,
        ROOT / "experiments" / "catalogues.py",
        tmp_path,
        "--seeds",
        "1",
        "--steps",
        "2",
        "--out",
        out,
    )
    short = list(csv.DictReader(out.open(encoding="utf-8")))
    kept = load_record("catalogues")
    assert short[0].keys() == kept[0].keys()
    assert [row["split"] for row in short] == ["known program", "new program"]
    assert {(row["read"], row["new"]) for row in short} == {("36", "18")}
    # who has read the program's other messages remembers its verb
    known, new = (float(row["memory_chrf"]) for row in short)
    assert known > new + 5


@pytest.mark.nightly
@plain_only
def test_the_flattery_is_recorded_by_its_script(tmp_path):
    out = tmp_path / "some.csv"
    run(
        sys.executable,
        ROOT / "experiments" / "flattery.py",
        "--seeds",
        "1",
        "--steps",
        "2",
        "--out",
        out,
    )
    short = list(csv.DictReader(out.open(encoding="utf-8")))
    kept = load_record("flattery")
    assert short[0].keys() == kept[0].keys()
    assert [row["read"] for row in short] == ["yes", "no"]
    assert [(row["read"], row["seed"]) for row in kept] == [
        (read, str(seed)) for read in ("yes", "no") for seed in range(8)
    ]
    assert {row["steps"] for row in kept} == {"500"}
    # whoever left the sentences out does not remember them
    gain = {
        read: [
            float(row["trained_on"]) - float(row["known"])
            for row in kept
            if row["read"] == read
        ]
        for read in ("yes", "no")
    }
    assert min(gain["yes"]) > max(gain["no"])


@pytest.mark.nightly
@plain_only
def test_the_words_are_recorded_by_their_script(tmp_path):
    out = tmp_path / "some.csv"
    run(
        sys.executable,
        ROOT / "experiments" / "words.py",
        "--seeds",
        "1",
        "--steps",
        "1",
        "--out",
        out,
    )
    short = list(csv.DictReader(out.open(encoding="utf-8")))
    kept = load_record("words")
    assert short[0].keys() == kept[0].keys()
    ways = ("as it stands", "padding masks", "causal mask", "all masks")
    assert [row["masks"] for row in short] == [*ways]
    assert [(row["masks"], row["seed"]) for row in kept] == [
        (way, str(seed)) for way in ways for seed in range(4)
    ]
    for row in kept:
        assert len(row["losses"].split()) == int(row["steps"]) == 10
        assert [len(row[name].split()) for name in ("right_1", "right_16")] == [5, 5]
    # the same first weights, and the same first epoch
    for row in short:
        (again,) = (r for r in kept if (r["masks"], r["seed"]) == (row["masks"], "0"))
        assert abs(float(row["losses"]) - float(again["losses"].split()[0])) < 0.05


def test_the_record_of_messages_is_whole():
    rows = load_record("catalogues")
    assert [(r["split"], r["seed"]) for r in rows] == [
        (split, str(seed))
        for split in ("known program", "new program")
        for seed in range(len(rows) // 2)
    ]
    assert {r["read"] for r in rows} == {"14280"} and len(rows) >= 2
