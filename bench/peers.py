"""What people use today to take saved tensors out of memory: hooks around the forward pass, checkpointing.

Written the way their own documentation shows them, so that the comparison is with what a reader would get.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpoint_blocks", "detach_only", "file_per_tensor", "save_on_cpu"]

FILE_PER_TENSOR_MIN_ELEMENTS = 1000
"""The tutorial's SAVE_ON_DISK_THRESHOLD."""


class SavedFile:
    """A file that holds one saved tensor and is removed when autograd drops the packed object."""

    def __init__(self, directory: Path) -> None:
        descriptor, name = tempfile.mkstemp(suffix=".pt", dir=directory)
        open(descriptor, "wb").close()
        self.path = Path(name)

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)


def file_per_tensor(directory: Path) -> saved_tensors_hooks:
    """Save each tensor to a file of its own in pack, load it in unpack.

    Follows the PyTorch tutorial "Hooks for autograd saved tensors", section "Saving tensors to disk".
    `torch.save` of a view writes the whole storage, as it does there.
    """

    def pack(tensor: Tensor) -> Tensor | SavedFile:
        if tensor.numel() < FILE_PER_TENSOR_MIN_ELEMENTS:
            return tensor
        file = SavedFile(directory)
        torch.save(tensor, file.path)
        return file

    def unpack(packed: Tensor | SavedFile) -> Tensor:
        return packed if isinstance(packed, Tensor) else torch.load(packed.path)

    return saved_tensors_hooks(pack, unpack)


def detach_only() -> saved_tensors_hooks:
    """The cheapest pair of hooks that makes no reference cycle: what any Python hook costs."""
    return saved_tensors_hooks(lambda tensor: tensor.detach(), lambda packed: packed)


def checkpoint_blocks(blocks: Iterable[nn.Module]) -> None:
    """Have each run again in backward, instead of saving what is inside (`torch.utils.checkpoint`, non-reentrant)."""
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
