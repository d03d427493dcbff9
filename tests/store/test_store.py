"""`TierStore` by hand: what is put comes back bit for bit, however and whenever it is asked for."""

import copy
import gc
import mmap
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.conftest import MakeStore
from tests.inspect_store import inspect, inspect_engine
from tierstore import ConfigError, Handle, ModifiedInPlaceError, StoreClosedError, TierStore
from tierstore.ledger.state import State


def _numbered(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(size).numel(), dtype=dtype).reshape(size)


def _page_aligned() -> torch.Tensor:
    memory = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(3000)


MEMORIES: dict[str, Callable[[], torch.Tensor]] = {
    "no element": lambda: torch.empty(0, 3),
    "no element of a storage that has some": lambda: torch.randn(5000)[:0],
    "no element of page-aligned memory": lambda: _page_aligned()[:0],
    "page-aligned": lambda: _page_aligned().random_(),
    "page-aligned, in the middle": lambda: _page_aligned().random_()[4096:8192],
    "slice of a large storage": lambda: torch.randn(1 << 18)[100_001:100_077],
    "odd bytes": lambda: torch.arange(251, dtype=torch.uint8)[3:250],
    "storage that ends in half an element": lambda: torch.arange(4103, dtype=torch.uint8)[:4096].view(torch.float64),
    "conjugate, transposed": lambda: torch.randn(40, 30, dtype=torch.complex64).mH,
    "with gradient": lambda: torch.randn(3000, requires_grad=True),
    "output of an operation": lambda: torch.randn(3000, requires_grad=True).exp(),
    "in shared memory": lambda: torch.randn(3000).share_memory_(),
    "copy-on-write": lambda: torch.randn(3000)._lazy_clone(),
    "of inference mode": _inferred,
}
"""What else tensors may lie in; `tests/hooks/test_layouts.py` has every dtype and geometry."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bytes, in order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg()


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Same bytes, dtype and geometry."""
    assert _geometry(found) == _geometry(expected)
    assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("inline_bytes", [0, "64KiB", None], ids=["extents", "mixed", "LMDB"])
def test_get_from_any_memory_returns_the_same_bits(make_store: MakeStore, inline_bytes: int | str | None) -> None:
    store = make_store(inline_bytes=inline_bytes)
    stored: dict[str, tuple[Handle, tuple[object, ...], torch.Tensor]] = {}
    for name, make in MEMORIES.items():
        tensor = make()
        stored[name] = store.put(tensor), _geometry(tensor), bits(tensor).clone()
        del tensor
    store.flush()
    for name, (handle, geometry, content) in stored.items():
        assert handle.record.state is State.DISK or not content.numel(), name
        for _ in range(2):
            found = store.get(handle)
            assert _geometry(found) == geometry, name
            assert torch.equal(bits(found), content), name
            assert not found.requires_grad
            assert type(found) is torch.Tensor


def test_get_of_one_handle_from_many_threads_reads_once(store: TierStore) -> None:
    expected = _numbered(1 << 18)
    handle = store.put(expected.clone())
    store.flush()
    barrier = threading.Barrier(8)

    def get(_: int) -> torch.Tensor:
        barrier.wait(20)
        return store.get(handle)

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(get, range(8)))
    for result in results:
        assert_same(result, expected)
    assert len({result.data_ptr() for result in results}) == 1
    assert store.stats().restored_bytes == expected.nbytes


def test_put_of_what_the_caller_keeps_is_written_when_its_turn_comes(make_store: MakeStore) -> None:
    """By hand a tensor is stored whoever else holds it; what autograd saves is not."""
    kept = torch.randn(10_000)
    store = make_store(host_bytes=kept.nbytes)
    handle, other = store.put(kept), store.put(torch.randn(10_000))
    store.flush()
    assert store.stats().spilled_bytes == kept.nbytes
    assert (handle.record.state, other.record.state) == (State.DISK, State.HOST)
    assert torch.equal(store.get(handle), kept)


def _wrapper_subclass() -> torch.Tensor:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            raise NotImplementedError(func)

    return torch.Tensor._make_wrapper_subclass(Wrapper, (2000,), dtype=torch.float32)


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(2000)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [1.0],
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.empty(3000, device="meta"),
        lambda: torch.randn(8, 8).to_mkldnn(),
        _fake,
        _wrapper_subclass,
    ],
    ids=["list", "COO", "meta", "MKL-DNN", "fake", "wrapper"],
)
def test_put_of_what_cannot_be_stored_is_refused(make_store: MakeStore, make: Callable[[], torch.Tensor]) -> None:
    store = make_store(host_bytes="1MiB")
    thing = make()
    with pytest.raises(ConfigError) as caught:
        store.put(thing)
    assert caught.value.option == "tensor"
    assert store.stats().live_handles == 0
    handle = store.put(_numbered(3000))
    assert_same(store.get(handle), _numbered(3000))


def test_handle_of_another_store_or_none_is_refused(make_store: MakeStore) -> None:
    ours, theirs = make_store(), make_store()
    handle = theirs.put(_numbered(3000))
    for thing, words in ((handle, "another store"), (None, "put"), ("handle", "put"), (object(), "put")):
        with pytest.raises(ConfigError, match=words):
            ours.get(thing)
        with pytest.raises(ConfigError, match=words):
            ours.prefetch([thing])
    assert_same(theirs.get(handle), _numbered(3000))


@pytest.mark.parametrize("copier", [pickle.dumps, copy.copy, copy.deepcopy])
def test_handle_copied_or_pickled_is_refused(store: TierStore, copier: Callable[[Handle], object]) -> None:
    handle = store.put(_numbered(3000))
    with pytest.raises(TypeError, match="pickled"):
        copier(handle)
    assert_same(store.get(handle), _numbered(3000))


@pytest.mark.parametrize("host_bytes", [0, "1MiB"], ids=["on disk", "in memory"])
def test_get_after_the_tensor_was_changed_raises(make_store: MakeStore, host_bytes: int | str) -> None:
    store = make_store(host_bytes=host_bytes)
    tensor = _numbered(60, 50)
    handle = store.put(tensor)
    store.flush()
    tensor[3].add_(1)
    for _ in range(2):
        with pytest.raises(ModifiedInPlaceError) as caught:
            store.get(handle)
        assert (caught.value.saved_version, caught.value.current_version) == (0, 1)
        assert "float32" in caught.value.tensor
        assert "[60, 50]" in caught.value.tensor


def test_close_then_use_raises(store: TierStore, store_directory: Path) -> None:
    handles = [store.put(_numbered(3000)) for _ in range(3)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: store.close(), range(8)))  # more than once is the same as once
    for use in (
        partial(store.get, handles[0]),
        lambda: store.put(torch.ones(3)),
        lambda: store.put(torch.ones(0)),
        store.flush,
    ):
        with pytest.raises(StoreClosedError) as caught:
            use()
        assert caught.value.store == str(store_directory)
    store.prefetch(handles)  # a hint
    stats = store.stats()
    assert (stats.host_bytes, stats.staging_used_bytes, stats.disk_bytes, stats.lent_bytes) == (0, 0, 0, 0)
    del handles, use, caught
    assert store.stats().live_handles == 0


def test_get_after_a_result_was_changed_and_forgotten_raises(make_store: MakeStore) -> None:
    store = make_store(staging_bytes=4096)
    handle = store.put(_numbered(1024))
    store.flush()
    store.get(handle)[0] = 5
    for _ in range(5):
        store.get(store.put(_numbered(1024)))
    with pytest.raises(ModifiedInPlaceError):
        store.get(handle)


@pytest.mark.parametrize("host_bytes", [0, "64MiB"], ids=["on disk", "in memory"])
def test_close_frees_memory_of_handles_that_live_on(make_store: MakeStore, host_bytes: int | str) -> None:
    store = make_store(host_bytes=host_bytes)
    tensors = [_numbered(30_000) for _ in range(4)]
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    handles = [store.put(tensor) for tensor in tensors]
    del tensors
    store.close()
    assert [storage() for storage in storages] == [None] * 4
    del handles


@pytest.mark.parametrize("on_loop", [True, False], ids=["loop", "I/O"])
def test_close_on_a_thread_of_the_stores_own_waits_for_nothing(make_store: MakeStore, on_loop: bool) -> None:
    """Garbage may be collected there, and a finalizer close the store: it would wait for itself."""
    store = make_store(host_bytes=0)
    handle = store.put(torch.ones(1000))
    engine = inspect_engine(inspect(store).engine)
    closed: SimpleQueue[BaseException | None] = SimpleQueue()

    def close() -> None:
        try:
            store.close()
        except BaseException as error:  # noqa: BLE001 - looked at below
            closed.put(error)
        else:
            closed.put(None)

    job = close if on_loop else partial(engine.submit, close)
    engine.loop.call_soon_threadsafe(job)
    assert closed.get(timeout=20) is None
    store.close()
    assert not engine.thread.is_alive()
    with pytest.raises(StoreClosedError):
        store.get(handle)


@pytest.mark.parametrize("num_tensors", [0, 1, 30])
def test_store_unreferenced_without_close_ends_by_itself(store_directory: Path, num_tensors: int) -> None:
    before = set(threading.enumerate())
    store = TierStore(store_directory, host_bytes=0, disk_bytes="1GiB", codec="none")
    handles = [store.put(_numbered(30_000)) for _ in range(num_tensors)]
    if handles:
        store.get(handles[0])
    threads = _threads_of_stores() - before
    assert threads
    del store
    assert all(thread.is_alive() for thread in threads) or not handles, "handles keep their store open"
    del handles
    gc.collect()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def _threads_of_stores() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("tierstore")}


def test_small_records_are_written_when_somebody_waits(make_store: MakeStore) -> None:
    """Else they stay in staging until there are many; a put without room, or a flush, waits for them."""
    store = make_store(host_bytes=0, staging_bytes=4096)
    handles = [store.put(torch.full((100,), float(number))) for number in range(50)]
    store.flush()
    assert store.stats().spilled_bytes == 50 * 400
    assert [float(store.get(handle)[0]) for handle in handles] == list(range(50))
