"""`python -m tests.soak --minutes N`: an endurance run, an hour's worth of trouble in minutes.

Rounds of training processes over embedded stores and real daemons, which are killed, restarted, cut off and filled up.
Every read is verified, every gradient compared with a plain run, every error has to be one that the round brings about,
and after each round everything is where it began. A failure prints seed and round, and the command that runs that round
again.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.soak.conductor import Conductor, SoakFailure, Summary
from tests.soak.places import working_folder
from tests.soak.plan import plan_of


def main(
    minutes: Annotated[float, typer.Option(help="No round begins after that.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Of everything that is chosen.")] = 1,
    only: Annotated[int | None, typer.Option(help="Run this round alone.")] = None,
    rounds: Annotated[int | None, typer.Option(help="So many rounds at most.")] = None,
    episodes: Annotated[int, typer.Option(help="Of each process in a round, about.")] = 40,
    trainers: Annotated[int, typer.Option(help="Processes at once, the long-lived one among them.", min=1)] = 3,
    path: Annotated[
        Path | None, typer.Option(help="A directory on the disk to use; a temporary one by default.")
    ] = None,
) -> None:
    """Train while daemons are killed, disks fill up and errors are thrown; nothing may be left behind."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    ends_at = time.monotonic() + minutes * 60
    number = only or 0
    failure = None
    with working_folder(path) as folder, Conductor(folder) as conductor, _progress(console) as progress:
        task = progress.add_task("", total=minutes * 60)
        try:
            while True:
                plan = plan_of(seed, number, episodes, trainers)
                left_seconds = max(0.0, ends_at - time.monotonic())
                progress.update(task, description=_line(number, plan.disturbance, conductor.summary))
                progress.update(task, completed=minutes * 60 - left_seconds)
                conductor.run(plan)
                number += 1
                if only is not None or number == rounds or time.monotonic() >= ends_at:
                    break
            conductor.finish()
        except SoakFailure as error:
            failure = error
    console.print(_table(conductor.summary))
    if failure is not None:
        console.print(f"FAILED: {failure}", style="red", markup=False, highlight=False)
        again = f"--seed {seed} --only {number} --episodes {episodes} --trainers {trainers}"
        console.print(f"seed {seed}, round {number}; again: python -m tests.soak {again}", markup=False)
        raise typer.Exit(1)
    console.print(f"passed: {conductor.summary.num_rounds} rounds, seed {seed}")


def _progress(console: Console) -> Progress:
    return Progress(
        TimeElapsedColumn(), BarColumn(20), TextColumn("{task.description}"), console=console, transient=True
    )


def _line(number: int, disturbance: str, summary: Summary) -> str:
    counts = summary.counts
    return (
        f"round {number}: {disturbance}; {counts['reads verified']:,} reads, {counts['gradients compared']:,} gradients"
    )


def _table(summary: Summary) -> Table:
    table = Table(title="soak", title_justify="left")
    table.add_column("what")
    table.add_column("how often", justify="right")
    for name, count in sorted(summary.counts.items()):
        table.add_row(name, f"{count:,}")
    for name, sizes in summary.memory_bytes.items():
        if sizes:
            figures = ", ".join(f"{size >> 20}" for size in (sizes[0], max(sizes), sizes[-1]))
            table.add_row(f"memory of the long-lived {name}: first, most, last", f"{figures} MiB")
    return table


if __name__ == "__main__":
    typer.run(main)
