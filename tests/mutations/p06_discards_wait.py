"""P6: A discard waits for its key's job, and the end of a session for all of its jobs."""

from .changes import drop

MUTATIONS = {
    "test_discard_waits_for_the_write_of_its_key": {
        "a discard waits for the job of its key": drop(
            "Connection._discard", "await session.wait_for(frozenset(message.keys))"
        ),
    },
    "test_end_of_a_session_waits_for_its_jobs": {
        "a session ends when its jobs have ended": drop("Registry.end", "await session.wait_for(None)"),
    },
}
