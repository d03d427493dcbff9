"""What a thread does, one episode after the other. Everything that is read is verified; what is wrong raises."""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from tests.hooks.programs import forget_after_error
from tests.hooks.random_graphs import EDITS, OPERATIONS, THIEVES, VIEWS, Machine, Step
from tierstore import TierStore, TierStoreError, keep_resident, tiered_offload
from tierstore.residency.handle import Handle

__all__ = ["EPISODES", "Worker", "WrongBytesError", "payload"]

_MOST_HELD = 10
_VIEWS = sorted(VIEWS)
_STEPS: dict[str, tuple[int, list[str], list[str]]] = {
    # Random numbers come from a generator that all threads share; and nobody hears of an error on a thread's thread.
    "operation": (8, sorted(OPERATIONS.keys() - {"dropout", "rrelu"}), ["whole"]),
    "backward": (4, ["gradients", "part", "accumulate", "graph"], ["whole"]),
    "steal": (2, THIEVES, ["whole"]),
    "edit": (2, sorted(EDITS), _VIEWS),
    "read": (2, ["sin", "square", "exp"], _VIEWS),
    **dict.fromkeys(("chain", "meet", "forget", "hide", "clear", "drop"), (1, [""], ["whole"])),
    **dict.fromkeys(("look", "use_gradient", "settle", "enter", "leave", "root"), (1, [""], ["whole"])),
}
"""How likely each kind of step is, and of which names and views it is."""


class WrongBytesError(Exception):
    """What came back is not what went down."""


class InjectedError(Exception):
    """Thrown by us in the middle of a graph."""


class _Faulty(torch.autograd.Function):
    """The identity, that raises in one direction; it saves its input."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, fault: str) -> Tensor:
        if fault == "forward":
            raise InjectedError(fault)
        context.save_for_backward(tensor)
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        context.saved_tensors  # noqa: B018 - as a kernel would
        raise InjectedError("backward")


def payload(key: int) -> Tensor:
    """Bytes that follow from a key: noise or a mask, of up to 2 MiB."""
    generator = torch.Generator().manual_seed(key)
    return torch.randint(256 if key % 2 else 2, (1 + key % 2**21,), dtype=torch.uint8, generator=generator)


def random_program(chance: random.Random) -> list[Step]:
    kinds = chance.choices(list(_STEPS), [likely for likely, _, _ in _STEPS.values()], k=chance.randint(4, 30))
    names = [map(chance.choice, _STEPS[kind][1:]) for kind in kinds]
    return [
        Step(kind, *each, chance.randrange(32), chance.randrange(32), chance.random() < 0.5)
        for kind, each in zip(kinds, names, strict=True)
    ]


class Worker:
    """One thread's state. `counts`: of what was verified, and of the errors that came and were allowed."""

    def __init__(
        self, store: TierStore, seed: int, allowed: Iterable[str], shared: SimpleQueue[tuple[int, Handle]]
    ) -> None:
        self.store = store
        self.chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._allowed = frozenset(allowed)
        self._shared = shared
        self._held: list[tuple[int, Handle]] = []
        self._programs: list[list[Step]] = []

    def run(self, name: str) -> None:
        """One episode. Raises what is wrong, or an error that this round does not bring about."""
        try:
            EPISODES[name](self)
            self.counts[name] += 1
        except TierStoreError as error:
            if type(error).__name__ not in self._allowed:
                raise
            self.counts[type(error).__name__] += 1
            self._held.clear()  # some of it may be lost
        finally:
            forget_after_error()

    def release(self) -> None:
        self._held.clear()
        while not self._shared.empty():
            self._shared.get()

    def put(self) -> None:
        for _ in range(self.chance.randint(1, 4)):
            key = self.chance.getrandbits(40)
            handle = self.store.put(payload(key))
            self._held.append((key, handle))
            if self.chance.random() < 0.2:
                self._shared.put((key, handle))
        while len(self._held) > _MOST_HELD:
            del self._held[self.chance.randrange(len(self._held))]

    def get(self) -> None:
        self.chance.shuffle(self._held)
        if self.chance.random() < 0.5:
            self.store.prefetch([handle for _, handle in self._held])
        for key, handle in self._held[: self.chance.randint(1, 6)]:
            self._verify(key, handle)
        del self._held[: self.chance.randint(0, 3)]

    def take_over(self) -> None:
        """Read what another thread has put."""
        try:
            self._verify(*self._shared.get_nowait())
        except Empty:
            pass

    def _verify(self, key: int, handle: Handle) -> None:
        if not torch.equal(self.store.get(handle), payload(key)):
            raise WrongBytesError(f"handle {handle} is not payload {key}")
        self.counts["reads verified"] += 1

    def flush(self) -> None:
        self.store.flush()

    def compute(self) -> None:
        """A random program over graphs, sometimes one that was seen before, so its order is known."""
        if not self._programs or self.chance.random() < 0.6:
            self._programs = [*self._programs[-3:], random_program(self.chance)]
        program = self.chance.choice(self._programs)
        expected = Machine(nullcontext, lambda: None).account(program)
        for _ in range(self.chance.randint(1, 2)):
            if Machine(self._scope, self.store.flush).account(program) != expected:
                raise WrongBytesError(f"not the account of a run without a store: {program}")
            self.counts["gradients compared"] += len(expected[1])

    def fail(self) -> None:
        """An error of the program's own, in the middle of forward or of backward."""
        leaf, fault = torch.ones(256, 256, requires_grad=True), self.chance.choice(["forward", "backward"])
        try:
            with self._scope():
                loss = _Faulty.apply(leaf.exp().sin(), fault).tanh().sum()
            loss.backward()
        except InjectedError:
            return
        raise WrongBytesError("backward went past what it needs")

    def drop(self) -> None:
        """Forward alone; the graph goes while its bytes are moving."""
        with self._scope():
            torch.ones(256, 256, requires_grad=True).exp().sin().tanh().sum()

    def _scope(self) -> AbstractContextManager[object]:
        if self.chance.random() < 0.1:
            return keep_resident()
        return tiered_offload(
            self.store,
            min_bytes=self.chance.choice([0, 0, 4096]),
            prefetch=self.chance.choice(["learned", "learned", "reverse", "none"]),
        )


EPISODES: dict[str, Callable[[Worker], None]] = {
    "put": Worker.put,
    "get": Worker.get,
    "take over": Worker.take_over,
    "flush": Worker.flush,
    "compute": Worker.compute,
    "fail": Worker.fail,
    "drop": Worker.drop,
}
"""By name, as the summary counts them."""
