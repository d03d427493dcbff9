"""Figures of turns on a machine that is slow and fast by turns too: ratios, costs, clocks that stand still."""

import random
from pathlib import Path

import pytest
import torch

from bench import codec_choice
from bench.codec_choice import AGAIN, FIXED, measure
from bench.paired import Estimate, estimate_of


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
