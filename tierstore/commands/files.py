"""Files that a command was told to write."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError

__all__ = ["unwritable", "write_file"]


def write_file(file: Path, option: str, content: bytes) -> None:
    """Write what an option asked for; over what is there.

    Raises:
        ConfigError: it cannot be written; what was there may be gone.
    """
    try:
        file.write_bytes(content)
    except OSError as error:
        raise unwritable(option, file, error) from error


def unwritable(option: str, file: Path, error: OSError) -> ConfigError:
    """The error, by option and file."""
    return ConfigError(option, str(file), f"cannot be written: {error.strerror or error}")
