"""A simulated record, and the log of a simulated graph: as much of `handle.py`, `noted.py` and `hooks/order.py` as the
rules look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from ..ledger.graph_order import Budgets, GraphOrder, Packs
from ..ledger.lookahead import LearnedOrders
from ..ledger.plan import Place, Plan
from ..ledger.state import MOVES, State
from ..ledger.windows import Window
from .workload import Saved


class SimulatedRecord:
    """The bytes of one storage. Attributes as `RuledRecord`'s, and:

    Attributes:
        saved: the index of the first saved tensor that is a view of it.
        users: the indices of those that the graph has not let go of.
        is_in_place: its bytes have not left the storage that autograd saved.
        is_read: its bytes have been read: no other saved tensor becomes a view of it.
    """

    device = ready = None
    has_device_bytes = False

    def __init__(self, key: int, index: int, saved: Saved, log: GraphLog) -> None:
        self.key = key
        self.saved = index
        self.log = log
        self.nbytes = self.span_bytes = saved.nbytes
        self.kind = saved.kind
        self.slot: object = None
        self.held: object = None
        self.is_in_place = True
        self.users = {index}
        self.state = State.PENDING
        self.window: Window | None = None
        self.charged_bytes = 0
        self.worth = key
        self.place: Place | None = None
        self.stored_bytes = 0
        self.codec = ""
        self.demanded = 0
        self.num_members = 1
        self.cause: BaseException | None = None
        self.shared = self.forced = self.wanted = self.urgent = self.fetched = self.is_read = False

    @property
    def is_alive(self) -> bool:
        return bool(self.users)

    def keep_alive(self) -> SimulatedRecord | None:
        return self if self.users else None

    def become_group(self, indices: Iterable[int], nbytes: int) -> None:
        self.users = set(indices)
        self.num_members = len(self.users)
        self.nbytes = self.span_bytes = nbytes
        self.is_in_place, self.is_read, self.slot = False, True, self

    def move(self, to: State) -> None:
        if to not in MOVES[self.state]:
            raise RuntimeError(f"record {self.key}: illegal move {self.state.name} → {to.name}")
        self.state = to


class GraphLog:
    """What one step has packed so far, and what backward does with it. See `NotedLog` and `PackLog`.

    `first_key`: of the first tensor's record. As in the store, each tensor that is noted takes one. `orders`: None: the
    reverse-topological order is followed.

    Attributes:
        records: of each tensor that was packed; None while it is only noted.
        noted: the indices of those that are only noted, dead ones included. `num_noted`: how many there are of each
            storage, by its first tensor. `num_sorted`: the number of packs when they were last sorted into groups.
        let_go: the indices of those that the graph has let go of.
        held: the storages that somebody else holds for now, by the index of their first tensor.
        newest_node: which saved last; its kernel may still have to run.
        taken: the storage, by its first tensor, of a noted tensor that autograd is just taking; it holds that too.
        plan: where the records belong, if the packs so far are those of a graph that is known.
    """

    def __init__(
        self,
        saved: Sequence[Saved],
        first_key: int,
        lookahead_bytes: int | None,
        orders: LearnedOrders | None,
        budgets: Budgets,
    ) -> None:
        self.saved = saved
        self.first_key = first_key
        self.records: list[SimulatedRecord | None] = []
        self.noted: dict[int, None] = {}
        self.num_sorted = 0
        self.num_noted = Counter[int]()
        self.let_go: set[int] = set()
        self.held: set[int] = set()
        self.newest_node = -1
        self.is_settled = False
        self.plan: Plan | None = None
        self.order = GraphOrder[SimulatedRecord](
            orders, budgets, lookahead_bytes, budgets.host_bytes + budgets.staging_bytes
        )
        self.is_started = False
        self.taken: int | None = None
        self._by_root: dict[int, SimulatedRecord] = {}
        self._num_alive = Counter[int]()  # as `num_noted`, without those that the graph has let go of

    @property
    def next_key(self) -> int:
        return self.first_key + len(self.records)

    # --- forward ------------------------------------------------------------------------------------------------

    def root_of(self, index: int) -> int:
        """The first saved tensor of the same storage."""
        root = self.saved[index].record
        return index if root is None else root

    def note(self, index: int) -> int:
        """Returns the bytes that are noted now, and were not."""
        root = self.root_of(index)
        self.noted[index] = None
        self.num_noted[root] += 1
        self._num_alive[root] += 1
        self.newest_node, self.is_settled = self.saved[index].node, False
        self.records.append(None)
        return self.saved[root].nbytes if self.num_noted[root] == 1 else 0

    def follow_plan(self, index: int) -> None:
        saved = self.saved[index]
        if self.order.follow(index, saved.node - self.saved[0].node, saved.nbytes):
            self.plan = self.order.plan

    def settled(self) -> Iterator[int]:
        """What of the noted tensors may be read. They may be taken out meanwhile."""
        for index in sorted(self.noted):
            if self.is_settled or self.saved[index].node != self.newest_node:
                yield index

    def take_out(self, index: int) -> int:
        """A tensor is noted no longer. Returns the bytes that are not noted any more."""
        root = self.root_of(index)
        del self.noted[index]
        if index not in self.let_go:
            self._num_alive[root] -= 1
        self.num_noted[root] -= 1
        if self.num_noted[root]:
            return 0
        del self.num_noted[root]
        return self.saved[root].nbytes

    def release(self, index: int) -> None:
        self.let_go.add(index)
        if index in self.noted:
            self._num_alive[self.root_of(index)] -= 1

    def is_held(self, index: int) -> bool:
        return self.saved[index].is_shared or self.root_of(index) in self.held

    def is_sole_owner(self, record: SimulatedRecord) -> bool:
        """Whether only records hold its storage, and it is not gone itself.

        A tensor that is only noted holds it too, and so does one that is just being handed over.
        """
        root = self.root_of(record.saved)
        return bool(record.users) and not (self.is_held(record.saved) or self._num_alive[root] or root == self.taken)

    def unread_record_of(self, index: int) -> SimulatedRecord | None:
        """The record that tensor `index` is a view of, if there is one whose bytes have not been read."""
        record = self._by_root.get(self.root_of(index))
        return None if record is None or record.is_read or not record.users else record

    def may_join(self, indices: Sequence[int]) -> bool:
        """Whether these noted tensors may join a group: nobody else holds their storage, and it has no record."""
        root = self.root_of(indices[0])
        is_ours = not (self.is_held(indices[0]) or root in self._by_root or root == self.taken)
        return is_ours and self._num_alive[root] == len(indices)

    def may_join_later(self, indices: Iterable[int]) -> bool:
        return all(index >= self.num_sorted and self.root_of(index) not in self._by_root for index in indices)

    def place_of(self, index: int) -> Place | None:
        return None if self.plan is None else self.plan.place_of(index)

    def has_record_in_place(self, index: int) -> bool:
        record = self._by_root.get(self.root_of(index))
        return record is not None and record.is_in_place and record.is_alive

    def make_record(self, index: int) -> SimulatedRecord:
        record = SimulatedRecord(self.first_key + index, index, self.saved[index], self)
        self._by_root[self.root_of(index)] = record
        return record

    def place(self, index: int, record: SimulatedRecord) -> None:
        if self.plan is not None:
            self.plan.place(record, index, self.first_key)

    # --- backward -----------------------------------------------------------------------------------------------

    def come_in(self, index: int, record: SimulatedRecord) -> None:
        self.records[index] = record
        self.order.come_in((index,), record)

    def look_ahead(self) -> None:
        """Something has left its place: from now on what will be asked for is brought back before."""
        nodes, sizes = [saved.node for saved in self.saved], [saved.nbytes for saved in self.saved]
        on_device = [False] * len(self.records)
        self.order.look_ahead(Packs(nodes, sizes, self.records, list(self._storages()), on_device), self.records)

    def end(self) -> None:
        ending = self.order.ending(None)
        if ending is not None:
            ending()

    def _storages(self) -> Iterator[int]:
        """For each pack, a number that it shares with other packs of the same storage. See `PackLog`."""
        num_saved = len(self.saved)
        for index, record in enumerate(self.records):
            if record is not None and record.num_members > 1:
                yield 2 * num_saved + self.root_of(index)
            elif record is not None:
                yield record.saved
            elif index in self.let_go:
                yield num_saved + index
            else:
                yield -1 - self.root_of(index)
