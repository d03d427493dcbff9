"""Programs that end with a store in use: `python -m tests.reliability.endings (embedded DIRECTORY | sidecar SOCKET)`.

Reads a name of `ENDINGS` a line. For each it forks a child (so torch is imported once) which opens a store and comes to
its end as an interpreter does: exit hooks, finalizers, modules taken apart. Prints the exit code and what was said.
"""

import json
import os
import sys
import tempfile

import torch

ENDINGS: dict[str, tuple[int, str]] = {
    "a graph alive, on disk": (
        0,
        """
        loss = graph()
        store.flush()
        """,
    ),
    "graphs and results in cycles": (
        0,
        """
        for _ in range(4):
            cycle = [graph()]
            cycle.append(cycle)
        handles = [store.put(torch.randn(50_000)) for _ in range(8)]
        results = [store.get(handle) for handle in handles]
        """,
    ),
    "a backward under way on a daemon thread": (
        0,
        """
        import threading
        begun = threading.Event()
        def work():
            try:
                while True:
                    graph().backward()
                    begun.set()
            except StoreClosedError:
                pass
        threading.Thread(target=work, daemon=True).start()
        begun.wait(60)
        """,
    ),
    "sys.exit in a thread with a live graph": (
        0,
        """
        import threading
        losses = []
        def work():
            losses.append(graph())
            sys.exit(3)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(60)
        """,
    ),
    "sys.exit in a hook of backward": (
        7,
        """
        import sys
        loss = graph()
        store.flush()
        weight.register_hook(lambda _: sys.exit(7))
        loss.backward()
        """,
    ),
    "writes in flight": (
        0,
        """
        handles = [store.put(torch.randn(50_000)) for _ in range(40)]
        """,
    ),
    "a store without references": (
        0,
        """
        handles = [store.put(torch.randn(50_000)) for _ in range(10)]
        del handles, store
        """,
    ),
}

PREAMBLE = """
import sys, torch
from tests.reliability.trainers import open_store
from tierstore import StoreClosedError, tiered_offload
store = open_store(KIND, ADDRESS, 0)
weight = torch.randn(600, 600, requires_grad=True)
def graph():
    with tiered_offload(store, min_bytes=0):
        return (weight.exp() * weight.sin()).cos().sum()
"""


def main() -> None:
    """Until the end of standard input; a child leaves it as a program does."""
    kind, address = sys.argv[1:]
    torch.set_num_threads(1)
    while name := sys.stdin.readline().strip():
        with tempfile.TemporaryFile() as said:
            child = os.fork()
            if child == 0:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                lines = [line.removeprefix("        ") for line in ENDINGS[name][1].splitlines()]
                sys.modules["__main__"].__dict__.update(KIND=kind, ADDRESS=address)
                exec(PREAMBLE + "\n".join(lines), sys.modules["__main__"].__dict__)
                return
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            said.seek(0)
            print(json.dumps([code, said.read().decode()]), flush=True)


if __name__ == "__main__":
    main()
