"""Records the transfers of a simulated run, with their times, in the form of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..disk.tier import Loaded, Stored
from ..rules.observer import Observer
from ..tracing.events import Restore, Spill
from ..tracing.jobs import OpenJobs
from .clock import Clock

__all__ = ["JobsSeen", "Transfer"]

Transfer = Spill | Restore
"""An event of a trace, with times since the simulation began. Records are numbered as by the store, through all steps:
each saved tensor takes a number, except further views of a known storage on an accelerator."""


class JobsSeen(Observer):
    """Records every transfer with its virtual times.

    Args:
        clock: of the simulation.
        other: an observer that receives everything too; None: none.

    Attributes:
        num_queued: writes and reads queued since the beginning, including those cancelled later.
    """

    def __init__(self, clock: Clock, other: Observer | None) -> None:
        self.num_queued = 0
        self._clock = clock
        self._other = other or Observer()
        self._open = OpenJobs()
        self._transfers: list[Transfer] = []

    def take_ended(self) -> Sequence[Transfer]:
        """The transfers that have ended since the last call."""
        transfers, self._transfers = self._transfers, []
        return transfers

    def spill_queued(self, record: int, nbytes: int) -> None:
        self.num_queued += 1
        self._open.spills.queue(record, nbytes, self._now_ns())
        self._other.spill_queued(record, nbytes)

    def spill_began(self, record: int, nbytes: int) -> None:
        self._open.spills.begin(record, nbytes, self._now_ns())
        self._other.spill_began(record, nbytes)

    def spill_ended(self, record: int, outcome: Stored | Exception) -> None:
        self._take(self._open.end_spill(record, outcome, self._now_ns()))
        self._other.spill_ended(record, outcome)

    def spill_cancelled(self, record: int, nbytes: int) -> None:
        self._open.spills.forget(record)
        self._other.spill_cancelled(record, nbytes)

    def freed(self, record: int, nbytes: int) -> None:
        self._other.freed(record, nbytes)

    def restore_queued(self, record: int, nbytes: int, *, demanded: bool) -> None:
        self.num_queued += 1
        self._open.restores.queue(record, nbytes, self._now_ns(), demanded=demanded)
        self._other.restore_queued(record, nbytes, demanded=demanded)

    def restore_began(self, record: int) -> None:
        self._open.restores.begin(record, None, self._now_ns())
        self._other.restore_began(record)

    def restore_ended(self, record: int, outcome: Loaded | Exception, *, is_wanted: bool) -> None:
        self._take(self._open.end_restore(record, outcome, self._now_ns(), is_wanted=is_wanted))
        self._other.restore_ended(record, outcome, is_wanted=is_wanted)

    def restore_cancelled(self, record: int, nbytes: int) -> None:
        self._open.restores.forget(record)
        self._other.restore_cancelled(record, nbytes)

    def offloaded(self, record: int, nbytes: int) -> None:
        self._other.offloaded(record, nbytes)

    def reloaded(self, record: int, nbytes: int) -> None:
        self._other.reloaded(record, nbytes)

    def stalled(self, seconds: float, cause: str, record: int | None) -> None:
        self._other.stalled(seconds, cause, record)

    def changed(self) -> None:
        self._other.changed()

    def _take(self, event: tuple[Any, ...] | None) -> None:
        if event is not None:
            kind, *fields = event
            self._ended(kind(*fields))

    def _ended(self, transfer: Transfer) -> None:
        self._transfers.append(transfer)

    def _now_ns(self) -> int:
        return round(self._clock.now_seconds * 1e9)
