"""The seam of the rules: what they ask of the memory that holds the bytes.

The store answers with tensors and slots (`residency/memory.py`). No call waits."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol, TypeVar

from .record import RuledRecord

R_contra = TypeVar("R_contra", bound=RuledRecord, contravariant=True)


class Memory(Protocol[R_contra]):
    """The bytes of the records in host memory, and the tensors that refer to them."""

    @property
    def pages(self) -> Any:
        """Free host memory. Its `cached_bytes`: how much of it is kept for the next slots. Its `pinned_for`: an
        accelerator; None: it is not pinned, so any slot is as good as another."""

    @property
    def unaccounted(self) -> tuple[Collection[Any], ...]:
        """As long as all of these are empty, `catch_up` has nothing to do."""

    def has_sole_owner(self, record: R_contra) -> bool:
        """Whether nobody else holds the record's memory, or it is to be stored in any case."""

    def register_settled(self) -> None:
        """Make records of the tracked tensors whose bytes may be read."""

    def trim(self, *, is_for_read: bool = False) -> None:
        """Give back free memory beyond what the windows leave; after a read, memory for another one may be kept."""

    def prepare_offload(self, record: R_contra) -> None:
        """Decide which bytes are copied from the device, set `record.nbytes` to that, and give the record a slot."""

    def has_room_for_read(self, record: R_contra) -> bool:
        """Whether the slot that `prepare_read` would give the record now is as good as any."""

    def prepare_read(self, record: R_contra) -> None:
        """Give the record a slot for the bytes that are read. Raises OSError: the system has no memory."""

    def begin_write(self, record: R_contra) -> object | None:
        """Hold the record's memory for a write; returns what the worker needs. None: its handle is just dying."""

    def begin_read(self, record: R_contra) -> object: ...

    def has_moved(self, record: R_contra) -> bool:
        """Whether the memory that a write reads was moved or resized by others while it ran."""

    def attach(self, record: R_contra) -> bool:
        """Let the record's tensors use the bytes in its slot. False: its handle is just dying."""

    def empty_tensors(self, record: R_contra) -> None:
        """Let the record's tensors use its memory no longer: the bytes leave memory."""

    def free(self, record: R_contra) -> None:
        """Free the record's slot once nobody uses it any more, if it has one."""

    def take_back(self) -> None: ...

    def catch_up(self) -> bool:
        """Account for graphs that have died and for slots that are free again. Whether there were any."""

    def outstanding_bytes(self) -> int:
        """Bytes of slots that only tensors handed out earlier still use, counted one by one."""

    def give_up(self) -> None:
        """The store is closed: let go of all that others may still use, and of all tracked tensors."""
