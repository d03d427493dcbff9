"""`TierStore`: the public interface of the store, for any thread.

`put` (or the hooks) makes a record and hands it to the residency (`residency/residency.py`). The rules (`ledger/`)
decide what leaves memory. The engine (`engine.py`) moves it; the disk tier (`disk/local.py`) keeps it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypedDict, Unpack

import torch

from ..base.config import Mode, SizeLike
from ..base.config_file import ConfigSource, store_options
from ..base.defaults import NUM_AT_ONCE
from ..errors import ConfigError, ConfigTypeError
from ..residency.handle import Handle, Record
from ..tensors.layout import outside_of_modes, storage_of
from ..tensors.uncompiled import uncompiled
from .codec_names import Codec
from .core import Core
from .options import StoreOptions, connected_options, local_options, options_over, refuses_unknown
from .stats import StoreStats

if TYPE_CHECKING:
    from ..returning.advice import MemoryUse
    from ..tensors.copies import Copies
    from .engine import OpenDisk

_CLOSE_DEADLINE_SECONDS = 60.0


class StoreChanges(TypedDict, total=False):
    """What `TierStore.from_config` takes beside a file: arguments of `TierStore` and `TierStore.connect`."""

    path: str | PathLike[str] | Sequence[str | PathLike[str]]
    connect: str | PathLike[str]
    host_bytes: SizeLike | None
    disk_bytes: SizeLike | None
    codec: Codec
    staging_bytes: SizeLike | None
    inline_bytes: SizeLike | None
    checksum: bool
    io_depth: int
    max_write_bytes_per_day: SizeLike | None
    return_memory: Mode
    window_bytes: SizeLike
    reconnect_seconds: float
    daemon_uid: int | None
    name: str | None
    copies: Copies | None


class TierStore:
    """Keeps tensors in host memory within a budget, and on disk beyond it.

    Args:
        path: an existing directory on the drive, or a list of them, one on each drive (docs/how_to/several_drives.md).
            It is never created. Nothing becomes visible in it, and nothing is left behind, however the process ends.
        host_bytes: host memory that the store may hold; 0: everything goes to disk. Default: a quarter of what is
            available within the memory cgroup's limit, divided by LOCAL_WORLD_SIZE; of less than 896 MiB, an eighth.
        disk_bytes: what may be held on disk, taken as it is needed. Default: 80 % of what is free under `path`,
            divided by LOCAL_WORLD_SIZE. More than is free is allowed. Several drives share it as their free space is.
        codec: "auto", "none", "floats", "zstd[:LEVEL]" or "shuffle-zstd[:LEVEL]". "auto" encodes where that saves time.
        staging_bytes: the staging window, a fixed size for what is being moved, beside `host_bytes`. Default: 112 MiB,
            at most an eighth of what is available. If four of the largest tensors that have to move need more, the
            default takes up to a quarter of `host_bytes` too; `stats()` counts that part as `host_bytes`.
            `stats().staging_bytes` adds 16 MiB of working memory of the I/O jobs of each drive (see `io_depth`).
        inline_bytes: records up to this size live in LMDB itself, larger ones in extents; None: all in LMDB.
        checksum: verify what is read against what was written.
        io_depth: how many records are at a drive at once in each direction, from 1 to 64. Four keep most drives busy;
            drives with a long latency need more. Each has 2 MiB of working memory, counted in `stats().staging_bytes`.
        max_write_bytes_per_day: limit on writes, which wear out the drive, for each drive; None: no limit. A store
            begins with all of it; it refills evenly over 24 hours, and may be spent at once. Once it is spent, what
            fits stays in host memory; then `StoreFullError` says when it will have refilled enough.
        return_memory: when memory that the process has freed, but its allocator keeps, is returned to the system.
            "auto": when memory is short in the system or its cgroup; "always": whenever the process has grown, which
            costs step time; "never". See docs/how_to/memory_on_cpu.md.
        copies: the copy engine for accelerators; None: the one for whatever `torch.accelerator` drives.

    Sizes are bytes as `int`, or strings: "8GiB" and "8G" are 8 * 2**30 bytes, "8GB" is 8 * 10**9. A budget below 1 MiB
    that has no unit, and is not 0, gets a `TierStoreWarning`.

    Every method may be called from any thread. `put` waits while the budget is full, `get` while the bytes are not
    in memory, `flush` for writes, `close` for the I/O in progress, `trace` for its file when it ends. Nothing else
    blocks on I/O. The store is a context manager; without `close`, it ends when neither it nor any handle is referenced
    any more. A forked child cannot use its parent's store.

    Attributes:
        host_bytes, staging_bytes: the two budgets of host memory, as numbers.

    Raises:
        ConfigError: an argument cannot be used; it says which, what was given and what is allowed.
        StorageIOError: the drive refused; nothing was left behind.
    """

    @refuses_unknown
    def __init__(
        self,
        path: str | PathLike[str] | Sequence[str | PathLike[str]],
        *,
        host_bytes: SizeLike | None = None,
        disk_bytes: SizeLike | None = None,
        codec: Codec = "auto",
        staging_bytes: SizeLike | None = None,
        inline_bytes: SizeLike | None = "128KiB",
        checksum: bool = True,
        io_depth: int = NUM_AT_ONCE,
        max_write_bytes_per_day: SizeLike | None = None,
        return_memory: Mode = "auto",
        copies: Copies | None = None,
    ) -> None:
        self._begin(local_options(path, locals()))

    @classmethod
    @refuses_unknown
    def connect(
        cls,
        address: str | PathLike[str] | None = None,
        *,
        host_bytes: SizeLike | None = None,
        staging_bytes: SizeLike | None = None,
        window_bytes: SizeLike = "48MiB",
        reconnect_seconds: float = 30.0,
        daemon_uid: int | None = None,
        name: str | None = None,
        return_memory: Mode = "auto",
        copies: Copies | None = None,
    ) -> Self:
        """A store that uses the daemon at `address` as its disk tier. Everything else is the same.

        Encoding, checksums and disk I/O run in the daemon (`tierstore serve`), which has its own disk budget and codec.
        If a daemon is killed and comes back within `reconnect_seconds`, its clients only lose time.

        Args:
            address: path of the daemon's socket. None: `TIERSTORE_SOCKET`, else that of this user's daemon, or root's.
            host_bytes: as `TierStore`'s.
            staging_bytes: as `TierStore`'s; default: 80 MiB, and what large tensors need.
            window_bytes: size of the memory shared with the daemon, through which the bytes go in parts of at most
                8 MiB. `stats().staging_bytes` counts both, so that it is 128 MiB by default.
            reconnect_seconds: how long to wait for a lost daemon; after that, calls that need it raise. A daemon whose
                connection stays open counts as lost after that long (a tenth more at most, a second at least) without
                any sign from it. A slow daemon answers that it lives when it is asked, so it is waited for.
            daemon_uid: a user whose daemon is trusted with the tensors, beside this process's own and root's. None: the
                one of `TIERSTORE_DAEMON_UID`; at the default address of root, also the owner of its folder.
            name: the client's name for people and metrics; default: the program's name.
            return_memory, copies: as `TierStore`'s.

        Raises:
            ConfigError: an argument cannot be used.
            DaemonUnavailableError: nobody listens there, the daemon refuses, or it is one of a user who is not trusted:
                raised at once, since a first connection is not waited for. Or it does not answer within 10 seconds.
            ProtocolError: the daemon speaks another version.
            StorageIOError: there is no memory for the shared window.
        """
        options = connected_options(address, locals())
        store = cls.__new__(cls)
        store._begin(options)
        return store

    @classmethod
    def over(
        cls,
        open_disk: OpenDisk,
        *,
        name: str = "disk tier",
        host_bytes: SizeLike | None = None,
        staging_bytes: SizeLike | None = None,
        return_memory: Mode = "auto",
        copies: Copies | None = None,
    ) -> Self:
        """A store with a disk tier of your own. Everything above the disk tier is the same.

        Args:
            open_disk: opens it: `await open_disk(executor)` gives a `tierstore.disk.tier.DiskTier`, which says what it
                has to do. Called once, on the store's own loop (uvloop, on the thread `tierstore-loop`).
                `executor` runs blocking calls on the threads `tierstore-io-N`.
            name: the store's, for messages.
            host_bytes, staging_bytes, return_memory, copies: as `TierStore`'s.

        Raises:
            ConfigError: an argument cannot be used.
            StorageIOError: `open_disk` raised OSError. Any other of its errors is raised as it is.
        """
        options = options_over(open_disk, name, locals())
        store = cls.__new__(cls)
        store._begin(options)
        return store

    @classmethod
    def from_config(cls, config: ConfigSource, **changes: Unpack[StoreChanges]) -> Self:
        """The store that a file describes: `TierStore.from_config("tierstore.toml")`.

        Args:
            config: the path of a TOML file, or a mapping like one. Its table `store` has the arguments of `TierStore`,
                or `connect = "/run/tierstore/tierstore.sock"` and those of `TierStore.connect`. Relative paths in it
                begin at the working directory.
            **changes: arguments that override those of the file, such as `path` or `copies`.

        Raises:
            ConfigError: the file cannot be read, or an argument cannot be used; names file and key. Nothing was opened.
            DaemonUnavailableError, ProtocolError, StorageIOError: as `TierStore` and `TierStore.connect`.
        """
        options = store_options(config, changes)
        with options.naming_their_place():
            if "connect" not in options.values:
                return cls(**options.values)
            return cls.connect(options.values.pop("connect"), **options.values)

    def _begin(self, options: StoreOptions) -> None:
        """Open the store. `tierstore.testing.FaultyStore` overrides this to wrap `open_disk` and `copies`."""
        self.host_bytes, self.staging_bytes = options.host_bytes, options.staging_bytes
        self._core = Core(self, options)

    # --- by hand ----------------------------------------------------------------------------------------------

    @uncompiled
    def put(self, tensor: torch.Tensor) -> Handle:
        """Store a tensor; its bytes leave memory when the budget requires it. Waits only if the budget is full.

        Do not change the tensor in place while the handle lives: `get` would raise. Its memory is freed once the caller
        drops the tensor too. Until it is written (`flush`), do not move or resize its memory either (`share_memory_`,
        a queue of `torch.multiprocessing`, `resize_` of its storage). The store would not store wrong bytes, but keep
        the tensor in memory; yet the process may crash, if the write reads memory that is gone.

        Args:
            tensor: strided, on the CPU or an accelerator, of any dtype and geometry. One made in inference mode has no
                version counter to guard it; it is copied.

        Raises:
            ConfigError: not a strided tensor.
            StoreFullError: no room in memory nor on disk; the caller still has the tensor.
            StorageIOError: an earlier write failed; all its data is in memory.
            DaemonUnavailableError: of a daemon: it did not come back; what is not yet with it is in memory.
            StoreClosedError: the store is closed.
        """
        self._core.plans.drain()
        if isinstance(tensor, torch.Tensor) and tensor.is_inference():
            with outside_of_modes():
                tensor = tensor.clone()
        what = "give a plain strided torch.Tensor (no subclass, nor a quantized, nested or meta tensor)"
        if not isinstance(tensor, torch.Tensor):
            raise ConfigTypeError("tensor", tensor, what)
        if storage_of(tensor) is None:
            raise ConfigError("tensor", type(tensor).__name__, what)
        residency = self._core.residency
        return residency.saving.store(self, tensor, residency.device_of(tensor))

    @uncompiled
    def get(self, handle: Handle) -> torch.Tensor:
        """Return the tensor, bit for bit. Waits only if its bytes are not in memory. May be called any number of times.

        The result is detached, has the geometry of the tensor that was put, and shares memory with other living results
        of the same handle; change none of them in place.

        Raises:
            ConfigError: not a handle of this store.
            ModifiedInPlaceError: the tensor that was put, or one that was got, was changed in place.
            CorruptDataError: the bytes on disk are damaged and lost.
            StorageIOError: they could not be read; they are still on disk.
            DaemonUnavailableError: of a daemon: it did not come back; what is with it may be asked for again.
            StoreClosedError: the store is closed; they are gone.
        """
        record = self._record_of(handle)
        return self._core.residency.handing_out.fetch(record, record.layout)

    @uncompiled
    def prefetch(self, handles: Iterable[Handle]) -> None:
        """Begin to read the handles' bytes, in this order, as far as there is room. A hint: returns at once.

        The store keeps a list. As its tensors are got, their memory is freed first, and the reads go on, however long
        the list is. A further call appends to it; a handle that still waits keeps its place. Handles may be got in
        another order, more than once, or never, and may be dropped: the list keeps none of them alive. Packs and
        backward take precedence. Bytes read for the list that made way for a pack are read again by `get` only.

        Raises:
            ConfigError: not a handle of this store; nothing was done.
        """
        if not isinstance(handles, Iterable):
            raise ConfigTypeError("handles", handles, "give a list of them")
        self._core.residency.handing_out.prefetch([self._record_of(handle) for handle in handles])

    @uncompiled
    def flush(self) -> None:
        """Wait until every queued spill is done. Bytes that fit the budget stay in memory.

        If a trace is on, its file then has all events so far, unless it takes more than a minute to write.

        Raises:
            StoreFullError, StorageIOError, DaemonUnavailableError: a write failed; the bytes are in memory.
            StoreClosedError: the store is closed.
        """
        self._core.plans.drain()
        self._core.residency.saving.flush()
        self._core.traces.flush()

    def trace(self, path: str | PathLike[str]) -> AbstractContextManager[None]:
        """Record what the store does inside the block, on all threads, and write it to a file.

        docs/tutorial/reading_a_trace.md shows how to read it. The trace covers the scopes entered inside and ends with
        the block, so backward belongs inside too. A single scope is traced by `tiered_offload(store, trace=path)`.
        Entering opens the file; leaving waits until it is written. A file that this store has traced to before is
        continued; any other is overwritten. Training never waits for the file, and its errors never disturb training.

        Raises:
            ConfigError: at the beginning: the path cannot be written to, or a trace of this store is not over.
            StorageIOError: at the end: the file could not be written (a full disk); it is cut short.
            StoreClosedError: at the beginning: the store is closed.
        """
        return self._core.traces.tracing(path, _CLOSE_DEADLINE_SECONDS)

    @uncompiled
    def stats(self) -> StoreStats:
        """Return an immutable snapshot. Does no I/O; may wait while memory is being returned (`return_memory`)."""
        return self._core.stats()

    @uncompiled
    def close(self) -> None:
        """Free everything, in memory and on disk. Idempotent; waits for the I/O in progress, abandons the rest.

        A graph that still holds saved tensors raises `StoreClosedError` when it asks for one. If neither a saved tensor
        nor a `put` came, a `TierStoreWarning` says what was forgotten.

        On a store's own thread (where a garbage collection may run a finalizer) it does not wait: the store is closed,
        and its work in progress ends by itself. Another thread that closes the store waits for that.

        Raises:
            StorageIOError: I/O did not end within a minute, or a trace could not be written to its end.
        """
        is_first = self._core.is_open
        self._core.close(_CLOSE_DEADLINE_SECONDS)
        if is_first:
            self._core.warn_if_nothing_came()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # which tells more than any warning
            self._core.close(_CLOSE_DEADLINE_SECONDS)

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a tierstore store belongs to its process and cannot be pickled; open one in each process")

    def __repr__(self) -> str:
        return f"<TierStore {self._core.name}>"

    def memory_use(self) -> MemoryUse:
        """The memory that the whole process holds. Takes some 0.1 ms, and waits while memory is being returned."""
        return self._core.memory_use()

    def _record_of(self, handle: Handle) -> Record:
        if not isinstance(handle, Handle):
            raise ConfigTypeError("handle", handle, "give what put() returned")
        if handle.owner is not self:
            raise ConfigError("handle", handle, f"it belongs to another store than {self!r}")
        return handle.record
