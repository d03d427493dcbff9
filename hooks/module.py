"""`offload_module`: a module whose calls run inside `tiered_offload`, on whichever thread makes them.

NOTE [In place]
The module keeps its type and its keys, so checkpoints, signatures and other people's hooks are as before. The scope
has to be around all of a call: forward hooks run inside it (those of FSDP among them), and PyTorch does not take a
hook's effect back after an interrupt. `module(batch)` looks `__call__` up in the class alone. So the class gets a
`__call__` that looks for the scope in the instance it was called for. Instances that were not offloaded, copies of the
module (`copy.deepcopy`) and replicas of `DataParallel` each find their own, with their own weights.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from tierstore.errors import ConfigError, ConfigTypeError
from tierstore.residency.uncompiled import uncompiled, uncompiled_itself
from tierstore.store.tier_store import TierStore

from .checkpoints import is_in_checkpoint, pack_inputs
from .deferred import refuse_deferred
from .offload import tiered_offload

__all__ = ["offload_module", "remove_offload"]

_SCOPE = "_tierstore_scope"
_lock = threading.Lock()


class _ModuleScope(tiered_offload):
    """The scope of a module's calls. Copies of the module share it; in a pickled module there is None in its place."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    _warns_if_compiled = False  # a compiled caller breaks its graph at the module, which is compiled inside: as wanted

    @uncompiled
    def stays_out(self) -> bool:
        """Whether the call about to be made is inside a checkpointed region, whose inputs are then stored instead."""
        if not is_in_checkpoint():
            return False
        scope, packed = self._new_scope(), False
        try:
            pack_inputs(scope.pack)
            packed = True
        finally:
            scope.settle(failed=not packed)
        return True


def offload_module(module: nn.Module, *, store: TierStore, **options: Any) -> nn.Module:
    """Store what the module's calls save for backward. Acts in place, as `torch.distributed.fsdp.fully_shard` does.

    The scope is entered around each call of the module, on the thread that makes it. So it also works for single blocks
    of a model, and where replicas run on threads of their own (`DataParallel`). Type, keys, signature, attributes and
    hooks of the module stay as they are. A copy of the module is offloaded as well, unless torch has made its class
    (`torch.compile`, `torch.fx.GraphModule`); a pickled module is not.

    If the module is checkpointed, by itself or by its caller, the inputs of the checkpoint are stored, and nothing that
    the checkpoint drops. One exception: a caller that passes it to `checkpoint(..., use_reentrant=True)` saves the
    inputs outside of the module; they stay where they are. If the module or its caller is compiled, the module is
    compiled inside and offloaded outside.

    Calls of `module.forward` itself, which pass hooks by, pass the scope by too. Before `torch.export.export` with
    `strict=True`, take the effect away.

    Args:
        module: any module that has a forward. If it is offloaded already, it now uses this store and these options.
        store: an open `TierStore`.
        **options: arguments of `tiered_offload`.

    Returns:
        The same module. `remove_offload` takes the effect away.

    Raises:
        ConfigError: an argument cannot be used, or forward does not exist, is a generator function or an async one.
    """
    if not isinstance(module, nn.Module):
        raise ConfigTypeError("module", module, "give a torch.nn.Module")
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        raise ConfigError("module", type(module).__name__, "it has no forward, so it is never called: give its members")
    refuse_deferred("module", module, module.forward)
    scope = _ModuleScope(store, **options)
    for kind in _kinds_of(module):
        _make_offloading(kind)
    module.__dict__[_SCOPE] = scope  # not by `setattr`, which a class may have defined for its own ends
    return module


def remove_offload(module: nn.Module) -> nn.Module:
    """Undo `offload_module` for this module, not for modules inside it. What it has stored already stays stored.

    Returns:
        The same module; one that is not offloaded is left as it is.
    """
    module.__dict__.pop(_SCOPE, None)
    return module


def _kinds_of(module: nn.Module) -> list[type[nn.Module]]:
    """The module's class, and the class that it is to have later, or had before, where torch exchanges it."""
    kind = type(module)
    if isinstance(module, LazyModuleMixin) and module.cls_to_become is not None:
        return [kind, module.cls_to_become]
    return [kind, kind.__mro__[1]] if is_parametrized(module) else [kind]


def _make_offloading(kind: type[nn.Module]) -> None:
    """Give a class a `__call__` that looks for a scope, unless the one that it has or inherits does."""
    with _lock:
        if not hasattr(kind.__call__, _SCOPE):
            # For instances without a scope: Dynamo guards attributes, but not what is missing in `__dict__`.
            setattr(kind, _SCOPE, None)
            kind.__call__ = _offloading_call(kind)  # type: ignore[method-assign]


def _offloading_call(kind: type[nn.Module]) -> Callable[..., Any]:
    """A `__call__` for the class `kind`: it does what the class's own did, in the instance's scope if there is one."""
    own = kind.__dict__.get("__call__")

    @functools.wraps(kind.__call__)
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it becomes the class's
        call = super(kind, self).__call__ if own is None else own.__get__(self)  # type: ignore[misc]
        scope = getattr(self, _SCOPE)
        if scope is None:
            return call(*args, **kwargs)
        return _call_within(scope, _enters(kind, type(self)), call, args, kwargs)

    setattr(__call__, _SCOPE, True)
    return __call__


def _enters(kind: type[nn.Module], called: type[nn.Module]) -> bool:
    """Whether the `__call__` of `kind` enters the scope of an instance of `called`. The outermost such call does."""
    return kind is next(base for base in called.__mro__ if hasattr(base.__dict__.get("__call__"), _SCOPE))


@uncompiled_itself
def _call_within(
    scope: _ModuleScope, enters: bool, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not enters or scope.stays_out():
        return call(*args, **kwargs)
    with scope:
        return call(*args, **kwargs)
