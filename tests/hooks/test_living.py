"""The list of living logs keeps none of them alive, and does not grow."""

from collections import deque

import pytest
import torch

from tierstore.hooks import living
from tierstore.hooks.living import enlist, living_log
from tierstore.residency.layout import Layout


class FakeLog:
    def __init__(self, number: int) -> None:
        self.number = number

    def give(self, index: int, layout: Layout) -> torch.Tensor:
        raise AssertionError("nobody asks for anything")

    def lay_out(self) -> None:
        raise AssertionError("nothing is traced")


@pytest.fixture(autouse=True)
def _list_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(living, "_living", {})
    monkeypatch.setattr(living, "_dead", deque())


def test_living_log_found_by_its_number() -> None:
    first, second = FakeLog(1), FakeLog(2)
    enlist(first)
    enlist(second)
    assert living_log(1) is first
    assert living_log(2) is second


def test_dead_log_is_not_kept_alive_and_asking_for_it_raises() -> None:
    log = FakeLog(1)
    enlist(log)
    del log
    with pytest.raises(RuntimeError, match="log 1 is gone"):
        living_log(1)


def test_dead_logs_are_struck_out_when_the_next_one_comes() -> None:
    for number in range(100):
        enlist(FakeLog(number))
        assert len(living._living) <= 2
