"""R5: Memory that somebody else keeps alive is left alone."""

from .changes import after, always, drop, never, replace

MUTATIONS = {
    "test_residency_stages.py": {
        "what was written of memory that moved meanwhile is not taken for the bytes": never(
            "Ledger._end_write", "has_moved"
        ),
    },
    "test_parameters_and_their_views_kept": {
        "leaves that require gradients stay": never("OffloadScope.pack", "root.requires_grad and root.is_leaf"),
        "frozen parameters stay": replace(
            "OffloadScope.pack",
            "kind_of_root is Parameter or (root.requires_grad and root.is_leaf) or ...",
            "root.requires_grad and root.is_leaf",
        ),
    },
    "test_buffers_and_input_batch_not_taken_and_counted_when_the_graph_ends": {
        "only what nobody else holds is taken": always("is_sole_owner", "num_owners == num_claims"),
        "what somebody else holds is not charged": after(
            "Down._admit_pending", "self._pending.share(record)", "self.windows.charge(record, self.windows.host)"
        ),
        "what somebody else holds is counted": drop(
            "Ledger._release", "self.books.counters.kept_bytes['alive elsewhere'] += ..."
        ),
    },
    "test_resized_or_moved_storage_is_managed_elsewhere": {
        "a storage that moved is managed elsewhere": drop("is_sole_owner", "storage_address(source) == record.address"),
    },
    "test_held_by_somebody_else_until_that_lets_go": {
        "the storage's Python object may not be held either": drop(
            "is_sole_owner", "getrefcount(source.untyped_storage()) == _NUM_REFERENCES_UNSHARED"
        ),
    },
    "test_edit_between_forward_and_backward_same_outcome[from_numpy]": {
        "memory with owners outside of torch stays": replace("is_foreign", "return ...", "return False"),
    },
    "test_tensors_with_lazy_bits_go_to_disk": {
        "an alias without lazy bits is one owner": replace(
            "alias_of",
            "set_lazy_bits(alias, False, False)",
            "alias = alias.conj() if layout.conj else torch._neg_view(alias)",
        ),
    },
    "test_input_let_go_later_taken_by_flush": {
        "what was held is looked at again by flush": drop("Saving.flush", "self._down.scan_pending()"),
    },
    "test_records_of_two_stores_do_not_count_as_others": {
        "aliases that other stores hold are discounted": replace("is_sole_owner", "_num_aliases(claims)", "1"),
    },
    "test_held_again_while_it_is_kept_in_memory_is_left_alone": {
        "ownership is looked at again when a victim is chosen": never(
            "Down._spill", "not self._memory.has_sole_owner(victim)"
        ),
    },
    "test_held_again_while_it_waits_for_room_is_left_alone": {
        "ownership is looked at again when room is found": never(
            "Down.admit_blocked", "not self._memory.has_sole_owner(record)"
        ),
    },
    "test_input_let_go_later_taken_by_later_packs": {
        "what was held is looked at again at each pack": replace(
            "Down.reclaim", "how_many", "None if how_many is None else 0", inside="self._admit_pending(...)"
        ),
    },
    "test_moved_before_it_is_registered_stays_where_it_is": {
        "a storage that moved before it was registered is managed elsewhere": replace(
            "HandleFactory.of_tracked", "tracked.address", "storage_address(alias)"
        ),
    },
    "test_let_go_before_the_scope_ends_taken_then": {
        "what was held is looked at again at the end of the scope": drop(
            "OffloadScope.settle", "self._saving.scan_owners(log)"
        ),
    },
    "test_let_go_after_the_scope_taken_when_backward_begins": {
        "what was held is looked at again at the first unpack": drop(
            "Residency.begin_backward", "self.saving.scan_owners(log)"
        ),
    },
    "test_buffer_takes_no_room_and_all_figures_are_those_of_a_store_that_registers_it": {
        "what somebody else holds is not charged on an accelerator": drop(
            "DeviceBytes.give_back", "self.resident.used_bytes -= charged[1]"
        ),
        "what somebody else holds there is counted, once": drop(
            "DeviceBytes.remove", "log.held_elsewhere.pop(storage_id, None)"
        ),
        "and when the graph goes": drop("DeviceBytes.end", "self.note_kept(nbytes)"),
    },
    "test_graph_dropped_while_another_of_its_log_lives_what_it_shared_counts_as_kept": {
        "and when its last tensor does": drop("DeviceBytes.drop_dead", "self.note_kept(...)"),
    },
    "test_buffer_dropped_by_the_program_is_charged_at_the_next_look": {
        "what was held on an accelerator is looked at again": drop(
            "Saving._scan_on_device", "self._registration.charge_what_is_ours(log)"
        ),
    },
    "test_storage_that_two_graphs_have_saved_is_charged_when_the_program_drops_it": {
        "another graph of ours is nobody else": replace(
            "Registration.charge_what_is_ours", "self.tracked.num_over(storage_id)", "1"
        ),
    },
    "test_views_of_one_storage_are_charged_once_by_whatever_they_are_packed": {
        "nor is an earlier scope": replace(
            "Registration._stay_tracked", "self.tracked.num_over(newest.storage_id)", "len(tensors)"
        ),
    },
    "test_known_graph_that_leaves_in_part_takes_no_room_for_the_buffer": {
        "where something leaves, what somebody else holds is not charged from the start": drop(
            "_may_share_a_record", "log.plan is not None"
        ),
    },
    "test_memory_that_torch_does_not_own_stays_and_is_not_counted_as_ours": {
        "memory with owners outside of torch goes by no grant": replace(
            "OffloadScope.pack", "storage.resizable() and (not (is_on_cpu and storage.is_shared()))", "True"
        ),
    },
    "test_put_of_what_the_caller_keeps_is_written_when_its_turn_comes": {
        "put() by hand always stores": replace("Saving.store", "record.forced = True", "record.forced = False"),
    },
}
