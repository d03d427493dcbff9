"""What the tests on a real accelerator share: when they run, and how work on it is held up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tierstore import TierStore

__all__ = ["DEVICE", "NEEDS_DEVICE", "copy_stream", "hold_up", "repeatable"]

DEVICE = torch.device("cuda", 0)
NEEDS_DEVICE = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device on this machine"),
]
_CYCLES_PER_SECOND = 2e9
"""More than today's clocks have; so a delay is shorter than it is called, never longer by much."""


def hold_up(seconds: float, stream: torch.Stream | None = None) -> torch.Event:
    """Keep a stream (None: the current one) busy; the event comes after that."""
    stream = stream or torch.accelerator.current_stream(DEVICE)
    with stream:
        torch.cuda._sleep(int(seconds * _CYCLES_PER_SECOND))
        return stream.record_event()


def copy_stream(store: TierStore, direction: str) -> torch.Stream:
    """The stream on which the store copies "out" or "in", as an object of the test's own.

    A `torch.Stream` that is entered keeps what to restore in itself, so two threads must not enter the same one.
    """
    stream = store.books.moves.devices._copies._stream(DEVICE, direction)  # type: ignore[attr-defined]
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


@contextmanager
def repeatable() -> Iterator[None]:
    """Kernels that PyTorch can choose to be deterministic are."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        yield
