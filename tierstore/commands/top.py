"""`tierstore top`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..base.config import DEFAULT_ADDRESS
from .stat import SocketOption

__all__ = ["top"]


def top(
    socket: SocketOption = DEFAULT_ADDRESS,
    interval: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=3600, show_default=True, help="Between two looks.")
    ] = 1.0,
    iterations: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=1, help="Leave after so many looks. Default: never.")
    ] = None,
) -> None:
    """Watch the daemon of this host: what it holds, how fast it moves bytes, and for whom.

    Ctrl-C leaves. While no daemon answers, it goes on trying.
    """
    from .watch import watch_daemon

    raise typer.Exit(0 if watch_daemon(socket, interval, iterations) else 1)
