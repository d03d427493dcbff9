"""Plans of memory: for each block of a model, whether what it saves is kept, stored or computed again.

Start with `plan_memory.py`. `prices.py` takes some steps: `call_tree.py` finds the blocks, `recording.py` their
operators, `menu.py` makes the options of each block. `decision.py` chooses among them, `choice.py` verifies that in
steps. `plan.py` applies it: calls of a block go through `applied.py`, and `watch.py` compares the training's steps with
the plan. A block is computed again as it was: `block_state.py`.
"""

from .plan import MemoryPlan
from .plan_memory import plan_memory

__all__ = ["MemoryPlan", "plan_memory"]
