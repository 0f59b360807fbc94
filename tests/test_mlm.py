"""Blanks, guesses, labels and writing of a masked language model."""

import csv
import itertools
import math
import random
import sys
from collections import Counter

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from conftest import ROOT, run
from helpers import plain_only, spread
from tformer.bundle import ModelBundle, load_bundle
from tformer.corpora import stories
from tformer.corpora.stories import grade_sentences
from tformer.models.bert import (
    BertClassifier,
    BertConfig,
    BertMaskedLM,
    BertTagger,
    from_hf_bert_name,
)
from tformer.models.mini_gpt import load_record
from tformer.tasks.masked_lm import (
    BERT_SPECIAL_TOKENS,
    STORY_WORDS,
    MaskedTextLoader,
    NeighborBaseline,
    SpecialTokenIds,
    TextLoader,
    batch_cross_entropy,
    collate_texts,
    corrupt_story,
    encode_texts,
    fill_mask,
    generate_by_unmasking,
    mask_tokens,
    next_sentence_pairs,
    recoverable_words,
    unmask,
    with_new_head,
)
from tformer.text.tokenizer import Tokenizer
from tformer.text.vocabulary import Vocabulary

TEXTS = [text.strip() for text in stories.generate_stories(300, 0)]
TOKENIZER = Tokenizer.train(
    stories.generate_stories(2000, 0), 635, special_tokens=BERT_SPECIAL_TOKENS
)
AT = SpecialTokenIds.from_tokenizer(TOKENIZER)
DRAWS = torch.arange(1, 90)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return spread(
        BertMaskedLM(
            BertConfig(
                vocab_size=len(TOKENIZER),
                d_model=32,
                n_layers=2,
                n_heads=4,
                max_len=128,
                dropout=0.0,
            )
        )
    )


@pytest.fixture(scope="module")
def trained(model):
    return ModelBundle(model, TOKENIZER, {})


def ids_of(b=200, t=50, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, 90, (b, t), generator=draw)


def hide(ids, seed=0, **kwargs):
    return mask_tokens(
        ids,
        **{"mask_token_id": 99, "special_ids": (0, 98, 99), "replacement_ids": DRAWS}
        | kwargs,
        generator=torch.Generator().manual_seed(seed),
    )


# --- blanks


def test_the_shares_pass_a_chi_square_test():
    ids = ids_of(400)
    shown, labels = hide(ids)
    chosen = labels != -100
    blank = shown == 99
    same = shown == ids
    counts = [
        (~chosen).sum(),
        (chosen & blank).sum(),
        (chosen & ~blank & ~same).sum(),
        (chosen & same).sum(),
    ]
    hit = 1 / len(DRAWS)
    want = [0.85, 0.12, 0.015 * (1 - hit), 0.015 * (1 + hit)]
    total = ids.numel()
    assert (
        sum(
            (n.item() - p * total) ** 2 / (p * total)
            for n, p in zip(counts, want, strict=True)
        )
        < 16.3
    )


def test_what_is_drawn_is_even_and_from_the_given_words():
    ids = torch.full((500, 100), 95)
    shown, _ = hide(
        ids,
        mlm_probability=1.0,
        mask_replace_prob=0.0,
        random_replace_prob=1.0,
        replacement_ids=torch.tensor([3, 5, 8, 13]),
    )
    counts = Counter(shown.flatten().tolist())
    assert {*counts} == {3, 5, 8, 13}
    assert sum((n - 12_500) ** 2 / 12_500 for n in counts.values()) < 16.3


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_labels_tell_what_stood_there(seed, rate, blank, rest):
    ids = ids_of(3, 17, seed)
    ids[:, 0] = 98
    ids[1, 9:] = 0
    shown, labels = hide(
        ids,
        seed,
        mlm_probability=rate,
        mask_replace_prob=blank,
        random_replace_prob=rest * (1 - blank),
    )
    chosen = labels != -100
    assert torch.equal(torch.where(chosen, labels, ids), ids)
    assert torch.equal(shown[~chosen], ids[~chosen])
    assert not (chosen & torch.isin(ids, torch.tensor([0, 98, 99]))).any()
    assert not torch.isin(shown[chosen], torch.tensor([0, 98])).any()


def test_as_many_as_the_collator_of_transformers_chooses():
    class Peer(transformers.PreTrainedTokenizerFast):
        pass

    from tokenizers import Tokenizer as Theirs
    from tokenizers.models import WordLevel

    names = {f"w{i}": i for i in range(100)}
    for name, i in zip(BERT_SPECIAL_TOKENS, (0, 97, 98, 99), strict=True):
        names[name] = names.pop(f"w{i}")
    peer = Peer(
        tokenizer_object=Theirs(WordLevel(names, "[PAD]")),
        **{
            f"{kind}_token": f"[{kind.upper()}]"
            for kind in ("pad", "cls", "sep", "mask")
        },
    )
    ids = ids_of(400)
    torch.manual_seed(0)
    out = transformers.DataCollatorForLanguageModeling(peer)(
        [{"input_ids": row} for row in ids.tolist()]
    )
    counts = []
    for shown, labels in (hide(ids), (out["input_ids"], out["labels"])):
        chosen = labels != -100
        counts.append(
            [
                (~chosen).sum().item(),
                (chosen & (shown == 99)).sum().item(),
                (chosen & (shown != 99)).sum().item(),
            ]
        )
    mean = [(a + b) / 2 for a, b in zip(*counts, strict=False)]
    assert (
        sum((n - m) ** 2 / m for row in counts for n, m in zip(row, mean, strict=True))
        < 13.8
    )


def test_each_row_may_have_its_own_rate():
    rate = torch.tensor([[0.0], [0.2], [1.0]])
    _, labels = hide(ids_of(3, 5000), mlm_probability=rate)
    found = (labels != -100).float().mean(1)
    assert found[0] == 0 and found[2] == 1
    assert abs(found[1] - 0.2) < 5 * (0.16 / 5000) ** 0.5


def test_a_word_falls_as_a_whole():
    words = torch.arange(60)[None].div(4, rounding_mode="floor")
    words = words.expand(300, -1).clone()
    words[:, 0] = -1
    ids = ids_of(300, 60)
    ids[:, 0] = 98
    chosen = hide(ids, word_ids=words)[1] != -100
    assert not chosen[:, 0].any()
    for n in range(1, 15):
        part = chosen[:, n * 4 : n * 4 + 4]
        assert torch.equal(part.all(1), part.any(1))
    share = chosen[:, 4:].float().mean().item()
    assert abs(share - 0.15) < 5 * (0.15 * 0.85 / (300 * 14)) ** 0.5


def test_a_token_of_no_word_is_never_chosen():
    ids = ids_of(500, 6)
    words = torch.tensor([[0, 0, -1, -7, 5, 5]]).expand(500, -1)
    chosen = hide(ids, word_ids=words, mlm_probability=0.5)[1] != -100
    assert not chosen[:, 2:4].any()
    assert 150 < chosen[:, 0].sum() < 350 and 150 < chosen[:, 5].sum() < 350
    assert torch.equal(chosen[:, 4], chosen[:, 5])


def test_masks_are_new_in_each_pass_and_can_be_drawn_again():
    rows = encode_texts(TOKENIZER, TEXTS[:20])
    for dynamic in (True, False):
        loader = MaskedTextLoader(
            rows, TOKENIZER, batch_size=20, dynamic_masking=dynamic, seed=3
        )
        first = loader.get_batch(0)
        second = loader.get_batch(1)
        assert torch.equal(first.targets, second.targets) != dynamic
        again = MaskedTextLoader(
            rows, TOKENIZER, batch_size=20, dynamic_masking=dynamic, seed=3
        )
        assert torch.equal(again.get_batch(1).ids, second.ids)


def test_a_rate_of_none_is_masked_diffusion():
    rows = encode_texts(TOKENIZER, TEXTS[:64])
    loader = MaskedTextLoader(
        rows, TOKENIZER, mlm_probabilities=(0.15, None), batch_size=64
    )
    batch = loader.get_batch(1)
    chosen = batch.targets != -100
    assert (batch.ids[chosen] == AT.mask).all()
    shares = chosen.sum(1) / (batch.positions >= 0).sum(1)
    assert shares.min() < 0.15 and shares.max() > 0.85
    usual = loader.get_batch(2)
    assert (usual.targets != -100).float().mean() < 0.25


def test_a_masked_training_goes_on_where_it_was(model):
    rows = encode_texts(TOKENIZER, TEXTS[:40])
    masked = MaskedTextLoader(rows, TOKENIZER, batch_size=8)
    whole = [b for _, b in zip(range(9), masked, strict=False)]
    first, again = (MaskedTextLoader(rows, TOKENIZER, batch_size=8) for _ in range(2))
    taken = [b for _, b in zip(range(4), first, strict=False)]
    again.load_state_dict(first.state_dict())
    taken += [b for _, b in zip(range(5), again, strict=False)]
    for a, b in zip(whole, taken, strict=True):
        assert a.segment_ids is b.segment_ids is None
        assert all(torch.equal(x, y) for x, y in zip(a[:3], b[:3], strict=False))
    other = MaskedTextLoader(rows, TOKENIZER, batch_size=8, mlm_probabilities=(0.4,))
    with pytest.raises(ValueError, match="mlm_probabilities"):
        other.load_state_dict(first.state_dict())


def test_the_same_masks_also_with_several_rates():
    rows = encode_texts(TOKENIZER, TEXTS[:24])
    loader = MaskedTextLoader(
        rows,
        TOKENIZER,
        mlm_probabilities=(0.15, 0.9),
        batch_size=8,
        dynamic_masking=False,
        seed=1,
    )
    kept = {}
    for k in range(12):
        batch = loader.get_batch(k)
        old = kept.setdefault(loader.order[k], batch)
        assert torch.equal(old.targets, batch.targets)
    assert len(kept) == 3


def test_seeds_draw_other_masks_and_another_order():
    rows = encode_texts(TOKENIZER, TEXTS[:64])
    one, two = (
        MaskedTextLoader(rows, TOKENIZER, batch_size=64, seed=n) for n in (1, 2)
    )
    hidden = []
    for loader in (one, two):
        batch = loader.get_batch(0)
        chosen = batch.targets != -100
        ids = torch.where(chosen, batch.targets, batch.ids).tolist()
        hidden.append(dict(zip(map(tuple, ids), chosen.tolist(), strict=True)))
    same = {*hidden[0]} & {*hidden[1]}
    assert same and all(hidden[0][row] != hidden[1][row] for row in same)
    orders = [
        [loader.order[k] for k in range(30)]
        for loader in (
            TextLoader(rows, TOKENIZER, batch_size=2, seed=n) for n in (1, 2, 1)
        )
    ]
    assert orders[0] == orders[2] != orders[1]


def test_no_special_token_is_drawn_or_hidden():
    loader = MaskedTextLoader(encode_texts(TOKENIZER, TEXTS[:64]), TOKENIZER)
    assert not {*AT} & {*loader.mask_kwargs["replacement_ids"].tolist()}
    ids = torch.full((50, 40), 99)  # [MASK] stands there already
    assert (hide(ids, special_ids=(0,), mlm_probability=1.0)[1] == -100).all()


def test_no_batch_is_without_a_masked_token():
    rows = encode_texts(TOKENIZER, ["Tom was sad."])
    loader = MaskedTextLoader(rows, TOKENIZER, batch_size=1)
    places = Counter()
    for k in range(200):
        batch = loader.get_batch(k)
        assert batch.num_targets >= 1
        assert batch.targets[0, 0] == batch.targets[0, -1] == -100
        asked = batch.targets != -100
        assert torch.equal(
            torch.where(asked, batch.targets, batch.ids), torch.tensor(rows)
        )
        places.update(asked[0].nonzero()[:, 0].tolist())
    assert {*places} == {*range(1, len(rows[0]) - 1)}


@plain_only
@pytest.mark.parametrize(
    "bad",
    [
        {"mlm_probability": 15},
        {"word_ids": torch.zeros(2, 3).long()},
        {"word_ids": torch.full_like(ids_of(2), ids_of(2).shape[1])},
        {"word_ids": torch.zeros_like(ids_of(2)).float()},
        {"ids": ids_of(2).float()},
        {"replacement_ids": torch.rand(5)},
        {"replacement_ids": [1, 2, 3]},
        {"mlm_probability": torch.full((4, 1), 0.5)},
        {"mlm_probability": torch.full((2, 1), 1.5)},
        {"replacement_ids": torch.tensor([]).long()},
    ],
)
def test_nothing_is_drawn_for_what_is_refused(bad):
    draw = torch.Generator().manual_seed(0)
    before = draw.get_state()
    with pytest.raises(ValueError):
        mask_tokens(
            **{
                "ids": ids_of(2),
                "mask_token_id": 99,
                "special_ids": (),
                "replacement_ids": DRAWS,
                "generator": draw,
            }
            | bad,
        )
    assert torch.equal(draw.get_state(), before)


# --- the loss


def test_loss_and_gradients_are_those_of_transformers(model):
    c = model.config
    theirs = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=c.vocab_size,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=c.d_ff,
            max_position_embeddings=128,
        )
    ).eval()
    ours = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_(ours[from_hf_bert_name(name)])
    rows = encode_texts(TOKENIZER, TEXTS[:9], [t[:60] for t in TEXTS[9:18]])
    batch = MaskedTextLoader(
        [row[:128] for row in rows], TOKENIZER, batch_size=9
    ).get_batch(0)
    assert {*batch.segment_ids.flatten().tolist()} == {0, 1}
    want = theirs(
        batch.ids,
        attention_mask=(batch.positions >= 0).long(),
        token_type_ids=batch.segment_ids,
        labels=batch.targets,
    ).loss
    model.zero_grad()
    got = batch_cross_entropy(model, batch)
    assert abs(got - want) < 1e-5
    got.backward()
    want.backward()
    for name, p in theirs.named_parameters():
        mine = ours[from_hf_bert_name(name)].grad
        assert (mine - p.grad).abs().max() < 1e-5, name


def test_a_text_alone_gives_what_it_gives_in_a_batch(model):
    rows = encode_texts(TOKENIZER, TEXTS[:8])
    batch = collate_texts(rows, TOKENIZER)
    together = model(
        batch.ids, positions=batch.positions, segment_ids=batch.segment_ids
    )
    for n, row in enumerate(rows):
        one = collate_texts([row], TOKENIZER)
        alone = model(one.ids, positions=one.positions, segment_ids=one.segment_ids)[0]
        assert (alone - together[n, : len(row)]).abs().max() < 1e-4


def test_labels_of_texts_and_of_tokens():
    rows = encode_texts(TOKENIZER, TEXTS[:3])
    batch = collate_texts(rows, TOKENIZER, [2, 0, 1])
    logits = torch.randn(3, 4)
    assert batch.targets.shape == (3,) and batch.num_targets == 3

    class Fixed(torch.nn.Module):
        def forward(self, ids, **_):
            return logits

    got = batch_cross_entropy(Fixed(), batch)
    assert abs(got - F.cross_entropy(logits, batch.targets)) < 1e-6
    marks = [[-100, *[1] * (len(row) - 2), -100] for row in rows]
    batch = collate_texts(rows, TOKENIZER, marks)
    assert batch.num_targets == sum(map(len, rows)) - 6
    assert batch.to("cpu").targets.shape == batch.ids.shape


def test_the_loss_of_two_pairs_is_that_of_each(model):
    firsts = ["Tom was sad.", "Mia had a red ball."]
    seconds = ["He wanted to play with the toy.", "She smiled."]
    rows = encode_texts(TOKENIZER, firsts, seconds)
    marks = [[-100, *[7] * (len(row) - 2), -100] for row in rows]
    both = collate_texts(rows, TOKENIZER, marks)
    each = [
        collate_texts([row], TOKENIZER, [m]) for row, m in zip(rows, marks, strict=True)
    ]
    assert (both.segment_ids[both.positions < 0] == 0).all()
    want = sum(batch_cross_entropy(model, one) * one.num_targets for one in each)
    assert abs(batch_cross_entropy(model, both) - want / both.num_targets) < 1e-5


def test_a_model_without_segments_learns_and_writes(model):
    class Plain(torch.nn.Module):
        max_len = 128

        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, ids, *, positions=None):
            return self.inner(ids, positions=positions)

    batch = MaskedTextLoader(encode_texts(TOKENIZER, TEXTS[:4]), TOKENIZER).get_batch(0)
    assert torch.equal(
        batch_cross_entropy(Plain(), batch), batch_cross_entropy(model, batch)
    )
    ours, plain = (
        generate_by_unmasking(ModelBundle(m, TOKENIZER, {}), [6, 4], steps=3)
        for m in (model, Plain())
    )
    assert ours == plain


# --- texts


def test_two_texts_have_two_segments():
    (row,) = encode_texts(TOKENIZER, ["Tom was sad."], ["He smiled."])
    batch = collate_texts([row, [AT.cls, AT.sep]], TOKENIZER)
    cut = row.index(AT.sep) + 1
    assert batch.segment_ids[0].tolist() == [0] * cut + [1] * (len(row) - cut)
    assert row.count(AT.sep) == 2 and row[0] == AT.cls


def test_a_blank_takes_its_space_along():
    spaced, tight = encode_texts(TOKENIZER, ["Tom [MASK] sad.", "Tom[MASK] sad."])
    assert spaced == tight and spaced.count(AT.mask) == 1
    whole = encode_texts(TOKENIZER, ["Tom was sad."])[0]
    assert len(whole) == len(spaced)


@pytest.mark.parametrize("made", [list, torch.tensor, np.array])
def test_texts_come_by_length_and_all_of_them(made):
    rows = encode_texts(TOKENIZER, TEXTS[:50])
    loader = TextLoader(rows, TOKENIZER, made([n % 3 for n in range(50)]), batch_size=8)
    lengths = [[len(rows[i]) for i in group] for group in loader.groups]
    assert len({*map(len, rows)}) > 5
    for short, long in itertools.pairwise(lengths):
        assert max(short) <= min(long)
    seen = []
    for k in range(len(loader.groups)):
        batch = loader.get_batch(k)
        seen += [[i for i in row if i != AT.pad] for row in batch.ids.tolist()]
        for row, label in zip(
            seen[-len(batch.ids) :], batch.targets.tolist(), strict=False
        ):
            assert rows.index(row) % 3 == label
    assert sorted(seen) == sorted(rows)


# --- counting


@pytest.mark.parametrize("left, right", [(0, 0), (1, 0), (1, 1), (2, 1)])
def test_neighbors_count_as_brute_force_does(left, right):
    rng = random.Random(0)
    rows = [[90, *rng.choices(range(6), k=9), 91] for _ in range(60)]
    count = NeighborBaseline(rows, left, right)
    for row in rows[:20]:
        i = rng.randrange(1, 10)
        among = {*rng.sample(range(6), 4)}
        for n in range(max(left, right), -1, -1):
            a = min(left, n)
            b = min(right, n)
            found = Counter(
                other[j]
                for other in rows
                for j in range(1, 10)
                if other[max(0, j - a) : j] == row[max(0, i - a) : i]
                and other[j + 1 : j + 1 + b] == row[i + 1 : i + 1 + b]
                and other[j] in among
            )
            if found:
                break
        guess = count.predict(row, i, among)
        assert found[guess] == max(found.values())


def test_only_what_an_earlier_sentence_told():
    words = (
        "Tom had a ball . Then Tom saw Mia , and Mia had the ball . She smiled ."
    ).split()
    assert [(words[i], kind) for i, kind in recoverable_words(words)] == [
        ("Tom", "name"),
        ("ball", "thing"),
        ("She", "pronoun"),
    ]
    assert {"Tom", "Mia", "Mom"} <= STORY_WORDS["name"]


def test_what_ends_a_sentence_and_who_is_told():
    assert recoverable_words("She had a ball .".split()) == []
    assert recoverable_words(["Tom", "ran", '."', "Tom"]) == [(3, "name")]


# --- guesses


def test_guesses_are_the_best_of_all_words(trained):
    text = "Tom was a [MASK] boy. [MASK] had a ball."
    found = fill_mask(trained, text, top_k=3)
    (row,) = encode_texts(TOKENIZER, [text])
    ids = torch.tensor([row])
    p = trained.model(ids)[0]
    p[:, list(AT)] = -math.inf
    for guesses, i in zip(found, (ids[0] == AT.mask).nonzero()[:, 0], strict=True):
        order = p[i].argsort(descending=True)[:3].tolist()
        assert [g.word for g in guesses] == [
            TOKENIZER.decode([n]).strip() for n in order
        ]
        share = p[i].softmax(-1)[order].tolist()
        assert [g.probability for g in guesses] == pytest.approx(share, rel=1e-4)
    assert len(found) == 2


def test_words_outside_are_refused_or_let_in(trained):
    assert len(fill_mask(trained, "Tom was [MASK], [MASK].")) == 2
    assert len(fill_mask(trained, "[MASK]. [MASK]!")) == 2
    assert fill_mask(trained, "Tom saw a zebra [MASK].", strict_vocab=False)
    assert (
        len(fill_mask(trained, "Tom [MASK].", top_k=len(TOKENIZER) - 4)[0])
        == len(TOKENIZER) - 4
    )


class Recorder(torch.nn.Module):
    "A model that notes how it was called."

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.max_len = 128
        self.seen = []

    def forward(self, ids, **how):
        self.seen.append((self.training, torch.is_grad_enabled()))
        return self.inner(ids, **how)


def test_who_guesses_and_writes_does_not_train(model):
    from copy import deepcopy

    watched = Recorder(deepcopy(model)).train()
    watched.inner.bert.eval()
    trained = ModelBundle(watched, TOKENIZER, {})
    torch.manual_seed(5)
    before = torch.get_rng_state()
    fill_mask(trained, "Tom was [MASK].")
    generate_by_unmasking(trained, [4], steps=3)
    assert watched.seen == [(False, False)] * 4
    assert watched.training and not watched.inner.bert.training
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_in_half_the_bits_guesses_and_writes(model):
    from copy import deepcopy

    half = ModelBundle(deepcopy(model).to(torch.bfloat16), TOKENIZER, {})
    assert fill_mask(half, "Tom was [MASK].")[0][0].probability > 0
    assert len(generate_by_unmasking(half, [4], steps=2, temperature=1e-6)) == 1
    new = with_new_head(BertTagger, half.model, n_labels=3)
    assert {p.dtype for p in new.parameters()} == {torch.bfloat16}


# --- heads


def test_a_new_head_gets_a_copy(model):
    for kind in (BertTagger, BertClassifier):
        new = with_new_head(kind, model, n_labels=5)
        assert new.config.n_labels == 5
        for name, p in new.bert.named_parameters():
            old = dict(model.bert.named_parameters())[name]
            assert torch.equal(p, old) and p is not old


# --- tasks made of stories


def test_a_corrupted_story_has_the_same_words_and_a_fault():
    made = [(t, corrupt_story(t, seed=n)) for n, t in enumerate(TEXTS[:60])]
    pairs = [(a, b) for a, b in made if b]
    assert len(pairs) > 30
    for whole, broken in pairs:
        assert sorted(whole.split(" ")) != whole.split(" ")
        assert Counter(map(str.lower, _words(whole))) == Counter(
            map(str.lower, _words(broken))
        )
        assert not [p for v in grade_sentences(whole) for p in v.problems]
        assert [p for v in grade_sentences(broken) for p in v.problems]
        assert all(map(stories.parse_sentence, stories.split_sentences(broken)))
    kinds = [
        {
            kind
            for kind, words in STORY_WORDS.items()
            for a, b in zip(_words(whole), _words(broken), strict=True)
            if a != b and a in words
        }
        for whole, broken in pairs
    ]
    assert {"name"} in kinds and {"place"} in kinds


def _words(text):
    return "".join(c if c.isalnum() else " " for c in text).split()


def test_half_of_the_pairs_follow():
    first, second, labels = next_sentence_pairs(TEXTS, seed=1)
    follows = {
        (a, b)
        for t in TEXTS
        for a, b in zip(
            stories.split_sentences(t), stories.split_sentences(t)[1:], strict=False
        )
    }
    for a, b, label in zip(first, second, labels, strict=True):
        assert label == 1 or (a, b) in follows
    assert 0.4 < sum(labels) / len(labels) < 0.6
    lines = [stories.split_sentences(t) for t in TEXTS]
    others = [
        b in own for b, own, label in zip(second, lines, labels, strict=True) if label
    ]
    assert sum(others) < 0.1 * len(others)
    starts = [own.index(a) for a, own in zip(first, lines, strict=True)]
    assert len({*starts}) > 5
    first, second, labels = next_sentence_pairs(TEXTS, seed=1, swapped=True)
    for a, b, label in zip(first, second, labels, strict=True):
        assert ((b, a) if label else (a, b)) in follows


# --- writing


@pytest.mark.parametrize("order", ["confidence", "random", "left"])
@pytest.mark.parametrize("steps", [1, 3, 7, 20])
def test_each_pass_writes_its_share(model, order, steps):
    rows = [[AT.cls, *[AT.mask] * n, AT.sep] for n in (12, 7)]
    rows[0][3] = 40
    batch = collate_texts(rows, TOKENIZER)
    ids, when = unmask(
        model,
        batch,
        mask_token_id=AT.mask,
        forbidden_ids=AT,
        steps=steps,
        order=order,
        generator=torch.Generator().manual_seed(0),
    )
    given = batch.ids != AT.mask
    assert torch.equal(ids[given], batch.ids[given])
    assert not torch.isin(ids[~given], torch.tensor(AT)).any()
    assert torch.equal(when == 0, given)
    for row, many in zip(when, (11, 7), strict=True):
        for n in range(1, steps + 1):
            left = int((row > n).sum())
            assert left == many * (steps - n) // steps
        if order == "left":
            inside = row[row > 0]
            assert torch.equal(inside, inside.sort().values)


def test_the_surest_are_written_first(model):
    batch = collate_texts([[AT.cls, *[AT.mask] * 8, AT.sep]], TOKENIZER)
    ids, when = unmask(
        model,
        batch,
        mask_token_id=AT.mask,
        forbidden_ids=AT,
        steps=8,
        temperature=1e-6,
        generator=torch.Generator().manual_seed(0),
    )
    now = batch.ids.clone()
    for n in range(1, 9):
        logits = model(now)[0]
        logits[:, list(AT)] = -math.inf
        p = logits.double().softmax(-1)
        best, word = p.max(-1)
        place = int((when[0] == n).nonzero())
        blank = now[0] == AT.mask
        assert best[place] >= best[blank].max() - 1e-6
        assert ids[0, place] == word[place]
        now[0, place] = word[place]


def test_texts_have_the_lengths_asked_for():
    trained = load_bundle("bert")
    texts = generate_by_unmasking(trained, [5, 9], steps=3, seed=1)
    assert texts == generate_by_unmasking(trained, iter([5, 9]), steps=3, seed=1)
    assert texts != generate_by_unmasking(trained, [5, 9], steps=3, seed=2)
    assert [len(trained.tokenizer.encode(t)) for t in texts] == [5, 9]


def test_orders_and_steps_reach_the_model(model):
    watched = Recorder(model)
    trained = ModelBundle(watched, TOKENIZER, {})
    texts = {
        order: tuple(
            generate_by_unmasking(
                trained, [30], steps=15, order=order, temperature=1e-6
            )
        )
        for order in ("confidence", "random", "left")
    }
    assert len(watched.seen) == 45 and len({*texts.values()}) == 3


def test_random_is_not_the_surest_first(model):
    batch = collate_texts([[AT.cls, *[AT.mask] * 12, AT.sep]], TOKENIZER)
    when = [
        unmask(
            model,
            batch,
            mask_token_id=AT.mask,
            forbidden_ids=AT,
            steps=12,
            order=order,
            temperature=1e-6,
            generator=torch.Generator().manual_seed(0),
        ).step.tolist()
        for order in ("random", "confidence", "left")
    ]
    assert when[0] != when[1] != when[2] != when[0]


def test_a_pair_is_written_as_if_alone(model):
    seen = encode_texts(
        TOKENIZER,
        ["Tom was [MASK] [MASK].", "[MASK]."],
        ["He [MASK] a ball, and then [MASK] smiled.", "She [MASK]."],
    )
    how = dict(
        mask_token_id=AT.mask, forbidden_ids=AT, steps=5, order="left", temperature=1e-6
    )
    both = unmask(model, collate_texts(seen, TOKENIZER), **how).ids
    for row, got in zip(seen, both, strict=True):
        alone = unmask(model, collate_texts([row], TOKENIZER), **how).ids[0]
        assert torch.equal(got[: len(row)], alone)
        ids = torch.tensor([row])  # and as the plain loop
        cut = row.index(AT.sep) + 1
        segments = (torch.arange(len(row)) >= cut).long()[None]
        many = row.count(AT.mask)
        for n in range(1, 6):
            logits = model(ids, segment_ids=segments)[0]
            logits[:, list(AT)] = -math.inf
            blank = (ids[0] == AT.mask).nonzero()[:, 0]
            now = blank[: len(blank) - many * (5 - n) // 5]
            ids[0, now] = logits[now].argmax(-1)
        assert torch.equal(ids[0], alone)


# --- bad input


def rows_():
    return encode_texts(TOKENIZER, TEXTS[:2])


@plain_only
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda t: fill_mask(t, "Tom was sad."), r"there is no \[MASK\] in 'Tom was"),
        (
            lambda t: fill_mask(t, "Tom saw a zebra [MASK]."),
            "text 0: ' zebra' is outside the vocabulary",
        ),
        (lambda t: fill_mask(t, "zebra was [MASK]."), "'zebra' is outside .*capital"),
        (lambda t: fill_mask(t, None), "text 0 must be a str, got NoneType"),
        (lambda t: fill_mask(t, b"[MASK]"), "decode bytes first"),
        (lambda t: fill_mask(t, "[MASK]", top_k=10**6), "1000000 top_k, beyond"),
        (lambda t: fill_mask(t, "[MASK]", top_k=len(TOKENIZER)), "beyond the words"),
        (lambda t: fill_mask(t, "[MASK]", top_k=-1), "top_k must be a whole number"),
        (lambda t: fill_mask(t, "[MASK]", top_k=2.0), "top_k must be a whole number"),
        (
            lambda t: fill_mask(
                ModelBundle(with_new_head(BertClassifier, t.model), TOKENIZER, {}),
                "[MASK]",
            ),
            "a model that fills blanks",
        ),
        (
            lambda t: fill_mask(
                ModelBundle(with_new_head(BertTagger, t.model), TOKENIZER, {}), "[MASK]"
            ),
            "forbidden_ids must leave some of 2 ids",
        ),
        (lambda t: encode_texts(TOKENIZER, "Tom"), "texts must be a list, got 'Tom'"),
        (
            lambda t: encode_texts(TOKENIZER, ["Tom"], "Tom"),
            "text_pairs must be a list",
        ),
        (lambda t: encode_texts(TOKENIZER, 5), "texts must be a list, got 5"),
        (
            lambda t: fill_mask(t, "[MASK] " + "Tom was sad. " * 40),
            "beyond max_len 128",
        ),
        (lambda t: encode_texts(TOKENIZER, ["Tom", "  "]), "text 1 is empty"),
        (lambda t: encode_texts(TOKENIZER, [b"Tom"]), "text 0 must be a str"),
        (
            lambda t: encode_texts(TOKENIZER, ["Tom"], ["a", "b"]),
            "1 texts, but 2 second texts",
        ),
        (lambda t: encode_texts(TOKENIZER, ["Tom [SEP]"]), r"\[SEP\]"),
        (lambda t: collate_texts([], TOKENIZER), "there are no texts"),
        (lambda t: collate_texts(rows_(), TOKENIZER, [1]), "1 labels for 2 texts"),
        (
            lambda t: collate_texts(rows_(), TOKENIZER, [[1], [2]]),
            r"text 0 has \d+ tokens, but 1 labels",
        ),
        (lambda t: TextLoader(rows_(), TOKENIZER, [0, 1, 2]), "3 labels for 2"),
        (
            lambda t: TextLoader(rows_(), TOKENIZER, torch.zeros(2, 3).long()),
            r"text 0 has \d+ tokens, but 3 labels",
        ),
        (
            lambda t: collate_texts(rows_(), TOKENIZER, [1, [2]]),
            "a number a text, or a list",
        ),
        (lambda t: collate_texts(rows_(), TOKENIZER, [1, None]), "got None"),
        (lambda t: collate_texts(rows_(), TOKENIZER, [1, "O"]), "got 'O'"),
        (lambda t: collate_texts(rows_(), TOKENIZER, [1, 0.5]), "whole .*got 0.5"),
        (
            lambda t: MaskedTextLoader(rows_(), TOKENIZER, mlm_probabilities=()),
            "there is no rate",
        ),
        (
            lambda t: MaskedTextLoader(rows_(), TOKENIZER, mlm_probabilities=(1.5,)),
            r"mlm_probabilities\[0\] must be at least 0 and at most 1, got 1.5",
        ),
        (
            lambda t: MaskedTextLoader(
                rows_(), TOKENIZER, mlm_probabilities=[0.15, 15]
            ),
            "mlm_probabilities.1. must",
        ),
        (
            lambda t: MaskedTextLoader(rows_(), TOKENIZER, mlm_probabilities=0.15),
            "mlm_probabilities must be a list",
        ),
        (
            lambda t: SpecialTokenIds.from_tokenizer(Tokenizer(Vocabulary([]))),
            r"no special token \[PAD\]",
        ),
        (
            lambda t: hide(ids_of(2), mlm_probability=15),
            "mlm_probability must be .*at most 1",
        ),
        (
            lambda t: hide(ids_of(2), mask_replace_prob=0.8, random_replace_prob=0.5),
            "mask_and_random_replace_prob",
        ),
        (lambda t: hide(ids_of(2), word_ids=torch.zeros(2, 3).long()), "word_ids"),
        (
            lambda t: hide(ids_of(2), replacement_ids=torch.tensor([]).long()),
            "no token to draw",
        ),
        (lambda t: NeighborBaseline([[1, 2, 3]], left=-1), "left"),
        (
            lambda t: NeighborBaseline([[1, 2, 3]]).predict([1, 2, 3], 999, {3}),
            "no guess at place 999 of 3 tokens, out of 1 words",
        ),
        (
            lambda t: NeighborBaseline([[1, 2, 3]]).predict([1, 2, 3], 1, set()),
            "out of 0 words",
        ),
        (
            lambda t: hide(ids_of(2), mlm_probability=torch.tensor([[0.5], [1.5]])),
            "highest mlm_probability must be .*at most 1, got 1.5",
        ),
        (
            lambda t: hide(ids_of(2), mlm_probability=torch.full((4, 1), 0.5)),
            "mlm_probability must be of shape",
        ),
        (lambda t: with_new_head(BertTagger, t.model.bert), "encoder .bert of Bert"),
        (
            lambda t: with_new_head(BertTagger, t.model, d_model=64),
            "may set n_labels and dropout, got d_model",
        ),
        (lambda t: next_sentence_pairs([TEXTS[0], "One."]), "text .1. has fewer "),
        (lambda t: next_sentence_pairs(TEXTS[:1]), "1 texts are too few"),
        (lambda t: next_sentence_pairs([]), "0 texts are too few"),
        (lambda t: next_sentence_pairs([], swapped=True), "0 texts are too few"),
        (lambda t: next_sentence_pairs(TEXTS[0]), "texts must be a list"),
        (lambda t: generate_by_unmasking(t, [4], order="best"), "order must be one of"),
        (lambda t: generate_by_unmasking(t, [4], steps=0), "steps"),
        (lambda t: generate_by_unmasking(t, [4], temperature=0), "temperature"),
        (
            lambda t: generate_by_unmasking(t, [4], temperature=1e-40),
            "temperature must be at ",
        ),
        (lambda t: generate_by_unmasking(t, []), "there are no texts"),
        (lambda t: generate_by_unmasking(t, 5), "lengths must be a list, got 5"),
        (
            lambda t: generate_by_unmasking(t, [2.5]),
            r"lengths\[0\] must be a whole .*got 2.5",
        ),
        (
            lambda t: generate_by_unmasking(t, [3, "a"]),
            r"lengths\[1\] must be .*got 'a'",
        ),
        (lambda t: generate_by_unmasking(t, [-1]), r"lengths\[0\] must be .*got -1"),
        (
            lambda t: generate_by_unmasking(t, [4], seed=None),
            "seed must be a whole number",
        ),
        (
            lambda t: unmask(
                t.model,
                collate_texts(rows_(), TOKENIZER),
                mask_token_id=AT.mask,
                forbidden_ids=range(len(TOKENIZER)),
                steps=1,
            ),
            "forbidden_ids must",
        ),
        (
            lambda t: unmask(
                t.model,
                collate_texts(rows_(), TOKENIZER),
                mask_token_id=AT.mask,
                forbidden_ids=[9999],
                steps=1,
            ),
            "forbidden_ids must .*9999",
        ),
        (
            lambda t: generate_by_unmasking(t, [127]),
            "127 tokens, beyond max_len - 2 126",
        ),
    ],
)
def test_bad_input_is_refused_in_one_sentence(trained, call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call(trained)
    assert "\n" not in str(caught.value)


# --- the record


@pytest.mark.nightly
@plain_only
def test_the_experiment_runs_and_goes_on(tmp_path):
    out = tmp_path / "mlm.csv"
    code = (
        "import mlm; mlm.CASES = [dict(part='rate', variant='all "
        "rates', labels=0), dict(part='labels', variant='frozen', "
        "labels=4, steps=90), dict(part='writes', variant='left at 1', "
        "labels=0)]; mlm.WRITTEN = 5; mlm.main()"
    )
    words = [
        "-c",
        f"import sys; sys.path.insert(0, "
        f"{str(ROOT / 'experiments')!r}); sys.argv = ['mlm', '--steps',"
        f" '2', '--seeds', '1', '--out', {str(out)!r}]; {code}",
    ]
    run(sys.executable, *words)
    first = list(csv.DictReader(out.open()))
    assert [r["part"] for r in first] == ["rate", "labels", "writes"]
    assert all(0 <= float(r["right"]) <= 1 for r in first)
    assert float(first[0]["loss"]) and float(first[0]["at_blanks"])
    assert first[1]["best"] == "2" and 0 < float(first[2]["distinct"]) <= 1
    run(sys.executable, *words)
    assert list(csv.DictReader(out.open())) == first


def test_the_record_is_whole():
    rows = load_record("mlm")
    cases = Counter((r["part"], r["variant"], r["labels"]) for r in rows)
    assert {(part, n) for (part, *_), n in cases.items()} == {
        ("rate", 3),
        ("labels", 3),
        ("writes", 2),
    }
    assert {(r["variant"], r["steps"]) for r in rows if r["part"] == "labels"} == {
        ("tuned", "90"),
        ("frozen", "900"),
        ("untrained", "900"),
    }
    assert all(
        0 < int(r["best"]) <= int(r["steps"]) for r in rows if r["part"] == "labels"
    )
    assert all(r["loss"] and r["at_blanks"] for r in rows if r["part"] == "rate")
    assert {r["variant"] for r in rows if r["part"] == "labels"} == {
        "tuned",
        "frozen",
        "untrained",
    }
    assert len({r["labels"] for r in rows if r["part"] == "labels"}) == 5
