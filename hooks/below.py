"""Saved-tensor hooks that are called below autograd. Selective checkpointing does so with the outputs that it keeps.

NOTE [Below autograd]
A dispatch mode sees an operator's output after its kernel. In backward it gives that output back in the place of a new
one. Autograd and ADInplaceOrView are shut out there, with two consequences:

* `detach` gives a tensor with a version counter of its own, so a change of the output in place would never be seen.
* What is given back becomes the output of a node of autograd, and gets a history. So it must be a new tensor each time,
  never the one that the store or the program holds.

torch 2.15 calls the hooks around a region there (`respect_saved_tensors_hooks=True`); so do the contexts of
`selective.py`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch
from torch.utils.checkpoint import checkpoint

from tierstore.tensors.layout import outside_of_modes
from tierstore.tensors.torch_names import AD_INPLACE_OR_VIEW, AUTOGRAD, SetExcludeDispatchKeyGuard, is_key_excluded
from tierstore.tensors.uncompiled import uncompiled

HOOKS_ARE_CALLED_BELOW = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
"""Whether this release of torch calls hooks below autograd. If it does not, no pack has to ask where it is called."""


class Packed(Protocol):
    """The object that a pack hook of ours gives the graph to hold."""

    def unpack(self) -> torch.Tensor: ...

    def traced(self) -> torch.Tensor:
        """Called while backward is traced into a graph: gives the saved tensor each time that the traced graph runs."""


def is_below_autograd() -> bool:
    """Whether this thread is below autograd, where tensors do not share version counters. Takes 0.2 microseconds."""
    return is_key_excluded(AD_INPLACE_OR_VIEW) and not torch.is_inference_mode_enabled()


def may_become_an_output(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no history but may get one, as the outputs of a node do below autograd."""
    return not tensor.requires_grad and is_key_excluded(AUTOGRAD) and not torch.is_inference_mode_enabled()


@contextmanager
def sharing_versions() -> Iterator[None]:
    """Inside it, a view or a detached tensor shares the version counter of its source, as above autograd."""
    with SetExcludeDispatchKeyGuard(AD_INPLACE_OR_VIEW, False):
        yield


def version_counter_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without elements that has the version of another one, now and later. Also below autograd.

    Where torch does not exchange the elements (a sparse tensor), it has those of the other one."""
    with outside_of_modes():
        alias = tensor.detach()
        with suppress(RuntimeError):
            alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias


class HeldTensor:
    """A tensor that a pack hook of ours has packed below autograd: see NOTE [Below autograd]."""

    __slots__ = ("_packed",)

    @uncompiled
    def __init__(self, pack: Callable[[torch.Tensor], Packed], tensor: torch.Tensor) -> None:
        with sharing_versions():
            self._packed = pack(tensor)

    @uncompiled
    def unpack(self) -> torch.Tensor:
        with sharing_versions():
            return self._packed.unpack().detach()

    def traced(self) -> torch.Tensor:
        return self.unpack()
