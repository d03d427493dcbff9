"""Fixtures for the tests of the hooks."""

from collections.abc import Iterator

import pytest

from tests.hooks.late_copies import SeenCopies
from tests.hooks.programs import one_thread_per_operation


@pytest.fixture(autouse=True)
def _one_thread_per_operation() -> Iterator[None]:
    with one_thread_per_operation():
        yield


@pytest.fixture
def copies() -> Iterator[SeenCopies]:
    with SeenCopies() as engine:
        yield engine
