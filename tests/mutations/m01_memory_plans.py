"""M1: A planned step has the bits of the plain one or raises, and planning leaves the model as it was."""

from __future__ import annotations

from .changes import drop, replace

MUTATIONS = {
    "test_buffers_that_forward_changes": {
        "buffers that forward changes are found by their values": replace(
            "BufferValues.changed", "not torch.equal(...)", "False"
        ),
    },
    "memory_plan/test_same_bits.py::test_same_bits": {
        "a block is computed again with the buffers from before forward": drop(
            "_Again.__enter__", "undo.enter_context(with_buffers(self._module, self._buffers))"
        ),
    },
    "test_generators_of_python_and_numpy": {
        "generators of Python and NumPy are as in forward": drop("_Again.__enter__", "self._generators.restore()"),
    },
    "test_block_changed_before_backward_the_same_bits_or_an_error": {
        "a block that was changed since forward is refused": drop(
            "_Again.__enter__", "self._expected.check(self._module)"
        ),
    },
    "test_random_operators_are_never_held": {
        "random operators are never held": replace(
            "_Operators.__torch_dispatch__", "torch.Tag.nondeterministic_seeded in func.tags", "False"
        ),
    },
    "test_block_that_cannot_be_repeated_is_found": {
        "a block that gives other bits is found": replace(
            "BlockRecorder._again", "second.checksums(result) == checksums", "True"
        ),
    },
    "test_block_that_differs_is_kept_or_stored": {
        "a block that differs is not computed again": replace(
            "options_of", "any(call.differs for call in calls) or not calls", "not calls"
        ),
    },
    "test_step_leaves_everything_as_found": {
        "planning puts the gradients back": drop("Steps._left_as_found", "parameter.grad = gradient"),
        "planning puts the generators of the host back": drop("Steps._left_as_found", "generators.restore()"),
        "planning puts buffers and modes back": drop("Steps._left_as_found", "restore()"),
    },
    "test_the_fastest_choice_within_every_limit": {
        "a storage that several blocks keep counts once": replace(
            "_shared_storages", "len(names) > 1", "len(names) > 99"
        ),
    },
    "test_of_several_plans_the_least_limits_hold_until_they_end": {
        "of several plans the least limits hold": replace(
            "PlansOfStore.keep_within", "min(...)", "max(...)", inside="self._limit_host(...)"
        ),
    },
}

UNSHOWN = {
    "a plan decides again when its prediction has missed": "it depends on times; the benchmark memory_plan shows it",
}
