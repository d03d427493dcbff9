"""Accelerators: measured where there are some, and why there are none elsewhere."""

from __future__ import annotations

import pytest
import torch

from tierstore.base import device_files
from tierstore.tuning.examine import measure_accelerators

MIB = 2**20


def test_no_driver_is_said_to_be_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_files, "DEVICE_FILES", ("nothing-of-the-kind",))
    state = measure_accelerators(1.0, MIB)
    assert (state.links, state.error) == ((), None)
    assert "no driver" in (state.note or "")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_driver_that_pytorch_cannot_use_is_said_to_be_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_files, "DEVICE_FILES", ("null",))
    state = measure_accelerators(1.0, MIB)
    assert (state.links, state.error) == ((), None)
    assert f"PyTorch {torch.__version__}" in (state.note or "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator that PyTorch could use")
def test_each_accelerator_is_measured_with_pinned_memory() -> None:
    state = measure_accelerators(1.0, 64 * MIB)
    assert state.error is None
    assert len(state.links) == torch.accelerator.device_count()
    for link in state.links:
        assert link.host_memory == "pinned"
        assert link.memory_bytes > 2**30
        assert min(link.to_host_bytes_per_second, link.to_device_bytes_per_second) > 1e8
