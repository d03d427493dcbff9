"""P9: Shared memory cannot be cut short under its reader."""

from __future__ import annotations

from .changes import drop, never

MUTATIONS = {
    "test_unsafe_slab_is_refused": {
        "a slab that is not sealed against shrinking is refused": never("_check", "not seals & fcntl.F_SEAL_SHRINK"),
        "a slab without all of its pages is refused": drop("_check", "status.st_blocks * _BLOCK_BYTES < num_bytes"),
    },
    "test_range_outside_the_slab_is_refused": {
        "a range outside of its slab is refused": never("MappedSlab.range", "offset + num_bytes > self.num_bytes"),
    },
}
