"""The settings of a trial, the limit that they keep to, and which are tried. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..base.config import format_bytes
from ..base.defaults import LEAST_STAGING_BYTES, NUM_AT_ONCE, STAGING_BYTES
from ..disk.scratch import SCRATCH_BYTES
from ..errors import ConfigError

USUAL_INLINE_BYTES = 128 * 2**10
CODECS = ("auto", "none", "floats", "shuffle-zstd:1")
WINDOWS = (STAGING_BYTES // 4, STAGING_BYTES // 2, STAGING_BYTES, 2 * STAGING_BYTES)
_MOST_IO_DEPTH = 16
_MOST_STAGING_SHARE = 0.75  # if little memory is allowed, tensors on their way need it more than those that stay
_OF_SCOPE = ("prefetch", "lookahead_bytes")


@dataclass(frozen=True)
class TrialSettings:
    """The arguments of `TierStore` and `tiered_offload` that a trial replaces. `lookahead_bytes`: None: as far as
    needed. `inline_bytes`: None: all records are stored in LMDB."""

    host_bytes: int
    staging_bytes: int = STAGING_BYTES
    codec: str = "auto"
    prefetch: str = "learned"
    lookahead_bytes: int | None = None
    io_depth: int = NUM_AT_ONCE
    inline_bytes: int | None = USUAL_INLINE_BYTES

    @property
    def memory_bytes(self) -> int:
        return self.host_bytes + self.staging_bytes + working_bytes(self.io_depth)

    @property
    def store(self) -> Mapping[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in _OF_SCOPE}

    @property
    def offload(self) -> Mapping[str, Any]:
        return {name: getattr(self, name) for name in _OF_SCOPE}


def working_bytes(io_depth: int) -> int:
    """Memory that I/O jobs work in at that depth, both ways, more than at the usual depth; negative below that depth. A
    limit on host memory does not count the 16 MiB of the usual depth, since the user did not choose them."""
    return 2 * (io_depth - NUM_AT_ONCE) * SCRATCH_BYTES


def default_settings(memory_bytes: int) -> TrialSettings:
    """All defaults, except that both windows share `memory_bytes`: `host_bytes` is what `staging_bytes` leaves. Raises
    ConfigError: the limit leaves no room for staging."""
    if memory_bytes < LEAST_STAGING_BYTES:
        what = f"give {format_bytes(LEAST_STAGING_BYTES)} or more; staging is part of it"
        raise ConfigError("host_bytes", memory_bytes, what)
    staging_bytes = min(STAGING_BYTES, max(LEAST_STAGING_BYTES, int(memory_bytes * _MOST_STAGING_SHARE)))
    return TrialSettings(memory_bytes - staging_bytes, staging_bytes)


def settings_to_try(start: TrialSettings, memory_bytes: int) -> list[TrialSettings]:
    """About a dozen settings that fill the limit of memory, each near `start`, with the order of backward learned.

    Only what was ever measured to be faster is varied: how memory is divided, the codec, and a deeper queue. The codecs
    and the queue are tried with the staging of `start` and with little, since each has gained most with little. Other
    orders, a fixed distance, shallower queues and other limits of LMDB were never faster
    (docs/project/internals/measurements.md)."""
    start = replace(start, prefetch="learned", lookahead_bytes=None)
    windows = dict.fromkeys((start.staging_bytes, WINDOWS[0]))
    deep = max(start.io_depth, min(2 * start.io_depth, _MOST_IO_DEPTH))
    varied = [replace(start, staging_bytes=window, codec=codec) for codec in CODECS for window in windows]
    varied += [replace(start, staging_bytes=window, io_depth=deep) for window in windows]
    varied += [replace(start, staging_bytes=window) for window in WINDOWS]
    tried: dict[TrialSettings, None] = {}
    for each in varied:
        host_bytes = memory_bytes - each.staging_bytes - working_bytes(each.io_depth)
        if host_bytes >= 0:
            tried[replace(each, host_bytes=host_bytes)] = None
    return list(tried)
