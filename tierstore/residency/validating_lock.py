"""The lock of a store whose books are validated: each time that somebody lets go of it, they are looked through.

Such a store costs more with each record that it has. It is for tests, and for who looks for a bug of tierstore."""

from __future__ import annotations

import os
from _thread import RLock
from collections.abc import Callable
from types import TracebackType
from typing import Any

SWITCH = "TIERSTORE_VALIDATE"
"""The environment variable that has stores validated, if they are opened from then on: "1"."""


def is_wanted() -> bool:
    """Whether stores that are opened now are validated."""
    return os.environ.get(SWITCH) == "1"


class ValidatingLock(RLock):  # type: ignore[misc]  # typeshed calls it final, which it is not
    """As `threading.RLock`, but calls `validate` before a `with` block ends, and before a condition waits.

    If that raises, the error is raised there. The lock is let go of all the same at the end of a block, and held where
    a wait was to begin. An interrupt, or a full stack, that comes just as it is called leaves it held: those look for
    other bugs."""

    def __init__(self, validate: Callable[[], None]) -> None:
        self._validate = validate

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._validate()
        finally:
            super().__exit__(kind, error, traceback)

    def _release_save(self) -> Any:
        self._validate()
        return super()._release_save()  # type: ignore[misc]
