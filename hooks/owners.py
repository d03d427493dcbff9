"""From when on is each storage that a traced graph has saved the graph's alone?

As long as the store has room, it never looks who else holds a storage. But a trace should show what a smaller budget
would have done, and for that it has to tell from when on the bytes could have been taken. So a traced scope looks."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence

from tierstore.ledger.state import State
from tierstore.residency.layout import unseen_by_modes
from tierstore.residency.ownership import is_sole_owner, num_owners
from tierstore.residency.residency import Residency
from tierstore.residency.tracked import TrackedTensor
from tierstore.tracing.events import Ours
from tierstore.tracing.recorder import Recorder

_NUM_LOOKS_AT_NEW = 3
_NUM_OLD_PER_LOOK = 2


class OwnerWatch:
    """The recording of one traced graph: watches its storages that others hold too, until nobody else does.

    It looks at some of them before each pack and each unpack. Most are soon let go of, so each new one is looked at
    three times in a row; those that others hold for longer take turns. At the end of a scope, and when backward begins,
    all are looked at. For any thread. Takes the store's lock for some instructions, and keeps no tensor alive."""

    def __init__(self, residency: Residency, recorder: Recorder, graph: int) -> None:
        self._residency = residency
        self.recorder = recorder
        self._append = recorder.append
        self._graph = graph
        self._saved: dict[int, list[weakref.ref[TrackedTensor]]] = {}  # by storage
        self._new: list[tuple[int, int]] = []  # storages, and how often each was looked at
        self._old: deque[int] = deque()
        self._is_asked = False  # backward has begun

    def booked(self, index: int, record: int) -> None:
        """Saved tensor `index`, until now only tracked, has got the record of that key. Under the store's lock."""
        self.recorder.booked(self._graph, index, record)

    @unseen_by_modes
    def add(self, saved: TrackedTensor) -> None:
        storage = saved.storage_id or -saved.key
        with self._residency.lock:
            if storage in self._saved:
                self._is_done_with(storage)  # if that storage is gone, this may be another one of the same number
            if storage not in self._saved:
                self._saved[storage] = []
                self._new.append((storage, 0))
            self._saved[storage].append(weakref.ref(saved))

    def look(self) -> None:
        if self._new or self._old:  # before most packs there is none: those packs keep what is not ours to store
            self._look_at(_NUM_OLD_PER_LOOK)

    def look_at_all(self) -> None:
        self._look_at(len(self._old))

    def look_before_unpack(self) -> None:
        """The first time, looks at all of the storages."""
        if self._is_asked:
            self.look()
        else:
            self._is_asked = True
            self.look_at_all()

    @unseen_by_modes
    def _look_at(self, num_old: int) -> None:
        with self._residency.lock:
            for _ in range(min(num_old, len(self._old))):
                storage = self._old.popleft()
                if not self._is_done_with(storage):
                    self._old.append(storage)
            new, self._new = self._new, []
            for storage, num_looks in new:
                if self._is_done_with(storage):
                    continue
                if num_looks + 1 < _NUM_LOOKS_AT_NEW:
                    self._new.append((storage, num_looks + 1))
                else:
                    self._old.append(storage)

    def _is_done_with(self, storage: int) -> bool:
        """Whether to watch it no longer: nobody else holds it, which is recorded, or the graph has let go of it."""
        living = [saved for reference in self._saved.get(storage, ()) if (saved := reference()) is not None]
        if living and not _has_sole_owner(living):
            return False
        self._saved.pop(storage, None)
        at_ns = time.perf_counter_ns()
        for saved in living:
            self._append((Ours, at_ns, self._graph, saved.index))
        return True


def _has_sole_owner(living: Sequence[TrackedTensor]) -> bool:
    """Whether only the store holds the storage that these tensors are views of. Under the store's lock."""
    num_tracked = sum(1 for saved in living if saved.alias is not None)
    records = {saved.handle.record for saved in living if saved.handle is not None}
    pending = [record for record in records if record.state is State.PENDING]  # the others are known to be solely owned
    if num_tracked:
        return num_owners(living[-1].storage_id) == num_tracked + len(pending)
    return all(is_sole_owner(record) for record in pending)
