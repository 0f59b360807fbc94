"""Training: accumulation, updates, watching, resuming after any kill."""

import builtins
import csv
import functools
import io
import math
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from conftest import ROOT, run, run_small
from helpers import by_day, child, die_after, plain_only
from tformer.base import runtime
from tformer.base.runtime import compile_model
from tformer.models import mini_gpt
from tformer.models.base import WEIGHTS_NAME, read_safetensors
from tformer.models.bert import BertConfig, BertMaskedLM
from tformer.models.gpt import GPT, GPTConfig
from tformer.models.llama import Llama, LlamaConfig
from tformer.models.mini_gpt import MiniGPT, load_record, random_windows
from tformer.models.seq2seq import Seq2Seq, Seq2SeqConfig
from tformer.tasks.masked_lm import EncodedBatch
from tformer.text.tokenizer import Tokenizer
from tformer.training.checkpoints import STATE_NAME, STATE_TENSORS_NAME
from tformer.training.data import (
    Batch,
    PackedLoader,
    PaddedLoader,
    RandomWindowLoader,
    sequential_windows,
)
from tformer.training.optimizers import AdamW, Muon, hidden_matrices
from tformer.training.schedules import warmup_cosine
from tformer.training.trainer import (
    LossMonitor,
    Trainer,
    TrainingDiverged,
    accumulate_gradients,
    activation_checkpointing,
    evaluate_and_sample,
    find_first_nonfinite,
    isolated_eval,
    mean_loss,
    next_token_loss,
    num_targets_of,
    to_device,
    train_step,
)

# children and compilers are not what executed signatures are about
plain = pytest.mark.skipif(
    "TFORMER_SHAPES" in os.environ, reason="signatures are executed"
)
IDS = torch.randint(40, (2000,), generator=torch.Generator().manual_seed(0))


def small(width=16, seed=0, layers=2):
    torch.manual_seed(seed)
    return Llama(
        LlamaConfig(
            vocab_size=40,
            d_model=width,
            n_heads=2,
            n_layers=layers,
            max_len=64,
            tie_word_embeddings=True,
        )
    )


def batches(length=16, batch=4, seed=0):
    return RandomWindowLoader(IDS, length, batch, seed)


def grads(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# --- the loss


def test_the_loss_is_that_of_torch():
    model = small()
    batch = next(iter(batches()))
    expected = F.cross_entropy(model(batch.ids).flatten(0, 1), batch.targets.flatten())
    window = torch.cat([batch.ids, batch.targets[:, -1:]], 1)
    for loss in (
        next_token_loss(model, batch),
        next_token_loss(model, window),
        next_token_loss(model, batch, chunk_size=7),
    ):
        torch.testing.assert_close(loss, expected)


class CappedLlama(Llama):
    "A model whose call does more than its output layer."

    def forward(self, ids, **kwargs):
        return 3 * torch.tanh(super().forward(ids, **kwargs) / 3)


class Scaled(nn.Module):
    "A wrapper that hands on what it has not, and changes the call."

    def __init__(self, model):
        super().__init__()
        self.model = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)

    def forward(self, ids, **kwargs):
        return self.model(ids, **kwargs) / 2


def capped():
    return CappedLlama(small().config)


def capped_by_a_hook(part=""):
    model = small()
    model.get_submodule(part).register_forward_hook(
        lambda module, given, logits: torch.tanh(logits)
    )
    return model


@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize(
    "make",
    [
        capped,
        capped_by_a_hook,
        partial(capped_by_a_hook, "lm_head"),
        lambda: Scaled(small()),
        pytest.param(
            lambda: torch.compile(capped(), backend="eager"), marks=plain_only
        ),
    ],
    ids=["subclass", "hook", "hook of the head", "wrapper", "compiled"],
)
def test_chunks_are_refused_where_the_call_changes_the_logits(make, precision):
    "Evaluation calls the model, so training must have what the call does."
    model = make()
    batch = next(iter(batches()))
    assert next_token_loss(model, batch).isfinite()
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"),
        pytest.raises(
            ValueError,
            match=r"the call of [A-Za-z]+ changes its logits after its output layer, "
            "and chunk_size= goes round the call: chunk_size=None computes them whole",
        ),
    ):
        next_token_loss(model, batch, chunk_size=7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_chunks_are_taken_where_the_call_ends_with_the_output_layer(dtype):
    "Hooks that only look, dropout, and numbers that are none change nothing."
    model = small().to(dtype)
    model.blocks[0].attention.register_forward_hook(
        lambda module, given, out: F.dropout(out, 0.5, module.training)
    )
    shapes = []
    model.register_forward_hook(lambda *given: shapes.append(given[2].shape))
    batch = next(iter(batches()))
    assert next_token_loss(model, batch, chunk_size=7).isfinite()
    assert model.training
    assert shapes == [(1, 4, 40)]  # not the whole batch
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    assert next_token_loss(model, batch, chunk_size=7).isnan()


@pytest.mark.parametrize("chunk", [None, 5])
def test_padded_and_packed_texts_cost_what_they_cost_alone(chunk):
    model = small()
    texts = [IDS[i * 30 : i * 30 + n].tolist() for i, n in enumerate((3, 9, 17, 5))]
    alone = [next_token_loss(model, torch.tensor([t])) for t in texts]
    sizes = [len(t) - 1 for t in texts]
    mean = sum(a * n for a, n in zip(alone, sizes, strict=True)) / sum(sizes)
    for loader in (
        PaddedLoader(texts, batch_size=4),
        PackedLoader(texts, 34, batch_size=1),
    ):
        batch = next(iter(loader))
        assert batch.num_targets == sum(sizes)
        torch.testing.assert_close(
            next_token_loss(model, batch, chunk_size=chunk), mean
        )


def test_mean_loss_equals_one_large_batch():
    model = small()
    with torch.no_grad():
        whole = next_token_loss(model, next(sequential_windows(IDS[:641], 64, 10)))
    for rows in (1, 3, 7):
        found = mean_loss(model, sequential_windows(IDS[:641], 64, rows))
        assert abs(found - whole.item()) < 1e-5
    assert not any(p.grad is not None for p in model.parameters())
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        mean_loss(model, [])
    with pytest.raises(
        ValueError,
        match=r"RandomWindowLoader has no end: evaluate on "
        r"data\.sequential_windows",
    ):
        mean_loss(model, batches())


def test_mean_loss_of_windows_weighs_by_targets():
    model = small()
    with torch.no_grad():
        parts = [IDS[:40].view(4, 10), IDS[50:53].view(1, 3)]
        a, b = (next_token_loss(model, part).item() for part in parts)
    assert abs(mean_loss(model, parts) - (36 * a + 2 * b) / 38) < 1e-6


def test_mean_loss_is_without_dropout_and_draws_nothing():
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(
            vocab_size=40, d_model=16, n_heads=2, n_layers=1, max_len=64, dropout=0.5
        )
    ).train()
    state = torch.get_rng_state()
    found = mean_loss(model, sequential_windows(IDS[:200], 16))
    assert torch.equal(state, torch.get_rng_state()) and model.training
    assert found == mean_loss(model.eval(), sequential_windows(IDS[:200], 16))


def test_batches_of_other_forms_cost_the_same():
    model = small()
    batch = next(iter(batches()))
    window = torch.cat([batch.ids, batch.targets[:, -1:]], 1)
    expected = next_token_loss(model, batch)
    for other in (
        [window],
        (window,),
        (batch.ids, batch.targets),
        [batch.ids, batch.targets],
        {"ids": batch.ids, "targets": batch.targets},
        {"input_ids": window, "labels": window},  # Hugging Face shifts them itself
        {"input_ids": window, "attention_mask": torch.ones_like(window)},
        {"input_ids": window},
    ):
        torch.testing.assert_close(next_token_loss(model, other), expected)
        assert num_targets_of(other) == batch.num_targets
        moved = to_device(other, "meta")
        inside = moved.values() if isinstance(moved, dict) else moved
        assert type(moved) is type(other) and all(x.is_meta for x in inside)


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
def test_an_attention_mask_hides_padding(labels, side):
    model = small()
    text = IDS[:9]
    pad = torch.zeros(4, dtype=torch.long)
    order = [pad, text] if side == "left" else [text, pad]
    kept = torch.cat([torch.full_like(x, int(x is text)) for x in order])
    ids = torch.stack([torch.cat(order), IDS[20:33]])
    kept = torch.stack([kept, torch.ones_like(kept)])
    batch = {"input_ids": ids, "attention_mask": kept}
    if labels:
        batch["labels"] = ids.masked_fill(kept == 0, -100)
    assert num_targets_of(batch) == 20
    alone = [next_token_loss(model, x[None]) for x in (text, IDS[20:33])]
    mean = (8 * alone[0] + 12 * alone[1]) / 20
    torch.testing.assert_close(next_token_loss(model, batch), mean)


def test_an_attention_mask_may_hold_floats():
    model = small()
    ids = IDS[:26].view(2, 13)
    kept = torch.ones_like(ids)
    kept[0, 9:] = 0
    losses = [
        next_token_loss(model, {"input_ids": ids, "attention_mask": mask})
        for mask in (kept, kept.bool(), kept.float(), kept.half(), kept.int())
    ]
    assert len({loss.item() for loss in losses}) == 1
    assert num_targets_of({"input_ids": ids, "attention_mask": kept.float()}) == 20


@pytest.mark.parametrize("value", [0.5, 2, -1, math.nan, -math.inf])
def test_a_mask_of_other_numbers_is_named(value):
    ids = IDS[:26].view(2, 13)
    kept = torch.ones(ids.shape)
    kept[1, 3] = value
    masks = [kept] if value != 2 else [kept, kept.long()]
    for mask in masks:
        for call in (num_targets_of, partial(next_token_loss, small())):
            with pytest.raises(
                ValueError, match="attention_mask must hold only 0 and 1"
            ):
                call({"input_ids": ids, "attention_mask": mask})


def foreign(name):
    "A small model of transformers, with weights that tell positions apart."
    import transformers as hf

    if name == "gpt2":
        config = hf.GPT2Config(
            vocab_size=31, n_positions=16, n_embd=8, n_layer=2, n_head=2
        )
        config.bos_token_id = 0
        config.eos_token_id = 0
        model = hf.GPT2LMHeadModel(config)
    else:
        size = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
        config = hf.LlamaConfig(vocab_size=31, num_attention_heads=2, **size)
        model = hf.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.4, generator=generator)
    return model.double().eval()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["mapping", "Batch"])
def test_models_of_others_get_the_arguments_that_they_take(name, side, kind):
    model = foreign(name)
    ids = torch.randint(31, (3, 9), generator=torch.Generator().manual_seed(3))
    kept = torch.ones_like(ids)
    kept[1, : 4 if side == "left" else None] = int(side == "right")
    kept[1, 5:] = int(side == "left")
    positions = (kept.cumsum(-1) - 1).clamp(min=0)
    labels = ids.masked_fill(kept == 0, -100)
    labels[1, 4] = -100 if side == "left" else labels[1, 4]
    with torch.no_grad():
        expected = model(
            ids, attention_mask=kept, position_ids=positions, labels=labels
        ).loss
    batch = {"input_ids": ids, "attention_mask": kept, "labels": labels}
    if kind == "Batch":
        negative = positions.masked_fill(kept == 0, -1)
        batch = Batch(ids[:, :-1], labels[:, 1:], negative[:, :-1])
    with torch.no_grad():
        # what a compiled model takes does not depend on the side of the padding
        compiled = [torch.compile(model, backend="eager")] if side == "left" else []
        for one in (model, *compiled):
            found = next_token_loss(one, batch).float()
            torch.testing.assert_close(found, expected.float())


def test_a_model_of_others_is_not_given_a_mask_of_packed_texts():
    batch = next(iter(PackedLoader([IDS[:9], IDS[9:15]], 16, batch_size=1)))
    with pytest.raises(ValueError, match="GPT2LMHeadModel takes no mask="):
        next_token_loss(foreign("gpt2"), batch)


@pytest.mark.parametrize(
    "batch, words",
    [
        ((torch.ones(2, 3), torch.ones(2, 3)), "tuple of torch.float32 of shape"),
        ([IDS[None, :4], IDS[None, :3]], r"list of torch.int64 of shape \(1, 4\), "),
        ({"x": IDS[None]}, "dict of 'x': torch.int64"),
        ({"input_ids": IDS[None], "weights": IDS[None]}, "dict of 'input_ids': "),
        ({"input_ids": IDS[None], "labels": IDS[None, :-1]}, "dict of "),
        ({}, "dict of nothing"),
        (IDS[:9], r"torch.int64 of shape \(9,\)"),
        ("hello", "got str"),
        (EncodedBatch(*[IDS[None, :9]] * 3, None), "EncodedBatch of torch.int64"),
        ([], "list of nothing"),
    ],
)
def test_batches_that_the_loss_cannot_take_are_described(batch, words):
    with pytest.raises(
        ValueError, match=f"next_token_loss takes a Batch.*{words}.*as loss_fn="
    ):
        next_token_loss(small(), batch)


def test_batches_of_a_data_loader_are_trained_on():
    data = torch.utils.data.TensorDataset(IDS[:1020].view(60, 17))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    ours = Trainer(small(), loader, max_steps=3).fit()
    plain = IDS[:1020].view(60, 17).split(4)
    assert ours == Trainer(small(), plain, max_steps=3).fit()


def test_pairs_are_weighed_by_the_targets_they_count():
    few = IDS[None, 1:9].clone()
    few[0, 2:] = -100
    pairs = [(IDS[None, :8], few), (IDS[None, 20:28], IDS[None, 21:29])]
    one = small()
    other = small()
    a = accumulate_gradients(one, pairs)
    b = accumulate_gradients(other, [Batch(*pair) for pair in pairs])
    assert a == b and torch.equal(grads(one), grads(other))


@pytest.mark.parametrize(
    "count, found", [(np.int64(3), 3), (torch.tensor(0), 0), (torch.ones(2), 1)]
)
def test_the_number_of_targets_may_be_of_any_kind(count, found):
    class Own:
        num_targets = count

    assert num_targets_of(Own()) == found


def test_windows_of_one_id_have_nothing_to_teach():
    with pytest.raises(ValueError, match="no target counts: the targets have shape"):
        Trainer(small(), [IDS[:2, None]], max_steps=1).fit()


def test_logits_may_be_in_an_object():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small()

        def forward(self, ids):
            return SimpleNamespace(logits=self.inner(ids), loss=None)

    rows = Trainer(Wrapped(), batches(), max_steps=2).fit()
    assert rows == Trainer(small(), batches(), max_steps=2).fit()


# --- accumulation


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(2, 20), min_size=2, max_size=6), st.integers(0, 99), st.data()
)
def test_parts_add_up_to_the_whole(lengths, seed, data):
    draw = torch.Generator().manual_seed(seed)
    texts = [torch.randint(40, (n,), generator=draw).tolist() for n in lengths]
    whole = next(iter(PaddedLoader(texts, batch_size=len(texts))))
    cut = data.draw(st.integers(1, len(texts) - 1))
    parts = [
        Batch(*(x[rows] for x in whole[:3]))
        for rows in (slice(0, cut), slice(cut, None))
    ]
    one = small().double()
    two = small().double()
    expected = next_token_loss(one, whole)
    expected.backward()
    assert abs(accumulate_gradients(two, parts) - expected) < 1e-12
    assert (grads(one) - grads(two)).abs().max() < 1e-12


def test_a_training_with_accumulation_equals_one_with_large_batches():
    def thirty(n):
        model = small().double()
        rows = [next(random_windows(IDS, 16, 8, seed)) for seed in range(30)]
        parts = [p for row in rows for p in row.split(8 // n)]
        Trainer(model, parts, max_steps=30, gradient_accumulation_steps=n).fit()
        return model

    for a, b in zip(thirty(1).parameters(), thirty(4).parameters(), strict=True):
        assert (a - b).abs().max() < 1e-9


def test_batches_of_other_kinds_count_once():
    model = nn.Linear(2, 1)
    pairs = [(torch.ones(3, 2), torch.zeros(3, 1)) for _ in range(2)]
    accumulate_gradients(model, pairs, lambda m, b: (m(b[0]) - b[1]).pow(2).mean())
    assert model.weight.grad is not None


def test_a_column_of_labels_counts_too():
    model = nn.Embedding(5, 1)
    labels = torch.tensor([[1], [2]])
    found = accumulate_gradients(model, [labels], lambda m, b: m(b).mean())
    assert found.isfinite() and model.weight.grad.any()


def test_a_model_without_parameters_is_named():
    class Uniform(nn.Module):
        "What counting gives before anything was counted."

        def forward(self, ids, **kwargs):
            return torch.zeros(*ids.shape, 40)

    batch = next(iter(batches()))
    with pytest.raises(ValueError, match="Uniform has no parameters: nothing can be"):
        accumulate_gradients(Uniform(), [batch])
    assert mean_loss(Uniform(), [batch]) == pytest.approx(math.log(40))


def test_nothing_to_learn_is_refused():
    batch = Batch(IDS[None, :8], torch.full((1, 8), -100))
    with pytest.raises(ValueError, match="no target counts"):
        accumulate_gradients(small(), [batch])


# --- precision, recomputing, compiling


def test_bf16_keeps_weights_and_gradients_in_float32():
    model = small(32)
    batch = next(iter(batches()))
    plain = accumulate_gradients(model, [batch])
    full = grads(model)
    model.zero_grad()
    rough = accumulate_gradients(model, [batch], precision="bf16")
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    off = (grads(model) - full).norm() / full.norm()
    assert 1e-4 < off < 0.05 and abs(rough - plain) < 0.01
    assert rough != plain


@pytest.mark.parametrize(
    "make",
    [
        small,
        lambda: GPT(
            GPTConfig(
                vocab_size=40,
                d_model=16,
                n_heads=2,
                n_layers=2,
                max_len=64,
                dropout=0.3,
            )
        ),
    ],
)
def test_recomputing_changes_no_bit(make):
    found = []
    batch = next(iter(batches()))
    for on in (False, True):
        torch.manual_seed(0)
        model = make()
        torch.manual_seed(1)
        with activation_checkpointing(model, on):
            loss = next_token_loss(model.train(), batch)
            loss.backward()
        found.append((loss, grads(model)))
        assert "forward" not in vars(model.blocks[0])
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_recomputing_a_block_that_is_used_twice():
    model = small()
    batch = next(iter(batches()))
    model.blocks[1] = model.blocks[0]
    with activation_checkpointing(model):
        next_token_loss(model, batch).backward()
    assert "forward" not in vars(model.blocks[0])


def test_recomputing_without_blocks():
    with pytest.raises(
        ValueError,
        match=r"activation_checkpointing needs "
        r"model\.blocks, which Linear has not",
    ):
        Trainer(
            nn.Linear(1, 1),
            [torch.ones(2, 1)],
            max_steps=1,
            activation_checkpointing=True,
        ).fit()


def test_recomputing_keeps_less():
    def kept(on):
        seen = {}
        model = small(32, layers=8)

        def keep(x):
            seen[x.data_ptr()] = x
            return x

        with (
            activation_checkpointing(model, on),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
        ):
            loss = next_token_loss(model, next(iter(batches(64, 8))))
        total = sum(x.nbytes for x in seen.values())
        loss.backward()
        return total - sum(p.nbytes for p in model.parameters())

    assert kept(True) < 0.2 * kept(False)


def test_compiling_needs_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler"):
        Trainer(small(), batches(), max_steps=1, compile=True).fit()


@plain
def test_a_compiled_model_trains_and_is_saved(monkeypatch, tmp_path):
    monkeypatch.setattr(runtime, "require_compiler", lambda: None)
    eager = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", eager)
    one = small()
    two = small()
    trainer = Trainer(one, batches(), max_steps=3, compile=True, output_dir=tmp_path)
    trainer.fit()
    Trainer(two, batches(), max_steps=3).fit()
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-5
    again = Llama.load(tmp_path / "step-000003")
    assert all(map(torch.equal, one.parameters(), again.parameters()))
    assert isinstance(compile_model(one), torch._dynamo.OptimizedModule)


# --- one step


def test_a_trainer_is_the_loop_by_hand():
    ours = small()
    theirs = small()
    schedule = warmup_cosine(20, 4)
    Trainer(
        ours,
        batches(),
        max_steps=20,
        max_grad_norm=0.5,
        lr_schedule=schedule,
        optimizer=torch.optim.AdamW(ours.parameters(), 1e-2),
    ).fit()
    optimizer = torch.optim.AdamW(theirs.parameters(), 1e-2)
    for step, batch in zip(range(1, 21), batches(), strict=False):
        optimizer.param_groups[0]["lr"] = 1e-2 * schedule(step)
        loss = F.cross_entropy(theirs(batch.ids).flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert (a - b).abs().max() < 1e-5


def test_a_trainer_is_the_fit_of_the_tour():
    "The same batches, the same schedule: the same model."

    def tour():
        torch.manual_seed(0)
        return MiniGPT(40, d_model=16, n_layers=1, n_heads=2, max_len=16)

    ours = tour()
    theirs = tour()
    losses = mini_gpt.train(theirs, random_windows(IDS, 16, 4), 20, lr=6e-3)
    optimizer = torch.optim.AdamW(ours.parameters(), 6e-3)
    probe = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], 6e-3)
    cycle = torch.optim.lr_scheduler.OneCycleLR(probe, 6e-3, 20)
    rates = []
    betas = []
    for _ in range(20):
        rates.append(probe.param_groups[0]["lr"] / 6e-3)
        betas.append(probe.param_groups[0]["betas"])
        probe.step()
        cycle.step()

    def schedule(step):  # OneCycleLR moves the betas as well
        optimizer.param_groups[0]["betas"] = betas[step - 1]
        return rates[step - 1]

    rows = Trainer(
        ours,
        random_windows(IDS, 16, 4),
        max_steps=20,
        max_grad_norm=math.inf,
        lr_schedule=schedule,
        optimizer=optimizer,
    ).fit()
    # the bias of keys does nothing, and is moved by rounding alone
    for row, loss in zip(rows, losses, strict=True):
        assert abs(row["loss"] - loss) < 1e-5


def test_several_optimizers():
    model = small()
    matrices = hidden_matrices(model)
    rest = [p for p in model.parameters() if not any(p is q for q in matrices)]
    before = [p.clone() for p in model.parameters()]
    Trainer(
        model,
        batches(),
        max_steps=3,
        optimizer=[Muon(matrices, 0.01), AdamW(rest, 0.01)],
    ).fit()
    assert not any(map(torch.equal, before, model.parameters()))


def test_a_row_tells_step_loss_norm_and_rate():
    rows = Trainer(
        small(), batches(), max_steps=4, lr=0.01, lr_schedule=lambda step: step / 4
    ).fit()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["lr"] for row in rows] == [0.0025, 0.005, 0.0075, 0.01]
    assert abs(rows[0]["loss"] - math.log(40)) < 0.2
    assert all(row["grad_norm"] > 0 for row in rows)


class Screen(io.StringIO):
    "A terminal, or a pipe."

    def __init__(self, is_terminal):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal


def shown(monkeypatch, is_terminal):
    "What a training of five steps shows."
    monkeypatch.setattr(sys, "stderr", Screen(is_terminal))
    Trainer(
        small(), batches(), max_steps=5, eval_every=2, eval_fn=lambda m: {"x": 0.25}
    ).fit()
    return sys.stderr.getvalue()


def test_a_training_in_a_pipe_prints_a_line_at_each_evaluation(monkeypatch):
    lines = shown(monkeypatch, False).splitlines()
    assert len(lines) == 3
    for step, line in zip((2, 4, 5), lines, strict=True):
        words = rf"step {step} of 5: loss 3\.\d+, grad_norm \d\.\d+, lr 0\.003, "
        assert re.fullmatch(words + r"eval_x 0\.25, [\d.]+ steps/s", line), line


def test_a_terminal_shows_a_bar_and_a_notebook_nothing(monkeypatch):
    bar = shown(monkeypatch, True)
    assert "5/5" in bar and "loss" not in bar
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    assert shown(monkeypatch, False) == ""


def test_a_rate_that_others_set_is_theirs():
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    halves = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    rows = Trainer(
        model,
        batches(),
        max_steps=4,
        optimizer=optimizer,
        log_fn=lambda row: halves.step(),
    ).fit()
    assert [row["lr"] for row in rows] == [1e-3 * 0.5**step for step in range(4)]


def rates_of_a_second_stage(scheduled_before, schedule):
    "The rates of two steps with an optimizer that was used, and was given another."
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    halves = (lambda step: 0.5) if scheduled_before else None
    args = dict(max_steps=2, optimizer=optimizer)
    Trainer(model, batches(), lr_schedule=halves, **args).fit()
    optimizer.param_groups[0]["lr"] = 0.001
    rows = Trainer(model, batches(), lr_schedule=schedule, **args).fit()
    return [row["lr"] for row in rows]


@pytest.mark.parametrize("scheduled_before", [False, True])
@pytest.mark.parametrize(
    "schedule, rates",
    [(None, [0.001, 0.001]), (lambda step: step / 4, [0.00025, 0.0005])],
)
def test_a_second_stage_begins_at_its_own_rate(scheduled_before, schedule, rates):
    assert rates_of_a_second_stage(scheduled_before, schedule) == rates


def test_a_rate_that_is_set_after_a_resume_is_taken(tmp_path):
    def make(steps):
        return Trainer(
            small(),
            batches(),
            max_steps=steps,
            lr=0.01,
            lr_schedule=lambda step: 1 / step,
            output_dir=tmp_path,
        )

    make(2).fit()
    trainer = make(4).resume()
    for group in trainer.optimizers[0].param_groups:
        group["lr"] = 0.03
    rates = [row["lr"] for row in trainer.fit()]
    assert rates == pytest.approx([0.01, 0.005, 0.01, 0.0075])


@pytest.mark.parametrize(
    "precision, dtype", [(None, torch.float32), ("bf16", torch.bfloat16)]
)
def test_a_trainer_computes_in_its_precision(precision, dtype):
    model = small()
    seen = set()
    model.lm_head.register_forward_hook(
        lambda module, given, result: seen.add(result.dtype)
    )
    Trainer(model, batches(), max_steps=1, precision=precision).fit()
    assert seen == {dtype}


@pytest.mark.parametrize("recompute, calls", [(False, 1), (True, 2)])
def test_a_trainer_recomputes_blocks(recompute, calls):
    model = small()
    seen = []
    model.blocks[0].attention.register_forward_hook(lambda *_: seen.append(1))
    Trainer(model, batches(), max_steps=1, activation_checkpointing=recompute).fit()
    assert len(seen) == calls


def test_the_default_optimizer():
    trainer = Trainer(small(), batches(), max_steps=1, lr=0.01)
    (optimizer,) = trainer.optimizers
    assert type(optimizer) is AdamW
    for group in optimizer.param_groups:
        assert group["lr"] == 0.01 and group["betas"] == (0.9, 0.95)
        matrix = {
            p.ndim > 1 and p is not trainer.model.embed.weight for p in group["params"]
        }
        assert matrix == {group["weight_decay"] == 0.1}
        assert group["weight_decay"] in (0.1, 0.0)
    assert len(optimizer.param_groups) == 2


# --- looking


def test_looking_leaves_no_trace():
    def trained(**how):
        torch.manual_seed(0)
        model = GPT(
            GPTConfig(
                vocab_size=40,
                d_model=16,
                n_heads=2,
                n_layers=1,
                max_len=64,
                dropout=0.2,
            )
        )
        torch.manual_seed(1)
        rows = Trainer(model, batches(), max_steps=6, eval_every=2, **how).fit()
        return [row["loss"] for row in rows]

    def peek(model):
        assert not model.training and not torch.is_grad_enabled()
        return {"x": torch.rand(1) + random.random() + np.random.rand()}

    assert trained() == trained(eval_fn=peek, sample_fn=lambda m: "text")


def test_isolated_eval_restores_everything_after_an_error():
    model = small().train()
    model.blocks[0].eval()
    state = torch.get_rng_state()
    with pytest.raises(KeyError), isolated_eval(model):
        torch.rand(1)
        raise KeyError
    assert not any(m.training for m in model.blocks[0].modules())
    assert model.blocks[1].training
    assert model.training and torch.equal(state, torch.get_rng_state())


def test_what_is_looked_at_is_kept(tmp_path, capsys):
    said = evaluate_and_sample(
        small(),
        lambda m: {"a": torch.tensor(2)},
        lambda m: "once",
        tmp_path / "s" / "1.txt",
    )
    assert said == {"eval_a": 2.0}
    assert (tmp_path / "s" / "1.txt").read_text() == "once"
    assert "once" in capsys.readouterr().out
    assert evaluate_and_sample(small()) == {}


def test_a_number_is_a_loss_and_a_list_of_texts_is_a_text(capsys):
    said = evaluate_and_sample(small(), lambda m: 2.5, lambda m: ["one", "two"])
    assert said == {"eval_loss": 2.5}
    assert "one\n\ntwo" in capsys.readouterr().out


@pytest.mark.parametrize(
    "how, words",
    [
        (
            {"eval_fn": lambda m: [1.0]},
            r"eval_fn must return a number, or "
            r"numbers by name, got \[1.0\]",
        ),
        ({"eval_fn": lambda m: {"x": torch.ones(2)}}, "eval_fn must return"),
        (
            {"sample_fn": lambda m: 3},
            "sample_fn must return a text, or a list of texts, got 3",
        ),
        (
            {"eval_fn": lambda m: {"acc": 1.0}, "best_metric": "lss"},
            "best_metric='lss' is none of what eval_fn returns: acc",
        ),
        ({"sample_fn": lambda m: 1 / 0}, "division"),
    ],
)
def test_a_look_that_fails_loses_no_step(how, words, tmp_path):
    trainer = Trainer(
        small(), batches(), max_steps=9, eval_every=5, output_dir=tmp_path, **how
    )
    with pytest.raises((ValueError, ZeroDivisionError), match=words):
        trainer.fit()
    assert trainer.checkpoints.steps() == [5]
    assert trainer.checkpoints.metrics() == {}
    again = Trainer(
        small(), batches(), max_steps=9, eval_every=5, output_dir=tmp_path
    ).resume()
    assert again.step == 5 and len(again.fit()) == 9


def test_rows_go_to_the_log_and_the_file(tmp_path):
    seen = []
    rows = Trainer(
        small(),
        batches(),
        max_steps=5,
        eval_every=2,
        log_fn=seen.append,
        eval_fn=lambda m: {"loss": 1.0},
        output_dir=tmp_path,
    ).fit()
    with (tmp_path / "history.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert seen == rows and len(lines) == 5
    assert [line["eval_loss"] for line in lines] == ["", "1.0", "", "1.0", "1.0"]
    assert all(
        float(line["loss"]) == row["loss"]
        for line, row in zip(lines, rows, strict=True)
    )


# --- what goes wrong in training


def test_a_nan_stops_before_the_weights_move():
    model = small()
    model.blocks[1].attention.norm.weight.data[2] = math.nan
    before = [p.clone() for p in model.parameters()]
    trainer = Trainer(model, batches(), max_steps=9, gradient_accumulation_steps=2)
    with pytest.raises(
        TrainingDiverged,
        match=r"the loss is nan at step 1: batch 1 "
        r"of 2, first in the output of "
        r"blocks\.1\.attention\.norm",
    ) as stopped:
        trainer.fit()
    for a, b in zip(before, model.parameters(), strict=True):
        assert torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    assert stopped.value.step == 1 and len(stopped.value.batches) == 2


def test_the_batch_to_blame_is_named():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.line = nn.Linear(1, 1)

        def forward(self, x):
            return self.line(x).log1p()

    good = torch.ones(2, 1)
    bad = torch.tensor([[1.0], [math.inf]])
    model = Odd()
    nn.init.ones_(model.line.weight)
    with pytest.raises(
        TrainingDiverged, match="at step 2: batch 3 of 3, first in the output of line"
    ):
        Trainer(
            model,
            [good] * 5 + [bad],
            max_steps=3,
            gradient_accumulation_steps=3,
            loss_fn=lambda m, x: m(x).mean(),
        ).fit()


def test_a_bad_gradient_after_a_good_loss():
    model = small()
    model.blocks[0].feed_forward.norm.weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(
        TrainingDiverged,
        match=r"the gradient is (nan|inf) at step 1: "
        r"batch 1 of 1, first in the gradient of "
        r"blocks\.0\.feed_forward\.norm\.weight",
    ):
        Trainer(model, batches(), max_steps=1).fit()


def test_the_largest_loss_is_to_blame():
    model = small()
    good = next(iter(batches()))
    bad = next(iter(batches(seed=1)))
    none = Batch(good.ids, torch.full_like(good.targets, -100))

    def loss(model, batch):
        return next_token_loss(model, batch) * (
            9 if torch.equal(batch.ids, bad.ids) else 1
        )

    watch = LossMonitor(history_size=2)
    with pytest.raises(
        TrainingDiverged,
        match=r"jumps from 3.\d+ to \d+.\d+ at step"
        r" 3: batch 2 of 4, of loss 3\d.\d+, with the "
        "largest gradient in ",
    ):
        Trainer(
            model,
            [good] * 9 + [bad, good, none],
            max_steps=3,
            gradient_accumulation_steps=4,
            loss_fn=loss,
            loss_monitor=watch,
        ).fit()


def test_a_jump_of_the_loss_stops():
    losses = iter([2.0] * 60 + [2.9, 3.1])

    def loss(model, batch):
        return next(losses, 3.1) + 0 * model.norm.weight.sum()

    with pytest.raises(
        TrainingDiverged,
        match=r"the loss jumps from 2\.000 to 3\.100 at"
        r" step 62: batch 1 of 1, of loss 3\.100, with",
    ):
        Trainer(small(), batches(), max_steps=99, loss_fn=loss).fit()


def test_a_rate_that_is_a_hundred_times_too_high_is_seen():
    def healthy(step):
        return 1.0 if step <= 60 else 100.0

    with pytest.raises(TrainingDiverged, match=r"jumps from 3.\d+ to .* at step 6"):
        Trainer(small(), batches(), max_steps=99, lr=0.01, lr_schedule=healthy).fit()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=5, max_size=30), st.floats(-20, 60))
def test_a_watch_sees_jumps_and_nothing_else(losses, last):
    watch = LossMonitor(spike_factor=10.0, history_size=5)
    for x in losses:
        watch.losses.append(x)
    usual = np.median(losses[-5:])
    median_deviation = np.median(np.abs(np.array(losses[-5:]) - usual))
    high = last - usual > 10 * median_deviation and last - usual > 1
    assert bool(watch(last, 1.0)) == high
    assert watch(math.nan, 1.0) and watch(1.0, math.inf)
    assert not LossMonitor(spike_factor=None)(1e9, 1.0)


@pytest.mark.parametrize(
    "losses",
    [
        [-2.0] * 120,  # says nothing new
        [0.060 + 0.14 * (k % 17 == 0) for k in range(200)],  # converged
        [6.0 * 0.97**k for k in range(200)],  # falls fast
    ],
)
def test_a_watch_lets_healthy_trainings_be(losses):
    watch = LossMonitor()
    assert not any(watch(x, 1.0) for x in losses)
    assert "jumps from" in watch(losses[-1] + 8, 1.0)


def test_a_watch_goes_on_after_a_resume(tmp_path):
    training(tmp_path, steps=12, loss_monitor=LossMonitor(history_size=5)).fit()
    again = training(
        tmp_path, steps=40, loss_monitor=LossMonitor(history_size=5)
    ).resume()
    assert again.loss_monitor.losses == [r["loss"] for r in again.history.records][-5:]
    again.loss_fn = lambda model, batch: noisy(model, batch) * 9
    with pytest.raises(TrainingDiverged, match=r"jumps from .* at step 13"):
        again.fit()


# --- pairs that teach something else

TEXTS = IDS[:52].view(4, 13)
READ = TEXTS[:, :-1]
KEPT = torch.ones_like(TEXTS)
KEPT[::2, 9:] = 0  # an attention mask of the texts
AS_IDS = r"targets of the first batch are the ids that the model reads"
AS_MASK = r"targets of the first batch hold only 0 and 1, as an attention mask"
AS_SHIFTED = r"labels of the first batch are shifted already"


@pytest.mark.parametrize(
    "batch, words",
    [
        ((READ, READ), AS_IDS),
        ([READ, READ], AS_IDS),
        (Batch(READ, READ), AS_IDS),
        ((READ, READ.where(READ > 4, -100)), AS_IDS),  # some do not count
        ({"input_ids": READ, "targets": READ}, AS_IDS),
        ({"input_ids": TEXTS, "labels": TEXTS.roll(1, 1)}, AS_IDS),
        ((READ, KEPT[:, :-1]), AS_MASK),
        ((READ, KEPT[:, :-1].flip(1)), AS_MASK),
        ((READ, KEPT[:, :-1].bool()), AS_MASK),
        ((READ, torch.ones_like(READ)), AS_MASK),
        ({"ids": READ, "targets": KEPT[:, :-1]}, AS_MASK),
        ({"input_ids": TEXTS, "labels": KEPT, "attention_mask": KEPT}, AS_MASK),
        ({"input_ids": READ, "labels": TEXTS[:, 1:]}, AS_SHIFTED),
        ({"ids": TEXTS, "labels": TEXTS.roll(-1, 1)}, AS_SHIFTED),
    ],
)
@pytest.mark.parametrize("rows", [4, 1])
def test_pairs_that_teach_something_else_are_refused(batch, words, rows):
    "Also if a step is made of batches of one row each."

    def cut(part):
        if isinstance(batch, dict):
            return {name: x[part] for name, x in batch.items()}
        parts = [x[part] for x in batch[:2]]
        return Batch(*parts) if isinstance(batch, Batch) else type(batch)(parts)

    cuts = [cut(slice(i, i + rows)) for i in range(0, 4, rows)]
    model = small()
    before = [p.clone() for p in model.parameters()]
    args = dict(max_steps=3, gradient_accumulation_steps=len(cuts))
    for loss in (next_token_loss, partial(next_token_loss, chunk_size=5)):
        with pytest.raises(ValueError, match=words):
            Trainer(model, cuts, loss_fn=loss, **args).fit()
    assert all(map(torch.equal, before, model.parameters()))

    def own_loss(model, batch):  # whoever means it says so
        return model(torch.tensor([[1, 2]])).mean()

    assert Trainer(model, cuts, loss_fn=own_loss, **args).fit()


@pytest.mark.parametrize("n, is_refused", [(15, False), (16, True)])
@pytest.mark.parametrize("make", [lambda x: (x, x), lambda x: (x, torch.ones_like(x))])
def test_so_many_targets_are_not_wrong_by_chance(n, is_refused, make):
    trainer = Trainer(small(), [make(IDS[None, :n])], max_steps=1)
    if is_refused:
        with pytest.raises(ValueError, match="targets of the first batch"):
            trainer.fit()
    else:
        assert trainer.fit()


SAME = torch.full((4, 13), 7)
HALVES = torch.cat([SAME[:, :6], SAME[:, :6] + 1], 1)  # two texts in each row
CHANCE = torch.rand(4, 13, generator=torch.Generator().manual_seed(2)) < 0.15
ONES = (TEXTS % 2).where(CHANCE, 1)


@pytest.mark.parametrize(
    "batch",
    [
        SAME,
        (SAME[:, :-1], SAME[:, 1:]),
        {"input_ids": SAME, "labels": SAME},
        {"input_ids": SAME, "targets": SAME},
        # texts of one letter, packed: no target where the next one begins
        (HALVES, HALVES.index_fill(1, torch.tensor([5, 11]), -100)),
        # copying: the second half repeats the first, and only it counts
        (
            torch.cat([READ, READ], 1)[:, :-1],
            torch.cat([READ.new_full((4, 12), -100), READ[:, 1:]], 1),
        ),
        # masked tokens, of which some stayed what they were
        (TEXTS.masked_fill(CHANCE, 39), TEXTS.masked_fill(~CHANCE, -100)),
        (TEXTS, TEXTS.masked_fill(torch.arange(13) != 3, -100)),  # too few to tell
        (READ[:1], READ[:1]),  # too few to tell
        # delayed by one: what was read before
        (READ, READ.roll(1, 1)),
        # text of two letters
        (ONES[:, :-1], ONES[:, 1:]),
        (torch.ones_like(READ), torch.ones_like(READ)),
        # a tag for each token; a class for each text, at its end or all along it
        (READ, READ % 2),
        (READ, (READ[:, -1:] % 2).expand(-1, 12)),
        (READ, torch.cat([torch.full((4, 11), -100), READ[:, -1:] % 2], 1)),
        # Hugging Face: labels are the ids, but for a prompt and for padding
        {"input_ids": TEXTS, "labels": TEXTS, "attention_mask": KEPT},
        {"input_ids": TEXTS, "labels": TEXTS.masked_fill(KEPT == 0, -100)},
        {"input_ids": TEXTS, "labels": TEXTS.masked_fill(torch.arange(13) < 5, -100)},
        {"input_ids": TEXTS.view(26, 2), "labels": READ.new_tensor([[-100, 5]] * 26)},
        (SAME.view(52, 1), SAME.view(52, 1)),  # windows of two equal ids
    ],
)
def test_pairs_that_are_meant_so_are_trained_on(batch):
    assert Trainer(small(), [batch], max_steps=2).fit()


def test_hooks_are_taken_off_again():
    model = small()
    batch = next(iter(batches()))
    assert (
        find_first_nonfinite(model, lambda: next_token_loss(model, batch).backward())
        is None
    )
    with pytest.raises(KeyError):
        find_first_nonfinite(model, lambda: {}["no"])
    assert not any(m._forward_hooks for m in model.modules())


def test_of_several_bad_gradients_that_nearest_to_the_output_is_named():
    model = small()
    names = [name for name, _ in model.named_parameters()]

    def compute():
        for name, p in model.named_parameters():
            p.grad = torch.full_like(p, math.nan if name in bad else 1.0)

    for bad in ({names[0], names[3]}, {names[1]}, {*names}):
        last = max(bad, key=names.index)
        assert find_first_nonfinite(model, compute) == f"the gradient of {last}"


def test_a_watch_says_nothing_of_jumps_before_its_history_is_full():
    for n in range(5):
        watch = LossMonitor(history_size=5)
        assert not any(watch(2.0, 1.0) for _ in range(n))
        assert watch(1e3, 1.0) is None
        assert watch(math.nan, 1.0) == "the loss is nan"
        assert watch(1.0, math.nan) == "the gradient is nan"
    watch = LossMonitor(history_size=5)
    assert not any(watch(2.0, 1.0) for _ in range(5))
    assert "jumps from 2.000 to 1000.000" in watch(1e3, 1.0)


def test_a_jump_of_exactly_so_much_is_none():
    for jump, is_told in ((1.0, False), (1.001, True)):
        watch = LossMonitor(history_size=5)
        assert not any(watch(2.0, 1.0) for _ in range(5))
        assert bool(watch(2.0 + jump, 1.0)) == is_told
    for jump, is_told in ((5.0, False), (5.001, True)):  # ten times the median distance
        watch = LossMonitor(history_size=4)
        assert not any(watch(x, 1.0) for x in (2.0, 3.0, 2.0, 3.0))
        assert bool(watch(2.5 + jump, 1.0)) == is_told


def test_a_model_in_eval_mode_is_trained_in_training_mode():
    modes = []

    def loss(model, batch):
        modes.extend(module.training for module in model.modules())
        return next_token_loss(model, batch)

    model = small().eval()
    Trainer(model, batches(), max_steps=2, loss_fn=loss).fit()
    assert modes and all(modes)


# --- refusals


@pytest.mark.parametrize(
    "how, words",
    [
        ({"lr": 0}, "lr must be above 0, got 0"),
        ({"lr": math.nan}, "lr must be above 0, got nan"),
        ({"max_steps": 0}, "max_steps must be"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be"),
        ({"eval_every": 2.5}, "eval_every must be"),
        ({"max_grad_norm": 0}, "max_grad_norm must be"),
        ({"precision": "fp8"}, "precision must be"),
        ({"keep_last": 0, "output_dir": "x"}, "keep_last must be"),
        ({"optimizer": "adam"}, "optimizer must be"),
        ({"model": "llama"}, "model must be"),
        ({"save_every": 0}, "save_every must be"),
        ({"optimizer": []}, "optimizer is an empty list"),
        ({"batches": "hello"}, "batches must be an iterable of batches, got str 'hel"),
        ({"batches": 5}, "batches must be an iterable of batches, got int 5"),
        ({"lr_schedule": [1.0]}, r"lr_schedule must be a function, got \[1.0\]"),
        ({"log_fn": 3}, "log_fn must be a function, got 3"),
        ({"eval_fn": 3}, "eval_fn must be a function"),
        ({"loss_monitor": 3}, "loss_monitor must be a function, got 3"),
        ({"optimizer": ["adam"]}, "optimizer must be"),
        ({"sample_fn": "text"}, "sample_fn must be a function"),
        ({"loss_fn": None}, "loss_fn must be a function, got None"),
        ({"best_metric": "acc"}, "best_metric='acc' needs an eval_fn that returns"),
        ({"output_dir": __file__}, "output_dir must be a folder, and .* is a file"),
        ({"tokenizer": "gpt2"}, "tokenizer must be a Tokenizer, got str"),
        (
            {"tokenizer": Tokenizer.train(["a"], 256)},
            "^the model has vocab_size 40, and the tokenizer 256 ids: they do not",
        ),
        (
            {
                "model": Llama(
                    LlamaConfig(vocab_size=320, d_model=8, n_heads=2, n_layers=1)
                ),
                "tokenizer": Tokenizer.train(["a"], 256),
            },
            "^the model has vocab_size 320, and the tokenizer 256 ids: they do not",
        ),
    ],
)
def test_a_trainer_refuses(how, words):
    given_ = {"model": small(), "batches": batches(), "max_steps": 2} | how
    with pytest.raises(ValueError, match=words):
        Trainer(**given_)


@plain_only
@pytest.mark.parametrize(
    "optimizers, how, words",
    [
        ([], {}, r"optimizers must be a list of torch\.optim\.Optimizer, got \[\]$"),
        (["adam"], {}, r"optimizers must be a list of .*, got \['adam'\]"),
        (torch.optim.SGD, {}, "optimizers must be a list of .*, got <class"),
        (None, {"loss_monitor": 3}, "loss_monitor must be a function, got 3"),
        (None, {"loss_fn": None}, "loss_fn must be a function, got None"),
        (None, {"lr_schedule": 0.5}, "lr_schedule must be a function, got 0.5"),
    ],
)
def test_a_step_refuses(optimizers, how, words):
    model = small()
    before = [p.clone() for p in model.parameters()]
    if optimizers is None:
        optimizers = [torch.optim.SGD(model.parameters(), 0.1)]
    with pytest.raises(ValueError, match=words):
        train_step(model, optimizers, [next(iter(batches()))], **how)
    assert all(map(torch.equal, before, model.parameters()))


def test_one_optimizer_is_no_list_of_them():
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"optimizers|list"):
        train_step(model, optimizer, [next(iter(batches()))])


def test_a_history_that_is_a_folder_is_refused(tmp_path):
    (tmp_path / "history.csv").mkdir()
    with pytest.raises(
        ValueError, match=r"a history is kept in a file, and .*history\.csv is a folder"
    ):
        Trainer(small(), batches(), max_steps=2, output_dir=tmp_path)


def test_a_precision_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="precision must be one of None, 'bf16'"):
        accumulate_gradients(small(), [next(iter(batches()))], precision="fp8")


@pytest.mark.parametrize("factor", [0, -1.0, math.nan, "10"])
def test_a_watch_refuses_a_factor_that_is_none(factor):
    with pytest.raises(ValueError, match="spike_factor must be above 0"):
        LossMonitor(spike_factor=factor)
    with pytest.raises(ValueError, match="min_jump must be above 0"):
        LossMonitor(min_jump=factor)


@pytest.mark.parametrize("size", [0, 2.5, math.nan, None])
def test_a_watch_refuses_a_history_that_holds_nothing(size):
    with pytest.raises(ValueError, match="history_size must be a whole number of at"):
        LossMonitor(history_size=size)


@pytest.mark.parametrize("lr", [0.0, math.nan])
def test_a_rate_of_torch_s_own_is_refused_too(lr):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.param_groups[0]["lr"] = lr
    with pytest.raises(ValueError, match="lr must be above 0"):
        Trainer(model, batches(), max_steps=1, optimizer=optimizer)


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match="SGD holds no parameter of this model"):
        Trainer(
            small(),
            batches(),
            max_steps=1,
            optimizer=torch.optim.SGD(small().parameters(), 0.1),
        )


def test_a_schedule_that_says_nan():
    with pytest.raises(ValueError, match="factor must be"):
        Trainer(
            small(), batches(), max_steps=1, lr_schedule=lambda step: math.nan
        ).fit()


def test_batches_that_end():
    with pytest.raises(ValueError, match="the batches end after 3"):
        Trainer(small(), iter([next(iter(batches()))] * 3), max_steps=4).fit()


def test_a_context_longer_than_the_corpus():
    with pytest.raises(ValueError, match="does not fit a corpus of 2000"):
        Trainer(small(), RandomWindowLoader(IDS, 2000), max_steps=1)


# --- resume


def noisy(model, batch):
    "A tenth of what the model reads is random, from three sources."
    spoil = torch.rand(batch.ids.shape) < 0.05 + 0.1 * random.random()
    ids = batch.ids.where(~spoil, int(np.random.randint(40)))
    return F.cross_entropy(model(ids).flatten(0, 1), batch.targets.flatten())


def training(folder, steps=40, **how):
    random.seed(0), np.random.seed(0)
    how = {
        "lr_schedule": warmup_cosine(40, 4),
        "gradient_accumulation_steps": 2,
        "eval_every": 4,
        "loss_fn": noisy,
        "eval_fn": lambda m: {"loss": mean_loss(m, sequential_windows(IDS[:200], 64))},
    } | how
    return Trainer(small(), batches(), max_steps=steps, output_dir=folder, **how)


@pytest.fixture
def memory():
    "A folder in memory where there is one: many kills, and no disk to wait for."
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.mkdtemp(dir=where)
    yield Path(folder)
    shutil.rmtree(folder)


def dying_in_a_save(folder, calls):
    "Trains, and is killed at that call to the disk."
    die_after(calls)
    training(folder).resume().fit()


def content(path):
    "Bytes; of tensors theirs, since a header has no order of its own."
    if path.suffix != ".safetensors":
        return path.read_bytes()
    tensors, about = read_safetensors(path)
    return about, {
        name: (x.dtype, x.shape, x.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, x in tensors.items()
    }


def files(folder):
    "What a training leaves, to the byte."
    return {
        str(p.relative_to(folder)): content(p) for p in folder.rglob("*") if p.is_file()
    }


@plain
@pytest.mark.parametrize("num_kills", by_day([4, 20], 4))
def test_killed_at_some_moments_it_ends_with_the_same_bytes(num_kills, memory):
    calm = memory / "calm"
    night = memory / "night"
    draw = random.Random(5)
    began = time.monotonic()
    assert child(lambda: training(calm).fit()) == 0
    whole = time.monotonic() - began
    kills = 0
    laps = 0
    while kills < num_kills:
        if kills % 2:
            ended = child(lambda: dying_in_a_save(night, draw.randrange(30)))
        else:
            ended = child(
                lambda: training(night).resume().fit(), draw.uniform(0.1, 0.7) * whole
            )
        kills += ended == signal.SIGKILL
        if ended == 0:  # it got to the end before it was killed
            assert files(night) == files(calm)
            shutil.rmtree(night)
            laps += 1
    assert child(lambda: training(night).resume().fit()) == 0
    assert files(night) == files(calm)
    assert {Path(p).name for p in files(calm)} >= {
        "history.csv",
        STATE_NAME,
        STATE_TENSORS_NAME,
        WEIGHTS_NAME,
        "config.json",
    }
    assert laps < 10


def shuffled():
    "A loader of PyTorch: five batches, in another order each pass."
    return torch.utils.data.DataLoader(
        IDS[:340].view(20, 17), batch_size=4, shuffle=True
    )


@plain_only
@pytest.mark.parametrize(
    "make",
    [
        shuffled,
        lambda: [next(iter(batches(seed=s))) for s in range(7)],
        lambda: PaddedLoader(
            [IDS[i : i + 3 + i % 9].tolist() for i in range(40)], batch_size=4
        ),
        lambda: (b for b in batches()),
    ],
)
@pytest.mark.parametrize("stop", [4, 6, 11])
def test_any_batches_are_taken_up(make, stop, tmp_path):
    def until(steps, folder, resume=False):
        trainer = Trainer(
            small(),
            make(),
            max_steps=steps,
            output_dir=folder,
            gradient_accumulation_steps=2,
            eval_every=3,
        )
        return (trainer.resume() if resume else trainer).fit(), trainer

    straight, one = until(14, tmp_path / "a")
    until(stop, tmp_path / "b")
    rows, two = until(14, tmp_path / "b", resume=True)
    assert rows == straight
    assert all(map(torch.equal, one.model.parameters(), two.model.parameters()))


@plain_only
def test_a_shuffled_pass_is_taken_up_again_and_again(tmp_path):
    "A resumed training that is saved in the middle of a pass resumes as well."

    def until(steps, folder, program):
        torch.manual_seed(program)
        data = torch.utils.data.DataLoader(
            IDS[:340].view(20, 17),
            batch_size=2,
            shuffle=True,
            generator=torch.Generator().manual_seed(5),
        )
        trainer = Trainer(
            small(), data, max_steps=steps, eval_every=3, output_dir=folder
        )
        return trainer.resume().fit()

    straight = until(27, tmp_path / "a", 0)
    for steps in (6, 15, 18, 27):
        rows = until(steps, tmp_path / "b", steps)
    assert rows == straight


def test_resume_begins_where_there_is_nothing(tmp_path):
    trainer = training(tmp_path / "new", steps=2).resume()
    assert trainer.step == 0 and len(trainer.fit()) == 2
    assert training(None, steps=2).resume().step == 0
    assert len(training(tmp_path / "new", steps=2).resume().fit()) == 2


def test_another_training_is_not_written_over(tmp_path):
    training(tmp_path, steps=4).fit()
    before = files(tmp_path)
    with pytest.raises(
        ValueError,
        match="stands here already, up to step "
        r"4: resume\(\) goes on",
    ):
        training(tmp_path, steps=4).fit()
    assert files(tmp_path) == before


def test_a_training_without_a_checkpoint_is_not_written_over(tmp_path):
    def short(**how):
        return training(tmp_path, steps=6, **how)

    with pytest.raises(ZeroDivisionError):
        short(log_fn=lambda row: 1 / (3 - row["step"])).fit()
    before = files(tmp_path)
    assert list(before) == ["history.csv"]
    with pytest.raises(
        ValueError, match=r"up to step 3: resume\(\) begins it anew, as it has no"
    ):
        short().fit()
    assert files(tmp_path) == before
    rows = short().resume().fit()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]


@plain_only
@pytest.mark.parametrize("left", [None, b"", b"step,loss\r\n\xff\xfe\x00\r\n7,1,1,"])
def test_a_history_that_was_lost_does_not_stop_a_resume(left, tmp_path):
    straight = training(tmp_path / "a", steps=8)
    straight.fit()
    training(tmp_path / "b", steps=4).fit()
    path = tmp_path / "b" / "history.csv"
    path.unlink()
    if left is not None:
        path.write_bytes(left)
    again = training(tmp_path / "b", steps=8).resume()
    assert again.fit() == straight.history.records[4:]
    assert all(map(torch.equal, straight.model.parameters(), again.model.parameters()))


def test_a_history_that_is_none_is_refused_before_anything_changes(tmp_path):
    training(tmp_path, steps=4).fit()
    (tmp_path / "history.csv").write_bytes(b"\xff\xfe\n")
    trainer = training(tmp_path)
    before = [p.clone() for p in trainer.model.parameters()]
    chance = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"history\.csv is no history"):
        trainer.resume()
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert torch.equal(chance, torch.get_rng_state())
    assert trainer.step == trainer.data.num_yielded == 0
    assert not trainer.optimizers[0].state


def test_checkpoints_may_be_rarer_than_looks(tmp_path):
    looks = []
    trainer = training(
        tmp_path,
        steps=10,
        eval_every=2,
        save_every=4,
        eval_fn=lambda m: {"loss": looks.append(0) or len(looks)},
    )
    trainer.fit()
    assert len(looks) == 5 and trainer.checkpoints.steps() == [4, 8, 10]
    assert trainer.checkpoints.metrics() == {4: 2, 8: 4, 10: 5}
    more = training(tmp_path / "more", steps=4, eval_every=4, save_every=1)
    more.fit()
    assert more.checkpoints.steps() == [2, 3, 4]
    assert [*more.checkpoints.metrics()] == [4]  # without a look there is none


def test_a_checkpoint_holds_the_tokenizer(tmp_path):
    tokenizer = Tokenizer.train(["once upon a time"], 260).with_reserved_tokens(264)
    model = Llama(LlamaConfig(vocab_size=264, d_model=16, n_heads=2, n_layers=1))
    Trainer(
        model, batches(), max_steps=1, output_dir=tmp_path, tokenizer=tokenizer
    ).fit()
    again = Tokenizer.load(tmp_path / "step-000001" / "vocabulary.json")
    assert again.encode("once") == tokenizer.encode("once")


def told_of_endoftext(model, tokenizer):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Trainer(model, batches(), max_steps=1, tokenizer=tokenizer)
    return [str(w.message) for w in told if "endoftext" in str(w.message)]


def test_a_tokenizer_without_endoftext_is_told_at_the_beginning():
    texts = ["once upon a time"]
    model = Llama(LlamaConfig(vocab_size=260, d_model=16, n_heads=2, n_layers=1))
    plain = Tokenizer.train(texts, 260)
    (told,) = told_of_endoftext(model, plain)
    assert "special_tokens=" in told and told.count(".") == 0
    ends = Tokenizer.train(texts, 260, special_tokens=["<|endoftext|>"])
    assert not told_of_endoftext(model, ends)
    assert not told_of_endoftext(model, None)
    config = BertConfig(vocab_size=260, d_model=16, n_heads=2, n_layers=1)
    assert not told_of_endoftext(BertMaskedLM(config), plain)
    config = Seq2SeqConfig(vocab_size=260, d_model=16, n_heads=2, n_layers=1)
    assert not told_of_endoftext(Seq2Seq(config), plain)


# --- interrupts


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def interrupting(f, at):
    "The same function, in whose call number ``at`` somebody presses Ctrl-C."
    calls = []

    def call(*args, **kwargs):
        calls.append(0)
        if len(calls) == at:
            interrupt()
        return f(*args, **kwargs)

    return call


def interrupted(trainer):
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    return trainer


@plain_only
@pytest.mark.parametrize(
    "how, step",
    [
        ({"loss_fn": interrupting(noisy, 11)}, 6),  # two calls for each step
        ({"loss_fn": interrupting(noisy, 12)}, 6),
        ({"lr_schedule": interrupting(warmup_cosine(40, 4), 7)}, 7),
        ({"log_fn": interrupting(lambda row: None, 5)}, 5),
        ({"log_fn": interrupting(lambda row: None, 8)}, 8),
    ],
)
def test_an_interrupt_saves_the_step_that_is_whole(how, step, tmp_path, capsys):
    straight = training(tmp_path / "a", steps=12)
    straight.fit()
    stopped = interrupted(training(tmp_path / "b", steps=12, **how))
    assert stopped.step == max(stopped.checkpoints.steps()) == step
    said = capsys.readouterr().out
    assert f"interrupted after step {step}: resume() goes on after step {step}" in said
    rows = []
    again = training(tmp_path / "b", steps=12, log_fn=rows.append).resume()
    assert again.step == step and again.fit() == straight.history.records
    assert rows == straight.history.records[step:]
    for a, b in zip(straight.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


class Moody:
    "Batches; ``interrupted`` of them are given before Ctrl-C is pressed."

    def __init__(self, interrupted=-1):
        self.left = interrupted

    def __iter__(self):
        for batch in batches():
            torch.rand(1)  # chance is drawn, and must be put back
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            yield batch


@plain_only
@pytest.mark.parametrize("given", [6, 7])
def test_an_interrupt_while_batches_are_made_saves_the_step_before(given, tmp_path):
    def trained(folder, data):
        torch.manual_seed(0)
        random.seed(0), np.random.seed(0)
        return Trainer(
            small(),
            data,
            max_steps=9,
            gradient_accumulation_steps=2,
            loss_fn=noisy,
            output_dir=folder,
        )

    straight = trained(tmp_path / "a", Moody())
    straight.fit()
    stopped = interrupted(trained(tmp_path / "b", Moody(given)))
    assert stopped.checkpoints.steps() == [3]
    again = trained(tmp_path / "b", Moody()).resume()
    assert again.fit() == straight.history.records


class SlowSGD(torch.optim.SGD):
    "Ctrl-C is pressed when half of the weights have moved."

    def step(self):
        for i, p in enumerate(self.param_groups[0]["params"]):
            if i == 2:
                interrupt()
            p.data.sub_(p.grad, alpha=0.1)


def test_an_interrupt_inside_an_update_waits_for_its_end(tmp_path):
    model = small()
    before = [p.clone() for p in model.parameters()]
    trainer = Trainer(
        model,
        batches(),
        max_steps=9,
        output_dir=tmp_path,
        optimizer=SlowSGD(model.parameters(), 0.1),
    )
    interrupted(trainer)
    assert trainer.step == len(trainer.history.records) == 1
    assert not any(map(torch.equal, before, model.parameters()))
    saved = small()
    trainer.checkpoints.load(saved)
    assert all(map(torch.equal, saved.parameters(), model.parameters()))


def test_an_interrupt_in_an_evaluation_does_not_wait(tmp_path):
    after = []

    def look(model):
        interrupt()
        after.append("never")

    trainer = training(tmp_path, steps=9, eval_every=2, save_every=9, eval_fn=look)
    interrupted(trainer)
    assert trainer.checkpoints.steps() == [2] and not after
    assert len(trainer.history.read()) == 2 and trainer.model.training


def eval_loss(model):
    return {"loss": mean_loss(model, sequential_windows(IDS[:200], 64))}


def write_some(model):
    return str(model(torch.rand(1, 5).argsort())[0, -1].argmax().item())


def stopping(f, at, error=None):
    "The same function, in whose call number ``at`` there is Ctrl-C, or an error."
    calls = []

    def call(*args):
        calls.append(0)
        if len(calls) == at:
            if error is None:
                interrupt()
            raise error
        return f(*args)

    return call


@plain_only
@pytest.mark.parametrize(
    "error, name, at, every",
    [
        (None, "eval_fn", 2, 4),
        (None, "eval_fn", 2, 9),
        (None, "sample_fn", 3, 1),
        (OSError, "eval_fn", 3, 4),
    ],
)
def test_an_evaluation_that_was_cut_off_is_made_up(error, name, at, every, tmp_path):
    "The folder then holds the bytes of a run that nobody stopped."

    def trained(folder, **how):
        rows = []
        how = {"eval_fn": eval_loss, "sample_fn": write_some} | how
        trainer = training(
            folder, steps=12, save_every=every, log_fn=rows.append, **how
        )
        return trainer, rows

    straight, straight_rows = trained(tmp_path / "a")
    straight.fit()
    f = {"eval_fn": eval_loss, "sample_fn": write_some}[name]
    stopped, _ = trained(tmp_path / "b", **{name: stopping(f, at, error)})
    with pytest.raises(error or KeyboardInterrupt):
        stopped.fit()
    assert stopped.step == 4 * at and len(stopped.history.read()) == 4 * at
    again, rows = trained(tmp_path / "b", **{name: stopping(f, 1)})
    interrupted(again.resume())  # and it may be cut off once more
    assert again.step == 4 * at and again.model.training
    again, rows = trained(tmp_path / "b")
    assert again.resume().fit() == straight.history.records
    assert rows == straight_rows[4 * at - 1 :]
    for a, b in zip(straight.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    metrics = again.checkpoints.metrics()
    assert straight.checkpoints.metrics().items() <= metrics.items()
    if every != 9:  # where it stopped, there is a checkpoint that no other run has
        assert files(tmp_path / "a") == files(tmp_path / "b")


def test_an_evaluation_that_was_cut_off_without_a_folder_is_made_up():
    straight = training(None, steps=8)
    straight.fit()
    trainer = training(None, steps=8, eval_fn=stopping(eval_loss, 1))
    interrupted(trainer)
    assert trainer.fit() == straight.history.records


@plain_only
def test_a_sample_that_was_cut_off_is_made_up(tmp_path):
    how = {"steps": 8, "eval_fn": None, "sample_fn": write_some}
    straight = training(tmp_path / "a", **how)
    straight.fit()
    how["sample_fn"] = stopping(write_some, 1)
    interrupted(training(tmp_path / "b", **how))
    assert not (tmp_path / "b" / "samples").exists()
    again = training(tmp_path / "b", **how).resume()
    assert again.fit() == straight.history.records
    assert files(tmp_path / "a") == files(tmp_path / "b")


@plain_only
@pytest.mark.parametrize("at", ["set_metric", "extend_last", "log_fn"])
def test_a_look_that_is_cut_off_while_it_is_made_up_is_made_up(at, tmp_path):
    "An error at any of the three does not cost the checkpoint its metric."
    scores = {4: 3.0, 8: 1.0, 12: 2.0}

    def trained(folder, **how):
        trainer = training(folder, steps=12, keep_last=1, **how)
        if "eval_fn" not in how:
            trainer.eval_fn = lambda m: scores[trainer.step]
        return trainer

    straight = trained(tmp_path / "a")
    straight.fit()
    assert straight.checkpoints.steps() == [8, 12]
    folder = tmp_path / "b"
    interrupted(trained(folder, eval_fn=stopping(lambda m: scores[4], 2)))
    again = trained(folder).resume()
    part = {
        "set_metric": again.checkpoints,
        "extend_last": again.history,
        "log_fn": again,
    }[at]

    def fail(*args):
        raise OSError("away")

    setattr(part, at, fail)
    with pytest.raises(OSError, match="away"):
        again.fit()
    last = trained(folder).resume()
    assert last.fit()[8:] == straight.history.records[8:]
    assert last.checkpoints.best_step == 8
    assert last.checkpoints.steps() == [8, 12]


def test_an_error_of_the_log_costs_no_checkpoint(tmp_path):
    def log(row):
        if row["step"] == 8:
            raise OSError("away")

    trainer = training(tmp_path, steps=8, log_fn=log)
    with pytest.raises(OSError, match="away"):
        trainer.fit()
    assert trainer.checkpoints.steps() == [4, 8]
    assert [*trainer.checkpoints.metrics()] == [4, 8]
    assert len(trainer.history.read()) == 8


@plain_only
def test_a_sample_whose_writing_is_cut_off_is_made_up(tmp_path, monkeypatch):
    how = {"steps": 8, "eval_fn": None, "sample_fn": lambda m: "once upon a time"}
    straight = training(tmp_path / "a", **how)
    straight.fit()
    write = Path.write_text

    def half(path, text, *args, **kwargs):
        write(path, text[:4])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        interrupted(training(tmp_path / "b", **how))
    assert not [*(tmp_path / "b" / "samples").iterdir()]
    training(tmp_path / "b", **how).resume().fit()
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_an_evaluation_that_is_there_is_not_made_again(tmp_path):
    training(tmp_path, steps=8, sample_fn=write_some).fit()
    before = files(tmp_path)
    calls = []
    for how in ({"eval_fn": calls.append}, {"sample_fn": calls.append}):
        trainer = training(tmp_path, steps=8, **how).resume()
        trainer.fit()
    later = training(tmp_path, steps=9, eval_every=9, eval_fn=eval_loss)
    assert not calls and files(tmp_path) == before
    assert [*later.resume().fit()[-1]] == [
        "step",
        "loss",
        "grad_norm",
        "lr",
        "eval_loss",
    ]


def test_an_interrupt_without_a_folder_can_go_on(capsys):
    straight = training(None, steps=8)
    straight.fit()
    trainer = training(None, steps=8, loss_fn=interrupting(noisy, 5))
    interrupted(trainer)
    assert trainer.step == 3
    assert "interrupted after step 3: nothing was saved" in capsys.readouterr().out
    assert trainer.fit() == straight.history.records


def test_an_interrupt_before_the_first_step_saves_nothing(tmp_path):
    trainer = interrupted(Trainer(small(), Moody(0), max_steps=2, output_dir=tmp_path))
    assert trainer.step == 0 and not [*tmp_path.iterdir()]


def test_the_handler_of_interrupts_is_as_before():
    before = signal.getsignal(signal.SIGINT)
    training(None, steps=2).fit()
    interrupted(training(None, steps=2, loss_fn=interrupting(noisy, 1)))
    assert signal.getsignal(signal.SIGINT) is before
    thread = threading.Thread(target=training(None, steps=2).fit)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_configuration_that_does_not_match(tmp_path):
    training(tmp_path, steps=4).fit()
    before = files(tmp_path)
    with pytest.raises(ValueError, match="another model: d_model 16 there, 32 here"):
        Trainer(small(32), batches(), max_steps=9, output_dir=tmp_path).resume()
    model = small()
    with pytest.raises(
        ValueError,
        match=r"the state of tformer\.training\.optimizers\.AdamW, not of .*\.SGD$",
    ):
        Trainer(
            model,
            batches(),
            max_steps=9,
            output_dir=tmp_path,
            optimizer=torch.optim.SGD(model.parameters(), 0.1),
        ).resume()
    with pytest.raises(ValueError, match="this loader"):
        Trainer(small(), batches(seed=1), max_steps=9, output_dir=tmp_path).resume()
    assert files(tmp_path) == before


def test_a_resume_with_parameters_in_another_order_is_refused(tmp_path):
    def trained(order, steps):
        model = small()
        params = [*model.parameters()][::order]
        optimizer = AdamW(params, 1e-2)
        return Trainer(
            model, batches(), max_steps=steps, optimizer=optimizer, output_dir=tmp_path
        )

    trained(1, 2).fit()
    with pytest.raises(
        ValueError, match=r"parameter 1 of tformer\.training\.optimizers\.AdamW"
    ):
        trained(-1, 4).resume()
    assert len(trained(1, 4).resume().fit()) == 4


@plain_only  # numbers of numpy are no int by their type
def test_numbers_of_numpy_are_saved(tmp_path):
    Trainer(
        small(),
        RandomWindowLoader(IDS, np.int64(16), seed=np.int64(3)),
        max_steps=1,
        lr=np.float64(0.01),
        output_dir=tmp_path,
    ).fit()


@pytest.mark.parametrize("name", [WEIGHTS_NAME, STATE_TENSORS_NAME, STATE_NAME])
def test_a_truncated_checkpoint(name, tmp_path):
    training(tmp_path, steps=4).fit()
    path = tmp_path / "step-000004" / name
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=f"{name} is no"):
        training(tmp_path).resume()


@pytest.mark.parametrize(
    "name", [WEIGHTS_NAME, STATE_TENSORS_NAME, STATE_NAME, "config.json"]
)
def test_a_checkpoint_that_lost_a_file_is_told(name, tmp_path):
    "It is not passed over: the training would end at its step, again and again."
    training(tmp_path, steps=6).fit()
    folder = tmp_path / "step-000006"
    (folder / name).unlink()
    words = f"{folder} is damaged: delete this folder, and .* from step 4"
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        training(tmp_path).resume()
    with pytest.raises(ValueError, match="stands here already, up to step 6"):
        training(tmp_path).fit()
    shutil.rmtree(folder)
    (tmp_path / "step-000007").touch()  # files are no checkpoints
    assert training(tmp_path).resume().step == 4


@plain
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path):
    resource = pytest.importorskip("resource")
    calm = tmp_path / "calm"
    training(calm).fit()

    def fills():
        trainer = training(tmp_path / "full", steps=40)

        def log(row):
            if row["step"] == 7:  # before the save of step 8
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))

        trainer.log_fn = log
        trainer.fit()

    assert os.waitstatus_to_exitcode(child(fills)) == 7
    left = sorted(p.name for p in (tmp_path / "full").iterdir())
    assert left == ["history.csv", "step-000004"]
    training(tmp_path / "full").resume().fit()
    full = files(tmp_path / "full")
    calm = files(calm)
    assert {k for k in full if full[k] != calm.get(k)} == set()
    assert full.keys() == calm.keys()


def test_the_best_checkpoint_stays(tmp_path):
    scores = iter([3.0, 1.0, 2.0, 4.0, 5.0])
    trainer = training(
        tmp_path,
        steps=10,
        eval_every=2,
        keep_last=1,
        eval_fn=lambda m: {"x": next(scores)},
        best_metric="x",
    )
    trainer.fit()
    assert trainer.checkpoints.steps() == [4, 10]
    assert trainer.checkpoints.best_step == 4


def test_an_update_by_itself():
    model = small()
    optimizer = AdamW(model.parameters(), 1e-2)
    before = [p.clone() for p in model.parameters()]
    row = train_step(model, [optimizer], [next(iter(batches()))])
    assert row["step"] == 1 and row["lr"] == 1e-2 and row["grad_norm"] > 0
    assert not any(map(torch.equal, before, model.parameters()))


def test_a_loss_with_options():
    rows = Trainer(
        small(), batches(), max_steps=2, loss_fn=partial(next_token_loss, chunk_size=9)
    ).fit()
    plain = Trainer(small(), batches(), max_steps=2).fit()
    assert abs(rows[1]["loss"] - plain[1]["loss"]) < 1e-4


# --- the recorded experiments


@pytest.mark.nightly
@plain
@pytest.mark.parametrize(
    "name, words, keys",
    [
        (
            "scaling",
            ["--sizes", "12", "--tokens", "0.01"],
            {"width", "seed", "flops", "nats_per_token"},
        ),
        (
            "sweeps",
            ["--widths", "16", "--steps", "1"],
            {"width", "lr", "seed", "nats_per_token"},
        ),
    ],
)
def test_the_experiments_run_and_go_on(name, words, keys, tmp_path):
    out = tmp_path / f"{name}.csv"
    script = [
        sys.executable,
        ROOT / "experiments" / f"{name}.py",
        *words,
        "--seeds",
        "1",
        "--out",
        str(out),
    ]
    run(*script)
    with out.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    kept = load_record(name)
    assert keys <= set(rows[0]) == set(kept[0])
    assert all(float(row["nats_per_token"]) > 3 for row in rows)
    assert len({row["seed"] for row in kept}) >= 3


@pytest.mark.nightly
@plain
def test_the_broken_trainings_are_recorded_by_their_script(tmp_path):
    rows = run_small("wrong", tmp_path)
    kept = [row for row in load_record("wrong") if row["seed"] == "0"]
    assert [row["case"] for row in rows] == [row["case"] for row in kept]
    for short, long in zip(rows, kept, strict=True):
        assert short.keys() == long.keys()
        begins = [float(row["losses"].split()[0]) for row in (short, long)]
        assert begins[0] == pytest.approx(begins[1], abs=0.01)
        assert len(long["losses"].split()) == 200
        assert len(long["fresh"].split()) == 8


def test_rubbish_does_lasting_harm_only_without_clipping():
    losses = {
        (row["case"], row["seed"]): [float(x) for x in row["losses"].split()]
        for row in load_record("wrong")
    }
    for seed in "012":
        cost = {}
        for case, same in (("F", "healthy"), ("F unclipped", "unclipped")):
            off = [
                a - b
                for a, b in zip(losses[case, seed], losses[same, seed], strict=True)
            ]
            assert not any(off[:100]) and min(off[100:104]) > 5
            cost[case] = sum(off[-10:]) / 10
        assert 0 < cost["F"] < 0.035 < 0.15 < cost["F unclipped"]


def test_the_record_of_compute_is_what_the_chapter_says():
    rows = load_record("scaling")
    for row in rows:
        n = int(row["parameters"])
        tokens = int(row["tokens"])
        assert abs(tokens / n - 20) < 0.1
        assert abs(float(row["flops"]) / (6 * n * tokens) - 1) < 1e-3
    assert len({row["width"] for row in rows}) == 7
