"""A record in parts, which are moved at once: over several drives, or through a window of shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

from ..errors import CorruptDataError

_T = TypeVar("_T")


class _HasLength(Protocol):
    @property
    def num_bytes(self) -> int: ...


_Part = TypeVar("_Part", bound=_HasLength)


def pieces(parts: Sequence[_Part], memory: memoryview) -> Iterator[tuple[_Part, memoryview]]:
    """Each part, and its bytes of the record."""
    start = 0
    for part in parts:
        yield part, memory[start : start + part.num_bytes]
        start += part.num_bytes


def results_of(outcomes: Sequence[_T | BaseException]) -> list[_T]:
    """The results of calls that all have ended, or what the first of them raised; CorruptDataError before all others,
    because it says that the record is lost."""
    if errors := [each for each in outcomes if isinstance(each, BaseException)]:
        raise min(errors, key=lambda each: not isinstance(each, CorruptDataError))
    return [each for each in outcomes if not isinstance(each, BaseException)]
