"""R4: Views of one storage are stored as one record, where that is safe."""

from .changes import always, drop, never, replace

MUTATIONS = {
    "test_chunks_of_one_product_stored_once_and_restored_as_one": {
        "views of one storage are stored once": drop("Registration._handle_of_same_bytes", "return handle"),
        "all views' bytes are stored": drop("Registration._become", "record.joined += (tracked.layout,)"),
    },
    "test_two_counters_of_one_storage_edit_of_one_refuses_only_its_graph": {
        "they join only as views of the same living tensor": drop(
            "Registration._handle_of_same_bytes", "record.root is tracked.root"
        ),
    },
    "test_saved_edited_and_saved_again_second_graph_not_refused": {
        "they join only at the same version": always(
            "records_over", "record.version == version or record.num_members > 1"
        ),
    },
    "test_mode_that_calls_the_store_throughout_a_step_same_bits": {
        "a function mode does not run under the lock": drop("outside_of_modes", "DisableTorchFunction()"),
    },
    "test_restored_bytes_that_a_function_changed_are_saved_as_they_are": {
        "restored bytes join only if they are confirmed": never(
            "Saving.rejoin", "not self._worker.confirms(record.key, memory)"
        ),
    },
    "test_what_double_backward_saves_again_is_not_written_again": {
        "restored bytes that are saved again join": never("_join_record", "restored is not None"),
    },
    "test_restored_base_saved_again_by_double_backward_same_bits": {
        "a view of a restored part lies where it lay": replace("Saving.rejoin", "layout._replace(...)", "layout"),
    },
    "test_lazy_conjugate_and_negative_bits_kept": {
        "lazy conjugation comes back": never("rebuild", "layout.conj", inside="set_lazy_bits(...)"),
        "lazy negation comes back": never("rebuild", "layout.neg", inside="set_lazy_bits(...)"),
    },
    "test_small_storages_kept_by_the_size_of_the_storage_not_of_the_view": {
        "a tensor is measured by its storage": replace("OffloadScope.pack", "storage.nbytes()", "tensor.nbytes"),
    },
    "test_tensors_of_the_user_die_with_their_last_reference": {
        "a saved tensor is held by weak reference": replace("OffloadScope.pack", "weakref.ref(root)", "lambda: root"),
    },
    "test_join_once_the_bytes_were_read_is_refused": {
        "nothing joins once the bytes were read": drop("Saving.join", "record.span is not None"),
    },
    "test_claims_of_a_new_storage_are_never_those_of_an_old_one": {
        "a storage is not known by its address": replace(
            "claims_of",
            "return claims",
            'return globals().setdefault("_by_address", {}).setdefault(storage.data_ptr(), claims)',
        ),
    },
    "test_copy_on_write_clone_saved_is_not_copied": {
        "a copy-on-write storage stays shared": replace(
            "storage_address", "_torch(...)", "lambda tensor: tensor.untyped_storage().data_ptr()"
        ),
    },
}
