"""System calls that fail as a plan says, under a store on a directory or inside a daemon."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

from ..disk.transfer import SYSTEM_CALLS, SystemCalls
from .faults import Drawn, Faults
from .plan import Operation

P = ParamSpec("P")
T = TypeVar("T")

_BLOCK_BYTES = 4096


class FaultyCalls(SystemCalls):
    """System calls that are late, fail, move too little, or write less than they report. They block like real ones."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        num_bytes = sum(map(len, buffers))
        with self._faulty("pwritev", descriptor, num_bytes) as drawn:
            if drawn.torn_bytes is None:
                return super().pwritev(descriptor, _shortened(descriptor, buffers, drawn.max_bytes), offset)
            unit = _unit_bytes(descriptor)
            if kept_bytes := min(num_bytes, drawn.torn_bytes // unit * unit):
                super().pwritev(descriptor, _first(buffers, kept_bytes), offset)
            return num_bytes

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        with self._faulty("preadv", descriptor, sum(map(len, buffers))) as drawn:
            return super().preadv(descriptor, _shortened(descriptor, buffers, drawn.max_bytes), offset)

    def fallocate(self, descriptor: int, num_bytes: int) -> None:
        with self._faulty("fallocate", descriptor, num_bytes):
            super().fallocate(descriptor, num_bytes)

    @contextmanager
    def _faulty(self, operation: Operation, descriptor: int, num_bytes: int) -> Iterator[Drawn]:
        drawn = self._faults.draw(operation, num_bytes, descriptor)
        if drawn.delay_seconds:
            time.sleep(drawn.delay_seconds)
        if drawn.error is not None:
            raise OSError(drawn.error, f"{os.strerror(drawn.error)} (injected)")
        ends_at = time.monotonic() + drawn.least_seconds
        yield drawn
        if drawn.least_seconds:
            time.sleep(max(0.0, ends_at - time.monotonic()))


class FaultyExecutor(Executor):
    """Runs jobs on another executor with these system calls. `shutdown` has to be called on the other one."""

    def __init__(self, executor: Executor, calls: SystemCalls) -> None:
        self._executor = executor
        self._calls = calls

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:

        def run() -> T:
            token = SYSTEM_CALLS.set(self._calls)
            try:
                return fn(*args, **kwargs)
            finally:
                SYSTEM_CALLS.reset(token)

        return self._executor.submit(run)


def _unit_bytes(descriptor: int) -> int:
    """The unit in which the kernel itself shortens a call: whole blocks if the file is O_DIRECT (open(2))."""
    return _BLOCK_BYTES if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT else 1


def _shortened(descriptor: int, buffers: Sequence[memoryview], max_bytes: int | None) -> Sequence[memoryview]:
    if max_bytes is None:
        return buffers
    unit = _unit_bytes(descriptor)
    return _first(buffers, max(unit, max_bytes // unit * unit))


def _first(buffers: Sequence[memoryview], num_bytes: int) -> list[memoryview]:
    found = []
    for buffer in buffers:
        found.append(buffer[:num_bytes])
        num_bytes -= len(found[-1])
    return [buffer for buffer in found if len(buffer)]
