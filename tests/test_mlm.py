"""Blanks, guesses, labels and writing of a masked language model."""
import csv
import math
import random
import sys
from collections import Counter

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from conftest import ROOT, run
from helpers import plain_only, spread
from tformer import stories
from tformer.bert import (
    BertClassifier, BertConfig, BertMaskedLM, BertTagger, bert_name)
from tformer.minimal import read_record
from tformer.mlm import (
    SPECIAL, WORDS, Blanks, Marks, Neighbors, Texts, broken_story,
    encode_rows, encoded, fill, label_loss, mask_tokens, on_top,
    sentence_pairs, told_before, unmask, write)
from tformer.tokenizer import Tokenizer, Vocabulary
from tformer.trained import Trained, judge

TEXTS = [text.strip() for text in stories.generate(300, 0)]
TOKENIZER = Tokenizer.train(stories.generate(2000, 0), 635,
                            special_tokens=SPECIAL)
AT = Marks.of(TOKENIZER)
DRAWS = torch.arange(1, 90)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return spread(BertMaskedLM(BertConfig(
        vocab_size=len(TOKENIZER), d_model=32, n_layers=2, n_heads=4,
        max_len=128, dropout=0.0)))


@pytest.fixture(scope="module")
def trained(model):
    return Trained(model, TOKENIZER, {})


def ids_of(b=200, t=50, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, 90, (b, t), generator=draw)


def hide(ids, seed=0, **how):
    return mask_tokens(ids, **{"mask": 99, "special": (0, 98, 99),
                               "draws": DRAWS} | how,
                       generator=torch.Generator().manual_seed(seed))


# --- blanks

def test_the_shares_pass_a_chi_square_test():
    ids = ids_of(400)
    shown, labels = hide(ids)
    chosen, blank, same = labels != -100, shown == 99, shown == ids
    counts = [(~chosen).sum(), (chosen & blank).sum(),
              (chosen & ~blank & ~same).sum(), (chosen & same).sum()]
    hit = 1 / len(DRAWS)
    want = [0.85, 0.12, 0.015 * (1 - hit), 0.015 * (1 + hit)]
    total = ids.numel()
    assert sum((n.item() - p * total) ** 2 / (p * total)
               for n, p in zip(counts, want)) < 16.3


def test_what_is_drawn_is_even_and_from_the_given_words():
    ids = torch.full((500, 100), 95)
    shown, _ = hide(ids, rate=1.0, blank=0.0, swap=1.0,
                    draws=torch.tensor([3, 5, 8, 13]))
    counts = Counter(shown.flatten().tolist())
    assert {*counts} == {3, 5, 8, 13}
    assert sum((n - 12_500) ** 2 / 12_500 for n in counts.values()) < 16.3


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(0, 1), st.floats(0, 1),
       st.floats(0, 1))
def test_labels_tell_what_stood_there(seed, rate, blank, rest):
    ids = ids_of(3, 17, seed)
    ids[:, 0], ids[1, 9:] = 98, 0
    shown, labels = hide(ids, seed, rate=rate, blank=blank,
                         swap=rest * (1 - blank))
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
    for name, i in zip(SPECIAL, (0, 97, 98, 99)):
        names[name] = names.pop(f"w{i}")
    peer = Peer(tokenizer_object=Theirs(WordLevel(names, "[PAD]")),
                **{f"{kind}_token": f"[{kind.upper()}]"
                   for kind in ("pad", "cls", "sep", "mask")})
    ids = ids_of(400)
    torch.manual_seed(0)
    out = transformers.DataCollatorForLanguageModeling(peer)(
        [{"input_ids": row} for row in ids.tolist()])
    counts = []
    for shown, labels in (hide(ids), (out["input_ids"], out["labels"])):
        chosen = labels != -100
        counts.append([(~chosen).sum().item(),
                       (chosen & (shown == 99)).sum().item(),
                       (chosen & (shown != 99)).sum().item()])
    mean = [(a + b) / 2 for a, b in zip(*counts)]
    assert sum((n - m) ** 2 / m for row in counts
               for n, m in zip(row, mean)) < 13.8


def test_each_row_may_have_its_own_rate():
    rate = torch.tensor([[0.0], [0.2], [1.0]])
    _, labels = hide(ids_of(3, 5000), rate=rate)
    found = (labels != -100).float().mean(1)
    assert found[0] == 0 and found[2] == 1
    assert abs(found[1] - 0.2) < 5 * (0.16 / 5000) ** 0.5


def test_a_word_falls_as_a_whole():
    words = torch.arange(60)[None].div(4, rounding_mode="floor")
    words = words.expand(300, -1).clone()
    words[:, 0] = -1
    ids = ids_of(300, 60)
    ids[:, 0] = 98
    chosen = hide(ids, words=words)[1] != -100
    assert not chosen[:, 0].any()
    for n in range(1, 15):
        part = chosen[:, n * 4:n * 4 + 4]
        assert torch.equal(part.all(1), part.any(1))
    share = chosen[:, 4:].float().mean().item()
    assert abs(share - 0.15) < 5 * (0.15 * 0.85 / (300 * 14)) ** 0.5


def test_blanks_are_drawn_anew_and_can_be_drawn_again():
    rows = encode_rows(TOKENIZER, TEXTS[:20])
    for dynamic in (True, False):
        loader = Blanks(rows, TOKENIZER, batch=20, dynamic=dynamic, seed=3)
        first, second = loader.batch_at(0), loader.batch_at(1)
        assert torch.equal(first.labels, second.labels) != dynamic
        again = Blanks(rows, TOKENIZER, batch=20, dynamic=dynamic, seed=3)
        assert torch.equal(again.batch_at(1).ids, second.ids)


def test_a_rate_of_none_is_masked_diffusion():
    rows = encode_rows(TOKENIZER, TEXTS[:64])
    loader = Blanks(rows, TOKENIZER, rates=(0.15, None), batch=64)
    batch = loader.batch_at(1)
    chosen = batch.labels != -100
    assert (batch.ids[chosen] == AT.mask).all()
    shares = chosen.sum(1) / (batch.pos >= 0).sum(1)
    assert shares.min() < 0.15 and shares.max() > 0.85
    usual = loader.batch_at(2)
    assert (usual.labels != -100).float().mean() < 0.25


def test_a_training_on_blanks_goes_on_where_it_was(model):
    rows = encode_rows(TOKENIZER, TEXTS[:40])
    whole = [b for _, b in zip(range(9), Blanks(rows, TOKENIZER, batch=8))]
    first, again = (Blanks(rows, TOKENIZER, batch=8) for _ in range(2))
    taken = [b for _, b in zip(range(4), first)]
    again.load_state_dict(first.state_dict())
    taken += [b for _, b in zip(range(5), again)]
    for a, b in zip(whole, taken, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b))
    other = Blanks(rows, TOKENIZER, batch=8, rates=(0.4,))
    with pytest.raises(ValueError, match="rates"):
        other.load_state_dict(first.state_dict())


# --- the loss

def test_loss_and_gradients_are_those_of_transformers(model):
    c = model.config
    theirs = transformers.BertForMaskedLM(transformers.BertConfig(
        vocab_size=c.vocab_size, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=c.d_ff,
        max_position_embeddings=128)).eval()
    ours = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_(ours[bert_name(name)])
    batch = Blanks(encode_rows(TOKENIZER, TEXTS[:9]), TOKENIZER,
                   batch=9).batch_at(0)
    want = theirs(batch.ids, attention_mask=(batch.pos >= 0).long(),
                  token_type_ids=batch.segments, labels=batch.labels).loss
    model.zero_grad()
    got = label_loss(model, batch)
    assert abs(got - want) < 1e-5
    got.backward()
    want.backward()
    for name, p in theirs.named_parameters():
        mine = ours[bert_name(name)].grad
        assert (mine - p.grad).abs().max() < 1e-5, name


def test_a_text_alone_gives_what_it_gives_in_a_batch(model):
    rows = encode_rows(TOKENIZER, TEXTS[:8])
    batch = encoded(rows, TOKENIZER)
    together = model(batch.ids, pos=batch.pos, segments=batch.segments)
    for n, row in enumerate(rows):
        one = encoded([row], TOKENIZER)
        alone = model(one.ids, pos=one.pos, segments=one.segments)[0]
        assert (alone - together[n, :len(row)]).abs().max() < 1e-4


def test_labels_of_texts_and_of_tokens():
    rows = encode_rows(TOKENIZER, TEXTS[:3])
    batch = encoded(rows, TOKENIZER, [2, 0, 1])
    logits = torch.randn(3, 4)
    assert batch.labels.shape == (3,) and batch.count == 3

    class Fixed(torch.nn.Module):
        def forward(self, ids, **_):
            return logits

    got = label_loss(Fixed(), batch)
    assert abs(got - F.cross_entropy(logits, batch.labels)) < 1e-6
    marks = [[-100, *[1] * (len(row) - 2), -100] for row in rows]
    batch = encoded(rows, TOKENIZER, marks)
    assert batch.count == sum(map(len, rows)) - 6
    assert batch.to("cpu").labels.shape == batch.ids.shape


# --- texts

def test_two_texts_have_two_segments():
    (row,) = encode_rows(TOKENIZER, ["Tom was sad."], ["He smiled."])
    batch = encoded([row, [AT.cls, AT.sep]], TOKENIZER)
    cut = row.index(AT.sep) + 1
    assert batch.segments[0].tolist() == [0] * cut + [1] * (len(row) - cut)
    assert row.count(AT.sep) == 2 and row[0] == AT.cls


def test_a_blank_takes_its_space_along():
    spaced, tight = encode_rows(TOKENIZER, ["Tom [MASK] sad.",
                                            "Tom[MASK] sad."])
    assert spaced == tight and spaced.count(AT.mask) == 1
    whole = encode_rows(TOKENIZER, ["Tom was sad."])[0]
    assert len(whole) == len(spaced)


def test_texts_come_by_length_and_all_of_them():
    rows = encode_rows(TOKENIZER, TEXTS[:50])
    loader = Texts(rows, TOKENIZER, [n % 3 for n in range(50)], batch=8)
    seen = []
    for k in range(len(loader.groups)):
        batch = loader.batch_at(k)
        seen += [[i for i in row if i != AT.pad] for row in
                 batch.ids.tolist()]
        for row, label in zip(seen[-len(batch.ids):],
                              batch.labels.tolist()):
            assert rows.index(row) % 3 == label
    assert sorted(seen) == sorted(rows)


# --- counting

@pytest.mark.parametrize("left, right", [(0, 0), (1, 0), (1, 1), (2, 1)])
def test_neighbors_count_as_brute_force_does(left, right):
    dice = random.Random(0)
    rows = [[90, *dice.choices(range(6), k=9), 91] for _ in range(60)]
    count = Neighbors(rows, left, right)
    for row in rows[:20]:
        i, among = dice.randrange(1, 10), {*dice.sample(range(6), 4)}
        for n in range(max(left, right), -1, -1):
            a, b = min(left, n), min(right, n)
            found = Counter(
                other[j] for other in rows for j in range(1, 10)
                if other[max(0, j - a):j] == row[max(0, i - a):i]
                and other[j + 1:j + 1 + b] == row[i + 1:i + 1 + b]
                and other[j] in among)
            if found:
                break
        guess = count.guess(row, i, among)
        assert found[guess] == max(found.values())


def test_only_what_an_earlier_sentence_told():
    words = ("Tom had a ball . Then Tom saw Mia , and Mia had the ball . "
             "She smiled .").split()
    assert [(words[i], kind) for i, kind in told_before(words)] == [
        ("Tom", "name"), ("ball", "thing"), ("She", "pronoun")]
    assert {"Tom", "Mia", "Mom"} <= WORDS["name"]


# --- guesses

def test_guesses_are_the_best_of_all_words(trained):
    text = "Tom was a [MASK] boy. [MASK] had a ball."
    found = fill(trained, text, top=3)
    (row,) = encode_rows(TOKENIZER, [text])
    ids = torch.tensor([row])
    p = trained.model(ids)[0]
    p[:, list(AT)] = -math.inf
    for guesses, i in zip(found, (ids[0] == AT.mask).nonzero()[:, 0]):
        order = p[i].argsort(descending=True)[:3].tolist()
        assert [g.word for g in guesses] == [
            TOKENIZER.decode([n]).strip() for n in order]
        share = p[i].softmax(-1)[order].tolist()
        assert [g.p for g in guesses] == pytest.approx(share, rel=1e-4)
    assert len(found) == 2


# --- heads

def test_a_new_head_gets_a_copy(model):
    for kind in (BertTagger, BertClassifier):
        new = on_top(kind, model, n_labels=5)
        assert new.config.n_labels == 5
        for name, p in new.bert.named_parameters():
            old = dict(model.bert.named_parameters())[name]
            assert torch.equal(p, old) and p is not old


# --- tasks made of stories

def test_a_broken_story_has_the_same_words_and_a_fault():
    made = [(t, broken_story(t, seed=n)) for n, t in
            enumerate(TEXTS[:60])]
    pairs = [(a, b) for a, b in made if b]
    assert len(pairs) > 30
    for whole, broken in pairs:
        assert sorted(whole.split(" ")) != whole.split(" ")
        assert Counter(map(str.lower, _words(whole))) == Counter(
            map(str.lower, _words(broken)))
        assert not [p for v in judge(whole) for p in v.problems]
        assert [p for v in judge(broken) for p in v.problems]


def _words(text):
    return "".join(c if c.isalnum() else " " for c in text).split()


def test_half_of_the_pairs_follow():
    first, second, labels = sentence_pairs(TEXTS, seed=1)
    follows = {(a, b) for t in TEXTS
               for a, b in zip(stories.sentences(t),
                               stories.sentences(t)[1:])}
    for a, b, label in zip(first, second, labels):
        assert label == 1 or (a, b) in follows
    assert 0.4 < sum(labels) / len(labels) < 0.6
    first, second, labels = sentence_pairs(TEXTS, seed=1, hard=True)
    for a, b, label in zip(first, second, labels):
        assert ((b, a) if label else (a, b)) in follows


# --- writing

@pytest.mark.parametrize("order", ["confident", "random", "left"])
@pytest.mark.parametrize("steps", [1, 3, 7, 20])
def test_each_pass_writes_its_share(model, order, steps):
    rows = [[AT.cls, *[AT.mask] * n, AT.sep] for n in (12, 7)]
    rows[0][3] = 40
    batch = encoded(rows, TOKENIZER)
    ids, when = unmask(model, batch, mask=AT.mask, never=AT, steps=steps,
                       order=order,
                       generator=torch.Generator().manual_seed(0))
    given = batch.ids != AT.mask
    assert torch.equal(ids[given], batch.ids[given])
    assert not torch.isin(ids[~given], torch.tensor(AT)).any()
    assert torch.equal(when == 0, given)
    for row, many in zip(when, (11, 7)):
        for n in range(1, steps + 1):
            left = int((row > n).sum())
            assert left == many * (steps - n) // steps
        if order == "left":
            inside = row[row > 0]
            assert torch.equal(inside, inside.sort().values)


def test_the_surest_are_written_first(model):
    batch = encoded([[AT.cls, *[AT.mask] * 8, AT.sep]], TOKENIZER)
    ids, when = unmask(model, batch, mask=AT.mask, never=AT, steps=8,
                       temperature=1e-6,
                       generator=torch.Generator().manual_seed(0))
    now = batch.ids.clone()
    for n in range(1, 9):
        logits = model(now)[0]
        logits[:, list(AT)] = -math.inf
        p = (logits.double() / 1e-6).softmax(-1)
        best, word = p.max(-1)
        place = int((when[0] == n).nonzero())
        blank = now[0] == AT.mask
        assert best[place] >= best[blank].max() - 1e-6
        assert ids[0, place] == word[place]
        now[0, place] = word[place]


def test_texts_have_the_lengths_asked_for(trained):
    texts = write(trained, [5, 9], steps=3, seed=1)
    assert len(texts) == 2 and texts == write(trained, [5, 9], steps=3,
                                              seed=1)
    assert texts != write(trained, [5, 9], steps=3, seed=2)
    for order in ("random", "left"):
        assert len(write(trained, [4], steps=9, order=order)) == 1


# --- bad input

def rows_():
    return encode_rows(TOKENIZER, TEXTS[:2])


@plain_only
@pytest.mark.parametrize("call, message", [
    (lambda t: fill(t, "Tom was sad."), r"there is no \[MASK\] in 'Tom was"),
    (lambda t: fill(t, "Tom saw a zebra [MASK]."),
     "text 0: 'zebra' is outside the vocabulary"),
    (lambda t: fill(t, "[MASK] " + "Tom was sad. " * 40),
     "beyond max_len 128"),
    (lambda t: encode_rows(TOKENIZER, ["Tom", "  "]), "text 1 is empty"),
    (lambda t: encode_rows(TOKENIZER, [b"Tom"]), "text 0 must be a str"),
    (lambda t: encode_rows(TOKENIZER, ["Tom"], ["a", "b"]),
     "1 texts, but 2 second texts"),
    (lambda t: encode_rows(TOKENIZER, ["Tom [SEP]"]), r"\[SEP\]"),
    (lambda t: encoded([], TOKENIZER), "there are no texts"),
    (lambda t: encoded(rows_(), TOKENIZER, [1]), "1 labels for 2 texts"),
    (lambda t: encoded(rows_(), TOKENIZER, [[1], [2]]),
     r"text 0 has \d+ tokens, but 1 labels"),
    (lambda t: Texts(rows_(), TOKENIZER, [0, 1, 2]), "3 labels for 2"),
    (lambda t: Marks.of(Tokenizer(Vocabulary([]))),
     r"no special token \[PAD\]"),
    (lambda t: hide(ids_of(2), rate=15), "rate must be .*at most 1"),
    (lambda t: hide(ids_of(2), blank=0.8, swap=0.5), "blank_and_swap"),
    (lambda t: hide(ids_of(2), words=torch.zeros(2, 3).long()), "words"),
    (lambda t: hide(ids_of(2), draws=torch.tensor([]).long()),
     "no token to draw"),
    (lambda t: Neighbors([[1, 2, 3]], left=-1), "left"),
    (lambda t: write(t, [4], order="best"), "order must be one of"),
    (lambda t: write(t, [4], steps=0), "steps"),
    (lambda t: write(t, [4], temperature=0), "temperature"),
    (lambda t: write(t, []), "there are no texts"),
    (lambda t: write(t, [127]), "127 tokens, beyond max_len - 2 126"),
])
def test_bad_input_is_refused_in_one_sentence(trained, call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call(trained)
    assert "\n" not in str(caught.value)


# --- the record

@plain_only
def test_the_experiment_runs_and_goes_on(tmp_path):
    out = tmp_path / "mlm.csv"
    code = ("import mlm; mlm.CASES = [dict(part='rate', variant='all "
            "rates', labels=0), dict(part='labels', variant='frozen', "
            "labels=4)]; mlm.main()")
    words = ["-c", f"import sys; sys.path.insert(0, "
             f"{str(ROOT / 'experiments')!r}); sys.argv = ['mlm', '--steps',"
             f" '2', '--seeds', '1', '--out', {str(out)!r}]; {code}"]
    run(sys.executable, *words)
    first = list(csv.DictReader(out.open()))
    assert [r["part"] for r in first] == ["rate", "labels"]
    assert 0 <= float(first[1]["right"]) <= 1 and float(first[0]["loss"])
    run(sys.executable, *words)
    assert list(csv.DictReader(out.open())) == first


def test_the_record_is_whole():
    rows = read_record("mlm")
    cases = Counter((r["part"], r["variant"], r["labels"]) for r in rows)
    assert set(cases.values()) == {3}
    assert {r["variant"] for r in rows if r["part"] == "labels"} == {
        "tuned", "frozen", "untrained"}
    assert len({r["labels"] for r in rows if r["part"] == "labels"}) == 5
