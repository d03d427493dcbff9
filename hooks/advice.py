"""What a scope refuses and warns of: a program that runs, but not as it was meant to, beside offloading.

NOTE [Compile inside, offload outside]
A compiled region asks for all that it has saved at once, when its backward begins. So offloading saves memory between
regions, not within one: compile the blocks of a model, and offload around them. The other way round, a scope that is
entered inside a compiled function breaks that function's graph. Dynamo cannot trace the `with` block, so it does not
compile the frame that holds it, only what is called from there."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Iterable
from typing import Any

from tierstore.base.caller import stacklevel_of_user
from tierstore.errors import ConfigError, TierStoreWarning
from tierstore.store.use import Use
from tierstore.tensors.torch_names import current_autograd_node
from tierstore.tensors.uncompiled import uncompiled

_COMPILED_NODE = "CompiledFunctionBackward"  # AOTAutograd's name of the backward of a region
_COMPILE_INSIDE = "compile the blocks and offload around them: offload_module(torch.compile(block), store=store)"


@uncompiled
def warn_of_compiled_caller(scope: str) -> None:
    """Warn that a scope, of the class of that name, is being entered inside a compiled call."""
    warnings.warn(
        f"{scope} is entered inside torch.compile: the function that enters it is not compiled, only what it calls; "
        + _COMPILE_INSIDE,
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
    totals = ((node, sum(of_node.values())) for node, of_node in saved.items() if len(of_node) > 1)  # one is one anyway
    return {node: nbytes for node, nbytes in totals if nbytes > budget_bytes}


def warn_if_region(nbytes: int | None, budget_bytes: int) -> None:
    """Warn if the autograd node that runs is a compiled region. `nbytes`: its own, if beyond the budget; else None."""
    node = current_autograd_node()
    if nbytes is not None and node is not None and node.name() == _COMPILED_NODE:
        warnings.warn(
            f"a compiled region asks for {nbytes} saved bytes at once, more than the budget of {budget_bytes}: "
            f"a scope saves memory between compiled regions, not within one; {_COMPILE_INSIDE}. To save it inside of a "
            "region, compile that with backend=tierstore.offload_backend(store)",
            TierStoreWarning,
            stacklevel=2,
        )


def warn_if_replayed(use: Use) -> None:
    """What a graph has saved on an accelerator lies over memory from a pointer. Warn, once, if Inductor has CUDA
    graphs: it gives out their outputs like this (torch/_inductor/cudagraph_trees.py)."""
    if "torch._inductor.cudagraph_trees" in sys.modules and not use.has_replays:
        use.has_replays = True
        warnings.warn(
            "what is saved here lies in the memory of a CUDA graph, which each replay writes anew, so it stays where "
            'it is: nothing of a region that is compiled with mode="reduce-overhead" leaves the device. Compile it '
            'with mode="default" or "max-autotune-no-cudagraphs", or leave it out of the scope',
            TierStoreWarning,
            stacklevel=stacklevel_of_user(),
        )


_DEFERRED = (
    (inspect.isasyncgenfunction, "an async generator function"),
    (inspect.iscoroutinefunction, "an async function"),
    (inspect.isgeneratorfunction, "a generator function"),
)


def refuse_deferred(option: str, given: object, function: Any) -> None:
    """Raise ConfigError for a function that begins to run only when its result is iterated over or awaited.

    The scope cannot be left open until then: hooks belong to a thread, so they would be in force for whatever else runs
    there before the body goes on. `function` may be a `functools.partial`, or an object with such a `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    for is_kind, kind in _DEFERRED:
        if is_kind(function) or (callable(function) and is_kind(type(function).__call__)):
            raise ConfigError(
                option,
                given,
                f"it is {kind}: its body runs after the call, when the scope has ended. Enter the scope inside it: "
                "`with tiered_offload(store):` around the computation, without a yield or await in between",
            )


_REFUSAL = "don't yet support saved tensor hooks"  # said by torch._functorch.vmap
_ADVICE = (
    "torch.func.grad, vjp, jacrev and hessian cannot run under saved-tensor hooks: call them outside tiered_offload, "
    "or inside tierstore.keep_resident(hooks=False)"
)
ADVICE_WITHIN = (
    "torch.func.grad, vjp, jacrev and hessian cannot run under saved-tensor hooks: the function that they "
    "differentiate cannot enter tiered_offload. Give them the function without it, and an offloaded module after "
    "remove_offload"
)
"""For an error that is raised as a scope is entered inside of `torch.func`."""


def advise(error: BaseException, advice: str = _ADVICE) -> None:
    """If `torch.func` has refused to run because of our hooks, add to its error, once, what can be done."""
    if isinstance(error, RuntimeError) and _REFUSAL in str(error):
        notes = getattr(error, "__notes__", ())
        if _ADVICE not in notes and ADVICE_WITHIN not in notes:
            error.add_note(advice)
