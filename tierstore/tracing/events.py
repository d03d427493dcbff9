"""The events of a trace: one line of JSON for each, `{"event": "pack", ...}`, after a `header`.

Times are nanoseconds of the process's monotonic clock (`time.perf_counter_ns`); their fields end in `_ns`. Lines are
nearly in the order in which things ended: an event that lasts is written when it is over.

A *graph* is everything that one thread packs between two backwards, in any number of scopes, and the backward that
follows. If a step has one forward and one backward, the graph is the step. (`graph`, `index`) names one saved tensor
for good. A *record* is the bytes of one storage; its number is the `key` of the first saved tensor on that storage.

`docs/reference/trace_format.md` says the same for people who read a trace file.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

__all__ = [
    "FORMAT",
    "OWNERS_SINCE_VERSION",
    "VERSION",
    "Booked",
    "Cancelled",
    "Computed",
    "End",
    "Event",
    "Freed",
    "Gone",
    "Header",
    "Levels",
    "Lost",
    "Machine",
    "Offload",
    "Ours",
    "Pack",
    "Release",
    "Reload",
    "Restore",
    "Scope",
    "ScopeEnd",
    "Spill",
    "Stall",
    "StoreSettings",
    "Unpack",
]

FORMAT = "tierstore trace"
VERSION = 2
OWNERS_SINCE_VERSION = 2
"""Traces of version 1 have no `Ours`."""


class Machine(msgspec.Struct, frozen=True):
    """The machine that the trace was recorded on.

    Attributes:
        cpu: the processor's name.
        num_cores: cores that the process may use.
        memory_bytes: memory of the machine.
        versions: of the kernel, Python, torch and tierstore.
        launches_block: the host waits for each CUDA kernel (`CUDA_LAUNCH_BLOCKING`), so the time between two calls of
            a thread is the time that the accelerator computes.
    """

    cpu: str
    num_cores: int
    memory_bytes: int
    versions: Mapping[str, str]
    launches_block: bool = False


class StoreSettings(msgspec.Struct, frozen=True):
    """How the store was opened.

    Attributes:
        place: its directory, or the daemon's address.
        is_connected: a daemon keeps its disk tier. The daemon then decides `codec`, `inline_bytes` and `checksum`;
            they are None here.
        host_bytes, staging_bytes, disk_bytes: its budgets.
        num_spill_lanes, num_restore_lanes: how many records are on their way to disk, and back, at once, at most.
        io_mode: how it reads and writes.
        io_depth: how many records are at the drive at once, each way; None: the daemon's, or an older trace.
        staging_grows: `staging_bytes` was not given, so it takes from `host_bytes` what large tensors need.
    """

    place: str
    is_connected: bool
    host_bytes: int
    staging_bytes: int
    disk_bytes: int
    codec: str | None
    inline_bytes: int | None
    checksum: bool | None
    num_spill_lanes: int
    num_restore_lanes: int
    io_mode: str
    io_depth: int | None = None
    staging_grows: bool = False


class _Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower):
    pass


class Header(_Event, frozen=True):
    """The first line.

    Attributes:
        began_ns: when the trace began; `began_unix_seconds`: the same moment by the wall clock.
    """

    format: str
    version: int
    began_ns: int
    began_unix_seconds: float
    pid: int
    store: StoreSettings
    machine: Machine


class Scope(_Event, frozen=True):
    """A thread enters a scope with these options. `has_select`: the option `select` is given.

    Attributes:
        device_bytes: as given; with "auto" (`is_automatic`), the size that had been found by then.
    """

    at_ns: int
    thread: int
    thread_name: str
    scope: int
    min_bytes: int
    device_bytes: int
    prefetch: str
    lookahead_bytes: int
    has_select: bool
    is_automatic: bool = False


class ScopeEnd(_Event, frozen=True, tag="scope_end"):
    """A thread leaves a scope. `failed`: with an exception.

    Attributes:
        resident_bytes: anonymous memory of the process at that moment; None: not known, or an older trace.
        allocator_free_bytes: the part of it that is freed but kept by the allocator, roughly; None: not known.
    """

    at_ns: int
    thread: int
    scope: int
    failed: bool
    resident_bytes: int | None = None
    allocator_free_bytes: int | None = None


class Pack(_Event, frozen=True):
    """Autograd saved a tensor, and the store took it. Tensors that the store left alone have no event.

    Attributes:
        began_ns, end_ns: of the call, waiting included.
        graph, index: its name; the index counts the packs of the graph.
        key: its number.
        record: the record that it is a view of; None: it has none yet (see `Booked`).
        node: the autograd node that saved it; later nodes of forward have higher numbers.
        storage: names its storage among tensors that have no record, while the storage lives.
        version: the tensor's count of in-place changes.
        storage_bytes, view_bytes: size of the storage, and of the tensor's elements.
    """

    began_ns: int
    end_ns: int
    thread: int
    scope: int
    graph: int
    index: int
    key: int
    record: int | None
    node: int
    storage: int
    version: int
    storage_bytes: int
    view_bytes: int
    dtype: str
    device: str
    shape: tuple[int, ...]


class Booked(_Event, frozen=True):
    """A saved tensor that had no record now has one, perhaps together with other saved tensors."""

    at_ns: int
    graph: int
    index: int
    record: int


class Ours(_Event, frozen=True):
    """Only the store still holds the storage of a saved tensor. From now on it may take the bytes out of memory.

    Recorded once, when noticed: before a pack or an unpack, or when a scope ends. Never if others hold it throughout.
    """

    at_ns: int
    graph: int
    index: int


class Unpack(_Event, frozen=True):
    """Backward asked for a saved tensor and got it, or an error. The times include waiting."""

    began_ns: int
    end_ns: int
    thread: int
    graph: int
    index: int


class Release(_Event, frozen=True):
    """The graph released a saved tensor. The last release of a record frees its memory."""

    at_ns: int
    graph: int
    index: int


class Gone(_Event, frozen=True):
    """The whole graph is freed, and the scopes that saved it have been left."""

    at_ns: int
    graph: int


class Computed(_Event, frozen=True):
    """How long a graph took on its accelerator, measured by marks in the stream that computes. Recorded only in trials
    of `tierstore tune`, where each scope first waits for the accelerator.

    Attributes:
        at_ns: when all of it was over.
        forward_seconds, backward_seconds: from its first pack to its first unpack, and from there to its last.
        forward_wait_seconds, backward_wait_seconds: the part of them in which computing waited for copies.
        out_bytes, in_bytes: bytes queued to be copied out in forward, and back in backward.
    """

    at_ns: int
    graph: int
    forward_seconds: float
    forward_wait_seconds: float
    out_bytes: int
    backward_seconds: float
    backward_wait_seconds: float
    in_bytes: int


class Stall(_Event, frozen=True):
    """A thread waited; `cause` is one of `STALL_CAUSES` of `stats.py`. One wait may give several events in a row.

    Attributes:
        record: the record whose bytes it waited for; None: it waited for room.
    """

    began_ns: int
    end_ns: int
    thread: int
    cause: str
    record: int | None


class Spill(_Event, frozen=True):
    """A record was written to disk, or could not be.

    Attributes:
        nbytes, stored_bytes: logical bytes, and the bytes that they take on disk.
        codec: what encoded them: "none", "zstd:1", ...; "" if the write failed.
        kind: kind of the content, such as "float32, many zeros".
        lane: number of the engine's lane.
        queued_ns, began_ns, end_ns: when it was chosen to leave memory, when a lane took it, when it was on disk.
        drive_seconds: time at the drive; None: not known (a daemon's).
        cpu_seconds: CPU time of encoding and checksum; None: not known (a daemon's).
        failed: why the write failed; None: it did not.
    """

    record: int
    nbytes: int
    stored_bytes: int
    codec: str
    kind: str
    lane: int
    queued_ns: int
    began_ns: int
    end_ns: int
    drive_seconds: float | None
    cpu_seconds: float | None
    failed: str | None


class Cancelled(_Event, frozen=True):
    """A write or a read is no longer wanted. It was queued, or had begun already."""

    at_ns: int
    record: int
    what: str
    nbytes: int


class Freed(_Event, frozen=True):
    """A record that is on disk left host memory."""

    at_ns: int
    record: int
    nbytes: int


class Restore(_Event, frozen=True):
    """A record was read back, or could not be. See `Spill`.

    Attributes:
        read_bytes: bytes read from disk.
        demanded: it was queued because a thread asked for it, not ahead of that.
        wanted: False: the graph released it during the read, and `restored_bytes` does not count it.
    """

    record: int
    nbytes: int
    read_bytes: int
    lane: int
    demanded: bool
    wanted: bool
    queued_ns: int
    began_ns: int
    end_ns: int
    drive_seconds: float | None
    cpu_seconds: float | None
    failed: str | None


class Offload(_Event, frozen=True):
    """A copy from an accelerator to host memory was queued on a stream. Its end is not recorded."""

    at_ns: int
    record: int
    nbytes: int


class Reload(_Event, frozen=True):
    """A copy from host memory to an accelerator was queued on a stream. Its end is not recorded."""

    at_ns: int
    record: int
    nbytes: int


class Levels(_Event, frozen=True):
    """The bytes that the tiers hold, as the store counts them for `StoreStats`.

    Attributes:
        uncharged_bytes: saved tensors that are where autograd left them and that no budget is charged for (yet).
            Tensors that are only noted count until their graph is gone.
    """

    at_ns: int
    device_bytes: int
    uncharged_bytes: int
    host_bytes: int
    staging_bytes: int
    lent_bytes: int
    disk_bytes: int


class Lost(_Event, frozen=True):
    """`num_events` events are missing here, because the file was slower than training."""

    at_ns: int
    num_events: int


class End(_Event, frozen=True):
    """The last line of a trace that was ended. A killed process does not write it."""

    at_ns: int
    reason: str


Event = (
    Header | Scope | ScopeEnd | Pack | Booked | Ours | Unpack | Release | Gone | Computed | Stall | Spill | Cancelled
    | Freed | Restore | Offload | Reload | Levels | Lost | End
)  # fmt: skip
