"""Tensors that were handed out, are still in use, and whose bytes their record has let go of.

A record keeps what it hands out for as long as its bytes are in memory: see NOTE [Stolen gradients] in `residency.py`.
When they leave memory, what nobody else refers to is forgotten: nobody can come by it any more. The rest the handle
keeps until that is true of it too, which is looked at in each call of the store. It takes no memory: whoever refers
to the tensor keeps its bytes alive, and when the handle dies, it goes along.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from sys import getrefcount

import torch

from .handle import Record
from .torch_names import tensor_use_count

__all__ = ["LentViews", "in_use"]

_NUM_EXAMINED_PER_CALL = 16


def _references(tensors: Collection[torch.Tensor]) -> list[tuple[int, int]]:
    """Of each tensor: how many there are to its Python object, and, from C++, to the tensor itself.

    Who refers to it in one of these ways may do so in the other a moment later: autograd passes tensors on. So both are
    counted in one call of C, in which no other thread that holds Python objects runs.
    """
    return list(zip(map(getrefcount, tensors), map(tensor_use_count, tensors), strict=True))


_REFERENCES_UNUSED = _references((torch.empty(0),))[0]


def in_use(tensors: Collection[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Those tensors to which anybody refers besides this collection, in Python or in C++."""
    references = _references(tensors)
    return tuple(tensor for tensor, found in zip(tensors, references, strict=True) if found != _REFERENCES_UNUSED)


class LentViews:
    """Has handles keep what they have lent. Guarded by the store's lock."""

    def __init__(self) -> None:
        self._lenders: deque[Record] = deque()

    def let_go(self, record: Record) -> None:
        """The record's bytes leave memory: it forgets what it has handed out, but for what is in use."""
        if record.views:
            self.keep(record, record.views.values())
            record.forget_views()

    def keep(self, record: Record, handed_out: Collection[torch.Tensor]) -> None:
        """Have the record's handle keep those of them that are in use: to which anybody but their collection refers."""
        used = in_use(handed_out)
        if used:
            if not record.lent:
                self._lenders.append(record)
            record.lend(record.lent + used)

    def take_back(self, how_many: int | None = _NUM_EXAMINED_PER_CALL) -> None:
        """Forget what is not in use any more, of so many records (None: all)."""
        if not self._lenders:
            return
        is_changing = True
        num_lenders = len(self._lenders)
        for _ in range(num_lenders if how_many is None else min(how_many, num_lenders)):
            record = self._lenders.popleft()
            record.lend(in_use(record.lent))
            if record.lent:
                self._lenders.append(record)
        is_changing = False  # noqa: F841 - see `interrupts.is_half_changed`

    def forget(self) -> None:
        """The store is closed: keep nobody's bytes."""
        for record in self._lenders:
            record.lend(())
        self._lenders.clear()
