"""One step as a page of HTML that needs no network and no other file. `page.html` draws the data put into it here."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import msgspec

from ..base.config import format_bytes
from .causes import CAUSES
from .summary import Direction, StepSummary
from .timeline import COLOURS, TIERS, Timeline

__all__ = ["page_of"]

_PHASES = ("forward", "backward")


def page_of(timeline: Timeline, summary: StepSummary, num_steps: int, *, remark: str = "") -> str:
    """Return the page. Its times are milliseconds from the step's beginning; `remark` follows the title."""
    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    data = msgspec.json.encode(_data(timeline)).decode().replace("<", "\\u003c")
    title = html.escape(f"Step {summary.number} of {num_steps}{remark}")
    headline = "".join(f"<p>{html.escape(line)}</p>" for line in summary.headline)
    for mark, text in {"TITLE": title, "HEADLINE": headline, "TABLE": _table(summary), "DATA": data}.items():
        page = page.replace(f"<!--{mark}-->", text)
    return page


def _data(timeline: Timeline) -> dict[str, Any]:
    def milliseconds(at_ns: int) -> float:
        return round((at_ns - timeline.began_ns) / 1e6, 4)

    return {
        "duration": milliseconds(timeline.ended_ns),
        "colours": COLOURS,
        "causes": CAUSES,
        "lanes": [
            {
                "group": lane.group,
                "name": lane.name,
                "boxes": [[milliseconds(b.began_ns), milliseconds(b.ended_ns), b.kind, b.text] for b in lane.boxes],
            }
            for lane in timeline.lanes
        ],
        "curves": [
            {
                "field": curve.field,
                "name": curve.name,
                "colour": TIERS[curve.field][1],
                "points": [[milliseconds(at), n] for at, n in zip(curve.times_ns, curve.nbytes, strict=True)],
            }
            for curve in timeline.curves
        ],
    }


def _table(summary: StepSummary) -> str:
    return _waits_table(summary) + _moved_table(summary)


def _waits_table(summary: StepSummary) -> str:
    backward = "-" if summary.backward_seconds is None else f"{summary.backward_seconds:.3f} s"
    rows: list[Sequence[str]] = [("lasts", f"{summary.forward_seconds:.3f} s", backward)]
    for cause, meaning in CAUSES.items():
        cells = [_waited(summary.wait_seconds[phase][cause], summary.num_waits[phase][cause]) for phase in _PHASES]
        if any(summary.num_waits[phase][cause] for phase in _PHASES):
            rows.append((f'<i style="background:{COLOURS[cause]}"></i>{html.escape(meaning)}', *cells))
    return _table_of(("waits, by cause (times)", *_PHASES), rows)


def _waited(seconds: float, num_waits: int) -> str:
    return f"{seconds:.3f} s ({num_waits})" if num_waits else "-"


def _moved_table(summary: StepSummary) -> str:
    heads = ("disk", "bytes", "on disk", "speed", "busy", "in codecs", "CPU time", "records")
    return _table_of(heads, [_moved("written", summary.written), _moved("read", summary.read)])


def _moved(name: str, way: Direction) -> Sequence[str]:
    sizes = format_bytes(way.nbytes), format_bytes(way.stored_bytes), f"{format_bytes(way.bytes_per_second)}/s"
    times = (f"{seconds:.3f} s" for seconds in (way.busy_seconds, way.codec_seconds, way.cpu_seconds))
    return (name, *sizes, *times, str(way.num_records))


def _table_of(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
