"""How far ahead of backward to fetch, if the user has not said. Pure: requests and reads in, an answer out.

NOTE [No farther than it takes]
Reading earlier than necessary gains no time, and the bytes need room: in the staging window (*near*), or also in the
part of the host budget that backward has freed (*far*). There they take fresh pages, which the kernel clears, and which
the host of a virtual machine may have to find first.

The last backward of the same graph shows whether near is enough: how many bytes backward asked for while one read was
under way. If that was never more than the staging window holds, a read that begins as soon as staging has room comes in
time, so the next backward reads near. It reads far if that was more, if backward had to wait for the disk, or if
nothing is known: a drive that just keeps up must never be idle, least of all while backward uses the bytes that stayed.
"""

from __future__ import annotations

from collections import OrderedDict

_MAX_GRAPHS = 64


class PrefetchDepth:
    """The prefetch depth of one backward, and the figures from which the next one's is found.

    Attributes:
        is_far: bytes that are fetched ahead may take room of both windows; else of staging alone.
        has_waited: backward has waited for bytes on disk.
        most_bytes: the most bytes that backward asked for while one read was under way.
        asked_bytes: how many it has asked for so far.
    """

    def __init__(self) -> None:
        self.is_far = True
        self.has_waited = False
        self.most_bytes = 0
        self.asked_bytes = 0
        self._began_at: dict[int, int] = {}  # by the record's key: bytes asked for when its read began

    def wait(self) -> None:
        """Note that backward waits for bytes on disk; from now on it is fetched far ahead."""
        self.is_far = self.has_waited = True

    def read_began(self, key: int) -> None:
        self._began_at[key] = self.asked_bytes

    def read_ended(self, key: int) -> None:
        """Note that the record's read has ended; without effect if it was not read for this backward."""
        began_at = self._began_at.pop(key, self.asked_bytes)
        self.most_bytes = max(self.most_bytes, self.asked_bytes - began_at)


class PrefetchDepths:
    """The graphs, by signature, for which near is enough. Any thread: it uses single operations on a dictionary."""

    def __init__(self) -> None:
        self._near: OrderedDict[int, None] = OrderedDict()

    def is_near(self, signature: int) -> bool:
        return signature in self._near

    def note(self, signature: int, depth: PrefetchDepth, staging_bytes: int) -> None:
        if depth.has_waited or depth.most_bytes > staging_bytes:
            self._near.pop(signature, None)
            return
        self._near[signature] = None
        while len(self._near) > _MAX_GRAPHS:
            try:
                self._near.popitem(last=False)
            except KeyError:
                pass  # another thread was quicker
