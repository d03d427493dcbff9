"""The options of a store: each is named, replaced by a trial of `tierstore tune`, and judged here, once.

What makes `StoreOptions` raises ConfigError for one that cannot be used. Nothing was opened then."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial, wraps
from inspect import Parameter, signature
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from ..base.address import find_address, trusted_uid
from ..base.config import (
    Mode,
    SizeLike,
    available_host_bytes,
    check_directories,
    free_bytes_of_each,
    local_world_size,
    parse_budget,
    parse_io_depth,
    parse_return_memory,
    parse_size,
    program_name,
    rank_of_process,
)
from ..base.defaults import NUM_BESIDE_DEVICE, STAGING_BYTES, windows_of
from ..base.system_words import words_of
from ..disk.budget import divided_budget
from ..disk.codec.codec import parse_codec
from ..disk.drives import Drives
from ..disk.local import LocalDisk
from ..disk.tier import DiskTier
from ..errors import ConfigError, ConfigTypeError, StorageIOError
from ..sidecar.remote import RemoteDisk
from .engine import OpenDisk
from .trial import trial_of_process

if TYPE_CHECKING:
    from ..tensors.copies import Copies

_DISK_SHARE = 0.8  # of the free space
_CONNECTED_BYTES = 80 * 2**20
_MOST_SECONDS = 1e9  # more is for ever, and no timer takes it
_MOST_ADDRESS_BYTES = 107  # unix(7)
_HOST_AND_PORT = re.compile(r"(\w+://)?[\w.\-\[\]:]*:\d{1,5}/?")
_WHICH_SOCKET = "give the path of the daemon's socket"

Place = str | PathLike[str]
_P = ParamSpec("_P")
_T = TypeVar("_T")


class DiskOptions(NamedTuple):
    """The options of a store with its own disk tier, as `TierStore` takes them, and the number of its drives."""

    codec: str
    inline_bytes: int | None
    checksum: bool
    io_depth: int
    num_drives: int


class StoreOptions(NamedTuple):
    """What a store is made with. `disk` is None if the disk tier is a daemon's, which has options of its own."""

    name: str
    host_bytes: int
    staging_bytes: int
    staging_grows: bool
    return_memory: Mode
    copies: Copies | None
    open_disk: OpenDisk
    disk: DiskOptions | None


def local_options(path: Place | Sequence[Place], given: Mapping[str, Any]) -> StoreOptions:
    """The options of a store with its own disk tier. `given`: the other arguments of `TierStore`, by name."""
    trial = trial_of_process()
    values = given if trial is None else {**given, **trial.store}
    directories = check_directories(path)
    codec = values["codec"]
    parse_codec(codec)
    budgets = _disk_budgets(directories, values["disk_bytes"])
    inline_bytes = None if values["inline_bytes"] is None else parse_size(values["inline_bytes"], "inline_bytes")
    io_depth = parse_io_depth(values["io_depth"])
    day_bytes = _budget_or_none(values, "max_write_bytes_per_day")
    checksum = values["checksum"]
    if not isinstance(checksum, bool):
        raise ConfigTypeError("checksum", checksum, "give True or False")

    def open_drive(executor: Executor, number: int) -> LocalDisk:
        return LocalDisk(
            directories[number],
            disk_bytes=budgets[number],
            inline_bytes=inline_bytes,
            codec=codec,
            checksum=checksum,
            executor=executor,
            num_at_once=io_depth,
            max_write_bytes_per_day=day_bytes,
        )

    async def open_disk(executor: Executor) -> DiskTier:
        if len(directories) == 1:
            return open_drive(executor, 0)
        openers = {str(directory): partial(open_drive, executor, n) for n, directory in enumerate(directories)}
        return await Drives.open(openers, num_jobs=io_depth + NUM_BESIDE_DEVICE, divides=True)

    disk = DiskOptions(codec, inline_bytes, checksum, io_depth, len(directories))
    paths = path if isinstance(path, (list, tuple)) else [path]
    return _options(", ".join(map(str, paths)), values, STAGING_BYTES, open_disk, disk)


def connected_options(address: str | PathLike[str] | None, given: Mapping[str, Any]) -> StoreOptions:
    """The options of a store that uses a daemon. `given`: the arguments of `TierStore.connect`, by name.

    Raises DaemonUnavailableError: there is no address, and no socket where a daemon listens by default."""
    address = find_address() if address is None else address
    reconnect_seconds, name = given["reconnect_seconds"], given["name"]
    if not isinstance(reconnect_seconds, (int, float)):
        raise ConfigTypeError("reconnect_seconds", reconnect_seconds, "give a number of seconds")
    if not reconnect_seconds >= 0:  # NaN neither
        raise ConfigError("reconnect_seconds", reconnect_seconds, "give 0 or more seconds")
    if not (name is None or isinstance(name, str)):
        raise ConfigTypeError("name", name, "give a string")
    daemon_uid = trusted_uid(given["daemon_uid"])
    window_bytes = parse_budget(given["window_bytes"], "window_bytes")
    path = _lasting(address)

    async def open_disk(executor: Executor) -> DiskTier:
        return await RemoteDisk.open(
            path,
            name=name if name is not None else program_name(),
            rank=rank_of_process(),
            pid=os.getpid(),
            window_bytes=window_bytes,
            reconnect_seconds=float(min(reconnect_seconds, _MOST_SECONDS)),
            executor=executor,
            daemon_uid=daemon_uid,
        )

    return _options(str(address), given, _CONNECTED_BYTES, open_disk, None)


def options_over(open_disk: OpenDisk, name: str, given: Mapping[str, Any]) -> StoreOptions:
    """The options of a store over any disk tier. `given`: the arguments of `TierStore.over`, by name."""
    if not callable(open_disk):
        raise ConfigTypeError("open_disk", open_disk, "give an async function that opens a DiskTier")
    return _options(name, given, STAGING_BYTES, open_disk, None)


def _options(
    name: str, values: Mapping[str, Any], most_staging_bytes: int, open_disk: OpenDisk, disk: DiskOptions | None
) -> StoreOptions:
    host_bytes, staging_bytes = _budget_or_none(values, "host_bytes"), _budget_or_none(values, "staging_bytes")
    try:
        available_bytes = available_host_bytes() // local_world_size()
    except OSError as error:
        raise StorageIOError("open", name, words_of(error, name), "nothing was stored") from error
    return StoreOptions(
        name,
        *windows_of(available_bytes, host_bytes, staging_bytes, most_staging_bytes),
        staging_bytes is None,
        parse_return_memory(values["return_memory"]),
        values["copies"],
        open_disk,
        disk,
    )


def _disk_budgets(directories: Sequence[Path], disk_bytes: SizeLike | None) -> list[int]:
    free_bytes = free_bytes_of_each(directories)
    if disk_bytes is None:
        return [int(each * _DISK_SHARE) // local_world_size() for each in free_bytes]
    return divided_budget(parse_budget(disk_bytes, "disk_bytes"), free_bytes)


def _budget_or_none(values: Mapping[str, Any], name: str) -> int | None:
    return None if values[name] is None else parse_budget(values[name], name)


def _lasting(address: str | PathLike[str]) -> str:
    """The absolute address, for reconnecting from another working directory, unless it is too long for a socket."""
    if not (isinstance(address, (str, PathLike)) and isinstance(os.fspath(address), str)):
        raise ConfigTypeError("address", address, _WHICH_SOCKET)
    if not os.fspath(address) or "\0" in os.fspath(address):
        raise ConfigError("address", address, _WHICH_SOCKET)
    if _HOST_AND_PORT.fullmatch(os.fspath(address)) and not os.path.exists(address):
        raise ConfigError("address", address, f"{_WHICH_SOCKET}: data never goes over TCP, only a daemon's metrics do")
    absolute = os.path.abspath(os.path.expanduser(address))
    return absolute if len(os.fsencode(absolute)) <= _MOST_ADDRESS_BYTES else str(address)


def refuses_unknown(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorator: an option that the function does not have raises ConfigTypeError, which names those that it has."""
    parameters = signature(function).parameters
    allowed = ", ".join(name for name, parameter in parameters.items() if parameter.kind is Parameter.KEYWORD_ONLY)

    @wraps(function)
    def call(*arguments: _P.args, **options: _P.kwargs) -> _T:
        for option, value in options.items():
            if option not in parameters:
                raise ConfigTypeError(option, value, f"there is no such option; there are {allowed}")
        return function(*arguments, **options)

    return call
