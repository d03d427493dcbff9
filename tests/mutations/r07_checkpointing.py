"""R7: Checkpointing works in both forms."""

from .changes import drop, never, replace

MUTATIONS = {
    "test_region_that_runs_otherwise_the_second_time_raises": {
        "an output goes to the call that it was made by": never(
            "_Replay.__torch_dispatch__", "held.inputs != _inputs_of((args, kwargs))"
        ),
    },
    "test_product_of_a_layer_that_is_changed_is_computed_again": {
        "an output is computed again if a hidden view of it was changed": never(
            "_Replay.__torch_dispatch__", "not held.is_as_held"
        ),
    },
    "test_output_that_the_region_changes_is_computed_again": {
        "an output that its region changes is computed again": drop(
            "_Hold._look_for_changes", "place.calls[place.number] = None"
        ),
    },
    "test_packed_after_backward_began_belongs_to_a_log_of_its_own": {
        "what is packed during backward starts a log of its own": never("OffloadScope.pack", "log.started"),
    },
    "test_nested_scopes_innermost_store_saves": {
        "the innermost hooks win": replace(
            "tiered_offload._new_scope", "OffloadScope(...)", "owner_of_hooks() or OffloadScope(...)"
        ),
    },
    "test_callers_checkpoint_its_inputs_are_stored_and_nothing_else": {
        "an offloaded module in a region stores nothing that the checkpoint drops": never(
            "ModuleScope._stays_out", "is_in_checkpoint()"
        ),
        "it stores the region's inputs": drop("ModuleScope._stays_out", "pack_inputs(pack)"),
    },
    "test_callers_reentrant_checkpoint_nothing_of_the_region_is_stored": {
        "a reentrant region that is computed again stores nothing": never("is_in_checkpoint", "_computes_again()"),
    },
    "test_layers_that_checkpoint_themselves_store_their_inputs": {
        "the scope of a module is around its own checkpoint": replace("_looking_call", "around is None", "True"),
    },
}

UNSHOWN = {
    "only a checkpoint's inputs reach the hooks": "PyTorch's doing; tests/hooks/test_scopes.py looks at it",
}
