"""Plans steps of a host with some number of drives: simulates one rank on its share of the host, and adds it all up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from tierstore.hardware import DriveHardware, Transfer
from tierstore.simulator import Settings
from tierstore.tuning.machines import Machine
from tierstore.tuning.plan import Misfit, Prediction, predict

from .fleet_limits import Busy, CpuCosts, Wear, busy_seconds, wear_of
from .fleet_step import KEPT, MODEL, NUM_RANKS, Model, step_of_rank

__all__ = ["DEVICE_BYTES", "DRIVES", "HOST_BYTES", "Row", "plan", "share_of_host"]

DRIVES = range(1, 9)
DEVICE_BYTES, HOST_BYTES = 64 * 10**9, 150 * 10**9
"""Of each rank, for saved tensors; assumed. Of 141 GB on an H200, weights and gradients in bfloat16 take 35 GB (70.6e9
parameters, 4 bytes, over 8 ranks), the optimizer 2 GB (12 bytes, over 512), and what is left is for the logits, for
what a block computes with, and for copies. Of 2 TB in the host, 1.2 TB are for saved tensors."""


def share_of_host(machine: Machine, num_drives: int, num_ranks: int = NUM_RANKS) -> Machine:
    """What one of `num_ranks` equal ranks has of a machine with so many drives.

    The ranks together keep more transfers at the drives than they need to be fast, so the share is fast at any depth.
    """
    host, drive = machine.hardware.host, machine.hardware.drive
    share = num_drives / num_ranks
    rated_bytes = drive.rated_written_bytes

    def at_best(transfers: Sequence[Transfer]) -> tuple[Transfer, ...]:
        best = max(transfers, key=lambda each: each.bytes_per_second)
        return (structs.replace(best, depth=1, bytes_per_second=best.bytes_per_second * share),)

    drives: DriveHardware = structs.replace(
        drive,
        num_drives=1,
        capacity_bytes=int(drive.capacity_bytes * share),
        writes=at_best(drive.writes),
        reads=at_best(drive.reads),
        rated_written_bytes=None if rated_bytes is None else int(rated_bytes * share),
    )
    memory = host.memory_bytes_per_second
    own = structs.replace(
        host,
        cores=host.cores / num_ranks,
        capacity_bytes=host.capacity_bytes // num_ranks,
        price_per_hour=None,
        memory_bytes_per_second=None if memory is None else memory / num_ranks,
    )
    return replace(machine, hardware=structs.replace(machine.hardware, host=own, drive=drives))


@dataclass(frozen=True)
class Row:
    """A step of a host with so many drives.

    Attributes:
        num_drives: in the host.
        prediction: of one rank on its share; None: it does not fit.
        misfit: what does not fit; None: it fits.
        busy: how long each resource of the host is busy in the step.
        wear: of the drives; None if nothing is known or nothing is written.
    """

    num_drives: int
    prediction: Prediction | None
    misfit: Misfit | None
    busy: Busy | None
    wear: Wear | None


def plan(
    machine: Machine, kept: str, costs: CpuCosts, model: Model = MODEL, drives: Sequence[int] = DRIVES
) -> list[Row]:
    """A row for each number of drives. Takes some seconds of CPU time for each with a deep model."""
    workload = step_of_rank(model, KEPT[kept])
    depth = model.layers / MODEL.layers  # a shallower model has budgets in proportion
    settings = Settings(int(HOST_BYTES * depth), device_bytes=int(DEVICE_BYTES * depth), staging_grows=True)
    rows = []
    for number in drives:
        found = predict(workload, share_of_host(machine, number), settings)
        if isinstance(found, Misfit):
            rows.append(Row(number, None, found, None, None))
            continue
        busy = busy_seconds(found, machine, number, NUM_RANKS, len(workload.saved), costs)
        wear = wear_of(found, machine, number, NUM_RANKS)
        rows.append(Row(number, found, None, busy, wear))
    return rows
