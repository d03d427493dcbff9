"""`python -m bench [NAME ...]`: run the benchmarks, write `bench/results/`, print a table each and one of all goals."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from tierstore.base.interrupts import ended_by_signals
from tierstore.demo.place import store_directory
from tierstore.errors import ConfigError

from .harness import RESULTS, Benchmark, Results, read_results, run_benchmark
from .report import goals_as_markdown, show, show_goals, time_taken, verdicts_of

SUITE = (
    "pack_cost",
    "live_handles",
    "disk_throughput",
    "record_cost",
    "data_plane",
    "disk_layouts",
    "fragmentation",
    "prefetch",
    "large_tensors",
    "larger_than_memory",
    "two_drives",
    "steady_state",
    "training_step",
    "memory_limit",
    "freed_memory",
    "host_peak",
    "codec_choice",
    "sidecar_throughput",
    "sidecar_training",
    "many_ranks",
    "trace_cost",
    "trainers",
    "memory_plan",
)
TUNING = ("shared_pages", "simulator_accuracy", "io_depth", "prefetch_tuning", "tuned_settings", "lowest_limit")
"""As long again: those whose question is which settings are best."""
NAMES = SUITE + TUNING


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Run the benchmarks: tables, goals, plots.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(SUITE)}: all by default; {', '.join(TUNING)}"
    )
    parser.add_argument("--path", help="a directory on the disk to measure; a temporary one by default")
    parser.add_argument("--rounds", type=int, help="how often each variant runs; more than usual, or fewer")
    parser.add_argument("--quick", action="store_true", help="one round each: a first look")
    parser.add_argument("--plot", action="store_true", help="run nothing: tables and plots of the last run again")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the lines, goals and plots go")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    rounds = 1 if arguments.quick else arguments.rounds
    if rounds is not None and rounds < 1:
        parser.error("--rounds: give 1 or more")
    benchmarks = [load(name) for name in arguments.names or SUITE]
    console = Console(width=None if sys.stdout.isatty() else 140)
    if arguments.plot:
        return conclude(benchmarks, console, show_each=True, directory=arguments.results)
    try:
        run_all(benchmarks, arguments.path, rounds, console, arguments.results)
    except ConfigError as error:
        parser.error(str(error))
    return conclude(benchmarks, console, show_each=False, directory=arguments.results)


def load(name: str) -> Benchmark:
    """The benchmark of that name."""
    return import_module(f"bench.{name}").BENCHMARK


def run_all(
    benchmarks: Sequence[Benchmark], path: str | None, rounds: int | None, console: Console, directory: Path = RESULTS
) -> None:
    """Run them, and print the table of each as soon as it is there."""
    place = store_directory(path)
    for benchmark in benchmarks:
        with console.status("") as status:
            run_benchmark(benchmark, place, rounds, status.update, directory)
        if results := read_results(benchmark.name, directory):
            show(benchmark, results, console)
        console.print()


def conclude(benchmarks: Sequence[Benchmark], console: Console, *, show_each: bool, directory: Path = RESULTS) -> int:
    """Print the goals, write them down, and draw the plots; returns 1 if a run failed or there are no results.

    A goal that was missed is a result like any other. What is written down covers every benchmark, those that were
    not run this time with the results that they have.
    """
    every = {name: load(name) for name in NAMES}
    results = {name: read_results(name, directory) for name in every}
    asked_for = {benchmark.name: results[benchmark.name] for benchmark in benchmarks}
    for benchmark in benchmarks:
        if (found := asked_for[benchmark.name]) is not None and show_each:
            show(benchmark, found, console)
    verdicts = {name: verdicts_of(benchmark, results[name]) for name, benchmark in every.items()}
    show_goals({name: verdicts[name] for name in asked_for}, console)
    console.print(time_taken(asked_for))
    (directory / "goals.md").write_text(goals_as_markdown(verdicts, results))
    draw_all(benchmarks, asked_for, console, directory)
    failed = any(found is None or any(r.failure is not None for r in found.records) for found in asked_for.values())
    return int(failed)


def draw_all(
    benchmarks: Sequence[Benchmark], results: dict[str, Results | None], console: Console, directory: Path
) -> None:
    """A plot of each, where matplotlib is installed."""
    if find_spec("matplotlib") is None:
        console.print("no plots: matplotlib is not installed (it is in the extra 'dev')")
        return
    for benchmark in benchmarks:
        if (found := results[benchmark.name]) is not None:
            import_module(benchmark.plot).draw(benchmark, found, directory)


if __name__ == "__main__":
    with ended_by_signals():
        sys.exit(main())
