"""Decorators for functions that TorchDynamo must not trace.

Dynamo intercepts every Python frame inside a compiled call; under compiled autograd it traces hooks too. It runs traced
code with tensors that have no bytes and no version counters, and runs parts of it later or not at all. Code of a store
cannot be traced, so its entrances are marked. The only exception is the hook that gives a saved tensor back, through an
operator (`tierstore/hooks/traced.py`).

`torch.compiler.disable` marks functions too, by a wrapper that takes 0.4 µs a call, and it imports Dynamo, which
takes a second. Here the code object itself is marked (torch 2.11 and 2.13, `FrameExecStrategy` of
torch/csrc/dynamo/eval_frame.c): a call costs nothing, and nothing is imported."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from types import FunctionType
from typing import TypeVar

from .torch_names import (
    FRAME_DEFAULT,
    FRAME_SKIP,
    FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)

F = TypeVar("F", bound=Callable[..., object])


def uncompiled(function: F) -> F:
    """Decorator: neither the function nor anything it calls is compiled or traced. Callers break their graph."""
    _mark(function, FRAME_SKIP, FRAME_SKIP)
    return _refuse_traces(function)


def uncompiled_itself(function: F) -> F:
    """Decorator: the function is not compiled or traced. Its callees may be, and `is_compiled_call` works in it."""
    _mark(function, FRAME_SKIP, FRAME_DEFAULT)
    return _refuse_traces(function)


def traceable(function: F) -> F:
    """Decorator: a call compiles neither the function nor anything it calls, but a caller's trace may go through it."""
    _mark(function, FRAME_SKIP, FRAME_SKIP)
    return function


def let_errors_through() -> None:
    """Let an error that a compiled backward raises reach its caller, also with `fullgraph=True`.

    `torch.fx` looks at the traceback of such an error with a generator of Python's library. Dynamo refuses to trace
    that, and with `fullgraph=True` its refusal would take the place of the error (torch 2.13)."""
    for function in (traceback.walk_tb, traceback.StackSummary.extract.__func__):  # type: ignore[attr-defined]
        _mark(function, FRAME_SKIP, FRAME_SKIP)


def _mark(function: object, action: object, inside: object) -> None:
    if not isinstance(function, FunctionType):
        raise TypeError(f"{function!r} has no code of its own to mark")
    set_code_exec_strategy(function.__code__, FrameExecStrategy(action, inside))


def _refuse_traces(function: F) -> F:
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "a store's calls cannot be traced"  # type: ignore[attr-defined]
    return function


@uncompiled_itself
def is_compiled_call() -> bool:
    """Whether this thread is inside a call of what `torch.compile` returned. Inside `uncompiled` functions: False."""
    return callable(get_eval_frame_callback())
