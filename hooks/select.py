"""Which saved tensors are worth storing, and what stands for those that are not.

What stays alive anyway gains nothing by being stored: leaves that require gradients are held by the graph itself,
parameters (frozen ones too) by their module. What else somebody holds (buffers, the input batch, a cache) shows only
in the storage's owners; that is looked at later, by the store.
"""

from __future__ import annotations

import torch
from torch.nn import Parameter

from tierstore.uncompiled import uncompiled

from .traced import check_unchanged, traced_kept

__all__ = ["Kept", "stays_alive"]


def stays_alive(tensor: torch.Tensor, root: torch.Tensor) -> bool:
    """Whether the graph or a module holds the tensor's storage anyway; `root` is its base, or itself."""
    if root.requires_grad and root.is_leaf:
        return True
    return type(root) is not torch.Tensor and isinstance(root, Parameter)  # isinstance alone is slow here


class Kept:
    """A saved tensor that stays where it is, guarded against changes in place as PyTorch would.

    A leaf that requires gradients is kept itself: it cannot make a reference cycle, and `param.data = new` between
    forward and backward (as ZeRO-3 does) must be seen. Of anything else a detached alias is kept.
    """

    __slots__ = ("_tensor", "_version")

    @uncompiled
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor if tensor.is_leaf and tensor.requires_grad else tensor.detach()
        self._version: int = tensor._version

    @uncompiled
    def unpack(self) -> torch.Tensor:
        """The tensor.

        Raises:
            ModifiedInPlaceError: it was changed in place since.
        """
        check_unchanged(self._tensor, self._version)
        return self._tensor

    def traced(self) -> torch.Tensor:
        """Under a trace of the graph: what `unpack` gives, each time that the traced graph runs."""
        tensor = self._tensor
        if tensor.layout is not torch.strided or tensor.is_complex():
            return self.unpack()
        return traced_kept(tensor, self._version)
