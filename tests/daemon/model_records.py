"""What the model of the protocol is made of: its rules, its scope, and the records of its state."""

from typing import NamedTuple

__all__ = [
    "Handle",
    "Job",
    "Message",
    "Rules",
    "Scope",
    "State",
    "answer",
    "ask",
    "cut",
    "given_back",
    "letter",
    "with_free_slot",
    "with_handle",
    "with_item",
    "with_job",
    "without_job",
]


class Rules(NamedTuple):
    """Those of `tierstore/sidecar/messages.py`, by number; False: the rule is left out.

    Attributes:
        stored_after_commit: 1.
        extent_reused_after_commit: 2.
        released_slot_kept_until_answer: 3, when the handle is released.
        slot_kept_until_resumed: 3, when the connection is lost.
        resumed_after_jobs: 4.
        write_is_idempotent: 5. Without it a second `Write` stores a second record.
        keys_are_never_reused: 5. Without it the second handle takes the first one's key once that is released.
        discard_waits_for_job: 6.
        lease_end_waits_for_jobs: 6.
    """

    stored_after_commit: bool = True
    extent_reused_after_commit: bool = True
    released_slot_kept_until_answer: bool = True
    slot_kept_until_resumed: bool = True
    resumed_after_jobs: bool = True
    write_is_idempotent: bool = True
    keys_are_never_reused: bool = True
    discard_waits_for_job: bool = True
    lease_end_waits_for_jobs: bool = True


class Scope(NamedTuple):
    """How much there is of everything.

    Attributes:
        num_handles: that the client stores, one after the other or at once.
        num_slots: of the slab of each process.
        num_extents: on disk.
        client_dies: the first handle is the first process's, the second that of its successor.
    """

    num_handles: int
    num_slots: int
    num_extents: int
    client_dies: bool = False


class Message(NamedTuple):
    """A request or its answer, by `kind`; in `Resume` and `Resumed` the rest means nothing."""

    kind: str
    handle: int = 0
    key: int = 0
    slot: int | None = None


class Handle(NamedTuple):
    """What the client knows of one.

    Attributes:
        key: of its record.
        place: "memory" | "copied" (into its slot) | "writing" | "stored" | "reading" | "settled" (released, and nothing
            of it is anywhere).
        slot: with its bytes, or that its unanswered request names.
        is_live: not released.
        is_known: the daemon may have heard of its key.
        is_discarding: a `Discard` is unanswered.
    """

    key: int
    place: str = "memory"
    slot: int | None = None
    is_live: bool = True
    is_known: bool = False
    is_discarding: bool = False


class Job(NamedTuple):
    """What the daemon does for one request.

    Attributes:
        kind, handle, key, slot: of the request.
        is_orphan: the connection that asked is gone.
        stage: "begun" | "moved" (written, not committed) | "answered", "freed" (only where rules 1 and 2 are left out).
        extent: read from or written to.
    """

    kind: str
    handle: int
    key: int
    is_orphan: bool = False
    stage: str = "begun"
    slot: int | None = None
    extent: int | None = None


class State(NamedTuple):
    """Of everything. `index` (the extent of each key) and `extents` (their contents) survive the daemon.

    Attributes:
        link: "new" (no session yet) | "up" | "down" | "resuming".
        process: which of the clients is alive.
        free: extents, as the allocator has them.
    """

    handles: tuple[Handle, ...]
    slots: tuple[str | None, ...]
    extents: tuple[str | None, ...]
    index: tuple[int | None, ...]
    free: frozenset[int]
    jobs: tuple[Job, ...] = ()
    to_daemon: tuple[Message, ...] = ()
    to_client: tuple[Message, ...] = ()
    link: str = "up"
    process: int = 0
    is_daemon_alive: bool = True


def letter(number: int) -> str:
    return "ABC"[number]


def with_item(values: tuple, position: int | None, value: object) -> tuple:  # type: ignore[type-arg]
    assert position is not None
    return (*values[:position], value, *values[position + 1 :])


def with_handle(state: State, number: int, handle: Handle) -> State:
    if not handle.is_live and not handle.is_known and handle.slot is None:
        handle = Handle(handle.key, "settled", is_live=False)
    return state._replace(handles=with_item(state.handles, number, handle))


def ask(state: State, kind: str, number: int) -> State:
    handle = state.handles[number]
    slot = None if kind == "Discard" else handle.slot
    return state._replace(to_daemon=(*state.to_daemon, Message(kind, number, handle.key, slot)))


def given_back(state: State, number: int) -> State:
    """The slot of an unanswered request is the client's again: after `Full`, `Failed`, `Loaded` or `Resumed`."""
    handle = state.handles[number]
    if handle.is_live and handle.place == "writing":
        return with_handle(state, number, handle._replace(place="copied"))
    return with_free_slot(state, number, "stored")


def with_free_slot(state: State, number: int, place: str) -> State:
    return with_handle(state, number, state.handles[number]._replace(place=place, slot=None))


def cut(state: State) -> State:
    """Without the connection: what was on its way is lost, and who asked for the running jobs is gone."""
    link = "new" if state.link == "new" else "down"
    orphans = tuple(sorted(job._replace(is_orphan=True) for job in state.jobs))
    return state._replace(link=link, to_daemon=(), to_client=(), jobs=orphans)


def with_job(state: State, job: Job, instead_of: Job | None = None) -> State:
    others = (other for other in state.jobs if other != instead_of)
    return state._replace(jobs=tuple(sorted((*others, job))))


def without_job(state: State, job: Job) -> State:
    return state._replace(jobs=tuple(other for other in state.jobs if other != job))


def answer(state: State, job: Job, kind: str) -> State:
    state = without_job(state, job)
    if job.is_orphan:
        return state
    return state._replace(to_client=(*state.to_client, Message(kind, job.handle)))
