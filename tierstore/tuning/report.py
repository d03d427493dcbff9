"""The whole report on a machine: measurements, findings and settings. Pure."""

from __future__ import annotations

from msgspec import Struct

from ..hardware import HARDWARE_VERSION, DriveHardware, Hardware, HostHardware
from .findings import Finding, findings_of
from .measurements import Measurements
from .recommended import Setting, settings_of

__all__ = ["REPORT_VERSION", "Report", "hardware_of", "report_of"]

REPORT_VERSION = 1
"""Version of the output of `tierstore doctor --json`. Within a version fields may be added; none changes or goes."""


class Report(Struct, frozen=True, kw_only=True):
    """The report as `tierstore doctor --json` prints it."""

    version: int
    is_usable: bool
    """Whether offloading works here and is useful: no finding is a problem."""
    findings: tuple[Finding, ...]
    """The worst first."""
    settings: tuple[Setting, ...]
    measurements: Measurements


def report_of(machine: Measurements) -> Report:
    """Judge the measurements."""
    findings = findings_of(machine)
    return Report(
        version=REPORT_VERSION,
        is_usable=all(finding.severity != "problem" for finding in findings),
        findings=findings,
        settings=settings_of(machine),
        measurements=machine,
    )


def hardware_of(machine: Measurements) -> Hardware | None:
    """The description of the machine; None: too little of the drive could be measured."""
    drive, memory = machine.drive, machine.memory
    if drive.write_latency_seconds is None or drive.read_latency_seconds is None or not (drive.writes and drive.reads):
        return None
    return Hardware(
        version=HARDWARE_VERSION,
        host=HostHardware(
            cores=machine.processor.usable_cores,
            capacity_bytes=memory.available_bytes,
            copy_bytes_per_second=memory.copy_bytes_per_second,
            fresh_bytes_per_second=memory.fresh_bytes_per_second,
        ),
        drive=DriveHardware(
            io_mode=drive.io_mode or "",
            capacity_bytes=drive.free_bytes,
            write_latency_seconds=drive.write_latency_seconds,
            read_latency_seconds=drive.read_latency_seconds,
            writes=drive.writes,
            reads=drive.reads,
        ),
        codecs=machine.codecs,
        accelerators=machine.accelerators.links,
    )
