"""`tierstore top`."""

from __future__ import annotations

from typing import Annotated

import typer

from .stat import DaemonUidOption, SocketOption
from .usage import JsonOption


def top(
    socket: SocketOption = None,
    daemon_uid: DaemonUidOption = None,
    interval: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.1, max=3600, show_default=True, help="Time from one update to the next."),
    ] = 1.0,
    iterations: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=1, help="Exit after this many updates. Default: never.")
    ] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Watch the daemon of this host: what it stores, how fast it moves bytes, and for which processes.

    Ctrl-C ends the command. If no daemon answers, the command says so and tries again at the next update.

    With --json each update is one line of JSON: `error` (null if the daemon answered), `report` (as `tierstore stat
    --json` prints it) and `rates` (bytes per second since the line before; null at first).

    The exit code is 1 if no daemon answered at the last of --iterations.
    """
    from .watch import watch_daemon

    raise typer.Exit(0 if watch_daemon(socket, interval, iterations, daemon_uid=daemon_uid, as_json=as_json) else 1)
