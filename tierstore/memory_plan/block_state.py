"""What a block was before its forward, so that it can be computed again as it was.

NOTE [As it was]
Bindings are put back: parameters, buffers, members, hooks and attributes that were exchanged since, and modes. For the
time of the second computation each module has another `__dict__`, with what it had before forward. So whatever the
second computation sets is gone with it, and a forward may set attributes of its module. Flags `requires_grad` and
random generators are put back likewise. Buffers that forward changes in place get copies of what they were.
What was changed in place cannot be put back: tensors, containers, objects and arguments. Then it is refused.
A weight that has another storage (`weight.data = other`) is refused too. FSDP exchanges the parameters of its modules
itself, so those stay as they are.
Globals, closures and what lies behind extensions written in C are not looked at."""

from __future__ import annotations

import io
import logging
import pickle
import random
import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..errors import ModifiedInPlaceError
from ..hooks.in_place import AROUND
from ..hooks.traced import check_unchanged
from ..tensors.layout import storage_of
from ..tensors.torch_names import tree_leaves

GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes that every module has."""
_WATCHED = ("_parameters", "_buffers")
_MOST_VALUES = 8000
_MOST_ARRAY_BYTES = 2**24
_ATOMS = frozenset({bool, int, float, str, bytes, type(None)})
_BY_PARTS = (complex, partial, types.MethodType)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque, Mapping)
_OPAQUE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, logging.Logger)
_OPAQUE_PACKAGES = ("torch", "numpy", "tierstore")

# --- random generators ------------------------------------------------------------------------------------------------


def devices_of(*values: Any) -> set[torch.device]:
    """The devices of the tensors in modules and nested values, and the CPU."""
    found = {torch.device("cpu")}
    for value in values:
        leaves = [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else tree_leaves(value)
        found |= {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return found


def remembered(devices: Iterable[torch.device], generators: Iterable[Any] = ()) -> Callable[[], None]:
    """A call that puts generators back to what they are now: those of Python, of NumPy, of torch on devices, and
    objects."""
    calls: list[Callable[[], object]] = [
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
    ]
    for device in devices:
        if device.type == "cpu":
            calls.append(partial(torch.set_rng_state, torch.get_rng_state()))
        elif device.type != "meta":
            of_device = torch.get_device_module(device)
            calls.append(partial(of_device.set_rng_state, of_device.get_rng_state(device), device))
    for generator in generators:
        if isinstance(generator, random.Random):
            calls.append(partial(generator.setstate, generator.getstate()))
        elif isinstance(generator, np.random.Generator):
            bits = generator.bit_generator
            calls.append(partial(setattr, bits, "state", bits.state))
        else:
            calls.append(partial(generator.set_state, generator.get_state()))

    def restore() -> None:
        for call in calls:
            call()

    return restore


# --- what can be told of values ---------------------------------------------------------------------------------------


class TooMuchError(Exception):
    """There is more to look at than can be looked at in each call of a block. Stays inside the package."""


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

    def changed(self, name: object) -> ModifiedInPlaceError | str | None:
        if self.version is not None:
            try:
                check_unchanged(self.tensor, self.version)
            except ModifiedInPlaceError as error:
                return error
        is_same = self.storage is None or self.tensor.untyped_storage()._cdata == self.storage.cdata
        return None if is_same else f"the data of {name}"


class _Fingerprint(pickle.Pickler):
    """Writes values, and all that they refer to, as bytes that nobody reads: they are the same again if nothing has
    changed. Of tensors, functions, locks, files and whatever else cannot be looked into only the identity is in them.
    Also lists the tensors that were found, by the names of the values, the modules and the generators."""

    def __init__(self) -> None:
        self._written = io.BytesIO()
        super().__init__(self._written, protocol=5)
        self.told: dict[object, bytes] = {}
        self.tensors: dict[object, list[_Version]] = {}
        self.modules: list[nn.Module] = []
        self.generators: list[Any] = []
        self._alive: list[object] = []  # so that no identity is given to another object
        self._num_values = 0
        self._name: object = None

    def at(self, name: object, value: object) -> None:
        """Look at a value. Raises TooMuchError: with all that was looked at before, it is too much."""
        self._name = name
        identity = self.persistent_id(value)
        if identity is not None:
            self.told[name] = identity.encode()
            return
        self._written.seek(0)
        self._written.truncate()
        try:
            self.dump(value)
        except RecursionError as error:
            raise TooMuchError("its state is too deep to be watched") from error
        self.told[name] = self._written.getvalue()

    def persistent_id(self, value: Any) -> str | None:
        self._num_values += 1
        if self._num_values > _MOST_VALUES:
            raise TooMuchError("its state is too large to be watched")
        kind = type(value)
        if kind in _ATOMS:
            return None
        if kind in weakref.ProxyTypes:  # anything else would be asked of what it stands for
            return self._identity(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return f"{value.shape} {value.dtype} {_checksum(value)}"
        if isinstance(value, np.generic):
            return f"{value.dtype} {value.tobytes()!r}"
        if isinstance(value, torch.device):
            return str(value)
        if isinstance(value, torch.Tensor):
            self.tensors.setdefault(self._name, []).append(_Version.of(value))
        elif isinstance(value, nn.Module):
            self.modules.append(value)
        elif isinstance(value, GENERATORS):
            self.generators.append(value)
        elif isinstance(value, _CONTAINERS) or not (
            isinstance(value, _OPAQUE) or kind.__module__.partition(".")[0] in _OPAQUE_PACKAGES
        ):
            return None
        return self._identity(value)

    def reducer_override(self, value: Any) -> Any:
        """Objects by their attributes, whatever they would have pickled."""
        if isinstance(value, _BY_PARTS):
            return NotImplemented
        attributes = dict(_attributes_of(value))
        if isinstance(value, _CONTAINERS):
            held = list(value.items() if isinstance(value, Mapping) else value)
            return _told, (type(value),), (attributes, held)
        return _told, (self._identity(value),), attributes

    def _identity(self, value: object) -> str:
        self._alive.append(value)
        return str(id(value))


def _told(*_: object) -> None:
    """Stands for the making of an object."""


def _attributes_of(value: object) -> Iterator[tuple[str, object]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _checksum(array: np.ndarray[Any, Any]) -> int:
    if array.nbytes > _MOST_ARRAY_BYTES:
        raise TooMuchError(f"an array of {array.nbytes} bytes in its state is too large to be watched")
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)


# --- a block ----------------------------------------------------------------------------------------------------------


class _Member(NamedTuple):
    """A module of the block, its name there, its `__dict__` as it was, with copies of torch's own containers, and
    whether somebody else exchanges its parameters."""

    module: nn.Module
    path: str
    attributes: dict[str, Any]
    is_managed: bool


class _Name(NamedTuple):
    path: str
    name: str

    def __str__(self) -> str:
        return f"attribute {'.'.join(filter(None, self))!r}"


class BlockState:
    """A block, and what must not change in the arguments of one call, before its forward, which changes `own_buffers`.
    Raises TooMuchError: it cannot be watched."""

    def __init__(self, module: nn.Module, arguments: Iterable[Any], own_buffers: Collection[str] = ()) -> None:
        self._module = module
        self._arguments = [value for value in arguments if not isinstance(value, torch.Tensor)]
        self._members: list[_Member] = []
        self._own_buffers = {name: copied(module.get_buffer(name)) for name in own_buffers}
        self._own = {id(module.get_buffer(name)) for name in own_buffers}
        self._fingerprint = self._look()
        parameters = (value for member in self._members for value in member.attributes["_parameters"].values())
        self._flags = [(parameter, parameter.requires_grad) for parameter in parameters if parameter is not None]
        self._devices = devices_of(module, arguments)
        self._restore_generators = remembered(self._devices, self._fingerprint.generators)

    @property
    def evaluates(self) -> tuple[str, ...]:
        return tuple(member.path for member in self._members if not member.module.training)

    def check(self) -> None:
        """Refuse by ModifiedInPlaceError (a tensor) or RuntimeError if something was changed in place."""
        changed = self.changed()
        if isinstance(changed, ModifiedInPlaceError):
            raise changed
        if changed is not None:
            raise RuntimeError(
                f"{changed} of a {type(self._module).__name__} was changed between forward and backward: the block "
                "cannot be computed again as it was. The gradient was not computed"
            )

    def changed(self) -> ModifiedInPlaceError | str | None:
        """What was changed in place since; None: nothing."""
        now = _Fingerprint()
        try:
            for member in self._members:
                self._look_at(member, now)
            now.at("an argument", self._arguments)
        except TooMuchError:
            pass  # what was not looked at is told as changed
        for name, told in self._fingerprint.told.items():
            if now.told.get(name) != told:
                return f"{name}"
            for version in self._fingerprint.tensors.get(name, ()):
                if (changed := version.changed(name)) is not None:
                    return changed
        return None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the block is as it was: see NOTE [As it was]."""
        with ExitStack() as undo:
            for parameter, flag in self._flags:
                if parameter.requires_grad != flag:
                    undo.callback(parameter.requires_grad_, not flag)
                    parameter.requires_grad_(flag)
            undo.callback(remembered(self._devices, self._fingerprint.generators))
            self._restore_generators()
            for member in self._members:
                undo.callback(object.__setattr__, member.module, "__dict__", vars(member.module))
                object.__setattr__(member.module, "__dict__", self._attributes_for(member))
            yield

    def _attributes_for(self, member: _Member) -> dict[str, Any]:
        now, attributes = vars(member.module)["_parameters"], _with_copies(member.attributes)
        own = attributes["_parameters"]
        if member.is_managed or (now.keys() == own.keys() and all(own[name] is value for name, value in now.items())):
            attributes["_parameters"] = now
        for name, value in self._own_buffers.items():
            path, _, last = name.rpartition(".")
            if path == member.path:
                attributes["_buffers"][last] = value.clone()
        return attributes

    def _look(self) -> _Fingerprint:
        fingerprint, seen = _Fingerprint(), set[nn.Module]()
        found = list(self._module.named_modules())
        while found:
            path, module = found.pop(0)
            if module in seen:
                continue
            if isinstance(module, torch.jit.ScriptModule):
                raise TooMuchError("a ScriptModule in it cannot be watched")
            seen.add(module)
            self._members.append(_Member(module, path, _with_copies(vars(module)), is_managed(module)))
            self._look_at(self._members[-1], fingerprint)
            found += [(f"{path}.{type(other).__name__}", other) for other in fingerprint.modules]
            fingerprint.modules.clear()
        fingerprint.at("an argument", self._arguments)
        return fingerprint

    def _look_at(self, member: _Member, fingerprint: _Fingerprint) -> None:
        for name, value in member.attributes.items():
            if name not in OF_TORCH and name != AROUND:
                fingerprint.at(_Name(member.path, name), value)
        for container in _WATCHED:
            for name, tensor in member.attributes[container].items():
                if tensor is not None and id(tensor) not in self._own and not member.is_managed:
                    fingerprint.at(_Name(member.path, name), tensor)


@torch.no_grad()
def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Without a graph."""
    return tensor.clone()


def _with_copies(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.copy() if name in OF_TORCH and isinstance(value, (dict, set)) else value
        for name, value in attributes.items()
    }


def is_managed(module: nn.Module) -> bool:
    """Whether FSDP2 or the like exchanges the module's parameters: they are no plain tensors."""
    return any(
        parameter is not None and type(parameter.data) is not torch.Tensor for parameter in module._parameters.values()
    )
