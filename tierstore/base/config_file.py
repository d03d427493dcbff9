"""The configuration file of a store and of offloading to it: TOML with the tables `[store]` and `[offload]`.

::

    [store]
    path = "/nvme"              # or ["/nvme0", "/nvme1"], one on each drive
                                # or connect = "/run/tierstore/tierstore.sock", for the store of a daemon
    host_bytes = "16GiB"

    [offload]
    min_bytes = "1MiB"

The keys are the arguments of `TierStore` and `tiered_offload`, which also check the values. An error names the file and
the key."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from msgspec import UNSET, Struct, UnsetType, structs

from ..errors import ConfigError, ConfigTypeError
from .config import SizeLike
from .toml_file import read_toml, typed

ConfigSource = str | PathLike[str] | Mapping[str, Any]
"""The path of a TOML file, or its contents: table -> key -> value. In a mapping None is a value too; TOML has none."""

_NAME_OF_MAPPING = "config"


class StoreTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[store]`: the arguments of `TierStore`. With `connect`, a daemon's socket, those of `TierStore.connect`."""

    path: str | list[str] | UnsetType = UNSET
    connect: str | UnsetType = UNSET
    host_bytes: SizeLike | UnsetType | None = UNSET
    disk_bytes: SizeLike | UnsetType | None = UNSET
    codec: str | UnsetType = UNSET
    staging_bytes: SizeLike | UnsetType = UNSET
    inline_bytes: SizeLike | UnsetType | None = UNSET
    checksum: bool | UnsetType = UNSET
    io_depth: int | UnsetType = UNSET
    max_write_bytes_per_day: SizeLike | UnsetType | None = UNSET
    return_memory: str | UnsetType = UNSET
    window_bytes: SizeLike | UnsetType = UNSET
    reconnect_seconds: float | UnsetType = UNSET
    daemon_uid: int | UnsetType | None = UNSET
    name: str | UnsetType | None = UNSET


class OffloadTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[offload]`: the arguments of `tiered_offload`, except `select`."""

    min_bytes: SizeLike | UnsetType = UNSET
    device_bytes: SizeLike | UnsetType = UNSET
    prefetch: str | UnsetType = UNSET
    lookahead_bytes: SizeLike | UnsetType | None = UNSET


class _Document(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    store: StoreTable = StoreTable()
    offload: OffloadTable = OffloadTable()


class FileOptions:
    """Arguments by name (`values`), and the place where each was found. Those in `changes`, the caller's, come before
    those in `table` of `source`."""

    def __init__(self, values: dict[str, Any], table: str, source: str, changes: Mapping[str, Any]) -> None:
        self.values = {**values, **changes}
        self._where = {name: f"{source}: {table}.{name}" for name in values if name not in changes}

    @contextmanager
    def naming_their_place(self) -> Iterator[None]:
        """Inside the context, a ConfigError about one of the arguments is raised again with file and key."""
        try:
            yield
        except ConfigError as error:
            if error.option not in self._where:
                raise
            raise type(error)(self._where[error.option], error.given, error.allowed) from error.__cause__


def store_options(config: ConfigSource, changes: Mapping[str, Any]) -> FileOptions:
    """The arguments for a store. Blocks for the file. `changes` replace arguments of the file; `path` replaces its
    `connect` too, and the reverse. ConfigError: the file cannot be read, has an unknown key or a value of the wrong
    type, or does not give exactly one of `path` and `connect`."""
    document, source = _read(config)
    found = _given(document.store)
    if "path" in changes or "connect" in changes:
        found = {name: value for name, value in found.items() if name not in ("path", "connect")}
    options = FileOptions(found, "store", source, changes)
    places = [name for name in ("path", "connect") if name in options.values]
    if len(places) != 1:
        given = {name: options.values[name] for name in places} or None
        what = 'give either path, a directory on the drive, or connect, the socket of a daemon, such as path = "/nvme"'
        raise ConfigError(f"{source}: store", given, what)
    return options


def offload_options(config: ConfigSource, changes: Mapping[str, Any]) -> FileOptions:
    """The arguments for `tiered_offload`; blocks and raises like `store_options`."""
    document, source = _read(config)
    return FileOptions(_given(document.offload), "offload", source, changes)


def _read(config: ConfigSource) -> tuple[_Document, str]:
    if isinstance(config, (str, os.PathLike)):
        file = Path(config)
        return typed(read_toml(file, "config"), _Document, str(file)), str(file)
    if not isinstance(config, Mapping):
        raise ConfigTypeError(
            "config", config, "give the path of a TOML file, or a mapping with the tables store and offload"
        )
    return typed(_with_text_paths(config), _Document, _NAME_OF_MAPPING), _NAME_OF_MAPPING


def _with_text_paths(value: object) -> Any:
    """The mapping with strings for path objects, which `path` and `connect` may be here but not in TOML."""
    if isinstance(value, Mapping):
        return {name: _with_text_paths(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_text_paths(each) for each in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _given(table: Struct) -> dict[str, Any]:
    return {name: value for name, value in structs.asdict(table).items() if value is not UNSET}
