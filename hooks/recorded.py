"""A scope that is traced. It stands before an ordinary scope, and records what that packs and what backward unpacks.

Scopes without a trace know nothing of it, so it costs them nothing."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial
from operator import attrgetter, call
from typing import NamedTuple

import torch

from tierstore.residency.handle import Record
from tierstore.tensors.uncompiled import uncompiled
from tierstore.tracing.events import Pack, Release, Scope, ScopeEnd, Unpack
from tierstore.tracing.recorder import Recorder
from tierstore.tracing.recordings import Recordings

from .below import HOOKS_ARE_CALLED_BELOW, HeldTensor, is_below_autograd
from .order import PackLog
from .saved import SavedTensor
from .scope import OffloadScope
from .select import KEPT_CLASSES, Kept, KeptTensor
from .thread_hooks import owner_of_hooks

_now = time.perf_counter_ns
_numbers = itertools.count(1)


class ScopeOptions(NamedTuple):
    """The arguments of a scope, as its trace has them. A size that is found is that of when the scope is entered."""

    min_bytes: int
    device_bytes: int
    prefetch: str
    lookahead_bytes: int
    has_select: bool
    is_automatic: bool


class RecordedScope:
    """A scope, and the recording of what it packs. Belongs to the thread that has made it, as the scope does."""

    def __init__(
        self,
        scope: OffloadScope,
        traces: Recordings,
        recorder: Recorder,
        options: ScopeOptions,
        memory_use: Callable[[], tuple[int | None, int | None]],
    ) -> None:
        self.scope = scope
        scope.tracks_on_device = False  # a trace has the record of each tensor on an accelerator, and its times
        scope.takes_grants = False  # it has the index of each tensor
        self.hooks_off = scope.hooks_off
        self._pack = scope.pack
        self._traces = traces
        self._recorder = recorder
        self._memory_use = memory_use
        self._thread = threading.get_ident()
        self._number = next(_numbers)
        traces.enter(recorder)
        recorder.append((Scope, _now(), self._thread, threading.current_thread().name, self._number, *options))

    @uncompiled
    def pack(self, tensor: torch.Tensor) -> RecordedTensor | SavedTensor | KeptTensor | Kept | HeldTensor:
        if HOOKS_ARE_CALLED_BELOW and not tensor.requires_grad and is_below_autograd():
            return HeldTensor(self.pack, tensor)
        began = _now()
        saved = self._pack(tensor)
        if isinstance(saved, (*KEPT_CLASSES, HeldTensor)):
            return saved
        ended = _now()
        log, index, recorder = saved.log, saved.index, self._recorder
        record = None if saved.handle is None else saved.handle.record
        device = None if record is None else record.device
        if log.recording is not recorder:
            self._begin_graph(log, record)
        if recorder.is_over():  # nobody would take its events away
            return saved
        node, nbytes = log.packs[index]
        recorder.append(
            (
                Pack, began, ended, self._thread, self._number, log.number, index, saved.key,
                None if record is None else record.key,
                node, saved.storage_id, saved.version, nbytes, tensor.nbytes,
                tensor.dtype, device or tensor.device, tensor.shape,
            )
        )  # fmt: skip
        recorder.changed()
        return RecordedTensor(saved, recorder, log.number, index)

    def _begin_graph(self, log: PackLog, record: Record | None) -> None:
        recorder = self._recorder
        log.gathers = False  # a trace has the record of each tensor
        log.recording = recorder
        recorder.begin_graph(log.number, log)
        if recorder.is_paced and record is not None and record.device is not None:
            times = log.times if log.times is not None and log.times.is_marked else None
            recorder.time_graph(log.number, log, times or log.residency.time_graph(record.device))

    def settle(self, *, failed: bool) -> None:
        try:
            self.scope.settle(failed=failed)
        finally:
            self._recorder.append((ScopeEnd, _now(), self._thread, self._number, failed, *self._memory_use()))
            self._traces.leave(self._recorder)


class RecordedTensor:
    """A saved tensor in the graph of a traced scope. Records when backward asks for it, and when the graph drops it.

    When a traced backward runs, a trace records only what the store does."""

    __slots__ = ("_append", "_graph", "_index", "_saved", "release")

    def __init__(self, saved: SavedTensor, recorder: Recorder, graph: int, index: int) -> None:
        self._saved = saved
        self._append: Callable[[tuple[object, ...]], None] = recorder.append
        self._graph = graph
        self._index = index
        # An iterator over one event. It makes the event, and looks at the clock, when it is asked for that.
        event = zip((Release,), map(call, (_now,)), (graph,), (index,), strict=True)
        self.release = partial(recorder.waiting.extend, event)

    # Python calls what this gives as the tensor dies; no line of Python runs: see NOTE [No finalizers] in `remains.py`.
    __del__ = property(attrgetter("release"))

    @uncompiled
    def unpack(self) -> torch.Tensor:
        began = _now()
        try:
            return self._saved.unpack()
        finally:
            self._append((Unpack, began, _now(), threading.get_ident(), self._graph, self._index))

    def traced(self) -> torch.Tensor:
        return self._saved.traced()


def enclosing_scope() -> OffloadScope | None:
    """The scope whose hooks are the innermost on this thread; None: there are no hooks, or they are not a scope's."""
    scope = owner_of_hooks()
    if isinstance(scope, RecordedScope):
        return scope.scope
    return scope if isinstance(scope, OffloadScope) else None
