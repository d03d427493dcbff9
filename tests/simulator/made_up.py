"""Made-up steps and drives."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.simulator import Action, Compute, Drive, EndScope, Pack, Release, Saved, Unpack, Workload

__all__ = ["chain", "drive"]


def chain(
    sizes: Sequence[int],
    gap_seconds: float | Sequence[float],
    *,
    cores: float = 1.0,
    kind: str = "",
) -> Workload:
    """A chain of layers of these bytes: forward computes for the gap and saves, backward asks in reverse and computes
    twice as long."""
    gaps = gap_seconds if isinstance(gap_seconds, Sequence) else [gap_seconds] * len(sizes)
    saved = [Saved(nbytes, node, kind=kind) for node, nbytes in enumerate(sizes)]
    actions: list[Action] = []
    for index, gap in enumerate(gaps):
        actions += [Compute(gap), Pack(index)]
    actions += [Compute(gaps[-1]), EndScope()]
    for index, gap in reversed(list(enumerate(gaps))):
        actions += [Unpack(index), Compute(2 * gap), Release(index)]
    return Workload(saved, actions, cores)


def drive(write: float, read: float | None = None) -> Drive:
    """One that writes and reads so many bytes per second, however many transfers it is given; `read`: as it writes."""
    return Drive({1: write}, {1: write if read is None else read})
