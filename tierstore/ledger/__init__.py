"""What leaves memory, what stays, what comes back, and which window is charged: decided here, once.

No torch, no thread, no file. The store (`tierstore.residency`) and the simulator (`simulator/rank.py`) run these rules
over their own memory (`memory.py` is the seam) and their own records (`record.py`). Start with `ledger.py`; then
`down.py`, `up.py` and `device.py`. The caller holds the store's lock, and nothing here waits."""
