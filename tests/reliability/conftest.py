"""Both kinds of store, each with a drive of its own."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.daemon.conftest import DaemonProcess, StartDaemon, short_directory, start_daemon
from tests.reliability.drives import MIB, mounted_drive, used_bytes
from tierstore import TierStore
from tierstore.daemon.options import OPTIONS

__all__ = ["DRIVE_BYTES", "OpenStore", "end_well", "short_directory", "start_daemon"]

DRIVE_BYTES = 64 * MIB

OpenStore = Callable[..., TierStore]
"""`open_store(**options)`: a store of either kind on `small_drive`, closed at the end."""


def end_well(daemon: DaemonProcess) -> None:
    assert daemon.stop() == 0, daemon.log
    assert "a bug" not in daemon.log, daemon.log


@pytest.fixture
def small_drive(tmp_path: Path) -> Iterator[Path]:
    """An empty file system of 64 MiB."""
    with mounted_drive(tmp_path, DRIVE_BYTES) as drive:
        yield drive


@pytest.fixture(params=["one drive", "two drives"])
def directories(request: pytest.FixtureRequest, store_directory: Path, tmp_path: Path) -> Iterator[Path]:
    """One directory for an embedded store, or two, separated by ":"; must be empty again at the end."""
    if request.param == "one drive":
        yield store_directory
        return
    second = tmp_path / "second drive"
    second.mkdir()
    yield Path(f"{store_directory}{os.pathsep}{second}")
    assert list(second.iterdir()) == [], "files were left behind"


@contextmanager
def opened_stores(kind: str, place: Path | list[Path], start: Callable[..., DaemonProcess]) -> Iterator[OpenStore]:
    """Stores of one kind, embedded at a place or with a daemon that `start` starts there; closed at the end."""
    stores: list[TierStore] = []
    daemons: list[DaemonProcess] = []

    def opened(**options: object) -> TierStore:
        if kind == "embedded":
            stores.append(TierStore(place, **options))  # type: ignore[arg-type]
            return stores[-1]
        for_daemon = {name: options.pop(name) for name in OPTIONS if name in options}
        daemons.append(start(**for_daemon))
        stores.append(TierStore.connect(daemons[-1].socket, **options))  # type: ignore[arg-type]
        return stores[-1]

    yield opened
    for store in stores:
        store.close()
    for daemon in daemons:
        end_well(daemon)


@pytest.fixture(params=["embedded", "sidecar"])
def open_store(request: pytest.FixtureRequest, small_drive: Path, start_daemon: StartDaemon) -> Iterator[OpenStore]:
    """Nothing may be left on the drive at the end, once the stores are closed and the daemons have ended."""
    empty_bytes = used_bytes(small_drive)
    with opened_stores(request.param, small_drive, partial(start_daemon, small_drive)) as opened:
        yield opened
    left = {path.name for path in small_drive.iterdir()} - {"lost+found"}
    assert not left, f"files were left behind: {left}"
    assert used_bytes(small_drive) == empty_bytes
