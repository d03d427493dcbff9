"""Makes hardware to simulate from the file that `tierstore doctor --hardware` writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from ..hardware import AcceleratorLink, Transfer
from ..hardware import Hardware as DescribedHardware
from .hardware import CodecSpeed, DepthSpeed, Drive, Hardware, Link

__all__ = ["CALL_SECONDS_PER_RECORD", "hardware_of"]

CALL_SECONDS_PER_RECORD = 0.3e-3
"""See `hardware_of`."""


def hardware_of(
    described: DescribedHardware,
    *,
    contention: float = 1.0,
    cpu_seconds_per_record: float = 0.5e-3,
    call_seconds_per_record: float = CALL_SECONDS_PER_RECORD,
    kinds: Mapping[str, str] | None = None,
) -> Hardware:
    """The machine of a description.

    For each direction the speeds of the largest blocks are taken, since records are large. Checksum and system call are
    taken to cost as much as a copy of the bytes, an upper bound: a file says nothing more exact. If there are several
    accelerators, each rank has one like the first.

    Args:
        described: see `read_hardware`.
        contention, cpu_seconds_per_record, call_seconds_per_record: as `Hardware`'s. They are not in the file, since
            only training shows them. `docs/project/internals/measurements.md` gives 0.4 ms for a record each way.
            Traces of two models show 0.3 ms for calls, without waits, more than in a step in which nothing moves.
        kinds: for each kind of content in a workload, the sample data that stands for it; None: the first data of each
            codec stands for every kind.
    """
    drive = described.drive.as_one()
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
        contention,
        cpu_seconds_per_record,
        1 / described.host.copy_bytes_per_second,
        call_seconds_per_record,
        _link(described.accelerators),
        described.host.memory_bytes_per_second or inf,
    )


def _link(accelerators: Sequence[AcceleratorLink]) -> Link | None:
    if not accelerators:
        return None
    first = accelerators[0]
    return Link(first.to_host_bytes_per_second, first.to_device_bytes_per_second, first.both_bytes_per_second or inf)


def _largest_blocks(transfers: Iterable[Transfer]) -> list[DepthSpeed]:
    speeds: dict[int, Transfer] = {}
    for transfer in transfers:
        known = speeds.get(transfer.depth)
        if known is None or transfer.block_bytes > known.block_bytes:
            speeds[transfer.depth] = transfer
    return [DepthSpeed(depth, speeds[depth].bytes_per_second) for depth in sorted(speeds)]


def _codecs(described: DescribedHardware, kinds: Mapping[str, str] | None) -> list[CodecSpeed]:
    found: dict[tuple[str, str], CodecSpeed] = {}
    for speed in described.codecs:
        names = [""] if kinds is None else [kind for kind, data in kinds.items() if data == speed.data]
        for name in names:
            found.setdefault(
                (name, speed.codec),
                CodecSpeed(
                    name, speed.codec, speed.ratio, speed.encode_bytes_per_second, speed.decode_bytes_per_second
                ),
            )
    return list(found.values())
