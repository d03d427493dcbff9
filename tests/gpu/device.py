"""What the tests on a real accelerator share: when they run, and how work on it is held up."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.existing import set_existing
from tests.gpu.seen_copies import SeenCopies, WithoutWaits
from tests.inspect_store import inspect
from tierstore import TierStore
from tierstore.tensors.copies import AcceleratorCopies, Copies
from tierstore.tensors.layout import memory_at

__all__ = [
    "DEVICE",
    "NEEDS_DEVICE",
    "copies_under_test",
    "copy_stream",
    "hold_up",
    "is_pinned_at",
    "make_windows_small",
    "repeatable",
]

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
    stream = inspect(store).copies._stream(DEVICE, direction)  # type: ignore[attr-defined]
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def copies_under_test() -> Copies:
    """The copy engine; where PyTorch's record of streams is on, one whose copies it sees.

    Where TIERSTORE_WITHOUT_WAITS is set, one that never waits: whatever is to find a race has to find one then.
    """
    copies = WithoutWaits() if os.environ.get("TIERSTORE_WITHOUT_WAITS") else AcceleratorCopies()
    if not os.environ.get("TORCH_CUDA_SANITIZER"):
        return copies
    from torch.cuda._sanitizer import cuda_sanitizer

    return SeenCopies(copies, cuda_sanitizer.dispatch)


def is_pinned_at(address: int) -> bool:
    """Whether the driver knows the byte. (`is_pinned` of a view asks for the beginning of its storage.)"""
    return torch.frombuffer(memory_at(address, 1, writable=True), dtype=torch.uint8).is_pinned()


def make_windows_small(store: TierStore, nbytes: int) -> None:
    """From now on so much may be on its way out, and so much back, at most."""
    window = inspect(store).device_window
    set_existing(window.in_flight, limit_bytes=nbytes)
    set_existing(window.reloaded, limit_bytes=nbytes)
    window.keep(window.resident.limit_bytes)


@contextmanager
def repeatable() -> Iterator[None]:
    """Kernels that PyTorch can choose to be deterministic are."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        yield
