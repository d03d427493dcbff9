"""Text that others had a hand in, made safe for people: on a terminal, in a log, in JSON, on a page, in a message.

A client's name or a path may hold what steers a terminal (U+009B), turns the direction of writing (U+202E), takes no
room (U+200B), ends a line (U+2028), or is no text at all (a byte of a path that is no UTF-8, which Python keeps as a
surrogate). `str.isprintable` knows all of these. Each place from which text leaves for people calls a function of this
file. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

_UNUSUAL = re.compile(r"[^ -~]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_BYTES = range(0xDC80, 0xDD00)  # os.fsdecode: a byte of 128 or more that is no UTF-8 (PEP 383)


def plain(text: str, kept: str = "") -> str:
    r"""The text with an escape, such as `\x1b` or `\u202e`, for each unprintable character that is not in `kept`."""
    return text if text.isprintable() else _escaped(text, kept, _escape)


def plain_json(text: str) -> str:
    """Sound JSON with an escape for each character that is not printable, but the ends of lines: the same values as
    before."""
    return text if text.isprintable() else _escaped(text, "\n", lambda each: json.dumps(each)[1:-1])


def unicode_text(text: str) -> str:
    r"""The text as JSON and messages can carry it: a byte that is no UTF-8 is written as `\xff`."""
    return _SURROGATE.sub(lambda found: _escape(found[0]), text)


def _escaped(text: str, kept: str, escape: Callable[[str], str]) -> str:
    def one(found: re.Match[str]) -> str:
        return found[0] if found[0].isprintable() or found[0] in kept else escape(found[0])

    return _UNUSUAL.sub(one, text)


def _escape(character: str) -> str:
    if ord(character) in _BYTES:
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()
