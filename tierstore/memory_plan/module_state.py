"""The state of a module that its forward may compute with, and that must be the same when it is computed again."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn

from ..hooks.traced import check_unchanged

__all__ = ["ModuleState", "attributes_of"]

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, tuple, dict, set, deque)
_MOST_ELEMENTS = 256
"""Of a longer container only the first elements are compared, and the length."""


class ModuleState(NamedTuple):
    """What a module is at one moment.

    Attributes:
        versions: parameters and buffers, each with its version.
        attributes: see `attributes_of`.
    """

    versions: list[tuple[torch.Tensor, int]]
    attributes: dict[tuple[str, str], object]

    @classmethod
    def of(cls, module: nn.Module, except_for: Collection[str]) -> ModuleState:
        """The state now. `except_for`: names of buffers that do not matter."""
        buffers = [buffer for name, buffer in module.named_buffers() if name not in except_for]
        tensors = [tensor for tensor in (*module.parameters(), *buffers) if not tensor.is_inference()]
        return cls([(tensor, tensor._version) for tensor in tensors], attributes_of(module))

    def check(self, module: nn.Module) -> None:
        """Refuse a module that is in another state.

        Raises:
            ModifiedInPlaceError: a parameter or a buffer was changed in place.
            RuntimeError: an attribute was changed.
        """
        for tensor, version in self.versions:
            check_unchanged(tensor, version)
        changed = changed_attribute(self.attributes, attributes_of(module))
        if changed is not None:
            raise RuntimeError(
                f"attribute {changed!r} of a {type(module).__name__} was changed between forward and backward: the "
                "block cannot be computed again as it was. The gradient was not computed"
            )


def changed_attribute(before: dict[tuple[str, str], object], after: dict[tuple[str, str], object]) -> str | None:
    """The name of an attribute that is not what it was; None: all are."""
    for key in {**before, **after}:
        if before.get(key) != after.get(key):
            return ".".join(filter(None, key))
    return None


def attributes_of(module: nn.Module) -> dict[tuple[str, str], object]:
    """Attributes of the module and its members, as far as a change of them can be told.

    Plain values by value, tensors by identity and version, containers by the identities of their elements.
    """
    found: dict[tuple[str, str], object] = {}
    for path, member in module.named_modules():
        for name, value in vars(member).items():
            if name in _OF_TORCH:
                continue
            if isinstance(value, _CONTAINERS):
                elements = [*value, *value.values()] if isinstance(value, dict) else list(value)
                found[path, name] = len(elements), [_told(element) for element in elements[:_MOST_ELEMENTS]]
            elif isinstance(value, (*_PLAIN, torch.Tensor)):
                found[path, name] = _told(value)
    return found


def _told(value: object) -> tuple[object, ...]:
    """Equal for two moments if the value is the same."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, torch.Tensor) and not value.is_inference():
        return id(value), value._version
    return (id(value),)
