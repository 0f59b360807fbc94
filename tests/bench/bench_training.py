"""Compare steps of training: python tests/bench/bench_training.py

A step is forward, loss, backward, clipping and AdamW: 8 rows of 256 tokens
through 6 layers of width 384, with 10,000 ids. The peers are the models of
transformers on PyTorch's fused attention. Both sides begin with equal weights,
take the same AdamW of PyTorch, and must have computed the same loss and
gradients before anything is timed. Ours makes the logits of some positions at
a time (``chunked_cross_entropy``), theirs makes all, as it always does; a row
tells what that is worth. All ways of one model take turns in the same rounds;
every row is the median over the rounds of a ratio of processor times, followed
by the smallest and the largest of these ratios.

"the matmul peak" is the best of 20 products of the shape of the feed-forward
layer, spread over the same rounds. The FLOPs of a step are those of its
matrices, and of the pairs of query and key that causality allows, three times
the forward pass: 6 N T plus causal attention. N leaves out tables that are
only read.

--quick           small sizes, one round: that everything runs, not how fast
--only WORD       gpt or llama alone
--threads N       threads of PyTorch (then the processor time of all of them)
"""

import gc
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM
from transformers import LlamaConfig as TheirLlamaConfig

sys.path.insert(0, str(Path(__file__).parent))
import bench_models
import timing
from bench_parts import FAILED, Size, apart, ids_of, run
from tformer.costs import forward_flops, spec_from_config
from tformer.models import gpt, llama
from tformer.training.losses import chunked_cross_entropy

SIZES = [Size(8, 256, 384, 6)]
LAYERS = 6
VOCAB = 10_000
ROUNDS = 9
PRODUCTS = 20
WITHIN = 1e-5  # how far loss and gradients may be apart
PEAK = 0.6
BF16 = 1.4


def vocab():
    return 50 if timing.quick else VOCAB


def gpt_twins(size):
    "GPT and GPT-2: the head is the table of tokens."
    ours = gpt.GPT(
        gpt.GPTConfig(
            vocab_size=vocab(),
            d_model=size.d,
            n_heads=size.h,
            n_layers=LAYERS,
            max_len=size.t,
            dropout=0.0,
        )
    )
    peer = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab(),
            n_positions=size.t,
            n_embd=size.d,
            n_layer=LAYERS,
            n_head=size.h,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="sdpa",
        )
    )
    return bench_models.decoder(
        "GPT / GPT2LMHeadModel", ours, peer, bench_models.GPT2, ids_of(size, vocab())
    )


def llama_twins(size):
    "Llama, its head apart from the table, as is the default of both."
    config = llama.LlamaConfig(
        vocab_size=vocab(),
        d_model=size.d,
        n_heads=size.h,
        n_layers=LAYERS,
        max_len=size.t,
    )
    d_ff = llama.swiglu_width(size.d)
    peer = LlamaForCausalLM(
        TheirLlamaConfig(
            vocab_size=vocab(),
            hidden_size=size.d,
            num_attention_heads=size.h,
            num_key_value_heads=size.h,
            num_hidden_layers=LAYERS,
            intermediate_size=d_ff,
            max_position_embeddings=size.t,
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
    )
    return bench_models.decoder(
        "Llama / LlamaForCausalLM",
        llama.Llama(config),
        peer,
        bench_models.LLAMA,
        ids_of(size, vocab()),
    )


def next_ids(ids):
    "What every position has to say; the last has no successor."
    return F.pad(ids[:, 1:], (0, 1), value=-100)


def our_loss(model, ids, hidden=None):
    "The logits of some rows at a time; ``hidden``: compiled, or None."
    x = (model.hidden_states if hidden is None else hidden)(ids)
    return chunked_cross_entropy(x, model.lm_head.weight, next_ids(ids))


def our_loss_at_once(model, ids):
    "All logits, and the loss of PyTorch."
    return F.cross_entropy(model(ids).flatten(0, 1), next_ids(ids).flatten())


def peer_loss(model, ids):
    return model(ids, labels=ids, use_cache=False).loss


class Side:
    "A model and its optimizer, and what a step of training is."

    def __init__(self, model, loss, ids):
        self.model = model.train()
        self.loss = loss
        self.ids = ids
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    def gradients(self, loss=None, dtype=None):
        "Forward, loss and backward; returns the loss."
        loss = self.loss if loss is None else loss
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            value = loss(self.model, self.ids)
        value.backward()
        return value.detach()

    def step(self, loss=None, dtype=None):
        self.gradients(loss, dtype)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def sides_of(twins):
    "Both sides, with equal weights, each in memory of its own."
    for p in twins.peer.parameters():
        p.data = p.data.clone()
    (ids,) = twins.inputs
    return Side(twins.ours, our_loss, ids), Side(twins.peer, peer_loss, ids)


def must_agree(twins, ours, peer):
    "How far loss and gradients of both are apart, if it is not too far."
    losses = [side.gradients() for side in (ours, peer)]
    given = twins.rename({name: p.grad for name, p in twins.ours.named_parameters()})
    theirs = twins.leaves()
    difference = apart(
        [losses[0], *(given[name] for name in theirs)],
        [losses[1], *(p.grad for p in theirs.values())],
    )
    if not (isinstance(difference, float) and difference <= WITHIN):
        raise AssertionError(
            f"{twins.name}: loss or gradients of the two sides differ: {difference}"
        )
    ours.optimizer.zero_grad(), peer.optimizer.zero_grad()
    return difference


def work_of(model, size):
    "FLOPs of a step: three times those of the forward pass."
    return 3 * forward_flops(spec_from_config(model), size.t, size.b, skip_masked=True)


def product(size, d_ff):
    "The matrix product that feed-forward layers begin with."
    x = torch.randn(size.b * size.t, size.d)
    w = torch.randn(d_ff, size.d)
    with torch.no_grad():
        return timing.once(lambda: F.linear(x, w), time.process_time)[0]


def has_bf16():
    "Whether this CPU multiplies bfloat16 by itself."
    return any(
        getattr(torch.cpu, f"_is_{name}_supported", bool)()
        for name in ("avx512_bf16", "amx_tile")
    )


def ways_of(ours, peer):
    "The steps that take turns, by name."
    hidden = torch.compile(
        ours.model.hidden_states, backend="eager" if timing.quick else "inductor"
    )
    return {
        "ours": ours.step,
        "peer": peer.step,
        "at once": lambda: ours.step(our_loss_at_once),
        "bf16": lambda: ours.step(dtype=torch.bfloat16),
        "compiled": lambda: ours.step(partial(our_loss, hidden=hidden)),
    }


def in_rounds(ways, size, d_ff):
    "Seconds of every way in every round, and of the fastest product."
    for step in ways.values():  # caches, optimizers, compilation
        step(), step()
    times = {name: [] for name in ways}
    fastest = float("inf")
    rounds = 1 if timing.quick else ROUNDS
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            fastest = min(
                fastest, *(product(size, d_ff) for _ in range(-(-PRODUCTS // rounds)))
            )
            order = list(ways)[:: 1 if i % 2 == 0 else -1]
            for name in order:
                times[name].append(timing.once(ways[name], time.process_time)[0])
    finally:
        gc.enable()
    return times, fastest


def report(name, ratios, target, detail):
    "One row: the median, its target, and the spread over the rounds."
    value = median(ratios)
    timing.row(
        name,
        value,
        target,
        f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds; {detail}",
    )
    if target and not timing.quick and value * target[0] < target[1] * target[0]:
        FAILED.append((name, value))


def measure(made):
    "The rows of one model."
    twins, size, target = made
    ours, peer = sides_of(twins)
    agree = must_agree(twins, ours, peer)
    d_ff = spec_from_config(twins.ours).d_ff
    work = work_of(twins.ours, size)
    times, fastest = in_rounds(ways_of(ours, peer), size, d_ff)
    peak = 2 * size.b * size.t * size.d * d_ff / fastest
    each = {name: f"{median(t):.2f} s" for name, t in times.items()}

    def against(a, b):
        return [x / y for x, y in zip(times[a], times[b], strict=True)]

    report(
        twins.name,
        against("ours", "peer"),
        (timing.AT_MOST, target),
        f"{each['ours']} / {each['peer']}; loss and gradients within {agree:.0e}",
    )
    first, other = twins.name.split(" / ")
    for name, way, goal in (
        (first, "ours", (timing.AT_LEAST, PEAK)),
        (other, "peer", None),
    ):
        report(
            f"{name}, share of the matmul peak",
            [work / t / peak for t in times[way]],
            goal,
            f"{work / 1e9:.0f} GFLOP; {peak / 1e9:.1f} GFLOP/s",
        )
    report(
        f"{first}, float32 / bfloat16",
        against("ours", "bf16"),
        (timing.AT_LEAST, BF16) if has_bf16() else None,
        each["bf16"],
    )
    report(
        f"{first}, all logits at once / in chunks",
        against("at once", "ours"),
        None,
        each["at once"],
    )
    report(
        f"{first}, compiled / not", against("compiled", "ours"), None, each["compiled"]
    )


def bench_gpt(size):
    yield gpt_twins(size), size, 0.95


def bench_llama(size):
    yield llama_twins(size), size, 1.0


BENCHES = [bench_gpt, bench_llama]


def main():
    run(
        __doc__,
        BENCHES,
        SIZES,
        lambda size: (
            f"a step of {size} (rows, tokens, d_model), {size.h} heads, "
            f"{LAYERS} layers, {vocab():,} ids"
        ),
        measure,
    )


if __name__ == "__main__":
    main()
