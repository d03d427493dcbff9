"""`tierstore serve`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ..base.config import DEFAULT_ADDRESS

__all__ = ["serve"]

Text = str | None

# --- the options, as --help shows them --------------------------------------------------------------------------------

_Path = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DIR",
        help="Existing directory on the drive to use. Never created: an unmounted drive is an error. Required. May be "
        "given several times, once for each drive.",
    ),
]
_Socket = Annotated[
    Text,
    typer.Option(
        metavar="PATH",
        help=f"Socket to listen on; its folder is made if it is missing. Default: {DEFAULT_ADDRESS}.",
    ),
]
_DiskBytes = Annotated[
    Text,
    typer.Option(
        metavar="SIZE",
        help='What all sessions together may hold on disk, such as "1TiB". Default: 80 % of what is free or its own.',
    ),
]
_SessionDiskBytes = Annotated[
    Text,
    typer.Option(metavar="SIZE", help="What one session may hold on disk. Default: as much as all together."),
]
_SessionQueuedBytes = Annotated[
    Text,
    typer.Option(
        metavar="SIZE",
        help="How many bytes one session's writes may have in the queue and at the drive; more wait. "
        "Default: no limit.",
    ),
]
_MaxWriteBytesPerDay = Annotated[
    Text,
    typer.Option(
        metavar="SIZE",
        help="What all sessions together may write to each drive; refills evenly over 24 hours, and may be spent at "
        "once. Default: no limit.",
    ),
]
_GraceSeconds = Annotated[
    Text,
    typer.Option(
        metavar="SECONDS",
        help="How long a client that was lost may take to come back before what it stored is freed. Default: 60.",
    ),
]
_HandshakeSeconds = Annotated[
    Text,
    typer.Option(
        metavar="SECONDS",
        help="How long a connection may take to say who it is, and to end a message it has begun. Default: 10.",
    ),
]
_Metrics = Annotated[
    Text,
    typer.Option(
        metavar="HOST:PORT",
        help="Serve /metrics (Prometheus), /healthz and /readyz there, on loopback only. Default: nowhere.",
    ),
]
_AllowUid = Annotated[
    list[str] | None,
    typer.Option(
        metavar="UID",
        help="User id that may connect, beside the daemon's own and root. May be given several times.",
    ),
]
_SocketGroup = Annotated[
    Text,
    typer.Option(metavar="GROUP", help="Group that may open the socket. Default: the daemon's user alone."),
]
_Codec = Annotated[
    Text,
    typer.Option(
        metavar="CODEC",
        help='"auto" (encodes where that saves time), "none", "zstd[:LEVEL]" or "shuffle-zstd[:LEVEL]". Default: auto.',
    ),
]
_LogLevel = Annotated[Text, typer.Option(metavar="LEVEL", help='"debug", "info", "warning" or "error". Default: info.')]
_LogFormat = Annotated[
    Text, typer.Option(metavar="FORMAT", help='Of the lines on standard error: "text" or "json". Default: text.')
]
_Config = Annotated[
    Text,
    typer.Option(
        metavar="FILE", help='TOML file with any of these options, such as disk_bytes = "1TiB". Default: none.'
    ),
]


# --- the command ------------------------------------------------------------------------------------------------------


def serve(
    path: _Path = None,
    socket: _Socket = None,
    disk_bytes: _DiskBytes = None,
    session_disk_bytes: _SessionDiskBytes = None,
    session_queued_bytes: _SessionQueuedBytes = None,
    max_write_bytes_per_day: _MaxWriteBytesPerDay = None,
    grace_seconds: _GraceSeconds = None,
    handshake_seconds: _HandshakeSeconds = None,
    metrics: _Metrics = None,
    allow_uid: _AllowUid = None,
    socket_group: _SocketGroup = None,
    codec: _Codec = None,
    log_level: _LogLevel = None,
    log_format: _LogFormat = None,
    config: _Config = None,
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
