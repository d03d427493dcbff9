"""Which tensors become one record. Pure: NOTE [Groups] in `tierstore/residency/groups.py` says what for."""

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
    """Storages that become one record, and where each one's bytes begin in it.

    `is_batch`: they are large, so each is copied from where it lies on its accelerator."""

    def __init__(self, first: Part[T], nbytes: int, *, is_batch: bool) -> None:
        self.parts = [first]
        self.first_bytes = [0]
        self.nbytes = nbytes
        self.is_batch = is_batch


class Grouping(Generic[T]):
    """Sorts storages of at most `small_bytes` into groups of at most `most_bytes`, and those of at most half of
    `batch_bytes` into batches of at most that."""

    def __init__(
        self, most_bytes: int, small_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES, batch_bytes: int = 0
    ) -> None:
        self._most_bytes, self._small_bytes, self._batch_bytes = most_bytes, small_bytes, batch_bytes
        self._alignment_bytes = alignment_bytes
        self.largest_bytes = max(small_bytes, batch_bytes // 2)
        self._open: dict[Hashable, Group[T]] = {}

    def add(self, part: Part[T], nbytes: int, key: Hashable) -> Group[T] | None:
        """Take a storage in, which only those of the same key may join. Returns a group that has become full."""
        is_batch = nbytes > self._small_bytes
        key = is_batch, key
        group = self._open.get(key)
        if group is not None:
            first_byte = group.nbytes + -group.nbytes % self._alignment_bytes
            if first_byte + nbytes <= (self._batch_bytes if is_batch else self._most_bytes):
                group.parts.append(part)
                group.first_bytes.append(first_byte)
                group.nbytes = first_byte + nbytes
                return None
        self._open[key] = Group(part, nbytes, is_batch=is_batch)
        return group

    def rest(self) -> Iterator[Group[T]]:
        yield from self._open.values()
