"""`tierstore tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .usage import JsonOption


def tune(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="The program and its arguments, as in a shell. Write -- before them."),
    ],
    config: Annotated[
        Path, typer.Option(metavar="FILE", help="New file for the settings. An existing file is never overwritten.")
    ] = Path("tierstore.toml"),
    host_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Limit of host memory for the store, staging included. Default: what the program gives it now.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, help="Steps to measure in each trial, after two steps of warm-up.")
    ] = 5,
    rounds: Annotated[int, typer.Option(metavar="NUMBER", min=3, help="Trials of each candidate at most.")] = 5,
    candidates: Annotated[
        int,
        typer.Option(
            metavar="NUMBER", min=1, help="How many of the settings that were tried to measure by turns: the fastest."
        ),
    ] = 4,
    trial_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="End a trial after this time.")
    ] = 300.0,
    hardware: Annotated[
        Path | None, typer.Option(metavar="FILE", hidden=True, help="Has no effect any more: no machine is measured.")
    ] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Find the fastest settings for a program: `tierstore tune -- python train.py`.

    The command runs the program about thirty times, for a few steps each. The first run is with the program's own
    settings. A dozen others are tried once each, and the fastest of them are then measured in turns with those that the
    program has now. New settings are written only if they were faster in every round. Standard error shows the
    progress.

    Each run ends by itself after enough steps, as by `sys.exit(0)` where the program enters its next scope. A short run
    must do no harm: the program should not overwrite an important checkpoint, for example.

    The exit code is 1 if the program fails, enters no scope of `tiered_offload`, or takes fewer than three steps, and 2
    if an argument cannot be used."""
    from ..base.config import parse_size
    from ..tuning.present import present
    from ..tuning.program import Program
    from ..tuning.recording import NUM_WARMUPS

    if hardware is not None:
        typer.echo("tierstore: --hardware has no effect any more: leave it out", err=True)
    limit_bytes = None if host_bytes is None else parse_size(host_bytes, "--host-bytes")
    program = Program(tuple(command), steps + NUM_WARMUPS, trial_seconds)
    limits = {"host_bytes": limit_bytes, "rounds": rounds, "num_found": candidates}
    present(program, config=config, as_json=as_json, **limits)
