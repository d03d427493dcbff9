"""What a process may come with or do to its surroundings: closed standard streams, another working directory, a limit
on the length of files."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cgroups import entering, made_cgroup
from tests.daemon.conftest import environment_of_tests
from tests.descriptors import descriptors_of
from tests.processes import output_of
from tierstore import ConfigError, TierStore

MIB = 2**20

OPEN_AND_CLOSE = """
import sys, torch
from tierstore import TierStore
with TierStore(sys.argv[1], host_bytes=0, disk_bytes="64MiB", codec="none") as store:
    handle = store.put(torch.ones(100_000))
    store.flush()
    assert store.stats().spilled_bytes == 400_000
    assert store.get(handle).sum() == 100_000
"""


@pytest.mark.parametrize("closed", [(0,), (0, 1, 2)])
def test_store_of_a_process_without_standard_streams_works_and_closes(
    store_directory: Path, closed: tuple[int, ...]
) -> None:
    streams = " ".join(f"{each}{'<' if each == 0 else '>'}&-" for each in closed)
    program = [sys.executable, "-c", OPEN_AND_CLOSE, str(store_directory)]
    ended = subprocess.run(["sh", "-c", f'"$@" {streams}', "sh", *program], check=False, env=environment_of_tests())
    assert ended.returncode == 0


def test_limit_of_a_cgroup_is_kept_whatever_its_name_is(store_directory: Path) -> None:
    program = "import sys, tierstore\nwith tierstore.TierStore(sys.argv[1]) as store:\n    print(store.host_bytes)"
    with made_cgroup("memory") as cgroup:
        group = cgroup / os.fsdecode(b"caf\xe9 in Latin-1")
        group.mkdir()
        try:
            (group / "memory.limit_in_bytes").write_text(str(800 * MIB))
            assert 0 < int(output_of(program, store_directory, before=entering(group))) <= 200 * MIB
        finally:
            group.rmdir()


def test_store_stays_where_it_is_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here/drive", "there/drive"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with TierStore("drive", host_bytes=0, disk_bytes="256MiB", codec="none") as store:
        monkeypatch.chdir(tmp_path / "there")
        handle = store.put(torch.ones(4 * MIB))
        store.flush()
        files = [target for target in descriptors_of("self").values() if str(tmp_path) in target]
        assert files
        assert all(target.startswith(f"{tmp_path}/here/drive") for target in files)
        del handle


def test_working_directory_that_was_deleted_has_no_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "drive").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match=r"'drive'.*cannot be examined"):
        TierStore("drive")
    TierStore(tmp_path / "drive", host_bytes=0, disk_bytes="1MiB").close()
    monkeypatch.chdir(tmp_path)  # what other tests may ask for


def test_segments_are_as_long_as_a_file_may_be(store_directory: Path) -> None:
    """In a child: the limit is the process's."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100 * 2**20, resource.RLIM_INFINITY))\n"
        + OPEN_AND_CLOSE.replace("64MiB", "8GiB")
    )
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    command = [sys.executable, "-c", program, str(store_directory)]
    subprocess.run(command, check=True, env=environment_of_tests(), cwd=os.sep)
