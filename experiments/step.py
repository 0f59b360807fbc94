"""Where does the time of a training step go? Steps, seen by the profiler.

    python experiments/step.py              GPT and Llama, recorded
    python experiments/step.py --quick --out some.csv

A step is forward, loss, backward, clipping and AdamW, at 6 layers of width
384, 10,000 ids and 8 x 256 tokens: the step of tests/bench/bench_training.py.
The profiler of PyTorch tells the time of every operation without those that it
calls, of which the shares are taken; the time of a step is the processor's,
without the profiler, so that others on the machine do not count. An operation
belongs to one part: products of matrices are "matmul",
those of the loss too; the fused kernel is "attention"; what else happens
inside the loss is "loss"; clipping and AdamW are "optimizer"; the rest, which
reads and writes every number once, is "norms and activations": norms,
activations, rotary positions, additions, copies.

The loss is made in chunks, which turns logits into gradients at once: the
backward products of the output layer are part of the forward phase here.

The rows go to tformer/records/step.csv: for each model, precision, phase and
part the milliseconds (median over the steps, and the smallest and the
largest), and what all products of the step would take at the matmul peak, the
best of 20 products of the shape of the feed-forward layer, made between the
steps.
"""

import argparse
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
import common
from tformer.costs import forward_flops, spec_from_config
from tformer.models.gpt import GPT, GPTConfig
from tformer.models.llama import Llama, LlamaConfig
from tformer.training.losses import chunked_cross_entropy

OUT = common.RECORDS / "step.csv"
PHASES = ("forward", "backward", "update")
PARTS = ("matmul", "attention", "loss", "norms and activations", "optimizer")
PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16}
SIZE = dict(vocab_size=10_000, d_model=384, n_heads=6, n_layers=6, max_len=256)
SMALL = dict(vocab_size=40, d_model=16, n_heads=2, n_layers=1, max_len=8)
STEPS = 7
WARM = 3
BATCH = 8
PRODUCTS = 20
PRODUCT = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::addmm_",
    "aten::baddbmm_",
}


def make(name, size):
    "A model in training mode, and its optimizer."
    torch.manual_seed(0)
    model = (
        GPT(GPTConfig(**size, dropout=0.0))
        if name == "GPT"
        else Llama(LlamaConfig(**size))
    ).train()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)


def step(model, optimizer, ids, dtype):
    "One step; every phase under its name."
    targets = F.pad(ids[:, 1:], (0, 1), value=-100)
    with (
        record_function("phase forward"),
        torch.autocast("cpu", dtype, enabled=dtype is not None),
    ):
        hidden = model.hidden_states(ids)
        with record_function("part loss"):
            loss = chunked_cross_entropy(hidden, model.lm_head.weight, targets)
    with record_function("phase backward"):
        loss.backward()
    with record_function("phase update"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def above(event):
    "The names of an event and of all that it happened in."
    while event is not None:
        yield event.name
        event = event.cpu_parent


def place(event):
    "The phase and the part that an event belongs to; None outside."
    names = list(above(event))
    phase = next((n[6:] for n in names if n.startswith("phase ")), None)
    if phase is None:
        return None
    if names[0] in PRODUCT:
        part = "matmul"
    elif "scaled_dot_product" in names[0]:
        part = "attention"
    elif any(n == "part loss" or "Chunked" in n for n in names):
        part = "loss"
    else:
        part = "optimizer" if phase == "update" else "norms and activations"
    return phase, part


def milliseconds(run):
    "What a step takes, by phase and part."
    began = time.process_time()
    run()
    cpu = 1000 * (time.process_time() - began)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    took = defaultdict(float)
    for event in seen.events():
        if where := place(event):
            took[where] += event.self_cpu_time_total
    total = sum(took.values())
    return defaultdict(float, {k: t / total * cpu for k, t in took.items()})


def product(size):
    "Milliseconds of the product that feed-forward layers begin with."
    d = size["d_model"]
    x = torch.randn(BATCH * size["max_len"], d)
    w = torch.randn(4 * d, d)
    with torch.no_grad():
        began = time.process_time()
        F.linear(x, w)
        return 1000 * (time.process_time() - began), 2 * x.numel() * 4 * d


def measure(name, precision, size, steps):
    "The rows of one model in one precision."
    model, optimizer = make(name, size)
    ids = torch.randint(size["vocab_size"], (BATCH, size["max_len"]))
    dtype = PRECISIONS[precision]

    def run():
        step(model, optimizer, ids, dtype)

    for _ in range(WARM if steps > 1 else 1):
        run()
    seen = []
    products = []
    for _ in range(steps):
        products += [product(size) for _ in range(-(-PRODUCTS // steps))]
        seen.append(milliseconds(run))
    ms, work = min(products)
    all_work = 3 * forward_flops(
        spec_from_config(model), size["max_len"], BATCH, skip_masked=True
    )
    total = median(sum(took.values()) for took in seen)
    print(
        f"{name}, {precision}: {total:.0f} ms a step, "
        f"{all_work / total * ms / work:.2f} of the matmul peak",
        flush=True,
    )
    return [
        {
            "model": name,
            "precision": precision,
            "phase": phase,
            "part": part,
            "ms": f"{median(t[phase, part] for t in seen):.2f}",
            "lowest": f"{min(t[phase, part] for t in seen):.2f}",
            "highest": f"{max(t[phase, part] for t in seen):.2f}",
            "step_ms": f"{total:.1f}",
            "steps": str(steps),
            "gflop": f"{all_work / 1e9:.3f}",
            "at_peak_ms": f"{all_work / work * ms:.2f}",
            **common.about(),
        }
        for phase in PHASES
        for part in PARTS
        if any(t[phase, part] for t in seen)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a tiny model, one step: that everything runs",
    )
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in ("GPT", "Llama"):
        for precision in PRECISIONS:
            rows += measure(
                name,
                precision,
                SMALL if args.quick else SIZE,
                1 if args.quick else STEPS,
            )
    common.write(rows, args.out)


if __name__ == "__main__":
    main()
