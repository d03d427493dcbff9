"""R12: No file, thread or record outlives its owner."""

from .changes import drop, replace

MUTATIONS = {
    "test_get_from_any_memory_returns_the_same_bits": {
        "files have no name": replace("open_unnamed", "os.open(...)", "tempfile.mkstemp(dir=directory)[0]"),
    },
    "test_store_unreferenced_without_close_ends_by_itself": {
        "the last reference ends the store": drop("Core._start_engine", "user=store"),
    },
    "test_read_that_ends_while_the_handle_has_only_begun_to_die_frees_everything": {
        "a read whose handle has gone by then leaves nothing": drop("Ledger._end_read", "self._bury(record)"),
    },
    "test_what_is_to_be_moved_before_serve_is_moved_then": {
        "an engine that does not serve yet does not end by itself": drop(
            "Engine._main", "await self._may_begin.wait()"
        ),
        "an engine that ends frees what is on disk": drop("Engine._main", "await disk.close()"),
    },
    "test_stop_before_serve_ends_the_engine": {
        "an engine that is stopped before it serves ends": drop("Engine._begin_to_stop", "self._may_begin.set()"),
    },
    "test_close_waits_for_a_return_that_is_on_its_way": {
        "a store that is closed ends the thread that returns memory": drop(
            "Core.close", "self.returner.stop(deadline_seconds)"
        ),
    },
    "test_last_reference_ends_the_thread": {
        "a store that nobody refers to ends the thread that returns memory": replace(
            "Core._store_died", '("returner", "traces")', '("traces",)'
        ),
    },
    "test_client_killed_at_each_state_is_forgotten_after_the_grace_period": {
        "what a lost client has stored is freed when its lease ends": replace(
            "Registry._start_grace", "seconds", "1e6", inside="loop.call_later(...)"
        ),
    },
}
