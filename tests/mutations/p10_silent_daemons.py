"""P10: A daemon that hangs is noticed, and a slow one is not taken for one that hangs."""

from __future__ import annotations

from .changes import drop

MUTATIONS = {
    ("test_silence.py", "test_silent_peer_is_asked_whether_it_lives_and_then_given_up"): {
        "silence is given up": drop("Silence._look", "self._give_up()"),
    },
    "test_silent_daemon_is_asked_at_half_time_and_given_up_at_the_end": {
        "the daemon is asked whether it lives": drop("Silence._look", "self._ask()"),
    },
}
