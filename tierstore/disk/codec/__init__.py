"""How records are encoded. Start at `policy.py` (the option), then `choice.py` (the decision), then `codec.py`."""

from __future__ import annotations

__all__: list[str] = []
