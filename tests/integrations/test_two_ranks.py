"""The integrations under torchrun: two ranks, each with a store of its own under one directory."""

from pathlib import Path

import pytest

from tests.hooks.test_distributed import launch


@pytest.mark.parametrize("kind", ["transformers", "lightning"])
def test_two_ranks_same_bits_and_one_summary(tmp_path: Path, kind: str) -> None:
    drive, out = tmp_path / "nvme", tmp_path / "out"
    drive.mkdir()
    out.mkdir()
    found = launch([str(Path(__file__).with_name("rank.py")), kind, str(drive), str(out)], drive, out)
    assert found.returncode == 0, found.err
    first, second = found.reports
    for report in (first, second):
        assert report["stored"]["losses"] == report["plain"]["losses"]
        assert report["stored"]["parameters"] == report["plain"]["parameters"]
        assert not report["plain"]["stored"]
    assert first["stored"]["parameters"] == second["stored"]["parameters"]
    assert first["stored"]["stored"]
    assert min(first["stored"]["stored"]) > 0
    assert sum(line.startswith("tierstore: ") for line in found.out.splitlines()) == 1
