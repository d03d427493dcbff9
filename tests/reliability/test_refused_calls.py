"""System calls that a filter refuses, each in turn: to an embedded store, a daemon, and its client.

The filters are real (`tests/seccomp.py`). Each case ends with the right bits, or with an error that names what was
refused: never in a hang, and never in a traceback.
"""

import errno
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import pytest

from tests.daemon.conftest import environment_of_tests
from tests.seccomp import CALLS, is_available

pytestmark = pytest.mark.skipif(not is_available(), reason="the numbers of this machine's system calls are not known")

Ask = Callable[..., tuple[str, str]]

WISHES = ("getpriority", "setpriority", "sched_getaffinity", "sched_setaffinity")
"""Refused, nothing but speed is lost."""

SAID_AS = {
    "accept": "no answer to|closed the connection|reset by peer",
    "access": "cannot be written to",
    "epoll_ctl": "register",
    "getdents": "listdir",
    "getsockopt": "reset by peer|closed the connection",
    "ioctl": "setblocking",
    "newfstatat": "examined|one in|event loop's",
    "openat": "/",
    "recvmsg": "reset by peer|closed the connection",
    "rt_sigaction": "signal.signal",
    "sendmsg": "closed the connection",
    "statfs": "statvfs",
}
"""What else a message may say of a call: Python's name for it, a path, or what the other process sees of it."""


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Has a case played (`refused_calls.py`): how it ended, and its words. One process plays all: imports are slow."""
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        line = [sys.executable, "-m", "tests.reliability.refused_calls", folder]
        with subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment_of_tests()
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            stdin, stdout = process.stdin, process.stdout

            def play(who: str, call: str, error: int) -> tuple[str, str]:
                stdin.write(json.dumps([who, call, error]) + "\n")
                stdin.flush()
                ending, words = json.loads(stdout.readline())
                return ending, words

            yield play
            stdin.close()


def _check(ask: Ask, who: str, call: str, error: int) -> None:
    ending, words = ask(who, call, error)
    case = f"{who}, {call}, {errno.errorcode[error]}: {ending}: {words}"
    if call in WISHES:
        assert ending == "answered", case
        return
    assert ending in ("answered", "refused"), case
    name = call.rstrip("0123456789")
    assert ending == "answered" or re.search(f"{name}|{SAID_AS.get(name, name)}", words), case


@pytest.mark.parametrize(
    ("who", "call"),
    [
        *(("embedded", call) for call in (*WISHES[1:3], "statfs", "madvise", "eventfd2", "pipe2", "pwritev2")),
        ("embedded", "rt_sigaction"),
        *(("daemon", call) for call in ("setpriority", "ioctl", "getdents64")),
        *(("client", call) for call in ("memfd_create", "sendmsg")),
    ],
)
def test_refused_call_ends_in_an_answer_or_in_an_error_that_names_it(ask: Ask, who: str, call: str) -> None:
    _check(ask, who, call, errno.EPERM)


@pytest.mark.many
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS], ids=["EPERM", "ENOSYS"])
@pytest.mark.parametrize("who", ["embedded", "daemon", "client"])
@pytest.mark.parametrize("call", CALLS)
def test_each_refused_call_ends_in_an_answer_or_in_an_error(ask: Ask, who: str, call: str, error: int) -> None:
    _check(ask, who, call, error)
