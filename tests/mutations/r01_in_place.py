"""R1: A saved tensor that is changed in place raises where plain PyTorch raises, and nowhere else."""

from .changes import drop, never, replace

MUTATIONS = {
    "test_changed_in_place_refused_as_by_torch": {
        "a tensor that is only tracked is guarded too": drop(
            "SavedTensor.unpack", "check_unchanged(alias, self.version)"
        ),
    },
    "test_edit_between_forward_and_backward_same_outcome": {
        "a stored tensor that was changed is refused": never(
            "HandingOut._check_unchanged", "version != record.version"
        ),
        "the alias shares the version counter": replace("alias_of", "tensor.detach()", "tensor.data"),
        "a kept tensor's alias shares the version counter": replace(
            "OffloadScope.pack", "tensor = detached(tensor) if is_seen else tensor.detach()", "tensor = tensor.data"
        ),
        "the error is the one that plain PyTorch raises": drop("ModifiedInPlaceError", "RuntimeError"),
    },
    "test_overwriting_what_was_saved_second_backward_raises_as_plain": {
        "restored views share the version counter": replace("rebuild", "tensor.as_strided", "tensor.data.as_strided"),
    },
    "test_change_of_one_member_is_seen_in_that_one_alone": {
        "a member of a group that was changed is refused": never(
            "PackLog.fetch", "member.counter._version != member.version"
        ),
        "the others are not": replace("Member.view_in", "self.counter.detach()", "memory.detach()"),
    },
    "test_tensor_that_is_put_inside_a_mode_is_guarded": {
        "aliases that are made below autograd share it too": replace(
            "outside_of_modes", "SetExcludeDispatchKeyGuard(AD_INPLACE_OR_VIEW, False)", "DisableTorchFunction()"
        ),
    },
    "test_change_while_a_get_waits_is_found": {
        "a change while somebody waits for the bytes is found": replace(
            "HandingOut.fetch",
            "self._await_bytes(record)\nhandle = self._check_unchanged(record, layout)",
            "self._await_bytes(record)",
        ),
    },
    "test_get_after_the_tensor_was_changed_raises": {
        "the version counter is kept when the memory goes": replace(
            "StoreMemory.empty_tensors",
            "handle.source.data = ...",
            "handle.source = torch.empty(0, dtype=handle.source.dtype)",
        ),
    },
    "test_restored_bytes_saved_again_by_another_counter_are_guarded_by_it": {
        "restored bytes that are saved again are guarded by their own counter": never(
            "OffloadScope._register", "joined.is_restored"
        ),
    },
    "test_edits_of_tensors_that_are_not_needed_no_false_alarm": {
        "no false alarm: the version when it was saved counts": replace(
            "OffloadScope.pack", "version, reference, address", "0, reference, address"
        ),
    },
}

UNSHOWN = {
    "allow_mutation_on_saved_tensors is not supported": "a limit that the README tells, not code",
}
