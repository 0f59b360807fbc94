"""A card that is only pretended: it computes on the CPU, and refuses to mix.

Where there is no card, code that mixes tensors of the CPU with tensors of a card
cannot be seen to fail.  Under `PretendedCard` it fails as it would there.  The memory
of each tensor belongs to the CPU or to the pretended card; ``to``, ``cuda``, ``cpu``
and ``device=`` move between them.  All values are real, so code that reads them
(``tolist``, ``item``, an ``if``) runs as it is.  PyTorch's FakeTensorMode, which has
no values, cannot go that far.
"""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

CARD = torch.device("cuda", 0)
CPU = torch.device("cpu")
# what a card does not compute: numbers on it are read by ``cpu`` first
UNREADABLE = {"torch.Tensor.numpy", "torch.Tensor.__array__"}
# between two devices these copy
COPIES = {
    "torch.Tensor.copy_",
    "torch.Tensor.data.__set__",
    "_has_compatible_shallow_copy_type",
}
# elsewhere a number on the CPU, of no axis, may meet tensors on a card
STRICT = {
    "cat",
    "concat",
    "stack",
    "gather",
    "index_select",
    "index_copy",
    "index_copy_",
    "index_fill",
    "scatter",
    "scatter_",
    "equal",
    "matmul",
    "bmm",
    "linear",
    "embedding",
    "take_along_dim",
}
MIXED = (
    "Expected all tensors to be on the same device, but found at least two "
    "devices, cuda:0 and cpu!"
)


class PretendedCard(TorchFunctionMode):
    "While it is entered, the device ``cuda`` can be used, as said above."

    def __init__(self):
        super().__init__()
        self._held = {}  # address of a memory: a weak reference to it
        self._most = 10_000  # with so many, those of freed memory are dropped
        self.num_calls = 0  # that had a tensor on the card

    def __enter__(self):
        # a card has a generator of its own, which somebody may want to leave as it was
        self._patches = [
            mock.patch.object(
                torch.cuda, "get_rng_state", lambda device: torch.get_rng_state()
            ),
            mock.patch.object(torch.cuda, "set_rng_state", lambda state, device: None),
        ]
        for patch in self._patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *exception):
        for patch in self._patches:
            patch.stop()
        return super().__exit__(*exception)

    def holds(self, tensor):
        "Whether a tensor is on the card; a sparse one has no memory of its own."
        return not tensor.is_sparse and tensor.untyped_storage()._cdata in self._held

    def keep(self, result):
        "Let the tensors of a result be on the card."
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and not x.is_sparse:
                memory = x.untyped_storage()
                # a weak reference keeps the address from being used again
                self._held[memory._cdata] = StorageWeakRef(memory)
        if len(self._held) > self._most:
            self._held = {
                at: ref for at, ref in self._held.items() if not ref.expired()
            }
            self._most = 2 * len(self._held) + 10_000
        return result

    def device(self, tensor):
        "Where a tensor is, or says to be."
        if tensor.is_meta:
            return tensor.device
        return CARD if self.holds(tensor) else CPU

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = resolve_name(func) or getattr(func, "__name__", "")
        short = name.removesuffix(".__get__").rsplit(".", 1)[-1]
        if name.endswith(".__get__") and short in PROPERTIES:
            return PROPERTIES[short](self.device(args[0]))
        if short == "get_device":
            return self.device(args[0]).index or 0
        if short in ("to", "cuda", "cpu", "as_tensor", "asarray", "type_as"):
            return self._move(func, short, args, kwargs)
        return self._compute(func, name, args, kwargs)

    def _move(self, func, short, args, kwargs):
        "A call that gives its first argument another device, or its own."
        x, *rest = args
        where = self.device(x) if isinstance(x, torch.Tensor) else CPU
        source = where
        if short in ("cuda", "cpu"):
            target = torch.device(short)
            rest = []
            func = torch.Tensor.to
            kwargs = {"dtype": x.dtype}
        elif rest and isinstance(rest[0], torch.Tensor):  # to(other)
            target = self.device(rest[0])
        elif short in ("as_tensor", "asarray"):
            target = kwargs.pop("device", None) or where
        else:
            target = kwargs.pop("device", None)
            if rest and (rest[0] is None or isinstance(rest[0], (str, torch.device))):
                target, *rest = rest  # to(device, dtype, ...)
            if rest:
                kwargs["dtype"] = rest[0]
            kwargs.setdefault("dtype", None)
            kwargs["dtype"] = kwargs["dtype"] or x.dtype
            rest = []
        target = torch.device(where if target is None else target)
        if target.type == "cuda" and target.index:
            raise RuntimeError(f"invalid device ordinal: {target}; there is one card")
        if target.type == "meta":
            return func(x, *rest, **kwargs, device="meta")
        found = func(x, *rest, **kwargs)
        if target.type != source.type and isinstance(x, torch.Tensor):
            same = found.untyped_storage()._cdata == x.untyped_storage()._cdata
            found = found.clone() if same else found
        return self.keep(found) if target.type == "cuda" else found

    def _compute(self, func, name, args, kwargs):
        "Any other call: its tensors must be on one device."
        short = name.rsplit(".", 1)[-1]
        tensors = [
            x
            for x in tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor) and not x.is_meta
        ]
        on_card = [x for x in tensors if self.holds(x)]
        if short in ("__getitem__", "__setitem__") and not self.holds(args[0]):
            # an index of no axis is read as a number
            on_card = [x for x in on_card if x.ndim]
        self.num_calls += bool(on_card)
        asked = kwargs.get("device")
        asked = None if asked is None else torch.device(asked)
        if asked is not None and asked.type == "cuda":
            kwargs["device"] = "cpu"
        to_card = bool(on_card) if asked is None else asked.type == "cuda"
        if on_card and name in UNREADABLE:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use "
                "Tensor.cpu() to copy the tensor to host memory first."
            )
        if kwargs.get("generator") is not None and to_card:
            raise RuntimeError(
                "Expected a 'cuda' device type for generator but found 'cpu'"
            )
        if on_card and name not in COPIES:
            self._refuse_mixed(short, args, tensors)
        found = func(*args, **kwargs)
        return self.keep(found) if to_card else found

    def _refuse_mixed(self, short, args, tensors):
        strangers = [x for x in tensors if not self.holds(x)]
        if short in ("__getitem__", "__setitem__") and self.holds(args[0]):
            strangers = []
            if short == "__setitem__" and isinstance(args[2], torch.Tensor):
                index = [x for x in tree_leaves(args[1]) if isinstance(x, torch.Tensor)]
                # without an index of tensors this is a copy
                strangers = [args[2]] if index and not self.holds(args[2]) else []
        if any(x.ndim or short in STRICT for x in strangers):
            raise RuntimeError(f"{MIXED} (when calling {short})")


PROPERTIES = {
    "device": lambda device: device,
    "is_cuda": lambda device: device.type == "cuda",
    "is_cpu": lambda device: device.type == "cpu",
}


# name: whether a card refuses it, and what is done with the same numbers on the CPU
# and on the card, and with row numbers on the card
MIXTURES = {
    "a sum": (True, lambda here, there, rows: here + there),
    "a sum in place": (True, lambda here, there, rows: there.add_(here)),
    "a product": (True, lambda here, there, rows: there[None] @ here[:, None]),
    "a concatenation": (True, lambda here, there, rows: torch.cat([here, there])),
    "a choice": (True, lambda here, there, rows: torch.where(here > 1, there, there)),
    "rows of the CPU": (
        True,
        lambda here, there, rows: there.index_select(0, rows.cpu()),
    ),
    "rows of the card": (True, lambda here, there, rows: here[rows]),
    "rows to gather": (True, lambda here, there, rows: there.gather(0, rows.cpu())),
    "values at rows": (
        True,
        lambda here, there, rows: there.__setitem__(rows, here[:2]),
    ),
    "an embedding": (
        True,
        lambda here, there, rows: F.embedding(rows.cpu(), there[:, None]),
    ),
    "attention": (
        True,
        lambda here, there, rows: F.scaled_dot_product_attention(
            *[x.view(1, 1, 3, 2) for x in (there, there, here)]
        ),
    ),
    "a comparison": (True, lambda here, there, rows: torch.equal(here, there)),
    "NumPy": (True, lambda here, there, rows: there.numpy()),
    "draws": (
        True,
        lambda here, there, rows: torch.rand(
            3, generator=torch.Generator(), device="cuda"
        ),
    ),
    "draws in place": (
        True,
        lambda here, there, rows: there.uniform_(generator=torch.Generator()),
    ),
    "a number": (False, lambda here, there, rows: there * here[1]),
    "a number to fill with": (
        False,
        lambda here, there, rows: there.masked_fill(there > 1, here[1]),
    ),
    "a number of the card as an index": (
        False,
        lambda here, there, rows: here[rows[1]] + here[:, None][rows[0], 0],
    ),
    "an index": (False, lambda here, there, rows: there[rows.cpu()]),
    "values in a slice": (
        False,
        lambda here, there, rows: there.__setitem__(slice(2), here[:2]),
    ),
    "a copy": (False, lambda here, there, rows: here.copy_(there)),
    "to the card": (False, lambda here, there, rows: here.to(there) + there),
    "to the CPU": (False, lambda here, there, rows: there.cpu().numpy()),
    "new tensors": (
        False,
        lambda here, there, rows: (
            there.new_zeros(6)
            + there
            + torch.ones(6, device=there.device)
            + torch.zeros_like(there)
        ),
    ),
    "a list": (False, lambda here, there, rows: here + torch.tensor(there.tolist())),
}


def refusal(refused):
    "Expect the error of a mixture, or none."
    return (
        pytest.raises((RuntimeError, TypeError), match=r"device|numpy")
        if refused
        else nullcontext()
    )
