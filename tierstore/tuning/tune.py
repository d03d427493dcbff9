"""Finds settings: one trial is recorded, many settings are simulated, and a few are measured in turn.

Start here. A *trial* is a run of some steps with given settings, of a program (`program.py`) or of a loop (`loop.py`);
it leaves traces, and everything about it is read from them (`recording.py`).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Protocol

from ..base.config import format_bytes
from ..base.interrupts import interrupts_held_back
from ..errors import ConfigError
from ..hardware import Hardware
from ..simulator import Hardware as SimulatedHardware
from ..simulator import Workload
from .predicted import link_in_words, link_of, machine_of, predict
from .program import TrialFailedError
from .recording import ProgramRecording, read_recording
from .search import Found, Space, search
from .settings import AUTO, LEAST_STAGING_BYTES, StoreLimits, TrialSettings, default_settings
from .tuned import AS_IT_IS, Candidate, Tuned, choose

__all__ = ["Run", "TuningPlan", "TuningProgress", "memory_within", "tune"]

Run = Callable[[TrialSettings | None, Path], None]
"""Runs a trial with these settings, or (None) with the program's own, traced to the folder. Blocks.

Raises TrialFailedError, and ConfigError where no trial can be run at all."""

Measure = Callable[[Path], Hardware]
"""Describes the machine of a store's directory. Blocks."""


class TuningProgress(Protocol):
    """Receives progress."""

    def __call__(self, stage: str, done: int, total: int | None = None, what: str = "") -> None:
        """`done` of `total` (None: not known) parts of a stage are over. `what`: the part that begins."""


@dataclass(frozen=True)
class TuningPlan:
    """How much is tried.

    Attributes:
        host_bytes: the most that `host_bytes` and `staging_bytes` may be together; None: as the program has them.
        device_bytes: the most that may stay on an accelerator; None: as the program has it.
        rounds: how often each candidate is measured.
        num_found: number of candidates from the simulator.
        search_seconds: time for all simulations of the search.
        limit_bytes: the most resident memory of the program; None: `host_bytes` says what the store may take.
    """

    host_bytes: int | None = None
    rounds: int = 5
    num_found: int = 4
    search_seconds: float = 60.0
    device_bytes: int | None = None
    limit_bytes: int | None = None


def tune(run: Run, measure: Measure, plan: TuningPlan, progress: TuningProgress) -> Tuned:
    """Find settings. Blocks for minutes; an interrupt ends the trial that runs, and leaves nothing behind.

    Args:
        run: see `Run`.
        measure: see `Measure`; called once.
        plan: how much is tried.
        progress: called on this thread.

    Raises:
        ConfigError: the limit cannot be kept, or the recorded trial cannot be tuned.
        TrialFailedError: the recorded trial failed, or the reference did.
    """
    if plan.host_bytes is not None:
        default_settings(plan.host_bytes)  # refused before minutes of work rather than after
    progress("recording the program", 0, 1)
    recording = _try(run, None)
    progress("recording the program", 1, 1)
    settings, place = recording.settings, os.path.abspath(recording.trace.header.store.place)
    workload = recording.workload()
    if plan.device_bytes is not None and not workload.uses_device:
        raise ConfigError("device_bytes", plan.device_bytes, "leave it out: the step saves nothing on an accelerator")
    limits = _limits(plan, recording, _saved_bytes(workload))
    defaults = default_settings(limits.memory_bytes)
    defaults = replace(defaults, device_bytes=limits.device_bytes if workload.uses_device else settings.device_bytes)
    known = [settings, defaults] if limits.allow(settings, recording.device_bytes) else [defaults]
    described = measure(Path(place))
    link = link_of(described, workload)
    machine = machine_of(described, link, workload, recording, plan.search_seconds)
    found = _search(workload, machine, recording.num_ranks, known, limits, plan.search_seconds, progress)
    named = {settings: "defaults" if settings == defaults else AS_IT_IS}
    named.setdefault(defaults, "defaults")
    best = found.best(plan.num_found)
    for number, each in enumerate(best, 1):
        named.setdefault(each, f"found {number}")
    for each in best[:1]:
        if workload.uses_device and (plan.device_bytes or settings.device_bytes == AUTO):
            named.setdefault(replace(each, prefetch="learned", device_bytes=AUTO), "auto")
    candidates = [
        Candidate(name, each, found.predicted.get(each), (), each in known or limits.allow(each))
        for each, name in named.items()
    ]
    chosen, reason = choose(_measure_by_turns(run, candidates, limits, plan.rounds, progress))
    return Tuned(
        place=place,
        min_bytes=recording.scope.min_bytes,
        candidates=candidates,
        chosen=chosen,
        found=found,
        reason=reason,
        link=None if link is None else link_in_words(link),
    )


def _limits(plan: TuningPlan, recording: ProgramRecording, saved_bytes: int) -> StoreLimits:
    """The plan's limits; those not given are the program's own. Without `device_bytes`, "auto" is not limited."""
    memory_bytes, device_bytes = plan.host_bytes, plan.device_bytes
    if plan.limit_bytes is not None:
        held_bytes = min(recording.settings.memory_bytes, saved_bytes)
        memory_bytes = memory_within(plan.limit_bytes, recording.resident_bytes, held_bytes)
    return StoreLimits(
        recording.settings.memory_bytes if memory_bytes is None else memory_bytes,
        recording.device_bytes if device_bytes is None else device_bytes,
        is_for_auto=device_bytes is not None,
    )


def memory_within(limit_bytes: int, resident_bytes: int | None, held_bytes: int) -> int:
    """How much memory a store may take in a program that is to stay within a limit.

    Args:
        limit_bytes: for the resident memory of the program.
        resident_bytes: what it was at the end of forward, as recorded; None: the system did not tell.
        held_bytes: the part of it that was saved tensors.

    Raises:
        ConfigError: it is too little for a store, or not known.
    """
    if resident_bytes is None:
        raise ConfigError("limit", limit_bytes, "the system does not tell the program's memory: give --host-bytes")
    besides_bytes = resident_bytes - held_bytes
    least_bytes = besides_bytes + LEAST_STAGING_BYTES
    if limit_bytes < least_bytes:
        held = format_bytes(besides_bytes)
        what = f"the program holds {held} beside its saved tensors: give {format_bytes(least_bytes)} or more"
        raise ConfigError("limit", format_bytes(limit_bytes), what)
    return limit_bytes - besides_bytes


def _search(
    workload: Workload,
    machine: SimulatedHardware,
    num_ranks: int,
    known: Sequence[TrialSettings],
    limits: StoreLimits,
    seconds: float,
    progress: TuningProgress,
) -> Found:
    """Search in the simulator, beginning at the first of the known settings."""
    stage, done, ends_at = "simulating settings", count(1), time.monotonic() + seconds
    progress(stage, 0)

    def predicted(settings: TrialSettings) -> float | None:
        progress(stage, next(done))
        return predict(workload, machine, num_ranks, settings)

    space = Space(limits.memory_bytes, _saved_bytes(workload), min(limits.device_bytes, _device_bytes(workload)))
    found = search(space, known, predicted, lambda: time.monotonic() < ends_at)
    progress(stage, len(found.predicted), len(found.predicted))
    return found


def _try(run: Run, settings: TrialSettings | None) -> ProgramRecording:
    """Run one trial and read what it recorded. Main thread only. Raises TrialFailedError, ConfigError."""
    folder = tempfile.TemporaryDirectory(prefix="tierstore-tune-")
    try:
        run(settings, Path(folder.name))
        return read_recording(Path(folder.name))
    finally:
        with interrupts_held_back():  # even a second Ctrl-C leaves nothing
            folder.cleanup()


def _saved_bytes(workload: Workload) -> int:
    """Bytes that one step saves; each storage counts once."""
    return sum(saved.nbytes for saved in workload.saved if saved.record is None)


def _device_bytes(workload: Workload) -> int:
    """The part of the saved bytes that is on an accelerator and may leave it."""
    saved = (saved for saved in workload.saved if saved.record is None)
    return sum(each.nbytes for each in saved if each.on_device and not each.is_shared)


def _measure_by_turns(
    run: Run, candidates: list[Candidate], limits: StoreLimits, rounds: int, progress: TuningProgress
) -> list[Candidate]:
    """Measure every candidate once in each round. Each round begins with another one, so none is always the first."""
    places, total = range(len(candidates)), rounds * len(candidates)
    for number in range(rounds):
        first = number % len(candidates)
        for done, place in enumerate((*places[first:], *places[:first]), number * len(candidates)):
            progress("trials", done, total, candidates[place].label)
            candidates[place] = _measured_once(run, candidates[place], limits)
    progress("trials", total, total)
    reference = next(each for each in candidates if each.is_allowed)
    if reference.failure is not None:
        raise TrialFailedError(f"the settings to compare with failed: {reference.failure}")
    return candidates


def _measured_once(run: Run, candidate: Candidate, limits: StoreLimits) -> Candidate:
    """Measure one more round. A candidate that failed is not tried again. One whose "auto" finds more than the limit is
    no longer allowed."""
    if candidate.failure is not None:
        return candidate
    try:
        recording = _try(run, candidate.settings)
    except TrialFailedError as error:
        return replace(candidate, failure=str(error))
    found_bytes = max(candidate.found_bytes, recording.device_bytes)
    return replace(
        candidate,
        step_seconds=(*candidate.step_seconds, recording.step_seconds),
        found_bytes=found_bytes,
        is_allowed=candidate.is_allowed and limits.allow(candidate.settings, found_bytes),
    )
