"""A trace as Chrome's trace events, which Perfetto and chrome://tracing show. Pure.

The format is Google's "Trace Event Format": complete events (X), counters (C), names (M); times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .steps import Step
from .timeline import Lane, timeline_of

__all__ = ["trace_events"]

_STEP_LANE = 0


def trace_events(steps: Sequence[Step], thread_names: Mapping[int, str], pid: int, origin_ns: int) -> dict[str, Any]:
    """Return what to write as JSON. `origin_ns`: the trace's time that becomes 0."""
    events: list[dict[str, Any]] = [_name("process_name", pid, 0, f"tierstore, process {pid}")]
    lanes: dict[tuple[str, str], int] = {}
    events.append(_name("thread_name", pid, _STEP_LANE, "steps"))
    seen: set[tuple[Any, ...]] = set()  # events that last over the end of a step are in the next step too
    for step in steps:
        events.append(
            _slice(f"step {step.number}", "step", pid, _STEP_LANE, step.began_ns, step.ended_ns, origin_ns, {})
        )
        timeline = timeline_of(step, thread_names)
        for lane in timeline.lanes:
            tid = lanes.setdefault((lane.group, lane.name), len(lanes) + 1)
            events += [event for event in _boxes(lane, pid, tid, origin_ns) if _is_new(event, seen)]
        for curve in timeline.curves:
            events += [
                {"ph": "C", "name": curve.name, "pid": pid, "ts": (at_ns - origin_ns) / 1e3, "args": {"bytes": nbytes}}
                for at_ns, nbytes in zip(curve.times_ns, curve.nbytes, strict=True)
            ]
    for (group, name), tid in lanes.items():
        events.append(_name("thread_name", pid, tid, f"{group} · {name}"))
        events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _boxes(lane: Lane, pid: int, tid: int, origin_ns: int) -> Iterator[dict[str, Any]]:
    for box in lane.boxes:
        yield _slice(box.kind, lane.group, pid, tid, box.began_ns, box.ended_ns, origin_ns, {"about": box.text})


def _is_new(event: Mapping[str, Any], seen: set[tuple[Any, ...]]) -> bool:
    identity = event["tid"], event["ts"], event["name"]
    is_new = identity not in seen
    seen.add(identity)
    return is_new


def _slice(
    name: str, category: str, pid: int, tid: int, began_ns: int, ended_ns: int, origin_ns: int, args: Mapping[str, str]
) -> dict[str, Any]:
    ts, duration = (began_ns - origin_ns) / 1e3, (ended_ns - began_ns) / 1e3
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": ts, "dur": duration, "args": args}


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
