"""Records on their way to or from disk while a trace is recorded: when each was queued and begun, and its lane."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from .events import Restore, Spill

if TYPE_CHECKING:
    from ..disk.tier import Loaded, Stored

__all__ = ["OpenJobs"]


@dataclass(slots=True)
class _Job:
    nbytes: int
    demanded: bool
    queued_ns: int
    began_ns: int | None = None
    lane: int | None = None


class _Direction:
    """Jobs in one direction, by record. Jobs that were queued before the trace began are not in here."""

    def __init__(self) -> None:
        self._jobs: dict[int, _Job] = {}
        self._lanes: set[int | None] = set()  # those that are taken

    def queue(self, record: int, nbytes: int, at_ns: int, *, demanded: bool = False) -> None:
        self._jobs[record] = _Job(nbytes, demanded, at_ns)

    def begin(self, record: int, nbytes: int | None, at_ns: int) -> None:
        """A lane takes the job. `nbytes`: bytes to move, if that is known only now."""
        job = self._jobs.get(record)
        if job is None or job.began_ns is not None:
            return
        job.began_ns = at_ns
        if nbytes is not None:
            job.nbytes = nbytes
        job.lane = next(lane for lane in count() if lane not in self._lanes)
        self._lanes.add(job.lane)

    def forget(self, record: int) -> _Job | None:
        job = self._jobs.pop(record, None)
        if job is not None:
            self._lanes.discard(job.lane)
        return job


class OpenJobs:
    """All jobs in both directions. Guarded by the store's lock."""

    def __init__(self) -> None:
        self.spills = _Direction()
        self.restores = _Direction()

    def end_spill(self, record: int, outcome: Stored | Exception, at_ns: int) -> tuple[Any, ...] | None:
        """The event of a write that is over; None: the trace did not see it begin."""
        job = self.spills.forget(record)
        if job is None or job.began_ns is None:
            return None
        times = job.lane, job.queued_ns, job.began_ns, at_ns
        if isinstance(outcome, Exception):
            return (Spill, record, job.nbytes, 0, "", "", *times, None, None, str(outcome))
        stored = outcome.stored_bytes, outcome.codec, outcome.kind
        return (Spill, record, job.nbytes, *stored, *times, outcome.drive_seconds, outcome.cpu_seconds, None)

    def end_restore(
        self, record: int, outcome: Loaded | Exception, at_ns: int, *, is_wanted: bool
    ) -> tuple[Any, ...] | None:
        job = self.restores.forget(record)
        if job is None or job.began_ns is None:
            return None
        times = job.lane, job.demanded, is_wanted, job.queued_ns, job.began_ns, at_ns
        if isinstance(outcome, Exception):
            return (Restore, record, job.nbytes, 0, *times, None, None, str(outcome))
        seconds = outcome.drive_seconds, outcome.cpu_seconds
        return (Restore, record, job.nbytes, outcome.read_bytes, *times, *seconds, None)
