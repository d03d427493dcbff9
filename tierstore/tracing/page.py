"""Steps as a page of HTML that needs no network and no other file. `page.html` draws the data put into it here.

Texts of a trace (names of threads, reasons of failures) get into the page escaped, or as JSON without "<".
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec

from ..base.config import format_bytes
from ..plain_text import plain
from .causes import CAUSES
from .events import StoreSettings
from .steps import Step
from .summary import Direction, StepSummary
from .timeline import COLOURS, ON_DARK, TIERS, Limit, Timeline, limits_of, timeline_of

__all__ = ["DrawnStep", "drawn_step", "page_of"]

_PHASES = ("forward", "backward")


class DrawnStep(NamedTuple):
    """What the page needs of a step."""

    timeline: Timeline
    summary: StepSummary
    limits: Sequence[Limit]


def drawn_step(step: Step, summary: StepSummary, store: StoreSettings, thread_names: dict[int, str]) -> DrawnStep:
    """Collect what the page needs of a step."""
    return DrawnStep(timeline_of(step, thread_names), summary, limits_of(step, store))


def page_of(drawn: Sequence[DrawnStep], num_steps: int, *, first: int, remark: str = "") -> str:
    """Return the page. Its times are milliseconds from each step's beginning.

    Args:
        drawn: the steps that a reader may choose from, in their order.
        num_steps: of the whole trace.
        first: number of the step that is shown first.
        remark: follows each title.
    """
    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    data = {
        "colours": {**COLOURS, **{field: colour for field, (_, colour) in TIERS.items()}},
        "on_dark": ON_DARK,
        "causes": CAUSES,
        "first": first,
        "steps": [_data(step) for step in drawn],
    }
    missing = num_steps - len(drawn)
    parts = {
        "TITLE": _shown(_title(first, num_steps, remark)),
        "SECTIONS": "".join(_section(step.summary, num_steps, first, remark) for step in drawn),
        "MISSING": f"{missing} more are not on this page; --step NUMBER draws one." if missing else "",
        "DATA": msgspec.json.encode(data).decode().replace("<", "\\u003c"),
    }
    for mark, text in parts.items():
        page = page.replace(f"<!--{mark}-->", text)
    return page


def _shown(text: str) -> str:
    return html.escape(plain(text))


def _title(number: int, num_steps: int, remark: str) -> str:
    return f"Step {number} of {num_steps}{remark}"


def _section(summary: StepSummary, num_steps: int, first: int, remark: str) -> str:
    """The words and figures of one step."""
    hidden = "" if summary.number == first else " hidden"
    lines = "".join(f"<p>{_shown(line)}</p>" for line in summary.headline)
    memory = "".join(
        f'<p class="{kind}">{_shown(words)}</p>'
        for kind, words in (("memory", summary.memory), ("verdict", summary.why_memory_stays))
        if words
    )
    share = f", {summary.waited_seconds / summary.seconds:.0%} of the step" if summary.seconds else ""
    waited = f"Threads waited {summary.waited_seconds:.3f} s in total{share}."
    total = f"The step took {summary.seconds:.3f} s. {waited}"
    title = _shown(_title(summary.number, num_steps, remark))
    return (
        f'<section data-step="{summary.number}"{hidden}><h1>{title}</h1>'
        f'<div class="headline">{lines}</div><p class="total">{total}</p>{memory}'
        f'<div class="tables">{_waits_table(summary)}{_moved_table(summary)}</div></section>'
    )


def _data(step: DrawnStep) -> dict[str, Any]:
    timeline, summary = step.timeline, step.summary

    def milliseconds(at_ns: int) -> float:
        return round((at_ns - timeline.began_ns) / 1e6, 4)

    return {
        "number": summary.number,
        "seconds": summary.seconds,
        "waited": summary.waited_seconds,
        "duration": milliseconds(timeline.ended_ns),
        "lanes": [
            {
                "group": lane.group,
                "name": plain(lane.name),
                "boxes": [
                    [milliseconds(b.began_ns), milliseconds(b.ended_ns), b.kind, plain(b.text)] for b in lane.boxes
                ],
            }
            for lane in timeline.lanes
        ],
        "curves": [
            {
                "field": curve.field,
                "name": curve.name,
                "points": [[milliseconds(at), n] for at, n in zip(curve.times_ns, curve.nbytes, strict=True)],
            }
            for curve in timeline.curves
        ],
        "limits": [{"field": limit.field, "name": limit.name, "nbytes": limit.nbytes} for limit in step.limits],
    }


def _waits_table(summary: StepSummary) -> str:
    backward = "-" if summary.backward_seconds is None else f"{summary.backward_seconds:.3f} s"
    rows: list[Sequence[str]] = [("duration", f"{summary.forward_seconds:.3f} s", backward)]
    for cause, meaning in CAUSES.items():
        cells = [_waited(summary.wait_seconds[phase][cause], summary.num_waits[phase][cause]) for phase in _PHASES]
        if any(summary.num_waits[phase][cause] for phase in _PHASES):
            rows.append((f'<i data-kind="{cause}"></i>{_shown(meaning)}', *cells))
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
