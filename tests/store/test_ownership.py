"""Whether bytes are solely owned: every way in which somebody else may hold them."""

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import MakeStore
from tierstore import Handle, TierStore
from tierstore.residency.handle import Record
from tierstore.residency.ownership import claims_of, is_sole_owner, unclaim
from tierstore.tensors.layout import is_foreign, layout_of


def _handle(store: TierStore, tensor: torch.Tensor) -> Handle:
    return store._core.residency.handles.new(store, tensor, layout_of(tensor))


def _saved_by_a_graph(tensor: torch.Tensor) -> object:
    leaf = torch.ones(1, requires_grad=True)
    return leaf * tensor


@pytest.mark.parametrize(("is_resizable", "is_foreign_memory"), [(True, False), (False, True)])
def test_cuda_calls_all_its_storages_shared_only_those_made_from_a_pointer_are_foreign(
    is_resizable: bool, is_foreign_memory: bool
) -> None:
    """As `UntypedStorage.is_shared` answers on a device; on a real one: tests/gpu/."""
    storage: Any = SimpleNamespace(
        device=torch.device("cuda", 0), is_shared=lambda: True, resizable=lambda: is_resizable
    )
    assert is_foreign(storage) == is_foreign_memory


HOLDERS: dict[str, Callable[[torch.Tensor], object]] = {
    "the tensor": lambda tensor: tensor,
    "a view": lambda tensor: tensor[3:5],
    "a view of another dtype": lambda tensor: tensor.view(torch.int32),
    "a detached alias": lambda tensor: tensor.detach(),
    "its data": lambda tensor: tensor.data,
    "a NumPy array": lambda tensor: tensor.numpy(),
    "a slice of a NumPy array": lambda tensor: tensor.numpy()[2:3],
    "a memoryview": lambda tensor: memoryview(tensor.numpy()),
    "a Parameter": torch.nn.Parameter,
    "a tensor pointed at it": lambda tensor: torch.empty(0).set_(tensor),
    "a DLPack capsule": torch.utils.dlpack.to_dlpack,
    "its storage": lambda tensor: tensor.untyped_storage(),
    "a graph": _saved_by_a_graph,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_held_by_somebody_else_until_that_lets_go(store: TierStore, holder: str) -> None:
    tensor = torch.randn(3000)
    handle = _handle(store, tensor)
    assert not is_sole_owner(handle.record)
    held = [HOLDERS[holder](tensor)]
    del tensor
    assert not is_sole_owner(handle.record)
    held.clear()
    gc.collect()
    assert is_sole_owner(handle.record)


def test_records_of_two_stores_do_not_count_as_others(make_store: MakeStore) -> None:
    ours, theirs = make_store(), make_store()
    tensor = torch.randn(3000)
    handles = [_handle(ours, tensor), _handle(theirs, tensor)]
    assert not is_sole_owner(handles[0].record)
    del tensor
    assert [is_sole_owner(handle.record) for handle in handles] == [True, True]


def test_dropped_handles_leave_no_owner_behind(store: TierStore) -> None:
    tensor = torch.randn(3000)
    kept = _handle(store, tensor)
    for _ in range(40):
        _handle(store, tensor)
    assert len(claims_of(tensor.untyped_storage())) <= 12
    del tensor
    assert is_sole_owner(kept.record)


@pytest.mark.parametrize("change", [lambda storage: storage.resize_(0), torch.UntypedStorage.share_memory_])
def test_resized_or_moved_storage_is_managed_elsewhere(
    store: TierStore, change: Callable[[torch.UntypedStorage], object]
) -> None:
    tensor = torch.randn(3000)
    handle = _handle(store, tensor)
    change(tensor.untyped_storage())
    del tensor
    assert not is_sole_owner(handle.record)


def test_released_or_unclaimed_record_owns_nothing(store: TierStore) -> None:
    handle = _handle(store, torch.randn(3000))
    record: Record = handle.record
    assert is_sole_owner(record)
    unclaim(record)
    assert not is_sole_owner(record)
    del handle
    assert not is_sole_owner(record)


def test_claims_of_a_new_storage_are_never_those_of_an_old_one(store: TierStore) -> None:
    for _ in range(50):  # the same address again and again
        tensor = torch.empty(3000)
        assert claims_of(tensor.untyped_storage()) == []
        handle = _handle(store, tensor)
        gc.collect()  # claims survive the Python object of the storage
        assert [ref() for ref in claims_of(tensor.untyped_storage())] == [handle.record]
        del tensor, handle
