"""Processes that take turns, and a daemon beside them.

A shared machine is twice as fast in one minute as in the next. So what is compared runs at the same time, in
processes of their own, each doing its part when it is told to, while the others wait; whoever went first goes last
the next time, and the ratios of each turn count.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

from .child import command, conversation

Figures = dict[str, float]
_READY_SECONDS = 30.0


class Party:
    """One or several processes that do the same thing at the same time, by their name in the results."""

    def __init__(self, name: str, processes: Sequence[subprocess.Popen[str]]) -> None:
        self.name = name
        self._processes = processes

    def do(self, what: str) -> list[Figures]:
        """Have all of them carry it out; the figures of each. Blocks until the last is done. Raises RuntimeError: one
        of them ended."""
        for process in self._processes:
            print(what, file=process.stdin, flush=True)
        lines = [process.stdout.readline() for process in self._processes]
        if not all(lines):
            raise RuntimeError(f"{self.name}: a process ended during {what!r}")
        return [json.loads(line) for line in lines]


@contextmanager
def party(name: str, module: str, requests: Sequence[Sequence[object]]) -> Iterator[Party]:
    """Start a process for each request, which calls the function `work` of the module with it."""
    with ExitStack() as stack:
        words = [command(module, "work", *request) for request in requests]
        yield Party(name, [stack.enter_context(conversation(each)) for each in words])


def turns(parties: Sequence[Party], what: str, num_turns: int) -> list[dict[str, list[Figures]]]:
    """So many turns of every party, one at a time, the first last the next time; the figures of each, by its name."""
    orders = (parties if turn % 2 else parties[::-1] for turn in range(num_turns))
    return [{each.name: each.do(what) for each in order} for order in orders]


def lap_of(move: Callable[[], object]) -> Figures:
    """Seconds of the clock, those of all cores in this process, and how often a thread of it has begun to wait."""
    waits_before = getrusage(RUSAGE_SELF).ru_nvcsw
    started, cpu_started = time.perf_counter(), time.process_time()
    move()
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "waits": getrusage(RUSAGE_SELF).ru_nvcsw - waits_before}


class Daemon:
    """A living one, and the socket where it listens."""

    def __init__(self, process: subprocess.Popen[bytes], socket: Path) -> None:
        self.socket = socket
        self._process = process

    @property
    def cpu_seconds(self) -> float:
        """What all of its threads have used, in steps of a clock tick (proc_pid_stat(5), utime and stime)."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def own_bytes(self) -> int:
        """Resident memory that it has allocated itself: without the clients', which it maps (proc_pid_status(5))."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) * 1024


@contextmanager
def daemon(directory: Path, *arguments: str) -> Iterator[Daemon]:
    """`tierstore serve` on that directory; ends with the block, with SIGTERM. Raises RuntimeError: it did not start."""
    place = directory / "daemon"
    place.mkdir()
    address = place / "s" / "socket"
    words = [sys.executable, "-m", "tierstore.cli", "serve", "--path", str(place), "--socket", str(address)]
    with subprocess.Popen([*words, "--log-level", "warning", *arguments]) as process:
        try:
            _wait_until_it_listens(process, address)
            yield Daemon(process, address)
        finally:
            process.terminate()


def _wait_until_it_listens(process: subprocess.Popen[bytes], address: Path) -> None:
    ends_at = time.monotonic() + _READY_SECONDS
    while process.poll() is None and time.monotonic() < ends_at:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(address))
            except OSError:
                time.sleep(0.01)
            else:
                return
    raise RuntimeError("the daemon did not start")
