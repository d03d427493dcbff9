"""N3: Where bytes are damaged the store does what `docs/project/internals/reliability.md` promises."""

from __future__ import annotations

from .changes import always, drop, never, replace

MUTATIONS = {
    "test_payload_flipped_under_an_embedded_store_is_refused": {
        "flipped payload is refused": never("verify", "seed is not None and found != location.checksum"),
    },
    "test_extents_that_nobody_will_look_for_do_not_enter_the_index": {
        "what lives in an extent is read without LMDB": always(
            "IndexEntries.is_for", "location.segment is None or self._has_extents"
        ),
    },
    (
        "test_payload_flipped_under_a_daemon_is_refused_and_others_are_right[running]",
        "test_payload_flipped_under_a_daemon_is_refused_and_others_are_right[killed]",
    ): {
        "flipped payload is refused by a daemon": never("verify", "seed is not None and found != location.checksum"),
    },
    "test_saved_tensor_flipped_under_a_daemon_fails_that_backward_alone": {
        "a flipped saved tensor fails its backward": never("verify", "seed is not None and found != location.checksum"),
    },
    "test_index_flipped_under_an_embedded_store_gives_no_wrong_value": {
        "an index whose pages make no sense gives no wrong value": never(
            "verify", "seed is not None and found != location.checksum"
        ),
    },
    "test_index_flipped_under_a_daemon_gives_no_wrong_value": {
        "nor does a daemon's": never("verify", "seed is not None and found != location.checksum"),
    },
    "test_payload_flipped_under_an_embedded_store_is_refused[two drives]": {
        "flipped payload is told with its drive": replace(
            "QueuedDrive._naming_errors", "(CorruptDataError, StorageIOError)", "StorageIOError"
        ),
        "so is that of a part, with its record": replace("Drives.read", "raise ... from error", "raise"),
    },
    "test_index_flipped_under_an_embedded_store_gives_no_wrong_value[two drives]": {
        "an index of one of two drives gives no wrong value": never(
            "verify", "seed is not None and found != location.checksum"
        ),
    },
    (
        "test_index_flipped_under_a_daemon_gives_no_wrong_value[running-the second drive]",
        "test_index_flipped_under_a_daemon_gives_no_wrong_value[killed-the second drive]",
    ): {
        "nor does one of a daemon's two": never("verify", "seed is not None and found != location.checksum"),
    },
    "test_record_whose_entry_is_dropped_is_told_as_damaged_and_the_session_goes_on": {
        "a record whose entry is lost is told of as damaged": never(
            "Records.read", "record is None and session.was_taken_up"
        ),
    },
    "test_damaged_index.py": {
        "damage that a change meets ends the daemon": drop("Index._try_to_commit", "self._environment.damage = error"),
    },
}
