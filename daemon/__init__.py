"""The sidecar daemon: one disk tier per host, shared by every process that trains on it. Imports no torch."""

from __future__ import annotations

__all__: list[str] = []
