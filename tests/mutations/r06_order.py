"""R6: The order of backward is guessed in the first step and learned for the later ones."""

from __future__ import annotations

from .changes import always, drop, never, replace

MUTATIONS = {
    "test_known_graph_that_begins_with_restored_bytes_is_known_from_there_on": {
        "what was seen is known when a graph begins with restored bytes": replace(
            "Residency.save", "not log.nodes", "log.nodes"
        ),
    },
    "test_reverse_topological_takes_nodes_backwards_and_their_tensors_forwards": {
        "a node's tensors come in the order of packing": replace(
            "reverse_topological", "sorted(...)", "list(reversed(range(len(nodes))))"
        ),
    },
    "test_odd_order_learned_from_the_first_step": {
        "what was learned of a graph is recalled": replace(
            "GraphOrder.look_ahead", "None if self._orders is None else self._orders.recall(...)", "None"
        ),
        "the observed order is learned": replace("_learn", "orders.learn", "bool"),
        "the order lives in the store, not in the scope": replace(
            "_log_options", "store.learned_orders", "type(store.learned_orders)()"
        ),
    },
    "test_chain_prefetched_few_misses": {
        "what lies ahead is fetched": replace(
            "Up._prefetch", "(record := ahead.peek()) is not None", "(record := ahead.peek()) is not None and False"
        ),
    },
    "test_lookahead.py": {
        "nodes come in reverse": replace("reverse_topological", "-nodes[index]", "nodes[index]"),
    },
    "test_order.py": {
        "the number at pack marks the node": replace("OffloadScope.pack", "sequence_nr()", "self._log.newest_node + 1"),
        "a graph that goes on otherwise is not followed": drop(
            "GraphOrder.follow", "self.predicted.trace.continues(index + 1, self._signature)"
        ),
    },
    "test_graphs_by_turns_each_keep_their_order": {
        "an order is learned for its own sequence of packs": replace("add_pack", "hash(...)", "0"),
    },
    "test_blocks_with_a_scope_each_prefetched_from_one_to_the_next": {
        "all scopes of one graph share one order": always(
            "open_log", "log is None or log.started or log.is_mostly_dead()"
        ),
    },
    "test_retained_graph_prefetched_each_time": {
        "a graph that backward goes through again is looked ahead in again": replace(
            "Lookahead.asked_for", "rank + 1 if again else ...", "..."
        ),
        "what was asked for makes room for what lies ahead": always("Up._prefetch", "not self._make_way(ahead)"),
    },
    "test_what_is_asked_for_is_read_before_what_lies_ahead_of_it": {
        "what is asked for is read before what lies ahead of it": drop(
            "Rules.ask_for", "if record.state is State.DISK: ..."
        ),
        "what is asked for is counted as it was found": replace(
            "Rules.ask_for",
            "self._count_request(record)\nif record.state is State.DISK: ...",
            "if record.state is State.DISK: ...\nself._count_request(record)",
        ),
    },
    "test_list_longer_than_the_room_goes_on_into_that_of_what_was_got": {
        "by hand, the list goes on into the room of what was got": replace(
            "Rules.ask_for", "self.by_hand.forget(record) and self.go_ahead()", "self.by_hand.forget(record) and False"
        ),
    },
    "test_what_was_made_way_for_a_demand_is_fetched_again": {
        "by hand, what made way for a read is fetched again": replace(
            "Down._drop", "self.by_hand.come_back_for", "self.by_hand.forget_fetched"
        ),
    },
    "test_pack_takes_the_room_of_a_list_that_nobody_asks_for_and_keeps_it": {
        "by hand, what made way for a pack is not fetched again": replace(
            "Down._drop", "self.by_hand.forget_fetched", "self.by_hand.come_back_for"
        ),
    },
    "test_backward_goes_first_and_takes_the_room_of_what_was_named": {
        "what was fetched by hand makes way for backward": replace(
            "Up._make_way", "self.by_hand.last_fetched(self._eviction.is_clean)", "None"
        ),
    },
    "test_nothing_is_fetched_by_hand_while_backward_waits_for_room": {
        "nothing is fetched by hand while backward waits for room": drop(
            "Up._prefetch_all", "self.ahead is None or self.ahead.peek() is None"
        ),
    },
    "test_lookahead_comes_back_for_what_has_left_memory": {
        "what left memory after it was looked at is looked at again": drop(
            "Lookahead.come_back_for", "self._next = rank"
        ),
    },
    "test_known_graph_what_has_to_go_goes_while_there_is_room_and_no_more_than_that": {
        "what has to go goes as soon as it is ours, where the graph is known": drop(
            "Plan.place", "record.place = self.places[index]"
        ),
    },
    "test_order_of_backward_decides_what_leaves_when_it_must": {
        "what backward needs last leaves first, whenever it was saved": drop("Plan.place", "record.worth = ..."),
    },
    ("test_known_graph_goes_on_otherwise_nothing_more_goes_early", "store/test_plan.py"): {
        "what another known graph would keep does not go early": never(
            "make_plan", "theirs[index] is not places[index]"
        ),
    },
    ("test_known_graph_what_staging_holds_until_backward_does_not_go_early", "store/test_plan.py"): {
        "what staging holds until backward begins does not go early": replace("_places", "Place.STAGING", "Place.DISK"),
    },
    "test_simulated_accelerator.py": {
        "what the device may not keep leaves it at once, where the graph is known": never(
            "DeviceWindow.hold", "record.place in (Place.HOST, Place.DISK)"
        ),
    },
    "test_when_backward_begins_nothing_has_to_go_early_any_more": {
        "when backward begins, what has not gone by then need not go": drop("Down.end_plan", "record.place = None"),
    },
    "test_what_is_to_go_goes_in_the_order_of_saving": {
        "what the plan sends away goes in the order of saving": always(
            "Down._goes_at_once", "self._eviction.next_leaving() is None"
        ),
    },
    "test_read_ahead_that_has_failed_is_not_told_to_get": {
        "prefetch is a hint: where it fails, the request tries again": replace(
            "Rules._leave_unread", "error if record.demanded else ...", "error"
        ),
    },
    "test_known_graph_on_a_fast_drive_is_fetched_near": {
        "near, where the last backward was seen to need no more": always(
            "GraphOrder.look_ahead", "not self._orders.reaches.is_near(signatures[-1])"
        ),
        "near, what is fetched ahead goes into staging alone": replace(
            "HostWindows.window_for_prefetch", "... if is_far else ...", "..."
        ),
    },
    "test_far_from_the_moment_that_it_waits_and_the_next_time": {
        "backward that waits for the disk goes far, now and the next time": drop("Rules.ask_for", "ahead.reach.wait()"),
    },
    "test_drive_that_takes_longer_than_staging_lasts_always_far": {
        "far, where a read takes longer than staging lasts": drop("Reaches.note", "reach.most_bytes > staging_bytes"),
        "what is asked for meanwhile is counted for every read ahead": drop(
            "Up._prefetch", "ahead.reach.read_began(record.key)"
        ),
        "what is asked for while a read is under way is counted to its end": drop(
            "Rules.end_read", "self.ahead.reach.read_ended(record.key)"
        ),
        "bytes that are asked for are counted": drop("Rules.ask_for", "ahead.reach.asked_for(record.nbytes)"),
    },
    "test_given_lookahead_or_order_that_is_not_learned_always_far": {
        "a lookahead that is given is kept to": drop("GraphOrder.look_ahead", "self._finds_reach"),
    },
    "test_prefetch_into_staging_alone_drops_nothing_that_makes_no_room_there": {
        "near, nothing is dropped that makes no room in staging": drop(
            "Up._make_way", "ahead.reach.is_far or used.window is self.windows.staging"
        ),
    },
    "test_device_full_while_copying_ahead_backward_goes_on_without": {
        "copies back go as far ahead as the device has room": replace(
            "GraphOrder.__init__", "0 if lookahead_bytes == 0 else sys.maxsize", "0"
        ),
    },
}
