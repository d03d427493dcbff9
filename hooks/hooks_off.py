"""A scope takes its hooks off the thread: see NOTE [Hooks off] in `ledger/whole_graphs.py`."""

from __future__ import annotations

import torch

from tierstore.ledger.whole_graphs import NUM_COMPARED, WholeGraph
from tierstore.store.tier_store import TierStore

from .order import PackLog
from .thread_hooks import RemovedHooks, owner_of_hooks, put_back, take_off_all

_ADVICE = (
    "all that such a graph saves has stayed on the device so far, so the store has not looked at what this one saved. "
    "In the next steps it does, and what has no room leaves"
)


class HooksOff:
    """Whether one scope may do without hooks, and whether it does. Only the scope's thread calls it.

    `is_automatic`: its `device_bytes` is "auto". `removed`: its hooks, where they are off."""

    def __init__(self, store: TierStore, *, is_automatic: bool) -> None:
        self._residency = store._core.residency
        self._graphs = store._core.whole_graphs
        self._is_automatic = is_automatic
        self._was_tried = self._ran_out = False
        self._expected: WholeGraph | None = None
        self.removed: RemovedHooks = []

    def take_off(self, scope: object, log: PackLog, device: torch.device) -> None:
        """Take the hooks of `scope` off, if the graph is one that stays as a whole, and there are no hooks around them.

        To be called from within a pack, once there are `NUM_COMPARED`; what it finds the first time holds."""
        if self._was_tried:
            return
        self._was_tried = True
        expected = self._graphs.expected(log.packs)
        if expected is None or log.plan is not None or owner_of_hooks() is not scope:
            return
        if not self._has_room(expected.nbytes, device):
            self._graphs.has_no_room(log.packs)
        else:
            take_off_all(self.removed)
            if len(self.removed) == 1:
                self._expected = expected
            else:
                put_back(self.removed)

    def _has_room(self, nbytes: int, device: torch.device) -> bool:
        if not self._is_automatic:
            return self._residency.saving.fits_on_device(nbytes + nbytes // 2)
        spare_bytes = self._residency.streams.spare_bytes(device)
        return spare_bytes is not None and spare_bytes >= nbytes

    def leave(self, error: BaseException | None) -> None:
        """The scope is left, and its hooks are off: see to it that those around them are as they were.

        `error`: with which it is left. One of a device that has too little memory is told why it may have."""
        del self.removed[0]
        put_back(self.removed)  # there are some only if an interrupt came while all were off
        self._ran_out = isinstance(error, torch.OutOfMemoryError)
        if error is not None and self._ran_out:
            error.add_note(_ADVICE)

    def end(self, log: PackLog, next_node: int, *, failed: bool) -> None:
        """The scope has ended. `log`: all that it has packed, and nothing else. `next_node`: that has not been made."""
        packs, expected = log.packs, self._expected
        if not packs:
            return
        num_nodes = next_node - packs[0][0]
        seen_bytes = sum([nbytes for _, nbytes, _ in log.storages.values()])
        if expected is None:
            if not failed and len(packs) >= NUM_COMPARED:
                log.ended_with = WholeGraph.of(packs, num_nodes, seen_bytes)
        elif not failed:
            is_another = num_nodes != expected.num_nodes
            if not is_another:
                self._residency.saving.charge_unseen(log, expected.num_packs, max(0, expected.nbytes - seen_bytes))
            self._graphs.went(packs, is_another=is_another)
        elif self._ran_out:
            self._graphs.went(packs, is_another=True)
