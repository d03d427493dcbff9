"""How settings are found: one trial is recorded, many are simulated, and a few are measured by turns.

Start here. A *trial* is a run of some steps with given settings, of a program (`program.py`) or of a loop (`loop.py`);
it leaves traces, and everything about it is read from them (`recording.py`).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ..config import format_bytes
from ..errors import StoreFullError
from ..hardware import Hardware
from ..simulator import Hardware as SimulatedHardware
from ..simulator import Workload, simulate
from ..simulator.fit import Observation, fit, steady_seconds
from ..simulator.from_hardware import hardware_of
from .program import TrialFailedError
from .recording import Recording, read_recording
from .search import Found, Space, search
from .settings import TrialSettings, default_settings
from .tuned import Candidate, Tuned, choose

__all__ = ["Plan", "Progress", "Run", "tune"]

_NUM_SIMULATED_STEPS = 3
_NUM_SIMULATED_FOR_FIT = 20
_MOST_INLINE_BYTES = 2**20  # beyond that, extents are faster on any drive that was seen (bench/disk_layouts.py)
_LEAST_INLINE_SHARE = 0.05  # of the bytes of a step; moving less cannot gain what a choice asks for

Run = Callable[[TrialSettings | None, Path], None]
"""Runs a trial with these settings, or those that it has of itself, traced to the folder. Blocks.

Raises TrialFailedError, and ConfigError where no trial can be run at all."""

Measure = Callable[[Path], Hardware]
"""Describes the machine of a store's directory. Blocks."""


class Progress(Protocol):
    """Told how it goes on."""

    def __call__(self, stage: str, done: int, total: int | None = None, what: str = "") -> None:
        """The stage has come to `done` of `total`; None: nobody knows of how many. `what`: is at hand."""


@dataclass(frozen=True)
class Plan:
    """How much is tried.

    Attributes:
        host_bytes: the most that `host_bytes` and `staging_bytes` may be together; None: what they are.
        rounds: how often each candidate is measured.
        num_found: so many candidates from the simulator.
        search_seconds: for all simulations.
    """

    host_bytes: int | None = None
    rounds: int = 5
    num_found: int = 4
    search_seconds: float = 60.0


def tune(run: Run, measure: Measure, plan: Plan, progress: Progress) -> Tuned:
    """Find settings. Blocks for minutes; an interrupt ends the trial that runs, and leaves nothing behind.

    Args:
        run: see `Run`.
        measure: see `Measure`; called once.
        plan: how much is tried.
        progress: called on this thread.

    Raises:
        ConfigError: the limit cannot be kept, or what was recorded is nothing that can be tuned.
        TrialFailedError: the trial that is recorded failed, or the reference did.
    """
    if plan.host_bytes is not None:
        default_settings(plan.host_bytes)  # refused before minutes of work rather than after
    progress("recording", 0, 1)
    recording = _try(run, None)
    progress("recording", 1, 1)
    settings, place = recording.settings, os.path.abspath(recording.trace.header.store.place)
    memory_bytes = settings.memory_bytes if plan.host_bytes is None else plan.host_bytes
    defaults = default_settings(memory_bytes)
    known = [settings, defaults] if settings.memory_bytes <= memory_bytes else [defaults]
    workload = recording.workload()
    found = _search(workload, measure(Path(place)), recording, known, memory_bytes, plan.search_seconds, progress)
    named = {settings: "defaults" if settings == defaults else "as it is"}
    named.setdefault(defaults, "defaults")
    best = found.best(plan.num_found)
    for number, each in enumerate(best, 1):
        named.setdefault(each, f"found {number}")
    for each in best[:1]:
        for limit_bytes in _inline_limits(workload, each.inline_bytes):
            named.setdefault(replace(each, inline_bytes=limit_bytes), f"inline {format_bytes(limit_bytes)}")
    candidates = _measure_by_turns(run, _candidates(named, found, memory_bytes), plan.rounds, progress)
    chosen, reason = choose(candidates)
    return Tuned(
        place=place,
        min_bytes=recording.scope.min_bytes,
        candidates=candidates,
        chosen=chosen,
        found=found,
        reason=reason,
    )


def _try(run: Run, settings: TrialSettings | None) -> Recording:
    """One trial, and what it has left. Raises TrialFailedError, ConfigError."""
    with tempfile.TemporaryDirectory(prefix="tierstore-tune-") as name:
        folder = Path(name)
        run(settings, folder)
        return read_recording(folder)


def _saved_bytes(workload: Workload) -> int:
    """Of one step, views once."""
    return sum(saved.nbytes for saved in workload.saved if saved.record is None)


def _inline_limits(workload: Workload, has_bytes: int | None) -> list[int]:
    """Other values of `inline_bytes` that are worth a trial: nothing in LMDB, and everything that is small.

    None where hardly a byte is in records that they would move. The simulator does not know LMDB, so it is not asked.
    """
    sizes = [saved.nbytes for saved in workload.saved if saved.record is None and not saved.is_shared]

    def inline(limit_bytes: int | None) -> int:
        most_bytes = _MOST_INLINE_BYTES if limit_bytes is None else min(limit_bytes, _MOST_INLINE_BYTES)
        return sum(size for size in sizes if size <= most_bytes)

    least_bytes = _LEAST_INLINE_SHARE * sum(sizes)
    return [limit for limit in (0, _MOST_INLINE_BYTES) if abs(inline(limit) - inline(has_bytes)) > least_bytes]


def _fitted(hardware: SimulatedHardware, workload: Workload, recording: Recording, seconds: float) -> SimulatedHardware:
    """The machine as the recorded steps show it, if that is found in half of the time.

    What training lost to the store in those steps is part of their compute already, so that little contention is found;
    it is what lets the predictions begin at what was measured.
    """
    if recording.num_ranks > 1:  # ranks that hold each other up are not what is fitted
        return hardware
    settings, began_at = recording.settings.simulated, time.monotonic()
    try:
        steady_seconds(workload, hardware, settings)
        if (time.monotonic() - began_at) * _NUM_SIMULATED_FOR_FIT > seconds / 2:
            return hardware
        return fit(hardware, [Observation(workload, settings, recording.step_seconds)])
    except StoreFullError:  # on the machine that was described, which may not be this one
        return hardware


def _search(
    workload: Workload,
    described: Hardware,
    recording: Recording,
    known: Sequence[TrialSettings],
    memory_bytes: int,
    seconds: float,
    progress: Progress,
) -> Found:
    """What the simulator finds, from the first of what is known."""
    progress("simulating", 0)
    machine = _fitted(hardware_of(described, kinds=_kinds(workload)), workload, recording, seconds)
    simulated = _Simulated(workload, machine, recording.num_ranks, progress)
    ends_at = time.monotonic() + seconds
    space = Space(memory_bytes, _saved_bytes(workload))
    found = search(space, known, simulated.predict, lambda: time.monotonic() < ends_at)
    progress("simulating", len(found.predicted), len(found.predicted))
    return found


class _Simulated:
    """Predicts the steps of a workload on a machine, as the last of several."""

    def __init__(self, workload: Workload, hardware: SimulatedHardware, num_ranks: int, progress: Progress) -> None:
        self._workload = workload
        self._hardware = hardware
        self._num_ranks = num_ranks
        self._progress = progress
        self._num_done = 0

    def predict(self, settings: TrialSettings) -> float | None:
        """See `search.Predict`."""
        self._num_done += 1
        self._progress("simulating", self._num_done)
        try:
            ranks = simulate(
                self._workload,
                self._hardware,
                settings.simulated,
                num_steps=_NUM_SIMULATED_STEPS,
                num_ranks=self._num_ranks,
            )
        except StoreFullError:
            return None
        return ranks[0][-1].seconds


def _kinds(workload: Workload) -> Mapping[str, str]:
    """The sample data whose codec speeds stand for each kind of content; of others nothing is known."""
    samples = {
        "bfloat16": "activations, bfloat16",
        "float16": "activations, bfloat16",
        "float32": "activations, float32",
        "bool": "masks",
    }
    contents = {"many zeros": "relu outputs", "all zeros": "zeros"}
    found = {}
    for kind in {saved.kind for saved in workload.saved}:
        dtype, _, content = kind.partition(", ")
        if (data := contents.get(content, samples.get(dtype))) is not None:
            found[kind] = data
    return found


def _candidates(named: Mapping[TrialSettings, str], found: Found, memory_bytes: int) -> list[Candidate]:
    """Not measured yet."""
    return [
        Candidate(name, settings, found.predicted.get(settings), (), settings.memory_bytes <= memory_bytes)
        for settings, name in named.items()
    ]


def _measure_by_turns(run: Run, candidates: list[Candidate], rounds: int, progress: Progress) -> list[Candidate]:
    """Every candidate once in each round; each round begins with another, so that none is always behind the same."""
    places, total = range(len(candidates)), rounds * len(candidates)
    for number in range(rounds):
        first = number % len(candidates)
        for done, place in enumerate((*places[first:], *places[:first]), number * len(candidates)):
            progress("measuring", done, total, candidates[place].name)
            candidates[place] = _measured_once(run, candidates[place])
    progress("measuring", total, total)
    reference = next(each for each in candidates if each.is_allowed)
    if reference.failure is not None:
        raise TrialFailedError(f"the settings to compare with failed: {reference.failure}")
    return candidates


def _measured_once(run: Run, candidate: Candidate) -> Candidate:
    """With one round more. What fails once is not tried again."""
    if candidate.failure is not None:
        return candidate
    try:
        recording = _try(run, candidate.settings)
    except TrialFailedError as error:
        return replace(candidate, failure=str(error))
    return replace(candidate, step_seconds=(*candidate.step_seconds, recording.step_seconds))
