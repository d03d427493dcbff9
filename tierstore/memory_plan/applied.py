"""What an applied plan does around the calls of one block.

NOTE [The same again]
A block is computed again from the same arguments, generators and buffers as in forward.
`torch.utils.checkpoint` restores torch's generators and autocast. Here those of Python and NumPy are restored too, and
the block gets copies of the buffers as they were before forward, so running statistics are not counted twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from ..hooks.checkpoints import is_in_checkpoint, pack_inputs
from ..hooks.module import ModuleScope
from ..hooks.select import Kept
from ..hooks.selective import holding_contexts
from ..residency.uncompiled import uncompiled
from .generators import BufferValues, HostGenerators, with_buffers
from .menu import Action, HeldOutput

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
        names, num_args = list(kwargs), len(args)  # `body` lives as long as the graph: it must not hold `args`

        def body(*values: Any) -> Any:
            if pack is not None and self.action.stores:
                pack_inputs(pack)
            return call(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            if not self.action.held:
                return nullcontext(), self._again(repeat, None)
            hold = pack if pack is not None and self.action.stores else Kept
            holding, replaying = holding_contexts(_HeldOperators(self.action.held), hold, Kept)
            return holding, self._again(repeat, replaying)

        repeat = _Repeat(call.__self__, self._buffers)  # type: ignore[attr-defined]
        if self._scope is None:
            pack = None
            return checkpoint(body, *args, *kwargs.values(), use_reentrant=False, context_fn=contexts)
        with self._scope.packing() as pack:
            return checkpoint(body, *args, *kwargs.values(), use_reentrant=False, context_fn=contexts)

    @contextmanager
    def _again(self, repeat: _Repeat, replaying: AbstractContextManager[Any] | None) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with repeat:
                if replaying is None:
                    yield
                else:
                    with replaying:
                        yield
        finally:
            self.recompute_seconds += time.perf_counter() - began


class _Repeat:
    """The state before a block's forward. Entered to compute the block again: see NOTE [The same again]."""

    def __init__(self, module: nn.Module, buffers: Sequence[str]) -> None:
        self._module = module
        self._buffers = BufferValues.of(module, buffers)
        self._generators = HostGenerators.now()
        self._entered: list[tuple[HostGenerators, AbstractContextManager[None]]] = []

    def __enter__(self) -> None:
        swapped = with_buffers(self._module, self._buffers)
        swapped.__enter__()
        self._entered.append((HostGenerators.now(), swapped))
        self._generators.restore()

    def __exit__(self, *error: Any) -> None:
        generators, swapped = self._entered.pop()
        generators.restore()
        swapped.__exit__(None, None, None)


class _HeldOperators:
    """The policy of one forward of a block: it names operators by their place. A `Policy` of `holding_contexts`."""

    def __init__(self, held: Sequence[HeldOutput]) -> None:
        self._names = dict(held)
        self._num_calls = 0

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        index, self._num_calls = self._num_calls, self._num_calls + 1
        is_held = self._names.get(index) == str(operator)  # where forward takes another way, it is computed again
        return CheckpointPolicy.MUST_CPU_OFFLOAD if is_held else CheckpointPolicy.PREFER_RECOMPUTE
