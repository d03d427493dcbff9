"""Tensors under one lock: who may call, who waits, and where the bytes of each record are.

In here: the records and their handles, tracking and registering saved tensors. Not here: what leaves and what comes
back (`tierstore.ledger`), the memory that it is moved to (`tierstore.tensors`), what moves bytes to disk
(`tierstore.store.engine`), and autograd (`tierstore.hooks`). The store and the hooks call `residency.py`; start there,
then read `memory.py`."""
