"""Standard output that fails in one way, whoever writes to it and whenever it is noticed."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class OutputError(Exception):
    """Standard output takes no more: a full disk, a closed pipe. The cause is chained. `is_wanted`: False: whoever read
    it has left. Not an `OSError`, of which the libraries between here and `main` make something of their own."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output cannot be written: {error.strerror}")
        self.is_wanted = not isinstance(error, BrokenPipeError)


class _Output(io.TextIOWrapper):
    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            raise OutputError(error) from error

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            raise OutputError(error) from error


def open_closed_streams() -> None:
    """Let /dev/null take the place of standard streams that were closed from the beginning (`>&-`, some supervisors).

    Else a file or socket of ours would get such a number, and what a library prints there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # in this order: it gets the lowest number that is free
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode))


@contextmanager
def checked_output() -> Iterator[None]:
    """Inside, `sys.stdout` raises `OutputError`, at the latest when this ends; what it did not take is dropped then.

    What it cannot encode is replaced: bars and clients' names may be beyond what a terminal can show."""
    plain = sys.stdout
    if type(plain) is not io.TextIOWrapper:  # somebody else's
        yield
        return
    options = (plain.encoding, "replace", None, plain.line_buffering, plain.write_through)
    sys.stdout = _Output(plain.detach(), *options)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OutputError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # Python tries once more at exit
        os.close(nowhere)
        raise
