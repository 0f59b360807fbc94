"""What in-flight batching gains: python tests/bench/bench_serving.py

A decoder of 6 layers, d 384 and 10,000 ids serves requests in four slots,
greedily, with prompts of 1 to 32 ids. Lengths of texts are lognormal, uniform,
or as stories have them. Steps are calls of the model for a token of each live
text; the bound is tokens / slots, and the drain the steps at the end in which
a slot is empty and nobody waits. Static batches are those of generate, four
requests at a time, in the order in which they came or sorted by what they will
write; rows that have ended stay till the longest has ("leaving": they leave,
and the batch shrinks, but nobody takes their place). All ways must write the same
ids; where they do not, near-ties are counted, and said. Seconds are processor time, in
turn, one thread; the engine's own work is its time without that in the model.

--quick    small sizes, few requests: that everything runs, not how fast
"""

import argparse
import gc
import random
import sys
import tracemalloc
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parent))
import timing
from tformer.inference.generation import generate
from tformer.models.llama import Llama, LlamaConfig
from tformer.serving.engine import Engine
from tformer.serving.requests import Request
from timing import AT_LEAST, AT_MOST

SLOTS = 4
SIZE = 16
FAILED = []


def row(name, value, target, detail):
    timing.row(name, value, target, detail)
    if target and value * target[0] < target[1] * target[0]:
        FAILED.append((name, value))


def decoder():
    torch.manual_seed(0)
    size = (
        dict(d_model=16, n_layers=1, n_heads=2, vocab_size=50)
        if timing.quick
        else dict(d_model=384, n_layers=6, n_heads=6, vocab_size=10_000)
    )
    model = Llama(LlamaConfig(**size, max_len=256))
    return model.eval().requires_grad_(False)


def lengths_of(kind, n):
    "How long n texts are."
    rnd = random.Random(kind)
    if kind == "lognormal":
        return [min(224, 1 + int(rnd.lognormvariate(3, 1.2))) for _ in range(n)]
    if kind == "uniform":
        return [rnd.randint(1, 100) for _ in range(n)]
    return [rnd.randint(50, 105) for _ in range(n)]  # stories


def requests_of(lengths):
    rnd = random.Random(1)
    return [
        Request([rnd.randrange(50) for _ in range(rnd.randint(1, 32))], n)
        for n in lengths
    ]


def in_batches(model, requests, drop=False):
    "The texts, and how many steps they took."
    texts = []
    steps = 0
    for i in range(0, len(requests), SLOTS):
        part = requests[i : i + SLOTS]
        ends = [r.max_new_tokens for r in part]
        texts += [t.ids for t in until(model, part, ends, drop)]
        steps += max(ends)
    return texts, steps


def until(model, part, ends, drop):
    "Rows of a batch stop at lengths of their own."

    class Ends:
        "Counts the rows that are asked, in their order."

        def __init__(self):
            self.live = list(range(len(ends)))
            self.at = 0

        def __call__(self, ids):
            row = self.live[self.at]
            self.at += 1
            last = len(ids) == ends[row]
            if self.at == len(self.live):
                self.live = [i for i in self.live if len(ids) < ends[i]]
                self.at = 0
            return last

    return generate(
        model,
        [r.prompt_ids for r in part],
        max_new_tokens=max(ends),
        stopping_criteria=Ends(),
        drop_finished=drop,
    )


def in_flight(model, requests, **how):
    "The texts, the steps, of which drain; the engine."
    engine = Engine(model, SLOTS, **how)
    drain = 0
    handles = [engine.submit(r) for r in requests]
    while engine.has_unfinished_requests:
        engine.step()
        desk = engine.scheduler
        drain += not desk.waiting and None in desk.row_owners
    assert all(t.finish_reason == "length" for t in handles)
    return [t.output_ids for t in handles], engine.steps, drain, engine


def must_agree(kind, found, texts):
    "Greedy ids are equal, but for near-ties of float32."
    differ = sum(a != b for a, b in zip(found, texts, strict=True))
    assert differ <= len(texts) // 20, f"{kind}: {differ} texts differ"
    return f"{differ} of {len(texts)} texts differ by near-ties"


def bench_kind(model, kind, n, rounds):
    requests = requests_of(lengths_of(kind, n))
    ordered = sorted(requests, key=lambda r: r.max_new_tokens)
    tokens = sum(r.max_new_tokens for r in requests)
    texts, batches = in_batches(model, requests)
    _, by_length = in_batches(model, ordered)
    found, steps, drain, _ = in_flight(model, requests)
    paged = dict(num_blocks=SLOTS * 256 // SIZE, block_size=SIZE)
    other, more, *_ = in_flight(model, requests, **paged)
    agree = must_agree(kind, found, texts), must_agree(kind, other, texts)
    assert steps == more
    lognormal = kind == "lognormal"
    row(
        f"{kind}: steps / (bound + drain)",
        steps / (tokens / SLOTS + drain),
        (AT_MOST, 1.1),
        f"{steps} steps, bound {tokens / SLOTS:.0f}, drain {drain}",
    )
    row(
        f"{kind}: static / in flight, steps",
        batches / steps,
        (AT_LEAST, 1.9) if lognormal else None,
        agree[0],
    )
    row(f"{kind}: sorted static / in flight, steps", by_length / steps, None, agree[1])
    took = timing.in_turn(
        {
            "static": lambda: in_batches(model, requests),
            "leaving": lambda: in_batches(model, requests, True),
            "sorted": lambda: in_batches(model, ordered),
            "slots": lambda: in_flight(model, requests),
            "paged": lambda: in_flight(model, requests, **paged),
        },
        rounds,
    )
    detail = ", ".join(f"{k} {t:.1f}" for k, t in took.items()) + " s"
    best = min(took["slots"], took["paged"])
    for way in ("static", "leaving", "sorted"):
        row(
            f"{kind}: {way} / in flight, seconds",
            took[way] / best,
            (AT_LEAST, 1.6) if lognormal and way == "static" else None,
            detail,
        )


def bench_bytes(model, kind, n):
    "The most bytes that blocks in use ever take; slots take theirs always."
    engine = Engine(model, SLOTS, num_blocks=SLOTS * 256 // SIZE, block_size=SIZE)
    for r in requests_of(lengths_of(kind, n)):
        engine.submit(r)
    most = 0
    every = []
    while engine.has_unfinished_requests:
        engine.step()
        every.append(engine.runner.cache.nbytes)
    most = max(every)
    c = model.config
    slots = 2 * 4 * c.n_layers * c.d_model * 256 * SLOTS
    row(
        f"{kind}: slots / blocks, bytes",
        slots / most,
        (AT_LEAST, 2.0),
        f"{slots / 2**20:.1f} MiB, {most / 2**20:.1f} at most, "
        f"{sum(every) / len(every) / 2**20:.1f} on average",
    )


def bench_own_work(model, n):
    "Time of a step that is not the model's, as a share of it."
    engine = Engine(model, SLOTS, num_blocks=SLOTS * 256 // SIZE, block_size=SIZE)
    inside = []
    call = model.forward

    def watched(*args, **how):
        took, out = timing.once(lambda: call(*args, **how))
        inside[-1] += took
        return out

    for r in requests_of(lengths_of("lognormal", n)):
        engine.submit(r)
    model.forward = watched
    shares = []
    while engine.has_unfinished_requests:
        inside.append(0.0)
        desk = engine.scheduler
        reads = bool(desk.waiting and None in desk.row_owners)
        took, _ = timing.once(engine.step)
        if not reads and inside[-1]:  # a step that only decodes
            shares.append((took - inside[-1]) / took)
    del model.forward
    row(
        "the engine's own work / a step",
        median(shares),
        (AT_MOST, 0.1),
        f"{len(shares)} steps that decode",
    )


def bench_waiting(many):
    "Time of a step while many wait, over that while ten do; each has a time limit."
    torch.manual_seed(0)
    model = Llama(
        LlamaConfig(d_model=8, n_layers=1, n_heads=1, vocab_size=20, max_len=256)
    ).eval()
    engines = {}
    for n in (10, many):
        engines[n] = Engine(model, SLOTS, max_queued_requests=n + SLOTS)
        for _ in range(n + SLOTS):
            engines[n].submit(Request([1, 2, 3], 250, timeout=1e6))
        engines[n].step()
    seconds = {n: [] for n in engines}
    for _ in range(20 if timing.quick else 200):
        for n, engine in engines.items():
            took, _ = timing.once(engine.step)
            seconds[n].append(took)
    few, most = (median(x) for x in seconds.values())
    row(
        f"a step while {many:,} wait / while 10 wait",
        most / few,
        (AT_MOST, 1.1),
        f"{1e3 * few:.2f} and {1e3 * most:.2f} ms, first come, first served",
    )


def bench_memory(n):
    "Bytes that Python holds, after a tenth of the requests and after all."
    torch.manual_seed(0)
    model = Llama(
        LlamaConfig(d_model=8, n_layers=1, n_heads=1, vocab_size=20, max_len=32)
    ).eval()
    engine = Engine(model, SLOTS, num_blocks=24, block_size=4, max_queued_requests=16)
    rnd = random.Random(0)

    def some(n):
        engine.run(
            Request([rnd.randrange(20) for _ in range(3)], rnd.randint(1, 3))
            for _ in range(n)
        )
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    first = some(n // 10)
    last = some(n - n // 10)
    tracemalloc.stop()
    row(
        f"memory after {n:,} requests / after {n // 10:,}",
        last / first,
        (AT_MOST, 1.1),
        f"{first / 2**10:.0f} and {last / 2**10:.0f} KiB",
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    timing.quick = asked.quick
    timing.keep_memory()
    torch.set_num_threads(1)
    model = decoder()
    n = 9 if timing.quick else asked.requests
    timing.head(f"{n} requests in {SLOTS} slots")
    for kind in ("lognormal", "uniform", "stories"):
        bench_kind(model, kind, n, asked.rounds)
        bench_bytes(model, kind, n)
    bench_own_work(model, n)
    bench_waiting(100 if timing.quick else 10_000)
    bench_memory(60 if timing.quick else 10_000)
    return 0 if timing.quick or not FAILED else 1


if __name__ == "__main__":
    sys.exit(main())
