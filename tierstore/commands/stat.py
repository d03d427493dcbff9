"""`tierstore stat`."""

from __future__ import annotations

from typing import Annotated

import typer

from ..base.config import DEFAULT_ADDRESS

__all__ = ["SocketOption", "stat"]

SocketOption = Annotated[
    str,
    typer.Option(
        "--socket", metavar="PATH", envvar="TIERSTORE_SOCKET", show_default=True, help="Where the daemon listens."
    ),
]


def stat(
    socket: SocketOption = DEFAULT_ADDRESS,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON, nothing else.")] = False,
) -> None:
    """Print what the daemon of this host holds and has done: disk, jobs, totals, sessions.

    Ends with exit code 1 if no daemon answers within 5 seconds.
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
