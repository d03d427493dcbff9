"""Text from outside (paths, names of drives and drivers) that can neither style nor control a terminal or a file."""

from __future__ import annotations

import msgspec

__all__ = ["json_text", "plain"]


def plain(text: str, kept: str = "") -> str:
    """The text on one line; what is not printable is replaced, except characters of `kept`."""
    return "".join(each if each.isprintable() or each in kept else "\ufffd" for each in text)


def json_text(value: object) -> str:
    """Plain values or records as JSON, indented for people."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
