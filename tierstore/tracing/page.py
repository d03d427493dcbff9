"""Steps as a page of HTML that needs no network and no other file. `page.html` draws the data put into it here.

Texts of a trace (names of threads, reasons of failures) get into the page escaped, or as JSON without "<".
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import msgspec

from ..base.config import format_bytes
from ..plain_text import plain
from .causes import CAUSES
from .events import Header
from .steps import Step
from .summary import Direction, StepSummary, summarize
from .timeline import TIERS, limits_of, timeline_of

_PHASES = ("forward", "backward")


def page_of(steps: Sequence[Step], header: Header, names: Mapping[int, str], num_steps: int, *, first: int) -> str:
    """Return the page. Its times are milliseconds from each step's beginning. `steps`: those that a reader may choose
    from, of `num_steps` in the trace; number `first` is shown first. `names`: of threads."""
    summaries = [summarize(step, header) for step in steps]
    drawn = [_data(step, summary, header, names) for step, summary in zip(steps, summaries, strict=True)]
    data = {"causes": CAUSES, "first": first, "steps": drawn}
    missing = num_steps - len(steps)
    page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    for mark, text in {
        "TITLE": f"Step {first} of {num_steps}",
        "SECTIONS": "".join(_section(summary, num_steps, first) for summary in summaries),
        "MISSING": f"{missing} more are not on this page; --step NUMBER draws one." if missing else "",
        "DATA": msgspec.json.encode(data).decode().replace("<", "\\u003c"),
    }.items():
        page = page.replace(f"<!--{mark}-->", text)
    return page


def _shown(text: str) -> str:
    return html.escape(plain(text))


def _section(summary: StepSummary, num_steps: int, first: int) -> str:
    hidden = "" if summary.number == first else " hidden"
    lines = "".join(f"<p>{_shown(line)}</p>" for line in summary.headline)
    memory = "".join(
        f'<p class="{kind}">{_shown(words)}</p>'
        for kind, words in (("memory", summary.memory), ("verdict", summary.why_memory_stays))
        if words
    )
    share = f", {summary.waited_seconds / summary.seconds:.0%} of the step" if summary.seconds else ""
    total = f"The step took {summary.seconds:.3f} s. Threads waited {summary.waited_seconds:.3f} s in total{share}."
    heads = ("disk", "bytes", "on disk", "speed", "busy", "in codecs", "CPU time", "records")
    moved = _table_of(heads, [_moved("written", summary.written), _moved("read", summary.read)])
    return (
        f'<section data-step="{summary.number}"{hidden}><h1>Step {summary.number} of {num_steps}</h1>'
        f'<div class="headline">{lines}</div><p class="total">{total}</p>{memory}'
        f'<div class="tables">{_waits_table(summary)}{moved}</div></section>'
    )


def _data(step: Step, summary: StepSummary, header: Header, names: Mapping[int, str]) -> dict[str, Any]:
    timeline = timeline_of(step, names)

    def ms(at_ns: int) -> float:
        return round((at_ns - timeline.began_ns) / 1e6, 4)

    return {
        "number": summary.number,
        "seconds": summary.seconds,
        "waited": summary.waited_seconds,
        "duration": ms(timeline.ended_ns),
        "lanes": [
            {
                "group": lane.group,
                "name": plain(lane.name),
                "boxes": [[ms(box.began_ns), ms(box.ended_ns), box.kind, plain(box.text)] for box in lane.boxes],
            }
            for lane in timeline.lanes
        ],
        "curves": [
            {
                "field": curve.field,
                "name": TIERS[curve.field],
                "points": [[ms(at), nbytes] for at, nbytes in zip(curve.times_ns, curve.nbytes, strict=True)],
            }
            for curve in timeline.curves
        ],
        "limits": [limit._asdict() for limit in limits_of(step, header.store)],
    }


def _waits_table(summary: StepSummary) -> str:
    backward = "-" if summary.backward_seconds is None else f"{summary.backward_seconds:.3f} s"
    rows: list[Sequence[str]] = [("duration", f"{summary.forward_seconds:.3f} s", backward)]
    for cause, meaning in CAUSES.items():
        waits = [(summary.wait_seconds[phase][cause], summary.num_waits[phase][cause]) for phase in _PHASES]
        if any(number for _, number in waits):
            cells = (f"{seconds:.3f} s ({number})" if number else "-" for seconds, number in waits)
            rows.append((f'<i data-kind="{cause}"></i>{_shown(meaning)}', *cells))
    return _table_of(("waits, by cause (times)", *_PHASES), rows)


def _moved(name: str, way: Direction) -> Sequence[str]:
    sizes = format_bytes(way.nbytes), format_bytes(way.stored_bytes), f"{format_bytes(way.bytes_per_second)}/s"
    times = (f"{seconds:.3f} s" for seconds in (way.busy_seconds, way.codec_seconds, way.cpu_seconds))
    return (name, *sizes, *times, str(way.num_records))


def _table_of(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
