"""The sidecar daemon: one disk tier for each host, shared by every process that trains there. It never imports torch.

Start at `server.py` (how the parts fit), then `connection.py` (a client), `registry.py` (sessions), `records.py`. The
protocol and its client are in `tierstore.sidecar`.
"""

from __future__ import annotations

__all__: list[str] = []
