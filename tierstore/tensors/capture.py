"""CUDA graphs: whether this thread captures one, and how to ask the driver something while another thread does.

NOTE [Captures elsewhere]
While any thread captures in the default mode ("global"), CUDA forbids potentially unsafe calls to all threads, such as
asking whether an event is over or registering host memory. Such a call fails, and so does the capture, which the store
may not know of. A thread whose own mode is "relaxed" may make these calls (cuThreadExchangeStreamCaptureMode in the
manual of the driver API; PyTorch's allocator does the same, c10/cuda/CUDAGraphsC10Utils.h). Even that thread must not
query an event that was itself recorded in a capture; the store records none while it knows of a capture."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from .torch_names import current_stream_on

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, cuda.h


def current_stream(device: torch.device) -> torch.Stream:
    """The one that this thread queues work on, on that device; a new object each time."""
    return torch.accelerator.current_stream() if device.index is None else current_stream_on(device.index)


def is_capturing(device: torch.device) -> bool:
    """Whether work that this thread queues on the device is captured.

    Asks for the device's own current stream. The one of this thread's current device may be a default stream, which
    must not be queried while other threads capture. A default stream itself never captures."""
    if device.type != "cuda" or current_stream(device).stream_id == 0:
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


class beside_captures:  # noqa: N801 - a context manager; not `contextmanager`'s, as each pack enters two
    """Inside the context, asking the device's driver does not break the captures of other threads."""

    __slots__ = ("_exchange", "_mode")

    def __init__(self, device: torch.device) -> None:
        self._exchange = _exchange_mode() if device.type == "cuda" else None

    def __enter__(self) -> None:
        if self._exchange is not None:
            self._mode = ctypes.byref(ctypes.c_int(_RELAXED))
            self._exchange(self._mode)  # leaves the previous mode in it

    def __exit__(self, *error: object) -> None:
        if self._exchange is not None:
            self._exchange(self._mode)


@cache
def _exchange_mode() -> Callable[[Any], int] | None:
    """The driver's function; torch has loaded the driver if it uses CUDA. None: ROCm, or a driver without it."""
    if torch.version.hip is not None:
        return None
    try:
        function: Callable[[Any], int] = ctypes.PyDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    return function
