"""P9: Shared memory cannot be cut short under its reader, and no page of it is allocated by the daemon."""

from __future__ import annotations

from .changes import drop, never

MUTATIONS = {
    "test_unsafe_slab_is_refused": {
        "a slab that is not sealed against shrinking is refused": never(
            "MappedSlab._check_file", "not seals & fcntl.F_SEAL_SHRINK"
        ),
        "a slab without all of its pages is refused": drop("MappedSlab.__init__", "self._check_pages(0, num_bytes)"),
    },
    "test_range_outside_the_slab_is_refused": {
        "a range outside of its slab is refused": never(
            "MappedSlab.check_range", "offset + num_bytes > self.num_bytes"
        ),
    },
    "test_huge_pages_are_refused": {
        "a slab of huge pages is refused": never("MappedSlab._check_file", "not is_tmpfs(self._descriptor)"),
    },
    "test_pages_taken_away_before_a_job_are_not_allocated_by_the_daemon": {
        "pages are looked for when a job begins": drop("MappedSlab.range", "self._check_pages(offset, num_bytes)"),
    },
    "test_another_user_cannot_take_pages_away": {
        "a slab of another user is sealed": drop("MappedSlab.__init__", "self._seal()"),
    },
    "test_slab_does_not_move_while_a_slot_is_filled_nor_the_reverse": {
        "a slab does not move while a slot is filled": drop("SharedWindow.renew", "await asyncio.wait(self._filling)"),
        "no slot is filled while a slab moves": drop("SharedWindow.fill", "await self._renewal"),
    },
    "test_slab_that_was_sealed_is_shared_anew_with_what_unanswered_writes_name": {
        "a slab that was sealed moves before it is shared again": drop(
            "DaemonLink._resume", "await self._renew_slabs()"
        ),
    },
}
