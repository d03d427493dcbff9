"""`tierstore doctor`: progress on standard error, the report on standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..base.config import check_directory, format_bytes
from ..base.interrupts import ended_by_signals
from ..base.json_text import json_text
from ..base.new_file import check_new_file, make_file
from ..base.system_words import words_of
from ..errors import ConfigError, StorageIOError
from ..plain_text import plain
from .examine import examine
from .findings import unfit_because
from .measurements import Measurements, Processor, fastest, rate
from .report import Report, Setting, config_text, report_of

_STYLES = {"problem": "bold red", "warning": "yellow", "note": "dim"}


def consult(
    path: str,
    socket: str | None,
    seconds: float,
    *,
    daemon_uid: int | None,
    as_json: bool,
    config: str | None,
    verbose: bool = False,
) -> bool:
    """Examine, print, write the file asked for. Returns whether offloading works here. Blocks a little over `seconds`.

    Raises:
        StorageIOError: the system refuses a call, or a thread.
        ConfigError: the directory cannot be used, or the file is there already or cannot be made. That may be noticed
            only when it is written, after the report.

    Main thread only: SIGTERM ends it as Ctrl-C does."""
    directory = _absolute(check_directory(path))
    if config is not None:
        check_new_file("--config", Path(config))
    messages = Console(stderr=True, highlight=False)
    with ended_by_signals(), messages.status(f"measuring for about {seconds:g} s ..."):
        try:
            machine = examine(directory, socket, seconds, daemon_uid)
        except OSError as error:
            raise StorageIOError("examine", path, words_of(error, str(path)), "nothing was changed") from error
    report = report_of(machine)
    if as_json:
        print(json_text(report))
    else:
        Console(highlight=False).print(report_view(report, verbose=verbose))
    sys.stdout.flush()
    if config is not None:
        make_file("--config", Path(config), config_text(report.settings))
        messages.print(plain(f"wrote {config}"), markup=False, soft_wrap=True)
    return report.is_usable


def _absolute(directory: Path) -> Path:
    text = os.path.abspath(directory)
    if not text.isascii() and text.encode("utf-8", "replace").decode("utf-8") != text:
        raise ConfigError("path", text, "the report and its files are UTF-8, which cannot encode this path")
    return Path(text)


# --- the report on a terminal -----------------------------------------------------------------------------------------


def report_view(report: Report, *, verbose: bool = False) -> RenderableType:
    """What `tierstore doctor` prints; with `verbose` also speeds by depth, and of codecs."""
    machine = report.measurements
    is_bad = "Offloading does not work well here. See the problems below."
    facts = Table("", "", title="The machine", title_justify="left", show_header=False)
    for name, text in _facts(machine):
        facts.add_row(_plain(name, "dim"), _plain(text))
    return Group(
        Text("Offloading works here." if report.is_usable else is_bad, "bold"),
        _settings(report.settings, unfit_because(machine.drive)),
        *_busy(machine.processor),
        _findings(report),
        facts,
        *(_speeds(machine) if verbose else ()),
    )


def _settings(settings: tuple[Setting, ...], unfit: str | None) -> Table:
    title = "Recommended settings; all others: the default"
    table = Table("setting", "value", "why", title=title, title_justify="left")
    if unfit is not None and not {"path", "connect"} & {each.name for each in settings}:
        table.add_row("path", "another", _plain(f"{unfit}, so this directory is not recommended"))
    for each in settings:
        table.add_row(each.name, _plain(each.value), _plain(each.reason))
    return table


def _busy(cores: Processor) -> Iterator[RenderableType]:
    """A line of its own: it is about now, where findings are about the machine."""
    if not cores.is_busy:
        return
    signs = [] if cores.load is None else [f"load {cores.load:.3g} on {cores.num_present} cores"]
    if cores.waiting_share is not None:
        signs.append(f"work waited for a core in {cores.waiting_share:.0%} of the last 10 seconds")
    advice = "Times measured now mean little: measure again when it is idle."
    yield Text(f"The machine is busy: {', and '.join(signs)}. {advice}\n", _STYLES["warning"])


def _findings(report: Report) -> RenderableType:
    if not report.findings:
        return Text("Other findings: none\n" if report.is_busy else "Findings: none\n")
    table = Table(title="Findings", title_justify="left", show_header=False, show_lines=True)
    for finding in report.findings:
        advice = "" if finding.advice is None else f"\n→ {finding.advice}"
        text = Text.assemble(_plain(finding.sentence), _plain(advice, "italic"))
        table.add_row(Text(finding.severity, _STYLES[finding.severity]), text)
    return table


def _facts(machine: Measurements) -> Iterator[tuple[str, str]]:
    drive, memory, cores = machine.drive, machine.memory, machine.processor
    yield "cores", f"{cores.usable_cores:g} of {cores.num_present} usable"
    limit = "" if memory.limit_bytes is None else f"; a control group limits it to {format_bytes(memory.limit_bytes)}"
    yield "memory", f"{format_bytes(memory.available_bytes)} available of {format_bytes(memory.total_bytes)}{limit}"
    yield "memory copies", f"{rate(memory.copy_bytes_per_second)} by one thread"
    mode, free = drive.io_mode or "not tried", format_bytes(drive.free_bytes)
    yield "drive", f"{drive.path}: {drive.file_system}, {mode}, {free} free"
    written, read = fastest(drive.writes), fastest(drive.reads)
    if written is not None and read is not None:
        yield "drive at best", f"writes {rate(written)}, reads {rate(read)}"
    if drive.write_latency_seconds is not None and drive.read_latency_seconds is not None:
        write, back = 1e6 * drive.write_latency_seconds, 1e6 * drive.read_latency_seconds
        yield "latency of 4 KiB", f"{write:.0f} µs to write, {back:.0f} µs to read"
    for link in machine.accelerators.links:
        down, up = rate(link.to_host_bytes_per_second), rate(link.to_device_bytes_per_second)
        yield link.name, f"{format_bytes(link.memory_bytes)}; {link.host_memory} copies: {down} to the host, {up} back"
    if machine.accelerators.note is not None:
        yield "accelerators", machine.accelerators.note


def _speeds(machine: Measurements) -> Iterator[Table]:
    title = "The drive, by transfers at once"
    drive = Table("at once", "write", "read", title=title, title_justify="left", min_width=len(title))
    for written, read in zip(machine.drive.writes, machine.drive.reads, strict=False):
        drive.add_row(str(written.depth), rate(written.bytes_per_second), rate(read.bytes_per_second))
    title = "Codecs on one core, on made-up sample data"
    codecs = Table("data", "codec", "ratio", "encode", "decode", title=title, title_justify="left")
    for each in machine.codecs:
        encode, decode = rate(each.encode_bytes_per_second), rate(each.decode_bytes_per_second)
        codecs.add_row(each.data, each.codec, f"{each.ratio:.3f}", encode, decode)
    yield from (drive, codecs)


def _plain(text: str, style: str = "") -> Text:
    """Text from outside can neither style nor control the terminal."""
    return Text(plain(text, kept="\n"), style)
