"""A process that has imported everything, and forks a child for each case that it reads.

::

    python -m tests.reliability.refused_calls FOLDER

Each line that it reads is one case in JSON: [who, call, errno]. A step is trained with a store; the call is refused to
`who` alone ("embedded", "daemon" or "client"), once everything is imported. Each line that it prints says how the case
has ended: [ending, words]. The endings are "answered" (and all bits are right), "refused" (by an error of this
package), "failed" (by another error), "hung" (until its deadline), and "died".
"""

import faulthandler
import json
import logging
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tests.seccomp import refuse
from tierstore import TierStore, tiered_offload
from tierstore.daemon.logs import set_up_logging
from tierstore.daemon.options import settings_of
from tierstore.daemon.server import serve
from tierstore.errors import TierStoreError

DEADLINE_SECONDS = 60.0
BUDGETS = {"host_bytes": 0, "staging_bytes": "8MiB", "disk_bytes": "64MiB"}
Limit = Callable[[], None]
Ending = tuple[str, str]


def main() -> None:
    """Read cases, until there are no more."""
    torch.set_num_threads(1)
    cases: dict[str, Callable[[Path, Limit], Ending]] = {
        "embedded": _embedded,
        "daemon": lambda place, limit: _connected(place, limit, lambda: None),
        "client": lambda place, limit: _connected(place, lambda: None, limit),
    }
    for line in sys.stdin:
        who, call, error = json.loads(line)
        place = Path(sys.argv[1], "case")
        (place / "drive").mkdir(parents=True)
        ending = cases[who](place, partial(refuse, call, error))
        shutil.rmtree(place)
        print(json.dumps(ending), flush=True)


def _embedded(place: Path, limit: Limit) -> Ending:
    ending = _Child(place / "embedded", lambda: _train(lambda: TierStore(place / "drive", **BUDGETS), limit)).ending()
    left = os.listdir(place / "drive")
    return ("failed", f"it has left {left}; {ending}") if left else ending


def _connected(place: Path, limit_of_daemon: Limit, limit_of_client: Limit) -> Ending:
    """A daemon, one client, then SIGTERM for the daemon; the words of both."""
    where = place / "socket"
    options = {"path": [str(place / "drive")], "socket": str(where), "disk_bytes": "64MiB"}

    def run() -> None:
        set_up_logging("info", "text")
        limit_of_daemon()
        serve(settings_of(options, {}))

    daemon = _Child(place / "daemon", run)
    if not daemon.wait_until(lambda: _takes_connections(where)):
        return daemon.ending()
    connect = partial(TierStore.connect, where, host_bytes=0, staging_bytes="8MiB", reconnect_seconds=2)
    of_client = _Child(place / "client", lambda: _train(connect, limit_of_client)).ending()
    of_daemon = daemon.ending(signal.SIGTERM)
    worst = max(of_client[0], of_daemon[0], key=("answered", "refused", "failed", "hung", "died").index)
    return worst, f"client: {of_client[1]}; daemon: {of_daemon[1]}; {(place / 'daemon').read_text()[-2000:]}"


def _train(open_one: Callable[[], TierStore], limit: Limit) -> None:
    """One step without a store, and one with it; the limit comes between."""
    torch.manual_seed(0)
    weights = [torch.randn(2**18, requires_grad=True) for _ in range(6)]
    _loss(weights).backward()
    expected = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    limit()
    with open_one() as store:
        small, large = store.put(torch.arange(5000.0)), store.put(torch.arange(2**18))
        with tiered_offload(store, min_bytes=0):
            loss = _loss(weights)
        store.flush()
        loss.backward()
        assert torch.equal(store.get(small), torch.arange(5000.0))
        assert torch.equal(store.get(large), torch.arange(2**18))
        store.stats()
    assert all(map(torch.equal, expected, [weight.grad for weight in weights]))


def _loss(weights: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([(weight * 2).sin().exp().sum() for weight in weights]).sum()


def _takes_connections(where: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(where)) == 0


class _Child:
    """A forked child that runs `run`; what it prints goes to `log`."""

    def __init__(self, log: Path, run: Callable[[], None]) -> None:
        self._log, self._told = log, log.with_suffix(".ending")
        self._pid = os.fork()
        if self._pid == 0:
            self._run(run)
        self._watch = os.pidfd_open(self._pid)

    def _run(self, run: Callable[[], None]) -> None:
        file = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        told = os.open(self._told, os.O_WRONLY | os.O_CREAT)
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        try:
            run()
            ending: Ending = "answered", ""
        except TierStoreError as error:
            ending = "refused", f"{type(error).__name__}: {error}"
        except BaseException:  # noqa: BLE001 - told
            ending = "failed", traceback.format_exc()
        logging.shutdown()
        os.write(told, json.dumps(ending).encode())
        os._exit(0)

    def wait_until(self, is_so: Callable[[], bool]) -> bool:
        """Whether it came to be so before the child has ended."""
        ends_at = time.monotonic() + DEADLINE_SECONDS
        while not is_so():
            if time.monotonic() > ends_at or select.select([self._watch], [], [], 0.01)[0]:
                return False
        return True

    def ending(self, number: int | None = None) -> Ending:
        """How it ends by itself, or by a signal; at its deadline it is killed."""
        if number is not None:
            signal.pidfd_send_signal(self._watch, number)
        has_ended = select.select([self._watch], [], [], DEADLINE_SECONDS)[0]
        if not has_ended:
            signal.pidfd_send_signal(self._watch, signal.SIGUSR1)  # the stacks of all threads
            select.select([self._watch], [], [], 1.0)
            signal.pidfd_send_signal(self._watch, signal.SIGKILL)
        os.close(self._watch)
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        said = self._told.read_bytes() if self._told.exists() else b""
        if status == 0 and said:
            ending, words = json.loads(said)
            return ending, words
        return "died" if has_ended else "hung", f"exit code {status}: {self._log.read_text()[-6000:]}"


if __name__ == "__main__":
    main()
