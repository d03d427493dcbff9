"""What the system refuses to a process: threads, descriptors, memory, stack. The limits are real, and this one's."""

import ctypes
import gc
import itertools
import json
import mmap
import os
import resource
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.daemon.clients import sessions_of
from tests.daemon.conftest import DaemonProcess
from tests.descriptors import descriptors_of
from tests.processes import output_of
from tierstore import (
    DaemonUnavailableError,
    StorageIOError,
    StoreClosedError,
    StoreFullError,
    TierStore,
    tiered_offload,
)
from tierstore.sidecar.inspection import inspect_daemon

MIB = 2**20
STACK_BYTES = itertools.count(64 * MIB, MIB)  # each larger than any that the C library has kept
REFUSED = (StorageIOError, DaemonUnavailableError)

Open = Callable[[], TierStore]


OPTIONS: dict[str, Any] = {"host_bytes": 0, "disk_bytes": "256MiB", "codec": "none"}


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    made = tmp_path / "drive"
    made.mkdir()
    return made


@pytest.fixture(params=["embedded", "sidecar"])
def daemon(request: pytest.FixtureRequest, drive: Path) -> DaemonProcess | None:
    """Keeps the records of `open_one`; None: the store has its own directory."""
    return None if request.param == "embedded" else request.getfixturevalue("start_daemon")(drive)


@pytest.fixture
def open_one(daemon: DaemonProcess | None, drive: Path) -> Iterator[Open]:
    """Opens a store that sends everything to disk; with a daemon, no session of it may be left at the end."""
    if daemon is None:
        yield lambda: TierStore(drive, **OPTIONS)
        assert list(drive.iterdir()) == []
        return
    yield lambda: TierStore.connect(daemon.socket, host_bytes=0)
    assert "a bug" not in daemon.log
    assert "client lost" not in daemon.log, "it went without closing its session"
    assert sessions_of(daemon) == {}


@contextmanager
def limit_on(what: int, limit: int) -> Iterator[None]:
    """A limit of this process: `resource.RLIMIT_...`."""
    before = resource.getrlimit(what)
    resource.setrlimit(what, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """Of addresses that are not in use yet."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    with limit_on(resource.RLIMIT_AS, num_pages * mmap.PAGESIZE + num_bytes):
        yield


@contextmanager
def descriptors_left(number: int) -> Iterator[Callable[[], None]]:
    """So many that can still be opened. Yields what takes all that can be opened now."""
    held: list[int] = []

    def use_up() -> None:
        try:
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass

    with limit_on(resource.RLIMIT_NOFILE, max(map(int, os.listdir("/proc/self/fd"))) + 64):
        try:
            use_up()
            for _ in range(number):
                os.close(held.pop())
            yield use_up
        finally:
            for descriptor in held:
                os.close(descriptor)


def _store_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tierstore")]


def _tensor(number: int) -> torch.Tensor:
    return torch.full((MIB // 4,), float(number))


def _check(store: TierStore) -> None:
    """It stores what it is given, and holds nothing in the end."""
    contents = [*(_tensor(number) for number in range(4)), torch.full((9 * MIB // 4,), 4.0)]
    handles = [store.put(content.clone()) for content in contents]
    store.flush()
    for content, handle in zip(contents, handles, strict=True):
        assert torch.equal(store.get(handle), content)
    del handle, handles
    gc.collect()  # errors and the frames that they came through
    store.flush()
    now = store.stats()
    assert (now.live_handles, now.disk_bytes, now.staging_used_bytes, now.lent_bytes) == (0, 0, 0, 0)


def _open_with(open_one: Open, limited: Callable[[int], Any], most: int) -> list[bool]:
    """Opens stores with 0, 1, ... of what is limited, until three in a row come to be: which of them did."""
    open_one().close()  # whatever is opened once
    num_descriptors = len(descriptors_of())
    were_opened: list[bool] = []
    while were_opened[-3:] != [True] * 3:
        assert len(were_opened) < most
        try:
            with limited(len(were_opened)):
                store = open_one()
            _check(store)
            store.close()
            del store
            were_opened.append(True)
        except REFUSED:
            were_opened.append(False)
            assert not _store_threads()
        gc.collect()
        assert len(descriptors_of()) == num_descriptors
    return were_opened


@contextmanager
def threads_left(number: int) -> Iterator[None]:
    """About so many that can still be started."""
    stack_bytes = next(STACK_BYTES)
    before = threading.stack_size(stack_bytes)
    try:
        with room_for(stack_bytes * number + stack_bytes // 2):
            yield
    finally:
        threading.stack_size(before)


def test_threads_refused_while_a_store_is_opened_say_so_and_nothing_is_left(open_one: Open) -> None:
    with threads_left(0), pytest.raises(StorageIOError, match="no more threads can be started"):
        open_one()
    assert _open_with(open_one, lambda number: threads_left(4 * number), 40)[:2] == [False, False]


def test_descriptors_used_up_while_a_store_is_opened_say_so_and_nothing_is_left(
    open_one: Open, daemon: DaemonProcess | None
) -> None:
    were_opened = _open_with(open_one, descriptors_left, 30)
    assert were_opened[:6] == [False] * 6
    if daemon is not None:
        num_sessions = json.loads(inspect_daemon(daemon.socket))["num_sessions_opened"]
        assert num_sessions > 1 + sum(were_opened), "none was refused the copy of its window's, which comes last"


def test_descriptors_used_up_beneath_an_open_store_keep_the_bytes_in_memory(store_directory: Path) -> None:
    """Its first segment cannot be opened."""
    with TierStore(store_directory, **OPTIONS) as store:
        with descriptors_left(0):
            handle = store.put(_tensor(1))
            with pytest.raises(StorageIOError, match="Too many open files"):
                store.flush()
            assert torch.equal(store.get(handle), _tensor(1))
        store.flush()
        del handle
        _check(store)


def test_limit_on_sizes_of_files_is_told_when_a_store_is_opened(open_one: Open) -> None:
    """The shared window of a client is a file too (memfd_create(2)). Python ignores the signal, SIGXFSZ."""
    open_one().close()  # whatever is opened once
    num_descriptors = len(descriptors_of())
    with limit_on(resource.RLIMIT_FSIZE, 0), pytest.raises(StorageIOError, match=r"File too large.*ulimit -f"):
        open_one()
    assert not _store_threads()
    assert len(descriptors_of()) == num_descriptors
    with open_one() as store:
        _check(store)


def test_directory_deleted_beneath_an_open_store_is_told_by_what_needs_a_new_file(open_one: Open, drive: Path) -> None:
    """What is open stays: a value in the index is read."""
    with open_one() as store:
        small, kept = torch.arange(5000.0), store.put(torch.arange(5000.0))
        store.flush()
        shutil.rmtree(drive)
        large = store.put(_tensor(1))
        with pytest.raises(StorageIOError, match=r"No such file or directory.*the data is still in memory"):
            store.flush()
        assert torch.equal(store.get(large), _tensor(1))
        assert torch.equal(store.get(kept), small)
        del large, kept
    drive.mkdir()


def _graph(store: TierStore, weights: list[torch.Tensor]) -> torch.Tensor:
    with tiered_offload(store, min_bytes=0):
        return torch.stack([(weight * 2).exp().sum() for weight in weights]).sum()


def _check_gradients(weights: list[torch.Tensor]) -> None:
    for weight in weights:
        assert weight.grad is not None
        assert torch.equal(weight.grad, 2 * (weight * 2).exp().detach())
        weight.grad = None


@pytest.mark.usefixtures("no_native_threads")
def test_memory_refused_to_backward_raises_and_what_is_on_disk_can_be_asked_for_again(store_directory: Path) -> None:
    weights = [torch.randn(2 * MIB // 4, requires_grad=True) for _ in range(6)]
    with TierStore(store_directory, **OPTIONS) as store:
        loss = _graph(store, weights)
        store.flush()
        with room_for(MIB), pytest.raises(StorageIOError, match=r"memory.*the record is (still )?on disk"):
            loss.backward(retain_graph=True)
        for weight in weights:
            weight.grad = None
        loss.backward()
        _check_gradients(weights)
        del loss
        _check(store)


def test_memory_refused_to_a_prefetch_is_no_error(store_directory: Path) -> None:
    with TierStore(store_directory, **OPTIONS) as store:
        handle = store.put(_tensor(1))
        store.flush()
        with room_for(0):
            store.prefetch([handle])
        assert torch.equal(store.get(handle), _tensor(1))
        del handle
        _check(store)


def _with_stack_left(number: int, call: Callable[[], object]) -> object:
    """`call` where so many more calls may be nested."""

    def descend(left: int) -> object:
        return call() if left == 0 else descend(left - 1)

    depth = 0
    frame = sys._getframe()
    while frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(depth + 200)
    try:
        return descend(200 - number)
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.usefixtures("unvalidated")
@pytest.mark.parametrize("what", ["put", "get", "backward"])
def test_stack_used_up_within_a_call_closes_the_store_or_changes_nothing(store_directory: Path, what: str) -> None:
    """With room for 1, 2, ... nested calls, until that is enough."""
    store = TierStore(store_directory, **OPTIONS)
    endings: list[str] = []
    while endings[-1:] != ["done"]:
        endings.append(_ending_of(store, what, len(endings) + 1))
        if endings[-1] == "closed":
            with pytest.raises(StoreClosedError, match="in the middle of a change of its bookkeeping"):
                store.flush()
            store.close()
            store = TierStore(store_directory, **OPTIONS)
        else:
            _check(store)
    store.close()
    assert len(endings) > 6
    assert "closed" in endings


def _ending_of(store: TierStore, what: str, num_calls: int) -> str:
    """What becomes of a call with room for so many within it."""
    kept = store.put(_tensor(1))
    loss = _graph(store, [torch.ones(1000, requires_grad=True)])
    store.flush()
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: store.put(_tensor(2)),
        "get": lambda: store.get(kept),
        "backward": loss.backward,
    }
    ending = "done"
    try:
        _with_stack_left(num_calls, calls[what])
    except (RecursionError, ctypes.ArgumentError) as error:  # the latter: what ctypes makes of it
        ending = "closed" if hasattr(error, "__notes__") else "refused"
    torch.ones(1, requires_grad=True).sum().backward()  # until then torch keeps the graph of a backward that failed
    return ending


TRAINING_WITHIN_A_LIMIT = """
import resource, sys, torch
from tierstore import TierStore, tiered_offload
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
budgets = {} if sys.argv[3] == "default" else dict(host_bytes=0, staging_bytes="8MiB", disk_bytes="100GiB")
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
batch = torch.randn(512, 512)
model(batch).square().mean().backward()
expected = [each.grad.clone() for each in model.parameters()]
with TierStore(sys.argv[1], **budgets) as store:
    assert store.host_bytes < limit
    for _ in range(3):
        model.zero_grad()
        with tiered_offload(store, min_bytes=0):
            loss = model(batch).square().mean()
        loss.backward()
        assert all(map(torch.equal, expected, [each.grad for each in model.parameters()]))
    small = [store.put(torch.full((8192,), float(number))) for number in range(4096)]
    store.flush()
    assert all(float(store.get(handle)[0]) == number for number, handle in enumerate(small))
    taken = int(open("/proc/self/statm").read().split()[0]) * 4096
    print(taken)
"""


@pytest.mark.usefixtures("unvalidated")  # which looks at each of thousands of records in each call
@pytest.mark.parametrize("budgets", ["small", "default"])
def test_limit_on_addresses_leaves_room_for_training(store_directory: Path, budgets: str) -> None:
    """The drive's budget is 100 GiB; of addresses only those are taken that hold something, or will soon."""
    limit = 4 * 2**30
    assert int(output_of(TRAINING_WITHIN_A_LIMIT, store_directory, limit, budgets, OMP_NUM_THREADS="1")) < limit


@pytest.mark.usefixtures("unvalidated")  # which looks at each of them in each call
@pytest.mark.parametrize("inline_bytes", ["128KiB", None])
def test_index_with_few_addresses_is_never_filled(store_directory: Path, inline_bytes: str | None) -> None:
    """What does not fit into it goes to extents; where that is not allowed, the error names the limit."""
    options = {"host_bytes": 0, "staging_bytes": "1MiB", "disk_bytes": "8GiB", "codec": "none"}
    with room_for(600 * MIB), TierStore(store_directory, inline_bytes=inline_bytes, **options) as store:
        handles = []
        refused = pytest.raises(StoreFullError, match="ulimit -v") if inline_bytes is None else nullcontext()
        with refused:
            handles.extend(store.put(torch.full((8192,), float(number))) for number in range(3000))
            store.flush()
        for number in (0, 99, len(handles) - 1):
            assert float(store.get(handles[number])[0]) == number
        del handles[: len(handles) // 2]
        handles += [store.put(torch.full((8192,), float(number))) for number in range(40)]
        store.flush()
        assert [float(store.get(handle)[0]) for handle in handles[-40:]] == list(range(40))
