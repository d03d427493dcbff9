"""The sidecar daemon: one disk tier for each host, shared by every process that trains there. It never imports torch.
Start at `server.py`, then `connection.py` (a client), `registry.py`, `sessions.py`."""
