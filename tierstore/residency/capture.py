"""CUDA graphs: whether this thread captures one, and how to ask the driver something while another thread does.

NOTE [Captures elsewhere]
While any thread captures in the default mode ("global"), CUDA forbids potentially unsafe calls to all threads, such as
asking whether an event is over or registering host memory. Such a call fails, and so does the capture, which the store
may not know of. A thread whose own mode is "relaxed" may make these calls (cuThreadExchangeStreamCaptureMode in the
manual of the driver API; PyTorch's allocator does the same, c10/cuda/CUDAGraphsC10Utils.h). Even that thread must not
query an event that was itself recorded in a capture; the store records none while it knows of a capture.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

__all__ = ["beside_captures", "is_capturing"]

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED, cuda.h


def is_capturing(device: torch.device) -> bool:
    """Whether work that this thread queues on the device is captured.

    Asks for the device's own current stream. The one of this thread's current device may be a default stream, which
    must not be queried while other threads capture. A default stream itself never captures.
    """
    if device.type != "cuda" or torch.accelerator.current_stream(device).stream_id == 0:
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@contextmanager
def beside_captures(device: torch.device) -> Iterator[None]:
    """Inside the context, asking the device's driver does not break the captures of other threads."""
    exchange = _exchange_mode() if device.type == "cuda" else None
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # leaves the previous mode in `mode`
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


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
