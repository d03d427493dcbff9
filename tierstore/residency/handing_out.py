"""Saved tensors are asked for: their bytes are waited for, and handed over.

NOTE [Stolen gradients]
A function may return its saved tensor as a gradient. If nobody else refers to that tensor, autograd takes it as it is
("steals" it), and later adds to it in place; otherwise autograd copies it into `.grad`. Without hooks, it copies while
the graph or the user refers to the saved tensor. With hooks, a tensor that is handed out must not look unreferenced
either: it shares the record's version counter, so an addition to a stolen gradient would be a change of what was saved.
Hence the same tensor is handed out each time while the bytes stay in memory: the saved one, if it is still alive (NOTE
[The same object] in `hooks/saved.py`), or one that the record keeps. When the bytes leave memory, because of the next
tensor of the same node or of another thread, `outstanding.py` keeps the tensor for as long as anybody uses it. A
gradient may wait while further nodes run, so the node that asks does not tell how long that is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ..errors import ModifiedInPlaceError, StoreClosedError
from ..ledger.counters import STALL_CAUSES
from ..ledger.ledger import Ledger
from ..ledger.state import IN_MEMORY, State
from ..tensors.layout import (
    Layout,
    describe,
    fits_in_storage,
    is_inside_modes,
    layout_of,
    outside_of_modes,
    rebuild,
    rebuild_beyond,
)
from ..tensors.torch_names import name_of_node
from .device import DeviceTier
from .guard import Guard, change_if_open, is_inside_any, whole
from .handle import Handle, Member, Record
from .outstanding import OutstandingViews

if TYPE_CHECKING:
    from ..ledger.lookahead import Lookahead

_UNPACK_WAITS = STALL_CAUSES[1]


class HandingOut:
    """Requests for bytes. Each public method takes the lock of the store (`guard.py`)."""

    def __init__(
        self, guard: Guard, ledger: Ledger[Record], outstanding_views: OutstandingViews, devices: DeviceTier
    ) -> None:
        self._guard = guard
        self._ledger = ledger
        self._books = ledger.books
        self._up = ledger.up
        self._down = ledger.down
        self._outstanding_views = outstanding_views
        self._devices = devices
        self._streams = devices.streams

    @whole
    def fetch(
        self,
        record: Record,
        layout: Layout,
        ahead: Lookahead[Record] | None = None,
        reload_ahead: Lookahead[Record] | None = None,
        index: int = 0,
        member: Member | None = None,
    ) -> torch.Tensor:
        """Return a tensor of the given layout over the record's bytes. Waits if they are not in memory.

        What lies ahead of pack `index` is restored (`ahead`), and copied to its device (`reload_ahead`), as far as
        there is room. `member`: which of its members, if the record is a group; the layout is that of the member.

        Raises:
            ModifiedInPlaceError: the saved tensor, or one that was handed out, was changed in place.
            CorruptDataError: the bytes on disk are damaged; they are lost.
            StorageIOError: they could not be read; they are still on disk.
            StoreClosedError: the store is closed; they are gone.
        """
        guard, books = self._guard, self._books
        if guard.closed is not None and record.state is not State.CLOSED:
            guard.must_be_open()
        handle = self._check_unchanged(record, layout)
        guard.is_changing = True
        self._ledger.ask_for(record, ahead, index)
        if record.state in IN_MEMORY:
            return self._hand_over(record, handle, layout, reload_ahead, index, member)
        record.demanded += 1  # it may not leave memory again before it is handed over
        books.num_getting += 1
        try:
            self._await_bytes(record)
            handle = self._check_unchanged(record, layout)
            guard.is_changing = True
            return self._hand_over(record, handle, layout, reload_ahead, index, member)
        finally:
            was_changing, guard.is_changing = guard.is_changing, True
            record.demanded -= 1
            books.num_getting -= 1
            self._up.used(record)
            self._ledger.advance()
            guard.is_changing = was_changing

    def next_member(
        self, record: Record, member: Member, layout: Layout, ahead: Lookahead[Record], index: int
    ) -> torch.Tensor | None:
        """What `fetch` returns for one more member of a group, where nothing else is to be done. None: call `fetch`."""
        guard = self._guard
        if guard.is_mine() or (guard.may_be_inside and is_inside_any()):  # as `lock` does
            guard.refuse_handler()
        with guard.mutex:
            try:
                handle = record()
                if handle is None or guard.closed is not None or guard.is_changing:
                    return None
                guard.is_changing = True
                is_next = self._ledger.next_member(record, ahead, index)
                guard.is_changing = False  # a new view that is not kept does no harm
                if not is_next:
                    return None
                number = member.number
                views, of = handle.views, ~number if layout.conj or layout.neg else number  # as in `_hand_over`
                if of in views:
                    return views[of]
                parts, first_byte = handle.parts, member.first_byte
                if is_inside_modes():
                    with outside_of_modes():
                        view = handle.view_of(member, layout)
                elif first_byte in parts:  # as `Handle.view_of`, without its call
                    view = member.view_in(parts[first_byte], layout, first_byte)
                else:
                    view = member.view_in(handle.source, layout)
                if views:
                    views[of] = view  # as `keep_view`, without its call
                else:
                    handle.keep_view(of, view)
                return view
            except BaseException as error:  # as in `whole`
                guard.judge(error)
                raise

    def asked_on(self, device: torch.device) -> None:
        """Backward is given a tracked tensor on this thread: note the stream that will use it, and the time."""
        streams = self._streams
        if streams.awaits_backward or not streams.knows_current(device):
            with self._guard.lock:
                streams.asked_on(device)

    @change_if_open
    def pass_by(self, ahead: Lookahead[Record], reload_ahead: Lookahead[Record], index: int) -> None:
        """Backward has asked for tracked tensors, of which pack `index` is the last. Does not wait."""
        self._ledger.pass_by(ahead, reload_ahead, index)

    @change_if_open
    def prefetch(self, records: Iterable[Record]) -> None:
        """Fetch the records, in this order, as far as there is room, and go on as room is freed. Does not wait."""
        self._up.name(records)
        self._ledger.go_ahead()

    # --- under the lock --------------------------------------------------------------------------------------------

    def _check_unchanged(self, record: Record, layout: Layout) -> Handle:
        handle = record()
        if handle is None:
            raise StoreClosedError(self._guard.name, "the handle was released")
        version = handle.source._version
        if version != record.version:
            raise ModifiedInPlaceError(describe(layout), record.version, version, name_of_node())
        return handle

    def _await_bytes(self, record: Record) -> None:
        if record.state is State.QUEUED:
            self._down.cancel_spill(record)
        while record.state not in IN_MEMORY:
            self._raise_cause(record)
            self._up.raise_priority(record)
            self._guard.wait(_UNPACK_WAITS, record)

    def _hand_over(
        self,
        record: Record,
        handle: Handle,
        layout: Layout,
        reload_ahead: Lookahead[Record] | None,
        index: int,
        member: Member | None,
    ) -> torch.Tensor:
        if record.device is None:
            self._up.used(record)
        elif not self._ledger.hand_over(record, reload_ahead, index):
            return self._member_alone(record, layout, member)
        self._guard.is_changing = False  # a new view that is not kept does no harm
        of: Layout | int = layout
        if member is not None:  # a traced graph asks for it without its lazy bits: that is another tensor
            of = ~member.number if layout.conj or layout.neg else member.number
        view = handle.views.get(of)  # the same each time: see NOTE [Stolen gradients]
        if view is None and handle.outstanding and member is None:
            view = _still_used(handle, layout)
        if view is None:
            is_where_saved = record.slot is None and record.root is not None  # not put by hand
            if member is not None:
                view = handle.view_of(member, layout)
            elif is_where_saved and not fits_in_storage(layout, handle.source):
                view = rebuild_beyond(handle.source, layout)  # hooks that do nothing would give it back too
            else:
                view = rebuild(handle.source, layout, record.first_byte)
            handle.keep_view(of, view)
        return view

    def _member_alone(self, record: Record, layout: Layout, member: Member | None) -> torch.Tensor:
        """A member of a group, in memory of its own. A full device may have room for that; else its error is raised."""
        if member is None:
            raise RuntimeError(f"handle {record.key} is a group: it has no tensor of its own")
        place = layout._replace(offset=layout.offset + member.first_byte // layout.dtype.itemsize)
        try:
            first, memory = self._streams.copy_part_back(record, place)
        except torch.OutOfMemoryError:
            self._devices.make_room()
            first, memory = self._streams.copy_part_back(record, place)
        self._books.counters.reloaded_bytes += len(memory)
        view = member.view_in(memory, layout, first)
        self._outstanding_views.keep(record, (view,))
        return view

    def _raise_cause(self, record: Record) -> None:
        if record.state is State.CLOSED:
            self._guard.must_be_open()
        cause = record.cause
        if cause is not None:
            if record.state is not State.FAILED:
                record.cause = None  # may be tried again
            self._guard.raise_as_told(cause)


def _still_used(handle: Handle, layout: Layout) -> torch.Tensor | None:
    """The tensor of that layout that was handed out before, over the same memory, and is still in use.

    There is one if it was handed out while it was only tracked: `_become` in `registration.py`."""
    storage = handle.source.untyped_storage()
    for tensor in handle.outstanding:
        if tensor.untyped_storage()._cdata == storage._cdata and layout_of(tensor) == layout:
            return tensor
    return None
