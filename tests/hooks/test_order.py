"""What is fetched ahead, in which order, and what may not be read too early."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - the name that everybody uses

from tests.conftest import MakeStore
from tests.hooks.programs import SIDE, Mlp, assert_same_gradients, program_of
from tests.inspect_store import inspect
from tierstore import StoreStats, TierStore, offload_module, tiered_offload
from tierstore.ledger.state import State
from tierstore.testing import SimulatedCopies


@pytest.mark.parametrize("host_bytes", [0, 1, "1GiB"])
def test_noise_filled_after_it_is_saved_same_bits(make_store: MakeStore, host_bytes: object) -> None:
    """`rrelu` saves the tensor for its noise, then fills it."""

    def loss(weight: torch.Tensor) -> torch.Tensor:
        hidden = weight * 1
        for _ in range(4):
            hidden = F.rrelu(hidden, training=True)
        return hidden.sum()

    assert_same_gradients(program_of(loss, (256, 256)), make_store(host_bytes=host_bytes))


class Moving(NamedTuple):
    """A store, and how many bytes have left the place where autograd left them."""

    store: TierStore
    num_bytes: Callable[[], int]


@pytest.fixture(params=["in host memory", "on an accelerator, with others", "on an accelerator, alone"])
def moving(make_store: MakeStore, request: pytest.FixtureRequest) -> Iterator[Moving]:
    if request.param == "in host memory":
        store = make_store(host_bytes=0)
        yield Moving(store, lambda: store.stats().spilled_bytes)
    else:
        with SimulatedCopies() as copies:
            staging_bytes = "16KiB" if request.param.endswith("alone") else "64KiB"  # one matrix, or a batch of some
            store = make_store(host_bytes="1GiB", staging_bytes=staging_bytes, copies=copies)
            yield Moving(store, lambda: store.stats().offloaded_bytes)


def test_what_the_newest_node_saved_is_not_read_before_another_saves(moving: Moving) -> None:
    """Its kernel may not have run: not even `flush` may look at the bytes, though nobody else holds them."""
    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(moving.store, min_bytes=0):
        total = (weight * 1).sin().sum()
        moving.store.flush()
        assert moving.num_bytes() == 0
        total = total.exp()
        moving.store.flush()
        assert moving.num_bytes() == SIDE * SIDE * 4
    total.backward()
    assert weight.grad is not None


def test_what_the_newest_node_saved_is_not_read_when_it_saves_more(moving: Moving) -> None:
    """A pack by the same node tells nothing: only the next node's says that the kernel has run."""

    class SavesTwo(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(weight.detach() * 2, weight.detach() * 3)
            return weight.sum()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            double, triple = ctx.saved_tensors
            return gradient * (double + triple)

    weight = torch.ones(SIDE, SIDE, requires_grad=True)
    with tiered_offload(moving.store, min_bytes=0):
        total = SavesTwo.apply(weight)
        moving.store.flush()
        assert moving.num_bytes() == 0
        total = total * total
        moving.store.flush()
        assert moving.num_bytes() == 2 * SIDE * SIDE * 4
    total.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full_like(weight, 2 * 5 * SIDE * SIDE))


@pytest.mark.parametrize("prefetch", ["learned", "reverse", "none"])
def test_chain_prefetched_few_misses(make_store: MakeStore, prefetch: str) -> None:
    store = make_store(staging_bytes="3MiB")  # a group takes in no matrix: they are asked for one by one
    weights, batch = [torch.randn(256, 256, requires_grad=True) for _ in range(6)], torch.randn(256, 256)
    for _ in range(4):
        with tiered_offload(store, min_bytes=0, prefetch=prefetch):
            hidden = batch
            for weight in weights:
                hidden = (hidden @ weight).tanh()
            loss = hidden.sum()
        del hidden
        store.flush()
        loss.backward()
    stats = store.stats()
    ahead = stats.prefetch_hits + stats.prefetch_late
    if prefetch == "none":
        assert (ahead, stats.prefetch_misses) == (0, 24)
    else:
        assert ahead >= 12
        assert stats.prefetch_misses <= 8  # the first of each backward, and what it brings along


def test_odd_order_learned_from_the_first_step(make_store: MakeStore) -> None:
    """Roots of one graph used first to last: the reverse guess is wrong each time, what was learned is right."""

    def misses(prefetch: str) -> list[int]:
        store = make_store(staging_bytes="600KiB")
        weights = [torch.randn(256, 256, requires_grad=True) for _ in range(6)]
        counts = []
        for _ in range(4):
            with tiered_offload(store, min_bytes=0, prefetch=prefetch):
                losses = [(weight * 2).exp().sum() for weight in weights]
            store.flush()
            before = store.stats().prefetch_misses
            for loss in losses:
                loss.backward()
            counts.append(store.stats().prefetch_misses - before)
            del losses, loss
        return counts

    learned, reverse = misses("learned"), misses("reverse")
    assert sum(learned[1:]) < sum(reverse[1:])
    assert max(learned[1:]) <= 2


def test_blocks_with_a_scope_each_prefetched_from_one_to_the_next(store: TierStore) -> None:
    """They are one graph: only the first request of its backward finds nothing on the way."""
    blocks = [offload_module(Mlp(), store=store, min_bytes=1) for _ in range(4)]
    for _ in range(3):
        batch = torch.randn(SIDE, SIDE)
        for block in blocks:
            batch = block(batch) * batch
        store.flush()
        before = store.stats().prefetch_misses
        batch.sum().backward()
        assert store.stats().prefetch_misses - before == 1


@pytest.mark.parametrize("prefetch", ["learned", "reverse"])
def test_retained_graph_prefetched_each_time(make_store: MakeStore, prefetch: str) -> None:
    """There is room for a third of it, so each backward has to read it all again."""
    store = make_store(staging_bytes="1MiB")
    weights = [torch.randn(256, 256, requires_grad=True) for _ in range(12)]
    with tiered_offload(store, min_bytes=0, prefetch=prefetch):
        hidden = torch.randn(256, 256)
        for weight in weights:
            hidden = (hidden * weight).tanh()
        loss = hidden.sum()
    del hidden
    store.flush()
    for _ in range(3):
        before = store.stats()
        loss.backward(retain_graph=True)
        asked, misses = _requests(before, store.stats())
        assert asked >= 12
        assert misses <= 1


def _chain(num_layers: int, side: int = 256) -> Callable[[int], torch.Tensor]:
    """Makes a loss of the first so many layers; each saves one matrix of `side`² floats that nobody else keeps."""
    weights = [torch.randn(side, side, requires_grad=True) for _ in range(num_layers)]
    batch = torch.randn(side, side)

    def loss_of(num: int) -> torch.Tensor:
        hidden = batch
        for weight in weights[:num]:
            hidden = (hidden * weight).tanh()
        return hidden.sum()

    return loss_of


MATRIX_BYTES = 256 * 256 * 4


def _spilled(store: TierStore, before: StoreStats) -> int:
    store.flush()
    return store.stats().spilled_bytes - before.spilled_bytes


def _spilled_in_step(store: TierStore, first: Callable[[], Any], then: Callable[[], Any]) -> tuple[int, int]:
    """Bytes written in a forward of two parts: after the first, and in all."""
    before = store.stats()
    with tiered_offload(store, min_bytes=0):
        loss = first()
        early = _spilled(store, before)
        loss = loss + then()
    spilled = _spilled(store, before)
    loss.backward()
    return early, spilled


def test_known_graph_what_has_to_go_goes_while_there_is_room_and_no_more_than_that(make_store: MakeStore) -> None:
    loss_of = _chain(10)
    store = make_store(host_bytes=4 * MATRIX_BYTES, staging_bytes=MATRIX_BYTES)
    first, *later = [_spilled_in_step(store, lambda: loss_of(3), lambda: loss_of(7)) for _ in range(3)]
    assert first == (0, 6 * MATRIX_BYTES), "with room for four, the first three stay until there is no room"
    assert later == [(2 * MATRIX_BYTES, 6 * MATRIX_BYTES)] * 2, "the newest one may not be read yet"
    store = make_store(host_bytes=4 * MATRIX_BYTES, staging_bytes=2 * MATRIX_BYTES)
    _, *later = [_spilled_in_step(store, lambda: loss_of(7), lambda: loss_of(3)) for _ in range(3)]
    assert later == [(4 * MATRIX_BYTES, 6 * MATRIX_BYTES)] * 2, "two are needed soon after backward begins"


def test_known_graph_goes_on_otherwise_nothing_more_goes_early(make_store: MakeStore) -> None:
    store = make_store(host_bytes=4 * MATRIX_BYTES, staging_bytes=MATRIX_BYTES)
    loss_of, other_loss_of = _chain(10), _chain(4, 128)
    ways = [lambda: loss_of(8), lambda: loss_of(8), lambda: other_loss_of(2), lambda: loss_of(8)]
    spilled = [_spilled_in_step(store, lambda: loss_of(2), then) for then in ways]
    assert spilled[1] == (MATRIX_BYTES, 6 * MATRIX_BYTES)
    assert spilled[2] == (MATRIX_BYTES, 2 * MATRIX_BYTES), "what both begin with had gone before they parted"
    assert spilled[3] == (0, 6 * MATRIX_BYTES), "it may be the smaller one again, all of which may stay"


def test_known_graph_that_begins_with_restored_bytes_is_known_from_there_on(make_store: MakeStore) -> None:
    """The one before goes when the store was asked for those bytes, and is asked for nothing else before a pack."""
    store = make_store(host_bytes=4 * MATRIX_BYTES, staging_bytes=MATRIX_BYTES)
    weights = [torch.randn(256, 256, requires_grad=True) for _ in range(10)]
    batch, *others = [store.put(torch.randn(256, 256)) for _ in range(5)]
    store.flush()
    del others
    loss: torch.Tensor | None = None
    is_known = []
    for _ in range(3):
        hidden = store.get(batch)
        del loss
        with tiered_offload(store, min_bytes=0):
            loss = (hidden * weights[0]).tanh()
            (log,) = (reference() for reference in store._core.of_thread.logs.values())
            is_known.append(log.plan is not None)
            for weight in weights[1:]:
                loss = (loss * weight).tanh()
            loss = loss.sum()
        loss.backward(retain_graph=True)
        del log
    assert is_known == [False, True, True]


def test_graphs_by_turns_each_keep_their_order(make_store: MakeStore) -> None:
    """One that backward goes through from its first root to its last, and one in between that it does not."""
    store = make_store(staging_bytes="600KiB")
    weights = [torch.randn(256, 256, requires_grad=True) for _ in range(6)]
    counts = []
    for step in range(8):
        with tiered_offload(store, min_bytes=0):
            losses = [(weight * 2).exp().sum() for weight in weights[: 6 - step % 2]]
        store.flush()
        before = store.stats()
        for loss in losses if step % 2 else reversed(losses):
            loss.backward()
        counts.append(_requests(before, store.stats())[1])
        del losses, loss
    assert max(counts[2:]) <= 1


def test_order_of_backward_decides_what_stays(make_store: MakeStore) -> None:
    """The first root is used first: from the second step on its matrix stays, though it was saved first."""
    store = make_store(host_bytes=2 * MATRIX_BYTES)
    weights = [torch.randn(256, 256, requires_grad=True) for _ in range(6)]
    first_in_memory = []
    for _ in range(3):
        with tiered_offload(store, min_bytes=0):
            losses = [(weight * 2).exp().sum() for weight in weights]
        store.flush()
        states = [record.state for record in inspect(store).records]
        first_in_memory.append(states.index(State.HOST))
        for loss in losses:
            loss.backward()
        del losses, loss
    assert first_in_memory == [4, 0, 0]


def _requests(before: StoreStats, after: StoreStats) -> tuple[int, int]:
    """How often something was asked for that was on disk when backward began, and how often it still was."""
    hits, late, misses = (
        getattr(after, name) - getattr(before, name) for name in ("prefetch_hits", "prefetch_late", "prefetch_misses")
    )
    return hits + late + misses, misses
