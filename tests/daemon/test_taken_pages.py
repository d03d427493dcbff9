"""A client that takes pages out of its shared memory loses its connection; the daemon allocates none in their place."""

import asyncio
import ctypes
import fcntl
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import wire
from tests.daemon.clients import RawClient, client_of
from tests.daemon.conftest import DaemonProcess, StartDaemon
from tests.daemon.peer import Peer, opened_disk
from tierstore.disk.tier import Kind
from tierstore.sidecar.window import F_ADD_SEALS, F_SEAL_FUTURE_WRITE, SharedSlab, SharedWindow

MIB = 2**20
UID = 64_987
"""Of an ordinary user whom no machine has."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_PUNCH_AND_KEEP_SIZE = 3  # linux/falloc.h


class Memory:
    def __init__(self, num_bytes: int, seals: int) -> None:
        self.descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, num_bytes)
        self.mapping = mmap.mmap(self.descriptor, num_bytes)
        self.mapping[:] = b"x" * num_bytes
        fcntl.fcntl(self.descriptor, F_ADD_SEALS, seals)

    @property
    def allocated_bytes(self) -> int:
        return os.fstat(self.descriptor).st_blocks * 512

    def punch(self) -> int:
        num_bytes = len(self.mapping)
        return _libc.fallocate(self.descriptor, _PUNCH_AND_KEEP_SIZE, 0, num_bytes) and ctypes.get_errno()


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.fixture(scope="module")
def shared_daemon(start_shared_daemon: StartDaemon) -> DaemonProcess:
    return start_shared_daemon(allow_uid=UID, codec="none")


@pytest.fixture
def daemon(shared_daemon: DaemonProcess) -> Iterator[DaemonProcess]:
    """Serves others to the end."""
    daemon = shared_daemon
    with client_of(daemon) as neighbour:
        neighbour.open()
        slab = SharedSlab(1, MIB)
        neighbour.share(slab)
        yield daemon
        neighbour.send(wire.Write(1, 1, 1, 0, MIB, "uint8", 1, ""))
        neighbour.expect(wire.Stored)
        slab.close()
    assert daemon.process.poll() is None


def test_pages_taken_away_before_a_job_are_not_allocated_by_the_daemon(daemon: DaemonProcess) -> None:
    """Of a client that is trusted not to, because it runs as the daemon's user; so its memory is not sealed."""
    for request in (wire.Write(2, 2, 1, 0, MIB, "uint8", 1, ""), wire.Read(2, 1, 1, 2 * MIB, MIB)):
        memory = Memory(16 * MIB, SEALS | fcntl.F_SEAL_SEAL)
        with client_of(daemon) as client:
            client.open()
            client.send(wire.Slab(1, 16 * MIB), descriptors=(memory.descriptor,))
            client.send(wire.Write(1, 1, 1, 0, MIB, "uint8", 1, ""))
            client.expect(wire.Stored)
            assert memory.punch() == 0
            client.send(request)
            assert client.is_refused("pages that are not allocated")
            assert memory.allocated_bytes == 0
            os.close(memory.descriptor)


def test_huge_pages_are_refused(daemon: DaemonProcess) -> None:
    """Where the kernel has none left, a missing one kills who touches it."""
    try:
        descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    except OSError as error:
        pytest.skip(f"this kernel has no huge pages: {error}")
    os.ftruncate(descriptor, 2 * MIB)
    fcntl.fcntl(descriptor, F_ADD_SEALS, SEALS)
    with client_of(daemon) as client:
        client.open()
        client.send(wire.Slab(1, 2 * MIB), descriptors=(descriptor,))
        assert client.is_refused("huge pages")
    os.close(descriptor)


def as_another_user(plays: Sequence[Callable[[RawClient], object]], daemon: DaemonProcess) -> None:
    daemon.let_everybody_connect()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setuid(UID)
            for play in plays:
                with client_of(daemon) as client:
                    client.open()
                    play(client)
            status = 0
        except BaseException as error:  # noqa: BLE001 - reported, and the child ends
            print(f"as another user: {error!r}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def takes_none_away(client: RawClient) -> None:
    memory = Memory(16 * MIB, SEALS)
    client.send(wire.Slab(1, 16 * MIB), descriptors=(memory.descriptor,))
    client.send(wire.Write(1, 1, 1, 0, MIB, "uint8", 1, ""))
    client.expect(wire.Stored)
    assert memory.punch() == 1, "EPERM"
    memory.mapping[:MIB] = bytes(MIB)
    client.send(wire.Read(2, 1, 1, 0, MIB))
    client.expect(wire.Loaded)
    assert memory.mapping[:] == b"x" * (16 * MIB), "both see the same memory still"


def cannot_be_sealed(client: RawClient) -> None:
    memory = Memory(MIB, SEALS | fcntl.F_SEAL_SEAL)
    client.send(wire.Slab(1, MIB), descriptors=(memory.descriptor,))
    assert client.is_refused("cannot be sealed", "update tierstore")


def takes_some_away_just_then(client: RawClient) -> None:
    """Around the sealing, as fast as it goes."""
    memory = Memory(2 * MIB, SEALS)
    client.send(wire.Slab(1, 2 * MIB), wire.Write(1, 1, 1, 0, MIB, "", 1, ""), descriptors=(memory.descriptor,))
    taken = memory.punch() == 0
    answer = client.receive()
    assert isinstance(answer, wire.Refused if taken else wire.Stored), (taken, answer)
    assert memory.allocated_bytes == (0 if taken else 2 * MIB)
    os.close(memory.descriptor)


@needs_root
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_another_user_cannot_take_pages_away_nor_have_the_daemon_allocate_some(daemon: DaemonProcess) -> None:
    as_another_user([takes_none_away, cannot_be_sealed, *[takes_some_away_just_then] * 40], daemon)


def test_slab_that_was_sealed_moves_with_its_bytes_and_leaves_nothing() -> None:
    inodes: set[tuple[int, int]] = set()
    slab = SharedSlab(1, 4 * MIB, inodes)
    slab.memory[:] = bytes(range(256)) * (4 * MIB // 256)
    view = slab.memory[MIB:]
    for _ in range(2):
        assert not slab.needs_renewal
        fcntl.fcntl(slab.descriptor, F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
        assert slab.needs_renewal
        old = os.dup(slab.descriptor)
        slab.renew()
        assert view == bytes(range(256)) * (3 * MIB // 256)
        view[:5] = b"\0\1\2\3\4"
        assert inodes == {slab.inode}
        with mmap.mmap(slab.descriptor, 4 * MIB) as mapped:
            mapped[MIB] = 77
            assert view[0] == 77, "the daemon's memory is ours"
            mapped[MIB] = 0
        mapped_inodes = [line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines()]
        assert str(os.fstat(old).st_ino) not in mapped_inodes, "its pages would stay"
        os.close(old)
    slab.close()
    assert not inodes


class HeldExecutor(ThreadPoolExecutor):
    """Each of its jobs waits until it may go on. Counts those that were given to it."""

    def __init__(self) -> None:
        super().__init__(2)
        self.num_jobs = 0
        self.goes_on = threading.Event()

    def submit(self, job: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        self.num_jobs += 1
        return super().submit(lambda: (self.goes_on.wait(), job(*arguments, **named))[1])


@pytest.mark.parametrize("moves_first", [False, True])
async def test_slab_does_not_move_while_a_slot_is_filled_nor_the_reverse(moves_first: bool) -> None:
    """Or what is copied to the old memory after that was copied would be lost, and nobody would notice."""
    slab = SharedSlab(1, 4 * MIB)
    with HeldExecutor() as executor:
        window = SharedWindow(slab, executor)
        slot = await window.take(MIB, to_read=False)
        fcntl.fcntl(slab.descriptor, F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
        steps = [window.fill(slot, memoryview(b"x" * MIB)), window.renew()]
        tasks = []
        for step in reversed(steps) if moves_first else steps:
            tasks.append(asyncio.ensure_future(step))
            for _ in range(5):
                await asyncio.sleep(0)  # as far as it goes
        num_begun = executor.num_jobs
        executor.goes_on.set()
        await asyncio.gather(*tasks)
        assert (num_begun, executor.num_jobs) == (1, 2)
        assert os.pread(slab.descriptor, MIB, slot.offset) == b"x" * MIB
    slab.close()


async def test_slab_that_was_sealed_is_shared_anew_with_what_unanswered_writes_name(peer: Peer) -> None:
    async with opened_disk(peer) as (disk, guest):
        slab = disk._slab
        writing = asyncio.ensure_future(disk.write(1, memoryview(b"saved" * 1000), Kind("", 1, "")))
        write = await guest.expect(wire.Write)
        fcntl.fcntl(slab.descriptor, F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
        guest.leave()
        again = await peer.guest()
        await again.welcome(wire.Resume, wire.Resumed())
        await again.expect(wire.Slab)
        assert await again.expect(wire.Write) == write
        assert not slab.needs_renewal
        assert os.pread(slab.descriptor, 5000, write.offset) == b"saved" * 1000
        await again.say(wire.Stored(write.request, 5000, "none", "other", None))
        await writing
