"""S1: The simulator books, waits and takes the order of a graph as the store does, so that it decides the same."""

from __future__ import annotations

from .changes import drop, replace

MUTATIONS = {
    "test_decisions_random_steps_on_an_accelerator_are_those_of_the_store": {
        "beyond the window computing waits for copies out": drop(
            "simulator.device:_Stream.wait_where_packed", "self._copies.wait(end)"
        ),
        "a copy back comes after the copy out": drop(
            "simulator.device:_Stream.copy_back", "record.ready", inside="Copy(...)"
        ),
        "what is back is on the device": drop("simulator.device:_Stream.copy_back", "record.has_device_bytes = True"),
        "what leaves host memory leaves the device": replace(
            "SimulatedMemory.let_go", "record.is_in_place = record.has_device_bytes = ...", "record.is_in_place = ..."
        ),
        "copies back go on from what was asked for": replace(
            "Rank._hand_over", "log.order.reload_ahead if log.order.is_followed else None", "None"
        ),
    },
    "test_decisions_random_steps_are_those_of_the_store": {
        "what backward asks for is told to what looks ahead": replace(
            "Rank._fetch", "log.order.lookahead if log.order.is_followed else None", "None"
        ),
        "a write that is asked for is cancelled": drop("Rank._await_bytes", "if record.state is State.QUEUED: ..."),
        "a view joins the record of its storage": replace(
            "SimulatedBooking._book", "log.unread_record_of(index)", "None"
        ),
        "only what nobody else holds is taken": replace(
            "SimulatedMemory.is_ours", "not record.is_in_place or ...", "True"
        ),
        "once its bytes were read nothing joins a record": drop(
            "SimulatedMemory.begin_write", "record.is_read, record.held = ..."
        ),
        "noted bytes that are booked are not counted twice": drop("SimulatedBooking._book", "self.noted.remove(...)"),
    },
}
