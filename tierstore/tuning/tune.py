"""Finds settings: one trial is recorded, a dozen settings are tried once each, and the best are measured by turns.

Start here. A *trial* is a run of some steps with given settings, of a program (`program.py`) or of a loop (`loop.py`);
it leaves traces, and everything about it is read from them (`recording.py`)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

from ..base.interrupts import interrupts_held_back
from .program import TrialFailedError
from .recording import ProgramRecording, read_recording
from .settings import TrialSettings, default_settings, settings_to_try
from .tuned import AS_IT_IS, Candidate, Tuned, choose

Run = Callable[[TrialSettings | None, Path], None]
"""Runs a trial with these settings, or (None) with the program's own, traced to the folder. Blocks.

Raises TrialFailedError, and ConfigError where no trial can be run at all."""
Say = Callable[[str], None]


def tune(run: Run, say: Say, *, host_bytes: int | None = None, rounds: int = 5, num_found: int = 4) -> Tuned:
    """Find settings. Blocks for minutes; an interrupt ends the trial that runs, and leaves nothing behind.

    Args:
        say: called with lines that tell what begins.
        host_bytes: the most that `host_bytes` and `staging_bytes` may be together; None: as the program has them.
        rounds: how often each candidate is measured at most.
        num_found: how many of the settings that were tried become candidates: the fastest.

    Raises:
        ConfigError: the limit cannot be kept, or the recorded trial cannot be tuned.
        TrialFailedError: the recorded trial failed, or the reference did.
    """
    if host_bytes is not None:
        default_settings(host_bytes)  # refused before minutes of work rather than after
    say("recording the program ...")
    recording = _try(run, None)
    own, scope = recording.settings, recording.scope
    memory_bytes = own.memory_bytes if host_bytes is None else host_bytes
    defaults = default_settings(memory_bytes)
    known = {own: AS_IT_IS} | {defaults: "defaults"}
    candidates = [Candidate(name, each, is_allowed=each.memory_bytes <= memory_bytes) for each, name in known.items()]
    candidates[0] = replace(candidates[0], first_seconds=recording.step_seconds)
    start = own if candidates[0].is_allowed else defaults
    untried = [each for each in settings_to_try(start, memory_bytes) if each not in known]
    tried = [_tried_once(run, number, each, len(untried), say) for number, each in enumerate(untried, 1)]
    fastest = sorted((each for each in tried if each.failure is None), key=attrgetter("first_seconds"))[:num_found]
    candidates += [replace(each, name=f"found {number}") for number, each in enumerate(fastest, 1)]
    candidates = _measure_by_turns(run, candidates, rounds, say)
    chosen, reason = choose(candidates)
    place = os.path.abspath(recording.trace.header.store.place)
    of_scope = {"min_bytes": scope.min_bytes, "device_bytes": "auto" if scope.is_automatic else scope.device_bytes}
    return Tuned(place, of_scope, candidates, chosen, tried, reason)


# --- trials -----------------------------------------------------------------------------------------------------------


def _try(run: Run, settings: TrialSettings | None) -> ProgramRecording:
    folder = tempfile.TemporaryDirectory(prefix="tierstore-tune-")
    try:
        run(settings, Path(folder.name))
        return read_recording(Path(folder.name))
    finally:
        with interrupts_held_back():  # even a second Ctrl-C leaves nothing
            folder.cleanup()


def _tried_once(run: Run, number: int, settings: TrialSettings, num_tried: int, say: Say) -> Candidate:
    say(f"trying settings {number} of {num_tried} ...")
    tried = _measured_once(run, Candidate(f"tried {number}", settings))
    return replace(tried, first_seconds=tried.median_seconds, step_seconds=())


def _measure_by_turns(run: Run, candidates: list[Candidate], rounds: int, say: Say) -> list[Candidate]:
    """Measure the candidates once in each round. Each round begins with another one, so none is always the first. What
    was slower than the reference in one round cannot be chosen any more (`choose`): it is measured no further."""
    reference = next(place for place, each in enumerate(candidates) if each.is_allowed)
    racing = list(range(len(candidates)))
    for number in range(rounds):
        first = number % len(racing)
        for place in (*racing[first:], *racing[:first]):
            say(f"round {number + 1} of {rounds}: {candidates[place].label}")
            candidates[place] = _measured_once(run, candidates[place])
        compared = candidates[reference]
        if compared.failure is not None:
            raise TrialFailedError(f"the settings to compare with failed: {compared.failure}")
        racing = [place for place in racing if place == reference or candidates[place].is_ahead_of(compared)]
        if len(racing) == 1:
            break
    return candidates


def _measured_once(run: Run, candidate: Candidate) -> Candidate:
    try:
        step_seconds = _try(run, candidate.settings).step_seconds
    except TrialFailedError as error:
        return replace(candidate, failure=str(error))
    return replace(candidate, step_seconds=(*candidate.step_seconds, step_seconds))
