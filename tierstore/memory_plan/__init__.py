"""Plans of memory: for each block of a model, whether what it saves is kept, stored or computed again.

In here: the prices of each way, measured in real steps; the decision, by a solver; what an applied plan does around the
calls of a block; how it corrects itself.
Not in here: how tensors get to the store and back (`hooks/`), and where they lie there.
Callers: programs, by `plan_memory` and `MemoryPlan`; the trainers' integrations; the command line.
Start with `plan_memory.py`. The way of a plan:

* `prices.py` takes some steps (`steps.py`). `call_tree.py` finds the blocks, `recording.py` their
  operators, `meter.py` the memory, and `guard.py` ends a step before it takes
  too much. `menu.py` makes the options of each block from that.
* `decision.py` chooses among the options. `choice.py` verifies what was chosen.
* `plan.py` applies it: calls of a block go through `applied.py`. `watch.py` compares the training's steps with it.
  `contents.py` is what a file has of it.
* Ranks whose blocks communicate tell each other what they found and decide together (`ranks.py`).
* A block is computed again as it was: `module_state.py`, `looking.py`, `generators.py`.
"""

from .plan import MemoryPlan
from .plan_memory import plan_memory

__all__ = ["MemoryPlan", "plan_memory"]
