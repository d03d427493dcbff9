"""An accelerator in virtual time: what a step would take, exactly and repeatably, without a device.

The host never takes any time, as where it is far ahead of the device: no copy is over before somebody waits for it.
Bytes are copied when a copy is queued, so this says nothing of races; tests/store/test_happens_before.py does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from tierstore.residency import graph_times, residency
from tierstore.residency.device import DeviceTier
from tierstore.tensors.copies import Marker

__all__ = ["VirtualAccelerator", "forward_through", "narrow_windows"]


class _Stream:
    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self.seconds = 0.0  # when what is queued is done
        self.bytes_per_second = bytes_per_second  # of a link

    def comes_to(self, seconds: float) -> None:
        self.seconds = max(self.seconds, seconds)


class _At:
    def __init__(self, engine: VirtualAccelerator, seconds: float) -> None:
        self.seconds = seconds
        self._engine = engine

    def query(self) -> bool:
        return self.seconds <= self._engine.host_seconds

    def synchronize(self) -> None:
        self._engine.host_seconds = max(self._engine.host_seconds, self.seconds)


class VirtualAccelerator:
    """A copy engine (`Copies`) over CPU memory: one compute stream, and a link with a stream each way.

    Args:
        bytes_per_second: of the link, each way.
        back_bytes_per_second: back to the device, where that is another.
        spare: memory that the device was never short of.

    Attributes:
        compute: the stream that computes.
        host_seconds: what the host knows to be over.
        out_bytes, in_bytes: copied so far. `num_marks`: points with a time.
    """

    def __init__(
        self, bytes_per_second: float, spare: int | None = None, back_bytes_per_second: float | None = None
    ) -> None:
        self.spare = spare
        self.compute = _Stream()
        self.host_seconds = 0.0
        self.out_bytes = self.in_bytes = self.num_marks = 0
        self._out = _Stream(bytes_per_second)
        self._in = _Stream(back_bytes_per_second or bytes_per_second)

    def computes(self, seconds: float) -> None:
        """A kernel is queued that takes so long."""
        self.compute.seconds += seconds

    def slow_down(self, factor: float) -> None:
        """The link, each way."""
        for way in (self._out, self._in):
            way.bytes_per_second /= factor

    def synchronize(self) -> float:
        """The host waits for the device. Returns when that is."""
        for stream in (self.compute, self._out, self._in):
            self.host_seconds = max(self.host_seconds, stream.seconds)
        return self.host_seconds

    # --- `Copies`

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        return torch.device("cpu", 0)  # by its number a trace tells it from host memory

    def current_stream(self, device: torch.device) -> _Stream:
        return self.compute

    def copy_out_many(
        self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], stream: _Stream
    ) -> Marker:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        nbytes = sum(source.numel() for source in sources)
        self.out_bytes += nbytes
        return self._carry(self._out, nbytes, stream.seconds)

    def copy_in_many(
        self, sources: Sequence[torch.Tensor], device: torch.device, stream: _Stream, ready: Marker | None
    ) -> tuple[Sequence[torch.Tensor], Marker]:
        nbytes = sum(source.numel() for source in sources)
        self.in_bytes += nbytes
        not_before = max(stream.seconds, 0.0 if ready is None else _seconds_of(ready))
        return [source.clone() for source in sources], self._carry(self._in, nbytes, not_before)

    def wait(self, stream: _Stream, marker: Marker) -> None:
        stream.comes_to(_seconds_of(marker))

    def share(self, memory: Iterable[torch.Tensor], stream: Any) -> None:
        pass

    def mark(self, stream: _Stream) -> Marker:
        self.num_marks += 1
        return _At(self, stream.seconds)

    def seconds_between(self, earlier: Marker, later: Marker) -> float:
        assert earlier.query()
        assert later.query()
        return _seconds_of(later) - _seconds_of(earlier)

    def spare_bytes(self, device: torch.device) -> int | None:
        return self.spare

    def _carry(self, way: _Stream, nbytes: int, not_before: float) -> _At:
        way.comes_to(not_before)
        way.seconds += nbytes / way.bytes_per_second
        return _At(self, way.seconds)


def _seconds_of(marker: Marker) -> float:
    assert isinstance(marker, _At)
    return marker.seconds


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, engine: VirtualAccelerator, seconds: float) -> torch.Tensor:  # type: ignore[override]
        engine.computes(seconds)
        result = hidden * 0.5
        ctx.save_for_backward(result)
        ctx.engine, ctx.seconds = engine, seconds
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (result,) = ctx.saved_tensors
        ctx.engine.computes(2 * ctx.seconds)
        return gradients[0] * 0.5 + 0 * result, None, None


def forward_through(engine: VirtualAccelerator, layer_seconds: Sequence[float], start: torch.Tensor) -> torch.Tensor:
    """Layers that save one tensor each, of the size of `start`, and take so long; backward takes twice that."""
    hidden = start
    for seconds in layer_seconds:
        hidden = _Layer.apply(hidden, engine, seconds)
    return hidden


def narrow_windows(monkeypatch: pytest.MonkeyPatch, window_bytes: int) -> None:
    """Windows of the size that they have beside a real model's saved tensors, without its gigabytes; the host takes no
    time."""
    monkeypatch.setattr(
        residency, "DeviceTier", partial(DeviceTier, flight_bytes=window_bytes, reload_bytes=window_bytes)
    )
    monkeypatch.setattr(graph_times, "perf_counter", lambda: 0.0)
