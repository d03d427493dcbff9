"""JSON of values that hold texts of others: paths, names."""

from __future__ import annotations

from typing import Any

import msgspec

from ..plain_text import plain_json, unicode_text


def json_text(value: object) -> str:
    """Plain values or records as JSON, indented; neither a terminal nor a strict reader stumbles over any of it: what
    is not printable is escaped, and a byte of a path that is no UTF-8 is written as in `unicode_text`."""
    try:
        encoded = msgspec.json.encode(value)
    except UnicodeEncodeError:
        encoded = msgspec.json.encode(in_unicode(msgspec.to_builtins(value)))
    return plain_json(msgspec.json.format(encoded, indent=2).decode())


def in_unicode(value: Any) -> Any:
    """Values as `msgspec.to_builtins` makes them, with `unicode_text` for each text."""
    if isinstance(value, str):
        return unicode_text(value)
    if isinstance(value, dict):
        return {unicode_text(name): in_unicode(each) for name, each in value.items()}
    return [in_unicode(each) for each in value] if isinstance(value, (list, tuple)) else value
