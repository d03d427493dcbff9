"""The sidecar daemon: one disk tier for each host, shared by every process that trains there.

Here: the server, its connections and sessions, whose turn it is at the drive, reports, metrics and the live page. Not
here: the protocol and its client (`tierstore.sidecar`), and how records are stored (`tierstore.disk`). `tierstore
serve` calls `server.serve`, `tierstore stat` and `top` read `report.DaemonReport`; nobody else imports it. It never
imports torch.
Start at `server.py` (how the parts fit), then `connection.py` (a client), `registry.py` (sessions), `records.py`.
"""

from __future__ import annotations

__all__: list[str] = []
