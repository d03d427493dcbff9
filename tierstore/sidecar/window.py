"""The memory that a store shares with the daemon, and the window that lends ranges of it to requests.

A slab is a memfd, of fixed size and with all its pages before it is shared.

NOTE [Seals] A process that could take pages out of its slab could have the daemon fill the daemon's own memory limit:
whoever touches a missing page pays for it. F_SEAL_FUTURE_WRITE forbids that (memfd_create(2), fallocate(2)), and new
writable mappings with it. So the daemon maps the slab first and then sets the seal, unless it trusts the client
(`daemon/slabs.py`). A client that resumes its session moves the bytes to a new memfd then."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import NamedTuple

from ..base.config import available_host_bytes, format_bytes
from ..base.free_runs import FreeRuns
from ..disk.allocator import round_up
from ..disk.forking import Inode, inode_of, not_while_forking
from ..disk.jobs import run_job
from ..disk.linux import address_of, copy_memory, make_pages_huge, map_over

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Without the seals, cutting a slab short would kill its readers by SIGBUS (memfd_create(2))."""

F_ADD_SEALS = 1033  # linux/fcntl.h, as the next two
F_GET_SEALS = 1034
F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1


class SharedSlab:
    """The client's side of one slab. The constructor blocks: every page is allocated here, and counted to this process.
    `inodes`: the files that a forked child has to give up, this one's among them while it is open; None: a child keeps
    it. OSError: there is not enough memory (ENOMEM, ENOSPC), or no descriptor is left."""

    def __init__(self, number: int, num_bytes: int, inodes: set[Inode] | None = None) -> None:
        self.number = number
        self._inodes = set[Inode]() if inodes is None else inodes
        self.num_bytes = max(round_up(num_bytes), mmap.PAGESIZE)
        with self._new_file() as (descriptor, inode):
            # Python's mapping of a memfd would hold a descriptor of its own, and so keep the pages that `renew` leaves.
            self._mapping = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.memory = memoryview(self._mapping)
            map_over(address_of(self.memory), descriptor, self.num_bytes, populate=True)
        self.descriptor, self.inode = descriptor, inode

    @property
    def needs_renewal(self) -> bool:
        """Whether a daemon has sealed it, so that it cannot be shared once more. See NOTE [Seals]."""
        return bool(fcntl.fcntl(self.descriptor, F_GET_SEALS) & F_SEAL_FUTURE_WRITE)

    def renew(self) -> None:
        """Move the bytes to a new memfd, at the same address. Nobody may write to them meanwhile; reading is allowed.
        Blocks, and takes memory for both. On OSError, as the constructor's, nothing has changed."""
        with self._new_file() as (descriptor, inode):
            written = 0
            while written < self.num_bytes:
                written += os.pwrite(descriptor, self.memory[written:], written)
            map_over(address_of(self.memory), descriptor, self.num_bytes, populate=True)
        old, (self.descriptor, self.inode) = (self.descriptor, self.inode), (descriptor, inode)
        self._close_file(*old)

    def close(self) -> None:
        """Idempotent. The memory is free when no view of it is left, here and in the daemon."""
        if self.descriptor >= 0:
            self._close_file(self.descriptor, self.inode)
            self.descriptor = -1
            self.memory = memoryview(b"")
            del self._mapping

    @contextlib.contextmanager
    def _new_file(self) -> Iterator[tuple[int, Inode]]:
        """It stays if the block, which maps it, does not raise."""
        if self.num_bytes > (available := available_host_bytes()):  # the kernel gives it all the same, and then kills
            reason = f"it takes {format_bytes(self.num_bytes)} at once, and {format_bytes(available)} are available"
            raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}: {reason}")
        with not_while_forking:
            descriptor = os.memfd_create("tierstore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            inode = inode_of(descriptor)
            self._inodes.add(inode)
        try:
            os.posix_fallocate(descriptor, 0, self.num_bytes)
            with contextlib.suppress(OSError):  # only slower
                make_pages_huge(descriptor, self.num_bytes)
            fcntl.fcntl(descriptor, F_ADD_SEALS, SEALS)
            yield descriptor, inode
        except BaseException:
            self._close_file(descriptor, inode)
            raise

    def _close_file(self, descriptor: int, inode: Inode) -> None:
        with not_while_forking:
            self._inodes.discard(inode)
            os.close(descriptor)


class WindowSlot(NamedTuple):
    """A range of a slab that one request may name."""

    slab: SharedSlab
    offset: int
    num_bytes: int

    @property
    def range(self) -> tuple[int, int, int]:
        """The number of the slab, the first byte, how many: as a request names it."""
        return self.slab.number, self.offset, self.num_bytes

    @property
    def memory(self) -> memoryview:
        return self.slab.memory[self.offset : self.offset + self.num_bytes]


class SharedWindow:
    """Cuts one slab, which is the caller's, into slots. `executor` runs copies."""

    def __init__(self, slab: SharedSlab, executor: Executor) -> None:
        self._slab = slab
        self._executor = executor
        self._filling: set[asyncio.Future[None]] = set()
        self._renewal: asyncio.Future[None] | None = None  # slots are not to be written to until it is done
        self._free = FreeRuns()
        self._free.free(0, slab.num_bytes)
        self._waiting: tuple[deque[_Waiter], deque[_Waiter]] = (deque(), deque())  # to read, to write

    async def take(self, num_bytes: int, *, to_read: bool) -> WindowSlot:
        """Take a slot of whole pages with room for `num_bytes`, as soon as there is one; or raise what `refuse_waiting`
        was given. Not to be cancelled."""
        size = round_up(max(num_bytes, 1))
        line = self._waiting[0 if to_read else 1]
        start = None if line or (not to_read and self._waiting[0]) else self._free.allocate(size)
        if start is None:
            waiter = _Waiter(size, asyncio.get_running_loop().create_future())
            line.append(waiter)
            start = await waiter.start
        return WindowSlot(self._slab, start, num_bytes)

    def give_back(self, slot: WindowSlot) -> None:
        self._free.free(slot.offset, round_up(max(slot.num_bytes, 1)))
        self._serve()

    async def fill(self, slot: WindowSlot, source: memoryview) -> None:
        """Copy `source` to a slot. Not to be cancelled."""
        while self._renewal is not None:
            await self._renewal
        copying = asyncio.ensure_future(run_job(self._executor, copy_memory, slot.memory, source))
        self._filling.add(copying)
        copying.add_done_callback(self._filling.discard)
        await copying

    async def renew(self) -> None:
        """Have the slab move to a new memfd if it cannot be shared again, while nobody fills a slot. As its `renew`.
        Slots that the daemon still reads or writes keep, there, the bytes that they had here. Not to be cancelled."""
        if not self._slab.needs_renewal:
            return
        renewal = self._renewal = asyncio.get_running_loop().create_future()
        try:
            if self._filling:
                await asyncio.wait(self._filling)
            await run_job(self._executor, self._slab.renew)
        finally:
            self._renewal = None
            renewal.set_result(None)

    def refuse_waiting(self, error: Callable[[], Exception]) -> None:
        """Raise an error in each `take` that waits: nobody gives a slot back any more."""
        for line in self._waiting:
            while line:
                line.popleft().start.set_exception(error())

    def _serve(self) -> None:
        for line in self._waiting:
            while line:
                start = self._free.allocate(line[0].size)
                if start is None:
                    return
                line.popleft().start.set_result(start)


class _Waiter(NamedTuple):
    size: int
    start: asyncio.Future[int]
