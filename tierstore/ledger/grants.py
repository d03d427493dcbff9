"""Packs that take no lock.

NOTE [Grants]
Most packs find nothing to do: there is room, nobody waits, no error is to be told. So a pack that took the store's lock
and found that, leaves its log a *grant* for the packs after it: so many bytes, charged in advance as if they were
tracked, and so many packs. While it lasts, a pack of the log's thread only takes its bytes out of the grant and appends
itself to the grant's *journal*. Every call of the store that may change how much room there is, or what a pack has to
do, ends all grants (`Books.end_grants`): each begins with a drain (`Ledger.drain`). It then *enters* the journals, as
`TrackedTensors.add` would have done one by one. So nobody under the lock sees a log without its latest packs. The
charge is an upper bound, as each pack takes its bytes, whichever storage they share.

On an accelerator a grant is for one device and one stream, and for tensors that all stay there, or all leave in the
group or batch that is being gathered. It takes only room that was not lent to copies. Where the log follows a plan, the
grant ends where the plan decides otherwise. The packs are compared with the plan when the log's thread has entered them
(`GraphLog.follow_entered`): a graph that differs is found by as many packs later.

A grant is ended (`GraphLog.grant` is set to None) before its journal is read, and a pack appends before it looks
whether its grant is still there. So of two that meet, at least one sees the other. A pack that finds its grant ended
takes the lock, and there its index tells whether it was entered; if not, the tensor is packed again. An interrupt at
any point leaves an entry of a tensor that died, or none. Dead tensors are entered as packs, without a tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

Entry = tuple[Any, tuple[int, int]]
"""Weak reference to a saved tensor (on an accelerator a `DeviceReference`), and (its node, bytes of its storage)."""
SHARE_GRANTED = 2
"""As a divisor: of the room that is left. Other threads have grants too."""
MOST_PACKS = 256
"""By one grant: they are entered in one go, under the lock."""


class OnDevice(NamedTuple):
    """What a grant on an accelerator is for: its stream `stream`, and what `leaves` it or, if that is False, stays.

    `largest_bytes`: of a storage."""

    device: Any
    stream: Any
    leaves: bool
    largest_bytes: int


class Grant:
    """What the packs of one log may do without the lock. Only the log's thread takes from it.

    Attributes:
        nbytes: what was charged; `room_bytes`, `num_left`: what is left of it, and how many packs.
        largest_bytes: the most that one of them may take.
        device, stream, leaves: as of `OnDevice`; None, None and False: it is for host memory.
        journal: what was packed by it; `append`: to that.
    """

    __slots__ = ("append", "device", "journal", "largest_bytes", "leaves", "nbytes", "num_left", "room_bytes", "stream")

    def __init__(self, nbytes: int, num_packs: int = MOST_PACKS, on_device: OnDevice | None = None) -> None:
        self.nbytes = self.room_bytes = nbytes
        self.num_left = num_packs
        self.device: Any = None
        self.stream: Any = None
        self.leaves, self.largest_bytes = False, nbytes
        if on_device is not None:
            self.device, self.stream, self.leaves, self.largest_bytes = on_device
        self.journal: list[Entry] = []
        self.append = self.journal.append
