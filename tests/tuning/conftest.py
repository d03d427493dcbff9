"""A process that is a trial; a machine that need not be measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.tuning.machines import drive_of_speed, machine
from tierstore.base.json_text import json_text
from tierstore.store.trial import VARIABLE, trial_of_process
from tierstore.tuning.report import report_of

HARDWARE = machine(
    drive=drive_of_speed(2e10, 2e10) | {"write_latency_seconds": 1e-5, "read_latency_seconds": 1e-5},
    processor={"num_allowed": 2},
)
"""A fast drive."""


@pytest.fixture
def hardware_file(tmp_path: Path) -> Path:
    """As `tierstore doctor --json` prints it."""
    file = tmp_path / "machine.json"
    file.write_text(json_text(report_of(HARDWARE)))
    return file


@pytest.fixture
def begin_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Makes this process a trial, by a plan of these fields; returns the folder of its traces."""

    def begin(**plan: Any) -> Path:
        folder = tmp_path / "trial"
        folder.mkdir()
        file = folder / "plan"
        file.write_bytes(msgspec.json.encode({"folder": str(folder), "num_graphs": 2, **plan}))
        monkeypatch.setenv(VARIABLE, str(file))
        trial_of_process.cache_clear()
        return folder

    yield begin
    trial_of_process.cache_clear()
