"""`tierstore stat`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..base.config import DEFAULT_ADDRESS
from .usage import JsonOption

__all__ = ["SocketOption", "stat"]

SocketOption = Annotated[
    str,
    typer.Option(
        "--socket", metavar="PATH", envvar="TIERSTORE_SOCKET", show_default=True, help="Where the daemon listens."
    ),
]


def stat(
    socket: SocketOption = DEFAULT_ADDRESS,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Print what the daemon of this host stores and has done: disk, jobs, totals, sessions.

    The exit code is 1 if no daemon answers within 5 seconds.
    """
    from ..sidecar.inspection import inspect_daemon

    state = inspect_daemon(socket)
    if as_json:
        import msgspec

        print(msgspec.json.format(state, indent=2).decode())
        return
    from rich.console import Console

    from .views import decode_report, stat_view

    Console(highlight=False).print(stat_view(decode_report(state, socket)))
