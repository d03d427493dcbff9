"""R12: No file, thread or record outlives its owner."""

from .changes import drop, replace

MUTATIONS = {
    "test_get_every_dtype_returns_the_same_bits": {
        "files have no name": replace("open_unnamed", "os.open(...)", "tempfile.mkstemp(dir=directory)[0]"),
    },
    "test_segment_without_o_tmpfile_has_no_name_either": {
        "files have no name where O_TMPFILE is unknown": drop("open_unnamed", "os.unlink(name)"),
    },
    "test_store_unreferenced_without_close_ends_by_itself": {
        "the last reference ends the store": drop("Core._start_engine", "user=store"),
    },
    "test_read_that_ends_while_the_handle_has_only_begun_to_die_frees_everything": {
        "a read whose handle has gone by then leaves nothing": drop("Rules.end_read", "self._bury(record)"),
    },
    "test_what_is_submitted_before_serve_begins_then": {
        "an engine that does not serve yet does not end by itself": drop(
            "Engine._main", "await self._may_begin.wait()"
        ),
    },
    "test_stop_before_serve_ends_the_engine": {
        "an engine that is stopped before it serves ends": drop("Engine._begin_to_stop", "self._may_begin.set()"),
    },
    "test_stores_opened_and_closed_often_leave_nothing": {
        "an engine that ends frees what is on disk": drop("Engine._main", "await disk.close()"),
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
    "test_training_that_fails_leaves_nothing_and_can_be_begun_again": {
        "a training that fails closes its store": drop("Training.__exit__", "self.close(ended_by=error)"),
    },
    "test_fit_that_fails_leaves_nothing_and_can_be_begun_again": {
        "so does one of Lightning's": drop("TierStoreCallback.on_exception", "self._end(trainer, exception)"),
    },
    "test_fit_again_opens_a_store_of_its_own": {
        "a strategy is as it was after a training": drop(
            "TierStoreCallback._end", 'trainer.strategy.__dict__.pop("training_step", None)'
        ),
    },
    "test_killed_client_is_cleaned_up_after_the_grace_period": {
        "what a lost client has stored is freed when its lease ends": replace(
            "Registry._start_grace", "self.settings.grace_seconds", "1e6", inside="loop.call_later(...)"
        ),
    },
}
