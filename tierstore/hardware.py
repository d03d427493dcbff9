"""The speeds and sizes of a machine, as a TOML file: `tierstore doctor --hardware` writes it, a simulation reads it.

The file has figures only, no judgement. `docs/reference/doctor.md` describes every key. A file is refused if its
version differs, a key is unknown or missing, or a figure is impossible.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, to_builtins

from .base.toml_file import read_toml, toml_text, typed
from .errors import ConfigError

HARDWARE_VERSION = 1

Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]
BlockBytes = Annotated[int, Meta(ge=1, le=2**40)]
Rate = Annotated[float, Meta(gt=0, le=1e15)]
"""Bytes per second. The bound excludes infinity, which TOML can express."""
Seconds = Annotated[float, Meta(gt=0, le=1e6)]


class Transfer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast blocks of one size move in one direction, with `depth` of them at once, each on a thread of its own."""

    block_bytes: BlockBytes
    depth: Annotated[int, Meta(ge=1, le=4096)]
    bytes_per_second: Rate
    measured_bytes: Bytes


class DriveHardware(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The drive, or several that were measured as one. Latencies are medians for 4 KiB, one at a time."""

    io_mode: str
    capacity_bytes: Bytes
    write_latency_seconds: Seconds
    read_latency_seconds: Seconds
    writes: Annotated[tuple[Transfer, ...], Meta(min_length=1)]
    reads: Annotated[tuple[Transfer, ...], Meta(min_length=1)]


class HostHardware(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Host memory and cores. A container's quota may make `cores` a fraction. Rates are of one thread: that copies
    between buffers it has used before, and that writes to memory it has not."""

    cores: Annotated[float, Meta(gt=0, le=1e6)]
    capacity_bytes: Bytes
    copy_bytes_per_second: Rate
    fresh_bytes_per_second: Rate


class CodecSpeed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ratio (after over before) and speed, in unencoded bytes, of a codec on one kind of sample data, on one core."""

    data: str
    codec: str
    ratio: Annotated[float, Meta(gt=0, le=2)]
    encode_bytes_per_second: Rate
    decode_bytes_per_second: Rate


class AcceleratorLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Copies between host memory and an accelerator, one at a time. `host_memory`: its kind on the host's side:
    "pinned", or "pageable" and why."""

    name: str
    memory_bytes: Bytes
    host_memory: str
    to_host_bytes_per_second: Rate
    to_device_bytes_per_second: Rate


class Hardware(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of one machine, as a file holds it."""

    version: int
    host: HostHardware
    drive: DriveHardware
    codecs: tuple[CodecSpeed, ...] = ()
    accelerators: tuple[AcceleratorLink, ...] = ()


def read_hardware(file: str | PathLike[str]) -> Hardware:
    """Read a description. Blocks. Raises ConfigError, which names file and key: the file cannot be read, is of another
    version, or has a wrong key."""
    path = Path(file)
    values = read_toml(path, "hardware")
    version = values.get("version")
    if version != HARDWARE_VERSION or isinstance(version, bool):
        raise ConfigError(f"{path}: version", version, f"this tierstore reads version {HARDWARE_VERSION}")
    return typed(values, Hardware, str(path))


def hardware_text(hardware: Hardware) -> str:
    """The description as TOML. `read_hardware` reads the same figures back."""
    return toml_text(to_builtins(hardware))
