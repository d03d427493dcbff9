"""Goals: what is compared with what, which bound decides, and how it reads."""

from typing import Any

import pytest

from bench.goals import Goal, Verdict, judge

ROUND = {"floor": {"time_seconds": 2.0}, "peer": {"time_seconds": 5.0}, "ours": {"time_seconds": 3.0}}


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({"at_most": 1}, 3.0),
        ({"at_most": 1, "of": ("floor",)}, 1.5),
        ({"at_most": 1, "of": ("peer",)}, 0.6),
        ({"at_most": 1, "beyond": "floor"}, 1.0),
        ({"at_most": 1, "beyond": "floor", "of": ("peer",)}, 1 / 3),
        ({"at_most": 1, "of": ("floor", "peer")}, 1.5),  # the one that is hardest to match
        ({"at_least": 1, "of": ("floor", "peer")}, 0.6),
    ],
)
def test_value_each_way_of_comparing(options: dict[str, object], value: float) -> None:
    assert Goal("goal", "time_seconds", "ours", **options).value_in(ROUND) == pytest.approx(value)


@pytest.mark.parametrize(
    ("bound", "at_bound", "beyond_bound"),
    [({"at_most": 2}, True, False), ({"at_least": 2}, True, True), ({"equals": 2}, True, False)],
)
def test_admits_each_bound_inclusive(bound: dict[str, float], at_bound: bool, beyond_bound: bool) -> None:
    goal = Goal("goal", "time_seconds", "ours", **bound)
    assert (goal.admits(2), goal.admits(2.1)) == (at_bound, beyond_bound)
    assert goal.admits(1.9) is (bound == {"at_most": 2})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs one of"),
        ({"at_most": 1, "at_least": 1}, "needs one of"),
        ({"at_most": 1, "of": "floor"}, "sequence"),
    ],
)
def test_goal_without_exactly_one_bound_or_with_a_string_for_variants_refused(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Goal("goal", "time_seconds", "ours", **options)


def test_judge_compares_within_rounds_and_takes_the_median() -> None:
    # The machine was three times slower in the second round; each ratio is of one round.
    times = {1: (1.0, 1.1), 2: (3.0, 3.6), 3: (1.0, 2.0)}
    rounds = {n: {"floor": {"time_seconds": a}, "ours": {"time_seconds": b}} for n, (a, b) in times.items()}
    verdict = judge(Goal("goal", "time_seconds", "ours", at_most=1.3, of=("floor",)), rounds)
    assert (verdict.outcome, verdict.measured) == ("met", "1.2 (1.1 to 2)")
    assert judge(Goal("goal", "time_seconds", "ours", at_most=1.1, of=("floor",)), rounds).outcome == "missed"


def test_judge_round_without_one_of_the_variants_does_not_count() -> None:
    rounds = {1: {"ours": {"time_seconds": 9.0}}, 2: {"floor": {"time_seconds": 1.0}, "ours": {"time_seconds": 2.0}}}
    goal = Goal("goal", "time_seconds", "ours", at_most=2, of=("floor",))
    assert judge(goal, rounds).median == 2
    unmeasured = judge(goal, {1: rounds[1]})
    assert (unmeasured.outcome, unmeasured.measured) == ("not measured", "-")


def judged_costs(costs: list[tuple[float, float]], **bound: float) -> Verdict:
    """Of (a peer's cost, ours) in each round, both beyond a floor of 5."""
    goal = Goal("goal", "pack_microseconds", "ours", of=("peer",), beyond="floor", **bound)
    rounds = {
        number: {
            "floor": {"pack_microseconds": 5.0},
            "peer": {"pack_microseconds": 5.0 + theirs},
            "ours": {"pack_microseconds": 5.0 + ours},
        }
        for number, (theirs, ours) in enumerate(costs)
    }
    return judge(goal, rounds)


@pytest.mark.parametrize("bound", [{"at_most": 8.0}, {"at_least": 8.0}])
def test_judge_noise_hides_what_is_divided_by_in_half_of_the_rounds_nothing_was_measured(
    bound: dict[str, float],
) -> None:
    for costs in ([(0.0, 6.0)], [(-2.5, 6.0), (1.0, 5.0)], [(-2.5, 6.0), (1.0, 5.0), (0.0, 6.0)]):
        verdict = judged_costs(costs, **bound)
        assert (verdict.outcome, verdict.median) == ("not measured", None)
        assert verdict.measured == "hidden by noise"


def test_judge_round_whose_ratio_noise_hides_counts_as_one_that_missed() -> None:
    costs = [(1.0, 6.0), (-2.5, 6.0), (1.0, 7.0), (1.0, 9.0), (1.0, 5.0)]
    verdict = judged_costs(costs, at_most=6.5)
    assert (verdict.outcome, verdict.median) == ("missed", 7.0), "without that round it would be 6.5, and met"
    assert verdict.measured == "7 (5 to 9); 1 of the rounds are hidden by noise"
    assert judged_costs(costs, at_least=6.5).median == 6.0
    assert judged_costs(costs, at_least=6.5).outcome == "missed"
