"""P3: A slot that is named in an unanswered request is the daemon's."""

from .changes import replace

MUTATIONS = {
    "test_slot_of_a_request_that_was_given_up_is_not_used_for_another": {
        "the slot of a write that was given up stays taken": replace(
            "RemoteDisk._write_part",
            "answer = await self._link.ask(...)",
            """
            try:
                answer = await self._link.ask(...)
            except BaseException:
                self._window.give_back(slot)
                raise
            """,
        ),
    },
}
