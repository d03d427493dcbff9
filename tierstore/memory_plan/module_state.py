"""What a block was before its forward, so that it can be computed again as it was.

NOTE [As it was]
Bindings are put back: parameters, buffers, members, hooks and attributes that were exchanged since, and modes. For the
time of the second computation each module has another `__dict__`, with what it had before forward. So whatever the
second computation sets is gone with it, and a forward may set attributes of its module. Flags `requires_grad` and
random generators are put back likewise. Buffers that forward changes in place get copies of what they were.
What was changed in place cannot be put back: tensors, containers, objects and arguments. Then it is refused.
A weight that has another storage (`weight.data = other`) is refused too. FSDP exchanges the parameters of its modules
itself, so those stay as they are.
Globals, closures and what lies behind extensions written in C are not looked at.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import ModifiedInPlaceError
from ..hooks.in_place import AROUND
from .generators import state_of
from .looking import Looks, TooMuchError

_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_WATCHED = ("_parameters", "_buffers")


class _Member(NamedTuple):
    """A module of the block, its name there, and its `__dict__` as it was (torch's own containers in it are copies).

    `is_managed`: somebody else exchanges its parameters.
    """

    module: nn.Module
    path: str
    attributes: dict[str, Any]
    is_managed: bool


class ModuleState:
    """A block and the arguments of one call, before its forward. Raises TooMuchError: it cannot be watched.

    What is not a tensor in the arguments must not be changed later. `own_buffers`: names of buffers that forward
    changes.
    """

    def __init__(self, module: nn.Module, arguments: Any, own_buffers: Collection[str] = ()) -> None:
        self._module, self._arguments = module, arguments
        self._members: list[_Member] = []
        self._own_buffers = {name: copied(module.get_buffer(name)) for name in own_buffers}
        self._own = {id(module.get_buffer(name)) for name in own_buffers}
        self._looks = self._look()
        self._flags = [
            (parameter, parameter.requires_grad)
            for member in self._members
            for parameter in member.attributes["_parameters"].values()
            if parameter is not None
        ]
        self._generators = [state_of(generator) for generator in self._looks.generators]

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
        now = self._look_again()
        for name, told in self._looks.told.items():
            if now is None or now.told.get(name) != told:
                return f"{name}"
            try:
                self._looks.check(name)
            except ModifiedInPlaceError as error:
                return error
            except ValueError:
                return f"the data of {name}"
        return None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, the block is as it was: see NOTE [As it was]."""
        with ExitStack() as undo:
            for parameter, flag in self._flags:
                if parameter.requires_grad != flag:
                    undo.callback(parameter.requires_grad_, not flag)
                    parameter.requires_grad_(flag)
            for generator in self._generators:
                undo.callback(generator.again().restore)
                generator.restore()
            for member in self._members:
                undo.callback(object.__setattr__, member.module, "__dict__", vars(member.module))
                object.__setattr__(member.module, "__dict__", self._attributes_for(member))
            yield

    def _attributes_for(self, member: _Member) -> dict[str, Any]:
        now, attributes = vars(member.module), dict(member.attributes)
        for name, value in member.attributes.items():
            if name in _OF_TORCH and isinstance(value, (dict, set)):
                attributes[name] = copy.copy(value)
        if member.is_managed or _is_same(now["_parameters"], attributes["_parameters"]):
            attributes["_parameters"] = now["_parameters"]
        for name, value in self._own_buffers.items():
            path, _, last = name.rpartition(".")
            if path == member.path:
                attributes["_buffers"][last] = value.clone()
        return attributes

    def _look(self) -> Looks:
        looks = Looks()
        found = [(path, module) for path, module in self._module.named_modules()]
        while found:
            path, module = found.pop(0)
            if any(module is member.module for member in self._members):
                continue
            if isinstance(module, torch.jit.ScriptModule):
                raise TooMuchError("a ScriptModule in it cannot be watched")
            member = _Member(module, path, _as_it_is(module), is_managed(module))
            self._members.append(member)
            num_modules = len(looks.modules)
            self._look_at(member, looks)
            found += [(f"{path}.{type(other).__name__}", other) for other in looks.modules[num_modules:]]
        looks.at("an argument", self._arguments)
        return looks

    def _look_again(self) -> Looks | None:
        looks = Looks()
        try:
            for member in self._members:
                self._look_at(member, looks)
            looks.at("an argument", self._arguments)
        except TooMuchError:
            return None
        return looks

    def _look_at(self, member: _Member, looks: Looks) -> None:
        for name, value in member.attributes.items():
            if name not in _OF_TORCH and name != AROUND:
                looks.at(_Name(member.path, name), value)
        for container in _WATCHED:
            for name, tensor in member.attributes[container].items():
                if tensor is not None and id(tensor) not in self._own and not member.is_managed:
                    looks.at(_Name(member.path, name), tensor)


class _Name(NamedTuple):
    path: str
    name: str

    def __str__(self) -> str:
        return f"attribute {'.'.join(filter(None, self))!r}"


@torch.no_grad()
def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy without a graph."""
    return tensor.clone()


def _as_it_is(module: nn.Module) -> dict[str, Any]:
    return {
        name: copy.copy(value) if name in _OF_TORCH and isinstance(value, (dict, set)) else value
        for name, value in vars(module).items()
    }


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(value is other[name] for name, value in one.items())


def is_managed(module: nn.Module) -> bool:
    """Whether FSDP2 or the like exchanges the module's parameters: they are no plain tensors."""
    return any(
        parameter is not None and type(parameter.data) is not torch.Tensor for parameter in module._parameters.values()
    )
