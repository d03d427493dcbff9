"""What tuning says while it works and at its end, and what a file that cannot be written leaves."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tests.tuning.traces import graph_of_steps
from tierstore.base.new_file import make_file
from tierstore.errors import ConfigError
from tierstore.tuning.present import present, tuned_view
from tierstore.tuning.program import Program
from tierstore.tuning.settings import TrialSettings
from tierstore.tuning.tuned import Candidate, Tuned

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


@pytest.mark.parametrize("as_json", [False, True])
def test_file_that_cannot_be_written_whole_is_not_there_and_what_it_would_say_is_told(
    as_json: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = tmp_path / "tierstore.toml"
    made: list[Path] = []

    def make_short_file(option: str, file: Path, text: str) -> None:
        made.append(file)
        with _files_of_at_most(100):
            make_file(option, file, text)

    monkeypatch.setattr("tierstore.tuning.present.make_file", make_short_file)
    with pytest.raises(ConfigError, match="could not be made"):
        present(Pretended(("true",), 2, 1.0), config=config, as_json=as_json, rounds=3, num_found=1)
    assert made == [config]
    assert not config.exists()
    assert ("lookahead_bytes" if as_json else "[offload]") in capsys.readouterr().out


AS_IT_IS = Candidate("as it is", TrialSettings(999 * MIB), 1.9, (1.5, 1.6, 1.4))
TRIED = Candidate("tried 3", TrialSettings(0), failure="it broke")
LONG = TrialSettings(999 * MIB, 112 * MIB, "shuffle-zstd:1", "learned", 999 * MIB, 16)


def _shown(*candidates: Candidate) -> Sequence[str]:
    screen = StringIO()
    reason = f"{candidates[-1].name!r} it is."
    tuned = Tuned("/x", {}, candidates, candidates[-1], [TRIED], reason)
    Console(file=screen, width=80).print(tuned_view(tuned))
    return screen.getvalue().splitlines()


def test_table_fits_80_columns_and_cuts_no_word_and_the_file_of_the_best_is_shown() -> None:
    lines = _shown(AS_IT_IS, Candidate("found 4", LONG, 123.4567, (123.4567, 99.0, 999.9999)))
    assert max(map(len, lines)) <= 80
    assert not any("\u2026" in line for line in lines)
    assert "tried 3 failed: it broke" in lines
    (steps,) = [" ".join(line.split()) for line in lines if line.startswith("found 4")]
    assert steps == "found 4 123.4567 123.4567 99.0000 to 999.9999 82.30"
    assert {"# 'found 4' it is.", "[store]", "[offload]", 'codec = "shuffle-zstd:1"'} <= {
        line.strip() for line in lines
    }
