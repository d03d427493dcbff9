"""A store and a scope from a file: what it may say, and what is said of a file that cannot be used."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.daemon.conftest import StartDaemon, short_directory, start_daemon
from tests.inspect_store import inspect
from tierstore import ConfigError, TierStore, tiered_offload
from tierstore.base.config_file import offload_options, store_options
from tierstore.base.toml_file import toml_text

__all__ = ["short_directory", "start_daemon"]

MIB = 2**20

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        file = tmp_path / "tierstore.toml"
        file.write_text(text)
        return file

    return write


def test_store_of_a_file_has_its_arguments(write: Write, store_directory: Path) -> None:
    file = write(
        f"""
        [store]
        path = "{store_directory}"
        host_bytes = "3MiB"
        disk_bytes = {64 * MIB}
        codec = "zstd:1"
        staging_bytes = "9MiB"
        inline_bytes = 0
        checksum = false
        io_depth = 9
        max_write_bytes_per_day = "1GiB"
        """
    )
    with TierStore.from_config(str(file)) as store:
        disk = inspect(store).disk
        assert (store.host_bytes, store.staging_bytes, disk.usage().budget_bytes) == (3 * MIB, 9 * MIB, 64 * MIB)
        assert store.stats().write_allowance_bytes == 2**30
        assert store.stats().staging_bytes == (9 + 9 * 4) * MIB
        values = [torch.zeros(MIB), torch.ones(MIB)]
        handles = [store.put(value) for value in values]
        store.flush()
        assert all(torch.equal(store.get(handle), value) for handle, value in zip(handles, values, strict=True))
        assert set(store.stats().codec_choices["float32"]) == {"zstd:1"}


def test_store_of_a_file_that_names_a_socket_is_the_daemons(
    write: Write, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    daemon = start_daemon(codec="none")
    file = write(f'[store]\nconnect = "{daemon.socket}"\nhost_bytes = 0\nwindow_bytes = "4MiB"\nname = "filed"')
    with TierStore.from_config(file) as store:
        handle = store.put(torch.arange(MIB))
        store.flush()
        assert torch.equal(store.get(handle), torch.arange(MIB))
        assert store.stats().written_bytes == 8 * MIB


def test_scope_of_a_file_has_its_arguments(write: Write, store: TierStore) -> None:
    file = write('[offload]\nmin_bytes = "8KiB"\nprefetch = "reverse"\ndevice_bytes = 0\nlookahead_bytes = "2MiB"')
    for scope, kept_bytes in (
        (tiered_offload.from_config(store, file), 4096),
        (tiered_offload.from_config(store, file, min_bytes=4096), 0),
    ):
        before = store.stats().kept_bytes["small"]
        weight = torch.ones(1024, requires_grad=True)
        with scope:
            weight.exp().sum().backward()
        assert store.stats().kept_bytes["small"] - before == kept_bytes


def test_file_without_tables_is_the_defaults(write: Write, store: TierStore) -> None:
    assert offload_options(write(""), {}).values == {}


BAD_FILES: list[tuple[str, str, object, str]] = [
    ("[store]\npath = '{drive}'\nhost_byte = 1", "store.host_byte", 1, "host_bytes, disk_bytes"),
    ("[store]\npath = '{drive}'\nhost_bytes = '12 parsecs'", "store.host_bytes", "12 parsecs", "GiB"),
    ("[store]\npath = '{drive}'\nhost_bytes = 1.5", "store.host_bytes", 1.5, "int | str"),
    ("[store]\npath = '{drive}'\nhost_bytes = true", "store.host_bytes", True, "bool"),
    ("[store]\npath = '{drive}'\ncodec = 'gzip'", "store.codec", "gzip", "shuffle-zstd"),
    ("[store]\npath = '{drive}'\nchecksum = 'yes'", "store.checksum", "yes", "bool"),
    ("[store]\npath = '{drive}'\nwindow_bytes = 5", "store.window_bytes", 5, "staging_bytes"),
    ("[store]\npath = '{drive}/nowhere'", "store.path", "{drive}/nowhere", "no such directory"),
    ("[store]\npath = 5", "store.path", 5, "str"),
    ("[store]\nconnect = '/run/x'\ndisk_bytes = 5", "store.disk_bytes", 5, "window_bytes"),
    ("[store]\nconnect = '/run/x'\nreconnect_seconds = -1.0", "store.reconnect_seconds", -1.0, "0 or more"),
    ("[store]\nhost_bytes = 5", "store", None, "either path"),
    ("", "store", None, "either path"),
    ("[store]\npath = '/x'\nconnect = '/y'", "store", {"path": "/x", "connect": "/y"}, "either path"),
    ("store = 5", "store", 5, "object"),
    ("[shop]\npath = '/x'", "shop", {"path": "/x"}, "store, offload"),
    ("[store]\npath = '{drive}'\ncodec = 'zstd:99'", "store.codec", "zstd:99", "shuffle-zstd"),
    ("[store]\npath = '{drive}'\nio_depth = 0", "store.io_depth", 0, "1 to 64"),
    ("[store]\npath = '{drive}'\nio_depth = 65", "store.io_depth", 65, "1 to 64"),
    ("[store]\npath = '{drive}'\n[offload]\nmin_byte = 5", "offload.min_byte", 5, "min_bytes, device_bytes"),
    ("[offload]\nprefetch = 'soon'", "offload.prefetch", "soon", "'learned'"),
    ("[offload]\nmin_bytes = 'tiny'", "offload.min_bytes", "tiny", "GiB"),
    ("[offload]\nselect = 'all'", "offload.select", "all", "min_bytes"),
    ("[offload]\ndevice_bytes = []", "offload.device_bytes", [], "int | str"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "key", "value", "allowed"), BAD_FILES, ids=[key for _, key, _, _ in BAD_FILES])
def test_bad_file_is_refused_with_its_name_and_key(
    text: str, key: str, value: object, allowed: str, write: Write, store: TierStore, store_directory: Path
) -> None:
    """Of a store; of a scope where there is nothing else."""
    file = write(text.replace("{drive}", str(store_directory)))
    with pytest.raises(ConfigError) as caught:
        tiered_offload.from_config(store, file) if text.startswith("[offload]") else TierStore.from_config(file)
    expected = value.replace("{drive}", str(store_directory)) if isinstance(value, str) else value
    assert (caught.value.option, caught.value.given) == (f"{file}: {key}", expected)
    assert allowed in caught.value.allowed


def test_argument_beside_a_file_is_refused_by_its_own_name(write: Write, store_directory: Path) -> None:
    file = write(f"[store]\npath = '{store_directory}'\ncodec = 'none'")
    with pytest.raises(ConfigError) as caught:
        TierStore.from_config(file, codec="gzip")
    assert caught.value.option == "codec"


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"[store", b"[" * 5000, b"a = 1\na = 2", b"\0"], ids=["text", "end", "deep", "twice", "0"]
)
def test_file_that_is_no_toml_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "tierstore.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="not valid TOML") as caught:
        TierStore.from_config(file)
    assert (caught.value.option, caught.value.given) == ("config", str(file))


@pytest.mark.parametrize("config", ["{folder}", "{folder}/nothing", "\0", 5, None, b"x"])
def test_config_that_is_no_file_is_refused(config: object, tmp_path: Path) -> None:
    given = config.replace("{folder}", str(tmp_path)) if isinstance(config, str) else config
    with pytest.raises(ConfigError) as caught:
        TierStore.from_config(given)  # type: ignore[arg-type]
    assert caught.value.option == "config"


_VALUES: Any = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
_KEYS = st.one_of(st.text(max_size=5), st.sampled_from(["path", "connect", "codec", "min_bytes", "a.b`", "x[0]"]))


@settings(deadline=None)
@given(
    st.dictionaries(
        st.one_of(st.text(max_size=5), st.sampled_from(["store", "offload"])),
        st.one_of(_VALUES, st.dictionaries(_KEYS, _VALUES, max_size=4)),
        max_size=3,
    )
)
def test_mapping_of_anything_is_taken_or_refused(config: dict[str, Any]) -> None:
    for read in (store_options, offload_options):
        with contextlib.suppress(ConfigError):
            assert isinstance(read(config, {}).values, dict)


_PLAIN = st.one_of(st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(max_size=8))
_NAMES = st.text("abcdefgh_", min_size=1, max_size=4)


@settings(deadline=None)
@given(
    st.dictionaries(
        _NAMES,
        st.recursive(
            st.one_of(_PLAIN, st.lists(_PLAIN, max_size=3)),
            lambda inner: st.one_of(
                st.dictionaries(_NAMES, inner, max_size=3),
                st.lists(st.dictionaries(_NAMES, inner, max_size=3), min_size=1, max_size=3),
            ),
            max_leaves=6,
        ),
        max_size=4,
    )
)
def test_toml_text_is_read_back_as_it_was(values: dict[str, Any]) -> None:
    assert msgspec.toml.decode(toml_text(values)) == values
