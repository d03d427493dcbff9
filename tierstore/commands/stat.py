"""`tierstore stat` and `tierstore top`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from ..base.address import SYSTEM_ADDRESS, find_address, why_unreached
from ..errors import DaemonUnavailableError, ProtocolError
from .usage import JsonOption

SocketOption = Annotated[
    str | None,
    typer.Option(
        "--socket",
        metavar="PATH",
        envvar="TIERSTORE_SOCKET",
        help=f"Socket of the daemon. Default: that of this user's daemon. If there is none, {SYSTEM_ADDRESS}.",
    ),
]
DaemonUidOption = Annotated[
    int | None,
    typer.Option(
        "--daemon-uid",
        metavar="UID",
        envvar="TIERSTORE_DAEMON_UID",
        min=0,
        help="User whose daemon is trusted, beside your own user and root.",
    ),
]


def stat(
    socket: SocketOption = None, daemon_uid: DaemonUidOption = None, as_json: Annotated[bool, JsonOption] = False
) -> None:
    """Print what the daemon of this host stores and has done: disk, jobs, totals, sessions.

    The exit code is 1 if no daemon answers within 5 seconds."""
    address, state = ask_daemon(socket, daemon_uid)
    if as_json:
        import msgspec

        from ..base.json_text import json_text

        try:
            print(json_text(msgspec.Raw(state)))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"the daemon at {address}", f"a report that is not JSON ({error})") from error
        return
    from rich.console import Console

    from .views import decode_report, stat_view

    Console(highlight=False).print(stat_view(decode_report(state, address)))


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

    The exit code is 1 if no daemon answered at the last of --iterations."""
    from .watch import watch_daemon

    found = watch_daemon(socket, interval, iterations, daemon_uid=daemon_uid, as_json=as_json)
    raise typer.Exit(0 if found else 1)


def ask_daemon(address: str | None, daemon_uid: int | None = None) -> tuple[str, bytes]:
    """The address of a daemon, and its report in JSON. Blocks for 5 seconds at most. None: look in the usual places.
    Raises as `inspect_daemon`; it says how to start a daemon if nobody listens."""
    from ..sidecar.inspection import inspect_daemon

    address = find_address() if address is None else address
    try:
        return address, inspect_daemon(address, daemon_uid=daemon_uid)
    except DaemonUnavailableError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        raise replace(error, reason=why_unreached(address, error.__cause__, error.reason)) from error.__cause__
