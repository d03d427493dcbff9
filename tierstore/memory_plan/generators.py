"""The state that a module's forward may draw from or change: random generators, and its own buffers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

__all__ = ["BufferValues", "HostGenerators", "restorers_of", "with_buffers"]


class HostGenerators(NamedTuple):
    """The global generators of Python and of NumPy, which `torch.utils.checkpoint` does not restore."""

    python: object
    numpy: Any

    @classmethod
    def now(cls) -> HostGenerators:
        """Their states now."""
        return cls(random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """Set both to these states."""
        random.setstate(self.python)  # type: ignore[arg-type]
        np.random.set_state(self.numpy)


class BufferValues(NamedTuple):
    """Values of buffers of a module.

    Attributes:
        names: as in `named_buffers`.
        values: a copy of each.
    """

    names: Sequence[str]
    values: list[torch.Tensor]

    @classmethod
    def of(cls, module: nn.Module, names: Sequence[str]) -> BufferValues:
        """The values now."""
        with torch.no_grad():
            return cls(names, [module.get_buffer(name).clone() for name in names])

    def changed(self, module: nn.Module) -> list[str]:
        """The names of those that the module has other values of now. Operators may not tell that they change them."""
        pairs = zip(self.names, self.values, strict=True)
        return [name for name, value in pairs if not torch.equal(module.get_buffer(name), value)]


@contextmanager
def with_buffers(module: nn.Module, saved: BufferValues) -> Iterator[None]:
    """Inside it the module has copies of these values as its buffers. Its own buffers are not touched."""
    own: list[tuple[nn.Module, str, torch.Tensor | None]] = []
    try:
        for name, value in zip(saved.names, saved.values, strict=True):
            path, _, last = name.rpartition(".")
            holder = module.get_submodule(path)
            own.append((holder, last, holder._buffers[last]))
            holder._buffers[last] = value.clone()
        yield
    finally:
        for holder, last, value_before in own:
            holder._buffers[last] = value_before


def restorers_of(model: nn.Module) -> list[Callable[[], object]]:
    """Calls that put back what a step may change in a model: modes, buffers, and generators that are attributes."""
    found: list[Callable[[], object]] = []
    for member in model.modules():
        buffers = {name: _with_copy(buffer) for name, buffer in member._buffers.items()}
        found += [partial(setattr, member, "training", member.training), partial(_put_back_buffers, member, buffers)]
        for value in vars(member).values():
            if isinstance(value, torch.Generator):
                found.append(partial(value.set_state, value.get_state()))
            elif isinstance(value, random.Random):
                found.append(partial(value.setstate, value.getstate()))
            elif isinstance(value, np.random.Generator):
                found.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
    return found


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
