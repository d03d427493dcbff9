"""`tiered_offload`: saved-tensor hooks that hand what autograd saves to a `TierStore`.

Start here to read how a tensor goes down. Autograd calls `_Scope.pack` for every tensor that it saves, on the thread
that runs forward; what comes back (a `SavedTensor`, or a `Kept` for what stays) is all the state there is: it lives in
the graph and goes with it. Backward calls its `unpack`.

NOTE [Not before the kernel]
Autograd saves some tensors *before* the kernel that fills them has run (the noise of `rrelu`), and every output while
others still hold it. So what a node saves is only noted; it is settled, that is, free to be read and looked at for
other owners, once a node with a higher number saves something, or the scope ends.
"""

from __future__ import annotations

import functools
import operator
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from itertools import repeat, starmap
from types import TracebackType
from typing import Any, Never, ParamSpec, Self, TypeVar

import torch

from tierstore.capture import is_capturing
from tierstore.config import SizeLike, parse_size
from tierstore.config_file import ConfigSource, offload_options
from tierstore.errors import ConfigError, ConfigTypeError
from tierstore.handle import Record
from tierstore.layout import layout_of, storage_of
from tierstore.lookahead import LearnedOrders
from tierstore.ownership import is_foreign
from tierstore.store import TierStore, refuse_unknown
from tierstore.torch_names import DisableTorchFunction, pop_hooks, push_hooks, sequence_nr, top_hooks
from tierstore.trial import trial_of_process
from tierstore.uncompiled import is_compiled_call, traceable, uncompiled, uncompiled_itself

from .aliases import join_record
from .below import HOOKS_ARE_CALLED_BELOW, HeldTensor, is_below_autograd
from .compiled import warn_of_compiled_caller
from .deferred import refuse_deferred
from .order import PackLog, open_log
from .recorded import RecordedScope, ScopeOptions
from .saved import RejoinedTensor, SavedTensor
from .select import PLAIN_CLASSES, Kept, attributes_of, stays_alive

__all__ = ["enclosing_scope", "keep_resident", "tiered_offload"]

P = ParamSpec("P")
T = TypeVar("T")

Select = Callable[[torch.Tensor], bool]
_Removed = list[tuple[Any, Any]]
"""Hooks that were taken off a thread, the innermost first."""
PREFETCH_ORDERS = ("learned", "reverse", "none")

_REFUSAL = "don't yet support saved tensor hooks"  # of torch.func, by torch._functorch.vmap
_ADVICE = (
    "torch.func.grad, vjp, jacrev and hessian run under no saved-tensor hooks: call them outside of tiered_offload, "
    "or inside tierstore.keep_resident(hooks=False)"
)
_ADVICE_WITHIN = (
    "torch.func.grad, vjp, jacrev and hessian run under no saved-tensor hooks: what they differentiate cannot enter "
    "tiered_offload; give them the function without it, and of a module of offload_module its attribute module"
)

# Here and in `_put_back`, hooks move between thread and list in one call of C: an interrupt comes before or after.
_TAKE_TOP_HOOKS: tuple[Any, ...] = functools.partial(top_hooks, False), pop_hooks


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
        scopes: list[_Scope | RecordedScope] = self._entered.__dict__.setdefault("scopes", [])
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
    def _enter(self, scopes: list[_Scope | RecordedScope]) -> None:
        scope = self._new_scope()  # which tells the times of what is gone, before they are spoilt
        scopes.append(scope)
        if self._device_bytes is not None:
            self._store.books.keep_on_device(self._device_bytes)
        try:
            push_hooks(scope.pack, _unpack)
        except RuntimeError as error:
            _advise(error, _ADVICE_WITHIN)
            raise

    def _new_scope(self) -> _Scope | RecordedScope:
        limits = self._min_bytes, self._lookahead_bytes, self._device_bytes
        scope = _Scope(self._store, self._select, self._orders, *limits)
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
            _advise(error)
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


@traceable
def _unpack(packed: SavedTensor | Kept | HeldTensor) -> torch.Tensor:
    if torch.compiler.is_dynamo_compiling():
        return packed.traced()
    return packed.unpack()


class _Scope:
    """One entry of `tiered_offload`, on one thread, which is the only one to call it.

    Args:
        store: where to.
        select, min_bytes: as `tiered_offload`'s.
        orders: where orders are learned and recalled; None: they are not.
        lookahead_bytes: how far ahead of backward to fetch; None: see `tiered_offload`.
        device_bytes: what may stay on accelerators; None: what compute does not cover.
    """

    def __init__(
        self,
        store: TierStore,
        select: Select | None,
        orders: LearnedOrders | None,
        min_bytes: int,
        lookahead_bytes: int | None,
        device_bytes: int | None,
    ) -> None:
        self._store = store
        self._books = store.books
        self._min_bytes = max(min_bytes, 1)  # nothing is gained by storing no bytes
        self._select = select
        self._lookahead_bytes = lookahead_bytes
        self._orders = orders
        self._device_bytes = device_bytes
        self._log = self._new_log()
        self._unsettled_logs: list[PackLog] = []  # earlier ones
        self._fresh: list[Record] = []  # booked, saved by the newest node: see NOTE [Not before the kernel]
        self._fresh_node = -1
        self._device_of = store.books.moves.devices.device_of

    @uncompiled
    def pack(self, tensor: torch.Tensor) -> SavedTensor | Kept | HeldTensor:
        """Called by autograd for each tensor that it saves. Waits while the budget is full; raises as `Residency.note`.

        What it refuses is still where autograd has it.
        """
        if HOOKS_ARE_CALLED_BELOW and not tensor.requires_grad and is_below_autograd():
            return HeldTensor(self.pack, tensor)
        found = storage_of(tensor)
        if found is None:
            return self.keep(tensor, "unsupported")
        storage, address, version = found
        nbytes = storage.nbytes()
        if nbytes < self._min_bytes or not tensor.numel():
            return self.keep(tensor, "small")
        base = tensor._base
        root = tensor if base is None else base
        if stays_alive(tensor, root):
            return self.keep(tensor, "parameter")
        is_plain = storage.resizable() and not storage.is_shared()
        if not is_plain and is_foreign(storage):
            return self.keep(tensor, "alive elsewhere")
        is_in_host_memory = self._device_of(tensor) is None
        if not is_in_host_memory and is_capturing(tensor.device):
            return self.keep(tensor, "unsupported")
        if attributes_of(tensor) is not None and not tensor.requires_grad:  # NOTE [The same object] in saved.py
            return self.keep(tensor, "unsupported")
        if self._select is not None and not self._select(tensor):
            return self.keep(tensor, "selected out")
        node = sequence_nr()
        if self._fresh and node != self._fresh_node:
            self._settle_fresh()
        if self._log.started:
            self._begin_log(node)
        reference = weakref.ref(root)
        itself = reference if base is None else None if tensor.requires_grad else weakref.ref(tensor)
        if not (is_plain and is_in_host_memory):
            return self._book(tensor, reference, itself, node)
        alias, key = tensor.detach(), next(self._store.keys)
        saved = SavedTensor(alias, version, reference, address, storage._cdata, key, self._log)
        saved.itself = itself
        self._books.note(saved, node, nbytes)
        if self._log.plan is not None or saved.index == 0:
            self._log.follow_plan(saved.index)
        return saved

    @uncompiled
    def keep(self, tensor: torch.Tensor, reason: str) -> Kept:
        """Leave a saved tensor where it is."""
        self._books.count_kept(reason, bytes_of(tensor))
        return Kept(tensor)

    def settle(self, *, failed: bool) -> None:
        """The scope ends: every kernel has run. `failed`: by an exception, which matters to a traced scope alone."""
        self._settle_fresh()
        for log in (*self._unsettled_logs, self._log):
            log.is_settled = True
            self._books.survey(log)

    def _settle_fresh(self) -> None:
        self._books.settle(self._fresh)
        self._fresh = []

    def _begin_log(self, node: int) -> None:
        """The log's backward has begun: what this node saves belongs to the next."""
        if self._log.newest_node == node:
            self._unsettled_logs.append(self._log)
        else:
            self._log.is_settled = True
        self._log = self._new_log()

    def _new_log(self) -> PackLog:
        return open_log(self._store, self._lookahead_bytes, self._orders, self._device_bytes)

    def _book(
        self,
        tensor: torch.Tensor,
        root: weakref.ref[torch.Tensor],
        itself: weakref.ref[torch.Tensor] | None,
        node: int,
    ) -> SavedTensor:
        """Hand over at once what is on an accelerator, and has to leave it soon, or lies over restored bytes."""
        layout = layout_of(tensor)
        joined = join_record(self._books, tensor, root, layout)
        kind = SavedTensor
        if joined is not None:
            handle, layout = joined.handle, joined.layout
            if joined.is_restored:
                kind = RejoinedTensor
        else:
            handle = self._store.new_handle(tensor, layout)
            handle.record.root = root
            self._books.track(handle.record)
            self._fresh.append(handle.record)
            self._fresh_node = node
        log = self._log
        saved = kind(None, tensor._version, root, 0, 0, handle.record.key, log)
        saved.itself = itself
        if isinstance(saved, RejoinedTensor):
            saved.guard(tensor, layout)
        saved.index = self._books.enter(log, handle.record, node)
        if log.plan is not None or saved.index == 0:
            log.follow_plan(saved.index)
            log.place(handle.record, saved.index)
        saved.become(handle, layout)
        return saved


class keep_resident:  # noqa: N801 - a context manager, named like those of torch
    """What autograd saves inside this scope stays where it is, whatever scope it is nested in.

    In-place changes are still found. Re-entrant; belongs to the thread that enters.

    Args:
        hooks: False takes every saved-tensor hook off the thread for the scope, ours and others', as if no scope
            were around it: `torch.func.grad`, `vjp`, `jacrev` and `hessian` refuse to run under any. What is saved is
            then not counted in `stats()`, and in-place changes are found by PyTorch itself.
    """

    def __init__(self, *, hooks: bool = True) -> None:
        self._hooks = hooks
        self._entered = threading.local()

    @uncompiled_itself
    def __enter__(self) -> None:
        entered: list[_Removed] = self._entered.__dict__.setdefault("removed", [])
        num_entered, pack = len(entered), self._new_pack()
        try:
            if is_compiled_call():
                warn_of_compiled_caller("keep_resident")
            self._enter(entered, pack)
        except BaseException:  # an interrupt too, after which nobody would leave
            if len(entered) > num_entered:
                _put_back(entered.pop())
            if top_hooks(False) == (pack, _unpack):
                pop_hooks()
            raise

    @uncompiled
    def _new_pack(self) -> Callable[[torch.Tensor], Kept]:
        """The hook for one entry, and no other's."""
        scope = enclosing_scope()
        return functools.partial(Kept) if scope is None else functools.partial(scope.keep, reason="selected out")

    @uncompiled
    def _enter(self, entered: list[_Removed], pack: Callable[[torch.Tensor], Kept]) -> None:
        removed: _Removed = []
        entered.append(removed)
        if self._hooks:
            push_hooks(pack, _unpack)
            return
        while top_hooks(False) is not None:
            removed.extend(filter(None, map(operator.call, _TAKE_TOP_HOOKS)))

    @uncompiled
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._hooks:
                pop_hooks()
            else:
                _put_back(self._entered.removed[-1])
        finally:  # where an interrupt comes in between, too
            _put_back(self._entered.removed.pop())


def _put_back(removed: _Removed) -> None:
    """Push what `removed` has left, and empty it."""
    deque(starmap(push_hooks, map(list.pop, repeat(removed, len(removed)))), maxlen=0)


def _advise(error: BaseException, advice: str = _ADVICE) -> None:
    """Where `torch.func` refuses to run because of our hooks, its error says, once, what can be done."""
    if isinstance(error, RuntimeError) and _REFUSAL in str(error):
        notes = getattr(error, "__notes__", ())
        if _ADVICE not in notes and _ADVICE_WITHIN not in notes:
            error.add_note(advice)


@uncompiled
def _leave_half_entered(scopes: list[_Scope | RecordedScope], num_before: int) -> None:
    if len(scopes) > num_before:
        scope = scopes.pop()
        if _owner_of_hooks() is scope:
            pop_hooks()
        scope.settle(failed=True)


def enclosing_scope() -> _Scope | None:
    """The scope of ours whose hooks are in force on this thread, if any."""
    scope = _owner_of_hooks()
    if isinstance(scope, RecordedScope):
        scope = scope.scope
    return scope if isinstance(scope, _Scope) else None


def _owner_of_hooks() -> object:
    """Of the hooks that are in force on this thread; None where there are none, or plain functions."""
    hooks: tuple[Any, Any] | None = top_hooks(False)
    return getattr(hooks[0], "__self__", None) if hooks else None


def bytes_of(tensor: torch.Tensor) -> int:
    """What a saved tensor occupies, as far as its elements go; sparse and wrapped ones have no storage to ask."""
    if type(tensor) in PLAIN_CLASSES:
        return tensor.numel() * tensor.element_size()
    with DisableTorchFunction():  # a subclass need not see what the hooks do
        return tensor.numel() * tensor.element_size()
