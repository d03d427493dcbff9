"""The speeds and sizes of a machine, as a TOML file: `tierstore doctor --hardware` writes it, a simulation reads it.

The file has figures only, no judgement. `docs/reference/doctor.md` describes every key. A file is refused if its
version differs, a key is unknown or missing, or a figure is impossible. The doctor leaves out the optional keys; users
may add `num_drives` by hand, and nothing uses the others.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, structs, to_builtins

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


class DriveHardware(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The disk tier: one drive, or `num_drives` of one kind that take blocks in turns. All figures are of one drive;
    latencies are medians for 4 KiB, one at a time."""

    io_mode: str
    capacity_bytes: Bytes
    write_latency_seconds: Seconds
    read_latency_seconds: Seconds
    writes: Annotated[tuple[Transfer, ...], Meta(min_length=1)]
    reads: Annotated[tuple[Transfer, ...], Meta(min_length=1)]
    num_drives: Annotated[int, Meta(ge=1, le=1024)] = 1
    rated_written_bytes: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None

    def as_one(self) -> DriveHardware:
        """All the drives as a single one: `num_drives` times as fast at any depth, with the latency of one drive."""
        if self.num_drives == 1:
            return self
        rated_bytes = self.rated_written_bytes
        return structs.replace(
            self,
            num_drives=1,
            capacity_bytes=self.capacity_bytes * self.num_drives,
            writes=_times(self.writes, self.num_drives),
            reads=_times(self.reads, self.num_drives),
            rated_written_bytes=None if rated_bytes is None else rated_bytes * self.num_drives,
        )


def _times(transfers: tuple[Transfer, ...], factor: int) -> tuple[Transfer, ...]:
    return tuple(structs.replace(each, bytes_per_second=each.bytes_per_second * factor) for each in transfers)


class HostHardware(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Host memory, and cores, of which a container's quota may leave a fraction. Rates are of one thread that copies
    between buffers it has used before, or writes to memory it has not; `memory_bytes_per_second`: of cores and devices
    together."""

    cores: Annotated[float, Meta(gt=0, le=1e6)]
    capacity_bytes: Bytes
    copy_bytes_per_second: Rate
    fresh_bytes_per_second: Rate
    price_per_hour: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    memory_bytes_per_second: Rate | None = None


class CodecSpeed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ratio (after over before) and speed, in unencoded bytes, of a codec on one kind of sample data, on one core."""

    data: str
    codec: str
    ratio: Annotated[float, Meta(gt=0, le=2)]
    encode_bytes_per_second: Rate
    decode_bytes_per_second: Rate


class AcceleratorLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Copies to and from "pinned" or "pageable" host memory, one at a time; `both_bytes_per_second`: one each way."""

    name: str
    memory_bytes: Bytes
    host_memory: str
    to_host_bytes_per_second: Rate
    to_device_bytes_per_second: Rate
    both_bytes_per_second: Rate | None = None


class Hardware(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of one machine, as a file holds it."""

    version: int
    host: HostHardware
    drive: DriveHardware
    codecs: tuple[CodecSpeed, ...] = ()
    accelerators: tuple[AcceleratorLink, ...] = ()


def read_hardware(file: str | PathLike[str]) -> Hardware:
    """Read a description. Blocks. Raises ConfigError, which names file and key: it cannot be read, is of another
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
