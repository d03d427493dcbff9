"""Simulated steps in the form of a recorded trace, so that the same tools can show them. Pure."""

from __future__ import annotations

from ..simulator import Settings, Workload, simulate
from ..tracing import events
from ..tracing.reader import RecordedTrace
from .machines import Machine
from .prediction import situation

__all__ = ["simulated_trace"]


def simulated_trace(workload: Workload, machine: Machine, settings: Settings, *, num_ranks: int = 1) -> RecordedTrace:
    """The trace that the first rank would record while `predict` simulates. Its last step is the predicted one.

    Arguments and errors as those of `predict`.

    Raises:
        StoreFullError: the workload does not fit on the machine's drive.
    """
    hardware, settings = situation(workload, machine, settings, num_ranks)
    seen: list[events.Event] = []
    simulate(workload, hardware, settings, num_ranks=num_ranks, events=seen)
    host = machine.hardware.host
    store = events.StoreSettings(
        place=machine.name,
        is_connected=False,
        host_bytes=settings.host_bytes,
        staging_bytes=settings.staging_bytes,
        disk_bytes=settings.disk_bytes or 0,
        codec=settings.codec,
        inline_bytes=0,
        checksum=True,
        num_spill_lanes=settings.num_spill_lanes,
        num_restore_lanes=settings.num_restore_lanes,
        io_mode="simulated",
    )
    simulated_on = events.Machine(machine.title, round(host.cores), host.capacity_bytes, {})
    header = events.Header(events.FORMAT, events.VERSION, 0, 0.0, 0, store, simulated_on)
    return RecordedTrace(header, seen, is_complete=True)
