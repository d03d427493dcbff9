"""A store that is taken through a script, step by step.

The real disk tier writes and reads, and the copy engine of a made-up accelerator copies, but they say so only when they
are told to. Neither training nor the engine moves while the other does, so a run depends on nothing but its script.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.device.fake import Copy, FakeDevice
from tests.inspect_store import inspect, inspect_engine
from tests.ledger.scripts import (
    Decision,
    Decisions,
    Device,
    Drive,
    FollowedScript,
    Job,
    Queues,
    Script,
    finish_transfer,
    is_copy,
)
from tests.ledger.steps import Action, EndScope, LetGo, Pack, Release, Settings, Unpack, Workload
from tierstore import TierStore, tiered_offload
from tierstore.disk.tier import DiskTier, DiskUsage, Kind, Loaded, Stored
from tierstore.errors import StoreFullError
from tierstore.hooks import scope
from tierstore.ledger.counters import Counters
from tierstore.store.options import StoreOptions
from tierstore.tensors.copies import Marker
from tierstore.testing.copies import Tensors, Way

_WAIT_SECONDS = 20.0
_PAUSE_SECONDS = 0.001
_DEVICE_DTYPE = torch.uint8


class _SteppedDisk:
    """A `DiskTier` around a real one, which says that a job is done when it is told to."""

    def __init__(self, disk: DiskTier, stepper: Stepper) -> None:
        self._disk = disk
        self._stepper = stepper
        self.scratch_bytes = disk.scratch_bytes

    async def write(self, key: int, source: memoryview, kind: Kind) -> Stored:
        if not self._stepper.has_taken(key):
            await self._stepper.pass_gate("spill", key)
            raise StoreFullError(len(source), 0, 0)
        stored = await self._disk.write(key, source, kind)
        await self._stepper.pass_gate("spill", key)
        return stored

    async def read(self, key: int, destination: memoryview) -> Loaded:
        loaded = await self._disk.read(key, destination)
        await self._stepper.pass_gate("restore", key)
        return loaded

    def confirms(self, key: int, memory: memoryview) -> bool:
        return self._disk.confirms(key, memory)

    async def discard(self, keys: Sequence[int]) -> None:
        await self._disk.discard(keys)
        await self._stepper.pass_gate_of_discards(keys)

    def usage(self) -> DiskUsage:
        return self._disk.usage()

    def codec_choices(self) -> Mapping[str, Mapping[str, int]]:
        return self._disk.codec_choices()

    def abandon_after_fork(self) -> None:
        self._disk.abandon_after_fork()

    async def close(self) -> None:
        await self._disk.close()


class _SteppedStore(TierStore):
    stepper: Stepper

    def _begin(self, options: StoreOptions) -> None:
        stepper = self.stepper = Stepper()

        async def open_stepped(executor: Executor) -> DiskTier:
            return _SteppedDisk(await options.open_disk(executor), stepper)

        super()._begin(options._replace(open_disk=open_stepped, copies=stepper.copies))


class _SteppedCopy(Copy):
    _device: SteppedDevice

    def __init__(self, device: SteppedDevice, ready: _SteppedCopy | None, *copied: Any) -> None:
        super().__init__(device, *copied)
        self.ready = ready
        self.is_over = False
        self._over = threading.Event()
        self._num_waiting = 0

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        with self._device.lock:
            if self.is_over:
                return
            self._num_waiting += 1
            self._device.num_waiting += 1
        self._device.on_news()
        if not self._over.wait(_WAIT_SECONDS):
            raise TimeoutError("a copy does not end")

    def end(self) -> None:
        self.make()
        with self._device.lock:
            self.is_over = True
            self._device.num_waiting -= self._num_waiting
        self._over.set()


class SteppedDevice(FakeDevice):
    """Tensors of bytes without a sign are on it. Its copies are over when they are told to end.

    Attributes:
        queues: where what is queued can be seen.
        num_waiting: threads that wait for a copy; under `lock`.
    """

    queues: Queues

    def __init__(self, on_news: Callable[[], None]) -> None:
        super().__init__()
        self.num_waiting = 0
        self.on_news = on_news

    def device_of(self, tensor: torch.Tensor) -> torch.device | None:
        return super().device_of(tensor) if tensor.dtype is _DEVICE_DTYPE else None

    def wait(self, stream: Any, marker: Marker) -> None:
        assert isinstance(marker, _SteppedCopy)
        self.queues.wait(marker)
        marker.make()

    def _copy(self, way: Way, sources: Tensors, targets: Tensors, stream: Any, ready: Any) -> Marker:
        copy = _SteppedCopy(self, ready, way, sources, targets)
        self.queues.queue("offload" if way == "out" else "reload", copy)
        return copy


class Stepper:
    """Lets the training thread and the engine's move by turns. In place of the condition that training waits on.

    Attributes:
        copies: the accelerator's.
        discarded: keys of which the worker will be told that they are, and the gate that it waits at.
    """

    def __init__(self) -> None:
        self._news = threading.Event()
        self.copies = SteppedDevice(self._news.set)
        self._resting = threading.Event()
        self.discarded: tuple[Sequence[int], Any] | None = None
        self._gates: dict[Job, Any] = {}
        self._are_gates_open = False

    def take_over(
        self, store: TierStore, script: FollowedScript, first_key: int, drive: Drive, device: Device
    ) -> Decisions:
        """From now on nothing moves unless it is told to."""
        self._drive = drive
        inside = self._inside = inspect(store)
        self._engine = inspect_engine(inside.engine)
        self._script, self._first_key = script, first_key
        self.decisions = Decisions(drive, first_key, self._news.set)
        self.copies.queues = self.decisions.copies
        window = inside.device_window
        window.in_flight.limit_bytes, window.reloaded.limit_bytes = device.flight_bytes, device.reload_bytes
        window.keep(window.resident.limit_bytes)

        def await_rest() -> None:
            if not self._resting.wait(_WAIT_SECONDS):
                raise TimeoutError("training does not rest")

        self._engine.call_before_turns(await_rest)
        inside.replace_progress(self)
        with inside.lock:
            inside.residency.observe(self.decisions)
        return self.decisions

    def has_taken(self, key: int) -> bool:
        return self._drive.has_taken(key - self._first_key)

    async def pass_gate(self, what: str, key: int) -> None:
        """On the loop: returns when the job may be said to be done."""
        if self._are_gates_open:
            return
        gate = asyncio.get_running_loop().create_future()
        self._gates[Job(what, key - self._first_key)] = gate
        self._news.set()
        await gate

    async def pass_gate_of_discards(self, keys: Sequence[int]) -> None:
        if self._are_gates_open:
            return
        gate = asyncio.get_running_loop().create_future()
        self.discarded = keys, gate
        self._news.set()
        await gate

    def settle(self) -> bool:
        """Return when the engine has begun all that it can begin now, and said what is freed; whether that was any."""
        self._resting.set()
        has_discarded = False
        while True:
            self._come_to_rest()
            if self.discarded is None:
                break
            (keys, gate), self.discarded = self.discarded, None
            has_discarded = True
            self._drive.free(key - self._first_key for key in keys)
            gate.get_loop().call_soon_threadsafe(gate.set_result, None)
        self._resting.clear()
        return has_discarded

    def _come_to_rest(self) -> None:
        ends_at = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < ends_at:
            self._news.clear()
            num_seen = self._num_seen_at_rest()
            self._go_round()  # a turn may have found nothing to do, which is no news
            if num_seen is None:
                self._news.wait(_PAUSE_SECONDS)
            elif num_seen == self._num_seen_at_rest():
                return
        raise TimeoutError("the engine does not come to rest")

    def _num_seen_at_rest(self) -> int | None:
        with self._inside.lock:
            return len(self.decisions.seen) if self._is_quiet() else None

    def _go_round(self) -> None:
        passed = threading.Event()
        self._engine.loop.call_soon_threadsafe(passed.set)
        if not passed.wait(_WAIT_SECONDS):
            raise TimeoutError("the engine's loop does not answer")

    def release(self) -> None:
        """From now on everything moves by itself, so that the store can be closed."""
        self._resting.set()
        self.decisions.copies.end_all()
        self._engine.loop.call_soon_threadsafe(self._open_gates)

    def _open_gates(self) -> None:
        self._are_gates_open = True
        for gate in (*self._gates.values(), *(self.discarded or ())[1:]):
            gate.set_result(None)

    def finish_one(self) -> Job | None:
        """Have the next job of the script end, if there is any, and return it; then settle."""
        self.settle()
        could_end = [job for job in self.decisions.running if job in self._gates or self._could_end(job)]
        if not could_end:
            return None
        job = self._script.choose(could_end)
        if is_copy(job):
            self.decisions.copies.end(job)
        else:
            gate = self._gates.pop(job)
            gate.get_loop().call_soon_threadsafe(gate.set_result, None)
        self.settle()
        return job

    def _could_end(self, job: Job) -> bool:
        return self.decisions.copies.could_end(job)

    def wait(self, timeout: float) -> bool:
        """In place of the condition's: training waits, its lock held."""
        with self._inside.lock_given_back():
            if not self.settle():
                finish_transfer(self.finish_one)
        return True

    def notify_all(self) -> None: ...

    def _is_quiet(self) -> bool:
        """What is to be discarded may wait for the turn after a transfer."""
        decisions = self.decisions
        return bool(
            len(decisions.transfers) == len(self._gates) + self.copies.num_waiting
            and not self._engine.has_turn_due
            and not decisions.has_idle_lane_and_work()
            and (self.discarded is not None or decisions.transfers or not self._inside.num_discards)
        )


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(saved)
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        raise NotImplementedError


class _Step:
    """One step of a workload."""

    def __init__(self, store: TierStore, workload: Workload, settings: Settings, device: Device) -> None:
        self._workload, self._on_device = workload, device.saved
        self._scope = tiered_offload(
            store,
            min_bytes=0,
            device_bytes=device.device_bytes,
            prefetch=settings.prefetch,
            lookahead_bytes=settings.lookahead_bytes,
        )
        self._leaf = torch.zeros(1, requires_grad=True)
        self._graph: dict[int, torch.Tensor] = {}
        self._storages: dict[int, torch.Tensor] = {}
        self._last_use: dict[int, int] = {}
        for number, action in enumerate(workload.actions):
            if isinstance(action, Pack | LetGo):
                self._last_use[self._root_of(action.saved)] = number
        self._is_in_forward = True
        self._scope.__enter__()

    def end_forward(self) -> None:
        """Leave the scope, where a drive that is full has not let the step come to that."""
        if self._is_in_forward:
            self._is_in_forward = False
            self._scope.__exit__(None, None, None)

    def act(self, number: int, action: Action) -> None:
        match action:
            case Pack(index):
                self._pack(number, index)
            case LetGo(index):
                del self._storages[self._root_of(index)]
            case EndScope():
                self.end_forward()
            case Unpack(index):
                (saved,) = self._graph[index].grad_fn.saved_tensors  # type: ignore[union-attr]
                assert bool((saved == self._root_of(index) % 127).all())
            case Release(index):
                del self._graph[index]

    def _pack(self, number: int, index: int) -> None:
        root = self._root_of(index)
        saved, shared = self._workload.saved[index], self._workload.saved[root].is_shared
        if index == root:
            dtype = _DEVICE_DTYPE if root in self._on_device else torch.int8
            self._storages[root] = torch.full((saved.nbytes,), root % 127, dtype=dtype)
        with patch.object(scope, "sequence_nr", lambda: saved.node):
            self._graph[index] = _Save.apply(self._leaf, self._storages[root])
        if self._last_use[root] == number and not shared:
            del self._storages[root]

    def _root_of(self, index: int) -> int:
        root = self._workload.saved[index].record
        return index if root is None else root


def decisions_of(
    place: Path,
    workload: Workload,
    settings: Settings,
    script: Script,
    num_steps: int,
    device: Device = Device(),  # noqa: B008 - immutable
) -> tuple[list[Decision], Counters]:
    """What a store in that directory decides. Checks that all bytes come back, and that nothing is left. Where
    the disk becomes full, the run ends."""
    followed = FollowedScript(script)
    with _SteppedStore(
        place, host_bytes=settings.host_bytes, staging_bytes=settings.staging_bytes, codec="none"
    ) as store:
        inspect(store).let_staging_grow(settings.staging_grows)
        decisions = store.stepper.take_over(
            store, followed, next(store._core.residency.handles.keys) + 1, Drive(settings), device
        )
        try:
            for _ in range(num_steps):
                step = _Step(store, workload, settings, device)
                try:
                    _take(step, workload, store.stepper, followed)
                finally:
                    step.end_forward()
                del step
            inspect(store).residency.tidy()
            store.stepper.settle()
            while decisions.running or decisions.waiting:
                store.stepper.finish_one()
            inspect(store).residency.tidy()
            assert (inspect(store).records, inspect(store).used_bytes) == ([], (0, 0)), "nothing is left in host memory"
            window = inspect(store).device_window
            used_bytes = [each.used_bytes for each in (window.resident, window.in_flight, window.reloaded)]
            assert used_bytes == [0, 0, 0], "nothing is left on the device"
            store.stepper.copies.synchronize()
        except StoreFullError:
            pass
        finally:
            store.stepper.release()
        return decisions.seen, inspect(store).counters


def _take(step: _Step, workload: Workload, stepper: Stepper, followed: FollowedScript) -> None:
    for number, action in enumerate(workload.actions):
        step.act(number, action)
        stepper.settle()
        for _ in range(followed.num_after_action()):
            stepper.finish_one()
