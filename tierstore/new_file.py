"""Files that a command makes: never over somebody's own, and refused before the work rather than after it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .config import check_directory
from .errors import ConfigError

__all__ = ["check_distinct", "check_folder", "check_new_file", "make_file"]


def check_new_file(option: str, file: Path) -> None:
    """Whether it could be made. Raises ConfigError, with the option that named it: it is there, or cannot be."""
    check_folder(option, file)
    try:
        exists = file.exists()
    except OSError as error:  # the name is too long
        raise ConfigError(option, str(file), f"the file cannot be made: {error.strerror}") from error
    if exists:
        raise ConfigError(option, str(file), "there is such a file already; name another, or remove it")


def check_folder(option: str, file: Path) -> None:
    """Whether there is a folder for it that can be written to. Raises ConfigError, with the option that named it."""
    try:
        check_directory(file.parent)
    except ConfigError as error:
        raise ConfigError(option, str(file), f"the file cannot be made: {error.allowed}") from None


def check_distinct(read: Mapping[str, Path | None], written: Mapping[str, Path | None]) -> None:
    """Whether nothing is written over what is read, or twice to one file, under whatever names.

    Args:
        read: files by option, or by what else names them; None: not given.
        written: likewise.

    Raises:
        ConfigError: of the option that would write there.
    """
    known = {name: file for name, file in read.items() if file is not None}
    for option, file in written.items():
        if file is None:
            continue
        for name, other in known.items():
            if _is_same(file, other):
                raise ConfigError(option, str(file), f"{name} is this file; name another")
        known[option] = file


def _is_same(one: Path, other: Path) -> bool:
    """Links followed, where they are there; nothing else tells of two that are not there yet."""
    try:
        return one.samefile(other)
    except OSError:
        return one.resolve() == other.resolve()


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
