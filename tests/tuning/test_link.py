"""How fast copies are taken to be: as recorded where that says it, else as measured."""

from __future__ import annotations

from math import inf

import pytest

from tierstore.hardware import AcceleratorLink
from tierstore.simulator import Link
from tierstore.tuning.accelerator import CopyWay, link_speeds

DESCRIBED = AcceleratorLink(
    name="x",
    memory_bytes=0,
    host_memory="pinned",
    to_host_bytes_per_second=30e9,
    to_device_bytes_per_second=40e9,
    both_bytes_per_second=50e9,
)
AWAITED = CopyWay(seconds=2.0, copy_wait_seconds=0.5, host_wait_seconds=0.0, copied_bytes=4 * 10**9)
HARDLY = AWAITED._replace(copy_wait_seconds=0.1)
STARVED = AWAITED._replace(host_wait_seconds=0.3)
NOTHING = AWAITED._replace(copied_bytes=0)


@pytest.mark.parametrize("silent", [HARDLY, STARVED, NOTHING])
def test_link_is_as_recorded_where_copies_were_waited_for_and_else_as_measured(silent: CopyWay) -> None:
    speeds = link_speeds([(AWAITED, silent)] * 3, [DESCRIBED])
    assert speeds is not None
    assert speeds.link == Link(2e9, 40e9, 50e9)
    assert (speeds.out_is_recorded, speeds.back_is_recorded) == (True, False)
    assert str(speeds) == "copies to the host at 2 GB/s (as recorded), back at 40 GB/s (measured alone)"
    assert speeds.times(2.0).link == Link(4e9, 40e9, 50e9)


def test_link_that_most_steps_do_not_tell_of_is_as_measured() -> None:
    speeds = link_speeds([(AWAITED, AWAITED), (HARDLY, HARDLY), (HARDLY, HARDLY)], [DESCRIBED])
    assert speeds is not None
    assert speeds.link == Link(30e9, 40e9, 50e9)
    assert not speeds.is_recorded


def test_link_that_was_not_measured_is_known_if_both_ways_tell() -> None:
    speeds = link_speeds([(AWAITED, AWAITED._replace(copied_bytes=6 * 10**9))], [])
    assert speeds is not None
    assert speeds.link == Link(2e9, 3e9, inf)
    assert link_speeds([(AWAITED, HARDLY)], []) is None
    assert link_speeds([], []) is None
