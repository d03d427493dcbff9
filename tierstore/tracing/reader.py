"""Reads a trace from its file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..errors import ConfigError
from .events import FORMAT, VERSION, End, Event, Header


@dataclass(frozen=True)
class RecordedTrace:
    """The content of a trace file. `is_complete`: False: its process was killed, or still writes."""

    header: Header
    events: Sequence[Event]
    is_complete: bool


def read_trace(path: Path) -> RecordedTrace:
    """Read the file of a trace. Text after its last line break is an incomplete line and is left out.

    Raises ConfigError: the file cannot be read, is no trace, or has another version; or a line is damaged.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError("trace", str(path), f"cannot be read: {error.strerror}") from error
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    decode = msgspec.json.Decoder(Event).decode
    events: list[Event] = []
    for number, line in enumerate(lines or [b""], 1):
        try:
            events.append(decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError("trace", str(path), f"line {number} is no event of a trace: {error}") from error
    header, known = events[0], range(1, VERSION + 1)
    if not isinstance(header, Header) or header.format != FORMAT:
        what = header.format if isinstance(header, Header) else type(header).__name__.lower()
        raise ConfigError("trace", str(path), f"line 1 is not the header of a trace: {what!r}")
    if header.version not in known:
        reason = f"it is of version {header.version}; this program reads {known[0]} to {known[-1]}"
        raise ConfigError("trace", str(path), reason)
    return RecordedTrace(header, events[1:], isinstance(events[-1], End))
