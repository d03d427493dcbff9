"""A target: a function that takes any bytes, what may come of it, and what that may cost, counted, never timed."""

import ast
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import tierstore

__all__ = ["Target", "TooMuchError", "bounded", "check", "raises", "seeds_and_kept", "warm"]

_PACKAGE = str(Path(tierstore.__file__).parent)
_CORPUS = Path(__file__).parent / "corpus"
_BASE_LINES, _LINES_PER_BYTE = 20_000, 200
_BASE_BYTES, _MEMORY_PER_BYTE = 768 * 2**10, 64
_MOST_MESSAGE = 10_000


class Target(NamedTuple):
    """One parser, or several that belong together.

    Attributes:
        name: of it, of its file of kept inputs, and of its findings.
        run: feeds it an input. Whatever it raises is a finding.
        seeds: inputs to begin with.
        words: that its inputs are made of.
        result_bytes: that the target itself needs, whatever the input: a record's content, which is its caller's.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    words: tuple[bytes, ...] = ()
    result_bytes: int = 0


class TooMuchError(AssertionError):
    """An input cost more than its length allows."""


class TooMuchMemoryError(TooMuchError):
    """It was memory."""


@contextmanager
def bounded(most_lines: int, most_bytes: int) -> Iterator[None]:
    """What runs inside, on this thread, costs no more than so many lines of the package and bytes of Python's memory.

    Raises:
        TooMuchError: it did. Memory is looked at in the end, lines as they run: what loops for ever ends so too.
    """
    num_lines = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal num_lines
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        num_lines += event == "line"
        if num_lines > most_lines:
            raise TooMuchError(f"more than {most_lines} lines of the package for one input")
        return trace

    before = sys.gettrace()
    tracemalloc.start()
    sys.settrace(trace)
    try:
        yield
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        sys.settrace(before)
        tracemalloc.stop()
    if peak_bytes > most_bytes:
        raise TooMuchMemoryError(f"{peak_bytes} bytes of memory; {most_bytes} are allowed")


def warm(target: Target) -> None:
    """Have all imported and made that a target makes once, so that it does not count for an input."""
    for seed in target.seeds():
        target.run(seed)


def check(target: Target, data: bytes) -> None:
    """Feed it one input, within what its length allows. Only memory that it takes each time is its own.

    Raises:
        TooMuchError: it took more memory, or more lines of the package.
        Exception: what was not documented, or AssertionError where the result was wrong.
    """
    most_bytes = _BASE_BYTES + target.result_bytes + _MEMORY_PER_BYTE * len(data)
    for is_last in (False, True):
        try:
            with bounded(_BASE_LINES + _LINES_PER_BYTE * len(data), most_bytes):
                target.run(data)
            return
        except TooMuchMemoryError:  # a table of the interpreter's may have grown just then
            if is_last:
                raise


def seeds_and_kept(target: Target) -> list[bytes]:
    """The inputs to begin with, and those that earlier runs have found: in `corpus/`, a literal to a line."""
    file = _CORPUS / f"{target.name}.txt"
    lines = file.read_text(encoding="ascii").splitlines() if file.exists() else []
    return [*target.seeds(), *(ast.literal_eval(line) for line in lines if line.strip())]


def raises(kinds: type[Exception] | tuple[type[Exception], ...], action: Callable[[], object]) -> Exception | None:
    """Run it; the documented error that it raised, if it did. Its message can be made, and is of bounded length."""
    try:
        action()
    except kinds as error:
        raised = error
    else:
        return None
    assert len(str(raised)) < _MOST_MESSAGE, f"{type(raised).__name__} with a message of {len(str(raised))} characters"
    return raised
