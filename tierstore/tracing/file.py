"""The file that a trace is written to: one writer at a time, whole lines only."""

from __future__ import annotations

import fcntl
import os
import stat

from ..errors import ConfigError

__all__ = ["TraceFile"]

_MODE = 0o666  # less the process's umask, as any file that a program is told to write


class TraceFile:
    """Open for writing, and locked (flock) against other writers: two traces in one file could not be told apart.
    A device or a pipe is neither locked nor cut.

    Args:
        place: its path; the directory must exist.
        is_continued: go on behind what is there, instead of writing over it.

    Raises:
        ConfigError: it cannot be opened, or somebody writes a trace to it. What was there is unchanged.
    """

    def __init__(self, place: str, *, is_continued: bool = False) -> None:
        try:
            self._descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _MODE)
        except OSError as error:
            raise ConfigError("trace", place, f"it cannot be written to: {error.strerror}") from error
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
            raise ConfigError("trace", place, f"it cannot be written to: {reason}") from error

    def write(self, lines: bytes) -> None:
        """Write all of it; blocks. OSError: some of it may be there."""
        rest = memoryview(lines)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]

    def close(self) -> None:
        """Let others write to it. Once."""
        os.close(self._descriptor)
