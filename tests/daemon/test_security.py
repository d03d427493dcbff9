"""Whoever connects may be broken or hostile: it is refused or timed out, and the daemon goes on serving."""

import fcntl
import os
import random
import resource
import signal
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.daemon import wire
from tests.daemon.clients import LONG_SECONDS, RawClient
from tests.daemon.conftest import DaemonProcess, StartDaemon
from tests.descriptors import descriptors_of
from tests.processes import python
from tierstore.daemon.acceptor import listen
from tierstore.errors import ConfigError
from tierstore.sidecar.inspection import inspect_daemon
from tierstore.sidecar.window import SharedSlab

SHORT_SECONDS = 0.5
MIB = 2**20
in_short_time = pytest.mark.parametrize("daemon", [SHORT_SECONDS], indirect=True, ids=["in short time"])
"""Has the daemon of a test time its clients out soon: one that means to be in time is opened by `open_in_time`."""


Connect = Callable[[], RawClient]


def open_in_time(connect: Connect) -> RawClient:
    """One with a session. On a busy machine the first one may say Hello too late."""
    while True:
        client = connect()
        with suppress(BrokenPipeError, ConnectionResetError):
            client.send(wire.Hello((wire.VERSION,), "test"))
        answer = client.receive()
        if isinstance(answer, wire.Welcome):
            client.send(wire.Open("test", None, os.getpid()))
            client.expect(wire.Opened)
            return client
        assert answer is None or (isinstance(answer, wire.Refused) and "no Hello" in answer.reason), answer


@pytest.fixture
def connect(daemon: DaemonProcess) -> Iterator[Connect]:
    with ExitStack() as clients:

        def one_more() -> RawClient:
            client = RawClient(daemon)
            clients.callback(client.socket.close)
            return client

        yield one_more


@pytest.fixture
def slab() -> Iterator[SharedSlab]:
    slab = SharedSlab(1, MIB)
    yield slab
    slab.close()


@pytest.fixture(scope="module")
def shared_daemon(start_shared_daemon: StartDaemon) -> DaemonProcess:
    return start_shared_daemon(handshake_seconds=LONG_SECONDS)


@pytest.fixture
def daemon(request: pytest.FixtureRequest) -> Iterator[DaemonProcess]:
    """Has clients say hello within the seconds that a test gives as a parameter; else a long time."""
    if hasattr(request, "param"):
        daemon: DaemonProcess = request.getfixturevalue("start_daemon")(handshake_seconds=request.param)
    else:
        daemon = request.getfixturevalue("shared_daemon")
    yield daemon
    assert daemon.process.poll() is None, "it must go on"
    good, slab = open_in_time(lambda: RawClient(daemon)), SharedSlab(1, MIB)
    good.share(slab)
    slab.memory[:5] = b"hello"
    good.send(wire.Write(1, 1, 1, 0, 5, "uint8", 1, ""))
    good.expect(wire.Stored)
    good.send(wire.Read(2, 1, 1, 100, 5))
    good.expect(wire.Loaded)
    assert bytes(slab.memory[100:105]) == b"hello", "it must go on serving"
    good.end()
    good.socket.close()
    slab.close()


@in_short_time
def test_half_a_frame_is_timed_out(connect: Connect) -> None:
    for prefix in (b"\x10", b"\x10\x00\x00\x00", wire.frame_of([wire.Hello((1,), "x")])[:-1]):
        client = connect()
        client.socket.sendall(prefix)
        assert client.is_cut_off()
    client = open_in_time(connect)
    client.socket.sendall(b"\xff\x00\x00\x00abc")
    assert client.is_cut_off()


@in_short_time
def test_silence_is_timed_out_and_in_a_session_no_offence(connect: Connect) -> None:
    quiet = open_in_time(connect)
    for _ in range(2):  # each as long as the limit
        assert connect().is_refused("Hello", "0.5 s")
    quiet.send(wire.Inspect())
    quiet.expect(wire.Report)


def test_garbage_is_cut_off(connect: Connect) -> None:
    for seed in range(20):
        source = random.Random(seed)
        client = connect()
        if seed % 2:
            client.open()
        num_bytes = source.randrange(1, 5000)
        body = source.randbytes(num_bytes)
        client.socket.sendall(struct.pack("<I", num_bytes) + body if seed % 3 else body + b"\xff" * 4)
        assert client.is_cut_off(), seed


def test_wrong_phase_is_refused(connect: Connect) -> None:
    client = connect()
    client.greet()
    client.send(wire.Read(1, 1, 1, 0, 5))
    assert client.is_refused("Read", "lobby")
    client = connect()
    client.greet()
    client.send(wire.Open("x", None, 1), wire.Open("y", None, 1))
    assert client.is_cut_off(), "two sessions at once"


def test_stolen_session_without_its_token_is_refused(connect: Connect) -> None:
    owner = connect()
    opened = owner.open()
    for session, token in ((opened.session, b"x" * 32), (opened.session + 1, opened.token), (2**40, opened.token)):
        thief = connect()
        thief.greet()
        thief.send(wire.Resume(session, token))
        assert thief.is_refused("no such session")
    owner.send(wire.Inspect())
    assert isinstance(owner.receive(), wire.Report), "its owner does not notice"


def test_records_of_others_cannot_be_named(connect: Connect, slab: SharedSlab) -> None:
    owner, thief = connect(), connect()
    owner.open(), thief.open()
    owner.share(slab)
    owner.send(wire.Write(1, 5, 1, 0, 100, "uint8", 1, ""))
    owner.expect(wire.Stored)
    own = SharedSlab(1, MIB)
    thief.share(own)
    thief.send(wire.Discard(1, (5,)))
    thief.expect(wire.Gone)
    thief.send(wire.Read(2, 5, 1, 0, 100))
    assert thief.is_refused("record 5")
    owner.send(wire.Read(3, 5, 1, 0, 100))
    owner.expect(wire.Loaded)
    own.close()


def test_unsafe_slab_is_refused(connect: Connect, slab: SharedSlab, tmp_path: Path) -> None:
    flaws = {
        "not sealed": "not sealed", "too short": "instead of", "without pages": "not allocated", "a file": "not sealed",
        "a pipe": "not sealed", "none": "no descriptor", "empty": "without bytes",
    }  # fmt: skip
    for flaw, words in flaws.items():
        client = connect()
        client.open()
        descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        num_bytes = 0 if flaw == "empty" else MIB
        os.ftruncate(descriptor, MIB // 2 if flaw == "too short" else MIB)
        if flaw != "without pages":
            os.pwrite(descriptor, bytes(os.fstat(descriptor).st_size), 0)
        if flaw != "not sealed":
            fcntl.fcntl(descriptor, 1033, fcntl.F_SEAL_SHRINK)
        if flaw in ("a file", "a pipe"):
            os.close(descriptor)
            descriptor = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR) if flaw == "a file" else os.pipe()[0]
        client.send(wire.Slab(1, num_bytes), descriptors=() if flaw == "none" else (descriptor,))
        assert client.is_refused(words), flaw
        os.close(descriptor)
    client = connect()
    client.open(slab, slab)
    assert client.is_refused("twice")


def test_slabs_are_limited_in_number(connect: Connect) -> None:
    """Each takes a descriptor of the daemon's, also one of a single page."""
    client, slabs = connect(), [SharedSlab(number, 4096) for number in range(18)]
    client.open(*slabs[:16])
    client.send(wire.Unmap(3))
    client.share(slabs[16])
    client.send(wire.Write(1, 1, 16, 0, 4096, "", 1, ""))
    client.expect(wire.Stored)
    client.share(slabs[17])
    assert client.is_refused("16 slabs")
    for slab in slabs:
        slab.close()


def test_slab_that_a_request_names_cannot_be_taken_back(connect: Connect, slab: SharedSlab) -> None:
    """The daemon has it mapped as long as the request runs: it would have slabs that do not count."""
    client = connect()
    client.open(slab)
    client.send(wire.Write(1, 1, 1, 0, MIB, "", 1, ""))
    client.expect(wire.Stored)
    client.send(wire.Unmap(1))
    client.share(slab)
    client.send(wire.Read(2, 1, 1, 0, MIB), wire.Unmap(1))
    assert client.is_refused("Unmap", "slab 1")


def test_range_outside_the_slab_is_refused(connect: Connect, slab: SharedSlab) -> None:
    for where in ((0, MIB + 1), (MIB, 1), (2**62, 2**62), (MIB - 10, 20)):
        for message in (wire.Write(1, 1, 1, *where, "", 1, ""), wire.Read(1, 1, 1, *where)):
            client = connect()
            client.open(slab)
            client.send(message)
            assert client.is_refused("slab")


@in_short_time
def test_running_out_of_descriptors_passes(connect: Connect, daemon: DaemonProcess) -> None:
    limit = len(descriptors_of(daemon.process.pid)) + 20
    before = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    crowd = [connect() for _ in range(40)]
    assert crowd[0].is_refused(), "the first got in, and makes room or is timed out; so do the others, little by little"
    for client in crowd:
        client.socket.close()
    resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, before)
    open_in_time(connect)


def test_socket_is_for_the_user_alone(daemon: DaemonProcess) -> None:
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(daemon.socket.parent.stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can connect as somebody else")
def test_user_who_is_not_listed_is_refused(daemon: DaemonProcess) -> None:
    daemon.let_everybody_connect()
    program = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
        "print(s.recv(9999))"
    )
    done = python("-c", program, daemon.socket)
    assert "user 65534 may not use this daemon" in done.stdout, done
    daemon.socket.parent.chmod(0o700)
    daemon.socket.chmod(0o600)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can connect as somebody else")
def test_refused_user_who_has_left_is_one_line_of_the_log(start_daemon: StartDaemon) -> None:
    daemon = start_daemon()
    daemon.let_everybody_connect()
    daemon.process.send_signal(signal.SIGSTOP)
    program = "import os, socket, sys; os.setuid(65534); socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    assert python("-c", program, daemon.socket).returncode == 0
    daemon.process.send_signal(signal.SIGCONT)
    inspect_daemon(daemon.socket)
    assert daemon.stop() == 0
    assert daemon.log.count("uid=65534") == 1, daemon.log
    assert "refused: user 65534" in daemon.log


def test_file_in_the_socket_s_place_is_left_alone(daemon: DaemonProcess) -> None:
    plain = daemon.socket.parent / "file"
    plain.write_text("mine")
    with pytest.raises(ConfigError, match="not a socket"):
        listen(plain, None)
    assert plain.read_text() == "mine"


def test_connections_that_never_open_a_session_do_not_keep_others_out(connect: Connect) -> None:
    idle = [connect() for _ in range(80)]
    for client in idle[-64:]:
        client.greet()
    other = connect()
    other.open()
    refusal = idle[0].receive()
    assert isinstance(refusal, wire.Refused)
    assert "too many connections without a session" in refusal.reason
    assert not refusal.is_final, "the session that it may be about to resume is not over"
    assert idle[0].receive() is None
    for client in idle[-32:]:
        client.send(wire.Inspect())
        assert isinstance(client.receive(), wire.Report), "the newest stay"
