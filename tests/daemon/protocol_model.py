"""A small model of the sidecar's protocol, and a search through all that can happen in it.

**What is modelled.** One client with a few handles and a few slots of its slab; one daemon with its jobs, its allocator
and the index that survives it; one connection, first in first out each way. A handle's payload is a letter. Bytes are
moved in single steps, at any time after the request has arrived, and jobs take their steps in any order.

* The client copies a handle's bytes into a slot, also while it has no connection; they are the only copy from then on,
  which can be taken out again. It asks for `Write` from there, and reads what is `Stored` into a slot as often as it
  likes. It releases a handle at any moment, also while a request names it, and asks for `Discard` at any moment after
  that. What was unanswered when the connection broke may be asked for again after `Resumed`.
* The daemon answers, moves bytes, commits to its index one entry at a time and in any order (a batch that fails is
  retried entry by entry, so no order is promised), or fails to write.
* The connection drops at any moment, any number of times, and what was on its way in both directions is lost. (What the
  daemon still reads of a connection that the client has given up, it could as well have read before; likewise the
  client.) Jobs go on without it; their answers go nowhere.
* The daemon is killed at any moment, any number of times: its jobs, its allocator and what is not committed are gone;
  the index and the contents of extents stay. The next one makes its allocator from the index.
* In some scopes the client is killed, once. Another process with a slab and a session of its own takes its place, and
  the daemon ends the dead one's lease at any moment after that.

**What is not modelled.** Damage (bytes that change on disk, a device that fails to read), encodings, sizes, partial
overlap of slots or of extents, quotas, several slabs and `Unmap`, `Close` (a lease that ends, with the client still
there), a lease that ends while its client lives (`Resume` is refused then, and the client is told that its data is
lost), versions, tokens, two clients at the same moment, power loss. A request's number is the pair of its kind and its
handle, because the client has at most one request of a kind for a handle.

**What must hold** (`Violation` says which did not):

* a live handle's bytes are in its slot, or on disk once that was acknowledged, and nothing but its own bytes ever come
  back from a read;
* the client does not touch a slot that a job of the daemon uses;
* the extent of a record that may be read is neither free nor anybody else's;
* at rest, when every handle is released and nothing is under way, every slot and every extent is free and the index is
  empty;
* and from everywhere that rest can still be reached: nothing hangs.

Each rule of the protocol is a flag of `Rules`; two of the six have two halves, and rule 3 has two ends.
"""

from collections.abc import Iterator

from tests.daemon.model_client import Client
from tests.daemon.model_daemon import Daemon
from tests.daemon.model_records import Handle, Rules, Scope, State, cut, letter, with_handle
from tests.daemon.state_search import Step

__all__ = ["Model", "Rules", "Scope"]


class Model:
    """The steps from a state, for one set of rules in one scope."""

    def __init__(self, rules: Rules, scope: Scope) -> None:
        self._scope = scope
        self._client = Client(rules, scope)
        self._daemon = Daemon(rules, scope)
        num_processes = 2 if scope.client_dies else 1
        self.start = State(
            handles=tuple(Handle(key) for key in range(scope.num_handles)),
            slots=(None,) * scope.num_slots * num_processes,
            extents=(None,) * scope.num_extents,
            index=(None,) * scope.num_handles,
            free=frozenset(range(scope.num_extents)),
        )

    def steps(self, state: State) -> Iterator[Step]:
        yield from self._client.steps(state)
        yield from self._fault_steps(state)
        if state.is_daemon_alive:
            yield from self._daemon.steps(state)

    def is_at_rest(self, state: State) -> bool:
        """Every handle is settled and nothing is under way."""
        return (
            all(handle.place == "settled" for handle in state.handles)
            and state.is_daemon_alive
            and not state.to_client
            and next(self._daemon.steps(state), None) is None
        )

    def flaw(self, state: State) -> str | None:
        """What is wrong with the state, in words; None: nothing."""
        for number, handle in enumerate(state.handles):
            if handle.is_live and handle.place == "copied" and state.slots[handle.slot or 0] != letter(number):
                return f"the slot with the only bytes of {letter(number)} was overwritten"
            if not handle.is_live or handle.place not in ("stored", "reading"):
                continue
            extent = state.index[handle.key]
            if extent is not None and extent in state.free:
                return f"the extent of the live record {letter(number)} is free"
            if any(job.extent == extent and job.kind == "Write" and job.key != handle.key for job in state.jobs):
                return f"another record is being written to the extent of the live record {letter(number)}"
        if self.is_at_rest(state):
            if any(extent is not None for extent in state.index):
                return "leaked at rest: a record of a released handle"
            if len(state.free) < len(state.extents):
                return "leaked at rest: an extent"
        return None

    def _fault_steps(self, state: State) -> Iterator[Step]:
        if state.link in ("up", "resuming"):
            yield "the connection drops", self._client.after_drop(cut(state))
        if state.is_daemon_alive:
            killed = self._client.after_drop(cut(state))._replace(jobs=(), free=frozenset(), is_daemon_alive=False)
            yield "the daemon is killed", killed
        else:
            free = frozenset(range(len(state.extents))).difference(state.index)
            yield "the daemon is started", state._replace(is_daemon_alive=True, free=free)
        if self._scope.client_dies and state.process == 0:
            dead = with_handle(state, 0, Handle(0, is_live=False))
            yield "the client is killed", cut(dead)._replace(process=1, link="new")
