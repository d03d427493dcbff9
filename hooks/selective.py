"""Selective checkpointing beside a store: `selective_checkpoint_contexts`.

`torch.utils.checkpoint` asks a policy, for each operator of a region, whether backward computes its output again.
torch's own contexts keep an output beside the graph, where saved-tensor hooks do not see it, and compute again what the
policy wants offloaded (in eager mode). The contexts here give the outputs to the scope that is around the region."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from tierstore.tensors.layout import storage_of
from tierstore.tensors.torch_names import TorchDispatchMode, top_hooks, tree_leaves, tree_map_only

from .below import HeldTensor, Packed, version_counter_of
from .recorded import enclosing_scope

Policy = Callable[..., CheckpointPolicy | bool]
Pack = Callable[[torch.Tensor], Packed]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_TELLS_OUTPUT = "op_output" in inspect.signature(SelectiveCheckpointContext).parameters
"""Whether this torch shows a policy the operator's output (torch 2.11 does not)."""
_KEEP = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_OFFLOAD = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)


def selective_checkpoint_contexts(policy: Policy | list[Any]) -> Contexts:
    """Contexts for `context_fn` of `torch.utils.checkpoint.checkpoint`; what the policy wants offloaded is stored.

    ::

        def policy(context, operator, *args, **kwargs):
            if operator is torch.ops.aten.mm.default:
                return CheckpointPolicy.MUST_CPU_OFFLOAD
            return CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(selective_checkpoint_contexts, policy)
        with tiered_offload(store):
            output = checkpoint(block, batch, use_reentrant=False, context_fn=contexts)

    MUST_CPU_OFFLOAD and PREFER_CPU_OFFLOAD: the innermost scope packs the output as a saved tensor. MUST_SAVE and
    PREFER_SAVE: the output stays where it is, and is counted in `stats().kept_bytes` as "checkpoint policy"; a change
    in place is found. All other outputs are computed again. So are views, results of operators that change their
    argument in place or draw random numbers, and outputs that the region changes, whatever the policy says: torch's own
    contexts hold those, and give wrong gradients. A retained graph may be used again, which torch's own contexts do not
    allow.

    torch's own contexts are returned while `torch.compile` traces, and where the innermost saved-tensor hooks of this
    thread are not those of a `tiered_offload`: there are none, or they are those of `keep_resident`, `save_on_cpu` or
    another checkpoint.

    Args:
        policy: as for `create_selective_checkpoint_contexts` of `torch.utils.checkpoint`; also a list of operators,
            whose outputs are kept (MUST_SAVE).

    In the region, forward may then raise what packing raises in a scope (`StoreFullError` and so on). Backward may
    raise what `TierStore.get` raises, and `RuntimeError` where the region does not repeat its operators."""
    scope = enclosing_scope()
    if scope is None or torch.compiler.is_compiling():
        contexts: Contexts = create_selective_checkpoint_contexts(policy)
        return contexts
    hooks = top_hooks(False)
    pack = scope.pack if hooks is None else hooks[0]  # a recorded scope's own
    decide = (lambda _, operator, *args, **kwargs: operator in policy) if isinstance(policy, list) else policy
    return holding_contexts(decide, pack, partial(scope.keep, reason="checkpoint policy"))


def holding_contexts(policy: Policy, pack: Pack, keep: Pack) -> Contexts:
    """Contexts for `context_fn`, whatever hooks are in force. `pack`, `keep`: for outputs to offload, and to keep."""
    outputs: _Outputs = {}
    return _Hold(policy, partial(HeldTensor, pack), partial(HeldTensor, keep), outputs), _Replay(outputs)


class _HiddenView(NamedTuple):
    """A view of an output that is held, with a version counter of its own, and the version when it was made."""

    counter: torch.Tensor
    version: int


class _Held(NamedTuple):
    """An output that backward gets back instead of computing it: with a `HeldTensor` in the place of each tensor.

    `inputs`: shape and dtype of each tensor among the operator's arguments. `views`: see NOTE [Views are not held]."""

    inputs: _Inputs
    output: Any
    views: list[_HiddenView]

    @property
    def is_as_held(self) -> bool:
        return all(view.counter._version == view.version for view in self.views)


_Inputs = list[tuple[torch.Size, torch.dtype]]
_Outputs = dict[Any, list[_Held | None]]
"""By operator, in the order of its calls; None: backward computes that output again."""


_NOTHING = _Held([(torch.Size([-1]), torch.bool)], None, [])
"""Stands for a call that forward has not made: no call has such arguments."""


def _inputs_of(arguments: Any) -> _Inputs:
    return [(leaf.shape, leaf.dtype) for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def _storages_of(values: Any) -> dict[int, torch.UntypedStorage]:
    found = (storage_of(leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return {each[0]._cdata: each[0] for each in found if each is not None}


def _written_of(schema: Any, args: Any, kwargs: Any) -> list[Any]:
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | (kwargs or {})
    return [given.get(argument.name) for argument in schema.arguments if argument.is_write]


def _schema_of(func: Any) -> Any:
    return getattr(func, "_schema", None)


def _tells_alias(func: Any) -> bool:
    schema = _schema_of(func)
    return schema is not None and any(each.alias_info is not None for each in schema.returns)


def _is_alias(func: Any, output: Any, args: Any, kwargs: Any) -> bool:
    return _tells_alias(func) or bool(_storages_of(output).keys() & _storages_of((args, kwargs)).keys())


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator takes random numbers from a default generator. Attention without dropout takes none."""
    schema = _schema_of(func)
    given = {} if schema is None else {each.name: each.default_value for each in schema.arguments}
    given |= dict(zip(given, args, strict=False)) | (kwargs or {})
    if given.get("generator") is not None:
        return False
    chances = [given[name] for name in ("dropout", "dropout_p") if name in given]
    return any(chances) if chances else torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


class _Place(NamedTuple):
    """Where an output is held. The reference to its storage keeps any other storage from getting its address."""

    storage: StorageWeakRef
    calls: list[_Held | None]
    number: int
    held: _Held


class _Hold(TorchDispatchMode):
    """Around the forward of a region: holds the outputs that backward gets back.

    NOTE [Views are not held]
    If an output that is held is changed later, backward gets it back changed, computes the change again, and the
    gradient is wrong. The version counter tells of a change that comes after the region. Within it:

    * a view, and the result of a change in place, are computed again whatever the policy says: the change may have come
      before, or may come through the tensor that they share memory with;
    * an output that is changed in place, also through a view, is computed again from then on.

    Some operators hide that they return a view, which has a version counter of its own: `_unsafe_view`, by which
    `matmul` gives a product its shape. What is held under it stays held. The view's counter is remembered, and the
    output is computed again if that tells of a change after the region.

    NOTE [Random numbers]
    Nor is what draws random numbers: those that come after it in the region would be other ones the second time."""

    def __init__(
        self,
        policy: Policy,
        offload: Callable[[torch.Tensor], HeldTensor],
        keep: Callable[[torch.Tensor], HeldTensor],
        outputs: _Outputs,
    ) -> None:
        super().__init__()
        self._policy = policy
        self._offload = offload
        self._keep = keep
        self._outputs = outputs
        self._places: dict[int, _Place] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code inside the region is run as it is; torch's own contexts do the same."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func not in SAC_IGNORED_OPS:
            told = {"op_output": output} if _TELLS_OUTPUT else {}
            context = SelectiveCheckpointContext(is_recompute=False, **told)
            decision = self._policy(context, func, *args, **(kwargs or {}))
            hold = self._keep if decision is True or decision in _KEEP else self._offload
            is_held = decision is True or decision in _KEEP or decision in _OFFLOAD
            self._look_for_changes(func, output, args, kwargs)
            calls = self._outputs.setdefault(func, [])
            if not is_held or _is_alias(func, output, args, kwargs) or _draws(func, args, kwargs):
                calls.append(None)
            else:
                held = _Held(_inputs_of((args, kwargs)), tree_map_only(torch.Tensor, hold, output), [])
                for address, storage in _storages_of(output).items():
                    self._places[address] = _Place(StorageWeakRef(storage), calls, len(calls), held)
                calls.append(held)
        return output

    def _look_for_changes(self, func: Any, output: Any, args: Any, kwargs: Any) -> None:
        schema = _schema_of(func)
        for address in _storages_of([] if schema is None else _written_of(schema, args, kwargs)):
            if address in self._places:
                place = self._places.pop(address)
                place.calls[place.number] = None
        if not _tells_alias(func):
            for leaf in filter(torch.is_tensor, tree_leaves(output)):
                for address in _storages_of(leaf).keys() & self._places.keys():
                    self._places[address].held.views.append(_HiddenView(version_counter_of(leaf), leaf._version))


class _Replay(TorchDispatchMode):
    """Around the region each time that backward computes it again: gives back the outputs that are held."""

    def __init__(self, outputs: _Outputs) -> None:
        super().__init__()
        self._outputs = outputs
        self._thread = threading.local()  # several may go backward through a region at once, each from another output

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Any:
        self._thread.num_calls = {}
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in SAC_IGNORED_OPS:
            return func(*args, **(kwargs or {}))
        num_calls = self._thread.num_calls
        number = num_calls[func] = num_calls.get(func, -1) + 1
        outputs = self._outputs.get(func, [])
        if not any(outputs):  # no output is held: it may be called more often than in forward, or less
            return func(*args, **(kwargs or {}))
        held = outputs[number] if number < len(outputs) else _NOTHING
        if held is None:
            return func(*args, **(kwargs or {}))
        if held.inputs != _inputs_of((args, kwargs)):
            raise RuntimeError(
                f"call {number + 1} of {func} in a checkpointed region differs from forward: the region must run "
                "the same operators each time"
            )
        if not held.is_as_held:
            return func(*args, **(kwargs or {}))
        return tree_map_only(HeldTensor, HeldTensor.unpack, held.output)
