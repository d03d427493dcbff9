"""Training on a real accelerator: the models of the CPU suite, bit for bit. PyTorch's operators: test_operators.py."""

import pytest
import torch

from tests.conftest import MakeStore
from tests.gpu.device import NEEDS_DEVICE, repeatable
from tests.hooks.programs import MODELS, Bits, Program, assert_same_bits, run_offloaded, run_plain, training
from tests.inspect_store import inspect
from tierstore import ModifiedInPlaceError, tiered_offload

pytestmark = NEEDS_DEVICE


def _plain(program: Program) -> list[Bits]:
    """What it computes on the device; skips where PyTorch itself does not repeat that."""
    expected = run_plain(program)
    if run_plain(program) != expected:
        pytest.skip("plain PyTorch differs between two runs on this device")
    return expected


@pytest.mark.parametrize("host_bytes", [0, "1MiB", "1GiB"])
@pytest.mark.parametrize("device_bytes", [0, "256KiB", "1GiB", "auto"])
@pytest.mark.parametrize("model", MODELS)
def test_models_any_budget_same_bits(
    make_store: MakeStore, model: str, host_bytes: int | str, device_bytes: int | str
) -> None:
    store = make_store(host_bytes=host_bytes)
    with torch.device("cuda"), repeatable():
        program = training(model)
        expected = _plain(program)
        for _ in range(2):  # the order of backward is found, then followed
            assert_same_bits(run_offloaded(program, store, device_bytes=device_bytes), expected)
    torch.cuda.synchronize()
    inspect(store).slab.wait_until_pinned()
    stats = store.stats()
    assert stats.host_memory == "pinned"
    if device_bytes in (0, "1GiB"):  # of the others some models need less
        assert (stats.offloaded_bytes > 0) == (device_bytes == 0)
    assert (stats.live_handles, stats.device_bytes, stats.host_bytes, stats.disk_bytes) == (0, 0, 0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_same_bits(make_store: MakeStore, dtype: torch.dtype) -> None:
    def program(around, settle):  # type: ignore[no-untyped-def]
        with torch.autocast("cuda", dtype):
            return training("transformer")(around, settle)

    store = make_store(host_bytes="1GiB")
    with torch.device("cuda"), repeatable():
        assert_same_bits(run_offloaded(program, store), _plain(program))
    assert store.stats().offloaded_bytes > 0


def test_part_of_a_storage_at_an_odd_address_comes_back_at_it_modulo_512(make_store: MakeStore) -> None:
    store = make_store()
    whole = torch.randn(100_000, device="cuda")
    part = whole[12_345:]
    handle, address = store.put(part), part.data_ptr()
    expected = part.clone()
    del whole, part
    store.flush()
    got = store.get(handle)
    assert torch.equal(got, expected)
    assert got.data_ptr() % 512 == address % 512


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_saved_tensor_changed_in_place_raises(make_store: MakeStore, is_offloaded: bool) -> None:
    store = make_store(host_bytes="1GiB")
    weight = torch.ones(2**20, device="cuda", requires_grad=True)
    with tiered_offload(store, device_bytes=0 if is_offloaded else "1GiB"):
        hidden = weight * 2
        loss = (hidden * hidden).sum()
    hidden.add_(1)
    with pytest.raises(ModifiedInPlaceError):
        loss.backward()
