"""What an applied plan does around the calls of one block.

NOTE [The same again]
A block is computed again from the same arguments, generators and buffers as in forward.
`torch.utils.checkpoint` restores torch's generators and autocast. Here those of Python and NumPy are restored too, and
the block gets copies of the buffers as they were before forward, so running statistics are not counted twice.
Whatever else the block may compute with must be as it was: parameters, other buffers and attributes are not restored.
If they were changed, backward raises. Nested arguments are given to the checkpoint one by one, so it finds changes of
those too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from ..hooks.checkpoints import is_in_checkpoint, pack_inputs
from ..hooks.module import ModuleScope
from ..hooks.select import Kept
from ..hooks.selective import holding_contexts
from ..residency.torch_names import import_dynamo, tree_flatten, tree_unflatten
from ..residency.uncompiled import uncompiled
from .generators import BufferValues, HostGenerators, with_buffers
from .menu import Action, HeldOutput
from .module_state import ModuleState

__all__ = ["PlannedCalls"]


class PlannedCalls:
    """The calls of one block go through this. An `Around`.

    Args:
        action: what is done with the block.
        buffers: names of its buffers that forward changes.
        scope: takes what is stored; None: the action stores nothing.

    Attributes:
        recompute_seconds: time that backward has spent computing the block again, so far.
    """

    def __init__(self, action: Action, buffers: Sequence[str], scope: ModuleScope | None) -> None:
        self.action = action
        self.recompute_seconds = 0.0
        self._buffers = buffers
        self._scope = scope
        import_dynamo()  # as `checkpoint` does in its first call, whose frames a cycle in that import would keep alive

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """In a pickled module there is None in its place."""
        return type(None), ()

    def __deepcopy__(self, memo: dict[int, object]) -> PlannedCalls:
        return self

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See `Around`."""
        if self.action.kind == "keep" or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        if self.action.kind == "store" and self._scope is not None:
            return self._scope.run(call, args, kwargs)
        if is_in_checkpoint():
            return call(*args, **kwargs)
        return self._run_checkpointed(call, args, kwargs)

    @uncompiled
    def _run_checkpointed(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        action = self.action
        leaves, structure = tree_flatten((args, kwargs))
        first = [(args, kwargs)]  # `body` lives as long as the graph: it must not hold the arguments

        def body(*values: Any) -> Any:
            if pack is not None:
                pack_inputs(pack)
            given = first.pop() if first else tree_unflatten(values, structure)
            return call(*given[0], **given[1])

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            if not action.held:
                return nullcontext(), again
            holding, again.replaying = holding_contexts(_HeldOperators(action.held), pack or Kept, Kept)
            return holding, again

        again = _Again(self, call.__self__, self._buffers)  # type: ignore[attr-defined]
        scope = self._scope if action.stores else None
        with nullcontext() if scope is None else scope.packing() as pack:
            return checkpoint(body, *leaves, use_reentrant=False, context_fn=contexts)


class _Again:
    """The state before a block's forward. Entered, as often as wanted, to compute the block again.

    See NOTE [The same again].

    Attributes:
        replaying: gives back the outputs that are held; None: none is.
    """

    def __init__(self, calls: PlannedCalls, module: nn.Module, buffers: Sequence[str]) -> None:
        self.replaying: AbstractContextManager[Any] | None = None
        self._calls = calls
        self._module = module
        self._buffers = BufferValues.of(module, buffers)
        self._generators = HostGenerators.now()
        self._expected = ModuleState.of(module, except_for=buffers)
        self._entered: list[ExitStack] = []

    def __enter__(self) -> None:
        self._expected.check(self._module)
        with ExitStack() as undo:
            undo.callback(self._count_time, time.perf_counter())
            undo.enter_context(with_buffers(self._module, self._buffers))
            undo.callback(HostGenerators.now().restore)
            self._generators.restore()
            if self.replaying is not None:
                undo.enter_context(self.replaying)
            self._entered.append(undo.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def _count_time(self, began: float) -> None:
        self._calls.recompute_seconds += time.perf_counter() - began


class _HeldOperators:
    """The policy of one forward of a block: it names operators by their place. A `Policy` of `holding_contexts`."""

    def __init__(self, held: Sequence[HeldOutput]) -> None:
        self._names = dict(held)
        self._num_calls = 0

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        index, self._num_calls = self._num_calls, self._num_calls + 1
        is_held = self._names.get(index) == str(operator)  # where forward takes another way, it is computed again
        return CheckpointPolicy.MUST_CPU_OFFLOAD if is_held else CheckpointPolicy.PREFER_RECOMPUTE
