"""Handles, and the records behind them.

Code outside the store holds a `Handle`. When its last reference goes, the record behind it is released. A `Record` is
the store's own bookkeeping of the same bytes. They are separate so that the store's queues can hold records without
keeping data alive: the handle owns the tensors, so they are freed with it, at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..ledger.record import RuledRecord
from ..ledger.story import Storied, new_story
from ..tensors.layout import Layout, in_dtype, set_lazy_bits

if TYPE_CHECKING:
    from ..disk.tier import Kind
    from ..tensors.copies import Marker
    from ..tensors.slab import Slot

_NO_VIEWS: dict[Layout | int, torch.Tensor] = {}
"""Shared by all handles that have handed out nothing; never filled."""
_NO_PARTS: dict[int, torch.Tensor] = {}
"""Likewise, by those whose bytes are in one piece, or not on their device."""


class Record(RuledRecord):
    """The store's bookkeeping of one storage's bytes. See `RuledRecord`; `device` and `slot` are those of torch.

    Attributes:
        version: the tensor's version counter when it was saved.
        root: the tensor that was saved, or its base, for as long as that lives.
        address: where the source's storage lay when it was saved or restored. If it has moved since, others manage it.
        layout, joined: of the tensor that was saved first, and of further views; the stored span covers all.
        span: (first byte, end) of the storage that is stored; None until the bytes are first read.
        first_byte: the byte of the saved storage at which the source's storage begins.
        phase: the stored span's address modulo 4096.
        ranges: (first byte, end) of each storage in it, if it is a batch: see NOTE [Groups] in `groups.py`. Else empty.
        stream: that packed it on its device.
    """

    __slots__ = (
        "address", "first_byte", "joined", "kind", "layout", "phase", "ranges", "residency", "root",
        "span", "storage_id", "stream", "version",
    )  # fmt: skip

    slot: Slot | None
    device: torch.device | None
    ready: Marker | None
    claims: list[weakref.ref[Record]] | None

    if TYPE_CHECKING:

        def __call__(self) -> Handle | None: ...

    def __init__(
        self,
        handle: Handle,
        note_release: Callable[[Record], None],
        key: int,
        nbytes: int,
        address: int,
        layout: Layout,
        kind: Kind,
    ) -> None:
        super().__init__(key, nbytes)
        self.version: int = handle.source._version
        self.root: weakref.ref[torch.Tensor] | None = None
        self.address = address
        self.storage_id = 0
        self.layout = layout
        self.joined: tuple[Layout, ...] = ()
        self.residency: object = None
        self.span: tuple[int, int] | None = None
        self.first_byte = self.phase = 0
        self.ranges: tuple[tuple[int, int], ...] = ()
        self.stream: Any = None
        self.kind = kind

    @property
    def source(self) -> torch.Tensor | None:
        handle = self()
        return None if handle is None else handle.source

    @property
    def has_device_bytes(self) -> bool:
        """Whether the source carries the bytes; on a device, it drops them when they have been copied out."""
        return self.claims is not None

    @property
    def span_bytes(self) -> int:
        first, end = self.span or (0, 0)
        return end - first

    @property
    def views(self) -> dict[Layout | int, torch.Tensor]:
        handle = self()
        return _NO_VIEWS if handle is None else handle.views

    def drop_parts(self) -> None:
        handle = self()
        if handle is not None:
            handle.parts = _NO_PARTS

    def drop_views(self) -> None:
        handle = self()
        if handle is not None:
            handle.views = _NO_VIEWS

    @property
    def outstanding(self) -> tuple[torch.Tensor, ...]:
        handle = self()
        return () if handle is None else handle.outstanding

    def keep_outstanding(self, tensors: tuple[torch.Tensor, ...]) -> None:
        handle = self()
        if handle is not None:
            handle.outstanding = tensors

    def __repr__(self) -> str:
        return f"<Record {self.key} {self.state.name} {self.nbytes} bytes>"


class StoriedRecord(Storied, Record):
    """A record that keeps its story."""

    __slots__ = ("story",)

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.story = new_story()


class Member(NamedTuple):
    """A saved tensor in a group: see NOTE [Groups] in `groups.py`.

    `counter`: has its version counter, and no bytes. `version`: when it was saved. `first_byte`: where the tensor's own
    storage begins in the group. `number`: the index in its log of the first member that saved the same tensor."""

    counter: torch.Tensor
    version: int
    first_byte: int
    number: int

    def view_in(self, memory: torch.Tensor, layout: Layout, first_byte: int = 0) -> torch.Tensor:
        """A new tensor that has `layout` over the member's own storage, sharing the member's version counter.

        `memory`: the group's from `first_byte` on, shape [n], of the group's dtype or any other."""
        dtype, size, stride, offset, conj, neg = layout
        if memory.dtype is not dtype:
            memory = in_dtype(memory.view(torch.uint8), dtype)
        tensor = self.counter.detach()
        tensor.data = memory.as_strided(size, stride, offset + (self.first_byte - first_byte) // dtype.itemsize)
        if conj or neg:
            set_lazy_bits(tensor, conj, neg)
        return tensor


new_member = partial(tuple.__new__, Member)
"""From a tuple: in a quarter of the time that the constructor takes."""


class Handle:
    """A reference to bytes in a store. When the last reference goes, they are freed.

    `TierStore.put` makes handles. They are opaque, hashable by identity, and cannot be pickled. A handle keeps its
    store open. Dropping one never blocks and may happen on any thread: see NOTE [No finalizers] in `remains.py`.

    Attributes:
        owner: the store, which this keeps open.
        record: the store's bookkeeping of the bytes.
        source: a detached alias of the saved tensor. It shares the saved tensor's version counter for as long as the
            handle lives. While the bytes are in memory its storage holds them; a restore swaps `source.data`.
        parts: of a batch on its device, instead: the bytes of each storage, shape [n], by its first byte; uint8, or,
            once they have come back, of the dtype of the batch.
        views: tensors that were handed out, by layout, those of a group by the member's `number` (~number: with lazy
            bits). Kept while the bytes are in memory: see NOTE [Stolen gradients] in `handing_out.py`.
        outstanding: tensors that were handed out earlier and are still in use: see `outstanding.py`.
    """

    __slots__ = ("__weakref__", "outstanding", "owner", "parts", "record", "source", "views")

    record: Record

    def __init__(self, owner: object, source: torch.Tensor) -> None:
        self.owner = owner
        self.source = source
        self.parts = _NO_PARTS
        self.views = _NO_VIEWS
        self.outstanding: tuple[torch.Tensor, ...] = ()

    def view_of(self, member: Member, layout: Layout) -> torch.Tensor:
        """A new view of the member, which is in memory."""
        first_byte = member.first_byte
        if first_byte in self.parts:
            return member.view_in(self.parts[first_byte], layout, first_byte)
        return member.view_in(self.source, layout)

    def keep_view(self, of: Layout | int, view: torch.Tensor) -> None:
        if self.views:
            self.views[of] = view
        else:
            self.views = {of: view}

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a tierstore handle belongs to its process and cannot be pickled")

    def __repr__(self) -> str:
        return f"<Handle {self.record.key} {self.record.state.value} {self.record.nbytes} bytes>"
