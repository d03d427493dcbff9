"""The disk tier on a directory of this machine: extents for what is large, LMDB for what is small.

::

    write ─► codec ─► extent ─► one job: encode + checksum + write ─► index commit ─► Stored
                 └──► small: one value ─────────────────────────────────┘
    read  ─► location in memory ─► one job: read + checksum + decode

All bookkeeping happens on the loop. The pool's jobs only move bytes; one that has written an extent also enters it in
the index, if the *home* (`home.py`: where the files live) outlives the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from time import monotonic

from ..base.config import check_directory
from ..base.defaults import NUM_AT_ONCE
from ..base.threads import IoThreads
from ..errors import ConfigError, StoreClosedError, StoreFullError
from .boundary import naming_the_limit, translated
from .budget import WriteAllowance
from .codec.codec import parse_codec
from .codec.policy import CodecPolicy
from .forking import let_go_of
from .home import Home, UnnamedHome
from .jobs import run_job, to_the_end
from .location import Location
from .native import NativeTransfers, is_native
from .scratch import SCRATCH_BYTES
from .segments import detect_io_mode
from .shelf import RecordShelf
from .tier import DiskUsage, DriveUsage, Kind, Loaded, Stored

_ADVICE_ON_ALLOWANCE = "wait, or raise max_write_bytes_per_day or host_bytes"


class LocalDisk:
    """Keeps records under a directory. A `DiskTier`, empty at first unless its home has kept an earlier one's records.

    All coroutines belong to one loop and do not block it; the constructor blocks for some milliseconds. A coroutine
    that is cancelled ends when its job has ended, and a write then leaves no record. A record may have zero bytes.
    After `close` all calls raise StoreClosedError; a key in use or a wrong length is the caller's error (ValueError).

    Args:
        inline_bytes: encoded records up to this length live in LMDB, longer ones in extents; None: all of up to 1 GiB
            do.
        executor: runs the jobs; not shut down before `close` has returned.
        num_at_once: how many records of each direction are at the device, encoded or decoded at once, at most.
        session: part of every checksum: a record of another session is refused. A home with names has its own.
        home: not opened yet; closed with the tier. None: under `directory`, without names.

    Raises:
        ConfigError: an option is not usable.
        StorageIOError, StoreFullError: nothing can be opened there. In both cases nothing is left open but `home`,
            which the caller closes; the records in it are still there.
    """

    def __init__(
        self,
        directory: Path,
        *,
        disk_bytes: int,
        inline_bytes: int | None,
        codec: str,
        checksum: bool,
        executor: Executor,
        num_at_once: int = NUM_AT_ONCE,
        session: int = 0,
        home: Home | None = None,
        max_write_bytes_per_day: int | None = None,
    ) -> None:
        fixed = parse_codec(codec)
        self._directory = check_directory(directory)
        limit = max_write_bytes_per_day
        sizes = {"disk_bytes": disk_bytes, "inline_bytes": inline_bytes, "max_write_bytes_per_day": limit}
        for option, num_bytes in sizes.items():
            if num_bytes is not None and num_bytes < 0:
                raise ConfigError(option, num_bytes, "give 0 or more bytes")
        self._allowance = None if limit is None else WriteAllowance(limit, monotonic())
        self.scratch_bytes = 2 * num_at_once * SCRATCH_BYTES
        self._executor = executor
        self._closed_because: str | None = None
        self._written_bytes = self._read_bytes = 0
        self._policy = CodecPolicy(fixed, num_at_once)
        self._home = UnnamedHome(self._directory, session) if home is None else home
        with translated("open", str(self._directory), "nothing was stored"):
            self._mode = detect_io_mode(self._home.directory)
            # Not where somebody has put an executor of their own before the store's: each transfer is theirs to see.
            uses_native = isinstance(executor, IoThreads) and is_native()
            self._native = NativeTransfers(num_at_once, self._policy.note_speed) if uses_native else None
            try:
                self._shelf = RecordShelf(
                    self._home,
                    self._mode,
                    self._policy,
                    executor,
                    self._native,
                    disk_bytes=disk_bytes,
                    inline_bytes=inline_bytes,
                    num_at_once=num_at_once,
                    has_checksums=checksum,
                )
            except BaseException:
                if self._native is not None:
                    self._native.stop()
                    self._native.close()  # no thread has started yet
                raise
        self.session, self.leases = self._shelf.session, self._shelf.leases

    async def write(self, key: int, source: memoryview, kind: Kind) -> Stored:
        self._check_open()
        if key in self._shelf.locations:
            raise ValueError(f"key {key} is in use")
        return await to_the_end(self._write(key, source, kind), undo=partial(self.discard, (key,)))

    async def read(self, key: int, destination: memoryview) -> Loaded:
        self._check_open()
        location = self._shelf.locations[key]
        if len(destination) != location.logical_bytes:
            raise ValueError(f"record {key} has {location.logical_bytes} bytes, not {len(destination)}")
        loaded = await to_the_end(self._shelf.read(key, destination))
        self._read_bytes += loaded.read_bytes
        return loaded

    def confirms(self, key: int, memory: memoryview) -> bool:
        return self._shelf.confirms(key, memory)

    async def discard(self, keys: Sequence[int]) -> None:
        self._check_open()
        locations = {key: self._shelf.locations[key] for key in keys}
        for key in locations:
            del self._shelf.locations[key]
        await to_the_end(self._shelf.entries.delete(locations))

    def usage(self) -> DiskUsage:
        disk_bytes, budget_bytes = self._shelf.space.usage()
        return DiskUsage(
            disk_bytes=disk_bytes,
            allocated_bytes=self._shelf.budget.segment_bytes + self._shelf.index.allocated_bytes,
            budget_bytes=budget_bytes,
            num_records=len(self._shelf.locations),
            io_mode=self._mode.description,
            write_allowance_bytes=None if self._allowance is None else self._allowance.left_bytes(monotonic()),
        )

    def drives(self) -> list[DriveUsage]:
        day_bytes = None if self._allowance is None else self._allowance.day_bytes
        return [DriveUsage(str(self._directory), self.usage(), self._written_bytes, self._read_bytes, day_bytes)]

    @property
    def damaged_indexes(self) -> Mapping[str, Exception]:
        """By directory, the damage that a change has found in the index: after it, changes may fail, but records in
        extents can be read."""
        damage = self._shelf.index.damage
        return {} if damage is None else {str(self._directory): damage}

    @property
    def is_empty(self) -> bool:
        """Whether it holds no record, and its index has refused no deletion that is still to be done."""
        return not (self._shelf.locations or self._shelf.entries.has_undeleted)

    def found_locations(self) -> dict[int, Location]:
        """A copy of where each record lies, by key."""
        return dict(self._shelf.locations)

    async def put_lease(self, number: int, blob: bytes) -> None:
        """Keep a few bytes under a number; returns when they are committed. On StoreFullError, StorageIOError and
        StoreClosedError, what was there still is."""
        self._check_open()
        await to_the_end(self._shelf.entries.put_lease(number, blob))

    async def delete_lease(self, number: int) -> None:
        """Returns when it is committed; where the index refuses, it is tried again with the next discard or write."""
        self._check_open()
        await to_the_end(self._shelf.entries.delete_lease(number))

    async def close(self, *, keep: bool = False) -> None:
        """As `DiskTier.close`. `keep`: leave named files for the next process, unless the index is damaged."""
        if self._closed_because is None:
            self._closed_because = "it was closed"
            await to_the_end(self._close(keep and not self.damaged_indexes))

    def codec_choices(self) -> Mapping[str, Mapping[str, int]]:
        return self._policy.choices()

    def descriptors(self) -> list[int]:
        """Every descriptor that keeps space on disk, LMDB's own included."""
        return [file.fileno() for file in self._shelf.space.files()] + self._shelf.index.descriptors()

    def abandon_after_fork(self) -> None:
        self._closed_because = "it belongs to the process that this one was forked from"
        let_go_of({self._shelf.index.inode, *self._shelf.space.inodes})
        let_go_of(self._home.inodes)
        if self._native is not None:
            self._native.abandon_after_fork()

    async def _write(self, key: int, source: memoryview, kind: Kind) -> Stored:
        """The allowance must have room for the whole record as if it were not encoded."""
        allowance, num_bytes = self._allowance, len(source)
        if allowance is not None and not allowance.take(num_bytes, now := monotonic()):
            reason = allowance.refusal(num_bytes, now)
            raise StoreFullError(num_bytes, *self._shelf.space.usage(), reason=reason, advice=_ADVICE_ON_ALLOWANCE)
        try:
            stored = await self._shelf.write(key, source, kind)
        except StoreFullError as error:
            if allowance is not None:
                allowance.give_back(num_bytes)
            if error.__cause__ is None:
                raise
            told = await run_job(self._executor, naming_the_limit, error, self._directory)
            raise told from told.__cause__
        if allowance is not None:
            allowance.give_back(num_bytes - stored.stored_bytes)
        self._written_bytes += stored.stored_bytes
        return stored

    def _check_open(self) -> None:
        if self._closed_because is not None:
            raise StoreClosedError(str(self._directory), self._closed_because)

    async def _close(self, keep: bool) -> None:
        await self._shelf.entries.settle()
        self._shelf.locations.clear()
        if self._native is not None:
            self._native.stop()
            await run_job(self._executor, self._native.close)
        await self._shelf.space.close(keep=keep)
        await run_job(self._executor, self._shelf.index.close)
        await run_job(self._executor, partial(self._home.close, keep=keep))
