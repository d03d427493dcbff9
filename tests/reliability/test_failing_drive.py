"""A drive that fails under a store in use, for good: an ext4 that becomes read-only, or is shut down."""

import fcntl
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.daemon.conftest import DaemonProcess
from tests.reliability.conftest import end_well
from tests.reliability.drives import MIB
from tests.reliability.test_full_disk import SETTINGS, Graphs
from tierstore import StorageIOError, TierStore

_EXT4_IOC_SHUTDOWN = 0x8004587D  # fs/ext4/ext4.h
_NO_LOG_FLUSH = 2


@pytest.fixture(params=["embedded", "sidecar"])
def store(request: pytest.FixtureRequest, small_drive: Path) -> Iterator[TierStore]:
    """On a drive of its own. Closing it is no error, and the daemon ends as it should."""
    if request.param == "embedded":
        with TierStore(small_drive, disk_bytes="1GiB", **SETTINGS) as opened:  # type: ignore[arg-type]
            yield opened
        return
    daemon: DaemonProcess = request.getfixturevalue("start_daemon")(small_drive, codec="none")
    settings = {name: value for name, value in SETTINGS.items() if name != "codec"}
    with TierStore.connect(daemon.socket, **settings) as opened:  # type: ignore[arg-type]
        yield opened
    end_well(daemon)


def device_of(drive: Path) -> str:
    """The loop device of a small drive; skips the test if it has none, because it cannot be made to fail then."""
    for line in Path("/proc/mounts").read_text().splitlines():
        name, place, kind, *_ = line.split()
        if place == str(drive) and kind == "ext4":
            return Path(name).name
    pytest.skip("no ext4 can be mounted here")


def shut_down(drive: Path) -> None:
    """From now on every transfer of an ext4 fails, as when a cable is pulled."""
    device_of(drive)
    descriptor = os.open(drive, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(descriptor)


def make_read_only(drive: Path) -> None:
    """As ext4 does when it finds its own structures damaged (mount option errors=remount-ro)."""
    device = device_of(drive)
    subprocess.run(["mount", "-o", "remount,errors=remount-ro", str(drive)], check=True)
    Path(f"/sys/fs/ext4/{device}/trigger_fs_error").write_text("1")


def _filled(store: TierStore) -> Graphs:
    """Some of what they saved is in memory, some on disk."""
    graphs = Graphs()
    for _ in range(12):
        graphs.add(store)
    store.flush()
    assert store.stats().disk_bytes > 4 * MIB
    return graphs


def _fails_to_write(store: TierStore) -> str:
    """Where more is saved than memory holds, the training thread is told, and what it has saved is right."""
    more = Graphs()

    def train() -> None:
        for _ in range(40):
            more.add(store)
        store.flush()

    with pytest.raises(StorageIOError, match="the data is still in memory") as told:
        train()
    more.check()
    return told.value.reason


def test_drive_that_becomes_read_only_is_told_of_and_what_it_has_can_be_read(
    store: TierStore, small_drive: Path
) -> None:
    graphs = _filled(store)
    make_read_only(small_drive)
    assert "Read-only file system" in _fails_to_write(store)
    graphs.check()


def test_drive_that_is_shut_down_is_told_of_by_whatever_needs_it(store: TierStore, small_drive: Path) -> None:
    """Every transfer fails from then on, as when a cable is pulled."""
    graphs = _filled(store)
    shut_down(small_drive)
    with pytest.raises(StorageIOError, match="the record is still"):
        graphs.check()
    graphs.losses.clear()
    torch.ones(1, requires_grad=True).sum().backward()  # until then torch keeps the graph of a backward that failed
    assert "Input/output error" in _fails_to_write(store)
