"""`tierstore doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..base.config import DEFAULT_ADDRESS
from .stat import SocketOption

__all__ = ["doctor"]


def doctor(
    path: Annotated[str, typer.Argument(metavar="PATH", help="Existing directory on the drive that is meant.")],
    seconds: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=1, max=40, show_default=True, help="For all measurements together."),
    ] = 20.0,
    socket: SocketOption = DEFAULT_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, nothing else.")] = False,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Also write the recommended settings there, as TOML for TierStore.from_config()."
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also write what was measured there, as TOML for a simulation."),
    ] = None,
) -> None:
    """Measure what this machine can do for a store on PATH, and say what is wrong and what to set.

    Takes less than a minute, a slow drive included; uses up to 512 MiB of the drive, in a file without a name, and
    leaves nothing behind, even when it is killed.

    Ends with exit code 1 if something keeps offloading from working, or makes it very slow.
    """
    from ..doctor.consult import consult

    is_usable = consult(path, socket, seconds, as_json=as_json, config=config, hardware=hardware)
    raise typer.Exit(0 if is_usable else 1)
