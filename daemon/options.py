"""The settings of a daemon, and the options of `tierstore serve` that give them: on the command line, in the
environment (`TIERSTORE_DISK_BYTES`) or in a file (`disk_bytes = "1TiB"`). The first that gives an option counts."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tierstore.base.address import default_address
from tierstore.base.config import parse_size
from tierstore.base.toml_file import read_toml
from tierstore.errors import ConfigError

_MOST_SECONDS = 1e9  # that the protocol can carry (messages.Welcome)
_MOST_SESSIONS = 10**6
_MOST_RECORDS = 10**9
_MOST_UID = 2**32 - 2  # 2**32 - 1 is no user: chown(2)


@dataclass(frozen=True)
class ServeSettings:
    """All settings of a daemon. `allowed_uids`: beside its own user and root. `metrics`: host and port, on loopback.
    `slab_bytes`: the most that all slabs of a session may have; no option sets it."""

    paths: tuple[Path, ...]
    socket: Path = field(default_factory=lambda: Path(default_address()))
    disk_bytes: int | None = None
    session_disk_bytes: int | None = None
    session_queued_bytes: int | None = None
    slab_bytes: int = 16 * 2**30
    max_sessions_per_user: int = 512
    max_records_per_user: int = 10**6
    max_write_bytes_per_day: int | None = None
    grace_seconds: float = 60.0
    handshake_seconds: float = 10.0
    metrics: tuple[str, int] | None = None
    allowed_uids: frozenset[int] = frozenset()
    socket_group: str | None = None
    codec: str = "auto"
    log_level: str = "info"
    log_format: str = "text"

    @property
    def place(self) -> str:
        """The directories, for people."""
        return ", ".join(map(str, self.paths))


Given = str | Sequence[str]
"""An option as it was given: its text, or several texts of one that can be repeated."""


class Option(NamedTuple):
    """One option. `parse`: (text, where it was given) -> a value; raises ConfigError. `gather`: makes a setting of all
    values of an option that can be repeated; None: it cannot. `pattern`: of each of several values in the environment.
    `setting`: its name in `ServeSettings`, if it is another."""

    parse: Callable[[str, str], Any]
    metavar: str
    help: str
    gather: Callable[[Iterable[Any]], Any] | None = None
    pattern: str = ""
    setting: str | None = None


def settings_of(line: Mapping[str, Given], environment: Mapping[str, str]) -> ServeSettings:
    """The settings from a command line (names with underscores), an environment, and the file that they name. An empty
    variable counts as not set. ConfigError names the option or the file, and where it was given."""
    given: dict[str, tuple[Given, str]] = {}
    if "config" in line:
        given |= _read_file(Path(str(line["config"])), "--config")
    elif config := environment.get("TIERSTORE_CONFIG"):
        given |= _read_file(Path(config), "TIERSTORE_CONFIG")
    for name, option in OPTIONS.items():
        if text := environment.get(variable := f"TIERSTORE_{name.upper()}"):
            given[name] = (re.findall(option.pattern, text) if option.pattern else text, variable)
        if name in line:
            given[name] = (line[name], "--" + name.replace("_", "-"))
    found = {OPTIONS[name].setting or name: _parsed(OPTIONS[name], *each) for name, each in given.items()}
    if "paths" not in found:
        raise ConfigError("--path", None, "give an existing directory on the drive to use, or set TIERSTORE_PATH")
    return ServeSettings(**found)


def _parsed(option: Option, given: Given, source: str) -> Any:
    values = [option.parse(text, source) for text in ([given] if isinstance(given, str) else given)]
    if not values:
        raise ConfigError(source, given, f"give at least one {option.metavar}")
    return values[0] if option.gather is None else option.gather(values)


def _read_file(file: Path, source: str) -> dict[str, tuple[Given, str]]:
    found: dict[str, tuple[Given, str]] = {}
    for name, value in read_toml(file, source).items():
        source = f"{file}: {name}"
        if name not in OPTIONS:
            raise ConfigError(source, value, f"there is no such option; there are {', '.join(OPTIONS)}")
        values = value if isinstance(value, list) and OPTIONS[name].gather is not None else [value]
        if any(type(each) not in (str, int, float) for each in values):
            raise ConfigError(source, value, "give a string or a number, or an array of those if it can be repeated")
        found[name] = [hex(each) if type(each) is int and each >= 2**64 else str(each) for each in values], source
    return found


# --- one kind of value each -------------------------------------------------------------------------------------------


def _path(text: str, source: str) -> Path:
    if not text or "\0" in text:
        raise ConfigError(source, text, "give a path")
    return Path(os.path.expanduser(text))  # as TierStore and its clients do; no shell does so after "--path="


def _directory(text: str, source: str) -> Path:
    """Absolute: it is shown to people, and compared with others, from other working directories."""
    try:
        return _path(text, source).absolute()
    except OSError as error:  # the working directory was removed
        raise ConfigError(source, text, "the working directory cannot be found: give an absolute path") from error


def _number(least: int, most: int, words: str, text: str, source: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and least <= int(text) <= most:
        return int(text)
    raise ConfigError(source, text, words)


def _seconds(text: str, source: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _MOST_SECONDS:
        raise ConfigError(source, text, f"give a number of seconds from 0 to {_MOST_SECONDS:g}")
    return seconds


def _address(text: str, source: str) -> tuple[str, int]:
    import ipaddress

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
    from tierstore.disk.codec.codec import parse_codec

    try:
        parse_codec(text)
    except ConfigError as error:
        raise ConfigError(source, text, error.allowed) from None
    return text


def _one_of(words: Sequence[str], text: str, source: str) -> str:
    if text.lower() not in words:
        raise ConfigError(source, text, f"give one of {', '.join(words)}")
    return text.lower()


# --- the options ------------------------------------------------------------------------------------------------------

_count = partial(_number, 1, _MOST_SESSIONS, f"give a whole number from 1 to {_MOST_SESSIONS}")
_records = partial(_number, 1, _MOST_RECORDS, f"give a whole number from 1 to {_MOST_RECORDS}")
_uid = partial(_number, 0, _MOST_UID, "give user ids, numbers of 0 or more (id -u NAME prints one)")

_SIZE = parse_size, "SIZE"
_SECONDS = _seconds, "SECONDS"

OPTIONS: dict[str, Option] = {
    "path": Option(
        *(_directory, "PATH"),
        "Existing directory on the drive to use. Never created, so that an unmounted drive is an error. Required. Can "
        "be repeated, once for each drive.",
        gather=tuple,
        pattern=f"[^{os.pathsep}]+",
        setting="paths",
    ),
    "socket": Option(_path, "PATH", "Socket to listen on. Its folder is created if needed. Default: see above."),
    "disk_bytes": Option(
        *_SIZE,
        'Limit of disk space for all sessions together, such as "1TiB". Default: 80 % of the free space, files of an '
        "earlier daemon included.",
    ),
    "session_disk_bytes": Option(
        parse_size, "SIZE", "Limit of disk space for one session. Default: that of all sessions together."
    ),
    "session_queued_bytes": Option(
        *_SIZE,
        "Limit of bytes that one session has in the queue and at the drive for writing; further writes wait. Default: "
        "no limit.",
    ),
    "max_sessions_per_user": Option(
        _count,
        "NUMBER",
        "Limit of sessions that one user has at a time, those whose clients are lost included. Default: 512.",
    ),
    "max_records_per_user": Option(
        _records,
        "NUMBER",
        "Limit of records that all sessions of one user have at a time. Each takes about 0.6 KB of the daemon's "
        "memory. Default: 1000000.",
    ),
    "max_write_bytes_per_day": Option(
        *_SIZE,
        "Limit of bytes that all sessions together write to each drive in 24 hours. The allowance begins full and "
        "refills evenly. Default: no limit.",
    ),
    "grace_seconds": Option(
        _seconds, "SECONDS", "How long the daemon keeps the data of a client that has lost its connection. Default: 60."
    ),
    "handshake_seconds": Option(
        *_SECONDS,
        "How long a new connection may take to identify itself, and any connection to complete a message. Default: 10.",
    ),
    "metrics": Option(
        *(_address, "HOST:PORT"),
        "Serve a live page (/), /metrics (for Prometheus), /healthz and /readyz at this loopback address. Default: "
        "none of them.",
    ),
    "allow_uid": Option(
        *(_uid, "UID"),
        "Also allow connections of this user. The daemon's own user and root can always connect. Can be repeated.",
        gather=frozenset,
        pattern=r"[^\s,]+",
        setting="allowed_uids",
    ),
    "socket_group": Option(
        lambda text, source: text, "GROUP", "Group that can open the socket. Default: only the daemon's user can."
    ),
    "codec": Option(
        *(_codec, "CODEC"),
        '"auto" (encodes if that saves time), "none", "floats", "zstd[:LEVEL]" or "shuffle-zstd[:LEVEL]". Default: '
        "auto.",
    ),
    "log_level": Option(
        *(partial(_one_of, ("debug", "info", "warning", "error")), "LEVEL"),
        '"debug", "info", "warning" or "error". Default: info.',
    ),
    "log_format": Option(
        *(partial(_one_of, ("text", "json")), "FORMAT"),
        'Format of the log on standard error: "text" or "json". Default: text.',
    ),
}
"""Options by their names in a file; elsewhere they are called `--disk-bytes` and `TIERSTORE_DISK_BYTES`."""

CONFIG = Option(_path, "FILE", 'TOML file with any of these options, such as disk_bytes = "1TiB". Default: no file.')
"""The one option that a file cannot have."""
