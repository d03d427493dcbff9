"""The client of the sidecar daemon, and the protocol that both speak; not the daemon itself (`tierstore.daemon`). Start
at `messages.py` (what is said, and the six rules), then `link.py` (a session), then `remote.py` (the tier)."""
