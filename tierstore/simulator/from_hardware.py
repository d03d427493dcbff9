"""Makes hardware to simulate from the file that `tierstore doctor --hardware` writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..hardware import Hardware as DescribedHardware
from ..hardware import Transfer
from .hardware import CodecSpeed, DepthSpeed, Drive, Hardware, Link

CALL_SECONDS_PER_RECORD = 0.3e-3
"""Of a training thread; see `Hardware`. Traces of two models show so much, without waits, more than in a step in which
nothing moves."""
_CPU_SECONDS_PER_RECORD = 0.5e-3
"""`docs/project/internals/measurements.md` gives 0.4 ms for a record each way."""


def hardware_of(described: DescribedHardware, *, kinds: Mapping[str, str] | None = None) -> Hardware:
    """The machine of a description; see `read_hardware`.

    For each direction the speeds of the largest blocks are taken, since records are large. Checksum and system call are
    taken to cost as much as a copy of the bytes, an upper bound: a file says nothing more exact. If there are several
    accelerators, each rank has one like the first. `kinds`: for each kind of content in a workload, the sample data
    that stands for it; None: the first data of each codec stands for every kind.
    """
    drive = described.drive.as_one()
    links = [Link(each.to_host_bytes_per_second, each.to_device_bytes_per_second) for each in described.accelerators]
    return Hardware(
        Drive(
            _largest_blocks(drive.writes),
            _largest_blocks(drive.reads),
            drive.write_latency_seconds,
            drive.read_latency_seconds,
            drive.capacity_bytes,
        ),
        described.host.cores,
        _codecs(described, kinds),
        cpu_seconds_per_record=_CPU_SECONDS_PER_RECORD,
        cpu_seconds_per_byte=1 / described.host.copy_bytes_per_second,
        call_seconds_per_record=CALL_SECONDS_PER_RECORD,
        link=links[0] if links else None,
    )


def _largest_blocks(transfers: Iterable[Transfer]) -> list[DepthSpeed]:
    by_size = sorted(transfers, key=lambda transfer: transfer.block_bytes)
    speeds = {transfer.depth: transfer.bytes_per_second for transfer in by_size}
    return [DepthSpeed(depth, speeds[depth]) for depth in sorted(speeds)]


def _codecs(described: DescribedHardware, kinds: Mapping[str, str] | None) -> list[CodecSpeed]:
    found: dict[tuple[str, str], CodecSpeed] = {}
    for speed in described.codecs:
        names = [""] if kinds is None else [kind for kind, data in kinds.items() if data == speed.data]
        speeds = speed.ratio, speed.encode_bytes_per_second, speed.decode_bytes_per_second
        for name in names:
            found.setdefault((name, speed.codec), CodecSpeed(name, speed.codec, *speeds))
    return list(found.values())
