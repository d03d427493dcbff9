"""The random generators that a block may draw from, and what planning has to put back."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import nn


class GeneratorState(NamedTuple):
    """The state of one generator, what gives it, and what sets it."""

    get: Callable[[], Any]
    set: Callable[[Any], object]
    state: Any

    @classmethod
    def now(cls, get: Callable[[], Any], set_: Callable[[Any], object]) -> Self:
        return cls(get, set_, get())

    def again(self) -> Self:
        return self.now(self.get, self.set)

    def restore(self) -> None:
        self.set(self.state)


def state_of(generator: Any) -> GeneratorState:
    """The state of a generator object of torch, Python or NumPy."""
    if isinstance(generator, torch.Generator):
        return GeneratorState.now(generator.get_state, generator.set_state)
    if isinstance(generator, random.Random):
        return GeneratorState.now(generator.getstate, generator.setstate)
    if isinstance(generator, np.random.RandomState):
        return GeneratorState.now(generator.get_state, generator.set_state)
    bits = generator.bit_generator
    return GeneratorState.now(lambda: bits.state, partial(setattr, bits, "state"))


class Generators(NamedTuple):
    """The global generators: of Python, of NumPy, and of torch on devices."""

    states: list[GeneratorState]

    @classmethod
    def now(cls, devices: Collection[torch.device] = ()) -> Self:
        states = [
            GeneratorState.now(random.getstate, random.setstate),
            GeneratorState.now(np.random.get_state, np.random.set_state),
        ]
        for device in devices:
            if device.type == "cpu":
                states.append(GeneratorState.now(torch.get_rng_state, torch.set_rng_state))
            elif device.type != "meta":
                of_device = torch.get_device_module(device)
                get, set_ = partial(of_device.get_rng_state, device), partial(of_device.set_rng_state, device=device)
                states.append(GeneratorState.now(get, set_))
        return cls(states)

    def again(self) -> Self:
        return type(self)([state.again() for state in self.states])

    def restore(self) -> None:
        for state in self.states:
            state.restore()


class BufferValues(NamedTuple):
    """Copies of the values of a module's buffers."""

    names: Sequence[str]
    values: list[torch.Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, module: nn.Module) -> Self:
        buffers = dict(module.named_buffers())
        return cls(list(buffers), [buffer.clone() for buffer in buffers.values()])

    def changed(self, module: nn.Module) -> list[str]:
        """The names of those that have other values now. Operators may not tell that they change them."""
        pairs = zip(self.names, self.values, strict=True)
        return [name for name, value in pairs if not torch.equal(module.get_buffer(name), value)]


def restorers_of(model: nn.Module) -> list[Callable[[], object]]:
    """Calls that put back what a step may change in a model: modes, attributes, buffers, generators in attributes."""
    found: list[Callable[[], object]] = []
    of_torch = vars(nn.Module()).keys()
    for member in model.modules():
        own = {name: value for name, value in vars(member).items() if name not in of_torch}
        buffers = {name: _with_copy(buffer) for name, buffer in member._buffers.items()}
        found += [
            partial(setattr, member, "training", member.training),
            partial(_put_back_attributes, member, own, of_torch),
            partial(_put_back_buffers, member, buffers),
        ]
        found += [state_of(value).restore for value in own.values() if isinstance(value, _OF_ATTRIBUTES)]
    return found


_OF_ATTRIBUTES = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _put_back_attributes(module: nn.Module, attributes: dict[str, Any], of_torch: Collection[str]) -> None:
    now = vars(module)
    for name in [name for name in now if name not in of_torch and name not in attributes]:
        del now[name]
    now.update(attributes)


@torch.no_grad()
def _with_copy(buffer: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    return None if buffer is None else (buffer, buffer.clone())


@torch.no_grad()
def _put_back_buffers(module: nn.Module, buffers: dict[str, tuple[torch.Tensor, torch.Tensor] | None]) -> None:
    module._buffers.clear()
    for name, pair in buffers.items():
        module._buffers[name] = None if pair is None else pair[0]
        if pair is not None and not torch.equal(*pair):
            pair[0].copy_(pair[1])
