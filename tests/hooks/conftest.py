"""Fixtures for the tests of the hooks."""

from collections.abc import Iterator

import pytest
import torch

from tests.device.fake import SeenDevice
from tests.hooks.programs import one_thread_per_operation
from tierstore.hooks import living
from tierstore.ledger.log import GraphLog


@pytest.fixture(autouse=True)
def _one_thread_per_operation() -> Iterator[None]:
    with one_thread_per_operation():
        yield


@pytest.fixture(autouse=True)
def _nothing_traced_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: the first backward that is traced changes how all that follow pack (`living.py`)."""
    monkeypatch.setattr(living, "_all_laid_out", False)
    monkeypatch.setattr(GraphLog, "keeps_layouts", False)


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """As in a new process, and nothing of it stays."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def copies() -> Iterator[SeenDevice]:
    with SeenDevice() as engine:
        yield engine
