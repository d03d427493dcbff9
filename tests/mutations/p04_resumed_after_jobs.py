"""P4: A session is resumed only after the jobs of its lost connection have ended."""

from .changes import drop

MUTATIONS = {
    "test_resumed_only_when_the_jobs_of_the_lost_connection_have_ended": {
        "resumed when the old jobs have ended": drop("Connection._resume", "await session.wait_for(None)"),
    },
}
