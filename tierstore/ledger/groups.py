"""Which tensors become one record. Pure: NOTE [Groups] in `tierstore/residency/groups.py` says what for."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Generic

from .log import T

ALIGNMENT_BYTES, DEVICE_ALIGNMENT_BYTES = 64, 512
"""As PyTorch's allocators of the CPU and of accelerators align: kernels may add in another order where the alignment is
another."""


class Group(Generic[T]):
    """Tensors whose storages become one record.

    Attributes:
        tensors, aliases: all tracked tensors of these storages, and their aliases, which were taken from them.
        first_bytes: where the storage of each begins in the record; views of one storage have the same.
        is_batch: they are large, so each is copied from where it lies on its accelerator.
    """

    def __init__(self, *, is_batch: bool) -> None:
        self.tensors: list[T] = []
        self.aliases: list[Any] = []
        self.first_bytes: list[int] = []
        self.nbytes = 0
        self.is_batch = is_batch

    @property
    def storages(self) -> dict[int, tuple[T, Any]]:
        """A tensor of each, and its alias, by its first byte, in order."""
        return dict(zip(self.first_bytes, zip(self.tensors, self.aliases, strict=True), strict=True))

    def give_back(self) -> None:
        for tracked, alias in zip(self.tensors, self.aliases, strict=True):
            tracked.alias = alias
        self.aliases.clear()  # or each would look as if it were in use


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

    def add(self, tensors: Sequence[T], aliases: list[Any], nbytes: int, key: Hashable) -> Group[T] | None:
        """Take in all tensors of a storage, which only those of the same key may join. Returns a group that has become
        full. The list of aliases is left empty."""
        is_batch = nbytes > self._small_bytes
        key = is_batch, key
        full = None
        if key not in self._open:
            self._open[key] = Group(is_batch=is_batch)
        group = self._open[key]
        first_byte = group.nbytes + -group.nbytes % self._alignment_bytes
        if first_byte and first_byte + nbytes > (self._batch_bytes if is_batch else self._most_bytes):
            full, first_byte = group, 0
            group = self._open[key] = Group(is_batch=is_batch)
        group.tensors += tensors
        group.aliases += aliases
        del aliases[:]  # as in `give_back`
        group.first_bytes += [first_byte] * len(tensors)
        group.nbytes = first_byte + nbytes
        return full

    def rest(self) -> Iterator[Group[T]]:
        yield from self._open.values()
