"""A daemon on a real file system without room: it says so and leaves nothing, or comes back with all it had."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tests.daemon.clients import report_of
from tests.daemon.conftest import StartDaemon, tierstore
from tests.daemon.test_cli_serve import quota_of
from tests.reliability.drives import MIB, fill_up, mounted_drive
from tierstore import TierStore
from tierstore.disk.file_layout import FOLDER_NAME

BLOCK_BYTES = 4096
MountDrive = Callable[[int, str], Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[MountDrive]:
    """Mounts a file system of so many bytes and that kind; a folder on it is empty."""
    with ExitStack() as stack:

        def mounted(num_bytes: int, kind: str) -> Path:
            drive = stack.enter_context(mounted_drive(tmp_path, num_bytes, [kind]))
            (drive / "data").mkdir()
            return drive / "data"

        yield mounted


# Without room for: the folder or its lock, the format, the index, its first commit.
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_start_on_a_full_drive_exits_1_with_one_line_and_leaves_nothing(
    mount: MountDrive, short_directory: Path, kind: str
) -> None:
    drive = mount(4 * MIB, kind)
    filler = fill_up(drive.parent)
    num_bytes = filler.stat().st_size // BLOCK_BYTES * BLOCK_BYTES
    for but_blocks in (0, 1, 3, 6):
        os.truncate(filler, num_bytes - but_blocks * BLOCK_BYTES)
        done = tierstore("serve", "--path", str(drive), "--socket", str(short_directory / "s"))
        assert (done.returncode, done.stdout) == (1, "")
        (complaint,) = done.stderr.splitlines()
        assert complaint.startswith(f"tierstore: open failed at {drive}: ")
        assert "are free on its file system" in complaint
        # LMDB calls a short write, which is what tmpfs has left for it then, an input/output error.
        assert "No space left on device" in complaint or (kind, but_blocks) == ("tmpfs", 6)
        assert list(drive.iterdir()) == []
        assert not (short_directory / "s").exists()


def test_killed_daemon_comes_back_on_a_drive_that_is_full_by_now(mount: MountDrive, start_daemon: StartDaemon) -> None:
    drive = mount(1200 * MIB, "ext4")  # room for a segment
    daemon = start_daemon(drive, codec="none")
    contents = torch.arange(1 << 18), torch.arange(1 << 10)  # an extent, a value in the index
    with TierStore.connect(daemon.socket, host_bytes=0) as store:
        handles = [store.put(content.clone()) for content in contents]
        store.flush()
        filling = fill_up(drive.parent)
        daemon.kill()
        again = start_daemon(drive, daemon.socket)
        for handle, content in zip(handles, contents, strict=True):
            assert torch.equal(store.get(handle), content)
        assert report_of(again).disk.num_records == 2
        filling.unlink()
        del handles, handle
    assert again.stop() == 0
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize(("kind", "then"), [("tmpfs", "cleared"), ("ext4", "taken up")])
def test_default_budget_is_the_same_after_a_kill_whatever_was_stored(
    mount: MountDrive, start_daemon: StartDaemon, kind: str, then: str
) -> None:
    """A step that goes on with the new daemon has the room that it had."""
    drive = mount(1200 * MIB, kind)
    daemon = start_daemon(drive, codec="none")
    budget_bytes = report_of(daemon).disk.budget_bytes
    with TierStore.connect(daemon.socket, host_bytes=0) as store:
        handles = [store.put(torch.full((8 * MIB,), number, dtype=torch.int32)) for number in range(16)]
        store.flush()
        assert report_of(daemon).disk.disk_bytes == 512 * MIB
        daemon.kill()
        if then == "cleared":
            (drive / FOLDER_NAME / "format").unlink()
        again = start_daemon(drive, daemon.socket, codec="none")
        assert abs(report_of(again).disk.budget_bytes - budget_bytes) < 4 * MIB  # the file system's own blocks
        assert abs(quota_of(again) - budget_bytes) < 4 * MIB
        if then == "taken up":
            handles += [store.put(torch.full((8 * MIB,), number, dtype=torch.int32)) for number in range(16, 24)]
            store.flush()
            assert all(bool((store.get(handle) == number).all()) for number, handle in enumerate(handles))
        del handles
