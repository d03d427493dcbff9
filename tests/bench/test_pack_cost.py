"""What a saved tensor costs, from steps that are taken by turns on a noisy machine."""

import random

import pytest

from bench.pack_cost import FLOOR, VARIANTS, typical

COSTS = {FLOOR: 0.0, "detach hooks": 0.5, "save_on_cpu": 1.0, "tierstore": 7.0}


def test_typical_step_on_a_machine_that_slows_down_costs_are_those_within_a_turn() -> None:
    # Each turn is slower than the one before, and in some of them one variant meets a burst of noise.
    draw = random.Random(0)
    turns = [{variant: {"forward": 6.0 + number + COSTS[variant]} for variant in VARIANTS} for number in range(101)]
    for turn in turns:
        if draw.random() < 0.3:
            turn[draw.choice(VARIANTS)]["forward"] += 1000
    found = typical(turns)
    beyond = {variant: found[variant]["forward"] - found[FLOOR]["forward"] for variant in VARIANTS}
    assert beyond == pytest.approx(COSTS)
