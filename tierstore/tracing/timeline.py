"""A step as lanes of boxes and curves, of which pages and Perfetto's files are made. Pure. A transfer's box is cut into
one part for the codec and one for the drive: the lengths of the parts are true, their order is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..base.config import format_bytes
from .causes import CAUSES, codec_ns, explain
from .events import Restore, Spill
from .steps import Step

TIERS: Mapping[str, str] = {
    "device_bytes": "device",
    "host_bytes": "host: within the budget",
    "staging_bytes": "host: staging, on the way",
    "lent_bytes": "host: lent",
    "uncharged_bytes": "host: where autograd left it",
    "disk_bytes": "disk",
}
"""The name of each field of `Levels`. What has a budget lies at the bottom, so that it can be compared."""


class Box(NamedTuple):
    """Something that lasts, or happens. `kind`: a cause of a wait, or what a lane does."""

    began_ns: int
    ended_ns: int
    kind: str
    text: str


class Lane(NamedTuple):
    """Boxes that do not overlap, except that waits lie over a phase."""

    group: str
    name: str
    boxes: Sequence[Box]


def lanes_of(step: Step, thread_names: Mapping[int, str]) -> list[Lane]:
    """Lanes: threads, copies, codec, drive. What is empty is left out. Times are as in the trace."""
    return [*_threads(step, thread_names), *_copies(step), *_transfers(step)]


def curves_of(step: Step) -> dict[str, list[tuple[int, int]]]:
    """How many bytes each tier holds from each time on, as (time, bytes), by its key in `TIERS`; not of empty tiers."""
    curves = {field: [(level.at_ns, getattr(level, field)) for level in step.levels] for field in TIERS}
    return {field: points for field, points in curves.items() if any(nbytes for _, nbytes in points)}


def _threads(step: Step, names: Mapping[int, str]) -> Iterator[Lane]:
    waits = explain(step)
    unpacks = [unpack.thread for unpack in step.unpacks]
    for thread in dict.fromkeys([step.thread, *unpacks, *(each.wait.thread for each in waits)]):
        boxes = []
        if thread == step.thread:
            ended_ns = max(step.began_ns, step.forward_ended_ns)
            boxes.append(Box(step.began_ns, ended_ns, "forward", f"forward: {len(step.packs)} tensors packed"))
        if thread in unpacks and step.backward_began_ns is not None:
            asked = f"backward: {len(step.unpacks)} asked for"
            boxes.append(Box(step.backward_began_ns, step.ended_ns, "backward", asked))
        for each in waits:
            if each.wait.thread == thread:
                whom = "an unpack waits" if each.is_backward else "a pack waits"
                whose = "" if each.wait.record is None else f" for record {each.wait.record}"
                text = f"{whom}{whose}: {CAUSES[each.cause]}"
                boxes.append(Box(each.wait.began_ns, each.wait.end_ns, each.cause, text))
        yield Lane("compute", names.get(thread, f"thread {thread}"), boxes)


def _copies(step: Step) -> Iterator[Lane]:
    for name, copies in (("to host", step.offloads), ("to device", step.reloads)):
        boxes = [
            Box(copy.at_ns, copy.at_ns, "copy", f"record {copy.record}, {format_bytes(copy.nbytes)}, queued")
            for copy in copies
        ]
        if boxes:
            yield Lane("copies", name, boxes)


def _transfers(step: Step) -> Iterator[Lane]:
    for kind, jobs in (("encode", step.spills), ("decode", step.restores)):
        yield from _lanes("codec", kind, [job for job in jobs if codec_ns(job, step.codecs)], step)
    yield from _lanes("drive: writes", "write", step.spills, step)
    yield from _lanes("drive: reads", "read", step.restores, step)


def _lanes(group: str, kind: str, jobs: Sequence[Spill | Restore], step: Step) -> Iterator[Lane]:
    boxes_of: dict[int, list[Box]] = {}
    for job in jobs:
        in_codec_ns = codec_ns(job, step.codecs)
        turn_ns = job.began_ns + in_codec_ns if isinstance(job, Spill) else job.end_ns - in_codec_ns
        is_first = kind in ("encode", "read")
        times = (job.began_ns, turn_ns) if is_first else (turn_ns, job.end_ns)
        boxes_of.setdefault(job.lane, []).append(Box(*times, kind, _about(job, step)))
    for lane, boxes in sorted(boxes_of.items()):
        yield Lane(group, f"{kind} {lane + 1}", boxes)


def _about(job: Spill | Restore, step: Step) -> str:
    codec = job.codec if isinstance(job, Spill) else step.codecs.get(job.record, "")
    queued_ms = (job.began_ns - job.queued_ns) / 1e6
    parts = [f"record {job.record}", format_bytes(job.nbytes), f"queued for {queued_ms:.1f} ms"]
    if codec not in ("", "none"):
        stored_bytes = job.stored_bytes if isinstance(job, Spill) else job.read_bytes
        parts.append(f"{codec}: {format_bytes(stored_bytes)} on disk")
    if job.drive_seconds is not None:
        parts.append(f"{job.drive_seconds * 1e3:.1f} ms at the drive")
    if isinstance(job, Restore):
        parts.append("read when asked for" if job.demanded else "read ahead")
    if job.failed is not None:
        parts.append(f"failed: {job.failed}")
    return ", ".join(parts)


def trace_events(steps: Sequence[Step], thread_names: Mapping[int, str], pid: int, origin_ns: int) -> dict[str, Any]:
    """Steps in Google's "Trace Event Format", which Perfetto and chrome://tracing show, to be written as JSON: complete
    events (X), counters (C), names (M); times in microseconds since `origin_ns`."""
    lanes = {("tierstore", "steps"): 0}
    seen: dict[tuple[int, int, str], dict[str, Any]] = {}  # what lasts over the end of a step is in the next step too
    counted: list[dict[str, Any]] = []
    for step in steps:
        whole = Lane("tierstore", "steps", [Box(step.began_ns, step.ended_ns, f"step {step.number}", "")])
        for lane in (whole, *lanes_of(step, thread_names)):
            tid = lanes.setdefault((lane.group, lane.name), len(lanes))
            for box in lane.boxes:
                times = {"ts": (box.began_ns - origin_ns) / 1e3, "dur": (box.ended_ns - box.began_ns) / 1e3}
                what = {"ph": "X", "name": box.kind, "cat": lane.group, "pid": pid, "tid": tid}
                seen.setdefault((tid, box.began_ns, box.kind), what | times | {"args": {"about": box.text}})
        for field, points in curves_of(step).items():
            counter = {"ph": "C", "name": TIERS[field], "pid": pid}
            counted += [{**counter, "ts": (at - origin_ns) / 1e3, "args": {"bytes": nbytes}} for at, nbytes in points]
    names: list[tuple[str, int, dict[str, Any]]] = [("process_name", 0, {"name": f"tierstore, process {pid}"})]
    for (group, own), tid in lanes.items():
        names += [("thread_name", tid, {"name": f"{group} · {own}"}), ("thread_sort_index", tid, {"sort_index": tid})]
    named = [{"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args} for name, tid, args in names]
    return {"traceEvents": [*named, *seen.values(), *counted], "displayTimeUnit": "ms"}
