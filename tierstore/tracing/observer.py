"""What a store tells of its records as they move. This observer does not look: it stands where no trace is on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..disk.tier import Loaded, Stored

__all__ = ["Observer"]


class Observer:
    """Told of every move of a record, by its key, under the store's lock; never blocks, never raises."""

    def spill_queued(self, record: int, nbytes: int) -> None:
        """It was chosen to leave memory."""

    def spill_began(self, record: int, nbytes: int) -> None:
        """A lane writes so many bytes of it."""

    def spill_ended(self, record: int, outcome: Stored | Exception) -> None:
        """They are on disk, or why not."""

    def spill_cancelled(self, record: int, nbytes: int) -> None:
        """It is not written."""

    def freed(self, record: int, nbytes: int) -> None:
        """It is on disk, and its memory is free."""

    def restore_queued(self, record: int, nbytes: int, *, demanded: bool) -> None:
        """It is to be read; `demanded`: somebody waits for it already."""

    def restore_began(self, record: int) -> None:
        """A lane reads it."""

    def restore_ended(self, record: int, outcome: Loaded | Exception, *, is_wanted: bool) -> None:
        """It is in memory, or why not; not `is_wanted`: it was let go of meanwhile."""

    def restore_cancelled(self, record: int, nbytes: int) -> None:
        """It was let go of before it was read."""

    def offloaded(self, record: int, nbytes: int) -> None:
        """A copy from an accelerator was queued."""

    def reloaded(self, record: int, nbytes: int) -> None:
        """A copy back was queued."""

    def changed(self) -> None:
        """Something was let go of."""

    def stalled(self, seconds: float, cause: str, record: int | None) -> None:
        """This thread has just waited so long, for these bytes or (None) for room."""
