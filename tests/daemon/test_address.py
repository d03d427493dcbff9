"""Where a daemon listens if nobody says where, and how its clients find it: as root, and as an ordinary user."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.conftest import END_SECONDS, DaemonProcess, environment_of_tests
from tierstore import TierStore
from tierstore.base import address
from tierstore.base.address import SYSTEM_ADDRESS, check_folder, default_address, find_address, places_to_look
from tierstore.errors import ConfigError, DaemonUnavailableError
from tierstore.tuning.system import find_daemon

UID = 64_987
"""Of an ordinary user whom no machine has."""


@pytest.fixture
def places(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in place of /tmp; in it `run` is this user's runtime directory. The user is not root."""
    runtime = short_directory / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setattr(address, "_TEMPORARY", short_directory)
    monkeypatch.setattr(address, "SYSTEM_ADDRESS", str(short_directory / "system.sock"))
    monkeypatch.setattr(address.os, "geteuid", lambda: UID)
    for folder in (short_directory, runtime):
        if os.getuid() == 0:
            os.chown(folder, UID, UID)
        else:
            monkeypatch.setattr(address.os, "geteuid", os.getuid)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.delenv("TIERSTORE_SOCKET", raising=False)
    return short_directory


def _own_folder(places: Path, mode: int = 0o700) -> Path:
    folder = Path(default_address()).parent
    folder.mkdir()
    folder.chmod(mode)
    if os.getuid() == 0:
        os.chown(folder, UID, UID)
    return folder


@pytest.mark.skipif(os.geteuid() != 0, reason="of root")
def test_root_has_one_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_address() == SYSTEM_ADDRESS
    assert places_to_look() == (SYSTEM_ADDRESS,)


def test_user_has_an_address_in_the_runtime_directory(places: Path) -> None:
    assert default_address() == str(places / "run" / "tierstore" / "tierstore.sock")
    assert places_to_look() == (default_address(), str(places / "system.sock"))


@pytest.mark.parametrize("what", ["unset", "relative", "missing", "writable by others", "a link", "another's"])
def test_runtime_directory_that_is_not_the_users_alone_is_left(
    what: str, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = places / "run"
    if what == "unset":
        monkeypatch.delenv("XDG_RUNTIME_DIR")
    elif what == "relative":
        monkeypatch.chdir(places)
        monkeypatch.setenv("XDG_RUNTIME_DIR", "run")
    elif what == "missing":
        runtime.rmdir()
    elif what == "a link":
        runtime.rename(places / "elsewhere")
        runtime.symlink_to(places / "elsewhere")
    elif what == "writable by others":
        runtime.chmod(0o770)
    elif os.getuid():
        pytest.skip("only root can give a directory away")
    else:
        os.chown(runtime, 0, 0)
    assert default_address() == str(places / f"tierstore-{address.os.geteuid()}" / "tierstore.sock")


def test_own_daemon_comes_before_that_of_the_system(places: Path) -> None:
    (places / "system.sock").touch()
    assert find_address() == str(places / "system.sock")
    (_own_folder(places) / "tierstore.sock").touch()
    assert find_address() == default_address()


def test_variable_of_the_daemon_counts_for_clients_too(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERSTORE_SOCKET", "/elsewhere/s")
    assert find_address() == "/elsewhere/s"


def test_no_socket_names_all_places_and_the_command_that_starts_a_daemon(places: Path) -> None:
    with pytest.raises(DaemonUnavailableError) as error:
        TierStore.connect()
    for word in (*places_to_look(), "tierstore serve --path DIRECTORY"):
        assert word in str(error.value)
    assert "--socket" not in str(error.value)
    assert not find_daemon(None, places).is_present


@pytest.mark.skipif(os.getuid() != 0, reason="gives a directory away")
@pytest.mark.parametrize(
    ("flaw", "words"),
    [
        (0o770, "others can write to it"),
        (0o702, "others can write to it"),
        ("a link", "belong to"),
        ("root's", "belong to"),
    ],
)
def test_folder_in_tmp_that_is_not_the_users_alone_is_not_used(
    flaw: int | str, words: str, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    folder = _own_folder(places, flaw if isinstance(flaw, int) else 0o700)
    (folder / "tierstore.sock").touch()
    if flaw == "a link":
        folder.rename(places / "elsewhere")
        folder.symlink_to(places / "elsewhere")
    elif flaw == "root's":
        os.chown(folder, 0, 0)
    with pytest.raises(DaemonUnavailableError, match=words):
        find_address()
    with pytest.raises(ConfigError):
        check_folder(folder)
    (places / "system.sock").touch()
    assert find_address() == str(places / "system.sock")
    if isinstance(flaw, int):
        folder.chmod(0o700)
        check_folder(folder)
        assert find_address() == default_address()


_AS_USER = (
    "setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--bounding-set=-all,+dac_read_search",
    "--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search",
)  # fmt: skip
"""It may read what is root's, since Python itself may be installed there."""

_STORE = """
import torch
from tierstore import TierStore
with TierStore.connect(host_bytes=0) as store:
    handle = store.put(torch.ones(2**18))
    store.flush()
    assert store.stats().disk_bytes == 2**20
    assert torch.equal(store.get(handle), torch.ones(2**18))
    del handle
print("stored")
"""


@pytest.fixture
def variables(short_directory: Path) -> Iterator[dict[str, str]]:
    """The environment of an ordinary user without a runtime directory."""
    if os.geteuid() or shutil.which("setpriv") is None:
        pytest.skip("only root can become another user, by setpriv")
    os.chown(short_directory, UID, UID)
    yield environment_of_tests(COLUMNS="300", XDG_RUNTIME_DIR="")
    shutil.rmtree(f"/tmp/tierstore-{UID}", ignore_errors=True)


def _run(variables: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [*_AS_USER, sys.executable, *arguments]
    return subprocess.run(
        line, capture_output=True, text=True, check=False, env=variables, timeout=END_SECONDS, cwd="/"
    )


def test_daemon_and_clients_of_an_ordinary_user_agree_without_an_address(
    variables: dict[str, str], short_directory: Path
) -> None:
    folder = Path(f"/tmp/tierstore-{UID}")
    drive = short_directory / "drive"
    drive.mkdir()
    os.chown(drive, UID, UID)
    cli = ("-m", "tierstore.cli")
    alone = _run(variables, *cli, "stat")
    assert alone.returncode == 1
    for word in (str(folder / "tierstore.sock"), SYSTEM_ADDRESS, "tierstore serve --path DIRECTORY"):
        assert word in alone.stderr
    command, log_file = [*_AS_USER, sys.executable, *cli, "serve", "--path", str(drive)], short_directory / "log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, env=variables, cwd="/", stdout=log, stderr=log)
    daemon = DaemonProcess(process, drive, folder / "tierstore.sock", log_file)
    try:
        daemon.wait_until_ready()
        status = folder.stat()
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o700, UID)
        stored = _run(variables, "-c", _STORE)
        assert (stored.returncode, stored.stdout) == (0, "stored\n"), stored.stderr
        for command in (("stat",), ("top", "--iterations=1")):
            done = _run(variables, *cli, *command)
            assert done.returncode == 0, done.stderr
            assert str(drive) in done.stdout
        assert daemon.stop() == 0
    finally:
        daemon.kill()
