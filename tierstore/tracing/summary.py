"""A step in figures, and in a sentence that says why it is slow. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..base.config import format_bytes
from ..returning.advice import keeps_too_much
from .causes import CAUSES, Cause, ExplainedWait, codec_ns, explain, union_ns
from .events import Header, Restore, Spill
from .steps import Step

_WORTH_A_WORD = 0.03  # share of a phase; a thread that waited less gets no sentence about the cause


@dataclass(frozen=True)
class Direction:
    """The transfers of a step in one direction. Without "stored", bytes are logical ones. `busy_seconds`: for how long
    anything moved; `lane_seconds`: the times of all transfers added up, of which `codec_seconds` were in codecs."""

    num_records: int
    nbytes: int
    stored_bytes: int
    busy_seconds: float
    lane_seconds: float
    codec_seconds: float
    cpu_seconds: float

    @property
    def bytes_per_second(self) -> float:
        return self.nbytes / self.busy_seconds if self.busy_seconds else 0.0


@dataclass(frozen=True)
class StepSummary:
    """The figures of one step. Waits of packs count as forward, waits of unpacks as backward.

    Attributes:
        headline: why it is slow, one sentence for each phase that is.
        forward_seconds: until its last scope was left; `backward_seconds`: from the first unpack on, or None.
        wait_seconds, num_waits: by phase and cause, all threads added up.
        resident_bytes, allocator_free_bytes, away_bytes: memory of the process at the end of forward, the part of it
            that was freed but kept by its allocator, and saved tensors on disk by then; None: not recorded.
    """

    number: int
    headline: Sequence[str]
    seconds: float
    forward_seconds: float
    backward_seconds: float | None
    wait_seconds: Mapping[str, Mapping[Cause, float]]
    num_waits: Mapping[str, Mapping[Cause, int]]
    num_packed: int
    packed_bytes: int
    written: Direction
    read: Direction
    is_whole: bool
    resident_bytes: int | None
    allocator_free_bytes: int | None
    away_bytes: int | None

    @property
    def waited_seconds(self) -> float:
        return sum(sum(by_cause.values()) for by_cause in self.wait_seconds.values())

    @property
    def memory(self) -> str | None:
        if self.resident_bytes is None:
            return None
        words = f"At the end of forward the process held {format_bytes(self.resident_bytes)}"
        if self.allocator_free_bytes is None:
            return f"{words}."
        freed = format_bytes(self.allocator_free_bytes)
        return f"{words}. {freed} of that was already freed, but its allocator kept it."

    @property
    def why_memory_stays(self) -> str | None:
        """A sentence if the process did not shrink by what left for the disk; None: it did, or it is not known."""
        if self.away_bytes is None or not keeps_too_much(self.away_bytes, self.allocator_free_bytes):
            return None
        return (
            f"{format_bytes(self.away_bytes)} of saved tensors were on disk by then, but the memory of the process did "
            'not fall by that: its allocator keeps freed memory. return_memory="always" returns it in every step '
            "(docs/how_to/memory_on_cpu.md)."
        )


class _Phase(NamedTuple):
    name: str
    began_ns: int
    ended_ns: int
    waits: Sequence[ExplainedWait]
    jobs: Sequence[Spill | Restore]
    moved: Direction

    @property
    def seconds(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e9


def summarize(step: Step, header: Header) -> StepSummary:
    """The figures of a step."""
    waits, turned_ns = explain(step), step.backward_began_ns or step.forward_ended_ns
    packs_wait, unpacks_wait = ([each for each in waits if each.is_backward is way] for way in (False, True))
    written, read = _direction(step.spills, step), _direction(step.restores, step)
    forward = _Phase("forward", step.began_ns, step.forward_ended_ns, packs_wait, step.spills, written)
    backward = _Phase("backward", turned_ns, step.ended_ns, unpacks_wait, step.restores, read)
    seconds = (step.ended_ns - step.began_ns) / 1e9
    waited = sum(each.seconds for each in waits) / seconds
    quick = f"This step is not slow because of the store: threads waited {waited:.1%} of its time."
    memory = step.memory
    away_bytes = [level.disk_bytes for level in step.levels if memory is not None and level.at_ns <= memory.at_ns]
    return StepSummary(
        number=step.number,
        headline=[line for phase in (forward, backward) if (line := _sentence(phase, step, header))] or [quick],
        seconds=seconds,
        forward_seconds=forward.seconds,
        backward_seconds=None if step.backward_began_ns is None else backward.seconds,
        wait_seconds={phase.name: _by_cause(phase.waits) for phase in (forward, backward)},
        num_waits={
            phase.name: {cause: sum(each.cause == cause for each in phase.waits) for cause in CAUSES}
            for phase in (forward, backward)
        },
        num_packed=len(step.packs),
        packed_bytes=sum(pack.storage_bytes for pack in step.packs),
        written=written,
        read=read,
        is_whole=step.is_whole,
        resident_bytes=None if memory is None else memory.resident_bytes,
        allocator_free_bytes=None if memory is None else memory.allocator_free_bytes,
        away_bytes=away_bytes[-1] if away_bytes else None,
    )


def _by_cause(waits: Sequence[ExplainedWait]) -> dict[Cause, float]:
    return {cause: sum(wait.seconds for wait in waits if wait.cause == cause) for cause in CAUSES}


def _direction(jobs: Sequence[Spill] | Sequence[Restore], step: Step) -> Direction:
    done = [job for job in jobs if job.failed is None]
    return Direction(
        num_records=len(done),
        nbytes=sum(job.nbytes for job in done),
        stored_bytes=sum(job.stored_bytes if isinstance(job, Spill) else job.read_bytes for job in done),
        busy_seconds=union_ns(jobs, step.began_ns, step.ended_ns) / 1e9,
        lane_seconds=sum(job.end_ns - job.began_ns for job in done) / 1e9,
        codec_seconds=sum(codec_ns(job, step.codecs) for job in done) / 1e9,
        cpu_seconds=sum(job.cpu_seconds or 0.0 for job in done),
    )


def _sentence(phase: _Phase, step: Step, header: Header) -> str | None:
    """About the thread that waited longest: waits of several threads overlap, so they cannot be added up."""
    threads = dict.fromkeys(each.wait.thread for each in phase.waits)
    by_thread = [_by_cause([each for each in phase.waits if each.wait.thread == thread]) for thread in threads]
    by_cause = max(by_thread, key=lambda own: sum(own.values()), default={})
    cause = max(by_cause, key=by_cause.__getitem__, default=None)
    share = by_cause[cause] / phase.seconds if cause and phase.seconds else 0.0
    if cause is None or share < _WORTH_A_WORD:
        return None
    moved = phase.moved
    done = "spilled" if phase.name == "forward" else "restored"
    what = f"{format_bytes(moved.nbytes)} {done} at {format_bytes(moved.bytes_per_second)}/s"
    busy = union_ns(phase.jobs, phase.began_ns, phase.ended_ns) / (phase.ended_ns - phase.began_ns)
    time = f"for {share:.0%} of its time"
    codec_share = min(1.0, moved.codec_seconds / moved.lane_seconds) if moved.lane_seconds else 0.0
    codecs = ", ".join(sorted(set(step.codecs.values()) - {"", "none"})) or "codecs"
    reasons = {
        "drive": f"waited for the drive {time}. The drive was busy for {busy:.0%} of {phase.name}: {what}",
        "codec": (
            f"waited for the codec {time}: {what}. {codec_share:.0%} of the transfers' time went to "
            f"{codecs} ({moved.cpu_seconds:.2g} s of CPU time). "
            'Try codec="auto", or a lower level'
        ),
        "room": (
            f"waited for room in host memory {time}: {what}. Transfers ran for only {busy:.0%} of {phase.name}. "
            f"Raise host_bytes ({format_bytes(header.store.host_bytes)}) or staging_bytes "
            f"({format_bytes(header.store.staging_bytes)})"
        ),
        "prefetch off": (
            f"waited {time} for reads that began only on request: {what}. "
            'Set prefetch="learned" and lookahead_bytes=None'
        ),
        "store": f"waited {time} while nothing was moving: {what}. The store's threads probably got no core",
    }
    return f"{phase.name.capitalize()} {reasons[cause]}."
