"""The report on a machine: measurements, findings and recommended settings; and the file made from it."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from ..base.config import format_bytes
from ..base.defaults import windows_of
from ..base.toml_file import toml_value
from ..plain_text import plain
from .findings import Finding, findings_of, unfit_because
from .measurements import Measurements

REPORT_VERSION = 3
"""Version of the output of `tierstore doctor --json`. Within a version fields may be added; none changes or goes."""

MIB, GIB = 2**20, 2**30

_ROUND_BYTES, _ROUND_SMALL_BYTES = 64 * MIB, MIB  # to multiples of these, from 1 GiB on and below


class Setting(Struct, frozen=True):
    """One argument of `TierStore` or `TierStore.connect`."""

    name: str
    value: str
    reason: str


class Report(Struct, frozen=True, kw_only=True):
    """The report as `tierstore doctor --json` prints it. `is_usable`: offloading works here and is useful: no finding
    is a problem. `is_busy`: other work slowed the measurements down. `findings`: the worst first."""

    version: int
    is_usable: bool
    findings: tuple[Finding, ...]
    settings: tuple[Setting, ...]
    measurements: Measurements
    is_busy: bool = False


def report_of(machine: Measurements) -> Report:
    """Judge the measurements."""
    findings = findings_of(machine)
    return Report(
        version=REPORT_VERSION,
        is_usable=all(finding.severity != "problem" for finding in findings),
        findings=findings,
        settings=settings_of(machine),
        measurements=machine,
        is_busy=machine.processor.is_busy,
    )


# --- recommended settings ---------------------------------------------------------------------------------------------


def settings_of(machine: Measurements) -> tuple[Setting, ...]:
    """Where to store, and how much memory to give. All else stays at its default."""
    return *_place(machine), _host_bytes(machine)


def _place(machine: Measurements) -> Iterator[Setting]:
    drive, daemon = machine.drive, machine.daemon
    if daemon.keeps_directory:
        why = f"a daemon serves {drive.path}, and has settings of its own for the rest"
        yield Setting("connect", daemon.socket, why)
    elif unfit_because(drive) is None:
        yield Setting("path", drive.path, "the directory that was measured")


def _host_bytes(machine: Measurements) -> Setting:
    """As by default: training needs the rest for itself; half of memory, if it is on accelerators."""
    available_bytes, trainers = machine.memory.available_bytes, machine.num_trainers
    host_bytes, part, why = windows_of(available_bytes // trainers)[0], "a quarter", "training itself needs memory here"
    if machine.accelerators.links:
        host_bytes, part, why = available_bytes // 2 // trainers, "half", "the model itself is on the accelerator"
    elif host_bytes < available_bytes // trainers // 4:
        part = "a quarter, staging window included,"
    among = "" if trainers == 1 else f", for {trainers} trainers"
    host_bytes -= host_bytes % (_ROUND_BYTES if host_bytes >= GIB else _ROUND_SMALL_BYTES)
    value = f"{host_bytes // GIB}GiB" if host_bytes and not host_bytes % GIB else f"{host_bytes // MIB}MiB"
    if host_bytes:
        outcome = "a step that saves less than this keeps all of it in memory and stores nothing on the drive"
    else:
        outcome = f"that is less than {format_bytes(_ROUND_SMALL_BYTES)}, so a step stores everything on the drive"
    reason = f"{part} of the {format_bytes(available_bytes)} available{among}: {why}; {outcome}"
    return Setting("host_bytes", value, reason)


def config_text(settings: tuple[Setting, ...]) -> str:
    """A file for `TierStore.from_config` and `tiered_offload.from_config`, each line with its reason."""
    lines = [
        "# Written by tierstore doctor: what it recommends for the machine that it measured.",
        "",
        "[store]  # TierStore.from_config(this file)",
    ]
    if not {"path", "connect"} & {setting.name for setting in settings}:
        lines += ["", "# path: give one yourself; the directory that was measured is not fit for a store"]
    for each in settings:
        lines += ["", f"# {plain(each.reason)}", f"{each.name} = {toml_value(each.value)}"]
    lines += ["", "[offload]  # tiered_offload.from_config(store, this file)"]
    return "\n".join(lines) + "\n"
