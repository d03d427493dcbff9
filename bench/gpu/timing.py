"""The device that is measured: its clock, its memory and its name; the CPU where there is none."""

from __future__ import annotations

import platform
import time
from itertools import pairwise
from typing import Any

import torch


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stopwatch:
    """Times between points of the work that is queued on the device, which need not be done yet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._points: list[Any] = []

    def mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._points.append(event)
        else:
            self._points.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between each mark and the next. Waits for the device."""
        wait_for(self._device)
        if self._device.type == "cuda":
            return [first.elapsed_time(second) / 1000 for first, second in pairwise(self._points)]
        return [second - first for first, second in pairwise(self._points)]
