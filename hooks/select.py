"""Which saved tensors are worth storing, and what stands for those that are not.

What stays alive anyway gains nothing by being stored: leaves that require gradients are held by the graph itself,
parameters (frozen ones too) by their module. What else somebody holds (buffers, the input batch, a cache) shows only
in the storage's owners; that is looked at later, by the store.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch.nn import Parameter

from tierstore.torch_names import DisableTorchFunction
from tierstore.uncompiled import uncompiled

from .below import may_become_an_output, sharing_versions
from .traced import check_unchanged, traced_kept

__all__ = ["PLAIN_CLASSES", "Kept", "attributes_of", "bytes_of", "stays_alive"]

attributes_of: Callable[[object], object] = object.__getstate__
"""The Python attributes that were set on a tensor; None: there are none. `tensor.__dict__` would make it a dict."""

PLAIN_CLASSES = (torch.Tensor, Parameter)
"""Classes that define nothing of their own: neither functions, nor what an alias or a copy of a tensor would lose."""


def stays_alive(tensor: torch.Tensor, root: torch.Tensor) -> bool:
    """Whether the graph or a module holds the tensor's storage anyway; `root` is its base, or itself."""
    if root.requires_grad and root.is_leaf:
        return True
    return type(root) is not torch.Tensor and isinstance(root, Parameter)  # isinstance alone is slow here


def bytes_of(tensor: torch.Tensor) -> int:
    """What a saved tensor occupies, as far as its elements go; sparse and wrapped ones have no storage to ask."""
    if type(tensor) in PLAIN_CLASSES:
        return tensor.numel() * tensor.element_size()
    with DisableTorchFunction():  # a subclass need not see what the hooks do
        return tensor.numel() * tensor.element_size()


class Kept:
    """A saved tensor that stays where it is, guarded against changes in place as PyTorch would.

    What comes back is what hooks that do nothing would give back (NOTE [The same object] in `saved.py`).

    A tensor without a `grad_fn` is kept itself: no reference cycle can go through it, its class and attributes come
    back, and so does the memory of `param.data = new` between forward and backward (as ZeRO-3 does).

    Any other tensor may be the result of the node that saves it, and that node holds this object: a cycle. So a
    detached alias is kept. Autograd makes a new tensor of what it gets here in any case, by `detach`, so class and
    attributes are what a subclass's `__torch_dispatch__` makes of them. That may depend on what has happened since, so
    the object itself is given while it lives.
    """

    __slots__ = ("_is_plain", "_itself", "_tensor", "_version")

    @uncompiled
    def __init__(self, tensor: torch.Tensor) -> None:
        self._itself: weakref.ref[torch.Tensor] | None = None
        if type(tensor) in PLAIN_CLASSES:
            self._version: int = tensor._version
            self._is_plain = attributes_of(tensor) is None or tensor.requires_grad
            if may_become_an_output(tensor):
                with sharing_versions():
                    self._tensor = tensor.detach()
            else:
                self._tensor = tensor if tensor.is_leaf else tensor.detach()
            return
        self._is_plain = False
        with DisableTorchFunction():  # a subclass need not see what the hooks do
            self._tensor = tensor
            self._version = tensor._version
            if not tensor.is_leaf or may_become_an_output(tensor):
                self._tensor = torch.Tensor.detach(tensor)
                self._itself = weakref.ref(tensor)

    @uncompiled
    def unpack(self) -> torch.Tensor:
        """The tensor.

        Raises:
            ModifiedInPlaceError: it was changed in place since.
        """
        tensor = self._tensor
        if self._is_plain:
            check_unchanged(tensor, self._version)
            return tensor
        with DisableTorchFunction():
            check_unchanged(tensor, self._version)
        itself = None if self._itself is None else self._itself()
        return tensor if itself is None else itself

    def traced(self) -> torch.Tensor:
        """Under a trace of the graph: what `unpack` gives, each time that the traced graph runs.

        An operator gives copies, without class and attributes.
        """
        tensor = self._tensor
        if not self._is_plain or tensor.layout is not torch.strided or tensor.is_complex():
            return self.unpack()
        return traced_kept(tensor, self._version)
