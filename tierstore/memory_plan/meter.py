"""Memory in use, and the most since a moment, of this process or of an accelerator; and a guard, which ends a step
before an operator takes more than the limit, so that the kernel does not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..base.config import memory_of_process
from ..returning.allocator import allocator_of_process
from ..returning.caching import at_work
from ..returning.code_pages import release_code
from ..tensors.torch_names import TorchDispatchMode, tree_leaves, tree_map_only

_TORCH = Path(torch.__file__).resolve().parent
_CLEAR_REFS = "/proc/self/clear_refs"
_CONVOLUTION = "convolution"
"""Their kernels copy inputs and outputs to another layout."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_MOST_BESIDE = 2.0
_OF_OTHERS_BYTES = 32 * 2**20
"""So much may come from elsewhere meanwhile: the store's staging window, code that runs for the first time."""


class ResidentMeter:
    """The resident memory of this process: VmRSS and VmHWM (proc(5)), of all kinds of pages. To reset the peak, which
    other readers see too, takes /proc/self/clear_refs; some kernels and containers do not offer that file."""

    unit = "resident memory of the process"
    is_of_host = True

    def __init__(self) -> None:
        self._release = allocator_of_process().release
        self.can_reset = os.access(_CLEAR_REFS, os.W_OK)

    def level(self) -> int:
        return memory_of_process()["VmRSS"]

    def peak(self) -> int:
        found = memory_of_process()
        return max(found["VmHWM"], found["VmRSS"])

    def reset(self) -> None:
        with open(_CLEAR_REFS, "wb", buffering=0) as file:
            file.write(b"5")

    def tidy(self) -> None:
        """Let go of what nobody needs, so that `level` counts what is alive: memory that is free, code that rests."""
        if self._release is not None:
            self._release()
        caching = at_work()
        if caching is not None:
            caching.return_all()
        release_code(_TORCH)


class AcceleratorMeter:
    """The memory that tensors take on an accelerator, as torch's caching allocator counts it. Waits for the device."""

    is_of_host = False
    can_reset = True
    unit = "memory allocated on the accelerator"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def level(self) -> int:
        return torch.accelerator.memory_allocated(self._device)

    def peak(self) -> int:
        torch.accelerator.synchronize(self._device)
        return torch.accelerator.max_memory_allocated(self._device)

    def reset(self) -> None:
        torch.accelerator.synchronize(self._device)
        torch.accelerator.reset_peak_memory_stats(self._device)

    def tidy(self) -> None:
        pass  # freed memory is not counted here


Meter = ResidentMeter | AcceleratorMeter


def meter_of(model: torch.nn.Module) -> Meter:
    """The meter of the tier that a model fills first."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return ResidentMeter() if device.type == "cpu" else AcceleratorMeter(device)


class LimitReachedError(Exception):
    """What comes next takes more memory than the limit: `nbytes`. Stays inside the package."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"{nbytes} bytes are needed")
        self.nbytes = nbytes


class MemoryGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises LimitReachedError before an operator that would take more than the limit, after a `tidy`. It foresees the
    operator's results, and beside them as much as its kind has taken before, for its bytes. Resets the meter's peak."""

    def __init__(self, meter: Meter, limit_bytes: int, tidy: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter, self._limit_bytes, self._tidy = meter, limit_bytes, tidy
        self._beside: dict[str, float] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result_bytes = _result_bytes(func, args, kwargs or {})
        if result_bytes == 0:
            return func(*args, **(kwargs or {}))
        touched_bytes = result_bytes + _bytes_among((args, kwargs))
        kind = func.overloadpacket.__name__
        share = self._beside.get(kind, float(_CONVOLUTION in kind))
        level = self._level_below(result_bytes + int(share * touched_bytes) + _OF_OTHERS_BYTES)
        self._meter.reset()
        result = func(*args, **(kwargs or {}))
        more_bytes = self._meter.peak() - level - result_bytes - _OF_OTHERS_BYTES
        self._beside[kind] = max(self._beside.get(kind, share), min(more_bytes / touched_bytes, _MOST_BESIDE))
        return result

    def _level_below(self, more_bytes: int) -> int:
        level = self._meter.level()
        if level + more_bytes > self._limit_bytes:
            self._tidy()
            level = self._meter.level()
        if level + more_bytes > self._limit_bytes:
            raise LimitReachedError(level + more_bytes)
        return level


def _result_bytes(func: Any, args: Any, kwargs: dict[str, Any]) -> int:
    """Of the new tensors that an operator will make, found out by calling it on tensors without data."""
    schema = func._schema
    if not any(result.alias_info is None for result in schema.returns):
        return 0
    try:
        bare_args, bare_kwargs = tree_map_only(torch.Tensor, _without_data, (args, kwargs))
        if any(argument.name == "device" for argument in schema.arguments):
            bare_kwargs["device"] = torch.device("meta")
        return _bytes_among(func(*bare_args, **bare_kwargs))
    except Exception:  # noqa: BLE001 - not all operators can be called so
        return _bytes_among((args, kwargs))


def _without_data(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _bytes_among(values: Any) -> int:
    """Of plain tensors; one that is expanded takes no more than its storage."""
    return sum(
        min(leaf.numel() * leaf.itemsize, leaf.untyped_storage().nbytes())
        for leaf in tree_leaves(values)
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and type(leaf) in _PLAIN
    )
