"""How much memory clients may keep the daemon from freeing, by user and in all. For one loop.

Requests that wait are not refused: they end by themselves, so a client that is not heard for a while has only to wait.
Answers wait for their client, perhaps for ever: who takes too few of them is cut off."""

from __future__ import annotations

from collections import Counter, defaultdict

from tierstore.sidecar import messages

from .sessions import Session
from .turns import Client

_REQUEST_BYTES = 1536  # a write that is queued takes 1.3 KB
_TASK_BYTES = 2048  # a discard that waits has a task beside it
_KEY_BYTES = 40
_CHARACTER_BYTES = 4

MOST_OF_SESSION_BYTES = 64 * 2**10
"""What a session may always have waiting, whatever its user's others have: some dozens of writes."""

MOST_OF_USER_BYTES = 32 * 2**20
MOST_IN_ALL_BYTES = 64 * 2**20
"""Limits of requests that wait, and of answers that nobody takes: for each of the two."""

_GO_ON_SHARE = 0.75  # of a limit: those who are held back go on together, not at each request that ends


def waiting_bytes_of(request: messages.Write | messages.Read | messages.Discard) -> int:
    """What it takes while it waits, more or less."""
    match request:
        case messages.Discard():
            return _REQUEST_BYTES + _TASK_BYTES + _KEY_BYTES * len(request.keys)
        case messages.Write():
            return _REQUEST_BYTES + _CHARACTER_BYTES * (len(request.dtype) + len(request.origin))
    return _REQUEST_BYTES


class Waiting:
    """Requests that are not answered, with the memory that they take; it belongs to sessions, which a new connection
    does not rid of it. `in_all_bytes`: of all users."""

    def __init__(self) -> None:
        self.in_all_bytes = 0
        self._of_user: Counter[int] = Counter()
        self._held: dict[Client, int] = {}  # with their users

    def begin(self, session: Session, num_bytes: int) -> bool:
        """Count a request; returns whether its session may say more now."""
        uid = session.lease.uid
        session.waiting_bytes += num_bytes
        self._of_user[uid] += num_bytes
        self.in_all_bytes += num_bytes
        has_room = self._of_user[uid] < MOST_OF_USER_BYTES and self.in_all_bytes < MOST_IN_ALL_BYTES
        return has_room or session.waiting_bytes < MOST_OF_SESSION_BYTES

    def hold(self, connection: Client, uid: int) -> None:
        """Hold a connection back until its user's requests take less."""
        self._held[connection] = uid
        connection.hold()

    def end(self, session: Session, num_bytes: int) -> None:
        uid = session.lease.uid
        session.waiting_bytes -= num_bytes
        self._of_user[uid] -= num_bytes
        self.in_all_bytes -= num_bytes
        if _has_passed(MOST_OF_SESSION_BYTES, session.waiting_bytes, num_bytes) and session.connection is not None:
            self._let_go_on(session.connection)
        limits = (MOST_OF_USER_BYTES, self._of_user[uid]), (MOST_IN_ALL_BYTES, self.in_all_bytes)
        if any(_has_passed(_GO_ON_SHARE * limit, now, num_bytes) for limit, now in limits):
            self._let_all_go_on()

    def remove(self, connection: Client) -> None:
        self._held.pop(connection, None)

    def _let_all_go_on(self) -> None:
        if self.in_all_bytes > _GO_ON_SHARE * MOST_IN_ALL_BYTES:
            return
        for connection, uid in list(self._held.items()):
            if self._of_user[uid] <= _GO_ON_SHARE * MOST_OF_USER_BYTES:
                self._let_go_on(connection)

    def _let_go_on(self, connection: Client) -> None:
        if self._held.pop(connection, None) is not None:
            connection.go_on()


def _has_passed(limit: float, now: int, taken_off: int) -> bool:
    return now <= limit < now + taken_off


class Unsent:
    """Bytes of answers that clients have not taken yet."""

    def __init__(self) -> None:
        self.in_all_bytes = 0
        self._of_user: defaultdict[int, Counter[Client]] = defaultdict(Counter)

    def count(self, connection: Client, uid: int, num_bytes: int) -> None:
        """So many more, or fewer."""
        self.in_all_bytes += num_bytes
        of_user = self._of_user[uid]
        of_user[connection] += num_bytes
        if not of_user[connection]:
            del of_user[connection]

    def slowest(self, uid: int) -> Client | None:
        """Who takes the fewest of its answers, among this user's, or among those of the user who has most; None: no
        limit is passed."""
        if self.in_all_bytes > MOST_IN_ALL_BYTES:
            uid = max(self._of_user, key=lambda each: self._of_user[each].total())
        elif self._of_user[uid].total() <= MOST_OF_USER_BYTES:
            return None
        return max(self._of_user[uid], key=self._of_user[uid].__getitem__)
