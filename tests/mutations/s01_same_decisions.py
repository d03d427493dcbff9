"""S1: The simulator decides as the store does."""

from __future__ import annotations

from .changes import always, drop, replace

MUTATIONS = {
    "test_decisions_random_steps_on_an_accelerator_are_those_of_the_store": {
        "what was lent comes back when it is needed": replace(
            "SimulatedDevice.hold", "if self._window.hold(record): ...", "self._window.hold(record)"
        ),
        "one copy out may be larger than its window": replace(
            "SimulatedDevice._bound_flight", "len(self._flights) > 1", "len(self._flights) > 0"
        ),
        "beyond the window computing waits for copies out": drop(
            "SimulatedDevice._bound_flight", "self._copies.wait(flight.copy)"
        ),
        "a copy back comes after the copy out": drop("SimulatedDevice.reload", "record.ready", inside="Copy(...)"),
        "two may be back whatever their size": replace(
            "SimulatedDevice.reload", "len(self._reloaded) > 2", "len(self._reloaded) > 1"
        ),
        "what is asked for is the last to be forgotten": drop(
            "SimulatedDevice.hand_over", "self._reloaded.move_to_end(record.key)"
        ),
        "computing waits for a copy back once": drop("SimulatedDevice.hand_over", "reload.is_awaited = True"),
        "what is asked for is not ahead any more": drop("SimulatedDevice.hand_over", "self._num_ahead -= 1"),
        "nor is what is forgotten": drop("SimulatedDevice.forget", "self._num_ahead -= 1"),
        "one may come back ahead whatever its size": drop("SimulatedDevice.has_room_to_reload", "not self._num_ahead"),
        "what copies have finished with is noticed": drop("SimulatedDevice.is_busy", "self._flights"),
        "copies back go on from what was asked for": drop("Rank._hand_over", "log.reload_ahead.asked_for(index)"),
        "copies back go as far ahead as the device has room": replace(
            "GraphLog.__init__", "0 if lookahead_bytes == 0 else sys.maxsize", "lookahead_bytes or budgets.host_bytes"
        ),
    },
    "test_decisions_random_steps_are_those_of_the_store": {
        "backward that waits for the disk goes far": drop("Rank._fetch", "log.lookahead.reach.wait()"),
        "near, where the last backward was seen to need no more": always(
            "GraphLog.look_ahead", "not orders.reaches.is_near(self._signatures[-1])"
        ),
    },
}
