"""How long does a client of the daemon wait while another one sends as much as it can?

The quiet client frees what is not there (`word`), and stores, reads and frees 64 KiB (`record`), one request at a time.
The loud one is a process that is started for its time and killed after it; quiet and loud times take turns. Both are of
the same user, so what is measured is the share between sessions.
"""

from __future__ import annotations

import itertools
import json
import os
import random
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
MOST_LATER = 5.0  # of a quiet neighbour's round trip


class Talker:
    """A client that speaks the protocol by hand, blocking."""

    def __init__(self, address: str, slab: SharedSlab | None = None) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(address)
        self._answers = self._read()
        self.ask(Hello((VERSION,), "a benchmark"))
        self.ask(Open("a benchmark", None, os.getpid()))
        if slab is not None:
            socket.send_fds(self.socket, [frame_of([Slab(slab.number, slab.num_bytes)])], [slab.descriptor])

    def ask(self, message: ClientMessage) -> DaemonMessage:
        self.socket.sendall(frame_of([message]))
        return next(self._answers)

    def _read(self) -> Iterator[DaemonMessage]:
        reader = FrameReader(DaemonMessage, "the daemon")
        while data := self.socket.recv(2**18):
            for messages in reader.feed(data):
                yield from messages


def data_slab() -> SharedSlab:
    """Number 1: bytes that a codec needs long for."""
    slab = SharedSlab(1, MIB)
    slab.memory[:] = bytes(each & 15 for each in random.Random(0).randbytes(MIB))
    return slab


# --- the loud ones ----------------------------------------------------------------------------------------------------


def in_frames(messages: list[ClientMessage]) -> bytes:
    return b"".join(frames_of([encoded(each, MAX_CLIENT_FRAME_BYTES) for each in messages], MAX_CLIENT_FRAME_BYTES))


def write(key: int, num_bytes: int) -> Write:
    return Write(key, key, 1, 0, num_bytes, "uint8", 1, "")


def repeated(data: bytes, address: str) -> None:
    send_all(Talker(address), itertools.repeat(data))


def closes(address: str) -> None:
    data = in_frames([Close()] * 100_000)
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


def send_all(talker: Talker, parts: Iterator[bytes]) -> None:
    """Send without end; the answers are read and dropped."""

    def drop() -> None:
        while talker.socket.recv(2**18):
            pass

    threading.Thread(target=drop, daemon=True).start()
    for part in parts:
        talker.socket.sendall(part)


LOUD: Mapping[str, Callable[[str], None]] = {
    "Close": closes,
    "frames without messages": partial(repeated, frame_of([]) * 2**14),
    "empty Discards": partial(repeated, in_frames([Discard(1, ())] * 10_000)),
    "Unmap": partial(repeated, in_frames([Unmap(7)] * 10_000)),
    "Inspect": partial(repeated, in_frames([Inspect()] * 1000)),
    "Discards that wait for writes": discards_that_wait,
    "records of one byte": writes_of_one_byte,
}
SLOW = "Discards that wait for writes"


def shout(variant: str, address: str) -> None:
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
        for kind in KINDS
    ),
)


def measure(variant: str, scratch: Path) -> Figures:
    codec = "zstd:19" if variant == SLOW else "none"
    with daemon(scratch, "--codec", codec, "--grace-seconds", "0.1") as served:
        address = str(served.socket)
        neighbour = Neighbour(address)
        neighbour.times()
        found: list[Figures] = []
        for _ in range(TURNS):
            _wait_until_alone(address)
            quiet = neighbour.times()
            words = command(__name__, "shout", variant, address)
            with subprocess.Popen(words, stdin=subprocess.DEVNULL) as process:
                time.sleep(SETTLE_SECONDS)
                loud = neighbour.times()
                process.kill()
            ratios = {f"{kind}_to_quiet": loud[f"{kind}_seconds"] / quiet[f"{kind}_seconds"] for kind in KINDS}
            found.append(ratios | quiet | {f"loud_{name}": each for name, each in loud.items()})
    return {name: statistics.median(turn[name] for turn in found) for name in found[0]}


def _wait_until_alone(address: str) -> None:
    while json.loads(inspect_daemon(address, seconds=60))["num_sessions"] > 1:
        time.sleep(PAUSE_SECONDS)
