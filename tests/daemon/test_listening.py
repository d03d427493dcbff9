"""The daemon's socket while several daemons begin there, and while more clients come than it has accepted."""

import fcntl
import os
import re
import signal
import socket
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.daemon.clients import crowd_at
from tests.daemon.conftest import END_SECONDS, StartDaemon
from tierstore import ConfigError, DaemonUnavailableError, TierStore
from tierstore.daemon import acceptor
from tierstore.daemon.acceptor import listen, stop_listening
from tierstore.sidecar.inspection import inspect_daemon


@contextmanager
def locked(place: Path) -> Iterator[None]:
    """Of a folder, as anybody can who may list it; or of a file, which is made."""
    descriptor = os.open(place, os.O_RDONLY | (0 if place.is_dir() else os.O_CREAT), 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
    os.close(descriptor)


def lock_of(address: Path) -> Path:
    return address.with_name(f"{address.name}.lock")


def make_stale(address: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(address))


def test_stale_socket_is_replaced_by_one_daemon_at_a_time(short_directory: Path) -> None:
    """Both may see that it is stale; the second must not take away what the first has just made."""
    address = short_directory / "s"
    make_stale(address)
    with ThreadPoolExecutor(1) as pool, socket.socket(socket.AF_UNIX) as first:
        with locked(lock_of(address)):
            second = pool.submit(listen, address, None)
            with pytest.raises(TimeoutError):
                second.result(0.2)
            address.unlink()
            first.bind(str(address))
            first.listen()
        with pytest.raises(ConfigError, match="a living daemon listens there"):
            second.result(END_SECONDS)


def test_daemon_that_ends_leaves_the_socket_of_one_that_begins(short_directory: Path) -> None:
    address = short_directory / "s"
    old = listen(address, None)
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        with locked(lock_of(address)):
            stopping = pool.submit(stop_listening, old, address)
            with pytest.raises(TimeoutError):
                stopping.result(0.2)
            address.unlink()
            new = stack.enter_context(socket.socket(socket.AF_UNIX))
            new.bind(str(address))
            new.listen()
        stopping.result(END_SECONDS)
        assert address.is_socket()


def test_lock_that_somebody_else_keeps_is_told(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "_LOCK_SECONDS", 0.05)
    lock = lock_of(short_directory / "s")
    with locked(lock), pytest.raises(ConfigError, match=f"another process has locked {lock}"):
        listen(short_directory / "s", None)
    assert list(short_directory.iterdir()) == [lock]


def test_whoever_can_list_the_folder_keeps_no_daemon_from_starting_or_ending(short_directory: Path) -> None:
    with locked(short_directory):
        listener = listen(short_directory / "s", None)
        assert list(short_directory.iterdir()) == [short_directory / "s"], "the lock goes with its file"
        stop_listening(listener, short_directory / "s")
    assert list(short_directory.iterdir()) == []


def test_lock_is_for_the_user_alone(short_directory: Path) -> None:
    address, seen = short_directory / "s", []
    lock = lock_of(address)
    with acceptor._locked(address):
        seen.append(stat.S_IMODE(lock.stat().st_mode))
    assert seen == [0o600]
    assert not lock.exists()
    lock.symlink_to(short_directory / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be opened, to be locked"):
        listen(address, None)
    assert not (short_directory / "elsewhere").exists()
    if os.geteuid() == 0:
        lock.unlink()
        lock.touch()
        os.chown(lock, 64_988, -1)
        with pytest.raises(ConfigError, match="has to be a file of this user"):
            listen(address, None)


def test_many_daemons_that_begin_and_end_at_one_address_do_not_meet(short_directory: Path) -> None:
    """The lock's file is removed each time, so one may be locked that has no name any more."""
    address, num_inside, most_inside = short_directory / "s", 0, 0

    def begin_and_end() -> None:
        nonlocal num_inside, most_inside
        for _ in range(50):
            with acceptor._locked(address):
                num_inside += 1
                most_inside = max(most_inside, num_inside)
                os.sched_yield()
                num_inside -= 1

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(begin_and_end) for _ in range(4)]:
            done.result(END_SECONDS)
    assert most_inside == 1
    assert list(short_directory.iterdir()) == []


def test_daemon_needs_no_working_directory(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (short_directory / "gone").mkdir()
    monkeypatch.chdir(short_directory / "gone")
    (short_directory / "gone").rmdir()
    listen(short_directory / "s", None).close()
    monkeypatch.chdir(short_directory)


def test_client_is_told_what_is_there_instead_of_a_daemon(short_directory: Path) -> None:
    make_stale(stale := short_directory / "stale")
    for address, words in (
        (short_directory, "what has that name is not a socket"),
        (short_directory / "s", f"Start one with: tierstore serve --path DIRECTORY --socket {short_directory}/s"),
        (stale, f"Start one with: tierstore serve --path DIRECTORY --socket {stale}"),
    ):
        with pytest.raises(DaemonUnavailableError, match=re.escape(words)):
            TierStore.connect(address)


def test_clients_wait_until_the_daemon_accepts_them(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    daemon.process.send_signal(signal.SIGSTOP)
    go_on = threading.Timer(0.3, daemon.process.send_signal, [signal.SIGCONT])
    with crowd_at(daemon.socket), ThreadPoolExecutor(2) as pool:
        with pytest.raises(DaemonUnavailableError, match="it does not answer"):
            inspect_daemon(daemon.socket, seconds=0.1)
        asked = pool.submit(inspect_daemon, daemon.socket, seconds=END_SECONDS)
        opened = pool.submit(TierStore.connect, daemon.socket)
        go_on.start()
        assert asked.result(END_SECONDS)
        opened.result(END_SECONDS).close()
