"""`python -m bench [NAME ...]`: run the benchmarks, write `bench/results/*.jsonl`, print one table each."""

from __future__ import annotations

import argparse
import sys
import time
from importlib import import_module

from rich.console import Console

from tierstore.demo.place import store_directory
from tierstore.errors import ConfigError

from .harness import run_benchmark, show

NAMES = ("pack_cost", "live_handles", "disk_throughput", "prefetch", "steady_state", "training_step")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Run the benchmarks, a table each.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--path", help="a directory on the disk to measure; a temporary one by default")
    parser.add_argument("--rounds", type=int, help="how often each variant runs; more than usual, or fewer")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}")
    console = Console()
    try:
        return run_all(arguments.names or NAMES, arguments.path, arguments.rounds, console)
    except ConfigError as error:
        parser.error(str(error))


def run_all(names: list[str] | tuple[str, ...], path: str | None, rounds: int | None, console: Console) -> int:
    """Run the named benchmarks; returns 1 if any variant failed."""
    failed = False
    with store_directory(path) as directory:
        for name in names:
            benchmark = import_module(f"bench.{name}").BENCHMARK
            started = time.monotonic()
            with console.status("") as status:
                records = run_benchmark(benchmark, directory, rounds, status.update)
            show(benchmark, records, console)
            console.print(f"{time.monotonic() - started:.0f} s\n")
            failed |= any(record.failure is not None for record in records)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
