"""R3: A saved tensor can be unpacked any number of times, and memory handed out belongs to its storage."""

from .changes import after, always, drop, never, replace

MUTATIONS = {
    "test_memory_handed_out_outlives_graph_and_handle_then_is_returned": {
        "a slot that is handed out is not used again": always(
            "Slots.free_when_unused", "slot.watch is None or slot.returned"
        ),
    },
    "test_outstanding_memory_is_counted_until_it_comes_back": {
        "outstanding memory is accounted for": drop(
            "Slots.free_when_unused", "self._windows.outstanding.used_bytes += slot.nbytes"
        ),
    },
    "test_saved_tensor_returned_by_two_nodes_gradients_independent": {
        "the record keeps what it hands out, so that autograd does not take it for its own": drop(
            "HandingOut._hand_over", "handle.keep_view(of, view)"
        ),
        "functions of the user's get the record's tensor, not an alias of their own": never(
            "SavedTensor.unpack", "self.handle is None and ... and is_in_own_function()"
        ),
    },
    "test_gradient_that_the_user_keeps_later_backwards_leave_it_alone": {
        "what was handed out before there was a record is handed out again": never(
            "HandingOut._hand_over", "view is None and handle.outstanding and member is None"
        ),
    },
    "test_saved_twice_and_returned_twice_gradients_independent": {
        "members of a group that are one saved tensor are handed out as one object": replace(
            "become_members", "len(set(group.first_bytes)) < len(tensors)", "False"
        ),
    },
    (
        "test_saved_tensor_returned_after_its_room_was_taken_same_bits",
        "test_saved_tensor_waits_as_gradient_while_its_room_is_taken_same_bits",
    ): {
        "what it has handed out is kept while autograd uses it, when the bytes leave memory": drop(
            "OutstandingViews.drop_unused", "self.keep(record, record.views.values())"
        ),
    },
    "test_retain_graph_three_backwards_same_bits": {
        "what was unpacked once can be unpacked again": after(
            "SavedTensor.unpack", "alias = log.fetch(self.index, self.layout)", "self.log = None"
        ),
    },
    "test_given_to_autograd_just_before_it_is_registered_stays_whole": {
        "what autograd was given before the tensor was registered stays whole": replace(
            "HandleFactory.of_tracked", "alias_of(alias, layout)", "alias"
        ),
    },
    ("test_get_of_one_handle_from_many_threads_reads_once", "test_residency_stages.py"): {
        "threads that ask for the same bytes share one read": always("Up.raise_priority", "record.state is State.DISK"),
    },
    ("test_slab.py", "test_memory_handed_out_outlives_graph_and_handle_then_is_returned"): {
        "a slot belongs to the storage over it, not to one tensor": replace(
            "Slot.as_tensor", "storage", "tensor", inside="SlotWatch(...)"
        ),
    },
    "test_slots.py": {
        "an outstanding slot is free when its storage dies": drop("Slots.take_back", "self.free(slot)"),
    },
}
