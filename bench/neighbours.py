"""How long does a client of the daemon wait while another one sends as much as it can?

The quiet client frees what is not there (`word`), and stores, reads and frees 64 KiB (`record`), one request at a time.
The loud one is a process that is started for its time and killed after it; quiet and loud times take turns. Both are of
the same user, so what is measured is the share between sessions; but where the name says another user, which needs
root. `daemon_to_documented`: the most memory of the daemon's own, of what `docs/how_to/daemon.md` says that it needs.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from tierstore.sidecar.frames import MAX_CLIENT_FRAME_BYTES, FrameReader, encoded, frame_of, frames_of
from tierstore.sidecar.inspection import inspect_daemon
from tierstore.sidecar.messages import (
    MOST_WORD,
    VERSION,
    ClientMessage,
    Close,
    DaemonMessage,
    Discard,
    Gone,
    Hello,
    Inspect,
    Loaded,
    Open,
    Read,
    Slab,
    Stored,
    Unmap,
    Write,
)
from tierstore.sidecar.window import SharedSlab

from .child import command
from .goals import Goal
from .harness import Benchmark
from .parties import Figures, daemon

MIB = 2**20
RECORD_BYTES = 64 * 2**10
KINDS = ("word", "record")
SECONDS = 1.5
SETTLE_SECONDS = 1.0  # until the loud one has begun
PAUSE_SECONDS = 0.1
TURNS = 3
NUM_DEAF = 100
OTHER_UID = 64_987  # an ordinary user whom no machine has
MOST_LATER = 5.0  # of a quiet neighbour's round trip
MOST_LATER_THAN_PLAIN = 1.5  # than beside one session that writes as a training does


class Talker:
    """A client that speaks the protocol by hand, blocking."""

    def __init__(self, address: str, slab: SharedSlab | None = None, name: str = "a benchmark") -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(address)
        self.answers = self._read()
        self.ask(Hello((VERSION,), "a benchmark"))
        self.ask(Open(name, None, os.getpid()))
        if slab is not None:
            socket.send_fds(self.socket, [frame_of([Slab(slab.number, slab.num_bytes)])], [slab.descriptor])

    def ask(self, message: ClientMessage) -> DaemonMessage:
        self.socket.sendall(frame_of([message]))
        return next(self.answers)

    def _read(self) -> Iterator[DaemonMessage]:
        reader = FrameReader(DaemonMessage, "the daemon")
        while data := self.socket.recv(2**18):
            for messages in reader.feed(data):
                yield from messages


def data_slab() -> SharedSlab:
    """Number 1: bytes that a codec needs long for."""
    slab = SharedSlab(1, MIB)
    slab.memory[:] = random.Random(0).randbytes(MIB).translate(bytes(each & 15 for each in range(256)))
    return slab


# --- the loud ones ----------------------------------------------------------------------------------------------------


def has_begun() -> None:
    print(flush=True)


def in_frames(messages: list[ClientMessage]) -> bytes:
    return b"".join(frames_of([encoded(each, MAX_CLIENT_FRAME_BYTES) for each in messages], MAX_CLIENT_FRAME_BYTES))


def write(key: int, num_bytes: int) -> Write:
    return Write(key, key, 1, 0, num_bytes, "uint8", 1, "")


def repeated(data: bytes, address: str) -> None:
    send_all(Talker(address), itertools.repeat(data))


def closes(address: str) -> None:
    data = in_frames([Close()] * 100_000)
    has_begun()
    while True:
        with suppress(OSError):
            Talker(address).socket.sendall(data)


def writes_of_one_byte(address: str) -> None:
    keys = itertools.count(0, 1000)
    slab = data_slab()
    send_all(Talker(address, slab), (in_frames([write(k + n, 1) for n in range(1000)]) for k in keys))


def discards_that_wait(address: str) -> None:
    keys = itertools.count(0, 1000)
    slab = data_slab()

    def some(first: int) -> bytes:
        return in_frames([write(first + n, MIB) for n in range(8)] + [Discard(n, (first,)) for n in range(992)])

    send_all(Talker(address, slab), map(some, keys))


def as_fast_as_it_can(address: str) -> None:
    """As a training does: it frees each record that is stored, and writes another one."""
    talker, keys = Talker(address, data_slab()), itertools.count()
    talker.socket.sendall(in_frames([write(next(keys), MIB) for _ in range(6)]))
    has_begun()
    for answer in talker.answers:
        if isinstance(answer, Stored):
            discard = Discard(2**40 + answer.request, (answer.request,))
            talker.socket.sendall(in_frames([discard, write(next(keys), MIB)]))


def writes_that_queue(num_sessions: int, address: str) -> None:
    """Thousands, if the sessions are few: as many in all as a user may have."""

    def some(first: int) -> bytes:
        keys = range(first, first + 100)
        return in_frames([write(key, MIB) for key in keys] + [Discard(first, tuple(keys))])

    def parts() -> Iterator[bytes]:
        return map(some, itertools.count(0, 100))

    talkers = [Talker(address, data_slab()) for _ in range(num_sessions)]
    threads = [threading.Thread(target=send_all, args=(each, parts()), daemon=True) for each in talkers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def answers_not_read(address: str) -> None:
    """Reports of many sessions with long names; who is cut off comes again."""
    poll, talkers = select.poll(), dict[int, Talker]()

    def begin() -> None:
        talker = Talker(address, name="\U0001f600" * MOST_WORD)
        talker.socket.setblocking(False)
        talkers[talker.socket.fileno()] = talker
        poll.register(talker.socket, select.POLLOUT)

    for _ in range(NUM_DEAF):
        begin()
    has_begun()
    questions = in_frames([Inspect()] * 1000)
    while True:
        for descriptor, _ in poll.poll():
            try:
                talkers[descriptor].socket.send(questions)
            except BlockingIOError:
                pass
            except OSError:
                poll.unregister(descriptor)
                talkers.pop(descriptor).socket.close()
                begin()


def send_all(talker: Talker, parts: Iterator[bytes]) -> None:
    """Send without end; the answers are read and dropped."""

    def drop() -> None:
        while talker.socket.recv(2**18):
            pass

    threading.Thread(target=drop, daemon=True).start()
    has_begun()
    for part in parts:
        talker.socket.sendall(part)


PLAIN = "a session that writes"
"""No attack, but what the next ones can be compared with: the drive and the cores are shared with it too."""

LOUD: Mapping[str, Callable[[str], None]] = {
    "Close": closes,
    "frames without messages": partial(repeated, frame_of([]) * 2**14),
    "empty Discards": partial(repeated, in_frames([Discard(1, ())] * 10_000)),
    "Unmap": partial(repeated, in_frames([Unmap(7)] * 10_000)),
    "Inspect": partial(repeated, in_frames([Inspect()] * 1000)),
    "Discards that wait for writes": discards_that_wait,
    "records of one byte": writes_of_one_byte,
    PLAIN: as_fast_as_it_can,
    "writes that queue": partial(writes_that_queue, 5),
    "64 sessions of another user": partial(writes_that_queue, 64),
    "64 sessions of another user, zstd:19": partial(writes_that_queue, 64),
    "100 clients that do not read": answers_not_read,
}
SLOW = ("Discards that wait for writes", "64 sessions of another user, zstd:19")
OF_ANOTHER_USER = ("64 sessions of another user", "64 sessions of another user, zstd:19")


def shout(variant: str, address: str) -> None:
    if variant in OF_ANOTHER_USER:  # who may not look into the folders above the socket's
        folder, _, address = address.rpartition("/")
        os.chdir(folder)
        os.setgroups([])
        os.setuid(OTHER_UID)
    LOUD[variant](address)


# --- the quiet one ----------------------------------------------------------------------------------------------------


class Neighbour:
    def __init__(self, address: str) -> None:
        self._slab = data_slab()
        self._talker = Talker(address, self._slab)
        self._keys = itertools.count()

    def times(self) -> Figures:
        """Medians, and the longest, over `SECONDS`."""
        words, records = list[float](), list[float]()
        ends_at = time.perf_counter() + SECONDS
        while time.perf_counter() < ends_at:
            words.append(self._seconds(self._say))
            records.append(self._seconds(self._store))
        return {
            "word_seconds": statistics.median(words),
            "record_seconds": statistics.median(records),
            "longest_word_seconds": max(words),
            "longest_record_seconds": max(records),
        }

    def _seconds(self, do: Callable[[], None]) -> float:
        began_at = time.perf_counter()
        do()
        return time.perf_counter() - began_at

    def _say(self) -> None:
        self._expect(Gone, Discard(1, ()))

    def _store(self) -> None:
        key = next(self._keys)
        self._expect(Stored, write(key, RECORD_BYTES))
        self._expect(Loaded, Read(1, key, 1, 0, RECORD_BYTES))
        self._expect(Gone, Discard(1, (key,)))

    def _expect(self, kind: type[DaemonMessage], message: ClientMessage) -> None:
        if not isinstance(answer := self._talker.ask(message), kind):
            raise RuntimeError(f"the daemon answers {answer}")


BENCHMARK = Benchmark(
    name="neighbours",
    question="How much longer does a quiet client of a daemon wait beside one that sends all it can?",
    variants=tuple(LOUD),
    plotted=("word_to_quiet", "record_to_quiet"),
    goals=tuple(
        Goal(f"a quiet client's {kind}, beside {name}", f"{kind}_to_quiet", name, at_most=MOST_LATER)
        for name in LOUD
        if name != PLAIN
        for kind in KINDS
    )
    + tuple(
        Goal(f"that record, beside {name}", "record_to_quiet", name, at_most=MOST_LATER_THAN_PLAIN, of=(PLAIN,))
        for name in ("writes that queue", *OF_ANOTHER_USER[:1])
    )
    + tuple(
        Goal(f"a daemon's memory of what is documented, {name}", "daemon_to_documented", name, at_most=1)
        for name in LOUD
    ),
)


def measure(variant: str, scratch: Path) -> Figures:
    codec = "zstd:19" if variant in SLOW else "none"
    with daemon(scratch, "--codec", codec, "--grace-seconds", "0.1", "--allow-uid", str(OTHER_UID)) as served:
        if variant in OF_ANOTHER_USER:
            served.socket.parent.chmod(0o711)
            served.socket.chmod(0o666)
        address = str(served.socket)
        neighbour = Neighbour(address)
        neighbour.times()
        found: list[Figures] = []
        for _ in range(TURNS):
            _wait_until_alone(address)
            quiet = neighbour.times()
            words = command(__name__, "shout", variant, address)
            with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
                try:
                    if not process.stdout.readline():
                        raise RuntimeError(f"{variant}: it has ended (another user's needs root)")
                    time.sleep(SETTLE_SECONDS)
                    loud = neighbour.times()
                    memory = served.own_bytes / _documented_bytes(address)
                finally:
                    process.kill()
            ratios = {f"{kind}_to_quiet": loud[f"{kind}_seconds"] / quiet[f"{kind}_seconds"] for kind in KINDS}
            heard = {f"loud_{name}": each for name, each in loud.items()}
            found.append(ratios | quiet | heard | {"daemon_to_documented": memory})
    medians = {name: statistics.median(turn[name] for turn in found) for name in found[0]}
    return medians | {"daemon_to_documented": max(turn["daemon_to_documented"] for turn in found)}


def _documented_bytes(address: str) -> float:
    """What `docs/how_to/daemon.md` says that a daemon with as many connections and records needs."""
    sessions = json.loads(inspect_daemon(address, seconds=60))["sessions"]
    num_records = sum(each["num_records"] for each in sessions)
    return 70e6 + 0.2e6 * len(sessions) + 600 * num_records + 2 * 64e6


def _wait_until_alone(address: str) -> None:
    while json.loads(inspect_daemon(address, seconds=60))["num_sessions"] > 1:
        time.sleep(PAUSE_SECONDS)
