"""What a trace is made of: one line of JSON for each event, `{"event": "pack", ...}`, after a `header`.

Times are nanoseconds of the process's monotonic clock (`time.perf_counter_ns`); fields with them end in `_ns`. Lines
come nearly in the order in which things ended; what lasts has one line, when it is over.

Who is who: a *graph* is what one thread packs between one backward and the next, in however many scopes, and the
backward of that; it is a step, where a step has one forward and one backward. (`graph`, `index`) names one saved tensor
for good. A *record* is the bytes of one storage; its number is the `key` of the saved tensor that was first of it.

`docs/tracing.md` has the same for people who read a file.
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
    """What it was recorded on.

    Attributes:
        cpu: the processor's name.
        num_cores: that the process may use.
        memory_bytes: of the machine.
        versions: of the kernel, Python, torch and tierstore.
        launches_block: CUDA was told to have the host wait for each kernel (`CUDA_LAUNCH_BLOCKING`), so that what
            passes between two calls of a thread is what the accelerator computes.
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
        is_connected: a daemon keeps its disk tier; `codec`, `inline_bytes` and `checksum` are its own then, and None.
        host_bytes, staging_bytes, disk_bytes: its budgets.
        num_spill_lanes, num_restore_lanes: so many records are on their way down and up at once, at most.
        io_mode: how it reads and writes.
        io_depth: so many of them are at the drive at once, each way; None: the daemon's, or an older trace.
        staging_grows: `staging_bytes` was not given: it takes from `host_bytes` what large tensors need.
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
    """A thread enters a scope; its options. Of `select` it is only told that there is one (`has_select`).

    Attributes:
        device_bytes: as given; where that is "auto" (`is_automatic`), what was found by then.
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
        resident_bytes: anonymous memory of the process then; None: not known, or an older trace.
        allocator_free_bytes: of that, about so much was freed and is kept by the allocator; None: not known.
    """

    at_ns: int
    thread: int
    scope: int
    failed: bool
    resident_bytes: int | None = None
    allocator_free_bytes: int | None = None


class Pack(_Event, frozen=True):
    """Autograd saved a tensor, and the store took it. What was kept where it is has no event.

    Attributes:
        began_ns, end_ns: of the call, waiting included.
        graph, index: its name; the index counts the packs of the graph.
        key: its number.
        record: of which it is a view; None: it has none yet (see `Booked`).
        node: of autograd, which saved it; higher ones come later in forward.
        storage: names its storage as long as that lives, among tensors that have no record.
        version: of the tensor, counting changes in place.
        storage_bytes, view_bytes: of the storage, and of the tensor's elements.
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
    """A saved tensor that had none has a record, which may be another's."""

    at_ns: int
    graph: int
    index: int
    record: int


class Ours(_Event, frozen=True):
    """Nobody but the store holds the storage of a saved tensor any more; only now may its bytes be taken away.

    Told once, when it is seen: before a pack or an unpack, or when a scope ends. Never for what others hold throughout.
    """

    at_ns: int
    graph: int
    index: int


class Unpack(_Event, frozen=True):
    """Backward asked for a saved tensor, and got it, waiting included, or an error."""

    began_ns: int
    end_ns: int
    thread: int
    graph: int
    index: int


class Release(_Event, frozen=True):
    """The graph let go of a saved tensor. With the last one of a record, its memory is free."""

    at_ns: int
    graph: int
    index: int


class Gone(_Event, frozen=True):
    """All of a graph is gone, and the scopes that saved it are left."""

    at_ns: int
    graph: int


class Computed(_Event, frozen=True):
    """What a graph that is gone has taken on its accelerator, by marks in the stream that computes. In trials of
    `tierstore tune` alone, where a scope waits for the accelerator before it is entered.

    Attributes:
        at_ns: all of it was over.
        forward_seconds, backward_seconds: from its first pack to its first unpack, and from there to its last.
        forward_wait_seconds, backward_wait_seconds: of them, computing waited for copies.
        out_bytes, in_bytes: queued to be copied out in forward, and back in backward.
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
    """A thread waited; `cause` is one of `STALL_CAUSES` of `stats.py`. One wait may be several, one after the other.

    Attributes:
        record: whose bytes it waited for; None: for room.
    """

    began_ns: int
    end_ns: int
    thread: int
    cause: str
    record: int | None


class Spill(_Event, frozen=True):
    """A record was written to disk, or could not be.

    Attributes:
        nbytes, stored_bytes: logical bytes, and those on disk for them.
        codec: what they were encoded with; "none", "zstd:1", ...; "" where it failed.
        kind: of the content, such as "float32, many zeros".
        lane: which of the engine's lanes.
        queued_ns, began_ns, end_ns: chosen to leave; a lane took it; it is on disk.
        drive_seconds: of that at the drive; None: not known (a daemon's).
        cpu_seconds: CPU time of encoding and checksum; likewise.
        failed: why, or None.
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
    """A write or a read that had been queued, or had begun, is not wanted any more."""

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
        read_bytes: from disk.
        demanded: it was queued because a thread asked for it, not ahead of that.
        wanted: False: the graph let go of it meanwhile; it does not count in `restored_bytes`.
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
    """A copy from an accelerator to host memory was queued on its stream; it ends later, unseen by the host."""

    at_ns: int
    record: int
    nbytes: int


class Reload(_Event, frozen=True):
    """A copy back was queued; likewise."""

    at_ns: int
    record: int
    nbytes: int


class Levels(_Event, frozen=True):
    """What the tiers hold, in bytes, by the store's own books, which are `StoreStats`'s.

    Attributes:
        uncharged_bytes: saved tensors that are where autograd left them, and not charged to a budget (yet); what is
            only noted counts until its graph is gone.
    """

    at_ns: int
    device_bytes: int
    uncharged_bytes: int
    host_bytes: int
    staging_bytes: int
    lent_bytes: int
    disk_bytes: int


class Lost(_Event, frozen=True):
    """So many events were not recorded here, because the file was slower than training."""

    at_ns: int
    num_events: int


class End(_Event, frozen=True):
    """The last line, where the trace was ended. A killed process writes none."""

    at_ns: int
    reason: str


Event = (
    Header | Scope | ScopeEnd | Pack | Booked | Ours | Unpack | Release | Gone | Computed | Stall | Spill | Cancelled
    | Freed | Restore | Offload | Reload | Levels | Lost | End
)  # fmt: skip
