"""How the bytes of a record are encoded, and which codec each record gets. Nothing here knows files or tensors.

Start at `policy.py` (the option at work), then `choice.py` (the decision), then `codec.py` (the bytes).
"""

from __future__ import annotations

__all__: list[str] = []
