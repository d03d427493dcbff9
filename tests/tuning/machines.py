"""Made-up machines: a healthy one, and changes of it."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from tierstore.tuning.measurements import (
    AcceleratorLink,
    AcceleratorState,
    CodecSpeed,
    Daemon,
    Drive,
    Limits,
    Measurements,
    Memory,
    Processor,
    Transfer,
)

__all__ = ["GIB", "LINK", "MIB", "drive_of_speed", "machine", "transfers"]

MIB, GIB = 2**20, 2**30


def transfers(bytes_per_second: float) -> tuple[Transfer, ...]:
    """At each depth, at that speed."""
    return tuple(Transfer(block_bytes=16 * MIB, depth=depth, bytes_per_second=bytes_per_second) for depth in (1, 4))


def drive_of_speed(write: float, read: float) -> dict[str, Any]:
    """Changes of a drive, in bytes per second."""
    return {"writes": transfers(write), "reads": transfers(read)}


LINK = AcceleratorLink(
    name="A card",
    memory_bytes=24 * GIB,
    host_memory="pinned",
    to_host_bytes_per_second=20e9,
    to_device_bytes_per_second=20e9,
)

_HEALTHY = Measurements(
    num_trainers=1,
    seconds=20.0,
    drive=Drive(
        path="/nvme",
        file_system="ext4",
        io_mode="O_DIRECT",
        free_bytes=500 * GIB,
        model="A drive",
        size_bytes=2000 * 10**9,
        is_rotational=False,
        span_bytes=512 * MIB,
        write_latency_seconds=2e-5,
        read_latency_seconds=8e-5,
        writes=transfers(2.5e9),
        reads=transfers(3e9),
    ),
    memory=Memory(
        total_bytes=64 * GIB,
        available_bytes=48 * GIB,
        limit_bytes=None,
        swap_used_bytes=0,
        copy_bytes_per_second=1e10,
        huge_pages="madvise",
        allocator="glibc",
        allocator_left_alone=None,
    ),
    processor=Processor(num_present=16, num_allowed=16, quota_cores=None),
    limits=Limits(open_files=65_536, locked_bytes=None),
    codecs=(
        CodecSpeed(
            data="activations, bfloat16",
            codec="shuffle-zstd:1",
            ratio=0.6,
            encode_bytes_per_second=0.5e9,
            decode_bytes_per_second=1.3e9,
        ),
        CodecSpeed(
            data="masks", codec="bits", ratio=0.125, encode_bytes_per_second=1.5e10, decode_bytes_per_second=1e10
        ),
        CodecSpeed(data="noise", codec="zstd:1", ratio=1.0, encode_bytes_per_second=5e9, decode_bytes_per_second=2e10),
    ),
    accelerators=AcceleratorState(note="no driver"),
    daemon=Daemon(socket="/run/tierstore/tierstore.sock", is_present=False),
)


def machine(**changes: Any) -> Measurements:
    """The healthy machine with changes; those of a part as a mapping: `machine(drive={"free_bytes": 0})`."""
    parts = {
        name: structs.replace(getattr(_HEALTHY, name), **change) if isinstance(change, dict) else change
        for name, change in changes.items()
    }
    return structs.replace(_HEALTHY, **parts)
