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


class _AnyHeader(msgspec.Struct):
    event: str
    format: str
    version: int


def read_trace(path: Path) -> RecordedTrace:
    """Read the file of a trace. Text after its last line break is an incomplete line and is left out.

    Raises ConfigError: the file cannot be read, is no trace, or has another version; or a line is damaged."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError("trace", str(path), f"cannot be read: {error.strerror}") from error
    if not content:
        raise ConfigError("trace", str(path), "it is empty: nothing was recorded in it")
    lines = content[: content.rfind(b"\n") + 1].splitlines()
    _check_version(path, lines)
    decode = msgspec.json.Decoder(Event).decode
    events: list[Event] = []
    for number, line in enumerate(lines, 1):
        try:
            events.append(decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError("trace", str(path), f"line {number} is no event of a trace: {error}") from error
    header = events[0]
    if not isinstance(header, Header):
        raise ConfigError("trace", str(path), f"line 1 is a {type(header).__name__.lower()}, not the header of a trace")
    return RecordedTrace(header, events[1:], isinstance(events[-1], End))


def _check_version(path: Path, lines: Sequence[bytes]) -> None:
    try:
        header = msgspec.json.decode(lines[0] if lines else b"", type=_AnyHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        what = "it is no trace that tiered_offload(store, trace=FILE) has written"
        raise ConfigError("trace", str(path), f"{what}: line 1 is no header ({error})") from error
    if header.format != FORMAT:
        raise ConfigError("trace", str(path), f"line 1 is the header of something else: {header.format!r}")
    if header.version != VERSION:
        raise ConfigError("trace", str(path), f"it is of version {header.version}; this program reads {VERSION}")
