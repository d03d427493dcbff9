"""Packs without the lock, met at the moments that matter: NOTE [Grants] in `tierstore/ledger/grants.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.existing import set_existing
from tests.hooks.programs import bits, in_threads
from tests.inspect_store import inspect
from tierstore import TierStore, tiered_offload

__all__ = [
    "GROUP",
    "NBYTES",
    "SIDE",
    "SaveThree",
    "assert_right",
    "charged_on_device",
    "lock_held_by_another",
    "met_as_they_append",
    "new_leaf",
    "scope_with",
    "sines",
]

SIDE = 32
NBYTES = SIDE * SIDE * 4
GROUP = 16
"""So many tensors fit into a group, where staging holds four groups."""


def scope_with(store: TierStore, device_bytes: int | str) -> tiered_offload:
    return tiered_offload(store, min_bytes=0, device_bytes=device_bytes)


def charged_on_device(store: TierStore) -> tuple[int, int]:
    resident = inspect(store).device_window.resident
    return resident.used_bytes, resident.granted_bytes


class SaveThree(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        context.save_for_backward(x + 1, x + 2, x + 3)
        return x * 2

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


def sines(number: int, x: torch.Tensor) -> torch.Tensor:
    """Each saves its input, which nobody else holds."""
    for _ in range(number):
        x = x.sin()
    return x


def new_leaf() -> torch.Tensor:
    return torch.full((SIDE, SIDE), 0.5, requires_grad=True)


def assert_right(leaf: torch.Tensor, number: int) -> None:
    expected = new_leaf()
    sines(number, expected * 2).sum().backward()
    assert bits(leaf.grad) == bits(expected.grad)


@contextmanager
def met_as_they_append(store: TierStore, act: Callable[[], object], *, before: bool) -> Iterator[list[str]]:
    """At each pack that appends to a journal, another thread acts just before, or just after."""
    tracked, met = inspect(store).books.tracked, list[str]()
    grant = tracked.grant

    def grant_and_meet(log: Any, given: Any) -> None:
        grant(log, given)
        append = log.grant.append

        def append_and_meet(entry: Any) -> None:
            if before:
                in_threads(act)
            append(entry)
            if not before:
                in_threads(act)
            met.append("met")

        log.grant.append = append_and_meet

    set_existing(tracked, grant=grant_and_meet)
    try:
        yield met
    finally:
        set_existing(tracked, grant=grant)


@contextmanager
def lock_held_by_another(store: TierStore, pack: Callable[[], object]) -> Iterator[None]:
    """And this thread has a grant. `pack` is called until that is so: the store's own thread ends a grant when it comes
    in between."""
    lock, grants = inspect(store).lock, store._core.residency.books.tracked.grants
    while True:
        pack()
        is_held, is_over = threading.Event(), threading.Event()

        def hold(is_held: threading.Event = is_held, is_over: threading.Event = is_over) -> None:
            with lock:
                is_held.set()
                assert is_over.wait(60)

        thread = threading.Thread(target=hold)
        thread.start()
        assert is_held.wait(60)
        if grants:
            break
        is_over.set()
        thread.join()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
