"""Finds settings: one trial is recorded, many settings are simulated, and a few are measured in turn.

Start here. A *trial* is a run of some steps with given settings, of a program (`program.py`) or of a loop (`loop.py`);
it leaves traces, and everything about it is read from them (`recording.py`)."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ..base.config import check_directory
from ..base.interrupts import interrupts_held_back
from ..errors import ConfigError, StoreFullError
from ..simulator import CodecSpeed, Drive, Hardware, simulate
from ..simulator.hardware import CALL_SECONDS_PER_RECORD, CPU_SECONDS_PER_RECORD
from .codecs import sample_data_of_kind
from .examine import examine
from .measurements import Measurements
from .program import TrialFailedError
from .recording import ProgramRecording, read_recording
from .search import Found, Space, search
from .settings import TrialSettings, default_settings
from .tuned import AS_IT_IS, Candidate, Tuned, choose

_NUM_SIMULATED_STEPS = 3
_MACHINE_SECONDS = 10.0
"""Enough for the speeds that a simulation needs."""
_SEARCH_SECONDS = 60.0
"""The most for all simulations together."""

Run = Callable[[TrialSettings | None, Path], None]
"""Runs a trial with these settings, or (None) with the program's own, traced to the folder. Blocks.

Raises TrialFailedError, and ConfigError where no trial can be run at all."""


def tune(
    run: Run,
    machine: Measurements | None,
    say: Callable[[str], None],
    *,
    host_bytes: int | None = None,
    rounds: int = 5,
    num_found: int = 4,
) -> Tuned:
    """Find settings. Blocks for minutes; an interrupt ends the trial that runs, and leaves nothing behind.

    Args:
        machine: as measured; None: it is measured.
        say: called with lines that tell what begins.
        host_bytes: the most that `host_bytes` and `staging_bytes` may be together; None: as the program has them.
        rounds: how often each candidate is measured.
        num_found: number of candidates from the simulator.

    Raises:
        ConfigError: the limit cannot be kept, the recorded trial cannot be tuned, or the drive cannot be measured.
        TrialFailedError: the recorded trial failed, or the reference did.
    """
    if host_bytes is not None:
        default_settings(host_bytes)  # refused before minutes of work rather than after
    if machine is not None:
        hardware_of(machine)  # likewise
    say("recording the program ...")
    recording = _try(run, None)
    settings, scope = recording.settings, recording.scope
    place = os.path.abspath(recording.trace.header.store.place)
    memory_bytes = settings.memory_bytes if host_bytes is None else host_bytes
    defaults = default_settings(memory_bytes)
    known = [settings, defaults] if settings.memory_bytes <= memory_bytes else [defaults]
    if machine is None:
        check_directory(place)
        say(f"measuring the machine for {_MACHINE_SECONDS:g} s ...")
        machine = examine(Path(place), None, _MACHINE_SECONDS)
    found = _search(recording, machine, known, memory_bytes, say)
    named = {settings: "defaults" if settings == defaults else AS_IT_IS}
    named.setdefault(defaults, "defaults")
    for number, each in enumerate(found.best(num_found), 1):
        named.setdefault(each, f"found {number}")
    candidates = [
        Candidate(name, each, found.predicted.get(each), (), each.memory_bytes <= memory_bytes)
        for each, name in named.items()
    ]
    chosen, reason = choose(_measure_by_turns(run, candidates, rounds, say))
    of_scope = {"min_bytes": scope.min_bytes, "device_bytes": "auto" if scope.is_automatic else scope.device_bytes}
    return Tuned(place, of_scope, candidates, chosen, found, reason)


def hardware_of(machine: Measurements, kinds: Iterable[str] | None = None) -> Hardware:
    """The machine, to simulate it. `kinds`: of content, for which codecs have figures; None: all have the first ones.

    Checksum and system call are taken to cost as much as a copy of the bytes, an upper bound. Raises ConfigError: the
    drive was not measured."""
    drive = machine.drive
    if drive.write_latency_seconds is None or drive.read_latency_seconds is None or not (drive.writes and drive.reads):
        raise ConfigError("hardware", drive.path, f"its drive could not be measured: {drive.error or 'it is full'}")
    data_of = {"": None} if kinds is None else {kind: sample_data_of_kind(kind) for kind in kinds}
    codecs: dict[tuple[str, str], CodecSpeed] = {}
    for speed in machine.codecs:
        for kind, data in data_of.items():
            if data in (None, speed.data):
                codecs.setdefault((kind, speed.codec), speed)
    return Hardware(
        Drive(
            {each.depth: each.bytes_per_second for each in drive.writes},
            {each.depth: each.bytes_per_second for each in drive.reads},
            drive.write_latency_seconds,
            drive.read_latency_seconds,
            drive.free_bytes,
        ),
        machine.processor.usable_cores,
        codecs,
        cpu_seconds_per_record=CPU_SECONDS_PER_RECORD,
        cpu_seconds_per_byte=1 / machine.memory.copy_bytes_per_second,
        call_seconds_per_record=CALL_SECONDS_PER_RECORD,
    )


def _search(
    recording: ProgramRecording,
    machine: Measurements,
    known: Sequence[TrialSettings],
    memory_bytes: int,
    say: Callable[[str], None],
) -> Found:
    workload, ends_at = recording.workload(), time.monotonic() + _SEARCH_SECONDS
    hardware = hardware_of(machine, {saved.kind for saved in workload.saved})
    say(f"simulating settings for {_SEARCH_SECONDS:g} s at most ...")

    def predicted(settings: TrialSettings) -> float | None:
        """The last of some steps; None: it would fail."""
        how, num_ranks = settings.simulated, recording.num_ranks
        try:
            ranks = simulate(workload, hardware, how, num_steps=_NUM_SIMULATED_STEPS, num_ranks=num_ranks)
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
