"""Graphs of which everything stays on its accelerator, step after step: their scopes need no hooks. Pure.

NOTE [Hooks off]
Where all that a graph saves stays where it is, a pack has nothing to do, and it is not free. So a scope takes its hooks
off the thread, from within a pack, once the packs so far are those with which such a graph begins. Autograd then keeps
the rest by itself, as without a scope. What is expected of the graph is charged to it at once, as other graphs may come
meanwhile; at the end of the scope, what it was. That is until the graph is gone.

A graph is known by the nodes of its first packs. It is taken for one that stays as a whole after some steps in a row in
which its scope ended after the same number of nodes, nothing had left when backward began, and the bytes were as the
first packs tell: lengths that only show later tell nothing of the next step.

A scope *expects* such a graph where it has come after the one before it some times in a row. Then it has no log yet,
and its first tensors are kept where they are, as a parameter is. If one is not of that graph, a log begins with it.
What was kept before stays, and the graph is charged with that: a few tensors, in one step. A scope inside other hooks
expects nothing, nor does one that saves more of a graph which an earlier scope has begun.

With the hooks off, nothing calls the store. A graph that only begins like a known one, and goes on for longer, stays as
a whole too. Its gradients are the same, but it may take more memory than it should. So there has to be room for such a
graph: half as much again within `device_bytes`, or, where that is "auto", as much again in the memory that the device
was never short of. At the end of the scope the number of nodes tells the other graph. Then the hooks stay on for some
steps, and for more of them each time. One step in many keeps them on in any case, and is looked at as a whole."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

NUM_COMPARED = 16
"""Packs that are compared with the known graphs."""
Nodes = tuple[int, ...]
"""The nodes of so many packs, the first of which is 0: they tell a graph."""
_NUM_STEPS = 8
"""As many steps in a row are looked at before the hooks go for the first time. After another graph: times `_GROWTH`."""
_GROWTH = 4
_NUM_OFF = 63
"""Steps without hooks between two that are looked at as a whole."""
_NUM_IN_A_ROW = _NUM_STEPS - 1
"""So many times one graph comes after another before it is expected there."""
_MAX_GRAPHS = 64
TOLERATED = 1.5
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

    Any thread may call it: of two that do so at once, one may do so in vain.

    Attributes:
        latest: the graph of the scope that ended last; None: not known.
    """

    def __init__(self) -> None:
        self.latest: Nodes | None = None
        self._known: OrderedDict[Nodes, _Steps] = OrderedDict()
        self._came_after: OrderedDict[Nodes | None, tuple[Nodes | None, int]] = OrderedDict()

    def saw(self, packs: Sequence[tuple[int, int]], graph: WholeGraph) -> None:
        """All of a graph with these packs has stayed until its backward began."""
        nodes = nodes_of(packs)
        steps = self._known[nodes] = self._known.pop(nodes, _Steps(graph))  # the latest, last
        expected = steps.graph.scaled(packs)
        least, most = sorted((expected.nbytes, graph.nbytes))
        is_alike = expected[:2] == graph[:2] and most <= TOLERATED * least
        steps.num_seen = steps.num_seen + 1 if is_alike else 1
        steps.num_off = _NUM_OFF
        if not is_alike or graph.nbytes >= expected.nbytes:
            steps.graph = graph  # of those that are alike, the one that takes most
        _forget_oldest(self._known)

    def came(self, nodes: Nodes | None) -> None:
        """A scope of that graph has ended; None: it is not known of which."""
        before, self.latest = self.latest, nodes
        after, times = self._came_after.pop(before, (nodes, 0))
        self._came_after[before] = nodes, times + 1 if nodes == after else 1
        _forget_oldest(self._came_after)

    def next_whole(self) -> tuple[Nodes, WholeGraph] | None:
        """The graph that a scope may expect now; None: its hooks are to stay on."""
        nodes, times = self._came_after.get(self.latest, (None, 0))
        steps = None if nodes is None or times < _NUM_IN_A_ROW else self._known.get(nodes)
        if nodes is None or steps is None or steps.num_seen < steps.num_needed:
            return None
        if not steps.num_off:  # look at this one
            steps.num_seen = steps.num_needed - 1
            return None
        return nodes, steps.graph

    def begin_again(self, nodes: Nodes) -> None:
        """Something of that graph has left, or would have: it is expected again after some steps."""
        steps = self._known.get(nodes)
        if steps is not None:
            steps.num_seen = 0

    def went(self, nodes: Nodes, *, is_another: bool) -> None:
        """A scope whose hooks were off has ended. `is_another`: of a graph that only begins like the known one."""
        steps = self._known.get(nodes)
        if steps is None:
            return
        steps.num_off -= steps.num_off > 0
        if is_another:
            steps.num_seen, steps.num_needed = 0, steps.num_needed * _GROWTH


def nodes_of(packs: Sequence[tuple[int, int]]) -> Nodes:
    """Of a graph with these packs, of which there are enough."""
    first_node, _ = packs[0]
    return tuple([node - first_node for node, _ in packs[:NUM_COMPARED]])


def _first_bytes(packs: Sequence[tuple[int, int]]) -> int:
    return sum([nbytes for _, nbytes in packs[:NUM_COMPARED]])


def _forget_oldest(graphs: OrderedDict[Any, Any]) -> None:
    while len(graphs) > _MAX_GRAPHS:
        graphs.popitem(last=False)
