"""The client in the model of the protocol."""

from collections.abc import Iterator

from tests.daemon.model_records import (
    Message,
    Rules,
    Scope,
    State,
    ask,
    given_back,
    letter,
    with_free_slot,
    with_handle,
    with_item,
)
from tests.daemon.state_search import Step, Violation

__all__ = ["Client"]


class Client:
    """The steps of the client from a state, and what it does when its connection is lost."""

    def __init__(self, rules: Rules, scope: Scope) -> None:
        self._rules = rules
        self._scope = scope

    def steps(self, state: State) -> Iterator[Step]:
        for number, handle in enumerate(state.handles):
            if handle.place == "settled" or self._process_of(number) != state.process:
                continue
            if handle.is_live:
                yield f"the client releases {letter(number)}", self._release(state, number)
                yield from self._slot_steps(state, number)
            elif state.link == "up" and handle.is_known and not handle.is_discarding:
                after = with_handle(state, number, handle._replace(is_discarding=True))
                yield f"the client asks to discard {letter(number)}", ask(after, "Discard", number)
        if state.to_client:
            yield self._hear(state)
        if state.link == "new" and state.is_daemon_alive:
            yield "the next client opens a session", state._replace(link="up")
        if state.link == "down" and state.is_daemon_alive:
            yield "the client connects again", state._replace(link="resuming", to_daemon=(Message("Resume"),))

    def after_drop(self, state: State) -> State:
        """What it makes of the loss of its connection."""
        return state if self._rules.slot_kept_until_resumed else self._forget_requests(state)

    def _slot_steps(self, state: State, number: int) -> Iterator[Step]:
        """A live handle's bytes go to a slot and from there to the daemon, or come back."""
        handle, name = state.handles[number], letter(number)
        if handle.place == "memory":
            for slot in self._free_slots(state):
                copied = with_handle(state, number, handle._replace(place="copied", slot=slot))
                copied = copied._replace(slots=with_item(state.slots, slot, name))
                yield f"the client copies {name} into slot {slot}", _unless_used(state, slot, copied)
        if handle.place == "copied":
            yield f"the client takes {name} out of its slot", with_free_slot(state, number, "memory")
        if state.link != "up":
            return
        if handle.place == "copied":
            key = handle.key if self._rules.keys_are_never_reused or state.handles[0].is_live else 0
            after = with_handle(state, number, handle._replace(key=key, place="writing", is_known=True))
            yield f"the client asks to write {name} from slot {handle.slot}", ask(after, "Write", number)
        if handle.place == "stored":
            for slot in self._free_slots(state):
                after = with_handle(state, number, handle._replace(place="reading", slot=slot))
                after = after._replace(slots=with_item(state.slots, slot, None))
                after = _unless_used(state, slot, ask(after, "Read", number))
                yield f"the client asks to read {name} into slot {slot}", after

    def _release(self, state: State, number: int) -> State:
        handle = state.handles[number]
        released = with_handle(state, number, handle._replace(is_live=False))
        if handle.place == "copied" or not self._rules.released_slot_kept_until_answer:
            return with_free_slot(released, number, "stored")
        return released

    def _hear(self, state: State) -> Step:
        answer, state = state.to_client[0], state._replace(to_client=state.to_client[1:])
        label = f"the client hears {answer.kind}" + (f" of {letter(answer.handle)}" if answer.kind != "Resumed" else "")
        if answer.kind == "Resumed":
            return label, self._forget_requests(state._replace(link="up"))
        handle = state.handles[answer.handle]
        if answer.kind == "Gone":
            return label, with_handle(state, answer.handle, handle._replace(is_known=False, is_discarding=False))
        if handle.slot is None:  # it was taken back: rule 3 is left out
            return label, state
        if answer.kind == "Stored":
            return label, with_free_slot(state, answer.handle, "stored")
        content = state.slots[handle.slot]
        if answer.kind == "Loaded" and handle.is_live and content != letter(answer.handle):
            return label, Violation(f"{letter(answer.handle)} comes back as {content or 'garbage'}")
        return label, given_back(state, answer.handle)

    def _forget_requests(self, state: State) -> State:
        for number, handle in enumerate(state.handles):
            state = with_handle(state, number, handle._replace(is_discarding=False))
            if handle.place in ("writing", "reading"):
                state = given_back(state, number)
        return state

    def _free_slots(self, state: State) -> Iterator[int]:
        first = state.process * self._scope.num_slots
        taken = {handle.slot for handle in state.handles}
        return (slot for slot in range(first, first + self._scope.num_slots) if slot not in taken)

    def _process_of(self, number: int) -> int:
        return number if self._scope.client_dies else 0


def _unless_used(state: State, slot: int, after: State) -> State | Violation:
    """Rule 3, from the daemon's side: what the client takes must be the client's."""
    if any(job.slot == slot for job in state.jobs):
        return Violation("the slot is used by a job of the daemon")
    return after
