"""Ratios of turns: their median, how well it is known, and clocks that stand still."""

import random
import statistics
from pathlib import Path

import pytest
import torch

from bench import codec_choice
from bench.codec_choice import AGAIN, FIXED, OwnClocks, close_ones, compared, measure
from bench.paired import Estimate, estimate_of
from tierstore.disk.codec.load import Readings


def median_of(ratios: list[float]) -> Estimate:
    return estimate_of(ratios, [1.0] * len(ratios))


def test_median_of_equal_ratios_is_known_exactly() -> None:
    assert median_of([0.9] * 7) == (0.9, 0.9, 0.9)
    assert median_of([0.9] * 7).error == 0


def test_interval_of_the_median_covers_the_true_one_as_often_as_it_says() -> None:
    """Ratios of two equal things that vary by a tenth: 1 lies outside in one of twenty cases, give or take."""
    draw = random.Random(1)
    estimates = [median_of([draw.lognormvariate(0, 0.1) for _ in range(25)]) for _ in range(200)]
    outside = sum(not estimate.low <= 1 <= estimate.high for estimate in estimates)
    assert 2 <= outside <= 20


def test_interval_of_the_median_narrows_with_the_number_of_turns() -> None:
    draw = random.Random(2)
    ratios = [draw.lognormvariate(0, 0.1) for _ in range(400)]
    few = statistics.mean(median_of(ratios[start : start + 10]).error for start in range(0, 400, 10))
    many = statistics.mean(median_of(ratios[start : start + 100]).error for start in range(0, 400, 100))
    assert many < few / 2


def test_median_of_ratios_with_a_disturbed_turn_is_that_of_the_others() -> None:
    assert median_of([1.0] * 10 + [9.0]).median == 1


def test_own_clocks_stand_still_while_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Readings(10.0, 20.0, 5.0)
    monkeypatch.setattr("bench.codec_choice.read_machine", lambda: now)
    clocks = OwnClocks()
    assert clocks.read() == now
    with clocks.stopped():
        now = Readings(13.0, 24.0, 7.0)
    assert clocks.read() == (10.0, 20.0, 5.0)
    now = Readings(14.0, 25.5, 7.5)
    assert clocks.read() == (11.0, 21.5, 5.5)


def test_auto_is_compared_within_each_turn() -> None:
    """The machine slows down from turn to turn, and "auto" a tenth slower in every one."""
    seconds = {name: [1.0, 3.0, 5.0] for name in ("none", AGAIN, "zstd:1")} | {"auto": [1.1, 3.3, 5.5]}
    found = compared(seconds | {"zstd:-3": [9.0], "shuffle-zstd:1": [9.0]})
    assert {name: round(ratio.median, 6) for name, ratio in found.items()} == {"none": 1.1, "zstd:1": 1.1, "same": 1}


def test_codec_that_is_far_behind_drops_out_but_never_none() -> None:
    seconds = {"auto": [1.0], AGAIN: [2.0], "none": [2.0], "zstd:-3": [1.0], "zstd:1": [1.4], "shuffle-zstd:1": [1.6]}
    assert close_ones(seconds) == ["auto", AGAIN, "none", "zstd:-3", "zstd:1"]


def test_codec_with_one_disturbed_step_stays() -> None:
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
