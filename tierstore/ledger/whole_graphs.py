"""Graphs of which everything stays on its accelerator, step after step: their scopes need no hooks. Pure.

NOTE [Hooks off]
Where all that a graph saves stays where it is, a pack has nothing to do, and it is not free. So a scope takes its hooks
off the thread, from within a pack, once the packs so far are those with which such a graph begins. Autograd then keeps
the rest by itself, as without a scope. What is expected of it is charged to the graph at once, as other graphs may come
meanwhile; at the end of the scope, what it was. That is until the graph is gone.

A graph is known by the nodes of its first packs. It is taken for one that stays as a whole after some steps in a row in
which its scope ended after the same number of nodes, nothing had left when backward began, and the bytes were as the
first packs tell: lengths that only show later tell nothing of the next step.

With the hooks off, nothing calls the store. A graph that only begins like a known one, and goes on for longer, stays as
a whole too. Its gradients are the same, but it may take more memory than it should. So there has to be room for such a
graph: half as much again within `device_bytes`, or, where that is "auto", as much again in the memory that the device
was never short of. At the end of the scope the number of nodes tells the other graph. Then the hooks stay on for some
steps, and for more of them each time. One step in many keeps them on in any case, and is looked at as a whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

NUM_COMPARED = 32
"""Packs that are compared with the known graphs."""
_NUM_STEPS = 8
"""As many steps in a row are looked at before the hooks go for the first time. After another graph: times `_GROWTH`."""
_GROWTH = 4
_NUM_OFF = 31
"""Steps without hooks between two that are looked at as a whole."""
_MAX_GRAPHS = 64
_TOLERATED = 1.5
"""As a factor: so much more may a step take than another of the same scale. There has to be room for that."""


class WholeGraph(NamedTuple):
    """A graph as it was when its scope ended: how many nodes forward had made from the first that saved, its packs, the
    bytes that they took on the device, and those of the storages of the first packs, which tell the scale."""

    num_nodes: int
    num_packs: int
    nbytes: int
    first_bytes: int

    @classmethod
    def of(cls, packs: Sequence[tuple[int, int]], num_nodes: int, nbytes: int) -> WholeGraph:
        return cls(num_nodes, len(packs), nbytes, _first_bytes(packs))

    def scaled(self, packs: Sequence[tuple[int, int]]) -> WholeGraph:
        """What is expected of a graph that begins with these packs."""
        return self._replace(nbytes=self.nbytes * _first_bytes(packs) // max(self.first_bytes, 1))


class _Steps:
    """What is known of the graphs with the same first nodes. `num_seen`: steps in a row that were alike; so many as
    `num_needed` are wanted. `num_off`: steps from now on that need no hooks."""

    __slots__ = ("graph", "num_needed", "num_off", "num_seen")

    def __init__(self, graph: WholeGraph) -> None:
        self.graph = graph
        self.num_seen, self.num_needed, self.num_off = 0, _NUM_STEPS, 0


class WholeGraphs:
    """The graphs that stayed as a whole: see NOTE [Hooks off]. Packs are (node, bytes of the storage).

    Any thread may call it: of two that do so at once, one may do so in vain."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, _Steps] = OrderedDict()

    def saw(self, packs: Sequence[tuple[int, int]], graph: WholeGraph) -> None:
        """All of a graph with these packs has stayed until its backward began."""
        key = _key(packs)
        steps = self._known[key] = self._known.pop(key, _Steps(graph))  # the latest, last
        expected = steps.graph.scaled(packs)
        least, most = sorted((expected.nbytes, graph.nbytes))
        is_alike = expected[:2] == graph[:2] and most <= _TOLERATED * least
        steps.num_seen = steps.num_seen + 1 if is_alike else 1
        steps.num_off = _NUM_OFF
        if not is_alike or graph.nbytes >= expected.nbytes:
            steps.graph = graph  # of those that are alike, the one that takes most
        while len(self._known) > _MAX_GRAPHS:
            self._known.popitem(last=False)

    def expected(self, packs: Sequence[tuple[int, int]]) -> WholeGraph | None:
        """The known graph that begins with these packs, as large as they tell; None: the hooks are to stay on."""
        steps = self._known.get(_key(packs))
        if steps is None or steps.num_seen < steps.num_needed:
            return None
        if not steps.num_off:  # look at this one
            steps.num_seen = steps.num_needed - 1
            return None
        return steps.graph.scaled(packs)

    def has_any(self) -> bool:
        """Whether a scope may be of a graph that needs no hooks, before it has packed anything."""
        return any(steps.num_seen >= steps.num_needed for steps in list(self._known.values()))

    def begin_again(self, packs: Sequence[tuple[int, int]]) -> None:
        """Something of a graph with these packs has left, or would have: it is expected again after some steps."""
        steps = self._known.get(_key(packs))
        if steps is not None:
            steps.num_seen = 0

    def went(self, packs: Sequence[tuple[int, int]], *, is_another: bool) -> None:
        """A scope whose hooks were off has ended. `is_another`: of a graph that only begins like the known one."""
        steps = self._known.get(_key(packs))
        if steps is None:
            return
        steps.num_off -= steps.num_off > 0
        if is_another:
            steps.num_seen, steps.num_needed = 0, steps.num_needed * _GROWTH


def _key(packs: Sequence[tuple[int, int]]) -> int:
    first_node, _ = packs[0]
    return hash(tuple([node - first_node for node, _ in packs[:NUM_COMPARED]]))


def _first_bytes(packs: Sequence[tuple[int, int]]) -> int:
    return sum([nbytes for _, nbytes in packs[:NUM_COMPARED]])
