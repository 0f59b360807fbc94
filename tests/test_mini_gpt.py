"""The tour's model, taken apart from outside."""

import csv
import math
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from conftest import ROOT, load_experiment, run, run_small
from helpers import plain_only
from tformer.course.ablations import show_ablations, show_steps_to_loss
from tformer.models import mini_gpt
from tformer.models.mini_gpt import (
    MiniAttention,
    MiniBlock,
    MiniGPT,
    decode_bytes,
    encode_bytes,
    generate,
    load_record,
    mean_loss,
    next_token_loss,
    random_windows,
    train,
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return MiniGPT(50, d_model=16, n_layers=2, n_heads=2, max_len=12)


def reference_attention(layer, x):
    "The same by PyTorch's own module, weights copied."
    d = x.shape[-1]
    h = layer.n_heads
    theirs = nn.MultiheadAttention(d, h, batch_first=True)
    theirs.load_state_dict(
        {
            "in_proj_weight": layer.qkv_proj.weight,
            "in_proj_bias": layer.qkv_proj.bias,
            "out_proj.weight": layer.o_proj.weight,
            "out_proj.bias": layer.o_proj.bias,
        }
    )
    blocked = ~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return theirs(x, x, x, attn_mask=blocked if layer.causal else None)[0]


@pytest.mark.parametrize("causal", [True, False])
def test_attention_equals_pytorch(causal):
    torch.manual_seed(1)
    layer = MiniAttention(24, 3, causal)
    x = torch.randn(2, 7, 24, requires_grad=True)
    ours = layer(x)
    theirs = reference_attention(layer, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    g = torch.randn_like(ours)
    torch.testing.assert_close(
        torch.autograd.grad(ours, x, g, retain_graph=True)[0],
        torch.autograd.grad(theirs, x, g)[0],
        rtol=1e-4,
        atol=1e-5,
    )


def test_block_equals_a_pre_norm_encoder_layer():
    torch.manual_seed(2)
    ours = MiniBlock(16, 2, causal=False)
    theirs = nn.TransformerEncoderLayer(
        16, 2, 64, dropout=0, activation="gelu", batch_first=True, norm_first=True
    )
    names = {
        "self_attn.in_proj_": "attention.qkv_proj.",
        "self_attn.out_proj.": "attention.o_proj.",
        "linear1.": "mlp.0.",
        "linear2.": "mlp.2.",
        "norm1.": "attention_norm.",
        "norm2.": "mlp_norm.",
    }
    state = theirs.state_dict()
    mine = ours.state_dict()
    for key in state:
        for there, here in names.items():
            if key.startswith(there):
                state[key] = mine[here + key.removeprefix(there)]
    theirs.load_state_dict(state)
    x = torch.randn(3, 5, 16)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("at", range(12))
def test_no_output_moves_before_the_change(model, at):
    ids = torch.randint(50, (2, 12))
    other = ids.clone()
    other[:, at] = (other[:, at] + 1) % 50
    before = model(ids)
    after = model(other)
    assert torch.equal(before[:, :at], after[:, :at])
    assert (before[:, at:] != after[:, at:]).any(-1).all()


def test_without_the_mask_everything_moves():
    torch.manual_seed(0)
    model = MiniGPT(50, d_model=16, n_heads=2, max_len=12, causal=False)
    ids = torch.randint(50, (1, 12))
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % 50
    assert (model(ids) != model(other)).any(-1).all()


def test_the_loss_is_that_of_the_next_id(model):
    window = torch.randint(50, (3, 13))
    log_p = model(window[:, :-1]).log_softmax(-1)
    by_hand = (
        -sum(log_p[b, t, window[b, t + 1]] for b in range(3) for t in range(12)) / 36
    )
    torch.testing.assert_close(next_token_loss(model, window), by_hand)


def test_evaluate_weighs_every_window_alike(model):
    ids = torch.randint(50, (13 * 70 + 5,))  # not a whole number
    rows = ids[: 13 * 70].view(70, 13)
    with torch.no_grad():
        mean = sum(next_token_loss(model, r[None]) for r in rows) / 70
    assert math.isclose(mean_loss(model, ids), mean, rel_tol=1e-5)


def test_windows_are_pieces_of_the_text():
    ids = torch.arange(100)
    some = next(random_windows(ids, 9, batch_size=200, seed=3))
    assert some.shape == (200, 10)
    assert (some.diff(dim=1) == 1).all()
    assert some.min() == 0 and some.max() == 99  # both ends are reached
    again = next(random_windows(ids, 9, batch_size=200, seed=3))
    assert torch.equal(some, again)
    assert not torch.equal(some, next(random_windows(ids, 9, batch_size=200, seed=4)))
    whole = next(random_windows(ids[:10], 9, batch_size=2))
    assert torch.equal(whole, ids[:10].expand(2, 10))


def test_fit_learns_and_takes_any_loss():
    torch.manual_seed(0)
    model = MiniGPT(4, d_model=16, n_layers=1, n_heads=2, max_len=8)
    ids = torch.arange(400) % 4
    losses = train(model, random_windows(ids, 8), 60, lr=1e-2)
    assert len(losses) == 60 and losses[-1] < 0.1 < 1 < losses[0]
    line = nn.Linear(1, 1)
    data = [(torch.ones(1, 1), torch.full((1, 1), 3.0))] * 200
    train(line, data, 200, lambda m, b: F.mse_loss(m(b[0]), b[1]), lr=0.1)
    torch.testing.assert_close(line(torch.ones(1, 1)).item(), 3.0, atol=0.05, rtol=0)


def test_sample_writes_what_the_model_is_sure_of():
    model = MiniGPT(4, d_model=16, n_layers=1, n_heads=2, max_len=8)
    torch.manual_seed(0)
    train(model, random_windows(torch.arange(400) % 4, 8), 60, lr=1e-2)
    written = generate(model, torch.tensor([1]), 20, temperature=0.1)
    assert written.tolist() == [(1 + i) % 4 for i in range(21)]


def test_sample_draws_from_the_models_guess(model):
    start = torch.tensor([7])
    with torch.no_grad():  # far from even, so that 2 matters
        model.lm_head.bias[:3] += torch.tensor([5.0, 4.0, 3.0])
    guess = (model(start[None])[0, -1] / 2.0).softmax(-1)
    drawn = torch.cat([generate(model, start, 1, 2.0, seed=s)[1:] for s in range(2000)])
    share = torch.bincount(drawn, minlength=50) / 2000
    assert (share - guess).abs().max() < 0.03
    same = [generate(model, start, 5, seed=9) for _ in range(2)]
    assert torch.equal(*same)


def test_bytes_there_and_back():
    for text in ["", "Tom", "Zoë 🙂 你好", "\r\n\0"]:
        assert decode_bytes(encode_bytes(text)) == text
    assert decode_bytes(torch.tensor([195])) == "�"


@pytest.mark.parametrize(
    "call,named",
    [
        (lambda m: MiniAttention(10, 3), ["10", "3"]),
        (lambda m: m(torch.zeros(1, 13, dtype=torch.long)), ["13", "12"]),
        (lambda m: next(random_windows(torch.arange(9), 9)), ["9"]),
        (lambda m: mean_loss(m, torch.zeros(12, dtype=torch.long)), ["12", "13"]),
        (lambda m: generate(m, torch.zeros(0, dtype=torch.long), 1), ["0 ids"]),
        (
            lambda m: generate(m, torch.zeros(1, dtype=torch.long), 1, 0.0),
            ["temperature 0"],
        ),
        (
            lambda m: train(m, [torch.zeros(1, 13, dtype=torch.long)], 2),
            ["1 batches", "2 steps"],
        ),
        (lambda m: mini_gpt.load_record("nothing"), ["nothing"]),
    ],
)
def test_errors_name_what_was_given(model, call, named):
    with pytest.raises(ValueError) as error:
        call(model)
    assert all(n in str(error.value) for n in named)


@pytest.mark.nightly
@plain_only
def test_the_ends_are_recorded_by_their_script(tmp_path):
    new = run_small("ends", tmp_path)
    kept = load_record("ends")
    assert [r["model"] for r in new] == [r["model"] for r in kept]
    for short, long in zip(new, kept, strict=True):
        assert short.keys() == long.keys()
        for same in ("bytes_per_token", "context_bytes", "megabytes"):
            assert short[same] == long[same]
        assert float(short["nats_per_byte"]) > float(long["nats_per_byte"])


def test_a_record_that_is_not_there_is_refused_with_the_names_of_all():
    "Trained weights beside the records are no record."
    with pytest.raises(ValueError, match="sparse_training") as error:
        load_record("sparse_indexers")
    assert "sparse_indexers," not in str(error.value)
    assert "safetensors" not in str(error.value)


# the ladder


@pytest.fixture
def rungs():
    "The script as a module."
    return load_experiment("ladder")


@pytest.mark.nightly
@plain_only
def test_the_ladder_is_recorded_by_its_script(tmp_path, rungs, monkeypatch):
    words = [
        "ladder.py",
        "--steps",
        "2",
        "--seeds",
        "1",
        "--rounds",
        "1",
        "--folder",
        str(tmp_path),
    ]
    monkeypatch.setattr(
        rungs,
        "CLOCKED",
        {
            # no compiler in this test
            group: ({what: lambda: lambda: None for what in rivals}, calls)
            for group, (rivals, calls) in rungs.CLOCKED.items()
        },
    )
    monkeypatch.setattr(sys, "argv", words)
    rungs.main()
    new = {p.stem: p.read_bytes() for p in tmp_path.glob("*.csv")}
    assert {*new} == {"ladder", "ladder_line", "ladder_runs", "ladder_times"}
    for name in new:
        short = rungs.common.read(tmp_path / f"{name}.csv")
        long = load_record(name)
        assert short[0].keys() == long[0].keys()
        key = "part" if name == "ladder" else [*short[0]][1]
        if name != "ladder_runs":
            assert [r[key] for r in short] == [r[key] for r in long]
        else:
            assert {r["variant"] for r in long} == {*rungs.VARIANTS}
    monkeypatch.setattr(rungs, "train", None)  # all of it is there
    monkeypatch.setattr(rungs, "clock", None)
    rungs.main()
    assert {p.stem: p.read_bytes() for p in tmp_path.glob("*.csv")} == new


@pytest.mark.nightly
@plain_only
def test_each_clocked_thing_runs(rungs):
    for make in (rungs.layer_of, rungs.writes):
        make(True)()
    rungs.wide_step("bf16")()
    rungs.bytes_step()()
    for name in rungs.VARIANTS:
        rungs.Lesson(name).step()


def test_rungs_change_what_they_say(rungs, monkeypatch):
    "Clipping, the rates of two groups, and first weights like the tour's."
    limits = []
    monkeypatch.setattr(
        rungs.optimizers,
        "clip_grad_norm_",
        lambda params, limit: limits.append((len([*params]), limit)),
    )
    for name, clipped in (
        ("SGD", False),
        ("SGD clipped", True),
        ("Llama", False),
        ("AdamW clipped", True),
    ):
        limits.clear()
        lesson = rungs.Lesson(name)
        lesson.step()
        every = len([*lesson.model.parameters()])
        assert limits == [(every, 1.0)] * clipped, name
    one, two, muon = (rungs.Lesson(name) for name in ("cosine", "AdamW apart", "Muon"))
    assert [*map(type, two.optimizers)] == [rungs.optimizers.AdamW] * 2
    assert [*map(type, muon.optimizers)] == [
        rungs.optimizers.Muon,
        rungs.optimizers.AdamW,
    ]
    assert (one.rates, two.rates, muon.rates) == (
        [[6e-3, 6e-3]],
        [[6e-3], [1e-2]],
        [[0.02], [1e-2]],
    )
    for lesson in (two, muon):
        assert not any(
            group["weight_decay"]
            for optimizer in lesson.optimizers
            for group in optimizer.param_groups
        )
    plain, started = (rungs.Lesson(name).model for name in ("GPT", "GPT, tour's start"))
    assert started.lm_head.weight is started.embed.weight
    assert 0.09 < started.embed.weight.std() < 0.11
    assert plain.embed.weight.std() < 0.03
    up = started.blocks[0].feed_forward.sublayer.up_proj.weight
    assert 0.95 < up.abs().max() * rungs.D_MODEL**0.5 <= 1  # uniform, as PyTorch's


def test_the_ladder_follows_from_its_runs(rungs):
    e = rungs.Evidence(load_record("ladder_runs"), load_record("ladder_times"))
    for name, made in (("ladder", rungs.ladder), ("ladder_line", rungs.line)):
        kept = load_record(name)
        for row, long in zip(made(e, 3), kept, strict=True):
            for key in row.keys() - {"torch", "python", "machine", "date"}:
                assert str(row[key]) == long[key], (name, key)
    assert {r["seed"] for r in e.runs} == {"0", "1", "2"}
    tour = [
        float(r["nats_per_byte"])
        for r in load_record("parts")
        if r["variant"] == "all parts"
    ]
    assert round(sum(tour) / 3, 3) == rungs.RESULT


def test_where_a_curve_crosses(rungs):
    assert rungs.crossing("10:0.5 20:0.3 30:0.2", 0.25) == pytest.approx(25)
    assert rungs.crossing("10:0.5 20:0.3", 0.25) == 20  # never: its end
    assert rungs.verdict([5, 6], [3, 4]) == "gained"
    assert rungs.verdict([3, 4], [5, 6]) == "lost"
    assert rungs.verdict([3, 5], [4, 6]) == "nothing shown"


def test_the_ladder_is_drawn():
    assert "tokens, steps" in show_ablations(2).svg
    assert "Muon" in show_ablations().svg
    first = show_steps_to_loss(0).svg
    last = show_steps_to_loss(99).svg
    assert "to come" in first and "to come" not in last
    with pytest.raises(ValueError, match="no row of chapter 3"):
        show_ablations(3)


# the worth of the parts


@pytest.fixture
def parts():
    "The script as a module."
    return load_experiment("parts")


@pytest.mark.nightly
@plain_only
def test_the_parts_are_recorded_by_their_script(tmp_path, parts, monkeypatch):
    out = tmp_path / "parts.csv"
    words = ["parts.py", "--steps", "2", "--seeds", "1", "--out", str(out)]
    run(sys.executable, ROOT / "experiments" / words[0], *words[1:])
    with out.open(encoding="utf-8", newline="") as lines:
        new = list(csv.DictReader(lines))
    kept = [r for r in load_record("parts") if r["seed"] == "0"]
    assert [r["variant"] for r in new] == [r["variant"] for r in kept]
    for short, long in zip(new, kept, strict=True):
        assert short.keys() == long.keys()
        for same in ("parameters", "lr"):
            assert short[same] == long[same]
        assert float(short["nats_per_byte"]) > float(long["nats_per_byte"])
        assert len(short["curve"].split()) == 3  # before, between, after
    before = out.read_bytes()  # once more: all of it is there
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(parts.stories, "story_corpus", lambda *a, **k: "a")
    monkeypatch.setattr(parts, "train_one", None)
    parts.main()
    assert out.read_bytes() == before
    rows = parts.kept_rows(out, 2, again=False)
    parts.write(rows[::-1][1:], out)  # a run that was stopped
    monkeypatch.setattr(
        parts,
        "train_one",
        lambda name, seed, *rest: {**rows[0], "variant": name, "seed": str(seed)},
    )
    parts.main()
    assert len(parts.kept_rows(out, 2, again=False)) == len(rows)
    assert not parts.kept_rows(out, 3, again=False)
    assert not parts.kept_rows(out, 2, again=True)


def test_the_record_of_the_parts_is_whole(parts):
    rows = load_record("parts")
    assert [(r["variant"], r["seed"]) for r in rows] == [
        (name, str(seed)) for name in parts.VARIANTS for seed in range(3)
    ]
    assert {r["steps"] for r in rows} == {str(parts.STEPS)}
    losses = {
        name: [float(r["nats_per_byte"]) for r in rows if r["variant"] == name]
        for name in parts.VARIANTS
    }
    for r in rows:
        curve = [float(x) for x in r["curve"].split()]
        assert len(curve) == parts.LOOKS + 1 and curve[0] > 5
        assert abs(curve[-1] - float(r["nats_per_byte"])) < 0.05
    whole = losses.pop("all parts")  # what the chapter says
    assert all(max(whole) < min(others) for others in losses.values())
    recorded = float(load_record("ends")[0]["nats_per_byte"])
    assert abs(sum(whole) / 3 - recorded) < 0.01


def test_each_variant_lacks_its_part_and_no_other(parts):
    size = dict(vocab_size=50, d_model=16, n_heads=2, max_len=12)
    made = {name: make(**size) for name, (make, _) in parts.VARIANTS.items()}
    layers = (MiniAttention, nn.GELU, nn.LayerNorm)
    found = {
        name: [sum(isinstance(m, kind) for m in model.modules()) for kind in layers]
        for name, model in made.items()
    }
    assert found == {
        "all parts": [2, 2, 5],
        "no residual": [2, 2, 5],
        "no norms": [2, 2, 0],
        "no feed-forward": [2, 0, 3],
        "no attention": [0, 2, 3],
    }
    x = torch.randn(1, 5, 16)
    for name, model in made.items():  # silent parts: what is left?
        for p in model.blocks.parameters():
            nn.init.zeros_(p)
        left = model.blocks(x)
        assert torch.equal(left, 0 * x if name == "no residual" else x)
    ids = torch.randint(50, (1, 12))
    other = ids.clone()
    other[0, 3] = (other[0, 3] + 1) % 50
    for name, (make, _) in parts.VARIANTS.items():
        model = make(**size)
        moved = (model(ids) != model(other)).any(-1)[0].tolist()
        after = name != "no attention"  # who looks, hears of it
        assert moved == [False] * 3 + [True] + [after] * 8


# counting with back-off, against the model


@pytest.fixture
def counting():
    "The script as a module."
    return load_experiment("counting")


def test_a_table_falls_back_as_witten_and_bell_do(counting, monkeypatch):
    # after a: b twice and c once; after ba: c once
    monkeypatch.setattr(
        counting,
        "tables",
        lambda: [counting.count("ababac", known) for known in range(3)],
    )
    share = {
        letter: n / 9 + 3 / 9 / 256 for letter, n in zip("abc", (3, 2, 1), strict=True)
    }
    after_a = {
        letter: (n + 2 * share[letter]) / 5
        for letter, n in (("a", 0), ("b", 2), ("c", 1))
    }
    for letter, p in after_a.items():
        assert math.isclose(counting.guess("a", letter, 1), p)
        assert math.isclose(counting.guess("xa", letter, 2), p)  # never read
        assert math.isclose(counting.guesses("a", 2)[letter], p)
    assert math.isclose(counting.guess("ba", "b", 2), (1 + 2 * after_a["b"]) / 4)
    assert math.isclose(counting.guess("", "z", 2), 3 / 9 / 256)


@pytest.mark.nightly
@plain_only
def test_counting_is_recorded_by_its_script(tmp_path, counting, monkeypatch):
    out = tmp_path / "counting.csv"
    words = ["counting.py", "--letters", "150", "--seeds", "1", "--out", str(out)]
    run(sys.executable, ROOT / "experiments" / words[0], *words[1:])
    with out.open(encoding="utf-8", newline="") as lines:
        new = list(csv.DictReader(lines))
    kept = [r for r in load_record("counting") if r["seed"] == "0"]
    assert [r["guesser"] for r in new] == [r["guesser"] for r in kept]
    for short, long in zip(new, kept, strict=True):
        assert short.keys() == long.keys()
        for same in ("nats_per_byte", "second_half"):
            assert abs(float(short[same]) - float(long[same])) < 0.001
    before = out.read_bytes()  # once more: all of it is there
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(counting, "measure", None)
    counting.main()
    assert out.read_bytes() == before


def test_the_record_of_counting_is_whole(counting):
    rows = load_record("counting")
    guessers = [*map(str, counting.ORDERS), "model"]
    assert [(r["guesser"], r["seed"]) for r in rows] == [
        (name, str(seed)) for name in guessers for seed in range(5)
    ]
    assert {r["letters"] for r in rows} == {str(counting.LETTERS)}
    # what the chapter says
    grades = {
        name: [float(r["grade"]) for r in rows if r["guesser"] == name]
        for name in guessers
    }
    assert min(grades["model"]) > max(grades["20"]) > max(grades["12"])
