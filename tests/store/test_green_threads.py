"""gevent and its like put greenlets in the place of threads: a store says that it cannot work so, and never hangs."""

from pathlib import Path

import pytest

from tests.processes import python

pytest.importorskip("gevent", reason="gevent is not installed")

_PROGRAM = """
import os, sys
from gevent import monkey

def in_child(cases):
    for what, begin in cases.items():
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            try:
                print(what, begin() or "works", flush=True)
            except BaseException as error:
                print(what, type(error).__name__, error, flush=True)
            os._exit(0)
        os.waitpid(pid, 0)

def train(store=None):
    import torch, tierstore
    store = store or tierstore.TierStore(sys.argv[1], host_bytes=0)
    with store:
        inputs = torch.ones(2**18, requires_grad=True)
        with tierstore.tiered_offload(store, min_bytes=0):
            loss = (inputs * 2).exp().sum()
        store.flush()
        loss.backward()

def before_import():
    monkey.patch_all()
    train()

in_child({"before the import:": before_import})

import torch, tierstore
from tierstore.hooks.offload import tiered_offload  # all that a store needs, once for all children

def patched(begin, **which):
    def run():
        monkey.patch_all(**which)
        return begin()
    return run

def patched_while_open():
    store = tierstore.TierStore(sys.argv[1], host_bytes=0)
    try:
        patched(lambda: train(store))()
    finally:
        store.close()

in_child({
    "a store:": patched(train),
    "queues alone:": patched(train, thread=False),
    "a client:": patched(lambda: tierstore.TierStore.connect(sys.argv[1] + "/none.sock")),
    "while it is open:": patched_while_open,
    "all but threads and queues:": patched(train, thread=False, queue=False),
})
"""
_REFUSED = "a store needs the system's own threads; exclude them from monkey patching"
_SERVE = "from gevent import monkey; monkey.patch_all(); from tierstore.cli import main; main()"


@pytest.mark.slow  # a process for each way to exclude threads
def test_stores_with_greenlets_for_threads_are_refused_and_those_with_threads_work(tmp_path: Path) -> None:
    done = python("-c", _PROGRAM, tmp_path)
    words = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert words.pop("all but threads and queues", None) == "works", done.stderr
    assert "queue='gevent" in words["queues alone"]
    assert len(words) == 5
    for what, answer in words.items():
        assert answer.startswith("ConfigError "), (what, answer)
        assert _REFUSED in answer
    assert not list(tmp_path.iterdir())


def test_daemon_with_greenlets_for_threads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "drive").mkdir()
    served = python("-c", _SERVE, "serve", "--path", tmp_path / "drive", "--socket", tmp_path / "socket")
    assert served.returncode == 2
    assert _REFUSED in " ".join(served.stderr.split())
    assert not (tmp_path / "socket").exists()
