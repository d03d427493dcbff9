"""What is packed while there is room is only noted: as safe as a record, and one as soon as it matters."""

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import MakeStore
from tests.hooks.programs import SIDE, bits
from tests.inspect_store import inspect
from tierstore import ModifiedInPlaceError, StoreClosedError, TierStore, tiered_offload

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
    noted = inspect(roomy).noted
    assert len(noted) == 8
    loss.backward()
    assert all(tensor.handle is None for tensor in noted)
    assert bits(weight.grad) == bits(torch.full((3,), 6.0**4))
    stats = roomy.stats()
    assert (stats.packed_tensors, stats.packed_bytes) == (8, 8 * NBYTES)


@pytest.mark.usefixtures("no_gc")
def test_graph_dropped_nothing_is_held(roomy: TierStore) -> None:
    """A node that saves its own output would be a reference cycle if that were held."""
    weight = torch.ones(SIDE, SIDE, requires_grad=True)
    with tiered_offload(roomy, min_bytes=0):
        loss = (weight * 2).exp().sum()
    assert len(inspect(roomy).noted) == 1
    del loss
    assert inspect(roomy).noted == []


def test_figures_asked_for_everything_is_booked(roomy: TierStore) -> None:
    weight = torch.ones(3, requires_grad=True)
    with tiered_offload(roomy, min_bytes=NBYTES):
        loss = chain(4, weight)
    stats = roomy.stats()
    assert (stats.live_handles, stats.packed_tensors, stats.host_bytes) == (8, 8, 8 * NBYTES)
    assert inspect(roomy).noted == []
    del loss
    assert (roomy.stats().live_handles, roomy.stats().host_bytes) == (0, 0)


def test_room_runs_short_what_was_noted_first_leaves_first(make_store: MakeStore) -> None:
    store = make_store(host_bytes=6 * NBYTES)
    weight = torch.ones(3, requires_grad=True)
    with tiered_offload(store, min_bytes=NBYTES):
        loss = chain(3, weight)
        assert len(inspect(store).records) == 0
        loss = chain(1, loss)
        assert len(inspect(store).records) == 6
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
    assert len(inspect(store).records) == 0
    stats = store.stats()
    assert (stats.spilled_bytes, stats.packed_tensors) == (0, 60)


def test_graphs_that_came_and_went_in_one_scope_do_not_push_anything_out(make_store: MakeStore) -> None:
    store = make_store(host_bytes=6 * NBYTES)
    weight = torch.ones(3, requires_grad=True)
    with tiered_offload(store, min_bytes=NBYTES):
        for _ in range(10):
            chain(3, weight)
    store.flush()
    assert store.stats().spilled_bytes == 0


def test_log_of_graphs_that_are_gone_does_not_grow_without_end(roomy: TierStore) -> None:
    """One graph lives on and is never asked for anything; thousands of others come and go."""
    weight = torch.ones(3, requires_grad=True)
    with tiered_offload(roomy, min_bytes=NBYTES):
        living = chain(1, weight)
    longest = 0
    for _ in range(3000):
        with tiered_offload(roomy, min_bytes=NBYTES):
            chain(1, weight)
        longest = max([longest, *(len(noted.log.nodes) for noted in inspect(roomy).noted)])
    assert longest <= 2048
    assert inspect(roomy).noted_bytes <= 2048 * NBYTES
    living.backward()


def test_packed_after_backward_began_belongs_to_a_log_of_its_own(roomy: TierStore) -> None:
    """As reentrant checkpointing does: its own backward will ask for it, in an order of its own."""
    weight = torch.ones(3, requires_grad=True)
    with tiered_offload(roomy, min_bytes=NBYTES):
        first = chain(1, weight)
        first.backward(retain_graph=True)
        second = chain(1, weight)
    assert [len(log.nodes) for log in {noted.log for noted in inspect(roomy).noted}] == [2, 2]
    (first + second).backward()


@pytest.mark.parametrize(("options", "expected"), [({}, [4]), ({"prefetch": "none"}, [2, 2])])
def test_scopes_of_one_graph_share_a_log_if_their_options_are_the_same(
    roomy: TierStore, options: dict[str, Any], expected: list[int]
) -> None:
    weight = torch.ones(3, requires_grad=True)
    with tiered_offload(roomy, min_bytes=NBYTES):
        first = chain(1, weight)
    with tiered_offload(roomy, min_bytes=NBYTES, **options):
        second = chain(1, weight)
    assert [len(log.nodes) for log in {noted.log for noted in inspect(roomy).noted}] == expected
    (first + second).backward()


def test_views_of_one_tensor_counted_once_whether_booked_or_not(roomy: TierStore) -> None:
    weight = torch.randn(SIDE, 3 * SIDE, requires_grad=True)

    def step(ask: Callable[[], object]) -> None:
        with tiered_offload(roomy, min_bytes=0):
            query, key, value = (weight * 2).chunk(3, dim=1)
            loss = (query.sin() * key.cos() * value.exp()).sum()
        del query, key, value
        ask()
        loss.backward()

    counted = []
    for ask in (lambda: None, roomy.stats, lambda: None):
        before = roomy.stats()
        step(ask)
        after = roomy.stats()
        counted.append((after.packed_bytes - before.packed_bytes, after.deduplicated_bytes - before.deduplicated_bytes))
    assert counted[0] == counted[1] == counted[2]
    assert counted[0][1] >= 2 * NBYTES


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
    (first, *_rest) = inspect(roomy).noted
    assert first.alias is not None
    storage = weakref.ref(first.alias.untyped_storage())
    roomy.close()
    assert storage() is None
    with pytest.raises(StoreClosedError):
        loss.backward()


def test_pack_that_overtakes_close_backward_refused(make_store: MakeStore) -> None:
    """`select` closes the store: what is being packed then has not been noted yet."""
    store = make_store(host_bytes="64MiB")
    weight = torch.ones(3, requires_grad=True)

    def close(tensor: torch.Tensor) -> bool:
        store.close()
        return True

    with pytest.raises(StoreClosedError), tiered_offload(store, min_bytes=NBYTES, select=close):
        chain(1, weight)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_forked_child_cannot_use_what_it_inherited(roomy: TierStore) -> None:
    weight = torch.ones(3, requires_grad=True)
    with tiered_offload(roomy, min_bytes=NBYTES):
        loss = chain(2, weight)
    saved = inspect(roomy).noted[0]
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


class LetsNothingThrough(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} was seen by a mode that the tensors have nothing to do with")


def _inside_vmap(ask: Callable[[], object]) -> None:
    def row(x: torch.Tensor) -> torch.Tensor:
        ask()
        return x.sum()

    torch.vmap(row)(torch.ones(2, 3))


def _inside_grad(ask: Callable[[], object]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        ask()
        return x.sum()

    torch.func.grad(function)(torch.ones(3))


def _inside(mode: Callable[[], AbstractContextManager[object]]) -> Callable[[Callable[[], object]], None]:
    def run(ask: Callable[[], object]) -> None:
        with mode():
            ask()

    return run


@pytest.mark.parametrize(
    "inside",
    [_inside(FakeTensorMode), _inside(LetsNothingThrough), _inside(torch.inference_mode), _inside_vmap, _inside_grad],
    ids=["fake", "dispatch mode", "inference", "vmap", "grad"],
)
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
    """A thread that finds no room books what others noted, but not what their kernels may still write to."""
    store = make_store(host_bytes=0, staging_bytes="64MiB")
    weight = torch.ones(3, requires_grad=True)
    with tiered_offload(store, min_bytes=NBYTES):
        loss = chain(1, weight)

        def other() -> None:
            with tiered_offload(store, min_bytes=NBYTES):
                chain(1, torch.ones(3, requires_grad=True))
            store.flush()

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        mine = [noted for noted in inspect(store).noted if noted.handle is None]
        assert len(mine) == 2
    loss.backward()


def test_moved_before_it_is_booked_stays_where_it_is(make_store: MakeStore) -> None:
    """As where FSDP frees and refills a storage: what lies elsewhere than at packing is somebody else's to manage."""
    store = make_store(host_bytes=4 * NBYTES)
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        hidden = torch.randn(SIDE, SIDE)
        product = hidden * weight
        content, address = hidden.clone(), hidden.data_ptr()
        hidden.untyped_storage().resize_(2 * NBYTES)  # copies, and then frees what it copied from
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


def test_given_to_autograd_just_before_it_is_booked_stays_whole(make_store: MakeStore) -> None:
    """`unpack` takes the alias without a lock; what it returns counts as an owner of the storage."""
    store = make_store(host_bytes=3 * NBYTES)
    with tiered_offload(store, min_bytes=NBYTES):
        loss = chain(1, torch.ones(3, requires_grad=True))
    saved = inspect(store).noted[0]
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


def test_unpacked_while_another_thread_books_and_spills_same_bits(make_store: MakeStore) -> None:
    """Readers take the alias without a lock: it must stay whole for as long as they use it."""
    store = make_store(host_bytes=12 * NBYTES)
    failures: list[BaseException] = []
    stop = threading.Event()

    def press() -> None:
        weight = torch.ones(3, requires_grad=True)
        try:
            while not stop.is_set():
                with tiered_offload(store, min_bytes=NBYTES):
                    loss = chain(8, weight)
                store.flush()
                del loss
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        for _ in range(150):
            weight = torch.randn(SIDE, SIDE, requires_grad=True)
            with tiered_offload(store, min_bytes=NBYTES):
                loss = (weight * 2).exp().sin().exp().sum()
            loss.backward()
            found, weight.grad = weight.grad, None
            (weight * 2).exp().sin().exp().sum().backward()
            assert bits(found) == bits(weight.grad)
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert store.stats().spilled_bytes > 0


@pytest.mark.parametrize("num_entered", [1, 2])
def test_backward_begins_in_the_midst_of_another_threads_pack_same_bits(store: TierStore, num_entered: int) -> None:
    """One thread packs on, and waits for room, while another runs backward of what the first has packed before."""
    weight = torch.ones(3, requires_grad=True)
    with tiered_offload(store, min_bytes=NBYTES):
        loss = chain(4, weight)
        log = inspect(store).noted[0].log
    store.flush()
    for entered in (log.nodes, log.sizes)[:num_entered]:
        entered.append(NBYTES)
    loss.backward()
    assert bits(weight.grad) == bits(torch.full((3,), 6.0**4))
    assert store.stats().restored_bytes == 8 * NBYTES
