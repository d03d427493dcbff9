"""A trace in Google's "Trace Event Format", which Perfetto and chrome://tracing show: complete events (X), counters
(C), names (M); times in microseconds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .steps import Step
from .timeline import TIERS, curves_of, lanes_of

_STEP_LANE = 0


def trace_events(steps: Sequence[Step], thread_names: Mapping[int, str], pid: int, origin_ns: int) -> dict[str, Any]:
    """Return what to write as JSON. `origin_ns`: the trace's time that becomes 0."""
    events: list[dict[str, Any]] = []

    def name(what: str, tid: int, text: str) -> None:
        events.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": text}})

    def add(kind: str, category: str, tid: int, began_ns: int, ended_ns: int, **about: str) -> None:
        times = {"ts": (began_ns - origin_ns) / 1e3, "dur": (ended_ns - began_ns) / 1e3}
        events.append({"ph": "X", "name": kind, "cat": category, "pid": pid, "tid": tid, **times, "args": about})

    name("process_name", _STEP_LANE, f"tierstore, process {pid}")
    name("thread_name", _STEP_LANE, "steps")
    lanes: dict[tuple[str, str], int] = {}
    seen: set[tuple[object, ...]] = set()  # boxes that last over the end of a step are in the next step too
    for step in steps:
        add(f"step {step.number}", "step", _STEP_LANE, step.began_ns, step.ended_ns)
        for lane in lanes_of(step, thread_names):
            tid = lanes.setdefault((lane.group, lane.name), len(lanes) + 1)
            for box in lane.boxes:
                if (identity := (tid, box.began_ns, box.kind)) not in seen:
                    seen.add(identity)
                    add(box.kind, lane.group, tid, box.began_ns, box.ended_ns, about=box.text)
        for field, points in curves_of(step).items():
            counter = {"ph": "C", "name": TIERS[field], "pid": pid}
            events += [
                counter | {"ts": (at_ns - origin_ns) / 1e3, "args": {"bytes": nbytes}} for at_ns, nbytes in points
            ]
    for (group, own), tid in lanes.items():
        name("thread_name", tid, f"{group} · {own}")
        events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
