"""`tierstore serve` as an operator meets it: a process with options, signals and exit codes."""

import grp
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.daemon.clients import client_of, crowd_at, page_of, report_of
from tests.daemon.conftest import END_SECONDS, DaemonProcess, StartDaemon, environment_of_tests, tierstore
from tests.waiting import until
from tierstore import TierStore

MIB = 2**20
IDLE_BYTES = 50 * 10**6


def grace_seconds_of(daemon: DaemonProcess) -> float:
    with client_of(daemon) as client:
        return client.greet().grace_seconds


def quota_of(daemon: DaemonProcess) -> int:
    with client_of(daemon) as client:
        quota_bytes = client.open().disk_bytes
        client.end()
        return quota_bytes


def test_options_have_their_effect(start_daemon: StartDaemon, tmp_path: Path) -> None:
    group = grp.getgrgid(os.getgid()).gr_name
    daemon = start_daemon(
        tmp_path / "nvme",
        in_file=True,
        disk_bytes="512MiB",
        session_disk_bytes=64 * MIB,
        grace_seconds=2.5,
        handshake_seconds=7,
        metrics="127.0.0.1:0",
        allow_uid=[12345, 12346],
        socket_group=group,
        codec="zstd:3",
        log_level="info",
        log_format="json",
    )
    report = report_of(daemon)
    assert (report.path, report.socket) == (str(tmp_path / "nvme"), str(daemon.socket))
    assert report.disk.budget_bytes == 512 * MIB
    assert report.metrics is not None
    assert report.metrics.startswith("127.0.0.1:")
    assert quota_of(daemon) == 64 * MIB
    assert grace_seconds_of(daemon) == 2.5
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o660
    until(lambda: "\n" in daemon.log)  # a thread writes it
    assert json.loads(daemon.log.splitlines()[0])["message"] == "ready"
    with TierStore.connect(daemon.socket, host_bytes=0) as store:
        handle = store.put(torch.zeros(MIB))
        store.flush()
        assert "zstd:3" in str(store.stats().codec_choices)
        del handle
    assert daemon.stop() == 0


def assert_refused(arguments: list[str], *words: str, **variables: str) -> None:
    done = tierstore("serve", *arguments, **variables)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (complaint,) = done.stderr.splitlines()
    assert complaint.startswith("tierstore: ")
    for word in words:
        assert word in complaint


def test_bad_values_exit_2_with_one_line(tmp_path: Path, short_directory: Path) -> None:
    usable = ["--path", str(tmp_path), "--socket", str(short_directory / "s")]
    assert_refused([], "--path", "TIERSTORE_PATH")
    assert_refused(["--path", str(tmp_path / "nothing")], "path", "no such directory")
    assert_refused([*usable, "--disk-bytes", "much"], "--disk-bytes", "much", "8GiB")
    assert_refused([*usable, "--socket-group", "no-such-group"], "no-such-group")
    assert_refused(usable, "TIERSTORE_CODEC", "rar", TIERSTORE_CODEC="rar")
    file = tmp_path / "serve.toml"
    file.write_text("disk_byte = 1\n")
    assert_refused([*usable, "--config", str(file)], f"{file}: disk_byte", "disk_bytes")
    assert list(short_directory.iterdir()) == []


def test_second_daemon_on_the_directory_or_the_socket_refused(
    start_daemon: StartDaemon, tmp_path: Path, short_directory: Path
) -> None:
    daemon = start_daemon()
    before = sorted(tmp_path.iterdir())
    assert_refused(["--path", str(daemon.path), "--socket", str(short_directory / "other")], "path", str(daemon.path))
    assert not (short_directory / "other").exists()
    arguments = ["--path", str(tmp_path), "--socket", str(daemon.socket)]
    assert_refused(arguments, "socket", str(daemon.socket), "living daemon")
    assert sorted(tmp_path.iterdir()) == before, "no empty folder stays"
    assert grace_seconds_of(daemon) == 60, "the first one still has it"


def test_daemon_whose_socket_another_has_taken_over_leaves_it_alone(start_daemon: StartDaemon, tmp_path: Path) -> None:
    first = start_daemon()
    first.socket.unlink()
    second = start_daemon(tmp_path / "second", first.socket)
    assert first.stop() == 0
    second.wait_until_ready()
    assert second.stop() == 0
    assert not second.socket.exists()


def test_daemon_hangs_and_its_backlog_is_full_a_second_is_refused(start_daemon: StartDaemon, tmp_path: Path) -> None:
    first = start_daemon()
    first.wait_until_open()  # it has the lock beside its socket for a moment after it begins to listen
    first.process.send_signal(signal.SIGSTOP)
    with crowd_at(first.socket):
        second = start_daemon(tmp_path / "second", first.socket, wait=False)
        assert second.process.wait(END_SECONDS) == 2
        assert "a living daemon listens there" in second.log


def test_port_taken_exits_2_and_makes_nothing(start_daemon: StartDaemon, tmp_path: Path, short_directory: Path) -> None:
    port = page_of(start_daemon(metrics="127.0.0.1:0"))
    other = tmp_path / "other"
    other.mkdir()
    assert_refused(
        ["--path", str(other), "--socket", str(short_directory / "new" / "s"), "--metrics", port],
        "metrics",
        port,
        "in use",
    )
    assert list(other.iterdir()) == []
    assert not (short_directory / "new").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_exits_0_and_leaves_nothing(start_daemon: StartDaemon, number: int) -> None:
    daemon = start_daemon()
    assert quota_of(daemon) > 0
    assert daemon.stop(number) == 0, daemon.log
    assert not daemon.socket.exists()
    assert list(daemon.path.iterdir()) == []


_WITHOUT_STREAMS = """if True:
    import os, sys

    os.closerange(0, 3)
    path, socket = sys.argv[1:]
    options = ["--path", path, "--socket", socket]
    os.execv(sys.executable, [sys.executable, "-m", "tierstore.cli", "serve", *options])
"""


def test_daemon_without_standard_streams_serves_and_gives_their_numbers_to_no_file(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(program=_WITHOUT_STREAMS)
    assert quota_of(daemon) > 0
    opened = [os.readlink(f"/proc/{daemon.process.pid}/fd/{number}") for number in range(3)]
    assert opened == [os.devnull] * 3
    assert daemon.stop() == 0


def test_signal_before_it_listens_exits_0_and_leaves_nothing(tmp_path: Path, short_directory: Path) -> None:
    address = short_directory / "s"
    program = f"""if True:
        import os, signal, sys
        from tierstore.cli import main

        sys.addaudithook(lambda event, _: event == "socket.bind" and os.kill(os.getpid(), signal.SIGTERM))
        sys.argv = ["tierstore", "serve", "--path", {str(tmp_path)!r}, "--socket", {str(address)!r}]
        main()
    """
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment_of_tests(), check=False, timeout=END_SECONDS
    )
    assert ended.returncode == 0
    assert not address.exists()
    assert list(tmp_path.iterdir()) == []


def test_idle_daemon_is_small_and_quiet_and_never_maps_torch(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(log_level="error")
    assert grace_seconds_of(daemon) == 60  # it has started
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    assert int(line.split()[1]) * 1024 < IDLE_BYTES
    with TierStore.connect(daemon.socket, host_bytes=0) as store:
        handle = store.put(torch.randn(MIB))
        store.flush()
        store.get(handle)
        assert "libtorch" not in Path(f"/proc/{daemon.process.pid}/maps").read_text()
        assert "libtorch" in Path("/proc/self/maps").read_text(), "that is how it would show"
        del handle
    assert daemon.stop() == 0
    assert daemon.log == ""


def test_end_of_a_daemon_removes_nothing_behind_a_link_in_its_path_s_place(
    start_daemon: StartDaemon, tmp_path: Path, short_directory: Path
) -> None:
    victim = tmp_path / "victim"
    (victim / "tierstore-daemon").mkdir(parents=True)
    (victim / "t.sock").write_text("a file of somebody's")
    daemon = start_daemon()
    daemon.path.rename(tmp_path / "moved")
    daemon.path.symlink_to(victim)
    daemon.socket.parent.rename(short_directory / "moved")
    daemon.socket.parent.symlink_to(victim)
    assert daemon.stop() == 0, daemon.log
    assert sorted(each.name for each in victim.iterdir()) == ["t.sock", "tierstore-daemon"]
    assert list((tmp_path / "moved").iterdir()) == [], "its own folder is gone, wherever it is by now"
    daemon.path.unlink()
