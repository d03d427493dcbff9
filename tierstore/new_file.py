"""Files that a command makes: never over somebody's own, and refused before the work rather than after it."""

from __future__ import annotations

from pathlib import Path

from .config import check_directory
from .errors import ConfigError

__all__ = ["check_new_file", "make_file"]


def check_new_file(option: str, file: Path) -> None:
    """Whether it could be made. Raises ConfigError, with the option that named it: it is there, or cannot be."""
    if file.exists():
        raise ConfigError(option, str(file), "there is such a file already; name another, or remove it")
    try:
        check_directory(file.parent)
    except ConfigError as error:
        raise ConfigError(option, str(file), f"the file cannot be made: {error.allowed}") from None


def make_file(option: str, file: Path, text: str) -> None:
    """Make it, in UTF-8. Raises ConfigError: it has come to be there meanwhile, or could not be written whole; then
    there is none."""
    try:
        with file.open("x", encoding="utf-8") as made:
            try:
                made.write(text)
                made.flush()
            except BaseException:
                file.unlink()
                raise
    except OSError as error:
        raise ConfigError(option, str(file), f"the file could not be made: {error.strerror}") from error
