"""Functions whose body runs only after their call has returned. A scope around the call would be over by then."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from tierstore.errors import ConfigError

__all__ = ["refuse_deferred"]

_KINDS = (
    (inspect.isasyncgenfunction, "an async generator function"),
    (inspect.iscoroutinefunction, "an async function"),
    (inspect.isgeneratorfunction, "a generator function"),
)


def refuse_deferred(option: str, given: object, function: Any) -> None:
    """Raise ConfigError for a function that begins to run only when its result is iterated over or awaited.

    The scope cannot be left open until then: hooks belong to a thread, so they would be in force for whatever else runs
    there before the body goes on. `function` may be a `functools.partial`, or an object with such a `__call__`.
    """
    while isinstance(function, functools.partial):
        function = function.func
    for is_kind, kind in _KINDS:
        if is_kind(function) or (callable(function) and is_kind(type(function).__call__)):
            raise ConfigError(
                option,
                given,
                f"it is {kind}: its body runs after the call, when the scope has ended. Enter the scope inside it: "
                "`with tiered_offload(store):` around the computation, without a yield or await in between",
            )
