"""Runs one benchmark: every variant in a fresh process, variants interleaved, medians with their spread.

A benchmark is a module with a `BENCHMARK` and a function `measure(variant, scratch)` that returns its figures.
The unit ends a figure's name. `python -m bench.NAME --variant V --scratch DIR` measures one
variant once and prints its figures as JSON; everything else is built from such runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from .machine import describe_machine, describe_versions

__all__ = ["Benchmark", "Record", "main_of_one_variant", "run_benchmark", "show"]

RESULTS = Path(__file__).parent / "results"
Figures = dict[str, float]
_UNITS = {
    "_gb_per_second": "GB/s",
    "_cpu_seconds_per_gb": "CPU s/GB",
    "_microseconds": "µs",
    "_seconds": "s",
    "_bytes": "MiB",
}


@dataclass(frozen=True)
class Benchmark:
    """One question.

    Attributes:
        name: of its module and of its file of results.
        question: in one line.
        variants: what is compared; the first is what the others are compared with.
        rounds: how often each variant runs.
        compare: how a figure stands to the first variant's: as a ratio, or as a difference.
        settings: what was fixed, for the record.
        environment: variables that a variant's process gets beside the usual ones.
    """

    name: str
    question: str
    variants: Sequence[str]
    rounds: int = 3
    compare: Literal["ratio", "difference"] = "ratio"
    settings: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """One run of one variant: its figures, or why there are none."""

    variant: str
    round: int
    figures: Figures | None
    failure: str | None = None


def main_of_one_variant(measure: Callable[[str, Path], Figures]) -> None:
    """The fresh process: measure one variant, print its figures as the last line of standard output."""
    parser = argparse.ArgumentParser(description="Measure one variant once. `python -m bench` runs the comparison.")
    parser.add_argument("--variant", required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.variant, arguments.scratch)))


def run_benchmark(
    benchmark: Benchmark, directory: Path, rounds: int | None, progress: Callable[[str], None]
) -> list[Record]:
    """Run every variant in every round and write `results/NAME.jsonl`; blocks until it is done.

    Args:
        directory: on the disk to be measured.
        rounds: instead of the benchmark's own number.
        progress: told what runs next.
    """
    records = []
    about = {
        "benchmark": benchmark.name,
        "settings": dict(benchmark.settings),
        "machine": describe_machine(directory),
        "versions": describe_versions(),
    }
    RESULTS.mkdir(exist_ok=True)
    with open(RESULTS / f"{benchmark.name}.jsonl", "w") as lines:
        for number, variant in _interleaved(benchmark.variants, rounds or benchmark.rounds):
            progress(f"{benchmark.name}, round {number}: {variant}")
            records.append(record := _run_fresh(benchmark, variant, number, directory))
            print(json.dumps(vars(record) | about), file=lines, flush=True)
    return records


def _interleaved(variants: Sequence[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Each round starts with another variant, so that none always runs after the same neighbour."""
    for number in range(rounds):
        start = number % len(variants)
        for variant in (*variants[start:], *variants[:start]):
            yield number + 1, variant


def _run_fresh(benchmark: Benchmark, variant: str, number: int, directory: Path) -> Record:
    with tempfile.TemporaryDirectory(prefix="tierstore-bench-", dir=directory) as scratch:
        command = [sys.executable, "-m", f"bench.{benchmark.name}", "--variant", variant, "--scratch", scratch]
        environment = os.environ | benchmark.environment.get(variant, {})
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode == 0:
        return Record(variant, number, json.loads(done.stdout.splitlines()[-1]))
    last_words = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
    return Record(variant, number, None, f"exit code {done.returncode}: {last_words[0]}")


def show(benchmark: Benchmark, records: Sequence[Record], console: Console) -> None:
    """Print each figure's median, how it stands to the first variant's, and its spread; failures by themselves."""
    by_variant = {
        variant: [r.figures for r in records if r.variant == variant and r.figures is not None]
        for variant in benchmark.variants
    }
    names = list(next((runs[0] for runs in by_variant.values() if runs), {}))
    baseline = by_variant[benchmark.variants[0]]
    table = Table(title=benchmark.question, caption="median, beside the first line; least to most", show_lines=True)
    table.add_column(min_width=12)
    for name in names:
        table.add_column(_heading(name), justify="right")
    for variant, runs in by_variant.items():
        table.add_row(variant, *(_cell(name, runs, baseline, benchmark.compare) for name in names))
    console.print(table)
    for record in records:
        if record.failure is not None:
            text = f"{record.variant}, round {record.round}: {record.failure}"
            console.print(text, style="red", markup=False, highlight=False)


def _heading(name: str) -> str:
    """The figure and, on a line of its own, its unit."""
    for suffix, unit in _UNITS.items():
        if name.endswith(suffix):
            return f"{name.removesuffix(suffix).replace('_', ' ')}\n{unit}"
    return name.replace("_", " ")


def _cell(name: str, runs: Sequence[Figures], baseline: Sequence[Figures], compare: str) -> str:
    if not runs:
        return "failed"
    values = [run[name] / (2**20 if name.endswith("_bytes") else 1) for run in runs]
    median = statistics.median(run[name] for run in runs)
    text = _short(statistics.median(values))
    if baseline and runs is not baseline:
        first = statistics.median(run[name] for run in baseline)
        text += f" {median - first:+.1f}" if compare == "difference" else f" x{median / first:.2f}"
    return f"{text}\n{_short(min(values))} to {_short(max(values))}"


def _short(value: float) -> str:
    """Three digits, or all those before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
