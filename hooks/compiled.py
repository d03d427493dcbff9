"""`torch.compile` beside offloading: warnings where a program runs, but not as it was meant to.

NOTE [Compile inside, offload outside]
A compiled region asks for all that it has saved at once, when its backward begins. So offloading saves memory between
regions, not within one: compile the blocks of a model, and offload around them. The other way round, a scope that is
entered inside a compiled function breaks that function's graph. Dynamo cannot trace the `with` block, so it does not
compile the frame that holds it, only what is called from there.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

from tierstore.errors import TierStoreWarning
from tierstore.residency.torch_names import current_autograd_node
from tierstore.residency.uncompiled import uncompiled

__all__ = ["large_nodes", "warn_if_region", "warn_of_compiled_caller"]

_COMPILED_NODE = "CompiledFunctionBackward"  # AOTAutograd's name of the backward of a region
_ADVICE = "compile the blocks and offload around them: offload_module(torch.compile(block), store=store)"


@uncompiled
def warn_of_compiled_caller(scope: str) -> None:
    """Warn that a scope, of the class of that name, is being entered inside a compiled call."""
    warnings.warn(
        f"{scope} is entered inside torch.compile: the function that enters it is not compiled, only what it calls; "
        + _ADVICE,
        TierStoreWarning,
        stacklevel=3,
    )


def large_nodes(spans: Iterable[tuple[int, int, int]], budget_bytes: int) -> dict[int, int]:
    """The autograd nodes that have saved more than `budget_bytes`, and how many bytes each has saved.

    `spans`: (node, number of the storage, bytes) of each saved tensor. Empty without Dynamo: nothing is compiled then.
    """
    if "torch._dynamo" not in sys.modules:
        return {}
    saved: dict[int, dict[int, int]] = {}
    for node, storage, nbytes in spans:
        saved.setdefault(node, {})[storage] = nbytes
    totals = ((node, sum(of_node.values())) for node, of_node in saved.items())
    return {node: nbytes for node, nbytes in totals if nbytes > budget_bytes}


def warn_if_region(nbytes: int | None, budget_bytes: int) -> None:
    """Warn if the autograd node that runs is a compiled region. `nbytes`: its own, if beyond the budget; else None."""
    node = current_autograd_node()
    if nbytes is not None and node is not None and node.name() == _COMPILED_NODE:
        warnings.warn(
            f"a compiled region asks for {nbytes} saved bytes at once, more than the budget of {budget_bytes}: "
            f"memory is saved between compiled regions, not within one; {_ADVICE}",
            TierStoreWarning,
            stacklevel=2,
        )
