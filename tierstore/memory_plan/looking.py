"""What can be told of values, and of all that they refer to, to find out later whether something in them has changed.

Nothing is copied. Tensors are told by version and storage, arrays by checksum, plain values by value; containers and
objects by what is in them. Functions, locks, files and whatever else cannot be looked into are told by identity alone.
"""

from __future__ import annotations

import enum
import functools
import logging
import random
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..hooks.traced import check_unchanged
from ..residency.layout import storage_of

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)

_MOST_VALUES = 5000
_MOST_ARRAY_BYTES = 2**24
_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, type, torch.dtype, torch.device, torch.layout)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, Mapping)
_OPAQUE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, logging.Logger)
_OPAQUE_PACKAGES = ("torch", "numpy", "tierstore")


class TooMuchError(Exception):
    """There is more to look at than can be looked at in each call of a block. Stays inside the package."""


class _Same:
    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


class _Version(NamedTuple):
    """A tensor as it was: its version counter (None: it has none), and its storage, if it has one of its own."""

    tensor: torch.Tensor
    version: int | None
    storage: StorageWeakRef | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Version:
        if tensor.is_inference():
            return cls(tensor, None, None)
        found = storage_of(tensor.detach()) if type(tensor.data) is torch.Tensor else None
        storage = None if found is None else StorageWeakRef(found[0])  # type: ignore[no-untyped-call]
        return cls(tensor, tensor._version, storage)

    def check(self) -> None:
        """Raises ModifiedInPlaceError if it was changed in place, ValueError if it has another storage now."""
        if self.version is not None:
            check_unchanged(self.tensor, self.version)
        if self.storage is not None and self.tensor.untyped_storage()._cdata != self.storage.cdata:
            raise ValueError("its data was exchanged")


class Looks:
    """Looks at values.

    `told`, by the name that was given with each value, equals that of later `Looks` at the same values if nothing in
    them has changed, tensors aside. `tensors`, `modules` (without their members) and `generators`: that were found.
    """

    def __init__(self) -> None:
        self.told: dict[object, list[object]] = {}
        self.tensors: list[tuple[object, _Version]] = []
        self.modules: list[nn.Module] = []
        self.generators: list[Any] = []
        self._seen: dict[int, int] = {}
        self._num_values = 0
        self._name: object = None
        self._tell: list[object] = []

    def at(self, name: object, value: object) -> None:
        """Look at a value, and all that it refers to. Raises TooMuchError: with all that was looked at before, it is
        too much."""
        self._name, self._tell = name, self.told.setdefault(name, [])
        self._look(value)

    def check(self, name: object) -> None:
        """Refuse if a tensor that was found under the name has changed: see `_Version.check`."""
        for other, version in self.tensors:
            if other == name:
                version.check()

    def _look(self, value: object) -> None:
        self._num_values += 1
        if self._num_values > _MOST_VALUES:
            raise TooMuchError("its state is too large to be watched")
        if isinstance(value, _PLAIN):
            self._tell.append((type(value), value))
        elif id(value) in self._seen:  # it is alive: what it was found in refers to it
            self._tell.append(self._seen[id(value)])
        else:
            self._seen[id(value)] = len(self._seen)
            self._look_inside(value)

    def _look_inside(self, value: Any) -> None:
        if type(value) in weakref.ProxyTypes:  # anything else would be asked of what it stands for
            self._tell.append(_Same(value))
        elif isinstance(value, torch.Tensor):
            self._tell.append(_Same(value))
            self.tensors.append((self._name, _Version.of(value)))
        elif isinstance(value, _CONTAINERS):
            self._tell.append((type(value), len(value)))
            for element in value:
                self._look(element)
            if isinstance(value, Mapping):
                for element in value.values():
                    self._look(element)
        elif isinstance(value, np.generic):
            self._tell.append((type(value), value.tobytes()))
        elif isinstance(value, np.ndarray):
            self._tell.append((value.shape, value.dtype, _checksum(value)))
        else:
            self._look_at_object(value)

    def _look_at_object(self, value: Any) -> None:
        self._tell.append(_Same(value))
        if isinstance(value, nn.Module):
            self.modules.append(value)
        elif isinstance(value, GENERATORS):
            self.generators.append(value)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._look(part)
        elif isinstance(value, types.MethodType):
            self._look(value.__self__)
        elif not isinstance(value, _OPAQUE) and type(value).__module__.partition(".")[0] not in _OPAQUE_PACKAGES:
            for name, held in _attributes_of(value):
                self._tell.append(name)
                self._look(held)


def _attributes_of(value: object) -> Iterator[tuple[str, object]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _checksum(array: np.ndarray[Any, Any]) -> object:
    if array.dtype.hasobject:
        return _Same(array)
    if array.nbytes > _MOST_ARRAY_BYTES:
        raise TooMuchError(f"an array of {array.nbytes} bytes in its state is too large to be watched")
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
