"""Storages that their owner empties and fills again without a version bump, as FSDP and trainers that offload do."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch.autograd import Function

from tests.conftest import MakeStore
from tierstore import TierStore, tiered_offload
from tierstore.testing import SimulatedCopies

NUM_ELEMENTS = 4096


@pytest.fixture(params=["host memory", "simulated accelerator"])
def store(request: pytest.FixtureRequest, make_store: MakeStore) -> Iterator[TierStore]:
    with SimulatedCopies() as copies:
        yield make_store(host_bytes=0, copies=None if request.param == "host memory" else copies)


class Refilled(Function):
    """Its backward fills the storage of what it has saved, after it was unpacked."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, fill: Callable[[], None], *saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*saved)
        ctx.fill = fill
        return weight * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors
        ctx.fill()
        factor = sum(tensor.to(torch.float64).sum() for tensor in saved)
        return (gradient * factor, None, *(None for _ in saved))


class Emptied:
    """A tensor whose storage is emptied at one time, and filled at another.

    Args:
        has_views: whether views of it are saved, of other geometries and dtypes; else itself.
    """

    def __init__(self, *, has_views: bool) -> None:
        tensor = torch.arange(float(NUM_ELEMENTS))
        self.storage = tensor.untyped_storage()
        self.saved: tuple[torch.Tensor, ...] = (tensor,)
        if has_views:
            self.saved = (tensor[: NUM_ELEMENTS // 2], tensor.view(2, -1)[1].t(), tensor.view(torch.int32)[5:])
            self.saved += (torch.view_as_complex(tensor.view(-1, 2)).conj().imag, tensor.view(torch.uint8)[3:9])

    def empty(self, nbytes: int = 0) -> None:
        self.storage.resize_(nbytes)

    def fill(self, first: float = 0.0, num_elements: int = NUM_ELEMENTS) -> None:
        self.storage.resize_(4 * num_elements)
        torch.empty(0).set_(self.storage, 0, (NUM_ELEMENTS,)).copy_(torch.arange(float(NUM_ELEMENTS)) + first)


FILLED_BEFORE: dict[str, Callable[[Emptied], object]] = {
    "in backward": lambda emptied: None,
    "in backward, and a little before": lambda emptied: emptied.empty(64),
    "before backward": Emptied.fill,
    "before backward, with other bytes": lambda emptied: emptied.fill(3.0),
    "before backward, to another size": lambda emptied: emptied.fill(0.0, NUM_ELEMENTS + 1000),
}
WHEN = ("before the scope ends", "after it", "after others were spilled")


def gradient_of(store: TierStore | None, when: str, filled: str, *, has_views: bool, is_held: bool) -> torch.Tensor:
    weight, emptied = torch.full((NUM_ELEMENTS,), 0.5, requires_grad=True), Emptied(has_views=has_views)
    saved = emptied.saved
    fill = (lambda: None) if "before backward" in filled else emptied.fill
    with nullcontext() if store is None else tiered_offload(store, min_bytes=0):
        hidden = Refilled.apply(weight, fill, *saved)
        if when == WHEN[0]:
            emptied.empty()
        loss = (hidden * 1e-9).exp().sin().sum()
    if when == WHEN[1]:
        emptied.empty()
    if store is not None:
        store.flush()
    if when == WHEN[2]:
        emptied.empty()
    if not is_held:
        del saved, emptied.saved
    FILLED_BEFORE[filled](emptied)
    if store is not None:
        store.flush()
    loss.backward()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("filled", FILLED_BEFORE)
def test_storage_emptied_and_filled_again_same_bits(store: TierStore, filled: str) -> None:
    for when, has_views, is_held in product(WHEN, (False, True), (False, True)):
        case = {"has_views": has_views, "is_held": is_held}
        expected = gradient_of(None, when, filled, **case)
        assert torch.equal(gradient_of(store, when, filled, **case), expected), (when, case)
    assert store.stats().spilled_bytes > 0


def test_put_tensor_emptied_before_its_write_is_not_taken_for_stored(make_store: MakeStore) -> None:
    """It is small, so its write waits until somebody does. Its bytes are with whoever has moved them."""
    store = make_store(host_bytes=0)
    tensor = torch.arange(1000.0)
    handle = store.put(tensor)
    tensor.untyped_storage().resize_(0)
    store.flush()
    assert store.stats().disk_bytes == 0
    with pytest.raises(RuntimeError, match="storage of size 0"):
        store.get(handle)
    tensor.untyped_storage().resize_(4000)
    tensor.data.copy_(torch.arange(1000.0))
    assert torch.equal(store.get(handle), torch.arange(1000.0))
