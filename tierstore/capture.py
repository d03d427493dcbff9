"""CUDA graphs: whether this thread captures one, and how to ask the driver something while another thread does.

NOTE [Captures elsewhere]
While any thread captures in the default mode ("global"), CUDA forbids all threads what it calls potentially unsafe,
such as asking whether an event is over or registering host memory: the call fails, and so does the capture, which the
store knows nothing of. A thread whose own mode is "relaxed" may do so (cuThreadExchangeStreamCaptureMode in the manual
of the driver API; PyTorch's allocator does the same, c10/cuda/CUDAGraphsC10Utils.h). Even that thread must not ask for
an event that was itself recorded in a capture: the store records none in one that it knows of.
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

    It is asked for the device's own current stream: that of this thread's current device may be the default one, which
    must not be asked while others capture. A default stream itself never captures.
    """
    if device.type != "cuda" or torch.accelerator.current_stream(device).stream_id == 0:
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


@contextmanager
def beside_captures(device: torch.device) -> Iterator[None]:
    """Inside it, asking the device's driver something does no harm to what other threads capture."""
    exchange = _exchange_mode() if device.type == "cuda" else None
    if exchange is None:
        yield
        return
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # which leaves the mode that was in force
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@cache
def _exchange_mode() -> Callable[[Any], int] | None:
    """The driver's function, which torch has loaded where it drives CUDA; None: it is ROCm, or a driver without it."""
    if torch.version.hip is not None:
        return None
    try:
        function: Callable[[Any], int] = ctypes.PyDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
    return function
