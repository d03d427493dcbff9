"""The client of the sidecar daemon, and the protocol that both speak.

Here: the disk tier that a daemon keeps (`RemoteDisk`), its session and shared memory, messages, frames, their way over
a socket. Not here: the daemon itself (`tierstore.daemon`), and where its bytes lie (`tierstore.disk`). The store and
its command line use `remote` and `inspection`; the daemon uses `messages`, `frames` and `channel`. No tensors.
Start at `messages.py` (what is said, and the six rules), then `link.py` (a session), then `remote.py` (the tier).
"""

from __future__ import annotations

__all__: list[str] = []
