"""Handles, the records behind them, and the one table of states and legal moves.

A `Handle` is what the outside holds; when its last reference goes, the record behind it is released. A `Record`
is the store's own bookkeeping of the same bytes. The two are apart so that the store's queues can hold records
without keeping anybody's data alive: the tensors are the handle's, so they go with it, at once.

State of a record        the bytes are                          who may move it
---------------------    -----------------------------------    ------------------------------------------
PENDING                  where autograd left them; somebody     sole owner → HOST or DEVICE
                         else holds them too, or may still
                         write to them
DEVICE                   on the accelerator, ours alone         chosen → OFFLOADING; shared again → PENDING
OFFLOADING               on the accelerator, being copied       copied → HOST; chosen as victim → QUEUED
HOST                     in host memory                         chosen as victim → QUEUED; shared again → PENDING
QUEUED                   in host memory, write not begun        asked for → HOST; write begins → WRITING
WRITING                  in host memory, being written          written → CLEAN; full or failed → HOST
CLEAN                    in host memory and on disk             memory needed → DISK
DISK                     on disk                                asked for or prefetched → READING
READING                  on disk, being read                    read → CLEAN; retryable → DISK; damaged → FAILED
FAILED                   nowhere                                every request raises the same cause
DOOMED                   the running job's; the handle is gone  job ends → FREED
FREED                    nowhere; the handle is gone            -
CLOSED                   nowhere; the store is closed           released → FREED

Beside these, a record whose handle is gone moves to FREED from any state, or to DOOMED while a job is about it; and all
of them move to CLOSED when the store is closed.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .remains import Remains

if TYPE_CHECKING:
    import torch

    from .copies import Marker
    from .disk.tier import Kind
    from .host import Window
    from .layout import Layout
    from .plan import Place
    from .slab import Slot

__all__ = ["IN_MEMORY", "MOVES", "Handle", "Record", "State"]


class State(enum.Enum):
    """Where a record's bytes are; the module's docstring has the table."""

    PENDING = "pending"
    DEVICE = "device"
    OFFLOADING = "offloading"
    HOST = "host"
    QUEUED = "queued"
    WRITING = "writing"
    CLEAN = "clean"
    DISK = "disk"
    READING = "reading"
    FAILED = "failed"
    DOOMED = "doomed"
    FREED = "freed"
    CLOSED = "closed"


_END = frozenset({State.FREED, State.CLOSED})
_JOB_END = frozenset({State.DOOMED, State.CLOSED})

MOVES: Mapping[State, frozenset[State]] = {
    State.PENDING: frozenset({State.HOST, State.DEVICE}) | _END,
    State.DEVICE: frozenset({State.OFFLOADING, State.PENDING}) | _END,
    State.OFFLOADING: frozenset({State.HOST, State.QUEUED}) | _END,
    State.HOST: frozenset({State.QUEUED, State.PENDING}) | _END,
    State.QUEUED: frozenset({State.HOST, State.WRITING}) | _END,
    State.WRITING: frozenset({State.CLEAN, State.HOST}) | _JOB_END,
    State.CLEAN: frozenset({State.DISK}) | _END,
    State.DISK: frozenset({State.READING}) | _END,
    State.READING: frozenset({State.CLEAN, State.DISK, State.FAILED, State.FREED}) | _JOB_END,
    State.FAILED: _END,
    State.DOOMED: _END,
    State.FREED: frozenset(),
    State.CLOSED: frozenset({State.FREED}),
}
"""Every legal move. `Record.move` refuses all others."""

IN_MEMORY = frozenset({State.PENDING, State.DEVICE, State.OFFLOADING, State.HOST, State.WRITING, State.CLEAN})
"""Where the bytes can be handed over at once. Of QUEUED too, but then they must not be written any more."""


_NO_VIEWS: Mapping[Layout, torch.Tensor] = MappingProxyType({})


class Record(Remains["Handle"]):
    """The store's bookkeeping of one storage's bytes. Changed only under the store's lock.

    Called, it gives the handle, None once that is gone; it is then in the store's queue to be released.

    Attributes:
        key: unique in this store, growing in the order of packing.
        state: see the table above; assigned by `move` alone.
        version: the version counter when it was saved.
        root: the tensor that was saved, or its base, for as long as that lives.
        address: where the source's storage lay when it was saved; what has moved since is somebody else's to manage.
        claims, storage_id: see `ownership`.
        shared: somebody else held its storage when it was last looked at.
        forced: stored whoever else holds its storage.
        nbytes: of the storage; once it has been on disk: of what is stored of it.
        layout: of the tensor that was saved first.
        joined: layouts of further views that were saved of the same storage, for the span that has to be stored.
        books: the `Residency` that keeps it.
        span: (first byte, end) of the storage that is stored; None until the bytes are first read.
        first_byte: the byte of the storage that was saved at which the source's storage begins.
        phase: of the stored span's address, modulo 4096.
        window, charged_bytes: which budget is charged, and with how much.
        slot: the slab memory that holds the bytes, or will.
        device: the accelerator that the tensor lives on; None: host memory.
        stream: the accelerator's stream that packed it.
        ready: until that point of a copy stream the slot is being copied to or from.
        held: what a running job works on, kept alive by it; None: no job is running.
        stored_bytes: taken on disk; 0 where nothing is.
        kind: for the codec.
        worth: of what has to leave, the lowest goes first: its key, unless it is known when it is needed.
        place: where it waits for backward, if that is known.
        demanded: how many threads wait for the bytes.
        wanted: backward will ask for it soon: it stays in memory once it is written.
        urgent: the queued read was told so.
        fetched: restored, and not asked for since.
        cause: why the bytes could not be read.
    """

    __slots__ = (
        "__weakref__", "address", "books", "cause", "charged_bytes", "claims", "demanded", "device", "fetched",
        "first_byte", "forced", "held", "joined", "key", "kind", "layout", "nbytes", "phase", "place", "ready", "root",
        "shared", "slot", "span", "state", "storage_id", "stored_bytes", "stream", "urgent", "version", "wanted",
        "window", "worth",
    )  # fmt: skip

    def __init__(
        self,
        handle: Handle,
        note_release: Callable[[Record], None],
        key: int,
        nbytes: int,
        address: int,
        layout: Layout,
        kind: Kind,
    ) -> None:
        self.key = key
        self.state = State.PENDING
        self.version: int = handle.source._version
        self.root: weakref.ref[torch.Tensor] | None = None
        self.address = address
        self.claims: list[weakref.ref[Record]] | None = None
        self.storage_id = 0
        self.shared = False
        self.forced = False
        self.nbytes = nbytes
        self.layout = layout
        self.joined: tuple[Layout, ...] = ()
        self.books: object = None
        self.span: tuple[int, int] | None = None
        self.first_byte = 0
        self.phase = 0
        self.window: Window | None = None
        self.charged_bytes = 0
        self.slot: Slot | None = None
        self.device: torch.device | None = None
        self.stream: Any = None
        self.ready: Marker | None = None
        self.held: object = None
        self.stored_bytes = 0
        self.kind = kind
        self.worth = key
        self.place: Place | None = None
        self.demanded = 0
        self.wanted = False
        self.urgent = False
        self.fetched = False
        self.cause: BaseException | None = None

    @property
    def source(self) -> torch.Tensor | None:
        """See `Handle`; None once that is gone."""
        handle = self()
        return None if handle is None else handle.source

    @property
    def views(self) -> Mapping[Layout, torch.Tensor]:
        """See `Handle`; empty once that is gone."""
        handle = self()
        return _NO_VIEWS if handle is None else handle.views

    def keep_view(self, layout: Layout, view: torch.Tensor) -> None:
        """A tensor is handed out."""
        handle = self()
        if handle is not None:
            handle.views = {**handle.views, layout: view}

    def forget_views(self) -> None:
        """The bytes leave memory."""
        handle = self()
        if handle is not None:
            handle.views = _NO_VIEWS

    @property
    def lent(self) -> tuple[torch.Tensor, ...]:
        """See `Handle`; empty once that is gone."""
        handle = self()
        return () if handle is None else handle.lent

    def lend(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """These, of what was handed out earlier, are still in use."""
        handle = self()
        if handle is not None:
            handle.lent = tensors

    def move(self, to: State) -> None:
        """Change the state; an illegal move is a bug of ours (RuntimeError)."""
        if to not in MOVES[self.state]:
            raise RuntimeError(f"handle {self.key}: illegal move {self.state.name} → {to.name}")
        self.state = to

    def __repr__(self) -> str:
        return f"<Record {self.key} {self.state.name} {self.nbytes} bytes>"


class Handle:
    """A reference to bytes in a store. When the last reference goes, they are freed.

    Handles are made by `TierStore.put`, opaque, hashable by identity, and cannot be pickled. A handle keeps its
    store open. Dropping one never blocks and may happen on any thread: see NOTE [No finalizers] in `remains.py`.

    Attributes:
        owner: the store, which is kept open.
        record: the store's bookkeeping of the bytes.
        source: a detached alias of the saved tensor. It shares the saved tensor's version counter for as long as
            the handle lives, and its storage while the bytes are in memory (restored ones too: `source.data` is
            swapped).
        views: tensors that were handed out, by layout, while the bytes are in memory: see NOTE [Stolen gradients] in
            `residency.py`.
        lent: tensors that were handed out earlier and are still in use: see `lent.py`.
    """

    __slots__ = ("__weakref__", "lent", "owner", "record", "source", "views")

    record: Record

    def __init__(self, owner: object, source: torch.Tensor) -> None:
        self.owner = owner
        self.source = source
        self.views = _NO_VIEWS
        self.lent: tuple[torch.Tensor, ...] = ()

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a tierstore handle belongs to its process and cannot be pickled")

    def __repr__(self) -> str:
        return f"<Handle {self.record.key} {self.record.state.value} {self.record.nbytes} bytes>"
