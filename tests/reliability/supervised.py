"""A daemon that is started again whenever it ends, as a service manager does."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

from tests.daemon.conftest import END_SECONDS, DaemonProcess, StartDaemon

MOST_STARTS = 200


class SupervisedDaemon:
    """Keeps a daemon running, from a thread of its own; `codes`: exit codes of those that ended, -11 is SIGSEGV."""

    def __init__(self, start_daemon: StartDaemon, path: Path, **options: object) -> None:
        self._start = lambda: start_daemon(path, wait=False, **options)
        self.codes: list[int] = []
        self.current = start_daemon(path, **options)
        self.logs = [self.current]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor")

    def __enter__(self) -> SupervisedDaemon:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.current.kill()
        self._thread.join(END_SECONDS)
        assert not self._thread.is_alive()

    def restart(self, number: signal.Signals = signal.SIGKILL) -> DaemonProcess:
        """End the one that runs with that signal, and wait for the next."""
        next_start = len(self.logs) + 1
        self.current.process.send_signal(number)
        return self.wait_for_start(next_start)

    def log(self) -> str:
        """What all of them have said."""
        return "".join(each.log for each in self.logs)

    def wait_for_start(self, number: int) -> DaemonProcess:
        """The daemon of that start (1: the first), or a later one, once it takes connections."""
        ends_at = time.monotonic() + END_SECONDS
        while len(self.logs) < number or not self.current._takes_connections():
            assert time.monotonic() < ends_at, f"start {number} does not come to be ready: {self.codes} {self.log()}"
            time.sleep(0.01)  # nothing announces a socket
        return self.current

    def _watch(self) -> None:
        while not self._is_over.is_set() and len(self.codes) < MOST_STARTS:
            code = self.current.process.wait()
            if self._is_over.is_set():
                return
            self.codes.append(code)
            self.current = self._start()
            self.logs.append(self.current)
