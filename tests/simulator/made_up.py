"""Made-up steps and drives."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.simulator import Action, Compute, DepthSpeed, Drive, EndScope, Pack, Release, Saved, Unpack, Workload

__all__ = ["chain", "drive"]


def chain(
    sizes: Sequence[int],
    gap_seconds: float | Sequence[float],
    *,
    backward: float = 2.0,
    cores: float = 1.0,
    kind: str = "",
    on_device: bool = False,
) -> Workload:
    """A chain of layers: forward computes and saves, backward asks in reverse and computes.

    Args:
        sizes: bytes that each layer saves.
        gap_seconds: which forward computes in each, and once more at the end; one number for all of them, or one each.
        backward: so many times as long backward computes.
        cores: that training keeps busy.
        kind: of all that is saved.
        on_device: it is saved on an accelerator.
    """
    gaps = gap_seconds if isinstance(gap_seconds, Sequence) else [gap_seconds] * len(sizes)
    saved = [Saved(nbytes, node, kind=kind, on_device=on_device) for node, nbytes in enumerate(sizes)]
    actions: list[Action] = []
    for index, gap in enumerate(gaps):
        actions += [Compute(gap), Pack(index)]
    actions += [Compute(gaps[-1]), EndScope()]
    for index, gap in reversed(list(enumerate(gaps))):
        actions += [Unpack(index), Compute(backward * gap), Release(index)]
    return Workload(saved, actions, cores)


def drive(write: float, read: float | None = None) -> Drive:
    """One that writes and reads so many bytes per second, however many transfers it is given; `read`: as it writes."""
    return Drive([DepthSpeed(1, write)], [DepthSpeed(1, write if read is None else read)])
