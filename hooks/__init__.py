"""Saved-tensor hooks: they hand what autograd saves for backward to a store.

In here: `tiered_offload` and its relatives, what is worth storing, what the graph holds instead, the order of backward.
Not in here: where the bytes are and how they move. The store knows that, and knows nothing of autograd.
Callers: programs, by the names below. In `tierstore`, only what stands above: the demo, the tuning, the command line.
Start with `offload.py`. Each file imports only from floors below its own; `pyproject.toml` lists the floors.
The way of a saved tensor:

* `module.py` enters the scope around a module's calls, but not inside regions of a checkpoint (`checkpoints.py`).
* Forward: `offload.py` puts the hooks on the thread; autograd calls `scope.py`, which packs. `select.py` keeps what is
  not worth storing; `aliases.py` finds a record to share. The graph holds a `saved.py` object; `order.py` numbers it.
* Backward: autograd calls `thread_hooks.py`; `saved.py` unpacks; `order.py` has the store fetch it, and what is next.
* If the scope is traced, `recorded.py` and `owners.py` stand before both. Compiled autograd goes through `traced.py`.
"""

from .module import offload_module, remove_offload
from .offload import tiered_offload
from .resident import keep_resident
from .selective import selective_checkpoint_contexts

__all__ = ["keep_resident", "offload_module", "remove_offload", "selective_checkpoint_contexts", "tiered_offload"]
