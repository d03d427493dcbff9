"""R8: Offloading works beside compiled code and beside the capture of CUDA graphs."""

from .changes import drop, never, replace

MUTATIONS = {
    "test_region_that_asks_for_more_than_the_budget_at_once_is_warned_of_once": {
        "a compiled region that asks for too much is warned of": never(
            "warn_if_region", "nbytes is not None and node is not None and node.name() == _COMPILED_NODE"
        ),
    },
    "test_scope_entered_inside_a_compiled_function_is_warned_of_and_right": {
        "a scope inside of what is compiled is warned of": drop(
            "tiered_offload.__enter__", "warn_of_compiled_caller('tiered_offload')"
        ),
    },
    "test_store_used_by_hand_inside_a_compiled_function_is_not_traced": {
        "Dynamo never looks into the store": replace("uncompiled", "_mark(...)\nreturn ...", "return function"),
    },
    "test_one_graph_and_the_same_bits": {
        "compiled autograd keeps its graph whole": replace("unpack", "traceable", "uncompiled"),
    },
    "test_graph_that_uses_memory_again_is_given_copies": {
        "a compiled graph is given copies": replace("_saved", "memory.clone()", "memory"),
    },
    "test_event_that_is_asked_for_while_another_thread_captures_does_it_no_harm": {
        "an event is asked for so that no other thread's capture ends": replace(
            "beside_captures.__enter__", "self._exchange is not None", "False"
        ),
    },
}

UNSHOWN = {
    "what is saved during the capture of a CUDA graph stays": "needs an accelerator; tests/gpu/ runs there",
}
