"""Saved-tensor hooks: they hand what autograd saves for backward to a store, which knows nothing of autograd.

* `module.py` enters the scope around a module's calls, but not inside regions of a checkpoint (`checkpoints.py`).
* Forward: `offload.py` puts the hooks on the thread; autograd calls `scope.py`, which packs. `select.py` keeps what is
  not worth storing. The graph holds a `saved.py` object; `order.py` numbers it.
* Backward: autograd calls `unpack` of `saved.py`; `order.py` has the store fetch it, and what is next.
* Inside a compiled forward: `compiled.py` has the graphs changed (`division.py`; `inductor.py`) so that they call the
  two operators of `placeholders.py`, which pack and unpack through a scope.
* If the scope is traced, `recorded.py` stands before both. Compiled autograd goes through `traced.py`.
"""

from .compiled import offload_backend
from .module import offload_module, remove_offload
from .offload import tiered_offload
from .resident import keep_resident
from .selective import selective_checkpoint_contexts

__all__ = [
    "keep_resident",
    "offload_backend",
    "offload_module",
    "remove_offload",
    "selective_checkpoint_contexts",
    "tiered_offload",
]
