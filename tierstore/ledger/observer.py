"""How a store reports moves of records, where somebody observes it. `Observer` itself ignores them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..disk.tier import Loaded, Stored


class Observer:
    """Receives every move of a record, by its key. Called under the store's lock; never blocks, never raises.

    A copy (`offloaded`, `reloaded`) is reported when it is queued; an outcome is what was moved, or why that failed."""

    def spill_queued(self, record: int, nbytes: int) -> None: ...

    def spill_began(self, record: int, nbytes: int) -> None: ...

    def spill_ended(self, record: int, outcome: Stored | Exception) -> None: ...

    def spill_cancelled(self, record: int, nbytes: int) -> None: ...

    def freed(self, record: int, nbytes: int) -> None: ...

    def restore_queued(self, record: int, nbytes: int, *, demanded: bool) -> None: ...

    def restore_began(self, record: int) -> None: ...

    def restore_ended(self, record: int, outcome: Loaded | Exception, *, is_wanted: bool) -> None:
        """A read has ended; `outcome`: what was read, or why it failed. `is_wanted`: it was not released meanwhile."""

    def restore_cancelled(self, record: int, nbytes: int) -> None: ...

    def offloaded(self, record: int, nbytes: int) -> None: ...

    def reloaded(self, record: int, nbytes: int) -> None: ...

    def changed(self) -> None:
        """Something was released, so what the tiers hold may have changed."""

    def stalled(self, seconds: float, cause: str, record: int | None) -> None:
        """The calling thread has just waited `seconds`, for this record's bytes or (None) for room."""
