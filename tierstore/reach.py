"""How far ahead of backward to fetch, where nobody has said. Pure: what was asked for and read in, an answer out.

NOTE [No farther than it takes]
What is read earlier than it has to be gains no time, and it has to lie somewhere: in the staging window (*near*), or in
what backward has freed of the host budget as well (*far*). There it takes fresh pages, which the kernel clears, and
which the host of a virtual machine may have to find first.

Whether near is near enough is seen in the last backward of the same graph, in bytes: while a read was under way,
backward asked for so many. If that was never more than the staging window holds, what is read as soon as there is room
for it there comes in time, and so near it is the next time. Where it was more, or backward had to wait for the disk, or
nothing is known, far: a drive that just keeps up must not stand still, least of all while backward uses up what stayed.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["Reach", "Reaches"]

_MAX_GRAPHS = 64


class Reach:
    """Of one backward.

    Attributes:
        is_far: what is fetched ahead may take all room that there is; else the staging window alone.
        has_waited: backward, for bytes on disk.
        most_bytes: that it asked for while one read was under way.
    """

    def __init__(self) -> None:
        self.is_far = True
        self.has_waited = False
        self.most_bytes = 0
        self._asked_bytes = 0
        self._began_at: dict[int, int] = {}  # by the record's key, in bytes asked for

    def asked_for(self, nbytes: int) -> None:
        """Backward asks for a record of so many bytes, wherever they are."""
        self._asked_bytes += nbytes

    def wait(self) -> None:
        """Backward waits for bytes on disk."""
        self.is_far = self.has_waited = True

    def read_began(self, key: int) -> None:
        """The record is being fetched ahead."""
        self._began_at[key] = self._asked_bytes

    def read_ended(self, key: int) -> None:
        """The record is there, or was fetched for somebody else."""
        began_at = self._began_at.pop(key, self._asked_bytes)
        self.most_bytes = max(self.most_bytes, self._asked_bytes - began_at)


class Reaches:
    """For which graphs, by signature, near is enough. Single operations on a dictionary, so any thread may call it."""

    def __init__(self) -> None:
        self._near: OrderedDict[int, None] = OrderedDict()

    def is_near(self, signature: int) -> bool:
        """The graph comes."""
        return signature in self._near

    def note(self, signature: int, reach: Reach, staging_bytes: int) -> None:
        """The graph has come and gone."""
        if reach.has_waited or reach.most_bytes > staging_bytes:
            self._near.pop(signature, None)
            return
        self._near[signature] = None
        while len(self._near) > _MAX_GRAPHS:
            try:
                self._near.popitem(last=False)
            except KeyError:
                pass  # another thread was quicker
