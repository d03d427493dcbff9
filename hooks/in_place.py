"""Changes what a call of a module does, in place: the module keeps its type and its keys.

NOTE [In place]
Checkpoints, signatures and other people's hooks are as before. What is done has to be around all of a call: forward
hooks run inside it (those of FSDP among them), and PyTorch does not take a hook's effect back after an interrupt.
`module(batch)` looks `__call__` up in the class alone. So the class gets a `__call__` that looks for an `Around` in the
instance it was called for. Instances that have none, copies of the module (`copy.deepcopy`) and replicas of
`DataParallel` each find their own, with their own weights."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from tierstore.errors import ConfigError, ConfigTypeError
from tierstore.tensors.uncompiled import uncompiled_itself

from .advice import refuse_deferred

AROUND = "_tierstore_scope"
"""The attribute of a module that holds its `Around`."""
_LOOKS = "_tierstore_looks"
_lock = threading.RLock()  # a finalizer may offload a module where its thread holds it


class Around(Protocol):
    """What a module's calls go through. Copies of the module share it."""

    def run(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


def check_callable(module: object) -> None:
    """Raise ConfigError if it is no module, or its forward does not exist, is a generator function or an async one."""
    if not isinstance(module, nn.Module):
        raise ConfigTypeError("module", module, "give a torch.nn.Module")
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        raise ConfigError("module", type(module).__name__, "it has no forward, so it is never called: give its members")
    refuse_deferred("module", module, module.forward)


def put_around_calls(module: nn.Module, around: Around) -> None:
    """From now on calls of the module go through `around`, in the place of what was there before."""
    for kind in _kinds_of(module):
        _make_looking(kind)
    module.__dict__[AROUND] = around  # not by `setattr`, which a class may have defined for its own ends


def around_calls_of(module: nn.Module) -> Around | None:
    """What calls of the module go through; None: nothing."""
    around: Around | None = module.__dict__.get(AROUND)
    return around


def call_plainly(module: nn.Module) -> None:
    """Undo `put_around_calls`; a module without one is left as it is."""
    module.__dict__.pop(AROUND, None)


def _kinds_of(module: nn.Module) -> list[type[nn.Module]]:
    """The module's class, and the class that it is to have later, or had before, where torch exchanges it."""
    kind = type(module)
    if isinstance(module, LazyModuleMixin) and module.cls_to_become is not None:
        return [kind, module.cls_to_become]
    return [kind, kind.__mro__[1]] if is_parametrized(module) else [kind]


def _make_looking(kind: type[nn.Module]) -> None:
    with _lock:
        if not _is_looking(kind.__call__):
            # For instances without one: Dynamo guards attributes, but not what is missing in `__dict__`.
            setattr(kind, AROUND, None)
            kind.__call__ = _looking_call(kind)  # type: ignore[method-assign]


def _is_looking(call: object) -> bool:
    """Whether this very function looks: `functools.wraps` copies attributes to functions that need not call it."""
    return getattr(call, _LOOKS, None) is call


def _looking_call(kind: type[nn.Module]) -> Callable[..., Any]:
    """A `__call__` for the class `kind`: it does what the class's own did, inside the instance's `Around` if any."""
    own = kind.__dict__.get("__call__")

    @functools.wraps(kind.__call__)
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it becomes the class's
        call = super(kind, self).__call__ if own is None else own.__get__(self)  # type: ignore[misc]
        around = getattr(self, AROUND)
        if around is None:
            return call(*args, **kwargs)
        return _call_through(around, _is_outermost(__call__, kind, type(self)), call, args, kwargs)

    setattr(__call__, _LOOKS, __call__)
    return __call__


def _is_outermost(call: object, kind: type[nn.Module], called: type[nn.Module]) -> bool:
    """Whether `call`, which was made for `kind`, is the outermost that looks, for an instance of `called`.

    Somebody else may have put a `__call__` of their own on the class later. It does not look, but calls the one that
    does."""
    if kind is not next(base for base in called.__mro__ if AROUND in base.__dict__):
        return False
    newest = kind.__dict__["__call__"]
    return newest is call or not _is_looking(newest)


@uncompiled_itself
def _call_through(
    around: Around, is_outermost: bool, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return around.run(call, args, kwargs) if is_outermost else call(*args, **kwargs)
