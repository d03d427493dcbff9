"""Fixtures for the tests of the hooks."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_per_operation() -> Iterator[None]:
    """The tensors here are small: more threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True)
def _validated(validated: None) -> None:
    """In every test, but where a file says otherwise."""
