"""Fixtures for the tests of memory plans."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.memory_plan.planned_model import Model, far_above, planned, planned_by
from tierstore import MemoryPlan, TierStore
from tierstore.memory_plan.choice import Corrected


@contextmanager
def one_thread_per_operation() -> Iterator[None]:
    """The tensors here are small: more threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def _one_thread_per_operation() -> Iterator[None]:
    with one_thread_per_operation():
        yield


@pytest.fixture(scope="session")
def corrected(tmp_path_factory: pytest.TempPathFactory) -> Corrected:
    """The prices of a model that fits, from a few real steps: planning takes ten seconds."""
    with one_thread_per_operation(), TierStore(tmp_path_factory.mktemp("drive"), host_bytes=0, codec="none") as store:
        live = planned(Model(), store, far_above())._live
    assert live is not None
    return live.corrected


@pytest.fixture
def easy(corrected: Corrected, store: TierStore) -> MemoryPlan:
    """Of a model that fits."""
    return planned_by(corrected, store)
