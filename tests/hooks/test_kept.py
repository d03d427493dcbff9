"""What somebody else holds stays where it is, and is counted by reason."""

import weakref
from contextlib import nullcontext

import torch
from torch import nn

from tests.conftest import MakeStore
from tests.hooks.programs import SIDE, Around, Settle, assert_same_gradients, bits
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
    inspect(store).engine.hurry()  # small records would wait for others
    until(lambda: reference() is None)


def test_input_let_go_later_taken_by_later_packs(store: TierStore) -> None:
    weight, batch = torch.randn(SIDE, SIDE, requires_grad=True), torch.randn(SIDE, SIDE)
    storage = weakref.ref(batch.untyped_storage())
    with tiered_offload(store, min_bytes=0):
        output = (weight * batch).exp()
        del batch
        total = output.sin().cos().sum()
        _until_gone(storage, store)
    total.backward()


def test_let_go_before_the_scope_ends_taken_then(store: TierStore) -> None:
    weight, batch = torch.randn(SIDE, SIDE, requires_grad=True), torch.randn(SIDE, SIDE)
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


def test_held_again_through_the_graph_not_lost(store: TierStore) -> None:
    def program(around: Around, settle: Settle) -> list[torch.Tensor | None]:
        weight = torch.randn(SIDE, SIDE, requires_grad=True)
        with around():
            loss = (weight * torch.ones(SIDE, SIDE)).sum()
        taken = loss.grad_fn.next_functions[0][0]._saved_other  # type: ignore[union-attr]
        settle()
        result = taken.clone()
        del taken
        settle()
        loss.backward()
        return [weight.grad, result]

    assert_same_gradients(program, store)


def test_autocast_copies_of_weights_taken_after_it_ends(store: TierStore) -> None:
    layer = nn.Linear(SIDE, SIDE, bias=False)
    batch = torch.randn(SIDE, SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=0), torch.autocast("cpu", torch.bfloat16):
        loss = layer(batch).float().sum() + layer(batch * 2).float().sum()
        store.flush()
        assert store.stats().spilled_bytes <= NBYTES  # casts of the two batches are free already
    store.flush()
    assert store.stats().spilled_bytes == 3 * NBYTES // 2
    loss.backward()


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


def test_select_that_raises_error_comes_out_and_scope_ends(store: TierStore) -> None:
    def select(tensor: torch.Tensor) -> bool:
        raise ZeroDivisionError

    weight = torch.randn(SIDE, SIDE, requires_grad=True)
    try:
        with tiered_offload(store, min_bytes=0, select=select):
            (weight * 2).exp()
    except ZeroDivisionError:
        pass
    (weight * 2).exp().sum().backward()
    assert store.stats().packed_tensors == 0


def test_small_storages_kept_by_the_size_of_the_storage_not_of_the_view(store: TierStore) -> None:
    weight = torch.randn(SIDE, requires_grad=True)
    with tiered_offload(store, min_bytes=NBYTES):
        loss = (weight * torch.randn(SIDE, SIDE)[0]).sum()  # a row that pins its whole storage
        loss = loss + (torch.randn(1).expand(2 * SIDE, SIDE) * weight).sum()  # a large tensor that owns four bytes
    stats = store.stats()
    assert stats.packed_bytes == NBYTES
    assert stats.kept_bytes["small"] > 0
    with nullcontext():
        loss.backward()


def _train_small(store: TierStore, num_tensors: int, **options: object) -> int:
    """Bytes that stay for being small, of so many saved tensors of 512 KiB each in one graph; gradients are checked."""
    before = store.stats().kept_bytes["small"]
    leaf = torch.ones(2**17, requires_grad=True)
    with tiered_offload(store, **options):
        x = leaf
        for _ in range(num_tensors):
            x = x.sin()
    x.sum().backward()
    expected = torch.ones(2**17, requires_grad=True)
    y = expected
    for _ in range(num_tensors):
        y = y.sin()
    y.sum().backward()
    assert torch.equal(leaf.grad, expected.grad)
    return store.stats().kept_bytes["small"] - before


def test_small_tensors_stay_only_as_long_as_they_are_few(make_store: MakeStore) -> None:
    store = make_store(host_bytes="4MiB")
    assert _train_small(store, 60) == 60 * 2**19  # less than 32 MiB
    assert store.stats().spilled_bytes == 0
    assert _train_small(store, 200) == 64 * 2**19
    assert store.stats().spilled_bytes > 0
    assert _train_small(store, 60) == 60 * 2**19  # each graph begins anew


def test_small_tensors_may_take_as_much_as_the_host_budget(make_store: MakeStore) -> None:
    assert _train_small(make_store(host_bytes="80MiB"), 200) == 160 * 2**19


def test_min_bytes_that_was_given_holds_however_many_there_are(make_store: MakeStore) -> None:
    assert _train_small(make_store(host_bytes="4MiB"), 200, min_bytes="1MiB") == 200 * 2**19
