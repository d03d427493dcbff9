"""Hardware to simulate, from the file that `tierstore doctor --hardware` writes."""

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

    Of each direction the speeds of the largest blocks count, as records are large. Checksum and system call are taken
    to cost what a copy of the bytes costs, at most: a file says nothing nearer. Of several accelerators the first
    counts: each rank has one like it.

    Args:
        described: see `read_hardware`.
        contention, cpu_seconds_per_record, call_seconds_per_record: as `Hardware`'s; not in the file, since training is
            what shows them. Half a millisecond is what `ARCHITECTURE.md` has for a record each way; 0.3 ms is what
            traces of two models show of the calls, without waits, beyond those of a step in which nothing moves.
        kinds: of a workload's content, and the sample data that stands for each; None: the first data of each codec
            stands for every kind.
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
