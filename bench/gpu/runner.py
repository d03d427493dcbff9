"""Runs the cases within a budget of time, and the tests before them; each in a process of its own."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.child import answer_of, call, command

from .cases import Case, CaseLeftOutError, Found
from .workloads import WORKLOADS, fitting_batch

_PATIENCE = 3
"""A run may take so many times what it is expected to, while there is time."""
_CUT_SHORT = "the time for all runs was over"


class Budget:
    def __init__(self, seconds: float) -> None:
        self._ends_at = time.monotonic() + seconds

    @property
    def left_seconds(self) -> float:
        return max(0.0, self._ends_at - time.monotonic())


class CaseRun(NamedTuple):
    case: str
    options: dict[str, Any]
    seconds: float
    figures: dict[str, Any] | None
    failure: str | None


class Outcome(NamedTuple):
    runs: list[CaseRun]
    left_out: dict[str, str]

    @property
    def found(self) -> dict[str, dict[str, Any]]:
        return {run.case: run.figures for run in self.runs if run.figures is not None}


def run_tests(paths: Sequence[str], budget: Budget, limit_seconds: float) -> dict[str, str]:
    """Run those marked `gpu` of each path, one after the other; how each ended, in words. Their output is shown."""
    tests = Budget(min(limit_seconds, budget.left_seconds))
    ended = {}
    for path in paths:
        given_seconds = tests.left_seconds
        done = call([sys.executable, "-m", "pytest", "-q", "-m", "gpu", path], given_seconds, capture=False)
        if done is None:
            ended[path] = f"not through after {given_seconds:.0f} s"
        else:
            ended[path] = "passed" if done.returncode == 0 else f"pytest ended with {done.returncode}"
    return ended


def run_cases(
    cases: Sequence[Case],
    budget: Budget,
    request: dict[str, Any],
    directory: Path,
    progress: Callable[[str, Outcome], None],
) -> Outcome:
    """Run one case after another, on the disk of `directory`; those that time is too short for are left out, and named.

    `request`: what every run is told: device, steps, whether it is tiny; beside it, a batch that fits. `progress`: told
    each run in words, with what was measured so far.
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
        more = {} if case.num_steps is None or request["tiny"] else {"steps": case.num_steps}
        run = _run(case, options, budget, request | more | _batch_of(case, outcome.found), directory)
        if (why := _not_measured(case, run)) is not None:
            outcome.left_out[case.name] = why
            continue
        outcome.runs.append(run)
        progress(f"{case.name}: {run.failure or _in_short(run.figures or {})} ({run.seconds:.0f} s)", outcome)
    for name, why in outcome.left_out.items():
        progress(f"{name}: left out, {why}", outcome)
    return outcome


def _batch_of(case: Case, found: Found) -> dict[str, int]:
    if case.workload not in WORKLOADS:
        return {}
    batch = fitting_batch(case.workload, found.get("floors", {}).get("free_bytes"))
    return {} if batch is None else {"batch": batch}


def _not_measured(case: Case, run: CaseRun) -> str | None:
    """Why a run that has no figures says nothing of the store; None: it has some, or it is the store that failed."""
    if run.failure is None:
        return None
    if run.failure == _CUT_SHORT:
        return f"no time: it was ended after {run.seconds:.0f} s, when none was left"
    if case.variant == "none" and "OutOfMemoryError" in run.failure:
        return "it does not fit into the device's memory without offloading"
    if not case.variant.startswith("tierstore"):  # others' code
        return f"not measured: the peer failed, {run.failure}"
    return None


def _run(case: Case, options: dict[str, Any], budget: Budget, request: dict[str, Any], directory: Path) -> CaseRun:
    own_seconds, left_seconds = _PATIENCE * case.expected_seconds, budget.left_seconds
    limit_seconds = min(own_seconds, left_seconds)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tierstore-gpu-", dir=directory) as scratch:
        about = {"workload": case.workload, "variant": case.variant, "options": options, "scratch": scratch}
        figures, failure = answer_of(command("bench.gpu.one", "measure", request | about), limit_seconds)
    if failure is not None and failure.startswith("not done") and left_seconds < own_seconds:
        failure = _CUT_SHORT
    return CaseRun(case.name, options, time.monotonic() - began, figures, failure)


def _in_short(figures: dict[str, Any]) -> str:
    if "step_seconds" in figures:
        step_ms, peak_mib = figures["step_seconds"] * 1000, figures["peak_bytes"] / 2**20
        return f"batch {figures['batch']}, step {step_ms:.0f} ms, peak {peak_mib:,.0f} MiB"
    return ", ".join(f"{name} {value:.3g}" for name, value in figures.items() if isinstance(value, float))
