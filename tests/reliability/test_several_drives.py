"""Several drives under one store: drives that fill up, fail or are damaged, kills, and a daemon on both."""

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.daemon.conftest import END_SECONDS, DaemonProcess, StartDaemon
from tests.reliability.conftest import DRIVE_BYTES, OpenStore, end_well, opened_stores
from tests.reliability.drives import MIB, fill_up, mounted_drive, used_bytes
from tests.reliability.test_damage import LARGE, SMALL, Stored, assert_trains, is_in_files
from tests.reliability.test_failing_drive import shut_down
from tests.reliability.test_full_disk import SETTINGS, Graphs, assert_says_where_the_data_is, assert_trains_again
from tierstore import (
    CorruptDataError,
    DaemonUnavailableError,
    StorageIOError,
    TierStore,
)
from tierstore.disk.file_layout import FOLDER_NAME

Drives = list[Path]


@pytest.fixture
def drives(tmp_path: Path) -> Iterator[Drives]:
    """Two empty file systems of 64 MiB. Nothing is left at the end on those that a test leaves in the list."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with mounted_drive(folders[0], DRIVE_BYTES) as one, mounted_drive(folders[1], DRIVE_BYTES) as two:
        empty_bytes = {drive: used_bytes(drive) for drive in (one, two)}
        found = [one, two]
        yield found
        for drive in found:
            assert {path.name for path in drive.iterdir()} <= {"lost+found"}
            assert used_bytes(drive) <= empty_bytes[drive]  # a daemon that was started here has its folder cleared


def start_on(drives: Drives, start_daemon: StartDaemon, socket: Path | None = None, **options: object) -> DaemonProcess:
    """A daemon on both drives, in this order."""
    return start_daemon(drives[1], socket, arguments=[f"--path={drives[0]}"], **({"codec": "none"} | options))


@pytest.fixture(params=["embedded", "sidecar"])
def open_over_both(request: pytest.FixtureRequest, drives: Drives, start_daemon: StartDaemon) -> Iterator[OpenStore]:
    """`open_over_both(**options)`: a store of either kind over both drives, closed at the end."""
    with opened_stores(request.param, drives, partial(start_on, drives, start_daemon)) as opened:
        yield opened


@pytest.mark.parametrize("open_over_both", ["embedded"], indirect=True)
def test_drive_filled_by_others_is_passed_over_while_the_other_has_room(
    drives: Drives, open_over_both: OpenStore
) -> None:
    store = open_over_both(disk_bytes="1GiB", **SETTINGS)
    graphs = Graphs()
    graphs.add(store)  # a daemon opens its index and leases now
    graphs.losses.clear()
    store.flush()
    taken_bytes = [used_bytes(drive) for drive in drives]
    filler = fill_up(drives[0])
    for _ in range(24):
        graphs.add(store)
    store.flush()
    assert used_bytes(drives[1]) - taken_bytes[1] >= 14 * MIB
    filler.unlink()
    assert used_bytes(drives[0]) - taken_bytes[0] < MIB
    error = graphs.add_until_full(store)
    assert_says_where_the_data_is(error)
    assert used_bytes(drives[0]) > DRIVE_BYTES // 2
    assert all(str(drive) in str(error) for drive in drives)
    graphs.check()
    assert_trains_again(store, graphs)


def check_all(groups: list[Graphs]) -> None:
    for graphs in groups:
        graphs.check()


def stored_on_both(drives: Drives, store: TierStore) -> list[Graphs]:
    """Graphs whose records lie on both drives. The first has room for more."""
    empty_bytes = {drive: used_bytes(drive) for drive in drives}
    groups: list[Graphs] = []
    while not all(used_bytes(drive) > empty_bytes[drive] + MIB for drive in drives):  # they go where it seems faster
        assert len(groups) < 9, "one drive alone has no room for so many"
        groups.append(Graphs())
        for _ in range(12):
            groups[-1].add(store)
        store.flush()
    if used_bytes(drives[0]) > DRIVE_BYTES // 2:
        del groups[:-1]
        store.flush()
    return groups


def add_more(store: TierStore) -> None:
    """What is saved now is stored, and right."""
    more = Graphs()
    for _ in range(12):
        more.add(store)
    store.flush()
    more.check()


def test_drive_of_two_that_is_shut_down_takes_its_own_records_alone(drives: Drives, open_over_both: OpenStore) -> None:
    """Every transfer of it fails from then on. Training goes on; what had been stored there is told of."""
    store = open_over_both(disk_bytes="1GiB", **SETTINGS)
    groups = stored_on_both(drives, store)
    broken = drives.pop()  # nothing can be freed on it; the first one has a daemon's list of sessions
    shut_down(broken)
    add_more(store)
    with pytest.raises(StorageIOError, match="the record is still") as told:
        check_all(groups)
    assert str(broken) in str(told.value)
    told.value.__traceback__ = None  # its frames hold the graph
    for graphs in groups:
        graphs.losses.clear()
    torch.ones(1, requires_grad=True).sum().backward()  # until then torch keeps the graph of a backward that failed
    assert_trains(store)


def test_daemon_opens_sessions_while_its_second_drive_is_full_and_not_while_its_first_is(
    drives: Drives, start_daemon: StartDaemon
) -> None:
    daemon = start_on(drives, start_daemon, disk_bytes=2**30)
    daemon.wait_until_open()
    filler = fill_up(drives[0])
    with suppress(DaemonUnavailableError):  # it may have the room that the daemon's index has to give back
        TierStore.connect(daemon.socket).close()
    fill_up(drives[0])
    with pytest.raises(DaemonUnavailableError, match="no session can be opened, its drive has no room"):
        TierStore.connect(daemon.socket)
    filler.unlink()
    filler = fill_up(drives[1])
    with TierStore.connect(daemon.socket, host_bytes=0) as store:
        assert_trains(store)
    filler.unlink()
    assert daemon.stop() == 0, daemon.log


def told_of_each(stored: Stored) -> list[str]:
    """Of each record, that it is right, or the error."""
    told = []
    for place in range(len(stored.handles)):
        try:
            stored.check([place])
            told.append("right")
        except (CorruptDataError, DaemonUnavailableError) as error:
            error.__traceback__ = None
            told.append(str(error))
    return told


PAGE_BYTES, NUM_META_PAGES = 4096, 2
LEAF_FLAGS = b"\x02\0"  # P_LEAF; at byte 10 of a page (struct MDB_page of lmdb's mdb.c), which begins with its number


def misnumber_pages(index: Path) -> None:
    """Give every leaf another number than its place: LMDB believes it when it frees the page, not before."""
    with index.open("r+b", buffering=0) as file:
        for page in range(NUM_META_PAGES * PAGE_BYTES, os.fstat(file.fileno()).st_size, PAGE_BYTES):
            head = os.pread(file.fileno(), 12, page)
            if head[10:] == LEAF_FLAGS:
                os.pwrite(file.fileno(), bytes([head[5] ^ 0x40]), page + 5)


LOST_ENTRY = "damaged data in the index: expected a record of"
LOST_SESSION = "it has no such session: its lease has ended, or its data was cleared"


def check_what_is_told(told: list[str], on_first: list[bool], place: int) -> None:
    """Of each record, where the index of the first drive (`place` 0) or of the second is lost."""
    if place == 0:
        assert all(LOST_SESSION in each for each in told)
    else:
        assert [each == "right" for each in told] == on_first
        assert all(LOST_ENTRY in each for each in told if each != "right")


def check_new_client(daemon: DaemonProcess) -> None:
    """It trains, and the daemon ends as it should."""
    with TierStore.connect(daemon.socket, host_bytes=0) as store:
        assert_trains(store)
    end_well(daemon)


@pytest.mark.parametrize("place", [0, 1], ids=["the first drive", "the second drive"])
def test_index_that_cannot_be_changed_on_one_drive_ends_the_daemon_and_that_drive_is_cleared(
    drives: Drives, start_daemon: StartDaemon, place: int
) -> None:
    daemon = start_on(drives, start_daemon, disk_bytes=100 * MIB)
    with TierStore.connect(daemon.socket, host_bytes=0, reconnect_seconds=2) as store:
        stored = Stored(store, 0, [LARGE] * 6 + [SMALL] * 30)
        on_first = [is_in_files(drives[0] / FOLDER_NAME, content) for content in stored.contents]
        misnumber_pages(drives[place] / FOLDER_NAME / "index")
        while "is damaged" not in daemon.log:  # the change that first frees such a page tells of it
            gone = on_first.index(place == 0)
            del stored.handles[gone], stored.contents[gone], on_first[gone]
            with suppress(DaemonUnavailableError):
                store.flush()
        assert daemon.process.wait(END_SECONDS) == 1
        told = daemon.log.replace("\n", "")
        assert f"write failed at the index under {drives[place]}: " in told
        assert "what was stored there was cleared; start the daemon again" in told
        assert str(drives[1 - place]) + " is damaged" not in told
        has_files = [(drive / FOLDER_NAME).exists() for drive in drives]
        assert has_files == [place == 1, False], "without a list of sessions, what the second drive has is nobody's"
        daemon = start_on(drives, start_daemon, daemon.socket, disk_bytes=100 * MIB)
        told_of = told_of_each(stored)
        check_what_is_told(told_of, on_first, place)
        if place == 1:
            assert_trains(store)
        stored.handles.clear()
    check_new_client(daemon)
