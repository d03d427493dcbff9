"""A daemon's write allowance: one for all its clients."""

import json

import pytest
import torch

from tests.daemon.conftest import StartDaemon, tierstore
from tests.daemon.test_metrics import labels, scrape
from tierstore import StoreFullError, TierStore

MIB = 2**20


def test_allowance_of_a_daemon_is_shared_and_said(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(codec="none", max_write_bytes_per_day="4MiB", metrics="127.0.0.1:0")
    with (
        TierStore.connect(daemon.socket, host_bytes=0, name="first") as first,
        TierStore.connect(daemon.socket, host_bytes=0, name="second") as second,
    ):
        contents = [torch.randn(MIB // 4) for _ in range(4)]
        handles = [
            (store, store.put(content.clone())) for store, content in zip([first] * 3 + [second], contents, strict=True)
        ]
        first.flush()
        second.flush()
        refused = second.put(torch.ones(MIB // 4))
        with pytest.raises(StoreFullError, match="the write allowance of 4194304 bytes a day is spent") as caught:
            second.flush()
        assert "the data is still in memory" in str(caught.value)
        assert "--max-write-bytes-per-day" in str(caught.value)
        assert torch.equal(second.get(refused), torch.ones(MIB // 4))
        for (store, handle), content in zip(handles, contents, strict=True):
            assert torch.equal(store.get(handle), content)
        report = json.loads(tierstore("stat", "--socket", str(daemon.socket), "--json").stdout)
        assert 0 <= report["disk"]["write_allowance_bytes"] < MIB
        assert "may be written now" in tierstore("stat", "--socket", str(daemon.socket)).stdout
        assert 0 <= scrape(report["metrics"])["tierstore_write_allowance_bytes", labels()] < MIB
        assert report["totals"]["written_bytes"] == 4 * MIB
        assert second.stats().write_allowance_bytes is None
