"""Compare losses and optimizers with PyTorch's: python tests/bench/bench_optim.py

Every row is a ratio of two things that run in turn in this process: the
median, over the rounds, of our processor time divided by the peer's, or of the
most bytes that tensors take at a time, as PyTorch's profiler counts them,
gradients included. Before anything is timed, both must have computed the same
numbers. The loss is that of 2,048 tokens over 32,000 ids, from vectors to the
gradients of vectors and weights; the parameters are those of a model of 6
layers, d 384 and 10,000 ids. One thread.

--quick    small sizes, one round: that everything runs, not how fast
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent))
import timing
from tformer.training.losses import chunked_cross_entropy
from tformer.training.optimizers import SGD, AdamW, Muon, RMSprop, clip_grad_norm_


def peak(work):
    "The most bytes that tensors take at a time while this runs."
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    sizes = [
        event.nbytes()
        for event in seen.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    return torch.tensor(sizes).cumsum(0).max().item()


def close(ours, peer, tolerance=1e-5):
    for a, b in zip(ours, peer, strict=True):
        worst = (a - b).abs().max()
        if not worst <= tolerance * max(1, b.abs().max()):
            sys.exit(f"they differ by {worst:g}")


def losses():
    n, d, vocab = (64, 16, 500) if timing.quick else (2048, 384, 32_000)
    h = torch.randn(n, d).requires_grad_()
    w = (torch.randn(vocab, d) / d**0.5).requires_grad_()
    y = torch.randint(vocab, (n,))

    def whole():
        loss = F.cross_entropy(h @ w.mT, y)
        return loss, *torch.autograd.grad(loss, (h, w))

    def chunked():
        loss = chunked_cross_entropy(h, w, y)
        return loss, *torch.autograd.grad(loss, (h, w))

    close(chunked(), whole())
    times = timing.in_turn({"ours": chunked, "peer": whole}, 5)
    timing.head(f"chunked_cross_entropy: {n} tokens, d {d}, {vocab} ids")
    timing.row(
        "time, forward and backward",
        times["ours"] / times["peer"],
        (timing.AT_MOST, 1.1),
        f"{times['ours']:.2f} s",
    )
    sizes = peak(chunked), peak(whole)
    timing.row(
        "memory",
        sizes[0] / sizes[1],
        (timing.AT_MOST, 0.3),
        f"{sizes[0] / 1e6:.0f} of {sizes[1] / 1e6:.0f} MB",
    )


def parameters():
    "Of a model of 6 layers, with slopes."
    d, ids, layers = (16, 50, 2) if timing.quick else (384, 10_000, 6)
    shapes = [(ids, d), (ids, d), (d,), (d,)] + layers * [
        (3 * d, d),
        (d, d),
        (4 * d, d),
        (d, 4 * d),
        (3 * d,),
        (d,),
        (4 * d,),
        (d,),
        (d,),
        (d,),
        (d,),
        (d,),
    ]
    params = [nn.Parameter(torch.randn(s)) for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p)
    return params


def twice(params):
    copies = [nn.Parameter(p.detach().clone()) for p in params]
    for p, q in zip(params, copies, strict=True):
        q.grad = p.grad.clone()
    return copies


def optimizers():
    timing.head("a step of an optimizer, against torch.optim (foreach)")
    peers = torch.optim
    for name, make, peer, target in (
        ("AdamW", AdamW, lambda p: peers.AdamW(p, foreach=True), 1.1),
        (
            "SGD, momentum 0.9",
            lambda p: SGD(p, momentum=0.9),
            lambda p: peers.SGD(p, 1e-2, momentum=0.9, foreach=True),
            None,
        ),
        ("RMSprop", RMSprop, lambda p: peers.RMSprop(p, foreach=True), None),
    ):
        ours = parameters()
        theirs = twice(ours)
        a = make(ours)
        b = peer(theirs)
        compare(name, a, b, ours, theirs, target)
    ours = [p for p in parameters() if p.ndim == 2]
    if hasattr(peers, "Muon"):
        theirs = twice(ours)
        compare("Muon", Muon(ours), peers.Muon(theirs), ours, theirs, None, 3)


def compare(name, a, b, ours, theirs, target, rounds=15):
    a.step(), b.step()
    close(ours, theirs)
    times = timing.in_turn({"ours": a.step, "peer": b.step}, rounds)
    n = sum(p.numel() for p in ours)
    timing.row(
        name,
        times["ours"] / times["peer"],
        target and (timing.AT_MOST, target),
        f"{1e3 * times['ours']:.1f} ms for {n / 1e6:.1f} M numbers",
    )


def clipping():
    timing.head("clipping, against torch.nn.utils")
    ours = parameters()
    theirs = twice(ours)

    def clip():
        return clip_grad_norm_(ours, 1e9)

    def peer():
        return nn.utils.clip_grad_norm_(theirs, 1e9, foreach=True)

    close([clip()], [peer()])
    times = timing.in_turn({"ours": clip, "peer": peer}, 15)
    timing.row(
        "clip_grad_norm_",
        times["ours"] / times["peer"],
        None,
        f"{1e3 * times['ours']:.1f} ms",
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    timing.quick = timing.quick or parser.parse_args(argv).quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    timing.keep_memory()
    losses()
    optimizers()
    clipping()


if __name__ == "__main__":
    main()
