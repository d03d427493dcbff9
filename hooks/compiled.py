"""`torch.compile` beside offloading: what runs, but does not do what was meant, is said once.

NOTE [Compile inside, offload outside]
What a compiled region saves, it asks for all at once when its backward begins. So memory is saved between regions,
not within one: compile the blocks of a model, and offload around them. The other way round, a scope that is entered
inside a compiled function breaks that function's graph: Dynamo does not compile the frame that holds a `with` block
which it cannot trace, only what is called from there.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

from tierstore.errors import TierStoreWarning
from tierstore.torch_names import current_autograd_node
from tierstore.uncompiled import uncompiled

__all__ = ["large_nodes", "warn_if_region", "warn_of_compiled_caller"]

_COMPILED_NODE = "CompiledFunctionBackward"  # what AOTAutograd names the backward of a region
_ADVICE = "compile the blocks and offload around them: offload_module(torch.compile(block), store=store)"


@uncompiled
def warn_of_compiled_caller(scope: str) -> None:
    """A scope is being entered inside a compiled call."""
    warnings.warn(
        f"{scope} is entered inside torch.compile: the function that enters it is not compiled, only what it calls; "
        + _ADVICE,
        TierStoreWarning,
        stacklevel=3,
    )


def large_nodes(spans: Iterable[tuple[int, int, int]], budget_bytes: int) -> dict[int, int]:
    """The autograd nodes that saved more than `budget_bytes`, and how many bytes; empty if none can be compiled.

    Args:
        spans: (node, number of the storage, bytes) of each saved tensor.
    """
    if "torch._dynamo" not in sys.modules:
        return {}
    saved: dict[int, dict[int, int]] = {}
    for node, storage, nbytes in spans:
        saved.setdefault(node, {})[storage] = nbytes
    totals = ((node, sum(of_node.values())) for node, of_node in saved.items())
    return {node: nbytes for node, nbytes in totals if nbytes > budget_bytes}


def warn_if_region(nbytes: int | None, budget_bytes: int) -> None:
    """The node that runs asks for what it saved, `nbytes`, more than the budget; a compiled region could be split."""
    node = current_autograd_node()
    if nbytes is not None and node is not None and node.name() == _COMPILED_NODE:
        warnings.warn(
            f"a compiled region asks for {nbytes} saved bytes at once, more than the budget of {budget_bytes}: "
            f"memory is saved between compiled regions, not within one; {_ADVICE}",
            TierStoreWarning,
            stacklevel=2,
        )
