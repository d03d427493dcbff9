"""`tiered_offload`: saved-tensor hooks that hand what autograd saves to a `TierStore`.

Start here to read how a tensor goes down. Autograd calls `OffloadScope.pack` for every tensor that it saves, on the
thread that runs forward; what comes back (a `SavedTensor`, or a `Kept` for what stays) is all the state there is: it
lives in the graph and goes with it. Backward calls its `unpack`.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Never, ParamSpec, Self, TypeVar

import torch

from tierstore.config import SizeLike, parse_size
from tierstore.config_file import ConfigSource, offload_options
from tierstore.errors import ConfigError, ConfigTypeError
from tierstore.store import TierStore, refuse_unknown
from tierstore.torch_names import pop_hooks, push_hooks
from tierstore.trial import trial_of_process
from tierstore.uncompiled import is_compiled_call, uncompiled, uncompiled_itself

from .compiled import warn_of_compiled_caller
from .deferred import refuse_deferred
from .functional import ADVICE_WITHIN, advise
from .recorded import RecordedScope, ScopeOptions
from .scope import OffloadScope, Select
from .thread_hooks import owner_of_hooks, unpack

__all__ = ["tiered_offload"]

P = ParamSpec("P")
T = TypeVar("T")

PREFETCH_ORDERS = ("learned", "reverse", "none")


class tiered_offload:  # noqa: N801 - a context manager, named like those of torch
    """Hand the tensors that autograd saves inside this scope to a store.

    ::

        with tiered_offload(store):
            loss = model(batch).loss
        loss.backward()

    Gradients are bitwise those without it, or backward raises. Usable as a decorator, re-entrant, and from several
    threads (hooks belong to the thread that enters). Scopes nest; the innermost saves. Inside
    `torch.autograd.graph.allow_mutation_on_saved_tensors` it is not supported.

    Args:
        store: an open `TierStore`; one may serve many scopes.
        min_bytes: smaller storages stay where they are.
        device_bytes: so much of what was saved last stays on the accelerator; without one, of no effect. "auto": of a
            graph that is known, as much as cannot be copied out and back while it computes, as far as the device has
            memory to spare; it is found in some steps, of graphs that come one after another. Until then nothing stays.
        select: called with each saved tensor that could be stored; False keeps it where it is.
        prefetch: "learned": in the order seen for the same graph before, else as "reverse"; "reverse": in reverse
            topological order; "none": only when asked for.
        lookahead_bytes: how far ahead of backward to fetch; None: as far as there is room, or, once the graph is known
            and the drive was seen to be fast enough, into the staging window alone.
        trace: a file to record to what this scope saves, and all that the store does until that is gone: backward too.
            It is opened here; each scope with the same path goes on in it. Nothing is recorded between one such graph
            and the next. `TierStore.trace` is for everything within a block; docs/tracing.md says more.

    Raises:
        ConfigError: an argument cannot be used; also `trace`, where it cannot be written to, or the store is being
            traced to another file.

    If the trace cannot be written later (a full disk), training goes on and `TierStore.close` raises `StorageIOError`.

    Inside the scope forward may raise `StoreFullError`, `StorageIOError` or `StoreClosedError` (see
    `Residency.track`); backward may raise what `TierStore.get` raises.
    """

    def __init__(
        self,
        store: TierStore,
        *,
        min_bytes: SizeLike = "1MiB",
        device_bytes: SizeLike = 0,
        select: Select | None = None,
        prefetch: str = "learned",
        lookahead_bytes: SizeLike | None = None,
        trace: str | os.PathLike[str] | None = None,
        **unknown: Never,
    ) -> None:
        refuse_unknown(unknown, "min_bytes, device_bytes, select, prefetch, lookahead_bytes, trace")
        if not isinstance(store, TierStore):
            raise ConfigTypeError("store", store, "give an open TierStore")
        self._trial = trial_of_process()
        if self._trial is not None:
            prefetch = self._trial.offload.get("prefetch", prefetch)
            device_bytes = self._trial.offload.get("device_bytes", device_bytes)
            lookahead_bytes = self._trial.offload.get("lookahead_bytes", lookahead_bytes)
            trace = self._trial.trace_of(store, torch.get_num_threads())
        if select is not None and not callable(select):
            raise ConfigTypeError("select", select, "give a callable(tensor) -> bool, or None")
        if prefetch not in PREFETCH_ORDERS:
            kind = ConfigError if isinstance(prefetch, str) else ConfigTypeError
            raise kind("prefetch", prefetch, f"give one of {', '.join(map(repr, PREFETCH_ORDERS))}")
        self._store = store
        self._min_bytes = parse_size(min_bytes, "min_bytes")
        self._device_bytes = None if device_bytes == "auto" else parse_size(device_bytes, "device_bytes")
        self._select = select
        self._orders = store.learned_orders if prefetch == "learned" else None
        if self._device_bytes is None and self._orders is None:
            raise ConfigError("device_bytes", device_bytes, 'give a size: "auto" needs prefetch="learned"')
        self._lookahead_bytes = None if lookahead_bytes is None else parse_size(lookahead_bytes, "lookahead_bytes")
        if prefetch == "none":
            self._lookahead_bytes = 0
        self._trace = None if trace is None else store.traces.begin(trace).place
        self._options = ScopeOptions(
            self._min_bytes,
            self._device_bytes or 0,
            prefetch,
            store.host_bytes + store.staging_bytes if self._lookahead_bytes is None else self._lookahead_bytes,
            has_select=select is not None,
            is_automatic=self._device_bytes is None,
        )
        self._entered = threading.local()

    @classmethod
    def from_config(cls, store: TierStore, config: ConfigSource, **changes: Any) -> Self:
        """The scope that a file describes. Reads the file: make it once, and enter it in every step.

        Args:
            store: an open `TierStore`.
            config: as `TierStore.from_config`; its table `offload` has the arguments of `tiered_offload`.
            **changes: arguments that come before those of the file, such as `select`.

        Raises:
            ConfigError: the file cannot be read, or an argument cannot be used; names file and key.
        """
        options = offload_options(config, changes)
        with options.naming_their_place():
            return cls(store, **options.values)

    @uncompiled_itself
    def __enter__(self) -> tiered_offload:
        scopes: list[OffloadScope | RecordedScope] = self._entered.__dict__.setdefault("scopes", [])
        num_scopes = len(scopes)
        try:
            if is_compiled_call():
                warn_of_compiled_caller("tiered_offload")
            self._enter(scopes)
        except BaseException:  # an interrupt too, after which nobody would take the hooks off the thread
            _leave_half_entered(scopes, num_scopes)
            raise
        return self

    @uncompiled
    def _enter(self, scopes: list[OffloadScope | RecordedScope]) -> None:
        scope = self._new_scope()  # which tells the times of what is gone, before they are spoilt
        scopes.append(scope)
        if self._device_bytes is not None:
            self._store.books.keep_on_device(self._device_bytes)
        try:
            push_hooks(scope.pack, unpack)
        except RuntimeError as error:
            advise(error, ADVICE_WITHIN)
            raise

    def _new_scope(self) -> OffloadScope | RecordedScope:
        limits = self._min_bytes, self._lookahead_bytes, self._device_bytes
        scope = OffloadScope(self._store, self._select, self._orders, *limits)
        traces = self._store.traces
        recorder = traces.recorder if self._trace is None else traces.begin(self._trace)
        if recorder is None:
            return scope
        if self._trial is not None:
            recorder.is_paced = True
        recorder.tell_times()
        if self._trial is not None:
            self._trial.enter(recorder)
        options = self._options
        if self._device_bytes is None:
            found = self._store.books.moves.devices.resident.limit_bytes or 0
            options = options._replace(device_bytes=found)
        return RecordedScope(scope, traces, recorder, options, self._store.memory_use)

    @uncompiled
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            pop_hooks()
        finally:  # where an interrupt comes in between, too
            self._entered.scopes.pop().settle(failed=kind is not None)
        if error is not None:
            advise(error)
        elif kind is None:
            self._store.warn_if_memory_stays()

    def __deepcopy__(self, memo: dict[int, object]) -> tiered_offload:
        """Copies of a module that offloads (an average of models, clones of a layer) share the scope and its store."""
        return self

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Use as a decorator: every call of `function` is a scope.

        Raises:
            ConfigError: it is a generator function or an async one, whose body runs after the call.
        """
        refuse_deferred("function", function, function)

        @functools.wraps(function)
        def offloaded(*args: P.args, **kwargs: P.kwargs) -> T:
            with self:
                return function(*args, **kwargs)

        return offloaded


@uncompiled
def _leave_half_entered(scopes: list[OffloadScope | RecordedScope], num_before: int) -> None:
    if len(scopes) > num_before:
        scope = scopes.pop()
        if owner_of_hooks() is scope:
            pop_hooks()
        scope.settle(failed=True)
