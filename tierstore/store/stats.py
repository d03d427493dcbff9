"""What a store tells about itself: a snapshot of its counters, and of what the tiers hold now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

from ..base.config import format_bytes
from ..errors import ConfigTypeError
from ..ledger.counters import Counters

_GIB = 2**30
_LEAST_AWAY_BYTES, _MOST_TIMES_KEPT = 32 * 2**20, 4
"""The summary tells of freed memory that is kept if so much was on disk at once, and a quarter of it is kept."""

_TOTALS_IN_BYTES = (
    "packed",
    "deduplicated",
    "offloaded",
    "reloaded",
    "spilled",
    "written",
    "restored",
    "read",
    "cancelled",
    "forwarded",
    "returned",
)
_NOW_IN_BYTES = {
    "device_gib": "device_bytes",
    "host_gib": "host_bytes",
    "host_peak_gib": "host_bytes_peak",
    "staging_gib": "staging_used_bytes",
    "lent_gib": "lent_bytes",
    "disk_gib": "disk_bytes",
    "disk_peak_gib": "disk_bytes_peak",
}
_STALLS = {"stall_pack_seconds": "pack waits for budget", "stall_unpack_seconds": "unpack waits for restore"}
_WHY_KEPT = {
    "small": "small (`min_bytes`)",
    "parameter": "parameters",
    "alive elsewhere": "alive anyway, because the program holds them too",
    "selected out": "not selected (`select`, `keep_resident`)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """A snapshot of a store. Sizes in bytes, times in seconds.

    Held now:

    Attributes:
        live_handles: handles that are still referenced.
        device_bytes: saved tensors that stay on the accelerator for now, or are just being copied from it.
        device_limit_bytes: what may stay there: `device_bytes` of the scope entered last, or what "auto" has found.
        host_bytes: host memory charged to the budget `host_bytes`, without staging and lent memory.
        host_bytes_peak: the most of it at once. One tensor that is larger than the budget passes through it whole.
        staging_bytes: the fixed size of the staging window for what is being moved to or from disk, and of the memory
            that the I/O jobs work in.
        staging_used_bytes: what is being moved now.
        lent_bytes: restored memory that the store does not use any more, but others still do.
        disk_bytes: taken by records on disk, padding included.
        disk_bytes_peak: the most of it at once.
        write_allowance_bytes: what `max_write_bytes_per_day` allows to be written now; None: no such limit was given,
            or the store uses a daemon.

        resident_bytes: anonymous memory of the whole process that is resident; None: the system did not tell.
        allocator_free_bytes: about how much of that was freed, but is kept by the process's allocator; None: the
            allocator does not tell.

    Totals since the store was opened:

        packed_tensors: saved tensors that were handed to the store. Of a graph that is known to stay on its
            accelerator, the rest is counted at the end of its scope, as it was before.
        packed_bytes: their bytes, each storage counted once.
        deduplicated_bytes: bytes of saved tensors that turned out to be views of a storage that is stored already.
        kept_bytes: left where they are, by reason: "parameter", "small", "alive elsewhere", "unsupported",
            "selected out", "checkpoint policy" (by `selective_checkpoint_contexts`). No memory: each save of a tensor
            counts. A weight counts in every step, and two views of one storage count both. In a scope that has taken
            its hooks off, nothing counts.
        offloaded_bytes: copied from an accelerator to host memory.
        reloaded_bytes: copied back.
        pageable_copy_bytes: the part of both that went to or from host memory that is not pinned, for which the host
            waits: copies before the slab is pinned, and of tensors that fit nowhere in it.
        spilled_bytes: logical bytes written to disk.
        written_bytes: bytes that they take on disk.
        restored_bytes: logical bytes read back from disk.
        read_bytes: bytes that they took on disk.
        open_seconds: how long the store has been open; `written_bytes` divided by it tells how fast the drive wears.
        cancelled_bytes: freed before their write began: never written.
        forwarded_bytes: asked for while still on the way down, and handed over from memory.
        prefetch_hits: requests for bytes that were prefetched in time.
        prefetch_late: requests while the prefetch was still running.
        prefetch_misses: requests for bytes that were still on disk.
        returned_bytes: freed memory that the store made the allocator return to the system.
        return_seconds: how long that took, on a thread of the store.
        stall_seconds: time that training threads waited, by cause: "pack waits for budget", "unpack waits for
            restore".

    How it works here:

        io_mode: how records are read and written: "O_DIRECT", or "buffered" and why. Records of up to 128 KiB in the
            index go through the page cache in any case; with a larger `inline_bytes` it says so.
        host_memory: what the slab is made of: "pageable", "pinned", or "pageable" and why it is not pinned, or which
            part of it.
        memory_return: when freed memory is returned: "auto", "always", "never", or "off" and why. With the caching
            allocator (docs/how_to/memory_on_cpu.md) also whose memory it serves.
        codec_choices: how often each codec was used, by kind of tensor: its dtype and, under "auto", what its bytes
            look like, such as "float32, many zeros". "bits" is a mask with a bit for each byte.
        memory_plan: figures of the `MemoryPlan` that uses the store; empty: none does. `limit_bytes`,
            `predicted_peak_bytes`, `measured_peak_bytes`, `predicted_step_seconds`, `measured_step_seconds`.
    """

    live_handles: int
    device_bytes: int
    device_limit_bytes: int
    host_bytes: int
    host_bytes_peak: int
    staging_bytes: int
    staging_used_bytes: int
    lent_bytes: int
    disk_bytes: int
    disk_bytes_peak: int
    write_allowance_bytes: int | None
    resident_bytes: int | None = field(default=None, compare=False)
    allocator_free_bytes: int | None = field(default=None, compare=False)
    packed_tensors: int
    packed_bytes: int
    deduplicated_bytes: int
    kept_bytes: Mapping[str, int]
    offloaded_bytes: int
    reloaded_bytes: int
    pageable_copy_bytes: int
    spilled_bytes: int
    written_bytes: int
    restored_bytes: int
    read_bytes: int
    open_seconds: float = field(compare=False)  # so that two snapshots between which nothing happened are equal
    cancelled_bytes: int
    forwarded_bytes: int
    prefetch_hits: int
    prefetch_late: int
    prefetch_misses: int
    returned_bytes: int = 0
    return_seconds: float = 0.0
    stall_seconds: Mapping[str, float]
    io_mode: str
    host_memory: str
    memory_return: str = ""
    codec_choices: Mapping[str, Mapping[str, int]]
    memory_plan: Mapping[str, float] = field(default_factory=dict, compare=False)

    @classmethod
    def _of(cls, counters: Counters, **now: Any) -> StoreStats:
        totals = asdict(counters)
        totals["kept_bytes"] = MappingProxyType(dict(counters.kept_bytes))
        totals["stall_seconds"] = MappingProxyType(dict(counters.stall_seconds))
        return cls(**totals, **now)

    def as_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}
        plain["codec_choices"] = {kind: dict(counts) for kind, counts in self.codec_choices.items()}
        return plain

    def as_metrics(self, since: StoreStats | None = None) -> dict[str, float]:
        """Numbers for a log of metrics (TensorBoard and the like), with names that stay the same between releases.

        Sizes are in GiB (`tierstore/spilled_gib`), times in seconds (`tierstore/stall_seconds`, and its parts
        `stall_pack_seconds` and `stall_unpack_seconds`). Totals: packed, kept (each save counts, as in `kept_bytes`),
        deduplicated, offloaded, reloaded, spilled, written, restored, read, cancelled, forwarded and returned bytes;
        `prefetch_hits`, `prefetch_late`, `prefetch_missed`. Held now: `device_gib`, `host_gib`, `staging_gib`,
        `lent_gib`, `disk_gib`, `live_handles`, and `resident_gib` where the system tells. The most at once:
        `host_peak_gib`, `disk_peak_gib`. Where a memory plan is applied: its figures (`memory_plan`), such as
        `plan_measured_peak_gib`.

        Args:
            since: an earlier snapshot of the same store. Totals are then those since it; what is held now, and the
                most at once, stay what they are.

        Raises:
            ConfigTypeError: `since` is no snapshot.
        """
        if since is not None and not isinstance(since, StoreStats):
            raise ConfigTypeError("since", since, "give an earlier StoreStats of the same store, or None")
        totals = _totals_of(self)
        if since is not None:
            before = _totals_of(since)
            totals = {name: total - before[name] for name, total in totals.items()}
        now = {name: getattr(self, field) / _GIB for name, field in _NOW_IN_BYTES.items()}
        now["live_handles"] = float(self.live_handles)
        if self.resident_bytes is not None:
            now["resident_gib"] = self.resident_bytes / _GIB
        for name, value in self.memory_plan.items():
            if name.endswith("_bytes"):
                now[f"plan_{name.removesuffix('_bytes')}_gib"] = value / _GIB
            else:
                now[f"plan_{name}"] = value
        return {f"tierstore/{name}": value for name, value in (totals | now).items()}

    def summary(self) -> str:
        """One line for people: what was stored, where it went, and how long training waited.

        If nothing was stored, it begins with a warning and says why. It also tells when the staging window
        (`staging_bytes`) is larger than all that was saved at a time, and nothing came from an accelerator. And when
        the process's allocator keeps freed memory: a quarter or more of the most that was on disk, if that was 32 MiB.
        """
        if not self.packed_bytes:
            return f"tierstore: warning: nothing was stored; {_why_nothing(self)}"
        parts = [f"{format_bytes(self.packed_bytes)} of saved tensors stored"]
        if self.offloaded_bytes:
            parts.append(f"{format_bytes(self.offloaded_bytes)} copied from the accelerator")
        if self.spilled_bytes:
            parts.append(
                f"{format_bytes(self.spilled_bytes)} written to disk as {format_bytes(self.written_bytes)}, "
                f"{format_bytes(self.restored_bytes)} read back"
            )
        else:
            parts.append("nothing had to be written to disk: `host_bytes` and the staging window had room")
        held = f"at most {format_bytes(self.host_bytes_peak)} held in host memory"
        parts.append(held + (f" and {format_bytes(self.disk_bytes_peak)} on disk" if self.disk_bytes_peak else ""))
        parts.append(f"training waited {sum(self.stall_seconds.values()):.2f} s in {_duration(self.open_seconds)}")
        saved_per_written = max(1.0, self.spilled_bytes / self.written_bytes) if self.written_bytes else 1.0
        away_bytes = self.disk_bytes_peak * saved_per_written  # as far as the drive's codec tells
        if self.host_bytes_peak + away_bytes < self.staging_bytes and not self.offloaded_bytes:
            parts.append(
                f"note: the staging window of {format_bytes(self.staging_bytes)} (`staging_bytes` and working memory, "
                "with a daemon `window_bytes`) is larger than what was saved at a time, so no memory was gained"
            )
        if self.spilled_bytes and "tmpfs" in self.io_mode:
            parts.append("note: that disk is memory (tmpfs), so none was gained; name a directory on a drive")
        free_bytes = self.allocator_free_bytes or 0
        is_left_to_allocator = not self.returned_bytes and not self.memory_return.startswith(("always", "never"))
        if is_left_to_allocator and _LEAST_AWAY_BYTES <= away_bytes <= _MOST_TIMES_KEPT * free_bytes:
            parts.append(
                "note: the process has not shrunk by all that went to disk: its allocator keeps "
                f"{format_bytes(free_bytes)} of freed memory{_for_what(self)} (docs/how_to/memory_on_cpu.md)"
            )
        return f"tierstore: {'; '.join(parts)}"


def _totals_of(stats: StoreStats) -> dict[str, float]:
    totals = {f"{name}_gib": getattr(stats, f"{name}_bytes") / _GIB for name in _TOTALS_IN_BYTES}
    totals["kept_gib"] = sum(stats.kept_bytes.values()) / _GIB
    totals["stall_seconds"] = sum(stats.stall_seconds.values())
    totals |= {name: stats.stall_seconds[cause] for name, cause in _STALLS.items()}
    totals["prefetch_hits"] = float(stats.prefetch_hits)
    totals["prefetch_late"] = float(stats.prefetch_late)
    totals["prefetch_missed"] = float(stats.prefetch_misses)
    return totals


def _for_what(stats: StoreStats) -> str:
    if "caching allocator" in stats.memory_return:
        return " for the tensors that come next"
    return "; tierstore-native's caching allocator would use it again"


def _why_nothing(stats: StoreStats) -> str:
    kept = {reason: nbytes for reason, nbytes in stats.kept_bytes.items() if nbytes}
    if not kept:
        return "no saved tensor was seen: does forward run inside the scope, with gradients enabled?"
    reasons = sorted(kept.items(), key=lambda item: -item[1])
    told = ", ".join(f"{format_bytes(nbytes)} {_WHY_KEPT.get(reason, reason)}" for reason, nbytes in reasons)
    return f"{format_bytes(sum(kept.values()))} of saved tensors stayed where they are (each save counts): {told}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
