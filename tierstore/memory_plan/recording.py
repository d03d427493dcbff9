"""What a block computes: its operators, one after the other, and whether it computes the same bits again.

Each call of a block is made twice from the same generators and buffers. The first is recorded. The tensors that
autograd saves in both, and both results, are compared by checksums. A block that differs is never computed again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn
from torch.utils.checkpoint import SAC_IGNORED_OPS

from ..hooks.below import version_counter_of
from ..hooks.in_place import Around
from ..hooks.saved import unpack as unpack_kept
from ..hooks.select import keep, stays_alive
from ..tensors.layout import memory_at
from ..tensors.torch_names import TorchDispatchMode, storage_address, top_hooks, tree_leaves
from .block_state import BlockState, TooMuchError, copied, devices_of, is_managed
from .call_tree import Storages, Through
from .meter import LimitReachedError

TOO_LARGE = "that takes more memory than the limit"
_COMMUNICATING = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"}
"""The namespaces of operators that exchange data between processes."""


class Operator(NamedTuple):
    """One call of an operator: its time (with the device waited for), and the storages that it made, with sizes.

    `can_be_held`: its outputs may be given back instead of computed again: it draws no random numbers, and its results
    are new and nothing changes them later. Nor is it a cast: autocast keeps casts of parameters for a while."""

    name: str
    seconds: float
    outputs: dict[int, int]
    can_be_held: bool


@dataclass
class RecordedCall:
    """One call of a block: storages of its arguments and those that autograd saved, with sizes; operators that have to
    be computed again; why it must not be; buffers that forward changes, and modules in evaluation mode."""

    name: str
    inputs: dict[int, int]
    saved: dict[int, int] = field(default_factory=dict)
    operators: list[Operator] = field(default_factory=list)
    differs: str = ""
    buffers: Sequence[str] = ()
    evaluates: Sequence[str] = ()

    @property
    def seconds(self) -> float:
        return sum(operator.seconds for operator in self.operators)

    @property
    def kind(self) -> tuple[object, ...]:
        """Calls of one kind compute the same operators on outputs of the same sizes."""
        return tuple((operator.name, *operator.outputs.values()) for operator in self.operators), len(self.saved)


class BlockRecording:
    """The calls of all blocks in one forward, in order. `rest`: storages that autograd saved outside of blocks, with
    sizes. `communicates`: a block exchanges data with other processes, or may do so when it is called another time.
    `tidy` is called between the two calls of each block, to make room."""

    def __init__(self, storages: Storages, tidy: Callable[[], None]) -> None:
        self.calls: list[RecordedCall] = []
        self.rest: dict[int, int] = {}
        self.communicates = False
        self._storages, self._tidy = storages, tidy
        self._is_inside = False
        self._arguments: list[tuple[RecordedCall, list[torch.Tensor], list[int]]] = []

    def around(self, name: str) -> Around:
        return Through(partial(self._run, name))

    def saw(self, tensor: torch.Tensor) -> bool:
        """For the `select` of a scope: True, so that it is stored."""
        if not self._is_inside:
            self.rest |= self._storages.among(tensor)
        return True

    def end(self) -> None:
        """Say of calls whose arguments are changed in place after them that they are."""
        for call, counters, versions in self._arguments:
            if _versions_of(counters) != versions:
                call.differs = call.differs or "its arguments are changed after the call"
        self._arguments.clear()

    def _run(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled() or self._is_inside:
            return call(*args, **kwargs)
        recorded = RecordedCall(name, self._storages.among((args, kwargs)))
        self._is_inside = True
        try:
            result = self._record(recorded, call, args, kwargs)
        finally:
            self._is_inside = False
        self.calls.append(recorded)
        counters = [version_counter_of(leaf) for leaf in tree_leaves((args, kwargs)) if type(leaf) is torch.Tensor]
        self._arguments.append((recorded, counters, _versions_of(counters)))
        return result

    def _record(
        self, recorded: RecordedCall, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        module: nn.Module = call.__self__  # type: ignore[attr-defined]
        buffers = {name: copied(buffer) for name, buffer in module.named_buffers()}
        versions, state = _versions_of((args, kwargs)), None
        try:
            state = BlockState(module, tree_leaves((args, kwargs)), buffers)
        except TooMuchError as error:
            recorded.differs = str(error)
        first = _Recorder(self._storages, module)
        with first.recording():
            result = call(*args, **kwargs)
        recorded.saved, recorded.operators = first.saved, first.needed(result)
        self.communicates |= first.communicates or any(map(is_managed, module.modules()))
        # Operators may not tell that they change buffers.
        recorded.buffers = [name for name, old in buffers.items() if not torch.equal(module.get_buffer(name), old)]
        checksums = first.checksums_with(result)
        if state is not None:
            recorded.evaluates = state.evaluates
            if _versions_of((args, kwargs)) != versions or state.changed() is not None:
                recorded.differs = "its forward changes its module, or its arguments, in place"
            else:
                recorded.differs = self._call_again(lambda: call(*args, **kwargs), module, state, checksums)
        return result

    def _call_again(
        self, call: Callable[[], Any], module: nn.Module, state: BlockState, checksums: list[object]
    ) -> str:
        self._tidy()
        try:
            with state.restored():
                second = _Recorder(self._storages, module)  # which is not to count the copies of buffers
                with second.recording():
                    result = call()
            return "" if second.checksums_with(result) == checksums else "a second call gave other bits"
        except LimitReachedError:
            return TOO_LARGE
        except Exception as error:  # noqa: BLE001 - told as the reason why the block stays as it is
            return f"a second call failed: {type(error).__name__}"


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records one call: its operators, counted as `selective_checkpoint_contexts` counts them, and the storages that
    autograd `saved`. The tensors themselves are not held: memory may be short."""

    def __init__(self, storages: Storages, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saved: dict[int, int] = {}
        self.communicates = False
        self._names = storages
        self._buffers = storages.among(list(module.buffers()))
        self._operators: list[Operator] = []
        self._num_needed = 0  # that had been called when autograd saved the last tensor
        self._checksums: list[object] = []  # in the order of saving
        self._is_noting = False  # operators that are called now are none of the block's

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Hooks that are around it see what is saved too, though only the innermost are called."""
        pack, unpack = top_hooks(False) or (keep, unpack_kept)

        def note_and_pack(tensor: torch.Tensor) -> Any:
            self._note(tensor)
            return pack(tensor)

        with torch.autograd.graph.saved_tensors_hooks(note_and_pack, unpack), self:
            yield

    def _note(self, tensor: torch.Tensor) -> None:
        """A tensor is saved. What stays alive anyway does not count, nor parameters that FSDP frees after forward."""
        if stays_alive(tensor if tensor._base is None else tensor._base):
            return
        found = self._names.among(tensor)
        if found and not found.keys() & self._buffers.keys():
            self.saved |= found
            self._is_noting = True
            self._checksums.append(_checksum(tensor))
            self._is_noting = False
            self._num_needed = len(self._operators)

    def checksums_with(self, result: Any) -> list[object]:
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return [*self._checksums, *map(_checksum, results)]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_noting:
            return func(*args, **(kwargs or {}))
        began = time.perf_counter()
        output = func(*args, **(kwargs or {}))
        self.communicates |= func.namespace in _COMMUNICATING
        if func in SAC_IGNORED_OPS:
            return output
        _wait_for_device(output)
        seconds = time.perf_counter() - began
        inputs = self._names.among((args, kwargs))
        outputs = self._names.among(output)
        if func._schema.is_mutable:
            self._forbid(outputs.keys() | self._names.among(_written(func, args, kwargs or {})).keys())
        is_new = bool(outputs) and not outputs.keys() & inputs.keys()
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        can_be_held = is_new and not (func._schema.is_mutable or is_random or str(func) == "aten._to_copy.default")
        self._operators.append(Operator(str(func), seconds, outputs, can_be_held))
        return output

    def needed(self, result: Any) -> list[Operator]:
        """The operators until autograd has saved everything. The block's results stay the caller's to change."""
        self._forbid(self._names.among(result).keys() - self.saved.keys())
        return self._operators[: self._num_needed]

    def _forbid(self, changed: Set[int]) -> None:
        for index, operator in enumerate(self._operators):
            if operator.can_be_held and operator.outputs.keys() & changed:
                self._operators[index] = operator._replace(can_be_held=False)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    written = [each.is_write for each in func._schema.arguments]
    names = [each.name for each in func._schema.arguments]
    given = [*args, *(kwargs.get(name) for name in names[len(args) :])]
    return [value for value, is_written in zip(given, written, strict=True) if is_written]


def _checksum(tensor: torch.Tensor) -> object:
    """Of the values, without `numpy()`: a storage whose memory numpy has seen is never stored again."""
    if type(tensor.data) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        return tuple(tensor.shape), str(tensor.dtype)
    with torch.no_grad():
        content = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    memory = memory_at(storage_address(content) + int(content.storage_offset()), content.numel())
    return tuple(tensor.shape), str(tensor.dtype), xxhash.xxh3_64_intdigest(memory)


def _versions_of(values: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]


def _wait_for_device(values: Any) -> None:
    for device in devices_of(values):
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)
