"""How the residency and the engine call each other.

The residency submits records to the engine (`DiskSubmissions`). The engine asks the residency for a record's memory,
and reports back (`Transfers`). Both sides import this module, and neither imports the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..rules.memory import Submissions

if TYPE_CHECKING:
    from ..disk.tier import Kind, Loaded, Stored
    from .copies import Marker
    from .handle import Record

__all__ = ["BytesToWrite", "DiskSubmissions", "Transfers"]


class BytesToWrite(NamedTuple):
    """The bytes to write.

    Attributes:
        source: the bytes, alive and unchanged until `end_spill`.
        kind: their kind, for the codec.
        ready: the point of a copy stream after which the bytes are there; None: they are there already.
    """

    source: memoryview
    kind: Kind
    ready: Marker | None


class Transfers(Protocol):
    """The residency, as the engine sees it. Called on the loop; each call waits for nothing but a short lock."""

    def begin_spill(self, record: Record) -> BytesToWrite | None:
        """Begin a write: returns the bytes; None: the write is not wanted any more."""

    def end_spill(self, record: Record, outcome: Stored | Exception) -> None:
        """End a write."""

    def begin_restore(self, record: Record) -> memoryview | None:
        """Begin a read: returns the memory to fill, alive until `end_restore`; None: it is not wanted any more."""

    def end_restore(self, record: Record, outcome: Loaded | Exception) -> None:
        """End a read."""

    def end_discard(self, num_records: int) -> None:
        """Note that the bytes on disk of `num_records` records have been freed."""

    def engine_ended(self, error: BaseException | None) -> None:
        """End every wait: the engine takes no more work. `error`: why it ended; None: it was asked to stop."""


class DiskSubmissions(Submissions["Record"], Protocol):
    """The engine, as the residency sees it."""

    @property
    def disk_budget_bytes(self) -> int:
        """The disk tier's budget."""

    @property
    def is_running(self) -> bool:
        """Whether its thread is alive."""

    def hurry(self) -> None:
        """Hold no record back: a thread waits, or wants to see progress."""

    def confirms(self, key: int, memory: memoryview) -> bool:
        """Whether `memory` has the bytes stored under the key, by their checksum. Blocks while it is computed."""
