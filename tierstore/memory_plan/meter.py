"""Memory in use, and the most since a moment: of this process, or of an accelerator."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from ..returning.allocator import allocator_of_process
from ..returning.code_pages import let_go_of_code

_TORCH = Path(torch.__file__).resolve().parent
_CLEAR_REFS = "/proc/self/clear_refs"
_STATUS = re.compile(rb"^(VmHWM|VmRSS):\s+(\d+) kB", re.MULTILINE)


class ResidentMeter:
    """The resident memory of this process: VmRSS and VmHWM (proc(5)), of all kinds of pages. To reset the peak, which
    other readers see too, takes /proc/self/clear_refs; some kernels and containers do not offer that file."""

    unit = "resident memory of the process"
    is_of_host = True

    def __init__(self) -> None:
        self._release = allocator_of_process().release
        try:
            open(_CLEAR_REFS, "wb").close()
        except OSError:
            self.can_reset = False
        else:
            self.can_reset = True

    def level(self) -> int:
        return self._read()[b"VmRSS"]

    def peak(self) -> int:
        found = self._read()
        return max(found[b"VmHWM"], found[b"VmRSS"])

    def reset(self) -> None:
        with open(_CLEAR_REFS, "wb", buffering=0) as file:
            file.write(b"5")

    def tidy(self) -> None:
        """Let go of what nobody needs, so that `level` counts what is alive: memory that is free, code that rests."""
        if self._release is not None:
            self._release()
        let_go_of_code(_TORCH)

    @staticmethod
    def _read() -> dict[bytes, int]:
        status = Path("/proc/self/status").read_bytes()
        return {name: int(kilobytes) * 1024 for name, kilobytes in _STATUS.findall(status)}


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
