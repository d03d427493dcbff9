"""A scope takes its hooks off the thread: see NOTE [Hooks off] in `ledger/whole_graphs.py`."""

from __future__ import annotations

import torch

from tierstore.ledger.whole_graphs import NUM_COMPARED, WholeGraph
from tierstore.residency.torch_names import current_backward
from tierstore.store.tier_store import TierStore

from .order import PackLog
from .thread_hooks import RemovedHooks, owner_of_hooks, put_back, take_off_all

_NONE = -1
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
        self._was_tried = self._were_off = self._ran_out = False
        self._expected: WholeGraph | None = None
        self.removed: RemovedHooks = []

    def take_off(self, scope: object, log: PackLog, nbytes: int, device: torch.device) -> None:
        """Take the hooks of `scope` off, if the graph is one that stays as a whole, and there are no hooks around them.

        To be called from within a pack of `nbytes`, once there are `NUM_COMPARED`; what it finds the first time holds.
        In a backward they stay: when its thread is done, PyTorch puts back the hooks with which it has begun."""
        if self._was_tried:
            return
        self._was_tried = True
        expected = self._graphs.expected(log.packs)
        if expected is None or log.plan is not None or owner_of_hooks() is not scope or current_backward() != _NONE:
            return
        take_off_all(self.removed)
        if len(self.removed) == 1:
            if self._gets_room(log, expected.nbytes, log.bytes_on_device() + nbytes, device):
                self._expected = expected
                log.order.is_whole = False
                return
            self._graphs.begin_again(log.packs)
        put_back(self.removed)

    def _gets_room(self, log: PackLog, nbytes: int, seen_bytes: int, device: torch.device) -> bool:
        room_bytes: int | None = nbytes + nbytes // 2
        if self._is_automatic:
            spare_bytes, room_bytes = self._residency.streams.spare_bytes(device), None
            if spare_bytes is None or spare_bytes < nbytes:
                return False
        return self._residency.saving.expect_unseen(log, max(0, nbytes - seen_bytes), room_bytes)

    def leave(self, error: BaseException | None) -> None:
        """The scope is left, and its hooks are off: see to it that those around them are as they were.

        `error`: with which it is left. One of a device that has too little memory is told why it may have."""
        self._were_off = True
        del self.removed[0]
        put_back(self.removed)  # there are some only if an interrupt came while all were off
        self._ran_out = isinstance(error, torch.OutOfMemoryError)
        if error is not None and self._ran_out:
            error.add_note(_ADVICE)

    def kept_whole(self, log: PackLog, next_node: int) -> WholeGraph | None:
        """What autograd has kept of the graph of which the scope has packed `log`, and nothing else, and then taken its
        hooks off; None: they were not off, or it is another graph. `next_node`: that has not been made."""
        expected = self._expected
        return expected if expected is not None and next_node - log.packs[0][0] == expected.num_nodes else None

    def end(self, log: PackLog, next_node: int, *, failed: bool) -> None:
        """The scope has ended. `log` and `next_node` as above."""
        packs = log.packs
        if self._expected is not None:
            if not failed or self._ran_out:
                self._graphs.went(packs, is_another=failed or self.kept_whole(log, next_node) is None)
        elif not (failed or self._were_off) and len(packs) >= NUM_COMPARED:  # off: an interrupt was caught meanwhile
            log.ended_with = WholeGraph.of(packs, next_node - packs[0][0], log.bytes_on_device())
