"""P5: A write is idempotent by its key, and a key is used once."""

from .changes import replace

MUTATIONS = {
    "test_write_that_is_said_twice_is_stored_once": {
        "a write that is said twice is stored once": replace("Session.serve", "self.records.get(message.key)", "None"),
    },
    "test_key_on_the_wire_is_used_once": {
        "the client uses a key once": replace("RemoteDisk._write_part", "next(self._wire_keys)", "1"),
    },
}
