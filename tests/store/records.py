"""Handles and their records, without a store."""

from collections import deque
from typing import Any, cast

import torch

from tierstore.disk.tier import Kind
from tierstore.residency.handle import Handle, Record
from tierstore.tensors.layout import layout_of

__all__ = ["made_handle"]


def made_handle(source: torch.Tensor, key: int = 1, released: deque[Record] | None = None) -> Handle:
    """Of a tensor that it holds from then on; `released` gets its record when it dies."""
    handle = Handle(cast("Any", None), source)
    note_release = (deque() if released is None else released).append
    kind = Kind(str(source.dtype).removeprefix("torch."), source.itemsize)
    handle.record = Record(handle, note_release, key, source.nbytes, source.data_ptr(), layout_of(source), kind)
    return handle
