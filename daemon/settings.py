"""The settings that a daemon is started with. `options.py` says what each is for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tierstore.base.address import default_address


@dataclass(frozen=True)
class ServerLimits:
    """Limits of a session, a user, and a connection's first words. `slab_bytes`: of all slabs of a session."""

    session_disk_bytes: int | None = None
    session_queued_bytes: int | None = None
    slab_bytes: int = 16 * 2**30
    max_sessions_per_user: int = 512
    grace_seconds: float = 60.0
    handshake_seconds: float = 10.0


@dataclass(frozen=True)
class ServeSettings:
    """All settings of a daemon. `allowed_uids`: beside its own user and root. `metrics`: host and port, on loopback."""

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
