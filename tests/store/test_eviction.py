"""Which record leaves first: by the books, and against a slow model."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.inspect_store import keys_in
from tierstore.ledger.eviction import EvictionOrder
from tierstore.ledger.plan import PlannedTier


def _record(key: int, priority: int = 0, planned: PlannedTier | None = None) -> Any:
    return SimpleNamespace(key=key, priority=priority, planned=planned)


def test_leaving_by_the_plan_in_the_order_of_saving_until_backward_begins() -> None:
    order = EvictionOrder()
    records = [
        _record(key, planned=planned)
        for key, planned in enumerate([PlannedTier.DISK, None, PlannedTier.HOST, *3 * [PlannedTier.DISK]])
    ]
    for record in records:
        order.add_dirty(record)
    assert order.next_leaving() is records[0]
    order.remove(records[0])
    assert order.next_leaving() is records[3]
    records[3].planned = None
    assert order.next_leaving() is records[4]
    for record in records:
        record.planned = None
    assert order.next_leaving() is None
    assert len(keys_in(order)) == 5, "they may still leave when they have to"


@given(
    st.lists(
        st.tuples(st.sampled_from(["dirty", "asked", "clean", "use", "remove"]), st.integers(0, 6)),
        max_size=40,
    )
)
def test_any_sequence_matches_the_model(actions: list[tuple[str, int]]) -> None:
    """What is known to be needed last leaves first; of those that are needed alike, what was saved first."""
    order, records = EvictionOrder(), [_record(key, priority) for key, priority in enumerate((7, 5, 5, 6, 5, 9, 0))]
    dirty: list[int] = []
    asked: list[int] = []
    clean: list[int] = []
    used: list[int] = []

    def forget(key: int) -> None:
        for queue in (dirty, asked, clean, used):
            if key in queue:
                queue.remove(key)

    for action, key in actions:
        if action == "remove" or key in dirty + asked + clean + used:
            if action == "use" and key in clean:
                order.use(records[key])
                clean.remove(key)
                used.append(key)
            else:
                order.remove(records[key])
                forget(key)
        elif action == "dirty":
            order.add_dirty(records[key])
            dirty.append(key)
        elif action == "asked":
            order.add_asked(records[key])
            asked.append(key)
        elif action == "clean":
            order.add_clean(records[key])
            clean.insert(0, key)
        else:
            order.use(records[key])
            used.append(key)
        assert keys_in(order) == used + clean + dirty + asked
        first_dirty = min(dirty, key=lambda key: (records[key].priority, key), default=None)
        next_clean, next_dirty = order.next_clean(), order.next_dirty()
        assert (next_clean and next_clean.key) == ((used + clean) or [None])[0]
        assert (next_dirty and next_dirty.key) == (([] if first_dirty is None else [first_dirty]) + asked + [None])[0]
        next_unasked = order.next_dirty(may_be_asked=False)
        assert (next_unasked and next_unasked.key) == first_dirty
