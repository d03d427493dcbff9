"""The whole result: measurements, findings and settings. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from ..base.toml_file import toml_value
from ..hardware import HARDWARE_VERSION, DriveHardware, Hardware, HostHardware
from ..plain_text import plain
from .finding import Finding
from .findings import findings_of
from .measurements import Measurements
from .settings import Setting, settings_of

__all__ = ["REPORT_VERSION", "Report", "config_text", "hardware_of", "report_of"]

REPORT_VERSION = 1
"""Version of the output of `tierstore doctor --json`. Within a version fields may be added; none changes or goes."""


class Report(Struct, frozen=True, kw_only=True):
    """The report as `tierstore doctor --json` prints it.

    Attributes:
        version: `REPORT_VERSION`.
        is_usable: whether offloading works here and is useful: no finding is a problem.
        findings: the worst first.
        settings: what to set, and why.
        measurements: what findings and settings were made from.
    """

    version: int
    is_usable: bool
    findings: tuple[Finding, ...]
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


def config_text(settings: tuple[Setting, ...]) -> str:
    """A file for `TierStore.from_config` and `tiered_offload.from_config`, each line with its reason."""
    titles: Mapping[str, str] = {
        "store": "TierStore.from_config(this file)",
        "offload": "tiered_offload.from_config(store, this file)",
    }
    lines = ["# Written by tierstore doctor: what it recommends for the machine that it measured."]
    for table, title in titles.items():
        lines += ["", f"[{table}]  # {title}"]
        if table == "store" and not {"path", "connect"} & {setting.name for setting in settings}:
            lines += ["", "# path: give one yourself; the directory that was measured is not fit for a store"]
        for setting in settings:
            if setting.table == table:
                lines += ["", f"# {plain(setting.reason)}", _line(setting)]
    return "\n".join(lines) + "\n"


def _line(setting: Setting) -> str:
    if setting.value is None:
        return f"# {setting.name}: left at its default"
    return f"{setting.name} = {toml_value(setting.value)}"
