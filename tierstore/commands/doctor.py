"""`tierstore doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from .stat import DaemonUidOption, SocketOption
from .usage import JsonOption


def doctor(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Existing directory on the drive to measure.")],
    seconds: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=1, max=40, show_default=True, help="Time for all measurements together."),
    ] = 20.0,
    socket: SocketOption = None,
    daemon_uid: DaemonUidOption = None,
    as_json: Annotated[bool, JsonOption] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also print speeds by queue depth and codec.")] = False,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Also write the recommended settings to this new file, for TierStore.from_config()."
        ),
    ] = None,
) -> None:
    """Measure this machine and the drive of PATH, say what is wrong, and recommend settings.

    The measurement takes less than a minute, even on a slow drive. It uses up to 512 MiB of the drive, in a file
    without a name, so nothing is left there even if the command is killed.

    The exit code is 1 if offloading to PATH would not work, or would be very slow."""
    from ..tuning.consult import consult

    is_usable = consult(path, socket, seconds, daemon_uid=daemon_uid, as_json=as_json, config=config, verbose=verbose)
    raise typer.Exit(0 if is_usable else 1)
