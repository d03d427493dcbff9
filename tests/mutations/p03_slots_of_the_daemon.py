"""P3: A slot that is named in an unanswered request is the daemon's."""

from .changes import after

MUTATIONS = {
    "test_slot_of_a_request_that_was_given_up_is_not_used_for_another": {
        "the slot of a write that was given up stays taken": after(
            "RemoteDisk._answer_to_write", "self._given_up[name] = sent", "self._window.give_back(sent.slot)"
        ),
    },
}
