"""What a million live handles cost, from turns on a machine that is slow and fast by turns too."""

import random

import pytest

from bench.live_handles import MOST_TURNS, one_period, typical_of
from bench.parties import Figures


class Churning:
    """Of a party: the collector goes through all that it holds in its turn of that number."""

    def __init__(self, name: str, collects_in: int) -> None:
        self.name = name
        self.collects_in = collects_in
        self.num_turns = 0

    def do(self, command: str) -> list[Figures]:
        assert command == "oldest"
        self.num_turns += 1
        return [{"collections": float(self.num_turns == self.collects_in)}]


def test_typical_of_on_a_machine_that_slows_down_ratio_is_that_within_a_turn() -> None:
    draw = random.Random(0)
    found = []
    for number in range(101):
        speed = draw.choice([1.0, 1.8])
        few, many = 10 * speed, 12 * speed * (100 if number % 5 == 0 else 1)
        found.append(
            {
                "few": [{"microseconds": few, "collecting_microseconds": 0.0}],
                "many": [{"microseconds": many, "collecting_microseconds": 202.0 if number == 50 else 0.0}],
            }
        )
    few_figures, many_figures = typical_of(found, "few", "many")
    churning = many_figures["microseconds"] - many_figures["collecting_microseconds"]
    assert churning == pytest.approx(1.2 * few_figures["microseconds"])
    assert many_figures["collecting_microseconds"] == pytest.approx(2)  # once, over all turns


@pytest.mark.parametrize(("collects_in", "num_turns"), [(7, 8), (MOST_TURNS + 1, MOST_TURNS)])
def test_one_period_ends_with_a_collection_of_all_or_where_one_would_be_overdue(
    collects_in: int, num_turns: int
) -> None:
    found = one_period([Churning("few", 1), Churning("many", collects_in)])  # type: ignore[list-item]
    assert len(found) == num_turns
