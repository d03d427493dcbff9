"""`tierstore tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["tune"]


def tune(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The program, as in a shell.")],
    config: Annotated[
        Path, typer.Option(metavar="FILE", help="File to make, for `from_config`. One that is there is not touched.")
    ] = Path("tierstore.toml"),
    host_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Most of host memory for the store, staging included. Default: what it has now."
        ),
    ] = None,
    device_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Most that may stay on an accelerator. Default: what it has now."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure in each trial, after two that are not.")] = 5,
    rounds: Annotated[int, typer.Option(min=3, help="How often each candidate is measured.")] = 5,
    candidates: Annotated[int, typer.Option(min=1, help="How many of those that were simulated to measure.")] = 4,
    trial_seconds: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="End a trial after so long.")] = 300.0,
    search_seconds: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="For all simulations.")] = 60.0,
    hardware: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Of `tierstore doctor --hardware`. Default: ten seconds of measuring."),
    ] = None,
    heat_map: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also draw predicted step times there: .html, or .png with matplotlib."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON, nothing else.")] = False,
) -> None:
    """Find settings for a program: `tierstore tune -- python train.py`.

    Runs the program several times for a few steps each, under other settings of its store and its scopes than those in
    its code: once to record it; then what is best in a simulator is measured against what the program has now, by
    turns. Other settings are chosen only if they were faster every time.

    Each run ends by itself when enough steps are measured, as by `sys.exit(0)` where the program enters its next scope.
    So the program should do no harm when it is run for some steps: write no checkpoint that matters, for example.

    Ends with exit code 1 if the program fails or enters no scope of `tiered_offload`, 2 if an argument cannot be used.
    """
    from ..base.config import parse_size
    from ..tuning.present import Wanted, present
    from ..tuning.program import Program
    from ..tuning.recording import NUM_WARMUPS
    from ..tuning.tune import TuningPlan

    limit_bytes = None if host_bytes is None else parse_size(host_bytes, "--host-bytes")
    device_limit_bytes = None if device_bytes is None else parse_size(device_bytes, "--device-bytes")
    program = Program(tuple(command), steps + NUM_WARMUPS, trial_seconds)
    wanted = Wanted(config=config, heat_map=heat_map, hardware=hardware, as_json=as_json)
    present(program, TuningPlan(limit_bytes, rounds, candidates, search_seconds, device_limit_bytes), wanted)
