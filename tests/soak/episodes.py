"""What a thread does, one episode after the other. Everything that is read is verified; what is wrong raises."""

import random
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from tests.hooks.programs import Bits, all_bits, forget_after_error
from tests.soak.graphs import Graph, InjectedError, loss_of, make_graph
from tests.soak.payloads import is_payload, payload
from tierstore import ModifiedInPlaceError, TierStore, TierStoreError, keep_resident, tiered_offload
from tierstore.residency.handle import Handle

__all__ = ["EPISODES", "Worker", "WrongBytesError"]

_MOST_HELD = 10


class WrongBytesError(Exception):
    """What came back is not what went down."""


class Worker:
    """One thread's state.

    Attributes:
        counts: of what was verified, and of the errors that came and were allowed.
    """

    def __init__(
        self, store: TierStore, seed: int, allowed: Iterable[str], shared: SimpleQueue[tuple[int, Handle]]
    ) -> None:
        self.store = store
        self.chance = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self._allowed = frozenset(allowed)
        self._shared = shared
        self._held: list[tuple[int, Handle]] = []
        self._graphs: list[Graph] = []

    def run(self, name: str) -> None:
        """One episode.

        Raises:
            Exception: something is wrong, or an error that this round does not bring about.
        """
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

    def let_go(self) -> None:
        """Of everything."""
        self._held.clear()
        self._graphs.clear()
        while True:
            try:
                self._shared.get_nowait()
            except Empty:
                break

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
            key, handle = self._shared.get_nowait()
        except Empty:
            return
        self._verify(key, handle)

    def flush(self) -> None:
        self.store.flush()

    def _verify(self, key: int, handle: Handle) -> None:
        if not is_payload(self.store.get(handle), key):
            raise WrongBytesError(f"handle {handle} is not payload {key}")
        self.counts["reads verified"] += 1

    def train(self) -> None:
        """A step or two of one graph, sometimes of one that was seen before: its order is known then."""
        graph = self._graph()
        expected = self._gradients(graph, nullcontext())
        for _ in range(self.chance.randint(1, 2)):
            self._compare(expected, self._gradients(graph, self._scope(), settle=self.chance.random() < 0.5))

    def retain(self) -> None:
        graph = self._graph()
        expected = self._gradients(graph, nullcontext())
        with self._scope():
            loss = loss_of(graph)
        for retained in (True, True, False):
            found = torch.autograd.grad(loss, graph.leaves, retain_graph=retained, allow_unused=True)
            self._compare(expected, all_bits((loss, *found)))

    def differentiate_twice(self) -> None:
        graph = self._graph()
        expected, found = (self._second_gradients(graph, around) for around in (nullcontext(), self._scope()))
        self._compare(expected, found)

    def drop(self) -> None:
        """Forward alone; sometimes the graph goes while its bytes are moving, sometimes later."""
        with self._scope():
            losses = [loss_of(self._graph()) for _ in range(2)]
        if self.chance.random() < 0.5:
            losses.pop()
            self.store.flush()

    def raise_in_forward(self) -> None:
        self._expect(InjectedError, lambda: self._gradients(self._graph(), self._scope(), fault="forward"))

    def raise_in_backward(self) -> None:
        self._expect(InjectedError, lambda: self._gradients(self._graph(), self._scope(), fault="backward"))

    def change_in_place(self) -> None:
        """What was saved is changed before backward: PyTorch refuses, and so does the store, wherever the bytes are."""
        graph, seen = self._graph(), list[Tensor]()
        with self._scope():
            loss = loss_of(graph, seen=seen)
        if self.chance.random() < 0.5:
            self.store.flush()
        with torch.no_grad():
            seen[0].mul_(2)
        self._expect(ModifiedInPlaceError, lambda: torch.autograd.grad(loss, graph.leaves, allow_unused=True))

    def nest(self) -> None:
        """Parts of a graph stay resident; parts have a scope of their own within the scope."""
        graph = self._graph()
        expected = self._gradients(graph, nullcontext())
        chosen = [self.chance.choice([nullcontext, keep_resident, self._scope]) for _ in graph.steps]
        self._compare(expected, self._gradients(graph, self._scope(), within=lambda number: chosen[number]()))

    def _graph(self) -> Graph:
        if self._graphs and self.chance.random() < 0.4:
            return self.chance.choice(self._graphs)
        self._graphs = [*self._graphs[-3:], make_graph(self.chance)]
        return self._graphs[-1]

    def _scope(self) -> AbstractContextManager[object]:
        return tiered_offload(
            self.store,
            min_bytes=self.chance.choice([0, 0, 4096]),
            prefetch=self.chance.choice(["learned", "learned", "reverse", "none"]),
        )

    def _gradients(
        self,
        graph: Graph,
        around: AbstractContextManager[object],
        *,
        fault: str = "",
        settle: bool = False,
        within: Callable[[int], Any] | None = None,
    ) -> list[Bits]:
        with around:
            loss = loss_of(graph, fault, within)
        if settle:
            self.store.flush()
        return all_bits((loss, *torch.autograd.grad(loss, graph.leaves, allow_unused=True)))

    def _second_gradients(self, graph: Graph, around: AbstractContextManager[object]) -> list[Bits]:
        with around:
            first = torch.autograd.grad(loss_of(graph), graph.leaves, create_graph=True, allow_unused=True)
            norm = torch.stack([each.square().sum().double() for each in first if each is not None]).sum()
        return all_bits((norm, *torch.autograd.grad(norm, graph.leaves, allow_unused=True)))

    def _compare(self, expected: list[Bits], found: list[Bits]) -> None:
        if found != expected:
            wrong = [number for number, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]]
            raise WrongBytesError(f"gradients {wrong} of {len(expected)} differ")
        self.counts["gradients compared"] += len(expected)

    def _expect(self, kind: type[Exception], action: Callable[[], object]) -> None:
        try:
            action()
        except kind:
            return
        raise WrongBytesError(f"no {kind.__name__}, and wrong gradients in silence")


EPISODES: dict[str, Callable[[Worker], None]] = {
    "put": Worker.put,
    "get": Worker.get,
    "take over": Worker.take_over,
    "flush": Worker.flush,
    "train": Worker.train,
    "retain": Worker.retain,
    "differentiate twice": Worker.differentiate_twice,
    "drop": Worker.drop,
    "raise in forward": Worker.raise_in_forward,
    "raise in backward": Worker.raise_in_backward,
    "change in place": Worker.change_in_place,
    "nest": Worker.nest,
}
"""By name, as the summary counts them."""
