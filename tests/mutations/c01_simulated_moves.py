"""C1: The simulator's copy of the moves decides as the store's own.

This file goes when `tierstore/simulator/moves.py` does.
"""

from __future__ import annotations

from .changes import drop

MUTATIONS = {
    "test_decisions_random_steps_on_an_accelerator_are_those_of_the_store": {
        "what leaves host memory leaves the device": drop("SimulatedMoves._drop", "self.device.forget(record)"),
        "what was blocked lets others leave the device": drop(
            "SimulatedMoves.admit_blocked", "self._offload_surplus()"
        ),
        "what is being copied out can come back": drop("simulator.moves:_IN_HOST_MEMORY", "State.OFFLOADING"),
        "what nobody needs is not copied back": drop("SimulatedMoves.reload_ahead", "record.users"),
    },
    "test_decisions_random_steps_are_those_of_the_store": {
        "what is asked for while a read is under way is counted to its end": drop(
            "SimulatedMoves.restored", "self.ahead.reach.read_ended(record.key)"
        ),
    },
}
