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

__all__ = [
    "HARDWARE_VERSION",
    "AcceleratorLink",
    "CodecSpeed",
    "DriveHardware",
    "Hardware",
    "HostHardware",
    "Transfer",
    "hardware_text",
    "read_hardware",
]

HARDWARE_VERSION = 1

Bytes = Annotated[int, Meta(ge=0, le=2**63 - 1)]
BlockBytes = Annotated[int, Meta(ge=1, le=2**40)]
Rate = Annotated[float, Meta(gt=0, le=1e15)]
"""Bytes per second. The bound excludes infinity, which TOML can express."""
Seconds = Annotated[float, Meta(gt=0, le=1e6)]


class Transfer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast blocks of one size move in one direction, with `depth` of them at once.

    Attributes:
        block_bytes: size of one system call.
        depth: how many were in flight, each from a thread of its own.
        bytes_per_second: the rate of all of them together.
        measured_bytes: how many bytes the measurement moved.
    """

    block_bytes: BlockBytes
    depth: Annotated[int, Meta(ge=1, le=4096)]
    bytes_per_second: Rate
    measured_bytes: Bytes


class DriveHardware(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The disk tier: one drive, or several of the same kind that take blocks in turns (RAID 0).

    Attributes:
        io_mode: "O_DIRECT", or "buffered" and why.
        capacity_bytes: bytes that may be stored on one of the drives.
        write_latency_seconds: median for 4 KiB, one at a time; likewise `read_latency_seconds`.
        writes: rates of one drive, by block size and depth, over space that was written before.
        reads: likewise.
        num_drives: the number of drives. Drives that were measured as one count as one here.
        rated_written_bytes: bytes that may be written to one drive in its life, by its data sheet; None: not known.
    """

    io_mode: str
    capacity_bytes: Bytes
    write_latency_seconds: Seconds
    read_latency_seconds: Seconds
    writes: Annotated[tuple[Transfer, ...], Meta(min_length=1)]
    reads: Annotated[tuple[Transfer, ...], Meta(min_length=1)]
    num_drives: Annotated[int, Meta(ge=1, le=1024)] = 1
    rated_written_bytes: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None

    def as_one(self) -> DriveHardware:
        """All the drives as a single one.

        A transfer is taken to be long enough to be divided over all drives. So it is `num_drives` times as fast at any
        depth, with the latency of one drive.
        """
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
    """Host memory and cores.

    Attributes:
        cores: cores that the process may use; a container's quota may make it a fraction.
        capacity_bytes: memory that a process could still take.
        copy_bytes_per_second: rate of one thread that copies between buffers it has used before.
        fresh_bytes_per_second: rate of one thread that writes to memory it has not used before.
        price_per_hour: price of the whole machine, in any currency; None: not known.
        memory_bytes_per_second: what cores and devices read from and write to memory, all together; None: not known.
    """

    cores: Annotated[float, Meta(gt=0, le=1e6)]
    capacity_bytes: Bytes
    copy_bytes_per_second: Rate
    fresh_bytes_per_second: Rate
    price_per_hour: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    memory_bytes_per_second: Rate | None = None


class CodecSpeed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ratio and speed of a codec on one kind of sample data, on one core.

    Attributes:
        data: the kind of data, such as "activations, bfloat16".
        codec: such as "shuffle-zstd:1".
        ratio: bytes after over bytes before; about 1: no gain.
        encode_bytes_per_second: unencoded bytes per second of one core; likewise `decode_bytes_per_second`.
    """

    data: str
    codec: str
    ratio: Annotated[float, Meta(gt=0, le=2)]
    encode_bytes_per_second: Rate
    decode_bytes_per_second: Rate


class AcceleratorLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Copies between host memory and an accelerator.

    Attributes:
        name: the device's name, as its driver gives it.
        memory_bytes: size of the device's memory.
        host_memory: the kind of memory on the host's side: "pinned", or "pageable" and why.
        to_host_bytes_per_second: rate of one copy at a time; likewise `to_device_bytes_per_second`.
        both_bytes_per_second: rate of two copies together, one each way; None: not known, neither slows the other.
    """

    name: str
    memory_bytes: Bytes
    host_memory: str
    to_host_bytes_per_second: Rate
    to_device_bytes_per_second: Rate
    both_bytes_per_second: Rate | None = None


class Hardware(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of one machine, as a file holds it.

    Attributes:
        version: the version of this format.
        host, drive: the two tiers that every machine has.
        codecs: figures by kind of data and codec.
        accelerators: none, one, or several.
    """

    version: int
    host: HostHardware
    drive: DriveHardware
    codecs: tuple[CodecSpeed, ...] = ()
    accelerators: tuple[AcceleratorLink, ...] = ()


def read_hardware(file: str | PathLike[str]) -> Hardware:
    """Read a description. Blocks.

    Raises:
        ConfigError: the file cannot be read, is of another version, or has a wrong key; names file and key.
    """
    path = Path(file)
    values = read_toml(path, "hardware")
    version = values.get("version")
    if version != HARDWARE_VERSION or isinstance(version, bool):
        raise ConfigError(f"{path}: version", version, f"this tierstore reads version {HARDWARE_VERSION}")
    return typed(values, Hardware, str(path))


def hardware_text(hardware: Hardware) -> str:
    """The description as TOML. `read_hardware` reads the same figures back."""
    return toml_text(to_builtins(hardware))
