"""R11: A record comes back whole and verified, or it raises and the bytes are where the error says."""

from .changes import always, drop, never, replace

MUTATIONS = {
    "test_record_of_several_calls_is_whole": {
        "short writes and reads are carried on": replace("_move_all", "_advance(pending, moved)", "pending.clear()"),
    },
    "test_local_disk.py::test_place_beyond_the_file_is_an_error_not_a_short_read": {
        "a file that ends too early is an error": replace(
            "_move_all",
            "if moved == 0: ...",
            "if moved == 0: return\nif moved < 0: ...",
        ),
    },
    "test_local_disk.py::test_flipped_byte_is_found": {
        "checksums are verified": never("verify", "seed is not None and found != location.checksum"),
    },
    "test_damaged_location_gives_no_wrong_value": {
        "what is said of a record does not decide whether it is verified": replace(
            "verify", "found != location.checksum", "found != location.checksum is not None"
        ),
        "what decoding goes by is part of the checksum": replace(
            "encoded_seed", "struct.pack(...) + codec.encode()", "struct.pack('<QQQ', seed, 0, 0)"
        ),
    },
    "test_sound_record_under_the_wrong_key_is_refused": {
        "the key is part of the checksum": replace("record_seed", "key", "0", inside="struct.pack(...)"),
    },
    "test_record_of_another_session_is_refused": {
        "the session is part of the checksum": replace("record_seed", "session", "0", inside="struct.pack(...)"),
    },
    "test_write_failed_reaches_flush_and_keeps_the_bytes": {
        "a failed write is told": drop("Ledger._note_failure", "self.books.spill_error = error"),
        "what could not be written stays in memory": always(
            "Ledger._end_write", "isinstance(outcome, Stored)", inside="if has_moved: ...\nelse: ..."
        ),
    },
    (
        "test_disk_full_collects_cycles_before_it_gives_up",
        "test_store_full_of_graphs_in_cycles_collected_instead_of_raised",
    ): {
        "garbage is collected before the store says that it is full": drop("Guard._collect_garbage", "gc.collect()"),
    },
    "test_full_file_system_is_store_full_and_goes_on": {
        "a full file system is told from a broken one": replace("means_full", "is_out_of_space(error) or ...", "False"),
    },
    "test_failed_write_takes_nothing_and_the_next_one_works": {
        "a failed write says where the data is": replace(
            "local:_STILL_IN_MEMORY", "'the data is still in memory'", "''"
        ),
    },
    "test_record_that_the_index_refuses_is_no_record": {
        "a record that the index refused is no record": drop("LocalDisk._enter", "raise outcome.error"),
    },
    ("test_local_disk.py::test_flipped_byte_is_found", "test_record_of_another_session_is_refused"): {
        "a value in the index is verified too": drop(
            "decode_small_value", "verify(location, seed, _checksum(value, seed))"
        ),
    },
    "test_values_stay_whatever_is_given_back_between_transactions": {
        "only pages that the last commit has free are given back": replace(
            "free_pages:give_back_free_pages", "max(...)", "min(...)"
        ),
    },
    "test_store_goes_on_when_the_drive_is_well_again": {
        "an index that LMDB has given up is opened anew": replace(
            "Environment.begin", "lmdb.PanicError", "ZeroDivisionError"
        ),
    },
    "test_read_failed_reaches_get_and_may_be_tried_again": {
        "what could not be read is not handed out": never("Ledger._end_read", "isinstance(outcome, Exception)"),
    },
}
