"""N4: Where a process is killed the others do what `docs/project/internals/reliability.md` promises."""

from __future__ import annotations

from .changes import after, drop, replace

MUTATIONS = {
    "test_trainer_killed_at_each_state_leaves_no_byte[a few]": {
        "a killed trainer leaves no file": replace(
            "open_unnamed", "os.open(...)", "tempfile.mkstemp(dir=directory)[0]"
        ),
    },
    "test_client_killed_at_each_state_is_forgotten_after_the_grace_period[a few]": {
        "a killed client's lease ends": replace(
            "Registry._expire",
            "self._tasks.start(self.end(session, ...))",
            "_log.info('%s: %s', *(session.lease.name, ...))",
        ),
    },
    "test_daemon_ended_at_each_state_of_a_handle_loses_nothing[killed at a few]": {
        "a killed daemon takes its records up": drop("NamedHome._take_up", "locations=locations"),
    },
    (
        "test_link_that_has_given_up_is_back_though_nobody_asks_for_anything",
        "test_client_that_gave_up_and_asks_for_nothing_keeps_its_session",
    ): {
        "a client that gave its daemon up comes back within the grace period, though it asks for nothing": replace(
            "Reconnecting._resume_late", "self._unasked_pause_seconds", "None"
        ),
    },
    "test_client_stopped_for_longer_than_the_grace_period_goes_on_or_is_told": {
        "a client that is connected keeps its session": after(
            "Registry.enter",
            "self._connection_of[session.lease.number] = connection",
            "self._start_grace(session)",
        ),
    },
}
