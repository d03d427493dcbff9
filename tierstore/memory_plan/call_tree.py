"""Which module saves which storages in one forward; and which modules are the blocks of a plan.

Storages are named by the address of their implementation. A weak reference to each is held, so that no address is used
again while the names are in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..hooks.in_place import Around
from ..tensors.layout import storage_of
from ..tensors.torch_names import tree_leaves

_MOST_SHARE = 1 / 8
"""A module that saves more of all bytes than this is taken apart, where that is possible."""
_COVERED = 0.8
"""The share of a module's saved bytes that its members must have saved, if it is to be taken apart."""


class Storages:
    """Names for storages, but for those of the parameters and buffers of `kept_anyway`."""

    def __init__(self, kept_anyway: nn.Module) -> None:
        self._references: dict[int, StorageWeakRef] = {}
        self._ignored = {
            tensor.untyped_storage()._cdata
            for tensor in (*kept_anyway.parameters(), *kept_anyway.buffers())
            if type(tensor.data) is torch.Tensor or isinstance(tensor, nn.Parameter)
            if storage_of(tensor.detach()) is not None
        }

    def among(self, values: Any) -> dict[int, int]:
        """The storages of the tensors in nested `values`, with sizes."""
        tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
        storages = {found[0]._cdata: found[0] for found in map(storage_of, tensors) if found is not None}
        named = {name: storage for name, storage in storages.items() if name not in self._ignored}
        for name in named.keys() - self._references.keys():
            self._references[name] = StorageWeakRef(named[name])  # type: ignore[no-untyped-call]
        return {name: storage.nbytes() for name, storage in named.items()}


def union(parts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """All storages of several mappings, each once."""
    found: dict[int, int] = {}
    for part in parts:
        found |= part
    return found


class Through(NamedTuple):
    """An `Around` made of a function."""

    run: Callable[..., Any]


class CallTree:
    """Watches the calls of a model's modules that go through `around`: those of modules that have members, and of the
    members of the model itself. `num_calls`: how often the model itself was called, with gradients. `saved`: as
    `blocks_of` takes it."""

    def __init__(self, model: nn.Module, storages: Storages) -> None:
        self.num_calls = 0
        self.saved: dict[str | None, dict[int, int]] = {None: {}}
        self._open: list[str | None] = [None]
        self._storages = storages
        members = set(model.children())
        self.around: dict[str, Around] = {
            name: Through(partial(self._run, name))
            for name, module in model.named_modules()
            # containers like `ModuleList` have no forward of their own
            if getattr(module.forward, "__func__", None) is not nn.Module.forward
            and (any(module.children()) or module in members)
        }

    def saw(self, tensor: torch.Tensor) -> bool:
        """Note a saved tensor. For the `select` of a scope: True, so that it is stored."""
        self.saved[self._open[-1]] |= self._storages.among(tensor)
        return True

    def _run(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.num_calls += not name and len(self._open) == 1 and torch.is_grad_enabled()
        self.saved.setdefault(name, {})
        self._open.append(name)
        try:
            return call(*args, **kwargs)
        finally:
            self._open.pop()


def blocks_of(saved: Mapping[str | None, Mapping[int, int]]) -> list[str]:
    """The names of the modules that a plan decides on, in the order of their first calls.

    A module is taken apart if it saves more than an eighth of everything and its members save most of that. One of
    whose members one saves all is taken apart only if the member is. What no block saves stays where it is.

    Args:
        saved: for each module that was called, in the order of first calls, the storages that autograd saved in it but
            in none of its members, with sizes. None: those outside of all modules.
    """
    members: dict[str | None, list[str]] = {name: [] for name in saved}
    for name in saved:
        if name is not None:
            members[_caller_of(name, saved)].append(name)

    def all_saved(name: str | None) -> dict[int, int]:
        return union([saved[name], *map(all_saved, members[name])])

    def parts(name: str) -> list[str]:
        num_bytes = sum(all_saved(name).values())
        if num_bytes == 0:
            return []
        covered_bytes = sum(union(map(all_saved, members[name])).values())
        if num_bytes <= _MOST_SHARE * whole_bytes or covered_bytes < _COVERED * num_bytes:
            return [name]
        found = [part for member in members[name] for part in parts(member)]
        return [name] if len(found) == 1 and found[0] in members[name] else found

    whole_bytes = sum(all_saved(None).values())
    return [part for member in members[None] for part in parts(member)]


def _caller_of(name: str, called: Mapping[str | None, object]) -> str | None:
    """The innermost module around this one that was called; None: there is none."""
    while name:
        name = name.rpartition(".")[0]
        if name in called:
            return name
    return None
