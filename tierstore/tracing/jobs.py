"""Records on their way to or from disk while a trace is recorded: when each was queued and begun, and its lane."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count


@dataclass(slots=True)
class _Job:
    nbytes: int
    demanded: bool
    queued_ns: int
    began_ns: int | None = None
    lane: int | None = None


class OpenJobs:
    """Jobs in one direction, by record; not those that were queued before the trace began. Guarded by the store's
    lock."""

    def __init__(self) -> None:
        self._jobs: dict[int, _Job] = {}
        self._lanes: set[int | None] = set()  # those that are taken

    def queue(self, record: int, nbytes: int, at_ns: int, *, demanded: bool = False) -> None:
        self._jobs[record] = _Job(nbytes, demanded, at_ns)

    def begin(self, record: int, nbytes: int | None, at_ns: int) -> None:
        """`nbytes`: bytes to move, if that is known only now."""
        job = self._jobs.get(record)
        if job is None or job.began_ns is not None:
            return
        job.began_ns = at_ns
        if nbytes is not None:
            job.nbytes = nbytes
        job.lane = next(lane for lane in count() if lane not in self._lanes)
        self._lanes.add(job.lane)

    def end(self, record: int) -> _Job | None:
        """The job is over; None: the trace did not see it begin."""
        job = self._jobs.pop(record, None)
        if job is not None:
            self._lanes.discard(job.lane)
        return None if job is None or job.began_ns is None else job
