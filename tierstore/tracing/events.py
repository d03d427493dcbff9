"""The events of a trace: one line of JSON for each, `{"event": "pack", ...}`, after a `header`.
`docs/project/internals/trace_format.md` says what each event and field means.

A *graph* is everything that one thread packs between two backwards, in any number of scopes, and the backward that
follows. A *record* is the bytes of one storage; its number is the `key` of the first saved tensor on that storage."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

FORMAT = "tierstore trace"
VERSION = 2


class Machine(msgspec.Struct, frozen=True):
    """The machine that the trace was recorded on. `versions`: of the kernel, Python, torch and tierstore."""

    cpu: str
    num_cores: int
    memory_bytes: int
    versions: Mapping[str, str]
    launches_block: bool = False


class StoreSettings(msgspec.Struct, frozen=True):
    """How the store was opened. None: a daemon decides that."""

    place: str
    is_connected: bool
    host_bytes: int
    staging_bytes: int
    disk_bytes: int
    codec: str | None
    inline_bytes: int | None
    checksum: bool | None
    io_mode: str
    io_depth: int | None = None
    staging_grows: bool = False


class _Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower):
    pass


class _OfGraph(_Event, frozen=True):
    at_ns: int
    graph: int


class _OfTensor(_OfGraph, frozen=True):
    index: int


class _OfBytes(_Event, frozen=True):
    at_ns: int
    record: int
    nbytes: int


class Header(_Event, frozen=True):
    """The first line. `began_ns` and `began_unix_seconds` are the same moment."""

    format: str
    version: int
    began_ns: int
    began_unix_seconds: float
    pid: int
    store: StoreSettings
    machine: Machine


class Scope(_Event, frozen=True):
    """A thread enters a scope. `device_bytes`: as given; with "auto" (`is_automatic`), what had been found by then."""

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
    """A thread leaves a scope. The figures of memory are None where they are not known, or in an older trace."""

    at_ns: int
    thread: int
    scope: int
    failed: bool
    resident_bytes: int | None = None
    allocator_free_bytes: int | None = None


class Pack(_Event, frozen=True):
    """Autograd saved a tensor, and the store took it. `record`: None: it has none yet (see `Booked`). `storage` names
    its storage among tensors that have no record, while the storage lives."""

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


class Booked(_OfTensor, frozen=True):
    """A saved tensor that had no record now has one, perhaps together with other saved tensors."""

    record: int


class Ours(_OfTensor, frozen=True):
    """Only the store still holds the storage of a saved tensor. Recorded by tierstore 0.5 and before."""


class Unpack(_Event, frozen=True):
    """Backward asked for a saved tensor and got it, or an error. The times include waiting."""

    began_ns: int
    end_ns: int
    thread: int
    graph: int
    index: int


class Release(_OfTensor, frozen=True):
    """The graph released a saved tensor. The last release of a record frees its memory."""


class Gone(_OfGraph, frozen=True):
    """The whole graph is freed, and the scopes that saved it have been left."""


class Computed(_OfGraph, frozen=True):
    """How long a graph took on its accelerator, by marks in the stream that computes: forward from its first pack to
    its first unpack, backward from there to its last. Only in trials of `tierstore tune`."""

    forward_seconds: float
    forward_wait_seconds: float
    out_bytes: int
    backward_seconds: float
    backward_wait_seconds: float
    in_bytes: int


class Stall(_Event, frozen=True):
    """A thread waited for `STALL_CAUSES`; one wait may give several events. `record`: None: it waited for room."""

    began_ns: int
    end_ns: int
    thread: int
    cause: str
    record: int | None


class Spill(_Event, frozen=True):
    """A record was written to disk, or could not be. `began_ns`: when a lane took it. The seconds are None where they
    are not known (a daemon's)."""

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


class Freed(_OfBytes, frozen=True):
    """A record that is on disk left host memory."""


class Restore(_Event, frozen=True):
    """A record was read back, or could not be; see `Spill`. `wanted`: False: the graph released it during the read."""

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


class Offload(_OfBytes, frozen=True):
    """A copy from an accelerator to host memory was queued on a stream. Its end is not recorded."""


class Reload(_OfBytes, frozen=True):
    """A copy back was queued."""


class Levels(_Event, frozen=True):
    """The bytes that the tiers hold, as `StoreStats` counts them. `uncharged_bytes`: saved tensors that are where
    autograd left them; those that are only tracked count until their graph is gone."""

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
