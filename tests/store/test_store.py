"""`TierStore` by hand: what is put comes back bit for bit, however and whenever it is asked for."""

import copy
import gc
import mmap
import pickle
import threading
import warnings
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
from tests.waiting import until, until_empty
from tierstore import ConfigError, Handle, ModifiedInPlaceError, StoreClosedError, TierStore
from tierstore.rules.state import State

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64,
    torch.int64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
]  # fmt: skip


def _numbered(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(size).numel(), dtype=dtype).reshape(size)


def _page_aligned() -> torch.Tensor:
    memory = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    return torch.frombuffer(memory, dtype=torch.uint8)


GEOMETRIES: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(70, 90),
    "one element": lambda: torch.randn(1),
    "no dimension": lambda: torch.tensor(2.5),
    "no element": lambda: torch.empty(0, 3),
    "no element of a storage that has some": lambda: torch.randn(5000)[:0],
    "no element of page-aligned memory": lambda: _page_aligned()[:0],
    "page-aligned": lambda: _page_aligned().random_(),
    "page-aligned, in the middle": lambda: _page_aligned().random_()[4096:8192],
    "transposed": lambda: torch.randn(70, 90).t(),
    "permuted": lambda: torch.randn(4, 5, 6, 7).permute(2, 0, 3, 1),
    "channels last": lambda: torch.randn(2, 3, 17, 19).contiguous(memory_format=torch.channels_last),
    "every third": lambda: torch.randn(9000)[1::3],
    "slice of a large storage": lambda: torch.randn(1 << 18)[100_001:100_077],
    "expanded": lambda: torch.randn(5, 1).expand(5, 4000),
    "expanded scalar": lambda: torch.tensor(7.0).expand(3, 3),
    "overlapping": lambda: torch.randn(4000).as_strided((50, 70), (3, 1), 11),
    "odd bytes": lambda: torch.arange(251, dtype=torch.uint8)[3:250],
    "storage that ends in half an element": lambda: torch.arange(4103, dtype=torch.uint8)[:4096].view(torch.float64),
    "another dtype's view": lambda: torch.randn(3000).view(torch.int16)[5:5001],
    "conjugate": lambda: torch.randn(800, dtype=torch.complex64).conj(),
    "conjugate, transposed": lambda: torch.randn(40, 30, dtype=torch.complex64).mH,
    "negative": lambda: torch.randn(800, dtype=torch.complex64).conj().imag,
    "negative and conjugate": lambda: torch._neg_view(torch.randn(800, dtype=torch.complex64).conj()),
    "real part": lambda: torch.randn(800, dtype=torch.complex128).real,
    "with gradient": lambda: torch.randn(3000, requires_grad=True),
    "output of an operation": lambda: torch.randn(3000, requires_grad=True).exp(),
    "parameter": lambda: torch.nn.Parameter(torch.randn(3000)),
    "of NumPy": lambda: torch.from_numpy(_numbered(3000).numpy().copy()),
    "in shared memory": lambda: torch.randn(3000).share_memory_(),
    "copy-on-write": lambda: torch.randn(3000)._lazy_clone(),
    "not a number": lambda: torch.full((3000,), float("nan")),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bytes, in order."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().flatten().view(torch.uint8)


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.is_conj(), tensor.is_neg()


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Same bytes, dtype and geometry."""
    assert _geometry(found) == _geometry(expected)
    assert torch.equal(bits(found), bits(expected))


@pytest.fixture(params=["0", "1MiB"], ids=["on disk", "in memory"])
def any_store(request: pytest.FixtureRequest, make_store: MakeStore) -> TierStore:
    return make_store(host_bytes=request.param)


def test_get_every_dtype_returns_the_same_bits(any_store: TierStore) -> None:
    stored: list[tuple[Handle, torch.Tensor]] = []
    for dtype in DTYPES:
        high = 2 if dtype is torch.bool else 256
        for num_elements in (1, 7, 5000):
            tensor = torch.randint(0, high, (num_elements * dtype.itemsize,), dtype=torch.uint8).view(dtype)
            stored.append((any_store.put(tensor), tensor.clone()))
            del tensor
    any_store.flush()
    for handle, expected in stored:
        assert_same(any_store.get(handle), expected)


@pytest.mark.parametrize("inline_bytes", [0, "64KiB", None], ids=["extents", "mixed", "LMDB"])
def test_get_every_geometry_returns_the_same_bits(make_store: MakeStore, inline_bytes: int | str | None) -> None:
    store = make_store(inline_bytes=inline_bytes)
    stored: dict[str, tuple[Handle, tuple[object, ...], torch.Tensor]] = {}
    for name, make in GEOMETRIES.items():
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


def test_get_made_under_inference_mode_returns_the_same_bits(any_store: TierStore) -> None:
    with torch.inference_mode():
        tensor = torch.randn(3000)
        expected = bits(tensor).clone()
    handle = any_store.put(tensor)
    any_store.flush()
    assert torch.equal(bits(any_store.get(handle)), expected)


def test_get_after_its_memory_was_needed_reads_again(make_store: MakeStore) -> None:
    store = make_store(staging_bytes="16KiB")
    handles = [store.put(_numbered(4096) + i) for i in range(5)]
    store.flush()
    for _ in range(3):
        for i, handle in enumerate(handles):
            assert_same(store.get(handle), _numbered(4096) + i)
    assert store.stats().restored_bytes == 15 * 16_384


def test_get_view_of_a_result_alone_keeps_its_memory(make_store: MakeStore) -> None:
    store = make_store(staging_bytes="64KiB")
    handle = store.put(_numbered(4096))
    store.flush()
    view = store.get(handle)[17:19]
    del handle
    for _ in range(10):
        other = store.put(torch.zeros(4096))
        store.flush()
        store.get(other)
    assert view.tolist() == [17.0, 18.0]
    assert store.stats().lent_bytes == 16_384
    del view
    assert store.stats().lent_bytes == 0


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


def test_get_of_many_handles_from_many_threads_returns_each_its_own(make_store: MakeStore) -> None:
    store = make_store(staging_bytes="32KiB")
    handles = [store.put(_numbered(2000) * (i + 1)) for i in range(24)]

    def get_all(first: int) -> None:
        for i in range(len(handles)):
            i = (i * 7 + first) % len(handles)
            assert_same(store.get(handles[i]), _numbered(2000) * (i + 1))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(get_all, range(6)))


def test_put_two_views_of_a_storage_gives_each_back(store: TierStore) -> None:
    whole = _numbered(64, 64)
    handles = [store.put(whole[:20]), store.put(whole.t()), store.put(whole[30:, 5:])]
    del whole
    store.flush()
    expected = _numbered(64, 64)
    for handle, view in zip(handles, (expected[:20], expected.t(), expected[30:, 5:]), strict=True):
        assert_same(store.get(handle), view)


def test_put_leaves_the_callers_tensor_usable(store: TierStore) -> None:
    tensor = _numbered(3000)
    address = tensor.data_ptr()
    handle = store.put(tensor)
    store.flush()
    assert tensor.data_ptr() == address
    assert_same(tensor, _numbered(3000))
    del handle
    store.stats()
    assert_same(tensor, _numbered(3000))


def test_put_of_what_the_caller_keeps_is_written_when_its_turn_comes(make_store: MakeStore) -> None:
    """By hand a tensor is stored whoever else holds it; what autograd saves is not."""
    kept = torch.randn(10_000)
    store = make_store(host_bytes=kept.nbytes)
    handle, other = store.put(kept), store.put(torch.randn(10_000))
    store.flush()
    assert store.stats().spilled_bytes == kept.nbytes
    assert (handle.record.state, other.record.state) == (State.DISK, State.HOST)
    assert torch.equal(store.get(handle), kept)


def test_put_lets_the_memory_go_once_written(store: TierStore) -> None:
    tensor = _numbered(3000)
    storage = weakref.ref(tensor.untyped_storage())
    handle = store.put(tensor)
    del tensor
    store.flush()
    assert storage() is None
    assert handle.record.state is State.DISK


def test_put_of_a_small_slice_writes_the_slice_alone(store: TierStore) -> None:
    handle = store.put(torch.randn(1 << 20)[5000:5100])
    store.flush()
    assert store.stats().spilled_bytes <= 100 * 4 + 2 * 64
    assert store.get(handle).shape == (100,)


def _wrapper_subclass() -> torch.Tensor:
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            raise NotImplementedError(func)

    return torch.Tensor._make_wrapper_subclass(Wrapper, (2000,), dtype=torch.float32)


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(2000)


def _quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but there
        return torch.quantize_per_tensor(torch.randn(2000), 0.1, 0, torch.quint8)


def _nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, but there
        return torch.nested.nested_tensor([torch.randn(3), torch.randn(2)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: [1.0],
        lambda: None,
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.empty(3000, device="meta"),
        lambda: torch.randn(8, 8).to_mkldnn(),
        _nested,
        _quantized,
        _fake,
        _wrapper_subclass,
    ],
    ids=["list", "None", "COO", "CSR", "meta", "MKL-DNN", "nested", "quantized", "fake", "wrapper"],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_put_of_what_cannot_be_stored_is_refused(make_store: MakeStore, make: Callable[[], torch.Tensor]) -> None:
    store = make_store(host_bytes="1MiB")
    thing = make()
    with pytest.raises(ConfigError) as caught:
        store.put(thing)
    assert caught.value.option == "tensor"
    assert store.stats().live_handles == 0
    handle = store.put(_numbered(3000))
    assert_same(store.get(handle), _numbered(3000))


def test_prefetch_has_the_bytes_read_before_they_are_asked_for(make_store: MakeStore) -> None:
    store = make_store(staging_bytes="1MiB")
    handles = [store.put(_numbered(4096) + i) for i in range(8)]
    store.flush()
    store.prefetch(handles)
    until(lambda: all(handle.record.state is State.CLEAN for handle in handles))
    for i, handle in enumerate(handles):
        assert_same(store.get(handle), _numbered(4096) + i)
    stats = store.stats()
    assert (stats.prefetch_hits, stats.prefetch_late, stats.prefetch_misses) == (8, 0, 0)


def test_prefetch_beyond_the_room_stays_within_it(make_store: MakeStore) -> None:
    store = make_store(staging_bytes="64KiB")
    handles = [store.put(_numbered(4096) + i) for i in range(16)]
    store.flush()
    store.prefetch(handles)
    assert store.stats().staging_used_bytes <= 65_536
    for i, handle in enumerate(handles):
        assert_same(store.get(handle), _numbered(4096) + i)


def test_prefetch_of_what_is_in_memory_does_nothing(make_store: MakeStore) -> None:
    store = make_store(host_bytes="1MiB")
    handle = store.put(_numbered(3000))
    store.prefetch([handle, handle])
    store.prefetch(iter([handle]))
    store.prefetch([])
    assert handle.record.state is State.HOST


# --- handles ------------------------------------------------------------------------------------------------------


def test_drop_and_put_at_the_same_pace_never_wake_the_garbage_collector(make_store: MakeStore) -> None:
    store = make_store(host_bytes="64MiB")
    handles = [store.put(_numbered(16)) for _ in range(1000)]
    gc.collect()
    before = gc.get_stats()
    for _ in range(10):
        for index in range(len(handles)):
            handles[index] = store.put(_numbered(16))
    assert [after["collections"] for after in gc.get_stats()] == [each["collections"] for each in before]


def test_drop_in_a_cycle_is_noticed_by_the_collector(store: TierStore) -> None:
    cycle: list[object] = [store.put(_numbered(3000))]
    cycle.append(cycle)
    store.flush()
    del cycle
    assert store.stats().live_handles == 1
    gc.collect()
    until_empty(store)


def test_handle_of_another_store_is_refused(make_store: MakeStore) -> None:
    ours, theirs = make_store(), make_store()
    handle = theirs.put(_numbered(3000))
    with pytest.raises(ConfigError, match="another store"):
        ours.get(handle)
    with pytest.raises(ConfigError, match="another store"):
        ours.prefetch([handle])
    assert_same(theirs.get(handle), _numbered(3000))


@pytest.mark.parametrize("thing", [None, 1, "handle", object()])
def test_get_of_no_handle_is_refused(store: TierStore, thing: Handle) -> None:
    with pytest.raises(ConfigError, match="put"):
        store.get(thing)
    with pytest.raises(ConfigError, match="put"):
        store.prefetch([thing])


@pytest.mark.parametrize("copier", [pickle.dumps, copy.copy, copy.deepcopy])
def test_handle_copied_or_pickled_is_refused(store: TierStore, copier: Callable[[Handle], object]) -> None:
    handle = store.put(_numbered(3000))
    with pytest.raises(TypeError, match="pickled"):
        copier(handle)
    assert_same(store.get(handle), _numbered(3000))


# --- changes in place ---------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("host_bytes", [0, "1MiB"], ids=["on disk", "in memory"])
def test_get_after_a_result_was_changed_raises(make_store: MakeStore, host_bytes: int | str) -> None:
    store = make_store(host_bytes=host_bytes)
    handle = store.put(_numbered(3000))
    store.flush()
    store.get(handle).mul_(2)
    with pytest.raises(ModifiedInPlaceError):
        store.get(handle)


def test_get_after_a_result_was_changed_and_forgotten_raises(make_store: MakeStore) -> None:
    store = make_store(staging_bytes=4096)
    handle = store.put(_numbered(1024))
    store.flush()
    store.get(handle)[0] = 5
    for _ in range(5):
        store.get(store.put(_numbered(1024)))
    with pytest.raises(ModifiedInPlaceError):
        store.get(handle)


def test_put_after_changes_keeps_its_own_version(store: TierStore) -> None:
    tensor = _numbered(3000)
    tensor.add_(1).sub_(1)
    handle = store.put(tensor)
    store.flush()
    assert_same(store.get(handle), _numbered(3000))


def test_get_refused_for_a_change_leaves_room_for_others(make_store: MakeStore) -> None:
    store = make_store(staging_bytes=4096)
    tensor = _numbered(1024)
    handle = store.put(tensor)
    store.flush()
    tensor.add_(1)
    with pytest.raises(ModifiedInPlaceError):
        store.get(handle)
    others = [store.put(_numbered(1024) + i) for i in range(3)]
    store.flush()
    for i, other in enumerate(others):
        assert_same(store.get(other), _numbered(1024) + i)


# --- the end ------------------------------------------------------------------------------------------------------


def test_close_twice_and_more_is_the_same_as_once(store: TierStore) -> None:
    store.put(_numbered(3000))
    store.close()
    store.close()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: store.close(), range(8)))


def test_close_then_use_raises(store: TierStore, store_directory: Path) -> None:
    handles = [store.put(_numbered(3000)) for _ in range(3)]
    store.close()
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


def test_close_by_context_manager_also_after_an_error(make_store: MakeStore) -> None:
    handle = None

    def fail() -> None:
        nonlocal handle
        with make_store() as store:
            handle = store.put(_numbered(3000))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(StoreClosedError):
        handle.owner.get(handle)


def test_close_from_a_finalizer_ends_the_store(store_directory: Path) -> None:
    closed = threading.Event()

    class Owner:
        def __init__(self) -> None:
            self.store = TierStore(store_directory, host_bytes=0, disk_bytes="1GiB", codec="none")
            self.handle = self.store.put(_numbered(3000))
            self.me = self

        def __del__(self) -> None:
            self.store.close()
            closed.set()

    before = set(threading.enumerate())
    Owner()
    gc.collect()
    assert closed.is_set()
    assert not _threads_of_stores() - before


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


def test_stores_on_one_directory_do_not_meet(make_store: MakeStore) -> None:
    stores = [make_store(), make_store(), make_store(host_bytes="20KiB")]
    handles = [[store.put(_numbered(3000) + 100 * i + j) for j in range(5)] for i, store in enumerate(stores)]
    for store in stores:
        store.flush()
    stores[0].close()
    for i in (1, 2):
        for j, handle in enumerate(handles[i]):
            assert_same(stores[i].get(handle), _numbered(3000) + 100 * i + j)
    with pytest.raises(StoreClosedError):
        stores[0].get(handles[0][0])


def test_stores_opened_and_closed_often_leave_nothing(make_store: MakeStore) -> None:
    before = set(threading.enumerate())
    for _ in range(10):
        with make_store() as store:
            store.put(_numbered(3000))
    assert set(threading.enumerate()) <= before


def _threads_of_stores() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("tierstore")}


def test_small_records_are_written_when_somebody_waits(make_store: MakeStore) -> None:
    """Else they stay in staging until there are many; a put without room, or a flush, waits for them."""
    store = make_store(host_bytes=0, staging_bytes=4096)
    handles = [store.put(torch.full((100,), float(number))) for number in range(50)]
    store.flush()
    assert store.stats().spilled_bytes == 50 * 400
    assert [float(store.get(handle)[0]) for handle in handles] == list(range(50))


def test_small_records_that_are_asked_for_soon_are_not_written(make_store: MakeStore) -> None:
    store = make_store(host_bytes=0)
    for _ in range(20):
        handles = [store.put(torch.full((8,), float(number))) for number in range(100)]
        assert [float(store.get(handle)[0]) for handle in handles] == list(range(100))
    assert store.stats().spilled_bytes == 0
