"""`python -m bench [NAME ...]`: run the benchmarks, write `bench/results/`, print a table each and one of all goals."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

from tierstore.base.interrupts import ended_by_signals
from tierstore.demo.place import store_directory
from tierstore.errors import ConfigError

from .harness import RESULTS, Benchmark, read_results, run_benchmark
from .report import goals_as_markdown, table_of, verdicts_of

SUITE = (
    "pack_cost", "calls", "live_handles", "disk_throughput", "data_plane", "small_tensors", "many_lengths",
    "prefetch", "larger_than_memory", "two_drives", "training_step", "memory_limit", "freed_memory", "codec_choice",
    "packed_floats", "sidecar_throughput", "neighbours", "trainers", "memory_plan",
    "plan_allocator",
)  # fmt: skip
TUNING = ("prefetch_tuning", "tuned_settings")
"""Those whose question is which settings are best."""
NAMES = SUITE + TUNING


def main() -> int:
    """Returns 1 if a run failed or there are no results; a goal that was missed is a result like any other."""
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
    if not arguments.plot:
        try:
            place = store_directory(arguments.path)
            for benchmark in benchmarks:
                run_benchmark(benchmark, place, rounds, partial(print, flush=True), arguments.results)
        except ConfigError as error:
            parser.error(str(error))
    return conclude(benchmarks, arguments.results)


def load(name: str) -> Benchmark:
    return import_module(f"bench.{name}").BENCHMARK


def conclude(benchmarks: Sequence[Benchmark], directory: Path = RESULTS) -> int:
    """Print tables and goals, write the goals of all benchmarks down, of those not run this time with the results that
    they have, and draw the plots, where matplotlib is installed."""
    every = {name: load(name) for name in NAMES}
    results = {name: read_results(name, directory) for name in every}
    verdicts = {name: verdicts_of(benchmark, results[name]) for name, benchmark in every.items()}
    (directory / "goals.md").write_text(goals_as_markdown(verdicts, results))
    asked_for = {benchmark.name: results[benchmark.name] for benchmark in benchmarks}
    for benchmark in benchmarks:
        if (found := asked_for[benchmark.name]) is not None:
            print(table_of(benchmark, found))
    print(goals_as_markdown({name: verdicts[name] for name in asked_for}, asked_for))
    try:
        from .plots import draw
    except ImportError:
        print("no plots: matplotlib is not installed (it is in the extra 'dev')")
    else:
        for benchmark in benchmarks:
            if (found := asked_for[benchmark.name]) is not None:
                draw(benchmark, found, directory)
    return int(any(found is None or any(r.failure is not None for r in found.records) for found in asked_for.values()))


if __name__ == "__main__":
    with ended_by_signals():
        sys.exit(main())
