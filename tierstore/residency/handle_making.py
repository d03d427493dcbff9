"""Makes handles and their records: of a tensor, and of one that was only tracked so far."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import cache, lru_cache

import torch

from ..disk.tier import Kind
from .handle import Handle, Record, StoriedRecord
from .layout import Layout, alias_of, in_dtype, layout_of
from .ownership import claim
from .torch_names import storage_address
from .tracked import TrackedTensor


class HandleFactory:
    """Makes the handles of one store. Any thread, outside of its modes.

    A record that was just made is not in the books yet. `note_release` takes a record whose handle has died."""

    def __init__(
        self,
        residency: object,
        note_release: Callable[[Record], None],
        keys: Iterator[int],
        *,
        keep_stories: bool = False,
    ) -> None:
        self.keys = keys
        self._new_record = StoriedRecord if keep_stories else Record
        self._residency = residency
        self._note_release = note_release

    def new(
        self,
        owner: object,
        tensor: torch.Tensor,
        layout: Layout,
        device: torch.device | None = None,
        root: weakref.ref[torch.Tensor] | None = None,
    ) -> Handle:
        """A handle for a strided tensor, which keeps its `owner` open.

        `device`: the accelerator that it lives on. `root`: the tensor's base, or itself; None: no other tensor will
        share the record."""
        storage = tensor.untyped_storage()
        source = alias_of(tensor, layout)
        nbytes = storage.nbytes() if tensor.numel() else 0
        handle = Handle(owner, source)
        key, address, layout = next(self.keys), storage_address(source), _same_layout(layout)
        handle.record = record = self._new_record(
            handle, self._note_release, key, nbytes, address, layout, _kind_of(layout.dtype)
        )
        record.root = root
        record.residency = self._residency
        record.device = device
        claim(record, storage)
        return handle

    def of_tracked(self, tracked: TrackedTensor) -> Handle:
        alias = tracked.alias
        if alias is None:
            raise RuntimeError(f"tensor {tracked.key} is registered already")
        layout = _same_layout(layout_of(alias))
        kind, nbytes = _kind_of(layout.dtype), tracked.log.packs[tracked.index][1]
        handle = Handle(tracked.log.store, alias_of(alias, layout))
        handle.record = record = self._new_record(
            handle, self._note_release, tracked.key, nbytes, tracked.address, layout, kind
        )
        record.version = tracked.version
        record.device, record.stream = tracked.device, tracked.stream
        record.root = tracked.root
        record.residency = self._residency
        claim(record, alias.untyped_storage())
        return handle

    def of_group(self, owner: object, memory: torch.Tensor, key: int, dtype: torch.dtype, num_members: int) -> Handle:
        """`memory`: uint8, shape [n], over a slot that is the record's from now on; of members of that dtype."""
        handle = self._of_members(owner, memory, len(memory), key, dtype, num_members)
        claim(handle.record, memory.untyped_storage())
        return handle

    def of_batch(
        self,
        owner: object,
        parts: dict[int, torch.Tensor],
        empty: torch.Tensor,
        key: int,
        dtype: torch.dtype,
        num_members: int,
    ) -> Handle:
        """`parts`: as `Handle.parts`, in order. `empty`: a tensor without bytes on the same device."""
        ranges = tuple([(first_byte, first_byte + part.nbytes) for first_byte, part in parts.items()])
        handle = self._of_members(owner, empty, ranges[-1][1], key, dtype, num_members)
        handle.parts, handle.record.ranges, handle.record.claims = parts, ranges, []
        return handle

    def _of_members(
        self, owner: object, memory: torch.Tensor, nbytes: int, key: int, dtype: torch.dtype, num_members: int
    ) -> Handle:
        source, address = in_dtype(memory, dtype), memory.data_ptr()
        handle, layout = Handle(owner, source), _same_layout(layout_of(source))
        handle.record = record = self._new_record(
            handle, self._note_release, key, nbytes, address, layout, _kind_of(dtype)
        )
        record.residency = self._residency
        record.num_members = num_members
        record.span = 0, nbytes
        return handle


@lru_cache(4096)
def _same_layout(layout: Layout) -> Layout:
    """An equal layout, to be shared: tensors have few geometries, and each layout is three objects."""
    return layout


@cache
def _kind_of(dtype: torch.dtype) -> Kind:
    return Kind(str(dtype).removeprefix("torch."), dtype.itemsize)
