"""The daemon's log: one line per event on standard error, one per cause and minute."""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import select
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tierstore.base.threads import start_thread
from tierstore.plain_text import plain

_MOST_CAUSES = 4096  # that are remembered
_MOST_LINES = 100
_MOST_WAITING_LINES = 1000
_CLOSE_SECONDS = 1.0
_CLIENT_FIELDS = ("client", "rank", "session")
_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_WORD = re.compile(r"[^\s\"'=\\]+")


def set_up_logging(level: str, form: str) -> None:
    """Log to standard error from now on: everything of `level` ("info") or above, as `form` ("text" or "json") says."""
    handler = LineWriter(sys.stderr.fileno())
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    handler.addFilter(CauseFilter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class LineWriter(logging.Handler):
    """Writes lines to a descriptor on a thread of its own, because nobody may read there: a pipe is full, or a terminal
    was stopped. Then lines wait, up to a limit; more are lost, and the next one says how many (`lines_lost`). `close`
    waits for a second at most until all is written. OSError: no thread can be started."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._num_lost = 0
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MOST_WAITING_LINES)
        self._thread = start_thread(self._write_all, "tierstore-log")

    def emit(self, record: logging.LogRecord) -> None:
        if self._num_lost:
            record.lines_lost = self._num_lost
        line = self.format(record).encode(errors="backslashreplace") + b"\n"
        try:
            self._lines.put_nowait(line)
            self._num_lost = 0
        except queue.Full:
            self._num_lost += 1

    def close(self) -> None:
        with suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)
        super().close()

    def _write_all(self) -> None:
        for line in iter(self._lines.get, None):
            with suppress(OSError):  # nobody has it open any more
                self._write(line)

    def _write(self, line: bytes) -> None:
        while line:
            try:
                line = line[os.write(self._descriptor, line) :]
            except BlockingIOError:  # whoever has it open too has made it so
                select.select([], [self._descriptor], [])


class CauseFilter(logging.Filter):
    """Lets one line per cause pass in each minute, and a hundred per kind of message and user.

    A cause is the message before its figures are filled in, together with the client and its session. Clients choose
    their names, and may open sessions without end, so the lines of all of a user's causes are bounded too. A line says
    how many of its kind were dropped before (`not_logged`)."""

    def __init__(self, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._seconds = seconds
        self._clock = clock
        self._began_at = clock()
        self._num_said: Counter[tuple[object, ...]] = Counter()  # in this minute, by kind and by cause
        self._num_dropped: Counter[tuple[object, ...]] = Counter()  # by kind

    def filter(self, record: logging.LogRecord) -> bool:
        if len(self._num_said) + len(self._num_dropped) > _MOST_CAUSES:
            self._num_said, self._num_dropped = Counter(), Counter()
        elif self._clock() - self._began_at >= self._seconds:
            self._began_at, self._num_said = self._clock(), Counter()
        kind = (record.name, record.levelno, record.msg, getattr(record, "uid", None))
        cause = (*kind, *(getattr(record, name, None) for name in _CLIENT_FIELDS))
        if self._num_said[cause] or self._num_said[kind] >= _MOST_LINES:
            self._num_dropped[kind] += 1
            return False
        self._num_said.update((kind, cause))
        if num_dropped := self._num_dropped.pop(kind, 0):
            record.not_logged = num_dropped
        return True


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO session opened session=3 client="train.py" rank=0`: always one line."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_quoted(value)}" for name, value in _fields_of(record).items())
        return f"{_time_of(record)} {record.levelname} {plain(record.getMessage())}{fields}"


class JsonFormatter(logging.Formatter):
    """The same as an object of JSON: time, level, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        event = {"time": _time_of(record), "level": record.levelname, "message": record.getMessage()}
        return json.dumps(_fields_of(record) | event, default=str)


def _time_of(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What was given as `extra`, then the traceback if there is one."""
    fields = {name: value for name, value in vars(record).items() if name not in _OWN_FIELDS and value is not None}
    if record.exc_info:
        fields["traceback"] = logging.Formatter().formatException(record.exc_info)
    return fields


def _quoted(value: object) -> str:
    text = str(value)
    # Escaped as in JSON: a client's name must neither begin a line nor look like a field.
    return text if _WORD.fullmatch(text) and text.isprintable() else json.dumps(text)
