"""The settings that a daemon is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tierstore.base.address import default_address

__all__ = ["ServeSettings", "ServerLimits"]

GIB = 2**30


@dataclass(frozen=True)
class ServerLimits:
    """Limits of one session, of one user, and of a connection's first words.

    Attributes:
        session_disk_bytes: bytes on disk; None: as many as the daemon may take.
        session_queued_bytes: bytes of writes that are queued or at the drive at once; None: all that its slabs hold.
        slab_bytes: shared memory, all its slabs together.
        max_sessions_per_user: sessions of one user, those without their client included.
        grace_seconds: for how long a session is kept without its client.
        handshake_seconds: time for a connection to say Hello, and for a frame that has begun to end.
    """

    session_disk_bytes: int | None = None
    session_queued_bytes: int | None = None
    slab_bytes: int = 16 * GIB
    max_sessions_per_user: int = 512
    grace_seconds: float = 60.0
    handshake_seconds: float = 10.0


@dataclass(frozen=True)
class ServeSettings:
    """All settings of a daemon; `tierstore serve --help` tells more of each.

    Attributes:
        paths: an existing directory on each drive to use; at least one.
        socket: where to listen; its folder is made if it does not exist. The default depends on the user.
        disk_bytes: the most that all sessions together may hold; None: 80 % of what is free or already its own.
        codec: as `TierStore`'s.
        max_write_bytes_per_day: of all sessions together, for each drive; None: no limit.
        limits: of a session.
        allowed_uids: users who may connect, beside the daemon's own and root.
        socket_group: a group that may open the socket; None: the daemon's user alone.
        metrics: (host, port) of the page for Prometheus, on loopback; None: no page.
        log_level: "debug", "info", "warning" or "error".
        log_format: "text" or "json".
    """

    paths: tuple[Path, ...]
    socket: Path = field(default_factory=lambda: Path(default_address()))
    disk_bytes: int | None = None
    codec: str = "auto"
    max_write_bytes_per_day: int | None = None
    limits: ServerLimits = field(default_factory=ServerLimits)
    allowed_uids: frozenset[int] = frozenset()
    socket_group: str | None = None
    metrics: tuple[str, int] | None = None
    log_level: str = "info"
    log_format: str = "text"

    @property
    def place(self) -> str:
        """The directories, for people."""
        return ", ".join(map(str, self.paths))
