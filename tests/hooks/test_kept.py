"""What somebody else holds stays where it is, and is counted by reason."""

import threading
import weakref

import pytest
import torch
from torch import nn

from tests.conftest import MakeStore
from tests.hooks.programs import (
    LARGE_SIDE,
    SIDE,
    Around,
    Settle,
    assert_same_bits,
    assert_same_gradients,
    bits,
    program_of,
    run_offloaded,
    run_plain,
    sine_chain,
)
from tests.inspect_store import inspect
from tests.waiting import until
from tierstore import TierStore, tiered_offload

NBYTES = SIDE * SIDE * 4


def test_parameters_and_their_views_kept(store: TierStore) -> None:
    """A linear layer saves a view of its weight, which is no `Parameter` itself."""
    layer = nn.Linear(SIDE, SIDE, bias=False)
    frozen = nn.Linear(SIDE, SIDE, bias=False).requires_grad_(False)
    batch = torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        loss = (frozen(layer(batch)) * layer.weight).sum()
    store.flush()
    stats = store.stats()
    assert stats.kept_bytes["parameter"] == 4 * NBYTES  # both weights as views, batch and layer.weight as leaves
    assert stats.packed_bytes == NBYTES  # what layer.weight was multiplied with
    loss.backward()


def test_buffers_and_input_batch_not_taken_and_counted_when_the_graph_ends(store: TierStore) -> None:
    norm = nn.BatchNorm1d(SIDE).eval()
    batch, weight = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        loss = norm(batch * weight).sum()
    store.flush()
    assert store.stats().spilled_bytes == NBYTES  # the product; not the batch, nor the two statistics
    assert store.stats().host_bytes == 0
    loss.backward()
    del loss
    assert store.stats().kept_bytes["alive elsewhere"] == NBYTES + 2 * SIDE * 4


def test_input_let_go_later_taken_by_flush(store: TierStore) -> None:
    weight, batch = torch.randn(SIDE, SIDE, requires_grad=True), torch.randn(SIDE, SIDE)
    expected = bits(batch)
    with tiered_offload(store, min_bytes=0):
        loss = (weight * batch).sum()
    store.flush()
    assert store.stats().disk_bytes == 0
    del batch
    store.flush()
    assert inspect(store).counters.spilled_bytes == NBYTES, "stats() would have it written too"
    loss.backward()
    assert bits(weight.grad) == expected


def _until_gone(reference: weakref.ref[torch.UntypedStorage], store: TierStore) -> None:
    """Nothing is asked of the store meanwhile: whoever asks has it look at everything again."""
    inspect(store).hurry()  # small records would wait for others
    until(lambda: reference() is None)


def test_input_let_go_later_taken_by_later_packs(store: TierStore) -> None:
    weight, batch = torch.randn(LARGE_SIDE, LARGE_SIDE, requires_grad=True), torch.randn(LARGE_SIDE, LARGE_SIDE)
    storage = weakref.ref(batch.untyped_storage())
    with tiered_offload(store, min_bytes=0):
        output = (weight * batch).exp()
        del batch
        total = output.sin().cos().sum()
        _until_gone(storage, store)
    total.backward()


def test_let_go_before_the_scope_ends_taken_then(store: TierStore) -> None:
    weight, batch = torch.randn(LARGE_SIDE, LARGE_SIDE, requires_grad=True), torch.randn(LARGE_SIDE, LARGE_SIDE)
    storage = weakref.ref(batch.untyped_storage())
    with tiered_offload(store, min_bytes=0):
        output = (weight * batch).exp()
        del batch
    _until_gone(storage, store)
    output.sum().backward()


def test_let_go_after_the_scope_taken_when_backward_begins(store: TierStore) -> None:
    weight, batch = torch.randn(SIDE, SIDE, requires_grad=True), torch.randn(SIDE, SIDE)
    storage = weakref.ref(batch.untyped_storage())
    with tiered_offload(store, min_bytes=0, prefetch="none"):
        output = (weight * batch).exp()
    del batch
    assert storage() is not None
    assert output.grad_fn._saved_result is not None  # type: ignore[union-attr]
    _until_gone(storage, store)
    output.sum().backward()


def test_select_decides_and_is_shown_only_what_could_be_stored(store: TierStore) -> None:
    shown: list[torch.dtype] = []

    def select(tensor: torch.Tensor) -> bool:
        shown.append(tensor.dtype)
        return tensor.dtype is torch.float64

    def program(around: Around, settle: Settle) -> list[torch.Tensor | None]:
        layer = nn.Linear(SIDE, SIDE)
        with around():
            hidden = layer(torch.randn(SIDE, SIDE))
            loss = hidden.exp().sum() + hidden.double().sin().sum()
        settle()
        loss.backward()
        return [layer.weight.grad, layer.bias.grad]

    assert_same_gradients(program, store, select=select)
    assert sorted(map(str, shown)) == ["torch.float32"] * 2 + ["torch.float64"]
    assert store.stats().kept_bytes["selected out"] == 2 * NBYTES
    assert store.stats().packed_bytes == 2 * NBYTES


def test_small_storages_kept_by_the_size_of_the_storage_not_of_the_view(store: TierStore) -> None:
    weight = torch.randn(SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=NBYTES):
        loss = (weight * torch.randn(SIDE, SIDE)[0]).sum()  # a row that pins its whole storage
        loss = loss + (torch.randn(1).expand(2 * SIDE, SIDE) * weight).sum()  # a large tensor that owns four bytes
    stats = store.stats()
    assert stats.packed_bytes == NBYTES
    assert stats.kept_bytes["small"] > 0
    loss.backward()


@pytest.mark.parametrize("min_bytes", [1, "1MiB"])
def test_parameters_count_as_such_however_small(store: TierStore, min_bytes: int | str) -> None:
    layer, frozen = nn.Linear(SIDE, SIDE), nn.Parameter(torch.randn(SIDE), requires_grad=False)
    with tiered_offload(store, min_bytes=min_bytes):
        loss = (layer.bias.sin() * frozen * layer.weight.t()).sum()
    kept_bytes = store.stats().kept_bytes
    assert kept_bytes["parameter"] == NBYTES + 2 * SIDE * 4
    assert kept_bytes["small"] == (0 if min_bytes == 1 else SIDE * 4)  # bias times frozen
    loss.backward()


def test_kept_result_of_the_node_that_saves_it_dies_with_the_graph(store: TierStore) -> None:
    with tiered_offload(store):
        output = torch.ones(SIDE, requires_grad=True).exp()
    storage = weakref.ref(output.untyped_storage())
    del output
    assert storage() is None


def test_kept_bytes_exact_whoever_keeps_and_reads_meanwhile(store: TierStore) -> None:
    num_saves, seen = 5000, [0]
    leaf = torch.ones(SIDE, requires_grad=True)

    def keep_many() -> None:
        with tiered_offload(store):
            for _ in range(num_saves):
                leaf.sin()

    threads = [threading.Thread(target=keep_many) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        seen.append(store.stats().kept_bytes["parameter"])
    assert seen == sorted(seen)
    assert store.stats().kept_bytes["parameter"] == 3 * num_saves * SIDE * 4


def test_scope_around_a_whole_training_does_not_pile_up_what_it_has_to_count(store: TierStore) -> None:
    leaf, residency = torch.ones(1, requires_grad=True), inspect(store).residency
    with tiered_offload(store):
        for _ in range(10_000):
            leaf.sin()
        assert residency.books.counters.kept_bytes["parameter"] >= 4 * 4096
    assert residency.books.counters.kept_bytes["parameter"] == 4 * 10_000


def _train_small(store: TierStore, num_tensors: int, **options: object) -> float:
    """How many of so many saved tensors of 512 KiB each in one graph stay for being small; gradients are checked.

    The first that is saved is the leaf, which stays anyway."""
    before = store.stats().kept_bytes["small"]
    program = program_of(lambda leaf: sine_chain(leaf, num_tensors + 1), [2**17])
    assert_same_bits(run_offloaded(program, store, **options), run_plain(program))
    return (store.stats().kept_bytes["small"] - before) / 2**19


def test_small_tensors_stay_only_as_long_as_they_are_few(make_store: MakeStore) -> None:
    """As many as take 32 MiB, or the host budget; `min_bytes` that was given holds however many there are."""
    store = make_store(host_bytes="4MiB")
    assert _train_small(store, 60, min_bytes=None) == 60
    assert _train_small(store, 200, min_bytes=None) == 64
    assert _train_small(store, 60, min_bytes=None) == 60, "each graph begins anew"
    assert _train_small(store, 200, min_bytes="1MiB") == 200
    assert _train_small(make_store(host_bytes="80MiB"), 200, min_bytes=None) == 160
