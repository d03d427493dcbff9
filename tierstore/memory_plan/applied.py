"""What an applied plan does around the calls of one block.

NOTE [The same again]
`torch.utils.checkpoint` restores autocast, and finds changes of tensors in the arguments, which it is given one by one.
All else is put back, or refused, as `block_state.py` says.
A block that cannot be watched in a call is not computed again: its action falls back to storing, or to keeping. So it
is in a mode (training or evaluation of any member) that the plan was not made in, because then it may draw random
numbers or change buffers that the plan knows nothing of; and while `parametrize.cached` gives it the same weights for
several calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from ..base.threads import refuse_to_wait
from ..hooks.checkpoints import is_in_checkpoint, pack_inputs
from ..hooks.module import ModuleScope
from ..hooks.select import keep
from ..hooks.selective import holding_contexts
from ..tensors.torch_names import import_dynamo, tree_flatten, tree_unflatten
from ..tensors.uncompiled import uncompiled
from .block_state import BlockState, TooMuchError
from .decision import Action, BlockPlan, HeldOutput


class PlannedCalls:
    """The calls of one `block` go through this. `scope` takes what is stored. `recompute_seconds`: that backward has
    spent computing the block again, so far. `is_over`: calls do nothing more than without a plan."""

    def __init__(self, action: Action, block: BlockPlan, scope: ModuleScope | None) -> None:
        self.action, self._block, self._scope = action, block, scope
        self.recompute_seconds = 0.0
        self.is_over = False
        import_dynamo()  # as `checkpoint` does in its first call, whose frames a cycle in that import would keep alive

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """In a pickled module there is None in its place."""
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, object]) -> PlannedCalls:
        return self

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = self.action.kind
        if not self.is_over and torch.is_grad_enabled():
            if kind == "store":
                return self._run_stored(call, args, kwargs)
            if kind == "recompute" and not is_in_checkpoint():
                return self._run_checkpointed(call, args, kwargs)
        return call(*args, **kwargs)

    def _run_stored(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return call(*args, **kwargs) if self._scope is None else self._scope.run(call, args, kwargs)

    @uncompiled
    def _run_checkpointed(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        action, module = self.action, call.__self__  # type: ignore[attr-defined]
        leaves, structure = tree_flatten((args, kwargs))
        with _lock_of(module):
            again = self._as_before(module, leaves)
            if again is None:
                return self._run_stored(call, args, kwargs)
            first = [(args, kwargs)]  # `body` lives as long as the graph: it must not hold the arguments

            def body(*values: Any) -> Any:
                if pack is not None:
                    pack_inputs(pack)
                given = first.pop() if first else tree_unflatten(values, structure)
                return call(*given[0], **given[1])

            def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
                if not action.held:
                    return nullcontext(), again
                holding, again.replaying = holding_contexts(_HeldOperators(action.held), pack or keep, keep)
                return holding, again

            scope = self._scope if action.stores else None
            with nullcontext() if scope is None else scope.packing() as pack:
                return checkpoint(body, *leaves, use_reentrant=False, context_fn=contexts)

    def _as_before(self, module: nn.Module, arguments: Sequence[Any]) -> _Again | None:
        if parametrize._cache_enabled and any(map(parametrize.is_parametrized, module.modules())):
            return None
        try:
            state = BlockState(module, arguments, self._block.buffers)
        except TooMuchError:
            return None
        if state.evaluates != self._block.evaluates or _has_other_statistics(module, self._block.buffers):
            return None
        return _Again(self, module, state)


def _has_other_statistics(module: nn.Module, buffers: Collection[str]) -> bool:
    """Whether a norm in it updates running statistics other than these buffers. No version counter tells of that."""
    return any(
        member.training and member.track_running_stats and f"{path}.running_mean".lstrip(".") not in buffers
        for path, member in module.named_modules()
        if hasattr(member, "track_running_stats")
    )


class _Again:
    """Entered, as often as wanted, to compute a block again as it was, with the outputs that `replaying` gives back."""

    def __init__(self, calls: PlannedCalls, module: nn.Module, state: BlockState) -> None:
        self.replaying: AbstractContextManager[Any] | None = None
        self._calls, self._module, self._state = calls, module, state
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as undo:
            undo.enter_context(_lock_of(self._module))
            self._state.check()
            undo.callback(self._count_time, time.perf_counter())
            undo.enter_context(self._state.restored())
            if self.replaying is not None:
                undo.enter_context(self.replaying)
            self._entered.append(undo.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def _count_time(self, began: float) -> None:
        self._calls.recompute_seconds += time.perf_counter() - began


_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_locks_lock = threading.RLock()  # a finalizer may call a module where its thread holds it


def _lock_of(module: nn.Module) -> threading.RLock:
    """One for each module: while it is put back as it was, no other thread may compute with it, or put it back."""
    refuse_to_wait(f"of the plan for {type(module).__name__}")
    with _locks_lock:
        return _locks.setdefault(module, threading.RLock())


class _HeldOperators:
    """The policy of one forward of a block: it names operators by their place."""

    def __init__(self, held: Sequence[HeldOutput]) -> None:
        self._names, self._places = dict(held), count()

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_held = self._names.get(next(self._places)) == str(operator)  # if forward takes another way, it is not
        return CheckpointPolicy.MUST_CPU_OFFLOAD if is_held else CheckpointPolicy.PREFER_RECOMPUTE
