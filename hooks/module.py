"""`offload_module`: a module whose forward runs inside `tiered_offload`, on whichever thread runs it."""

from __future__ import annotations

from typing import Any

from torch import nn

from tierstore.errors import ConfigTypeError
from tierstore.store.tier_store import TierStore

from .deferred import refuse_deferred
from .offload import tiered_offload

__all__ = ["offload_module"]


class _OffloadedModule(nn.Module):
    """A module whose forward runs in a scope. The wrapped one is its submodule `module`, as in torch's own wrappers."""

    def __init__(self, module: nn.Module, scope: tiered_offload) -> None:
        super().__init__()
        self.module = module
        self._scope = scope

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._scope:
            return self.module(*args, **kwargs)


def offload_module(module: nn.Module, *, store: TierStore, **options: Any) -> nn.Module:
    """Wrap a module so that what its forward saves goes to a store.

    The scope is entered inside forward, on the thread that runs it. So it also works for single blocks of a model, and
    where replicas run on threads of their own (`DataParallel`). Compile inside, offload outside:
    `offload_module(torch.compile(block), store=store)`.

    Args:
        module: any module. It becomes the submodule `module` of the module that is returned.
        store: an open `TierStore`.
        **options: arguments of `tiered_offload`.

    Raises:
        ConfigError: an argument cannot be used, or forward is a generator function or an async one.
    """
    if not isinstance(module, nn.Module):
        raise ConfigTypeError("module", module, "give a torch.nn.Module")
    refuse_deferred("module", module, module.forward)
    return _OffloadedModule(module, tiered_offload(store, **options))
