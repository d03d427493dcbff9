"""What the copy engine asks PyTorch and the driver, on a machine that has no device: stand-ins keep record of it."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.device.happens_before import BLOCK_BYTES, ClockedCopies
from tests.device.happens_before import DEVICE as HOST_AS_DEVICE
from tierstore.base.threads import start_thread
from tierstore.tensors import capture
from tierstore.tensors.capture import is_capturing
from tierstore.tensors.copies import AcceleratorCopies, _Point, _Way

GLOBAL, RELAXED = 0, 2


class Driver:
    """Two devices, as far as the copy engine asks about them.

    Attributes:
        current: each thread's current device.
        contexts: devices on which a context was opened by coming back to them.
        mode: of this thread toward captures, as cuThreadExchangeStreamCaptureMode keeps it.
        capturing: (device, stream) pairs that are.
        asked: streams that were asked whether they are.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads = threading.local()
        self.contexts: set[int] = set()
        self.mode = GLOBAL
        self.streams = {0: 0, 1: 0}
        self.capturing: set[tuple[int, int]] = set()
        self.asked: list[tuple[int, int]] = []
        accelerator = torch.accelerator
        monkeypatch.setattr(accelerator, "current_device_index", self.current)
        monkeypatch.setattr(accelerator, "set_device_index", self.go_to)
        monkeypatch.setattr(accelerator, "device_index", self.on_device)
        streams = lambda index: SimpleNamespace(stream_id=self.streams[index])  # noqa: E731
        monkeypatch.setattr("tierstore.tensors.capture.current_stream_on", streams)
        monkeypatch.setattr(torch.cuda, "device", lambda of: self.on_device(of.index))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", self.is_capturing)
        monkeypatch.setattr(capture, "_exchange_mode", lambda: self.exchange)

    def current(self) -> int:
        return getattr(self.threads, "device", 0)

    def go_to(self, index: int) -> None:
        self.threads.device = index

    @contextmanager
    def on_device(self, index: int) -> Iterator[None]:
        before = self.current()
        self.go_to(index)
        yield
        self.go_to(before)

    def is_capturing(self) -> bool:
        stream = self.current(), self.streams[self.current()]
        self.asked.append(stream)
        return stream in self.capturing

    def exchange(self, mode: Any) -> int:
        pointer = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))
        self.mode, pointer[0] = pointer[0], self.mode
        return 0


class Event:
    """Of device 1; PyTorch goes to that and back for all that is asked of it."""

    def __init__(self, driver: Driver, num_queries: int = 1) -> None:
        self._driver = driver
        self._left = num_queries
        self.modes: list[int] = []

    def query(self) -> bool:
        self.record_or_destroy()
        self.modes.append(self._driver.mode)
        self._left -= 1
        return self._left <= 0

    def fail(self) -> None:
        assert self._driver.mode == RELAXED
        raise RuntimeError("the device is lost")

    def record_or_destroy(self) -> None:
        self._driver.contexts.add(self._driver.current())


class Stream:
    device = torch.device("cuda", 1)

    def __init__(self, event: Event) -> None:
        self._event = event

    def wait_event(self, _: object) -> None:
        self._event.record_or_destroy()


DEVICE = torch.device("cuda", 1)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def _on_a_thread_of_the_stores(work: Any) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - for the test's thread
            errors.append(error)

    thread = start_thread(run, "test")
    thread.join()
    assert not errors, errors


def test_thread_of_the_stores_stays_on_the_device_that_it_touches(driver: Driver) -> None:
    """It comes to drop what it has asked for, too: there PyTorch goes back to wherever the thread was."""
    event = Event(driver)

    def ask() -> None:
        _Point(event, DEVICE).query()  # type: ignore[arg-type]
        event.record_or_destroy()

    def wait() -> None:
        AcceleratorCopies().wait(Stream(event), _Point(event, DEVICE))  # type: ignore[arg-type]
        event.record_or_destroy()

    for work in (ask, wait):
        _on_a_thread_of_the_stores(work)
        assert driver.contexts == {1}


class DyingEvent(Event):
    def __del__(self) -> None:
        self.record_or_destroy()


def test_events_that_are_kept_to_be_used_again_are_dropped_on_their_own_device(driver: Driver) -> None:
    copies = AcceleratorCopies()
    events: Any = [DyingEvent(driver), DyingEvent(driver)]
    copies._free[DEVICE].append(events.pop())
    copies._fences[DEVICE] = events.pop()
    _on_a_thread_of_the_stores(copies.drop_events)
    assert driver.contexts == {1}


def test_thread_of_the_users_keeps_its_device(driver: Driver) -> None:
    _Point(Event(driver), DEVICE).query()  # type: ignore[arg-type]
    assert driver.current() == 0
    assert driver.contexts == {1}


def test_event_that_is_asked_for_while_another_thread_captures_does_it_no_harm(driver: Driver) -> None:
    """To wait for it is to look at it until it is over: to synchronize would keep a core busy."""
    event = Event(driver, num_queries=5)
    point = _Point(event, DEVICE)  # type: ignore[arg-type]
    point.query()
    point.synchronize()
    assert event.modes == [RELAXED] * 5
    assert driver.mode == GLOBAL


def test_beside_captures_after_an_error_the_mode_is_what_it_was(driver: Driver) -> None:
    event = Event(driver)
    event.record_or_destroy = event.fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="lost"):
        _Point(event, DEVICE).query()  # type: ignore[arg-type]
    assert driver.mode == GLOBAL


def test_point_that_is_over_tells_of_those_before_it_in_its_stream_alone(driver: Driver) -> None:
    way = _Way()
    events = [Event(driver, num_queries) for num_queries in (9, 1, 9)]
    earlier, middle, later = (_Point(event, DEVICE, way) for event in events)  # type: ignore[arg-type]
    elsewhere = _Point(Event(driver, 9), DEVICE, _Way())  # type: ignore[arg-type]
    assert not earlier.query()
    assert middle.query()
    assert earlier.query()
    assert [len(event.modes) for event in events] == [1, 1, 0], "it is known"
    assert not later.query()
    assert not elsewhere.query()


def test_event_is_used_again_when_nobody_needs_it_and_not_before() -> None:
    """Where one is recorded anew before all have waited for what it was, the order is wrong."""
    with ClockedCopies(lambda _: True) as copies:
        stream, block, host = copies.stream("compute"), copies.allocate("compute"), torch.zeros(BLOCK_BYTES)
        copies.work("compute", "a kernel", writes=block.data_ptr())
        targets = [host.byte() for _ in range(8)]
        points = [copies.copy_out_many([block], [target], stream) for target in targets[:3]]
        assert copies.num_events == 4, "their ends, and one to wait for what packed"
        assert len({point.event for point in points}) == 3
        points.clear()
        for target in targets[3:]:
            out = copies.copy_out_many([block], [target], stream)
            copies.copy_in_many([target], HOST_AS_DEVICE, stream, out)
            del out
        assert copies.num_events == 4


def test_is_capturing_asks_the_devices_own_stream_and_never_a_default_one(driver: Driver) -> None:
    """Nor that of the thread's current device, while the tensor is on another."""
    driver.streams = {0: 3, 1: 5}
    driver.capturing = {(1, 5)}
    assert is_capturing(torch.device("cuda", 1))
    assert not is_capturing(torch.device("cuda", 0))
    assert driver.asked == [(1, 5), (0, 3)]
    assert driver.current() == 0
    driver.streams = {0: 0, 1: 5}
    for device in (torch.device("cuda", 0), torch.device("cpu")):
        assert not is_capturing(device)
    assert driver.asked == [(1, 5), (0, 3)]


GIB = 2**30


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A device of 100 GiB: of 60 that are in use, PyTorch has reserved 20, and needed 12 of these at most."""
    about = SimpleNamespace(free=40 * GIB, reserved=20 * GIB, peak=12 * GIB, fraction=1.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (about.free, 100 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: about.reserved)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: about.peak)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: about.fraction)
    return about


@pytest.mark.parametrize(
    ("fraction", "spare_gib"),
    [
        (1.0, 40 + 8 - 5),
        (0.7, 40 + 8 - 3.5),
        (0.5, 30 + 8 - 2.5),
        (0.2, 8 - 1),
        (0.1, 0),
    ],
)
def test_spare_bytes_are_of_the_share_that_the_process_may_take(
    memory: SimpleNamespace, fraction: float, spare_gib: float
) -> None:
    """One twentieth of it is kept back. What others have taken is not there, whatever the share."""
    memory.fraction = fraction
    assert AcceleratorCopies().spare_bytes(DEVICE) == pytest.approx(spare_gib * GIB, abs=2)


@pytest.mark.parametrize("asked", ["memory_reserved", "max_memory_allocated", "get_per_process_memory_fraction"])
@pytest.mark.usefixtures("memory")
def test_spare_bytes_of_an_allocator_without_figures_are_not_known(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    def refuse(device: object) -> int:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")

    monkeypatch.setattr(torch.cuda, asked, refuse)
    assert AcceleratorCopies().spare_bytes(DEVICE) is None


def test_spare_bytes_of_host_memory_are_not_known() -> None:
    assert AcceleratorCopies().spare_bytes(torch.device("cpu")) is None
