"""Why a thread waited. Pure.

The store knows that a pack waited for room, or an unpack for its bytes. A person wants to know what to change. So each
wait gets one of `CAUSES`. If transfers in its direction ran for most of the time since the thread's last wait, they
could not have come much further: it is the drive or the codec, whichever took more of their time during the wait. Else
they began too late: for want of room, or because nothing is read ahead. If nothing moved, it is the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from .events import Restore, Spill, Stall
from .steps import Step

Cause = Literal["drive", "codec", "room", "prefetch off", "store"]

CAUSES: Mapping[Cause, str] = {
    "drive": "the drive was busy and did not keep up",
    "codec": "the codec was busy and did not keep up",
    "room": "no room to begin sooner: budgets too small",
    "prefetch off": "nothing is read ahead: prefetch is off",
    "store": "nothing was moving: no core for the store's threads",
}

_MOST = 0.5
_SHORT = 0.1  # share of a wait: a shorter gap before the wait says nothing


class ExplainedWait(NamedTuple):
    """`is_backward`: an unpack waited, not a pack."""

    wait: Stall
    cause: Cause
    is_backward: bool

    @property
    def seconds(self) -> float:
        return (self.wait.end_ns - self.wait.began_ns) / 1e9


def explain(step: Step) -> list[ExplainedWait]:
    """Every wait of the step with its cause, ordered by when the wait began."""
    last_end: dict[tuple[int, bool], int] = {}
    explained = []
    for wait in step.waits:
        is_backward = wait.cause == _UNPACK_WAITS
        jobs: Sequence[Spill | Restore] = step.restores if is_backward else step.spills
        since_ns = last_end.get((wait.thread, is_backward), min((job.began_ns for job in jobs), default=wait.began_ns))
        last_end[wait.thread, is_backward] = wait.end_ns
        explained.append(ExplainedWait(wait, _cause_of(wait, since_ns, jobs, step), is_backward))
    return explained


_UNPACK_WAITS = "unpack waits for restore"


def _cause_of(wait: Stall, since_ns: int, jobs: Sequence[Spill | Restore], step: Step) -> Cause:
    if not overlap_ns(jobs, wait.began_ns, wait.end_ns):
        return "store"
    gap_ns = wait.began_ns - since_ns
    was_idle = union_ns(jobs, since_ns, wait.began_ns) < _MOST * gap_ns
    if was_idle and gap_ns > _SHORT * (wait.end_ns - wait.began_ns):
        reads_ahead = step.scope is None or (step.scope.prefetch != "none" and step.scope.lookahead_bytes > 0)
        return "room" if reads_ahead or wait.cause != _UNPACK_WAITS else "prefetch off"
    in_codec = in_all = 0.0
    for job in jobs:
        shared_ns = overlap_ns((job,), wait.began_ns, wait.end_ns)
        in_all += shared_ns
        in_codec += shared_ns * codec_ns(job, step.codecs) / max(job.end_ns - job.began_ns, 1)
    return "codec" if in_codec > _MOST * in_all else "drive"


def codec_ns(job: Spill | Restore, codecs: Mapping[int, str]) -> int:
    """How long a transfer was in a codec, not at the drive. 0 without a codec, or where the time is not known."""
    codec = job.codec if isinstance(job, Spill) else codecs.get(job.record, "none")
    if codec in ("", "none") or job.drive_seconds is None:
        return 0
    return max(0, job.end_ns - job.began_ns - round(job.drive_seconds * 1e9))


def overlap_ns(jobs: Sequence[Spill | Restore], began_ns: int, ended_ns: int) -> int:
    """The sum of the times for which each job ran between the two moments."""
    return sum(max(0, min(job.end_ns, ended_ns) - max(job.began_ns, began_ns)) for job in jobs)


def union_ns(jobs: Sequence[Spill | Restore], began_ns: int, ended_ns: int) -> int:
    """For how long at least one of the jobs ran between the two moments."""
    busy_ns, reached_ns = 0, began_ns
    for job in sorted(jobs, key=lambda job: job.began_ns):
        from_ns, to_ns = max(job.began_ns, reached_ns), min(job.end_ns, ended_ns)
        if to_ns > from_ns:
            busy_ns += to_ns - from_ns
            reached_ns = to_ns
    return busy_ns
