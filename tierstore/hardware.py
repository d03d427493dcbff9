"""What a machine can do, as a file: TOML that `tierstore doctor --hardware` writes and a simulation reads.

Figures only, no judgement. `docs/doctor.md` describes every key. A file of another version, with a key that is unknown
or missing, or with a figure that no machine has, is refused. What the doctor cannot measure (endurance, a second drive,
a price) it leaves out; whoever knows it writes it into the file.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, structs, to_builtins

from .errors import ConfigError
from .toml_file import read_toml, toml_text, typed

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
"""Bytes per second. The bound keeps out infinity, which TOML can say."""
Seconds = Annotated[float, Meta(gt=0, le=1e6)]


class Transfer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How fast blocks of one size move, so many at once, in one direction.

    Attributes:
        block_bytes: of one system call.
        depth: how many were in flight, each from a thread of its own.
        bytes_per_second: all of them together.
        measured_bytes: from how many bytes that was found.
    """

    block_bytes: BlockBytes
    depth: Annotated[int, Meta(ge=1, le=4096)]
    bytes_per_second: Rate
    measured_bytes: Bytes


class DriveHardware(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The disk tier: one drive, or several of the same kind with their blocks in turns (RAID 0).

    Attributes:
        io_mode: "O_DIRECT", or "buffered" and why.
        capacity_bytes: what may be stored, on one of the drives.
        write_latency_seconds: of 4 KiB, one at a time, the median; likewise `read_latency_seconds`.
        writes: by block size and depth, over space that was written before; of one of the drives.
        reads: likewise.
        num_drives: of that kind. What was measured on drives that work as one is a single drive here.
        rated_written_bytes: what one of them may have written to it in its life, by its data sheet; None: not known.
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

        A transfer is taken to be longer than the pieces in which blocks go to the drives in turns, so that all of them
        share in it: `num_drives` times as fast at any depth, with the latency of one.
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
        cores: that the process may use; a container's quota may leave a part of one.
        capacity_bytes: of memory that a process could still take.
        copy_bytes_per_second: of one thread that copies between buffers it has used before.
        fresh_bytes_per_second: of one thread that writes to memory it has not used before.
        price_per_hour: of the whole machine, in whatever currency; None: not known.
    """

    cores: Annotated[float, Meta(gt=0, le=1e6)]
    capacity_bytes: Bytes
    copy_bytes_per_second: Rate
    fresh_bytes_per_second: Rate
    price_per_hour: Annotated[float, Meta(ge=0, le=1e9)] | None = None


class CodecSpeed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a codec does to one kind of sample data, on one core.

    Attributes:
        data: the kind, such as "activations, bfloat16".
        codec: such as "shuffle-zstd:1".
        ratio: bytes after over bytes before; about 1 where it is in vain.
        encode_bytes_per_second: of unencoded bytes and a core's time; likewise `decode_bytes_per_second`.
    """

    data: str
    codec: str
    ratio: Annotated[float, Meta(gt=0, le=2)]
    encode_bytes_per_second: Rate
    decode_bytes_per_second: Rate


class AcceleratorLink(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Copies between host memory and an accelerator.

    Attributes:
        name: of the device, as its driver says.
        memory_bytes: of the device.
        host_memory: what the host's side was: "pinned", or "pageable" and why.
        to_host_bytes_per_second: of one copy at a time; likewise `to_device_bytes_per_second`.
        both_bytes_per_second: of two copies, one each way, together; None: not known, as fast as both alone.
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
        version: of this format.
        host, drive: the two tiers that every machine has.
        codecs: by kind of data and codec.
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
        ConfigError: it cannot be read, is of another version, or a key is wrong; names file and key.
    """
    path = Path(file)
    values = read_toml(path, "hardware")
    version = values.get("version")
    if version != HARDWARE_VERSION or isinstance(version, bool):
        raise ConfigError(f"{path}: version", version, f"this tierstore reads version {HARDWARE_VERSION}")
    return typed(values, Hardware, str(path))


def hardware_text(hardware: Hardware) -> str:
    """The description as TOML, which `read_hardware` reads back as the same figures."""
    return toml_text(to_builtins(hardware))
