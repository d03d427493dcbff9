"""A budget that forgot its unit is told of, at the line that gave it."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MakeStore
from tierstore import TierStore, TierStoreWarning, tiered_offload


@pytest.mark.parametrize(
    ("option", "value", "meant"),
    [
        ("host_bytes", 8, "8GiB"),
        ("host_bytes", "8", "8GiB"),
        ("disk_bytes", 500, "500GiB"),
        ("staging_bytes", 2048, "2048MiB"),
        ("max_write_bytes_per_day", 1_000_000, "1000000MiB"),
    ],
)
def test_store_asks_for_the_unit(store_directory: Path, option: str, value: Any, meant: str) -> None:
    options = {"host_bytes": "1MiB"} | {option: value}
    with pytest.warns(TierStoreWarning, match=f'bytes: did you mean "{meant}"') as told:
        TierStore(store_directory, **options).close()
    assert [Path(each.filename).name for each in told] == [Path(__file__).name]


@pytest.mark.parametrize("option", ["device_bytes", "lookahead_bytes"])
def test_scope_asks_for_the_unit(make_store: MakeStore, option: str) -> None:
    store = make_store(host_bytes="1MiB")
    with pytest.warns(TierStoreWarning, match=f"^{option}=4 is 4 bytes"):
        tiered_offload(store, **{option: 4})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, "0", 2**20, "8B", "64KiB", "1MiB", None])
def test_size_that_is_meant_says_nothing(store_directory: Path, value: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TierStore(store_directory, host_bytes=value, inline_bytes=4096).close()
