"""Which module saves which storages: the calls of one forward, as a tree; and which modules are the blocks of a plan.

Storages are named by the address of their implementation. A weak reference to each is held, so that no address is used
again while the tree lives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..hooks.in_place import Around
from ..residency.layout import storage_of
from ..residency.torch_names import tree_leaves

_MOST_SHARE = 1 / 8
"""A call that saves more of all bytes than this is taken apart, where that is possible."""
_COVERED = 0.8
"""The share of a call's saved bytes that the calls inside it must have saved, if it is to be taken apart."""


class Storages:
    """Names for storages, and `nbytes` of each by its name."""

    def __init__(self, kept_anyway: nn.Module) -> None:
        self.nbytes: dict[int, int] = {}
        self._references: dict[int, StorageWeakRef] = {}
        self._ignored = {
            tensor.untyped_storage()._cdata
            for tensor in (*kept_anyway.parameters(), *kept_anyway.buffers())
            if type(tensor.data) is torch.Tensor or isinstance(tensor, nn.Parameter)
            if storage_of(tensor.detach()) is not None
        }

    def name_of(self, tensor: torch.Tensor) -> int | None:
        """The name of a tensor's storage; None: it has none, or is of a parameter or a buffer of the model."""
        found = storage_of(tensor)
        if found is None:
            return None
        storage = found[0]
        name: int = storage._cdata
        if name in self._ignored:
            return None
        if name not in self._references:
            self._references[name] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self.nbytes[name] = storage.nbytes()
        return name


def storages_among(values: Any, storages: Storages) -> dict[int, int]:
    """Of the tensors in nested `values`, with sizes."""
    found: dict[int, int] = {}
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor):
            name = storages.name_of(leaf)
            if name is not None:
                found[name] = storages.nbytes[name]
    return found


@dataclass(eq=False)
class CallNode:
    """One call of a module. `saved`: storages that autograd saved in it, but not in the `calls` inside it."""

    name: str
    is_leaf: bool
    saved: dict[int, int] = field(default_factory=dict)
    calls: list[CallNode] = field(default_factory=list)

    def all_saved(self) -> dict[int, int]:
        found = dict(self.saved)
        for call in self.calls:
            found |= call.all_saved()
        return found


class Through(NamedTuple):
    """An `Around` made of a function."""

    run: Callable[..., Any]


class CallTree:
    """Watches the calls of a model's modules that go through `around`: those of modules that have members, and of the
    members of the model itself. `root` stands for all of forward, the loss included. `num_calls`: how often the model
    itself was called, with gradients."""

    def __init__(self, model: nn.Module, storages: Storages) -> None:
        self.root = CallNode("", is_leaf=False)
        self.num_calls = 0
        self._open = [self.root]
        self._storages = storages
        members = set(model.children())
        self.around: dict[str, Around] = {
            name: Through(partial(self._run, name, not any(module.children())))
            for name, module in model.named_modules()
            if can_be_called(module) and (any(module.children()) or module in members)
        }

    def saw(self, tensor: torch.Tensor) -> bool:
        """Note a saved tensor. For the `select` of a scope: True, so that it is stored."""
        name = self._storages.name_of(tensor)
        if name is not None:
            self._open[-1].saved[name] = self._storages.nbytes[name]
        return True

    def _run(self, name: str, is_leaf: bool, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        node = CallNode(name, is_leaf)
        if self._open[-1] is self.root and not name and torch.is_grad_enabled():
            self.num_calls += 1
        self._open[-1].calls.append(node)
        self._open.append(node)
        try:
            return call(*args, **kwargs)
        finally:
            self._open.pop()


def can_be_called(module: nn.Module) -> bool:
    """Whether the module has a forward of its own, which containers like `ModuleList` have not."""
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def blocks_of(root: CallNode) -> list[str]:
    """The names of the modules that a plan decides on, in the order of their first calls.

    A call is taken apart if it saves more than an eighth of everything and the modules inside it save most of that.
    Leaves are worth a decision only if the model itself consists of them. A module with one member that saves all is
    taken apart only if the member is. What no block saves stays where it is.
    """
    whole_bytes = sum(root.all_saved().values())
    names: dict[str, None] = {}
    for call in root.calls:
        names |= dict.fromkeys(part.name for part in _parts(call, whole_bytes, is_model=True))
    return [name for name in names if not any(_is_inside(name, other) for other in names)]


def _parts(call: CallNode, whole_bytes: int, *, is_model: bool) -> list[CallNode]:
    saved = call.all_saved()
    if not saved:
        return []
    inside = [inner for inner in call.calls if is_model or not inner.is_leaf]
    if sum(saved.values()) <= _MOST_SHARE * whole_bytes or _covered(inside, saved) < _COVERED:
        return [call]
    parts = [part for inner in call.calls for part in _parts(inner, whole_bytes, is_model=False)]
    return [call] if len(parts) == 1 and parts[0] in call.calls else parts


def _is_inside(name: str, other: str) -> bool:
    """Whether a module is a member of another one; both may be blocks if one was called by different callers."""
    return name != other and (not other or name.startswith(f"{other}."))


def _covered(calls: list[CallNode], saved: dict[int, int]) -> float:
    inside: dict[int, int] = {}
    for call in calls:
        inside |= call.all_saved()
    return sum(inside.values()) / max(sum(saved.values()), 1)
