"""Runs blocking jobs on the I/O pool, one hop each way per job."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar, cast

import aiofiles.os

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _call(job: Callable[..., Any], *arguments: object) -> Any:
    return job(*arguments)


_run = aiofiles.os.wrap(_call)


async def run_job(executor: Executor, job: Callable[_P, _T], *arguments: _P.args, **_: _P.kwargs) -> _T:
    """Run a blocking job on the pool; returns its result."""
    return cast(_T, await _run(job, *arguments, executor=executor))


async def to_the_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Await `work` to its end, as a task of its own, even if the caller is cancelled: its buffers are in use until
    then."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:  # noqa: BLE001 - the task's own: raised below
            break
    if cancelled is None:
        return task.result()
    raise cancelled
