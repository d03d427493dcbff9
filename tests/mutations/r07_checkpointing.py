"""R7: Checkpointing works in both forms."""

from __future__ import annotations

from .changes import never, replace

MUTATIONS = {
    "test_call_with_other_arguments_than_in_forward_raises": {
        "an output goes to the call that it was made by": never(
            "_Replay.__torch_dispatch__", "held.inputs != _inputs_of((args, kwargs))"
        ),
    },
    "test_packed_after_backward_began_belongs_to_a_log_of_its_own": {
        "what is packed during backward starts a log of its own": never("_Scope.pack", "self._log.started"),
    },
    "test_nested_scopes_innermost_store_saves": {
        "the innermost hooks win": replace(
            "tiered_offload._new_scope", "_Scope(...)", "enclosing_scope() or _Scope(...)"
        ),
    },
}

UNSHOWN = {
    "only a checkpoint's inputs reach the hooks": "PyTorch's doing; tests/hooks/test_scopes.py looks at it",
}
