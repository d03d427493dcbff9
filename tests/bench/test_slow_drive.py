"""A drive that the kernel slows down, where it can be asked to."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.cgroup import CgroupError
from bench.slow_drive import _place, slow_drive


def test_place_of_version_1_limits_reads_and_writes_below_the_process_s_own() -> None:
    place = _place("254:0", 1000, "7:blkio:/a/b\n3:cpu,cpuacct:/c\n0::/d\n")
    assert place.own == place.above == Path("/sys/fs/cgroup/blkio/a/b")
    assert place.limits == {
        "blkio.throttle.read_bps_device": "254:0 1000",
        "blkio.throttle.write_bps_device": "254:0 1000",
    }


@pytest.mark.parametrize(("path", "above"), [("/a/b", "/sys/fs/cgroup/a"), ("/", "/sys/fs/cgroup")])
def test_place_of_version_2_is_beside_the_process_s_own(path: str, above: str) -> None:
    place = _place("254:0", 1000, f"0::{path}\n")
    assert (place.own, place.above) == (Path("/sys/fs/cgroup") / path.lstrip("/"), Path(above))
    assert place.limits == {"io.max": "254:0 rbps=1000 wbps=1000"}


def test_slow_drive_moves_the_process_and_moves_it_back(tmp_path: Path) -> None:
    before = Path("/proc/self/cgroup").read_text()
    try:
        with slow_drive(tmp_path, 10**9):
            assert "tierstore-bench-" in Path("/proc/self/cgroup").read_text()
            raise KeyboardInterrupt
    except CgroupError as error:
        pytest.skip(str(error))
    except KeyboardInterrupt:
        pass
    assert Path("/proc/self/cgroup").read_text() == before
