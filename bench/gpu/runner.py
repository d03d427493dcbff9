"""Runs the cases within a budget of time, and the tests before them; each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .cases import Case, CaseLeftOutError

__all__ = ["Budget", "CaseRun", "Outcome", "run_cases", "run_tests"]

_PATIENCE = 3
"""A run may take so many times what it is expected to, while there is time."""


class Budget:
    """What is left of a time that began with it."""

    def __init__(self, seconds: float) -> None:
        self._ends_at = time.monotonic() + seconds

    @property
    def left_seconds(self) -> float:
        return max(0.0, self._ends_at - time.monotonic())


class CaseRun(NamedTuple):
    """What came of one: its figures, or why there are none."""

    case: str
    options: dict[str, Any]
    seconds: float
    figures: dict[str, Any] | None
    failure: str | None


class Outcome(NamedTuple):
    """All runs, and why each other case was left out."""

    runs: list[CaseRun]
    left_out: dict[str, str]

    @property
    def found(self) -> dict[str, dict[str, Any]]:
        """The figures by case."""
        return {run.case: run.figures for run in self.runs if run.figures is not None}


def run_tests(paths: Sequence[str], budget: Budget, limit_seconds: float) -> dict[str, str]:
    """Run those marked `gpu` of each path, one after the other; how each ended, in words. Their output is shown."""
    tests = Budget(min(limit_seconds, budget.left_seconds))
    ended = {}
    for path in paths:
        given_seconds = tests.left_seconds
        done = _call(["pytest", "-q", "-m", "gpu", path], given_seconds, capture=False)
        if done is None:
            ended[path] = f"not through after {given_seconds:.0f} s"
        else:
            ended[path] = "passed" if done.returncode == 0 else f"pytest ended with {done.returncode}"
    return ended


def _call(module: Sequence[str], limit_seconds: float, *, capture: bool) -> subprocess.CompletedProcess[str] | None:
    """Run a module in a process of its own; None: it did not end in time, and was killed with all that it started."""
    pipe = subprocess.PIPE if capture else None
    command = [sys.executable, "-m", *module]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            output, errors = process.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def run_cases(
    cases: Sequence[Case],
    budget: Budget,
    request: dict[str, Any],
    directory: Path,
    progress: Callable[[str], None],
) -> Outcome:
    """Run one case after another; those for which the time will not do are left out, and named.

    Args:
        request: what every run is told: device, steps, whether it is tiny.
        directory: on the disk to be measured.
        progress: told what happens.
    """
    outcome = Outcome([], {})
    for case in cases:
        try:
            options = case.options(outcome.found, case.workload) | ({"min_bytes": 0} if request["tiny"] else {})
        except CaseLeftOutError as error:
            outcome.left_out[case.name] = str(error)
            continue
        if case.expected_seconds > budget.left_seconds and not request["tiny"]:
            outcome.left_out[case.name] = (
                f"no time: {budget.left_seconds:.0f} s are left, it takes some {case.expected_seconds:.0f} s"
            )
            continue
        run = _run(case, options, min(_PATIENCE * case.expected_seconds, budget.left_seconds), request, directory)
        outcome.runs.append(run)
        progress(f"{case.name}: {run.failure or _in_short(run.figures or {})} ({run.seconds:.0f} s)")
    for name, why in outcome.left_out.items():
        progress(f"{name}: left out, {why}")
    return outcome


def _run(
    case: Case, options: dict[str, Any], limit_seconds: float, request: dict[str, Any], directory: Path
) -> CaseRun:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tierstore-gpu-", dir=directory) as scratch:
        about = {"workload": case.workload, "variant": case.variant, "options": options, "scratch": scratch}
        done = _call(["bench.gpu.one", json.dumps(request | about)], limit_seconds, capture=True)
    figures, failure = None, None
    if done is None:
        failure = f"not done within {limit_seconds:.0f} s"
    elif done.returncode == 0:
        figures = json.loads(done.stdout.splitlines()[-1])
    else:
        last_words = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        failure = f"exit code {done.returncode}: {last_words}"
    return CaseRun(case.name, options, time.monotonic() - began, figures, failure)


def _in_short(figures: dict[str, Any]) -> str:
    if "step_seconds" in figures:
        return f"step {figures['step_seconds'] * 1000:.0f} ms, peak {figures['peak_bytes'] / 2**20:,.0f} MiB"
    rates = (f"{name.removesuffix('_bytes_per_second')} {rate / 1e9:.1f}" for name, rate in figures.items()
             if name.endswith("_per_second"))  # fmt: skip
    return ", ".join(rates) + " GB/s"
