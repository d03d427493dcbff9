"""Makes findings from measurements, in plain words. Pure.

A *problem* keeps offloading from working, or makes it almost useless; a *warning* costs something; a *note* is good to
know. Each check is a function that yields its findings. The codes are stable, the words are not.
"""

from __future__ import annotations

from collections.abc import Callable

from . import drive_findings, host_findings
from .finding import Finding, Found, Severity
from .measurements import Measurements

__all__ = ["CODES", "findings_of"]

_CHECKS: tuple[Callable[[Measurements], Found], ...] = (
    drive_findings.room,
    drive_findings.place,
    drive_findings.speed,
    drive_findings.latency,
    host_findings.accelerators,
    host_findings.memory,
    host_findings.huge_pages,
    host_findings.cores,
    host_findings.limits,
    host_findings.daemon,
    drive_findings.worth_of_figures,
    drive_findings.wear,
)
"""All checks, in the order in which their findings are shown."""

_ORDER: tuple[Severity, ...] = ("problem", "warning", "note")

CODES = (
    "drive-fails", "drive-full", "little-space", "in-memory", "network-drive", "no-direct-io", "drive-very-slow",
    "drive-slow", "spinning-drive", "drive-answers-late", "accelerator-fails", "not-pinned", "link-slow",
    "little-memory", "memory-limit", "swapping", "memory-slow", "memory-not-returned", "small-shm", "no-huge-pages",
    "memory-fragmented", "window-in-small-pages", "cpu-quota", "one-core", "few-descriptors", "locked-memory-limit",
    "daemon-runs", "daemon-silent", "daemon-refuses", "partly-measured", "drive-shared", "cores-shared",
    "first-write-slow", "wear",
)  # fmt: skip
"""All codes of findings, for programs and for the page that explains them (docs/reference/doctor.md)."""


def findings_of(machine: Measurements) -> tuple[Finding, ...]:
    """Every finding about a machine, the worst first; within a severity in the order of the checks."""
    found = [finding for check in _CHECKS for finding in check(machine)]
    return tuple(sorted(found, key=lambda finding: _ORDER.index(finding.severity)))
