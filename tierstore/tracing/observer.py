"""What a store tells of its records as they move. `Observer` itself does nothing: it stands where no trace is on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..disk.tier import Loaded, Stored

__all__ = ["Observer"]


class Observer:
    """Told of every move of a record, by its key, under the store's lock; never blocks, never raises."""

    def spill_queued(self, record: int, nbytes: int) -> None:
        """A record was chosen to leave memory."""

    def spill_began(self, record: int, nbytes: int) -> None:
        """A lane of the engine begins to write so many bytes of a record."""

    def spill_ended(self, record: int, outcome: Stored | Exception) -> None:
        """A write has ended: what was stored, or why it was not."""

    def spill_cancelled(self, record: int, nbytes: int) -> None:
        """A record that was queued to be written stays in memory, or is gone."""

    def freed(self, record: int, nbytes: int) -> None:
        """A record is on disk, and its memory is free."""

    def restore_queued(self, record: int, nbytes: int, *, demanded: bool) -> None:
        """A record is to be read; `demanded`: somebody waits for it already."""

    def restore_began(self, record: int) -> None:
        """A lane of the engine begins to read a record."""

    def restore_ended(self, record: int, outcome: Loaded | Exception, *, is_wanted: bool) -> None:
        """A read has ended: the record is in memory, or why it is not; not `is_wanted`: it was let go of meanwhile."""

    def restore_cancelled(self, record: int, nbytes: int) -> None:
        """A record was let go of before it was read."""

    def offloaded(self, record: int, nbytes: int) -> None:
        """A copy of a record from its accelerator was queued."""

    def reloaded(self, record: int, nbytes: int) -> None:
        """A copy of a record back to its accelerator was queued."""

    def changed(self) -> None:
        """Something was let go of, so what the tiers hold may have changed."""

    def stalled(self, seconds: float, cause: str, record: int | None) -> None:
        """The calling thread has just waited so long, for this record's bytes or (None) for room."""
