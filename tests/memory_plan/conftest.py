"""Fixtures for the tests of memory plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from tests.hooks.programs import all_bits, one_thread_per_operation
from tests.memory_plan.planned_model import Model, far_above, planned, planned_by
from tierstore import MemoryPlan, TierStore
from tierstore.memory_plan.decision import Prices


@pytest.fixture(autouse=True)
def _one_thread_per_operation() -> Iterator[None]:
    with one_thread_per_operation():
        yield


class Fitting(NamedTuple):
    """A plan of a model that fits, from real steps; the model, and its state as it was before them."""

    plan: MemoryPlan
    model: Model
    before: list[object]


@pytest.fixture(scope="session")
def fitting(tmp_path_factory: pytest.TempPathFactory) -> Fitting:
    """Planning takes ten seconds."""
    torch.manual_seed(0)
    model = Model()
    before = all_bits(model.state_dict().values())
    with one_thread_per_operation(), TierStore(tmp_path_factory.mktemp("drive"), host_bytes=0, codec="none") as store:
        return Fitting(planned(model, store, far_above()), model, before)


@pytest.fixture(scope="session")
def prices(fitting: Fitting) -> Prices:
    assert fitting.plan._prices is not None
    return fitting.plan._prices


@pytest.fixture
def easy(prices: Prices, store: TierStore) -> MemoryPlan:
    """Of a model that fits."""
    return planned_by(prices, store)
