"""Made-up steps and machines."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from tests.simulator import made_up
from tierstore.hardware import AcceleratorLink, CodecSpeed, DriveHardware, Hardware, HostHardware, Transfer
from tierstore.simulator import Workload
from tierstore.tuning.machines import Machine

__all__ = ["GB", "MIB", "accelerator", "chain", "machine"]

MIB, GB = 2**20, 10**9


def chain(
    sizes: Sequence[int] = (16 * MIB,) * 40, gap_seconds: float = 0.01, cores: float = 1.0, kind: str = "float32"
) -> Workload:
    """Layers of these bytes: forward computes and saves, backward asks in reverse and computes for as long."""
    return made_up.chain(sizes, gap_seconds, backward=1.0, cores=cores, kind=kind)


def accelerator(speed: float = 20 * GB, memory_bytes: int = 80 * GB) -> AcceleratorLink:
    """One to and from which so many bytes go in a second."""
    return AcceleratorLink(
        name="made-up",
        memory_bytes=memory_bytes,
        host_memory="pinned",
        to_host_bytes_per_second=speed,
        to_device_bytes_per_second=speed,
    )


def machine(
    write: float = 20 * GB,
    read: float = 20 * GB,
    *,
    capacity_bytes: int = 1000 * GB,
    memory_bytes: int = 64 * GB,
    cores: float = 16.0,
    memory: float | None = None,
    codecs: tuple[CodecSpeed, ...] = (),
    accelerators: tuple[AcceleratorLink, ...] = (),
    **drive: int,
) -> Machine:
    """A machine with a drive, and a memory, of that many bytes per second."""
    speeds = [
        Transfer(block_bytes=16 * MIB, depth=1, bytes_per_second=each, measured_bytes=0) for each in (write, read)
    ]
    described = DriveHardware(
        io_mode="O_DIRECT",
        capacity_bytes=capacity_bytes,
        write_latency_seconds=1e-5,
        read_latency_seconds=1e-5,
        writes=(speeds[0],),
        reads=(speeds[1],),
    )
    host = HostHardware(
        cores=cores,
        capacity_bytes=memory_bytes,
        copy_bytes_per_second=1e10,
        fresh_bytes_per_second=3e9,
        memory_bytes_per_second=memory,
    )
    described = structs.replace(described, **drive)
    hardware = Hardware(version=1, host=host, drive=described, codecs=codecs, accelerators=accelerators)
    return Machine("made-up", "", hardware)
