"""What tests of parts and models draw, compare, skip and kill with."""

import os
import re
import signal
import sys
import time
from contextlib import contextmanager

import pytest
import torch

plain_only = pytest.mark.skipif(
    "TFORMER_SHAPES" in os.environ,
    reason="slow, or not to be traced, where signatures are executed",
)


def by_day(values, *usual):
    """The values of a parameter, of which all but the usual are marked nightly.

    `make test` runs one value of each family, `make nightly` the others.
    """
    missing = set(usual) - set(values)
    if missing:
        raise ValueError(f"no values of this parameter: {sorted(missing)}")
    return [
        value if value in usual else pytest.param(value, marks=pytest.mark.nightly)
        for value in values
    ]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed))


def draw_ids(*shape, high, low=0, seed=0):
    return torch.randint(low, high, shape, generator=generator(seed))


@torch.no_grad()
def spread(module, std=0.1):
    "Every parameter drawn anew; weights of norms around 1."
    for i, (name, p) in enumerate(module.named_parameters()):
        if p.requires_grad:
            gain = p.ndim == 1 and name.endswith("weight")
            p.copy_(std * randn(*p.shape, seed=100 + i) + gain)
    return module.eval()


def close(ours, reference, tolerance=1e-5):
    "The parity of the course: relative to the largest number, at least 1."
    assert ours.shape == reference.shape and ours.dtype == reference.dtype
    worst = (ours - reference).abs().max().item()
    assert worst <= tolerance * max(1, reference.abs().max().item())


def equal_to_peer(ours, theirs, ids, their_name):
    "Logits, and the gradient of every parameter, whose peer has that name."
    for model in (ours, theirs):
        model.zero_grad()
    a = ours(ids)
    b = theirs(ids).logits
    close(a, b)
    tilt = randn(*a.shape, seed=1)
    (a * tilt).mean().backward()
    (b * tilt).mean().backward()
    peers = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        close(p.grad, peers[their_name(name)].grad)
        assert p.grad.abs().max() > 0, name


def equal_models(a, b):
    "The same tensors under the same names, bit for bit."
    a = a.state_dict()
    b = b.state_dict()
    assert list(a) == list(b)
    return all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def padded(b=3, t=12):
    "Positions of rows without padding, padded on the left, on the right."
    at = torch.arange(t)[None]
    return torch.cat([at, (at - 4).clamp(min=-1), torch.where(at < t - 3, at, -1)])[:b]


def child(function, lives=None):
    "Run it in a fork; killed with -9 after some seconds, if any."
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except BaseException:
            os._exit(7)
    if lives is not None:
        time.sleep(lives)
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def die_after(calls, names=("fsync", "rename", "replace", "mkdir")):
    "From now on this process is killed after so many calls to the disk."
    left = [calls]

    def deadly(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in names:
        setattr(os, name, deadly(getattr(os, name)))


def accepts(validator, *args, **kwargs):
    "Return whether a validator lets its arguments through, returning None."
    try:
        return validator(*args, **kwargs) is None
    except ValueError:
        return False


def says(sentence, error=ValueError):
    "Expect an error whose message is exactly this sentence."
    return pytest.raises(error, match=f"^{re.escape(sentence)}$")


def raise_interrupt():
    raise KeyboardInterrupt


def send_ctrl_c():
    signal.raise_signal(signal.SIGINT)


@contextmanager
def interrupted_at(n, is_inside, interrupt=raise_interrupt):
    """Interrupt at the n-th place where Python looks for signals.

    That is where a function begins, and after a call of what is written in C.
    ``is_inside`` tells of a frame and an event whether it counts.  What is yielded
    is a list of how many places are left.
    """
    left = [n]

    def profile(frame, event, arg):
        if event in ("call", "c_return") and is_inside(frame, event):
            left[0] -= 1
            if left[0] == 0:
                interrupt()

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield left
    finally:
        sys.setprofile(before)
