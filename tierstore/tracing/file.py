"""The file that a trace is written to: one writer at a time, whole lines only."""

from __future__ import annotations

import fcntl
import os
import stat

from ..errors import ConfigError

__all__ = ["TraceFile"]

_MODE = 0o666  # less the process's umask, as for any output file


class TraceFile:
    """A file open for writing and locked (flock): two traces in one file could not be told apart.
    A device or a pipe is neither locked nor truncated.

    Args:
        place: its path; the directory must exist.
        is_continued: append to the file instead of replacing its content.

    Raises:
        ConfigError: it cannot be opened, or another trace is being written to it. Its content is unchanged.
    """

    def __init__(self, place: str, *, is_continued: bool = False) -> None:
        try:
            self._descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _MODE)
        except OSError as error:
            raise ConfigError("trace", place, f"cannot be written: {error.strerror}") from error
        try:
            if stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not is_continued:
                    os.ftruncate(self._descriptor, 0)
        except OSError as error:
            os.close(self._descriptor)
            reason = error.strerror
            if isinstance(error, BlockingIOError):
                reason = "another store writes a trace to it; give each process a file of its own"
            raise ConfigError("trace", place, f"cannot be written: {reason}") from error

    def write(self, lines: bytes) -> None:
        """Write all lines; blocks. On OSError, some of them may be in the file."""
        rest = memoryview(lines)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def close(self) -> None:
        """Close and unlock the file. Call it once."""
        os.close(self._descriptor)
