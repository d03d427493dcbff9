"""The daemon's log: one line per event on standard error, one per cause and minute."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tierstore.plain_text import plain

_SECONDS = 60.0
_MOST_CAUSES = 1024
_MOST_LINES = 100
_CLIENT_FIELDS = ("client", "rank", "session")
_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_WORD = re.compile(r"[^\s\"'=\\]+")


def set_up_logging(level: str, form: str) -> None:
    """Log to standard error from now on: everything of `level` ("info") or above, as `form` ("text" or "json") says."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    handler.addFilter(CauseFilter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class CauseFilter(logging.Filter):
    """Lets one line per cause and minute pass, and a hundred per kind of message and user.

    A cause is the message before its figures are filled in, together with the client and its session. Clients choose
    their names, and may open sessions without end, so the lines of all of a user's causes are bounded too. A line says
    how many like it were dropped before (`not_logged`).
    """

    def __init__(self, seconds: float = _SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._seconds = seconds
        self._clock = clock
        self._spans: OrderedDict[tuple[object, ...], _Span] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        kind = (record.name, record.levelno, record.msg, getattr(record, "uid", None))
        cause = (*kind, *(getattr(record, name, None) for name in _CLIENT_FIELDS))
        num_dropped, spans = 0, []
        for key, most in ((kind, _MOST_LINES), (cause, 1)):
            spans.append(self._span(key))
            if spans[-1].num_said >= most:
                spans[-1].num_dropped += 1
                return False
        for span in spans:
            span.num_said += 1
            num_dropped += span.dropped_before
            span.dropped_before = 0
        if num_dropped:
            record.not_logged = num_dropped
        return True

    def _span(self, key: tuple[object, ...]) -> _Span:
        now = self._clock()
        span = self._spans.get(key)
        if span is None or now - span.began_at >= self._seconds:
            span = _Span(now, span.num_dropped + span.dropped_before if span else 0)
        self._spans[key] = span
        self._spans.move_to_end(key)
        if len(self._spans) > _MOST_CAUSES:
            self._spans.popitem(last=False)
        return span


@dataclass(slots=True)
class _Span:
    """A minute of a cause, or of a kind of message."""

    began_at: float
    dropped_before: int
    num_said: int = 0
    num_dropped: int = 0


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
