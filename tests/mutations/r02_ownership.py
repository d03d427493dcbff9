"""R2: State lives in the packed object, and finalizers only append to a queue."""

from .changes import after, drop, never, replace

MUTATIONS = {
    "test_graph_dropped_nothing_is_held": {
        "a saved output is not held itself": replace(
            "OffloadScope.pack", "tensor.detach()", "tensor", inside="saved.alias = ..."
        ),
    },
    "test_kept_result_of_the_node_that_saves_it_dies_with_the_graph": {
        "nor is one that stays where it is": replace(
            "OffloadScope.pack", "tensor.detach()", "tensor", inside="tensor = ..."
        ),
    },
    "test_what_others_hold_is_in_no_group": {
        "what others hold is in no group": replace(
            "hold_alone", "saved == (uses - 1, address, nbytes)", "saved[1:] == (address, nbytes)"
        ),
    },
    "test_edit_between_forward_and_backward_same_outcome[data replaced]": {
        "a kept parameter is handed back itself": replace("OffloadScope.pack", "not tensor.is_leaf", "True"),
    },
    "test_graph_ends_nothing_is_held": {
        "a dropped handle frees its record": drop("Remains.__new__", "note_death", inside="super().__new__(...)"),
        "no table keeps what the graph has dropped": after(
            "HandleFactory.of_tracked",
            "claim(record, ...)",
            'self.__dict__.setdefault("table", {})[record.key] = handle',
        ),
    },
    "test_residency_threads.py": {
        "a handle's death takes no lock": after(
            "Handle", "record: Record", "def __del__(self):\n    with self.owner.residency.lock: pass"
        ),
    },
    "test_graph_ends_as_garbage_its_order_is_learned": {
        "what is left of a log outlives it, also as garbage": drop("TrackedTensors.begin", "self._begun.add(remains)"),
    },
    "test_exit_leaves_no_thread_of_a_store_running": {
        "the engine is ended at interpreter exit": drop("lifetime:", "atexit.register(_at_exit)"),
    },
    ("test_slots.py", "test_residency_threads.py"): {
        "a storage's death takes nothing apart": replace(
            "Slots.hand_out", "self.returned.append", "lambda slot: (self.returned.append(slot), self.take_back())"
        ),
    },
    "test_close_wakes_whoever_waits_before_the_engine_has_ended": {
        "at interpreter exit who waits is woken": drop("Guard.end", "self.progress.notify_all()"),
    },
    "test_close_on_a_thread_of_the_stores_own_waits_for_nothing[loop]": {
        "a finalizer that closes the store on its own thread waits for nothing": never(
            "Core.close", "is_thread_of_store()"
        ),
    },
    "test_exit_with_a_store_open_is_clean": {
        "the I/O threads work to the end": replace(
            "Engine._run",
            "with IoThreads(num_threads, f'{self._name}-io') as self._io_threads: ...",
            """
            from concurrent.futures import ThreadPoolExecutor
            with ThreadPoolExecutor(num_threads) as self._io_threads: ...
            """,
        ),
    },
}

UNSHOWN = {
    "releases after the end do nothing": "they append to a queue, as all others do",
}
