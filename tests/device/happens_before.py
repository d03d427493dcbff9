"""Which work on an accelerator's streams is ordered after which: vector clocks under the copy engine.

The engine is the real one (`AcceleratorCopies`); what it is given are streams and events that keep clocks, on CPU
memory. Nothing runs late and nothing depends on time: copies are made at once, and what is judged is only whether
streams and events order every two accesses to the same memory of which one is a write. A missing wait is found whenever
the program comes along that needs it, not only when a race is lost.

A clock tells how far each actor (a stream, or the host) has come, as far as its owner must know. Work that is queued
knows what the host knew when it queued it, what its stream knew, and which events its stream was made to wait for. The
host is one actor: what its threads do to each other is the store's lock's matter, not the copy engine's.

Device memory is blocks. Each belongs to the stream that it was allocated on, and the allocator gives a freed block to
that stream's next request at once, unless it was told of other streams: then only behind what they had queued.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tierstore.tensors.copies import AcceleratorCopies

__all__ = ["BLOCK_BYTES", "DEVICE", "HOST", "ClockedCopies", "UnorderedError"]

Clock = Counter[str]
BLOCK_BYTES = 512
HOST = "host"
DEVICE = torch.device("cpu")


class UnorderedError(AssertionError):
    """Two accesses to the same memory, one of them a write, that nothing orders."""


class _Access(NamedTuple):
    """What a piece of work does to memory, and when, by its own actor's count."""

    what: str
    actor: str
    count: int


class _History:
    """The last write to a piece of memory, and the reads since."""

    def __init__(self) -> None:
        self.write: _Access | None = None
        self.reads: list[_Access] = []


class Event:
    """A point in a stream's work; the host that finds it done knows what the stream knew there."""

    def __init__(self, copies: ClockedCopies, stream: str, clock: Clock) -> None:
        self._copies = copies
        self._stream = stream
        self.clock = clock
        self._is_done = False

    def query(self) -> bool:
        self._is_done = self._is_done or self._copies.may_be_done(self._stream)
        if self._is_done:
            self._copies.clocks[HOST] |= self.clock
        return self._is_done

    def synchronize(self) -> None:
        self._is_done = True
        self.query()


class Stream:
    """What `AcceleratorCopies` uses of a `torch.Stream`."""

    def __init__(self, copies: ClockedCopies, name: str) -> None:
        self._copies = copies
        self._name = name

    def record_event(self, event: Event | None = None) -> Event:
        self._copies.work(self._name, "an event")
        recorded = Event(self._copies, self._name, self._copies.clocks[self._name].copy())
        if event is None:
            self._copies.num_events += 1
            return recorded
        vars(event).update(vars(recorded))  # from now on it is this point
        return event

    def wait_event(self, event: Event) -> None:
        self._copies.num_waits[self._name] += 1
        self._copies.clocks[self._name] |= event.clock

    def __enter__(self) -> None:
        self._copies.entered.append(self._name)

    def __exit__(self, *_: object) -> None:
        self._copies.entered.pop()

    def __repr__(self) -> str:
        return self._name


class ClockedCopies(AcceleratorCopies, TorchDispatchMode):
    """The copy engine on CPU memory and streams that keep clocks; raises `UnorderedError`.

    Allocations and copies inside a stream's scope are seen while it is entered, as a dispatch mode.

    Args:
        may_be_done: whether an event of the stream that is asked for has come to pass; any answer is possible on a
            device.

    Attributes:
        clocks: of each actor.
        current: the stream that the program queues work on.
        num_events: that were made. `num_waits`: of each stream for one.
        num_blocks: those that are in use.
        entered: the streams whose scopes are open, innermost last.
    """

    def __init__(self, may_be_done: Callable[[str], bool]) -> None:
        AcceleratorCopies.__init__(self)
        TorchDispatchMode.__init__(self)
        self.may_be_done = may_be_done
        self.clocks: defaultdict[str, Clock] = defaultdict(Counter)
        self.current = "compute"
        self.num_events, self.num_waits = 0, Counter[str]()
        self.num_blocks = 0
        self.entered: list[str] = []
        self._by_name: dict[str, Stream] = {}
        self._histories: defaultdict[int, _History] = defaultdict(_History)  # by address
        self._free: defaultdict[str, list[tuple[torch.Tensor, Clock]]] = defaultdict(list)  # by owner
        self._shared: defaultdict[int, set[str]] = defaultdict(set)
        self._watches: set[weakref.ref[torch.UntypedStorage]] = set()

    # --- what the program does

    def stream(self, name: str) -> Stream:
        return self._by_name.setdefault(name, Stream(self, name))

    def order(self, stream: str, after: str) -> None:
        """Let later work on `stream` come after what is queued on the other."""
        self.stream(stream).wait_event(self.stream(after).record_event())

    def work(self, actor: str, what: str, reads: int | None = None, writes: int | None = None) -> None:
        """Queue a piece of work (the host: do it) that reads or writes the memory at an address."""
        clock = self.clocks[actor]
        clock |= self.clocks[HOST]
        clock[actor] += 1
        access = _Access(what, actor, clock[actor])
        if reads is not None:
            history = self._histories[reads]
            self._check(access, history.write, clock)
            history.reads.append(access)
        if writes is not None:
            history = self._histories[writes]
            for earlier in (history.write, *history.reads):
                self._check(access, earlier, clock)
            history.write, history.reads = access, []

    def _check(self, later: _Access, earlier: _Access | None, clock: Clock) -> None:
        if earlier is not None and clock[earlier.actor] < earlier.count:
            raise UnorderedError(f"{later.what} on {later.actor} may come before {earlier.what} on {earlier.actor}")

    # --- the allocator

    def allocate(self, stream: str) -> torch.Tensor:
        """A block of the stream's: one that was freed, if there is any."""
        free = self._free[stream]
        if free:
            memory, seen = free.pop()
            self.clocks[HOST] |= seen  # it has looked at the events of the streams that it was told of
        else:
            memory = torch.zeros(BLOCK_BYTES, dtype=torch.uint8)
        block = torch.frombuffer(memory.numpy(), dtype=torch.uint8)
        self.num_blocks += 1

        def freed(watch: weakref.ref[torch.UntypedStorage]) -> None:
            self._watches.discard(watch)
            self.num_blocks -= 1
            seen: Clock = Counter()
            for other in self._shared.pop(memory.data_ptr(), ()):
                seen |= self.clocks[other]
            self._free[stream].append((memory, seen))

        self._watches.add(weakref.ref(block.untyped_storage(), freed))
        return block

    # --- what a device does for the copy engine

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        return DEVICE

    def current_stream(self, device: torch.device) -> Stream:  # type: ignore[override]
        return self.stream(self.current)

    def share(self, memory: Iterable[torch.Tensor], stream: Stream) -> None:  # type: ignore[override]
        for each in memory:
            self._shared[each.untyped_storage().data_ptr()].add(repr(stream))

    def _stream(self, device: torch.device, direction: str) -> Stream:  # type: ignore[override]
        return self.stream(direction)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.entered:
            stream = self.entered[-1]
            if func is torch.ops.aten.empty.memory_format:
                return self.allocate(stream)
            if func is torch.ops.aten.copy_.default:
                self.work(stream, f"the copy {stream}", reads=args[1].data_ptr(), writes=args[0].data_ptr())
        return func(*args, **(kwargs or {}))
