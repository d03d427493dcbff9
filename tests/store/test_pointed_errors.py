"""Errors name what the caller did, also where the text alone is passed on."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import tierstore
from tests.conftest import MakeStore
from tierstore import (
    ConfigError,
    Handle,
    ModifiedInPlaceError,
    StoreFullError,
    TierStore,
    TierStoreError,
    tiered_offload,
)

ERRORS = [
    kind
    for name in tierstore.__all__
    if isinstance(kind := getattr(tierstore, name), type)
    and issubclass(kind, TierStoreError)
    and kind is not TierStoreError
]


@pytest.mark.parametrize("kind", ERRORS)
def test_text_alone_makes_none_of_them(kind: type[Any]) -> None:
    """As torch tries, in the process that reads from a worker."""
    with pytest.raises(TypeError):
        kind("Caught an error in a worker")


class Stored(Dataset[torch.Tensor]):
    def __init__(self, store: TierStore, handle: Handle) -> None:
        self._store, self._handle = store, handle

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> torch.Tensor:
        return self._store.get(self._handle)


def test_store_used_in_a_worker_says_that_it_was_forked(make_store: MakeStore) -> None:
    store = make_store()
    stored = Stored(store, store.put(torch.ones(4)))
    loader = DataLoader(stored, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(Exception, match="belongs to the process that this one was forked from") as caught:
        next(iter(loader))
    assert "it was closed" not in str(caught.value)


def test_tensor_beyond_both_budgets_says_that_freeing_others_does_not_help(make_store: MakeStore) -> None:
    store = make_store(disk_bytes="1MiB")
    handle = store.put(torch.ones(2**20))
    with pytest.raises(StoreFullError, match=r"larger than either budget.*raise disk_bytes or host_bytes") as caught:
        store.flush()
    del handle
    assert "Free a graph" not in str(caught.value)


@pytest.mark.parametrize("address", ["localhost:9464", "tcp://10.0.0.1:9464", "[::1]:9464", ":9464"])
def test_host_and_port_is_no_address_of_a_daemon(address: str) -> None:
    with pytest.raises(ConfigError, match="data never goes over TCP"):
        TierStore.connect(address)


def test_home_is_found(store_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(store_directory.parent))
    TierStore(f"~/{store_directory.name}", host_bytes="1MiB").close()
    with pytest.raises(tierstore.DaemonUnavailableError, match=str(store_directory.parent / "a.sock")):
        TierStore.connect("~/a.sock")
    assert not os.path.exists("~")


def test_change_in_place_names_the_operation_that_anomaly_mode_names(make_store: MakeStore) -> None:
    store = make_store()
    start = torch.ones(64, requires_grad=True)
    with tiered_offload(store, min_bytes=0):
        result = start.exp()
        loss = result.sum()
    result.add_(1)
    with (
        pytest.warns(UserWarning, match="Error detected in ExpBackward0"),
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(ModifiedInPlaceError, match="ExpBackward0 needs it"),
    ):
        loss.backward()
