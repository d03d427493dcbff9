"""How the residency and the engine call each other, so that neither has to import the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..rules.memory import Submissions

if TYPE_CHECKING:
    from ..disk.tier import Kind, Loaded, Stored
    from .copies import Marker
    from .handle import Record

__all__ = ["BytesToWrite", "DiskSubmissions", "Transfers"]


class BytesToWrite(NamedTuple):
    """The bytes to write, alive and unchanged until `end_spill`, and their kind, for the codec.

    `ready`: the point of a copy stream after which the bytes are there; None: they are there already.
    """

    source: memoryview
    kind: Kind
    ready: Marker | None


class Transfers(Protocol):
    """The residency, as the engine sees it. Called on the loop; each call waits for nothing but a short lock.

    `begin_` gives the memory to write or to fill, alive until `end_`; None: the job is not wanted any more.
    """

    def begin_spill(self, record: Record) -> BytesToWrite | None: ...

    def end_spill(self, record: Record, outcome: Stored | Exception) -> None: ...

    def begin_restore(self, record: Record) -> memoryview | None: ...

    def end_restore(self, record: Record, outcome: Loaded | Exception) -> None: ...

    def end_discard(self, num_records: int) -> None: ...

    def engine_ended(self, error: BaseException | None) -> None:
        """End every wait: the engine takes no more work. `error`: why it ended; None: it was asked to stop."""


class DiskSubmissions(Submissions["Record"], Protocol):
    """The engine, as the residency sees it."""

    @property
    def disk_budget_bytes(self) -> int: ...

    @property
    def is_running(self) -> bool: ...

    def hurry(self) -> None:
        """Hold no record back: a thread waits, or wants to see progress."""

    def confirms(self, key: int, memory: memoryview) -> bool:
        """Whether `memory` has the bytes stored under the key, by their checksum. Blocks while it is computed."""
