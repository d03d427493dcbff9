"""Trainers that are there to be killed: `python -m tests.reliability.trainers`.

Reads a line at a time: "embedded" or "sidecar", directories or a socket, and a state of `states.STATES`, as
a list in JSON. Directories are separated by ":". For each line it forks a child (so torch is imported once), which
opens a store of its own, says "PID reached" when it is there, and waits. When the child is gone,
this process says "gone CODE".
"""

import json
import os
import sys
import traceback

import torch

from tests.reliability.states import HELD_SECONDS, copies_for, held_at
from tierstore import TierStore
from tierstore.residency.device import Copies


def say(words: str) -> None:
    os.write(1, (words + "\n").encode())


def open_store(kind: str, address: str, host_bytes: int, copies: Copies | None = None) -> TierStore:
    if kind == "embedded":
        return TierStore(
            address.split(os.pathsep), host_bytes=host_bytes, disk_bytes="32MiB", codec="none", copies=copies
        )
    return TierStore.connect(address, host_bytes=host_bytes, name="victim", copies=copies)


def run(kind: str, address: str, what: str) -> None:
    store = open_store(kind, address, 2**30 if what == "offloading" else 0, copies_for(what))
    others = [store.put(torch.randn(200_000)) for _ in range(4)]
    store.flush()
    with held_at(store, what):
        say(f"{os.getpid()} reached")
        # Nobody lets go of it: whoever holds the loop waits so long too.
        sys.stdin.readline()
        raise AssertionError(f"not killed within {HELD_SECONDS} s: {len(others)}")


def main() -> None:
    """Until the end of standard input."""
    torch.set_num_threads(1)
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            try:
                run(*json.loads(line))
            except BaseException:  # noqa: BLE001 - told, whatever it is
                traceback.print_exc()
            os._exit(1)
        say(f"gone {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")


if __name__ == "__main__":
    main()
