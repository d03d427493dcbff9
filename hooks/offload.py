"""`tiered_offload`: saved-tensor hooks that hand what autograd saves to a `TierStore`.

Entering it puts the hooks of a new `OffloadScope` (`scope.py`) on the thread. Autograd then calls `OffloadScope.pack`
for every tensor that it saves; backward calls `unpack` of what that returned. All state goes with the graph."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Literal, ParamSpec, Self, TypedDict, TypeVar, Unpack, get_args

from tierstore.base.config import SizeLike, parse_budget, parse_size
from tierstore.base.config_file import ConfigSource, offload_options
from tierstore.errors import ConfigError, ConfigTypeError
from tierstore.store.options import refuses_unknown
from tierstore.store.tier_store import TierStore
from tierstore.store.trial import trial_of_process
from tierstore.tensors.torch_names import pop_hooks, push_hooks
from tierstore.tensors.uncompiled import is_compiled_call, uncompiled, uncompiled_itself

from .advice import ADVICE_WITHIN, advise, refuse_deferred, warn_of_compiled_caller
from .order import LogOptions
from .recorded import RecordedScope, ScopeOptions
from .saved import unpack
from .scope import OffloadScope, Select
from .select import small_limits
from .thread_hooks import owner_of_hooks

P = ParamSpec("P")
T = TypeVar("T")

PrefetchOrder = Literal["learned", "reverse", "none"]
_PREFETCH_ORDERS = get_args(PrefetchOrder)

_Entry = OffloadScope | RecordedScope


class OffloadOptions(TypedDict, total=False):
    """The options of `tiered_offload`, which says what they do."""

    min_bytes: SizeLike | None
    device_bytes: SizeLike
    select: Select | None
    prefetch: PrefetchOrder
    lookahead_bytes: SizeLike | None
    trace: str | os.PathLike[str] | None


class tiered_offload:  # noqa: N801 - a context manager, named like those of torch
    """Hand the tensors that autograd saves inside this scope to a store.

    ::

        with tiered_offload(store):
            loss = model(batch).loss
        loss.backward()

    Gradients have the same bits as without it, or backward raises. It may be used as a decorator, entered again inside
    itself, and entered by several threads: hooks belong to the thread that enters. Where scopes nest, the innermost
    saves. It is not supported inside `torch.autograd.graph.allow_mutation_on_saved_tensors`.

    Args:
        store: an open `TierStore`; one may serve many scopes.
        min_bytes: smaller storages stay where they are. None: those below 1 MiB, as long as all that stay for it in one
            graph are at most `host_bytes` together (32 MiB, where that is less); then only those below 64 KiB.
        device_bytes: how much of what was saved last stays on the accelerator; has no effect without one. "auto": as
            much as cannot be copied out and back while the graph computes, as far as the device has memory to spare.
            That is found within some steps, for graphs that come one after another; until then nothing stays. Once all
            of a graph has stayed for eight steps, and there is room for half as much again, the hooks are taken off the
            thread after 16 packs; a graph that only begins like it stays too, the first time.
        select: called with each saved tensor that could be stored; False keeps it where it is.
        prefetch: "learned": in the order in which backward asked when it last went through such a graph, otherwise as
            "reverse"; "reverse": in reverse topological order; "none": nothing before it is asked for.
        lookahead_bytes: how far ahead of backward to fetch. None: as far as there is room; once the graph is known and
            the drive was seen to be fast enough, only as far as the staging window holds.
        trace: a file to record to: what this scope saves, and all that the store does until that is gone, in backward
            too. Nothing is recorded between one such graph and the next. The file is opened here, and scopes with the
            same path go on in it. To record all that happens within a block, use `TierStore.trace`; see
            docs/tutorial/reading_a_trace.md.

    Raises:
        ConfigError: an argument cannot be used; `trace` also where it cannot be written to, or the store is being
            traced to another file.

    If the trace cannot be written later (a full disk), training goes on and `TierStore.close` raises `StorageIOError`.

    Inside the scope, forward may raise what `TierStore.put` raises, and backward what `TierStore.get` raises."""

    _warns_if_compiled = True

    @refuses_unknown
    def __init__(
        self,
        store: TierStore,
        *,
        min_bytes: SizeLike | None = None,
        device_bytes: SizeLike = 0,
        select: Select | None = None,
        prefetch: PrefetchOrder = "learned",
        lookahead_bytes: SizeLike | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(store, TierStore):
            raise ConfigTypeError("store", store, "give an open TierStore")
        self._trial = trial_of_process()
        if self._trial is not None:
            prefetch = self._trial.offload.get("prefetch", prefetch)
            device_bytes = self._trial.offload.get("device_bytes", device_bytes)
            lookahead_bytes = self._trial.offload.get("lookahead_bytes", lookahead_bytes)
            trace = self._trial.trace_of(store)
        if select is not None and not callable(select):
            raise ConfigTypeError("select", select, "give a callable(tensor) -> bool, or None")
        if prefetch not in _PREFETCH_ORDERS:
            kind = ConfigError if isinstance(prefetch, str) else ConfigTypeError
            raise kind("prefetch", prefetch, f"give one of {', '.join(map(repr, _PREFETCH_ORDERS))}")
        self._store = store
        self._small = small_limits(None if min_bytes is None else parse_size(min_bytes, "min_bytes"), store.host_bytes)
        self._select = select
        self._log_options = _log_options(store, prefetch, device_bytes, lookahead_bytes)
        self._trace = None if trace is None else store._core.traces.begin(trace).place
        self._options = _options_for_trace(store, self._small.min_bytes, select, prefetch, self._log_options)
        self._entered = threading.local()
        store._core.use.has_scope = True

    @classmethod
    def from_config(cls, store: TierStore, config: ConfigSource, **changes: Unpack[OffloadOptions]) -> Self:
        """A scope as a file describes it. Each call reads the file: call once, and enter the scope in every step.

        Args:
            store: an open `TierStore`.
            config: as for `TierStore.from_config`; its table `offload` has the arguments of `tiered_offload`.
            **changes: arguments that replace those of the file, or are added to them, such as `select`.

        Raises:
            ConfigError: the file cannot be read, or an argument cannot be used; names file and key.
        """
        options = offload_options(config, changes)
        with options.naming_their_place():
            return cls(store, **options.values)

    @uncompiled_itself
    def __enter__(self) -> tiered_offload:
        scopes: list[_Entry] = self._entered.__dict__.setdefault("scopes", [])
        num_scopes = len(scopes)
        try:
            if self._warns_if_compiled and is_compiled_call():
                warn_of_compiled_caller("tiered_offload")
            self._enter(scopes)
        except BaseException:  # an interrupt too: nobody would take the hooks off the thread then
            _leave_half_entered(scopes, num_scopes)
            raise
        return self

    @uncompiled
    def _enter(self, scopes: list[_Entry]) -> None:
        scope = self._new_scope()  # before `keep_on_device`, which spoils the times that this tells to a trace
        scopes.append(scope)
        device_bytes, residency = self._log_options.device_bytes, self._store._core.residency
        if device_bytes is not None and device_bytes != residency.device_limit_bytes:
            residency.keep_on_device(device_bytes)
        try:
            push_hooks(scope.pack, unpack)
        except RuntimeError as error:
            advise(error, ADVICE_WITHIN)
            raise

    def _new_scope(self, *, is_on_thread: bool = True) -> _Entry:
        """`is_on_thread`: its hooks will be on this thread."""
        self._store._core.plans.drain()
        traces = self._store._core.traces
        recorder = traces.recorder if self._trace is None else traces.begin(self._trace)
        may_be_off = is_on_thread and recorder is None
        scope = OffloadScope(self._store, self._small, self._select, self._log_options, may_be_off=may_be_off)
        if recorder is None:
            return scope
        if self._trial is not None:
            recorder.pace()
        recorder.tell_times()
        if self._trial is not None:
            self._trial.enter(recorder)
        options = self._options
        if options.is_automatic:
            options = options._replace(device_bytes=self._store._core.residency.device_limit_bytes)
        return RecordedScope(scope, traces, recorder, options, self._store.memory_use)

    @uncompiled
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        scopes: list[_Entry] = self._entered.scopes
        try:
            hooks_off = scopes[-1].hooks_off
            if hooks_off is None or not hooks_off.removed:
                pop_hooks()
            else:
                hooks_off.leave(error)
        finally:  # where an interrupt comes in between, too
            scopes.pop().settle(failed=kind is not None)
        if error is not None:
            advise(error)
        elif kind is None:
            self._store._core.warn_if_memory_stays()

    def __deepcopy__(self, memo: dict[int, object]) -> tiered_offload:
        """Copies of a module that offloads (averages of models, clones of layers) share the store."""
        return self

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """As a decorator. Raises ConfigError for a generator function or an async one; its body runs after the call."""
        refuse_deferred("function", function, function)

        @functools.wraps(function)
        def offloaded(*args: P.args, **kwargs: P.kwargs) -> T:
            with self:
                return function(*args, **kwargs)

        return offloaded


@uncompiled
def _leave_half_entered(scopes: list[_Entry], num_before: int) -> None:
    """Undo what was done of an entry. `num_before`: how many entries there were before it."""
    if len(scopes) > num_before:
        scope = scopes.pop()
        if owner_of_hooks() is scope:
            pop_hooks()
        scope.settle(failed=True)


def _log_options(
    store: TierStore, prefetch: str, device_bytes: SizeLike, lookahead_bytes: SizeLike | None
) -> LogOptions:
    try:
        device_limit_bytes = None if device_bytes == "auto" else parse_budget(device_bytes, "device_bytes")
    except ConfigError as error:
        raise replace(error, allowed=f'{error.allowed}, or "auto"') from None
    orders = store._core.learned_orders if prefetch == "learned" else None
    if device_limit_bytes is None and orders is None:
        raise ConfigError("device_bytes", device_bytes, 'give a size: "auto" needs prefetch="learned"')
    ahead_bytes = None if lookahead_bytes is None else parse_budget(lookahead_bytes, "lookahead_bytes")
    return LogOptions(0 if prefetch == "none" else ahead_bytes, orders, device_limit_bytes)


def _options_for_trace(
    store: TierStore, min_bytes: int, select: Select | None, prefetch: str, options: LogOptions
) -> ScopeOptions:
    lookahead_bytes = options.lookahead_bytes
    return ScopeOptions(
        min_bytes,
        options.device_bytes or 0,
        prefetch,
        store.host_bytes + store.staging_bytes if lookahead_bytes is None else lookahead_bytes,
        has_select=select is not None,
        is_automatic=options.device_bytes is None,
    )
