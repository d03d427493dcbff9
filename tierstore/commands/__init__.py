"""What can be said on the command line, a module for each command. Each imports what it needs when it runs."""

from __future__ import annotations

__all__: list[str] = []
