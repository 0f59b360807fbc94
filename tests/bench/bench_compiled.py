"""Is a compiled step no slower? python tests/bench/bench_compiled.py

A decoder of 6 layers reads a prompt of 64 tokens and writes 256, the same ids
on all sides: by the compiled step with a fixed cache, and step by step in
Python with the growing cache (the peer) and with a fixed one. Ratios of
medians of processor time, steps of the sides in turn; the target is at most
1. Logits must agree at the first step and at the last. Compiling is not
counted, and said.

--quick           one small layer, four tokens: that everything runs
"""

import sys
from statistics import median

import torch

import timing
from tformer.inference.compiled import compile_decode_step
from tformer.models.llama import Llama, LlamaConfig
from tformer.nn.static_cache import new_static_cache

TARGET = timing.AT_MOST, 1.0
FAILED = []


def decoder(quick):
    "The model, how long its prompt is, and how many tokens it writes."
    torch.manual_seed(0)
    size = (
        dict(d_model=16, n_layers=1, n_heads=2, vocab_size=50)
        if quick
        else dict(d_model=384, n_layers=6, n_heads=6, vocab_size=10_000)
    )
    prompt, new = (4, 4) if quick else (64, 256)
    model = Llama(LlamaConfig(**size, max_len=prompt + new))
    return model.eval().requires_grad_(False), prompt, new


def sides_of(model, step, ids, prompt):
    "For each side a function of a step's ids, its cache filled."
    b = len(ids)
    max_len = model.max_len
    caches = {
        "compiled": new_static_cache(model, b, max_len),
        "growing": model.new_cache(b),
        "fixed": new_static_cache(model, b, max_len),
    }
    for cache in caches.values():
        model(ids[:, :prompt], cache=cache)
    return {
        name: lambda x, name=name, cache=cache: (step if name == "compiled" else model)(
            x, cache=cache
        )
        for name, cache in caches.items()
    }


def must_agree(found, when):
    "Otherwise nothing is compared."
    for name, y in found.items():
        far = (y - found["growing"]).abs().max().item()
        assert far < 1e-4, f"{name} and growing differ at {when}: {far:.1e}"


def measure(model, step, b, prompt, new):
    "Both ratios for a batch of b."
    ids = torch.randint(0, model.config.vocab_size, (b, prompt + new))
    sides = sides_of(model, step, ids, prompt)
    first, _ = timing.once(
        lambda: step(ids[:, prompt : prompt + 1], cache=_scratch(model, ids, prompt))
    )
    times = {name: [] for name in sides}
    for i in range(prompt, prompt + new):
        found = {}
        for name in list(sides)[:: 1 if i % 2 else -1]:
            took, found[name] = timing.once(lambda: sides[name](ids[:, i : i + 1]))
            times[name].append(took)
        if i in (prompt, prompt + new - 1):
            must_agree(found, f"token {i}")
    mid = {name: 1e3 * median(t) for name, t in times.items()}
    detail = ", ".join(f"{name} {ms:.2f}" for name, ms in mid.items())
    for peer, target in (("growing", TARGET), ("fixed", None)):
        name = f"compiled / eager {peer}, batch {b}"
        value = mid["compiled"] / mid[peer]
        timing.row(name, value, target, f"{detail} ms; compiling {first:.0f} s")
        if target and value > target[1]:
            FAILED.append((name, value))


def _scratch(model, ids, prompt):
    "Another cache, for the step that is compiled."
    cache = new_static_cache(model, len(ids), model.max_len)
    model(ids[:, :prompt], cache=cache)
    return cache


def main():
    timing.begin(__doc__)
    model, prompt, new = decoder(timing.quick)
    # where everything has to run, and nothing to be fast: no C++ is made
    step = compile_decode_step(model, **(dict(backend="eager") if timing.quick else {}))
    timing.head(f"A step of decoding, prompt {prompt}, {new} tokens")
    with torch.no_grad():
        for b in (1, 8):
            measure(model, step, b, prompt, new)
    return 0 if timing.quick or not FAILED else 1


if __name__ == "__main__":
    sys.exit(main())
