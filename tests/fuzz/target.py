"""What a target is: a function that takes any bytes, and what may come of it."""

import ast
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.bounds import TooMuchMemoryError, bounded

__all__ = ["Target", "check", "kept_inputs", "kept_inputs_as_text", "raises", "warm"]

CORPUS = Path(__file__).parent / "corpus"
_BASE_LINES, _LINES_PER_BYTE = 20_000, 200
_MOST_MESSAGE = 10_000
_BASE_BYTES, _MEMORY_PER_BYTE = 768 * 2**10, 64


class Target(NamedTuple):
    """One parser, or several that belong together.

    Attributes:
        name: of it, of its file of kept inputs, and of its findings.
        run: feeds it an input. Whatever it raises is a finding.
        seeds: inputs to begin with.
        modules: whose lines it is to reach; instrumented for coverage.
        words: that its inputs are made of.
        result_bytes: that the target itself needs, whatever the input: a record's content, which is its caller's.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    modules: tuple[str, ...]
    words: tuple[bytes, ...] = ()
    result_bytes: int = 0


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
    try:
        _run_bounded(target, data, most_bytes)
    except TooMuchMemoryError:  # a table of the interpreter's may have grown just then
        _run_bounded(target, data, most_bytes)


def _run_bounded(target: Target, data: bytes, most_bytes: int) -> None:
    with bounded(_BASE_LINES + _LINES_PER_BYTE * len(data), most_bytes):
        target.run(data)


def kept_inputs(target: Target) -> list[bytes]:
    """The inputs that are kept for it: found by earlier runs, because they reached something or broke something."""
    file = CORPUS / f"{target.name}.txt"
    if not file.exists():
        return []
    return [ast.literal_eval(line) for line in file.read_text(encoding="ascii").splitlines() if line.strip()]


def kept_inputs_as_text(inputs: Iterable[bytes]) -> str:
    """The content of such a file: a literal to a line."""
    return "".join(f"{data!r}\n" for data in sorted(set(inputs), key=lambda data: (len(data), data)))


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
