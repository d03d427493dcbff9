"""The device tier over a simulated accelerator: copies run late and on threads of their own, and freed device memory
is overwritten as soon as its stream comes to that, as an allocator that reuses it would."""

from __future__ import annotations

import ctypes
import math
import random
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import pytest
import torch

from tests.waiting import until
from tierstore.disk.tier import Kind
from tierstore.ledger.device import NUM_SPARED
from tierstore.ledger.state import State
from tierstore.ledger.windows import Window
from tierstore.residency.copies import Marker
from tierstore.residency.device import DeviceTier
from tierstore.residency.handle import Handle, Record
from tierstore.residency.layout import layout_of
from tierstore.residency.outstanding import OutstandingViews
from tierstore.residency.ownership import claim
from tierstore.residency.slab import Slab, Slot

CPU = torch.device("cpu")
NBYTES = 4096
POISON = 0xEE


class Event(threading.Event):
    """A point in a stream's work. A `Marker`. `num_asked`: of all of them."""

    num_asked = 0

    def query(self) -> bool:
        Event.num_asked += 1
        return self.is_set()

    def synchronize(self) -> None:
        assert self.wait(20), "the stream never came there"


class Stream:
    """Work done one after the other, on a thread of its own, when it is let."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._done: list[Future[None]] = []
        self._may_run = threading.Event()
        self._may_run.set()

    def enqueue(self, work: Callable[[], None]) -> None:
        self._done.append(self._thread.submit(work))

    def record(self) -> Event:
        event = Event()
        self.enqueue(event.set)
        return event

    def wait(self, marker: Marker) -> None:
        self.enqueue(marker.synchronize)

    def hold(self) -> None:
        """Stand still after what is queued so far."""
        self._may_run.clear()
        self.enqueue(lambda: self._may_run.wait(20) and None)

    def release(self) -> None:
        self._may_run.set()

    def synchronize(self) -> None:
        """All that is queued has been done, and nothing of it has failed."""
        while self._done:
            self._done.pop(0).result(20)

    def end(self) -> None:
        self._thread.shutdown()
        self.synchronize()


class Accelerator:
    """A copy engine. `Copies`, with CPU memory for device memory."""

    def __init__(self) -> None:
        self.compute, self.side, self.out, self.into = (Stream() for _ in range(4))
        self.current = self.compute
        self.num_waits: Counter[Stream] = Counter()
        self.copied: list[tuple[str, Stream]] = []  # which way, and for which stream
        self._blocks: dict[int, Any] = {}
        self._shared: dict[int, list[Stream]] = {}
        self._watches: set[weakref.ref[torch.UntypedStorage]] = set()
        self.held_bytes = 0

    def allocate(self, nbytes: int, stream: Stream) -> torch.Tensor:
        """Device memory of a stream. What of it is freed is used again by later work of the same stream."""
        block = (ctypes.c_char * nbytes)()
        address = ctypes.addressof(block)
        self._blocks[address] = block  # the memory itself stays, so that a late reader finds the poison
        tensor = torch.frombuffer(block, dtype=torch.uint8)
        self.held_bytes += nbytes

        def freed(watch: weakref.ref[torch.UntypedStorage]) -> None:
            self._watches.discard(watch)
            self.held_bytes -= nbytes
            for other in self._shared.pop(address, ()):
                stream.wait(other.record())
            stream.enqueue(lambda: ctypes.memset(address, POISON, nbytes) and None)

        self._watches.add(weakref.ref(tensor.untyped_storage(), freed))
        return tensor

    def computed(self, number: int, nbytes: int = NBYTES, stream: Stream | None = None) -> torch.Tensor:
        """A tensor that a kernel is going to fill."""
        stream = stream or self.current
        tensor = self.allocate(nbytes, stream)
        address = tensor.data_ptr()
        content = bytes(_content(number, nbytes).tolist())
        stream.enqueue(lambda: ctypes.memmove(address, content, nbytes) and None)
        return tensor

    def read_by_kernel(self, tensor: torch.Tensor, stream: Stream | None = None) -> Callable[[], torch.Tensor]:
        """A kernel that reads the tensor, when the stream comes to it."""
        stream = stream or self.current
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        seen: list[bytes] = []
        stream.enqueue(lambda: seen.append(ctypes.string_at(address, nbytes)))
        done = stream.record()

        def result() -> torch.Tensor:
            done.synchronize()
            return torch.frombuffer(bytearray(seen[0]), dtype=torch.uint8)

        return result

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        return CPU

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    def copy_out_many(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], stream: Stream) -> Event:
        written = stream.record()
        self.copied.append(("out", stream))
        self.wait(self.out, written)
        for source, target in zip(sources, targets, strict=True):
            self._copy(self.out, source, target)
        return self.out.record()

    def copy_in_many(
        self, sources: Sequence[torch.Tensor], device: torch.device, stream: Stream, ready: Marker | None
    ) -> tuple[Sequence[torch.Tensor], Event]:
        targets = [self.allocate(source.numel(), stream) for source in sources]
        allocated = stream.record()
        self.copied.append(("in", stream))
        self.wait(self.into, allocated)
        if ready is not None:
            self.wait(self.into, ready)
        for source, target in zip(sources, targets, strict=True):
            self._copy(self.into, source, target)
        return targets, self.into.record()

    @staticmethod
    def _copy(stream: Stream, source: torch.Tensor, target: torch.Tensor) -> None:
        assert source.dtype == target.dtype == torch.uint8
        assert source.shape == target.shape
        addresses, nbytes = (target.data_ptr(), source.data_ptr()), source.numel()
        stream.enqueue(lambda: ctypes.memmove(*addresses, nbytes) and None)

    def wait(self, stream: Stream, marker: Marker) -> None:
        self.num_waits[stream] += 1
        stream.wait(marker)

    def share(self, memory: torch.Tensor, stream: Stream) -> None:
        self._shared.setdefault(memory.untyped_storage().data_ptr(), []).append(stream)

    def streams(self) -> tuple[Stream, ...]:
        return self.compute, self.side, self.out, self.into

    def end(self) -> None:
        for stream in self.streams():
            stream.release()
        for stream in self.streams():
            stream.end()


def _content(number: int, nbytes: int = NBYTES) -> torch.Tensor:
    return (torch.arange(nbytes) * 7 + number * 13).remainder(199).to(torch.uint8)


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    accelerator = Accelerator()
    yield accelerator
    accelerator.end()


@pytest.fixture
def slab() -> Slab:
    return Slab(4 * 2**20)


def _tier_over(accelerator: Accelerator, **limits: int) -> DeviceTier:
    return DeviceTier(accelerator, OutstandingViews(), lambda _: True, Window(0), **limits)


def _save(tier: DeviceTier, tensor: torch.Tensor, key: int) -> Handle:
    """What a pack does, once the tensor is the store's alone."""
    handle = Handle(cast("Any", None), tensor.detach())
    layout, released = layout_of(tensor), deque[Record]()
    record = Record(handle, released.append, key, tensor.nbytes, tensor.data_ptr(), layout, Kind("uint8", 1))
    handle.record = record
    record.device = CPU
    claim(record, tensor.untyped_storage())
    record.stream = tier.streams.note_current(CPU)
    tier.hold(record)
    return handle


def _offload(tier: DeviceTier, slab: Slab, record: Record) -> Slot:
    assert record.source is not None
    record.slot = slab.allocate(record.nbytes)
    record.span = 0, record.nbytes
    tier.offload(record)
    return record.slot


def _offloaded(tier: DeviceTier, slab: Slab, accelerator: Accelerator, *numbers: int) -> list[Handle]:
    """Records with such contents, whose copies out are over."""
    handles = [_save(tier, accelerator.computed(number), number) for number in numbers]
    for handle in handles:
        _offload(tier, slab, handle.record)
    _poll_until(tier, lambda: all(handle.record.state is State.HOST for handle in handles))
    return handles


def _reload(tier: DeviceTier, record: Record) -> torch.Tensor:
    assert record.source is not None
    assert record.slot is not None
    tier.reload(record)
    tier.hand_over(record)
    return record.source.detach()


def _bytes_in(slot: Slot) -> torch.Tensor:
    return torch.frombuffer(bytearray(slot.memory), dtype=torch.uint8)


def _poll_until(tier: DeviceTier, condition: Callable[[], bool]) -> None:
    until(condition, meanwhile=tier.poll)


@pytest.mark.parametrize("elsewhere", [False, True], ids=["its stream", "elsewhere"])
def test_offload_copies_what_the_kernel_wrote_and_then_lets_go(
    accelerator: Accelerator, slab: Slab, elsewhere: bool
) -> None:
    """Whoever happens to make room: the kernel that fills the tensor is on the stream that packed it."""
    tier = _tier_over(accelerator)
    accelerator.compute.hold()
    handle = _save(tier, accelerator.computed(5), 1)
    record = handle.record
    accelerator.current = accelerator.side if elsewhere else accelerator.compute
    slot = _offload(tier, slab, record)
    tier.poll()
    assert record.state is State.OFFLOADING
    assert accelerator.copied == [("out", accelerator.compute)]
    assert accelerator.held_bytes == NBYTES
    assert record.has_device_bytes
    assert tier.under_way()
    accelerator.compute.release()
    assert record.ready is not None
    record.ready.synchronize()
    tier.poll()
    assert record.state is State.HOST
    assert torch.equal(_bytes_in(slot), _content(5))
    assert not record.has_device_bytes
    assert (accelerator.held_bytes, tier.held_bytes) == (0, 0)


def test_offload_released_meanwhile_holds_the_memory_until_copied(accelerator: Accelerator, slab: Slab) -> None:
    tier = _tier_over(accelerator)
    accelerator.out.hold()
    handle = _save(tier, accelerator.computed(5), 1)
    record = handle.record
    slot = _offload(tier, slab, record)
    del handle
    tier.remove(record)
    freed: list[Slot] = []
    assert record.ready is not None
    tier.when_copied(record.ready, lambda: freed.append(slot))
    tier.poll()
    accelerator.compute.synchronize()
    assert (accelerator.held_bytes, freed) == (NBYTES, [])
    accelerator.out.release()
    record.ready.synchronize()
    tier.poll()
    assert (accelerator.held_bytes, freed) == (0, [slot])
    assert torch.equal(_bytes_in(slot), _content(5))


@pytest.mark.parametrize(
    ("flight_bytes", "num_in_flight"), [(NBYTES // 2, 1), (NBYTES, 1), (2 * NBYTES, 2), (5 * NBYTES, 5)]
)
def test_offload_beyond_the_bound_makes_the_stream_wait_not_the_host(
    accelerator: Accelerator, slab: Slab, flight_bytes: int, num_in_flight: int
) -> None:
    tier = _tier_over(accelerator, flight_bytes=flight_bytes)
    accelerator.out.hold()
    handles, slots, peak_bytes = [], [], 0
    for i in range(20):
        handles.append(_save(tier, accelerator.computed(i), i))
        slots.append(_offload(tier, slab, handles[i].record))
        peak_bytes = max(peak_bytes, accelerator.held_bytes)
        assert tier.held_bytes <= num_in_flight * NBYTES
    assert peak_bytes <= (num_in_flight + 1) * NBYTES
    assert accelerator.num_waits[accelerator.compute] == 20 - num_in_flight
    accelerator.out.release()
    accelerator.out.synchronize()
    for i, slot in enumerate(slots):
        assert torch.equal(_bytes_in(slot), _content(i)), "its memory was used again before it was copied"


def test_while_no_copy_is_over_few_calls_ask_whether_one_is(accelerator: Accelerator, slab: Slab) -> None:
    tier = _tier_over(accelerator)
    accelerator.out.hold()
    handles = [_save(tier, accelerator.computed(number), number) for number in range(3)]
    for handle in handles:
        _offload(tier, slab, handle.record)
    before = Event.num_asked
    for _ in range(100):
        assert not tier.has_finished()
        tier.poll(seldom=True)
    assert 0 < Event.num_asked - before <= 200 // NUM_SPARED
    accelerator.out.release()
    accelerator.out.synchronize()
    for _ in range(NUM_SPARED + 1):
        tier.poll(seldom=True)
    assert all(handle.record.state is State.HOST for handle in handles)


def test_packs_that_do_not_take_the_lock_count_as_calls_that_do_not_ask(accelerator: Accelerator, slab: Slab) -> None:
    tier = _tier_over(accelerator)
    accelerator.out.hold()
    handle = _save(tier, accelerator.computed(5), 1)
    _offload(tier, slab, handle.record)
    for ask_anew in (tier.ask_anew, partial(tier.count_spared, NUM_SPARED)):
        tier.poll()
        before = Event.num_asked
        tier.poll(seldom=True)
        assert Event.num_asked == before
        ask_anew()
        tier.poll(seldom=True)
        assert Event.num_asked == before + 1


@pytest.mark.parametrize("elsewhere", [False, True], ids=["its stream", "elsewhere"])
def test_reload_is_seen_by_every_later_kernel(accelerator: Accelerator, slab: Slab, elsewhere: bool) -> None:
    tier = _tier_over(accelerator)
    (handle,) = _offloaded(tier, slab, accelerator, 5)
    record = handle.record
    accelerator.into.hold()
    accelerator.current = accelerator.side if elsewhere else accelerator.compute
    tensor = _reload(tier, record)
    result = accelerator.read_by_kernel(tensor)
    assert record.has_device_bytes
    assert accelerator.num_waits[accelerator.current] == 1
    assert accelerator.num_waits[accelerator.compute] == (not elsewhere)
    assert accelerator.copied == [("out", accelerator.compute), ("in", accelerator.compute)]
    accelerator.into.release()
    assert torch.equal(result(), _content(5))


def test_reload_ahead_no_stream_waits_before_somebody_asks(accelerator: Accelerator, slab: Slab) -> None:
    tier = _tier_over(accelerator)
    (handle,) = _offloaded(tier, slab, accelerator, 5)
    record = handle.record
    accelerator.into.hold()
    assert record.source is not None
    tier.reload(record)
    accelerator.compute.synchronize()  # a kernel that needs nothing of it
    assert not accelerator.num_waits[accelerator.compute]
    tier.hand_over(record)
    tier.hand_over(record)
    assert accelerator.num_waits[accelerator.compute] == 1
    result = accelerator.read_by_kernel(record.source)
    accelerator.into.release()
    assert torch.equal(result(), _content(5))


def test_make_room_lets_go_at_once_of_copies_that_still_run_each_way(accelerator: Accelerator, slab: Slab) -> None:
    tier = _tier_over(accelerator)
    handles = [*_offloaded(tier, slab, accelerator, 0, 1), _save(tier, accelerator.computed(2), 2)]
    records = [handle.record for handle in handles]
    accelerator.into.hold()
    result = accelerator.read_by_kernel(_reload(tier, records[0]))  # asked for
    assert records[1].source is not None
    assert records[1].slot is not None
    tier.reload(records[1])  # ahead
    accelerator.out.hold()
    slot = _offload(tier, slab, records[2])
    assert accelerator.held_bytes == 3 * NBYTES
    tier.make_room()
    assert (accelerator.held_bytes, tier.held_bytes) == (0, 0)
    assert [record.has_device_bytes for record in records] == [False, False, False]
    assert records[1].ready is not None
    assert not records[1].ready.query()  # so its slot is not free yet
    accelerator.out.release()
    accelerator.into.release()
    assert torch.equal(result(), _content(0))
    _poll_until(tier, lambda: records[2].state is State.HOST)
    assert torch.equal(_bytes_in(slot), _content(2))
    assert torch.equal(accelerator.read_by_kernel(_reload(tier, records[1]))(), _content(1))


def test_reload_waits_for_the_copy_out_that_still_runs(accelerator: Accelerator, slab: Slab) -> None:
    tier = _tier_over(accelerator, flight_bytes=NBYTES)
    accelerator.out.hold()
    handles = [_save(tier, accelerator.computed(i), i) for i in range(3)]
    records = [handle.record for handle in handles]
    for record in records:
        _offload(tier, slab, record)
    assert not records[0].has_device_bytes
    result = accelerator.read_by_kernel(_reload(tier, records[0]))
    assert accelerator.num_waits[accelerator.into] == 2  # for the allocation, and for that copy
    accelerator.out.release()
    assert torch.equal(result(), _content(0))


def test_reload_beyond_its_bound_forgets_what_backward_needs_last(accelerator: Accelerator, slab: Slab) -> None:
    """But never what was handed over last, even if the order does not know it: a thread has still to take its bytes."""
    tier = _tier_over(accelerator, reload_bytes=2 * NBYTES)
    handles = _offloaded(tier, slab, accelerator, *range(4))
    records = [handle.record for handle in handles]
    first, second, third, fourth = records
    _reload(tier, first)
    _reload(tier, second)
    assert not tier.has_room_to_reload(NBYTES, lambda record: record in (first, second))
    assert tier.has_room_to_reload(NBYTES, lambda record: record is second)
    tier.hand_over(first)
    ranks = {second: 7, first: 3, third: 9}
    tier.reload(third, next_rank=lambda record: ranks[record])
    assert [record.has_device_bytes for record in records] == [True, False, True, False]
    tier.hand_over(third)
    tier.reload(fourth, next_rank=lambda record: math.inf if record is third else 3)
    assert [record.has_device_bytes for record in records] == [False, False, True, True]
    for record in records:
        tier.remove(record)
    _poll_until(tier, lambda: not tier.under_way())


@pytest.mark.parametrize("seed", range(3))
def test_any_interleaving_brings_back_the_bytes(accelerator: Accelerator, seed: int) -> None:
    chance = random.Random(seed)
    slab = Slab(8 * NBYTES)
    tier = _tier_over(accelerator, flight_bytes=3 * NBYTES, reload_bytes=2 * NBYTES)
    tier.window.resident.limit_bytes = 2 * NBYTES
    live: dict[int, Handle] = {}
    results: list[tuple[int, Callable[[], torch.Tensor]]] = []

    def drop(number: int) -> None:
        record = live.pop(number).record
        tier.remove(record)
        record.claims = None
        if record.slot is not None and record.ready is not None:
            tier.when_copied(record.ready, lambda slot=record.slot: slab.free(slot))

    for number in range(200):
        stream = chance.choice(accelerator.streams())
        action = chance.random()
        if action < 0.2:
            stream.hold()
        elif action < 0.5:
            for stream in accelerator.streams():
                stream.release()
        if chance.random() < 0.5 or not live:
            live[number] = _save(tier, accelerator.computed(number), number)
            while (surplus := tier.window.surplus()) is not None:
                _offload(tier, slab, surplus)
        else:
            wanted = chance.choice(list(live))
            record = live[wanted].record
            assert record.source is not None
            tier.hand_over(record)
            tensor = record.source.detach() if record.has_device_bytes else _reload(tier, record)
            results.append((wanted, accelerator.read_by_kernel(tensor)))
            del tensor, record
            if chance.random() < 0.6:
                drop(wanted)
        tier.poll()
        if len(live) > 12:
            drop(min(live))
    for stream in accelerator.streams():
        stream.release()
    for number, result in results:
        assert torch.equal(result(), _content(number)), number
    for number in list(live):
        drop(number)
    for stream in accelerator.streams():
        stream.synchronize()
    _poll_until(tier, lambda: not tier.under_way())
    assert tier.held_bytes == 0
    assert accelerator.held_bytes == 0
