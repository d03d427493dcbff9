"""Plans of memory: for each block of a model, whether what it saves is kept, stored or computed again.

Start with `plan_memory.py`. `prices.py` takes some steps (`steps.py`): `call_tree.py` finds the blocks, `recording.py`
their operators. `decision.py` makes the options of each block, and chooses among them. `plan.py` applies that: calls of
a block go through `applied.py`, and `watch.py` measures the training's steps. A block is computed again as it was:
`block_state.py`."""

from .plan import MemoryPlan
from .plan_memory import plan_memory

__all__ = ["MemoryPlan", "plan_memory"]
