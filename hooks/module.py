"""`offload_module`: a module whose forward runs inside `tiered_offload`, on whichever thread runs it."""

from __future__ import annotations

from typing import Any

from torch import nn

from tierstore.errors import ConfigTypeError
from tierstore.store import TierStore

from .deferred import refuse_deferred
from .offload import tiered_offload

__all__ = ["offload_module"]


class _OffloadedModule(nn.Module):
    """The wrapped module is the submodule `module`, as with `DistributedDataParallel`."""

    def __init__(self, module: nn.Module, scope: tiered_offload) -> None:
        super().__init__()
        self.module = module
        self._scope = scope

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._scope:
            return self.module(*args, **kwargs)


def offload_module(module: nn.Module, *, store: TierStore, **options: Any) -> nn.Module:
    """Wrap a module so that what its forward saves goes to `store`.

    Saved-tensor hooks belong to a thread; the scope is entered inside forward, so it also works where replicas run
    on threads of their own (`DataParallel`) and for single blocks of a model. Compile inside, offload outside:
    `offload_module(torch.compile(block), store=store)`.

    Args:
        module: any module; it becomes the submodule `module` of what is returned.
        store: an open `TierStore`.
        **options: those of `tiered_offload`.

    Raises:
        ConfigError: an argument cannot be used; also a module whose forward is a generator function or an async one.
    """
    if not isinstance(module, nn.Module):
        raise ConfigTypeError("module", module, "give a torch.nn.Module")
    refuse_deferred("module", module, module.forward)
    return _OffloadedModule(module, tiered_offload(store, **options))
