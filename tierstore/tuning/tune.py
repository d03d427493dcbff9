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

from msgspec import structs

from ..base.config import check_directory, format_bytes
from ..base.interrupts import interrupts_held_back
from ..errors import ConfigError, StoreFullError
from ..hardware import AcceleratorLink, Hardware
from ..simulator import Workload, simulate
from ..simulator.hardware import hardware_of
from .codecs import sample_data_of_kind
from .examine import NUM_EXAMINED, examine, measure_accelerators
from .measurements import rate
from .program import TrialFailedError
from .recording import ProgramRecording, read_recording
from .report import hardware_of as description_of
from .search import Found, Space, search
from .settings import AUTO, LEAST_STAGING_BYTES, StoreLimits, TrialSettings, default_settings
from .tuned import AS_IT_IS, Candidate, Tuned, choose

_NUM_SIMULATED_STEPS = 3
_MACHINE_SECONDS, _LINK_SECONDS = 10.0, 1.0
"""Enough for the speeds that a simulation needs."""

Run = Callable[[TrialSettings | None, Path], None]
"""Runs a trial with these settings, or (None) with the program's own, traced to the folder. Blocks.

Raises TrialFailedError, and ConfigError where no trial can be run at all."""

Measure = Callable[[Path], Hardware]
"""Describes the machine of a store's directory. Blocks."""

TuningProgress = Callable[..., None]
"""Receives progress: (stage, done, total=None, what=""). `done` of `total` (None: not known) parts of a stage are over;
`what`: the part that begins."""


@dataclass(frozen=True)
class TuningPlan:
    """How much is tried.

    Attributes:
        host_bytes: the most that `host_bytes` and `staging_bytes` may be together; None: as the program has them.
        rounds: how often each candidate is measured.
        num_found: number of candidates from the simulator.
        search_seconds: time for all simulations of the search.
        device_bytes: the most that may stay on an accelerator; None: as the program has it.
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

    `measure` is called once, `progress` on this thread.

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
    limits = _limits(plan, recording, workload)
    defaults = default_settings(limits.memory_bytes)
    defaults = replace(defaults, device_bytes=limits.device_bytes if workload.uses_device else settings.device_bytes)
    known = [settings, defaults] if limits.allow(settings, recording.device_bytes) else [defaults]
    described, link = measure(Path(place)), None
    if workload.uses_device:
        link = _link_of(described)
        described = structs.replace(described, accelerators=(link,))
    found = _search(workload, described, recording.num_ranks, known, limits, plan.search_seconds, progress)
    named = {settings: "defaults" if settings == defaults else AS_IT_IS}
    named.setdefault(defaults, "defaults")
    best = found.best(plan.num_found)
    for number, each in enumerate(best, 1):
        named.setdefault(each, f"found {number}")
    if best and workload.uses_device and (plan.device_bytes or settings.device_bytes == AUTO):
        named.setdefault(replace(best[0], prefetch="learned", device_bytes=AUTO), "auto")
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
        link=None if link is None else _in_words(link),
    )


def _limits(plan: TuningPlan, recording: ProgramRecording, workload: Workload) -> StoreLimits:
    memory_bytes = recording.settings.memory_bytes if plan.host_bytes is None else plan.host_bytes
    if plan.limit_bytes is not None:
        held_bytes = min(recording.settings.memory_bytes, workload.saved_bytes)
        memory_bytes = memory_within(plan.limit_bytes, recording.resident_bytes, held_bytes)
    device_bytes = recording.device_bytes if plan.device_bytes is None else plan.device_bytes
    return StoreLimits(memory_bytes, device_bytes, is_for_auto=plan.device_bytes is not None)


def memory_within(limit_bytes: int, resident_bytes: int | None, held_bytes: int) -> int:
    """How much memory a store may take in a program whose resident memory is to stay within a limit. `resident_bytes`:
    what it was at the end of forward (None: not known), of which `held_bytes` were saved tensors. Raises ConfigError:
    too little."""
    if resident_bytes is None:
        raise ConfigError("limit", limit_bytes, "the system does not tell the program's memory: give --host-bytes")
    besides_bytes = resident_bytes - held_bytes
    least_bytes = besides_bytes + LEAST_STAGING_BYTES
    if limit_bytes < least_bytes:
        held = format_bytes(besides_bytes)
        what = f"the program holds {held} beside its saved tensors: give {format_bytes(least_bytes)} or more"
        raise ConfigError("limit", format_bytes(limit_bytes), what)
    return limit_bytes - besides_bytes


# --- the simulated machine --------------------------------------------------------------------------------------------


def measure_machine(directory: Path, progress: Callable[[int], None] = lambda done: None) -> Hardware:
    """Measure the machine. Blocks for about ten seconds. `progress`: called with the steps done, of `NUM_EXAMINED`.
    Raises ConfigError: there is no such directory (any more). TrialFailedError: the drive could not be measured."""
    check_directory(directory)
    done = count(1)
    machine = examine(directory, None, _MACHINE_SECONDS, lambda what: progress(min(next(done), NUM_EXAMINED)))
    described = description_of(machine)
    if described is None:
        raise TrialFailedError(f"the drive under {directory} could not be measured: {machine.drive.error}")
    return described


def _link_of(described: Hardware) -> AcceleratorLink:
    """The link to the accelerator, measured now if it was not described."""
    links = described.accelerators or measure_accelerators(_LINK_SECONDS).links
    if not links:
        what = "give a file with the link to the accelerator, which could not be measured"
        raise ConfigError("hardware", None, what)
    return links[0]


def _in_words(link: AcceleratorLink) -> str:
    out, back = rate(link.to_host_bytes_per_second), rate(link.to_device_bytes_per_second)
    return f"copies to the host at {out}, back at {back}"


def _search(
    workload: Workload,
    described: Hardware,
    num_ranks: int,
    known: Sequence[TrialSettings],
    limits: StoreLimits,
    seconds: float,
    progress: TuningProgress,
) -> Found:
    stage, done, ends_at = "simulating settings", count(1), time.monotonic() + seconds
    machine = hardware_of(described, kinds={saved.kind: sample_data_of_kind(saved.kind) for saved in workload.saved})
    if workload.uses_device:  # the host runs ahead of its accelerator, which does not wait for calls of the store
        machine = replace(machine, call_seconds_per_record=0.0)
    progress(stage, 0)

    def predicted(settings: TrialSettings) -> float | None:
        """The last of some steps; None: it would fail, or "auto" has yet to find a size."""
        progress(stage, next(done))
        if settings.device_bytes == AUTO and workload.uses_device:
            return None
        how = settings.simulated
        try:
            ranks = simulate(workload, machine, how, num_steps=_NUM_SIMULATED_STEPS, num_ranks=num_ranks)
        except StoreFullError:
            return None
        return ranks[0][-1].seconds

    space = Space(limits.memory_bytes, workload.saved_bytes, min(limits.device_bytes, workload.device_bytes))
    found = search(space, known, predicted, lambda: time.monotonic() < ends_at)
    progress(stage, len(found.predicted), len(found.predicted))
    return found


# --- trials -----------------------------------------------------------------------------------------------------------


def _try(run: Run, settings: TrialSettings | None) -> ProgramRecording:
    folder = tempfile.TemporaryDirectory(prefix="tierstore-tune-")
    try:
        run(settings, Path(folder.name))
        return read_recording(Path(folder.name))
    finally:
        with interrupts_held_back():  # even a second Ctrl-C leaves nothing
            folder.cleanup()


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
