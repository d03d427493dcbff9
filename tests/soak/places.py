"""Where a soak stores: directories on a disk, and a small file system that is nearly full."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

__all__ = ["Surroundings", "files_under", "small_drive", "surroundings", "working_folder"]

_SMALL_MIB = 48
_LEFT_MIB = 12

Surroundings = dict[str, list[str]]


def surroundings(folder: Path, *known: int) -> Surroundings:
    """What a leak would change: processes of ours but the known ones, shared memory, mounts below the folder."""
    shared = Path("/dev/shm")
    mounts = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    return {
        "processes": sorted(
            f"{each.pid}" for each in psutil.Process().children(recursive=True) if each.pid not in known
        ),
        "shared memory": _names_in(shared) if shared.is_dir() else [],
        "mounts": sorted(line.split(" ")[1] for line in mounts if str(folder) in line),
    }


def _names_in(shared: Path) -> list[str]:
    """Of ours; those of fuzzing, which may run at the same time, come and go."""
    return sorted(name for name in os.listdir(shared) if "tierstore" in name and not name.startswith("tierstore-fuzz"))


def files_under(directory: Path) -> list[str]:
    """All that lies in it."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@contextmanager
def small_drive(folder: Path) -> Iterator[Path | None]:
    """A real file system with a few MiB left, which has as much left at the end; None where none can be mounted.

    Raises:
        AssertionError: less is left at the end.
    """
    drive, image = folder / "small", folder / "image"
    drive.mkdir()
    try:
        with image.open("wb") as file:
            file.truncate(_SMALL_MIB * 2**20)
        subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], check=True, capture_output=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(drive)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        image.unlink(missing_ok=True)
        drive.rmdir()
        yield None
        return
    try:
        shutil.rmtree(drive / "lost+found", ignore_errors=True)
        with (drive / "filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, max(4096, _free_bytes(drive) - _LEFT_MIB * 2**20))
        free_bytes = _free_bytes(drive)
        yield drive
        assert files_under(drive) == ["filler"], f"left on the small drive: {files_under(drive)}"
        assert _free_bytes(drive) == free_bytes, f"the small drive had {free_bytes} bytes, and has {_free_bytes(drive)}"
    finally:
        subprocess.run(["umount", str(drive)], check=False, capture_output=True)
        image.unlink(missing_ok=True)
        drive.rmdir()


def _free_bytes(drive: Path) -> int:
    status = os.statvfs(drive)
    return status.f_bfree * status.f_frsize


@contextmanager
def working_folder(path: Path | None) -> Iterator[Path]:
    """An empty folder under `path`, or the usual place for temporary files; removed at the end."""
    with tempfile.TemporaryDirectory(prefix="tierstore-soak-", dir=path) as folder:
        yield Path(folder)
