"""A folder of named files that one process at a time may use. Blocking calls."""

from __future__ import annotations

import fcntl
import io
import os
import stat
import time
from contextlib import suppress
from pathlib import Path

from ..errors import ConfigError
from .forking import Inode, inode_of

_LOCK = "lock"
_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's blocks are (stat(2))
_HIDDEN = (".fuse_hidden", ".nfs")  # names of files that were removed while they were open, on FUSE and NFS
_MOST_LOOKS, _LOOK_SECONDS = 100, 0.01
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class LockedFolder:
    """A folder of mode 0700 that is made or found, belongs to this user, and is locked until it is closed.

    All files are reached through the folder's descriptor, so a user who may rename the folder cannot redirect them. The
    kernel releases the lock when the last thread of a killed process has ended: no write of that process comes later.
    """

    def __init__(self, parent: Path, name: str) -> None:
        """Make or find `name` in the existing directory `parent`, and lock it. ConfigError: another process has it, it
        is a link or belongs to somebody else, or others may use it. Then nothing is left open or changed in it."""
        self.path = parent / name
        self._lock = -1
        self._folder = self._open_folder()
        try:
            self._check_owner()
            self._lock = self._open_lock()
            self._take_lock()
        except BaseException:
            self.close(remove=False)
            raise

    @property
    def inodes(self) -> set[Inode]:
        return {inode_of(self._folder), inode_of(self._lock)} if self._folder >= 0 else set()

    def names(self) -> list[str]:
        return sorted(name for name in self._all_names() if name != _LOCK and not name.startswith(_HIDDEN))

    def open(self, name: str, flags: int) -> int:
        """Open a file in it, never through a link; a new one has mode 0600. Returns the descriptor, close-on-exec."""
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._folder)

    def sizes(self, name: str) -> tuple[int, int]:
        """A file's length, and the space that it takes on the drive; 0 where there is no plain file."""
        try:
            status = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
        except FileNotFoundError:
            return 0, 0
        return (status.st_size, status.st_blocks * _BLOCK_BYTES) if stat.S_ISREG(status.st_mode) else (0, 0)

    def read(self, name: str, most_bytes: int) -> bytes | None:
        try:
            with io.FileIO(self.open(name, os.O_RDONLY | os.O_NONBLOCK)) as file:
                return file.read(most_bytes)
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Make a small file, in place of one of that name. If it fails, it may hold a part of the content."""
        with io.FileIO(self.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            file.write(content)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._folder)

    def close(self, *, remove: bool) -> None:
        """Unlock it. Before, remove it if `remove` and nothing but the lock lies in it. Idempotent; unlocked also on
        OSError."""
        if self._folder < 0:
            return
        try:
            if remove and not self.names():
                self.remove(_LOCK)
                os.close(self._lock)  # or it keeps a hidden name
                self._lock = -1
                self._remove_folder()
        finally:
            for descriptor in (self._folder, self._lock):
                if descriptor >= 0:
                    os.close(descriptor)
            self._folder = self._lock = -1

    def _remove_folder(self) -> None:
        """By way of its parent, which may have moved: at its path there may be a link by now."""
        with suppress(OSError):  # the next process has it already
            parent = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._folder)
            try:
                for _ in range(_MOST_LOOKS):
                    if not self._has_only_hidden():
                        break
                    time.sleep(_LOOK_SECONDS)
                os.rmdir(self.path.name, dir_fd=parent)
            finally:
                os.close(parent)

    def _has_only_hidden(self) -> bool:
        """Whether all that is left is files that were removed, and whose close the file system has yet to learn of: it
        tells nobody when it has."""
        names = self._all_names()
        return bool(names) and all(name.startswith(_HIDDEN) for name in names)

    def _all_names(self) -> list[str]:
        """By a descriptor of its own: btrfs lists by one what was there when that was opened (fs/btrfs/inode.c)."""
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._folder)
        try:
            return os.listdir(descriptor)
        finally:
            os.close(descriptor)

    def _open_folder(self) -> int:
        with suppress(FileExistsError):
            os.mkdir(self.path, 0o700)
        try:
            return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except NotADirectoryError as error:
            raise self._refused("is a link or a file; remove it") from error
        except PermissionError as error:
            raise self._refused("belongs to another user, or cannot be opened; remove it") from error

    def _check_owner(self) -> None:
        status = os.fstat(self._folder)
        if status.st_uid != os.geteuid():
            raise self._refused(f"belongs to user {status.st_uid}, not to {os.geteuid()}; remove it")
        if status.st_mode & _OTHERS:
            raise self._refused(f"has mode {stat.S_IMODE(status.st_mode):04o}, so others may use it; give it 0700")

    def _open_lock(self) -> int:
        try:
            return self.open(_LOCK, os.O_RDWR | os.O_CREAT)
        except OSError:
            self._remove_folder()  # empty if just made: it may have taken the file system's last inode
            raise

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(self._lock, 20, 0).decode("ascii", "replace").strip()
            owner = f"process {pid}" if pid else "another process"
            reason = f"{owner} holds {self.path}: a daemon is using this directory; stop it, or give another"
            raise ConfigError("path", str(self.path.parent), reason) from error
        if not (os.fstat(self._folder).st_nlink and os.fstat(self._lock).st_nlink):
            raise self._refused("was just removed by the process that used it; start again")
        os.ftruncate(self._lock, 0)
        with suppress(OSError):  # a full file system; the number is for messages only
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _refused(self, reason: str) -> ConfigError:
        return ConfigError("path", str(self.path.parent), f"{self.path} {reason}")
