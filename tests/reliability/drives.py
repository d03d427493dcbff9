"""Small drives: real file systems of their own, which a test may fill."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

MIB = 2**20
_RUN_SECONDS = 30


@contextmanager
def mounted_drive(folder: Path, num_bytes: int, kinds: Sequence[str] = ("ext4", "tmpfs")) -> Iterator[Path]:
    """An empty file system of that size, unmounted at the end: an ext4 or a btrfs (of 128 MiB or more) on a loop
    device, a tmpfs, an overlayfs whose upper directory is in one, or a folder of the drive beneath, by way of FUSE.

    It is of the first kind that can be mounted. Skips the test, with what the system said, where none can.
    """
    drive, image = folder / "mounted", folder / "image"
    beneath = folder / "beneath"
    layers = f"lowerdir={beneath}/lower,upperdir={beneath}/upper,workdir={beneath}/work"
    drive.mkdir()
    beneath.mkdir()
    with image.open("wb") as file:
        file.truncate(num_bytes)
    commands = {
        "ext4": (
            ["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image)],
            ["mount", "-o", "loop", str(image), str(drive)],
        ),
        "btrfs": (["mkfs.btrfs", "-q", str(image)], ["mount", "-o", "loop", str(image), str(drive)]),
        "fuse": (["bindfs", str(beneath), str(drive)],),
        "overlay": (
            ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(beneath)],
            ["mkdir", f"{beneath}/lower", f"{beneath}/upper", f"{beneath}/work"],
            ["mount", "-t", "overlay", "-o", layers, "overlay", str(drive)],
        ),
        "tmpfs": (["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(drive)],),
    }
    said: dict[str, str] = {}
    for kind in kinds:
        said[kind] = next(filter(None, map(_run, commands[kind])), "")
        if not said[kind]:
            break
    else:
        pytest.skip(f"no such drive can be mounted here: {said}")
    try:
        yield drive
    finally:
        unmounting = _run(["umount", str(drive)])
        if unmounting:
            _run(["umount", "--lazy", str(drive)])
        if beneath.is_mount():
            _run(["umount", str(beneath)])
        image.unlink()
    assert not unmounting, f"somebody still uses the drive: {unmounting}"


def _run(command: list[str]) -> str:
    """What went wrong, in words; "" if nothing did."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


def used_bytes(drive: Path) -> int:
    status = os.statvfs(drive)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def fill_up(drive: Path) -> Path:
    """Take every free byte of a drive with a file of somebody else's, which is returned."""
    filler = drive / "somebody-elses"
    with filler.open("ab", buffering=0) as file:
        block_bytes = MIB
        while block_bytes >= 512:
            try:
                if file.write(bytes(block_bytes)) == block_bytes:
                    continue
            except OSError:
                pass
            block_bytes //= 2
    return filler
