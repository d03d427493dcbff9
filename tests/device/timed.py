"""A device in virtual time: what a step would take, exactly and repeatably.

The host never takes any time, as where it is far ahead of the device: no copy is over before somebody waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from tests.device.fake import Copy, FakeDevice
from tierstore.residency import graph_times, residency
from tierstore.residency.device import DeviceTier
from tierstore.tensors.copies import Marker
from tierstore.testing.copies import Tensors, Way

__all__ = ["TimedDevice", "forward_through", "narrow_windows"]


class _Stream:
    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self.seconds = 0.0  # when what is queued is done
        self.bytes_per_second = bytes_per_second  # of a link

    def comes_to(self, seconds: float) -> None:
        self.seconds = max(self.seconds, seconds)


class _At(Copy):
    """What is over at that time."""

    _device: TimedDevice

    def __init__(self, device: TimedDevice, seconds: float, *copied: Any) -> None:
        super().__init__(device, *copied)
        self.seconds = seconds

    def query(self) -> bool:
        is_over = self.seconds <= self._device.host_seconds
        if is_over:
            self.make()
        return is_over

    def synchronize(self) -> None:
        self._device.host_seconds = max(self._device.host_seconds, self.seconds)
        self.make()


class TimedDevice(FakeDevice):
    """One compute stream, and a link with a stream each way.

    Args:
        bytes_per_second: of the link, each way.
        back_bytes_per_second: back to the device, where that is another.
        spare: memory that the device was never short of.

    Attributes:
        compute: the stream that computes.
        host_seconds: what the host knows to be over.
        out_bytes: copied out so far. `num_marks`: points with a time.
    """

    def __init__(
        self, bytes_per_second: float, spare: int | None = None, back_bytes_per_second: float | None = None
    ) -> None:
        super().__init__()
        self.spare = spare
        self.compute = _Stream()
        self.host_seconds = 0.0
        self.out_bytes = self.num_marks = 0
        self._links = {"out": _Stream(bytes_per_second), "in": _Stream(back_bytes_per_second or bytes_per_second)}

    def computes(self, seconds: float) -> None:
        """A kernel is queued that takes so long."""
        self.compute.seconds += seconds

    def slow_down(self, factor: float) -> None:
        """The link, each way."""
        for link in self._links.values():
            link.bytes_per_second /= factor

    def synchronize(self) -> None:
        """The host waits for the device."""
        for stream in (self.compute, *self._links.values()):
            self.host_seconds = max(self.host_seconds, stream.seconds)
        super().synchronize()

    def current_stream(self, device: torch.device) -> _Stream:
        return self.compute

    def wait(self, stream: _Stream, marker: Marker) -> None:
        assert isinstance(marker, _At)
        stream.comes_to(marker.seconds)
        marker.make()

    def mark(self, stream: _Stream) -> Marker:
        self.num_marks += 1
        return _At(self, stream.seconds)

    def seconds_between(self, earlier: Marker, later: Marker) -> float:
        assert isinstance(earlier, _At)
        assert isinstance(later, _At)
        assert earlier.query()
        assert later.query()
        return later.seconds - earlier.seconds

    def spare_bytes(self, device: torch.device) -> int | None:
        return self.spare

    def _copy(self, way: Way, sources: Tensors, targets: Tensors, stream: _Stream, ready: _At | None) -> Marker:
        link, nbytes = self._links[way], sum(source.nbytes for source in sources)
        link.comes_to(stream.seconds if ready is None else max(stream.seconds, ready.seconds))
        link.seconds += nbytes / link.bytes_per_second
        self.out_bytes += nbytes if way == "out" else 0
        return _At(self, link.seconds, way, sources, targets)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, engine: TimedDevice, seconds: float) -> torch.Tensor:  # type: ignore[override]
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


def forward_through(engine: TimedDevice, layer_seconds: Sequence[float], start: torch.Tensor) -> torch.Tensor:
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
