"""The report on a machine for a terminal: verdict and settings first, then findings and figures."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..base.config import format_bytes
from ..hardware import Transfer
from ..plain_text import plain
from .findings import Finding, unfit_because
from .measurements import Measurements, fastest
from .recommended import Setting
from .report import Report
from .words import rate

__all__ = ["report_view"]

_STYLES = {"problem": "bold red", "warning": "yellow", "note": "dim"}
_VERDICTS = {True: "Offloading works here.", False: "Offloading does not work well here. See the problems below."}


def report_view(report: Report, *, verbose: bool = False) -> RenderableType:
    """What `tierstore doctor` prints; with `verbose` also speeds by block size, and of codecs."""
    machine = report.measurements
    return Group(
        Text(_VERDICTS[report.is_usable], "bold"),
        _settings(report.settings, unfit_because(machine.drive)),
        _findings(report.findings),
        _machine(machine),
        *((*_drive(machine), *_codecs(machine)) if verbose else ()),
    )


def _settings(settings: tuple[Setting, ...], unfit: str | None) -> Table:
    table = Table(title="Recommended settings; all others: the default", title_justify="left")
    for name in ("setting", "value", "why"):
        table.add_column(name)
    if unfit is not None and not {"path", "connect"} & {each.name for each in settings}:
        table.add_row("path", "another", _plain(f"{unfit}, so this directory is not recommended"))
    for each in settings:
        table.add_row(each.name, _plain(str(each.value)), _plain(each.reason))
    return table


def _findings(findings: tuple[Finding, ...]) -> Table:
    table = Table(title="Findings", title_justify="left", show_header=False, show_lines=True)
    for finding in findings:
        advice = "" if finding.advice is None else f"\n→ {finding.advice}"
        text = Text.assemble(_plain(finding.sentence), _plain(advice, "italic"))
        table.add_row(Text(finding.severity, _STYLES[finding.severity]), text)
    if not findings:
        table.add_row("", "nothing")
    return table


def _machine(machine: Measurements) -> Table:
    table = Table(title="The machine", title_justify="left", show_header=False)
    table.add_column(style="dim")
    for name, text in _facts(machine):
        table.add_row(name, _plain(text))
    return table


def _facts(machine: Measurements) -> Iterator[tuple[str, str]]:
    drive, memory, pages, cores = machine.drive, machine.memory, machine.huge_pages, machine.processor
    yield "cores", f"{cores.usable_cores:g} of {cores.num_present} usable, {cores.model or 'of an unknown model'}"
    yield "memory", f"{format_bytes(memory.available_bytes)} available of {format_bytes(memory.total_bytes)}"
    alone, together = rate(memory.copy_bytes_per_second), rate(memory.copy_all_bytes_per_second)
    fresh = rate(memory.fresh_bytes_per_second)
    yield "memory copies", f"{alone} by one thread, {together} by all; {fresh} into fresh pages"
    kept = memory.allocator_left_alone
    words = "a store returns freed memory when it is short" if kept is None else f"a store leaves it alone: {kept}"
    yield "allocator", f"{memory.allocator}; {words}"
    share = pages.granted_share
    granted = "not known" if share is None else f"{share:.0%} of a buffer that asked for them"
    yield "huge pages", f"{granted}; a client's window gets {'some' if pages.collapses else 'none'}"
    mode, free = drive.io_mode or "not tried", format_bytes(drive.free_bytes)
    yield "drive", f"{drive.path}: {drive.file_system}, {mode}, {free} free"
    if drive.device is not None:
        size = "" if drive.size_bytes is None else f", {format_bytes(drive.size_bytes)}"
        yield "device", f"{drive.device}{size}, {drive.model or 'without a model name'}"
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
    yield "measured in", f"{machine.seconds:.0f} s"


def _drive(machine: Measurements) -> Iterator[Table]:
    if not machine.drive.writes and not machine.drive.reads:
        return
    title = "The drive, by block size and transfers at once"
    table = Table(title=title, title_justify="left", min_width=len(title))
    for name in ("block", "at once", "write", "read"):
        table.add_column(name, justify="right")
    written, read = _by_combination(machine.drive.writes), _by_combination(machine.drive.reads)
    for block_bytes, depth in sorted(written | read):
        speeds = (each.get((block_bytes, depth), "-") for each in (written, read))
        table.add_row(format_bytes(block_bytes), str(depth), *speeds)
    yield table


def _by_combination(transfers: tuple[Transfer, ...]) -> dict[tuple[int, int], str]:
    return {(each.block_bytes, each.depth): rate(each.bytes_per_second) for each in transfers}


def _codecs(machine: Measurements) -> Iterator[Table]:
    if not machine.codecs:
        return
    table = Table(title="Codecs on one core, on made-up sample data", title_justify="left")
    for name in ("data", "codec", "ratio", "encode", "decode"):
        table.add_column(name, justify="left" if name in ("data", "codec") else "right")
    for each in machine.codecs:
        speeds = rate(each.encode_bytes_per_second), rate(each.decode_bytes_per_second)
        table.add_row(each.data, each.codec, f"{each.ratio:.3f}", *speeds)
    yield table


def _plain(text: str, style: str = "") -> Text:
    """Text from outside (paths, names of drives and drivers) that can neither style nor control the terminal."""
    return Text(plain(text, kept="\n"), style)
