"""A step as lanes of boxes and curves. Pictures, pages and Perfetto's files are made of them. Pure.

A transfer alternates between a codec and the drive. Its box is cut into one part for each: the lengths of the two
parts are true, their order is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..base.config import format_bytes
from .causes import CAUSES, codec_ns, explain
from .events import Levels, Restore, Spill, StoreSettings
from .steps import Step

__all__ = ["COLOURS", "ON_DARK", "TIERS", "Box", "Curve", "Lane", "Limit", "Timeline", "limits_of", "timeline_of"]

COLOURS: Mapping[str, str] = {
    "forward": "#c9d7e8",
    "backward": "#d9cfe6",
    "drive": "#c62828",
    "codec": "#ef8f00",
    "room": "#6a1b9a",
    "prefetch off": "#00796b",
    "store": "#616161",
    "write": "#3b78b5",
    "read": "#4a9d4f",
    "encode": "#f3b562",
    "decode": "#f7d9a8",
    "copy": "#26a69a",
}
"""The colour of each kind of box: what a thread does, what it waits for, and what moves."""

TIERS: Mapping[str, tuple[str, str]] = {
    "device_bytes": ("device", "#5c6bc0"),
    "host_bytes": ("host: within the budget", "#90a4ae"),
    "staging_bytes": ("host: staging, on the way", "#a1887f"),
    "lent_bytes": ("host: lent", "#d7ccc8"),
    "uncharged_bytes": ("host: where autograd left it", "#cfd8dc"),
    "disk_bytes": ("disk", "#455a64"),
}
"""The name and colour of each field of `Levels`. What has a budget lies at the bottom, so that it can be compared."""

ON_DARK: Mapping[str, str] = {
    "forward": "#31465f",
    "backward": "#483a5c",
    "drive": "#e5534b",
    "room": "#b05fd6",
    "prefetch off": "#1fb5a3",
    "store": "#9aa0a6",
    "write": "#5a9bdc",
    "read": "#62b968",
    "encode": "#c98f43",
    "decode": "#a68a5a",
    "copy": "#4dd0c0",
    "device_bytes": "#7986cb",
    "host_bytes": "#78909c",
    "lent_bytes": "#6d625e",
    "uncharged_bytes": "#46515a",
    "disk_bytes": "#607d8b",
}
"""The colours that differ on a dark ground: of kinds of boxes, and of fields of `Levels`."""


@dataclass(frozen=True)
class Box:
    """Something that lasts, or (`began_ns == ended_ns`) happens; `kind` is a key of `COLOURS`."""

    began_ns: int
    ended_ns: int
    kind: str
    text: str


@dataclass(frozen=True)
class Lane:
    """Boxes that do not overlap, except that waits lie over a phase. `group`: the kind of lane."""

    group: str
    name: str
    boxes: Sequence[Box]


@dataclass(frozen=True)
class Curve:
    """How many bytes a tier holds from each of the times on."""

    field: str
    times_ns: Sequence[int]
    nbytes: Sequence[int]

    @property
    def name(self) -> str:
        """The tier's name for people."""
        return TIERS[self.field][0]


@dataclass(frozen=True)
class Limit:
    """A budget: the most that this tier may hold, together with the tiers of its chart that lie below it."""

    field: str
    name: str
    nbytes: int


@dataclass(frozen=True)
class Timeline:
    """One step as lanes and curves; times as in the trace."""

    began_ns: int
    ended_ns: int
    lanes: Sequence[Lane]
    curves: Sequence[Curve]


def limits_of(step: Step, store: StoreSettings) -> list[Limit]:
    """The budgets of a step; those of 0 bytes are left out."""
    limits = [
        Limit("device_bytes", "device_bytes", 0 if step.scope is None else step.scope.device_bytes),
        Limit("host_bytes", "host_bytes", store.host_bytes),
        Limit("staging_bytes", "host_bytes + staging_bytes", store.host_bytes + store.staging_bytes),
        Limit("disk_bytes", "disk_bytes", store.disk_bytes),
    ]
    return [limit for limit in limits if limit.nbytes > 0]


def timeline_of(step: Step, thread_names: Mapping[int, str]) -> Timeline:
    """The timeline of a step. Its lanes: threads, copies, codec, drive; empty lanes are left out."""
    lanes = [
        *_threads(step, thread_names),
        *_copies(step),
        *_codec(step),
        *_drive("drive: writes", "write", step.spills, step),
        *_drive("drive: reads", "read", step.restores, step),
    ]
    return Timeline(step.began_ns, step.ended_ns, lanes, _curves(step))


def _threads(step: Step, names: Mapping[int, str]) -> Iterator[Lane]:
    waits = explain(step)
    unpacks = [unpack.thread for unpack in step.unpacks]
    for thread in dict.fromkeys([step.thread, *unpacks, *(each.wait.thread for each in waits)]):
        boxes = []
        if thread == step.thread:
            boxes.append(_phase(step.began_ns, step.forward_ended_ns, "forward", f"{len(step.packs)} tensors packed"))
        if thread in unpacks and step.backward_began_ns is not None:
            boxes.append(_phase(step.backward_began_ns, step.ended_ns, "backward", f"{len(step.unpacks)} asked for"))
        for each in waits:
            if each.wait.thread == thread:
                whom = "an unpack waits" if each.is_backward else "a pack waits"
                whose = "" if each.wait.record is None else f" for record {each.wait.record}"
                text = f"{whom}{whose}: {CAUSES[each.cause]}"
                boxes.append(Box(each.wait.began_ns, each.wait.end_ns, each.cause, text))
        yield Lane("compute", names.get(thread, f"thread {thread}"), boxes)


def _phase(began_ns: int, ended_ns: int, kind: str, what: str) -> Box:
    return Box(began_ns, max(began_ns, ended_ns), kind, f"{kind}: {what}")


def _copies(step: Step) -> Iterator[Lane]:
    for name, copies in (("to host", step.offloads), ("to device", step.reloads)):
        if copies:
            boxes = [
                Box(copy.at_ns, copy.at_ns, "copy", f"record {copy.record}, {format_bytes(copy.nbytes)}, queued")
                for copy in copies
            ]
            yield Lane("copies", name, boxes)


def _codec(step: Step) -> Iterator[Lane]:
    for name, kind, jobs in (("encode", "encode", step.spills), ("decode", "decode", step.restores)):
        boxes_of: dict[int, list[Box]] = {}
        for job in jobs:
            in_codec_ns = codec_ns(job, step.codecs)
            if in_codec_ns:
                began_ns = job.began_ns if kind == "encode" else job.end_ns - in_codec_ns
                end_ns = began_ns + in_codec_ns
                boxes_of.setdefault(job.lane, []).append(Box(began_ns, end_ns, kind, _about(job, step)))
        for lane, boxes in sorted(boxes_of.items()):
            yield Lane("codec", f"{name} {lane + 1}", boxes)


def _drive(group: str, kind: str, jobs: Sequence[Spill] | Sequence[Restore], step: Step) -> Iterator[Lane]:
    boxes_of: dict[int, list[Box]] = {}
    for job in jobs:
        in_codec_ns = codec_ns(job, step.codecs)
        began_ns = job.began_ns + (in_codec_ns if kind == "write" else 0)
        ended_ns = job.end_ns - (in_codec_ns if kind == "read" else 0)
        boxes_of.setdefault(job.lane, []).append(Box(began_ns, ended_ns, kind, _about(job, step)))
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


def _curves(step: Step) -> list[Curve]:
    times = [level.at_ns for level in step.levels]
    curves = [Curve(field, times, _of_field(step.levels, field)) for field in TIERS]
    return [curve for curve in curves if any(curve.nbytes)]


def _of_field(levels: Sequence[Levels], field: str) -> list[int]:
    return [getattr(level, field) for level in levels]
