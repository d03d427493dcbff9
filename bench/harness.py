"""Runs one benchmark: every variant in a fresh process, variants interleaved, a line of JSON for each run.

A benchmark is a module with a `BENCHMARK` and a function `measure(variant, scratch)` that returns its figures.
The unit ends a figure's name. `python -m bench.NAME --variant V --scratch DIR` measures one
variant once and prints its figures as JSON; everything else is built from such runs. Variants that have to be compared
more closely than runs allow, one after the other, share a process: its name is the argument then, and the figures of
each of them are returned, by variant. What only all runs together tell, `conclude` finds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from tierstore.disk.native import SWITCH as NATIVE_SWITCH

from .goals import Goal
from .machine import describe_machine, describe_versions

__all__ = [
    "RESULTS",
    "Benchmark",
    "Record",
    "Results",
    "main_of_one_variant",
    "processes_of",
    "read_results",
    "run_benchmark",
]

RESULTS = Path(__file__).parent / "results"
Figures = dict[str, float]


@dataclass(frozen=True)
class Benchmark:
    """One question.

    Attributes:
        name: of its file of results, and of its module in this package.
        question: in one line.
        variants: what is compared; the first is what the others are compared with.
        processes: which variants take turns in one process, by its name; the others have one each, of their own name.
        rounds: how often each variant runs.
        at_once: so many processes run side by side: where bytes count, and time does not.
        compare: how a figure stands to the first variant's: as a ratio, as a difference, or not at all.
        settings: what was fixed, for the record.
        environment: variables that a process gets beside the usual ones.
        goals: what is asked of the figures.
        plotted: the figures that the plot shows; None: the first four.
        scatter: two figures that the plot shows instead, one against the other, a dot for each variant that has both.
        timeout_seconds: a run that takes longer has failed.
        conclude: told all runs, and the folder of `scratch`es, in which they may have left files; gives figures of
            variants that no process measures (`concluded`), or more of the others.
        concluded: those variants.
        module: where `measure` is; "": `bench.NAME`.
        plot: the module whose `draw` makes the plot.
    """

    name: str
    question: str
    variants: Sequence[str]
    processes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rounds: int = 3
    at_once: int = 1
    compare: Literal["ratio", "difference", "none"] = "ratio"
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    goals: Sequence[Goal] = ()
    plotted: Sequence[str] | None = None
    scatter: tuple[str, str] | None = None
    timeout_seconds: float = 300
    conclude: Callable[[Sequence[Record], Path], Mapping[str, Figures]] | None = None
    concluded: Sequence[str] = ()
    module: str = ""
    plot: str = "bench.plots"


@dataclass(frozen=True)
class Record:
    """One run of one variant: its figures, or why there are none. What was concluded counts as a round after the last.

    Attributes:
        seconds: from the start of its process to its end, divided by the variants that shared it and by the processes
            that ran side by side; None: not noted (results of earlier versions).
    """

    variant: str
    round: int
    figures: Figures | None
    failure: str | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Results:
    """All runs of one benchmark, and what they ran on."""

    records: Sequence[Record]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]


def main_of_one_variant(measure: Callable[[str, Path], Figures | dict[str, Figures]]) -> None:
    """The fresh process: measure one variant, or those that share it; prints figures as the last line.

    The optional threads in C are off, as where they are not installed, unless the environment or a variant says more.
    """
    os.environ.setdefault(NATIVE_SWITCH, "0")
    parser = argparse.ArgumentParser(description="Measure one variant once. `python -m bench` runs the comparison.")
    parser.add_argument("--variant", required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.variant, arguments.scratch)))


def run_benchmark(
    benchmark: Benchmark,
    directory: Path,
    rounds: int | None,
    progress: Callable[[str], None],
    results: Path = RESULTS,
) -> None:
    """Run every variant in every round and write `NAME.jsonl`; blocks until it is done.

    Args:
        directory: on the disk to be measured.
        rounds: instead of the benchmark's own number.
        progress: told what runs next.
        results: where to write.
    """
    about = {
        "benchmark": benchmark.name,
        "settings": dict(benchmark.settings),
        "machine": describe_machine(directory),
        "versions": describe_versions(),
    }
    results.mkdir(exist_ok=True)
    with (
        open(results / f"{benchmark.name}.jsonl", "w") as lines,
        tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=directory) as folder,
    ):
        for record in _runs(benchmark, rounds or benchmark.rounds, Path(folder), progress):
            print(json.dumps(vars(record) | about), file=lines, flush=True)


def _runs(benchmark: Benchmark, rounds: int, folder: Path, progress: Callable[[str], None]) -> Iterator[Record]:
    records = []

    def run(number: int, process: str) -> list[Record]:
        progress(f"{benchmark.name}, round {number}: {process}")
        started = time.monotonic()
        found = _run_fresh(benchmark, process, number, folder)
        seconds = (time.monotonic() - started) / len(found) / benchmark.at_once
        return [replace(record, seconds=round(seconds, 2)) for record in found]

    with ThreadPoolExecutor(benchmark.at_once) as runs:
        for found in runs.map(run, *zip(*_interleaved(processes_of(benchmark), rounds), strict=True)):
            records += found
            yield from found
    if benchmark.conclude is not None:
        for variant, figures in benchmark.conclude(records, folder).items():
            yield Record(variant, rounds + 1, figures)


def read_results(name: str, directory: Path = RESULTS) -> Results | None:
    """What the last run of a benchmark wrote; None if there is nothing."""
    file = directory / f"{name}.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if not lines:
        return None
    names = [each.name for each in fields(Record)]
    records = [Record(**{name: line[name] for name in names if name in line}) for line in lines]
    return Results(records, lines[-1]["machine"], lines[-1]["versions"])


def processes_of(benchmark: Benchmark) -> list[str]:
    """The processes of a round: those that several variants share, then one for each of the others."""
    others = {variant for variants in benchmark.processes.values() for variant in variants} | set(benchmark.concluded)
    return [*benchmark.processes, *(variant for variant in benchmark.variants if variant not in others)]


def _interleaved(variants: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Each round starts with another variant, so that none always runs after the same neighbour."""
    for number in range(rounds):
        start = number % len(variants)
        for variant in (*variants[start:], *variants[:start]):
            yield number + 1, variant


def _run_fresh(benchmark: Benchmark, process: str, number: int, folder: Path) -> list[Record]:
    variants = benchmark.processes.get(process, (process,))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        module = benchmark.module or f"bench.{benchmark.name}"
        command = [sys.executable, "-m", module, "--variant", process, "--scratch", scratch]
        environment = os.environ | benchmark.environment.get(process, {})
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                env=environment,
                timeout=benchmark.timeout_seconds,
            )
        except subprocess.TimeoutExpired:
            failure = f"not done within {benchmark.timeout_seconds:g} s"
            return [Record(variant, number, None, failure) for variant in variants]
    if done.returncode == 0:
        figures = json.loads(done.stdout.splitlines()[-1])
        by_variant = figures if process in benchmark.processes else {process: figures}
        return [Record(variant, number, by_variant[variant]) for variant in variants]
    last_words = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
    failure = f"exit code {done.returncode}: {last_words[0]}"
    return [Record(variant, number, None, failure) for variant in variants]
