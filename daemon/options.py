"""The options of `tierstore serve`, from all places where they may be given. Pure, except that it reads one file.

The order is: command line, environment (`TIERSTORE_DISK_BYTES`), file (`disk_bytes = "1TiB"`), default. The first that
gives an option counts. An error names the place where the option was given.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tierstore.base.config import parse_size
from tierstore.disk.codec.codec import parse_codec
from tierstore.errors import ConfigError

from .settings import ServerLimits, ServeSettings

__all__ = ["OPTIONS", "settings_of"]

_LEVELS = ("debug", "info", "warning", "error")
_FORMATS = ("text", "json")
_MOST_SECONDS = 1e9  # that the protocol can carry (messages.Welcome)
_OF_LIMITS = (
    "session_disk_bytes",
    "session_queued_bytes",
    "max_sessions_per_user",
    "grace_seconds",
    "handshake_seconds",
)
_MOST_SESSIONS = 10**6
_MOST_UID = 2**32 - 2  # 2**32 - 1 is no user: chown(2)

Given = str | int | float | Sequence[str | int]
"""A value as it was given: text on the command line and in the environment, TOML's types in a file."""


class _Option(NamedTuple):
    """How to read one option.

    Attributes:
        parse: (value, where it was given) -> the value in `ServeSettings`; raises ConfigError.
        in_file: the TOML types that it may have in a file.
        allowed: those types in words.
        separator: between several values in the environment; None: the text is one value.
    """

    parse: Callable[[Any, str], Any]
    in_file: tuple[type, ...]
    allowed: str
    separator: str | None = None


def settings_of(line: Mapping[str, Given], environment: Mapping[str, str]) -> ServeSettings:
    """The settings from a command line, an environment, and the file that they name.

    Args:
        line: options as the command line gave them, by name with underscores.
        environment: the process's. An empty variable counts as not set.

    Raises:
        ConfigError: an option or the file cannot be used; names the option, and where it was given.
    """
    given: dict[str, tuple[Given, str]] = {}
    config, source = _config_of(line, environment)
    if config is not None:
        given |= _read_file(Path(config), source)
    for name, option in OPTIONS.items():
        if text := environment.get(variable := f"TIERSTORE_{name.upper()}"):
            given[name] = (text.split(option.separator) if option.separator else text, variable)
        if name in line:
            given[name] = (line[name], "--" + name.replace("_", "-"))
    found = {name: OPTIONS[name].parse(value, source) for name, (value, source) in given.items()}
    if "path" not in found:
        raise ConfigError("--path", None, "give an existing directory on the drive to use, or set TIERSTORE_PATH")
    found["paths"] = found.pop("path")
    limits = {name: found.pop(name) for name in _OF_LIMITS if name in found}
    if "allow_uid" in found:
        found["allowed_uids"] = found.pop("allow_uid")
    return ServeSettings(**found, limits=ServerLimits(**limits))


def _config_of(line: Mapping[str, Given], environment: Mapping[str, str]) -> tuple[str | None, str]:
    if "config" in line:
        return str(line["config"]), "--config"
    return environment.get("TIERSTORE_CONFIG") or None, "TIERSTORE_CONFIG"


def _read_file(file: Path, source: str) -> dict[str, tuple[Given, str]]:
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(source, str(file), f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # no UTF-8, no TOML, or brackets without end
        raise ConfigError(source, str(file), f"it is not valid TOML: {error}") from error
    for name, value in values.items():
        _check_type(f"{file}: {name}", name, value)
    return {name: (value, f"{file}: {name}") for name, value in values.items()}


def _check_type(source: str, name: str, value: object) -> None:
    option = OPTIONS.get(name)
    if option is None:
        raise ConfigError(source, value, f"there is no such option; there are {', '.join(OPTIONS)}")
    if isinstance(value, bool) or not isinstance(value, option.in_file):
        raise ConfigError(source, value, f"give {option.allowed}")


# --- one kind of value each -------------------------------------------------------------------------------------------


def _path(text: str, source: str) -> Path:
    if not text or "\0" in text:
        raise ConfigError(source, text, "give a path")
    return Path(text)


def _paths(value: Given, source: str) -> tuple[Path, ...]:
    texts: Sequence[object] = [value] if isinstance(value, str) or not isinstance(value, Sequence) else value
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ConfigError(source, value, "give the path of at least one directory")
    return tuple(_path(str(text), source) for text in texts)


def _text(text: str, source: str) -> str:
    return text


def _size(value: int | str, source: str) -> int:
    return parse_size(value, source)


def _count(value: int | str, source: str) -> int:
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= len(str(_MOST_SESSIONS)):
        value = int(value)
    if isinstance(value, str) or not 1 <= value <= _MOST_SESSIONS:
        raise ConfigError(source, value, f"give a whole number from 1 to {_MOST_SESSIONS}")
    return value


def _seconds(value: str | float, source: str) -> float:
    try:
        seconds = float(value)
    except (ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds <= _MOST_SECONDS:
        raise ConfigError(source, value, f"give a number of seconds from 0 to {_MOST_SECONDS:g}")
    return seconds


def _uids(value: Given, source: str) -> frozenset[int]:
    parts: Sequence[object]
    if isinstance(value, str):
        parts = re.split(r"[\s,]+", value.strip())
    else:
        parts = value if isinstance(value, Sequence) else [value]
    uids = [_uid(part) for part in parts]
    if None in uids:
        raise ConfigError(source, value, "give user ids, numbers of 0 or more (id -u NAME prints one)")
    return frozenset(uid for uid in uids if uid is not None)


def _uid(part: object) -> int | None:
    """The user id; None: this is no user id."""
    if isinstance(part, str) and part.isascii() and part.isdecimal() and len(part) <= len(str(_MOST_UID)):
        part = int(part)
    return part if isinstance(part, int) and not isinstance(part, bool) and 0 <= part <= _MOST_UID else None


def _address(text: str, source: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) < 2**16 and host):
        raise ConfigError(source, text, "give HOST:PORT, such as 127.0.0.1:9464")
    host = "127.0.0.1" if host == "localhost" else host
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ConfigError(source, text, "the page is for this host alone: give a loopback address (127.0.0.1, ::1)")
    return host, int(port)


def _codec(text: str, source: str) -> str:
    try:
        parse_codec(text)
    except ConfigError as error:
        raise ConfigError(source, text, error.allowed) from None
    return text


def _one_of(words: Sequence[str]) -> Callable[[str, str], str]:
    def parse(text: str, source: str) -> str:
        if text.lower() not in words:
            raise ConfigError(source, text, f"give one of {', '.join(words)}")
        return text.lower()

    return parse


_SIZE = _Option(_size, (int, str), 'a number of bytes, or a string such as "8GiB"')
_SECONDS = _Option(_seconds, (int, float), "a number")

OPTIONS: Mapping[str, _Option] = {
    "path": _Option(_paths, (str, list), "a string, or an array of strings", separator=os.pathsep),
    "socket": _Option(_path, (str,), "a string"),
    "disk_bytes": _SIZE,
    "session_disk_bytes": _SIZE,
    "session_queued_bytes": _SIZE,
    "max_sessions_per_user": _Option(_count, (int,), "a number"),
    "max_write_bytes_per_day": _SIZE,
    "grace_seconds": _SECONDS,
    "handshake_seconds": _SECONDS,
    "metrics": _Option(_address, (str,), 'a string such as "127.0.0.1:9464"'),
    "allow_uid": _Option(_uids, (int, list), "a number, or an array of numbers"),
    "socket_group": _Option(_text, (str,), "a string"),
    "codec": _Option(_codec, (str,), "a string"),
    "log_level": _Option(_one_of(_LEVELS), (str,), "a string"),
    "log_format": _Option(_one_of(_FORMATS), (str,), "a string"),
}
"""Options by their names in a file; elsewhere they are called `--disk-bytes` and `TIERSTORE_DISK_BYTES`."""
