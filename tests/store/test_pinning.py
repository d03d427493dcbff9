"""Host memory is registered behind the store's back, and nothing waits for that but whoever asks to."""

import errno
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import MakeStore
from tests.existing import set_existing
from tests.inspect_store import inspect
from tierstore.disk.linux import address_of
from tierstore.residency import pinning
from tierstore.residency.pinning import Pinning, cpus_near
from tierstore.residency.slab import Slab

DEVICE = torch.device("cuda", 0)
CHUNK = 2 * 2**20


class Held:
    """A driver that takes its time."""

    def __init__(self) -> None:
        self.was_asked = threading.Event()
        self.may_answer = threading.Event()
        self.answer: str | None = None
        self.cpus: set[int] = set()

    def __call__(self, *_: object) -> str | None:
        self.was_asked.set()
        self.cpus = os.sched_getaffinity(0)
        assert self.may_answer.wait(20)
        return self.answer


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Held:
    driver = Held()
    monkeypatch.setattr("tierstore.residency.slab._register", driver)
    return driver


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
    make_store: MakeStore, driver: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    unregistered: list[int] = []
    runtime = SimpleNamespace(cudaHostUnregister=unregistered.append)
    monkeypatch.setattr("tierstore.residency.slab._cuda_runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
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
    assert len(unregistered) == 1
    assert slab.description == "pageable (unpinned)"


def _region(num_bytes: int) -> tuple[mmap.mmap, int]:
    region = mmap.mmap(-1, num_bytes)
    return region, address_of(memoryview(region))


def test_end_before_all_pages_are_taken_the_driver_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    region, address = _region(4 * CHUNK)
    monkeypatch.setattr(pinning, "_STEP_BYTES", CHUNK)
    steps: list[int] = []
    first, go_on = threading.Event(), threading.Event()

    def populate(memory: memoryview) -> None:
        steps.append(len(memory))
        first.set()
        assert go_on.wait(20)

    monkeypatch.setattr(pinning, "populate", populate)
    under_way = Pinning(address, 4 * CHUNK, DEVICE, lambda: pytest.fail("it was told"))
    assert first.wait(20)
    set_existing(under_way, _is_unwanted=True)
    go_on.set()
    under_way.end()
    assert steps == [CHUNK]
    assert under_way.failure == "the store was closed"
    assert len(region) == 4 * CHUNK


def test_no_more_threads_the_caller_tells_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
        raise OSError(errno.EAGAIN, "no more threads")

    monkeypatch.setattr(pinning, "start_thread", start_thread)
    region, address = _region(CHUNK)
    told: list[threading.Thread] = []
    under_way = Pinning(address, CHUNK, DEVICE, lambda: told.append(threading.current_thread()))
    assert told == [threading.current_thread()]
    assert (under_way.is_over, under_way.failure, len(region)) == (True, None, CHUNK)


def test_driver_that_raises_is_told_of() -> None:
    region, address = _region(CHUNK)

    def register() -> None:
        raise RuntimeError("no context")

    under_way = Pinning(address, CHUNK, DEVICE, register)
    under_way.wait()
    assert under_way.failure == "RuntimeError('no context')"
    under_way.end()
    assert len(region) == CHUNK


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
