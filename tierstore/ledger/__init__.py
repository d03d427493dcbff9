"""What leaves memory, what stays, what comes back, and which window is charged: decided here, once.

No torch, no thread, no file. The store (`tierstore.residency`) runs these rules over its memory (`memory.py` is the
seam) and its records (`record.py`). Start with `ledger.py`; then `down.py`, `up.py` and `device.py`. The caller holds
the store's lock, and nothing here waits."""
