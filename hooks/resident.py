"""`keep_resident`: what autograd saves inside it stays where it is."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType

import torch

from tierstore.tensors.torch_names import pop_hooks, push_hooks, top_hooks
from tierstore.tensors.uncompiled import is_compiled_call, uncompiled, uncompiled_itself

from .advice import warn_of_compiled_caller
from .recorded import enclosing_scope
from .saved import unpack
from .select import Kept, KeptTensor, keep
from .thread_hooks import RemovedHooks, put_back, take_off_all


class keep_resident:  # noqa: N801 - a context manager, named like those of torch
    """Inside it, what autograd saves stays where it is, also within a `tiered_offload`.

    Changes in place are still found. It may be entered again inside itself, and by several threads; it acts on the
    thread that enters.

    Args:
        hooks: False takes every saved-tensor hook off the thread for the scope, ours and those of others, as if no
            scope were around it. `torch.func.grad`, `vjp`, `jacrev` and `hessian` need that: they refuse to run under
            any hook. Saved tensors are then not counted in `stats()`, and PyTorch itself finds changes in place.
    """

    def __init__(self, *, hooks: bool = True) -> None:
        self._hooks = hooks
        self._entered = threading.local()

    @uncompiled_itself
    def __enter__(self) -> None:
        entered: list[RemovedHooks] = self._entered.__dict__.setdefault("removed", [])
        num_entered, pack = len(entered), self._new_pack()
        try:
            if is_compiled_call():
                warn_of_compiled_caller("keep_resident")
            self._enter(entered, pack)
        except BaseException:  # an interrupt too: nobody would leave the scope then
            if len(entered) > num_entered:
                put_back(entered.pop())
            if top_hooks(False) == (pack, unpack):
                pop_hooks()
            raise

    @uncompiled
    def _new_pack(self) -> Callable[[torch.Tensor], KeptTensor | Kept]:
        """A pack hook for this entry alone, so that it can be told from those of other entries."""
        scope = enclosing_scope()
        return functools.partial(keep) if scope is None else functools.partial(scope.keep, reason="selected out")

    @uncompiled
    def _enter(self, entered: list[RemovedHooks], pack: Callable[[torch.Tensor], KeptTensor | Kept]) -> None:
        removed: RemovedHooks = []
        entered.append(removed)
        if self._hooks:
            push_hooks(pack, unpack)
        else:
            take_off_all(removed)

    @uncompiled
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._hooks:
                pop_hooks()
            else:
                put_back(self._entered.removed[-1])
        finally:  # where an interrupt comes in between, too
            put_back(self._entered.removed.pop())


def is_resident() -> bool:
    """Whether the innermost hooks on this thread are those of `keep_resident`."""
    hooks = top_hooks(False)
    return hooks is not None and hooks[1] is unpack and isinstance(hooks[0], functools.partial)
