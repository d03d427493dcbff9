"""A daemon's report as people read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..base.config import format_bytes
from ..daemon.report import DaemonReport, SessionState, Totals
from ..errors import ProtocolError
from ..plain_text import plain

_BAR_CELLS = 30
_NAME_CELLS = 32
_WHO = ("session", "client", "rank", "pid", "user", "state")
_HELD = ("session", "on disk", "quota", "records", "jobs", "queued", "spilled", "restored")


class Rates(NamedTuple):
    """Bytes moved per second, as the clients see it: by all sessions, and by each."""

    spilled_bytes: float
    restored_bytes: float
    of_sessions: Mapping[int, tuple[float, float]]


def decode_report(state: bytes, address: str) -> DaemonReport:
    """The report that a daemon sent. Raises ProtocolError: it is not what this version knows."""
    try:
        return msgspec.json.decode(state, type=DaemonReport)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"the daemon at {address}", f"a report of another version ({error})") from error


def rates_between(earlier: DaemonReport | None, later: DaemonReport) -> Rates | None:
    """Throughput from one report to the next; None: they are of two daemons, or of the same moment."""
    if earlier is None or earlier.pid != later.pid:
        return None
    seconds = later.uptime_seconds - earlier.uptime_seconds
    if seconds <= 0:
        return None
    before = {each.session: each.totals for each in earlier.sessions}
    return Rates(
        *_moved(earlier.totals, later.totals, seconds),
        {each.session: _moved(before.get(each.session, Totals()), each.totals, seconds) for each in later.sessions},
    )


def _moved(earlier: Totals, later: Totals, seconds: float) -> tuple[float, float]:
    return (
        (later.spilled_bytes - earlier.spilled_bytes) / seconds,
        (later.restored_bytes - earlier.restored_bytes) / seconds,
    )


def stat_view(report: DaemonReport) -> RenderableType:
    """What `tierstore stat` prints: the daemon, its figures, its sessions, and its codecs."""
    parts: list[RenderableType] = [_head(report), _figures(report, None), _sessions(report, None)]
    if report.codec_choices:
        parts.append(_codecs(report))
    return Group(*parts)


def top_view(report: DaemonReport, rates: Rates | None) -> RenderableType:
    """What `tierstore top` shows; `rates`: None: not known yet."""
    return Group(_head(report), _figures(report, rates), _sessions(report, rates))


def lost_view(complaint: str, last: DaemonReport | None) -> RenderableType:
    """No daemon: why, and what was known of it."""
    parts: list[RenderableType] = [_plain(complaint, "bold red"), Text("trying again; press Ctrl-C to end")]
    if last is not None:
        parts += [Text("\nwhat it held when it was last seen:", "dim"), _figures(last, None), _sessions(last, None)]
    return Group(*parts)


def _head(report: DaemonReport) -> Text:
    state = "ending" if report.is_ending else f"up {_duration(report.uptime_seconds)}"
    page = f", metrics on {report.metrics}" if report.metrics else ""
    return _plain(f"{report.program}, {state}: {report.path} on {report.socket}{page}", "bold")


def _figures(report: DaemonReport, rates: Rates | None) -> Table:
    disk, totals = report.disk, report.totals
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    slab_bytes = sum(each.slab_bytes for each in report.sessions)
    table.add_row("memory", f"{format_bytes(slab_bytes)} shared with clients")
    held = f"{format_bytes(disk.disk_bytes)} of {format_bytes(disk.budget_bytes)} in {disk.num_records} records"
    table.add_row("disk", Text.assemble(_bar(disk.disk_bytes, disk.budget_bytes), " ", held))
    table.add_row("", _plain(f"{format_bytes(disk.allocated_bytes)} taken from the file system; {disk.io_mode}"))
    if disk.write_allowance_bytes is not None:
        table.add_row("allowance", f"{format_bytes(disk.write_allowance_bytes)} may be written now")
    for name, way in (("reads", report.jobs.reads), ("writes", report.jobs.writes)):
        table.add_row(name, f"{way.running} running, {way.queued} queued")
    written = f"{format_bytes(totals.spilled_bytes)} as {format_bytes(totals.written_bytes)} on disk"
    table.add_row("spilled", _with_rate(written, rates and rates.spilled_bytes))
    table.add_row("restored", _with_rate(format_bytes(totals.restored_bytes), rates and rates.restored_bytes))
    for name, count in (
        ("no room", totals.full),
        ("damaged records", totals.corrupt_records),
        ("failed jobs", totals.io_errors),
        ("bugs, see the log", report.internal_errors),
    ):
        if count:
            table.add_row(name, Text(str(count), "bold red"))
    return table


def _sessions(report: DaemonReport, rates: Rates | None) -> RenderableType:
    """Two tables, which fit 80 columns: who they are, and what they hold."""
    if not report.sessions:
        return Text("\nno sessions")
    num_sessions = report.num_sessions
    title = f"{num_sessions} session{'' if num_sessions == 1 else 's'}"
    who = Table(title=title, title_justify="left")
    held = Table(padding=0)  # the figures of a large drive break over lines otherwise
    for table, names in ((who, _WHO), (held, _HELD)):
        for name in names:
            table.add_column(name, justify="left" if name in ("client", "state") else "right", overflow="fold")
    for each in report.sessions:
        who.add_row(*_about(each))
        held.add_row(*_held(each, rates))
    num_more = num_sessions - len(report.sessions)
    if num_more:
        who.caption = f"{num_more} more are not shown"
    return Group(who, held)


def _about(each: SessionState) -> tuple[str | Text, ...]:
    state = "connected" if each.lease_seconds is None else f"lost, {each.lease_seconds:.0f} s left"
    rank = "" if each.rank is None else str(each.rank)
    name = each.client if len(each.client) <= _NAME_CELLS else each.client[: _NAME_CELLS - 1] + "…"
    return str(each.session), _plain(name), rank, str(each.pid), str(each.uid), state


def _held(each: SessionState, rates: Rates | None) -> tuple[str, ...]:
    queued = format_bytes(each.queued_bytes)
    if each.queued_quota_bytes is not None:
        queued += f" of {format_bytes(each.queued_quota_bytes)}"
    if each.held_bytes:
        queued += f", {format_bytes(each.held_bytes)} wait"
    if rates is None:
        moved = map(format_bytes, (each.totals.spilled_bytes, each.totals.restored_bytes))
    else:
        moved = map(_rate, rates.of_sessions[each.session])
    held = format_bytes(each.disk_bytes), format_bytes(each.quota_bytes)
    return str(each.session), *held, str(each.num_records), str(each.num_jobs), queued, *moved


def _codecs(report: DaemonReport) -> Table:
    title = "records stored, by kind and codec"
    table = Table(title=title, title_justify="left", min_width=len(title))
    table.add_column("kind")
    table.add_column("records")
    for kind, counts in sorted(report.codec_choices.items()):
        table.add_row(_plain(kind), _plain(", ".join(f"{count} as {codec}" for codec, count in sorted(counts.items()))))
    return table


def _plain(text: str, style: str = "") -> Text:
    """Text that others had a hand in: it can neither style nor steer the terminal."""
    return Text(plain(text), style)


def _bar(part: int, whole: int) -> Text:
    cells = 0 if not whole else min(_BAR_CELLS, -(-part * _BAR_CELLS // whole))
    return Text.assemble(("█" * cells, "green"), ("░" * (_BAR_CELLS - cells), "dim"))


def _rate(bytes_per_second: float) -> str:
    return f"{format_bytes(bytes_per_second)}/s"


def _with_rate(text: str, bytes_per_second: float | None) -> str:
    return text if bytes_per_second is None else f"{_rate(bytes_per_second)}, {text} in all"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02}:{minutes:02}:{rest:02}" if days else f"{hours:02}:{minutes:02}:{rest:02}"
