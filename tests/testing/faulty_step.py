"""One training step with a fault at one of its stages, and the account that must be right afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol

import torch
from torch import nn

from tests.hooks.programs import forget_after_error
from tests.inspect_store import inspect
from tests.testing.fault_matrix import Case, Promise, chain_of, has_cause
from tierstore import (
    DaemonUnavailableError,
    StorageIOError,
    StoreClosedError,
    StoreFullError,
    TierStore,
    TierStoreError,
    tiered_offload,
)
from tierstore.testing import FaultPlan, Faults

DEPTH = 8


class SetsPlans(Protocol):
    """Faults in this process, or in a daemon."""

    def set(self, plan: FaultPlan) -> None: ...

    @property
    def num_injected(self) -> int: ...


class LocalFaults:
    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def set(self, plan: FaultPlan) -> None:
        self._faults.set(plan)

    @property
    def num_injected(self) -> int:
        return sum(self._faults.injected.values())


class Training:
    """A small model; what is saved of it are matrices of `width` by `width` float32."""

    def __init__(self, width: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.nbytes = width * width * 4
        self._model = nn.Sequential(*(layer for _ in range(DEPTH) for layer in (nn.Linear(width, width), nn.Tanh())))
        self._batch = torch.randn(width, width)
        self.expected = self.step(None)

    def staging_bytes(self, stage: str) -> int:
        """Of a store in which each matrix leaves by itself, so that there is a third one for a fault to strike.

        Where a pack is to wait, only one may move at a time."""
        return self.nbytes if stage in ("pack", "offload") else 12 * self.nbytes

    def step(self, store: TierStore | None, at: Callable[[str], None] = lambda _: None) -> list[torch.Tensor]:
        """The gradients of one step. `at` is told what comes next, and may raise."""
        self._model.zero_grad()
        at("forward")
        if store is None:
            loss = self._model(self._batch).square().mean()
        else:
            with tiered_offload(store, min_bytes=0):
                loss = self._model(self._batch).square().mean()
        at("flush")
        at("backward")
        loss.backward()
        return [parameter.grad.clone() for parameter in self._model.parameters() if parameter.grad is not None]

    def is_right(self, gradients: list[torch.Tensor]) -> bool:
        """Whether every bit is as it is without a store."""
        return all(torch.equal(*pair) for pair in zip(self.expected, gradients, strict=True))


@cache
def training_of(width: int, seed: int = 0) -> Training:
    """The same one for all cases that give it the same seed."""
    return Training(width, seed)


class FaultyStep:
    """One step with a fault: what was raised on this thread, how often it struck, and whether gradients were right."""

    def __init__(self, training: Training, store: TierStore, faults: SetsPlans) -> None:
        self._training = training
        self._store = store
        self._faults = faults
        self.errors: list[BaseException] = []
        self.struck = 0
        self.was_right = False

    def run(self, stage: str, plan: FaultPlan) -> None:
        """Run it, with the plan for that stage; then let go of its graph. Wrong gradients fail the test."""
        begins = {"pack": "forward", "offload": "forward", "spill": "forward"}.get(stage, "backward")
        ends = {"pack": "flush", "offload": "backward", "spill": "backward"}.get(stage, "end")

        def at(moment: str) -> None:
            if moment == begins and stage != "close":
                self._faults.set(plan)
            elif moment == ends:
                self._faults.set(FaultPlan())
            if moment == "flush":
                with self._noting_errors():
                    self._store.flush()
            if moment == "flush" and stage in ("restore", "reload", "release"):
                assert not self.errors, "nothing has been injected yet"

        before = self._faults.num_injected
        with self._noting_errors():
            gradients = self._training.step(self._store, at)
            assert self._training.is_right(gradients), "wrong gradients"
            self.was_right = True
        self._release(stage)
        if stage == "close":
            self._faults.set(plan)
            with self._noting_errors():
                self._store.close()
        self._faults.set(FaultPlan())
        self.struck = self._faults.num_injected - before

    def assert_is_as_promised(self, promise: Promise, *, is_told: bool = False) -> None:
        """What was raised is what may be, with its cause (`is_told`: it is another process's)."""
        assert self.struck, "the fault did not strike: the case shows nothing"
        assert self.errors or not promise.must_raise, "the fault struck, and nobody was told"
        for error in self.errors:
            assert isinstance(error, promise.errors), f"{error!r} was not promised"
            assert promise.cause is None or has_cause(error, promise.cause, is_told=is_told), (
                f"{chain_of(error)} has no cause"
            )
        assert self.was_right or self.errors

    def forget(self) -> None:
        """Tracebacks refer to the graph."""
        self.errors.clear()
        forget_after_error()

    def _release(self, stage: str) -> None:
        """What backward has used is freed; an error of that is told by the next call."""
        if stage == "release":
            with self._noting_errors():
                self._store.flush()

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        try:
            yield
        except (TierStoreError, RuntimeError) as error:
            self.errors.append(error)


def run_case(training: Training, store: TierStore, faults: SetsPlans, case: Case) -> str:
    """One step with the case's fault: what was promised comes of it, and nothing is left. What came, for the census."""
    promise = case.promise
    try:
        step = FaultyStep(training, store, faults)
        step.run(case.stage, case.plan)
        step.assert_is_as_promised(promise, is_told=not isinstance(faults, LocalFaults))
        came = count_of(step)
        step.forget()
        assert_store_goes_on(training, store, promise)
    finally:
        close_quietly(store)
    assert_nothing_is_held(store)
    return came


def assert_store_goes_on(training: Training, store: TierStore, promise: Promise) -> None:
    """Nothing is held any more, and another step is right, unless the store may have ended: then it says so."""
    try:
        flush_to_the_end(store)
        assert training.is_right(training.step(store)), "wrong gradients in a step without a fault"
        flush_to_the_end(store)
    except StoreClosedError:
        assert promise.ends_the_store
    assert_nothing_is_held(store)


def flush_to_the_end(store: TierStore) -> None:
    """An error of a write that is left over is told once."""
    for _ in range(3):
        try:
            return store.flush()
        except (StorageIOError, StoreFullError, DaemonUnavailableError):
            pass
    return store.flush()


def assert_nothing_is_held(store: TierStore) -> None:
    """No record, slot, staging, outstanding memory or byte on disk; on a device, once the last copy is over."""
    deadline = time.monotonic() + 20
    inside = inspect(store)
    while ((now := store.stats()).device_bytes or inside.has_slots) and time.monotonic() < deadline:
        time.sleep(0.001)  # the event of a copy cannot be awaited
    held = (now.live_handles, now.device_bytes, now.host_bytes, now.staging_used_bytes, now.lent_bytes, now.disk_bytes)
    assert held == (0, 0, 0, 0, 0, 0), now
    assert not inside.has_slots, "slots that nobody gave back"


def close_quietly(store: TierStore) -> None:
    """What the engine failed with is told by `close` too."""
    try:
        store.close()
    except TierStoreError:
        pass


def count_of(step: FaultyStep) -> str:
    """For the census."""
    if not step.errors:
        return "right, nobody noticed"
    return "error told, gradients right" if step.was_right else "error told instead of gradients"
