"""Records a simulated run as a trace: the events of a real trace, in virtual time."""

from __future__ import annotations

from collections.abc import Callable

from ..disk.tier import Loaded, Stored
from ..rules.observer import Observer
from ..tracing.events import (
    Cancelled,
    Event,
    Freed,
    Gone,
    Levels,
    Offload,
    Ours,
    Pack,
    Release,
    Reload,
    Scope,
    ScopeEnd,
    Stall,
    Unpack,
)
from . import workload
from .clock import Clock
from .record import GraphLog
from .timeline import JobsSeen, Transfer

__all__ = ["THREAD", "EventsSeen"]

THREAD = 0
"""The number of the one thread that trains."""


class EventsSeen(JobsSeen):
    """Records the events of one rank. Each step is one graph and one scope, with the same number.

    There is no `Booked`. `Ours` is recorded only if the workload says when others release a storage.

    Args:
        clock, other: as `JobsSeen`'s.
        levels: returns the present fields of `Levels` after its time.
        events: the list to append to.
    """

    def __init__(
        self, clock: Clock, other: Observer | None, levels: Callable[[], tuple[int, ...]], events: list[Event]
    ) -> None:
        super().__init__(clock, other)
        self._levels = levels
        self._events = events

    # --- the training thread ------------------------------------------------------------------------------------------

    def step_began(self, graph: int, device_bytes: int, prefetch: str, lookahead_bytes: int) -> None:
        """The scope of a step is entered."""
        options = 0, device_bytes, prefetch, lookahead_bytes, False
        self._events.append(Scope(self._now_ns(), THREAD, "training", graph, *options))

    def acted(self, graph: int, log: GraphLog, action: workload.Action, began_seconds: float) -> None:
        """The training thread did `action` from `began_seconds` until now, waiting included."""
        began_ns, now_ns = round(began_seconds * 1e9), self._now_ns()
        match action:
            case workload.Pack(index):
                self._events.append(self._pack(graph, log, index, began_ns, now_ns))
                self.changed()
            case workload.LetGo(index):
                self._events.append(Ours(now_ns, graph, index))
            case workload.EndScope():
                self._events.append(ScopeEnd(now_ns, THREAD, graph, failed=False))
            case workload.Unpack(index):
                self._events.append(Unpack(began_ns, now_ns, THREAD, graph, index))
            case workload.Release(index):
                self._events.append(Release(now_ns, graph, index))

    def step_ended(self, graph: int) -> None:
        """The whole graph of a step is gone."""
        self._events.append(Gone(self._now_ns(), graph))

    def _pack(self, graph: int, log: GraphLog, index: int, began_ns: int, end_ns: int) -> Pack:
        saved, record = log.saved[index], log.records[index]
        key = record.key if record is not None and saved.on_device else log.first_key + index
        return Pack(
            began_ns, end_ns, THREAD, graph, graph, index, key,
            None if record is None else record.key,
            saved.node, log.root_of(index), 0, saved.nbytes, saved.nbytes, saved.kind,
            "accelerator" if saved.on_device else "cpu", (),
        )  # fmt: skip

    # --- `Observer` ---------------------------------------------------------------------------------------------------

    def spill_queued(self, record: int, nbytes: int) -> None:
        super().spill_queued(record, nbytes)
        self.changed()

    def spill_ended(self, record: int, outcome: Stored | Exception) -> None:
        super().spill_ended(record, outcome)
        self.changed()

    def spill_cancelled(self, record: int, nbytes: int) -> None:
        super().spill_cancelled(record, nbytes)
        self._events.append(Cancelled(self._now_ns(), record, "spill", nbytes))
        self.changed()

    def freed(self, record: int, nbytes: int) -> None:
        super().freed(record, nbytes)
        self._events.append(Freed(self._now_ns(), record, nbytes))
        self.changed()

    def restore_queued(self, record: int, nbytes: int, *, demanded: bool) -> None:
        super().restore_queued(record, nbytes, demanded=demanded)
        self.changed()

    def restore_ended(self, record: int, outcome: Loaded | Exception, *, is_wanted: bool) -> None:
        super().restore_ended(record, outcome, is_wanted=is_wanted)
        self.changed()

    def restore_cancelled(self, record: int, nbytes: int) -> None:
        super().restore_cancelled(record, nbytes)
        self._events.append(Cancelled(self._now_ns(), record, "restore", nbytes))
        self.changed()

    def offloaded(self, record: int, nbytes: int) -> None:
        super().offloaded(record, nbytes)
        self._events.append(Offload(self._now_ns(), record, nbytes))
        self.changed()

    def reloaded(self, record: int, nbytes: int) -> None:
        super().reloaded(record, nbytes)
        self._events.append(Reload(self._now_ns(), record, nbytes))
        self.changed()

    def stalled(self, seconds: float, cause: str, record: int | None) -> None:
        super().stalled(seconds, cause, record)
        now_ns = self._now_ns()
        self._events.append(Stall(now_ns - round(seconds * 1e9), now_ns, THREAD, cause, record))
        self.changed()

    def changed(self) -> None:
        super().changed()
        self._events.append(Levels(self._now_ns(), *self._levels()))

    def _ended(self, transfer: Transfer) -> None:
        super()._ended(transfer)
        self._events.append(transfer)
