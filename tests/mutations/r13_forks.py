"""R13: A forked child holds nothing of its parent's and can use nothing that it inherited."""

from .changes import drop, replace

MUTATIONS = {
    "test_pin_registers_the_exact_size_once_and_withholds_it_from_children": {
        "pinned memory is not given to a child": drop("Slab.begin_to_pin", "region.madvise(mmap.MADV_DONTFORK, ...)"),
    },
    "test_fork_child_has_no_file_and_cannot_use_what_it_inherited": {
        "a forked child lets go of the files": drop("release_files", "os.dup2(null, descriptor, inheritable=False)"),
        "a forked child cannot use what it inherited": drop("Guard.abandon", "self.closed = ..."),
        "forked children are told": drop("lifetime:", "os.register_at_fork(after_in_child=_in_child)"),
    },
    "test_forked_child_next_pack_raises": {
        "not even without the lock": drop("Ledger.abandon", "self.books.tracked.abandon_grants()"),
    },
    "test_forked_child_has_no_such_thread_and_its_own_store_returns_memory": {
        "a child does not inherit the lock of a return that was on its way": drop(
            "returner:", "os.register_at_fork(after_in_child=_in_child)"
        ),
    },
    "test_fork_child_that_outlives_a_killed_parent_keeps_no_disk_space": {
        "a child has no descriptor of an extent": drop("LocalDisk.abandon_after_fork", "*self._space.inodes"),
        "a child has no descriptor of the index": drop("LocalDisk.abandon_after_fork", "self._index.inode"),
        "a child has no mapping of the index": drop("Environment._keep_from_children", "dont_fork(*found)"),
    },
    "test_segment_is_opened_and_noted_in_one_with_regard_to_forks": {
        "no file is opened while a fork goes on": replace("_open_noted", "with not_while_forking: ...", "if True: ..."),
    },
    "test_fork_while_others_put_harms_neither_side": {
        "a lock that a thread of the parent held is no child's": drop("Guard.abandon", "self._begin_lock()"),
    },
    "test_forked_child_keeps_nothing_of_its_parent_s": {
        "a child has no copy of the daemon's socket and slab": drop(
            "RemoteDisk.abandon_after_fork", "release_files(self._link.inodes)"
        ),
    },
}
