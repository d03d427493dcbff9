"""R15: No byte of a saved tensor is read before the kernel that fills it has run."""

from .changes import always, drop, replace

MUTATIONS = {
    "test_what_the_newest_node_saved_is_not_read_before_another_saves": {
        "the newest node's tensors are not read yet": always("GraphLog.settled", "packs[index][0] != unsettled"),
        "a pack of a later node settles what was saved before": replace(
            "GraphLog.settled", "packs[index][0] != unsettled", "unsettled is None"
        ),
    },
    "test_what_the_newest_node_saved_is_not_read_when_it_saves_more": {
        "not before the last tensor of the node either": replace(
            "GraphLog.settled", "packs[index][0] != unsettled", "unsettled is None or index + 1 < len(packs)"
        ),
        "nor of one on an accelerator": replace(
            "OffloadScope._register", "self._fresh if node != self._fresh_node else []", "self._fresh"
        ),
    },
    "test_what_the_newest_node_packed_is_not_settled": {
        "nor what it has packed without the lock": drop("TrackedTensors._enter", "log.newest_node, _ = entries[-1][1]"),
    },
    "test_input_let_go_later_taken_by_flush": {
        "the end of the scope settles what is left": drop("OffloadScope.settle", "log.settle()"),
    },
}
