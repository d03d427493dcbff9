"""`python -m bench.gpu`: the tests marked `gpu`, then the benchmarks, within a budget of time."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.harness import RESULTS
from bench.machine import describe_machine, describe_versions
from tierstore.base.interrupts import ended_by_signals
from tierstore.demo.place import store_directory
from tierstore.ledger.device_window import FLIGHT_BYTES, RELOAD_BYTES

from .cases import CASES, TINY_CASES, Case
from .runner import Budget, Outcome, run_cases, run_tests
from .targets import Verdict, verdicts

_TESTS = ("tests/gpu", "tests/hooks/test_operators.py")
_TESTS_SHARE = 0.4
"""Of the budget, at most."""
_WRITING_SHARE = 0.04
"""Of the time, for what comes after the last run, and before the first: 20 s of 520."""


def main(words: list[str] | None = None) -> int:
    """Returns 1 if a test or a run failed; a goal that was missed is a result like any other."""
    arguments = _arguments(words)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no CUDA device; --tiny --device cpu tries the benchmarks out on the CPU", file=sys.stderr)
        return 2
    budget = Budget((1 - _WRITING_SHARE) * arguments.seconds)
    tests: dict[str, str] = {}
    if arguments.device == "cuda" and not arguments.no_tests:
        tests = run_tests(_TESTS, budget, _TESTS_SHARE * arguments.seconds)
        for path, ended in tests.items():
            print(f"{path}: {ended}", flush=True)
    request = {"device": arguments.device, "steps": 2 if arguments.tiny else arguments.steps, "tiny": arguments.tiny}
    directory = store_directory(arguments.path)
    about = {"tests": tests, "machine": describe_machine(directory), "request": request}

    def progress(text: str, outcome: Outcome) -> None:
        print(text, flush=True)
        _write(outcome, [], about, arguments.results)  # what comes after may be cut off

    outcome = run_cases(
        _chosen(TINY_CASES if arguments.tiny else CASES, arguments.only),
        budget,
        request,
        directory,
        progress,
    )
    judged = [] if arguments.tiny else list(verdicts(outcome.found, FLIGHT_BYTES + RELOAD_BYTES))
    for verdict in judged:
        print(f"{'met' if verdict.is_met else 'missed'}: {verdict.goal}: {verdict.value:.4g} <= {verdict.at_most:.4g}")
    file = _write(outcome, judged, about, arguments.results)
    print(f"written: {file}")
    try:
        from .plots import draw
    except ImportError:
        print("no plot: matplotlib is not installed")
    else:
        draw(outcome.found, json.loads(file.read_text())["device"], file.with_suffix(".png"))
    passed = all(ended == "passed" for ended in tests.values())
    return int(not passed or any(run.failure is not None for run in outcome.runs))


def _arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models: does everything run?")
    parser.add_argument("--seconds", type=float, default=520, help="for all of it; what it is too short for is named")
    parser.add_argument("--steps", type=int, default=5, help="that are measured of each variant, after two others")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="cases with TEXT in their names, and what they need"
    )
    parser.add_argument("--no-tests", action="store_true", help="the benchmarks alone")
    parser.add_argument("--path", help="a directory on the disk to measure; a temporary one by default")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write")
    arguments = parser.parse_args(words)
    if arguments.steps < 1 or arguments.seconds <= 0:
        parser.error("--steps and --seconds: give more than 0")
    return arguments


def _chosen(cases: Sequence[Case], texts: Sequence[str]) -> list[Case]:
    """Those with one of the texts in their names, and the plain steps and the floors that their options come from."""
    chosen = [case for case in cases if not texts or any(text in case.name for text in texts)]
    workloads = {case.workload for case in chosen}
    return [
        case for case in cases
        if case in chosen or case.workload == "floors" or (case.variant == "none" and case.workload in workloads)
    ]  # fmt: skip


def _write(outcome: Outcome, judged: list[Verdict], about: dict[str, Any], directory: Path) -> Path:
    floors = outcome.found.get("floors", {})
    device = str(floors.get("device", "unknown device"))
    name = f"gpu_{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}_{time.strftime('%Y-%m-%d', time.gmtime())}"
    document = about | {
        "device": device,
        "versions": describe_versions() | {"cuda": torch.version.cuda},
        "runs": [run._asdict() for run in outcome.runs],
        "left_out": outcome.left_out,
        "goals": [verdict._asdict() | {"met": verdict.is_met} for verdict in judged],
    }
    directory.mkdir(exist_ok=True)
    file = directory / f"{name}.json"
    file.write_text(json.dumps(document, indent=1) + "\n")
    return file


if __name__ == "__main__":
    with ended_by_signals():
        sys.exit(main())
