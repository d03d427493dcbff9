"""A daemon on a real file system without room: it says so and leaves nothing, or comes back with all it had."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.daemon.clients import report_of
from tests.daemon.conftest import StartDaemon, tierstore
from tests.daemon.test_cli_serve import quota_of
from tierstore import TierStore
from tierstore.disk.home import FOLDER_NAME

BLOCK_BYTES = 4096
MIB = 2**20
MakeDrive = Callable[[str, str], Path]
COMMANDS = {
    "tmpfs": ("mount -t tmpfs -o size={size} tmpfs {drive}",),
    "ext4": ("truncate -s {size} {drive}.img", "mkfs.ext4 -q -m 0 {drive}.img", "mount -o loop {drive}.img {drive}"),
}


@pytest.fixture
def make_drive(tmp_path: Path) -> Iterator[MakeDrive]:
    """Mounts a file system of this kind and size; skips the test where that is not allowed."""
    mounted: list[Path] = []

    def make(kind: str, size: str) -> Path:
        drive = tmp_path / kind
        drive.mkdir()
        for command in COMMANDS[kind]:
            words = command.format(size=size, drive=drive).split()
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no {kind} can be mounted here: {done.stderr.strip()}")
        mounted.append(drive)
        (drive / "data").mkdir()
        return drive / "data"

    yield make
    for drive in mounted:
        subprocess.run(["umount", str(drive)], check=True)


def fill(directory: Path, but_blocks: int = 0) -> Path:
    file = directory.parent / "filling"
    with file.open("wb", buffering=0) as filling:
        try:
            while filling.write(bytes(BLOCK_BYTES)) == BLOCK_BYTES:
                pass
        except OSError:
            pass
        filling.truncate(max(0, filling.tell() // BLOCK_BYTES - but_blocks) * BLOCK_BYTES)
        os.fsync(filling.fileno())
    return file


# Without room for: the folder or its lock, the format, the index, its first commit.
@pytest.mark.parametrize("but_blocks", [0, 1, 3, 6])
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_start_on_a_full_drive_exits_1_with_one_line_and_leaves_nothing(
    make_drive: MakeDrive, short_directory: Path, kind: str, but_blocks: int
) -> None:
    drive = make_drive(kind, "4M")
    fill(drive, but_blocks)
    done = tierstore("serve", "--path", str(drive), "--socket", str(short_directory / "s"))
    assert (done.returncode, done.stdout) == (1, "")
    (complaint,) = done.stderr.splitlines()
    assert complaint.startswith(f"tierstore: open failed at {drive}: ")
    assert "are free on its file system" in complaint
    # LMDB calls a short write, which is what tmpfs has left for it then, an input/output error.
    assert "No space left on device" in complaint or (kind, but_blocks) == ("tmpfs", 6)
    assert list(drive.iterdir()) == []
    assert not (short_directory / "s").exists()


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_killed_daemon_comes_back_on_a_drive_that_is_full_by_now(
    make_drive: MakeDrive, start_daemon: StartDaemon, kind: str
) -> None:
    drive = make_drive(kind, "1200M")  # room for a segment
    daemon = start_daemon(drive, codec="none")
    contents = torch.arange(1 << 18), torch.arange(1 << 10)  # an extent, a value in the index
    with TierStore.connect(daemon.socket, host_bytes=0) as store:
        handles = [store.put(content.clone()) for content in contents]
        store.flush()
        filling = fill(drive)
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
    make_drive: MakeDrive, start_daemon: StartDaemon, kind: str, then: str
) -> None:
    """A step that goes on with the new daemon has the room that it had."""
    drive = make_drive(kind, "1200M")
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
