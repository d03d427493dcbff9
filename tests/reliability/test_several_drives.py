"""Several drives under one store: one that fills up, kills, and a daemon on both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.daemon.clients import sessions_of
from tests.daemon.conftest import StartDaemon
from tests.daemon.training import gradients, make_model, nothing
from tests.inspect_store import inspect, inspect_drives
from tests.reliability.conftest import DRIVE_BYTES
from tests.reliability.drives import MIB, fill_up, mounted_drive, used_bytes
from tests.reliability.test_full_disk import SETTINGS, Graphs, assert_says_where_the_data_is, assert_trains_again
from tests.reliability.test_kills import trainers
from tierstore import TierStore

Drives = list[Path]


@pytest.fixture
def drives(tmp_path: Path) -> Iterator[Drives]:
    """Two empty file systems of 64 MiB, on which nothing is left at the end."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    with mounted_drive(folders[0], DRIVE_BYTES) as one, mounted_drive(folders[1], DRIVE_BYTES) as two:
        empty_bytes = [used_bytes(drive) for drive in (one, two)]
        yield [one, two]
        for drive, num_bytes in zip((one, two), empty_bytes, strict=True):
            assert {path.name for path in drive.iterdir()} <= {"lost+found"}
            assert used_bytes(drive) <= num_bytes  # a daemon that was started here has its folder cleared


def test_drive_filled_by_others_is_passed_over_while_the_other_has_room(drives: Drives) -> None:
    with TierStore(drives, disk_bytes="1GiB", inline_bytes=0, **SETTINGS) as store:  # type: ignore[arg-type]
        first, second = inspect_drives(inspect(store).disk).disks
        filler = fill_up(drives[0])
        graphs = Graphs()
        for _ in range(24):
            graphs.add(store)
        store.flush()
        assert first.usage().num_records == 0
        assert second.usage().num_records >= 16
        filler.unlink()
        error = graphs.add_until_full(store)
        assert_says_where_the_data_is(error)
        assert first.usage().disk_bytes > DRIVE_BYTES // 2
        assert all(str(drive) in str(error) for drive in drives)
        graphs.check()
        assert_trains_again(store, graphs)


def test_space_on_both_drives_is_given_back(drives: Drives) -> None:
    """Of a tensor that is longer than what either drive could take."""
    with TierStore(drives, disk_bytes="90MiB", host_bytes=0, staging_bytes="80MiB", codec="none") as store:
        for _ in range(3):
            tensor = torch.randn(70 * MIB // 4)
            handle = store.put(tensor.clone())
            store.flush()
            assert torch.equal(store.get(handle), tensor)
            del handle
            store.flush()
            assert store.stats().disk_bytes == 0


@pytest.mark.parametrize("state", ["writing", "writing, stored", "reading", "train"])
def test_trainer_killed_leaves_no_byte_on_either_drive(drives: Drives, state: str) -> None:
    """The fixture looks at both drives."""
    with trainers("embedded", Path(os.pathsep.join(map(str, drives)))) as made:
        pid = made.start(state)
        made.kill(pid) if state != "train" else made.kill_after(pid, 0.5)


def test_daemon_on_two_drives_goes_on_after_a_kill(drives: Drives, start_daemon: StartDaemon) -> None:
    options = {"arguments": [f"--path={drives[0]}"], "codec": "none", "disk_bytes": 100 * MIB}
    daemon = start_daemon(drives[1], **options)
    model, batch = make_model(0)
    expected = gradients(model, batch, None, nothing)
    with TierStore.connect(daemon.socket, host_bytes=0) as store:
        tensors = [torch.randn(2 * MIB // 4) for _ in range(8)]  # of which each drive has some
        handles = [store.put(tensor.clone()) for tensor in tensors]
        store.flush()
        assert all(used_bytes(drive) > 4 * MIB for drive in drives)

        def restart() -> None:
            nonlocal daemon
            store.flush()
            daemon.kill()
            daemon = start_daemon(drives[1], daemon.socket, **options)

        found = gradients(model, batch, store, restart)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        for handle, tensor in zip(handles, tensors, strict=True):
            assert torch.equal(store.get(handle), tensor)
        assert len(sessions_of(daemon)) == 1
        del handles, handle
    assert daemon.stop() == 0, daemon.log
    assert "a bug" not in daemon.log, daemon.log


def test_daemon_without_one_of_its_drives_says_which(drives: Drives, tmp_path: Path, start_daemon: StartDaemon) -> None:
    missing = tmp_path / "missing"
    daemon = start_daemon(drives[0], arguments=[f"--path={missing}"], wait=False)
    assert daemon.process.wait(60) == 2
    assert str(missing) in daemon.log.replace("\n", "")
