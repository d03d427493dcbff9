"""A process that is a trial."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tierstore.store.trial import VARIABLE, trial_of_process


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
