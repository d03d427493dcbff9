"""The logs that are alive, each found by its number.

A graph that compiled autograd has traced holds no Python objects: its operators take numbers (`traced.py`). Here such
an operator finds the log that its number stands for. The list keeps no log alive; the saved tensors of a log do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from tierstore.base.remains import Remains
from tierstore.residency.layout import Layout

__all__ = ["Log", "enlist", "living_log"]


class Log(Protocol):
    """A log, as far as the list needs it.

    Attributes:
        number: unique in this process.
    """

    number: int

    def fetch(self, index: int, layout: Layout) -> torch.Tensor:
        """Saved tensor `index`, in that geometry."""


class _Enlisted(Remains[Log]):
    """A weak reference to a log, which still knows the number when the log is gone."""

    __slots__ = ("number",)

    def __init__(self, log: Log, note_death: Callable[[_Enlisted], None]) -> None:
        self.number = log.number


_living: dict[int, _Enlisted] = {}
_dead: deque[_Enlisted] = deque()  # still in the list: nothing may be done as a log dies, see `remains.py`


def enlist(log: Log) -> None:
    """Add a new log to the list, and strike out those that have died."""
    _living[log.number] = _Enlisted(log, _dead.append)
    try:
        while True:
            del _living[_dead.popleft().number]
    except IndexError:
        pass  # no more


def living_log(number: int) -> Log:
    """The log of that number.

    Raises:
        RuntimeError: the log is gone. That is a bug of ours: a traced graph keeps the saved tensors that it asks for,
            and they keep their log.
    """
    log = _living[number]()
    if log is None:
        raise RuntimeError(f"log {number} is gone")
    return log
