"""`python -m tests.soak --minutes N`: an endurance run, an hour's worth of trouble in minutes.

Rounds of training processes over embedded stores and real daemons, which are killed, restarted, cut off and filled up.
Every read is verified, every gradient compared with a plain run, every error has to be one that the round brings about,
and after each round everything is where it began. A failure prints seed and round, and the command that runs that round
again.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from tests.soak.conductor import Conductor, SoakFailure
from tests.soak.plan import plan_of

_ALONE = {"MALLOC_ARENA_MAX": "2", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""A leak shows: no arena for each thread, and no threads that BLAS starts with the first codec that needs numpy."""


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
    os.environ |= _ALONE
    ends_at = time.monotonic() + minutes * 60
    number = only or 0
    failure = None
    with TemporaryDirectory(prefix="tierstore-soak-", dir=path) as folder, Conductor(Path(folder)) as conductor:
        counts = conductor.counts
        try:
            while True:
                plan = plan_of(seed, number, episodes, trainers)
                done = f"{counts['reads verified']:,} reads, {counts['gradients compared']:,} gradients so far"
                print(f"round {number}: {plan.disturbance}; {done}", flush=True)
                conductor.run(plan)
                number += 1
                if only is not None or number == rounds or time.monotonic() >= ends_at:
                    break
            conductor.finish()
        except SoakFailure as error:
            failure = error
    for name, count in sorted(conductor.counts.items()):
        print(f"{name}: {count:,}")
    for baseline in conductor.baselines:
        if sizes := [census.memory_bytes >> 20 for census in baseline.seen]:
            print(f"memory of {baseline.name}: first, most, last: {sizes[0]}, {max(sizes)}, {sizes[-1]} MiB")
    if failure is not None:
        print(f"FAILED: {failure}")
        again = f"--seed {seed} --only {number} --episodes {episodes} --trainers {trainers}"
        print(f"seed {seed}, round {number}; again: python -m tests.soak {again}")
        raise typer.Exit(1)
    print(f"passed: {conductor.num_rounds} rounds, seed {seed}")


if __name__ == "__main__":
    typer.run(main)
