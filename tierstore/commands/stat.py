"""`tierstore stat`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..base.address import SYSTEM_ADDRESS
from .usage import JsonOption

__all__ = ["DaemonUidOption", "SocketOption", "stat"]

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

    The exit code is 1 if no daemon answers within 5 seconds.
    """
    from .asking import ask_daemon

    address, state = ask_daemon(socket, daemon_uid)
    if as_json:
        import msgspec

        from ..plain_text import plain_json

        print(plain_json(msgspec.json.format(state, indent=2).decode()))
        return
    from rich.console import Console

    from .views import decode_report, stat_view

    Console(highlight=False).print(stat_view(decode_report(state, address)))
