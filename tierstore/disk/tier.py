"""The contract between the engine and a disk tier. `LocalDisk`, `Drives` and `RemoteDisk` (of a daemon) keep it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable


class Kind(NamedTuple):
    """The kind of a record: those of one kind compress alike. `dtype`, such as "bfloat16", and `origin`, the autograd
    node that made the tensor, are "" where unknown. `content`, such as "many zeros", is filled in by the tier."""

    dtype: str = ""
    itemsize_bytes: int = 1
    origin: str = ""
    content: str = ""


class Stored(NamedTuple):
    """The receipt of a write.

    Attributes:
        stored_bytes: bytes taken on disk, padding included.
        codec: "none", "zstd:1", "shuffle-zstd:1", ...
        kind: the name under which `codec_choices` counts the record.
        checksum: xxh3-64 over the bytes as given, with the record's own seed; None: none, or they were encoded.
        drive_seconds, cpu_seconds: in the device; of encoding, checksum and system calls. None: not known here.
    """

    stored_bytes: int
    codec: str
    kind: str = ""
    checksum: int | None = None
    drive_seconds: float | None = None
    cpu_seconds: float | None = None


class Loaded(NamedTuple):
    """The receipt of a read; times as in `Stored`."""

    read_bytes: int
    drive_seconds: float | None = None
    cpu_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """A snapshot of the contents of a disk tier.

    Attributes:
        disk_bytes, allocated_bytes: that live records take, padding included; taken from the file system.
        budget_bytes: the most that records may take.
        io_mode: "O_DIRECT", or "buffered (reason)"; of long records in the index, up to which length they are buffered.
        write_allowance_bytes: bytes that may still be written now; None: there is no limit, or the daemon keeps it.
    """

    disk_bytes: int
    allocated_bytes: int
    budget_bytes: int
    num_records: int
    io_mode: str
    write_allowance_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveUsage(DiskUsage):
    """A snapshot of one drive of a disk tier: what it holds, and what it has moved.

    Attributes:
        path: its directory.
        written_bytes, read_bytes: moved since it was opened, as they are on disk.
        write_day_bytes: the write allowance of a day; None: there is no limit.
        write_bytes_per_second: while it had something to write; None: not measured.
        is_resting: other drives are preferred for now, because it was full or a write has failed.
    """

    path: str
    written_bytes: int
    read_bytes: int
    write_day_bytes: int | None = None
    write_bytes_per_second: float | None = None
    is_resting: bool = False


class DiskTier(Protocol):
    """Keeps records: bytes under a key. All coroutines run on the engine's loop and do not block it. Nobody cancels
    one: it uses the caller's memory until it has ended.

    Attributes:
        scratch_bytes: the most working memory that its jobs hold in this process, all together.
    """

    scratch_bytes: int

    async def write(self, key: int, source: memoryview, kind: Kind) -> Stored:
        """Store `source` as the record `key`.

        Args:
            key: unique for the life of the tier; never used twice.
            source: contiguous uint8, shape [n]; any address. Must not change before this returns.
            kind: what is known of the content.

        Raises:
            StoreFullError: budget, file system or write allowance has no room; nothing is stored, the caller still
                owns the bytes.
            StorageIOError: the device failed; nothing is stored, the caller still owns the bytes.
        """
        ...

    async def read(self, key: int, destination: memoryview) -> Loaded:
        """Fill `destination` with the record.

        Args:
            key: of a record whose `write` has returned.
            destination: writable uint8, shape [n], n exactly as written. Where its address is congruent to
                the source's modulo 4096, an unencoded record is read straight into it.

        Raises:
            CorruptDataError: the bytes are not those that were written; `destination` holds garbage.
            StorageIOError: the device failed; the record is still there and may be asked for again.
        """
        ...

    def confirms(self, key: int, memory: memoryview) -> bool:
        """Whether `memory` holds the bytes of the record, by its checksum; False where that cannot be told: it was
        encoded, or has no checksum, or is being discarded. Any thread; reads memory, no disk."""
        ...

    async def discard(self, keys: Sequence[int]) -> None:
        """Free the records; no read of them may be in progress. An unknown key is the caller's error (KeyError);
        nothing else can fail."""
        ...

    def usage(self) -> DiskUsage:
        """A snapshot of the contents. Any thread; does not block."""
        ...

    def codec_choices(self) -> Mapping[str, Mapping[str, int]]:
        """How often each codec was used, by kind of record. Any thread; does not block."""
        ...

    def abandon_after_fork(self) -> None:
        """In a forked child: close its copies of the descriptors; the parent's are untouched. The last call there."""
        ...

    async def close(self) -> None:
        """Free everything; idempotent. No other call may be in progress."""
        ...


@runtime_checkable
class WaitingDiskTier(Protocol):
    """A disk tier whose jobs may wait for somebody who is away."""

    def end_soon(self) -> None:
        """The store is being closed: nobody needs what the jobs do any more. Those that wait for somebody who is away
        fail instead. On the loop; `close` follows when all have ended."""
        ...
