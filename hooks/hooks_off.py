"""A scope takes its hooks off the thread: see NOTE [Hooks off] in `ledger/whole_graphs.py`."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from tierstore.ledger.on_device import UnseenGraph
from tierstore.ledger.whole_graphs import NUM_COMPARED, TOLERATED, Nodes, WholeGraph, nodes_of
from tierstore.store.tier_store import TierStore
from tierstore.tensors.torch_names import current_backward, top_hooks

from .order import LogOptions, PackLog, current_log
from .select import Kept, KeptTensor, keep
from .thread_hooks import RemovedHooks, owner_of_hooks, put_back, take_off_all

_NONE = -1
_ADVICE = (
    "all that such a graph saves has stayed on the device so far, so the store has not looked at what this one saved. "
    "In the next steps it does, and what has no room leaves"
)


class _EarlyKept(KeptTensor):
    """One of the first tensors that a graph has saved, so one of the last that backward gives back. They keep what the
    graph's bytes are charged to."""

    graph: UnseenGraph


class HooksOff:
    """Whether one scope may do without hooks, and whether it does. Only the scope's thread calls it.

    Attributes:
        small_bytes: as `PackLog.small_bytes`, as long as the scope has no log.
        removed: the scope's hooks, where they are off.
        log: of the graph that the scope has begun with, where it was not expected, or is another. None: it has none.
        has_inner: a scope inside this one packs into that log too, and ends before this one.
    """

    def __init__(self, store: TierStore, options: LogOptions) -> None:
        self._store = store
        self._residency = store._core.residency
        self._graphs = store._core.whole_graphs
        self._options = options
        self._is_automatic = options.device_bytes is None
        self._nodes: Nodes = ()
        self._expected: WholeGraph | None = None
        self._device: torch.device | None = None
        self._packs: list[tuple[int, int]] = []  # of what was kept as the first of the graph that is expected
        self._nbytes = self._known_bytes = 0
        self._graph: UnseenGraph | None = None
        self._storages: set[int] = set()
        self.has_inner = False
        self._went = self._were_off = self._ran_out = False
        self.small_bytes = 0
        self.removed: RemovedHooks = []
        self.log: PackLog | None = None

    def expects(self) -> bool:
        """Whether the scope begins with a known graph, as far as can be told; then `keep` is to be asked.

        In a backward its hooks stay: when that is done, PyTorch puts back those with which its thread has begun."""
        found = self._graphs.next_whole()
        if found is None or current_backward() != _NONE or self._residency.guard.closed is not None:
            return False
        self._nodes, self._expected = found
        self._known_bytes = int(self._expected.first_bytes * TOLERATED)
        return True

    def keep(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        node: int,
        nbytes: int,
        device: torch.device | None,
        scope: object,
    ) -> KeptTensor | Kept | None:
        """What the graph is to hold of the next tensor that is saved, if it may be one of the graph that is expected.
        None: it is not, or there is no room for it. `storage` is the tensor's, and has `nbytes`.

        Once all packs were compared, the hooks of `scope` are taken off. To be called from within a pack."""
        packs = self._packs
        num_packs = len(packs)
        if not self._nodes or device is None or num_packs == NUM_COMPARED:
            return None
        if not num_packs:
            if current_log(self._store, self._options) is not None:  # of a scope inside this one
                return None
            self._device = device
        elif node - packs[0][0] != self._nodes[num_packs]:
            self._nodes = ()
            return None
        total_bytes = self._nbytes if storage._cdata in self._storages else self._nbytes + nbytes
        if total_bytes > self._known_bytes and not self._have_room(total_bytes):
            self._graphs.begin_again(self._nodes)
            return None
        if self._graph is None:
            self._graph = _begin_unseen(self._store._core)
        self._nbytes = total_bytes
        self._storages.add(storage._cdata)
        packs.append((node, nbytes))
        held = keep(tensor)
        if isinstance(held, KeptTensor):
            held = early = _EarlyKept(held)
            early.graph = self._graph
        if num_packs + 1 == NUM_COMPARED:
            self._take_off(scope)
        return held

    def begin(self, log: PackLog) -> bool:
        """The graph is not the one that was expected, or has no room: what follows is packed into `log`.

        False: the hooks stay on, and something was kept before, so nothing can be learned of the graph."""
        self.log = log
        log.small_bytes = self.small_bytes
        if not self._packs:
            return True
        log.order.is_whole = False
        if self._went:
            return True
        self._charge()
        self._graphs.came(self._nodes or None)
        return False

    def _have_room(self, nbytes: int) -> bool:
        """For so much, which is more than is known."""
        if self._is_automatic:
            spare_bytes = None if self._device is None else self._residency.streams.spare_bytes(self._device)
            return spare_bytes is not None and spare_bytes >= nbytes
        saving = self._residency.saving
        if not saving.fits_on_device(nbytes):
            saving.settle()  # graphs may have gone
        return saving.fits_on_device(nbytes)

    def _take_off(self, scope: object) -> None:
        if self._expected is None or owner_of_hooks() is not scope or current_backward() != _NONE:
            return
        take_off_all(self.removed)
        self._expected = self._expected.scaled(self._packs)
        self._went = self._gets_room(self._expected)
        if not self._went:
            self._graphs.begin_again(self._nodes)
            put_back(self.removed)

    def _gets_room(self, expected: WholeGraph) -> bool:
        if self._graph is None or self._device is None:
            return False
        room_bytes: int | None = expected.nbytes + expected.nbytes // 2
        if self._is_automatic:
            spare_bytes, room_bytes = self._residency.streams.spare_bytes(self._device), None
            if spare_bytes is None or spare_bytes < expected.nbytes:
                return False
        return self._residency.saving.leave_unseen(self._graph, expected.num_packs, expected.nbytes, room_bytes)

    def _charge(self) -> None:
        """What was kept stays, and no more of the graph."""
        if self._graph is not None:
            self._residency.saving.leave_unseen(self._graph, len(self._packs), self._nbytes, None)

    def leave(self, error: BaseException | None) -> None:
        """The scope is left, and its hooks are off: see to it that those around them are as they were.

        `error`: with which it is left. One of a device that has too little memory is told why it may have."""
        self._were_off = True
        del self.removed[0]
        put_back(self.removed)  # there are some only if an interrupt came while all were off
        self._ran_out = isinstance(error, torch.OutOfMemoryError)
        if error is not None and self._ran_out:
            error.add_note(_ADVICE)

    def end(self, next_node: int, *, failed: bool) -> None:
        """The scope has ended. `next_node`: has not been made. `failed`: by an exception."""
        if self._went and self._expected is not None:
            if not failed or self._ran_out:
                is_another = failed or next_node - self._packs[0][0] != self._expected.num_nodes
                self._graphs.went(self._nodes, is_another=is_another)
                self._graphs.came(self._nodes)
        elif self.log is None:
            self._charge()
            if self._packs and not failed:
                self._graphs.came(None)
        elif not (failed or self._were_off or self.log.is_empty()):  # off: an interrupt was caught meanwhile
            self._look_at(self.log, next_node)
        self._graph = None

    def _look_at(self, log: PackLog, next_node: int) -> None:
        packs, nodes = log.packs, None
        if len(packs) >= NUM_COMPARED and not self.has_inner:
            nodes = nodes_of(packs)
            log.ended_with = WholeGraph.of(packs, next_node - packs[0][0], log.bytes_on_device())
        self._graphs.came(nodes)


def may_be_of_a_whole_graph(store: TierStore, log: PackLog | None) -> bool:
    """Whether a scope that begins may save a graph of its own, as a whole. `log`: which this thread goes on with.

    Not inside other hooks, and not where something of the graph was saved before."""
    around = owner_of_hooks()
    outer = getattr(around, "hooks_off", None)
    if outer is not None and log is not None and outer.log is log:
        outer.has_inner = True
    unseen = store._core.of_thread.__dict__.get("unseen")
    return top_hooks(False) is None and (log is None or log.is_empty()) and (unseen is None or unseen() is None)


def _begin_unseen(core: Any) -> UnseenGraph:
    graph = UnseenGraph()
    core.use.note_graph(graph)
    core.of_thread.unseen = weakref.ref(graph)
    return graph
