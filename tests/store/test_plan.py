"""Where saved tensors are to wait, from what was seen before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.ledger.lookahead import LearnedOrders
from tierstore.ledger.plan import Plan, PlannedTier, Trace

DEVICE, HOST, STAGING, DISK = PlannedTier


def _trace(
    sizes: list[int], order: list[int] | None = None, records: list[int] | None = None, on_device: bool = False
) -> Trace:
    """Its signatures are the sums of the sizes up to each pack: they stand for all of it, as those of the hooks do."""
    signatures = [hash(tuple(sizes[: i + 1])) for i in range(len(sizes))]
    num = range(len(sizes))
    return Trace(
        signatures,
        records or num,
        sizes,
        [on_device] * len(sizes),
        reversed(num) if order is None else order,
    )


def _plan(trace: Trace, host_bytes: int, device_bytes: int, staging_bytes: int = 0) -> Plan:
    orders = LearnedOrders()
    orders.learn(trace)
    plan = orders.predict(len(trace), trace.signatures[-1], host_bytes, device_bytes, staging_bytes)
    assert plan is not None
    assert plan.trace is trace
    return plan


def _tiers(plan: Plan) -> list[PlannedTier | None]:
    return [plan.tier(index) for index in range(len(plan.trace))]


@pytest.mark.parametrize(
    ("trace", "host_bytes", "device_bytes", "staging_bytes", "tiers", "is_needed"),
    [
        (_trace([10, 10, 10, 10]), 25, 0, 0, [DISK, DISK, HOST, HOST], True),
        (_trace([5, 10, 10, 10]), 25, 0, 0, [HOST, DISK, HOST, HOST], True),  # what fits into what is left stays
        (_trace([10, 10]), 20, 0, 0, [HOST, HOST], False),
        (_trace([10, 10, 10, 10]), 10, 0, 25, [DISK, STAGING, STAGING, HOST], True),
        (_trace([10, 10]), 10, 0, 25, [STAGING, HOST], True),  # what staging holds is not the budget's
        (_trace([10, 10, 10], on_device=True), 10, 10, 25, [DISK, HOST, DEVICE], True),  # staging holds none of these
        (_trace([10, 0, 10, 0]), 20, 0, 0, [HOST, None, HOST, None], False),  # others keep two of them
        (_trace([10, 10, 10, 10], on_device=True), 10, 20, 0, [DISK, HOST, DEVICE, DEVICE], True),
        (_trace([10, 10], on_device=True), 20, 10, 0, [HOST, DEVICE], True),
        (_trace([10, 10], on_device=True), 0, 20, 0, [DEVICE, DEVICE], False),
        (_trace([10, 10]), 10, 20, 0, [DISK, HOST], True),  # the device's budget is not for host memory
    ],
)
def test_what_backward_needs_first_stays_as_far_as_the_budgets_reach(
    trace: Trace,
    host_bytes: int,
    device_bytes: int,
    staging_bytes: int,
    tiers: list[PlannedTier | None],
    is_needed: bool,
) -> None:
    plan = _plan(trace, host_bytes, device_bytes, staging_bytes)
    assert (_tiers(plan), plan.is_needed) == (tiers, is_needed)


def test_order_of_backward_decides_not_that_of_forward() -> None:
    plan = _plan(_trace([10, 10, 10], order=[0, 1, 2]), 10, 0)
    assert _tiers(plan) == [HOST, DISK, DISK]
    assert plan.trace.priorities[0] > plan.trace.priorities[1] > plan.trace.priorities[2] > 0


def test_record_saved_more_than_once_counts_once_and_by_its_first_use() -> None:
    plan = _plan(_trace([10, 10, 10], order=[2, 1, 0], records=[0, 1, 0]), 10, 0)
    assert _tiers(plan)[:2] == [HOST, DISK]
    assert plan.trace.priorities[0] > plan.trace.priorities[1]


def test_never_asked_for_leaves_first_when_it_must_and_not_early() -> None:
    plan = _plan(_trace([10, 10, 10], order=[2, 0]), 10, 0)
    assert _tiers(plan) == [DISK, None, HOST]
    assert plan.trace.priorities[1] < plan.trace.priorities[0] < plan.trace.priorities[2]


@given(st.lists(st.integers(1, 3), max_size=30), st.lists(st.integers(1, 3), max_size=30), st.integers(0, 30))
def test_length_in_common_is_that_of_the_common_beginning(mine: list[int], theirs: list[int], shared: int) -> None:
    theirs = mine[:shared] + theirs
    expected = 0
    while expected < min(len(mine), len(theirs)) and mine[expected] == theirs[expected]:
        expected += 1
    one, other = _trace(mine), _trace(theirs)
    for at_least, at_most in ((0, 100), (expected, 100), (0, expected)):
        assert one.length_in_common(other, at_least, at_most) == expected


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(0, 200), st.randoms())
def test_stays_never_more_than_the_budget_and_goes_never_what_would_fit(sizes: list[int], budget: int, random) -> None:  # type: ignore[no-untyped-def]
    order = random.sample(range(len(sizes)), len(sizes))
    tiers = _tiers(_plan(_trace(sizes, order=order), budget, 0))
    left = budget - sum(size for size, planned in zip(sizes, tiers, strict=True) if planned is HOST)
    assert left >= 0
    assert all(size > left for size, planned in zip(sizes, tiers, strict=True) if planned is DISK)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(0, 200))
def test_continues_only_with_what_it_began_with(sizes: list[int], budget: int) -> None:
    trace = _trace(sizes)
    for num in range(1, len(sizes) + 1):
        assert trace.continues(num, trace.signatures[num - 1])
        assert not trace.continues(num, trace.signatures[num - 1] ^ 1)
    assert not trace.continues(len(sizes) + 1, trace.signatures[-1])
