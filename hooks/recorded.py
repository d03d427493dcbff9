"""A scope that is traced: what stands before its pack and unpack, so that those of other scopes do nothing for it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from operator import attrgetter, call
from typing import NamedTuple, Protocol

import torch

from tierstore.tracing.events import Pack, Release, Scope, ScopeEnd, Unpack
from tierstore.tracing.recorder import Recorder
from tierstore.tracing.recordings import Recordings
from tierstore.uncompiled import uncompiled

from .below import HOOKS_ARE_CALLED_BELOW, HeldTensor, is_below_autograd
from .order import PackLog
from .owners import OwnerWatch
from .saved import SavedTensor
from .select import Kept

__all__ = ["RecordedScope", "ScopeOptions"]

_now = time.perf_counter_ns
_numbers = itertools.count(1)


class ScopeOptions(NamedTuple):
    """The options of a scope, as its trace has them.

    `has_select`: there is a `select`; `is_automatic`: `device_bytes` was found.
    """

    min_bytes: int
    device_bytes: int
    prefetch: str
    lookahead_bytes: int
    has_select: bool
    is_automatic: bool


class Packing(Protocol):
    """A scope: `tiered_offload`'s."""

    def pack(self, tensor: torch.Tensor) -> SavedTensor | Kept | HeldTensor:
        """Called by autograd for each tensor that it saves."""

    def settle(self, *, failed: bool) -> None:
        """The scope ends."""


class RecordedScope:
    """A scope, and a trace of what it packs. Belongs to the thread that makes it, like the scope.

    Args:
        scope: the scope itself, just entered.
        traces: of the store: they are told when a traced scope begins and ends.
        recorder: takes the events.
        options: of the scope, for its event.
        memory_use: tells what the process holds: resident, and of that freed; None where that is not known.

    Attributes:
        scope: the scope itself.
    """

    def __init__(
        self,
        scope: Packing,
        traces: Recordings,
        recorder: Recorder,
        options: ScopeOptions,
        memory_use: Callable[[], tuple[int | None, int | None]],
    ) -> None:
        self.scope = scope
        self._pack = scope.pack
        self._traces = traces
        self._recorder = recorder
        self._memory_use = memory_use
        self._thread = threading.get_ident()
        self._number = next(_numbers)
        self._owners: OwnerWatch | None = None  # of what was packed last
        traces.enter(recorder)
        recorder.append((Scope, _now(), self._thread, threading.current_thread().name, self._number, *options))

    @uncompiled
    def pack(self, tensor: torch.Tensor) -> RecordedTensor | SavedTensor | Kept | HeldTensor:
        """As the scope's."""
        if HOOKS_ARE_CALLED_BELOW and not tensor.requires_grad and is_below_autograd():
            return HeldTensor(self.pack, tensor)
        if self._owners is not None:
            self._owners.look()
        began = _now()
        saved = self._pack(tensor)
        if isinstance(saved, (Kept, HeldTensor)):
            return saved
        ended = _now()
        log, index, recorder = saved.log, saved.index, self._recorder
        handle = saved.handle
        device = None if handle is None else handle.record.device
        trace = log.trace
        if not isinstance(trace, GraphTrace) or trace.recorder is not recorder:
            trace = GraphTrace(log, recorder)
            log.follow_with(trace)
            recorder.begin_graph(log.number, log)
            if recorder.is_paced and handle is not None and device is not None:
                recorder.time_graph(log.number, log, log.times_from(handle.record))
        if recorder.is_over():  # nobody would take its events away
            return saved
        self._owners = owners = trace.owners
        owners.add(saved)
        recorder.append(
            (
                Pack, began, ended, self._thread, self._number, log.number, index, saved.key,
                None if handle is None else handle.record.key,
                log.nodes[index], saved.storage_id, saved.version, log.sizes[index], tensor.nbytes,
                tensor.dtype, device or tensor.device, tensor.shape,
            )
        )  # fmt: skip
        recorder.changed()
        return RecordedTensor(saved, recorder, owners, log.number, index)

    def settle(self, *, failed: bool) -> None:
        """As the scope's."""
        try:
            self.scope.settle(failed=failed)
            if self._owners is not None:
                self._owners.look_at_all()
        finally:
            self._recorder.append((ScopeEnd, _now(), self._thread, self._number, failed, *self._memory_use()))
            self._traces.leave(self._recorder)


class GraphTrace:
    """The trace of one graph; follows the graph's log. See `LogTrace`.

    Args:
        log: of what the graph has saved.
        recorder: takes the events.

    Attributes:
        recorder: likewise.
        owners: watches who else holds what the graph has saved.
    """

    def __init__(self, log: PackLog, recorder: Recorder) -> None:
        self.recorder = recorder
        self.owners = OwnerWatch(log.books, recorder, log.number)
        self._number = log.number

    def booked(self, index: int, record: int) -> None:
        """See `LogTrace`."""
        self.recorder.booked(self._number, index, record)


class RecordedTensor:
    """A saved tensor in the graph, and a trace of when it is asked for and let go of."""

    __slots__ = ("_append", "_graph", "_index", "_owners", "_saved", "release")

    def __init__(self, saved: SavedTensor, recorder: Recorder, owners: OwnerWatch, graph: int, index: int) -> None:
        self._saved = saved
        self._owners = owners
        self._append: Callable[[tuple[object, ...]], None] = recorder.append
        self._graph = graph
        self._index = index
        event = zip((Release,), map(call, (_now,)), (graph,), (index,), strict=True)  # made when it is taken
        self.release = partial(recorder.waiting.extend, event)

    __del__ = property(attrgetter("release"))  # not a line of Python: see NOTE [No finalizers] in `remains.py`

    @uncompiled
    def unpack(self) -> torch.Tensor:
        """As `SavedTensor.unpack`."""
        self._owners.look_before_unpack()
        began = _now()
        try:
            return self._saved.unpack()
        finally:
            self._append((Unpack, began, _now(), threading.get_ident(), self._graph, self._index))

    def traced(self) -> torch.Tensor:
        """As `SavedTensor.traced`; when the compiled graph runs it, only what the store does is recorded."""
        return self._saved.traced()
