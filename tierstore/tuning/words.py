"""Words for people: text from outside that can control neither terminal nor file, speeds, JSON."""

from __future__ import annotations

import msgspec

__all__ = ["json_text", "plain", "rate"]


def plain(text: str, kept: str = "") -> str:
    """The text on one line; what is not printable is replaced, except characters of `kept`."""
    return "".join(each if each.isprintable() or each in kept else "\ufffd" for each in text)


def json_text(value: object) -> str:
    """Plain values or records as JSON, indented for people."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def rate(bytes_per_second: float) -> str:
    """A speed in words, such as "1.21 GB/s": in decimal units, as on data sheets of drives."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_per_second >= factor:
            return f"{bytes_per_second / factor:.3g} {unit}/s"
    return f"{bytes_per_second:.3g} B/s"
