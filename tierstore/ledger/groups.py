"""Which small tensors become one record. Pure: NOTE [Groups] in `tierstore/residency/groups.py` says what for."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Generic, NamedTuple

from .log import T

ALIGNMENT_BYTES, DEVICE_ALIGNMENT_BYTES = 64, 512
"""As PyTorch's allocators of the CPU and of accelerators align: kernels may add in another order where the alignment is
another."""


class Part(NamedTuple, Generic[T]):
    """All tracked tensors of one storage, and their aliases, which were taken from them. `kind`: their dtype."""

    tensors: list[T]
    aliases: list[Any]
    kind: Any

    def give_back(self) -> None:
        for tracked, alias in zip(self.tensors, self.aliases, strict=True):
            tracked.alias = alias
        self.aliases.clear()  # or each would look as if it were in use


class Group(Generic[T]):
    """Storages that become one record, and where each one's bytes begin in it."""

    def __init__(self, first: Part[T], nbytes: int) -> None:
        self.parts = [first]
        self.first_bytes = [0]
        self.nbytes = nbytes


class Grouping(Generic[T]):
    """Sorts storages of at most `largest_bytes` into groups of at most `most_bytes`."""

    def __init__(self, most_bytes: int, largest_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._alignment_bytes = alignment_bytes
        self.largest_bytes = largest_bytes
        self._open: dict[Hashable, Group[T]] = {}

    def add(self, part: Part[T], nbytes: int, key: Hashable) -> Group[T] | None:
        """Take a storage in, which only those of the same key may join. Returns a group that has become full."""
        group = self._open.get(key)
        if group is not None:
            first_byte = group.nbytes + -group.nbytes % self._alignment_bytes
            if first_byte + nbytes <= self._most_bytes:
                group.parts.append(part)
                group.first_bytes.append(first_byte)
                group.nbytes = first_byte + nbytes
                return None
        self._open[key] = Group(part, nbytes)
        return group

    def rest(self) -> Iterator[Group[T]]:
        yield from self._open.values()
