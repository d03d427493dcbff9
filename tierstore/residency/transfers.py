"""What passes between the residency and the worker, which stands above it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from ..disk.tier import Kind
    from ..tensors.copies import Marker


class BytesToWrite(NamedTuple):
    """The bytes to write, alive and unchanged until the job has ended, and their kind, for the codec.

    `ready`: the point of a copy stream after which the bytes are there; None: they are there already."""

    source: memoryview
    kind: Kind
    ready: Marker | None


class Worker(Protocol):
    """Who moves the bytes, as the residency sees it. Any thread may call it."""

    @property
    def disk_budget_bytes(self) -> int: ...

    @property
    def is_running(self) -> bool: ...

    def wake(self) -> None:
        """Have it call `Residency.exchange` soon. Never blocks."""

    def confirms(self, key: int, memory: memoryview) -> bool:
        """Whether `memory` has the bytes stored under the key, by their checksum. Blocks while it is computed."""
