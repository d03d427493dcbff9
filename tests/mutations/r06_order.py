"""R6: The order of backward is guessed in the first step and learned for the later ones."""

from .changes import always, drop, replace

MUTATIONS = {
    "test_reverse_topological_takes_nodes_backwards_and_their_tensors_forwards": {
        "a node's tensors come in the order of packing": replace(
            "reverse_topological", "sorted(...)", "list(reversed(range(len(nodes))))"
        ),
    },
    "test_odd_order_learned_from_the_first_step": {
        "what was learned of a graph is recalled": replace(
            "GraphOrder.look_ahead",
            "reverse_topological(...) if alike is None else ...",
            "reverse_topological(packs.nodes)",
        ),
        "the observed order is learned": replace("_learn", "orders.learn", "bool"),
        "the order lives in the store, not in the scope": replace(
            "_log_options", "store._core.learned_orders", "type(store._core.learned_orders)()"
        ),
    },
    "test_chain_prefetched_few_misses": {
        "what lies ahead is fetched": replace(
            "Up.prefetch", "(record := ahead.peek()) is not None", "(record := ahead.peek()) is not None and False"
        ),
    },
    "test_lookahead.py": {
        "nodes come in reverse": replace("reverse_topological", "-nodes[index]", "nodes[index]"),
    },
    "test_order.py": {
        "the number at pack marks the node": replace("OffloadScope.pack", "sequence_nr()", "self._log.newest_node + 1"),
        "a graph that goes on otherwise is not followed": replace("GraphOrder.follow", "known[number] != ...", "False"),
    },
    "test_graph_of_new_sizes_follows_one_with_the_same_nodes": {
        "what was learned holds for other sizes of the same nodes": replace(
            "GraphOrder.look_ahead", "self._orders.recall_alike(...)", "None"
        ),
    },
    "test_graphs_by_turns_each_keep_their_order": {
        "an order is learned for its own sequence of packs": replace("_signatures", "hash(...)", "0"),
    },
    "test_blocks_with_a_scope_each_prefetched_from_one_to_the_next": {
        "all scopes of one graph share one order": always(
            "current_log", "log is None or log.started or log.is_mostly_dead()"
        ),
    },
    "test_retained_graph_prefetched_each_time": {
        "a graph that backward goes through again is looked ahead in again": replace(
            "Lookahead.asked_for", "again or rank >= self._next", "rank >= self._next"
        ),
        "what was asked for makes room for what lies ahead": always("Up.prefetch", "not self._make_way(ahead)"),
    },
    "test_what_is_asked_for_is_read_before_what_lies_ahead_of_it": {
        "what is asked for is read before what lies ahead of it": drop(
            "Ledger.ask_for", "self.up.start_restore(record, demanded=True)"
        ),
    },
    "test_read_ahead_that_has_failed_is_not_told_to_get": {
        "prefetch is a hint: where it fails, the request tries again": replace(
            "Ledger._leave_unread", "error if record.demanded else ...", "error"
        ),
    },
}
