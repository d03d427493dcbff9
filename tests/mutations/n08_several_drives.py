"""N8: Over several drives the store does what `docs/project/internals/reliability.md` promises."""

from __future__ import annotations

from .changes import always, drop, never, replace

_DELETED = "test_directory_of_one_of_two_drives_deleted_leaves_the_writes_to_the_other"

MUTATIONS = {
    "test_small_records_are_whole_and_large_ones_are_divided": {
        "a large record is divided": always("Drives._parts_for", "num_bytes < _LEAST_DIVIDED_BYTES"),
        "a small one is not": never("Drives._parts_for", "num_bytes < _LEAST_DIVIDED_BYTES"),
        "each part has its own bytes": drop("pieces", "start += part.num_bytes"),
    },
    "test_tier_that_does_not_divide_keeps_records_whole": {
        "a daemon does not divide": drop("Drives._parts_for", "not self._divides"),
    },
    "test_parts_begin_at_the_same_address_modulo_4096_as_the_record": {
        "parts begin where the drive can read them straight into memory": replace(
            "divided", "int(end) // ALIGNMENT_BYTES * ALIGNMENT_BYTES", "int(end) + 1"
        ),
        "parts are as long as the drives are fast": replace(
            "divided", "{drive: speeds[drive] for drive in chosen}", "dict.fromkeys(chosen, 1.0)"
        ),
    },
    "test_drive_that_would_have_a_short_part_gets_none": {
        "no part is short": replace("drive:_LEAST_PART_BYTES", "2**20", "0"),
    },
    "test_record_that_fits_only_on_both_is_divided_as_the_room_is": {
        "no drive gets a part that does not fit there": never("_within_rooms", "sum(rooms.values()) >= num_bytes"),
    },
    "test_records_go_where_they_end_first": {
        "what is queued counts": replace("with_least_queue", "drive.queued_bytes + num_bytes", "num_bytes"),
        "speed counts": replace("with_least_queue", "speeds[drive]", "1.0"),
    },
    "test_speed_is_that_of_the_time_with_something_to_write": {
        "a drive that is idle does not count as slow": replace(
            "DriveSpeed.begin", "if not self._num_running: ...", "self._busy_since = self._busy_since or now"
        ),
    },
    "test_speed_of_late_counts_most": {
        "older writes count less": replace("DriveSpeed.end", "0.5 ** (num_bytes / _HALF_LIFE_BYTES)", "1.0"),
    },
    "test_drive_that_was_slow_once_is_tried_again_when_others_were_used_for_a_while": {
        "a drive that was slow once is measured again": drop("_speeds", "drive.speed.forget()"),
    },
    "test_write_refused_by_one_drive_is_made_on_the_other": {
        "a refused write is made again": replace(
            "Drives.write",
            "refusals |= refused.by_drive",
            "raise self._error_of(len(source), list(refused.by_drive.values()))",
        ),
        "no part of it stays": drop("Drives._write_divided", "await free(...)"),
    },
    "test_training_goes_on_when_a_drive_fails": {
        "a drive that fails does not end a training": replace(
            "Drives._write_parts", "(StoreFullError, StorageIOError)", "StoreFullError"
        ),
    },
    "test_drive_that_failed_rests_and_for_longer_each_time": {
        "a drive that failed rests": replace("QueuedDrive.is_resting", "self._failed_until", "0.0"),
        "longer each time": replace("QueuedDrive.write", "2 * self._failed_seconds", "self._failed_seconds"),
    },
    "test_write_that_no_drive_takes_stores_nothing_and_names_the_drive": {
        "the drive is named": replace(
            "QueuedDrive._naming_errors", "raise dataclasses.replace(error, place=...) from error", "raise"
        ),
    },
    "test_only_when_all_are_full_it_is_full": {
        "the figures are those of all drives": replace("Drives._error_of", "usage.budget_bytes", "0"),
    },
    "test_write_allowance_is_each_drives_own": {
        "what may be written is the sum": replace(
            "Drives.usage", "sum(each or 0 for each in allowances)", "max(each or 0 for each in allowances)"
        ),
    },
    "test_damage_on_one_drive_is_told_with_record_and_drive": {
        "damage is told with the record, not with the part": replace("Drives.read", "raise ... from error", "raise"),
    },
    "test_damage_is_told_before_any_other_error": {
        "what is lost is told first": replace("results_of", "next(..., errors[0])", "errors[0]"),
    },
    "test_cancelled_write_of_a_divided_record_leaves_no_part": {
        "a cancelled write leaves no part": replace(
            "Drives._write_parts", "to_the_end(self._write_divided(...), ...)", "self._write_divided(...)"
        ),
    },
    "test_records_of_both_drives_and_leases_of_the_first_are_found_again": {
        "records of all drives are found again": replace("Drives._take_up", "self._drives", "self._drives[:1]"),
    },
    "test_leases_of_a_drive_that_was_the_first_are_deleted": {
        "leases of other drives are not used later": drop("Drives._take_up", "await drive.disk.delete_lease(number)"),
    },
    "test_record_found_on_two_drives_is_kept_on_the_first": {
        "a record is kept on one drive": drop("Drives._take_up", "await free(...)"),
        "on the first": never("Drives._take_up", "await is_sound(kept)"),
    },
    "test_record_found_on_two_drives_is_kept_where_it_is_not_damaged": {
        "unless it is damaged there": always("Drives._take_up", "await is_sound(kept)"),
    },
    "test_drive_that_cannot_be_opened_closes_the_others": {
        "the drives that were opened are closed": drop(
            "Drives.open", "await asyncio.gather(*closings, return_exceptions=True)"
        ),
    },
    "test_forked_child_keeps_no_file_of_any_drive": {
        "a child keeps no file of any drive": drop(
            "Drives.abandon_after_fork", "for drive in self._drives: drive.disk.abandon_after_fork()"
        ),
    },
    "test_space_on_both_drives_is_given_back": {
        "space is given back on every drive": replace("parts:free", "by_drive.items()", "list(by_drive.items())[:1]"),
    },
    "test_drive_of_two_that_is_shut_down_takes_its_own_records_alone": {
        "the others take what a drive that was shut down refuses": replace(
            "Drives._write_parts", "(StoreFullError, StorageIOError)", "StoreFullError"
        ),
    },
    (
        f"{_DELETED}[embedded-the first drive-two drives]",
        f"{_DELETED}[embedded-the second drive-two drives]",
        f"{_DELETED}[sidecar-the first drive-two drives]",
        f"{_DELETED}[sidecar-the second drive-two drives]",
    ): {
        "the others take what a drive whose directory is deleted refuses": replace(
            "Drives._write_parts", "(StoreFullError, StorageIOError)", "StoreFullError"
        ),
        "so with a part of a divided record": replace(
            "Drives._write_divided", "raise _RefusedError(refusals)", "results_of(outcomes)"
        ),
    },
    "test_index_that_cannot_be_read_on_one_drive_costs_the_records_of_that_drive": {
        "a session goes on without the records of one drive": never(
            "Records.read", "record is None and session.was_taken_up"
        ),
        "it is said which drive was cleared": replace("Daemon._found", "f'{path}: {home.found}'", "home.found"),
    },
    "test_index_that_cannot_be_changed_on_one_drive_ends_the_daemon_and_that_drive_is_cleared": {
        "a drive whose index is damaged is cleared": drop("LocalDisk.close", "not self.damaged_indexes"),
        "the others are not": replace("Drives.close", "self._first.damaged_indexes", "self.damaged_indexes"),
        "unless nobody owns what is on them": drop("Drives.close", "not self._first.damaged_indexes"),
        "damage is told with its drive": replace(
            "Daemon._complain_of_damage", "f'the index under {place}'", "f'the index under {self.settings.place}'"
        ),
    },
    "test_daemon_on_two_drives_goes_on_after_a_kill": {
        "a daemon finds the records of both drives again": replace(
            "Drives._take_up", "self._drives", "self._drives[:1]"
        ),
    },
}
