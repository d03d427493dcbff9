"""What is packed while there is room is only tracked: as safe as a record, and one as soon as it matters."""

import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.conftest import MakeStore
from tests.hooks.programs import IN_MODES, SIDE, DispatchMode, bits, in_threads
from tests.inspect_store import inspect
from tierstore import ModifiedInPlaceError, StoreClosedError, TierStore, tiered_offload
from tierstore.hooks import living

NBYTES = SIDE * SIDE * 4


class SaveTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.full((SIDE, SIDE), 2.0), torch.full((SIDE, SIDE), 3.0))
        return x * 6

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        two, three = ctx.saved_tensors
        return gradient * two[0, 0] * three[0, 0]


def chain(length: int, x: torch.Tensor) -> torch.Tensor:
    for _ in range(length):
        x = SaveTwo.apply(x)
    return x.sum()


@pytest.fixture
def roomy(make_store: MakeStore) -> TierStore:
    return make_store(host_bytes="64MiB")


def test_while_there_is_room_no_record_is_made(roomy: TierStore) -> None:
    weight = torch.ones(3, requires_grad=True)
    with tiered_offload(roomy, min_bytes=NBYTES):
        loss = chain(4, weight)
    tracked = inspect(roomy).tracked
    assert len(tracked) == 8
    loss.backward()
    assert all(tensor.handle is None for tensor in tracked)
    assert bits(weight.grad) == bits(torch.full((3,), 6.0**4))
    del tracked
    with tiered_offload(roomy, min_bytes=NBYTES):
        loss = chain(4, weight)
    stats = roomy.stats()
    assert (stats.packed_tensors, stats.packed_bytes) == (16, 16 * NBYTES)
    assert (stats.live_handles, stats.host_bytes) == (8, 8 * NBYTES), "exact figures have all registered"
    assert inspect(roomy).tracked == []
    del loss
    assert (roomy.stats().live_handles, roomy.stats().host_bytes) == (0, 0)


@pytest.mark.usefixtures("no_gc")
def test_graph_dropped_nothing_is_held(roomy: TierStore) -> None:
    """A node that saves its own output would be a reference cycle if that were held."""
    weight = torch.ones(SIDE, SIDE, requires_grad=True)
    with tiered_offload(roomy, min_bytes=0):
        loss = (weight * 2).exp().sum()
    assert len(inspect(roomy).tracked) == 1
    del loss
    assert inspect(roomy).tracked == []


def test_room_runs_short_what_was_tracked_first_leaves_first(make_store: MakeStore) -> None:
    store = make_store(host_bytes=6 * NBYTES)
    weight = torch.ones(3, requires_grad=True)
    with tiered_offload(store, min_bytes=NBYTES):
        loss = chain(3, weight)
        assert len(inspect(store).records) == 0
        loss = chain(1, loss)
        assert [record.key for record in inspect(store).records] == [1, 2, 3, 4, 5, 6, 8], "one is tracked until then"
    store.flush()
    assert store.stats().spilled_bytes == 2 * NBYTES
    loss.backward()
    assert store.stats().restored_bytes == 2 * NBYTES
    assert weight.grad is not None


def test_graphs_that_came_and_went_are_not_counted(make_store: MakeStore) -> None:
    store = make_store(host_bytes=6 * NBYTES)
    weight = torch.ones(3, requires_grad=True)
    for _ in range(10):
        with tiered_offload(store, min_bytes=NBYTES):
            chain(3, weight).backward()
    with tiered_offload(store, min_bytes=NBYTES):
        for _ in range(10):
            chain(3, weight)
    assert len(inspect(store).records) == 0
    store.flush()
    stats = store.stats()
    assert (stats.spilled_bytes, stats.packed_tensors) == (0, 120)


def test_log_of_graphs_that_are_gone_does_not_grow_without_end(roomy: TierStore) -> None:
    """One graph lives on and is never asked for anything; thousands of others come and go."""
    weight = torch.ones(3, requires_grad=True)
    with tiered_offload(roomy, min_bytes=NBYTES):
        one = chain(1, weight)
    longest = 0
    for _ in range(3000):
        with tiered_offload(roomy, min_bytes=NBYTES):
            chain(1, weight)
        longest = max([longest, *(tracked.log.num_packs for tracked in inspect(roomy).tracked)])
    assert longest <= 2048
    assert inspect(roomy).tracked_bytes <= 2048 * NBYTES
    assert len(living._living) < 2048
    one.backward()


def test_packed_after_backward_began_belongs_to_a_log_of_its_own(roomy: TierStore) -> None:
    """As reentrant checkpointing does: its own backward will ask for it, in an order of its own."""
    weight = torch.ones(3, requires_grad=True)
    with tiered_offload(roomy, min_bytes=NBYTES):
        first = chain(1, weight)
        first.backward(retain_graph=True)
        second = chain(1, weight)
    assert [log.num_packs for log in {tracked.log for tracked in inspect(roomy).tracked}] == [2, 2]
    (first + second).backward()


def test_changed_in_place_refused_as_by_torch(roomy: TierStore) -> None:
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(roomy, min_bytes=0):
        hidden = (weight * 2).exp()
        loss = hidden.sum()
        hidden.add_(1)
        del hidden
    assert len(inspect(roomy).records) == 0
    with pytest.raises(ModifiedInPlaceError, match=r"is at version 1; expected version 0"):
        loss.backward()


def test_store_closed_bytes_freed_and_backward_refused(roomy: TierStore) -> None:
    weight = torch.ones(3, requires_grad=True)
    with tiered_offload(roomy, min_bytes=NBYTES):
        loss = chain(4, weight)
    (first, *_rest) = inspect(roomy).tracked
    assert first.alias is not None
    storage = weakref.ref(first.alias.untyped_storage())
    roomy.close()
    assert storage() is None
    with pytest.raises(StoreClosedError):
        loss.backward()


def test_forked_child_cannot_use_what_it_inherited(roomy: TierStore) -> None:
    weight = torch.ones(3, requires_grad=True)
    with tiered_offload(roomy, min_bytes=NBYTES):
        loss = chain(2, weight)
    saved = inspect(roomy).tracked[0]
    child = os.fork()
    if child == 0:
        try:
            saved.unpack()  # type: ignore[attr-defined]
        except StoreClosedError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    del saved
    loss.backward()


def _seen_by_nobody(ask: Callable[[], object]) -> None:
    with DispatchMode(lambda function: pytest.fail(f"a mode saw {function}, which has nothing to do with its tensors")):
        ask()


@pytest.mark.parametrize("inside", [_seen_by_nobody, *IN_MODES.values()], ids=["dispatch mode", *IN_MODES])
def test_figures_asked_for_inside_a_mode_same_bits_from_disk(
    make_store: MakeStore, inside: Callable[[Callable[[], object]], None]
) -> None:
    store = make_store(host_bytes=8 * NBYTES)
    weight = torch.ones(3, requires_grad=True)
    with tiered_offload(store, min_bytes=NBYTES):
        loss = chain(3, weight)
    inside(store.stats)
    assert len(inspect(store).records) == 6
    with tiered_offload(store, min_bytes=NBYTES):
        more = chain(4, weight)
    store.flush()
    assert store.stats().spilled_bytes == 6 * NBYTES
    loss.backward()
    more.backward()
    assert weight.grad is not None
    assert bits(weight.grad) == bits(torch.full((3,), 6.0**3 + 6.0**4))


def test_newest_node_of_another_thread_is_not_read(make_store: MakeStore) -> None:
    """A thread that finds no room registers what others tracked, but not what their kernels may still write to."""
    store = make_store(host_bytes=0, staging_bytes="64MiB")
    weight = torch.ones(3, requires_grad=True)
    with tiered_offload(store, min_bytes=NBYTES):
        loss = chain(1, weight)

        def other() -> None:
            with tiered_offload(store, min_bytes=NBYTES):
                chain(1, torch.ones(3, requires_grad=True))
            store.flush()

        in_threads(other)
        mine = [tracked for tracked in inspect(store).tracked if tracked.handle is None]
        assert len(mine) == 2
    loss.backward()


@pytest.mark.parametrize(
    "move", [lambda storage: storage.resize_(2 * NBYTES), torch.UntypedStorage.share_memory_], ids=["resized", "shared"]
)
def test_moved_before_it_is_registered_stays_where_it_is(
    make_store: MakeStore, move: Callable[[torch.UntypedStorage], object]
) -> None:
    """As where FSDP frees and refills a storage: what lies elsewhere than at packing is somebody else's to manage."""
    store = make_store(host_bytes=4 * NBYTES)
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        hidden = torch.randn(SIDE, SIDE)
        product = hidden * weight
        content, address = hidden.clone(), hidden.data_ptr()
        move(hidden.untyped_storage())  # copies, and then frees what it copied from
        assert hidden.data_ptr() != address
        del hidden
    assert len(inspect(store).records) == 0
    with tiered_offload(store, min_bytes=NBYTES):
        more = chain(3, torch.ones(3, requires_grad=True))
    store.flush()
    assert store.stats().spilled_bytes == 2 * NBYTES
    product.sum().backward()
    more.backward()
    assert bits(weight.grad) == bits(content)


def test_given_to_autograd_just_before_it_is_registered_stays_whole(make_store: MakeStore) -> None:
    """`unpack` takes the alias without a lock; what it returns counts as an owner of the storage."""
    store = make_store(host_bytes=3 * NBYTES)
    with tiered_offload(store, min_bytes=NBYTES):
        loss = chain(1, torch.ones(3, requires_grad=True))
    saved = inspect(store).tracked[0]
    given = saved.unpack()  # type: ignore[attr-defined]
    with tiered_offload(store, min_bytes=NBYTES):
        more = chain(2, torch.ones(3, requires_grad=True))
    store.flush()
    assert bits(given) == bits(torch.full((SIDE, SIDE), 2.0))
    spilled_bytes = store.stats().spilled_bytes
    del given
    store.flush()
    assert store.stats().spilled_bytes == spilled_bytes + NBYTES
    (loss + more).backward()
