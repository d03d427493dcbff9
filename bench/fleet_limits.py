"""How long each resource of a host is busy in a step, and how fast its drives wear. Arithmetic beside the simulator.

A resource that is busy for longer than a step computes makes the step longer, however well transfers overlap. The
simulator shares drives, links, cores and memory among transfers, so its step is longer than the busiest of them.
The interpreter's lock, and a daemon, are only here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tierstore.tuning.machines import Machine
from tierstore.tuning.plan import Prediction

__all__ = ["DRIVE_PRICE", "NUM_HOSTS", "Busy", "CpuCosts", "Wear", "busy_seconds", "cpu_costs", "wear_of"]

NUM_HOSTS = 64
DRIVE_PRICE = 2100.0
"""US dollars for 6.4 TB; assumed: a buyer's guide (Oscoo) names 9,000 to 11,000 for 30 TB in the first quarter of 2026,
and a drive with three writes a day costs no less for each TB."""

_SIDECAR_BYTES = 16 * 2**20
_DAY_SECONDS, _YEAR_DAYS = 86400.0, 365.0


class CpuCosts(NamedTuple):
    """CPU seconds of the store, as measured on two cores of an AMD EPYC, without an accelerator.

    Attributes:
        record: of a record on its way down and up, beyond its bytes. Not all of it is under the interpreter's lock, so
            as time under the lock it is an upper bound.
        byte: of a byte, down and up: checksums, system calls.
        daemon_record: of the daemon alone, as `record`; likewise an upper bound.
        daemon_byte: of a byte through a daemon, down and up, in the daemon and in its client; records of 16 MiB.
    """

    record: float
    byte: float
    daemon_record: float
    daemon_byte: float


def cpu_costs(results: Path) -> CpuCosts:
    """From `record_cost.jsonl` and `sidecar_throughput.jsonl` in that folder. Two sizes of records give both parts."""
    records, sidecar = (_figures(results / f"{name}.jsonl") for name in ("record_cost", "sidecar_throughput"))
    short, long = (
        (figures["put_cpu_microseconds"] + figures["get_cpu_microseconds"]) / 1e6
        for figures in (records["1,024 of 256 KiB"], records["128 of 4 MiB"])
    )
    byte = (long - short) / (2**22 - 2**18)
    through = sidecar["one client"]
    daemon, client = (
        (through[f"{who}_spill_cpu_seconds_per_gb"] + through[f"{who}_restore_cpu_seconds_per_gb"]) / 1e9
        for who in ("daemon", "sidecar")
    )
    return CpuCosts(short - 2**18 * byte, byte, (daemon - byte) * _SIDECAR_BYTES, daemon + client)


def _figures(file: Path) -> Mapping[str, Mapping[str, float]]:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {line["variant"]: line["figures"] for line in lines}


class Busy(NamedTuple):
    """Seconds in a step for which a resource is busy, at the least.

    Attributes:
        drives: writes and reads, one after the other.
        link: of one rank, out and back, one after the other.
        memory: of the host. A byte passes it once for each copy from or to an accelerator, and on its way to the drive
            and back twice more each way: for the checksum, and for the drive.
        cores: all of the host's, for the store's work.
        interpreter: of one rank, as if every saved tensor went to the drive.
        daemon_memory, daemon_cores: with one daemon in the host. Each byte is copied once more each way: two passes.
        daemon_interpreter: of the daemon, for all ranks.
    """

    drives: float
    link: float
    memory: float
    cores: float
    interpreter: float
    daemon_memory: float
    daemon_cores: float
    daemon_interpreter: float


def busy_seconds(
    predicted: Prediction, machine: Machine, num_drives: int, num_ranks: int, num_records: int, costs: CpuCosts
) -> Busy:
    """Of a host.

    Args:
        predicted: the step of one rank.
        machine: the whole host; of its drives, `num_drives` are there.
        num_ranks: of the host.
        num_records: that one rank saves.
        costs: CPU time of the store.

    Raises:
        ValueError: the machine has no accelerator, or its memory bandwidth is not known.
    """
    host, drive = machine.hardware.host, machine.hardware.drive
    if not machine.hardware.accelerators or host.memory_bytes_per_second is None:
        raise ValueError(f"{machine.name}: its accelerators and the bandwidth of its memory have to be known")
    link = machine.hardware.accelerators[0]
    write, read = (max(each.bytes_per_second for each in way) * num_drives for way in (drive.writes, drive.reads))
    on_drive = num_ranks * (predicted.written_bytes + predicted.read_bytes)
    on_links = num_ranks * (predicted.offloaded_bytes + predicted.reloaded_bytes)
    records = num_ranks * num_records
    return Busy(
        drives=num_ranks * (predicted.written_bytes / write + predicted.read_bytes / read),
        link=predicted.offloaded_bytes / link.to_host_bytes_per_second
        + predicted.reloaded_bytes / link.to_device_bytes_per_second,
        memory=(on_links + 2 * on_drive) / host.memory_bytes_per_second,
        cores=(on_drive / 2 * costs.byte + records * costs.record) / host.cores,
        interpreter=num_records * costs.record,
        daemon_memory=(on_links + 4 * on_drive) / host.memory_bytes_per_second,
        daemon_cores=on_drive / 2 * costs.daemon_byte / host.cores,
        daemon_interpreter=records * costs.daemon_record,
    )


class Wear(NamedTuple):
    """What training day and night does to the drives.

    Attributes:
        writes_per_day: how often the capacity of a drive is written in a day.
        days: until a drive has been written what it is rated for.
        drives_per_year: that the fleet wears out.
        dollars_per_year: what these cost.
    """

    writes_per_day: float
    days: float
    drives_per_year: float
    dollars_per_year: float


def wear_of(
    predicted: Prediction, machine: Machine, num_drives: int, num_ranks: int, num_hosts: int = NUM_HOSTS
) -> Wear | None:
    """Of such steps without a pause; None where no rating is known, or nothing is written. Arguments as above."""
    drive = machine.hardware.drive
    per_day = _DAY_SECONDS * num_ranks * predicted.written_bytes / num_drives / predicted.seconds
    if drive.rated_written_bytes is None or not per_day:
        return None
    days = drive.rated_written_bytes / per_day
    per_year = num_hosts * num_drives * _YEAR_DAYS / days
    return Wear(per_day / drive.capacity_bytes, days, per_year, per_year * DRIVE_PRICE)
