"""`keep_resident`: what is saved inside stays where it is."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType

import torch

from tierstore.torch_names import pop_hooks, push_hooks, top_hooks
from tierstore.uncompiled import is_compiled_call, uncompiled, uncompiled_itself

from .compiled import warn_of_compiled_caller
from .select import Kept
from .thread_hooks import RemovedHooks, enclosing_scope, put_back, take_off_all, unpack

__all__ = ["keep_resident"]


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
        entered: list[RemovedHooks] = self._entered.__dict__.setdefault("removed", [])
        num_entered, pack = len(entered), self._new_pack()
        try:
            if is_compiled_call():
                warn_of_compiled_caller("keep_resident")
            self._enter(entered, pack)
        except BaseException:  # an interrupt too, after which nobody would leave
            if len(entered) > num_entered:
                put_back(entered.pop())
            if top_hooks(False) == (pack, unpack):
                pop_hooks()
            raise

    @uncompiled
    def _new_pack(self) -> Callable[[torch.Tensor], Kept]:
        """The hook for one entry, and no other's."""
        scope = enclosing_scope()
        return functools.partial(Kept) if scope is None else functools.partial(scope.keep, reason="selected out")

    @uncompiled
    def _enter(self, entered: list[RemovedHooks], pack: Callable[[torch.Tensor], Kept]) -> None:
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
