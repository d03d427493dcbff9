"""Host memory is registered behind the store's back, and nothing waits for that but whoever asks to."""

import errno
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import MakeStore
from tests.existing import set_existing
from tests.inspect_store import inspect
from tests.waiting import until
from tierstore.disk.linux import address_of
from tierstore.ledger.state import State
from tierstore.tensors import pinning
from tierstore.tensors.copies import queue_copies
from tierstore.tensors.pinning import Pinning, cpus_near, device_in_use
from tierstore.tensors.slab import Slab

DEVICE = torch.device("cuda", 0)
CHUNK = 2 * 2**20


class Held:
    """A driver that takes its time."""

    def __init__(self) -> None:
        self.was_asked = threading.Event()
        self.may_answer = threading.Event()
        self.answer: str | None = None
        self.cpus: set[int] = set()

    def __call__(self, *_: object, **__: object) -> str | None:
        self.was_asked.set()
        self.cpus = os.sched_getaffinity(0)
        assert self.may_answer.wait(20)
        return self.answer


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Held:
    driver = Held()
    monkeypatch.setattr("tierstore.tensors.slab._register", driver)
    return driver


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the driver is told to forget."""
    addresses: list[int] = []
    runtime = SimpleNamespace(cudaHostUnregister=addresses.append)
    monkeypatch.setattr("tierstore.tensors.slab._cuda_runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return addresses


def test_pinning_goes_on_behind_and_slots_are_used_meanwhile(driver: Held) -> None:
    slab = Slab(4 * CHUNK)
    early = slab.allocate(100)
    early.memory[:] = b"x" * 100
    slab.begin_to_pin(DEVICE)
    slab.begin_to_pin(DEVICE)
    assert driver.was_asked.wait(20)
    late = slab.allocate(100)
    assert (slab.description, slab.is_being_pinned) == ("pageable (being pinned)", True)
    assert not slab.is_pinned(late)
    driver.may_answer.set()
    slab.wait_until_pinned()
    assert (slab.description, slab.is_being_pinned) == ("pinned", False)
    assert slab.is_pinned(early)
    assert bytes(early.memory) == b"x" * 100, "its pages were taken anew"


def test_pinning_pages_are_neither_given_back_nor_moved_meanwhile(driver: Held) -> None:
    slab = Slab(4 * CHUNK)
    slot = slab.allocate(CHUNK)
    slab.begin_to_pin(DEVICE)
    slab.free(slot)
    slab.trim(0)
    assert slab.cached_bytes == CHUNK
    driver.answer = "refused"
    driver.may_answer.set()
    slab.wait_until_pinned()
    assert slab.description == "pageable (refused)"
    slab.trim(0)
    assert slab.cached_bytes == 0


@pytest.mark.parametrize("spare_bytes", [0, 2 * CHUNK])
def test_slot_outside_of_the_slab_or_in_its_spare_addresses_is_never_pinned(driver: Held, spare_bytes: int) -> None:
    driver.may_answer.set()
    slab = Slab(CHUNK, spare_bytes)
    inside = slab.allocate(CHUNK)
    slab.pin(DEVICE)
    outside = slab.allocate(CHUNK)
    assert slab.description == "pinned"
    assert [slab.is_pinned(slot) for slot in (inside, outside)] == [True, False]


def test_store_closed_while_its_slab_is_pinned_unpins_it(
    make_store: MakeStore, driver: Held, unregistered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[int] = []
    monkeypatch.setattr(
        "tierstore.tensors.slab._register", lambda address, *_, **__: registered.append(address) or driver()
    )
    store = make_store(host_bytes="4MiB")
    slab = inspect(store).slab
    with inspect(store).lock:
        slab.begin_to_pin(DEVICE)
    assert driver.was_asked.wait(20)
    content = torch.arange(2**18)
    handle = store.put(content)
    assert torch.equal(store.get(handle), content)
    threading.Timer(0.05, driver.may_answer.set).start()
    store.close()
    assert registered == unregistered != []
    assert slab.description == "pageable (unpinned)"


@pytest.mark.usefixtures("unregistered")
def test_prefetch_waits_for_room_in_one_piece_of_pinned_memory_and_a_thread_does_not(
    make_store: MakeStore, driver: Held
) -> None:
    """Memory beside the slab would not be pinned: the host would wait for the copies."""
    driver.may_answer.set()
    store = make_store(host_bytes="4MiB", staging_bytes="4MiB")
    inside, contents = inspect(store), [torch.full((CHUNK,), number, dtype=torch.uint8) for number in range(2)]
    handles = [store.put(content) for content in contents]
    with store._core.residency.lock:
        inside.slab.begin_to_pin(DEVICE)
    inside.slab.wait_until_pinned()
    del contents
    store.put(torch.zeros(2 * CHUNK, dtype=torch.uint8))  # both go to the drive
    store.flush()
    until(lambda: all(handle.record.state is State.DISK for handle in handles))
    with inside.lock:
        others = [inside.slab.allocate(CHUNK // 2) for _ in range(8)]
        for other in others[::2]:
            inside.slab.free(other)
    store.prefetch(handles[:1])
    assert handles[0].record.state is State.DISK
    found, first = store.get(handles[1]), min(other.address for other in others)
    assert torch.equal(found, torch.full((CHUNK,), 1, dtype=torch.uint8))
    assert not first <= found.data_ptr() < first + 4 * CHUNK
    with inside.lock:
        for other in others[1::2]:
            inside.slab.free(other)
    store.prefetch(handles[:1])
    until(lambda: handles[0].record.state is State.CLEAN)
    assert inside.slab.is_pinned(handles[0].record.slot)
    store.close()  # the driver has to be there for that


def _region(num_bytes: int) -> tuple[mmap.mmap, int]:
    region = mmap.mmap(-1, num_bytes)
    return region, address_of(memoryview(region))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "_PIECE_BYTES", CHUNK)


@pytest.mark.usefixtures("small_pieces")
def test_end_before_all_pieces_are_registered_the_driver_is_told_of_no_more() -> None:
    region, address = _region(4 * CHUNK)
    sizes: list[int] = []
    first, go_on = threading.Event(), threading.Event()

    def register(address: int, nbytes: int) -> None:
        sizes.append(nbytes)
        first.set()
        assert go_on.wait(20)

    under_way = Pinning(address, 4 * CHUNK, DEVICE, register)
    assert first.wait(20)
    set_existing(under_way, _is_unwanted=True)
    go_on.set()
    under_way.end()
    assert sizes == [under_way.pinned_bytes]
    assert under_way.registered == [address]
    assert under_way.failure == "the store was closed"
    assert len(region) == 4 * CHUNK


def test_no_more_threads_the_caller_tells_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
        raise OSError(errno.EAGAIN, "no more threads")

    monkeypatch.setattr(pinning, "start_thread", start_thread)
    region, address = _region(CHUNK)
    told: list[threading.Thread] = []
    under_way = Pinning(address, CHUNK, DEVICE, lambda *_: told.append(threading.current_thread()))
    assert set(told) == {threading.current_thread()}
    assert (under_way.is_over, under_way.failure, len(region)) == (True, None, CHUNK)


def test_driver_that_raises_is_told_of() -> None:
    region, address = _region(CHUNK)

    def register(*_: object) -> None:
        raise RuntimeError("no context")

    under_way = Pinning(address, CHUNK, DEVICE, register)
    under_way.wait()
    assert under_way.failure == "RuntimeError('no context')"
    under_way.end()
    assert len(region) == CHUNK


@pytest.mark.usefixtures("small_pieces")
def test_slots_of_the_first_pieces_are_pinned_while_the_driver_is_busy_with_the_next(
    monkeypatch: pytest.MonkeyPatch, unregistered: list[int]
) -> None:
    asked, may_answer = [threading.Event() for _ in range(4)], [threading.Event() for _ in range(4)]
    ranges: list[tuple[int, int]] = []

    def register(address: int, nbytes: int, device: torch.device) -> str | None:
        index = len(ranges)
        ranges.append((address, nbytes))
        asked[index].set()
        assert may_answer[index].wait(20)
        return "no more" if index == 3 else None

    monkeypatch.setattr("tierstore.tensors.slab._register", register)
    slab = Slab(4 * CHUNK)
    slots = [slab.allocate(CHUNK) for _ in range(2)]
    across = slab.allocate(CHUNK + CHUNK // 2)
    slab.begin_to_pin(DEVICE)
    pinned = []
    for index in range(4):
        assert asked[index].wait(20)
        pinned.append([slab.is_pinned(slot) for slot in (*slots, across)])
        may_answer[index].set()
    slab.wait_until_pinned()
    assert pinned == [[False] * 3, [True, False, False], [True, True, False], [True, True, False]]
    assert ranges == [(slots[0].address + index * CHUNK, CHUNK) for index in range(4)]
    assert slab.description == "pageable beyond 0.0 GiB (no more)"
    assert [slab.is_pinned(slot) for slot in (*slots, across)] == [True, True, False]
    assert not slab.is_being_pinned
    slab.unpin()
    assert unregistered == [address for address, _ in ranges[:3]]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("direction", ["out", "in"])
def test_copy_is_cut_where_pieces_of_host_memory_meet(direction: str) -> None:
    region, address = _region(8 * CHUNK)
    memory = torch.frombuffer(region, dtype=torch.uint8)
    offset = -address % CHUNK + CHUNK - 512
    host, device = memory[offset : offset + CHUNK + 1024], torch.arange(CHUNK + 1024).to(torch.uint8)
    if direction == "in":
        host.copy_(device)
        device.zero_()
    target, source = (host, device) if direction == "out" else (device, host)
    seen: list[tuple[int, int]] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                on_host = args[0] if direction == "out" else args[1]
                seen.append((on_host.data_ptr() - host.data_ptr(), on_host.numel()))
            return func(*args, **(kwargs or {}))

    with Seen():
        queue_copies([target], [source], [host])
    assert seen == [(0, 512), (512, CHUNK), (CHUNK + 512, 512)]
    assert torch.equal(host, torch.arange(CHUNK + 1024).to(torch.uint8))
    assert torch.equal(device, host)
    seen.clear()
    with Seen():
        queue_copies([target[512:-512]], [source[512:-512]], [host[512:-512]])
    assert seen == [(512, CHUNK)]
    seen.clear()
    with Seen():
        for parts in ([slice(256), slice(256, 1024)], [slice(256), slice(256, 512)]):
            queue_copies(*[[each[part] for part in parts] for each in (target, source, host)])
    assert seen == [(0, 256), (256, 256), (512, 512), (0, 256), (256, 256)]


def test_store_opened_where_the_program_has_tensors_on_a_device_is_pinned_from_then_on(
    make_store: MakeStore, driver: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.may_answer.set()
    driver.answer = "none of that"
    monkeypatch.setattr("tierstore.store.core.device_in_use", lambda: DEVICE)
    store = make_store(host_bytes="4MiB")
    assert driver.was_asked.wait(20)
    slab = inspect(store).slab
    slab.wait_until_pinned()
    assert store.stats().host_memory == "pageable (none of that)"


def test_no_addresses_for_the_slab_are_told_of_and_no_error(driver: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "no addresses")

    monkeypatch.setattr("tierstore.tensors.slab._map", refuse)
    slab = Slab(CHUNK)
    slab.begin_to_pin(DEVICE)
    assert slab.description == "pageable (no addresses)"
    assert not driver.was_asked.is_set()


@pytest.mark.parametrize(
    ("is_initialized", "reserved_bytes", "expected"),
    [(True, 512, DEVICE), (True, 0, None), (True, None, None), (False, 512, None)],
)
def test_device_in_use_is_the_current_one_if_it_has_tensors(
    monkeypatch: pytest.MonkeyPatch, is_initialized: bool, reserved_bytes: int | None, expected: torch.device | None
) -> None:
    def reserved(device: torch.device) -> int:
        if reserved_bytes is None:
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")
        return reserved_bytes

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", reserved)
    assert device_in_use() == expected


@pytest.mark.parametrize(
    ("listed", "expected"),
    [("0-3,8-9,12\n", {0, 1, 2, 3, 8, 9, 12}), ("5\n", {5}), ("\n", set()), ("what\n", set()), (None, set())],
)
def test_cpus_near_as_the_system_tells(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listed: str | None, expected: set[int]
) -> None:
    place = tmp_path / "0000:3b:00.0"
    place.mkdir()
    if listed is not None:
        (place / "local_cpulist").write_text(listed)
    monkeypatch.setattr(pinning, "_PCI_DEVICES", tmp_path)
    about = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    assert cpus_near(DEVICE) == expected
