"""The settings that are searched, and the limits that they keep to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..config import format_bytes
from ..disk.local import NUM_AT_ONCE
from ..disk.scratch import SCRATCH_BYTES
from ..engine import NUM_BESIDE_DEVICE
from ..errors import ConfigError
from ..simulator import Settings

__all__ = [
    "AUTO",
    "LEAST_STAGING_BYTES",
    "USUAL_INLINE_BYTES",
    "USUAL_STAGING_BYTES",
    "Limits",
    "TrialSettings",
    "default_settings",
    "working_bytes",
]

USUAL_STAGING_BYTES = 112 * 2**20
LEAST_STAGING_BYTES = 16 * 2**20
USUAL_INLINE_BYTES = 128 * 2**10
AUTO: Literal["auto"] = "auto"
"""Of `device_bytes`: the store finds it."""
_MOST_STAGING_SHARE = 0.75  # where little memory is allowed, what moves needs it more than what stays


@dataclass(frozen=True)
class TrialSettings:
    """Arguments of `TierStore`, and behind them of `tiered_offload`.

    Attributes:
        lookahead_bytes: None: as far as it takes.
        inline_bytes: None: everything lives in LMDB.
        device_bytes: of no effect without an accelerator.
    """

    host_bytes: int
    staging_bytes: int = USUAL_STAGING_BYTES
    codec: str = "auto"
    prefetch: str = "learned"
    lookahead_bytes: int | None = None
    io_depth: int = NUM_AT_ONCE
    inline_bytes: int | None = USUAL_INLINE_BYTES
    device_bytes: int | Literal["auto"] = 0

    @property
    def memory_bytes(self) -> int:
        """Of host memory, what both windows may hold, and what the depth takes beyond the usual one's share."""
        return self.host_bytes + self.staging_bytes + working_bytes(self.io_depth)

    @property
    def store(self) -> Mapping[str, Any]:
        """Arguments of `TierStore`."""
        return {name: value for name, value in asdict(self).items() if name not in self.offload}

    @property
    def offload(self) -> Mapping[str, Any]:
        """Arguments of `tiered_offload`."""
        names = ("prefetch", "lookahead_bytes", "device_bytes")
        return {name: getattr(self, name) for name in names}

    @property
    def simulated(self) -> Settings:
        """The same for the simulator, which does not know "auto"."""
        return Settings(
            host_bytes=self.host_bytes,
            staging_bytes=self.staging_bytes,
            codec=self.codec,
            prefetch=self.prefetch,
            lookahead_bytes=self.lookahead_bytes,
            device_bytes=0 if self.device_bytes == AUTO else self.device_bytes,
            num_turns=self.io_depth,
            num_spill_lanes=self.io_depth + NUM_BESIDE_DEVICE,
            num_restore_lanes=self.io_depth + NUM_BESIDE_DEVICE,
        )

    def __str__(self) -> str:
        """In one line, for people."""
        lookahead = "" if self.lookahead_bytes is None else f" {format_bytes(self.lookahead_bytes)} ahead"
        text = (
            f"{format_bytes(self.host_bytes)} + {format_bytes(self.staging_bytes)}, "
            f"codec {self.codec}, prefetch {self.prefetch}{lookahead}"
        )
        if self.io_depth != NUM_AT_ONCE:
            text += f", depth {self.io_depth}"
        if self.device_bytes:
            text += f", on the device {AUTO if self.device_bytes == AUTO else format_bytes(self.device_bytes)}"
        if self.inline_bytes != USUAL_INLINE_BYTES:
            text += f", inline {'all' if self.inline_bytes is None else format_bytes(self.inline_bytes)}"
        return text


@dataclass(frozen=True)
class Limits:
    """What settings may take.

    Attributes:
        memory_bytes: of host memory.
        device_bytes: of an accelerator's.
        is_for_auto: the latter holds for what "auto" finds, too.
    """

    memory_bytes: int
    device_bytes: int
    is_for_auto: bool

    def allow(self, settings: TrialSettings, found_bytes: int = 0) -> bool:
        """Whether they keep to it. `found_bytes`: where their `device_bytes` is "auto", what that has found."""
        if settings.memory_bytes > self.memory_bytes:
            return False
        if settings.device_bytes == AUTO:
            return found_bytes <= self.device_bytes or not self.is_for_auto
        return settings.device_bytes <= self.device_bytes


def working_bytes(io_depth: int) -> int:
    """What the I/O jobs of that depth work in, both ways, beyond those of the usual depth; below that it is negative.

    The usual 16 MiB are nobody's choice, so a limit on host memory does not count them.
    """
    return 2 * (io_depth - NUM_AT_ONCE) * SCRATCH_BYTES


def default_settings(memory_bytes: int) -> TrialSettings:
    """All defaults, with as much of `host_bytes` as a limit on both windows leaves.

    Raises:
        ConfigError: it leaves no room for what is on its way.
    """
    if memory_bytes < LEAST_STAGING_BYTES:
        raise ConfigError(
            "host_bytes", memory_bytes, f"give {format_bytes(LEAST_STAGING_BYTES)} or more; staging is part of it"
        )
    staging_bytes = min(USUAL_STAGING_BYTES, max(LEAST_STAGING_BYTES, int(memory_bytes * _MOST_STAGING_SHARE)))
    return TrialSettings(memory_bytes - staging_bytes, staging_bytes)
