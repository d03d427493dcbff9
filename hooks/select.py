"""Which saved tensors are worth storing, and what the graph holds of those that are not: a `KeptTensor` or a `Kept`.

To store what stays alive anyway gains nothing: leaves that require gradients, and modules' parameters. Buffers, the
input batch or a cache have other owners too, but that shows only in the owners of their storage, which the store looks
at later."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import Parameter

from tierstore.tensors.layout import detached
from tierstore.tensors.torch_names import DisableTorchFunction
from tierstore.tensors.uncompiled import uncompiled

from .below import may_become_an_output
from .traced import check_unchanged, traced_kept

_MIB = 2**20
_LEAST_HELD_SMALL_BYTES = 32 * _MIB
_ALWAYS_SMALL_BYTES = 2**16

attributes_of: Callable[[object], object] = object.__getstate__
"""The Python attributes that were set on a tensor; None: there are none. `tensor.__dict__` would create a dict."""

PLAIN_CLASSES = (torch.Tensor, Parameter)
"""Classes that define nothing of their own: no functions, and nothing that an alias or a copy would lose."""


def stays_alive(root: torch.Tensor) -> bool:
    """Whether the graph or a module holds a tensor's storage anyway. `root`: the tensor's base, or itself."""
    if root.requires_grad and root.is_leaf:
        return True
    return type(root) is not torch.Tensor and isinstance(root, Parameter)  # isinstance alone is slow here


def bytes_of(tensor: torch.Tensor) -> int:
    """The bytes of a tensor's elements. Sparse tensors and wrappers have no storage that could be asked."""
    if type(tensor) in PLAIN_CLASSES:
        return tensor.numel() * tensor.element_size()
    with DisableTorchFunction():  # a subclass need not see what the hooks do
        return tensor.numel() * tensor.element_size()


class SmallLimits(NamedTuple):
    """Which storages stay where they are for being small. Storing costs some tenths of a millisecond each way.

    Those under `least_bytes` always do, those of `min_bytes` or more never; those in between do as long as they are no
    more than `most_small_bytes` together, in one graph."""

    min_bytes: int
    least_bytes: int
    most_small_bytes: int


def small_limits(min_bytes: int | None, host_bytes: int) -> SmallLimits:
    """The limits of a scope: what the user gave, or a default under which small tensors cannot fill the memory.

    A GRU of 512 KiB states would otherwise keep four times its `host_bytes`."""
    if min_bytes is not None:
        return SmallLimits(max(min_bytes, 1), max(min_bytes, 1), 0)  # nothing is gained by storing no bytes
    return SmallLimits(_MIB, _ALWAYS_SMALL_BYTES, max(host_bytes, _LEAST_HELD_SMALL_BYTES))


class KeptTensor(tuple[torch.Tensor, int]):
    """A saved tensor that stays where it is, and its version. Changes in place are found, as PyTorch finds them.

    Backward gets what hooks that do nothing would give it: see NOTE [The same object] in `saved.py`.

    A tensor without a `grad_fn` is kept itself: no reference cycle can go through it. So memory that `param.data = new`
    has exchanged between forward and backward (as ZeRO-3 does) comes back. Any other tensor may be the result of the
    node that saves it. That node holds this object, so to keep the tensor itself would be a cycle. A detached alias is
    kept instead: autograd detaches what it gets of such a tensor in any case.

    A tuple, because it is made without a call of Python's."""

    __slots__ = ()

    @uncompiled
    def unpack(self) -> torch.Tensor:
        tensor, version = self
        if tensor._version != version:
            check_unchanged(tensor, version)
        return tensor

    def traced(self) -> torch.Tensor:
        """An operator gives a copy. Where that is not the same, `unpack` answers now."""
        tensor, version = self
        if tensor.layout is not torch.strided or tensor.is_complex():
            return self.unpack()
        return traced_kept(tensor, version)


class Kept:
    """A kept tensor of a subclass, or with attributes: what a `KeptTensor` would lose of it comes back too.

    Without a `grad_fn` it is kept itself, with class and attributes. Any other is kept as a detached alias, whose class
    and attributes are what the `__torch_dispatch__` of the subclass makes of them. That may depend on what has happened
    since, so autograd is given the tensor itself as long as that lives."""

    __slots__ = ("_itself", "_tensor", "_version")

    @uncompiled
    def __init__(self, tensor: torch.Tensor) -> None:
        self._itself: weakref.ref[torch.Tensor] | None = None
        with DisableTorchFunction():  # a subclass need not see what the hooks do
            self._tensor = tensor
            self._version: int = tensor._version
            if not tensor.is_leaf or may_become_an_output(tensor):
                self._tensor = torch.Tensor.detach(tensor)
                self._itself = weakref.ref(tensor)

    @uncompiled
    def unpack(self) -> torch.Tensor:
        tensor = self._tensor
        with DisableTorchFunction():
            check_unchanged(tensor, self._version)
        itself = None if self._itself is None else self._itself()
        return tensor if itself is None else itself

    def traced(self) -> torch.Tensor:
        """An operator would give a copy without class and attributes."""
        return self.unpack()


KEPT_CLASSES = (KeptTensor, Kept)


@uncompiled
def keep(tensor: torch.Tensor) -> KeptTensor | Kept:
    """What the graph holds of a tensor that stays where it is. `OffloadScope.pack` does the same for most of them."""
    if type(tensor) not in PLAIN_CLASSES:
        return Kept(tensor)
    if tensor.requires_grad:
        held = tensor if tensor.is_leaf else detached(tensor)
    elif may_become_an_output(tensor):
        held = detached(tensor)
    elif attributes_of(tensor) is None:
        held = tensor
    else:
        return Kept(tensor)
    return KeptTensor((held, held._version))
