"""Exhaustive search, breadth first, through the states of a model."""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

__all__ = ["Findings", "Searchable", "Step", "Violation", "search"]


class Violation(NamedTuple):
    """Instead of a state: what must not happen has happened."""

    reason: str


Step = tuple[str, Any]
"""What happens, in words, and the state after it (or a `Violation`)."""


class Searchable(Protocol):
    """What can be searched; states are hashable.

    Attributes:
        start: the first state.
    """

    start: Any

    def steps(self, state: Any) -> Iterator[Step]:
        """All that can happen next."""
        ...

    def flaw(self, state: Any) -> str | None:
        """What is wrong with the state, in words; None: nothing."""
        ...

    def is_at_rest(self, state: Any) -> bool:
        """Whether everything may end here."""
        ...


class Findings(NamedTuple):
    """What a search saw.

    Attributes:
        num_states: different ones.
        num_steps: between them.
        violation: the first; None: there is none.
        trace: the shortest way to it, in words.
    """

    num_states: int
    num_steps: int
    violation: str | None = None
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.num_states} states, {self.num_steps} steps: {self.violation or 'no violation'}"]
        return "\n".join(lines + [f"{number:3d}. {label}" for number, label in enumerate(self.trace, 1)])


MOST_STATES = 1_000_000
"""Far beyond every model here: one without an end is a mistake in the model."""


def search(model: Searchable) -> Findings:
    """Look at every state that can be reached, up to the first that is wrong, or from which there is no way to rest."""
    numbers = {model.start: 0}
    ways: list[tuple[int, str]] = [(0, "")]  # of each state: from which one it was reached first, and how
    before: list[list[int]] = [[]]  # of each state: all those a step from it
    at_rest: list[int] = []
    waiting = deque([model.start])
    num_steps = 0
    while waiting:
        if len(numbers) > MOST_STATES:
            raise RuntimeError(f"more than {MOST_STATES} states")
        state = waiting.popleft()
        number = numbers[state]
        flaw = model.flaw(state)
        if flaw is not None:
            return Findings(len(numbers), num_steps, flaw, _trace(ways, number))
        if model.is_at_rest(state):
            at_rest.append(number)
        for label, after in model.steps(state):
            num_steps += 1
            if isinstance(after, Violation):
                return Findings(len(numbers), num_steps, after.reason, (*_trace(ways, number), label))
            if after not in numbers:
                numbers[after] = len(ways)
                ways.append((number, label))
                before.append([])
                waiting.append(after)
            before[numbers[after]].append(number)
    stuck = _first_without_way_to(at_rest, before)
    if stuck is not None:
        return Findings(len(numbers), num_steps, "no way to rest", _trace(ways, stuck))
    return Findings(len(numbers), num_steps)


def _trace(ways: list[tuple[int, str]], number: int) -> tuple[str, ...]:
    labels = []
    while number != 0:
        number, label = ways[number]
        labels.append(label)
    return tuple(reversed(labels))


def _first_without_way_to(ends: list[int], before: list[list[int]]) -> int | None:
    seen = set(ends)
    waiting = list(ends)
    while waiting:
        for number in before[waiting.pop()]:
            if number not in seen:
                seen.add(number)
                waiting.append(number)
    return next((number for number in range(len(before)) if number not in seen), None)
