"""The report on a machine: measurements, findings and recommended settings; and the files made from it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from ..base.config import format_bytes, parse_size
from ..base.toml_file import toml_value
from ..hardware import HARDWARE_VERSION, DriveHardware, Hardware, HostHardware
from ..plain_text import plain
from .findings import Finding, findings_of, is_shared, unfit_because
from .measurements import Measurements, fastest

REPORT_VERSION = 1
"""Version of the output of `tierstore doctor --json`. Within a version fields may be added; none changes or goes."""

MIB, GIB = 2**20, 2**30

_ROUND_BYTES = 64 * MIB
_USUAL_STAGING_BYTES, _LEAST_STAGING_BYTES = 112 * MIB, 16 * MIB
_STAGING_SHARE = 16
_USUAL_MIN_BYTES, _MOST_MIN_BYTES = MIB, 16 * MIB


class Setting(Struct, frozen=True, kw_only=True):
    """One argument of `TierStore`, `TierStore.connect` or `tiered_offload`, by its table in a configuration file."""

    table: Literal["store", "offload"]
    name: str
    value: str | int | None
    reason: str


class Report(Struct, frozen=True, kw_only=True):
    """The report as `tierstore doctor --json` prints it. `is_usable`: offloading works here and is useful: no finding
    is a problem. `findings`: the worst first."""

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


# --- recommended settings ---------------------------------------------------------------------------------------------


def settings_of(machine: Measurements) -> tuple[Setting, ...]:
    """The settings about which there is something to say. What stays at its default is left out."""
    store = [*_place(machine), _host_bytes(machine), *_staging_bytes(machine)]
    settings = [Setting(table="store", name=name, value=value, reason=why) for name, value, why in store]
    offload = [Setting(table="offload", name=name, value=value, reason=why) for name, value, why in _min_bytes(machine)]
    return (*settings, *offload)


def _place(machine: Measurements) -> Iterator[tuple[str, str, str]]:
    drive, daemon = machine.drive, machine.daemon
    if daemon.keeps_directory:
        yield "connect", daemon.socket, f"a daemon serves {drive.path}, and has settings of its own for the rest"
    elif unfit_because(drive) is None:
        yield "path", drive.path, "the directory that was measured"


def _host_bytes(machine: Measurements) -> tuple[str, str, str]:
    """A quarter of memory, as by default: training needs the rest for itself; half, if that is on accelerators."""
    available_bytes, trainers = machine.memory.available_bytes, machine.num_trainers
    if machine.accelerators.links:
        share, part, why = 2, "half", "the model itself is on the accelerator"
    else:
        share, part, why = 4, "a quarter", "training itself needs memory here"
    among = "" if trainers == 1 else f", for {trainers} trainers"
    value = _size(available_bytes // share // trainers)
    if parse_size(value, "host_bytes"):
        outcome = "a step that saves less than this keeps all of it in memory and stores nothing on the drive"
    else:
        outcome = f"that is less than {format_bytes(_ROUND_BYTES)}, so a step stores everything on the drive"
    return "host_bytes", value, f"{part} of the {format_bytes(available_bytes)} available{among}: {why}; {outcome}"


def _staging_bytes(machine: Measurements) -> Iterator[tuple[str, str, str]]:
    available_bytes = machine.memory.available_bytes // machine.num_trainers
    staging_bytes = max(_LEAST_STAGING_BYTES, available_bytes // _STAGING_SHARE)
    if not machine.daemon.keeps_directory and staging_bytes < _USUAL_STAGING_BYTES:
        reason = f"a sixteenth of the {format_bytes(available_bytes)} of memory for a trainer, not the usual 112 MiB"
        yield "staging_bytes", _size(staging_bytes, MIB), reason


def _min_bytes(machine: Measurements) -> Iterator[tuple[str, str, str]]:
    """The smallest tensor worth moving, where that is more than usual: below it, the drive's latency takes longer than
    moving the bytes. The latency of a busy machine says little."""
    drive = machine.drive
    speeds = [speed for speed in (fastest(drive.writes), fastest(drive.reads)) if speed is not None]
    answer_seconds = max(drive.write_latency_seconds or 0.0, drive.read_latency_seconds or 0.0)
    moved_bytes = int(answer_seconds * min(speeds, default=0.0))
    value = min(1 << moved_bytes.bit_length(), _MOST_MIN_BYTES)
    if value > _USUAL_MIN_BYTES and not is_shared(machine):
        reason = f"while the drive answers ({1e3 * answer_seconds:.2g} ms) it could move {format_bytes(moved_bytes)}"
        yield "min_bytes", _size(value, MIB), reason


def _size(num_bytes: int, round_bytes: int = _ROUND_BYTES) -> str:
    num_bytes = num_bytes // round_bytes * round_bytes
    return f"{num_bytes // GIB}GiB" if num_bytes and not num_bytes % GIB else f"{num_bytes // MIB}MiB"


def config_text(settings: tuple[Setting, ...]) -> str:
    """A file for `TierStore.from_config` and `tiered_offload.from_config`, each line with its reason."""
    titles = {"store": "TierStore.from_config(this file)", "offload": "tiered_offload.from_config(store, this file)"}
    lines = ["# Written by tierstore doctor: what it recommends for the machine that it measured."]
    for table, title in titles.items():
        lines += ["", f"[{table}]  # {title}"]
        if table == "store" and not {"path", "connect"} & {setting.name for setting in settings}:
            lines += ["", "# path: give one yourself; the directory that was measured is not fit for a store"]
        for each in settings:
            if each.table == table:
                lines += ["", f"# {plain(each.reason)}", f"{each.name} = {toml_value(each.value)}"]
    return "\n".join(lines) + "\n"
