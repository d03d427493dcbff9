"""What passes between the residency and the engine, which stands above it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..ledger.memory import Submissions
from .handle import Record

if TYPE_CHECKING:
    from ..disk.tier import Kind
    from .copies import Marker


class BytesToWrite(NamedTuple):
    """The bytes to write, alive and unchanged until `end_spill`, and their kind, for the codec.

    `ready`: the point of a copy stream after which the bytes are there; None: they are there already.
    """

    source: memoryview
    kind: Kind
    ready: Marker | None


class DiskSubmissions(Submissions[Record], Protocol):
    """The engine, as the residency sees it."""

    @property
    def disk_budget_bytes(self) -> int: ...

    @property
    def is_running(self) -> bool: ...

    def hurry(self) -> None:
        """Hold no record back: a thread waits, or wants to see progress."""

    def confirms(self, key: int, memory: memoryview) -> bool:
        """Whether `memory` has the bytes stored under the key, by their checksum. Blocks while it is computed."""
