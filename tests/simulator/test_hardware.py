"""How work in virtual time shares a machine."""

from __future__ import annotations

import pytest

from tierstore.simulator import Drive, Hardware
from tierstore.simulator.hardware import Activity


def test_transfers_share_the_speed_at_their_depth_and_background_work_the_cores() -> None:
    hardware = Hardware(Drive({1: 1e9, 4: 3e9}, {1: 5e8}), cores=3.5)
    for depth, speed in ((1, 1e9), (2, (2e9 + 3e9) / 3), (4, 3e9), (9, 3e9)):
        assert hardware.rates(1.0, {Activity.WRITE: depth})[Activity.WRITE] * depth == pytest.approx(speed)
    crowded = hardware.rates(1.5, {Activity.COMPUTE: 1, Activity.CPU: 2, Activity.WRITE: 1})
    assert crowded[Activity.COMPUTE] == crowded[Activity.CPU] == 1.0
    crowded = hardware.rates(1.5, {Activity.COMPUTE: 1, Activity.CPU: 4})
    assert crowded[Activity.COMPUTE] == crowded[Activity.CPU] == 3.5 / 5.5
