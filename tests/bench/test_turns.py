"""Figures of turns on a machine that is slow and fast by turns too: ratios, costs, clocks that stand still."""

import random
from pathlib import Path

import pytest
import torch

from bench import codec_choice
from bench.codec_choice import AGAIN, FIXED, close_ones, compared, measure
from bench.live_handles import MOST_TURNS, one_period, typical_of
from bench.paired import Estimate, estimate_of
from bench.parties import Figures


def median_of(ratios: list[float]) -> Estimate:
    return estimate_of(ratios, [1.0] * len(ratios))


def test_median_of_equal_ratios_is_known_exactly_and_a_disturbed_turn_does_not_move_it() -> None:
    assert median_of([0.9] * 7) == (0.9, 0.9, 0.9)
    assert median_of([0.9] * 7).error == 0
    assert median_of([1.0] * 10 + [9.0]).median == 1


def test_interval_of_the_median_covers_the_true_one_as_often_as_it_says() -> None:
    """Ratios of two equal things that vary by a tenth: 1 lies outside in one of twenty cases, give or take."""
    draw = random.Random(1)
    estimates = [median_of([draw.lognormvariate(0, 0.1) for _ in range(25)]) for _ in range(200)]
    outside = sum(not estimate.low <= 1 <= estimate.high for estimate in estimates)
    assert 2 <= outside <= 20


def test_auto_is_compared_within_each_turn() -> None:
    """The machine slows down from turn to turn, and "auto" a tenth slower in every one."""
    seconds = {name: [1.0, 3.0, 5.0] for name in ("none", AGAIN, "zstd:1")} | {"auto": [1.1, 3.3, 5.5]}
    found = compared(seconds | {"zstd:-3": [9.0], "shuffle-zstd:1": [9.0]})
    assert {name: round(ratio.median, 6) for name, ratio in found.items()} == {"none": 1.1, "zstd:1": 1.1, "same": 1}


def test_codec_that_is_far_behind_drops_out_but_never_none_nor_one_with_a_disturbed_step() -> None:
    seconds = {"auto": [1.0], AGAIN: [2.0], "none": [2.0], "zstd:-3": [1.0], "zstd:1": [1.4], "shuffle-zstd:1": [1.6]}
    assert close_ones(seconds) == ["auto", AGAIN, "none", "zstd:-3", "zstd:1"]
    seconds = {"auto": [1.0, 1.0], AGAIN: [1.0, 1.0], "none": [1.0, 1.0], "zstd:-3": [1.0, 9.0]}
    assert "zstd:-3" in close_ones(seconds)


def test_measure_with_real_stores_gives_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is past its end from the first turn on, so there are as many turns as there must be."""
    noise = [torch.randint(-(2**63), 2**63 - 1, (2**17,)) for _ in range(3)]  # no codec makes anything of it
    monkeypatch.setattr(codec_choice, "tensors_of_kind", lambda *_: noise)
    monkeypatch.setattr(codec_choice, "MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(codec_choice, "SETTLE_SECONDS", 0.0)
    figures = measure("noise: moving alone", tmp_path)
    assert figures["turns"] == codec_choice.LEAST_TURNS
    assert figures["auto_encoded_share"] == 0
    assert {f"{name}_seconds" for name in ("auto", AGAIN, *FIXED)} <= set(figures)
    assert figures["auto_to_none_low"] <= figures["auto_to_none"] <= figures["auto_to_none_high"]
    assert figures["auto_to_best"] >= figures["auto_to_none"]


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
