"""Whose memory a storage is: torch's own, a slot of the store, or somebody else's.

The mark is an attribute of the storage's Python object, which PyTorch keeps for as long as the storage lives.
"""

from __future__ import annotations

import torch

__all__ = ["is_foreign", "mark_as_ours"]

_OURS = "_tierstore_slot"


def is_foreign(storage: torch.UntypedStorage) -> bool:
    """Whether the memory has owners that torch does not count: numpy, another process, a mapped file.

    Such a storage cannot be resized, because it was made from a pointer or came from another process, or it is shared.
    Storages over a slot of the store are made from a pointer too; `mark_as_ours` tells them apart. Of CUDA's storages
    PyTorch says always that they are shared (`Tensor.is_shared`). What one of them has sent to another process stays
    there when it is freed here (torch/csrc/CudaIPCTypes.cpp).
    """
    is_shared = storage.device.type != "cuda" and storage.is_shared()
    return (is_shared or not storage.resizable()) and _OURS not in storage.__dict__


def mark_as_ours(storage: torch.UntypedStorage) -> None:
    """Note that the storage lies over a slot of the store."""
    storage.__dict__[_OURS] = True
