"""N7: Where the system refuses a request, the store does what `docs/project/internals/reliability.md` promises."""

from __future__ import annotations

from .changes import always, drop, never, replace

MUTATIONS = {
    "test_no_descriptor_left_is_said_and_tried_again": {
        "a look that the system refuses is tried again": replace(
            "Returner._try_to_look", "OSError", "ZeroDivisionError", inside="try: ...\nexcept OSError as error: ..."
        ),
    },
    "test_thread_looks_on_between_two_steps": {
        "a store that holds nothing since a moment ago is still looked at": replace(
            "Returner._run", "time.monotonic() - was_busy_at > _IDLE_AFTER_SECONDS", "not self._is_busy()"
        ),
    },
    "test_thread_that_cannot_be_started_refuses_the_store_and_leaves_nothing": {
        "a thread for returning memory that cannot be had refuses the store": drop(
            "Core._start_returner", "self.close(_OPEN_DEADLINE_SECONDS)"
        ),
    },
    "test_threads_refused_while_a_store_is_opened_say_so_and_nothing_is_left": {
        "threads that are refused end the opening of a store": replace(
            "Engine._run",
            """
            try:
                with IoThreads(num_threads, f"{self._name}-io") as self._io_threads: ...
            finally:
                ...
            """,
            """
            try:
                self._io_threads = IoThreads(num_threads, f"{self._name}-io")
                ...
            finally:
                self._io_threads.shutdown()
                ...
            """,
        ),
        "those that were started before end": drop("IoThreads.__init__", "self.shutdown()"),
        "the loop of an engine without a thread is closed": drop("Engine.__init__", "self._loop.close()"),
    },
    "test_descriptors_used_up_while_a_store_is_opened_say_so_and_nothing_is_left": {
        "a session whose window cannot be shared is closed": drop("RemoteDisk.open", "await link.close()"),
    },
    "test_descriptors_used_up_while_a_client_reconnects_are_waited_for": {
        "a session that was resumed without its window is resumed again": drop("DaemonLink._resume", "self._drop()"),
    },
    "test_memory_refused_to_backward_raises_and_what_is_on_disk_can_be_asked_for_again": {
        "memory that is refused to a read is told of as a read's failure": replace(
            "Up.start_restore", "raise StorageIOError(...) from error", "raise"
        ),
    },
    "test_memory_refused_to_a_prefetch_is_no_error": {
        "memory that is refused to a prefetch is no error": drop(
            "Up.start_restore", "if not demanded: ...", inside="try: ...\nexcept OSError as error: ..."
        ),
    },
    "test_addresses_for_the_slab_refused_its_slots_are_mapped_one_by_one": {
        "a slab whose addresses are refused maps its slots one by one": replace(
            "Slab.allocate", "return Slot(...)", "raise", inside="try: ...\nexcept OSError: ..."
        ),
    },
    "test_trace_of_a_full_disk_takes_nothing_down_any_more": {
        "a trace that failed takes nothing down any more": never("RecordedScope.pack", "recorder.is_over()"),
        "nor the graphs that begin after it": always("Recorder.begin_graph", "not self._is_over"),
    },
    "test_thread_refused_to_a_trace_says_so_and_the_next_one_is_whole": {
        "a trace that could not begin leaves its file to the next": drop("Recordings._open", "file.close()"),
    },
    "test_descriptors_used_up_beneath_an_open_store_keep_the_bytes_in_memory": {
        "descriptors that are used up are no full disk": drop(
            "ExtentSpace._refuse", "if refusal is not None and ...: ..."
        ),
    },
    (
        "test_descriptors_used_up_while_a_store_is_opened_say_so_and_nothing_is_left[embedded-two drives]",
        "test_descriptors_used_up_while_a_store_is_opened_say_so_and_nothing_is_left[sidecar-two drives]",
    ): {
        "descriptors that suffice for one drive alone leave nothing of it open": drop(
            "Drives.open", "await asyncio.gather(*closings, return_exceptions=True)"
        ),
    },
    (
        "test_descriptors_used_up_beneath_an_open_store_keep_the_bytes_in_memory[two drives]",
        "test_limit_on_sizes_of_files_beneath_an_open_store_keeps_the_bytes_in_memory[two drives]",
    ): {
        "what all drives refuse is told of as failed": never("Drives._error_of", "isinstance(error, StorageIOError)"),
    },
    "test_addresses_for_a_longer_index_refused_its_records_can_be_read_and_deleted[two drives]": {
        "two indexes that may not grow are told of with what to do": replace(
            "Drives._error_of", "'; '.join(error.reason for error in full)", "''"
        ),
    },
}
