"""What a file that cannot be written leaves."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tuning.traces import graph_of_steps
from tierstore.base.new_file import make_file
from tierstore.errors import ConfigError
from tierstore.tuning.present import Wanted, present
from tierstore.tuning.program import Program
from tierstore.tuning.settings import TrialSettings
from tierstore.tuning.tune import TuningPlan

MIB = 2**20
OWN = TrialSettings(8 * MIB, 32 * MIB)


class Pretended(Program):
    """A program whose every step takes a second."""

    def run(self, settings: TrialSettings | None, folder: Path) -> None:
        graph_of_steps(folder, 1, OWN if settings is None else settings, 1.0)


@contextmanager
def _files_of_at_most(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_file_that_cannot_be_written_whole_is_not_there_and_what_it_would_say_is_told(
    tmp_path: Path, hardware_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "tierstore.toml"
    made: list[Path] = []

    def make_short_file(option: str, file: Path, text: str) -> None:
        made.append(file)
        with _files_of_at_most(100):
            make_file(option, file, text)

    monkeypatch.setattr("tierstore.tuning.present.make_file", make_short_file)
    wanted = Wanted(config=config, heat_map=None, hardware=hardware_file, as_json=True)
    with pytest.raises(ConfigError, match="could not be made"):
        present(Pretended(("x",), 2, 1.0), TuningPlan(rounds=3, num_found=1), wanted)
    assert made == [config]
    assert not config.exists()
    assert "[offload]" in capsys.readouterr().err
