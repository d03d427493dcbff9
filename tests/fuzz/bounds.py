"""Bounds on what an input may cost: memory and lines of our code, counted, never timed."""

import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import tierstore

__all__ = ["TooMuchError", "TooMuchMemoryError", "bounded", "counted_lines"]

_PACKAGE = str(Path(tierstore.__file__).parent)

Lines = set[tuple[str, int]]


class TooMuchError(AssertionError):
    """An input cost more than its length allows."""


class TooMuchMemoryError(TooMuchError):
    """It was memory."""


class _Counter:
    def __init__(self, most_lines: float) -> None:
        self.seen: Lines = set()
        self.num_lines = 0
        self._most_lines = most_lines

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line":
            self.num_lines += 1
            self.seen.add((frame.f_code.co_filename, frame.f_lineno))
            if self.num_lines > self._most_lines:
                raise TooMuchError(f"more than {self._most_lines} lines of the package for one input")
        return self.trace


@contextmanager
def counted_lines(most_lines: float = float("inf")) -> Iterator[Lines]:
    """Lines of the package that run inside, on this thread: the distinct ones are handed out.

    Raises:
        TooMuchError: from inside, as soon as more than `most_lines` have run; what loops for ever ends so too.
    """
    counter = _Counter(most_lines)
    before = sys.gettrace()
    sys.settrace(counter.trace)
    try:
        yield counter.seen
    finally:
        sys.settrace(before)


@contextmanager
def bounded(most_lines: int, most_bytes: int) -> Iterator[None]:
    """What runs inside, on this thread, costs no more than so many lines of the package and bytes of Python's memory.

    Raises:
        TooMuchError: it did. Memory is looked at in the end, lines as they run.
    """
    tracemalloc.start()
    try:
        with counted_lines(most_lines):
            yield
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if peak_bytes > most_bytes:
        raise TooMuchMemoryError(f"{peak_bytes} bytes of memory; {most_bytes} are allowed")
