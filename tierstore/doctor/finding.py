"""The record of one finding about a machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

__all__ = ["Finding", "Found", "Severity", "note", "problem", "rate", "warning"]

Severity = Literal["problem", "warning", "note"]


class Finding(Struct, frozen=True, kw_only=True):
    """One thing to know about a machine.

    Attributes:
        severity: "problem", "warning" or "note".
        code: a stable name, for programs.
        sentence: what was found.
        advice: what to do about it; None: nothing has to be done.
    """

    severity: Severity
    code: str
    sentence: str
    advice: str | None = None


Found = Iterator[Finding]
"""The findings that a check yields."""


def problem(code: str, sentence: str, advice: str | None = None) -> Finding:
    """A finding of severity "problem"."""
    return Finding(severity="problem", code=code, sentence=sentence, advice=advice)


def warning(code: str, sentence: str, advice: str | None = None) -> Finding:
    """A finding of severity "warning"."""
    return Finding(severity="warning", code=code, sentence=sentence, advice=advice)


def note(code: str, sentence: str, advice: str | None = None) -> Finding:
    """A finding of severity "note"."""
    return Finding(severity="note", code=code, sentence=sentence, advice=advice)


def rate(bytes_per_second: float) -> str:
    """A speed in words, such as "1.21 GB/s": in decimal units, as on data sheets of drives."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_per_second >= factor:
            return f"{bytes_per_second / factor:.3g} {unit}/s"
    return f"{bytes_per_second:.3g} B/s"
