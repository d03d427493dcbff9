"""What the engine's loop calls: a job begins, and a job has ended."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from ..disk.tier import Loaded, Stored
from ..errors import StoreClosedError
from .guard import Guard
from .handle import Record
from .parts import Parts
from .transfers import BytesToWrite, DiskSubmissions

__all__ = ["Serving"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _or_the_end(method: Callable[Concatenate[Serving, _P], _T]) -> Callable[Concatenate[Serving, _P], _T]:
    """Decorator: the call holds the lock, and an error in it closes the store before the lock is released.

    The engine needs some time to end. A thread that packs meanwhile would find no job under way that could make room,
    and would call the store full.
    """

    @wraps(method)
    def call(self: Serving, /, *arguments: _P.args, **keywords: _P.kwargs) -> _T:
        with self.lock:
            try:
                return method(self, *arguments, **keywords)
            except BaseException as error:
                self._end_failed(error)
                raise

    return call


class Serving(Guard):
    """The `Transfers` of one store. Each call waits for nothing but the lock."""

    def __init__(self, name: str, parts: Parts, engine: DiskSubmissions) -> None:
        super().__init__(name, parts, engine)
        self._memory, self._devices, self._slab = parts.memory, parts.devices, parts.slots.slab

    @_or_the_end
    def begin_spill(self, record: Record) -> BytesToWrite | None:
        self._drain()
        if not self.rules.begin_write(record):
            self._progress.notify_all()  # the record may have been withdrawn
            return None
        return BytesToWrite(self._memory.bytes_held(record), record.kind, record.ready)

    @_or_the_end
    def end_spill(self, record: Record, outcome: Stored | Exception) -> None:
        self.rules.end_write(record, outcome)
        self._advance()

    @_or_the_end
    def begin_restore(self, record: Record) -> memoryview | None:
        self._drain()
        return self._memory.bytes_held(record) if self.rules.begin_read(record) else None

    @_or_the_end
    def end_restore(self, record: Record, outcome: Loaded | Exception) -> None:
        self.rules.end_read(record, outcome)
        self._advance()

    @_or_the_end
    def end_discard(self, num_records: int) -> None:
        self.rules.end_discards(num_records)
        self._advance()

    def engine_ended(self, error: BaseException | None) -> None:
        with self.lock:
            if error is None:
                self._end(StoreClosedError(self._name))
            else:
                self._end_failed(error)
            self.rules.end_jobs()
            under_way = self._devices.under_way()
        for marker in under_way:
            try:
                marker.synchronize()
            except Exception:  # noqa: BLE001 - the device has failed, or its copies were given up
                pass
        with self.lock:
            self._devices.finish()
        self._slab.unpin()  # waits for a thread, where a finalizer may want the lock

    def _end_failed(self, error: BaseException) -> None:
        closed = StoreClosedError(self._name, f"its engine failed ({error!r})")
        closed.__cause__ = error
        self._end(closed)
