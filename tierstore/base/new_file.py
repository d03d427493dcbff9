"""New files of a command: it never overwrites a file, and refuses a bad name before its work rather than after it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..errors import ConfigError
from .config import check_directory


def check_new_file(option: str, file: Path) -> None:
    """Check that the file can be made. Raises ConfigError, which names the option, if it exists or cannot be made."""
    _check_folder(option, file)
    if _exists(option, file):
        raise ConfigError(option, str(file), "the file exists already; name another, or remove it")


def check_written_file(option: str, file: Path) -> None:
    """Check that the file can be made or written over. Raises ConfigError, which names the option, if it cannot."""
    if not _exists(option, file):
        _check_folder(option, file)
    elif file.is_dir():
        raise ConfigError(option, str(file), "cannot be written: it is a directory")


def _check_folder(option: str, file: Path) -> None:
    try:
        check_directory(file.parent)
    except ConfigError as error:
        raise ConfigError(option, str(file), f"cannot be created: {error.allowed}") from None


def _exists(option: str, file: Path) -> bool:
    try:
        return file.exists()
    except OSError as error:  # the name is too long
        raise ConfigError(option, str(file), f"cannot be created: {error.strerror}") from error


def check_distinct(read: Mapping[str, Path | None], written: Mapping[str, Path | None]) -> None:
    """Check that no file that is read is written too, and that none is written twice, whatever its names: `read` and
    `written` are by the option or other name that gives them. The ConfigError names the option that would write it."""
    known = {name: file for name, file in read.items() if file is not None}
    for option, file in written.items():
        if file is None:
            continue
        for name, other in known.items():
            if _is_same(file, other):
                raise ConfigError(option, str(file), f"{name} is this file; name another")
        known[option] = file


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return one.resolve() == other.resolve()


def make_file(option: str, file: Path, text: str) -> None:
    """Make the file, in UTF-8. Raises ConfigError: it exists by now, or could not be written whole and was removed."""
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
