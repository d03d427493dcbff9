"""The tree of errors: what each is, carries and says."""

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tierstore.errors
from tierstore import TierStore, offload_module, tiered_offload
from tierstore import errors as tree
from tierstore.errors import (
    ConfigError,
    ConfigTypeError,
    CorruptDataError,
    DaemonUnavailableError,
    ModifiedInPlaceError,
    ProtocolError,
    QuotaExceededError,
    StorageIOError,
    StoreBusyError,
    StoreClosedError,
    StoreFullError,
    TierStoreError,
    UnsupportedTorchError,
)

BUILT_IN = {"ImportError", "MemoryError", "RuntimeError", "TypeError", "UserWarning", "ValueError"}

EXAMPLES: list[tuple[TierStoreError, dict[str, object], str]] = [
    (ConfigError("size", -1, "more"), {"option": "size", "given": -1, "allowed": "more"}, "size=-1 .*more"),
    (ConfigError("--path", None, "one"), {"given": None}, "--path is missing: one"),
    (ConfigError("hw.toml: drive.size", None, "one"), {"given": None}, "drive.size is missing: one"),
    (ConfigError("size", None, "more"), {"given": None}, "size=None cannot be used"),
    (ConfigTypeError("size", [1], "a number"), {"option": "size", "given": [1]}, r"size=\[1\] .*a number"),
    (StoreClosedError("/nvme", "it was closed"), {"store": "/nvme", "reason": "it was closed"}, "/nvme.*closed.*freed"),
    (StoreClosedError("/nvme", "fork"), {"reason": "fork"}, "/nvme.*fork"),
    (StoreBusyError("/nvme", "on a thread"), {"place": "on a thread"}, "called it on a thread; nothing was done"),
    (
        StoreFullError(5, 10, 11, 20, 21, reason="no space"),
        {"needed_bytes": 5, "disk_bytes": 10, "disk_budget_bytes": 11, "host_bytes": 20, "host_budget_bytes": 21},
        "5 bytes.*no space.*10 of 11.*20 of 21.*still in memory",
    ),
    (StoreFullError(5, 10, 11), {"host_bytes": 0, "host_budget_bytes": 0}, "budget is used up"),
    (QuotaExceededError(5, 10, 11, session="rank 3"), {"session": "rank 3"}, "rank 3.*no room.*5"),
    (
        CorruptDataError(9, "segment 2", "abc", "abd"),
        {"key": 9, "place": "segment 2", "expected": "abc", "found": "abd"},
        "9.*segment 2.*abc.*abd.*lost",
    ),
    (
        StorageIOError("read", "segment 2", "EIO", "they are still on disk"),
        {"operation": "read", "place": "segment 2", "reason": "EIO", "data": "they are still on disk"},
        "read.*segment 2.*EIO.*still on disk",
    ),
    (StorageIOError("write", "x", "EIO"), {"data": "the data is still in memory"}, "still in memory"),
    (
        ModifiedInPlaceError("float32 tensor of shape [3]", 1, 2),
        {"saved_version": 1, "current_version": 2},
        "modified by an inplace operation.*float32.*version 2.*expected version 1",
    ),
    (
        DaemonUnavailableError("/run/x.sock", 2.5, "refused"),
        {"address": "/run/x.sock", "waited_seconds": 2.5},
        "/run/x.sock.*2.5 s.*refused",
    ),
    (ProtocolError("client 3", "too long"), {"peer": "client 3", "reason": "too long"}, "client 3.*too long"),
    (
        UnsupportedTorchError("2.99.0", ("torch._C._one", "torch._two"), "2.11 to 2.15"),
        {"torch_version": "2.99.0", "missing": ("torch._C._one", "torch._two")},
        r"torch 2.99.0.*torch._C._one, torch._two.*2.11 to 2.15",
    ),
]


def test_every_error_is_exported_and_documented_in_the_tree() -> None:
    kinds = {name for name, thing in vars(tree).items() if isinstance(thing, type) and issubclass(thing, Exception)}
    assert {name for name in tierstore.__all__ if name.endswith(("Error", "Warning"))} == kinds
    drawing = (tierstore.errors.__doc__ or "").split("::")[1].split("Every error")[0]
    drawn = set(re.findall(r"\b[A-Z]\w*(?:Error|Warning)\b", drawing)) - BUILT_IN
    assert drawn == kinds


def test_tree_is_as_drawn() -> None:
    parents = {
        ConfigError: (TierStoreError, ValueError),
        StoreClosedError: (TierStoreError,),
        ConfigTypeError: (ConfigError, TypeError),
        StoreFullError: (TierStoreError, MemoryError),
        QuotaExceededError: (StoreFullError,),
        CorruptDataError: (TierStoreError,),
        StorageIOError: (TierStoreError,),
        ModifiedInPlaceError: (TierStoreError, RuntimeError),
        DaemonUnavailableError: (TierStoreError,),
        ProtocolError: (TierStoreError,),
        UnsupportedTorchError: (TierStoreError, ImportError),
        TierStoreError: (Exception,),
    }
    assert {kind: kind.__bases__ for kind in parents} == parents
    assert not issubclass(StorageIOError, OSError)


@pytest.mark.parametrize(("error", "fields", "message"), EXAMPLES, ids=lambda part: type(part).__name__)
def test_error_has_its_fields_and_says_them(error: TierStoreError, fields: dict[str, object], message: str) -> None:
    for name, value in fields.items():
        assert getattr(error, name) == value
    assert re.search(message, str(error), re.DOTALL), str(error)


@pytest.mark.parametrize("error", [error for error, _, _ in EXAMPLES], ids=lambda error: type(error).__name__)
def test_error_survives_pickling_and_copying(error: TierStoreError) -> None:
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)
        assert twin != error  # errors are compared by identity
        assert isinstance(hash(error), int)


WRONG: dict[str, Callable[[TierStore, Path], object]] = {
    "unknown keyword of a store": lambda _, path: TierStore(path, hots_bytes=1),  # type: ignore[arg-type]
    "unknown keyword of connect": lambda _, path: TierStore.connect(path, hots_bytes=1),  # type: ignore[arg-type]
    "unknown keyword of a scope": lambda store, _: tiered_offload(store, min_byte=1),  # type: ignore[arg-type]
    "unknown keyword of a module": lambda store, _: offload_module(nn.Linear(1, 1), store=store, min_byte=1),
    "unknown keyword beside a file": lambda _, path: TierStore.from_config({"store": {}}, path=path, hots_bytes=1),
    "size": lambda _, path: TierStore(path, host_bytes=1.5),  # type: ignore[arg-type]
    "size that is a truth value": lambda store, _: tiered_offload(store, min_bytes=True),
    "io_depth": lambda _, path: TierStore(path, io_depth="4"),  # type: ignore[arg-type]
    "codec": lambda _, path: TierStore(path, codec=None),  # type: ignore[arg-type]
    "path": lambda _, path: TierStore(3),  # type: ignore[arg-type]
    "checksum": lambda _, path: TierStore(path, checksum=None),  # type: ignore[arg-type]
    "address": lambda _, path: TierStore.connect(b"/socket"),  # type: ignore[arg-type]
    "number as an address": lambda _, path: TierStore.connect(5),  # type: ignore[arg-type]
    "name of a client": lambda _, path: TierStore.connect(path, name=5),  # type: ignore[arg-type]
    "seconds": lambda _, path: TierStore.connect(path, reconnect_seconds="3"),  # type: ignore[arg-type]
    "config": lambda _, path: TierStore.from_config(3),  # type: ignore[arg-type]
    "store": lambda _, path: tiered_offload(path),  # type: ignore[arg-type]
    "select": lambda store, _: tiered_offload(store, select=1),  # type: ignore[arg-type]
    "prefetch": lambda store, _: tiered_offload(store, prefetch=None),  # type: ignore[arg-type]
    "trace": lambda store, _: tiered_offload(store, trace=1),  # type: ignore[arg-type]
    "module": lambda store, _: offload_module(print, store=store),  # type: ignore[arg-type]
    "tensor": lambda store, _: store.put([1.0]),  # type: ignore[arg-type]
    "handle": lambda store, _: store.get(3),  # type: ignore[arg-type]
    "handles": lambda store, _: store.prefetch(store.put(torch.ones(1))),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", WRONG)
def test_unknown_keyword_or_wrong_type_is_a_type_error_too(store: TierStore, store_directory: Path, what: str) -> None:
    with pytest.raises(TypeError) as caught:
        WRONG[what](store, store_directory)
    assert isinstance(caught.value, ConfigError)


NOT_ALLOWED: dict[str, Callable[[TierStore, Path], object]] = {
    "value": lambda _, path: TierStore(path, host_bytes=-1),
    "word": lambda store, _: tiered_offload(store, prefetch="often"),  # type: ignore[arg-type]
    "no path": lambda _, __: TierStore(""),
    "no address": lambda _, __: TierStore.connect(""),
    "almost a word": lambda store, _: tiered_offload(store, device_bytes="aut"),
    "unknown key without a value": lambda _, path: TierStore.from_config({"store": {"path": str(path), "hst": None}}),
    "zero byte": lambda _, path: TierStore.connect(f"{path}/socket\0"),
}


@pytest.mark.parametrize("what", NOT_ALLOWED)
def test_value_that_is_not_allowed_is_no_type_error(store: TierStore, store_directory: Path, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        NOT_ALLOWED[what](store, store_directory)
    assert "missing" not in str(caught.value)
    assert ('or "auto"' in str(caught.value)) == (what == "almost a word")
    assert not isinstance(caught.value, TypeError)
