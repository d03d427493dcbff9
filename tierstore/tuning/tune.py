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
from pathlib import Path

from ..base.config import check_directory
from ..base.interrupts import interrupts_held_back
from ..errors import StoreFullError
from ..hardware import Hardware
from ..simulator import simulate
from ..simulator.hardware import hardware_of
from .codecs import sample_data_of_kind
from .examine import examine
from .program import TrialFailedError
from .recording import ProgramRecording, read_recording
from .report import hardware_of as description_of
from .search import Found, Space, search
from .settings import TrialSettings, default_settings
from .tuned import AS_IT_IS, Candidate, Tuned, choose

_NUM_SIMULATED_STEPS = 3
_MACHINE_SECONDS = 10.0
"""Enough for the speeds that a simulation needs."""

Run = Callable[[TrialSettings | None, Path], None]
"""Runs a trial with these settings, or (None) with the program's own, traced to the folder. Blocks.

Raises TrialFailedError, and ConfigError where no trial can be run at all."""


@dataclass(frozen=True)
class TuningPlan:
    """How much is tried.

    Attributes:
        host_bytes: the most that `host_bytes` and `staging_bytes` may be together; None: as the program has them.
        rounds: how often each candidate is measured.
        num_found: number of candidates from the simulator.
        search_seconds: time for all simulations of the search.
    """

    host_bytes: int | None = None
    rounds: int = 5
    num_found: int = 4
    search_seconds: float = 60.0


def tune(run: Run, described: Hardware | None, plan: TuningPlan, say: Callable[[str], None]) -> Tuned:
    """Find settings. Blocks for minutes; an interrupt ends the trial that runs, and leaves nothing behind.

    `described`: the machine; None: it is measured. `say`: called with lines that tell what begins.

    Raises:
        ConfigError: the limit cannot be kept, or the recorded trial cannot be tuned.
        TrialFailedError: the recorded trial failed, or the reference did; or the drive could not be measured.
    """
    if plan.host_bytes is not None:
        default_settings(plan.host_bytes)  # refused before minutes of work rather than after
    say("recording the program ...")
    recording = _try(run, None)
    settings, scope = recording.settings, recording.scope
    place = os.path.abspath(recording.trace.header.store.place)
    memory_bytes = settings.memory_bytes if plan.host_bytes is None else plan.host_bytes
    defaults = default_settings(memory_bytes)
    known = [settings, defaults] if settings.memory_bytes <= memory_bytes else [defaults]
    found = _search(recording, described or _measured(Path(place), say), known, memory_bytes, plan.search_seconds, say)
    named = {settings: "defaults" if settings == defaults else AS_IT_IS}
    named.setdefault(defaults, "defaults")
    for number, each in enumerate(found.best(plan.num_found), 1):
        named.setdefault(each, f"found {number}")
    candidates = [
        Candidate(name, each, found.predicted.get(each), (), each.memory_bytes <= memory_bytes)
        for each, name in named.items()
    ]
    chosen, reason = choose(_measure_by_turns(run, candidates, plan.rounds, say))
    of_scope = {"min_bytes": scope.min_bytes, "device_bytes": "auto" if scope.is_automatic else scope.device_bytes}
    return Tuned(place, of_scope, candidates, chosen, found, reason)


def _measured(directory: Path, say: Callable[[str], None]) -> Hardware:
    check_directory(directory)
    say(f"measuring the machine for {_MACHINE_SECONDS:g} s ...")
    machine = examine(directory, None, _MACHINE_SECONDS, lambda what: None)
    described = description_of(machine)
    if described is None:
        raise TrialFailedError(f"the drive under {directory} could not be measured: {machine.drive.error}")
    return described


def _search(
    recording: ProgramRecording,
    described: Hardware,
    known: Sequence[TrialSettings],
    memory_bytes: int,
    seconds: float,
    say: Callable[[str], None],
) -> Found:
    workload, ends_at = recording.workload(), time.monotonic() + seconds
    machine = hardware_of(described, kinds={saved.kind: sample_data_of_kind(saved.kind) for saved in workload.saved})
    say(f"simulating settings for {seconds:g} s at most ...")

    def predicted(settings: TrialSettings) -> float | None:
        """The last of some steps; None: it would fail."""
        how, num_ranks = settings.simulated, recording.num_ranks
        try:
            ranks = simulate(workload, machine, how, num_steps=_NUM_SIMULATED_STEPS, num_ranks=num_ranks)
        except StoreFullError:
            return None
        return ranks[0][-1].seconds

    return search(Space(memory_bytes, workload.saved_bytes), known, predicted, lambda: time.monotonic() < ends_at)


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
    run: Run, candidates: list[Candidate], rounds: int, say: Callable[[str], None]
) -> list[Candidate]:
    """Measure every candidate once in each round. Each round begins with another one, so none is always the first."""
    places, total = range(len(candidates)), rounds * len(candidates)
    for number in range(rounds):
        first = number % len(candidates)
        for trial, place in enumerate((*places[first:], *places[:first]), 1 + number * len(candidates)):
            say(f"trial {trial} of {total}: {candidates[place].label}")
            candidates[place] = _measured_once(run, candidates[place])
    reference = next(each for each in candidates if each.is_allowed)
    if reference.failure is not None:
        raise TrialFailedError(f"the settings to compare with failed: {reference.failure}")
    return candidates


def _measured_once(run: Run, candidate: Candidate) -> Candidate:
    """Measure one more round. A candidate that failed is not tried again."""
    if candidate.failure is not None:
        return candidate
    try:
        step_seconds = _try(run, candidate.settings).step_seconds
    except TrialFailedError as error:
        return replace(candidate, failure=str(error))
    return replace(candidate, step_seconds=(*candidate.step_seconds, step_seconds))
