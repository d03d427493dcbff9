"""The integrations under torchrun: two ranks, each with a store of its own under one directory."""

from pathlib import Path

import pytest

from tests.hooks.test_distributed import Launch, launch


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Both trainers, as imports take seconds."""
    drive, out = tmp_path_factory.mktemp("nvme"), tmp_path_factory.mktemp("out")
    found = launch([str(Path(__file__).with_name("rank.py")), str(drive), str(out)], drive, out)
    assert found.returncode == 0, found.err
    return found


@pytest.mark.parametrize("kind", ["transformers", "lightning"])
def test_two_ranks_same_bits_and_one_summary(launched: Launch, kind: str) -> None:
    first, second = (report[kind] for report in launched.reports)
    for report in (first, second):
        assert report["stored"]["losses"] == report["plain"]["losses"]
        assert report["stored"]["parameters"] == report["plain"]["parameters"]
        assert not report["plain"]["stored"]
    assert first["stored"]["parameters"] == second["stored"]["parameters"]
    assert first["stored"]["stored"]
    assert min(first["stored"]["stored"]) > 0
    assert sum(line.startswith("tierstore: ") for line in launched.out.splitlines()) == 2, "one of each trainer"
