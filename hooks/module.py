"""`offload_module`: a module whose calls run inside `tiered_offload`, on whichever thread makes them.

See NOTE [In place] in `in_place.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack

from torch import nn

from tierstore.store.tier_store import TierStore
from tierstore.tensors.uncompiled import uncompiled

from .below import Packed
from .checkpoints import is_in_checkpoint, pack_inputs
from .in_place import call_plainly, check_callable, put_around_calls
from .offload import OffloadOptions, tiered_offload

M = TypeVar("M", bound=nn.Module)


class ModuleScope(tiered_offload):
    """The scope of a module's calls. Copies of the module share it; in a pickled module there is None in its place."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    _warns_if_compiled = False  # a compiled caller breaks its graph at the module, which is compiled inside: as wanted

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._stays_out():
            return call(*args, **kwargs)
        with self:
            return call(*args, **kwargs)

    @property
    def least_bytes(self) -> int:
        """Storages below that size always stay where they are."""
        return self._small.least_bytes

    @contextmanager
    def packing(self) -> Iterator[Callable[[Any], Packed]]:
        """Inside it, the pack hook of an entry of its own, which is not put on the thread."""
        scope, is_done = self._new_scope(is_on_thread=False), False
        try:
            yield scope.pack
            is_done = True
        finally:
            scope.settle(failed=not is_done)

    @uncompiled
    def _stays_out(self) -> bool:
        if not is_in_checkpoint():
            return False
        with self.packing() as pack:
            pack_inputs(pack)
        return True


def offload_module(module: M, store: TierStore, **options: Unpack[OffloadOptions]) -> M:
    """Store what the module's calls save for backward. Acts in place, as `torch.distributed.fsdp.fully_shard` does.

    The scope is entered around each call of the module, on the thread that makes it. So it also works for single blocks
    of a model, and for replicas on threads of their own (`DataParallel`). Type, keys, signature, attributes and hooks
    of the module stay as they are. A copy of the module is offloaded as well, unless torch has made its class
    (`torch.compile`, `torch.fx.GraphModule`); a pickled module is not.

    If the module is checkpointed, by itself or by its caller, the inputs of the checkpoint are stored, and nothing that
    the checkpoint drops. One exception: a caller that passes it to `checkpoint(..., use_reentrant=True)` saves the
    inputs outside of the module; they stay where they are. If the module or its caller is compiled, the module is
    compiled inside and offloaded outside. Calls of `module.forward` itself, which pass hooks by, pass the scope by too.
    Before `torch.export.export` with `strict=True`, take the effect away.

    Args:
        module: any module that has a forward. If it is offloaded already, it now uses this store and these options.
        store: an open `TierStore`.
        **options: arguments of `tiered_offload`.

    Returns:
        The same module. `remove_offload` takes the effect away.

    Raises:
        ConfigError: an argument cannot be used, or forward does not exist, is a generator function or an async one.
    """
    check_callable(module)
    put_around_calls(module, ModuleScope(store, **options))
    return module


def remove_offload(module: M) -> M:
    """Undo `offload_module` for this module, not for modules inside it; returns it. What it has stored stays stored."""
    call_plainly(module)
    return module
