"""Runs one benchmark: every variant in a fresh process, variants interleaved, a line of JSON for each run.

A benchmark is a module with a `BENCHMARK` and a function `measure(variant, scratch)` that returns its figures. The unit
ends a figure's name. Variants that have to be compared more closely share a process: its name is the argument then, and
the figures of each of them are returned, by variant. What only all runs together tell, `conclude` finds.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from .child import answer_of, command
from .goals import Goal
from .machine import describe_machine, describe_versions

RESULTS = Path(__file__).parent / "results"
Figures = dict[str, float]


@dataclass(frozen=True)
class Benchmark:
    """One question.

    Attributes:
        name: of its file of results, and of its module in this package, unless `module` says where `measure` is.
        processes: which variants take turns in one process, by its name; the others have one each, of their own name.
        rounds: how often each variant runs.
        plotted: the figures that the plot shows; None: the first four.
        conclude: told all runs, and the folder of `scratch`es, in which they may have left files; gives figures of
            variants that no process measures (`concluded`), or more of the others.
    """

    name: str
    question: str
    variants: Sequence[str]
    processes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    rounds: int = 1
    goals: Sequence[Goal] = ()
    plotted: Sequence[str] | None = None
    timeout_seconds: float = 300
    conclude: Callable[[Sequence[Record], Path], Mapping[str, Figures]] | None = None
    concluded: Sequence[str] = ()
    module: str = ""


@dataclass(frozen=True)
class Record:
    """One run of one variant: its figures, or why there are none. What was concluded counts as a round after the last.

    `seconds`: from the start of its process to its end, divided by the variants that shared it; None: not noted.
    """

    variant: str
    round: int
    figures: Figures | None
    failure: str | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Results:
    records: Sequence[Record]
    machine: Mapping[str, Any]
    versions: Mapping[str, str]


def run_benchmark(
    benchmark: Benchmark,
    directory: Path,
    rounds: int | None,
    progress: Callable[[str], object],
    results: Path = RESULTS,
) -> None:
    """Run every variant in every round, on the disk of `directory`, and write `NAME.jsonl`; blocks until it is done."""
    about = {
        "benchmark": benchmark.name,
        "settings": settings_of(import_module(benchmark.module or f"bench.{benchmark.name}")),
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


def settings_of(module: ModuleType) -> dict[str, Any]:
    """What was fixed, for the record: the constants of a benchmark's module that JSON can hold."""
    found = {}
    for name, value in vars(module).items():
        with suppress(TypeError):
            if name.isupper() and name != "BENCHMARK" and not isinstance(value, str):
                found[name.lower()] = json.loads(json.dumps(value, default=asdict))
    return found


def _runs(benchmark: Benchmark, rounds: int, folder: Path, progress: Callable[[str], object]) -> Iterator[Record]:
    records = []
    for number, process in _interleaved(processes_of(benchmark), rounds):
        progress(f"{benchmark.name}, round {number}: {process}")
        started = time.monotonic()
        found = _run_fresh(benchmark, process, number, folder)
        seconds = round((time.monotonic() - started) / len(found), 2)
        for record in found:
            records.append(replace(record, seconds=seconds))
            yield records[-1]
    if benchmark.conclude is not None:
        for variant, figures in benchmark.conclude(records, folder).items():
            yield Record(variant, rounds + 1, figures)


def read_results(name: str, directory: Path = RESULTS) -> Results | None:
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
        words = command(benchmark.module or f"bench.{benchmark.name}", "measure", process, Path(scratch))
        found, failure = answer_of(words, benchmark.timeout_seconds)
    by_variant = found if process in benchmark.processes else {process: found}
    return [Record(variant, number, by_variant and by_variant[variant], failure) for variant in variants]
