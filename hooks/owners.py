"""Who else holds what a graph has saved? Looked at for traces alone.

A store that has room never looks, and one that has none looks when it needs to. Whoever is to tell from a trace what a
smaller budget would have done needs to know from when on the bytes could have been taken away.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence

from tierstore.handle import State
from tierstore.layout import unseen_by_modes
from tierstore.ownership import is_sole_owner, num_owners
from tierstore.residency import Residency
from tierstore.tracing.events import Ours
from tierstore.tracing.recorder import Recorder

from .saved import SavedTensor

__all__ = ["OwnerWatch"]

_NUM_LOOKS_AT_NEW = 3
_NUM_OLD_PER_LOOK = 2


class OwnerWatch:
    """The storages of one traced graph that others held too when they were last looked at.

    It is looked before each pack and unpack: at what is new some times in a row, for most is let go of soon; at what is
    held for longer in turn. When a scope ends, and when backward begins, at everything. Any thread; takes the store's
    lock for some instructions, and keeps no tensor alive.

    Args:
        books: the store's.
        recorder, graph: whom to tell, and of which graph.
    """

    def __init__(self, books: Residency, recorder: Recorder, graph: int) -> None:
        self._books = books
        self._append = recorder.append
        self._graph = graph
        self._saved: dict[int, list[weakref.ref[SavedTensor]]] = {}  # by storage
        self._new: list[tuple[int, int]] = []  # storages, and how often each was looked at
        self._old: deque[int] = deque()
        self._is_asked = False

    @unseen_by_modes
    def add(self, saved: SavedTensor) -> None:
        """A tensor was packed."""
        storage = saved.storage_id or -saved.key
        with self._books.lock:
            if storage in self._saved:
                self._is_settled(storage)  # where the storage is gone, its number may be that of another
            if storage not in self._saved:
                self._saved[storage] = []
                self._new.append((storage, 0))
            self._saved[storage].append(weakref.ref(saved))

    def look(self) -> None:
        """Look at some of it."""
        if self._new or self._old:  # at most packs there is nothing: what they keep is none of ours
            self._look_at(_NUM_OLD_PER_LOOK)

    def look_at_all(self) -> None:
        """Look at all of it."""
        self._look_at(len(self._old))

    @unseen_by_modes
    def _look_at(self, num_old: int) -> None:
        with self._books.lock:
            self._look(num_old)

    def look_before_unpack(self) -> None:
        """Look at some of it; the first time, at all."""
        if self._is_asked:
            self.look()
        else:
            self._is_asked = True
            self.look_at_all()

    def _look(self, num_old: int) -> None:
        for _ in range(min(num_old, len(self._old))):
            storage = self._old.popleft()
            if not self._is_settled(storage):
                self._old.append(storage)
        new, self._new = self._new, []
        for storage, num_looks in new:
            if self._is_settled(storage):
                continue
            if num_looks + 1 < _NUM_LOOKS_AT_NEW:
                self._new.append((storage, num_looks + 1))
            else:
                self._old.append(storage)

    def _is_settled(self, storage: int) -> bool:
        """Whether nobody else holds it, which is told, or the graph has let go of it."""
        living = [saved for reference in self._saved.get(storage, ()) if (saved := reference()) is not None]
        if living and not _are_ours_alone(living):
            return False
        self._saved.pop(storage, None)
        at_ns = time.perf_counter_ns()
        for saved in living:
            self._append((Ours, at_ns, self._graph, saved.index))
        return True


def _are_ours_alone(living: Sequence[SavedTensor]) -> bool:
    """Whether nobody but the store holds the storage that these are views of. Under the store's lock."""
    num_noted = sum(1 for saved in living if saved.alias is not None)
    records = {saved.handle.record for saved in living if saved.handle is not None}
    pending = [record for record in records if record.state is State.PENDING]  # of others it was found out
    if num_noted:
        return num_owners(living[-1].storage_id) == num_noted + len(pending)
    return all(is_sole_owner(record) for record in pending)
