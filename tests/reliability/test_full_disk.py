"""No room: what fits stays in memory, then the pack raises with the figures, and with room again training goes on."""

import os
import re
import resource
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.daemon.clients import sessions_of
from tests.daemon.conftest import StartDaemon
from tests.hooks.programs import all_bits, assert_same_bits, assert_same_gradients, training
from tests.inspect_store import inspect_tier
from tests.reliability.conftest import DRIVE_BYTES, OpenStore, end_well
from tests.reliability.drives import MIB, fill_up, used_bytes
from tests.store.disk_conformance import PLAIN, gather, read_back
from tests.store.disks import local_disk
from tests.waiting import until
from tierstore import (
    DaemonUnavailableError,
    QuotaExceededError,
    StorageIOError,
    StoreFullError,
    TierStore,
    tiered_offload,
)
from tierstore.disk.file_layout import FOLDER_NAME
from tierstore.disk.local import LocalDisk

NBYTES = MIB
HOST_BYTES = 4 * MIB
SETTINGS = {"host_bytes": HOST_BYTES, "staging_bytes": 2 * MIB, "codec": "none"}


class Graphs:
    """Graphs that are alive, each with one saved tensor of 1 MiB and known gradients."""

    def __init__(self, nbytes: int = NBYTES) -> None:
        self.weight = torch.randn(nbytes // 4, requires_grad=True)
        self.losses: list[torch.Tensor] = []

    def add(self, store: TierStore) -> None:
        number = len(self.losses)
        with tiered_offload(store, min_bytes=0):
            self.losses.append((self.weight * (number + 1) / 50).exp().sum())

    def add_until_full(self, store: TierStore) -> StoreFullError:
        for _ in range(1000):
            try:
                self.add(store)
            except StoreFullError as error:
                error.__traceback__ = None  # its frames hold what was saved last
                return error
        raise AssertionError("it is never full")

    def check(self) -> None:
        for number, loss in enumerate(self.losses):
            expected = self.weight.detach().clone().requires_grad_()
            (expected * (number + 1) / 50).exp().sum().backward()
            found = torch.autograd.grad(loss, [self.weight], retain_graph=True)
            assert_same_bits(all_bits(found), all_bits([expected.grad]))


def assert_says_where_the_data_is(error: StoreFullError) -> None:
    assert error.needed_bytes == NBYTES
    assert error.host_budget_bytes == HOST_BYTES
    assert HOST_BYTES - NBYTES < error.host_bytes <= HOST_BYTES, "what fits into memory stays there first"
    for figure in (error.needed_bytes, error.disk_bytes, error.disk_budget_bytes, error.host_bytes):
        assert str(figure) in str(error)
    assert "the data is still in memory" in str(error)


def assert_says_that_the_drive_is_full(error: StoreFullError, drive: Path) -> None:
    """A larger disk budget would not help, so it is not advised by an embedded store, which knows that."""
    assert re.search(rf"the drive of {drive} is full: No space left on device", error.reason)
    assert "raise disk_bytes" not in str(error)
    assert "host_bytes" in error.advice
    assert "drive" in error.advice


def assert_trains_again(store: TierStore, graphs: Graphs) -> None:
    """Once the graphs are gone, what they took is free and the next steps are right, on disk."""
    graphs.losses.clear()
    store.flush()
    stats = store.stats()
    assert (stats.live_handles, stats.disk_bytes, stats.host_bytes) == (0, 0, 0)
    more = Graphs()
    for _ in range(12):
        more.add(store)
    store.flush()
    assert store.stats().disk_bytes >= 6 * NBYTES, "it writes again"
    more.check()
    more.losses.clear()
    assert_same_gradients(training("mlp", num_steps=2), store)


def test_full_drive_raises_at_pack_and_goes_on_when_graphs_are_gone(open_store: OpenStore, small_drive: Path) -> None:
    store = open_store(disk_bytes="1GiB", **SETTINGS)
    for _ in range(2):
        graphs = Graphs()
        error = graphs.add_until_full(store)
        assert_says_where_the_data_is(error)
        assert error.disk_bytes + NBYTES < error.disk_budget_bytes, "it is the drive that is full"
        assert_says_that_the_drive_is_full(error, small_drive)
        assert used_bytes(small_drive) > DRIVE_BYTES // 2
        graphs.check()
        assert_trains_again(store, graphs)


def test_session_quota_spent_raises_and_leaves_the_neighbour_its_room(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    second = tmp_path / "second"
    second.mkdir()
    daemon = start_daemon(
        codec="none", disk_bytes=64 * MIB, session_disk_bytes=16 * MIB, arguments=[f"--path={second}"]
    )
    settings = {name: value for name, value in SETTINGS.items() if name != "codec"}
    with (
        TierStore.connect(daemon.socket, name="greedy", **settings) as store,  # type: ignore[arg-type]
        TierStore.connect(daemon.socket, name="neighbour", **settings) as neighbour,  # type: ignore[arg-type]
    ):
        graphs, others = Graphs(), Graphs()
        error = graphs.add_until_full(store)
        assert isinstance(error, QuotaExceededError)
        assert_says_where_the_data_is(error)
        assert (error.session, error.disk_budget_bytes) == ("greedy", 16 * MIB)
        assert "--session-disk-bytes" in str(error)
        for _ in range(12):
            others.add(neighbour)
        neighbour.flush()
        assert neighbour.stats().disk_bytes >= 6 * NBYTES
        graphs.check()
        others.check()
        others.losses.clear()
        assert_trains_again(store, graphs)


def test_drive_filled_by_others_raises_and_goes_on_when_they_leave(open_store: OpenStore, small_drive: Path) -> None:
    """The last byte is gone while records are on disk: even what LMDB needs to forget one."""
    store = open_store(disk_bytes="1GiB", **SETTINGS)
    graphs = Graphs(100_000)  # in LMDB, whose file grows with them
    for _ in range(100):
        graphs.add(store)
    store.flush()
    filler = fill_up(small_drive)
    more = Graphs()
    error = more.add_until_full(store)
    assert "the data is still in memory" in str(error)
    graphs.check()
    more.check()
    graphs.losses.clear()  # deletes fail now, or find pages that are free
    more.losses.clear()
    filler.unlink()
    assert_trains_again(store, more)


def test_tensor_that_fits_nowhere_is_refused_and_smaller_ones_go_on(open_store: OpenStore) -> None:
    store = open_store(disk_bytes="1GiB", **SETTINGS)
    weight = torch.randn(2 * DRIVE_BYTES // 4, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        loss = weight.exp().sum()
    with pytest.raises(StoreFullError) as caught:
        store.flush()
    assert caught.value.needed_bytes == 2 * DRIVE_BYTES
    (found,) = torch.autograd.grad(loss, [weight])
    assert torch.equal(found, weight.detach().exp())
    del caught, loss, found
    assert_trains_again(store, Graphs())


async def test_full_drive_is_told_also_of_a_record_that_was_encoded_to_fit(small_drive: Path) -> None:
    noise = memoryview(bytearray(os.urandom(12 * MIB)))
    async with local_disk(small_drive, disk_bytes=120 * MIB, codec="zstd:1") as disk:
        for key in range(11):  # in one segment, with so much room that no second one is made ahead of need
            await disk.write(key, noise[: 2 * MIB], PLAIN)
        fill_up(small_drive)
        await disk.discard([1])
        with pytest.raises(StoreFullError) as caught:
            await disk.write(12, noise, PLAIN)
    assert_says_that_the_drive_is_full(caught.value, small_drive)
    assert isinstance(caught.value.__cause__, OSError)


def test_store_on_a_full_drive_names_it_once(small_drive: Path) -> None:
    filler = fill_up(small_drive)
    with pytest.raises(StorageIOError) as caught:
        TierStore(small_drive, disk_bytes=2**30)
    assert str(caught.value) == f"open failed at {small_drive}: No space left on device; nothing was stored"
    filler.unlink()
    TierStore(small_drive).close()


def test_daemon_that_finds_no_room_for_a_session_says_so(small_drive: Path, start_daemon: StartDaemon) -> None:
    daemon = start_daemon(small_drive, disk_bytes=2**30)
    daemon.wait_until_open()
    said = r"no session can be opened, its drive has no room: .*No space left on device; nothing was stored"
    filler = fill_up(small_drive)
    with suppress(DaemonUnavailableError):  # it may have the room that the daemon's index has to give back
        TierStore.connect(daemon.socket).close()
    fill_up(small_drive)
    with pytest.raises(DaemonUnavailableError, match=said):
        TierStore.connect(daemon.socket)
    filler.unlink()
    TierStore.connect(daemon.socket).close()
    assert daemon.stop() == 0, daemon.log


async def test_session_is_not_refused_for_room_that_the_daemon_itself_holds(small_drive: Path) -> None:
    """One empty segment is kept for the next record; a lease gets its room, as a record does."""
    async with local_disk(small_drive, disk_bytes=2**30, inline_bytes=128 * 2**10) as disk:
        await disk.write(1, memoryview(bytes(MIB)), PLAIN)
        await disk.discard([1])
        kept_bytes = disk.usage().allocated_bytes
        fill_up(small_drive)
        for number in range(NUM_LEASES):
            await disk.put_lease(number, b"x" * 200)
        assert disk.usage().allocated_bytes < kept_bytes // 2
        assert len(leases_of(disk)) == NUM_LEASES


def leases_of(disk: LocalDisk) -> dict[int, bytes]:
    """In its index now."""
    _, leases = inspect_tier(disk).index.entries()
    return leases


NUM_TINY = 10_000
"""So many entries of LMDB fill more pages than a full drive lets it copy."""
NUM_LEASES = 500


@pytest.mark.parametrize("reason", ["a full drive", "ulimit -f"])
async def test_deletions_that_the_index_may_refuse(small_drive: Path, reason: str) -> None:
    """On a full drive they take the space that is kept for them. What is refused is done later."""
    async with local_disk(small_drive, disk_bytes=2**30, inline_bytes=1000) as disk:
        await gather(*(disk.write(key, memoryview(b"x" * 200), PLAIN) for key in range(NUM_TINY)))
        await gather(*(disk.put_lease(number, b"x" * 200) for number in range(NUM_LEASES)))
        filler = fill_up(small_drive)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if reason == "ulimit -f":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        try:
            await disk.discard(range(NUM_TINY))
            await gather(*(disk.delete_lease(number) for number in range(NUM_LEASES)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert disk.usage().num_records == 0
        is_done = reason == "a full drive"
        assert (disk.is_empty, not leases_of(disk), disk.usage().disk_bytes == 0) == (is_done,) * 3
        filler.unlink()
        receipt = await disk.write(NUM_TINY, memoryview(b"y" * 200), PLAIN)
        assert disk.usage().disk_bytes == receipt.stored_bytes
        assert await read_back(disk, NUM_TINY, 200) == b"y" * 200
        assert leases_of(disk) == {}


@pytest.mark.usefixtures("unvalidated")  # which looks at each of them in each call
def test_session_that_ends_while_the_drive_is_full_is_gone(small_drive: Path, start_daemon: StartDaemon) -> None:
    daemon = start_daemon(small_drive, codec="none", disk_bytes=2**30)
    with TierStore.connect(daemon.socket, host_bytes=0, name="neighbour") as neighbour:
        kept = neighbour.put(torch.arange(1000))
        neighbour.flush()
        with TierStore.connect(daemon.socket, host_bytes=0, name="leaving") as store:
            handles = [store.put(torch.full((50,), number)) for number in range(NUM_TINY)]
            store.flush()
            filler = fill_up(small_drive)
        # A client that closes waits for seconds at most; who asks without a rest would slow the daemon down.
        until(lambda: sessions_of(daemon).keys() == {"neighbour"}, meanwhile=lambda: time.sleep(0.1))
        assert torch.equal(neighbour.get(kept), torch.arange(1000))
        filler.unlink()
        more = neighbour.put(torch.arange(1000))
        neighbour.flush()
        assert torch.equal(neighbour.get(more), torch.arange(1000))
    handles.clear()
    end_well(daemon)
    assert not (small_drive / FOLDER_NAME).exists(), "nobody is left, nor is anything else"
