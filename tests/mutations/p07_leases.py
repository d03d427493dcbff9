"""P7: A session is a lease of the user who opened it."""

from __future__ import annotations

from .changes import drop, never, replace

MUTATIONS = {
    "test_client_that_comes_back_within_the_grace_period_has_everything": {
        "a lost client has the grace period": replace(
            "Daemon._start_grace", "self.limits.grace_seconds", "0", inside="loop.call_later(...)"
        ),
    },
    "test_lease_of_a_client_that_is_back_does_not_end": {
        "a client that is back has its session for good": replace(
            "Daemon.take_over", "self._stop_grace(session)", "session.lost_at = None"
        ),
    },
    "test_stolen_session_without_its_token_is_refused": {
        "the token is asked for": drop(
            "Lease.is_resumed_by", "hmac.compare_digest(self.token_hash, hashlib.sha256(token).digest())"
        ),
    },
    "test_user_who_is_not_listed_is_refused": {
        "only users who are listed may connect": never(
            "Daemon._take_in", "uid not in {0, os.getuid()} | self.settings.allowed_uids"
        ),
    },
}
