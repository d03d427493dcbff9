"""The option `return_memory` and its figures, wherever a user meets them."""

import mmap
from pathlib import Path

import pytest

from tests.conftest import MakeStore
from tierstore import ConfigError, TierStore
from tierstore.returning.allocator import allocator_of_process

MIB = 2**20


@pytest.mark.parametrize("value", ["sometimes", "Auto", True, None])
def test_anything_else_is_refused_and_nothing_is_opened(store_directory: Path, value: object) -> None:
    with pytest.raises(ConfigError, match=r"return_memory.*'auto', 'always', 'never'") as caught:
        TierStore(store_directory, return_memory=value)  # type: ignore[arg-type]
    assert isinstance(caught.value, TypeError) is not isinstance(value, str)
    with pytest.raises(ConfigError, match="return_memory"):
        TierStore.connect("/run/nobody.sock", return_memory=value)  # type: ignore[arg-type]


@pytest.mark.usefixtures("no_caching_allocator")
@pytest.mark.parametrize("mode", ["auto", "always", "never"])
def test_file_says_when_memory_is_returned(store_directory: Path, tmp_path: Path, mode: str) -> None:
    file = tmp_path / "tierstore.toml"
    file.write_text(f'[store]\npath = "{store_directory}"\nhost_bytes = 0\nreturn_memory = "{mode}"\n')
    left_alone = allocator_of_process().left_alone
    with TierStore.from_config(file) as store:
        assert store.stats().memory_return == (f"off: {left_alone}" if left_alone and mode == "auto" else mode)
    file.write_text(file.read_text().replace(mode, "now"))
    with pytest.raises(ConfigError, match=r"tierstore\.toml: store\.return_memory"):
        TierStore.from_config(file)


def test_stats_tell_what_the_process_holds(make_store: MakeStore) -> None:
    store = make_store(return_memory="never")
    before = store.stats().resident_bytes
    assert before is not None
    kept = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # malloc may have as much resident
    kept[:: mmap.PAGESIZE] = b"\1" * (64 * MIB // mmap.PAGESIZE)
    stats = store.stats()
    assert stats.resident_bytes is not None
    assert stats.resident_bytes - before > 56 * MIB
    assert stats.allocator_free_bytes is None or 0 <= stats.allocator_free_bytes < stats.resident_bytes - len(kept)
    assert (stats.returned_bytes, stats.return_seconds) == (0, 0.0)
