"""`tierstore serve`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ..base.address import SYSTEM_ADDRESS

__all__ = ["serve"]

Text = str | None

# --- the options, as --help shows them --------------------------------------------------------------------------------

_Path = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH",
        help="Existing directory on the drive to use. Never created, so that an unmounted drive is an error. "
        "Required. Can be repeated, once for each drive.",
    ),
]
_Socket = Annotated[
    Text,
    typer.Option(
        metavar="PATH",
        help=f"Socket to listen on. Its folder is created if needed. Default: {SYSTEM_ADDRESS} for root, and "
        "$XDG_RUNTIME_DIR/tierstore/tierstore.sock for other users (/tmp/tierstore-UID/tierstore.sock without that "
        "directory).",
    ),
]
_DiskBytes = Annotated[
    Text,
    typer.Option(
        metavar="SIZE",
        help='Limit of disk space for all sessions together, such as "1TiB". Default: 80 % of the free space, '
        "files of an earlier daemon included.",
    ),
]
_SessionDiskBytes = Annotated[
    Text,
    typer.Option(metavar="SIZE", help="Limit of disk space for one session. Default: that of all sessions together."),
]
_SessionQueuedBytes = Annotated[
    Text,
    typer.Option(
        metavar="SIZE",
        help="Limit of bytes that one session has in the queue and at the drive for writing; further writes wait. "
        "Default: no limit.",
    ),
]
_MaxSessionsPerUser = Annotated[
    Text,
    typer.Option(
        metavar="NUMBER",
        help="Limit of sessions that one user has at a time, those whose clients are lost included. Default: 512.",
    ),
]
_MaxWriteBytesPerDay = Annotated[
    Text,
    typer.Option(
        metavar="SIZE",
        help="Limit of bytes that all sessions together write to each drive in 24 hours. The allowance begins full "
        "and refills evenly. Default: no limit.",
    ),
]
_GraceSeconds = Annotated[
    Text,
    typer.Option(
        metavar="SECONDS",
        help="How long the daemon keeps the data of a client that has lost its connection. Default: 60.",
    ),
]
_HandshakeSeconds = Annotated[
    Text,
    typer.Option(
        metavar="SECONDS",
        help="How long a new connection may take to identify itself, and any connection to complete a message. "
        "Default: 10.",
    ),
]
_Metrics = Annotated[
    Text,
    typer.Option(
        metavar="HOST:PORT",
        help="Serve a live page (/), /metrics (for Prometheus), /healthz and /readyz at this loopback address. "
        "Default: none of them.",
    ),
]
_AllowUid = Annotated[
    list[str] | None,
    typer.Option(
        metavar="UID",
        help="Also allow connections of this user. The daemon's own user and root can always connect. Can be repeated.",
    ),
]
_SocketGroup = Annotated[
    Text,
    typer.Option(metavar="GROUP", help="Group that can open the socket. Default: only the daemon's user can."),
]
_Codec = Annotated[
    Text,
    typer.Option(
        metavar="CODEC",
        help='"auto" (encodes if that saves time), "none", "zstd[:LEVEL]" or "shuffle-zstd[:LEVEL]". Default: auto.',
    ),
]
_LogLevel = Annotated[Text, typer.Option(metavar="LEVEL", help='"debug", "info", "warning" or "error". Default: info.')]
_LogFormat = Annotated[
    Text, typer.Option(metavar="FORMAT", help='Format of the log on standard error: "text" or "json". Default: text.')
]
_Config = Annotated[
    Text,
    typer.Option(
        metavar="FILE", help='TOML file with any of these options, such as disk_bytes = "1TiB". Default: no file.'
    ),
]


# --- the command ------------------------------------------------------------------------------------------------------


def serve(
    path: _Path = None,
    socket: _Socket = None,
    disk_bytes: _DiskBytes = None,
    session_disk_bytes: _SessionDiskBytes = None,
    session_queued_bytes: _SessionQueuedBytes = None,
    max_sessions_per_user: _MaxSessionsPerUser = None,
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
    """Run the daemon: one disk tier for all training processes of this host that use TierStore.connect().

    SIGTERM and SIGINT end the daemon. It then completes the requests that it has accepted, keeps the stored data for
    the next start, and exits with 0. A second signal ends it at once.

    Each option can also be set by an environment variable (TIERSTORE_DISK_BYTES for --disk-bytes), or in the file of
    --config (disk_bytes). The command line takes precedence over the environment, and the environment over the file.
    """
    line = {name: value for name, value in locals().items() if value is not None and value != []}
    from ..daemon.logs import set_up_logging
    from ..daemon.options import settings_of
    from ..daemon.server import serve as serve_until_told

    settings = settings_of(line, os.environ)
    set_up_logging(settings.log_level, settings.log_format)
    serve_until_told(settings)
