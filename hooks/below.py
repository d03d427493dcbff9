"""What selective checkpointing keeps, it keeps below autograd: saved-tensor hooks that are called there need more care.

NOTE [Below autograd]
A dispatch mode sees an operator's output after its kernel, and gives it back in backward in the place of one. There
autograd and ADInplaceOrView are shut out: `detach` gives a tensor with a version counter of its own, so a change in
place of the output would never be seen. And what is given back becomes the output of a node of autograd: it gets a
history. It must be a new tensor each time, never the one that the store or the program holds.

torch 2.15 calls the hooks around a region there (`respect_saved_tensors_hooks=True` of `torch.utils.checkpoint`), and
our own contexts do (`selective.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch.utils.checkpoint import checkpoint

from tierstore.torch_names import AD_INPLACE_OR_VIEW, AUTOGRAD, SetExcludeDispatchKeyGuard, is_key_excluded
from tierstore.uncompiled import uncompiled

__all__ = ["HOOKS_ARE_CALLED_BELOW", "HeldTensor", "is_below_autograd", "may_become_an_output", "sharing_versions"]

HOOKS_ARE_CALLED_BELOW = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
"""Whether this torch calls hooks below autograd; where it does not, no pack has to ask."""


class Packed(Protocol):
    """What a pack hook of ours returns."""

    def unpack(self) -> torch.Tensor: ...


def is_below_autograd() -> bool:
    """Whether this thread is below autograd, where tensors do not share version counters. 0.2 microseconds."""
    return is_key_excluded(AD_INPLACE_OR_VIEW) and not torch.is_inference_mode_enabled()


def may_become_an_output(tensor: torch.Tensor) -> bool:
    """Whether a tensor without a history may get one: below autograd, the outputs of a node have none yet.

    True inside of `sharing_versions` too.
    """
    return not tensor.requires_grad and is_key_excluded(AUTOGRAD) and not torch.is_inference_mode_enabled()


@contextmanager
def sharing_versions() -> Iterator[None]:
    """Inside it, views and detached tensors share the version counter of what they are made of, as above autograd."""
    with SetExcludeDispatchKeyGuard(AD_INPLACE_OR_VIEW, False):
        yield


class HeldTensor:
    """A tensor that was packed below autograd: see NOTE [Below autograd].

    Args:
        pack: a pack hook of ours.
        tensor: what it packs.
    """

    __slots__ = ("_packed",)

    @uncompiled
    def __init__(self, pack: Callable[[torch.Tensor], Packed], tensor: torch.Tensor) -> None:
        with sharing_versions():
            self._packed = pack(tensor)

    @uncompiled
    def unpack(self) -> torch.Tensor:
        """A new tensor over the bytes. Raises what the `unpack` of what was packed raises."""
        with sharing_versions():
            return self._packed.unpack().detach()

    def traced(self) -> torch.Tensor:
        """Under a trace likewise: what is held below autograd is in no graph that is traced."""
        return self.unpack()
