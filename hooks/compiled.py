"""`offload_backend`: a backend of `torch.compile` whose compiled forwards save in a store.

AOTAutograd divides what Dynamo has traced into a forward and a backward graph. `division.py` changes both, so that they
call the operators of `placeholders.py`. Those pack and unpack through a scope, one for each call of the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Unpack, get_args

import torch
from torch import fx

from tierstore.errors import ConfigError, ConfigTypeError
from tierstore.store.tier_store import TierStore
from tierstore.tensors.compiler_names import compiler_names
from tierstore.tensors.uncompiled import uncompiled

from .checkpoints import is_in_checkpoint
from .division import Rules, pack_inside
from .inductor import compile_with_inductor
from .module import ModuleScope
from .offload import OffloadOptions
from .placeholders import packing_with
from .resident import is_resident
from .select import keep

Compiler = Literal["inductor", "aot_eager"]
_COMPILERS = get_args(Compiler)


class offload_backend:  # noqa: N801 - named like the functions that are given a store
    """A backend for `torch.compile` that stores what the compiled forward saves, inside of one graph.

    ::

        model = torch.compile(model, backend=offload_backend(store))
        model(batch).sum().backward()

    The forward graph hands a saved tensor to the store after its last use there, and the backward graph asks for it
    before the first use. Results and gradients have the same bits as with the same compiler without a store, or forward
    or backward raises. No graph is broken for it, and nothing is compiled again.

    Stored is what the graph has certainly computed into memory of its own, in CPU memory: results of matrix products,
    attention, normalisations and elementwise functions, also where views of them are saved. What may share memory with
    an input, an output or something that is changed in place is saved as without a store. So is what Inductor may save
    with other strides than it was traced with: all in a graph with convolutions, for one.

    Args:
        store: an open `TierStore`.
        backend: which compiler it is: "inductor" or "aot_eager".
        **options: arguments of `tiered_offload`. Tensors below `min_bytes` stay saved in the graph; None: those below
            64 KiB.

    `torch.compile` may be given `mode` and `options` of Inductor with it. Calls inside `keep_resident()`, and inside a
    region of `torch.utils.checkpoint`, store nothing.

    Raises:
        ConfigError: an argument cannot be used.
        UnsupportedTorchError: torch is older than 2.13, or lacks private names that only this backend uses.

    A compiled forward may raise what `TierStore.put` raises, its backward what `TierStore.get` raises. A backward that
    has failed, and was not to retain its graph, cannot be run again: what it had asked for is gone (RuntimeError)."""

    def __init__(self, store: TierStore, *, backend: Compiler = "inductor", **options: Unpack[OffloadOptions]) -> None:
        if backend not in _COMPILERS:
            kind = ConfigError if isinstance(backend, str) else ConfigTypeError
            raise kind("backend", backend, f"give one of {', '.join(map(repr, _COMPILERS))}")
        compiler_names(inductor=backend == "inductor")
        self._scope = ModuleScope(store, **options)
        store._core.use.has_backend = True
        self._rules = Rules(self._scope.least_bytes, for_inductor=backend == "inductor")

    def __call__(self, module: fx.GraphModule, inputs: list[Any], **settings: Any) -> Callable[..., Any]:
        """Called by Dynamo. `settings`: the `mode` and `options` of `torch.compile`, if they were given."""
        compile_it = compile_with_inductor if self._rules.for_inductor else _compile_with_aot_eager
        compiled, scope = compile_it(module, inputs, self._rules, **settings), self._scope

        @uncompiled
        def run(*arguments: Any) -> Any:
            if not torch.is_grad_enabled():
                return compiled(*arguments)
            if is_resident() or is_in_checkpoint():
                with packing_with(keep):
                    return compiled(*arguments)
            with scope.packing() as pack, packing_with(pack):
                return compiled(*arguments)

        return run


def _compile_with_aot_eager(module: fx.GraphModule, inputs: list[Any], rules: Rules) -> Callable[..., Any]:
    names = compiler_names(inductor=False)

    def divide(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **more: Any) -> Any:
        forward, backward = names.min_cut_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **more)
        pack_inside(forward, backward, num_fwd_outputs, rules)
        return forward, backward

    compile_it = names.aot_autograd(
        fw_compiler=names.boxed_nop,
        bw_compiler=names.boxed_nop,
        partition_fn=divide,
        keep_inference_input_mutations=True,
    )  # as the backend "aot_eager" of torch
    compiled: Callable[..., Any] = compile_it(module, inputs)
    return compiled
