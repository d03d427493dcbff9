"""The names that other programs rely on, and what importing them costs."""

import inspect

import pytest

import tierstore
from tests.processes import output_of

NAMES = [
    "ConfigError", "ConfigTypeError", "CorruptDataError", "DaemonUnavailableError", "Handle", "MemoryPlan",
    "ModifiedInPlaceError", "ProtocolError", "QuotaExceededError", "StorageIOError", "StoreBusyError",
    "StoreClosedError", "StoreFullError", "StoreStats", "TierStore", "TierStoreError", "TierStoreWarning",
    "UnsupportedTorchError", "keep_resident", "offload_backend", "offload_module", "plan_memory",
    "remove_offload", "selective_checkpoint_contexts", "tiered_offload",
]  # fmt: skip


def test_names_are_exactly_these() -> None:
    assert tierstore.__all__ == NAMES
    assert dir(tierstore) == NAMES
    for name in NAMES:
        assert getattr(tierstore, name).__name__ == name
        assert getattr(tierstore, name).__doc__


def test_name_that_is_not_there_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tensor_store'"):
        _ = tierstore.tensor_store
    assert not hasattr(tierstore, "__path_that_is_not__")


def test_store_has_the_methods_of_the_contract() -> None:
    public = {name for name in vars(tierstore.TierStore) if not name.startswith("_")}
    assert {"put", "get", "prefetch", "flush", "stats", "close"} <= public
    options = set(inspect.signature(tierstore.TierStore).parameters)
    assert {"path", "host_bytes", "disk_bytes", "codec", "staging_bytes", "inline_bytes", "checksum"} <= options
    by_keyword = inspect.signature(tierstore.TierStore).parameters.values()
    assert [p.name for p in by_keyword if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD] == ["path"]


def test_import_without_torch() -> None:
    statements = (
        "import tierstore",
        "from tierstore import StoreFullError, StoreStats, TierStoreError",
        "import tierstore.base.config, tierstore.errors, tierstore.store.stats",
        "import tierstore.cli",
        "import tierstore.disk.local",
    )
    program = "import sys\n" + "".join(f"{each}\nassert 'torch' not in sys.modules, {each!r}\n" for each in statements)
    output_of(program)
