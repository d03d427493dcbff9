"""The slots of the slab and their users: the store, copies of an accelerator, and holders of a tensor over a slot.

NOTE [A spare slot]
In backward, the room that a tensor leaves is taken by the next read at once, while the tensor itself is still
outstanding. When it dies, no room is free, but the read after that needs just such pages. Fresh ones would have to be
cleared by the kernel, which takes longer than the read of a fast drive. So the pages of one slot that was outstanding
are kept beyond the windows while something is on its way, as far as host leaves no room for them and staging is not
overdrawn, until something is to be written. A store may hold one tensor beyond its windows.

Where slots are the allocator's memory (`pools`), the slot that was freed last, if it is short, is kept for a read of
the same length, likewise until something is to be written: to ask for another makes a dozen calls, two of which let go
of the interpreter's lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from ..ledger.counters import Counters
from ..ledger.windows import HostWindows
from .slab import Slab, Slot, SlotWatch

_MOST_SPARE_BYTES = 2**30  # addresses, not memory: room for many slots
_LEAST_SPARE_BYTES = 2**27


class Slots:
    """Hands out slots of its `slab`, and takes each back when nobody uses its memory any more. Guarded by the store's
    lock.

    Its window `outstanding` is charged here; the unused bytes of `host` and `staging` may be kept as free pages.
    `uncharged_bytes`: how many bytes are in memory, but not charged to `host` yet. `pools`: see `Slab`."""

    def __init__(
        self,
        windows: HostWindows,
        size_bytes: int,
        uncharged_bytes: Callable[[], int],
        spare_bytes: int | None = None,
        counters: Counters | None = None,
        *,
        pools: bool = False,
    ) -> None:
        if spare_bytes is None:
            spare_bytes = min(max(size_bytes, _LEAST_SPARE_BYTES), _MOST_SPARE_BYTES)
        self.slab = Slab(size_bytes, spare_bytes, pools=pools)
        self._windows = windows
        self._uncharged_bytes = uncharged_bytes
        self._counters = Counters() if counters is None else counters
        self._spare_bytes = 0  # see NOTE [A spare slot]
        self.returned: deque[SlotWatch] = deque()  # see NOTE [No finalizers] in `remains.py`
        self._handed_out: set[Slot] = set()  # keeps their watches alive

    def note_copy(self, slot: Slot) -> bool:
        """Count a copy to or from the slot. False: later copies will be faster, since the slab is being pinned.

        For a slot that is not pinned, the host waits, and with it compute."""
        if self.slab.is_pinned(slot):
            return True
        self._counters.pageable_copy_bytes += slot.nbytes
        return not self.slab.is_being_pinned

    def hand_out(self, slot: Slot, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        self._handed_out.add(slot)
        return slot.as_tensor(self.returned.append, dtype)

    def free_when_unused(self, slot: Slot) -> None:
        """Give up the store's use of the slot: it is freed now, or outstanding for as long as somebody else uses it."""
        if slot.watch is None or slot.returned:
            self.free(slot)
        else:
            slot.outstanding = True
            self._windows.outstanding.used_bytes += slot.nbytes

    def take_back(self) -> None:
        """Free the slots whose last tensor has died, if the store does not use them either."""
        while self.returned:
            slot = self.returned.popleft().slot
            slot.returned = True
            if slot.outstanding:
                self._windows.outstanding.used_bytes -= slot.nbytes
                self._spare_bytes = slot.size_bytes
                self.free(slot)

    def outstanding_bytes(self) -> int:
        return sum(slot.nbytes for slot in self._handed_out if slot.outstanding)

    def free(self, slot: Slot) -> None:
        """Free a slot whose memory nobody uses."""
        self._handed_out.discard(slot)
        self.slab.free(slot)
        if self.slab.cached_bytes:
            self.trim(is_for_read=True)

    def trim(self, *, is_for_read: bool = False) -> None:
        """Give pages without a slot back to the kernel, beyond the bytes that both windows leave free.

        To be called whenever the windows leave less free than before. `is_for_read`: see NOTE [A spare slot]."""
        if not is_for_read:
            self._spare_bytes = 0
            self.slab.spare = None
        cached_bytes = self.slab.cached_bytes
        if cached_bytes:
            free_host, free_staging = self._windows.free_bytes
            free_host -= self._uncharged_bytes()
            spare_bytes = min(self._spare_bytes, self._windows.staging.used_bytes) + min(0, free_staging)
            allowance_bytes = max(0, free_host, spare_bytes) + max(0, free_staging)
            if cached_bytes > allowance_bytes:
                self.slab.trim(allowance_bytes)
