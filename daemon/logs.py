"""The daemon's log: one line per event on standard error, one line per cause per minute."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

__all__ = ["CauseFilter", "JsonFormatter", "TextFormatter", "set_up_logging"]

_SECONDS = 60.0
_MOST_CAUSES = 1024
_CLIENT_FIELDS = ("client", "rank", "uid")
_OWN_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_PLAIN = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def set_up_logging(level: str, form: str) -> None:
    """Log to standard error from now on: everything of `level` ("info") or above, as `form` ("text" or "json") says."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    handler.addFilter(CauseFilter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class CauseFilter(logging.Filter):
    """Lets one line per cause and minute pass. The line says how many like it were dropped since the one before.

    A cause is the message before its figures are filled in, together with the client (name, rank, user). The number of
    causes is bounded: the one that was logged the longest ago is forgotten.

    Args:
        seconds: for how long further lines of a cause are dropped.
        clock: in seconds; never goes back.
    """

    def __init__(self, seconds: float = _SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._seconds = seconds
        self._clock = clock
        self._causes: OrderedDict[tuple[object, ...], tuple[float, int]] = OrderedDict()  # (said at, dropped since)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log it; adds `not_logged`, the number of lines like it that were dropped."""
        cause = (record.name, record.levelno, record.msg, *(getattr(record, name, None) for name in _CLIENT_FIELDS))
        now = self._clock()
        said_at, num_dropped = self._causes.pop(cause, (None, 0))
        if said_at is not None and now - said_at < self._seconds:
            self._causes[cause] = (said_at, num_dropped + 1)
            return False
        self._causes[cause] = (now, 0)
        if len(self._causes) > _MOST_CAUSES:
            self._causes.popitem(last=False)
        if num_dropped:
            record.not_logged = num_dropped
        return True


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO session opened session=3 client="train.py" rank=0`: always one line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = "".join(f" {name}={_quoted(value)}" for name, value in _fields_of(record).items())
        return f"{_time_of(record)} {record.levelname} {_CONTROL.sub(_escaped, record.getMessage())}{fields}"


class JsonFormatter(logging.Formatter):
    """The same as an object of JSON: time, level, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        event = {"time": _time_of(record), "level": record.levelname, "message": record.getMessage()}
        return json.dumps(_fields_of(record) | event, default=str)


def _time_of(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that were given as `extra`, then the traceback if there is one."""
    fields = {name: value for name, value in vars(record).items() if name not in _OWN_FIELDS and value is not None}
    if record.exc_info:
        fields["traceback"] = logging.Formatter().formatException(record.exc_info)
    return fields


def _quoted(value: object) -> str:
    text = str(value)
    # Escaped as in JSON: a client's name must neither begin a line nor look like a field.
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _escaped(match: re.Match[str]) -> str:
    return json.dumps(match[0])[1:-1]
