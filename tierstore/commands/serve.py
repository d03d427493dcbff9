"""`tierstore serve`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ..config import DEFAULT_ADDRESS

__all__ = ["serve"]

Text = str | None


def serve(
    path: Annotated[
        Text,
        typer.Option(
            metavar="DIR",
            help="Existing directory on the drive to use. Never created: an unmounted drive is an error. Required.",
        ),
    ] = None,
    socket: Annotated[
        Text,
        typer.Option(
            metavar="PATH",
            help=f"Socket to listen on; its folder is made if it is missing. Default: {DEFAULT_ADDRESS}.",
        ),
    ] = None,
    disk_bytes: Annotated[
        Text,
        typer.Option(
            metavar="SIZE",
            help='What all sessions together may hold on disk, such as "1TiB". Default: 80 % of what is free.',
        ),
    ] = None,
    session_disk_bytes: Annotated[
        Text,
        typer.Option(metavar="SIZE", help="What one session may hold on disk. Default: as much as all together."),
    ] = None,
    session_queued_bytes: Annotated[
        Text,
        typer.Option(
            metavar="SIZE",
            help="How many bytes one session's writes may have in the queue and at the drive; more wait. "
            "Default: no limit.",
        ),
    ] = None,
    max_write_bytes_per_day: Annotated[
        Text,
        typer.Option(
            metavar="SIZE",
            help="What all sessions together may write to the drive; refills evenly over 24 hours, and may be spent at "
            "once. Default: no limit.",
        ),
    ] = None,
    grace_seconds: Annotated[
        Text,
        typer.Option(
            metavar="SECONDS",
            help="How long a client that was lost may take to come back before what it stored is freed. Default: 60.",
        ),
    ] = None,
    handshake_seconds: Annotated[
        Text,
        typer.Option(
            metavar="SECONDS",
            help="How long a connection may take to say who it is, and to end a message it has begun. Default: 10.",
        ),
    ] = None,
    metrics: Annotated[
        Text,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve /metrics (Prometheus), /healthz and /readyz there, on loopback only. Default: nowhere.",
        ),
    ] = None,
    allow_uid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="UID",
            help="User id that may connect, beside the daemon's own and root. May be given several times.",
        ),
    ] = None,
    socket_group: Annotated[
        Text,
        typer.Option(metavar="GROUP", help="Group that may open the socket. Default: the daemon's user alone."),
    ] = None,
    codec: Annotated[
        Text,
        typer.Option(
            metavar="CODEC",
            help='"auto" (encodes where that saves time), "none", "zstd[:LEVEL]" or "shuffle-zstd[:LEVEL]". '
            "Default: auto.",
        ),
    ] = None,
    log_level: Annotated[
        Text, typer.Option(metavar="LEVEL", help='"debug", "info", "warning" or "error". Default: info.')
    ] = None,
    log_format: Annotated[
        Text, typer.Option(metavar="FORMAT", help='Of the lines on standard error: "text" or "json". Default: text.')
    ] = None,
    config: Annotated[
        Text,
        typer.Option(
            metavar="FILE", help='TOML file with any of these options, such as disk_bytes = "1TiB". Default: none.'
        ),
    ] = None,
) -> None:
    """Keep one store on a drive for all training processes of this host, which connect with TierStore.connect().

    Runs until SIGTERM or SIGINT: then it finishes and answers what it has taken, keeps what is stored for the next
    start, and exits with 0. A second signal ends it at once.

    Every option can also be set by an environment variable (--disk-bytes: TIERSTORE_DISK_BYTES) or in the file of
    --config (disk_bytes). The command line comes before the environment, the environment before the file.
    """
    line = {name: value for name, value in locals().items() if value is not None and value != []}
    from ..daemon.logs import set_up_logging
    from ..daemon.options import settings_of
    from ..daemon.server import serve as serve_until_told

    settings = settings_of(line, os.environ)
    set_up_logging(settings.log_level, settings.log_format)
    serve_until_told(settings)
