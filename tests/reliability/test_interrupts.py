"""Ctrl-C at each moment of a step over two drives, and with a daemon: as with one drive (`tests/store`)."""

from pathlib import Path
from typing import Any

import pytest

from tests.daemon.clients import sessions_of
from tests.daemon.conftest import StartDaemon
from tests.moments import ctrl_c
from tests.reliability.conftest import end_well
from tests.store.test_interrupts import STRIDES, sweep
from tierstore import TierStore

pytestmark = [
    pytest.mark.usefixtures("unvalidated"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # as in `tests/store`
]
OPTIONS: dict[str, Any] = {"host_bytes": 0, "staging_bytes": "64KiB"}


@STRIDES
@pytest.mark.parametrize("directories", ["two drives"], indirect=True)
def test_interrupted_over_two_drives(directories: Path, stride: int) -> None:
    stores: list[TierStore] = []

    def open_store() -> TierStore:
        stores.append(TierStore(str(directories).split(":"), disk_bytes="1GiB", **OPTIONS))
        return stores[-1]

    sweep(open_store, "a step", ctrl_c, stride)
    for store in stores:
        store.close()


@pytest.mark.many
def test_interrupted_with_a_daemon(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(codec="none", disk_bytes="256MiB", grace_seconds=0.1)
    stores: list[TierStore] = []

    def open_store() -> TierStore:
        stores.append(TierStore.connect(daemon.socket, **OPTIONS))
        return stores[-1]

    sweep(open_store, "a step", ctrl_c, stride=1)
    for store in stores:
        store.close()
    assert sessions_of(daemon) == {}
    end_well(daemon)
    assert list(daemon.path.iterdir()) == []
