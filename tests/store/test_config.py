"""What a caller may write for sizes and places, and what the machine says of itself."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cgroups import made_cgroup
from tests.inspect_store import inspect
from tests.processes import output_of
from tierstore import ConfigError, TierStore
from tierstore.base import config
from tierstore.base.config import available_host_bytes, check_directory, free_disk_bytes, local_world_size, parse_size

LIMIT_BYTES = 300 * 2**20

SIZES: list[tuple[int | str, int]] = [
    (0, 0), (12, 12), (2**63 - 1, 2**63 - 1), ("0", 0), ("17", 17), ("1B", 1), ("64KiB", 65_536), ("64 kib", 65_536),
    ("8GiB", 8 * 2**30), ("1.5GB", 1_500_000_000), ("1.5 MiB", 1_572_864), ("2k", 2048), ("3TB", 3 * 10**12),
    (" 4 MB ", 4_000_000), ("1024TiB", 2**50), ("0.5KiB", 512), ("9007199254740993", 9_007_199_254_740_993),
]  # fmt: skip


def test_size_is_understood() -> None:
    assert [(text, parse_size(text, "x")) for text, _ in SIZES] == SIZES


NO_SIZES: list[object] = [
    -1, "-1", "", " ", "GiB", "8 GiB free", "1e9", "0x10", "1,5GB", "8GiBs", "8 G i B",
    "\N{ARABIC-INDIC DIGIT THREE}", 1.5,
    None, True, False, b"8GiB", [8], "1.", ".5GB", "infinity", "nan", "8\nGiB\n8", "9" * 5000, "9" * 400 + ".0",
    2**63, 10**4000, 10**5000, "9" * 19, "9999999TiB", "8388608TiB",
]  # fmt: skip


def test_size_is_refused_with_what_was_given_and_what_is_allowed() -> None:
    for text in NO_SIZES:
        with pytest.raises(ConfigError) as caught:
            parse_size(text, "host_bytes")
        assert (caught.value.option, caught.value.given) == ("host_bytes", text)
        assert "GiB" in caught.value.allowed
        assert "host_bytes" in str(caught.value)


@given(st.one_of(st.text(max_size=12), st.integers(), st.floats(), st.none(), st.binary(max_size=4)))
def test_size_of_anything_is_a_number_or_refused(value: object) -> None:
    try:
        nbytes = parse_size(value, "x")
    except ConfigError:
        return
    assert isinstance(nbytes, int)
    assert nbytes >= 0


def test_directory_as_text_path_or_link_is_taken(tmp_path: Path) -> None:
    assert check_directory(tmp_path) == check_directory(str(tmp_path)) == tmp_path
    (tmp_path / "link").symlink_to(tmp_path)
    assert check_directory(tmp_path / "link")


@pytest.mark.parametrize(
    "path",
    [None, 5, b"/tmp", {"/tmp"}, [["/tmp"]], "x" * 5000, "a/" * 3000, "/tmp/\0", "{folder}/link"],
    ids=["none", "number", "bytes", "set", "nested", "long name", "long path", "zero", "dangling link"],
)
def test_directory_that_cannot_be_one_is_refused(tmp_path: Path, path: object) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError):
        TierStore(path.format(folder=tmp_path) if isinstance(path, str) else path)


def test_directory_that_is_missing_or_a_file_is_refused_and_never_created(tmp_path: Path) -> None:
    missing, file = tmp_path / "nvme" / "scratch", tmp_path / "file"
    file.write_text("content")
    for path, words in ((missing, "never created"), (file, "not a directory"), (file / "below", "directory")):
        with pytest.raises(ConfigError, match=words) as caught:
            TierStore(path)
        assert (caught.value.option, caught.value.given) == ("path", str(path))
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_text() == "content"


@pytest.fixture
def read_only_directory(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "mount"
    directory.mkdir()
    if os.geteuid() != 0:
        directory.chmod(0o500)
        yield directory
        directory.chmod(0o700)
        return
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", directory], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"root cannot mount a tmpfs here: {mounted.stderr.strip()}")
    yield directory
    subprocess.run(["umount", directory], check=True)


def test_directory_that_is_read_only_is_refused(read_only_directory: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written to"):
        TierStore(read_only_directory)


@pytest.mark.parametrize(("text", "num"), [(None, 1), ("1", 1), ("8", 8)])
def test_local_world_size_is_read(text: str | None, num: int) -> None:
    assert local_world_size({} if text is None else {"LOCAL_WORLD_SIZE": text}) == num
    for refused in ("0", "-1", "two", "", "1.5"):
        with pytest.raises(ConfigError, match="LOCAL_WORLD_SIZE"):
            local_world_size({"LOCAL_WORLD_SIZE": refused})


def test_defaults_are_shared_between_local_trainers(store_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []
    for num_trainers in ("1", "4"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", num_trainers)
        with TierStore(store_directory) as store:
            host = inspect(store).window("host").limit_bytes
            limits.append((host, inspect(store).disk.usage().budget_bytes))
    assert limits[0][0] <= available_host_bytes() * 0.3
    assert limits[0][1] <= free_disk_bytes(store_directory) * 0.85
    for whole, part in zip(*limits, strict=True):
        assert part == pytest.approx(whole / 4, rel=0.2)


@pytest.mark.parametrize(
    ("limit", "used", "stat", "expected"),
    [
        ("1000000", "300000", "anon 5\nfile 120000\ninactive_file 100000\n", [(1_000_000, 200_000)]),
        ("1000000", "300000", "inactive_file 100000\nactive_file 80000\nfile 180000\n", [(1_000_000, 160_000)]),
        (
            "1000000",
            "300000",
            "file 90000\nshmem 20000\ninactive_file 100000\nactive_file 40000\n",
            [(1_000_000, 250_000)],
        ),
        ("9223372036854771712", "300000", "inactive_file 0\n", []),
        ("max", "300000", "inactive_file 0\n", []),
        ("1000000", "300000", "", [(1_000_000, 300_000)]),
        ("nonsense", "300000", "", []),
        ("1000000", "nonsense", "", []),
    ],
)
def test_cgroup_limit_is_read_without_reclaimable_cache(
    tmp_path: Path, limit: str, used: str, stat: str, expected: list[tuple[int, int]]
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(stat)
    assert config._limit_of(tmp_path, 2) == expected


@pytest.mark.parametrize("version", [1, 2])
def test_memory_freed_lazily_and_used_again_is_no_page_cache(tmp_path: Path, version: int) -> None:
    """As recorded of a process with 64 MiB in use that it had freed with MADV_FREE, and 32 MiB of page cache (Linux
    6.18, version 1; in version 2 the same figures have other names). All 96 MiB count as inactive."""
    limit_name, used_name, _ = config._MEMORY_FILES[version]
    (tmp_path / limit_name).write_text(f"{512 * 2**20}\n")
    (tmp_path / used_name).write_text(f"{97 * 2**20}\n")
    recorded = (Path(__file__).parent / "memory_stat" / "version_1").read_text()
    totals = "".join(line for line in recorded.splitlines(keepends=True) if line.startswith("total_"))
    as_version_2 = totals.replace("total_cache", "file").replace("total_rss ", "anon ").replace("total_", "")
    (tmp_path / "memory.stat").write_text(recorded if version == 1 else as_version_2)
    assert config._limit_of(tmp_path, version) == [(512 * 2**20, 65 * 2**20)]


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A real memory cgroup below our own, limited to LIMIT_BYTES."""
    with made_cgroup("memory", memory__limit_in_bytes=LIMIT_BYTES) as folder:
        yield folder


TAKE_64_MIB = "held = bytearray(os.urandom(2**20)) * 64"
FREE_64_MIB_LAZILY_AND_USE_THEM_AGAIN = (
    "held = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
    "held.write(bytes(64 << 20)); held.madvise(mmap.MADV_FREE); held.seek(0); held.write(bytes(64 << 20))"
)


@pytest.mark.parametrize("take", [TAKE_64_MIB, FREE_64_MIB_LAZILY_AND_USE_THEM_AGAIN], ids=["taken", "freed lazily"])
def test_memory_in_use_below_the_limit_of_a_cgroup_is_not_available(small_cgroup: Path, take: str) -> None:
    program = (
        "import mmap, os, sys; from pathlib import Path; from tierstore.base.config import available_host_bytes\n"
        "Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()))\n"
        f"print(available_host_bytes())\n{take}\nprint(available_host_bytes())"
    )
    before, after = map(int, output_of(program, small_cgroup).split())
    assert LIMIT_BYTES // 2 < before <= LIMIT_BYTES
    assert before - after >= 60 * 2**20


def test_cgroup_used_beyond_its_limit_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # Made up: the kernel would kill a process that could show it.
    monkeypatch.setattr(config, "memory_cgroup_limits", lambda: [(2**40, 0), (5_000_000, 9_000_000)])
    assert available_host_bytes() == 0
